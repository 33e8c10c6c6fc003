"""Checkpoints: one dictionary in one file, written whole or not at all, verified when it is read.

    byte 0                                    n           n + 8          n + 72
    +-----------------------------------------+------------+---------------+
    | zip archive, as torch.save writes it:   | "\\nsha256:" | 64 hex digits |
    | a pickle, then the bytes of each tensor |            | of bytes 0..n |
    +-----------------------------------------+------------+---------------+

A plain torch.load(path, weights_only=True) opens it, with or without mmap, because a zip reader
searches backwards for the end of the archive and ignores what follows. The digest is needed because
torch.load checks no checksum of the weights: with one bit of a tensor flipped it loads the file and
says nothing (tests/test_checkpoint.py shows it). To verify in a shell, compare the two outputs of

    head -c -72 runs/a/step-00001234.pt | sha256sum;  tail -c 64 runs/a/step-00001234.pt

A run's folder holds the newest `keep` step files and best.pt, a second name (hard link) of the
step file that was best. Names that begin with .tmp- are unfinished writes.

What the dictionary holds is decided by train.py, but for one rule: the tensors under "model" are
finite. Nothing is locked: only one process may write to a folder. A run with --fsdp writes folders,
step-00001234.sharded and best-00001234.sharded (support/run/sharded_checkpoint.py); finding a
checkpoint and deleting the older ones treats both alike. To verify a file and list what it holds:

    python -m support.checkpoint runs/a/step-00001234.pt
"""

import hashlib
import io
import os
import shutil
import sys
from itertools import chain
from pathlib import Path

import torch

from support.base.atomic import sync
from support.base.runtime import Parser, exit_cleanly

MARK = "\nsha256:"
CHUNK_BYTES = 1 << 20


def save(folder: str | Path, state: dict, *, step: int, keep: int = 2, best: bool = False) -> Path:
    """Write the state as this step's file, then delete all but the newest `keep` step files.

    Args:     state  what torch.load(weights_only=True) can read: tensors, numbers, strings, None
                     and dicts, lists, tuples of these; anything else is refused now, not on resume
              keep   how many step files to leave, this one included and best.pt not counted
              best   also make this file best.pt
    Returns:  the path of the step file, which is on the disk (fsync) when this returns
    Raises:   ValueError if the file cannot be written, pickle.UnpicklingError if the state holds
              anything else or its "model" a weight that is not finite; every older step file is
              then as it was. A file that cannot be deleted is one warning on stderr, which does not
              end the run
    Cost:     one pass over the bytes, hashed as they are written; disk space for keep + 1 files,
              and for one more while best.pt is older than the step files kept
    """
    path = step_path(folder, step, keep, ".pt")
    check_finite(state.get("model", {}), path)
    try:
        _publish(path, state, best)
    except OSError as error:
        raise not_written(path, reason_of(error), _tensor_bytes(state)) from error
    forget_older(path, keep, best)
    return path


def step_path(folder: str | Path, step: int, keep: int, suffix: str) -> Path:
    if not (0 <= step < 10**8 and keep >= 1):
        raise ValueError(f"step={step}, keep={keep}: allowed are step 0 to 99999999 and keep >= 1")
    return Path(folder) / f"step-{step:08d}{suffix}"


def not_written(path: Path, reason: str, size: int) -> ValueError:
    free = shutil.disk_usage(next(filter(os.path.exists, path.parents))).free
    return ValueError(
        f"{path}: not written: {reason} (needs {size:,} bytes, {free:,} free); older ones are"
        " untouched: free space or make the folder writable, then resume"
    )


def forget_older(path: Path, keep: int, best: bool) -> None:
    """Delete all but the newest `keep` steps up to this one, and a best that is no longer.

    Later steps are of a run that was ahead of where this one resumed. They do not count here, or
    else a run that resumed from far back could delete the file it has just written.
    """
    remove([step for step in steps_in(path.parent) if step.name <= path.name][:-keep])
    if best:
        own = "best.pt" if path.suffix == ".pt" else path.name.replace("step", "best")
        remove([other for other in bests_in(path.parent) if other.name != own])


def check_finite(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Refuse to save weights with NaN or infinity in them: nothing could be resumed from these.

    Raises:   ValueError naming the tensors
    Cost:     one pass over the weights: 0.28 s for 124 M, where hashing them takes 0.36 s
    """
    bad = []
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            tensor = tensor.float() if tensor.itemsize == 1 else tensor  # float8 knows no minimum
            # Not isfinite on all values, which takes seven times as long; a minimum keeps NaN.
            if not torch.stack(tensor.detach().aminmax()).isfinite().all():
                bad.append(name)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(
            f"{path}: not written: weights are not finite: {', '.join(bad[:3])}{more};"
            " older ones are untouched: resume from one of them, or start again with a lower --lr"
        )


def load(path: str | Path, map_location: str | torch.device = "cpu") -> dict:
    """Verify the file's sha256, then read it with weights_only=True: no code in it can run.

    Raises:   ValueError naming the file, what is wrong with it and which others there are to resume
              from; another file is never read instead
    Cost:     two passes over the file, the second from the page cache if the file fits there
    """
    try:
        # The file is opened once for both passes: what is read is what was verified, even if a
        # save gives the name to another file in between.
        with open(path, "rb") as file:
            _verify(file)
            return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path}: {reason_of(error)}; {others(Path(path))}") from error


def find(folder: str | Path, which: str) -> Path:
    """Turn the value of --resume into a path: last, previous, best, or the path of a checkpoint.

    Returns:  the newest step, the second newest, the best, or that path; not yet verified
    Raises:   ValueError if there is no such checkpoint; another one is never taken instead
    """
    if Path(folder).is_file() or Path(folder).suffix == ".sharded":
        raise ValueError(
            f"{folder} is not the folder of a run: name that one; a checkpoint alone is named with"
            " --checkpoint"
        )
    named = _named_files(Path(folder))
    path = named.get(which, Path(which))
    if path is None or not (path.is_file() or (path.is_dir() and path.suffix == ".sharded")):
        if not Path(folder).exists():
            raise ValueError(f"{folder}: no such folder: name the folder of a run")
        there = ", ".join(f"{word} ({file.name})" for word, file in named.items() if file)
        raise ValueError(
            f"checkpoint {which}: not found; {folder} has {there or 'none'}; allowed are last,"
            " previous, best or, except for --resume, the path of a file"
        )
    return path


def clean(folder: str | Path) -> None:
    """Delete the unfinished writes of killed runs. Every save begins and ends with this."""
    remove(list(Path(folder).glob(".tmp-*")))


class _HashingFile(io.BufferedWriter):
    """The file torch.save writes to: each block is hashed on its way to the disk."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.sha256()

    def write(self, block: bytes | memoryview) -> int:
        self.digest.update(block)
        return super().write(block)


def _publish(path: Path, state: dict, best: bool) -> None:
    """Write under a temporary name, then rename: a final name is a whole file at every moment."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    clean(folder)
    try:
        write_file(folder / f".tmp-{path.name}", state)
        # best.pt first: a run killed between the two renames resumes one save back and reaches this
        # best again. In the other order it would resume here and never write best.pt.
        if best:
            link_or_copy(folder / f".tmp-{path.name}", folder / ".tmp-best.pt")
            os.replace(folder / ".tmp-best.pt", folder / "best.pt")
        os.replace(folder / f".tmp-{path.name}", path)
        sync(folder)  # the renames themselves
    finally:
        clean(folder)


def write_file(path: Path, state: dict) -> None:
    with _HashingFile(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch.save hides a failed write behind an error of its own, which has no errno.
            raise error.__context__ or error from None
        file.write((MARK + file.digest.hexdigest()).encode())
    sync(path)
    # torch.save also writes objects that weights_only refuses to read: find out now, not on resume.
    # With mmap this reads the pickle and no tensor.
    torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # exFAT and some network shares have no hard links
        shutil.copyfile(source, target)
        sync(target)


def remove(paths: list[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir():
                if not path.name.startswith(".tmp-"):  # a final name is a whole folder
                    path = path.rename(path.with_name(f".tmp-old-{path.name}"))
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            print(f"warning: {path} cannot be deleted: {reason_of(error)}", file=sys.stderr)


def _verify(file: io.BufferedReader) -> None:
    """Compare the body's digest with the one in the trailer, and go back to the file's start."""
    body_bytes = max(0, file.seek(0, os.SEEK_END) - len(MARK) - 64)
    file.seek(0)
    digest = hashlib.sha256()
    for start in range(0, body_bytes, CHUNK_BYTES):
        digest.update(file.read(min(CHUNK_BYTES, body_bytes - start)))
    trailer = file.read().decode("ascii", errors="replace")
    if not trailer.startswith(MARK):
        raise ValueError(
            f"has no sha256 trailer: {file.tell():,} bytes, cut short, or no checkpoint"
        )
    expected, actual = trailer.removeprefix(MARK), digest.hexdigest()
    if actual != expected:
        raise ValueError(f"is damaged: sha256 is {actual[:12]}..., not {expected[:12]}...")
    file.seek(0)


def reason_of(error: Exception) -> str:
    """One sentence that says why, without torch's advice to load the file with its checks off."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].splitlines()[0].strip()


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of steps, files and folders, oldest first."""
    found = [folder.glob("step-" + "[0-9]" * 8 + suffix) for suffix in (".pt", ".sharded")]
    return sorted(chain(*found))


def bests_in(folder: Path) -> list[Path]:
    """The one that was written last is at the end; after a kill there may be one more."""
    found = chain(folder.glob("best.pt"), folder.glob("best-" + "[0-9]" * 8 + ".sharded"))
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _named_files(folder: Path) -> dict[str, Path | None]:
    """The words that --resume takes, and what each of them means in this folder now."""
    steps, bests = [None, None, *steps_in(folder)], [None, *bests_in(folder)]
    return {"last": steps[-1], "previous": steps[-2], "best": bests[-1]}


def others(path: Path) -> str:
    """What to do about a bad file: resume from another, unless it has the same bytes."""

    def inode(path: Path) -> int | None:
        inside = path / "manifest.json"  # of a folder, whose other name is a folder of links
        file = inside if path.is_dir() else path
        return file.stat().st_ino if file.exists() else None

    named = _named_files(path.parent).items()
    good = [word for word, file in named if file and inode(file) != inode(path)]
    return "use " + " or ".join(good) if good else "no other checkpoint there: start a new run"


def _tensor_bytes(value: object) -> int:
    """The bytes of all tensors under a value; a tied tensor counts once for each of its names."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    children = value.values() if isinstance(value, dict) else value
    return sum(map(_tensor_bytes, children)) if isinstance(value, dict | list | tuple) else 0


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m support.checkpoint",
        description="Verify a checkpoint and list what it holds.",
    )
    parser.add_argument("path", type=Path, help="a file that train.py saved")
    path = parser.parse_args(argv).path
    state = load(path)
    print(f"{path}: verified, {path.stat().st_size / 1e6:.3f} MB, step {state.get('step', '?')}")
    for key, value in state.items():
        print(f"{_tensor_bytes(value) / 1e6:12.3f} MB  {key}")


if __name__ == "__main__":
    exit_cleanly(main)
