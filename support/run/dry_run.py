"""--dry-run: what a run would take of text, memory, FLOPs and seconds; nothing is made."""

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
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from model import TransformerConfig
from support.base.clock import Clock, StepContext, blocks_at, tokens_by_layer
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
from support.step.sizes import flops_of_row, parameter_count

# ---- run forecast
#
# What a run will be before it is made, from its plan: steps, their text and their FLOPs.
#
# `outlook` looks at one step and at the schedules: a start can afford it. `walk` plans every step,
# or of a run that reads much some steps evenly over it, each of which stands for its neighbours.
# Nothing is timed here: support/run/dry_run.py does that.


POINTS = 64  # of an outlook
WALKED_TOKENS = 20_000_000  # a run that reads more is not walked step by step
SAMPLED_STEPS = 100


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
    flops: int  # executed
    part_flops: float  # of one micro-batch of a rank, forward and backward
    parts: int  # micro-batches of a rank


class Forecast(NamedTuple):
    """All steps of a run, added up."""

    points: list[Point]
    steps: int
    real_tokens: int
    pieces: int
    flops: int
    is_sampled: bool


def walk(
    plan: Callable[[Clock], Any],
    settings: Any,
    work_at: Callable[[Any], Work],
    clock: Clock,
    runtime: Runtime,
    steps: int | None = None,
) -> Forecast:
    """Plan the steps from this clock on.

    Args: plan    plan.Plan
          work_at (plan.Step) -> how it is carried out
          steps   plan so many, evenly over the run; None: all, or SAMPLED_STEPS of a long run
    """
    budget, begins = settings.optim.tokens, clock
    if steps is None and budget - clock.consumed_tokens > WALKED_TOKENS:
        steps = SAMPLED_STEPS
    points, at, pieces, flops, real, done = [], clock, 0.0, clock.flops, 0.0, 0.0
    hidden = not runtime.is_rank0 or None
    left = max(budget - clock.consumed_tokens, 0)
    total = left if steps is None else steps
    with tqdm(total=total, desc="planning", leave=False, disable=hidden) as bar:
        while at.consumed_tokens < budget and (steps is None or len(points) < steps):
            if steps is not None:
                consumed = begins.consumed_tokens + int((len(points) + 0.5) * left / steps)
                drawn = begins.samples_drawn + int(pieces)
                at = begins._replace(
                    step=begins.step + int(done),
                    consumed_tokens=consumed,
                    window_tokens=consumed,
                    window_row=0,
                    samples_drawn=drawn,
                )
            step = plan(at)
            of_step = step.after.consumed_tokens - at.consumed_tokens
            share = 1 if steps is None else left / steps / of_step
            points.append(point_of(settings, work_at(step), step, share))
            done, pieces = done + share, pieces + share * step.pieces
            real += share * (step.after.real_tokens - step.before.real_tokens)
            flops += share * points[-1].flops
            if steps is None:
                at = step.after
                bar.update(min(of_step, bar.total - bar.n))
            else:
                bar.update(1)
    totals = (math.ceil(done), round(real), round(pieces), round(flops))
    return Forecast(points, *totals, is_sampled=steps is not None)


def point_of(settings: Any, work: Work, step: Any, share: float) -> Point:
    rows, T = len(step.laid.offsets) - 1, step.batch.tokens.shape[1]
    flops = flops_of_step(settings, work, step).executed
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
        flops=flops,
        part_flops=(flops - work.optimizer) / work.world_size / parts,
        parts=parts,
    )


class Outlook(NamedTuple):
    """About what a run will be."""

    steps: int
    real_tokens: int
    flops: int


def outlook(settings: Any, piece_at: Callable[[int], int], work: Work, step: Any) -> Outlook:
    """The schedules' steps added up, as if all rows were as full as those of the first step.

    Args: piece_at (consumed tokens) -> the longest piece that the curriculum allows then
          step     the first plan.Step
    """
    config, budget, start = work.config, settings.optim.tokens, step.before.consumed_tokens
    seq_len, batch_tokens = settings.data.seq_len, settings.optim.batch_tokens
    rows_shrink = not settings.pack.on and settings.curriculum.metric != "none"
    reshapes = "seqlen-reshape" in settings.curriculum.metric

    def full(consumed: int, number: float) -> tuple[int, int, int]:
        """Consumed tokens, tokens and model FLOPs of a step whose rows are full."""
        T = piece_at(consumed) if rows_shrink else seq_len
        rows = batch_tokens // (T if reshapes else seq_len)
        progress = min(consumed / settings.optim.schedule_tokens, 1.0)
        context = StepContext(settings.run.seed, int(number) + 1, progress)
        tokens = tokens_by_layer(settings, context, T)
        of_row = flops_of_row(config, tokens, T)
        return rows * (sum(tokens) // config.layers), rows * T, rows * of_row

    _, real, flops = full(start, step.before.step)
    fill = (step.after.real_tokens - step.before.real_tokens) / real
    dearer = (flops_of_step(settings, work, step).executed - work.optimizer) / flops
    steps, tokens, operations = 0.0, 0.0, 0.0
    for number in range(POINTS):
        at = start + int((number + 0.5) * (budget - start) / POINTS)
        consumed, real, flops = full(at, step.before.step + steps)
        count = (budget - start) / POINTS / max(consumed * fill, 1)
        steps += count
        tokens += count * real * fill
        operations += count * (flops * dearer + work.optimizer)
    return Outlook(math.ceil(steps), round(tokens), round(operations))


# ---- forecast table
#
# A forecast (support/run/dry_run.py) in


MANY_EPOCHS = 4  # arXiv 2305.16264: up to these, repeated text is about as good as new text
HEAD = ("progress", "consumed", "lr", "piece", "row", "kept", "rows", "difficulty")


def epochs(real_tokens: int, train_tokens: int) -> str:
    """Example: 0.29 epochs of 2,744,745 training tokens"""
    passes = real_tokens / max(train_tokens, 1)
    shown = f"{passes:.2f}" if passes > 0.1 else f"{passes:.1g}"
    words = f"{shown} epochs of {train_tokens:,} training tokens"
    if passes <= MANY_EPOCHS:
        return words
    return (
        f"{words}. Text that comes more than {MANY_EPOCHS} times is worth less and less"
        " (arXiv 2305.16264): prepare more of it, or lower --tokens"
    )


def steps(forecast: Forecast, train_tokens: int) -> str:
    about = f", by {len(forecast.points)} of them" if forecast.is_sampled else ""
    read = f"{forecast.pieces:,} pieces of text, {forecast.real_tokens:,} tokens"
    return f"steps: {forecast.steps:,}{about}; {read}, {epochs(forecast.real_tokens, train_tokens)}"


def steps_alone(forecast: Forecast) -> str:
    return f"without techniques: {forecast.steps:,} steps, {forecast.real_tokens:,} tokens"


def shapes(forecast: Forecast) -> str:
    """Example: shapes of a step: 8 rows of 256, 16 tokens kept (90 %); 8 rows of 256 (10 %)"""
    shares: Counter = Counter()
    for point in forecast.points:
        shares[point.rows, point.seq_len, point.kept_tokens] += point.stands_for
    named = []
    for (rows, T, kept), count in shares.items():
        dropped = f", {kept} tokens kept" if kept < T else ""
        named.append(f"{rows} rows of {T}{dropped} ({count / shares.total():.0%})")
    left_out = len(named) - 8
    if left_out > 0:
        named[4:-4] = [f"{left_out} more"]
    return f"shapes of a step: {'; '.join(named)}"


def flops(forecast: Forecast, plain: Forecast | None) -> str:
    words = f"work: {short(forecast.flops, 'FLOP')} in matrix products"
    if plain is None:
        return words
    ratio = forecast.flops / plain.flops
    return f"{words}, {ratio:.2f} times the {short(plain.flops, 'FLOP')} without techniques"


def seconds_in_words(seconds: dict[str, float], plain: dict[str, float] | None) -> str:
    """A run's seconds by what they go to, and what they are of the plain run's."""
    in_all = sum(seconds.values())
    parts = ", ".join(
        f"{what} {f'{size:,.1f} s' if size else 'not timed'}" for what, size in seconds.items()
    )
    longer = f" ({duration(in_all)})" if in_all >= 60 else ""
    words = f"time: about {in_all:,.1f} s{longer}: {parts}"
    if plain is None:
        return words
    whole = sum(plain.values())
    return f"{words}; {in_all / whole:.2f} times the {whole:,.1f} s without techniques"


def peak_in_words(found: int, free: int | None, runtime: Runtime) -> str:
    where = (
        "of this process, Python and torch included"
        if runtime.device.type == "cpu"
        else "of the device"
    )
    room = "" if free is None else f"; {free / 1e9:,.2f} GB were free"
    return f"memory, as a few micro-batches had it: at most {found / 1e9:,.3f} GB {where}{room}"


def table(forecast: Forecast, budget: int, lines: int = 10) -> str:
    """The schedules at so many places, evenly over the run, and in its last step."""
    points, chosen = forecast.points, {}
    for number in range(lines):
        reached = [p for p in points if p.clock.consumed_tokens / budget <= number / lines]
        point = (reached or points)[-1 if reached else 0]
        chosen[point.clock.consumed_tokens] = point
    chosen[points[-1].clock.consumed_tokens] = points[-1]
    cells = [HEAD]
    for consumed, p in sorted(chosen.items()):
        levels = (f"{name.removeprefix('difficulty_')} {x:g}" for name, x in p.difficulty.items())
        numbers = (p.max_piece_len, p.seq_len, p.kept_tokens, p.rows)
        shown = (f"{consumed / budget:.0%}", f"{consumed:,}", f"{p.lr:.2e}", *map(str, numbers))
        cells.append((*shown, ", ".join(levels)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = (zip(row, widths, strict=True) for row in cells)
    return "\n".join("  ".join(cell.rjust(w) for cell, w in row).rstrip() for row in rows)


# ---- calibration
#
# How long a run's steps take and what memory they reach, from a few real micro-batches.
#
# Some micro-batches are timed that lie evenly between the cheapest and the dearest of the run, by
# their FLOPs; the others' seconds are read off the line through these. An update of the weights, a
# few held-out rows and a part of a checkpoint are timed besides, and a run is their sum. Not
# counted: what comes before the first step, compiling, and the sample at the end.


PICKS = 6  # micro-batches of different cost that are timed
TURNS, SECONDS = 20, 10.0  # each so often at the most, and all not again after so long
ALIKE = 1.02  # micro-batches whose FLOPs differ less are one kind
SAVED_BYTES = 1 << 28  # of a checkpoint that is written for its time


class Times(NamedTuple):
    """Seconds of a run's parts, and bytes."""

    flops: np.ndarray  # of the micro-batches that were timed, ascending
    seconds: np.ndarray
    update: float
    held_out_row: float
    checkpoint: float
    peak_bytes: int  # of the process, or of the device

    def of_part(self, flops: float) -> float:
        """Of a micro-batch; beyond the dearest and the cheapest in proportion."""
        inside = float(np.clip(flops, self.flops[0], self.flops[-1]))
        return float(np.interp(inside, self.flops, self.seconds)) * flops / inside

    def of_run(
        self, forecast: Forecast, settings: Any, start: int, rows: Sequence[int], ranks: int
    ) -> dict[str, float]:
        """A run's seconds by what they go to.

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


def calibrated(
    forecast: Forecast,
    plan: Callable[[Any], Any],
    trainer: Any,
    next_stage: Callable[[Any, Any], Any],
    evaluation: Any,
    folder: Path,
) -> Times:
    """Time what a run consists of, on all ranks alike.

    Args: plan       (clock) -> plan.Step
          trainer    of the first step; its weights move
          next_stage (trainer, plan.Step) -> the trainer of that step
          evaluation evaluate.Evaluation
          folder     where the run would be, for a part of a checkpoint to be written beside it
    """
    runtime = trainer.runtime
    hidden = not runtime.is_rank0 or None
    picked, found, updates = picks(forecast.points), [], []
    enough = SECONDS / len(picked)
    reset_peak(runtime)
    with tqdm(total=len(picked) + 2, desc="timing", leave=False, disable=hidden) as bar:
        for number, point in enumerate(picked):
            step = plan(point.clock)
            trainer = next_stage(trainer, step)
            # two, where there are more: a second one finds gradients there, and takes more memory
            parts = min(point.parts, 2)
            rows = slice(0, parts * trainer.rows_together(step))
            cut = step.part(rows)
            if number == 0:  # what only a process's first step takes
                trainer.step(cut.part(slice(0, 1)))
            seconds, is_enough = [], False
            while not is_enough:
                taken, total = timed(runtime, partial(trainer.gradients, cut))
                seconds.append(taken)
                is_enough = runtime.on_any_rank(len(seconds) == TURNS or sum(seconds) > enough)
                if is_enough or point.parts == 1:  # else gradients add up, as in the run
                    updates.append(timed(runtime, partial(trainer.update, cut, total))[0])
            found.append((point.part_flops, statistics.median(seconds) / parts))
            bar.update(1)
        rows = range(min(trainer.rows_at_once, len(evaluation.rows)))
        with evaluating(trainer.model):
            evaluation.sums(trainer.model, runtime, rows[:1])
            evaluate = partial(evaluation.sums, trainer.model, runtime, rows)
            held_out = timed(runtime, evaluate)[0] / len(rows)
        bar.update(1)
        peak = max(runtime.gather(peak_bytes(runtime)))
        is_whole = runtime.is_rank0 and not trainer.settings.run.fsdp
        saving = saving_seconds(trainer.state(), folder) if is_whole else 0.0
        bar.update(1)
    flops, seconds = map(np.array, zip(*sorted(found), strict=True))
    return Times(flops, seconds, statistics.median(updates), held_out, saving, peak)


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
    is_cuda = runtime.device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(runtime.device)
    began = time.perf_counter()
    result = action()
    if is_cuda:
        torch.cuda.synchronize(runtime.device)
    return time.perf_counter() - began, result


def reset_peak(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    with suppress(OSError):  # where it is not allowed, the peak is the process's so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(runtime: Runtime) -> int:
    """Of the device's memory, or of a CPU's process, since `reset_peak`."""
    if runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated(runtime.device)
    return resident("VmHWM")


def saving_seconds(state: dict, folder: Path) -> float:
    """How long a checkpoint takes, by writing as much of its tensors as SAVED_BYTES allow."""
    tensors = {
        f"{name}.{what}": tensor
        for name, kept in state["optimizers"]["state"].items()
        for what, tensor in kept.items()
        if torch.is_tensor(tensor)
    } | state["model"]
    in_all, taken, part = sum(tensor.nbytes for tensor in tensors.values()), 0, {}
    for name, tensor in tensors.items():
        if taken < SAVED_BYTES:
            part[name], taken = tensor, taken + tensor.nbytes
    beside = next(parent for parent in folder.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(dir=beside) as place:
        began = time.perf_counter()
        checkpoint.save(place, {"model": part}, step=0)
        return (time.perf_counter() - began) * in_all / taken


def saves(settings: Any, start: int) -> int:
    """How many checkpoints a run writes from this many consumed tokens on; best ones among them."""
    run, budget = settings.run, settings.optim.tokens
    due = {budget}
    for every in (run.eval_every, run.checkpoint_every):
        due |= set(range(start // every * every + every, budget, every)) if every else set()
    return len(due)


def evaluations(settings: Any, start: int) -> int:
    """How many evaluations a run makes on its way, its last step's among them."""
    every, budget = settings.run.eval_every, settings.optim.tokens
    return 1 + (budget - 1) // every - start // every if every else 0


PLAIN_STEPS = 16  # planned of the plain run, where the run itself is not planned whole


class Makers(NamedTuple):
    """What train.py knows how to make."""

    plan: Callable[[Any], Callable]  # (settings) -> plan.Plan
    trainer: Callable[[Any], Any]  # (settings) -> a train.Trainer, with weights as at the start
    next_stage: Callable[[Any, Any], Any]  # (trainer, plan.Step) -> the trainer of that step


def dry_run(
    run: Run,
    batches: MicroBatch,
    memory: Memory,
    shape: TransformerConfig,
    placement: Placement | None,
    evaluations: tuple[Any, Any],
    make: Makers,
) -> None:
    """Print what the run would take from where it stands.

    Args: memory      what it takes by estimate
          placement   of --offload
          evaluations evaluate.Evaluation on the way, and at the end
    """
    s, runtime, say = run.settings, run.runtime, run.runtime.say
    free, budget = bytes_free(runtime), s.optim.tokens
    name = f"{s.model.model} {s.model.size}"
    say(f"{name}: {parameter_count(shape) / 1e6:.2f} M parameters, {runtime.why}")
    say(f"memory, by estimate: {in_words(memory, free)}")
    say(f"batches: {batches.why}")

    fetched = []  # layers whose weights --offload brings when they run
    if placement and not s.run.fsdp:
        pairs = zip(placement.parts, placement.away, strict=True)
        fetched = [n for part, away in pairs if away == Away.WEIGHTS for n in part.layers]

    def forecast(settings: Any, steps: int | None = None) -> Forecast:
        def work_at(step: Any) -> Work:
            blocks = blocks_at(settings, step.context)
            return work_of(settings, runtime, shape, batches.count, blocks, fetched)

        return walk(make.plan(settings), settings, work_at, run.clock, runtime, steps)

    planned = forecast(s)
    say(steps(planned, run.store.train_tokens))
    say(shapes(planned))
    plain = replace(s, **{name: entry.settings() for name, entry in techniques_of(s).items()})
    without = None
    if techniques_on(s):
        without = forecast(plain, PLAIN_STEPS if planned.is_sampled else None)
        say(steps_alone(without))
    say(flops(planned, without))
    say(f"\n{table(planned, budget)}\n")
    if free is not None and memory.on_device > free:
        say("time: unknown, for by estimate there is not enough memory to try a micro-batch")
        return
    rows = [evaluation.rows_in_all for evaluation in evaluations]
    folder = run.folder or Path(s.run.out or "runs/new")

    def timed(settings: Any, found: Forecast) -> tuple[dict[str, float], int]:
        stages = (make.plan(settings), make.trainer(settings), make.next_stage)
        times = calibrated(found, *stages, evaluations[0], folder)
        start = run.clock.consumed_tokens
        return times.of_run(found, settings, start, rows, runtime.world_size), times.peak_bytes

    seconds, peak = timed(s, planned)
    say(peak_in_words(peak, free, runtime))
    fits = free is None or memory.on_device + memory.away <= free
    plain_seconds = timed(plain, without)[0] if without and fits else None
    say(seconds_in_words(seconds, plain_seconds))
    if without and not fits:
        say("the plain run's time: unknown, for by estimate it does not fit this memory")
    if s.run.compile == "on" or (s.run.compile == "auto" and runtime.device.type == "cuda"):
        say("--compile: what compiling takes before the first step is not among these seconds")
