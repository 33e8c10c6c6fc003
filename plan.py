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
from config import Config, samples_kind
from data import Samples, Store, check_tokens
from difficulty import ready
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


def shuffled(draws: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The sample ids of the given draws: pass after pass over 0..n-1, each in an order of its own.

    A keyed permutation of [0, n) (a Feistel network over an even number of bits, walked until it
    lands below n; Black & Rogaway 2002), so there is no list of samples in memory, and any rank can
    say what draw 10^12 is without replaying those before it.

    Args:    draws (m,) int64, counted from the start of training
    Returns: (m,) int64 sample ids; draws k n .. (k + 1) n - 1 hold every id once
    """
    passes, ids = np.divmod(draws.astype(np.uint64), np.uint64(n))
    bits = max(1, -(-(n - 1).bit_length() // 2))  # of either half
    half, low = np.uint64(bits), np.uint64((1 << bits) - 1)
    salts = [(seed * 8 + turn) * 0xD1342543DE82EF95 % 2**64 for turn in range(6)]
    keys = passes * np.uint64(0x9E3779B97F4A7C15) + np.array(salts, np.uint64)[:, None]  # (6, m)
    outside = np.arange(len(ids))
    while len(outside):
        x, key = ids[outside], keys[:, outside]
        left, right = x >> half, x & low
        for turn in range(6):
            left, right = right, left ^ (_mix(right + key[turn]) & low)
        ids[outside] = x = left << half | right
        outside = outside[x >= n]
    return ids.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers to 64 well-mixed bits (the finaliser of splitmix64)."""
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
    store: Store, rows: list[list[tuple[int, ...]]], seq_len: int, frame: Frame | None = None
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (`frame` None): a piece's inputs are the token before it and its own but the last; before
    the first piece of a document stands end-of-text, which is the token before it in the store.
    BERT: the piece between the two; the targets are its tokens, and IGNORE on the frame. Which of
    them are masked is decided by `mask_tokens`.

    Args:    rows (B lists of pieces: first and one-past-last token in the store, and, where it is
             not 0, how many at its start are context only, because they were targets before)
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
        for number, piece in enumerate(row):
            start, stop, seen = (*piece, 0)[:3]
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
                targets[r, place : place + seen] = IGNORE
            positions[r, here] = np.arange(length)
            doc_ids[r, here] = number
            place += length
    check_tokens(store, max(tokens.max(), targets.max()))
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
    draws: int = 0  # ranks of the pool drawn; with packing, before the current window
    since: int = 0  # draws before the current stage, that is, before the pool last changed
    row: int = 0  # rows taken of the current window
    paced_at: int = 0  # consumed tokens when the current window, or the last step, began


class Step(NamedTuple):
    """What the next optimizer step needs, decided before it starts; it travels with its batch."""

    batch: Batch  # this rank's rows
    targets: int  # on all ranks
    rows: int  # on all ranks
    seq_len: int  # longest piece that the curriculum allows
    kept_tokens: int  # of a row, in layers that drop
    padding_share: float
    stage: dict[str, float]  # for the log: difficulty of each metric, and the samples in the pool
    after: Clock


class Stage(NamedTuple):
    """What governs the choice of samples at one point of a run."""

    limit: int  # tokens of a piece
    pool: curriculum.Pool | None  # None: every sample
    shown: dict[str, float]


WINDOW = 16  # samples that are packed together, as a multiple of a step's rows


class Plan:
    """Turns a clock into a step: curriculum, then packing, then this rank's rows. No state."""

    def __init__(self, settings: Config, store: Store, frame: Frame | None, runtime: Runtime):
        self.settings, self.store, self.frame, self.runtime = settings, store, frame, runtime
        self.row_len = settings.data.seq_len
        self.rows = settings.optim.batch_tokens // self.row_len
        self.extra = 2 if frame else 0  # [CLS] and [SEP] of every piece
        kind = samples_kind(settings)
        self.samples = Samples.of(store, kind, self.row_len)
        self.window = lru_cache(maxsize=2)(self.pack_window)
        self.stage = lru_cache(maxsize=4)(self.find_stage)
        if len(self.samples) == 0:
            raise ValueError(f"{store.path} holds no training document: prepare it from more text")
        self.course, self.said, chosen = None, False, settings.curriculum
        if chosen.metric != "none":
            indexes = ready(self.samples, chosen.metric, chosen.index, runtime)
            self.course = curriculum.Course(chosen, settings.optim.tokens, self.row_len, indexes)

    def __call__(self, clock: Clock) -> Step:
        s = self.settings
        progress = clock.consumed_tokens / s.optim.tokens
        rows, row_len, stage, place = (self.packed if s.pack.on else self.one_a_row)(clock)

        places = [[piece[1] - piece[0] + self.extra for piece in row] for row in rows]
        seen = sum(sum(piece[2:]) for row in rows for piece in row)
        filled = sum(map(sum, places))
        real = filled - seen
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
            clock.layer_tokens + len(rows) * layer_tokens,
            clock.positions + len(rows) * row_len,
            clock.pieces + sum(map(len, rows)),
            *place,
        )
        padding, kept = 1 - filled / (len(rows) * row_len), min(kept, row_len)
        return Step(batch, targets, len(rows), stage.limit, kept, padding, stage.shown, after)

    def find_stage(self, consumed_tokens: int) -> Stage:
        """How long a piece may be and which samples may be drawn, at one point of the run."""
        if self.course is None:
            return Stage(self.row_len, None, {})
        difficulty, limit, pool, note = self.course.at(consumed_tokens)
        if note and not self.said:
            self.said = True
            self.runtime.say(f"--curriculum: {note}; from here on the log says how far")
        shown = {f"difficulty_{curriculum.label(name)}": d for name, d in difficulty.items()}
        return Stage(limit, pool, {**shown, "pool": pool.size if pool else len(self.samples)})

    def stage_of(self, clock: Clock) -> tuple[Stage, int]:
        """The stage that holds from this clock on, and the draws before it began."""
        stage = self.stage(clock.consumed_tokens)
        same = stage.pool == self.stage(clock.paced_at).pool
        return stage, clock.since if same else clock.draws

    def draw(
        self, first: int, count: int, since: int, pool: curriculum.Pool | None
    ) -> tuple[np.ndarray, int]:
        """`count` samples from draw `first` on, as (count, 2) spans, and the draw after the last.

        A stage shuffles the ranks of its pool pass after pass, so nothing comes again before all of
        it came. Where several filters meet, a draw that one of them refuses is passed over.
        """
        seed, ids = self.settings.run.seed, np.empty(0, np.int64)
        seed = seed_of(seed, "stage", since) if since else seed
        while len(ids) < count:
            left = count - len(ids)
            draws = pool.reach / max(pool.size, 1) if pool else 1  # a sample: 1 with one filter
            ask = left if draws == 1 else min(int(1.1 * draws * left) + 64, curriculum.SCAN)
            ranks = np.arange(first - since, first - since + ask)
            ranks = shuffled(ranks, pool.reach if pool else len(self.samples), seed)
            found = pool.ids(ranks) if pool else ranks
            taken = np.flatnonzero(found >= 0)[:left]
            ids = np.concatenate((ids, found[taken]))
            first += ask if len(taken) < left else int(taken[-1]) + 1
        return self.samples.spans(ids), first

    def one_a_row(self, clock: Clock) -> tuple[list, int, Stage, tuple[int, ...]]:
        """Rows of one piece each, their length, what governs them, and the place they lead to.

        Samples are cut off at the stage's length (the papers' truncation), or reshaped; a BERT's
        rows are as long as the longest of them while a filter makes short samples likely.
        """
        stage, since = self.stage_of(clock)
        spans, draws = self.draw(clock.draws, self.rows, since, stage.pool)
        place = (draws, since, 0, clock.consumed_tokens)
        metrics = self.settings.curriculum.metric.split(",")
        if "seqlen-reshape" in metrics and stage.limit < self.row_len:
            row_len, rows = curriculum.reshape(spans, self.row_len, stage.limit)
            return rows, row_len, stage._replace(limit=row_len), place
        row_len = stage.limit
        rows = [[(a, min(b, a + row_len - self.extra))] for a, b in spans.tolist()]
        if self.frame and stage.pool:
            longest = max(b - a for ((a, b),) in rows) + self.extra
            row_len = min(-(-longest // curriculum.MULTIPLE) * curriculum.MULTIPLE, row_len)
        return rows, row_len, stage, place

    def packed(self, clock: Clock) -> tuple[list, int, Stage, tuple[int, ...]]:
        """As one_a_row, for rows of packed pieces. A window keeps the stage that it began with."""
        draws, since, row, paced_at = clock[-4:]
        rows, longest = [], 0
        while len(rows) < self.rows:
            if row == 0:
                begun = clock._replace(draws=draws, since=since, paced_at=paced_at)
                since, paced_at = self.stage_of(begun)[1], clock.consumed_tokens
            window, after = self.window(draws, since, paced_at)
            stage = self.stage(paced_at)
            longest = max(longest, stage.limit)
            taken = window[row : row + self.rows - len(rows)]
            rows, row = rows + taken, row + len(taken)
            if row == len(window):
                draws, row = after, 0
        return rows, self.row_len, stage._replace(limit=longest), (draws, since, row, paced_at)

    def pack_window(self, first: int, since: int, paced_at: int) -> tuple[list, int]:
        """Pack the samples of some 10 steps together, and put the rows back into random order.

        Packed step by step, rows of 256 leave 4 % padding at 16 rows a step; packed so, 0.5 %. The
        packer's rows come longest piece first, which would sort the steps by length; by the draw
        of their first piece they are as shuffled as the samples, and full rows keep their order.
        """
        stage = self.stage(paced_at)
        spans, after = self.draw(first, WINDOW * self.rows, since, stage.pool)
        pieces = [piece for sample in cut(spans, stage.limit - self.extra) for piece in sample]
        packed = packing.best_fit([b - a + self.extra for a, b in pieces], self.row_len)
        return [[pieces[item] for item in row] for row in sorted(packed)], after

    def batch(
        self, step: int, rows: list[list[tuple]], row_len: int, real: int
    ) -> tuple[Batch, int]:
        """This rank's rows as a Batch, and the targets of all ranks' rows."""
        share = len(rows) // self.runtime.world
        mine = slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)
        if self.frame is None:
            return lay_out(self.store, rows[mine], row_len), real
        batch = lay_out(self.store, rows, row_len, self.frame)
        random = np.random.default_rng(seed_of(self.settings.run.seed, "mask", step))
        choice = torch.from_numpy(random.random((len(rows), row_len)))
        batch = mask_tokens(batch, choice, self.frame)
        return batch.rows(mine), int((batch.targets >= 0).sum())
