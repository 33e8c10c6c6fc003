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
from conftest import killed_at, metrics, read_log, resume_refused, start_ranks

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


def assert_same_run(one: Path, other: Path, which: str = "last") -> None:
    """The same log, but for times and extensions, and the same weights bit for bit."""
    assert log_without_extension(one) == log_without_extension(other)
    states = [checkpoint.load(checkpoint.find(folder, which)) for folder in (one, other)]
    a, b = map(tensors_of, states)
    assert a.keys() == b.keys() and all(tensor.equal(b[name]) for name, tensor in a.items())
    assert all(states[0][key] == states[1][key] for key in ("clock", "best"))


def log_without_extension(folder: Path) -> list[dict]:
    return [line for line in metrics(read_log(folder)) if line["event"] != "changed"]


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
    rates = [rate(256 * n, "cosine", 2048 if n < 8 else 4096) for n in range(16)]
    assert [step["lr"] for step in steps] == pytest.approx(rates, rel=1e-12)
    said = "optim.tokens changes from 2048 to 4096 after step 8, the learning rate from 0 to 0.01"
    assert said in capsys.readouterr().out
    (line,) = read_log(folder, "changed")
    assert (line["before"], line["now"], line["step"]) == (2048, 4096, 8)
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
def test_an_extended_run_that_was_killed_is_one_that_was_not(finished, tmp_path, flags, later):
    """Killed before its first new checkpoint, and later; then resumed without --tokens."""
    one, two = (finished(flags, tmp_path / name) for name in ("one", "two"))
    began = len(read_log(one, "train"))
    assert train.main([*MORE, str(one)]) == 0
    killed_at(began + later, [*MORE, str(two)])
    control = shutil.copytree(two, tmp_path / "control")
    assert train.main(["--resume", "--out", str(two)]) == 0
    assert_same_run(one, two)
    assert len(read_log(two, "changed")) == 1
    assert read_log(one, "train")[-1]["consumed_tokens"] >= 4096
    (control / "changed.json").unlink()
    assert train.main(["--resume", "--out", str(control)]) == 0
    with pytest.raises(AssertionError):  # without its record it stops where it was
        assert_same_run(one, control)


@pytest.mark.parametrize(("killed", "saved"), [(6, 4), (2, 0)])
def test_a_run_that_is_not_finished_is_extended_from_its_checkpoint_or_its_start(
    tmp_path, store_dir, killed, saved
):
    """Also if the extended one is killed before it saves."""
    folder = tmp_path / "run"
    killed_at(killed, f"{SMALL} --data {store_dir} --out {folder}".split())
    killed_at(saved + 2, [*MORE, str(folder)])
    assert train.main(["--resume", "--out", str(folder)]) == 0
    budgets = [2048] * saved + [4096] * (16 - saved)
    rates = [rate(256 * step, "linear", budget) for step, budget in enumerate(budgets)]
    assert [line["lr"] for line in read_log(folder, "train")] == pytest.approx(rates)


def test_a_run_is_extended_twice(finished, tmp_path):
    """The techniques keep the very first budget."""
    folder = finished("", tmp_path / "run")
    for tokens in ("2560", "3072", "3072"):  # the same budget is no extension
        assert train.main(["--resume", "--tokens", tokens, "--out", str(folder)]) == 0
    saved = checkpoint.load(checkpoint.find(folder, "last"))["config"]
    assert (saved["optim.tokens"], saved["optim.schedule_tokens"]) == (3072, 2048)
    assert [line["now"] for line in read_log(folder, "changed")] == [2560, 3072]
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


def test_no_technique_goes_back_as_with_the_new_budget_they_would(finished, tmp_path, monkeypatch):
    folder, control = (finished(ALL_ON, tmp_path / name) for name in ("run", "control"))
    number = len(read_log(folder, "train"))
    assert train.main([*MORE, str(folder)]) == 0
    found = stages(folder)
    assert len(found) > number + 5 and never_shrinks(found)
    assert all(kept == 32 for _, kept, _ in found[number:])
    with_changes = config.with_changes

    def forgetful(*args):
        saved = with_changes(*args)
        return saved | {"optim.schedule_tokens": saved["optim.tokens"]}

    monkeypatch.setattr(config, "with_changes", forgetful)
    monkeypatch.setattr(train.Run, "check", lambda *_: None)  # which would refuse it
    assert train.main([*MORE, str(control)]) == 0
    assert not never_shrinks(stages(control))


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
    assert "optim.tokens changes from 2048 to 4096 after step 6" in said
    assert "resumed from" in said and "trunk.pt at step 6" in said
    for which in ("last", "best"):
        assert_same_run(folder, whole, which)
    assert checkpoint.load(folder / "trunk.pt")["step"] == 12, "that of the new budget"
    # control: from the decayed weights it is another run
    monkeypatch.setattr(extension, "starting_point", lambda path, *_: path)
    assert train.main([*MORE, str(control)]) == 0
    assert log_without_extension(control) != log_without_extension(whole)


def test_a_trunk_outlives_every_step_that_is_kept_and_only_wsd_has_one(finished, tmp_path):
    folder = finished(f"{WSD} --keep 1", tmp_path / "run")
    names = sorted(path.name for path in folder.glob("*.pt"))
    assert names == ["best.pt", "step-00000008.pt", "trunk.pt"]
    extension.keep_trunk(folder / names[1])
    extension.keep_trunk(folder / names[1])
    assert checkpoint.load(folder / "trunk.pt")["step"] == 8
    assert sorted(path.name for path in folder.glob("*.pt")) == names
    assert not list(finished("", tmp_path / "plain").glob("trunk*"))


def test_best_of_the_decay_is_set_aside_and_the_best_of_the_trunk_counts(finished, tmp_path):
    folder = finished(WSD, tmp_path / "run")
    decayed, trunk = checkpoint.load(folder / "best.pt"), checkpoint.load(folder / "trunk.pt")
    assert decayed["step"] > 6 and decayed["best"] < trunk["best"]
    killed_at(7, [*MORE, str(folder)])
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


def test_a_run_that_does_not_decay_yet_goes_on_from_its_last_step(tmp_path, store_dir, capsys):
    killed_at(6, f"{SMALL} --data {store_dir} --out {tmp_path / 'run'} {WSD}".split())
    assert train.main([*MORE, str(tmp_path / "run")]) == 0
    assert "step-00000004.pt at step 4" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "run" / "trunk.pt")["step"] == 12


@pytest.mark.slow
@pytest.mark.dist
def test_a_trunk_of_shards(tmp_path, store_dir):
    flags = f"{SMALL} --data {store_dir} {WSD} --fsdp --optimizer adamw"
    folder = tmp_path / "run"
    start_ranks(2, [*flags.split(), "--out", str(folder)], [*MORE, str(folder)])
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

    def counted(rename):
        def call(*names):
            if len(made) + 1 == number:
                raise Killed
            made.append(names)
            return rename(*names)

        return call

    def begin_and_die(*args):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted(os.replace))
            patch.setattr(Path, "rename", counted(Path.rename))
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
    assert (folder / "changed.json").exists() == was_extended
    assert train.main(["--resume", *again, "--out", str(folder)]) == 0
    more = flags.replace("--keep 1", "--keep 1 --tokens 4096")
    wanted = finished(more if was_extended or again else flags, tmp_path / "wanted")
    assert_same_run(folder, wanted)


# ---- what is refused


def test_what_cannot_be_is_one_line_and_changes_nothing(finished, tmp_path):
    """8 steps of 256 end at 2,048, past a budget of 2,000."""
    folder = finished("--tokens 2000", tmp_path / "run")
    for flags, said in (
        ("--tokens 1999", "--tokens 1999 is less than the 2000 tokens of the run in"),
        ("--tokens 0", r"--tokens is 0, allowed is a whole number, at least 1"),
        ("--tokens 2048", r"--tokens 2048: the run in .* has consumed 2048 already"),
        ("--tokens 4096 --seed 7", r"--seed 7 differs from --seed 1337"),
        ("--tokens 4096 --warmup-tokens 9", "--warmup-tokens 9 differs from --warmup-tokens 40"),
        ("--tokens 4096 --micro-batch-size 3", "--micro-batch-size 3"),
        ("--schedule-tokens 9", "unrecognized arguments: --schedule-tokens"),
    ):
        resume_refused(folder, said, flags)
    for text in ("{", "[1]", '{"tokens": 5}'):
        (folder / "changed.json").write_text(text)
        resume_refused(folder, r"changed\.json is damaged .*: put it back")


def test_no_other_checkpoint_is_taken_for_the_trunk(finished, tmp_path):
    folder, more = finished(WSD, tmp_path / "run"), "--tokens 4096"
    said = r"--resume best: at step 8 .* decays already.*leave that"
    resume_refused(folder, said, f"--resume best {more}")
    (folder / "trunk.pt").unlink()
    resume_refused(folder, r"--resume last: at step 8 .* decays already.*a new run", more)
