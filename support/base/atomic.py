"""Files and folders that appear whole or not at all, and a lock that keeps two writers apart.

What is written stands under a temporary name (hidden, ending in .tmp) in the folder of the final
one, every byte is forced to the disk, and only then it is renamed: whatever stops the process, a
final name is never half a file. Only a kill or a power cut leaves a temporary name behind.
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
    """Give a file to write to; it gets its name when the block ends without an error.

    The temporary name is the same each time, so that the next write replaces what a killed one
    left. Where two processes may write the same file, hold `folder_lock`.

    Raises:   ValueError naming the file, where it cannot be written
    Example:  with atomic_write(folder / "table.bin") as out: out.write(array)
    """
    unfinished = file.with_name(f".{file.name}.tmp")
    try:
        with unfinished.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(file)
    except OSError as error:
        raise _not_written(file, unfinished, error) from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes `folder` when the block ends without an error.

    Of two processes that make the same folder, the first to finish wins; the other one gets an
    error and leaves nothing.

    Raises:   ValueError naming the folder, where it cannot be written
    """
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        unfinished.rename(folder)
        sync(folder.parent)  # the rename itself
    except OSError as error:
        raise _not_written(folder, unfinished, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _not_written(path: Path, unfinished: Path, error: OSError) -> Exception:
    """Name what was being written, where the error names nothing or the temporary name.

    An error that names another file, as one of reading does, is returned as it is.
    """
    if error.filename is None or Path(str(error.filename)).is_relative_to(unfinished):
        return ValueError(f"{path}: not written: {error.strerror or error}")
    return error


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

    The process waited for may have made what this one is about to make: look again inside.
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
