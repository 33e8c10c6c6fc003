"""The log, devices, and how a command ends."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from support import provenance, runtime
from support.log import Log


def test_provenance_names_the_commit_from_wherever_it_is_asked(tmp_path, monkeypatch):
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, cwd=runtime.ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    provenance.commit.cache_clear()
    assert provenance.provenance()["commit"] == (git.stdout.strip() or "none")
    assert (runtime.ROOT / "train.py").is_file()


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"--device nope is unknown: choose auto, cpu, cuda, mps"):
        runtime.start("nope", "auto")


def test_provenance_without_git_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    provenance.commit.cache_clear()
    assert provenance.provenance()["commit"] == "none"
    provenance.commit.cache_clear()


def test_log_forgets_what_a_killed_run_wrote_behind_its_checkpoint(tmp_path):
    log = Log(tmp_path, True, False)
    log.write("train", step=1)
    size = log.size()
    log.write("train", step=2)
    log.file.write(b'{"event": "tra')  # torn by the kill
    log.file.close()
    log = Log(tmp_path, True, False, size)
    log.write("train", step=2, again=True)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert log.size() == (tmp_path / "log.jsonl").stat().st_size


def test_log_shorter_than_the_checkpoint_remembers_is_not_filled_up(tmp_path):
    """After a power cut the log may have lost lines that the fsynced checkpoint counts."""
    log = Log(tmp_path, True, False, 1000)
    log.write("train", step=1)
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 1


def test_other_ranks_write_no_log(tmp_path):
    Log(tmp_path, False, False).write("train", step=1)
    assert not list(tmp_path.iterdir())


def test_start_says_what_it_chose():
    found = runtime.start("cpu", "auto")
    assert found.dtype == torch.float32 and found.is_rank0 and "cpu (as asked), fp32" in found.why
    assert not found.autocast()._enabled
    assert runtime.start("cpu", "bf16").autocast()._enabled


ENDS = {  # what main does -> status, and what is said
    "a mistake": (ValueError("--flag 3:\n too much"), 2, "error: --flag 3: too much\n"),
    "a file": (FileNotFoundError(2, "No such file", "/x/y"), 2, "error: /x/y: No such file\n"),
    "an interrupt": (KeyboardInterrupt(), 130, ""),
    "a status": (143, 143, ""),
    "nothing": (None, 0, ""),
}


@pytest.mark.parametrize(("does", "status", "said"), list(ENDS.values()), ids=list(ENDS))
def test_how_a_command_ends(does, status, said, capsys):
    def main():
        if isinstance(does, BaseException):
            raise does
        return does

    with pytest.raises(SystemExit) as end:
        runtime.exit_cleanly(main)
    assert (end.value.code, capsys.readouterr().err) == (status, said)


def test_an_error_is_said_by_rank_0_or_by_a_rank_that_meets_it_alone(monkeypatch, capsys):
    def end_on(rank: int) -> str:
        """What a rank prints that ends in a mistake; the process group lives on."""
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit):
            runtime.exit_cleanly(lambda: int("one"))
        return capsys.readouterr().err

    def leave(status: int) -> None:
        raise SystemExit(status)

    assert end_on(0).startswith("error: invalid literal") and end_on(1) == ""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(os, "_exit", leave)
    try:
        assert end_on(1).startswith("error: rank 1: invalid literal")
        assert end_on(0).startswith("error: invalid literal")
        assert end_on(1) == ""
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        runtime.exit_cleanly(lambda: 1 / 0)


TOP_LEVEL = ("analyze", "curriculum", "evaluate", "ltd", "packing", "prepare", "sample", "train")
SUPPORT = ("support.checkpoint", "support.published", "support.tokenizer")


@pytest.mark.parametrize("name", [*TOP_LEVEL, *SUPPORT])
def test_a_flag_that_a_command_does_not_know_is_one_line(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--bogus"])
    with pytest.raises(ValueError, match=r"^[^\n]*\(see --help\)$"):
        importlib.import_module(name).main()
