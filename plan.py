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
import torch

import curriculum
import ltd
import packing
from analyze import ready
from config import Config, samples_kind
from data import Batch, Samples, SpecialIds, collate, cut, mask_tokens
from support.ranking import SCAN, Pool
from support.rng import seed_of, shuffled
from support.runtime import Runtime
from support.token_store import Store


class Clock(NamedTuple):
    """Where a run stands. Everything scheduled is a function of this, the settings and the seed."""

    step: int = 0
    consumed_tokens: int = 0  # the budget's unit: real tokens, scaled by what LTD let through
    real_tokens: int = 0  # tokens of text that were targets, padding not counted
    layer_tokens: int = 0  # positions times the layers they went through, padding counted
    positions: int = 0  # places in rows, padding counted
    pieces: int = 0  # pieces of documents laid into rows
    samples_drawn: int = 0  # ranks of the pool drawn; with packing, before the current window
    stage_start: int = 0  # draws before the current stage, that is, before the pool last changed
    window_row: int = 0  # rows taken of the current window
    window_tokens: int = 0  # consumed tokens when the current window, or the last step, began


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
    pool: Pool | None  # None: every sample
    shown: dict[str, float]


WINDOW = 16  # samples that are packed together, as a multiple of a step's rows


class Plan:
    """Turns a clock into a step: curriculum, then packing, then this rank's rows. No state."""

    def __init__(
        self, settings: Config, store: Store, special_ids: SpecialIds | None, runtime: Runtime
    ):
        self.settings, self.store, self.special_ids, self.runtime = (
            settings,
            store,
            special_ids,
            runtime,
        )
        self.row_len = settings.data.seq_len
        self.rows = settings.optim.batch_tokens // self.row_len
        self.extra = 2 if special_ids else 0  # [CLS] and [SEP] of every piece
        kind = samples_kind(settings)
        self.samples = Samples.of(store, kind, self.row_len)
        self.window = lru_cache(maxsize=2)(self.pack_window)
        self.stage = lru_cache(maxsize=4)(self.find_stage)
        if len(self.samples) == 0:
            raise ValueError(f"{store.path} holds no training document: prepare it from more text")
        self.course, self.said, chosen = None, False, settings.curriculum
        metrics = curriculum.parse_metrics(chosen, self.row_len)
        self.metrics = [metric.name for metric in metrics]
        if metrics:
            indexes = ready(self.samples, self.metrics, chosen.index, runtime)
            self.course = curriculum.Curriculum(
                metrics, settings.optim.tokens, self.row_len, indexes
            )

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
        shown = {f"difficulty_{name.rpartition(':')[2]}": d for name, d in difficulty.items()}
        return Stage(limit, pool, {**shown, "pool": pool.size if pool else len(self.samples)})

    def stage_of(self, clock: Clock) -> tuple[Stage, int]:
        """The stage that holds from this clock on, and the draws before it began."""
        stage = self.stage(clock.consumed_tokens)
        same = stage.pool == self.stage(clock.window_tokens).pool
        return stage, clock.stage_start if same else clock.samples_drawn

    def draw(self, first: int, count: int, since: int, pool: Pool | None) -> tuple[np.ndarray, int]:
        """`count` samples from draw `first` on, as (count, 2) spans, and the draw after the last.

        A stage shuffles the ranks of its pool pass after pass, so nothing comes again before all of
        it came. Where several filters meet, a draw that one of them refuses is passed over.
        """
        seed, ids = self.settings.run.seed, np.empty(0, np.int64)
        seed = seed_of(seed, "stage", since) if since else seed
        while len(ids) < count:
            left = count - len(ids)
            draws = pool.reach / max(pool.size, 1) if pool else 1  # a sample: 1 with one filter
            ask = left if draws == 1 else min(int(1.1 * draws * left) + 64, SCAN)
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
        spans, draws = self.draw(clock.samples_drawn, self.rows, since, stage.pool)
        place = (draws, since, 0, clock.consumed_tokens)
        if "seqlen-reshape" in self.metrics and stage.limit < self.row_len:
            row_len, rows = curriculum.reshape(spans, self.row_len, stage.limit)
            return rows, row_len, stage._replace(limit=row_len), place
        row_len = stage.limit
        rows = [[(a, min(b, a + row_len - self.extra))] for a, b in spans.tolist()]
        if self.special_ids and stage.pool:
            longest = max(b - a for ((a, b),) in rows) + self.extra
            row_len = min(-(-longest // curriculum.MULTIPLE) * curriculum.MULTIPLE, row_len)
        return rows, row_len, stage, place

    def packed(self, clock: Clock) -> tuple[list, int, Stage, tuple[int, ...]]:
        """As one_a_row, for rows of packed pieces. A window keeps the stage that it began with."""
        draws, since, row, window_tokens = clock[-4:]
        rows, longest = [], 0
        while len(rows) < self.rows:
            if row == 0:
                begun = clock._replace(
                    samples_drawn=draws, stage_start=since, window_tokens=window_tokens
                )
                since, window_tokens = self.stage_of(begun)[1], clock.consumed_tokens
            window, after = self.window(draws, since, window_tokens)
            stage = self.stage(window_tokens)
            longest = max(longest, stage.limit)
            taken = window[row : row + self.rows - len(rows)]
            rows, row = rows + taken, row + len(taken)
            if row == len(window):
                draws, row = after, 0
        return rows, self.row_len, stage._replace(limit=longest), (draws, since, row, window_tokens)

    def pack_window(self, first: int, since: int, window_tokens: int) -> tuple[list, int]:
        """Pack the samples of some 10 steps together, and put the rows back into random order.

        Packed step by step, rows of 256 leave 4 % padding at 16 rows a step; packed so, 0.5 %. The
        packer's rows come longest piece first, which would sort the steps by length; by the draw
        of their first piece they are as shuffled as the samples, and full rows keep their order.
        """
        stage = self.stage(window_tokens)
        spans, after = self.draw(first, WINDOW * self.rows, since, stage.pool)
        pieces = [piece for sample in cut(spans, stage.limit - self.extra) for piece in sample]
        packed = packing.best_fit([b - a + self.extra for a, b in pieces], self.row_len)
        return [[pieces[item] for item in row] for row in sorted(packed)], after

    def batch(
        self, step: int, rows: list[list[tuple]], row_len: int, real: int
    ) -> tuple[Batch, int]:
        """This rank's rows as a Batch, and the targets of all ranks' rows."""
        share = len(rows) // self.runtime.world_size
        mine = slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)
        if self.special_ids is None:
            return collate(self.store, rows[mine], row_len), real
        batch = collate(self.store, rows, row_len, self.special_ids)
        random = np.random.default_rng(seed_of(self.settings.run.seed, "mask", step))
        choice = torch.from_numpy(random.random((len(rows), row_len)))
        batch = mask_tokens(batch, choice, self.special_ids)
        return batch.rows(mine), int((batch.targets >= 0).sum())
