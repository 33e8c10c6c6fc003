"""From documents to batches: the example in the heads of data.py and plan.py, samples, rows, BERT's
masks, and mixtures of stores.
"""

import gzip
import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import TINY, at_step, first_steps, metrics, read_log, refusal, terminate
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import BYTES_END as END
from small_stores import ONE as ALONE
from small_stores import TOY, in_memory, write_store
from test_plan import SPECIAL_IDS, check_steps_follow_from_the_clock, plan

import data
import train
from bert import Pairs, mask_tokens, masked_tokens
from data import ONE, Data, Rows, Samples, collate, open_store, reshape, reshaped_len
from evaluate import Evaluation, HeldOut, tokens_of_each, weighted
from kernels.cross_entropy import IGNORE
from model import Batch
from prepare import prepare
from support.clock import Clock, Cursor
from support.store import Store, byte_lengths, get_encoding

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
FEW = settings(max_examples=40, deadline=None)
BYTES = get_encoding("bytes")
STEPS = 12  # more than a packing window holds
SMALLER = "--layers 1 --width 16 --heads 1 --tokens 2048 --checkpoint-every 512"


def letters(tokens):
    return "".join({END: ".", IGNORE: "_"}.get(token) or chr(token) for token in tokens)


def test_the_example_in_the_heads_of_data_and_plan_is_right():
    """It goes from three documents to the batches of two ranks."""
    store = in_memory(b"parsimony", b"is", b"less")
    assert letters(store.tokens.tolist()) == "parsimony.is.less."
    assert store.offsets.tolist() == [0, 10, 13, 18]
    flags = "--seq-len 8 --batch-tokens 32 --pack --pack-batch documents"
    first, second = (plan(store, flags, rank, world=2) for rank in range(2))
    assert first.samples.spans(np.arange(4)).tolist() == [[0, 8], [8, 10], [10, 13], [13, 18]]
    assert first.samples.shuffled(np.arange(4), seed=1337).tolist() == [3, 0, 2, 1]
    rows = first.packed_rows(Clock()).rows
    assert (rows.start.tolist(), rows.stop.tolist()) == ([0, 13, 10, 8], [8, 18, 13, 10])
    assert rows.offsets.tolist() == [0, 1, 3, 4]

    step = first(Clock())
    batch = step.batch
    assert [letters(row) for row in batch.tokens.tolist()] == [".parsimo", "........"]
    assert [letters(row) for row in batch.targets.tolist()] == ["parsimon", "________"]
    assert batch.positions.tolist() == [[*range(8)], [0] * 8]
    assert batch.doc_ids.tolist() == [[0] * 8, [-1] * 8]
    batch = second(Clock()).batch
    assert [letters(row) for row in batch.tokens.tolist()] == [".less.is", "ny......"]
    assert [letters(row) for row in batch.targets.tolist()] == ["less.is.", "y.______"]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert batch.doc_ids.tolist() == [[0] * 5 + [1] * 3, [0] * 2 + [-1] * 6]
    assert (step.targets, step.after.step, step.after.consumed_tokens) == (18, 1, 18)
    assert step.after.cursor == Cursor(first_draw=4)


# ---- samples


def spans_of(samples):
    return [tuple(span) for span in samples.spans(np.arange(len(samples)))]


def test_samples_equal_a_worked_example():
    """Documents have 5 and 1 tokens with their end-of-text, which BERT's samples leave out."""
    assert spans_of(Samples(TOY, "pieces", 2)) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert spans_of(Samples(TOY, "rows", 4)) == [(0, 4), (4, 6)]
    assert spans_of(Samples(TOY, "pieces", 2, split="val")) == [(6, 8), (8, 9)]
    bert = Samples(TOY, "bert", 5)
    assert bert.max_piece_len == 3 and spans_of(bert) == [(0, 3), (3, 4)]


def test_samples_of_a_large_store_come_from_a_table_on_disk(store_dir, tmp_path, monkeypatch):
    """The table is made once, for each kind of samples. A small store keeps them in memory."""
    analyses = shutil.ignore_patterns("curriculum")  # which runs of other tests have added
    large = Store.open(shutil.copytree(store_dir, tmp_path / "large", ignore=analyses))
    for kind, seq_len in (("pieces", 30), ("bert", 32)):  # both are cut every 30 tokens
        expected = spans_of(Samples(large, kind, seq_len, "val"))
        with monkeypatch.context() as patch:
            patch.setattr(data, "IN_MEMORY", 0)
            patch.setattr(data, "DOCUMENTS_AT_ONCE", 7)
            assert spans_of(Samples(large, kind, seq_len, "val")) == expected
            patch.setattr(data, "atomic_write", None)  # a call would fail
            assert spans_of(Samples(large, kind, seq_len, "val")) == expected, "read from disk"
    assert len([*large.path.glob("*.spans")]) == 2


# ---- rows


def rows_of(*rows):
    """Make rows of pieces, each row given like [(0, 2), (5, 6)]."""
    pieces = [piece for row in rows for piece in row]
    return Rows.of(np.array(pieces, np.int64).reshape(-1, 2), np.cumsum([0, *map(len, rows)]))


def test_collate_refuses_a_token_outside_the_vocabulary():
    damaged = replace(TOY, tokens=np.where(TOY.tokens == 3, 999, TOY.tokens))
    assert re.search(r"token 999 .*vocabulary", refusal(collate, damaged, rows_of([(0, 4)]), 4))


rows = st.lists(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=3), min_size=1)


@FEW
@given(rows, st.booleans())
def test_collated_rows_equal_the_definition(drawn, bert):
    """Token by token, also for short rows and rows without a piece."""
    laid = [[(a, min(a + n, 9)) for a, n in row if a < 9] for row in drawn]
    special_ids = SPECIAL_IDS if bert else None
    batch = collate(TOY, rows_of(*laid), 18, special_ids).with_documents()
    for r, row in enumerate(laid):
        expected = []  # token, target, position, document
        for number, (start, stop) in enumerate(row):
            text = TOY.tokens[start:stop].tolist()
            if bert:
                tokens = [SPECIAL_IDS.cls, *text, SPECIAL_IDS.sep]
                targets = [IGNORE, *text, IGNORE]
            else:
                tokens = [int(TOY.tokens[start - 1]) if start else END, *text[:-1]]
                targets = text
            expected += zip(tokens, targets, range(len(tokens)), [number] * 6, strict=False)
        expected += [(END, IGNORE, 0, -1)] * (18 - len(expected))
        columns = zip(*(field[r].tolist() for field in batch), strict=True)
        assert [tuple(column) for column in columns] == expected


def parts_of(rows):
    """Return the parts in each row: (start, stop, seen)."""
    parts = list(zip(rows.start.tolist(), rows.stop.tolist(), rows.seen, strict=True))
    return [parts[a:b] for a, b in pairwise(rows.offsets)]


def test_reshape_equals_worked_examples():
    assert parts_of(reshape(np.array([[0, 10]]), 10, 4)) == [[(0, 4, 0)], [(4, 8, 0)], [(6, 10, 2)]]
    short = reshape(np.array([[0, 5]]), 16, 8)  # the stream's last sample
    assert parts_of(short) == [[(0, 5, 0)], []]
    # Rows are as short as their number allows, so their length grows in steps.
    assert {reshaped_len(1024, limit) for limit in range(512, 1017, 8)} == {512}
    assert [reshaped_len(1024, limit) for limit in (504, 1024)] == [344, 1024]


@FEW
@given(st.integers(8, 600), st.integers(1, 600), st.integers(1, 600))
def test_reshape_predicts_every_token_once(seq_len, limit, size):
    limit, size = min(limit, seq_len), min(size, seq_len)
    length = reshaped_len(seq_len, limit)
    rows = parts_of(reshape(np.array([[1000, 1000 + size]]), seq_len, length))
    assert length <= limit
    predicted = [t for row in rows for start, stop, seen in row for t in range(start + seen, stop)]
    assert predicted == list(range(1000, 1000 + size))
    assert all(1000 <= start and stop - start <= length for row in rows for start, stop, _ in row)
    assert len(rows) == -(-seq_len // length)
    if size == seq_len:
        assert all(stop - start == length for row in rows for start, stop, _ in row)
        assert len(rows) * length < seq_len + 8 * len(rows) or length == limit


# ---- masks, and weights of targets


def random_bits(*shape):
    return torch.randint(0, 2**63 - 1, (2, *shape), generator=torch.Generator().manual_seed(0))


def test_bert_masks_15_percent_of_the_tokens_and_hides_80_percent_of_these():
    T = 100_000
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens.clone(), None, None)
    batch.targets[0, :1000] = IGNORE  # special tokens such as [CLS], which are never masked
    masked = mask_tokens(batch, random_bits(1, T), SPECIAL_IDS)
    chosen = masked.targets != IGNORE
    assert not chosen[0, :1000].any()
    assert torch.equal(masked.tokens[~chosen], tokens[~chosen])
    assert torch.equal(masked.targets[chosen], tokens[chosen])
    assert chosen.sum() == 0.15 * 99_000
    hidden = (masked.tokens[chosen] == SPECIAL_IDS.mask).float().mean().item()
    same = (masked.tokens[chosen] == tokens[chosen]).float().mean().item()
    assert abs(hidden - 0.8) < 0.02 and abs(same - 0.1 - 0.1 / 256) < 0.015
    where = chosen[0, 1000:].view(99, 1000).sum(1).float()
    assert (where - 150).abs().max() < 5 * (1000 * 0.15 * 0.85) ** 0.5, "spread over the row"


def test_packing_does_not_change_how_many_tokens_of_a_document_are_masked():
    lengths = [1, 3, 4, 17, 40]
    doc_ids = torch.repeat_interleave(
        torch.tensor([0, 1, 2, 3, 4, -1]), torch.tensor([*lengths, 3])
    )
    tokens = torch.arange(len(doc_ids)) % 256
    targets = torch.where(doc_ids < 0, IGNORE, tokens)
    batch = Batch(*(field[None] for field in (tokens, targets, tokens, doc_ids)))
    packed = mask_tokens(batch, random_bits(1, len(doc_ids)), SPECIAL_IDS)
    counts = [int((packed.targets[0, doc_ids == n] >= 0).sum()) for n in range(5)]
    assert counts == [1, 1, 1, 3, 6] == masked_tokens(np.array(lengths)).tolist()


def test_every_document_counts_as_one():
    """Documents of 2 targets and 1 in the first row, of 3 in the second; an empty third row."""
    batch = collate(TOY, rows_of([(0, 2), (5, 6)], [(2, 5)], []), 4)
    third = 1 / 3
    expected = torch.tensor([[0.5, 0.5, 1, 0], [third, third, third, 0], [0, 0, 0, 0]])
    assert torch.equal(data.shares_of(batch, True, None), expected)
    whole = collate(TOY, rows_of([(0, 4)]), 4)
    assert torch.equal(data.shares_of(whole, True, None), torch.full((1, 4), 0.25))
    assert data.shares_of(whole, False, None) is None
    # of two answers, each counts as much as three of the six tokens together
    targets = torch.tensor([[1, 5, 5, IGNORE, 0, 6, IGNORE, IGNORE]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    batch = Batch(targets, targets, positions, torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]]))
    assert data.shares_of(batch, False, 3).tolist() == [[3, 1, 1, 0, 3, 1, 0, 0]]
    assert data.shares_of(batch, True, 1).tolist() == [[1, 0.5, 0.5, 0, 1, 1, 0, 0]]


# ---- pairs


def test_collated_pairs_equal_a_worked_example():
    """Two pairs, of which one has a foreign second part, and a piece without a second part."""
    pairs = Pairs(first=np.array([2, 1, 1]), second=np.array([5, 2, 7]))
    spans = np.array([[0, 3], [1, 3], [6, 7]])
    rows = Rows.of(spans, np.array([0, 2, 3]), pairs=pairs)
    batch = collate(TOY, rows, 12, SPECIAL_IDS)
    cls, sep = SPECIAL_IDS.cls, SPECIAL_IDS.sep
    assert batch.tokens.tolist() == [
        [cls, 1, 2, sep, END, sep, cls, 2, sep, 3, sep, END],
        [cls, 7, sep, sep, *[END] * 8],
    ]
    no = IGNORE
    assert batch.targets.tolist() == [
        [no, 1, 2, no, END, no, no, 2, no, 3, no, no],
        [no, 7, *[no] * 10],
    ]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]
    assert batch.doc_ids[0].tolist() == [0] * 6 + [1] * 5 + [-1]
    answered = data.batch_of(TOY, rows, 12, SPECIAL_IDS, torch.tensor([1, 2]))
    assert answered.targets[:, [0, 6]].tolist() == [[1, 0], [no, no]]


# ---- mixtures of stores


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A folder with two stores: `words` has short documents, `books` has long ones."""
    folder = tmp_path_factory.mktemp("stores")
    texts = {"words": ("jargon", "devil"), "books": ("kjv", "moby", "sotu")}
    lines = gzip.decompress(TINY.read_bytes()).splitlines()
    for name, prefixes in texts.items():
        chosen = [line for line in lines if json.loads(line)["id"].startswith(prefixes)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(chosen))
        prepare([folder / f"{name}.jsonl"], folder / name, BYTES, "bytes")
    return folder


def mix(stores, words, books):
    return f"{stores / 'words'}={words},{stores / 'books'}={books}"


def plan_mix(given, flags="", rank=0, world=1):
    return plan(open_store(given), flags, rank, world)


# ---- the flag


def test_mixtures_are_parsed_exactly():
    expected = [("wiki", Fraction(7, 10)), ("code", Fraction(3, 10))]
    assert data.entries_of("wiki=7,code=3") == expected
    assert data.entries_of("wiki=0.7,code=0.3") == expected, "decimals are exact"
    assert data.entries_of("a=0,b=1e-3") == [("a", 0), ("b", 1)]
    assert data.entries_of("runs/x=1/a=0.5,b=.5")[0][0] == "runs/x=1/a"


WRONG = {
    "a=0.7,b": "--data a=0.7,b: 'b' is not PATH=WEIGHT",
    "a=nan,b=2": "--data .*: 'a=nan' is not PATH=WEIGHT",
    "a=1,other=1": "--data .*other was made with tokenizer another",
}


def test_invalid_mixtures_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "a", [[1, 2]])
    write_store(tmp_path / "b", [[1, 2, 3]])
    write_store(tmp_path / "other", [[1]], tokenizer="another")
    for mixture, problem in WRONG.items():
        assert re.search(problem, refusal(open_store, mixture))
    assert open_store("a=1,b=1").names == ("a", "b")


# ---- stores side by side


def test_a_mixture_holds_its_stores_one_after_the_other(stores):
    """The first document of each follows an end-of-text, as in a run with one store."""
    two = open_store(mix(stores, 1, 1))
    starts = two.tokens.starts[:-1]
    batch = data.collate(two, data.Rows.of(np.stack((starts, starts + 16), axis=1)), 16)
    assert batch.tokens[:, 0].tolist() == [BYTES.eot_token] * 2
    assert batch.targets.tolist() == [part.tokens[:16].tolist() for part in two.parts]
    ends = [two.parts[0].tokens[0], two.parts[1].tokens[-1]]
    assert two.tokens.take(np.array([-3, 10**9]), mode="clip").tolist() == ends
    samples = data.MixedSamples(two, "pieces", 32)
    spans = samples.spans(np.arange(len(samples))[::-1])[::-1]
    for n, part in enumerate(samples.parts):
        expected = part.spans(np.arange(len(part))) + two.tokens.starts[n]
        assert np.array_equal(spans[samples.first_ids[n] :][: len(part)], expected)


# ---- which store a draw comes from


def test_draws_equal_examples_worked_by_hand():
    shares = data.nested_shares([2, 1, 1])
    assert shares == [ONE // 2, ONE // 2, ONE]
    dealt = data.apportioned(np.arange(8), shares)
    assert dealt.store.tolist() == [2, 0, 1, 0, 2, 0, 1, 0], "the docstring's example"
    assert dealt.draw.tolist() == [0, 0, 0, 1, 1, 2, 1, 3]
    # a store is drawn if its weight is not 0, however small
    assert data.nested_shares([Fraction(1, 10**15), 1, 0])[:2] == [1, ONE]
    assert (data.apportioned(np.arange(1000), data.nested_shares([0, 1, 0])).store == 1).all()
    assert data.nested_shares([1, Fraction(1, 10**15)]) == [ONE - 1, ONE]


a_weight = st.just(0) | st.integers(1, 100) | st.floats(1e-9, 1e9)
weights = st.lists(a_weight, min_size=1, max_size=5).filter(any)


@FEW
@given(weights, st.integers(0, 2**41), st.integers(40, 300))
def test_after_any_number_of_draws_each_store_has_its_share(weights, first, count):
    """Draws of a store are numbered without gaps, and do not depend on which are computed."""
    exact = [Fraction(weight) for weight in weights]
    shares = data.nested_shares(exact)
    dealt = data.apportioned(np.arange(first, first + count), shares)
    for number, weight in enumerate(exact):
        own = dealt.draw[dealt.store == number]
        assert weight or not len(own)
        assert (np.diff(own) == 1).all()
        for last in own[-1:].tolist():
            draws = first + int(np.flatnonzero(dealt.store == number)[-1]) + 1
            share = weight / sum(exact)
            # shares are rounded to 1 / 2^32, which shows only after about 2^32 draws
            assert abs(last + 1 - draws * share) < len(weights) * (1 + draws / ONE)
    for n in (39, 0, 17):
        alone = data.apportioned(np.array([first + n]), shares)
        assert (alone.store[0], alone.draw[0]) == (dealt.store[n], dealt.draw[n])


# ---- samples and steps


def share_drawn(stores, kind):
    """Return the share of `words` in the tokens of 2,000 draws with weights 3 and 7."""
    samples = data.MixedSamples(open_store(mix(stores, 0.3, 0.7)), kind, 1024)
    ids = samples.shuffled(np.arange(2000), seed=1)
    lengths = np.diff(samples.spans(ids)).squeeze() + samples.special_tokens
    return lengths[ids < samples.first_ids[1]].sum() / lengths.sum()


def test_weights_are_shares_of_tokens_though_lengths_differ(stores, monkeypatch):
    for kind in data.KINDS:
        assert share_drawn(stores, kind) == pytest.approx(0.3, abs=0.01)
    monkeypatch.setattr(data, "mean_length", lambda samples: Fraction(1))
    assert share_drawn(stores, "pieces") < 0.25, "negative control: weights are shares of draws"


CURRICULA = [
    "--curriculum seqlen-reshape --curriculum-start 8",
    "--model bert --pack --loss-per document --curriculum seqlen --curriculum-start 16",
]


@pytest.mark.parametrize("flags", CURRICULA)
def test_a_step_of_a_mixture_follows_from_the_clock_alone(stores, flags):
    """One store with all the weight gives the steps of that store: neutral is identity."""
    check_steps_follow_from_the_clock(partial(plan_mix, mix(stores, 2, 1), flags), STEPS)
    alone, all_of_it = (plan_mix(f"{stores / 'words'}{weight}", flags) for weight in ("", "=1"))
    for one, other in zip(first_steps(alone, STEPS), first_steps(all_of_it, STEPS), strict=True):
        assert one.after == other.after and one.targets == other.targets
        assert torch.equal(one.batch.tokens, other.batch.tokens)
        assert torch.equal(one.batch.targets, other.batch.targets)


# ---- runs


POISONED = (data.Mixture, "open"), (data.MixedTokens, "take"), (data, "apportioned")


def test_off_is_absent_and_neutral_is_identity(run, stores, store_dir, monkeypatch):
    """One store calls no function of a mixture. With all the weight, it only adds `by_store`."""
    with monkeypatch.context() as patch:
        for of, name in POISONED:
            patch.setattr(of, name, None)  # a call would fail
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            run(f"{SMALLER} --data {mix(stores, 1, 1)}", out="mixed")
        plain = metrics(run(SMALLER))
    lines = metrics(run(f"{SMALLER} --data {store_dir}=1", out="alone"))
    for line in lines:
        if by_store := line.pop("by_store", None):
            assert by_store == {store_dir.name: line["val_bpb"]}
    assert lines == plain


def test_a_run_resumes_exactly_after_its_stores_have_moved(run, stores, tmp_path):
    given = mix(stores, 0.7, 0.3)
    flags = f"{SMALLER} --pack --curriculum seqlen --curriculum-start 8 --data {given}"
    whole = metrics(run(flags, out="whole"))
    with at_step(5, terminate), pytest.raises(AssertionError):  # the status is 143, not 0
        run(flags, out="stopped")
    assert read_log(tmp_path / "stopped", "train")[-1]["step"] == 5

    resume = ["--resume", "--out", "stopped"]
    turned = f"{stores / 'books'}=0.3,{stores / 'words'}=0.7"
    for other in (mix(stores, 0.6, 0.4), stores / "words", turned):
        message = refusal(train.main, [*resume, "--data", str(other)])
        assert "started with another store, or with other weights" in message
    moved = shutil.copytree(stores, tmp_path / "moved")
    assert train.main([*resume, "--data", mix(moved, 7, 3)]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole


# ---- evaluation


class ByByte(torch.nn.Module):
    """A model whose loss depends on the byte, so that texts differ in bits per byte."""

    def losses(self, batch):
        return (batch.targets % 7 + 1).double() * (batch.targets >= 0)


def test_a_mixtures_score_is_the_weighted_mean_of_its_stores(stores):
    two = open_store(mix(stores, 0.7, 0.3))
    held_out = Data(BYTES, two, special_ids=None, byte_lengths=byte_lengths(BYTES))
    result = Evaluation(held_out, 64).run(ByByte(), ALONE, 8)
    parts = [Evaluation(held_out._replace(store=p), 64).run(ByByte(), ALONE, 8) for p in two.parts]
    assert result.by_store == {"words": parts[0].val_bpb, "books": parts[1].val_bpb}
    assert parts[0].val_bpb != parts[1].val_bpb
    assert result.val_bpb == pytest.approx(0.7 * parts[0].val_bpb + 0.3 * parts[1].val_bpb)
    assert result.targets == parts[0].targets + parts[1].targets


def test_weighted_means_equal_examples_worked_by_hand(stores):
    two = open_store(mix(stores, 0.8, 0.2))
    assert tokens_of_each(two, 1000) == [650, 350], "the docstring's example"
    result = {
        "a": HeldOut(val_loss=4.0, val_bpb=2.0, targets=10, bytes=10),
        "b": HeldOut(val_loss=2.0, val_bpb=1.0, targets=1000, bytes=900),
        "no bytes": HeldOut(val_loss=9.0, val_bpb=9.0, targets=3, bytes=0),
    }
    mean = weighted(result, (0.375, 0.125, 0.5))
    assert mean == HeldOut(3.5, 1.75, 1013, 910, by_store={"a": 2.0, "b": 1.0})
    message = refusal(weighted, result, (0, 0, 1))
    assert "no byte of a text with a weight is a target" in message
