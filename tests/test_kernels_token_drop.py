"""The copies of token dropping, in PyTorch and Triton, against their definitions.

Copies do not round, so every result must equal the definition's bit for bit, in every dtype. The
true gradients are autograd's, through torch.where or through the definitions. Without a GPU the
Triton kernels run in the interpreter (conftest.py); test_ahead_of_time.py checks what they compile
to.

    python -m pytest -n 0 tests/test_kernels_token_drop.py
"""

import itertools
import runpy
from functools import partial

import pytest
import torch
from conftest import DEVICES, needs_triton, refusal, why_no_triton

from kernels import attention_tiles, cross_entropy, token_drop, triton_here
from kernels.token_drop import merge, reference_gather, reference_scatter, split

assert_bitwise = partial(torch.testing.assert_close, rtol=0, atol=0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = (2, 63, 6, 20)  # B, T, C, K
SHAPES = (  # several programs of a kernel, also side by side; keep all, all but one, or one
    *((SMALL, dtype) for dtype in DTYPES),
    ((3, 1, 1, 1), torch.bfloat16),
    ((2, 63, 100, 63), torch.bfloat16),
    ((2, 130, 64, 1), torch.bfloat16),
    ((2, 512, 1, 511), torch.bfloat16),
    ((1, 5, 3000, 2), torch.float32),
)


@pytest.fixture(params=["torch", "triton"])
def impl(request, empty_is_full_of_nan):
    return request.param


@pytest.fixture(params=DEVICES)
def device(request, impl):
    if impl == "triton":
        needs_triton(request.param, loops=False)
    return request.param


def inputs(shape, dtype=torch.float32, device="cpu") -> tuple[torch.Tensor, ...]:
    """Draw x (B, T, C) and y (B, K, C), which require gradients, kept (B, K), and a gradient."""
    B, T, C, K = shape
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(B, T, generator=generator).topk(K, dim=1).indices.sort(dim=1).values
    x, y, d = (torch.randn(B, n, C, generator=generator) for n in (T, K, T))
    x, y, d = (t.to(device, dtype) for t in (x, y, d))
    return x.requires_grad_(), kept.to(device), y.requires_grad_(), d


def block(states: torch.Tensor) -> torch.Tensor:
    """Stand in for a layer, with a different derivative in every element."""
    return states + states.square() / 2


def layer(x: torch.Tensor, kept: torch.Tensor, impl: str) -> torch.Tensor:
    kept_states, rest = split(x, kept, impl)
    return merge(rest, kept, block(kept_states), impl)


def layer_by_definition(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return reference_scatter(x, kept, block(reference_gather(x, kept)))


def assert_as_defined(impl: str, x, kept, y, d) -> None:
    """Compare each operation and all its gradients, and assert that no input has changed."""
    before = [t.detach().clone() for t in (x, kept, y, d)]
    K = kept.shape[1]
    cases = (
        (split(x, kept, impl)[0], reference_gather(x, kept), (x,), d[:, :K]),
        (merge(split(x, kept, impl)[1], kept, y, impl), reference_scatter(x, kept, y), (x, y), d),
        (layer(x, kept, impl), layer_by_definition(x, kept), (x,), d),
    )
    for result, expected, leaves, above in cases:
        assert result.is_contiguous()
        assert_bitwise(result, expected)
        gradients = [torch.autograd.grad(out, leaves, above) for out in (result, expected)]
        assert_bitwise(*gradients)
    assert_bitwise([x, kept, y, d], before)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_every_operation_and_gradient_equals_the_definition_bitwise(impl, device, shape, dtype):
    assert_as_defined(impl, *inputs(shape, dtype, device))


def test_every_subset_of_seven_positions(impl, device):
    for K in (1, 3, 4):
        kept = torch.tensor(list(itertools.combinations(range(7), K)), device=device)
        x, _, y, d = inputs((len(kept), 7, 3, K), torch.float32, device)
        assert_as_defined(impl, x, kept, y, d)


STRIDES = (  # positions before rows in memory; columns before positions; every other column
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: t.mT.contiguous().mT,
    lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
)


def test_inputs_and_gradients_need_not_be_contiguous(impl, device):
    for strided in STRIDES:
        x, kept, y, d = inputs((3, 63, 16, 20), torch.bfloat16, device)
        x, y = (strided(t.detach()).requires_grad_() for t in (x, y))
        kept = kept.repeat_interleave(2, dim=1)[:, ::2]
        assert not any(t.is_contiguous() for t in (x, kept, y, strided(d)))
        assert_as_defined(impl, x, kept, y, strided(d))


def test_a_layer_of_kept_tokens_equals_an_example_worked_by_hand(impl, device):
    x = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], device=device, requires_grad=True)
    kept = torch.tensor([[1, 3]], device=device)
    kept_states, rest = split(x, kept, impl)
    out = merge(rest, kept, 10 * kept_states, impl)
    (dx,) = torch.autograd.grad(out, x, x.detach())
    assert kept_states.flatten().tolist() == [2, 4]
    assert rest.equal(x) and out.flatten().tolist() == dx.flatten().tolist() == [1, 20, 3, 40]


def test_gradients_are_exact_whichever_results_are_used(impl, device):
    """x, a merge and each part of a split, alone and together. The truth uses torch.where."""
    x, kept, y, d = inputs(SMALL, torch.float64, device)
    is_kept = reference_scatter(torch.zeros_like(x), kept, torch.ones_like(y)).bool()
    kept_states, rest = split(x, kept, impl)
    alone = torch.where(is_kept, x.detach(), x)  # x, without gradients of kept tokens
    spread = reference_scatter(torch.zeros_like(x), kept, y)
    losses = [  # (ours, the definition's)
        (merge(rest, kept, block(kept_states), impl) * d, torch.where(is_kept, block(x), x) * d),
        (merge(rest, kept, y, impl) * d, torch.where(is_kept, spread, x) * d),
        (merge(rest, kept, y.detach(), impl) * d, torch.where(is_kept, spread.detach(), x) * d),
        (kept_states.sin(), torch.where(is_kept, x.sin(), 0)),
        (rest.cos(), alone.cos()),
        (x * x, x * x),
    ]
    losses = [(result.sum(), expected.sum()) for result, expected in losses]
    losses.append(tuple(map(sum, zip(*losses, strict=True))))
    grad = partial(torch.autograd.grad, inputs=(x, y), retain_graph=True, materialize_grads=True)
    for result, expected in losses:
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(grad(result), grad(expected), rtol=1e-12, atol=1e-12)


def test_changing_x_or_rest_in_place_before_the_merge_is_an_error(impl, device):
    leaf, kept, _, _ = inputs(SMALL, device=device)
    for changed in (0, 1):
        x = leaf.clone()
        kept_states, rest = split(x, kept, impl)
        assert rest.data_ptr() == x.data_ptr()
        with pytest.raises(RuntimeError, match="modified inplace"):
            (x, rest)[changed].add_(1)
            merge(rest, kept, kept_states, impl).sum().backward()


def test_kept_positions_that_do_not_fit_are_refused(impl, device):
    x, kept, y, _ = inputs(SMALL, device=device)
    for wrong in (kept.int(), kept[:1], kept[:, :0], kept[0], kept.repeat(1, x.shape[1])):
        assert "kept is" in refusal(split, x, wrong, impl)
    for wrong in (y[:, 1:], y.half()):
        assert "y is" in refusal(merge, x, kept, wrong, impl)


@pytest.mark.parametrize("kernels", [attention_tiles, cross_entropy, token_drop])
def test_without_triton_files_of_kernels_import_and_triton_is_refused(monkeypatch, kernels):
    monkeypatch.setattr(triton_here, "triton", None)
    assert runpy.run_path(kernels.__file__)["triton"] is None
    message = refusal(triton_here.check_impl, "triton", token_drop.IMPLS, "cuda")
    assert "Triton is not installed here, choose another" in message


def test_a_layer_compiles_without_graph_breaks():
    impl = "torch" if why_no_triton("cpu", loops=False) else "triton"
    x, kept, _, d = inputs(SMALL)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    result, expected = compiled(x, kept, impl), layer(x, kept, impl)
    assert_bitwise(result, expected)
    assert_bitwise(torch.autograd.grad(result, x, d), torch.autograd.grad(expected, x, d))


@pytest.mark.gpu
def test_tensors_may_have_more_than_2_to_the_31_elements():
    B, T, C, K = 3, 1 << 20, 1024, 1 << 19
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("takes 30 GB of the GPU's memory")
    torch.manual_seed(0)
    x = torch.randn(B, T, C, dtype=torch.bfloat16, device="cuda")
    kept = torch.rand(B, T, device="cuda").topk(K, dim=1).indices.sort(dim=1).values
    y, rest = split(x, kept, "triton")
    out = merge(rest, kept, y.neg_(), "triton")
    for b in range(B):  # the definition, one row at a time
        row = slice(b, b + 1)
        assert y[row].equal(-reference_gather(x[row], kept[row]))
        assert out[row].equal(reference_scatter(x[row], kept[row], y[row]))
