"""What the techniques rely on: the loss, the mask, packed rows, kept tokens.

The models are tiny, in float64, with weights ten times wider than at initialisation: with the
published 0.02, attention is nearly uniform and a wrong mask or position would hardly show.

    python -m pytest tests/test_model.py
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import refusal, widen
from hypothesis import given, settings
from hypothesis import strategies as st
from small_batches import LLAMA, for_model, loss_of, plain_rows
from torch import Tensor

from bert import BertConfig
from kernels import cross_entropy
from kernels.cross_entropy import IGNORE
from kernels.packed_attention import attention_mask
from kernels.rotary import PUBLISHED, rotation
from model import Batch, TokenMeta, Transformer, TransformerConfig

KINDS = [("gpt", "learned"), ("gpt", "rope"), ("llama", "rope"), ("bert", "learned")]
WITH_PAIRS = [*KINDS, ("bert of pairs", "learned")]  # --nsp
SEQ_LEN, VOCAB = 24, 50


def initial(kind: str, **changes) -> Transformer:
    """Return a model with its initial weights."""
    shape = dict(layers=3, heads=2, width=16, mlp_width=32, seq_len=SEQ_LEN, vocab_size=VOCAB)
    shape |= (LLAMA if kind == "llama" else {}) | changes
    torch.manual_seed(0)
    if "bert" in kind:
        return BertConfig(nsp=kind == "bert of pairs", **shape).build()
    return TransformerConfig(**shape).build()


def tiny(kind: str = "gpt", pos: str = "learned", **changes) -> Transformer:
    return widen(initial(kind, pos=pos, **changes)).double()


def assert_close(result: Tensor, expected: Tensor) -> None:
    error, size = (result - expected).norm().item(), expected.norm().item()
    assert error <= 1e-10 * size, f"{error:.2e} of {size:.2e}"


def gradients(loss: Tensor, model: Transformer) -> dict[str, Tensor]:
    """Return the gradient of each parameter; zeros if the loss does not depend on it."""
    named = dict(model.named_parameters())
    by_name = torch.autograd.grad(loss, named.values(), retain_graph=True, materialize_grads=True)
    return dict(zip(named, by_name, strict=True))


def assert_same_loss(loss: Tensor, expected: Tensor, model: Transformer) -> None:
    """Assert that losses and all gradients are the same."""
    assert_close(loss, expected)
    of_expected = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():
        assert_close(gradient, of_expected[name])


# The loss


@pytest.mark.parametrize("kind, pos", KINDS)
def test_losses_and_gradients_equal_those_of_the_logits(monkeypatch, kind, pos):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 5)
    model = tiny(kind, pos)
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ_LEN)).unbind()  # (B, T)
    targets[torch.rand(targets.shape) < 0.5] = IGNORE
    batch, x = for_model(model, replace(plain_rows(tokens), targets=targets)), model(tokens)
    expected = F.cross_entropy(model.logits(x).mT, targets, reduction="none")
    assert_same_loss(model.loss(x, batch), expected.sum(), model)
    weights = torch.rand(targets.shape, dtype=torch.float64)
    assert_close(model.loss(x, replace(batch, weights=weights)), (expected * weights).sum())
    of_each = model.losses(x, batch)
    assert_close(of_each, expected)
    assert of_each.shape == targets.shape and not of_each[targets == IGNORE].any()
    assert not of_each.requires_grad


@pytest.mark.parametrize("whole", [True, False])
def test_the_loss_of_a_bert_with_pairs_is_that_of_tokens_plus_that_of_answers(whole):
    """The target of a [CLS] is an answer, not a token. The expected loss follows the equations."""
    model = tiny("bert of pairs")
    batch, _ = lay(documents(), ROWS)
    if whole:  # plain rows
        batch.targets[:, 0] = 1
        batch = replace(plain_rows(batch.tokens), targets=batch.targets)
    weights = torch.rand(batch.targets.shape, dtype=torch.float64)
    batch = for_model(model, replace(batch, weights=weights))
    x, targets = model(*batch.inputs), batch.targets
    cls = (batch.positions == 0) & (batch.doc_ids >= 0)
    pooled = torch.tanh(x[cls] @ model.pooler.weight.T + model.pooler.bias)
    scores = pooled @ model.nsp.weight.T + model.nsp.bias
    at = cls.flatten().nonzero().squeeze(1)
    assert_close(model.follows(x.flatten(0, 1), at), scores)
    of_token = targets.masked_fill(cls, IGNORE)
    of_tokens = F.cross_entropy(model.logits(x).mT, of_token, reduction="none")
    of_answers = F.cross_entropy(scores, targets[cls], reduction="none")
    expected = (of_tokens * weights).sum() + of_answers @ weights[cls]
    assert_same_loss(model.loss(x, batch), expected, model)
    unweighted = replace(batch, weights=None)
    assert_close(model.loss(x, unweighted), of_tokens.sum() + of_answers.sum())
    assert_close(model.losses(x, batch), of_tokens)


@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_a_batch_without_targets_has_loss_0_and_no_nan(kind, pos):
    """Also blank rows, which a rank gets if there are fewer rows than ranks."""
    model = tiny(kind, pos)
    tokens, nothing = torch.randint(VOCAB, (2, SEQ_LEN)), torch.full((2, SEQ_LEN), IGNORE)
    blank = Batch(tokens, nothing, torch.zeros_like(tokens), torch.full_like(tokens, -1))
    for batch in (replace(plain_rows(tokens), targets=nothing), blank):
        for weights in (None, torch.zeros(2, SEQ_LEN)):
            loss = loss_of(model, replace(batch, weights=weights))
            assert loss.item() == 0
            assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(loss, model).values())


# The mask


@settings(max_examples=30)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_the_attention_mask_allows_the_same_document_and_itself(row):
    doc_ids = torch.tensor([row, row[::-1]])
    T = len(row)
    both_ways, causal = attention_mask(doc_ids, False), attention_mask(doc_ids, True)
    assert both_ways.shape == (2, 1, T, T) and causal.equal(both_ways.tril())
    for b, i, j in itertools.product(range(2), range(T), range(T)):
        same = doc_ids[b, i] == doc_ids[b, j] and doc_ids[b, i] >= 0
        assert both_ways[b, 0, i, j] == (same or i == j)


# Packed rows equal their documents, each in a row of its own

LENGTHS = [5, 1, 9, 3, 12, 7, 2]
ROWS = [[4, 0, 1], [2, 3, 6], [5]]  # the documents in each row
T_PACKED = 20


def documents() -> list[tuple[Tensor, Tensor]]:
    """Draw tokens and targets of each document; a third of the targets are ignored."""
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for length in LENGTHS:
        tokens, targets = torch.randint(VOCAB, (2, length), generator=generator)
        targets[0] %= 2  # the answer, of a BERT with pairs
        targets[torch.rand(length, generator=generator) < 1 / 3] = IGNORE
        drawn.append((tokens, targets))
    return drawn


def lay(docs: list, rows: list[list[int]]) -> tuple[Batch, dict]:
    """Lay documents in rows; return the batch, and the place of each document as (row, slice)."""
    tokens = torch.randint(VOCAB, (len(rows), T_PACKED))  # also in padding, which must not count
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.zeros_like(tokens)
    doc_ids = torch.full_like(tokens, -1)
    places = {}
    for row, members in enumerate(rows):
        start = 0
        for doc in members:
            place = places[doc] = (row, slice(start, start + LENGTHS[doc]))
            tokens[place], targets[place] = docs[doc]
            positions[place] = torch.arange(LENGTHS[doc])
            doc_ids[place] = doc
            start += LENGTHS[doc]
    return Batch(tokens, targets, positions, doc_ids), places


def scores(model: Transformer, *inputs: Tensor | None) -> Tensor:
    return model.logits(model(*inputs))


@torch.no_grad()
def is_unpacked(model: Transformer, inputs: tuple, places: dict) -> bool:
    """Return whether every document has the logits that it has alone, in a row without a mask."""
    packed, errors = scores(model, *inputs), []
    for doc, (tokens, _) in enumerate(documents()):
        alone = scores(model, tokens[None])[0]
        errors.append(((packed[places[doc]] - alone).norm() / alone.norm()).item())
    assert max(errors) < 1e-10 or max(errors) > 1e-2
    return max(errors) < 1e-10


@pytest.mark.parametrize("impl", ["dense", "groups"])
@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_packed_equals_unpacked_in_logits_loss_and_gradients(monkeypatch, kind, pos, impl):
    monkeypatch.setattr("model.chosen_impl", lambda *_: impl)
    model, docs = tiny(kind, pos), documents()
    batch, places = lay(docs, ROWS)
    assert is_unpacked(model, batch.inputs, places)
    alone = [replace(plain_rows(tokens[None]), targets=targets[None]) for tokens, targets in docs]
    assert_same_loss(loss_of(model, batch), sum(loss_of(model, each) for each in alone), model)


def test_attention_is_dense_with_dropout_and_in_groups_when_compiled(monkeypatch):
    model, asked = tiny(dropout=0.1), []
    batch, places = lay(documents(), ROWS)
    assert model.attention_impl(model.wte.weight) == "dense"
    assert loss_of(model, batch).isfinite()
    assert model.eval().attention_impl(model.wte.weight) == "adaptive"
    assert is_unpacked(model, batch.inputs, places)
    model.h[0]._compiled_call_impl = model.h[0].forward  # set by Module.compile
    assert model.attention_impl(model.wte.weight) == "groups"
    monkeypatch.setattr("model.chosen_impl", lambda _, dtype, *more: asked.append(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model.attention_impl(model.wte.weight)
    assert asked == [torch.bfloat16]


@pytest.mark.parametrize("kind, pos", KINDS)
def test_packed_equals_unpacked_only_with_the_mask_and_restarted_positions(kind, pos):
    """Rotary positions need no restart, because only distances count."""
    batch, places = lay(documents(), ROWS)
    one_document = (batch.tokens, batch.positions, torch.zeros_like(batch.doc_ids))
    never_restarted = (batch.tokens, None, batch.doc_ids)
    assert not is_unpacked(tiny(kind, pos), one_document, places)
    assert is_unpacked(tiny(kind, pos), never_restarted, places) == (pos == "rope")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_position_depends_exactly_on_what_the_mask_allows(kind, pos, packed):
    model, embedded = tiny(kind, pos), []
    model.wte.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    batch, _ = lay(documents(), ROWS[:1])
    logits = scores(model, *batch.inputs) if packed else scores(model, batch.tokens)
    doc_ids = batch.doc_ids if packed else torch.zeros_like(batch.doc_ids)
    visible = attention_mask(doc_ids, causal=kind != "bert")[0, 0]
    for place in range(T_PACKED):
        score = logits[0, place].square().sum()
        (gradient,) = torch.autograd.grad(score, embedded[0], retain_graph=True)
        assert gradient[0].any(dim=1).equal(visible[place])  # exactly 0 elsewhere


# Kept tokens


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_layer_of_kept_tokens_equals_a_full_layer_that_masks_other_keys(kind, pos, packed):
    model = tiny(kind, pos)
    batch, _ = lay(documents(), ROWS)
    _, positions, doc_ids = batch.inputs
    B, T = batch.tokens.shape
    if not packed:
        positions, doc_ids = torch.arange(T)[None], None
    turns = rotation(positions, 8, torch.float64, PUBLISHED) if pos == "rope" else None
    meta = TokenMeta(positions, doc_ids, kind != "bert", turns)
    kept = torch.stack([torch.randperm(T)[:11].sort().values for _ in range(B)])  # (B, K)
    x = torch.randn(B, T, 16, dtype=torch.float64)

    kept_meta = meta.of_kept(kept)
    x_kept = x.gather(1, kept[:, :, None].expand(-1, -1, 16))  # (B, K, C)
    result = model.h[1](x_kept, kept_meta)

    is_kept = torch.zeros(B, T, dtype=torch.bool).scatter_(1, kept, True)
    ids = torch.zeros(B, T, dtype=torch.int64) if doc_ids is None else doc_ids
    full = TokenMeta(positions, ids, kind != "bert", turns)
    (mask,) = full.documents.index
    dropped = ~is_kept[:, None, None, :]  # as keys
    full.documents = full.documents._replace(index=(mask.masked_fill(dropped, -math.inf),))
    expected = model.h[1](x, full)[is_kept].view(B, 11, 16)
    assert_close(result, expected)
    assert kept_meta.positions.equal(positions.expand(B, T)[is_kept].view(B, 11))
    assert (kept_meta.documents is None) == (doc_ids is None)


# Parts of the model, refusals


def test_dropout_acts_only_in_training_and_adds_no_parameters():
    model, dropped = tiny(), tiny(dropout=0.5)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert model.state_dict().keys() == dropped.state_dict().keys()
    assert not dropped(tokens).equal(model(tokens))
    assert dropped.eval()(tokens).equal(model(tokens))


def test_a_llamas_norm_and_mlp_follow_the_equations_and_queries_share_keys():
    model, x = tiny("llama", "rope"), torch.randn(2, 5, 16, dtype=torch.float64)
    block = model.h[0]
    size = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(block.ln_1(x), x / size * block.ln_1.weight)
    assert initial("bert", norm="rmsnorm").ln_f.eps == 1e-5 != initial("bert").ln_f.eps
    gate, up = (x @ block.mlp.c_fc.weight.T).split(32, dim=-1)
    assert_close(block.mlp(x), (gate / (1 + (-gate).exp()) * up) @ block.mlp.c_proj.weight.T)
    wider = tiny("llama", "rope", kv_heads=2)  # with a copy of the shared keys for each query head
    weights = model.state_dict()
    for name in (name for name in weights if name.endswith("c_attn.weight")):
        q, k, v = weights[name].split((16, 8, 8))
        weights[name] = torch.cat((q, k, k, v, v))
    wider.load_state_dict(weights)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert_close(model(tokens), wider(tokens))


def test_outputs_to_the_residual_stream_start_smaller_in_gpt():
    for kind, expected in (("gpt", 0.02 / math.sqrt(16)), ("bert", 0.02)):
        for block in initial(kind, layers=8, width=128, mlp_width=512).h:
            for out in (block.attn.c_proj, block.mlp.c_proj):
                assert out.weight.std().item() == pytest.approx(expected, rel=0.03)
            for inner in (block.attn.c_attn, block.mlp.c_fc):
                assert inner.weight.std().item() == pytest.approx(0.02, rel=0.03)
                assert not inner.bias.any()


def test_unknown_choices_are_refused():
    """For example, an unknown kind of positions is not treated as rotary."""
    for name, value in {"pos": "sinusoidal", "norm": "batchnorm", "mlp": "relu"}.items():
        assert value in refusal(initial, "gpt", **{name: value})
