"""Difficulty: metrics worked by hand, functions of a user's, what an index rests on and refuses."""

import math
import re
import shutil

import numpy as np
import pytest
from conftest import refusal
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
import difficulty
from difficulty import fingerprint
from support.rows.ranking import LENGTHS
from support.rows.samples import KINDS

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


@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_is_refused_where_it_says_nothing(kind):
    """Rows all have one length, and only rows can be reshaped."""
    refused = ["length", "length-rarity"] if kind == "rows" else ["seqlen-reshape"]
    for name in (*LENGTHS, *difficulty.METRICS):
        if name not in refused:
            difficulty.check_metrics([name], 256, kind)
            continue
        with pytest.raises(ValueError, match=f"--curriculum {name}.*(choose rarity|take seqlen)"):
            difficulty.check_metrics([name], 256, kind)


# ---- fingerprint


def changed(store, path):
    """Samples that differ from those of many_documents() in one thing each."""
    empty, also_empty, first, *rest = many_documents()
    text = [empty, also_empty, [2 if first[0] != 2 else 1, *first[1:]], *rest]
    edges = [empty, [END, *first], *rest]  # the same stream of tokens, cut elsewhere
    return [
        opener(write_store(path / "text", text)),
        opener(write_store(path / "edges", edges)),
        opener(write_store(path / "held-out share", [*many_documents(), [7, 7]], held_out=0)),
        opener(write_store(path / "tokenizer", many_documents(), "other")),
        opener(store, seq_len=9),
        opener(store, kind="rows"),
        opener(store, long="truncate"),
    ]


def test_an_index_of_something_else_is_refused(store, tmp_path):
    """DeepSpeed's data_sampler.py takes any index that lies in the folder."""
    before = analyzed(tmp_path / "out", opener(store))
    old = fingerprint(opener(store)(), "rarity")
    for other in changed(store, tmp_path):
        new = fingerprint(other(), "rarity")
        refused = rf"rarity: an index with fingerprint {old[:16]}, .* are {new[:16]}: remove it"
        with pytest.raises(ValueError, match=refused):
            opened(tmp_path / "out", other, "rarity")
        with pytest.raises(ValueError, match=refused):
            analyzed(tmp_path / "out", other)
    assert contents(tmp_path / "out") == before


def test_an_index_goes_with_a_store_that_moves(store, tmp_path):
    analyze.ready(opener(store)(), ["rarity"], None, ONE)
    moved = opener(shutil.move(store, tmp_path / "moved"))
    assert len(opened(tmp_path / "moved" / "curriculum" / "pieces-8", moved, "rarity"))


def test_a_users_function_that_changed_is_refused(store, tmp_path):
    name = users(tmp_path, "def mine(tokens, lengths): return lengths")
    analyzed(tmp_path / "out", opener(store), [name])
    old = fingerprint(opener(store)(), name)
    users(tmp_path, "def mine(tokens, lengths): return -lengths")
    new = fingerprint(opener(store)(), name)
    with pytest.raises(ValueError, match=rf"fingerprint {old[:16]}, .* are {new[:16]}"):
        analyzed(tmp_path / "out", opener(store), [name])


@pytest.mark.parametrize("file", ["index.json", "order.bin", "values.bin"])
def test_a_damaged_index_is_refused(store, tmp_path, file):
    """Missing, cut short or changed; test_ranking.py has more of what can be wrong with arrays."""
    analyzed(tmp_path, opener(store))
    path = tmp_path / "rarity" / file
    whole = path.read_bytes()
    damaged = [None, b"", whole[:-1], b"\xff" * len(whole)]
    if file == "index.json":
        damaged += [b"[]", b"{}", b"3", b'{"fingerprint": 5}']
        damaged += [whole.replace(old, b"order") for old in (b"samples", b"float32", b"uint32")]
    for text in damaged:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_bytes(text)
        assert text != whole
        with pytest.raises(ValueError, match=r"rarity: damaged.*: remove it"):
            opened(tmp_path, opener(store), "rarity")


# ---- a user's functions


@pytest.mark.parametrize(
    ("returned", "refused"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("lengths[:-1]", r"returned shape \(1,\), not \(2,\)"),
        ("0", r"returned shape \(\), not \(2,\)"),
        ("['a', 'b']", "returned <U1, not numbers"),
        ("None", "returned object, not numbers"),
        ("lengths * np.inf", "returned a value that is not finite"),
        ("exit(3)", "raised SystemExit: 3"),
    ],
)
def test_a_mistake_in_a_users_function_is_one_line(tmp_path, returned, refused):
    mine = difficulty.metric(users(tmp_path, f"def mine(tokens, lengths): return {returned}"))
    message = refusal(mine.value, np.array([1, 2, END, 3, END]), np.array([3, 2]), None)
    assert re.search(rf"metrics\.py:mine, on a batch of shape \(2, 3\): {refused}", message)
