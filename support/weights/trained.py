"""What a run has learned, for another run (--init) or another library: its weights and their shape.

Optimizer state, clock and everything else that only its own run needs are not touched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from support.run import checkpoint, sharded_checkpoint
from support.run.checkpoint import MARK
from support.run.folder import ModelSize
from support.run.sharded_checkpoint import outlined
from support.step.sizes import SIZES


class Trained(NamedTuple):
    """What a checkpoint says of itself, but for its tensors."""

    path: Path
    step: int
    settings: dict[str, Any]  # {"group.field": value} of the run; model.layers are those that run
    size: ModelSize  # with the positions, where they are learned
    tokenizer: str | None  # its fingerprint; None of a checkpoint that does not tell


def checkpoint_of(path: str | Path) -> Path | None:
    """The checkpoint that a path names: itself, or the newest of a run; None for any other file.

    Raises: ValueError for a folder without a checkpoint
    """
    path = Path(path)
    if path.is_file():
        return path if has_trailer(path) else None
    if not path.is_dir() or path.suffix == sharded_checkpoint.SUFFIX:
        return path if path.is_dir() else None
    if steps := checkpoint.steps_in(path):
        return steps[-1]
    bests = checkpoint.bests_in(path)
    there = f" but {bests[-1].name}: name that file" if bests else ": name another"
    raise ValueError(f"{path} is a folder, and holds no checkpoint of a step{there}")


def has_trailer(path: Path) -> bool:
    """Whether a file ends as checkpoint.save ends one."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - len(MARK) - 64))
        return file.read().startswith(MARK.encode())


def trained(path: Path) -> Trained:
    """What a checkpoint is of. A shadow (--pseudo) counts as a model of the layers that run."""
    state = outlined(path)
    try:
        settings, size = dict(state["config"]), ModelSize(**state["model_size"])
        learned = settings["model.pos"] == "learned"
        positions = size.positions or SIZES[settings["model.size"]].seq_len
        if "pseudo" in state:
            settings["model.layers"] = len(running(state["pseudo"]["owners"]))
        return Trained(
            path,
            state["step"],
            settings,
            size._replace(positions=positions if learned else None),
            state.get("tokenizer_fingerprint"),
        )
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is of an older version of train.py: name another") from None


def weights_of(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, verified; those that layers share are there for each of them."""
    state = sharded_checkpoint.load(path)
    if "pseudo" in state:
        return real_layers(state["model"], state["pseudo"]["owners"])
    return state["model"]


def running(owners: Sequence[int]) -> list[int]:
    """Of each layer that runs the layer whose weights it uses."""
    return [owner for owner in owners if owner >= 0]


def real_layers(weights: dict[str, Tensor], owners: Sequence[int]) -> dict[str, Tensor]:
    """The weights of the model that computes the same function, with none of them shared.

    Every layer that runs has its own; layers that are not there yet are left out.

    Example: owners (0, -1, 0): h.0.* for layers 0 and 1 of two, in tensors of their own
    """
    real = {name: value for name, value in weights.items() if not name.startswith("h.")}
    for layer, owner in enumerate(running(owners)):
        prefix = f"h.{owner}."
        for name in [name for name in weights if name.startswith(prefix)]:
            real[f"h.{layer}.{name.removeprefix(prefix)}"] = weights[name].clone()
    return real
