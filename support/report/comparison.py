"""Runs side by side: which are one recipe with other seeds, and what a loss costs each.

A loss is reached where the line between two evaluations crosses it for the first time. Seconds are
those of the steps; evaluations and checkpoints are left out.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from support.base.numbers import duration, short
from support.report.charts import Chart, series
from support.report.log import UNITS, RunLog, summary
from support.report.page import Fact, Page, Section, Table, spread


class Recipe(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: str  # what tells it from the other recipes
    settings: dict[str, Any]
    runs: list[RunLog]

    def finals(self) -> list[float]:
        """What the last evaluation of each finished run found, in bits per byte."""
        return [log.final["val_bpb"] for log in self.runs if log.final]


class Cost(NamedTuple):
    """What one run spent until it reached a loss."""

    spent: dict[str, float]  # by the names of UNITS; NaN for what is not in the log
    at_most: bool = False  # its first evaluation was there already


class Costs(NamedTuple):
    """What a recipe's runs spent until they reached a loss; the first recipe's mean is 1."""

    reached: int  # runs
    of: int
    at_most: bool
    spent: dict[str, list[float]]
    ratios: dict[str, list[float]]


def grouped(logs: Sequence[RunLog], settings: Sequence[dict], aside: set[str]) -> list[Recipe]:
    """The recipes, in the order of their first runs; not yet labelled.

    Args: settings of each run, all with the same names
          aside    names of settings that make no other recipe, as the seed
    """
    groups: dict[tuple, Recipe] = {}
    for log, all_settings in zip(logs, settings, strict=True):
        mine = {name: value for name, value in all_settings.items() if name not in aside}
        key = tuple(sorted((name, repr(value)) for name, value in mine.items()))
        groups.setdefault(key, Recipe("", mine, [])).runs.append(log)
    return list(groups.values())


def cost_to_reach(log: RunLog, loss: float) -> Cost | None:
    """What a run spent until its held-out loss was so low; None if it never was.

    Args:    loss in bits per byte
    Example: 3.0 after 100 tokens and 2.0 after 200: 2.5 is reached after 150
    """
    before: tuple[float, dict[str, float]] | None = None
    for line in log.on_the_way:
        now = line["val_bpb"]
        spent = log.spent(line["step"]) | {"consumed_tokens": float(line["consumed_tokens"])}
        if now <= loss:
            if before is None:
                return Cost(spent, at_most=now < loss)
            share = (before[0] - loss) / (before[0] - now)
            return Cost({u: before[1][u] + share * (spent[u] - before[1][u]) for u in UNITS})
        before = (now, spent)
    return None


def target_of(first: Recipe) -> float | None:
    """The loss that the first recipe ends with, the highest of its seeds: each of them reaches it.

    That of the evaluations on the way, on whose text the other runs are compared.
    """
    ends = [log.on_the_way[-1]["val_bpb"] for log in first.runs if log.evals]
    return max(ends) if ends else None


def costs(recipes: Sequence[Recipe], loss: float) -> list[Costs]:
    """What each recipe needs for a loss, and the ratios to the mean of the first one's runs.

    Example: the first needs 100 and 120 tokens, another 55 and 66: its ratios are 0.5 and 0.6
    """
    found, base = [], dict.fromkeys(UNITS, math.nan)
    for number, recipe in enumerate(recipes):
        each = [cost_to_reach(log, loss) for log in recipe.runs]
        reached = [cost for cost in each if cost]
        spent = {unit: [cost.spent[unit] for cost in reached] for unit in UNITS}
        if number == 0 and reached:
            base = {unit: float(np.mean(spent[unit])) for unit in UNITS}
        ratios = {unit: [value / base[unit] for value in spent[unit]] for unit in UNITS}
        at_most = any(cost.at_most for cost in reached)
        found.append(Costs(len(reached), len(each), at_most, spent, ratios))
    return found


def differing(recipes: Sequence[Recipe]) -> list[str]:
    """The names of the settings that are not the same in all recipes."""
    names = [name for recipe in recipes for name in recipe.settings]
    return [
        name
        for name in dict.fromkeys(names)
        if len({repr(recipe.settings.get(name)) for recipe in recipes}) > 1
    ]


def cautions(recipes: Sequence[Recipe]) -> list[str]:
    """What keeps these runs from being compared as they are, in whole sentences."""
    logs = [log for recipe in recipes for log in recipe.runs]
    told = []
    texts = {log.on_the_way[0].get("bytes") for log in logs if log.evals}
    if len(texts) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted(size or 0 for size in texts))
        told.append(
            f"Not the same held-out text: evaluations on the way read {sizes} bytes of it. Losses"
            " are compared all the same; equal --data and --eval-tokens make that fair."
        )
    for name in ("machine", "threads", "torch", "commit"):
        values = {str(log.starts[-1].get(name, "unknown")) for log in logs if log.starts}
        if len(values) > 1:
            which = ", ".join(sorted(values))
            what = "Made with several commits" if name == "commit" else "Seconds say less here"
            told.append(f"{what}: runs have {name} {which}.")
    if unfinished := [str(log.folder) for log in logs if not log.final]:
        told.append(f"Not finished: {', '.join(unfinished)}.")
    if torn := [f"{log.folder} ({log.unread})" for log in logs if log.unread]:
        told.append(f"Lines of a log torn or incomplete, and left out: {', '.join(torn)}.")
    return told


# ---- comparison report
#
# The page about several runs. What it compares is computed in comparison.py.


HOURS, MINUTES = 3600.0, 60.0
WIDE = 20.0  # where the longest run took so many times the shortest, the axis is logarithmic


def comparison_summary(recipes: Sequence[Recipe], loss: float | None) -> dict[str, Any]:
    """Every number of the page, for --json."""
    found = costs(recipes, loss) if loss is not None else [None] * len(recipes)
    return {
        "loss": loss,
        "recipes": [
            {
                "label": recipe.label,
                "settings": recipe.settings,
                "cost": cost._asdict() if cost else None,
                "ratios": {unit: ratio_summary(cost.ratios[unit]) for unit in UNITS}
                if cost
                else {},
                "runs": [summary(log, "") for log in recipe.runs],
            }
            for recipe, cost in zip(recipes, found, strict=True)
        ],
        "cautions": cautions(recipes),
    }


def ratio_summary(ratios: list[float]) -> dict[str, float] | None:
    told = [ratio for ratio in ratios if math.isfinite(ratio)]
    if not told:
        return None
    middle = {"mean": statistics.mean(told), "median": statistics.median(told)}
    return {"least": min(told), **middle, "most": max(told)}


def page(
    recipes: Sequence[Recipe], loss: float | None, asked: bool, flag_of: Callable[[str], str]
) -> Page:
    """A page about several runs.

    Args: loss    in bits per byte, to which costs are told; None without any evaluation
          asked   whether the user named it
          flag_of the name of a setting -> its flag
    """
    runs = sum(len(recipe.runs) for recipe in recipes)
    title = f"{counted(len(recipes), 'recipe')}, {counted(runs, 'run')}"
    lead = f"Ratios are to the first recipe, {recipes[0].label}."
    sections = [
        cost_section(recipes, loss, asked),
        Section(
            "Held-out loss against what it cost",
            charts=[chart_against(unit, recipes, loss) for unit in UNITS],
            legend=[(recipe.label, color) for color, recipe in enumerate(recipes)],
        ),
        Section("What each recipe spent and reached", tables=[totals(recipes)]),
        Section("Settings that differ", tables=settings_table(recipes, flag_of)),
        Section("The runs", tables=[runs_table(recipes)], notes=cautions(recipes)),
    ]
    return Page(title, lead, facts(recipes), [s for s in sections if s.charts or s.tables])


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def facts(recipes: Sequence[Recipe]) -> list[Fact]:
    """The recipe that ends lowest."""
    ended = [recipe for recipe in recipes if recipe.finals()]
    if not ended:
        return []
    best = min(ended, key=lambda recipe: statistics.mean(recipe.finals()))
    first = recipes[0].finals()
    found = [
        Fact("Lowest bits per byte at the end", f"{statistics.mean(best.finals()):.4f}", best.label)
    ]
    if first and best is not recipes[0]:
        found.append(Fact("The first recipe", f"{statistics.mean(first):.4f}", recipes[0].label))
    return found


def cost_section(recipes: Sequence[Recipe], loss: float | None, asked: bool) -> Section:
    if loss is None:
        return Section("Cost to reach a loss")
    rows = [
        [recipe.label, *(cost_cell(cost, unit) for unit in UNITS), reached_cell(cost)]
        for recipe, cost in zip(recipes, costs(recipes, loss), strict=True)
    ]
    columns = ["recipe", *UNITS.values(), "runs that reach it"]
    why = (
        "as asked for with --loss"
        if asked
        else "where the first recipe's evaluations on the way end"
    )
    notes = [
        f"{loss:.4f} bits per byte is {why}"
        + ("." if asked or len(recipes[0].runs) == 1 else ", the highest of its seeds."),
        "Each cell is the ratio to the mean of the first recipe's runs, with the least and the most"
        " over seeds, and the mean itself. A loss is reached where the line between two"
        " evaluations crosses it first. Seconds are those of the steps: evaluations and"
        " checkpoints are left out.",
    ]
    table = Table(columns, rows, colors=range(len(recipes)))
    return Section(f"Cost to reach {loss:.4f} bits per byte", tables=[table], notes=notes)


def cost_cell(cost: Costs, unit: str) -> str:
    """The ratio with its spread; below it the mean of what was spent."""
    if not cost.reached:
        return "not reached"
    if not np.isfinite(cost.spent[unit]).all():
        return "not in the log"
    mean = amount(statistics.mean(cost.spent[unit]), unit)
    ratios = cost.ratios[unit]
    if not np.isfinite(ratios).all():  # the first recipe has none
        return mean
    one = len(ratios) == 1
    ratio = f"{ratios[0]:.2f}" if one else spread(ratios, digits=2)
    return f"{'≤ ' if cost.at_most else ''}{ratio}\n{mean}"


def reached_cell(cost: Costs) -> str:
    at_most = "\nat the first evaluation already" if cost.at_most else ""
    return f"{cost.reached} of {cost.of}{at_most}"


def amount(value: float, unit: str) -> str:
    if unit == "seconds":
        return duration(value)
    return short(value, unit="FLOP" if unit == "flops" else "")


def chart_against(unit: str, recipes: Sequence[Recipe], loss: float | None) -> Chart:
    """Held-out loss of every run against one of UNITS."""
    curves = []
    for color, recipe in enumerate(recipes):
        for log in recipe.runs:
            evals = log.on_the_way
            x = np.array([log.spent(line["step"])[unit] for line in evals], dtype=float)
            y = np.array([line["val_bpb"] for line in evals], dtype=float)
            seed = f"{recipe.label}, {log.name}" if len(recipe.runs) > 1 else recipe.label
            curves.append(series(seed, x, y, "dots", color))
    curves = [curve for curve in curves if len(curve.x)]
    name = UNITS[unit]
    high = max((float(curve.x.max()) for curve in curves), default=0.0)
    if unit == "seconds" and high > 10 * MINUTES:
        scale, name = (HOURS, "hours") if high > 4 * HOURS else (MINUTES, "minutes")
        curves = [curve._replace(x=curve.x / scale) for curve in curves]
    ends = [float(curve.x[-1]) for curve in curves] or [1.0]
    log_x = unit == "seconds" and max(ends) > WIDE * min(ends) > 0
    of_steps = " of training steps" if unit == "seconds" else ""
    title = f"Against {UNITS[unit]}"
    return Chart(title, "bits per byte", name + of_steps, curves, level=loss, log_x=log_x)


def totals(recipes: Sequence[Recipe]) -> Table:
    rows = []
    for recipe in recipes:
        ended = [log for log in recipe.runs if log.final]
        spent = [log.spent() for log in ended or recipe.runs]
        finals = recipe.finals()
        reached = f"{finals[0]:.4f}" if len(finals) == 1 else spread(finals, digits=4)
        cells = [amount(statistics.mean(one[unit] for one in spent), unit) for unit in UNITS]
        cells = [cell or "not in the log" for cell in cells]
        rows.append(
            [recipe.label, reached or "not finished", *cells, f"{len(ended)} of {len(recipe.runs)}"]
        )
    columns = ["recipe", "bits per byte at the end", *UNITS.values(), "runs that ended"]
    return Table(columns, rows, colors=range(len(recipes)))


def settings_table(recipes: Sequence[Recipe], flag_of: Callable[[str], str]) -> list[Table]:
    names = differing(recipes)
    rows = [
        [f"`{flag_of(name)}`", *(shown(recipe.settings.get(name)) for recipe in recipes)]
        for name in names
    ]
    return [Table(["", *(recipe.label for recipe in recipes)], rows)] if rows else []


def shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def runs_table(recipes: Sequence[Recipe]) -> Table:
    rows, colors = [], []
    for color, recipe in enumerate(recipes):
        for log in recipe.runs:
            start = log.starts[-1] if log.starts else {}
            end = f"{log.final['val_bpb']:.4f}" if log.final else "not finished"
            seed = str(log.settings.get("run.seed", ""))
            made = [str(start.get(name, "")) for name in ("commit", "torch", "machine", "threads")]
            rows.append([str(log.folder), seed, end, f"{log.steps_done:,}", *made])
            colors.append(color)
    columns = ["run", "seed", "bits per byte", "steps", "commit", "torch", "machine", "threads"]
    return Table(columns, rows, colors)
