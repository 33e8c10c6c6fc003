"""Packed attention on a CPU: documents of like length are a batch, which torch's attention takes.

Where few documents differ from their neighbours in length, as where each fills its row, they are
taken as they lie: of those side by side with equal lengths a view is (documents, length, heads,
head width), and needs no mask, causal or not. Else tokens are laid anew, documents of like length
side by side, and each is filled up to the next of some twenty lengths. If causal, no token sees
what follows its document; if not, a mask of keys hides it. The layout is found once a batch, and
serves every layer and the backward pass.

Calls are to be few, because each makes threads wait for each other: 43 of them, one for every
length of a nano batch, took 1.15 of the dense mask's time on two threads, and 13 take as long as
it does (not recorded).

    OMP_NUM_THREADS=2 python bench/operators.py attention
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# To lay so many of nano's tokens anew, and their gradients, takes as long as one call more.
TOKENS_OF_A_CALL = 128
STEPS = 16  # lengths that documents are filled up to, from a sixteenth of a row to all of it

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def layout(doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """How the tokens of a batch are laid, in slots, and what calls they make then.

    Neither's shape depends on the documents, so nothing is compiled again when they change.

    Args:    doc_ids (B, T) int64, -1 on padding
    Returns: slots (3, 2 * B * T) int64: the token of each slot; the slot of each token; 1 where a
                   slot only fills a document up. Without meaning where tokens are not moved
             calls (1 + B * T, 2) int64: first how many calls there are, and how many slots, 0 if
                   tokens are not moved; then how many slots each call takes, and the length of its
                   documents, 0 for padding
    Cost:    some forty operations on short arrays, no loop over documents
    Example: of [[7, 7, 9, 9, -1]] no token is moved, and the calls are (4, 2), (1, 0)
    """
    B, T = doc_ids.shape
    N = B * T
    ids = doc_ids.flatten()
    begins = torch.ones(N, dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=begins[1:])
    begins[::T] = True
    first = begins.nonzero()[:, 0]  # of each document; padding counts as one
    tokens = first.diff(append=first.new_tensor([N]))
    lengths = torch.where(ids[first] < 0, 0, tokens)

    slots = torch.zeros(3, 2 * N, dtype=torch.int64)
    calls = torch.zeros(1 + N, 2, dtype=torch.int64)
    here, call = lengths.unique_consecutive(return_inverse=True)
    taken = tokens
    filled = filled_up(lengths, T).sort(stable=True)
    filled_here, filled_call = filled.values.unique_consecutive(return_inverse=True)
    if (len(here) - len(filled_here)) * TOKENS_OF_A_CALL > N:
        here, call = filled_here, filled_call
        first, tokens = first[filled.indices], tokens[filled.indices]
        taken = torch.where(filled.values > 0, filled.values, tokens)
        doc = torch.arange(len(taken)).repeat_interleave(taken)  # (S,)
        S = len(doc)
        place = torch.arange(S) - (taken.cumsum(0) - taken)[doc]
        slots[0, :S] = first[doc] + torch.minimum(place, tokens[doc] - 1)
        slots[2, :S] = place >= tokens[doc]
        real = (slots[2, :S] == 0).nonzero()[:, 0]
        slots[1, slots[0, real]] = real
        calls[0, 1] = S
    calls[0, 0] = len(here)
    calls[1 : 1 + len(here), 0].index_add_(0, call, taken)
    calls[1 : 1 + len(here), 1] = here
    return slots, calls


def filled_up(lengths: Tensor, T: int) -> Tensor:
    """The least of the lengths T/16, 2T/16 ... T that is no shorter; below T/16 a power of two.

    At most twice a document's own length, so 2 B T slots are enough. Of padding 0.
    """
    step = max(T // STEPS, 1)
    above = ((lengths + step - 1) // step * step).clamp(max=T)
    power = 2 ** lengths.clamp(min=1).log2().ceil().long()
    return torch.where((lengths < step) & (lengths > 0), power, above)


# What one score under a dense mask takes is the unit: 13 ns of nano's heads, forward and backward.
# The others are such that the sums below come out as times did in rows of 256 and 512, with real
# documents and with 2 to 17 random ones in a row (two threads, causal, not recorded). For longer
# rows they are too high: there, without a mask, torch leaves out keys after a query.
CALL = 15_000
MOVED_SLOT = 45
SLOT, SCORE = 30, 0.87  # of torch's attention without a mask
SMALL = 100_000  # what to find the layout takes, and more than it can save in a layer or two


def saves(doc_ids: Tensor, calls: Tensor) -> bool:
    """Whether these calls are less work than a dense mask, by an estimate."""
    B, T = doc_ids.shape
    count, moved = calls[0].tolist()
    slots, length = calls[1 : 1 + count].T
    work = (slots * (SLOT + SCORE * length)).sum().item()
    return work + CALL * count + MOVED_SLOT * moved < B * T * T


class Calls(NamedTuple):
    sizes: list[list[int]]  # of each its slots, and the length of its documents
    token: Tensor | None  # (S,) of each slot; None: tokens are not moved
    slot: Tensor  # (B * T,) of each token
    blank: Tensor  # (S,) int64, 1 where a slot only fills a document up

    @classmethod
    def of(cls, slots: Tensor, calls: Tensor, tokens: int) -> "Calls":
        count, S = calls[0].tolist()
        token, blank = (slots[0, :S], slots[2, :S]) if S else (None, slots[2, :tokens])
        return cls(calls[1 : 1 + count].tolist(), token, slots[1, :tokens], blank)

    def laid(self, x: Tensor) -> list[Tensor]:
        """(B, T, H, D) or (B * T, H) -> (documents, H, length, ...) of each call; padding is one"""
        if x.ndim == 4:
            if x.stride(3) != 1:  # wrong in torch's operator, which does not say so
                x = x.contiguous()
            x = x.flatten(0, 1)
        return self.parts(x if self.token is None else x.index_select(0, self.token))

    def parts(self, x: Tensor) -> list[Tensor]:
        rest, slots = x.shape[1:], [slots for slots, _ in self.sizes]
        return [
            part.view(-1, length or count, *rest).transpose(1, 2)
            for part, (count, length) in zip(x.split(slots), self.sizes, strict=True)
        ]

    def laid_gradient(self, dout: Tensor) -> list[Tensor]:
        """The same for the gradient from above, of which a slot that fills up has none."""
        if self.token is None:
            return self.laid(dout)
        x = dout.flatten(0, 1).index_select(0, self.token)
        return self.parts(x.index_fill_(0, self.blank.nonzero()[:, 0], 0))

    def masks(self, causal: bool, dtype: torch.dtype) -> list[Tensor | None]:
        """What each call adds to its scores (documents, 1, 1, length): None, or -inf if blank"""
        if causal or self.token is None:
            return [None] * len(self.sizes)
        added = torch.zeros(len(self.blank), 1, 1, dtype=dtype)
        added.masked_fill_(self.blank.bool()[:, None, None], -torch.inf)
        return [part.transpose(2, 3) for part in self.parts(added)]

    def put_back(self, parts: Sequence[Tensor]) -> Tensor:
        """(documents, H, length, ...) of each call -> (B * T, H, ...), as tokens lie in rows"""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        x = flat[0] if len(flat) == 1 else torch.cat(flat)
        return x if self.token is None else x.index_select(0, self.slot)


def forward(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, calls: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output (B, T, H, D), and each query's log-sum-exp (B * T, H)."""
    todo = Calls.of(slots, calls, q.shape[0] * q.shape[1])
    out, lse = [], []
    inputs = (todo.laid(x) for x in (q, k, v))
    masks = todo.masks(causal, q.dtype)
    for (_, length), mask, *parts in zip(todo.sizes, masks, *inputs, strict=True):
        if length:
            one, its_lse = attention(*parts, 0.0, causal, attn_mask=mask)
        else:
            one = parts[0].new_zeros(parts[0].shape)
            its_lse = one[..., 0].to(lse_dtype(q))
        out.append(one)
        lse.append(its_lse)
    return todo.put_back(out).view(q.shape), todo.put_back(lse)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slots: Tensor,
    calls: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, (B, T, H, D) each."""
    todo = Calls.of(slots, calls, q.shape[0] * q.shape[1])
    gradients = []
    inputs = (todo.laid(x) for x in (q, k, v, out, lse))
    douts, masks = todo.laid_gradient(dout), todo.masks(causal, q.dtype)
    for (_, length), mask, *parts in zip(todo.sizes, masks, douts, *inputs, strict=True):
        if length:
            gradients.append(attention_backward(*parts, 0.0, causal, attn_mask=mask))
        else:
            gradients.append(3 * [parts[0].new_zeros(parts[0].shape)])
    dq, dk, dv = (todo.put_back(each).view(q.shape) for each in zip(*gradients, strict=True))
    return dq, dk, dv
