"""A folder of shards is whole or absent, never believed when damaged, and holds what a file holds.

In one process, which writes and reads whole tensors by the same code; what several ranks do
together is in tests/test_sharded.py.

python -m pytest tests/test_sharded_checkpoint.py
"""

import hashlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch

from support.run import checkpoint, sharded_checkpoint
from support.run.sharded_checkpoint import ALONE, load, main, save
from tests.test_checkpoint import Canary, assert_one_line, names


def state_of(step: int = 7) -> dict:
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(65, 8, generator=generator)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(65, 8, generator=generator)}
    return {
        "model": {"wte": embedding, "head": embedding, "bias": torch.zeros(5).bfloat16()},
        "optimizers": {"state": {"wte": moments}, "scaler": {}},
        "step": step,
        "best": float("inf"),
        "config": {"layers": (1, 2), "argv": ["--fsdp"], 5: None},
    }


@pytest.fixture
def path(tmp_path):
    return save(tmp_path, state_of(), ALONE, step=7)


def flattened(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    inner = [flattened(more, f"{name}/{key!r}") for key, more in value.items()]
    return {key: leaf for part in inner for key, leaf in part.items()}


def assert_equal(found: dict, wanted: dict) -> None:
    ours, theirs = flattened(found), flattened(wanted)
    assert list(ours) == list(theirs), "also in this order"
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
        else:
            assert ours[name] == value and type(ours[name]) is type(value), name


def test_what_was_saved_returns(path):
    state = load(path)
    assert_equal(state, state_of())
    assert state["model"]["head"] is state["model"]["wte"], "tied tensors stay tied"


def test_tied_tensors_are_written_once(path):
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert sorted(stored) == ["model/bias", "model/wte", "optimizers/state/wte/exp_avg"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_the_tensors(path):
    import torch.distributed.checkpoint as dcp

    target = {"model/wte": torch.zeros(65, 8)}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert torch.equal(target["model/wte"], state_of()["model"]["wte"])


def test_to_folder_and_back_is_the_same_file(tmp_path, capsys):
    file = checkpoint.save(tmp_path, state_of(), step=7)
    main(["to-folder", str(file), "--out", str(tmp_path / "a.sharded")])
    main(["to-file", str(tmp_path / "a.sharded"), "--out", str(tmp_path / "a.pt")])
    assert (tmp_path / "a.pt").read_bytes() == file.read_bytes()
    assert names(tmp_path) == ["a.pt", "a.sharded", file.name]
    assert capsys.readouterr().out.count("step 7") == 2


def test_the_command_refuses_in_one_line(path, tmp_path):
    file = checkpoint.save(tmp_path / "other", state_of(), step=7)
    for argv, says in (
        (["to-file", str(file), "--out", "x.pt"], "use to-folder"),
        (["to-folder", str(path), "--out", "x.sharded"], "use to-file"),
        (["to-file", "nowhere", "--out", "x.pt"], "nowhere: not found"),
        (["to-file", str(path), "--out", str(file)], "exists"),
        (["to-file", str(tmp_path), "--out", "x.pt"], "is no checkpoint: name one *.sharded in it"),
        (["to-file", str(path), "--out", "no/x.pt"], "there is no folder no: make it first"),
        (["to-file", str(path)], "--out"),
    ):
        with pytest.raises(ValueError) as error:
            main(argv)
        assert_one_line(error, says)


FILES = [".metadata", "__0_0.distcp", "manifest.json", "state.pt"]


def test_any_damaged_or_missing_file_is_named(path):
    assert names(path) == FILES
    for name in FILES:
        whole = (path / name).read_bytes()
        flipped = bytearray(whole)
        positions = [*range(0, len(whole), max(1, len(whole) // 40)), len(whole) - 1]
        for position in positions:
            flipped[position] ^= 1 << position % 8
            (path / name).write_bytes(flipped)
            with pytest.raises(ValueError, match=f"{name} is damaged") as error:
                load(path)
            assert_one_line(error, str(path), "start a new run")
            flipped[position] = whole[position]
        (path / name).write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            load(path)
        (path / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is missing|has no {name}") as error:
            load(path)
        assert_one_line(error, str(path))
        (path / name).write_bytes(whole)
    assert_equal(load(path), state_of())


def test_control_without_the_manifest_a_flipped_weight_loads_in_silence(path, monkeypatch):
    file = path / "__0_0.distcp"
    start = file.read_bytes().index(state_of()["model"]["wte"].numpy().tobytes())
    flipped = bytearray(file.read_bytes())
    flipped[start + 3] ^= 128  # the sign of the first weight
    file.write_bytes(flipped)
    monkeypatch.setattr(sharded_checkpoint, "check", lambda *_: None)
    assert load(path)["model"]["wte"][0, 0] == -state_of()["model"]["wte"][0, 0]


def test_the_remedy_names_what_has_other_bytes(tmp_path):
    path = save(tmp_path, state_of(), ALONE, step=7, best=True)
    for folder in (path, tmp_path / "best-00000007.sharded"):
        with open(folder / "state.pt", "r+b") as file:
            file.write(b"damaged")
    with pytest.raises(ValueError, match="no other checkpoint there"):
        load(path)
    checkpoint.save(tmp_path, state_of(8), step=8)
    with pytest.raises(ValueError, match=r"use last$"):
        load(path)


# ---- malice


def sign(folder: Path) -> None:
    """Write a manifest that is right for the files as they are, as one who means harm can."""
    written = json.loads((folder / sharded_checkpoint.NAME).read_text())
    files = {name: sharded_checkpoint.of_file(folder / name) for name in written["files"]}
    sharded_checkpoint.write_manifest(folder, written["step"], written["world_size"], files)


def test_a_malicious_metadata_is_refused_and_never_runs(path, tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary = tmp_path / "canary"
    genuine = pickle.loads((path / ".metadata").read_bytes())
    genuine.planner_data = Canary(canary)
    for harmful in (genuine, Canary(canary)):
        (path / ".metadata").write_bytes(pickle.dumps(harmful))
        sign(path)
        with pytest.raises(ValueError) as error:
            load(path)
        assert_one_line(error, str(path), ".metadata names", "open", "which is not read")
        assert not canary.exists()
    dcp.FileSystemReader(path).read_metadata()  # control: the payload is live
    assert canary.exists()


@pytest.mark.parametrize("name", ["state.pt", "__0_0.distcp"])
def test_a_malicious_tensor_is_refused_and_never_runs(path, tmp_path, name):
    canary, packed = tmp_path / "canary", io.BytesIO()
    torch.save({"model": Canary(canary)}, packed)
    body = packed.getvalue()
    if name == "state.pt":
        digest = hashlib.sha256(body).hexdigest()
        body += (checkpoint.MARK + digest).encode()
        (path / name).write_bytes(body)
    else:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for part in metadata.storage_data.values():
            part.offset, part.length = 0, len(body)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        (path / name).write_bytes(body)
    sign(path)
    with pytest.raises(ValueError) as error:
        load(path)
    assert_one_line(error, str(path))
    assert not canary.exists()
    torch.load(io.BytesIO(packed.getvalue()), weights_only=False)  # control
    assert canary.exists()


def test_no_file_outside_the_folder_is_read(path, tmp_path):
    shutil.copy(path / "__0_0.distcp", tmp_path / "outside")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for part in metadata.storage_data.values():
        part.relative_path = "../outside"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(path)
    with pytest.raises(ValueError, match=r"names \.\./outside, which manifest\.json does not"):
        load(path)


def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path):
    with pytest.raises(ValueError, match="pathlib"):
        save(tmp_path, {**state_of(), "out": Path("runs/a")}, ALONE, step=7)
    assert names(tmp_path) == []


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    state = state_of()
    state["model"]["bias"][2] = float("nan")
    with pytest.raises(ValueError, match="not finite: bias"):
        save(tmp_path, state, ALONE, step=7)
    assert names(tmp_path) == []


# ---- beside others


def test_the_newest_and_the_best_are_kept_whichever_form_they_have(tmp_path):
    for step in range(1, 9):
        is_best = step in (2, 5)
        if step % 2:
            save(tmp_path, state_of(step), ALONE, step=step, best=is_best)
        else:
            checkpoint.save(tmp_path, state_of(step), step=step, best=is_best)
        steps = [f"step-{n:08d}{'.sharded' if n % 2 else '.pt'}" for n in (step - 1, step) if n]
        best = ["best-00000005.sharded" if step >= 5 else "best.pt"] if step > 1 else []
        assert names(tmp_path) == [*best, *steps]
        assert checkpoint.find(tmp_path, "last").name == steps[-1]
    assert checkpoint.find(tmp_path, "previous").name == "step-00000007.sharded"
    assert_equal(load(checkpoint.find(tmp_path, "best")), state_of(5))
    assert_equal(load(checkpoint.find(tmp_path, "last")), state_of(8))
    path = tmp_path / "step-00000007.sharded"
    assert checkpoint.find(tmp_path, str(path)) == path
    with pytest.raises(ValueError, match="not found"):
        checkpoint.find(tmp_path, str(tmp_path))


def test_best_shares_the_bytes_on_disk(tmp_path):
    path = save(tmp_path, state_of(), ALONE, step=7, best=True)
    for name in FILES:
        assert (path / name).samefile(tmp_path / "best-00000007.sharded" / name)


def test_a_second_save_of_a_step_replaces_the_first(path, tmp_path):
    save(tmp_path, {**state_of(), "best": 1.5}, ALONE, step=7, best=True)
    assert names(tmp_path) == ["best-00000007.sharded", path.name]
    assert load(path)["best"] == 1.5


def interrupted(folder: str, place: object, name: str, call: int) -> None:
    """Save, and die at this call of a function."""
    working, calls = getattr(place, name), []

    def die(*args, **more):
        calls.append(args)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return working(*args, **more)

    setattr(place, name, die)
    save(folder, state_of(8), ALONE, step=8, keep=1, best=True)


KILLS = [
    (checkpoint, "write_file", 1, None),
    (sharded_checkpoint, "of_file", 1, None),
    (sharded_checkpoint, "write_manifest", 1, None),
    (checkpoint, "link_or_copy", 2, None),
    (os, "rename", 2, None),  # the first is torch's, of .metadata
    (os, "rename", 3, "best"),  # between the two names: the run comes by this best once more
    (checkpoint, "forget_older", 1, "both"),
]


@pytest.mark.parametrize(("place", "name", "call", "there"), KILLS)
def test_a_killed_save_leaves_the_older_and_no_half_folder(tmp_path, place, name, call, there):
    old = save(tmp_path, state_of(), ALONE, step=7, best=True)
    context = multiprocessing.get_context("fork")  # it need not import torch again
    process = context.Process(target=interrupted, args=(str(tmp_path), place, name, call))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    last = checkpoint.find(tmp_path, "last")
    assert last.name == ("step-00000008.sharded" if there == "both" else old.name)
    best = load(checkpoint.find(tmp_path, "best"))
    assert_equal(best, state_of(8 if there else 7))
    for folder in tmp_path.glob("[!.]*"):
        load(folder)
    save(tmp_path, state_of(9), ALONE, step=9, keep=1, best=True)
    assert names(tmp_path) == ["best-00000009.sharded", "step-00000009.sharded"]


@pytest.mark.parametrize(("place", "name"), [(os, "rename"), (os, "fsync"), (os, "mkdir")])
def test_a_failed_save_changes_nothing(path, tmp_path, monkeypatch, place, name):
    before = {file: file.read_bytes() for file in path.iterdir()}

    def fail(*_, **more):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(place, name, fail)
        with pytest.raises(ValueError) as error:
            save(tmp_path, state_of(8), ALONE, step=8, keep=1, best=True)
    assert_one_line(error, "step-00000008.sharded: not written", "Input/output error", "free")
    assert names(tmp_path) == [path.name]
    assert {file: file.read_bytes() for file in path.iterdir()} == before
