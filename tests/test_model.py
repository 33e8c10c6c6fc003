"""What the techniques rely on: the mask, packed rows, kept tokens, names.

The models are tiny and their weights are drawn ten times wider than at initialisation: with the
published 0.02 attention is nearly uniform, and a wrong mask or position would hardly show.

    python -m pytest tests/test_model.py
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels import cross_entropy
from kernels.cross_entropy import IGNORE
from kernels.packed_attention import attention_mask
from kernels.rotary import rotate, rotation
from model import TokenMeta, Transformer, TransformerConfig

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
KINDS = [("gpt", "learned"), ("gpt", "rope"), ("bert", "learned")]
WITH_PAIRS = [*KINDS, ("bert of pairs", "learned")]  # --nsp
SEQ_LEN, VOCAB = 24, 50


def tiny(kind: str = "gpt", pos: str = "learned", dtype=torch.float32, **changes) -> Transformer:
    shape = dict(
        layers=3, heads=2, width=16, mlp_width=32, seq_len=SEQ_LEN, vocab_size=VOCAB, pos=pos
    )
    torch.manual_seed(0)
    shape |= dict(nsp=kind == "bert of pairs") | changes
    model = Transformer(TransformerConfig(kind.split()[0], **shape))
    for name, weight in model.named_parameters():
        is_norm_scale = "ln_" in name and name.endswith("weight")
        torch.nn.init.normal_(weight, mean=1.0 if is_norm_scale else 0.0, std=0.2)
    return model.to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error, size = (found - expected).norm().item(), expected.norm().item()
    assert error <= tolerance * size, f"{error:.2e} is more than {tolerance} of {size:.2e}"


def gradients(loss: torch.Tensor, model: Transformer) -> dict[str, torch.Tensor]:
    """What the loss adds to each parameter's gradient; zeros where it does not depend on it."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, named.values(), materialize_grads=True)
    return dict(zip(named, found, strict=True))


# The loss


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_models_loss_and_gradients_are_those_of_its_logits(monkeypatch, dtype, kind, pos):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 5)
    model = tiny(kind, pos, dtype)
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ_LEN)).unbind()  # (B, T)
    targets[torch.rand(targets.shape) < 0.5] = IGNORE
    loss = model((tokens, targets, None, None))
    expected = F.cross_entropy(
        model.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    assert_close(loss, expected, TOLERANCE[dtype])
    wanted = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():
        assert_close(gradient, wanted[name], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind, pos", KINDS)
def test_the_loss_of_each_target_is_that_of_its_logits(monkeypatch, dtype, kind, pos):
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda V, device: 5)
    model = tiny(kind, pos, dtype)
    tokens, targets = torch.randint(VOCAB, (2, 3, SEQ_LEN)).unbind()  # (B, T)
    targets[torch.rand(targets.shape) < 0.5] = IGNORE
    batch = (tokens, targets, None, None)
    found, logits = model.losses(batch), model.logits(tokens)
    expected = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE, reduction="none")
    assert_close(found, expected, TOLERANCE[dtype])
    assert found.shape == targets.shape and not found[targets == IGNORE].any()
    assert not found.requires_grad
    assert_close(found.sum(), model(batch), TOLERANCE[dtype])
    assert not model.losses((tokens, torch.full_like(tokens, IGNORE), None, None)).any()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_loss_of_a_bert_of_pairs_is_that_of_its_tokens_and_of_its_answers(dtype, whole):
    """Each [CLS] with a target is asked once, and its target is no token; by the equations."""
    model = tiny("bert of pairs", dtype=dtype)
    batch, _ = lay(documents(), ROWS)
    if whole:  # rows of one document, for which a batch has no metadata
        batch = (batch[0], batch[1].index_fill(1, torch.tensor(0), 1), None, None)
    tokens, targets, positions, doc_ids = batch
    x = model.hidden_states(tokens, positions, doc_ids)
    cls = torch.zeros_like(targets, dtype=torch.bool)
    if whole:
        cls[:, 0] = True
    else:
        cls = (positions == 0) & (doc_ids >= 0)
    logits = model.logits(tokens, positions, doc_ids)
    of_token = targets.masked_fill(cls, IGNORE).flatten()
    each = {"ignore_index": IGNORE, "reduction": "none"}
    shares = torch.rand(targets.shape, dtype=dtype)
    pooled = torch.tanh(x[cls] @ model.pooler.weight.T + model.pooler.bias)
    scores = pooled @ model.nsp.weight.T + model.nsp.bias
    at = cls.flatten().nonzero().squeeze(1)
    assert_close(model.follows(x.flatten(0, 1), at), scores, TOLERANCE[dtype])
    expected = F.cross_entropy(logits.flatten(0, 1), of_token, **each) @ shares.flatten()
    expected = expected + F.cross_entropy(scores, targets[cls], **each) @ shares[cls]
    loss = model(batch, shares=shares)
    assert_close(loss, expected, TOLERANCE[dtype])
    wanted = gradients(expected, model)
    for name, gradient in gradients(loss, model).items():
        assert_close(gradient, wanted[name], TOLERANCE[dtype])
    ones = model(batch, shares=torch.ones_like(shares))
    assert_close(model(batch), ones, TOLERANCE[dtype])
    assert_close(
        model.losses(batch).sum(), model((tokens, of_token.view_as(tokens), *batch[2:])), 1e-5
    )


def test_a_bert_of_pairs_starts_with_the_weights_of_a_bert():
    shape = dict(layers=2, heads=2, width=16, mlp_width=32, seq_len=SEQ_LEN, vocab_size=VOCAB)
    torch.manual_seed(0)
    plain = Transformer(TransformerConfig("bert", **shape)).state_dict()
    torch.manual_seed(0)
    pairs = Transformer(TransformerConfig("bert", nsp=True, **shape)).state_dict()
    more = ["pooler.weight", "pooler.bias", "nsp.weight", "nsp.bias"]
    assert set(pairs) == {*plain, *more}
    assert all(pairs[name].equal(weight) for name, weight in plain.items())


@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_a_batch_without_targets_costs_nothing(kind, pos):
    model = tiny(kind, pos)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    loss = model((tokens, torch.full_like(tokens, IGNORE), None, None))
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(loss, model).values())


@pytest.mark.parametrize("impl", ["dense", "groups", "adaptive"])
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_batch_of_blank_rows_costs_nothing(monkeypatch, kind, pos, impl):
    """As a rank gets where there are fewer rows than ranks: nothing to learn, and no NaN."""
    attend_by(impl, monkeypatch)
    model = tiny(kind, pos)
    tokens, nothing = torch.randint(VOCAB, (2, SEQ_LEN)), torch.full((2, SEQ_LEN), IGNORE)
    for shares in (None, torch.zeros(2, SEQ_LEN)):
        blank = (tokens, nothing, torch.zeros_like(tokens), torch.full_like(tokens, -1))
        loss = model(blank, shares=shares)
        assert loss.item() == 0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(loss, model).values())


# The mask


def test_attention_mask_example():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert attention_mask(torch.tensor([[7, 7, 9, -1]]), True)[0, 0].int().tolist() == expected


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_attention_mask_properties(row):
    doc_ids = torch.tensor([row, row[::-1]])
    T = len(row)
    both_ways, causal = attention_mask(doc_ids, False), attention_mask(doc_ids, True)
    assert both_ways.shape == causal.shape == (2, 1, T, T)
    assert both_ways.equal(both_ways.mT)
    assert causal.equal(both_ways.tril())
    assert both_ways.diagonal(dim1=-2, dim2=-1).all()  # nobody has a softmax over nothing
    alone = torch.eye(T, dtype=torch.bool)
    for mask, ids in zip(both_ways[:, 0], doc_ids, strict=True):
        padding = ids < 0
        assert mask[padding].equal(alone[padding])
        assert mask[:, padding].equal(alone[:, padding])
        for doc_id in set(ids[~padding].tolist()):  # a block: all of its own, none of the others
            own = ids == doc_id
            assert mask[own].equal(own.expand(int(own.sum()), T))


# Packed rows are the documents, each alone

LENGTHS = [5, 1, 9, 3, 12, 7, 2]
ROWS = [[4, 0, 1], [2, 3, 6], [5]]  # which documents lie in which row, in what order
T_PACKED = 20


def documents(seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets of each document; a third of the targets do not count."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for length in LENGTHS:
        tokens, targets = torch.randint(VOCAB, (2, length), generator=generator)
        targets[0] %= 2  # an answer, where there are pairs
        targets[torch.rand(length, generator=generator) < 1 / 3] = IGNORE
        drawn.append((tokens, targets))
    return drawn


def lay(docs: list, rows: list[list[int]], T: int = T_PACKED) -> tuple[tuple, dict]:
    """Documents side by side in rows: the batch, and where each document went as (row, slice)."""
    tokens = torch.randint(VOCAB, (len(rows), T))  # padding holds anything at all
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.zeros_like(tokens)
    doc_ids = torch.full_like(tokens, -1)
    places = {}
    for row, members in enumerate(rows):
        start = 0
        for doc in members:
            length = len(docs[doc][0])
            place = places[doc] = (row, slice(start, start + length))
            tokens[place], targets[place] = docs[doc]
            positions[place] = torch.arange(length)
            doc_ids[place] = doc
            start += length
    return (tokens, targets, positions, doc_ids), places


def logits_by_document(model: Transformer, batch: tuple, places: dict) -> dict[int, torch.Tensor]:
    tokens, _, positions, doc_ids = batch
    with torch.no_grad():
        logits = model.logits(tokens, positions, doc_ids)
    return {doc: logits[place] for doc, place in places.items()}


def logits_alone(model: Transformer, docs: list) -> dict[int, torch.Tensor]:
    """The reference: one document, one row, no mask, no positions given."""
    with torch.no_grad():
        return {doc: model.logits(tokens[None])[0] for doc, (tokens, _) in enumerate(docs)}


def worst_error(found: dict[int, torch.Tensor], expected: dict[int, torch.Tensor]) -> float:
    return max(((found[d] - expected[d]).norm() / expected[d].norm()).item() for d in expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [ROWS, [[doc] for doc in range(len(LENGTHS))]])
@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_packed_equals_unpacked(kind, pos, rows, dtype):
    model, docs = tiny(kind, pos, dtype), documents()
    batch, places = lay(docs, rows)
    found = logits_by_document(model, batch, places)
    assert worst_error(found, logits_alone(model, docs)) <= TOLERANCE[dtype]

    alone = sum(model((tokens[None], targets[None], None, None)) for tokens, targets in docs)
    packed = model(batch)
    assert_close(packed, alone, TOLERANCE[dtype])
    wanted = gradients(alone, model)
    for name, gradient in gradients(packed, model).items():
        assert_close(gradient, wanted[name], TOLERANCE[dtype])


def attend_by(impl: str, monkeypatch) -> None:
    monkeypatch.setattr("model.impl_for", lambda *_: impl)


@pytest.mark.parametrize("impl", ["dense", "groups"])
@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_a_step_of_the_optimizer_is_the_same_packed_or_not(monkeypatch, kind, pos, impl):
    docs = documents()
    batch, _ = lay(docs, ROWS)
    alone = [(tokens[None], targets[None], None, None) for tokens, targets in docs]
    moved = []
    for batches in ([batch], alone):
        attend_by(impl, monkeypatch)
        model = tiny(kind, pos, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sum(model(one) for one in batches).backward()
        optimizer.step()
        moved.append(model.state_dict())
    for name, weight in moved[0].items():
        assert_close(weight, moved[1][name], 1e-8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind, pos", KINDS)
def test_groups_of_documents_are_the_dense_mask(monkeypatch, kind, pos, dtype):
    """Logits, loss and gradients; also of kept tokens in the middle layer."""
    batch, places = lay(documents(), ROWS)
    model = tiny(kind, pos, dtype)
    kept = torch.arange(0, T_PACKED, 2).repeat(len(ROWS), 1)

    def run_block(layer, block, x, meta):
        if layer != 1:
            return block(x, meta)
        return x.index_copy(1, kept[0], block(x[:, ::2], meta.take(kept)))

    found = []
    for impl in ("groups", "dense"):
        attend_by(impl, monkeypatch)
        loss = model(batch, run_block=run_block)
        logits = logits_by_document(model, batch, places)
        found.append((logits, {"loss": loss, **gradients(loss, model)}))
    (here, ours), (there, expected) = found
    assert worst_error(here, there) <= TOLERANCE[dtype]
    for name, value in ours.items():
        assert_close(value, expected[name], TOLERANCE[dtype])


@pytest.mark.parametrize("kind, pos", WITH_PAIRS)
def test_the_order_of_rows_and_of_documents_within_them_does_not_change_the_loss(kind, pos):
    model, docs = tiny(kind, pos, torch.float64), documents()
    loss = model(lay(docs, ROWS)[0])
    for rows in (ROWS[::-1], [row[::-1] for row in ROWS], [[5, 6], [1, 0, 4], [3, 2]]):
        assert_close(model(lay(docs, rows)[0]), loss, 1e-10)
    assert_close(model(lay(docs[::-1], ROWS)[0]), loss, 1e-10)


@pytest.mark.parametrize("dropout, impl", [(0.0, "adaptive"), (0.1, "dense")])
def test_packed_rows_are_dense_while_attention_drops(dropout, impl):
    model = tiny(dropout=dropout)
    batch, places = lay(documents(), ROWS)
    assert model.attention_impl(model.wte.weight) == impl and model(batch).isfinite()
    assert model.eval().attention_impl(model.wte.weight) == "adaptive"
    assert (
        worst_error(logits_by_document(model, batch, places), logits_alone(tiny(), documents()))
        < 1e-5
    )


@pytest.mark.parametrize("kind, pos", KINDS)
def test_without_the_mask_packed_is_not_unpacked(kind, pos):
    model, docs = tiny(kind, pos), documents()
    (tokens, targets, positions, doc_ids), places = lay(docs, ROWS)
    found = logits_by_document(
        model, (tokens, targets, positions, torch.zeros_like(doc_ids)), places
    )
    assert worst_error(found, logits_alone(model, docs)) > 1e-2


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_without_the_restart_packed_is_not_unpacked(kind):
    model, docs = tiny(kind), documents()
    (tokens, targets, _, doc_ids), places = lay(docs, ROWS)
    found = logits_by_document(model, (tokens, targets, None, doc_ids), places)
    assert worst_error(found, logits_alone(model, docs)) > 1e-2


def test_rotary_positions_need_no_restart():
    model, docs = tiny(pos="rope"), documents()
    (tokens, targets, _, doc_ids), places = lay(docs, ROWS)
    found = logits_by_document(model, (tokens, targets, None, doc_ids), places)
    assert worst_error(found, logits_alone(model, docs)) <= 1e-5


def test_rotation_known_answer():
    turned = rotation(torch.tensor([[0, 3]]), head_width=4)  # one turns by 1, one by 1 / 100
    angles = torch.tensor([[0.0, 0.0], [3.0, 0.03]])
    cos, sin = turned[0, :, 0].unbind(-1)
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
    ones = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(1, 2, 1, 4)  # pairs are (x[2i], x[2i + 1])
    expected = torch.stack((angles.cos(), angles.sin()), dim=2).flatten(1)
    torch.testing.assert_close(rotate(ones, turned)[0, :, 0], expected)


def test_rotary_angles_are_as_exact_as_the_model():
    met = []

    def run_block(layer, block, x, meta):
        met.append(meta)
        return block(x, meta)

    positions, kept = torch.tensor([[0, 1, 17, 1023]]), torch.tensor([[1, 3]])
    model = tiny(pos="rope", dtype=torch.float64)
    model.logits(torch.zeros(1, 4, dtype=torch.int64), positions, run_block=run_block)
    for meta in (met[0], met[0].take(kept)):
        angles = [
            [p * 10_000 ** (-i / 8) for i in (0, 2, 4, 6)] for p in meta.positions[0].tolist()
        ]
        parts = meta.rotation.unbind(-1)
        for values, function in zip(parts, (math.cos, math.sin), strict=True):
            expected = torch.tensor(
                [[function(a) for a in row] for row in angles], dtype=torch.float64
            )
            torch.testing.assert_close(values[0, :, 0], expected, rtol=0, atol=1e-12)
    tiny(pos="rope").logits(torch.zeros(1, 4, dtype=torch.int64), run_block=run_block)
    assert met[-1].rotation.dtype == torch.float32


def test_rotary_positions_tell_distances_and_nothing_else():
    model = tiny(pos="rope")
    tokens, positions = torch.randint(VOCAB, (1, 6)), torch.arange(6)[None]
    expected = model.logits(tokens)
    assert_close(model.logits(tokens, positions + 9), expected, 1e-5)
    stretched = model.logits(tokens, positions * 2)
    assert (stretched - expected).norm() > 1e-2 * expected.norm()


@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_documents_place_in_its_row_does_not_matter(kind, pos):
    model, docs = tiny(kind, pos), documents()
    here = logits_by_document(model, *lay(docs, ROWS))
    there = logits_by_document(model, *lay(docs, [[6], [1, 4, 0], [3, 2, 5]]))
    assert worst_error(here, there) <= 1e-5


@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_changed_document_or_padding_leaves_the_others_bit_identical(kind, pos):
    model, docs = tiny(kind, pos), documents()
    batch, places = lay(docs, ROWS)
    before = logits_by_document(model, batch, places)
    for changed in range(len(docs)):
        tokens = batch[0].clone()
        tokens[places[changed]] = (tokens[places[changed]] + 17) % VOCAB
        after = logits_by_document(model, (tokens, *batch[1:]), places)
        assert not after[changed].equal(before[changed])
        assert all(after[doc].equal(before[doc]) for doc in places if doc != changed)

    tokens, targets, positions, doc_ids = (field.clone() for field in batch)
    padding = doc_ids < 0
    tokens[padding] = (tokens[padding] + 17) % VOCAB
    positions[padding] = 3
    after = logits_by_document(model, (tokens, targets, positions, doc_ids), places)
    assert all(after[doc].equal(before[doc]) for doc in places)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_position_depends_on_what_the_mask_lets_it_see_and_on_nothing_else(kind, pos, packed):
    model = tiny(kind, pos)
    embedded = []
    model.wte.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    (tokens, _, positions, doc_ids), _ = lay(documents(), ROWS[:1])
    if packed:
        logits = model.logits(tokens, positions, doc_ids)
    else:
        logits = model.logits(tokens)
        doc_ids = torch.zeros_like(tokens)
    visible = attention_mask(doc_ids, causal=kind == "gpt")[0, 0]
    for place in range(T_PACKED):
        score = logits[0, place].square().sum()
        (gradient,) = torch.autograd.grad(score, embedded[0], retain_graph=True)
        assert gradient[0].any(dim=1).equal(visible[place])  # exactly 0 where it may not look


@pytest.mark.parametrize("kind, pos", KINDS)
def test_no_doc_ids_means_one_document_a_row(kind, pos):
    model = tiny(kind, pos)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    one_document = model.logits(tokens, doc_ids=torch.zeros_like(tokens))
    assert_close(model.logits(tokens), one_document, 1e-5)


# Kept tokens


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind, pos", KINDS)
def test_a_layer_of_kept_tokens_is_a_full_layer_that_looks_at_kept_keys_alone(kind, pos, packed):
    model = tiny(kind, pos)
    (tokens, _, positions, doc_ids), _ = lay(documents(), ROWS)
    B, T = tokens.shape
    if not packed:
        positions, doc_ids = torch.arange(T)[None], None
    turns = rotation(positions, 8) if pos == "rope" else None
    meta = TokenMeta(positions, doc_ids, kind == "gpt", turns)
    kept = torch.stack([torch.randperm(T)[:11].sort().values for _ in range(B)])  # (B, K)
    x = torch.randn(B, T, 16)

    taken = meta.take(kept)
    x_kept = x.gather(1, kept[:, :, None].expand(-1, -1, 16))  # (B, K, C)
    found = model.h[1](x_kept, taken)

    is_kept = torch.zeros(B, T, dtype=torch.bool).scatter_(1, kept, True)
    ids = torch.zeros(B, T, dtype=torch.int64) if doc_ids is None else doc_ids
    full = TokenMeta(positions, ids, kind == "gpt", turns)
    (mask,) = full.documents.index
    dropped = ~is_kept[:, None, None, :]  # as keys
    full.documents = full.documents._replace(index=(mask.masked_fill(dropped, -math.inf),))
    expected = model.h[1](x, full)[is_kept].view(B, 11, 16)
    assert_close(found, expected, 1e-5)
    assert taken.positions.equal(positions.expand(B, T)[is_kept].view(B, 11))
    assert (taken.documents is None) == (doc_ids is None)


def test_run_block_meets_every_layer_in_order():
    model, met = tiny(), []

    def run_block(layer, block, x, meta):
        met.append((layer, block))
        return block(x, meta)

    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert model.logits(tokens, run_block=run_block).equal(model.logits(tokens))
    assert met == list(enumerate(model.h))


# Names, sizes, refusals

BLOCK_NAMES = [
    "h.0.ln_1.weight",
    "h.0.ln_1.bias",
    "h.0.attn.c_attn.weight",
    "h.0.attn.c_attn.bias",
    "h.0.attn.c_proj.weight",
    "h.0.attn.c_proj.bias",
    "h.0.ln_2.weight",
    "h.0.ln_2.bias",
    "h.0.mlp.c_fc.weight",
    "h.0.mlp.c_fc.bias",
    "h.0.mlp.c_proj.weight",
    "h.0.mlp.c_proj.bias",
]
GPT_NAMES = ["wte.weight", "wpe.weight", *BLOCK_NAMES, "ln_f.weight", "ln_f.bias"]
BERT_NAMES = [*GPT_NAMES, "mlm.weight", "mlm.bias", "mlm_ln.weight", "mlm_ln.bias", "mlm_bias"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_parameter_names_are_frozen(dropout):
    def names(kind: str, pos: str) -> set[str]:
        return set(tiny(kind, pos, layers=1, dropout=dropout).state_dict())

    assert names("gpt", "learned") == set(GPT_NAMES)
    assert names("gpt", "rope") == set(GPT_NAMES) - {"wpe.weight"}
    assert names("bert", "learned") == set(BERT_NAMES)


def test_dropout_is_for_training_alone():
    model, dropped = tiny(), tiny(dropout=0.5)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert not dropped.logits(tokens).equal(model.logits(tokens))
    assert dropped.eval().logits(tokens).equal(model.logits(tokens))


def test_residual_outputs_start_smaller_in_gpt():
    shape = dict(layers=8, heads=2, width=128, mlp_width=512, seq_len=8, vocab_size=50)
    for kind, expected in (("gpt", 0.02 / math.sqrt(16)), ("bert", 0.02)):
        torch.manual_seed(0)
        for block in Transformer(TransformerConfig(kind, **shape)).h:
            for out in (block.attn.c_proj, block.mlp.c_proj):
                assert out.weight.std().item() == pytest.approx(expected, rel=0.03)
            for inner in (block.attn.c_attn, block.mlp.c_fc):
                assert inner.weight.std().item() == pytest.approx(0.02, rel=0.03)
                assert not inner.bias.any()


@pytest.mark.parametrize(
    "changes, named",
    [(dict(heads=3), "--heads 3"), (dict(heads=16, pos="rope"), "--pos rope")],
)
def test_impossible_shapes_are_refused(changes, named):
    with pytest.raises(ValueError, match=named) as refusal:
        tiny(**changes)
    assert "choose" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_row_longer_than_the_model_is_refused():
    message = f"a row of {SEQ_LEN + 1} tokens is longer than the model's --seq-len {SEQ_LEN}"
    for pos in ("learned", "rope"):
        with pytest.raises(ValueError, match=message):
            tiny(pos=pos).logits(torch.zeros(1, SEQ_LEN + 1, dtype=torch.int64))
