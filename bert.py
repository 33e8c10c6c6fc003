"""BERT's two training tasks: predict masked tokens, and say whether two texts belong together.

Masks. In each document 15 % of the tokens are chosen, regardless of how documents are packed.

Pairs (--nsp). A piece of a document is cut into two parts. In half of the pairs, the second part
comes from another piece:

    piece    a a a a b b b b        c c c d d d d         two pieces of the store
    parts    a a a a|b b b b        c c c|d d d d         second parts of similar length
    pairs    a a a a|d d d d  no    c c c|b b b b  no     or both stay as they were: yes, yes

If a foreign part had a random length, its length would give the answer away, because most pieces
fill a row. So second parts are sorted by length, neighbours are cut to the shorter of the two, and
a coin decides whether they trade places. Then the answer is independent of all lengths, no text is
read twice, and little is cut off, because neighbours differ by only a few tokens. A piece of one
token has no second part. If the number of pieces with two parts is odd, one random piece keeps
all its tokens in the first part. A piece that is drawn several times is cut and paired anew each
time.

Paper: Devlin et al., arXiv 1810.04805, section 3.1. In the paper, a part is a few sentences, and
segment embeddings tell the parts apart; here a piece is cut at any token, and [SEP] separates them.

plan.py makes pairs before it packs (`Plan.rows_of`). data.py masks tokens when it reads a rank's
rows (`batch_of`).

    python train.py --model bert --nsp --pack
"""

from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from model import Batch
from support.clock import bits, seed_of

MASKED = 0.15  # share of a document's tokens


class SpecialIds(NamedTuple):
    """The token ids that only a BERT needs; text has the ids 0..text_ids - 1."""

    cls: int
    sep: int
    mask: int
    text_ids: int

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "SpecialIds":
        names = ("[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
        return cls(*(encoding.encode_single_token(name) for name in names))


# ---- masks


def masked_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return how many tokens a BERT predicts in documents of these lengths: at least one in each.

    The count depends on lengths alone, so a rank knows it for all ranks without reading their rows.
    """
    return np.maximum(np.floor(MASKED * tokens + 0.5).astype(np.int64), 1)


def mask_tokens(batch: Batch, bits: Tensor, special_ids: SpecialIds) -> Batch:
    """Choose 15 % of each document to predict: 80 % become [MASK], 10 % a random token, 10 % stay.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.1
    Args:    bits (2, B, T) int64 random bits: the first decide which tokens are chosen, the second
                  what each of them becomes
    Returns: the batch with masked tokens, and targets that are IGNORE at all other positions
    """
    B, T = batch.targets.shape
    doc_ids = batch.with_documents().doc_ids
    document = (torch.arange(B)[:, None] * T + doc_ids).flatten()  # unique across rows
    text = (batch.targets != IGNORE).flatten().nonzero().flatten()  # (n,)
    order = bits[0].flatten()[text].argsort()
    order = order[document[text][order].argsort(stable=True)]  # by document, shuffled within each
    _, counts = document[text].unique_consecutive(return_counts=True)
    rank = torch.arange(len(text)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.from_numpy(masked_tokens(counts.numpy()))
    masked = text[order[rank < chosen.repeat_interleave(counts)]]  # (m,)

    tokens = batch.tokens.flatten().clone()
    targets = torch.full_like(tokens, IGNORE)
    targets[masked] = tokens[masked]
    fate = bits[1].flatten()[masked]
    share = fate.double() / 2**63
    replaced = torch.where(share < 0.9, fate % special_ids.text_ids, tokens[masked])
    tokens[masked] = torch.where(share < 0.8, special_ids.mask, replaced)
    return batch._replace(tokens=tokens.view(B, T), targets=targets.view(B, T))


# ---- pairs


class Pairs(NamedTuple):
    """How pieces (start, stop) of the store are read as pairs of stop - start tokens in all."""

    first: np.ndarray  # (n,) length of the first part, which begins at start
    second: np.ndarray  # (n,) position of the second part, which has the remaining tokens

    def take(self, numbers: np.ndarray) -> "Pairs":
        return Pairs(self.first[numbers], self.second[numbers])

    def answers(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return (n,) answers: 0 if the second part belongs, 1 if it is foreign, IGNORE if none.

        The published BERT uses the same numbers.
        """
        foreign = (self.second != start + self.first).astype(np.int64)
        return np.where(stop - start > self.first, foreign, IGNORE)


def sentence_pairs(spans: np.ndarray, *key: object) -> tuple[np.ndarray, Pairs]:
    """Cut pieces in two, and swap second parts of similar length in half of the cases.

    The first part is a quarter to three quarters of a piece. The random numbers of a piece are a
    hash of the key, of where the piece begins in the store, and of how often it has come before.
    So the same pieces make the same pairs in whatever order they come.

    Args:    spans (n, 2) pieces of the store
             key   of the random numbers
    Returns: spans (n, 2) with ends cut, and their pairs
    Example: pieces of 8 and 7 tokens cut into 4 + 4 and 3 + 4 swap whole second parts; cut into
             4 + 4 and 4 + 3, both second parts get 3 tokens, and one token is not read
    """
    start, stop = spans.T
    length = stop - start
    seeds = torch.tensor([seed_of(*key, purpose) for purpose in ("first", "order", "swap")])
    again = occurrences(start)
    numbers = bits(seeds, torch.from_numpy(np.ascontiguousarray(start)), int(again.max()) + 1)
    cut, position, coin = numbers.numpy()[:, np.arange(len(start)), again]  # (n,) each
    least, most = np.maximum(length // 4, 1), np.maximum(3 * length // 4, 1)
    first = least + cut % (most - least + 1)
    left = length - first
    order = np.lexsort((position, left))
    order = order[left[order] > 0]
    if len(order) % 2:
        odd = np.argmax(coin[order])
        alone, order = order[odd], np.delete(order, odd)
        first[alone], left[alone] = length[alone], 0
    shorter, longer = order.reshape(-1, 2).T
    left[longer] = left[shorter]
    second = start + first
    trades = coin[shorter] % 2 == 1
    one, other = shorter[trades], longer[trades]
    second[one], second[other] = second[other], second[one]
    return np.stack((start, start + first + left), axis=1), Pairs(first, second)


def occurrences(values: np.ndarray) -> np.ndarray:
    """Count for each value how often it has come before: [7, 3, 7, 7] -> [0, 0, 1, 2]"""
    order = np.argsort(values, kind="stable")
    firsts = np.searchsorted(values[order], values[order])
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - firsts
    return before
