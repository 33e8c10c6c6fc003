"""Curriculum learning: which samples a run may draw, and how much of each, as its clock goes on.

A length (`seqlen`, `seqlen-reshape`) says how much of a sample is shown. A ranked metric (`length`,
`rarity`, ..., or a function of yours) says which samples may be drawn: the easiest so many, in an
order that difficulty.py found beforehand. Each metric has its own pacing; what several ranked
metrics allow intersects.

Reads no files and draws no random numbers: everything here is a pure function of progress, and a
pool only says which ranks there are to draw from. In reading order: settings, pacing, pool, course.

Papers: Li et al., arXiv 2212.03597; arXiv 2108.06084 (sequence length warmup).

    python curriculum.py pace --kind root --degree 2 --start 64 --end 1024 --over 300 --multiple 8
"""

import argparse
import importlib.util
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LENGTHS = ("seqlen", "seqlen-reshape")
RANKED = ("length", "rarity", "rarity-mean", "length-rarity")
LARGEST = 2**53  # to which a float64 counts without gaps
MULTIPLE = 8  # lengths move in steps of 8: few shapes, and matrix units work in eights
PACES = "linear, root:DEGREE, discrete:LEVEL@SHARE:...:LEVEL, path.py:name"


def flag(default: Any, help: str, choices: tuple | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class CurriculumConfig:
    """Where a value is one a metric, commas part them."""

    metric: str = flag(
        "none", f"easy first, by none, {', '.join((*LENGTHS, *RANKED))}, path.py:name"
    )
    start: str | None = flag(None, "difficulty at first (default: a quarter of --seq-len, or 1 %)")
    share: str = flag("0.4", "share of --tokens after which nothing is too hard")
    pace: str | None = flag(None, f"{PACES} (default: linear for lengths, else root:2)")
    by: str = flag("percentile", "unit of a ranked metric's difficulty", ("percentile", "value"))
    index: str | None = field(default=None, metadata={"help": "folder that analyze wrote (default: in the store's)", "free": True})


# ---- pacing: difficulty as a pure function of progress


def pace(
    t: float, over: float, start: int, end: int, degree: float = 1.0, multiple: int = 1
) -> int:
    """Difficulty at progress t of `over`, in any unit: from `start` along a root to `end`.

    Paper:    arXiv 2212.03597; floor((t / T)^(1 / p) (end - start) + start)
    Args:     degree   p: 1 is linear, 2 the square root; above 1 grows fast at first
              multiple values between are rounded down to one of these
    Returns:  a value in start..end, exactly `end` from t = over on
    Deviates: upstream can fall below `start` by rounding, and reach `end` late
    Example:  pace(1, 300, 64, 1024, degree=2, multiple=8) == 112, from 119.4;
              pace(27, 49, 1, 50) == 27, from 27.999999999999996: the order of operations is fixed
    """
    if t >= over:
        return end
    value = math.floor((t / over) ** (1 / degree) * (end - start) + start)
    return min(max(value - value % multiple, start), end)


def discrete(t: float, levels: tuple, until: tuple) -> int:
    """Difficulty by stages: level i while t <= until[i], the last one afterwards.

    Example:  [discrete(t, (64, 128, 256), (10, 25)) for t in (10, 11, 26)] == [64, 128, 256]
    """
    return levels[bisect_left(until, t)]


@dataclass(frozen=True)
class Pacing:
    """One metric's schedule, checked when it is made: a pure function of t."""

    kind: str  # linear | root | discrete | path.py:name, a function of t / over, 0..1
    start: int = 1
    end: float = 100
    over: float = 1.0
    degree: float = 2.0  # of the root
    multiple: int = 1
    levels: tuple[int, ...] = ()
    until: tuple[float, ...] = ()
    flag: str = "--"  # what the user's flags begin with, for messages

    def __post_init__(self):
        stages = self.kind == "discrete"
        if not (stages or self.kind in ("linear", "root") or ".py:" in self.kind):
            raise ValueError(f"pacing {self.kind} is unknown: choose one of {PACES}")
        for name in ("over", "degree", "multiple"):
            if not 0 < getattr(self, name) < LARGEST:
                raise ValueError(f"pacing with {name} {getattr(self, name)}: it has to be above 0")
        if stages and not self.levels:
            raise ValueError("pacing discrete needs levels, such as discrete:64@0.1:256")
        if len(self.levels) != len(self.until) + stages:
            raise ValueError(
                f"{len(self.levels)} levels need {max(len(self.levels) - 1, 0)} ends (until), one"
                f" each but the last, not {len(self.until)}"
            )
        ends = (0, *self.until, LARGEST)
        if not all(a < b for a, b in pairwise(ends)):
            raise ValueError(f"the ends {self.until} of the levels (until) have to ascend from 0")
        what = "level" if stages else f"{self.flag}start"
        for level in self.levels or (self.start,):
            if not 1 <= level <= self.end:
                raise ValueError(f"{what} {level} must lie in 1..{self.end}, the end")
            if level % self.multiple and level != self.end:
                raise ValueError(
                    f"{what} {level} is not divided by the multiple {self.multiple}:"
                    f" choose {-(-level // self.multiple) * self.multiple}"
                )
        if ".py:" in self.kind and math.isfinite(self.end):
            for i in range(1001):  # so that a user's function fails before the run does
                self(i / 1000 * self.over)

    def __call__(self, t: float) -> int:
        if self.kind == "discrete":
            return discrete(t, self.levels, self.until)
        if ".py:" not in self.kind:
            degree = self.degree if self.kind == "root" else 1.0
            return pace(t, self.over, self.start, self.end, degree, self.multiple)
        progress = min(t / self.over, 1.0)
        try:
            found = math.floor(function_at(self.kind)(progress))
        except (Exception, SystemExit) as error:  # whatever a user's function may do
            raise ValueError(f"{self.kind} at progress {progress}: {said(error)}") from None
        if not self.start <= found <= self.end:
            raise ValueError(
                f"{self.kind} at progress {progress}: {found} is outside {self.start}..{self.end},"
                f" which {self.flag}start and the end allow"
            )
        return found if found == self.end else max(found - found % self.multiple, self.start)


@lru_cache
def function_at(place: str) -> Callable:
    """Load the function that `path.py:name` names."""
    path, name = place.rsplit(":", 1)
    if not (path.endswith(".py") and Path(path).is_file()):
        raise ValueError(f"{place}: there is no Python file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{place}: {said(error)}") from None
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{place}: {path} defines no function {name}")
    return getattr(module, name)


def said(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


# ---- settings of a run


def settled(config: CurriculumConfig, seq_len: int) -> CurriculumConfig:
    """Fill in what was left open, metric by metric: the papers' pacings, from 1/4 row or 1 %."""
    names = config.metric.split(",")
    kinds = config.pace or ",".join("linear" if name in LENGTHS else "root:2" for name in names)
    kinds, share = (
        text if "," in text else ",".join([text] * len(names)) for text in (kinds, config.share)
    )
    quarter = max(seq_len // 4 // MULTIPLE, 1) * MULTIPLE  # docs/curriculum.md measures it
    starts = [str(quarter) if name in LENGTHS else "1" for name in names]
    for i, kind in enumerate(kinds.split(",")[: len(names)]):
        if kind.startswith("discrete:"):
            starts[i] = kind.split(":")[1].split("@")[0]
        elif names[i] not in LENGTHS and config.by == "value" and config.start is None:
            raise ValueError("--curriculum-by value needs --curriculum-start, in the metric's unit")
    return replace(config, start=config.start or ",".join(starts), share=share, pace=kinds)


def pacings(
    config: CurriculumConfig, seq_len: int, budget: float, highest: dict[str, float]
) -> dict[str, Pacing]:
    """Each metric's schedule over a run of `budget` tokens.

    Args:   config  as `settled`
            highest largest value of each ranked metric, where difficulty by value ends
    Raises: ValueError naming the flag of a setting that is bad
    """
    names = config.metric.split(",")
    columns = []
    for flag, text in (("start", config.start), ("share", config.share), ("pace", config.pace)):
        columns.append(text.split(","))
        if len(columns[-1]) != len(names):
            raise ValueError(
                f"--curriculum-{flag} {text} needs a part for each of {', '.join(names)}"
            )
    found = {}
    for name, start, share, kind in zip(names, *columns, strict=True):
        over = number(share, "--curriculum-share")
        if not 0 < over <= 1:
            raise ValueError(f"--curriculum-share {share} is a share of --tokens: above 0 to 1")
        length, by_value = name in LENGTHS, config.by == "value"
        found[name] = Pacing(
            start=number(start, "--curriculum-start", int),
            end=seq_len if length else highest.get(name, math.inf) if by_value else 100,
            over=over * budget,
            multiple=MULTIPLE if length else 1,
            flag="--curriculum-",
            **parsed(kind, budget),
        )
    return found


def parsed(text: str, budget: float, what: str = "--curriculum-pace") -> dict[str, Any]:
    """A part of --curriculum-pace as fields of Pacing.

    Example: parsed("discrete:64@0.1:256", 1000) is level 64 until 100 tokens, 256 after them
    """
    kind, *rest = text.split(":")
    if kind == "root" and len(rest) == 1:
        return {"kind": kind, "degree": number(rest[0], what)}
    if kind == "discrete" and rest:
        levels, _, ends = zip(*(stage.partition("@") for stage in rest), strict=True)
        shares = [number(end or "0", what) for end in ends[:-1]]
        if ends[-1] or not all(0 < share <= 1 for share in shares):
            raise ValueError(f"{what} {text}: each level but the last ends @ a share, above 0 to 1")
        until = tuple(share * budget for share in shares)
        return {"kind": kind, "levels": tuple(number(n, what, int) for n in levels), "until": until}
    return {"kind": text}


def number(text: str, flag: str, kind: type = float) -> Any:
    try:
        found = kind(text)
    except ValueError:
        found = math.nan
    if not abs(found) < LARGEST:
        raise ValueError(f"{flag} {text} is not a {'whole ' * (kind is int)}number below 2^53")
    return found


def check(config: CurriculumConfig, seq_len: int, kind: str) -> None:
    """Refuse what cannot work, before data is opened. `kind` of samples: rows | pieces | bert."""
    names = config.metric.split(",")
    for name in names:
        if ":" in name:
            function_at(name)
        elif name not in (*LENGTHS, *RANKED):
            known = ", ".join((*LENGTHS, *RANKED))
            raise ValueError(f"--curriculum {name} is unknown: choose of {known}, path.py:name")
        if name in ("length", "length-rarity") and kind == "rows":
            raise ValueError(
                f"--curriculum {name} cannot tell rows apart that are all {seq_len} tokens, cut"
                " from the stream: take pieces of documents (--pack), or choose rarity"
            )
        if name == "seqlen-reshape" and kind != "rows":
            raise ValueError(
                f"--curriculum {name} is for full rows, cut from the stream: take seqlen"
                f"{' and --pack' if kind == 'bert' else ''}, which cuts pieces and loses nothing"
            )
    if len(set(map(label, names))) < len(names) or set(LENGTHS) <= set(names):
        raise ValueError(
            f"--curriculum {config.metric}: takes one length, and each name once (rename functions)"
        )
    pacings(config, seq_len, 1.0, {})


def label(name: str) -> str:
    """A metric's name without the path of a user's file."""
    return name.rpartition(":")[2]


# ---- pool and course: what is easy enough


SCAN = 1 << 18  # samples looked at at once


@dataclass(frozen=True)
class Pool:
    """The samples that every filter allows: each the `count` easiest of an index."""

    filters: tuple[tuple[int, Any], ...]  # (count, difficulty.DifficultyIndex), fewest first

    @property
    def reach(self) -> int:
        """How many ranks there are to draw from; with one filter each is a sample."""
        return self.filters[0][0]

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """The samples at these ranks, (n,) int64; -1 where another filter does not allow it."""
        ids = self.filters[0][1].order[ranks].astype(np.int64)
        for count, index in self.filters[1:]:
            ids[~index.holds(ids, count)] = -1
        return ids

    @cached_property
    def size(self) -> int:
        """How many samples; with several filters that reach further than a scan, an estimate."""
        if len(self.filters) == 1:
            return self.reach
        ranks = np.linspace(0, self.reach - 1, min(self.reach, SCAN)).astype(np.int64)
        return round((self.ids(ranks) >= 0).mean() * self.reach)

    def empty(self) -> bool:
        starts = range(0, self.reach, SCAN)
        ranks = (np.arange(a, min(a + SCAN, self.reach)) for a in starts)
        return len(self.filters) > 1 and not any((self.ids(part) >= 0).any() for part in ranks)


class MetricSettings(NamedTuple):
    name: str
    config: Any


def parse_metrics(config, seq_len, kind):
    if config.metric == "none":
        return ()
    config = settled(config, seq_len)
    check(config, seq_len, kind)
    return tuple(MetricSettings(n, config) for n in config.metric.split(","))


class Stage(NamedTuple):
    """What a curriculum allows at one point of a run."""

    difficulty: dict[str, float]  # of each metric
    max_piece_len: int  # tokens of a sample
    pool: Pool | None  # None: every sample
    note: str  # how an empty pool was widened


class Curriculum:
    """All metrics of a run together: a pure function from the clock to a Stage."""

    def __init__(
        self, metrics, budget: float, seq_len: int, indexes: dict[str, Any]
    ):
        config = metrics[0].config
        highest = {name: math.ceil(index.highest(len(index))) for name, index in indexes.items()}
        for name, end in highest.items() if config.by == "value" else ():
            if end < 2:
                raise ValueError(
                    f"--curriculum-by value goes up from 1 in whole numbers, and {name} ends at"
                    f" {indexes[name].highest(len(indexes[name])):g}: scale it, or take percentiles"
                )
        self.pacings = pacings(config, seq_len, budget, highest)
        self.by, self.seq_len, self.indexes = config.by, seq_len, indexes
        self.pool_of = lru_cache(maxsize=4)(self.find_pool)

    def at(self, t: float) -> Stage:
        """The stage at t consumed tokens. A pool without samples widens to the first that has some.

        With difficulty by value and nothing so easy: to the easiest value. With several metrics and
        an empty intersection: to the easiest k % of each, for the smallest k that is not empty.
        """
        difficulty = {name: pacing(t) for name, pacing in self.pacings.items()}
        limit = min([self.seq_len, *(difficulty[n] for n in LENGTHS if n in difficulty)])
        counts, note = {}, ""
        by_percent = self.by == "percentile"
        for name, index in self.indexes.items():
            count = (index.at_percent if by_percent else index.at_value)(difficulty[name])
            if count == 0:
                easiest = index.highest(1)
                note = f"no sample has {name} {difficulty[name]} or less: widened to {easiest:g}"
                difficulty[name], count = easiest, index.at_value(easiest)
            counts[name] = count
        pool, percent = self.pool_of(tuple(counts.values()))
        if percent:
            note = f"no sample is in all of {counts}: widened to the easiest {percent} % of each"
            for name, index in self.indexes.items():
                reached = percent if by_percent else index.highest(index.at_percent(percent))
                difficulty[name] = max(difficulty[name], reached)
        return Stage(difficulty, limit, pool, note)

    def find_pool(self, counts: tuple[int, ...]) -> tuple[Pool | None, int]:
        """The intersection of the easiest `counts` of each index, and to how many % it widened."""
        for percent in range(101):
            pairs = zip(counts, self.indexes.values(), strict=True)
            widened = ((max(count, index.at_percent(percent)), index) for count, index in pairs)
            filters = [(count, index) for count, index in widened if count < len(index)]
            pool = Pool(tuple(sorted(filters, key=lambda pair: pair[0]))) if filters else None
            if pool is None or not pool.empty():
                return pool, percent
        raise AssertionError("the easiest 100 % are all samples")


def reshape(spans: np.ndarray, seq_len: int, limit: int) -> tuple[int, list[list[tuple]]]:
    """Cut full rows of `seq_len` tokens into shorter ones, losing nothing.

    Paper:    arXiv 2212.03597 (seqres)
    Args:     spans (n, 2) first and one-past-last token of samples, at most seq_len tokens each
    Returns:  tokens of a row, at most `limit`; for each sample the same number of rows. The last
              chunk reaches back to be as long: (start, stop, seen), the first `seen` tokens context
              only, as they were targets before. A short sample ends in rows without a piece.
    Deviates: upstream drops most of the tails; keeping them at a limit just below seq_len would
              double the work, so rows are as short as their number allows (in multiples of 8)
    Example:  reshape([[0, 10]], 10, 4) == (4, [[(0, 4, 0)], [(4, 8, 0)], [(6, 10, 2)]])
    """
    fewest = -(-seq_len // limit)
    length = min(-(-seq_len // fewest // MULTIPLE) * MULTIPLE, limit)
    rows: list[list[tuple]] = []
    for start, stop in spans.tolist():
        for chunk in range(start, start + seq_len, length):
            end = min(chunk + length, stop)
            back = max(min(chunk, end - length), start)
            rows.append([(back, end, chunk - back)] if chunk < stop else [])
    return length, rows


# ---- command


def figure_for(file: str) -> Any:
    """An empty figure, or a ValueError where it could not be saved to this file later."""
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


def show_pace(args: argparse.Namespace) -> None:
    """Print the difficulty at --at, or at tenths of the way."""
    at, levels, until = (
        tuple(number(part, f"--{flag}", int) for part in text.split(",")) if text else ()
        for flag, text in (("at", args.at), ("levels", args.levels), ("until", args.until))
    )
    if min(at, default=0) < 0:
        raise ValueError(f"--at {args.at}: progress is never below 0")
    start, end, multiple = (
        number(text, f"--{flag}", int)
        for flag, text in (("start", args.start), ("end", args.end), ("multiple", args.multiple))
    )
    over = number(args.over, "--over")
    chosen = {"degree": number(args.degree, "--degree")} | parsed(args.kind, over, "--kind")
    if levels:
        chosen = {"kind": "discrete", "levels": levels, "until": until}
    if "levels" in chosen:
        levels, until = chosen["levels"], chosen["until"]
        start, end, over = levels[0], max(levels), until[-1] if until else over
    pacing = Pacing(start=start, end=end, over=over, multiple=multiple, **chosen)
    if args.plot:
        figure_for(args.plot)
    tenths = range(12 if levels else 11)  # the last level is what comes after the last end
    found = {f"{t:.12g}": pacing(t) for t in at or [over * tenth / 10 for tenth in tenths]}
    if args.json:
        print(json.dumps(found))
    else:
        print("          at difficulty")
        for t, value in found.items():
            print(f"{t:>12} {value:10}")
    if args.plot:
        t = [over * i / 1000 for i in range(1101)]
        curve = [pacing(x) for x in t]
        plotted(args.plot, lambda axes: axes.plot(t, curve), xlabel="t", ylabel="difficulty")


def main(argv: list[str] | None = None) -> None:
    from support import runtime

    parser = runtime.Parser(prog="curriculum.py", description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("pace", help="print the difficulty over a run")
    verb.add_argument("--kind", default="linear", help=f"root, or {PACES}")
    verb.add_argument("--degree", default="2", help="of the root: 2 is the square root")
    verb.add_argument("--start", default="64")
    verb.add_argument("--end", default="256")
    verb.add_argument("--over", default="100", help="t from which on it is --end")
    verb.add_argument("--multiple", default="1", help="round down to one of these")
    verb.add_argument("--levels", help="of --kind discrete: 64,128,256")
    verb.add_argument("--until", help="last t of each level but the last: 10,25")
    verb.add_argument("--at", help="the t to print: 1,5,10")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.add_argument("--plot", help="file for the curve")
    show_pace(parser.parse_args(argv))


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
