"""What is read from files and folders, and what a damaged one says.

python -m pytest tests/test_documents.py
"""

import gzip
import random
import re
import sys
from pathlib import Path

import pytest

from support.documents import is_held_out, read_documents

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
        ("a.jsonl:1", "x"),
        ("a.jsonl:3", "y"),
        ("b/note.txt", "ligne\r\né"),
        ("c.py", "pass"),
        ("7", ""),
    ]
    assert list(read_documents([tmp_path])) == expected
    assert list(read_documents([str(tmp_path / "b" / "note.txt")])) == [("note.txt", "ligne\r\né")]


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


@pytest.mark.parametrize("missing", ["none.jsonl", "empty"])
def test_missing_input_is_named_before_anything_is_read(tmp_path, missing):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{missing}: no such file, or a folder without doc"):
        next(read_documents([TINY, tmp_path / missing]))


def test_zst_without_zstandard_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"x\.jsonl\.zst:0: needs `pip install zstandard`"):
        list(read_documents([tmp_path]))


def test_a_document_stays_where_it_is_when_others_come_and_go():
    # crc32("a") = 3904355907, "b" 1908338681 and "c" 112844655 are odd, "d" 2564639436 is even.
    assert [is_held_out(letter, 2) for letter in "abcd"] == [False, False, False, True]
    assert not any(is_held_out(letter, 0) for letter in "abcd")
    assert all(is_held_out(letter, 1) for letter in "abcd")
