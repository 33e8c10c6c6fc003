"""What commands show: a curve as a table, JSON or a figure. Only figures need matplotlib."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.flags import whole_numbers


def figure_for(file: str) -> Any:
    """An empty figure; ValueError now rather than later if it could not be saved to this file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs its package: pip install -e '.[plot]'") from None
    figure, path = Figure(figsize=(6, 3.5), layout="constrained"), Path(file)
    endings = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:] not in endings or not path.parent.is_dir():
        raise ValueError(f"--plot {file}: give a file in a folder, ending in {', '.join(endings)}")
    return figure


def plotted(file: str, draw: Callable, **labels: str) -> None:
    """Save a figure of what `draw(axes)` draws."""
    figure = figure_for(file)
    draw(figure.add_subplot(**labels))
    figure.savefig(file)
    print(f"plot: {file}", file=sys.stderr)


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
