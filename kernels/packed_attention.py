"""Attention in packed rows, whose cost depends on the lengths of the documents, not of the rows.

A token attends only to its own document and, if causal, to no later token. Padding attends to
nothing, and its output and gradients are zero. In reading order: the definition; the index that all
layers of a batch share; the operator, which torch.compile does not trace into; the choice of an
implementation; the public function.

    documents = index_of(doc_ids, causal, impl)              # once per batch
    y = packed_attention(q, k, v, documents)                 # in every layer

    dense   torch's attention under a (T, T) mask: computes every score of a row
    groups  on a CPU: batches documents of similar length (attention_groups.py); adaptive is
            groups or dense, whichever is less work for a batch
    triton  on a GPU: multiplies tiles of queries only with the tiles of keys that their documents
            reach (attention_tiles.py)

Positions, and heads that share keys, are handled elsewhere (model.py). Only dense has dropout of
scores.

Papers: Dao, arXiv 2307.08691 (tiles, and a backward pass that recomputes scores); Krell et al.,
arXiv 2107.02027, section 3.2 (packed sequences that do not attend to each other).

    python bench/operators.py attention
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.library import custom_op
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import attention_groups, attention_tiles
from kernels.triton_here import check_impl, why_not

IMPLS = {
    "dense": "under a mask of each row's documents",
    "groups": "in batches of documents of similar length",
    "adaptive": "in batches of documents of similar length or under a mask, whichever is less work",
    "triton": "in tiles, skipping those that no document reaches",
}

# cuDNN is left out, although torch prefers it on an H100: in torch 2.11 to 2.13 its gradients of
# queries may be NaN under a mask if T % 128 = 64, which happens when tokens are dropped
# (pytorch/pytorch#196678).
UNDER_A_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_mask(doc_ids: Tensor, causal: bool) -> Tensor:
    """Mark which tokens a token may attend to: its own document's, and no later ones if `causal`.

    A padding token attends only to itself (a softmax over nothing is NaN), and no other token
    attends to padding.

    Args:    doc_ids (B, T) int64, -1 on padding
    Returns: (B, 1, T, T) bool, True where the query of the row may attend to the key of the column
    Example: attention_mask(tensor([[7, 7, 9, -1]]), True)[0, 0] is
             [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    T = doc_ids.shape[1]
    itself = torch.eye(T, dtype=torch.bool, device=doc_ids.device)
    padding = doc_ids < 0
    return torch.where(padding[:, :, None], itself, same_document(doc_ids, causal))[:, None]


def same_document(doc_ids: Tensor, causal: bool) -> Tensor:
    """Like `attention_mask`, but padding attends to nothing, not even to itself.

    Example: same_document(tensor([[7, 7, 9, -1]]), True)[0] is
             [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    same = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (doc_ids >= 0)[:, None]  # (B, T, T)
    return same.tril() if causal else same


def reference(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, causal: bool) -> Tensor:
    """Compute attention by its definition, in the dtype of q."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    hidden = ~attention_mask(doc_ids, causal)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return out.masked_fill((doc_ids < 0)[:, :, None, None], 0)  # (B, T, H, D)


class Documents(NamedTuple):
    """Where the documents of a batch are, in the form that `impl` needs; all layers share it."""

    impl: str  # dense | groups | triton
    causal: bool
    # dense: (mask,) on a CPU, else (mask, padding); groups: (slots, calls); triton: (start, end)
    index: tuple[Tensor, ...]


def index_of(doc_ids: Tensor, causal: bool, impl: str) -> Documents:
    """Index the documents of a batch.

    Args:    doc_ids (B, T) int64: the same number on all tokens of a document, which are adjacent;
                     -1 on padding
             impl    dense | groups | adaptive | triton, from `chosen_impl`
    Cost:    dense writes B T T bytes, the others a few arrays of B T; no loop over documents, and
             on a GPU no synchronisation
    """
    check_impl(impl, IMPLS, doc_ids.device.type)
    if impl == "triton":
        return Documents(impl, causal, bounds(doc_ids))
    B, T = doc_ids.shape
    if impl == "groups" or (impl == "adaptive" and B * T * T > attention_groups.SMALL):
        slots, calls = attention_groups.layout(doc_ids)
        if impl == "groups" or attention_groups.is_faster(doc_ids, calls):
            return Documents("groups", causal, (slots, calls))
    if doc_ids.device.type == "cpu":
        # CPU attention adds the mask to the scores, and would convert a bool mask in every layer.
        # It allows a row of -inf, so padding attends to nothing: output and gradients are zero.
        seen = same_document(doc_ids, causal)[:, None]  # (B, 1, T, T)
        return Documents("dense", causal, (torch.where(seen, 0.0, -torch.inf),))
    return Documents("dense", causal, (attention_mask(doc_ids, causal), doc_ids < 0))


def bounds(doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and one-past-last position of each token's document, (B, T) int32 each.

    For padding they are T and 0, an empty range.

    Example: [[7, 7, 9, -1]] -> [[0, 0, 2, 4]] and [[2, 2, 3, 0]]
    """
    T = doc_ids.shape[1]
    index = torch.arange(T, device=doc_ids.device)
    changes = doc_ids[:, 1:] != doc_ids[:, :-1]  # (B, T - 1)
    start = F.pad(torch.where(changes, index[1:], 0), (1, 0)).cummax(dim=1).values
    end = F.pad(torch.where(changes, index[1:], T), (0, 1), value=T)  # (B, T)
    end = end.flip(1).cummin(dim=1).values.flip(1)
    padding = doc_ids < 0
    return start.masked_fill(padding, T).int(), end.masked_fill(padding, 0).int()


FILES = {"groups": attention_groups, "triton": attention_tiles}


def attend(
    q: Tensor, k: Tensor, v: Tensor, index_1: Tensor, index_2: Tensor, causal: bool, impl: str
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of the scores, which the backward pass needs."""
    return FILES[impl].forward(q, k, v, index_1, index_2, causal)


def attend_backward(
    dout: Tensor, saved: Sequence[Tensor], causal: bool, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `saved` is q, k, v, `attend`'s results and the index."""
    return FILES[impl].backward(dout, saved, causal)


# The same two functions as operators. torch.compile does not trace into an operator, it only asks
# for the shapes of the results. In uncompiled code operators cost 0.1 ms more than the functions.
attend_op = custom_op("parsimony::attend", attend, mutates_args=())
attend_backward_op = custom_op("parsimony::attend_backward", attend_backward, mutates_args=())


@attend_op.register_fake
def _(q, k, v, index_1, index_2, causal, impl):
    B, T, H, _ = q.shape
    shape = (B * T, H) if impl == "groups" else (B, H, T)
    lse = q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


@attend_backward_op.register_fake
def _(dout, saved, causal, impl):
    return tuple(x.new_empty(x.shape) for x in saved[:3])


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        run = attend_op if torch.compiler.is_compiling() else attend
        out, lse = run(q, k, v, *documents.index, documents.causal, documents.impl)
        ctx.save_for_backward(q, k, v, out, lse, *documents.index)
        ctx.causal, ctx.impl = documents.causal, documents.impl
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor | None, ...]:
        run = attend_backward_op if torch.compiler.is_compiling() else attend_backward
        return *run(dout, ctx.saved_tensors, ctx.causal, ctx.impl), None


def chosen_impl(
    device: str, dtype: torch.dtype, head_width: int, dropout: float = 0.0, compiled: bool = False
) -> str:
    """Choose the implementation for packed rows on this machine.

    Args: device   cpu | cuda | another device type of torch
          dtype    of queries, keys and values
          dropout  of scores, in training
          compiled whether blocks are compiled: adaptive would compile both of its forms
    """
    if dropout:
        return "dense"
    if device == "cpu":
        return "groups" if compiled else "adaptive"
    # only bf16, because matrix units do not keep the precision of float32
    tiled = dtype == torch.bfloat16 and head_width in attention_tiles.HEAD_WIDTHS
    return "triton" if tiled and why_not(device) is None else "dense"


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float = 0.0
) -> Tensor:
    """Let each token attend to its own document.

    Args:    q, k, v   (B, T, H, D) float, with any strides
             documents of this batch, from `index_of`
             dropout   probability to drop a weight; above 0 only with impl dense
    Returns: (B, T, H, D), zero on padding
    Raises:  ValueError for shapes that do not fit, and for dropout with any impl but dense
    Cost:    forward and backward, dense takes 12 H D T T FLOPs per row. The others take 12 H D
             sum(l l) over the lengths l of the row's documents, plus two more products in the
             backward pass of triton, and half of that if causal, except for tiles on the diagonal
    """
    if q.ndim != 4 or not q.shape == k.shape == v.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v are {shapes}: all three must be (B, T, H, D)")
    if documents.impl != "dense":
        if dropout:
            raise ValueError(f"impl {documents.impl!r} has no dropout: choose dense")
        if documents.impl == "triton":
            attention_tiles.check_heads(q)
        return PackedAttention.apply(q, k, v, documents)
    mask, *padding = documents.index
    if not padding:  # on a CPU the mask is added to the scores
        mask = mask.to(q.dtype)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D) each
    with sdpa_kernel(UNDER_A_MASK) if padding else nullcontext():
        y = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, dropout_p=dropout)
    y = y.transpose(1, 2)  # (B, T, H, D)
    return y.masked_fill(padding[0][:, :, None, None], 0) if padding else y
