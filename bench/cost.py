"""What a whole run of a recipe costs in seconds, against the plain run of nano's recipe.

The steps of a recipe differ only in their shape: rows, tokens in a row, with or without documents
to isolate, how many tokens each layer sees, and which layers there are. `Plan` says which step has
which, without training. One step of every shape is timed as train.py makes it, all shapes in turns
within one process, and a run is the sum over its steps. So both parts of a ratio come from the same
turn on a noisy machine; the median is over turns.

Does not time evaluation, checkpoints or reading data (which is hidden behind the step).

    OMP_NUM_THREADS=2 python bench/cost.py                           # the table
    OMP_NUM_THREADS=2 python bench/cost.py --record                  # and lines of results/
"""

import argparse
import copy
import re
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ablate import RECIPES, TRAINER
from record import append, min_median_max, surroundings
from turns import measured

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
import pseudo
from model import Transformer
from plan import Plan, Step
from prepare import embedded_store
from support.base import runtime
from support.base.clock import Clock, tokens_by_layer
from support.step.sizes import empty_model
from support.text.store import Store
from support.text.tokenizer import get_encoding, vocab_size
from train import Trainer, assemble


class Shape(NamedTuple):
    """Of a step: what its time follows from."""

    rows: int
    seq_len: int
    isolated: bool  # whether the documents of a row are told apart
    tokens_by_layer: tuple[int, ...]
    owners: tuple[int, ...]  # of each layer the one whose weights it uses; () without --pseudo


class Example(NamedTuple):
    """A step of some shape, and who makes it."""

    trainer: Trainer
    step: Step


def shapes_of(plan: Plan, trainer: Trainer, examples: dict[Shape, Example]) -> Counter:
    """How often a run has a step of each shape; a first step of each is put into `examples`."""
    settings, counts, clock = trainer.settings, Counter(), Clock()
    while clock.consumed_tokens < settings.optim.tokens:
        step = plan(clock)
        trainer = of_stage(trainer, step)
        rows, seq_len = step.batch.tokens.shape
        tokens = tuple(tokens_by_layer(settings, step.context, seq_len))
        owners = trainer.shadow.owners if trainer.shadow else ()
        shape = Shape(rows, seq_len, step.batch.doc_ids is not None, tokens, owners)
        counts[shape] += 1
        examples.setdefault(shape, Example(trainer, step))
        clock = step.after
    return counts


def of_stage(trainer: Trainer, step: Step) -> Trainer:
    """The trainer of this step: another one where a stage of --pseudo ended before it."""
    s, now = trainer.settings, trainer.shadow
    if now is None:
        return trainer
    owners = pseudo.shadow_at(s, step.context.progress, now).owners
    if owners == now.owners:
        return trainer
    state = pseudo.handed_over(trainer.state(), owners, s.pseudo.state, s.pseudo.new)
    model = empty_model(trainer.model.config)
    return assemble(s, model, trainer.runtime, trainer.rows_at_once, copy.deepcopy(state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    # not another model, nor what only gradients decide
    choices = [name for name, flags in RECIPES.items() if not re.search("bert|adaptive", flags)]
    parser.add_argument("--recipes", nargs="+", choices=choices, default=choices, metavar="RECIPE")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="append to results/cost.jsonl")
    args = parser.parse_args()

    here = runtime.start("cpu", "fp32")
    store, encoding = Store.open(embedded_store("pd4k")), get_encoding("pd4k")
    counts: dict[str, Counter] = {}
    examples: dict[Shape, Example] = {}
    vocabulary = -(-vocab_size(encoding, "gpt") // 64) * 64
    for recipe in dict.fromkeys(["plain", *args.recipes]):
        settings = config.build(config.parse(RECIPES[recipe].split()))
        model = Transformer(config.transformer_config(settings, vocabulary))
        trainer = assemble(settings, model, here, settings.optim.batch_tokens // 256)
        counts[recipe] = shapes_of(Plan(settings, store, None, here), trainer, examples)

    turns: list[dict[Shape, float]] = []
    for turn in range(args.turns + 1):  # the first warms up
        seconds = {}
        for shape in sorted(examples, reverse=turn % 2 == 1):
            trainer, step = examples[shape]
            seconds[shape] = measured(partial(trainer.step, step)).seconds
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
                "trainer": TRAINER,
                "steps": steps_in_all,
                "shapes": len(counts[recipe]),
                "seconds": round(statistics.median(totals), 1),
                "to_plain_min_median_max": ratio,
                "turns": args.turns,
            }
            append("cost", surroundings() | record)


if __name__ == "__main__":
    main()
