"""Pairs for BERT's second task: an answer that no length betrays, and text that is read once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cross_entropy import IGNORE
from support.rows.bert import Pairs, sentence_pairs

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def laid(lengths):
    """Pieces side by side in a store, a gap between any two."""
    stop = np.cumsum(np.array(lengths) + 3)
    return np.stack((stop - lengths, stop), axis=1)


def read_by(spans, pairs):
    """The places in the store that each pair's parts take, in order."""
    left = spans[:, 1] - spans[:, 0] - pairs.first
    columns = zip(spans[:, 0], pairs.first, pairs.second, left, strict=True)
    return [(range(a, a + n), range(b, b + m)) for a, n, b, m in columns]


@given(lengths, st.integers(0, 99))
def test_every_part_is_a_part_of_a_piece_and_is_read_once(lengths, key):
    spans = laid(lengths)
    cut, pairs = sentence_pairs(spans, key)
    parts = read_by(cut, pairs)
    places = [place for pair in parts for part in pair for place in part]
    assert len(set(places)) == len(places)
    assert cut[:, 0].tolist() == spans[:, 0].tolist()
    for (first, second), (start, stop), answer in zip(
        parts, spans, pairs.answers(*cut.T), strict=True
    ):
        size = stop - start
        assert first.start == start
        assert len(second) <= size - len(first), "no longer than the piece it stands in for"
        if len(second) == 0:
            assert len(first) == size and answer == IGNORE, "nothing of it is lost"
        else:
            assert max(size // 4, 1) <= len(first) <= max(3 * size // 4, 1)
            owner = [n for n, (a, b) in enumerate(spans) if a < second.start < b]
            assert len(owner) == 1 and second.stop <= spans[owner[0], 1]
            assert answer == (second.start != first.stop)
    alone = (pairs.answers(*cut.T) == IGNORE).sum()
    assert alone == (np.array(lengths) == 1).sum() + (np.array(lengths) > 1).sum() % 2


@given(lengths, st.integers(0, 99))
def test_the_order_in_which_pieces_come_does_not_matter(lengths, key):
    spans = laid(lengths)
    order = np.random.default_rng(key).permutation(len(spans))
    cut, pairs = sentence_pairs(spans, key)
    again, shuffled = sentence_pairs(spans[order], key)
    assert np.array_equal(cut[order], again)
    assert all(np.array_equal(a[order], b) for a, b in zip(pairs, shuffled, strict=True))


def test_pairs_are_another_draw_under_another_key():
    spans = laid([30] * 40)
    one, other = (sentence_pairs(spans, "nsp", step)[1] for step in (1, 2))
    assert not np.array_equal(one.first, other.first)
    assert not np.array_equal(one.second, other.second)


def test_a_piece_that_is_drawn_again_is_parted_and_paired_anew():
    """Else copies would be neighbours, and swap what is the same."""
    spans = laid([40] * 20)[np.random.default_rng(0).integers(0, 20, 400)]
    cut, pairs = sentence_pairs(spans, 3)
    assert pairs.answers(*cut.T).mean() > 0.4
    copies = spans[:, 0] == spans[0, 0]
    assert copies.sum() > 10 and len(set(pairs.first[copies])) > 5


def test_the_one_without_a_neighbour_is_any_one():
    """Were it the last in order, the longest second part would always follow."""
    spans = laid(list(range(20, 29)))
    alone = [np.flatnonzero(p.answers(*c.T) == IGNORE).tolist()
             for c, p in (sentence_pairs(spans, key) for key in range(200))]  # fmt: skip
    counts = np.bincount(np.concatenate(alone), minlength=9)
    assert len(alone) == counts.sum() == 200 and counts.min() > 5


def lost(spans, cut):
    return 1 - (cut[:, 1] - cut[:, 0]).sum() / (spans[:, 1] - spans[:, 0]).sum()


def test_half_are_foreign_and_little_is_cut_off():
    spans = laid(np.random.default_rng(0).integers(8, 254, 2000))
    cut, pairs = sentence_pairs(spans, 1)
    assert pairs.answers(*cut.T).mean() == pytest.approx(0.5, abs=0.04)
    assert lost(spans, cut) < 0.001
    few = laid([253] * 16)
    assert np.mean([lost(few, sentence_pairs(few, key)[0]) for key in range(50)]) < 0.03


def betrayed(spans, pairs):
    """How often the answer is guessed right by whether a pair is as long as most pieces are."""
    answers = pairs.answers(*spans.T)
    is_full = spans[:, 1] - spans[:, 0] == np.median(spans[:, 1] - spans[:, 0])
    return max((is_full == answers).mean(), (is_full != answers).mean())


def test_lengths_do_not_betray_the_answer():
    """Most pieces fill a row, so that a foreign part of any other length would be told at once."""
    spans = laid([100] * 3000 + list(range(20, 100)) * 10)
    cut, pairs = sentence_pairs(spans, 5)
    assert betrayed(cut, pairs) < 0.54
    answers, left = pairs.answers(*cut.T), cut[:, 1] - cut[:, 0] - pairs.first
    for of_pair in (pairs.first, left, pairs.first + left):
        there = [of_pair[answers == answer] for answer in (0, 1)]
        deviation = of_pair.std() * (1 / len(there[0]) + 1 / len(there[1])) ** 0.5
        assert abs(there[0].mean() - there[1].mean()) < 4 * deviation


def test_negative_control_foreign_parts_of_any_length_betray_it():
    """Second parts that change places as they come, and take their own lengths along."""
    spans = laid([100] * 3000 + list(range(20, 100)) * 10)
    _, pairs = sentence_pairs(spans, 5)
    left = spans[:, 1] - spans[:, 0] - pairs.first
    second, chosen = spans[:, 0] + pairs.first, np.arange(0, len(spans), 2)
    at = np.roll(chosen, 1)
    second[chosen], left[chosen] = second[at], left[at]
    cut = np.stack((spans[:, 0], spans[:, 0] + pairs.first + left), axis=1)
    assert betrayed(cut, Pairs(pairs.first, second)) > 0.75
