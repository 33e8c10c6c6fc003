"""The plan: every token is a target once per pass; rows do not depend on the number of ranks."""

import random
import shutil
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import BYTES, SMALL, build, first_steps, refusal
from small_stores import in_memory

import config
from data import Rows
from kernels.cross_entropy import IGNORE
from plan import Plan, draw_samples
from support.clock import Clock, Cursor
from support.runtime import Runtime
from support.store import Store


class Isolated(Runtime):
    """One of several ranks, unable to communicate: planning must not need the other ranks."""

    def check_same(self, values):
        """Do not compare with other ranks."""

    def on_each_machine(self, action):
        return action()


def plan(store, flags="", number=0, world=1):
    settings = build(f"{SMALL} {flags}")
    runtime = Isolated(number, world, torch.device("cpu"), torch.float32, "")
    task, model = config.task_of(settings, BYTES), config.transformer_config(settings, 320)
    return Plan(settings, store, task, runtime, model)


@pytest.fixture(scope="module")
def store(store_dir, tmp_path_factory):
    """A copy of the small store, in which this file may make indexes."""
    return Store.open(shutil.copytree(store_dir, tmp_path_factory.mktemp("plan") / "store"))


@pytest.fixture(scope="module")
def indexed(store):
    return partial(plan, store)


def drawn(plan, first, count, stage_start=0, pool=None):
    return draw_samples(plan.samples, pool, Cursor(first, stage_start), count=count, seed=1337)


# ---- which text is read


@pytest.mark.parametrize("flags", ["", "--pack --curriculum seqlen --curriculum-start 8"])
def test_every_training_token_is_a_target_once_per_pass(store, flags):
    """Unpacked, and packed in short pieces: count the targets of two passes."""
    p = plan(store, flags + " --tokens 1e9 --batch-tokens 65536")
    passes = 2 * len(p.samples)
    seen = np.zeros(store.meta["train_tokens"], dtype=int)
    window = (16 if p.settings.pack.on else 1) * p.rows_per_step
    for first in range(0, passes, window):
        rows = p.window_at(Cursor(first_draw=first)).rows
        assert rows.sum_by_row(rows.lengths).max() <= 32
        assert rows.pieces["stop"].max() <= store.meta["train_tokens"], "held-out text was read"
        for start, stop, _ in rows.pieces:
            seen[start:stop] += 1
    for start, stop in drawn(p, passes, first + window - passes)[0]:  # of a third pass
        seen[start:stop] -= 1
    assert (seen == 2).all()


def rows_as_pieces(rows):
    return sorted(tuple(rows.pieces["start"][a:b].tolist()) for a, b in pairwise(rows.offsets))


def test_the_example_in_the_head_of_plan_py_is_right(store):
    """With 4 rows of 64 a step: where each step begins, and that windows hold 64 draws.

    Steps use every row of every window once, in order.
    """
    size = "--seq-len 64 --batch-tokens 256 --tokens 20000"
    unpacked = first_steps(plan(store, size), 3)
    assert [step.before.cursor.first_draw for step in unpacked] == [0, 4, 8]
    p = plan(store, f"{size} --pack")
    packed = first_steps(p, 45)
    positions = [(s.before.cursor.first_draw, s.before.cursor.row) for s in packed]
    assert positions[:3] == [(0, 0), (0, 4), (0, 8)]
    assert {first for first, _ in positions} >= {0, 64, 128}
    windows = Rows.join([p.window_at(Cursor(first_draw=first)).rows for first in (0, 64, 128)])
    for number, step in enumerate(packed[: len(windows) // 4]):
        of_step = windows.select(np.arange(4 * number, 4 * number + 4))
        assert rows_as_pieces(step.window.rows) == rows_as_pieces(of_step)


TOGETHER = "--pack --pack-batch documents"
RARE = "--model bert --nsp --curriculum length-rarity"
UNPACKED = [
    ("--pack --pack-max-per-row 1 --pack-batch rows", f"{TOGETHER} --loss-per document"),
    ("--model bert", "--model bert --pack --loss-per document"),
    (RARE, f"{RARE} --pack"),
]


@pytest.mark.parametrize(("alone", "packed"), UNPACKED)
def test_a_packed_step_has_the_pieces_of_the_unpacked_step(indexed, alone, packed):
    """With --pack-batch documents: the same targets, clock and so learning rate, in fewer rows."""
    roomy = "--seq-len 1024 --batch-tokens 8192 --tokens 200K"
    one_a_row, together = (indexed(f"{flags} {roomy}") for flags in (alone, packed))
    for a, b in zip(first_steps(one_a_row, 12), first_steps(together, 12), strict=True):
        pieces, others = (np.sort(step.window.rows.pieces) for step in (a, b))
        assert np.array_equal(pieces, others)
        counts = ("step", "consumed_tokens", "real_tokens")
        assert [getattr(a.after, n) for n in counts] == [getattr(b.after, n) for n in counts]
        divisor = len(pieces) if "--loss-per" in packed else a.divisor
        assert (a.window.limits.difficulty, divisor) == (b.window.limits.difficulty, b.divisor)
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
def test_a_step_is_a_function_of_the_clock_on_any_number_of_ranks(indexed, flags):
    """So a run can resume at any step: new plans give the same steps, in any order."""
    check_steps_follow_from_the_clock(partial(indexed, f"{flags} --tokens 3000"), 24)


def check_steps_follow_from_the_clock(make, count):
    """Assert that steps are functions of the clock, on any number of ranks.

    Args: make (rank, ranks) -> a plan
    """
    steps, again = first_steps(make(), count), make()
    for whole in reversed(steps):
        alone = again(whole.before)
        assert alone.after == whole.after and again.columns(alone) == again.columns(whole)
        assert torch.equal(alone.batch.tokens, whole.batch.tokens)
        assert torch.equal(alone.batch.targets, whole.batch.targets)
    for world, some in ((2, steps[::8]), (3, steps[4::8]), (16, steps[-1:])):
        ranks = [make(number, world) for number in range(world)]
        for whole in some:
            parts = [rank(whole.before) for rank in ranks]
            for rank, part in zip(ranks, parts, strict=True):
                assert rank.columns(part) == again.columns(whole), "the logged columns"
                assert (part.divisor, part.after) == (whole.divisor, whole.after)
                assert part.batch.tokens.shape == parts[0].batch.tokens.shape, "equally many rows"
            R = len(whole.batch.tokens)
            order = torch.cat([part.row_numbers for part in parts]).argsort()
            for field in ("tokens", "targets"):
                rows = torch.cat([getattr(part.batch, field) for part in parts])[order]
                assert torch.equal(rows[:R], getattr(whole.batch, field))
            assert R <= len(rows) < R + world and (rows[R:] == IGNORE).all()
            documents = torch.cat([part.batch.doc_ids for part in parts])[order]
            assert (documents[R:] == -1).all(), "blank rows, which do not count"


def test_a_step_counts_targets_padding_and_layer_tokens(store):
    p = plan(store, "--pack")
    step = p(Clock())
    real = int((step.batch.targets >= 0).sum())
    assert step.divisor == real == step.after.real_tokens == step.after.consumed_tokens
    assert p.columns(step)["padding_share"] == pytest.approx(1 - real / 256, abs=1e-6)
    assert (step.after.positions, step.after.layer_tokens) == (256, 4 * 256)

    step = plan(store, "--ltd --ltd-start 16")(Clock())
    assert min(step.tokens_by_layer) == 16 and step.after.real_tokens == 256
    assert step.after.layer_tokens == 8 * (2 * 32 + 2 * 16)
    assert step.after.consumed_tokens == 8 * 24  # a = (2 * 32 + 2 * 16) / 4

    step = plan(store, "--pack --curriculum seqlen --curriculum-start 8")(Clock())
    assert step.batch.tokens.shape == (8, 32), "packing shortens pieces, not rows"


def test_a_bert_consumes_its_cls_and_sep_tokens(store):
    """Also with token dropping, which drops padding first, so that short rows count in full."""
    for flags, layers in (("", 4 * [32]), (" --ltd --ltd-start 16", [32, 16, 16, 32])):
        p = plan(store, "--model bert" + flags)
        step = next(s for s in first_steps(p, 30) if not s.batch.is_plain)
        lengths = (step.batch.doc_ids >= 0).sum(1).tolist()
        assert min(lengths) < 32
        consumed = step.after.consumed_tokens - step.before.consumed_tokens
        assert consumed == sum(sum(min(n, kept) for kept in layers) // 4 for n in lengths)
        assert step.after.real_tokens - step.before.real_tokens == sum(lengths)


def test_nsp_refuses_text_without_two_pieces_of_two_tokens():
    only_one = in_memory(b"", b"a text of one piece", b"", b"held out", held_out=1)
    assert "fewer than two pieces of two tokens" in refusal(plan, only_one, "--model bert --nsp")


def test_packing_documents_of_a_rows_length_is_the_plain_run():
    """Neutral is identity."""
    full = in_memory(*(range(n, n + 31) for n in range(40)))
    steps = (first_steps(plan(full, flags), 40) for flags in ("--pack", ""))
    for packed, plain in zip(*steps, strict=True):
        assert packed.after[:6] == plain.after[:6]
        assert torch.equal(packed.batch.tokens, plain.batch.tokens)
        assert packed.batch.is_plain and plain.batch.is_plain


# ---- which samples a curriculum allows


def test_pools_grow_and_a_stage_draws_every_sample_before_any_twice(indexed):
    """Samples come from the pool of their step. After the last limits, passes cover all samples."""
    p = indexed("--curriculum rarity --tokens 40000")
    stage_ids, since, steps = [], 0, first_steps(p, 150)
    for step in steps:
        if step.after.cursor.pool_first_draw != since:
            since, stage_ids = step.after.cursor.pool_first_draw, []
        pool = p.limits_at(step.before.consumed_tokens).pool
        spans = drawn(p, step.before.cursor.first_draw, p.rows_per_step, since, pool)[0]
        ids = ((spans[:, 0] - p.samples.offsets[0]) // 32).tolist()
        reach = pool.reach if pool else len(p.samples)
        assert p.columns(step)["pool"] == reach
        assert pool is None or set(ids) <= set(pool.rankings[0].order[:reach].tolist())
        stage_ids += ids
        for first in range(0, len(stage_ids), reach):
            part = stage_ids[first : first + reach]
            assert len(set(part)) == len(part)
    stages = {step.after.cursor.pool_first_draw for step in steps}
    assert len(stages) == len({p.columns(step)["pool"] for step in steps}) > 30, "one per pool"
    assert reach == len(p.samples)
    for number in range(2):
        assert len({*drawn(p, since + number * reach, reach, since)[0][:, 0].tolist()}) == reach


def test_a_pool_smaller_than_a_batch_is_repeated_to_fill_it(indexed):
    """DeepSpeed's data_sampler.py repeats the pool once, and then yields short batches."""
    p = indexed("--curriculum length --pack --curriculum-by value --curriculum-start 1")
    small = p.limits_at(0).pool
    assert small.reach < 16 * p.rows_per_step, "several passes are needed"
    spans, after = drawn(p, 0, 16 * p.rows_per_step, 0, small)
    assert len(spans) == after.first_draw == 16 * p.rows_per_step
    counts = np.unique(spans[:, 0], return_counts=True)[1]
    assert len(counts) == small.reach and counts.max() - counts.min() <= 1


def test_a_step_carries_the_difficulty_at_which_its_rows_were_drawn(indexed):
    """Also if it was planned ahead, and if a packed step ends one window of samples and begins
    another one with longer pieces.
    """
    p = indexed("--curriculum seqlen,rarity --curriculum-start 8,1 --tokens 10000")
    steps = first_steps(p, 50)  # all planned before any is checked
    for step in steps:
        fresh = p.curriculum.at(step.before.consumed_tokens)
        columns = {f"difficulty_{name}": level for name, level in fresh.difficulty.items()}
        assert step.window.limits == fresh and p.columns(step).items() >= columns.items()
        assert step.batch.tokens.shape[1] == fresh.max_piece_len
    assert len({step.window.limits.difficulty["rarity"] for step in steps}) > 20
    flags = "--pack --curriculum seqlen --curriculum-start 8 --curriculum-pace linear"
    flags += " --curriculum-share 1 --tokens 10000"
    for model in ("", "--model bert"):  # whose pieces make room for [CLS] and [SEP]
        steps = first_steps(indexed(f"{flags} {model}"), 35)
        assert len({step.window.limits.max_piece_len for step in steps}) > 2
        for step in steps:
            assert step.batch.positions.max() + 1 == step.window.limits.max_piece_len


def test_reshaped_rows_predict_every_token_once(store, indexed):
    """Also if a row of 40 is cut into three parts of 16, which overlap."""
    size = "--seq-len 40 --batch-tokens 320"
    curriculum = "seqlen-reshape --curriculum-start 8 --curriculum-share 1 --curriculum-pace linear"
    p = indexed(f"{size} --curriculum {curriculum}")
    plain, widths = plan(store, size), set()
    for number in range(8):
        cursor = Cursor(first_draw=8 * number, drawn_at_tokens=400 * number)
        clock = Clock(consumed_tokens=400 * number, cursor=cursor)
        step, whole = p(clock), plain(clock)
        widths.add(step.batch.tokens.shape[1])
        assert step.batch.tokens.shape[1] <= step.window.limits.difficulty["seqlen-reshape"] < 40
        targets = step.batch.targets[step.batch.targets != IGNORE]
        assert torch.equal(targets.sort()[0], whole.batch.targets.flatten().sort()[0])
        assert step.divisor == whole.divisor == 320 and step.after.real_tokens == 320
    assert widths == {8, 16, 24}


# ---- what lies ahead

AHEAD = [
    "",
    "--pack",
    "--model bert --seq-len 256 --batch-tokens 8192 --tokens 400K",  # most documents are short
    "--model bert --pack --nsp",
    "--ltd --ltd-start 8 --ltd-pace linear --ltd-share 0.8",
    "--ltd --ltd-start 8 --ltd-steps 70 --pack --pack-batch documents",
    "--curriculum seqlen --curriculum-pace discrete:32@0.3:8@0.31:16",
    "--curriculum seqlen-reshape --curriculum-start 8 --curriculum-pace linear",
    "--curriculum rarity --curriculum-start 5 --model bert",
    "--curriculum seqlen,rarity --curriculum-start 8,1 --ltd --ltd-start 16 --pack",
    "--pseudo --pseudo-layers 2 --pseudo-until 0.5",
]


def end_of(p):
    """Plan a run to its end, without reading any text."""
    clock = Clock()
    while clock.consumed_tokens < p.settings.optim.tokens:
        clock = p.clock_after(clock, p.rows_of_step(clock))
    return clock


def assert_is_forecast(p):
    """Assert that what is forecast before the first step is right within 5 %."""
    ahead, end = p.forecast(Clock()), end_of(p)
    assert (ahead.steps, ahead.flops) == pytest.approx((end.step, end.flops), rel=0.05)
    assert ahead.tokens == pytest.approx(end.real_tokens, rel=0.05)


@pytest.mark.parametrize("flags", AHEAD)
def test_a_forecast_is_where_the_run_ends(indexed, flags):
    assert_is_forecast(indexed(f"--tokens 40K {flags}"))


@pytest.mark.parametrize("flags", ["--pack", "--ltd --ltd-start 8 --curriculum seqlen --pack"])
def test_a_short_run_is_forecast_exactly(indexed, flags):
    p = indexed(f"--tokens 3K {flags}")
    ahead, end = p.forecast(Clock()), end_of(p)
    assert ahead == (end.step, end.real_tokens, end.flops) and end.step > 1


def test_a_step_that_would_consume_no_token_is_refused(store):
    few = "--layers 12 --curriculum seqlen --curriculum-start 8 --pseudo --pseudo-layers 1"
    assert plan(store, f"{few} --tokens 40K").forecast(Clock()).steps > 0, "8 rows of 2/3 token"
    with pytest.raises(ValueError, match="--batch-tokens: step 1 has 8 tokens, too few"):
        plan(store, f"{few} --seq-len 8 --batch-tokens 8").forecast(Clock())


def random_flags(seed):
    draw = random.Random(seed)
    share, paces = draw.uniform(0.2, 1), ("linear", "root", "constant")
    pace = draw.choice(("linear", "root:2", "root:4"))
    curriculum = f"--curriculum-share {share} --curriculum-pace {pace} --curriculum"
    choices = (
        ("", "", "--model bert", "--model bert --nsp"),
        ("", "--pack", "--pack --pack-batch documents"),
        ("--seq-len 32", "--seq-len 64", "--seq-len 128"),
        ("", *(f"{curriculum} {m}" for m in ("seqlen", "rarity", "seqlen,rarity"))),
        ("", *(f"--ltd --ltd-share {share} --ltd-pace {pace}" for pace in paces)),
        ("", "", f"--pseudo --pseudo-layers 2 --pseudo-until {draw.uniform(0.1, 0.9)}"),
    )
    return " ".join(map(draw.choice, choices))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_forecast_of_random_flags_is_where_the_run_ends(indexed, seed):
    assert_is_forecast(indexed(f"--tokens 300K --batch-tokens 2048 {random_flags(seed)}"))
