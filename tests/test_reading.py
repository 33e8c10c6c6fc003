"""What is read from files and folders, and what damaged files lead to.

And what is held out: by the hash of a document, or the end of a text that has no documents.
"""

import gzip
import io
import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
from conftest import TINY, write_lines
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

import prepare
from support.text import reading, tokenizer
from support.text.corpus import Corpus, Document, find_cut, hold_out_tail, is_held_out, separator


def read(*paths, **options):
    return list(Corpus(paths, 0, **options).documents())


def test_plain_compressed_and_folder_give_the_same_documents(tmp_path):
    lines = gzip.decompress(TINY.read_bytes())
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    rows = lines.splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(rows[:100]))
    (folder / "deeper" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[100:])))
    (folder / ".hidden").write_bytes(b"\xff")
    (tmp_path / "plain.jsonl").write_bytes(lines.replace(b"\n", b"\n\n"))  # and blank lines
    expected = read(TINY)
    assert len(expected) == 481 and all(document.id for document in expected)
    for source in (folder, tmp_path / "plain.jsonl"):
        corpus = Corpus([source], 0)
        with tqdm(total=0, file=io.StringIO()) as bar:
            assert list(corpus.documents(bar)) == expected
            assert bar.n == sum(file.bytes for file in corpus.files)


def test_ids_and_texts_of_every_form(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_bytes("ligne\r\né".encode())
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "more": {}}\n\n{"id": null, "text": "b"}\n{"text": null}\n'
        '{"id": 7, "text": ""}'
    )
    lines = [(None, "a"), (None, "b"), (None, ""), ("7", "")]
    assert read(tmp_path) == [*lines, ("b/note.txt", "ligne\r\né")]
    assert read(str(tmp_path / "b" / "note.txt")) == [("note.txt", "ligne\r\né")]


GOOD = b'{"id": "a", "text": "one"}\n'
PACKED = gzip.compress(GOOD * 2000)
BAD_INPUTS = [
    ("x.jsonl", GOOD * 2 + b"nonsense\n" + GOOD, ":3"),
    ("x.jsonl", GOOD + GOOD[:-4], ":2"),  # truncated
    ("x.jsonl", GOOD + b"[1]\n", ":2"),
    ("x.jsonl", b'{"id": "a"}\n', ":1"),
    ("x.jsonl", GOOD * 4 + b'{"text": 5}', ":5"),
    ("x.jsonl", GOOD + b'{"text": "\xff"}', ":2"),
    ("x.jsonl", GOOD + b'{"id": "\\ud83d", "text": ""}', ":2"),  # half of a surrogate pair
    ("x.jsonl.gz", PACKED[:-8] + bytes(8), ""),  # a checksum that fails
    ("x.jsonl.gz", PACKED[:-20], ""),
    ("x.txt", b"abc\xff", ""),
    ("x.csv", b"text,id\na,1\n", ""),
    ("x", b' [{"text": "a"}]', ""),
]


@pytest.mark.parametrize(("name", "content", "line"), BAD_INPUTS)
def test_bad_input_is_one_line_that_names_the_file_and_its_line(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    documents = []
    with pytest.raises(ValueError, match=f"^{tmp_path / name}{line}: .*$") as refused:
        documents.extend(Corpus([tmp_path / name], 0).documents())
    assert not line or f":{len(documents) + 1}: " in str(refused.value)


def test_missing_input_is_named_before_anything_is_read(tmp_path):
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    (tmp_path / "empty" / ".git" / "HEAD").touch()  # a hidden folder hides what is in it
    os.mkfifo(tmp_path / "pipe")
    for missing in ("none.jsonl", "empty", "pipe"):
        with pytest.raises(ValueError, match=missing):
            Corpus([TINY, tmp_path / missing])


@pytest.mark.parametrize("split_on", [None, "blank-line"])
def test_in_a_folder_files_that_are_not_text_are_skipped(tmp_path, monkeypatch, split_on):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 16)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20))
    (tmp_path / "c.txt").write_bytes(b"text\n\n" * 5000 + b"\xff")  # not text, but only at its end
    (tmp_path / "d.txt").write_text("two")
    corpus = Corpus([tmp_path], 0, split_on)
    for _ in range(2):  # and are counted once
        assert [document.text for document in corpus.documents()] == ["one", "two"]
        assert [path.name for path in corpus.skipped] == ["b.png", "c.txt"]
    (tmp_path / "e.jsonl").write_text("nonsense")  # its name says what it should be
    with pytest.raises(ValueError, match=r"e\.jsonl:1: "):
        read(tmp_path)


def test_a_named_file_that_is_not_text_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4)
    text = "né🙂 " * 3000  # characters that lie across the blocks
    (tmp_path / "good.txt").write_text(text)
    assert read(tmp_path / "good.txt") == [Document("good.txt", text)]
    for end in (b"\xff", "é".encode()[:1]):  # no character, and half of one
        (tmp_path / "bad.txt").write_bytes(text.encode() + end)
        with pytest.raises(ValueError, match=r"bad\.txt: is not text in UTF-8"):
            read(tmp_path / "bad.txt")


# --- plain text cut into documents


def test_blank_lines_separate_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n \none\ntwo\n\t\n\r\n\nthree\n\nfour\n")
    texts = [(None, text) for text in ("one\ntwo", "three", "four")]
    assert read(tmp_path / "a.txt", split_on="blank-line") == texts


@pytest.mark.parametrize("mark", ["|", "ab", "aab", "\n---\n", "é🙂"])
def test_cutting_equals_split_wherever_blocks_end(mark):
    draw = random.Random(0)
    for size in (1, 2, 7, 100):
        for _ in range(20):
            text = "".join(draw.choice([*mark, mark, "x"]) for _ in range(40))
            blocks = (text[i : i + size] for i in range(0, len(text), size))
            assert list(reading.cut(blocks, mark)) == text.split(mark)


def test_a_separator_is_read_with_its_escapes():
    assert separator("blank-line") == "blank-line"
    assert separator(r"\n---\n") == "\n---\n"
    assert separator(r"é\t\\n") == "é\t\\n"
    for wrong in ("", "\\d", "---\\"):
        with pytest.raises(ValueError, match=r"--split-on .* needs"):
            separator(wrong)


def test_cutting_is_refused_unless_there_is_plain_text(tmp_path):
    with pytest.raises(ValueError, match=r"--split-on: .*JSON or parquet"):
        read(TINY, split_on="blank-line")
    (tmp_path / "a.txt").write_text("one||two|")
    with pytest.raises(ValueError, match=r"--text-column body: these inputs are plain text"):
        read(tmp_path / "a.txt", text_column="body")
    documents = read(TINY, tmp_path / "a.txt", split_on="|")
    assert documents[481:] == [(None, "one"), (None, "two")]


# --- the bar


def test_a_terminal_shows_both_passes(tmp_path, monkeypatch, capsys):
    source = tmp_path / "in.txt"
    source.write_text("some words of text\n" * 50_000)
    bytes_only = tokenizer.get_encoding("bytes")
    prepare.prepare([source], tmp_path / "quiet", bytes_only, "bytes")
    assert capsys.readouterr().err == "", "there is no terminal"
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    prepare.prepare([source], tmp_path / "store", bytes_only, "bytes")
    for title in ("what to hold out", "encoding"):
        assert re.search(rf"{title}: .*/950k", shown.getvalue())


# --- held out


def sides(path: Path, *options, **more) -> tuple[list[str], list[str]]:
    """Training texts and held-out texts."""
    parts = list(Corpus([path], *options, **more).parts())
    return [p.text for p in parts if not p.held_out], [p.text for p in parts if p.held_out]


# --- held out by the hash


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


# --- held out: the tail


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
    assert tail / 2 <= sum(len(part.text) for part in parts if part.held_out) <= tail * 1.5 + 1


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


LINES = [{"text": f'a "{n}",\nb', "id": str(n), "n": n} for n in range(3)]
HOW = {"": lambda b: b, ".gz": gzip.compress}


@pytest.mark.parametrize("compressed", HOW)
@pytest.mark.parametrize("name", ["a", "a.txt", "a.ndjson", "a.jsonl"])
def test_json_lines_are_recognised(name, compressed, tmp_path):
    """Also with a name that says nothing of the compression, and with Excel's mark of UTF-8."""
    content = "\n\n" + "".join(json.dumps(line) + "\n" for line in LINES)
    for suffix, begins in (("", "\ufeff"), (compressed, "")):
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(HOW[compressed](f"{begins}{content}".encode()))
        documents = read(file)
        assert [(d.text, d.id) for d in documents] == [(x["text"], x["id"]) for x in LINES]
        assert read(file, text_column="id")[0].text == "0"
        with pytest.raises(ValueError, match=r"strings are under text, id: .*--text-column"):
            read(file, text_column="body")
        file.write_bytes(HOW[compressed]("né\r\n".encode() * 1000))
        if name == "a":
            assert read(file) == [Document(file.name, "né\r\n" * 1000)]


def test_what_only_begins_as_json_is_text(tmp_path):
    for content in ("{ braces } in prose", "{", "[1] a note", "[", "", "\ufeffa,b\n"):
        file = tmp_path / "a.json"
        file.write_text(content)
        assert [d.text for d in read(file)] == [content]


def test_parquet_is_read_by_its_columns_in_groups_of_rows(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"é {n}", "id": n, "source": "a", "wide": [n] * 3} for n in range(2500)]
    rows[1]["text"] = None
    file = tmp_path / "any name"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=700)
    expected = [(str(row["id"]), row["text"] or "") for row in rows]
    assert read(file) == expected == read(tmp_path)
    assert [d.text for d in read(file, text_column="source")] == ["a"] * 2500
    for column in ("body", "wide"):
        with pytest.raises(ValueError, match=f"any name:1: no string under {column}: .*--text-col"):
            read(file, text_column=column)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError):
        read(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs `pip install pyarrow`"):
        read(file)
