"""Reports: what they compute is right, what they show is whole, and a damaged log is still read."""

import html as html_entities
import math
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ALL_ON, write_lines

import config
import report
from support import settings as numbers
from support.report import charts, comparison, page, run_page
from support.report.comparison import Recipe
from support.report.run_page import RunLog, read_run
from support.settings import flattened

OUTSIDE = re.compile(r"""(?:src|href|action)\s*=|url\(|@import|https?:|//[a-z0-9-]+\.[a-z]""")


def lines_of_a_run(flags="", losses=(3.0, 2.0), steps=4, ms=100.0, **start) -> list[dict]:
    """Rows of 100 tokens a step; an evaluation of the same text after each equal part."""
    settings = flattened(config.build(config.parse(shlex.split(flags))))
    about = {"config": settings, "argv": f"train.py {flags}".strip(), "resumed_at": 0}
    lines = [{"event": "run", **about, "commit": "abc", "torch": "2", **start}]
    for step in range(1, steps + 1):
        at = {"step": step, "consumed_tokens": 100 * step}
        line = {"event": "train", **at, "real_tokens": 200 * step, "layer_tokens": 600 * step}
        line |= {"loss": 9.0 / step, "grad_norm": 1.0, "lr": 0.1 / step, "kept_tokens": 64}
        line |= {"max_piece_len": 256, "padding_share": 0.0, "ms": ms, "data_ms": 10.0}
        line |= {"flops": 1e9 * step, "tokens_per_s": 2000.0, "mfu": 0.25, "epochs": step / 10}
        lines.append(line)
        part, rest = divmod(step, steps // len(losses))
        if not rest:
            result = {"val_bpb": losses[part - 1], "targets": 50, "last": False}
            lines.append({"event": "eval", **at, **result})
    last = {"val_bpb": losses[-1] + 0.01, "targets": 90, "last": True}
    return [*lines, {"event": "eval", **at, **last}]


def written(folder: Path, lines: list) -> Path:
    """A run's folder with these lines in its log; text stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_lines(folder / "log.jsonl", lines).parent


@pytest.fixture
def make(tmp_path):
    """make("a", flags="--ltd", losses=(3.0, 2.0)) -> the folder of a run with such a log."""
    return lambda name="a", **of: written(tmp_path / name, lines_of_a_run(**of))


@pytest.fixture
def log(make) -> RunLog:
    return read_run(make())


def html_of(folder: Path) -> str:
    return report.write(folder).read_text(encoding="utf-8")


def seen(text: str) -> str:
    """What a reader of the page reads."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.S)
    return " ".join(html_entities.unescape(re.sub(r"<[^>]+>", " ", body)).split())


# Numbers, worked by hand


def test_a_loss_is_reached_where_it_is_crossed_first(make, log):
    cost = comparison.cost_to_reach(log, 2.5)  # 3.0 after 2 steps, 2.0 after 4
    middle = {"consumed_tokens": 300.0, "real_tokens": 600.0, "flops": 3e9, "seconds": 0.3}
    assert cost == pytest.approx(middle)
    assert comparison.cost_to_reach(log, 2.0)["consumed_tokens"] == 400
    assert comparison.cost_to_reach(log, 1.99) is None
    assert comparison.cost_to_reach(log, 3.5)["consumed_tokens"] == 200
    twice = read_run(make("twice", losses=(3.0, 1.0, 3.0, 1.0)))
    assert comparison.cost_to_reach(twice, 2.0)["consumed_tokens"] == 150


def test_ratios_are_to_the_mean_of_the_first_recipe(make):
    first = [read_run(make("a")), read_run(make("b", ms=300.0, losses=(3.0, 1.9)))]
    other = [read_run(make("c", losses=(2.0, 1.0)))]
    recipes = [Recipe("first", "", {}, first), Recipe("other", "", {}, other)]
    loss = comparison.target_of(recipes[0])
    assert loss == 2.0, "the highest that a seed of the first recipe ends with"
    base, half = comparison.costs(recipes, loss)
    mean = (0.4 + 0.3 * (4 - 2 * 0.1 / 1.1)) / 2
    assert base.ratios["seconds"][0] == pytest.approx(0.4 / mean)
    assert np.mean(base.ratios["seconds"]) == pytest.approx(1) and base.reached == base.of == 2
    assert half.ratios["seconds"] == pytest.approx([0.2 / mean]) and not half.at_most
    assert comparison.costs(recipes[::-1], 0.5)[1].ratios["seconds"] == []


def test_what_is_dropped_is_counted_against_all_positions(make, log):
    assert log.dropped_shares().tolist() == [0, 0, 0, 0]  # 600 of 3 layers x 200 tokens
    padded = {"padding_share": 0.5}  # 400 positions, of which 1200 layer-tokens
    half = read_run(written(log.folder, [line | padded for line in lines_of_a_run()]))
    assert half.dropped_shares().tolist() == [0.5] * 4 and half.dropped() == 0.5


def test_known_answers(log):
    x, y = charts.medians(np.arange(6), np.array([3.0, 1.0, 2.0, 9.0, 8.0, 7.0]), 3)
    assert x.tolist() == [1, 4] and y.tolist() == [2.0, 8.0]
    x, y = charts.thinned(np.arange(6.0), np.array([0.0, 5.0, 1.0, 2.0, 9.0, 2.0]), 4)
    assert y.tolist() == [0, 5, 2, 9, 2] and x.tolist() == [0, 1, 3, 4, 5]
    shown = charts.ticks_of(charts.Axis(1, 60_000, log=True))
    assert shown == [(1, "1"), (10, "10"), (100, "100"), (1000, "1000"), (10_000, "10 K")]
    assert charts.ticks(charts.Axis(1, 60, log=True)) == [1, 2, 5, 10, 20, 50]
    assert numbers.short(61440) == "61.4 K" and numbers.short(950) == "950"
    assert numbers.short(1.2e9, "FLOP") == "1.20 GFLOP" and numbers.short(2e9)[-1] == "B"
    times = [numbers.duration(seconds) for seconds in (8.24, 754, 7500)]
    assert times == ["8.2 s", "12 min 34 s", "2 h 5 min"]


# Which runs are one recipe


def test_runs_that_differ_only_in_their_seed_are_one_recipe(make):
    runs = {
        "a": "--tokens 60K",
        "b": "--tokens 60000 --seed 2 --out elsewhere --keep=5",
        "c": "--tokens 60K --ltd",
        "d": "--tokens 60K --ltd --ltd-start 32",
        "e": "--tokens 60K --data other",
        "f": "--tokens 60K --compile",
    }
    recipes = comparison.recipes_of([read_run(make(name, flags=f)) for name, f in runs.items()])
    groups = [[log.name for log in recipe.runs] for recipe in recipes]
    assert groups == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    own = ["`--ltd`", "`--ltd --ltd-start 32`", "`--data other`", "`--compile`"]
    assert [recipe.flags for recipe in recipes] == ["no other flags", *own]
    assert [recipe.name for recipe in recipes] == ["a and 1 more", *"cdef"]
    table = report.settings_table({recipe.flags: recipe.settings for recipe in recipes[:3]})
    assert table.rows == [
        ["`--ltd`", "off", "on", "on"],
        ["`--ltd-start`", "–", "16", "32"],
        ["`--ltd-share`", "–", "0.9", "0.9"],
    ]


def test_an_extended_run_is_no_run_with_the_larger_budget_from_its_start(make):
    lines = lines_of_a_run("--tokens 60K --ltd")
    settings = lines[0]["config"] | {"optim.tokens": 90_000}
    again = {"argv": "train.py --resume --tokens 90K", "resumed_at": 4, "config": settings}
    one = written(make("one"), [*lines, lines[0] | again])
    two = make("two", flags="--tokens 90K --ltd")
    recipes = comparison.recipes_of([read_run(one), read_run(two)])
    assert [r.name for r in recipes] == ["one", "two"]
    assert [r.flags for r in recipes] == ["`--tokens 60K then --tokens 90K`", "`--tokens 90K`"]
    assert "--tokens at the start 60,000 2,000,000" in seen(html_of(one))


# Logs as they are


def test_a_torn_line_is_left_out_and_counted_and_absent_fields_are_nan(make, log):
    lines = lines_of_a_run()
    lines[1]["mfu"] = None
    del lines[2]["mfu"]
    folder = written(make("b"), [*lines, '{"event": "tra'])
    damaged = read_run(folder)
    assert damaged.unread == 1 and damaged.evals == log.evals
    assert np.isnan(damaged.column("mfu")).tolist() == [True, True, False, False]
    assert np.isnan(damaged.column("pool")).all() and damaged.median("mfu") == 0.25
    for name in log.steps.keys() - {"mfu"}:
        assert np.array_equal(damaged.steps[name], log.steps[name])


def test_a_run_that_has_hardly_begun(make):
    other = str(make("b", flags="--ltd"))
    for kept in (1, 2, 3, 4):
        folder = written(make(), lines_of_a_run()[:kept])
        text = seen(html_of(folder))
        assert "not finished" in text or "no step is in its log yet" in text
        assert report.main([str(folder), other, "--out", str(folder / "both.html")]) == 0


def test_a_run_tells_its_stops_stages_and_stores(make):
    lines = lines_of_a_run(steps=40)
    assert "by store" not in seen(html_of(make("without")))
    lines.insert(13, lines[0] | {"resumed_at": 12, "commit": "def"})
    lines.insert(3, {"event": "stage", "step": 2, "owners": [0, 1, -1]})
    lines[-1]["by_store"] = {"bible": 1.5, "jargon": 2.25}
    text = html_of(written(make(), lines))
    stage = "1 2 200 --pseudo: 2 of 3 layers have their own weights of layer: 0 1 ."
    assert f"{stage} 2 12 1.20 K resumed, with commit def" in seen(text)
    assert text.count('class="mark"') == 2 * text.count('class="chart"') > 6
    assert "bible, at last 1.500 jargon, at last 2.250" in seen(text)


# The page


def test_a_page_is_small_well_formed_and_needs_nothing_from_elsewhere(make, tmp_path):
    one = make(steps=2_000, losses=tuple(np.linspace(3, 1, 100)))
    report.main([str(one), str(make("b", flags="--ltd")), "--out", f"{tmp_path}/c.html"])
    for text in html_of(one), (tmp_path / "c.html").read_text():
        assert not OUTSIDE.search(text) and len(text) < 200_000
        no_xml = r"<(script|style)>.*?</\1>|<!.*?>|<meta.*?>"
        ElementTree.fromstring(re.sub(no_xml, "", text, flags=re.S))
        assert "nan" not in seen(text).lower().split() and "nan," not in text


def test_a_comparison_has_all_four_costs_as_charts_and_columns(make, tmp_path):
    runs = [make("a"), make("b", flags="--seed 2"), make("c", flags="--ltd", losses=(2.0, 1.5))]
    runs = [*map(str, runs), str(make("d", flags="--pack", losses=(3.0, 2.6)))]
    report.main([*runs, "--loss", "2.5", "--out", f"{tmp_path}/c.html"])
    text = seen((tmp_path / "c.html").read_text())
    for unit in ("consumed tokens", "raw tokens", "FLOPs", "seconds"):
        assert f"Loss against {unit}" in text
    assert "1.00 (1.00 to 1.00) 300" in text  # two seeds of the first recipe
    assert "≤ 0.67 (one seed) 200" in text and "at the first evaluation already" in text
    on_the_way = "50 tokens of the embedded corpus's held-out text"
    assert f"Cost to reach 2.500 bits per byte on {on_the_way}" in text
    assert f"at the end on {on_the_way.replace('50', '90')}" in text
    assert text.count("--pack ") == 2, "among the recipes and the settings"
    assert text.count("not reached") == 4 and "0 of 1" in text


def test_training_loss_is_in_bits_beside_held_out_loss_where_that_can_be_known(make):
    """A nat per target of 2 bytes is 1 / (2 ln 2) bits per byte."""
    none = page.Table([], [])
    part = run_page.loss_section(read_run(make(bytes_per_token=2.0)), none)
    training, on_the_way, end = part.charts[0].series
    assert part.charts[0].unit == "bits per byte" and "2.00 bytes a token" in part.notes[0]
    assert training.y[0] == pytest.approx(9 / 2 / math.log(2))
    assert on_the_way.y.tolist() == [3.0, 2.0] and end.y.tolist() == [2.01]
    assert end.label.endswith("at the end, on 90 tokens of the embedded corpus's held-out text")
    for flags, why in ("", "no bytes per token"), ("--model bert --data web", "masked tokens are"):
        about = {"bytes_per_token": 2.0} if flags else {}
        part = run_page.loss_section(read_run(make("old", flags=flags, **about)), none)
        assert part.charts[0].unit == "nats per target" and len(part.charts[0].series) == 1
        assert why in part.notes[0]
    assert part.charts[1].series[0].label.endswith("50 masked tokens of web's held-out text")


def test_long_runs_are_drawn_in_minutes(make):
    """Four steps of a quarter of an hour each; the first evaluation is after the second."""
    recipes = comparison.recipes_of([read_run(make(ms=900_000.0))])
    chart = comparison.chart_against("seconds", recipes, None)
    assert chart.x_unit == "minutes" and chart.series[0].x.tolist() == [30, 60]


def test_a_point_is_drawn_where_its_numbers_are():
    one = charts.Series("a", np.array([0.0, 1.0]), np.array([0.0, 1.0]), "dots")
    chart = charts.Chart("", "", "", [one], from_zero=True, size=(160, 156))
    drawn = charts.svg(chart)  # 100 x 100 units of plot; 6 % of air above 1
    assert 'points="48.0,118.0 148.0,23.7"' in drawn
    assert drawn.count("<circle") == 2 and 'cx="148.0" cy="23.7"' in drawn
    assert 'data-x="0 1 0 48 148" data-y="0 1.06 0 118 18"' in drawn


# The command


def test_a_real_run(log_of, tmp_path, capsys):
    """The names that train.py logs are those that a report looks for."""
    folders = [str(written(tmp_path / "b", log_of())), str(written(tmp_path / "a", log_of(ALL_ON)))]
    assert report.main(folders[1:]) == 0
    assert capsys.readouterr().out.endswith(f"report: {folders[1]}/report.html\n")
    text = seen(Path(folders[1], "report.html").read_text())
    (end,) = (line for line in log_of(ALL_ON) if line.get("last"))
    assert f"at the end {end['val_bpb']:.3f} bits per byte, on {end['targets']:,} tokens" in text
    assert "Training loss bits per byte" in text
    titles = {"Training loss", "Longest piece", "Kept tokens", "Padding", "Dropped", "Step time"}
    assert not {title for title in titles if title not in text}
    assert "--ltd-start 16" in text and "damaged" not in text
    assert report.main([*folders, "--out", f"{tmp_path}/both.html"]) == 0
