"""--dry-run: what a run would take of text, memory, FLOPs and seconds; nothing is made."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support import forecast_table as words
from support.calibration import calibrated
from support.clock import blocks_at
from support.flops import Work, work_of
from support.memory_plan import Memory, in_words
from support.micro_batch import MicroBatch, bytes_free
from support.placement import Away
from support.run import Run
from support.run_forecast import Forecast, walk
from support.settings import techniques_of, techniques_on
from support.sizes import parameter_count

PLAIN_STEPS = 16  # planned of the plain run, where the run itself is not planned whole


class Makers(NamedTuple):
    """What train.py knows how to make."""

    plan: Callable[[Any], Callable]  # (settings) -> plan.Plan
    trainer: Callable[[Any], Any]  # (settings) -> a train.Trainer, with weights as at the start
    next_stage: Callable[[Any, Any], Any]  # (trainer, plan.Step) -> the trainer of that step


def dry_run(
    run: Run,
    batches: MicroBatch,
    memory_of: partial[Memory],
    evaluations: tuple[Any, Any],
    make: Makers,
) -> None:
    """Print what the run would take from where it stands.

    Args: memory_of   (rows at once) -> what that takes by estimate, with `config` of the model and
                      `placement` of --offload
          evaluations evaluate.Evaluation on the way, and at the end
    """
    memory, placement = memory_of(batches.count), memory_of.keywords["placement"]
    shape = memory_of.keywords["config"]
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
    say(words.steps(planned, run.store.train_tokens))
    say(words.shapes(planned))
    plain = replace(s, **{name: entry.settings() for name, entry in techniques_of(s).items()})
    without = None
    if techniques_on(s):
        without = forecast(plain, PLAIN_STEPS if planned.is_sampled else None)
        say(words.steps_alone(without))
    say(words.flops(planned, without))
    say(f"\n{words.table(planned, budget)}\n")
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
    say(words.peak(peak, free, runtime))
    fits = free is None or memory.on_device + memory.away <= free
    plain_seconds = timed(plain, without)[0] if without and fits else None
    say(words.time(seconds, plain_seconds))
    if without and not fits:
        say("the plain run's time: unknown, for by estimate it does not fit this memory")
    if s.run.compile == "on" or (s.run.compile == "auto" and runtime.device.type == "cuda"):
        say("--compile: what compiling takes before the first step is not among these seconds")
