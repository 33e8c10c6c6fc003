"""Curriculum learning: which samples a run may draw, and how much of each, as its clock goes on.

A length (`seqlen`, `seqlen-reshape`) says how much of a sample is shown. A ranked metric (`length`,
`rarity`, ..., or a function of yours) says which samples may be drawn: the easiest so many, in the
order that analyze.py wrote. Each metric has its own pacing, and with several ranked metrics a
sample has to be easy enough by all of them.

Reads no data and draws no random numbers: everything here is a pure function of the tokens consumed
so far. What a level of difficulty means in samples is the business of difficulty.py. In reading
order: configuration, pacing, reshape, the curriculum, what the flags mean, the command.

Papers: Li et al., arXiv 2212.03597; arXiv 2108.06084 (sequence length warmup).

    python curriculum.py pace --kind root --degree 2 --start 64 --end 1024 --over 300 --multiple 8
"""

import math
import runpy
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.base.clock import pace

LENGTHS = ("seqlen", "seqlen-reshape")
METRICS = "seqlen, seqlen-reshape, length, rarity, rarity-mean, length-rarity, path.py:name"
PACES = "linear, root:DEGREE, discrete:LEVEL@SHARE:...:LEVEL, path.py:name"
LARGEST = 2**53  # a float64 counts up to here without gaps
MULTIPLE = 8  # lengths move in steps of 8: few shapes, and matrix units work in eights


def flag(default: str | None, help: str, free: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "free": free})


@dataclass(frozen=True)
class CurriculumConfig:
    """The user's own words; `parse_metrics` reads them. Several metrics: values between commas."""

    metric: str = flag("none", f"easy samples first, by none, {METRICS}")
    start: str | None = flag(None, "difficulty at first (default: a quarter of --seq-len, or 1 %)")
    share: str | None = flag(None, "share of --tokens until nothing is too hard (default: 0.4)")
    pace: str | None = flag(None, f"{PACES} (default: linear for lengths, else root:2)")
    by: str | None = flag(None, "unit of a ranked metric: percentile (default) or value")
    index: str | None = flag(None, "folder that analyze.py wrote (default: the store's)", True)


# ---- pacing: difficulty as a pure function of progress


def discrete(t: float, levels: tuple[int, ...], until: tuple[float, ...]) -> int:
    """Difficulty by levels: number i while t <= until[i], the last one afterwards.

    Deviates: levels may go down again, and the last one need not be the highest. DeepSpeed
              (data_pipeline/curriculum_scheduler.py, update_difficulty) stops at its maximum: a
              level that comes after that one is never taken
    Example:  [discrete(t, (64, 128, 256), (10, 25)) for t in (10, 11, 26)] == [64, 128, 256]
    """
    return levels[bisect_left(until, t)]


def custom(name: str, progress: float, start: int, end: float, multiple: int) -> int:
    """Difficulty by a user's function of progress, 0..1; rounded down as `pace` does."""
    what = f"{name} at progress {progress}"
    value = call(what, lambda: math.floor(load_function(name)(progress)))
    if not start <= value <= end:
        raise ValueError(f"{what}: {value} is outside {start}..{end}, from start to end")
    return value if value == end else max(value - value % multiple, start)


class Pacing(NamedTuple):
    """How one metric's difficulty goes from start to end; `check_pacing` says what makes sense."""

    kind: str  # linear | root | discrete | path.py:name
    start: int = 1
    end: float = 100
    over: float = 1.0  # t from which on it is `end`
    degree: float = 1.0  # of a root
    multiple: int = 1
    levels: tuple[int, ...] = ()  # of discrete, which has no other start, end and over
    until: tuple[float, ...] = ()  # last t of each level but the last

    def at(self, t: float) -> int:
        if self.kind == "discrete":
            return discrete(t, self.levels, self.until)
        if self.kind in ("linear", "root"):
            return pace(t, self.over, self.start, self.end, self.degree, self.multiple)
        return custom(self.kind, min(t / self.over, 1.0), self.start, self.end, self.multiple)


@lru_cache
def load_function(name: str) -> Callable:
    """The function that `path.py:name` names."""
    path, _, function = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise ValueError(f"{name}: there is no Python file {path}")
    value = call(name, runpy.run_path, path).get(function)
    if not callable(value):
        raise ValueError(f"{name}: {path} defines no function {function}")
    return value


def call(what: str, function: Callable, *args: Any) -> Any:
    """Run what a user wrote; whatever it raises becomes one line that begins with `what`."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: raised {type(error).__name__}: {error}") from None


# ---- reshape: full rows shown in parts


class Reshaped(NamedTuple):
    """Parts of samples, each in a row of its own."""

    seq_len: int  # tokens of a row
    spans: np.ndarray  # (n, 2) first and one-past-last token of each part
    offsets: np.ndarray  # (R + 1,) row r has the parts offsets[r] to offsets[r + 1], one or none
    seen: np.ndarray  # (n,) so many of its tokens are context only: targets of the part before


def reshape(spans: np.ndarray, seq_len: int, limit: int) -> Reshaped:
    """Cut full rows of `seq_len` tokens into shorter ones, losing nothing.

    Paper:    arXiv 2212.03597 (seqres)
    Args:     spans (N, 2) first and one-past-last token of samples, at most seq_len tokens each
    Returns:  rows of at most `limit` tokens, equally many for each sample. A sample's last part
              reaches back to be as long as the others; a short sample (the end of the stream) ends
              in rows without a part
    Deviates: DeepSpeed (Megatron-DeepSpeed's pretrain_gpt.py, data_post_process) drops most of the
              tails; keeping them at a limit just below seq_len would double the work, so rows are
              as short as their number allows (in multiples of 8). The limit grows smoothly, the
              rows by stairs: rows of 1,024 are cut to 512 at every limit from 512 to 1,016
    Example:  reshape([[0, 10]], 10, 4) has rows of 4 with the parts 0..4, 4..8 and 6..10, the last
              of which has seen two of its tokens
    """
    rows_each = -(-seq_len // limit)
    length = min(-(-seq_len // rows_each // MULTIPLE) * MULTIPLE, limit)
    start, stop = spans[:, :1], spans[:, 1:]  # (N, 1)
    begins = start + np.arange(0, seq_len, length)  # (N, rows_each)
    ends = np.minimum(begins + length, stop)
    reaching_back = np.maximum(np.minimum(begins, ends - length), start)
    there = begins < stop
    return Reshaped(
        seq_len=length,
        spans=np.stack((reaching_back[there], ends[there]), axis=1),
        offsets=np.concatenate(([0], np.cumsum(there))),
        seen=(begins - reaching_back)[there],
    )


# ---- the curriculum: all metrics together


class MetricSettings(NamedTuple):
    """One metric of a run; made by `parse_metrics`."""

    name: str
    label: str  # the name without the path of a user's file
    is_length: bool
    by: str  # percentile | value: the unit of a ranked metric's difficulty
    pacing: Pacing  # over the share of the budget that is consumed


class Stage(NamedTuple):
    """What a curriculum allows at one point of a run."""

    difficulty: dict[str, float]  # of each metric
    max_piece_len: int  # tokens of a sample that are shown
    pool: Any  # support.ranking.Pool; None: every sample may be drawn
    note: str  # to tell the user: how an empty pool was widened


class Curriculum:
    """All metrics of a run together: a pure function from the clock to a Stage.

    Args:   metrics from `parse_metrics`
            budget  tokens of the run
            indexes support.ranking.Rankings: the index of each ranked metric
    Raises: ValueError naming the flag of a setting that an index does not allow
    """

    def __init__(self, metrics: Sequence[MetricSettings], budget: int, seq_len: int, indexes: Any):
        self.seq_len, self.indexes = seq_len, indexes
        self.lengths = [metric.name for metric in metrics if metric.is_length]
        self.units = {metric.name: metric.by for metric in metrics if not metric.is_length}
        self.pacings: dict[str, Pacing] = {}
        for metric in metrics:
            pacing, end = metric.pacing, metric.pacing.end
            if end == LARGEST:  # by value, up to the hardest sample
                end = math.ceil(indexes[metric.name].last_value)
            if end < 2:
                says = f"{metric.label} ends at {indexes[metric.name].last_value:g}: scale it up"
                raise ValueError(f"--curriculum-by value goes up from 1, but {says}")
            until = tuple(share * budget for share in pacing.until)
            pacing = pacing._replace(over=pacing.over * budget, until=until, end=end)
            check_pacing(pacing, "--curriculum-")
            self.pacings[metric.name] = pacing

    def at(self, consumed_tokens: float) -> Stage:
        difficulty = {name: pacing.at(consumed_tokens) for name, pacing in self.pacings.items()}
        max_piece_len = min([self.seq_len, *(difficulty[name] for name in self.lengths)])
        easy = self.indexes.eligible(difficulty, self.units)
        return Stage(difficulty | easy.reached, max_piece_len, easy.pool, easy.note)


# ---- settings: what the flags say, and what is refused


def parse_metrics(config: CurriculumConfig, seq_len: int) -> tuple[MetricSettings, ...]:
    """What the flags say of each metric, defaults filled in; () without a curriculum.

    The defaults are the papers' pacings: a length grows linearly, from a quarter of a row, a ranked
    metric as a square root, from the easiest 1 %.

    Raises: ValueError naming the flag of a setting that cannot work; whether a metric exists, and
            suits the samples, is for difficulty.check_metrics to say
    """
    if config.metric == "none":
        return ()
    names = config.metric.split(",")
    quarter = max(seq_len // 4 // MULTIPLE, 1) * MULTIPLE  # docs/curriculum.md measures it
    columns = [one_each(f, getattr(config, f), names) for f in ("start", "share", "pace", "by")]
    metrics = []
    for name, start, share, how, by in zip(names, *columns, strict=True):
        if by not in (None, "percentile", "value"):
            raise ValueError(f"--curriculum-by {by} is unknown: choose percentile or value")
        is_length, by_value = name in LENGTHS, name not in LENGTHS and by == "value"
        pacing = parse_pace(how or ("linear" if is_length else "root:2"))
        if pacing.levels and (start or share):
            given = f"start {start}" if start else f"share {share}"
            raise ValueError(f"--curriculum-{given} has no effect beside {how}: leave it out")
        if by_value and not (start or pacing.levels):
            raise ValueError("--curriculum-by value needs --curriculum-start, in the metric's unit")
        start = number(start or (quarter if is_length else 1), "--curriculum-start", int)
        over = number(share or 0.4, "--curriculum-share", high=1)
        end = LARGEST if by_value else 100  # the first stands for what the index will say
        end, multiple = (seq_len, MULTIPLE) if is_length else (end, 1)
        pacing = pacing._replace(start=start, end=end, over=over, multiple=multiple)
        check_pacing(pacing, "--curriculum-")
        metrics.append(
            MetricSettings(name, name.rpartition(":")[2], is_length, by or "percentile", pacing)
        )
    return tuple(metrics)


def one_each(flag: str, text: str | None, names: list[str]) -> list[str | None]:
    """The values of a flag, one a metric, where an empty one means the default.

    One alone serves all metrics, but for a start, which is in the metric's unit.
    """
    values = [part or None for part in text.split(",")] if text else [None]
    if len(values) == 1 and (not text or flag != "start"):
        values = values * len(names)
    if len(values) != len(names):
        raise ValueError(f"--curriculum-{flag} {text} needs a part for each of {', '.join(names)}")
    return values


def parse_pace(text: str, over: float = 1.0, flag: str = "--curriculum-pace") -> Pacing:
    """One pacing as the user writes it.

    Example: parse_pace("discrete:64@0.1:256", 1000) is level 64 until 100 tokens, then 256
    """
    kind, *rest = text.split(":")
    if kind == "root" and len(rest) <= 1:
        return Pacing(kind, degree=number(rest[0] if rest else 2, flag))
    if kind != "discrete" or not rest:
        return Pacing(text)
    levels, _, ends = zip(*(level.partition("@") for level in rest), strict=True)
    if ends[-1] or not all(ends[:-1]):
        raise ValueError(f"{flag} {text}: each level but the last ends @ a share, above 0 to 1")
    until = tuple(number(share, flag, high=1) * over for share in ends[:-1])
    return Pacing(kind, levels=tuple(number(level, flag, int) for level in levels), until=until)


def number(text: str | float, flag: str, kind: type = float, high: int = LARGEST) -> Any:
    """A number above 0; ValueError that names the flag."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= high:
        wanted = "number" if kind is float else "whole number"
        raise ValueError(f"{flag} {text} is not a {wanted} above 0, at most {high:,}")
    return value


def check_pacing(pacing: Pacing, flag: str) -> None:
    """Refuse a pacing that goes nowhere. `flag` is what the user's flags begin with."""
    kind, levels, until, end = pacing.kind, pacing.levels, pacing.until, pacing.end
    if not (kind in ("linear", "root", "discrete") or ".py:" in kind):
        raise ValueError(f"pacing {kind} is unknown: choose one of {PACES}")
    for name in ("end", "over", "degree", "multiple"):
        value = getattr(pacing, name)
        if not 0 < value <= LARGEST:
            raise ValueError(f"pacing with {name} {value}: it has to be above 0, at most 2^53")
    if kind == "discrete" and len(until) != len(levels) - 1:
        given = f"{len(levels)} levels and {len(until)} ends"
        raise ValueError(f"{given}: give one end fewer than levels, as in discrete:64@0.1:256")
    if list(until) != sorted({0, *until})[1:]:
        raise ValueError(f"the ends {until} of the levels have to ascend from 0")
    what = "level" if levels else f"{flag}start"
    for level in levels or (pacing.start,):
        if not 1 <= level <= end:
            raise ValueError(f"{what} {level} must lie in 1..{end}, the end")
        if level % pacing.multiple and level != end:
            above = level + -level % pacing.multiple
            raise ValueError(f"{what} {level} is no multiple of {pacing.multiple}: try {above}")
    if ".py:" in kind and end < LARGEST:  # so that a user's function fails before the run does
        for thousandth in range(1001):
            pacing.at(thousandth / 1000 * pacing.over)


# ---- command


def main(argv: list[str] | None = None) -> None:
    from support.base import numbers, runtime
    from support.report import figures

    parser = runtime.Parser(prog="curriculum.py", description=__doc__.split("\n")[0])
    verb = parser.add_subparsers(required=True).add_parser("pace", help="difficulty over a run")
    verb.add_argument("--kind", default="linear", help=f"root, or {PACES}")
    verb.add_argument("--degree", default="2", help="of --kind root: 2 is the square root")
    verb.add_argument("--start", type=int, default=64)
    verb.add_argument("--end", type=int, default=256)
    verb.add_argument("--over", type=float, default=100, help="t from which on it is --end")
    verb.add_argument("--multiple", type=int, default=1, help="round down to one of these")
    verb.add_argument("--levels", type=numbers.whole_numbers, help="of --kind discrete: 64,128,256")
    verb.add_argument("--until", type=numbers.whole_numbers, help="end of each but the last: 10,25")
    figures.add_curve_flags(verb)
    args = parser.parse_args(argv)
    kind = f"root:{args.degree}" if args.kind == "root" else args.kind
    pacing = parse_pace(kind, args.over, "--kind")
    if args.levels:
        pacing = Pacing("discrete", levels=args.levels, until=args.until or ())
    end, over = max(pacing.levels, default=args.end), max(pacing.until, default=args.over)
    pacing = pacing._replace(start=args.start, end=end, over=over, multiple=args.multiple)
    check_pacing(pacing, "--")
    # The last level is what comes after the last end.
    figures.show_curve(args, pacing.at, "difficulty", over, tenths=11 if pacing.levels else 10)


if __name__ == "__main__":
    from support.base import runtime

    runtime.exit_cleanly(main)
