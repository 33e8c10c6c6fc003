"""Balance: every row once, shares of like work for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.rows.packs import balanced


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


@given(st.lists(st.integers(0, 1000), max_size=60), st.sampled_from([1, 8]))
def test_balanced_is_an_order_of_all_rows(work, multiple):
    assert sorted(balanced(np.array(work, np.int64), multiple)) == list(range(len(work)))


def test_rows_of_equal_work_stay_as_they_are():
    assert balanced(np.full(24, 7)).tolist() == list(range(24))
    assert balanced(np.full(23, 7), 8).tolist() == list(range(23))


@pytest.mark.parametrize("rows", [41, 43, 97, 101, 127])
def test_a_number_of_rows_that_nobody_divides_is_shared_by_any(rows):
    """As a step's documents make it; parted by its own factors a prime one comes sorted."""
    work = squared_lengths(rows, 0)
    for ranks in (2, 4, 8):
        share = -(-rows // ranks)
        uneven = share * ranks / rows  # the busiest has so many rows more than the mean

        def busiest(order, blanks=share * ranks - rows, ranks=ranks):
            return most_over_mean(np.pad(work[order], (0, blanks)), ranks)

        assert busiest(balanced(work, 8)) < min(1.15 * uneven, busiest(balanced(work)))


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
