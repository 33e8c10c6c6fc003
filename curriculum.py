"""Curriculum learning: start with short pieces or easy samples, and raise the difficulty.

A length metric (`seqlen`, `seqlen-reshape`) limits how long a piece of a sample may be. `seqlen`
drops the rest, or with --pack cuts it into further pieces; `seqlen-reshape` puts it into further
rows. A ranked metric (`length`, `rarity`, ...) limits which samples may be drawn: the easiest ones,
in the order that analyze.py wrote. Each metric has its own pacing. With several ranked metrics, a
sample must be easy enough by all of them.

Everything here is a pure function of the tokens consumed so far: this file reads no text and draws
no random numbers. analyze.py measures samples and sorts them. In reading order: configuration,
pacing, the samples up to a difficulty, the curriculum, parsing of the flags. It acts in the lines
with `settings.curriculum.on`, and where plan.py uses the `Curriculum` made in one of them:

    config.py   check                `parse_metrics` refuses bad settings
    plan.py     Plan.__init__        opens the indexes, and makes the `Curriculum`
                Plan.stage_at        calls `at`, before a step or where a window of rows begins
                Plan.unpacked_rows   reads `reshapes`: whether the rest of a row makes further rows
                Plan.full_step       does the same, for the steps ahead
                Plan.costed          logs the difficulty, and the number of samples it allows

Papers: Li et al., arXiv 2212.03597; arXiv 2108.06084 (sequence length warmup).

    python train.py --pack --curriculum seqlen
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from support.clock import MULTIPLE, pace
from support.settings import flag, number_of

LENGTHS = ("seqlen", "seqlen-reshape")  # metrics that limit lengths and rank no samples
SCAN = 1 << 18  # most samples that are examined at a time


@dataclass(frozen=True)
class CurriculumConfig:
    """Raw flag values, parsed by `parse_metrics`; commas separate metrics, and their values."""

    metric: str = flag(
        "none", "easy first, by seqlen, seqlen-reshape, length, rarity, rarity-mean, length-rarity"
    )
    start: str | None = flag(
        None, "initial difficulty (default: 1 %; seqlen: 64 tokens if packed, else a quarter row)"
    )
    share: str | None = flag(None, "share of a run it grows for (default: 0.4; packed seqlen 0.9)")
    pace: str | None = flag(
        None,
        "linear, root:2, discrete:64@0.5:256 (default: root:2; seqlen linear, packed root:0.5)",
    )
    by: str | None = flag(None, "unit of ranked metrics: percentile or value (default: percentile)")
    index: str | None = flag(None, "folder written by analyze.py (default: the store's)", free=True)

    @property
    def on(self) -> bool:
        return self.metric != "none"

    @property
    def metrics(self) -> list[str]:
        return self.metric.split(",")


# ---- pacing: difficulty as a pure function of progress


def by_root(pacing: "Pacing", t: float) -> int:
    """Go from start to end along a root of t, or linearly at degree 1."""
    return pace(t, pacing.over, pacing.start, pacing.end, pacing.degree, pacing.multiple)


def by_levels(pacing: "Pacing", t: float) -> int:
    return pacing.levels[bisect_left(pacing.until, t)]


PACES = {  # (pacing, t) -> difficulty; to add a pacing, add a line here (docs/extending.md)
    "linear": by_root,
    "root": by_root,
    "discrete": by_levels,
}


class Pacing(NamedTuple):
    """How the difficulty of one metric changes from start to end.

    Deviates: discrete levels may fall, and the last one need not be the highest. DeepSpeed
              (data_pipeline/curriculum_scheduler.py, update_difficulty) stops at its maximum, so it
              ignores a lower level after that
    Example:  with levels (64, 128, 256) and until (10, 25), the difficulty is 64 at t = 10, 128 at
              11 and 256 at 26
    """

    kind: str  # a key of PACES
    start: int = 1
    end: float = 100  # inf: the value of the hardest sample, which `Curriculum` looks up
    over: float = 1.0  # t at which `end` is reached
    degree: float = 1.0  # of the root
    multiple: int = 1
    levels: tuple[int, ...] = ()  # for discrete, which ignores start, end and over
    until: tuple[float, ...] = ()  # for discrete: the last t of each level except the last
    by: str = "percentile"  # percentile | value: unit of a ranked metric's difficulty

    def at(self, t: float) -> int:
        return PACES[self.kind](self, t)


# ---- the samples up to a difficulty


@dataclass(frozen=True, eq=False)
class Ranking:
    """All samples, sorted by one metric."""

    values: np.ndarray  # (N,) by sample id
    order: np.ndarray  # (N,) sample ids, lowest value first, ties by id

    def __len__(self) -> int:
        return len(self.order)

    def at_percent(self, percent: int) -> int:
        """Count the samples in the first `percent` %, rounded up, so that 1 % is at least one.

        Deviates: DeepSpeed (data_sampling/data_sampler.py) takes N // 100 samples for each percent,
                  which is none if there are fewer than a hundred
        """
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


class Head(NamedTuple):
    """The first `count` samples of a ranking."""

    count: int
    ranking: Ranking


@dataclass(frozen=True)
class Pool:
    """The samples that are in all of these heads."""

    filters: tuple[Head, ...]  # the shortest first

    @property
    def reach(self) -> int:
        """How many ranks can be drawn; with a single filter, each of them is in the pool."""
        return self.filters[0].count

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """Return the samples at these ranks, (n,) int64; -1 for one that another filter rejects."""
        shortest, *others = self.filters
        ids = shortest.ranking.order[ranks].astype(np.int64)
        for count, ranking in others:
            ids[~ranking.holds(ids, count)] = -1
        return ids

    @cached_property
    def size(self) -> int:
        """How many samples are in the pool; estimated from SCAN of them if there are many."""
        if len(self.filters) == 1:
            return self.reach
        ranks = np.linspace(0, self.reach - 1, min(self.reach, SCAN)).astype(np.int64)
        return round((self.ids(ranks) >= 0).mean() * self.reach)

    @property
    def is_empty(self) -> bool:
        starts = range(0, self.reach, SCAN)
        blocks = (np.arange(first, min(first + SCAN, self.reach)) for first in starts)
        return not any((self.ids(ranks) >= 0).any() for ranks in blocks)


@lru_cache(maxsize=4)  # a curriculum often asks for its last pools again
def intersection(heads: tuple[Head, ...]) -> tuple[Pool | None, int]:
    """Intersect the heads; if they have no sample in common, widen them until they have one.

    Returns: the pool, None for every sample; and k, the smallest percentage for which the heads
             have a sample in common when each is at least the first k % of its ranking
    """
    for percent in range(101):
        grown = [Head(max(n, ranking.at_percent(percent)), ranking) for n, ranking in heads]
        filters = [head for head in grown if head.count < len(head.ranking)]
        pool = Pool(tuple(sorted(filters, key=lambda head: head.count))) if filters else None
        if pool is None or not pool.is_empty:
            return pool, percent
    raise AssertionError("the first 100 % are all samples")


class Eligible(NamedTuple):
    """The samples up to a level in each ranking."""

    pool: Pool | None  # None: every sample
    reached: dict[str, float]  # {name: level} for the rankings that had to be widened
    note: str  # for the user: what was widened


class Rankings(dict[str, Ranking]):
    """Several rankings of the same samples, by name."""

    def eligible(self, levels: dict[str, float], units: dict[str, str]) -> Eligible:
        """Find the samples up to a level in each ranking.

        A level below every sample's value is raised to the lowest value. If the rankings then have
        no sample in common, each is widened to its easiest k %, for the smallest k at which they
        have one.

        Args: units {name of a ranking: percentile | value}; other names in `levels` are ignored
        """
        counts: dict[str, int] = {}
        reached, note = {}, ""
        for name, unit in units.items():
            ranking, level = self[name], levels[name]
            if unit == "value" and level < ranking.highest(1):
                level = reached[name] = ranking.highest(1)
                note = f"no sample has {name} {levels[name]} or less: widened to {level:g}"
            by_unit = ranking.at_value if unit == "value" else ranking.at_percent
            counts[name] = by_unit(level)
        pool, percent = intersection(tuple(Head(n, self[name]) for name, n in counts.items()))
        if percent:
            note = f"no sample is in all of {counts}: widened to the easiest {percent} % of each"
            for name, unit in units.items():
                ranking, grown = self[name], percent
                if unit == "value":
                    grown = ranking.highest(ranking.at_percent(percent))
                reached[name] = max(reached.get(name, levels[name]), grown)
        return Eligible(pool, reached, note)


# ---- the curriculum: all metrics together


class Stage(NamedTuple):
    """What a curriculum allows at one point of a run."""

    difficulty: dict[str, float]  # of each metric
    # tokens, including special ones; longer samples are truncated or, with --pack, cut into pieces
    max_piece_len: int
    pool: Pool | None  # None: every sample may be drawn
    note: str  # for the user: how an empty pool was widened


class Curriculum:
    """Combines all metrics of a run: a pure function from consumed tokens to a Stage.

    Args:   pacings for each metric, in shares of the budget
            budget  tokens of the run
            indexes for each ranked metric, the ranking of the samples
    Raises: ValueError, naming the flag, for a setting that does not suit the values of an index
    """

    def __init__(self, pacings: dict[str, Pacing], budget: int, seq_len: int, indexes: Rankings):
        self.seq_len, self.indexes = seq_len, indexes
        self.lengths = [name for name in pacings if name in LENGTHS]
        self.reshapes = "seqlen-reshape" in self.lengths  # cut rows into parts, do not truncate
        self.units = {name: pacings[name].by for name in pacings if name not in LENGTHS}
        self.pacings: dict[str, Pacing] = {}
        for name, pacing in pacings.items():
            if pacing.end == math.inf:
                hardest = indexes[name].highest(len(indexes[name]))
                if hardest <= 1:
                    ends = f"{name} ends at {hardest:g}: scale it up"
                    raise ValueError(f"--curriculum-by value goes up from 1, but {ends}")
                pacing = pacing._replace(end=math.ceil(hardest))
            until = tuple(share * budget for share in pacing.until)
            self.pacings[name] = pacing._replace(over=pacing.over * budget, until=until)
            check_pacing(self.pacings[name])

    def at(self, consumed_tokens: float) -> Stage:
        difficulty = {name: pacing.at(consumed_tokens) for name, pacing in self.pacings.items()}
        easy = self.indexes.eligible(difficulty, self.units)
        return Stage(
            difficulty=difficulty | easy.reached,
            max_piece_len=min([self.seq_len, *(difficulty[name] for name in self.lengths)]),
            pool=easy.pool,
            note=easy.note,
        )


# ---- settings: parse the flags, and refuse bad ones


def parse_metrics(
    config: CurriculumConfig, seq_len: int, packed: bool = False
) -> dict[str, Pacing]:
    """Parse the flags into a pacing for each metric, with defaults filled in.

    Raises: ValueError, naming the flag, for a setting that cannot work. analyze.check_metrics
            checks that a metric exists and suits the samples
    """
    names = config.metrics
    columns = [one_each(s, getattr(config, s), names) for s in ("start", "share", "pace", "by")]
    settings = (CurriculumConfig(*values) for values in zip(names, *columns, strict=True))
    return {setting.metric: parse_metric(setting, seq_len, packed) for setting in settings}


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

    The defaults are the papers' pacings, over 0.4 of the budget: ranked metrics grow with the
    square root of consumed tokens from the easiest 1 % to 100 %, "seqlen" linearly from a quarter
    of a row. With --pack or "seqlen-reshape" a step has the same number of tokens however short its
    pieces are, so lengths start at 64 and grow with the square of consumed tokens over 0.9 of the
    budget (docs/curriculum.md).

    Example: "seqlen" in packed rows of 2,048 is at 64, 672, 2,048 after 0, 0.5, 0.9 of a run
    """
    is_length, by = config.metric in LENGTHS, config.by or "percentile"
    if by not in ("percentile", "value"):
        raise ValueError(f"--curriculum-by {by} is unknown: choose percentile or value")
    is_full = is_length and (packed or config.metric == "seqlen-reshape")
    usual = "root:0.5" if is_full else "linear" if is_length else "root:2"
    pacing = parse_pace(config.pace or usual)
    if is_length:
        quarter = max(seq_len // 4 // MULTIPLE, 1) * MULTIPLE
        start = min(quarter, 64) if is_full else quarter
        pacing = pacing._replace(start=start, end=seq_len, multiple=MULTIPLE)
    elif by == "value":
        pacing = pacing._replace(end=math.inf)
        if not (config.start or pacing.levels):
            raise ValueError("--curriculum-by value needs --curriculum-start, in the metric's unit")
    if pacing.levels and (config.start or config.share):
        given = f"start {config.start}" if config.start else f"share {config.share}"
        raise ValueError(f"--curriculum-{given} has no effect with {config.pace}: leave it out")
    start = number(config.start or pacing.start, "--curriculum-start", int)
    over = number(config.share or (0.9 if is_full else 0.4), "--curriculum-share", high=1)
    pacing = pacing._replace(start=start, over=over, by=by)
    check_pacing(pacing)
    return pacing


def parse_pace(text: str) -> Pacing:
    """Parse a pacing, in shares of a run.

    Example: discrete:64@0.1:256 has the level 64 until 0.1 of the run, then 256
    """
    flag = "--curriculum-pace"
    kind, _, details = text.partition(":")
    if kind == "root":
        return Pacing(kind, degree=number(details or 2, flag))
    if text in PACES and kind != "discrete":
        return Pacing(text)
    if kind != "discrete":
        known = "linear, root:DEGREE or discrete:LEVEL@SHARE:...:LEVEL"
        raise ValueError(f"{flag} {text} is unknown: choose {known}")
    levels, ends = zip(*(level.partition("@")[::2] for level in details.split(":")), strict=True)
    if not all((*levels, *ends[:-1])) or ends[-1]:
        raise ValueError(f"{flag} {text}: write LEVEL@SHARE for all levels but the last")
    return Pacing(
        kind,
        levels=tuple(number(level, flag, int) for level in levels),
        until=tuple(number(share, flag, high=1) for share in ends[:-1]),
    )


def number(text: str | float, flag: str, kind: type = float, high: int = 2**53) -> float:
    """Parse a number above 0, or raise a ValueError naming the flag.

    The limit is 2^53 because a float64 holds every integer up to there.
    """
    value = number_of(str(text))
    if not 0 < value <= high or kind(value) != value:
        wanted = "number" if kind is float else "whole number"
        raise ValueError(f"{flag} {text} must be a {wanted} above 0, at most {high:,}")
    return kind(value)


def check_pacing(pacing: Pacing) -> None:
    """Refuse a pacing that cannot work."""
    if any(after <= before for before, after in pairwise((0, *pacing.until))):
        raise ValueError(f"the ends {pacing.until} of the levels must increase, from above 0")
    subject = "level" if pacing.levels else "--curriculum-start"
    for level in pacing.levels or (pacing.start,):
        if not 1 <= level <= pacing.end:
            raise ValueError(f"{subject} {level} must be from 1 to {pacing.end}, the highest")
        if level % pacing.multiple and level != pacing.end:
            fit = level + -level % pacing.multiple
            raise ValueError(f"{subject} {level} is not a multiple of {pacing.multiple}: try {fit}")
