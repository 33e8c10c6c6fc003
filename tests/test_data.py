"""From documents to batches: the example in the heads of data.py and plan.py, samples, and rows."""

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from conftest import refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_stores import BYTES_END as END
from small_stores import TOY, in_memory
from test_plan import plan

from data import GptTask, Rows, Samples, as_pieces, collate, loss_divisor, reshape, reshaped_len
from kernels.cross_entropy import IGNORE
from support.clock import Clock, Cursor


def letters(tokens):
    return "".join({END: ".", IGNORE: "_"}.get(token) or chr(token) for token in tokens)


def shown(batch, row):
    """Return a row as the head of data.py shows it: tokens, targets, positions, documents."""
    texts = [letters(field[row].tolist()) for field in (batch.tokens, batch.targets)]
    numbers = [field[row].tolist() for field in (batch.positions, batch.doc_ids)]
    return " ".join([*texts, *("".join(map(str, n)).replace("-1", "-") for n in numbers)])


def test_the_example_in_the_heads_of_data_and_plan_is_right():
    """It goes from three documents to the batches of two ranks."""
    store = in_memory(b"parsimony", b"is", b"less")
    assert letters(store.tokens.tolist()) == "parsimony.is.less."
    assert store.offsets.tolist() == [0, 10, 13, 18]
    flags = "--seq-len 8 --batch-tokens 32 --pack --pack-batch documents"
    first, second = (plan(store, flags, rank, world=2) for rank in range(2))
    assert first.samples.spans(np.arange(4)).tolist() == [[0, 8], [8, 10], [10, 13], [13, 18]]
    assert first.samples.shuffled(np.arange(4), seed=1337).tolist() == [3, 0, 2, 1]
    step = first(Clock())
    rows = step.window.rows
    assert rows.pieces["start"].tolist() == [0, 13, 10, 8]
    assert rows.pieces["stop"].tolist() == [8, 18, 13, 10]
    assert rows.offsets.tolist() == [0, 1, 3, 4]
    assert shown(step.batch, 0) == ".parsimo parsimon 01234567 00000000"
    assert shown(step.batch, 1) == "........ ________ 00000000 --------"
    batch = second(Clock()).batch
    assert shown(batch, 0) == ".less.is less.is. 01234012 00000111"
    assert shown(batch, 1) == "ny...... y.______ 01000000 00------"
    assert (step.divisor, step.after.step, step.after.consumed_tokens) == (18, 1, 18)
    assert step.after.cursor == Cursor(first_draw=4)


# ---- samples


def spans_of(samples):
    return [tuple(span) for span in samples.spans(np.arange(len(samples)))]


def test_samples_equal_a_worked_example():
    """Documents have 5 and 1 tokens with their end-of-text, which BERT's samples leave out."""
    assert spans_of(Samples(TOY, "pieces", 2)) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert spans_of(Samples(TOY, "rows", 4)) == [(0, 4), (4, 6)]
    assert spans_of(Samples(TOY, "pieces", 2, split="val")) == [(6, 8), (8, 9)]
    bert = Samples(TOY, "bert", 5)
    assert bert.max_piece_len == 3 and spans_of(bert) == [(0, 3), (3, 4)]


# ---- rows


def rows_of(*rows):
    """Make rows of pieces, each row given like [(0, 2), (5, 6)]."""
    spans = [span for row in rows for span in row]
    pieces = as_pieces(np.array(spans, np.int64).reshape(-1, 2))
    return Rows(pieces, np.cumsum([0, *map(len, rows)]))


def test_collate_refuses_a_token_outside_the_vocabulary():
    damaged = replace(TOY, tokens=np.where(TOY.tokens == 3, 999, TOY.tokens))
    assert re.search(r"token 999 .*vocabulary", refusal(collate, damaged, rows_of([(0, 4)]), 4))


spans = st.tuples(st.integers(0, 8), st.integers(1, 4)).map(lambda s: (s[0], min(sum(s), 9)))
drawn_rows = st.lists(st.lists(spans, max_size=3), min_size=1)


def width_of(rows, added=0):
    """Return the tokens of the longest row, with those added to each piece; at least 1."""
    return max(1, *(sum(stop - start + added for start, stop in row) for row in rows))


def columns_of(batch, row):
    """Return token, target, position and document at each place of a row."""
    fields = (batch.tokens, batch.targets, batch.positions, batch.doc_ids)
    return [*zip(*(field[row].tolist() for field in fields), strict=True)]


@settings(max_examples=40)
@given(drawn_rows, st.integers(0, 3))
@example([[(0, 4)], [(5, 9)]], 0)
def test_collated_rows_equal_the_definition(rows, padding):
    """Token by token, also for short rows and rows without a piece."""
    T = width_of(rows) + padding
    batch = collate(TOY, rows_of(*rows), T)
    for r, row in enumerate(rows):
        expected = []
        for number, (start, stop) in enumerate(row):
            text = TOY.tokens[start:stop].tolist()
            before = [int(TOY.tokens[start - 1]) if start else END, *text[:-1]]
            expected += zip(before, text, range(len(text)), [number] * 4, strict=False)
        expected += [(END, IGNORE, 0, -1)] * (T - len(expected))
        assert columns_of(batch, r) == expected
    assert batch.is_plain == all([b - a for a, b in row] == [T] for row in rows)


def test_every_document_counts_as_one():
    """Documents of 2 targets and 1 in the first row, of 3 in the second; an empty third row."""
    rows, per_piece = rows_of([(0, 2), (5, 6)], [(2, 5)], []), GptTask(per_piece=True)
    third = 1 / 3
    expected = torch.tensor([[0.5, 0.5, 1, 0], [third, third, third, 0], [0, 0, 0, 0]])
    assert torch.equal(per_piece.batch(TOY, rows, 4, rows).weights, expected)
    assert GptTask().batch(TOY, rows, 4, rows).weights is None
    assert [loss_divisor(task, TOY, rows) for task in (GptTask(), per_piece)] == [6, 3]


def parts_of(rows):
    """Return the parts in each row: (start, stop, seen)."""
    return [rows.pieces[a:b].tolist() for a, b in pairwise(rows.offsets)]


def test_reshape_equals_worked_examples():
    assert parts_of(reshape(np.array([[0, 10]]), 10, 4)) == [[(0, 4, 0)], [(4, 8, 0)], [(6, 10, 2)]]
    short = reshape(np.array([[0, 5]]), 16, 8)  # the stream's last sample
    assert parts_of(short) == [[(0, 5, 0)], []]
    # Rows are as short as their number allows, so their length grows in steps.
    assert {reshaped_len(1024, limit) for limit in range(512, 1017, 8)} == {512}
    assert [reshaped_len(1024, limit) for limit in (504, 1024)] == [344, 1024]


@settings(max_examples=40)
@given(st.integers(8, 600), st.integers(1, 600), st.integers(1, 600))
def test_reshape_predicts_every_token_once(seq_len, limit, size):
    limit, size = min(limit, seq_len), min(size, seq_len)
    length = reshaped_len(seq_len, limit)
    rows = parts_of(reshape(np.array([[1000, 1000 + size]]), seq_len, length))
    assert length <= limit
    predicted = [t for row in rows for start, stop, seen in row for t in range(start + seen, stop)]
    assert predicted == list(range(1000, 1000 + size))
    assert all(1000 <= start and stop - start <= length for row in rows for start, stop, _ in row)
    assert len(rows) == -(-seq_len // length)
    if size == seq_len:
        assert all(stop - start == length for row in rows for start, stop, _ in row)
        assert len(rows) * length < seq_len + 8 * len(rows) or length == limit
