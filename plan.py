"""From the clock to the next step: where the techniques that choose data meet.

The order matters: the curriculum says which samples may be drawn and how long a piece may be, then
packing lays pieces into rows. Of the techniques that act on blocks only the cost is settled here,
how many tokens each layer sees, because the clock needs it.

A plan is a pure function of (settings, store, clock), so a run that was killed goes on with the
very rows it would have seen; all that it keeps is the packing window that it is in the middle of
(plan.py). With 2 ranks and 16 rows a step, rank 0 reads rows 0..7 and rank 1 rows 8..15
of the same plan.

    clock ── curriculum ──> Stage ── draw ──> spans ── packing ──> rows ── collate ──> Step
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

import curriculum
import packing
from analyze import ready
from config import Config, samples_kind
from curriculum import Curriculum, Stage
from data import Drawn, Rows, collate, counts, draw, places
from difficulty import label
from model import Predicted, predicted_by_bert
from support.base.clock import Clock, StepContext, advanced, tokens_by_layer
from support.base.runtime import Runtime
from support.base.settings import is_on
from support.rows.batch import Batch, with_answers
from support.rows.bert import SpecialIds, check_pairs, mask_tokens, sentence_pairs
from support.rows.mixture import AnyStore, samples_in
from support.rows.packs import balanced
from support.rows.ranking import Pool
from support.rows.samples import cut
from support.step.flops import Laid

# ---- windows
#
# Packing windows: samples that were packed together, and how steps take their rows.
#
# A window is a function of the clock at its start, so a run that goes on packs the one that it was
# in the middle of again. Nothing is carried over between windows: each sample that a window drew
# lies in its rows and in no other's. Does not draw or pack, which is plan.py's: it hands in how.
#
# A step of 8 rows, from windows of 5 and of 6:
#
#     row of its window    0 1 2 3 4 | 0 1 2 3 4 5
#     step                 1 1 1 1 1   1 1 1 2 2 2 ...


class Window(NamedTuple):
    start: Clock  # its fields of data alone
    rows: Any  # data.Rows
    stage: Any  # curriculum.Stage, which all of its samples were drawn under
    next_sample: int


class Taken(NamedTuple):
    parts: list[Any]  # data.Rows of one window each
    stages: list[Any]  # of these windows
    after: Clock  # where the next rows begin; its counts of tokens are those before


class Windows:
    """The windows of a run, one after the other.

    Args: begin (clock between two windows) -> the clock with what the next one is drawn under
          pack  (that clock's fields of data) -> the window
    """

    def __init__(self, begin: Callable[[Clock], Clock], pack: Callable[[Clock], Window]):
        self.begin, self.pack = begin, pack
        self.last: Window | None = None  # kept, for steps come in order

    def at(self, clock: Clock) -> Window:
        """The window that this clock stands in."""
        start = Clock(
            samples_drawn=clock.samples_drawn,
            stage_start=clock.stage_start,
            window_tokens=clock.window_tokens,
        )
        if self.last is None or self.last.start != start:
            self.last = self.pack(start)
        return self.last

    def take(self, clock: Clock, count: int) -> Taken:
        """The next `count` rows, of as many windows as that takes."""
        parts, stages, at = [], [], clock
        while count:
            if at.window_row == 0:
                at = self.begin(at)
            window = self.at(at)
            stop = min(at.window_row + count, len(window.rows))
            parts.append(window.rows.take(np.arange(at.window_row, stop)))
            stages.append(window.stage)
            count -= stop - at.window_row
            at = at._replace(window_row=stop)
            if stop == len(window.rows):
                at = at._replace(samples_drawn=window.next_sample, window_row=0)
        return Taken(parts, stages, at)


# ---- read ahead
#
# Plan the next step, read its rows and send them to the device while this one computes.


def read_ahead(
    plan: Callable[[Clock], Any], clock: Clock, device: torch.device
) -> Iterator[tuple[Any, float]]:
    """The steps from this clock on, each (plan.Step, the milliseconds it was waited for)."""

    def use_device() -> None:
        """Which GPU is asked for page-locked memory is a thread's own choice, at first the first"""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def read(clock: Clock) -> Any:
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
    after: Clock  # where the next rows begin; its counts of tokens are those before the step


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
        kind = samples_kind(settings)
        self.samples = samples_in(store, kind, self.seq_len, settings.data.long)
        self.extra = self.samples.special_tokens  # of every piece
        self.windows = Windows(self.begin_window, self.pack_window)
        if settings.model.nsp:
            check_pairs(self.samples)
        self.metrics: tuple[curriculum.MetricSettings, ...] = ()
        self.curriculum: Curriculum | None = None
        if is_on(settings, "curriculum"):
            self.metrics = curriculum.parse_metrics(settings.curriculum, self.seq_len)
            names = [metric.name for metric in self.metrics]
            indexes = ready(self.samples, names, settings.curriculum.index, runtime)
            budget = settings.optim.schedule_tokens
            self.curriculum = Curriculum(self.metrics, budget, self.seq_len, indexes)

    def __call__(self, clock: Clock) -> Step:
        s = self.settings
        chosen = self.packed_rows(clock) if s.pack.on else self.plain_rows(clock)
        context = StepContext(
            seed=s.run.seed,
            step=clock.step + 1,
            progress=min(clock.consumed_tokens / s.optim.schedule_tokens, 1.0),
        )
        rows = chosen.rows
        length = rows.stop - rows.start + self.extra  # of every piece
        filled, seen = rows.sums(length), rows.sums(rows.seen)
        positions = len(rows) * chosen.seq_len
        tokens = tokens_by_layer(s, context, chosen.seq_len)
        per_document = s.optim.loss_per == "document"
        counted = counts(rows, masked=self.special_ids is not None, per_document=per_document)
        stage = chosen.stage
        shown = {f"difficulty_{label(n)}": d for n, d in stage.difficulty.items()}
        if self.curriculum:
            shown["pool"] = stage.pool.size if stage.pool else len(self.samples)
        batch = self.batch(context, rows, chosen.seq_len)
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
            stage=shown,
            note=stage.note,
            before=clock,
            after=advanced(chosen.after, filled, seen, tokens, positions, len(length)),
        )

    def draw_samples(self, clock: Clock, pool: Pool | None, count: int) -> Drawn:
        return draw(
            self.samples,
            pool,
            first=clock.samples_drawn,
            count=count,
            stage_start=clock.stage_start,
            seed=self.settings.run.seed,
        )

    def stage_at(self, consumed_tokens: int) -> Stage:
        """How long a piece may be and which samples may be drawn, at one point of the run."""
        if self.curriculum is None:
            return Stage(difficulty={}, max_piece_len=self.seq_len, pool=None, note="")
        return self.curriculum.at(consumed_tokens)

    def stage_start(self, clock: Clock, stage: Stage) -> int:
        """How many samples had been drawn when the current stage began."""
        same = stage.pool == self.stage_at(clock.window_tokens).pool
        return clock.stage_start if same else clock.samples_drawn

    def plain_rows(self, clock: Clock) -> Chosen:
        """Rows of one piece each.

        Samples are cut off at the length that the stage allows (the papers' truncation), or
        reshaped; a BERT's rows are only as long as the longest of them where a filter makes short
        samples likely.
        """
        stage = self.stage_at(clock.consumed_tokens)
        stage_start = self.stage_start(clock, stage)
        clock = clock._replace(stage_start=stage_start, window_row=0)
        drawn = self.draw_samples(clock, stage.pool, self.rows_per_step)
        after = clock._replace(samples_drawn=drawn.next_sample, window_tokens=clock.consumed_tokens)
        names = [metric.name for metric in self.metrics]
        if "seqlen-reshape" in names and stage.max_piece_len < self.seq_len:
            parts = curriculum.reshape(drawn.spans, self.seq_len, stage.max_piece_len)
            rows = Rows.of(parts.spans, parts.offsets, parts.seen)
            stage = stage._replace(max_piece_len=parts.seq_len)
            return Chosen(rows, parts.seq_len, stage, after)
        seq_len = stage.max_piece_len
        start, stop = drawn.spans.T
        stop = np.minimum(stop, start + seq_len - self.extra)
        if self.special_ids and stage.pool:
            longest = int((stop - start).max()) + self.extra
            seq_len = min(-(-longest // curriculum.MULTIPLE) * curriculum.MULTIPLE, seq_len)
        rows = self.rows_of(np.stack((start, stop), axis=1), clock)
        return Chosen(rows, seq_len, stage, after)

    def rows_of(self, pieces: np.ndarray, clock: Clock) -> Rows:
        """Pieces drawn at this clock, a row each; with --nsp they are pairs."""
        if not self.settings.model.nsp:
            return Rows.of(pieces)
        spans, pairs = sentence_pairs(pieces, self.settings.run.seed, "nsp", clock.samples_drawn)
        return Rows.of(spans, pairs=pairs)

    def packed_rows(self, clock: Clock) -> Chosen:
        """Rows of packed pieces: as many as a step has unpacked, or those of its documents.

        A window keeps the stage that it began with. The rows of a step come in an order in which
        equal shares of them are equal work.
        """
        count, multiple = self.rows_per_step, 1
        if self.settings.pack.batch == "documents":  # a window is one step's, which takes it whole
            count, multiple = len(self.windows.at(self.begin_window(clock)).rows), 8
        taken = self.windows.take(clock, count)
        rows = Rows.join(taken.parts)
        work = rows.sums((rows.stop - rows.start + self.extra) ** 2)  # of attention
        rows = rows.take(balanced(work, multiple))
        longest = max(stage.max_piece_len for stage in taken.stages)
        stage = taken.stages[-1]._replace(max_piece_len=longest)
        return Chosen(rows, self.seq_len, stage, taken.after)

    def begin_window(self, clock: Clock) -> Clock:
        """The clock with the stage that a window which begins now is drawn under."""
        stage_start = self.stage_start(clock, self.stage_at(clock.consumed_tokens))
        return clock._replace(stage_start=stage_start, window_tokens=clock.consumed_tokens)

    def pack_window(self, start: Clock) -> Window:
        """Pack the samples of one window together, and put the rows back into random order.

        Packed step by step, rows of 256 leave 4 % padding at 16 rows a step; packed 16 steps at a
        time, 0.5 %. The packer's rows come longest piece first, which would sort the steps by
        length; by the draw of their first piece they are as shuffled as the samples, and full rows
        keep their order.
        """
        stage = self.stage_at(start.window_tokens)
        drawn = self.draw_samples(start, stage.pool, self.window_steps * self.rows_per_step)
        alone = self.rows_of(cut(drawn.spans, stage.max_piece_len - self.extra), start)
        lengths, pack = alone.stop - alone.start + self.extra, self.settings.pack
        packs = packing.pack_lengths(
            lengths, self.seq_len, packer=pack.packer, max_per_pack=pack.max_per_row
        )
        by_first = np.argsort(packs.items[packs.offsets[:-1]])
        rows = alone.packed(packs).take(by_first)
        return Window(start, rows, stage, drawn.next_sample)

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
