"""A mixture of stores: shares of tokens, draws that need no memory, results by store."""

import gzip
import json
import shutil
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from conftest import TINY, metrics, read_log, stop_in_step, walk
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import ONE as ALONE
from small_stores import write_store
from test_plan import check_steps_follow_from_the_clock
from test_plan import plan as plan_of

import data
import data as mixture
import train
from data import ONE, Data, apportioned, entries_of, nested_shares, open_store
from evaluate import Evaluation, HeldOut, tokens_of_each, weighted
from prepare import prepare
from support.clock import Clock, shuffled
from support.store import byte_lengths, get_encoding

pytestmark = pytest.mark.usefixtures("short_ends")
BYTES = get_encoding("bytes")
STEPS = 12  # more than one packing window has
FEW = settings(max_examples=40, deadline=None)
SMALLER = "--layers 1 --width 16 --heads 1 --tokens 2048 --checkpoint-every 512"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folders of two stores: `words` has short documents, `books` has long ones."""
    folder = tmp_path_factory.mktemp("stores")
    texts = {"words": ("jargon", "devil"), "books": ("kjv", "moby", "sotu")}
    lines = gzip.decompress(TINY.read_bytes()).splitlines()
    for name, prefixes in texts.items():
        chosen = [line for line in lines if json.loads(line)["id"].startswith(prefixes)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(chosen))
        prepare([folder / f"{name}.jsonl"], folder / name, BYTES, "bytes")
    return folder


def mixed(stores, words, books):
    return f"{stores / 'words'}={words},{stores / 'books'}={books}"


def plan(given, flags="", rank=0, world=1):
    return plan_of(open_store(given), flags, rank, world)


# ---- the flag


def test_entries_worked_by_hand():
    assert entries_of("wiki=7,code=3") == [("wiki", Fraction(7, 10)), ("code", Fraction(3, 10))]
    assert entries_of("wiki=0.7,code=0.3") == entries_of("wiki=7,code=3"), "as exact as written"
    assert entries_of("a=0,b=1e-3") == [("a", 0), ("b", 1)]
    assert entries_of("runs/x=1/a=0.5,b=.5")[0][0] == "runs/x=1/a"


@pytest.fixture
def several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, documents in {"a": [[1, 2]], "b": [[1, 2, 3]], "other": [[1]]}.items():
        tokenizer = "another" if name == "other" else "by hand"
        write_store(tmp_path / name, documents, tokenizer)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")


WRONG = {
    "a=0.7,b": "--data a=0.7,b: 'b' is not PATH=WEIGHT",
    "a=nan,b=2": "--data .* nan",
    "a=1,other=1": "--data .*other was made with tokenizer another",
    "a=1,copy=2": "--data .*copy has the same text",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_not_a_mixture_is_refused(several, given):
    with pytest.raises(ValueError, match=WRONG[given]):
        open_store(given)


def test_parts_have_names(several, tmp_path):
    write_store(tmp_path / "deeper" / "a", [[3, 3]])
    assert open_store("a=1,b=1").names == ("a", "b")
    assert open_store("a=1,deeper/a=1").names == ("a", "deeper/a")


# ---- stores side by side


@FEW
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_taken_tokens_are_those_of_the_arrays_one_after_the_other(lengths, drawn):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    arrays = np.split(whole, np.cumsum(lengths)[:-1])
    places = np.array(drawn.draw(st.lists(st.integers(-3, sum(lengths) + 3))), np.int64)
    taken = mixture.MixedTokens(arrays).take(places, mode="clip")
    assert taken.tolist() == whole.take(places, mode="clip").tolist()
    assert taken.dtype == np.uint16


def test_stores_lie_side_by_side(stores):
    """The first document of each begins after an end-of-text, as that of a plain run does."""
    two = open_store(mixed(stores, 1, 1))
    starts = two.tokens.starts[:-1]
    batch = data.collate(two, data.Rows.of(np.stack((starts, starts + 16), axis=1)), 16)
    assert batch.tokens[:, 0].tolist() == [BYTES.eot_token] * 2
    assert batch.targets.tolist() == [part.tokens[:16].tolist() for part in two.parts]
    samples = mixture.MixedSamples(two, "pieces", 32)
    spans = samples.spans(np.arange(len(samples))[::-1])[::-1]
    for n, part in enumerate(samples.parts):
        expected = part.spans(np.arange(len(part))) + two.tokens.starts[n]
        assert np.array_equal(spans[samples.first_ids[n] :][: len(part)], expected)


# ---- which store a draw is from


def test_draws_worked_by_hand():
    shares = nested_shares([2, 1, 1])
    assert shares == [ONE // 2, ONE // 2, ONE]
    dealt = apportioned(np.arange(8), shares)
    assert dealt.store.tolist() == [2, 0, 1, 0, 2, 0, 1, 0], "the docstring's"
    assert dealt.draw.tolist() == [0, 0, 0, 1, 1, 2, 1, 3]
    # every store with a weight is drawn, and none without
    assert nested_shares([Fraction(1, 10**15), 1, 0])[:2] == [1, ONE]
    assert (apportioned(np.arange(1000), nested_shares([0, 1, 0])).store == 1).all()
    assert nested_shares([1, Fraction(1, 10**15)]) == [ONE - 1, ONE]


a_weight = st.just(0) | st.integers(1, 100) | st.floats(1e-9, 1e9)
weights = st.lists(a_weight, min_size=1, max_size=5).filter(any)


@FEW
@given(weights, st.integers(0, 2**41), st.integers(40, 300))
def test_after_any_number_of_draws_each_store_has_its_share(weights, first, count):
    """Its draws are numbered without a gap, and no draw depends on what is asked with it."""
    exact = [Fraction(weight) for weight in weights]
    shares = nested_shares(exact)
    dealt = apportioned(np.arange(first, first + count), shares)
    for number, weight in enumerate(exact):
        own = dealt.draw[dealt.store == number]
        assert weight or not len(own)
        assert (np.diff(own) == 1).all()
        for last in own[-1:].tolist():
            draws = first + int(np.flatnonzero(dealt.store == number)[-1]) + 1
            share = weight / sum(exact)
            # each of 2^32 parts is rounded, which a run of 2^32 draws is the first to notice
            assert abs(last + 1 - draws * share) < len(weights) * (1 + draws / ONE)
    for n in (39, 0, 17):
        alone = apportioned(np.array([first + n]), shares)
        assert (alone.store[0], alone.draw[0]) == (dealt.store[n], dealt.draw[n])


def test_negative_control_random_draws_are_further_from_their_shares():
    def most_ahead(is_first):
        return np.abs(np.cumsum(is_first) - np.arange(1, 100_001) / 2).max()

    assert most_ahead(np.random.default_rng(0).random(100_000) < 0.5) > 50
    assert most_ahead(apportioned(np.arange(100_000), nested_shares([1, 1])).store == 0) < 1


@FEW
@given(st.integers(0, 2**63 - 2), st.integers(0, ONE))
def test_a_share_is_exact_as_far_as_draws_are_numbered(n, share):
    assert int(mixture.share_of(np.array([n], np.uint64), share)[0]) == n * share // ONE
    n = np.array([2**40 + 3], np.uint64)  # negative control: the plain product is not
    assert int((n * np.uint64(ONE - 1) >> np.uint64(32))[0]) != (2**40 + 3) * (ONE - 1) // ONE


# ---- samples and steps


def share_read(stores, flags):
    """The share of `words` in the tokens of 60 steps, with weights 3 and 7."""
    size = "--seq-len 1024 --batch-tokens 16384 --tokens 1e9"
    p = plan(mixed(stores, 0.3, 0.7), f"{size} {flags}")
    border, read, clock = p.store.tokens.starts[1], np.zeros(2), Clock()
    for _ in range(60):
        chosen = p.packed_rows(clock) if p.settings.pack.on else p.unpacked_rows(clock)
        length = chosen.rows.stop - chosen.rows.start + p.extra
        read += np.bincount(chosen.rows.start >= border, length)
        clock = clock._replace(cursor=chosen.after)
    return read[0] / read.sum()


def test_tokens_have_the_shares_asked_for_though_lengths_differ(stores, monkeypatch):
    for flags in ("", "--model bert", "--pack --seq-len 256"):
        assert share_read(stores, flags) == pytest.approx(0.3, abs=0.01)
    monkeypatch.setattr(mixture, "mean_length", lambda samples: Fraction(1))
    assert share_read(stores, "--pack") < 0.25, "negative control: drawn by weight alone"


def test_each_store_comes_whole_before_any_of_it_comes_again(stores):
    samples = plan(mixed(stores, 0.5, 0.5), "--pack").samples
    ids = samples.shuffled(np.arange(4 * len(samples)), seed=1)
    assert ids.min() >= 0 and ids.max() < len(samples)
    for first, part in zip(samples.first_ids, samples.parts, strict=False):
        own = ids[(ids >= first) & (ids < first + len(part))]
        assert len(own) > len(part), "more than a pass"
        for begin in range(0, len(own) - len(part), len(part)):
            assert len({*own[begin : begin + len(part)].tolist()}) == len(part)
    alone = shuffled(np.arange(50), len(samples.parts[0]), 1)
    own = ids[ids < samples.first_ids[1]][:50]
    assert own.tolist() == alone.tolist(), "the first store's order is that of a run on it alone"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pack --pack-batch documents",
        "--model bert --pack --loss-per document",
        "--curriculum seqlen-reshape --curriculum-start 8",
        "--curriculum seqlen --curriculum-start 8 --pack",
    ],
)
def test_a_step_follows_from_the_clock_alone_on_any_number_of_ranks(stores, flags):
    """And one store with all the weight gives the steps of that store: neutral is identity."""
    check_steps_follow_from_the_clock(partial(plan, mixed(stores, 2, 1), flags), STEPS)
    alone, all_of_it = (plan(f"{stores / 'words'}{weight}", flags) for weight in ("", "=1"))
    for one, other in zip(walk(alone, STEPS), walk(all_of_it, STEPS), strict=True):
        assert one.after == other.after and one.targets == other.targets
        assert torch.equal(one.batch.tokens, other.batch.tokens)
        assert torch.equal(one.batch.targets, other.batch.targets)


# ---- runs


POISONED = (mixture.Mixture, "open"), (mixture.MixedTokens, "take"), (mixture, "apportioned")


def test_off_is_absent_and_one_store_with_all_the_weight_is_the_plain_run(
    run, stores, store_dir, monkeypatch
):
    """No function of a mixture is called for one store; its held-out score has a name more."""

    with monkeypatch.context() as patch:
        for of, name in POISONED:
            patch.setattr(of, name, None)  # a call would fail
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            run(f"{SMALLER} --data {mixed(stores, 1, 1)}", out="mixed")
        plain = metrics(run(SMALLER))
    lines = metrics(run(f"{SMALLER} --data {store_dir}=1", out="alone"))
    for line in lines:
        if by_store := line.pop("by_store", None):
            assert by_store == {store_dir.name: line["val_bpb"]}
    assert lines == plain


def test_a_run_resumed_where_its_stores_have_moved_is_the_same(run, stores, tmp_path, monkeypatch):
    given = mixed(stores, 0.7, 0.3)
    flags = f"{SMALLER} --pack --curriculum seqlen --curriculum-start 8 --data {given}"
    whole = metrics(run(flags, out="whole"))
    with monkeypatch.context() as patch:
        stop_in_step(5, patch)
        with pytest.raises(AssertionError):  # the status is 143, not 0
            run(flags, out="stopped")
    assert read_log(tmp_path / "stopped", "train")[-1]["step"] == 5

    resume = ["--resume", "--out", "stopped"]
    turned = f"{stores / 'books'}=0.3,{stores / 'words'}=0.7"
    for other in (mixed(stores, 0.6, 0.4), stores / "words", turned):
        with pytest.raises(ValueError, match="began with another store, or with other weights"):
            train.main([*resume, "--data", str(other)])
    moved = shutil.copytree(stores, tmp_path / "moved")
    assert train.main([*resume, "--data", mixed(moved, 7, 3)]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole


# ---- evaluation


class ByByte(torch.nn.Module):
    """Losses that differ from byte to byte, so that texts differ in bits per byte."""

    def losses(self, batch):
        return (batch.targets % 7 + 1).double() * (batch.targets >= 0)


def test_an_evaluation_of_a_mixture_is_that_of_each_store(stores):
    two = open_store(mixed(stores, 0.7, 0.3))
    data = Data(BYTES, two, special_ids=None, byte_lengths=byte_lengths(BYTES))
    found = Evaluation(data, 64).run(ByByte(), ALONE, 8)
    parts = [Evaluation(data._replace(store=p), 64).run(ByByte(), ALONE, 8) for p in two.parts]
    assert found.by_store == {"words": parts[0].val_bpb, "books": parts[1].val_bpb}
    assert parts[0].val_bpb != parts[1].val_bpb
    assert found.val_bpb == pytest.approx(0.7 * parts[0].val_bpb + 0.3 * parts[1].val_bpb)
    assert found.targets == parts[0].targets + parts[1].targets


def test_tokens_of_an_evaluation_are_dealt_out_half_evenly(stores):
    two = open_store(mixed(stores, 0.8, 0.2))
    assert tokens_of_each(two, 1000) == [650, 350], "the docstring's"
    assert tokens_of_each(two, None) == [None, None]


def test_means_worked_by_hand():
    found = {
        "a": HeldOut(val_loss=4.0, val_bpb=2.0, targets=10, bytes=10),
        "b": HeldOut(val_loss=2.0, val_bpb=1.0, targets=1000, bytes=900),
        "no bytes": HeldOut(val_loss=9.0, val_bpb=9.0, targets=3, bytes=0),
    }
    mean = weighted(found, (0.375, 0.125, 0.5))
    assert mean == HeldOut(3.5, 1.75, 1013, 910, by_store={"a": 2.0, "b": 1.0})
    with pytest.raises(ValueError, match="no byte of a text with a weight is a target"):
        weighted(found, (0, 0, 1))
