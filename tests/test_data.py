"""How a batch comes about: rows laid out, BERT's masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_stores import BYTES_END as END
from small_stores import TOY

from data import Rows, collate, places
from kernels.cross_entropy import IGNORE
from support.rows.batch import Batch, shares_of, with_answers
from support.rows.bert import Pairs, SpecialIds, mask_tokens, masked_tokens
from support.text.tokenizer import get_encoding

SPECIAL_IDS = SpecialIds.of(get_encoding("bytes"))


def rows_of(*rows):
    """[(0, 2), (5, 6)] and others as rows of pieces."""
    pieces = [piece for row in rows for piece in row]
    return Rows.of(np.array(pieces, np.int64).reshape(-1, 2), np.cumsum([0, *map(len, rows)]))


def test_collate_worked_example():
    batch = collate(TOY, rows_of([(0, 2), (5, 6)], [(2, 5)]), 4)
    assert batch.tokens.tolist() == [[END, 1, END, END], [2, 3, 4, END]]
    assert batch.targets.tolist() == [[1, 2, END, IGNORE], [3, 4, END, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    assert batch.doc_ids.tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]


def test_what_was_a_target_before_is_context_only():
    batch = collate(TOY, Rows.of(np.array([[1, 5]]), seen=3), 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4]]
    assert batch.targets.tolist() == [[IGNORE, IGNORE, IGNORE, END]]


def test_collated_whole_rows_need_no_metadata():
    batch = collate(TOY, rows_of([(0, 4)]), 4)
    assert batch.positions is None and batch.doc_ids is None


def test_collate_for_a_bert_puts_each_piece_between_cls_and_sep():
    batch = collate(TOY, rows_of([(0, 2), (6, 7)]), 8, SPECIAL_IDS)
    cls, sep = SPECIAL_IDS.cls, SPECIAL_IDS.sep
    assert batch.tokens.tolist() == [[cls, 1, 2, sep, cls, 7, sep, END]]
    ignore = IGNORE
    assert batch.targets.tolist() == [[ignore, 1, 2, ignore, ignore, 7, ignore, ignore]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_collate_refuses_a_token_outside_the_vocabulary():
    damaged = replace(TOY, tokens=np.array([1, 2, 999, 4, END, END, 7, 8, END], dtype=np.uint16))
    with pytest.raises(ValueError, match=r"token 999 .*vocabulary"):
        collate(damaged, rows_of([(0, 4)]), 4)


rows = st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=3), min_size=1)


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
        assert [tuple(column) for column in zip(*(f[r].tolist() for f in batch), strict=True)] == (
            expected
        )


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
    rows = rows_of([(0, 5)], [(5, 6)]).with_blanks(4)
    assert len(rows) == 4 and rows.sums(rows.stop - rows.start).tolist() == [5, 1, 0, 0]
    for numbers in ([0, 1, 2, 3], [2, 3]):
        batch = collate(TOY, rows.take(np.array(numbers)), 8, special_ids)
        if special_ids:
            batch = mask_tokens(batch, random_bits(2, len(numbers), 8), special_ids)
        assert (batch.doc_ids[-2:] == -1).all() and (batch.positions[-2:] == 0).all()
        assert (batch.targets[-2:] == IGNORE).all()
        assert (batch.tokens[-2:] == END).all()
        assert (shares_of(batch, True, None)[-2:] == 0).all()


def pieces_of(rows):
    spans = list(zip(rows.start.tolist(), rows.stop.tolist(), strict=True))
    return [spans[a:b] for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)]


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
    doc_ids = torch.tensor(
        [n for n, length in enumerate(lengths) for _ in range(length)] + [-1] * 3
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


# Pairs


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
    answered = with_answers(batch, pairs.answers(*spans.T))
    assert answered.targets[:, [0, 6]].tolist() == [[1, 0], [no, no]]
    assert answered.targets[answered.targets != batch.targets].tolist() == [1, 0]


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
