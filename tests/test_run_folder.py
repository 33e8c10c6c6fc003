"""The folder of a run: when it goes on, when it starts over, and what is refused."""

import json
import shutil

import pytest
from conftest import SMALL, metrics, read_log

import train
from prepare import prepare
from support.run import checkpoint
from support.run.folder import newest_run, started_with
from support.text.tokenizer import get_encoding

pytestmark = pytest.mark.usefixtures("short_ends")


@pytest.fixture(scope="module")
def made(store_dir, tmp_path_factory):
    """A finished run of 16 steps, and what it computed."""
    folder = tmp_path_factory.mktemp("made") / "run"
    assert train.main(f"{SMALL} --data {store_dir} --out {folder}".split()) == 0
    return folder, metrics(read_log(folder))


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it, ./run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made[0], tmp_path / "run")


def names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


def refused(folder, said):
    """--resume ends with this message, and leaves the log as it is."""
    before = (folder / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=said):
        train.main(["--resume", "--out", str(folder)])
    assert (folder / "log.jsonl").read_bytes() == before


def test_a_run_that_lost_its_steps_is_not_started_over(folder, made):
    """best.pt is taken when it is named, and said when it is not; the log stays either way."""
    for file in folder.glob("step-*.pt"):
        file.unlink()
    refused(folder, r"run has lost its steps, and best\.pt is there: .*--resume best")
    assert train.main(["--resume", "best", "--out", "run"]) == 0
    assert metrics(read_log(folder)) == made[1]

    for file in folder.glob("*.pt"):
        file.unlink()
    refused(folder, r"run has lost its checkpoints: put one back")


def test_a_run_that_never_saved_starts_over_and_says_so(run, made, tmp_path, monkeypatch, capsys):
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
    assert metrics(read_log(folder)) == made[1]


def test_every_checkpoint_is_a_line_of_the_log(folder):
    saved = [line["file"] for line in read_log(folder, "checkpoint")]
    assert saved[-2:] == names(folder)[1:], "best.pt comes first"
    assert len(saved) >= 4


def test_checkpoints_of_later_steps_are_set_aside(folder, made, capsys):
    """Or --resume after a stop would go on with a file that this run never made."""
    newest = checkpoint.find(folder, "last")
    assert train.main(["--resume", "previous", "--out", "run"]) == 0
    assert f"renamed to abandoned-{newest.name}" in capsys.readouterr().out
    assert (folder / f"abandoned-{newest.name}").exists() and newest.exists(), "made once more"
    assert metrics(read_log(folder)) == made[1]


def test_a_run_goes_on_with_its_own_text_only(folder, store_dir, tmp_path):
    moved = shutil.copytree(store_dir, tmp_path / "moved")
    assert train.main(["--resume", "previous", "--out", "run", "--data", str(moved)]) == 0
    text = tmp_path / "text.txt"
    text.write_text("another text\n" * 500)
    prepare([text], tmp_path / "other", get_encoding("bytes"), "bytes")
    with pytest.raises(ValueError, match="--data: the run in run began with another store"):
        train.main(["--resume", "previous", "--out", "run", "--data", str(tmp_path / "other")])


def test_settings_and_checkpoints_of_another_version_are_one_line(folder):
    newest = checkpoint.find(folder, "last")
    state = checkpoint.load(newest)
    state["clock"]["draws"] = state["clock"].pop("real_tokens")
    checkpoint.save(folder, state, step=state["step"])
    refused(folder, r"is of another version of train\.py: start a new run")
    file = folder / "config.json"
    about = json.loads(file.read_text())
    about["config"]["run.gone"] = 1
    file.write_text(json.dumps(about))
    refused(folder, r"the setting run\.gone is of another version")


def test_the_newest_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no run in runs/"):
        newest_run()


def test_a_folder_of_something_else_is_not_written_into(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="--out run exists and is not an empty folder"):
        run()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match=r"--out run/mine\.txt exists and is not an empty folder"):
        run(out="run/mine.txt")


def test_a_folder_with_a_run_is_not_given_to_another(run, folder):
    before = names(folder)
    with pytest.raises(ValueError, match="--out run holds a run already: name another, or add"):
        run()
    assert names(folder) == before


def test_damaged_settings_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="holds no run; name the folder of one with --out"):
        started_with(tmp_path)
    for text in ("{", "[]", json.dumps({"other": 1}), json.dumps({"config": {}})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            started_with(tmp_path)
