"""A checkpoint is whole or absent, and a damaged one is never believed.

Faults here are real where that is possible in seconds: bits flipped, files cut, processes killed by
SIGKILL, writes refused by the kernel. Each has a control that shows the fault would bite.
"""

import errno
import hashlib
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support.base.runtime import exit_cleanly
from support.run import checkpoint

ROOT = Path(__file__).parents[1]
TRAILER_BYTES = 72
DAMAGE = r"is damaged|no sha256 trailer"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def assert_one_line(error: pytest.ExceptionInfo, *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.fixture
def saved(tmp_path):
    """One small checkpoint: 4,000 bytes of weights, a few hundred of everything else."""
    state = {"weight": torch.arange(1000, dtype=torch.float32), "step": 7}
    return checkpoint.save(tmp_path, state, step=7)


def test_every_plain_kind_of_value_returns(tmp_path):
    state = {
        "step": 12,
        "big": 2**70,
        "loss": 3.5,
        "nan": float("nan"),
        "none": None,
        "yes": True,
        "argv": ["train.py", "--ltd"],
        "nested": {"a": [1, [2.0, (3, "vier", None)], {}], 5: "int key", "": []},
        "text": "ä\n\0" * 3,
        "bytes": b"\x00\xff",
    }
    loaded = checkpoint.load(checkpoint.save(tmp_path, state, step=12))
    assert loaded.pop("nan") != state.pop("nan")  # nan differs from itself
    assert loaded == state
    assert list(loaded) == list(state)
    assert type(loaded["yes"]) is bool and type(loaded["nested"]["a"][1][1]) is tuple


DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn"]
DTYPES += ["int64", "int32", "int16", "uint8", "uint16", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_returns_bitwise(tmp_path, dtype):
    raw = torch.randint(0, 2, (8, 6), generator=torch.Generator().manual_seed(0))
    tensor = raw.to(getattr(torch, dtype))
    loaded = checkpoint.load(checkpoint.save(tmp_path, {"t": tensor}, step=0))["t"]
    assert loaded.dtype == tensor.dtype and loaded.shape == (8, 6)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_and_strides_return(tmp_path):
    base = torch.arange(60.0).view(3, 4, 5)
    state = {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2, 1:],
        "expanded": torch.ones(1).expand(4, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    loaded = checkpoint.load(checkpoint.save(tmp_path, state, step=0))
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].shape == tensor.shape, name
    assert not loaded["transposed"].is_contiguous()
    assert isinstance(loaded["parameter"], torch.nn.Parameter)


def test_tied_tensors_stay_tied(tmp_path):
    embedding = torch.zeros(4, 3)
    state = {"model": {"wte": embedding, "head": embedding, "apart": torch.zeros(4, 3)}}
    model = checkpoint.load(checkpoint.save(tmp_path, state, step=0))["model"]
    model["wte"][0, 0] = 1
    assert model["head"][0, 0] == 1
    assert model["apart"][0, 0] == 0


def test_a_resumed_optimizer_takes_the_same_steps(tmp_path):
    def train(model, optimizer, steps):
        for step in steps:
            x = torch.full((2, 8), float(step))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, optimizer = build()
    train(model, optimizer, range(5))
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    path = checkpoint.save(tmp_path, state, step=5)
    train(model, optimizer, range(5, 9))

    loaded, (resumed, other_optimizer) = checkpoint.load(path), build()
    resumed.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    train(resumed, other_optimizer, range(5, 9))
    assert torch.equal(resumed.weight, model.weight)
    assert torch.equal(loaded["rng"], state["rng"])


def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path):
    first = checkpoint.save(tmp_path, {"out": "runs/a"}, step=1)
    with pytest.raises(pickle.UnpicklingError, match="pathlib"):
        checkpoint.save(tmp_path, {"out": Path("runs/a")}, step=2, best=True)
    assert names(tmp_path) == [first.name]
    torch.save({"out": Path("runs/a")}, tmp_path / "control.pt")  # torch alone writes it gladly


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_load_opens_it(saved, mmap):
    state = torch.load(saved, weights_only=True, mmap=mmap)
    assert torch.equal(state["weight"], torch.arange(1000.0)) and state["step"] == 7


def test_the_trailer_is_the_digest_of_what_precedes_it(saved):
    whole = saved.read_bytes()
    body, trailer = whole[:-TRAILER_BYTES], whole[-TRAILER_BYTES:]
    assert trailer == b"\nsha256:" + hashlib.sha256(body).hexdigest().encode()


@pytest.mark.skipif(sys.platform == "darwin", reason="head -c -N is GNU's")
def test_the_shell_command_of_the_header_agrees(saved):
    command = f"head -c -72 {saved} | sha256sum;  tail -c 64 {saved}"
    quoted = command.replace(str(saved), "runs/a/step-00001234.pt")
    assert quoted in checkpoint.__doc__
    first, second = subprocess.check_output(command, shell=True, text=True).splitlines()
    assert first.split()[0] == second


def test_each_byte_is_written_once(tmp_path, monkeypatch):
    """The digest is made on the way: what is written is the file's size, and nothing is read."""
    counts = {"written": 0}

    class Counting(checkpoint._HashingFile):
        def write(self, block):
            counts["written"] += memoryview(block).nbytes
            return super().write(block)

        def read(self, *args):
            raise AssertionError("a second pass")

        seek = read

    monkeypatch.setattr(checkpoint, "_HashingFile", Counting)
    path = checkpoint.save(tmp_path, {"weight": torch.ones(100_000)}, step=0)
    assert counts["written"] == path.stat().st_size


def test_bytes_reach_the_disk_before_names_and_best_before_its_step(tmp_path, monkeypatch):
    """A power cut may undo what no fsync has confirmed: the order of the calls is the promise."""
    calls, fsync, replace = [], os.fsync, os.replace

    def record_sync(descriptor):
        status = os.fstat(descriptor)
        calls.append("sync folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(descriptor)

    def record_replace(source, target):
        calls.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    path = checkpoint.save(tmp_path, {"weight": torch.ones(10)}, step=1, best=True)
    assert calls == [path.stat().st_size, "best.pt", path.name, "sync folder"]


def test_the_same_state_makes_the_same_bytes(tmp_path):
    state = {"weight": torch.ones(10), "step": 3}
    first = checkpoint.save(tmp_path / "a", state, step=3).read_bytes()
    assert first == checkpoint.save(tmp_path / "b", state, step=3).read_bytes()


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def weight_position(path: Path) -> int:
    """Where in the file the weight's bytes begin."""
    return path.read_bytes().index(torch.arange(1000.0).numpy().tobytes())


def test_one_flipped_bit_anywhere_is_found(saved):
    size = saved.stat().st_size
    generator = random.Random(0)
    data = weight_position(saved)
    positions = {
        *range(40),  # the archive's first header
        *range(data, data + 40),  # the first weights
        *range(size - TRAILER_BYTES - 40, size),  # the archive's end, and the whole trailer
        *(generator.randrange(size) for _ in range(200)),
    }
    for position in sorted(positions):
        bit = generator.randrange(8)
        flip(saved, position, bit)
        with pytest.raises(ValueError, match=DAMAGE) as error:
            checkpoint.load(saved)
        assert_one_line(error, str(saved))
        flip(saved, position, bit)
    assert checkpoint.load(saved)["step"] == 7


def test_control_without_the_digest_a_flipped_weight_loads_in_silence(saved, monkeypatch):
    flip(saved, weight_position(saved) + 4 * 5 + 3, 7)  # the sign of the sixth weight, 5
    for mmap in (False, True):
        weight = torch.load(saved, weights_only=True, mmap=mmap)["weight"]
        assert weight[4:7].tolist() == [4, -5, 6]
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(saved)
    monkeypatch.setattr(checkpoint, "_verify", lambda file: None)
    assert checkpoint.load(saved)["weight"][5] == -5


def test_the_message_shows_both_digests_and_the_previous_file(tmp_path):
    checkpoint.save(tmp_path, {"a": 1}, step=1)
    path = checkpoint.save(tmp_path, {"a": 2}, step=2)
    expected = path.read_bytes()[-64:].decode()
    flip(path, 100, 0)
    found = hashlib.sha256(path.read_bytes()[:-TRAILER_BYTES]).hexdigest()
    assert found != expected
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert_one_line(error, str(path), expected[:12], found[:12], "use previous")
    assert "use last" not in str(error.value)
    assert checkpoint.load(checkpoint.find(tmp_path, "previous")) == {"a": 1}


def test_the_remedy_leaves_out_the_other_name_of_the_same_bytes(tmp_path):
    path = checkpoint.save(tmp_path, {"a": 1}, step=1, best=True)
    flip(path, 100, 0)
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert_one_line(error, "no other checkpoint")
    checkpoint.save(tmp_path, {"a": 2}, step=2)
    with pytest.raises(ValueError) as error:
        checkpoint.load(tmp_path / "best.pt")
    assert_one_line(error, "best.pt: is damaged", "use last")
    assert "previous" not in str(error.value)


def test_every_truncation_is_found(saved):
    whole = saved.read_bytes()
    size = len(whole)
    near_ends = [*range(0, 80), *range(size - 80, size)]
    for length in [*near_ends, *range(80, size - 80, 97)]:
        saved.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"no sha256 trailer: {length:,} bytes") as error:
            checkpoint.load(saved)
        assert_one_line(error, str(saved))


@pytest.mark.parametrize("zeros", [1, 64, 72, 500, 4096])
def test_a_zeroed_or_a_lengthened_tail_is_found(saved, zeros):
    whole = saved.read_bytes()
    for damaged in (whole[:-zeros] + bytes(zeros), whole + bytes(zeros), bytes(len(whole))):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match=DAMAGE):
            checkpoint.load(saved)


def test_a_file_without_a_trailer_is_not_ours(tmp_path):
    torch.save({"a": 1}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="no sha256 trailer"):
        checkpoint.load(tmp_path / "foreign.pt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError) as error:
        checkpoint.load(tmp_path / "step-00000001.pt")
    assert_one_line(error, str(tmp_path / "step-00000001.pt"), "No such file")


def sign(path: Path, body: bytes) -> Path:
    """Give any bytes a correct trailer, as one who means harm can."""
    path.write_bytes(body + b"\nsha256:" + hashlib.sha256(body).hexdigest().encode())
    return path


class Canary:
    """When unpickled, creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_malicious_pickle_is_refused_and_never_runs(tmp_path, form, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # must not weaken us either
    canary, raw = tmp_path / "canary", tmp_path / "raw"
    state = {"model": Canary(canary)}
    if form == "pickle":
        raw.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, raw, _use_new_zipfile_serialization=form == "zip")
    path = sign(tmp_path / "step-00000001.pt", raw.read_bytes())
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert_one_line(error, str(path))
    assert "weights_only" not in str(error.value)  # no advice to switch the guard off
    if form == "zip":
        assert "open" in str(error.value)
    assert not canary.exists()
    # Control: the payload is live.
    if form == "pickle":
        pickle.loads(raw.read_bytes())
    else:
        torch.load(raw, weights_only=False)
    assert canary.exists()


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", b"not a checkpoint at all", bytes(5000)])
def test_signed_rubbish_is_one_line(tmp_path, body):
    path = sign(tmp_path / "step-00000001.pt", body)
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert_one_line(error, str(path), "start a new run")


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in range(0, 60, 10):
        checkpoint.save(tmp_path, {"step": step}, step=step, keep=2, best=step == 10)
    assert names(tmp_path) == ["best.pt", "step-00000040.pt", "step-00000050.pt"]
    assert checkpoint.load(tmp_path / "best.pt") == {"step": 10}
    checkpoint.save(tmp_path, {"step": 60}, step=60, keep=1)
    assert names(tmp_path) == ["best.pt", "step-00000060.pt"]


def test_order_is_by_step_not_by_time_or_text(tmp_path):
    for step in (9, 10, 99_999_999):
        checkpoint.save(tmp_path, {"step": step}, step=step, keep=3)
    os.utime(tmp_path / "step-00000009.pt", (2**31, 2**31))
    assert checkpoint.find(tmp_path, "last").name == "step-99999999.pt"
    assert checkpoint.find(tmp_path, "previous").name == "step-00000010.pt"


def test_a_save_after_resuming_from_far_back_is_not_pruned(tmp_path):
    for step in (100, 200, 300):
        checkpoint.save(tmp_path, {"step": step}, step=step, keep=3)
    path = checkpoint.save(tmp_path, {"step": 150}, step=150, keep=1)
    assert checkpoint.load(path) == {"step": 150}
    assert names(tmp_path) == ["step-00000150.pt", "step-00000200.pt", "step-00000300.pt"]
    for step in (200, 300):  # the run passes its former self, and the rule of keep=1 is back
        checkpoint.save(tmp_path, {"step": step, "again": True}, step=step, keep=1)
    assert names(tmp_path) == ["step-00000300.pt"]


def test_best_shares_the_bytes_on_disk(tmp_path):
    path = checkpoint.save(tmp_path, {"a": 1}, step=1, best=True)
    assert path.samefile(tmp_path / "best.pt")


def test_best_is_copied_where_links_are_not_supported(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    synced, fsync = [], os.fsync

    def record_sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", record_sync)
    path = checkpoint.save(tmp_path, {"a": 1}, step=1, best=True)
    best = tmp_path / "best.pt"
    assert {path.stat().st_ino, best.stat().st_ino} <= set(synced)
    assert best.read_bytes() == path.read_bytes() and not best.samefile(path)
    assert names(tmp_path) == ["best.pt", path.name]


def test_a_second_save_of_a_step_replaces_the_first_and_not_the_best(tmp_path):
    checkpoint.save(tmp_path, {"try": 1}, step=5, best=True)
    with open(tmp_path / "step-00000005.pt", "rb") as reader:  # someone who is reading the first
        path = checkpoint.save(tmp_path, {"try": 2}, step=5)
        assert torch.load(reader, weights_only=True) == {"try": 1}
    assert checkpoint.load(path) == {"try": 2}
    assert checkpoint.load(tmp_path / "best.pt") == {"try": 1}
    assert names(tmp_path) == ["best.pt", path.name]


def test_a_checkpoint_in_place_of_its_run_is_said_to_be_none(tmp_path):
    file, folder = checkpoint.save(tmp_path, {"a": 1}, step=1), tmp_path / "step-00000002.sharded"
    folder.mkdir()
    for path in (file, folder):
        with pytest.raises(ValueError, match="is not the folder of a run: name that one"):
            checkpoint.find(path, "last")


def test_find_never_takes_another_file(tmp_path):
    for which in ("last", "previous", "best", str(tmp_path / "x.pt")):
        with pytest.raises(ValueError, match="new: no such folder: name the folder of a run"):
            checkpoint.find(tmp_path / "new", which)
        with pytest.raises(ValueError) as error:
            checkpoint.find(tmp_path, which)
        assert_one_line(error, which, str(tmp_path), "has none", "last, previous, best")
    path = checkpoint.save(str(tmp_path), {}, step=1)
    assert checkpoint.find(str(tmp_path), "last") == path
    assert checkpoint.load(str(path)) == {}
    assert checkpoint.find(tmp_path / "elsewhere", str(path)) == path
    for which in ("previous", "best", str(tmp_path)):
        with pytest.raises(ValueError) as error:
            checkpoint.find(tmp_path, which)
        assert_one_line(error, which, "last (step-00000001.pt)")
    checkpoint.save(tmp_path, {}, step=2, best=True)
    assert checkpoint.find(tmp_path, "previous") == path
    assert checkpoint.find(tmp_path, "best") == tmp_path / "best.pt"


def test_a_word_is_a_word_even_beside_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("last").write_text("a stray file")
    with pytest.raises(ValueError, match="has none"):
        checkpoint.find(tmp_path, "last")


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (10**8, 2), (0, 0), (0, -1)])
def test_impossible_numbers_are_refused_before_anything_is_written(tmp_path, step, keep):
    with pytest.raises(ValueError) as error:
        checkpoint.save(tmp_path / "run", {}, step=step, keep=keep)
    assert_one_line(error, f"step={step}", f"keep={keep}", "99999999")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e5m2"])
def test_weights_that_are_not_finite_are_not_saved(folder_with_one, value, dtype):
    folder, before = folder_with_one
    bad = torch.ones(3, 100).to(getattr(torch, dtype))
    bad[1, 50] = value
    good = {"wte": torch.full((9,), 1e38), "empty": torch.zeros(0), "ids": torch.arange(3)}
    with pytest.raises(ValueError) as error:
        checkpoint.save(folder, {"model": good | {"h.0.w": bad}}, step=2, keep=1, best=True)
    assert_one_line(error, "step-00000002.pt: not written: weights are not finite: h.0.w;", "--lr")
    assert_nothing_changed(folder, before)
    assert checkpoint.save(folder, {"model": good, "best": value}, step=2).exists()


def test_of_many_bad_tensors_three_are_named(tmp_path):
    weights = {f"h.{layer}": torch.full((2,), float("nan")) for layer in range(12)}
    with pytest.raises(ValueError, match=r"not finite: h\.0, h\.1, h\.2 and 9 more;"):
        checkpoint.save(tmp_path / "run", {"model": weights}, step=1)
    assert not (tmp_path / "run").exists()


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    others = ["log.jsonl", "step-0000001.pt", "tmp-a", "step-abcdefgh.pt"]
    for name in [".tmp-step-00000001.pt", ".tmp-best.pt", *others]:
        (tmp_path / name).write_bytes(b"half")
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == sorted(others)
    (tmp_path / ".tmp-step-00000001.pt").write_bytes(b"half")
    path = checkpoint.save(tmp_path, {}, step=2, keep=1)
    assert names(tmp_path) == sorted([*others, path.name])
    checkpoint.clean(tmp_path / "absent")


def test_a_leftover_gives_its_room_back_before_the_next_file_is_written(tmp_path, monkeypatch):
    leftover = tmp_path / ".tmp-step-00000001.pt"
    leftover.write_bytes(b"half")

    class Watching(checkpoint._HashingFile):
        def write(self, block):
            assert not leftover.exists()
            return super().write(block)

    monkeypatch.setattr(checkpoint, "_HashingFile", Watching)
    checkpoint.save(tmp_path, {"a": 1}, step=2)


def test_a_failed_delete_is_a_warning_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    unlink = Path.unlink

    def refuse_old(self, missing_ok=False):
        if self.name == "step-00000001.pt":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_old)
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, {"step": step}, step=step, keep=1)
        assert checkpoint.load(path) == {"step": step}
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2  # once for each save that tried
    assert all("step-00000001.pt cannot be deleted: Operation not" in line for line in warnings)
    assert names(tmp_path) == ["step-00000001.pt", "step-00000003.pt"]


STATE = {"weight": torch.zeros(50_000), "more": [torch.ones(50_000)]}  # 400,000 bytes
DISK_FULL = "No space left on device"


def assert_nothing_changed(folder: Path, before: dict[str, bytes]) -> None:
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.fixture
def folder_with_one(tmp_path):
    checkpoint.save(tmp_path, {"step": 1}, step=1, best=True)
    return tmp_path, {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@pytest.mark.parametrize("room", [0, 1, 1000, 100_000, 210_000, 400_000, 401_000, "trailer"])
def test_a_full_disk_changes_nothing(folder_with_one, monkeypatch, room):
    folder, before = folder_with_one
    if room == "trailer":  # all but the last byte fits
        room = checkpoint.save(folder / "measure", STATE, step=2).stat().st_size - 1
        shutil.rmtree(folder / "measure")

    class Full(checkpoint._HashingFile):
        written = 0

        def write(self, block):
            self.written += memoryview(block).nbytes
            if self.written > room:
                raise OSError(errno.ENOSPC, DISK_FULL)
            return super().write(block)

    with monkeypatch.context() as full:
        full.setattr(checkpoint, "_HashingFile", Full)
        with pytest.raises(ValueError) as error:
            checkpoint.save(folder, STATE, step=2, keep=1, best=True)
    assert_one_line(error, str(folder), DISK_FULL, "needs 400,000 bytes", "free", "untouched")
    assert_nothing_changed(folder, before)
    assert checkpoint.save(folder, STATE, step=2, keep=1).name == "step-00000002.pt"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_fsync_or_rename_changes_nothing(folder_with_one, monkeypatch, call):
    folder, before = folder_with_one

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(os, call, fail)
        with pytest.raises(ValueError) as error:
            checkpoint.save(folder, STATE, step=2, keep=1, best=True)
    assert_one_line(error, str(folder), "Input/output error")
    assert_nothing_changed(folder, before)


@contextmanager
def file_size_limit(size: int):
    """Let the kernel refuse (EFBIG) all that goes beyond so many bytes in one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 5000, 200_500, 400_500, "trailer"])
def test_a_write_that_the_kernel_refuses_changes_nothing(folder_with_one, size):
    folder, before = folder_with_one
    if size == "trailer":
        size = checkpoint.save(folder / "measure", STATE, step=2).stat().st_size - 1
        shutil.rmtree(folder / "measure")
    with file_size_limit(size), pytest.raises(ValueError) as error:
        checkpoint.save(folder, STATE, step=2, keep=1, best=True)
    assert_one_line(error, str(folder), "File too large")
    assert_nothing_changed(folder, before)


FILL = """
import os, sys, torch
from support.run import checkpoint
folder = sys.argv[1]
try:
    for step in range(9):
        checkpoint.save(folder, {"weight": torch.full((100_000,), step)}, step=step, keep=9)
except ValueError as error:
    print(error)
for name in sorted(os.listdir(folder)):
    print(name, checkpoint.load(os.path.join(folder, name))["weight"].unique().item())
"""


def test_a_really_full_disk(tmp_path):
    """A file system of 2 MB takes two files of 800 kB; the third does not fit."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare, so no file system of our own to fill")
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    fill = f'exec "{sys.executable}" -c "$0" {tmp_path}'
    command = ["unshare", "--mount", "bash", "-c", f"{mount} || exit 77; {fill}", FILL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 77 or done.stderr.startswith("unshare"):
        pytest.skip("not allowed to mount a file system")
    assert done.returncode == 0, done.stderr
    message, *files = done.stdout.splitlines()
    assert "step-00000002.pt: not written: No space left on device (needs 800,000 by" in message
    free = int(message.split("bytes, ")[1].split(" free")[0].replace(",", ""))
    assert 0 < free < 800_000
    assert files == ["step-00000000.pt 0", "step-00000001.pt 1"]


@contextmanager
def unprivileged():
    """Root may write anywhere; be nobody for a while, so that permissions count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("below", [".", "new/run"])
def test_a_read_only_folder_is_one_line(below):
    folder = Path(tempfile.mkdtemp())
    try:
        path = checkpoint.save(folder, {"step": 1}, step=1)
        path.chmod(0o444)
        before = {path.name: path.read_bytes()}
        folder.chmod(0o555)
        with unprivileged(), pytest.raises(ValueError) as error:
            checkpoint.save(folder / below, STATE, step=2, keep=1)
        assert_one_line(error, str(folder), "Permission denied", "make the folder writable")
        assert_nothing_changed(folder, before)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(ValueError) as error:
        checkpoint.save(tmp_path / "run", STATE, step=2)
    assert_one_line(error, str(tmp_path / "run"), "File exists")
    assert (tmp_path / "run").read_text() == "not a folder"


def test_an_interrupt_in_mid_save_leaves_no_half_file(folder_with_one, monkeypatch):
    folder, before = folder_with_one

    class Interrupted(checkpoint._HashingFile):
        def write(self, block):
            super().write(block)
            if memoryview(block).nbytes > 1000:
                raise KeyboardInterrupt
            return len(block)

    monkeypatch.setattr(checkpoint, "_HashingFile", Interrupted)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        checkpoint.save(folder, STATE, step=2)
    assert_nothing_changed(folder, before)


KILL_FLOATS = 1_000_000  # 4 MB: most of a save's time is in the writing


def kill_state(step: int) -> dict:
    return {"step": step, "weight": torch.full((KILL_FLOATS,), float(step))}


def save_forever(folder: str, first: int) -> None:
    for step in range(first, 10**6):
        checkpoint.save(folder, kill_state(step), step=step, keep=2, best=step % 3 == 0)


def save_in_place_forever(folder: str, first: int) -> None:
    for step in range(first, 10**6):
        torch.save(kill_state(step), Path(folder) / "last.pt")


@contextmanager
def running(target, folder: Path, first: int):
    """A process that saves without end, forked: it need not import torch again."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=target, args=(str(folder), first), daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()
    assert process.exitcode == -9  # killed at work, not dead of an error before


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


def test_killed_at_any_moment_every_file_is_whole(tmp_path):
    generator = random.Random(0)
    first, killed_in_mid_write = 0, 0
    for _ in range(10):
        with running(save_forever, tmp_path, first):
            wait_for(tmp_path / f"step-{first + 2:08d}.pt")
            time.sleep(generator.uniform(0, 0.05))
        killed_in_mid_write += any(name.startswith(".tmp-") for name in names(tmp_path))
        files = [file for file in tmp_path.iterdir() if not file.name.startswith(".tmp-")]
        assert len(files) >= 3  # two steps and the best; three steps if killed before pruning
        for file in files:
            state = checkpoint.load(file)
            assert torch.equal(state["weight"], kill_state(state["step"])["weight"])
            assert file.name in ("best.pt", f"step-{state['step']:08d}.pt")
        last = checkpoint.load(checkpoint.find(tmp_path, "last"))["step"]
        best = checkpoint.load(checkpoint.find(tmp_path, "best"))["step"]
        assert best in (last - last % 3, last + 1)  # never behind the step file, at most one ahead
        first = last + 1
    assert killed_in_mid_write > 0  # else this test has tested nothing
    checkpoint.save(tmp_path, kill_state(first), step=first, keep=2)
    assert [n for n in names(tmp_path) if n != "best.pt"] == [
        f"step-{first - 1:08d}.pt",
        f"step-{first:08d}.pt",
    ]


def test_control_written_in_place_the_same_kills_tear_the_file(tmp_path):
    generator = random.Random(0)
    path = tmp_path / "last.pt"
    for _ in range(20):
        path.unlink(missing_ok=True)  # else a slow process is killed before its first save
        with running(save_in_place_forever, tmp_path, 0):
            wait_for(path)
            time.sleep(generator.uniform(0, 0.05))
        try:
            torch.load(path, weights_only=True)
        except Exception:
            return
    pytest.fail("20 kills in mid-write and never a torn file: the kills of these tests do not bite")


def test_the_command_verifies_and_lists(tmp_path, capsys):
    state = {"model": {"w": torch.zeros(500_000)}, "optimizer": [(torch.ones(10**6),)], "step": 34}
    path = checkpoint.save(tmp_path, state, step=34)
    checkpoint.main([str(path)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: verified, 6.0") and first.endswith("step 34")
    assert [line.split() for line in lines] == [
        ["2.000", "MB", "model"],
        ["4.000", "MB", "optimizer"],
        ["0.000", "MB", "step"],
    ]


def test_the_command_on_a_damaged_file_is_one_line_and_exit_2(saved, capsys):
    flip(saved, 200, 3)
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(lambda: checkpoint.main([str(saved)]))
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1 and "is damaged" in err
