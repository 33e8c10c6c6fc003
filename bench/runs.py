"""What whole runs take: of each recipe against the plain one, and against what --dry-run says.

cost      seconds of a recipe's run, against the plain run of nano's recipe. Its steps differ
          only in their shape: rows, tokens in a row, with or without documents to isolate, how
          many tokens each layer sees, and which layers there are. `Plan` says which step has
          which, without training. One step of every shape is timed as train.py makes it, all
          shapes in turns within one process, and a run is the sum over its steps; a ratio is
          taken within a turn. Not timed: evaluation, checkpoints, and reading data, which is
          hidden behind the step
forecast  seconds and peak of memory that --dry-run says against those of the run, both in
          processes of their own. The run's seconds are those from its log's first line to its
          end; its memory is the highest resident set, as Linux has it, and on a GPU the most
          that the device lost to it (CUDA's context too, some 0.5 GB)

OMP_NUM_THREADS=2 python bench/runs.py cost --record              # a line for each recipe
OMP_NUM_THREADS=2 python bench/runs.py forecast --cases nano
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ablate import RECIPES, TRAINER
from measure import Run, command_line, min_median_max, pick, recorder, seconds_in_turns, watched
from step import CASES, model_of, trainer_of

import config
from plan import Plan
from prepare import embedded_store
from support.base import runtime
from support.base.clock import Clock, tokens_by_layer
from support.run.folder import read_log
from support.text.store import Store
from train import Trainer, next_trainer

# ---- cost


class Shape(NamedTuple):
    """Of a step: what its time follows from."""

    rows: int
    seq_len: int
    isolated: bool  # whether the documents of a row are told apart
    tokens_by_layer: tuple[int, ...]
    parameters: int  # fewer while --pseudo shares layers or leaves some out


def shapes_of(plan: Plan, trainer: Trainer, steps: dict[Shape, Callable]) -> Counter:
    """How often a run has a step of each shape; how the first of each is made goes into `steps`."""
    settings, counts, clock = trainer.settings, Counter(), Clock()
    while clock.consumed_tokens < settings.optim.tokens:
        step = plan(clock)
        trainer = next_trainer(trainer, step)
        rows, seq_len = step.batch.tokens.shape
        tokens = tuple(tokens_by_layer(settings, step.context, seq_len))
        parameters = sum(p.numel() for p in trainer.model.parameters())
        shape = Shape(rows, seq_len, step.batch.doc_ids is not None, tokens, parameters)
        counts[shape] += 1
        steps.setdefault(shape, partial(trainer.step, step))
        clock = step.after
    return counts


def measure_cost(args: argparse.Namespace) -> None:
    here, store = runtime.start("cpu", "fp32"), Store.open(embedded_store("pd4k"))
    counts: dict[str, Counter] = {}
    steps: dict[Shape, Callable] = {}
    recipes = args.cases or [
        name for name, flags in RECIPES.items() if not re.search("bert|adaptive", flags)
    ]  # not another model, nor what only gradients decide
    for recipe in dict.fromkeys(["plain", *recipes]):
        settings = config.build(config.parse(RECIPES[recipe].split()))
        trainer = trainer_of(settings, model_of(settings, CASES["nano"]), "cpu")
        counts[recipe] = shapes_of(Plan(settings, store, None, here), trainer, steps)
    taken = seconds_in_turns({shape: steps[shape] for shape in sorted(steps)}, args.turns)
    totals = {
        recipe: sum(n * np.array(taken[shape]) for shape, n in count.items())
        for recipe, count in counts.items()
    }
    keep = recorder("cost", args, trainer=TRAINER, turns=args.turns)
    for recipe in recipes:
        keep(
            {
                "recipe": recipe,
                "flags": RECIPES[recipe],
                "steps": sum(counts[recipe].values()),
                "shapes": len(counts[recipe]),
                "seconds": round(float(np.median(totals[recipe])), 1),
                "to_plain_min_median_max": min_median_max(totals[recipe] / totals["plain"]),
            }
        )


# ---- forecast

NO_STOPS = "--eval-every 0 --checkpoint-every 0 --final-eval-tokens"
EVALUATED = "--eval-tokens 8192 --final-eval-tokens"
FORECASTS = {
    "nano": f"--tokens 200000 {EVALUATED} 32768",
    "12 x 256": f"--layers 12 --width 256 --tokens 100000 {EVALUATED} 16384",
    "124M": f"--size 124M --batch-tokens 8192 --tokens 40960 {NO_STOPS} 4096",
    "nano, all techniques": f"--tokens 100000 {EVALUATED} 32768 --curriculum seqlen --ltd --pack",
    "124M on a GPU": f"--size 124M --batch-tokens 65536 --tokens 3276800 {NO_STOPS} 65536",
    "toy": f"--layers 1 --width 16 --heads 1 --tokens 8192 {NO_STOPS} 2048",
}
ON = {
    "cpu": ("nano", "12 x 256", "124M", "nano, all techniques"),
    "cuda": ("nano", "124M on a GPU"),
}


def forecast(command: list) -> Run:
    """What the dry run says."""
    dry = [*command, "--dry-run"]
    out = subprocess.run(dry, capture_output=True, text=True, check=True).stdout
    seconds = re.search(r"time: about ([\d,.]+) s", out)[1]
    peak = re.search(r"at most ([\d,.]+) GB", out)[1]
    return Run(float(seconds.replace(",", "")), round(float(peak.replace(",", "")) * 1e9))


def measure_forecast(args: argparse.Namespace) -> None:
    keep = recorder("forecast", args)
    for name in args.cases or ON[args.device]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            flags = [*FORECASTS[name].split(), "--device", args.device, "--out", out]
            command = [sys.executable, runtime.ROOT / "train.py", *flags]
            said = forecast(command)
            has_begun = (out / "log.jsonl").exists
            run = watched(command, device=args.device, has_begun=has_begun)
            steps = [line for line in read_log(out) if line["event"] == "train"]
        keep(
            {
                "case": name,
                "flags": FORECASTS[name],
                "steps": len(steps),
                "seconds_said": said.seconds,
                "seconds": round(run.seconds, 1),
                "bytes_said": said.peak_bytes,
                "bytes": run.peak_bytes,
            }
        )


def main() -> None:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("what", choices=("cost", "forecast"))
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="recipes or runs (default: all)")
    args = parser.parse_args()
    pick(args.cases or [], RECIPES if args.what == "cost" else FORECASTS)
    if args.what == "cost":
        measure_cost(args)
    else:
        measure_forecast(args)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
