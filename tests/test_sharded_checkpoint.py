"""A folder of shards is whole or absent, never believed when damaged, and holds what a file holds.

In one process; what several ranks do together is in tests/test_sharded.py, and saves that are
killed or fail are in tests/test_checkpoint.py.
"""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.run import checkpoint, sharded_checkpoint
from support.run.sharded_checkpoint import ALONE, joined, load, main, outlined, save
from tests.test_checkpoint import Canary, assert_one_line, names, sign


def state_of(step: int = 7) -> dict:
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(65, 8, generator=generator)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(65, 8, generator=generator)}
    biases = {"bias": torch.zeros(5).bfloat16(), "empty": torch.zeros(0, 3)}
    return {
        "model": {"wte": embedding, "head": embedding, **biases},
        "optimizers": {"state": {"wte": moments}, "scaler": {}},
        "step": step,
        "best": float("inf"),
        "config": {"layers": (1, 2), "argv": ["--fsdp"], 5: None},
    }


@pytest.fixture
def path(tmp_path):
    return save(tmp_path, state_of(), ALONE, step=7)


def written_by(ranks: int, folder: Path, state: dict, save_id: str = "one") -> Path:
    """A checkpoint as FSDP2's ranks write it: each has its chunk of every tensor's rows."""
    folder.mkdir()
    outline, rows = sharded_checkpoint.split(state, is_rank0=True)
    for rank in range(ranks):
        chunks = {
            name: (*tensor.chunk(ranks), *[tensor[:0]] * ranks) for name, tensor in rows.items()
        }
        name = sharded_checkpoint.name_of(rank, ranks)
        own = {name: chunk[rank].clone() for name, chunk in chunks.items()}
        content = {"save": save_id, "file": name, "state": outline if rank == 0 else None}
        checkpoint.write_file(folder / name, content | {"rows": own})
    return folder


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_was_saved_returns(tmp_path, ranks):
    """Of 5 rows seven ranks have one or none, of none all have none."""
    path = written_by(ranks, tmp_path / "a.sharded", state_of())
    state = load(path)
    assert_equal(state, state_of())
    assert state["model"]["head"] is state["model"]["wte"], "tied tensors stay tied"
    shutil.rmtree(path)
    assert_equal(state, state_of())  # nothing is left in the files


def test_tied_tensors_are_written_once_and_an_outline_reads_none(path):
    (file,) = path.iterdir()
    rows = torch.load(file, weights_only=True)["rows"]
    assert sorted(rows) == [
        "model/bias",
        "model/empty",
        "model/wte",
        "optimizers/state/wte/exp_avg",
    ]
    outline = outlined(path)
    assert outline["step"] == 7 and outline["model"]["wte"].is_meta
    assert outline["model"]["wte"].shape == (65, 8)


def test_padding_of_a_storage_is_not_written(tmp_path):
    padded = torch.randn(1000, 8)
    path = save(tmp_path, {"model": {"w": padded[:5]}}, ALONE, step=1)
    assert (path / "rank-0-of-1.pt").stat().st_size < 4000
    assert torch.equal(load(path)["model"]["w"], padded[:5])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 7))
def test_ranks_together_take_every_row_once(counts, ranks):
    """By whatever numbers of rows the ranks before had; each takes as many as torch.chunk says."""
    whole = torch.arange(2 * sum(counts)).view(-1, 2)
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_checkpoint, "of_rows", lambda rows, like: rows)
        for rank in range(ranks):
            mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda rank=rank: rank)
            like = type("Like", (), {"device_mesh": mesh, "__len__": lambda self: len(whole)})()
            taken.append(joined(list(whole.split(counts)), like, torch.device("cpu")))
    assert torch.equal(torch.cat(taken), whole)
    chunks = (*whole.chunk(ranks), *[whole[:0]] * ranks)
    assert all(torch.equal(*pair) for pair in zip(taken, chunks, strict=False))


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
        (["to-file", "nowhere", "--out", "x.pt"], "nowhere: No such file"),
        (["to-file", str(path), "--out", str(file)], "exists"),
        (["to-file", str(tmp_path), "--out", "x.pt"], "has no file of any rank: not a checkpoint"),
        (["to-file", str(path), "--out", "no/x.pt"], "no/x.pt: not written"),
        (["to-file", str(path)], "--out"),
    ):
        with pytest.raises(ValueError) as error:
            main(argv)
        assert_one_line(error, says)


# ---- damage


def test_any_damaged_or_missing_file_is_named(tmp_path):
    path = written_by(2, tmp_path / "a.sharded", state_of())
    for name in names(path):
        whole = (path / name).read_bytes()
        flipped = bytearray(whole)
        for position in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
            flipped[position] ^= 1 << position % 8
            (path / name).write_bytes(flipped)
            with pytest.raises(
                ValueError, match=f"{name} is damaged|{name} has no sha256"
            ) as error:
                load(path)
            assert_one_line(error, str(path), "start a new run")
            flipped[position] = whole[position]
        (path / name).write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=f"{name} has no sha256 trailer"):
            load(path)
        (path / name).unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            load(path)
        (path / name).write_bytes(whole)
    assert_equal(load(path), state_of())


def test_files_of_two_saves_are_refused(tmp_path):
    """Each is whole; also one of other ranks, and a rank's file in place of another's."""
    one = written_by(2, tmp_path / "one.sharded", state_of())
    other = written_by(2, tmp_path / "other.sharded", state_of(8), "other")
    three = written_by(3, tmp_path / "three.sharded", state_of(8), "three")
    shutil.copy(three / "rank-2-of-3.pt", one)
    with pytest.raises(ValueError, match=r"rank-0-of-3\.pt is missing"):
        load(one)
    (one / "rank-2-of-3.pt").unlink()
    for source in (other / "rank-1-of-2.pt", one / "rank-0-of-2.pt"):
        shutil.copy(source, one / "rank-1-of-2.pt")
        with pytest.raises(ValueError, match=r"rank-1-of-2\.pt is not of the same save as rank-0"):
            load(one)


def test_control_without_the_digest_a_flipped_weight_loads_in_silence(path, monkeypatch):
    (file,) = path.iterdir()
    start = file.read_bytes().index(state_of()["model"]["wte"].numpy().tobytes())
    flipped = bytearray(file.read_bytes())
    flipped[start + 3] ^= 128  # the sign of the first weight
    file.write_bytes(flipped)
    monkeypatch.setattr(checkpoint, "verify", lambda file: None)
    assert load(path)["model"]["wte"][0, 0] == -state_of()["model"]["wte"][0, 0]


def test_the_remedy_names_what_has_other_bytes(tmp_path):
    path = save(tmp_path, state_of(), ALONE, step=7, best=True)
    with open(path / "rank-0-of-1.pt", "r+b") as file:
        file.write(b"damaged")
    with pytest.raises(ValueError, match="no other checkpoint there"):
        load(path)
    checkpoint.save(tmp_path, state_of(8), step=8)
    with pytest.raises(ValueError, match=r"use last$"):
        load(path)


def test_a_malicious_file_is_refused_and_never_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary, packed = tmp_path / "canary", io.BytesIO()
    torch.save({"rows": Canary(canary)}, packed)
    sign(path / "rank-0-of-1.pt", packed.getvalue())
    for read in (load, outlined):
        with pytest.raises(ValueError) as error:
            read(path)
        assert_one_line(error, str(path))
        assert not canary.exists()
    torch.load(io.BytesIO(packed.getvalue()), weights_only=False)  # control: the payload is live
    assert canary.exists()


def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path):
    with pytest.raises(ValueError, match="pathlib"):
        save(tmp_path, {**state_of(), "out": Path("runs/a")}, ALONE, step=7)
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


def test_a_second_save_of_a_step_replaces_the_first_and_best_shares_its_bytes(path, tmp_path):
    save(tmp_path, {**state_of(), "best": 1.5}, ALONE, step=7, best=True)
    best = tmp_path / "best-00000007.sharded"
    assert names(tmp_path) == [best.name, path.name]
    assert load(path)["best"] == 1.5
    assert (path / "rank-0-of-1.pt").samefile(best / "rank-0-of-1.pt")
