"""What is held out: by the hash of a document, or the end of a text that has no documents."""

from pathlib import Path

import pytest
from conftest import write_lines
from hypothesis import given
from hypothesis import strategies as st

from support.text.corpus import Corpus, Document, find_cut, hold_out_tail, is_held_out


def sides(path: Path, *options, **more) -> tuple[list[str], list[str]]:
    """Training texts and held-out texts."""
    parts = list(Corpus([path], *options, **more).parts())
    return [p.text for p in parts if not p.held_out], [p.text for p in parts if p.held_out]


# --- by the hash


def test_a_document_is_held_out_by_its_id_or_else_by_its_text():
    # crc32("a") = 3904355907, "b" 1908338681 and "c" 112844655 are odd, "d" 2564639436 is even.
    for documents in (
        [Document(letter, "the same text") for letter in "abcd"],
        [Document(None, letter) for letter in "abcd"],
    ):
        assert [is_held_out(d, 2) for d in documents] == [False, False, False, True]
        assert not any(is_held_out(d, 0) for d in documents)
        assert all(is_held_out(d, 1) for d in documents)


def test_a_line_added_on_top_moves_no_document_to_the_other_side(tmp_path):
    texts = [f"document {number}" for number in range(200)]
    lines = [{"text": text} for text in ("a new one", *texts)]
    before = sides(write_lines(tmp_path / "a.jsonl", lines[1:]))
    after = sides(write_lines(tmp_path / "b.jsonl", lines))
    assert len(before[1]) > 3
    assert set(before[0]) < {*after[0], *after[1]} and set(before[1]) <= set(after[1])
    assert {*after[0], *after[1]} - {*before[0], *before[1]} == {"a new one"}


def test_of_many_documents_only_some_are_read_to_find_the_rule(tmp_path):
    lines = [{"text": f"document {i}"} for i in range(1000)]
    source = write_lines(tmp_path / "a.jsonl", [*lines, "nonsense"])
    corpus = Corpus([source])  # reads until both sides have a text, long before the end
    with pytest.raises(ValueError, match=r"a\.jsonl:1001: "):
        list(corpus.parts())


def test_documents_cut_from_plain_text_are_held_out_by_their_hashes(tmp_path):
    texts = [f"document {number}" for number in range(100)]
    for name, split_on, mark in (("a.txt", "blank-line", "\n\n"), ("b.txt", r"\n---\n", "\n---\n")):
        (tmp_path / name).write_text(mark.join(texts))
        training, held_out = sides(tmp_path / name, split_on=split_on)
        assert held_out == [text for text in texts if is_held_out(Document(None, text), 20)]
        assert sorted(training + held_out) == sorted(texts)


# --- the tail


def test_a_single_text_holds_out_its_end_cut_at_a_line(tmp_path):
    """Also with a name whose hash is held out, as one in 20 is: training would get nothing."""
    name = next(f"{i}.txt" for i in range(1000) if is_held_out(Document(f"{i}.txt", ""), 20))
    text = "".join(f"line {number}\n" for number in range(1000))
    for path in (tmp_path / "input.txt", tmp_path / name):
        path.write_text(text)
        (training,), (held_out,) = sides(path)
        assert training + held_out == text
        assert training.endswith("\n") and held_out.startswith("line ")
        assert len(held_out) == pytest.approx(len(text) / 20, abs=12)
        assert sides(path, 0) == ([text], [])
        assert sides(path, 1) == ([], [text])


@given(st.lists(st.text("ab \n", max_size=40), max_size=6), st.integers(2, 30))
def test_the_tail_of_any_documents_is_all_text_in_order_and_on_both_sides(texts, holdout):
    characters = sum(map(len, texts))
    if characters < 2:
        return
    tail = -(-characters // holdout)
    documents = [Document(None, text) for text in texts]
    parts = list(hold_out_tail(documents, characters - tail, holdout))
    assert "".join(part.text for part in parts) == "".join(texts)
    held_out = [part.held_out for part in parts if part.text]
    assert held_out == sorted(held_out) and set(held_out) == {False, True}
    size = sum(len(part.text) for part in parts if part.held_out)
    assert tail / 2 <= size <= tail * 1.5 + 1


def test_where_a_text_is_cut():
    assert find_cut("one\ntwo\nthree", 10, 5) == 8, "the example"
    assert find_cut("one\ntwo\nthree", 4, 5) == 4, "a line begins just there"
    assert find_cut("xxxxxx\nthree", 4, 5) == 7, "no line ends before: the next one"
    assert find_cut("title\n" + "word " * 100, 300, 20) == 296, "no line within reach: a blank"
    assert find_cut("title\n" + "x" * 100, 50, 20) == 50, "nor a blank: just there"
    assert find_cut("x" * 9 + "\n", 5, 9) == 5, "never behind the last character"


def test_a_few_documents_hold_out_the_last_ones(tmp_path):
    texts = [letter * 99 + "\n" for letter in "abcdefghij"]
    names = [i for i in map(str, range(100)) if not is_held_out(Document(i, ""), 5)]
    lines = [{"id": i, "text": text} for i, text in zip(names, texts, strict=False)]
    write_lines(tmp_path / "a.jsonl", lines)
    assert sides(tmp_path / "a.jsonl", 5) == (texts[:8], texts[8:])


@pytest.mark.parametrize("holdout", [2, 10**9])
def test_no_text_is_too_short_but_one_character(tmp_path, holdout):
    (tmp_path / "a.txt").write_text("ab")
    assert sides(tmp_path / "a.txt", holdout) == (["a"], ["b"])
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=f"--holdout {holdout}"):
        Corpus([tmp_path / "a.txt"], holdout)
