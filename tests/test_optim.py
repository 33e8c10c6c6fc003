"""Learning rates on the token clock, the update of each parameter, and Muon against its definition.

python -m pytest tests/test_optim.py
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import start_ranks
from hypothesis import given
from hypothesis import strategies as st
from small_batches import loss_of, plain_rows, small_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support import optim
from support.clock import Clock
from support.optim import Optimizers, learning_rate, lr_at, orthogonalise
from support.runtime import start
from support.settings import SCHEDULES, OptimConfig


def lr(t, schedule="cosine", floor=0.0, warmup=10):
    more = {"schedule": schedule, "warmup_tokens": warmup}
    return lr_at(OptimConfig(tokens=110, lr=1.0, min_lr=floor, **more), t)


def test_learning_rates_equal_worked_examples():
    assert [lr(t) for t in (0, 5, 10, 110, 500)] == [0, 0.5, 1, 0, 0]
    assert lr(60) == pytest.approx(0.5)
    assert lr(60, "linear") == 0.5 and lr(35, "linear") == 0.75
    assert lr(60, floor=0.2) == pytest.approx(0.6)
    # wsd: the last fifth of 110 begins at 88
    assert [lr(t, "wsd") for t in (10, 60, 88)] == [1, 1, 1]
    assert lr(99, "wsd") == pytest.approx(0.5) and lr(110, "wsd") == 0
    assert lr(0, warmup=0) == 1
    rates = OptimConfig(tokens=110, lr=1.0, warmup_tokens=10, lr_clock="layer-tokens")
    steps = [Clock(layer_tokens=4 * tokens) for tokens in (5, 15, 300)]
    assert learning_rate(rates, 4, *steps[:2]) == 1, "that of the middle of the step"
    assert learning_rate(rates, 4, *steps[1:]) == lr_at(rates, (15 + 110) / 2)


@given(st.integers(0, 200), st.sampled_from(SCHEDULES), st.floats(0, 1))
def test_learning_rates_stay_in_range_and_fall_after_warmup(t, schedule, floor):
    now, later = lr(t, schedule, floor=floor), lr(t + 1, schedule, floor=floor)
    assert 0 <= now <= 1 + 1e-12
    if t >= 10:
        assert floor - 1e-12 <= later <= now + 1e-12


def model(gradient=None):
    built = small_model(blocks=3)
    for parameter in built.parameters():
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    return built


def optimizers_of(m, kind):
    return Optimizers(dict(m.named_parameters()), kind, weight_decay=0.1, beta2=0.95)


def test_step_moves_only_the_parameters_given_and_frees_their_gradients():
    m = model(gradient=1.0)
    optimizers = optimizers_of(m, "muon")
    moved, named = {"wte.weight", "h.1.attn.c_attn.weight", "h.1.ln_1.weight"}, optimizers.named
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizers.step(0.01, only=moved)
    for name, was in before.items():
        assert torch.equal(named[name], was) == (name not in moved)
        assert (named[name].grad is None) == (name in moved)
    optimizers.step(0.01)
    assert all(not torch.equal(named[name], was) for name, was in before.items())
    muons = {name for name, state in optimizers.state.items() if "momentum_buffer" in state}
    assert muons == {name for name, p in m.named_parameters() if "h." in name and p.ndim > 1}


def advance(m, optimizers, steps):
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(0, 40, (2, 8))
        (loss_of(m, plain_rows(tokens)) / 16).backward()
        optimizers.clip_gradients(0)  # else the norm would depend on the order of parameters
        optimizers.step(0.01)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_restored_by_name_bitwise_and_its_bytes_are_predicted(kind):
    """The order of parameters does not matter. Parameters that a state does not name start anew."""
    straight, stopped, resumed = model(), model(), model()
    advance(straight, optimizers_of(straight, kind), range(6))
    optimizers = optimizers_of(stopped, kind)
    advance(stopped, optimizers, range(3))
    resumed.load_state_dict(stopped.state_dict())
    backwards = Optimizers(dict(reversed(list(resumed.named_parameters()))), kind, 0.1, 0.95)
    saved, named = optimizers.state_dict(), dict(stopped.named_parameters())
    assert saved["state"].keys() == named.keys()
    moments = sum(t.nbytes for kept in saved["state"].values() for t in kept.values() if t.ndim)
    weights = sum(p.nbytes for p in named.values())
    expected = {"weights": weights, "gradients": weights, "optimizer": moments}
    assert optim.state_bytes(named, kind == "muon") == optimizers.memory() == expected
    backwards.load_state_dict(saved)
    advance(resumed, backwards, range(3, 6))
    for expected, parameter in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, parameter)
    assert not torch.equal(straight.wte.weight, model().wte.weight)
    del saved["state"]["wte.weight"]
    backwards.load_state_dict(saved)
    assert backwards.state_dict()["state"].keys() == saved["state"].keys()


def test_clipping_scales_gradients_to_the_norm_and_0_turns_it_off():
    for clip, norm in ((0.0, None), (0.5, 0.5)):
        m = model(gradient=1.0)
        before = optimizers_of(m, "adamw").clip_gradients(clip).item()
        assert before == pytest.approx(sum(p.numel() for p in m.parameters()) ** 0.5, rel=1e-5)
        after = torch.cat([p.grad.flatten() for p in m.parameters()]).norm().item()
        assert after == pytest.approx(norm or before, rel=1e-3)


# ---- Muon

SHAPES = ((48, 48), (144, 48), (48, 192), (192, 48), (1, 5), (7, 1))


def matrices_of(shape: tuple, smallest: float, n: int = 3) -> Tensor:
    """Return matrices (n, *shape) in float64 whose singular values fall from 1 to `smallest`."""
    generator = torch.Generator().manual_seed(sum(shape))
    random = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    U, S, V = torch.linalg.svd(random, full_matrices=False)
    S = torch.logspace(0, torch.tensor(smallest).log10(), S.shape[1], dtype=torch.float64)
    return U * S @ V


def definition(matrix: Tensor) -> Tensor:
    """Compute Newton-Schulz as in Jordan's article, in the matrix's dtype."""
    X = matrix / matrix.norm()
    a, b, c = optim.COEFFICIENTS
    for _ in range(optim.ITERATIONS):
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalised_equals_the_definition(shape):
    # In the Gram matrix small singular values are squared and vanish in fp32's rounding error,
    # which must not grow.
    for smallest in (1e-12, 1e-4):
        matrices = matrices_of(shape, smallest)
        truth = torch.stack([definition(matrix) for matrix in matrices])
        assert error(orthogonalise(matrices.float()), truth) < 1e-3
    assert error(orthogonalise(matrices), truth) < 1e-7
    rounded = torch.stack([definition(matrix) for matrix in matrices.bfloat16()])
    assert error(orthogonalise(matrices.bfloat16()), truth) < 2 * error(rounded, truth)
    values = torch.linalg.svdvals(orthogonalise(matrices_of(shape, 0.02)))
    assert 0.6 < values.min() and values.max() < 1.3
    assert orthogonalise(torch.zeros(2, *shape)).count_nonzero() == 0


def muon(matrices: list[Tensor], fused: tuple[int, ...] = (), **more: object) -> Optimizers:
    """Return Muon for matrices of blocks; those of shape `fused` are queries, keys and values."""
    named = {}
    for number, matrix in enumerate(matrices):
        leaf = "c_attn" if matrix.shape == fused else "c_proj"
        named[f"h.{number}.{leaf}.weight"] = matrix
    return Optimizers(named, "muon", weight_decay=0.3, beta2=0.95, **more)


def test_muon_equals_torchs_computed_in_float64(monkeypatch):
    """torch's rounds to bf16; `exact` is torch's with the definition in float64 instead."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in 2 * SHAPES]
    ours, theirs, exact = ([matrix.clone().requires_grad_() for matrix in drawn] for _ in range(3))
    torchs = partial(torch.optim.Muon, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    one, other, in_full = muon(ours), torchs(theirs), torchs(exact)

    def in_float64(gradient: Tensor, *_) -> Tensor:
        return definition(gradient.double()).float()

    for _ in range(4):
        for same in zip(ours, theirs, exact, strict=True):
            gradient = torch.randn(same[0].shape, generator=generator)
            for parameter in same:
                parameter.grad = gradient.clone()
        one.step(0.1)
        other.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float64)
            in_full.step()
    for result, rounded, truth in zip(ours, theirs, exact, strict=True):
        assert error(result, truth) < 1e-4
        assert 1e-4 < error(rounded, truth) < 0.05, "the rounding error of torch's bf16"
    for name, parameter in zip(one.named, theirs, strict=True):
        momenta = (of["momentum_buffer"] for of in (one.state[name], other.state[parameter]))
        assert torch.equal(*momenta)


def test_adamw_equals_torchs_bitwise():
    ours, theirs = model(gradient=0.1), model(gradient=0.1)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True).step()
    optimizers_of(ours, "adamw").step(0.01)
    for result, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rows", [(48, 48, 48), (48, 12, 12)])
def test_stacked_matrices_move_as_separate_ones(rows):
    """These are queries, keys and values. With grouped queries, keys and values are smaller."""
    stacked, gradient = torch.randn(2, sum(rows), 48, generator=torch.Generator().manual_seed(0))
    together, *apart = (part.clone() for part in (stacked, *stacked.split(rows)))
    together.grad = gradient
    for parameter, its in zip(apart, gradient.split(rows), strict=True):
        parameter.grad = its
    muon([together], fused=together.shape).step(0.1)
    muon(apart).step(0.1)
    assert torch.equal(together, torch.cat(apart)) and not torch.equal(together, stacked)


def test_muon_orthogonalises_on_the_device_that_it_is_given(monkeypatch):
    ones = Mock(side_effect=lambda stacked, heights: torch.ones(stacked.shape))
    monkeypatch.setattr(optim, "orthogonalise_by_ranks", ones)
    for on in ("cpu", "meta"):
        matrix = torch.zeros(4, 4)
        matrix.grad = torch.ones(4, 4)
        muon([matrix], device=torch.device(on)).step(0.1)
        assert ones.call_args.args[0].device.type == on
        torch.testing.assert_close(matrix, torch.full((4, 4), -0.04))  # 0.1, 0.2, the root of 4


def check_shares(flags: list[str]) -> None:
    """With four matrices of each shape, the last of 3 ranks has nothing to do."""
    ranks, counts = start("cpu", "fp32").world_size, []

    def counted(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return orthogonalise(matrices)

    optim.orthogonalise = counted
    for shape in SHAPES:
        matrices = matrices_of(shape, 0.02, n=4).float()
        shared = optim.orthogonalise_by_ranks(matrices, (shape[0],))
        assert torch.equal(shared, orthogonalise(matrices))
    assert counts == [-(-4 // ranks)] * len(SHAPES)

    # matrices whose rows are sharded over the ranks become equal to whole ones
    mesh, generator = init_device_mesh("cpu", (ranks,)), torch.Generator().manual_seed(0)

    def draw(shape: torch.Size) -> tuple[Tensor, Tensor]:
        whole = torch.randn(shape, generator=generator)
        return whole, distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)

    whole, shards = zip(*map(draw, 2 * SHAPES), strict=True)
    plain, sharded = (muon(matrices, fused=(144, 48)) for matrices in (whole, shards))
    for _ in range(3):
        for parameter, its in zip(whole, shards, strict=True):
            parameter.grad, its.grad = draw(parameter.shape)
        plain.step(0.1)
        sharded.step(0.1)
    for parameter, its in zip(whole, shards, strict=True):
        assert torch.equal(its.full_tensor(), parameter)
    dist.destroy_process_group()


@pytest.mark.dist
def test_ranks_share_muons_work_and_all_get_the_whole_result():
    start_ranks(3, [], work=check_shares)
