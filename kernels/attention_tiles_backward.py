"""The gradients of packed attention on a GPU, in two kernels: of queries, and of keys and values.

Both compute scores again from the log-sum-exp. A program has one tile of queries, or of keys, and
visits those tiles of the other side that its documents reach. Nothing is added up between programs,
so sums have the same order every time, at the price of two products more than with atomic sums.

Paper: Dao, arXiv 2307.08691 (FlashAttention-2), algorithm 2, but for that.

    python -m pytest -n 0 tests/test_kernels_packed_attention.py
"""

import math

import torch
from torch import Tensor

from kernels.attention_tiles import launch, strides_of, with_adjacent_numbers

try:
    import triton
    import triton.language as tl

    from kernels.attention_tiles import (
        dot,
        head_of,
        load_rows,
        place,
        seen_by,
        seen_keys,
        store_rows,
        visits,
    )
except ImportError:  # it has no build for this platform
    triton = None

if triton is not None:

    @triton.jit
    def seeing_queries(start, end, b, t, T, CAUSAL: tl.constexpr):
        """The first and one-past-last query that sees each key of t; T and 0: none."""
        at = b.to(tl.int64) * T + t
        first = tl.load(start + at, mask=t < T, other=T)
        last = tl.load(end + at, mask=t < T, other=0)
        return tl.maximum(first, t) if CAUSAL else first, last

    @triton.jit
    def add_to_dq(
        dq,
        q,
        dout,
        row_lse,
        delta,
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
        for n in range(low, high, TILE):
            t = n + tl.arange(0, TILE)
            key = load_rows(keys, strides[1], t, T, D, MASKED)
            value = load_rows(values, strides[2], t, T, D, MASKED)
            weights = tl.exp2(scale * dot(q, tl.trans(key)) - row_lse[:, None])
            if MASKED:
                weights = tl.where(seen_by(t, bounds), weights, 0.0)
            dscores = weights * (dot(dout, tl.trans(value)) - delta[:, None])
            dq += dot(dscores.to(key.dtype), key)
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
        """dq, and delta: each query's sum of out * dout, which the other kernel needs as well"""
        b, h, tile = place(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        bounds = seen_keys(start, end, b, t, T, CAUSAL)
        low, plain, masked_again, high = visits(bounds, VISITED)
        query = load_rows(head_of(q, strides[0], b, h), strides[0], t, T, D, True)
        keys, values = head_of(k, strides[1], b, h), head_of(v, strides[2], b, h)
        own_dout = load_rows(head_of(dout, strides[3], b, h), strides[3], t, T, D, True)
        own_out = load_rows(head_of(out, strides[4], b, h), strides[4], t, T, D, True)
        of_head = (b.to(tl.int64) * H + h) * T
        row_lse = tl.load(lse + of_head + t, mask=t < T, other=float("inf"))
        row_delta = tl.sum(own_out.to(tl.float32) * own_dout.to(tl.float32), 1)
        tl.store(delta + of_head + t, row_delta, mask=t < T)

        acc = tl.zeros((OWN, D), tl.float32)
        args = (query, own_dout, row_lse, row_delta, keys, values, strides, bounds)
        acc = add_to_dq(acc, *args, low, plain, T, scale, D, VISITED, True)
        acc = add_to_dq(acc, *args, plain, masked_again, T, scale, D, VISITED, False)
        acc = add_to_dq(acc, *args, masked_again, high, T, scale, D, VISITED, True)
        store_rows(dq, acc * root, b, h, t, T, H, D)

    @triton.jit
    def add_to_dkv(
        dkv,
        key,
        value,
        queries,
        douts,
        lse,
        delta,
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
        dk, dv = dkv
        for n in range(low, high, TILE):
            t = n + tl.arange(0, TILE)
            query = load_rows(queries, strides[0], t, T, D, MASKED)
            dout = load_rows(douts, strides[3], t, T, D, MASKED)
            row_lse = tl.load(lse + t, mask=t < T, other=float("inf"))
            row_delta = tl.load(delta + t, mask=t < T, other=0.0)
            weights = tl.exp2(scale * dot(key, tl.trans(query)) - row_lse[None, :])  # transposed
            if MASKED:
                weights = tl.where(seen_by(t, bounds), weights, 0.0)
            dv += dot(weights.to(dout.dtype), dout)
            dscores = weights * (dot(value, tl.trans(dout)) - row_delta[None, :])
            dk += dot(dscores.to(query.dtype), query)
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
        b, h, tile = place(T, H, OWN)
        t = tile * OWN + tl.arange(0, OWN)
        bounds = seeing_queries(start, end, b, t, T, CAUSAL)
        low, plain, masked_again, high = visits(bounds, VISITED)
        key = load_rows(head_of(k, strides[1], b, h), strides[1], t, T, D, True)
        value = load_rows(head_of(v, strides[2], b, h), strides[2], t, T, D, True)
        queries, douts = head_of(q, strides[0], b, h), head_of(dout, strides[3], b, h)
        of_head = (b.to(tl.int64) * H + h) * T

        acc = tl.zeros((OWN, D), tl.float32)
        args = (key, value, queries, douts, lse + of_head, delta + of_head, strides, bounds)
        dkv = add_to_dkv((acc, acc), *args, low, plain, T, scale, D, VISITED, True)
        dkv = add_to_dkv(dkv, *args, plain, masked_again, T, scale, D, VISITED, False)
        dkv = add_to_dkv(dkv, *args, masked_again, high, T, scale, D, VISITED, True)
        store_rows(dk, dkv[0] * root, b, h, t, T, H, D)
        store_rows(dv, dkv[1], b, h, t, T, H, D)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    end: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, (B, T, H, D) each."""
    B, T, H, D = q.shape
    dout, q, k, v = with_adjacent_numbers(dout, q, k, v)
    dq, dk, dv = (torch.empty(B, T, H, D, dtype=q.dtype, device=q.device) for _ in range(3))
    delta = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    root = 1 / math.sqrt(D)
    strides = strides_of(q, k, v, dout, out)
    more = (strides, start, end, T, H, math.log2(math.e) * root, root)
    with torch.cuda.device_of(q):
        grid, constants = launch("dq", q.shape, q.dtype, causal)
        dq_kernel[grid](dq, delta, dout, out, lse, q, k, v, *more, **constants)
        grid, constants = launch("dkv", q.shape, q.dtype, causal)
        dkv_kernel[grid](dk, dv, delta, dout, lse, q, k, v, *more, **constants)
    return dq, dk, dv
