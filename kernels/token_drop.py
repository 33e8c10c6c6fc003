"""The copies of random layerwise token dropping: take kept tokens out, put the outputs back.

In reading order: the definitions in plain PyTorch; two Triton kernels, one that gathers the kept
rows and one that writes every row from one of two sources; their launches, next to the same in
PyTorch; the gradients; and the two functions that a layer with token dropping calls:

    kept_states, rest = split(x, kept)               x = [a b c d], kept = [1 3] -> [b d]
    x = merge(rest, kept, block(kept_states))        block's output [B D]        -> [a B c D]

On a GPU each function is one launch forward and one backward, and every hidden state is read once
and written once: nothing is filled with zeros first, and autograd sums nothing. Both functions are
exact copies, and so are their gradients.

Which tokens are kept is decided in ltd.py; this file knows nothing of positions and masks.

Paper: Yao et al., arXiv 2211.11586, section 3. DeepSpeed's CUDA kernels for it, csrc/random_ltd,
are limited to rows of 2,048 tokens (token_sort.cu); these take rows of any length.

    python bench/operators.py copies    # time, spread, bytes, percent of the peak
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.library import custom_op

from kernels.triton_here import adjacent, check_impl, tl, triton, why_not

IMPLS = ("auto", "torch", "triton")
# A program copies enough bytes to hide the latency of memory: in each of 4 warps, each of 32
# threads has 4 accesses of the widest kind in flight.
ACCESS_BYTES = 16
WARPS = 4
TILE_BYTES = WARPS * 32 * 4 * ACCESS_BYTES


def reference_gather(x: Tensor, kept: Tensor) -> Tensor:
    """Gather the kept states of x; the definition of `gather_kept`."""
    return x.gather(1, kept[:, :, None].expand(-1, -1, x.shape[2]))  # (B, K, C)


def reference_scatter(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    """Replace the kept rows of x by y; the definition of `scatter_kept`."""
    return x.scatter(1, kept[:, :, None].expand(-1, -1, x.shape[2]), y)  # (B, T, C)


if triton is not None:
    # A kernel numbers the rows of the whole batch consecutively. Offsets are int64, because a batch
    # may have more than 2**31 elements. Strides are in units of UNIT elements: the multiplication
    # by this constant tells the compiler that wide accesses are aligned. So no argument needs to be
    # specialized for 1 or for multiples of 16, which would recompile as T and K change in a run.

    OF_A_BATCH = ["rows", "T", "K", "reach", "x_stride_b", "x_stride_t", "y_stride_b", "y_stride_k"]

    @triton.jit(do_not_specialize=OF_A_BATCH)
    def gather_kernel(
        out,  # (B, K, C), contiguous
        x,  # (B, T, C)
        kept,  # (B, K), contiguous
        rows,  # B * K
        K,
        x_stride_b,
        x_stride_t,
        C: tl.constexpr,
        UNIT: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """out[b, k] = x[b, kept[b, k]]"""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < C)[None, :]
        b = (row // K).to(tl.int64)
        t = tl.load(kept + row, mask=row < rows, other=0)
        start = (b * x_stride_b + t * x_stride_t) * UNIT
        value = tl.load(x + start[:, None] + col[None, :], mask=inside)
        tl.store(out + row.to(tl.int64)[:, None] * C + col[None, :], value, mask=inside)

    @triton.jit(do_not_specialize=OF_A_BATCH)
    def scatter_kernel(
        out,  # (B, T, C), contiguous
        x,  # (B, T, C)
        kept,  # (B, K), contiguous
        y,  # (B, K, C)
        rows,  # B * T
        T,
        K,
        reach,  # first step of the binary search: the largest power of 2 below K, or 0
        x_stride_b,
        x_stride_t,
        y_stride_b,
        y_stride_k,
        C: tl.constexpr,
        UNIT: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
    ):
        """out[b, t] = y[b, k] if kept[b, k] == t for some k, else x[b, t]"""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < C)[None, :]
        b, t = (row // T).to(tl.int64), (row % T).to(tl.int64)

        # Binary search for the last k with kept[b, k] <= t, or 0. Its loads hit the cache, and it
        # saves a second launch that would invert `kept`.
        k = tl.zeros((ROWS,), tl.int64)
        while reach > 0:
            probe = k + reach
            position = tl.load(kept + b * K + probe, mask=(row < rows) & (probe < K), other=T)
            k = tl.where(position <= t, probe, k)
            reach //= 2
        is_kept = tl.load(kept + b * K + k, mask=row < rows, other=-1) == t

        # Each row is loaded and stored under the mask of its source. Selecting between two loaded
        # values made Triton 3.9 search twice; selecting addresses lost the 16-byte accesses.
        at_kept = inside & is_kept[:, None]
        at_dropped = inside & ~is_kept[:, None]
        start = (b * x_stride_b + t * x_stride_t) * UNIT
        from_x = tl.load(x + start[:, None] + col[None, :], mask=at_dropped)
        start = (b * y_stride_b + k * y_stride_k) * UNIT
        from_y = tl.load(y + start[:, None] + col[None, :], mask=at_kept)
        target = out + row.to(tl.int64)[:, None] * C + col[None, :]
        tl.store(target, from_x, mask=at_dropped)
        tl.store(target, from_y, mask=at_kept)


def flat_rows(kept: Tensor, T: int) -> Tensor:
    """Return the kept positions as row numbers of x.view(B * T, C), so a CPU copies whole rows."""
    starts = T * torch.arange(len(kept), device=kept.device)
    return (kept + starts[:, None]).flatten()  # (B * K,)


@lru_cache
def copy_launch(rows: int, C: int, itemsize: int, *strides: int) -> tuple[tuple, tuple, dict]:
    """Decide how to launch a kernel that writes this many rows, TILE_BYTES in each program.

    Args:    strides of each source's rows and positions, in elements
    Returns: the grid, the strides in units of UNIT elements, and the kernel's constants
    """
    unit = math.gcd(C, ACCESS_BYTES // itemsize, *strides)
    cols = min(1 << (C - 1).bit_length(), TILE_BYTES // itemsize)
    tile_rows = TILE_BYTES // itemsize // cols
    grid = (-(-rows // tile_rows), -(-C // cols))
    constants = {"C": C, "UNIT": unit, "ROWS": tile_rows, "COLS": cols, "num_warps": WARPS}
    return grid, tuple(stride // unit for stride in strides), constants


def gather_kept(x: Tensor, kept: Tensor, impl: str) -> Tensor:
    """Return the kept rows of x, (B, K, C), contiguous. Not differentiable."""
    if impl == "triton":
        run = gather_op if torch.compiler.is_compiling() else gather_by_triton
        return run(x, kept)
    out = x.new_empty(*kept.shape, x.shape[2])
    torch.index_select(x.flatten(0, 1), 0, flat_rows(kept, x.shape[1]), out=out.flatten(0, 1))
    return out


def gather_by_triton(x: Tensor, kept: Tensor) -> Tensor:
    B, _, C = x.shape
    K = kept.shape[1]
    x, kept = adjacent(x), kept.contiguous()
    out = torch.empty(B, K, C, dtype=x.dtype, device=x.device)
    grid, strides, constants = copy_launch(B * K, C, x.element_size(), *x.stride()[:2])
    with torch.cuda.device_of(x):
        gather_kernel[grid](out, x, kept, B * K, K, *strides, **constants)
    return out


def scatter_kept(x: Tensor, kept: Tensor, y: Tensor, impl: str) -> Tensor:
    """Return x with its kept rows replaced by y, (B, T, C), contiguous. Not differentiable."""
    if impl == "triton":
        run = scatter_op if torch.compiler.is_compiling() else scatter_by_triton
        return run(x, kept, y)
    out = x.clone(memory_format=torch.contiguous_format)
    out.flatten(0, 1).index_copy_(0, flat_rows(kept, x.shape[1]), y.flatten(0, 1))
    return out


def scatter_by_triton(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    (B, T, C), K = x.shape, kept.shape[1]
    x, y = adjacent(x), adjacent(y)
    kept, reach = kept.contiguous(), 1 << (K - 1).bit_length() >> 1
    out = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
    strides = (*x.stride()[:2], *y.stride()[:2])
    grid, units, constants = copy_launch(B * T, C, x.element_size(), *strides)
    with torch.cuda.device_of(x):
        scatter_kernel[grid](out, x, kept, y, B * T, T, K, reach, *units, **constants)
    return out


if triton is not None:
    # The same two functions as operators, which torch.compile does not trace into.
    gather_op = custom_op("parsimony::gather_kept", gather_by_triton, mutates_args=())
    scatter_op = custom_op("parsimony::scatter_kept", scatter_by_triton, mutates_args=())

    @gather_op.register_fake
    def _(x, kept):
        return x.new_empty(*kept.shape, x.shape[2])

    @scatter_op.register_fake
    def _(x, kept, y):
        return x.new_empty(x.shape)


class Split(torch.autograd.Function):
    """Autograd function of `split`: the kept rows of x, and x itself for the dropped rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, kept: Tensor, impl: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(kept)
        ctx.impl = impl
        return gather_kept(x, kept, impl), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dstates: Tensor, drest: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return scatter_kept(drest, kept, dstates, ctx.impl), None, None


class Merge(torch.autograd.Function):
    """Autograd function of `merge`: the rest of a split with y in its kept rows.

    The gradient of the rest is passed on unchanged, kept rows included, because Split ignores them.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rest: Tensor, kept: Tensor, y: Tensor, impl: str) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.impl = impl
        return scatter_kept(rest, kept, y, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (kept,) = ctx.saved_tensors
        return d, None, gather_kept(d, kept, ctx.impl), None


def checked_impl(impl: str, x: Tensor, kept: Tensor, y: Tensor | None = None) -> str:
    """Check that the arguments fit together, and choose torch or triton."""
    check_impl(impl, IMPLS, x.device.type)
    (B, T, C), K = x.shape, kept.shape[-1]
    if kept.shape != (B, K) or not 1 <= K <= T or kept.dtype != torch.int64:
        needed = f"it must be ({B}, 1 to {T}) torch.int64"
        raise ValueError(f"kept is {tuple(kept.shape)} {kept.dtype}: {needed}")
    if y is not None and (y.shape != (B, K, C) or y.dtype != x.dtype):
        raise ValueError(f"y is {tuple(y.shape)} {y.dtype}: it must be {(B, K, C)} {x.dtype}")
    if impl == "auto":
        return "triton" if x.is_cuda and why_not("cuda") is None else "torch"
    return impl


def split(x: Tensor, kept: Tensor, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """Split x into its kept rows, which go through a layer, and the rest, which goes around it.

    `rest` shares the memory of x: neither may be changed in place before the merge.

    Args:    x    (B, T, C) float, with any strides
             kept (B, K) int64, 1 <= K <= T: positions 0..T-1, ascending and unique in each row.
                  This is not checked, because the host would have to wait for a GPU
             impl auto | torch | triton; auto is triton for CUDA tensors if `why_not` is None
    Returns: kept states (B, K, C), and rest (B, T, C), which is x, but only its dropped rows pass
             their gradient on
    Raises:  ValueError for shapes, a dtype or an impl that do not fit
    Cost:    a GPU moves 2 K rows forward, 2 T backward; no synchronisation
    """
    return Split.apply(x, kept, checked_impl(impl, x, kept))


def merge(rest: Tensor, kept: Tensor, y: Tensor, impl: str = "auto") -> Tensor:
    """Put a layer's output back among the tokens that bypassed it.

    Args:    rest the tensor that split returned for the same `kept`, not a function of it: its kept
                  rows receive a meaningless gradient, which only split ignores
             kept (B, K) int64, as for split
             y    (B, K, C), with the dtype of rest
    Returns: (B, T, C), rest with its kept rows replaced by those of y
    Raises:  ValueError, as split
    Cost:    a GPU moves 2 T rows forward, 2 K backward; no synchronisation
    """
    return Merge.apply(rest, kept, y, checked_impl(impl, rest, kept, y))
