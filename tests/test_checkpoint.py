"""A checkpoint, file or folder, is whole or absent, and a damaged one is never believed.

Faults are real where that is possible in seconds: bits flipped, files cut, processes killed by
SIGKILL, writes refused by the kernel. Each has a control that shows the fault would bite. What
several ranks do together is in tests/test_sharded.py.
"""

import errno
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from conftest import contents, names, refusal_of
from hypothesis import given
from hypothesis import strategies as st

from support.run import checkpoint
from support.run.checkpoint import ALONE, find, joined, load, main, outlined, save, split

TRAILER_BYTES = 72
DAMAGE = r"is damaged|no sha256 trailer"
FORMS = pytest.mark.parametrize("form", [None, ALONE], ids=["file", "folder"])


def refused(action: Callable, *parts: str) -> str:
    with pytest.raises(ValueError) as error:
        action()
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in parts)
    return str(error.value)


def state_of(step: int = 7) -> dict:
    generator = torch.Generator().manual_seed(step)
    embedding, raw = torch.randn(65, 8, generator=generator), torch.ones(5, 4) * step
    names = "float64 bfloat16 float16 float8_e4m3fn int64 int32 int16 uint8 uint16 bool"
    return {
        "model": {"wte": embedding, "head": embedding, "again": embedding[:], "empty": raw[:0]},
        "optimizers": {"wte": {"step": torch.tensor(3.0), "exp_avg": embedding * 2}},
        "dtypes": {name: raw.to(getattr(torch, name)) for name in names.split()},
        "transposed": torch.arange(60.0).view(3, 4, 5).transpose(0, 2),
        "strided": torch.arange(60.0).view(3, 4, 5)[:, ::2, 1:],
        "step": step,
        "best": float("inf"),
        "config": {"layers": (1, [2.0, ()]), "argv": ["--fsdp"], 5: None, "big": 2**70},
        "text": "ä\n\0" * 3,
        "bytes": b"\x00\xff",
        "yes": True,
    }


def flattened(value: object, name: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {name: value}
    inner = [flattened(more, f"{name}/{key!r}") for key, more in value.items()]
    return {key: leaf for part in inner for key, leaf in part.items()}


def assert_equal(loaded: dict, wanted: dict) -> None:
    ours, theirs = flattened(loaded), flattened(wanted)
    assert list(ours) == list(theirs), "also in this order"
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
            a, b = (t.reshape(-1).contiguous().view(torch.uint8) for t in (ours[name], value))
            assert torch.equal(a, b), name
        else:
            assert ours[name] == value and type(ours[name]) is type(value), name


def written_by(ranks: int, folder: Path, state: dict, save_id: str = "one") -> Path:
    """A checkpoint as FSDP2's ranks write it: each has its chunk of every tensor's rows."""
    folder.mkdir()
    outline, rows = split(state, is_rank0=True)
    for rank in range(ranks):
        chunks = {name: (*rows[name].chunk(ranks), *[rows[name][:0]] * ranks) for name in rows}
        own = {name: chunks[name][rank].clone() for name in rows}
        name = checkpoint.name_of(rank, ranks)
        content = {"save": save_id, "file": name, "state": outline if rank == 0 else None}
        checkpoint.write_file(folder / name, content | {"rows": own})
    return folder


@pytest.fixture
def saved(tmp_path):
    """One small file: 4,000 bytes of weights, a few hundred of everything else."""
    return save(tmp_path, {"weight": torch.arange(1000, dtype=torch.float32), "step": 7}, step=7)


@pytest.mark.parametrize("ranks", [0, 1, 3, 7])
def test_what_was_saved_returns(tmp_path, ranks):
    """From a file, or a folder: of 5 rows seven ranks have one or none, of none all have none."""
    if ranks:
        path = written_by(ranks, tmp_path / "a.sharded", state_of())
    else:
        path = save(tmp_path, state_of(), step=7)
    outline = outlined(path)
    assert outline["step"] == 7 and outline["model"]["wte"].shape == (65, 8)
    state = load(path)
    shutil.rmtree(tmp_path)
    assert_equal(state, state_of())  # nothing is left in the files
    state["model"]["wte"][0, 0] = 5
    assert state["model"]["head"][0, 0] == state["model"]["again"][0, 0] == 5, "tied"
    assert state["optimizers"]["wte"]["exp_avg"][0, 0] != 5


def test_tied_tensors_and_padding_are_not_written(tmp_path):
    padded = torch.randn(1000, 8)
    (file,) = save(tmp_path, {"model": {"w": padded[:5], "v": padded[:5]}}, ALONE, step=1).iterdir()
    assert list(torch.load(file, weights_only=True)["rows"]) == ["model/w"]
    assert file.stat().st_size < 4000


@FORMS
def test_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path, form):
    first = save(tmp_path, {"step": 1}, form, step=1, best=True)
    before = contents(tmp_path)
    bad = {"out": Path("runs/a")}
    refused(lambda: save(tmp_path, bad, form, step=2, best=True), "not written", "pathlib")
    torch.save(bad, io.BytesIO())  # torch alone writes it gladly
    good = {"wte": torch.full((9,), 1e38), "empty": torch.zeros(0), "ids": torch.arange(3)}
    said = "not finite: h.0, h.1, h.2 and 9 more;"
    for value, dtype in ((math.nan, torch.bfloat16), (-math.inf, torch.float8_e5m2)):
        bad = torch.ones(3, 100).to(dtype)
        bad[1, 50] = value
        state = {"model": good | {f"h.{layer}": bad.clone() for layer in range(12)}}
        refused(lambda state=state: save(tmp_path, state, form, step=2, best=True), said)
    assert contents(tmp_path) == before and first.exists()
    assert save(tmp_path, {"model": good, "best": value}, form, step=2).exists()
    for step in (-1, 10**8):
        refused(lambda step=step: save(tmp_path / "run", {}, form, step=step), f"step={step}")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="head -c -N is GNU's")
def test_plain_torch_load_opens_it_and_the_shell_verifies_it(saved):
    for mmap in (False, True):
        state = torch.load(saved, weights_only=True, mmap=mmap)
        assert torch.equal(state["weight"], torch.arange(1000.0)) and state["step"] == 7
    whole = saved.read_bytes()
    body, trailer = whole[:-TRAILER_BYTES], whole[-TRAILER_BYTES:]
    assert trailer == b"\nsha256:" + hashlib.sha256(body).hexdigest().encode()
    command = f"head -c -72 {saved} | sha256sum;  tail -c 64 {saved}"
    assert command.replace(str(saved), "runs/a/step-00001234.pt") in checkpoint.__doc__
    first, second = subprocess.check_output(command, shell=True, text=True).splitlines()
    assert first.split()[0] == second


@pytest.mark.parametrize("has_links", [True, False])
@FORMS
def test_bytes_reach_the_disk_before_names_and_best_before_its_step(
    tmp_path, monkeypatch, form, has_links
):
    """A power cut may undo what no fsync has confirmed: the order of the calls is the promise.

    The best shares its step's bytes, or is a copy where a file system has no links.
    """
    calls = []

    def record(owner, name, what):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(what(*args)) or real(*args))

    def no_links(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    record(os, "fsync", lambda descriptor: os.fstat(descriptor).st_ino)
    record(os, "replace", lambda source, target: target.name)
    record(Path, "rename", lambda source, target: target.name)
    monkeypatch.setattr(os, "link", os.link if has_links else no_links)
    path = save(tmp_path, {"a": 1}, form, step=1, best=True)
    best = checkpoint.second_name(path, "best")
    ours, theirs = (checkpoint.files_of(p)[0] for p in (path, best))
    assert ours.samefile(theirs) == has_links and ours.read_bytes() == theirs.read_bytes()
    assert calls.index(best.name) < calls.index(path.name) and len(names(tmp_path)) == 2
    for file, name in ((theirs, best.name), (ours, path.name)):
        assert calls.index(file.stat().st_ino) < calls.index(name)
    assert calls[-1] == tmp_path.stat().st_ino


# ---- damage


def test_a_flipped_bit_or_a_cut_anywhere_is_noticed(saved):
    whole = saved.read_bytes()
    size, data = len(whole), whole.index(torch.arange(1000.0).numpy().tobytes())
    ends = {*range(40), *range(data, data + 40), *range(size - TRAILER_BYTES - 40, size)}
    damages = []
    for position in sorted(ends | set(range(0, size, 97))):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        damages += [flipped, whole[:position]]
    for zeros in (1, 64, 72, 500, 4096):
        damages += [whole[:-zeros] + bytes(zeros), whole + bytes(zeros)]
    for damaged in [*damages, bytes(size)]:
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match=DAMAGE) as error:
            load(saved)
        assert str(saved) in str(error.value) and "\n" not in str(error.value)


@FORMS
def test_control_without_the_digest_a_flipped_weight_loads_in_silence(tmp_path, monkeypatch, form):
    path = save(tmp_path, {"weight": torch.arange(1000.0)}, form, step=7)
    (file,) = checkpoint.files_of(path)
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(torch.arange(1000.0).numpy().tobytes()) + 4 * 5 + 3] ^= 128  # a sign
    file.write_bytes(damaged)
    torch.load(file, weights_only=True)
    refused(lambda: load(path), "damaged")
    monkeypatch.setattr(checkpoint, "verify", lambda file: None)
    assert load(path)["weight"][4:7].tolist() == [4, -5, 6]


def test_what_is_read_is_what_was_verified(tmp_path, monkeypatch):
    path, verify = save(tmp_path, state_of(), step=7), checkpoint.verify

    def verify_and_replace(file):
        verify(file)
        save(tmp_path, state_of(8), step=7)

    monkeypatch.setattr(checkpoint, "verify", verify_and_replace)
    refused(lambda: load(path), "was replaced while it was read")


def test_any_damaged_or_missing_file_of_a_folder_is_named(tmp_path):
    """Also one of another save, of other ranks, and a rank's file in place of another's."""
    path = written_by(2, tmp_path / "a.sharded", {"model": {"w": torch.randn(9, 9)}})
    other = written_by(2, tmp_path / "other.sharded", state_of(8), "other")
    three = written_by(3, tmp_path / "three.sharded", state_of(8), "three")
    before = contents(path)
    for file, whole in before.items():
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        for damaged, said in ((flipped, "is damaged"), (whole[:-1], "has no sha256 trailer")):
            file.write_bytes(damaged)
            refused(lambda: load(path), str(path), f"{file.name} {said}", "start a new run")
        file.unlink()
        refused(lambda: load(path), f"{file.name} is missing")
        file.write_bytes(whole)
    shutil.copy(three / "rank-2-of-3.pt", path)
    refused(lambda: load(path), "rank-0-of-3.pt is missing")
    (path / "rank-2-of-3.pt").unlink()
    for source in (other / "rank-1-of-2.pt", path / "rank-0-of-2.pt"):
        shutil.copy(source, path / "rank-1-of-2.pt")
        refused(lambda: load(path), "rank-1-of-2.pt is not of the same save as rank-0")


@FORMS
def test_the_remedy_names_what_has_other_bytes(tmp_path, form):
    path = save(tmp_path, {"a": 1}, form, step=1, best=True)
    (file,) = checkpoint.files_of(path)
    digest = file.read_bytes()[-64:].decode()
    with file.open("r+b") as damaged:
        damaged.write(b"damaged")
    refused(lambda: load(path), digest[:12], "no other checkpoint")
    save(tmp_path, {"a": 2}, step=2)
    best = find(tmp_path, "best")
    assert refused(lambda: load(best), best.name, "is damaged").endswith("use last")


class Canary:
    """When unpickled, creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("form", ["zip", "folder", "legacy", "pickle"])
def test_a_malicious_pickle_is_refused_and_never_runs(tmp_path, form, monkeypatch):
    """Also with a correct trailer, which one who means harm can write."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # must not weaken us either
    canary, raw = tmp_path / "canary", io.BytesIO()
    state = {"rows": Canary(canary)}
    if form == "pickle":
        raw.write(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, raw, _use_new_zipfile_serialization=form != "legacy")
    path = save(tmp_path, {"a": 1}, ALONE if form == "folder" else None, step=1)
    body = raw.getvalue()
    checkpoint.files_of(path)[0].write_bytes(
        body + b"\nsha256:" + hashlib.sha256(body).hexdigest().encode()
    )
    for read in (load, outlined):  # without advice to switch the guard off
        assert "weights_only" not in refused(lambda read=read: read(path), str(path))
    assert not canary.exists()
    # control: the payload is live
    pickle.loads(body) if form == "pickle" else torch.load(io.BytesIO(body), weights_only=False)
    assert canary.exists()


def test_a_foreign_or_a_missing_file_and_signed_rubbish_are_one_line(tmp_path):
    torch.save({"a": 1}, tmp_path / "foreign.pt")
    signed = tmp_path / "signed.pt"
    for name, said in (("foreign.pt", "no sha256 trailer"), ("gone.pt", "No such file")):
        refused(lambda name=name: load(tmp_path / name), str(tmp_path / name), said)
    for body in (b"", b"PK\x03\x04", b"not a checkpoint at all", bytes(5000)):
        signed.write_bytes(body + b"\nsha256:" + hashlib.sha256(body).hexdigest().encode())
        refused(lambda: load(signed), str(signed), "start a new run")


# ---- beside others


def test_the_newest_and_the_best_are_kept_whichever_form_they_have(tmp_path):
    for step in range(1, 9):
        form = ALONE if step % 2 else None
        save(tmp_path, {"step": step}, form, step=step, best=step in (2, 5))
        steps = [f"step-{n:08d}{'.sharded' if n % 2 else '.pt'}" for n in (step - 1, step) if n]
        best = ["best-00000005.sharded" if step >= 5 else "best.pt"] if step > 1 else []
        assert names(tmp_path) == [*best, *steps]
    os.utime(tmp_path / steps[0], (2**31, 2**31))  # the order is that of steps, not of times
    assert find(tmp_path, "last").name == steps[1] and find(tmp_path, "previous").name == steps[0]
    assert load(find(tmp_path, "best")) == {"step": 5} and load(find(tmp_path, "last"))["step"] == 8
    assert find(tmp_path, str(tmp_path / steps[0])) == tmp_path / steps[0]
    save(tmp_path, {"step": 9}, step=9, keep=1)
    assert names(tmp_path) == ["best-00000005.sharded", "step-00000009.pt"]


def test_a_save_after_resuming_from_far_back_is_not_pruned(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, {"step": step}, step=step, keep=3)
    save(tmp_path, {"step": 150}, step=150, keep=1)
    assert names(tmp_path) == ["step-00000150.pt", "step-00000200.pt", "step-00000300.pt"]
    for step in (200, 300):  # the run passes its former self, and the rule of keep=1 is back
        save(tmp_path, {"step": step, "again": True}, step=step, keep=1)
    assert names(tmp_path) == ["step-00000300.pt"]


@FORMS
def test_a_second_save_of_a_step_replaces_the_first_and_not_the_best(tmp_path, form):
    path = save(tmp_path, {"try": 1}, form, step=5, best=True)
    with checkpoint.files_of(path)[0].open("rb") as reader:  # someone who is reading the first
        save(tmp_path, {"try": 2}, form, step=5)
        assert torch.load(reader, weights_only=True).get("state", {"try": 1}) == {"try": 1}
    assert load(path) == {"try": 2} and load(find(tmp_path, "best")) == {"try": 1}
    save(tmp_path, {"try": 3}, form, step=5, best=True)
    assert load(path) == load(find(tmp_path, "best")) == {"try": 3}
    assert len(names(tmp_path)) == 2


def test_find_never_takes_another_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    Path("last").write_text("a stray file, and last is a word")
    for which in ("last", "previous", "best", "x.pt"):
        refused(lambda which=which: find(folder, which), "run: no such folder")
    path = save(str(folder), {}, step=1)
    assert find(str(folder), "last") == path and find(tmp_path / "else", str(path)) == path
    for which in ("previous", "best", str(tmp_path)):
        refused(lambda which=which: find(folder, which), which, "last (step-00000001.pt)")
    assert find(folder, "last") == path
    for of_run in (path, save(folder, {}, ALONE, step=2)):
        refused(lambda of_run=of_run: find(of_run, "last"), "is a checkpoint, not the folder")


def test_leftovers_give_their_room_back_before_the_next_write_and_nothing_else_goes(
    tmp_path, monkeypatch
):
    others = ["log.jsonl", "step-0000001.pt", "tmp-a", "step-abcdefgh.pt", ".log.tmp"]
    for name in (*others, ".step-00000001.pt.tmp", ".best.pt.tmp", ".trunk.pt.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".step-00000001.sharded.tmp").mkdir()
    left, write = [], checkpoint.write_file
    monkeypatch.setattr(
        checkpoint, "write_file", lambda *args: left.extend(names(tmp_path)) or write(*args)
    )
    path = save(tmp_path, {}, step=2, keep=1)
    assert left == sorted(others) and names(tmp_path) == sorted([*others, path.name])


# ---- commands


def test_the_command_verifies_and_lists(tmp_path, capsys, monkeypatch):
    state = {"model": {"w": torch.zeros(500_000)}, "optimizer": [(torch.ones(10**6),)], "step": 34}
    for form in (None, ALONE):
        path = save(tmp_path, state, form, step=34)
        main([str(path)])
        first, *lines = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{path}: verified, 6.0") and first.endswith("step 34")
        assert [line.split()[0] for line in lines] == ["2.000", "4.000", "0.000"]
    (path / "rank-0-of-1.pt").write_bytes(b"")
    assert "no sha256" in refusal_of(main, ["checkpoint", str(path)], monkeypatch, capsys)


def test_as_a_folder_and_back_is_the_same_file(tmp_path, capsys):
    file, folder = save(tmp_path / "run", state_of(), step=7), tmp_path / "a.sharded"
    main([str(file), "--out", str(folder)])
    main(["--out", str(tmp_path / "a.pt"), str(folder)])
    assert_equal(load(tmp_path / "a.pt"), state_of())
    assert names(tmp_path) == ["a.pt", "a.sharded", "run"]
    assert capsys.readouterr().out.count("step 7") == 2
    main([str(tmp_path / "a.pt"), "--out", str(tmp_path / "b.sharded")])
    main([str(tmp_path / "b.sharded"), "--out", str(tmp_path / "b.pt")])
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    for argv, said in (
        (["nowhere", "--out", "x.pt"], "nowhere: No such file"),
        ([str(folder), "--out", str(file)], "--out"),
        ([str(tmp_path), "--out", "x.pt"], "has no file of any rank"),
        ([str(folder), "--out", "no/x.pt"], "no/x.pt: not written"),
    ):
        refused(lambda argv=argv: main(argv), said)


# ---- rows of ranks


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 7))
@hypothesis.settings(max_examples=50, deadline=None)
def test_ranks_together_take_every_row_once(counts, ranks):
    """By whatever numbers of rows the ranks before had; each takes as many as torch.chunk says."""
    whole = torch.arange(2 * sum(counts)).view(-1, 2)
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "of_rows", lambda rows, like: rows)
        for rank in range(ranks):
            mesh = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda rank=rank: rank)
            like = type("Like", (), {"device_mesh": mesh, "__len__": lambda self: len(whole)})()
            taken.append(joined(list(whole.split(counts)), like, torch.device("cpu")))
    assert torch.equal(torch.cat(taken), whole)
    chunks = (*whole.chunk(ranks), *[whole[:0]] * ranks)
    assert all(torch.equal(*pair) for pair in zip(taken, chunks, strict=False))


# ---- faults between any two calls that change the disk


def test_a_write_that_the_kernel_refuses_changes_nothing(tmp_path):
    """All that goes beyond so many bytes in one file (EFBIG)."""
    state = {"weight": torch.zeros(50_000), "more": [torch.ones(50_000)]}  # 400,000 bytes
    whole = save(tmp_path / "measure", state, step=2).stat().st_size
    folder = save(tmp_path / "run", {"step": 1}, step=1, best=True).parent
    before, limits = contents(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 5000, 200_500, 400_500, whole - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            refused(
                lambda: save(folder, state, step=2, keep=1, best=True),
                "step-00000002.pt: not written: File too large (needs 400,000 bytes,",
                " free); older ones are untouched",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(folder) == before


def save_faulty(folder: Path, form: object, step: int) -> Path:
    return save(folder, faulty_state(step), form, step=step, keep=1, best=True)


def faulty_state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}}


CALLS = [
    *((os, name) for name in ("fsync", "replace", "link", "mkdir", "rmdir")),
    *((Path, name) for name in ("rename", "unlink", "open")),
    (shutil, "rmtree"),
    (checkpoint.Hashing, "write"),
]


def at_call(patch: Callable, number: int, action: Callable) -> Iterator[int]:
    """Do something at this call of CALLS; next() of what returns is one more than were made."""
    made = itertools.count(1)

    def counted(place, name):
        real = getattr(place, name)

        def call(*args, **more):
            # write: the weight, and no header of the archive
            if (name != "write" or len(args[1]) >= 400) and next(made) == number:
                action()
            return real(*args, **more)

        patch(place, name, call)

    for place, name in CALLS:
        counted(place, name)
    return made


def kill_at(number: int, action: Callable, *args: object) -> int:
    """In a process of its own; its exit status."""

    def act() -> None:
        at_call(setattr, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        action(*args)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=act)  # need not import torch again
    process.start()
    process.join()
    return process.exitcode


def assert_whole(folder: Path) -> None:
    """Every checkpoint can be read, and together they are those of the old save or of the new."""
    for path in folder.glob("[!.]*"):
        state = load(path)
        assert torch.equal(state["model"]["weight"], faulty_state(state["step"])["model"]["weight"])
    last, best = (load(find(folder, word))["step"] for word in ("last", "best"))
    # a run that resumes from step 7 comes by best 8 again; one from step 8 would not
    assert last in (7, 8) and last <= best <= 8


@FORMS
def test_killed_at_any_change_every_checkpoint_is_whole(tmp_path, form):
    save_faulty(tmp_path / "old", form, 7)
    for number in range(1, 100):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        status = kill_at(number, save_faulty, folder, form, 8)
        assert_whole(folder)
        last = save_faulty(folder, form, 9)
        assert len(names(folder)) == 2 and find(folder, "last") == last
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert number > 9


def test_control_written_in_place_the_same_kills_tear_the_file(tmp_path):
    path = tmp_path / "last.pt"

    def save_in_place() -> None:
        with path.open("wb") as file:
            torch.save(faulty_state(8), checkpoint.Hashing(file))

    assert kill_at(2, save_in_place) == -signal.SIGKILL
    with pytest.raises((RuntimeError, EOFError)):
        torch.load(path, weights_only=True)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


@FORMS
def test_a_save_that_fails_at_any_change_leaves_the_older(tmp_path, form, monkeypatch, capsys):
    """What cannot be deleted is a warning, and goes with the next save."""
    save_faulty(tmp_path / "old", form, 7)
    refusals = warnings = 0
    for number in range(1, 100):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        with monkeypatch.context() as patch:
            made = at_call(patch.setattr, number, fail)
            try:
                save_faulty(folder, form, 8)
            except ValueError as error:
                assert "Input/output error" in str(error) and "\n" not in str(error)
                refusals += 1
        warnings += "cannot be deleted: Input/output error" in capsys.readouterr().err
        assert_whole(folder)
        save_faulty(folder, form, 9)
        assert len(names(folder)) == 2
        if next(made) <= number:
            break
    assert refusals > 4 and warnings
