"""The optimizers and the learning rate: which update each parameter gets, and how large it is.

adamw: Loshchilov & Hutter, arXiv 1711.05101. Matrices decay; biases and norms do not. The fused
       implementation, which torch has for CPU, CUDA and MPS.
muon:  Jordan et al. 2024, support/step/muon.py. The blocks' matrices are updated by the
orthogonalised
       momentum, scaled to the size of AdamW's updates; every other parameter by AdamW. Queries',
       keys' and values' matrices are orthogonalised apart (CHANGELOG says what it brings).

The learning rate is a pure function of the consumed-token clock. No training loop here.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from support.base.clock import Clock, lr_clock
from support.base.settings import flag
from support.base.sharded import is_shard, norm_over_ranks, rows_here
from support.step.muon import Muon

SCHEDULES = ("cosine", "linear", "wsd")


@dataclass(frozen=True)
class OptimConfig:
    tokens: int | None = flag(
        None,
        "budget on the clock, in tokens; a larger one with --resume extends the run (default: by"
        " --size)",
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
    optimizer: str = flag("muon", "muon moves the blocks' matrices, adamw all", ("adamw", "muon"))
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
    beta2: float = flag(0.95, "AdamW's second-moment decay", least=0, below=1)
    loss_per: str = flag(
        "token", "what has equal weight in the loss of a step", ("token", "document")
    )
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0 for none", least=0)


class Parameters(NamedTuple):
    """Parameters by the update that each gets."""

    fused: list[nn.Parameter]  # Muon's that hold three matrices, for queries, keys and values
    matrices: list[nn.Parameter]  # Muon's others
    decayed: list[nn.Parameter]  # AdamW's with weight decay
    plain: list[nn.Parameter]  # AdamW's without


def split_parameters(named: dict[str, nn.Parameter], muon: bool) -> Parameters:
    parts = Parameters([], [], [], [])
    for name, parameter in named.items():
        if parameter.ndim < 2:
            parts.plain.append(parameter)
        elif not (muon and name.startswith("h.")):
            parts.decayed.append(parameter)
        elif name.endswith("c_attn.weight"):
            parts.fused.append(parameter)
        else:
            parts.matrices.append(parameter)
    return parts


SCALE_CHANGES = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class LossScale:
    """fp16's: what the loss is multiplied by, lest gradients be too small for 16 bits.

    Halved by each step whose gradients overflowed; doubled by 2,000 others in a row. The numbers,
    and what a checkpoint holds of them, are torch's GradScaler's. That one decides for each
    optimizer apart, after clipping, and copies to host memory what says whether there was an
    overflow without waiting for the copy (torch issue 127612). Here the norm over all gradients
    says it.
    """

    def __init__(self, on: bool):
        self.on, self.value = on, 65536.0 if on else 1.0
        self.sound_steps = 0  # since it last changed
        self.overflowed = False  # in this step

    def update(self, norm: float) -> None:
        """Take note of the norm of a step's gradients."""
        self.overflowed = not math.isfinite(norm)
        self.sound_steps = 0 if self.overflowed else self.sound_steps + 1
        if self.overflowed:
            self.value *= SCALE_CHANGES["backoff_factor"]
        elif self.sound_steps == SCALE_CHANGES["growth_interval"]:
            self.value *= SCALE_CHANGES["growth_factor"]
            self.sound_steps = 0

    def state_dict(self) -> dict:
        now = {"scale": self.value, **SCALE_CHANGES, "_growth_tracker": self.sound_steps}
        return now if self.on else {}

    def load_state_dict(self, saved: dict) -> None:
        """Go on from a state; that of a run in another dtype is empty, and changes nothing."""
        if self.on and saved:
            self.value, self.sound_steps = saved["scale"], saved["_growth_tracker"]


class Optimizers:
    """One or two torch optimizers and fp16's loss scale, which step and are saved together.

    A step: `(loss * optimizers.loss_scale.value).backward()`, `clip_gradients`, `step`.

    Args: named  the parameters by the names that their state is saved under
          device that computes, if some of them are on the host; None for that of the parameters
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        kind: str,
        weight_decay: float,
        betas: tuple,
        fp16: bool = False,
        device: torch.device | None = None,
    ):
        parts = split_parameters(named, kind == "muon")
        groups = [
            {"params": parts.decayed, "weight_decay": weight_decay},
            {"params": parts.plain, "weight_decay": 0.0},
        ]
        self.named = named
        self.parameters = [parameter for part in parts for parameter in part]
        self.parts = [torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)]
        if parts.matrices:
            groups = [{"params": parts.fused, "parts": 3}, {"params": parts.matrices}]
            self.parts.append(Muon(groups, lr=0.0, weight_decay=weight_decay, on=device))
        self.device = device or self.parameters[0].device
        self.loss_scale = LossScale(fp16)

    def clip_gradients(self, clip: float) -> Tensor:
        """Undo fp16's scaling, clip the norm over all parameters at `clip`, return that norm.

        A `clip` of 0 clips nothing. Only in fp16 the host waits for the norm.
        """
        gradients: dict[torch.device, list[Tensor]] = {}  # those of the host have a norm of theirs
        for gradient in (rows_here(p.grad) for p in self.parameters if p.grad is not None):
            gradients.setdefault(gradient.device, []).append(gradient)
        if self.loss_scale.on:
            for ones in gradients.values():
                torch._foreach_div_(ones, self.loss_scale.value)
        norms = [torch.nn.utils.get_total_norm(ones) for ones in gradients.values()]
        if len(norms) > 1:
            norms = [torch.nn.utils.get_total_norm([norm.to(self.device) for norm in norms])]
        norm = norms[0]
        if is_shard(self.parameters[0]):
            norm = norm_over_ranks(norm.to(self.device))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip or math.inf, norm)
        if self.loss_scale.on:
            self.loss_scale.update(norm.item())
        return norm

    def step(self, lr: float) -> None:
        """Update the weights and free the gradients.

        In fp16 a step whose gradients overflowed anywhere is skipped as a whole.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            if not self.loss_scale.overflowed:
                part.step()
            part.zero_grad(set_to_none=True)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, their gradients and what the optimizers remember, on this rank."""
        weights = sum(rows_here(parameter).nbytes for parameter in self.parameters)
        moments = 0
        for part in self.parts:
            kept = 1 if isinstance(part, Muon) else 2  # AdamW's two
            mine = [p for group in part.param_groups for p in group["params"]]
            moments += kept * sum(rows_here(parameter).nbytes for parameter in mine)
        return {"weights": weights, "gradients": weights, "optimizer": moments}

    def state_dict(self) -> dict:
        """What the optimizers remember, by the names of the parameters: {"state": {name: {...}}}.

        So a state fits a model whose parameters stand in another order, on another device, or were
        made from others (pseudo.py).
        """
        names = {parameter: name for name, parameter in self.named.items()}
        state = {names[p]: dict(kept) for part in self.parts for p, kept in part.state.items()}
        return {"state": state, "scaler": self.loss_scale.state_dict()}

    def load_state_dict(self, saved: dict) -> None:
        """Go on from a state; a parameter that it does not name begins without one.

        The tensors become the optimizers' own, without a copy where device and dtype are the same.
        """
        names = {parameter: name for name, parameter in self.named.items()}
        for part in self.parts:
            parameters = [p for group in part.param_groups for p in group["params"]]
            state = {
                number: saved["state"][names[parameter]]
                for number, parameter in enumerate(parameters)
                if names[parameter] in saved["state"]
            }
            groups = part.state_dict()["param_groups"]
            part.load_state_dict({"state": state, "param_groups": groups})
        self.loss_scale.load_state_dict(saved["scaler"])


def learning_rate(settings: Any, before: Clock, after: Clock) -> float:
    """The rate at the middle of a step, so that neither the first nor the last is wasted."""
    o = settings.optim
    start, end = lr_clock(settings, before), lr_clock(settings, after)
    return lr_at(
        (start + min(end, o.tokens)) / 2,  # the last step may overshoot the budget
        peak=o.lr,
        floor=o.lr * o.min_lr,
        schedule=o.schedule,
        warmup_tokens=o.warmup_tokens,
        budget=o.tokens,
        decay_share=o.decay_share,
    )


def decay_start(optim: OptimConfig) -> float:
    """Where wsd begins to decay, in tokens of the clock that the learning rate follows."""
    return max(optim.tokens * (1 - optim.decay_share), optim.warmup_tokens)


def enters_decay(settings: Any, before: Clock, after: Clock) -> bool:
    """Whether this step is the first one of wsd that goes into the decay."""
    start = decay_start(settings.optim)
    is_there = lr_clock(settings, before) <= start < lr_clock(settings, after)
    return settings.optim.schedule == "wsd" and is_there


def lr_at(
    consumed_tokens: float,
    *,
    peak: float,
    floor: float,
    schedule: str,
    warmup_tokens: int,
    budget: int,
    decay_share: float,
) -> float:
    """Learning rate at this point of the clock.

    Linear from 0 to `peak` over `warmup_tokens`; from there to `floor` at `budget` along
      cosine  half a cosine wave
      linear  a straight line
      wsd     `peak`, then a straight line over the last `decay_share` of the budget
              (warmup-stable-decay, arXiv 2404.06395)

    Args:    consumed_tokens, warmup_tokens, budget   tokens of the one clock
             peak, floor                              learning rates; after the budget it is floor
    Example: peak 1, floor 0, cosine, warmup 10, budget 110: 0.5 at 5, 1 at 10, 0.5 at 60, 0 at 110
    """
    if consumed_tokens < warmup_tokens:
        return peak * consumed_tokens / warmup_tokens
    start = warmup_tokens
    if schedule == "wsd":
        start = max(budget * (1 - decay_share), warmup_tokens)
    decayed = (consumed_tokens - start) / max(budget - start, 1)  # share of the decay, 0 to 1
    decayed = min(max(decayed, 0.0), 1.0)
    remaining = (1 + math.cos(math.pi * decayed)) / 2 if schedule == "cosine" else 1 - decayed
    return floor + (peak - floor) * remaining
