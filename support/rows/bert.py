"""Pairs of texts for BERT's second task: does the second one follow the first, or not?

A piece of a document is parted in two. In half of the pairs the second part is another piece's:

    piece   a a a a b b b b        c c c d d d d         two pieces of the store
    twosome a a a a|b b b b        c c c|d d d d         second parts of like length
    pairs   a a a a|d d d d  no    c c c|b b b b  no     or both stay as they were: yes, yes

Were a foreign part as long as chance has it, its length would betray it: most pieces fill a row.
So second parts are sorted by length, neighbours are cut to the shorter one, and then a coin for
both says whether they change places. The answer is independent of every length, all text that is
left is read once, and neighbours differ by a few tokens. A piece without a neighbour, any one of
an odd number, stays whole and has no second part; nor has a piece of one token. If two copies of
one piece meet, neither changes.

Paper: Devlin et al., arXiv 1810.04805, section 3.1, task 2. There a part is some whole sentences,
and embeddings of two segments tell the parts apart; here it is cut at any token, and [SEP] does.

    python train.py --model bert --nsp --pack
"""

from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from support.base.rng import bits, seed_of
from support.rows.batch import Batch
from support.rows.samples import Samples

# ---- masking
#
# What a BERT has to guess: tokens that are hidden from it, chosen in each document by itself.


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


class Pairs(NamedTuple):
    """Pieces (start, stop) of the store read as pairs: stop - start tokens in all."""

    first: np.ndarray  # (n,) tokens of the first part, which begins at start
    second: np.ndarray  # (n,) where the second part begins, which has the others

    def take(self, numbers: np.ndarray) -> "Pairs":
        return Pairs(self.first[numbers], self.second[numbers])

    def answers(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """(n,) 0 where the second part follows the first, 1 where it is another's, as published for
        BERT; IGNORE where there is none.
        """
        foreign = (self.second != start + self.first).astype(np.int64)
        return np.where(stop - start > self.first, foreign, IGNORE)


def sentence_pairs(spans: np.ndarray, *key: object) -> tuple[np.ndarray, Pairs]:
    """Part pieces in two, and let second parts of like length change places for half of them.

    The first part has a quarter to three quarters of a piece. The random numbers are a hash of the
    key, of where in the store a piece begins and, if it is drawn again, of how often it was: the
    same pieces are the same pairs in whatever order they come.

    Args:    spans (n, 2) pieces of the store; key of the random numbers
    Returns: spans (n, 2) with ends cut, and their pairs
    Example: pieces of 8 and 7 tokens parted as 4 + 4 and 3 + 4 change places whole; parted as
             4 + 4 and 4 + 3, the second parts have 3 tokens each, and one token is not read
    """
    start, stop = spans.T
    length = stop - start
    seeds = torch.tensor([seed_of(*key, what) for what in ("first", "order", "swap")])
    again = occurrences(start)
    numbers = bits(seeds, torch.from_numpy(np.ascontiguousarray(start)), int(again.max()) + 1)
    at_random = numbers.numpy()[:, np.arange(len(start)), again]  # (3, n)
    least, most = np.maximum(length // 4, 1), np.maximum(3 * length // 4, 1)
    first = least + at_random[0] % (most - least + 1)
    left = length - first
    order = np.lexsort((at_random[1], left))
    order = order[left[order] > 0]
    if len(order) % 2:
        odd = np.argmax(at_random[2][order])
        alone, order = order[odd], np.delete(order, odd)
        first[alone], left[alone] = length[alone], 0
    one, other = order.reshape(-1, 2).T
    left[other] = left[one]  # the shorter one of the two
    second = start + first
    swap = at_random[2][one] % 2 == 1
    one, other = one[swap], other[swap]
    second[one], second[other] = second[other], second[one]
    return np.stack((start, start + first + left), axis=1), Pairs(first, second)


def occurrences(values: np.ndarray) -> np.ndarray:
    """How often each value has come before: [7, 3, 7, 7] -> [0, 0, 1, 2]"""
    order = np.argsort(values, kind="stable")
    firsts = np.searchsorted(values[order], values[order])
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - firsts
    return found


def check_pairs(samples: Samples) -> None:
    """Refuse samples, looking at the first million, of which no two have two parts each.

    Raises: ValueError naming --nsp
    """
    spans = samples.spans(np.arange(min(len(samples), 1 << 20)))
    if (spans[:, 1] - spans[:, 0] >= 2).sum() < 2:
        raise ValueError(
            f"--nsp makes pairs of pieces of two tokens or more, and {samples.store.path} has not"
            " two of them: leave --nsp out, or name another store with --data"
        )


def refusals_of_pairs(settings: Any) -> list[tuple[bool, str]]:
    """Settings under which there are no pairs, as (condition, what to tell the user)."""
    nsp, rows_of_step = settings.model.nsp, settings.pack.batch != "rows"  # drawn step by step
    batch_tokens, least = settings.optim.batch_tokens, 2 * settings.data.seq_len
    return [
        (
            nsp and settings.model.model != "bert",
            "--nsp asks a BERT whether one text follows another: add --model bert",
        ),
        (
            nsp and rows_of_step and batch_tokens < least,
            f"--nsp exchanges texts among the rows of a step, and --batch-tokens {batch_tokens} is"
            f" one row: choose {least} or more",
        ),
    ]
