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


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_has_its_name_when_it_is_whole_and_replaces_what_a_kill_left(tmp_path):
    file, left = tmp_path / "a.bin", tmp_path / ".a.bin.tmp"
    file.write_bytes(b"old")
    left.write_bytes(b"much longer than the new one")
    (tmp_path / "a.tmp").touch()  # the user's
    with atomic_write(file) as out:
        out.write(b"new")
        assert file.read_bytes() == b"old" and left.exists()
    assert file.read_bytes() == b"new" and names(tmp_path) == ["a.bin", "a.tmp"]


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
    with atomic_write(tmp_path / "a.bin") as out:
        out.write(b"a")
    assert calls == [".a.bin.tmp", "rename to a.bin"]
    calls.clear()
    with atomic_folder(tmp_path / "new" / "f") as unfinished:
        (unfinished / "deeper").mkdir()
        (unfinished / "deeper" / "b").write_bytes(b"b")
        assert not (tmp_path / "new" / "f").exists()
    assert set(calls[:3]) == {"deeper", "b", unfinished.name}
    assert calls[3:] == ["rename to f", "new"]
    assert names(tmp_path / "new") == ["f"]
    assert (tmp_path / "new" / "f" / "deeper" / "b").read_bytes() == b"b"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_inside_leaves_nothing(tmp_path, error):
    for write in (atomic_write, atomic_folder):
        with pytest.raises(error), write(tmp_path / "a") as out:
            out.write(b"half") if write is atomic_write else (out / "b").write_bytes(b"b")
            raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_names_what_was_being_written(tmp_path, monkeypatch, call):
    if call != "write":
        monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    target = tmp_path / "a"
    for write in (atomic_write, atomic_folder):
        said = f"^{target}: not written: No space left on device$"
        with pytest.raises(ValueError, match=said), write(target):
            if call == "write":
                full()
    assert names(tmp_path) == []


def test_an_error_names_the_users_file_or_another_one_that_it_is_about(tmp_path):
    missing = tmp_path / "none" / "a.bin"
    said = f"^{missing}: not written: No such file or directory$"
    with pytest.raises(ValueError, match=said), atomic_write(missing):
        pass
    said = f"^{tmp_path / 'f'}: not written: No such file or directory$"
    with pytest.raises(ValueError, match=said), atomic_folder(tmp_path / "f") as unfinished:
        (unfinished / "none" / "b").write_bytes(b"b")
    for write in (atomic_write, atomic_folder):
        with pytest.raises(FileNotFoundError) as caught, write(tmp_path / "a"):
            (tmp_path / "input").read_bytes()
        assert caught.value.filename == str(tmp_path / "input")


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


def test_a_lock_holds_until_its_process_is_gone(tmp_path, capfd):
    context = multiprocessing.get_context("fork")
    first = context.Process(target=write_locked, args=(tmp_path, b"half", 60))
    second = context.Process(target=write_locked, args=(tmp_path, b"the second", 0))
    first.start()
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the folder is held"
    first.kill()
    first.join()
    second.join(30)
    assert (first.exitcode, second.exitcode) == (-signal.SIGKILL, 0)
    assert f"waiting for another process that writes into {tmp_path}" in capfd.readouterr().err
    assert (tmp_path / "a.bin").read_bytes() == b"the second"
    assert names(tmp_path) == ["a.bin", "started"]
