"""Checkpoints: one dictionary in one file, written whole or not at all, verified when it is read.

    byte 0                                    n           n + 8          n + 72
    +-----------------------------------------+------------+---------------+
    | zip archive, as torch.save writes it:   | "\\nsha256:" | 64 hex digits |
    | a pickle, then the bytes of each tensor |            | of bytes 0..n |
    +-----------------------------------------+------------+---------------+

torch.load(path, weights_only=True) opens it, with or without mmap, because a zip reader searches
backwards for the end of the archive and ignores what follows. The digest is needed because
torch.load does not check the weights: with one bit of a tensor flipped it loads the file without a
word (tests/test_checkpoint.py shows it). To verify in a shell, compare the two outputs of

    head -c -72 runs/a/step-00001234.pt | sha256sum;  tail -c 64 runs/a/step-00001234.pt

A run's folder holds the newest `keep` step files and best.pt, a second name (hard link) of the step
file that was best. Hidden names ending in .tmp are unfinished writes. With --fsdp a checkpoint is a
folder instead, step-00001234.sharded, with such a file for each rank
(support/run/sharded_checkpoint.py); finding, linking and deleting treat both alike.

train.py decides what the dictionary holds; only the tensors under "model" are looked at: they must
be finite. Nothing is locked: only one process may write to a folder. To verify a file and list what
it holds:

    python -m support.run.checkpoint runs/a/step-00001234.pt
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

import torch

from support.base.atomic import atomic_write, sync
from support.base.runtime import Parser, exit_cleanly

MARK = "\nsha256:"
SUFFIX = ".sharded"
WORDS = ("last", "previous", "best")  # the values of --resume
CHUNK_BYTES = 1 << 20


def save(folder: str | Path, state: dict, *, step: int, keep: int = 2, best: bool = False) -> Path:
    """Write the state as this step's file, then delete all but the newest `keep` step files.

    Args:     state  what torch.load(weights_only=True) can read: tensors, numbers, strings, None
                     and dicts, lists, tuples of these; anything else is refused now, not on resume
              keep   how many step files to leave, including this one and not counting best.pt
              best   also make this file best.pt
    Returns:  the path of the step file, which is on the disk (fsync) when this returns
    Raises:   ValueError if the file cannot be written or a weight is not finite,
              pickle.UnpicklingError if the state holds anything else; older step files are then
              unchanged. A file that cannot be deleted is a warning on stderr, and the run goes on
    Cost:     one pass over the bytes, hashed as they are written; disk space for keep + 1 files,
              and for one more while best.pt is older than the step files kept
    """
    path = step_path(folder, step, ".pt")
    check_finite(state.get("model", {}), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clean(path.parent)
        # best.pt first: a run killed before the step has its name resumes one save back and reaches
        # this best again. In the other order it would resume here and never write best.pt.
        write_file(best_path(path) if best else path, state)
        if best:
            link(best_path(path), path)
        sync(path.parent)
    except (OSError, ValueError) as error:
        raise not_written(path, error, state) from error
    forget_older(path, keep, best)
    return path


def load(path: str | Path) -> dict:
    """Verify the file's sha256, then read it with weights_only=True: no code in it can run.

    Raises:   ValueError naming the file, what is wrong with it and what else can be resumed from;
              another file is never read instead
    Cost:     two passes over the file, the second from the page cache if the file fits there
    """
    try:
        # The file is opened once for both passes: what is read is what was verified, even if a
        # save gives the name to another file in between.
        with open(path, "rb") as file:
            verify(file)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises half a dozen kinds
        raise ValueError(f"{path}: {reason_of(error)}; {others(Path(path))}") from error


# ---- names


def step_path(folder: str | Path, step: int, suffix: str) -> Path:
    if not 0 <= step < 10**8:
        raise ValueError(f"step={step}: allowed are 0 to 99999999")
    return Path(folder) / f"step-{step:08d}{suffix}"


def best_path(path: Path) -> Path:
    """The name that a step's checkpoint has besides if it is the best."""
    return path.with_name("best.pt" if path.suffix == ".pt" else path.name.replace("step", "best"))


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of steps, files and folders, oldest first."""
    paths = folder.glob("step-" + "[0-9]" * 8 + ".*")
    return sorted(path for path in paths if path.suffix in (".pt", SUFFIX))


def bests_in(folder: Path) -> list[Path]:
    """The best checkpoint; after a kill there may be two, the newer one last."""
    paths = [*folder.glob("best.pt"), *folder.glob("best-*" + SUFFIX)]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def words_in(folder: Path) -> dict[str, Path]:
    """The words that --resume can take in this folder, and the checkpoint that each means."""
    steps, bests = steps_in(folder), bests_in(folder)
    meant = zip(WORDS, (steps[-1:], steps[-2:-1], bests[-1:]), strict=True)
    return {word: paths[0] for word, paths in meant if paths}


def find(folder: str | Path, which: str) -> Path:
    """Turn last, previous, best, or the path of a checkpoint into a path.

    Returns:  the newest step, the second newest, the best, or that path; not yet verified
    Raises:   ValueError if there is no such checkpoint; another one is never taken instead
    """
    folder = Path(folder)
    if folder.is_file() or folder.suffix == SUFFIX:
        raise ValueError(
            f"{folder} is a checkpoint, not the folder of a run: name the run, and a single"
            " checkpoint with --checkpoint"
        )
    known = words_in(folder)
    path = known.get(which) if which in WORDS else Path(which)
    if path and (path.is_file() or (path.is_dir() and path.suffix == SUFFIX)):
        return path
    if not folder.exists():
        raise ValueError(f"{folder}: no such folder: name the folder of a run")
    listed = ", ".join(f"{word} ({file.name})" for word, file in known.items())
    raise ValueError(
        f"checkpoint {which}: not found; {folder} has {listed or 'none'}; allowed are"
        f" {', '.join(WORDS)} or, except for --resume, the path of a file"
    )


def others(path: Path) -> str:
    """The remedy for a damaged checkpoint: resume from one that does not have the same bytes."""

    def inode(path: Path) -> int | None:
        file = min(path.iterdir(), default=path) if path.is_dir() else path
        return file.stat().st_ino if file.exists() else None

    known = words_in(path.parent).items()
    good = [word for word, file in known if inode(file) != inode(path)]
    return "use " + " or ".join(good) if good else "no other checkpoint there: start a new run"


# ---- the disk


class Hashing:
    """What torch.save writes to: each block is hashed on its way to the file."""

    def __init__(self, file: BinaryIO):
        self.file, self.flush, self.digest = file, file.flush, hashlib.sha256()

    def write(self, block: bytes | memoryview) -> int:
        self.digest.update(block)
        return self.file.write(block)


def write_file(path: Path, state: dict) -> None:
    """Write one verifiable file; if anything stops this, what had the name before stays."""
    with atomic_write(path) as file:
        hashing = Hashing(file)
        try:
            torch.save(state, hashing)
        except RuntimeError as error:
            # torch.save hides a failed write behind an error of its own, which has no errno.
            raise error.__context__ or error from None
        file.write((MARK + hashing.digest.hexdigest()).encode())
        file.flush()
        # torch.save also writes objects that weights_only refuses to read: find out now, not on
        # resume. With mmap this reads the pickle and no tensor.
        torch.load(file.name, map_location="cpu", mmap=True, weights_only=True)


def verify(file: BinaryIO) -> None:
    """Compare the body's digest with the one in the trailer, and go back to the file's start."""
    body_bytes = max(0, file.seek(0, os.SEEK_END) - len(MARK) - 64)
    file.seek(0)
    digest = hashlib.sha256()
    for start in range(0, body_bytes, CHUNK_BYTES):
        digest.update(file.read(min(CHUNK_BYTES, body_bytes - start)))
    trailer = file.read().decode("ascii", errors="replace")
    if not trailer.startswith(MARK):
        raise ValueError(
            f"has no sha256 trailer: {file.tell():,} bytes, cut short, or not a checkpoint"
        )
    expected, actual = trailer.removeprefix(MARK), digest.hexdigest()
    if actual != expected:
        raise ValueError(f"is damaged: sha256 is {actual[:12]}..., not {expected[:12]}...")
    file.seek(0)


def link(source: Path, target: Path) -> None:
    """Give a checkpoint, file or folder, a second name, whole or not at all, in place of another.

    The bytes are on the disk once, except where a file system has no hard links.
    """
    if target.is_file() and target.samefile(source):
        return  # a rename of one onto the other would do nothing
    unfinished = hidden(target)
    remove(unfinished)
    if source.is_dir():
        unfinished.mkdir()
        for file in source.iterdir():
            link_or_copy(file, unfinished / file.name)
        sync(unfinished)
    else:
        link_or_copy(source, unfinished)
    put(unfinished, target)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # exFAT and some network shares have no hard links
        shutil.copyfile(source, target)
        sync(target)


def put(unfinished: Path, path: Path) -> None:
    """Give a finished checkpoint its name; a folder that has the name already is deleted first,
    because no system call replaces a folder that is not empty.
    """
    if path.is_dir():
        remove(path)
    os.replace(unfinished, path)
    sync(path.parent)


def hidden(path: Path) -> Path:
    """The name of what is not finished yet, as in support/base/atomic.py."""
    return path.with_name(f".{path.name}.tmp")


def remove(*paths: Path) -> None:
    """Delete files and folders; a folder is hidden first, so that no half of it has its name."""
    for path in paths:
        try:
            if path.is_dir():
                doomed = path.with_name(f"{hidden(path).name}.tmp")
                shutil.rmtree(doomed, ignore_errors=True)
                shutil.rmtree(path.rename(doomed))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            print(f"warning: {path} cannot be deleted: {reason_of(error)}", file=sys.stderr)


def clean(folder: Path) -> None:
    """Delete the unfinished writes of killed runs."""
    for name in (".step-", ".best", ".trunk"):
        remove(*folder.glob(f"{name}*.tmp"))


def forget_older(path: Path, keep: int, best: bool) -> None:
    """Delete all but the newest `keep` steps up to this one, and a best that it has replaced.

    Later steps are left by a run that was ahead of where this one resumed. They do not count, or a
    run that resumed from far back could delete the file it has just written.
    """
    remove(*[step for step in steps_in(path.parent) if step.name <= path.name][:-keep])
    if best:
        remove(*[other for other in bests_in(path.parent) if other != best_path(path)])


# ---- what is refused


def check_finite(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Refuse to save weights with NaN or infinity: no run could go on from them.

    Raises:   ValueError naming the tensors
    Cost:     one pass over the weights: 0.28 s for 124 M, where hashing them takes 0.36 s
    """
    bad = []
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            tensor = tensor.float() if tensor.itemsize == 1 else tensor  # float8 knows no minimum
            # isfinite on all values would take seven times as long; a minimum keeps NaN.
            if not torch.stack(tensor.detach().aminmax()).isfinite().all():
                bad.append(name)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(
            f"{path}: not written: weights are not finite: {', '.join(bad[:3])}{more};"
            " older ones are untouched: resume from one of them, or start again with a lower --lr"
        )


def not_written(path: Path, error: Exception, state: dict) -> ValueError:
    """The error of a save that failed; the reason may come from `atomic_write`."""
    reason = reason_of(error).rpartition("not written: ")[2]
    free = shutil.disk_usage(next(filter(os.path.exists, path.parents))).free
    return ValueError(
        f"{path}: not written: {reason} (needs {tensor_bytes(state):,} bytes, {free:,} free); older"
        " ones are untouched: free space or make the folder writable, then resume"
    )


def reason_of(error: Exception) -> str:
    """One sentence that says why, without torch's advice to load the file with its checks off."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].splitlines()[0].strip()


def tensor_bytes(value: object) -> int:
    """The bytes of all tensors under a value; a tied tensor counts once for each of its names."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    children = value.values() if isinstance(value, dict) else value
    return sum(map(tensor_bytes, children)) if isinstance(value, dict | list | tuple) else 0


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m support.run.checkpoint",
        description="Verify a checkpoint and list what it holds.",
    )
    parser.add_argument("path", type=Path, help="a file that train.py saved")
    path = parser.parse_args(argv).path
    state = load(path)
    print(f"{path}: verified, {path.stat().st_size / 1e6:.3f} MB, step {state.get('step', '?')}")
    for key, value in state.items():
        print(f"{tensor_bytes(value) / 1e6:12.3f} MB  {key}")


if __name__ == "__main__":
    exit_cleanly(main)
