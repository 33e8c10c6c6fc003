"""The optimizers and the learning rate: which update each parameter gets, and how large it is.

adamw: Loshchilov & Hutter, arXiv 1711.05101. Matrices decay; biases and norms do not. torch's fused
       implementation, which exists for CPU, CUDA and MPS.
muon:  Jordan et al. 2024, support/step/muon.py. The blocks' matrices follow their orthogonalised
       momentum, scaled to the size of AdamW's updates; AdamW updates every other parameter. The
       matrices of queries, keys and values are orthogonalised separately (CHANGELOG has the gain).

The learning rate is a pure function of the consumed-token clock. No training loop here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from support.clock import Clock, lr_clock
from support.runtime import is_shard, norm_over_ranks, rows_here
from support.settings import flag
from support.step.muon import Muon

if TYPE_CHECKING:
    from config import Config

SCHEDULES = ("cosine", "linear", "wsd")


@dataclass(frozen=True)
class OptimConfig:
    tokens: int | None = flag(
        None,
        "budget on the clock, in tokens; with --resume a larger one extends a run of wsd before its"
        " decay (default: by --size)",
        least=1,
    )
    schedule_tokens: int | None = flag(
        None,
        "budget of the techniques' schedules: the one that a run was started with",
        hidden=True,
    )
    batch_tokens: int | None = flag(None, "tokens of an optimizer step, on all ranks", least=1)
    micro_batch_size: int | None = flag(
        None, "rows a rank takes at once (default: what fits the device)", least=1, free=True
    )
    optimizer: str = flag("muon", "muon updates the blocks' matrices, adamw all", ("adamw", "muon"))
    lr: float | None = flag(None, "peak learning rate (default: by --size)", above=0)
    min_lr: float = flag(0.0, "learning rate at the end, as a share of --lr", least=0, most=1)
    schedule: str = flag("linear", "decay of the learning rate", SCHEDULES)
    lr_clock: str = flag(
        "consumed-tokens", "what the learning rate follows", ("consumed-tokens", "layer-tokens")
    )
    warmup_tokens: int | None = flag(None, "tokens of linear warmup (default: 2 % of --tokens)")
    decay_share: float = flag(0.2, "share of --tokens over which wsd decays", above=0, most=1)
    weight_decay: float = flag(0.1, "decay of matrices and embeddings", least=0)
    beta1: float = flag(0.9, "AdamW's first-moment decay", least=0, below=1)
    beta2: float | None = flag(
        None,
        "AdamW's second-moment decay (default: 0.99 for a nano GPT, 0.999 for a BERT, else 0.95)",
        least=0,
        below=1,
    )
    loss_per: str = flag(
        "token", "what has equal weight in the loss of a step", ("token", "document")
    )
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0 for none", least=0)


class Parameters(NamedTuple):
    """Parameters by the update that each gets."""

    qkv: list[Tensor]  # Muon's that hold queries, keys and values
    matrices: list[Tensor]  # Muon's others
    decayed: list[Tensor]  # AdamW's with weight decay
    plain: list[Tensor]  # AdamW's without


def split_parameters(named: Mapping[str, Tensor], muon: bool) -> Parameters:
    split = Parameters([], [], [], [])
    for name, parameter in named.items():
        if parameter.ndim < 2:
            split.plain.append(parameter)
        elif muon and name.startswith("h."):
            (split.qkv if name.endswith("c_attn.weight") else split.matrices).append(parameter)
        else:
            split.decayed.append(parameter)
    return split


def parts_of(name: str, named: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Rows of the matrices that a parameter consists of, again and again: `parts` as Muon has it.

    Example: of queries, keys and values (3 C, C) it is (C,), with grouped queries (C, n, n)
    """
    rows, columns = named[name].shape
    if name.endswith("c_attn.weight"):
        others = (rows - columns) // 2  # of keys, and of values
        return (columns,) if others == columns else (columns, others, others)
    if name.endswith("c_fc.weight"):  # with a gate, twice as many rows as c_proj takes
        return (named[name.replace("c_fc", "c_proj")].shape[1],)
    return (rows,)


def state_bytes(named: Mapping[str, Tensor], muon: bool, shards: int = 1) -> dict[str, int]:
    """Bytes of weights, of their gradients and of what the optimizers remember.

    Muon remembers one number for each weight, AdamW two. The tensors may be on the meta device.

    Args: shards ranks that share the rows of each parameter (--fsdp); a rank's rows are counted
    """
    split = split_parameters(named, muon)

    def nbytes(*groups: list[Tensor]) -> int:
        return sum(p[: -(-len(p) // shards)].nbytes for group in groups for p in group)

    by_muon, by_adamw = nbytes(split.qkv, split.matrices), nbytes(split.decayed, split.plain)
    weights = by_muon + by_adamw
    return {"weights": weights, "gradients": weights, "optimizer": by_muon + 2 * by_adamw}


class Optimizers:
    """One or two torch optimizers, which step and are saved together.

    A step: `loss.backward()`, `clip_gradients`, `step`.

    Args: named  the parameters by the names that their state is saved under
          device that computes, if some of them are on the host; None for that of the parameters
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        kind: str,
        weight_decay: float,
        betas: tuple[float, float],
        device: torch.device | None = None,
    ):
        split = split_parameters(named, kind == "muon")
        groups = [
            {"params": split.decayed, "weight_decay": weight_decay},
            {"params": split.plain, "weight_decay": 0.0},
        ]
        self.named = named
        self.names = {parameter: name for name, parameter in named.items()}
        self.parameters = [parameter for group in split for parameter in group]
        self.parts = [torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)]
        if split.matrices:
            by_parts: dict[tuple[int, ...], list[Tensor]] = {}
            for matrix in (*split.qkv, *split.matrices):
                by_parts.setdefault(parts_of(self.names[matrix], named), []).append(matrix)
            groups = [{"params": params, "parts": parts} for parts, params in by_parts.items()]
            self.parts.append(Muon(groups, lr=0.0, weight_decay=weight_decay, on=device))
        self.device = device or self.parameters[0].device

    def clip_gradients(self, clip: float) -> Tensor:
        """Clip the norm over all parameters at `clip` and return it; 0 clips nothing."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in (rows_here(p.grad) for p in self.parameters if p.grad is not None):
            by_device.setdefault(gradient.device, []).append(gradient)
        norms = [torch.nn.utils.get_total_norm(gradients) for gradients in by_device.values()]
        if len(norms) > 1:
            norms = [torch.nn.utils.get_total_norm([norm.to(self.device) for norm in norms])]
        norm = norms[0]
        if is_shard(self.parameters[0]):
            norm = norm_over_ranks(norm.to(self.device))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip or math.inf, norm)
        return norm

    def step(self, lr: float) -> None:
        """Update the weights and free the gradients."""
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, int]:
        """`state_bytes` of this rank."""
        rows = {name: rows_here(parameter) for name, parameter in self.named.items()}
        return state_bytes(rows, muon=len(self.parts) > 1)

    def state_dict(self) -> dict:
        """What the optimizers remember, by the names of the parameters: {"state": {name: {...}}}.

        So a state fits a model whose parameters stand in another order, on another device, or were
        made from others (pseudo.py).
        """
        state = {
            self.names[parameter]: dict(kept)
            for optimizer in self.parts
            for parameter, kept in optimizer.state.items()
        }
        return {"state": state}

    def load_state_dict(self, saved: dict) -> None:
        """Go on from a state; a parameter that it does not name begins without one.

        The tensors become the optimizers' own, without a copy where device and dtype are the same.
        """
        for name, kept in saved["state"].items():
            shape = self.named[name].shape if name in self.named else None
            if any(tensor.ndim and tensor.shape != shape for tensor in kept.values()):
                raise ValueError(f"the optimizer's state of {name} does not fit the model")
        for optimizer in self.parts:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                number: saved["state"][self.names[parameter]]
                for number, parameter in enumerate(parameters)
                if self.names[parameter] in saved["state"]
            }
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def learning_rate(settings: "Config", before: Clock, after: Clock) -> float:
    """The rate at the middle of a step, so that neither the first nor the last is wasted."""
    which, layers = settings.optim.lr_clock, settings.model.layers
    start, end = lr_clock(which, layers, before), lr_clock(which, layers, after)
    end = min(end, settings.optim.tokens)  # the last step may overshoot the budget
    return lr_at(settings.optim, (start + end) / 2)


def decay_start(optim: OptimConfig) -> float:
    """Where wsd begins to decay, in tokens of the clock that the learning rate follows."""
    return max(optim.tokens * (1 - optim.decay_share), optim.warmup_tokens)


def lr_at(optim: OptimConfig, tokens: float) -> float:
    """Learning rate at this point of the clock.

    Linear from 0 to `lr` over `warmup_tokens`; from there to `lr * min_lr` at the end of the budget
      cosine  along half a cosine wave
      linear  along a straight line
      wsd     constant, then along a straight line over the last `decay_share` of the budget
              (warmup-stable-decay, arXiv 2404.06395)

    Example: lr 1, cosine, warmup 10, a budget of 110: 0.5 at 5, 1 at 10, 0.5 at 60, 0 at 110
    """
    if tokens < optim.warmup_tokens:
        return optim.lr * tokens / optim.warmup_tokens
    start = decay_start(optim) if optim.schedule == "wsd" else optim.warmup_tokens
    decayed = (tokens - start) / max(optim.tokens - start, 1)  # share of the decay, 0 to 1
    decayed = min(max(decayed, 0.0), 1.0)
    remaining = 1 - decayed
    if optim.schedule == "cosine":
        remaining = (1 + math.cos(math.pi * decayed)) / 2
    floor = optim.lr * optim.min_lr
    return floor + (optim.lr - floor) * remaining
