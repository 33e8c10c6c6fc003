"""Sorted runs: cut at exact ranks and merged in chunks, they are the sorted whole."""

import tempfile
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.rows.ranking import merged, sorted_run, split, values_by_id

lists_of_values = st.lists(st.lists(st.integers(-3, 3), max_size=12), min_size=1, max_size=6)


def runs_of(lists):
    """A run of each list, ids counted on from run to run, and the ids of all by value."""
    first_ids = [0, *accumulate(map(len, lists))]
    runs = []
    for values, first_id in zip(lists, first_ids, strict=False):
        runs.append(sorted_run(np.array(values, np.float32), first_id, np.dtype("uint32")))
    return runs, np.argsort(list(chain(*lists)), kind="stable").tolist()


def test_a_run_worked_by_hand():
    run = sorted_run(np.array([5, 1, 3, 3], np.float32), 10, np.dtype("uint32"))
    assert run.tolist() == [(1, 11), (3, 12), (3, 13), (5, 10)]
    assert values_by_id(run).tolist() == [5, 1, 3, 3]


@settings(deadline=None)
@given(lists_of_values)
@example([[1, 3, 3], [2, 3, 4]])
def test_a_split_is_that_of_the_sorted_whole(lists):
    runs, order = runs_of(lists)
    for rank in range(1, len(order) + 1):
        cuts = split(runs, rank)
        ids = [run["id"][:cut].tolist() for run, cut in zip(runs, cuts, strict=True)]
        assert sorted(chain(*ids)) == sorted(order[:rank])
    if lists == [[1, 3, 3], [2, 3, 4]]:
        assert split(runs, 4) == [3, 1]


@settings(deadline=None, max_examples=40)
@given(lists_of_values, st.integers(1, 30))
def test_merged_runs_are_the_sorted_whole(lists, chunk):
    runs, order = runs_of(lists)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npy" for i in range(len(runs))]
        for file, run in zip(files, runs, strict=True):
            np.save(file, run)
        parts = [part.tolist() for part in merged(files, chunk)]
    assert list(chain(*parts)) == order
    assert all(len(part) == chunk for part in parts[:-1])
