"""Charts as SVG: points of a curve, axes with round ticks, the drawing, in a page or in a file.

A chart is drawn in units of its own `size` and scales as a whole. chart.css holds its colours, for
light and dark; a page includes it once, a file carries it inside.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np

STYLE = (Path(__file__).parent / "chart.css").read_text(encoding="utf-8").strip()
SIZE = (420, 232)
LEFT = 48  # units around the plot: the texts of ticks,
RIGHT = 12
TOP = 18  # the numbers of marks,
BOTTOM = 38  # ticks and the unit of x
LINE = 18  # units of a line above the plot
LETTER = 7.5  # units of a letter, about
EDGE = 12  # around the charts of a file
CLOSE = 20  # units between marks that each have a number
COLORS = 6  # of chart.css; further series are dashed
POINTS = 400  # of a drawn series, about one for each pixel column of a phone
DECADES = 1e4  # that a logarithmic axis shows at most
BEYOND = 0.02  # the share of steps, the first ones, that `clip_first` may leave above the chart


# ---- charts and their parts


class Series(NamedTuple):
    """Points in the order of x, none of them NaN; `series` makes one."""

    label: str  # in the legend; "" for none
    x: np.ndarray  # (n,)
    y: np.ndarray  # (n,)
    kind: str = "line"  # line | faint | dots: with a dot at each point | area: filled outline
    color: int = 0


class Label(NamedTuple):
    """Words beside a point, `dx` and `dy` units away."""

    x: float
    y: float
    text: str
    color: int
    dx: float = 8
    dy: float = 4


class Axis(NamedTuple):
    low: float
    high: float
    log: bool = False
    begin: float = 0.0  # where `low` and `high` are in the picture, in its units
    end: float = 1.0

    def place(self, values: np.ndarray | float) -> np.ndarray:
        """Where they are in the picture; at its edge, where they are beyond the axis."""
        scale = np.log10 if self.log else np.asarray
        low, high = scale([self.low, self.high])
        share = (scale(np.clip(values, self.low, self.high)) - low) / (high - low)
        return self.begin + share * (self.end - self.begin)


class Chart(NamedTuple):
    title: str
    unit: str  # of the vertical axis
    x_unit: str
    series: list[Series]
    marks: Sequence[float] = ()  # numbered places on the horizontal axis
    labels: tuple[Label, ...] = ()
    level: float | None = None  # a horizontal line
    from_zero: bool = False
    x_from_zero: bool = True
    log_x: bool = False
    log_y: bool = False
    clip_first: bool = False  # the first steps may lie above the chart, so that the rest has room
    note: str = ""
    size: tuple[int, int] = SIZE

    def x_axis(self) -> Axis:
        values = np.concatenate([one.x for one in self.series])
        low, high = limits(values, self.x_from_zero, self.log_x, air=0.0)
        return Axis(low, high, self.log_x, LEFT, self.size[0] - RIGHT)

    def y_axis(self) -> Axis:
        values = np.concatenate([one.y for one in self.series])
        if self.level is not None:
            values = np.append(values, self.level)
        if self.clip_first:
            values = values[values <= self.highest()]
        low, high = limits(values, self.from_zero, self.log_y)
        return Axis(low, high, self.log_y, self.size[1] - BOTTOM, TOP)

    def highest(self) -> float:
        """The largest value after the first steps."""
        later = [one.y[int(BEYOND * len(one.y)) :] for one in self.series]
        return max((float(y.max()) for y in later if len(y)), default=math.inf)


def with_points(charts: Sequence[Chart]) -> list[Chart]:
    """The charts that have something to draw, without the series that do not."""
    drawn = [c._replace(series=[one for one in c.series if len(one.x)]) for c in charts]
    return [chart for chart in drawn if chart.series]


def in_time(chart: Chart) -> Chart:
    """With long seconds on the horizontal axis as minutes or hours."""
    most = max((float(one.x.max()) for one in chart.series if len(one.x)), default=0.0)
    if chart.x_unit != "seconds" or most <= 10 * 60:
        return chart
    scale, unit = (60 * 60, "hours") if most > 4 * 60 * 60 else (60, "minutes")
    drawn = [one._replace(x=one.x / scale) for one in chart.series]
    return chart._replace(series=drawn, marks=[x / scale for x in chart.marks], x_unit=unit)


# ---- points


def series(label: str, x: np.ndarray, y: np.ndarray, kind: str = "line", color: int = 0) -> Series:
    """The points whose coordinates are finite, thinned to what can be seen."""
    numbers = np.isfinite(x) & np.isfinite(y)
    return Series(label, *thinned(x[numbers], y[numbers]), kind, color)


def thinned(x: np.ndarray, y: np.ndarray, most: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """About `most` of the points, among them the lowest and the highest of each stretch.

    Example: of y = [0, 5, 1, 2, 9, 2] about 4 points are 0, 5, 2, 9 and the end, 2
    """
    n = len(x)
    keep = np.arange(n)
    if n > most:
        stretch = -(-n // (most // 2))
        padded = np.pad(y, (0, -n % stretch), mode="edge").reshape(-1, stretch)
        begins = np.arange(len(padded)) * stretch
        extremes = [begins + padded.argmin(1), begins + padded.argmax(1), [0, n - 1]]
        keep = np.unique(np.minimum(np.concatenate(extremes), n - 1))
    same = np.zeros(len(keep), dtype=bool)  # as the point before and the one after
    same[1:-1] = (y[keep][1:-1] == y[keep][:-2]) & (y[keep][1:-1] == y[keep][2:])
    keep = keep[~same]
    return x[keep], y[keep]


def medians(x: np.ndarray, y: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The median of each `window` values, at the x of the one in their middle.

    Example: x = [0, 1, 2, 3, 4, 5] and y = [3, 1, 2, 9, 8, 7] with 3 -> [1, 4] and [2, 8]
    """
    begins = range(0, len(y), window)
    middles = np.minimum(np.array(begins) + window // 2, len(y) - 1)
    return x[middles], np.array([np.median(y[begin : begin + window]) for begin in begins])


# ---- axes


def limits(
    values: np.ndarray, from_zero: bool, log: bool, air: float = 0.06
) -> tuple[float, float]:
    """The ends of an axis that has room for these values, and some air."""
    if log:
        values = values[values > values.max() / DECADES]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if log:
        wide = (max(high, low * 1.5) / low) ** air
        return low / wide, max(high, low * 1.5) * wide
    low = min(low, 0.0) if from_zero else low
    room = (high - low) or abs(high) or 1.0
    return low - (0 if from_zero else air * room), high + air * room or 1.0


def ticks(axis: Axis, about: int = 5) -> list[float]:
    """Round numbers on the axis, about `about` of them.

    Example: 0 to 61440 -> 0, 20000, 40000, 60000
    """
    if axis.log:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
            round_ones = [digit * 10.0**power for power in powers for digit in digits]
            shown = [tick for tick in round_ones if axis.low <= tick <= axis.high]
            if len(shown) <= about + 1:
                break
        return shown[:: max(len(shown) // about, 1)]
    rough = (axis.high - axis.low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def ticks_of(axis: Axis, thousand_million: str = "B") -> list[tuple[float, str]]:
    """The ticks of an axis with their texts, on a logarithmic axis each in a unit of its own.

    Example: 0 to 61440 -> (0, "0"), (20000, "20 K"), (40000, "40 K"), (60000, "60 K")
    """
    values = ticks(axis)
    together = [[value] for value in values] if axis.log else [values]
    texts = [text for group in together for text in tick_texts(group, thousand_million)]
    return list(zip(values, texts, strict=True))


def tick_texts(values: list[float], thousand_million: str = "B") -> list[str]:
    """Numbers in one unit, with as many digits as tell them apart.

    Example: 0, 20000, 40000 -> "0", "20 K", "40 K"; 0.5, 1 -> "0.5", "1.0"
    """
    largest = max(map(abs, values), default=0.0)
    if 0 < largest < 1e-3:
        return [f"{value:.3g}" for value in values]
    power = min(int(math.log10(largest) // 3), 6) if largest >= 10_000 else 0
    prefix = ("", "K", "M", thousand_million, "T", "P", "E")[power]
    scaled = np.array(values) / 1000.0**power
    digits = next((d for d in range(5) if np.allclose(scaled.round(d), scaled, 0, 1e-6)), 5)
    return [f"{value:.{digits}f} {prefix}".strip() if value else "0" for value in scaled]


# ---- drawing


def picture(charts: Sequence[Chart]) -> str:
    """An SVG file of these charts, two side by side.

    Args: charts of one size
    """
    width = charts[0].size[0]
    height = max(height_of(chart) for chart in charts)
    parts = []
    for number, chart in enumerate(charts):
        y = (number // 2 + 1) * height - height_of(chart)
        parts.append(svg(chart, f'x="{number % 2 * width}" y="{y}" width="{width}"'))
    right = min(len(charts), 2) * width + 2 * EDGE
    bottom = -(-len(charts) // 2) * height + 2 * EDGE
    size = f'width="{right}" height="{bottom}" viewBox="-{EDGE} -{EDGE} {right} {bottom}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}\n</style>'
    paper = f'<rect class="paper" x="-{EDGE}" y="-{EDGE}" width="100%" height="100%"/>'
    return "\n".join([begin, paper, *parts, "</svg>\n"])


def svg(chart: Chart, place: str = "") -> str:
    """The chart under its title, note and legend.

    Args: place attributes that say where it is in a larger picture
    """
    above = heading(chart)
    box = f'{place} height="{height_of(chart)}" viewBox="0 0 {chart.size[0]} {height_of(chart)}"'
    begin = f'<svg class="chart" role="img" aria-label="{escape(described(chart))}" {box}>'
    below = f'<g class="plot" transform="translate(0 {LINE * len(above)})" {for_script(chart)}>'
    return "\n".join([begin, *above, below, *plot(chart), "</g></svg>"])


def height_of(chart: Chart) -> int:
    return LINE * len(heading(chart)) + chart.size[1]


def heading(chart: Chart) -> list[str]:
    """Title, note and legend as lines, LINE units apart."""
    unit = f' <tspan class="y-unit">{escape(chart.unit)}</tspan>'
    lines = [f'<text class="title" x="0" y="{LINE}">{escape(chart.title)}{unit}</text>']
    legend = {(one.label, one.color, one.kind): None for one in chart.series if one.label}
    many = len(legend) > 1 and not chart.labels
    entries = [(label, key_of(*look)) for label, *look in legend] if many else []
    for text, key in [(chart.note, ""), *entries]:
        for number, line in enumerate(wrap(text.replace("`", ""), int(chart.size[0] / LETTER))):
            y = LINE * (len(lines) + 1)
            before = f'<g transform="translate(0 {y - 9})">{key}</g>' if number == 0 else ""
            lines.append(before + words("", 30 if key else 0, y, line))
    return lines


def plot(chart: Chart) -> list[str]:
    x_axis, y_axis = chart.x_axis(), chart.y_axis()
    bottom = chart.size[1] - BOTTOM
    right = chart.size[0] - RIGHT
    parts = []
    for tick, text in ticks_of(y_axis):
        y = y_axis.place(tick)
        parts += [rule("grid", LEFT, y, right, y), words("y", LEFT - 8, y + 4, text)]
    for tick, text in ticks_of(x_axis, "G" if chart.x_unit == "FLOPs" else "B"):
        parts.append(words("x", x_axis.place(tick), bottom + 16, text))
    parts += [rule("base", LEFT, bottom, right, bottom)]
    parts += [words("unit", right, bottom + 32, chart.x_unit)]
    if chart.level is not None:
        y = y_axis.place(chart.level)
        parts.append(rule("level", LEFT, y, right, y))
    numbered = -math.inf
    for number, mark in enumerate(chart.marks, 1):
        x = x_axis.place(mark)
        parts.append(rule("mark", x, bottom, x, TOP))
        if x - numbered > CLOSE:
            parts.append(words("x", x, TOP - 4, str(number)))
            numbered = x
    for one in chart.series:
        points = list(zip(x_axis.place(one.x), y_axis.place(one.y), strict=True))
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'class="{one.kind} {style_of(one.color)}" data-label="{escape(one.label)}"'
        parts.append(f'<polyline {look} points="{drawn}"/>')
        if one.kind == "dots" or len(points) == 1:  # a single point makes no line
            parts += [dot(one.color, x, y) for x, y in points]
    for label in chart.labels:
        side = "left" if label.dx < 0 else "right"
        x = x_axis.place(label.x) + label.dx
        y = y_axis.place(label.y) + label.dy
        parts.append(words(f"label {side} {style_of(label.color)}", x, y, label.text))
    return [*parts, rule("cursor", 0, bottom, 0, TOP)]


def key_of(color: int, kind: str = "line") -> str:
    """A piece of a series, 22 x 10 units, as the chart draws it."""
    line = f'<polyline class="{kind} {style_of(color)}" points="0,5 22,5"/>'
    return line + (dot(color, 11, 5) if kind == "dots" else "")


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def words(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def dot(color: int, x: float, y: float) -> str:
    return f'<circle class="{style_of(color)}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def style_of(color: int) -> str:
    """The classes of a series: its colour, and from the seventh series on its dashes."""
    dashed = color // COLORS % 3
    return f"c{color % COLORS}" + (f" dashed{dashed}" if dashed else "")


def described(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    named = [s for s in chart.series if s.label and len(s.y)]
    ends = "; ".join(f"{s.label} from {s.y[0]:.4g} to {s.y[-1]:.4g}" for s in named)
    return f"{chart.title} against {chart.x_unit}: {ends or 'nothing yet'}"


def for_script(chart: Chart) -> str:
    """The axes as attributes that page.js reads."""
    texts = [
        f"{axis.low:.7g} {axis.high:.7g} {int(axis.log)} {axis.begin} {axis.end}"
        for axis in (chart.x_axis(), chart.y_axis())
    ]
    return f'data-x="{texts[0]}" data-y="{texts[1]}" data-x-unit="{escape(chart.x_unit)}"'
