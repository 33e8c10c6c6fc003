"""Token dropping: the draw, the block on kept tokens, causality, the schedule, the accounting."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_batches import batch

import config
import ltd
from kernels.packed_attention import index_of
from model import (
    TokenMeta,
    Transformer,
    TransformerConfig,
    rotation,
    run_plain,
    run_recomputed,
)
from support.base.clock import StepContext, effective_tokens, tokens_by_layer
from support.rows.batch import Batch
from support.step import costs
from support.step.muon import flops_of_orthogonalising
from support.step.sizes import flops_of_row


def small(pos="rope", kind="gpt", layers=4, dtype=torch.float64):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(kind, layers, 2, 16, 32, 24, 40, pos)).to(dtype)


def settings_of(flags: str) -> config.Config:
    return config.build(config.parse(flags.split()))


def random_bits(*shape, seed=0):
    return torch.randint(2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def dropping(keep: int, inputs: Batch, layers=(1, 2), step=1, first_row=0):
    """The run_block of a micro-batch whose `layers` keep `keep` of 24 tokens."""
    rows = torch.arange(first_row, first_row + len(inputs.tokens))
    bits = StepContext(seed=0, step=step, progress=0.0).bits("ltd", layers, rows, 24)
    kept = ltd.draw(keep, bits, None if inputs.doc_ids is None else inputs.doc_ids < 0)
    return ltd.token_dropping(dict(zip(layers, kept, strict=True)), run_plain)


# The draw


def test_draw_worked_example():
    assert ltd.draw(2, torch.tensor([[1, 9, 5, 7]])).tolist() == [[1, 3]]
    padding = torch.tensor([[False, True, False, True]])
    assert ltd.draw(2, torch.tensor([[1, 9, 5, 7]]), padding).tolist() == [[0, 2]]
    assert ltd.draw(3, torch.tensor([[1, 9, 5, 7]]), padding).tolist() == [[0, 2, 3]]


@given(st.integers(1, 24), st.integers(0, 99))
def test_draw_is_sorted_unique_and_differs_by_row(keep, seed):
    kept = ltd.draw(keep, random_bits(64, 24, seed=seed))
    assert kept.shape == (64, keep)
    assert (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < 24
    if 1 < keep < 23:
        assert len({tuple(row) for row in kept.tolist()}) > 30, "rows drew the same subset"


@given(st.integers(1, 24), st.lists(st.booleans(), min_size=24, max_size=24))
def test_padding_never_takes_a_slot_from_a_real_token(keep, padding):
    padding = torch.tensor([padding])
    kept = ltd.draw(keep, random_bits(1, 24), padding)
    assert (~padding).gather(1, kept).sum() == min(keep, int((~padding).sum()))


@pytest.mark.parametrize("keep", [0, 25])
def test_draw_refuses(keep):
    with pytest.raises(ValueError, match=f"cannot keep {keep} of 24"):
        ltd.draw(keep, random_bits(1, 24))


N = 4000  # rows; a share of 1/4 has a standard deviation of 0.0068


def drawn(flags="", steps=(1,), rows=N, T=24) -> torch.Tensor:
    """(steps, layers, rows, T) bool: which tokens a run with --ltd-start 6 keeps."""
    settings = settings_of(f"--ltd --ltd-start 6 --seq-len 24 --batch-tokens 24 {flags}")
    tokens = torch.zeros(rows, T, dtype=torch.int64)
    kept = []
    for step in steps:
        context = StepContext(seed=7, step=step, progress=0.0)
        by_layer = ltd.draws(settings, context, 0, Batch(tokens, tokens, None, None), 6)
        masks = [
            torch.zeros(rows, T, dtype=torch.bool).scatter(1, k, True) for k in by_layer.values()
        ]
        kept.append(torch.stack(masks))
    return torch.stack(kept)


def test_every_position_is_kept_equally_often():
    shares = drawn(steps=(1, 2)).float().mean(2)  # over rows
    assert (shares - 0.25).abs().max() < 5 * 0.0068


def test_layers_rows_and_steps_draw_independently():
    """Two independent draws of 6 among 24 agree on 6 * 6 / 24 = 1.5 tokens, on average."""
    kept = drawn(steps=(1, 2)).float()
    n_layers = kept.shape[1]
    pairs = {
        "layers": (kept[0, 0], kept[0, n_layers - 1]),
        "rows": (kept[0, 0, 1:], kept[0, 0, :-1]),
        "steps": (kept[0, 0], kept[1, 0]),
    }
    for what, (one, other) in pairs.items():
        both = (one * other).sum(1)
        assert abs(both.mean() - 1.5) < 5 * both.std() / N**0.5, what
        counts = Counter(both.int().tolist())
        assert counts[0] > 0.1 * N, f"{what}: hypergeometric, 13.8 % have none in common"


def test_bypass_draws_once_for_all_layers():
    bypass, random = drawn("--ltd-mode bypass", rows=50), drawn(rows=50)
    assert (bypass == bypass[:, :1]).all() and not (random == random[:, :1]).all()
    assert torch.equal(bypass[:, 0], random[:, 0])


def test_the_picture_in_the_docs_is_a_draw():
    """24 tokens, 6 layers that keep 6: the first row of the first step of seed 1337."""
    settings = settings_of("--ltd --ltd-start 6 --seq-len 24 --batch-tokens 24")
    context, tokens = StepContext(seed=1337, step=1, progress=0.0), torch.zeros(1, 24).long()
    kept = ltd.draws(settings, context, 0, Batch(tokens, tokens, None, None), 6)
    lines = []
    for layer in reversed(range(6)):
        seen = set(kept[layer][0].tolist()) if layer in kept else range(24)
        lines.append(f"layer {layer}  " + " ".join("█" if t in seen else "·" for t in range(24)))
    page = (Path(__file__).parents[1] / "docs/ltd.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page


def test_draws_do_not_depend_on_who_draws():
    settings = settings_of("--ltd --ltd-start 6 --seq-len 24 --batch-tokens 24")
    context = StepContext(seed=7, step=3, progress=0.0)
    inputs = batch(True, B=12)
    whole = ltd.draws(settings, context, 40, inputs, 6)
    for first in (0, 5, 11):
        part = ltd.draws(settings, context, 40 + first, inputs.rows(slice(first, first + 3)), 6)
        for layer, kept in part.items():
            assert torch.equal(kept, whole[layer][first : first + 3])
    far = ltd.draws(settings, context, 2**40, inputs, 6)
    assert not torch.equal(far[1], whole[1]), "rows of a large run have numbers above 2^32"


# The layer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind, pos", [("gpt", "rope"), ("gpt", "learned"), ("bert", "learned")])
def test_keeping_all_is_bitwise_the_plain_model(packed, kind, pos):
    model = small(pos, kind, dtype=torch.float32)
    inputs = batch(packed)
    plain = model(inputs)
    plain.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    whole = torch.arange(24).expand(3, -1)
    gathered = ltd.token_dropping({1: whole, 2: whole}, run_plain)
    loss = model(inputs, run_block=gathered)
    loss.backward()
    assert torch.equal(loss, plain)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_rows_that_are_kept_whole_run_as_without_dropping(monkeypatch):
    monkeypatch.setattr(ltd, "draw", None)  # a call would fail
    settings = settings_of("--ltd --ltd-start 64")
    context = StepContext(seed=1, step=1, progress=0.0)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    for_batch = (settings, context, 0, Batch(tokens, tokens, None, None), run_plain)
    assert ltd.run_block(*for_batch) is run_plain


def seen_tokens(flags: str) -> list[int]:
    """How many of 24 tokens each of 4 layers sees."""
    settings = settings_of(
        f"--ltd --ltd-start 10 --seq-len 24 --batch-tokens 72 --layers 4 {flags}"
    )
    context, seen, inputs = StepContext(seed=1, step=1, progress=0.0), {}, batch(False)

    def spy(layer, block, x, meta):
        seen[layer] = x.shape[1]
        return block(x, meta)

    small()(inputs, run_block=ltd.run_block(settings, context, 0, inputs, spy))
    tokens = [seen[layer] for layer in range(4)]
    assert tokens_by_layer(settings, context, 24) == tokens, "what runs is what is counted"
    return tokens


def test_which_layers_see_every_token():
    assert seen_tokens("") == [24, 10, 10, 24]
    assert seen_tokens("--ltd-mode bypass") == [24, 10, 10, 24]
    assert seen_tokens("--ltd-layers 0-2") == [10, 10, 10, 24]
    assert seen_tokens("--ltd-layers 3,1") == [24, 10, 24, 10]


def test_layers_worked_examples():
    assert ltd.dropping_layers(None, 12) == tuple(range(1, 11))
    assert ltd.dropping_layers("1-3,5", 8) == (1, 2, 3, 5)
    assert ltd.dropping_layers("7,0-1,1", 8) == (0, 1, 7)
    with pytest.raises(ValueError, match="--layers 0-999999999: the layers are 0 to 7"):
        ltd.dropping_layers("0-999999999", 8, "--layers")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_a_kept_token_does_not_depend_on_dropped_ones(packed, pos):
    model = small(pos)
    _, _, positions, doc_ids = batch(packed)
    positions = torch.arange(24)[None] if positions is None else positions
    meta = TokenMeta(positions, doc_ids, True, rotation(positions, 8) if pos == "rope" else None)
    kept = ltd.draw(9, random_bits(3, 24))
    x = torch.randn(3, 24, 16, dtype=torch.float64)
    noise = torch.randn_like(x).scatter(1, kept[:, :, None].expand(-1, -1, 16), 0.0)
    out, moved = (ltd.run_kept(model.h[1], y, meta.take(kept), kept) for y in (x, x + noise))
    index = kept[:, :, None].expand(-1, -1, 16)
    assert torch.equal(out.gather(1, index), moved.gather(1, index))
    dropped = torch.ones(3, 24, dtype=torch.bool).scatter(1, kept, False)
    assert torch.equal(out[dropped], x[dropped]), "a dropped token passes bit for bit"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind, pos", [("gpt", "rope"), ("gpt", "learned"), ("bert", "learned")])
def test_a_layer_of_kept_tokens_is_a_full_layer_that_sees_kept_keys_alone(packed, kind, pos):
    """The definition: every token runs, under the full row's mask without the dropped keys."""
    model = small(pos, kind)
    _, _, positions, doc_ids = batch(packed)
    if not packed:
        positions, doc_ids = torch.arange(24).repeat(3, 1), torch.zeros(3, 24, dtype=torch.int64)
    turns = rotation(positions, 8, torch.float64) if pos == "rope" else None
    meta = TokenMeta(positions, doc_ids, kind == "gpt", turns, impl="dense")
    x = torch.randn(3, 24, 16, dtype=torch.float64)
    kept = ltd.draw(9, random_bits(3, 24), doc_ids < 0)
    index = kept[:, :, None].expand(-1, -1, 16)
    found = ltd.run_kept(model.h[1], x, meta.take(kept), kept).gather(1, index)

    is_kept = torch.zeros(3, 24, dtype=torch.bool).scatter(1, kept, True)
    (mask,) = meta.documents.index
    mask = mask.masked_fill(~is_kept[:, None, None, :], -torch.inf)
    meta.documents = meta.documents._replace(index=(mask,))
    expected = model.h[1](x, meta).gather(1, index)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    meta.documents = index_of(doc_ids, kind == "gpt", "dense")
    assert not torch.allclose(found, model.h[1](x, meta).gather(1, index)), "dropped keys count"


def test_gradient_of_dropped_and_kept_tokens():
    """Dropped: the gradient from above, unchanged. Kept: through the block alone, never both."""
    meta = TokenMeta(torch.arange(4)[None], None, True)
    kept = torch.tensor([[1, 3]])
    x = torch.randn(1, 4, 2, requires_grad=True)
    ltd.run_kept(lambda y, meta: 3 * y, x, meta.take(kept), kept).sum().backward()
    assert x.grad[0, :, 0].tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_no_position_sees_a_later_one_through_all_layers(packed, pos):
    model = small(pos)
    tokens, _, positions, doc_ids = batch(packed, B=1)
    run_block = dropping(11, batch(packed, B=1))
    plain = model.logits(tokens, positions, doc_ids, run_block=run_block)
    for later in range(1, 24):
        changed = tokens.clone()
        changed[:, later:] = (changed[:, later:] + 1) % 40
        out = model.logits(changed, positions, doc_ids, run_block=run_block)
        assert torch.equal(out[:, :later], plain[:, :later]), later


def test_negative_control_unsorted_draw_breaks_causality():
    """Why the draw is sorted: the triangle would let early positions see later ones."""
    model, tokens = small(), batch(False, B=1).tokens
    kept = torch.arange(23, 1, -2)[None]
    run_block = ltd.token_dropping({1: kept, 2: kept}, run_plain)
    changed = tokens.clone()
    changed[:, 23] = (changed[:, 23] + 1) % 40
    plain, out = (model.logits(t, run_block=run_block)[:, :23] for t in (tokens, changed))
    assert not torch.equal(plain, out)


def test_packed_documents_stay_apart_when_tokens_are_dropped():
    model = small()
    tokens, _, positions, doc_ids = batch(True)
    run_block = dropping(11, batch(True))
    changed = torch.where(doc_ids == 1, (tokens + 1) % 40, tokens)
    plain, out = (
        model.logits(t, positions, doc_ids, run_block=run_block) for t in (tokens, changed)
    )
    assert torch.equal(plain[doc_ids != 1], out[doc_ids != 1])
    assert not torch.equal(plain[doc_ids == 1], out[doc_ids == 1])


def test_negative_control_sliced_mask_mixes_documents():
    """DeepSpeed's way (data_routing/basic_layer.py): a corner of the full mask."""
    model = small()
    tokens, _, positions, doc_ids = batch(True)

    class Sliced(TokenMeta):
        def take(self, kept):
            meta = super().take(kept)
            meta.documents = index_of(self.doc_ids[:, : kept.shape[1]], self.causal, self.impl)
            return meta

    def sliced(layer, block, x, meta):
        meta.__class__ = Sliced
        return dropping(11, batch(True))(layer, block, x, meta)

    changed = torch.where(doc_ids == 1, (tokens + 1) % 40, tokens)
    plain, out = (model.logits(t, positions, doc_ids, run_block=sliced) for t in (tokens, changed))
    assert not torch.equal(plain[doc_ids != 1], out[doc_ids != 1])


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_agree_with_finite_differences(packed):
    model = small()
    inputs = batch(packed, B=1)
    positions = torch.arange(24)[None] if inputs.positions is None else inputs.positions
    meta = TokenMeta(positions, inputs.doc_ids, True, rotation(positions, 8, torch.float64))
    kept, other = ltd.draw(9, random_bits(2, 24))[:, None]

    def two_layers(x):
        once = ltd.run_kept(model.h[1], x, meta.take(kept), kept)
        return ltd.run_kept(model.h[2], once, meta.take(other), other)

    x = torch.randn(1, 24, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(two_layers, (x,), fast_mode=True)


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_recomputed_activations_see_the_same_draw(pos):
    """--checkpoint-activations runs a block once more, on the tokens that were drawn before it."""
    settings = settings_of("--ltd --ltd-start 9 --seq-len 24 --batch-tokens 72 --layers 4")
    context, inputs, model = StepContext(seed=7, step=3, progress=0.0), batch(True), small(pos)
    found = []
    for inner in (run_plain, run_recomputed):
        model.zero_grad()
        loss = model(inputs, run_block=ltd.run_block(settings, context, 0, inputs, inner))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for kept, recomputed in zip(*found, strict=True):
        assert torch.equal(kept, recomputed)


def test_a_rank_drops_what_one_process_drops():
    """Ranks and micro-batches draw the same for a row: run_block gets the number of its first."""
    settings = settings_of("--ltd --ltd-start 9 --seq-len 24 --batch-tokens 72 --layers 4")
    context, model, inputs = StepContext(seed=7, step=3, progress=0.0), small(), batch(True)

    def states(batch: Batch, first: int, context=context):
        run_block = ltd.run_block(settings, context, first, batch, run_plain)
        return model.hidden_states(batch.tokens, batch.positions, batch.doc_ids, run_block)

    whole = states(inputs, 0)
    for row in range(3):
        part = inputs.rows(slice(row, row + 1))
        assert torch.allclose(states(part, row), whole[row : row + 1])
    assert not torch.allclose(states(inputs, 0, context._replace(step=4)), whole)


# The schedule and what it costs


def test_schedule_worked_examples():
    assert ltd.kept_tokens(0.35, 0.7, 64, 256) == 160
    assert ltd.kept_tokens(0.35, 0.7, 64, 256, multiple=64) == 128
    assert [ltd.kept_tokens(t, 4, 100, 197, multiple=16) for t in range(6)] == [
        100, 116, 148, 164, 197, 197,
    ]  # fmt: skip
    assert ltd.kept_tokens(0.25, 1, 64, 256, "root") == 160
    assert [ltd.kept_tokens(t, 0.7, 64, 256, "constant") for t in (0, 0.69, 0.7)] == [64, 64, 256]


@given(
    st.integers(1, 300),
    st.integers(0, 300),
    st.floats(0.01, 1),
    st.floats(0, 2),
    st.floats(0, 2),
    st.sampled_from(ltd.PACES),
    st.integers(1, 40),
)
def test_schedule_stays_in_range_and_never_falls(start, more, over, early, late, kind, multiple):
    early, late = sorted((early, late))
    first, second = (
        ltd.kept_tokens(t, over, start, start + more, kind, multiple) for t in (early, late)
    )
    assert start <= first <= second <= start + more
    assert (first - start) % multiple == 0 or first == start + more
    assert ltd.kept_tokens(over, over, start, start + more, kind, multiple) == start + more


@given(st.integers(1, 4096), st.integers(0, 4096), st.sampled_from(ltd.PACES))
def test_a_run_has_at_most_eight_numbers_of_kept_tokens_by_default(start, more, kind):
    config = ltd.LtdConfig(start=start, pace=kind)
    values = ltd.kept_values(config, start + more)
    assert len(values) <= ltd.MOST_SHAPES and values == sorted(set(values))
    multiple = ltd.multiple_of(config, start + more)
    seen = {ltd.kept_tokens(t, 1000, start, start + more, kind, multiple) for t in range(1001)}
    assert seen <= set(values)


def test_the_schedule_follows_steps_or_the_clock():
    by_clock, by_steps = (
        settings_of(f"--ltd --ltd-start 64 --ltd-pace linear --ltd-multiple 64 {flags}")
        for flags in ("--ltd-share 0.5", "--ltd-steps 101")
    )
    early, late = (StepContext(seed=1, step=n, progress=p) for n, p in ((1, 0.5), (102, 0.0)))
    assert [ltd.kept_now(by_clock, context) for context in (early, late)] == [256, 64]
    assert [ltd.kept_now(by_steps, context) for context in (early, late)] == [64, 256]


@pytest.mark.parametrize(
    "layers, at_once, micro_batches, tokens",
    [
        (12, 1, 1344, 2_148_032),
        (12, 2, 1344, 2_148_032),
        (24, 1, 1373, 2_147_024),
        (24, 2, 1374, 2_149_072),
    ],
)
def test_published_runs_end_where_their_logs_end(layers, at_once, micro_batches, tokens):
    """GPT-2 on PTB, DeepSpeed's data-efficiency tutorial: 2 rows of 1,024 a micro-batch, 2 a step.

    The tutorial's runs look at their budget after every micro-batch, train.py after whole steps.
    """
    flags = "--ltd --ltd-start 128 --ltd-pace linear --ltd-multiple 8 --ltd-steps 400 --size 350M"
    settings = settings_of(f"{flags} --layers {layers} --batch-tokens 4096 --tokens 2146304")
    consumed, done = 0, 0
    while consumed < settings.optim.tokens:
        context = StepContext(seed=1, step=done // 2 + 1, progress=0.0)
        rows = torch.full((2 * at_once,), 1024).numpy()
        consumed += effective_tokens(rows, 0 * rows, tokens_by_layer(settings, context, 1024))
        done += at_once
    assert (done, consumed) == (micro_batches, tokens)


def test_tokens_by_layer_worked_example():
    settings = settings_of("--ltd --ltd-start 128")
    context = StepContext(seed=1, step=1, progress=0.0)
    dropped = ltd.tokens_by_layer(settings, context, [256] * 6)
    assert dropped == [256, 128, 128, 128, 128, 256]
    short = ltd.tokens_by_layer(settings, context, [64] * 6)
    assert short == [64] * 6, "rows of at most K tokens run whole"
    assert ltd.tokens_by_layer(settings, context, [256, 0, 256, 256, 256, 256])[1] == 0
    late = context._replace(progress=0.9)
    assert ltd.tokens_by_layer(settings, late, [256] * 6) == [256] * 6


# The commands


def printed(capsys, line: str) -> str:
    ltd.main(line.split())
    return capsys.readouterr().out


def test_pace_prints_the_schedule(capsys):
    schedule = "--start 128 --end 2048 --over 200000 --multiple 16"
    out = printed(capsys, f"pace {schedule} --at 0,2000,20000,199999,200000 --json")
    assert json.loads(out) == {"0": 128, "2000": 144, "20000": 320, "199999": 2032, "200000": 2048}
    in_thousands = "--start 128 --end 2.048K --over 200K --multiple 16"
    assert out == printed(capsys, f"pace {in_thousands} --at 0,2K,20k,199999,2e5 --json")


def test_plan_counts_the_steps_of_the_papers_recipe(capsys):
    """GPT-3 1.3B, arXiv 2212.03597: 300 B tokens, 512 rows a step, 128 to 2,048 in 200 K steps."""
    run = "--size 1.3B --tokens 300B --batch-tokens 1048576 --start 128 --steps 200K"
    rows = printed(capsys, f"plan {run}").split("\n")
    assert rows[4].split() == ["steps", "286,103", "372,789", "1.303"]
    assert rows[6].split()[-1] == "1.000", "as many layer-tokens"
    assert rows[8].split()[-1] == "1.303", "the optimizer works in every step alike"


def test_plan_of_keeping_all_is_the_plain_run(capsys):
    out = printed(capsys, "plan --start 256")
    assert out.count("1.000") == 5 and "extra optimizer steps at equal consumed tokens: 0" in out


def test_plan_says_which_schedule_it_planned(capsys):
    by_share = printed(capsys, "plan").split("\n")[1]
    kept = "64 tokens kept in 4 of 6 layers (linear, in multiples of 16)"
    assert by_share == f"{kept}, all after 0.7 of the budget"
    by_steps = printed(capsys, "plan --steps 100 --kind constant --layers 2").split("\n")[1]
    assert by_steps == "64 tokens kept in 1 of 6 layers (constant), all after 100 steps"


@pytest.mark.parametrize("kind", ltd.PACES)
@pytest.mark.parametrize("over, by_steps", [(0.7, False), (1.0, False), (333, True), (1e9, True)])
@pytest.mark.parametrize("budget, multiple", [(1, 1), (400_001, 1), (800_000, 16), (123_456, 24)])
def test_a_plan_is_that_of_walking_step_by_step(kind, over, by_steps, budget, multiple):
    """The plan jumps over steps that keep alike."""
    shape = TransformerConfig("gpt", 6, 4, 128, 512, 256, 4160)

    def tokens_at(steps: int, progress: float) -> tuple[int, ...]:
        keep = ltd.kept_tokens(steps if by_steps else progress, over, 48, 256, kind, multiple)
        return (256, keep, keep, keep, keep, 256)

    steps = consumed = layer_tokens = flops = 0
    while consumed < budget:
        tokens = tokens_at(steps, consumed / budget)
        consumed += 8 * (sum(tokens) // 6)
        layer_tokens += 8 * sum(tokens)
        flops += 8 * flops_of_row(shape, tokens, 256)
        steps += 1
    cost = costs.cost_of_run(shape, 256, budget, 2048, tokens_at, "cpu")
    assert cost[:4] == (steps, steps * 2048, layer_tokens, flops)
    assert cost.optimizer_flops == steps * 6 * flops_of_orthogonalising(128, 512, "cpu")


def test_a_plan_of_a_trillion_tokens_takes_no_time(capsys):
    out = printed(capsys, "plan --size nano --tokens 1T --multiple 1")
    assert out.split("\n")[4].split()[1] == "488,281,250"


WHOLE = "is not a whole number, 1 or more"


@pytest.mark.parametrize(
    "mistake, says",
    {
        "pace --start 300": "--start 300 is more than a row holds: choose 1 to 256",
        "pace --start 0": f"--start: 0 {WHOLE}",
        "pace --end 0": f"--end: 0 {WHOLE}",
        "pace --over 0": "--over: 0 is not a finite number above 0",
        "pace --over inf": "--over: inf is not a finite number above 0",
        "pace --over nan": "--over: nan is not a finite number above 0",
        "pace --start 60": "--start 60 is no multiple of --multiple 16: choose 48 or 64",
        "pace --start 250 --multiple 100": "--start 250 is no multiple .* choose 200 or 256",
        "pace --multiple 0": f"--multiple: 0 {WHOLE}",
        "pace --multiple 1000": "--multiple 1000 is more than a row holds: choose 1 to 256",
        "pace --at -1": "--at",
        "plan --share 0": "--share: 0 is not a share, above 0 and at most 1",
        "plan --share 2": "--share: 2 is not a share, above 0 and at most 1",
        "plan --steps -5": f"--steps: -5 {WHOLE}",
        "plan --steps 0": f"--steps: 0 {WHOLE}",
        "plan --steps 100 --share 0.5": "--steps and --share both say",
        "plan --steps 100 --share 0.7": "--steps and --share both say",
        "plan --tokens 0": f"--tokens: 0 {WHOLE}",
        "plan --batch-tokens 0": f"--batch-tokens: 0 {WHOLE}",
        "plan --seq-len 0": f"--seq-len: 0 {WHOLE}",
        "plan --start 512": "--start 512",
        "plan --layers 0-5": "--layers 0-5 names all layers",
        "plan --layers 6": "^--layers 6: the layers are 0 to 5",
        "plan --layers 0-999999999": "^--layers 0-999999999: the layers are 0 to 5",
        "plan --layers 3-1": "^--layers 3-1 runs backwards: write 1-3",
        "plan --layers one": "^--layers one: write layers like 1-10,12",
        "plan --layers 3-": "^--layers 3-: write layers like 1-10,12",
        "plan --batch-tokens 1000": "--batch-tokens 1000 is not a multiple .* choose 768 or 1024",
        "plan --size small": "--size",
        "plan --size 124M --pos learned --seq-len 4096": "--seq-len 4096 is above the 1024",
    }.items(),
)
def test_mistakes_are_one_line(mistake, says):
    with pytest.raises(ValueError, match=says) as error:
        ltd.main(mistake.split())
    assert "\n" not in str(error.value)


def test_plan_takes_the_rows_that_train_takes(capsys):
    assert "rows of 4096" in printed(capsys, "plan --size 124M --seq-len 4096")
    assert "rows of 4096" in printed(capsys, "plan --seq-len 4096"), "a batch is a row at least"
