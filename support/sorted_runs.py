"""Sorting more than memory holds: sorted runs in files, merged a chunk at a time.

A run is an array of records (value, id), sorted by value and then by id, and all ids of a run come
before those of the next. Cutting every run at the same exact rank makes chunks that are sorted each
by itself, so what is in memory is one chunk, however long the runs are.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

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
