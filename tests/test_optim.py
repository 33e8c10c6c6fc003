"""Learning rate on the token clock, parameter groups, and both optimizers' state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import Transformer, TransformerConfig
from support.step import optim
from support.step.optim import OptimConfig, Optimizers, lr_at, split_parameters


def lr(t, schedule="cosine", floor=0.0, warmup=10):
    more = {"schedule": schedule, "warmup_tokens": warmup, "decay_share": 0.2}
    return lr_at(OptimConfig(tokens=110, lr=1.0, min_lr=floor, **more), t)


def test_worked_examples():
    assert [lr(t) for t in (0, 5, 10, 110, 500)] == [0, 0.5, 1, 0, 0]
    assert lr(60) == pytest.approx(0.5)
    assert lr(60, "linear") == 0.5 and lr(35, "linear") == 0.75
    assert lr(60, floor=0.2) == pytest.approx(0.6)
    # wsd: the last fifth of 110 begins at 88
    assert [lr(t, "wsd") for t in (10, 60, 88)] == [1, 1, 1]
    assert lr(99, "wsd") == pytest.approx(0.5) and lr(110, "wsd") == 0
    assert lr(0, warmup=0) == 1


@given(st.integers(0, 200), st.sampled_from(optim.SCHEDULES), st.floats(0, 1))
def test_stays_between_floor_and_peak_and_falls_after_warmup(t, schedule, floor):
    now, later = lr(t, schedule, floor=floor), lr(t + 1, schedule, floor=floor)
    assert 0 <= now <= 1 + 1e-12
    if t >= 10:
        assert floor - 1e-12 <= later <= now + 1e-12


def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig("gpt", 3, 2, 16, 32, 8, 40))


def optimizers_of(m, kind, weight_decay=0.1):
    return Optimizers(dict(m.named_parameters()), kind, weight_decay, (0.9, 0.95))


def test_every_parameter_is_moved_once():
    m = model()
    for muon in (False, True):
        parts = split_parameters(dict(m.named_parameters()), muon)
        moved = [id(p) for part in parts for p in part]
        assert sorted(moved) == sorted(id(p) for p in m.parameters())
        assert all(p.ndim == 1 for p in parts.plain)
        assert len(parts.matrices) == (9 if muon else 0)  # 3 in each of 3 blocks
        assert len(parts.qkv) == (3 if muon else 0)  # and one that is three
    halves = optim.state_bytes({"h.0.a": torch.zeros(5, 3), "b": torch.zeros(1)}, True, shards=2)
    assert halves == {"weights": 40, "gradients": 40, "optimizer": 3 * 12 + 2 * 4}


def advance(m, optimizers, steps):
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(0, 40, (2, 8))
        (m((tokens, tokens.roll(-1, 1), None, None)) / 16).backward()
        optimizers.clip_gradients(0)  # else the norm would depend on the order of parameters
        optimizers.step(0.01)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_on_bitwise_by_name_and_its_bytes_are_known(kind):
    """Whatever the order of the parameters; one that a state does not name begins anew."""
    straight, stopped, resumed = model(), model(), model()
    advance(straight, optimizers_of(straight, kind), range(6))
    optimizers = optimizers_of(stopped, kind)
    advance(stopped, optimizers, range(3))
    resumed.load_state_dict(stopped.state_dict())
    backwards = Optimizers(dict(reversed(list(resumed.named_parameters()))), kind, 0.1, (0.9, 0.95))
    saved, named = optimizers.state_dict(), dict(stopped.named_parameters())
    assert saved["state"].keys() == named.keys()
    moments = sum(t.nbytes for kept in saved["state"].values() for t in kept.values() if t.ndim)
    weights = sum(p.nbytes for p in named.values())
    wanted = {"weights": weights, "gradients": weights, "optimizer": moments}
    assert optim.state_bytes(named, kind == "muon") == optimizers.memory() == wanted
    backwards.load_state_dict(saved)
    advance(resumed, backwards, range(3, 6))
    for wanted, parameter in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(wanted, parameter)
    assert not torch.equal(straight.wte.weight, model().wte.weight)
    del saved["state"]["wte.weight"]
    backwards.load_state_dict(saved)
    assert backwards.state_dict()["state"].keys() == saved["state"].keys()


def test_clipping():
    m = model()
    optimizers = optimizers_of(m, "adamw", 0.0)
    for clip, norm in ((0.0, None), (0.5, 0.5)):
        for parameter in m.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = optimizers.clip_gradients(clip).item()
        assert before == pytest.approx(sum(p.numel() for p in m.parameters()) ** 0.5, rel=1e-5)
        after = torch.cat([p.grad.flatten() for p in m.parameters()]).norm().item()
        assert after == pytest.approx(norm or before, rel=1e-3)


def test_decay_touches_matrices_alone():
    m = model()
    optimizers = optimizers_of(m, "muon", 0.5)
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    for parameter in m.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(0.1)
    for name, parameter in m.named_parameters():
        shrunk = before[name] * (0.95 if parameter.ndim == 2 else 1)
        assert torch.allclose(parameter, shrunk, atol=1e-7), name
