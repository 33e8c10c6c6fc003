"""From the clock to the next step: which samples, how long, in which rows, how many tokens kept.

Three parts, in reading order: samples of a token store and their shuffled order; rows of pieces
laid out as a `Batch`, the only thing all techniques see; and `Plan`, where the techniques that
choose data meet in an order that matters: the curriculum says how long a piece may be, then packing
lays pieces into rows; of token dropping only the count of kept tokens is settled here, because the
clock needs it.

`Plan` is a pure function of (settings, store, clock): no state, so a run that was killed goes on
with the very rows it would have seen, and any rank can say what step s reads without replaying.
With 2 ranks and 16 rows a step, rank 0 reads rows 0..7 and rank 1 rows 8..15 of the same plan.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

import curriculum
import ltd
import packing
from config import Config
from data import Store
from model import IGNORE
from runtime import Runtime, seed_of


class Batch(NamedTuple):
    """Rows for the model; the only thing all techniques see. Each (B, T) int64.

    `positions` and `doc_ids` are None when every row is one whole piece: nothing to say about it.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor | None  # restart at 0 with every piece
    doc_ids: Tensor | None  # count the pieces of a row from 0; -1 on padding

    def rows(self, part: slice) -> "Batch":
        return Batch(*(None if field is None else field[part] for field in self))

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            *(None if field is None else field.to(device, non_blocking=True) for field in self)
        )


class Frame(NamedTuple):
    """BERT's special ids; `words` is how many ids stand for text."""

    cls: int
    sep: int
    mask: int
    words: int

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "Frame":
        names = ("[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
        return cls(*(encoding.encode_single_token(name) for name in names))


class Samples:
    """Sample id -> span of the token stream. A sample is a piece of a document of at most T tokens.

    Each document is cut at multiples of T from its own start, so its tokens are targets exactly
    once a pass. With `stream` the whole split counts as one document: equal rows, cut across
    document boundaries, which is how GPTs are commonly trained without packing.

    Args: seq_len tokens a sample holds at most, special tokens not counted
          split   train | val: documents that are held out are the last of the store
          stream  cut the stream, not the documents
          bare    leave the end-of-text out (BERT frames a piece in [CLS] and [SEP] instead)
    """

    def __init__(self, store: Store, seq_len: int, split: str = "train", stream=False, bare=False):
        n = store.train_documents
        edges = np.asarray(store.offsets[: n + 1] if split == "train" else store.offsets[n:])
        if stream:
            edges = edges[[0, -1]]
        self.seq_len, self.start, self.stop = seq_len, edges[:-1], edges[1:] - int(bare)
        pieces = -(-(self.stop - self.start) // seq_len)  # (N,) of each document
        self.first = np.concatenate(([0], np.cumsum(pieces)))  # (N + 1,) sample ids

    def __len__(self) -> int:
        return int(self.first[-1])

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the store."""
        document = np.searchsorted(self.first, ids, side="right") - 1
        start = self.start[document] + (ids - self.first[document]) * self.seq_len
        return np.stack((start, np.minimum(start + self.seq_len, self.stop[document])), axis=1)


def shuffled(draws: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The sample ids of the given draws: pass after pass over 0..n-1, each in an order of its own.

    A keyed permutation of [0, n) (a Feistel network over an even number of bits, walked until it
    lands below n; Black & Rogaway 2002), so there is no list of samples in memory, and any rank can
    say what draw 10^12 is without replaying those before it.

    Args:    draws (m,) int64, counted from the start of training
    Returns: (m,) int64 sample ids; draws k n .. (k + 1) n - 1 hold every id once
    """
    passes, ids = np.divmod(draws.astype(np.uint64), np.uint64(n))
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    outside = np.ones(len(ids), dtype=bool)
    while outside.any():
        x = ids[outside]
        left, right = x >> half, x & low
        for turn in range(6):
            left, right = right, left ^ (_mix(right, passes[outside], seed * 8 + turn) & low)
        ids[outside] = left << half | right
        outside[outside] = ids[outside] >= n
    return ids.astype(np.int64)


def _mix(x: np.ndarray, key: np.ndarray, salt: int) -> np.ndarray:
    """Hash 64-bit integers to 64 well-mixed bits (the finaliser of splitmix64)."""
    x = x + key * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * 0xD1342543DE82EF95 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cut(spans: np.ndarray, limit: int) -> list[list[tuple[int, int]]]:
    """Cut each span into pieces of at most `limit` tokens: [[(0, 5)]] at 2 is (0,2) (2,4) (4,5)."""
    return [
        [(a, min(a + limit, stop)) for a in range(start, stop, limit)]
        for start, stop in spans.tolist()
    ]


def lay_out(
    store: Store, rows: list[list[tuple[int, int]]], seq_len: int, frame: Frame | None = None
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (`frame` None): a piece's inputs are the token before it and its own but the last; before
    the first piece of a document stands end-of-text, which is the token before it in the store.
    BERT: the piece between the two; the targets are its
    tokens, and IGNORE on the frame. Which of them are masked is decided by `mask_tokens`.

    Args:    rows (B lists of (first, one past last) token in the store)
    Returns: Batch of (B, seq_len)
    """
    B, T = len(rows), seq_len
    end_of_text = store.meta["end_of_text"]
    tokens = np.full((B, T), end_of_text, dtype=np.int64)
    targets = np.full((B, T), IGNORE, dtype=np.int64)
    positions = np.zeros((B, T), dtype=np.int64)
    doc_ids = np.full((B, T), -1, dtype=np.int64)
    for r, row in enumerate(rows):
        place = 0
        for number, (start, stop) in enumerate(row):
            text = store.tokens[start:stop]
            length = stop - start + (2 if frame else 0)
            here = slice(place, place + length)
            if frame:
                tokens[r, here] = [frame.cls, *text, frame.sep]
                targets[r, place + 1 : place + length - 1] = text
            else:
                tokens[r, place] = store.tokens[start - 1] if start else end_of_text
                tokens[r, place + 1 : place + length] = text[:-1]
                targets[r, here] = text
            positions[r, here] = np.arange(length)
            doc_ids[r, here] = number
            place += length
    highest, vocabulary = max(tokens.max(), targets.max()), store.meta["vocab_size"]
    if highest >= vocabulary:
        raise ValueError(
            f"{store.path}: token {highest} is outside its vocabulary of {vocabulary}:"
            " the store is damaged, prepare it again"
        )
    if (doc_ids == 0).all():
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    return Batch(*(torch.from_numpy(field) for field in (tokens, targets, positions, doc_ids)))


def mask_tokens(batch: Batch, choice: Tensor, frame: Frame) -> Batch:
    """Hide 15 % of the tokens from BERT: 80 % of these as [MASK], 10 % as another, 10 % as is.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1
    Args:    choice (B, T) float64 uniform in [0, 1): one number decides all three
    Returns: the batch with masked tokens, and targets that are IGNORE where nothing is masked
    """
    u = choice / 0.15  # below 1: masked
    masked = (batch.targets != IGNORE) & (u < 1)
    other = ((u - 0.8) * 10 * frame.words).long().clamp(0, frame.words - 1)
    tokens = torch.where(masked & (u < 0.8), frame.mask, batch.tokens)
    tokens = torch.where(masked & (u >= 0.8) & (u < 0.9), other, tokens)
    return batch._replace(tokens=tokens, targets=torch.where(masked, batch.targets, IGNORE))


class Clock(NamedTuple):
    """Where a run stands. Everything scheduled is a function of this, the settings and the seed."""

    step: int = 0
    consumed_tokens: int = 0  # the budget's unit: real tokens, scaled by what LTD let through
    real_tokens: int = 0  # tokens of text that were targets, padding not counted
    layer_tokens: int = 0  # positions times the layers they went through, padding counted
    positions: int = 0  # places in rows, padding counted
    pieces: int = 0  # pieces of documents laid into rows
    draws: int = 0  # samples taken; with packing, before the current window
    row: int = 0  # rows taken of the current window
    limit: int = 0  # longest piece in the current window


class Step(NamedTuple):
    """What the next optimizer step needs, decided before it starts; it travels with its batch."""

    batch: Batch  # this rank's rows
    targets: int  # on all ranks
    rows: int  # on all ranks
    seq_len: int  # longest piece that the curriculum allows
    kept_tokens: int  # of a row, in layers that drop
    padding_share: float
    after: Clock


WINDOW = 16  # samples that are packed together, as a multiple of a step's rows


class Plan:
    """Turns a clock into a step: curriculum, then packing, then this rank's rows. No state."""

    def __init__(self, settings: Config, store: Store, frame: Frame | None, runtime: Runtime):
        self.settings, self.store, self.frame, self.runtime = settings, store, frame, runtime
        self.row_len = settings.data.seq_len
        self.rows = settings.optim.batch_tokens // self.row_len
        self.extra = 2 if frame else 0  # [CLS] and [SEP] of every piece
        stream = not settings.pack.on and frame is None
        bare = frame is not None
        self.samples = Samples(store, self.row_len - self.extra, stream=stream, bare=bare)
        self.window = lru_cache(maxsize=2)(self.pack_window)
        if len(self.samples) == 0:
            raise ValueError(f"{store.path} holds no training document: prepare it from more text")

    def __call__(self, clock: Clock) -> Step:
        s = self.settings
        progress = clock.consumed_tokens / s.optim.tokens
        row_len = limit = self.row_len
        if s.curriculum.metric == "seqlen":
            limit = curriculum.pace(progress, s.curriculum.start, row_len, s.curriculum.share)
        if s.pack.on:
            rows, place, limit = self.packed(clock, limit)
        else:
            row_len = limit
            rows, place = self.one_a_row(clock.draws, limit), (clock.draws + self.rows, 0, 0)

        lengths = [[stop - first + self.extra for first, stop in row] for row in rows]
        real = sum(map(sum, lengths))
        kept = row_len
        layer_tokens, effective = s.model.layers * row_len, real
        if s.ltd.on:
            kept = ltd.kept_tokens(progress, s.ltd.start, s.ltd.share, self.row_len)
            layer_tokens = ltd.layer_tokens(s.model.layers, kept, row_len)
            effective = ltd.effective_tokens(real, s.model.layers, kept, row_len)
        batch, targets = self.batch(clock.step, rows, row_len, real)
        after = Clock(
            clock.step + 1,
            clock.consumed_tokens + effective,
            clock.real_tokens + real,
            clock.layer_tokens + self.rows * layer_tokens,
            clock.positions + self.rows * row_len,
            clock.pieces + sum(map(len, rows)),
            *place,
        )
        padding = 1 - real / (self.rows * row_len)
        return Step(batch, targets, self.rows, limit, min(kept, row_len), padding, after)

    def spans(self, first: int, count: int) -> np.ndarray:
        """The samples of `count` draws from `first` on, as (count, 2) spans of the store."""
        draws = np.arange(first, first + count)
        return self.samples.spans(shuffled(draws, len(self.samples), self.settings.run.seed))

    def one_a_row(self, first: int, limit: int) -> list[list[tuple[int, int]]]:
        """Rows of one piece each, cut off at the curriculum's length (the papers' truncation)."""
        spans = self.spans(first, self.rows).tolist()
        return [[(a, min(b, a + limit - self.extra))] for a, b in spans]

    def packed(self, clock: Clock, limit: int) -> tuple[list, tuple[int, int, int], int]:
        """The next rows, the (draws, row, limit) they lead to, and the longest piece allowed.

        A window keeps the length it began with; one that begins now takes `limit`.
        """
        draws, row, held = clock.draws, clock.row, clock.limit or limit
        rows, longest = [], held
        while len(rows) < self.rows:
            longest = max(longest, held)
            window = self.window(draws, held)
            rows += window[row : row + self.rows - len(rows)]
            row = min(row + self.rows, len(window))
            if row == len(window):
                draws, row, held = draws + WINDOW * self.rows, 0, limit
        return rows, (draws, row, held), longest

    def pack_window(self, first: int, limit: int) -> list[list[tuple[int, int]]]:
        """Pack the samples of some 10 steps together, and put the rows back into random order.

        Packed step by step, rows of 256 leave 4 % padding at 16 rows a step; packed so, 0.5 %. The
        packer's rows come longest piece first, which would sort the steps by length; by the draw
        of their first piece they are as shuffled as the samples, and full rows keep their order.
        """
        spans = self.spans(first, WINDOW * self.rows)
        pieces = [piece for sample in cut(spans, limit - self.extra) for piece in sample]
        packed = packing.best_fit([b - a + self.extra for a, b in pieces], self.row_len)
        return [[pieces[item] for item in row] for row in sorted(packed)]

    def batch(
        self, step: int, rows: list[list[tuple[int, int]]], row_len: int, real: int
    ) -> tuple[Batch, int]:
        """This rank's rows as a Batch, and the targets of all ranks' rows."""
        share = self.rows // self.runtime.world
        mine = slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)
        if self.frame is None:
            return lay_out(self.store, rows[mine], row_len), real
        batch = lay_out(self.store, rows, row_len, self.frame)
        random = np.random.default_rng(seed_of(self.settings.run.seed, "mask", step))
        choice = torch.from_numpy(random.random((len(rows), row_len)))
        batch = mask_tokens(batch, choice, self.frame)
        return batch.rows(mine), int((batch.targets >= 0).sum())
