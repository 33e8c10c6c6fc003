"""Analysis: values and order of a plain loop, that no shard, worker, rank or kill changes."""

import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from small_stores import (
    ALL,
    ONE,
    VOCABULARY,
    analyzed,
    contents,
    many_documents,
    opened,
    opener,
    users,
    write_store,
)

import analyze
import difficulty
from difficulty import DifficultyIndex, fingerprint
from support.rows import ranking
from support.rows.samples import KINDS
from support.text.store import Store

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", many_documents())


@pytest.fixture
def small(monkeypatch):
    """Shards of 7 samples, blocks of some 16 tokens, merges of 10 samples."""
    monkeypatch.setattr(analyze, "SHARD", 7)
    monkeypatch.setattr(difficulty, "BLOCK", 16)
    monkeypatch.setattr(ranking.merged, "__defaults__", (10,))


def counted(monkeypatch, name, fail_at=None, error=KeyboardInterrupt):
    """Note the shards that `sum_shard` or `sort_shard` gets; raise instead of taking one."""
    real, shards = getattr(analyze, name), []

    def noted(*args):
        if len(shards) == fail_at:
            raise error
        shards.append(args[-1])
        return real(*args)

    monkeypatch.setattr(analyze, name, noted)
    return shards


# ---- analysis: values and order


CUTS = [*((kind, "split") for kind in KINDS), ("pieces", "truncate"), ("bert", "truncate")]


def texts_of(store, kind, seq_len, long="split"):
    """The tokens of every sample in plain Python, from the documents alone."""
    store = Store.open(store)
    edges = store.offsets[: store.train_documents + 1].tolist()
    documents = [store.tokens[a:b].tolist() for a, b in pairwise(edges)]
    if kind == "rows":
        documents = [list(chain(*documents))]
    if kind in ("bert", "pairs"):  # framed in [CLS] and [SEP]s instead of ended
        documents = [document[:-1] for document in documents]
        seq_len -= 2 if kind == "bert" else 3
    if long == "truncate":
        documents = [document[:seq_len] for document in documents]
    return [text[i : i + seq_len] for text in documents for i in range(0, len(text), seq_len)]


@pytest.mark.parametrize(("kind", "long"), CUTS)
@pytest.mark.parametrize("corpus", ["by hand", "real"])
def test_values_and_order_are_those_of_a_plain_loop(store, store_dir, tmp_path, kind, long, corpus):
    path, seq_len = (store, 8) if corpus == "by hand" else (store_dir, 256)
    open_samples = opener(path, kind, seq_len, long)
    samples, texts = open_samples(), texts_of(path, kind, seq_len, long)
    spans = samples.spans(np.arange(len(samples))).tolist()
    assert [samples.store.tokens[a:b].tolist() for a, b in spans] == texts
    assert (kind in ("bert", "pairs")) == (samples.store.meta["end_of_text"] not in chain(*texts))

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


@pytest.mark.parametrize("kind", KINDS)
def test_shards_blocks_and_merges_do_not_matter(store, tmp_path, monkeypatch, request, kind):
    open_samples = opener(store, kind)
    whole = analyzed(tmp_path / "whole", open_samples, ALL)
    lengths = np.frombuffer(whole["length/values.bin"], np.uint32)
    assert len(set(lengths.tolist())) < len(lengths) / 5, "ties straddle shards and merges"
    shards = counted(monkeypatch, "sort_shard")
    request.getfixturevalue("small")
    assert analyzed(tmp_path / "parts", open_samples, ALL) == whole
    assert len(shards) == -(-len(lengths) // 7) > 5
    assert [first for first, _ in shards] == list(range(0, len(lengths), 7))


def test_no_more_runs_are_merged_than_can_be_open(store, tmp_path, monkeypatch):
    whole = analyzed(tmp_path / "whole", opener(store))
    monkeypatch.setattr(analyze, "SHARD", 1)
    monkeypatch.setattr(analyze, "MOST_SHARDS", 4)
    shards = counted(monkeypatch, "sort_shard")
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
        analyzed(folder, open_samples, names, replace(ONE, rank=rank, world_size=2))
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
    shards = counted(monkeypatch, "sort_shard")
    assert analyzed(tmp_path / "left", opener(store), [name, "rarity"]) == whole
    assert shards == [(7, 14)]
    assert analyzed_by_two(tmp_path, *args) == [None, None]
    assert contents(tmp_path / "two") == whole


def command_as_torchrun_starts_it(rank, port, argv):
    """One of two ranks, with the environment that torchrun gives it; returns what it prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        analyze.main(argv)
    dist.destroy_process_group()
    return out.getvalue()


@pytest.mark.dist
def test_the_command_on_two_ranks(store_dir, tmp_path):
    """Rows of one token: three shards of 2^18 samples or less, and nearly all of them ties."""
    rank_of = "def mine(tokens, lengths): return len(lengths) * [int(os.environ['RANK'])]"
    name = users(tmp_path, rank_of)
    argv = [str(store_dir), "--samples", "rows", "--seq-len", "1", "--metric", f"rarity,{name}"]
    argv += ["--out", str(tmp_path / "two")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        ranks = [pool.submit(command_as_torchrun_starts_it, r, port, argv) for r in range(2)]
        first, second = (rank.result(timeout=60) for rank in ranks)
    assert first.count("percentile") == 1 and second == ""
    open_samples, folder = opener(store_dir, "rows", 1), tmp_path / "two" / "rows-1"
    measured_by = opened(folder, open_samples, name).values
    assert (np.flatnonzero(np.diff(measured_by)) + 1).tolist() == [2**18, 2**19]
    assert measured_by[:: 2**18].tolist() == [0, 1, 0]
    one = analyzed(tmp_path / "one", open_samples)
    assert one.items() <= contents(folder).items()


# ---- analysis: begun again


@pytest.mark.parametrize("stopped", ["sum_shard", "sort_shard"])
def test_an_interrupted_analysis_goes_on_where_it_was(store, tmp_path, monkeypatch, small, stopped):
    open_samples, folder = opener(store), tmp_path / "again"
    with monkeypatch.context() as patch:
        shards = counted(patch, "sort_shard")
        whole = analyzed(tmp_path / "whole", open_samples, ALL)
    with monkeypatch.context() as patch:
        counted(patch, stopped, fail_at=3)
        with pytest.raises(KeyboardInterrupt):
            analyzed(folder, open_samples, ALL)
    assert not list(folder.rglob("index.json"))
    for name in ALL:
        assert not DifficultyIndex.exists(folder / name, fingerprint(open_samples(), name))
        with pytest.raises(ValueError, match=f"{name}: no index: make it with analyze.py"):
            opened(folder, open_samples, name)
    summed, measured = (counted(monkeypatch, name) for name in ("sum_shard", "sort_shard"))
    assert analyzed(folder, open_samples, ALL) == whole
    assert (summed, measured) == {
        "sum_shard": (shards[3:], shards),
        "sort_shard": ([], shards[3:]),
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
    shards = counted(monkeypatch, "sort_shard")
    analyzed(tmp_path / "out", opener(store), [name, "rarity"])
    assert shards[0] == (28, 35) and len(shards) == 5


def test_only_what_is_lacking_is_analyzed(store, tmp_path, monkeypatch):
    before = analyzed(tmp_path / "out", opener(store), ["rarity"])
    summed, measured = (counted(monkeypatch, name) for name in ("sum_shard", "sort_shard"))
    after = analyzed(tmp_path / "out", opener(store), ["rarity", "length"])
    assert before.items() < after.items()
    assert (len(summed), len(measured)) == (0, 1), "length needs no sum, and rarity nothing"
    assert analyzed(tmp_path / "out", opener(store), ["rarity", "length"]) == after
    assert len(measured) == 1


def killed(where, name, number, action):
    """SIGKILL a process that does `action` at a call of a function, which has written half."""

    def child():
        calls, real = [], getattr(where, name)

        def last(*args, **options):
            calls.append(args)
            if len(calls) == number:
                if name == "save":
                    args[0].write(b"half")
                    args[0].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        setattr(where, name, last)
        action()

    process = get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.dist
@pytest.mark.parametrize(
    ("where", "name", "number"),
    [(analyze, "sort_shard", 4), (np, "save", 20), (ranking, "split", 3), (json, "dumps", 3)],
)
def test_killed_at_any_moment_and_analyzed_again(
    store, tmp_path, monkeypatch, small, where, name, number
):
    """While a shard is measured or written, while they are merged, and just after."""
    folder = tmp_path / "killed"
    names = ["length", "rarity"]
    whole = analyzed(tmp_path / "whole", opener(store), names)
    killed(where, name, number, partial(analyzed, folder, opener(store), names))
    assert not (folder / "length").exists(), "it is merged first"
    left = set(contents(folder))
    half = any(file.endswith(".tmp") for file in left)
    assert half == (name != "sort_shard"), "what was being written has no name yet"
    shards = counted(monkeypatch, "sort_shard")
    assert analyzed(folder, opener(store), names) == whole, "also nothing else is left"
    done = [file for file in left if re.fullmatch(r"\.rarity-\w+/run-\d+-\d+\.npy", file)]
    assert len(done) >= 3 and len(done) + len(shards) == len(range(0, len(opener(store)()), 7))


@pytest.mark.parametrize("cut", [0, 100, -1])
@pytest.mark.parametrize("kind", ["run", "total"])
def test_a_shard_that_is_not_whole_is_done_again(store, tmp_path, monkeypatch, small, kind, cut):
    """As after a power failure, on a disk that keeps a name before what it names."""
    folder = tmp_path / "cut"
    whole = analyzed(tmp_path / "whole", opener(store))
    killed(ranking, "split", 3, partial(analyzed, folder, opener(store)))
    files = sorted(folder.glob(f".rarity-*/{kind}-*.npy"))
    os.truncate(files[2], cut if cut >= 0 else files[2].stat().st_size - 1)
    summed, measured = (counted(monkeypatch, name) for name in ("sum_shard", "sort_shard"))
    assert analyzed(folder, opener(store)) == whole
    assert (len(summed), len(measured)) == ((0, 1) if kind == "run" else (1, 0))


def test_what_a_kill_left_beside_a_whole_index_is_removed(store, tmp_path):
    before = analyzed(tmp_path / "out", opener(store))
    left = tmp_path / "out" / f".rarity-{fingerprint(opener(store)(), 'rarity')[:16]}"
    left.mkdir()
    (left / "run-000000000000-000000000007.npy").write_bytes(b"left")
    assert analyzed(tmp_path / "out", opener(store)) == before


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
    blocks = sum(len(list(difficulty.blocks(samples, a, b))) for a, b in pairwise(shards))
    assert blocks > 10
    assert opened(tmp_path / "out", opener(store), name).highest(1) == 100 * blocks


# ---- ready


def test_ready_makes_once_what_a_small_store_lacks(store, monkeypatch, capsys):
    samples, asked = opener(store)(), []
    real = analyze.analyze

    def noted(open_samples, names, *rest):
        asked.append(names)
        real(open_samples, names, *rest)

    monkeypatch.setattr(analyze, "analyze", noted)
    first = analyze.ready(samples, ["seqlen", "rarity"], None, ONE)
    folder = store / "curriculum" / "pieces-8"
    assert f"analyzing {store} by rarity, once: index in {folder}" in capsys.readouterr().out
    again = analyze.ready(samples, ["rarity"], None, ONE)
    assert not capsys.readouterr().out
    both = analyze.ready(samples, ["length", "rarity"], None, ONE)
    assert asked == [["rarity"], ["length"]]
    assert [list(found) for found in (first, again, both)] == [["rarity"]] * 2 + [
        ["length", "rarity"]
    ]
    assert len({found["rarity"].order.tobytes() for found in (first, again, both)}) == 1


def test_truncated_samples_have_an_index_of_their_own(store):
    """Beside that of all pieces; values and order are those of documents cut off at a row."""
    found = {}
    for long in ("split", "truncate", "split"):
        samples = opener(store, long=long)()
        index = analyze.ready(samples, ["length"], None, ONE)["length"]
        found.setdefault(long, index.values.tobytes())
        assert index.values.tobytes() == found[long] and len(index.values) == len(samples)
    assert np.frombuffer(found["truncate"], "uint32").tolist() == [
        min(len(ids) + 1, 8) for ids in many_documents()
    ]
    folders = sorted(path.name for path in (store / "curriculum").iterdir() if path.is_dir())
    assert folders == ["pieces-8", "pieces-8-truncate"]


@pytest.mark.parametrize("long", ["split", "truncate"])
@pytest.mark.parametrize("kept", [None, "kept"])
def test_ready_names_the_command_for_a_big_store(store, tmp_path, monkeypatch, kept, long):
    samples, kept = opener(store, "bert", 16, long)(), kept and str(tmp_path / kept)
    monkeypatch.setattr(analyze, "SMALL", samples.store.train_tokens - 1)
    with pytest.raises(ValueError, match="has no index by rarity, length: make it") as error:
        analyze.ready(samples, ["rarity", "length"], kept, ONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"], "nothing is analyzed"
    command = shlex.split(str(error.value).partition("python analyze.py ")[2])
    analyze.main(command)
    assert list(analyze.ready(samples, ["rarity", "length"], kept, ONE)) == ["rarity", "length"]


def test_ready_makes_a_store_of_just_that_size(store, monkeypatch):
    samples = opener(store)()
    monkeypatch.setattr(analyze, "SMALL", samples.store.train_tokens)
    assert analyze.ready(samples, ["rarity"], None, ONE)


def test_a_length_needs_no_index_and_no_other_rank(store):
    assert analyze.ready(opener(store)(), ["seqlen"], None, replace(ONE, world_size=2)) == {}
    assert not (store / "curriculum").exists()


# ---- command


@pytest.fixture
def hundred(tmp_path):
    """Samples of 1 to 100 tokens, the longest first: n - 1 times token 0, then end-of-text."""
    return write_store(tmp_path / "hundred", [[0] * n for n in reversed(range(100))])


def test_command_prints_percentiles(hundred, capsys):
    analyze.main([str(hundred), "--metric", "rarity,length", "--seq-len", "128"])
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
    analyze.main([str(hundred), *flags.split()])
    assert contents(hundred) == before
    assert len(opened(tmp_path / "out/bert-16", opener(hundred, "bert", 16), "rarity")) > 100


def test_command_plots_a_figure_a_metric(hundred, tmp_path):
    metrics, file = "rarity,length", str(tmp_path / "a.svg")
    analyze.main([str(hundred), "--metric", metrics, "--plot", file])
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["a-length.svg", "a-rarity.svg"]


REFUSED = {
    "--metric seqlen": "--metric seqlen needs no analysis: it takes samples as they come",
    "--metric rarity,seqlen": "--metric seqlen needs no analysis",
    "--metric length --samples rows": "length cannot tell rows apart that are all 256 tokens",
    "--metric length-rarity --samples rows": "length-rarity cannot tell rows apart",
    "--metric rarity --samples rows --long truncate": "--long truncate: --samples rows are cut",
    "--metric hard": "hard is unknown: choose from length, rarity",
    "--metric rarity,rarity": "takes one length, and each name once",
    "--metric rarity --workers 0": "--workers 0 must be at least 1",
    "--metric rarity --seq-len 0": r"--seq-len 0: a row has from 1 to 2\^31 tokens",
    "--metric rarity --seq-len 99999999999999999999": "--seq-len 99999999999999999999: a row",
    "--metric rarity --plot a.png": "--plot a.png: write .svg",
    "--metric nowhere.py:mine": r"nowhere\.py:mine: there is no Python file nowhere\.py",
    "--metric metrics.py:yours": r"metrics\.py defines no function yours",
    "--metric metrics.py:np": r"metrics\.py defines no function np",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_command_refuses(hundred, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    users(tmp_path, "def mine(tokens, lengths): return lengths")
    with pytest.raises(ValueError, match=REFUSED[flags]):
        analyze.main([str(hundred), *flags.split()])
    assert not (hundred / "curriculum").exists()


def test_a_store_without_training_text_is_refused(tmp_path):
    store = write_store(tmp_path / "store", [])
    with pytest.raises(ValueError, match="store holds no training document: prepare more text"):
        analyzed(tmp_path / "out", opener(store))
