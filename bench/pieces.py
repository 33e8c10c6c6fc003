"""What packing and short pieces save of a step's time on real text, beside what they should.

Steps of train.py on the embedded corpus, in rows of --seq-len: with one piece a row, which leaves
padding; the same under a mask, as where no attention skips what is masked; packed; and packed at
the beginning of a length curriculum, when pieces are a quarter of a row at most. Each variant is a
process of its own and makes some consecutive steps of its run again and again, in turns with the
others.

    realised     real tokens a second, packed against padded, by the packing factor: what there are
                 more of in a step. In the paper 0.956 of it, against padding that is computed in
                 full (Krell et al., arXiv 2107.02027, table 1)
    saving had   what short pieces save of the time, by what they save of the FLOPs

    OMP_NUM_THREADS=2 python bench/pieces.py --record
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from record import append, quartiles, surroundings
from turns import take_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
from model import Transformer
from plan import Plan, Step
from prepare import embedded_store
from support.base import runtime
from support.base.clock import Clock
from support.step.muon import flops_of_orthogonalising
from support.step.sizes import flops_of_row
from support.text.store import Store
from support.text.tokenizer import get_encoding, vocab_size
from train import assemble

FLAGS = {
    "padded": "--pack --pack-max-per-row 1",
    "padded, masked": "--pack --pack-max-per-row 1",
    "packed": "--pack",
    "short pieces": "--pack --curriculum seqlen",
}
SHAPES = {
    "nano": "--batch-tokens 4096",
    "12x256": "--layers 12 --heads 8 --width 256 --batch-tokens 2048",
    "124M": "--size 124M --batch-tokens 32768",
}
DEFAULT_SHAPES = {"cpu": ("nano", "12x256"), "cuda": ("124M",)}
STEPS = 4  # consecutive ones, which hold different documents


class Run(NamedTuple):
    settings: config.Config
    vocabulary: int
    steps: list[Step]  # its first ones


def run_of(flags: str, device: str) -> Run:
    settings = config.build(config.parse(f"--device {device} {flags}".split()))
    store, encoding = Store.open(embedded_store("pd4k")), get_encoding("pd4k")
    plan, clock, steps = Plan(settings, store, None, runtime.start(device, "auto")), Clock(), []
    for _ in range(STEPS):
        steps.append(plan(clock))
        clock = steps[-1].after
    return Run(settings, -(-vocab_size(encoding, "gpt") // 64) * 64, steps)


def build(flags: str, device: str, masked: bool) -> Callable:
    """In a process of its own: everything as train.py assembles it."""
    run = run_of(flags, device)
    if masked:
        Transformer.attention_impl = lambda self, x: "dense"
    model = Transformer(config.transformer_config(run.settings, run.vocabulary))
    rows = len(run.steps[0].batch.tokens)
    trainer = assemble(run.settings, model, runtime.start(device, "auto"), rows)

    def steps() -> None:
        for step in run.steps:
            trainer.step(step)

    return steps


def flops_of(run: Run, device: str) -> int:
    """Of these steps, attention within pieces alone, the optimizer's matrix products included."""
    shape = config.transformer_config(run.settings, run.vocabulary)
    flops, T = 0, run.settings.data.seq_len
    for step in run.steps:
        rows = len(step.batch.tokens)
        whole = flops_of_row(shape, [T] * shape.layers, T)
        unseen = int((1 - step.attention_share) * T * T)
        flops += rows * (whole - shape.layers * 6 * shape.width * unseen)
        flops += shape.layers * flops_of_orthogonalising(shape.width, shape.mlp_width, device)
    return flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="(default: by --device)")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--record", action="store_true", help="append to results/pieces.jsonl")
    args = parser.parse_args()
    about = surroundings(args.device) | {"bench": "pieces", "seq_len": args.seq_len}
    for shape in args.shapes or DEFAULT_SHAPES[args.device]:
        common = f"{SHAPES[shape]} --seq-len {args.seq_len} --pos rope --tokens 10M --lr 1e-4"
        flags = {name: f"{common} {own}" for name, own in FLAGS.items()}
        jobs = {name: (build, own, args.device, "masked" in name) for name, own in flags.items()}
        for new, taken in take_turns(jobs, args.turns, args.device):
            ms = {
                name: quartiles([1e3 * one.seconds / STEPS for one in taken[name]]) for name in new
            }
            print(f"{shape}, {ms}", flush=True)
            if args.record and len(taken) < len(jobs):  # what is known, in case it is cut off
                append("pieces", about | {"shape": shape, "ms_of_a_step": ms})
        seconds = {name: [one.seconds for one in turns] for name, turns in taken.items()}
        runs = {name: run_of(own, args.device) for name, own in flags.items()}
        tokens = {name: run.steps[-1].after.real_tokens for name, run in runs.items()}
        flops = {name: flops_of(run, args.device) for name, run in runs.items()}

        def ratios(name: str, to: str, seconds: dict = seconds) -> list[float]:
            return [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]

        factor = tokens["packed"] / tokens["padded"]
        predicted = flops["short pieces"] / flops["packed"]
        short = quartiles(ratios("short pieces", "packed"))
        figures = {
            "ms_of_a_step": {
                n: quartiles([1e3 * s / STEPS for s in t]) for n, t in seconds.items()
            },
            "real_tokens": tokens,
            "factor": round(factor, 4),
            "realised": quartiles(ratios("padded", "packed")),
            "realised_of_masked": quartiles(ratios("padded, masked", "packed")),
            "attention_share": {
                n: round(run.steps[0].attention_share, 3) for n, run in runs.items()
            },
            "short_to_long": short,
            "predicted": round(predicted, 4),
            "saving_had": round((1 - short[1]) / (1 - predicted), 3),
        }
        print(f"{shape}, rows of {args.seq_len}")
        for name, value in figures.items():
            print(f"  {name:18} {value}")
        if args.record:
            append("pieces", about | {"shape": shape, "turns": args.turns} | figures)


if __name__ == "__main__":
    main()
