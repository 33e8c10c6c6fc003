"""How long a run's steps take and what memory they reach, from a few real micro-batches.

Some micro-batches are timed that lie evenly between the cheapest and the dearest of the run, by
their FLOPs; the others' seconds are read off the line through these. An update of the weights, a
few held-out rows and a part of a checkpoint are timed besides, and a run is their sum. Not counted:
what comes before the first step, compiling, and the sample at the end.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from support import checkpoint
from support.evaluating import evaluating
from support.memory import resident
from support.run_forecast import Forecast, Point
from support.runtime import Runtime

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
