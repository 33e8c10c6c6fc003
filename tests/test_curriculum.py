"""Pacing: worked values, never outside start..end, never falling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curriculum import check_metric, main, pace


def test_worked_examples():
    assert pace(0.0, 64, 256, 0.4) == 64
    assert pace(0.2, 64, 256, 0.4) == 160
    assert pace(0.39, 64, 256, 0.4) == 248  # 251.2, down to a multiple of 8
    assert pace(0.4, 64, 256, 0.4) == 256
    assert pace(1.0, 64, 256, 0.4) == 256


def test_traps_of_the_published_library():
    assert pace(0.0, 10, 100, 1.0) == 10, "rounding down must not fall below the start"
    assert pace(1.0, 10, 197, 1.0) == 197, "the end is reached though 8 does not divide it"


@given(
    st.integers(1, 500), st.integers(0, 500), st.floats(0.01, 1), st.floats(0, 2), st.floats(0, 2)
)
def test_stays_in_range_and_never_falls(start, more, share, early, late):
    early, late = sorted((early, late))
    first, second = (pace(t, start, start + more, share) for t in (early, late))
    assert start <= first <= second <= start + more


def test_neutral_when_start_is_end():
    assert {pace(t / 10, 256, 256, 0.5) for t in range(11)} == {256}


def test_unknown_metric_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"--curriculum hard is unknown.*none, seqlen"):
        check_metric("hard")


def test_command_prints_the_schedule(capsys):
    main(["pace", "--start", "64", "--end", "256", "--share", "0.5"])
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].split() == ["0%", "64"] and lines[10].split() == ["100%", "256"]
    with pytest.raises(ValueError, match="--start 300"):
        main(["pace", "--start", "300", "--end", "256"])
