"""Summed cross-entropy of a linear head, without ever holding all of its logits.

In reading order: the definition in plain PyTorch, which tests and benches compare with; the losses
of some rows and their gradient by the logits, first in PyTorch, then as a Triton kernel; the three
products around them, forward and backward in one pass; `token_losses`, the forward pass alone with
the loss of each target; `linear_cross_entropy`, which is what a model calls.

    chunked  the logits of some rows at a time, in PyTorch: 50 bytes moved a logit of 16 bits
    triton   the same on a GPU, where one kernel puts the gradient in the logits' place: 12 bytes

The ideas are Liger Kernel's (arXiv 2410.10989, FusedLinearCrossEntropy).

    python bench/operators.py loss    # all forms: time, spread, bytes, memory
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

try:
    import triton
    import triton.language as tl
except ImportError:  # it has no build for this platform
    triton = None

from kernels.triton_here import why_not

IGNORE = -100  # a target that counts for nothing: padding, or a token that BERT did not mask
IMPLS = ("auto", "reference", "chunked", "triton")
# What a program of the kernel reads at a time: 16 columns a thread, two accesses of 16 bytes.
COLS = 8192
WARPS = 16
ALIGNED = 16  # of so many columns: a row of logits begins where a wide access may


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


class Losses(NamedTuple):
    """Of some rows of logits, what the loss is and how it changes with them."""

    nats: Tensor  # (rows,) of each target, times what it counts; 0 where it is IGNORE
    dlogits: Tensor | None  # (rows, V) the gradient of their sum, where it was asked for


def losses_by_torch(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shares: Tensor | None,
    wants_gradient: bool,
) -> Losses:
    """Find the losses of some rows, and their gradient by the logits.

    Args:    x (rows, C) and matrix (V, C) of one dtype; others as of `linear_cross_entropy`
    Returns: nats (rows,) and dlogits (rows, V) in `exact_dtype`
    """
    exact = exact_dtype(x.dtype)
    is_ignored, target = (targets == IGNORE)[:, None], targets.clamp(min=0)[:, None]
    counts = ~is_ignored if shares is None else ~is_ignored * shares[:, None].to(exact)
    logits = F.linear(x, matrix).to(exact)  # (rows, V)
    if bias is not None:
        logits += bias
    top = logits.amax(1, keepdim=True)
    score = logits.gather(1, target) - top
    powers = logits.sub_(top).exp_()
    norm = powers.sum(1, keepdim=True)
    nats = ((norm.log() - score) * counts).masked_fill(is_ignored, 0).squeeze(1)
    if not wants_gradient:
        return Losses(nats, None)
    dlogits = powers.mul_(counts / norm)  # softmax, zero where ignored
    return Losses(nats, dlogits.scatter_add_(1, target, -counts.to(exact)))


if triton is not None:

    @triton.jit
    def logits_at(logits, bias, col, V, stride):
        """These columns of a row in float32; -inf from V on, up to where the next row begins."""
        value = tl.load(logits + col, mask=col < stride, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + col, mask=col < stride, other=0.0)
        return tl.where(col < V, value, float("-inf"))

    # What is not specialized is of another kind in every chunk, which would be compiled again.
    @triton.jit(do_not_specialize=["losses", "targets", "shares", "V"])
    def losses_kernel(
        losses,  # (rows,) float32
        logits,  # (rows, V), of which the gradient takes the place
        bias,  # (stride,) float32, or None: 0
        targets,  # (rows,) int64
        shares,  # (rows,), or None: 1
        V,
        stride,  # of a row of logits
        IGNORED: tl.constexpr,
        GRADIENT: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """A row's loss, log(sum(exp(logits))) - logits[target], times its share; its gradient.

        One pass finds the greatest logit and the sum (online: what was summed is scaled down when
        a greater one comes), another writes the gradient. An ignored row is not read.
        """
        row = tl.program_id(0).to(tl.int64)  # a chunk may have more than 2**31 logits
        logits += row * stride
        target = tl.load(targets + row)
        if target == IGNORED:
            tl.store(losses + row, 0.0)
            if GRADIENT:
                for first in range(0, V, COLS):
                    col = first + tl.arange(0, COLS)
                    nothing = tl.zeros((COLS,), logits.dtype.element_ty)
                    tl.store(logits + col, nothing, mask=col < stride)
        else:
            is_token = (target >= 0) & (target < V)  # of any other the loss is NaN
            # Before a barrier, the first sum's: another warp writes here in the second pass.
            score = tl.load(logits + target, mask=is_token, other=float("nan")).to(tl.float32)
            if bias is not None:
                score += tl.load(bias + target, mask=is_token, other=0.0)
            share = 1.0
            if shares is not None:
                share = tl.load(shares + row).to(tl.float32)
            top = -3.4e38  # finite, so that -inf less this is -inf and not NaN
            powers = tl.zeros((COLS,), tl.float32)
            for first in range(0, V, COLS):
                logit = logits_at(logits, bias, first + tl.arange(0, COLS), V, stride)
                new_top = tl.maximum(top, tl.max(logit, 0))
                powers = powers * tl.exp(top - new_top) + tl.exp(logit - new_top)
                top = new_top
            norm = tl.sum(powers, 0)
            tl.store(losses + row, share * (tl.log(norm) + top - score))
            if GRADIENT:
                scale = share / norm
                for first in range(0, V, COLS):
                    col = first + tl.arange(0, COLS)
                    softmax = scale * tl.exp(logits_at(logits, bias, col, V, stride) - top)
                    d = softmax - tl.where(col == target, share, 0.0)
                    tl.store(logits + col, d.to(logits.dtype.element_ty), mask=col < stride)


def losses_by_triton(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shares: Tensor | None,
    wants_gradient: bool,
) -> Losses:
    """As `losses_by_torch`, but that dlogits is of the dtype of x, in the logits' own memory.

    Cost: of a logit of 16 bits the kernel reads 2 bytes twice and writes 2; its three products
          write 2 and read 2 twice. The row of an ignored target is only written
    """
    rows, V = len(x), len(matrix)
    stride = -(-V // ALIGNED) * ALIGNED
    logits = torch.empty(rows, stride, dtype=x.dtype, device=x.device)[:, :V]
    torch.mm(x, matrix.T, out=logits)
    nats = torch.empty(rows, dtype=torch.float32, device=x.device)
    if bias is not None:
        bias = F.pad(bias.float(), (0, stride - V))
    targets, shares = (None if t is None else t.contiguous() for t in (targets, shares))
    constants = {"IGNORED": IGNORE, "GRADIENT": wants_gradient, "COLS": COLS, "num_warps": WARPS}
    with torch.cuda.device_of(x):
        losses_kernel[(rows,)](nats, logits, bias, targets, shares, V, stride, **constants)
    return Losses(nats, logits if wants_gradient else None)


LOSSES = {"chunked": losses_by_torch, "triton": losses_by_triton}


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, where out may be of more bits than a and b are.

    A GPU sums 16-bit products in float32 anyway: it adds them to out without making an array of
    them, 8 bytes moved an element of out instead of 12. A CPU's torch has no such product.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out += a @ b


class LinearCrossEntropy(torch.autograd.Function):
    """The logits of some rows at a time, made, used and dropped.

    The gradient of a chunk follows from its own softmax, so it is taken in the forward pass, while
    the logits are there; the backward pass only scales it, in place, because a copy would be one
    more array of the weight's size. So there is one backward pass and no second derivative, and
    asking for more (retain_graph, create_graph) is an error: the reference has them. With `grads`
    False the forward pass leaves the gradients out.
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
        impl: str,
    ) -> Tensor:
        device, dtype = x.device.type, product_dtype(x)
        exact = exact_dtype(dtype)
        matrix = weight.to(dtype)
        loss = torch.zeros((), dtype=exact, device=x.device)
        dx, dweight = (torch.zeros_like(x), torch.zeros_like(weight)) if grads else (None, None)
        dbias = torch.zeros_like(bias) if grads and bias is not None else None
        with torch.autocast(device, enabled=False):
            for rows in chunks(len(x), len(weight), device):
                x_rows = x[rows].to(dtype)
                count = None if shares is None else shares[rows]
                nats, dlogits = LOSSES[impl](x_rows, matrix, bias, targets[rows], count, grads)
                loss += nats.sum()
                if not grads:
                    continue
                if bias is not None:
                    dbias += dlogits.sum(0, dtype=exact)
                dlogits = dlogits.to(dtype)
                dx[rows] = dlogits @ matrix
                add_product(dweight, dlogits.T, x_rows)
                del dlogits  # before the next chunk's logits are there
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.is_spent = False
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
        if ctx.is_spent:
            raise RuntimeError(
                "the chunked cross-entropy scales its gradients in place, so a second backward pass"
                " (retain_graph) has none: call linear_cross_entropy with impl='reference'"
            )
        ctx.is_spent = True
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(dloss.to(gradient.dtype))
        return *gradients, None, None, None, None


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Find the cross-entropy of each target, in nats, as `linear_cross_entropy` sums it.

    Args:    as of `linear_cross_entropy`
    Returns: (N,) float32, or float64 where x is; 0 where the target is IGNORE; without gradients
    """
    device, dtype = x.device.type, product_dtype(x)
    losses_of = LOSSES[chosen_impl(device, dtype)]
    matrix = weight.to(dtype)
    losses = torch.zeros(len(x), dtype=exact_dtype(dtype), device=x.device)
    with torch.autocast(device, enabled=False):
        for rows in chunks(len(x), len(weight), device):
            x_rows = x[rows].to(dtype)
            losses[rows] = losses_of(x_rows, matrix, bias, targets[rows], None, False).nats
    return losses


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
    """Rows of logits at a time: what stays in a core's cache, or what keeps a GPU busy.

    On a GPU 4,096 at least. A row moves 12 V bytes (`linear_cross_entropy`), and each chunk reads
    and writes the weight's gradient besides, 8 V C bytes: with C = 768 an eighth of what 4,096 rows
    move, a quarter of 2,048 rows'. The product for x has 4,096 / 128 * C / 128 tiles, 192 with
    C = 768, for an H100's 132 multiprocessors. With V = 50,304 the chunk takes 412 MB.
    """
    if device == "cpu":
        return max(256, (1 << 20) // V)
    return max(4096, (1 << 27) // V)


def chosen_impl(device: str, dtype: torch.dtype, impl: str = "auto") -> str:
    """Which implementation computes losses: a function of its arguments and of what is installed.

    Args: device cpu | cuda | another type of torch's
          dtype  of the products
          impl   auto, or one of IMPLS: what is asked for
    """
    if impl not in IMPLS:
        raise ValueError(f"impl {impl!r} is unknown: choose one of {', '.join(IMPLS)}")
    if impl == "auto":
        return "triton" if dtype.itemsize == 2 and why_not(device) is None else "chunked"
    if impl == "triton":
        if triton is None:
            raise ValueError("impl 'triton': Triton is not installed here, choose auto or chunked")
        if dtype == torch.float64:
            raise ValueError("impl 'triton' computes in float32, x is float64: choose chunked")
        if device != "cuda" and isinstance(losses_kernel, triton.JITFunction):
            raise ValueError(
                "impl 'triton' wants CUDA tensors, or TRITON_INTERPRET=1 set before Python starts"
            )
    return impl


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
             targets (N,) int64, 0 to V - 1; a row whose target is IGNORE counts for nothing
             shares  (N,) float: what each target counts; None for 1
             impl    auto | reference | chunked | triton; auto is triton for products of 16 bits on
                     a GPU that Triton compiles for, else chunked, which needs less memory than the
                     reference, and on a CPU less time (results/kernels.jsonl)
    Returns: scalar; but for the reference float32, unless x is float64
    Raises:  ValueError if impl is none of these, or has no such device or dtype
    Cost:    three products of N C V each, forward and backward together. Bytes moved a logit, of
             16 bits: chunked 50 (written 2, made float32 6, top 4, less it 8, exp 8, sum 4, scaled
             8, made 16 bits 6, read by two products 4), triton 12 (written 2, kernel 6, read 4).
             Memory: one chunk of logits, of 6 bytes and of 2, and the gradients; the reference
             adds three arrays of N V
    """
    impl = chosen_impl(x.device.type, product_dtype(x), impl)
    if impl == "reference":
        return reference(x, weight, bias, targets, shares)
    return LinearCrossEntropy.apply(x, weight, bias, targets, shares, torch.is_grad_enabled(), impl)
