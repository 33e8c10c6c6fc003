"""What a store holds, and which are refused; nothing that stops prepare.py leaves half a store."""

import gzip
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import LLAMA3, refusal, refusal_of, write_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st

import prepare
from support.runtime import ROOT
from support.text import store, tokenizer
from support.text.corpus import Corpus, Part
from support.text.store import Store

TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"
MIX = ROOT / "corpus" / "pd-mix.jsonl.gz"
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")
DOCUMENTS = list(Corpus([TINY]).documents())


def make(source: Path, out: Path, encoding=BYTES, **options) -> Store:
    meta = prepare.prepare([source], out, encoding, encoding.name, **options)
    made = Store.open(out)
    assert made.meta == meta
    return made


def texts_of(made: Store, encoding=BYTES) -> list[str]:
    pieces = np.split(made.tokens[:], made.offsets[1:-1])
    assert all(ids[-1] == encoding.eot_token for ids in pieces)
    return [encoding.decode(ids[:-1].tolist(), errors="strict") for ids in pieces]


@pytest.fixture(scope="module")
def ninety(tmp_path_factory) -> Path:
    lines = [{"text": f"text {n}"} for n in range(90)]
    return write_lines(tmp_path_factory.mktemp("ninety") / "in.jsonl", lines)


# --- what a store holds


def test_a_store_worked_by_hand(tmp_path):
    # crc32("a") = 3904355907 and crc32("c") = 112844655 are odd, crc32("b") = 1908338681 is too,
    # crc32("d") = 2564639436 is even: with holdout 2, "d" alone is held out, though it comes first.
    documents = {"d": "held", "a": "é", "b": "", "c": "[PAD]"}  # which is text here
    lines = [{"id": name, "text": text} for name, text in documents.items()]
    made = make(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "s", holdout=2)
    end = BYTES.eot_token
    assert made.tokens[:].tolist() == [*"é".encode(), end, *b"[PAD]", end, *b"held", end]
    assert made.offsets[:].tolist() == [0, 3, 9, 14]
    assert (made.meta["train_documents"], made.meta["train_tokens"]) == (2, 9)
    expected = {"documents": 3, "tokens": 14, "bytes": 11, "train_bytes": 7, "skipped": 1}
    assert expected.items() <= made.meta.items()
    assert made.tokens.dtype == np.uint16 and made.offsets.dtype == np.int64


def test_the_command_makes_a_store_of_every_document_and_prints_what_it_holds(tmp_path, capsys):
    prepare.main([str(TINY), "--out", str(tmp_path / "store")])
    printed = capsys.readouterr().out
    made = Store.open(tmp_path / "store")
    assert made.meta["tokenizer"] == "pd4k"
    held_out = [text for i, text in DOCUMENTS if zlib.crc32(i.encode()) % 20 == 0]
    training = [text for i, text in DOCUMENTS if zlib.crc32(i.encode()) % 20]
    assert (len(training), len(held_out)) == (454, 27)
    assert texts_of(made, PD4K) == training + held_out
    assert made.meta["train_bytes"] == len("".join(training).encode())
    assert made.meta["bytes"] == len("".join(training + held_out).encode())
    assert re.search(rf"^documents +481\ntokens +{len(made.tokens):,} .*\nheld out +27 ", printed)
    assert sum(map(int, re.findall(r"^below +[\d,]+ tokens +(\d+)", printed, re.M))) == 481


def test_the_store_of_the_embedded_corpus_is_what_it_always_was(tmp_path):
    """A change here changes every run."""
    made = make(MIX, tmp_path / "store", PD4K)
    assert (made.meta["documents"], made.meta["train_documents"]) == (4705, 4705 - 234)
    assert made.meta["sha256"] == {
        "tokens.bin": "8d22be631ce583482ad705e2869170941f3dee3cc81afecc52e4afba9b9740f8",
        "documents.idx": "44586a44a7d3945107e322ac95b9ba2f39d62c60af095aebe785d3d360eced42",
    }


def test_a_single_text_is_cut_alike_for_every_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    text = "".join(f"line {number}\n" for number in range(1000))
    Path("in", "a.txt").write_text(text)
    Path("in", "b.png").write_bytes(b"\x89PNG")
    tokenizer.write_ranks(Path("a.tiktoken"), {bytes([byte]): byte for byte in range(256)})
    prepare.main(["in", "--out", "store", "--tokenizer", "a.tiktoken"])
    made = Store.open("store")
    assert made.meta["tokenizer"] == str(tmp_path / "a.tiktoken"), "from any folder"
    training, held_out = texts_of(made)
    assert training + held_out == text and training.endswith("\n")
    assert made.meta["train_documents"] == 1 and made.meta["held_out_by"] == "tail"
    assert texts_of(make(Path("in"), tmp_path / "pd4k", PD4K), PD4K) == [training, held_out]
    lines = make(Path("in"), tmp_path / "lines", split_on=r"\n")
    assert sorted(texts_of(lines)) == sorted(text.splitlines())
    assert lines.meta["split_on"] == r"\n" and lines.meta["held_out_by"] == "hash"
    with pytest.raises(ValueError, match="--out"):
        make(Path("in"), lines.path)
    Path("in", "a.txt").unlink()
    with pytest.raises(ValueError, match=r"no document has any text; .*: 1$"):
        make(Path("in"), tmp_path / "other")


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    for number in range(65_400):
        ranks[b"%05d" % number] = len(ranks)
    tokenizer.write_ranks(tmp_path / "large.tiktoken", ranks)
    large = tokenizer.get_encoding(str(tmp_path / "large.tiktoken"))
    texts = ["65399 00001", "x"]
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    made = make(source, tmp_path / "store", large, holdout=0)
    assert made.tokens.dtype == np.uint32 and made.meta["dtype"] == "uint32"
    assert made.tokens[:].max() == large.eot_token == 65_656
    assert texts_of(made, large) == texts


# --- pieces of a text

# Letters, digits, marks, contractions; blanks that not every library calls so.
CHARACTERS = "ab1._'st \n\t\r\x1c\x85\xa0\u2003é世🙂"


def tokens_in_pieces(text: str, encoding) -> list[int]:
    parts = [Part(piece, False, ends=False) for piece in prepare.pieces_of(text)]
    return [token for done in prepare.encode(parts, encoding, np.dtype("u2")) for token in done.ids]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([PD4K, BYTES, LLAMA3]), st.text(CHARACTERS, max_size=60), st.integers(1, 9))
@example(PD4K, "one      two", 3)
@example(LLAMA3, "one...\n two;\n\n3\nend", 3)
def test_pieces_have_the_tokens_of_the_whole(encoding, text, characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "CHUNK_CHARACTERS", characters)
        assert "".join(prepare.pieces_of(text)) == text
        assert tokens_in_pieces(text, encoding) == encoding.encode_ordinary(text)


def test_where_a_text_is_cut_worked_by_hand_and_cut_elsewhere(monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", 5)
    assert list(prepare.pieces_of("one two\n\nend")) == ["one two", "\n\nend"], "the docstring's"
    assert list(prepare.pieces_of("onelongword" * 3)) == ["onelongword" * 3]
    monkeypatch.setattr(prepare, "CUT", re.compile(r"(?=.)", re.DOTALL))
    text = "one two  three\n\n  four " * 3
    assert tokens_in_pieces(text, PD4K) != PD4K.encode_ordinary(text)


# --- opening a store


def test_no_store_a_damaged_one_and_another_tokenizer_are_refused(tmp_path, ninety):
    opened = make(ninety, tmp_path / "store")
    opened.check_tokenizer(tokenizer.get_encoding("bytes"))
    with pytest.raises(ValueError, match="made with tokenizer bytes"):
        opened.check_tokenizer(PD4K)
    for name in store.WRITTEN:
        path = opened.path / name
        content = path.read_bytes()
        os.truncate(path, len(content) - 1)
        for damage in (lambda: None, path.unlink):
            damage()
            with pytest.raises(ValueError, match=f"{name}: .*prepare the store again"):
                Store.open(opened.path)
        path.write_bytes(content)
    meta = opened.path / "meta.json"
    whole = meta.read_text()
    for old, new, said in (
        ('"format": 1', '"format": 2', "is of format 2: prepare the store again"),
        ('"train_tokens": ', '"train_tokens": 1', r"its files and meta\.json do not agree"),
    ):
        meta.write_text(whole.replace(old, new))
        with pytest.raises(ValueError, match=said):
            Store.open(opened.path)
    meta.unlink()
    with pytest.raises(ValueError, match="no token store"):
        Store.open(opened.path)


# --- whole or not at all


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A corpus that takes seconds."""
    source = tmp_path_factory.mktemp("large") / "large.jsonl"
    source.write_bytes(gzip.decompress(MIX.read_bytes()) * 4)
    return source


def prepare_as_the_command_does(source: Path, out: Path, max_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background process
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    prepare.main([str(source), "--out", str(out)])


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, "full disk"])
def test_stopped_in_the_middle_no_store_appears(tmp_path, large, capfd, stop):
    """In a process of its own, forked: it need not import torch again."""
    most = 1 << 20 if stop == "full disk" else resource.RLIM_INFINITY
    process = multiprocessing.get_context("fork").Process(
        target=prepare_as_the_command_does, args=(large, tmp_path / "store", most)
    )
    process.start()
    if stop != "full disk":
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size for path in tmp_path.glob(".store.*.tmp/tokens.bin")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, stop)
    process.join(60)
    assert process.exitcode not in (None, 0)
    assert not (tmp_path / "store").exists()
    if stop == signal.SIGKILL:
        assert len(os.listdir(tmp_path)) == 1, "what it has left"
        make(TINY, tmp_path / "store")
        assert (tmp_path / "store").exists()
    else:
        assert process.exitcode > 0 and os.listdir(tmp_path) == []
    if stop == "full disk":
        assert f"{tmp_path}/store: not written: File too large" in capfd.readouterr().err


def test_of_two_that_make_one_store_the_first_to_finish_has_it(tmp_path, ninety, monkeypatch):
    def late(self):
        monkeypatch.undo()
        make(ninety, tmp_path / "store")
        return self.finish()

    monkeypatch.setattr(prepare.StoreWriter, "finish", late)
    with pytest.raises(ValueError, match=r"store: another process has made it meanwhile$"):
        make(TINY, tmp_path / "store")
    Store.open(tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]


def test_a_clone_that_cannot_be_written_has_its_corpus_in_the_users_cache(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "corpus").mkdir()
    (tmp_path / ".cache").touch()  # a file in the way
    shutil.copy(TINY, tmp_path / "corpus" / "pd-mix.jsonl.gz")
    monkeypatch.setattr(prepare.runtime, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    made = prepare.embedded_store("bytes")
    assert prepare.embedded_store("bytes") == made and made.parent == tmp_path / "home/parsimony"
    *_, said = capsys.readouterr().err.splitlines()
    instead = f"{tmp_path}/.cache/{made.name}: not written: Not a directory"
    assert said == f"preparing the embedded corpus in {made}: {instead}"
    (tmp_path / ".cache").unlink()
    (tmp_path / "home/parsimony").rename(tmp_path / ".cache")
    monkeypatch.setattr(prepare, "prepare", None)
    assert prepare.embedded_store("bytes").parent == tmp_path / ".cache", "it may be read"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--split-on blank-line"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, flags):
    content = gzip.decompress(MIX.read_bytes())
    if flags:
        texts = (json.loads(line)["text"] for line in content.splitlines())
        content = b"".join(text.encode() + b"\n\n" for text in texts)
    peaks = []
    for repeats in (1, 20):  # 11 and 220 MB
        source = tmp_path / f"{repeats}.{'txt' if flags else 'jsonl'}"
        with source.open("wb") as file:
            for _ in range(repeats):
                file.write(content)
        argv = [str(source), *flags.split(), "--out", f"{source}-store"]
        command = f"import prepare; prepare.main({argv}); import resource;"
        command += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        printed = subprocess.check_output([sys.executable, "-c", command], cwd=ROOT, text=True)
        peaks.append(int(printed.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 60, f"peak memory, MB: {peaks}"


def test_a_mistake_is_one_line_and_exit_2(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "empty.txt").touch()
    (folder / "bad.jsonl").write_text('{"text": "x"}\n' * 1000 + "nonsense")
    (folder / "a.txt").write_text("some text")
    monkeypatch.chdir(folder)
    for arguments, named in (
        (["a.txt", ""], "an input is the empty string"),
        (["empty.txt"], "empty.txt: no document has any text"),
        (["bad.jsonl"], "bad.jsonl:1001: "),
        (["a.txt", "--holdout", "-1"], "--holdout"),
        (["a.txt", "--text-column", "body"], "--text-column body: "),
        (["a.txt", "--tokenizer", "gpt3"], "gpt3"),
        (["a.txt", "--tokenizer", "x.tiktoken"], "x.tiktoken"),
        ([], "inputs"),
    ):
        argv = ["prepare.py", *arguments, "--out", str(tmp_path / "store")]
        assert named in refusal_of(prepare.main, argv, monkeypatch, capsys)
        assert os.listdir(tmp_path) == ["in"]


# --- nanoGPT's files


def test_a_file_of_tokens_is_the_store_of_its_text(tmp_path, monkeypatch):
    """Documents across chunks, one without text, and a last one without its end."""
    monkeypatch.setattr(prepare, "CHUNK_TOKENS", 7)
    texts = [f"Document {n}, of some length. " * (n % 3 + 1) for n in range(20)]
    for name, own in (("train.bin", texts[:15]), ("val.bin", texts[15:])):
        ids = [[*PD4K.encode_ordinary(text), PD4K.eot_token] for text in own]
        ids.insert(2, [PD4K.eot_token])
        np.concatenate(ids)[:-1].astype(np.uint16).tofile(tmp_path / name)
    usual = make(
        write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts[:15]]),
        tmp_path / "usual",
        PD4K,
        holdout=0,
    )
    argv = ["--tokens-from", str(tmp_path / "train.bin"), "--out", str(tmp_path / "store")]
    prepare.main(argv)
    made = Store.open(tmp_path / "store")
    assert texts_of(made, PD4K) == texts and made.meta["train_documents"] == 15
    of_training = made.meta["train_tokens"]
    assert np.array_equal(made.tokens[:of_training], usual.tokens[:])
    assert made.meta["train_bytes"] == usual.meta["bytes"]
    for content, flags, said in (
        (b"odd", [], "not made of tokens of 16 bits"),
        (b"\0\xff", [], "has token 65280, and those of --tokenizer pd4k end at 4096"),
        (b"", [], "no document has any text"),
        (b"\0\0", ["--tokenizer", "none"], "tokenizer"),
        (b"\0\0", ["more.txt"], "or --tokens-from"),
    ):
        (tmp_path / "train.bin").write_bytes(content)
        (tmp_path / "val.bin").unlink(missing_ok=True)
        assert re.search(said, refusal(prepare.main, [*argv[:-1], str(tmp_path / "no"), *flags]))
        assert not (tmp_path / "no").exists()


def test_a_tokenizer_that_does_not_fit_the_text_is_said(tmp_path, capsys):
    for name, text in (("prose", "the whale and the sea " * 50), ("digits", "0123456789 " * 50)):
        (tmp_path / name).write_text(text)
        prepare.main([str(tmp_path / name), "--out", str(tmp_path / f"{name}-store")])
        said = "support.text.tokenizer" in capsys.readouterr().out
        assert said == (name == "digits")
