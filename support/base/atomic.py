"""Files and folders that appear whole or not at all, and a lock that keeps two writers apart.

Output is written under a temporary name (hidden, ending in .tmp) beside the final one, forced to
the disk and only then renamed, so a final name never stands for half a file, however the process
ends. Only a kill or a power failure leaves a temporary name behind.
"""

import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file to write; it gets its name when the block ends without an error.

    The temporary name is always the same, so the next write replaces what a killed one left. If two
    processes may write the same file, hold `folder_lock`.

    Raises:  ValueError naming the file if it cannot be written
    Example: with atomic_write(folder / "table.bin") as out: out.write(array)
    """
    unfinished = file.with_name(f".{file.name}.tmp")
    with _renamed(unfinished, file), unfinished.open("wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder to fill; it becomes `folder` when the block ends without an error.

    If two processes make the same folder, the first to finish wins; the other gets an error and
    leaves nothing.

    Raises: ValueError naming the folder if it cannot be written
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    with _renamed(unfinished, folder):
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
    sync(folder.parent)  # the rename itself


@contextmanager
def _renamed(unfinished: Path, final: Path) -> Iterator[None]:
    """Rename `unfinished` at the end, or remove it and have the error name `final`.

    An error about any other file, such as one that is read, is raised unchanged.
    """
    try:
        yield
        unfinished.rename(final)
    except OSError as error:
        if error.filename is None or Path(str(error.filename)).is_relative_to(unfinished):
            reason = error.strerror or error
            raise ValueError(f"{final}: not written: {reason}") from None
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):
            unfinished.unlink()


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process holds this folder, then hold it while the block runs.

    The other process may have made what this one is about to make: look again inside the block.
    """
    directory = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes into {folder}", file=sys.stderr)
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)  # a process forked meanwhile still has it open
        os.close(directory)
