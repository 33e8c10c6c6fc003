"""Checkpoints: one file each, written completely or not at all, and verified when it is read.

    save    every rank  refuses weights that are not finite; with --fsdp all gather each tensor
            rank 0      writes a hidden file, waits until it is on disk, renames it
                        step-00001234.pt, and deletes all but the newest `keep` and the best one
    load    rank 0      compares every CRC32 and reads the file
            every rank  receives the tensors from rank 0; with --fsdp only its rows of them

So only rank 0 needs the folder. The file is torch.save's: a zip archive, with a CRC32 of every
record. torch.load ignores them: with one bit of a tensor flipped, it loads the file without
complaint. With weights_only=True it runs no code from a file.

`Run.save` in support/run.py decides what the nested dicts hold. Two entries are read here: "model"
and "best_step". `check_entries` refuses a file that `Run.save` has not written.
"""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.fsdp import gather_to_rank0, local_rows, scatter_from_rank0
from support.runtime import Runtime
from support.store import atomic_write, json_object, sync

ENTRIES = {"run": str, "commit": str, "tokenizer_fingerprint": str, "best": float}
ENTRIES |= dict.fromkeys(("config", "model_size", "made_by", "model", "clock", "optimizers"), dict)
ENTRIES |= dict.fromkeys(("step", "best_step", "evaluation_due", "log_size"), int)
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")


# ---- write


def save(path: Path, state: dict, runtime: Runtime = ALONE, *, keep: int = 2) -> None:
    """Write a checkpoint, all ranks together; then delete old ones.

    Args:   state of this rank; rank 0's host memory has to hold all ranks' DTensors
            keep  how many of the newest to keep, besides the best one, state["best_step"]
    Raises: ValueError, on every rank, if a weight is not finite on any, or if rank 0 cannot write
    """
    runtime.on_all_ranks(lambda: check_finite(state["model"]))
    whole = map_tensors(state, lambda tensor: gather_to_rank0(tensor, runtime))
    try:
        runtime.on_rank0(lambda: write_file(path, whole, keep))
    except ValueError as error:
        raise ValueError(f"{path}: not written, older checkpoints are intact: {error}") from None


def check_finite(weights: dict[str, Tensor]) -> None:
    """Refuse weights with NaN or infinity: no run could continue from them."""
    for name, tensor in weights.items():
        rows = local_rows(tensor)
        # isfinite on all values would take seven times as long. A NaN makes min and max NaN.
        if rows.numel() and not torch.stack(rows.detach().aminmax()).isfinite().all():
            raise ValueError(f"weight {name} is not finite")


def map_tensors(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in nested dicts, in their order, which all ranks share."""
    if isinstance(state, dict):
        return {key: map_tensors(value, change) for key, value in state.items()}
    return change(state) if isinstance(state, Tensor) else state


def write_file(path: Path, state: dict, keep: int) -> None:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".step-*.tmp"):  # left by a run that was killed
        unfinished.unlink()
    with atomic_write(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch.save raises an error about its zip writer that hides the failed write.
            raise error.__context__ or error from None
    sync(folder)
    best = step_path(folder, state["best_step"])
    for old in steps_in(folder)[:-keep]:
        if old != best:
            old.unlink()


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def steps_in(folder: Path) -> list[Path]:
    """List a run's checkpoints, oldest first."""
    return sorted(folder.glob(f"step-{'[0-9]' * 8}.pt"))


# ---- read


def find(folder: str | Path, which: str) -> Path:
    """Return the path of a checkpoint; ValueError if there is none.

    Args: folder of a run, or one of its checkpoints, which is then the last
          which  last | best, or the path of a checkpoint
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(f"{folder} does not exist: name the folder of a run, or a checkpoint")
    steps = [folder] if folder.is_file() else steps_in(folder)
    path = Path(which) if Path(which).exists() else folder / which
    if steps and which == "last":
        path = steps[-1]
    if steps and which == "best":
        path = step_path(steps[-1].parent, outline(steps[-1])["best_step"])
    if path.is_file():
        return path
    there = ", ".join(other.name for other in steps if other.exists()) or "no checkpoint"
    if path.stem == "step-00000000":
        raise ValueError(f"{folder} has no best checkpoint, because it was never evaluated")
    raise ValueError(f"checkpoint {path}: not found; {folder} holds {there}")


def load(path: str | Path, runtime: Runtime = ALONE, *, sharded: bool = False) -> dict:
    """Verify and read a checkpoint on rank 0, and send it to all ranks, one tensor at a time.

    Args:   sharded True: each rank gets its rows of every tensor, as DTensors on its device;
                    False: every rank gets every tensor, in host memory
    Raises: ValueError, on every rank, naming a file that is damaged or another program's
    """
    state = runtime.on_all_ranks(lambda: read(Path(path)) if runtime.is_rank0 else {})
    if runtime.world_size == 1 and not sharded:
        return state
    shapes = runtime.on_rank0(lambda: map_tensors(state, lambda tensor: tensor.to("meta")))
    source = state if runtime.is_rank0 else shapes
    return map_tensors(source, lambda tensor: receive(tensor, runtime, sharded))


def read(path: Path) -> dict:
    """Compare the CRC32 of every record, then read the file into host memory."""
    with refusing_damage(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"the CRC32 of {damaged} does not match")
        state = torch.load(path, "cpu", weights_only=True)
    check_entries(path, state)
    return state


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """Report what cannot be read as a damaged file, in one line."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, pickle and torch raise many kinds for a bad file
        why = (str(error) or type(error).__name__).splitlines()[0]
        advice = "; delete it to resume from one before" if path.stem[:5] == "step-" else ""
        raise ValueError(f"{path} is damaged or no checkpoint: {why}{advice}") from None


def receive(tensor: Tensor, runtime: Runtime, sharded: bool) -> Tensor:
    """Return rank 0's tensor, or this rank's rows of it.

    Args: tensor on other ranks one on the meta device, with the same shape and dtype
    """
    if tensor.is_meta:
        tensor = torch.empty_like(tensor, device="cpu")
    if sharded and tensor.ndim:
        return scatter_from_rank0(tensor, runtime)
    if runtime.world_size > 1:
        dist.broadcast(tensor, 0)
    return tensor


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Make these tensors the model's weights, without a copy."""
    check_fit(model, weights)
    model.load_state_dict(weights, assign=True)


def check_fit(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Refuse weights that are not all of the model's, or of other shapes."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights or weights[name].shape != expected.get(name):
            raise ValueError(f"the checkpoint's weight {name} does not fit the model")


def outline(path: Path) -> dict:
    """Read a checkpoint of a run without its tensors' values and without verifying these."""
    with refusing_damage(path):
        zipfile.ZipFile(path).close()  # torch's own message is about mmap
        state = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    check_entries(path, state)
    return state


def check_entries(path: Path, state: object) -> None:
    """Refuse what torch.load reads but `Run.save` has not written, or not under this name."""
    entries = state if isinstance(state, dict) else {}
    wrong = [name for name, kind in ENTRIES.items() if not isinstance(entries.get(name), kind)]
    if wrong or any(tensor.dtype != torch.float32 for tensor in entries["model"].values()):
        what = wrong[0] if wrong else "model: weights in fp32 are expected"
        raise ValueError(f"{path} is not a checkpoint of train.py ({what})")
    if path.stem.startswith("step-") and path != step_path(path.parent, state["step"]):
        raise ValueError(f"{path} is that of step {state['step']}: give it its name back")
    config = path.with_name("config.json")
    about = json_object(config.read_bytes()) if config.exists() else None
    if about and about.get("run", state["run"]) != state["run"]:
        raise ValueError(f"{path} belongs to another run than {config}: put its own back")
