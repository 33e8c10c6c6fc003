"""Packed attention on a CPU: documents of one length are a batch, which torch's attention takes.

Tokens are laid so that documents of equal length stand side by side: a view of them then is
(documents, length, heads, head width), and needs no mask, causal or not. Where most documents have
the length of their neighbour, or fill a row, tokens stay where they are. The layout is found once a
batch, and serves every layer and the backward pass.

Does not round lengths up, which would save calls: with real texts that took as long.

    OMP_NUM_THREADS=2 python bench/attention.py
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# To lay so many tokens another way, and their gradients, takes about as long as a call of torch's
# attention takes beside its work (nano: 0.4 us a token, 50 us a call).
TOKENS_OF_A_CALL = 128

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def layout(doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """In which order the tokens of a batch are laid, and what calls they make then.

    Neither's shape depends on the documents, so nothing is compiled again when they change.

    Args:    doc_ids (B, T) int64, -1 on padding
    Returns: order (2, B * T) int64: the tokens as they are laid, and where each token is then;
                   without meaning where all stay
             calls (1 + B * T, 2) int64: first how many calls there are, and 1 if tokens are moved;
                   then how many tokens each call takes, and how long its documents are, 0 for
                   padding
    Cost:    some thirty operations on short arrays, no loop over documents
    Example: of [[7, 7, 9, 9, -1]] no token is moved, and the calls are (4, 2), (1, 0)
    """
    B, T = doc_ids.shape
    N = B * T
    ids, index = doc_ids.flatten(), torch.arange(N)
    begins = torch.ones(N, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=begins[1:])
    begins[::T] = True
    first = begins.nonzero()[:, 0]  # of each document; padding counts as one
    tokens = first.diff(append=first.new_tensor([N]))
    lengths = torch.where(ids[first] < 0, 0, tokens)

    order = torch.zeros(2, N, dtype=torch.int64)
    here, call = lengths.unique_consecutive(return_inverse=True)
    by_length = lengths.sort(stable=True)
    sorted_lengths, sorted_call = by_length.values.unique_consecutive(return_inverse=True)
    moved = (len(here) - len(sorted_lengths)) * TOKENS_OF_A_CALL > N
    if moved:
        here, call = sorted_lengths, sorted_call
        first, tokens = first[by_length.indices], tokens[by_length.indices]
        by = first - (tokens.cumsum(0) - tokens)
        order[0] = index + by.repeat_interleave(tokens, output_size=N)
        order[1, order[0]] = index
    calls = torch.zeros(1 + N, 2, dtype=torch.int64)
    calls[0, 0], calls[0, 1] = len(here), moved
    calls[1 : 1 + len(here), 0].index_add_(0, call, tokens)
    calls[1 : 1 + len(here), 1] = here
    return order, calls


class Calls(NamedTuple):
    sizes: list[list[int]]  # of each its tokens, and the length of its documents
    order: Tensor | None  # None: no token is moved

    @classmethod
    def of(cls, order: Tensor, calls: Tensor) -> "Calls":
        count, moved = calls[0].tolist()
        return cls(calls[1 : 1 + count].tolist(), order if moved else None)

    def laid(self, x: Tensor) -> Tensor:
        """(B, T, H, D) -> (B * T, H, D), as the calls take it"""
        if x.stride(3) != 1:  # wrong in torch's operator, which does not say so
            x = x.contiguous()
        x = x.flatten(0, 1)
        return x if self.order is None else x.index_select(0, self.order[0])

    def parts(self, x: Tensor) -> list[Tensor]:
        """(B * T, H, ...) -> (documents, H, length, ...) of each call; padding is a document"""
        rest, tokens = x.shape[1:], [tokens for tokens, _ in self.sizes]
        return [
            part.view(-1, length or count, *rest).transpose(1, 2)
            for part, (count, length) in zip(x.split(tokens), self.sizes, strict=True)
        ]

    def put_back(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """The calls' (documents, H, length, D) -> (B, T, H, D), as tokens lie in their rows"""
        x = joined(parts)
        return (x if self.order is None else x.index_select(0, self.order[1])).view(like.shape)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """(documents, H, length, ...) of each call -> (tokens, H, ...)"""
    flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, calls: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D), and the log-sum-exp of every score's row (B * T, H), as laid."""
    todo = Calls.of(order, calls)
    out, lse = [], []
    inputs = (todo.parts(todo.laid(x)) for x in (q, k, v))
    for (_, length), *parts in zip(todo.sizes, *inputs, strict=True):
        if length:
            one, its_lse = attention(*parts, 0.0, causal)
        else:
            one = parts[0].new_zeros(parts[0].shape)
            its_lse = one[..., 0].to(lse_dtype(q))
        out.append(one)
        lse.append(its_lse)
    return todo.put_back(out, q), joined(lse)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    calls: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, (B, T, H, D) each."""
    todo = Calls.of(order, calls)
    gradients = []
    inputs = (todo.parts(x) for x in (*map(todo.laid, (dout, q, k, v, out)), lse))
    for (_, length), *parts in zip(todo.sizes, *inputs, strict=True):
        if length:
            gradients.append(attention_backward(*parts, 0.0, causal))
        else:
            gradients.append(3 * [parts[0].new_zeros(parts[0].shape)])
    dq, dk, dv = (todo.put_back(each, q) for each in zip(*gradients, strict=True))
    return dq, dk, dv
