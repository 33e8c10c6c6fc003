"""A text that is encoded in pieces has the tokens of the whole.

python -m pytest tests/test_encoding.py
"""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.text import encoding, tokenizer
from support.text.encoding import Batch, Piece, encode_batch, pieces_of

ENCODINGS = [tokenizer.get_encoding(name) for name in ("pd4k", "bytes")]
# Letters, digits, marks, contractions; blanks that not every library calls so.
CHARACTERS = "ab1.'st \n\t\r\x1c\x85\xa0\u2003é世🙂"


def cut_at(monkeypatch, characters):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", characters)


def tokens_in_pieces(text, one):
    pieces = [Piece(part, False, False, None) for part in pieces_of(text)]
    done = encode_batch(Batch(pieces, 0), one, np.dtype("uint16"))
    return np.concatenate([np.empty(0), *(piece.ids for piece in done.training)]).tolist()


@pytest.mark.parametrize("one", ENCODINGS, ids=lambda one: one.name)
@given(st.text(CHARACTERS, max_size=60), st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(one, text, characters):
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, characters)
        assert "".join(pieces_of(text)) == text
        assert tokens_in_pieces(text, one) == one.encode_ordinary(text)


def test_where_a_text_is_cut_worked_by_hand(monkeypatch):
    cut_at(monkeypatch, 5)
    assert list(pieces_of("one two\n\nend")) == ["one two", "\n\nend"], "the docstring's"
    assert list(pieces_of("no place for a cut"[:5])) == ["no pl"]
    assert list(pieces_of("onelongword" * 3)) == ["onelongword" * 3]
    assert list(pieces_of("")) == [""]


def test_negative_control_cut_anywhere_the_tokens_are_others(monkeypatch):
    cut_at(monkeypatch, 5)
    monkeypatch.setattr(encoding, "CUT", re.compile(r"(?=.)", re.DOTALL))
    text = "one two  three\n\n  four " * 3
    assert tokens_in_pieces(text, ENCODINGS[0]) != ENCODINGS[0].encode_ordinary(text)


def test_only_the_last_piece_of_a_document_ends_it():
    pieces = [Piece("a b", False, False, "x"), Piece(" c", True, False, "x")]
    pieces += [Piece("", True, False, None), Piece("d", True, True, "y")]
    done = encode_batch(Batch(pieces, 0), ENCODINGS[1], np.dtype("uint16"))
    end = ENCODINGS[1].eot_token
    assert [piece.ids.tolist() for piece in done.training] == [[97, 32, 98], [32, 99, end]]
    assert [piece.ends for piece in done.training] == [False, True]
    assert [piece.ids.tolist() for piece in done.held_out] == [[100, end]]
    assert done.documents_read == 3
