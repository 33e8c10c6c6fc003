"""Show one run, or compare several, on one HTML page, with figures that their logs only imply.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
    python report.py runs/a runs/b runs/c --out compared.html
    python report.py runs/a runs/b --loss 2.0                # also compare costs to this loss

How a step becomes a point in a chart: in step 7 of a run, --ltd lets the middle layers see 16 of
the 256 tokens of each row.

    1  log     {"event": "train", "step": 7, "consumed_tokens": 19712, "kept_tokens": 16, ...}
               a line of log.jsonl, written by `Run.log_step` from `Plan.columns` and `Done`
    2  column  steps["consumed_tokens"][6] == 19712.0, steps["kept_tokens"][6] == 16.0
               read_run: an array for each field in COLUMNS and CHARTS
    3  curve   the point (19712, 16), in the colour of its recipe   curves_of
    4  chart   "Kept tokens of a row", against consumed tokens      charts_of, figure, plot

A key of CHARTS is the field that its chart shows; to plot a field of your own, add a line there. A
field that never changes gets no chart.

Runs whose settings differ only in the seed are one recipe: a column of numbers, with their mean and
spread, and one colour. The first recipe is the one that others are compared with. Only logs are
read: no model, data or checkpoint. report.html holds the frame of the page and its colours, for
light and dark.

In reading order: logs, the page, its result in words, its tables, its charts, one chart as SVG, the
command.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

import config
from support.numbers import PREFIXES, duration, real_number, several, short
from support.process import Parser, exit_cleanly
from support.run import read_log
from support.settings import Flat, Settings, as_given, flattened, settings_of
from support.store import atomic_write

FRAME = Path(__file__).with_suffix(".html")
PAGE = "compared.html"  # of several runs, unless --out names another
# What a run spends, and what a comparison may hold fixed. Time is the time of the steps, without
# evaluations and checkpoints.
UNITS = {"consumed_tokens": "consumed tokens", "real_tokens": "raw tokens"}
UNITS |= {"flops": "FLOPs", "minutes": "minutes"}
# {column: (title, unit, factor)}
CHARTS = {
    "loss": ("Training loss", "nats, smoothed", 1),
    "grad_norm": ("Gradient norm", "smoothed", 1),
    "lr": ("Learning rate", "", 1),
    "max_piece_len": ("Longest piece", "tokens", 1),
    "pool": ("Samples that may be drawn", "", 1),
    "kept_tokens": ("Kept tokens", "of a row", 1),
    "padding_share": ("Padding", "% of positions, smoothed", 100),
    "ms": ("Step time", "ms, smoothed", 1),
    "tokens_per_s": ("Raw tokens per second", "smoothed", 1),
    "mfu": ("MFU", "% of the peak, smoothed", 100),
}
MEASURED = ("loss", "grad_norm", "padding_share", "ms", "tokens_per_s", "mfu")  # noisy: smoothed
COLUMNS = (*UNITS, "step", "epochs", "layer_tokens", "positions")
AXIS = "consumed_tokens"  # horizontal axis of charts
BITS = "bits per byte"
# settings in which runs of one recipe may differ
OF_A_RUN = ("seed", "out", "resume", "keep", "wandb", "eval_every", "checkpoint_every")
MAY_DIFFER = {f"run.{name}" for name in OF_A_RUN}


# ---- logs


class RunLog(NamedTuple):
    folder: Path
    lines: dict[str, list[dict]]  # by event: run, eval, stage, sample, ...; "torn": damaged lines
    settings: Flat  # at the last start or resume
    held_out: list[dict]  # evaluations: on the way on parts of the text, which are as hard as all
    final: list[dict]  # the one at the end, on more of it; [] before that
    steps: dict[str, np.ndarray]  # columns of the "train" lines: (n,) float64, NaN if not logged

    def at(self, column: str, step: float = math.inf) -> float:
        """Return the value of a cumulative column after a step, or at the end."""
        done = int(np.searchsorted(self.steps["step"], step, side="right"))
        return float(self.steps[column][done - 1]) if done else 0.0

    def curve(self, unit: str) -> tuple[np.ndarray, np.ndarray]:
        """Return what was spent, in one of UNITS, until each evaluation, and its bits per byte."""
        spent = np.array([self.at(unit, line["step"]) for line in self.held_out])
        return spent, np.array([line["val_bpb"] for line in self.held_out])

    def text_of(self, line: dict) -> str:
        """Describe an evaluation. Example: on 32,768 held-out tokens"""
        masked = "masked " if self.settings["model.model"] == "bert" else ""
        return f"on {line['targets']:,} {masked}held-out tokens"

    @property
    def held_out_text(self) -> tuple:
        """What runs have in common if their bits per byte compare, whatever their tokenizers.

        A text is known by its bytes, a mixture by its weights too; a BERT predicts other tokens.
        """
        size = self.lines["run"][-1].get("held_out_bytes")
        is_mixture = any("by_store" in line for line in self.held_out)
        weights = self.settings["data.data"] if is_mixture else None
        return self.settings["model.model"], size, weights


def read_run(folder: Path) -> RunLog:
    """Read the log in the folder of a run; ValueError if there is none."""
    lines: dict[str, list[dict]] = defaultdict(list)
    for line in read_log(folder):
        lines[line["event"]].append(line)
    if not lines["run"]:
        raise ValueError(f"{folder} has no log.jsonl with a run's start: name the folder of a run")
    fields, trains = (*COLUMNS, *CHARTS), lines["train"]
    steps = {n: np.array([line.get(n) for line in trains], dtype=float) for n in fields}
    steps["minutes"] = np.nancumsum(steps["ms"]) / 6e4
    settings = lines["run"][-1]["config"]
    final = [line for line in lines["eval"] if line["last"]][-1:]
    return RunLog(folder, lines, settings, lines["eval"], final, steps)


def are_comparable(logs: Sequence[RunLog]) -> bool:
    """Whether there are evaluations, all on the same text."""
    return len({log.held_out_text for log in logs if log.held_out}) == 1


Recipes = dict[str, list[RunLog]]  # {name: runs that differ only in the seed}


def recipes_of(logs: Sequence[RunLog]) -> tuple[Recipes, str]:
    """Group runs whose settings differ only in the seed, in the order of their first runs.

    Returns: recipes, named by the flags that differ; the flags that all have
    """
    groups = defaultdict(list)
    for log in logs:
        groups[flags_of(log.settings)].append(log)
    shared = [flag for flag in next(iter(groups)) if all(flag in flags for flags in groups)]
    of_no_technique = {setting.flag for setting in settings_of(Settings).values()}
    base = "plain" if {flag.split()[0] for flag in shared} <= of_no_technique else "baseline"
    recipes = {}
    for flags, runs in groups.items():
        name = " ".join(flag for flag in flags if flag not in shared) or base
        label = f"{name}, {several(len({log.settings['run.seed'] for log in runs}), 'seed')}"
        recipes[label] = sorted(runs, key=lambda log: log.settings["run.seed"])
    return recipes, " ".join(shared)


def flags_of(settings: Flat) -> tuple[str, ...]:
    """Return the fewest flags from which all settings follow.

    Example: those of a run with --ltd -> ("--ltd",), without "--ltd-start 128"
    """
    # pd4k is saved as the tokenizer of every run that names neither a tokenizer nor a store
    saved = {n: v for n, v in settings.items() if n not in MAY_DIFFER and v != "pd4k"}
    needed = saved
    for name in saved:
        fewer = {n: value for n, value in needed.items() if n != name}
        with suppress(ValueError):  # such as --ltd-start without --ltd
            if saved.items() <= flattened(config.build(fewer, will_run=False)).items():
                needed = fewer
    flags = {name: setting.flag for name, setting in settings_of(config.Config).items()}
    return tuple(as_given(flags.get(name) or name, value) for name, value in needed.items())


# ---- the page


def write_page(*folders: Path, out: Path | None = None, loss: float | None = None) -> Path:
    """Write a page about these runs to `out` (default: compared.html; report.html in a run)."""
    file = out or (folders[0] / "report.html" if len(folders) == 1 else Path(PAGE))
    try:
        text = page([read_run(folder) for folder in folders], loss)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if "log.jsonl" in str(error):  # a refusal
            raise
        runs, why = ", ".join(map(str, folders)), f"{type(error).__name__} {error}"
        raise ValueError(f"{runs}: log.jsonl is damaged: {why}") from None
    with atomic_write(file) as stream:
        stream.write(text.encode())
    return file


def page(logs: list[RunLog], loss: float | None = None) -> str:
    """Make the HTML page; `loss` is the one to which the costs of several runs are compared."""
    recipes, flags = recipes_of(logs)
    title, about = several(len(logs), "run"), f"{' against '.join(recipes)}; all with {flags}"
    events = []
    if len(logs) == 1:
        title, about, events = logs[0].folder.resolve().name, flags, events_of(logs[0])
        recipes = {title: logs}
    charts = charts_of(recipes, [logs[0].at(AXIS, step) for step, _ in events])
    happened = [f"({n}) after step {step:,} {what}" for n, (step, what) in enumerate(events, 1)]
    samples = [line["text"] for log in logs for line in log.lines["sample"][-1:]]
    starts = [(log.folder, start) for log in logs for start in log.lines["run"]]
    commands = [f"{folder}: {s['argv']}  # commit {s['commit']}" for folder, s in starts]
    results = table({name: results_of(runs) for name, runs in recipes.items()})
    sections = {
        "Result": "".join(f"<p>{escape(text)}</p>" for text in differences(recipes)) + results,
        "Cost to reach a loss": cost_table(recipes, logs, loss),
        "Charts": f'<div class="charts">{"".join(charts)}</div>',
        "Events": escape("; ".join(happened)),
        "Samples": "".join(f"<pre>{escape(text)}</pre>" for text in samples),
        "Commands": f"<pre>{escape(chr(10).join(commands))}</pre>",
    }
    parts = [f"<section><h2>{name}</h2>{part}</section>" for name, part in sections.items() if part]
    text = {"title": escape(title), "about": escape(about), "body": "\n".join(parts)}
    return Template(FRAME.read_text(encoding="utf-8")).substitute(text)


def events_of(log: RunLog) -> list[tuple[int, str]]:
    """List the steps after which a run was resumed, or --pseudo changed its model."""
    events = [(s["resumed_at"], f"resumed with commit {s['commit']}") for s in log.lines["run"][1:]]
    for line in log.lines["stage"]:
        layers = " ".join("." if owner < 0 else str(owner) for owner in line["owners"])
        events.append((line["step"], f"--pseudo: layers use the weights of {layers}"))
    return sorted(events)


# ---- the result in words


def differences(recipes: Recipes) -> list[str]:
    """Say for each further recipe how its held-out loss differs from the first one's.

    Example: --ltd, 2 seeds, against plain, 2 seeds, in bits per byte: -0.035 (-0.040 to -0.030) at
    the end, +0.010 (+0.008 to +0.012) at equal FLOPs (18.2 GFLOP) (paired by seed; below 0 is
    better).
    """
    (name, first), *others = recipes.items()
    about = "{}, against {}, in bits per byte: {}."
    return [about.format(other, name, difference(runs, first)) for other, runs in others]


def difference(logs: list[RunLog], first: list[RunLog]) -> str:
    losses, base = (losses_of(runs, [*logs, *first]) for runs in (logs, first))
    if not losses:
        return "not comparable, because they were not evaluated on the same text"
    seeds, base_seeds = ([log.settings["run.seed"] for log in runs] for runs in (logs, first))
    how = "paired by seed" if seeds == base_seeds else "from the mean, because the seeds differ"
    changes = []
    for where in losses:
        other = base[where] if seeds == base_seeds else np.mean(base[where])
        changes.append(f"{with_seeds(np.subtract(losses[where], other), '+.3f')} {where}")
    return f"{', '.join(changes)} ({how}; below 0 is better)"


def losses_of(logs: list[RunLog], both: list[RunLog]) -> dict[str, list[float]]:
    """Return the held-out losses of runs at the end, and where all of `both` had spent the same."""
    losses = {}
    if all(log.held_out for log in both) and are_comparable(both):
        if all(log.final for log in both):
            losses["at the end"] = [log.final[0]["val_bpb"] for log in logs]
        for unit in ("real_tokens", "flops", "minutes"):
            spent = min(log.curve(unit)[0][-1] for log in both)
            if all(log.curve(unit)[0][0] <= spent for log in both):  # else a curve begins later
                where = f"at equal {UNITS[unit]} ({in_unit(spent, unit)})"
                losses[where] = [float(np.interp(spent, *log.curve(unit))) for log in logs]
    return losses


# ---- tables


def table(columns: dict[str, dict[str, str]]) -> str:
    """Make an HTML table of {name of a column: {name of a row: cell in HTML}}."""
    lines = [["", *next(iter(columns.values()))]]
    lines += [[escape(name), *column.values()] for name, column in columns.items()]
    rows = [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in zip(*lines, strict=True)]
    return f'<div class="wide" tabindex="0"><table>{"".join(rows)}</table></div>'


def cell(value: str, detail: str) -> str:
    return f"{value}<small>{escape(detail)}</small>"


def results_of(logs: list[RunLog]) -> dict[str, str]:
    """Return the main results of a recipe: means over its runs."""
    settings, ended = logs[0].settings, [log for log in logs if log.final]
    evals = [(log, line) for log in ended or logs for line in (log.final or log.held_out)[-1:]]
    texts = {log.text_of(line) for log, line in evals}
    text = "on different texts" if len(texts) > 1 else "".join(texts)
    loss = with_seeds([line["val_bpb"] for _, line in evals], ".3f")
    mean = {name: np.mean([log.at(name) for log in logs]) for name in logs[0].steps}
    positions, minutes = mean["positions"] or math.nan, mean["minutes"] or math.nan
    dropped = max(1 - mean["layer_tokens"] / (settings["model.layers"] * positions), 0.0)
    state = f"{min(mean[AXIS] / settings['optim.tokens'], 1):.0%} of its budget"
    state = "finished" if len(ended) == len(logs) else state
    ends = [max([log.at("step"), *(line["step"] for line in log.held_out)]) for log in logs]
    missing = [int(end) - len(log.steps["step"]) for end, log in zip(ends, logs, strict=True)]
    lost = max(sum(missing), sum(len(log.lines["torn"]) for log in logs))
    damaged = f", without {several(lost, 'line')} that its log has lost: do not compare its cost"
    rate = f"{short(mean['real_tokens'] / (60 * minutes))} raw tokens per second"
    speeds = [log.at(AXIS) / (log.at("minutes") or math.inf) for log in logs]
    if max(speeds) > 1.25 * min(speeds):  # the machine was not equally fast
        rate += f", slowest {min(speeds) / max(speeds):.0%} of fastest: do not compare its time"
    return {
        "Held-out loss": cell(loss, f"{BITS} {'at the end ' if ended else ''}{text}"),
        "Dropped": cell(f"{dropped:.1%}", "of layer-tokens"),
        "Padding": cell(f"{1 - mean['real_tokens'] / positions:.1%}", "of positions"),
        "Progress": cell(state, f"step {mean['step']:,.0f}{damaged if lost else ''}"),
        "Consumed tokens": cell(short(mean[AXIS]), f"of {short(settings['optim.tokens'])}"),
        "Raw tokens": cell(short(mean["real_tokens"]), f"{mean['epochs']:.3g} epochs"),
        "FLOPs": cell(short(mean["flops"], "FLOP"), "of matrix products"),
        "Time of all steps": cell(duration(60 * mean["minutes"]), rate),
    }


def cost_table(recipes: Recipes, logs: list[RunLog], loss: float | None) -> str:
    """Compare what runs spent to reach a loss: the one of --loss, or where the first recipe ends.

    Returns: "" for a single run without --loss, and for runs that cannot be compared
    """
    name, first = next(iter(recipes.items()))
    source = "as asked with --loss"
    if loss is None and len(logs) > 1 and all(log.held_out for log in first):
        loss = max(log.held_out[-1]["val_bpb"] for log in first)
        source = f"the highest last loss of {name}, {first[0].text_of(first[0].held_out[-1])}"
    if loss is None or not are_comparable(logs):
        return ""
    rows = {name: costs_of(runs, first, loss) for name, runs in recipes.items()}
    return f"<p>To {loss:.3f} {BITS}, {escape(source)}:</p>{table(rows)}"


def costs_of(logs: list[RunLog], first: list[RunLog], loss: float) -> dict[str, str]:
    """Return what a recipe's runs spent to reach a loss, relative to the first recipe's mean."""
    was_below = any(log.held_out[0]["val_bpb"] < loss for log in logs if log.held_out)
    cells = {}
    for unit, name in UNITS.items():
        costs, base = (costs_to_reach(loss, runs, unit) for runs in (logs, first))
        ratio = with_seeds([cost / np.mean(base) for cost in costs if base], ".2f")
        spent = in_unit(np.mean(costs), unit) if costs else "not reached"
        cells["reached"] = f"{len(costs)} of {len(logs)}"
        cells[name] = cell(f"≤ {ratio}" if was_below else ratio, spent)
    return cells


def costs_to_reach(loss: float, logs: list[RunLog], unit: str) -> list[float]:
    """Return what each run that reached a held-out loss had spent when it first did.

    It is at most what is returned if the run's first evaluation was already below.
    Example: from 3.0 after 100 tokens to 2.0 after 200, it reaches 2.5 after 150
    """
    costs = []
    for log in logs:
        spent, losses = log.curve(unit)
        lowest, earliest = np.unique(np.minimum.accumulate(losses), return_index=True)
        if len(lowest) and lowest[0] <= loss:
            costs.append(float(np.interp(loss, lowest, spent[earliest])))
    return costs


def in_unit(amount: float, unit: str) -> str:
    suffix = "FLOP" if unit == "flops" else ""
    return duration(60 * amount) if unit == "minutes" else short(amount, suffix)


def with_seeds(values: Sequence[float], form: str) -> str:
    """Show mean, minimum and maximum over seeds: [1.0, 1.2], ".2f" -> "1.10 (1.00 to 1.20)" """
    if len(values) == 0:
        return "–"
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{ends}"


# ---- charts

LEFT, RIGHT, TOP, BOTTOM = 48, 12, 18, 38  # margins around the plot
COLORS = 6  # in report.html; further curves are dashed
POINTS = 400  # most points of a curve, about one for each pixel column of a phone
PARTS = 50  # most points of a smoothed curve, each the median of five steps or more


class Curve(NamedTuple):
    label: str  # in the legend; "" for none
    x: np.ndarray  # (n,) ascending
    y: np.ndarray  # (n,)
    color: int = 0
    kind: str = "line"  # line | faint | level | dots (a line with a dot at each point)

    @property
    def css(self) -> str:
        return f"{self.kind} c{self.color % COLORS} dashed{self.color // COLORS % 3}"


def charts_of(recipes: Recipes, marks: list[float]) -> list[str]:
    """Draw held-out and training loss, and the columns of CHARTS.

    Columns that never change are left out.
    """
    runs = [(log, name, n) for n, (name, logs) in enumerate(recipes.items()) for log in logs]
    logs, panels = [log for log, *_ in runs], {}
    if are_comparable(logs):
        for unit in UNITS if len(runs) > 1 else [AXIS]:
            curves = [Curve(name, *log.curve(unit), color, "dots") for log, name, color in runs]
            panels[UNITS[unit]] = curves
    drawn = [figure("Held-out loss", f"{BITS}, lower is better", panels, marks=marks)]
    for column, (title, unit, scale) in CHARTS.items():
        values = np.concatenate([scale * log.steps[column] for log in logs])
        values = values[np.isfinite(values)]
        if not len(values) or values.min() == values.max():
            continue
        curves = curves_of(runs, column, scale)
        if column == "loss" and len(runs) == 1 and not logs[0].settings["model.nsp"]:
            nats = np.array([line["val_loss"] for line in logs[0].held_out])
            curves.append(Curve("held out", logs[0].curve(AXIS)[0], nats, 1, "dots"))
        highest = np.quantile(values, 0.98) if column in MEASURED else math.inf  # cut off peaks
        options = {"marks": marks, "from_zero": column != "loss", "highest": highest}
        drawn.append(figure(title, unit, {UNITS[AXIS]: curves}, **options))
    return drawn


def curves_of(runs: list[tuple[RunLog, str, int]], column: str, scale: float) -> list[Curve]:
    """Plot a column of every run, which comes with the name and the colour of its recipe.

    Measured columns are smoothed, to a median of every few steps.
    """
    curves = []
    for log, label, color in runs:
        y = scale * log.steps[column]
        x, y = log.steps[AXIS][np.isfinite(y)], y[np.isfinite(y)]
        parts = min(PARTS, len(x) // 5) if column in MEASURED and len(x) >= PARTS // 2 else POINTS
        curves.append(Curve(label, *medians(x, y, parts), color))
    return curves


def figure(title: str, unit: str, panels: dict[str, list[Curve]], **options: object) -> str:
    """Put charts, by the unit of their x, under one title and legend; "" if they are empty.

    Args: options those of `plot`
    """
    panels = {x: [curve for curve in curves if len(curve.x)] for x, curves in panels.items()}
    styles = {curve.label: curve.css for curves in panels.values() for curve in curves}
    if not styles:
        return ""
    keys = [f'<span><b class="{css}">━</b> {escape(name)}</span>' for name, css in styles.items()]
    legend = f"<div>{' '.join(keys)}</div>" if len(keys) > 1 else ""
    drawn = "".join(plot(curves, x_unit, **options) for x_unit, curves in panels.items())
    head = f"<figcaption><b>{title}</b> {unit}{legend}</figcaption>"
    return f"<figure>{head}<div>{drawn}</div></figure>"


# ---- one chart as SVG


def plot(
    curves: Sequence[Curve],
    x_unit: str,
    *,
    from_zero: bool = False,
    highest: float = math.inf,
    marks: Sequence[float] = (),
    x_ticks: Sequence[tuple[float, str]] = (),
    size: tuple[int, int] = (420, 232),
) -> str:
    """Draw curves as an SVG; each has at least one point.

    Args: highest values above this are drawn at the upper edge
          marks   values of x to mark with numbered vertical lines
          x_ticks ticks of the horizontal axis, which then starts at the first; else it starts at 0
          size    with the axes, in SVG units; the page scales the whole chart
    """
    bottom, right = size[1] - BOTTOM, size[0] - RIGHT
    xs, ys = np.concatenate([c.x for c in curves]), np.concatenate([c.y for c in curves])
    low, high = min(0.0, ys.min()) if from_zero else ys.min(), min(ys.max(), highest)
    room = 0.06 * ((high - low) or abs(high) or 1)
    x_ends = (x_ticks[0][0] if x_ticks else 0.0, xs.max() or 1.0)
    y_ends = (low if from_zero else low - room, high + room)

    def place(x: np.ndarray | float, y: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Convert values to SVG units; values beyond an axis are moved to its end."""
        return np.interp(x, x_ends, (LEFT, right)), np.interp(y, y_ends, (bottom, TOP))

    def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
        return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'

    def text(css: str, x: float, y: float, content: object) -> str:
        return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{content}</text>'

    box = f'viewBox="0 0 {size[0]} {size[1]}"'
    parts = [f'<svg class="chart" width="{size[0]}" height="{size[1]}" {box}>']
    for tick, number in ticks(*y_ends):
        _, y = place(0, tick)
        parts += [line("grid", LEFT, y, right, y), text("y", LEFT - 8, y + 4, number)]
    parts += [text("x", place(t, 0)[0], bottom + 16, n) for t, n in x_ticks or ticks(*x_ends)]
    parts += [line("base", LEFT, bottom, right, bottom), text("y", right, bottom + 32, x_unit)]
    for number, mark in enumerate(marks, 1):
        x, _ = place(mark, 0)
        parts += [line("mark", x, bottom, x, TOP), text("x", x, TOP - 4, number)]
    for curve in curves:
        parts.append(path_of(curve, list(zip(*place(curve.x, curve.y), strict=True))))
    return "\n".join([*parts, "</svg>"])


def path_of(curve: Curve, points: list[tuple[float, float]]) -> str:
    """Draw a curve through points in SVG units, with its first and last value as a tooltip."""
    ends = escape(f"{curve.label}: from {curve.y[0]:.4g} to {curve.y[-1]:.4g}")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<g class="{curve.css}"><title>{ends}</title>', f'<polyline points="{path}"/>']
    if curve.kind == "dots" or len(points) == 1:  # one point makes no line
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
    return "\n".join([*parts, "</g>"])


def ticks(low: float, high: float, about: int = 5) -> list[tuple[float, str]]:
    """Choose round numbers between two numbers, with their labels.

    Example: 0 to 61440 -> (0, "0"), (20000, "20 K"), (40000, "40 K"), (60000, "60 K")
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    values = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    largest = max(map(abs, values))
    prefix = int(math.log10(largest) // 3) if largest >= 10_000 else 0
    return [(v, f"{v / 1000**prefix:.4g} {PREFIXES[prefix] if v else ''}".strip()) for v in values]


def medians(x: np.ndarray, y: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a curve into parts; return the x in the middle of each, and the median of its y.

    Example: x = [0, 1, 2, 3, 4, 5] and y = [3, 1, 2, 9, 8, 7] in 2 parts -> [1, 4] and [2, 8]
    """
    stretches = [part for part in np.array_split(np.arange(len(x)), parts) if len(part)]
    middles = [stretch[len(stretch) // 2] for stretch in stretches]
    return x[middles], np.array([np.median(y[stretch]) for stretch in stretches])


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help=f"file to write (default: {PAGE})")
    parser.add_argument("--loss", type=real_number, help="compare costs to these bits per byte")
    args = parser.parse_args(argv)
    if len({folder.resolve() for folder in args.runs}) < len(args.runs):
        raise ValueError("a run is named twice: name each run once")
    if args.out and (args.out.suffix != ".html" or args.out.resolve() == FRAME.resolve()):
        raise ValueError(f"--out {args.out}: name a page, such as {PAGE}")
    print(f"report: {write_page(*args.runs, out=args.out, loss=args.loss)}")


if __name__ == "__main__":
    exit_cleanly(main)
