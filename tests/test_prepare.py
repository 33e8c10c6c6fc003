"""prepare.py: which documents are read from files and folders, which are held out, and the store.

Whatever stops prepare.py, it never leaves half a store.
"""

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import BYTES, TINY, kill_at, names, refusal, terminate, write_lines
from hypothesis import given
from hypothesis import strategies as st

import prepare
from prepare import Corpus, Document, find_cut, hold_out_tail, split_blocks
from support import store, tokenizer
from support.process import ROOT, printable
from support.store import Store

MIX = ROOT / "corpus" / "pd-mix.jsonl.gz"
PD4K = tokenizer.get_encoding()


def read(*paths, **options) -> list[str]:
    return [document.text for document in Corpus(paths, 0, **options).documents()]


def sides(path: Path, *options) -> tuple[list[str], list[str]]:
    """Return training texts and held-out texts."""
    documents = list(Corpus([path], *options).documents())
    return tuple([d.text for d in documents if d.held_out == side] for side in (False, True))


def by_id(folder: Path, texts: dict[str, str]) -> Path:
    return write_lines(folder / "a.jsonl", [{"id": i, "text": text} for i, text in texts.items()])


# --- files


def test_plain_and_compressed_files_and_folders_give_the_same_documents(tmp_path):
    rows = gzip.decompress(TINY.read_bytes()).splitlines(keepends=True)
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"".join(rows[:100]))
    (folder / "deeper" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(rows[100:])))
    (folder / "deeper" / "note.txt").write_bytes("ligne\r\né".encode())
    (folder / ".hidden").write_bytes(b"\xff")
    assert read(folder) == [*read(TINY), "ligne\r\né"] and len(rows) == 481
    forms = '{"text": "a", "more": {}}\n\n{"id": null, "text": "b"}\n{"id": 7, "text": null}'
    (tmp_path / "a.jsonl").write_text(forms)
    assert read(tmp_path / "a.jsonl") == ["a", "b", ""]


GOOD = b'{"id": "a", "text": "one"}\n'
PACKED = gzip.compress(GOOD * 2000, mtime=0)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><p>text</p></html>"
BAD_INPUTS = [  # sorted by name: name, content, message
    ("a.jsonl", GOOD * 2 + b"nonsense\n" + GOOD, ":3: is not a JSON object"),
    (
        "b.jsonl",
        b'{"content": "a"}',
        ":1: has no string under --text-column text, of its fields content",
    ),
    ("c.jsonl", GOOD + b'{"text": "\xff"}', ":2: is not a JSON object"),
    ("d.jsonl", GOOD + b'{"id": "\\ud83d", "text": ""}', ":2: has half of a surrogate pair"),
    ("e.jsonl.gz", PACKED[:-20], ": cannot be decompressed"),
    ("f.csv", b"text,id\na,1\n", ": is .csv, not text or JSON lines"),
    ("g", b' [{"text": "a"}]', ": is a JSON array: write one object per line"),
    ("h.jsonl", b'[\n  {\n "text": "a"}]', ": is a JSON array: write one object per line"),
    ("i.pkl.gz", gzip.compress(b"I1\n.", mtime=0), ": is .pkl, not text or JSON lines"),
    ("j.txt", "né".encode("latin-1"), ": is not UTF-8 at byte 1"),
    ("k.txt", "no".encode("utf-16-le"), ": is not text: it has a NUL"),
    ("l.txt", b"text\n\n" * 5000 + b"\xff", ": is not UTF-8 at byte 30,000"),
    ("m.txt", "é🙂".encode()[:-1], ": is not UTF-8 at byte 2"),
    ("n.parquet", POINTER, ": is a Git LFS pointer, not the file itself"),
    ("o.parquet", gzip.compress(PAGE, mtime=0), ": is HTML: extract its text"),
    ("p.parquet", b"text", ": is .parquet, not text or JSON lines"),
    ("r.htm", b"<p>text</p>", ": is .htm, not text or JSON lines"),
    ("s", b"a.txt".ljust(257, b"\0") + b"ustar", ": is a tar archive: unpack it"),
    ("t.txt", "\ufefftext".encode("utf-16-le"), ": is UTF-16: convert it to UTF-8"),
    ("u.jsonl.zst", b"(\xb5/\xfd$", ": is packed: unpack it"),
    ("v.txt", b"%PDF-1.7\n", ": is XML or PDF: extract its text"),
    ("w\udce9.txt", b"text", ": has a name that is not UTF-8: rename it"),
    ("x.json", b'{\n "text": "a"\n}', ": is .json, not text or JSON lines"),
]


def test_bad_files_are_refused_if_named_and_skipped_in_a_folder(tmp_path, monkeypatch, capsys):
    """A file is skipped completely, even if its first lines are good."""
    monkeypatch.setattr(prepare, "BLOCK", 16)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "zy").symlink_to("0.txt")  # which is read below
    (folder / "zz").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "zzz")  # nobody writes to it
    problems = [printable(f"{folder / name}{problem}") for name, _, problem in BAD_INPUTS]
    for (name, content, _), problem in zip(BAD_INPUTS, problems, strict=True):
        (folder / name).write_bytes(content)
        assert printable(refusal(read, folder / name)).startswith(problem)
    problems.append(f"{folder / 'zy'}: is a link to a file that is given as well")
    problems += [f"{folder / 'zz'}: is no file", f"{folder / 'zzz'}: is no file"]
    assert refusal(make, folder, tmp_path / "out") == f"{folder}: no document has any text"
    (folder / "0.txt").write_text("one")
    (folder / "1.txt").write_text("né🙂 " * 3000)
    (folder / "z.json").write_text('{"text": "a document"}')
    texts = ["one", "né🙂 " * 3000, "a document"]
    assert read(folder / "zy") == ["one"], "a link that is named"
    assert read(folder) == read(folder, split_on="blank-line") == texts
    assert read(folder, text_column="content") == [*texts[:2], "a"], "from b.jsonl"
    capsys.readouterr()
    skipped = Corpus([folder], 0).skipped
    assert all(map(str.startswith, skipped, problems)) and len(skipped) == len(problems)
    first, *output = capsys.readouterr().err.splitlines()
    assert first.startswith("skipped 26 files; ") and output == [f"  {why}" for why in skipped[:5]]
    assert "none.jsonl: no such file" in refusal(Corpus, [TINY, "none.jsonl"])
    assert "the empty string: no such file" in refusal(Corpus, [""])


def test_end_of_text_that_is_spelled_in_a_file_is_text_and_reported(tmp_path, capsys):
    (tmp_path / "a").write_text("one<|endoftext|>two")
    (tmp_path / "b").write_text("three")
    for flags, spelled in (["--holdout", "0"], 1), (["--split-on", "<|endoftext|>"], 0):
        out = tmp_path / f".store-{spelled}"
        prepare.main([str(tmp_path), *flags, "--tokenizer", "bytes", "--out", str(out)])
        assert ("spelled                1   documents" in capsys.readouterr().out) == spelled
    assert "one<|endoftext|>two" in texts_of(Store.open(tmp_path / ".store-1"))


@pytest.mark.parametrize("compressed", [bytes, gzip.compress])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_json_lines_are_recognised_by_content(name, compressed, tmp_path):
    """Also if the name does not show the compression, and with a byte order mark, as from Excel."""
    texts = [f'a "{n}",\nb' for n in range(3)]
    lines = "\n\n".join(json.dumps({"text": text, "id": "0", "n": 7}) for text in texts)
    file = tmp_path / name
    for content in (f"\ufeff{lines}\n", f"\n\n{lines}"):
        file.write_bytes(compressed(content.encode()))
        assert read(file) == texts and read(file, text_column="id")[0] == "0"
        problem = ": has no string under --text-column n, of its fields text, id, n"
        assert refusal(read, file, text_column="n").endswith(problem)
    for text in ("né\r\n" * 1000, "{ braces } in prose", "[1] a note", "\ufeffa,b\n"):
        file.write_bytes(compressed(text.encode()))
        assert name == "a.jsonl" or read(file) == [text]


def test_parquet_files_are_read_by_row_group_from_the_text_column(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"é {n}", "id": n, "source": "a", "wide": [n] * 3} for n in range(2500)]
    rows[1]["text"] = None
    file = tmp_path / "any name"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=700)
    assert read(file) == [row["text"] or "" for row in rows] == read(tmp_path)
    assert read(file, text_column="source") == ["a"] * 2500
    for column, fields in ("body", "text, id, source, wide"), ("wide", ""):
        problem = f":1: has no string under --text-column {column}, of its fields {fields}"
        assert problem in refusal(read, file, text_column=column)
    (tmp_path / "cut.parquet").write_bytes(file.read_bytes()[:-9])
    assert "cut.parquet: cannot be read as parquet" in refusal(read, tmp_path / "cut.parquet")


def test_parquet_without_pyarrow_is_refused_before_anything_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    needs = f"{tmp_path}/a.parquet: needs pyarrow: pip install -e '.[parquet]'"
    assert refusal(Corpus, [TINY, tmp_path / "a.parquet"], 0) == needs


def test_split_on_cuts_plain_text_into_documents(tmp_path, capsys):
    file = tmp_path / "a.txt"
    file.write_text("\n \none\ntwo\n\t\n\r\n\nthree\n\nfour\n")
    assert read(file, split_on="blank-line") == ["one\ntwo", "three", "four"]
    file.write_text("one\n---\n\n---\ntwo|three")
    assert read(TINY, file, split_on=r"\n---\n")[481:] == ["one", "two|three"]
    for mark, unit in ("|", "part of a file"), ("QQQ", "file"):
        about = prepare.prepare([file], tmp_path / unit, BYTES, split_on=mark, holdout=0)
        assert about["document"] == unit
    assert capsys.readouterr().err == "warning: --split-on 'QQQ' cuts no file in two\n"


MARKS = ("|", "ab", "aab", "\n---\n", "é🙂")
pieces = st.lists(st.sampled_from([*"|ab\n-é🙂x", *MARKS]), max_size=40)


@given(pieces.map("".join), st.sampled_from(MARKS), st.integers(1, 50))
def test_splitting_blocks_equals_splitting_the_whole_text(text, mark, size):
    blocks = (text[i : i + size] for i in range(0, len(text), size))
    assert list(split_blocks(blocks, mark)) == text.split(mark)


# --- held out by hash, or by position: the tail

LINES = "".join(f"line {number}\n" for number in range(1000))


def test_documents_without_an_id_are_held_out_by_the_hash_of_their_text(tmp_path):
    # crc32("a") = 3904355907, "b" 1908338681 and "c" 112844655 are odd, "d" 2564639436 is even.
    lines = [{"text": letter} for letter in "abcd"]
    assert sides(write_lines(tmp_path / "a.jsonl", lines), 2) == (["a", "b", "c"], ["d"])


def test_a_repeated_text_is_on_the_side_of_its_first_document(tmp_path):
    """Whatever its blanks are; the ids alone would put each text on both sides."""
    pairs = zip("adda", ["x z", "x  z\n", "y", "y"], strict=True)
    lines = [{"id": id, "text": text} for id, text in pairs]
    file = write_lines(tmp_path / "a.jsonl", lines)
    assert sides(file, 2) == (["x z", "x  z\n"], ["y", "y"])
    assert make(file, tmp_path / "store").meta["repeats"] == 2
    folder = tmp_path / "copies"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(LINES)
    training, held_out = sides(folder)
    assert training == training[:1] * 3 and held_out == held_out[:1] * 3
    assert training[0] + held_out[0] == LINES and 1 / 25 < len(held_out[0]) / len(LINES) < 1 / 15


def test_of_a_single_text_the_end_is_held_out_from_a_line_on(tmp_path):
    """Also if the hash of its name would hold it out completely, as of one name in 20."""
    path = tmp_path / next(f"{i}.txt" for i in range(999) if zlib.crc32(b"%d.txt" % i) % 20 == 0)
    path.write_text(LINES)
    (training,), (held_out,) = sides(path)
    assert training + held_out == LINES
    assert training.endswith("\n") and held_out.startswith("line ")
    assert len(held_out) == pytest.approx(len(LINES) / 20, abs=12)
    assert sides(path, 0) == ([LINES], []) and sides(path, 1) == ([], [LINES])


@given(st.lists(st.text("ab \n", max_size=40), max_size=6, unique=True), st.integers(2, 30))
def test_holding_out_the_tail_keeps_all_text_in_order_and_both_sides_nonempty(texts, holdout):
    characters = sum(map(len, texts))
    if characters < 2:
        return
    tail = -(-characters // holdout)
    documents = [Document(text, False) for text in texts]
    parts = list(hold_out_tail(documents, characters - tail, holdout))
    assert "".join(part.text for part in parts) == "".join(texts)
    held_out = [part.held_out for part in parts if part.text]
    assert held_out == sorted(held_out) and set(held_out) == {False, True}
    assert tail / 2 <= sum(len(part.text) for part in parts if part.held_out) <= tail * 1.5 + 1


def test_a_text_is_cut_at_a_line_or_else_a_blank_near_the_place():
    assert find_cut("one\ntwo\nthree", 10, 5) == 8, "the docstring's example"
    assert find_cut("one\ntwo\nthree", 4, 5) == 4, "a line begins right there"
    assert find_cut("xxxxxx\nthree", 4, 5) == 4, "no line begins before: right there"
    assert find_cut("title\n" + "word " * 100, 300, 20) == 296, "no line in reach: after a blank"
    assert find_cut("title\n" + "x" * 100, 50, 20) == 50, "no blank either: right there"
    assert find_cut("x\n", 0, 9) == 0 and find_cut("x\n", 2, 9) == 2, "nothing to cut"


def test_of_a_few_documents_the_last_ones_are_held_out(tmp_path):
    texts = [letter * 99 + "\n" for letter in "abcdefghij"]
    lines = [{"id": "a", "text": text} for text in texts]  # whose hash would hold out none
    assert sides(write_lines(tmp_path / "a.jsonl", lines), 5) == (texts[:8], texts[8:])
    file = write_lines(tmp_path / "a.txt", ["ab"])
    assert sides(file, 2) == sides(file, 10**9) == (["a"], ["b"])


# --- the content of a store


def make(source: Path, out: Path, encoding=BYTES, **options) -> Store:
    meta = prepare.prepare([source], out, encoding, **options)
    made = Store.open(out)
    assert made.meta == meta | {"tokenizer": made.meta["tokenizer"]}  # it may have a copy
    return made


def texts_of(made: Store, encoding=BYTES) -> list[str]:
    pieces = np.split(made.tokens, made.offsets[1:-1])
    assert all(ids[-1] == encoding.eot_token for ids in pieces)
    return [encoding.decode(ids[:-1].tolist(), errors="strict") for ids in pieces]


def test_a_store_equals_an_example_worked_by_hand(tmp_path):
    # Of the crc32 of a to d only d's is even, so --holdout 2 holds out d, though it comes first.
    documents = {"d": "held", "a": "é", "b": "", "c": "[PAD]"}  # "[PAD]" is plain text here
    made = make(by_id(tmp_path, documents), tmp_path / "s", holdout=2)
    assert made.tokens.tolist() == [*"é".encode(), 256, *b"[PAD]", 256, *b"held", 256]
    assert made.offsets.tolist() == [0, 3, 9, 14]
    expected = {"documents": 3, "tokens": 14, "bytes": 11, "skipped": 1}
    expected |= {"train_documents": 2, "train_tokens": 9, "train_bytes": 7, "held_out_by": "hash"}
    assert expected.items() <= made.meta.items()
    assert made.tokens.dtype == np.uint16 and made.offsets.dtype == np.int64


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.sampled_from([1, 2, 4]))
def test_overlap_equals_counting_windows(tokens, train_tokens, window):
    def windows(side):
        every = [tuple(side[i : i + window]) for i in range(len(side) - window + 1)]
        return [tokens for tokens in every if 3 not in tokens]  # 3 is end-of-text

    training, held_out = windows(tokens[:train_tokens]), windows(tokens[train_tokens:])
    with mock.patch.object(store, "BLOCK", 7):
        share = store.overlap(np.array(tokens, np.uint16), train_tokens, end=3, window=window)
    known = training and held_out
    assert share == (np.mean([w in training for w in held_out]) if known else None)


def test_overlap_of_a_large_store_is_estimated_from_some_windows(monkeypatch):
    assert store.overlap(np.array([5, 6, 7, 6, 7, 8]), 3, end=9, window=2) == 0.5, "the docstring's"
    tokens = np.random.default_rng(0).integers(0, 4096, 110_000, np.uint16)
    tokens[100_000:103_000] = tokens[:3000]
    exactly = store.overlap(tokens, 100_000, end=4096)
    monkeypatch.setattr(store, "SAMPLED", 10_000)
    estimated = store.overlap(tokens, 100_000, end=4096)
    assert exactly == (3000 - 31) / (10_000 - 31)
    assert estimated != exactly and estimated == pytest.approx(exactly, abs=0.05)


def test_the_store_of_the_embedded_corpus_never_changes(tmp_path):
    """If it did, every run would."""
    made = make(MIX, tmp_path / "store", PD4K)
    assert made.meta["overlap"] == pytest.approx(0.00075, abs=1e-5)
    assert (made.meta["documents"], made.meta["train_documents"]) == (4705, 4705 - 234)
    assert made.meta["sha256"] == {
        "tokens.bin": "8d22be631ce583482ad705e2869170941f3dee3cc81afecc52e4afba9b9740f8",
        "documents.idx": "44586a44a7d3945107e322ac95b9ba2f39d62c60af095aebe785d3d360eced42",
    }


def test_the_command_prints_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one line\n" * 1000)
    prepare.main(["a.txt", "--out", "store", "--tokenizer", "bytes"])
    assert re.match(r"documents +2 .*\ntokens .*\nheld out +1 ", capsys.readouterr().out)
    made = Store.open("store")
    assert texts_of(made) == ["one line\n" * 950, "one line\n" * 50]
    assert made.meta["train_documents"] == 1 and made.meta["held_out_by"] == "tail"


def test_more_held_out_tokens_than_asked_for_are_reported(tmp_path, capsys):
    """The hash of an id knows nothing of the length."""
    held_out = next(str(i) for i in range(999) if zlib.crc32(b"%d" % i) % 20 == 0)
    file = by_id(tmp_path, {"a": "text " * 99, held_out: "other text " * 99})
    prepare.main([str(file), "--out", str(tmp_path / "store"), "--tokenizer", "bytes"])
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: 69% of the tokens are held out: cut long texts with")
    assert "overlap" in printed.out and "repeats" not in printed.out
    prepare.main([str(TINY), "--out", str(tmp_path / "tiny")])
    assert capsys.readouterr().err == ""


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path):
    ranks = tokenizer.read_ranks(tokenizer.PD4K)
    ranks |= {b"%05d" % number: 4096 + number for number in range(61_500)}
    prepare.write_ranks(tmp_path / "large.tiktoken", ranks)
    large = tokenizer.get_encoding(str(tmp_path / "large.tiktoken"))
    made = make(TINY, tmp_path / "store", large)
    assert made.tokens.dtype == np.uint32 and made.tokens.max() == large.eot_token == 65_596
    assert sorted(texts_of(made, large)) == sorted(read(TINY))
    # its bare tokens are uint32 too, because of the vocabulary
    prepare.prepare_tokens(made.path / "tokens.bin", tmp_path / "again", large)
    assert Store.open(tmp_path / "again").tokens.tolist() == made.tokens.tolist()


def test_a_store_of_a_token_file_holds_its_documents(tmp_path, monkeypatch):
    """Documents span blocks, one is empty, and the last one lacks its end-of-text."""
    monkeypatch.setattr(prepare, "BLOCK", 14)
    texts = [f"Document {n}, of some length. " * (n % 3 + 1) for n in range(20)]
    for name, own in (("train.bin", texts[:15]), ("val.bin", texts[15:])):
        ids = [[*PD4K.encode_ordinary(text), PD4K.eot_token] for text in own]
        ids.insert(2, [PD4K.eot_token])
        np.concatenate(ids)[:-1].astype(np.uint16).tofile(tmp_path / name)
    prepare.main(f"--tokens-from {tmp_path}/train.bin --out {tmp_path}/store".split())
    made = Store.open(tmp_path / "store")
    assert texts_of(made, PD4K) == texts and made.meta["train_documents"] == 15
    assert made.meta["train_bytes"] == len("".join(texts[:15]))


BARE = np.array([72, 105, 256] * 9)
FROM = "--tokens-from a.bin --tokenizer bytes"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_of_a_token_file_the_end_is_held_out(tmp_path, monkeypatch, capsys, dtype):
    monkeypatch.chdir(tmp_path)
    width = "--tokens-dtype uint32" if dtype == "uint32" else ""
    # by default the last two tokens, extended to a document boundary
    for flags, trained in ("", 24), ("--holdout 3", 18), ("--holdout 0", 27), ("--holdout 1", 0):
        BARE.astype(dtype).tofile("a.bin")
        prepare.main(f"{FROM} {width} {flags} --out {trained}".split())
        made = Store.open(str(trained))
        assert made.tokens.tolist() == BARE.tolist() and made.meta["train_tokens"] == trained
        assert "documents              9   each a part up to id 256\n" in capsys.readouterr().out
    np.full(100, 7, dtype).tofile("a.bin")  # no end-of-text to cut at
    prepare.main(f"{FROM} {width} --out one".split())
    assert Store.open("one").tokens.tolist() == [*[7] * 95, 256, *[7] * 5, 256]
    Path("meta.pkl").touch()
    characters = "--tokens-from a.bin: has ids of characters (meta.pkl): prepare its input.txt"
    assert characters in refusal(prepare.main, [*FROM.split(), "--out", "no"])


BAD_TOKENS = [
    (b"odd", FROM, "--tokens-from a.bin: is empty or not bare uint16"),
    (b"", FROM, "--tokens-from a.bin: is empty or not bare uint16"),
    (gzip.compress(b"\1\0" * 99, mtime=0) + b"\0", FROM, "a.bin: is packed: unpack it"),
    (b"\x93NUMPY\1\0" * 9, FROM, "a.bin: is packed: unpack it"),
    (POINTER, FROM, "a.bin: is a Git LFS pointer"),
    (BARE.astype("i4").tobytes(), FROM, "50% are 0: convert it, or add --tokens-dtype"),
    (BARE.astype("i8").tobytes(), f"{FROM} --tokens-dtype uint32", "a.bin: is not bare uint32"),
    (b"\0\xff", FROM, "a.bin: has token 65280, but --tokenizer bytes ends at 256"),
    (b"\1\0", f"{FROM} more.txt", "or --tokens-from"),
    (b"\1\0", f"{FROM} --split-on blank-line", "--split-on has no effect here"),
    (b"\1\0", "a.bin --tokens-dtype uint32", "--tokens-dtype has no effect here"),
    (b"\1\0", "a.bin --learn-ranks 300 --tokenizer bytes", "--tokenizer: not allowed with"),
    (b"\1\0", "--tokens-from train.bin --holdout 5", "val.bin is held out: leave it out"),
]


@pytest.mark.parametrize(("content", "argv", "said"), BAD_TOKENS)
def test_bad_token_files_and_flags_are_refused(tmp_path, monkeypatch, content, argv, said):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "train.bin", "val.bin"):
        Path(name).write_bytes(content)
    assert said in refusal(prepare.main, [*argv.split(), "--out", "no"])
    assert not Path("no").exists()


# --- a tokenizer learned from the training documents


def learn(corpus: Path, out: Path, *flags: str) -> bytes:
    out.unlink(missing_ok=True)
    prepare.main([str(corpus), "--learn-ranks", "320", "--out", str(out), *flags])
    return out.read_bytes()


def test_learned_ranks_are_reproducible_and_a_bar_shows_progress(tmp_path, monkeypatch, capsys):
    """Python's hash seed, and so the order of sets, differs from process to process."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    sha256 = hashlib.sha256(learn(TINY, tmp_path / "a.tiktoken")).hexdigest()
    assert sha256 == "4dae60ded8d1ef0d04544fda514a8b555c40e60e137a9b294aa95bda9c8cad40"
    printed = capsys.readouterr()
    assert "/320 " in printed.err
    assert printed.out == f"wrote {tmp_path / 'a.tiktoken'}: 320 tokens\n"


def test_held_out_documents_do_not_influence_the_ranks(tmp_path):
    def ranks(changed, *flags):
        texts = {"a": "text", "b": "a text", "d": "text d"} | dict.fromkeys(changed, "qzqz " * 9)
        return learn(by_id(tmp_path, texts), tmp_path / "r.tiktoken", "--learn-ranks=258", *flags)

    unchanged = ranks("", "--holdout", "2")  # holds out d, see above
    assert ranks("d", "--holdout", "2") == unchanged != ranks("a", "--holdout", "2")
    assert ranks("d", "--holdout", "0") != unchanged


@pytest.mark.slow
def test_the_embedded_ranks_are_learned_from_the_embedded_corpus(tmp_path):
    ranks = tokenizer.PD4K.read_bytes()
    assert learn(MIX, tmp_path / "a.tiktoken", "--learn-ranks", "4096") == ranks


# --- completely or not at all


def test_stopped_in_the_middle_prepare_leaves_no_store(tmp_path, monkeypatch):
    """SIGTERM leaves nothing. What SIGKILL leaves does not prevent another attempt."""
    out = tmp_path / "killed/store"
    begin = partial(prepare.main, [str(TINY), "--out", str(out)])
    for number in (3, 5):
        assert kill_at(number, begin) == -signal.SIGKILL and not out.exists()
    make(TINY, out)
    monkeypatch.setattr(store.StoreWriter, "finish", lambda *_, **more: terminate())
    with pytest.raises(SystemExit, match="143"):
        prepare.main([str(TINY), "--out", str(tmp_path / "ended")])
    assert names(tmp_path) == ["killed"]


def test_the_embedded_store_follows_the_corpus_and_a_read_only_clone(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus" / "pd-mix.jsonl.gz"
    corpus.parent.mkdir()
    corpus.write_bytes(TINY.read_bytes())
    monkeypatch.setattr(prepare.process, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    here = prepare.embedded_store("bytes")
    corpus.write_bytes(gzip.compress(b'{"text": "another corpus"}'))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    other = prepare.embedded_store("bytes")
    assert here.parent == tmp_path / ".cache" and other.parent == tmp_path / "home/parsimony"
    assert "".join(texts_of(Store.open(other))) == "another corpus"
    os.truncate(other / "tokens.bin", 9)  # a damaged one is made again
    assert prepare.embedded_store("bytes") == other and here.name != other.name
    assert "".join(texts_of(Store.open(other))) == "another corpus"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Except for the mapped tokens, whose pages the system takes back when it needs them."""
    lines = gzip.decompress(MIX.read_bytes()).splitlines()
    content = b"".join(json.loads(line)["text"].encode() + b"\n\n" for line in lines)
    files = tmp_path / "small", tmp_path / "large"
    for file, copies in zip(files, (1, 10), strict=True):  # 11 and 110 MB
        file.write_bytes(copies * content)
    command = "import sys, prepare\nfor path in sys.argv[1:]:\n"
    command += " prepare.main([path, '--split-on', 'blank-line', '--out', path + '-store'])\n"
    command += " print(open('/proc/self/status').read())"  # ru_maxrss would begin at the parent's
    printed = subprocess.check_output([sys.executable, "-c", command, *files], cwd=ROOT, text=True)
    small, large = (1024 * int(kib) for kib in re.findall(r"VmHWM:\s+(\d+) kB", printed))
    few, many = (Path(f"{file}-store/tokens.bin").stat().st_size for file in files)
    assert large - small - (many - few) < 60 << 20, "the text is 96 MB more, overlap's hashes 20 MB"
