"""--dry-run: what a run would take of text, memory, FLOPs and seconds; nothing is made.

    python train.py --curriculum seqlen --pack --dry-run

The plan is walked without training: step by step, or for a run that reads much text in some steps
spread evenly over it, each of which stands for its neighbours. Then three real micro-batches are
timed, the cheapest, the middle and the dearest by their FLOPs; the seconds of the others are read
off the line through these. An update of the weights, a few held-out rows and a part of a checkpoint
are timed besides, and a run is the sum. Not counted: what comes before the first step, compiling,
and the sample at the end.

    python train.py --size 1.3B --dry-run --on 8xH100 --mfu 0.4

Nothing is timed for a machine that is not here (--on), nor where a micro-batch would take long: the
run's FLOPs are divided by a share of the peak, --mfu, of what it executes. That share covers what
ranks say to each other; evaluations and checkpoints are left out. What does not fit the memory is
planned once more with what makes it smaller (`Cures`).

train.main calls `DryRun.show` in place of training, and `outlook` where a run starts. Steps come
from plan.py, their FLOPs from support/step/flops.py, memory from support/step/memory.py.
"""

import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from config import Config, build
from data import Data
from evaluate import Evaluation
from model import TransformerConfig
from plan import Plan, Step
from support.base.clock import Clock, blocks_at
from support.base.numbers import duration, several, short
from support.base.runtime import Runtime, peak_memory
from support.base.settings import flattened, settings_of
from support.base.technique import techniques_of, techniques_on
from support.evaluation.scoring import evaluating
from support.run import checkpoint
from support.run.run import Run
from support.step import machine
from support.step.flops import Work, flops_of_step, work_of
from support.step.memory import (
    ROOM,
    Memory,
    MicroBatch,
    bytes_free,
    in_words,
    memory_of,
    micro_batch,
)
from support.step.optim import learning_rate
from support.step.placement import MIB, Away, Placement, shown
from support.step.sizes import empty_model, parameters_in_words
from support.weights.initial import initial_model

if TYPE_CHECKING:
    from train import Trainer

WALKED_TOKENS = 20_000_000  # a run that reads more is not walked step by step
SAMPLED_STEPS = 100  # of such a run
PLAIN_STEPS = 16  # of the same run without techniques
OUTLOOK_STEPS = 8  # of a run that starts
FEW_MOVES = 5  # of a curriculum
MANY_EPOCHS = 4  # arXiv 2305.16264: up to these, repeated text is about as good as new text

LONG = 60.0  # seconds, by estimate: if micro-batches take longer, none is timed
TURNS = 20  # a micro-batch is timed so often at most,
SECONDS = 10.0  # and all three together for about so long
SAVED_BYTES = 1 << 28  # written to time a checkpoint


# ---- the walk


class Point(NamedTuple):
    """A step of the plan, and what it costs."""

    step: Step  # without its batch
    stands_for: float  # steps
    rows: int  # on all ranks
    seq_len: int
    flops: int
    parts: int  # micro-batches of a rank
    part_flops: float  # of one, forward and backward


def walk(
    plan: Plan, work_at: Callable[[Step], Work], start: Clock, samples: int | None = None
) -> list[Point]:
    """Plan the steps from this clock on.

    Args: work_at how a step is carried out
          samples steps to plan, each in the middle of its share of the tokens; None: all, or
                  SAMPLED_STEPS of a long run
    """
    budget = plan.settings.optim.tokens
    left = max(budget - start.consumed_tokens, 0)
    if samples is None and left > WALKED_TOKENS:
        samples = SAMPLED_STEPS
    gap = max(left // samples, 1) if samples else 0  # tokens from one planned step to the next
    clock, points = ahead(start, gap // 2) if gap else start, []
    hidden = not plan.runtime.is_rank0 or None
    with tqdm(total=left, desc="planning", leave=False, disable=hidden) as bar:
        while clock.consumed_tokens < budget:
            step = plan(clock)
            consumed = step.after.consumed_tokens - clock.consumed_tokens
            stands_for = gap / consumed if gap else 1
            points.append(point_of(plan.settings, step, stands_for, work_at(step)))
            bar.update(min(gap or consumed, left - bar.n))
            clock = ahead(clock, gap, stands_for, step.pieces) if gap else step.after
    return points


def ahead(clock: Clock, tokens: int, steps: float = 0, pieces: int = 0) -> Clock:
    """The clock after `tokens` more consumed tokens, in `steps` steps of `pieces` pieces each."""
    consumed = clock.consumed_tokens + tokens
    first_draw = clock.cursor.first_draw + round(steps * pieces)
    cursor = clock.cursor._replace(row=0, drawn_at_tokens=consumed, first_draw=first_draw)
    return clock._replace(step=clock.step + round(steps), consumed_tokens=consumed, cursor=cursor)


def point_of(settings: Config, step: Step, stands_for: float, work: Work) -> Point:
    rows, T = len(step.laid.offsets) - 1, step.batch.tokens.shape[1]
    flops = flops_of_step(settings, work, step).executed
    parts = -(-rows // (work.world_size * work.rows_at_once * (work.seq_len // T)))
    return Point(
        step=step._replace(batch=None, predicted=None, laid=None),
        stands_for=stands_for,
        rows=rows,
        seq_len=T,
        flops=flops,
        parts=parts,
        part_flops=(flops - work.optimizer) / work.world_size / parts,
    )


def total(points: list[Point], of: Callable[[Point], float] = lambda point: 1) -> float:
    """The sum over the steps that these stand for; without `of`, their number."""
    return sum(point.stands_for * of(point) for point in points)


def tokens_read(p: Point) -> int:
    return p.step.after.real_tokens - p.step.before.real_tokens


def flops_of(p: Point) -> int:
    return p.flops


def real_tokens(points: list[Point]) -> int:
    return round(total(points, tokens_read))


# ---- what is said


def outlook(run: Run, plan: Plan) -> str:
    """Two lines for the start of a run, from a few steps of its plan."""
    points = walk(plan, lambda step: run.trainer.work, run.clock, OUTLOOK_STEPS)
    rate = f" of {short(run.peak.flops, 'FLOP/s')}" if run.peak.flops else ""
    lines = [
        repeated(points, run.store.meta),
        hardly_moves(points, plan),
        f"about {math.ceil(total(points)):,} steps, {epochs(points, run.store.meta)}",
        f"{work_in_words(points, [])}; peak{rate}: {run.peak.why}",
    ]
    settings = plan.settings
    if techniques_on(settings) and run.clock.step == 0:
        model, rows = run.trainer.model.config, run.trainer.rows_at_once
        work = work_of(plain(settings), run.runtime, model, rows, blocks=model.layers)
        without = Plan(plain(settings), plan.store, plan.special_ids, plan.runtime)
        first = walk(without, lambda step: work, run.clock, 1)
        equal = partial(proportional, settings.optim.tokens, points, first)
        lines.append(as_plain(text=equal(tokens_read), flops=equal(flops_of)))
    return "\n".join(filter(None, lines))


def plain(settings: Config) -> Config:
    """The same without techniques."""
    off = {name: entry.settings() for name, entry in techniques_of(settings).items()}
    return replace(settings, **off)


def epochs(points: list[Point], meta: dict) -> str:
    """Example: 0.29 epochs of 2,744,745 training tokens"""
    passes = real_tokens(points) / max(meta["train_tokens"], 1)
    shown = f"{passes:,.2f}" if passes > 0.1 else f"{passes:.1g}"
    return f"{shown} epochs of {meta['train_tokens']:,} training tokens"


def repeated(points: list[Point], meta: dict) -> str:
    """A warning, if the run reads its text too often."""
    passes = real_tokens(points) / max(meta["train_tokens"], 1)
    if passes <= MANY_EPOCHS:
        return ""
    return red(
        f"{passes:,.0f} epochs: text that is read more than {MANY_EPOCHS} times teaches less and"
        " less (arXiv 2305.16264): prepare more, or lower --tokens"
    )


def hardly_moves(points: list[Point], plan: Plan) -> str:
    """A warning, if a run is too short for its curriculum."""
    times = math.ceil(total(points) / plan.window_steps)
    if not plan.curriculum or plan.window_steps == 1 or times > FEW_MOVES:
        return ""
    return (
        f"--curriculum moves once in about {plan.window_steps} packed steps, here at most"
        f" {several(times, 'time')}: a smaller --batch-tokens moves it more often"
    )


def red(words: str) -> str:
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\033[31m{words}\033[0m" if is_colored else words


def work_in_words(points: list[Point], plain: list[Point]) -> str:
    flops, without = (round(total(of, lambda p: p.flops)) for of in (points, plain))
    words = f"work: about {short(flops, 'FLOP')} in matrix products"
    if not without:
        return words
    return f"{words}, {flops / without:.2f} times the {short(without, 'FLOP')} without techniques"


def shapes(points: list[Point]) -> str:
    """Example: shapes of a step: 8 rows of 256, 16 tokens kept (90%); 8 rows of 256 (10%)"""
    shares: Counter = Counter()
    for p in points:
        kept = f", {p.step.kept_tokens} tokens kept" if p.step.kept_tokens < p.seq_len else ""
        shares[f"{p.rows} rows of {p.seq_len}{kept}"] += p.stands_for
    named = [f"{name} ({count / shares.total():.0%})" for name, count in shares.items()]
    if len(named) > 8:
        named[4:-4] = [f"{len(named) - 8} more"]
    return f"shapes of a step: {'; '.join(named)}"


def table(points: list[Point], settings: Config, lines: int = 10) -> str:
    """The schedules at places spread evenly over the run, and in its last step."""
    begins, budget = [p.step.before.consumed_tokens for p in points], settings.optim.tokens
    places = np.linspace(begins[0], budget, lines, endpoint=False)
    chosen = {*(np.searchsorted(begins, places, side="right") - 1), len(points) - 1}
    said = ["progress         consumed        lr  piece    row   kept   rows  difficulty"]
    for number in sorted(chosen):
        p, step = points[number], points[number].step
        levels = (
            f"{name.removeprefix('difficulty_')} {x:g}" for name, x in step.difficulty.items()
        )
        place = f"{begins[number] / budget:8.1%}  {begins[number]:15,}"
        lr = f"{learning_rate(settings, step.before, step.after):8.2e}"
        row = f"{step.max_piece_len:6} {p.seq_len:6} {step.kept_tokens:6} {p.rows:6}"
        said.append(f"{place}  {lr} {row}  {', '.join(levels)}".rstrip())
    return "\n".join(said)


def seconds_in_words(seconds: dict[str, float], plain: dict[str, float]) -> str:
    """A run's seconds by purpose, and compared with the plain run's."""
    in_all, without = sum(seconds.values()), sum(plain.values())
    parts = (f"{what} {f'{n:,.1f} s' if n else 'not timed'}" for what, n in seconds.items())
    longer = f" ({duration(in_all)})" if in_all >= 60 else ""
    words = f"time: about {in_all:,.1f} s{longer}: {', '.join(parts)}"
    if not without:
        return words
    return f"{words}; {in_all / without:.2f} times the {without:,.1f} s without techniques"


# ---- seconds


def picks(points: list[Point]) -> list[Point]:
    """Steps of the cheapest, the middle and the dearest micro-batch, in the order of the run."""
    by_cost = sorted(points, key=lambda p: p.part_flops)
    differing = {p.part_flops: p for p in (by_cost[0], by_cost[len(by_cost) // 2], by_cost[-1])}
    return sorted(differing.values(), key=lambda p: p.step.before)


def seconds_of_steps(points: list[Point], parts: dict[float, float], update: float) -> float:
    """Args: parts seconds of some micro-batches, by their FLOPs"""
    known = sorted(parts)
    seconds = [parts[flops] for flops in known]
    return total(points, lambda p: p.parts * np.interp(p.part_flops, known, seconds) + update)


def due_at(settings: Config, start: int, *every: int) -> set[int]:
    """Consumed tokens at which something is due by one of these intervals, and the budget's end.

    A checkpoint is due with every evaluation, as if each were the best so far.
    """
    budget = settings.optim.tokens
    return {budget}.union(*(range(start // n * n + n, budget, n) for n in every if n))


def saving_seconds(state: dict, folder: Path) -> float:
    """How long a checkpoint takes, from writing as many bytes, or a part of them."""
    size = checkpoint.tensor_bytes(state)
    blank = torch.zeros(min(size, SAVED_BYTES) // 4)
    beside = next(parent for parent in folder.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(dir=beside) as place:
        began = time.perf_counter()
        checkpoint.save(place, {"model": {"blank": blank}}, step=0)
        return (time.perf_counter() - began) * size / blank.nbytes


# ---- what would be as the plain run, and what would fit


def with_tokens(settings: Config, tokens: int) -> Config:
    """The same with another --tokens; what followed from --tokens follows again."""
    flat, known = flattened(settings), settings_of(Config)
    kept = dict(flat)
    for name, value in flat.items():
        if value is not None and known[name].field.default is None:
            others = {other: flat[other] for other in flat if other != name}
            if flattened(build(others, will_run=False))[name] == value:
                del kept[name]
    return build({**kept, "optim.tokens": tokens}, will_run=False)


def proportional(
    budget: int, points: list[Point], unchanged: list[Point], of: Callable[[Point], float]
) -> int:
    """The --tokens at which a sum over the run is that of the plain run, if it grows with them."""
    return round(budget * total(unchanged, of) / total(points, of))


def as_plain(text: int, flops: int) -> str:
    """Example: --tokens 581K reads as much text as the plain run, --tokens 655K takes its FLOPs"""
    read, work = (short(tokens).replace(" ", "") for tokens in (text, flops))
    return f"--tokens {read} reads as much text as the plain run, --tokens {work} takes its FLOPs"


# What makes a run smaller, in the order in which one would try it.
CURES = ("optim.micro_batch_size", "run.fsdp", "run.checkpoint_activations", "offload.on")


# ---- all together


class DryRun(NamedTuple):
    """What a run would take from where it stands; `assemble` and `next_trainer` as in train.py."""

    run: Run
    settings: Config  # of the run, or with more switched on to fit
    runtime: Runtime  # of the run, or of the machine of --on
    data: Data
    evaluation: Evaluation  # on the way
    last: Evaluation
    shape: TransformerConfig
    placement: Placement | None
    batches: MicroBatch
    memory: Memory  # by estimate
    assemble: Callable[..., "Trainer"]
    next_trainer: Callable[["Trainer", Step], "Trainer"]

    def show(self) -> int:
        """Print it; returns the exit status."""
        run, memory, s, there = self.run, self.memory, self.settings, self.runtime
        say, free, points = run.runtime.say, bytes_free(there), self.walked(s)
        if points and (warning := repeated(points, run.store.meta)):
            say(warning)
        if points and (warning := hardly_moves(points, self.plan(s))):
            say(warning)
        say(f"{s.model.model} {s.model.size}: {parameters_in_words(self.shape)}, {there.why}")
        fits = free is None or memory.on_device <= free
        verdict = "" if free is None else ", which fits" if fits else ", which DOES NOT FIT"
        say(f"memory, by estimate: {in_words(memory, free)}{verdict}")
        say(f"batches: {self.batches.why}")
        if not points:
            say("steps: none are left, only the last evaluation")
            return 0
        is_sampled = points[0].stands_for != 1
        about = f", estimated from {len(points)}" if is_sampled else ""
        pieces = round(total(points, lambda p: p.step.pieces))
        say(
            f"steps: {math.ceil(total(points)):,}{about}; {pieces:,} pieces of text,"
            f" {real_tokens(points):,} tokens, {epochs(points, run.store.meta)}"
        )
        say(shapes(points))
        without, unchanged = plain(s), []
        if techniques_on(s):
            unchanged = self.walked(without, PLAIN_STEPS if is_sampled else None)
            steps = math.ceil(total(unchanged))
            say(f"without techniques: {steps:,} steps, {real_tokens(unchanged):,} tokens")
            if run.clock.step == 0:
                equal = partial(self.tokens_as_plain, points, unchanged)
                say(as_plain(text=equal(tokens_read), flops=equal(flops_of)))
        say(work_in_words(points, unchanged))
        say(f"\n{table(points, s)}\n")
        if not fits:
            say("\n".join(self.remedies(free, PLAIN_STEPS if is_sampled else None)))
        peak = machine.peak(there)
        timed = 2 * sum(p.part_flops for p in picks(points)) * there.world_size  # once to warm up
        is_long = peak.flops is not None and timed / peak.flops > LONG
        if isinstance(there, machine.Elsewhere) or (is_long and fits):
            seconds = self.assumed(points)
            rate = f"--mfu {self.mfu:g} of {short(peak.flops, 'FLOP/s')} ({peak.why})"
            sent = ", with the time in which devices wait for each other" * (there.world_size > 1)
            say(f"time, assumed and not measured: {seconds} at {rate}{sent}")
        elif not fits:
            say("time: unknown, because by estimate not even a micro-batch fits this memory")
        else:
            self.say_measured(points, unchanged, free)
        return 0

    @property
    def mfu(self) -> float:
        return self.settings.run.mfu or machine.MFU.get(self.runtime.device.type, 1.0)

    def say_measured(self, points: list[Point], unchanged: list[Point], free: int | None) -> None:
        """Time some micro-batches, and some without techniques if there are any."""
        runtime, memory, s = self.runtime, self.memory, self.settings
        seconds, peak = self.timed(s, points)
        is_cpu = runtime.device.type == "cpu"
        owner = "this process, Python and torch included" if is_cpu else "the device"
        room = "" if free is None else f"; {free / 1e9:,.2f} GB were free"
        peak_in_words = f"at most {peak / 1e9:,.3f} GB of {owner}{room}"
        runtime.say(f"memory, measured in a few micro-batches: {peak_in_words}")
        fits = free is None or memory.on_device + memory.away <= free
        others = self.timed(plain(s), unchanged)[0] if unchanged and fits else {}
        runtime.say(seconds_in_words(seconds, others))
        if unchanged and not fits:
            runtime.say("time without techniques: unknown, because by estimate it does not fit")
        if s.run.compile == "on" or (s.run.compile == "auto" and not is_cpu):
            runtime.say("--compile: the seconds before the first step are not included")

    def assumed(self, points: list[Point]) -> str:
        """How long it takes at --mfu of the peak, and the copies of --offload besides.

        Example: about 1 d 16 h, 323.2 device-hours
        """
        there, peak, copies = self.runtime, machine.peak(self.runtime), ""
        if peak.flops is None:
            return "time unknown"
        seconds = total(points, flops_of) / (peak.flops * self.mfu)
        if self.placement and isinstance(there, machine.Elsewhere):
            tokens = self.batches.count * self.settings.data.seq_len
            traffic = self.placement.traffic(tokens, max(p.parts for p in points))
            copying = total(points) * (traffic.to_host + traffic.to_device) / there.link
            seconds += copying
            copies = f", {duration(copying)} of them copies of --offload"
        hours = seconds / 3600 * there.world_size
        return f"about {duration(seconds)}{copies}, {hours:,.1f} device-hours"

    def remedies(self, free: int, samples: int | None) -> Iterator[str]:
        """What each of `CURES` would change, and the first of their combinations that fits.

        Args: samples as of `walk`
        """
        s, there, is_found = self.settings, self.runtime, False
        is_useful = (
            s.optim.micro_batch_size not in (None, 1),
            there.world_size > 1 and not s.run.fsdp,
            not s.run.checkpoint_activations,
            there.device.type != "cpu" and not s.offload.on,
        )
        useful = list(compress(CURES, is_useful))
        counts = range(1, len(useful) + 1)
        yield "to make it smaller:"
        for names in chain.from_iterable(combinations(useful, count) for count in counts):
            is_single = len(names) == 1
            if is_found and not is_single:
                return
            flags = " ".join(settings_of(Config)[name].flag for name in names)
            try:
                changed = self.with_cures(names, free)
            except ValueError as error:
                if is_single:
                    yield f"  {flags} cannot: {error}"
                continue
            size, c = changed.memory.on_device, changed.settings
            if is_single or size <= free:
                flags = flags.replace("--offload", f"--offload --offload-budget {c.offload.budget}")
                flags = flags.replace("batch-size", f"batch-size {changed.batches.count}")
                host = changed.placement and f" and {shown(changed.placement.host_bytes)} of a host"
                verdict = "fits" if size <= free else "does not fit"
                seconds = changed.assumed(changed.walked(c, samples))
                yield f"  {flags} {verdict}: {size / 1e9:,.2f} GB{host or ''}, {seconds}"
            is_found = is_found or size <= free
        if not is_found:
            yield "  nothing of it makes this run fit: take a larger device, or a smaller model"

    def with_cures(self, names: tuple[str, ...], free: int) -> "DryRun":
        """The run with these switched on; ValueError where they are refused."""
        flat = flattened(self.settings) | dict.fromkeys(names, True)
        if "optim.micro_batch_size" in names:
            flat["optim.micro_batch_size"] = None
        if "offload.on" in names:  # gets what the rest leaves of the memory
            rest = self.with_cures(tuple(n for n in names if n != "offload.on"), free).memory
            rest = rest.on_device - rest.weights - rest.gradients - rest.optimizer
            flat["offload.budget"] = f"{max(int(ROOM * free) - rest, MIB) // MIB}MiB"
        s, there, placement = build(flat), self.runtime, None
        if s.offload.on:
            place = techniques_of(s)["offload"].placement
            placement = place(s, empty_model(self.shape), there)
        batches = micro_batch(s, there, self.shape, placement)
        memory = memory_of(s, there, batches.count, self.shape, placement)
        return self._replace(settings=s, placement=placement, batches=batches, memory=memory)

    def tokens_as_plain(
        self, points: list[Point], unchanged: list[Point], of: Callable[[Point], float]
    ) -> int:
        """`proportional`, planned with that many tokens and corrected where schedules are fixed."""
        tokens = self.settings.optim.tokens
        for _ in range(3):
            tokens = proportional(tokens, points, unchanged, of)
            points = self.walked(with_tokens(self.settings, tokens), PLAIN_STEPS)
            if math.isclose(total(points, of), total(unchanged, of), rel_tol=0.005):
                break
        return tokens

    def plan(self, settings: Config) -> Plan:
        return Plan(settings, self.data.store, self.data.special_ids, self.runtime)

    def walked(self, settings: Config, samples: int | None = None) -> list[Point]:
        is_moved = self.placement and not settings.run.fsdp
        parts = self.placement.parts if is_moved else ()
        away = (part.layers for part in parts if part.away == Away.WEIGHTS)
        streamed = [layer for layers in away for layer in layers]

        def work_at(step: Step) -> Work:
            blocks = blocks_at(settings, step.context)
            rows = self.batches.count
            return work_of(settings, self.runtime, self.shape, rows, blocks, streamed)

        return walk(self.plan(settings), work_at, self.run.clock, samples)

    def timed(self, s: Config, points: list[Point]) -> tuple[dict[str, float], int]:
        """Time what a run consists of, on all ranks alike.

        Returns: seconds by purpose; the peak in bytes of the device, or on a CPU of this process
        """
        runtime, picked, plan = self.runtime, picks(points), self.plan(s)
        if runtime.is_rank0:
            each = short(picked[-1].part_flops, "FLOP")
            said = f"timing micro-batches, the last of {each}, and an evaluation"
            print(f"{said}: a minute or two at most", file=sys.stderr, flush=True)
        trainer = self.assemble(s, model=initial_model(self.shape, s))  # its weights will move
        is_cuda, hidden = runtime.device.type == "cuda", not runtime.is_rank0 or None

        def now() -> float:
            """Once the device has done what it was given."""
            if is_cuda:
                torch.cuda.synchronize(runtime.device)
            return time.perf_counter()

        if is_cuda:
            torch.cuda.reset_peak_memory_stats(runtime.device)
        with suppress(OSError):  # where it is not allowed, the peak is the process's so far
            Path("/proc/self/clear_refs").write_text("5")
        parts, updates = {}, []
        for number, point in enumerate(tqdm(picked, desc="timing", leave=False, disable=hidden)):
            step = plan(point.step.before)
            trainer = self.next_trainer(trainer, step)
            # two, where there are more: a second one finds gradients there, and takes more memory
            together = min(point.parts, 2)
            cut = step.part(slice(0, together * trainer.rows_together(step)))
            if number == 0:  # takes what only a process's first step takes
                trainer.step(cut.part(slice(0, 1)))
            taken, is_enough = [], False
            while not is_enough:
                began = now()
                loss = trainer.gradients(cut)
                taken.append(now() - began)
                trainer.update(cut, loss)
                updates.append(now() - began - taken[-1])
                is_long = sum(taken) > SECONDS / len(picked) or len(taken) == TURNS
                is_enough = runtime.on_any_rank(is_long)
            parts[point.part_flops] = statistics.median(taken) / together
        text = self.evaluation.parts[0].pieces
        rows = range(min(trainer.rows_at_once, len(text.rows)))
        with evaluating(trainer.model), torch.no_grad(), runtime.autocast():
            self.evaluation.nats(trainer.model, runtime, text.read(rows[:1]))
            began = now()
            self.evaluation.nats(trainer.model, runtime, text.read(rows))
            of_row = (now() - began) / len(rows) / runtime.world_size
        peak = peak_memory(runtime.device)
        start, every = self.run.clock.consumed_tokens, s.run.eval_every
        evaluations = len(due_at(s, start, every)) if every else 0
        seconds = {
            "steps": seconds_of_steps(points, parts, statistics.median(updates)),
            "evaluations": of_row
            * (evaluations * self.evaluation.rows_in_all + self.last.rows_in_all),
            "checkpoints": 0.0,  # not timed with --fsdp, nor on other ranks
        }
        if runtime.is_rank0 and not s.run.fsdp:
            folder = self.run.folder or Path(s.run.out or "runs/new")
            saves = len(due_at(s, start, every, s.run.checkpoint_every))
            seconds["checkpoints"] = saves * saving_seconds(trainer.state(), folder)
        return seconds, max(runtime.gather(peak))
