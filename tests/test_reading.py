"""What is read from files and folders, what damaged files lead to, and how far a bar says it is."""

import gzip
import io
import os
import random
import re
import sys
import time
from pathlib import Path

import pytest

import prepare
from support.base.runtime import one_line
from support.text import encoding, reading, tokenizer
from support.text.reading import Document, InputBar, input_files, read_documents, separator

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None

TINY = Path(__file__).resolve().parents[1] / "corpus" / "pd-tiny.jsonl.gz"


def read(*paths, **options):
    return list(read_documents(input_files(paths), **options))


def texts_in(path, content=None, **options):
    if content is not None:
        path.write_text(content)
    return [document.text for document in read(path, **options)]


def test_plain_compressed_and_folder_give_the_same_documents(tmp_path):
    lines = gzip.decompress(TINY.read_bytes())
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    rows = lines.splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(rows[:100]))
    (folder / "deeper" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[100:200])))
    (folder / "e.jsonl").write_bytes(b"".join(rows[200:]))
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
        files, counted = input_files([source]), []
        assert list(read_documents(files, on_read=counted.append)) == expected
        assert sum(counted) == sum(file.bytes for file in files), "a bar ends at the end"


def test_ids_texts_and_sources_of_every_form(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_bytes("ligne\r\né".encode())
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "source": "wiki"}\n\n{"id": null, "text": "b", "source": 7, "set": "code"}\n'
        '{"text": "c", "source": null}\n{"text": "d", "source": ""}'
    )
    (tmp_path / "c.py").write_text("pass")
    (tmp_path / "d.jsonl").write_text('{"id": 7, "text": ""}')
    plain = [("b/note.txt", "ligne\r\né", None), ("c.py", "pass", None), ("7", "", None)]
    sources = ["wiki", "7", None, None]
    assert read(tmp_path) == [
        *[(None, *pair) for pair in zip("abcd", sources, strict=True)],
        *plain,
    ]
    assert read(str(tmp_path / "b" / "note.txt")) == [("note.txt", "ligne\r\né", None)]
    for name, expected in (("set", [None, "code", None, None]), ("", [None] * 4)):
        documents = read(tmp_path / "a.jsonl", source_field=name)
        assert [document.source for document in documents] == expected


GOOD = b'{"id": "a", "text": "one"}\n'
PACKED = gzip.compress(GOOD * 2000)
BAD_INPUTS = {
    "not JSON": ("x.jsonl", GOOD * 2 + b"nonsense\n" + GOOD, ":3: is not JSON"),
    "truncated": ("x.jsonl", GOOD + GOOD[:-4], ":2: is not JSON"),
    "not an object": ("x.jsonl", GOOD + b"[1]\n", ":2: is not a JSON object"),
    "no text": ("x.jsonl", b'{"id": "a"}\n', ":1: needs a string under"),
    "text not a string": ("x.jsonl", GOOD * 4 + b'{"text": 5}', ":5: needs a string under"),
    "source not a name": ("x.jsonl", GOOD + b'{"text": "b", "source": {}}', ":2: source is not"),
    "not UTF-8": ("x.jsonl", GOOD + b'{"text": "\xff"}', ":2: is not text in UTF-8"),
    "half a pair": ("x.jsonl", GOOD + b'{"text": "\\ud83d"}', ":2: has half of a surrogate pair"),
    "half in the id": ("x.jsonl", b'{"id": "\\ud83d", "text": ""}', ":1: has half of a surrogate"),
    "too deep": ("x.jsonl", b"[" * 200_000, ":1: "),
    "line in gz": ("x.jsonl.gz", gzip.compress(GOOD + b"?"), ":2: is not JSON"),
    "damaged gz": ("x.jsonl.gz", PACKED[:-8] + bytes(8), ":2001: cannot be read: CRC check failed"),
    "not gz": ("x.jsonl.gz", GOOD, ":1: cannot be read: Not a gzipped file"),
    "bytes in text": ("x.txt", b"abc\xff", ": is not text in UTF-8"),
    "compressed text": ("x.txt.gz", PACKED, ": is not text in UTF-8"),
}
if zstandard:
    ZSTD = zstandard.compress(b"".join(b'{"text": "number %d"}\n' % i for i in range(9000)))
    BAD_INPUTS |= {
        "truncated zst": ("x.jsonl.zst", ZSTD[: len(ZSTD) // 2], "ends inside a zstd frame"),
        "second frame": ("x.jsonl.zst", ZSTD + ZSTD[:20], ":9001: cannot be read: the file ends"),
        "not zst": ("x.jsonl.zst", GOOD, ":1: cannot be read: zstd decompress"),
    }


@pytest.mark.parametrize(("name", "content", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_the_line_at_which_a_compressed_file_is_truncated(tmp_path):
    rows = [b'{"text": "%d"}\n' % random.Random(i).getrandbits(4000) for i in range(1000)]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(rows))[:-1000])
    documents = []
    with pytest.raises(ValueError, match="ended before") as caught:
        documents.extend(read_documents(input_files([path])))
    assert len(documents) > 900
    assert str(caught.value).startswith(f"{path}:{len(documents) + 1}: ")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("none.jsonl", "none.jsonl: no such file or folder"),
        ("empty", "empty: a folder without documents (hidden files are not read)"),
        ("pipe", "pipe: a pipe cannot be read twice: write the text to a file"),
    ],
)
def test_missing_input_is_named_before_anything_is_read(tmp_path, missing, message):
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    (tmp_path / "empty" / ".git" / "HEAD").touch()  # a hidden folder hides what is in it
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=re.escape(message)):
        input_files([TINY, tmp_path / missing])


def test_a_file_that_may_not_be_read_is_named_once(tmp_path, monkeypatch):
    def refuse(file, path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(reading._Counted, "__init__", refuse)
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
def test_in_a_folder_files_that_are_not_text_are_skipped(tmp_path, split_on):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20))
    (tmp_path / "c.txt").write_bytes(b"text\n\n" * 10 + b"\xff")  # not text, but only at its end
    (tmp_path / "d.txt").write_text("two")
    files, skipped, counted = input_files([tmp_path]), [], []
    documents = read_documents(files, split_on, on_skip=skipped.append, on_read=counted.append)
    assert [document.text for document in documents] == ["one", "two"]
    assert [path.name for path in skipped] == ["b.png", "c.txt"]
    if not split_on:  # else they are not read a second time
        assert sum(counted) == sum(file.bytes for file in files), "to their ends, for the bar"
    (tmp_path / "e.jsonl").write_text("nonsense")  # its name says what it should be
    with pytest.raises(ValueError, match=r"e\.jsonl:1: is not JSON"):
        read(tmp_path)


def test_a_named_file_that_is_not_text_is_an_error_with_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4)
    text = "né🙂 " * 3000  # characters that lie across the blocks
    (tmp_path / "good.txt").write_text(text)
    assert read(tmp_path / "good.txt") == [Document("good.txt", text)]
    position = len(text.encode())
    for end in (b"\xff", "é".encode()[:1]):  # no character, and half of one
        (tmp_path / "bad.txt").write_bytes(text.encode() + end)
        with pytest.raises(ValueError, match=rf"bad\.txt: is not text in .* byte {position}$"):
            read(tmp_path / "bad.txt")


# --- plain text cut into documents


def test_blank_lines_separate_documents(tmp_path):
    content = "\n \none\ntwo\n\t\n\r\n\nthree\n\nfour\n"
    texts = texts_in(tmp_path / "a.txt", content, split_on="blank-line")
    assert texts == ["one\ntwo", "three", "four"]
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    assert read(tmp_path / "b.txt", split_on="blank-line") == [(None, "one\ntwo", None)]


@pytest.mark.parametrize("block_bytes", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("mark", ["|", "ab", "aab", "\n---\n", "é🙂"])
def test_cutting_equals_split_wherever_blocks_end(tmp_path, monkeypatch, block_bytes, mark):
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    draw = random.Random(0)
    for _ in range(20):
        text = "".join(draw.choice([*mark, mark, "x"]) for _ in range(40))
        assert texts_in(tmp_path / "a.txt", text, split_on=mark) == text.split(mark)


def test_a_separator_is_read_with_its_escapes():
    assert separator("blank-line") == "blank-line"
    assert separator(r"\n---\n") == "\n---\n"
    assert separator(r"é\t\\n") == "é\t\\n"
    for wrong in ("", "\\d", "---\\"):
        with pytest.raises(ValueError, match=r"--split-on .* needs"):
            separator(wrong)


def test_cutting_is_refused_unless_there_is_plain_text(tmp_path):
    with pytest.raises(ValueError, match="--split-on: cuts plain text, and there are only JSON"):
        read(TINY, split_on="blank-line")
    (tmp_path / "a.txt").write_text("one|two")
    documents = read(TINY, tmp_path / "a.txt", split_on="|")
    assert documents[481:] == [(None, "one", None), (None, "two", None)]


# --- the bar


def terminal(monkeypatch) -> io.StringIO:
    """What bars write from here on, as on a terminal."""
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    return shown


def test_a_command_shows_on_a_terminal_how_far_both_of_its_passes_are(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "in.txt").write_text("some words of text\n" * 50_000)
    prepare.main([str(tmp_path / "in.txt"), "--out", str(tmp_path / "quiet")])
    assert capsys.readouterr().err == "", "there is no terminal"
    shown = terminal(monkeypatch)
    monkeypatch.setattr(reading, "TICK_S", -1)
    prepare.main([str(tmp_path / "in.txt"), "--out", str(tmp_path / "store")])
    for title in ("what to hold out", "encoding"):
        assert re.search(rf"{title}: +\d+%.*\d+k/950k", shown.getvalue()), title
    assert "B/s" in shown.getvalue() and "documents]" in shown.getvalue()


def test_a_bar_goes_on_while_one_task_takes_long(tmp_path, monkeypatch):
    """As with a long text without a blank: nothing is done, and the clock moves."""
    shown = terminal(monkeypatch)
    monkeypatch.setattr(reading, "TICK_S", 0.05)
    monkeypatch.setattr(encoding, "TICK_S", 0.05)
    encode = encoding.encode
    monkeypatch.setattr(encoding, "encode", lambda *args: time.sleep(0.5) or encode(*args))
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    inputs = [tmp_path / "a.txt"]
    prepare.prepare(inputs, tmp_path / "store", tokenizer.get_encoding("bytes"), "bytes")
    assert shown.getvalue().count("encoding: ") >= 5


def test_reading_moves_the_bar_only_when_it_is_done(tmp_path, monkeypatch):
    terminal(monkeypatch)
    (tmp_path / "a.txt").write_text("x" * 100)
    with InputBar(input_files([tmp_path / "a.txt"]), "reading") as bar:
        bar.on_read(100)
        assert bar.n == 0
        bar.done(60, 1)
        assert bar.n == 60
