"""--resume --tokens: a run goes on past its budget, and a kill at any moment leaves a whole run."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import ALL_ON as ALL
from conftest import SMALL as LARGER
from conftest import metrics, read_log, start_ranks

import config
import train
from support.run import checkpoint, extension
from support.step.optim import OptimConfig, lr_at

SMALL = (
    f"{LARGER} --layers 2 --eval-tokens 100 --final-eval-tokens 100 --tokens 2048"
    " --eval-every 1024 --checkpoint-every 512"
)
ALL_ON = f"{ALL} --layers 4"
PSEUDO = "--pseudo --pseudo-group 2 --layers 4"
MORE = ["--resume", "--tokens", "4096", "--out"]
WSD = (
    "--schedule wsd --warmup-tokens 256 --decay-share 0.25 --lr 1e-2"  # of 8 steps the last 2 decay
)

pytestmark = pytest.mark.usefixtures("short_ends")


@pytest.fixture(scope="module")
def finished(store_dir, tmp_path_factory):
    """A copy of a finished run of 8 steps, made once: finished("--pack", to=folder)"""
    made = {}

    def copy(flags: str, to: Path) -> Path:
        if flags not in made:
            made[flags] = tmp_path_factory.mktemp("finished") / "run"
            argv = f"{SMALL} --data {store_dir} --out {made[flags]} {flags}".split()
            assert train.main(argv) == 0
        return shutil.copytree(made[flags], to)

    return copy


def killed_at(monkeypatch, number: int, argv: list[str]) -> None:
    """Train until this step begins."""
    step = train.Trainer.step

    def until(self, of):
        if of.context.step == number:
            raise KeyboardInterrupt
        return step(self, of)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", until)
        with pytest.raises(KeyboardInterrupt):
            train.main(argv)


def assert_same_run(one: Path, other: Path) -> None:
    """The same log, but for times, and the same weights bit for bit."""
    assert metrics(read_log(one)) == metrics(read_log(other))
    states = [checkpoint.load(checkpoint.find(folder, "last")) for folder in (one, other)]
    a, b = map(tensors_of, states)
    assert a.keys() == b.keys() and all(tensor.equal(b[name]) for name, tensor in a.items())
    assert states[0]["clock"] == states[1]["clock"]


def tensors_of(state: dict) -> dict[str, torch.Tensor]:
    found = {}
    checkpoint.mapped(state, found.setdefault)
    return found


def rate(clock: int, schedule: str, budget: int) -> float:
    """In the middle of a step of 256 tokens that begins here."""
    optim = OptimConfig(tokens=budget, lr=2e-2, schedule=schedule, warmup_tokens=40)
    return lr_at(optim, clock + 128)


def test_the_learning_rate_is_stretched_from_there_on(finished, tmp_path, capsys):
    folder = finished("--schedule cosine", tmp_path / "run")
    before = read_log(folder)
    assert train.main([*MORE, str(folder)]) == 0
    steps = read_log(folder, "train")
    assert len(steps) == 16
    for number, step in enumerate(steps):
        budget = 2048 if number < 8 else 4096
        assert step["lr"] == pytest.approx(rate(256 * number, "cosine", budget), rel=1e-12)
    said = capsys.readouterr().out
    assert "learning rate stretched from 2,048 to 4,096 tokens at step 8, lr 0 -> 0.01" in said
    (line,) = read_log(folder, "extended")
    assert (line["tokens_before"], line["tokens"], line["step"]) == (2048, 4096, 8)
    assert line["lr_before"] == 0 and line["lr"] > 0.009
    kept = [json.loads(line) for line in (folder / "log-2048.jsonl").read_text().splitlines()]
    assert kept == before, "with the last evaluation at the old budget"
    assert [line["last"] for line in read_log(folder, "eval")].count(True) == 1
    saved = checkpoint.load(checkpoint.find(folder, "last"))["config"]
    assert (saved["optim.tokens"], saved["optim.schedule_tokens"]) == (4096, 2048)
    started = json.loads((folder / "config.json").read_text())["config"]
    assert started["optim.tokens"] == 2048, "config.json is as it was"
    for name in ("optim.warmup_tokens", "run.eval_every", "run.checkpoint_every"):
        assert saved[name] == started[name]


@pytest.mark.parametrize(
    ("flags", "later"), [(f"{ALL_ON} --schedule cosine", 1), (f"{WSD} {PSEUDO}", 5)]
)
def test_an_extended_run_that_was_killed_is_one_that_was_not(
    finished, tmp_path, monkeypatch, flags, later
):
    """Killed before its first new checkpoint, and later; then resumed without --tokens."""
    one, two = (finished(flags, tmp_path / name) for name in ("one", "two"))
    began = len(read_log(one, "train"))
    assert train.main([*MORE, str(one)]) == 0
    killed_at(monkeypatch, began + later, [*MORE, str(two)])
    control = shutil.copytree(two, tmp_path / "control")
    assert train.main(["--resume", "--out", str(two)]) == 0
    assert_same_run(one, two)
    assert len(read_log(two, "extended")) == 1
    assert read_log(one, "train")[-1]["consumed_tokens"] >= 4096
    (control / "extended.json").unlink()
    assert train.main(["--resume", "--out", str(control)]) == 0
    with pytest.raises(AssertionError):  # without its record it stops where it was
        assert_same_run(one, control)


def test_a_run_that_is_not_finished_is_extended_where_it_was_stopped(
    tmp_path, monkeypatch, store_dir
):
    monkeypatch.chdir(tmp_path)
    killed_at(monkeypatch, 6, f"{SMALL} --data {store_dir} --out run".split())
    assert train.main([*MORE, "run"]) == 0
    rates = [line["lr"] for line in read_log(tmp_path / "run", "train")]
    assert rates[3] == pytest.approx(rate(256 * 3, "linear", 2048))
    assert rates[4] == pytest.approx(rate(256 * 4, "linear", 4096)), "its checkpoint is of step 4"
    assert len(rates) == 16


def test_a_run_without_a_checkpoint_starts_over_with_more(tmp_path, monkeypatch, store_dir):
    monkeypatch.chdir(tmp_path)
    killed_at(monkeypatch, 2, f"{SMALL} --data {store_dir} --out run".split())
    killed_at(monkeypatch, 2, [*MORE, "run"])
    assert train.main(["--resume", "--out", "run"]) == 0
    rates = [line["lr"] for line in read_log(tmp_path / "run", "train")]
    assert rates[1] == pytest.approx(rate(256, "linear", 4096)) and len(rates) == 16


def test_a_run_is_extended_twice(finished, tmp_path):
    """The techniques keep the very first budget."""
    folder = finished("", tmp_path / "run")
    for tokens in ("2560", "3072", "3072"):  # the same budget is no extension
        assert train.main(["--resume", "--tokens", tokens, "--out", str(folder)]) == 0
    saved = checkpoint.load(checkpoint.find(folder, "last"))["config"]
    assert (saved["optim.tokens"], saved["optim.schedule_tokens"]) == (3072, 2048)
    assert [line["tokens"] for line in read_log(folder, "extended")] == [2560, 3072]
    assert {"log-2048.jsonl", "log-2560.jsonl"} <= {path.name for path in folder.iterdir()}
    assert len(read_log(folder, "train")) == 12


# ---- the techniques' schedules


def stages(folder: Path) -> list[tuple]:
    """What grows with the schedules of curriculum and token dropping."""
    names = ("max_piece_len", "kept_tokens", "pool")
    return [tuple(line[name] for name in names) for line in read_log(folder, "train")]


def never_shrinks(found: list[tuple]) -> bool:
    steps = pairwise(found)
    return all(a <= b for one, after in steps for a, b in zip(one, after, strict=True))


def test_no_technique_goes_back(finished, tmp_path):
    folder = finished(ALL_ON, tmp_path / "run")
    number = len(read_log(folder, "train"))
    assert train.main([*MORE, str(folder)]) == 0
    found = stages(folder)
    assert len(found) > number + 5 and never_shrinks(found)
    assert all(kept == 32 for _, kept, _ in found[number:])


def test_negative_control_with_the_new_budget_they_do(finished, tmp_path, monkeypatch):
    folder = finished(ALL_ON, tmp_path / "run")
    with_budget = config.with_budget

    def forgetful(*args):
        saved = with_budget(*args)
        return saved | {"optim.schedule_tokens": saved["optim.tokens"]}

    monkeypatch.setattr(config, "with_budget", forgetful)
    assert train.main([*MORE, str(folder)]) == 0
    assert not never_shrinks(stages(folder))


def test_layers_with_weights_of_their_own_keep_them(finished, tmp_path):
    folder = finished(f"{PSEUDO} --pseudo-until 0.75", tmp_path / "run")
    assert train.main([*MORE, str(folder)]) == 0
    assert [line["owners"] for line in read_log(folder, "stage")] == [[0, 1, 2, 3]]


# ---- wsd: one trunk for several decays


def test_a_decayed_run_goes_on_from_its_trunk_as_if_it_had_never_decayed(
    finished, tmp_path, capsys, monkeypatch
):
    """Bit for bit the run that had the larger budget from its first step."""
    folder, control = (finished(WSD, tmp_path / name) for name in ("decayed", "control"))
    assert checkpoint.load(folder / "trunk.pt")["step"] == 6
    assert [line["lr"] for line in read_log(folder, "train")][5:7] == [1e-2, 0.75e-2]
    whole = finished(f"{WSD} --tokens 4096", tmp_path / "whole")
    capsys.readouterr()
    assert train.main([*MORE, str(folder)]) == 0
    said = capsys.readouterr().out
    assert "decay of the learning rate moved from 2,048 to 4,096 tokens at step 6" in said
    assert "resumed from" in said and "trunk.pt at step 6" in said
    assert without_extension(folder) == metrics(read_log(whole))
    for which in ("last", "best"):
        ours, theirs = (checkpoint.load(checkpoint.find(f, which)) for f in (folder, whole))
        assert all(value.equal(theirs["model"][n]) for n, value in ours["model"].items())
        assert ours["best"] == theirs["best"]
    assert checkpoint.load(folder / "trunk.pt")["step"] == 12, "that of the new budget"
    # control: from the decayed weights it is another run
    monkeypatch.setattr(extension, "starting_point", lambda path, *_: path)
    assert train.main([*MORE, str(control)]) == 0
    assert without_extension(control) != metrics(read_log(whole))


def without_extension(folder: Path) -> list[dict]:
    return [line for line in metrics(read_log(folder)) if line["event"] != "extended"]


def test_a_trunk_outlives_every_step_that_is_kept_and_only_wsd_has_one(finished, tmp_path):
    folder = finished(f"{WSD} --keep 1", tmp_path / "run")
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == ["best.pt", "step-00000008.pt", "trunk.pt"]
    extension.keep_trunk(folder / names[1])
    extension.keep_trunk(folder / names[1])
    assert checkpoint.load(folder / "trunk.pt")["step"] == 8
    assert sorted(path.name for path in folder.glob("*.pt")) == names
    assert not list(finished("", tmp_path / "plain").glob("trunk*"))


def test_best_of_the_decay_is_set_aside_and_the_best_of_the_trunk_counts(
    finished, tmp_path, monkeypatch
):
    folder = finished(WSD, tmp_path / "run")
    decayed, trunk = checkpoint.load(folder / "best.pt"), checkpoint.load(folder / "trunk.pt")
    assert decayed["step"] > 6 and decayed["best"] < trunk["best"]
    killed_at(monkeypatch, 7, [*MORE, str(folder)])
    assert not (folder / "best.pt").exists()
    assert checkpoint.load(folder / "abandoned-best.pt")["best"] == decayed["best"]
    assert train.main(["--resume", "--out", str(folder)]) == 0
    evals = read_log(folder, "eval")[:-1]
    assert checkpoint.load(folder / "best.pt")["best"] == min(line["val_bpb"] for line in evals)


def test_a_trunk_is_made_again_from_the_step_it_is_of(finished, tmp_path, monkeypatch, store_dir):
    """Killed between the checkpoint and its second name."""
    folder = finished(WSD, tmp_path / "run")
    argv = f"{SMALL} --data {store_dir} --out {tmp_path / 'two'} {WSD}".split()
    with monkeypatch.context() as patch:
        patch.setattr(extension, "keep_trunk", lambda path: path.with_name("gone").stat())
        with pytest.raises(ValueError, match="gone"):
            train.main(argv)
    assert not (tmp_path / "two" / "trunk.pt").exists()
    assert train.main(["--resume", "--out", str(tmp_path / "two")]) == 0
    assert_same_run(folder, tmp_path / "two")
    assert (tmp_path / "two" / "trunk.pt").exists()


def test_a_run_that_does_not_decay_yet_goes_on_from_its_last_step(
    tmp_path, monkeypatch, store_dir, capsys
):
    killed_at(monkeypatch, 6, f"{SMALL} --data {store_dir} --out {tmp_path / 'run'} {WSD}".split())
    assert train.main([*MORE, str(tmp_path / "run")]) == 0
    assert "step-00000004.pt at step 4" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "run" / "trunk.pt")["step"] == 12


@pytest.mark.slow
@pytest.mark.dist
def test_a_trunk_of_shards(tmp_path, store_dir):
    flags = f"{SMALL} --data {store_dir} {WSD} --fsdp --optimizer adamw"
    start_ranks(
        2,
        [*flags.split(), "--out", str(tmp_path / "run")],
        [*MORE, str(tmp_path / "run")],
    )
    folder = tmp_path / "run"
    assert [path.name for path in folder.glob("trunk*")] == ["trunk-00000012.sharded"]
    assert checkpoint.load(folder / "trunk-00000012.sharded")["step"] == 12
    assert (folder / "abandoned-step-00000008.sharded").exists()
    start_ranks(2, [*flags.split(), "--tokens", "4096", "--out", str(tmp_path / "whole")])
    ours, theirs = (read_log(tmp_path / name, "train") for name in ("run", "whole"))
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)


# ---- a kill between any two changes on the disk


class Killed(BaseException):
    """Nothing catches it."""


def killed_in_its_renames(monkeypatch, number: int, argv: list[str]) -> int:
    """Extend a run, and die instead of the rename of this number; returns how many there were.

    All that begins an extension takes effect by a rename.
    """
    made, begin = [], extension.begin
    renames = {"os": os.replace, "path": Path.rename}

    def counted(which):
        def rename(*names):
            if len(made) + 1 == number:
                raise Killed
            made.append(names)
            return renames[which](*names)

        return rename

    def begin_and_die(*args):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted("os"))
            patch.setattr(Path, "rename", counted("path"))
            begin(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(extension, "begin", begin_and_die)
        with pytest.raises(Killed):
            train.main(argv)
    return len(made)


# The log is copied, the trunk is a step again, a later step and the best are set aside, and the
# record is written.
RENAMES = 5


@pytest.mark.parametrize("number", range(1, RENAMES + 2))
def test_a_kill_leaves_the_old_run_or_the_extended_one(finished, tmp_path, monkeypatch, number):
    """Resumed as it is, or extended once more: every second time each."""
    flags, folder = f"{WSD} --keep 1", tmp_path / "run"
    again = ["--tokens", "4096"] if number % 2 else []
    finished(flags, folder)
    made = killed_in_its_renames(monkeypatch, number, [*MORE, str(folder)])
    assert made == number - 1
    was_extended = made == RENAMES
    assert (folder / "extended.json").exists() == was_extended
    assert train.main(["--resume", *again, "--out", str(folder)]) == 0
    more = flags.replace("--keep 1", "--keep 1 --tokens 4096")
    wanted = finished(more if was_extended or again else flags, tmp_path / "wanted")
    assert without_extension(folder) == metrics(read_log(wanted))
    ours, theirs = (checkpoint.load(checkpoint.find(f, "last")) for f in (folder, wanted))
    assert all(value.equal(theirs["model"][n]) for n, value in ours["model"].items())


# ---- what is refused


def test_what_cannot_be_is_one_line_and_changes_nothing(finished, tmp_path):
    folder = finished("", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for flags, said in (
        ("--tokens 2000", "--tokens 2000 is less than the 2048 tokens of the run in"),
        ("--tokens 0", "--tokens 0 is less than the 2048 tokens of the run in"),
        ("--tokens 4096 --lr 1e-3", "--lr 0.001 differs from --lr 0.02"),
        ("--tokens 4096 --warmup-tokens 9", "--warmup-tokens 9 differs from --warmup-tokens 40"),
        ("--tokens 4096 --micro-batch-size 3", "--micro-batch-size 3"),
        ("--schedule-tokens 9", "unrecognized arguments: --schedule-tokens"),
    ):
        with pytest.raises(ValueError) as refusal:
            train.main(["--resume", "--out", str(folder), *flags.split()])
        assert said in str(refusal.value) and "\n" not in str(refusal.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for text in ("{", "[1]", '{"tokens": 5}'):
        (folder / "extended.json").write_text(text)
        with pytest.raises(ValueError, match=r"extended\.json is damaged .*: put it back"):
            train.main(["--resume", "--out", str(folder)])


def test_what_is_consumed_already_is_no_budget(finished, tmp_path):
    """8 steps of 256 end at 2,048, past a budget of 2,000."""
    folder = finished("--tokens 2000", tmp_path / "run")
    with pytest.raises(ValueError, match=r"--tokens 2048: the run in .* has consumed 2048 already"):
        train.main(["--resume", "--tokens", "2048", "--out", str(folder)])
    assert not (folder / "extended.json").exists()


def test_no_other_checkpoint_is_taken_for_the_trunk(finished, tmp_path):
    folder = finished(WSD, tmp_path / "run")
    with pytest.raises(ValueError, match=r"--resume best: at step 8 .* decays already.*leave that"):
        train.main(["--resume", "best", "--tokens", "4096", "--out", str(folder)])
    (folder / "trunk.pt").unlink()
    with pytest.raises(ValueError, match=r"--resume last: at step 8 .* decays already.*a new run"):
        train.main([*MORE, str(folder)])
    assert not (folder / "extended.json").exists()
