"""Files and folders that appear whole or not at all, and a lock that keeps two writers apart.

Output is written under a temporary name (hidden, ending in .tmp) beside the final one, forced to
the disk and only then renamed, so a final name never stands for half a file, however the process
ends. Only a kill or a power failure leaves a temporary name behind.
"""

import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    leaves nothing. What a killed process left under a temporary name is deleted by the next one.

    Raises: ValueError naming the folder if it cannot be written
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        with suppress(ValueError, OSError), folder_lock(left, "it is being written"):
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as held, _renamed(unfinished, folder):
        unfinished.mkdir(parents=True)
        held.enter_context(folder_lock(unfinished))
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
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.exists():
            raise ValueError(f"{final}: another process has made it meanwhile") from None
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
def folder_lock(folder: Path, instead: str | None = None) -> Iterator[None]:
    """Wait until no other process holds this folder, then hold it while the block runs.

    The other process may have made what this one is about to make: look again inside the block. The
    lock dies with its process.

    Args:   instead what the user can do about a folder that is held; with it, nobody waits
    Raises: ValueError for such a folder
    """
    directory = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if instead:
                raise ValueError(f"{folder} is held by another process: {instead}") from None
            print(f"waiting for another process that writes into {folder}", file=sys.stderr)
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)  # a process forked meanwhile still has it open
        os.close(directory)
