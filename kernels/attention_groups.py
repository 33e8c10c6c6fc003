"""Packed attention on a CPU: documents of one length are a batch, which torch's attention takes.

Tokens are laid so that documents of equal length stand side by side: a view of them then is
(documents, length, heads, head width), and needs no mask, causal or not. Where most documents have
the length of their neighbour, or fill a row, tokens stay where they are. The layout is found once a
batch, and serves every layer and the backward pass.

Does not round lengths up, which would save calls: with real texts that took as long.

    python bench/kernels.py --kernel packed_attention --size nano
"""

from collections.abc import Iterator

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
                   -1 everywhere if they stay where they are
             calls (B * T, 2) int64: how many tokens each call takes, and how long its documents
                   are, 0 for padding; zeros from the last call on
    Cost:    some thirty operations on short arrays, no loop over documents
    Example: of [[7, 7, 9, 9, -1]] the tokens stay, and the calls are (4, 2), (1, 0)
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

    order = torch.full((2, N), -1)
    here, call = lengths.unique_consecutive(return_inverse=True)
    by_length = lengths.sort(stable=True)
    sorted_lengths, sorted_call = by_length.values.unique_consecutive(return_inverse=True)
    if (len(here) - len(sorted_lengths)) * TOKENS_OF_A_CALL > N:
        here, call = sorted_lengths, sorted_call
        first, tokens = first[by_length.indices], tokens[by_length.indices]
        moved = first - (tokens.cumsum(0) - tokens)
        order[0] = index + moved.repeat_interleave(tokens, output_size=N)
        order[1, order[0]] = index
    calls = torch.zeros(N, 2, dtype=torch.int64)
    calls[: len(here), 0].index_add_(0, call, tokens)
    calls[: len(here), 1] = here
    return order, calls


def laid(x: Tensor, order: Tensor) -> Tensor:
    """(B, T, H, D) -> (B * T, H, D) as the calls take it"""
    x = x.flatten(0, 1)
    return x if order[0, 0] < 0 else x.index_select(0, order[0])


def put_back(parts: list[Tensor], order: Tensor, like: Tensor) -> Tensor:
    """What the calls gave, (documents, H, length, D) each -> (B, T, H, D), as tokens lie in rows"""
    parts = [flat(part) for part in parts]
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (x if order[0, 0] < 0 else x.index_select(0, order[1])).view(like.shape)


def flat(x: Tensor) -> Tensor:
    """(documents, H, length, ...) -> (tokens, H, ...)"""
    return x.transpose(1, 2).flatten(0, 1)


def by_call(calls: Tensor, *arrays: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Of each call the length of its documents, and its (documents, H, length, ...) of each array.

    Padding is a document here.
    """
    begin = 0
    for tokens, length in calls[: calls[:, 0].count_nonzero()].tolist():
        parts = [x[begin : begin + tokens] for x in arrays]
        yield length, [x.unflatten(0, (-1, length or tokens)).transpose(1, 2) for x in parts]
        begin += tokens


def forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, calls: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D), and the log-sum-exp of every score's row (B * T, H), as laid."""
    out, lse = [], []
    for length, parts in by_call(calls, *(laid(x, order) for x in (q, k, v))):
        if length:
            one, its_lse = attention(*parts, 0.0, causal)
        else:
            one = parts[0].new_zeros(parts[0].shape)
            its_lse = one[..., 0].to(lse_dtype(q))
        out.append(one)
        lse.append(flat(its_lse))
    return put_back(out, order, q), torch.cat(lse)


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
    arrays = [laid(x, order) for x in (dout, q, k, v, out)]
    gradients = []
    for length, parts in by_call(calls, *arrays, lse):
        if length:
            gradients.append(attention_backward(*parts, 0.0, causal))
        else:
            gradients.append(3 * [parts[0].new_zeros(parts[0].shape)])
    dq, dk, dv = (put_back(list(each), order, q) for each in zip(*gradients, strict=True))
    return dq, dk, dv
