"""Checkpoints: one dictionary, written completely or not at all, and verified when it is read.

    step-00001234.pt      a torch.save file
    step-00001234/        with --fsdp, a torch.distributed.checkpoint folder
        __0_0.distcp      rank 0's rows of each tensor, under names such as model/wte.weight
        __1_0.distcp      rank 1's rows
        .metadata         where each tensor is stored, as a pickle
        rest.pt           everything that is not a tensor, a torch.save file

A folder can be read by any number of ranks, not only by as many as wrote it, if all see its disk.
Both forms consist of zip archives, which store a CRC32 of every record. torch.load ignores them:
with one bit of a tensor flipped, it loads the file without complaint. So `load` checks every CRC32
first.

torch.load(weights_only=True) runs no code from a file. The pickle in a folder can run code: load
only folders that you or somebody you trust has written.

A run's folder holds the newest `keep` checkpoints and the best one, whose step every checkpoint
records. Hidden names are unfinished writes. `Run.save` in support/run.py decides what the
dictionary holds; this file reads only "model", to refuse weights that are not finite, and
"best_step".
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
from torch import Tensor, nn

from support.fsdp import as_dtensor, rows_here
from support.runtime import Runtime
from support.store import atomic_write, sync

WORDS = ("last", "best")
REST = "rest.pt"
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")


# ---- names


def step_path(folder: Path, step: int, sharded: bool) -> Path:
    return folder / f"step-{step:08d}{'' if sharded else '.pt'}"


def steps_in(folder: Path) -> list[Path]:
    """List a run's checkpoints, files and folders, oldest first."""
    number = "[0-9]" * 8
    return sorted([*folder.glob(f"step-{number}.pt"), *folder.glob(f"step-{number}")])


def find(folder: str | Path, which: str) -> Path:
    """Return the path of a checkpoint, given as last, best, or a path.

    Raises: ValueError if it does not exist; there is no fallback to another one
    """
    folder = Path(folder)
    steps = steps_in(folder)
    if which == "last" and steps:
        return steps[-1]
    if which == "best" and steps:
        best = outline(steps[-1])["best_step"]
        named = [path for path in steps if path.stem == f"step-{best:08d}"]
        if named:
            return named[0]
    if which not in WORDS and Path(which).exists():
        return Path(which)
    there = ", ".join(path.name for path in steps) or "none"
    raise ValueError(
        f"checkpoint {which}: not found; {folder} holds {there}; choose {', '.join(WORDS)} or,"
        " except with --resume, a path"
    )


# ---- write


def save(
    path: Path, state: dict, runtime: Runtime = ALONE, *, sharded: bool = False, keep: int = 2
) -> None:
    """Write a checkpoint, all ranks together, and wait until it is on disk.

    Then delete all checkpoints but the newest `keep` and the best one, state["best_step"].

    Args:   state   dicts of tensors, numbers, strings and None, the same on all ranks
            sharded True: each rank writes its rows of DTensors into a folder; False: rank 0 writes
                    one file
    Raises: ValueError, on every rank, if any rank cannot write or a weight is not finite; existing
            checkpoints stay as they were
    """
    unfinished = path.with_name(f".{path.name}.tmp")

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(".step-*.tmp"):  # left by a run that was killed
            remove(left)
        if path.is_symlink():  # never write to what a link points to
            path.unlink()
        if sharded:
            unfinished.mkdir()

    def publish() -> None:
        # No system call replaces a folder. One of the same step has the same tensors, so replacing
        # the rest is enough.
        if path.is_dir():
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
            tensors, rest = split_tensors(state)
            runtime.on_rank0(lambda: write_file(unfinished / REST, rest))
            write_shards(tensors, unfinished)
            runtime.on_rank0(lambda: sync(unfinished))
        else:
            runtime.on_rank0(lambda: write_file(path, state))
        runtime.on_rank0(publish)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: not written: {reason}; older checkpoints are intact: free disk space or make"
            " the folder writable, then --resume"
        ) from None


def write_file(path: Path, state: dict) -> None:
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch.save raises an error about its zip writer that hides the failed write.
            raise error.__context__ or error from None


def write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write each rank's rows and wait until they are on disk."""
    # Imported here and below because it takes a second, which other runs should not wait for.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.save(tensors, checkpoint_id=folder)
    except CheckpointException as error:
        raise ValueError(str(error)) from None


def split_tensors(state: dict, prefix: str = "") -> tuple[dict[str, Tensor], dict]:
    """Split nested dicts into their tensors, keyed by path, and the same dicts without tensors.

    Example: {"model": {"wte": t}, "step": 3} -> {"model/wte": t}, {"model": {}, "step": 3}
    """
    tensors: dict[str, Tensor] = {}
    rest: dict = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[prefix + key] = value
        elif isinstance(value, dict):
            inner, rest[key] = split_tensors(value, f"{prefix}{key}/")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def join_tensors(tensors: dict[str, Tensor], rest: dict) -> dict:
    """Undo `split_tensors`: put the tensors back into `rest`."""
    for path, tensor in tensors.items():
        *keys, last = path.split("/")
        inner = rest
        for key in keys:
            inner = inner[key]
        inner[last] = tensor
    return rest


def remove(path: Path) -> None:
    """Delete a file or folder; a folder is hidden first, so its name never holds half of it."""
    if path.is_dir() and not path.is_symlink():
        hidden = path.with_name(f".{path.name.lstrip('.').removesuffix('.tmp')}.old.tmp")
        shutil.rmtree(path.rename(hidden))
    else:
        path.unlink(missing_ok=True)


# ---- read


def load(
    path: str | Path, runtime: Runtime = ALONE, shards: dict[str, Tensor] | None = None
) -> dict:
    """Verify a checkpoint, file or folder, and read it.

    Args:   runtime of the ranks that read together; each verifies its share of the records
            shards  the state_dict of a sharded model, which may be on the meta device: each rank
                    reads only its rows of these DTensors
    Raises: ValueError, on every rank, naming a damaged checkpoint; there is no fallback to another
    Cost:   reads everything once for the CRC32 and once more for the values
    """
    path, shards = Path(path), shards or {}

    def read() -> dict:
        with refusing(path):
            if not path.is_dir():
                tensors, rest = split_tensors(torch.load(path, "cpu", weights_only=True))
                tensors = {name: rows_of(name, t, shards) for name, t in tensors.items()}
            else:
                tensors = read_shards(path, runtime.device, shards)
                rest = torch.load(path / REST, weights_only=True)
            return join_tensors(tensors, rest)

    runtime.together(lambda: verify(path, runtime))
    return runtime.together(read)


def verify(path: Path, runtime: Runtime) -> None:
    """Compare the CRC32 of this rank's share of the records; ValueError if one differs."""
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
                    raise ValueError(f"CRC32 of {damaged} in {name.name} does not match")


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn whatever zipfile, pickle and torch raise for a bad file into a one-line ValueError."""
    try:
        yield
    except FileNotFoundError as error:
        message = f"{error.filename}: no such file: the checkpoint does not exist or is incomplete"
        raise ValueError(message) from None
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} is damaged or no checkpoint: {why}; delete it to resume from the one before"
        ) from None


def read_shards(path: Path, device: torch.device, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a folder's tensors: whole, or if the parameter is sharded, this rank's rows of it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    tensors: dict[str, Tensor] = {}
    for name, about in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        dtype, like = about.properties.dtype, parameter_of(name, about.size, shards)
        if like is None:
            tensors[name] = torch.empty(about.size, dtype=dtype)
        else:
            rows = torch.empty_like(rows_here(like), dtype=dtype, device=device)
            tensors[name] = as_dtensor(rows, like)
    with warnings.catch_warnings():
        # torch warns whenever a process reads a folder on its own, which is intended here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(tensors, checkpoint_id=path, no_dist=True)
        except CheckpointException as error:
            raise ValueError(str(error)) from None
    return tensors


def rows_of(name: str, tensor: Tensor, shards: dict[str, Tensor]) -> Tensor:
    """Return the tensor, or if its parameter is sharded, this rank's rows of it as a DTensor."""
    like = parameter_of(name, tensor.shape, shards)
    if like is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def parameter_of(name: str, shape: torch.Size, shards: dict[str, Tensor]) -> Tensor | None:
    """Find the sharded parameter that a tensor of this name and shape belongs to, if any."""
    named = [shards[key] for key in name.split("/") if key in shards]
    return named[0] if named and named[0].shape == shape else None


def outline(path: Path) -> dict:
    """Read a checkpoint's entries without loading its tensors and without verifying it."""
    file = path / REST if path.is_dir() else path
    return torch.load(file, map_location="meta", mmap=True, weights_only=True)


# ---- what is refused


def check_finite(weights: dict[str, Tensor]) -> None:
    """Refuse weights with NaN or infinity: no run could continue from them."""
    bad = []
    for name, tensor in weights.items():
        held = rows_here(tensor)
        # isfinite on all values would take seven times as long. A NaN makes min and max NaN.
        if held.numel() and not torch.stack(held.detach().aminmax()).isfinite().all():
            bad.append(name)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(f"weights are not finite: {', '.join(bad[:3])}{more}")


def assign(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Make these tensors the model's weights, without a copy."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in expected.keys() | weights.keys():
        if name not in weights or weights[name].shape != expected.get(name):
            raise ValueError(f"the checkpoint's weight {name} does not fit the model")
    model.load_state_dict(weights, assign=True)
