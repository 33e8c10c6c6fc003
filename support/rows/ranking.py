"""Samples by rank: their values and their order, easiest first, and the pools that are its heads.

Knows arrays of numbers, mapped from disk or in memory, not what they measure. A pool takes no list
of samples: it is how many of the first ranks are meant, in one ranking or in several at once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.base.atomic import atomic_write

SCAN = 1 << 18  # samples looked at at once


@dataclass(frozen=True, eq=False)
class Ranking:
    """values (N,) by sample id; order (N,) sample ids by value, ties by id."""

    values: np.ndarray
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def at_percent(self, percent: int) -> int:
        """How many samples the first percent are, by nearest rank: never 0, all at 100.

        Deviates: DeepSpeed (data_sampling/data_sampler.py) takes N // 100 samples for a percent,
                  which is none at all below a hundred
        """
        return -(-len(self) * percent // 100)

    def at_value(self, value: float) -> int:
        """How many samples have at most this value: ties are in or out together."""
        return bisect_right(self.order, value, key=lambda sample: self.values[sample])

    def highest(self, count: int) -> float:
        """The highest value among the first `count`."""
        return self.values[self.order[count - 1]].item()

    @property
    def last_value(self) -> float:
        return self.highest(len(self))

    def holds(self, ids: np.ndarray, count: int) -> np.ndarray:
        """(n,) bool: which samples are among the first `count`."""
        last = self.order[count - 1]
        values, bound = self.values[ids], self.values[last]
        return (values < bound) | ((values == bound) & (ids <= last))

    def spot_check(self) -> None:
        """ValueError for arrays that do not belong together, as far as both ends tell.

        Four pages, whatever the size: more would take a cold disk longer than a run should wait.
        """
        first, last = ends = self.order[[0, -1]]
        if ends.max() >= len(self) or (first == last and len(self) > 1):
            raise ValueError("order.bin is no order of the samples")
        if not self.values[first] <= self.values[last]:
            raise ValueError("order.bin and values.bin disagree")


def write(folder: Path, runs: list[Path]) -> dict[str, Any]:
    """Merge sorted runs into values.bin and order.bin; returns what `read` has to know of them."""
    with atomic_write(folder / "values.bin") as out:
        for file in runs:
            values = values_by_id(np.load(file))
            out.write(values)
    samples = 0
    with atomic_write(folder / "order.bin") as out:
        for ids in merged(runs):
            out.write(ids)
            samples += len(ids)
    return {"samples": samples, "values": str(values.dtype), "order": str(ids.dtype)}


def read(folder: Path, about: dict[str, Any]) -> tuple[np.memmap, np.memmap]:
    """values and order, mapped; ValueError for files of another size."""
    values = np.memmap(folder / "values.bin", about["values"], "r")
    order = np.memmap(folder / "order.bin", about["order"], "r")
    if not len(values) == len(order) == about["samples"]:
        raise ValueError("files of another size")
    return values, order


class Head(NamedTuple):
    """The first `count` samples of a ranking."""

    count: int
    ranking: Ranking


@dataclass(frozen=True)
class Pool:
    """The samples that every one of these heads holds."""

    filters: tuple[Head, ...]  # the shortest first

    @property
    def reach(self) -> int:
        """How many ranks there are to draw from; with one filter each of them is a sample."""
        return self.filters[0].count

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """The samples at these ranks, (n,) int64; -1 where another filter does not hold one."""
        shortest, *others = self.filters
        ids = shortest.ranking.order[ranks].astype(np.int64)
        for count, ranking in others:
            ids[~ranking.holds(ids, count)] = -1
        return ids

    @cached_property
    def size(self) -> int:
        """How many samples; with several filters that reach further than a scan, an estimate."""
        if len(self.filters) == 1:
            return self.reach
        ranks = np.linspace(0, self.reach - 1, min(self.reach, SCAN)).astype(np.int64)
        return round((self.ids(ranks) >= 0).mean() * self.reach)

    @property
    def is_empty(self) -> bool:
        if len(self.filters) == 1:
            return False
        for first in range(0, self.reach, SCAN):
            ranks = np.arange(first, min(first + SCAN, self.reach))
            if (self.ids(ranks) >= 0).any():
                return False
        return True


class Widened(NamedTuple):
    pool: Pool | None  # None: every sample
    percent: int  # to which every head was widened; 0 if there was no need


def intersection(heads: tuple[Head, ...]) -> Widened:
    """The pool that all heads share; if they share no sample, they grow until they do.

    They grow to the first k % of each ranking, for the smallest k at which they share one.
    """
    for percent in range(101):
        grown = [Head(max(n, ranking.at_percent(percent)), ranking) for n, ranking in heads]
        filters = [head for head in grown if head.count < len(head.ranking)]
        pool = Pool(tuple(sorted(filters, key=lambda head: head.count))) if filters else None
        if pool is None or not pool.is_empty:
            return Widened(pool, percent)
    raise AssertionError("the first 100 % are all samples")


class Eligible(NamedTuple):
    """The samples up to a level of each ranking."""

    pool: Pool | None  # None: every sample
    reached: dict[str, float]  # {name: level} where it had to be widened
    note: str  # what was widened, for the user


class Rankings(dict[str, Ranking]):
    """Several rankings of the same samples by name: which come early enough in all."""

    def __init__(self, rankings: dict[str, Ranking]):
        super().__init__(rankings)
        self.pools: dict[tuple[Head, ...], Widened] = {}

    def eligible(self, levels: dict[str, float], units: dict[str, str]) -> Eligible:
        """The samples up to a level of each ranking.

        Where there is none, the pool widens to the first that has some. By value, if nothing is so
        easy: to the easiest value. With several rankings that share nothing: to the easiest k % of
        each, for the smallest k at which they do.

        Args: units {name of a ranking: percentile | value}; levels of anything else are passed over
        """
        heads: dict[str, Head] = {}
        reached, note = {}, ""
        for name, unit in units.items():
            ranking, level = self[name], levels[name]
            if unit == "percentile":
                heads[name] = Head(ranking.at_percent(level), ranking)
                continue
            easiest = ranking.highest(1)
            if level < easiest:
                note = f"no sample has {name} {level} or less: widened to {easiest:g}"
                level = reached[name] = easiest
            heads[name] = Head(ranking.at_value(level), ranking)
        key = tuple(heads.values())
        if key not in self.pools:
            while len(self.pools) > 3:  # levels only come once: the last ones are all that is asked
                del self.pools[next(iter(self.pools))]
            self.pools[key] = intersection(key)
        pool, percent = self.pools[key]
        if percent:
            counts = {name: head.count for name, head in heads.items()}
            note = f"no sample is in all of {counts}: widened to the easiest {percent} % of each"
            for name, unit in units.items():
                ranking, grown = self[name], percent
                if unit == "value":
                    grown = ranking.highest(ranking.at_percent(percent))
                reached[name] = max(reached.get(name, levels[name]), grown)
        return Eligible(pool, reached, note)


# ---- sorted runs
#
# Sorting more than memory holds: sorted runs in files, merged a chunk at a time.
#
# A run is an array of records (value, id), sorted by value and then by id, and all ids of a run
# come before those of the next. Cutting every run at the same exact rank makes chunks that are
# sorted each by itself, so what is in memory is one chunk, however long the runs are.


CHUNK = 1 << 22  # records sorted at once


def sorted_run(values: np.ndarray, first_id: int, id_dtype: np.dtype) -> np.ndarray:
    """The run of consecutive ids, from `first_id` on, with these values."""
    order = np.argsort(values, kind="stable")
    run = np.empty(len(values), [("value", values.dtype), ("id", id_dtype)])
    run["value"], run["id"] = values[order], order + first_id
    return run


def values_by_id(run: np.ndarray) -> np.ndarray:
    """The values of a run in the order of its ids, which are consecutive."""
    values = np.empty_like(run["value"])
    values[run["id"] - run["id"].min()] = run["value"]
    return values


def merged(files: list[Path], chunk: int = CHUNK) -> Iterator[np.ndarray]:
    """The ids of all runs by value, ties by id, `chunk` of them at a time."""
    n = sum(len(np.load(file, mmap_mode="r")) for file in files)
    before = [0] * len(files)
    for rank in range(chunk, n + chunk, chunk):
        # Mapped again for each chunk, which gives the pages of the last one back.
        runs = [np.load(file, mmap_mode="r") for file in files]
        after = split(runs, rank)
        parts = [run[a:b] for run, a, b in zip(runs, before, after, strict=True)]
        records = np.concatenate(parts)
        yield records["id"][np.argsort(records["value"], kind="stable")]
        before = after


def split(runs: list[np.ndarray], rank: int) -> list[int]:
    """Cut runs so that their first parts together are the `rank` lowest; ties by run.

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
                take = min(right[i] - left[i], rank - sum(left))
                left[i] += take
            return left
