"""Rotary positions, compiled or not, against their definition, a complex product.

python -m pytest -n 0 tests/test_kernels_rotary.py
"""

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from kernels.rotary import PUBLISHED, rotate, rotation

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 2**-8}
B, T, H, D = 2, 63, 3, 8


def compile_whole(function, met: set[torch.dtype]):
    """Compile a function to one graph that runs as is; collect its dtypes, forward and backward."""

    def note(graph, inputs):
        values = [node.meta.get("val") for node in graph.graph.nodes]
        met.update(value.dtype for value in values if isinstance(value, Tensor))
        return make_boxed_func(graph.forward)

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=note))


def definition(x: Tensor, positions: Tensor) -> Tensor:
    """x[2i] + x[2i + 1] sqrt(-1) times e^(sqrt(-1) p / 10000^(2i / D)), in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    angle = positions[:, :, None, None] * 10_000.0 ** (-torch.arange(0, D, 2).double() / D)
    turned = pairs * torch.exp(1j * angle)  # (B, T, H, D/2)
    return torch.view_as_real(turned).flatten(-2)


def queries(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q (B, T, H, D) as a slice of one tensor, as in attention; positions; a gradient."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, T, 3, H, D, generator=generator).to(dtype)
    positions = torch.randint(1024, (B, T), generator=generator)
    above = torch.randn(B, T, H, D, generator=generator).to(dtype)
    return qkv[:, :, 0].requires_grad_(), positions, above


@pytest.mark.parametrize("dtype", ROUNDING)
def test_pairs_turn_like_complex_numbers_compiled_or_not(dtype):
    """Cosines of float32 angles have errors of about 1e-4 at positions up to 1,023."""
    torch.compiler.reset()
    dtypes_met = set()
    q, positions, above = queries(dtype)
    turns = rotation(positions, D, torch.promote_types(dtype, torch.float32), PUBLISHED)
    truth = definition(q, positions)
    exact = (truth, *torch.autograd.grad(truth, q, above.double()))
    results = []
    for run in (rotate, compile_whole(rotate, dtypes_met)):
        turned = run(q, turns)
        results.append((turned, *torch.autograd.grad(turned, q, above)))
    for ours, of_compiled, expected in zip(*results, exact, strict=True):
        assert ours.dtype == of_compiled.dtype == dtype
        torch.testing.assert_close(of_compiled, ours, rtol=1e-6, atol=1e-6)
        allowed = 4 * ROUNDING[dtype]
        torch.testing.assert_close(ours.double(), expected.double(), rtol=0, atol=allowed)
    assert (results[0][0] - q).abs().max() > 1, "control: nothing was turned"
    assert dtype in dtypes_met and not any(met.is_complex for met in dtypes_met)
