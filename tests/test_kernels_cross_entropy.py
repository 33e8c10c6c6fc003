"""The cross-entropy of a linear head, chunked and in Triton, against its definition.

The truth is the definition in float64. The allowed error is twice that of the definition in the
same dtype on the same numbers. Without a GPU the Triton kernel runs in the interpreter
(conftest.py), which rounds to bfloat16 by truncation, and still stays within that error.

    python -m pytest -n 0 tests/test_kernels_cross_entropy.py
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, needs_triton

from kernels import cross_entropy
from kernels.cross_entropy import IGNORE, chosen_impl, linear_cross_entropy, token_losses

V, C = 29, 6
FEW = 7


@pytest.fixture(params=["chunked", "triton"])
def impl(request, monkeypatch, empty_is_full_of_nan):
    """An implementation, which "auto" selects too, with short chunks and two blocks of columns."""

    def chosen(device, dtype, impl="auto"):
        return request.param if impl == "auto" else impl

    monkeypatch.setattr(cross_entropy, "chosen_impl", chosen)
    monkeypatch.setattr(cross_entropy, "COLS", 16)
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 4)
    return request.param


@pytest.fixture(params=DEVICES)
def device(request, impl):
    if impl == "triton":
        needs_triton(request.param)
    return request.param


def head(N: int = FEW, ignored: float = 0.3) -> list:
    """Draw x (N, C), weight (V, C), bias (V,), and targets (N,)."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((N, C), (V, C), (V,))]
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORE
    return [*drawn, targets]


def every_other(t: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, not adjacent in memory."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


target_weights = torch.rand(FEW, generator=torch.Generator().manual_seed(1))
x, weight, bias, targets = head()
impossible = torch.where(torch.arange(V) < 17, -torch.inf, bias)
CASES = {  # x, weight, bias, targets, target_weights
    "one row": head(1),
    "no rows": head(0),
    "several chunks": head(),
    "no bias": [x, weight, None, targets],
    "all ignored": head(5, ignored=1.0),
    "large logits": [1e4 * x, weight, bias, targets],
    "target_weights": [x, weight, bias, targets, target_weights],
    "not contiguous": [every_other(t) for t in (x, weight, bias, targets, target_weights)],
    "a block of columns of probability 0": [x, weight, impossible, targets.clamp(min=17)],
}
WAYS = [*product(CASES, [torch.float32, torch.bfloat16]), ("several chunks", torch.float16)]


def place(dtype: torch.dtype, device: str, x, weight, bias, targets, target_weights=None) -> list:
    """Move inputs to a device and dtype, keep their strides, and make leaves require gradients."""
    leaves = [t if t is None else t.detach().to(device, dtype) for t in (x, weight, bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    target_weights = None if target_weights is None else target_weights.to(device, dtype)
    return [*leaves, targets.to(device), target_weights]


def loss_and_gradients(impl: str, x, weight, bias, targets, target_weights=None) -> list:
    """Return the loss, and the gradients of 0.37 times the loss."""
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    loss = linear_cross_entropy(x, weight, bias, targets, impl, target_weights)
    return [loss, *torch.autograd.grad(0.37 * loss, leaves)]


def loss_of_each(x, weight, bias, targets, target_weights=None) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


def assert_errs_at_most_twice(truth: list, plain: list, results: list, dtype=None) -> None:
    """Allow each result twice the definition's error, plus two roundings to the dtype of the
    products, because the definition may be exact by luck.
    """
    for exact, rounded, result in zip(truth, plain, results, strict=True):
        assert result.shape == exact.shape and result.isfinite().all()
        rounding = torch.finfo(dtype or rounded.dtype).eps * exact.norm()
        allowed = 2 * ((rounded.double() - exact).norm() + rounding)
        assert (result.double() - exact).norm() <= allowed


@pytest.mark.parametrize(("case", "dtype"), WAYS)
def test_errors_are_at_most_twice_the_definitions(case, dtype, impl, device):
    inputs = place(dtype, device, *CASES[case])
    exact = place(torch.float64, device, *inputs)
    truth = loss_and_gradients("reference", *exact)
    plain = loss_and_gradients("reference", *inputs)
    loss, *gradients = results = loss_and_gradients(impl, *inputs)
    assert_errs_at_most_twice(truth, plain, results)
    assert loss.dtype == torch.float32 and {d.dtype for d in gradients} == {dtype}
    if inputs[2] is not None:
        impossible = inputs[2].isinf()
        assert not gradients[1][impossible].any() and not gradients[2][impossible].any()
    with torch.no_grad():
        assert linear_cross_entropy(*inputs[:4], impl, inputs[4]).equal(loss)

    of_each = token_losses(*inputs[:4])
    assert of_each.dtype == torch.float32 and not of_each.requires_grad
    assert not of_each[inputs[3] == IGNORE].any()
    assert_errs_at_most_twice([loss_of_each(*exact)], [loss_of_each(*inputs)], [of_each])


def test_in_float64_chunked_equals_the_definition_to_twelve_digits():
    for case in CASES.values():
        inputs = place(torch.float64, "cpu", *case)
        results = loss_and_gradients("chunked", *inputs)
        expected = loss_and_gradients("reference", *inputs)
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)


def test_under_autocast_errors_are_at_most_twice_the_definitions(monkeypatch, impl, device):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 1000)
    inputs = place(torch.float32, device, *head(12))
    truth = loss_and_gradients("reference", *place(torch.float64, device, *inputs))
    with torch.autocast(device, torch.bfloat16):
        plain = loss_and_gradients("reference", *inputs)
        results = loss_and_gradients(impl, *inputs)
        assert token_losses(*inputs[:4]).sum().equal(results[0])
    assert all(result.dtype == torch.float32 for result in results)
    assert (plain[0].double() - truth[0]).abs() > 1e-5 * truth[0], "this ran in float32"
    assert_errs_at_most_twice(truth, plain, results, torch.bfloat16)


def test_errors_with_gpt2s_vocabulary_are_at_most_twice_the_definitions(device, impl, monkeypatch):
    """With blocks of the usual size. V is not a multiple of it, so the last block is incomplete."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator) for n in (3, 50_257))
    targets = torch.tensor([50_256, IGNORE, 0])
    inputs = place(torch.bfloat16, device, x, weight, None, targets)
    truth = loss_and_gradients("reference", *place(torch.float64, device, *inputs))
    plain, results = (loss_and_gradients(form, *inputs) for form in ("reference", impl))
    assert_errs_at_most_twice(truth, plain, results)


def test_ignored_targets_have_no_loss_even_with_nan_logits(impl, device):
    x, weight, bias, targets = (t.to(device) for t in head())
    x[targets == IGNORE] = torch.nan
    assert token_losses(x, weight, bias, targets).isfinite().all()


def test_a_target_outside_the_vocabulary_is_an_error_and_makes_the_kernels_loss_nan():
    needs_triton()
    inputs = place(torch.float32, "cpu", *head(2, ignored=0))
    for no_token in (V, -1, 2**40):
        inputs[3][1] = no_token
        with pytest.raises(RuntimeError, match=r"index .* is out of bounds"):
            linear_cross_entropy(*inputs[:4], "chunked")
        assert linear_cross_entropy(*inputs[:4], "triton").isnan()


def test_losses_equal_an_example_worked_by_hand():
    """With an ignored target, and with target_weights of 0.4 and 0."""
    needs_triton()
    x, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
    expected = torch.tensor(1 + 1 / torch.e).log()  # -log softmax([1, 0])[0]
    for impl in cross_entropy.IMPLS:
        loss = linear_cross_entropy(x, weight, None, torch.tensor([0, IGNORE]), impl)
        torch.testing.assert_close(loss, expected)
        target_weights = torch.tensor([0.4, 0])
        loss = linear_cross_entropy(x, weight, None, torch.tensor([0, 0]), impl, target_weights)
        torch.testing.assert_close(loss, 0.4 * expected)


def test_auto_selects_the_kernel_for_16_bits_on_a_gpu_with_triton(monkeypatch):
    for missing, of_16_bits in ((None, "triton"), ("Triton is not installed", "chunked")):
        here = {"cuda": missing, "cpu": "no CUDA"}
        monkeypatch.setattr(cross_entropy, "why_not", here.get)
        assert chosen_impl("cuda", torch.float32) == chosen_impl("cpu", torch.bfloat16) == "chunked"
        assert chosen_impl("cuda", torch.bfloat16) == of_16_bits


def test_second_derivatives_and_second_backward_passes_are_refused(impl, device):
    """A second backward pass would scale the gradients twice."""
    x, *others = place(torch.float32, device, *head())
    loss = linear_cross_entropy(x, *others[:3], impl)
    with pytest.raises(RuntimeError, match=r"impl='reference' has a second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"impl='reference' has a second backward pass"):
        torch.autograd.grad(loss, x)
