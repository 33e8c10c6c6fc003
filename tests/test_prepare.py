"""What a store holds, and that an error, a kill or a full disk leaves none that is not whole.

python -m pytest tests/test_prepare.py
"""

import gzip
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import prepare
from support.base.runtime import exit_cleanly
from support.text import encoding, tokenizer
from support.text.reading import read_documents
from support.text.store import Store

try:
    import zstandard
except ImportError:  # an extra
    zstandard = None

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")


def make(inputs, out: Path, encoding=PD4K, **options) -> Store:
    inputs = inputs if isinstance(inputs, list) else [inputs]
    meta = prepare.prepare(inputs, out, encoding, encoding.name, **options)
    store = Store.open(out)
    assert store.meta == meta
    return store


def texts_of(store: Store, encoding) -> list[str]:
    pieces = np.split(store.tokens, store.offsets[1:-1])
    assert all(ids[-1] == encoding.eot_token for ids in pieces)
    return [encoding.decode(ids[:-1].tolist(), errors="strict") for ids in pieces]


def write_jsonl(path: Path, documents) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in documents))
    return path


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


# --- what a store holds


def test_a_store_worked_by_hand(tmp_path):
    # crc32("a") = 3904355907 and crc32("c") = 112844655 are odd, crc32("b") = 1908338681 is too,
    # crc32("d") = 2564639436 is even: with holdout 2, "d" alone is held out, though it comes first.
    assert [zlib.crc32(i) for i in (b"a", b"b", b"c", b"d")] == [
        3904355907,
        1908338681,
        112844655,
        2564639436,
    ]
    documents = [("d", "held"), ("a", "é"), ("b", ""), ("c", "xyz")]
    store = make(write_jsonl(tmp_path / "in.jsonl", documents), tmp_path / "s", BYTES, holdout=2)
    end = BYTES.eot_token
    assert store.tokens.tolist() == [*"é".encode(), end, *b"xyz", end, *b"held", end]
    assert store.offsets.tolist() == [0, 3, 7, 12]
    assert (store.train_documents, store.train_tokens) == (2, 7)
    expected = {"documents": 3, "tokens": 12, "bytes": 9, "train_bytes": 5, "skipped": 1}
    assert expected.items() <= store.meta.items()
    assert store.tokens.dtype == np.uint16 and store.offsets.dtype == np.int64


def test_every_document_comes_back_and_the_held_out_come_last(tmp_path):
    store = make(TINY, tmp_path / "store")
    documents = list(read_documents([TINY]))
    held_out = [text for i, text, _ in documents if zlib.crc32(i.encode()) % 20 == 0]
    training = [text for i, text, _ in documents if zlib.crc32(i.encode()) % 20]
    assert len(held_out) == 27 and len(documents) == 481
    assert texts_of(store, PD4K) == training + held_out
    assert store.train_documents == len(training)
    assert store.train_tokens == store.offsets[len(training)]
    assert store.meta["train_bytes"] == len("".join(training).encode())
    assert store.meta["bytes"] == len("".join(training + held_out).encode())
    store.verify()


def test_many_small_batches_give_the_same_store(tmp_path, monkeypatch):
    make(TINY, tmp_path / "whole")
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1)  # a task for each document
    make(TINY, tmp_path / "single")
    assert contents(tmp_path / "whole") == contents(tmp_path / "single")


def test_the_counts_of_the_embedded_corpus(tmp_path):
    store = make(ROOT / "corpus" / "pd-mix.jsonl.gz", tmp_path / "store")
    assert len(store.offsets) - 1 == store.meta["documents"] == 4705
    assert store.meta["documents"] - store.train_documents == 234


@pytest.mark.parametrize("holdout", [0, 1])
def test_holding_out_nothing_or_everything(tmp_path, holdout):
    store = make(TINY, tmp_path / "store", holdout=holdout)
    assert store.train_documents == [481, 0][holdout]
    assert texts_of(store, PD4K) == [one.text for one in read_documents([TINY])]


def test_one_text_file_holds_out_its_last_part(tmp_path):
    text = "".join(f"line {number}\n" for number in range(1000))
    (tmp_path / "input.txt").write_text(text)
    store = make(tmp_path / "input.txt", tmp_path / "store")
    training, held_out = texts_of(store, PD4K)
    assert training + held_out == text and training.endswith("\n")
    assert store.train_documents == 1 and store.meta["held_out_by"] == "tail"
    assert 0.95 * len(text) / 20 <= len(held_out) <= 1.1 * len(text) / 20
    as_bytes = make(tmp_path / "input.txt", tmp_path / "bytes", BYTES)
    assert texts_of(as_bytes, BYTES) == [training, held_out], "tokenizers can be compared"


def test_plain_text_is_cut_into_documents(tmp_path):
    texts = [f"document\n{number}" for number in range(100)]
    (tmp_path / "input.txt").write_text("\n\n".join(texts))
    store = make(tmp_path / "input.txt", tmp_path / "store", split_on="blank-line")
    assert sorted(texts_of(store, PD4K)) == sorted(texts)
    assert store.meta["split_on"] == "blank-line" and store.meta["held_out_by"] == "hash"
    assert 0 < store.train_documents < 100


def test_a_large_vocabulary_is_stored_in_uint32(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)}
    for number in range(65_400):
        ranks[b"%05d" % number] = len(ranks)
    tokenizer.write_ranks(tmp_path / "large.tiktoken", ranks)
    large = tokenizer.get_encoding(str(tmp_path / "large.tiktoken"))
    texts = ["65399 00001", "x"]
    source = write_jsonl(tmp_path / "in.jsonl", [("a", texts[0]), ("b", texts[1])])
    store = make(source, tmp_path / "store", large)
    assert store.tokens.dtype == np.uint32 and store.meta["dtype"] == "uint32"
    assert store.tokens.max() == large.eot_token == 65_656
    assert texts_of(store, large) == texts


def test_text_that_spells_a_special_token_is_text(tmp_path):
    text = "a<|endoftext|>b[MASK]"
    source = write_jsonl(tmp_path / "in.jsonl", [("a", text)])
    store = make(source, tmp_path / "store", holdout=0)
    assert (store.tokens >= PD4K.eot_token).sum() == 1
    assert texts_of(store, PD4K) == [text]


# --- sources


def write_sourced(path: Path, documents: list[tuple[str, str | None]]) -> Path:
    """JSON lines of (text, source)."""
    lines = [{"text": text, "source": source} for text, source in documents]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_source_of_each_document_is_kept_also_of_the_held_out(tmp_path, monkeypatch):
    documents = [(f"text {n}", ["wiki", "code", None][n % 3]) for n in range(90)]
    source = write_sourced(tmp_path / "in.jsonl", documents)
    for batch in (encoding.BATCH_CHARACTERS, 1):  # the numbers do not depend on the batches
        monkeypatch.setattr(encoding, "BATCH_CHARACTERS", batch)
        store = make(source, tmp_path / f"store {batch}", BYTES, holdout=5)
        assert 0 < store.train_documents < 90
        assert store.sources.dtype == np.uint16 and len(store.sources) == 90
        found = zip(texts_of(store, BYTES), store.sources, strict=True)
        named = {text: store.source_names[number] for text, number in found}
        assert named == {text: source or "unnamed" for text, source in documents}
        store.verify()
        assert "sources.idx" in store.meta["sha256"]
    one, other = (contents(tmp_path / f"store {n}") for n in (encoding.BATCH_CHARACTERS, 1))
    assert one == other


def test_a_cut_document_is_of_its_source_on_both_sides(tmp_path):
    source = write_sourced(tmp_path / "in.jsonl", [("one line\n" * 100, "wiki")])
    store = make(source, tmp_path / "store", BYTES)
    assert store.sources.tolist() == [0, 0] and store.source_names == ["wiki"]


def test_without_sources_a_store_is_what_it_always_was(tmp_path):
    source = write_sourced(tmp_path / "in.jsonl", [("one", "wiki"), ("two", "code")])
    store = make(source, tmp_path / "store", holdout=0, source_field="")
    assert store.sources is None and store.source_names == []
    assert {"sources.idx", "sources"}.isdisjoint([*contents(store.path), *store.meta])
    assert set(store.meta["sha256"]) == {"tokens.bin", "documents.idx"}


def test_a_source_for_each_document_is_refused(tmp_path):
    documents = [("x", str(number)) for number in range(65_536)]
    source = write_sourced(tmp_path / "in.jsonl", documents)
    assert make(source, tmp_path / "store", BYTES).sources.max() == 65_535
    source = write_sourced(tmp_path / "in.jsonl", [*documents, ("x", "one more")])
    with pytest.raises(ValueError, match="--source-field: more than 65,536 different sources"):
        make(source, tmp_path / "other", BYTES)
    assert not (tmp_path / "other").exists()


def test_the_summary_lists_the_sources(tmp_path, capsys):
    documents = [("abc", "small"), *[("x" * 99, "large")] * 3, ("y", None)]
    source = write_sourced(tmp_path / "in.jsonl", documents)
    argv = [str(source), "--out", str(tmp_path / "store"), "--tokenizer", "bytes"]
    prepare.main([*argv, "--holdout", "0"])
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +(\d+)   (\w+)$", printed, re.M)
    assert rows == [("3", "300", "large"), ("1", "4", "small"), ("1", "2", "unnamed")]


# --- whole or not at all


@pytest.mark.parametrize("content", [b"", b'\n{"text": ""}\n'])
def test_a_corpus_without_text_is_refused_and_leaves_nothing(tmp_path, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"in\.jsonl: no document has any text$"):
        make(tmp_path / "in.jsonl", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_input_leaves_nothing(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [("a", "text")] * 1000)
    source.write_bytes(source.read_bytes() + b"nonsense")
    with pytest.raises(ValueError, match=r"in\.jsonl:1001: is not JSON"):
        make(source, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_existing_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(ValueError, match=r"--out .*store: exists already"):
        make(TINY, tmp_path / "store")
    assert list(tmp_path.rglob("*")) == [tmp_path / "store"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("broken"), MemoryError])
def test_an_interrupt_or_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch, error):
    encode = encoding.encode_batch
    calls = []

    def fail_late(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            # The folder is under way by now: without this the test would prove nothing.
            assert len(list(tmp_path.glob(".store.*.tmp"))) == 1
            raise error
        return encode(*args, **kwargs)

    monkeypatch.setattr(encoding, "encode_batch", fail_late)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 50_000)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        make(TINY, tmp_path / "store")
    assert len(calls) >= 3
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A corpus that takes seconds."""
    source = tmp_path_factory.mktemp("large") / "large.jsonl"
    source.write_bytes(gzip.decompress((ROOT / "corpus" / "pd-mix.jsonl.gz").read_bytes()) * 4)
    return source


def prepare_as_the_command_does(source: str, out: str, max_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background process
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    prepare.main([source, "--out", out])


@contextmanager
def preparing(source: Path, out: Path, max_bytes: int = 0):
    """Prepare in a process of its own, forked: it need not import torch again."""
    context = multiprocessing.get_context("fork")
    arguments = (str(source), str(out), max_bytes)
    process = context.Process(target=prepare_as_the_command_does, args=arguments)
    process.start()
    yield process
    process.join(60)
    assert process.exitcode is not None


def wait_until_it_writes(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in folder.glob(".store.*.tmp/tokens.bin")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_in_the_middle_no_store_appears(tmp_path, large):
    with preparing(large, tmp_path / "store") as process:
        wait_until_it_writes(tmp_path)
        process.kill()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    make(TINY, tmp_path / "store").verify()  # what the killed one left is in nobody's way


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_in_the_middle_it_tidies_up(tmp_path, large, number):
    with preparing(large, tmp_path / "store") as process:
        wait_until_it_writes(tmp_path)
        os.kill(process.pid, number)
    assert process.exitcode not in (0, -number)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_leaves_nothing(tmp_path, large, capfd):
    with preparing(large, tmp_path / "store", max_bytes=1 << 20) as process:
        pass
    assert process.exitcode == 1
    assert f"ValueError: {tmp_path}/store: not written: File too large" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JSON lines", "plain text"])
def test_memory_does_not_grow_with_the_corpus(tmp_path, kind):
    content = gzip.decompress((ROOT / "corpus" / "pd-mix.jsonl.gz").read_bytes())
    flags = []
    if kind == "plain text":
        content = b"".join(
            json.loads(line)["text"].encode() + b"\n\n" for line in content.splitlines()
        )
        flags = ["--split-on", "blank-line"]
    peaks = []
    for repeats in (1, 20):  # 11 and 220 MB
        source = tmp_path / f"{repeats}.{'txt' if flags else 'jsonl'}"
        with source.open("wb") as file:
            for _ in range(repeats):
                file.write(content)
        argv = [str(source), *flags, "--out", f"{source}-store"]
        command = f"import prepare; prepare.main({argv}); import resource;"
        command += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        done = subprocess.run(
            [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 60, f"peak memory, MB: {peaks}"


def test_the_command_prints_what_it_made(tmp_path, capsys):
    prepare.main([str(TINY), "--out", str(tmp_path / "store")])
    store = Store.open(tmp_path / "store")
    printed = capsys.readouterr().out
    assert re.search(r"^documents +481 +0 more are empty", printed, re.M)
    assert re.search(rf"^tokens +{len(store.tokens):,} ", printed, re.M)
    assert re.search(r"^held out +27 ", printed, re.M)
    rows = re.findall(r"^below +([\d,]+) tokens +([\d,]+)", printed, re.M)
    lengths = np.diff(store.offsets)
    for limit, count in rows:
        limit = int(limit.replace(",", ""))
        assert int(count) == ((lengths >= limit // 2) & (lengths < limit)).sum()
    assert sum(int(count) for _, count in rows) == 481


# The stores of the embedded corpora, whose documents have ids: a change here changes every run.
STORES = {
    "pd-mix pd4k": (
        "8d22be631ce583482ad705e2869170941f3dee3cc81afecc52e4afba9b9740f8",
        "44586a44a7d3945107e322ac95b9ba2f39d62c60af095aebe785d3d360eced42",
    ),
    "pd-tiny bytes": (
        "19697f6bc6b52911be8ec9139ab8314af33725b29e3884a9ed0ae715de32ebf2",
        "a22f679ae727e889fc522e9c851a81c58249d3ecfefc1ab34353f27613d36e88",
    ),
}


@pytest.mark.parametrize("store", STORES)
def test_the_stores_of_the_embedded_corpora_are_what_they_always_were(tmp_path, store):
    corpus, name = store.split()
    source = ROOT / "corpus" / f"{corpus}.jsonl.gz"
    meta = make(source, tmp_path / "store", tokenizer.get_encoding(name)).meta
    assert (meta["sha256"]["tokens.bin"], meta["sha256"]["documents.idx"]) == STORES[store]


def test_the_command_says_what_it_skipped_and_held_out(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a line of text\n" * 100)
    (tmp_path / "in" / "b.png").write_bytes(b"\x89PNG")
    prepare.main([str(tmp_path / "in"), "--out", str(tmp_path / "store")])
    printed = capsys.readouterr().out
    assert re.search(
        r"^held out +1 +documents, \d+ tokens, the last 1/20 of the text$", printed, re.M
    )
    assert re.search(r"^skipped +1 +files that are not text", printed, re.M)
    (tmp_path / "in" / "a.txt").unlink()
    with pytest.raises(
        ValueError, match=r"in: no document has any text; files that are not text: 1$"
    ):
        prepare.main([str(tmp_path / "in"), "--out", str(tmp_path / "other")])


def test_a_file_of_ranks_is_recorded_with_all_of_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer.write_ranks(Path("a.tiktoken"), {bytes([byte]): byte for byte in range(256)})
    prepare.main([str(TINY), "--out", "store", "--tokenizer", "a.tiktoken"])
    assert Store.open("store").meta["tokenizer"] == str(tmp_path / "a.tiktoken")


WRONG = {
    "missing": (["{in}/none.jsonl"], "none.jsonl: no such file or folder"),
    "empty name": (["{in}/a.txt", ""], "an input is the empty string: name a file or a folder"),
    "empty folder": (["{in}/empty"], "empty: a folder without documents"),
    "nothing in it": (["{in}/empty.txt"], "empty.txt: no document has any text"),
    "no text": (["{in}/b.png"], "b.png: is not text in UTF-8: invalid start byte at byte 0"),
    "negative": (["{in}/a.txt", "--holdout", "-1"], "--holdout -1: needs 0"),
    "not a number": (["{in}/a.txt", "--holdout", "nan"], "argument --holdout: invalid int value"),
    "no separator": (["{in}/a.txt", "--split-on", ""], "--split-on '': needs blank-line or a str"),
    "wrong escape": (["{in}/a.txt", "--split-on", r"\d"], "--split-on '\\\\d': after"),
    "JSON lines": ([str(TINY), "--split-on", "x"], "--split-on: cuts plain text, and there are"),
    "tokenizer": (["{in}/a.txt", "--tokenizer", "gpt3"], "tokenizer 'gpt3': choose pd4k"),
    "no ranks": (["{in}/a.txt", "--tokenizer", "{in}/x.tiktoken"], "x.tiktoken: No such file"),
    "no input": ([], "the following arguments are required: inputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_and_exit_2(tmp_path, capsys, case):
    arguments, message = WRONG[case]
    folder = tmp_path / "in"
    (folder / "empty").mkdir(parents=True)
    (folder / "empty.txt").touch()
    (folder / "a.txt").write_text("some text")
    (folder / "b.png").write_bytes(b"\x89PNG")
    argv = [argument.replace("{in}", str(folder)) for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(lambda: prepare.main([*argv, "--out", str(tmp_path / "store")]))
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
