"""BERT: batches equal their definition, masks do not depend on rows, lengths reveal no answer."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import BYTES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_stores import BYTES_END as END
from small_stores import TOY, in_memory
from test_data import columns_of, drawn_rows, rows_of, width_of

import bert
from bert import PAIR, BertTask, SpecialIds, answers_of, masked_tokens, sentence_pairs
from data import Rows
from kernels.cross_entropy import IGNORE

SPECIAL_IDS = SpecialIds.of(BYTES)
CLS, SEP, MASK, _ = SPECIAL_IDS


def batch_of(rows, T, store=TOY, **task):
    return BertTask(SPECIAL_IDS, **task).batch(store, rows, T, rows, "mask")


def unmasked(batch):
    """Return the tokens before any was hidden: those of masked ones are the targets."""
    tokens = batch.tokens.flatten().clone()
    tokens[batch.masked] = batch.targets.flatten()[batch.masked]
    return tokens.view_as(batch.tokens)


# ---- batches and masks


@settings(max_examples=40)
@given(drawn_rows, st.integers(0, 3))
@example([[(0, 4)], [(5, 9)]], 0)
def test_a_batch_equals_the_definition(rows, padding):
    """Token by token. A piece of up to 9 tokens has one target, which is text."""
    T = width_of(rows, added=2) + padding
    batch = batch_of(rows_of(*rows), T)
    text = unmasked(batch)
    assert batch.is_plain == all([b - a + 2 for a, b in row] == [T] for row in rows)
    assert batch.masked.equal((batch.targets != IGNORE).flatten().nonzero().squeeze(1))
    for r, row in enumerate(rows):
        _, targets, positions, documents = zip(*columns_of(batch, r), strict=True)
        expected = []
        for number, (start, stop) in enumerate(row):
            tokens = [CLS, *TOY.tokens[start:stop].tolist(), SEP]
            expected += zip(tokens, range(len(tokens)), [number] * 6, strict=False)
            (target,) = (at for at in range(T) if documents[at] == number and targets[at] >= 0)
            assert 1 <= positions[target] <= stop - start
        expected += [(END, 0, -1)] * (T - len(expected))
        assert [*zip(text[r].tolist(), positions, documents, strict=True)] == expected


def test_15_percent_of_the_tokens_are_masked_and_80_percent_of_these_hidden():
    assert masked_tokens(np.array([1, 3, 4, 17, 40])).tolist() == [1, 1, 1, 3, 6]
    T = 100_000
    store = in_memory(np.random.default_rng(0).integers(0, 256, T))
    batch = batch_of(rows_of([(0, T)]), T + 2, store)
    at, tokens, targets = batch.masked, batch.tokens[0], batch.targets[0]
    assert len(at) == 0.15 * T and 1 <= at.min() and at.max() <= T, "[CLS] and [SEP] never are"
    assert unmasked(batch)[0, 1:-1].tolist() == store.tokens[:T].tolist()
    hidden = (tokens[at] == MASK).float().mean().item()
    same = (tokens[at] == targets[at]).float().mean().item()
    assert abs(hidden - 0.8) < 0.02 and abs(same - 0.1 - 0.1 / 256) < 0.015
    of_thousand = torch.bincount((at - 1) // 1000, minlength=100)
    assert (of_thousand - 150).abs().max() < 5 * (1000 * 0.15 * 0.85) ** 0.5, "spread over the row"


# ---- pairs


def test_a_batch_of_pairs_equals_a_worked_example():
    """Two pairs, of which one has a foreign second part, and a piece without a second part."""
    pairs = np.array([(0, 3, 0, 2, 5), (1, 3, 0, 1, 2), (6, 7, 0, 1, 7)], PAIR)
    batch = batch_of(Rows(pairs, np.array([0, 2, 3])), 12, nsp=True)
    assert unmasked(batch).tolist() == [
        [CLS, 1, 2, SEP, END, SEP, CLS, 2, SEP, 3, SEP, END],
        [CLS, 7, SEP, SEP, *[END] * 8],
    ]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
    assert batch.doc_ids[0].tolist() == [0] * 6 + [1] * 5 + [-1]
    assert batch.answers.tolist() == [0, 6] and len(batch.masked) == 3
    assert batch.targets[:, [0, 6]].tolist() == [[1, 0], [IGNORE, IGNORE]]


def test_no_two_tokens_of_a_step_share_random_numbers(monkeypatch):
    """Each has those of its place in the store, also in a foreign second part."""
    asked = Mock(side_effect=bert.bits)
    monkeypatch.setattr(bert, "bits", asked)
    pairs = np.array([(0, 8, 0, 4, 12), (8, 16, 0, 4, 4)], PAIR)
    batch_of(Rows(pairs, np.array([0, 2])), 24, in_memory(range(16)), nsp=True)
    assert sorted(asked.call_args.args[1].tolist()) == list(range(1, 17))


@pytest.mark.parametrize(("per_piece", "weights"), [(False, [1, 1, 1]), (True, [0.5, 0.5, 1])])
def test_all_answers_weigh_as_much_as_all_masked_tokens(per_piece, weights):
    """Of documents of 10 tokens and of 4, two tokens and one are masked."""
    store = in_memory(range(14))
    pairs = np.array([(0, 10, 0, 5, 5), (10, 14, 0, 2, 12)], PAIR)
    batch = batch_of(Rows(pairs, np.array([0, 2])), 24, store, nsp=True, per_piece=per_piece)
    of_target = batch.weights.flatten()
    assert of_target[batch.masked].tolist() == weights
    assert of_target[batch.answers].tolist() == [sum(weights) / 2] * 2
    assert of_target.sum() == 2 * sum(weights), "0 elsewhere"


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def lay_spans(lengths):
    """Return spans of pieces of these lengths in a store, with a gap between neighbours."""
    stop = np.cumsum(np.array(lengths) + 3)
    return np.stack((stop - lengths, stop), axis=1)


def lengths_of(pairs):
    return pairs["stop"] - pairs["start"]


@settings(max_examples=40)
@given(lengths, st.integers(0, 99))
def test_every_part_lies_in_one_piece_and_no_token_is_read_twice(lengths, key):
    spans = lay_spans(lengths)
    pairs = sentence_pairs(spans, key)
    assert pairs["start"].tolist() == spans[:, 0].tolist()
    answers, read = answers_of(pairs), []
    for (start, stop), pair, answer in zip(spans, pairs, answers, strict=True):
        size, first, second = stop - start, pair["first"], pair["second"]
        left = pair["stop"] - start - first
        read += [*range(start, start + first), *range(second, second + left)]
        assert left <= size - first, "no longer than the part that it replaces"
        if left == 0:
            assert first == size and answer == IGNORE, "an unpaired piece stays whole"
        else:
            assert max(size // 4, 1) <= first <= max(3 * size // 4, 1)
            (owner,) = (n for n, (a, b) in enumerate(spans) if a < second < b)
            assert second + left <= spans[owner, 1] and answer == (second != start + first)
    assert len(set(read)) == len(read)
    pairable = (np.array(lengths) > 1).sum()
    assert (answers == IGNORE).sum() == len(lengths) - pairable + pairable % 2

    order = np.random.default_rng(key).permutation(len(spans))
    assert np.array_equal(pairs[order], sentence_pairs(spans[order], key))


def test_copies_of_a_piece_are_cut_and_paired_differently():
    """Otherwise copies would be neighbours and swap equal parts. Another key also pairs anew."""
    spans = lay_spans([40] * 20)[np.random.default_rng(0).integers(0, 20, 400)]
    pairs = sentence_pairs(spans, 3)
    assert not np.array_equal(pairs["second"], sentence_pairs(spans, 4)["second"])
    assert answers_of(pairs).mean() > 0.4
    copies = spans[:, 0] == spans[0, 0]
    assert copies.sum() > 10 and len(set(pairs["first"][copies])) > 5


def test_with_an_odd_number_any_piece_can_stay_unpaired():
    """If it were always the last by length, the longest second part would always be genuine."""
    spans = lay_spans(list(range(20, 29)))
    alone = [answers_of(sentence_pairs(spans, key)) == IGNORE for key in range(200)]
    counts = np.sum(alone, axis=0)
    assert counts.sum() == 200 and counts.min() > 5


def test_half_of_the_second_parts_are_foreign_and_little_text_is_lost():
    def lost(spans, pairs):
        return 1 - lengths_of(pairs).sum() / (spans[:, 1] - spans[:, 0]).sum()

    spans = lay_spans(np.random.default_rng(0).integers(8, 254, 2000))
    pairs = sentence_pairs(spans, 1)
    assert answers_of(pairs).mean() == pytest.approx(0.5, abs=0.04)
    assert lost(spans, pairs) < 0.001
    few = lay_spans([253] * 16)
    assert np.mean([lost(few, sentence_pairs(few, key)) for key in range(50)]) < 0.03


def guess_rate(pairs):
    """Return how often a guess is right that looks only at whether a pair has the usual length."""
    answers, length = answers_of(pairs), lengths_of(pairs)
    is_full = length == np.median(length)
    return max((is_full == answers).mean(), (is_full != answers).mean())


def test_lengths_do_not_reveal_the_answer():
    """Most pieces fill a row. The control swaps second parts whatever their lengths."""
    spans = lay_spans([100] * 3000 + list(range(20, 100)) * 10)
    pairs = sentence_pairs(spans, 5)
    assert guess_rate(pairs) < 0.54
    answers, length = answers_of(pairs), lengths_of(pairs)
    for of_pair in (pairs["first"], length - pairs["first"], length):
        by_answer = [of_pair[answers == answer] for answer in (0, 1)]
        deviation = of_pair.std() * sum(1 / len(values) for values in by_answer) ** 0.5
        assert abs(by_answer[0].mean() - by_answer[1].mean()) < 4 * deviation

    naive, first = pairs.copy(), pairs["first"]
    second, left = spans[:, 0] + first, spans[:, 1] - spans[:, 0] - first
    chosen = np.arange(0, len(spans), 2)
    other = np.roll(chosen, 1)
    second[chosen], left[chosen] = second[other], left[other]
    naive["second"], naive["stop"] = second, spans[:, 0] + first + left
    assert guess_rate(naive) > 0.75
