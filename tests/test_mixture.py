"""Mixtures: shares are exact after any number of draws, and resuming and evaluation follow them."""

import gzip
import json
import re
import shutil
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from conftest import BYTES, TINY, at_step, metrics, read_log, refusal, terminate
from hypothesis import given, settings
from hypothesis import strategies as st
from small_stores import ONE as ALONE
from small_stores import write_store
from test_data import rows_of
from test_evaluate import Even, evaluation_of
from test_plan import assert_is_forecast, check_steps_follow_from_the_clock, plan

import train
from data import KINDS, collate, open_samples
from evaluate import DocumentScores
from mixture import ONE, apportioned, entries_of, nested_shares, open_store
from prepare import prepare

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
SMALLER = "--layers 1 --width 16 --heads 1 --tokens 2048 --checkpoint-every 512"
SMALLER += " --pack --curriculum seqlen --curriculum-start 8"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A folder with two stores: `words` has short documents, `books` has long ones."""
    folder = tmp_path_factory.mktemp("stores")
    texts = {"words": ("jargon", "devil"), "books": ("kjv", "moby", "sotu")}
    lines = gzip.decompress(TINY.read_bytes()).splitlines()
    for name, prefixes in texts.items():
        chosen = [line for line in lines if json.loads(line)["id"].startswith(prefixes)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(chosen))
        prepare([folder / f"{name}.jsonl"], folder / name, BYTES)
    return folder


def mix(stores, words, books):
    return f"{stores / 'words'}={words},{stores / 'books'}={books}"


def plan_mix(given, flags="", rank=0, world=1):
    return plan(open_store(given), flags, rank, world)


# ---- the flag


def test_mixtures_are_parsed_exactly():
    expected = [("wiki", Fraction(7, 10)), ("code", Fraction(3, 10))]
    assert entries_of("wiki=7,code=3") == expected
    assert entries_of("wiki=0.7,code=0.3") == expected, "decimals are exact"
    assert entries_of("a=0,b=1e-3") == [("a", 0), ("b", 1)]
    assert entries_of("runs/x=1/a=0.5,b=.5")[0][0] == "runs/x=1/a"


def test_invalid_mixtures_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "a", [[1, 2]])
    write_store(tmp_path / "other", [[1]], tokenizer="another")
    for wrong in ("b", "a=nan"):
        assert f"{wrong!r} is not another PATH=WEIGHT" in refusal(open_store, f"a=0.7,{wrong}")
    message = refusal(open_store, "a=1,other=1")
    assert re.search("--data .*other was made with tokenizer another", message)


# ---- stores side by side


def test_a_mixture_holds_its_stores_one_after_the_other(stores):
    """The first document of each follows an end-of-text, as in a run with one store."""
    two = open_store(mix(stores, 1, 1))
    starts = two.tokens.starts[:-1]
    batch = collate(two, rows_of(*([(start, start + 16)] for start in starts)), 16)
    assert batch.tokens[:, 0].tolist() == [BYTES.eot_token] * 2
    assert batch.targets.tolist() == [part.tokens[:16].tolist() for part in two.parts]
    ends = [two.parts[0].tokens[0], two.parts[1].tokens[-1]]
    assert two.tokens.take(np.array([-3, 10**9]), mode="clip").tolist() == ends
    samples = open_samples(two, "pieces", 32)
    spans = samples.spans(np.arange(len(samples))[::-1])[::-1]
    for n, part in enumerate(samples.parts):
        expected = part.spans(np.arange(len(part))) + two.tokens.starts[n]
        assert np.array_equal(spans[samples.first_ids[n] :][: len(part)], expected)


# ---- which store a draw comes from


def test_draws_equal_examples_worked_by_hand():
    shares = nested_shares([2, 1, 1])
    assert shares == [ONE // 2, ONE // 2, ONE]
    dealt = apportioned(np.arange(8), shares)
    assert dealt.store.tolist() == [2, 0, 1, 0, 2, 0, 1, 0], "the docstring's example"
    assert dealt.draw.tolist() == [0, 0, 0, 1, 1, 2, 1, 3]
    # a store is drawn if its weight is not 0, however small
    assert nested_shares([Fraction(1, 10**15), 1, 0])[:2] == [1, ONE]
    assert (apportioned(np.arange(1000), nested_shares([0, 1, 0])).store == 1).all()
    assert nested_shares([1, Fraction(1, 10**15)]) == [ONE - 1, ONE]


a_weight = st.just(0) | st.integers(1, 100) | st.floats(1e-9, 1e9)
weights = st.lists(a_weight, min_size=1, max_size=5).filter(any)


@settings(max_examples=40)
@given(weights, st.integers(0, 2**41), st.integers(40, 300))
def test_after_any_number_of_draws_each_store_has_its_share(weights, first, count):
    """Draws of a store are numbered without gaps, and do not depend on which are computed."""
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
            # shares are rounded to 1 / 2^32, which shows only after about 2^32 draws
            assert abs(last + 1 - draws * share) < len(weights) * (1 + draws / ONE)
    for n in (39, 0, 17):
        alone = apportioned(np.array([first + n]), shares)
        assert (alone.store[0], alone.draw[0]) == (dealt.store[n], dealt.draw[n])


# ---- samples and steps


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_shares_of_tokens_though_lengths_differ(stores, kind):
    """With weights 3 and 7. If they were shares of draws, `words` would have less."""
    samples = open_samples(open_store(mix(stores, 0.3, 0.7)), kind, 1024)
    ids = samples.shuffled(np.arange(2000), seed=1)
    lengths = np.diff(samples.spans(ids)).squeeze() + samples.special_tokens
    of_words = lengths[ids < samples.first_ids[1]]
    assert of_words.sum() / lengths.sum() == pytest.approx(0.3, abs=0.01)


def test_a_forecast_counts_both_stores(stores):
    flags = "--pack --ltd --ltd-start 16 --tokens 100K"
    assert_is_forecast(plan_mix(mix(stores, 0.7, 0.3), flags))


CURRICULA = [
    "--curriculum seqlen-reshape --curriculum-start 8",
    "--model bert --pack --loss-per document --curriculum seqlen --curriculum-start 16",
]


@pytest.mark.parametrize("flags", CURRICULA)
def test_a_step_of_a_mixture_follows_from_the_clock_alone(stores, flags):
    """12 steps are more than a packing window holds."""
    check_steps_follow_from_the_clock(partial(plan_mix, mix(stores, 2, 1), flags), 12)


# ---- runs


def test_off_is_absent_and_neutral_is_identity(run, store_dir, monkeypatch):
    """One store calls no function of a mixture. With all the weight, it is the same run."""
    lines = metrics(run(f"{SMALLER} --data {store_dir}=1", out="neutral"))
    for place in ("Mixture.open", "MixedTokens.take", "apportioned"):
        monkeypatch.setattr(f"mixture.{place}", None)  # a call would fail
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        run(f"--data {store_dir}=1", out="control")
    assert metrics(run(SMALLER)) == lines


def test_a_run_resumes_exactly_after_its_stores_have_moved(run, stores, tmp_path):
    flags = f"{SMALLER} --data {mix(stores, 0.7, 0.3)}"
    whole = metrics(run(flags, out="whole"))
    with at_step(5, terminate), pytest.raises(AssertionError):  # the status is 143, not 0
        run(flags, out="stopped")
    assert read_log(tmp_path / "stopped", "train")[-1]["step"] == 5

    resume = ["--resume", "--out", "stopped"]
    turned = f"{stores / 'books'}=0.3,{stores / 'words'}=0.7"
    for other in (mix(stores, 0.6, 0.4), str(stores / "words"), turned):
        message = refusal(train.main, [*resume, "--data", other])
        assert "started with another store, or with other weights" in message
    moved = shutil.copytree(stores, tmp_path / "moved")
    assert train.main([*resume, "--data", mix(moved, 7, 3)]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole


# ---- evaluation


class ByByte(Even):
    """A model whose loss depends on the byte, so that texts differ in bits per byte."""

    def losses(self, x, batch):
        return (batch.targets % 7 + 1).double() * (batch.targets >= 0)


def test_a_mixtures_score_is_the_weighted_mean_of_its_stores(stores):
    two = open_store(mix(stores, 0.7, 0.3))
    result = evaluation_of(two).run(ByByte(), ALONE, 8)
    parts = [evaluation_of(part).run(ByByte(), ALONE, 8) for part in two.parts]
    assert result.by_store == {"words": parts[0].val_bpb, "books": parts[1].val_bpb}
    assert parts[0].val_bpb != parts[1].val_bpb
    assert result.val_bpb == pytest.approx(0.7 * parts[0].val_bpb + 0.3 * parts[1].val_bpb)
    assert result.targets == parts[0].targets + parts[1].targets


def test_weighted_means_equal_examples_worked_by_hand(stores):
    """Of 1,000 tokens, half are shared evenly and half by weight."""
    evaluation = evaluation_of(open_store(mix(stores, 0.8, 0.2)), tokens=1000)
    words, books = (part.rows.lengths.sum() for part in evaluation.parts)
    assert abs(words - 650) < 64 and abs(books - 350) < 64

    part, log_2 = evaluation.parts[0], np.log(2)
    shares = {"a": 0.375, "b": 0.125, "no bytes": 0.5}
    evaluation.parts = [part._replace(name=name, weight=share) for name, share in shares.items()]
    counts = [(20 * log_2, 20, 10), (900 * log_2, 1000, 900), (27.0, 3, 0)]  # nats, targets, bytes
    scores = [DocumentScores(np.arange(1), *map(np.atleast_1d, each)) for each in counts]
    mean = evaluation.total(scores)
    assert mean.by_store == pytest.approx({"a": 2.0, "b": 1.0})
    assert mean.val_bpb == pytest.approx(0.75 * 2 + 0.25 * 1)
    assert mean.val_loss == pytest.approx((0.75 * 1 + 0.25 * 0.9) * log_2)
    assert (mean.targets, mean.bytes) == (1023, 910)
    evaluation.parts = [part._replace(weight=weight) for weight in (0, 0, 1)]
    assert "no byte of a text with a weight is a target" in refusal(evaluation.total, scores)
