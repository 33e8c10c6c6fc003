"""Packed attention on a CPU: documents of similar length form a batch for torch's attention.

Two rows of 32 with documents of 15, 14, 16 and 13 tokens and 6 of padding, in steps of 2 tokens:

    rows     a a a a a a a a a a a a a a a b b b b b b b b b b b b b b - - -
             c c c c c c c c c c c c c c c c d d d d d d d d d d d d d - - -
    slots    documents of one rounded length side by side: b and d. have 14, a. and c have 16
    calls    (28, 14), (32, 16): slots and length. Two calls of torch's attention, without a mask if
             it is causal, because no token sees the blank slots that follow its document. A third
             entry, (6, 0), stands for the padding, which attends to nothing

If most documents are as long as their neighbours, for example because each fills its row, tokens
are not moved: adjacent documents of equal length are a view (documents, length, heads, head width).
The layout is computed once per batch, for all layers and the backward pass. There should be few
calls, because threads wait for each other in each.

In reading order: the layout of a batch and what it costs; attention forward and backward, call by
call; the copies between rows and slots.

    OMP_NUM_THREADS=2 python bench/operators.py attention
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.triton_here import adjacent

# Moving this many tokens of width 128, and their gradients, takes as long as one more call.
TOKENS_OF_A_CALL = 128
STEPS = 16  # documents are padded to multiples of a sixteenth of a row

attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def layout(doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Lay the tokens of a batch out in slots, and divide the slots into calls.

    The shapes of the results do not depend on the documents, so new documents do not cause another
    compilation.

    Args:    doc_ids (B, T) int64, -1 on padding
    Returns: slots (3, 2 * B * T) int64: the token of each slot; the slot of each token; 1 where a
                   slot only pads a document. Meaningless if tokens are not moved
             calls (1 + B * T, 2) int64: first the number of calls and the number of slots, which is
                   0 if tokens are not moved; then for each call its number of slots and the length
                   of its documents, which is 0 for padding
    Cost:    about forty operations on short arrays, no loop over documents
    Example: no token of [[7, 7, 9, 9, -1]] is moved, and the calls are (4, 2), (1, 0)
    """
    B, T = doc_ids.shape
    first, tokens, lengths = documents_of(doc_ids)
    slots = torch.zeros(3, 2 * B * T, dtype=torch.int64)
    slots_each, slot_count = tokens, 0  # of a document; of all, 0 if tokens are not moved
    call_lengths, call = lengths.unique_consecutive(return_inverse=True)
    padded, by_length = rounded_up(lengths, T).sort(stable=True)
    padded_lengths, padded_call = padded.unique_consecutive(return_inverse=True)
    if (len(call_lengths) - len(padded_lengths)) * TOKENS_OF_A_CALL > B * T:
        call_lengths, call = padded_lengths, padded_call
        first, tokens = first[by_length], tokens[by_length]
        slots_each = torch.where(padded > 0, padded, tokens)
        slot_count = lay_out(slots, first, tokens, slots_each)
    count = len(call_lengths)
    calls = torch.zeros(1 + B * T, 2, dtype=torch.int64)
    calls[0, 0], calls[0, 1] = count, slot_count
    calls[1 : 1 + count, 0].index_add_(0, call, slots_each)
    calls[1 : 1 + count, 1] = call_lengths
    return slots, calls


def documents_of(doc_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each document's first token, (n,), its tokens, and its length, 0 for padding."""
    ids = doc_ids.flatten()
    begins = torch.ones(len(ids), dtype=torch.bool)
    torch.ne(ids[1:], ids[:-1], out=begins[1:])
    begins[:: doc_ids.shape[1]] = True
    first = begins.nonzero()[:, 0]
    tokens = first.diff(append=first.new_tensor([len(ids)]))
    return first, tokens, torch.where(ids[first] < 0, 0, tokens)


def lay_out(slots: Tensor, first: Tensor, tokens: Tensor, slots_each: Tensor) -> int:
    """Lay documents out side by side, in slots_each (n,) of them; return the number of slots."""
    token_of, slot_of, is_blank = slots
    document = torch.arange(len(tokens)).repeat_interleave(slots_each)  # (S,)
    S = len(document)
    position = torch.arange(S) - (slots_each.cumsum(0) - slots_each)[document]
    token_of[:S] = first[document] + torch.minimum(position, tokens[document] - 1)
    is_blank[:S] = position >= tokens[document]
    real = (is_blank[:S] == 0).nonzero()[:, 0]
    slot_of[token_of[real]] = real
    return S


def rounded_up(lengths: Tensor, T: int) -> Tensor:
    """Round lengths up to T/16, 2T/16 ... T, and lengths below T/16 to powers of two; 0 stays 0.

    No document more than doubles in length, so 2 B T slots are enough.
    """
    step = max(T // STEPS, 1)
    above = ((lengths + step - 1) // step * step).clamp(max=T)
    power = 2 ** lengths.clamp(min=1).log2().ceil().long()
    return torch.where((lengths < step) & (lengths > 0), power, above)


# Costs, in units of one score under a dense mask, which takes 13 ns with nano's heads, forward and
# backward. They were fitted by hand to times in rows of 256 and 512, with real documents and with 2
# to 17 random ones per row (two threads, causal). For longer rows they are too high, because torch
# skips the keys after a query there if it has no mask.
CALL = 15_000
MOVED_SLOT = 45
SLOT, SCORE = 30, 0.87  # in torch's attention without a mask
SMALL = 100_000  # what a layout costs; with fewer scores, a layer or two cannot save as much


def is_faster(doc_ids: Tensor, calls: Tensor) -> bool:
    """Estimate whether these calls take less time than attention under a dense mask."""
    B, T = doc_ids.shape
    count, moved = calls[0].tolist()
    slots, length = calls[1 : 1 + count].T
    work = (slots * (SLOT + SCORE * length)).sum().item()
    return work + CALL * count + MOVED_SLOT * moved < B * T * T


def forward(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, calls: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, H, D), and each query's log-sum-exp (B * T, H)."""
    batch = Calls.of(slots, calls, q.shape[0] * q.shape[1])
    out, lse = [], []
    inputs = (batch.gather(x) for x in (q, k, v))
    masks = batch.masks(causal, q.dtype)
    for (_, length), mask, *parts in zip(batch.sizes, masks, *inputs, strict=True):
        if length:
            call_out, call_lse = attention(*parts, 0.0, causal, attn_mask=mask)
        else:
            call_out = parts[0].new_zeros(parts[0].shape)
            call_lse = call_out[..., 0].to(torch.promote_types(q.dtype, torch.float32))
        out.append(call_out)
        lse.append(call_lse)
    return batch.scatter(out).view(q.shape), batch.scatter(lse)


def backward(dout: Tensor, saved: Sequence[Tensor], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, T, H, D) each.

    Args: saved q, k, v, output and log-sum-exp of the forward pass, slots, calls
    """
    q, k, v, out, lse, slots, calls = saved
    batch = Calls.of(slots, calls, q.shape[0] * q.shape[1])
    gradients = []
    inputs = (batch.gather(x) for x in (q, k, v, out, lse))
    douts, masks = batch.gather_gradient(dout), batch.masks(causal, q.dtype)
    for (_, length), mask, *parts in zip(batch.sizes, masks, douts, *inputs, strict=True):
        if length:
            gradients.append(attention_backward(*parts, 0.0, causal, attn_mask=mask))
        else:
            gradients.append(3 * [parts[0].new_zeros(parts[0].shape)])
    dq, dk, dv = (batch.scatter(each).view(q.shape) for each in zip(*gradients, strict=True))
    return dq, dk, dv


class Calls(NamedTuple):
    sizes: list[list[int]]  # for each call, its number of slots and the length of its documents
    token: Tensor | None  # (S,) token of each slot; None if tokens are not moved
    slot: Tensor  # (B * T,) slot of each token
    blank: Tensor  # (S,) int64, 1 where a slot only pads a document

    @classmethod
    def of(cls, slots: Tensor, calls: Tensor, tokens: int) -> "Calls":
        count, S = calls[0].tolist()
        token, blank = (slots[0, :S], slots[2, :S]) if S else (None, slots[2, :tokens])
        return cls(calls[1 : 1 + count].tolist(), token, slots[1, :tokens], blank)

    def gather(self, x: Tensor) -> list[Tensor]:
        """(B, T, H, D) or (B * T, H) -> (documents, H, length, ...) for each call

        All padding of a call counts as one document.
        """
        if x.ndim == 4:
            # With other strides torch's operator would silently give a wrong result.
            x = adjacent(x).flatten(0, 1)
        return self.split(x if self.token is None else x.index_select(0, self.token))

    def split(self, x: Tensor) -> list[Tensor]:
        rest, slots = x.shape[1:], [slots for slots, _ in self.sizes]
        return [
            part.view(-1, length or count, *rest).transpose(1, 2)
            for part, (count, length) in zip(x.split(slots), self.sizes, strict=True)
        ]

    def gather_gradient(self, dout: Tensor) -> list[Tensor]:
        """Like `gather`, but for the gradient from above, with zeros in blank slots."""
        if self.token is None:
            return self.gather(dout)
        x = dout.flatten(0, 1).index_select(0, self.token)
        return self.split(x.index_fill_(0, self.blank.nonzero()[:, 0], 0))

    def masks(self, causal: bool, dtype: torch.dtype) -> list[Tensor | None]:
        """Return what each call adds to its scores: None, or (documents, 1, 1, length).

        The latter is -inf in blank slots, otherwise 0.
        """
        if causal or self.token is None:
            return [None] * len(self.sizes)
        added = torch.zeros(len(self.blank), 1, 1, dtype=dtype)
        added.masked_fill_(self.blank.bool()[:, None, None], -torch.inf)
        return [part.transpose(2, 3) for part in self.split(added)]

    def scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """(documents, H, length, ...) of each call -> (B * T, H, ...), in the order of the rows"""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        x = flat[0] if len(flat) == 1 else torch.cat(flat)
        return x if self.token is None else x.index_select(0, self.slot)
