"""Checkpoints: one dictionary, written whole or not at all, checked when it is read.

    step-00001234.pt      a file of torch.save
    step-00001234/        with --fsdp a folder of torch.distributed.checkpoint
        __0_0.distcp      the rows that rank 0 holds, named as model/wte.weight
        __1_0.distcp      those of rank 1
        .metadata         which tensor is where: a pickle
        rest.pt           everything that is not a tensor, a file of torch.save

Any number of ranks can read a folder, whatever number wrote it, if all see its disk. Both forms
hold zip archives, which have a CRC32 of every record. torch.load does not look at it: with one bit
of a tensor flipped it loads the file without a word. `load` compares all of them first.

torch.load(weights_only=True) runs no code of a file. The pickle of a folder is code: load only
folders that you or somebody you trust has written.

A run's folder holds the newest `keep` checkpoints and the best one, which each of them names by its
step. Hidden names are unfinished writes. What the dictionary holds is decided in support/run.py
(`Run.save`); of it only "model", whose weights must be finite, and "best_step" are looked at here.
"""

import io
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from support.runtime import Runtime, of_rows, rows_here
from support.store import atomic_write, sync

WORDS = ("last", "best")
REST = "rest.pt"
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")


# ---- names


def step_path(folder: Path, step: int, sharded: bool) -> Path:
    return folder / f"step-{step:08d}{'' if sharded else '.pt'}"


def steps_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, files and folders, oldest first."""
    number = "[0-9]" * 8
    return sorted([*folder.glob(f"step-{number}.pt"), *folder.glob(f"step-{number}")])


def find(folder: str | Path, which: str) -> Path:
    """Turn last, best, or the path of a checkpoint into a path.

    Raises: ValueError if there is none; another one is never taken instead
    """
    folder = Path(folder)
    steps = steps_in(folder)
    if which == "last" and steps:
        return steps[-1]
    if which == "best" and steps:
        best = outlined(steps[-1])["best_step"]
        named = [path for path in steps if path.stem == f"step-{best:08d}"]
        if named:
            return named[0]
    if which not in WORDS and Path(which).exists():
        return Path(which)
    there = ", ".join(path.name for path in steps) or "none"
    raise ValueError(
        f"checkpoint {which}: not found; {folder} has {there}; allowed are {', '.join(WORDS)} or,"
        " except for --resume, a path"
    )


# ---- write


def save(
    path: Path, state: dict, runtime: Runtime = ALONE, *, sharded: bool = False, keep: int = 2
) -> None:
    """Write a state under this name, all ranks together; its bytes are on the disk after that.

    Then all but the newest `keep` checkpoints and the best one, state["best_step"], are deleted.

    Args:   state   dicts of tensors, numbers, strings and None, the same on all ranks
            sharded each rank writes its rows of DTensors into a folder, else rank 0 writes a file
    Raises: ValueError, on every rank, if one cannot write or if a weight is not finite; what was
            there is unchanged
    """
    unfinished = path.with_name(f".{path.name}.tmp")

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(".step-*.tmp"):  # by a run that was killed
            remove(left)
        if path.is_symlink():  # what it leads to is not ours to write
            path.unlink()
        if sharded:
            unfinished.mkdir()

    def publish() -> None:
        if path.is_dir():  # of the same step, so it has the same tensors; no call replaces a folder
            os.replace(unfinished / REST, path / REST)
            remove(unfinished)
        elif sharded:
            os.replace(unfinished, path)
        sync(path.parent)
        best = f"step-{state['best_step']:08d}"
        for old in steps_in(path.parent)[:-keep]:
            if old.stem != best:
                remove(old)

    runtime.together(lambda: check_finite(state["model"]))
    try:
        runtime.on_rank0(begin)
        if sharded:
            tensors, rest = taken_apart(state)
            runtime.on_rank0(lambda: write_file(unfinished / REST, rest))
            write_shards(tensors, unfinished)
            runtime.on_rank0(lambda: sync(unfinished))
        else:
            runtime.on_rank0(lambda: write_file(path, state))
        runtime.on_rank0(publish)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: not written: {reason}; older checkpoints are untouched: free space or make"
            " the folder writable, then --resume"
        ) from None


def write_file(path: Path, state: dict) -> None:
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch.save hides a failed write behind an error of its own
            raise error.__context__ or error from None


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Each rank's rows, on the disk after this."""
    # Imported here, and below, because it takes a second, which other runs should not wait for.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(tensors, checkpoint_id=folder)
    except CheckpointException as error:
        raise ValueError(str(error)) from None


def taken_apart(state: dict, prefix: str = "") -> tuple[dict[str, Tensor], dict]:
    """The tensors of dicts in dicts by their path, and the same dicts without them.

    Example: {"model": {"wte": t}, "step": 3} -> {"model/wte": t}, {"model": {}, "step": 3}
    """
    tensors: dict[str, Tensor] = {}
    rest: dict = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, dict):
            inner, rest[key] = taken_apart(value, f"{prefix}{key}/")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def put_together(tensors: dict[str, Tensor], rest: dict) -> dict:
    """The dicts that `taken_apart` was given."""
    for path, tensor in tensors.items():
        *keys, last = path.split("/")
        inner = rest
        for key in keys:
            inner = inner[key]
        inner[last] = tensor
    return rest


def remove(path: Path) -> None:
    """Delete a file or a folder, which is hidden first, so that no half of it has its name."""
    if path.is_dir() and not path.is_symlink():
        hidden = path.with_name(f".{path.name.lstrip('.').removesuffix('.tmp')}.old.tmp")
        shutil.rmtree(path.rename(hidden))
    else:
        path.unlink(missing_ok=True)


# ---- read


def load(
    path: str | Path, runtime: Runtime = ALONE, shards: dict[str, Tensor] | None = None
) -> dict:
    """Check a checkpoint, file or folder, and read it.

    Args:   runtime of the ranks that read together; each checks its share of the records
            shards  DTensors by name, of which each rank reads only its own rows: the state_dict of
                    a sharded model, which may be on the meta device
    Raises: ValueError, on every rank, that names a damaged checkpoint; another one is never read
            instead
    Cost:   reads everything once for the CRC32 and once more for the values
    """
    path, shards = Path(path), shards or {}

    def read() -> dict:
        with refusing(path):
            if not path.is_dir():
                tensors, rest = taken_apart(torch.load(path, "cpu", weights_only=True))
                tensors = {name: rows_of(name, t, shards) for name, t in tensors.items()}
            else:
                tensors = read_shards(path, runtime.device, shards)
                rest = torch.load(path / REST, weights_only=True)
            return put_together(tensors, rest)

    runtime.together(lambda: verify(path, runtime))
    return runtime.together(read)


def verify(path: Path, runtime: Runtime) -> None:
    """Compare this rank's share of the CRC32 with the bytes; ValueError if one differs."""
    with refusing(path):
        if not path.is_dir():
            records = [(path, 0, None)]
        else:
            from torch.distributed.checkpoint import FileSystemReader

            stored = FileSystemReader(path).read_metadata().storage_data.values()
            records = [(path / item.relative_path, item.offset, item.length) for item in stored]
            records.append((path / REST, 0, None))
        for name, offset, length in records[runtime.rank :: runtime.world_size]:
            with name.open("rb") as file:
                file.seek(offset)
                part = file if length is None else io.BytesIO(file.read(length))
                damaged = zipfile.ZipFile(part).testzip()
                if damaged:
                    raise ValueError(f"the CRC32 of {damaged} in {name.name} differs")


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Make one line of whatever zipfile, pickle and torch raise for what is no checkpoint."""
    try:
        yield
    except FileNotFoundError as error:
        message = f"{error.filename}: there is no such checkpoint, or not all of it"
        raise ValueError(message) from None
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} is damaged, or no checkpoint: {why}; delete it to go on from the one before"
        ) from None


def read_shards(path: Path, device: torch.device, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors: whole, or this rank's rows of a DTensor like the parameter's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    tensors: dict[str, Tensor] = {}
    for name, about in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        dtype, like = about.properties.dtype, parameter_of(name, about.size, shards)
        if like is None:
            tensors[name] = torch.empty(about.size, dtype=dtype)
        else:
            rows = torch.empty_like(rows_here(like), dtype=dtype, device=device)
            tensors[name] = of_rows(rows, like)
    with warnings.catch_warnings():
        # it says so whenever one process reads a folder alone, which is meant here
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(tensors, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            raise ValueError(str(error)) from None
    return tensors


def rows_of(name: str, tensor: Tensor, shards: dict[str, Tensor]) -> Tensor:
    """A tensor, or this rank's rows of it as a DTensor like the parameter's."""
    like = parameter_of(name, tensor.shape, shards)
    if like is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def parameter_of(name: str, shape: torch.Size, shards: dict[str, Tensor]) -> Tensor | None:
    """The sharded parameter that a tensor of this name and shape belongs to, if there is one."""
    named = [shards[key] for key in name.split("/") if key in shards]
    return named[0] if named and named[0].shape == shape else None


def outlined(path: Path) -> dict:
    """A checkpoint's entries, without the bytes of its tensors and without a check."""
    file = path / REST if path.is_dir() else path
    return torch.load(file, map_location="meta", mmap=True, weights_only=True)


# ---- what is refused


def check_finite(weights: dict[str, Tensor]) -> None:
    """Refuse weights with NaN or infinity: no run could go on from them."""
    bad = []
    for name, tensor in weights.items():
        held = rows_here(tensor)
        # isfinite on all values would take seven times as long; a minimum keeps NaN
        if held.numel() and not torch.stack(held.detach().aminmax()).isfinite().all():
            bad.append(name)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(f"weights are not finite: {', '.join(bad[:3])}{more}")
