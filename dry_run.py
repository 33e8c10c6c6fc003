"""--dry-run: what a run would take of text, memory, FLOPs and seconds; nothing is made.

    python train.py --curriculum seqlen --pack --dry-run

The plan is walked without training: step by step, or for a run that reads much text in some steps
spread evenly over it, each of which stands for its neighbours. Then a few real micro-batches are
timed, from the cheapest to the dearest by their FLOPs; the seconds of the others are read off the
line through these. An update of the weights, a few held-out rows and a part of a checkpoint are
timed besides, and a run is the sum. Not counted: what comes before the first step, compiling, and
the sample at the end.
"""

import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from config import Config
from data import Data
from evaluate import Evaluation
from model import Transformer, TransformerConfig
from plan import Plan, Step
from support.base.clock import Clock, blocks_at
from support.base.numbers import duration, short
from support.base.runtime import Runtime, resident
from support.base.settings import techniques_of, techniques_on
from support.evaluation.scoring import evaluating
from support.run import checkpoint
from support.run.run import Run
from support.step.flops import Work, flops_of_step, work_of
from support.step.memory import Memory, MicroBatch, bytes_free, in_words
from support.step.optim import learning_rate
from support.step.placement import Away, Placement
from support.step.sizes import parameter_count
from support.weights.initial import initial_model

if TYPE_CHECKING:
    from train import Trainer

WALKED_TOKENS = 20_000_000  # a run that reads more is not walked step by step
SAMPLED_STEPS = 100  # of such a run
PLAIN_STEPS = 16  # sampled from the same run without techniques, if that run is sampled
OUTLOOK_STEPS = 8  # sampled when a run starts
MANY_EPOCHS = 4  # arXiv 2305.16264: up to these, repeated text is about as good as new text
HEAD = ("progress", "consumed", "lr", "piece", "row", "kept", "rows", "difficulty")

PICKS = 6  # micro-batches of different cost that are timed
TURNS = 20  # each is timed so often at most,
SECONDS = 10.0  # and all of them together for so long
ALIKE = 1.02  # micro-batches whose FLOPs differ less count as one
SAVED_BYTES = 1 << 28  # written to time a checkpoint


# ---- the walk


class Point(NamedTuple):
    """A step of the plan, without its batch."""

    clock: Clock  # before it
    stands_for: float  # steps
    rows: int  # on all ranks
    seq_len: int
    kept_tokens: int
    max_piece_len: int
    difficulty: dict[str, float]
    lr: float
    part_flops: float  # of one micro-batch of a rank, forward and backward
    parts: int  # micro-batches of a rank


class Forecast(NamedTuple):
    """All steps that are ahead, added up."""

    points: list[Point]
    steps: int
    real_tokens: int
    pieces: int
    flops: int
    is_sampled: bool


def walk(
    plan: Plan, work_at: Callable[[Step], Work], start: Clock, samples: int | None = None
) -> Forecast:
    """Plan the steps from this clock on.

    Args: work_at how a step is carried out
          samples steps to plan, spread evenly; None: all, or SAMPLED_STEPS of a long run
    """
    settings, budget = plan.settings, plan.settings.optim.tokens
    left = max(budget - start.consumed_tokens, 0)
    if samples is None and left > WALKED_TOKENS:
        samples = SAMPLED_STEPS
    clock, points = start, []
    steps = real_tokens = pieces = flops = 0.0
    hidden = not plan.runtime.is_rank0 or None
    with tqdm(total=left, desc="planning", leave=False, disable=hidden) as bar:
        while len(points) != samples and clock.consumed_tokens < budget:
            if samples:
                consumed = start.consumed_tokens + int((len(points) + 0.5) * left / samples)
                clock = start._replace(
                    step=start.step + int(steps),
                    consumed_tokens=consumed,
                    window_tokens=consumed,
                    window_row=0,
                    samples_drawn=start.samples_drawn + int(pieces),
                )
            step = plan(clock)
            consumed = step.after.consumed_tokens - clock.consumed_tokens
            share = left / samples / consumed if samples else 1
            work = work_at(step)
            executed = flops_of_step(settings, work, step).executed
            points.append(point_of(settings, work, step, share, executed))
            steps += share
            pieces += share * step.pieces
            real_tokens += share * (step.after.real_tokens - step.before.real_tokens)
            flops += share * executed
            bar.update(min(share * consumed, left - bar.n))
            clock = clock if samples else step.after
    return Forecast(
        points=points,
        steps=math.ceil(steps),
        real_tokens=round(real_tokens),
        pieces=round(pieces),
        flops=round(flops),
        is_sampled=samples is not None,
    )


def point_of(settings: Config, work: Work, step: Step, share: float, flops: int) -> Point:
    rows, T = len(step.laid.offsets) - 1, step.batch.tokens.shape[1]
    of_rank = -(-rows // work.world_size)
    parts = -(-of_rank // (work.rows_at_once * (work.seq_len // T)))
    return Point(
        clock=step.before,
        stands_for=share,
        rows=rows,
        seq_len=T,
        kept_tokens=step.kept_tokens,
        max_piece_len=step.max_piece_len,
        difficulty=step.stage,
        lr=learning_rate(settings, step.before, step.after),
        part_flops=(flops - work.optimizer) / work.world_size / parts,
        parts=parts,
    )


def outlook(run: Run, plan: Plan) -> str:
    """Two lines for the start of a run, from a few steps of its plan."""
    ahead = walk(plan, lambda step: run.trainer.work, run.clock, OUTLOOK_STEPS)
    rate = f" of {short(run.peak.flops, 'FLOP/s')}" if run.peak.flops else ""
    return (
        f"about {ahead.steps:,} steps, {epochs(ahead.real_tokens, run.store.train_tokens)}\n"
        f"{work_in_words(ahead)}; peak{rate}: {run.peak.why}"
    )


# ---- the words


def epochs(real_tokens: int, train_tokens: int) -> str:
    """Example: 0.29 epochs of 2,744,745 training tokens"""
    passes = real_tokens / max(train_tokens, 1)
    shown = f"{passes:.2f}" if passes > 0.1 else f"{passes:.1g}"
    words = f"{shown} epochs of {train_tokens:,} training tokens"
    if passes <= MANY_EPOCHS:
        return words
    return (
        f"{words}. Text that is read more than {MANY_EPOCHS} times teaches less and less"
        " (arXiv 2305.16264): prepare more, or lower --tokens"
    )


def shapes(forecast: Forecast) -> str:
    """Example: shapes of a step: 8 rows of 256, 16 tokens kept (90%); 8 rows of 256 (10%)"""
    shares: Counter = Counter()
    for point in forecast.points:
        kept = f", {point.kept_tokens} tokens kept" if point.kept_tokens < point.seq_len else ""
        shares[f"{point.rows} rows of {point.seq_len}{kept}"] += point.stands_for
    named = [f"{name} ({count / shares.total():.0%})" for name, count in shares.items()]
    if len(named) > 8:
        named[4:-4] = [f"{len(named) - 8} more"]
    return f"shapes of a step: {'; '.join(named)}"


def work_in_words(forecast: Forecast, plain: Forecast | None = None) -> str:
    words = f"work: about {short(forecast.flops, 'FLOP')} in matrix products"
    if plain is None:
        return words
    ratio = forecast.flops / plain.flops
    return f"{words}, {ratio:.2f} times the {short(plain.flops, 'FLOP')} without techniques"


def seconds_in_words(seconds: dict[str, float], plain: dict[str, float] | None) -> str:
    """A run's seconds by purpose, and compared with the plain run's."""
    total = sum(seconds.values())
    parts = (f"{what} {f'{n:,.1f} s' if n else 'not timed'}" for what, n in seconds.items())
    longer = f" ({duration(total)})" if total >= 60 else ""
    words = f"time: about {total:,.1f} s{longer}: {', '.join(parts)}"
    if plain is None:
        return words
    without = sum(plain.values())
    return f"{words}; {total / without:.2f} times the {without:,.1f} s without techniques"


def table(forecast: Forecast, budget: int, lines: int = 10) -> str:
    """The schedules at places spread evenly over the run, and in its last step."""
    points, chosen = forecast.points, {}
    for number in range(lines):
        reached = [p for p in points if p.clock.consumed_tokens / budget <= number / lines]
        point = reached[-1] if reached else points[0]
        chosen[point.clock.consumed_tokens] = point
    chosen[points[-1].clock.consumed_tokens] = points[-1]
    cells = [HEAD]
    for consumed, p in sorted(chosen.items()):
        levels = (f"{name.removeprefix('difficulty_')} {x:g}" for name, x in p.difficulty.items())
        numbers = map(str, (p.max_piece_len, p.seq_len, p.kept_tokens, p.rows))
        place = (f"{consumed / budget:.0%}", f"{consumed:,}", f"{p.lr:.2e}")
        cells.append((*place, *numbers, ", ".join(levels)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = (zip(row, widths, strict=True) for row in cells)
    return "\n".join("  ".join(cell.rjust(w) for cell, w in row).rstrip() for row in rows)


# ---- the clock on the wall


class Times(NamedTuple):
    """Seconds of a run's parts, and bytes."""

    flops: np.ndarray  # of the micro-batches that were timed, ascending
    seconds: np.ndarray
    update: float
    held_out_row: float
    checkpoint: float
    peak_bytes: int  # of the process, or of the device

    def of_part(self, flops: float) -> float:
        """Seconds of a micro-batch; proportional below the cheapest and above the dearest."""
        inside = float(np.clip(flops, self.flops[0], self.flops[-1]))
        return float(np.interp(inside, self.flops, self.seconds)) * flops / inside

    def of_run(
        self, forecast: Forecast, settings: Config, start: int, rows: Sequence[int], ranks: int
    ) -> dict[str, float]:
        """A run's seconds by purpose.

        Args: start consumed tokens before
              rows  of an evaluation on the way, and of the last one
        """
        of_steps = (
            p.stands_for * (p.parts * self.of_part(p.part_flops) + self.update)
            for p in forecast.points
        )
        on_the_way, last = rows
        held_out = evaluations(settings, start) * on_the_way + last
        return {
            "steps": sum(of_steps),
            "evaluations": held_out / ranks * self.held_out_row,
            "checkpoints": saves(settings, start) * self.checkpoint,
        }


def evaluations(settings: Config, start: int) -> int:
    """How many evaluations a run makes on its way, counting the one of its last step."""
    every, budget = settings.run.eval_every, settings.optim.tokens
    return 1 + (budget - 1) // every - start // every if every else 0


def saves(settings: Config, start: int) -> int:
    """How many checkpoints a run writes, if every evaluation is the best so far."""
    budget = settings.optim.tokens
    due = {budget}
    for every in (settings.run.eval_every, settings.run.checkpoint_every):
        due |= set(range(start // every * every + every, budget, every)) if every else set()
    return len(due)


def calibrated(
    forecast: Forecast,
    plan: Plan,
    trainer: "Trainer",
    next_stage: Callable[["Trainer", Step], "Trainer"],
    evaluation: Evaluation,
    folder: Path,
) -> Times:
    """Time what a run consists of, on all ranks alike.

    Args: trainer    of the first step; its weights move
          next_stage gives the trainer of a later step
          folder     of the run; a part of a checkpoint is written beside it and deleted
    """
    runtime, measured, updates = plan.runtime, [], []
    picked = picks(forecast.points)
    reset_peak(runtime)
    hidden = not runtime.is_rank0 or None
    for number, point in enumerate(tqdm(picked, desc="timing", leave=False, disable=hidden)):
        step = plan(point.clock)
        trainer = next_stage(trainer, step)
        # two, where there are more: a second one finds gradients there, and takes more memory
        parts = min(point.parts, 2)
        cut = step.part(slice(0, parts * trainer.rows_together(step)))
        if number == 0:  # takes what only a process's first step takes
            trainer.step(cut.part(slice(0, 1)))
        seconds, is_enough = [], False
        while not is_enough:
            taken, total = timed(runtime, partial(trainer.gradients, cut))
            seconds.append(taken)
            is_long = sum(seconds) > SECONDS / len(picked)
            is_enough = runtime.on_any_rank(len(seconds) == TURNS or is_long)
            if is_enough or point.parts == 1:  # else gradients add up, as in the run
                updates.append(timed(runtime, partial(trainer.update, cut, total))[0])
        measured.append((point.part_flops, statistics.median(seconds) / parts))
    rows = range(min(trainer.rows_at_once, len(evaluation.rows)))
    with evaluating(trainer.model):
        evaluation.sums(trainer.model, runtime, rows[:1])
        evaluate = partial(evaluation.sums, trainer.model, runtime, rows)
        held_out_row = timed(runtime, evaluate)[0] / len(rows)
    peak = max(runtime.gather(peak_bytes(runtime)))
    is_whole = runtime.is_rank0 and not plan.settings.run.fsdp
    flops, seconds = map(np.array, zip(*sorted(measured), strict=True))
    return Times(
        flops=flops,
        seconds=seconds,
        update=statistics.median(updates),
        held_out_row=held_out_row,
        checkpoint=saving_seconds(trainer.state(), folder) if is_whole else 0.0,
        peak_bytes=peak,
    )


def picks(points: list[Point]) -> list[Point]:
    """Some steps between the cheapest and the dearest micro-batch, in the order of the run."""
    by_cost: list[Point] = []
    for point in sorted(points, key=lambda point: point.part_flops):
        if not by_cost or point.part_flops > ALIKE * by_cost[-1].part_flops:
            by_cost.append(point)
    places = np.linspace(0, len(by_cost) - 1, min(PICKS, len(by_cost))).round().astype(int)
    return sorted((by_cost[place] for place in places), key=lambda p: p.clock.consumed_tokens)


def timed(runtime: Runtime, action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the device is done too, and what the action returned."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    began = time.perf_counter()
    result = action()
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    return time.perf_counter() - began, result


def reset_peak(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    with suppress(OSError):  # where it is not allowed, the peak is the process's so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(runtime: Runtime) -> int:
    """The peak since `reset_peak`, of the device's memory or of a CPU's process."""
    if runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated(runtime.device)
    return resident("VmHWM")


def saving_seconds(state: dict, folder: Path) -> float:
    """How long a checkpoint takes, from writing some of its weights."""
    part, taken = {}, 0
    for name, tensor in state["model"].items():
        if taken < SAVED_BYTES:
            part[name] = tensor
            taken += tensor.nbytes
    beside = next(parent for parent in folder.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(dir=beside) as place:
        began = time.perf_counter()
        checkpoint.save(place, {"model": part}, step=0)
        return (time.perf_counter() - began) * checkpoint.tensor_bytes(state) / taken


# ---- all together


def show(
    run: Run,
    data: Data,
    evaluations: tuple[Evaluation, Evaluation],
    *,
    shape: TransformerConfig,
    placement: Placement | None,
    batches: MicroBatch,
    memory: Memory,
    assemble: Callable[[Config, Transformer, Runtime, int], "Trainer"],
    next_stage: Callable[["Trainer", Step], "Trainer"],
) -> None:
    """Print what the run would take from where it stands.

    Args: evaluations on the way, and at the end
          memory      by estimate
          assemble, next_stage are those of train.py
    """
    s, runtime, say = run.settings, run.runtime, run.runtime.say
    free = bytes_free(runtime)
    name = f"{s.model.model} {s.model.size}"
    say(f"{name}: {parameter_count(shape) / 1e6:.2f} M parameters, {runtime.why}")
    say(f"memory, by estimate: {in_words(memory, free)}")
    say(f"batches: {batches.why}")

    fetched = []  # layers whose weights --offload brings when they run
    if placement and not s.run.fsdp:
        pairs = zip(placement.parts, placement.away, strict=True)
        fetched = [n for part, away in pairs if away == Away.WEIGHTS for n in part.layers]

    def plan_of(settings: Config) -> Plan:
        return Plan(settings, data.store, data.special_ids, runtime)

    def forecast(settings: Config, samples: int | None = None) -> Forecast:
        def work_at(step: Step) -> Work:
            blocks = blocks_at(settings, step.context)
            return work_of(settings, runtime, shape, batches.count, blocks, fetched)

        return walk(plan_of(settings), work_at, run.clock, samples)

    planned = forecast(s)
    if not planned.points:
        say("steps: none is left, only the last evaluation")
        return
    about = f", estimated from {len(planned.points)}" if planned.is_sampled else ""
    read = f"{planned.pieces:,} pieces of text, {planned.real_tokens:,} tokens"
    in_epochs = epochs(planned.real_tokens, run.store.train_tokens)
    say(f"steps: {planned.steps:,}{about}; {read}, {in_epochs}")
    say(shapes(planned))
    plain = replace(s, **{name: entry.settings() for name, entry in techniques_of(s).items()})
    without = None
    if techniques_on(s):
        without = forecast(plain, PLAIN_STEPS if planned.is_sampled else None)
        say(f"without techniques: {without.steps:,} steps, {without.real_tokens:,} tokens")
    say(work_in_words(planned, without))
    say(f"\n{table(planned, s.optim.tokens)}\n")
    if free is not None and memory.on_device > free:
        say("time: unknown, because by estimate not even a micro-batch fits this memory")
        return

    def timed_run(settings: Config, of: Forecast) -> tuple[dict[str, float], int]:
        times = calibrated(
            of,
            plan_of(settings),
            assemble(settings, initial_model(shape, settings), runtime, batches.count),
            next_stage,
            evaluations[0],
            run.folder or Path(s.run.out or "runs/new"),
        )
        rows = [evaluation.rows_in_all for evaluation in evaluations]
        start = run.clock.consumed_tokens
        return times.of_run(of, settings, start, rows, runtime.world_size), times.peak_bytes

    seconds, peak = timed_run(s, planned)
    is_cpu = runtime.device.type == "cpu"
    owner = "this process, Python and torch included" if is_cpu else "the device"
    room = "" if free is None else f"; {free / 1e9:,.2f} GB were free"
    say(f"memory, measured in a few micro-batches: at most {peak / 1e9:,.3f} GB of {owner}{room}")
    fits = free is None or memory.on_device + memory.away <= free
    say(seconds_in_words(seconds, timed_run(plain, without)[0] if without and fits else None))
    if without and not fits:
        say("time without techniques: unknown, because by estimate that run does not fit")
    if s.run.compile == "on" or (s.run.compile == "auto" and not is_cpu):
        say("--compile: the seconds before the first step are not included")
