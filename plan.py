"""From the clock to the next step: which samples are drawn, which rows they share, who reads them.

This file continues the walk that data.py begins, in the order of the calls: 3 documents, 4
samples, rows of 8 tokens, 4 draws per step, two ranks, --pack --pack-batch documents.

    clock    step 0: 0 tokens consumed, the next draw is number 0
    limits   pieces of at most 8 tokens, of any of the samples     Plan.limits_at, curriculum.py
    draw     draws 0 to 3 give samples 3, 0, 2, 1                  draw_samples, clock.shuffled
    cut      into pieces of at most 8 tokens, which all are        data.cut
    rows     of all ranks: parsimon | less.is. | y.                packing.pack_lengths
    Batch    rank 0 reads the first row and a blank one, rank 1    Rows.of_rank, GptTask.batch
             the other two: heavy rows are dealt out first
    Step     18 targets on all ranks; the next clock: step 1,      Plan.clock_after
             18 tokens consumed, the next draw is number 4

A plan is a pure function of (settings, store, clock). Every rank plans the rows of all ranks, which
needs only their lengths, and then reads its own. A keyed permutation turns the number of a draw
into a sample, so a run that was killed continues with the rows it would have read.

Here a window is one step, as it is without --pack. A packed GPT's steps share windows by default:
the samples of 16 steps are packed together, under the limits that hold where the window begins.
With 4 rows per step, 64 draws fill 36 rows of this example. The clock's cursor holds the first draw
of the window, how many of its rows have been used, at how many consumed tokens it was drawn, and
the draw at which the shuffle of the present pool began.

    step 1   first_draw 0, row 0       reads rows 0 to 3 of the window
         9   first_draw 0, row 32      its last four; a step may also begin the next window
        10   first_draw 64, row 0      rows 0 to 3 of the window from draw 64
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import ltd
import packing
import pseudo
from analyze import rankings_of
from bert import check_pairs
from config import Config, Task, samples_kind
from curriculum import SCAN, Curriculum, Limits, Pool, parse_metrics
from data import Rows, Samples, fitted, loss_divisor, open_samples, reshape, reshaped_len
from mixture import AnyStore, MixedSamples
from model import Batch, TransformerConfig
from support.clock import MULTIPLE, Clock, Cursor, StepContext, effective_tokens, seed_of, shuffled
from support.numbers import several, short
from support.runtime import Runtime, on_device
from support.sizes import flops_of_step

WINDOW_STEPS = 16  # steps whose samples are packed together, which gives rows for about ten steps
EXACT_STEPS = 20  # a forecast of so many steps is exact
FORECAST_POINTS = 40  # of a longer run, at which one window is planned


class Step(NamedTuple):
    """All that the next optimizer step needs, decided before it starts."""

    batch: Batch  # this rank's rows, on its device; the last ones may be blank
    row_numbers: Tensor  # (B,) int64, the numbers of these rows among the rows of all ranks
    window: "Window"  # the rows of all ranks
    divisor: int  # of the sum of losses: the targets of all ranks, or their pieces
    context: StepContext
    tokens_by_layer: list[int]  # how many tokens of a full row each layer sees
    before: Clock
    after: Clock


class Window(NamedTuple):
    """Rows of all ranks: those that are packed together, or those of one step."""

    rows: Rows
    seq_len: int  # tokens in a row
    limits: Limits  # under which their samples were drawn
    next_cursor: Cursor  # where the rows after these begin


class Plan:
    """Turns a clock into a step: curriculum first, then packing, then this rank's rows."""

    def __init__(
        self,
        settings: Config,
        store: AnyStore,
        task: Task,
        runtime: Runtime,
        model: TransformerConfig,
    ):
        self.settings, self.store, self.task, self.runtime = settings, store, task, runtime
        self.model = model  # to count the FLOPs of a step
        self.seq_len = settings.data.seq_len
        self.rows_per_step = settings.optim.batch_tokens // self.seq_len
        self.steps_share_windows = settings.pack.on and settings.pack.batch == "rows"
        self.samples = open_samples(store, samples_kind(settings), self.seq_len)
        if task.nsp:
            check_pairs(self.samples)
        self.special_tokens = self.samples.special_tokens  # of a BERT, in every piece
        self.last_window: tuple[Cursor, Window] | None = None  # the next step takes more of it
        self.curriculum: Curriculum | None = None
        if settings.curriculum.on:
            flags, seq_len = settings.curriculum, self.seq_len
            rankings = rankings_of(self.samples, flags.metrics, runtime)
            pacings = parse_metrics(flags, seq_len, settings.pack.on)
            self.curriculum = Curriculum(pacings, settings.optim.schedule_tokens, seq_len, rankings)
            if self.curriculum.reshapes and store.has_prompts:
                raise ValueError("--curriculum seqlen-reshape would divide answers: use seqlen")

    def __call__(self, clock: Clock) -> Step:
        """Plan the step after this clock, and read this rank's rows."""
        runtime, context = self.runtime, self.context_at(clock)
        window = self.rows_of_step(clock)
        numbers, rows = window.rows.of_rank(runtime.rank, runtime.world_size)
        key = (context.seed, "mask", context.step)
        batch = self.task.batch(self.store, rows, window.seq_len, window.rows, *key)
        if self.settings.pack.on and not self.settings.pack.mask:
            row = torch.arange(window.seq_len).expand_as(batch.tokens)
            whole = torch.zeros_like(batch.tokens)
            batch = replace(batch, positions=row, doc_ids=whole, is_plain=True)
        return Step(
            batch=batch.to(runtime.device),
            row_numbers=on_device(torch.from_numpy(numbers), runtime.device),
            window=window,
            divisor=loss_divisor(self.task, self.store, window.rows),
            context=context,
            tokens_by_layer=self.tokens_by_layer(context, window.seq_len),
            before=clock,
            after=self.clock_after(clock, window),
        )

    # ---- which rows

    def rows_of_step(self, clock: Clock) -> Window:
        """Choose the rows of all ranks.

        Packed rows are sorted, heaviest first, so that `Rows.of_rank` gives ranks equal work.
        """
        if self.steps_share_windows:
            window = self.next_of_windows(clock)
        else:
            window = self.window_at(self.cursor_at(clock.consumed_tokens, clock.cursor))
        if not self.settings.pack.on:
            return window
        lengths = window.rows.lengths + self.special_tokens
        scores = window.rows.sum_by_row(lengths**2)  # in attention
        rows = window.rows.select(np.argsort(-scores, kind="stable"))
        return window._replace(rows=rows)

    def next_of_windows(self, clock: Clock) -> Window:
        """Take a step's rows from the window in use, and if it ends, from the next one."""
        cursor, missing = clock.cursor, self.rows_per_step
        parts: list[Rows] = []
        longest = 0
        while missing:
            if cursor.row == 0:  # a window keeps the limits of its beginning
                cursor = self.cursor_at(clock.consumed_tokens, cursor)
            window = self.window_at(cursor._replace(row=0))
            stop = min(cursor.row + missing, len(window.rows))
            parts.append(window.rows.select(np.arange(cursor.row, stop)))
            missing -= stop - cursor.row
            is_used_up = stop == len(window.rows)
            cursor = window.next_cursor if is_used_up else cursor._replace(row=stop)
            longest = max(longest, window.limits.max_piece_len)
        limits = window.limits._replace(max_piece_len=longest)
        return Window(Rows.join(parts), self.seq_len, limits, next_cursor=cursor)

    def cursor_at(self, consumed_tokens: int, last: Cursor) -> Cursor:
        """Return the cursor to draw from now; if the pool has changed, start a new shuffle here."""
        if self.limits_at(consumed_tokens).pool != self.limits_at(last.drawn_at_tokens).pool:
            last = last._replace(pool_first_draw=last.first_draw)
        return last._replace(drawn_at_tokens=consumed_tokens)

    def limits_at(self, consumed_tokens: int) -> Limits:
        """Return the longest piece and the pool of samples allowed at one point of the run."""
        if self.curriculum is None:
            return Limits(difficulty={}, max_piece_len=self.seq_len, pool=None, note="")
        return self.curriculum.at(consumed_tokens)

    def window_at(self, cursor: Cursor) -> Window:
        """Draw the samples of a window, and put them into rows.

        The result depends only on where the window begins: nothing is carried over between windows,
        so a sample is always in a row of the window that drew it.
        """
        if self.last_window and self.last_window[0] == cursor:
            return self.last_window[1]
        limits, seed = self.limits_at(cursor.drawn_at_tokens), self.settings.run.seed
        count = self.rows_per_step * (WINDOW_STEPS if self.steps_share_windows else 1)
        spans, after = draw_samples(self.samples, limits.pool, cursor, count=count, seed=seed)
        key = (seed, "nsp", cursor.first_draw)  # of how a BERT reads the spans
        if self.settings.pack.on:
            window = Window(self.packed(spans, limits, key), self.seq_len, limits, after)
        else:
            window = self.unpacked(spans, limits, key, after)
        self.last_window = cursor, window
        return window

    def packed(self, spans: np.ndarray, limits: Limits, key: tuple) -> Rows:
        """Cut the samples (n, 2) into pieces, and pack these into full rows.

        With 16 rows of 256 a step, packing each step by itself leaves 4 % padding, packing 16 steps
        together 0.5 %. The packer returns the rows with the longest pieces first, which would sort
        the steps by length. Sorted by the draw of their first piece instead, rows are as shuffled
        as the samples.
        """
        spans = fitted(self.store, spans, limits.max_piece_len - self.special_tokens)
        pieces = self.task.pieces(spans, *key)
        lengths = pieces["stop"] - pieces["start"] + self.special_tokens
        config = self.settings.pack
        packs = packing.pack_lengths(lengths, self.seq_len, config.packer, config.max_per_row)
        rows = Rows(pieces[packs.items], packs.offsets)
        return rows.select(np.argsort(packs.items[packs.offsets[:-1]]))

    def unpacked(self, spans: np.ndarray, limits: Limits, key: tuple, after: Cursor) -> Window:
        """Give each sample (n, 2) a row, cut off at the length that the limits allow (truncation).

        If a curriculum filters samples, many may be short, so the rows are only as long as the
        longest of them. With seqlen-reshape nothing is cut off: a sample is spread over as many
        rows as it fills.
        """
        seq_len = limits.max_piece_len
        if seq_len < self.seq_len and self.curriculum.reshapes:
            seq_len = reshaped_len(self.seq_len, limit=seq_len)
            rows = reshape(spans, self.seq_len, seq_len)
            return Window(rows, seq_len, limits._replace(max_piece_len=seq_len), after)
        if self.store.has_prompts:  # truncated, some would have no target
            spans = fitted(self.store, spans, seq_len)
        start, stop = spans.T
        stop = np.minimum(stop, start + seq_len - self.special_tokens)
        if limits.pool:
            longest = int((stop - start).max()) + self.special_tokens
            seq_len = min(-(-longest // MULTIPLE) * MULTIPLE, seq_len)
        pieces = self.task.pieces(np.stack((start, stop), axis=1), *key)
        return Window(Rows(pieces, np.arange(len(pieces) + 1)), seq_len, limits, after)

    # ---- what they cost

    def context_at(self, clock: Clock) -> StepContext:
        seed, layers = self.settings.run.seed, self.settings.model.layers
        progress = min(clock.consumed_tokens / self.settings.optim.schedule_tokens, 1.0)
        return StepContext(seed, clock.step + 1, progress, self.seq_len, layers)

    def tokens_by_layer(self, context: StepContext, seq_len: int) -> list[int]:
        """Count the tokens of a full row that each layer sees, with the techniques in use."""
        settings = self.settings
        tokens = [seq_len] * settings.model.layers
        if settings.ltd.on:
            tokens = ltd.tokens_by_layer(settings.ltd, context, tokens)
        if settings.pseudo.on:
            tokens = pseudo.tokens_by_layer(settings.pseudo, context, tokens)
        return tokens

    def clock_after(self, before: Clock, window: Window) -> Clock:
        """Advance the clock by a step with these rows: the definition of what it counts."""
        tokens_by_layer = self.tokens_by_layer(self.context_at(before), window.seq_len)
        rows, positions = window.rows, len(window.rows) * window.seq_len
        length = rows.lengths + self.special_tokens
        filled, seen = rows.sum_by_row(length), rows.sum_by_row(rows.pieces["seen"])
        about = {"filled": filled, "squares": rows.sum_by_row(length**2)}
        about["targets"] = int(self.task.targets(self.store, rows).sum())
        flops = flops_of_step(self.model, window.seq_len, tokens_by_layer, **about)
        consumed = effective_tokens(filled, seen, tokens_by_layer, self.seq_len)
        if consumed == 0:  # the run would never end
            step = f"step {before.step + 1} has {int(filled.sum())} tokens"
            raise ValueError(f"--batch-tokens: {step}, too few to consume one: choose more")
        return Clock(
            step=before.step + 1,
            consumed_tokens=before.consumed_tokens + consumed,
            real_tokens=before.real_tokens + int(filled.sum() - seen.sum()),
            layer_tokens=before.layer_tokens + len(rows) * sum(tokens_by_layer),
            positions=before.positions + positions,
            flops=before.flops + flops,
            cursor=window.next_cursor,
        )

    def columns(self, step: Step) -> dict[str, object]:
        """Describe a step for the log; the clock adds its own columns."""
        limits, rows = step.window.limits, step.window.rows
        length = rows.lengths + self.special_tokens
        columns = {
            "max_piece_len": limits.max_piece_len,
            "kept_tokens": min(filter(None, step.tokens_by_layer)),  # 0: a layer that is skipped
            "padding_share": round(1 - int(length.sum()) / (len(rows) * step.window.seq_len), 6),
            "pieces": len(length),
        }
        columns |= {f"difficulty_{name}": level for name, level in limits.difficulty.items()}
        if self.curriculum:
            columns["pool"] = limits.pool.size if limits.pool else len(self.samples)
        return columns

    # ---- what lies ahead

    def forecast(self, clock: Clock) -> "Forecast":
        """Plan the rest of a short run; estimate that of a longer one from 40 points of it."""
        now, end = clock, self.settings.optim.tokens
        while now.step < clock.step + EXACT_STEPS and now.consumed_tokens < end:
            now = self.clock_after(now, self.rows_of_step(now))
        if now.consumed_tokens >= end:
            tokens, flops = now.real_tokens - clock.real_tokens, now.flops - clock.flops
            return Forecast(now.step - clock.step, tokens, flops)
        budget = end - clock.consumed_tokens
        steps = tokens = flops = 0.0
        for point in range(FORECAST_POINTS):  # plan a window in the middle of each fortieth
            consumed = clock.consumed_tokens + (2 * point + 1) * budget // (2 * FORECAST_POINTS)
            draws = clock.cursor.first_draw + point * self.rows_per_step * WINDOW_STEPS
            cursor = self.cursor_at(consumed, clock.cursor._replace(first_draw=draws, row=0))
            at = clock._replace(step=clock.step + round(steps), consumed_tokens=consumed)
            window = self.window_at(cursor)
            after = self.clock_after(at, window)
            windows = budget / FORECAST_POINTS / max(after.consumed_tokens - consumed, 1)
            rows = len(window.rows)
            steps += windows * (rows / self.rows_per_step if self.steps_share_windows else 1)
            tokens += windows * (after.real_tokens - at.real_tokens)
            flops += windows * (after.flops - at.flops)
        whole_steps = math.ceil(round(steps, 6))  # the last step may overshoot the budget
        overshoot = whole_steps / max(steps, 1e-9)
        return Forecast(whole_steps, round(tokens * overshoot), flops * overshoot)

    def without_techniques(self) -> "Plan":
        """Make the plan of the same run with all techniques off."""
        off = {f.name: f.type() for f in fields(self.settings) if hasattr(f.type, "on")}
        settings = replace(self.settings, **off)
        return Plan(settings, self.store, self.task, self.runtime, self.model)


class Forecast(NamedTuple):
    steps: int
    tokens: int  # of text
    flops: float

    def __str__(self) -> str:
        """Example: 489 steps, 2,002,944 tokens of text, 11.9 TFLOP"""
        flops = short(self.flops, "FLOP")
        return f"{several(self.steps, 'step')}, {self.tokens:,} tokens of text, {flops}"


def draw_samples(
    samples: Samples | MixedSamples, pool: Pool | None, cursor: Cursor, *, count: int, seed: int
) -> tuple[np.ndarray, Cursor]:
    """Draw `count` samples from the pool, starting at the cursor.

    A pool is shuffled anew for every pass, so no sample repeats before all have been
    drawn. If several metrics filter the samples, a draw that one of them rejects is skipped.

    Args:    pool the curriculum's pool of samples, sorted by difficulty; None: every sample
             seed the run's
    Returns: (count, 2) spans of tokens, and the cursor of the next draw
    """
    first, pool_start = cursor.first_draw, cursor.pool_first_draw
    key = seed_of(seed, "stage", pool_start) if pool_start else seed
    draws_per_sample = pool.reach / max(pool.size, 1) if pool else 1  # 1 with a single filter
    ids = np.empty(0, np.int64)
    while len(ids) < count:
        wanted = asked = count - len(ids)
        if draws_per_sample > 1:  # a few more than are needed on average
            asked = min(int(1.1 * draws_per_sample * wanted) + 64, SCAN)
        numbers = np.arange(first - pool_start, first - pool_start + asked)
        if pool:
            candidates = pool.ids(shuffled(numbers, pool.reach, key))
        else:
            candidates = samples.shuffled(numbers, key)
        accepted = np.flatnonzero(candidates >= 0)[:wanted]
        ids = np.concatenate((ids, candidates[accepted]))
        enough = len(accepted) == wanted
        first += int(accepted[-1]) + 1 if enough else asked
    return samples.spans(ids), cursor._replace(first_draw=first)


def read_ahead(plan: Plan, clock: Clock) -> Iterator[tuple[Step, float]]:
    """Yield the remaining steps, each with the milliseconds that training waited for it.

    While one step computes, a thread plans the next, reads its rows and sends them to the device.
    """
    device = plan.runtime.device

    def use_device() -> None:
        """Select the GPU for this thread too, or page-locked memory would come from the first."""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def read(clock: Clock) -> Step | None:
        return plan(clock) if clock.consumed_tokens < plan.settings.optim.tokens else None

    with ThreadPoolExecutor(1, initializer=use_device) as planner:
        upcoming = planner.submit(read, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            if step is None:
                return
            upcoming = planner.submit(read, step.after)
            yield step, waited_ms
