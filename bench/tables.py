"""The tables of docs/curriculum.md, docs/ltd.md and README.md, made of the records in results/.

Two axes, because a recipe that costs more seconds for the same tokens is not free: the difference
to its baseline after the same consumed tokens, and after the same seconds. For the latter the
baseline gets the tokens that it would have read in the recipe's seconds (results/cost.jsonl); its
loss at that budget lies between measured budgets (plain at --tokens 900K), and is interpolated
linearly in the logarithm of tokens, seed by seed. A cost within half a percent counts as none. All
steps of a packed run cost the same, so where none was timed the cost is the ratio of the numbers of
steps. Runs of different trainers (bench/ablate.py) are not compared with each other.

    python bench/tables.py                                        # markdown, to paste
    python bench/tables.py --figure docs/loss-against-seconds.svg # the README's picture
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ablate import GROUPS, RECIPES
from measure import records

from support.report.charts import Chart, Label, Series, picture
from support.report.page import markdown_table, spread

SHARE = "share of the plain run's time"
BUDGET = 800_000  # tokens of nano's recipe
README = ["padded", "plain", "plain short", "curriculum short", "pack short", "constant 16"]
README += ["all short", "grow 3 until 0.75 450K", "3 layers", "ltd 310K", "all 300K", "plain half"]
README += ["ltd half", "all half"]


def trainer_of(record: dict) -> str:
    """Which trainer made a record, see bench/ablate.py; the first ones said it less plainly."""
    return record.get("trainer", record.get("lr_of", "end"))


def costs_of(trainer: str) -> dict[str, float]:
    """recipe -> seconds of its run, as a share of the plain run's."""
    timed = [record for record in records("cost") if trainer_of(record) == trainer]
    return {record["recipe"]: record["to_plain_min_median_max"][1] for record in timed}


def measured(name: str, trainer: str) -> dict[str, dict[int, dict[int, float]]]:
    """recipe -> seed -> budget -> a number of its record; of several records the newest counts."""
    values: dict[str, dict[int, dict[int, float]]] = {}
    for record in records("ablate"):
        if trainer_of(record) == trainer:
            budget = round(record["consumed_tokens"], -4)  # the last step goes a little past it
            seeds = values.setdefault(record["recipe"], {})
            seeds.setdefault(record["seed"], {})[budget] = record[name]
    return values


def at_budget(losses: dict[int, float], tokens: float) -> float | None:
    """Interpolate between measured budgets; None where `tokens` is far from all of them."""
    if tokens in losses:
        return losses[tokens]
    for (low, one), (high, other) in pairwise(sorted(losses.items())):
        if 0.95 * low <= tokens <= 1.05 * high:
            share = math.log(tokens / low) / math.log(high / low)
            return one + share * (other - one)
    return None


def differences(values: Sequence[float], others: Sequence[float | None]) -> str:
    """Of seeds that the baseline has too."""
    pairs = zip(values, others, strict=True)
    return spread([value - other for value, other in pairs if other], "+")


def recipes_table(recipes: list[str], base: str, trainer: str) -> str:
    """A row for each recipe: the mean over seeds, with the least and the most.

    Args: trainer of the records
    """
    losses, steps = measured("val_bpb", trainer), measured("steps", trainer)
    cost = costs_of(trainer)
    rows = []
    for recipe in recipes:
        both = sorted(losses[recipe].keys() & losses[base].keys())
        seeds = [s for s in both if BUDGET in losses[recipe][s] and BUDGET in losses[base][s]]
        reached = [losses[recipe][seed][BUDGET] for seed in seeds]
        ratio = cost.get(recipe, math.nan) / cost.get(base, math.nan)
        if recipe not in cost and "--pack" in RECIPES[recipe]:
            ratio = statistics.mean(
                steps[recipe][seed][BUDGET] / steps[base][seed][BUDGET] for seed in seeds
            )
        tokens = BUDGET if abs(ratio - 1) < 0.005 else BUDGET * ratio
        same_tokens = same_seconds = ""
        if recipe != base:
            by_budget = [losses[base][seed] for seed in seeds]
            same_tokens = differences(reached, [at_budget(of, BUDGET) for of in by_budget])
            same_seconds = differences(reached, [at_budget(of, tokens) for of in by_budget])
        cost_shown = "" if math.isnan(ratio) else f"{ratio:.2f}"
        flags = f"`{RECIPES[recipe] or 'none'}`"
        row = [flags, spread(reached), same_tokens, cost_shown, same_seconds, str(len(seeds))]
        rows.append(row)
    equal = [f"to {base}, equal tokens", "cost", "equal seconds"]
    return markdown_table(["flags", "bits per byte", *equal, "seeds"], rows)


def ends_of(losses: dict[int, dict[int, float]]) -> list[float]:
    """Of each seed, at its largest budget."""
    return [losses[seed][max(losses[seed])] for seed in sorted(losses)]


def budgets_table(recipes: list[str], trainer: str) -> str:
    """Recipes each at a budget of its own: against the plain run at equal seconds, and at equal
    consumed tokens.

    A plain run's seconds are in proportion to its tokens, and some budgets of it were measured.
    """
    losses, cost = measured("val_bpb", trainer), costs_of(trainer)
    plain: dict[int, dict[int, float]] = {seed: {} for seed in losses["plain"]}
    for budget in ("plain", "plain short", "plain half"):
        for seed in plain:
            plain[seed] |= losses.get(budget, {}).get(seed, {})
    rows = []
    for recipe in recipes:
        seeds = {s: by_budget for s, by_budget in losses[recipe].items() if s in plain}
        reached, tokens = ends_of(seeds), BUDGET * cost[recipe]
        same_seconds = [at_budget(plain[seed], tokens) for seed in sorted(seeds)]
        same_tokens = [at_budget(plain[seed], max(seeds[seed])) for seed in sorted(seeds)]
        compared = [differences(reached, others) for others in (same_seconds, same_tokens)]
        rows.append([f"`{RECIPES[recipe]}`", spread(reached), f"{cost[recipe]:.2f}", *compared])
    equal = ["to plain, equal seconds", "to plain, equal consumed tokens"]
    return markdown_table(["flags", "bits per byte", SHARE, *equal], rows)


def rates_table(recipes: list[str], trainer: str) -> str:
    """What a run reaches with other learning rates than the recipe's."""
    losses = measured("val_bpb", trainer)
    rows = [[f"`{RECIPES[r] or 'none'}`", spread(ends_of(losses[r]))] for r in recipes]
    return markdown_table(["flags", "bits per byte"], rows)


def share_table(trainer: str) -> str:
    """Held-out loss by when layers get their own weights, and by the unit that they shared."""
    losses = measured("val_bpb", trainer)
    rows = []
    for until in (0.05, 0.1, 0.25, 0.5, 0.99):
        cells = []
        for group in (1, 2, 3):
            by_seed = losses.get(f"share {group} until {until}", {})
            reached = [by_seed[seed][BUDGET] for seed in by_seed if seed in losses["plain"]]
            cells.append(spread(reached) if len(reached) != 1 else f"{reached[0]:.3f}, one seed")
        rows.append([str(until), *cells])
    return markdown_table(["until", "one layer", "units of two", "of three"], rows)


def time_table(recipes: list[str], trainer: str) -> str:
    """What each recipe reaches in which share of the plain run's time."""
    losses, cost = measured("val_bpb", trainer), costs_of(trainer)
    raw = measured("real_tokens", trainer)
    rows = []
    for recipe in recipes:
        read = statistics.mean(ends_of(raw[recipe])) / 1e6
        flags = f"`{RECIPES[recipe]}`" if RECIPES[recipe] else "plain, 0.8 M tokens"
        reached = spread(ends_of(losses[recipe]))
        rows.append([flags, f"{cost[recipe]:.2f}", reached, f"{read:.2f} M"])
    return markdown_table(["run", SHARE, "bits per byte", "raw tokens"], rows)


class Curve(NamedTuple):
    """Recipes of the README's picture that differ in their budgets, and where their name stands."""

    label: str
    recipes: list[str]
    color: int
    at: int  # the recipe that the name stands beside
    dx: float
    dy: float = 4


BASE = 4  # the colour of what techniques are compared with
CURVES = [
    Curve("plain", ["plain half", "plain short", "plain"], BASE, at=0, dx=10),
    Curve("plain, padded", ["padded"], BASE, at=0, dx=-10),
    Curve("plain, --layers 3", ["3 layers"], BASE, at=0, dx=-6, dy=18),
    Curve("--ltd", ["ltd half", "ltd 310K", "constant 16"], 1, at=2, dx=10),
    Curve(
        "--curriculum seqlen --ltd --pack", ["all half", "all 300K", "all short"], 0, at=0, dx=-10
    ),
    Curve("--pseudo, from 3 layers", ["grow 3 until 0.75 450K"], 3, at=0, dx=10),
    Curve("--pack", ["pack short"], 2, at=0, dx=-6, dy=18),
    Curve("--curriculum seqlen", ["curriculum short"], 5, at=0, dx=10, dy=-2),
]


def figure(trainer: str) -> str:
    """The README's picture: held-out loss against seconds, at the ends of runs."""
    losses = measured("val_bpb", trainer)
    cost = costs_of(trainer)
    drawn = []
    labels = []
    for curve in CURVES:
        x = np.array([cost[recipe] for recipe in curve.recipes])
        ends = [ends_of(losses[recipe]) for recipe in curve.recipes]
        y = np.array([statistics.mean(of_seeds) for of_seeds in ends])
        drawn.append(Series(curve.label, x, y, "dots", curve.color))
        for share, of_seeds in zip(x, ends, strict=True):
            bar = np.array([min(of_seeds), max(of_seeds)])
            drawn.append(Series("", np.full(2, share), bar, color=curve.color))
        labels.append(Label(x[curve.at], y[curve.at], curve.label, curve.color, curve.dx, curve.dy))
    chart = Chart(
        title="Held-out loss",
        unit="bits per byte",
        x_unit="seconds of all steps, as a share of the plain run's",
        series=drawn,
        labels=tuple(labels),
        note="GPT nano, 1.7 M parameters, two CPU cores. A dot is the end of a run, the mean of"
        " three seeds; its bar goes from the least to the most. Lines join different --tokens.",
        size=(780, 420),
    )
    return picture([chart])


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figure", type=Path, help="write the README's picture here instead")
    args = parser.parse_args(argv)
    if args.figure:
        args.figure.write_text(figure("split"))
        return
    print("docs/curriculum.md\n")
    print(recipes_table(["plain", "curriculum", *GROUPS["rows"]], "plain", "end"), "\n")
    print(recipes_table(["pack", *GROUPS["pieces"]], "pack", "end"), "\n")
    print(recipes_table(list(GROUPS["bert"]), "bert", "end"), "\n")
    timed = costs_of("split")
    print("docs/ltd.md\n")
    print(budgets_table([recipe for recipe in GROUPS["ltd"] if recipe in timed], "split"), "\n")
    print(rates_table(["plain", "constant 16", *GROUPS["rates"]], "split"), "\n")
    print("docs/scale.md\n")
    print(share_table("split"), "\n")
    for group in ("share", "small", "grown"):
        print(budgets_table([r for r in GROUPS[group] if r in timed], "split"), "\n")
    print("README.md\n")
    print(time_table([recipe for recipe in README if recipe in timed], "split"))


if __name__ == "__main__":
    main(sys.argv[1:])
