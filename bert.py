"""BERT: predict masked tokens, and say whether two texts belong together.

A BERT reads the same rows as a GPT (data.py), each piece between [CLS] and [SEP], and shares the
GPT's blocks and layer loop (model.py). This file holds what differs: how rows become a Batch
(`BertTask`), and the blocks, head and loss of the model (`Bert`).

Masks. In each document 15 % of the tokens are chosen, regardless of how documents are packed.

Pairs (--nsp). A piece of a document is cut into two parts. In half of the pairs, the second part
comes from another piece:

    piece    a a a a b b b b        c c c d d d d         two pieces of the store
    parts    a a a a|b b b b        c c c|d d d d         second parts of similar length
    pairs    a a a a|d d d d  no    c c c|b b b b  no     or both stay as they were: yes, yes

If a foreign part had a random length, its length would give the answer away, because most pieces
fill a row. So second parts are sorted by length, neighbours are cut to the shorter of the two, and
a coin decides whether they trade places. Then the answer is independent of all lengths, no text is
read twice, and little is cut off. A piece of one token has no second part.

Paper: Devlin et al., arXiv 1810.04805. In the paper, a part is a few sentences, and segment
embeddings tell the parts apart; here a piece is cut at any token, and [SEP] separates them.

    python train.py --model bert --nsp --pack
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import data
from kernels.cross_entropy import IGNORE, linear_cross_entropy, token_losses
from mixture import AnyStore
from model import Batch, Block, TokenMeta, Transformer, TransformerConfig, init_module, norm_of
from support.clock import bits, seed_of
from support.runtime import on_device

MASKED = 0.15  # share of a document's tokens
# A piece that is read as a pair of stop - start tokens in all: the first part begins at start and
# has `first` tokens, the second part begins at `second` and has the others.
PAIR = np.dtype([*data.PIECE.descr, ("first", np.int64), ("second", np.int64)])


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


# ---- rows -> Batch


@dataclass(frozen=True, kw_only=True)
class BertBatch(Batch):
    """A Batch, and where in its B T positions the targets are, ascending; these stay on the host.

    Their number decides shapes. If the GPU counted them, the host would have to wait until the GPU
    has finished all its queued work.
    """

    masked: Tensor  # (n,) int64
    answers: Tensor | None = None  # (m,) int64, each [CLS] that tells whether its pair belongs

    def rows(self, part: slice) -> "BertBatch":
        T = self.tokens.shape[1]
        ends = torch.tensor([part.start * T, part.stop * T])

        def within(at: Tensor) -> Tensor:
            return at[slice(*torch.searchsorted(at, ends))] - ends[0]

        answers = None if self.answers is None else within(self.answers)
        return replace(super().rows(part), masked=within(self.masked), answers=answers)


@dataclass(frozen=True)
class BertTask:
    """What a BERT learns; GptTask in data.py has the same members, and explains them."""

    special_ids: SpecialIds
    nsp: bool = False
    per_piece: bool = False
    evaluated: ClassVar[str] = "bert"

    def pieces(self, spans: np.ndarray, *key: object) -> np.ndarray:
        """With --nsp, turn the drawn spans into pairs."""
        return sentence_pairs(spans, *key) if self.nsp else data.as_pieces(spans)

    def targets(self, store: AnyStore, rows: data.Rows) -> np.ndarray:
        return masked_tokens(rows.lengths)

    def batch(
        self, store: AnyStore, rows: data.Rows, seq_len: int, all_rows: data.Rows, *key: object
    ) -> BertBatch:
        """Add special tokens and mask others; answers of pairs are the targets of their [CLS]."""
        are_pairs = rows.pieces.dtype == PAIR
        lengths = rows.lengths + data.ADDED_TOKENS["pairs" if are_pairs else "bert"]
        piece, position, at = data.indices_in_batch(rows, lengths, seq_len)  # (m,) each
        place = places_in_store(rows.pieces, lengths, piece, position)  # (m,)
        tokens = store.tokens.take(place, mode="clip").astype(np.int64)
        tokens[place == AT_CLS] = self.special_ids.cls
        tokens[place == AT_SEP] = self.special_ids.sep
        store.check_tokens(tokens.max(initial=0))
        targets = np.full(len(tokens), IGNORE)
        masked, hidden = self.mask(tokens, place, piece, *key)
        targets[masked], tokens[masked] = tokens[masked], hidden
        answers = None
        if are_pairs:
            targets[place == AT_CLS] = answers_of(rows.pieces)
            answers = torch.from_numpy(at[(place == AT_CLS) & (targets != IGNORE)])
        scatter = partial(data.scattered, at, (len(rows), seq_len))
        doc_ids = scatter(data.numbered(np.diff(rows.offsets))[piece], fill=-1)
        batch = BertBatch(
            tokens=scatter(tokens, fill=store.meta["end_of_text"]),
            targets=scatter(targets, fill=IGNORE),
            positions=scatter(position, fill=0),
            doc_ids=doc_ids,
            is_plain=not doc_ids.any(),
            masked=torch.from_numpy(at[masked]),
            answers=answers,
        )
        return self.weighted(batch, store, all_rows) if are_pairs or self.per_piece else batch

    def mask(
        self, tokens: np.ndarray, place: np.ndarray, piece: np.ndarray, *key: object
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose tokens to predict; return their indices (n,), and what the model reads there.

        The random numbers of a token depend on its place in the store, not on its row.
        """
        is_text = np.flatnonzero(place >= 0)
        seeds = torch.tensor([seed_of(*key, use) for use in ("which", "what")])
        which, what = bits(seeds, torch.from_numpy(place[is_text] + 1), 1).squeeze(2).numpy()
        chosen = choose(piece[is_text], which)
        masked = is_text[chosen]
        return masked, hide(tokens[masked], what[chosen], self.special_ids)

    def weighted(self, batch: BertBatch, store: AnyStore, all_rows: data.Rows) -> BertBatch:
        """Set the weights of the targets.

        All answers of a step together weigh as much as all its masked tokens: the loss is the mean
        loss of a token plus the mean loss of an answer.
        """
        is_masked = torch.zeros_like(batch.targets, dtype=torch.bool)
        is_masked.view(-1)[batch.masked] = True
        weights = is_masked.float()
        if self.per_piece:
            weights = data.equal_pieces(is_masked, batch.doc_ids)
        if batch.answers is not None:
            answers = int((answers_of(all_rows.pieces) != IGNORE).sum())
            divisor = data.loss_divisor(self, store, all_rows)
            weights.view(-1)[batch.answers] = divisor / max(answers, 1)
        return replace(batch, weights=weights)


# ---- special tokens and masks

AT_CLS, AT_SEP = -1, -2  # in place of a place in the store


def places_in_store(
    pieces: np.ndarray, lengths: np.ndarray, piece: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Find where in the store each token (m,) of the rows comes from; AT_CLS or AT_SEP if nowhere.

    Args: lengths (n,) of the pieces, with their special tokens
    """
    place = pieces["start"][piece] + position - 1
    is_sep = position == lengths[piece] - 1
    if pieces.dtype == PAIR:
        in_second = position - pieces["first"][piece] - 2  # after the first part and its [SEP]
        place = np.where(in_second >= 0, pieces["second"][piece] + in_second, place)
        is_sep |= in_second == -1
    place[is_sep], place[position == 0] = AT_SEP, AT_CLS
    return place


def masked_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return how many tokens a BERT predicts in documents of these lengths: at least one in each.

    The count depends on lengths alone, so a rank knows it for all ranks without reading their rows.
    """
    return np.maximum(np.floor(MASKED * tokens + 0.5).astype(np.int64), 1)


def choose(piece: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Choose which tokens are masked: in each piece, those with the smallest random numbers.

    Args:    piece  (n,) the piece of each token, ascending
             random (n,) numbers
    Returns: (m,) indices of tokens, ascending
    """
    lengths = np.bincount(piece)
    order = np.lexsort((random, piece))  # piece by piece, shuffled within each
    return np.sort(order[data.numbered(lengths) < np.repeat(masked_tokens(lengths), lengths)])


def hide(tokens: np.ndarray, random: np.ndarray, special_ids: SpecialIds) -> np.ndarray:
    """Replace tokens (m,): 80 % become [MASK], 10 % a random token, 10 % stay.

    Paper: arXiv 1810.04805, section 3.1 and appendix A.1
    Args:  random (m,) int64 from 0 to 2^63 - 1
    """
    share = random / 2.0**63
    replaced = np.where(share < 0.9, random % special_ids.text_ids, tokens)
    return np.where(share < 0.8, special_ids.mask, replaced)


# ---- pairs


def answers_of(pairs: np.ndarray) -> np.ndarray:
    """Return (n,) answers as published: 0, the second part belongs; 1, foreign; IGNORE, no part."""
    is_foreign = pairs["second"] != pairs["start"] + pairs["first"]
    has_second = pairs["stop"] - pairs["start"] > pairs["first"]
    return np.where(has_second, is_foreign.astype(np.int64), IGNORE)


def sentence_pairs(spans: np.ndarray, *key: object) -> np.ndarray:
    """Cut pieces in two, and swap second parts of similar length in half of the cases.

    The first part is a quarter to three quarters of a piece. The random numbers of a piece are a
    hash of the key, of where the piece begins in the store, and of how often it has come before.
    So the same pieces make the same pairs in whatever order they come.

    Args:    spans (n, 2) pieces of the store
             key   of the random numbers
    Returns: a table (n,) with the fields of PAIR
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
    pairs = np.zeros(len(spans), PAIR)
    pairs["start"], pairs["stop"] = start, start + first + left
    pairs["first"], pairs["second"] = first, second
    return pairs


def check_pairs(samples: data.Samples) -> None:
    """Refuse --nsp if fewer than two of the first million samples have at least two tokens."""
    start, stop = samples.spans(np.arange(min(len(samples), 1 << 20))).T
    if (stop - start >= 2).sum() < 2:
        where = samples.store.path
        raise ValueError(f"--nsp: {where} has fewer than two pieces of two tokens to pair")


def occurrences(values: np.ndarray) -> np.ndarray:
    """Count for each value how often it has come before: [7, 3, 7, 7] -> [0, 0, 1, 2]"""
    order = np.argsort(values, kind="stable")
    firsts = np.searchsorted(values[order], values[order])
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - firsts
    return before


# ---- the model


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """A Transformer that sees the whole row, with BERT's heads."""

    nsp: bool = False  # also predict whether the second part of a pair follows the first

    kind: ClassVar[str] = "bert"
    causal: ClassVar[bool] = False

    def build(self, kept: Collection[int] | None = None) -> "Bert":
        return Bert(self, kept)

    @property
    def gelu(self) -> str:
        return "tanh" if self.activation == "gelu_new" else "none"

    @property
    def norm_eps(self) -> float:
        return 1e-12 if self.norm == "layernorm" else 1e-5

    def head_flops(self, positions: int, targets: int) -> int:
        """Only masked tokens are predicted. --nsp, a C x C product per document, is not counted."""
        return 6 * (self.vocab_size + self.width) * self.width * targets


class PostNormBlock(Block):
    def forward(self, x: Tensor, meta: TokenMeta) -> Tensor:
        x = self.ln_1(x + self.drop(self.attn(x, meta)))
        return self.ln_2(x + self.drop(self.mlp(x)))


class Bert(Transformer):
    """BERT of arXiv 1810.04805: post-LN, bidirectional, a masked-token head, no segments."""

    def __init__(self, config: BertConfig, kept: Collection[int] | None = None):
        super().__init__(config, kept)
        if config.nsp:  # last, so that --nsp does not change the initial values of other weights
            self.pooler = nn.Linear(config.width, config.width)
            self.nsp = nn.Linear(config.width, 2)
            init_module(self.pooler)
            init_module(self.nsp)

    def new_block(self) -> PostNormBlock:
        return PostNormBlock(self.config)

    def add_head(self) -> None:
        config = self.config
        self.mlm = nn.Linear(config.width, config.width)
        self.mlm_ln = norm_of(config)
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def init_weights(self) -> None:
        self.init_modules()

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.ln_f(super().embed(tokens, positions))  # a post-LN stack starts with its norm

    def last_norm(self, x: Tensor) -> Tensor:
        return x

    def features(self, x: Tensor) -> Tensor:
        """Turn hidden states into what the output matrix reads."""
        return self.mlm_ln(F.gelu(self.mlm(x)))

    def loss(self, x: Tensor, batch: BertBatch) -> Tensor:
        x, targets = x.flatten(0, 1), batch.targets.flatten()  # (B T, C), (B T,)
        weights = None if batch.weights is None else batch.weights.flatten()
        at = on_device(batch.masked, x.device)
        features, masked = self.features(x.index_select(0, at)), targets.index_select(0, at)
        of_masked = None if weights is None else weights.index_select(0, at)
        head = self.head, self.mlm_bias
        loss = linear_cross_entropy(features, *head, masked, target_weights=of_masked)
        if batch.answers is not None:
            at = on_device(batch.answers, x.device)
            scores = self.follows(x, at).to(loss.dtype)
            losses = F.cross_entropy(scores, targets.index_select(0, at), reduction="none")
            if weights is not None:
                losses = losses * weights.index_select(0, at)
            loss = loss + losses.sum()
        return loss

    @torch.no_grad()
    def losses(self, x: Tensor, batch: BertBatch) -> Tensor:
        targets, at = batch.targets.flatten(), on_device(batch.masked, x.device)
        features = self.features(x.flatten(0, 1).index_select(0, at))
        of_masked = token_losses(features, self.head, self.mlm_bias, targets.index_select(0, at))
        losses = of_masked.new_zeros(len(targets)).index_copy(0, at, of_masked)
        return losses.view(batch.targets.shape)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x), self.head, self.mlm_bias)

    def follows(self, x: Tensor, answers: Tensor) -> Tensor:
        """Score whether the second part of each pair follows the first: (n, 2), yes and no.

        Args: x       (B T, C) hidden states
              answers (n,) int64, rows of x that belong to a [CLS], the first token of a pair
        """
        return self.nsp(torch.tanh(self.pooler(x.index_select(0, answers))))

    def right_answers(self, x: Tensor, batch: BertBatch) -> Tensor:
        """Tell for each answer of a batch, (n,) bool, whether it is right, given x (B, T, C)."""
        at = on_device(batch.answers, x.device)
        answers = self.follows(x.flatten(0, 1), at).argmax(1)
        return answers == batch.targets.flatten().index_select(0, at)
