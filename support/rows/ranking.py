"""Samples sorted by a value, easiest first: how such a ranking is made, stored and asked.

    sorted runs   a shard's (value, id) records, sorted; as many files as there are shards
    merged        all ids by value, a chunk at a time: values.bin and order.bin
    Ranking       those two arrays, of which little is read
    Pool          the first so many samples of one ranking, or of several at once

Does not know what the values measure (difficulty.py), nor how shards are shared
out (analyze.py). Nothing here holds all samples in memory.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

LENGTHS = ("seqlen", "seqlen-reshape")  # metrics of a curriculum that rank nothing
CHUNK = 1 << 22  # records merged at once
SCAN = 1 << 18  # samples looked at at once

# ---- sorted runs
#
# A run has all samples of one shard; the ids of a run come before those of the next.


def sorted_run(values: np.ndarray, first_id: int, id_dtype: np.dtype) -> np.ndarray:
    """Records (value, id) of samples first_id, first_id + 1, ..., sorted by value, then by id."""
    order = np.argsort(values, kind="stable")
    run = np.empty(len(values), [("value", values.dtype), ("id", id_dtype)])
    run["value"], run["id"] = values[order], order + first_id
    return run


def merged(files: list[Path], chunk: int = CHUNK) -> Iterator[np.ndarray]:
    """The ids of all runs by value, ties by id, `chunk` of them at a time.

    Every run is cut at the same exact rank. What lies between two cuts belongs together, so only
    one chunk is in memory, however long the runs are.
    """
    n = sum(len(np.load(file, mmap_mode="r")) for file in files)
    before = [0] * len(files)
    for rank in range(chunk, n + chunk, chunk):
        # mapped again for each chunk, which gives the pages of the last one back
        runs = [np.load(file, mmap_mode="r") for file in files]
        after = split(runs, rank)
        parts = [run[a:b] for run, a, b in zip(runs, before, after, strict=True)]
        records = np.concatenate(parts)
        yield records["id"][np.argsort(records["value"], kind="stable")]
        before = after


def split(runs: list[np.ndarray], rank: int) -> list[int]:
    """Cut runs so that their first parts together are the `rank` lowest records; ties by run.

    Cost:    a binary search in every run for each of about log2(n) pivots
    Example: runs of values [1, 3, 3], [2, 3, 4] at rank 4 are cut at [3, 1]: 1, 3, 3 and 2
    """
    low, high = [0] * len(runs), [len(run) for run in runs]
    if rank >= sum(high):
        return high
    while True:
        widest = max(range(len(runs)), key=lambda i: high[i] - low[i])
        pivot = runs[widest]["value"][(low[widest] + high[widest]) // 2]
        left = [bisect_left(run["value"], pivot) for run in runs]
        right = [bisect_right(run["value"], pivot) for run in runs]
        if sum(left) > rank:
            high = left
        elif sum(right) < rank:
            low = right
        else:  # the cut goes through the ties of the pivot
            for i in range(len(runs)):
                left[i] += min(right[i] - left[i], rank - sum(left))
            return left


# ---- a ranking


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


def write(folder: Path, runs: list[Path]) -> dict[str, Any]:
    """Merge sorted runs into values.bin and order.bin; returns what `read` has to know of them."""
    with (folder / "values.bin").open("wb") as out:
        for file in runs:
            run = np.load(file)
            values = np.empty_like(run["value"])
            values[run["id"] - run["id"].min()] = run["value"]
            out.write(values)
    samples = 0
    with (folder / "order.bin").open("wb") as out:
        for ids in merged(runs):
            out.write(ids)
            samples += len(ids)
    return {"samples": samples, "values": str(values.dtype), "order": str(ids.dtype)}


def read(folder: Path, about: dict[str, object]) -> Ranking:
    """What `write` wrote.

    Raises: ValueError for files that do not belong together, as far as their sizes and both ends
            tell: to check more would keep a run waiting for a cold disk
    """
    values = np.asarray(np.memmap(folder / "values.bin", about["values"], "r"))
    order = np.asarray(np.memmap(folder / "order.bin", about["order"], "r"))
    if not len(values) == len(order) == about["samples"]:
        raise ValueError("files of another size")
    first, last = order[0], order[-1]
    if max(first, last) >= len(order) or (first == last and len(order) > 1):
        raise ValueError("order.bin is not an order of the samples")
    if not values[first] <= values[last]:
        raise ValueError("order.bin and values.bin disagree")
    return Ranking(values, order)


# ---- pools


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


class Stage(NamedTuple):
    """What a curriculum allows at one point of a run."""

    difficulty: dict[str, float]  # of each metric
    # tokens, with special ones: what is longer is cut off there or, with --pack, cut into pieces
    max_piece_len: int
    pool: Pool | None  # None: every sample may be drawn
    note: str  # for the user: how an empty pool was widened


class Stages(Protocol):
    """What plan.py asks of a curriculum."""

    reshapes: bool  # rows are cut into shorter ones, not truncated

    def at(self, consumed_tokens: float) -> Stage: ...
