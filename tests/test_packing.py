"""Packing: every item once, no row too full, worked answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import balanced, best_fit, main

items = st.lists(st.integers(1, 64), max_size=60)


def test_worked_example():
    assert best_fit([3, 6, 5, 2], 8) == [[1, 3], [2, 0]]
    assert best_fit([], 8) == []
    assert best_fit([8, 8], 8) == [[0], [1]]


def test_takes_the_fullest_row_that_still_holds_the_item():
    # 7 and 6 open rows with 3 and 4 left; the 3 goes where it fits exactly, not where room is most
    assert best_fit([7, 6, 3], 10) == [[0, 2], [1]]


@given(items, st.integers(64, 100))
def test_every_item_once_and_no_row_too_full(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= capacity for row in rows)


@given(items, st.integers(64, 100))
def test_no_two_rows_would_fit_into_one(lengths, capacity):
    used = sorted(sum(lengths[item] for item in row) for row in best_fit(lengths, capacity))
    assert len(used) < 2 or used[0] + used[1] > capacity


@pytest.mark.parametrize("length", [0, 9, -1])
def test_refuses_what_fits_no_row(length):
    with pytest.raises(ValueError, match=f"piece of {length} tokens does not fit a row of 1 to 8"):
        best_fit([3, length], 8)


def test_command_prints_rows_and_padding(capsys):
    main(["100", "90", "60", "50", "--capacity", "128"])
    out = capsys.readouterr().out
    assert "60 + 50 = 110 of 128" in out
    assert "padding: 21.9% in 3 rows, 41.4% with one item a row" in out
    with pytest.raises(ValueError, match="--capacity 0: a row has 1 token or more"):
        main(["5", "--capacity", "0"])


# ---- balance


def most_over_mean(work, shares):
    loads = work.reshape(shares, -1).sum(1)
    return loads.max() / loads.mean()


def squared_lengths(packs, seed, capacity=512):
    """Attention work of full rows that were cut at random into documents."""
    random = np.random.default_rng(seed)
    rows = (np.diff(np.sort([0, *random.integers(0, capacity, 3), capacity])) for _ in range(packs))
    return np.array([(row**2).sum() for row in rows])


def test_balance_worked_example():
    assert balanced(np.array([4, 3, 2, 1])).tolist() == [0, 3, 1, 2]


@given(st.lists(st.integers(0, 1000), max_size=60))
def test_balanced_is_an_order_of_all_rows(work):
    assert sorted(balanced(np.array(work, np.int64))) == list(range(len(work)))


def test_rows_of_equal_work_stay_as_they_are():
    assert balanced(np.full(24, 7)).tolist() == list(range(24))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_the_work_evenly(ranks):
    """8 packs a rank: without balance the busiest of 8 ranks has 1.1 to 1.3 times the mean."""
    for seed in range(20):
        work = squared_lengths(8 * ranks, seed)
        assert most_over_mean(work[balanced(work)], ranks) < 1.01
    assert most_over_mean(work, ranks) > 1.03, "as they came"


def test_any_number_of_ranks_that_divides_the_rows_is_served():
    work = squared_lengths(96, 0)
    order = balanced(work)
    for ranks in (2, 3, 4, 6, 8, 12):
        assert most_over_mean(work[order], ranks) < 1.02
