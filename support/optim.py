"""The optimizers and the learning rate: which update each parameter gets, and how large it is.

adamw: Loshchilov & Hutter, arXiv 1711.05101. Weight decay applies to matrices, not to biases and
       norms. We call torch's fused implementation, which exists for CPU, CUDA and MPS.
muon:  Jordan et al. 2024 (kellerjordan.github.io/posts/muon), for the matrices of the blocks. If
       U S V^T is a matrix's momentum, the matrix moves along U V^T: by the same amount in every
       direction, however unequal the gradient was. U V^T takes a few matrix products, which
       evaluate odd polynomials that push every singular value towards 1. The update is scaled to
       the size of AdamW's (arXiv 2502.16982, eq. 4), so that both share one learning rate. Update
       and state are the same as torch.optim.Muon's.

One Muon step of the nano GPT, which has four blocks of width 128. Matrices of the same shape are
orthogonalised as one batch; queries, keys and values count as separate matrices (CHANGELOG has the
gain):

    c_attn        4 of 384 x 128   12 matrices of 128 x 128
    attn.c_proj   4 of 128 x 128    4 matrices
    mlp.c_fc      4 of 512 x 128    4 matrices: one side is 4 times the other, so in fp32 the
    mlp.c_proj    4 of 128 x 512    4 matrices  iteration runs on X X^T, 128 x 128
    the rest      embedding, head, biases, norms: AdamW

With several ranks, each orthogonalises a share of every batch, and they exchange the results. With
--fsdp they first gather the rows of what is orthogonalised, and each keeps its rows of the results.

The learning rate is a pure function of the clock. The training loop is in train.py.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from support.clock import Clock, lr_clock
from support.fsdp import as_dtensor, is_shard, norm_over_ranks, rows_here
from support.settings import flag

SCHEDULES = ("cosine", "linear", "wsd")


@dataclass(frozen=True)
class OptimConfig:
    tokens: int | None = flag(
        None, "budget in consumed tokens; --resume may raise it (default: by --size)", least=1
    )
    schedule_tokens: int | None = flag(None, "first budget, which schedules follow", hidden=True)
    batch_tokens: int | None = flag(None, "tokens per step, in total (default: by --size)", least=1)
    micro_batch_size: int | None = flag(
        None, "rows in a rank's forward pass (default: by device and --seq-len)", least=1, free=True
    )
    optimizer: str = flag("muon", "muon for the blocks' matrices; adamw for all", ("adamw", "muon"))
    lr: float | None = flag(None, "peak learning rate (default: by --size)", above=0)
    min_lr: float = flag(0.0, "final learning rate, as a share of --lr", least=0, most=1)
    schedule: str = flag("linear", "how the learning rate decays", SCHEDULES)
    lr_clock: str = flag(
        "consumed-tokens", "what the --lr schedule counts", ("consumed-tokens", "layer-tokens")
    )
    warmup_tokens: int | None = flag(None, "tokens of linear warmup (default: 2 % of --tokens)")
    decay_share: float = flag(0.2, "share of --tokens over which wsd decays", hidden=True)
    weight_decay: float = flag(0.1, "decay of matrices and embeddings", least=0)
    beta1: float = flag(0.9, "AdamW's first-moment decay", hidden=True)
    beta2: float | None = flag(
        None, "AdamW's beta2 (default: 0.95, nano GPT 0.99, BERT 0.999)", least=0, below=1
    )
    loss_per: str = flag("token", "units that weigh the same in the loss", ("token", "document"))
    grad_clip: float = flag(1.0, "maximum gradient norm; 0: no clipping", least=0)


# ---- which update each parameter gets


def is_for_muon(name: str, tensor: Tensor) -> bool:
    """Whether Muon, if chosen, updates this parameter: true of the matrices in blocks."""
    return name.startswith("h.") and tensor.ndim > 1


def parts_of(name: str, named: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the row counts of the matrices stacked in a parameter; the pattern may repeat.

    Example: (C,) for queries, keys and values stacked as (3 C, C); (C, n, n) with grouped queries
    """
    rows, columns = named[name].shape
    if name.endswith("c_attn.weight"):
        others = (rows - columns) // 2  # rows of the keys, and of the values
        return (columns,) if others == columns else (columns, others, others)
    if name.endswith("c_fc.weight"):  # with a gate, it has twice as many rows as c_proj has columns
        return (named[name.replace("c_fc", "c_proj")].shape[1],)
    return (rows,)


def state_bytes(named: Mapping[str, Tensor], muon: bool, shards: int = 1) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on one rank.

    Muon keeps one number for each weight, AdamW two. The tensors may be on the meta device.

    Args: shards how many ranks share the rows of each parameter (--fsdp)
    """
    weights = state = 0
    for name, tensor in named.items():
        size = tensor[: -(-len(tensor) // shards)].nbytes
        weights += size
        state += size if muon and is_for_muon(name, tensor) else 2 * size
    return {"weights": weights, "gradients": weights, "optimizer": state}


class Optimizers:
    """The parameters, their optimizer state, and their update.

    One step is `loss.backward()`, `clip_gradients`, `step`. AdamW is torch's function and not its
    Optimizer class, whose first step imports torch's compiler, which takes more than a second.

    Args: named  the parameters, by the names under which their state is saved
          device that computes, if some parameters are on the host; None for the parameters' device
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        kind: str,
        weight_decay: float,
        betas: tuple[float, float],
        device: torch.device | None = None,
    ):
        self.named, self.weight_decay, self.betas = named, weight_decay, betas
        self.is_muon = kind == "muon"
        self.matrices = [n for n, p in named.items() if self.is_muon and is_for_muon(n, p)]
        self.matrices.sort(key=lambda name: not name.endswith("c_attn.weight"))
        others = [name for name in named if name not in self.matrices]
        self.decayed = [name for name in others if named[name].ndim > 1]
        self.plain = [name for name in others if named[name].ndim < 2]
        self.parameters = [named[n] for n in (*self.matrices, *self.decayed, *self.plain)]
        self.device = device or self.parameters[0].device
        self.state: dict[str, dict[str, Tensor]] = {}  # by name; made at a parameter's first update

    def clip_gradients(self, clip: float) -> Tensor:
        """Clip the gradients' total norm to `clip` (0: no clipping); return the norm before."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for gradient in (rows_here(p.grad) for p in self.parameters if p.grad is not None):
            by_device[gradient.device].append(gradient)
        norms = [torch.nn.utils.get_total_norm(gradients) for gradients in by_device.values()]
        if len(norms) > 1:
            norms = [torch.nn.utils.get_total_norm([norm.to(self.device) for norm in norms])]
        norm = norms[0]
        if is_shard(self.parameters[0]):
            norm = norm_over_ranks(norm.to(self.device))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip or math.inf, norm)
        return norm

    @torch.no_grad()
    def step(self, lr: float, only: set[Tensor] | None = None) -> None:
        """Update the weights that have a gradient, and free the gradients.

        Args: only the parameters to update; None for all
        """
        chosen = {
            name
            for name, p in self.named.items()
            if p.grad is not None and (only is None or p in only)
        }
        alike: dict[tuple, list[str]] = defaultdict(list)  # matrices that are updated as one batch
        for name in filter(chosen.__contains__, self.matrices):
            tensor = self.named[name]
            alike[parts_of(name, self.named), tensor.shape, tensor.device].append(name)
        for (parts, *_), names in alike.items():
            matrices = [self.named[name] for name in names]
            momenta = [self.state_tensor(name, "momentum_buffer") for name in names]
            update_by_muon(matrices, momenta, parts, lr, self.weight_decay, on=self.device)
        by_device: dict[tuple, list[str]] = defaultdict(list)
        for names, decay in ((self.decayed, self.weight_decay), (self.plain, 0.0)):
            for name in filter(chosen.__contains__, names):
                by_device[decay, self.named[name].device].append(name)
        for (decay, _), names in by_device.items():
            self.update_by_adamw(names, lr, decay)
        for name in chosen:
            self.named[name].grad = None

    def update_by_adamw(self, names: list[str], lr: float, weight_decay: float) -> None:
        parameters = [self.named[name] for name in names]
        steps = [self.state_tensor(name, "step") for name in names]
        moments = ([self.state_tensor(n, m) for n in names] for m in ("exp_avg", "exp_avg_sq"))
        gradients = [parameter.grad for parameter in parameters]
        adamw(
            *([rows_here(x) for x in tensors] for tensors in (parameters, gradients, *moments)),
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=1e-8,
            maximize=False,
        )

    def state_tensor(self, name: str, what: str) -> Tensor:
        """Return a tensor of a parameter's state, zeros at first, by its name in torch.optim."""
        state, parameter = self.state.setdefault(name, {}), self.named[name]
        if what not in state:
            one_number = torch.zeros((), device=parameter.device)
            state[what] = one_number if what == "step" else torch.zeros_like(parameter).detach()
        return state[what]

    def memory(self) -> dict[str, int]:
        """Return the `state_bytes` of this rank."""
        rows = {name: rows_here(parameter) for name, parameter in self.named.items()}
        return state_bytes(rows, self.is_muon)

    def state_dict(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return the state by parameter name: {"state": {name: {...}}}.

        Because of the names, it also fits a model whose parameters are in another order, on another
        device, or made from other parameters (pseudo.py).
        """
        return {"state": {name: dict(remembered) for name, remembered in self.state.items()}}

    def load_state_dict(self, saved: dict[str, dict[str, dict[str, Tensor]]]) -> None:
        """Continue from a saved state; parameters that it does not name start without state.

        The saved tensors are used as they are, and copied only if the parameter is on another
        device.
        """
        self.state = {}
        for name, remembered in saved["state"].items():
            parameter = self.named.get(name)
            shape = None if parameter is None else parameter.shape
            if any(tensor.ndim and tensor.shape != shape for tensor in remembered.values()):
                raise ValueError(f"the optimizer's state of {name} does not fit the model")
            if parameter is not None:
                local = {key: tensor.to(parameter.device) for key, tensor in remembered.items()}
                self.state[name] = local


# ---- Muon

# X <- a X + b (X X^T) X + c (X X^T)^2 X for each (a, b, c): Jordan's coefficients, five times.
POLYNOMIALS = ((3.4445, -4.7750, 2.0315),) * 5
MOMENTUM = 0.95


def update_by_muon(
    matrices: list[Tensor],
    momenta: list[Tensor],
    parts: tuple[int, ...],
    lr: float,
    weight_decay: float,
    on: torch.device | None = None,
) -> None:
    """Update matrices of the same shape on one device, and their momenta, by their gradients.

    Args: parts row counts of the matrices stacked in each tensor, from the top, repeated to its
                end: (n,) for n rows each, (n, m) for n and m in turn
          on    the device to orthogonalise on; None for the one that holds the matrices. Offloaded
                matrices are in host memory, but a GPU orthogonalises them faster
    """
    rows, columns = matrices[0].shape
    ahead = stack(directions(matrices, momenta), on)  # (n, rows, columns)
    apart = ahead.to(on, non_blocking=True).reshape(-1, sum(parts), columns)
    update = orthogonalised_by_all(apart, parts).reshape(ahead.shape)
    weights = [rows_here(matrix) for matrix in matrices]
    # If the parts differ, none has more rows than columns, so one rate serves them all.
    rate = lr * 0.2 * math.sqrt(max(parts[0], columns))
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    update = ahead.copy_(update) if ahead.is_pinned() else update.to(weights[0])
    if is_shard(matrices[0]):
        first = dist.get_rank() * -(-rows // dist.get_world_size())
        update = update[:, first : first + len(weights[0])]
    torch._foreach_add_(weights, update.unbind(), alpha=-rate)


def directions(matrices: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    """Move the momenta towards the gradients; return Nesterov's look-ahead for all rows."""
    gradients = [rows_here(matrix.grad) for matrix in matrices]
    local = [rows_here(momentum) for momentum in momenta]
    torch._foreach_lerp_(local, gradients, 1 - MOMENTUM)
    ahead = torch._foreach_lerp(gradients, local, MOMENTUM)
    if not is_shard(matrices[0]):
        return list(ahead)
    dtype = torch.bfloat16 if gradients[0].is_cuda else torch.float32
    whole = map(as_dtensor, (rows.to(dtype) for rows in ahead), matrices)
    return [matrix.full_tensor() for matrix in whole]


def stack(matrices: list[Tensor], on: torch.device | None) -> Tensor:
    """Stack matrices to (n, rows, columns), in page-locked memory if a GPU will copy them.

    From pageable memory a GPU copies at a fraction of the speed, and the host has to wait.
    """
    first = matrices[0]
    if on is None or on.type != "cuda" or first.is_cuda:
        return torch.stack(matrices)
    pinned = torch.empty(len(matrices), *first.shape, dtype=first.dtype, pin_memory=True)
    return torch.stack(matrices, out=pinned)


def orthogonalised_by_all(matrices: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Split `orthogonalised_parts` among the ranks: of 6 stacks, each of 4 ranks does at most 2.

    Args: matrices (n, rows, columns), the same on all ranks
    """
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    if not dist.is_initialized():
        return orthogonalised_parts(matrices.to(dtype), parts)
    n, world_size = len(matrices), dist.get_world_size()
    share = -(-n // world_size)
    local = matrices[dist.get_rank() * share :][:share]
    padding = (0, 0, 0, 0, 0, share - len(local))  # append matrices of zeros
    # (share, rows, columns)
    local = orthogonalised_parts(F.pad(local, padding).to(dtype), parts).contiguous()
    gathered = local.new_empty(world_size * share, *local.shape[1:])
    # torch 2.13 renamed this function and warns about the old name.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, local)
    return gathered[:n]


def orthogonalised_parts(matrices: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Apply `orthogonalised` to each part, if the matrices consist of parts with these rows."""
    if len(parts) == 1:
        return orthogonalised(matrices)
    return torch.cat([orthogonalised(part) for part in matrices.split(parts, dim=1)], dim=1)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return U V^T, approximately, for every matrix U S V^T.

    Singular values above 0.002 of the matrix's norm come out between 0.68 and 1.2. Smaller ones may
    come out anywhere below that, because each iteration multiplies them by at most 3.4445.

    An iteration replaces X by Z X, where Z is a polynomial in G = X X^T, and G by Z G Z. So we can
    multiply all the Z together first and X only once, at the end. Long matrices in fp32 do so. For
    nearly square ones it saves nothing, and in bf16 the errors of G would grow from one Z to the
    next: both update X after each Z.

    Args:    matrices (n, rows, columns) bf16 or fp32
    Returns: the same shape and dtype; zeros stay zeros
    Cost:    FLOPs of a matrix m x k, m <= k: 4 m^2 k + 34 m^3 if fp32 and k >= 2 m, else
             5 (4 m^2 k + 2 m^3)
    """
    _, rows, columns = matrices.shape
    is_tall, is_long = rows > columns, max(rows, columns) >= 2 * min(rows, columns)
    at_once = len(POLYNOMIALS) if is_long and matrices.dtype != torch.bfloat16 else 1
    X = matrices.mT if is_tall else matrices  # (n, m, k)
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for start in range(0, len(POLYNOMIALS), at_once):
        first, *others = POLYNOMIALS[start : start + at_once]
        G = X @ X.mT  # (n, m, m)
        Z = product = polynomial(G, *first)
        for coefficients in others:
            G = Z @ G @ Z
            Z = polynomial(G, *coefficients)
            product = Z @ product
        X = product @ X  # (n, m, k)
    return X.mT if is_tall else X


def polynomial(G: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b G + c G^2, (n, m, m)."""
    Z = torch.baddbmm(G, G, G, beta=b, alpha=c)
    Z.diagonal(dim1=1, dim2=2).add_(a)
    return Z


# ---- the learning rate


def learning_rate(optim: OptimConfig, layers: int, before: Clock, after: Clock) -> float:
    """Return the rate at the middle of a step, so that neither the first nor the last gets 0."""
    start, end = (lr_clock(optim.lr_clock, layers, clock) for clock in (before, after))
    end = min(end, optim.tokens)  # the last step may overshoot the budget
    return lr_at(optim, (start + end) / 2)


def decay_start(optim: OptimConfig) -> float:
    """Return where wsd starts to decay, in tokens of the clock that the learning rate follows."""
    return max(optim.tokens * (1 - optim.decay_share), optim.warmup_tokens)


def lr_at(optim: OptimConfig, tokens: float) -> float:
    """Return the learning rate at this point of the clock.

    It rises linearly from 0 to `lr` over `warmup_tokens` and then falls to `lr * min_lr` at the end
    of the budget:
      cosine  along half a cosine wave
      linear  along a straight line
      wsd     not at all at first, then along a straight line over the last `decay_share` of the
              budget (warmup-stable-decay, arXiv 2404.06395)

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
