"""Muon against torch's and against its definition, batches against single matrices, and ranks.

python -m pytest tests/test_muon.py
"""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from conftest import start_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.runtime import start
from support.step import muon
from support.step.muon import Muon, orthogonalised, orthogonalised_by_all

SHAPES = ((48, 48), (144, 48), (48, 192), (192, 48), (1, 5), (7, 1))


def matrices_of(shape: tuple, n: int = 3, smallest: float = 1e-4) -> Tensor:
    """(n, *shape) float64 matrices whose singular values fall evenly from 1 to `smallest`."""
    generator = torch.Generator().manual_seed(sum(shape))
    random = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    U, S, V = torch.linalg.svd(random, full_matrices=False)
    S = torch.logspace(0, torch.tensor(smallest).log10(), S.shape[1], dtype=torch.float64)
    return U * S @ V


def definition(matrix: Tensor) -> Tensor:
    """Newton-Schulz as it is written in Jordan's article, in the matrix's own dtype."""
    X = matrix / matrix.norm()
    for a, b, c in muon.POLYNOMIALS:
        A = X @ X.mT
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def error(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalised_is_the_definition(shape):
    matrices = matrices_of(shape)
    truth = torch.stack([definition(matrix) for matrix in matrices])
    assert error(orthogonalised(matrices), truth) < 1e-7
    assert error(orthogonalised(matrices.float()), truth) < 1e-3
    rounded = torch.stack([definition(matrix) for matrix in matrices.bfloat16()])
    assert error(orthogonalised(matrices.bfloat16()), truth) < 2 * error(rounded, truth)
    values = torch.linalg.svdvals(orthogonalised(matrices_of(shape, smallest=0.02)))
    assert 0.6 < values.min() and values.max() < 1.3
    assert orthogonalised(torch.zeros(2, *shape)).count_nonzero() == 0
    # squared in the Gram matrix, small ones vanish in fp32's rounding: the rest must not grow
    matrices = matrices_of(shape, smallest=1e-12)
    truth = torch.stack([definition(matrix) for matrix in matrices])
    assert error(orthogonalised(matrices.float()), truth) < 1e-3


def steps_of(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def parameters_of() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in 2 * SHAPES]


def test_moves_as_torchs_muon_within_its_dtype(monkeypatch):
    """Torch's rounds to bf16; exact is torch's with the definition in float64 in place of that."""
    ours, theirs, exact = (parameters_of() for _ in range(3))
    torchs = partial(torch.optim.Muon, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    one, other = Muon(ours, 0.1, 0.3), torchs(theirs)
    steps_of(one, ours, range(4))
    steps_of(other, theirs, range(4))

    def in_float64(gradient: Tensor, *_) -> Tensor:
        return definition(gradient.double()).float()

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float64)
    steps_of(torchs(exact), exact, range(4))
    for found, rounded, truth in zip(ours, theirs, exact, strict=True):
        assert error(found, truth) < 1e-4
        assert 1e-4 < error(rounded, truth) < 0.05, "what torch's own dtype costs"
    found, wanted = one.state_dict()["state"], other.state_dict()["state"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    one.load_state_dict({**one.state_dict(), "state": wanted})
    steps_of(one, ours, range(4, 5))


@pytest.mark.parametrize(("parts", "rows"), [((48,), (48,) * 3), ((48, 12, 12), (48, 12, 12))])
def test_matrices_below_each_other_move_as_if_apart(parts, rows):
    """Queries, keys and values; those of keys and values are smaller with grouped queries."""
    stacked, gradient = torch.randn(2, sum(rows), 48, generator=torch.Generator().manual_seed(0))
    together, *apart = (part.clone() for part in (stacked, *stacked.split(rows)))
    together.grad = gradient
    for parameter, its in zip(apart, gradient.split(rows), strict=True):
        parameter.grad = its
    Muon([{"params": [together], "parts": parts}], 0.1, 0.3).step()
    Muon(apart, 0.1, 0.3).step()
    assert torch.equal(together, torch.cat(apart)) and not torch.equal(together, stacked)


def test_orthogonalises_on_the_device_named(monkeypatch):
    elsewhere = Mock(side_effect=lambda matrices, parts: torch.ones(matrices.shape))
    monkeypatch.setattr(muon, "orthogonalised_by_all", elsewhere)
    for on in (None, torch.device("meta")):
        matrix = torch.nn.Parameter(torch.zeros(4, 4))
        matrix.grad = torch.ones(4, 4)
        optimizer = Muon([matrix], lr=1.0, weight_decay=0.0, on=on)
        optimizer.step()
        assert optimizer.state[matrix]["momentum_buffer"].device.type == "cpu"
        assert torch.equal(matrix, torch.full((4, 4), -0.4))  # 0.2 times the root of 4
    assert [call.args[0].device.type for call in elsewhere.mock_calls] == ["cpu", "meta"]


def test_a_matrix_without_gradient_stays_as_it_is():
    parameters = parameters_of()
    optimizer = Muon(parameters, 0.1, 0.3)
    optimizer.step()  # none has one
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    for number, (now, before) in enumerate(zip(parameters, parameters_of(), strict=True)):
        assert torch.equal(now, before) == (number > 0)


def check_shares(flags: list[str]) -> None:
    """Four matrices a shape: of 3 ranks the last has none of its own, sharded or not."""
    ranks, counts = start("cpu", "fp32").world_size, []

    def counted(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return orthogonalised(matrices)

    muon.orthogonalised = counted
    for shape in SHAPES:
        matrices = matrices_of(shape, 4).float()
        assert torch.equal(orthogonalised_by_all(matrices, (shape[0],)), orthogonalised(matrices))
    assert counts == [-(-4 // ranks)] * len(SHAPES)

    # matrices whose rows are spread over the ranks end where whole ones do
    mesh, whole = init_device_mesh("cpu", (ranks,)), parameters_of()

    def shards_of(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor.detach().clone(), mesh, [Shard(0)], src_data_rank=None)

    shards = [shards_of(parameter).requires_grad_() for parameter in whole]

    def muon_of(parameters: list[Tensor]) -> Muon:
        fused = [p for p in parameters if p.shape == (144, 48)]
        others = [p for p in parameters if p.shape != (144, 48)]
        return Muon([{"params": fused, "parts": (48,)}, {"params": others}], 0.1, 0.3)

    sharded, plain = muon_of(shards), muon_of(whole)
    for step in range(3):
        steps_of(plain, whole, range(step, step + 1))
        for parameter, its in zip(shards, whole, strict=True):
            parameter.grad = shards_of(its.grad)
        counts.clear()
        sharded.step()
        of_each = [2 * 3, *[2] * (len(SHAPES) - 1)]  # matrices of each shape, the fused ones first
        assert all(c <= -(-n // ranks) for c, n in zip(counts, of_each, strict=True))
    for parameter, its in zip(shards, whole, strict=True):
        assert (parameter.full_tensor() - its).abs().max() < 1e-6
    dist.destroy_process_group()


@pytest.mark.dist
def test_ranks_share_the_work_and_all_get_the_whole():
    start_ranks(3, [], work=check_shares)
