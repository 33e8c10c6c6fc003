"""Packed attention on a GPU: each tile of queries visits only the tiles of keys it can see.

Tiles have fixed places in the row, so neither the launch nor any shape depends on the documents.
Each program owns one tile. From `start` and `end`, the bounds of each token's document, it computes
which tiles of the other side it has to visit. No mask is needed where all tokens of its tile see
all of the visited tile. In reading order: tile sizes; functions shared by the kernels; the forward
kernel; two backward kernels, one for queries, one for keys and values; the launches.

Scores are in units of log 2, because GPUs compute exp2. The log-sum-exp of a query that sees no key
is +inf, which makes all its weights 0. Both backward kernels recompute the weights from the scores
and the log-sum-exp. Nothing is summed across programs, so the order of sums is always the same;
atomic sums would save two products.

Paper: Dao, arXiv 2307.08691 (FlashAttention-2), algorithms 1 and 2, without atomic sums.

    python bench/operators.py attention --device cuda
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.triton_here import adjacent, tl, triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_WIDTHS = (16, 32, 64, 128)


def tiles(kernel: str, D: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the sizes of the owned tile and the visited tiles, the warps, and the tiles in flight.

    Of 30 choices, these were the fastest on an H200 or at most 10 % slower, for each kernel and
    length of documents (results/gpu-tiles.jsonl). In half precision they fit the smallest shared
    memory of compute capability 8.0 to 9.0, and only dkv with D 128 spills some registers
    (tests/test_ahead_of_time.py). float32 takes twice the registers; `chosen_impl` never picks it.
    """
    if dtype == torch.float32:
        return {"OWN": 32, "VISITED": 32, "num_warps": 4, "num_stages": 2}
    deep = kernel == "forward" or (kernel == "dq" and D < 128)
    return {"OWN": 64, "VISITED": 32, "num_warps": 4, "num_stages": 3 if deep else 2}


if triton is not None:
    # Offsets are int64, because a batch may have more than 2**31 elements.

    @triton.jit
    def head_of(x, strides, b, h):
        """Return the address of x[b, 0, h]; x is (B, T, H, D), with strides for B, T and H."""
        return x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2]

    @triton.jit
    def load_rows(head, strides, t, T, D: tl.constexpr, MASKED: tl.constexpr):
        """Load x[b, t, h], (rows, D), with zeros for positions from T on."""
        rows = head + t.to(tl.int64)[:, None] * strides[1] + tl.arange(0, D)[None, :]
        if MASKED:
            return tl.load(rows, mask=(t < T)[:, None], other=0.0)
        return tl.load(rows)

    @triton.jit
    def store_rows(out, value, b, h, t, T, H, D: tl.constexpr):
        """Store out[b, t, h] = value, where out is a contiguous (B, T, H, D)."""
        row = (b.to(tl.int64) * T + t) * H + h
        rows = out + row[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(rows, value.to(out.dtype.element_ty), mask=(t < T)[:, None])

    @triton.jit
    def visits(bounds, TILE: tl.constexpr):
        """Plan two loops over tiles of the other side: one without a mask, and one with a mask.

        Each row of the program's tile sees bounds[0]..bounds[1]. So all rows see all of the tiles
        between `plain` and `masked_again`, and the loop with a mask leaps over these.

        Returns: (first, one past last, plain, length of the leap) for each loop
        """
        start, end = bounds
        low, high = tl.min(start) // TILE * TILE, tl.max(end)
        plain = tl.minimum(tl.maximum(tl.cdiv(tl.max(start), TILE) * TILE, low), high)
        masked_again = tl.maximum(tl.min(end) // TILE * TILE, plain)
        leap = masked_again - plain
        return (plain, masked_again, plain, 0), (low, high - leap, plain, leap)

    @triton.jit
    def dot(a, b):
        """Multiply a and b; if they are float32, compute in float32, not in TF32."""
        return tl.dot(a, b, input_precision="ieee")

    @triton.jit
    def seen_by(t, bounds):
        """Return (rows, len(t)): whether position t is within each row's bounds."""
        start, end = bounds
        return (t[None, :] >= start[:, None]) & (t[None, :] < end[:, None])

    @triton.jit
    def tile_of_program(T, H, OWN: tl.constexpr):
        """Return the row, head and tile of a program; last tiles first, as they often take longest.

        The tiles of a head run side by side, because they read the same keys. The grid has only one
        axis, because CUDA limits the second to 65,535, and a batch may have more heads.
        """
        of_head = tl.cdiv(T, OWN)
        b_h = tl.program_id(0) // of_head
        return b_h // H, b_h % H, of_head - 1 - tl.program_id(0) % of_head

    @triton.jit
    def document_of(start, end, b, t, T):
        """Load the first and one-past-last position of each token's document; T and 0 if none."""
        token = b.to(tl.int64) * T + t
        first = tl.load(start + token, mask=t < T, other=T)
        return first, tl.load(end + token, mask=t < T, other=0)

    @triton.jit
    def seen_keys(start, end, b, t, T, CAUSAL: tl.constexpr):
        """Return the first and one-past-last key that each query sees; T and 0 if none."""
        first, last = document_of(start, end, b, t, T)
        return first, tl.minimum(last, t + 1) if CAUSAL else last

    @triton.jit
    def attend(state, given, loop, D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
        """Add keys to an online softmax. Its state: sum of values, sum of weights, top score."""
        acc, total, top = state
        q, keys, values, strides, bounds, T, scale = given
        first, last, plain, leap = loop
        for n in range(first, last, TILE):
            t = n + tl.arange(0, TILE)  # (TILE,)
            if MASKED:
                t += tl.where(n < plain, 0, leap)
            scores = dot(q, tl.trans(load_rows(keys, strides[1], t, T, D, MASKED)))  # (OWN, TILE)
            if MASKED:
                scores = tl.where(seen_by(t, bounds), scores, float("-inf"))
            new_top = tl.maximum(top, scale * tl.max(scores, 1))  # (OWN,)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no key was seen yet
            weights = tl.exp2(scale * scores - base[:, None])
            shrink = tl.exp2(top - base)
            total = total * shrink + tl.sum(weights, 1)
            value = load_rows(values, strides[2], t, T, D, MASKED)
            acc = acc * shrink[:, None] + dot(weights.to(value.dtype), value)  # (OWN, D)
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
        b, h, tile = tile_of_program(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        bounds = seen_keys(start, end, b, t, T, CAUSAL)
        loops = visits(bounds, VISITED)
        query = load_rows(head_of(q, strides[0], b, h), strides[0], t, T, D, True)
        keys, values = head_of(k, strides[1], b, h), head_of(v, strides[2], b, h)

        total = tl.zeros((OWN,), tl.float32)
        state = (tl.zeros((OWN, D), tl.float32), total, total - float("inf"))
        given = (query, keys, values, strides, bounds, T, scale)
        for masked in tl.static_range(2):
            state = attend(state, given, loops[masked], D, VISITED, masked == 1)

        acc, total, top = state
        nothing = total == 0
        total = tl.where(nothing, 1.0, total)
        store_rows(out, acc / total[:, None], b, h, t, T, H, D)
        row_lse = tl.where(nothing, float("inf"), top + tl.log2(total))
        tl.store(lse + (b.to(tl.int64) * H + h) * T + t, row_lse, mask=t < T)

    @triton.jit
    def add_to_dq(dq, given, loop, D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
        q, dout, row_lse, delta, keys, values, strides, bounds, T, scale = given
        first, last, plain, leap = loop
        for n in range(first, last, TILE):
            t = n + tl.arange(0, TILE)  # (TILE,)
            if MASKED:
                t += tl.where(n < plain, 0, leap)
            key = load_rows(keys, strides[1], t, T, D, MASKED)
            value = load_rows(values, strides[2], t, T, D, MASKED)
            weights = tl.exp2(scale * dot(q, tl.trans(key)) - row_lse[:, None])
            if MASKED:
                weights = tl.where(seen_by(t, bounds), weights, 0.0)
            dscores = weights * (dot(dout, tl.trans(value)) - delta[:, None])  # (OWN, TILE)
            dq += dot(dscores.to(key.dtype), key)  # (OWN, D)
        return dq

    @triton.jit(do_not_specialize=["T"])
    def dq_kernel(
        dq,
        delta,
        dout,
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
        root,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        OWN: tl.constexpr,
        VISITED: tl.constexpr,
    ):
        """Compute dq, and delta, each query's sum of out * dout, which dkv_kernel needs too."""
        b, h, tile = tile_of_program(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        bounds = seen_keys(start, end, b, t, T, CAUSAL)
        loops = visits(bounds, VISITED)
        query = load_rows(head_of(q, strides[0], b, h), strides[0], t, T, D, True)
        keys, values = head_of(k, strides[1], b, h), head_of(v, strides[2], b, h)
        own_dout = load_rows(head_of(dout, strides[3], b, h), strides[3], t, T, D, True)
        own_out = load_rows(head_of(out, strides[4], b, h), strides[4], t, T, D, True)
        head = (b.to(tl.int64) * H + h) * T
        row_lse = tl.load(lse + head + t, mask=t < T, other=float("inf"))
        row_delta = tl.sum(own_out.to(tl.float32) * own_dout.to(tl.float32), 1)
        tl.store(delta + head + t, row_delta, mask=t < T)

        acc = tl.zeros((OWN, D), tl.float32)
        given = (query, own_dout, row_lse, row_delta, keys, values, strides, bounds, T, scale)
        for masked in tl.static_range(2):
            acc = add_to_dq(acc, given, loops[masked], D, VISITED, masked == 1)
        store_rows(dq, acc * root, b, h, t, T, H, D)

    @triton.jit
    def add_to_dkv(dkv, given, loop, D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
        dk, dv = dkv
        key, value, queries, douts, lse, delta, strides, bounds, T, scale = given
        first, last, plain, leap = loop
        for n in range(first, last, TILE):
            t = n + tl.arange(0, TILE)  # (TILE,)
            if MASKED:
                t += tl.where(n < plain, 0, leap)
            query = load_rows(queries, strides[0], t, T, D, MASKED)
            dout = load_rows(douts, strides[3], t, T, D, MASKED)
            row_lse = tl.load(lse + t, mask=t < T, other=float("inf"))
            row_delta = tl.load(delta + t, mask=t < T, other=0.0)
            weights = tl.exp2(scale * dot(key, tl.trans(query)) - row_lse[None, :])  # transposed
            if MASKED:
                weights = tl.where(seen_by(t, bounds), weights, 0.0)
            dv += dot(weights.to(dout.dtype), dout)
            dscores = weights * (dot(value, tl.trans(dout)) - row_delta[None, :])  # (OWN, TILE)
            dk += dot(dscores.to(query.dtype), query)  # (OWN, D)
        return dk, dv

    @triton.jit(do_not_specialize=["T"])
    def dkv_kernel(
        dk,
        dv,
        delta,
        dout,
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
        root,
        CAUSAL: tl.constexpr,
        D: tl.constexpr,
        OWN: tl.constexpr,
        VISITED: tl.constexpr,
    ):
        b, h, tile = tile_of_program(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        first, last = document_of(start, end, b, t, T)
        bounds = (tl.maximum(first, t) if CAUSAL else first), last  # the queries that see each key
        loops = visits(bounds, VISITED)
        key = load_rows(head_of(k, strides[1], b, h), strides[1], t, T, D, True)
        value = load_rows(head_of(v, strides[2], b, h), strides[2], t, T, D, True)
        queries, douts = head_of(q, strides[0], b, h), head_of(dout, strides[3], b, h)
        head = (b.to(tl.int64) * H + h) * T

        acc = tl.zeros((OWN, D), tl.float32)
        given = (key, value, queries, douts, lse + head, delta + head, strides, bounds, T, scale)
        dkv = (acc, acc)
        for masked in tl.static_range(2):
            dkv = add_to_dkv(dkv, given, loops[masked], D, VISITED, masked == 1)
        store_rows(dk, dkv[0] * root, b, h, t, T, H, D)
        store_rows(dv, dkv[1], b, h, t, T, H, D)


def check_heads(q: Tensor) -> None:
    """Refuse queries that the kernels do not support."""
    if q.shape[-1] not in HEAD_WIDTHS or q.dtype not in DTYPES:
        needs = f"heads of width {', '.join(map(str, HEAD_WIDTHS))} and 16 or 32 bits"
        raise ValueError(f"impl 'triton' needs {needs}, not {q.shape[-1]} in {q.dtype}")


@lru_cache
def launch(kernel: str, shape: torch.Size, dtype: torch.dtype, causal: bool) -> tuple[tuple, dict]:
    """Return the grid and the constants of a kernel; neither depends on the documents."""
    B, T, H, D = shape
    constants = {"CAUSAL": causal, "D": D} | tiles(kernel, D, dtype)
    return (-(-T // constants["OWN"]) * B * H,), constants


def forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, H, D), and each query's log-sum-exp (B, H, T)."""
    B, T, H, D = q.shape
    q, k, v = map(adjacent, (q, k, v))
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    grid, constants = launch("forward", q.shape, q.dtype, causal)
    scale = math.log2(math.e) / math.sqrt(D)
    strides = tuple(x.stride()[:3] for x in (q, k, v))  # of rows, positions and heads
    with torch.cuda.device_of(q):
        forward_kernel[grid](out, lse, q, k, v, strides, start, end, T, H, scale, **constants)
    return out, lse


def backward(dout: Tensor, saved: Sequence[Tensor], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, T, H, D) each.

    Args: saved q, k, v, output and log-sum-exp of the forward pass, start, end
    """
    q, k, v, out, lse, start, end = saved
    B, T, H, D = q.shape
    dout, q, k, v = map(adjacent, (dout, q, k, v))
    dq, dk, dv = (torch.empty(B, T, H, D, dtype=q.dtype, device=q.device) for _ in range(3))
    delta = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    root = 1 / math.sqrt(D)
    strides = tuple(x.stride()[:3] for x in (q, k, v, dout, out))
    more = (strides, start, end, T, H, math.log2(math.e) * root, root)
    with torch.cuda.device_of(q):
        grid, constants = launch("dq", q.shape, q.dtype, causal)
        dq_kernel[grid](dq, delta, dout, out, lse, q, k, v, *more, **constants)
        grid, constants = launch("dkv", q.shape, q.dtype, causal)
        dkv_kernel[grid](dk, dv, delta, dout, lse, q, k, v, *more, **constants)
    return dq, dk, dv
