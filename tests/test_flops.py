"""FLOPs of a step are those that torch counts while a real one runs.

python -m pytest tests/test_flops.py
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import config
import model
from data import open_data
from model import Transformer, TransformerConfig
from plan import Plan
from support.clock import Clock
from support.runtime import Runtime
from support.step import machine, sizes
from support.step.flops import Laid, Work, flops_of_step
from support.step.sizes import flops_of_row
from support.weights import model_size
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


@cache
def counted(line: str):
    """The first step: what it is said to cost, what torch counts."""
    settings, data = open_data(config.build(config.parse(line.split())), ONE)
    plan = Plan(settings, data.store, data.special_ids, ONE)
    step = plan(Clock())
    shape = config.transformer_config(settings, *model_size(settings, data.encoding))
    at_once = settings.optim.micro_batch_size or len(step.batch.tokens)
    trainer = assemble(settings, model=Transformer(shape), runtime=ONE, rows_at_once=at_once)
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        trainer.step(step)
    return flops_of_step(settings, trainer.work, step), counter.get_total_flops(), trainer, step


SMALL = "--layers 3 --batch-tokens 1024 --tokens 100000"
EXACT = {
    "AdamW": f"{SMALL} --optimizer adamw",
    "ltd": f"{SMALL} --ltd",
    "llama": f"{SMALL} --block llama --kv-heads 2 --qk-norm --no-tied",
    "packed in long rows": f"{SMALL} --pack --seq-len 1024",
    "rows that grow": f"{SMALL} --curriculum seqlen --curriculum-start 64",
    "fewer layers": f"{SMALL} --pseudo --pseudo-layers 2",
    "shared": f"{SMALL} --layers 4 --pseudo --pseudo-group 2",
    "recomputed": f"{SMALL} --checkpoint-activations --ltd",
}
# On a CPU documents in one call are padded, or small batches masked, and that is not counted. With
# dropout attention keeps its scores, and saves one product.
NEARLY = {
    "packed, ltd": f"{SMALL} --pack --ltd --ltd-start 128",
    "bert, packed pairs": f"{SMALL} --model bert --pack --nsp --micro-batch-size 2",
    "recomputed bert": f"{SMALL} --checkpoint-activations --model bert",
    "a mask": f"{SMALL} --pack --dropout 0.1",
}


class Odd(model.Block):
    """A fork's: with another norm and a gated MLP at its end."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = torch.nn.RMSNorm(config.width)
        self.gate = torch.nn.Linear(config.width, 2 * config.width)
        self.out = torch.nn.Linear(config.width, config.width)

    def forward(self, x, meta):
        x = super().forward(x, meta)
        one, two = self.gate(self.norm(x)).chunk(2, -1)
        return x + self.out(torch.nn.functional.silu(one) * two)


@pytest.mark.parametrize("name", [*EXACT, *NEARLY])
def test_a_step_has_the_flops_that_torch_counts(name):
    said, found, _, _ = counted((EXACT | NEARLY)[name])
    least, most = (0.999, 1.001) if name in EXACT else (0.88, 1.03)
    assert least * found < said.executed < most * found
    assert 0 < said.model <= said.executed


def test_what_a_fork_adds_to_a_block_is_counted(monkeypatch):
    line = f"{SMALL} --optimizer adamw --width 96 --heads 3"  # a shape that no other test counts
    monkeypatch.setattr(model, "Block", Odd)
    said, found, trainer, _ = counted(line)
    assert said.executed == pytest.approx(found, rel=1e-3)
    matrices = 96 * 96 * (4 + 8)
    of_token = sizes.counted(trainer.model.config, half=False)
    assert of_token.block == 2 * (matrices + 3 * 96 * 96)
    assert of_token.block - of_token.again == 2 * 96 * 96, "nothing needs what the last returns"


def test_what_is_dropped_shows(monkeypatch):
    """The control: were dropped tokens counted, the number would be a third too high."""
    _, found, trainer, step = counted(EXACT["ltd"])  # kept for the other tests: before the patch
    whole = "support.step.flops.tokens_by_layer"
    monkeypatch.setattr(whole, lambda settings, context, T: [T] * settings.model.layers)
    assert flops_of_step(trainer.settings, trainer.work, step).executed > 1.1 * found


def test_full_rows_need_what_a_row_is_said_to_cost_and_recomputing_does_not_count_as_need():
    said, _, trainer, step = counted(EXACT["AdamW"])
    rows, T = step.batch.tokens.shape
    shape = trainer.model.config
    assert said.model == rows * flops_of_row(shape, [T] * shape.layers, T)
    once_more = shape.layers * rows * 2 * shape.width * T * T // 2  # the scores, backward
    assert said.executed == said.model + once_more
    every_layer = trainer.work._replace(recomputed=frozenset(range(shape.layers)))
    again = flops_of_step(trainer.settings, every_layer, step)
    assert again.executed > 1.1 * said.executed and again.model == said.model


SHAPE = TransformerConfig("gpt", 1, 1, 4, 16, 8, 10)
SETTINGS = replace(config.Config(), model=replace(config.Config().model, layers=1))
WORK = Work(SHAPE, 1, 8, 2, "adaptive", frozenset(), 0)


def step_of(rows: list[list[int]]) -> SimpleNamespace:
    offsets = np.cumsum([0, *map(len, rows)])
    context = SimpleNamespace(seed=0, step=1, progress=0.0)
    return SimpleNamespace(seq_len=8, context=context, laid=Laid(np.concatenate(rows), offsets))


@pytest.mark.parametrize(("impl", "products"), [("dense", 7), ("groups", 7), ("triton", 9)])
def test_each_attention_has_its_own_scores(impl, products):
    """Rows of 8: documents of 4, 2 and 2, and of 8; causal, of width 4; one layer."""
    scores = 2 * 64 if impl == "dense" else (16 + 4 + 4 + 64) // 2
    matrices = 6 * (4 * (4 * 4 + 2 * 16) + 4 * 10) * 16
    said = flops_of_step(SETTINGS, WORK._replace(impl=impl), step_of([[4, 2, 2], [8]]))
    assert said.executed == matrices + products * 2 * 4 * scores
    assert said.model == matrices + 12 * 4 * 44


def test_ranks_share_the_work_of_one_and_blank_rows_are_work_too():
    """Three rows on two ranks: the fourth is blank, with scores only where a mask is whole."""
    step = step_of([[4, 2, 2], [8], [3]])
    for impl in ("groups", "dense"):
        one = flops_of_step(SETTINGS, WORK._replace(impl=impl), step)
        two = flops_of_step(SETTINGS, WORK._replace(impl=impl, world_size=2), step)
        blank = 6 * (4 * (4 * 4 + 2 * 16) + 4 * 10) * 8 + (impl == "dense") * 7 * 2 * 4 * 64
        assert two.model == one.model and two.executed == one.executed + blank


def test_squares_of_pieces_worked_example():
    laid = Laid(np.array([4, 2, 3]), np.array([0, 2, 3, 3]))
    assert laid.filled().tolist() == [6, 3, 0]
    assert laid.squares(np.array([6, 3, 0])) == 20 + 9
    assert laid.squares(np.array([3, 2, 0])) == 5 + 4


# ---- the peak


def test_a_data_sheet_is_known_by_the_devices_name():
    sheets = {
        "NVIDIA H100 80GB HBM3": (989.4, 494.7),
        "NVIDIA H100 PCIe": (756, 378),
        "NVIDIA L4": (121, 60),
        "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    }
    for name, (half, single) in sheets.items():
        assert machine.data_sheet(name, torch.bfloat16) == half * 1e12
        assert machine.data_sheet(name, torch.float32) == single * 1e12
    for name in ("NVIDIA L40", "NVIDIA T400", "Quadro", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert machine.data_sheet(name, torch.bfloat16) is None


def test_the_log_says_how_fast_a_run_is(log_of):
    lines = log_of("")
    about = lines[0]
    assert about["train_tokens"] == 682_416 and about["peak_flops"] > 1e8
    assert "measured" in about["peak_why"]
    for line in [line for line in lines if line["event"] == "train"]:
        assert line["tokens_per_s"] == pytest.approx(256 / line["ms"] * 1e3, rel=0.01)
        epochs = round(line["real_tokens"] / 682_416, 4)
        assert 0 <= line["mfu"] < 2 and line["epochs"] == epochs
    (sample,) = [line for line in lines if line["event"] == "sample"]
    assert sample["step"] == lines[-1]["step"] and isinstance(sample["text"], str)
