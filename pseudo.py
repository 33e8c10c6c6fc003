"""Pseudo-to-Real: train a cheap shadow of the model first, then make it real.

A shadow has fewer weights than the model it becomes. It shares weights between layers, leaves
layers out, or both:

    layer             0  1  2  3  4  5
    --pseudo-group 2  a  b  a  b  a  b     a unit of two layers is used three times
    --pseudo-layers 3 a  .  b  .  .  c     three layers run, the others are added later

After a given share of the budget, every layer gets weights of its own: a copy of the weights that
ran in its place, and their optimizer state. Sharing saves memory but no FLOPs; fewer layers save
both. The gradient of shared weights is averaged over their uses; autograd would leave the sum.

A stage of a run is described by its `Owners`: for each layer, the layer whose weights it uses.
Parameters keep their names throughout. In reading order: configuration, stages, model, state,
gradients, settings. The technique acts where the code says `settings.pseudo.on`:

    config.py   build             `resolved` fills in defaults and refuses what cannot work
    plan.py     tokens_by_layer   absent layers cost nothing on the clock
    train.py    models_to_come    `owners_to_come`: --offload needs room for every stage
                first_trainer     `owners_at`: of a new model only the blocks that own are made
                assemble          `share_weights`: in a new, resumed or changed model
                enter_stage       `hand_over` the state when `owners_at` changes; assemble again
                train_step        `average` the gradients; `state` saves the owners

Papers: Lin et al., arXiv 2110.03888 (the idea and its name; no code); Yang et al., arXiv 2110.03848
        (units, when to untie, mean gradients); Gong et al. 2019, StackBERT (growth in depth)

    python train.py --pseudo --pseudo-group 1 --pseudo-until 0.02,0.05,0.1
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from support.clock import StepContext
from support.settings import flag

if TYPE_CHECKING:
    from model import TokenMeta

STATES = ("reset", "rescale", "copy")


@dataclass(frozen=True)
class PseudoConfig:
    on: bool = flag("--pseudo", False, "start with layers that share weights, or with fewer layers")
    group: int | None = flag("--pseudo-group", None, "layers in a unit (default: up to 4)", least=1)
    until: str | None = flag(
        "--pseudo-until",
        None,
        "share of a run before layers get their own weights; 0.05,0.1: units double at 0.05"
        " (default: 0.05; with --pseudo-layers 0.75)",
    )
    state: str = flag("--pseudo-state", "reset", "optimizer state when sharing ends", STATES)
    layers: int | None = flag("--pseudo-layers", None, "layers at first (default: all)", least=1)


# ---- stages

Owners = tuple[int, ...]  # (L,) for each layer, the layer whose weights it uses, or ABSENT
ABSENT = -1


def stage(layers: int, present: int, group: int) -> Owners:
    """Return the owners of a model in which `present` layers run, sharing in units of `group`.

    The layers that run are spread evenly and include the first and the last.

    Paper:    arXiv 2110.03848, section 4: A x B is a unit of A layers used B times
    Example:  stage(6, 6, 2) == (0, 1, 0, 1, 0, 1); stage(6, 3, 3) == (0, -1, 2, -1, -1, 5)
    """
    running = [-(-number * layers // present) for number in range(present)]
    if present > 1:
        running[-1] = layers - 1
    owners = [ABSENT] * layers
    for number, layer in enumerate(running):
        owners[layer] = running[number % group]
    return tuple(owners)


def origin(owners: Owners, layer: int) -> int:
    """Return the layer whose weights this layer inherits when it gets weights of its own.

    An absent layer inherits from one that runs; each of these passes its weights to about as many.

    Example: with owners (0, -1, 2, -1, -1, 5), layers 0 to 5 inherit from 0, 0, 2, 2, 5, 5
    """
    if owners[layer] != ABSENT:
        return owners[layer]
    running = [owner for owner in owners if owner != ABSENT]
    return running[layer * len(running) // len(owners)]


def owners_in_words(owners: Owners) -> str:
    """Write owners as text. Example: (0, -1, 0) -> "0 . 0" """
    return " ".join("." if owner == ABSENT else str(owner) for owner in owners)


def parse_until(text: str) -> tuple[float, ...]:
    """Parse the shares of the budget at which stages end. Example: "0.02,0.1" -> (0.02, 0.1)"""
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = (math.nan,)
    if not all(a < b for a, b in pairwise((0, *shares, 1))):
        raise ValueError(f"--pseudo-until {text}: give rising shares between 0 and 1: 0.02,0.1")
    return shares


def owners_at(config: PseudoConfig, layers: int, progress: float) -> Owners:
    """Return the owners of a step that begins at this share of the budget."""
    shares = parse_until(config.until)
    passed = sum(progress >= share for share in shares)
    if passed == len(shares):
        return tuple(range(layers))
    return stage(layers, config.layers or layers, config.group * 2**passed)


def owners_to_come(config: PseudoConfig, layers: int, progress: float) -> list[Owners]:
    """Return the owners of the present stage and all later ones; in the last, nothing is shared."""
    switches = (share for share in parse_until(config.until) if share > progress)
    return [owners_at(config, layers, at) for at in (progress, *switches)]


def tokens_by_layer(config: PseudoConfig, context: StepContext, tokens: list[int]) -> list[int]:
    """Return how many tokens of a row each layer sees; an absent layer sees none."""
    owners = owners_at(config, context.layers, context.progress)
    return [0 if owner == ABSENT else n for owner, n in zip(owners, tokens, strict=True)]


# ---- the model


class Absent(nn.Module):
    """Placeholder for a layer that is added later. It returns its input unchanged."""

    def forward(self, x: Tensor, meta: "TokenMeta") -> Tensor:
        return x


def share_weights(model: nn.Module, owners: Owners) -> nn.Module:
    """Make the layers of a newly built model use the weights of their owners, in place."""
    for layer, owner in enumerate(owners):
        if owner != layer:
            model.h[layer] = Absent() if owner == ABSENT else model.h[owner]
    return model


# ---- the state


def hand_over(state: dict, owners: Owners, policy: str) -> dict:
    """Turn the training state of one stage into the state of another. Pure.

    The new model computes the same function, bit for bit, unless layers were added. Tensors that
    stay the same are reused, not copied.

    Args:    state  of a `Trainer`: {"model": {name: tensor}, "pseudo": {"owners": ...}, ...}
             owners of the next stage
             policy see `moments_for`
    Example: with rescale, owners (0, 0) -> (0, 1): h.1.* are copies of h.0.*, and exp_avg_sq of
             both doubles
    """
    before: Owners = tuple(state["pseudo"]["owners"])
    weights, moments = state["model"], state["optimizers"]["state"]
    new_weights = {name: value for name, value in weights.items() if not name.startswith("h.")}
    new_moments = {name: value for name, value in moments.items() if not name.startswith("h.")}
    passed_on: set[int] = set()  # layers of the old stage whose tensors a new layer has already
    for layer, owner in enumerate(owners):
        if owner == ABSENT:
            continue
        if owner != layer:  # an owner is the first of its layers, so its weights are there by now
            new_weights |= with_layer(block_of(new_weights, owner), layer)
            continue
        source = origin(before, layer)
        block, kept = block_of(weights, source), block_of(moments, source)
        if source in passed_on:
            block = {name: tensor.clone() for name, tensor in block.items()}
            kept = {name: {key: t.clone() for key, t in of.items()} for name, of in kept.items()}
        passed_on.add(source)
        ratio = before.count(source) / owners.count(layer)  # of uses
        if before[layer] == ABSENT or ratio != 1:
            kept = moments_for(kept, ratio, policy)
        new_weights |= with_layer(block, layer)
        new_moments |= with_layer(kept, layer)
    optimizers = {**state["optimizers"], "state": new_moments}
    return {**state, "model": new_weights, "optimizers": optimizers, "pseudo": {"owners": owners}}


def block_of(entries: dict[str, Any], layer: int) -> dict[str, Any]:
    """Select the entries of a block: {"h.3.ln_1.bias": x} and layer 3 give {"ln_1.bias": x}"""
    prefix = f"h.{layer}."
    return {name[len(prefix) :]: x for name, x in entries.items() if name.startswith(prefix)}


def with_layer(block: dict[str, Any], layer: int) -> dict[str, Any]:
    """Undo `block_of`, for any layer."""
    return {f"h.{layer}.{name}": value for name, value in block.items()}


def moments_for(moments: dict[str, dict], n: float, policy: str) -> dict[str, dict]:
    """Return the optimizer state of a layer that gets its own copy of weights with n uses.

    copy     the moments of the shared weights
    rescale  the same, but the second moment times n, because the mean of n independent gradients
             has 1/n of the variance of one
    reset    none: the moments start from zero, with AdamW's bias correction
    """
    if policy == "reset":
        return {}
    if policy == "copy" or n == 1:
        return moments
    return {
        name: {key: t * n if key == "exp_avg_sq" else t for key, t in of.items()}
        for name, of in moments.items()
    }


# ---- the gradients


def average(parameters: dict[str, nn.Parameter], owners: Sequence[int]) -> None:
    """Average the gradients of shared weights over their uses, in place (arXiv 2110.03848, alg. 1).

    Args: parameters by name; autograd has summed their gradients over all uses
          owners     for each layer, the layer whose weights it uses, or ABSENT
    """
    for owner, uses in Counter(owners).items():
        if uses > 1 and owner != ABSENT:
            block = block_of(parameters, owner).values()
            torch._foreach_div_([p.grad for p in block if p.grad is not None], uses)


# ---- settings


def resolved(config: PseudoConfig, layers: int, init: str | None) -> PseudoConfig:
    """Return the settings with defaults filled in; ValueError names a flag that cannot work."""
    few = config.layers or layers
    until = ("0.75" if config.layers else "0.05") if config.until is None else config.until
    shares = parse_until(until)
    units = units_of(few, shares)
    group = config.group
    if group is None:
        most = min(4, few - 1)  # a unit of all layers shares nothing
        group = few if config.layers else max((n for n in units if n <= most), default=1)
    if few > layers:
        raise ValueError(f"--pseudo-layers {few} is more than the model's {layers} layers")
    if group not in units:
        choices = ", ".join(map(str, units)) or "fewer shares"
        raise ValueError(f"--pseudo-group {group} with --pseudo-until {until}: choose {choices}")
    if init is not None:
        raise ValueError("--init and --pseudo exclude each other: --init has weights of all layers")
    return replace(config, until=until, group=group)


def units_of(layers: int, shares: Sequence[float]) -> list[int]:
    """List the units that divide the layers, also when doubled at every share except the last.

    Example: for 6 layers 1, 2, 3 and 6; with two shares only 1, which becomes 2
    """
    doubled = 2 ** max(len(shares) - 1, 0)
    most = layers if doubled == 1 else layers // doubled - 1  # a unit of all layers shares nothing
    return [n for n in range(1, most + 1) if layers % (n * doubled) == 0]
