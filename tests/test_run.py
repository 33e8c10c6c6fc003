"""A run's folder and its log: when a run continues, when it starts over, and what is refused."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from conftest import SMALL, at_step, kill_at, losses_of, metrics, read_log, resume_fails, terminate

import train
from prepare import prepare
from support import checkpoint
from support import run as run_folder
from support.process import ROOT
from support.run import Log, Run
from support.tokenizer import get_encoding

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
FLAGS = f"{SMALL} --tokens 2048 --checkpoint-every 512 --eval-every 1024 --eval-tokens 100"


@pytest.fixture(scope="module")
def made(store_dir, tmp_path_factory):
    """A finished run of 8 steps: its folder and its metrics."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert train.main(f"{FLAGS} --data {store_dir} --out {folder}".split()) == 0
    return folder, metrics(read_log(folder))


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of the finished run, in ./run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made[0], tmp_path / "run")


def interrupt():
    raise KeyboardInterrupt


def test_a_run_without_a_checkpoint_starts_over_and_says_so(made, store_dir, tmp_path, capsys):
    folder = tmp_path / "run"
    with at_step(2, interrupt), pytest.raises(KeyboardInterrupt):
        train.main(f"{FLAGS} --data {store_dir} --out {folder}".split())
    assert len(read_log(folder, "train")) == 1 and not list(folder.glob("*.pt"))
    assert train.main(["--resume", "--out", str(folder)]) == 0
    assert "was stopped before its first checkpoint: starting over" in capsys.readouterr().out
    assert metrics(read_log(folder)) == made[1]
    files = [*dict.fromkeys(line["file"] for line in read_log(folder, "checkpoint"))]
    assert files[-2:] == sorted(path.name for path in folder.glob("step-*")) and len(files) >= 4


@pytest.mark.faults
def test_a_run_killed_at_any_moment_resumes(store_dir, tmp_path, monkeypatch):
    """The command with --resume auto is killed before every change of the disk and repeated, also
    before there is a config.json, a log or a checkpoint.
    """
    write = Log.write

    def audited(self, event: str, **values: object) -> None:
        sys.audit("os.truncate")  # because Python reports no writes
        write(self, event, **values)

    monkeypatch.setattr(Log, "write", audited)
    line = f"{SMALL} --tokens 512 --eval-every 256 --eval-tokens 99 --final-eval-tokens 99"
    line = f"{line} --layers 1 --data {store_dir} --keep 1 --checkpoint-every 0 --resume auto"
    line = f"{line} --out {tmp_path}"
    assert train.main(f"{line}/whole".split()) == 0
    status, number = -1, 0
    while status:
        number += 1
        out = tmp_path / f"run-{number}"
        begin = partial(train.main, f"{line}/{out.name}".split())
        status = kill_at(number, begin)
        assert status == 0 or kill_at(0, begin) == 0
        assert losses_of(out) == losses_of(tmp_path / "whole")
        events = [line["event"] for line in read_log(out)]
        assert (events.count("finished"), events.count("eval")) == (1, 2)
        assert checkpoint.load(checkpoint.find(out, "last"))["step"] == 2
        assert not [*out.glob(".step*")], "leftovers are removed"
    assert number > 20


def test_the_log_is_not_written_through_a_link(folder, tmp_path):
    log = (folder / "log.jsonl").rename(tmp_path / "elsewhere.jsonl")
    (folder / "log.jsonl").symlink_to(log)
    checkpoint.find(folder, "last").unlink()  # so that steps remain
    resume_fails(folder, r"log\.jsonl is a link or a folder: replace it with the file")


def test_a_log_that_was_edited_loses_no_line_and_a_foreign_one_is_refused(folder, capsys):
    checkpoint.find(folder, "last").unlink()  # so that steps remain
    log, before = folder / "log.jsonl", [*read_log(folder)]
    log.write_text(log.read_text().replace('"event": "run"', '"event":  "run"', 1))
    assert train.main(["--resume", "--out", "run"]) == 0
    assert [s["step"] for s in read_log(folder, "train")] == [*range(1, before[-1]["step"] + 1)]
    checkpoint.find(folder, "last").unlink()
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    capsys.readouterr()
    assert train.main(["--resume", "--out", "run"]) == 0
    assert "warning: run/log.jsonl has lost lines" in capsys.readouterr().out
    log.write_text(log.read_text().replace(before[0]["run"], "another"))
    resume_fails(folder, "log.jsonl belongs to another run than .*config.json: put its own back")


def test_a_log_on_a_full_disk_is_named():
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="/dev/full"):
        Log(full).write("run")


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(folder, made, monkeypatch, capsys):
    monkeypatch.setattr("support.run.commit", lambda: "another")
    newest = checkpoint.find(folder, "last")
    os.truncate(newest, 1000)
    resume_fails(folder, rf"{newest.name} is damaged.*; delete it")
    newest.unlink()
    assert train.main(["--resume", "--out", "run"]) == 0
    assert " and is now another: losses may differ" in capsys.readouterr().out
    assert newest.exists() and metrics(read_log(folder)) == made[1]


def test_resuming_from_the_best_sets_later_ones_aside(store_dir, tmp_path, monkeypatch, capsys):
    """Otherwise `last` could be a checkpoint of the abandoned continuation."""
    folder, scores = tmp_path / "run", iter((3.0, 2.0, 4.0, 5.0, 6.0, 4.0, 5.0, 6.0))
    record = Run.record_evaluation
    monkeypatch.setattr(Run, "record_evaluation", lambda run, bits: record(run, next(scores)))
    assert train.main(f"{FLAGS} --eval-every 512 --data {store_dir} --out {folder}".split()) == 0
    whole = metrics(read_log(folder))
    best = checkpoint.find(folder, "best")
    assert best.name == "step-00000004.pt"
    assert [path.name[-4:-3] for path in checkpoint.steps_in(folder)] == ["4", "6", "8"]
    assert train.main(["--resume", "best", "--out", str(folder)]) == 0
    assert "renamed to abandoned-step-00000008.pt" in capsys.readouterr().out
    assert metrics(read_log(folder)) == whole


def test_a_run_resumes_only_with_its_text(folder, tmp_path):
    """In another place, see tests/test_sample.py, but not with another text."""
    (tmp_path / "text.txt").write_text("another text\n" * 500)
    prepare([tmp_path / "text.txt"], tmp_path / "other", get_encoding("bytes"))
    resume_fails(folder, "--data: .*run was started with another store", "--data other")


def test_files_that_do_not_belong_to_the_run_are_refused(folder):
    path = checkpoint.find(folder, "last")
    checkpoint.save(path, checkpoint.load(path) | {"run": "another"})
    resume_fails(folder, "belongs to another run than .*config.json: put its own back")
    for file in folder.glob("step-*.pt"):
        file.unlink()
    resume_fails(folder, r"the checkpoints of .*run are gone: put one back")


DAMAGED = ["", "{", "{}", "[]", "null", "5", '"model_size"', "[" * 100_000]
DAMAGED += [{"config": []}, {"config": None}, {"config": {}}, {"config": {"optim.tokens": None}}]
DAMAGED += [{"model_size": {}}, {"model_size": {"size": 1}}]


def test_a_damaged_config_file_is_refused(folder):
    file = folder / "config.json"
    about = json.loads(file.read_text())
    for damaged in DAMAGED:
        text = damaged if isinstance(damaged, str) else json.dumps(about | damaged)
        file.write_text(text)
        resume_fails(folder, r"run/config\.json is (damaged|not that of a run): ")


CHANGED = {"optim.lr": 0.5, "run.seed": 7, "optim.batch_tokens": 512, "model.heads": 4}
UNFIT = {"optim.lr": "0.5", "data.data": 5, "run.keep": [2], "ltd.on": "yes"}  # of another type


def test_settings_that_were_changed_by_hand_are_refused(folder):
    """Flags that may differ when a run resumes may also be changed in the file."""
    file = folder / "config.json"
    about = json.loads(file.read_text())

    def change(name: str, value: object) -> None:
        file.write_text(json.dumps(about | {"config": about["config"] | {name: value}}))

    for name, value in CHANGED.items():
        change(name, value)
        says = f"config.json: {name} is {value}, but {about['config'][name]} in step-00000008.pt"
        resume_fails(folder, says)
    for name, value in UNFIT.items():
        change(name, value)
        resume_fails(folder, re.escape(f"config.json: {name} must be "))
    change("run.gone", 1)
    resume_fails(folder, r"run\.gone is not a setting of this version")
    for tokens in (1024, 4096):
        change("optim.tokens", tokens)
        resume_fails(folder, f"--tokens {tokens} at step 8: a run can be extended .* it had 2048")
    file.write_text(json.dumps(about | {"model_size": {"vocab_size": 640, "positions": None}}))
    resume_fails(folder, "config.json: vocab_size is 640, but 320 in")
    change("run.keep", 3)
    assert train.main(["--resume", "--out", "run"]) == 0


@pytest.mark.parametrize("free", [10**5, 10**9])
def test_a_full_disk_is_reported_first(store_dir, tmp_path, monkeypatch, capsys, free):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Mock(free=free))
    train.main(f"{FLAGS} --tokens 256 --layers 1 --data {store_dir} --out {tmp_path}".split())
    before, _, after = capsys.readouterr().out.partition("run: ")
    warning = f"warning: {tmp_path} needs 1.4 MB of disk for checkpoints, but 0.1 are free"
    assert (warning in before) == (free < 10**6) and "warning" not in after


def test_only_one_process_at_a_time_uses_a_folder(folder):
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    resume_fails(folder, "is in use by another process: wait until it ends, or stop it")
    os.close(held)
    assert train.main(["--resume", "--out", "run"]) == 0


# ---- more tokens


@pytest.mark.parametrize("rate", ["--schedule wsd", "--min-lr 1"])
def test_a_budget_raised_before_the_decay_gives_the_longer_run(store_dir, tmp_path, rate):
    """Losses equal those with the larger budget from the start, if no technique depends on it."""
    flags = f"{FLAGS} --eval-every 0 --warmup-tokens 256 {rate} --data {store_dir}"
    with at_step(3, terminate):
        assert train.main(f"{flags} --out {tmp_path / 'run'}".split()) > 128
    resume = ["--resume", "--out", str(tmp_path / "run")]
    with at_step(5, interrupt), pytest.raises(KeyboardInterrupt):
        train.main([*resume, "--tokens", "3072"])
    assert train.main(resume) == 0, "config.json should have the new budget"
    assert train.main(f"{flags} --tokens 3072 --out {tmp_path / 'whole'}".split()) == 0
    losses = losses_of(tmp_path / "run")
    assert losses == losses_of(tmp_path / "whole") and len(losses) == 12


def test_a_budget_raised_during_the_decay_is_refused(folder, store_dir, tmp_path):
    says = "--tokens 4096 at step {}: a run can be extended before the decay"
    resume_fails(folder, says.format(8), "--tokens 4096")
    out = tmp_path / "wsd"
    with at_step(7, terminate):
        train.main(f"{FLAGS} --schedule wsd --data {store_dir} --out {out}".split())
    resume_fails(out, says.format(7), "--tokens 4096")


# ---- the log


def test_the_commit_is_known_in_any_working_folder_and_none_without_git(tmp_path, monkeypatch):
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    for path, commit in ((os.environ["PATH"], git.stdout.strip() or "none"), ("", "none")):
        monkeypatch.setenv("PATH", path)
        run_folder.commit.cache_clear()
        assert run_folder.provenance()["commit"] == commit
    run_folder.commit.cache_clear()
