"""What commands show: a curve as a table, JSON or a figure. Only figures need matplotlib."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.base.numbers import whole_numbers
from support.report.charts import Chart, tick_texts, ticks

COLORS = ("#0b66ad", "#c4510c", "#00785a", "#a3407c", "#555b63", "#2e9fd0")  # as in page.css


def figure_for(file: str, flag: str = "--plot", size: tuple[float, float] = (6, 3.5)) -> Any:
    """An empty figure; ValueError now rather than later if it could not be saved to this file.

    Args: size width and height, in inches
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{flag} needs its package: pip install -e '.[plot]'") from None
    figure, path = Figure(figsize=size, layout="constrained"), Path(file)
    endings = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:] not in endings or not path.parent.is_dir():
        raise ValueError(f"{flag} {file}: give a file in a folder, ending in {', '.join(endings)}")
    return figure


def plotted(file: str, draw: Callable, **labels: str) -> None:
    """Save a figure of what `draw(axes)` draws."""
    figure = figure_for(file)
    draw(figure.add_subplot(**labels))
    figure.savefig(file)
    print(f"plot: {file}", file=sys.stderr)


def save_charts(file: str, charts: Sequence[Chart]) -> None:
    """Save charts as one figure, two side by side."""
    rows = -(-len(charts) // 2)
    figure = figure_for(file, "--out", size=(11, 3 * max(rows, 1)))
    for number, chart in enumerate(charts, 1):
        draw_chart(figure.add_subplot(rows, 2, number), chart)
    figure.savefig(file, dpi=150)


def draw_chart(axes: Any, chart: Chart) -> None:
    for one in chart.series:
        dots, faint = one.kind == "dots" or len(one.x) == 1, one.kind == "faint"
        look = {"marker": "o" if dots else None, "markersize": 3, "alpha": 0.4 if faint else 1}
        look["linewidth"] = 0.8 if faint else 1.4
        color = COLORS[one.color % len(COLORS)]
        label = one.label.replace("`", "")
        if one.kind == "band":
            axes.fill(one.x, one.y, label=label, color=color, alpha=0.25, linewidth=0)
        else:
            axes.plot(one.x, one.y, label=label, color=color, **look)
    for mark in chart.marks:
        axes.axvline(mark.x, color="gray", linestyle=":", linewidth=0.8)
    if chart.level is not None:
        axes.axhline(chart.level, color="black", linestyle="--", linewidth=0.8)
    sides = (axes.xaxis, chart.x_axis(), axes.set_xlim), (axes.yaxis, chart.y_axis(), axes.set_ylim)
    for shown, axis, set_limits in sides:
        if axis.log:
            (axes.set_xscale if shown is axes.xaxis else axes.set_yscale)("log")
        at = ticks(axis)
        thousands = "G" if chart.x_unit == "FLOPs" else "B"
        shown.set_ticks(at, labels=tick_texts(at, thousands, axis.log))
        shown.set_ticks([], minor=True)
        set_limits(axis.low, axis.high)
    axes.set_title(", ".join(filter(None, (chart.title, chart.unit))), fontsize=10, loc="left")
    axes.set_xlabel(chart.x_unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(fontsize=7, frameon=False)


def add_curve_flags(parser: argparse.ArgumentParser) -> None:
    """How `show_curve` shows it."""
    parser.add_argument("--at", type=whole_numbers, help="the t to print: 1,5,10K")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", help="file for the curve")


def show_curve(
    args: argparse.Namespace,
    value_at: Callable[[float], float],
    name: str,
    over: float,
    tenths: int,
) -> None:
    """Print a function of t at --at, or at tenths of the way to `over`; plot it on request."""
    if args.plot:
        figure_for(args.plot)
    at = args.at or [over * tenth / 10 for tenth in range(tenths + 1)]
    values = {f"{t:.12g}": value_at(t) for t in at}
    if args.json:
        print(json.dumps(values))
    else:
        print(f"{'at':>12} {name:>10}")
        for t, value in values.items():
            print(f"{t:>12} {value:10}")
    if args.plot:
        t = [over * i / 1000 for i in range(1101)]
        curve = [value_at(x) for x in t]
        plotted(args.plot, lambda axes: axes.plot(t, curve), xlabel="t", ylabel=name)
