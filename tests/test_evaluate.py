"""Bits per byte: a worked answer, whole documents, independent of the number of rows and ranks.

Results by document are compared with their definition, every piece of text alone in the model.
"""

import json
import math
import os
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BYTES, contents, read_log, refusal, start_ranks, widen
from small_stores import ONE, in_memory
from torch import nn

import evaluate
from bert import BertConfig, BertTask, SpecialIds
from data import Data, GptTask, Rows
from evaluate import DocumentScores, Evaluation, HeldOut
from model import Transformer, TransformerConfig
from support.store import Store
from support.tokenizer import byte_lengths

LENGTHS = byte_lengths(BYTES)
SPECIAL_IDS = SpecialIds.of(BYTES)
TASKS = {"gpt": GptTask(), "bert": BertTask(SPECIAL_IDS), "pairs": BertTask(SPECIAL_IDS, nsp=True)}
CPU = ["--device", "cpu"]
GPT = "--layers 1 --final-eval-tokens 1M"
pytestmark = pytest.mark.usefixtures("no_sample_or_report")


def evaluation_of(store: Store, seq_len: int = 64, kind: str = "gpt", **more) -> Evaluation:
    return Evaluation(Data(BYTES, store, LENGTHS), TASKS[kind], seq_len, **more)


def documents_of(evaluation, model, rows: int) -> DocumentScores:
    """Return the result by document, of a single store."""
    return evaluation.score_documents(model, ONE, rows)[0]


class Even(nn.Module):
    """A model that gives each of 256 bytes and end-of-text the same probability."""

    def forward(self, tokens, positions, doc_ids):
        return tokens

    def losses(self, x, batch):
        return math.log(257.0) * (batch.targets >= 0).double()


def tiny(kind: str) -> Transformer:
    config = BertConfig if kind == "bert" else TransformerConfig
    return widen(config(1, 2, 16, 32, 64, 320).build()).double()


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


@pytest.fixture
def said(run_of, capsys, monkeypatch, tmp_path):
    """Run evaluate.py on a run, and return the lines it prints."""
    monkeypatch.chdir(tmp_path)

    def ask(flags: str = "") -> list[str]:
        argv = [str(run_of(GPT)), *CPU, *flags.split()]
        capsys.readouterr()
        evaluate.main(argv)
        return capsys.readouterr().out.splitlines()

    return ask


# ---- BERT


def test_the_same_tokens_are_masked_however_much_is_evaluated(store):
    """The masks of a part of the text are among those of the whole, though rows differ."""

    def asked(tokens):
        """Return what is asked for: place in the store, hidden token, target."""
        rows = evaluation_of(store, 64, "bert", tokens=tokens).parts[0].rows
        batch = TASKS["bert"].batch(store, rows, 64, rows, "mask")
        at, piece = batch.masked, batch.doc_ids + torch.from_numpy(rows.offsets[:-1, None])
        assert 0.13 < len(at) / rows.lengths.sum() < 0.17
        place = rows.pieces["start"][piece.flatten()[at]] + batch.positions.flatten()[at].numpy()
        columns = place, batch.tokens.flatten()[at], batch.targets.flatten()[at]
        return {*zip(*(column.tolist() for column in columns), strict=True)}

    assert asked(2_000) < asked(None)


def test_next_sentence_accuracy_counts_right_answers_and_changes_nothing_else(store):
    """The models know the answers, give the opposite, or always say yes."""

    class Oracle(Even):
        def right_answers(self, x, batch):
            answers = batch.targets.flatten()[batch.answers]
            seen.update(answers.tolist())
            says = {"right": answers, "wrong": 1 - answers, "yes": answers * 0}[self.says]
            return says == answers

    alone = evaluation_of(store, 64, "bert", tokens=5_000)
    evaluation = evaluation_of(store, 64, "pairs", tokens=5_000)
    model, shares, seen = Oracle(), {}, set()
    for model.says in ("right", "wrong", "yes"):
        result = evaluation.run(model, ONE, 8)
        shares[model.says] = result.nsp_accuracy
        assert result._replace(nsp_accuracy=None, nsp_pairs=None) == alone.run(model, ONE, 8)
    assert seen == {0, 1} and 0.3 < shares["yes"] < 0.7
    assert (shares["right"], shares["wrong"]) == (1, 0)


# ---- by document


def by_definition(store, kind, rows, model) -> np.ndarray:
    """Return nats, targets and bytes (n, 3) of each held-out document, one piece at a time."""
    bounds = store.offsets[store.meta["train_documents"] :].tolist()
    sums = np.zeros((len(bounds) - 1, 3))
    for piece in rows.pieces[:, None]:  # (1,)
        row = Rows(piece, np.arange(len(piece) + 1))
        filled = int(row.lengths[0]) + (2 if kind == "bert" else 0)
        batch = TASKS[kind].batch(store, row, filled, row, "mask")
        assert batch.is_plain
        counted = batch.targets[batch.targets >= 0]
        document = next(n for n, stop in enumerate(bounds[1:]) if piece["start"][0] < stop)
        nats = model.loss(model(*batch.inputs), batch).item()
        sums[document] += (nats, len(counted), LENGTHS[counted].sum())
    return sums


@pytest.fixture(scope="module")
def few():
    """Three training and twelve held-out documents, some longer than a row, one of 1 byte."""
    sizes = [9, 30, 5, 200, 64, 63, 1, 17, 90, 40, 33, 65, 12, 150, 8]
    draw = np.random.default_rng(0)
    return in_memory(*(draw.integers(97, 123, size) for size in sizes), held_out=12)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_packed_documents_have_the_nats_of_their_pieces_alone(few, kind):
    """With any number of rows at a time."""
    evaluation, model = evaluation_of(few, 64, kind), tiny(kind)
    nats, *counts = by_definition(few, kind, evaluation.parts[0].rows, model).T
    for rows in (8, 3):
        documents = documents_of(evaluation, model, rows)
        assert np.array_equal([documents.targets, documents.bytes], counts)
        assert documents.nats == pytest.approx(nats, rel=1e-12, abs=0)
    assert documents.numbers.tolist() == list(range(3, 15))
    assert model.training, "the model's mode is kept"
    # Control: the comparison notices pieces that are counted for another document.
    (part,) = evaluation.parts
    evaluation.parts = [part._replace(document_of=np.roll(part.document_of, 1))]
    assert documents_of(evaluation, model, 8).nats != pytest.approx(nats, rel=1e-12, abs=0)


def test_long_and_empty_documents_equal_an_example_worked_by_hand():
    store = in_memory(*(range(97, 97 + size) for size in (3, 0, 20, 0, 5)), held_out=4)
    held_out = documents_of(evaluation_of(store, 8), Even(), 2)
    assert held_out.numbers.tolist() == [1, 2, 3, 4]
    assert held_out.targets.tolist() == [1, 21, 1, 6]
    assert held_out.bytes.tolist() == [0, 20, 0, 5]
    assert held_out.nats == pytest.approx(math.log(257) * held_out.targets)
    total = held_out.total()
    assert total.val_loss == pytest.approx(math.log(257))
    assert (total.targets, total.bytes) == (29, 25)
    assert total.val_bpb == pytest.approx(math.log2(257) * 29 / 25)
    bert = documents_of(evaluation_of(store, 8, "bert"), Even(), 2)
    assert bert.numbers.tolist() == [1, 2, 3, 4]
    assert bert.targets.tolist() == [0, 4, 0, 1], "one of each piece: of 6, 6, 6, 2, and of 5"
    assert bert.nats[[0, 2]].tolist() == [0, 0]


def test_a_store_without_held_out_documents_is_refused():
    assert "has no held-out document: " in refusal(evaluation_of, in_memory(b"all of it"))


# ---- results in files


def test_a_file_of_results_equals_an_example_and_is_complete_or_absent(tmp_path):
    nats, counts = np.array([3 * np.log(2), 0.0]), (np.array([3, 0]), np.array([6, 0]))
    two = DocumentScores(np.array([0, 1]), nats, *counts)
    file = tmp_path / "out.jsonl"
    two.save(file)
    text = file.read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"document": 0, "tokens": 3, "bytes": 6, "nats": 3 * np.log(2), "bpb": 0.5},
        {"document": 1, "tokens": 0, "bytes": 0, "nats": 0.0, "bpb": None},
    ]
    assert two.total() == HeldOut(np.log(2), 0.5, 3, 6) and "by_store" not in two.total().columns()
    with pytest.raises(ValueError, match="JSON"):
        two._replace(nats=np.array([1, np.nan])).save(file)
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == text


# ---- the command


def test_command_reports_what_the_run_reported(run_of, said, capsys):
    (last,) = (line["val_bpb"] for line in read_log(run_of(GPT), "eval") if line["last"])
    plain, whole = said(), said("--by-document out.jsonl")
    evaluate.main([f"{run_of(GPT)}/step-00000002.pt", *CPU])
    assert capsys.readouterr().out.splitlines()[1:] == plain[1:]
    assert f"held-out {last:.4f} bits per byte" in plain[0]
    assert whole == [*plain, "out.jsonl: 27 of 27 documents"]
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["document"] for line in lines] == list(range(454, 481))
    tokens, nats = (sum(line[name] for line in lines) for name in ("tokens", "nats"))
    assert plain[1].startswith(f"{nats / tokens:.4f} nats per target, a perplexity of ")
    assert f", over {tokens:,} targets, " in plain[1]
    part = said("--by-document part.jsonl --tokens 2K")
    chosen = len(Path("part.jsonl").read_text().splitlines())
    assert 0 < chosen < 27 and f": {chosen} of 27 documents, those with a piece" in part[2]


def test_evaluation_uses_full_length_and_drops_nothing_whatever_training_does(run):
    """With a learning rate near 0, the score is the same with all techniques and with none."""
    still = "--lr 1e-30 --layers 3 --tokens 512 --eval-every 0"
    one, other = (
        [line["val_bpb"] for line in run(f"{still} {flags}", out) if line["event"] == "eval"]
        for out, flags in (("off", ""), ("on", "--ltd --ltd-start 8 --curriculum seqlen --pack"))
    )
    assert one == other


def evaluate_into_file(flags: list[str]) -> None:
    """Run evaluate.py on a rank, writing its output to a file because pytest would not see it."""
    with open(f"said-{os.environ['RANK']}.txt", "w") as out, redirect_stdout(out):
        evaluate.main(flags)


@pytest.mark.dist
def test_two_ranks_report_what_one_reports(run_of, said, store_dir):
    """The run's folder does not change."""
    flags, before = f"--rows 2 --data {store_dir} --by-document out.jsonl", contents(run_of(GPT))
    of_one, results = said(flags), Path("out.jsonl").rename("of_one.jsonl").read_bytes()
    start_ranks(2, [str(run_of(GPT)), *CPU, *flags.split()], work=evaluate_into_file)
    assert Path("said-0.txt").read_text().splitlines() == of_one
    assert not Path("said-1.txt").read_bytes() and Path("out.jsonl").read_bytes() == results
    assert contents(run_of(GPT)) == before
