"""What is read from files and folders, what damaged files lead to, and how far a bar says it is.

And what is held out: by the hash of a document, or the end of a text that has no documents.
"""

import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY, write_lines
from hypothesis import given
from hypothesis import strategies as st

import prepare
from support.base.runtime import one_line
from support.text import reading, tokenizer
from support.text.corpus import Corpus, Document, find_cut, hold_out_tail, is_held_out, separator
from support.text.reading import InputBar

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None


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
    sources = [folder, tmp_path / "plain.jsonl"]
    if zstandard:
        frames = lines[:300_000], lines[300_000:]  # the border lies inside a line
        sources.append(tmp_path / "frames.jsonl.zst")
        sources[-1].write_bytes(b"".join(map(zstandard.compress, frames)))
    expected = read(TINY)
    assert len(expected) == 481 and all(document.id for document in expected)
    for source in sources:
        corpus = Corpus([source], 0)
        with InputBar(corpus.files, "reading") as bar:
            assert list(corpus.documents(bar.open)) == expected
            assert bar.bytes_read == bar.total > 0


def test_ids_texts_and_sources_of_every_form(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_bytes("ligne\r\né".encode())
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "source": "wiki"}\n\n{"id": null, "text": "b", "source": 7, "set": "code"}\n'
        '{"text": null, "source": null}\n{"id": 7, "text": "", "source": ""}'
    )
    note = ("ligne\r\né", None)
    lines = [(None, "a", "wiki"), (None, "b", "7"), (None, "", None), ("7", "", None)]
    assert read(tmp_path) == [*lines, ("b/note.txt", *note)]
    assert read(str(tmp_path / "b" / "note.txt")) == [("note.txt", *note)]
    for name, expected in (("set", [None, "code", None, None]), ("", [None] * 4)):
        documents = read(tmp_path / "a.jsonl", source_field=name)
        assert [document.source for document in documents] == expected


GOOD = b'{"id": "a", "text": "one"}\n'
PACKED = gzip.compress(GOOD * 2000)
BAD_INPUTS = [
    ("x.jsonl", GOOD * 2 + b"nonsense\n" + GOOD, ":3"),
    ("x.jsonl", GOOD + GOOD[:-4], ":2"),  # truncated
    ("x.jsonl", GOOD + b"[1]\n", ":2"),
    ("x.jsonl", b'{"id": "a"}\n', ":1"),
    ("x.jsonl", GOOD * 4 + b'{"text": 5}', ":5"),
    ("x.jsonl", GOOD + b'{"text": "b", "source": {}}', ":2"),
    ("x.jsonl", GOOD + b'{"text": "\xff"}', ":2"),
    ("x.jsonl", GOOD + b'{"id": "\\ud83d", "text": ""}', ":2"),  # half of a surrogate pair
    ("x.jsonl", b"[" * 200_000, ":1"),
    ("x.jsonl.gz", PACKED[:-8] + bytes(8), ":2001"),  # a checksum that fails
    ("x.jsonl.gz", PACKED[:-20], r":\d+"),
    ("x.jsonl.gz", GOOD, ":1"),
    ("x.txt", b"abc\xff", ""),
]
if zstandard:
    ZSTD = zstandard.compress(b"".join(b'{"text": "number %d"}\n' % i for i in range(9000)))
    BAD_INPUTS += [
        ("x.jsonl.zst", ZSTD + ZSTD[: len(ZSTD) // 2], r":\d+"),
        ("x.jsonl.zst", ZSTD + ZSTD[:20], ":9001"),
        ("x.jsonl.zst", GOOD, ":1"),
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


def test_a_file_that_may_not_be_read_is_named_once(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).touch()
        with pytest.raises(PermissionError) as caught:
            read(tmp_path / name)
        assert one_line(caught.value) == f"{tmp_path / name}: Permission denied"


def test_zst_without_zstandard_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"x\.jsonl\.zst:1: .*needs `pip install zstandard`"):
        read(tmp_path)


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
    with pytest.raises(ValueError, match=r"c\.txt:1: .*under text, not one"):
        read(tmp_path, text_column="one")  # so all text is a table, but b.png is none
    (tmp_path / "e.jsonl").write_text("nonsense")  # its name says what it should be
    with pytest.raises(ValueError, match=r"e\.jsonl:1: "):
        read(tmp_path)


def test_a_named_file_that_is_not_text_is_an_error_with_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4)
    text = "né🙂 " * 3000  # characters that lie across the blocks
    (tmp_path / "good.txt").write_text(text)
    assert read(tmp_path / "good.txt") == [Document("good.txt", text)]
    for end in (b"\xff", "é".encode()[:1]):  # no character, and half of one
        (tmp_path / "bad.txt").write_bytes(text.encode() + end)
        with pytest.raises(ValueError, match=rf"bad\.txt: .* byte {len(text.encode())}$"):
            read(tmp_path / "bad.txt")


# --- plain text cut into documents


def test_blank_lines_separate_documents(tmp_path):
    (tmp_path / "a.txt").write_text("\n \none\ntwo\n\t\n\r\n\nthree\n\nfour\n")
    texts = [(None, text, None) for text in ("one\ntwo", "three", "four")]
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
    with pytest.raises(ValueError, match=r"--split-on: .*JSON or tables"):
        read(TINY, split_on="blank-line")
    (tmp_path / "a.txt").write_text("one||two|")
    documents = read(TINY, tmp_path / "a.txt", split_on="|")
    assert documents[481:] == [(None, "one", None), (None, "two", None)]


# --- the bar


def test_a_terminal_shows_both_passes_and_a_clock_that_goes_on(tmp_path, monkeypatch, capsys):
    source = tmp_path / "in.txt"
    source.write_text("some words of text\n" * 50_000)
    bytes_only = tokenizer.get_encoding("bytes")
    prepare.prepare([source], tmp_path / "quiet", bytes_only, "bytes")
    assert capsys.readouterr().err == "", "there is no terminal"
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(reading, "TICK_S", 0.02)
    encode = prepare.encode
    monkeypatch.setattr(prepare, "encode", lambda *args: time.sleep(0.1) or encode(*args))
    prepare.prepare([source], tmp_path / "store", bytes_only, "bytes")
    for title, least in (("what to hold out", 1), ("encoding", 5)):
        assert len(re.findall(rf"{title}: +\d+%.*?\d+k/950k", shown.getvalue())) >= least


def test_a_bar_moves_as_parts_of_a_text_and_documents_are_handed_out(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 70)
    (tmp_path / "b.jsonl").write_text('{"text": "some words of text"}\n' * 70)
    monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 10)
    corpus = Corpus([tmp_path], 0)
    with InputBar(corpus.files, "encoding") as bar:
        done = []
        monkeypatch.setattr(bar, "done", lambda *now: done.append(now))
        list(prepare.chunks(corpus.parts(bar.open), bar))
    assert done[:6] == [(n, 0) for n in range(104, 700, 100)]
    assert len({size for size, _ in done}) == len(done) > 15 and done == sorted(done)
    assert done[-1] == (bar.total, 71)


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
DELIMITERS = {"a.csv": ",", "a.tsv": "\t", "a.csv.txt": ",", "a.tab": "\t"}
HOW = {"": lambda b: b, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("compressed", HOW)
@pytest.mark.parametrize("name", ["a", "a.txt", "a.ndjson", "a.jsonl", *DELIMITERS])
def test_objects_and_rows_are_recognised(name, compressed, tmp_path):
    """Also with a name that says nothing of the compression, and with Excel's mark of UTF-8."""
    if delimiter := DELIMITERS.get(name):
        out = io.StringIO()
        table = csv.DictWriter(out, ["text", "id", "n"], delimiter=delimiter)
        table.writeheader()
        table.writerows(LINES)
        content = out.getvalue()
    else:
        content = "\n\n" + "".join(json.dumps(line) + "\n" for line in LINES)
    column = None if name in ("a.csv", "a.tsv") else "text"
    for suffix, begins in (("", "\ufeff"), (compressed, "")):
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(HOW[compressed](f"{begins}{content}".encode()))
        documents = list(Corpus([file], holdout=0, text_column=column).documents())
        assert [(d.text, d.id) for d in documents] == [(x["text"], x["id"]) for x in LINES]
        (first, *_) = Corpus([file], holdout=0, text_column="id").documents()
        assert first.text == "0"
        with pytest.raises(ValueError, match=r"strings are under text, id.*--text-column"):
            list(Corpus([file], holdout=0, text_column="body").documents())


def test_what_only_begins_as_json_is_text_and_what_is_not_read_is_refused(tmp_path):
    for content in ("{ braces } in prose", "{", "[1] a note", "[", "", "\ufeffa,b\n"):
        file = tmp_path / "a.json"
        file.write_text(content)
        assert [d.text for d in Corpus([file], holdout=0).documents()] == [content]
    for name, content, said in (
        ("a.json", '[{"text": "b"}, 5]', "a.json:2: .*no JSON object: ', 5]'"),
        ("a.json", '[{"text": "b"}', "a.json:2: .*no JSON object"),
        ("a.json", '[{"text": "b" 7}]', "a.json:1: .*no JSON object"),
        ("a.json", '[{"text": 5}]', 'a.json:1: has no string under "text" or any other name'),
        ("a.csv", "text,id\na\n", "a.csv:2: .*has 1 fields, and the first line has 2"),
        ("a.csv", 'text\n"a\n', "a.csv:.*unexpected end of data"),
        ("a.csv", b"\xff\n", "a.csv:1: cannot be read"),
        ("a.csv", b"text\na\n\xff\n", "a.csv:3: cannot be read"),
        ("a.arrow", "ARROW1\0\0", r'an Arrow file; convert it: .*open_file\("/.*/a.arrow"\)'),
        ("$`.bin", b"\xff\xff\xff\xff\x10", r"""-c '[^']*open_stream\("/.*\$`.bin"\)[^']*'$"""),
        ("a", pickle.dumps(["text"]), r'if you trust it.*DataFrame\(pandas.read_pickle\("/'),
        ("a", HOW[".gz"](b"text")[:10] + b"\xff" * 9, "a: cannot be read"),
        ("a.gz", b"\x1f\x8bno", "a.gz: cannot be read"),
    ):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=said):
            list(Corpus([tmp_path / name], holdout=0).documents())


def test_parquet_is_read_by_its_columns_in_groups_of_rows(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"é {n}", "id": n, "source": "a", "wide": [n] * 3} for n in range(2500)]
    rows[1]["text"] = None
    file = tmp_path / "any name"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=700)
    expected = [(str(row["id"]), row["text"] or "", "a") for row in rows]
    assert read(file) == expected == read(tmp_path)
    corpus = Corpus([file], 0)
    with InputBar(corpus.files, "reading") as bar:
        assert list(corpus.documents(bar.open)) == expected
    assert [d.text for d in read(file, text_column="source", source_field="")] == ["a"] * 2500
    for column in ("body", "id", "wide"):
        said = f"any name:1: .*strings are under text, source, not {column}: .*--text-column"
        with pytest.raises(ValueError, match=said):
            read(file, text_column=column)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"any name:1: .*[^\n]$"):
        read(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs `pip install pyarrow`"):
        read(file)


@pytest.mark.parametrize("how", HOW)
def test_standard_input_and_compressed_prose_are_read(how, tmp_path, monkeypatch):
    text = "né\r\n" * 1000
    (tmp_path / "a").write_bytes(HOW[how](text.encode()))
    assert read(tmp_path / "a") == [Document("a", text)]
    for content, column, expected in (
        (text.encode(), None, [("stdin", text, None)]),
        (b'{"text": "one", "id": 1}\n', None, [("1", "one", None)]),
        (b"id,body\r\n1,one\r\n", "body", [("1", "one", None)]),
    ):
        reading.stdin_file.cache_clear()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(HOW[how](content))))
        for _ in range(2):
            assert read("-", text_column=column) == expected
        with pytest.raises(ValueError, match=r"^stdin:1: .*under .* not none.*--text-column"):
            read("-", text_column="none")
    reading.stdin_file.cache_clear()


def test_an_array_is_read_object_by_object_wherever_blocks_end(tmp_path, monkeypatch):
    objects = [{"text": f'}}, {{"é [{n}\\"', "id": n, "more": [{"a": n}]} for n in range(50)]
    expected = [(str(x["id"]), x["text"], None) for x in objects]
    for indent, begins in ((None, "\ufeff"), (2, "\n")):
        (tmp_path / "a.txt").write_text(f"{begins} {json.dumps(objects, indent=indent)}\n ")
        for size in (3, 17, 4096):
            monkeypatch.setattr(reading, "SMALL_BYTES", size)
            assert read(tmp_path / "a.txt") == expected
