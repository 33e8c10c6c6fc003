"""Checkpoints: one dictionary, written whole or not at all, verified when it is read.

    step-00001234.pt          a file: the dictionary
    step-00001234.sharded/    with --fsdp a folder, with a file for each rank that wrote it
        rank-0-of-2.pt        {"save": "5f2c...", "file": "rank-0-of-2.pt", "state":, "rows":}
        rank-1-of-2.pt        the same "save", no state, the rows that rank 1 held

`state` is the dictionary, but each tensor in it is only a shape and a dtype (a tensor on torch's
meta device). `rows` has the values by name, model/wte.weight: FSDP2 shards by rows, so a tensor is
the concatenation of its rows in all files. A tensor that is not sharded is among the rows of rank
0. Any number of ranks can read either form, whatever number wrote it. Every file looks like this:

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

A run's folder holds the newest `keep` checkpoints and the best, best.pt or best-00001234.sharded, a
second name (hard links) of the step that was best. Hidden names ending in .tmp are unfinished
writes. Nothing is locked: only one run may write to a folder.

What the dictionary holds is decided in support/run/run.py (`Run.save`); only the tensors under
"model" are looked at: they must be finite. To verify a checkpoint and list what it holds, or to
write it in the other form, a folder as a file and a file as a folder:

    python -m support.run.checkpoint runs/a/step-00001234.pt
    python -m support.run.checkpoint runs/a/step-00001234.sharded --out a.pt
    python -m support.run.checkpoint a.pt --out a.sharded
"""

import hashlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from support.base.atomic import atomic_write, sync
from support.base.runtime import Parser, Runtime, exit_cleanly
from support.base.sharded import is_shard, of_rows, rows_here

MARK = "\nsha256:"
SUFFIX = ".sharded"
WORDS = ("last", "previous", "best")  # the values of --resume
CHUNK_BYTES = 1 << 20
SEEN_S = 60  # seconds after which a shared disk shows rank 0 a file that another rank has written
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")
Value = TypeVar("Value")


# ---- write and read


class Saver:
    """Writes the checkpoints of a run, one at a time, while the run goes on.

        begin    all ranks together: copy the state
        write    each rank, in a thread: what it has to write, without a word to the others
        publish  rank 0, in that thread: the name; then older checkpoints are deleted
        finish   all ranks together: wait, and learn what went wrong on any

    Args: sharded each rank writes its rows into a folder, and rank 0 gives that its name when it
                  sees the files of all; else rank 0 writes a file
          copies  whether the state may change before `finish`, as it does while a run goes on
    """

    def __init__(self, runtime: Runtime = ALONE, sharded: bool = False, copies: bool = True):
        self.runtime, self.sharded, self.copies = runtime, sharded, copies
        self.buffers: dict[str, Tensor] = {}  # that a state is copied into
        self.thread = ThreadPoolExecutor(1)
        self.path: Path | None = None  # of the checkpoint under way
        self.bytes = 0  # of its tensors
        self.written: Future  # on each rank
        self.published: Future  # on rank 0
        self.give_up_at = math.inf  # when rank 0 no longer waits for the files of other ranks

    def begin(
        self, path: Path, state: dict, *, keep: int | None = None, best: bool = False
    ) -> None:
        """Copy a state and begin to write it; see `save`. With neither `keep` nor `best` any name
        will do.

        Raises: ValueError, on every rank, if rank 0 can write nothing there
        """
        # The best first: a run killed before the step has its name resumes one save back and
        # reaches this best again. In the other order it would resume here and never write the best.
        runtime, target = self.runtime, second_name(path, "best") if best else path
        unfinished, ranks = hidden(target), range(runtime.world_size if self.sharded else 0)
        files = [unfinished / name_of(rank, runtime.world_size) for rank in ranks]

        def make_room() -> str:
            if keep:
                path.parent.mkdir(parents=True, exist_ok=True)
                for name in (".step-", ".best", ".trunk"):  # unfinished writes of killed runs
                    remove(*path.parent.glob(f"{name}*.tmp"))
            remove(unfinished)
            if files:
                unfinished.mkdir()
            return secrets.token_hex(8)

        self.bytes = tensor_bytes(state)
        with refusing(path, self.bytes):
            number = runtime.on_rank0(make_room)
        self.path = path
        self.give_up_at = math.inf
        content, file = state, target
        if files:
            file = files[runtime.rank]
            outline, rows = split(state, runtime.is_rank0)
            kept = outline if runtime.is_rank0 else None
            content = {"save": number, "file": file.name, "state": kept, "rows": rows}
        if runtime.is_rank0 or files:
            content = copied(content, self.buffers) if self.copies else content
            self.written = self.thread.submit(write_part, file, content)
        if runtime.is_rank0:
            self.published = self.thread.submit(self.publish, path, target, files, best, keep)

    def publish(
        self, path: Path, target: Path, files: list[Path], best: bool, keep: int | None
    ) -> None:
        """Give what was written its name, or names; on rank 0."""
        try:
            self.written.result()
            while absent := [file.name for file in files if not file.is_file()]:
                if time.monotonic() > self.give_up_at:
                    raise ValueError(f"rank 0 sees no {absent[0]}: is the disk shared?")
                time.sleep(0.02)
            if files:
                sync(hidden(target))
                put(hidden(target), target)
            if best:
                link(target, path)
            sync(path.parent)
            if keep:
                # later steps are left by a run that was ahead of where this one resumed; if they
                # counted, a run that resumed from far back could delete what it has just written
                remove(*[p for p in steps_in(path.parent) if p.name <= path.name][:-keep])
            if keep and best:
                remove(*[p for p in named_in(path.parent, "best") if p != target])
        finally:
            remove(hidden(target))

    def finish(self) -> Path | None:
        """Wait until the checkpoint under way is on the disk; its path, or None if there is none.

        Raises: ValueError, on every rank, if one could not write; older checkpoints are unchanged
        """
        path, self.path = self.path, None
        if path is None:
            return None
        writes = self.sharded or self.runtime.is_rank0
        try:
            with refusing(path, self.bytes):
                agreed(self.runtime, lambda: writes and self.written.result())
                self.give_up_at = time.monotonic() + SEEN_S
                self.runtime.on_rank0(lambda: self.published.result())
        finally:
            self.give_up_at = 0.0
        return path

    def close(self) -> None:
        """Wait for what this rank writes, not for others: they may be gone."""
        self.give_up_at = 0.0
        self.thread.shutdown()


def write_part(file: Path, content: dict) -> None:
    """Write a file of a checkpoint; ValueError for weights that are not finite."""
    rows = content.get("rows", {}).items()
    of_model = {n.removeprefix("model/"): part for n, part in rows if n.startswith("model/")}
    check_finite(content.get("model", of_model), "it")
    write_file(file, content)


@contextmanager
def refusing(path: Path, needs: int) -> Iterator[None]:
    """Say what it means for the run that a checkpoint of this many bytes could not be written."""
    try:
        yield
    except ValueError as error:
        reason = str(error).rpartition("not written: ")[2]
        remedy = "resume from one of them, with a lower --lr"
        if "not finite" not in reason:
            free = shutil.disk_usage(next(filter(os.path.exists, path.absolute().parents))).free
            reason += f" (needs {needs:,} bytes, {free:,} free)"
            remedy = "free space or make the folder writable, then resume"
        message = f"{path}: not written: {reason}; older ones are untouched: {remedy}"
        raise ValueError(message) from None


def save(
    folder: str | Path,
    state: dict,
    runtime: Runtime | None = None,
    *,
    step: int,
    keep: int = 2,
    best: bool = False,
) -> Path:
    """Write the state as this step's checkpoint, then delete all but the newest `keep`.

    Args:     state   what torch.load(weights_only=True) can read: tensors, numbers, strings, None
                      and dicts, lists, tuples of these; anything else is refused now, not on resume
              runtime of the ranks that write a folder together, each its own rows of DTensors; the
                      rest of the state is the same on all. None: this process writes a file
              keep    how many checkpoints of steps to leave, including this one, besides the best
              best    also make this one the best
    Returns:  its path; its bytes are on the disk (fsync) when this returns
    Raises:   ValueError, on every rank, if one cannot write or if a weight is not finite; older
              checkpoints are then unchanged. One that cannot be deleted is a warning on stderr, and
              the run goes on
    Cost:     one pass over the bytes, hashed as they are written; disk space for keep + 1
              checkpoints, and for one more while the best is older than the steps kept
    """
    path = step_path(folder, step, SUFFIX if runtime else ".pt")
    write(path, state, runtime, keep=keep, best=best)
    return path


def write(
    path: Path, state: dict, runtime: Runtime | None = None, **how: int | bool | None
) -> None:
    """Write a checkpoint of any name; `how` as `Saver.begin` takes it."""
    saver = Saver(runtime or ALONE, sharded=runtime is not None, copies=False)
    try:
        saver.begin(path, state, **how)
        saver.finish()
    finally:
        saver.close()


def load(
    path: str | Path,
    shards: dict[str, Tensor] | None = None,
    runtime: Runtime = ALONE,
    device: torch.device = ALONE.device,
) -> dict:
    """Verify a checkpoint, file or folder, and read it with weights_only=True: no code in it runs.

    Args:     shards  DTensors by name, of which each rank reads only its own rows:
                      model.state_dict(), which may be on the meta device
              runtime of the ranks that read together
              device  for the rows that are read
    Returns:  the state. A tensor with a name in `shards`, or in a dict with such a name, becomes a
              DTensor like that one, if it has the same shape; any other tensor is whole
    Raises:   ValueError, on every rank, that names the file, what is wrong with it and what else
              can be resumed from; another checkpoint is never read instead
    Cost:     two passes over the files: one for their sha256, shared out among the ranks, and one
              by each rank over the rows it takes (mmap)
    """
    path = Path(path)

    def fill(name: str, tensor: Tensor) -> Tensor:
        held = [file["rows"][name] for file in files if name in file["rows"]]
        parts = held if tensor.is_meta else [tensor]
        if any(part.nbytes > part.untyped_storage().nbytes() for part in parts):
            raise ValueError(f"{name} claims more numbers than the file has")
        return joined(parts, shard_like(name, tensor, shards or {}), device)

    def as_verified() -> list[dict]:
        files = opened(paths)
        if written != [file.stat().st_mtime_ns for file in paths]:
            raise ValueError("was replaced while it was read: read it again")
        return files

    try:
        paths = agreed(runtime, lambda: files_of(path))
        written = [file.stat().st_mtime_ns for file in paths if file.exists()]
        agreed(runtime, lambda: [*map(verify, paths[runtime.rank :: runtime.world_size])])
        files = agreed(runtime, as_verified)
        state = agreed(runtime, lambda: mapped(files[0]["state"], fill))
        agreed(runtime, lambda: check_finite(state.get("model"), "it"))
        return state
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {others(path)}") from None


def load_on_rank0(path: Path, runtime: Runtime) -> dict:
    """As `load`, but only rank 0 needs to have the file: the others get its tensors from there."""
    if runtime.world_size == 1:
        return load(path)
    rows: dict[str, Tensor] = {}

    def read() -> dict:
        outline, whole = split(load(path), is_rank0=True)
        rows.update(whole)
        return outline

    def received(name: str, outline: Tensor) -> Tensor:
        if not outline.is_meta:
            return outline
        tensor = rows.get(name, torch.empty_like(outline, device="cpu"))
        dist.broadcast(tensor, src=0)
        return tensor

    return mapped(runtime.on_rank0(read), received)


def outlined(path: Path) -> dict:
    """A checkpoint whose tensors are not read yet; it is not verified either.

    Raises: ValueError for one that cannot be read
    """
    try:
        return opened(files_of(path)[:1])[0]["state"]
    except Exception as error:  # torch.load raises half a dozen kinds
        raise ValueError(f"{path}: {reason_of(error)}") from error


def agreed(runtime: Runtime, action: Callable[[], Value]) -> Value:
    """Do something on every rank; if it fails on one, all raise the same ValueError."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = reason_of(error)
    failure = next(filter(None, runtime.gather(failure)), None)
    if failure:
        raise ValueError(failure)
    return result


# ---- names


def step_path(folder: str | Path, step: int, suffix: str) -> Path:
    if not 0 <= step < 10**8:
        raise ValueError(f"step={step}: allowed are 0 to 99999999")
    return Path(folder) / f"step-{step:08d}{suffix}"


def second_name(path: Path, word: str) -> Path:
    """The name that a step's checkpoint has besides if it is the best, or the trunk."""
    return path.with_name(f"{word}.pt" if path.suffix == ".pt" else path.name.replace("step", word))


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of steps, files and folders, oldest first."""
    paths = folder.glob("step-" + "[0-9]" * 8 + ".*")
    return sorted(path for path in paths if path.suffix in (".pt", SUFFIX))


def named_in(folder: Path, word: str) -> list[Path]:
    """The checkpoint with this second name; after a kill there may be two, the newer one last."""
    paths = [*folder.glob(f"{word}.pt"), *folder.glob(f"{word}-*{SUFFIX}")]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def words_in(folder: Path) -> dict[str, Path]:
    """The words that --resume can take in this folder, and the checkpoint that each means."""
    steps, bests = steps_in(folder), named_in(folder, "best")
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


def name_of(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.pt"


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint: itself, or one for each rank that wrote the folder."""
    if not path.is_dir():
        return [path]
    counts = [int(file.stem.rpartition("-")[2]) for file in path.glob("rank-*-of-*.pt")]
    files = [path / name_of(rank, max(counts)) for rank in range(max(counts, default=0))]
    if not files:
        raise ValueError("has no file of any rank: not a checkpoint, or not all of one")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
    return files


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


def verify(file: Path) -> None:
    """Compare the digest of a file's body with the one in its trailer."""
    body_bytes = max(0, file.stat().st_size - len(MARK) - 64)
    digest = hashlib.sha256()
    with file.open("rb") as source:
        for start in range(0, body_bytes, CHUNK_BYTES):
            digest.update(source.read(min(CHUNK_BYTES, body_bytes - start)))
        trailer = source.read().decode("ascii", errors="replace")
        size = source.tell()
    if not trailer.startswith(MARK):
        raise ValueError(
            f"{file.name} has no sha256 trailer: {size:,} bytes, cut short, or not a checkpoint"
        )
    expected, actual = trailer.removeprefix(MARK), digest.hexdigest()
    if actual != expected:
        raise ValueError(
            f"{file.name} is damaged: sha256 is {actual[:12]}..., not {expected[:12]}..."
        )


def opened(paths: list[Path]) -> list[dict]:
    """What each file holds, mapped into memory; a plain checkpoint is a state without rows.

    Raises: ValueError unless all files are of one save
    """
    files = [torch.load(p, map_location="cpu", mmap=True, weights_only=True) for p in paths]
    if len(paths) == 1 and "rows" not in files[0]:
        return [{"state": files[0], "rows": {}}]
    for path, file in zip(paths, files, strict=True):
        if (file.get("file"), file.get("save")) != (path.name, files[0].get("save")):
            raise ValueError(f"{path.name} is not of the same save as {paths[0].name}")
    return files


def link(source: Path, target: Path) -> None:
    """Give a checkpoint, file or folder, a second name, whole or not at all, in place of another.

    The bytes are on the disk once, except where a file system has no hard links.
    """
    if target.is_file() and target.samefile(source):
        return  # a rename of one onto the other would do nothing
    unfinished = hidden(target)
    remove(unfinished)
    if source.is_dir():
        shutil.copytree(source, unfinished, copy_function=link_or_copy)
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


# ---- the tensors of a state


def mapped(
    value: object,
    change: Callable[[str, Tensor], object],
    path: tuple[str, ...] = (),
    made: dict[tuple, object] | None = None,
) -> object:
    """The same dicts in dicts, with `change(name, tensor)` in place of each tensor.

    A name consists of the keys on the way, model/wte.weight. Tied tensors are changed once, under
    the first of their names, and stay tied. Lists stay as they are.

    Args: made by `change` until now
    """
    made = {} if made is None else made
    if isinstance(value, dict):
        return {key: mapped(v, change, (*path, str(key)), made) for key, v in value.items()}
    if not isinstance(value, Tensor):
        return value
    place = place_of(value)
    if place not in made:
        made[place] = change("/".join(path), value)
    return made[place]


def copied(state: dict, buffers: dict[str, Tensor] | None = None) -> dict:
    """The same state in host memory of its own, which a step that follows does not change.

    Args: buffers of the copy before, by name, to be written over: new memory takes ten times as
                  long as the copy, because the kernel hands it out page by page
    """
    buffers = {} if buffers is None else buffers

    def copy(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        buffer = buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffers[name] = torch.empty_like(tensor, device="cpu")
        return buffers[name].copy_(tensor.detach())

    return mapped(state, copy)


def place_of(tensor: Tensor) -> tuple:
    """What tied tensors have in common: where their values are."""
    held = rows_here(tensor)
    place = held.data_ptr() or id(tensor)  # an empty one has no place
    return place, held.device, tensor.shape, tensor.stride(), tensor.dtype


def split(state: dict, is_rank0: bool) -> tuple[dict, dict[str, Tensor]]:
    """The state with meta tensors in place of its tensors, and the rows that this rank writes.

    A tied tensor is one in both, under its first name. A number (0 dimensions) stays as it is.
    """
    rows: dict[str, Tensor] = {}

    def outline(name: str, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        if is_rank0 or is_shard(tensor):
            held = rows_here(tensor).detach()
            # torch.save would write all of a storage, of which FSDP2 pads those of uneven rows
            is_padded = held.untyped_storage().nbytes() != held.nbytes
            rows[name] = held.clone() if is_padded else held
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return mapped(state, outline), rows


def shard_like(name: str, tensor: Tensor, shards: dict[str, Tensor]) -> Tensor | None:
    """The DTensor that a tensor of this name is sharded like: the parameter that it belongs to."""
    named = (shards[key] for key in name.split("/") if key in shards)
    return next((like for like in named if like.shape == tensor.shape), None)


def joined(parts: list[Tensor], like: Tensor | None, device: torch.device) -> Tensor:
    """A tensor from the parts of its rows: all of it or, with `like`, this rank's rows.

    Every rank holds ceil(rows / ranks), the last ones fewer or none, as torch.chunk deals them out.

    Example: of parts with 3, 3 and 1 rows rank 1 of 2 takes rows 4 to 6: 2 of the second part, 1 of
             the third
    """
    if like is None:
        return torch.cat(parts) if len(parts) > 1 else parts[0].detach().clone()
    mesh = like.device_mesh
    share = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * share
    pieces, begin = [], 0
    for part in parts:
        pieces.append(part[max(first - begin, 0) : max(first + share - begin, 0)])
        begin += len(part)
    return of_rows(torch.cat(pieces).to(device), like)


# ---- what is refused


def check_finite(weights: object, where: object) -> None:
    """Refuse weights with NaN or infinity: no run could go on from them.

    Raises:   ValueError naming the tensors
    Cost:     one pass over the weights: 0.28 s for 124 M, where hashing them takes 0.36 s
    """
    bad = []
    named = weights.items() if isinstance(weights, dict) else ()
    for name, tensor in named:
        tensor = rows_here(tensor) if isinstance(tensor, Tensor) else torch.empty(0)
        if tensor.is_floating_point() and tensor.numel():
            tensor = tensor.float() if tensor.itemsize == 1 else tensor  # float8 knows no minimum
            # isfinite on all values would take seven times as long; a minimum keeps NaN.
            if not torch.stack(tensor.detach().aminmax()).isfinite().all():
                bad.append(name)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(f"{where} has weights that are not finite: {', '.join(bad[:3])}{more}")


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
        description="Verify a checkpoint and list what it holds, or write it in the other form.",
    )
    parser.add_argument("path", type=Path, help="a checkpoint that train.py saved")
    parser.add_argument("--out", type=Path, help="write a folder as this file, or a file as folder")
    args = parser.parse_args(argv)
    path, out = args.path, args.out
    if out and out.exists():
        raise ValueError(f"--out {out} exists: name a new file or folder")
    state, size = load(path), sum(file.stat().st_size for file in files_of(path))
    print(f"{path}: verified, {size / 1e6:.3f} MB, step {state.get('step', '?')}")
    for key, value in state.items():
        print(f"{tensor_bytes(value) / 1e6:12.3f} MB  {key}")
    if out:
        write(out, state, None if path.is_dir() else ALONE)
        print(f"{out}: written")


if __name__ == "__main__":
    exit_cleanly(main)
