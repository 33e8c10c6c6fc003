"""The page about several runs: which are one recipe with other seeds, and what a loss costs each.

A loss is reached where the line between two evaluations crosses it for the first time. Seconds are
those of the steps; evaluations and checkpoints are left out.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from support.report.charts import Chart, series
from support.report.page import Page, Section, Table, spread
from support.report.run_page import UNITS, RunLog, amount, summary

# Settings of the group "run" that make no other recipe. --data and --compile may differ when a run
# goes on, too, but change losses and seconds by more than a seed does.
ASIDE = ("seed", "out", "resume", "keep", "tensorboard", "wandb", "eval_every", "checkpoint_every")
HOURS = 3600.0
MINUTES = 60.0
WIDE = 20.0  # the axis is logarithmic if the longest run took more times the shortest one's time


class Recipe(NamedTuple):
    """Runs that differ only in their seed."""

    label: str  # the flags that not all recipes have
    settings: dict[str, Any]
    runs: list[RunLog]


class Costs(NamedTuple):
    """What a recipe's runs spent until they reached a loss; the first recipe's mean is 1."""

    reached: int  # runs
    of: int
    at_most: bool  # a run's first evaluation was below the loss already
    spent: dict[str, list[float]]
    ratios: dict[str, list[float]]  # empty where the first recipe never reached the loss


def page(recipes: Sequence[Recipe], loss: float | None, asked: bool, changed: Table) -> Page:
    """A page about several runs.

    Args: loss    in bits per byte, whose cost is compared; None without any evaluation
          asked   whether the user named it
          changed the settings that differ between the recipes
    """
    logs = [log for recipe in recipes for log in recipe.runs]
    charts = [chart_against(unit, recipes, loss) for unit in UNITS]
    parts = [
        cost_section(recipes, loss, asked),
        Section("Held-out loss against its cost", charts),
        Section("What each recipe spent and reached", tables=[totals(recipes)]),
        Section("Settings that differ", tables=[changed]),
        Section("The runs", tables=[runs_table(recipes)], notes=cautions(logs)),
    ]
    title = f"Recipes: {len(recipes)}, runs: {len(logs)}"
    return Page(title, f"Ratios are to the first recipe, {recipes[0].label}.", [], parts)


# ---- recipes


def recipes_of(logs: Sequence[RunLog]) -> list[Recipe]:
    """Runs with the same settings together, in the order of their first runs."""
    aside = {f"run.{name}" for name in ASIDE}
    groups: dict[str, Recipe] = {}
    for log in logs:
        settings = {name: value for name, value in log.settings.items() if name not in aside}
        key = repr(sorted(settings.items()))
        groups.setdefault(key, Recipe("", settings, [])).runs.append(log)
    recipes = list(groups.values())
    flags = [flags_of(recipe.runs[0]) for recipe in recipes]
    shared = set.intersection(*map(set, flags))
    labels: list[str] = []
    for recipe, given in zip(recipes, flags, strict=True):
        own = " ".join(flag for flag in given if flag not in shared)
        label = f"`{own}`" if own else "no other flags" if shared else "the defaults"
        labels.append(label if label not in labels else f"{label}, {recipe.runs[0].name}")
    return [r._replace(label=label) for r, label in zip(recipes, labels, strict=True)]


def flags_of(log: RunLog) -> list[str]:
    """The flags that a run was started with, and those that it went on with.

    Example: ["--tokens 60K", "--ltd", "then --tokens 90K"]
    """
    aside = {f"--{name.replace('_', '-')}" for name in ASIDE}
    flags: list[str] = []
    for number, start in enumerate(log.starts):
        for flag in re.split(r" (?=--)", start["argv"])[1:]:
            if re.split("[ =]", flag)[0] not in aside:
                flags.append(f"then {flag}" if number else flag)
    return list(dict.fromkeys(flags))


# ---- costs


def target_of(first: Recipe) -> float | None:
    """The loss that the first recipe ends with, the highest of its seeds: each of them reaches it.

    Taken from the evaluations on the way, on whose text the other runs are compared.
    """
    return max((log.on_the_way[-1]["val_bpb"] for log in first.runs if log.evals), default=None)


def cost_to_reach(log: RunLog, loss: float) -> dict[str, float] | None:
    """What a run spent, by the names of UNITS, until its held-out loss fell to `loss`.

    Args:    loss in bits per byte
    Returns: None if it never did; what its first evaluation took if that was there already
    Example: 3.0 after 100 tokens and 2.0 after 200: 2.5 is reached after 150
    """
    losses = [line["val_bpb"] for line in log.on_the_way]
    spent = [log.spent(line["step"]) for line in log.on_the_way]
    first = next((number for number, bpb in enumerate(losses) if bpb <= loss), None)
    if not first:
        return None if first is None else spent[0]
    before = spent[first - 1]
    share = (losses[first - 1] - loss) / (losses[first - 1] - losses[first])
    return {unit: before[unit] + share * (spent[first][unit] - before[unit]) for unit in UNITS}


def costs(recipes: Sequence[Recipe], loss: float) -> list[Costs]:
    """What each recipe needs for a loss, and the ratios to the mean of the first one's runs.

    Example: the first needs 100 and 120 tokens, another 55 and 66: its ratios are 0.5 and 0.6
    """
    result: list[Costs] = []
    for recipe in recipes:
        reached = [cost for cost in (cost_to_reach(log, loss) for log in recipe.runs) if cost]
        spent = {unit: [cost[unit] for cost in reached] for unit in UNITS}
        first = result[0].spent if result else spent
        ratios = {
            unit: [value / statistics.mean(first[unit]) for value in spent[unit] if first[unit]]
            for unit in UNITS
        }
        at_most = any(log.on_the_way[0]["val_bpb"] < loss for log in recipe.runs if log.evals)
        result.append(Costs(len(reached), len(recipe.runs), at_most, spent, ratios))
    return result


def comparison_summary(recipes: Sequence[Recipe], loss: float | None) -> dict[str, Any]:
    """Every number of the page, for --json."""
    each = costs(recipes, loss) if loss is not None else [None] * len(recipes)
    return {
        "loss": loss,
        "recipes": [
            {
                "label": recipe.label,
                "settings": recipe.settings,
                "cost": cost._asdict() if cost else None,
                "runs": [summary(log) for log in recipe.runs],
            }
            for recipe, cost in zip(recipes, each, strict=True)
        ],
        "cautions": cautions([log for recipe in recipes for log in recipe.runs]),
    }


def cautions(logs: Sequence[RunLog]) -> list[str]:
    """What keeps these runs from being compared as they are, in whole sentences."""
    sentences = []
    texts = {log.on_the_way[0].get("bytes") for log in logs if log.evals}
    if len(texts) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted(size or 0 for size in texts))
        sentences.append(
            f"Not the same held-out text: evaluations on the way read {sizes} bytes of it. Losses"
            " are compared all the same; equal --data and --eval-tokens make that fair."
        )
    for name in ("machine", "threads", "torch", "commit"):
        values = ", ".join(sorted({str(log.starts[-1].get(name, "unknown")) for log in logs}))
        if ", " in values:
            effect = "Made with several commits" if name == "commit" else "Seconds say less here"
            sentences.append(f"{effect}: runs have {name} {values}.")
    if unfinished := [str(log.folder) for log in logs if not log.final]:
        sentences.append(f"Not finished: {', '.join(unfinished)}.")
    if damaged := [f"{log.folder} ({log.unread})" for log in logs if log.unread]:
        sentences.append(f"Damaged lines of a log, left out: {', '.join(damaged)}.")
    return sentences


# ---- parts of the page


def cost_section(recipes: Sequence[Recipe], loss: float | None, asked: bool) -> Section:
    if loss is None:
        return Section("Cost to reach a loss")
    rows = []
    for recipe, cost in zip(recipes, costs(recipes, loss), strict=True):
        at_most = "\nat the first evaluation already" if cost.at_most else ""
        reached = f"{cost.reached} of {len(recipe.runs)}{at_most}"
        rows.append([recipe.label, *(cost_cell(cost, unit) for unit in UNITS), reached])
    why = "where the first recipe's evaluations on the way end"
    why += ", the highest of its seeds" if len(recipes[0].runs) > 1 else ""
    notes = [
        f"{loss:.4f} bits per byte is {'as asked for with --loss' if asked else why}.",
        "Each cell is the ratio to the mean of the first recipe's runs, with the least and the most"
        " over seeds, and the mean itself. A loss is reached where the line between two"
        " evaluations crosses it first. Seconds are those of the steps: evaluations and"
        " checkpoints are left out.",
    ]
    columns = ["recipe", *UNITS.values(), "runs that reach it"]
    table = Table(columns, rows, colors=range(len(recipes)))
    return Section(f"Cost to reach {loss:.4f} bits per byte", tables=[table], notes=notes)


def cost_cell(cost: Costs, unit: str) -> str:
    """The ratio with its spread; below it the mean of what was spent."""
    if not cost.reached:
        return "not reached"
    mean = amount(statistics.mean(cost.spent[unit]), unit)
    ratio = spread(cost.ratios[unit], digits=2)
    if not ratio:
        return mean
    return f"{'≤ ' if cost.at_most else ''}{ratio}\n{mean}"


def chart_against(unit: str, recipes: Sequence[Recipe], loss: float | None) -> Chart:
    """Held-out loss of every run against one of UNITS."""
    curves = []
    for color, recipe in enumerate(recipes):
        for log in recipe.runs:
            x = np.array([log.spent(line["step"])[unit] for line in log.on_the_way])
            y = np.array([line["val_bpb"] for line in log.on_the_way])
            curves.append(series(recipe.label, x, y, "dots", color))
    ends = [float(curve.x[-1]) for curve in curves if len(curve.x)] or [0.0]
    name = UNITS[unit]
    log_x = False
    if unit == "seconds":
        scale = HOURS if max(ends) > 4 * HOURS else MINUTES if max(ends) > 10 * MINUTES else 1.0
        name = {HOURS: "hours", MINUTES: "minutes", 1.0: "seconds"}[scale] + " of training steps"
        curves = [curve._replace(x=curve.x / scale) for curve in curves]
        log_x = max(ends) > WIDE * min(ends) > 0
    title = f"Loss against {UNITS[unit]}"
    return Chart(title, "bits per byte", name, curves, level=loss, log_x=log_x)


def totals(recipes: Sequence[Recipe]) -> Table:
    rows = []
    for recipe in recipes:
        ended = [log for log in recipe.runs if log.final]
        spent = [log.spent() for log in ended or recipe.runs]
        reached = spread([log.final["val_bpb"] for log in ended], digits=4)
        means = [amount(statistics.mean(run[unit] for run in spent), unit) for unit in UNITS]
        number = f"{len(ended)} of {len(recipe.runs)}"
        rows.append([recipe.label, reached or "not finished", *means, number])
    columns = ["recipe", "bits per byte at the end", *UNITS.values(), "runs that ended"]
    return Table(columns, rows, colors=range(len(recipes)))


def runs_table(recipes: Sequence[Recipe]) -> Table:
    made_with = ("commit", "torch", "machine", "threads")
    rows = []
    for recipe in recipes:
        for log in recipe.runs:
            end = f"{log.final['val_bpb']:.4f}" if log.final else "not finished"
            made = [str(log.starts[-1].get(name, "")) for name in made_with]
            seed = str(log.settings["run.seed"])
            rows.append([str(log.folder), seed, end, f"{log.steps_done:,}", *made])
    colors = [color for color, recipe in enumerate(recipes) for _ in recipe.runs]
    return Table(["run", "seed", "bits per byte", "steps", *made_with], rows, colors)
