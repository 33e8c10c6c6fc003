"""A checkpoint is whole or absent, and a damaged one is never believed.

Faults here are real where that is possible in seconds: bits flipped, files cut, processes killed by
SIGKILL, writes refused by the kernel. Each has a control that shows the fault would bite. Killed or
failing saves are tried for both forms of a checkpoint, a file and a folder of shards.
"""

import errno
import hashlib
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from support.base.runtime import exit_cleanly
from support.run import checkpoint, sharded_checkpoint

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


def test_every_dtype_returns_bitwise(tmp_path):
    raw = torch.randint(0, 2, (8, 6), generator=torch.Generator().manual_seed(0))
    names = "float64 float32 bfloat16 float16 float8_e4m3fn int64 int32 int16 uint8 uint16 bool"
    tensors = {name: raw.to(getattr(torch, name)) for name in names.split()}
    loaded = checkpoint.load(checkpoint.save(tmp_path, tensors, step=0))
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == (8, 6)
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


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


def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path):
    first = checkpoint.save(tmp_path, {"out": "runs/a"}, step=1)
    with pytest.raises(pickle.UnpicklingError, match="pathlib"):
        checkpoint.save(tmp_path, {"out": Path("runs/a")}, step=2, best=True)
    assert names(tmp_path) == [first.name]
    torch.save({"out": Path("runs/a")}, tmp_path / "control.pt")  # torch alone writes it gladly


def test_plain_torch_load_opens_it_and_the_trailer_is_its_digest(saved):
    for mmap in (False, True):
        state = torch.load(saved, weights_only=True, mmap=mmap)
        assert torch.equal(state["weight"], torch.arange(1000.0)) and state["step"] == 7
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


def test_bytes_reach_the_disk_before_names_and_best_before_its_step(tmp_path, monkeypatch):
    """A power cut may undo what no fsync has confirmed: the order of the calls is the promise."""
    calls, fsync, replace, rename = [], os.fsync, os.replace, Path.rename

    def record_sync(descriptor):
        status = os.fstat(descriptor)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(descriptor)

    def record_replace(source, target):
        calls.append(Path(target).name)
        replace(source, target)

    def record_rename(source, target):
        calls.append(Path(target).name)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(Path, "rename", record_rename)
    path = checkpoint.save(tmp_path, {"weight": torch.ones(10)}, step=1, best=True)
    names_and_files = [call for call in calls if call != "folder"]
    assert names_and_files == [path.stat().st_size, "best.pt", path.name]
    assert calls[-1] == "folder"


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
    monkeypatch.setattr(checkpoint, "verify", lambda file: None)
    assert checkpoint.load(saved)["weight"][5] == -5


def test_the_message_shows_both_digests_and_the_previous_file(tmp_path):
    checkpoint.save(tmp_path, {"a": 1}, step=1)
    path = checkpoint.save(tmp_path, {"a": 2}, step=2)
    expected = path.read_bytes()[-64:].decode()
    flip(path, 100, 0)
    found = hashlib.sha256(path.read_bytes()[:-TRAILER_BYTES]).hexdigest()
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert_one_line(error, str(path), expected[:12], found[:12], "use previous")
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


def test_a_zeroed_or_a_lengthened_tail_is_found(saved):
    whole = saved.read_bytes()
    for zeros in (1, 64, 72, 500, 4096):
        for damaged in (whole[:-zeros] + bytes(zeros), whole + bytes(zeros), bytes(len(whole))):
            saved.write_bytes(damaged)
            with pytest.raises(ValueError, match=DAMAGE):
                checkpoint.load(saved)


def test_a_foreign_or_a_missing_file_is_named(tmp_path):
    torch.save({"a": 1}, tmp_path / "foreign.pt")
    for name, said in (("foreign.pt", "no sha256 trailer"), ("gone.pt", "No such file")):
        with pytest.raises(ValueError) as error:
            checkpoint.load(tmp_path / name)
        assert_one_line(error, str(tmp_path / name), said)


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


def test_signed_rubbish_is_one_line(tmp_path):
    for body in (b"", b"PK\x03\x04", b"not a checkpoint at all", bytes(5000)):
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
    assert not (tmp_path / "best.pt").samefile(tmp_path / "step-00000060.pt")


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


def test_best_shares_the_bytes_on_disk_or_is_a_copy_where_links_are_not_supported(
    tmp_path, monkeypatch
):
    path = checkpoint.save(tmp_path / "links", {"a": 1}, step=1, best=True)
    assert path.samefile(path.with_name("best.pt"))
    synced, fsync = [], os.fsync

    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    def record_sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", record_sync)
    path = checkpoint.save(tmp_path / "copies", {"a": 1}, step=1, best=True)
    best = path.with_name("best.pt")
    assert {path.stat().st_ino, best.stat().st_ino} <= set(synced)
    assert best.read_bytes() == path.read_bytes() and not best.samefile(path)
    assert names(path.parent) == ["best.pt", path.name]


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
        with pytest.raises(ValueError, match="is a checkpoint, not the folder of a run"):
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


def test_an_impossible_step_is_refused_before_anything_is_written(tmp_path):
    for step in (-1, 10**8):
        with pytest.raises(ValueError, match=f"step={step}: allowed are 0 to 99999999"):
            checkpoint.save(tmp_path / "run", {}, step=step)
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_saved(folder_with_one):
    folder, before = folder_with_one
    good = {"wte": torch.full((9,), 1e38), "empty": torch.zeros(0), "ids": torch.arange(3)}
    for value in (float("nan"), float("inf"), -float("inf")):
        for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e5m2"):
            bad = torch.ones(3, 100).to(getattr(torch, dtype))
            bad[1, 50] = value
            with pytest.raises(ValueError) as error:
                checkpoint.save(folder, {"model": good | {"h.0.w": bad}}, step=2, best=True)
            assert_one_line(error, "step-00000002.pt: not written: weights are not finite: h.0.w;")
            assert_nothing_changed(folder, before)
    assert checkpoint.save(folder, {"model": good, "best": value}, step=2).exists()


def test_of_many_bad_tensors_three_are_named(tmp_path):
    weights = {f"h.{layer}": torch.full((2,), float("nan")) for layer in range(12)}
    with pytest.raises(ValueError, match=r"not finite: h\.0, h\.1, h\.2 and 9 more;"):
        checkpoint.save(tmp_path / "run", {"model": weights}, step=1)
    assert not (tmp_path / "run").exists()


def test_leftovers_give_their_room_back_before_the_next_write_and_nothing_else_goes(
    tmp_path, monkeypatch
):
    others = ["log.jsonl", "step-0000001.pt", "tmp-a", "step-abcdefgh.pt", ".log.tmp"]
    for name in (*others, ".step-00000001.pt.tmp", ".best.pt.tmp", ".trunk.pt.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".step-00000001.sharded.tmp").mkdir()
    found, write = [], checkpoint.write_file

    def watching(path, state):
        found.extend(names(tmp_path))
        write(path, state)

    monkeypatch.setattr(checkpoint, "write_file", watching)
    path = checkpoint.save(tmp_path, {}, step=2, keep=1)
    assert found == sorted(others)
    assert names(tmp_path) == sorted([*others, path.name])


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


def assert_nothing_changed(folder: Path, before: dict[str, bytes]) -> None:
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.fixture
def folder_with_one(tmp_path):
    checkpoint.save(tmp_path, {"step": 1}, step=1, best=True)
    return tmp_path, {file.name: file.read_bytes() for file in tmp_path.iterdir()}


@contextmanager
def file_size_limit(size: int):
    """Let the kernel refuse (EFBIG) all that goes beyond so many bytes in one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_kernel_refuses_changes_nothing(folder_with_one):
    folder, before = folder_with_one
    whole = checkpoint.save(folder / "measure", STATE, step=2).stat().st_size
    shutil.rmtree(folder / "measure")
    for size in (0, 5000, 200_500, 400_500, whole - 1):
        with file_size_limit(size), pytest.raises(ValueError) as error:
            checkpoint.save(folder, STATE, step=2, keep=1, best=True)
        assert_one_line(error, "step-00000002.pt: not written: File too large")
        assert_one_line(error, "(needs 400,000 bytes,", " free); older ones are untouched")
        assert_nothing_changed(folder, before)


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


# ---- faults between any two calls that change the disk


def save_file(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, faulty_state(step), step=step, keep=1, best=True)


def save_folder(folder: Path, step: int) -> Path:
    alone = sharded_checkpoint.ALONE
    return sharded_checkpoint.save(folder, faulty_state(step), alone, step=step, keep=1, best=True)


def faulty_state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}}


CALLS = [(os, "fsync"), (os, "replace"), (os, "link"), (os, "mkdir"), (shutil, "rmtree")]
CALLS += [
    (os, "rmdir"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "open"),
    (checkpoint.Hashing, "write"),
]


def count_calls(patch, fault: Callable[[int], None]) -> None:
    """Before each call of CALLS, have `fault` look at its number."""
    made = itertools.count(1)

    def counted(place, name):
        real = getattr(place, name)

        def call(*args, **more):
            if name != "write" or len(args[1]) >= 400:  # the weight, and no header of the archive
                fault(next(made))
            return real(*args, **more)

        patch(place, name, call)

    for place, name in CALLS:
        counted(place, name)


def kill_at(number: int, save: Callable, folder: Path) -> None:
    def kill(call: int) -> None:
        if call == number:
            os.kill(os.getpid(), signal.SIGKILL)

    count_calls(setattr, kill)
    save(folder, 8)
    os._exit(0)


def assert_whole(folder: Path) -> None:
    """Every checkpoint can be read, and together they are those of the old save or of the new."""
    steps = {}
    for word, path in checkpoint.words_in(folder).items():
        state = sharded_checkpoint.load(path)
        assert torch.equal(state["model"]["weight"], faulty_state(state["step"])["model"]["weight"])
        steps[word] = state["step"]
    for path in folder.glob("[!.]*"):
        sharded_checkpoint.load(path)
    # a run that resumes from step 7 comes by best 8 again; one from step 8 would not
    assert steps["last"] in (7, 8) and steps["last"] <= steps["best"] <= 8


@pytest.mark.parametrize("save", [save_file, save_folder])
def test_killed_at_any_change_every_checkpoint_is_whole(tmp_path, save):
    save(tmp_path / "old", 7)
    context = multiprocessing.get_context("fork")  # it need not import torch again
    for number in range(1, 100):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        process = context.Process(target=kill_at, args=(number, save, folder))
        process.start()
        process.join()
        assert_whole(folder)
        last = save(folder, 9)
        assert len(names(folder)) == 2 and checkpoint.find(folder, "last") == last
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert number > 9


def test_control_written_in_place_the_same_kills_tear_the_file(tmp_path):
    path = tmp_path / "last.pt"

    def save_in_place(folder: Path, step: int) -> None:
        with path.open("wb") as file:
            torch.save(faulty_state(step), checkpoint.Hashing(file))

    context = multiprocessing.get_context("fork")
    process = context.Process(target=kill_at, args=(2, save_in_place, tmp_path))
    process.start()
    process.join()
    with pytest.raises((RuntimeError, EOFError)):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize("save", [save_file, save_folder])
def test_a_save_that_fails_at_any_change_leaves_the_older(tmp_path, save, monkeypatch):
    save(tmp_path / "old", 7)
    refusals = 0
    for number in range(1, 100):
        folder, calls = shutil.copytree(tmp_path / "old", tmp_path / str(number)), []

        def fail(call: int, number: int = number, calls: list = calls) -> None:
            calls.append(call)
            if call == number:
                raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            count_calls(patch.setattr, fail)
            try:
                save(folder, 8)
            except ValueError as error:
                assert "Input/output error" in str(error) and "\n" not in str(error)
                refusals += 1
        assert_whole(folder)
        if number > len(calls):
            break
    assert refusals > 4
