"""Difficulty: metrics worked by hand, functions of a user's, what an index rests on and refuses."""

import math
import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import (
    ALL,
    END,
    ONE,
    analyzed,
    contents,
    many_documents,
    opened,
    opener,
    users,
    write_store,
)

import analyze
import curriculum
import difficulty
import prepare
from difficulty import fingerprint
from support.rows import samples as spans
from support.text.tokenizer import get_encoding

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", many_documents())


# ---- metrics


def test_metrics_worked_by_hand():
    tokens, lengths = np.array([0, 0, 1], np.uint16), np.array([2, 1])
    assert difficulty.token_counts(tokens, lengths, 4).tolist() == [2, 1, 0, 0]
    # an unseen token counts as one, also in the sum: 2 + 1 + 1 + 1
    nats = difficulty.surprisal(np.array([2, 1, 0, 0]))
    assert nats == pytest.approx([math.log(5 / 2), math.log(5), math.log(5), math.log(5)])

    nats, ln2 = difficulty.surprisal(np.array([2, 1, 1])), math.log(2)
    values = {name: difficulty.METRICS[name].value(tokens, lengths, nats) for name in ALL}
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
    values = difficulty.length_rarity(np.concatenate(texts), lengths, difficulty.surprisal(COUNTS))
    pairs = [(len(text), int(BITS[text].sum())) for text in texts]
    assert [pairs[i] for i in np.argsort(values)] == sorted(pairs)


def test_length_rarity_of_the_longest_samples():
    """All of the rarest token stays below one token more; 2^-9 nats still tell two apart."""
    counts = np.array([2**40, 1, 2**20, round(2**20 * math.exp(2**-9))])
    most = 2**17
    tokens = np.repeat([1, 0, 0, 2, 0, 3], [most - 1, most, most - 1, 1, most - 1, 1])
    lengths = np.array([most - 1, most, most, most])
    rarest, *longest = difficulty.length_rarity(tokens, lengths, difficulty.surprisal(counts))
    assert rarest < min(longest)
    assert longest[1] > longest[2], "token 3 is less rare than token 2"


def test_the_help_names_every_metric():
    assert curriculum.METRICS.split(", ") == [
        *curriculum.LENGTHS,
        *difficulty.METRICS,
        "path.py:name",
    ]


KINDS = {  # of samples that a metric can tell apart
    "length": ["pieces", "bert", "pairs"],
    "length-rarity": ["pieces", "bert", "pairs"],
    "rarity": ["pieces", "bert", "pairs", "rows"],
    "seqlen": ["pieces", "bert", "pairs", "rows"],
    "seqlen-reshape": ["rows"],
}


@pytest.mark.parametrize("kind", spans.KINDS)
@pytest.mark.parametrize("name", KINDS)
def test_a_metric_is_refused_where_it_says_nothing(name, kind):
    if kind in KINDS[name]:
        difficulty.check_metrics([name], 256, kind)
    else:
        with pytest.raises(ValueError, match=f"--curriculum {name} .*(choose rarity|take seqlen)"):
            difficulty.check_metrics([name], 256, kind)


# ---- fingerprint


def changed(what, path):
    """A store that differs from many_documents() in one thing, and the samples of it."""
    kind, seq_len, documents, more = "pieces", 8, many_documents(), {}
    long = "truncate" if what == "long documents" else "split"
    if what == "text":
        documents[2] = [2, *documents[2][1:]] if documents[2][0] != 2 else [1, *documents[2][1:]]
    elif what == "edges":  # the same stream of tokens, cut elsewhere
        documents[2:4] = [[*documents[2], END, *documents[3]]]
    elif what == "held-out share":
        documents, more = [*documents, [7, 7]], {"held_out": 0}
    elif what == "tokenizer":
        more = {"tokenizer": "other"}
    elif what == "sample length":
        seq_len = 9
    elif what == "kind":
        kind = "rows"
    return opener(write_store(path, documents, **more), kind, seq_len, long)


@pytest.mark.parametrize(
    "what",
    ["text", "edges", "held-out share", "tokenizer", "sample length", "kind", "long documents"],
)
def test_an_index_of_something_else_is_refused(store, tmp_path, what):
    """DeepSpeed's data_sampler.py takes any index that lies in the folder."""
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


def test_a_store_prepared_again_at_the_same_path_is_refused(tmp_path):
    store, kept = tmp_path / "store", str(tmp_path / "kept")
    for text in ("one text", "two text"):
        (tmp_path / "text").write_text(text)
        prepare.prepare([tmp_path / "text"], store, get_encoding("bytes"), "bytes", holdout=0)
        spans.samples_of.cache_clear()
        if text == "one text":
            analyze.ready(opener(store)(), ["rarity"], kept, ONE)
            shutil.rmtree(store)
    with pytest.raises(ValueError, match=r"kept/pieces-8/rarity: an index with fingerprint"):
        analyze.ready(opener(store)(), ["rarity"], kept, ONE)


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
        with pytest.raises(ValueError, match="rarity: a damaged index: remove it and analyze"):
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
    mine = difficulty.metric(users(tmp_path, f"def mine(tokens, lengths): return {returned}"))
    with np.errstate(all="ignore"), pytest.raises(ValueError) as error:
        mine.value(np.array([1, 2, END, 3, END]), np.array([3, 2]), None)
    where = r".*metrics\.py:mine, on a batch of shape \(2, 3\)"
    assert re.fullmatch(rf"{where}: {said}.*", str(error.value))


def test_a_mistake_in_what_a_user_sums_is_one_line(store, tmp_path):
    name = users(tmp_path, "def mine(*args): pass\nmine.accumulate = lambda *args: [np.nan]")
    with pytest.raises(ValueError, match=r"py:mine\.accumulate, on a batch of .* is not finite"):
        analyzed(tmp_path / "out", opener(store), [name])


def test_what_a_user_summed_cannot_be_changed_later(store, tmp_path):
    mine = "def mine(tokens, lengths, total):\n    total += 1\n    return lengths"
    name = users(tmp_path, f"{mine}\nmine.accumulate = lambda tokens, lengths: [1]")
    with pytest.raises(ValueError, match=r"mine, on a batch .*: raised ValueError: .* read-only"):
        analyzed(tmp_path / "out", opener(store), [name])
