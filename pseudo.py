"""Pseudo-to-Real: train a cheap shadow of the model first, then make it real.

A shadow has fewer weights than the model it becomes. It shares weights between layers, leaves
layers out, or both:

    layer             0  1  2  3  4  5
    --pseudo-group 2  a  b  a  b  a  b     a unit of two layers is used three times
    --pseudo-layers 3 a  .  b  .  .  c     three layers run, the others are added later

After a given share of the budget, every layer gets weights of its own: a copy of the weights that
ran in its place. The optimizer state is handed over too. Sharing saves memory but no FLOPs; fewer
layers save both. While weights are shared, their gradient is averaged over their uses; autograd
would leave the sum.

A stage of a run is described by its `Owners`: for each layer, the layer whose weights it uses.
`share` makes a new model use the owners of a stage, and `hand_over` turns the state of one stage
into the state of the next. Parameters keep their names throughout. In reading order: configuration,
stages, model, state, gradients, settings. The technique acts where the code says
`settings.pseudo.on`:

    config.py   build             `resolved` fills in defaults and refuses what cannot work
    plan.py     tokens_by_layer   absent layers cost nothing on the clock
    train.py    models_to_come    `owners_to_come`: --offload needs room for every stage
                assemble          `share`: when a run starts or resumes, and after each stage
                train             `next_trainer`: when `owners_at` changes, hand the state over and
                                  assemble again
                train_step        `average` the gradients; `state` saves the owners

Papers: Lin et al., arXiv 2110.03888 (the idea and its name; no code); Yang et al., arXiv
        2110.03848 (units, when to untie, mean gradients); Gong et al. 2019, StackBERT, and arXiv
        2511.04981 (growth in depth)

    python train.py --pseudo --pseudo-group 1 --pseudo-until 0.02,0.05,0.1
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

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
    group: int | None = flag(
        "--pseudo-group", None, "layers in the repeated unit (default: at most 4)", least=1
    )
    until: str | None = flag(
        "--pseudo-until",
        None,
        "share of a run before layers get their own weights; 0.05,0.1: units double at 0.05"
        " (default: 0.05; with --pseudo-layers 0.75)",
    )
    state: str = flag(
        "--pseudo-state", "reset", "optimizer state of layers that stop sharing", STATES
    )
    layers: int | None = flag(
        "--pseudo-layers", None, "layers at the start (default: all)", least=1
    )


# ---- stages

Owners = tuple[int, ...]  # (L,) for each layer, the layer whose weights it uses, or ABSENT
ABSENT = -1


def stage(layers: int, present: int, group: int) -> Owners:
    """Return the owners of a model in which `present` layers run, sharing in units of `group`.

    The layers that run are spread evenly and include the first and the last.

    Paper:    arXiv 2110.03848, section 4: A x B is a unit of A layers used B times
    Example:  stage(6, 6, 2) == (0, 1, 0, 1, 0, 1); stage(6, 3, 3) == (0, -1, 2, -1, -1, 5)
    """
    places = [-(-number * layers // present) for number in range(present)]
    if present > 1:
        places[-1] = layers - 1
    owners = [ABSENT] * layers
    for number, place in enumerate(places):
        owners[place] = places[number % group]
    return tuple(owners)


def origin(owners: Owners, layer: int) -> int:
    """Return the layer whose weights this layer inherits when it gets weights of its own.

    An absent layer inherits from one that runs; each of these passes its weights to about as many.

    Example: with owners (0, -1, 2, -1, -1, 5), layers 0 to 5 inherit from 0, 0, 2, 2, 5, 5
    """
    places = [place for place, owner in enumerate(owners) if owner != ABSENT]
    stand_in = places[layer * len(places) // len(owners)]
    return owners[layer if owners[layer] != ABSENT else stand_in]


def owners_in_words(owners: Owners) -> str:
    """Write owners as text. Example: (0, -1, 0) -> "0 . 0" """
    return " ".join("." if owner == ABSENT else str(owner) for owner in owners)


def parse_until(text: str) -> tuple[float, ...]:
    """Parse the shares of the budget at which stages end.

    Example: "0.02,0.1" -> (0.02, 0.1)
    Raises:  ValueError unless the shares increase and lie between 0 and 1
    """
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


def share(model: nn.Module, owners: Owners) -> nn.Module:
    """Make the layers of a newly built model use the weights of their owners, in place.

    The layers' previous weights are lost. To take a trained model from one stage to the next, apply
    `hand_over` to its state.
    """
    for layer, owner in enumerate(owners):
        if owner != layer:
            model.h[layer] = Absent() if owner == ABSENT else model.h[owner]
    return model


# ---- the state


def hand_over(state: dict, owners: Owners, policy: str) -> dict:
    """Turn the training state of one stage into the state of another. Pure.

    The new model computes the same function, bit for bit, unless layers were added. Tensors that
    stay the same are reused, not copied.

    Args:    state     {"model": {name: tensor}, "optimizers": {"state": {name: {what: tensor}}},
                       "pseudo": {"owners": ...}}; other entries are passed on
             owners    of the next stage
             policy    optimizer state of a layer that gets its own copy of weights with n uses:
                         copy     the moments of the shared weights
                         rescale  the same, but the second moment times n, because the mean of n
                                  independent gradients has 1/n of the variance of one
                         reset    none: the moments start from zero, with AdamW's bias correction
    Example: with rescale, owners (0, 0) -> (0, 1): h.1.* are copies of h.0.*, and exp_avg_sq of
             both doubles
    """
    before: Owners = tuple(state["pseudo"]["owners"])
    weights, moments = state["model"], state["optimizers"]["state"]
    new_weights, new_moments = (
        {name: value for name, value in named.items() if not name.startswith("h.")}
        for named in (weights, moments)
    )
    uses_before, uses_after = Counter(before), Counter(owners)
    taken: set[int] = set()  # layers of the old stage whose weights a new layer already has
    for layer, owner in enumerate(owners):
        if owner == ABSENT:
            continue
        if owner != layer:  # the first layer that shares is the owner, so it has its weights by now
            for name in names_of_block(new_weights, owner):
                new_weights[f"h.{layer}.{name}"] = new_weights[f"h.{owner}.{name}"]
            continue
        source = origin(before, layer)
        is_new = before[layer] == ABSENT
        is_copy = source in taken
        taken.add(source)
        changes = is_new or uses_before[source] != uses_after[layer]
        scale = uses_before[source] / uses_after[layer] if policy == "rescale" else 1
        for name in names_of_block(weights, source):
            old, new = f"h.{source}.{name}", f"h.{layer}.{name}"
            new_weights[new] = weights[old].clone() if is_copy else weights[old]
            if old in moments and not (policy == "reset" and changes):
                kept = {key: t.clone() if is_copy else t for key, t in moments[old].items()}
                if scale != 1 and "exp_avg_sq" in kept:
                    kept["exp_avg_sq"] = kept["exp_avg_sq"] * scale
                new_moments[new] = kept
    return {
        **state,
        "model": new_weights,
        "optimizers": {**state["optimizers"], "state": new_moments},
        "pseudo": {"owners": owners},
    }


def names_of_block(weights: dict[str, Tensor], layer: int) -> list[str]:
    """Return the names of a block's weights, relative to the block.

    Example: {"h.3.attn.c_attn.weight": ...} and layer 3 give ["attn.c_attn.weight"]
    """
    prefix = f"h.{layer}."
    return [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]


# ---- the gradients


def average(named: dict[str, nn.Parameter], owners: Sequence[int]) -> None:
    """Average the gradients of shared weights over their uses, in place.

    Paper: arXiv 2110.03848, algorithm 1
    Args:  named  parameters by name; autograd has summed their gradients over all uses
           owners for each layer, the layer whose weights it uses, or -1
    """
    for owner, uses in Counter(owners).items():
        if uses > 1 and owner >= 0:
            shared = [p.grad for name, p in named.items() if name.startswith(f"h.{owner}.")]
            torch._foreach_div_([gradient for gradient in shared if gradient is not None], uses)


# ---- settings


def resolved(config: PseudoConfig, layers: int, init: str | None) -> PseudoConfig:
    """Return the settings with defaults filled in (docs/scale.md has the measurements).

    Args:   layers, init the model's --layers and --init
    Raises: ValueError naming the flag whose value cannot work
    """
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
        raise ValueError(
            f"--pseudo-group {group} with --pseudo-until {until}: the unit, doubled at each share"
            f" but the last, must divide {few} layers: choose {choices}"
        )
    if init is not None:
        raise ValueError("--init and --pseudo exclude each other: --init has weights of all layers")
    return replace(config, until=until, group=group)


def units_of(layers: int, shares: Sequence[float]) -> list[int]:
    """Return the units that divide the layers, also when doubled at every share except the last.

    A doubled unit is smaller than the model, since a unit of all layers shares nothing.

    Example: for 6 layers 1, 2, 3 and 6; with two shares only 1, which becomes 2
    """
    doubled = 2 ** max(len(shares) - 1, 0)
    most = layers if doubled == 1 else layers // doubled - 1
    return [n for n in range(1, most + 1) if layers % (n * doubled) == 0]
