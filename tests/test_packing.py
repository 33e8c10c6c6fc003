"""Packing: every document once, no row overfull, no more rows than the published packers need."""

from importlib.util import find_spec
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import build, refusal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_stores import write_store
from test_plan import plan

import packing
from packing import fill, histogram, main, number_that_fill, pack, pack_lengths, patterns_that_fill
from support.clock import Clock
from support.store import Store


def rows_of(packs):
    return [row.tolist() for row in np.split(packs.items, packs.offsets[1:-1])]


# ---- packers

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="SciPy is not installed")
PACKERS = ["lpfhp", "spfhp", pytest.param("nnlshp", marks=needs_scipy)]
depths = st.none() | st.integers(1, 5)


@st.composite
def histograms(draw, longest=24, most=9):
    """Draw counts of the lengths 1 to `longest`; half of the time most of them are 0."""
    counts = draw(st.lists(st.integers(0, most), min_size=1, max_size=longest))
    if draw(st.booleans()):
        counts = [n if draw(st.integers(0, 3)) == 0 else 0 for n in counts]
    assume(any(counts))
    return np.array([0, *counts])


def patterns_of(lengths, max_len, packer="lpfhp", most=None):
    return pack(histogram(np.array(lengths), max_len), packer, most)


# ---- slow reference packers


def published_rows(counts, max_per_row, longest_pack_first):
    """Count the rows of the paper's SPFHP and LPFHP, as Graphcore's code defines them.

    Open rows are grouped by the space they have left, and the last one of a group is used first.
    SPFHP takes the rows with the most space and puts one document into each. LPFHP takes those
    with the least space that is enough, puts in as many documents as fit, and searches again.
    """
    max_len = len(counts) - 1
    most = max_per_row or max_len
    open_rows = {space: [] for space in range(max_len + 1)}  # space -> [(rows, documents in each)]
    total = 0
    for length in range(max_len, 0, -1):
        left = int(counts[length])
        while left:
            spaces = [s for s in range(length, max_len + 1) if open_rows[s]]
            if spaces:
                space = min(spaces) if longest_pack_first else max(spaces)
                rows, held = open_rows[space].pop()
            else:
                space, rows, held = max_len, left, 0
            times = min(space // length, most - held, left) if longest_pack_first else 1
            used = min(rows, left // times)
            if spaces and rows > used:
                open_rows[space].append((rows - used, held))
            if not spaces:
                total += used
            if held + times < most and space > times * length:
                open_rows[space - times * length].append((used, held + times))
            left -= used * times
    return total


# ---- examples worked by hand


def test_rows_equal_examples_worked_by_hand():
    packs = pack_lengths([3, 6, 5, 2], 8)
    assert packs.items.tolist() == [1, 3, 2, 0] and packs.offsets.tolist() == [0, 2, 4]
    assert pack_lengths([], 8).items.tolist() == []
    assert rows_of(pack_lengths([8, 8], 8)) == [[0], [1]]


def test_patterns_and_their_rows_equal_examples_worked_by_hand():
    # each 6 gets a 2 and each 5 a 3; the last 2 gets a row of its own
    patterns = patterns_of([6, 6, 5, 5, 3, 3, 2, 2, 2], 8)
    assert list(patterns.items()) == [((6, 2), 2), ((5, 3), 2), ((2,), 1)]
    # shortest-pack-first puts the 3 beside the 5, longest-pack-first puts it beside the 6
    assert patterns_of([6, 5, 3], 10, "spfhp") == {(6,): 1, (5, 3): 1}
    assert patterns_of([6, 5, 3], 10, "lpfhp") == {(6, 3): 1, (5,): 1}


@needs_scipy
def test_least_squares_equals_examples_worked_by_hand():
    # no row of 7 can be filled: 5 needs a 2 and 4 needs a 3, which do not exist
    assert patterns_of([5, 5, 4], 7, "nnlshp", 2) == {(5,): 2, (4,): 1}
    counts = np.zeros(13, int)  # made of the patterns that it must find
    counts[[12, 9, 3, 5, 7]] = 4, 6, 6, 10, 10
    assert pack(counts, "nnlshp", 2) == {(12,): 4, (9, 3): 6, (7, 5): 10}
    counts = np.bincount([5, 4, 3, 2], minlength=9)
    assert fill({(5, 3): 2}, counts) == {(5, 3): 1, (4,): 1, (2,): 1}


def test_patterns_that_fill_a_row_equal_examples_worked_by_hand():
    assert list(patterns_that_fill(4, 2, 4)) == [(4,), (3, 1), (2, 2)]
    assert list(patterns_that_fill(5, 3, 2)) == [(2, 2, 1)]
    counts = [number_that_fill(512, most) for most in (3, 4)]
    assert counts == [22_102, 959_631], "the paper's numbers"


# ---- random documents


@pytest.mark.parametrize("packer", PACKERS)
@settings(max_examples=25)
@given(counts=histograms(), max_per_row=depths, seed=st.integers(0, 99))
def test_rows_hold_every_document_once(packer, counts, max_per_row, seed):
    """They also follow the patterns."""
    if packer == "nnlshp":
        max_per_row = min(max_per_row or 3, 3)
    max_len = len(counts) - 1
    lengths = np.repeat(np.arange(len(counts)), counts)
    lengths = np.random.default_rng(seed).permutation(lengths)
    packs = pack_lengths(lengths, max_len, packer, max_per_row)
    assert sorted(packs.items.tolist()) == list(range(len(lengths)))
    rows = [tuple(lengths[row].tolist()) for row in rows_of(packs)]
    assert all(0 < len(row) <= (max_per_row or max_len) and sum(row) <= max_len for row in rows)
    patterns = pack(counts, packer, max_per_row)
    assert rows == [pattern for pattern, n in patterns.items() for _ in range(n)]


@given(histograms(longest=40), depths)
def test_greedy_packers_need_no_more_rows_than_published_ones(counts, most):
    """test_lesson.py compares all rows of lpfhp with those of best fit."""

    def rows(packer, most):
        return sum(pack(counts, packer, most).values())

    assert rows("lpfhp", most) <= published_rows(counts, most, longest_pack_first=True)
    assert rows("spfhp", most) == published_rows(counts, most, longest_pack_first=False)


# ---- refusals


def test_documents_that_do_not_fit_a_row_are_refused():
    for length in (0, 9, -1):
        message = refusal(pack_lengths, [3, length], 8)
        assert f"document of {length} tokens does not fit a row" in message


@needs_scipy
def test_least_squares_with_too_many_patterns_is_refused():
    in_training = "--pack --pack-packer nnlshp"
    too_many = "--pack-max-per-row 2048: nnlshp has over 10,000 patterns"
    assert refusal(build, in_training) == too_many
    assert build(f"{in_training} --pack-max-per-row 2").pack.on
    assert "over 100,000 patterns" in refusal(pack_lengths, [1], 512, "nnlshp", 4)


# ---- the command


def test_the_command_prints_a_table_and_rows(tmp_path, capsys):
    def printed(line):
        main(line.split())
        return capsys.readouterr().out.splitlines()

    store = write_store(tmp_path / "store", [[0] * 7, [0, 1], [2], []])
    # documents of 8, 3, 2 and 1 tokens in rows of 5
    assert printed(f"{store} --max-len 5")[1].split()[:3:2] == ["3", "1.667"]
    lines = printed("100 90 60 50 --max-len 128")
    assert lines[1].split()[:3] == ["3", "78.125%", "1.333"], "rows, share filled, per row"
    assert "1 of 60 + 50 = 110 of 128" in lines[4]
    # (6, 2) and (5, 3) twice each and (2) once: 2 * 40 + 2 * 34 + 4 = 152 of 5 * 64 pairs
    _, table, *_, last = printed("6 6 5 5 3 3 2 2 2 --max-len 8")
    assert table.split() == ["5", "85.000%", "1.800", "47.5%"] and last.split()[0] == "1"
    assert printed("6 6 5 5 3 3 2 2 2 --max-len 8 --max-per-row 1")[1].split()[0] == "9"


# ---- training steps; test_train.py compares packed runs with unpacked ones


def test_a_step_uses_the_packer_of_the_flags(store_dir, monkeypatch):
    packed = Mock(side_effect=lambda counts, packer, most: pack(counts, "lpfhp", most))
    monkeypatch.setattr(packing, "pack", packed)
    flags = "--pack --pack-max-per-row 3 --pack-packer spfhp"
    plan(Store.open(store_dir), flags)(Clock())
    assert packed.call_args.args[1:] == ("spfhp", 3)
