"""Micro-batches that fit the memory, and memory that stays with the process once it is freed.

python -m pytest tests/test_memory.py
"""

import platform
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, bytes_taken, needs_triton, start_ranks
from test_flops import ONE, Odd

import config
import model
import train
from kernels import cross_entropy
from model import Batch, TransformerConfig
from support import runtime
from support.runtime import Runtime
from support.step import memory, sizes
from support.step.memory import MicroBatch, micro_batch
from support.step.optim import Optimizers
from support.step.sizes import empty_model

LLAMA = "--block llama --kv-heads 1 --qk-norm --no-tied"


def cut(line: str, world_size: int = 1, device: str = "cpu") -> MicroBatch:
    ranks = Runtime(0, world_size, torch.device(device), torch.float32, "")
    return micro_batch(config.build(config.parse(line.split())), ranks)


def test_a_micro_batch_shares_rows_evenly_and_says_why():
    rows = "--batch-tokens 4096"
    assert [cut(rows, ranks).count for ranks in (1, 2, 16)] == [16, 8, 1]
    assert cut(f"{rows} --micro-batch-size 4").count == 4
    why = "512 rows of 1024 a step, 4 at once a rank (at most 4096 tokens on cpu)"
    assert cut("--size 124M") == (4, why)
    assert cut("--size 124M", device="cuda").count == 32
    assert cut("--seq-len 8192 --batch-tokens 8192").count == 1, "at least a row"
    documents = "--pack --pack-batch documents --batch-tokens"  # in as many rows as they need
    count, why = cut(f"{documents} 4096", 3)
    assert count == 5 and why.startswith("the documents of 16 rows of 256 a step")
    assert cut(f"{documents} 256", 2).count == 1


def check_faults(flags: list[str]) -> None:
    """Page faults of two steps after the first, before and after freed memory is kept."""

    def faults() -> int:
        [torch.ones(4_000_000) for _ in range(4)]  # 64 MB, freed together
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = [faults() for _ in range(3)]
    runtime.keep_freed_memory()
    after = [faults() for _ in range(3)]
    assert before[2] - before[0] > 7_000, "else there is nothing to mend here"
    assert after[2] - after[0] < (before[2] - before[0]) / 2


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_steps_get_the_pages_of_the_steps_before():
    start_ranks(1, [], work=check_faults)


# ---- the estimate


@pytest.mark.parametrize("flags", ["", "--optimizer adamw", "--model bert --nsp", "--pos learned"])
def test_weights_gradients_and_state_are_counted_exactly(flags):
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    shape = config.transformer_config(settings, 320)
    o, model = settings.optim, train.Transformer(shape)
    optimizers = Optimizers(dict(model.named_parameters()), o.optimizer, 0.1, (0.9, 0.95))
    wanted = optimizers.memory()
    is_muon, empty = o.optimizer == "muon", dict(empty_model(shape).named_parameters())
    assert memory.state_bytes(empty, is_muon) == wanted
    found = memory.memory_of(settings, ONE, 4, shape)._asdict()
    assert {name: found[name] for name in wanted} == wanted
    halves = memory.state_bytes(empty, is_muon, shards=2)
    assert halves["weights"] == pytest.approx(wanted["weights"] / 2, rel=0.01)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "flags", ["", "--pos learned", "--model bert", "--checkpoint-activations", "--width 96", LLAMA]
)
def test_activations_are_those_that_autograd_keeps(flags, half, monkeypatch):
    """Of rotary and learned positions, of blocks that run twice, and of a block that is new."""
    if "96" in flags:  # a shape that no other test counts
        monkeypatch.setattr(model, "Block", Odd)
    settings = config.build(config.parse(f"--layers 4 --width 64 --heads 2 {flags}".split()))
    shape = config.transformer_config(settings, 320)
    net, T = train.Transformer(shape), settings.data.seq_len
    assert sum(p.numel() for p in net.parameters()) == sizes.parameter_count(shape)
    matrices = [p for p in net.h[0].parameters() if p.ndim > 1]
    assert sum(p.numel() for p in matrices) == sizes.weights_of_block(shape), "a fork's too"

    def kept(rows: int) -> int:
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            return tensor

        tokens, hooks = torch.randint(300, (rows, T)), torch.autograd.graph.saved_tensors_hooks
        run_block = train.run_block_of(settings, {}, None, 0, Batch(tokens, tokens, None, None))
        with hooks(pack, lambda tensor: tensor), torch.autocast("cpu", enabled=half):
            assert net.hidden_states(tokens, run_block=run_block).requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    rerun = settings.run.checkpoint_activations
    found, said = kept(6) - kept(3), memory.activation_bytes(shape, 3, T, half, recomputed=rerun)
    if rerun:
        said -= memory.activation_bytes(replace(shape, layers=1), 3, T, half)
        said += 3 * T * 4 * shape.width
    assert said == pytest.approx(found, rel=0.1), flags


@pytest.mark.parametrize("form", ["float32", "chunked", "triton"])
def test_what_the_loss_needs_is_what_it_takes(form, monkeypatch):
    """Its chunk of logits, in 16 bits as either form has them, and its gradients; no copy of any
    in the backward pass."""
    half = form != "float32"
    shape = TransformerConfig("gpt", 1, 1, 16, 64, 64, 4992)
    for module in (cross_entropy, memory):
        name = "chosen_impl" if module is cross_entropy else "chosen_loss"
        monkeypatch.setattr(module, name, lambda *_: form if half else "chunked")
    if form == "triton":
        needs_triton()
        # a GPU adds the product to the gradient without an array of its own
        monkeypatch.setattr(cross_entropy, "add_product", lambda out, a, b: None)
    x, weight = torch.randn(64, 16).requires_grad_(), torch.randn(4992, 16).requires_grad_()

    def loss_and_gradients():
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = cross_entropy.linear_cross_entropy(x, weight, None, torch.arange(64))
        torch.autograd.grad(loss, (x, weight))

    # some CPUs' products in 16 bits take an array for themselves
    logits, matrix = torch.zeros(64, 4992).bfloat16(), torch.zeros(4992, 16).bfloat16()
    of_product = bytes_taken(lambda: logits @ matrix) - 2 * x.numel() if form == "triton" else 0
    found = bytes_taken(loss_and_gradients) - of_product
    here = replace(ONE, dtype=torch.bfloat16 if half else torch.float32)
    casts = 2 * weight.numel() if half else 0  # of the weight: counted as temporary
    assert memory.logits_bytes(shape, 64, here) + casts == pytest.approx(found, rel=0.05)


def test_more_rows_are_taken_at_once_where_there_is_room(monkeypatch):
    settings = config.build(config.parse(["--size", "124M", "--device", "cpu"]))

    def needed(settings, runtime, rows, *_):
        return SimpleNamespace(on_device=1000 * rows)

    monkeypatch.setattr(memory, "memory_of", needed)
    shape = config.transformer_config(settings, 320)

    def at_once(free: int | None) -> int:
        return memory.micro_batch(settings, replace(ONE, device_free=free), shape).count

    assert [at_once(free) for free in (100, 2_000, 4_000, 5_000, 10**9)] == [1, 1, 2, 4, 4]
    assert at_once(None) == 4, "nobody knows"
