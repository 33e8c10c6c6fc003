"""Analysis: indexes equal those of a plain loop, whatever the shards, ranks and kills.

Metrics have answers worked by hand. A damaged index, or an index of something else, is refused.
"""

import math
import os
import re
import runpy
import shlex
import shutil
import signal
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from unittest.mock import call

import numpy as np
import pytest
from conftest import free_port, kill_at, refusal, run_rank
from small_stores import END, ONE, analyzed, contents, load, many_documents, samples_of, write_store
from torch.multiprocessing import start_processes

import analyze
from analyze import Metric
from data import KINDS

NAMES = ["length", "rarity"]
ALL = [*analyze.METRICS]


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", many_documents())


@pytest.fixture
def small(monkeypatch):
    """Make shards of 7 samples and blocks of about 16 tokens."""
    monkeypatch.setattr(analyze, "SHARD", 7)
    monkeypatch.setattr(analyze, "BLOCK", 16)


def record(monkeypatch, name):
    """Return the list of calls of `count_shard` or `measure_shard`."""
    calls, work = [], getattr(analyze, name)

    @wraps(work)
    def recorded(*args):
        calls.append(call(*args))
        return work(*args)

    monkeypatch.setattr(analyze, name, recorded)
    return calls


# ---- values and order


def texts_of(kind, seq_len):
    """Return the tokens of every sample, computed from the documents in plain Python."""
    documents = [[*ids, END] for ids in many_documents()]
    if kind == "rows":
        documents = [list(chain(*documents))]
    if kind in ("bert", "pairs"):  # framed by [CLS] and [SEP] instead of ended by end-of-text
        documents = [document[:-1] for document in documents]
        seq_len -= 2 if kind == "bert" else 3
    return [text[i : i + seq_len] for text in documents for i in range(0, len(text), seq_len)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_order_equal_a_plain_loop(store, tmp_path, kind):
    samples, texts = samples_of(store, kind), texts_of(kind, 8)
    spans = samples.spans(np.arange(len(samples))).tolist()
    assert [samples.store.tokens[a:b].tolist() for a, b in spans] == texts

    counts = Counter(chain(*texts))
    shares = [max(counts[token], 1) for token in range(samples.store.meta["vocab_size"])]
    nats = [-math.log(share / sum(shares)) for share in shares]
    length = np.array([len(text) for text in texts])
    rarity = np.array([math.fsum(nats[token] for token in text) for text in texts])
    scale = 2 ** math.ceil(math.log2(2**17 * max(nats) + 1))
    expected = (length, rarity, rarity / length, length + rarity / scale)

    analyzed(tmp_path / "out", samples, ALL)
    for name, values in zip(ALL, expected, strict=True):
        index = load(tmp_path / "out", samples, name)
        np.testing.assert_array_max_ulp(index.values, values.astype(index.values.dtype))
        assert index.order.tolist() == np.lexsort((np.arange(len(texts)), index.values)).tolist()


# ---- shards and ranks do not matter


def test_shards_and_blocks_do_not_matter(store, tmp_path, monkeypatch, request):
    samples = samples_of(store, "bert")
    whole = analyzed(tmp_path / "whole", samples, ALL)
    request.getfixturevalue("small")
    calls = record(monkeypatch, "measure_shard")
    assert analyzed(tmp_path / "parts", samples, ALL) == whole
    starts = [call.args[-1].start for call in calls]
    assert starts == [*range(0, len(samples), 7)] * len(ALL)


def test_a_metric_that_gives_no_finite_number_is_refused(store, tmp_path, monkeypatch):
    for wrong in (lambda *_: np.array([np.nan]), lambda tokens, *_: np.zeros(len(tokens))):
        monkeypatch.setitem(analyze.METRICS, "wrong", Metric(wrong))
        message = refusal(analyzed, tmp_path / "wrong", samples_of(store), ["wrong"])
        assert "--metric wrong has to give each sample a finite" in message


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
def test_an_error_on_one_rank_is_reported_by_both(tmp_path, small, monkeypatch):
    """Only rank 1 meets token 5, in its first shard. No rank hangs; rank 0's shards are kept."""
    monkeypatch.chdir(tmp_path)
    store = write_store(tmp_path / "store", [*[[1, 2]] * 10, [5], *[[2, 0, 1]] * 30])

    def measured_by(tokens, lengths, _):
        if 5 in tokens and not Path("mended").exists():
            raise ValueError("five")
        return np.full(len(lengths), int(os.environ["RANK"]) + Path("mended").exists() * 10)

    monkeypatch.setitem(analyze.METRICS, "rank", Metric(measured_by))
    flags = "store --seq-len 8 --metric rank,rarity"
    assert output_of_two_ranks(flags) == ["five\n"] * 2
    Path("mended").touch()
    one, other = output_of_two_ranks(flags)
    assert one.count("percentile") == 1 and other == ""
    folder = Path("store/curriculum/pieces-8")
    ranks = np.where(np.arange(41) // 7 % 2, 11, 0)  # 11: rank 1 in the second attempt
    assert load(folder, samples_of(store), "rank").values.tolist() == ranks.tolist()
    assert analyzed(tmp_path / "one", samples_of(store)).items() <= contents(folder).items()


@pytest.mark.dist
def test_ranks_that_share_no_folder_are_refused(store, tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "index_folder", lambda *_: Path(os.environ["RANK"]))
    by_rank = output_of_two_ranks("store --seq-len 8 --metric length")
    assert all("on rank 0 lacks files of other ranks" in said for said in by_rank)


# ---- interrupted and resumed


@pytest.mark.dist
@pytest.mark.parametrize("number", [20, 50, 87, 103, 120])
def test_a_killed_analysis_resumes(store, tmp_path, monkeypatch, small, number):
    """Killed while it writes counts, values or an index, it repeats no finished shard."""
    samples = samples_of(store)
    whole, folder = analyzed(tmp_path / "whole", samples, NAMES), tmp_path / "killed"
    status = kill_at(number, partial(analyzed, folder, samples, NAMES))
    assert status == -signal.SIGKILL
    unfinished = [name for name in NAMES if not (folder / name).exists()]
    for name in unfinished:
        message = refusal(load, folder, samples, name)
        assert re.search(f"{name} is damaged .*No such file", message)
    made = [file.name for name in unfinished for file in folder.glob(f".{name}.*/*.npy")]
    done, shards = Counter(name.partition("-")[0] for name in made), len(range(0, len(samples), 7))
    counted, measured = (record(monkeypatch, name) for name in ("count_shard", "measure_shard"))
    assert analyzed(folder, samples, NAMES) == whole, "no other file is left"
    assert len(counted) == shards * ("rarity" in unfinished) - done["counts"]
    assert len(measured) == shards * len(unfinished) - done["values"]


def test_damaged_and_empty_stores_are_refused(tmp_path):
    store = write_store(tmp_path / "damaged", [[1, 2], [END + 1, 3]])
    for name in NAMES:
        assert f"token {END + 1}" in refusal(analyzed, tmp_path / "out", samples_of(store), [name])
    assert "no training" in refusal(samples_of, write_store(tmp_path / "empty", []))


# ---- what training calls


def test_training_analyzes_a_small_store_once(store, monkeypatch, capsys):
    samples = samples_of(store)
    monkeypatch.setattr(analyze, "SMALL", samples.store.meta["train_tokens"])  # just small enough
    summed, measured = (record(monkeypatch, name) for name in ("count_shard", "measure_shard"))
    assert list(analyze.rankings_of(samples, ["seqlen", "rarity"], ONE)) == ["rarity"]
    folder = store / "curriculum" / "pieces-8"
    assert f"analyzing {store} by rarity, once: index in {folder}" in capsys.readouterr().out
    before = contents(folder)
    assert list(analyze.rankings_of(samples, ["rarity"], ONE)) == ["rarity"]
    assert not capsys.readouterr().out and len(measured) == 1
    assert list(analyze.rankings_of(samples, NAMES, ONE)) == NAMES
    assert (len(summed), len(measured)) == (1, 2), "length needs no counts; rarity is done"
    assert before.items() < contents(folder).items()
    analyze.rankings_of(samples_of(shutil.move(store, store.parent / "moved")), NAMES, ONE)
    assert len(measured) == 2, "an index stays valid when its store moves"


def test_for_a_large_store_training_names_the_command_to_run(store, tmp_path, monkeypatch):
    """If the store is read-only, the index is in the user's cache."""
    samples = samples_of(store, "bert", 16)
    monkeypatch.setattr(os, "access", lambda path, mode: path != store)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = contents(store)
    monkeypatch.setattr(analyze, "SMALL", samples.store.meta["train_tokens"] - 1)
    message = refusal(analyze.rankings_of, samples, NAMES, ONE)
    assert "has no index by length,rarity" in message
    assert not (tmp_path / "cache").exists(), "nothing is made before that"
    analyze.main(shlex.split(message.partition("python analyze.py ")[2]))
    assert contents(store) == before
    assert list(analyze.rankings_of(samples, NAMES, ONE)) == NAMES
    two_ranks = replace(ONE, world_size=2)  # they would hang if they waited for each other
    assert analyze.rankings_of(samples, ["seqlen"], two_ranks) == {}, "seqlen needs no index"


# ---- the command


def test_command_prints_percentiles(tmp_path, capsys):
    """The samples have 100 to 1 tokens, in this order: n - 1 times token 0, then end-of-text."""
    store = write_store(tmp_path / "hundred", [[0] * n for n in reversed(range(100))])
    analyze.main(f"{store} --metric rarity,length --seq-len 128".split())
    _, head, _, length, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["percentile", *map(str, analyze.PERCENTS)]
    assert length == ["length", *map(str, (1, *analyze.PERCENTS[1:]))]


# ---- metrics


def test_metrics_equal_examples_worked_by_hand():
    tokens, lengths = np.array([0, 0, 1], np.uint16), np.array([2, 1])
    nats, ln2 = analyze.surprisal(np.array([2, 1, 0])), math.log(2)  # unseen counts as seen once
    values = {name: analyze.METRICS[name].value(tokens, lengths, nats) for name in ALL}
    assert values["length"].tolist() == [2, 1]
    assert values["rarity"] == pytest.approx([2 * ln2, math.log(4)], rel=1e-15)
    assert values["rarity-mean"] == pytest.approx([ln2, 2 * ln2], rel=1e-15)
    # 2^17 tokens of ln 4 nats are 181704 nats, which is below 2^18
    expected = [2 + 2 * ln2 / 2**18, 1 + 2 * ln2 / 2**18]
    assert values["length-rarity"] == pytest.approx(expected, rel=1e-15)


# ---- fingerprint


def test_an_index_of_something_else_is_refused(store, tmp_path):
    """DeepSpeed's data_sampler.py uses whatever index is in the folder."""
    before = analyzed(tmp_path / "out", samples_of(store))
    empty, also_empty, first, *rest = many_documents()
    stores = {  # documents, tokenizer, and how many more are held out
        "text": ([empty, also_empty, [2 if first[0] != 2 else 1, *first[1:]], *rest], "by hand", 1),
        "edges": ([empty, [END, *first], *rest], "by hand", 1),  # of the same stream of tokens
        "held in": ([*many_documents(), [7, 7]], "by hand", 0),
        "tokenizer": (many_documents(), "another tokenizer", 1),
    }
    others = [samples_of(write_store(tmp_path / name, *about)) for name, about in stores.items()]
    for other in (*others, samples_of(store, seq_len=9), samples_of(store, kind="rows")):
        refused = "rarity is of another text, tokenizer, length or metric: remove it"
        assert refused in refusal(load, tmp_path / "out", other, "rarity")
        assert refused in refusal(analyzed, tmp_path / "out", other)
    assert contents(tmp_path / "out") == before


EDITS = {  # of analyze.py, and the metrics whose values they change
    "return -np.log(counts": ("return np.log(counts", ["rarity", "rarity-mean", "length-rarity"]),
    "np.add.reduceat(nats": ("np.add.reduceat(2 * nats", [*analyze.METRICS][1:]),
    "nats) / scale": ("nats) / 2 / scale", ["length-rarity"]),
    "    return lengths\n": ("    return -lengths\n", ["length"]),
    "np.bincount(tokens, minlength": ("2 * np.bincount(tokens, minlength", ["rarity"]),
    "lengths = stop - start": ("lengths = stop - start + 1", ["rarity", "length-rarity"]),
    "SHARD = 1 << 20": ("SHARD = 1 << 21", []),
}


@pytest.mark.parametrize("text", EDITS)
def test_editing_what_a_metric_uses_makes_its_index_stale(store, tmp_path, text):
    source, (edited, metrics) = Path(analyze.__file__).read_text(), EDITS[text]
    assert source.count(text) == 1
    file = tmp_path / "edited.py"
    file.write_text(source.replace(text, edited))
    fingerprint, samples = runpy.run_path(str(file))["index_fingerprint"], samples_of(store)
    before, after = (
        [of(samples, n) for n in ALL] for of in (analyze.index_fingerprint, fingerprint)
    )
    stale = {name for name, *pair in zip(ALL, before, after, strict=True) if len({*pair}) > 1}
    assert stale >= {*metrics} and bool(stale) == bool(metrics)


@pytest.mark.parametrize("file", ["index.json", "order.bin", "values.bin"])
def test_a_damaged_index_is_refused_before_training(store, file):
    """Truncated, changed, zeroed in the middle, or with bytes of another place in the middle, so
    that the size and both ends can be right. A kill leaves a missing file, tested above.
    """
    samples = samples_of(store)
    analyze.rankings_of(samples, ["rarity"], ONE)
    path = store / "curriculum" / "pieces-8" / "rarity" / file
    whole = path.read_bytes()
    damaged = [b"", whole[:-1], b"\xff" * len(whole)]
    for place in range(4, len(whole) - 12, len(whole) // 12):
        damaged += [whole[:place] + piece + whole[place + 8 :] for piece in (bytes(8), whole[:8])]
    if file == "index.json":  # older versions wrote no sha256
        damaged[3:] = [re.sub(rb',\s*"sha256": {.*?}', b"", whole, flags=re.DOTALL)]
    for text in damaged:
        path.write_bytes(text)
        message = refusal(analyze.rankings_of, samples, ["rarity"], ONE)
        assert re.search(r"rarity is damaged.*: remove it and analyze again", message)
