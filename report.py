"""Show one run, or compare several, on one HTML page, with figures that their logs only imply.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
    python report.py runs/a runs/b runs/c --out compared.html
    python report.py runs/a runs/b --loss 2.0                # also compare costs to this loss

How a step becomes a point in a chart: in step 7 of a run, --ltd lets the middle layers see 16 of
the 256 tokens of each row.

    1  log     {"event": "train", "step": 7, "consumed_tokens": 19712, "kept_tokens": 16, ...}
               a line of log.jsonl, written by `Run.log_step` from `Plan.columns` and `Done`
    2  column  steps["consumed_tokens"][6] == 19712.0, steps["kept_tokens"][6] == 16.0
               read_run: an array for each field in COLUMNS and CHARTS, and for each difficulty
    3  curve   the point (19712, 16), in the colour of its recipe   curves_of
    4  chart   "Kept tokens of a row", against consumed tokens      charts_of, figure, plot

A key of CHARTS is the field that its chart shows; to plot a field of your own, add a line there. A
field that never changes gets no chart.

Runs whose settings differ only in the seed are one recipe: one row of numbers, with their mean and
spread, and one colour. Only logs are read: no model, data or checkpoint. report.html holds the
frame of the page and its colours, for light and dark.

In reading order: logs, the page, its tables, its charts, one chart as SVG, the command.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

import config
from support.numbers import PREFIXES, duration, real_number, several, short
from support.process import Parser, exit_cleanly
from support.run import read_log
from support.settings import flattened, settings_of
from support.store import atomic_write

FRAME = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
# What a run spends, and what a comparison may hold fixed. Time is the time of the steps, without
# evaluations and checkpoints.
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "minutes",
}
# {column: (title, unit, factor)}
CHARTS = {
    "grad_norm": ("Gradient norm", "", 1),
    "lr": ("Learning rate", "", 1),
    "max_piece_len": ("Longest piece", "tokens", 1),
    "pool": ("Samples that may be drawn", "", 1),
    "kept_tokens": ("Kept tokens", "of a row", 1),
    "dropped_share": ("Dropped", "% of layer-tokens", 100),
    "padding_share": ("Padding", "% of positions", 100),
    "ms": ("Step time", "ms", 1),
    "tokens_per_s": ("Raw tokens per second", "", 1),
    "mfu": ("MFU", "% of the peak", 100),
}
MEASURED = ("loss", "grad_norm", "padding_share", "ms", "tokens_per_s", "mfu")  # noisy: smoothed
CUMULATIVE = ("consumed_tokens", "real_tokens", "layer_tokens", "positions", "flops")
COLUMNS = ("step", "loss", "epochs", *CUMULATIVE)
AXIS = "consumed_tokens"  # horizontal axis of charts
BITS = "bits per byte"
# settings in which runs of one recipe may differ
OF_A_RUN = ("seed", "out", "resume", "keep", "wandb", "eval_every", "checkpoint_every")
MAY_DIFFER = {f"run.{name}" for name in OF_A_RUN}


# ---- logs


class RunLog(NamedTuple):
    folder: Path
    lines: dict[str, list[dict]]  # by event: run, eval, stage, sample, ...; "torn": damaged lines
    settings: dict[str, object]  # at the last start or resume
    final: list[dict]  # the evaluation at the end, on --final-eval-tokens; [] before it
    on_the_way: list[dict]  # the others, all on the same text; if there is none, the final one
    steps: dict[str, np.ndarray]  # columns of the "train" lines: (n,) float64, NaN if not logged

    def at(self, column: str, step: float = math.inf) -> float:
        """Return the value of a cumulative column after a step, or at the end."""
        done = int(np.searchsorted(self.steps["step"], step, side="right"))
        return float(self.steps[column][done - 1]) if done else 0.0

    def text_of(self, line: dict) -> str:
        """Describe the text of an evaluation.

        Example: on 32,768 tokens of the held-out text of the embedded corpus
        """
        masked = "masked " if self.settings["model.model"] == "bert" else ""
        stores = (self.settings["data.data"] or "the embedded corpus").split(",")
        names = ", ".join(Path(store).name for store in stores)
        return f"on {line['targets']:,} {masked}tokens of the held-out text of {names}"


def read_run(folder: Path) -> RunLog:
    """Read the log in the folder of a run; ValueError if there is none."""
    lines: dict[str, list[dict]] = defaultdict(list)
    for line in read_log(folder):
        lines[line["event"]].append(line)
    if not lines["run"]:
        raise ValueError(f"{folder} holds no log.jsonl: name the folder of a run that has started")
    trains = lines.pop("train", [])
    difficulties = {name for line in trains for name in line if name.startswith("difficulty_")}
    names = (*COLUMNS, *CHARTS, *sorted(difficulties))
    steps = {n: np.array([line.get(n) for line in trains], dtype=float) for n in names}
    steps["seconds"] = np.nancumsum(steps["ms"]) / 1e3
    settings = lines["run"][-1]["config"]
    computed, positions = (np.diff(steps[n], prepend=0.0) for n in ("layer_tokens", "positions"))
    steps["dropped_share"] = (1 - computed / positions / settings["model.layers"]).round(4)
    final = [line for line in lines["eval"] if line["last"]][-1:]
    on_the_way = [line for line in lines["eval"] if not line["last"]] or lines["eval"]
    return RunLog(folder, lines, settings, final, on_the_way, steps)


Recipes = dict[str, list[RunLog]]  # {name: runs that differ only in the seed}


def recipes_of(logs: Sequence[RunLog]) -> Recipes:
    """Group runs whose settings differ only in the seed, in the order of their first runs."""
    groups = defaultdict(list)
    for log in logs:
        recipe = sorted((n, str(value)) for n, value in log.settings.items() if n not in MAY_DIFFER)
        groups[str(recipe)].append(log)
    return {
        f"{runs[0].folder}" + (f" and {len(runs) - 1} more" if runs[1:] else ""): runs
        for runs in groups.values()
    }


# ---- the page


def write_page(*folders: Path, out: Path | None = None, loss: float | None = None) -> Path:
    """Write a page about these runs to `out` (default: report.html, for one run in its folder)."""
    file = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    text = page([read_run(folder) for folder in folders], loss)
    with atomic_write(file) as stream:
        stream.write(text.encode())
    return file


def page(logs: list[RunLog], loss: float | None = None) -> str:
    """Make the HTML page; `loss` is the one to which the costs of several runs are compared."""
    recipes = recipes_of(logs)
    settings = {name: runs[0].settings for name, runs in recipes.items()}
    is_one, first = len(logs) == 1, next(iter(recipes.values()))
    events = events_of(logs[0]) if is_one else []
    if is_one:
        settings["default"] = flattened(config.build({}))
    elif loss is None and all(log.on_the_way for log in first):
        loss = max(log.on_the_way[-1]["val_bpb"] for log in first)  # all its seeds reach it
    costs = {name: costs_of(runs, first, loss) for name, runs in recipes.items() if loss}
    charts = charts_of(recipes, loss, [logs[0].at(AXIS, step) for step, _ in events])
    happened = [f"({n}) after step {step:,} {what}" for n, (step, what) in enumerate(events, 1)]
    samples = [line["text"] for log in logs for line in log.lines["sample"][-1:]]
    argv = [f"{s['argv']}  # commit {s['commit']}" for log in logs for s in log.lines["run"]]
    sections = {
        "Result": table({name: results_of(runs) for name, runs in recipes.items()}, turned=is_one),
        f"Cost to reach {loss or 0:.3f} bits per byte": table(costs),
        "Charts": f'<div class="charts">{"".join(charts)}</div>',
        "Events": escape("; ".join(happened)),
        "Settings that differ": table(differing(settings), turned=True),
        "Samples": "".join(f"<pre>{escape(text)}</pre>" for text in samples),
        "Commands": f"<pre>{escape(chr(10).join(argv))}</pre>",
    }
    parts = [f"<section><h2>{name}</h2>{part}</section>" for name, part in sections.items() if part]
    title = escape(logs[0].folder.resolve().name if is_one else several(len(logs), "run"))
    return Template(FRAME).substitute(title=title, body="\n".join(parts))


def events_of(log: RunLog) -> list[tuple[int, str]]:
    """List the steps after which a run was resumed, or --pseudo changed its model."""
    events = [(s["resumed_at"], f"resumed with commit {s['commit']}") for s in log.lines["run"][1:]]
    for line in log.lines["stage"]:
        layers = " ".join("." if owner < 0 else str(owner) for owner in line["owners"])
        events.append((line["step"], f"--pseudo: layers use the weights of {layers}"))
    return sorted(events)


# ---- tables


def table(rows: dict[str, dict[str, str]], turned: bool = False) -> str:
    """Make an HTML table of {name: {column: cell in HTML}}; if turned, each row becomes a column.

    Returns: "" if there is nothing in it
    """
    if not any(rows.values()):
        return ""
    lines = [["", *next(iter(rows.values()))]]
    lines += [[escape(name), *row.values()] for name, row in rows.items()]
    if turned:
        lines = zip(*lines, strict=True)
    body = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
    css = "turned" if turned else "recipes"
    return f'<div class="wide" tabindex="0"><table class="{css}">{body}</table></div>'


def cell(value: str, detail: str) -> str:
    return f"{value}<small>{escape(detail)}</small>"


def results_of(logs: list[RunLog]) -> dict[str, str]:
    """Return the main results of a recipe: means over its runs."""
    settings, ended = logs[0].settings, [log for log in logs if log.final]
    evals = [(log, line) for log in ended or logs for line in (log.final or log.on_the_way)[-1:]]
    texts = {log.text_of(line) for log, line in evals}
    text = "on different texts" if len(texts) > 1 else "".join(texts)
    loss = with_seeds([line["val_bpb"] for _, line in evals], 3)
    mean = {name: np.mean([log.at(name) for log in logs]) for name in logs[0].steps}
    positions, seconds = mean["positions"] or math.nan, mean["seconds"] or math.nan
    dropped = max(1 - mean["layer_tokens"] / (settings["model.layers"] * positions), 0.0)
    state = f"{min(mean[AXIS] / settings['optim.tokens'], 1):.0%} of its budget"
    state = "finished" if len(ended) == len(logs) else state
    torn = sum(len(log.lines["torn"]) for log in logs)
    damaged = f", without {several(torn, 'damaged line')} of the log" if torn else ""
    at_the_end = "at the end " if ended else ""
    rate = f"{short(mean['real_tokens'] / seconds)} raw tokens per second"
    return {
        "Held-out loss": cell(loss, f"{BITS} {at_the_end}{text}"),
        "Dropped": cell(f"{dropped:.1%}", "of layer-tokens"),
        "Padding": cell(f"{1 - mean['real_tokens'] / positions:.1%}", "of positions"),
        "Progress": cell(state, f"step {mean['step']:,.0f}{damaged}"),
        "Consumed tokens": cell(short(mean[AXIS]), f"of {short(settings['optim.tokens'])}"),
        "Raw tokens": cell(short(mean["real_tokens"]), f"{mean['epochs']:.3g} epochs"),
        "FLOPs": cell(short(mean["flops"], "FLOP"), "of matrix products"),
        "Time of all steps": cell(duration(mean["seconds"]), rate),
    }


def costs_of(logs: list[RunLog], first: list[RunLog], loss: float) -> dict[str, str]:
    """Return what a recipe's runs spent to reach a loss, relative to the first recipe's mean."""
    costs, base = ([c for log in runs if (c := cost_to_reach(log, loss))] for runs in (logs, first))
    was_below = any(log.on_the_way[0]["val_bpb"] < loss for log in logs if log.on_the_way)
    cells = {"reached": f"{len(costs)} of {len(logs)}"}
    for unit, name in UNITS.items():
        mean = np.mean([cost[unit] for cost in base]) if base else math.nan
        ratio = with_seeds([cost[unit] / mean for cost in costs if base], 2)
        words = duration if unit == "seconds" else short
        spent = words(np.mean([cost[unit] for cost in costs])) if costs else "not reached"
        cells[name] = cell(f"≤ {ratio}" if was_below else ratio, spent)
    return cells


def cost_to_reach(log: RunLog, loss: float) -> dict[str, float] | None:
    """Work out what a run spent, in each of UNITS, until its held-out loss fell to `loss`.

    Returns: None if it never did; the cost up to its first evaluation if that was already below
    Example: from 3.0 after 100 tokens to 2.0 after 200, it reaches 2.5 after 150
    """
    lines = log.on_the_way
    for before, now in pairwise(lines[:1] + lines):
        if now["val_bpb"] <= loss:
            losses = -before["val_bpb"], -now["val_bpb"]  # np.interp needs rising values
            spent = {u: (log.at(u, before["step"]), log.at(u, now["step"])) for u in UNITS}
            return {u: float(np.interp(-loss, losses, ends)) for u, ends in spent.items()}
    return None


def with_seeds(values: list[float], digits: int) -> str:
    """Show mean, minimum and maximum over seeds: [1.0, 1.2] -> "1.10 (1.00 to 1.20)" """
    if not values:
        return "–"
    ends = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{ends}"


def differing(settings: dict[str, dict]) -> dict[str, dict[str, str]]:
    """Return for each recipe {flag: value} of the settings that differ between recipes."""
    flags = {name: setting.flag or name for name, setting in settings_of(config.Config).items()}
    names = dict.fromkeys(name for one in settings.values() for name in one)
    differ = [n for n in names if len({str(one.get(n)) for one in settings.values()}) > 1]
    return {
        name: {flags.get(n, n): escape(str(one.get(n))) for n in differ}
        for name, one in settings.items()
    }


# ---- charts

LEFT, RIGHT, TOP, BOTTOM = 48, 12, 18, 38  # margins around the plot
COLORS = 6  # in report.html; further curves are dashed
POINTS = 400  # most points of a drawn curve, about one for each pixel column of a phone
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


def charts_of(recipes: Recipes, loss: float | None, marks: list[float]) -> list[str]:
    """Draw held-out and training loss, the columns of CHARTS, and difficulties.

    Columns that never change are left out.
    """
    runs = [(log, name, n) for n, (name, logs) in enumerate(recipes.items()) for log in logs]
    logs = [log for log, *_ in runs]
    drawn = []
    for unit, x_unit in UNITS.items() if len(runs) > 1 else [(AXIS, UNITS[AXIS])]:
        curves = held_out_curves(runs, unit)
        if loss is not None:
            ends = np.array([0.0, max(curve.x.max(initial=0) for curve in curves)])
            curves.append(Curve(f"{loss:.3f}", ends, np.full(2, loss), kind="level"))
        about = f"{BITS}, lower is better; single dot: final evaluation, on more text"
        drawn.append(figure("Held-out loss", about, curves, x_unit, marks=marks))
    shown = {"loss": ("Training loss", *unit_of_loss(logs))} | CHARTS
    for name in logs[0].steps:
        if name.startswith("difficulty_") and all(name in log.steps for log in logs):
            shown[name] = (name.replace("_", " ").capitalize(), "at most", 1)
    for column, (title, unit, scale) in shown.items():
        values = np.concatenate([scale * log.steps[column] for log in logs])
        values = values[np.isfinite(values)]
        if not len(values) or values.min() == values.max():
            continue
        curves = curves_of(runs, column, scale)
        if column == "loss" and unit == BITS and len(runs) == 1:
            curves += held_out_curves([(logs[0], "held out", 1)], AXIS)
        highest = np.quantile(values, 0.98) if column in MEASURED else math.inf  # cut off peaks
        options = {"marks": marks, "from_zero": column != "loss", "highest": highest}
        drawn.append(figure(title, unit, curves, UNITS[AXIS], **options))
    return drawn


def unit_of_loss(logs: list[RunLog]) -> tuple[str, float]:
    """Choose the unit of the training loss, and the factor that converts nats to it."""
    is_gpt = all(log.settings["model.model"] == "gpt" for log in logs)  # a BERT has other targets
    bytes_per_token = {log.lines["run"][-1].get("bytes_per_token") for log in logs}
    if is_gpt and len(bytes_per_token) == 1 and None not in bytes_per_token:
        return BITS, 1 / (math.log(2) * bytes_per_token.pop())
    return "nats", 1


def curves_of(runs: list[tuple[RunLog, str, int]], column: str, scale: float) -> list[Curve]:
    """Plot a column of every run, which comes with the name and the colour of its recipe.

    Measured columns are smoothed, to a median of every few steps.
    """
    curves = []
    for log, label, color in runs:
        y = scale * log.steps[column]
        x, y = log.steps[AXIS][np.isfinite(y)], y[np.isfinite(y)]
        if column in MEASURED and len(x) >= PARTS // 2:
            parts = min(PARTS, len(x) // 5)
            if len(runs) == 1:
                curves.append(Curve("each step", *thinned(x, y), kind="faint"))
                label = f"median of {len(x) // parts} steps"
            x, y = medians(x, y, parts)
        curves.append(Curve(label, *thinned(x, y), color))
    return curves


def held_out_curves(runs: list[tuple[RunLog, str, int]], unit: str) -> list[Curve]:
    """Plot the held-out loss of every run against one of UNITS, with seconds shown as minutes.

    The final evaluation usually covers more text, so it is a separate dot.
    """
    curves, scale = [], 1 / 60 if unit == "seconds" else 1
    for log, label, color in runs:
        for lines in (log.on_the_way, log.final):
            x = np.array([scale * log.at(unit, line["step"]) for line in lines])
            y = np.array([line["val_bpb"] for line in lines])
            curves.append(Curve(label, x, y, color, "dots"))
    return curves


def figure(title: str, unit: str, curves: list[Curve], x_unit: str, **options: object) -> str:
    """Put a chart under its title and legend; "" if it is empty. `options` are those of `plot`."""
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return ""
    styles = {curve.label: curve.css for curve in curves}
    keys = [f'<span><b class="{css}">━</b> {escape(name)}</span>' for name, css in styles.items()]
    legend = f"<div>{' '.join(keys)}</div>" if len(keys) > 1 else ""
    drawn = plot(curves, x_unit, **options)
    return f"<figure><figcaption><b>{title}</b> {unit}{legend}</figcaption>{drawn}</figure>"


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
        points = list(zip(*place(curve.x, curve.y), strict=True))
        ends = escape(f"{curve.label}: from {curve.y[0]:.4g} to {curve.y[-1]:.4g}")
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts += [f'<g class="{curve.css}"><title>{ends}</title>', f'<polyline points="{path}"/>']
        if curve.kind == "dots" or len(points) == 1:  # one point makes no line
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


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


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep at most POINTS points, evenly spaced, including the last."""
    keep = np.unique(np.linspace(0, len(x) - 1, POINTS).astype(int)) if len(x) else []
    return x[keep], y[keep]


def medians(x: np.ndarray, y: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a curve into parts; return the x in the middle of each, and the median of its y.

    Example: x = [0, 1, 2, 3, 4, 5] and y = [3, 1, 2, 9, 8, 7] in 2 parts -> [1, 4] and [2, 8]
    """
    stretches = np.array_split(np.arange(len(x)), parts)
    middles = [stretch[len(stretch) // 2] for stretch in stretches]
    return x[middles], np.array([np.median(y[stretch]) for stretch in stretches])


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html)")
    parser.add_argument("--loss", type=real_number, help="compare costs to these bits per byte")
    args = parser.parse_args(argv)
    if len({folder.resolve() for folder in args.runs}) < len(args.runs):
        raise ValueError("a run is named twice: name each run once")
    print(f"report: {write_page(*args.runs, out=args.out, loss=args.loss)}")


if __name__ == "__main__":
    exit_cleanly(main)
