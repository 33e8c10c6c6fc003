"""Curriculum learning: start with short pieces or easy samples, and raise the difficulty.

A length metric (`seqlen`, `seqlen-reshape`) limits how long a piece of a sample may be. `seqlen`
drops the rest, or with --pack cuts it into further pieces; `seqlen-reshape` puts it into further
rows. A ranked metric (`length`, `rarity`, ...) limits which samples may be drawn: the easiest, in
the order that analyze.py wrote. With several of them, a sample must be easy enough by all. With
--pack --curriculum seqlen,rarity:

    consumed tokens    seqlen    rarity    what is read
    0                  64        1 %       the 1 % with the least rarity, in pieces of 64 tokens
    half of a run      672       100 %     all samples, in pieces of 672

All is a pure function of the tokens consumed so far; this file reads no text and draws no random
numbers. In reading order: configuration, pacing, the samples up to a difficulty, the curriculum,
parsing of the flags. It acts where the code says `settings.curriculum.on` or `self.curriculum`:

    config.py   check                `parse_metrics` refuses bad settings
    plan.py     Plan.__init__        opens the indexes, and makes the `Curriculum`
                Plan.limits_at       calls `at`, before a step or where a window of rows begins
                Plan.unpacked        reads `reshapes`: whether the rest of a row makes further rows
                Plan.columns         logs the number of samples that may be drawn

Papers: Li et al., arXiv 2212.03597; arXiv 2108.06084 (sequence length warmup).
"""

import math
import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from support.clock import MULTIPLE, pace
from support.numbers import number_of
from support.settings import flag

LENGTHS = ("seqlen", "seqlen-reshape")  # metrics that limit lengths and rank no samples
SCAN = 1 << 18  # most samples that are examined at a time


@dataclass(frozen=True)
class CurriculumConfig:
    """Raw flag values, parsed by `parse_metrics`; commas separate metrics, and their values."""

    metric: str = flag(
        "--curriculum", "none", "easy first, by seqlen[-reshape], rarity[-mean], length[-rarity]"
    )
    start: str | None = flag(
        "--curriculum-start", None, "first level (default: 1 %; seqlen a quarter row, packed 64)"
    )
    share: str | None = flag(
        "--curriculum-share", None, "share of a run it grows for (default: 0.4; packed seqlen 0.9)"
    )
    pace: str | None = flag(
        "--curriculum-pace", None, "linear, root:2, discrete:64@0.5:256 (default: by metric)"
    )
    by: str | None = flag("--curriculum-by", None, "percentile or value (default: percentile)")

    @property
    def on(self) -> bool:
        return self.metric != "none"

    @property
    def metrics(self) -> list[str]:
        return self.metric.split(",")


# ---- pacing: difficulty as a pure function of progress


class Pacing(NamedTuple):
    """How the difficulty of one metric changes: along a root of t, or by levels, which may fall.

    The root is start + (t / over)^(1 / degree) (end - start), rounded down to a `multiple`.

    Example: with levels (64, 128, 256) and until (10, 25), the difficulty is 64 at t = 10, 128 at
             11 and 256 at 26
    """

    start: int = 1
    end: float = 100  # inf: the value of the hardest sample, which `Curriculum` looks up
    over: float = 1.0  # t at which `end` is reached
    degree: float = 1.0  # of the root; 1 is linear
    multiple: int = 1
    levels: tuple[int, ...] = ()  # if any, start, end, over and degree have no effect
    until: tuple[float, ...] = ()  # the last t of each level except the last
    by: str = "percentile"  # percentile | value: unit of a ranked metric's difficulty

    def at(self, t: float) -> int:
        if self.levels:
            return self.levels[bisect_left(self.until, t)]
        return pace(t, self.over, self.start, self.end, self.degree, self.multiple)


# ---- the samples up to a difficulty


@dataclass(frozen=True, eq=False)
class Ranking:
    """All samples, sorted by one metric."""

    values: np.ndarray  # (N,) by sample id
    order: np.ndarray  # (N,) sample ids, lowest value first, ties by id

    def __len__(self) -> int:
        return len(self.order)

    def at_percent(self, percent: int) -> int:
        """Count the samples in the first `percent` %, rounded up, so that 1 % is at least one."""
        return -(-len(self) * percent // 100)

    def at_value(self, value: float) -> int:
        """Count the samples with at most this value; equal samples are all in or all out."""
        return bisect_right(self.order, value, key=lambda sample: self.values[sample])

    def highest(self, count: int) -> float:
        """Return the highest value among the first `count` samples."""
        return self.values[self.order[count - 1]].item()

    def holds(self, ids: np.ndarray, count: int) -> np.ndarray:
        """Tell which samples are among the first `count`, (n,) bool."""
        last = self.order[count - 1]
        values, bound = self.values[ids], self.values[last]
        return (values < bound) | ((values == bound) & (ids <= last))


@dataclass(frozen=True)
class Pool:
    """The samples that are among the first counts[i] of rankings[i], for every i.

    They are drawn by their positions in the first ranking, which limits most.
    """

    rankings: tuple[Ranking, ...]
    counts: tuple[int, ...]  # ascending

    @property
    def reach(self) -> int:
        """How many positions can be drawn; with several rankings not all are in the pool."""
        return self.counts[0]

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions, (n,) int64; -1 for one outside the pool."""
        ids = self.rankings[0].order[positions].astype(np.int64)
        for ranking, count in zip(self.rankings[1:], self.counts[1:], strict=True):
            ids[~ranking.holds(ids, count)] = -1
        return ids

    @cached_property
    def size(self) -> int:
        """How many samples are in the pool; estimated from SCAN of them if there are many."""
        if len(self.rankings) == 1:
            return self.reach
        positions = np.linspace(0, self.reach - 1, min(self.reach, SCAN)).astype(np.int64)
        return round((self.ids(positions) >= 0).mean() * self.reach)

    @property
    def is_empty(self) -> bool:
        firsts = range(0, self.reach, SCAN)
        blocks = (np.arange(first, min(first + SCAN, self.reach)) for first in firsts)
        return all((self.ids(positions) < 0).all() for positions in blocks)


@lru_cache(maxsize=4)  # several calls for each step ask for the same pool
def intersection(rankings: tuple[Ranking, ...], counts: tuple[int, ...]) -> tuple[Pool | None, int]:
    """Intersect the first counts[i] of rankings[i].

    Returns: the pool, None for every sample; and the smallest k for which the rankings have a
             sample in common when each goes at least to its easiest k %
    """
    for percent in range(101):
        wide = {r: max(n, r.at_percent(percent)) for r, n in zip(rankings, counts, strict=True)}
        limiting = sorted((r for r in rankings if wide[r] < len(r)), key=wide.get)
        if not limiting:
            return None, percent
        pool = Pool(tuple(limiting), tuple(wide[r] for r in limiting))
        if not pool.is_empty:
            return pool, percent
    raise AssertionError("the first 100 % are all samples")


# ---- the curriculum: all metrics together


class Limits(NamedTuple):
    """What a curriculum allows at one point of a run."""

    difficulty: dict[str, float]  # of each metric
    # tokens, including special ones; longer samples are truncated or, with --pack, cut into pieces
    max_piece_len: int
    pool: Pool | None  # None: every sample may be drawn
    note: str  # for the user: how an empty pool was widened


class Curriculum:
    """Combines all metrics of a run: a pure function from consumed tokens to Limits.

    Args:   pacings  for each metric, in shares of the budget
            budget   tokens of the run
            rankings {ranked metric: ranking of the samples}
    Raises: ValueError, naming the flag, for a setting that does not suit the values of a ranking
    """

    def __init__(
        self, pacings: dict[str, Pacing], budget: int, seq_len: int, rankings: dict[str, Ranking]
    ):
        self.seq_len, self.rankings = seq_len, rankings
        self.reshapes = "seqlen-reshape" in pacings  # cut rows into parts, do not truncate
        self.pacings: dict[str, Pacing] = {}
        for name, pacing in pacings.items():
            if pacing.end == math.inf:
                hardest = rankings[name].highest(len(rankings[name]))
                if hardest <= 1:
                    raise ValueError(f"--curriculum-by value: {name} never exceeds 1: scale it up")
                pacing = pacing._replace(end=math.ceil(hardest))
            until = tuple(share * budget for share in pacing.until)
            self.pacings[name] = pacing._replace(over=pacing.over * budget, until=until)
            check_pacing(self.pacings[name])

    def at(self, consumed_tokens: float) -> Limits:
        """Find what is allowed now.

        A level below every sample's value is raised to the lowest value. If the rankings then have
        no sample in common, each is widened to the same percentage of its samples.
        """
        difficulty = {name: pacing.at(consumed_tokens) for name, pacing in self.pacings.items()}
        lengths = [difficulty[name] for name in LENGTHS if name in difficulty]
        counts, note = {}, ""
        for name, ranking in self.rankings.items():
            level, lowest = difficulty[name], ranking.highest(1)
            if self.pacings[name].by == "percentile":
                counts[name] = ranking.at_percent(level)
            elif level >= lowest:
                counts[name] = ranking.at_value(level)
            else:
                difficulty[name], counts[name] = lowest, ranking.at_value(lowest)
                note = f"no sample has {name} {level} or less: widened to {lowest:g}"
        pool, percent = intersection(tuple(self.rankings.values()), tuple(counts.values()))
        if percent:
            note = f"no sample is in all of {counts}: widened to the easiest {percent} % of each"
            for name, ranking in self.rankings.items():
                by_value = self.pacings[name].by == "value"
                level = ranking.highest(ranking.at_percent(percent)) if by_value else percent
                difficulty[name] = max(difficulty[name], level)
        return Limits(difficulty, min([self.seq_len, *lengths]), pool, note)


# ---- settings: parse the flags, and refuse bad ones


def parse_metrics(config: CurriculumConfig, seq_len: int, packed: bool) -> dict[str, Pacing]:
    """Parse the flags into a pacing for each metric, with defaults filled in.

    Raises: ValueError, naming the flag, for a setting that cannot work; whether a metric exists and
            suits the samples, analyze.check_metrics checks
    """
    names, parsed = config.metrics, {}
    columns = {s: one_each(s, getattr(config, s), names) for s in ("start", "share", "pace", "by")}
    for i, name in enumerate(names):
        of_metric = {setting: column[i] for setting, column in columns.items()}
        parsed[name] = parse_metric(CurriculumConfig(name, **of_metric), seq_len, packed)
    return parsed


def one_each(setting: str, text: str | None, names: list[str]) -> list[str | None]:
    """Split a flag into one value for each metric; None where it is left empty, for the default.

    A single value applies to every metric, except for --curriculum-start, because units differ.

    Example: for two metrics "0.5" is ["0.5", "0.5"], and ",root:3" is [None, "root:3"]
    """
    values = [value or None for value in (text or "").split(",")]
    if len(values) == 1 and not (text and setting == "start"):
        values = values * len(names)
    if len(values) != len(names):
        raise ValueError(f"--curriculum-{setting} {text}: give one for each of {', '.join(names)}")
    return values


def parse_metric(config: CurriculumConfig, seq_len: int, packed: bool) -> Pacing:
    """Parse the pacing of one metric.

    The defaults are the papers' pacings, but where a step has as many tokens however short its
    pieces are (--pack, "seqlen-reshape"), lengths start lower and grow later (docs/curriculum.md).

    Example: "seqlen" in packed rows of 2,048 is at 64, 672, 2,048 after 0, 0.5, 0.9 of a run
    """
    is_length, by = config.metric in LENGTHS, config.by or "percentile"
    quarter = max(seq_len // 4 // MULTIPLE, 1) * MULTIPLE
    if not is_length:
        usual = CurriculumConfig(start="1", share="0.4", pace="root:2")
    elif packed or config.metric == "seqlen-reshape":
        usual = CurriculumConfig(start=str(min(quarter, 64)), share="0.9", pace="root:0.5")
    else:
        usual = CurriculumConfig(start=str(quarter), share="0.4", pace="linear")
    pacing = parse_pace(config.pace or usual.pace)
    if by not in ("percentile", "value"):
        raise ValueError(f"--curriculum-by {by} is unknown: choose percentile or value")
    if by == "value" and not (is_length or config.start or pacing.levels):
        raise ValueError("--curriculum-by value needs --curriculum-start, in the metric's unit")
    if pacing.levels and (config.start or config.share):
        raise ValueError(f"--curriculum-start and --curriculum-share do not apply to {config.pace}")
    pacing = pacing._replace(
        start=number(config.start or usual.start, "--curriculum-start", int),
        over=number(config.share or usual.share, "--curriculum-share", high=1),
        by=by,
    )
    if is_length:
        pacing = pacing._replace(end=seq_len, multiple=MULTIPLE)
    elif by == "value":
        pacing = pacing._replace(end=math.inf)
    check_pacing(pacing)
    return pacing


def parse_pace(text: str) -> Pacing:
    """Parse a pacing: discrete:64@0.1:256 has the level 64 until 0.1 of the run, then 256."""
    kind, _, details = text.partition(":")
    if text == "linear":
        return Pacing()
    if kind == "root":
        return Pacing(degree=number(details or 2, "--curriculum-pace root:"))
    if not re.fullmatch("discrete:([^@:]+@[^@:]+:)*[^@:]+", text):
        known = "linear, root:DEGREE or discrete:LEVEL@SHARE:...:LEVEL"
        raise ValueError(f"--curriculum-pace {text} is unknown: choose {known}")
    levels = [level.partition("@") for level in details.split(":")]
    return Pacing(
        levels=tuple(number(level, "--curriculum-pace", int) for level, _, _ in levels),
        until=tuple(number(share, "--curriculum-pace", high=1) for _, _, share in levels[:-1]),
    )


def number(text: str | float, written: str, kind: type = float, high: int = 2**53) -> float:
    """Parse a number above 0, at most `high`: a float64 holds every integer up to 2^53."""
    value = number_of(str(text))
    if not 0 < value <= high or kind(value) != value:
        wanted = "number" if kind is float else "whole number"
        raise ValueError(f"{written} {text} must be a {wanted} above 0, at most {high:,}")
    return kind(value)


def check_pacing(pacing: Pacing) -> None:
    """Refuse a pacing that cannot work; ValueError names the flag."""
    if any(after <= before for before, after in pairwise((0, *pacing.until))):
        raise ValueError(f"--curriculum-pace: the ends {pacing.until} of its levels must increase")
    subject = "--curriculum-pace: level" if pacing.levels else "--curriculum-start"
    for level in pacing.levels or (pacing.start,):
        if not 1 <= level <= pacing.end:
            raise ValueError(f"{subject} {level} must be from 1 to {pacing.end}, the highest")
        if level % pacing.multiple and level != pacing.end:
            raise ValueError(f"{subject} {level} is not a multiple of {pacing.multiple}")
