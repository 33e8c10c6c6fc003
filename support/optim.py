"""The optimizers and the learning rate: which update each parameter gets, and how large it is.

adamw  Loshchilov & Hutter, arXiv 1711.05101. Weight decay applies to matrices, not to biases and
       norms. We call torch's fused implementation.
muon   Jordan et al. 2024 (kellerjordan.github.io/posts/muon), for the matrices of the blocks. If
       U S V^T is a matrix's momentum, the matrix moves along U V^T: by the same amount in every
       direction, however unequal the gradient was. The update is scaled to the size of AdamW's
       (arXiv 2502.16982, eq. 4), so both share one learning rate. Update and state are the same as
       torch.optim.Muon's.

Muon takes equal matrices as one batch, and queries, keys and values as separate matrices. With four
blocks of width 128:

    c_attn        4 of 384 x 128   12 matrices of 128 x 128: `newton_schulz`
    attn.c_proj   4 of 128 x 128    4 matrices: the same
    mlp.c_fc      4 of 512 x 128    4 matrices: in fp32 `newton_schulz_by_gram`, because one side
    mlp.c_proj    4 of 128 x 512    4 matrices  is 4 times the other
    the rest      embedding, head, biases, norms: AdamW

With several ranks, each orthogonalises a share of every batch, and they exchange the results; with
--fsdp they first gather the rows of each matrix.

In reading order: `Optimizers`, which train.py makes and calls; Muon, with `newton_schulz` as its
core; the learning rate, a function of the clock.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from support.clock import Clock, lr_clock
from support.fsdp import as_dtensor, is_dtensor, local_rows, norm_over_ranks
from support.settings import OptimConfig

DECAY_SHARE = 0.2  # of the budget, over which wsd decays
BETA1 = 0.9  # AdamW's first-moment decay


# ---- the optimizers


class Optimizers:
    """The parameters, their optimizer state, and their update.

    Args: named  the parameters, by the names under which their state is saved
          kind   adamw | muon
          device that computes, if some parameters are on the host; None for the parameters' device
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        kind: str,
        weight_decay: float,
        beta2: float,
        device: torch.device | None = None,
    ):
        self.named, self.weight_decay, self.beta2 = named, weight_decay, beta2
        self.is_muon = kind == "muon"
        self.for_muon = [n for n, p in named.items() if self.is_muon and is_for_muon(n, p)]
        # The order of the parameters decides the last bits of the gradients' norm.
        self.for_muon.sort(key=lambda name: not name.endswith("c_attn.weight"))
        self.for_adamw = [name for name in named if name not in self.for_muon]
        self.for_adamw.sort(key=lambda name: named[name].ndim < 2)
        self.parameters = [named[name] for name in (*self.for_muon, *self.for_adamw)]
        self.device = device or self.parameters[0].device
        self.state: dict[str, dict[str, Tensor]] = {}  # by name; made at a parameter's first update

    def clip_gradients(self, clip: float) -> Tensor:
        """Clip the gradients' total norm to `clip` (0: no clipping); return the norm before."""
        gradients = [local_rows(p.grad) for p in self.parameters if p.grad is not None]
        by_device = grouped(gradients, lambda gradient: gradient.device)
        norms = [torch.nn.utils.get_total_norm(group) for group in by_device]
        if len(norms) > 1:
            norms = [torch.nn.utils.get_total_norm([norm.to(self.device) for norm in norms])]
        norm = norms[0]
        if is_dtensor(self.parameters[0]):
            norm = norm_over_ranks(norm.to(self.device))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, clip or math.inf, norm)
        return norm

    @torch.no_grad()
    def step(self, lr: float, only: Collection[str] | None = None) -> None:
        """Update all weights that have a gradient, or `only` those named; free the gradients."""
        names = self.named if only is None else only
        chosen = {name for name in names if self.named[name].grad is not None}
        for batch in grouped([n for n in self.for_muon if n in chosen], self.muon_batch_of):
            self.update_by_muon(batch, lr)
        of_adamw = [n for n in self.for_adamw if n in chosen]
        for batch in grouped(of_adamw, lambda n: (self.named[n].ndim > 1, self.named[n].device)):
            self.update_by_adamw(batch, lr)
        for name in chosen:
            self.named[name].grad = None

    def muon_batch_of(self, name: str) -> tuple:
        """Return what matrices of one batch have in common."""
        matrix = self.named[name]
        return heights_of(name, self.named), matrix.shape, matrix.device

    def update_by_muon(self, names: list[str], lr: float) -> None:
        """Update a batch of matrices, and their momenta, by their gradients."""
        matrices = [self.named[name] for name in names]
        momenta = [self.state_tensor(name, "momentum_buffer") for name in names]
        heights = heights_of(names[0], self.named)
        directions = look_ahead(matrices, momenta)
        if is_dtensor(matrices[0]):
            directions = whole_matrices(directions, matrices)
        batch = stack(directions, self.device)  # (n, rows, columns)
        del directions  # the iteration needs the memory
        update = orthogonalise_by_ranks(batch.to(self.device, non_blocking=True), heights)
        weights = [local_rows(matrix) for matrix in matrices]
        torch._foreach_mul_(weights, 1 - lr * self.weight_decay)  # a GPU may still orthogonalise
        # Page-locked memory serves the way back too.
        update = batch.copy_(update) if batch.is_pinned() else update.to(weights[0])
        if is_dtensor(matrices[0]):
            first = dist.get_rank() * -(-update.shape[1] // dist.get_world_size())
            update = update[:, first : first + len(weights[0])]  # the rows of this rank
        # If the heights differ, none exceeds the number of columns: one rate serves them all.
        rate = lr * 0.2 * math.sqrt(max(heights[0], matrices[0].shape[1]))
        torch._foreach_add_(weights, update.unbind(), alpha=-rate)

    def update_by_adamw(self, names: list[str], lr: float) -> None:
        """Update a batch of parameters by their gradients."""
        parameters = [self.named[name] for name in names]
        # Not torch.optim.AdamW, whose first step imports torch's compiler: more than a second.
        adamw(
            [local_rows(parameter) for parameter in parameters],
            [local_rows(parameter.grad) for parameter in parameters],
            [local_rows(self.state_tensor(name, "exp_avg")) for name in names],
            [local_rows(self.state_tensor(name, "exp_avg_sq")) for name in names],
            max_exp_avg_sqs=[],
            state_steps=[self.state_tensor(name, "step") for name in names],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=self.weight_decay if parameters[0].ndim > 1 else 0.0,
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
        rows = {name: local_rows(parameter) for name, parameter in self.named.items()}
        return state_bytes(rows, self.is_muon)

    def state_dict(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """Return the state by parameter name, on which pseudo.py relies: {"state": {name: {}}}."""
        return {"state": {name: dict(tensors) for name, tensors in self.state.items()}}

    def load_state_dict(self, saved: dict[str, dict[str, dict[str, Tensor]]]) -> None:
        """Continue from a saved state; parameters that it does not name start without state."""
        self.state = {}
        for name, tensors in saved["state"].items():
            shapes = {tensor.shape for tensor in tensors.values() if tensor.ndim}
            if name not in self.named or shapes - {self.named[name].shape}:
                raise ValueError(f"the optimizer's state of {name} does not fit the model")
            device = self.named[name].device
            self.state[name] = {what: tensor.to(device) for what, tensor in tensors.items()}


def grouped(items: Iterable, key: Callable) -> Iterable[list]:
    """Group items that have the same key, in the order in which the keys appear."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def is_for_muon(name: str, tensor: Tensor) -> bool:
    """Whether Muon, if chosen, updates this parameter: true of the matrices in blocks."""
    return name.startswith("h.") and tensor.ndim > 1


def heights_of(name: str, named: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the row counts of the matrices stacked in a parameter; the pattern may repeat.

    Example: (C,) for queries, keys and values stacked as (3 C, C); (C, n, n) with grouped queries
    """
    rows, columns = named[name].shape
    if name.endswith("c_attn.weight"):
        n = (rows - columns) // 2  # rows of the keys, and of the values
        return (columns,) if n == columns else (columns, n, n)
    if name.endswith("c_fc.weight"):  # with a gate, it has twice as many rows as c_proj has columns
        return (named[name.replace("c_fc", "c_proj")].shape[1],)
    return (rows,)


def state_bytes(named: Mapping[str, Tensor], muon: bool, shards: int = 1) -> dict[str, int]:
    """Return the bytes that a rank holds of parameters whose rows `shards` ranks share."""
    weights = state = 0
    for name, tensor in named.items():
        size = tensor[: -(-len(tensor) // shards)].nbytes
        weights += size
        state += size if muon and is_for_muon(name, tensor) else 2 * size  # one moment, or two
    return {"weights": weights, "gradients": weights, "optimizer": state}


# ---- Muon: the iteration

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c, by Jordan
ITERATIONS = 5
MOMENTUM = 0.95


def newton_schulz(X: Tensor) -> Tensor:
    """Push all singular values of X (n, m, k) towards 1.

    X <- a X + b A X + c A^2 X,  A = X X^T
    """
    X = F.normalize(X, dim=(1, 2), eps=1e-7)  # no singular value is above 1
    for _ in range(ITERATIONS):
        A = X @ X.mT  # (n, m, m)
        X = polynomial(A) @ X
    return X


def newton_schulz_by_gram(X: Tensor) -> Tensor:
    """Do the same with two products of size k instead of ten, which pays for long X, k >= 2 m.

    An iteration replaces X by Z X, where Z is a polynomial in A, and so A by Z A Z. The product of
    all Z is found first, and X multiplied only once. Not for bf16: errors of A would grow.
    """
    X = F.normalize(X, dim=(1, 2), eps=1e-7)
    A = X @ X.mT  # (n, m, m)
    Z = product = polynomial(A)
    for _ in range(ITERATIONS - 1):
        A = Z @ A @ Z
        Z = polynomial(A)
        product = Z @ product
    return product @ X


def polynomial(A: Tensor) -> Tensor:
    """Return a I + b A + c A^2, (n, m, m)."""
    a, b, c = COEFFICIENTS
    Z = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Z.diagonal(dim1=1, dim2=2).add_(a)
    return Z


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return U V^T, approximately, for every matrix U S V^T.

    Singular values above 0.002 of the matrix's norm come out between 0.68 and 1.2, smaller ones
    below that: each iteration multiplies them by at most 3.4445.

    Args: matrices (n, rows, columns) bf16 or fp32
    Cost: FLOPs of a matrix m x k, m <= k: 5 (4 m^2 k + 2 m^3), by Gram matrix 4 m^2 k + 34 m^3
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.mT if is_tall else matrices  # (n, m, k)
    by_gram = X.shape[2] >= 2 * X.shape[1] and X.dtype != torch.bfloat16
    X = newton_schulz_by_gram(X) if by_gram else newton_schulz(X)
    return X.mT if is_tall else X


# ---- Muon: before and after the iteration, and over ranks


def look_ahead(matrices: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
    """Move this rank's momenta towards its gradients; return Nesterov's directions."""
    gradients = [local_rows(matrix.grad) for matrix in matrices]
    momenta = [local_rows(momentum) for momentum in momenta]
    torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
    return list(torch._foreach_lerp(gradients, momenta, MOMENTUM))


def whole_matrices(rows: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """Return whole matrices, given this rank's rows, which are sharded as `matrices` are."""
    dtype = torch.bfloat16 if rows[0].is_cuda else torch.float32
    pairs = zip(rows, matrices, strict=True)
    return [as_dtensor(part.to(dtype), like=matrix).full_tensor() for part, matrix in pairs]


def stack(matrices: list[Tensor], device: torch.device) -> Tensor:
    """Stack matrices to (n, rows, columns), in page-locked memory if a GPU will copy them."""
    first = matrices[0]
    if device.type != "cuda" or first.is_cuda:
        return torch.stack(matrices)
    pinned = torch.empty(len(matrices), *first.shape, dtype=first.dtype, pin_memory=True)
    return torch.stack(matrices, out=pinned)


def orthogonalise_by_ranks(stacked: Tensor, heights: tuple[int, ...]) -> Tensor:
    """Orthogonalise (n, rows, columns), equal on all ranks; of 6, each of 4 ranks does 2 or 0."""
    dtype = torch.bfloat16 if stacked.is_cuda else torch.float32
    matrices = stacked.reshape(-1, sum(heights), stacked.shape[2])
    if not dist.is_initialized():
        return orthogonalise_each(matrices.to(dtype), heights).reshape(stacked.shape)
    n, world_size = len(matrices), dist.get_world_size()
    most = -(-n // world_size)  # matrices per rank
    chunk = matrices[dist.get_rank() * most :][:most]
    chunk = F.pad(chunk, (0, 0, 0, 0, 0, most - len(chunk)))  # append matrices of zeros
    chunk = orthogonalise_each(chunk.to(dtype), heights).contiguous()
    gathered = chunk.new_empty(world_size * most, *chunk.shape[1:])
    # torch 2.13 renamed this function and warns about the old name.
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, chunk)
    return gathered[:n].reshape(stacked.shape)


def orthogonalise_each(matrices: Tensor, heights: tuple[int, ...]) -> Tensor:
    """Apply `orthogonalise` to matrices (n, rows, columns), cut into these heights."""
    if len(heights) == 1:
        return orthogonalise(matrices)
    return torch.cat([orthogonalise(part) for part in matrices.split(heights, dim=1)], dim=1)


# ---- the learning rate


def learning_rate(optim: OptimConfig, layers: int, before: Clock, after: Clock) -> float:
    """Return the rate at the middle of a step, so that neither the first nor the last gets 0."""
    start, end = (lr_clock(optim.lr_clock, layers, clock) for clock in (before, after))
    end = min(end, optim.tokens)  # the last step may overshoot the budget
    return lr_at(optim, (start + end) / 2)


def decay_start(optim: OptimConfig) -> float:
    """Return where wsd starts to decay, in tokens of the clock that the learning rate follows."""
    return max(optim.tokens * (1 - DECAY_SHARE), optim.warmup_tokens)


def lr_at(optim: OptimConfig, tokens: float) -> float:
    """Return the learning rate at this point of the clock.

    It rises linearly from 0 to `lr` over `warmup_tokens` and then falls to `lr * min_lr` at the end
    of the budget: along half a cosine wave, along a line, or with wsd (warmup-stable-decay, arXiv
    2404.06395) along a line over the last fifth of the budget.

    Example: lr 1, cosine, warmup 10, a budget of 110: 0.5 at 5, 1 at 10, 0.5 at 60, 0 at 110
    """
    if tokens < optim.warmup_tokens:
        return optim.lr * tokens / optim.warmup_tokens
    start = decay_start(optim) if optim.schedule == "wsd" else optim.warmup_tokens
    decayed = (tokens - start) / max(optim.tokens - start, 1)  # share of the decay, 0 to 1
    decayed = min(max(decayed, 0.0), 1.0)
    is_cosine = optim.schedule == "cosine"
    remaining = (1 + math.cos(math.pi * decayed)) / 2 if is_cosine else 1 - decayed
    floor = optim.lr * optim.min_lr
    return floor + (optim.lr - floor) * remaining
