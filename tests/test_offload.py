"""Offload: bitwise what it is without, everything where the plan says, in every mixture.

Device and host are both the CPU here; every copy is made all the same.
"""

from contextlib import nullcontext

import pytest
import torch

import ltd
import offload
from model import Transformer, TransformerConfig, run_plain, run_recomputed
from offload import Offloaded
from support.batch import Batch
from support.link import Landing
from support.optim import Optimizers
from support.placement import WHERE, Away, Placement, parts_of

CPU = torch.device("cpu")
NOTHING, STATE, GRADIENTS, WEIGHTS = Away
MIXTURES = {
    "nothing": [NOTHING] * 5,
    "state": [NOTHING, STATE, STATE, STATE, STATE],
    "gradients": [NOTHING, GRADIENTS, GRADIENTS, GRADIENTS, GRADIENTS],
    "weights": [NOTHING, WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS],
    "mixed": [STATE, NOTHING, WEIGHTS, GRADIENTS, STATE],
    "all that can": [GRADIENTS, WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS],
}


class Named:
    """Tensors by name in place of a model."""

    def __init__(self, tensors):
        self.named_parameters = tensors.items


def small(shared=False, kind="gpt", pos="learned"):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(kind, 4, 2, 16, 32, 24, 40, pos))
    if shared:
        model.h[3] = model.h[0]
    return model


def batch(seed, packed=True, B=3, T=24):
    tokens = torch.randint(0, 40, (B, T), generator=torch.Generator().manual_seed(seed))
    if not packed:
        return Batch(tokens, tokens.roll(-1, 1), None, None)
    doc_ids = torch.tensor([0] * 7 + [1] * 5 + [2] * 9 + [-1] * 3).repeat(B, 1)
    positions = torch.tensor([*range(7), *range(5), *range(9), 0, 0, 0]).repeat(B, 1)
    targets = torch.where(doc_ids < 0, -100, tokens.roll(-1, 1))
    return Batch(tokens, targets, positions, doc_ids)


def placed(model, away, kind="adamw", dtype="fp32"):
    parts = parts_of(model, kind == "muon")
    return Placement(parts, tuple(away)[: len(parts)], dtype, budget=0)


class Run:
    """Steps of two micro-batches, with clipping, weight decay and a rate that changes."""

    def __init__(self, model, away=None, kind="adamw", dtype="fp32", early=True):
        self.model, self.losses, self.norms, self.number = model, [], [], 0
        self.dtype = dtype
        self.held = None
        tensors = dict(model.named_parameters())
        if away is not None:
            self.held = Offloaded(model, placed(model, away, kind, dtype), CPU, early)
            tensors = self.held.parameters()
        self.optimizers = Optimizers(Named(tensors), kind, 0.1, (0.9, 0.95))

    def run_block(self, number, dropping=False, recomputed=False):
        run_block = run_recomputed if recomputed else run_plain
        if self.held:
            run_block = self.held.run_block(run_block, recomputed)
        if not dropping:
            return run_block
        bits = torch.randint(2**40, (2, 3, 24), generator=torch.Generator().manual_seed(number))
        kept = ltd.draw(15, bits)
        return ltd.token_dropping(dict(zip((1, 2), kept, strict=True)), run_block)

    def backward(self, last, **how):
        mixed = torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16")
        run_block = self.run_block(self.number, **how)
        with mixed:
            loss = self.model(batch(self.number), run_block=run_block) / 63
        with self.held.collecting(last) if self.held else nullcontext():
            loss.backward()
        self.losses.append(loss.item())
        self.number += 1

    def step(self, **how):
        for last in (False, False, True):
            self.backward(last, **how)
        self.norms.append(self.optimizers.clip_gradients(0.5))
        lr = 1e-2 / (1 + self.number)
        if self.held:
            self.held.step(lambda: self.optimizers.step(lr))
        else:
            self.optimizers.step(lr)

    def weights(self):
        return self.held.state_dict() if self.held else self.model.state_dict()

    def state(self):
        return {p: s for part in self.optimizers.parts for p, s in part.state.items()}


def steps(run, count, **how):
    for _ in range(count):
        run.step(**how)
    return run


def assert_same(one, other):
    """Bit for bit: losses, gradient norms, weights, optimizer state."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert min(one.norms) > 0.5, "clipping was active"
    assert_equal(one.weights(), other.weights())
    assert_equal_states(one, other)


def assert_equal(weights, others):
    assert list(weights) == list(others)
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def assert_equal_states(one, other):
    saved, others = one.optimizers.state_dict()["parts"], other.optimizers.state_dict()["parts"]
    assert len(saved) == len(others)
    for part, its in zip(saved, others, strict=True):
        assert part["state"].keys() == its["state"].keys() and part["state"]
        for number, state in part["state"].items():
            assert all(torch.equal(state[key], its["state"][number][key]) for key in state)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_is_bitwise_the_plain_run(mixture, kind):
    plain = steps(Run(small(), kind=kind), 4)
    assert_same(steps(Run(small(), MIXTURES[mixture], kind), 4), plain)
