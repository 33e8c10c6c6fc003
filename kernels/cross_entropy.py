"""Summed cross-entropy of a linear head, without ever holding all logits in memory.

In reading order: the definition in plain PyTorch, with which tests and benches compare; the losses
of some rows and their gradient with respect to the logits, first in PyTorch, then as a Triton
kernel; the three matrix products around them, forward and backward in one pass; `token_losses`, a
forward pass that returns the loss of each target; `linear_cross_entropy`, which models call.

    chunked  a chunk of rows at a time, in PyTorch: moves 50 bytes per 16-bit logit
    triton   the same on a GPU, where one kernel overwrites the logits with their gradient: 12 bytes

The ideas are from Liger Kernel (arXiv 2410.10989, FusedLinearCrossEntropy).

    python bench/operators.py loss    # all forms: time, spread, bytes, memory
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from kernels.triton_here import check_impl, tl, triton, why_not

IGNORE = -100  # a target without a loss: padding, or a token that BERT did not mask
IMPLS = ("auto", "reference", "chunked", "triton")
# Columns that a program of the kernel reads at a time: 16 per thread, so two 16-byte accesses.
COLS = 8192
WARPS = 16
ALIGNED = 16  # rows of logits are padded to a multiple of this, so that wide accesses are aligned


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, target_weights: Tensor | None
) -> Tensor:
    """Compute the loss by its definition. V = 50,304 and N = 32,768 take three arrays of 6 GB."""
    logits = F.linear(x, weight, bias)  # (N, V)
    if target_weights is None:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none") @ target_weights


def losses_by_torch(
    x: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, share: Tensor | None, grads: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of some rows, and their gradient with respect to the logits.

    Args:    x (rows, C) and head (V, C) of one dtype; share (rows,) the weight of each
             target's loss, or None: 1; others as for `linear_cross_entropy`
    Returns: nats    (rows,) loss of each target times its share; 0 where the target is IGNORE
             dlogits (rows, V) gradient of the sum, or None without `grads`. Both are at least
             float32
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    is_ignored = (targets == IGNORE)[:, None]
    target = targets[:, None].masked_fill(is_ignored, 0)
    counts = ~is_ignored if share is None else ~is_ignored * share[:, None].to(exact)
    logits = F.linear(x, head).to(exact)  # (rows, V)
    if bias is not None:
        logits += bias
    top = logits.amax(1, keepdim=True)
    score = logits.gather(1, target) - top
    powers = logits.sub_(top).exp_()
    norm = powers.sum(1, keepdim=True)
    nats = ((norm.log() - score) * counts).masked_fill(is_ignored, 0).squeeze(1)
    if not grads:
        return nats, None
    dlogits = powers.mul_(counts / norm)  # softmax, zero where ignored
    return nats, dlogits.scatter_add_(1, target, -counts.to(exact))


if triton is not None:

    @triton.jit
    def logits_at(logits, bias, col, V, stride):
        """Load some columns of a row as float32; the row's padding, from column V on, is -inf."""
        value = tl.load(logits + col, mask=col < stride, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + col, mask=col < stride, other=0.0)
        return tl.where(col < V, value, float("-inf"))

    # Do not specialize arguments that differ between chunks, or each variant would be compiled.
    @triton.jit(do_not_specialize=["losses", "targets", "target_weights", "V"])
    def losses_kernel(
        losses,  # (rows,) float32
        logits,  # (rows, V), overwritten by the gradient
        bias,  # (stride,) float32, or None: 0
        targets,  # (rows,) int64
        target_weights,  # (rows,), or None: 1
        V,
        stride,  # of a row of logits
        IGNORED: tl.constexpr,
        GRADIENT: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """Compute a row's loss, log(sum(exp(logits))) - logits[target], times its share.

        One pass finds the largest logit and the sum (online: when a larger logit appears, the sum
        so far is scaled down). A second pass writes the gradient. An ignored row is not read.
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
            is_token = (target >= 0) & (target < V)  # for any other target the loss is NaN
            # Load this before the barrier of the first reduction, because another warp overwrites
            # the target's logit in the second pass.
            score = tl.load(logits + target, mask=is_token, other=float("nan")).to(tl.float32)
            if bias is not None:
                score += tl.load(bias + target, mask=is_token, other=0.0)
            share = 1.0
            if target_weights is not None:
                share = tl.load(target_weights + row).to(tl.float32)
            top = -3.4e38  # finite, so that -inf - top is -inf and not NaN
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
    x: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, share: Tensor | None, grads: bool
) -> tuple[Tensor, Tensor | None]:
    """Like `losses_by_torch`, but dlogits has the dtype of x and overwrites the logits.

    Cost: per 16-bit logit, the kernel reads 2 bytes twice and writes them once, and the three
          products write them once and read them twice. An ignored target's row is only written
    """
    rows, V = len(x), len(head)
    stride = -(-V // ALIGNED) * ALIGNED
    logits = torch.empty(rows, stride, dtype=x.dtype, device=x.device)[:, :V]
    torch.mm(x, head.T, out=logits)
    nats = torch.empty(rows, dtype=torch.float32, device=x.device)
    if bias is not None:
        bias = F.pad(bias.float(), (0, stride - V))
    targets = targets.contiguous()
    share = None if share is None else share.contiguous()
    constants = {"IGNORED": IGNORE, "GRADIENT": grads, "COLS": COLS, "num_warps": WARPS}
    with torch.cuda.device_of(x):
        losses_kernel[(rows,)](nats, logits, bias, targets, share, V, stride, **constants)
    return nats, logits if grads else None


LOSSES = {"chunked": losses_by_torch, "triton": losses_by_triton}


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out += a @ b, where out may have a wider dtype than a and b.

    A GPU sums 16-bit products in float32 anyway, and can add them to out without a temporary array:
    8 bytes are moved per element of out instead of 12. torch cannot do this on a CPU.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out += a @ b


class LinearCrossEntropy(torch.autograd.Function):
    """Compute the logits chunk by chunk, use them and drop them.

    The gradient of a chunk needs only the softmax of that chunk, so the forward pass computes it
    while the logits exist. The backward pass just scales it, in place, because a copy would take
    another array of the weight's size. So there is only one backward pass and no second derivative:
    asking for more (retain_graph, create_graph) is an error; the reference allows both. With
    `grads` False, the forward pass computes no gradients.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_weights: Tensor | None,
        grads: bool,
        impl: str,
    ) -> Tensor:
        device, dtype = x.device.type, product_dtype(x)
        exact = torch.promote_types(dtype, torch.float32)
        matrix = weight.to(dtype)
        loss = torch.zeros((), dtype=exact, device=x.device)
        dx, dweight = (torch.zeros_like(x), torch.zeros_like(weight)) if grads else (None, None)
        dbias = torch.zeros_like(bias) if grads and bias is not None else None
        with torch.autocast(device, enabled=False):
            for rows in chunks(len(x), len(weight), device):
                x_rows = x[rows].to(dtype)
                weights = None if target_weights is None else target_weights[rows]
                nats, dlogits = LOSSES[impl](x_rows, matrix, bias, targets[rows], weights, grads)
                loss += nats.sum()
                if not grads:
                    continue
                if bias is not None:
                    dbias += dlogits.sum(0, dtype=exact)
                dlogits = dlogits.to(dtype)
                dx[rows] = dlogits @ matrix
                add_product(dweight, dlogits.T, x_rows)
                del dlogits  # before the next chunk's logits are allocated
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.is_spent = False
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable would not notice create_graph if dloss is a constant, and
        # would treat the gradients as constants too.
        if torch.is_grad_enabled():
            raise RuntimeError("only impl='reference' has a second derivative (create_graph)")
        if ctx.is_spent:
            raise RuntimeError("only impl='reference' has a second backward pass (retain_graph)")
        ctx.is_spent = True
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(dloss.to(gradient.dtype))
        return *gradients, None, None, None, None


@torch.no_grad()
def token_losses(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target, in nats. `linear_cross_entropy` returns their sum.

    Args:    as for `linear_cross_entropy`
    Returns: (N,) float32, or float64 if x is; 0 where the target is IGNORE; not differentiable
    """
    device, dtype = x.device.type, product_dtype(x)
    losses_of = LOSSES[chosen_impl(device, dtype)]
    matrix = weight.to(dtype)
    losses = x.new_zeros(len(x), dtype=torch.promote_types(dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        for rows in chunks(len(x), len(weight), device):
            x_rows = x[rows].to(dtype)
            losses[rows], _ = losses_of(x_rows, matrix, bias, targets[rows], None, False)
    return losses


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x: autocast's dtype if autocast is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def chunks(N: int, V: int, device: str) -> Iterator[slice]:
    """Yield the rows of each chunk."""
    at_once = chunk_rows(V, device)
    return (slice(first, first + at_once) for first in range(0, N, at_once))


def chunk_rows(V: int, device: str) -> int:
    """Return the rows per chunk: as many as fit a core's cache, or enough to keep a GPU busy.

    A GPU gets at least 4,096. Each row moves 12 V bytes (`linear_cross_entropy`), and each chunk
    also reads and writes the gradient of the weight, 8 V C bytes. With C = 768 that is an eighth of
    what 4,096 rows move, and a quarter of what 2,048 rows move. The product that gives dx has 4,096
    / 128 * C / 128 tiles, 192 with C = 768, for the 132 multiprocessors of an H100. With V = 50,304
    a chunk takes 412 MB.
    """
    if device == "cpu":
        return max(256, (1 << 20) // V)
    return max(4096, (1 << 27) // V)


def chosen_impl(device: str, dtype: torch.dtype, impl: str = "auto") -> str:
    """Choose the implementation that computes losses on this machine.

    Args: device cpu | cuda | another device type of torch
          dtype  of the products
          impl   one of IMPLS, as given by the caller
    """
    check_impl(impl, IMPLS, device)
    if impl == "auto":
        return "triton" if dtype.itemsize == 2 and why_not(device) is None else "chunked"
    if impl == "triton" and dtype == torch.float64:
        raise ValueError("impl 'triton' computes in float32, but x is float64: choose chunked")
    return impl


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    impl: str = "auto",
    target_weights: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropy, in nats, of the logits x @ weight.T + bias over the targets.

    Args:    x       (N, C) float
             weight  (V, C) float
             bias    (V,) float, or None
             targets (N,) int64, 0 to V - 1; a row whose target is IGNORE has no loss
             target_weights  (N,) float: the weight of each target's loss; None: 1 for each
             impl    auto | reference | chunked | triton. auto is triton for 16-bit products on a
                     GPU that Triton compiles for, else chunked, which needs less memory than the
                     reference and, on a CPU, less time (results/kernels.jsonl)
    Returns: scalar, float32 unless x is float64; the reference returns the dtype of its logits
    Raises:  ValueError for an unknown impl, or one that does not support this device or dtype
    Cost:    three products of N C V each, forward and backward together. Bytes moved per 16-bit
             logit: chunked 50 (write 2, to float32 6, maximum 4, subtract it 8, exp 8, sum 4, scale
             8, to 16 bits 6, read by two products 4), triton 12 (write 2, kernel 6, read 4).
             Memory: the gradients, and one chunk of logits at 6 bytes (chunked) or 2 bytes (triton)
             each; the reference needs the gradients and three arrays of N V
    """
    impl = chosen_impl(x.device.type, product_dtype(x), impl)
    if impl == "reference":
        return reference(x, weight, bias, targets, target_weights)
    grads = torch.is_grad_enabled()
    return LinearCrossEntropy.apply(x, weight, bias, targets, target_weights, grads, impl)
