"""A text that is encoded in pieces has the tokens of the whole."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.text import encoding, tokenizer
from support.text.encoding import encode, pieces_of
from support.text.holdout import Part

ENCODINGS = [tokenizer.get_encoding(name) for name in ("pd4k", "bytes")]
# Letters, digits, marks, contractions; blanks that not every library calls so.
CHARACTERS = "ab1.'st \n\t\r\x1c\x85\xa0\u2003é世🙂"


def ids_of(parts, tokens):
    return [done.ids.tolist() for done in encode(parts, tokens, np.dtype("uint16"))]


def tokens_in_pieces(text, tokens):
    parts = [Part(piece, False, ends=False) for piece in pieces_of(text)]
    return [token for ids in ids_of(parts, tokens) for token in ids]


@pytest.mark.parametrize("tokens", ENCODINGS, ids=lambda tokens: tokens.name)
@given(st.text(CHARACTERS, max_size=60), st.integers(1, 9))
def test_pieces_have_the_tokens_of_the_whole(tokens, text, characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "CHUNK_CHARACTERS", characters)
        assert "".join(pieces_of(text)) == text
        assert tokens_in_pieces(text, tokens) == tokens.encode_ordinary(text)


def test_where_a_text_is_cut_worked_by_hand_and_cut_elsewhere(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 5)
    assert list(pieces_of("one two\n\nend")) == ["one two", "\n\nend"], "the docstring's"
    assert list(pieces_of("no place for a cut"[:5])) == ["no pl"]
    assert list(pieces_of("onelongword" * 3)) == ["onelongword" * 3]
    assert list(pieces_of("")) == [""]
    monkeypatch.setattr(encoding, "CUT", re.compile(r"(?=.)", re.DOTALL))
    text = "one two  three\n\n  four " * 3
    assert tokens_in_pieces(text, ENCODINGS[0]) != ENCODINGS[0].encode_ordinary(text)


def test_only_the_last_piece_of_a_document_ends_it():
    parts = [Part("a b", False, ends=False), Part(" c", False), Part("", False), Part("d", True)]
    end = ENCODINGS[1].eot_token
    assert ids_of(parts, ENCODINGS[1]) == [[97, 32, 98], [32, 99, end], [], [100, end]]
