"""Sentence pairs for BERT's second task: lengths do not reveal the answer; no text is read twice.

test_data.py tests masks, with the rows that hold them.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert import Pairs, sentence_pairs
from kernels.cross_entropy import IGNORE

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def lay_spans(lengths):
    """Return spans of pieces of these lengths in a store, with a gap between neighbours."""
    stop = np.cumsum(np.array(lengths) + 3)
    return np.stack((stop - lengths, stop), axis=1)


def second_lengths(spans, pairs):
    return spans[:, 1] - spans[:, 0] - pairs.first


@settings(max_examples=40)
@given(lengths, st.integers(0, 99))
def test_every_part_lies_in_one_piece_and_no_token_is_read_twice(lengths, key):
    spans = lay_spans(lengths)
    cut, pairs = sentence_pairs(spans, key)
    assert cut[:, 0].tolist() == spans[:, 0].tolist()
    answers, read = pairs.answers(*cut.T), []
    for i, (start, stop) in enumerate(spans):
        size, second, left = stop - start, pairs.second[i], second_lengths(cut, pairs)[i]
        read += [*range(start, start + pairs.first[i]), *range(second, second + left)]
        assert left <= size - pairs.first[i], "no longer than the part that it replaces"
        if left == 0:
            assert pairs.first[i] == size and answers[i] == IGNORE, "an unpaired piece stays whole"
        else:
            assert max(size // 4, 1) <= pairs.first[i] <= max(3 * size // 4, 1)
            owner = [n for n, (a, b) in enumerate(spans) if a < second < b]
            assert len(owner) == 1 and second + left <= spans[owner[0], 1]
            assert answers[i] == (second != start + pairs.first[i])
    assert len(set(read)) == len(read)
    pairable = (np.array(lengths) > 1).sum()
    assert (answers == IGNORE).sum() == len(lengths) - pairable + pairable % 2

    order = np.random.default_rng(key).permutation(len(spans))
    again, shuffled = sentence_pairs(spans[order], key)
    assert np.array_equal(cut[order], again)
    assert all(np.array_equal(a[order], b) for a, b in zip(pairs, shuffled, strict=True))


def test_copies_of_a_piece_are_cut_and_paired_differently():
    """Otherwise copies would be neighbours and swap equal parts. Another key also pairs anew."""
    spans = lay_spans([40] * 20)[np.random.default_rng(0).integers(0, 20, 400)]
    cut, pairs = sentence_pairs(spans, 3)
    assert not np.array_equal(pairs.second, sentence_pairs(spans, 4)[1].second)
    assert pairs.answers(*cut.T).mean() > 0.4
    copies = spans[:, 0] == spans[0, 0]
    assert copies.sum() > 10 and len(set(pairs.first[copies])) > 5


def test_with_an_odd_number_any_piece_can_stay_unpaired():
    """If it were always the last by length, the longest second part would always be genuine."""
    spans = lay_spans(list(range(20, 29)))
    drawn = [sentence_pairs(spans, key) for key in range(200)]
    alone = [np.flatnonzero(pairs.answers(*cut.T) == IGNORE).tolist() for cut, pairs in drawn]
    counts = np.bincount(np.concatenate(alone), minlength=9)
    assert counts.sum() == 200 and counts.min() > 5


def test_half_of_the_second_parts_are_foreign_and_little_text_is_lost():
    def lost(spans, cut):
        return 1 - (cut[:, 1] - cut[:, 0]).sum() / (spans[:, 1] - spans[:, 0]).sum()

    spans = lay_spans(np.random.default_rng(0).integers(8, 254, 2000))
    cut, pairs = sentence_pairs(spans, 1)
    assert pairs.answers(*cut.T).mean() == pytest.approx(0.5, abs=0.04)
    assert lost(spans, cut) < 0.001
    few = lay_spans([253] * 16)
    assert np.mean([lost(few, sentence_pairs(few, key)[0]) for key in range(50)]) < 0.03


def guess_rate(spans, pairs):
    """Return how often a guess is right that looks only at whether a pair has the usual length."""
    answers = pairs.answers(*spans.T)
    is_full = spans[:, 1] - spans[:, 0] == np.median(spans[:, 1] - spans[:, 0])
    return max((is_full == answers).mean(), (is_full != answers).mean())


def test_lengths_do_not_reveal_the_answer():
    """Most pieces fill a row. The control swaps second parts whatever their lengths."""
    spans = lay_spans([100] * 3000 + list(range(20, 100)) * 10)
    cut, pairs = sentence_pairs(spans, 5)
    assert guess_rate(cut, pairs) < 0.54
    answers, left = pairs.answers(*cut.T), second_lengths(cut, pairs)
    for of_pair in (pairs.first, left, pairs.first + left):
        by_answer = [of_pair[answers == answer] for answer in (0, 1)]
        deviation = of_pair.std() * sum(1 / len(values) for values in by_answer) ** 0.5
        assert abs(by_answer[0].mean() - by_answer[1].mean()) < 4 * deviation

    left, second = second_lengths(spans, pairs), spans[:, 0] + pairs.first
    chosen = np.arange(0, len(spans), 2)
    other = np.roll(chosen, 1)
    second[chosen], left[chosen] = second[other], left[other]
    naive = np.stack((spans[:, 0], spans[:, 0] + pairs.first + left), axis=1)
    assert guess_rate(naive, Pairs(pairs.first, second)) > 0.75
