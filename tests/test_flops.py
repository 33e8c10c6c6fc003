"""FLOPs of a step are those that torch counts while a real one runs.

python -m pytest tests/test_flops.py
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import config
from data import open_data
from model import Transformer, TransformerConfig
from plan import Plan
from support.base.clock import Clock
from support.base.runtime import Runtime
from support.step import flops
from support.step.flops import Laid, flops_of_step
from support.step.sizes import flops_of_row
from support.weights.initial import model_size
from train import assemble

ONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")


def forward_flops(q, k, v, *more, out_shape=None, **options):
    causal = more[1] if len(more) > 1 else options.get("is_causal", False)
    return sdpa_flop_count(q, k, v) // (2 if causal else 1)


def backward_flops(dout, q, k, v, out, lse, dropout, causal, *more, out_shape=None, **options):
    return sdpa_backward_flop_count(dout, q, k, v) // (2 if causal else 1)


def addmm_flops(into, left, right, *more, out_shape=None, **options):
    return 2 * left[0] * left[1] * right[1]


# Those that torch's counter does not know, and causal attention as half of the square.
MAPPING = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_flops,
    torch.ops.aten.addmm_: addmm_flops,
}


def counted(line: str, at: float = 0.0):
    """The first step at this share of the budget: what it is said to cost, what torch counts."""
    settings, data = open_data(config.build(config.parse(line.split())), ONE)
    plan = Plan(settings, data.store, data.special_ids, ONE)
    start = int(at * settings.optim.tokens)
    step = plan(Clock(consumed_tokens=start, window_tokens=start))
    shape = config.transformer_config(settings, *model_size(settings, data.encoding, None))
    at_once = (
        settings.optim.micro_batch_size or settings.optim.batch_tokens // settings.data.seq_len
    )
    trainer = assemble(settings, Transformer(shape), ONE, at_once)
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        trainer.step(step)
    return flops_of_step(settings, trainer.work, step), counter.get_total_flops(), trainer, step


SMALL = "--batch-tokens 2048 --tokens 100000"
CASES = {
    "nano": SMALL,
    "AdamW": f"{SMALL} --optimizer adamw",
    "12 x 256": f"{SMALL} --layers 12 --width 256",
    "ltd": f"{SMALL} --ltd",
    "packed": f"{SMALL} --pack",
    "packed in long rows": f"{SMALL} --pack --seq-len 1024",
    "packed, documents by step": f"{SMALL} --pack --pack-batch documents",
    "packed, ltd": f"{SMALL} --pack --ltd --ltd-start 128 --batch-tokens 4096",
    "rows that grow": f"{SMALL} --curriculum seqlen --curriculum-start 64",
    "bert": f"{SMALL} --model bert",
    "bert, packed pairs": f"{SMALL} --model bert --pack --nsp",
    "fewer layers": f"{SMALL} --pseudo --pseudo-layers 3",
    "shared": f"{SMALL} --pseudo --pseudo-group 2",
    "recomputed": f"{SMALL} --checkpoint-activations --ltd",
    "recomputed bert": f"{SMALL} --checkpoint-activations --model bert",
    "micro-batches": f"{SMALL} --pack --micro-batch-size 2",
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_flops_that_torch_counts(name):
    said, found, _, _ = counted(CASES[name])
    assert said.executed == pytest.approx(found, rel=0.01)
    assert 0 < said.model <= said.executed


def test_what_is_dropped_shows(monkeypatch):
    """The control: were dropped tokens counted, the number would be a third too high."""
    monkeypatch.setattr(flops, "tokens_by_layer", lambda s, context, T: [T] * s.model.layers)
    said, found, _, _ = counted(CASES["ltd"])
    assert said.executed > 1.2 * found


def test_documents_that_are_told_apart_show(monkeypatch):
    """The control: a whole mask has twice the scores of causal documents, and more."""
    monkeypatch.setattr(flops, "groups_of", lambda *_: None)
    said, found, _, _ = counted(CASES["packed in long rows"])
    assert said.executed > 1.2 * found


def test_full_rows_need_what_a_row_is_said_to_cost():
    said, _, trainer, step = counted(CASES["AdamW"])
    rows, T = step.batch.tokens.shape
    shape = trainer.model.config
    assert said.model == rows * flops_of_row(shape, [T] * shape.layers, T)
    once_more = shape.layers * rows * 2 * shape.width * T * T // 2  # the scores, backward
    assert said.executed == said.model + once_more


def test_recomputing_is_executed_and_not_needed():
    plain, _, _, _ = counted(CASES["AdamW"])
    again, _, _, _ = counted(f"{CASES['AdamW']} --checkpoint-activations")
    assert again.executed > 1.15 * plain.executed and again.model == plain.model


def test_ranks_share_the_work_of_one_and_blank_rows_are_work_too():
    short = "--curriculum seqlen --curriculum-start 64"
    said, _, trainer, step = counted(f"{CASES['packed']} {short}")
    half = trainer.work._replace(world_size=2, rows_at_once=4)
    assert flops_of_step(trainer.settings, half, step).model == said.model
    alone = trainer.work._replace(impl="dense", optimizer=0)
    five = alone._replace(world_size=5)  # of 2 rows each, the last one's blank
    wanted = flops_of_step(trainer.settings, alone, step).executed * 10 // 8
    assert flops_of_step(trainer.settings, five, step).executed == wanted


@pytest.mark.parametrize("impl", ["dense", "groups", "triton"])
def test_each_attention_has_its_own_scores(impl):
    """Rows of 8: documents of 4, 2 and 2, and of 8; causal, of width 4; one layer."""
    work = flops.Work(SHAPE, 1, 8, 2, impl, frozenset(), 0)
    squares = {"dense": 2 * 64, "groups": (16 + 4 + 4 + 64) // 2, "triton": (16 + 4 + 4 + 64) // 2}
    products = 9 if impl == "triton" else 7
    matrices = 6 * (4 * (4 * 4 + 2 * 16) + 4 * 10) * 16
    found = flops_of_step(SETTINGS, work, step_of([[4, 2, 2], [8]]))
    assert found.executed == matrices + products * 2 * 4 * squares[impl]
    assert found.model == matrices + 12 * 4 * 44


SHAPE = TransformerConfig("gpt", 1, 1, 4, 16, 8, 10)
SETTINGS = replace(config.Config(), model=replace(config.Config().model, layers=1))


def step_of(rows: list[list[int]]) -> SimpleNamespace:
    offsets = np.cumsum([0, *map(len, rows)])
    tokens = torch.zeros(len(rows), 8, dtype=torch.int64)
    context = SimpleNamespace(seed=0, step=1, progress=0.0)
    batch = SimpleNamespace(tokens=tokens)
    return SimpleNamespace(batch=batch, context=context, laid=Laid(np.concatenate(rows), offsets))


def test_the_mean_of_squared_lengths_is_that_of_draws():
    laid = Laid(np.array([3, 1]), np.array([0, 2]))
    assert laid.mean_squares(np.array([4])) == [10] and laid.mean_squares(np.array([2])) == [3]
    laid = Laid(np.array([40, 9, 1, 30]), np.array([0, 3, 4]))
    random, documents = np.random.default_rng(0), np.repeat([0, 1, 2], [40, 9, 1])
    drawn = [random.choice(documents, 20, replace=False) for _ in range(4000)]
    mean = np.mean([(np.bincount(kept) ** 2).sum() for kept in drawn])
    of_rows = laid.mean_squares(np.array([20, 30]))
    assert of_rows[0] == pytest.approx(mean, rel=0.01) and of_rows[1] == 900


def test_where_pieces_lie():
    laid = Laid(np.array([2, 1, 3]), np.array([0, 2, 3, 3]))
    assert laid.filled().tolist() == [3, 3, 0]
    assert laid.doc_ids(4).tolist() == [[0, 0, 1, -1], [2, 2, 2, -1], [-1] * 4]
    assert laid != Laid(laid.lengths, np.array([0, 1, 3, 3])) and laid == replace(laid)
