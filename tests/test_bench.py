"""The benches: what they refuse to time, how figures are computed, what gpu.sh runs and writes."""

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from subprocess import PIPE, STDOUT
from subprocess import run as run_process
from types import SimpleNamespace

import pytest
import torch
from conftest import refusal

from support.process import ROOT
from support.store import Store

sys.path += [str(ROOT / "bench"), str(ROOT / "docs")]
import first_look as look
import frontier
import measure
import operators
import step
import tables

# ---- measure

ABOUT = {"date", "hardware", "device", "torch", "python", "commit", "bench"}


def test_records_name_machine_and_commit_and_gpus_have_a_separate_file(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "1234abc")
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    parse = measure.command_line("A bench.").parse_args
    measure.recorder("step", parse([]))({"ms": 1})
    assert not list(tmp_path.iterdir()), "nothing is written without --record"
    keep = measure.recorder("step", parse(["--record"]), size="nano")
    keep({"ms": measure.quartiles([1, 2, 3, 4, 5])})
    keep({"ms": measure.quartiles([2])})
    first, second = map(json.loads, (tmp_path / "step.jsonl").read_text().splitlines())
    assert (first["ms"], second["ms"]) == ([2, 3, 4], [2, 2, 2])
    assert ABOUT | {"threads", "size"} <= set(first) and first["commit"] == "1234abc"
    on_gpu = parse(["--device", "cuda", "--record"])
    assert "--device cuda" in refusal(measure.recorder, "step", on_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    measure.recorder("step", on_gpu)({})
    assert "a GPU" in (tmp_path / "gpu-step.jsonl").read_text()


def test_variants_take_turns_in_alternating_order():
    called = []
    both = {name: lambda name=name: called.append(name) or len(called) for name in "ab"}
    times = measure.in_turns(both, turns=2)
    assert "".join(called) == "abbaab"
    assert times == {"a": [4, 5], "b": [3, 6]}, "the first turn is a warm-up"


# ---- the frontier


def test_quick_ends_with_a_table_of_its_runs(monkeypatch, capsys):
    of_books = {r["flags"]: r for r in measure.records("frontier") if r["section"] == "books"}
    timed = [
        {n: c[n] for n in ("shape", "ms", "to_reference")} for c in measure.records("frontier-cost")
    ]
    monkeypatch.setattr(frontier, "run", lambda arm, **_: of_books[arm.flags])
    monkeypatch.setattr(frontier, "costs_of", lambda *_: timed)
    frontier.main(["quick"])
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert all(row.startswith("| `--layers 1 ") for row in rows) and "--pack" in "".join(rows)


def point(seconds, loss, flags="--layers 2", plain=True):
    return frontier.Point(flags, plain, seconds, [loss], seconds, 1_000_000)


def test_a_frontier_is_a_convex_hull_with_straight_lines_between_runs():
    hull = frontier.envelope([point(s, x) for s, x in [(1, 2.0), (2, 1.9), (4, 1.6), (8, 1.7)]])
    assert hull == [point(1, 2.0), point(4, 1.6)]
    assert frontier.loss_at(2, hull) == pytest.approx(1.8)
    assert frontier.cost_of(1.8, hull) == pytest.approx(2)
    beyond = [frontier.loss_at(5, hull), frontier.cost_of(1.5, hull), frontier.loss_at(1, [])]
    assert [frontier.shown(value) for value in beyond] == ["not measured"] * 3
    kept = [point(s, x) for s, x in [(1, 2.0), (2, 1.7), (4, 1.6)]]
    assert frontier.envelope(kept) == kept, "already convex"


def test_a_run_is_compared_with_plain_runs_of_its_model_and_of_all_models():
    plain = [point(4, 1.8, "--layers 2"), point(4, 1.9, "--layers 8")]
    plain += [point(8, 1.7, "--layers 4"), point(16, 1.7, "--layers 8 --lr 0.01")]
    dropping = point(4, 1.7, "--layers 8 --ltd --lr 0.01", False)
    (row,) = frontier.runs_table([dropping], plain).splitlines()[2:]
    assert row.endswith("| 1 | 4 | 1.00 M | 1.700 | 0.25 | 0.50 |")
    best = point(2, 1.6, "--layers 8 --pack", False)
    (row,) = frontier.runs_table([best], plain).splitlines()[2:]
    assert row.endswith("| 1.600 | under 0.12 | under 0.25 |"), "no plain run is as good"
    (row,) = frontier.runs_table([best], plain, unsaid=["--layers 8"]).splitlines()[2:]
    assert row.startswith("| `--pack` |") and row.endswith("| under 0.12 | under 0.25 |")


def test_the_seconds_of_a_run_are_the_sum_of_its_steps_costs():
    made = [
        {**frontier.arms_in(["toy"])[0]._asdict(), "val_bpb": loss, "real_tokens": 1}
        | {"train_seconds": 7.0, "shapes": {"whole": 300, "half": 182}}
        for loss in (1.5, 1.7)
    ]
    costs = [{"shape": "whole", "to_reference": [0.9, 1.0, 1.1], "hardware": "A, 2 cores, x"}]
    assert frontier.points_of(made, costs) == [], "one shape has no time"
    half = {"shape": "half", "to_reference": [0.4, 0.5, 0.6], "hardware": "B, 2 cores, x"}
    (p,) = frontier.points_of(made, [*costs, half])
    assert p.seconds == pytest.approx(frontier.UNIT_SECONDS) and p.loss == pytest.approx(1.6)
    assert p.machines == {"A", "B"}
    assert [p.seconds for p in frontier.points_of([r | {"shapes": {}} for r in made], [])] == [7]


def test_every_shape_of_a_run_is_timed_against_the_reference(monkeypatch):
    monkeypatch.setattr(frontier, "turn_of", measure.measured)  # one step a turn
    growing = "--layers 4 --tokens 2048 --pseudo --pseudo-layers 2 --pseudo-until 0.5"
    arm = frontier.arms_in(["toy"])[0]._replace(flags=growing)
    *_, steps = frontier.plan_run(arm, {})
    made = arm._asdict() | {"shapes": Counter(shape for shape, _ in steps)}
    costs = [*frontier.costs_of([made], set(), SimpleNamespace(stores={}, turns=1))]
    assert {cost["shape"] for cost in costs} == made["shapes"].keys() and len(costs) == 2
    assert all(0 < cost["to_reference"][1] < 1 for cost in costs)


def test_the_tables_in_the_documents_match_the_records():
    for page in (ROOT / "docs").glob("*.md"):
        assert tables.with_tables(page.read_text()) == page.read_text(), "python docs/tables.py"


def test_a_headline_is_of_three_seeds_on_both_kinds_of_machine():
    for name in tables.HEADLINES:
        for machine in ("", "AVX2"):
            seeds, *_, same, best = tables.headline(name, machine)
            if machine == "" or "BERT" not in name:
                assert int(seeds) >= 3 and "not measured" not in (same, best)


# ---- operators


@pytest.mark.parametrize("operator", ["attention", "loss", "copies"])
def test_what_differs_from_the_definition_is_not_timed(operator, store_dir, monkeypatch):
    tiny = SimpleNamespace(store=Store.open(store_dir))  # which exists already
    monkeypatch.setattr(step, "open_data", lambda *_: tiny)
    toy = operators.shape_of("toy", "cpu")
    operation = next(operators.OPERATORS[operator](toy, "cpu", 2))
    operation = operation._replace(more=lambda form: {})
    torch.manual_seed(0)
    right = operation.forms[operation.definition]()[-1]
    operation.forms["wrong"] = lambda: [lambda: [1.001 * x for x in right()]]
    operation.forms["absent"] = lambda: [][0]
    figures = operators.measure(operation, "cpu", turns=1, peak=1e9)
    assert "differs by" in figures.pop("wrong")["error"] and figures.pop("absent")["error"]
    assert len(figures) >= 2 and all("ms" in figure for figure in figures.values())


# ---- first_look


def test_losses_must_match_a_cpus_within_the_rounding_of_the_dtype():
    curves, plain = {"plain": [3.0, 2.0, 1.0], "plain, rounded": [3.0, 2.01, 1.0]}, look.Way("")
    far, near = [3.0 + look.FACTOR * 0.011, 2.0, 1.0], [3.0, 2.0, 1.0 - look.FACTOR * 0.009]
    figures = look.compare(plain, near, curves)
    assert figures["follows"] and figures["at_step"] == 3
    assert figures["tolerance"] == pytest.approx(look.FACTOR * 0.01)
    for way, losses in ((plain, far), (plain, [3.0, 2.0]), (plain._replace(finer=8), near)):
        assert not look.compare(way, losses, curves)["follows"]


@pytest.mark.slow
def test_a_cpu_still_reproduces_its_recorded_curve():
    """If a default changed, every GPU would look wrong."""
    losses = look.losses_of("plain", f"{look.CURVES['plain']} --compile off --device cpu")
    assert losses == pytest.approx(look.recorded_curves(ROOT / "results")["plain"], abs=2e-3)


def test_runs_with_wrong_losses_and_runs_that_fail_are_named(monkeypatch):
    kept, recorded = [], look.recorded_curves(ROOT / "results")
    wrong = {"ltd": recorded["AdamW"], "fsdp": "ended with status 1: no NCCL"}
    losses = {name: recorded[way.like] for name, way in look.WAYS.items()} | wrong
    monkeypatch.setattr(look, "embedded_store", lambda name: None)
    monkeypatch.setattr(look, "losses_of", lambda name, flags: losses[name])
    gpu = SimpleNamespace(device="cuda", keep=kept.append, toy=False)
    message = refusal(look.look_at_losses, gpu)
    assert re.match(r"losses of (ltd, fsdp|fsdp, ltd) differ from a CPU", message)
    follows = {record["run"]: record["follows"] for record in kept}
    assert follows == {name: name not in wrong for name in look.WAYS}
    assert all(0 < record.get("tolerance", 0.1) < 0.1 * look.FACTOR for record in kept)


# ---- gpu.sh

FAKE_PYTHON = """#!/usr/bin/env bash
# Pretend to be python on a machine with a GPU; only log the commands.
[[ $1 != -c ]] || exit 0
printf '%s\\n' "$*" >>"$FAKE_LOG"
[[ "$*" != *"${FAKE_FAILS:-?}"* ]] || exit 1
[[ "$*" != *"${FAKE_LATE:-?}"* ]] || exit 124 # the status of `timeout`
"""


@pytest.fixture
def gpu_sh(tmp_path):
    """Run a stage of bench/gpu.sh, by default with a fake python that only logs the commands.

    Returns: the status, the output, and the commands
    """
    python, log = tmp_path / "python", tmp_path / "ran"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (tmp_path / "model.py").write_text("")
    fake = {"PYTHON": str(python), "FAKE_LOG": str(log), "OUT": str(tmp_path / "out")}

    def run(*flags: str, **given: str) -> tuple[int, str, list[str]]:
        log.write_text("")
        command = ["bash", str(ROOT / "bench/gpu.sh"), *flags]
        env = os.environ | fake | {"GPU_FAKE": ""} | given
        stage = run_process(command, env=env, stdout=PIPE, stderr=STDOUT, text=True)
        return stage.returncode, stage.stdout, log.read_text().splitlines()

    return run


class Parsed(Exception):
    """Raised as soon as a bench has accepted its flags, so that nothing runs."""


@pytest.mark.parametrize("stage", "ABCDE")
def test_a_stage_fits_nine_minutes_with_flags_that_exist(stage, gpu_sh, tmp_path, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, argv=None):
        parse(self, argv)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    (tmp_path / "meta.json").touch()
    given = ["--nanogpt", str(tmp_path), "--store", str(tmp_path), "--commit", "1234abc"]
    status, said, ran = gpu_sh(stage, *given)
    assert status == 0 and "left out" not in said and f"stage {stage}, commit 1234abc" in said
    assert (tmp_path / f"out/gpu-{stage}.log").read_text() == said
    parts = re.findall(r": at most (\d+) s: (.*)", said)
    assert len(parts) == len(ran) > 0 and sum(int(seconds) for seconds, _ in parts) <= 540
    for _, command in parts:
        argv = shlex.split(command)[1:]
        if argv[:2] == ["-m", "pytest"]:
            assert argv[argv.index("gpu") - 1] == "-m" and len(argv) > 10
            continue
        assert argv[0] == "train.py" or "--device cuda --record" in " ".join(argv)
        assert argv[0] != "bench/step.py" or stage != "A" or str(tmp_path) in argv
        assert argv[0] != "bench/frontier.py" or f"pd={tmp_path}" in argv
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(Parsed):
            import_module(Path(argv[0]).stem).main()


def test_parts_that_fail_or_take_too_long_do_not_stop_the_others(gpu_sh):
    status, said, ran = gpu_sh("C", FAKE_FAILS="py attention", FAKE_LATE="py loss")
    assert status == 1 and len(ran) == 5 and said.count(": passed in") == 3
    assert "attention: failed with status 1" in said and "loss: stopped after" in said
    assert "left out: the rest of loss; \n" in said


RECORDS = {  # stage -> the files it writes, and keys of the records of all its parts
    "A": ("first-look.jsonl step.jsonl", "versions tflops us tolerance follows kernels compile"),
    "B": ("gpu-tests.xml", ""),
    "C": ("step.jsonl kernels.jsonl", "size steps peak_tflops forms kernel"),
    "D": ("step.jsonl", "size steps"),
    "E": ("frontier.jsonl", "flags text_sha256 val_bpb layer_tokens"),
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("stage", RECORDS)
def test_every_stage_runs_with_toy_sizes_on_a_cpu(stage, gpu_sh, tmp_path):
    fake = {"GPU_FAKE": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    status, output, _ = gpu_sh(stage, "--commit", "1234abc", **fake)
    assert status == 0, output
    files, keys = RECORDS[stage]
    result = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert result.keys() == {f"gpu-{stage}.log", *files.split()}
    lines = "".join(text for name, text in result.items() if name.endswith("jsonl")).splitlines()
    records = [json.loads(line) for line in lines]
    assert set(keys.split()) <= set().union(*records)
    assert all(set(r) >= ABOUT and r["commit"] == "1234abc" for r in records)
