"""Bits per byte: a worked answer, whole documents, the same for any number of rows and ranks."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import evaluate
from evaluate import Evaluation
from kernels.cross_entropy import IGNORE
from model import Transformer, TransformerConfig
from support.masking import SpecialIds
from support.runtime import Runtime
from support.token_store import Store
from support.tokenizer import byte_lengths, get_encoding

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

    def forward(self, batch):
        return torch.tensor(math.log(257.0) * int((batch.targets >= 0).sum()))


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
        def batch(self, first, count):
            batch = super().batch(first, count)
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


def test_a_store_that_holds_nothing_out_is_refused(store):
    whole = replace(store, train_documents=store.meta["documents"])
    with pytest.raises(ValueError, match=r"holds out no document, .* again with --holdout 20"):
        Evaluation(whole, 64, LENGTHS)


def test_command_repeats_what_the_run_found(run, store_dir, capsys):
    found = [line for line in run() if line["event"] == "eval"][-1]["val_bpb"]
    capsys.readouterr()
    evaluate.main(["run", "--device", "cpu"])
    assert f"held-out {found:.4f} bits per byte" in capsys.readouterr().out
    evaluate.main(["run", "--device", "cpu", "--tokens", "2K"])
    (tokens,) = re.findall(r"of ([\d,]+) tokens", capsys.readouterr().out)
    assert 2000 <= int(tokens.replace(",", "")) < 2032  # a row more at most


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rows 0", "--rows 0: choose 1 or more"),
        ("--rows -3", "--rows -3: choose 1 or more"),
        ("--rows nan", "--rows: invalid int value: 'nan'"),
        ("--tokens 0", "--tokens 0: choose 1 or more"),
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
        [line["val_bpb"] for line in run(f"{still} {flags}", out=f"r{number}")[-1:]]
        for number, flags in enumerate(("", "--ltd --ltd-start 8 --curriculum seqlen --pack"))
    ]
    assert scores[0] == scores[1]


class Recency(nn.Module):
    """Its loss on a token is the fewer nats, the more tokens of its document stand before it."""

    def forward(self, batch):
        batch = batch.with_documents()
        nats = 1 / (1 + batch.positions.double())
        return nats[batch.targets >= 0].sum()


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
    with pytest.raises(ValueError, match="a BERT has none"):
        Evaluation(store, 64, LENGTHS, SpecialIds.of(BYTES), stride=8)
