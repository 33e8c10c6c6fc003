"""What a whole run of a recipe costs in seconds, against the plain run of the same budget.

The steps of a recipe differ only in the shape of their batch: rows, tokens in a row, with or
without documents to isolate. `Plan` says which step has which, without training. One step of every
shape is timed, all shapes in turns within one process, and a run is the sum over its steps. So both
parts of a ratio come from the same turn on a noisy machine; the median is over turns.

Does not time evaluation, checkpoints or reading data (which is hidden behind the step).

    OMP_NUM_THREADS=2 python bench/cost.py                           # the table
    OMP_NUM_THREADS=2 python bench/cost.py --record                  # and lines of results/
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ablate import RECIPES
from record import append, min_median_max, surroundings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
from model import Transformer
from plan import Clock, Plan, Step
from prepare import embedded_store
from support import runtime
from support.optim import Optimizers
from support.token_store import Store
from support.tokenizer import get_encoding, vocab_size


class Shape(NamedTuple):
    """Of a step's batch: what the time of the step follows from."""

    rows: int
    seq_len: int
    isolated: bool  # whether the documents of a row are told apart


def shapes_of(plan: Plan, budget: int, examples: dict[Shape, Step]) -> Counter:
    """How often a run has a step of each shape; a first step of each is put into `examples`."""
    counts: Counter = Counter()
    clock = Clock()
    while clock.consumed_tokens < budget:
        step = plan(clock)
        shape = Shape(*step.batch.tokens.shape, step.batch.doc_ids is not None)
        counts[shape] += 1
        examples.setdefault(shape, step)
        clock = step.after
    return counts


def run(settings: config.Config, model: Transformer, optimizers: Optimizers, step: Step) -> float:
    """Make one optimizer step as train.py does with nano, all rows at once; return its seconds."""
    began = time.perf_counter()
    loss = model(step.batch)
    (loss / step.targets).backward()
    optimizers.clip_gradients(settings.optim.grad_clip)
    optimizers.step(1e-3)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    apart = ("--ltd", "bert")  # neither the same model nor the same step
    choices = [name for name, flags in RECIPES.items() if not any(x in flags for x in apart)]
    parser.add_argument("--recipes", nargs="+", choices=choices, default=choices)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="append to results/cost.jsonl")
    args = parser.parse_args()

    here = runtime.start("cpu", "fp32")
    store, encoding = Store.open(embedded_store("pd4k")), get_encoding("pd4k")
    counts: dict[str, Counter] = {}
    steps: dict[Shape, Step] = {}
    for recipe in dict.fromkeys(["plain", *args.recipes]):
        settings = config.build(config.parse(RECIPES[recipe].split()))
        plan = Plan(settings, store, None, here)
        counts[recipe] = shapes_of(plan, settings.optim.tokens, steps)
    o = settings.optim  # the same in all recipes; what a step costs does not depend on the weights
    vocabulary = -(-vocab_size(encoding, "gpt") // 64) * 64
    model = Transformer(config.transformer_config(settings, vocabulary))
    optimizers = Optimizers(model, o.optimizer, o.weight_decay, (o.beta1, o.beta2), False)

    turns: list[dict[Shape, float]] = []
    for turn in range(args.turns + 1):  # the first warms up
        seconds = {}
        for shape in sorted(steps, reverse=turn % 2 == 1):
            seconds[shape] = run(settings, model, optimizers, steps[shape])
        turns.append(seconds)
    print("recipe                     seconds   against plain (least, most)   steps")
    for recipe in args.recipes:
        totals, ratios = [], []
        for seconds in turns[1:]:
            total, plain = (
                sum(n * seconds[shape] for shape, n in counts[name].items())
                for name in (recipe, "plain")
            )
            totals.append(total)
            ratios.append(total / plain)
        ratio = min_median_max(ratios)
        steps_in_all = sum(counts[recipe].values())
        print(
            f"{recipe:24} {statistics.median(totals):9.1f} {ratio[1]:15.3f}"
            f" ({ratio[0]:.3f}, {ratio[2]:.3f}) {steps_in_all:7}"
        )
        if args.record:
            record = {
                "bench": "cost",
                "recipe": recipe,
                "flags": RECIPES[recipe],
                "steps": steps_in_all,
                "shapes": len(counts[recipe]),
                "seconds": round(statistics.median(totals), 1),
                "to_plain_min_median_max": ratio,
                "turns": args.turns,
            }
            append("cost", surroundings() | record)


if __name__ == "__main__":
    main()
