"""Reports: numbers are right, pages are complete, and a damaged log is still readable."""

import html as html_entities
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ALL_ON, refusal, write_lines

import config
import report
from report import Curve, read_run
from support.numbers import duration, short
from support.settings import flattened

OUTSIDE = r"(?:src|href|action)\s*=|url\(|@import|https?:|//[a-z0-9-]+\.[a-z]|<script"


def lines_of_a_run(flags="", losses=(3.0, 2.0), steps=4, ms=100.0, **start) -> list[dict]:
    """Return a log with 100 consumed tokens a step, and the evaluations evenly spread.

    Those on the way have 50 targets, the final one has 90.
    """
    settings = flattened(config.build(config.parse(shlex.split(f"--layers 3 {flags}"))))
    about = {"config": settings, "argv": f"train.py {flags}".strip(), "resumed_at": 0}
    about["held_out_bytes"] = 180
    lines = [{"event": "run", **about, "commit": "abc", "torch": "2", **start}]
    for step in range(1, steps + 1):
        at = {"step": step, "consumed_tokens": 100 * step}
        line = {"event": "train", **at, "real_tokens": 200 * step, "positions": 200 * step}
        line |= {"layer_tokens": 600 * step, "flops": 1e9 * step, "epochs": step / 10, "ms": ms}
        line |= {"loss": 9.0 / step, "grad_norm": 1.0, "lr": 0.1 / step, "kept_tokens": 64}
        line |= {"max_piece_len": 256, "padding_share": 0.0, "tokens_per_s": 2000.0, "mfu": 0.25}
        lines.append(line)
        number, rest = divmod(step, steps // len(losses))
        if not rest:
            loss, last = losses[number - 1], step == steps
            result = {"val_bpb": loss, "val_loss": loss + 1, "targets": 90 if last else 50}
            lines.append({"event": "eval", **at, **result, "last": last})
    return lines


def save_log(folder: Path, lines: list) -> Path:
    """Write a run's folder with these lines in its log; strings are written unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_lines(folder / "log.jsonl", lines).parent


@pytest.fixture
def make(tmp_path):
    """Write the folder of a run with such a log: make("a", flags="--ltd", losses=(3.0, 2.0))"""
    return lambda name="a", **of: save_log(tmp_path / name, lines_of_a_run(**of))


def html_of(*folders: Path, **more) -> str:
    out = folders[0] / "page.html"
    return report.write_page(*folders, out=out, **more).read_text(encoding="utf-8")


def seen(text: str) -> str:
    """Return the text of a page."""
    body = re.sub(r"<style>.*?</style>|<title>.*?</title>", "", text, flags=re.S)
    return " ".join(html_entities.unescape(re.sub(r"<[^>]+>", " ", body)).split())


# ---- numbers, worked by hand


def test_cost_to_reach_a_loss_is_interpolated_where_it_is_first_reached(make):
    log = read_run(make())
    middle = {"consumed_tokens": 300.0, "real_tokens": 600.0, "flops": 3e9, "minutes": 0.3 / 60}
    for unit, cost in middle.items():  # 3.0 after 2 steps, 2.0 after 4
        assert report.costs_to_reach(2.5, [log], unit) == pytest.approx([cost])
    twice = read_run(make("twice", losses=(3.0, 1.0, 2.0, 1.0)))
    assert report.costs_to_reach(2.0, [log, twice], "consumed_tokens") == [400, 150]
    assert report.costs_to_reach(1.0, [log, twice], "consumed_tokens") == [200]
    assert report.costs_to_reach(3.5, [log], "consumed_tokens") == [200]


def test_the_final_evaluation_ends_the_curve(make):
    end = save_log(make("end"), [n for n in lines_of_a_run() if n.get("last", True)])
    for folder, losses in {make("both"): [3.0, 2.0], end: [2.0]}.items():
        assert read_run(folder).curve("real_tokens")[1].tolist() == losses
        assert html_of(folder).count("<circle") == 2 * len(losses), "in two charts"


def test_the_dropped_share_is_of_all_positions_including_padding(tmp_path):
    """600 layer-tokens ran: all of 3 layers x 200 positions, or half of 3 x 400."""
    for padding in (0.0, 0.5):
        lines = lines_of_a_run()
        for line in lines:
            if "positions" in line:
                line["positions"] *= 1 / (1 - padding)
        log = read_run(save_log(tmp_path, lines))
        cells, share = report.results_of([log]), f"{padding:.1%}<"
        assert cells["Dropped"].startswith(share) and cells["Padding"].startswith(share)


def test_medians_ticks_and_units_equal_known_answers():
    x, y = report.medians(np.arange(6), np.array([3.0, 1.0, 2.0, 9.0, 8.0, 7.0]), 2)
    assert x.tolist() == [1, 4] and y.tolist() == [2.0, 8.0]
    assert [part.tolist() for part in report.medians(x, y, 9)] == [[1, 4], [2.0, 8.0]]
    assert [text for _, text in report.ticks(0, 61440)] == ["0", "20 K", "40 K", "60 K"]
    assert short(61440) == "61.4 K" and short(1.2e9, "FLOP") == "1.20 GFLOP"
    assert [duration(seconds) for seconds in (8.24, 754)] == ["8.2 s", "0:12:34"]


def test_points_are_drawn_at_the_right_coordinates():
    curve = Curve("a", np.array([0.0, 1.0]), np.array([0.0, 1.0]), kind="dots")
    drawn = report.plot([curve], "tokens", from_zero=True, size=(160, 156), marks=[0.5])
    assert 'points="48.0,118.0 148.0,23.7"' in drawn  # 100 x 100 units, a margin of 6 % above 1
    assert drawn.count("<circle") == 2 and 'cx="148.0" cy="23.7"' in drawn
    assert 'class="mark" x1="98.0"' in drawn
    cut = report.plot([curve], "tokens", from_zero=True, highest=0.5, size=(160, 156))
    assert 'points="48.0,118.0 148.0,18.0"' in cut, "at the upper edge"


# ---- several runs


def test_runs_that_differ_only_in_seed_or_files_are_one_recipe_named_by_its_flags(make):
    runs = {
        "a": "--tokens 60K --seed 3",
        "b": "--tokens 60000 --seed 2 --out elsewhere --keep=5",
        "c": "--tokens 60K --ltd",
        "d": "--tokens 60K --ltd --ltd-start 32 --compile off --tied --lr 0.01",
    }
    logs = [read_run(make(name, flags=flags)) for name, flags in runs.items()]
    recipes, shared = report.recipes_of(logs)
    assert shared == "--layers 3 --tokens 60000"
    later = "--compile off --tied --lr 0.01 --ltd --ltd-start 32, 1 seed"
    assert list(recipes) == ["plain, 2 seeds", "--ltd, 1 seed", later]
    assert [log.folder.name for logs in recipes.values() for log in logs] == [*"bacd"]
    assert next(iter(report.recipes_of(logs[2:])[0])) == "baseline, 1 seed", "both have --ltd"
    for name in ("ltd.on", "of_a_fork.on"):  # an unknown setting makes another recipe
        other = logs[0]._replace(settings=logs[0].settings | {name: True})
        assert len(report.recipes_of([logs[0], other])[0]) == 2


def test_a_comparison_begins_with_the_difference_paired_by_seed(make):
    """Plain ends at 2.0 and 2.2 after 4 steps; --ltd at 1.9 and 2.2 after 2 that take longer."""
    plain = [make("a", losses=(3, 2.0)), make("b", losses=(3, 2.2), flags="--seed 2")]
    ltd = [make("d", losses=(3, 2.2), steps=2, ms=150.0, flags="--ltd --seed 2")]
    ltd.append(make("c", losses=(3, 1.9), steps=2, ms=150.0, flags="--ltd"))
    text = seen(html_of(*plain, *ltd))
    assert (
        "--ltd, 2 seeds, against plain, 2 seeds, in bits per byte: "
        "-0.050 (-0.100 to +0.000) at the end, "
        "-0.950 (-1.100 to -0.800) at equal raw tokens (400), "
        "-0.950 (-1.100 to -0.800) at equal FLOPs (2.00 GFLOP), "
        "-0.500 (-0.600 to -0.400) at equal minutes (0.3 s) "
        "(paired by seed; below 0 is better)."
    ) in text
    assert "-0.200 at the end" in (text := seen(html_of(*plain, ltd[1])))
    assert "(from the mean, because the seeds differ; below 0 is better)" in text


def test_what_was_evaluated_on_different_text_is_not_compared(make):
    plain, brief = make("a"), make("brief", flags="--ltd", losses=(2.0,), steps=1)
    text = seen(html_of(plain, brief))  # which has no evaluation as early
    assert "in bits per byte: +0.000 at the end (paired by seed; below 0 is better)." in text
    other = lines_of_a_run("--ltd", held_out_bytes=181)
    mixed = [
        save_log(make(data), [line | {"by_store": {}} for line in lines_of_a_run(f"--data {data}")])
        for data in ("a=0.7,b=0.3", "a=0.5,b=0.5")
    ]
    bert = make("bert", flags="--model bert")
    for folders in ([plain, bert], [plain, save_log(make("d"), other)], mixed):
        text = seen(html_of(*folders, loss=2.5))
        assert "not comparable, because they were not evaluated on the same text" in text
        assert "Cost to reach" not in text and "Held-out loss bits per byte, lower" not in text


def test_a_comparison_shows_the_spread_of_seeds_and_all_four_costs(make, capsys, monkeypatch):
    runs = [make("a"), make("b", flags="--seed 2", losses=(3.0, 2.1), ms=300.0)]
    runs.append(make("c", flags="--ltd", losses=(2.0, 1.5)))
    runs.append(make("d", flags="--pack", losses=(3, 2.6)))
    monkeypatch.chdir(runs[0])
    report.main([*map(str, runs), "--loss", "2.5"])
    assert capsys.readouterr().out == "report: compared.html\n", "not the frame of pages"
    text = seen(Path("compared.html").read_text(encoding="utf-8"))
    assert "plain, 2 seeds against --ltd, 1 seed against --pack, 1 seed; all with" in text
    assert "2.050 (2.000 to 2.100) bits per byte at the end on 90 held-out tokens" in text
    assert "slowest 33% of fastest: do not compare its time" in text
    assert "To 2.500 bits per byte, as asked with --loss:" in text
    for unit in ("consumed tokens", "raw tokens", "FLOPs", "minutes"):
        assert text.count(unit) >= 2, "a column of costs and a chart"
    assert text.count("Held-out loss bits per byte, lower is better") == 1
    first, second = 300, 200 + 200 * 0.5 / 0.9
    mean = (first + second) / 2
    both = f"1.00 ({first / mean:.2f} to {second / mean:.2f}) {short(mean)}"
    assert f"2 of 2 1 of 1 0 of 1 consumed tokens {both} ≤ 0.65 200 – not reached" in text
    assert text.count("not reached") == 4 and "≤ 0.32 0.2 s" in text
    end = "To 2.100 bits per byte, the highest last loss of plain, 2 seeds, on 90 held-out tokens:"
    assert end in seen(html_of(*runs)), "both seeds of the first recipe reach it"


# ---- imperfect logs


def test_a_truncated_line_is_skipped_and_counted_and_missing_fields_are_nan(make):
    whole, lines = read_run(make()).steps, lines_of_a_run()
    lines[1]["mfu"] = None
    del lines[2]["mfu"]
    log = read_run(save_log(make("b"), [*lines, '{"event": "tra']))
    assert "without 1 line that its log has lost" in report.results_of([log])["Progress"]
    older = read_run(
        save_log(make("c"), [line for line in lines if line.get("step") not in (2, 3)])
    )
    assert "without 2 lines that its log has lost" in report.results_of([older])["Progress"]
    assert "lost" not in report.results_of([read_run(make("d"))])["Progress"]
    assert np.isnan(log.steps["mfu"]).tolist() == [True, True, False, False]
    assert np.isnan(log.steps["pool"]).all()
    others = whole.keys() - {"mfu"}
    assert all(np.array_equal(log.steps[n], whole[n], equal_nan=True) for n in others)


def test_a_run_that_has_just_begun_has_a_report(make):
    other = make("b", flags="--ltd")
    for kept in (1, 2, 3, 4):
        folder = save_log(other.parent / "a", lines_of_a_run()[:kept])
        for folders in ([folder], [folder, other], [other, folder]):
            assert "of its budget" in seen(html_of(*folders))


def test_a_report_shows_when_a_run_resumed_and_changed_stage(make):
    lines = lines_of_a_run(steps=40)
    lines.insert(13, lines[0] | {"resumed_at": 12, "commit": "def"})
    lines.insert(3, {"event": "stage", "step": 2, "owners": [0, 1, -1]})
    text = html_of(save_log(make(), lines))
    assert "(1) after step 2 --pseudo: layers use the weights of 0 1 ." in seen(text)
    assert "(2) after step 12 resumed with commit def" in seen(text)
    assert text.count('class="mark"') == 2 * text.count('class="chart"') > 4


# ---- the page


def test_a_page_is_small_and_well_formed_and_loads_nothing(make):
    one = make(steps=2_000, losses=tuple(np.linspace(3, 1, 100)))
    for text in html_of(one), html_of(one, make("b", flags="--ltd")):
        assert not re.search(OUTSIDE, text) and len(text) < 200_000
        no_xml = r"<style>.*?</style>|<!.*?>|<meta.*?>"
        ElementTree.fromstring(re.sub(no_xml, "", text, flags=re.S))
        assert "nan" not in seen(text).lower().split() and "nan," not in text


def test_training_loss_is_shown_with_held_out_loss_in_the_same_unit(make):
    page = html_of(make())
    assert "Training loss nats" in seen(page)
    assert "a: from 9 to 2.25" in page and "held out: from 4 to 3" in page
    page = html_of(make("b", flags="--model bert --data web --nsp"))
    assert "held out: " not in page, "the training loss includes that of --nsp"
    assert "b --data web --model bert --layers 3 --nsp Result" in seen(page)
    assert "on 90 masked held-out tokens" in seen(page)


def test_a_report_of_a_real_run_is_complete(log_of, tmp_path, capsys):
    """So the names that train.py logs are those that report.py reads."""
    folders = [str(save_log(tmp_path / f"{n}", log_of(f))) for n, f in enumerate(("", ALL_ON))]
    report.main(folders[1:])
    assert capsys.readouterr().out.endswith(f"report: {folders[1]}/report.html\n")
    text = seen(Path(folders[1], "report.html").read_text())
    (end,) = (line for line in log_of(ALL_ON) if line.get("last"))
    assert f"{end['val_bpb']:.3f} bits per byte at the end on {end['targets']:,} held-out" in text
    assert "Training loss nats" in text and "Difficulty" not in text
    titles = ("Longest piece", "Samples that", "Kept tokens", "Padding", "Dropped", "Step time")
    assert all(title in text for title in titles)
    assert "--ltd-start 16" in text and "damaged" not in text
    report.main([*folders, "--out", f"{tmp_path}/both.html"])
    assert "named twice" in refusal(report.main, [folders[0]] * 2)
