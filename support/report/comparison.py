"""A page about several runs, which tells those that are one recipe with other seeds, and what a
loss costs each.

A loss is reached where the line between two evaluations crosses it for the first time. Seconds are
those of the steps; evaluations and checkpoints are left out.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from support.report.charts import Chart, in_time
from support.report.page import Page, Section, Table, columns_of, table
from support.report.run_page import (
    UNITS,
    RunLog,
    amount,
    evaluated,
)
from support.settings import several

# Settings of the group "run" that make no other recipe. --data and --compile may differ when a run
# goes on, too, but change losses and seconds by more than a seed does.
ASIDE = ("seed", "out", "resume", "keep", "wandb", "eval_every", "checkpoint_every")
WIDE = 20.0  # the axis is logarithmic if the longest run took more times the shortest one's time


class Recipe(NamedTuple):
    """Runs that differ only in their seed."""

    name: str  # in legends and tables
    flags: str  # that not all recipes have
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
    logs = all_runs(recipes)
    heading = f"The recipes, and their loss at the end {text_of(logs, last=True)}"
    charts = [chart_against(unit, recipes, loss) for unit in UNITS]
    parts = [
        Section(heading, tables=[recipes_table(recipes)]),
        cost_section(recipes, loss, asked),
        Section(f"Held-out loss against its cost, {text_of(logs)}", charts),
        Section("Settings that differ", tables=[changed]),
        Section("The runs", tables=[runs_table(recipes)]),
    ]
    title = f"{several(len(recipes), 'recipe')}, {several(len(logs), 'run')}"
    return Page(title, f"Ratios are to the first recipe, {recipes[0].name}.", [], parts)


# ---- recipes


def recipes_of(logs: Sequence[RunLog]) -> list[Recipe]:
    """Runs with the same settings together, in the order of their first runs.

    A recipe has the name of its first run's folder, or a number if two of these are the same.
    """
    aside = {f"run.{name}" for name in ASIDE}
    groups: dict[str, Recipe] = {}
    for log in logs:
        settings = {name: value for name, value in log.settings.items() if name not in aside}
        key = repr(sorted(settings.items()))
        groups.setdefault(key, Recipe("", "", settings, [])).runs.append(log)
    recipes = list(groups.values())
    flags = [flags_of(recipe.runs[0]) for recipe in recipes]
    shared = set.intersection(*map(set, flags))
    firsts = {recipe.runs[0].name for recipe in recipes}
    named = []
    for number, (recipe, given) in enumerate(zip(recipes, flags, strict=True), 1):
        more = f" and {len(recipe.runs) - 1} more" if len(recipe.runs) > 1 else ""
        is_clear = len(firsts) == len(recipes)
        name = f"{recipe.runs[0].name}{more}" if is_clear else f"recipe {number}"
        own = " ".join(flag for flag in given if flag not in shared)
        plain = "no other flags" if shared else "the defaults"
        named.append(recipe._replace(name=name, flags=f"`{own}`" if own else plain))
    return named


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


# ---- parts of the page


def all_runs(recipes: Sequence[Recipe]) -> list[RunLog]:
    return [log for recipe in recipes for log in recipe.runs]


def text_of(logs: Sequence[RunLog], last: bool = False) -> str:
    """What the evaluations of these runs read: those on the way, or the last ones."""
    lines = [(log, log.final if last else log.on_the_way[0]) for log in logs if log.evals]
    texts = {log.text_of(line) for log, line in lines if line}
    return texts.pop() if len(texts) == 1 else "on texts that differ"


def with_seeds(values: Sequence[float], digits: int) -> str:
    """The mean with the least and the most over seeds, or that there is one only; "" for none.

    Example: [1.0, 1.2] to two digits -> "1.10 (1.00 to 1.20)"
    """
    if len(values) < 2:
        return "".join(f"{value:.{digits}f} (one seed)" for value in values)
    least, most = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def recipes_table(recipes: Sequence[Recipe]) -> Table:
    """The flags of each recipe, what its runs reached at their ends, and the mean of their cost."""

    def ended(recipe: Recipe) -> list[RunLog]:
        return [log for log in recipe.runs if log.final]

    def reached(recipe: Recipe) -> str:
        return with_seeds([log.final["val_bpb"] for log in ended(recipe)], digits=3)

    def mean(recipe: Recipe, unit: str) -> str:
        runs = ended(recipe) or recipe.runs
        return amount(statistics.mean(log.spent()[unit] for log in runs), unit)

    columns = {
        "recipe": lambda recipe: recipe.name,
        "flags": lambda recipe: recipe.flags,
        "bits per byte": lambda recipe: reached(recipe) or "not finished",
        **columns_of(UNITS, mean),
        "ended": lambda recipe: f"{len(ended(recipe))} of {len(recipe.runs)}",
    }
    return table(columns, recipes, colors=range(len(recipes)))


def cost_section(recipes: Sequence[Recipe], loss: float | None, asked: bool) -> Section:
    if loss is None:
        return Section("")
    columns = {
        "recipe": lambda pair: pair[0].name,
        **columns_of(UNITS, lambda pair, unit: cost_cell(pair[1], unit)),
        "runs that reach it": lambda pair: f"{pair[1].reached} of {pair[1].of}",
    }
    why = "where the first recipe's evaluations on the way end"
    why += ", the highest of its seeds" if len(recipes[0].runs) > 1 else ""
    notes = [
        f"{loss:.3f} bits per byte is {'as asked for with --loss' if asked else why}.",
        "Each cell is the ratio to the mean of the first recipe's runs, with the least and the most"
        " over seeds, and the mean itself. A loss is reached where the line between two"
        " evaluations crosses it first; ≤ says that it was reached at the first evaluation already."
        " Seconds are those of the steps: evaluations and checkpoints are left out.",
    ]
    pairs = list(zip(recipes, costs(recipes, loss), strict=True))
    shown = table(columns, pairs, colors=range(len(pairs)))
    heading = f"Cost to reach {loss:.3f} bits per byte {text_of(all_runs(recipes))}"
    return Section(heading, tables=[shown], notes=notes)


def cost_cell(cost: Costs, unit: str) -> str:
    """The ratio with its spread; below it the mean of what was spent."""
    if not cost.reached:
        return "not reached"
    mean = amount(statistics.mean(cost.spent[unit]), unit)
    ratio = with_seeds(cost.ratios[unit], digits=2)
    if not ratio:
        return mean
    return f"{'≤ ' if cost.at_most else ''}{ratio}\n{mean}"


def chart_against(unit: str, recipes: Sequence[Recipe], loss: float | None) -> Chart:
    """Held-out loss of every run against one of UNITS."""
    curves = [
        evaluated(log._replace(axis=unit), recipe.name, log.on_the_way, color)
        for color, recipe in enumerate(recipes)
        for log in recipe.runs
    ]
    ends = [float(curve.x[-1]) for curve in curves if len(curve.x)] or [0.0]
    log_x = unit == "seconds" and max(ends) > WIDE * min(ends) > 0
    title = f"Loss against {UNITS[unit]}"
    return in_time(Chart(title, "bits per byte", UNITS[unit], curves, level=loss, log_x=log_x))


def runs_table(recipes: Sequence[Recipe]) -> Table:
    made_with = {name: name for name in ("commit", "torch", "machine", "threads")}
    columns = {
        "run": lambda log: str(log.folder),
        "seed": lambda log: str(log.settings["run.seed"]),
        "bits per byte": lambda log: f"{log.final['val_bpb']:.3f}" if log.final else log.state,
        "steps": lambda log: f"{log.steps_done:,}",
        **columns_of(made_with, lambda log, name: str(log.starts[-1].get(name, ""))),
    }
    colors = [color for color, recipe in enumerate(recipes) for _ in recipe.runs]
    return table(columns, all_runs(recipes), colors=colors)
