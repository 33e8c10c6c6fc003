"""The drawings of README.md and docs/, made from the code and from records.

    python docs/pictures.py                # draws every docs/*.svg anew

A drawing is a function below that returns an SVG; its name is that of its file. Its colours are
those of a report, light and dark. At WIDTH a phone shows it without shrinking its text.
"""

import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "bench")]

import numpy as np  # noqa: E402
from frontier import SIDES, curves_of  # noqa: E402

from report import FRAME, plot  # noqa: E402

WIDTH = 380  # pixels
STYLE = re.search(r"<style>.*?</style>", FRAME, re.DOTALL)[0]  # the first of a report


# ---- parts of a drawing


def svg(parts: list[str], height: float, width: float = WIDTH) -> str:
    """A whole file."""
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}"'
    )
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([f"{begin}>", STYLE, paper, *parts, "</svg>\n"])


def text(x: float, y: float, content: str, look: str = "") -> str:
    """`look`: x to be centred at x, y to end there; title; a colour is of a <tspan>."""
    return f'<text class="{look}" x="{x:g}" y="{y:g}">{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, color: int | str = "grid") -> str:
    """Filled with one of the colours 0 to 5 of a report; "grid" is as faint as a grid line."""
    fill = 'fill="#8884"' if color == "grid" else f'class="c{color}" fill="currentColor"'
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f"<rect {fill} {place}/>"


def line(x1: float, y1: float, x2: float, y2: float, look: str = "base") -> str:
    return f'<line class="{look}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def group(parts: list[str], x: float, y: float) -> list[str]:
    """The same parts, moved."""
    return [f'<g transform="translate({x:g} {y:g})">', *parts, "</g>"]


# ---- the drawings


def frontier() -> str:
    """Loss against seconds: the best plain models, and runs with techniques."""
    titles = {"nano": "Rows of 256", "books": "Rows of 2,048"}
    ticks = [(float(np.log10(s)), f"{s:,}") for s in (30, 50, 100, 200, 500, 1000)]
    notes = (
        "A dot is the end of a run, the mean of its seeds; its bar goes",
        "from the least to the most. Lines join the best runs of a side.",
    )
    size, above, parts = (440, 400), 90, []
    for number, (section, title) in enumerate(titles.items()):
        x_unit = "seconds of all steps, on two CPU cores"
        plotted = plot(curves_of(section, "cpu"), x_unit, x_ticks=ticks, size=size)
        keys = [
            f'<tspan class="c{n}" fill="currentColor">━</tspan> {s}' for n, s in enumerate(SIDES)
        ]
        heads = [f'<tspan class="title">{title}</tspan> bits per byte', *notes, "  ".join(keys)]
        texts = [f'<text y="{18 * n}">{head}</text>' for n, head in enumerate(heads, 1)]
        parts += group([*texts, *group([plotted], 0, above)], number * size[0] + 12, 12)
    return svg(parts, size[1] + above + 24, 2 * size[0] + 24)


PICTURES: dict[str, Callable[[], str]] = {
    "frontier": frontier,
}

if __name__ == "__main__":
    for name, drawn in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(drawn(), encoding="utf-8")
