"""Packs: histograms, strategies, which document goes where, and rows in shares of similar work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rows.packs import Packing, Packs, assign, balanced, histogram, least_packs

PACKING = Packing(  # two packs of 6 + 2 and one of 5 + 2 + 1, in rows of 8
    lengths=np.array([6, 2, 5, 2, 1]),
    offsets=np.array([0, 2, 5]),
    counts=np.array([2, 1]),
    max_len=8,
    lower_bound=3,
)


def rows_of(packs):
    return [row.tolist() for row in np.split(packs.items, packs.offsets[1:-1])]


def test_numbers_by_hand():
    assert histogram([3, 1, 3], 4).tolist() == [0, 1, 0, 2, 0]
    assert histogram([], 2).tolist() == [0, 0, 0]
    assert PACKING.packs == 3
    assert PACKING.factor == 7 / 3
    assert PACKING.efficiency == 1
    assert PACKING.attention == (2 * (36 + 4) + 25 + 4 + 1) / (3 * 64)


def test_bound_by_hand():
    assert least_packs(np.bincount([5, 5, 5], minlength=9), 8) == 3  # 15 tokens, but no two fit
    # 5 + 5 leave 3 + 3 free, in which no 4 fits: the 4s need a pack of their own
    assert least_packs(np.bincount([5, 5, 4, 4], minlength=9), 8) == 3
    assert least_packs(np.bincount([1, 1, 1, 1, 1], minlength=9), 2) == 3


def test_assign_and_take_by_hand():
    #         0  1  2  3  4  5  6
    lengths = [2, 6, 1, 2, 5, 6, 2]
    packs = assign(PACKING, np.array(lengths))
    assert rows_of(packs) == [[1, 0], [5, 3], [4, 6, 2]]
    assert packs.items.dtype == np.int64 and packs.offsets.tolist() == [0, 2, 4, 7]
    packs = Packs(np.array([3, 1, 0, 2]), np.array([0, 2, 3, 4]))
    assert rows_of(packs.take(np.array([2, 0, 1]))) == [[2], [3, 1], [0]]
    assert rows_of(packs.take(np.array([1]))) == [[0]]


@settings(max_examples=20)
@given(st.permutations(list(range(7))))
def test_assign_takes_equal_documents_in_order(order):
    lengths = np.array([2, 6, 1, 2, 5, 6, 2])[list(order)]
    rows = rows_of(assign(PACKING, lengths))
    assert [lengths[row].tolist() for row in rows] == [[6, 2], [6, 2], [5, 2, 1]]
    assert rows[0][0] < rows[1][0] and rows[0][1] < rows[1][1] < rows[2][1]


def test_rows_longer_than_16_bits():
    packing = Packing(np.array([70_000]), np.array([0, 1]), np.array([2]), 70_001, 2)
    assert rows_of(assign(packing, np.array([70_000, 70_000]))) == [[0], [1]]


# ---- balance


def most_over_mean(work, shares):
    loads = work.reshape(shares, -1).sum(1)
    return loads.max() / loads.mean()


def squared_lengths(packs, seed, capacity=512):
    """Attention work of full rows that were cut at random into documents."""
    random = np.random.default_rng(seed)
    rows = (np.diff(np.sort([0, *random.integers(0, capacity, 3), capacity])) for _ in range(packs))
    return np.array([(row**2).sum() for row in rows])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1000), max_size=60), st.sampled_from([1, 8]))
def test_balanced_is_an_order_of_all_rows(work, multiple):
    assert sorted(balanced(np.array(work, np.int64), multiple)) == list(range(len(work)))


def test_balance_by_hand():
    assert balanced(np.array([4, 3, 2, 1])).tolist() == [0, 3, 1, 2]
    # rows of equal work stay as they are
    assert balanced(np.full(24, 7)).tolist() == list(range(24))
    assert balanced(np.full(23, 7), 8).tolist() == list(range(23))


@pytest.mark.parametrize("rows", [41, 127])
def test_a_prime_number_of_rows_is_shared_by_any_number_of_ranks(rows):
    work = squared_lengths(rows, 0)
    for ranks in (2, 4, 8):
        blanks = -rows % ranks
        uneven = (rows + blanks) / rows  # the best that the busiest rank can do, over the mean
        ours, by_work = (
            most_over_mean(np.pad(work[order], (0, blanks)), ranks)
            for order in (balanced(work, 8), balanced(work))
        )
        assert ours < min(1.15 * uneven, by_work)


def test_ranks_share_the_work_evenly():
    """8 packs a rank: without balance the busiest of 8 ranks has 1.1 to 1.3 times the mean."""
    for seed in range(8):
        work = squared_lengths(64, seed)
        assert most_over_mean(work[balanced(work)], 8) < 1.01 and most_over_mean(work, 8) > 1.1
    work = squared_lengths(96, 0)  # one order serves any number of ranks that divides the rows
    for shares in (2, 3, 4, 6, 8, 12):
        assert most_over_mean(work[balanced(work)], shares) < 1.02
