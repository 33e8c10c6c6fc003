"""What a chart shows, before anybody draws it: series, axes with round ticks, thinned curves.

support/report/charts.py draws it into a page, support/report/figures.py with matplotlib.
"""

import math
from html import escape
from typing import NamedTuple

import numpy as np

POINTS = 400  # of a drawn series, at most about so many: two for each pixel column of a phone
BEYOND = 0.02  # share of the steps, the first of them, that may lie above the chart


class Series(NamedTuple):
    """Points in the order of x, none of them NaN; see `series`."""

    label: str
    x: np.ndarray  # (n,)
    y: np.ndarray  # (n,)
    kind: str = "line"  # line | faint | dots: with a dot at each point | band, see `band`
    color: int = 0


class Mark(NamedTuple):
    """A place on the horizontal axis where something happened."""

    x: float
    label: str


class Axis(NamedTuple):
    low: float
    high: float
    log: bool = False

    def share(self, values: np.ndarray) -> np.ndarray:
        """How far along the axis they are, from 0 to 1; outside of it below or above."""
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log10(values), math.log10(low), math.log10(high)
        return (values - low) / (high - low)


class Chart(NamedTuple):
    title: str
    unit: str  # of the vertical axis
    x_unit: str
    series: list[Series]
    marks: tuple[Mark, ...] = ()
    level: float | None = None  # a horizontal line
    from_zero: bool = False
    log_x: bool = False
    log_y: bool = False
    clip_first: bool = False  # the first steps may be above the chart, where the rest has room
    note: str = ""

    def x_axis(self) -> Axis:
        values = np.concatenate([one.x for one in self.series] or [np.zeros(0)])
        return axis_of(values, from_zero=not self.log_x, log=self.log_x, air=0.0)

    def y_axis(self) -> Axis:
        values = np.concatenate([one.y for one in self.series] or [np.zeros(0)])
        if self.level is not None:
            values = np.append(values, self.level)
        if self.clip_first and len(values):
            values = values[values <= self.highest()]
        return axis_of(values, self.from_zero, self.log_y)

    def highest(self) -> float:
        """The largest value that is not of the first steps."""
        return max(float(one.y[int(BEYOND * len(one.y)) :].max()) for one in self.series)


def series(label: str, x: np.ndarray, y: np.ndarray, kind: str = "line", color: int = 0) -> Series:
    """Points for a chart: those that are numbers, thinned to what can be seen."""
    numbers = np.isfinite(x) & np.isfinite(y)
    x, y = x[numbers], y[numbers]
    if kind == "faint" and len(x) > POINTS:
        return Series(label, *band(x, y), "band", color)
    return Series(label, *thinned(x, y), kind, color)


def band(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outline of very many points: their highest from left to right, then back the lowest.

    Returns: (2 m,) each, m at most half of POINTS
    Cost:    none of the points is lost: a spike of one step in 200,000 stands out of the band
    """
    begins = np.arange(0, len(x), -(-2 * len(x) // POINTS))
    high, low = np.maximum.reduceat(y, begins), np.minimum.reduceat(y, begins)
    return np.append(x[begins], x[begins][::-1]), np.append(high, low[::-1])


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
        found = [begins + padded.argmin(1), begins + padded.argmax(1), [0, n - 1]]
        keep = np.unique(np.minimum(np.concatenate(found), n - 1))
    same = np.zeros(len(keep), dtype=bool)  # as the point before and the one after
    same[1:-1] = (y[keep][1:-1] == y[keep][:-2]) & (y[keep][1:-1] == y[keep][2:])
    keep = keep[~same]
    return x[keep], y[keep]


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """(n,) the mean of the `window` values around each, of fewer at the ends.

    Example: [1, 2, 6] with 3 -> [1.5, 3, 4]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    counts = np.concatenate([[0], np.cumsum(np.isfinite(values))])
    at = np.arange(len(values))
    low = np.maximum(at - (window - 1) // 2, 0)
    high = np.minimum(at + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)


def medians(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The median of each `window` values, and the number of the one in their middle.

    Example: [3, 1, 2, 9, 8, 7] with 3 -> [1, 4] and [2, 8]
    """
    begins = range(0, len(values), window)
    middles = np.array([min(begin + window // 2, len(values) - 1) for begin in begins])
    found = [
        np.median(part[np.isfinite(part)]) for part in (values[b : b + window] for b in begins)
    ]
    return middles, np.array(found)


def axis_of(values: np.ndarray, from_zero: bool, log: bool, air: float = 0.06) -> Axis:
    """An axis that has room for these values."""
    values = values[values > 0] if log else values
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if log:
        wide = (max(high, low * 1.5) / low) ** air
        return Axis(low / wide, max(high, low * 1.5) * wide, log)
    low = min(low, 0.0) if from_zero else low
    room = (high - low) or abs(high) or 1.0
    return Axis(low - (0 if from_zero else air * room), high + air * room or 1.0, log)


def ticks(axis: Axis, about: int = 5) -> list[float]:
    """Round numbers on the axis, about so many.

    Example: 0 to 61440 -> 0, 20000, 40000, 60000
    """
    if axis.log:
        return log_ticks(axis, about)
    rough = (axis.high - axis.low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(axis: Axis, about: int) -> list[float]:
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits]
        found = [tick for tick in found if axis.low <= tick <= axis.high]
        if len(found) <= about + 1:
            break
    return found[:: max(len(found) // about, 1)]


def tick_texts(values: list[float], thousands: str = "B", log: bool = False) -> list[str]:
    """The ticks of an axis in one unit, with as many digits as tell them apart.

    Args:    thousands what a thousand million is called
             log       each in a unit of its own
    Example: 0, 20000, 40000 -> "0", "20 K", "40 K"; 0.5, 1 -> "0.5", "1.0"
    """
    if log:
        return [text for value in values for text in tick_texts([value], thousands)]
    largest = max((abs(value) for value in values), default=0.0)
    if 0 < largest < 1e-3:
        return [f"{value:.3g}" for value in values]
    power = min(int(math.log10(largest) // 3), 6) if largest >= 10_000 else 0
    prefix = ("", "K", "M", thousands, "T", "P", "E")[power]
    scaled = [value / 1000.0**power for value in values]
    digits = next(
        (d for d in range(5) if all(abs(round(v, d) - v) < 1e-6 * max(abs(v), 1) for v in scaled)),
        5,
    )
    return [f"{v:.{digits}f} {prefix}".strip() if v else "0" for v in scaled]


# ---- svg chart
#
# A chart (support/report/charts.py) as SVG that stretches with the page while its text keeps its
# size.
#
# Everything is placed in percent of the plot's area. Curves stand in an inner picture of 1000 x
# 1000 that is pulled to the area's shape, with strokes that stay as thin as they are. Colours and
# fonts are the page's (support/report/page.css), so that light and dark, narrow and wide are one
# drawing.


COLORS = 6  # of the page; beyond them lines are dashed
CLOSE = 0.04  # marks nearer than this share of the axis have one label


def svg(chart: Chart) -> str:
    """The chart without its title and legend."""
    x_axis, y_axis = chart.x_axis(), chart.y_axis()
    parts = [
        f'<svg class="plot" role="img" aria-label="{escape(described(chart))}"'
        f' data-x="{data(x_axis)}" data-y="{data(y_axis)}">',
        *drawn_ticks(x_axis, y_axis, "G" if chart.x_unit == "FLOPs" else "B"),
        *drawn_marks(chart, x_axis, y_axis),
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">',
        *(drawn_line(one, x_axis, y_axis) for one in chart.series),
        "</svg>",
        *(dot for one in chart.series for dot in drawn_dots(one, x_axis, y_axis)),
        '<line class="cursor" y1="0" y2="100%" x1="-9" x2="-9"/></svg>',
    ]
    return "".join(parts)


def style_of(color: int) -> str:
    """The classes of a series: its colour, and from the seventh series on its dashes."""
    dashed = color // COLORS % 3
    return f"c{color % COLORS}" + (f" dashed{dashed}" if dashed else "")


def described(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    ends = [
        f"{one.label} from {one.y[0]:.4g} to {one.y[-1]:.4g}" for one in chart.series if len(one.y)
    ]
    return f"{chart.title} against {chart.x_unit}: {'; '.join(ends) or 'nothing yet'}"


def data(axis: Axis) -> str:
    return f"{axis.low:.7g} {axis.high:.7g} {int(axis.log)}"


def percent(share: float) -> str:
    return f"{share * 100:.2f}%"


def drawn_ticks(x_axis: Axis, y_axis: Axis, thousands: str) -> list[str]:
    parts = []
    at = ticks(y_axis)
    for tick, text in zip(at, tick_texts(at, log=y_axis.log), strict=True):
        y = percent(1 - float(y_axis.share(np.float64(tick))))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="-8" y="{y}" dy="0.35em">{text}</text>')
    at = ticks(x_axis)
    for tick, text in zip(at, tick_texts(at, thousands, x_axis.log), strict=True):
        x = percent(float(x_axis.share(np.float64(tick))))
        parts.append(f'<text class="x" x="{x}" y="100%" dy="1.6em">{text}</text>')
    parts.append('<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/>')
    return parts


def drawn_marks(chart: Chart, x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    if chart.level is not None:
        y = percent(1 - float(y_axis.share(np.float64(chart.level))))
        parts.append(f'<line class="level" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
    labelled = -1.0
    for mark in chart.marks:
        share = float(x_axis.share(np.float64(mark.x)))
        x = percent(share)
        parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="0" y2="100%"/>')
        if share - labelled > CLOSE:
            parts.append(f'<text class="mark" x="{x}" y="-4">{escape(mark.label)}</text>')
            labelled = share
    return parts


def drawn_line(one: Series, x_axis: Axis, y_axis: Axis) -> str:
    if not len(one.x):
        return ""
    x, y = 1000 * x_axis.share(one.x), 1000 * (1 - y_axis.share(one.y))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<polyline class="{one.kind} {style_of(one.color)}" data-label="{escape(one.label)}"'
        f' points="{points}"/>'
    )


def drawn_dots(one: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    """A dot at each point; a single point gets one too, being no line."""
    if one.kind != "dots" and len(one.x) != 1:
        return []
    x, y = x_axis.share(one.x), 1 - y_axis.share(one.y)
    return [
        f'<circle class="{style_of(one.color)}" cx="{percent(a)}" cy="{percent(b)}" r="3"/>'
        for a, b in zip(x, y, strict=True)
        if 0 <= b <= 1
    ]
