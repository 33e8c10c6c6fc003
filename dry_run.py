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
from collections.abc import Callable
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
from model import TransformerConfig
from plan import Plan, Step
from support.base.clock import Clock, blocks_at
from support.base.numbers import duration, short
from support.base.runtime import resident
from support.base.technique import techniques_of, techniques_on
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
PLAIN_STEPS = 16  # of the same run without techniques
OUTLOOK_STEPS = 8  # of a run that starts
MANY_EPOCHS = 4  # arXiv 2305.16264: up to these, repeated text is about as good as new text

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
    real_tokens: int
    pieces: int
    flops: int
    rows: int  # on all ranks
    seq_len: int
    kept_tokens: int
    max_piece_len: int
    difficulty: dict[str, float]
    lr: float
    parts: int  # micro-batches of a rank
    part_flops: float  # of one, forward and backward


def point_of(settings: Config, step: Step, stands_for: float, work: Work) -> Point:
    rows, T = len(step.laid.offsets) - 1, step.batch.tokens.shape[1]
    flops = flops_of_step(settings, work, step).executed
    parts = -(-rows // (work.world_size * work.rows_at_once * (work.seq_len // T)))
    return Point(
        clock=step.before,
        stands_for=stands_for,
        real_tokens=step.after.real_tokens - step.before.real_tokens,
        pieces=step.pieces,
        flops=flops,
        rows=rows,
        seq_len=T,
        kept_tokens=step.kept_tokens,
        max_piece_len=step.max_piece_len,
        difficulty=step.stage,
        lr=learning_rate(settings, step.before, step.after),
        parts=parts,
        part_flops=(flops - work.optimizer) / work.world_size / parts,
    )


def walk(
    plan: Plan, work_at: Callable[[Step], Work], start: Clock, samples: int | None = None
) -> list[Point]:
    """Plan the steps from this clock on.

    Args: work_at how a step is carried out
          samples steps to plan, spread evenly; None: all, or SAMPLED_STEPS of a long run
    """
    budget = plan.settings.optim.tokens
    left = max(budget - start.consumed_tokens, 0)
    if samples is None and left > WALKED_TOKENS:
        samples = SAMPLED_STEPS
    clock, points, steps, pieces = start, [], 0.0, 0.0
    hidden = not plan.runtime.is_rank0 or None
    with tqdm(total=left, desc="planning", leave=False, disable=hidden) as bar:
        while clock.consumed_tokens < budget and len(points) != samples:
            if samples:
                consumed = start.consumed_tokens + int((len(points) + 0.5) * left / samples)
                clock = start._replace(
                    step=start.step + int(steps),
                    consumed_tokens=consumed,
                    position=start.position._replace(
                        first_draw=start.position.first_draw + int(pieces),
                        drawn_at_tokens=consumed,
                        row=0,
                    ),
                )
            step = plan(clock)
            consumed = step.after.consumed_tokens - clock.consumed_tokens
            share = left / samples / consumed if samples else 1
            points.append(point_of(plan.settings, step, share, work_at(step)))
            steps += share
            pieces += share * step.pieces
            bar.update(min(share * consumed, left - bar.n))
            clock = clock if samples else step.after
    return points


def total(points: list[Point], of: Callable[[Point], float]) -> int:
    return round(sum(point.stands_for * of(point) for point in points))


def steps_of(points: list[Point]) -> int:
    return math.ceil(sum(point.stands_for for point in points))


# ---- what is said


def outlook(run: Run, plan: Plan) -> str:
    """Two lines for the start of a run, from a few steps of its plan."""
    points = walk(plan, lambda step: run.trainer.work, run.clock, OUTLOOK_STEPS)
    rate = f" of {short(run.peak.flops, 'FLOP/s')}" if run.peak.flops else ""
    return (
        f"about {steps_of(points):,} steps, {epochs(points, run.store.train_tokens)}\n"
        f"{work_in_words(points, [])}; peak{rate}: {run.peak.why}"
    )


def epochs(points: list[Point], train_tokens: int) -> str:
    """Example: 0.29 epochs of 2,744,745 training tokens"""
    passes = total(points, lambda p: p.real_tokens) / max(train_tokens, 1)
    shown = f"{passes:.2f}" if passes > 0.1 else f"{passes:.1g}"
    words = f"{shown} epochs of {train_tokens:,} training tokens"
    if passes <= MANY_EPOCHS:
        return words
    return (
        f"{words}. Text that is read more than {MANY_EPOCHS} times teaches less and less"
        " (arXiv 2305.16264): prepare more, or lower --tokens"
    )


def work_in_words(points: list[Point], plain: list[Point]) -> str:
    flops, without = (total(of, lambda p: p.flops) for of in (points, plain))
    words = f"work: about {short(flops, 'FLOP')} in matrix products"
    if not without:
        return words
    return f"{words}, {flops / without:.2f} times the {short(without, 'FLOP')} without techniques"


def shapes(points: list[Point]) -> str:
    """Example: shapes of a step: 8 rows of 256, 16 tokens kept (90%); 8 rows of 256 (10%)"""
    shares: Counter = Counter()
    for p in points:
        kept = f", {p.kept_tokens} tokens kept" if p.kept_tokens < p.seq_len else ""
        shares[f"{p.rows} rows of {p.seq_len}{kept}"] += p.stands_for
    named = [f"{name} ({count / shares.total():.0%})" for name, count in shares.items()]
    if len(named) > 8:
        named[4:-4] = [f"{len(named) - 8} more"]
    return f"shapes of a step: {'; '.join(named)}"


def table(points: list[Point], budget: int, lines: int = 10) -> str:
    """The schedules at places spread evenly over the run, and in its last step."""
    places = np.linspace(points[0].clock.consumed_tokens, budget, lines, endpoint=False)
    begins = [p.clock.consumed_tokens for p in points]
    chosen = {*(np.searchsorted(begins, places, side="right") - 1), len(points) - 1}
    cells = [("progress", "consumed", "lr", "piece", "row", "kept", "rows", "difficulty")]
    for p in (points[number] for number in sorted(chosen)):
        consumed = p.clock.consumed_tokens
        levels = (f"{name.removeprefix('difficulty_')} {x:g}" for name, x in p.difficulty.items())
        numbers = map(str, (p.max_piece_len, p.seq_len, p.kept_tokens, p.rows))
        place = (f"{consumed / budget:.0%}", f"{consumed:,}", f"{p.lr:.2e}")
        cells.append((*place, *numbers, ", ".join(levels)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = (zip(row, widths, strict=True) for row in cells)
    return "\n".join("  ".join(cell.rjust(w) for cell, w in row).rstrip() for row in rows)


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


class Times(NamedTuple):
    """Seconds of a run's parts, and bytes."""

    parts: list[tuple[float, float]]  # FLOPs and seconds of micro-batches, the cheapest first
    update: float
    held_out_row: float
    checkpoint: float
    peak_bytes: int = 0  # of the process, or of the device

    def of_part(self, flops: float) -> float:
        """Seconds of a micro-batch; proportional below the cheapest and above the dearest."""
        known, seconds = zip(*self.parts, strict=True)
        inside = float(np.clip(flops, known[0], known[-1]))
        return float(np.interp(inside, known, seconds)) * flops / inside

    def of_steps(self, points: list[Point]) -> float:
        each = (p.stands_for * (p.parts * self.of_part(p.part_flops) + self.update) for p in points)
        return sum(each)


def evaluations(settings: Config, start: int) -> int:
    """How many evaluations a run makes on its way, counting the one of its last step.

    Args: start consumed tokens before
    """
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
    points: list[Point],
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
    runtime, measured, updates, picked = plan.runtime, [], [], picks(points)
    is_cuda = runtime.device.type == "cuda"

    def timed(action: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device is done too, and what the action returned."""
        began = time.perf_counter()
        result = action()
        if is_cuda:
            torch.cuda.synchronize(runtime.device)
        return time.perf_counter() - began, result

    if is_cuda:
        torch.cuda.reset_peak_memory_stats(runtime.device)
    with suppress(OSError):  # where it is not allowed, the peak is the process's so far
        Path("/proc/self/clear_refs").write_text("5")
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
            taken, loss = timed(partial(trainer.gradients, cut))
            seconds.append(taken)
            is_long = len(seconds) == TURNS or sum(seconds) > SECONDS / len(picked)
            is_enough = runtime.on_any_rank(is_long)
            if is_enough or point.parts == 1:  # else gradients add up, as in the run
                updates.append(timed(partial(trainer.update, cut, loss))[0])
        measured.append((point.part_flops, statistics.median(seconds) / parts))
    text = evaluation.parts[0].pieces

    def score(rows: int) -> None:
        evaluation.nats(trainer.model, runtime, text.read(range(rows)))

    rows = min(trainer.rows_at_once, len(text.rows))
    with evaluating(trainer.model), torch.no_grad(), runtime.autocast():
        score(1)
        held_out, _ = timed(partial(score, rows))
    peak = torch.cuda.max_memory_allocated(runtime.device) if is_cuda else resident("VmHWM")
    is_whole = runtime.is_rank0 and not plan.settings.run.fsdp
    return Times(
        parts=sorted(measured),
        update=statistics.median(updates),
        held_out_row=held_out / rows,
        checkpoint=saving_seconds(trainer.state(), folder) if is_whole else 0.0,
        peak_bytes=max(runtime.gather(peak)),
    )


def picks(points: list[Point]) -> list[Point]:
    """Some steps between the cheapest and the dearest micro-batch, in the order of the run."""
    by_cost: list[Point] = []
    for point in sorted(points, key=lambda p: p.part_flops):
        if not by_cost or point.part_flops > ALIKE * by_cost[-1].part_flops:
            by_cost.append(point)
    places = np.linspace(0, len(by_cost) - 1, min(PICKS, len(by_cost))).round().astype(int)
    return sorted((by_cost[place] for place in places), key=lambda p: p.clock.consumed_tokens)


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
    evaluation: tuple[Evaluation, Evaluation],
    *,
    shape: TransformerConfig,
    placement: Placement | None,
    batches: MicroBatch,
    memory: Memory,
    assemble: Callable[..., "Trainer"],
    next_stage: Callable[["Trainer", Step], "Trainer"],
) -> None:
    """Print what the run would take from where it stands.

    Args: evaluation on the way, and at the end
          memory     by estimate
          assemble   (settings, model=...), and next_stage: as in train.py
    """
    s, runtime, say = run.settings, run.runtime, run.runtime.say
    free, start, on_the_way = bytes_free(runtime), run.clock.consumed_tokens, evaluation[0]
    millions = parameter_count(shape) / 1e6
    say(f"{s.model.model} {s.model.size}: {millions:.2f} M parameters, {runtime.why}")
    say(f"memory, by estimate: {in_words(memory, free)}")
    say(f"batches: {batches.why}")

    fetched = []  # layers whose weights --offload brings when they run
    if placement and not s.run.fsdp:
        pairs = zip(placement.parts, placement.away, strict=True)
        fetched = [n for part, away in pairs if away == Away.WEIGHTS for n in part.layers]

    def plan_of(settings: Config) -> Plan:
        return Plan(settings, data.store, data.special_ids, runtime)

    def walked(settings: Config, samples: int | None = None) -> list[Point]:
        def work_at(step: Step) -> Work:
            blocks = blocks_at(settings, step.context)
            return work_of(settings, runtime, shape, batches.count, blocks, fetched)

        return walk(plan_of(settings), work_at, run.clock, samples)

    def seconds_of(settings: Config, points: list[Point]) -> tuple[dict[str, float], int]:
        times = calibrated(
            points,
            plan=plan_of(settings),
            trainer=assemble(settings, model=initial_model(shape, settings)),
            next_stage=next_stage,
            evaluation=on_the_way,
            folder=run.folder or Path(s.run.out or "runs/new"),
        )
        rows = evaluations(settings, start) * on_the_way.rows_in_all + evaluation[1].rows_in_all
        seconds = {
            "steps": times.of_steps(points),
            "evaluations": rows / runtime.world_size * times.held_out_row,
            "checkpoints": saves(settings, start) * times.checkpoint,
        }
        return seconds, times.peak_bytes

    points, plain = walked(s), []
    if not points:
        say("steps: none are left, only the last evaluation")
        return
    is_sampled = points[0].stands_for != 1
    about = f", estimated from {len(points)}" if is_sampled else ""
    pieces, tokens = total(points, lambda p: p.pieces), total(points, lambda p: p.real_tokens)
    read = f"{pieces:,} pieces of text, {tokens:,} tokens"
    in_epochs = epochs(points, run.store.train_tokens)
    say(f"steps: {steps_of(points):,}{about}; {read}, {in_epochs}")
    say(shapes(points))
    without = replace(s, **{name: entry.settings() for name, entry in techniques_of(s).items()})
    if techniques_on(s):
        plain = walked(without, PLAIN_STEPS if is_sampled else None)
        tokens = total(plain, lambda p: p.real_tokens)
        say(f"without techniques: {steps_of(plain):,} steps, {tokens:,} tokens")
    say(work_in_words(points, plain))
    say(f"\n{table(points, s.optim.tokens)}\n")
    if free is not None and memory.on_device > free:
        say("time: unknown, because by estimate not even a micro-batch fits this memory")
        return
    seconds, peak = seconds_of(s, points)
    is_cpu = runtime.device.type == "cpu"
    owner = "this process, Python and torch included" if is_cpu else "the device"
    room = "" if free is None else f"; {free / 1e9:,.2f} GB were free"
    say(f"memory, measured in a few micro-batches: at most {peak / 1e9:,.3f} GB of {owner}{room}")
    fits = free is None or memory.on_device + memory.away <= free
    say(seconds_in_words(seconds, seconds_of(without, plain)[0] if plain and fits else {}))
    if plain and not fits:
        say("time without techniques: unknown, because by estimate that run does not fit")
    if s.run.compile == "on" or (s.run.compile == "auto" and not is_cpu):
        say("--compile: the seconds before the first step are not included")
