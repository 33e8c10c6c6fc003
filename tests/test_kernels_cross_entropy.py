"""The chunked cross-entropy of a linear head against its definition, forward and backward.

The truth is the definition in float64. What the chunked form may err is measured by what the
definition errs in the same dtype, on the same numbers.

    python -m pytest tests/test_kernels_cross_entropy.py
"""

import pytest
import torch
import torch.nn.functional as F

from kernels import cross_entropy
from kernels.cross_entropy import IGNORE, IMPLS, linear_cross_entropy, reference, token_losses

V, C = 29, 6
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (1, 63, 500, 512)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def head(N: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3, seed: int = 0) -> tuple:
    """Random x (N, C), weight (V, C), bias (V,) that want gradients, and targets (N,)."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator) for shape in ((N, C), (V, C), (V,))]
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORE
    return *(leaf.to(dtype).requires_grad_() for leaf in leaves), targets


def loss_and_gradients(impl: str, x, weight, bias, targets) -> list[torch.Tensor]:
    """The loss, and its gradients by everything that wants one, of 0.37 times the loss."""
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    loss = linear_cross_entropy(x, weight, bias, targets, impl)
    return [loss, *torch.autograd.grad(0.37 * loss, leaves)]


def as_dtype(dtype: torch.dtype, x, weight, bias, targets) -> tuple:
    """The same leaves in another dtype; targets as they are."""
    leaves = [
        None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)
    ]
    return *leaves, targets


def assert_errs_at_most_twice(truth: list, plain: list, found: list) -> None:
    """Each result errs at most twice as much as the definition's, where that was not mere luck:
    two roundings are granted."""
    for exact, rounded, one in zip(truth, plain, found, strict=True):
        assert one.shape == exact.shape and one.isfinite().all()
        rounding = torch.finfo(rounded.dtype).eps * exact.norm()
        allowed = 2 * ((rounded.double() - exact).norm() + rounding)
        assert (one.double() - exact).norm() <= allowed


def on(device: str, x, weight, bias, targets) -> tuple:
    """The same leaves on another device."""
    leaves = [t.detach().to(device).requires_grad_() for t in (x, weight, bias)]
    return *leaves, targets.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("N", LENGTHS)
def test_the_chunked_form_errs_at_most_twice_as_much_as_the_definition(
    monkeypatch, N, with_bias, dtype, device
):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)  # 500 has a short last
    x, weight, bias, targets = as_dtype(torch.float64, *on(device, *head(N, dtype)))
    inputs = (x, weight, bias if with_bias else None, targets)
    truth = loss_and_gradients("reference", *inputs)
    plain = loss_and_gradients("reference", *as_dtype(dtype, *inputs))
    found = loss_and_gradients("chunked", *as_dtype(dtype, *inputs))
    assert_errs_at_most_twice(truth, plain, found)
    assert [t.dtype for t in found[1:]] == [dtype] * (3 if with_bias else 2)
    assert found[0].dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N", LENGTHS)
def test_under_autocast_it_errs_at_most_twice_as_much(monkeypatch, N, device):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)
    inputs = on(device, *head(N, torch.float32))
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    with torch.autocast(device, torch.bfloat16):
        plain = loss_and_gradients("reference", *inputs)
        found = loss_and_gradients("chunked", *inputs)
    assert all(one.dtype == torch.float32 for one in found)
    assert (plain[0].double() - truth[0]).abs() > 1e-5 * truth[0], "else this ran in float32"
    assert_errs_at_most_twice(truth, plain, found)


@pytest.mark.parametrize(
    "N, chunk, ignored", [(37, 8, 0.3), (37, 1000, 0.3), (5, 2, 1.0), (0, 8, 0)]
)
def test_chunks_of_any_size_and_targets_that_are_all_ignored(monkeypatch, N, chunk, ignored):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: chunk)
    inputs = head(N, ignored=ignored)
    for one, other in zip(
        loss_and_gradients("chunked", *inputs),
        loss_and_gradients("reference", *inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_inputs_need_not_be_contiguous():
    x, weight, bias, targets = head(63)
    strided = [t.detach().repeat_interleave(2, 0)[::2].mT.contiguous().mT for t in (x, weight)]
    assert not any(t.is_contiguous() for t in strided)
    strided.append(bias.detach().repeat_interleave(2)[::2])
    found = loss_and_gradients(
        "chunked", *(t.requires_grad_() for t in strided), targets.repeat_interleave(2)[::2]
    )
    expected = loss_and_gradients("reference", x, weight, bias, targets)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow():
    x, weight, bias, targets = head(63, torch.float32)
    inputs = ((1e4 * x).detach().requires_grad_(), weight, bias, targets)
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    plain, found = (loss_and_gradients(impl, *inputs) for impl in ("reference", "chunked"))
    assert_errs_at_most_twice(truth, plain, found)


def test_without_gradients_the_loss_is_the_same():
    inputs = head(63, torch.float32)
    loss = loss_and_gradients("chunked", *inputs)[0]
    with torch.no_grad():
        alone = linear_cross_entropy(*inputs, impl="chunked")
    assert alone.equal(loss) and not alone.requires_grad


def test_the_definition_worked_by_hand():
    x, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
    targets = torch.tensor([0, IGNORE])
    expected = torch.tensor(1 + 1 / torch.e).log()  # -log softmax([1, 0])[0]
    for impl in IMPLS:
        loss = linear_cross_entropy(x, weight, None, targets, impl)
        torch.testing.assert_close(loss, expected.to(loss.dtype))


def test_auto_is_the_chunked_form_and_others_are_refused():
    inputs = head(500, torch.float32)
    assert linear_cross_entropy(*inputs).equal(linear_cross_entropy(*inputs, impl="chunked"))
    assert linear_cross_entropy(*inputs, impl="reference").equal(reference(*inputs))
    with pytest.raises(ValueError, match="impl 'triton' is unknown: choose one of auto, reference"):
        linear_cross_entropy(*inputs, impl="triton")


def test_a_second_derivative_is_refused_by_the_chunked_form():
    x, weight, bias, targets = head(8)
    loss = linear_cross_entropy(x, weight, bias, targets, "reference")
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    assert weight.grad.any()
    loss = linear_cross_entropy(x, weight, bias, targets, "chunked")
    with pytest.raises(RuntimeError, match=r"no second derivative.*impl='reference'"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_that_count_in_shares(monkeypatch, dtype):
    """Against the definition, and by hand: a target that counts two fifths, and one not at all."""
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)
    inputs = as_dtype(torch.float64, *head(150, dtype))
    shares = torch.rand(150, generator=torch.Generator().manual_seed(1))

    def results(impl, *inputs):
        *leaves, _ = inputs
        exact = shares.to(leaves[0].dtype)
        loss = linear_cross_entropy(*inputs, impl, shares=exact)
        return [loss, *torch.autograd.grad(0.37 * loss, leaves)]

    truth = results("reference", *inputs)
    plain = results("reference", *as_dtype(dtype, *inputs))
    assert_errs_at_most_twice(truth, plain, results("chunked", *as_dtype(dtype, *inputs)))

    x, weight, bias, _ = inputs
    two, targets = x[:2], torch.tensor([3, 4])
    counted = linear_cross_entropy(two, weight, bias, targets, shares=torch.tensor([0.4, 0]))
    alone = linear_cross_entropy(two[:1], weight, bias, targets[:1])
    torch.testing.assert_close(counted, 0.4 * alone, rtol=1e-6, atol=0)


# The loss of each target


def losses_by_definition(x, weight, bias, targets) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("N", LENGTHS)
def test_the_loss_of_each_target_errs_at_most_twice_as_much(
    monkeypatch, N, with_bias, dtype, device
):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)
    x, weight, bias, targets = on(device, *head(N, dtype))
    inputs = (x, weight, bias if with_bias else None, targets)
    truth = losses_by_definition(*as_dtype(torch.float64, *inputs))
    plain = losses_by_definition(*inputs)
    found = token_losses(*inputs)
    assert found.shape == (N,) and found.dtype == torch.float32 and not found.requires_grad
    assert not found[targets == IGNORE].any()
    assert_errs_at_most_twice([truth], [plain], [found])


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_the_losses_of_targets_add_up_to_the_loss(monkeypatch, dtype):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 1000)
    inputs = head(63, dtype)
    found, loss = token_losses(*inputs), linear_cross_entropy(*inputs, impl="chunked")
    assert found.sum().equal(loss) and found.dtype == loss.dtype
    with torch.autocast("cpu", torch.bfloat16):
        inputs = head(63, torch.float32)
        found, loss = token_losses(*inputs), linear_cross_entropy(*inputs, impl="chunked")
    assert found.sum().equal(loss) and found.dtype == torch.float32


def test_an_ignored_target_loses_nothing_whatever_its_logits():
    x, weight, bias, targets = head(8, torch.float32)
    x = x.detach().clone()
    targets[3], x[3] = IGNORE, torch.nan
    assert token_losses(x, weight, bias, targets).isfinite().all()
    assert token_losses(x[:0], weight, bias, targets[:0]).shape == (0,)
