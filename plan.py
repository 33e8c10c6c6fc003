"""From the clock to the next step: where the techniques that choose data meet.

The order matters: the curriculum says which samples may be drawn and how long a piece of them may
be, then packing lays pieces into rows. Of the techniques that act on blocks only the cost is
settled here, how many tokens each layer sees, because the clock needs it.

    clock ── stage ── draw ──> spans ── truncate, reshape or pack ──> rows ── collate ──> Step

A plan is a pure function of (settings, store, clock): every rank plans the rows of all ranks, from
lengths alone, and reads its own. A run that was killed goes on with the rows it would have seen.
Three steps of two ranks, with 4 rows of 64 tokens a step:

    step    position                  rows of all ranks         rank 0 reads    rank 1 reads
    1       first_draw 0              draws 0 to 3              0, 1            2, 3
    2       first_draw 4              draws 4 to 7              4, 5            6, 7
    3       first_draw 8              draws 8 to 11             8, 9            10, 11

The sample of a draw is a keyed permutation of its number, so nobody replays the steps before. With
--pack the samples of 16 steps, 64 draws, are packed together into a window of, say, 10 rows. The
position says at which draw the window begins, and how many of its rows were taken:

    1       first_draw 0, row 0       0 to 3 of the window      two of these    the other two
    2       first_draw 0, row 4       4 to 7                    two             two
    3       first_draw 0, row 8       8 and 9, 0 and 1 of       two             two
                                      the window from draw 64
    4       first_draw 64, row 2
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

import packing
from analyze import ready
from config import Config, samples_kind
from data import Drawn, Rows, collate, counts, draw, places
from difficulty import label
from model import Predicted, predicted_by_bert
from support.base.clock import Clock, Position, StepContext, advanced, tokens_by_layer
from support.base.runtime import Runtime
from support.base.technique import techniques_on
from support.rows.batch import Batch, with_answers
from support.rows.bert import SpecialIds, check_pairs, mask_tokens, sentence_pairs
from support.rows.mixture import AnyStore, samples_in
from support.rows.packs import balanced
from support.rows.ranking import Pool, Rankings, Stage, Stages
from support.rows.samples import MULTIPLE, cut, reshape
from support.step.flops import Laid


class Step(NamedTuple):
    """What the next optimizer step needs, decided before it starts; it travels with its batch."""

    batch: Batch  # this rank's rows
    targets: int  # on all ranks, or documents: what the sum of losses is divided by
    of_answer: float | None  # --nsp: what the answer of a pair counts in that sum
    context: StepContext
    max_piece_len: int  # tokens, what the curriculum allows
    kept_tokens: int  # of a row, in the layer that sees the fewest
    padding_share: float
    pieces: int  # of documents, on all ranks
    attention_share: float  # sum of their squared lengths, of what rows without padding could have
    laid: Laid  # how these pieces lie in rows, on all ranks
    stage: dict[str, float]  # for the log: difficulty of each metric, and the samples in the pool
    note: str  # for the user: what the curriculum could not do as asked
    before: Clock
    after: Clock
    predicted: Predicted | None = None  # a BERT's targets in the batch; None reads them off it

    def part(self, rows: slice) -> "Step":
        """The same step with some of this rank's rows."""
        T = self.batch.tokens.shape[1]
        predicted = self.predicted and self.predicted.rows(rows, T)
        return self._replace(batch=self.batch.rows(rows), predicted=predicted)


class Chosen(NamedTuple):
    """The rows of a step on all ranks, and what governed their choice."""

    rows: Rows
    seq_len: int  # tokens of a row
    stage: Stage
    after: Position  # where the next rows begin


class Window(NamedTuple):
    """Samples that were packed together: a function of where it begins.

    Nothing is carried over between windows: a sample lies in the rows of the window that drew it.
    """

    start: Position
    rows: Rows
    stage: Stage  # that all of its samples were drawn under
    next_draw: int


WINDOW_STEPS = 16  # whose samples are packed together; they make some ten steps' rows


class Plan:
    """Turns a clock into a step: curriculum, then packing, then this rank's rows."""

    def __init__(
        self, settings: Config, store: AnyStore, special_ids: SpecialIds | None, runtime: Runtime
    ):
        self.settings, self.store, self.runtime = settings, store, runtime
        self.special_ids = special_ids
        self.seq_len = settings.data.seq_len
        self.rows_per_step = settings.optim.batch_tokens // self.seq_len
        self.window_steps = 1 if settings.pack.batch == "documents" else WINDOW_STEPS
        self.window: Window | None = None  # the last one, kept because steps come in order
        kind = samples_kind(settings)
        self.samples = samples_in(store, kind, self.seq_len, settings.data.long)
        self.extra = self.samples.special_tokens  # of every piece
        if settings.model.nsp:
            check_pairs(self.samples)
        self.curriculum: Stages | None = None  # the one technique that has stages
        for technique in techniques_on(settings):
            if technique.stages:
                self.curriculum = technique.stages(settings, self.rankings)

    def __call__(self, clock: Clock) -> Step:
        s = self.settings
        if s.pack.on:  # a window keeps the stage that it began with
            chosen = self.packed_rows(clock)
        else:
            stage = self.stage_at(clock.consumed_tokens)
            if stage.max_piece_len < self.seq_len and self.curriculum.reshapes:
                chosen = self.reshaped_rows(clock, stage)
            else:
                chosen = self.truncated_rows(clock, stage)
        context = StepContext(
            seed=s.run.seed,
            step=clock.step + 1,
            progress=min(clock.consumed_tokens / s.optim.schedule_tokens, 1.0),
        )
        rows, stage = chosen.rows, chosen.stage
        length = rows.stop - rows.start + self.extra  # of every piece
        filled, seen = rows.sums(length), rows.sums(rows.seen)
        positions = len(rows) * chosen.seq_len
        tokens = tokens_by_layer(s, context, chosen.seq_len)
        counted = counts(
            rows,
            masked=self.special_ids is not None,
            per_document=s.optim.loss_per == "document",
        )
        batch = self.batch(context, rows, chosen.seq_len)
        after = advanced(clock, filled, seen, tokens, positions, len(length))
        return Step(
            batch=batch,
            predicted=self.predicted_in(batch),
            targets=counted.targets,
            of_answer=counted.of_answer,
            context=context,
            max_piece_len=stage.max_piece_len,
            kept_tokens=min(tokens),
            padding_share=1 - int(filled.sum()) / positions,
            pieces=len(length),
            attention_share=int((length**2).sum()) / (positions * chosen.seq_len),
            laid=Laid(length, rows.offsets),
            stage=self.logged(stage),
            note=stage.note,
            before=clock,
            after=after._replace(position=chosen.after),
        )

    # ---- which samples

    def rankings(self, metrics: Sequence[str], folder: str | None) -> Rankings:
        """The index of each metric that ranks samples, made if it is not there."""
        return ready(self.samples, metrics, folder, self.runtime)

    def stage_at(self, consumed_tokens: int) -> Stage:
        """How long a piece may be and which samples may be drawn, at one point of the run."""
        if self.curriculum is None:
            return Stage(difficulty={}, max_piece_len=self.seq_len, pool=None, note="")
        return self.curriculum.at(consumed_tokens)

    def logged(self, stage: Stage) -> dict[str, float]:
        fields = {f"difficulty_{label(name)}": d for name, d in stage.difficulty.items()}
        if self.curriculum:
            fields["pool"] = stage.pool.size if stage.pool else len(self.samples)
        return fields

    def position_at(self, clock: Clock, stage: Stage) -> Position:
        """Where the next samples are drawn: a stage with another pool shuffles it from there on."""
        at = clock.position
        same = stage.pool == self.stage_at(at.drawn_at_tokens).pool
        return Position(
            first_draw=at.first_draw,
            stage_first_draw=at.stage_first_draw if same else at.first_draw,
            drawn_at_tokens=clock.consumed_tokens,
        )

    def draw_samples(self, position: Position, pool: Pool | None, count: int) -> Drawn:
        return draw(
            self.samples,
            pool,
            first=position.first_draw,
            count=count,
            stage_start=position.stage_first_draw,
            seed=self.settings.run.seed,
        )

    # ---- rows of one piece each

    def truncated_rows(self, clock: Clock, stage: Stage) -> Chosen:
        """Samples cut off at the length that the stage allows (the papers' truncation).

        A BERT's rows are only as long as the longest of them where a filter makes short samples
        likely.
        """
        position = self.position_at(clock, stage)
        drawn = self.draw_samples(position, stage.pool, self.rows_per_step)
        seq_len = stage.max_piece_len
        start, stop = drawn.spans.T
        stop = np.minimum(stop, start + seq_len - self.extra)
        if self.special_ids and stage.pool:
            longest = int((stop - start).max()) + self.extra
            seq_len = min(-(-longest // MULTIPLE) * MULTIPLE, seq_len)
        rows = self.rows_of(np.stack((start, stop), axis=1), position)
        return Chosen(rows, seq_len, stage, position._replace(first_draw=drawn.next_sample))

    def reshaped_rows(self, clock: Clock, stage: Stage) -> Chosen:
        """Samples cut into as many rows as they fill, all of about the stage's length."""
        position = self.position_at(clock, stage)
        drawn = self.draw_samples(position, stage.pool, self.rows_per_step)
        parts = reshape(drawn.spans, self.seq_len, stage.max_piece_len)
        return Chosen(
            rows=Rows.of(parts.spans, parts.offsets, parts.seen),
            seq_len=parts.seq_len,
            stage=stage._replace(max_piece_len=parts.seq_len),
            after=position._replace(first_draw=drawn.next_sample),
        )

    def rows_of(self, pieces: np.ndarray, position: Position) -> Rows:
        """Pieces drawn at this position, a row each; with --nsp they are pairs."""
        if not self.settings.model.nsp:
            return Rows.of(pieces)
        spans, pairs = sentence_pairs(pieces, self.settings.run.seed, "nsp", position.first_draw)
        return Rows.of(spans, pairs=pairs)

    # ---- packed rows

    def packed_rows(self, clock: Clock) -> Chosen:
        """Rows of packed pieces: as many as a step has unpacked, or those of its documents.

        The rows of a step come in an order in which equal shares of them are equal work.
        """
        if self.settings.pack.batch == "documents":  # a window is one step's, which takes it whole
            window = self.window_from(self.position_at(clock, self.stage_at(clock.consumed_tokens)))
            rows_left, multiple = len(window.rows), 8
        else:
            rows_left, multiple = self.rows_per_step, 1
        position, parts, longest = clock.position, [], 0
        while rows_left:  # from as many windows as that takes
            if position.row == 0:
                now = clock._replace(position=position)
                position = self.position_at(now, self.stage_at(clock.consumed_tokens))
            window = self.window_from(position._replace(row=0))
            stop = min(position.row + rows_left, len(window.rows))
            parts.append(window.rows.take(np.arange(position.row, stop)))
            longest = max(longest, window.stage.max_piece_len)
            rows_left -= stop - position.row
            position = position._replace(row=stop)
            if stop == len(window.rows):
                position = position._replace(first_draw=window.next_draw, row=0)
        rows = Rows.join(parts)
        work = rows.sums((rows.stop - rows.start + self.extra) ** 2)  # of attention
        stage = window.stage._replace(max_piece_len=longest)
        return Chosen(rows.take(balanced(work, multiple)), self.seq_len, stage, position)

    def window_from(self, start: Position) -> Window:
        if self.window is None or self.window.start != start:
            self.window = self.packed_window(start)
        return self.window

    def packed_window(self, start: Position) -> Window:
        """Pack the samples of one window together, and put the rows back into random order.

        Packed step by step, rows of 256 leave 4 % padding at 16 rows a step; packed 16 steps at a
        time, 0.5 %. The packer's rows come longest piece first, which would sort the steps by
        length; by the draw of their first piece they are as shuffled as the samples, and full rows
        keep their order.
        """
        stage = self.stage_at(start.drawn_at_tokens)
        drawn = self.draw_samples(start, stage.pool, self.window_steps * self.rows_per_step)
        alone = self.rows_of(cut(drawn.spans, stage.max_piece_len - self.extra), start)
        lengths = alone.stop - alone.start + self.extra
        pack = self.settings.pack
        packs = packing.pack_lengths(
            lengths, self.seq_len, packer=pack.packer, max_per_pack=pack.max_per_row
        )
        by_first = np.argsort(packs.items[packs.offsets[:-1]])
        rows = alone.packed(packs).take(by_first)
        return Window(start, rows, stage, drawn.next_sample)

    # ---- this rank's rows

    def predicted_in(self, batch: Batch) -> Predicted | None:
        if self.special_ids is None:
            return None
        return predicted_by_bert(batch.targets, batch.positions, self.settings.model.nsp)

    def batch(self, context: StepContext, rows: Rows, seq_len: int) -> Batch:
        """This rank's rows as a Batch.

        Where ranks cannot share rows evenly, the last ones get blank rows, which nothing counts.
        """
        share = -(-len(rows) // self.runtime.world_size)
        of_all = rows.with_blanks(share * self.runtime.world_size)
        mine = of_all.take(np.arange(self.runtime.rank * share, (self.runtime.rank + 1) * share))
        batch = collate(self.store, mine, seq_len, self.special_ids)
        if self.special_ids:
            where = places(mine, batch).flatten()
            bits = context.bits("mask", ("which", "what"), where, 1).view(2, *batch.tokens.shape)
            batch = mask_tokens(batch, bits, self.special_ids)
        if mine.pairs:
            batch = with_answers(batch, mine.pairs.answers(mine.start, mine.stop))
        return batch


def read_ahead(plan: Plan, clock: Clock, device: torch.device) -> Iterator[tuple[Step, float]]:
    """The steps from this clock on, each with the milliseconds it was waited for.

    While one computes, the next is planned, its rows are read and sent to the device.
    """

    def use_device() -> None:
        """Which GPU is asked for page-locked memory is a thread's own choice, at first the first"""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def read(clock: Clock) -> Step:
        step = plan(clock)
        return step._replace(batch=step.batch.to(device))

    with ThreadPoolExecutor(1, initializer=use_device) as loader:
        upcoming = loader.submit(read, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            upcoming = loader.submit(read, step.after)
            yield step, waited_ms
