"""Files and folders that appear whole or not at all, and a lock that keeps two writers apart.

Output is written under a temporary name (hidden, ending in .tmp) beside the final one, forced to
the disk and only then renamed, so a final name never stands for half a file, however the process
ends. Only a kill or a power failure leaves a temporary name behind.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file to write; it gets its name when the block ends without an error.

    Example: with atomic_write(folder / "table.bin") as out: out.write(array)
    """
    unfinished = hidden(file)
    try:
        with refusing(file, unfinished):
            with unfinished.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            unfinished.rename(file)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder to fill; it becomes `folder` when the block ends without an error.

    If two processes make the same folder, the first to finish wins.

    Raises: ValueError in the other one, which leaves nothing
    """
    unfinished = hidden(folder)
    try:
        with refusing(folder, unfinished):
            unfinished.mkdir(parents=True)
            yield unfinished
            for path in (*unfinished.rglob("*"), unfinished):
                sync(path)
            if folder.exists():
                raise ValueError(f"{folder}: another process has made it meanwhile")
            unfinished.rename(folder)
            sync(folder.parent)  # the rename itself
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def refusing(final: Path, unfinished: Path) -> Iterator[None]:
    """Have an error of writing, but not of another file that is read, name what was to be made."""
    try:
        yield
    except OSError as error:
        if error.filename and not Path(error.filename).is_relative_to(unfinished):
            raise
        raise ValueError(f"{final}: not written: {error.strerror}") from None


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold this folder while the block runs; the lock ends with its process.

    Another process may have made what this one is about to make: look again inside the block.

    Raises: ValueError if another process holds it, unless this one shall wait for it
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = True
    except BlockingIOError:
        held = False
    try:
        if not held:
            raise ValueError(f"{folder} is held by another process: wait for its end, or stop it")
        yield
    finally:
        os.close(descriptor)
