"""Curriculum learning: which samples a run may draw, and how long pieces of them, as it goes on.

A length metric (`seqlen`, `seqlen-reshape`) decides how long a piece of a sample may be: the rest
is cut off, or with --pack makes further pieces. A ranked metric (`length`, `rarity`, ...) decides
which samples may be drawn: the easiest ones, in the order that analyze.py wrote. Each metric has a
pacing of its own. With several ranked metrics a sample has to be easy enough by each of them.

Everything here is a pure function of the tokens consumed so far: this file reads no text and draws
no random numbers. analyze.py measures samples and sorts them. In reading order: configuration,
pacing, the samples up to a difficulty, the curriculum, what the flags mean. It acts where
`settings.curriculum.on` stands, and where plan.py asks for the `Curriculum` made there:

    config.py   check                `parse_metrics`: what is refused
    plan.py     Plan.__init__        opens the indexes, and makes the `Curriculum`
                Plan.stage_at        `at`, before a step or where a window of rows begins
                Plan.unpacked_rows   `reshapes`: whether what is cut off makes rows of its own
                Plan.full_step       the same, for the steps ahead
                Plan.costed          the log has the difficulty, and how many samples it allows

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

LENGTHS = ("seqlen", "seqlen-reshape")  # metrics that rank nothing
SCAN = 1 << 18  # samples looked at together


@dataclass(frozen=True)
class CurriculumConfig:
    """The flags as given; `parse_metrics` reads them. Several metrics: values between commas."""

    metric: str = flag(
        "none", "easy first, by seqlen, seqlen-reshape, length, rarity, rarity-mean, length-rarity"
    )
    start: str | None = flag(
        None, "first difficulty (default: 1 %; seqlen: 64 tokens if packed, else a quarter row)"
    )
    share: str | None = flag(None, "share of a run it lasts (default: 0.4; packed seqlen 0.9)")
    pace: str | None = flag(
        None,
        "linear, root:2, discrete:64@0.5:256 (default: root:2; seqlen linear, packed root:0.5)",
    )
    by: str | None = flag(None, "unit of other metrics: percentile or value (default: percentile)")
    index: str | None = flag(None, "folder written by analyze.py (default: the store's)", free=True)

    @property
    def on(self) -> bool:
        return self.metric != "none"

    @property
    def metrics(self) -> list[str]:
        return self.metric.split(",")


# ---- pacing: difficulty as a pure function of progress


def by_root(pacing: "Pacing", t: float) -> int:
    """From start to end as a root of t, of degree 1 where it is linear."""
    return pace(t, pacing.over, pacing.start, pacing.end, pacing.degree, pacing.multiple)


def by_levels(pacing: "Pacing", t: float) -> int:
    return pacing.levels[bisect_left(pacing.until, t)]


PACES = {  # (pacing, t) -> difficulty; one of your own is a line here (docs/extending.md)
    "linear": by_root,
    "root": by_root,
    "discrete": by_levels,
}


class Pacing(NamedTuple):
    """How the difficulty of one metric goes from start to end.

    Deviates: discrete levels may fall again, and the last one need not be the highest. DeepSpeed
              (data_pipeline/curriculum_scheduler.py, update_difficulty) stops at its maximum, so a
              lower level after it is never used
    Example:  the levels (64, 128, 256) until (10, 25) are 64 at t = 10, 128 at 11, 256 at 26
    """

    kind: str  # of PACES
    start: int = 1
    end: float = 100  # inf: the value of the hardest sample, which `Curriculum` looks up
    over: float = 1.0  # t at which the end is reached
    degree: float = 1.0  # of a root
    multiple: int = 1
    levels: tuple[int, ...] = ()  # of discrete, which ignores start, end and over
    until: tuple[float, ...] = ()  # the last t of each level but the last
    by: str = "percentile"  # percentile | value: the unit of a ranked metric's difficulty

    def at(self, t: float) -> int:
        return PACES[self.kind](self, t)


# ---- the samples up to a difficulty


@dataclass(frozen=True, eq=False)
class Ranking:
    """values (N,) by sample id; order (N,) sample ids by value, ties by id."""

    values: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def at_percent(self, percent: int) -> int:
        """How many samples the first percent are, rounded up: never 0, all at 100.

        Deviates: DeepSpeed (data_sampling/data_sampler.py) takes N // 100 samples for a percent,
                  which is none below a hundred
        """
        return -(-len(self) * percent // 100)

    def at_value(self, value: float) -> int:
        """How many samples have at most this value: ties are in or out together."""
        return bisect_right(self.order, value, key=lambda sample: self.values[sample])

    def highest(self, count: int) -> float:
        """The highest value among the first `count`."""
        return self.values[self.order[count - 1]].item()

    def holds(self, ids: np.ndarray, count: int) -> np.ndarray:
        """(n,) bool: which samples are among the first `count`."""
        last = self.order[count - 1]
        values, bound = self.values[ids], self.values[last]
        return (values < bound) | ((values == bound) & (ids <= last))


class Head(NamedTuple):
    """The first `count` samples of a ranking."""

    count: int
    ranking: Ranking


@dataclass(frozen=True)
class Pool:
    """The samples that all of these heads have in common."""

    filters: tuple[Head, ...]  # the shortest first

    @property
    def reach(self) -> int:
        """How many ranks there are to draw from; with one filter each of them is a sample."""
        return self.filters[0].count

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """The samples at these ranks, (n,) int64; -1 for one that another filter leaves out."""
        shortest, *others = self.filters
        ids = shortest.ranking.order[ranks].astype(np.int64)
        for count, ranking in others:
            ids[~ranking.holds(ids, count)] = -1
        return ids

    @cached_property
    def size(self) -> int:
        """How many samples; an estimate where several filters reach further than a scan."""
        if len(self.filters) == 1:
            return self.reach
        ranks = np.linspace(0, self.reach - 1, min(self.reach, SCAN)).astype(np.int64)
        return round((self.ids(ranks) >= 0).mean() * self.reach)

    @property
    def is_empty(self) -> bool:
        starts = range(0, self.reach, SCAN)
        blocks = (np.arange(first, min(first + SCAN, self.reach)) for first in starts)
        return not any((self.ids(ranks) >= 0).any() for ranks in blocks)


@lru_cache(maxsize=4)  # a curriculum asks for its last pools again and again
def intersection(heads: tuple[Head, ...]) -> tuple[Pool | None, int]:
    """The pool that all heads share; if they share no sample, they grow until they do.

    Returns: the pool, None for every sample; and k: every head has grown to at least the first k %
             of its ranking, for the smallest k at which they share a sample
    """
    for percent in range(101):
        grown = [Head(max(n, ranking.at_percent(percent)), ranking) for n, ranking in heads]
        filters = [head for head in grown if head.count < len(head.ranking)]
        pool = Pool(tuple(sorted(filters, key=lambda head: head.count))) if filters else None
        if pool is None or not pool.is_empty:
            return pool, percent
    raise AssertionError("the first 100 % are all samples")


class Eligible(NamedTuple):
    """The samples up to a level of each ranking."""

    pool: Pool | None  # None: every sample
    reached: dict[str, float]  # {name: level} of the rankings that had to be widened
    note: str  # what was widened, for the user


class Rankings(dict[str, Ranking]):
    """Several rankings of the same samples, by name."""

    def eligible(self, levels: dict[str, float], units: dict[str, str]) -> Eligible:
        """The samples up to a level of each ranking.

        A level that no sample is low enough for rises to the easiest sample's value. If the
        rankings then share no sample, each widens to its easiest k %, for the smallest k at which
        they do.

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
    # tokens, with special ones: what is longer is cut off there or, with --pack, cut into pieces
    max_piece_len: int
    pool: Pool | None  # None: every sample may be drawn
    note: str  # for the user: how an empty pool was widened


class Curriculum:
    """All metrics of a run together: a pure function from consumed tokens to a Stage.

    Args:   pacings of each metric, over the share of the budget that is consumed
            budget  tokens of the run
            indexes the ranking of the samples by each ranked metric
    Raises: ValueError naming the flag of a setting that an index does not allow
    """

    def __init__(self, pacings: dict[str, Pacing], budget: int, seq_len: int, indexes: Rankings):
        self.seq_len, self.indexes = seq_len, indexes
        self.lengths = [name for name in pacings if name in LENGTHS]
        self.reshapes = "seqlen-reshape" in self.lengths  # rows are cut, not truncated
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


# ---- settings: what the flags mean, and what is refused


def parse_metrics(
    config: CurriculumConfig, seq_len: int, packed: bool = False
) -> dict[str, Pacing]:
    """The pacing of each metric that the flags ask for, defaults filled in.

    Raises: ValueError naming the flag of a setting that cannot work; analyze.check_metrics says
            whether a metric exists and suits the samples
    """
    names = config.metrics
    columns = [one_each(s, getattr(config, s), names) for s in ("start", "share", "pace", "by")]
    settings = (CurriculumConfig(*values) for values in zip(names, *columns, strict=True))
    return {setting.metric: parse_metric(setting, seq_len, packed) for setting in settings}


def one_each(setting: str, text: str | None, names: list[str]) -> list[str | None]:
    """The value of a flag for each metric; None where the default is meant.

    A single value serves every metric, except a start, which is in the metric's own unit.

    Example: for two metrics "0.5" is ["0.5", "0.5"], and ",root:3" is [None, "root:3"]
    """
    values = [value or None for value in (text or "").split(",")]
    if len(values) == 1 and not (text and setting == "start"):
        values = values * len(names)
    if len(values) != len(names):
        raise ValueError(f"--curriculum-{setting} {text}: give one for each of {', '.join(names)}")
    return values


def parse_metric(config: CurriculumConfig, seq_len: int, packed: bool) -> Pacing:
    """One metric from its own flags.

    The defaults are the papers' pacings, over 0.4 of the budget: "rarity" goes as a square root
    from the easiest 1 % to 100 %, "seqlen" linearly from a quarter of a row. Where a step keeps its
    tokens however short its pieces are, in packed rows and with "seqlen-reshape", lengths begin at
    64 and grow with the square of the clock over 0.9 of the budget (docs/curriculum.md).

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
        raise ValueError(f"--curriculum-{given} has no effect beside {config.pace}: leave it out")
    start = number(config.start or pacing.start, "--curriculum-start", int)
    over = number(config.share or (0.9 if is_full else 0.4), "--curriculum-share", high=1)
    pacing = pacing._replace(start=start, over=over, by=by)
    check_pacing(pacing)
    return pacing


def parse_pace(text: str) -> Pacing:
    """One pacing as the user writes it, over a run of length 1.

    Example: discrete:64@0.1:256 has the levels 64 and 256, and the first until 0.1
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
        raise ValueError(f"{flag} {text}: each level but the last ends @ a share of the run")
    return Pacing(
        kind,
        levels=tuple(number(level, flag, int) for level in levels),
        until=tuple(number(share, flag, high=1) for share in ends[:-1]),
    )


def number(text: str | float, flag: str, kind: type = float, high: int = 2**53) -> float:
    """A number above 0; ValueError that names the flag. Up to 2^53 a float64 has no gaps."""
    value = number_of(str(text))
    if not 0 < value <= high or kind(value) != value:
        wanted = "number" if kind is float else "whole number"
        raise ValueError(f"{flag} {text} is not a {wanted} above 0, at most {high:,}")
    return kind(value)


def check_pacing(pacing: Pacing) -> None:
    """Refuse a pacing that cannot work."""
    if any(after <= before for before, after in pairwise((0, *pacing.until))):
        raise ValueError(f"the ends {pacing.until} of the levels have to ascend from 0")
    subject = "level" if pacing.levels else "--curriculum-start"
    for level in pacing.levels or (pacing.start,):
        if not 1 <= level <= pacing.end:
            raise ValueError(f"{subject} {level} must lie in 1..{pacing.end}, the end")
        if level % pacing.multiple and level != pacing.end:
            above = level + -level % pacing.multiple
            raise ValueError(f"{subject} {level} is no multiple of {pacing.multiple}: try {above}")
