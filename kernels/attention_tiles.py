"""Packed attention on a GPU: tiles of queries against those tiles of keys that documents reach.

Tiles lie fixed in the row, so that neither a launch nor a shape depends on the documents. A program
has one tile; from `start` and `end`, the bounds of each token's document, it reads off which tiles
of keys it must visit. Those that every query of its tile sees whole need no mask. In reading order:
the sizes; what kernels share; the forward kernel; its launch. attention_tiles_backward.py has the
gradients.

Scores are in units of log 2, for exp2 is what a GPU computes. Of a query that sees nothing the
log-sum-exp is +inf, so that all its weights are 0.

Paper: Dao, arXiv 2307.08691 (FlashAttention-2), algorithm 1.

    python bench/operators.py attention --device cuda
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # it has no build for this platform
    triton = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_WIDTHS = (16, 32, 64, 128)


class Tiles(NamedTuple):
    """Sizes of a kernel: the tile that a program has, those that it visits, and its warps."""

    own: int
    visited: int
    warps: int
    stages: int


def tiles(kernel: str, D: int, dtype: torch.dtype) -> Tiles:
    """A table that was compiled and never timed.

    In half precision no kernel spills a register on compute capability 8.0, 8.9 or 9.0, and each
    fits into the shared memory of the smallest, 99 KiB, by Triton 3.6, 3.7 and 3.9
    (tests/test_ahead_of_time.py). dkv holds two sums, so it visits half as many; at D 128 sums are
    twice as wide. float32 takes twice the registers and has no matrix units; `chosen_impl` never
    picks it.
    """
    if dtype == torch.float32:
        return Tiles(own=32, visited=32, warps=4, stages=2)
    own = 64 if D == 128 and kernel != "forward" else 128
    visited = 32 if kernel == "dkv" else 64
    return Tiles(own, visited, warps=8, stages=2)


if triton is not None:
    # Offsets within a batch are int64, for it may have more than 2**31 elements.

    @triton.jit
    def head_of(x, strides, b, h):
        """Where x[b, :, h] begins; x is (B, T, H, D) with such strides of B, T and H."""
        return x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2]

    @triton.jit
    def load_rows(head, strides, t, T, D: tl.constexpr, MASKED: tl.constexpr):
        """x[b, t, h], (rows, D); positions from T on are zero."""
        at = head + t.to(tl.int64)[:, None] * strides[1] + tl.arange(0, D)[None, :]
        if MASKED:
            return tl.load(at, mask=(t < T)[:, None], other=0.0)
        return tl.load(at)

    @triton.jit
    def store_rows(out, value, b, h, t, T, H, D: tl.constexpr):
        """out[b, t, h] = value, in a contiguous (B, T, H, D)"""
        row = (b.to(tl.int64) * T + t) * H + h
        at = out + row[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(t < T)[:, None])

    @triton.jit
    def visits(bounds, TILE: tl.constexpr):
        """Where to go through the other side's tiles: under a mask, without, and again under one.

        Each row of the program's tile sees bounds[0]..bounds[1], of which tiles in the middle may
        lie within what every row sees.
        """
        start, end = bounds
        low = tl.min(start) // TILE * TILE
        high = tl.max(end)
        plain = tl.minimum(tl.maximum(tl.cdiv(tl.max(start), TILE) * TILE, low), high)
        masked_again = tl.maximum(tl.min(end) // TILE * TILE, plain)
        return low, plain, masked_again, high

    @triton.jit
    def dot(a, b):
        """A product in float32 arithmetic where a and b are float32, not in TF32."""
        return tl.dot(a, b, input_precision="ieee")

    @triton.jit
    def seen_by(t, bounds):
        """(rows, len(t)): whether position t lies within each row's bounds."""
        start, end = bounds
        return (t[None, :] >= start[:, None]) & (t[None, :] < end[:, None])

    @triton.jit
    def place(T, H, OWN: tl.constexpr):
        """Row and head of a program, and its tile: first the last one, which is often the longest.

        The tiles of a head run side by side, for they read the same keys. Programs are counted on
        one axis: CUDA's second one ends at 65,535, and a batch may have more heads.
        """
        of_head = tl.cdiv(T, OWN)
        b_h = tl.program_id(0) // of_head
        return b_h // H, b_h % H, of_head - 1 - tl.program_id(0) % of_head

    @triton.jit
    def seen_keys(start, end, b, t, T, CAUSAL: tl.constexpr):
        """The first and one-past-last key that each query of t sees; T and 0: none."""
        at = b.to(tl.int64) * T + t
        first = tl.load(start + at, mask=t < T, other=T)
        last = tl.load(end + at, mask=t < T, other=0)
        return first, tl.minimum(last, t + 1) if CAUSAL else last

    @triton.jit
    def attend(
        state,
        q,
        keys,
        values,
        strides,
        bounds,
        low,
        high,
        T,
        scale,
        D: tl.constexpr,
        TILE: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """Take keys into a softmax: its sum of values, sum of weights and top score so far."""
        acc, total, top = state
        for n in range(low, high, TILE):
            t = n + tl.arange(0, TILE)
            scores = scale * dot(q, tl.trans(load_rows(keys, strides[1], t, T, D, MASKED)))
            if MASKED:
                scores = tl.where(seen_by(t, bounds), scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing was seen yet
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            value = load_rows(values, strides[2], t, T, D, MASKED)
            acc = acc * shrink[:, None] + dot(weights.to(value.dtype), value)
            top = new_top
        return acc, total, top

    @triton.jit(do_not_specialize=["T"])
    def forward_kernel(
        out,
        lse,
        q,
        k,
        v,
        strides,
        start,
        end,
        T,
        H,
        scale,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        OWN: tl.constexpr,
        VISITED: tl.constexpr,
    ):
        b, h, tile = place(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        bounds = seen_keys(start, end, b, t, T, CAUSAL)
        low, plain, masked_again, high = visits(bounds, VISITED)
        query = load_rows(head_of(q, strides[0], b, h), strides[0], t, T, D, True)
        keys, values = head_of(k, strides[1], b, h), head_of(v, strides[2], b, h)

        acc = tl.zeros((OWN, D), tl.float32)
        total = tl.zeros((OWN,), tl.float32)
        state = (acc, total, total - float("inf"))
        args = (query, keys, values, strides, bounds)
        state = attend(state, *args, low, plain, T, scale, D, VISITED, True)
        state = attend(state, *args, plain, masked_again, T, scale, D, VISITED, False)
        state = attend(state, *args, masked_again, high, T, scale, D, VISITED, True)

        acc, total, top = state
        nothing = total == 0
        total = tl.where(nothing, 1.0, total)
        store_rows(out, acc / total[:, None], b, h, t, T, H, D)
        row_lse = tl.where(nothing, float("inf"), top + tl.log2(total))
        tl.store(lse + (b.to(tl.int64) * H + h) * T + t, row_lse, mask=t < T)


def check(q: Tensor) -> None:
    """Refuse what the kernels cannot take."""
    if triton is None:
        raise ValueError("impl 'triton': Triton is not installed here, choose dense")
    if q.shape[-1] not in HEAD_WIDTHS or q.dtype not in DTYPES:
        raise ValueError(
            f"impl 'triton' wants heads of {', '.join(map(str, HEAD_WIDTHS))} numbers in bfloat16,"
            f" float16 or float32, not {q.shape[-1]} in {q.dtype}: choose dense"
        )
    if not q.is_cuda and isinstance(forward_kernel, triton.JITFunction):
        raise ValueError(
            "impl 'triton' wants CUDA tensors, or TRITON_INTERPRET=1 set before Python starts"
        )


@lru_cache
def launch(
    kernel: str, shape: torch.Size, dtype: torch.dtype, causal: bool
) -> tuple[tuple[int], dict]:
    """The grid, and a kernel's constants: neither depends on the documents."""
    B, T, H, D = shape
    own, visited, warps, stages = tiles(kernel, D, dtype)
    constants = {"CAUSAL": causal, "D": D, "OWN": own, "VISITED": visited}
    return (-(-T // own) * B * H,), constants | {"num_warps": warps, "num_stages": stages}


def strides_of(*arrays: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Of rows, positions and heads; numbers of a head are adjacent."""
    return tuple(x.stride()[:3] for x in arrays)


def with_adjacent_numbers(*arrays: Tensor) -> list[Tensor]:
    return [x if x.stride(3) == 1 else x.contiguous() for x in arrays]


def forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D), and each query's log-sum-exp (B, H, T)."""
    B, T, H, D = q.shape
    q, k, v = with_adjacent_numbers(q, k, v)
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    grid, constants = launch("forward", q.shape, q.dtype, causal)
    scale = math.log2(math.e) / math.sqrt(D)
    with torch.cuda.device_of(q):
        forward_kernel[grid](
            out, lse, q, k, v, strides_of(q, k, v), start, end, T, H, scale, **constants
        )
    return out, lse
