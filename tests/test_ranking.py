"""Rankings: percentiles and values, membership, the pool that several share, their files."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rows import ranking
from support.rows.ranking import Head, Pool, Ranking, intersection


def ranking_of(values) -> Ranking:
    values = np.array(values, np.float32)
    return Ranking(values, np.argsort(values, kind="stable").astype(np.uint32))


def test_percent_is_the_nearest_rank():
    for n in (1, 2, 99, 100, 101):
        found = [ranking_of(range(n)).at_percent(percent) for percent in range(1, 101)]
        assert found == [math.ceil(Fraction(n * percent, 100)) for percent in range(1, 101)]
        assert found[0] >= 1 and found == sorted(found) and found[-1] == n
    # by hand: 1 of 1; half of 2; 0.99 and 49.5 of 99 round up; so do 1.01 and 99.99 of 101
    by_hand = {
        (1, 1): 1,
        (2, 50): 1,
        (2, 51): 2,
        (99, 1): 1,
        (99, 50): 50,
        (101, 1): 2,
        (101, 99): 100,
    }
    assert {at: ranking_of(range(at[0])).at_percent(at[1]) for at in by_hand} == by_hand


def test_ties_are_in_or_out_together():
    five = ranking_of([5, 2, 5, 2.5, 5, 9])
    counts = [five.at_value(value) for value in (-1, 1.9, 2, 2.4, 2.5, 4, 5, 8.9, 9, 99)]
    assert counts == [0, 0, 1, 1, 2, 2, 5, 5, 6, 6]
    assert [five.highest(count) for count in range(1, 7)] == [2, 2.5, 5, 5, 5, 9]
    assert five.last_value == 9


ties = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@settings(deadline=None)
@given(ties, st.integers(-1, 5))
def test_at_value_counts(values, value):
    assert ranking_of(values).at_value(value) == sum(other <= value for other in values)


@settings(deadline=None)
@given(ties, st.randoms())
def test_holds_is_membership_among_the_first(values, random):
    some, ids = ranking_of(values), list(range(len(values)))
    random.shuffle(ids)
    for count in range(1, len(ids) + 1):
        first = set(some.order[:count].tolist())
        assert some.holds(np.array(ids), count).tolist() == [i in first for i in ids]


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


def test_an_intersection_grows_to_the_first_percent_at_which_there_is_one():
    up, down = ranking_of([1, 2, 3, 4]), ranking_of([5, 4, 3, 2])
    pool, percent = intersection((Head(1, up), Head(2, down)))
    assert percent == 51, "two of each do not meet, three do"
    assert sorted(id for id in pool.ids(np.arange(pool.reach)).tolist() if id >= 0) == [1, 2]
    assert intersection((Head(4, up), Head(4, down))) == (None, 0), "every sample"


@pytest.mark.parametrize("size", [0, -1, 4])
@pytest.mark.parametrize("file", ["values.bin", "order.bin"])
def test_files_of_another_size_are_refused(tmp_path, file, size):
    run = np.array([(1.0, 1), (2.0, 0)], [("value", "f4"), ("id", "u4")])
    np.save(tmp_path / "run.npy", run)
    about = ranking.write(tmp_path, [tmp_path / "run.npy"])
    assert about == {"samples": 2, "values": "float32", "order": "uint32"}
    values, order = ranking.read(tmp_path, about)
    assert (values.tolist(), order.tolist()) == ([2.0, 1.0], [1, 0])
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes((whole + bytes(4))[: len(whole) + size if size else 0])
    with pytest.raises(ValueError):
        ranking.read(tmp_path, about)
