"""Difficulty: metrics worked by hand, an analysis that no shard, rank or kill changes, the index.

Most stores here are written token by token, so that documents may be anything. They have ten
tokens: 0 to 3 make the text, 9 ends it, 7 is only held out, the others never occur.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import analyze
import curriculum
import data
import difficulty
import prepare
from difficulty import DifficultyIndex, fingerprint
from support.runtime import Runtime
from support.tokenizer import get_encoding

ROOT = Path(__file__).parents[1]
ONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")
ALL = ["length", "rarity", "rarity-mean", "length-rarity"]
VOCABULARY, END = 10, 9


@pytest.fixture(autouse=True)
def new_process():
    """A process opens a store and a user's file once; here one path may hold several."""
    data.open_samples.cache_clear()
    curriculum.function_at.cache_clear()


def write_store(path, documents, tokenizer="by hand", held_out=1):
    """A store of lists of token ids, which may be empty: prepare would leave those out."""
    path.mkdir(parents=True)
    ended = [[*ids, END] for ids in (*documents, *[[7, 7]] * held_out)]
    tokens = np.array(list(chain(*ended)), np.uint16)
    offsets = np.array([0, *accumulate(map(len, ended))], np.int64)
    (path / "tokens.bin").write_bytes(tokens.tobytes())
    (path / "documents.idx").write_bytes(offsets.tobytes())
    meta = {"format": data.FORMAT, "tokens": len(tokens), "documents": len(ended)}
    meta |= {"train_documents": len(documents), "train_tokens": int(offsets[len(documents)])}
    meta |= {"dtype": "uint16", "vocab_size": VOCABULARY, "end_of_text": END}
    meta |= {"tokenizer_fingerprint": tokenizer, "sha256": str([tokens.tolist(), offsets.tolist()])}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def many_documents(count=40):
    """Short and of few tokens, so that ties abound; some empty, some at the edges."""
    random = np.random.default_rng(0)
    drawn = [random.integers(0, 4, random.integers(0, 13)).tolist() for _ in range(count)]
    return [[], [], *drawn, [1], [], []]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", many_documents())


def opener(store, kind="pieces", row_len=8):
    return partial(data.open_samples, str(store), kind, row_len)


def analyzed(folder, open_samples, names=("rarity",), ranks=ONE, workers=1):
    """Analyze; what each index holds: {file of an index: bytes}."""
    analyze.analyze(open_samples, list(names), folder, ranks, workers)
    return contents(folder)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def opened(folder, open_samples, name):
    return DifficultyIndex.open(folder / curriculum.label(name), fingerprint(open_samples(), name))


@pytest.fixture
def small(monkeypatch):
    """Shards of 7 samples, blocks of some 16 tokens, merges of 10 samples."""
    monkeypatch.setattr(difficulty, "SHARD", 7)
    monkeypatch.setattr(difficulty, "BLOCK", 16)
    monkeypatch.setattr(analyze.merged, "__defaults__", (10,))


def counted(monkeypatch, name, fail_at=None, error=KeyboardInterrupt):
    """Note the shards that `accumulated` or `measured` gets; raise instead of taking one."""
    real, shards = getattr(difficulty, name), []

    def noted(*args):
        if len(shards) == fail_at:
            raise error
        shards.append(args[-1])
        return real(*args)

    monkeypatch.setattr(difficulty, name, noted)
    return shards


def users(folder, source, name="mine"):
    """A user's file of metrics, as --metric names one."""
    (folder / "metrics.py").write_text(f"import os\nimport numpy as np\n{source}\n")
    return f"{folder / 'metrics.py'}:{name}"


# ---- metrics


def test_metrics_worked_by_hand():
    tokens, lengths = np.array([0, 0, 1], np.uint16), np.array([2, 1])
    assert difficulty.token_counts(tokens, lengths, 4).tolist() == [2, 1, 0, 0]
    # an unseen token counts as one, also in the sum: 2 + 1 + 1 + 1
    nats = difficulty.surprisal(np.array([2, 1, 0, 0]))
    assert nats == pytest.approx([math.log(5 / 2), math.log(5), math.log(5), math.log(5)])

    counts, ln2 = np.array([2, 1, 1]), math.log(2)
    values = {name: difficulty.METRICS[name].value(counts)(tokens, lengths) for name in ALL}
    assert values["length"].tolist() == [2, 1]
    assert values["rarity"] == pytest.approx([2 * ln2, math.log(4)], rel=1e-15)
    assert values["rarity-mean"] == pytest.approx([ln2, 2 * ln2], rel=1e-15)
    # 2^17 tokens of ln 4 nats are 181704 nats, which 2^18 is above
    expected = [2 + 2 * ln2 / 2**18, 1 + 2 * ln2 / 2**18]
    assert values["length-rarity"] == pytest.approx(expected, rel=1e-15)


# Counts whose shares are powers of two: a token's rarity is a whole number of bits.
BITS = np.array([1, 2, 3, 4, 6, 6, 6, 6])
COUNTS = 2 ** (6 - BITS)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=1, max_size=40))
def test_length_rarity_sorts_as_the_pair_does(texts):
    assert COUNTS.sum() == 64
    lengths = np.array([len(text) for text in texts])
    values = difficulty.length_rarity(COUNTS)(np.concatenate(texts), lengths)
    pairs = [(len(text), int(BITS[text].sum())) for text in texts]
    assert [pairs[i] for i in np.argsort(values)] == sorted(pairs)


def test_length_rarity_of_the_longest_samples():
    """All of the rarest token stays below one token more; 2^-9 nats still tell two apart."""
    counts = np.array([2**40, 1, 2**20, round(2**20 * math.exp(2**-9))])
    most = 2**17
    tokens = np.repeat([1, 0, 0, 2, 0, 3], [most - 1, most, most - 1, 1, most - 1, 1])
    lengths = np.array([most - 1, most, most, most])
    rarest, *longest = difficulty.length_rarity(counts)(tokens, lengths)
    assert rarest < min(longest)
    assert longest[1] > longest[2], "token 3 is less rare than token 2"


# ---- analysis: values and order


def texts_of(store, kind, row_len):
    """The tokens of every sample in plain Python, from the documents alone."""
    store = data.Store.open(store)
    edges = store.offsets[: store.train_documents + 1].tolist()
    documents = [store.tokens[a:b].tolist() for a, b in pairwise(edges)]
    if kind == "rows":
        documents = [list(chain(*documents))]
    if kind == "bert":  # framed in [CLS] and [SEP] instead of ended
        documents, row_len = [document[:-1] for document in documents], row_len - 2
    return [text[i : i + row_len] for text in documents for i in range(0, len(text), row_len)]


@pytest.mark.parametrize("kind", data.KINDS)
@pytest.mark.parametrize("corpus", ["by hand", "real"])
def test_values_and_order_are_those_of_a_plain_loop(store, store_dir, tmp_path, kind, corpus):
    path, row_len = (store, 8) if corpus == "by hand" else (store_dir, 256)
    open_samples = opener(path, kind, row_len)
    samples, texts = open_samples(), texts_of(path, kind, row_len)
    spans = samples.spans(np.arange(len(samples))).tolist()
    assert [samples.store.tokens[a:b].tolist() for a, b in spans] == texts
    assert (kind == "bert") == (samples.store.meta["end_of_text"] not in chain(*texts))

    counts = Counter(chain(*texts))
    shares = [max(counts[token], 1) for token in range(samples.store.meta["vocab_size"])]
    nats = [-math.log(share / sum(shares)) for share in shares]
    length = np.array([len(text) for text in texts])
    rarity = np.array([math.fsum(nats[token] for token in text) for text in texts])
    expected = {"length": length, "rarity": rarity, "rarity-mean": rarity / length}

    analyzed(tmp_path / "out", open_samples, ALL)
    found = {name: opened(tmp_path / "out", open_samples, name) for name in ALL}
    for name, index in found.items():
        ids = np.arange(len(texts))
        assert index.order.tolist() == np.lexsort((ids, index.values)).tolist()
        assert str(index.values.dtype) == difficulty.METRICS[name].dtype
    for name, values in expected.items():
        np.testing.assert_array_max_ulp(found[name].values, values.astype(found[name].values.dtype))
    order = found["length-rarity"].order
    assert np.floor(found["length-rarity"].values).tolist() == length.tolist()
    assert (np.diff(length[order] + (rarity / 2**30)[order]) > -1e-12).all()
    assert (found["rarity"].values % 1 != 0).any(), "kept as they are: whole numbers would tie"


# ---- analysis: shards, workers and ranks do not matter


@pytest.mark.parametrize("kind", data.KINDS)
def test_shards_blocks_and_merges_do_not_matter(store, tmp_path, monkeypatch, request, kind):
    open_samples = opener(store, kind)
    whole = analyzed(tmp_path / "whole", open_samples, ALL)
    lengths = np.frombuffer(whole["length/values.bin"], np.uint32)
    assert len(set(lengths.tolist())) < len(lengths) / 5, "ties straddle shards and merges"
    shards = counted(monkeypatch, "measured")
    request.getfixturevalue("small")
    assert analyzed(tmp_path / "parts", open_samples, ALL) == whole
    assert len(shards) == -(-len(lengths) // 7) > 5
    assert [first for first, _ in shards] == list(range(0, len(lengths), 7))


def test_so_many_runs_are_merged_and_no_more(store, tmp_path, monkeypatch):
    whole = analyzed(tmp_path / "whole", opener(store))
    monkeypatch.setattr(difficulty, "SHARD", 1)
    monkeypatch.setattr(difficulty, "MOST_SHARDS", 4)
    shards = counted(monkeypatch, "measured")
    assert analyzed(tmp_path / "parts", opener(store)) == whole
    assert len(shards) == 4


@pytest.mark.dist
def test_workers_do_not_matter(store, tmp_path, small):
    pid = users(tmp_path, "def mine(tokens, lengths): return np.full(len(lengths), os.getpid())")
    one = analyzed(tmp_path / "one", opener(store), ALL)
    assert analyzed(tmp_path / "two", opener(store), ALL, workers=2) == one
    analyzed(tmp_path / "pid", opener(store), [pid], workers=2)
    assert os.getpid() not in opened(tmp_path / "pid", opener(store), pid).values
    bad = users(tmp_path, "def bad(tokens, lengths): raise KeyError(3)", "bad")
    with pytest.raises(ValueError, match=r"metrics\.py:bad, on a batch .* raised KeyError: 3"):
        analyzed(tmp_path / "bad", opener(store), [bad], workers=2)


def analyzed_by_rank(rank, meet, open_samples, folder, names):
    """One of two ranks, in a process of its own; returns the line it fails with."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    try:
        analyzed(folder, open_samples, names, replace(ONE, rank=rank, world=2))
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def analyzed_by_two(tmp_path, *args):
    meet = tempfile.mktemp(dir=tmp_path)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        ranks = [pool.submit(analyzed_by_rank, rank, meet, *args) for rank in range(2)]
        return [rank.result(timeout=60) for rank in ranks]


@pytest.mark.dist
def test_a_mistake_on_one_rank_is_said_on_both_and_costs_one_shard(tmp_path, monkeypatch, small):
    """Only rank 1 meets token 5, in shard 1; nobody waits for it, and the others' work is kept."""
    store = write_store(tmp_path / "store", [*[[1, 2]] * 10, [5], *[[2, 0, 1]] * 30])
    mended = tmp_path / "mended"
    fails = f"    assert 5 not in tokens or os.path.exists({str(mended)!r}), 'five'\n"
    name = users(tmp_path, f"def mine(tokens, lengths):\n{fails}    return tokens.sum(1)")
    args = opener(store), tmp_path / "two", [name, "rarity"]
    one, other = analyzed_by_two(tmp_path, *args)
    assert one == other and one.endswith("raised AssertionError: five")
    assert not list((tmp_path / "two").rglob("index.json"))

    mended.touch()
    whole = analyzed(tmp_path / "one", opener(store), [name, "rarity"])
    shutil.copytree(tmp_path / "two", tmp_path / "left")
    shards = counted(monkeypatch, "measured")
    assert analyzed(tmp_path / "left", opener(store), [name, "rarity"]) == whole
    assert shards == [(7, 14)]
    assert analyzed_by_two(tmp_path, *args) == [None, None]
    assert contents(tmp_path / "two") == whole


@pytest.mark.dist
def test_the_command_on_two_ranks_of_torchrun(store_dir, tmp_path):
    """Rows of one token: three shards of 2^18 samples or less, and nearly all of them ties."""
    name = users(
        tmp_path, "def mine(tokens, lengths): return len(lengths) * [int(os.environ['RANK'])]"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    flags = ["--samples", "rows", "--seq-len", "1", "--metric", f"rarity,{name}"]
    done = subprocess.run(
        [*launch, ROOT / "curriculum.py", "analyze", store_dir, *flags, "--out", tmp_path / "two"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("percentile") == 1
    open_samples, folder = opener(store_dir, "rows", 1), tmp_path / "two" / "rows-1"
    ranks = opened(folder, open_samples, name).values
    assert (np.flatnonzero(np.diff(ranks)) + 1).tolist() == [2**18, 2**19]
    assert ranks[:: 2**18].tolist() == [0, 1, 0]
    one = analyzed(tmp_path / "one", open_samples)
    assert one.items() <= contents(folder).items()


# ---- analysis: begun again


@pytest.mark.parametrize("stopped", ["accumulated", "measured"])
def test_an_interrupted_analysis_goes_on_where_it_was(store, tmp_path, monkeypatch, small, stopped):
    open_samples, folder = opener(store), tmp_path / "again"
    with monkeypatch.context() as patch:
        shards = counted(patch, "measured")
        whole = analyzed(tmp_path / "whole", open_samples, ALL)
    with monkeypatch.context() as patch:
        counted(patch, stopped, fail_at=3)
        with pytest.raises(KeyboardInterrupt):
            analyzed(folder, open_samples, ALL)
    assert not list(folder.rglob("index.json"))
    for name in ALL:
        assert not DifficultyIndex.exists(folder / name, fingerprint(open_samples(), name))
        with pytest.raises(
            ValueError, match=f"{name}: no index: make it with curriculum.py analyze"
        ):
            opened(folder, open_samples, name)
    summed, measured = (counted(monkeypatch, name) for name in ("accumulated", "measured"))
    assert analyzed(folder, open_samples, ALL) == whole
    assert (summed, measured) == {
        "accumulated": (shards[3:], shards),
        "measured": ([], shards[3:]),
    }[stopped]


def test_a_users_function_that_fails_late_keeps_what_is_done(store, tmp_path, monkeypatch, small):
    """Shard by shard: all metrics of the one that failed, none of the others."""
    fails = f"    assert os.path.exists({str(tmp_path / 'mended')!r}) or 1 not in tokens[:, :1]\n"
    store = write_store(tmp_path / "other", [*[[0]] * 30, [1], *[[0]] * 30])
    name = users(tmp_path, f"def mine(tokens, lengths):\n{fails}    return lengths")
    with pytest.raises(ValueError, match=r"metrics\.py:mine, on a batch .* AssertionError"):
        analyzed(tmp_path / "out", opener(store), [name, "rarity"])
    assert not list((tmp_path / "out").rglob("index.json"))
    (tmp_path / "mended").touch()
    shards = counted(monkeypatch, "measured")
    analyzed(tmp_path / "out", opener(store), [name, "rarity"])
    assert shards[0] == (28, 35) and len(shards) == 5


def test_only_what_is_lacking_is_analyzed(store, tmp_path, monkeypatch):
    before = analyzed(tmp_path / "out", opener(store), ["rarity"])
    summed, measured = (counted(monkeypatch, name) for name in ("accumulated", "measured"))
    after = analyzed(tmp_path / "out", opener(store), ["rarity", "length"])
    assert before.items() < after.items()
    assert (len(summed), len(measured)) == (0, 1), "length needs no sum, and rarity nothing"
    assert analyzed(tmp_path / "out", opener(store), ["rarity", "length"]) == after
    assert len(measured) == 1


def killed(where, name, number, action):
    """SIGKILL a process that does `action` at a call of a function, which has written half."""

    def child():
        calls, real = [], getattr(where, name)

        def last(*args):
            calls.append(args)
            if len(calls) == number:
                if name == "save":
                    args[0].write(b"half")
                    args[0].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(where, name, last)
        action()

    process = get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.dist
@pytest.mark.parametrize(
    ("where", "name", "number"),
    [(difficulty, "measured", 4), (np, "save", 20), (difficulty, "split", 3), (os, "fsync", 2)],
)
def test_killed_at_any_moment_and_analyzed_again(
    store, tmp_path, monkeypatch, small, where, name, number
):
    """While a shard is measured, while it is written, while they are merged, and just after."""
    folder = tmp_path / "killed"
    names = ["length", "rarity"]
    whole = analyzed(tmp_path / "whole", opener(store), names)
    if name == "fsync":  # past those of the shards: sums of one metric, runs of two
        number += 3 * len(range(0, len(opener(store)()), 7))
    killed(where, name, number, partial(analyzed, folder, opener(store), names))
    assert not (folder / "length").exists(), "it is merged first"
    left = set(contents(folder))
    half = any(file.endswith(".tmp") for file in left)
    assert half == (name != "measured"), "what was being written has no name yet"
    shards = counted(monkeypatch, "measured")
    assert analyzed(folder, opener(store), names) == whole, "also nothing else is left"
    done = [file for file in left if re.fullmatch(r"\.rarity-\w+/run-\d+-\d+\.npy", file)]
    assert len(done) >= 3 and len(done) + len(shards) == len(range(0, len(opener(store)()), 7))


@pytest.mark.parametrize("cut", [0, 100, -1])
@pytest.mark.parametrize("kind", ["run", "total"])
def test_a_shard_that_is_not_whole_is_done_anew(store, tmp_path, monkeypatch, small, kind, cut):
    """As after a power failure, on a disk that keeps a name before what it names."""
    folder = tmp_path / "cut"
    whole = analyzed(tmp_path / "whole", opener(store))
    killed(difficulty, "split", 3, partial(analyzed, folder, opener(store)))
    files = sorted(folder.glob(f".rarity-*/{kind}-*.npy"))
    os.truncate(files[2], cut if cut >= 0 else files[2].stat().st_size - 1)
    summed, measured = (counted(monkeypatch, name) for name in ("accumulated", "measured"))
    assert analyzed(folder, opener(store)) == whole
    assert (len(summed), len(measured)) == ((0, 1) if kind == "run" else (1, 0))


def test_what_a_kill_left_beside_a_whole_index_is_removed(store, tmp_path):
    before = analyzed(tmp_path / "out", opener(store))
    left = tmp_path / "out" / f".rarity-{fingerprint(opener(store)(), 'rarity')[:16]}"
    left.mkdir()
    (left / "run-000000000000-000000000007.npy").write_bytes(b"left")
    assert analyzed(tmp_path / "out", opener(store)) == before


def test_no_more_workers_than_shards(store, tmp_path, monkeypatch, small):
    asked, pool = [], ProcessPoolExecutor

    def recorded(number, **options):
        asked.append(number)
        return pool(number, **options)

    monkeypatch.setattr(difficulty, "ProcessPoolExecutor", recorded)
    analyzed(tmp_path / "out", opener(store), workers=100_000)
    assert asked and max(asked) == len(range(0, len(opener(store)()), 7))


@pytest.mark.dist
def test_a_worker_that_is_killed_is_one_line(store, tmp_path, small):
    name = users(tmp_path, "import os\ndef mine(*args): os.kill(os.getpid(), 9)")
    with pytest.raises(ValueError, match=r"^a worker was killed.* fewer --workers$"):
        analyzed(tmp_path / "out", opener(store), [name], workers=2)


@pytest.mark.dist
def test_workers_end_with_the_command_that_is_killed(store, tmp_path):
    """Else they would wait for ever, and with them the lock that they inherit."""
    users(tmp_path, "import time\ndef mine(*args): time.sleep(100)")
    flags = ["--metric", "metrics.py:mine", "--workers", "2", "--seq-len", "8", "--out", "out"]
    code = f"import difficulty; analyze.SHARD = 7; analyze.main({[str(store), *flags]})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(workers := children.read_text().split()) == 2 and workers)
    workers = [Path("/proc", pid) for pid in children.read_text().split()]
    time.sleep(0.5)  # until they sleep in a shard
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(running, workers)))
    analyze.main([str(store), "--metric", "rarity", "--seq-len", "8", "--out", f"{tmp_path}/out"])


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(process):
    try:
        return not re.search(r"^State:\s+Z", (process / "status").read_text(), re.M)
    except OSError:
        return False


def test_who_waits_for_another_analysis_says_so(tmp_path, capfd):
    with data.folder_lock(tmp_path):
        second = get_context("fork").Process(target=lambda: data.folder_lock(tmp_path).__enter__())
        second.start()
        second.join(0.5)
        assert second.is_alive()
    second.join(30)
    assert second.exitcode == 0
    line = f"waiting for another process that writes into {tmp_path}\n"
    assert capfd.readouterr().err == line


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    store = write_store(tmp_path / "store", [[1, 2], [VOCABULARY, 3]])
    message = rf"store: token {VOCABULARY} is outside its vocabulary of {VOCABULARY}: the store is"
    for name in ("rarity", "length"):
        with pytest.raises(ValueError, match=message):
            analyzed(tmp_path / "out", opener(store), [name])


def test_what_other_analyses_left_is_removed_with_the_next(store, tmp_path):
    """But no other metric's: rarity-mean begins as rarity does."""
    folder = tmp_path / "out"
    stale, others = folder / f".rarity-{'0f' * 8}", folder / f".rarity-mean-{'0f' * 8}"
    stale.mkdir(parents=True)
    others.mkdir()
    analyzed(folder, opener(store))
    assert sorted(path.name for path in folder.iterdir()) == [others.name, "rarity"]


# ---- fingerprint


def changed(what, path):
    """A store that differs from many_documents() in one thing, and the samples of it."""
    kind, row_len, documents, more = "pieces", 8, many_documents(), {}
    if what == "text":
        documents[2] = [2, *documents[2][1:]] if documents[2][0] != 2 else [1, *documents[2][1:]]
    elif what == "edges":  # the same stream of tokens, cut elsewhere
        documents[2:4] = [[*documents[2], END, *documents[3]]]
    elif what == "held-out share":
        documents, more = [*documents, [7, 7]], {"held_out": 0}
    elif what == "tokenizer":
        more = {"tokenizer": "other"}
    elif what == "sample length":
        row_len = 9
    elif what == "kind":
        kind = "rows"
    return opener(write_store(path, documents, **more), kind, row_len)


@pytest.mark.parametrize(
    "what", ["text", "edges", "held-out share", "tokenizer", "sample length", "kind"]
)
def test_an_index_of_something_else_is_refused(store, tmp_path, what):
    """Upstream takes any index that lies in the folder."""
    before = analyzed(tmp_path / "out", opener(store))
    old, other = fingerprint(opener(store)(), "rarity"), changed(what, tmp_path / "changed")
    new = fingerprint(other(), "rarity")
    refused = rf"rarity: an index with fingerprint {old[:16]}, .* are {new[:16]}: remove it"
    with pytest.raises(ValueError, match=refused):
        opened(tmp_path / "out", other, "rarity")
    with pytest.raises(ValueError, match=refused):
        analyzed(tmp_path / "out", other)
    assert contents(tmp_path / "out") == before


def test_an_index_goes_with_a_store_that_moves(store, tmp_path):
    analyzed(store / "curriculum" / "pieces-8", opener(store))
    moved = opener(shutil.move(store, tmp_path / "moved"))
    assert len(opened(tmp_path / "moved" / "curriculum" / "pieces-8", moved, "rarity"))


def test_a_store_prepared_anew_at_the_same_path_is_refused(tmp_path):
    store, kept = tmp_path / "store", str(tmp_path / "kept")
    for text in ("one text", "two text"):
        (tmp_path / "text").write_text(text)
        prepare.prepare([tmp_path / "text"], store, get_encoding("bytes"), "bytes", holdout=0)
        data.open_samples.cache_clear()
        if text == "one text":
            analyze.ready(opener(store)(), "rarity", kept, ONE)
            shutil.rmtree(store)
    with pytest.raises(ValueError, match=r"kept/pieces-8/rarity: an index with fingerprint"):
        analyze.ready(opener(store)(), "rarity", kept, ONE)


def test_a_users_function_that_changed_is_refused(store, tmp_path):
    name = users(tmp_path, "def mine(tokens, lengths): return lengths")
    analyzed(tmp_path / "out", opener(store), [name])
    old = fingerprint(opener(store)(), name)
    users(tmp_path, "def mine(tokens, lengths): return -lengths")
    new = fingerprint(opener(store)(), name)
    for attempt in (partial(analyzed, names=[name]), partial(opened, name=name)):
        with pytest.raises(ValueError, match=rf"fingerprint {old[:16]}, .* are {new[:16]}"):
            attempt(tmp_path / "out", opener(store))


@pytest.mark.parametrize("file", ["values.bin", "order.bin"])
@pytest.mark.parametrize("size", [None, 0, -1, 4])
def test_a_file_of_another_size_is_refused(store, tmp_path, file, size):
    analyzed(tmp_path, opener(store))
    path = tmp_path / "rarity" / file
    if size is None:
        path.unlink()
    else:
        whole = path.stat().st_size
        os.truncate(path, whole + size if size else 0)
    with pytest.raises(ValueError, match=r"rarity: a damaged index \(.*\): remove it and analyze"):
        opened(tmp_path, opener(store), "rarity")


@pytest.mark.parametrize(
    "text", ["", '{"fingerprint": "', "[]", "{}", "3", '{"fingerprint": 5}', "\x80", None]
)
def test_a_damaged_index_is_refused(store, tmp_path, text):
    analyzed(tmp_path / "out", opener(store))
    about = tmp_path / "out/rarity/index.json"
    about.unlink()
    if text is not None:
        about.write_bytes(text.encode("latin-1"))
    for attempt in (analyzed, partial(opened, name="rarity")):
        with pytest.raises(ValueError, match="rarity: a damaged index: remove it and analyze anew"):
            attempt(tmp_path / "out", opener(store))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("index.json", b'"samples"', b'"number"'),
        ("index.json", b'"float32"', b'"floot32"'),
        ("index.json", b'"uint32"', b'"float32"'),
        ("order.bin", None, b"\x00"),
        ("order.bin", None, b"\xff"),
        ("values.bin", None, b"\xff"),
    ],
)
def test_an_index_damaged_inside_is_refused(store, tmp_path, file, old, new):
    analyzed(tmp_path / "out", opener(store))
    path = tmp_path / "out/rarity" / file
    whole = path.read_bytes()
    path.write_bytes(new * len(whole) if old is None else whole.replace(old, new))
    assert path.read_bytes() != whole
    with pytest.raises(ValueError, match=r"rarity: a damaged index \(.*\): remove it and analyze"):
        opened(tmp_path / "out", opener(store), "rarity")


# ---- a user's functions


def test_a_users_functions_get_rows_and_what_they_summed(store, tmp_path, small):
    name = users(
        tmp_path,
        """
def mine(tokens, lengths, total):
    assert tokens.shape == (len(lengths), lengths.max())
    assert (tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] == 0).all()
    last = tokens[np.arange(len(lengths)), lengths - 1]
    return 1000 * last + tokens.sum(1) + lengths - total[1] / total[0]


def both(tokens, lengths):
    return np.array([len(lengths), tokens.sum()])


mine.accumulate = both
""",
    )
    texts = texts_of(store, "pieces", 8)
    mean = sum(map(sum, texts)) / len(texts)
    analyzed(tmp_path / "out", opener(store), [name])
    index = opened(tmp_path / "out", opener(store), name)
    expected = [1000 * text[-1] + sum(text) + len(text) - mean for text in texts]
    assert index.values.tolist() == expected
    assert index.order.tolist() == np.argsort(expected, kind="stable").tolist()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("lengths[:-1]", r"returned shape \(1,\), not \(2,\)"),
        ("lengths[:, None]", r"returned shape \(2, 1\), not \(2,\)"),
        ("0", r"returned shape \(\), not \(2,\)"),
        ("lengths * 1j", "returned complex128, not numbers"),
        ("['a', 'b']", "returned <U1, not numbers"),
        ("None", "returned object, not numbers"),
        ("lengths / 0 * 0", "returned a value that is not finite"),
        ("lengths * np.inf", "returned a value that is not finite"),
        ("exit(3)", "raised SystemExit: 3"),
    ],
)
def test_a_mistake_in_a_users_function_is_one_line(tmp_path, returned, said):
    name = users(tmp_path, f"def mine(tokens, lengths): return {returned}")
    store = write_store(tmp_path / "store", [[1, 2], [3]])
    with np.errstate(all="ignore"), pytest.raises(ValueError) as error:
        analyzed(tmp_path / "out", opener(store), [name])
    assert re.fullmatch(
        rf".*metrics\.py:mine, on a batch of shape \(2, 3\): {said}.*", str(error.value)
    )


def test_a_mistake_in_what_a_user_sums_is_one_line(store, tmp_path):
    name = users(tmp_path, "def mine(*args): pass\nmine.accumulate = lambda *args: [np.nan]")
    with pytest.raises(ValueError, match=r"py:mine\.accumulate, on a batch of .* is not finite"):
        analyzed(tmp_path / "out", opener(store), [name])


def test_what_a_user_sums_keeps_its_shape(store, tmp_path, small):
    mine = "def mine(*args): pass\nmine.accumulate = lambda tokens, lengths: lengths * 0"
    with pytest.raises(ValueError, match=r"mine\.accumulate: returned shape \(\d,\), then \(\d,\)"):
        analyzed(tmp_path / "out", opener(store), [users(tmp_path, mine)])


def test_what_a_user_sums_does_not_overflow(store, tmp_path, small):
    mine = "def mine(tokens, lengths, total): return lengths * 0 + total"
    accumulate = "mine.accumulate = lambda tokens, lengths: np.int8(100)"
    name = users(tmp_path, f"{mine}\n{accumulate}")
    analyzed(tmp_path / "out", opener(store), [name])
    samples = opener(store)()
    shards = [*range(0, len(samples), 7), len(samples)]
    blocks = sum(len(list(analyze.blocks(samples, a, b))) for a, b in pairwise(shards))
    assert blocks > 10
    assert opened(tmp_path / "out", opener(store), name).highest(1) == 100 * blocks


def test_what_a_user_summed_cannot_be_changed_later(store, tmp_path):
    mine = "def mine(tokens, lengths, total):\n    total += 1\n    return lengths"
    name = users(tmp_path, f"{mine}\nmine.accumulate = lambda tokens, lengths: [1]")
    with pytest.raises(ValueError, match=r"mine, on a batch .*: raised ValueError: .* read-only"):
        analyzed(tmp_path / "out", opener(store), [name])


# ---- merge


runs_of_values = st.lists(st.lists(st.integers(-3, 3), max_size=12), min_size=1, max_size=6)


def runs_of(values):
    """A sorted run of each list, ids counted on from run to run."""
    edges = [0, *accumulate(map(len, values))]
    runs = [np.empty(len(part), [("value", "f4"), ("id", "u4")]) for part in values]
    for run, part, first in zip(runs, values, edges, strict=False):
        run["value"], run["id"] = np.sort(part), first + np.argsort(part, kind="stable")
    return runs, np.argsort(list(chain(*values)), kind="stable").tolist()


@settings(deadline=None)
@given(runs_of_values)
@example([[1, 3, 3], [2, 3, 4]])
def test_a_split_is_that_of_the_sorted_whole(values):
    runs, order = runs_of(values)
    for rank in range(1, len(order) + 1):
        cuts = analyze.split(runs, rank)
        ids = [run["id"][:cut].tolist() for run, cut in zip(runs, cuts, strict=True)]
        assert sorted(chain(*ids)) == sorted(order[:rank])
    if values == [[1, 3, 3], [2, 3, 4]]:
        assert analyze.split(runs, 4) == [3, 1]


@settings(deadline=None, max_examples=40)
@given(runs_of_values, st.integers(1, 30))
def test_merged_runs_are_the_sorted_whole(values, chunk):
    runs, order = runs_of(values)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npy" for i in range(len(runs))]
        for file, run in zip(files, runs, strict=True):
            np.save(file, run)
        parts = [part.tolist() for part in analyze.merged(files, chunk)]
    assert list(chain(*parts)) == order
    assert all(len(part) == chunk for part in parts[:-1])


# ---- index


def index_of(values):
    values = np.array(values, np.float32)
    return DifficultyIndex({}, values, np.argsort(values, kind="stable").astype(np.uint32))


def test_percent_is_the_nearest_rank():
    """Upstream takes N // 100 samples for a percent, which is none at all below a hundred."""
    for n in (1, 2, 99, 100, 101):
        index = index_of(range(n))
        found = [index.at_percent(percent) for percent in range(1, 101)]
        assert found == [math.ceil(Fraction(n * percent, 100)) for percent in range(1, 101)]
        assert found[0] >= 1 and found == sorted(found) and found[-1] == n
    # by hand: 1 of 1; half of 2; 0.99 and 49.5 of 99 round up; so do 1.01 and 99.99 of 101
    by_hand = {
        (1, 1): 1,
        (2, 50): 1,
        (2, 51): 2,
        (99, 1): 1,
        (99, 50): 50,
        (101, 1): 2,
        (101, 99): 100,
    }
    assert {at: index_of(range(at[0])).at_percent(at[1]) for at in by_hand} == by_hand


def test_ties_are_in_or_out_together():
    index = index_of([5, 2, 5, 2.5, 5, 9])
    found = {value: index.at_value(value) for value in (-1, 1.9, 2, 2.4, 2.5, 4, 5, 8.9, 9, 99)}
    assert list(found.values()) == [0, 0, 1, 1, 2, 2, 5, 5, 6, 6]
    assert [index.highest(count) for count in range(1, 7)] == [2, 2.5, 5, 5, 5, 9]


ties = st.lists(st.integers(0, 4), min_size=1, max_size=40)


@settings(deadline=None)
@given(ties, st.integers(-1, 5))
def test_at_value_counts(values, value):
    assert index_of(values).at_value(value) == sum(other <= value for other in values)


@settings(deadline=None)
@given(ties, st.randoms())
def test_holds_is_membership_among_the_easiest(values, random):
    index, ids = index_of(values), list(range(len(values)))
    random.shuffle(ids)
    for count in range(1, len(ids) + 1):
        easiest = set(index.order[:count].tolist())
        assert index.holds(np.array(ids), count).tolist() == [i in easiest for i in ids]


# ---- ready


def test_ready_makes_once_what_a_small_store_lacks(store, monkeypatch, capsys):
    samples, asked = opener(store)(), []
    real = analyze.analyze

    def noted(open_samples, names, *rest):
        asked.append(names)
        real(open_samples, names, *rest)

    monkeypatch.setattr(difficulty, "analyze", noted)
    first = analyze.ready(samples, "seqlen,rarity", None, ONE)
    folder = store / "curriculum" / "pieces-8"
    assert f"analyzing {store} by rarity, once: index in {folder}" in capsys.readouterr().out
    again = analyze.ready(samples, "rarity", None, ONE)
    assert not capsys.readouterr().out
    both = analyze.ready(samples, "length,rarity", None, ONE)
    assert asked == [["rarity"], ["length"]]
    assert [list(found) for found in (first, again, both)] == [["rarity"]] * 2 + [
        ["length", "rarity"]
    ]
    assert len({found["rarity"].order.tobytes() for found in (first, again, both)}) == 1


@pytest.mark.parametrize("kept", [None, "kept"])
def test_ready_names_the_command_for_a_big_store(store, tmp_path, monkeypatch, kept):
    samples, kept = opener(store, "bert", 16)(), kept and str(tmp_path / kept)
    monkeypatch.setattr(difficulty, "SMALL", samples.store.train_tokens - 1)
    with pytest.raises(ValueError, match="has no index by rarity, length: make it") as error:
        analyze.ready(samples, "rarity,length", kept, ONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"], "nothing is analyzed"
    command = shlex.split(str(error.value).partition("python curriculum.py ")[2])
    curriculum.main(command)
    assert list(analyze.ready(samples, "rarity,length", kept, ONE)) == ["rarity", "length"]


def test_ready_makes_a_store_of_just_that_size(store, monkeypatch):
    samples = opener(store)()
    monkeypatch.setattr(difficulty, "SMALL", samples.store.train_tokens)
    assert analyze.ready(samples, "rarity", None, ONE)


@pytest.mark.parametrize("lengths", ["seqlen", "seqlen-reshape"])
def test_a_length_needs_no_index(lengths):
    assert analyze.ready(None, lengths, None, None) == {}


# ---- command


@pytest.fixture
def hundred(tmp_path):
    """Samples of 1 to 100 tokens, the longest first: n - 1 times token 0, then end-of-text."""
    return write_store(tmp_path / "hundred", [[0] * n for n in reversed(range(100))])


def test_command_prints_percentiles(hundred, capsys):
    curriculum.main(["analyze", str(hundred), "--metric", "rarity,length", "--seq-len", "128"])
    first, *table = capsys.readouterr().out.splitlines()
    assert first == (
        f"100 samples of at most 128 tokens; index: {hundred / 'curriculum' / 'pieces-128'}"
    )
    head, rarity, length = (line.split() for line in table)
    assert head == ["percentile", *map(str, analyze.PERCENTS)]
    assert length == ["length", *map(str, (1, *analyze.PERCENTS[1:]))]
    total = 99 * 100 / 2 + 100 + 8  # of token 0, of end-of-text, and eight never seen
    text, end = -math.log(4950 / total), -math.log(100 / total)
    expected = [(n - 1) * text + end for n in map(int, length[1:])]
    assert rarity[0] == "rarity"
    assert [float(value) for value in rarity[1:]] == pytest.approx(expected, rel=1e-5)


def test_command_writes_where_it_is_told(hundred, tmp_path, capsys):
    before = contents(hundred)
    flags = f"--metric rarity --samples bert --seq-len 16 --workers 1 --out {tmp_path / 'out'}"
    curriculum.main(["analyze", str(hundred), *flags.split()])
    assert contents(hundred) == before
    assert len(opened(tmp_path / "out/bert-16", opener(hundred, "bert", 16), "rarity")) > 100


def test_command_says_what_its_plot_needs(hundred, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"^--plot needs its package: pip install"):
        curriculum.main(["analyze", str(hundred), "--metric", "rarity", "--plot", "a.png"])


def test_command_plots_a_figure_a_metric(hundred, tmp_path):
    pytest.importorskip("matplotlib")
    metrics, file = "rarity,length", str(tmp_path / "a.png")
    curriculum.main(["analyze", str(hundred), "--metric", metrics, "--plot", file])
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["a-length.png", "a-rarity.png"]


REFUSED = {
    "--metric seqlen": "--metric seqlen needs no analysis: it takes samples as they come",
    "--metric rarity,seqlen": "--metric seqlen needs no analysis",
    "--metric length --samples rows": "length cannot tell rows apart that are all 256 tokens",
    "--metric length-rarity --samples rows": "length-rarity cannot tell rows apart",
    "--metric hard": "hard is unknown: choose of",
    "--metric rarity,rarity": "takes one length, and each name once",
    "--metric rarity --workers 0": "--workers 0 must be at least 1",
    "--metric rarity --seq-len 0": r"--seq-len 0: a row has from 1 to 2\^31 tokens",
    "--metric rarity --seq-len 99999999999999999999": "--seq-len 99999999999999999999: a row",
    "--metric rarity --plot nowhere/a.png": "--plot nowhere/a.png: give a file in a folder",
    "--metric rarity --plot a.txt": "--plot a.txt: give a file in a folder, ending in .*png",
    "--metric nowhere.py:mine": r"nowhere\.py:mine: there is no Python file nowhere\.py",
    "--metric metrics.py:yours": r"metrics\.py defines no function yours",
    "--metric metrics.py:np": r"metrics\.py defines no function np",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_command_refuses(hundred, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    users(tmp_path, "def mine(tokens, lengths): return lengths")
    with pytest.raises(ValueError, match=REFUSED[flags]):
        curriculum.main(["analyze", str(hundred), *flags.split()])
    assert not (hundred / "curriculum").exists()


def test_a_store_without_training_text_is_refused(tmp_path):
    store = write_store(tmp_path / "store", [])
    with pytest.raises(ValueError, match="store holds no training document: prepare more text"):
        analyzed(tmp_path / "out", opener(store))
