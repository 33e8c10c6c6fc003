"""A file or a folder has its name when it is whole; a lock keeps a second writer waiting."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import names

from support.base.atomic import atomic_folder, atomic_write, folder_lock


def test_all_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, Path.rename

    def record_sync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(path, target):
        calls.append(f"rename to {Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    (tmp_path / "a.bin").write_bytes(b"old")
    with atomic_write(tmp_path / "a.bin") as out:
        out.write(b"new")
        assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert calls == [Path(out.name).name, "rename to a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"new"
    calls.clear()
    with atomic_folder(tmp_path / "new" / "f") as unfinished:
        (unfinished / "deeper").mkdir()
        (unfinished / "deeper" / "b").write_bytes(b"b")
        assert not (tmp_path / "new" / "f").exists()
    assert set(calls[:3]) == {"deeper", "b", unfinished.name}
    assert calls[3:] == ["rename to f", "new"]
    assert names(tmp_path / "new") == ["f"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["block", "fsync", "rename"])
@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_an_error_leaves_nothing(tmp_path, monkeypatch, call, write):
    if call != "block":
        monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    said = f"^{tmp_path / 'a'}: not written: No space left on device$"
    with pytest.raises(ValueError, match=said), write(tmp_path / "a") as out:
        out.write(b"half") if write is atomic_write else (out / "b").write_bytes(b"b")
        if call == "block":
            full()
    assert names(tmp_path) == []


def test_a_folder_that_was_made_meanwhile_is_not_replaced(tmp_path):
    said = "f: another process has made it meanwhile"
    with pytest.raises(ValueError, match=said), atomic_folder(tmp_path / "f"):
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["f", "theirs"]


def write_locked(folder: Path, content: bytes, seconds: float) -> None:
    with folder_lock(folder), atomic_write(folder / "a.bin") as out:
        out.write(content)
        out.flush()
        (folder / "started").touch()
        time.sleep(seconds)


def test_a_lock_holds_until_its_process_is_gone(tmp_path):
    context = multiprocessing.get_context("fork")
    first = context.Process(target=write_locked, args=(tmp_path, b"half", 60))
    second = context.Process(target=write_locked, args=(tmp_path, b"the second", 0))
    first.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(ValueError, match="is held by another"), folder_lock(tmp_path, wait=False):
        pass
    second.start()
    second.join(0.3)
    assert second.is_alive(), "it waits"
    first.kill()
    first.join()
    second.join(30)
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert (tmp_path / "a.bin").read_bytes() == b"the second"


def test_an_error_of_a_file_that_is_read_names_that(tmp_path):
    for write in (atomic_write, atomic_folder):
        with pytest.raises(FileNotFoundError) as caught, write(tmp_path / "a"):
            (tmp_path / "input").read_bytes()
        assert caught.value.filename == str(tmp_path / "input")
