"""The cross-entropy of a linear head against its definition, forward and backward, in both forms.

The truth is the definition in float64. What a form may err is measured by what the definition errs
in the same dtype, on the same numbers. On a machine without a GPU the Triton kernel runs under its
interpreter (conftest.py), which rounds to bfloat16 by cutting bits off; that, too, is within it.

    python -m pytest -n 0 tests/test_kernels_cross_entropy.py
"""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from kernels import cross_entropy, triton_here
from kernels.cross_entropy import (
    IGNORE,
    IMPLS,
    LinearCrossEntropy,
    chosen_impl,
    linear_cross_entropy,
    reference,
    token_losses,
)

V, C = 29, 6
DTYPES = (torch.float32, torch.bfloat16)
FEW = 20
LENGTHS = (1, FEW, 63, 500, 512)
# In what dtype a form is compared with the definition in the same one, and how near they come
EXACT = {"chunked": (torch.float64, 1e-12), "triton": (torch.float32, 2e-6)}
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=["chunked", "triton"])
def impl(request, monkeypatch, empty_is_full_of_nan):
    """One form; the kernel goes over V = 29 in two blocks of columns."""
    monkeypatch.setattr(cross_entropy, "COLS", 16)
    return request.param


@pytest.fixture(params=DEVICES)
def device(request, impl, needs_triton):
    if impl == "triton":
        needs_triton(request.param)
    return request.param


def is_slow(impl: str, device: str, N: int) -> bool:
    """The interpreter takes milliseconds per row, which is a program of the kernel."""
    return impl == "triton" and device == "cpu" and N > FEW


def chosen(monkeypatch, impl: str) -> None:
    """What auto stands for, in `token_losses` as well."""
    monkeypatch.setattr(cross_entropy, "chosen_impl", lambda *_: impl)


def head(N: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3, seed: int = 0) -> tuple:
    """Random x (N, C), weight (V, C), bias (V,) that want gradients, and targets (N,)."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator) for shape in ((N, C), (V, C), (V,))]
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = IGNORE
    return *(leaf.to(dtype).requires_grad_() for leaf in leaves), targets


def loss_and_gradients(impl: str, x, weight, bias, targets, shares=None) -> list[torch.Tensor]:
    """The loss, and its gradients by everything that wants one, of 0.37 times the loss."""
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    loss = linear_cross_entropy(x, weight, bias, targets, impl, shares)
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
    leaves = [t.detach().clone().to(device).requires_grad_() for t in (x, weight, bias)]
    return *leaves, targets.to(device)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("N", LENGTHS)
def test_a_form_errs_at_most_twice_as_much_as_the_definition(
    monkeypatch, N, with_bias, dtype, impl, device
):
    if is_slow(impl, device, N):
        pytest.skip("too many rows for the interpreter; 63 are under autocast")
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)  # 500 has a short last
    x, weight, bias, targets = as_dtype(torch.float64, *on(device, *head(N, dtype)))
    inputs = (x, weight, bias if with_bias else None, targets)
    truth = loss_and_gradients("reference", *inputs)
    plain = loss_and_gradients("reference", *as_dtype(dtype, *inputs))
    found = loss_and_gradients(impl, *as_dtype(dtype, *inputs))
    assert_errs_at_most_twice(truth, plain, found)
    assert [t.dtype for t in found[1:]] == [dtype] * (3 if with_bias else 2)
    assert found[0].dtype == torch.float32


@pytest.mark.parametrize("N", [1, 63])
def test_under_autocast_it_errs_at_most_twice_as_much(monkeypatch, N, impl, device):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 64)
    inputs = on(device, *head(N, torch.float32))
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    with torch.autocast(device, torch.bfloat16):
        plain = loss_and_gradients("reference", *inputs)
        found = loss_and_gradients(impl, *inputs)
    assert all(one.dtype == torch.float32 for one in found)
    assert (plain[0].double() - truth[0]).abs() > 1e-5 * truth[0], "else this ran in float32"
    assert_errs_at_most_twice(truth, plain, found)


@pytest.mark.parametrize(
    "N, chunk, ignored", [(13, 8, 0.3), (13, 1000, 0.3), (5, 2, 1.0), (0, 8, 0)]
)
def test_chunks_of_any_size_and_targets_that_are_all_ignored(
    monkeypatch, N, chunk, ignored, impl, device
):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: chunk)
    dtype, close = EXACT[impl]
    inputs = as_dtype(dtype, *on(device, *head(N, ignored=ignored)))
    for one, other in zip(
        loss_and_gradients(impl, *inputs),
        loss_and_gradients("reference", *inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_inputs_need_not_be_contiguous(impl, device):
    dtype, close = EXACT[impl]
    x, weight, bias, targets = as_dtype(dtype, *on(device, *head(FEW)))
    strided = [t.detach().repeat_interleave(2, 0)[::2].mT.contiguous().mT for t in (x, weight)]
    assert not any(t.is_contiguous() for t in strided)
    strided.append(bias.detach().repeat_interleave(2)[::2])
    found = loss_and_gradients(
        impl, *(t.requires_grad_() for t in strided), targets.repeat_interleave(2)[::2]
    )
    expected = loss_and_gradients("reference", x, weight, bias, targets)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_do_not_overflow(dtype, impl, device):
    x, weight, bias, targets = on(device, *head(FEW, dtype))
    inputs = ((1e4 * x).detach().requires_grad_(), weight, bias, targets)
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    plain, found = (loss_and_gradients(form, *inputs) for form in ("reference", impl))
    assert_errs_at_most_twice(truth, plain, found)


@pytest.mark.parametrize("first", [0, 20])
def test_tokens_that_cannot_come_have_logits_of_minus_infinity(first, impl, device):
    """Among them all of the kernel's first block of columns; their gradient is 0."""
    x, weight, bias, targets = on(device, *head(FEW, torch.float32))
    with torch.no_grad():
        bias[first : first + 9 if first else 17] = -torch.inf
    impossible = bias.isinf()
    targets[impossible[targets.clamp(min=0)]] = 18
    inputs = x, weight, bias, targets
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    plain, found = (loss_and_gradients(form, *inputs) for form in ("reference", impl))
    assert_errs_at_most_twice(truth, plain, found)
    assert not found[2][impossible].any() and not found[3][impossible].any()


def test_without_gradients_the_loss_is_the_same(impl, device):
    inputs = on(device, *head(FEW, torch.float32))
    loss = loss_and_gradients(impl, *inputs)[0]
    with torch.no_grad():
        alone = linear_cross_entropy(*inputs, impl=impl)
    assert alone.equal(loss) and not alone.requires_grad


@pytest.mark.parametrize("V, N", [(4160, 20), (50304, 3), (50257, 3)])
def test_real_vocabularies(V, N, device, impl, monkeypatch):
    """In the kernel's own blocks of columns; the last one's rows do not begin where they end."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=generator).to(device) for n in (N, V))
    targets = torch.tensor([V - 1, IGNORE, 0] + [7] * (N - 3), device=device)
    inputs = as_dtype(torch.bfloat16, x, weight, None, targets)
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs))
    plain, found = (loss_and_gradients(form, *inputs) for form in ("reference", impl))
    assert_errs_at_most_twice(truth, plain, found)


def test_a_target_that_is_no_token_makes_the_kernels_loss_nan(needs_triton):
    needs_triton()
    x, weight, bias, targets = head(8, torch.float32)
    for no_token in (V, -1, 2**40):
        targets[3] = no_token
        assert linear_cross_entropy(x, weight, bias, targets, "triton").isnan()


def halved(losses, *args):
    nats, dlogits = losses(*args)
    return nats, dlogits / 2


def without_shares(losses, *args):
    return losses(*args[:4], None, args[5])


BROKEN = {
    "gradients of half the size": halved,
    "every target counts the same": without_shares,
    "targets to ignore are tokens": lambda losses, x, matrix, bias, targets, *more: losses(
        x, matrix, bias, targets.clamp(min=0), *more
    ),
    "no bias": lambda losses, x, matrix, bias, *more: losses(x, matrix, None, *more),
    "a column less": lambda losses, x, matrix, bias, targets, *more: losses(
        x, torch.cat([matrix[:-1], torch.full_like(matrix[:1], -torch.inf)]), bias, targets, *more
    ),
}


@pytest.mark.parametrize("fault", [None, *BROKEN])
def test_a_form_that_computes_something_else_is_noticed(monkeypatch, fault, impl, needs_triton):
    """By the assertion that all of these tests make."""
    if impl == "triton":
        needs_triton()
    inputs = head(FEW, torch.float32)
    shares = torch.rand(FEW, generator=torch.Generator().manual_seed(1))
    truth = loss_and_gradients("reference", *as_dtype(torch.float64, *inputs), shares.double())
    plain = loss_and_gradients("reference", *inputs, shares)
    if fault is None:
        assert_errs_at_most_twice(truth, plain, loss_and_gradients(impl, *inputs, shares))
        return
    losses, broken = cross_entropy.LOSSES[impl], BROKEN[fault]
    monkeypatch.setitem(cross_entropy.LOSSES, impl, lambda *args: broken(losses, *args))
    found = loss_and_gradients(impl, *inputs, shares)
    with pytest.raises(AssertionError):
        assert_errs_at_most_twice(truth, plain, found)


def test_the_kernel_is_told_what_to_ignore(monkeypatch, needs_triton):
    """Where it is told another number, a target to ignore is no token, and the loss NaN."""
    needs_triton()
    inputs = head(FEW, torch.float32)
    assert linear_cross_entropy(*inputs, impl="triton").isfinite()
    monkeypatch.setattr(cross_entropy, "IGNORE", -101)
    assert linear_cross_entropy(*inputs, impl="triton").isnan()


def test_the_definition_worked_by_hand(needs_triton):
    x, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2)
    targets = torch.tensor([0, IGNORE])
    expected = torch.tensor(1 + 1 / torch.e).log()  # -log softmax([1, 0])[0]
    needs_triton()
    for impl in IMPLS:
        loss = linear_cross_entropy(x, weight, None, targets, impl)
        torch.testing.assert_close(loss, expected.to(loss.dtype))


def test_on_a_cpu_auto_is_the_chunked_form_and_others_are_refused():
    inputs = head(500, torch.float32)
    assert linear_cross_entropy(*inputs).equal(linear_cross_entropy(*inputs, impl="chunked"))
    assert linear_cross_entropy(*inputs, impl="reference").equal(reference(*inputs))
    with pytest.raises(ValueError, match="impl 'liger' is unknown: choose one of auto, reference"):
        linear_cross_entropy(*inputs, impl="liger")


def test_the_kernel_is_refused_where_it_cannot_run(monkeypatch, needs_triton):
    needs_triton()
    with pytest.raises(ValueError, match="x is float64: choose chunked"):
        chosen_impl("cuda", torch.float64, "triton")
    monkeypatch.setattr(triton_here.triton, "JITFunction", object)  # as if compiled
    with pytest.raises(ValueError, match="wants CUDA tensors"):
        chosen_impl("cpu", torch.bfloat16, "triton")
    monkeypatch.setattr(triton_here, "triton", None)
    with pytest.raises(ValueError, match="Triton is not installed here"):
        chosen_impl("cuda", torch.bfloat16, "triton")


@pytest.mark.parametrize("missing", [None, "Triton is not installed"])
def test_auto_is_the_kernel_for_16_bits_on_a_gpu_that_triton_compiles_for(monkeypatch, missing):
    here = {"cuda": missing}
    monkeypatch.setattr(cross_entropy, "why_not", lambda device: here.get(device, "no CUDA"))
    takes_it = missing is None
    found = [chosen_impl("cuda", dtype) for dtype in (*DTYPES, torch.float16)]
    assert found == ["chunked", *["triton" if takes_it else "chunked"] * 2]
    assert chosen_impl("cpu", torch.bfloat16) == "chunked"


def test_torch_has_the_product_that_adds_16_bits_to_float32():
    """On a GPU alone; see the cuda tests under autocast for what it computes."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]


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
def test_targets_that_count_in_shares(monkeypatch, dtype, impl, device):
    """Against the definition, and by hand: a target that counts two fifths, and one not at all."""
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 16)
    inputs = as_dtype(torch.float64, *on(device, *head(FEW, dtype)))
    shares = torch.rand(FEW, generator=torch.Generator().manual_seed(1)).to(device)
    truth = loss_and_gradients("reference", *inputs, shares.double())
    inputs = as_dtype(dtype, *inputs)
    plain = loss_and_gradients("reference", *inputs, shares.to(dtype))
    found = loss_and_gradients(impl, *inputs, shares.repeat_interleave(2)[::2])
    assert_errs_at_most_twice(truth, plain, found)

    x, weight, bias, _ = inputs
    two, targets = x[:2], torch.tensor([3, 4], device=device)
    shares = torch.tensor([0.4, 0], device=device)
    counted = linear_cross_entropy(two, weight, bias, targets, impl, shares)
    alone = linear_cross_entropy(two[:1], weight, bias, targets[:1], impl)
    torch.testing.assert_close(counted, 0.4 * alone, rtol=1e-6, atol=0)


def bytes_taken(run) -> int:
    """The most that `run` has at once of what it allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def scaled_copies(ctx, dloss):
    return *(None if d is None else d * dloss for d in ctx.saved_tensors), *[None] * 4


@pytest.mark.parametrize("backward", ["own", "scaled copies"])
def test_the_backward_pass_makes_no_array(monkeypatch, backward):
    if backward != "own":
        monkeypatch.setattr(LinearCrossEntropy, "backward", staticmethod(scaled_copies))
    x, weight, bias, targets = head(63, torch.float32)
    loss = 0.37 * linear_cross_entropy(x, weight, bias, targets, "chunked")
    arrays = bytes_taken(lambda: torch.autograd.grad(loss, (x, weight, bias)))
    all_of_them = 4 * (63 * C + V * C + V)
    assert arrays < 0.1 * all_of_them if backward == "own" else arrays >= all_of_them


def test_a_second_backward_pass_is_refused(impl, needs_triton):
    """Its gradients would be scaled twice."""
    if impl == "triton":
        needs_triton()
    x, weight, bias, targets = head(8, torch.float32)
    loss = linear_cross_entropy(x, weight, bias, targets, impl)
    first = torch.autograd.grad(0.37 * loss, x, retain_graph=True)[0].clone()
    expected = loss_and_gradients("reference", x, weight, bias, targets)[1]
    torch.testing.assert_close(first, expected)
    with pytest.raises(RuntimeError, match=r"second backward pass.*impl='reference'"):
        torch.autograd.grad(loss, x)


# The loss of each target


def losses_by_definition(x, weight, bias, targets) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("N", LENGTHS)
def test_the_loss_of_each_target_errs_at_most_twice_as_much(
    monkeypatch, N, with_bias, dtype, impl, device
):
    if is_slow(impl, device, N):
        pytest.skip("too many rows for the interpreter; 63 are under autocast")
    chosen(monkeypatch, impl)
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
def test_the_losses_of_targets_add_up_to_the_loss(monkeypatch, dtype, impl, device):
    if impl == "triton" and dtype == torch.float64:
        pytest.skip("the kernel computes in float32")
    chosen(monkeypatch, impl)
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 1000)
    inputs = on(device, *head(FEW, dtype))
    found, loss = token_losses(*inputs), linear_cross_entropy(*inputs, impl=impl)
    assert found.sum().equal(loss) and found.dtype == loss.dtype
    with torch.autocast(device, torch.bfloat16):
        inputs = on(device, *head(FEW, torch.float32))
        found, loss = token_losses(*inputs), linear_cross_entropy(*inputs, impl=impl)
    assert found.sum().equal(loss) and found.dtype == torch.float32


def test_an_ignored_target_loses_nothing_whatever_its_logits(monkeypatch, impl, device):
    chosen(monkeypatch, impl)
    x, weight, bias, targets = on(device, *head(8, torch.float32))
    x = x.detach().clone()
    targets[3], x[3] = IGNORE, torch.nan
    assert token_losses(x, weight, bias, targets).isfinite().all()
    assert token_losses(x[:0], weight, bias, targets[:0]).shape == (0,)
