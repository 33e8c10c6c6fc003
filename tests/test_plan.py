"""The plan: every token a target once a pass, the same rows for any number of ranks."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, walk
from small_stores import BYTES_END

import config
from data import Rows, draw
from kernels.cross_entropy import IGNORE
from plan import Plan
from support.base.clock import Clock, Position
from support.base.runtime import Runtime
from support.rows.bert import SpecialIds
from support.rows.samples import cut
from support.text.store import Store
from support.text.tokenizer import get_encoding

SPECIAL_IDS = SpecialIds.of(get_encoding("bytes"))


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


def rank(number=0, world=1):
    return Runtime(number, world, torch.device("cpu"), torch.float32, "")


def plan(store, flags="", number=0, world=1):
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    special_ids = SPECIAL_IDS if "bert" in flags else None
    return Plan(settings, store, special_ids, rank(number, world))


def clock_at(first_draw, consumed_tokens=0):
    """Between two windows or steps, with the next sample that of this draw."""
    position = Position(first_draw=first_draw, drawn_at_tokens=consumed_tokens)
    return Clock(consumed_tokens=consumed_tokens, position=position)


def rows_of_step(p, clock):
    stage = p.stage_at(clock.consumed_tokens)
    return (p.packed_rows(clock) if p.settings.pack.on else p.truncated_rows(clock, stage)).rows


def drawn(plan, first, count, stage_start=0, pool=None, seed=1337):
    return draw(plan.samples, pool, first=first, count=count, stage_start=stage_start, seed=seed)


@pytest.mark.parametrize("flags", ["", "--pack", "--pack --curriculum seqlen --curriculum-start 8"])
def test_every_training_token_is_a_target_once_a_pass(store, flags):
    """Streamed, packed, or in short pieces: count what the rows of two passes predict."""
    p = plan(store, flags + " --tokens 1e9 --batch-tokens 65536")
    passes = 2 * len(p.samples)
    seen = np.zeros(store.train_tokens, dtype=int)
    for first in range(0, passes, 16 * p.rows_per_step):
        if p.settings.pack.on:
            rows = p.packed_window(clock_at(first).position).rows
            assert rows.sums(rows.stop - rows.start).max() <= 32
        else:
            clocks = (clock_at(first + i * p.rows_per_step) for i in range(16))
            rows = Rows.join([rows_of_step(p, clock) for clock in clocks])
        for start, stop in zip(rows.start, rows.stop, strict=True):
            seen[start:stop] += 1
    after = first + 16 * p.rows_per_step  # where the last window ends
    for start, stop in drawn(p, passes, after - passes).spans:
        seen[start:stop] -= 1
    assert (seen == 2).all()


def rows_as_pieces(rows):
    return [tuple(rows.start[a:b].tolist()) for a, b in pairwise(rows.offsets)]


def test_steps_take_every_row_of_every_window_once(store):
    """In the windows' order step by step; within a step in the order that balances them."""
    p = plan(store, "--pack")
    steps, rows = walk(p, 60), []
    for first in range(0, steps[-1].after.position.first_draw + 1, 16 * p.rows_per_step):
        rows += rows_as_pieces(p.packed_window(clock_at(first).position).rows)
    clocks = [Clock(), *(step.after for step in steps)]
    for number, clock in enumerate(clocks[:-1]):
        taken = rows_as_pieces(p.packed_rows(clock).rows)
        assert sorted(taken) == sorted(rows[8 * number : 8 * number + 8])


def test_the_steps_in_the_header(store):
    """4 rows of 64 a step: where each begins, and that 64 draws are packed together."""
    size = "--seq-len 64 --batch-tokens 256 --tokens 20000"
    plain = walk(plan(store, size), 3)
    assert [step.before.position.first_draw for step in plain] == [0, 4, 8]
    packed = walk(plan(store, f"{size} --pack"), 45)
    positions = [(s.before.position.first_draw, s.before.position.row) for s in packed]
    assert positions[:3] == [(0, 0), (0, 4), (0, 8)]
    assert {first for first, _ in positions} >= {0, 64, 128}
    for number in range(2):
        ranks = walk(plan(store, size, number, world=2), 3)
        for step, whole in zip(ranks, plain, strict=True):
            half = slice(2 * number, 2 * number + 2)
            assert torch.equal(step.batch.tokens, whole.batch.tokens[half])


ROOMY = "--seq-len 1024 --batch-tokens 8192 --tokens 1M"  # for the store's documents
UNPACKED = [
    ("--pack --pack-max-per-row 1 --pack-batch rows", "--pack --pack-batch documents"),
    ("--model bert", "--model bert --pack"),
    ("--model bert --long truncate", "--model bert --pack --long truncate"),
    ("--model bert --nsp", "--model bert --nsp --pack"),
    ("--model bert --loss-per document", "--model bert --pack --loss-per document"),
]


@pytest.mark.parametrize(("alone", "packed"), UNPACKED)
def test_a_step_of_documents_has_those_of_the_unpacked_one(store, alone, packed):
    """The same pieces, targets and place on the clock, in fewer rows; so the same learning rate."""
    one_a_row, together = (plan(store, f"{flags} {ROOMY}") for flags in (alone, packed))
    for a, b in zip(walk(one_a_row, 24), walk(together, 24), strict=True):
        pieces = []
        for p, clock in ((one_a_row, a.before), (together, b.before)):
            rows = rows_of_step(p, clock)
            pieces.append(sorted(zip(rows.start.tolist(), rows.stop.tolist(), strict=True)))
        assert pieces[0] == pieces[1]
        assert (a.targets, a.pieces) == (b.targets, b.pieces)
        counts = ("step", "consumed_tokens", "real_tokens", "pieces")
        assert [getattr(a.after, n) for n in counts] == [getattr(b.after, n) for n in counts]
        assert len(b.batch.tokens) <= len(a.batch.tokens)
        assert (b.batch.targets != IGNORE).sum() == (a.batch.targets != IGNORE).sum()
    assert b.after.positions < a.after.positions


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pack-batch documents",
        "--pack-max-per-row 2 --curriculum seqlen --curriculum-start 16",
        "--model bert",
        "--model bert --nsp --pack-batch rows --curriculum seqlen --curriculum-start 16",
    ],
)
def test_every_sample_of_a_window_lies_in_exactly_one_of_its_rows(store, flags):
    """And no other: nothing is carried over into the next window."""
    p = plan(store, f"--pack {flags}")
    first, steps = 0, 1 if p.settings.pack.batch == "documents" else 16
    for _ in range(5):
        window = p.packed_window(clock_at(first).position)
        spans, after = drawn(p, first, steps * p.rows_per_step)
        pieces = cut(spans, window.stage.max_piece_len - p.extra)
        laid = np.stack((window.rows.start, window.rows.stop), axis=1)
        if p.settings.model.nsp:  # of a pair the end is cut off
            assert (laid[:, 1] - laid[:, 0] <= p.samples.max_piece_len).all()
            laid, pieces = laid[:, :1], pieces[:, :1]
        assert sorted(laid.tolist()) == sorted(pieces.tolist())
        assert window.next_draw == after == first + len(spans)
        first = after


def test_pairs_need_two_pieces_of_two_tokens():
    """One document of two and many of one; a GPT's pieces would do."""
    text = [[1, 2, BYTES_END], *[[3, BYTES_END]] * 40]
    tokens = np.array([token for document in text for token in document], np.uint16)
    offsets = np.cumsum([0, *map(len, text)])
    meta = {"end_of_text": BYTES_END, "vocab_size": 261}
    small = Store(Path("small"), meta, tokens, offsets, len(text), len(tokens))
    plan(small, "--model bert --pack")
    with pytest.raises(ValueError, match="--nsp makes pairs of pieces of two tokens or more"):
        plan(small, "--model bert --nsp")


def test_a_step_may_be_one_row(store):
    """Also one of a few short documents, which do not fill it."""
    p = plan(store, "--pack --pack-batch documents --long truncate --seq-len 4096 --tokens 1M"
             " --batch-tokens 8192")  # fmt: skip
    rows = [len(step.batch.tokens) for step in walk(p, 30)]
    assert 1 in rows and max(rows) == 2


def test_truncated_documents_are_never_read_beyond_their_first_row(store):
    for flags in ("--pack", "--pack --curriculum seqlen --curriculum-start 8", "--model bert"):
        p = plan(store, f"{flags} --long truncate")
        read = np.zeros(store.train_tokens, bool)
        for step in range(40):
            clock = clock_at(16 * p.rows_per_step * step)
            packs = p.settings.pack.on
            rows = p.packed_window(clock.position).rows if packs else rows_of_step(p, clock)
            for start, stop in zip(rows.start, rows.stop, strict=True):
                read[start:stop] = True
        begins = store.offsets[np.searchsorted(store.offsets, np.flatnonzero(read), "right") - 1]
        assert (np.flatnonzero(read) - begins).max() == p.samples.max_piece_len - 1


def test_held_out_documents_are_never_trained_on(store):
    for flags in ("", "--pack"):
        spans = plan(store, flags).samples.spans(np.arange(len(plan(store, flags).samples)))
        assert spans.max() == store.train_tokens


# ---- steps


def test_where_documents_make_an_uneven_number_of_rows_some_ranks_get_blank_ones(store):
    flags = "--model bert --pack --seq-len 2048 --batch-tokens 16384 --tokens 1M"
    counts, blank = set(), []
    for step in walk(plan(store, flags), 8):
        counts.add(len(step.batch.tokens) % 3)
        ranks = [plan(store, flags, number, 3)(step.before).batch for number in range(3)]
        blank += [bool((batch.targets == IGNORE).all()) for batch in ranks]
    assert len(counts) > 1 and any(blank), "and some ranks have no document at all"


def test_counts(store):
    step = plan(store, "--pack")(Clock())
    real = int((step.batch.targets >= 0).sum())
    assert step.targets == real == step.after.real_tokens == step.after.consumed_tokens
    assert step.padding_share == pytest.approx(1 - real / 256) and step.after.positions == 256
    assert step.after.layer_tokens == 4 * 256

    step = plan(store, "--ltd --ltd-start 16")(Clock())
    assert step.kept_tokens == 16 and step.after.real_tokens == 256
    assert step.after.layer_tokens == 8 * (2 * 32 + 2 * 16)
    assert step.after.consumed_tokens == 8 * 24  # a = (2 * 32 + 2 * 16) / 4

    step = plan(store, "--curriculum seqlen --curriculum-start 8")(Clock())
    assert step.batch.tokens.shape == (8, 8) and step.max_piece_len == 8
    assert step.after.consumed_tokens == 64


def test_the_tokens_of_a_bert_are_those_it_reads_its_cls_and_sep_included(store):
    """Also under dropping: padding goes first, so short rows run whole and are counted whole."""

    def a_step_with_padding(flags):
        step = next(s for s in walk(plan(store, flags), 30) if s.batch.doc_ids is not None)
        consumed = step.after.consumed_tokens - step.before.consumed_tokens
        return (step.batch.doc_ids >= 0).sum(1).tolist(), consumed, step

    lengths, consumed, step = a_step_with_padding("--model bert")
    assert consumed == sum(lengths) == step.after.real_tokens - step.before.real_tokens
    lengths, consumed, _ = a_step_with_padding("--model bert --ltd --ltd-start 16")
    assert min(lengths) < 32
    assert consumed == sum((2 * n + 2 * min(n, 16)) // 4 for n in lengths)


def test_curriculum_with_packing_shortens_pieces_not_rows(store):
    step = plan(store, "--pack --curriculum seqlen --curriculum-start 8")(Clock())
    assert step.batch.tokens.shape == (8, 32)
    assert step.batch.positions.max() == 7


def test_the_length_logged_is_the_one_that_governed_the_rows(store):
    """Also in a step that ends one window of samples and begins the next, with longer pieces."""
    flags = "--pack --curriculum seqlen --curriculum-start 8 --curriculum-share 1 --tokens 20000"
    steps = walk(plan(store, flags), 70)
    assert len({step.max_piece_len for step in steps}) > 2
    for step in steps:
        assert step.batch.positions is None or step.batch.positions.max() + 1 == step.max_piece_len


@pytest.mark.parametrize("most", [1, 2, None])
def test_packing_pads_little_and_a_row_has_no_more_pieces_than_asked(store, most):
    """With one piece a row it is the padded run that packing is compared with."""
    limit = f"--pack-max-per-row {most}" if most else ""
    steps = walk(plan(store, f"--pack {limit} --seq-len 512 --batch-tokens 8192"), 10)
    pieces = {int(n) + 1 for step in steps for n in step.batch.with_documents().doc_ids.amax(1)}
    assert max(pieces) == most if most else max(pieces) > 2
    padding = sum(step.padding_share for step in steps) / 10
    assert padding < 0.01 if most is None else (padding > 0.15) == (most == 1)


def test_packing_of_full_documents_is_the_plain_run():
    """Neutral is identity: documents of exactly a row's length make the same batches either way."""

    tokens, meta = (
        np.arange(32 * 40, dtype=np.uint16) % 256,
        {"end_of_text": 256, "vocab_size": 261},
    )
    full = Store(Path("full"), meta, tokens, np.arange(0, 32 * 41, 32), 40, 32 * 40)
    for packed, plain in zip(walk(plan(full, "--pack"), 40), walk(plan(full), 40), strict=True):
        assert packed.after[:6] == plain.after[:6]
        assert torch.equal(packed.batch.tokens, plain.batch.tokens)
        assert packed.batch.doc_ids is None and plain.batch.doc_ids is None


# ---- any clock, any rank, any curriculum


class Alone(Runtime):
    """A rank of several that never talks to the others: what it plans must not need them to."""

    def on_rank0(self, action):
        return action()


@pytest.fixture(scope="module")
def indexed(store, tmp_path_factory):
    """Plans over the small store whose indexes lie in a folder of this file's own."""
    folder = tmp_path_factory.mktemp("curriculum")

    def make(flags, number=0, world=1):
        index = f"--curriculum-index {folder}" if "--curriculum " in flags else ""
        settings = config.build(config.parse(f"{SMALL} {flags} {index}".split()))
        ranks = Alone(number, world, torch.device("cpu"), torch.float32, "")
        return Plan(settings, store, SPECIAL_IDS if "bert" in flags else None, ranks)

    return make


FLAGS = [
    "",
    "--curriculum seqlen --curriculum-start 8 --ltd --ltd-start 16 --pack",
    "--model bert",
    "--model bert --pack --pack-batch rows",
    "--model bert --nsp --curriculum seqlen --curriculum-start 16 --pack --loss-per document",
    "--pack --pack-batch documents --long truncate",
    "--curriculum seqlen,rarity --curriculum-start 8,5",
    "--curriculum seqlen-reshape --curriculum-start 8",
    "--curriculum rarity,length --pack --curriculum-pace root:2,linear --curriculum-share 0.9,0.5",
    "--curriculum length --pack --curriculum-by value --curriculum-start 1",
    "--curriculum length-rarity --model bert",
    "--curriculum seqlen,rarity-mean --model bert --pack --ltd --ltd-start 16",
    "--curriculum rarity --pack --pack-batch documents --long truncate",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_a_step_follows_from_the_clock_alone(indexed, flags):
    """In the wrong order, from a plan that saw nothing before: so a run resumes at every step."""
    steps, again = walk(indexed(f"{flags} --tokens 10000"), 60), indexed(f"{flags} --tokens 10000")
    for before, step in reversed(list(pairwise(steps))):
        same = again(before.after)
        assert same.after == step.after and same.stage == step.stage
        assert torch.equal(same.batch.tokens, step.batch.tokens)
        assert torch.equal(same.batch.targets, step.batch.targets)


@pytest.mark.parametrize("flags", FLAGS)
def test_ranks_share_the_rows_of_one_process(indexed, flags):
    flags += f" --batch-tokens {32 * 6} --tokens 5000"
    world = 4 if "documents" in flags else 3
    for whole, *parts in zip(
        walk(indexed(flags), 20),
        *(walk(indexed(flags, number, world), 20) for number in range(world)),
        strict=True,
    ):
        logged = {"batch": None, "predicted": None, "laid": None}
        for part in parts:
            assert part._replace(**logged) == whole._replace(**logged), "counts, clock, stage"
            assert np.array_equal(part.laid.lengths, whole.laid.lengths)
            assert np.array_equal(part.laid.offsets, whole.laid.offsets)
        assert len({part.batch.tokens.shape for part in parts}) == 1, "as many rows on each rank"
        R = len(whole.batch.tokens)
        for field in ("tokens", "targets"):
            rows = torch.cat([getattr(part.batch, field) for part in parts])
            assert torch.equal(rows[:R], getattr(whole.batch, field))
            assert len(rows) < R + world and (field == "tokens" or (rows[R:] == IGNORE).all())
        documents = torch.cat([part.batch.with_documents().doc_ids for part in parts])
        assert (documents[R:] == -1).all(), "blank rows, which nothing counts"


def test_a_packed_bert_draws_what_the_unpacked_one_does_under_a_curriculum(indexed):
    """Step by step from the same pool, whose size follows from the same clock."""
    flags = "--model bert --curriculum length-rarity --tokens 30000"
    alone, packed = indexed(flags), indexed(f"{flags} --pack")
    for a, b in zip(walk(alone, 40), walk(packed, 40), strict=True):
        assert (a.stage, a.targets, a.after.position) == (b.stage, b.targets, b.after.position)
        assert a.after.real_tokens == b.after.real_tokens


def test_a_pool_grows_stage_by_stage_and_nothing_comes_twice_in_one(indexed):
    """Drawn ids lie in the pool of their step; within a stage each comes once before any twice."""
    p = indexed("--curriculum rarity --tokens 80000")
    stage_ids, since, steps = [], 0, walk(p, 160)
    clocks = [Clock(), *(step.after for step in steps)]
    for before, step in zip(clocks, steps, strict=False):
        if step.after.position.stage_first_draw != since:
            since, stage_ids = step.after.position.stage_first_draw, []
        pool = p.stage_at(before.consumed_tokens).pool
        spans = drawn(p, before.position.first_draw, p.rows_per_step, since, pool).spans
        ids = ((spans[:, 0] - p.samples.start) // 32).tolist()
        reach = pool.reach if pool else len(p.samples)
        assert step.stage["pool"] == reach
        assert pool is None or set(ids) <= set(pool.filters[0][1].order[:reach].tolist())
        stage_ids += ids
        for first in range(0, len(stage_ids), reach):
            part = stage_ids[first : first + reach]
            assert len(set(part)) == len(part)
    stages = {step.after.position.stage_first_draw for step in steps}
    assert len(stages) == len({step.stage["pool"] for step in steps}) > 20, "one a pool"
    assert reach == len(p.samples)


def test_after_the_end_full_passes_without_repeats(indexed):
    p = indexed("--curriculum rarity --tokens 2000")
    steps = walk(p, 20)
    end, n = steps[-1].after, len(p.samples)
    assert end.consumed_tokens > 0.4 * 2000 and p.stage_at(end.consumed_tokens).pool is None
    for number in range(2):
        since = end.position.stage_first_draw
        spans = drawn(p, since + number * n, n, since).spans
        assert len(set(spans[:, 0].tolist())) == n


def test_a_pool_smaller_than_a_batch_fills_it(indexed):
    """DeepSpeed's data_sampler.py wraps once, and yields short batches after that."""
    p = indexed("--curriculum length --pack --curriculum-by value --curriculum-start 1")
    small = p.stage_at(0).pool
    assert small.reach < 16 * p.rows_per_step, "it takes several passes"
    spans, after = drawn(p, 0, 16 * p.rows_per_step, 0, small)
    assert len(spans) == after == 16 * p.rows_per_step
    counts = np.unique(spans[:, 0], return_counts=True)[1]
    assert len(counts) == small.reach and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("flags", ["--curriculum rarity", "--curriculum rarity,length --pack"])
def test_draws_are_uniform_over_the_pool(indexed, flags):
    """Chi-squared of first draws over many seeds, with its expectation and standard deviation."""
    share = " --curriculum-start 2" if "pack" not in flags else " --curriculum-start 20,20"
    p = indexed(flags + share + " --curriculum-pace linear")
    pool = p.stage_at(0).pool
    ids = pool.ids(np.arange(pool.reach))
    members = np.sort(p.samples.spans(ids[ids >= 0])[:, 0])
    seen = np.zeros(len(members))
    for seed in range(150):
        for since in (0, 5):
            spans = drawn(p, since, 4, since, pool, seed).spans
            np.add.at(seen, np.searchsorted(members, spans[:, 0]), 1)
    expected = 150 * 2 * 4 / len(members)
    chi = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi - len(members)) < 5 * (2 * len(members)) ** 0.5


def test_the_stage_travels_with_its_batch(indexed):
    """Planned ahead or not, a step names the difficulty under which its rows were drawn."""
    p = indexed("--curriculum seqlen,rarity --curriculum-start 8,1 --tokens 20000")
    steps = walk(p, 100)  # all drawn before any is looked at
    clocks = [Clock(), *(step.after for step in steps)]
    for before, step in zip(clocks, steps, strict=False):
        fresh = p.curriculum.at(before.consumed_tokens)
        assert step.stage["difficulty_seqlen"] == fresh.difficulty["seqlen"]
        assert step.stage["difficulty_rarity"] == fresh.difficulty["rarity"]
        assert step.batch.tokens.shape[1] == step.max_piece_len == fresh.max_piece_len
    assert len({step.stage["difficulty_rarity"] for step in steps}) > 20


def test_no_sample_so_easy_widens_and_says_so(indexed):
    """DeepSpeed's data_sampler.py ends in a crash when its first cluster is empty."""
    p = indexed("--curriculum rarity --curriculum-by value --curriculum-start 1")
    steps = walk(p, 3)
    assert steps[0].note.startswith("no sample has rarity 1 or less: widened to")
    assert steps[0].stage["pool"] >= 1 and steps[0].stage["difficulty_rarity"] > 1


def test_reshaped_rows_show_the_same_tokens(store, indexed):
    """Nothing lost, nothing twice, also where rows of 40 in three parts of 16 overlap."""
    size = "--seq-len 40 --batch-tokens 320"
    p = indexed(f"{size} --curriculum seqlen-reshape --curriculum-start 8 --curriculum-share 1")
    plain, widths = plan(store, size), set()
    for number in range(8):
        clock = clock_at(8 * number, consumed_tokens=400 * number)
        step, whole = p(clock), plain(clock)
        widths.add(step.batch.tokens.shape[1])
        assert step.batch.tokens.shape[1] <= step.stage["difficulty_seqlen-reshape"] < 40
        targets = step.batch.targets[step.batch.targets != IGNORE]
        assert sorted(targets.tolist()) == sorted(whole.batch.targets.flatten().tolist())
        assert step.targets == whole.targets == 320 and step.after.real_tokens == 320
    assert widths == {8, 16, 24}


def test_short_samples_of_a_bert_make_short_rows(indexed):
    p = indexed("--curriculum length --model bert --tokens 30000")
    steps = walk(p, 60)
    assert all(step.batch.tokens.shape[1] % 8 == 0 for step in steps)
    widths = {step.batch.tokens.shape[1] for step in steps}
    assert len(widths) > 1 and min(widths) < 32 == max(widths)
    for step in steps:
        longest = 32 if step.batch.doc_ids is None else int((step.batch.doc_ids >= 0).sum(1).max())
        assert step.batch.tokens.shape[1] in (32, -(-longest // 8) * 8)
