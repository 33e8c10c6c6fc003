"""Summed cross-entropy of a linear head, without ever holding all of its logits.

In reading order: the definition in plain PyTorch, which tests and benches compare with; the chunked
form, forward and backward in one pass; `token_losses`, the forward pass alone with the loss of each
target; what both share; `linear_cross_entropy`, which is what a model calls. There is no Triton
kernel here: the work is in three matrix products, which are cuBLAS's or MKL's.

The idea is Liger Kernel's (arXiv 2410.10989, FusedLinearCrossEntropy).

    python bench/kernels.py                            # both forms: time, spread, bytes, memory
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

IGNORE = -100  # a target that counts for nothing: padding, or a token that BERT did not mask
IMPLS = ("auto", "reference", "chunked")


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shares: Tensor | None = None,
) -> Tensor:
    """The definition. With V = 50,304 and N = 32,768 it holds three arrays of 6 GB."""
    logits = F.linear(x, weight, bias)  # (N, V)
    if shares is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") @ shares


class LinearCrossEntropy(torch.autograd.Function):
    """The chunked form: the logits of some rows at a time, made, used and dropped.

    The gradient of a chunk follows from its own softmax, so it is taken in the forward pass, while
    the logits are there; the backward pass only scales it. So there is no second derivative, and
    asking for one (create_graph) is an error: the reference has it. With `grads` False the forward
    pass leaves the gradients out.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shares: Tensor | None,
        grads: bool,
    ) -> Tensor:
        device, dtype = x.device.type, product_dtype(x)
        exact = exact_dtype(dtype)
        matrix = weight.to(dtype)
        loss = torch.zeros((), dtype=exact, device=x.device)
        dx, dweight = (torch.zeros_like(x), torch.zeros_like(weight)) if grads else (None, None)
        dbias = torch.zeros_like(bias) if grads and bias is not None else None
        with torch.autocast(device, enabled=False):
            for rows in chunks(len(x), len(weight), device):
                x_rows, target = x[rows].to(dtype), targets[rows, None]
                counts = target != IGNORE  # (chunk, 1)
                if shares is not None:
                    counts = counts * shares[rows, None].to(exact)
                target = target.clamp(min=0)
                nats, dlogits, norm = softmax(x_rows, matrix, bias, target, exact)
                loss += (nats * counts).sum()
                if not grads:
                    continue
                dlogits *= counts / norm  # softmax, zero where ignored
                dlogits.scatter_add_(1, target, -counts.to(exact))
                if bias is not None:
                    dbias += dlogits.sum(0)
                dlogits = dlogits.to(dtype)
                dx[rows] = dlogits @ matrix
                if dtype == dweight.dtype:
                    dweight.addmm_(dlogits.T, x_rows)
                else:
                    dweight += dlogits.T @ x_rows
        ctx.save_for_backward(dx, dweight, dbias)
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable would let this pass wherever dloss is a constant, and what it
        # returned would count as one.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the chunked cross-entropy has no second derivative, which create_graph asks for:"
                " call linear_cross_entropy with impl='reference'"
            )
        grads = (None if d is None else d * dloss.to(d.dtype) for d in ctx.saved_tensors)
        return *grads, None, None, None


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Find the cross-entropy of each target, in nats, as the chunked form sums it.

    Args:    as of `linear_cross_entropy`
    Returns: (N,) float32, or float64 where x is; 0 where the target is IGNORE; without gradients
    """
    device, dtype = x.device.type, product_dtype(x)
    exact = exact_dtype(dtype)
    matrix = weight.to(dtype)
    losses = torch.zeros(len(x), dtype=exact, device=x.device)
    with torch.autocast(device, enabled=False):
        for rows in chunks(len(x), len(weight), device):
            target = targets[rows, None]
            nats = softmax(x[rows].to(dtype), matrix, bias, target.clamp(min=0), exact).nats
            losses[rows] = nats.masked_fill(target == IGNORE, 0).squeeze(1)
    return losses


class Softmax(NamedTuple):
    """What the loss of some rows follows from, and its gradient: one pass for both."""

    nats: Tensor  # (chunk, 1) the loss of each target
    powers: Tensor  # (chunk, V) e to the logits, less the greatest of each row
    norm: Tensor  # (chunk, 1) their sum


def softmax(
    x: Tensor, matrix: Tensor, bias: Tensor | None, target: Tensor, exact: torch.dtype
) -> Softmax:
    """Of the logits of some rows x (chunk, C); target (chunk, 1) names an entry of each."""
    logits = F.linear(x, matrix).to(exact)  # (chunk, V)
    if bias is not None:
        logits += bias
    top = logits.amax(1, keepdim=True)
    score = logits.gather(1, target) - top
    powers = logits.sub_(top).exp_()
    norm = powers.sum(1, keepdim=True)
    return Softmax(norm.log() - score, powers, norm)


def product_dtype(x: Tensor) -> torch.dtype:
    """What the logits are computed in: what autocast says where it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses are computed in, from logits of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(N: int, V: int, device: str) -> Iterator[slice]:
    """The rows of each chunk."""
    at_once = chunk_rows(V, device)
    return (slice(first, first + at_once) for first in range(0, N, at_once))


def chunk_rows(V: int, device: str) -> int:
    """Rows of logits at a time: what stays in a core's cache, or what keeps a GPU busy."""
    logits = 1 << 20 if device == "cpu" else 1 << 27
    return max(256, logits // V)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    impl: str = "auto",
    shares: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropy, in nats, of the logits x @ weight.T + bias over the targets.

    Args:    x       (N, C) float
             weight  (V, C) float
             bias    (V,) float, or None
             targets (N,) int64; a row whose target is IGNORE counts for nothing
             shares  (N,) float: what each target counts; None for 1
             impl    auto | reference | chunked; auto takes the chunked form on every device: it
                     needs less memory, and on a CPU less time (results/kernels.jsonl)
    Returns: scalar; of the chunked form float32, unless x is float64
    Raises:  ValueError if impl is none of these
    Cost:    three products of N C V each, forward and backward together; the chunked form adds one
             chunk of logits to memory where the reference adds three arrays of N V
    """
    if impl not in IMPLS:
        raise ValueError(f"impl {impl!r} is unknown: choose one of {', '.join(IMPLS)}")
    if impl == "reference":
        return reference(x, weight, bias, targets, shares)
    return LinearCrossEntropy.apply(x, weight, bias, targets, shares, torch.is_grad_enabled())
