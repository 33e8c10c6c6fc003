"""Cutting stock: patterns, the relaxation and its bound, documents in whole packs."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import histograms_of_most_tokens, needs_scipy

from support.rows import cutting_stock
from support.rows.cutting_stock import fill, least_packs, number_that_fill, relax

counts_of_lengths = st.lists(st.integers(0, 20), min_size=2, max_size=16)


def test_patterns_by_hand():
    assert list(cutting_stock.patterns_that_fill(4, 2, 4)) == [(4,), (3, 1), (2, 2)]
    assert list(cutting_stock.patterns_that_fill(5, 3, 2)) == [(2, 2, 1)]
    counts = [number_that_fill(512, most) for most in (3, 4)]
    assert counts == [22_102, 959_631], "as many as the paper has"


@pytest.mark.parametrize("space, most", [(1, 2), (5, 1), (12, 3), (12, 12)])
def test_patterns_are_all_sums_and_are_counted_right(space, most):
    sums = {
        tuple(sorted(parts, reverse=True))
        for k in range(1, min(most, 5) + 1)
        for parts in combinations_with_replacement(range(1, space + 1), k)
        if sum(parts) == space
    }
    patterns = list(cutting_stock.patterns_that_fill(space, most, space))
    assert len(patterns) == len(set(patterns)) == number_that_fill(space, most)
    assert {pattern for pattern in patterns if len(pattern) < 6} == sums


def test_bound_by_hand():
    assert least_packs(np.bincount([5, 5, 5], minlength=9), 8) == 3  # 15 tokens, but no two fit
    # 5 + 5 leave 3 + 3 free, in which no 4 fits: the 4s need a pack of their own
    assert least_packs(np.bincount([5, 5, 4, 4], minlength=9), 8) == 3
    assert least_packs(np.bincount([1, 1, 1, 1, 1], minlength=9), 2) == 3


def least_packs_by_definition(counts, max_per_pack):
    """The bound L2 as its paper has it, in Python's integers."""
    max_len, best = len(counts) - 1, -(-sum(counts) // max_per_pack)
    for t in range(max_len // 2 + 1):
        long = sum(counts[max_len - t + 1 :])
        middle = {n: counts[n] for n in range(max_len // 2 + 1, max_len - t + 1)}
        free = sum((max_len - n) * count for n, count in middle.items())
        short = sum(n * counts[n] for n in range(t, max_len // 2 + 1))
        more = max(-((free - short) // max_len), 0)
        best = max(best, long + sum(middle.values()) + more)
    return best


@given(histograms_of_most_tokens(), st.integers(1, 16))
def test_bound_is_exact_up_to_the_most_tokens(counts, max_per_pack):
    bound = least_packs(np.array(counts), max_per_pack)
    assert bound == least_packs_by_definition(counts, max_per_pack)


@needs_scipy
def test_relaxation_by_hand():
    # three documents of 4 in packs of 8: one and a half packs, hence two
    relaxed = relax(np.bincount([4, 4, 4], minlength=9), 8, [(4,)])
    assert relaxed.packs.sum() == pytest.approx(1.5)
    assert relaxed.lower_bound == 2


@needs_scipy
@settings(max_examples=20, deadline=None)
@given(counts_of_lengths.filter(any), st.integers(1, 16))
def test_relaxation_has_a_place_for_everything_and_is_at_its_bound(counts, max_per_pack):
    counts = np.array([0, *counts])
    start = [(length,) for length in np.flatnonzero(counts).tolist()]
    together = relax(counts, max_per_pack, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting_stock, "FEW", 0)
        one_by_one = relax(counts, max_per_pack, start)  # column generation
    assert one_by_one.lower_bound == together.lower_bound
    for patterns, packs, bound in (together, one_by_one):
        assert all(sum(pattern) < len(counts) for pattern in patterns)
        assert all(len(pattern) <= max_per_pack for pattern in patterns)
        assert bound == np.ceil(packs.sum() - 1e-6)
        places = np.zeros(len(counts))
        for pattern, n in zip(patterns, packs, strict=True):
            np.add.at(places, list(pattern), n)
        longer = np.cumsum((places - counts)[::-1])  # at least as many places as documents so long
        assert (longer > -1e-5).all()


def test_fill_by_hand():
    counts = np.bincount([5, 4, 3, 2], minlength=9)
    groups, left = fill([(5, 3)], np.array([2]), counts)
    assert groups == [(1, (5, 3)), (1, (4, 2))] and not left.any()
    groups, left = fill([(5, 3)], np.array([2]), counts, shorter=False)
    assert groups == [(1, (5, 3))] and np.flatnonzero(left).tolist() == [2, 4]
    groups, left = fill([(3,)], np.array([3]), np.bincount([5, 3], minlength=9))
    assert groups == [(1, (3,))] and np.flatnonzero(left).tolist() == [5]


@needs_scipy
def test_least_squares_finds_a_histogram_that_patterns_make():
    counts = np.zeros(13, int)
    counts[[12, 9, 3, 5, 7]] = 4, 6, 6, 10, 10
    patterns, packs = cutting_stock.regress(counts, 2)
    made = {patterns[i]: int(packs[i]) for i in np.flatnonzero(packs)}
    assert made == {(12,): 4, (9, 3): 6, (7, 5): 10}
