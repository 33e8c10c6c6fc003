"""The log of a run, and what it says made it."""

import json
import subprocess

from support.base.runtime import ROOT
from support.run import folder
from support.run.folder import Log


def test_provenance_names_the_commit_from_anywhere_or_none_without_git(tmp_path, monkeypatch):
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    folder.commit.cache_clear()
    assert folder.provenance()["commit"] == (git.stdout.strip() or "none")
    monkeypatch.setenv("PATH", "")
    folder.commit.cache_clear()
    assert folder.provenance()["commit"] == "none"
    folder.commit.cache_clear()


def test_the_log_forgets_what_a_killed_run_wrote_after_its_checkpoint(tmp_path):
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


def test_a_log_shorter_than_its_checkpoint_remembers_is_not_padded(tmp_path):
    """After a power failure the log may have lost lines that the fsynced checkpoint counts."""
    log = Log(tmp_path, True, False, 1000)
    log.write("train", step=1)
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 1


def test_other_ranks_write_no_log(tmp_path):
    Log(tmp_path, False, False).write("train", step=1)
    assert not list(tmp_path.iterdir())
