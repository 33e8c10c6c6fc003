"""Pacing digit for digit, settings and refusals, what may be drawn, reshaped rows, the command."""

import json
import math
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import curriculum
from curriculum import (
    Curriculum,
    CurriculumConfig,
    Pacing,
    check_pacing,
    discrete,
    main,
    pace,
    reshape,
)
from support.rows.ranking import Pool, Ranking, Rankings


def deepspeed(t, over, start, end, degree, multiple):
    """What DeepSpeed's curriculum_scheduler.py computes, in its order of operations (float64)."""
    value = math.floor((float(t) / over) ** (1.0 / degree) * (end - start) + start)
    value -= value % multiple
    return min(value, end)


# ---- pacing


def test_worked_examples():
    assert [pace(t, 300, 64, 1024, 2, 8) for t in (1, 5, 10, 300)] == [112, 184, 232, 1024]
    assert pace(0, 100, 64, 256) == 64 and pace(50, 100, 64, 256) == 160
    assert [discrete(t, (64, 128, 256), (10, 25)) for t in (0, 10, 11, 25, 26, 9999)] == [
        64, 64, 128, 128, 256, 256,
    ]  # fmt: skip


def test_the_floating_point_case():
    """27 / 49 * 49 is 26.999999999999996: exact arithmetic would say 28."""
    assert pace(27, 49, 1, 50) == deepspeed(27, 49, 1, 50, 1, 1) == 27
    assert math.floor(Fraction(27, 49) * 49 + 1) == 28


@given(
    over=st.integers(1, 10**6),
    low=st.integers(1, 64),
    more=st.integers(0, 300),
    degree=st.sampled_from([1, 2, 3, 0.5, 1.7]),
    multiple=st.sampled_from([1, 8, 16]),
    share=st.floats(0, 1.5),
)
def test_agrees_with_deepspeed(over, low, more, degree, multiple, share):
    """On well-formed settings: the multiple divides start and end."""
    start, end, t = low * multiple, (low + more) * multiple, int(share * over)
    assert pace(t, over, start, end, degree, multiple) == deepspeed(
        t, over, start, end, degree, multiple
    )


def test_where_deepspeed_leaves_the_range():
    assert deepspeed(0, 100, 10, 100, 1, 8) == 8 and pace(0, 100, 10, 100, 1, 8) == 10
    assert deepspeed(100, 100, 32, 197, 1, 8) == 192 and pace(100, 100, 32, 197, 1, 8) == 197


@given(
    st.integers(1, 500), st.integers(0, 500), st.floats(0.3, 4), st.floats(0, 2), st.floats(0, 2)
)
def test_stays_in_range_and_never_falls(start, more, degree, early, late):
    early, late = sorted((early, late))
    first, second = (pace(t, 1.3, start, start + more, degree, 8) for t in (early, late))
    assert start <= first <= second <= start + more


def test_levels_that_go_down_again_are_followed():
    """DeepSpeed's update_difficulty asks its schedule only while it is below the maximum."""
    levels, until = (64, 256, 128), (10, 20)
    assert [discrete(t, levels, until) for t in (10, 11, 20, 21)] == [64, 256, 256, 128]
    course = course_of("seqlen", pace="discrete:64@0.1:256@0.2:128")
    assert [course.at(t).max_piece_len for t in (10, 11, 20, 21, 100)] == [64, 256, 256, 128, 128]
    course = course_of(
        indexes={"rarity": index_of([4, 1, 3, 2])}, pace="discrete:25@0.5:100@0.6:50"
    )
    assert [members(course.at(t).pool) for t in (50, 61)] == [[1], [1, 3]]
    assert course.at(55).pool is None


def test_neutral_when_start_is_end():
    assert {pace(t / 10, 0.5, 256, 256, 2, 8) for t in range(11)} == {256}


def test_a_users_function(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def step(progress):\n    return 17 if progress < 0.5 else 64\n")
    pacing = Pacing(f"{file}:step", 8, 64, over=100, multiple=8)
    assert [pacing.at(t) for t in (0, 49, 50, 100, 200)] == [16, 16, 64, 64, 64]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", r"step at progress 0.0: raised ZeroDivisionError: division by zero"),
        ("'x'", r"step at progress 0.0: raised TypeError"),
        ("float('nan')", r"step at progress 0.0: raised ValueError: cannot convert float NaN"),
        ("7", r"step at progress 0.0: 7 is outside 8..64, from start to end"),
        ("8 + 57 * progress", r"step at progress 1.0: 65 is outside 8..64"),
        ("8 if progress != 0.313 else 1 / 0", r"step at progress 0.313: raised ZeroDivisionError"),
        ("exit(3)", r"step at progress 0.0: raised SystemExit: 3"),
    ],
)
def test_a_bad_function_of_a_user_fails_before_the_run(tmp_path, body, message):
    file = tmp_path / "mine.py"
    file.write_text(f"def step(progress):\n    return {body}\n")
    with pytest.raises(ValueError, match=message):
        check_pacing(Pacing(f"{file}:step", 8, 64), "--")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "cubic"}, r"pacing cubic is unknown: choose one of linear, root:DEGREE, disc"),
        ({"kind": "root:x"}, r"pacing root:x is unknown"),
        ({"kind": "none.py:f"}, r"none.py:f: there is no Python file none.py"),
        ({"start": 300, "end": 256}, r"--start 300 must lie in 1..256"),
        ({"start": 0}, r"--start 0 must lie in 1..100"),
        ({"start": 10, "multiple": 8}, r"--start 10 is no multiple of 8: try 16"),
        ({"over": 0}, r"pacing with over 0: it has to be above 0"),
        ({"over": math.inf}, r"pacing with over inf"),
        ({"over": math.nan}, r"pacing with over nan"),
        ({"kind": "root", "degree": 0}, r"pacing with degree 0"),
        ({"kind": "root", "degree": math.inf}, r"pacing with degree inf"),
        ({"multiple": 0}, r"pacing with multiple 0"),
        (
            {"kind": "discrete", "levels": (1, 2, 3), "until": (5,)},
            r"3 levels and 1 ends: give one end",
        ),
        (
            {"kind": "discrete", "levels": (1, 2), "until": (5, 6)},
            r"2 levels and 2 ends: give one end",
        ),
        ({"kind": "discrete"}, r"0 levels and 0 ends.*as in discrete:64@0.1:256"),
        ({"kind": "discrete", "levels": (1, 2), "until": (-1,)}, r"have to ascend from 0"),
        ({"kind": "discrete", "levels": (1, 2, 3), "until": (9, 5)}, r"have to ascend"),
        ({"kind": "discrete", "levels": (1, 2, 3), "until": (5, 5)}, r"have to ascend"),
        ({"kind": "discrete", "levels": (1, 200), "until": (9,)}, r"200 must lie in 1..100"),
    ],
)
def test_a_bad_pacing_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check_pacing(Pacing(**{"kind": "linear", **given}), "--")


# ---- settings


def parse(metric, seq_len=256, **words):
    return curriculum.parse_metrics(CurriculumConfig(metric, **words), seq_len)


def test_no_curriculum_has_no_metrics():
    assert parse("none") == ()


def test_the_defaults():
    length, ranked = parse("seqlen,rarity")
    assert length.pacing == Pacing("linear", start=64, end=256, over=0.4, multiple=8)
    assert ranked.pacing == Pacing("root", start=1, end=100, over=0.4, degree=2.0)
    assert (length.is_length, ranked.is_length, ranked.by) == (True, False, "percentile")
    assert parse("seqlen", 12)[0].pacing.start == 8
    (levels,) = parse("length", pace="discrete:32@0.1:256", by="value")
    assert levels.pacing.levels == (32, 256), "the levels say where it starts"


def test_each_metric_has_its_own_pacing():
    words = {"start": ",5", "share": ",0.2", "pace": "discrete:64@0.1:256,root:3"}
    length, ranked = parse("seqlen,rarity", **words)
    assert (length.pacing.levels, length.pacing.until) == ((64, 256), (0.1,))
    assert ranked.pacing == Pacing("root", start=5, end=100, over=0.2, degree=3.0)
    one_for_all = parse("seqlen,rarity", share="0.5", pace="root:3")
    assert [(m.pacing.over, m.pacing.degree) for m in one_for_all] == [(0.5, 3.0)] * 2
    assert parse("seqlen", pace="root")[0].pacing.degree == 2
    assert [m.pacing.over for m in parse("seqlen,rarity", share="0.5,")] == [0.5, 0.4]


def test_each_metric_has_its_own_unit():
    mixed = parse("rarity,length", by="value,percentile", start="30,5", pace="linear")
    assert [(m.by, m.pacing.start) for m in mixed] == [("value", 30), ("percentile", 5)]
    assert [m.by for m in parse("seqlen,rarity,length", by="value", start="8,1,1")] == ["value"] * 3
    assert [m.by for m in parse("rarity,length", by=",value", start=",7")] == [
        "percentile",
        "value",
    ]
    indexes = {"rarity": index_of([40, 10, 20, 30]), "length": index_of([1, 2, 3, 4])}
    words = {"start": "30,25", "share": "1", "pace": "linear"}
    course = course_of("rarity,length", indexes, by="value,percentile", **words)
    stage = course.at(0)  # rarity up to 30 is samples 1, 2, 3; the first 25 % by length sample 0
    assert members(stage.pool) == [1] and "widened to the easiest 26 % of each" in stage.note
    assert stage.difficulty == {"rarity": 30, "length": 26}


NOT_NUMBERS = ("nan", "inf", "-inf", "1e400", "-1", "0", "x")


@pytest.mark.parametrize("number", NOT_NUMBERS)
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("seqlen", {"start": "{}"}),
        ("seqlen,rarity", {"start": "8,{}"}),
        ("rarity", {"share": "{}"}),
        ("seqlen,rarity", {"share": "0.5,{}"}),
        ("rarity", {"pace": "root:{}"}),
        ("seqlen", {"pace": "discrete:{}@0.1:256"}),
        ("seqlen", {"pace": "discrete:64@{}:256"}),
        ("seqlen", {"pace": "discrete:64@0.1:{}"}),
        ("rarity", {"start": "{}", "by": "value"}),
    ],
)
def test_every_number_is_above_0_and_finite(metric, words, number):
    words = {flag: text.format(number) for flag, text in words.items()}
    (flag,) = set(words) - {"by"}
    message = rf"--curriculum-{flag} {re.escape(number)} is not a (whole )?number above 0, at most"
    with pytest.raises(ValueError, match=message):
        parse(metric, **words)


@pytest.mark.parametrize(
    ("metric", "words", "message"),
    [
        ("seqlen", {"start": "64"}, "start 64 has no effect beside discrete:64@0.1:256: leave it"),
        ("seqlen", {"share": "0.3"}, "share 0.3 has no effect beside discrete:64@0.1:256"),
        ("rarity,seqlen", {"share": "0.3,0.5"}, "share 0.5 has no effect beside discrete"),
        ("rarity,seqlen", {"start": "5,64"}, "start 64 has no effect beside discrete"),
    ],
)
def test_what_discrete_levels_say_cannot_be_said_twice(metric, words, message):
    pace = "discrete:64@0.1:256" if metric == "seqlen" else "linear,discrete:64@0.1:256"
    with pytest.raises(ValueError, match=f"--curriculum-{message}"):
        parse(metric, pace=pace, **words)
    assert parse(metric, pace=pace)


@pytest.mark.parametrize(
    ("metric", "words", "message"),
    [
        ("rarity", {"by": "rank"}, "--curriculum-by rank is unknown: choose percentile or value"),
        ("rarity,length", {"by": "value,"}, "--curriculum-by value needs --curriculum-start"),
        (
            "rarity,length",
            {"by": "value,value,value"},
            "by .* needs a part for each of rarity, len",
        ),
        ("seqlen,rarity", {"start": "8"}, "start 8 needs a part for each of seqlen, rarity"),
        ("seqlen", {"start": "12"}, "start 12 is no multiple of 8: try 16"),
        ("seqlen", {"start": "8.5"}, "start 8.5 is not a whole number"),
        ("seqlen", {"start": "300"}, r"start 300 must lie in 1..256, the end"),
        ("rarity", {"share": "1.5"}, "share 1.5 is not a number above 0, at most 1"),
        ("seqlen", {"pace": "discrete:64@0.1:128@0.2"}, "each level but the last ends @ a share"),
        ("seqlen", {"pace": "discrete:64:128@0.2:256"}, "each level but the last ends @ a share"),
        ("seqlen", {"pace": "discrete:64@0.3:128@0.2:256"}, "have to ascend"),
        ("seqlen", {"pace": "discrete"}, "as in discrete:64@0.1:256"),
    ],
)
def test_flags_that_say_nothing_sensible_are_refused(metric, words, message):
    with pytest.raises(ValueError, match=message):
        parse(metric, **words)


def test_a_users_metric_is_called_by_its_name(tmp_path):
    (metric,) = parse(f"{tmp_path}/mine.py:hard")
    assert metric.label == "hard" and not metric.is_length


def course_of(metric="rarity", indexes=None, budget=100, seq_len=256, **words):
    metrics = parse(metric, seq_len, **words)
    return Curriculum(metrics, budget, seq_len, Rankings(indexes or {}))


def test_the_budget_stretches_the_pacing():
    course = course_of("seqlen", budget=1000, pace="discrete:64@0.1:256")
    assert [course.at(t).max_piece_len for t in (0, 100, 101, 999)] == [64, 64, 256, 256]
    course = course_of("seqlen", budget=1000, share="0.5", start="8")
    assert [course.at(t).max_piece_len for t in (0, 250, 499, 500)] == [8, 128, 248, 256]


# ---- what may be drawn


def index_of(values) -> Ranking:
    values = np.asarray(values, dtype=np.float64)
    return Ranking(values, np.argsort(values, kind="stable").astype(np.uint32))


def members(pool: Pool) -> list[int]:
    ids = pool.ids(np.arange(pool.reach))
    return sorted(ids[ids >= 0].tolist())


def test_pool_worked_example():
    """Values 5, 1, 3, 3, 9: the easiest are samples 1, 2, 3, 0, 4, ties by number."""
    index = index_of([5, 1, 3, 3, 9])
    assert [index.at_percent(p) for p in (1, 20, 21, 40, 41, 60, 80, 81, 100)] == [
        1, 1, 2, 2, 3, 3, 4, 5, 5,
    ]  # fmt: skip
    settings = {"indexes": {"rarity": index}, "share": "1", "pace": "linear"}
    percent = course_of(**settings, start="20")
    assert members(percent.at(0).pool) == [1] and percent.at(26).difficulty == {"rarity": 40}
    assert members(percent.at(26).pool) == [1, 2] and members(percent.at(27).pool) == [1, 2, 3]
    assert percent.at(100).pool is None
    value = course_of(**settings, start="1", by="value")
    assert members(value.at(0).pool) == [1] and value.at(0).difficulty == {"rarity": 1}
    assert members(value.at(25).pool) == [1, 2, 3], "ties belong to one level"
    assert members(value.at(99).pool) == [0, 1, 2, 3] and value.at(100).pool is None


numbers = st.lists(st.integers(0, 12), min_size=1, max_size=60)


@given(values=numbers, percent=st.integers(1, 100))
def test_eligible_by_percentile(values, percent):
    """The easiest ceil(percent N / 100), never none, ties by number.

    DeepSpeed's data_sampler.py divides by 100 first, which is zero below a hundred samples.
    """
    course = course_of(indexes={"rarity": index_of(values)}, start=str(percent), share="1")
    stage = course.at(0)
    count = math.ceil(Fraction(percent * len(values), 100))
    easiest = sorted(range(len(values)), key=lambda sample: (values[sample], sample))[:count]
    if count == len(values):
        assert stage.pool is None
    else:
        assert members(stage.pool) == sorted(easiest) and stage.pool.size == count


@given(values=numbers, level=st.integers(1, 13))
def test_eligible_by_value(values, level):
    """All of at most `level`; where there is none, all of the easiest, and a note.

    DeepSpeed's data_sampler.py ends in an exception there.
    """
    values = [*values, 13]
    course = course_of(
        indexes={"rarity": index_of(values)}, by="value", start=str(level), share="1"
    )
    stage, bound = course.at(0), max(level, min(values))
    wanted = [sample for sample, value in enumerate(values) if value <= bound]
    found = list(range(len(values))) if stage.pool is None else members(stage.pool)
    assert found == wanted and stage.difficulty["rarity"] == bound
    assert bool(stage.note) == (level < min(values))


@given(st.data(), st.integers(1, 100), st.integers(1, 100))
def test_two_metrics_intersect(data, percent, other):
    """The samples that both allow; if there is none, the easiest k % of each for the smallest k."""
    n = data.draw(st.integers(1, 40))
    rows = [data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _ in range(2)]
    indexes = dict(zip(("rarity", "length"), map(index_of, rows), strict=True))
    course = course_of("rarity,length", indexes, start=f"{percent},{other}", share="1")
    stage = course.at(0)

    def both(widen):
        sets = []
        for values, p in zip(rows, (percent, other), strict=True):
            order = sorted(range(n), key=lambda sample: (values[sample], sample))
            sets.append(set(order[: math.ceil(Fraction(max(p, widen) * n, 100))]))
        return sorted(sets[0] & sets[1])

    wanted = next(found for widen in range(101) if (found := both(widen)))
    found = list(range(n)) if stage.pool is None else members(stage.pool)
    assert found == wanted
    assert bool(stage.note) == (not both(0))
    level = next(widen for widen in range(101) if both(widen))
    assert stage.difficulty == {"rarity": max(percent, level), "length": max(other, level)}
    assert stage.pool is None or stage.pool.size == len(wanted)


def test_by_value_an_empty_intersection_says_what_was_reached():
    one = index_of([1, 2, 3, 4])
    indexes = {"rarity": one, "length": index_of([5, 4, 3, 2])}
    stage = course_of("rarity,length", indexes, by="value", start="1,2").at(0)
    assert members(stage.pool) == [1, 2], "two of each do not meet, three do"
    assert stage.difficulty == {"rarity": 3, "length": 4} and "51 % of each" in stage.note


@pytest.mark.parametrize("values", [[0.2, 0.9], [-5, -1]])
def test_a_metric_below_the_whole_numbers_cannot_go_by_value(values):
    with pytest.raises(ValueError, match=r"by value goes up from 1.* rarity ends at -?[\d.]+:"):
        course_of(indexes={"rarity": index_of(values)}, by="value", start="1")


def test_a_curriculum_only_widens_and_ends_with_everything():
    random = np.random.default_rng(0)
    indexes = {
        "rarity": index_of(random.random(997)),
        "length": index_of(random.integers(0, 9, 997)),
    }
    course, before = course_of("seqlen,rarity,length", indexes, budget=1000), set()
    for t in range(0, 401, 40):
        stage = course.at(t)
        now = set(range(997)) if stage.pool is None else set(members(stage.pool))
        assert before <= now
        before = now
    assert (
        len(before) == 997
        and course.at(400).max_piece_len == 256
        and course.at(399).max_piece_len == 248
    )
    assert course.at(399).pool is not None


# ---- reshape


def parts_of(reshaped):
    """Of each row, the parts in it: (start, stop, seen)."""
    parts = [(*span, seen) for span, seen in zip(reshaped.spans, reshaped.seen, strict=True)]
    return [parts[a:b] for a, b in pairwise(reshaped.offsets)]


def test_reshape_worked_examples():
    tail = reshape(np.array([[0, 10]]), 10, 4)
    assert tail.seq_len == 4 and parts_of(tail) == [[(0, 4, 0)], [(4, 8, 0)], [(6, 10, 2)]]
    even = reshape(np.array([[0, 256], [300, 556]]), 256, 128)
    assert even.seq_len == 128
    assert parts_of(even) == [[(0, 128, 0)], [(128, 256, 0)], [(300, 428, 0)], [(428, 556, 0)]]
    assert reshape(np.array([[0, 256]]), 256, 248).seq_len == 128, "not one long and one short"
    short = reshape(np.array([[0, 5]]), 16, 8)  # the stream's last sample
    assert short.seq_len == 8 and parts_of(short) == [[(0, 5, 0)], []]


def test_reshaped_rows_get_longer_by_stairs():
    """As short as their number allows: two rows of 512 at every limit from 512 to 1,016."""

    def lengths(seq_len, limits):
        return [reshape(np.array([[0, seq_len]]), seq_len, limit).seq_len for limit in limits]

    assert set(lengths(1024, range(512, 1017, 8))) == {512}
    assert lengths(1024, (504, 1024)) == [344, 1024]
    steps = dict.fromkeys(lengths(256, range(64, 257, 8)))
    assert list(steps) == [64, 88, 128, 256], "the whole curriculum of a row of 256"


@given(st.integers(8, 600), st.integers(1, 600), st.integers(1, 600))
def test_reshape_loses_nothing_and_predicts_nothing_twice(seq_len, limit, size):
    limit, size = min(limit, seq_len), min(size, seq_len)
    reshaped = reshape(np.array([[1000, 1000 + size]]), seq_len, limit)
    length, rows = reshaped.seq_len, parts_of(reshaped)
    assert length <= limit
    predicted = [t for row in rows for start, stop, seen in row for t in range(start + seen, stop)]
    assert predicted == list(range(1000, 1000 + size))
    assert all(1000 <= start and stop - start <= length for row in rows for start, stop, _ in row)
    assert len(rows) == len(reshape(np.array([[0, seq_len]]), seq_len, limit).offsets) - 1
    if size == seq_len:
        assert all(stop - start == length for row in rows for start, stop, _ in row)
        assert len(rows) * length < seq_len + 8 * len(rows) or length == limit


# ---- command


def test_command_prints_json(capsys):
    flags = "pace --kind root --degree 2 --start 64 --end 1024 --over 300 --multiple 8"
    main([*flags.split(), "--at", "1,5,10,300", "--json"])
    assert json.loads(capsys.readouterr().out) == {"1": 112, "5": 184, "10": 232, "300": 1024}
    flags = "pace --kind discrete --levels 64,128,256 --until 10,25 --at 10,11,26 --json"
    main(flags.split())
    assert json.loads(capsys.readouterr().out) == {"10": 64, "11": 128, "26": 256}


def test_command_prints_a_table(capsys):
    main(["pace", "--start", "64", "--end", "256", "--over", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["0", "64"] and lines[11].split() == ["50", "256"]
    with pytest.raises(ValueError, match="--start 300"):
        main(["pace", "--start", "300", "--end", "256"])
    with pytest.raises(ValueError, match="--at: x is not whole numbers, such as 1,5,10"):
        main(["pace", "--at", "x"])
    with pytest.raises(ValueError, match="--unknown 3"):
        main(["pace", "--start", "64", "--unknown", "3"])
    for flag in ("--at=-5", "--at=1,9999999999999999999"):
        with pytest.raises(ValueError, match=r"--at: .* is not whole numbers.*from 0 to 2\^53"):
            main(["pace", "--kind", "root", flag])
    for flag in ("--over=0", "--over=inf", "--over=nan", "--multiple=0", "--multiple=1e400"):
        with pytest.raises(ValueError, match=r"over|multiple"):
            main(["pace", flag])
    for degree in ("nan", "inf", "0", "-1"):
        with pytest.raises(ValueError, match=f"--kind {degree} is not a number above 0"):
            main(["pace", "--kind", f"root:{degree}"])
    with pytest.raises(ValueError, match=r"with end 1(0+): it has to be above 0, at most 2\^53"):
        main(["pace", "--end", "1" + "0" * 400])


def test_command_takes_a_pacing_as_train_does(capsys):
    def printed(*flags):
        main(["pace", *flags])
        return capsys.readouterr().out

    assert printed("--kind", "root:3") == printed("--kind", "root", "--degree", "3")
    levels = printed("--levels", "64,256", "--until", "10")
    assert printed("--kind", "discrete:64@0.1:256") == levels
    assert levels.splitlines()[-1].split() == ["11", "256"], "also the last level is seen"


def test_command_plots(tmp_path, capsys):
    flags = ["--levels", "64,256", "--until", "10"]
    main(["pace", *flags, "--plot", str(tmp_path / "curve.svg")])
    points = re.search(r'points="(.*?)"', (tmp_path / "curve.svg").read_text())[1].split()
    assert len(points) == 4 and len({point.split(",")[1] for point in points}) == 2, "a step"
