"""Attention in rows of several documents: every implementation against the definition.

The truth is the definition in float64. The allowed error is twice that of the definition in the
same dtype. Without a GPU the Triton kernels run in the interpreter (conftest.py), which is slow, so
their cases are few and small. test_ahead_of_time.py checks what they compile to.

    python -m pytest -n 0 tests/test_kernels_packed_attention.py
"""

import itertools

import pytest
import torch
from conftest import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import attention_groups, attention_tiles, packed_attention
from kernels.packed_attention import Documents, attention_mask, bounds, chosen_impl, index_of
from kernels.packed_attention import packed_attention as attention


def documents_of(T: int, rows: list[list[int]]) -> Tensor:
    """Return doc_ids (B, T) of rows of documents with these lengths, filled up with padding."""
    doc_ids = torch.full((len(rows), T), -1)
    for row, lengths in zip(doc_ids, rows, strict=True):
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        row[: len(ids)] = ids
    return doc_ids


CASES = {
    "one token": documents_of(1, [[1], []]),
    "63": documents_of(63, [[63], [20, 1, 1, 30], []]),
    "no document at all": documents_of(64, [[], []]),
    # In float16 one document spans several tiles of the kernels; those in its middle need no mask.
    "500": documents_of(500, [[150, 300, 7]]),
    "one-token documents": documents_of(40, [[1] * 40, [1] * 7 + [30]]),
    "equal lengths": documents_of(128, [[32] * 4, [32] * 3]),
    "lengths that alternate": documents_of(600, [[40, 20] * 10]),
    "many lengths": documents_of(600, [[9, 75, 40, 1, 21, 60, 33, 74, 76, 17, 2, 52, 39, 19, 41]]),
    "kept tokens": documents_of(50, [[20, 1, 17, 5], [3, 4]])[:, [0, 3, 4, 19, 20, 21, 29, 42, 49]],
}
SMALL, TINY = CASES["63"], documents_of(20, [[9, 1, 7], [20], []])  # TINY fits one tile


@pytest.fixture(params=["dense", "groups", "triton"])
def impl(request, empty_is_full_of_nan):
    if request.param == "triton":
        needs_triton()
    return request.param


def inputs(doc_ids: Tensor, H: int = 2, D: int = 32) -> tuple[Tensor, Tensor]:
    """Draw q, k and v in one tensor (B, T, 3, H, D), and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    B, T = doc_ids.shape
    qkv = torch.randn(B, T, 3, H, D, generator=generator, dtype=torch.float64)
    return qkv, torch.randn(B, T, H, D, generator=generator, dtype=torch.float64)


def results(function, qkv: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and gradient of function(q, k, v), converted to float64 on the CPU."""
    qkv = qkv.detach().requires_grad_()
    out = function(*qkv.unbind(2))
    assert out.dtype == qkv.dtype and out.shape == d.shape
    (gradient,) = torch.autograd.grad(out, qkv, d)
    return out.detach().double().cpu(), gradient.double().cpu()


def assert_as_defined(impl, dtype, doc_ids, causal=True, device="cpu", D=32, strided=torch.clone):
    def defined(q, k, v):
        return packed_attention.reference(q, k, v, doc_ids, causal)

    def computed(q, k, v):
        return attention(q, k, v, index_of(doc_ids.to(device), causal, impl))

    qkv, d = inputs(doc_ids, H=1 if impl == "triton" and doc_ids.shape[1] > 50 else 2, D=D)
    truth = results(defined, qkv, d)
    plain = results(defined, qkv.to(dtype), d.to(dtype))
    ours = results(computed, strided(qkv.to(device, dtype)), strided(d.to(device, dtype)))
    padding = doc_ids < 0
    for result, same_dtype, exact in zip(ours, plain, truth, strict=True):
        # In float32 torch's CUDA kernel with a mask is less exact than the definition on a CPU.
        times = 8 if impl == "dense" and device == "cuda" and dtype == torch.float32 else 1
        rounding = times * max(torch.finfo(dtype).eps, 1e-10) * exact.norm()
        assert (result - exact).norm() <= 2 * (same_dtype - exact).norm() + rounding
        assert not result[padding].any()


WAYS = [  # impl, device, case, dtype; few with Triton, whose interpreter can take a second for one
    *itertools.product(["groups"], ["cpu"], CASES, [torch.float64]),
    *itertools.product(["dense", "groups"], ["cpu"], ["63"], attention_tiles.DTYPES),
    *itertools.product(["dense"], ["cpu"], ["63", "kept tokens"], [torch.float64]),
    *itertools.product(["triton"], ["cpu"], ["one token", "63", "kept tokens"], [torch.float32]),
    *itertools.product(["triton"], ["cpu"], ["no document at all"], [torch.float16]),
    ("triton", "cpu", "one-token documents", torch.float16),
    pytest.param("triton", "cpu", "500", torch.float16, marks=pytest.mark.slow),
]
ON_GPUS = itertools.product(["dense", "triton"], ["cuda"], CASES, attention_tiles.DTYPES)
WAYS += [pytest.param(*way, marks=pytest.mark.gpu) for way in ON_GPUS]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("impl", "device", "case", "dtype"), WAYS)
def test_results_equal_the_definition(empty_is_full_of_nan, impl, device, case, causal, dtype):
    if impl == "triton":
        needs_triton(device)
    assert_as_defined(impl, dtype, CASES[case], causal, device)


def test_other_head_widths_are_as_exact(impl):
    for D in (16, 128):
        assert_as_defined(impl, torch.float16, TINY[:1], D=D)


STRIDES = (  # heads before positions in memory; every other number
    lambda x: x.transpose(1, -2).contiguous().transpose(1, -2),
    lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
)


def test_inputs_and_gradients_need_not_be_contiguous(impl):
    for strided in STRIDES:
        assert not strided(inputs(TINY)[0]).is_contiguous()
        assert_as_defined(impl, torch.float32, TINY, strided=strided)


def test_no_bit_leaks_between_documents_or_from_padding(impl):
    """A document or padding changes no bit of another's output or gradient."""
    doc_ids = documents_of(40, [[15, 16, 4]])  # several tiles in float32
    qkv, d = (x.float() for x in inputs(doc_ids, H=1))
    documents = index_of(doc_ids, False, impl)

    def out_of(x):
        return attention(*x.unbind(2), documents)

    before = out_of(qkv)
    for doc in range(-1, 3):
        changed = doc_ids == doc
        others = ~changed & (doc_ids >= 0)
        after = out_of(torch.where(changed[:, :, None, None, None], 5 - qkv, qkv))
        x = qkv.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((out_of(x) * d)[others].sum(), x)
        assert after[others].equal(before[others]) and not gradient[changed].any()


# Document boundaries

ROWS = st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4)


@settings(max_examples=30)
@given(ROWS)
def test_bounds_agree_with_the_mask(rows):
    doc_ids, key = documents_of(40, rows), torch.arange(40)
    start, end = bounds(doc_ids)
    assert start.dtype == end.dtype == torch.int32
    within = (start[:, :, None] <= key) & (key < end[:, :, None])  # (B, T, T)
    assert within.equal(attention_mask(doc_ids, False)[:, 0] & (doc_ids >= 0)[:, :, None])


@settings(max_examples=30)
@given(ROWS, st.sampled_from([1, 1000]))
def test_groups_equal_the_definition_for_any_lengths_and_call_size(rows, tokens_of_a_call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_groups, "TOKENS_OF_A_CALL", tokens_of_a_call)
        assert_as_defined("groups", torch.float64, documents_of(40, rows))


def test_bounds_and_layout_equal_worked_examples():
    start, end = bounds(torch.tensor([[7, 7, 9, -1]]))
    assert start.tolist() == [[0, 0, 2, 4]] and end.tolist() == [[2, 2, 3, 0]]
    _, calls = attention_groups.layout(torch.tensor([[7, 7, 9, 9, -1]]))
    assert calls.tolist() == [[2, 0], [4, 2], [1, 0], [0, 0], [0, 0], [0, 0]]


# Which implementation is chosen, and how it is called


def test_the_implementation_follows_from_device_dtype_width_and_dropout(monkeypatch):
    here = {"cuda": None}
    monkeypatch.setattr(packed_attention, "why_not", lambda device: here.get(device, "no Triton"))
    for dtype, D, dropout in ((torch.bfloat16, 80, 0.0), (torch.bfloat16, 64, 0.1)):
        assert chosen_impl("cuda", dtype, D, dropout) == "dense"
    assert chosen_impl("cuda", torch.float32, 64, 0.0) == "dense"
    assert chosen_impl("cuda", torch.bfloat16, 64, 0.0, compiled=True) == "triton"
    assert chosen_impl("cpu", torch.bfloat16, 24, 0.0) == "adaptive"
    assert chosen_impl("cpu", torch.bfloat16, 24, 0.0, compiled=True) == "groups"
    here.clear()
    assert chosen_impl("cuda", torch.bfloat16, 64, 0.0) == "dense"


def test_adaptive_chooses_what_is_less_work_for_the_batch():
    all_different = [[90 + i, 71 - i, 50 + i, 30 - i, 10 + i, 5 - i] for i in range(4)]
    for T, rows, impl in (
        (256, [[64] * 4] * 8, "groups"),
        (512, [[300, 90, 70, 52]] * 8, "groups"),
        (256, all_different, "dense"),  # groups would need many calls for few scores
        (32, [[16, 16]] * 8, "dense"),  # rows as short as kept tokens: not worth counting
    ):
        assert index_of(documents_of(T, rows), True, "adaptive").impl == impl


HEAVY = [pytest.param(of, marks=pytest.mark.slow) for of in ("triton", "dense on a GPU")]


@pytest.mark.parametrize("of", ["groups", *HEAVY])
def test_it_compiles_without_graph_breaks_and_once_for_all_documents(of):
    if of == "triton":
        needs_triton()
    dtype = torch.float32 if of == "triton" else torch.float64
    backend = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
    for lengths in ([9, 1, 7],) if of == "triton" else ([9, 1, 7], [20], [1] * 17):
        doc_ids = documents_of(20, [lengths])
        on_a_gpu = Documents("dense", True, (attention_mask(doc_ids, True), doc_ids < 0))
        documents = on_a_gpu if "GPU" in of else index_of(doc_ids, True, of)
        qkv, d = (x.to(dtype) for x in inputs(doc_ids))
        coded = results(lambda *qkv, docs=documents: compiled(*qkv, docs), qkv, d)
        expected = results(lambda *qkv, docs=documents: attention(*qkv, docs), qkv, d)
        torch.testing.assert_close(coded, expected)
    assert backend.frame_count == 1
    torch.compiler.reset()


def test_the_custom_operator_matches_its_declaration():
    q, k, v = inputs(TINY)[0].float().unbind(2)
    args = (q, k, v, *index_of(TINY, True, "groups").index, True, "groups")
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(packed_attention.attend_op, args, test_utils=tests)


@pytest.mark.gpu
def test_tensors_may_have_more_than_2_to_the_31_elements():
    needs_triton("cuda")
    if torch.cuda.mem_get_info()[0] < 45e9:
        pytest.skip("takes 45 GB of the GPU's memory")
    doc_ids = (torch.arange(1 << 20, device="cuda") // 100)[None].expand(3, -1)
    qkv = torch.randn(3, 1 << 20, 3, 4, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    documents = index_of(doc_ids, True, "triton")
    out = attention(*qkv.unbind(2), documents)
    (gradient,) = torch.autograd.grad(out.sum(), qkv)
    last = qkv[-1:, -576:].detach().clone().requires_grad_()  # begins with a document
    alone = packed_attention.reference(*last.unbind(2), doc_ids[-1:, -576:], True)
    (gradient_alone,) = torch.autograd.grad(alone.sum(), last)
    torch.testing.assert_close(out[-1:, -500:], alone[:, -500:], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient[-1:, -500:], gradient_alone[:, -500:], rtol=5e-2, atol=5e-2)
