"""Curricula: pacing that equals DeepSpeed's, settings and refusals, and which samples are drawn."""

import inspect
import math
import re
from fractions import Fraction
from functools import partial

import numpy as np
from conftest import ROOT, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

import analyze
import curriculum
from curriculum import Curriculum, CurriculumConfig, Pacing, Pool, Ranking, pace


def deepspeed(t, over, start, end, degree, multiple):
    """Compute what DeepSpeed 0.19.8's curriculum_scheduler.py does, in its order of operations.

    Older versions have no `max` and can return less than `start`.
    """
    value = math.floor((float(t) / over) ** (1.0 / degree) * (end - start) + start)
    value -= value % multiple
    return min(max(value, -(-start // multiple) * multiple), end)


# ---- pacing


def test_pace_equals_worked_examples():
    assert [pace(t, 300, 64, 1024, 2, 8) for t in (1, 5, 10, 300)] == [112, 184, 232, 1024]
    assert [pace(t, 100, 64, 256) for t in (0, 50)] == [64, 160]
    assert {pace(t / 10, 0.5, 256, 256, 2, 8) for t in range(11)} == {256}, "neutral"
    # In floating point 27 / 49 * 49 is 26.999999999999996; exact arithmetic would give 28.
    assert pace(27, 49, 1, 50) == deepspeed(27, 49, 1, 50, 1, 1) == 27


@settings(max_examples=40)
@given(
    over=st.integers(1, 10**6),
    low=st.integers(1, 64),
    more=st.integers(0, 300),
    degree=st.sampled_from([1, 2, 3, 0.5, 1.7]),
    multiple=st.sampled_from([1, 8, 16]),
    share=st.floats(0, 1.5),
)
def test_pace_equals_deepspeeds(over, low, more, degree, multiple, share):
    """If the multiple divides start and end. Otherwise DeepSpeed begins above the start or reaches
    the end late, as the last two lines show.
    """
    setting = (over, low * multiple, (low + more) * multiple, degree, multiple)
    value = pace(int(share * over), *setting)
    assert value == deepspeed(int(share * over), *setting)
    assert setting[1] <= value <= pace(int(share * over) + 1, *setting) <= setting[2]
    assert deepspeed(0, 100, 10, 100, 1, 8) == 16 and pace(0, 100, 10, 100, 1, 8) == 10
    assert deepspeed(100, 100, 32, 197, 1, 8) == 192 and pace(100, 100, 32, 197, 1, 8) == 197


def test_levels_are_spread_over_the_budget_and_may_fall():
    """DeepSpeed's update_difficulty calls its schedule only until the maximum is reached."""
    course = course_of("seqlen", budget=1000, share="0.5", start="8")
    assert [course.at(t).max_piece_len for t in (0, 250, 499, 500)] == [8, 128, 248, 256]
    course = course_of("seqlen", pace="discrete:64@0.1:256@0.2:128")
    assert [course.at(t).max_piece_len for t in (10, 11, 20, 21, 100)] == [64, 256, 256, 128, 128]
    course = course_of("rarity", [4, 1, 3, 2], pace="discrete:25@0.5:100@0.6:50")
    assert [members(course.at(t)) for t in (50, 55, 61)] == [[1], [0, 1, 2, 3], [1, 3]]


def distinct(tokens, lengths, _):
    """Share of a sample's tokens that are its first of their kind."""
    samples = np.split(tokens, np.cumsum(lengths)[:-1])
    return np.array([len(np.unique(sample)) / len(sample) for sample in samples])


def test_the_metric_of_docs_extending_works(run, no_sample_or_report, monkeypatch):
    """It is one line in a dictionary."""
    page = (ROOT / "docs" / "extending.md").read_text()
    assert inspect.getsource(distinct) in page
    monkeypatch.setitem(analyze.METRICS, "distinct", analyze.Metric(distinct))
    chosen = "--curriculum seqlen,distinct --curriculum-start 8,50 --curriculum-pace linear"
    lines = run(f"{chosen} --tokens 1K --eval-every 0 --layers 1")
    steps = [line for line in lines if line["event"] == "train"]
    assert (steps[0]["difficulty_distinct"], steps[-1]["difficulty_distinct"]) == (50, 100)
    assert distinct(np.array([3, 3, 5, 7]), np.array([3, 1]), None).tolist() == [2 / 3, 1]


# ---- settings


def parse(metric, seq_len=256, packed=False, **words):
    return curriculum.parse_metrics(CurriculumConfig(metric, **words), seq_len, packed)


def test_the_defaults():
    length, ranked = parse("seqlen,rarity").values()
    assert length == Pacing(start=64, end=256, over=0.4, multiple=8)
    assert ranked == Pacing(start=1, end=100, over=0.4, degree=2.0)
    assert ranked.by == "percentile" and parse("seqlen", 12)["seqlen"].start == 8
    assert parse("seqlen", pace="root")["seqlen"].degree == 2


def test_lengths_grow_more_slowly_if_short_rows_do_not_shrink_the_step():
    for metric, packed in (("seqlen", True), ("seqlen-reshape", False), ("seqlen-reshape", True)):
        pacing = parse(metric, 2048, packed)[metric]
        assert [pacing.at(t) for t in (0, 0.45, 0.9, 1)] == [64, 64 + 1984 // 4, 2048, 2048]
    truncated = parse("seqlen", 2048)["seqlen"]
    assert [truncated.at(t) for t in (0, 0.2, 0.4, 1)] == [512, 1280, 2048, 2048]


def test_each_metric_can_have_its_own_settings():
    words = {"start": ",5", "share": ",0.2", "pace": "discrete:64@0.1:256,root:3"}
    length, ranked = parse("seqlen,rarity", **words).values()
    assert (length.levels, length.until) == ((64, 256), (0.1,))
    assert ranked == Pacing(start=5, end=100, over=0.2, degree=3.0)


def test_each_metric_can_have_its_own_unit():
    levels = parse("length", pace="discrete:32@0.1:256", by="value")["length"].levels
    assert levels == (32, 256), "discrete levels need no start"
    values, words = ([40, 10, 20, 30], [1, 2, 3, 4]), {"by": "value,percentile", "start": "30,25"}
    # rarity up to 30: samples 1, 2, 3; the easiest 25 % by length: sample 0
    stage = course_of("rarity,length", *values, **words).at(0)
    assert members(stage) == [1] and "widened to the easiest 26 % of each" in stage.note
    assert stage.difficulty == {"rarity": 30, "length": 26}
    values = [1, 2, 3, 4], [5, 4, 3, 2]
    stage = course_of("rarity,length", *values, by="value", start="1,2").at(0)
    assert members(stage) == [1, 2], "the easiest two of each have none in common, three have two"
    assert stage.difficulty == {"rarity": 3, "length": 4} and "51 % of each" in stage.note


INVALID = {  # metric, other settings, and the setting that each of the values is refused for
    "rarity by": "rank",
    "rarity share": "1.5 nan inf 1e400 -1 0 x",
    "rarity,seqlen pace=linear,discrete:64@0.1:256 share": ",1",
    "rarity start": "101",
    "seqlen start": "12 300",
    "seqlen pace=discrete:64@0.1:256 start": "64",
    "rarity pace": "cubic linear:2",
    "seqlen pace": "discrete discrete:64@0.1:128@0.2 discrete:64:128@0.2:256",
    "seqlen,rarity pace": "discrete:64@0.3:128@0.2:256, discrete:64@0.1:512,",
}


def test_invalid_settings_are_refused():
    for setting, values in INVALID.items():
        metric, *others, name = setting.split()
        for value in values.split():
            words = dict(other.split("=") for other in others) | {name: value}
            assert re.search(f"--curriculum-{name}|level", refusal(parse, metric, **words))


def course_of(metric, *values, budget=100, seq_len=256, **words):
    """Args: values of each sample, for every metric that ranks samples"""
    indexes = dict(zip(metric.split(","), map(index_of, values), strict=False))
    return Curriculum(parse(metric, seq_len, **words), budget, seq_len, indexes)


# ---- which samples may be drawn


def index_of(values) -> Ranking:
    values = np.asarray(values, dtype=np.float64)
    return Ranking(values, np.argsort(values, kind="stable").astype(np.uint32))


def members(stage, everything=4) -> list[int]:
    """Return the samples of a stage's pool, out of `everything` samples in all."""
    if stage.pool is None:
        return list(range(everything))
    ids = stage.pool.ids(np.arange(stage.pool.reach))
    return sorted(ids[ids >= 0].tolist())


def test_pools_equal_a_worked_example():
    """Values 5, 1, 3, 3, 9: from the easiest, samples 1, 2, 3, 0, 4. Ties are sorted by number."""
    course = partial(course_of, "rarity", [5, 1, 3, 3, 9], share="1", pace="linear")
    percent = course(start="20")
    assert members(percent.at(0)) == [1] and percent.at(26).difficulty == {"rarity": 40}
    assert members(percent.at(26)) == [1, 2] and members(percent.at(27)) == [1, 2, 3]
    assert percent.at(100).pool is None
    value = course(start="1", by="value")
    assert members(value.at(0)) == [1] and value.at(0).difficulty == {"rarity": 1}
    assert members(value.at(25)) == [1, 2, 3], "equal values enter together"
    assert members(value.at(99)) == [0, 1, 2, 3] and value.at(100).pool is None


def easiest(values, percent):
    order = sorted(range(len(values)), key=lambda sample: (values[sample], sample))
    return set(order[: math.ceil(Fraction(percent * len(values), 100))])


@settings(max_examples=40)
@given(st.data(), st.integers(1, 100), st.integers(1, 100))
def test_by_percentile_a_pool_is_what_all_metrics_allow(data, percent, other):
    """If that is nothing, it is the easiest k % by each, for the smallest k that works.

    DeepSpeed's data_sampler.py divides by 100 first, which gives 0 below a hundred samples.
    """
    n = data.draw(st.integers(1, 40))
    rows = [data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for _ in range(2)]
    alone = course_of("rarity", rows[0], start=str(percent)).at(0)
    assert members(alone, n) == sorted(easiest(rows[0], percent))
    stage = course_of("rarity,length", *rows, start=f"{percent},{other}").at(0)

    def both(widened):
        return easiest(rows[0], max(percent, widened)) & easiest(rows[1], max(other, widened))

    level = next(widened for widened in range(101) if both(widened))
    assert members(stage, n) == sorted(both(level))
    assert bool(stage.note) == (level > 0)
    assert stage.difficulty == {"rarity": max(percent, level), "length": max(other, level)}
    assert stage.pool is None or stage.pool.size == len(both(level))


@settings(max_examples=40)
@given(values=st.lists(st.integers(0, 12), min_size=1, max_size=60), level=st.integers(1, 13))
def test_by_value_a_pool_is_every_sample_up_to_the_level(values, level):
    """If there is none, it is every sample of the lowest value, and a note says so.

    DeepSpeed's data_sampler.py raises an exception in this case.
    """
    values = [*values, 13]
    stage = course_of("rarity", values, by="value", start=str(level)).at(0)
    bound = max(level, min(values))
    expected = [sample for sample, value in enumerate(values) if value <= bound]
    assert members(stage, len(values)) == expected and stage.difficulty["rarity"] == bound
    assert bool(stage.note) == (level < min(values))


def test_metrics_below_1_are_refused_by_value():
    for values in ([0.2, 0.9], [-5, -1]):
        message = refusal(course_of, "rarity", values, by="value", start="1")
        assert "--curriculum-by value" in message


# ---- pools


def test_the_size_of_a_large_intersection_is_estimated(monkeypatch):
    random = np.random.default_rng(0)
    one, two = (index_of(random.random(20_000)) for _ in range(2))
    pool = Pool((one, two), (8_000, 10_000))
    exact = int((pool.ids(np.arange(8_000)) >= 0).sum())
    assert pool.size == exact and not pool.is_empty
    monkeypatch.setattr(curriculum, "SCAN", 2_000)
    estimated = Pool((one, two), (8_000, 10_000))
    assert 0 < abs(estimated.size / exact - 1) < 0.1  # 4 standard deviations
    assert not estimated.is_empty and Pool((one, index_of(-one.values)), (5, 5)).is_empty
