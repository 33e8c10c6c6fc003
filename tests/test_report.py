"""Reports: what they compute is right, what they show is whole, and a bad log is no end of it."""

import html as html_entities
import json
import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ALL_ON

import config
import report
from support.base import numbers
from support.base.runtime import exit_cleanly
from support.base.settings import flattened
from support.report import charts, comparison, figures, page
from support.report.comparison import Recipe
from support.report.log import dropped_shares, read_run, step_times

OUTSIDE = re.compile(r"""(?:src|href|action)\s*=|url\(|@import|https?:|//[a-z0-9-]+\.[a-z]""")
NEW_FIELDS = ("flops", "tokens_per_s", "mfu", "epochs")


def settings_of(flags: str = "") -> dict:
    return flattened(config.build(config.parse(shlex.split(flags))))


def lines_of_a_run(flags="", losses=(3.0, 2.0), steps=4, ms=100.0, new=True, **start) -> list[dict]:
    """Rows of 100 tokens a step; an evaluation of the same text after each equal part."""
    lines = [{"event": "run", "config": settings_of(flags), "commit": "abc", "torch": "2"} | start]
    for step in range(1, steps + 1):
        line = {"event": "train", "step": step, "consumed_tokens": 100 * step}
        line |= {"real_tokens": 200 * step, "layer_tokens": 1200 * step, "loss": 9.0 / step}
        line |= {"grad_norm": 1.0, "lr": 0.1 / step, "kept_tokens": 64, "max_piece_len": 256}
        line |= {"padding_share": 0.0, "ms": ms, "data_ms": 10.0}
        if new:
            line |= {"flops": 1e9 * step, "tokens_per_s": 2000.0, "mfu": 0.25, "epochs": step / 10}
        lines.append(line)
        if step % (steps // len(losses)) == 0:
            bpb = losses[step // (steps // len(losses)) - 1]
            at = {"step": step, "consumed_tokens": 100 * step}
            lines.append({"event": "eval", **at, "val_bpb": bpb, "targets": 50, "last": False})
    last = {"step": steps, "consumed_tokens": 100 * steps, "val_bpb": losses[-1] + 0.01}
    return [*lines, {"event": "eval", **last, "targets": 90, "last": True}]


def written(folder: Path, lines: list) -> Path:
    """A run's folder with these lines in its log; text stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (folder / "log.jsonl").write_text("".join(texts))
    return folder


@pytest.fixture
def make(tmp_path):
    """make("a", flags="--ltd", losses=(3.0, 2.0)) -> the folder of a run with such a log."""
    return lambda name="a", **of: written(tmp_path / name, lines_of_a_run(**of))


def html_of(folder: Path) -> str:
    return report.write(folder).read_text(encoding="utf-8")


def seen(text: str) -> str:
    """What a reader of the page reads."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.S)
    return " ".join(html_entities.unescape(re.sub(r"<[^>]+>", " ", body)).split())


# Numbers, worked by hand


def test_a_loss_is_reached_between_two_evaluations(make):
    log = read_run(make(losses=(3.0, 2.0)))  # after 2 and 4 steps
    cost = comparison.cost_to_reach(log, 2.5)
    middle = {"consumed_tokens": 300.0, "real_tokens": 600.0, "flops": 3e9, "seconds": 0.3}
    assert cost.spent == pytest.approx(middle) and not cost.at_most
    assert comparison.cost_to_reach(log, 2.0).spent["consumed_tokens"] == 400
    assert comparison.cost_to_reach(log, 1.99) is None
    first = comparison.cost_to_reach(log, 3.5)
    assert first.at_most and first.spent["consumed_tokens"] == 200


def test_a_loss_counts_where_it_is_crossed_first(make):
    log = read_run(make(losses=(3.0, 1.0, 3.0, 1.0)))
    assert comparison.cost_to_reach(log, 2.0).spent["consumed_tokens"] == 150


def test_ratios_are_to_the_mean_of_the_first_recipe(make):
    first = [read_run(make("a")), read_run(make("b", ms=300.0))]
    other = [read_run(make("c", losses=(2.0, 1.0)))]
    recipes = [Recipe("first", {}, first), Recipe("other", {}, other)]
    base, half = comparison.costs(recipes, 2.0)
    assert base.ratios["seconds"] == pytest.approx([0.5, 1.5])  # 0.4 s and 1.2 s
    assert half.ratios["seconds"] == pytest.approx([0.25])
    assert half.ratios["consumed_tokens"] == pytest.approx([0.5]) and not half.at_most
    assert base.reached == base.of == 2


def test_the_loss_to_reach_is_the_highest_that_the_first_recipe_ends_with(make):
    first = [read_run(make("a", losses=(3.0, 2.0))), read_run(make("b", losses=(3.0, 2.1)))]
    assert comparison.target_of(Recipe("", {}, first)) == 2.1


def test_not_reached_is_said(make, capsys):
    runs = [str(make("a")), str(make("b", flags="--ltd", losses=(3.0, 2.5)))]
    assert report.main([*runs, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["recipes"][1]["cost"]
    assert cost["reached"] == 0 and cost["of"] == 1
    report.main([*runs, "--markdown"])
    row = next(r for r in capsys.readouterr().out.splitlines() if r.startswith("| `--ltd`"))
    assert row.count("not reached") == 4 and "0 of 1" in row


def test_what_is_dropped_is_counted_against_all_positions(make):
    log = read_run(make())  # 1200 of 6 layers x 200 tokens
    assert dropped_shares(log).tolist() == [0, 0, 0, 0]
    lines = lines_of_a_run()
    for line in lines:
        if line["event"] == "train":
            line |= {"padding_share": 0.5}  # 400 positions, of which 2400 layer-tokens
    assert dropped_shares(read_run(written(log.folder, lines))).tolist() == [0.5] * 4


def test_known_answers():
    mean = charts.moving_mean(np.array([1.0, 2.0, 6.0]), 3)
    assert mean.tolist() == [1.5, 3.0, 4.0]
    middles, medians = charts.medians(np.array([3.0, 1.0, 2.0, 9.0, 8.0, 7.0]), 3)
    assert middles.tolist() == [1, 4] and medians.tolist() == [2.0, 8.0]
    x, y = charts.thinned(np.arange(6.0), np.array([0.0, 5.0, 1.0, 2.0, 9.0, 2.0]), 4)
    assert y.tolist() == [0, 5, 2, 9, 2] and x.tolist() == [0, 1, 3, 4, 5]
    assert charts.ticks(charts.Axis(0, 61440)) == [0, 20_000, 40_000, 60_000]
    assert charts.tick_texts([0, 20_000.0, 40_000.0]) == ["0", "20 K", "40 K"]
    assert charts.tick_texts([0.5, 1.0]) == ["0.5", "1.0"]
    assert charts.tick_texts([1.0, 100.0, 1e4], log=True) == ["1", "100", "10 K"]
    assert charts.ticks(charts.Axis(1, 60, log=True)) == [1, 2, 5, 10, 20, 50]
    assert charts.Axis(1, 100, log=True).share(np.array([10.0])).tolist() == [0.5]
    assert numbers.short(61440) == "61.4 K" and numbers.short(950) == "950"
    assert numbers.short(1.2e9, "FLOP") == "1.20 GFLOP" and numbers.short(2e9)[-1] == "B"
    told = [numbers.duration(seconds) for seconds in (8.24, 754, 7500)]
    assert told == ["8.2 s", "12 min 34 s", "2 h 5 min"]
    assert page.spread([1.0, 1.2]) == "1.100 (1.000 to 1.200)"
    assert page.markdown_table(["a", "b"], [["1", ""]]) == "| a | b |\n|---|---|\n| 1 |  |"
    assert step_times(np.array([math.nan])) == pytest.approx([math.nan] * 4, nan_ok=True)


def test_a_spike_of_one_step_is_drawn_as_high_as_it_is():
    y = np.zeros(200_000)
    y[123_456] = 7.0
    drawn = charts.series("loss", np.arange(200_000.0), y, "faint")
    assert drawn.kind == "band" and drawn.y.max() == 7.0
    assert len(drawn.x) <= charts.POINTS
    assert charts.series("loss", np.arange(200_000.0), y).y.max() == 7.0


@pytest.mark.parametrize("low, high", [(0, 1), (2.3, 2.4), (0, 6.1e17), (1e-7, 3e-4), (-2, 5)])
def test_ticks_are_round_few_and_told_apart(low, high):
    ticks = charts.ticks(charts.Axis(low, high))
    assert 2 <= len(ticks) <= 7 and ticks[0] >= low and ticks[-1] <= high * (1 + 1e-9)
    assert len(set(charts.tick_texts(ticks))) == len(ticks)


# Which runs are one recipe, and how to run it again


def test_runs_that_differ_in_their_seed_alone_are_one_recipe(make):
    runs = {
        "a": "--tokens 60K",
        "b": "--tokens 60K --seed 2 --out elsewhere --keep 5",
        "c": "--tokens 60K --ltd",
        "d": "--tokens 60K --ltd --ltd-start 32",
    }
    recipes = report.recipes_of([read_run(make(name, flags=f)) for name, f in runs.items()])
    assert [[log.name for log in recipe.runs] for recipe in recipes] == [["a", "b"], ["c"], ["d"]]
    labels = [recipe.label for recipe in recipes]
    assert labels == ["no other flags", "`--ltd`", "`--ltd --ltd-start 32`"]
    assert comparison.differing(recipes) == ["ltd.on", "ltd.start", "ltd.share"]


@pytest.mark.parametrize("flags", ["--data other", "--compile", "--device cpu"])
def test_another_text_or_way_to_compute_is_no_seed(make, flags):
    """Losses and seconds that differ by it are no spread, though a run may go on with another."""
    logs = [read_run(make("a")), read_run(make("b", flags=flags))]
    assert len(report.recipes_of(logs)) == 2


RECIPES = {
    "": "python train.py",
    "--tokens 60K": "python train.py --tokens 60K",
    "--tokens 60K --warmup-tokens 1200": "python train.py --tokens 60K",  # what 60K gives anyway
    "--ltd --out a --seed 5": "python train.py --seed 5 --ltd",
    ALL_ON: None,
    "--size 124M --layers 6 --pos rope --data 'a b' --tokenizer gpt2": None,
    "--model bert --size bert-base --pack --dropout 0.1": None,
    "--pseudo --pseudo-until 0.1 --compile off --lr 6e-4": None,
    "--offload --offload-budget 6GiB --batch-tokens 4096 --tokens 387072": None,
}


def test_a_run_that_was_extended_takes_two_lines(make):
    """And is another recipe than one that had the larger budget from its start."""
    settings = settings_of("--tokens 60K --ltd")
    one = read_run(make("one", config=settings | {"optim.tokens": 90_000}))
    assert report.recipe_line(one).split("\n") == [
        "python train.py \\",
        "    --tokens 60K \\",
        "    --ltd",
        f"python train.py --resume --tokens 90K --out {one.folder}",
    ]
    recipes = report.recipes_of([one, read_run(make("two", flags="--tokens 90K --ltd"))])
    assert [r.label for r in recipes] == ["`--tokens 60K then --tokens 90K`", "`--tokens 90K`"]
    same = report.recipes_of(
        [read_run(make(name, flags=f)) for name, f in (("a", ""), ("b", "--ltd"))]
    )
    assert comparison.differing(same) == ["ltd.on", "ltd.start", "ltd.share"]


@pytest.mark.parametrize("flags", RECIPES)
def test_a_recipe_makes_the_same_settings_again(make, flags):
    settings = settings_of(flags)
    line = report.recipe_line(read_run(make(flags=flags)))
    words = shlex.split(line.replace("\\\n", ""))
    assert RECIPES[flags] in (None, " ".join(words))
    again = flattened(config.build(config.parse(words[2:])))
    assert words[:2] == ["python", "train.py"]
    differing = {name for name in settings if again[name] != settings[name]}
    assert differing <= {"run.out", "data.tokenizer"}
    assert settings["data.tokenizer"] == again["data.tokenizer"] or settings["data.data"]


def test_no_flag_of_a_recipe_could_be_left_out():
    flags = report.recipe_flags(settings_of(ALL_ON))
    for flag in flags:
        fewer = " ".join(other for other in flags if other != flag)
        try:
            assert settings_of(fewer) != settings_of(ALL_ON), flag
        except ValueError:
            continue  # refused, as --ltd-start without --ltd is


def test_settings_of_another_version_are_named(make):
    lines = lines_of_a_run("--ltd")
    lines[0]["config"]["ltd.gone"] = 3
    del lines[0]["config"]["ltd.share"]
    folder = written(make("old"), lines)
    line = report.recipe_line(read_run(folder))
    assert line == "python train.py \\\n    --ltd\n# not in this version of train.py: ltd.gone 3"
    assert report.main([str(folder), str(make("new", flags="--ltd")), "--markdown"]) == 0


# Logs as they are


def test_a_torn_log_is_read_and_its_torn_lines_are_counted(make):
    lines = lines_of_a_run()
    whole = read_run(make())
    # the last two are one good value together, and no line is: they must not pass for it
    torn = ['{"event": "train", "step": 3, "cons\n', "5\n", '{"a": [{}\n', "{}]}\n", "\n"]
    folder = written(make("torn"), [*lines[:3], *torn, *lines[3:], '{"event": "tra'])
    log = read_run(folder)
    assert log.unread == 5
    assert all(np.array_equal(log.steps[name], whole.steps[name]) for name in whole.steps)
    assert log.evals == whole.evals
    assert "5 lines of the log torn or incomplete, left out" in seen(html_of(folder))


def test_lines_that_say_too_little_are_left_out(make):
    lines = lines_of_a_run()
    poor = [{"event": "train", "step": 9}, {"event": "eval", "step": 9}, {"step": 1}]
    odd = [{**lines[1], "step": None}, {**lines[1], "step": "x"}, {**lines[3], "val_bpb": None}]
    odd[2]["event"] = "eval"
    log = read_run(written(make(), [*lines, *poor, *odd, {"event": "news", "of": "tomorrow"}]))
    assert log.unread == 6 and log.steps_done == 4


def test_the_log_of_an_older_trainer_lacks_fields(make):
    folder = make(new=False)
    log = read_run(folder)
    assert not any(log.has(name) for name in NEW_FIELDS)
    text = seen(html_of(folder))
    assert "FLOPs not in the log" in text and "MFU" not in text
    assert "Tokens per second 2.00 K" in text  # 200 tokens in 100 ms
    compared = report.main([str(folder), str(make("b", flags="--ltd")), "--out", f"{folder}/c.md"])
    assert compared == 0 and "not in the log" in (folder / "c.md").read_text()


def test_fields_that_begin_in_the_middle_are_nan_before(make):
    lines = lines_of_a_run(new=False)[:3] + lines_of_a_run(new=True)[3:]
    mfu = read_run(written(make(), lines)).column("mfu")
    assert np.isnan(mfu).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
def test_a_run_that_has_hardly_begun(make, kept):
    folder = written(make(), lines_of_a_run()[:kept])
    text = seen(html_of(folder))
    assert "not finished" in text or "no step is in its log yet" in text
    report.main([str(folder), "--json", "--markdown"])


def test_a_resumed_run_says_so(make):
    lines = lines_of_a_run(steps=40)
    lines.insert(13, lines[0] | {"resumed_at": 12, "commit": "def"})
    text = html_of(written(make(), lines))
    assert "12 1.20 K resumed, with commit def" in seen(text)
    assert text.count('<text class="mark"') > 3  # in every chart


def test_stages_of_pseudo_are_marked(make):
    lines = lines_of_a_run()
    lines.insert(3, {"event": "stage", "step": 2, "owners": [0, 0, 2, 2, -1, -1]})
    text = html_of(written(make(), lines))
    assert "2 of 6 layers have weights of their own of layer: 0 0 2 2 . ." in seen(text)
    assert '<line class="mark"' in text


def test_loss_by_source_is_shown_where_it_was_logged(make):
    lines = lines_of_a_run()
    assert "by source" not in seen(html_of(make("without")))
    for line in lines:
        if line["event"] == "eval":
            line["by_source"] = {"bible": 1.5, "jargon": 2.25}
    text = seen(html_of(written(make(), lines)))
    assert "bible 1.5000 jargon 2.2500" in text


# The page


def with_markup(folder: Path) -> Path:
    lines = lines_of_a_run("--data 'a<b>.txt'", losses=(3.0, 2.0))
    lines.append({"event": "sample", "step": 4, "text": "<script>alert('a')</script> & `x`"})
    for line in lines:
        if line["event"] == "eval":
            line["by_source"] = {"<img src=x onerror=alert(1)>": 2.0}
    return written(folder, lines)


def test_what_a_log_says_is_shown_and_not_obeyed(tmp_path, monkeypatch):
    folder = with_markup(tmp_path / "a<i>b")
    text = html_of(folder)
    for markup in ("<script>alert", "<img", "<i>", "<b>.txt"):
        assert markup not in text and html_entities.escape(markup) in text
    monkeypatch.setattr(page, "escape", lambda words: words)  # the check sees what it is for
    assert "<script>alert" in html_of(folder) and "<img" in html_of(folder)


def test_a_page_needs_nothing_from_elsewhere(make, tmp_path):
    out = tmp_path / "compared.html"
    report.main([str(make("a")), str(make("b", flags="--ltd")), "--out", str(out)])
    for text in (html_of(make())), out.read_text():
        assert not OUTSIDE.search(text), OUTSIDE.search(text)
        assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    for added in ('<img src="a.png">', "@import x", "url(a)", "https://a.b", '"//cdn.example/x"'):
        assert OUTSIDE.search(added)


def test_a_long_run_is_a_small_page(make):
    folder = make(steps=20_000, losses=tuple(np.linspace(3, 1, 100)))
    text = html_of(folder)
    assert len(text) < 200_000
    assert "20,000 steps" in text


def test_a_page_is_well_formed(make):
    text = html_of(make(losses=(3.0, 2.5, 2.2, 2.0), steps=40))
    for tag in ("svg", "table", "figure", "section", "tr", "td", "ul", "li", "text", "span", "div"):
        assert len(re.findall(rf"<{tag}[\s>]", text)) == text.count(f"</{tag}>"), tag
    assert "nan" not in seen(text).lower().split()


def test_all_four_costs_are_charts_and_columns(make, tmp_path):
    out = tmp_path / "c.html"
    runs = [make("a"), make("b", flags="--seed 2"), make("c", flags="--ltd", losses=(2.0, 1.5))]
    report.main([*map(str, runs), "--loss", "2.5", "--out", str(out)])
    text = seen(out.read_text())
    for unit in ("consumed tokens", "raw tokens", "FLOPs", "seconds"):
        assert f"Against {unit}" in text
    assert "Cost to reach 2.5000 bits per byte" in text
    assert "1.00 (1.00 to 1.00) 300" in text  # two seeds of the first recipe
    assert "≤ 0.67 200" in text and "at the first evaluation already" in text
    assert "2 recipes, 3 runs" in text and "Settings that differ the defaults --ltd" in text


def test_what_keeps_runs_from_being_compared_is_said(make, capsys):
    lines = lines_of_a_run("--ltd", machine="other", torch="3")
    for line in lines:
        if line["event"] == "eval":
            line["bytes"] = 123
    other = written(make("b"), lines[:-1])
    report.main([str(make("a", machine="this")), str(other), "--markdown"])
    out = capsys.readouterr().out
    assert "Not the same held-out text" in out and "runs have machine other, this" in out
    assert f"Not finished: {other}" in out
    report.main([str(make("a")), str(make("c", flags="--ltd")), "--markdown"])
    assert "Not " not in capsys.readouterr().out


# The command


def test_json_is_one_object_without_nan(make, capsys):
    def refuse(constant):
        raise ValueError(constant)

    assert report.main([str(make(new=False)), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert numbers["spent"] == {
        "consumed_tokens": 400,
        "real_tokens": 800,
        "flops": None,
        "seconds": pytest.approx(0.4),
    }
    assert numbers["waiting_share"] == pytest.approx(0.1)
    assert numbers["step_ms"]["median"] == 100 and numbers["final"]["val_bpb"] == 2.01
    assert [line["seconds"] for line in numbers["evaluations"]] == pytest.approx([0.2, 0.4, 0.4])


@pytest.mark.parametrize(
    "ending, begins", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_figures(make, tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"charts{ending}"
    runs = [str(make("a", steps=40)), str(make("b", flags="--ltd", new=False))]
    assert report.main([*runs[:1], "--out", str(out)]) == 0
    assert report.main([*runs, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(begins)


def test_figures_and_pages_have_the_same_colours():
    style = (page.FOLDER / "page.css").read_text()
    light = re.findall(r"--c\d: (#\w+);", style)[: charts.COLORS]
    assert tuple(light) == figures.COLORS


def refusal(argv: list[str], capsys) -> str:
    """What the command says when it refuses, having said it in one line with exit status 2."""
    with pytest.raises(SystemExit) as stopped:
        exit_cleanly(lambda: report.main(argv))
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


def test_mistakes_are_one_line(make, tmp_path, capsys, monkeypatch):
    run, empty = str(make()), tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no log.jsonl: name the folder of a run" in refusal([str(empty)], capsys)
    assert "gone holds no log.jsonl" in refusal([str(tmp_path / "gone")], capsys)
    assert "the folder no does not exist" in refusal([run, "--out", "no/a.html"], capsys)
    assert "give a file ending in .html, .md" in refusal([run, "--out", "a.docx"], capsys)
    assert "name two runs or more" in refusal([run, "--loss", "2"], capsys)
    assert "--loss: nan is not a number" in refusal([run, run, "--loss", "nan"], capsys)
    assert "--out" in refusal([run, "--out", str(tmp_path) + "/empty/.html"], capsys)
    lost = written(tmp_path / "lost", lines_of_a_run()[1:])
    assert "has lost its first line" in refusal([run, str(lost)], capsys)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refusal([run, "--out", str(tmp_path / "a.png")], capsys)
    assert "--out needs its package: pip install -e '.[plot]'" in said
    assert not (tmp_path / "a.png").exists()
    assert report.write(make()).exists()  # a page does without


def test_a_real_run(run, capsys):
    """The names that train.py logs are those that a report looks for."""
    lines = run(f"{ALL_ON} --seed 3", out="a")
    run("--seed 3", out="b")
    assert report.main(["a"]) == 0 and "report: a/report.html" in capsys.readouterr().out
    text = seen(Path("a/report.html").read_text())
    end = next(line for line in lines if line.get("last"))
    assert f"{end['val_bpb']:.4f} bits per byte, at the end" in text
    for shown in (
        "Training loss",
        "Longest piece",
        "Kept tokens",
        "Padding",
        "Dropped",
        "Step time",
    ):
        assert shown in text
    assert "--ltd-start 16" in text and "left out" not in text.split("Loss")[0]
    assert report.main(["b", "a"]) == 0
    assert "2 recipes, 2 runs" in seen(Path("report.html").read_text())
