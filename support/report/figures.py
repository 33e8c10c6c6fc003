"""What commands show: a curve as a table, JSON or chart; a chart in a file of its own."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.base.atomic import atomic_write
from support.base.numbers import whole_numbers
from support.report.charts import Chart, picture, series


def check_file(file: str | Path, flag: str = "--plot", ending: str = ".svg") -> None:
    """Refuse a file that could not be written later, before the work for it."""
    path = Path(file)
    if not path.name.endswith(ending):
        raise ValueError(f"{flag} {file}: write {ending}, and convert it with any tool")
    if path.exists() and not path.is_file():
        raise ValueError(f"{flag} {file} exists and is not a file: name another")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{flag} {file}: {path.parent} is no folder to write in")


def save(file: str | Path, chart: Chart) -> None:
    with atomic_write(Path(file)) as out:
        out.write(picture([chart]).encode())
    print(f"plot: {file}", file=sys.stderr)


def add_curve_flags(parser: argparse.ArgumentParser) -> None:
    """How `show_curve` shows it."""
    parser.add_argument("--at", type=whole_numbers, help="the t to print: 1,5,10K")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", help="SVG file for the curve")


def show_curve(
    args: argparse.Namespace, value_at: Callable[[float], float], name: str, over: float
) -> None:
    """Print a function of t at --at, or at tenths of the way to `over`; plot it on request."""
    if args.plot:
        check_file(args.plot)
    at = args.at or [over * tenth / 10 for tenth in range(11)]
    values = {f"{t:.12g}": value_at(t) for t in at}
    if args.json:
        print(json.dumps(values))
    else:
        print(f"{'at':>12} {name:>10}")
        for t, value in values.items():
            print(f"{t:>12} {value:10}")
    if args.plot:
        t = np.linspace(0, 1.1 * over, 1101)
        curve = series("", t, np.array([value_at(x) for x in t]))
        save(args.plot, Chart(name.capitalize(), "", "t", [curve], from_zero=True))
