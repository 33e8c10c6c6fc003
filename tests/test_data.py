"""How a batch comes about: the walk in the heads of data.py and plan.py, rows, BERT's masks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import BYTES_END as END
from small_stores import TOY, in_memory
from test_plan import SPECIAL_IDS, plan

from bert import Pairs, mask_tokens, masked_tokens
from data import Rows, batch_of, collate, places, reshape, reshaped_len, shares_of
from kernels.cross_entropy import IGNORE
from model import Batch
from support.clock import Clock, Cursor

FEW = settings(max_examples=40, deadline=None)


def letters(tokens):
    return "".join({END: ".", IGNORE: "_"}.get(token) or chr(token) for token in tokens)


def test_the_walk_in_the_heads_of_data_and_plan():
    """From three documents to the batches of two ranks."""
    store = in_memory(b"parsimony", b"is", b"less")
    assert letters(store.tokens.tolist()) == "parsimony.is.less."
    assert store.offsets.tolist() == [0, 10, 13, 18]
    flags = "--seq-len 8 --batch-tokens 32 --pack --pack-batch documents"
    first, second = (plan(store, flags, rank, world=2) for rank in range(2))
    assert first.samples.spans(np.arange(4)).tolist() == [[0, 8], [8, 10], [10, 13], [13, 18]]
    assert first.samples.shuffled(np.arange(4), seed=1337).tolist() == [3, 0, 2, 1]
    rows = first.packed_rows(Clock()).rows
    assert (rows.start.tolist(), rows.stop.tolist()) == ([0, 13, 10, 8], [8, 18, 13, 10])
    assert rows.offsets.tolist() == [0, 1, 3, 4]

    step = first(Clock())
    batch = step.batch
    assert [letters(row) for row in batch.tokens.tolist()] == [".parsimo", "........"]
    assert [letters(row) for row in batch.targets.tolist()] == ["parsimon", "________"]
    assert batch.positions.tolist() == [[*range(8)], [0] * 8]
    assert batch.doc_ids.tolist() == [[0] * 8, [-1] * 8]
    batch = second(Clock()).batch
    assert [letters(row) for row in batch.tokens.tolist()] == [".less.is", "ny......"]
    assert [letters(row) for row in batch.targets.tolist()] == ["less.is.", "y.______"]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.doc_ids.tolist() == [[0] * 5 + [1] * 3, [0] * 2 + [-1] * 6]
    assert (step.targets, step.after.step, step.after.consumed_tokens) == (18, 1, 18)
    assert step.after.cursor == Cursor(first_draw=4)


# ---- rows


def rows_of(*rows):
    """[(0, 2), (5, 6)] and others as rows of pieces."""
    pieces = [piece for row in rows for piece in row]
    return Rows.of(np.array(pieces, np.int64).reshape(-1, 2), np.cumsum([0, *map(len, rows)]))


def pieces_of(rows):
    return [[part[:2] for part in parts] for parts in parts_of(rows)]


def test_what_was_a_target_before_is_context_only():
    batch = collate(TOY, Rows.of(np.array([[1, 5]]), seen=3), 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4]]
    assert batch.targets.tolist() == [[IGNORE, IGNORE, IGNORE, END]]
    assert batch.positions is None and batch.doc_ids is None, "whole rows need no metadata"


def test_collate_refuses_a_token_outside_the_vocabulary():
    damaged = replace(TOY, tokens=np.array([1, 2, 999, 4, END, END, 7, 8, END], dtype=np.uint16))
    with pytest.raises(ValueError, match=r"token 999 .*vocabulary"):
        collate(damaged, rows_of([(0, 4)]), 4)


rows = st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=3), min_size=1)


@FEW
@given(rows, st.booleans())
def test_rows_are_laid_out_piece_by_piece(drawn, bert):
    """Against the definition, token by token; rows without a piece and short rows among them."""
    laid = [[(a, min(a + n, 9)) for a, n in row if a < 9] for row in drawn]
    special_ids = SPECIAL_IDS if bert else None
    batch = collate(TOY, rows_of(*laid), 18, special_ids).with_documents()
    for r, row in enumerate(laid):
        expected = []  # token, target, position, document
        for number, (start, stop) in enumerate(row):
            text = TOY.tokens[start:stop].tolist()
            if bert:
                tokens = [SPECIAL_IDS.cls, *text, SPECIAL_IDS.sep]
                targets = [IGNORE, *text, IGNORE]
            else:
                tokens = [int(TOY.tokens[start - 1]) if start else END, *text[:-1]]
                targets = text
            expected += zip(tokens, targets, range(len(tokens)), [number] * 6, strict=False)
        expected += [(END, IGNORE, 0, -1)] * (18 - len(expected))
        columns = zip(*(field[r].tolist() for field in batch), strict=True)
        assert [tuple(column) for column in columns] == expected


@FEW
@given(rows)
def test_rows_are_taken_and_joined(drawn):
    drawn = [[(a, a + n) for a, n in row] for row in drawn]
    all_rows = rows_of(*drawn)
    numbers = np.arange(len(drawn))[::-1]
    assert pieces_of(all_rows) == drawn
    assert pieces_of(all_rows.take(numbers)) == drawn[::-1]
    assert pieces_of(Rows.join([all_rows, all_rows.take(numbers[:1])])) == [*drawn, drawn[-1]]
    sums = [sum(stop - start for start, stop in row) for row in drawn]
    assert all_rows.sums(all_rows.stop - all_rows.start).tolist() == sums


@pytest.mark.parametrize("special_ids", [None, SPECIAL_IDS])
def test_blank_rows_are_all_padding(special_ids):
    """With others, or alone as the share of a rank: no document, no target, nothing masked."""
    rows = rows_of([(0, 5)], [(2, 5)], [(5, 6)])
    assert [rows.of_rank(rank, 2)[0].tolist() for rank in range(2)] == [[0, 3], [1, 2]]
    for _, own in (rows.of_rank(0, 2), rows.of_rank(3, 4)):
        batch = batch_of(TOY, own, seq_len=8, special_ids=special_ids, seeds=torch.tensor([1, 2]))
        assert (batch.doc_ids[-1] == -1).all() and (batch.positions[-1] == 0).all()
        assert (batch.targets[-1] == IGNORE).all()
        assert (batch.tokens[-1] == END).all()
        assert (shares_of(batch, True, None)[-1] == 0).all()


def parts_of(rows):
    """Of each row, the parts in it: (start, stop, seen)."""
    parts = list(zip(rows.start.tolist(), rows.stop.tolist(), rows.seen, strict=True))
    return [parts[a:b] for a, b in pairwise(rows.offsets)]


def test_reshape_worked_examples():
    assert parts_of(reshape(np.array([[0, 10]]), 10, 4)) == [[(0, 4, 0)], [(4, 8, 0)], [(6, 10, 2)]]
    even = reshape(np.array([[0, 256], [300, 556]]), 256, 128)
    assert parts_of(even) == [[(0, 128, 0)], [(128, 256, 0)], [(300, 428, 0)], [(428, 556, 0)]]
    short = reshape(np.array([[0, 5]]), 16, 8)  # the stream's last sample
    assert parts_of(short) == [[(0, 5, 0)], []]
    # Rows are as short as their number allows, so they get longer in stairs.
    assert {reshaped_len(1024, limit) for limit in range(512, 1017, 8)} == {512}
    assert [reshaped_len(1024, limit) for limit in (504, 1024)] == [344, 1024]
    stairs = dict.fromkeys(reshaped_len(256, limit) for limit in range(64, 257, 8))
    assert list(stairs) == [64, 88, 128, 256], "the whole curriculum of a row of 256"


@FEW
@given(st.integers(8, 600), st.integers(1, 600), st.integers(1, 600))
def test_reshape_loses_nothing_and_predicts_nothing_twice(seq_len, limit, size):
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


# ---- masks, and how targets count


def random_bits(*shape):
    return torch.randint(0, 2**63 - 1, (2, *shape), generator=torch.Generator().manual_seed(0))


def test_masking_of_bert():
    T = 100_000
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens.clone(), None, None)
    batch.targets[0, :1000] = IGNORE  # [CLS] and the like: never masked
    masked = mask_tokens(batch, random_bits(1, T), SPECIAL_IDS)
    chosen = masked.targets != IGNORE
    assert not chosen[0, :1000].any()
    assert torch.equal(masked.tokens[~chosen], tokens[~chosen])
    assert torch.equal(masked.targets[chosen], tokens[chosen])
    assert chosen.sum() == 0.15 * 99_000
    hidden = (masked.tokens[chosen] == SPECIAL_IDS.mask).float().mean().item()
    same = (masked.tokens[chosen] == tokens[chosen]).float().mean().item()
    assert abs(hidden - 0.8) < 0.02 and abs(same - 0.1 - 0.1 / 256) < 0.015
    where = chosen[0, 1000:].view(99, 1000).sum(1).float()
    assert (where - 150).abs().max() < 5 * (1000 * 0.15 * 0.85) ** 0.5, "all along the row"


def test_every_document_of_a_row_is_masked_for_itself():
    """As many tokens of each as if it were alone, and the very same ones for the same bits."""
    lengths = [1, 3, 4, 17, 40]
    doc_ids = torch.repeat_interleave(
        torch.tensor([0, 1, 2, 3, 4, -1]), torch.tensor([*lengths, 3])
    )
    tokens = torch.arange(len(doc_ids)) % 256
    targets = torch.where(doc_ids < 0, IGNORE, tokens)
    fields = [field[None] for field in (tokens, targets, tokens, doc_ids)]
    bits = random_bits(1, len(doc_ids))
    packed = mask_tokens(Batch(*fields), bits, SPECIAL_IDS)
    counts = [int((packed.targets[0, doc_ids == n] >= 0).sum()) for n in range(5)]
    assert counts == [1, 1, 1, 3, 6] == masked_tokens(np.array(lengths)).tolist()
    for n in range(5):
        part = doc_ids == n
        alone = Batch(*(field[:, part] for field in fields))
        alone = mask_tokens(alone, bits[:, :, part], SPECIAL_IDS)
        assert torch.equal(alone.tokens, packed.tokens[:, part])
        assert torch.equal(alone.targets, packed.targets[:, part])


def test_every_document_counts_as_one():
    """Documents of two targets and of one in the first row, of three in the second."""
    batch = collate(TOY, rows_of([(0, 2), (5, 6)], [(2, 5)]), 4)
    third = 1 / 3
    expected = torch.tensor([[0.5, 0.5, 1, 0], [third, third, third, 0]])
    assert torch.equal(shares_of(batch, True, None), expected)
    whole = collate(TOY, rows_of([(0, 4)]), 4)
    assert torch.equal(shares_of(whole, True, None), torch.full((1, 4), 0.25))
    assert shares_of(whole, False, None) is None


# ---- pairs


def test_collate_of_pairs_worked_example():
    """The first part of one piece, the second of another; and a piece that has no second part."""
    pairs = Pairs(first=np.array([2, 1, 1]), second=np.array([5, 2, 7]))
    spans = np.array([[0, 3], [1, 3], [6, 7]])
    rows = Rows.of(spans, np.array([0, 2, 3]), pairs=pairs)
    batch = collate(TOY, rows, 12, SPECIAL_IDS)
    cls, sep = SPECIAL_IDS.cls, SPECIAL_IDS.sep
    assert batch.tokens.tolist() == [
        [cls, 1, 2, sep, END, sep, cls, 2, sep, 3, sep, END],
        [cls, 7, sep, sep, *[END] * 8],
    ]
    no = IGNORE
    assert batch.targets.tolist() == [
        [no, 1, 2, no, END, no, no, 2, no, 3, no, no],
        [no, 7, *[no] * 10],
    ]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
    assert batch.doc_ids[0].tolist() == [0] * 6 + [1] * 5 + [-1]
    answered = batch_of(TOY, rows, 12, SPECIAL_IDS, torch.tensor([1, 2]))
    assert answered.targets[:, [0, 6]].tolist() == [[1, 0], [no, no]]


def test_an_answer_counts_beside_the_tokens():
    """Of two answers each counts what three of the six tokens count together."""
    targets = torch.tensor([[1, 5, 5, IGNORE, 0, 6, IGNORE, IGNORE]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    batch = Batch(targets, targets, positions, torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]]))
    assert shares_of(batch, False, 3).tolist() == [[3, 1, 1, 0, 3, 1, 0, 0]]
    assert shares_of(batch, True, 1).tolist() == [[1, 0.5, 0.5, 0, 1, 1, 0, 0]]


def test_a_token_has_its_place_in_the_store_wherever_its_piece_lies():
    """Special tokens count as text; where a rank has no piece at all there are places too."""
    pieces = np.array([[0, 2], [2, 5], [5, 6]])
    for order in ([0, 1, 2], [2, 0, 1]):
        rows = Rows.of(pieces[order], np.array([0, 2, 3, 3]))
        batch = collate(TOY, rows, 6)
        where = places(rows, batch)
        for piece, (start, stop) in enumerate(pieces[order]):
            row, number = [(0, 0), (0, 1), (1, 0)][piece]
            mine = where[row][batch.doc_ids[row] == number]
            assert mine.tolist() == list(range(start, stop))
    empty = Rows.of(pieces[:0], np.array([0, 0]))
    assert places(empty, collate(TOY, empty, 6)).shape == (1, 6)
