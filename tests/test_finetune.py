"""Prompts and answers: which tokens are targets, in the store, in rows, in the loss, in evaluation.

The reference is a loop over single documents in float64: each goes through the model alone, and
the loss is the sum over all targets divided by their number.
"""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ALL_ON,
    BYTES,
    SMALL,
    at_step,
    command_error,
    losses_of,
    metrics,
    read_log,
    refusal,
    start_ranks,
    terminate,
    write_lines,
)
from hypothesis import given
from hypothesis import strategies as st
from small_stores import in_memory
from test_plan import assert_is_forecast, plan

import analyze
import config
import evaluate
import prepare
import train
from data import Samples, cut, fitted
from kernels.cross_entropy import IGNORE
from mixture import open_store
from support import checkpoint
from support.clock import Clock
from support.published import load_into
from support.store import Store

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
END = 256


def pair(prompt: str, completion: str) -> dict:
    return {"prompt": prompt, "completion": completion}


def turns(*texts: str) -> dict:
    """Return a document of several turns, of which every second one is learned."""
    segments = [{"text": text, "loss": turn % 2 == 1} for turn, text in enumerate(texts)]
    return {"segments": segments}


def prepared(tmp_path, lines, name="store", **options) -> Store:
    prepare.prepare([write_lines(tmp_path / "qa.jsonl", lines)], tmp_path / name, BYTES, **options)
    return Store.open(tmp_path / name)


def uneven_documents(count: int = 90) -> list[dict]:
    """Return documents of 2 to about 50 bytes, most of which fit a row of 32."""
    draw, letters = random.Random(0), "abcdefgh "

    def text(longest: int) -> str:
        return "".join(draw.choices(letters, k=draw.randrange(1, longest)))

    pairs = [pair(text(20) if n % 5 else "", text(14)) for n in range(count)]
    long = [pair(text(20) + "x" * 30, text(40)) for _ in range(8)]
    return [*pairs, *long, *[turns(text(9), text(9), text(9), text(9)) for _ in range(count // 3)]]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("qa"), uneven_documents())


# ---- in the store


def targets_of(store: Store) -> list[int]:
    return np.diff(store.targets_before).tolist()


def test_a_store_counts_the_targets_before_each_token(tmp_path, capsys):
    """End-of-text is a target if the last segment is. The second document is held out."""
    talk = turns("ab", "c", "de") | {"id": "d"}  # whose crc32 is even
    store = prepared(tmp_path, [talk, pair("ab", "c") | {"id": "a"}], holdout=2)
    held_out = store.meta["documents"] - store.meta["train_documents"]
    assert store.tokens.tolist() == [*b"abc", END, *b"abcde", END] and held_out == 1
    assert targets_of(store) == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    prepare.print_summary(store.meta)
    assert "targets                3   tokens to learn" in capsys.readouterr().out
    first = np.array([0, 2, 4])
    assert store.targets_in(first, np.array([4, 3, 10])).tolist() == [2, 1, 1]


def test_a_store_in_which_all_tokens_are_targets_is_a_store_of_text(tmp_path):
    """Empty prompts leave nothing to mark, and --loss-on all reads segments as one text."""
    asked = [pair("ab", "c"), turns("de", "f")]
    stores = {
        "text": prepared(tmp_path, [{"text": text} for text in ("abc", "def")], "text", holdout=0),
        "empty": prepared(tmp_path, [pair("", "abc"), pair("", "def")], "empty", holdout=0),
        "all": prepared(tmp_path, asked, "all", loss_on="all", holdout=0),
    }
    for store in stores.values():
        assert not store.has_prompts and not (store.path / "targets.idx").exists()
        assert store.meta == stores["text"].meta
        assert store.tokens.tolist() == stores["text"].tokens.tolist()


def test_an_answer_is_held_out_whole_also_if_hashes_hold_out_none(tmp_path):
    lines = [pair(f"question {n} ", "answer") | {"id": "same"} for n in range(9)]
    store = prepared(tmp_path, lines, holdout=3)
    assert store.meta["held_out_by"] == "tail" and store.meta["documents"] == 9
    assert store.meta["train_documents"] == 6


def test_parquet_has_prompts_and_segments_too(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    lines = uneven_documents(6)
    for kind in ("prompt", "segments"):
        some = [line for line in lines if kind in line]
        of_lines = prepared(tmp_path, some, kind, holdout=0)
        parquet.write_table(pa.Table.from_pylist(some), tmp_path / kind / "a.parquet")
        prepare.prepare([tmp_path / kind / "a.parquet"], tmp_path / f"{kind}-2", BYTES, holdout=0)
        of_rows = Store.open(tmp_path / f"{kind}-2")
        assert of_rows.meta["sha256"] == of_lines.meta["sha256"]


GOOD = json.dumps(pair("ab", "c"))
BAD = [
    ('{"prompt": "a"}', "qa.jsonl:2: needs a prompt, which may be empty, and a completion, with"),
    ('{"completion": "a"}', "qa.jsonl:2: needs a prompt, which may be empty, and a completion"),
    (json.dumps(pair("a", "")), "qa.jsonl:2: needs a prompt, which may be empty, and a completion"),
    ('{"prompt": "a", "completion": 4}', "qa.jsonl:2: needs a prompt"),
    ('{"segments": [{"text": "a", "loss": false}]}', "qa.jsonl:2: needs segments, each {"),
    ('{"segments": [{"text": "", "loss": true}]}', "qa.jsonl:2: needs segments, each {"),
    ('{"segments": [{"text": "a", "loss": "no"}]}', "qa.jsonl:2: needs segments, each {"),
    ('{"segments": [{"text": "a"}]}', "qa.jsonl:2: needs segments, each {"),
    ('{"segments": ["a", "b"]}', "qa.jsonl:2: needs segments, each {"),
    (
        '{"prompt": "a", "segments": [{"text": "b", "loss": true}]}',
        "qa.jsonl:2: needs segments, or",
    ),
    ('{"segments": null}', "qa.jsonl:2: needs segments, each {"),
    ('{"text": "a"}', "qa.jsonl:1 has prompts and "),
    ('{"text": "a", "prompt": "b", "completion": "c"}', "qa.jsonl:2 has text: prepare them sep"),
]


@pytest.mark.parametrize(("line", "problem"), BAD)
def test_a_bad_line_is_named_and_no_store_is_left(line, problem, tmp_path):
    message = refusal(prepared, tmp_path, [GOOD + "\n", line])
    assert problem in message and str(tmp_path / "qa.jsonl") in message
    assert [path.name for path in tmp_path.iterdir()] == ["qa.jsonl"]


def test_text_beside_prompts_in_a_folder_is_refused_and_both_are_named(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "qa.jsonl", [pair("ab", "c")])
    (folder / "z.txt").write_text("text")
    both = (f"{folder}/qa.jsonl:1 has prompts", f"{folder}/z.txt has text")
    message = refusal(prepare.prepare, [folder], tmp_path / "out", BYTES)
    assert all(part in message for part in both) and "--loss-on all" in message
    prepare.prepare([folder], tmp_path / "out", BYTES, loss_on="all")
    assert not Store.open(tmp_path / "out").has_prompts
    words = [folder / "z.txt"]
    message = refusal(prepare.prepare, words, tmp_path / "out2", BYTES, loss_on="all")
    assert "--loss-on all has no effect" in message and not (tmp_path / "out2").exists()


def test_damaged_counts_are_refused(tmp_path):
    store = prepared(tmp_path, uneven_documents(9))
    file = store.path / "targets.idx"
    whole = file.read_bytes()
    swapped = whole[8:16] + whole[:8] + whole[16:]
    for damaged in (whole[:-16], b"", swapped, whole[:-8] + bytes(8)):
        file.write_bytes(damaged)
        assert "targets.idx" in refusal(Store.open, store.path)
    file.unlink()
    assert "targets.idx" in refusal(Store.open, store.path)
    file.write_bytes(whole)
    without = {name: value for name, value in store.meta.items() if name != "targets"}
    without["sha256"] = {"documents.idx": store.meta["sha256"]["documents.idx"]}
    (store.path / "meta.json").write_text(json.dumps(without))  # that of the same lines as text
    assert "targets.idx does not match meta.json" in refusal(Store.open, store.path)


# ---- in pieces


def marked(*documents: str) -> Store:
    """Return a store in memory of documents in which capitals are targets, and end-of-text is."""
    store = in_memory(*(text.encode() for text in documents))
    is_target = [not chr(token).islower() for token in store.tokens]
    before = np.concatenate(([0], np.cumsum(is_target)))
    return Store(store.path, store.meta, store.tokens, store.offsets, before)


def texts_in(store: Store, spans: np.ndarray) -> list[str]:
    return ["".join(map(chr, store.tokens[a:b])).replace(chr(END), ".") for a, b in spans]


def test_pieces_equal_examples_worked_by_hand():
    store = marked("questionANS", "q", "abcdefABCDEFGHI", "aBcdefgH")
    spans = np.stack((store.offsets[:-1], store.offsets[1:]), axis=1)

    def pieces(most: int) -> list[str]:
        return texts_in(store, fitted(store, spans, most))

    assert pieces(16) == ["questionANS.", "q.", "abcdefABCDEFGHI.", "aBcdefgH."]
    assert pieces(10) == ["estionANS.", "q.", "ABCDEFGHI.", "aBcdefgH."]
    # the answer is 10 long, and that of the last one 8: they are cut like any document
    assert pieces(7) == ["ionANS.", "q.", "abcdefA", "BCDEFGH", "I.", "aBcdefg", "H."]
    assert pieces(3) == ["onA", "NS.", "q.", "ABC", "DEF", "GHI", ".", "aBc", "gH."]


letters = st.text(alphabet="abAB", min_size=0, max_size=30)


@given(st.lists(letters, min_size=1, max_size=6), st.integers(1, 12))
def test_every_target_is_in_one_piece_and_answers_that_fit_are_whole(documents, most):
    store = marked(*documents)
    spans = np.stack((store.offsets[:-1], store.offsets[1:]), axis=1)
    pieces = fitted(store, spans, most)
    lengths = np.diff(pieces)[:, 0]
    assert ((0 < lengths) & (lengths <= most)).all() and (pieces[1:, 0] >= pieces[:-1, 1]).all()
    covered = np.zeros(len(store.tokens), int)
    for start, stop in pieces:
        covered[start:stop] += 1
        assert store.targets_in(start, stop) > 0
    assert (covered[np.diff(store.targets_before) > 0] == 1).all()
    for start, stop in spans:
        first = start + np.flatnonzero(np.diff(store.targets_before[start : stop + 1]))[0]
        if stop - first <= most:  # with as much of the prompt as there is room for
            assert [max(start, stop - most), stop] in pieces.tolist()


@given(st.lists(letters, min_size=1, max_size=6), st.integers(1, 12))
def test_text_is_cut_as_ever(documents, most):
    store = in_memory(*(text.encode() for text in documents))
    spans = np.stack((store.offsets[:-1], store.offsets[1:]), axis=1)
    assert fitted(store, spans, most).tolist() == cut(spans, most).tolist()


def test_too_long_documents_are_announced_with_the_length_that_cuts_none(tmp_path, capsys):
    store = prepared(tmp_path, uneven_documents())
    argv = [*SMALL.split(), "--data", str(store.path), "--dry-run"]
    assert train.main(argv) == 0
    n = int((np.diff(store.offsets[: store.meta["train_documents"] + 1]) > 32).sum())
    longest = int(np.diff(store.offsets[: store.meta["train_documents"] + 1]).max())
    said = f"{n} documents of {store.path} longer than a row, cut: --seq-len {longest} would cut"
    assert n > 5 and said in capsys.readouterr().out
    train.main([*argv, "--seq-len", str(longest), "--batch-tokens", str(8 * longest)])
    assert "longer than a row" not in capsys.readouterr().out


# ---- in the loss


def model_for(flags: str = "") -> torch.nn.Module:
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    torch.manual_seed(0)
    model = config.transformer_config(settings, 320).build().double()
    return model.requires_grad_(True)


def step_gradients(store, flags: str, ranks: int = 1, micro: int = 99):
    """Return the loss and gradients of a run's first step, summed over ranks and micro-batches."""
    model, total = model_for(), 0.0
    for rank in range(ranks):
        step = plan(store, flags, rank, ranks)(Clock())
        for first in range(0, len(step.batch.tokens), micro):
            part = step.batch.rows(slice(first, first + micro))
            loss = model.loss(model(*part.inputs), part) / step.divisor
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}, step.window.rows


def looped_gradients(store, rows, per_piece: bool):
    """The same, document by document."""
    model, losses = model_for(), []
    for start, stop, _ in rows.pieces.tolist():
        ids = torch.tensor(store.tokens[start:stop].astype(np.int64))
        before = store.tokens[start - 1] if start else END
        x = torch.cat((torch.tensor([int(before)]), ids[:-1]))[None]
        is_target = torch.tensor(np.diff(store.targets_before[start : stop + 1]) > 0)
        nats = F.cross_entropy(model.logits(model(x))[0], ids, reduction="none")[is_target]
        losses.append(nats.mean()[None] if per_piece else nats)
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def distance(ours: dict, theirs: dict) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


FORMS = ["", "--pack", "--pack --pack-batch documents", "--curriculum seqlen --curriculum-start 8"]
FORMS += ["--pack --curriculum seqlen --curriculum-start 16"]


@pytest.mark.parametrize("per", ["token", "document"])
@pytest.mark.parametrize("flags", FORMS)
def test_a_step_has_the_loss_and_gradients_of_single_documents(store, flags, per):
    """In whichever rows, micro-batches and ranks."""
    flags = f"{flags} --loss-per {per}"
    loss, gradients, rows = step_gradients(store, flags)
    expected, by_loop = looped_gradients(store, rows, per == "document")
    near = 1e-6 if per == "document" else 1e-9  # weights are fp32
    assert loss == pytest.approx(expected, abs=near) and distance(gradients, by_loop) < near
    for ranks, micro in ((1, 1), (3, 2)):
        split, other, _ = step_gradients(store, flags, ranks, micro)
        assert split == pytest.approx(loss, abs=1e-9) and distance(other, gradients) < 1e-9


def test_packed_and_padded_steps_are_the_same(store):
    padded, packed = (step_gradients(store, f) for f in ("", "--pack --pack-batch documents"))
    assert packed[0] == pytest.approx(padded[0], abs=1e-9)
    assert distance(packed[1], padded[1]) < 1e-9
    assert len(packed[2]) < len(padded[2]), "in fewer rows"


def by_tokens(task, store, rows):
    return int(rows.lengths.sum())


@pytest.mark.parametrize("wrong", ["tokens", "mean of means"])
def test_control_a_wrong_divisor_is_noticed(store, monkeypatch, wrong):
    if wrong == "tokens":
        monkeypatch.setattr("plan.loss_divisor", by_tokens)
    loss, _, rows = step_gradients(store, "--pack")
    if wrong == "mean of means":
        step = plan(store, "--pack")(Clock())
        parts = [step.batch.rows(slice(n, n + 1)) for n in range(len(step.batch.tokens))]
        model = model_for()
        means = [model.loss(model(*p.inputs), p) / (p.targets != IGNORE).sum() for p in parts]
        loss = torch.stack(means).mean().item()
    expected, _ = looped_gradients(store, rows, per_piece=False)
    assert abs(loss - expected) > 1e-3


def test_prompts_get_no_loss_but_reach_the_answer(store):
    step = plan(store, "--pack")(Clock())
    model, batch = model_for(), step.batch
    x = model(*batch.inputs)
    x.retain_grad()
    model.loss(x, batch).backward()
    is_target = batch.targets != IGNORE
    assert x.grad[~is_target].abs().max() == 0 < x.grad[is_target].abs().sum(-1).min()
    row = int((is_target & (batch.positions > 3)).sum(1).argmax())
    first = int(torch.nonzero(is_target[row] & (batch.positions[row] > 3))[0])
    changed = batch.tokens.clone()
    changed[row, first - 2] += 1  # a token of its prompt
    with torch.no_grad():
        y = model(changed, *batch.inputs[1:])
    assert (model.logits(y) - model.logits(x))[row, first].abs().max() > 1e-6


def test_transformers_has_the_same_loss_with_labels_of_minus_100(store, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, _, rows = step_gradients(store, "--pack")
    shape = dict(vocab_size=320, n_positions=64, n_embd=32, n_layer=4, n_head=2)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).double().eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.bin")
    flags = "--pos learned --tied --size 124M"
    shape = config.transformer_config(
        config.build(config.parse(f"{SMALL} {flags}".split())), 320, 64
    )
    load_into(model := shape.build().double(), tmp_path / "weights.bin")
    batch = plan(store, "--pack")(Clock()).batch
    ours = model.loss(model(*batch.inputs), batch).item()
    total = 0.0
    for start, stop, _ in rows.pieces.tolist():
        ids = torch.tensor([[END, *store.tokens[start:stop].tolist()]])
        ids[0, 0] = int(store.tokens[start - 1]) if start else END
        labels = ids.clone()
        labels[0, 0] = -100
        labels[0, 1:][torch.tensor(np.diff(store.targets_before[start : stop + 1]) == 0)] = -100
        total += theirs(ids, labels=labels).loss.item() * int((labels != -100).sum())
    assert ours == pytest.approx(total, rel=1e-6)


# ---- in runs


def argv_for(store, out, flags="") -> list[str]:
    return f"{SMALL} --tokens 1024 --data {store.path} --out {out} {flags}".split()


TECHNIQUES = ["", f"{ALL_ON} --ltd-start 8", "--pack --curriculum length,rarity"]


@pytest.mark.parametrize("flags", TECHNIQUES)
def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(store, flags, tmp_path):
    assert train.main(argv_for(store, tmp_path / "a", flags)) == 0
    with at_step(3, terminate):
        assert train.main(argv_for(store, tmp_path / "b", flags)) == 143
    assert train.main(["--resume", "--out", str(tmp_path / "b")]) == 0
    a, b = (metrics(read_log(tmp_path / name)) for name in "ab")
    assert a == b and len(losses_of(tmp_path / "a")) > 3


@pytest.mark.dist
def test_three_ranks_have_the_losses_of_one(store, tmp_path):
    flags = "--pack --pack-batch documents --batch-tokens 192 --lr 1e-3"  # unequal rows
    assert train.main(argv_for(store, tmp_path / "one", flags)) == 0
    start_ranks(3, argv_for(store, tmp_path / "three", flags))
    one, three = (read_log(tmp_path / name, "train") for name in ("one", "three"))
    assert len(one) == len(three) > 3
    for a, b in zip(one, three, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_a_mixture_of_text_and_answers_has_the_targets_of_each(store, store_dir, tmp_path):
    mixed = open_store(f"{store_dir}=0.5,{store.path}=0.5")
    step = plan(mixed, "--pack --batch-tokens 2048")(Clock())
    at = mixed.tokens.starts[1]
    expected = 0
    for start, stop, _ in step.window.rows.pieces.tolist():
        of_answers = start >= at
        expected += store.targets_in(start - at, stop - at) if of_answers else stop - start
    assert step.divisor == expected == (step.batch.targets != IGNORE).sum()
    assert 0 < step.divisor < step.window.rows.lengths.sum()
    for flags in ("", "--pack"):
        assert_is_forecast(plan(mixed, f"{flags} --tokens 30K"))
    data_flag = f"--data {store_dir}=0.5,{store.path}=0.5"
    assert train.main(argv_for(store, tmp_path / "run", f"{data_flag} --pack")) == 0
    (last,) = (line for line in read_log(tmp_path / "run", "eval") if line["last"])
    assert set(last["by_store"]) == {"tiny", "store"}


def test_samples_are_ranked_by_all_their_tokens(store, tmp_path):
    samples = Samples(store, "pieces", 32)
    spans = samples.spans(np.arange(len(samples)))
    files = analyze.measure(samples, "length", tmp_path / "x", checkpoint.ALONE)
    assert np.load(files[0]).tolist() == np.diff(spans)[:, 0].tolist()
    nats = analyze.surprisal(
        np.bincount(np.concatenate([store.tokens[a:b] for a, b in spans]), minlength=261)
    )
    files = analyze.measure(samples, "rarity", tmp_path / "y", checkpoint.ALONE)
    expected = [nats[store.tokens[a:b]].sum() for a, b in spans]
    assert np.load(files[0]) == pytest.approx(expected, rel=1e-5)


def test_evaluation_counts_targets_only(store, tmp_path, capsys):
    run = tmp_path / "run"
    assert train.main(argv_for(store, run, "--pack")) == 0
    capsys.readouterr()
    file = tmp_path / "each.jsonl"
    evaluate.main([str(run), "--device", "cpu", "--by-document", str(file)])
    held_out = slice(store.offsets[store.meta["train_documents"]], None)
    targets = int(np.diff(store.targets_before)[held_out].sum())
    ids = store.tokens[held_out][np.diff(store.targets_before)[held_out] > 0]
    said = capsys.readouterr().out
    assert f", over {targets:,} targets, {(ids < 256).sum():,} bytes" in said
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    nats, count = (sum(d[name] for d in documents) for name in ("nats", "tokens"))
    assert count == targets
    assert (
        f"{nats / count:.4f} nats per target, a perplexity of {math.exp(nats / count):,.2f}" in said
    )


NO_USE = {
    "--model bert --seq-len 32": "has prompts, which a BERT does not know: choose --model gpt",
    "--curriculum seqlen-reshape": "--curriculum seqlen-reshape would divide answers: use seqlen",
    "--tokenizer pd4k": "made with tokenizer bytes, not with what pd4k is now",
}


@pytest.mark.parametrize("flags", NO_USE)
def test_what_cannot_use_prompts_is_refused(flags, store, tmp_path, monkeypatch, capsys):
    argv = argv_for(store, tmp_path / "run", flags)
    error = command_error(train.main, ["train.py", *argv], monkeypatch, capsys)
    assert NO_USE[flags] in error and not (tmp_path / "run").exists()
