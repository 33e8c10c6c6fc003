"""What saving costs, and what is promised besides.

saving    what a checkpoint costs: seconds that Run.save holds the loop, seconds until all is on the
          disk, and a step of bench/step.py that is made meanwhile, in turns with one that is not.
          The first save stands apart, as its copy takes new memory
promises  microseconds of each call that docs/reliability.md makes necessary, and of what would be
          called without it, in turns; also in percent of a step of 6x128 in the same turn. In each
          step: a heartbeat, which is written every ten seconds; the guard of --skip-bad-steps; a
          flag that ranks reduce, and another with that guard; a line of the log; tokens that are
          read, while the step before computes. Once in a run: check_same; the store opened, and
          verified if --verify-data says so

OMP_NUM_THREADS=2 python bench/runs.py saving --cases 124M --turns 6
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 bench/runs.py promises --turns 15
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
from measure import (
    command_line,
    in_turns,
    measured,
    min_median_max,
    pick,
    quartiles,
    recorder,
    timed,
)
from step import CASES, model_of, steps_of, trainer_of

import config
from prepare import embedded_store
from support.base import runtime
from support.run.folder import ModelSize
from support.run.run import Run
from support.step.optim import NORMS_KEPT, StepGuard
from support.text.store import Store

# ---- saving


def begun(size: str, folder: str) -> Run:
    """A run on the embedded corpus as train.py begins it."""
    settings = CASES[size].settings("cpu", f"--compile off --out {folder}/run")
    here = runtime.start("cpu", "fp32")
    store = Store.open(embedded_store("pd4k"))
    run = Run(settings, here, None, ModelSize(CASES[size].vocab_size), store)
    run.use(trainer_of(settings, model_of(settings, run.size.vocab_size), "cpu"))
    run.make_folder()
    run.open_log()
    return run


def measure_saving(args: argparse.Namespace) -> None:
    keep = recorder("saving", args, turns=args.turns)
    for size in args.cases or ("6x128", "124M"):
        with tempfile.TemporaryDirectory() as folder, begun(size, folder) as run:
            keep({"size": size, **saving(run, args.turns)})


def saving(run: Run, turns: int) -> dict[str, list[float]]:
    train = partial(run.trainer.step, *steps_of(run.settings, "cpu", 1))

    def save(meanwhile: Callable = int) -> list[float]:
        """Seconds of Run.save, of `meanwhile`, and then of the rest of the write."""
        run.clock = run.clock._replace(step=run.clock.step + 1)  # a step is saved once
        return [measured(part).seconds for part in (run.save, meanwhile, run.finish_saving)]

    train()
    first = save()
    calls = {"step": lambda: measured(train).seconds, "save": save, "both": partial(save, train)}
    step_s, saves, both = (np.array(seconds) for seconds in in_turns(calls, turns).values())
    held, on_disk = np.concatenate([saves, both])[:, 0], saves.sum(axis=1)
    return {
        "first_held_and_on_disk_s": [round(first[0], 4), round(sum(first), 4)],
        "held_s": min_median_max(held),
        "on_disk_s": min_median_max(on_disk),
        "held_percent": min_median_max(100 * held / np.tile(on_disk, 2)),
        "step_s": min_median_max(step_s),
        "step_meanwhile_s": min_median_max(both[:, 1]),
        "step_ratio": min_median_max(both[:, 1] / step_s),
    }


# ---- promises

CALLS = 100  # in a turn


def promises(run: Run) -> dict[str, Callable]:
    """What each calls; beside it, after a comma, what would be called without it."""
    here, log, guard, tokens = run.runtime, run.log, StepGuard(), run.store.tokens
    guard.norms = NORMS_KEPT * [1.0]
    line = dict.fromkeys("abcdefghijklmnopqrstu", 1 / 3)  # as long as that of a step

    def beat(beaten: float = math.inf) -> None:
        log.beaten = beaten
        log.beat(run.clock.step, f"after step {run.clock.step}, step 1 of 1")

    calls: dict[str, Callable] = {
        "heartbeat": beat,
        "heartbeat written": partial(beat, 0.0),
        "step guard": lambda: guard.note(1.0, bool(guard.why(1.0, 1.0))),
        "flag": partial(here.on_any_rank, False),
        "log": partial(log.write, "train", **line),
        "check_same": partial(here.check_same, config.shared_by_ranks(run.settings)),
        "store opened": partial(Store.open, run.store.path),
        "store verified": run.store.verify,
    }
    for name, length in {"tokens": 256, "packed tokens": 64}.items():  # that lie side by side
        starts = np.random.default_rng(0).integers(len(tokens) - length, size=2048 // length)
        places = (starts[:, None] + np.arange(length)).flatten()
        mapped = partial(np.memmap(tokens.path, tokens.dtype, "r").take, places, mode="clip")
        calls |= {name: partial(tokens.take, places), f"{name}, mapped": mapped}
    return calls


def measure_promises(args: argparse.Namespace) -> None:
    keep = recorder("promises", args, turns=args.turns)
    with tempfile.TemporaryDirectory() as folder, begun("6x128", folder) as run:
        (step,) = steps_of(run.settings, "cpu", 1)
        rounds = {name: CALLS * [call] for name, call in promises(run).items()}
        rounds["step"] = [partial(run.trainer.step, step)]
        taken = in_turns(rounds, args.turns, partial(timed, device="cpu"))
        us = {name: np.array([1e3 * call.ms for call in calls]) for name, calls in taken.items()}
        if run.runtime.is_rank0:
            percent = {name: quartiles(100 * us[name] / us["step"]) for name in us}
            us = {name: quartiles(us[name]) for name in us}
            keep({"size": "6x128", "ranks": run.runtime.world_size, "us": us, "percent": percent})


MEASURES = {  # and the cases that they know
    "saving": (measure_saving, CASES),
    "promises": (measure_promises, ()),
}


def main() -> None:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of saving")
    args = parser.parse_args()
    measure, cases = MEASURES[args.what]
    pick(args.cases or [], cases)
    measure(args)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
