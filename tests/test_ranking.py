"""Rankings: sorted runs merged into one, percentiles, values, and the pool that several share."""

import tempfile
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.rows import ranking
from support.rows.ranking import Head, Pool, Ranking, merged, sorted_run, split


def ranking_of(values) -> Ranking:
    values = np.array(values, np.float32)
    return Ranking(values, np.argsort(values, kind="stable").astype(np.uint32))


# ---- sorted runs

lists_of_values = st.lists(st.lists(st.integers(-3, 3), max_size=12), min_size=1, max_size=6)


def runs_of(lists):
    """A run of each list, ids counted on from run to run, and the ids of all by value."""
    first_ids = accumulate(map(len, lists[:-1]), initial=0)
    runs = [
        sorted_run(np.array(values, np.float32), first_id, np.dtype("uint32"))
        for values, first_id in zip(lists, first_ids, strict=True)
    ]
    return runs, np.argsort(list(chain(*lists)), kind="stable").tolist()


def test_runs_worked_by_hand():
    run = sorted_run(np.array([5, 1, 3, 3], np.float32), 10, np.dtype("uint32"))
    assert run.tolist() == [(1, 11), (3, 12), (3, 13), (5, 10)]
    assert split(runs_of([[1, 3, 3], [2, 3, 4]])[0], 4) == [3, 1]


@settings(deadline=None, max_examples=40)
@given(lists_of_values, st.integers(1, 30))
@example([[1, 3, 3], [2, 3, 4]], 4)
def test_cut_at_any_rank_and_merged_runs_are_the_sorted_whole(lists, chunk):
    runs, order = runs_of(lists)
    for rank in range(1, len(order) + 1):
        ids = [run["id"][:cut].tolist() for run, cut in zip(runs, split(runs, rank), strict=True)]
        assert sorted(chain(*ids)) == sorted(order[:rank])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npy" for i in range(len(runs))]
        for file, run in zip(files, runs, strict=True):
            np.save(file, run)
        parts = [part.tolist() for part in merged(files, chunk)]
    assert list(chain(*parts)) == order
    assert all(len(part) == chunk for part in parts[:-1])


# ---- a ranking; test_curriculum.py compares what is eligible with a plain sort


def test_ties_are_in_or_out_together():
    six = ranking_of([5, 2, 5, 2.5, 5, 9])
    counts = [six.at_value(value) for value in (-1, 1.9, 2, 2.4, 2.5, 4, 5, 8.9, 9, 99)]
    assert counts == [0, 0, 1, 1, 2, 2, 5, 5, 6, 6]


# ---- pools


def test_the_size_of_a_wide_intersection_is_estimated(monkeypatch):
    random = np.random.default_rng(0)
    one, two = (ranking_of(random.random(20_000)) for _ in range(2))
    heads = (Head(8_000, one), Head(10_000, two))
    exact = int((Pool(heads).ids(np.arange(8_000)) >= 0).sum())
    assert Pool(heads).size == exact
    monkeypatch.setattr(ranking, "SCAN", 2_000)
    assert 0 < abs(Pool(heads).size / exact - 1) < 0.1  # 4 standard deviations
    assert not Pool(heads).is_empty
    assert Pool((Head(5, one), Head(1, ranking_of(-one.values)))).is_empty


# ---- files


@pytest.mark.parametrize("file", ["values.bin", "order.bin"])
def test_files_that_do_not_belong_together_are_refused(tmp_path, file):
    np.save(tmp_path / "run.npy", sorted_run(np.array([2, 1], "f4"), 0, np.dtype("u4")))
    about = ranking.write(tmp_path, [tmp_path / "run.npy"])
    assert about == {"samples": 2, "values": "float32", "order": "uint32"}
    read = ranking.read(tmp_path, about)
    assert (read.values[:].tolist(), read.order[:].tolist()) == ([2.0, 1.0], [1, 0])
    whole = (tmp_path / file).read_bytes()
    for damaged in (b"", whole[:-1], whole + bytes(4), whole[4:] + whole[:4], b"\xff" * len(whole)):
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(ValueError):
            ranking.read(tmp_path, about)
