"""A mixture of stores: shares of tokens, draws that need no memory, results by store.

python -m pytest tests/test_mixture.py
"""

import gzip
import json
import shutil
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import SMALL, TINY, metrics, read_log, stop_in_step, walk
from hypothesis import given
from hypothesis import strategies as st
from small_stores import write_store

import config
import data
import train
from evaluate import Evaluation
from plan import Plan
from prepare import prepare
from support.base.clock import Clock
from support.base.rng import shuffled
from support.base.runtime import Runtime, exit_cleanly
from support.evaluation.scoring import HeldOut, on_each_store, tokens_of_each, weighted
from support.rows import mixture
from support.rows.bert import SpecialIds
from support.rows.mixture import (
    ONE,
    MixedSamples,
    MixedTokens,
    Mixture,
    apportioned,
    entries_of,
    nested_shares,
    open_store,
    share_of,
)
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding

BYTES = get_encoding("bytes")
SPECIAL_IDS = SpecialIds.of(BYTES)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Folders of two stores: `words` has short documents, `books` has long ones."""
    folder = tmp_path_factory.mktemp("stores")
    texts = {"words": ("jargon", "devil"), "books": ("kjv", "moby", "sotu")}
    lines = gzip.decompress(TINY.read_bytes()).splitlines()
    for name, prefixes in texts.items():
        mine = [line for line in lines if json.loads(line)["id"].startswith(prefixes)]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(mine))
        prepare([folder / f"{name}.jsonl"], folder / name, BYTES, "bytes")
    return folder


def mixed(stores, words, books):
    return f"{stores / 'words'}={words},{stores / 'books'}={books}"


def plan(given, flags="", number=0, world=1):
    settings = config.build(config.parse(f"{SMALL} --data {given} {flags}".split()))
    special_ids = SPECIAL_IDS if "bert" in flags else None
    ranks = Runtime(number, world, torch.device("cpu"), torch.float32, "")
    return Plan(settings, open_store(given), special_ids, ranks)


# ---- what the flag says


def test_entries_worked_by_hand():
    assert entries_of("wiki=7,code=3") == [
        ("wiki", Fraction(7, 10)),
        ("code", Fraction(3, 10)),
    ]
    assert entries_of("wiki=0.7,code=0.3") == entries_of("wiki=7,code=3"), "as exact as written"
    assert entries_of("a=0,b=1e-3") == [("a", 0), ("b", 1)]
    assert entries_of("runs/x=1/a=0.5,b=.5")[0].path == "runs/x=1/a"


def test_the_path_of_one_store_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "with,comma", "lr=0.1", "a=1,b=2"):
        write_store(tmp_path / name, [[1, 2]])
        assert entries_of(name) == [] and isinstance(open_store(name), Store)
    assert len(entries_of("a=1,c=2")) == 2, "and without such a folder it is a mixture"


@pytest.fixture
def several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "a", [[1, 2]])
    write_store(tmp_path / "b", [[1, 2, 3]])
    write_store(tmp_path / "other", [[1]], tokenizer="another")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    for name in ("a", "b", "other", "copy"):
        meta = json.loads((tmp_path / name / "meta.json").read_text())
        (tmp_path / name / "meta.json").write_text(json.dumps(meta | {"tokenizer": f"of {name}"}))


WRONG = {
    "a=0.7,b": r"--data a=0.7,b: 'b' is no PATH=WEIGHT, as in --data wiki=0.7,code=0.3$",
    "a=0.7,": r"'' is no PATH=WEIGHT",
    "a=,b=1": r"'a=' is no PATH=WEIGHT",
    "=1,b=1": r"'=1' is no PATH=WEIGHT",
    "a=0,b=0": r"all weights are 0",
    "a=-1,b=2": r"the weight -1 is not a number of 0 or more",
    "a=nan,b=2": r"the weight nan is not a number",
    "a=inf,b=2": r"the weight inf is not a number",
    "a=1e999,b=2": r"the weight 1e999 is not a number",
    "a=x,b=2": r"the weight x is not a number",
    "a=1,other=1": r"other was made with tokenizer of other and a with of a: prepare one of them",
    "a=1,a=2": r"a has the text of another store in it: name each store once",
    "a=1,./a=2": r"a has the text of another store",
    "a=1,copy=2": r"copy has the text of another store",
    "a=1,nowhere=2": r"nowhere: no token store: make one with prepare\.py",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_no_mixture_is_refused(several, given):
    with pytest.raises(ValueError, match=WRONG[given]) as caught:
        open_store(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["a=0.7,b", "a=-1,b=2", "a=1,other=1", "a=1,a=2"])
def test_as_a_command_it_is_one_line_and_status_2(several, tmp_path, capsys, given):
    argv = f"{SMALL} --tokenizer bytes --data {given} --out run".split()
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(lambda: train.main(argv))
    assert ended.value.code == 2 and not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


REFUSED = {
    "--curriculum rarity": r"^--curriculum rarity sorts the samples of one store.*seqlen$",
    "--curriculum seqlen,length --pack": r"^--curriculum length sorts the samples of one store",
    "--model bert --nsp": r"^--nsp exchanges texts among the documents of one store",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_needs_one_store_is_refused(flags):
    with pytest.raises(ValueError, match=REFUSED[flags]):
        config.build(config.parse(f"--data a=1,b=1 {flags}".split()))
    config.build(config.parse(f"--data a {flags}".split()))


def test_a_store_without_training_text_is_refused(several, tmp_path):
    write_store(tmp_path / "held", [])
    with pytest.raises(ValueError, match="held holds no training text: prepare it with another"):
        MixedSamples(open_store("a=1,held=1"), "rows", 8)


def test_stores_are_named_by_their_folders_unless_two_are_alike(several, tmp_path):
    write_store(tmp_path / "deeper" / "a", [[3, 3]])
    assert open_store("a=1,b=1").names == ("a", "b")
    assert open_store("a=1,deeper/a=1").names == ("a", "deeper/a")


# ---- tokens side by side


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_taken_tokens_are_those_of_the_arrays_one_after_the_other(lengths, drawn):
    arrays, whole = [], np.arange(sum(lengths), dtype=np.uint16)
    for length in lengths:
        arrays.append(whole[sum(map(len, arrays)) :][:length])
    places = np.array(drawn.draw(st.lists(st.integers(-3, sum(lengths) + 3))), np.int64)
    found = MixedTokens(arrays).take(places, mode="clip")
    assert found.tolist() == whole.take(places, mode="clip").tolist()
    assert found.dtype == np.uint16


def test_the_first_document_of_every_store_begins_after_end_of_text(stores):
    """As a plain run begins its first document, wherever the store lies in the mixture."""
    two = open_store(mixed(stores, 1, 1))
    starts = two.tokens.starts[:-1]
    rows = data.Rows.of(np.stack((starts, starts + 16), axis=1))
    batch = data.collate(two, rows, 16)
    assert batch.tokens[:, 0].tolist() == [BYTES.eot_token] * 2
    for row, part in enumerate(two.parts):
        assert batch.targets[row].tolist() == part.tokens[:16].tolist()


# ---- whose a draw is


def test_draws_worked_by_hand():
    shares = nested_shares([2, 1, 1])
    assert shares == [ONE // 2, ONE // 2, ONE]
    dealt = apportioned(np.arange(8), shares)
    assert dealt.store.tolist() == [2, 0, 1, 0, 2, 0, 1, 0], "the docstring's"
    assert dealt.draw.tolist() == [0, 0, 0, 1, 1, 2, 1, 3]


weights = st.lists(
    st.one_of(st.just(0), st.integers(1, 100), st.floats(1e-9, 1e9)), min_size=1, max_size=5
).filter(any)


@given(weights, st.integers(0, 2**41), st.integers(1, 300))
def test_after_any_number_of_draws_each_store_has_its_share(weights, first, count):
    """And its draws are numbered one by one, without a gap, from whichever draw one begins."""
    exact = [Fraction(weight) for weight in weights]
    shares = nested_shares(exact)
    dealt = apportioned(np.arange(first, first + count), shares)
    for number, weight in enumerate(exact):
        mine = dealt.draw[dealt.store == number]
        assert weight or not len(mine)
        assert (np.diff(mine) == 1).all()
        for last in mine[-1:].tolist():
            draws = first + int(np.flatnonzero(dealt.store == number)[-1]) + 1
            share = weight / sum(exact)
            # each of 2^32 parts is rounded, which a run of 2^32 draws is the first to notice
            assert abs(last + 1 - draws * share) < len(weights) * (1 + draws / ONE)


def test_negative_control_draws_by_lot_are_further_from_their_shares():
    by_lot = np.random.default_rng(0).random(100_000) < 0.5
    ahead = np.abs(np.cumsum(by_lot) - np.arange(1, 100_001) / 2)
    assert ahead.max() > 50
    dealt = apportioned(np.arange(100_000), nested_shares([1, 1]))
    ahead = np.abs(np.cumsum(dealt.store == 0) - np.arange(1, 100_001) / 2)
    assert ahead.max() < 1


@given(weights, st.integers(0, 2**40))
def test_whose_a_draw_is_does_not_depend_on_what_is_asked_with_it(weights, first):
    shares = nested_shares([Fraction(weight) for weight in weights])
    together = apportioned(np.arange(first, first + 40), shares)
    alone = [apportioned(np.array([first + n]), shares) for n in (39, 0, 17)]
    assert [int(one.store[0]) for one in alone] == together.store[[39, 0, 17]].tolist()
    assert [int(one.draw[0]) for one in alone] == together.draw[[39, 0, 17]].tolist()


@given(st.integers(0, 2**63 - 2), st.integers(0, ONE))
def test_a_share_is_exact_as_far_as_draws_are_numbered(n, share):
    assert int(share_of(np.array([n], np.uint64), share)[0]) == n * share // ONE


def test_negative_control_the_plain_product_is_not():
    n = np.array([2**40 + 3], np.uint64)
    assert int((n * np.uint64(ONE - 1) >> np.uint64(32))[0]) != (2**40 + 3) * (ONE - 1) // ONE


def test_every_store_with_a_weight_is_drawn_and_none_without():
    shares = nested_shares([Fraction(1, 10**15), 1, 0])
    assert shares[0] == 1 and shares[1] == ONE
    assert (apportioned(np.arange(1000), nested_shares([0, 1, 0])).store == 1).all()
    assert nested_shares([1, Fraction(1, 10**15)]) == [ONE - 1, ONE]


# ---- samples and steps


def share_read(stores, flags):
    """What `words` has of the tokens of 120 steps, several passes of it, with weights 3 and 7."""
    size = "--seq-len 1024 --batch-tokens 16384 --tokens 1e9"
    p = plan(mixed(stores, 0.3, 0.7), f"{flags} {size}")
    border, read, clock = p.store.tokens.starts[1], np.zeros(2), Clock()
    for _ in range(120):
        chosen = p.packed_rows(clock) if p.settings.pack.on else p.plain_rows(clock)
        length = chosen.rows.stop - chosen.rows.start + p.extra
        read += np.bincount(chosen.rows.start >= border, length)
        clock = chosen.after
    return read[0] / read.sum()


@pytest.mark.parametrize("flags", ["", "--pack", "--model bert", "--pack --long truncate"])
def test_tokens_have_the_shares_asked_for_though_lengths_differ(stores, flags):
    assert share_read(stores, flags) == pytest.approx(0.3, abs=0.01)


def test_negative_control_drawn_by_weight_alone_they_would_not(stores, monkeypatch):
    monkeypatch.setattr(mixture, "mean_length", lambda samples: Fraction(1))
    assert share_read(stores, "--pack") < 0.25


def test_each_store_comes_whole_before_any_of_it_comes_again(stores):
    samples = plan(mixed(stores, 0.5, 0.5), "--pack").samples
    ids = samples.shuffled(np.arange(4 * len(samples)), seed=1)
    assert ids.min() >= 0 and ids.max() < len(samples)
    for number, part in enumerate(samples.parts):
        first = samples.first_ids[number]
        mine = ids[(ids >= first) & (ids < first + len(part))]
        assert len(mine) > len(part), "more than a pass"
        for begin in range(0, len(mine) - len(part), len(part)):
            assert len({*mine[begin : begin + len(part)].tolist()}) == len(part)
    alone = shuffled(np.arange(50), len(samples.parts[0]), 1)
    mine = ids[ids < samples.first_ids[1]][:50]
    assert mine.tolist() == alone.tolist(), "the first store's order is that of a run on it alone"


def test_spans_lie_in_the_store_that_they_are_of(stores):
    two = open_store(mixed(stores, 1, 1))
    samples = MixedSamples(two, "pieces", 32)
    ids = np.arange(len(samples))[::-1]
    spans = samples.spans(ids)[::-1]
    begin = 0
    for part, start in zip(samples.parts, two.tokens.starts, strict=False):
        own = part.spans(np.arange(len(part)))
        assert np.array_equal(spans[begin : begin + len(part)], own + start)
        begin += len(part)
        for (a, b), (c, d) in zip(own[:3], own[:3] + start, strict=True):
            assert np.array_equal(part.store.tokens[a:b], two.tokens.take(np.arange(c, d), "clip"))


FLAGS = [
    "",
    "--pack",
    "--pack --pack-batch documents --long truncate",
    "--model bert",
    "--model bert --pack --loss-per document",
    "--curriculum seqlen --curriculum-start 8 --ltd --ltd-start 16",
    "--curriculum seqlen-reshape --curriculum-start 8",
    "--curriculum seqlen --curriculum-start 8 --pack",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_ranks_share_the_rows_of_one_process(stores, flags):
    given = mixed(stores, 2, 1)
    ranks = [plan(given, flags, number, 2) for number in range(2)]
    for whole, *parts in zip(*(walk(p, 25) for p in (plan(given, flags), *ranks)), strict=True):
        assert {part.after for part in parts} == {whole.after}
        assert {part.targets for part in parts} == {whole.targets}
        for field in ("tokens", "targets"):
            rows = torch.cat([getattr(part.batch, field) for part in parts])
            assert torch.equal(rows[: len(whole.batch.tokens)], getattr(whole.batch, field))


@pytest.mark.parametrize("flags", FLAGS)
def test_a_step_follows_from_the_clock_alone(stores, flags):
    given = mixed(stores, 2, 1)
    steps, again = walk(plan(given, flags), 25), plan(given, flags)
    for before, step in reversed(list(pairwise(steps))):
        found = again(before.after)  # in the wrong order, from a plan that saw nothing before
        assert found.after == step.after
        assert torch.equal(found.batch.tokens, step.batch.tokens)
        assert torch.equal(found.batch.targets, step.batch.targets)


# ---- runs


@pytest.mark.parametrize("flags", ["", "--pack", "--model bert --pack"])
def test_one_store_with_all_the_weight_is_the_plain_run(run, log_of, store_dir, flags):
    """Neutral is identity, of the losses and of what is drawn; the held-out score has a name."""
    alone = metrics(run(f"{flags} --data {store_dir}=1"))
    for line in alone:
        if by_source := line.pop("by_source", None):
            assert by_source == {store_dir.name: line["val_bpb"]}
    assert alone == metrics(log_of(flags))


def test_off_is_absent(run, log_of, monkeypatch, stores):
    plain = metrics(log_of())

    def poison(*_, **__):
        raise AssertionError("a mixture was made")

    for owner, name in ((Mixture, "open"), (mixture, "apportioned"), (mixture, "names_of")):
        monkeypatch.setattr(owner, name, poison)
    monkeypatch.setattr(MixedTokens, "take", poison)
    assert metrics(run()) == plain
    with pytest.raises(AssertionError, match="a mixture was made"):
        run(f"--data {mixed(stores, 1, 1)}", out="mixed")


@pytest.mark.parametrize(
    "flags", ["--pack --curriculum seqlen --curriculum-start 8", "--model bert"]
)
def test_stopped_and_resumed_a_run_is_the_same_also_where_the_stores_have_moved(
    run, stores, tmp_path, monkeypatch, flags
):
    flags = f"{flags} --data {mixed(stores, 0.7, 0.3)}"
    whole = metrics(run(flags, out="whole"))
    with monkeypatch.context() as patch:
        stop_in_step(9, patch)
        with pytest.raises(AssertionError):  # the status is 143, not 0
            run(flags, out="stopped")
    assert read_log(tmp_path / "stopped", "train")[-1]["step"] == 9

    resume = ["--resume", "--out", "stopped"]
    for other in (mixed(stores, 0.6, 0.4), stores / "words"):
        with pytest.raises(ValueError, match="began with another store, or other weights"):
            train.main([*resume, "--data", str(other)])
    turned = f"{stores / 'books'}=0.3,{stores / 'words'}=0.7"
    with pytest.raises(ValueError, match="began with another store, or other weights"):
        train.main([*resume, "--data", turned])
    moved = shutil.copytree(stores, tmp_path / "moved")
    assert train.main([*resume, "--data", mixed(moved, 7, 3)]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole
    evaluations = [line for line in whole if "val_bpb" in line]
    assert len(evaluations) > 1
    for line in evaluations:
        assert set(line["by_source"]) == {"words", "books"}
        mean = 0.7 * line["by_source"]["words"] + 0.3 * line["by_source"]["books"]
        assert line["val_bpb"] == pytest.approx(mean, rel=1e-12)


def test_a_run_says_how_often_it_reads_each_store(run, stores, capsys):
    run(f"--data {mixed(stores, 1, 3)}")
    said = capsys.readouterr().out
    words, books = (Store.open(stores / name).train_tokens for name in ("words", "books"))
    passes = f"words 25.0%, {1024 / words:.2f} passes; books 75.0%, {3072 / books:.2f} passes"
    assert f"mixture of {passes}" in said
    assert f"data: {words + books:,} training tokens in {mixed(stores, 1, 3)}" in said
    assert "(words " in said, "and the held-out result of each"


def test_a_dry_run_says_what_a_mixture_takes(stores, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(f"{SMALL} --data {mixed(stores, 1, 3)} --dry-run".split()) == 0
    assert "time: about" in capsys.readouterr().out and not list(tmp_path.iterdir())


# ---- what an evaluation says


class ByByte(torch.nn.Module):
    """Losses that differ from byte to byte, so that texts differ in bits per byte."""

    def losses(self, batch):
        return (batch.targets % 7 + 1).double() * (batch.targets >= 0)


def alone():
    return Runtime(0, 1, torch.device("cpu"), torch.float32, "")


def test_an_evaluation_of_a_mixture_is_that_of_each_store(stores, capsys):
    two, how = open_store(mixed(stores, 0.7, 0.3)), (64, byte_lengths(BYTES), None)
    heard = []
    evaluation = on_each_store(Evaluation, two, None, *how)
    found = evaluation.run(ByByte(), alone(), 8, heard.append)
    parts = [Evaluation(part, *how).run(ByByte(), alone(), 8) for part in two.parts]
    assert found.by_source == {"words": parts[0].val_bpb, "books": parts[1].val_bpb}
    assert parts[0].val_bpb != parts[1].val_bpb
    assert found.val_bpb == pytest.approx(0.7 * parts[0].val_bpb + 0.3 * parts[1].val_bpb)
    assert found.targets == parts[0].targets + parts[1].targets
    assert heard == sorted(heard) and heard[-1] == evaluation.rows_in_all
    assert evaluation.text == "all held-out tokens of words, all held-out tokens of books"
    words, books = found.by_source.values()
    assert str(found) == f"{found.val_bpb:.4f} bits per byte (words {words:.3f}, books {books:.3f})"


def test_tokens_of_an_evaluation_are_dealt_out_half_evenly(stores):
    two = open_store(mixed(stores, 0.8, 0.2))
    assert tokens_of_each(two, 1000) == [650, 350], "the docstring's"
    assert tokens_of_each(two, None) == [None, None]
    assert tokens_of_each(open_store(mixed(stores, 1, 0)), 1000) == [750, 250]


def test_means_worked_by_hand():
    found = {
        "a": HeldOut(val_loss=4.0, val_bpb=2.0, targets=10, bytes=10),
        "b": HeldOut(val_loss=2.0, val_bpb=1.0, targets=1000, bytes=900),
        "no bytes": HeldOut(val_loss=9.0, val_bpb=9.0, targets=3, bytes=0),
    }
    mean = weighted(found, (0.375, 0.125, 0.5))
    assert mean == HeldOut(3.5, 1.75, 1013, 910, by_source={"a": 2.0, "b": 1.0})
    with pytest.raises(ValueError, match="no byte of a text with a weight is a target"):
        weighted(found, (0, 0, 1))
