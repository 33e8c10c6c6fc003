"""Files and folders that appear whole or not at all, and the lock that keeps two writers apart."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Write a file that has its name only when all of it is on the disk.

    Raises:   ValueError naming the file, where the disk takes no more
    """
    unfinished = file.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(file)
    except OSError as error:
        raise ValueError(f"{file}: not written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into this folder; it may have made what is wanted."""
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
