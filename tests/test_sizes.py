"""Costs of a model and a step: parameters, FLOPs against torch's counter, and a run's first lines.

python -m pytest tests/test_sizes.py
"""

import re

import numpy as np
import pytest
import torch
from conftest import ALL_ON, SMALL, contents, refusal
from small_stores import ONE
from test_plan import plan
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import train
from bert import BertConfig
from model import TransformerConfig
from support.clock import Clock
from support.runtime import Runtime
from support.settings import SIZES, OptimConfig, with_defaults
from support.sizes import flops_of_step, micro_batch_rows, parameter_count, peak_flops
from support.store import Store


def test_parameter_counts_equal_published_ones():
    def count(kind: type, name: str, vocabulary: int) -> int:
        layers, heads, width, T, *_ = SIZES[name]
        return parameter_count(kind(layers, heads, width, 4 * width, T, vocabulary))

    assert count(TransformerConfig, "124M", 50257) == 124_439_808
    # BERT-base with its masked-token head is published with 109,514,298, including two rows of
    # token types. The model has none: it adds one of them to its positions.
    assert count(BertConfig, "bert-base", 30522) == 109_514_298 - 2 * 768


def test_only_a_new_nano_gpt_has_an_untied_head_and_its_own_beta2():
    init, told = {"model.init": "a.safetensors"}, {"model.tied": True, "optim.beta2": 0.5}
    others = [(0.95, {"model.size": "124M"}), (0.95, init), (0.999, {"model.model": "bert"})]
    for beta2, given in [(0.99, {}), (0.5, told), (0.99, init | {"model.size": "nano"}), *others]:
        result = with_defaults(given)
        assert (result["model.tied"], result["optim.beta2"]) == (given != {}, beta2), given


# ---- FLOPs


def test_flops_equal_worked_examples():
    shape = TransformerConfig(2, 1, 4, 16, 8, 10)
    full = {"filled": np.array([8]), "squares": np.array([64]), "targets": 8}
    assert flops_of_step(shape, 8, [8, 4], **full) == 17_664
    assert flops_of_step(shape, 8, [8, 0], **full) == 17_664 - 6 * (192 * 4 + 4 * 4 * 4)
    # a row with documents of 4 and 2 keeps half of its 6 tokens, a row with a document of 3 keeps
    # all: 5 + 9 pairs
    packed = {"filled": np.array([6, 3]), "squares": np.array([20, 9]), "targets": 3}
    matrices = 6 * (192 * (8 + 3) + 10 * 4 * 8) * 2
    assert flops_of_step(shape, 8, [8, 3], **packed) == matrices + 6 * 4 * (29 + 14)
    head = 6 * (10 * 4 + 4 * 4) * 3  # of a BERT, which predicts only its targets
    of_bert = flops_of_step(BertConfig(2, 1, 4, 16, 8, 10), 8, [8, 3], **packed)
    assert of_bert == 6 * 192 * 11 * 2 + 12 * 4 * (29 + 14) + head


def attention_flops(q, k, v, *more, out_shape=None, **options):
    causal = more[1] if len(more) > 1 else options.get("is_causal", False)
    return sdpa_flop_count(q, k, v) // (2 if causal else 1)


def backward_flops(dout, q, k, v, out, lse, dropout, causal, *more, out_shape=None, **options):
    """Count four products, not the scores that are computed again: the model does not need them."""
    return 2 * sdpa_flop_count(q, k, v) // (2 if causal else 1)


def addmm_flops(into, left, right, *more, out_shape=None, **options):
    return 2 * left[0] * left[1] * right[1]


MAPPING = {  # what torch's counter lacks, and causal attention counted as half of the square
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_flops,
    torch.ops.aten.addmm_: addmm_flops,
}
FEW = "--layers 3 --heads 4 --width 128 --seq-len 256 --batch-tokens 1024 --optimizer adamw"


# The upper limit allows for work that a CPU adds: documents in one call are padded to one length,
# and the backward pass computes their scores again.
STEPS = [
    ("", 1.001),
    ("--ltd", 1.001),
    ("--block llama --kv-heads 2 --qk-norm --no-tied", 1.001),
    ("--curriculum seqlen --curriculum-start 64", 1.001),
    ("--layers 4 --pseudo --pseudo-layers 2", 1.001),
    ("--pack --seq-len 1024", 1.02),
    ("--pack --ltd --ltd-start 128", 1.08),
    ("--model bert --ltd", 1.08),
    ("--model bert --pack --nsp", 1.08),
]


@pytest.mark.parametrize(("flags", "at_most"), STEPS)
def test_the_flops_of_a_step_equal_torchs_count(store_dir, flags, at_most):
    to_come = plan(Store.open(store_dir), f"{FEW} --tokens 100000 {flags}")
    step, net = to_come(Clock()), to_come.model.build()
    trainer = train.assemble(to_come.settings, model=net, runtime=ONE, micro_batch=4)
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        trainer.train_step(step)
    assert 0.999 < counter.get_total_flops() / step.after.flops < at_most


def test_peak_flops_follow_from_the_devices_name(monkeypatch):
    def peak(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return peak_flops(Runtime(0, 2, torch.device("cuda"), dtype, ""))

    assert peak("NVIDIA H100 80GB HBM3") == peak("NVIDIA H200") == 2 * 989.4e12
    assert peak("NVIDIA H100 PCIe", torch.float32) == 756e12
    assert (peak("NVIDIA L4"), peak("NVIDIA L40S")) == (2 * 121e12, 2 * 362e12)
    assert peak("NVIDIA A10G") is peak("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak("NVIDIA L40") is peak_flops(ONE) is None


@pytest.mark.usefixtures("no_sample_or_report")
def test_the_log_has_the_flops_and_the_speed_of_steps(run, log_of, monkeypatch):
    assert {line["mfu"] for line in log_of() if line["event"] == "train"} == {None}
    monkeypatch.setattr(train, "peak_flops", lambda runtime: 1e12)
    lines = run("--tokens 512")
    assert lines[0]["train_tokens"] == 682_416 and lines[0]["peak_flops"] == 1e12
    steps = [line for line in lines if line["event"] == "train"]
    assert steps[1]["flops"] == 2 * steps[0]["flops"] > 0
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(256 / line["ms"] * 1e3, rel=0.01)
        assert line["mfu"] == pytest.approx(steps[0]["flops"] / line["ms"] / 1e9, abs=1e-4)
        assert line["epochs"] == round(line["real_tokens"] / 682_416, 4)


# ---- the micro-batch


def test_micro_batches_share_rows_evenly():
    def rows(batch: int, ranks: int = 1, asked=None, seq_len=256, device="cpu", by_document=False):
        runtime = Runtime(0, ranks, torch.device(device), torch.float32, "")
        optim = OptimConfig(batch_tokens=batch * seq_len, micro_batch_size=asked)
        return micro_batch_rows(optim, seq_len, runtime, by_document)

    assert [rows(16, ranks) for ranks in (1, 2, 16)] == [16, 8, 1]
    assert rows(16, asked=4) == 4 and rows(48) == 24, "32 does not divide 48"
    assert (rows(512, seq_len=1024), rows(512, seq_len=1024, device="cuda")) == (8, 32)
    assert rows(1, seq_len=16_384) == 1, "at least a row"
    assert (rows(16, 3, by_document=True), rows(1, 2, by_document=True)) == (5, 1)
    assert "16 x --micro-batch-size 1 x" in refusal(rows, 17, 16)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_is_one_line_that_names_the_flags(kind, store_dir, monkeypatch):
    def out_of_memory(*_, **more):
        raise kind("DefaultCPUAllocator: can't allocate memory: 2 GiB.\nMore")

    monkeypatch.setattr(train, "assemble", out_of_memory)
    message = refusal(train.main, f"{SMALL} --data {store_dir} --out new".split())
    assert "--micro-batch-size 8, is too much" in message and "--checkpoint-activations" in message


# ---- the first lines


def test_a_forecast_equals_an_example_worked_by_hand(store_dir):
    """Two of four layers keep 16 of 32 tokens until half of the budget. Until then a step of 8 rows
    consumes 8 * 24 = 192 tokens, afterwards 8 * 32 = 256. 4,096,000 * 0.5 / 192 is 10,667 steps,
    and the rest / 256 is 8,000 steps. Without dropping there are 16,000, or 15,995 after five.
    """
    dropping = "--ltd --ltd-start 16 --ltd-share 0.5 --tokens 4096000"
    to_come = plan(Store.open(store_dir), dropping)
    ahead, plain = to_come.forecast(Clock()), to_come.without_techniques()
    assert (ahead.steps, ahead.tokens) == (18_667, 18_667 * 256)
    assert plain.forecast(Clock(step=5, consumed_tokens=1280)).steps == 15_995
    assert plain.forecast(Clock()).flops == 16_000 * plain(Clock()).after.flops


def test_a_dry_run_writes_nothing(store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "assemble", pytest.fail)
    everything, offload = f"{ALL_ON} --out a", "--model bert --offload --offload-budget 400KB"
    for flags, steps in (everything, ["8"]), (offload, []):
        line = f"{SMALL} --data {store_dir} {flags} --tokens 2048 --dry-run"
        assert train.main(line.split()) == 0
        output = capsys.readouterr().out
        assert not list(tmp_path.iterdir())
        size = r"0\.0[67] M parameters \(.*blocks 0\.05 M.*\) with a vocabulary of 320, cpu"
        memory = r"memory: weights 0.3 MB, gradients 0.3 MB, optimizer 0.[34] MB"
        assert re.search(rf"{size}.*\n{memory}", output)
        assert ("--offload: " in output) == (flags == offload)
        both = r"^ahead: about \d+ steps, .*FLOP .*; without techniques about (\d+) steps, .*FLOP"
        assert re.findall(both, output, re.MULTILINE) == steps  # offload changes nothing of this
    train.main(f"{SMALL} --data {store_dir} --tokens 4M --dry-run".split())
    assert "(5.86 epochs); beyond 4 epochs, text teaches less each time" in capsys.readouterr().out


def test_a_dry_run_tells_rates_memory_of_each_stage_and_what_comes_after(store_dir, capsys):
    """nanoGPT's --min-lr is a rate, ours a share; a budget below a step never reaches --lr."""

    def line(name, flags):
        train.main(f"{SMALL} --data {store_dir} --dry-run {flags}".split())
        return re.search(f"^{name}: (.*)", capsys.readouterr().out, re.M)[1]

    course = "0.00998 in the first step, 0.005 halfway, 2.1e-05 in the last (linear)"
    assert line("rate", "--lr 1e-2 --min-lr 1e-4 --tokens 64K --warmup-tokens 0") == course
    assert line("rate", "--lr 1e-2 --tokens 20").startswith("0.005 in the first step")
    stages = line("memory", "--layers 4 --pseudo --pseudo-layers 2 --tokens 64K").split("; then ")
    mb = [float(stage.split()[1]) for stage in stages]
    assert 0.3 < mb[0] / mb[1] < 0.9
    rates = "can be extended (--resume --tokens) only with --min-lr 1 or, before its decay,"
    assert line("afterwards", "--pos learned --min-lr 0.1") == f"{rates} --schedule wsd"
    assert line("afterwards", "--min-lr 1 --pos rope") == "can be exported only with --pos learned"


def test_a_dry_run_of_an_existing_run_does_not_change_it(run_of, store_dir, capsys):
    folder = run_of("--min-lr 1")
    before = contents(folder)
    line = f"--resume --out {folder} --data {store_dir} --tokens 1280 --dry-run"
    assert train.main(line.split()) == 0
    assert contents(folder) == before
    assert "ahead: about 3 steps, 768 tokens of text" in capsys.readouterr().out
