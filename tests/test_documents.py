"""What is read from files and folders, and what a damaged one says.

python -m pytest tests/test_documents.py
"""

import gzip
import os
import random
import re
import sys
from pathlib import Path

import pytest

from support.base.runtime import one_line
from support.text import reading
from support.text.reading import Document, read_documents, separator

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None

TINY = Path(__file__).resolve().parents[1] / "corpus" / "pd-tiny.jsonl.gz"


def test_plain_packed_and_folder_give_the_same_documents(tmp_path):
    lines = gzip.decompress(TINY.read_bytes())
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    rows = lines.splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(rows[:100]))
    (folder / "deeper" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[100:200])))
    (folder / "e.jsonl").write_bytes(b"".join(rows[200:]))
    (folder / ".hidden").write_bytes(b"\xff")
    (tmp_path / "plain.jsonl").write_bytes(lines.replace(b"\n", b"\n\n"))  # blank lines are none
    sources = [TINY, folder, tmp_path / "plain.jsonl"]
    if zstandard:
        frames = lines[:300_000], lines[300_000:]  # the border lies inside a line
        sources.append(tmp_path / "frames.jsonl.zst")
        sources[-1].write_bytes(b"".join(map(zstandard.compress, frames)))
    expected = list(read_documents([TINY]))
    assert len(expected) == 481
    for source in sources:
        assert list(read_documents([source])) == expected


def test_ids_and_texts_of_every_form(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "note.txt").write_bytes("ligne\r\né".encode())
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"id": null, "text": "y"}\n')
    (tmp_path / "c.py").write_text("pass")
    (tmp_path / "d.jsonl").write_text('{"id": 7, "text": ""}')
    expected = [
        (None, "x", None),
        (None, "y", None),
        ("b/note.txt", "ligne\r\né", None),
        ("c.py", "pass", None),
        ("7", "", None),
    ]
    assert list(read_documents([tmp_path])) == expected
    assert list(read_documents([str(tmp_path / "b" / "note.txt")])) == [
        ("note.txt", "ligne\r\né", None)
    ]


GOOD = b'{"id": "a", "text": "one"}\n'
PACKED = gzip.compress(GOOD * 2000)
BAD_INPUTS = {
    "not JSON": ("x.jsonl", GOOD * 2 + b"nonsense\n" + GOOD, ":3: is not JSON"),
    "cut off": ("x.jsonl", GOOD + GOOD[:-4], ":2: is not JSON"),
    "no object": ("x.jsonl", GOOD + b"[1]\n", ":2: needs an object with a string under"),
    "no text": ("x.jsonl", b'{"id": "a"}\n', ":1: needs an object with a string under"),
    "text no string": ("x.jsonl", GOOD * 4 + b'{"text": 5}', ":5: needs an object with a string"),
    "not UTF-8": ("x.jsonl", GOOD + b'{"text": "\xff"}', ":2: 'utf-8' codec can't decode byte"),
    "half a pair": ("x.jsonl", GOOD + b'{"text": "\\ud83d"}', ":2: 'utf-8' codec can't encode"),
    "half in the id": ("x.jsonl", b'{"id": "\\ud83d", "text": ""}', ":1: 'utf-8' codec can't"),
    "too deep": ("x.jsonl", b"[" * 200_000, ":1: "),
    "line in gz": ("x.jsonl.gz", gzip.compress(GOOD + b"?"), ":2: is not JSON"),
    "cut gz": ("x.jsonl.gz", PACKED[:-30], "Compressed file ended before"),
    "damaged gz": ("x.jsonl.gz", PACKED[:-8] + bytes(8), "CRC check failed"),
    "damage inside": ("x.jsonl.gz", PACKED[:30] + b"\xff" * 9 + PACKED[39:], "Error -3"),
    "no gz": ("x.jsonl.gz", GOOD, ":0: Not a gzipped file"),
    "bytes in text": ("x.txt", b"abc\xff", ": is not text in UTF-8"),
    "packed text": ("x.txt.gz", PACKED, ": is not text in UTF-8"),
}
if zstandard:
    ZSTD = zstandard.compress(b"".join(b'{"text": "number %d"}\n' % i for i in range(9000)))
    BAD_INPUTS |= {
        "cut zst": ("x.jsonl.zst", ZSTD[: len(ZSTD) // 2], "the file ends inside a zstd frame"),
        "cut second": ("x.jsonl.zst", ZSTD + ZSTD[:20], ":9000: the file ends inside a zstd frame"),
        "no zst": ("x.jsonl.zst", GOOD, ":0: zstd decompressor error"),
    }


@pytest.mark.parametrize(("name", "content", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_input_is_one_line_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        list(read_documents([tmp_path / name]))
    assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_the_line_after_which_a_file_is_damaged(tmp_path):
    rows = [b'{"text": "%d"}\n' % random.Random(i).getrandbits(4000) for i in range(1000)]
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(rows))[:-1000])
    read = []
    with pytest.raises(ValueError, match="ended before") as caught:
        for document in read_documents([path]):
            read.append(document)
    assert len(read) > 900
    assert str(caught.value).startswith(f"{path}:{len(read)}: ")


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
        next(read_documents([TINY, tmp_path / missing]))


def test_a_file_that_nobody_may_read_is_named_once(tmp_path, monkeypatch):
    def refuse(file, path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.txt").touch()
    monkeypatch.setattr(reading._Counted, "__init__", refuse)
    for name in ("a.jsonl", "b.txt"):
        with pytest.raises(PermissionError) as caught:
            list(read_documents([tmp_path / name]))
        assert one_line(caught.value) == f"{tmp_path / name}: Permission denied"


def test_zst_without_zstandard_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"x\.jsonl\.zst:0: needs `pip install zstandard`"):
        list(read_documents([tmp_path]))


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@pytest.mark.parametrize("split_on", [None, "blank-line"])
def test_in_a_folder_what_is_not_text_is_skipped_and_counted(tmp_path, monkeypatch, split_on):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 16)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.png").write_bytes(PNG)
    (tmp_path / "c.txt").write_bytes(b"text\n\n" * 10 + b"\xff")  # not text, but only at its end
    (tmp_path / "d.txt").write_text("two")
    skipped = []
    assert [one.text for one in read_documents([tmp_path], split_on, skipped)] == ["one", "two"]
    assert [path.name for path in skipped] == ["b.png", "c.txt"]
    (tmp_path / "e.jsonl").write_text("nonsense")  # this one says what it should be
    with pytest.raises(ValueError, match=r"e\.jsonl:1: is not JSON"):
        list(read_documents([tmp_path]))


def test_named_directly_what_is_not_text_is_an_error_with_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4)
    text = "né🙂 " * 20  # characters that lie across the blocks
    (tmp_path / "good.txt").write_text(text)
    assert list(read_documents([tmp_path / "good.txt"])) == [Document("good.txt", text)]
    position = len(text.encode())
    for end in (b"\xff", "é".encode()[:1]):  # no character, and half of one
        (tmp_path / "bad.txt").write_bytes(text.encode() + end)
        with pytest.raises(
            ValueError, match=rf"bad\.txt: is not text in UTF-8: .* byte {position}$"
        ):
            list(read_documents([tmp_path / "bad.txt"]))


# --- plain text cut into documents


def test_blank_lines_separate_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n \none\ntwo\n\t\n\r\n\nthree\n\nfour\n")
    texts = [one.text for one in read_documents([tmp_path / "a.txt"], "blank-line")]
    assert texts == ["one\ntwo", "three", "four"]
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    assert list(read_documents([tmp_path / "b.txt"], "blank-line")) == [(None, "one\ntwo", None)]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("mark", ["|", "ab", "aab", "\n---\n", "é🙂"])
def test_cutting_equals_split_wherever_blocks_end(tmp_path, monkeypatch, block_bytes, mark):
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    draw = random.Random(0)
    for _ in range(20):
        text = "".join(draw.choice([*mark, mark, "x"]) for _ in range(40))
        (tmp_path / "a.txt").write_text(text)
        texts = [one.text for one in read_documents([tmp_path / "a.txt"], mark)]
        assert texts == text.split(mark)


def test_a_separator_is_read_with_its_escapes():
    assert separator("blank-line") == "blank-line"
    assert separator(r"\n---\n") == "\n---\n"
    assert separator(r"é\t\\n") == "é\t\\n"
    with pytest.raises(ValueError, match="--split-on '': needs blank-line or a string"):
        separator("")
    for wrong in ("\\d", "---\\"):
        with pytest.raises(ValueError, match=r"--split-on .* needs one of n, r, t, f"):
            separator(wrong)


def test_cutting_where_there_is_no_plain_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--split-on: cuts plain text, and there are only JSON"):
        next(read_documents([TINY], "blank-line"))
    (tmp_path / "a.txt").write_text("one|two")
    documents = list(read_documents([TINY, tmp_path / "a.txt"], "|"))
    assert documents[481:] == [(None, "one", None), (None, "two", None)]


# --- sources


def test_a_json_line_names_its_source(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "source": "wiki"}\n{"text": "b", "source": 7, "set": "code"}\n'
        '{"text": "c", "source": null}\n{"text": "d", "source": ""}\n{"text": "e"}\n'
    )

    def sources(**options):
        return [one.source for one in read_documents([tmp_path / "a.jsonl"], **options)]

    assert sources() == ["wiki", "7", None, None, None]
    assert sources(source_field="set") == [None, "code", None, None, None]
    assert sources(source_field="") == [None] * 5


@pytest.mark.parametrize("value", ["{}", '["wiki"]'])
def test_a_source_that_is_no_name_is_refused_unless_nobody_asks_for_it(tmp_path, value):
    line = f'{{"text": "b", "source": {value}}}'
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: source is not the name of a source: name"):
        list(read_documents([tmp_path / "a.jsonl"]))
    assert len(list(read_documents([tmp_path / "a.jsonl"], source_field=""))) == 2
