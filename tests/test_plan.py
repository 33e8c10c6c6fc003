"""The plan: every token a target once a pass, the same rows for any number of ranks."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import SMALL, refusal, walk
from small_stores import in_memory

import config
from bert import SpecialIds
from data import Rows
from kernels.cross_entropy import IGNORE
from plan import Plan, draw
from support.clock import Clock, Cursor
from support.runtime import Runtime
from support.store import Store, get_encoding

SPECIAL_IDS = SpecialIds.of(get_encoding("bytes"))


class Alone(Runtime):
    """A rank of several that never talks to the others: what it plans must not need them to."""

    def check_same(self, values):
        """Others have the same."""

    def on_each_machine(self, action):
        return action()


def plan(store, flags="", number=0, world=1):
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    special_ids = SPECIAL_IDS if "bert" in flags else None
    runtime = Alone(number, world, torch.device("cpu"), torch.float32, "")
    return Plan(settings, store, special_ids, runtime, config.transformer_config(settings, 320))


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


@pytest.fixture(scope="module")
def indexed(store, tmp_path_factory):
    """Plans over the small store whose indexes lie in a folder of this file's own."""
    folder = tmp_path_factory.mktemp("curriculum")

    def make(flags, number=0, world=1):
        index = f"--curriculum-index {folder}" if "--curriculum " in flags else ""
        return plan(store, f"{flags} {index}", number, world)

    return make


def clock_at(first_draw, consumed_tokens=0):
    """Between two windows or steps, with the next sample that of this draw."""
    cursor = Cursor(first_draw=first_draw, drawn_at_tokens=consumed_tokens)
    return Clock(consumed_tokens=consumed_tokens, cursor=cursor)


def rows_of_step(p, clock):
    return (p.packed_rows(clock) if p.settings.pack.on else p.unpacked_rows(clock)).rows


def drawn(plan, first, count, stage_start=0, pool=None):
    return draw(plan.samples, pool, Cursor(first, stage_start), count=count, seed=1337)


# ---- what is read


@pytest.mark.parametrize("flags", ["", "--pack --curriculum seqlen --curriculum-start 8"])
def test_every_training_token_is_a_target_once_a_pass(store, flags):
    """Streamed, or packed in short pieces: count what the rows of two passes predict."""
    p = plan(store, flags + " --tokens 1e9 --batch-tokens 65536")
    passes = 2 * len(p.samples)
    seen = np.zeros(store.meta["train_tokens"], dtype=int)
    window = (16 if p.settings.pack.on else 1) * p.draws_per_step
    for first in range(0, passes, window):
        clock = clock_at(first)
        rows = p.packed_window(clock.cursor).rows if flags else rows_of_step(p, clock)
        assert rows.sums(rows.stop - rows.start).max() <= 32
        assert rows.stop.max() <= store.meta["train_tokens"], "what is held out is never read"
        for start, stop in zip(rows.start, rows.stop, strict=True):
            seen[start:stop] += 1
    for start, stop in drawn(p, passes, first + window - passes)[0]:  # of a third pass
        seen[start:stop] -= 1
    assert (seen == 2).all()


def rows_as_pieces(rows):
    return sorted(tuple(rows.start[a:b].tolist()) for a, b in pairwise(rows.offsets))


def test_the_steps_in_the_header(store):
    """4 rows of 64 a step: where each begins, and that 64 draws are packed together.

    Steps take every row of every window once, in the windows' order.
    """
    size = "--seq-len 64 --batch-tokens 256 --tokens 20000"
    assert [step.before.cursor.first_draw for step in walk(plan(store, size), 3)] == [0, 4, 8]
    p = plan(store, f"{size} --pack")
    packed = walk(p, 45)
    positions = [(s.before.cursor.first_draw, s.before.cursor.row) for s in packed]
    assert positions[:3] == [(0, 0), (0, 4), (0, 8)]
    assert {first for first, _ in positions} >= {0, 64, 128}
    windows = Rows.join([p.packed_window(clock_at(first).cursor).rows for first in (0, 64, 128)])
    for number, step in enumerate(packed[: len(windows) // 4]):
        of_step = windows.take(np.arange(4 * number, 4 * number + 4))
        assert rows_as_pieces(p.packed_rows(step.before).rows) == rows_as_pieces(of_step)


RARE = "--model bert --nsp --curriculum length-rarity"
UNPACKED = [
    ("--pack --pack-max-per-row 1 --pack-batch rows", "--pack --pack-batch documents"),
    ("--model bert", "--model bert --pack --loss-per document"),
    (RARE, f"{RARE} --pack"),
]


@pytest.mark.parametrize(("alone", "packed"), UNPACKED)
def test_a_step_of_documents_has_those_of_the_unpacked_one(indexed, alone, packed):
    """The same pieces, targets and place on the clock, in fewer rows; so the same learning rate."""
    roomy = "--seq-len 1024 --batch-tokens 8192 --tokens 200K"
    one_a_row, together = (indexed(f"{flags} {roomy}") for flags in (alone, packed))
    for a, b in zip(walk(one_a_row, 12), walk(together, 12), strict=True):
        pieces = []
        for p, clock in ((one_a_row, a.before), (together, b.before)):
            rows = rows_of_step(p, clock)
            pieces.append(sorted(zip(rows.start.tolist(), rows.stop.tolist(), strict=True)))
        assert pieces[0] == pieces[1]
        counts = ("step", "consumed_tokens", "real_tokens", "pieces")
        assert [getattr(a.after, n) for n in counts] == [getattr(b.after, n) for n in counts]
        targets = b.pieces if "--loss-per" in packed else a.targets
        assert (a.pieces, a.difficulty, targets) == (b.pieces, b.difficulty, b.targets)
        assert len(b.batch.tokens) <= len(a.batch.tokens)
        assert (b.batch.targets != IGNORE).sum() == (a.batch.targets != IGNORE).sum()
    assert b.after.positions < a.after.positions


# ---- steps

FLAGS = [
    "--ltd --ltd-start 16",
    "--curriculum seqlen-reshape,rarity --curriculum-start 8,5",
    "--curriculum rarity,length --pack --curriculum-pace root:2,linear --curriculum-share 0.9,0.5",
    "--curriculum length --pack --pack-batch documents --curriculum-by value --curriculum-start 1",
    "--model bert --nsp",
    "--model bert --nsp --curriculum seqlen --curriculum-start 16 --pack --loss-per document",
    "--model bert --curriculum seqlen,rarity-mean --pack --pack-batch rows --ltd --ltd-start 16",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_a_step_follows_from_the_clock_alone_on_any_number_of_ranks(indexed, flags):
    """So a run resumes at every step: in a plan that saw nothing before, and in any order."""
    check_steps_follow_from_the_clock(partial(indexed, f"{flags} --tokens 3000"), 24)


def check_steps_follow_from_the_clock(make, count):
    """Args: make (rank, ranks) -> a plan"""
    steps, again = walk(make(), count), make()
    for whole in reversed(steps):
        alone = again(whole.before)
        assert alone.after == whole.after and alone.difficulty == whole.difficulty
        assert torch.equal(alone.batch.tokens, whole.batch.tokens)
        assert torch.equal(alone.batch.targets, whole.batch.targets)
    for world, some in ((2, steps[::8]), (3, steps[4::8]), (16, steps[-1:])):
        ranks = [make(number, world) for number in range(world)]
        for whole in some:
            parts = [rank(whole.before) for rank in ranks]
            for part in parts:
                assert part.columns() == whole.columns(), "what is logged"
                assert (part.targets, part.after) == (whole.targets, whole.after)
                assert part.batch.tokens.shape == parts[0].batch.tokens.shape, "as many rows"
            R = len(whole.batch.tokens)
            order = torch.cat([part.rows for part in parts]).argsort()
            for field in ("tokens", "targets"):
                rows = torch.cat([getattr(part.batch, field) for part in parts])[order]
                assert torch.equal(rows[:R], getattr(whole.batch, field))
            assert R <= len(rows) < R + world and (rows[R:] == IGNORE).all()
            documents = torch.cat([part.batch.with_documents().doc_ids for part in parts])[order]
            assert (documents[R:] == -1).all(), "blank rows, which nothing counts"


def test_counts(store):
    step = plan(store, "--pack")(Clock())
    real = int((step.batch.targets >= 0).sum())
    assert step.targets == real == step.after.real_tokens == step.after.consumed_tokens
    assert step.padding_share == pytest.approx(1 - real / 256) and step.after.positions == 256
    assert step.after.layer_tokens == 4 * 256

    step = plan(store, "--ltd --ltd-start 16")(Clock())
    assert min(step.tokens_by_layer) == 16 and step.after.real_tokens == 256
    assert step.after.layer_tokens == 8 * (2 * 32 + 2 * 16)
    assert step.after.consumed_tokens == 8 * 24  # a = (2 * 32 + 2 * 16) / 4

    step = plan(store, "--pack --curriculum seqlen --curriculum-start 8")(Clock())
    assert step.batch.tokens.shape == (8, 32), "packing shortens pieces, not rows"


def test_the_tokens_of_a_bert_are_those_it_reads_its_cls_and_sep_included(store):
    """Also under dropping: padding goes first, so short rows run whole and are counted whole."""
    for flags, layers in (("", 4 * [32]), (" --ltd --ltd-start 16", [32, 16, 16, 32])):
        p = plan(store, "--model bert" + flags)
        step = next(s for s in walk(p, 30) if s.batch.doc_ids is not None)
        lengths = (step.batch.doc_ids >= 0).sum(1).tolist()
        assert min(lengths) < 32
        consumed = step.after.consumed_tokens - step.before.consumed_tokens
        assert consumed == sum(sum(min(n, kept) for kept in layers) // 4 for n in lengths)
        assert step.after.real_tokens - step.before.real_tokens == sum(lengths)


def test_nsp_needs_two_pieces_of_two_tokens():
    only_one = in_memory(b"", b"a text of one piece", b"", b"held out", held_out=1)
    assert "fewer than two pieces of two tokens" in refusal(plan, only_one, "--model bert --nsp")


def test_packing_of_full_documents_is_the_plain_run():
    """Neutral is identity: documents of exactly a row's length make the same batches either way."""
    full = in_memory(*(range(n, n + 31) for n in range(40)))
    for packed, plain in zip(walk(plan(full, "--pack"), 40), walk(plan(full), 40), strict=True):
        assert packed.after[:6] == plain.after[:6]
        assert torch.equal(packed.batch.tokens, plain.batch.tokens)
        assert packed.batch.doc_ids is None and plain.batch.doc_ids is None


# ---- what a curriculum lets be drawn


def test_a_pool_grows_stage_by_stage_and_nothing_comes_twice_in_one(indexed):
    """Drawn ids lie in the pool of their step; within a stage each comes once before any twice.

    After the last stage come full passes.
    """
    p = indexed("--curriculum rarity --tokens 40000")
    stage_ids, since, steps = [], 0, walk(p, 150)
    for step in steps:
        if step.after.cursor.stage_first_draw != since:
            since, stage_ids = step.after.cursor.stage_first_draw, []
        pool = p.stage_at(step.before.consumed_tokens).pool
        spans = drawn(p, step.before.cursor.first_draw, p.draws_per_step, since, pool)[0]
        ids = ((spans[:, 0] - p.samples.start) // 32).tolist()
        reach = pool.reach if pool else len(p.samples)
        assert step.difficulty["pool"] == reach
        assert pool is None or set(ids) <= set(pool.filters[0][1].order[:reach].tolist())
        stage_ids += ids
        for first in range(0, len(stage_ids), reach):
            part = stage_ids[first : first + reach]
            assert len(set(part)) == len(part)
    stages = {step.after.cursor.stage_first_draw for step in steps}
    assert len(stages) == len({step.difficulty["pool"] for step in steps}) > 30, "one a pool"
    assert reach == len(p.samples)
    for number in range(2):
        assert len({*drawn(p, since + number * reach, reach, since)[0][:, 0].tolist()}) == reach


def test_a_pool_smaller_than_a_batch_fills_it(indexed):
    """DeepSpeed's data_sampler.py wraps once, and yields short batches after that."""
    p = indexed("--curriculum length --pack --curriculum-by value --curriculum-start 1")
    small = p.stage_at(0).pool
    assert small.reach < 16 * p.draws_per_step, "it takes several passes"
    spans, after = drawn(p, 0, 16 * p.draws_per_step, 0, small)
    assert len(spans) == after.first_draw == 16 * p.draws_per_step
    counts = np.unique(spans[:, 0], return_counts=True)[1]
    assert len(counts) == small.reach and counts.max() - counts.min() <= 1


def test_the_stage_travels_with_its_batch(indexed):
    """Planned ahead or not, a step names the difficulty under which its rows were drawn.

    Also in a packed step that ends one window of samples and begins the next, with longer pieces.
    """
    p = indexed("--curriculum seqlen,rarity --curriculum-start 8,1 --tokens 10000")
    steps = walk(p, 50)  # all drawn before any is looked at
    for step in steps:
        fresh = p.curriculum.at(step.before.consumed_tokens)
        assert step.difficulty["difficulty_seqlen"] == fresh.difficulty["seqlen"]
        assert step.difficulty["difficulty_rarity"] == fresh.difficulty["rarity"]
        assert step.batch.tokens.shape[1] == step.max_piece_len == fresh.max_piece_len
    assert len({step.difficulty["difficulty_rarity"] for step in steps}) > 20
    flags = "--pack --curriculum seqlen --curriculum-start 8 --curriculum-pace linear"
    flags += " --curriculum-share 1 --tokens 10000"
    for model in ("", "--model bert"):  # whose pieces make room for [CLS] and [SEP]
        steps = walk(indexed(f"{flags} {model}"), 35)
        assert len({step.max_piece_len for step in steps}) > 2
        for step in steps:
            positions = step.batch.positions
            assert positions is None or positions.max() + 1 == step.max_piece_len


def test_reshaped_rows_show_the_same_tokens(store, indexed):
    """Nothing lost, nothing twice, also where rows of 40 in three parts of 16 overlap."""
    size = "--seq-len 40 --batch-tokens 320"
    curriculum = "seqlen-reshape --curriculum-start 8 --curriculum-share 1 --curriculum-pace linear"
    p = indexed(f"{size} --curriculum {curriculum}")
    plain, widths = plan(store, size), set()
    for number in range(8):
        clock = clock_at(8 * number, consumed_tokens=400 * number)
        step, whole = p(clock), plain(clock)
        widths.add(step.batch.tokens.shape[1])
        assert step.batch.tokens.shape[1] <= step.difficulty["difficulty_seqlen-reshape"] < 40
        targets = step.batch.targets[step.batch.targets != IGNORE]
        assert sorted(targets.tolist()) == sorted(whole.batch.targets.flatten().tolist())
        assert step.targets == whole.targets == 320 and step.after.real_tokens == 320
    assert widths == {8, 16, 24}
