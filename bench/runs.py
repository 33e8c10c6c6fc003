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
          end; its memory is the highest resident set, as the kernel has it, and on a GPU the
          most that the device lost to it (CUDA's context too, some 0.5 GB)

OMP_NUM_THREADS=2 python bench/runs.py cost --record              # a line for each recipe
OMP_NUM_THREADS=2 python bench/runs.py forecast --cases nano
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from ablate import RECIPES, TRAINER
from record import ROOT, command_line, min_median_max, ratios, recorder
from step import CASES, model_of, trainer_of
from turns import in_turns, measured

import config
from plan import Plan, Step
from prepare import embedded_store
from support.base import runtime
from support.base.clock import Clock, tokens_by_layer
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


class Example(NamedTuple):
    """A step of some shape, and who makes it."""

    trainer: Trainer
    step: Step

    def seconds(self) -> float:
        return measured(partial(self.trainer.step, self.step)).seconds


def shapes_of(plan: Plan, trainer: Trainer, examples: dict[Shape, Example]) -> Counter:
    """How often a run has a step of each shape; the first step of each is put into `examples`."""
    settings, counts, clock = trainer.settings, Counter(), Clock()
    while clock.consumed_tokens < settings.optim.tokens:
        step = plan(clock)
        trainer = next_trainer(trainer, step)
        rows, seq_len = step.batch.tokens.shape
        tokens = tuple(tokens_by_layer(settings, step.context, seq_len))
        parameters = sum(p.numel() for p in trainer.model.parameters())
        shape = Shape(rows, seq_len, step.batch.doc_ids is not None, tokens, parameters)
        counts[shape] += 1
        examples.setdefault(shape, Example(trainer, step))
        clock = step.after
    return counts


def measure_cost(args: argparse.Namespace) -> None:
    here, store = runtime.start("cpu", "fp32"), Store.open(embedded_store("pd4k"))
    counts: dict[str, Counter] = {}
    examples: dict[Shape, Example] = {}
    recipes = args.cases or [
        name for name, flags in RECIPES.items() if not re.search("bert|adaptive", flags)
    ]  # not another model, nor what only gradients decide
    for recipe in dict.fromkeys(["plain", *recipes]):
        settings = config.build(config.parse(RECIPES[recipe].split()))
        trainer = trainer_of(settings, model_of(settings, CASES["nano"]), "cpu")
        counts[recipe] = shapes_of(Plan(settings, store, None, here), trainer, examples)
    taken = in_turns({shape: examples[shape].seconds for shape in sorted(examples)}, args.turns)
    totals = {
        recipe: [
            sum(n * taken[shape][turn] for shape, n in count.items()) for turn in range(args.turns)
        ]
        for recipe, count in counts.items()
    }
    keep = recorder("cost", args, trainer=TRAINER, turns=args.turns)
    print("recipe                     seconds   against plain (least, most)   steps")
    for recipe in recipes:
        ratio = min_median_max(ratios(totals[recipe], totals["plain"]))
        seconds, steps = statistics.median(totals[recipe]), sum(counts[recipe].values())
        low, median, high = ratio
        print(f"{recipe:24} {seconds:9.1f} {median:15.3f} ({low:.3f}, {high:.3f}) {steps:7}")
        figures = {"recipe": recipe, "flags": RECIPES[recipe], "steps": steps}
        figures |= {"shapes": len(counts[recipe]), "seconds": round(seconds, 1)}
        keep(figures | {"to_plain_min_median_max": ratio})


# ---- forecast

FORECASTS = {
    "nano": "--tokens 200000 --eval-tokens 8192 --final-eval-tokens 32768",
    "12 x 256": "--layers 12 --width 256 --tokens 100000 --eval-tokens 8192"
    " --final-eval-tokens 16384",
    "124M": "--size 124M --batch-tokens 8192 --tokens 40960 --eval-every 0 --checkpoint-every 0"
    " --final-eval-tokens 4096",
    "nano, all techniques": "--tokens 100000 --eval-tokens 8192 --final-eval-tokens 32768"
    " --curriculum seqlen --ltd --pack",
    "124M on a GPU": "--size 124M --batch-tokens 65536 --tokens 3276800 --eval-every 0"
    " --checkpoint-every 0 --final-eval-tokens 65536",
    "toy": "--layers 1 --width 16 --heads 1 --tokens 8192 --eval-every 0 --checkpoint-every 0"
    " --final-eval-tokens 2048",
}
ON = {
    "cpu": ("nano", "12 x 256", "124M", "nano, all techniques"),
    "cuda": ("nano", "124M on a GPU"),
}


class Taken(NamedTuple):
    seconds: float
    bytes: int


def forecast(command: list) -> Taken:
    """What the dry run says."""
    dry = [*command, "--dry-run"]
    out = subprocess.run(dry, capture_output=True, text=True, check=True).stdout
    seconds = re.search(r"time: about ([\d,.]+) s", out)[1]
    peak = re.search(r"at most ([\d,.]+) GB", out)[1]
    return Taken(float(seconds.replace(",", "")), round(float(peak.replace(",", "")) * 1e9))


def made(command: list, log: Path, device: str) -> Taken:
    """What the run takes, from its log's first line on."""
    before = device_bytes() if device == "cuda" else 0
    most, began = 0, None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.returncode is None:
            done, status, usage = os.wait4(child.pid, os.WNOHANG)
            if done:
                child.returncode = os.waitstatus_to_exitcode(status)
            elif began is None and log.exists():
                began = time.perf_counter()
            if device == "cuda":
                most = max(most, device_bytes() - before)
            time.sleep(0.01)
        ended = time.perf_counter()
    if child.returncode:
        raise ValueError(f"{' '.join(map(str, command))} ended with status {child.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return Taken(ended - began, most or usage.ru_maxrss * unit)


def device_bytes() -> int:
    """In use on the GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def measure_forecast(args: argparse.Namespace) -> None:
    keep = recorder("forecast", args)
    print(f"{'':22} {'seconds: said':>14} {'made':>8} {'ratio':>6}   {'GB: said':>9} made   ratio")
    for name in args.cases or ON[args.device]:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "run"
            flags = [*FORECASTS[name].split(), "--device", args.device, "--out", out]
            command = [sys.executable, ROOT / "train.py", *flags]
            said, run = forecast(command), made(command, out / "log.jsonl", args.device)
            lines = (out / "log.jsonl").read_text().splitlines()
        print(
            f"{name:22} {said.seconds:14.1f} {run.seconds:8.1f} {said.seconds / run.seconds:6.2f}"
            f"   {said.bytes / 1e9:9.2f} {run.bytes / 1e9:5.2f} {said.bytes / run.bytes:6.2f}",
            flush=True,
        )
        keep(
            {
                "case": name,
                "flags": FORECASTS[name],
                "steps": sum(json.loads(line)["event"] == "train" for line in lines),
                "seconds_said": said.seconds,
                "seconds": round(run.seconds, 1),
                "bytes_said": said.bytes,
                "bytes": run.bytes,
            }
        )


def main() -> None:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("what", choices=("cost", "forecast"))
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="recipes or runs (default: all)")
    args = parser.parse_args()
    known = RECIPES if args.what == "cost" else FORECASTS
    for name in args.cases or ():
        if name not in known:
            raise ValueError(f"--cases {name}: choose from {', '.join(known)}")
    (measure_cost if args.what == "cost" else measure_forecast)(args)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
