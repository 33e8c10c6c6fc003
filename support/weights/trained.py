"""What a run has learned, for another run (--init) or another library: weights and their shapes.

Optimizer state, clock and everything else that only its own run needs are left alone.
"""

import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from support import checkpoint
from support.run import ModelSize
from support.step.sizes import SIZES, ModelConfig, with_defaults


class Trained(NamedTuple):
    """What a checkpoint says of its model, without the tensors."""

    path: Path
    step: int
    settings: dict[str, Any]  # {"group.field": value} of the run; model.layers are those that run
    size: ModelSize  # with the positions, where they are learned
    tokenizer: str  # its fingerprint


def checkpoint_of(path: str | Path) -> Path | None:
    """The checkpoint that a path names: itself, or the newest of a run; None for any other file.

    Raises: ValueError for a folder without a checkpoint
    """
    path = Path(path)
    if path.is_file():
        return path if is_checkpoint(path) else None
    if not path.is_dir() or (path / checkpoint.REST).exists():
        return path if path.is_dir() else None
    if steps := checkpoint.steps_in(path):
        return steps[-1]
    raise ValueError(f"{path} is a folder, and holds no checkpoint of a step: name another")


def is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint of train.py."""
    if not zipfile.is_zipfile(path):
        return False
    try:
        return "clock" in checkpoint.outlined(path)
    except Exception:  # torch.load raises half a dozen kinds
        return False


def trained(path: Path) -> Trained:
    """Read a checkpoint's outline. Layers that share weights (--pseudo) count one by one."""
    state = checkpoint.outlined(path)
    defaults = {f"model.{item.name}": item.default for item in fields(ModelConfig)}
    settings = with_defaults(defaults | state["config"])  # a run may be from before a setting
    size = ModelSize(**state["model_size"])
    if settings["model.pos"] == "learned" and not size.positions:
        size = size._replace(positions=SIZES[settings["model.size"]].seq_len)
    settings["model.layers"] = len(running_layers(state))
    return Trained(path, state["step"], settings, size, state["tokenizer_fingerprint"])


def weights_of(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, verified; see `real_weights`."""
    return real_weights(checkpoint.load(path))


def real_weights(state: dict) -> dict[str, Tensor]:
    """The weights in a training state, under a name for every layer that runs.

    With --pseudo, layers that share weights get the same tensors, and layers that are not there yet
    are left out.

    Example: owners (0, -1, 0): h.0.* of the state under h.0.* and h.1.*
    """
    weights = state["model"]
    real = {name: value for name, value in weights.items() if not name.startswith("h.")}
    for layer, owner in enumerate(running_layers(state)):
        for name, value in weights.items():
            if name.startswith(f"h.{owner}."):
                real[f"h.{layer}.{name.removeprefix(f'h.{owner}.')}"] = value
    return real


def running_layers(state: dict) -> list[int]:
    """For each layer that runs, the layer whose weights it uses."""
    if "pseudo" not in state:
        return list(range(state["config"]["model.layers"]))
    return [owner for owner in state["pseudo"]["owners"] if owner >= 0]
