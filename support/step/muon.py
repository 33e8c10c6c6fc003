"""Muon: momentum with orthogonalised matrices, many at a time. For matrices only.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Every matrix goes along U V^T, where
U S V^T is its momentum: in all directions by the same amount, however unequal the gradient was.
U V^T comes from a few matrix products, by odd polynomials that push every singular value towards 1.
The update has the size of AdamW's (arXiv 2502.16982, eq. 4), so that both share one learning rate.

The update and its state are those of torch.optim.Muon. Three things make it cheaper:

- matrices of one shape are orthogonalised together, as one batch
- in fp32 the iteration runs on X X^T where that is smaller than X: for an MLP, 4 times smaller
- several ranks orthogonalise a share of the matrices each and exchange the results

Matrices may be sharded over ranks by rows, as FSDP2 does (support/runtime.py). Their weights
and momenta stay in place; rows of the directions travel to the ranks that orthogonalise them, and
back.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from support.runtime import rows_here

# X <- a X + b (X X^T) X + c (X X^T)^2 X for each (a, b, c): Jordan's, five times.
POLYNOMIALS = ((3.4445, -4.7750, 2.0315),) * 5


class Muon(torch.optim.Optimizer):
    """Updates matrices; one without a gradient stays as it is.

    Args: matrices tensors of two dimensions, or torch's groups of them; a group's `parts` says
                   how many rows belong together where a tensor has several matrices, one below the
                   other: (n,) n each, (n, m) n and m in turn
          on       the device to orthogonalise on; None for each matrix's own. For offloaded
                   matrices, which are on the host, a GPU is faster
    """

    def __init__(
        self,
        matrices: list,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        on: torch.device | None = None,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "parts": ()}
        super().__init__(matrices, defaults)
        self.on = on

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            directions = self.directions(matrices, group["momentum"])
            by_shape: dict[tuple, list[int]] = defaultdict(list)
            for number, matrix in enumerate(matrices):
                by_shape[*matrix.shape, matrix.device].append(number)
            for (rows, columns, _), numbers in by_shape.items():
                stacked = together([directions[n] for n in numbers], self.on)  # (n, rows, columns)
                there = stacked.to(self.on, non_blocking=True)
                parts = group["parts"] or (rows,)
                first = matrices[numbers[0]]
                if hasattr(first, "device_mesh"):  # a DTensor
                    ranks = first.device_mesh.get_group()
                    update = orthogonalised_shards(there, rows, parts, ranks)
                else:
                    apart = there.reshape(-1, sum(parts), columns)
                    update = orthogonalised_by_all(apart, parts).reshape(stacked.shape)
                # no part has more rows than columns if they differ: one rate for all
                rate = group["lr"] * 0.2 * math.sqrt(max(parts[0], columns))
                weights = [rows_here(matrices[n]) for n in numbers]
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                update = stacked.copy_(update) if stacked.is_pinned() else update.to(weights[0])
                torch._foreach_add_(weights, update.unbind(), alpha=-rate)

    def directions(self, matrices: list[Tensor], momentum: float) -> list[Tensor]:
        """Move the momenta towards the gradients; return Nesterov's look-ahead."""
        if not matrices:
            return []
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [rows_here(matrix.grad) for matrix in matrices]
        momenta = [rows_here(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        return torch._foreach_lerp(gradients, momenta, momentum)


def together(matrices: list[Tensor], on: torch.device | None) -> Tensor:
    """A stack (n, rows, columns) of n matrices, in page-locked memory if it goes to a GPU.

    From pageable memory a GPU copies at a fraction of the speed, while the host waits.
    """
    first = matrices[0]
    if on is None or on.type != "cuda" or first.is_cuda:
        return torch.stack(matrices)
    stack = torch.empty(len(matrices), *first.shape, dtype=first.dtype, pin_memory=True)
    return torch.stack(matrices, out=stack)


def orthogonalised_by_all(matrices: Tensor, parts: tuple[int, ...]) -> Tensor:
    """`orthogonalised_parts`, shared by all ranks: with 4 ranks and 6 stacks, each does at most 2.

    Args: matrices (n, rows, columns), the same on all ranks
    """
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    if not dist.is_initialized():
        return orthogonalised_parts(matrices.to(dtype), parts)
    n, world_size = len(matrices), dist.get_world_size()
    share = -(-n // world_size)
    mine = matrices[dist.get_rank() * share :][:share]
    padding = (0, 0, 0, 0, 0, share - len(mine))  # matrices of zeros, behind the last
    mine = orthogonalised_parts(F.pad(mine, padding).to(dtype), parts)
    mine = mine.contiguous()  # (share, rows, columns)
    gathered = mine.new_empty(world_size * share, *mine.shape[1:])
    # torch 2.13 renamed it and warns about the old name
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, mine)
    return gathered[:n]


def orthogonalised_shards(
    shards: Tensor, rows: int, parts: tuple[int, ...], ranks: dist.ProcessGroup
) -> Tensor:
    """`orthogonalised_parts` for matrices whose rows are spread over the ranks.

    Each rank receives its share of whole matrices and sends their rows back. With n matrices
    stacked, row g is row g % rows of matrix g // rows.

    Args:    shards (n, held, columns) this rank's rows of n tensors with `rows` rows each: a rank
                    has ceil(rows / ranks) of them, the last ranks fewer or none
             parts  rows of the matrices that stay together: `rows` in all, or fewer if a tensor
                    is several such stacks
    Returns: (n, held, columns)
    Cost:    two all-to-alls; a rank sends and receives 1 / ranks of all values in each
    """
    n, held, columns = shards.shape
    m = sum(parts)
    world_size, rank = ranks.size(), ranks.rank()
    dtype = torch.bfloat16 if shards.is_cuda else torch.float32
    chunk = -(-rows // world_size)  # rows of a tensor on one rank
    share = -(-n * rows // (m * world_size)) * m  # rows that one rank orthogonalises
    here = torch.arange(n)[:, None] * rows + rank * chunk + torch.arange(held)  # (n, held)
    sent = (here.flatten() // share).bincount(minlength=world_size).tolist()  # rows to each rank
    mine = torch.arange(n * rows)[rank * share :][:share]  # the rows this rank orthogonalises
    holder = mine % rows // chunk
    got = holder.bincount(minlength=world_size).tolist()  # rows from each rank
    order = holder.argsort(stable=True).to(shards.device)  # they arrive in the order of holders

    arrived = shards.new_empty(len(mine), columns, dtype=dtype)
    flat = shards.to(dtype).reshape(-1, columns)  # (n held, columns)
    dist.all_to_all_single(arrived, flat, got, sent, group=ranks)
    whole = torch.empty_like(arrived)
    whole[order] = arrived
    whole = orthogonalised_parts(whole.view(-1, m, columns), parts).reshape(-1, columns)
    update = torch.empty_like(flat)
    dist.all_to_all_single(update, whole[order], sent, got, group=ranks)
    return update.view(shards.shape)


def orthogonalised_parts(matrices: Tensor, parts: tuple[int, ...]) -> Tensor:
    """`orthogonalised`, for each of the parts of these rows that the matrices consist of."""
    if len(parts) == 1:
        return orthogonalised(matrices)
    return torch.cat([orthogonalised(part) for part in matrices.split(parts, dim=1)], dim=1)


def orthogonalised(matrices: Tensor) -> Tensor:
    """U V^T for every matrix U S V^T, roughly.

    Singular values above 0.002 of the matrix's norm come out between 0.68 and 1.2, smaller ones
    between 0 and that: each iteration multiplies them by at most 3.4445.

    An iteration replaces X by Z X, where Z is a polynomial in G = X X^T, and G by Z G Z. So X need
    not be touched until all the Z are multiplied together. Long matrices in fp32 do that. Nearly
    square ones gain nothing from it, and in bf16 the errors of G would grow from one Z to the next:
    both update X after each Z.

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
    """(n, m, m): a I + b G + c G^2."""
    Z = torch.baddbmm(G, G, G, beta=b, alpha=c)
    Z.diagonal(dim1=1, dim2=2).add_(a)
    return Z
