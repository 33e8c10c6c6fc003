"""Packing: every item once, no row too full, worked answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing import best_fit, main

items = st.lists(st.integers(1, 64), max_size=60)


def test_worked_example():
    assert best_fit([3, 6, 5, 2], 8) == [[1, 3], [2, 0]]
    assert best_fit([], 8) == []
    assert best_fit([8, 8], 8) == [[0], [1]]


def test_takes_the_fullest_row_that_still_holds_the_item():
    # 7 and 6 open rows with 3 and 4 left; the 3 goes where it fits exactly, not where room is most
    assert best_fit([7, 6, 3], 10) == [[0, 2], [1]]


@given(items, st.integers(64, 100))
def test_every_item_once_and_no_row_too_full(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= capacity for row in rows)


@given(items, st.integers(64, 100))
def test_no_two_rows_would_fit_into_one(lengths, capacity):
    used = sorted(sum(lengths[item] for item in row) for row in best_fit(lengths, capacity))
    assert len(used) < 2 or used[0] + used[1] > capacity


@pytest.mark.parametrize("length", [0, 9, -1])
def test_refuses_what_fits_no_row(length):
    with pytest.raises(ValueError, match=f"piece of {length} tokens does not fit a row of 1 to 8"):
        best_fit([3, length], 8)


def test_command_prints_rows_and_padding(capsys):
    main(["100", "90", "60", "50", "--capacity", "128"])
    out = capsys.readouterr().out
    assert "60 + 50 = 110 of 128" in out
    assert "padding: 21.9% in 3 rows, 41.4% with one item a row" in out
    with pytest.raises(ValueError, match="--capacity 0: a row has 1 token or more"):
        main(["5", "--capacity", "0"])
