"""Decide what the next step reads: which samples, packed into which rows, and on which rank.

This file continues the walk that data.py begins (documents, store, samples). The example is one
step: 3 documents, 4 samples, rows of 8 tokens, 4 draws a step, --pack --pack-batch documents, two
ranks.

    clock    the run is at step 0: 0 tokens consumed, the next draw is number 0
    stage    the longest piece allowed, 8 tokens, and the pool    Plan.stage_at, curriculum.py
             of samples that may be drawn, all four
    draw     draws 0 to 3 give samples 3, 0, 2, 1                 draw, and `shuffled` in clock.py
    cut      into pieces of at most 8 tokens, which all are;      Plan.packed_window, data.cut
             at 4 tokens, less. would become less and .
    rows     for all ranks: parsimon | less.is. | y.              Plan.packed_rows, packing.py
    Batch    rank 0 reads the first row and a blank one, rank 1   Rows.of_rank, batch_of in data.py
             the other two: heavy rows are dealt out first
    Step     18 targets on all ranks; the next clock: step 1,     Plan.__call__
             18 tokens consumed, the next draw is number 4
    train    runs the Step while the next one is planned          read_ahead, Trainer.train_step

`Plan.__call__` starts this walk; the functions on the right do the work. Curriculum comes before
packing, because it shortens pieces, not rows. Without --pack each piece gets its own row, cut off
at the length that the stage allows (`unpacked_rows`). Techniques that act on blocks appear here
only as a cost: the clock needs to know how many tokens each layer sees.

A plan is a pure function of (settings, store, clock). Every rank plans the rows of all ranks, which
needs only their lengths, and then reads its share. A keyed permutation turns the number of a draw
into a sample, so no step has to be replayed, and a run that was killed continues with the rows it
would have read. Three steps on two ranks, with 4 rows of 64 tokens a step:

    step    cursor                    rows of all ranks         rank 0 reads    rank 1 reads
    1       first_draw 0              draws 0 to 3              0, 3            1, 2
    2       first_draw 4              draws 4 to 7              4, 7            5, 6
    3       first_draw 8              draws 8 to 11             8, 11           9, 10

With --pack-batch rows, the default of a packed GPT, the samples of 16 steps (64 draws) are packed
together into a window of, say, 10 rows, under the stage at which the window begins. The cursor
holds the first draw of the window and how many of its rows have been used:

    1       first_draw 0, row 0       0 to 3 of the window      two of these    the other two
    2       first_draw 0, row 4       4 to 7                    two             two
    3       first_draw 0, row 8       8 and 9, then 0 and 1 of  two             two
                                      the window from draw 64
    4       first_draw 64, row 2
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

import ltd
import packing
import pseudo
from analyze import ready
from bert import SpecialIds, masked_tokens, sentence_pairs
from config import TECHNIQUES, Config, samples_kind
from curriculum import SCAN, Curriculum, Pool, Stage, parse_metrics
from data import (
    AnyStore,
    MixedSamples,
    Rows,
    Samples,
    batch_of,
    counts,
    cut,
    reshape,
    reshaped_len,
    samples_in,
)
from kernels.packed_attention import IMPLS, chosen_impl
from model import Batch, Predicted, TransformerConfig, predicted_by_bert
from support.clock import MULTIPLE, Clock, Cursor, StepContext, effective_tokens, seed_of, shuffled
from support.optim import state_bytes
from support.run import Run, read_log
from support.runtime import Runtime, on_device
from support.settings import duration, several, short
from support.sizes import empty_model, flops_of_step, parameters_in_words

MANY_EPOCHS = 4
REPEATED = "text read more than 4 times teaches less each time (arXiv 2305.16264)"
WINDOW_STEPS = 16  # steps whose samples are packed together, which gives rows for about ten steps


class Step(NamedTuple):
    """All that the next optimizer step needs, decided before it starts: a batch and what it means.

    Counts are of all ranks, except those of the batch.
    """

    batch: Batch | None  # this rank's rows; None if they were not read
    rows: torch.Tensor | None  # (B,) int64, numbers of these rows among the rows of all ranks
    seq_len: int  # tokens in a row
    targets: int  # divides the sum of losses: the number of targets, or of documents
    of_answer: float | None  # --nsp: the weight of an answer in that sum
    context: StepContext
    max_piece_len: int  # tokens in the longest piece that the curriculum allows in these rows
    tokens_by_layer: list[int]  # how many tokens of a full row each layer sees
    padding_share: float
    pieces: int  # of documents
    attention_share: float  # sum of squared piece lengths, relative to rows of one full piece
    difficulty: dict[str, float]  # for the log: the level of each metric, and the pool's size
    note: str  # for the user: what the curriculum could not do as asked
    before: Clock
    after: Clock
    predicted: Predicted | None = None  # where a BERT has targets; None finds them in the batch

    def to(self, device: torch.device) -> "Step":
        """Copy the step's rows to a device."""
        predicted = self.predicted and self.predicted.to(device)
        rows = on_device(self.rows, device)
        return self._replace(batch=self.batch.to(device), rows=rows, predicted=predicted)

    def columns(self) -> dict[str, object]:
        """Return the columns of the log that describe this step; the clock adds its own."""
        return {
            "max_piece_len": self.max_piece_len,
            "kept_tokens": min(filter(None, self.tokens_by_layer)),  # 0: a layer that is skipped
            "padding_share": round(self.padding_share, 6),
            "pieces": self.pieces,
            "attention_share": round(self.attention_share, 6),
            **self.difficulty,
        }

    def part(self, rows: slice) -> "Step":
        """Select some of this rank's rows: a micro-batch."""
        predicted = self.predicted and self.predicted.rows(rows, self.seq_len)
        return self._replace(batch=self.batch.rows(rows), rows=self.rows[rows], predicted=predicted)


class Chosen(NamedTuple):
    """The rows of all ranks, for one step or a whole window, and the stage that chose them."""

    rows: Rows
    seq_len: int  # tokens in a row
    stage: Stage  # the stage at which their samples were drawn
    after: Cursor  # where the next rows begin


class Plan:
    """Turns a clock into a step: curriculum first, then packing, then this rank's rows."""

    def __init__(
        self,
        settings: Config,
        store: AnyStore,
        special_ids: SpecialIds | None,
        runtime: Runtime,
        model: TransformerConfig,
    ):
        self.settings, self.store, self.runtime = settings, store, runtime
        self.model = model  # to count the FLOPs of a step
        self.special_ids = special_ids
        self.seq_len = settings.data.seq_len
        self.draws_per_step = settings.optim.batch_tokens // self.seq_len
        self.window_steps = 1 if settings.pack.batch == "documents" else WINDOW_STEPS
        # keep the last window, because the next step usually takes more rows from it
        self.window = lru_cache(maxsize=1)(self.packed_window)
        kind = samples_kind(settings)
        self.samples = samples_in(store, kind, self.seq_len)
        self.extra = self.samples.special_tokens  # in every piece
        if settings.model.nsp:
            self.check_pairs()
        self.has_noted = False
        # rows may hold several documents, or padding
        self.has_documents = settings.pack.on or special_ids is not None
        self.curriculum: Curriculum | None = None
        if settings.curriculum.on:
            flags, seq_len = settings.curriculum, self.seq_len
            indexes = ready(self.samples, flags.metrics, flags.index, runtime)
            pacings = parse_metrics(flags, seq_len, settings.pack.on)
            self.curriculum = Curriculum(pacings, settings.optim.schedule_tokens, seq_len, indexes)

    def first_note(self, step: Step) -> str:
        """Return the step's note if no step had one before, else an empty string."""
        note = "" if self.has_noted else step.note
        self.has_noted = self.has_noted or bool(step.note)
        return note

    def __call__(self, clock: Clock) -> Step:
        s = self.settings
        # stage, draw, rows: for all ranks; this needs only lengths
        chosen = self.packed_rows(clock) if s.pack.on else self.unpacked_rows(clock)
        step = self.costed(chosen, clock)

        # Batch: for this rank; it may end with blank rows, which are counted nowhere
        numbers, rows = chosen.rows.of_rank(self.runtime.rank, self.runtime.world_size)
        seeds = [seed_of(s.run.seed, "mask", step.context.step, use) for use in ("which", "what")]
        masks = torch.tensor(seeds)
        batch = batch_of(self.store, rows, chosen.seq_len, self.special_ids, masks)
        predicted = None
        if self.special_ids:
            predicted = predicted_by_bert(batch.targets, batch.positions, s.model.nsp)
        return step._replace(batch=batch, rows=torch.from_numpy(numbers), predicted=predicted)

    def costed(self, chosen: Chosen, clock: Clock) -> Step:
        """Work out the cost of these rows and the divisor of their loss, without reading text."""
        s, rows, stage = self.settings, chosen.rows, chosen.stage
        context = StepContext(
            seed=s.run.seed,
            step=clock.step + 1,
            progress=min(clock.consumed_tokens / s.optim.schedule_tokens, 1.0),
            seq_len=self.seq_len,
            layers=s.model.layers,
        )
        length = rows.stop - rows.start + self.extra
        filled, seen = rows.sums(length), rows.sums(rows.seen)
        positions = len(rows) * chosen.seq_len
        tokens = tokens_by_layer(s, context, chosen.seq_len)
        flops = flops_of_step(
            self.model,
            chosen.seq_len,
            tokens,
            filled=filled,
            squares=rows.sums(length**2),
            predicted=int(masked_tokens(length - self.extra).sum()) if self.special_ids else None,
        )
        after = Clock(
            step=context.step,
            consumed_tokens=clock.consumed_tokens + effective_tokens(filled, seen, tokens),
            real_tokens=clock.real_tokens + int(filled.sum() - seen.sum()),
            layer_tokens=clock.layer_tokens + len(rows) * sum(tokens),
            positions=clock.positions + positions,
            pieces=clock.pieces + len(length),
            flops=clock.flops + flops,
            cursor=chosen.after,
        )
        targets, of_answer = counts(
            rows,
            masked=self.special_ids is not None,
            per_document=s.optim.loss_per == "document",
        )
        difficulty = {f"difficulty_{name}": d for name, d in stage.difficulty.items()}
        if self.curriculum:
            difficulty["pool"] = stage.pool.size if stage.pool else len(self.samples)
        return Step(
            batch=None,
            rows=None,
            seq_len=chosen.seq_len,
            targets=targets,
            of_answer=of_answer,
            context=context,
            max_piece_len=stage.max_piece_len,
            tokens_by_layer=tokens,
            padding_share=1 - int(filled.sum()) / positions,
            pieces=len(length),
            attention_share=int((length**2).sum()) / (positions * chosen.seq_len),
            difficulty=difficulty,
            note=stage.note,
            before=clock,
            after=after,
        )

    # ---- what is ahead

    def full_step(self, clock: Clock) -> Step:
        """Work out the step at this clock if one piece filled each row; draw no samples."""
        stage, T = self.stage_at(clock.consumed_tokens), self.seq_len
        seq_len = T if self.settings.pack.on else stage.max_piece_len
        rows = Rows.of(np.tile([0, seq_len - self.extra], (self.draws_per_step, 1)))
        if seq_len < T and self.curriculum.reshapes:
            seq_len = reshaped_len(T, limit=seq_len)
            rows = reshape(np.tile([0, T], (self.draws_per_step, 1)), T, seq_len)
        return self.costed(Chosen(rows, seq_len, stage, after=clock.cursor), clock)

    def end(self, clock: Clock) -> Clock:
        """Return the clock at the end of the run, if all its rows from here on are full.

        Rows of a GPT without --pack are full, except the last of the stream. To be quick, it skips
        stretches of at most a thousandth of the budget whose first and last steps cost the same. So
        a level that comes and goes within a stretch is missed.

        Example: 4,096 tokens in steps of 256 are 16 equal steps; row lengths from 64 to 256 in
                 multiples of 8 make 25 kinds of steps
        """
        budget = self.settings.optim.tokens
        while clock.consumed_tokens < budget:
            step = self.full_step(clock)
            each = Clock(*(b - a for a, b in zip(clock[:-1], step.after[:-1], strict=True)))
            left = -(-(budget - clock.consumed_tokens) // each.consumed_tokens)
            count = max(min(left, budget // 1000 // each.consumed_tokens), 1)
            while count > 1:
                last = self.full_step(clock.later(each, count - 1))
                if last.after == clock.later(each, count):
                    break
                count //= 2
            clock = clock.later(each, count)
        return clock

    def ahead_in_words(self, clock: Clock, end: Clock) -> str:
        """Say what the rest of the run reads and computes, if its rows are full.

        Example: 489 steps, 2,002,944 tokens of text (0.73 epochs), 11.9 TFLOP
        """
        tokens = end.real_tokens - clock.real_tokens
        epochs = tokens / max(self.store.meta["train_tokens"], 1)
        rows = ", if every row is full" if self.has_documents else ""
        warning = f"; {REPEATED}" if epochs > MANY_EPOCHS else ""
        return (
            f"{end.step - clock.step:,} steps, {tokens:,} tokens of text ({epochs:,.2f} epochs),"
            f" {short(end.flops - clock.flops, 'FLOP')}{rows}{warning}"
        )

    def beside_plain(self, clock: Clock, end: Clock, plain_end: Clock) -> str:
        """Compare the rest of the run with one without techniques; "" if they differ by under 10 %.

        The --tokens that would read the same amount of text are found by proportion, because
        schedules are shares of the budget.

        Example: reads 1.41 times the text of the same run without techniques and uses 0.94 times
                 its FLOPs; for the same text: --tokens 1.42M
        """
        if end == clock:  # only the last evaluation is left
            return ""
        of_text, of_flops = (
            (getattr(end, what) - getattr(clock, what))
            / (getattr(plain_end, what) - getattr(clock, what))
            for what in ("real_tokens", "flops")
        )
        if all(1 / 1.1 < ratio < 1.1 for ratio in (of_text, of_flops)):
            return ""
        same = short(self.settings.optim.tokens / of_text).replace(" ", "")
        advice = f"; for the same text: --tokens {same}" * (clock.step == 0 and of_text > 1.1)
        return (
            f"reads {of_text:.3g} times the text of the same run without techniques and uses"
            f" {of_flops:.3g} times its FLOPs{advice}"
        )

    def spent(self, run: Run) -> str:
        """Say what the run has read and computed, and what it would have without techniques.

        Example: read 3,953,296 tokens in 27.6 TFLOP and 0:03:55 of steps; a plain run of the same
                 --tokens reads 2,203,648 in 31.3 TFLOP
        """
        steps = (line for line in read_log(run.folder) if line["event"] == "train")
        seconds = sum(line["ms"] for line in steps) / 1e3
        taken = f"read {run.clock.real_tokens:,} tokens in {short(run.clock.flops, 'FLOP')}"
        taken = f"{taken} and {duration(seconds)} of steps"
        if not any(getattr(self.settings, name).on for name in TECHNIQUES):
            return taken
        end = self.plain().end(Clock())
        plain = f"{end.real_tokens:,} in {short(end.flops, 'FLOP')}"
        return f"{taken}; a plain run of the same --tokens reads {plain}"

    def plain(self) -> "Plan":
        """Make the plan of the same run with all techniques off."""
        off = {name: type(getattr(self.settings, name))() for name in TECHNIQUES}
        settings = replace(self.settings, **off)
        return Plan(settings, self.store, self.special_ids, self.runtime, self.model)

    # ---- which samples

    def check_pairs(self) -> None:
        """Refuse --nsp if fewer than two of the first million samples have at least two tokens."""
        start, stop = self.samples.spans(np.arange(min(len(self.samples), 1 << 20))).T
        if (stop - start >= 2).sum() < 2:
            lacks = f"{self.store.path} has fewer than two pieces of two tokens or more to pair"
            raise ValueError(f"--nsp: {lacks}: leave out --nsp, or name another store with --data")

    def stage_at(self, consumed_tokens: int) -> Stage:
        """Return the longest piece and the pool of samples allowed at one point of the run."""
        if self.curriculum is None:
            return Stage(difficulty={}, max_piece_len=self.seq_len, pool=None, note="")
        return self.curriculum.at(consumed_tokens)

    def cursor_at(self, consumed_tokens: int, last: Cursor) -> Cursor:
        """Return the cursor to draw from now; if the pool has changed, start a new shuffle here."""
        if self.stage_at(consumed_tokens).pool != self.stage_at(last.drawn_at_tokens).pool:
            last = last._replace(stage_first_draw=last.first_draw)
        return last._replace(drawn_at_tokens=consumed_tokens)

    def samples_of(self, cursor: Cursor, steps: int = 1) -> tuple[np.ndarray, Cursor]:
        """Draw the samples of some steps, from the pool allowed when the cursor was set."""
        pool = self.stage_at(cursor.drawn_at_tokens).pool
        count = steps * self.draws_per_step
        return draw(self.samples, pool, cursor, count=count, seed=self.settings.run.seed)

    # ---- which rows

    def unpacked_rows(self, clock: Clock) -> Chosen:
        """Give each sample a row, cut off at the length that the stage allows (truncation).

        If a curriculum filters a BERT's samples, many are short, so the rows are only as long as
        the longest of them. With seqlen-reshape nothing is cut off: a sample is spread over as many
        rows as it fills.
        """
        stage = self.stage_at(clock.consumed_tokens)
        cursor = self.cursor_at(clock.consumed_tokens, clock.cursor)
        spans, after = self.samples_of(cursor)
        seq_len = stage.max_piece_len
        if seq_len < self.seq_len and self.curriculum.reshapes:
            seq_len = reshaped_len(self.seq_len, limit=seq_len)
            stage = stage._replace(max_piece_len=seq_len)
            rows = reshape(spans, self.seq_len, seq_len)
        else:
            start, stop = spans.T
            stop = np.minimum(stop, start + seq_len - self.extra)
            if self.special_ids and stage.pool:
                longest = int((stop - start).max()) + self.extra
                seq_len = min(-(-longest // MULTIPLE) * MULTIPLE, seq_len)
            rows = self.rows_of(np.stack((start, stop), axis=1), cursor)
        return Chosen(rows, seq_len, stage, after)

    def rows_of(self, pieces: np.ndarray, cursor: Cursor) -> Rows:
        """Give each piece drawn at this cursor a row; with --nsp, turn pieces into pairs first."""
        if not self.settings.model.nsp:
            return Rows.of(pieces)
        spans, pairs = sentence_pairs(pieces, self.settings.run.seed, "nsp", cursor.first_draw)
        return Rows.of(spans, pairs=pairs)

    def packed_rows(self, clock: Clock) -> Chosen:
        """Collect a step's packed rows, heaviest first, so that `Rows.of_rank` shares work equally.

        There are as many as without packing, or with --pack-batch documents as many as the same
        samples fill.
        """
        parts = list(self.windows(clock))
        rows = Rows.join([window.rows.take(numbers) for window, numbers, _ in parts])
        work = rows.sums((rows.stop - rows.start + self.extra) ** 2)  # scores in attention
        window, _, after = parts[-1]
        longest = max(part.stage.max_piece_len for part, _, _ in parts)
        return Chosen(
            rows=rows.take(np.argsort(-work, kind="stable")),
            seq_len=self.seq_len,
            stage=window.stage._replace(max_piece_len=longest),
            after=after,
        )

    def windows(self, clock: Clock) -> Iterator[tuple[Chosen, np.ndarray, Cursor]]:
        """Find the rows of a step, in as many windows as needed.

        Yields: a window, the numbers of the rows to take from it, and the cursor after them
        """
        cursor, rows_left = clock.cursor, self.draws_per_step
        while rows_left:
            if cursor.row == 0:  # a window keeps the stage at which it begins
                cursor = self.cursor_at(clock.consumed_tokens, cursor)
            window = self.window(cursor._replace(row=0))
            size = len(window.rows)
            if self.settings.pack.batch == "documents":  # a window is one step
                rows_left = size
            stop = min(cursor.row + rows_left, size)
            numbers = np.arange(cursor.row, stop)
            rows_left -= len(numbers)
            cursor = cursor._replace(row=stop) if stop < size else window.after
            yield window, numbers, cursor

    def packed_window(self, cursor: Cursor) -> Chosen:
        """Pack the samples of one window together, and put the rows back into random order.

        The result depends only on where the window begins: nothing is carried over between windows,
        so a sample is always in a row of the window that drew it. With 16 rows of 256 a step,
        packing each step by itself leaves 4 % padding, packing 16 steps together 0.5 %. The packer
        returns the rows with the longest pieces first, which would sort the steps by length. Sorted
        by the draw of their first piece instead, rows are as shuffled as the samples, and full rows
        keep their order.
        """
        stage = self.stage_at(cursor.drawn_at_tokens)
        spans, after = self.samples_of(cursor, steps=self.window_steps)
        alone = self.rows_of(cut(spans, stage.max_piece_len - self.extra), cursor)
        packs = packing.pack_lengths(
            alone.stop - alone.start + self.extra,
            self.seq_len,
            packer=self.settings.pack.packer,
            max_per_row=self.settings.pack.max_per_row,
        )
        by_first = np.argsort(packs.items[packs.offsets[:-1]])
        return Chosen(
            rows=alone.packed(packs.items, packs.offsets).take(by_first),
            seq_len=self.seq_len,
            stage=stage,
            after=after,
        )


def tokens_by_layer(settings: Config, context: StepContext, seq_len: int) -> list[int]:
    """Count the tokens of a full row that each layer sees in a step, with the techniques in use."""
    tokens = [seq_len] * settings.model.layers
    if settings.ltd.on:
        tokens = ltd.tokens_by_layer(settings.ltd, context, tokens)
    if settings.pseudo.on:
        tokens = pseudo.tokens_by_layer(settings.pseudo, context, tokens)
    return tokens


def draw(
    samples: Samples | MixedSamples, pool: Pool | None, cursor: Cursor, *, count: int, seed: int
) -> tuple[np.ndarray, Cursor]:
    """Draw `count` samples from the pool, starting at the cursor.

    Each stage shuffles its pool anew for every pass, so no sample repeats before all have been
    drawn. If several metrics filter the samples, a draw that one of them rejects is skipped.

    Args:    pool the curriculum's pool of samples, sorted by difficulty; None: every sample
             seed the run's
    Returns: (count, 2) spans of tokens, and the cursor of the next draw
    """
    first, stage_start = cursor.first_draw, cursor.stage_first_draw
    key = seed_of(seed, "stage", stage_start) if stage_start else seed
    draws_per_sample = pool.reach / max(pool.size, 1) if pool else 1  # 1 with a single filter
    ids = np.empty(0, np.int64)
    while len(ids) < count:
        wanted = asked = count - len(ids)
        if draws_per_sample > 1:  # a few more than are needed on average
            asked = min(int(1.1 * draws_per_sample * wanted) + 64, SCAN)
        numbers = np.arange(first - stage_start, first - stage_start + asked)
        if pool:
            candidates = pool.ids(shuffled(numbers, pool.reach, key))
        else:
            candidates = samples.shuffled(numbers, key)
        accepted = np.flatnonzero(candidates >= 0)[:wanted]
        ids = np.concatenate((ids, candidates[accepted]))
        enough = len(accepted) == wanted
        first += int(accepted[-1]) + 1 if enough else asked
    return samples.spans(ids), cursor._replace(first_draw=first)


def read_ahead(plan: Plan, clock: Clock, device: torch.device) -> Iterator[tuple[Step, float]]:
    """Yield the remaining steps, each with the milliseconds that training waited for it.

    While one step computes, a thread plans the next, reads its rows and sends them to the device.
    """

    def use_device() -> None:
        """Select the GPU for this thread too, or page-locked memory would come from the first."""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def read(clock: Clock) -> Step | None:
        if clock.consumed_tokens >= plan.settings.optim.tokens:
            return None
        step = plan(clock)
        return step._replace(batch=step.batch.to(device))

    with ThreadPoolExecutor(1, initializer=use_device) as loader:
        upcoming = loader.submit(read, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            if step is None:
                return
            upcoming = loader.submit(read, step.after)
            yield step, waited_ms


def announce(plan: Plan, run: Run, micro_batch: int) -> None:
    """Print what is trained, on what, and what lies ahead: all that --dry-run prints.

    Args: micro_batch rows that a rank runs through the model together
    """
    s, runtime, model, store = plan.settings, plan.runtime, plan.model, plan.store
    say, clock = runtime.say, run.clock
    ends = {"ahead": plan.end(clock)}
    if any(getattr(s, name).on for name in TECHNIQUES):
        ends["without techniques"] = plan.plain().end(clock)
        if beside := plan.beside_plain(clock, *ends.values()):
            say(f"\033[1m{beside}\033[0m" if sys.stdout.isatty() else beside)
    name = f"from {s.model.init}" if s.model.init else s.model.size
    say(f"{s.model.model} {name}: {parameters_in_words(model)}, {runtime.why}")
    shards = runtime.world_size if s.run.fsdp else 1
    named = dict(empty_model(model).named_parameters())
    state = state_bytes(named, muon=s.optim.optimizer == "muon", shards=shards)
    sizes = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in state.items())
    say(f"memory: {sizes}{' a rank' if shards > 1 else ''}, and activations")
    rows = s.optim.batch_tokens // plan.seq_len
    each = f" on each of {runtime.world_size} ranks" if runtime.world_size > 1 else ""
    batches = f"{several(rows, 'row')} of {plan.seq_len} tokens a step"
    say(f"batches: {batches}, in micro-batches of {several(micro_batch, 'row')}{each}")
    if plan.has_documents:
        impl = chosen_impl(
            runtime.device.type,
            runtime.dtype,
            head_width=model.head_width,
            dropout=model.dropout,
            compiled=s.run.compile == "on",
        )
        say(f"attention: {impl}, {IMPLS[impl]}")
    say(f"data: {store.meta['train_tokens']:,} training tokens in {store.path}")
    if isinstance(plan.samples, MixedSamples):
        say(f"mixture: {plan.samples.passes(s.optim.tokens)}")
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")
    for name, end in ends.items():
        say(f"{name}: {plan.ahead_in_words(clock, end)}")
