"""What a BERT has to guess: tokens that are hidden from it, chosen in each document by itself."""

from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from support.batch import Batch


class SpecialIds(NamedTuple):
    """The ids that a BERT needs besides those of text, which are 0..text_ids - 1."""

    cls: int
    sep: int
    mask: int
    text_ids: int

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "SpecialIds":
        names = ("[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
        return cls(*(encoding.encode_single_token(name) for name in names))


MASKED = 0.15  # of a document's tokens


def masked_tokens(tokens: np.ndarray) -> np.ndarray:
    """How many tokens of documents of so many tokens a BERT has to predict: at least one of each.

    A function of lengths alone, so that a rank knows all ranks' count without their rows.
    """
    return np.maximum(np.floor(MASKED * tokens + 0.5).astype(np.int64), 1)


def mask_tokens(batch: Batch, bits: Tensor, special_ids: SpecialIds) -> Batch:
    """Choose 15 % of each document for a BERT to predict: 80 % [MASK], 10 % another, 10 % as is.

    By document, as without packing: each has `masked_tokens` of its own, wherever it lies.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.1
    Args:    bits (2, B, T) int64 random bits: which tokens are chosen, and what becomes of each
    Returns: the batch with masked tokens, and targets that are IGNORE where nothing is masked
    """
    B, T = batch.targets.shape
    doc_ids = batch.with_documents().doc_ids
    document = (torch.arange(B)[:, None] * T + doc_ids).flatten()  # no two rows share a number
    at = (batch.targets != IGNORE).flatten().nonzero().flatten()  # (n,)
    order = bits[0].flatten()[at].argsort()
    order = order[document[at][order].argsort(stable=True)]  # by document, at random in each
    _, counts = document[at].unique_consecutive(return_counts=True)
    number = torch.arange(len(at)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.from_numpy(masked_tokens(counts.numpy()))
    masked = at[order[number < chosen.repeat_interleave(counts)]]  # (m,)

    tokens = batch.tokens.flatten().clone()
    targets = torch.full_like(tokens, IGNORE)
    targets[masked] = tokens[masked]
    share = bits[1].flatten()[masked].double() / 2**63
    another = bits[1].flatten()[masked] % special_ids.text_ids
    replaced = torch.where(share < 0.9, another, tokens[masked])
    tokens[masked] = torch.where(share < 0.8, special_ids.mask, replaced)
    return batch._replace(tokens=tokens.view(B, T), targets=targets.view(B, T))
