"""Analysis: indexes equal those of a plain loop, whatever the shards, workers, ranks and kills.

Metrics have answers worked by hand. A damaged index, or an index of something else, is refused.
"""

import math
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
from conftest import free_port, kill_at, refusal, run_rank
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_stores import END, ONE, analyzed, contents, load, many_documents, opener, write_store
from torch.multiprocessing import start_processes

import analyze
from analyze import Metric, fingerprint, merged, sorted_run
from data import KINDS
from support.store import Store

NAMES = ["length", "rarity"]
ALL = [*analyze.METRICS]

pytestmark = pytest.mark.usefixtures("forget_opened_stores")


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", many_documents())


@pytest.fixture
def small(monkeypatch):
    """Make shards of 7 samples, blocks of about 16 tokens, and merges of 10 samples."""
    monkeypatch.setattr(analyze, "SHARD", 7)
    monkeypatch.setattr(analyze, "BLOCK", 16)
    monkeypatch.setattr(analyze.merged, "__defaults__", (10,))


def record(monkeypatch, name):
    """Record the shards that `sum_shard` or `sort_shard` is called with."""
    shards, real = [], getattr(analyze, name)

    def noting(*args):
        shards.append(args[-1])
        return real(*args)

    monkeypatch.setattr(analyze, name, noting)
    return shards


# ---- values and order


def texts_of(store, kind, seq_len):
    """Return the tokens of every sample, computed from the documents in plain Python."""
    store = Store.open(store)
    edges = store.offsets[: store.meta["train_documents"] + 1].tolist()
    documents = [store.tokens[a:b].tolist() for a, b in pairwise(edges)]
    if kind == "rows":
        documents = [list(chain(*documents))]
    if kind in ("bert", "pairs"):  # framed by [CLS] and [SEP] instead of ended by end-of-text
        documents = [document[:-1] for document in documents]
        seq_len -= 2 if kind == "bert" else 3
    return [text[i : i + seq_len] for text in documents for i in range(0, len(text), seq_len)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_order_equal_a_plain_loop(store, tmp_path, kind):
    open_samples = opener(store, kind)
    samples, texts = open_samples(), texts_of(store, kind, 8)
    spans = samples.spans(np.arange(len(samples))).tolist()
    assert [samples.store.tokens[a:b].tolist() for a, b in spans] == texts

    counts = Counter(chain(*texts))
    shares = [max(counts[token], 1) for token in range(samples.store.meta["vocab_size"])]
    nats = [-math.log(share / sum(shares)) for share in shares]
    length = np.array([len(text) for text in texts])
    rarity = np.array([math.fsum(nats[token] for token in text) for text in texts])
    expected = {"length": length, "rarity": rarity, "rarity-mean": rarity / length}

    analyzed(tmp_path / "out", open_samples, ALL)
    indexes = {name: load(tmp_path / "out", open_samples, name) for name in ALL}
    for index in indexes.values():
        ids = np.arange(len(texts))
        assert index.order.tolist() == np.lexsort((ids, index.values)).tolist()
    for name, values in expected.items():
        result = indexes[name].values
        np.testing.assert_array_max_ulp(result, values.astype(result.dtype))
    order = indexes["length-rarity"].order
    assert np.floor(indexes["length-rarity"].values).tolist() == length.tolist()
    assert (np.diff(length[order] + (rarity / 2**30)[order]) > -1e-12).all()
    assert (indexes["rarity"].values % 1 != 0).any(), "not rounded: whole numbers would tie"


# ---- shards, workers and ranks do not matter


def test_shards_blocks_and_merges_do_not_matter(store, tmp_path, monkeypatch, request):
    open_samples = opener(store, "bert")
    whole = analyzed(tmp_path / "whole", open_samples, ALL)
    lengths = np.frombuffer(whole["length/values.bin"], np.uint32)
    assert len(set(lengths.tolist())) < len(lengths) / 5, "ties span shards and merges"
    request.getfixturevalue("small")
    shards = record(monkeypatch, "sort_shard")
    assert analyzed(tmp_path / "parts", open_samples, ALL) == whole
    assert [shard.start for shard in shards] == list(range(0, len(lengths), 7))
    shards.clear()
    monkeypatch.setattr(analyze, "MOST_SHARDS", 4)  # limits how many files a merge holds open
    assert analyzed(tmp_path / "four", open_samples, ALL) == whole
    assert len(shards) == 4


def pids(tokens, lengths, _):
    return np.full(len(lengths), os.getpid())


@pytest.mark.dist
def test_workers_do_not_matter(store, tmp_path, monkeypatch, small):
    one = analyzed(tmp_path / "one", opener(store), NAMES)
    monkeypatch.setitem(analyze.METRICS, "pid", Metric(pids))
    names = [*NAMES, "pid"]
    assert one.items() < analyzed(tmp_path / "two", opener(store), names, workers=2).items()
    assert os.getpid() not in load(tmp_path / "two", opener(store), "pid").values
    monkeypatch.setitem(analyze.METRICS, "wrong", Metric(lambda *_: np.array([np.nan])))
    wrong = refusal(analyzed, tmp_path / "wrong", opener(store), ["wrong"], workers=2)
    assert "--metric wrong has to give each sample a finite" in wrong


def analyze_into_file(flags):
    """Run analyze.py on a rank, writing its output or its error to a file."""
    with open(f"said-{os.environ['RANK']}", "w") as said, redirect_stdout(said):
        try:
            analyze.main(flags)
        except ValueError as error:
            print(error)


def output_of_two_ranks(flags):
    """Analyze in forked processes, which inherit the small shards; return what each rank prints."""
    arguments = (2, free_port(), Path.cwd(), analyze_into_file, (flags.split(),))
    start_processes(run_rank, arguments, nprocs=2, start_method="fork")
    return [Path(f"said-{rank}").read_text() for rank in range(2)]


@pytest.mark.dist
def test_an_error_on_one_rank_is_reported_by_both_and_costs_one_shard(tmp_path, small, monkeypatch):
    """Only rank 1 meets token 5, in shard 1. No rank hangs, and finished shards are kept."""
    monkeypatch.chdir(tmp_path)
    store = write_store(tmp_path / "store", [*[[1, 2]] * 10, [5], *[[2, 0, 1]] * 30])

    def measured_by(tokens, lengths, _):
        if 5 in tokens and not Path("mended").exists():
            raise ValueError("five")
        return np.full(len(lengths), int(os.environ["RANK"]))

    monkeypatch.setitem(analyze.METRICS, "rank", Metric(measured_by))
    flags = "store --seq-len 8 --metric rank,rarity --out two"
    assert output_of_two_ranks(flags) == ["five\n"] * 2
    assert not list(Path("two").rglob("index.json"))
    Path("mended").touch()
    one, other = output_of_two_ranks(flags)
    assert one.count("percentile") == 1 and other == ""
    folder = Path("two/pieces-8")
    ranks = np.arange(41) // 7 % 2
    ranks[7:14] = 0  # the only shard that the second attempt had to do
    assert load(folder, opener(store), "rank").values.tolist() == ranks.tolist()
    assert analyzed(tmp_path / "one", opener(store)).items() <= contents(folder).items()


# ---- interrupted and resumed


@pytest.mark.dist
@pytest.mark.parametrize("number", [20, 46, 87, 124, 125])
def test_a_killed_analysis_resumes(store, tmp_path, monkeypatch, small, number):
    """Killed while it writes totals, sorted runs or an index, it repeats no finished shard."""
    whole, folder = analyzed(tmp_path / "whole", opener(store), NAMES), tmp_path / "killed"
    status = kill_at(number, partial(analyzed, folder, opener(store), NAMES))
    assert status == -signal.SIGKILL
    for metric in NAMES:
        message = refusal(load, folder, opener(store), metric)
        assert re.search(f"{metric}: damaged .*No such file", message)
    left = [sorted(folder.glob(f".rarity.*/{kind}-*.npy")) for kind in ("total", "run")]
    done = [len(files) for files in left]
    if number == 125:  # a power failure can keep a file's name and lose its content
        done = [count - 3 for count in done]
        for empty, short, cut in (files[:3] for files in left):
            os.truncate(empty, 0)
            os.truncate(short, 100)
            os.truncate(cut, cut.stat().st_size - 1)
    again = [record(monkeypatch, name) for name in ("sum_shard", "sort_shard")]
    assert analyzed(folder, opener(store), NAMES) == whole, "no other file is left"
    n_shards = len(range(0, len(opener(store)()), 7))
    assert sum(done) >= 3 and [len(shards) for shards in again] == [n_shards - n for n in done]


@pytest.mark.dist
def test_workers_end_when_the_process_that_started_them_is_killed(store, tmp_path, small):
    ended, held = Pipe(duplex=False)  # workers inherit `held`, so this ends when all are gone
    assert kill_at(11, partial(analyzed, tmp_path, opener(store), NAMES, workers=2)) < 0
    held.close()
    assert ended.poll(30), "a worker still runs"


def test_damaged_and_empty_stores_are_refused(tmp_path):
    for documents, message in (([[1, 2], [END + 1, 3]], f"token {END + 1}"), ([], "no training")):
        store = write_store(tmp_path / message, documents)
        for name in NAMES:
            assert message in refusal(analyzed, tmp_path / "out", opener(store), [name])


# ---- what training calls


def test_training_analyzes_a_small_store_once(store, monkeypatch, capsys):
    samples = opener(store)()
    tokens = samples.store.meta["train_tokens"]
    monkeypatch.setattr(analyze, "SMALL", tokens)  # just small enough
    summed, measured = (record(monkeypatch, name) for name in ("sum_shard", "sort_shard"))
    assert list(analyze.ready(samples, ["seqlen", "rarity"], None, ONE)) == ["rarity"]
    folder = store / "curriculum" / "pieces-8"
    assert f"analyzing {store} by rarity, once: index in {folder}" in capsys.readouterr().out
    before = contents(folder)
    assert list(analyze.ready(samples, ["rarity"], None, ONE)) == ["rarity"]
    assert not capsys.readouterr().out and len(measured) == 1
    assert list(analyze.ready(samples, NAMES, None, ONE)) == NAMES
    assert (len(summed), len(measured)) == (1, 2), "length needs no totals; rarity is done"
    assert before.items() < contents(folder).items()


def test_for_a_large_store_training_names_the_command_to_run(store, tmp_path, monkeypatch):
    samples, kept = opener(store, "bert", 16)(), str(tmp_path / "kept")
    monkeypatch.setattr(analyze, "SMALL", samples.store.meta["train_tokens"] - 1)
    message = refusal(analyze.ready, samples, NAMES, kept, ONE)
    assert "has no index by length,rarity" in message
    assert [path.name for path in tmp_path.iterdir()] == ["store"], "nothing is analyzed"
    analyze.main(shlex.split(message.partition("python analyze.py ")[2]))
    assert list(analyze.ready(samples, NAMES, kept, ONE)) == NAMES
    two_ranks = replace(ONE, world_size=2)  # they would hang if they waited for each other
    assert analyze.ready(samples, ["seqlen"], None, two_ranks) == {}, "seqlen needs no index"


# ---- the command


def test_command_prints_percentiles(tmp_path, capsys):
    """The samples have 100 to 1 tokens, in this order: n - 1 times token 0, then end-of-text."""
    store = write_store(tmp_path / "hundred", [[0] * n for n in reversed(range(100))])
    flags = f"--metric rarity,length --seq-len 128 --workers 1 --out {tmp_path / 'out'}"
    analyze.main([str(store), *flags.split()])
    _, head, _, length, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["percentile", *map(str, analyze.PERCENTS)]
    assert length == ["length", *map(str, (1, *analyze.PERCENTS[1:]))]


# ---- metrics


def test_metrics_equal_examples_worked_by_hand():
    tokens, lengths = np.array([0, 0, 1], np.uint16), np.array([2, 1])
    assert analyze.token_counts(tokens, lengths, 4).tolist() == [2, 1, 0, 0]
    # an unseen token counts as seen once, so the counts sum to 2 + 1 + 1 + 1
    nats = analyze.surprisal(np.array([2, 1, 0, 0]))
    assert nats == pytest.approx([math.log(5 / 2), math.log(5), math.log(5), math.log(5)])

    nats, ln2 = analyze.surprisal(np.array([2, 1, 1])), math.log(2)
    values = {name: analyze.METRICS[name].value(tokens, lengths, nats) for name in ALL}
    assert values["length"].tolist() == [2, 1]
    assert values["rarity"] == pytest.approx([2 * ln2, math.log(4)], rel=1e-15)
    assert values["rarity-mean"] == pytest.approx([ln2, 2 * ln2], rel=1e-15)
    # 2^17 tokens of ln 4 nats are 181704 nats, which is below 2^18
    expected = [2 + 2 * ln2 / 2**18, 1 + 2 * ln2 / 2**18]
    assert values["length-rarity"] == pytest.approx(expected, rel=1e-15)


# ---- fingerprint


def changed(store, path):
    """Return sets of samples that differ from those of many_documents() in one way each."""
    empty, also_empty, first, *rest = many_documents()
    text = [empty, also_empty, [2 if first[0] != 2 else 1, *first[1:]], *rest]
    edges = [empty, [END, *first], *rest]  # the same stream of tokens, split elsewhere
    held_in = [*many_documents(), [7, 7]]
    stores = [(text, "by hand", 1), (edges, "by hand", 1), (held_in, "by hand", 0)]
    stores.append((many_documents(), "another tokenizer", 1))
    others = [opener(write_store(path / f"{n}", *about)) for n, about in enumerate(stores)]
    return [*others, opener(store, seq_len=9), opener(store, kind="rows")]


def test_an_index_of_something_else_is_refused(store, tmp_path, monkeypatch):
    """DeepSpeed's data_sampler.py uses whatever index is in the folder."""
    before = analyzed(tmp_path / "out", opener(store))
    old = fingerprint(opener(store)(), "rarity")
    for other in changed(store, tmp_path):
        new = fingerprint(other(), "rarity")
        refused = rf"rarity: an index with fingerprint {old[:16]}, .* are {new[:16]}: remove it"
        assert re.search(refused, refusal(load, tmp_path / "out", other, "rarity"))
        assert re.search(refused, refusal(analyzed, tmp_path / "out", other))
    assert contents(tmp_path / "out") == before
    changed_metric = analyze.METRICS["rarity"]._replace(value=pids)
    monkeypatch.setitem(analyze.METRICS, "rarity", changed_metric)
    assert "an index with fingerprint" in refusal(load, tmp_path / "out", opener(store), "rarity")


def test_an_index_stays_valid_when_its_store_moves(store, tmp_path):
    analyze.ready(opener(store)(), ["rarity"], None, ONE)
    moved = opener(shutil.move(store, tmp_path / "moved"))
    assert len(load(tmp_path / "moved" / "curriculum" / "pieces-8", moved, "rarity"))


@pytest.mark.parametrize("file", ["index.json", "order.bin", "values.bin"])
def test_a_damaged_index_is_refused_before_training(store, file):
    """Truncated, changed, zeroed in the middle, or with bytes of another place in the middle, so
    that the size and both ends can be right. A kill leaves a missing file, tested above.
    """
    samples = opener(store)()
    analyze.ready(samples, ["rarity"], None, ONE)
    path = store / "curriculum" / "pieces-8" / "rarity" / file
    whole = path.read_bytes()
    damaged = [b"", whole[:-1], b"\xff" * len(whole)]
    for place in range(4, len(whole) - 12, len(whole) // 12):
        damaged += [whole[:place] + piece + whole[place + 8 :] for piece in (bytes(8), whole[:8])]
    if file == "index.json":  # older versions wrote no sha256
        damaged[3:] = [re.sub(rb',\s*"sha256": {.*?}', b"", whole, flags=re.DOTALL)]
    for text in damaged:
        path.write_bytes(text)
        message = refusal(analyze.ready, samples, ["rarity"], None, ONE)
        assert re.search(r"rarity: damaged.*: remove it and analyze again", message)


# ---- sorted runs

lists_of_values = st.lists(st.lists(st.integers(-3, 3), max_size=12), min_size=1, max_size=6)


def runs_of(lists):
    """Return a sorted run of each list, with ids numbered across runs, and all ids by value."""
    first_ids = accumulate(map(len, lists[:-1]), initial=0)
    runs = [
        sorted_run(np.array(values, np.float32), first_id, np.dtype("uint32"))
        for values, first_id in zip(lists, first_ids, strict=True)
    ]
    return runs, np.argsort(list(chain(*lists)), kind="stable").tolist()


@settings(deadline=None, max_examples=40)
@given(lists_of_values, st.integers(1, 30))
@example([[1, 3, 3], [2, 3, 4]], 4)
def test_merged_runs_are_all_samples_in_order_in_small_chunks(lists, chunk):
    runs, order = runs_of(lists)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.npy" for i in range(len(runs))]
        for file, run in zip(files, runs, strict=True):
            np.save(file, run)
        parts = [part.tolist() for part in merged(files, chunk)]
    assert list(chain(*parts)) == order
    assert all(len(part) <= max(chunk, 2 * len(runs)) for part in parts)
