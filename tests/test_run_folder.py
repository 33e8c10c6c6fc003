"""The folder of a run: when it goes on, when it starts over, and what is refused."""

import json

import pytest
from conftest import metrics, read_log

import train
from support import checkpoint
from support.run_folder import newest_run, saved_settings


def names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


def log_of(folder):
    return (folder / "log.jsonl").read_bytes()


def test_a_run_that_lost_its_steps_is_not_started_over(run, tmp_path):
    """best.pt is taken when it is named, and said when it is not; the log stays either way."""
    whole = metrics(run())
    folder = tmp_path / "run"
    for file in folder.glob("step-*.pt"):
        file.unlink()
    before = log_of(folder)
    with pytest.raises(ValueError, match=r"run has lost its step-\*\.pt.*--resume best"):
        train.main(["--resume", "--out", "run"])
    assert log_of(folder) == before
    assert train.main(["--resume", "best", "--out", "run"]) == 0
    assert metrics(read_log(folder)) == whole

    for file in folder.glob("*.pt"):
        file.unlink()
    before = log_of(folder)
    with pytest.raises(ValueError, match=r"run has lost its checkpoints: put one back"):
        train.main(["--resume", "--out", "run"])
    assert log_of(folder) == before


def test_a_run_that_never_saved_starts_over_and_says_so(run, tmp_path, monkeypatch, capsys):
    whole = metrics(run(out="whole"))
    folder = tmp_path / "run"
    step = train.Trainer.step
    with monkeypatch.context() as patch:

        def killed(self, of):
            if of.context.step == 4:  # before the first checkpoint
                raise KeyboardInterrupt
            return step(self, of)

        patch.setattr(train.Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(read_log(folder, "train")) == 3 and not names(folder)
    assert train.main(["--resume", "--out", "run"]) == 0
    assert "was stopped before its first checkpoint: starting over" in capsys.readouterr().out
    assert metrics(read_log(folder)) == whole


def test_every_checkpoint_is_a_line_of_the_log(run, tmp_path):
    lines = run()
    saved = [line["file"] for line in lines if line["event"] == "checkpoint"]
    assert saved[-2:] == names(tmp_path / "run")[1:], "best.pt comes first"
    assert len(saved) >= 4


def test_a_checkpoint_of_an_older_version_is_refused(run, tmp_path):
    run()
    newest = checkpoint.find(tmp_path / "run", "last")
    state = checkpoint.load(newest)
    state["clock"]["draws"] = state["clock"].pop("samples_drawn")
    checkpoint.save(tmp_path / "run", state, step=state["step"])
    with pytest.raises(ValueError, match=r"is of an older version of train\.py: start a new run"):
        train.main(["--resume", "--out", "run"])


def test_the_newest_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no run in runs/"):
        newest_run()


def test_damaged_settings_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="holds no run; name the folder of one with --out"):
        saved_settings(tmp_path)
    for text in ("{", "[]", json.dumps({"other": 1})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            saved_settings(tmp_path)
