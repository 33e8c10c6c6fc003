"""Bits per byte: a worked answer, whole documents, the same for any number of rows and ranks.

By document too, held to its definition: every piece of text alone through the model.
"""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, start_ranks
from torch import nn

import evaluate
from data import places
from evaluate import Evaluation
from kernels.cross_entropy import IGNORE
from model import Transformer, TransformerConfig
from prepare import prepare
from support.base.runtime import Runtime
from support.evaluation import scoring
from support.rows.bert import SpecialIds
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding

BYTES = get_encoding("bytes")
LENGTHS = byte_lengths(BYTES)


class Ranks(Runtime):
    """One rank of several that cannot hear the others: its share of the sums, unreduced."""

    def reduce(self, values):
        return values


def one(rank=0, world_size=1):
    return Ranks(rank, world_size, torch.device("cpu"), torch.float32, "")


class Even(nn.Module):
    """Gives every one of 256 bytes and end-of-text the same chance."""

    def losses(self, batch):
        return math.log(257.0) * (batch.targets >= 0).double()


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


def test_worked_answer_and_whole_documents(store):
    seen = Evaluation(store, 64, LENGTHS).run(Even(), one(), 8)
    documents = store.meta["documents"] - store.meta["train_documents"]
    assert seen.bytes == store.meta["bytes"] - store.meta["train_bytes"]
    assert seen.targets == seen.bytes + documents == store.meta["tokens"] - store.train_tokens
    assert seen.val_loss == pytest.approx(math.log(257))
    assert seen.val_bpb == pytest.approx(math.log2(257) * seen.targets / seen.bytes)


def test_by_source_is_what_each_source_alone_has(tmp_path):
    """Held-out documents of two sources, in one store and in a store each."""
    texts = {name: [f"{name} {n} " * (n % 5 + 1) for n in range(60)] for name in ("wiki", "code")}
    found = {}
    for name, chosen in {"both": texts, **{n: {n: t} for n, t in texts.items()}}.items():
        lines = [{"text": t, "source": n} for n, mine in chosen.items() for t in mine]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        prepare([path], tmp_path / name, BYTES, "bytes", holdout=4)
        found[name] = Evaluation(Store.open(tmp_path / name), 64, LENGTHS).run(Even(), one(), 8)
    both = found.pop("both")
    assert both.by_source == pytest.approx({n: alone.val_bpb for n, alone in found.items()})
    assert len({*both.by_source.values()}) == 2, "they differ"
    assert found["wiki"].by_source == pytest.approx({"wiki": found["wiki"].val_bpb})


def test_without_sources_nothing_is_said_by_source(store):
    assert Evaluation(store, 64, LENGTHS).run(Even(), one(), 8).by_source is None


def test_rows_at_a_time_and_ranks_do_not_matter(store):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("gpt", 2, 2, 16, 32, 64, 320)).double()
    evaluation = Evaluation(store, 64, LENGTHS, tokens=20_000)
    whole = evaluation.run(model, one(), 8)
    assert evaluation.run(model, one(), 3).val_bpb == pytest.approx(whole.val_bpb, abs=1e-9)
    parts = [evaluation.run(model, one(rank, 3), 8) for rank in range(3)]
    assert sum(part.targets for part in parts) == whole.targets
    nats = sum(part.val_loss * part.targets for part in parts)
    assert nats / whole.targets == pytest.approx(whole.val_loss, abs=1e-9)
    assert model.training, "the model's mode is kept"


def test_a_part_is_whole_pieces_in_a_fixed_order(store):
    part = Evaluation(store, 64, LENGTHS, tokens=5000)
    rows, again = part.rows, Evaluation(store, 64, LENGTHS, tokens=5000).rows
    assert np.array_equal(rows.start, again.start) and np.array_equal(rows.offsets, again.offsets)
    assert 5000 <= (rows.stop - rows.start).sum() < 5064
    assert rows.start.min() >= store.train_tokens


def test_between_is_called_after_every_batch_alike_on_every_rank(store):
    evaluation = Evaluation(store, 64, LENGTHS, tokens=2000)
    total = len(evaluation.rows)
    for world_size in (1, 3):
        heard = []
        for rank in range(world_size):
            seen: list[int] = []
            evaluation.run(Even(), one(rank, world_size), 8, seen.append)
            heard.append(seen)
        turns = range(8 * world_size, total + 8 * world_size, 8 * world_size)
        assert heard == [[min(done, total) for done in turns]] * world_size


def test_what_between_raises_ends_an_evaluation(store):
    evaluation, model, seen = Evaluation(store, 64, LENGTHS, tokens=2000), Even(), []

    def third(done: int) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation.run(model, one(), 4, third)
    assert len(seen) == 3 and model.training


def test_an_evaluation_without_a_target_is_refused(store):
    class Unmasked(Evaluation):
        def batch(self, rows):
            batch = super().batch(rows)
            return batch._replace(targets=torch.full_like(batch.targets, IGNORE))

    with pytest.raises(ValueError, match="no held-out token is a target: evaluate on more"):
        Unmasked(store, 64, LENGTHS, tokens=100).run(Even(), one(), 8)


def test_bert_is_asked_the_same_masked_tokens_each_time(store):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("bert", 2, 2, 16, 32, 64, 320)).double()
    evaluation = Evaluation(store, 64, LENGTHS, SpecialIds.of(BYTES), tokens=20_000)
    first, again, other = (evaluation.run(model, one(), rows) for rows in (8, 8, 5))
    assert first == again and other.targets == first.targets
    assert other.val_bpb == pytest.approx(first.val_bpb, abs=1e-9)
    assert 0.13 < first.targets / 20_000 < 0.17


def test_masks_lie_on_the_same_tokens_whatever_is_evaluated_with_them(store):
    """A part of the text asks for what the whole asks for there, however rows are packed."""
    special_ids = SpecialIds.of(BYTES)

    def asked(tokens):
        evaluation, found = Evaluation(store, 64, LENGTHS, special_ids, tokens=tokens), set()
        for row in range(len(evaluation.rows)):
            rows = evaluation.rows.take(np.array([row]))
            batch = evaluation.batch(rows)
            at = batch.targets != IGNORE
            found |= set(
                zip(places(rows, batch)[at].tolist(), batch.tokens[at].tolist(), strict=True)
            )
        return found

    assert asked(2_000) < asked(None)


def test_a_bert_is_asked_of_every_pair_whether_it_follows(store):
    """Right answers are counted: those of a model that reads them, of its opposite, of one that
    always says yes; and nothing else of the result changes.
    """
    evaluation = Evaluation(store, 64, LENGTHS, SpecialIds.of(BYTES), tokens=20_000, nsp=True)
    shown = []

    class Oracle(Even):
        def follows(self, x, cls):
            answers = shown[-1].targets.flatten()[cls]
            says = {"right": answers, "wrong": 1 - answers, "yes": answers * 0}[self.says]
            return torch.nn.functional.one_hot(says, 2).double()

        def hidden_states(self, tokens, positions, doc_ids):
            return tokens

    class Shown(Evaluation):
        def batch(self, rows):
            shown.append(super().batch(rows).with_documents())
            return shown[-1]

    evaluation.__class__ = Shown
    model, found = Oracle(), {}
    for model.says in ("right", "wrong", "yes"):
        result = evaluation.run(model, one(), 8)
        found[model.says] = result.nsp_accuracy
        alone = Evaluation(store, 64, LENGTHS, SpecialIds.of(BYTES), tokens=20_000)
        assert result._replace(nsp_accuracy=None, nsp_pairs=None) == alone.run(model, one(), 8)
    assert found["right"] == 1 and found["wrong"] == 0
    assert 0.4 < found["yes"] < 0.6
    answers = torch.cat([batch.targets[batch.positions == 0] for batch in shown])
    assert {0, 1} < set(answers.tolist()) <= {0, 1, IGNORE}


def test_a_store_that_holds_nothing_out_is_refused(store):
    whole = replace(store, train_documents=store.meta["documents"])
    with pytest.raises(ValueError, match=r"has no held-out document, .* again with --holdout 20"):
        Evaluation(whole, 64, LENGTHS)


def test_command_repeats_what_the_run_found(run, store_dir, capsys):
    lines = run("--final-eval-tokens 1M")
    found = [line for line in lines if line["event"] == "eval"][-1]["val_bpb"]
    capsys.readouterr()
    evaluate.main(["run", "--device", "cpu"])
    assert f"held-out {found:.4f} bits per byte" in capsys.readouterr().out
    evaluate.main(["run", "--device", "cpu", "--tokens", "2K"])
    (tokens,) = re.findall(r"of ([\d,]+) tokens", capsys.readouterr().out)
    assert 2000 <= int(tokens.replace(",", "")) < 2032  # a row more at most


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rows 0", "--rows: 0 is not a whole number, 1 or more"),
        ("--rows -3", "--rows: -3 is not a whole number, 1 or more"),
        ("--rows nan", "--rows: nan is not a whole number"),
        ("--tokens 0", "--tokens: 0 is not a whole number, 1 or more"),
        ("--tokens nan", "--tokens: nan is not a whole number"),
        ("--tokens -1", "--tokens: -1 is not a whole number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_a_run_is_opened(flags, said):
    with pytest.raises(ValueError) as refusal:
        evaluate.main(["nowhere", *flags.split()])
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_no_dropping_and_full_length_whatever_training_does(run):
    """A model that no longer moves is scored alike with every technique on and with none."""
    still = "--lr 1e-30"
    scores = [
        [line["val_bpb"] for line in run(f"{still} {flags}", out=f"r{number}") if line.get("last")]
        for number, flags in enumerate(("", "--ltd --ltd-start 8 --curriculum seqlen --pack"))
    ]
    assert scores[0] == scores[1]


class Recency(nn.Module):
    """Its loss on a token is the fewer nats, the more tokens of its document stand before it."""

    def losses(self, batch):
        return (batch.targets >= 0) / (1 + batch.with_documents().positions.double())


def test_a_stride_gives_each_target_more_context_and_changes_nothing_else(store):
    plain, slid, token_by_token = (
        Evaluation(store, 64, LENGTHS, tokens=20_000, stride=stride).run(Recency(), one(), 8)
        for stride in (None, 16, 1)
    )
    assert plain[2:] == slid[2:] == token_by_token[2:], "the same targets, the same bytes"
    assert token_by_token.val_loss < slid.val_loss < plain.val_loss


@pytest.mark.parametrize("stride", [0, 65, -1])
def test_a_stride_that_no_row_holds_is_refused(store, stride):
    with pytest.raises(ValueError, match=f"--stride {stride}: choose 1 to 64, the tokens of a row"):
        Evaluation(store, 64, LENGTHS, stride=stride)
    with pytest.raises(ValueError, match="--stride is for a GPT"):
        Evaluation(store, 64, LENGTHS, SpecialIds.of(BYTES), stride=8)


# By document


def tiny(kind: str = "gpt", dtype: torch.dtype = torch.float64) -> Transformer:
    """Of weights so wide that a wrong mask or position shows."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(kind, 2, 2, 16, 32, 64, 320))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype)


def by_definition(evaluation, model) -> np.ndarray:
    """(n, 3) nats, targets and bytes of each held-out document, a piece at a time and by itself."""
    store, rows = evaluation.store, evaluation.rows
    bounds = store.offsets[store.train_documents :].tolist()
    found = np.zeros((len(bounds) - 1, 3))
    for row in range(len(rows)):
        batch = evaluation.batch(rows.take(np.array([row]))).with_documents()
        for number, piece in enumerate(range(*rows.offsets[row : row + 2])):
            here = batch.doc_ids[0] == number
            tokens, targets = batch.tokens[:, here], batch.targets[:, here]
            counted = targets[targets >= 0]
            start = rows.start[piece]
            document = next(n for n, stop in enumerate(bounds[1:]) if start < stop)
            nats = model((tokens, targets, None, None)).item()
            found[document] += (nats, len(counted), LENGTHS[counted].sum())
    return found


def agree(documents, expected: np.ndarray, tolerance: float) -> bool:
    counts = np.stack((documents.targets, documents.bytes), axis=1)
    error = np.abs(documents.nats - expected[:, 0])
    return np.array_equal(counts, expected[:, 1:]) and (error <= tolerance * expected[:, 0]).all()


@pytest.mark.parametrize(
    "kind, stride, dtype, tolerance",
    [
        ("gpt", None, torch.float64, 1e-12),
        ("gpt", 32, torch.float64, 1e-12),
        ("bert", None, torch.float64, 1e-12),
        ("gpt", None, torch.float32, 1e-6),
    ],
)
def test_packed_documents_have_the_nats_of_their_pieces_alone(
    store, kind, stride, dtype, tolerance
):
    special_ids = SpecialIds.of(BYTES) if kind == "bert" else None
    evaluation = Evaluation(store, 64, LENGTHS, special_ids, stride=stride)
    model = tiny(kind, dtype).eval()
    found, expected = evaluation.documents(model, one(), 8), by_definition(evaluation, model)
    assert agree(found, expected, tolerance)
    held_out = range(store.train_documents, store.meta["documents"])
    assert found.numbers.tolist() == list(held_out)
    # The comparison sees a piece that is counted for another document.
    shifted = np.concatenate(([0], store.offsets[1:-1] - 64, store.offsets[-1:]))
    evaluation.store = replace(store, offsets=shifted)
    assert not agree(evaluation.documents(model, one(), 8), expected, tolerance)


def test_documents_add_up_to_the_whole(store):
    model = tiny()
    for special_ids, scored in ((None, model), (SpecialIds.of(BYTES), tiny("bert"))):
        evaluation = Evaluation(store, 64, LENGTHS, special_ids)
        whole, documents = evaluation.run(scored, one(), 8), evaluation.documents(scored, one(), 8)
        assert documents.total() == whole
        scored.eval()
        parts = np.array_split(np.arange(len(evaluation.rows)), 9)
        nats = sum(scored(evaluation.batch(evaluation.rows.take(part))).item() for part in parts)
        assert documents.nats.sum() == pytest.approx(nats, rel=1e-12)
        assert documents.targets.sum() == whole.targets and documents.bytes.sum() == whole.bytes


def test_documents_of_ranks_add_up(store):
    evaluation, model = Evaluation(store, 64, LENGTHS), tiny()
    whole = evaluation.documents(model, one(), 8)
    parts = [evaluation.documents(model, one(rank, 3), 8) for rank in range(3)]
    for name in ("targets", "bytes"):
        assert np.array_equal(sum(getattr(part, name) for part in parts), getattr(whole, name))
    np.testing.assert_allclose(sum(part.nats for part in parts), whole.nats, rtol=1e-12)
    assert all(np.array_equal(part.numbers, whole.numbers) for part in parts)


def by_hand(sizes: list[int], train_documents: int) -> Store:
    """Documents of so many bytes, each followed by end-of-text."""
    end = BYTES.eot_token
    tokens = np.concatenate([[*range(97, 97 + size), end] for size in sizes]).astype(np.uint16)
    offsets = np.cumsum([0, *(size + 1 for size in sizes)])
    meta = {"end_of_text": end, "vocab_size": 320}
    return Store(
        Path("by-hand"), meta, tokens, offsets, train_documents, int(offsets[train_documents])
    )


def test_long_and_empty_documents_worked_by_hand():
    store = by_hand([3, 0, 20, 0, 5], train_documents=1)
    held_out = Evaluation(store, 8, LENGTHS).documents(Even(), one(), 2)
    assert held_out.numbers.tolist() == [1, 2, 3, 4]
    assert held_out.targets.tolist() == [1, 21, 1, 6]
    assert held_out.bytes.tolist() == [0, 20, 0, 5]
    assert held_out.nats == pytest.approx(math.log(257) * held_out.targets)
    for split, numbers in (("train", [0]), ("all", [0, 1, 2, 3, 4])):
        found = Evaluation(store, 8, LENGTHS, split=split).documents(Even(), one(), 2)
        assert found.numbers.tolist() == numbers
    bert = Evaluation(store, 8, LENGTHS, SpecialIds.of(BYTES)).documents(Even(), one(), 2)
    assert bert.numbers.tolist() == [1, 2, 3, 4]
    assert bert.targets.tolist() == [0, 4, 0, 1], "one of each piece: of 6, 6, 6, 2 and of 5"
    assert bert.nats[[0, 2]].tolist() == [0, 0]


def test_of_a_part_only_documents_with_a_chosen_piece_are_there(store):
    part = Evaluation(store, 64, LENGTHS, tokens=500)
    found = part.documents(Even(), one(), 8)
    every = Evaluation(store, 64, LENGTHS).documents(Even(), one(), 8)
    assert 0 < len(found.numbers) < len(every.numbers) and (np.diff(found.numbers) > 0).all()
    assert (found.targets > 0).all()
    assert (found.targets <= every.targets[found.numbers - every.numbers[0]]).all()
    assert found.total() == part.run(Even(), one(), 8)


def test_documents_on_the_command_line(run, store_dir, tmp_path, capsys):
    run()
    said = {}
    for flags in ("", "--by-document out.jsonl", "--by-document part.jsonl --tokens 2K"):
        capsys.readouterr()
        evaluate.main(["run", "--device", "cpu", *flags.split()])
        said[flags] = capsys.readouterr().out.splitlines()
    plain, whole, part = said.values()
    assert whole == [*plain, "out.jsonl: 27 of 27 documents"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["document"] for line in lines] == list(range(454, 481))
    tokens, size, nats = (sum(line[n] for line in lines) for n in ("tokens", "bytes", "nats"))
    assert plain[1] == f"{nats / tokens:.4f} nats per token, of {tokens:,} tokens, {size:,} bytes"
    for line in lines:
        assert line["bpb"] == pytest.approx(line["nats"] / math.log(2) / line["bytes"])
    chosen = len((tmp_path / "part.jsonl").read_text().splitlines())
    assert 0 < chosen < 27
    assert part[2] == (
        f"part.jsonl: {chosen} of 27 documents, those with a piece among these tokens"
    )


def test_all_documents_of_a_store_that_holds_nothing_out(run, store_dir, tmp_path, capsys):
    run()
    texts = [{"text": "abc " * n} for n in (40, 1, 7, 0, 30)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, texts)))
    for number, holdout in enumerate((0, 1)):  # nothing held out, everything
        prepare(["mine.jsonl"], tmp_path / f"s{number}", BYTES, "bytes", holdout)
    ask = ["run", "--device", "cpu", "--by-document", "out.jsonl", "--data"]
    with pytest.raises(
        ValueError, match=r"s0 has no held-out document.* --split all takes whatever"
    ):
        evaluate.main([*ask, "s0"])
    with pytest.raises(ValueError, match=r"s1 has no training document"):
        evaluate.main([*ask, "s1", "--split", "train"])
    files = []
    for flags in ("s0 --split all", "s0 --split train", "s1 --split val", "s1 --split all"):
        capsys.readouterr()
        evaluate.main([*ask, *flags.split()])
        files.append((tmp_path / "out.jsonl").read_text())
        of = {"all": "stored", "train": "training", "val": "held-out"}[flags.split()[-1]]
        assert f": {of} " in (said := capsys.readouterr().out) and f"on all {of} tokens" in said
        assert said.endswith("out.jsonl: 4 of 4 documents\n")
    lines = [json.loads(line) for line in files[0].splitlines()]
    assert [(line["document"], line["bytes"]) for line in lines] == [
        (number, 4 * n) for number, n in enumerate((40, 1, 7, 30))
    ]
    assert files == [files[0]] * 4


@pytest.mark.dist
def test_documents_of_two_processes_are_those_of_one(run, store_dir, tmp_path):
    run()
    flags = ["run", "--device", "cpu", "--by-document"]
    start_ranks(2, [*flags, "two.jsonl"], work=evaluate.main)
    evaluate.main([*flags, "one.jsonl"])
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()


@pytest.mark.parametrize(
    "file, said",
    [
        ("no/out.jsonl", "--by-document no/out.jsonl: the folder no does not exist"),
        ("folder", "--by-document folder is a folder: name a file in it"),
        ("", "--by-document . is a folder: name a file in it"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_a_run_is_opened(
    tmp_path, monkeypatch, capsys, file, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "no-run", "--by-document", file])
    with pytest.raises(SystemExit) as ended:
        evaluate.exit_cleanly(evaluate.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# By source and by length


def documents_by_hand(sizes, sources=None, names=()):
    store = by_hand(sizes, train_documents=0)
    return replace(store, sources=sources, source_names=list(names))


def test_groups_worked_by_hand():
    """Documents of 1, 2, 3, 4 and 8 tokens, end-of-text counted; even chances for every token."""
    sources = np.array([1, 0, 1, 0, 1], np.uint16)
    store = documents_by_hand([0, 1, 2, 3, 7], sources, ["wiki", "code", "none of it"])
    documents = Evaluation(store, 8, LENGTHS).documents(Even(), one(), 2)
    groups = scoring.by_length(documents, store)
    assert [group[:4] for group in groups] == [
        ("1 to 1", 1, 1, 0),
        ("2 to 3", 2, 5, 3),
        ("4 to 7", 1, 4, 3),
        ("8 to 15", 1, 8, 7),
    ]
    bits = math.log2(257)
    assert groups[0].bpb is None, "a document without a byte"
    assert [group.bpb for group in groups[1:]] == pytest.approx(
        [bits * 5 / 3, bits * 4 / 3, bits * 8 / 7]
    )
    by_source = scoring.by_source(documents, store)
    assert [group[:4] for group in by_source] == [("wiki", 2, 6, 4), ("code", 3, 12, 9)]
    assert by_source[1].bpb == pytest.approx(bits * 12 / 9)
    assert scoring.table(by_source, "source").splitlines() == [
        "source  documents       tokens        bytes  bits per byte",
        "wiki            2            6            4        12.0084",
        "code            3           12            9        10.6742",
    ]


def test_groups_add_up_and_see_the_stride(store):
    model = tiny()
    for stride in (None, 16):
        documents = Evaluation(store, 64, LENGTHS, stride=stride).documents(model, one(), 8)
        groups, total = scoring.by_length(documents, store), documents.total()
        assert sum(group.tokens for group in groups) == total.targets
        assert sum(group.bytes for group in groups) == total.bytes
        assert sum(g.bpb * g.bytes for g in groups if g.bytes) / total.bytes == pytest.approx(
            total.val_bpb
        )
    short = Evaluation(store, 64, LENGTHS).documents(model, one(), 8)
    for plain, slid in zip(scoring.by_length(short, store), groups, strict=True):
        fits = int(plain.name.split()[-1].replace(",", "")) <= 64
        assert (plain.bpb == pytest.approx(slid.bpb, rel=1e-12)) == fits, plain.name


def test_groups_and_json_on_the_command_line(run, tmp_path, capsys):
    run()
    texts = [{"text": "abc " * n, "source": name} for n, name in ((40, "a"), (1, "b"), (7, "a"))]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, texts)))
    prepare(["mine.jsonl"], tmp_path / "s", BYTES, "bytes", 1)
    ask = ["run", "--device", "cpu", "--data", "s"]
    said = {}
    for flags in ("", "--by source,length", "--by source --json", "--by length --stride 8 --json"):
        capsys.readouterr()
        evaluate.main([*ask, *flags.split()])
        said[flags] = capsys.readouterr().out.splitlines()
    plain, both, *as_json = said.values()
    assert both[:2] == plain and len(plain) == 2
    of_sources = [["a", "2", "190", "188"], ["b", "1", "5", "4"]]
    assert [line.split()[:4] for line in both[3:5]] == of_sources
    assert both[5].split()[0] == "length" and len(both) == 9
    found, slid = (json.loads(line) for (line,) in as_json)
    assert slid["val_bpb"] != found["val_bpb"] and slid["targets"] == found["targets"]
    assert [group["documents"] for group in slid["groups_by_length"]] == [1, 1, 1]
    assert f"{found['val_bpb']:.4f} bits per byte" in plain[0] and found["split"] == "val"
    assert [group["name"] for group in found["groups_by_source"]] == ["a", "b"]
    assert found["by_source"]["b"] == found["groups_by_source"][1]["bpb"]


def test_a_store_without_sources_is_not_grouped_by_them(run, store_dir):
    run()
    with pytest.raises(ValueError, match=r"--by source: .* names no source of its documents"):
        evaluate.main(["run", "--device", "cpu", "--by", "source"])


def test_a_run_on_several_stores_is_evaluated_on_each(run, store_dir, tmp_path, capsys):
    prepare([TINY], tmp_path / "other", BYTES, "bytes", 10)
    mixture = f"{store_dir}=0.75,other=0.25"
    run(f"--data {mixture}")
    capsys.readouterr()
    results = []
    for data in ([], ["--data", str(store_dir)], ["--data", "other"]):
        evaluate.main(["run", "--device", "cpu", "--json", *data])
        results.append(json.loads(capsys.readouterr().out)["val_bpb"])
    assert results[0] == pytest.approx(0.75 * results[1] + 0.25 * results[2])
    for flags in (["--by", "length"], ["--by-document", "out.jsonl"]):
        with pytest.raises(ValueError, match=f"{flags[0]} is of the documents of one store"):
            evaluate.main(["run", "--device", "cpu", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--by words", "--by: words is unknown: choose source, length, or both with a comma"),
        ("--task a --finetune b", "--task and --finetune: one at a time"),
        ("--task a --stride 8", "--stride is of held-out text, and --task of a file"),
        ("--finetune a --by-document b", "--by-document is of held-out text, and --finetune of"),
        ("--dev a", "--dev has no effect without --finetune"),
        ("--task a --lr 1", "--lr has no effect without --finetune"),
        ("--finetune a --lr 0", "--lr: 0 is not a finite number above 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_run_is_opened(flags, said):
    with pytest.raises(ValueError) as refusal:
        evaluate.main(["nowhere", *flags.split()])
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("flags", ["", "--task task.jsonl", "--finetune task.jsonl"])
def test_an_interrupted_evaluation_ends_with_one_line(run, tmp_path, monkeypatch, capsys, flags):
    run()
    both = {"context": "a", "continuation": "b"}
    lines = [{**both, "text": f"{n}", "label": n % 2} for n in range(40)]
    Path("task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Transformer, "hidden_states", interrupted)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "run", "--device", "cpu", *flags.split()])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        evaluate.exit_cleanly(evaluate.main)
    said = capsys.readouterr()
    assert ended.value.code == 130 and said.out == ""
    assert said.err == "interrupted: nothing is written, and run is as it was\n"
