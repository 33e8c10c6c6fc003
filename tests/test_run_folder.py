"""The folder of a run, its log, when it goes on, when it starts over, and what is refused."""

import json
import shutil
import subprocess

import pytest
from conftest import SMALL, killed_at, metrics, read_log, resume_refused

import train
from prepare import prepare
from support.base.runtime import ROOT
from support.run import checkpoint
from support.run import folder as run_folder
from support.run.folder import Log, newest_run, started_with
from support.text.tokenizer import get_encoding

pytestmark = pytest.mark.usefixtures("short_ends")
FLAGS = f"{SMALL} --tokens 2048 --checkpoint-every 512 --eval-every 1024 --eval-tokens 100"


@pytest.fixture(scope="module")
def made(store_dir, tmp_path_factory):
    """A finished run of 8 steps, and what it computed."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert train.main(f"{FLAGS} --data {store_dir} --out {folder}".split()) == 0
    return folder, metrics(read_log(folder))


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it, ./run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made[0], tmp_path / "run")


def test_a_run_that_lost_its_steps_is_not_started_over(folder, made):
    """best.pt is taken when it is named, and said when it is not; the log stays either way."""
    for file in folder.glob("step-*.pt"):
        file.unlink()
    resume_refused(folder, r"run has lost its steps, and best\.pt is there: .*--resume best")
    assert train.main(["--resume", "best", "--out", "run"]) == 0
    assert metrics(read_log(folder)) == made[1]
    for file in folder.glob("*.pt"):
        file.unlink()
    resume_refused(folder, r"run has lost its checkpoints: put one back")


def test_a_run_that_never_saved_starts_over_and_says_so(made, store_dir, tmp_path, capsys):
    folder = tmp_path / "run"
    killed_at(2, f"{FLAGS} --data {store_dir} --out {folder}".split())
    assert len(read_log(folder, "train")) == 1 and not list(folder.glob("*.pt"))
    assert train.main(["--resume", "--out", str(folder)]) == 0
    assert "was stopped before its first checkpoint: starting over" in capsys.readouterr().out
    assert metrics(read_log(folder)) == made[1]
    files = [line["file"] for line in read_log(folder, "checkpoint")]
    assert files[-2:] == sorted(path.name for path in folder.glob("step-*")) and len(files) >= 4


def test_of_a_damaged_checkpoint_the_previous_is_taken_on_request(folder, made, capsys):
    """Then the damaged one is of a later step: `last` must not mean what this run never made."""
    newest = checkpoint.find(folder, "last")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resume_refused(folder, rf"{newest.name}.*use previous")
    assert train.main(["--resume", "previous", "--out", "run"]) == 0
    assert f"renamed to abandoned-{newest.name}" in capsys.readouterr().out
    assert (folder / f"abandoned-{newest.name}").read_bytes() == content
    assert newest.exists(), "made once more"
    assert metrics(read_log(folder)) == made[1]


def test_a_run_goes_on_with_its_own_text_only(folder, store_dir, tmp_path):
    moved = shutil.copytree(store_dir, tmp_path / "moved")
    assert train.main(["--resume", "previous", "--out", "run", "--data", str(moved)]) == 0
    (tmp_path / "text.txt").write_text("another text\n" * 500)
    prepare([tmp_path / "text.txt"], tmp_path / "other", get_encoding("bytes"), "bytes")
    with pytest.raises(ValueError, match="--data: the run in run began with another store"):
        train.main(["--resume", "previous", "--out", "run", "--data", str(tmp_path / "other")])


def test_settings_and_checkpoints_of_another_version_are_one_line(folder):
    state = checkpoint.load(checkpoint.find(folder, "last"))
    state["clock"]["draws"] = state["clock"].pop("real_tokens")
    checkpoint.save(folder, state, step=state["step"])
    resume_refused(folder, r"clock\.real_tokens is missing")
    file = folder / "config.json"
    about = json.loads(file.read_text())
    about["config"]["run.gone"] = 1
    file.write_text(json.dumps(about))
    resume_refused(folder, r"run\.gone is of another version")
    for text in ("{", "[]", json.dumps({"other": 1}), json.dumps({"config": {}})):
        file.write_text(text)
        resume_refused(folder, r"config\.json is damaged")


def test_no_other_folder_is_written_into_or_taken_for_a_run(run, folder, tmp_path, monkeypatch):
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match="--out run holds a run already"):
        run()
    assert sorted(folder.iterdir()) == before
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.txt").write_text("the user's")
    for out in ("own", "own/a.txt"):
        with pytest.raises(ValueError, match=f"--out {out} exists and is not an empty folder"):
            run(out=out)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["a.txt"]
    with pytest.raises(ValueError, match="there is no run in runs/"):
        newest_run()
    with pytest.raises(ValueError, match="holds no run; name the folder of one with --out"):
        started_with(tmp_path)


# ---- the log


def test_provenance_names_the_commit_from_anywhere_or_none_without_git(tmp_path, monkeypatch):
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    for path, commit in ((None, git.stdout.strip() or "none"), ("", "none")):
        if path is not None:
            monkeypatch.setenv("PATH", path)
        run_folder.commit.cache_clear()
        assert run_folder.provenance()["commit"] == commit
    run_folder.commit.cache_clear()


def test_the_log_forgets_what_a_killed_run_wrote_after_its_checkpoint(tmp_path):
    log = Log(tmp_path, True)
    log.write("train", step=1)
    size = log.size()
    log.write("train", step=2)
    log.file.write(b'{"event": "tra')  # torn by the kill
    log.file.close()
    Log(tmp_path, False).write("train", step=1)  # another rank, which writes none
    log = Log(tmp_path, True, (), size)
    log.write("train", step=2, again=True)
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    assert log.size() == (tmp_path / "log.jsonl").stat().st_size
    # after a power failure the log may have lost lines that the fsynced checkpoint counts
    (tmp_path / "log.jsonl").unlink()
    Log(tmp_path, True, (), 1000).write("train", step=1)
    assert [line["step"] for line in read_log(tmp_path)] == [1], "not padded"
