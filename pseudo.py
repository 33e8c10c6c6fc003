"""Pseudo-to-Real: train a cheap shadow of the model first, then make it real.

A shadow has fewer weights than the model it becomes, in one of two ways, or both:

    layer            0  1  2  3  4  5
    --pseudo-group 2 a  b  a  b  a  b     a unit of two layers is used three times
    --pseudo-layers 3 a  .  b  .  .  c    three layers run, the others are not there yet

At a share of the budget every layer gets weights of its own, copies of those that ran in its place,
and the optimizers' state goes with them. Sharing saves memory, no FLOPs; fewer layers save both.
While weights are shared, their gradient is the mean over their uses, where autograd has the sum.

A stage of a run is its `Owners`: for every layer the layer whose weights it uses. `share` gives a
new model the owners of a stage, `handed_over` turns the state of one stage into that of the next.
Parameters keep their names throughout. In reading order: configuration, stages, the model, the
state, the gradients, the settings. It acts where `settings.pseudo.on` stands:

    config.py   build             `resolved`: defaults, and what is refused
    plan.py     tokens_by_layer   layers that are not there yet cost nothing
    train.py    go                `owners_to_come`: --offload needs room for every stage
                assemble          `share`: as the run begins, goes on, and at the end of a stage
                train             where `owners_at` changes: `handed_over`, and `assemble` again
                train_step        `average` the gradients; `state` keeps the owners

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
    on: bool = flag(False, "start with layers that share weights, or with fewer layers")
    group: int | None = flag(None, "layers in the repeated unit (default: at most 4)", least=1)
    until: str | None = flag(
        None,
        "share of a run until layers have their own weights; 0.05,0.1: units double at 0.05"
        " (default: 0.05; with --pseudo-layers 0.75)",
    )
    state: str = flag("reset", "optimizer state of layers that get their own", choices=STATES)
    layers: int | None = flag(None, "layers at the start (default: all)", least=1)


# ---- stages

Owners = tuple[int, ...]  # (L,) of each layer the layer whose weights it uses
ABSENT = -1


def stage(layers: int, present: int, group: int) -> Owners:
    """The owners of a model where `present` layers run, in units of `group` layers.

    Those that run are spread evenly, the first and the last among them.

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
    """The layer whose weights a layer takes over when it gets its own.

    A layer that runs stands in for an absent one; each stands in for about equally many.

    Example: with owners (0, -1, 2, -1, -1, 5) those of layers 0, 0, 2, 2, 5, 5
    """
    places = [place for place, owner in enumerate(owners) if owner != ABSENT]
    stand_in = places[layer * len(places) // len(owners)]
    return owners[layer if owners[layer] != ABSENT else stand_in]


def owners_in_words(owners: Owners) -> str:
    """Example: (0, -1, 0) -> "0 . 0" """
    return " ".join("." if owner == ABSENT else str(owner) for owner in owners)


def parse_until(text: str) -> tuple[float, ...]:
    """The shares of the budget at which stages end.

    Example: "0.02,0.1" -> (0.02, 0.1)
    Raises:  ValueError for anything but shares that rise between 0 and 1
    """
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = (math.nan,)
    if not all(a < b for a, b in pairwise((0, *shares, 1))):
        raise ValueError(
            f"--pseudo-until {text}: give a share between 0 and 1 (0.1), or rising ones"
            " (0.02,0.05,0.1)"
        )
    return shares


def owners_at(config: PseudoConfig, layers: int, progress: float) -> Owners:
    """The owners of a step that begins at this share of the budget."""
    shares = parse_until(config.until)
    passed = sum(progress >= share for share in shares)
    if passed == len(shares):
        return tuple(range(layers))
    return stage(layers, config.layers or layers, config.group * 2**passed)


def owners_to_come(config: PseudoConfig, layers: int, progress: float) -> list[Owners]:
    """The owners of every stage from this share of the budget on; the last are a real model's."""
    switches = (share for share in parse_until(config.until) if share > progress)
    return [owners_at(config, layers, at) for at in (progress, *switches)]


def tokens_by_layer(config: PseudoConfig, context: StepContext, tokens: list[int]) -> list[int]:
    """How many tokens of a row each layer sees: none where it is not there yet."""
    owners = owners_at(config, context.layers, context.progress)
    return [0 if owner == ABSENT else n for owner, n in zip(owners, tokens, strict=True)]


# ---- the model


class Absent(nn.Module):
    """Stands for a layer that is not there yet: returns its input, or the tokens kept of it."""

    def forward(self, x: Tensor, meta: "TokenMeta") -> Tensor:
        return x


def share(model: nn.Module, owners: Owners) -> nn.Module:
    """Let the layers of a model that was just built use the weights of their owners, in place.

    The weights that a layer had before are lost. To bring a model from one stage to the next, use
    `handed_over` on its state.
    """
    for layer, owner in enumerate(owners):
        if owner != layer:
            model.h[layer] = Absent() if owner == ABSENT else model.h[owner]
    return model


# ---- the state


def handed_over(state: dict, owners: Owners, policy: str) -> dict:
    """The state of a training run at one stage, made that of another stage. Pure.

    The model computes the same function afterwards, bit for bit, unless layers were added. Tensors
    that stay are not copied.

    Args:    state     {"model": {name: tensor}, "optimizers": {"state": {name: {what: tensor}}},
                       "pseudo": {"owners": ...}}, and anything else, which stays
             owners    of the stage that comes
             policy    for a layer that shared weights which had n uses, and gets its own:
                         copy     the moments of the shared weights
                         rescale  the same, the second one times n. The mean of n gradients that
                                  are independent has 1/n of the variance of one
                         reset    none: it begins anew, with AdamW's correction for that
    Example: owners (0, 0) -> (0, 1): h.1.* are copies of h.0.*, exp_avg_sq of both doubles
    """
    before: Owners = tuple(state["pseudo"]["owners"])
    weights, moments = state["model"], state["optimizers"]["state"]
    new_weights, new_moments = (
        {name: value for name, value in named.items() if not name.startswith("h.")}
        for named in (weights, moments)
    )
    uses_before, uses_after = Counter(before), Counter(owners)
    taken: set[int] = set()  # layers of the old stage whose weights a layer of the new one has
    for layer, owner in enumerate(owners):
        if owner == ABSENT:
            continue
        if owner != layer:  # an owner is the first of its layers, so it is there
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
    """Names of a block's weights within the block.

    Example: "attn.c_attn.weight" of {"h.3.attn.c_attn.weight": ...} and layer 3
    """
    prefix = f"h.{layer}."
    return [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]


# ---- the gradients


def average(named: dict[str, nn.Parameter], owners: Sequence[int]) -> None:
    """Make the gradients of shared weights the mean over their uses.

    Paper: arXiv 2110.03848, algorithm 1
    Args:  named  parameters by name, whose gradients are sums over uses, as autograd leaves them
           owners of each layer the layer whose weights it uses, or -1
    """
    for owner, uses in Counter(owners).items():
        if uses > 1 and owner >= 0:
            shared = [p.grad for name, p in named.items() if name.startswith(f"h.{owner}.")]
            torch._foreach_div_([gradient for gradient in shared if gradient is not None], uses)


# ---- settings


def resolved(config: PseudoConfig, layers: int, init: str | None) -> PseudoConfig:
    """The settings with defaults filled in (docs/scale.md has what was measured).

    Args:   layers, init of the model
    Raises: ValueError naming the flag of a setting that cannot work
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
        raise ValueError(
            f"--pseudo-layers {few} is more than the model's {layers} layers: choose 1 to {layers}"
        )
    if group not in units:
        remedies = [f"choose {', '.join(map(str, units))}"] if units else []
        remedies += ["give fewer shares"] if len(shares) > 1 else []
        raise ValueError(
            f"--pseudo-group {group} with --pseudo-until {until}: units must divide {few} layers,"
            f" also after each doubling: {', or '.join(remedies)}"
        )
    if init is not None:
        raise ValueError(
            "--init and --pseudo exclude each other: a shadow lacks separate weights for every"
            " layer"
        )
    return replace(config, until=until, group=group)


def units_of(layers: int, shares: Sequence[float]) -> list[int]:
    """Units of layers that can be used again and again, and be doubled at every share but the last.

    Example: of 6 layers 1, 2, 3 and 6; with two shares 1, which becomes 2
    """
    doubled = 2 ** max(len(shares) - 1, 0)
    most = layers if doubled == 1 else layers // doubled - 1
    return [n for n in range(1, most + 1) if layers % (n * doubled) == 0]
