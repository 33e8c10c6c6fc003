"""Documents in packs: histograms, strategies, and which document goes where."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.rows.packs import Packing, Packs, assign, histogram

PACKING = Packing(  # two packs of 6 + 2 and one of 5 + 2 + 1, in rows of 8
    lengths=np.array([6, 2, 5, 2, 1]),
    offsets=np.array([0, 2, 5]),
    counts=np.array([2, 1]),
    max_len=8,
    lower_bound=3,
)


def test_numbers_by_hand():
    assert PACKING.packs == 3
    assert PACKING.factor == 7 / 3
    assert PACKING.efficiency == 1
    assert PACKING.attention == (2 * (36 + 4) + 25 + 4 + 1) / (3 * 64)


def test_assign_by_hand():
    #         0  1  2  3  4  5  6
    lengths = [2, 6, 1, 2, 5, 6, 2]
    packs = assign(PACKING, np.array(lengths))
    assert packs.lists() == [[1, 0], [5, 3], [4, 6, 2]]
    assert packs.items.dtype == np.int64 and packs.offsets.tolist() == [0, 2, 4, 7]


def test_take_by_hand():
    packs = Packs(np.array([3, 1, 0, 2]), np.array([0, 2, 3, 4]))
    assert packs.take(np.array([2, 0, 1])).lists() == [[2], [3, 1], [0]]
    assert packs.take(np.array([1])).lists() == [[0]]


@given(st.permutations(list(range(7))))
def test_assign_takes_equal_documents_in_order(order):
    lengths = np.array([2, 6, 1, 2, 5, 6, 2])[list(order)]
    rows = assign(PACKING, lengths).lists()
    assert [lengths[row].tolist() for row in rows] == [[6, 2], [6, 2], [5, 2, 1]]
    assert rows[0][0] < rows[1][0] and rows[0][1] < rows[1][1] < rows[2][1]


def test_rows_longer_than_16_bits():
    packing = Packing(np.array([70_000]), np.array([0, 1]), np.array([2]), 70_001, 2)
    assert assign(packing, np.array([70_000, 70_000])).lists() == [[0], [1]]


def test_histogram_by_hand():
    assert histogram([3, 1, 3], 4).tolist() == [0, 1, 0, 2, 0]
    assert histogram([], 2).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="a document of 5 tokens does not fit a row of 1 to 4"):
        histogram([3, 5], 4)


@pytest.mark.parametrize("lengths", [[2, 6, 1, 2, 5, 6], [2, 6, 1, 2, 5, 6, 3], [6] * 7])
def test_other_documents_are_refused(lengths):
    with pytest.raises(ValueError, match="not those of the histogram that was packed"):
        assign(PACKING, np.array(lengths))
