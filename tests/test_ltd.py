"""Token dropping: the draw, the block on kept tokens, causality, the schedule, the accounting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import config
import ltd
from model import TokenMeta, Transformer, TransformerConfig, run_plain
from support import rng
from support.clock import StepContext

CPU = torch.device("cpu")


def small(pos="rope", kind="gpt", layers=4, dtype=torch.float64):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(kind, layers, 2, 16, 32, 24, 40, pos)).to(dtype)


def scores(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def choose_from(keep, seed=0):
    """A fresh draw for every layer, as the trainer makes it."""

    def choose(layer, x, meta):
        score = torch.rand(*x.shape[:2], generator=rng.generator(CPU, seed, layer))
        return ltd.draw(keep, score, None if meta.doc_ids is None else meta.doc_ids < 0)

    return choose


def batch(packed: bool, B=3, T=24):
    tokens = torch.randint(0, 40, (B, T), generator=torch.Generator().manual_seed(1))
    if not packed:
        return tokens, tokens.roll(-1, 1), None, None
    doc_ids = torch.tensor([0] * 7 + [1] * 5 + [2] * 9 + [-1] * 3).repeat(B, 1)
    positions = torch.tensor([*range(7), *range(5), *range(9), 0, 0, 0]).repeat(B, 1)
    return tokens, torch.where(doc_ids < 0, -100, tokens.roll(-1, 1)), positions, doc_ids


def test_draw_worked_example():
    assert ltd.draw(2, torch.tensor([[0.1, 0.9, 0.5, 0.7]])).tolist() == [[1, 3]]
    padding = torch.tensor([[False, True, False, True]])
    assert ltd.draw(2, torch.tensor([[0.1, 0.9, 0.5, 0.7]]), padding).tolist() == [[0, 2]]


@given(st.integers(1, 24), st.integers(0, 99))
def test_draw_is_sorted_unique_and_differs_by_row(keep, seed):
    kept = ltd.draw(keep, scores(64, 24, seed=seed))
    assert kept.shape == (64, keep)
    assert (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < 24
    if 1 < keep < 23:
        assert len({tuple(row) for row in kept.tolist()}) > 30, "rows drew the same subset"


def test_draw_is_uniform_over_positions():
    kept = ltd.draw(6, scores(40_000, 24))
    share = torch.bincount(kept.flatten(), minlength=24) / 40_000
    # a position is kept with probability 1/4: its share has a standard deviation of 0.0022
    assert (share - 0.25).abs().max() < 5 * 0.0022


@pytest.mark.parametrize("keep", [0, 25])
def test_draw_refuses(keep):
    with pytest.raises(ValueError, match=f"cannot keep {keep} of 24"):
        ltd.draw(keep, scores(1, 24))


@pytest.mark.parametrize("packed", [False, True])
def test_keeping_all_is_bitwise_the_plain_model(packed):
    model = small(dtype=torch.float32)
    inputs = batch(packed)
    plain = model(inputs)
    plain.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # through the gather and scatter themselves, and by the short cut that skips them
    whole = torch.arange(24).expand(3, -1)

    def gathered(layer, block, x, meta):
        return ltd.run_kept(block, x, meta, whole)

    def refuse(*_):
        raise AssertionError("a row that is kept whole draws nothing")

    for run_block in (gathered, ltd.token_dropping(24, 4, refuse, run_plain)):
        loss = model(inputs, run_block=run_block)
        loss.backward()
        assert torch.equal(loss, plain)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(parameter.grad, gradient)
        model.zero_grad()


def test_first_and_last_layer_see_every_token():
    seen = {}

    def spy(layer, block, x, meta):
        def counted(x, meta):
            seen[layer] = x.shape[1]
            return block(x, meta)

        return dropping(layer, counted, x, meta)

    dropping = ltd.token_dropping(10, 4, choose_from(10), run_plain)
    small()(batch(False), run_block=spy)
    assert seen == {0: 24, 1: 10, 2: 10, 3: 24}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_a_kept_token_does_not_depend_on_dropped_ones(packed, pos):
    model = small(pos)
    _, _, positions, doc_ids = batch(packed)
    positions = torch.arange(24)[None] if positions is None else positions
    meta = TokenMeta(positions, doc_ids, True, 8 if pos == "rope" else 0)
    kept = ltd.draw(9, scores(3, 24))
    x = torch.randn(3, 24, 16, dtype=torch.float64)
    noise = torch.randn_like(x).scatter(1, kept[:, :, None].expand(-1, -1, 16), 0.0)
    out, moved = (ltd.run_kept(model.h[1], y, meta, kept) for y in (x, x + noise))
    index = kept[:, :, None].expand(-1, -1, 16)
    assert torch.equal(out.gather(1, index), moved.gather(1, index))
    dropped = torch.ones(3, 24, dtype=torch.bool).scatter(1, kept, False)
    assert torch.equal(out[dropped], x[dropped]), "a dropped token passes bit for bit"


def test_gradient_of_dropped_and_kept_tokens():
    """Dropped: the gradient from above, unchanged. Kept: through the block alone, never both."""
    meta = TokenMeta(torch.arange(4)[None], None, True)
    kept = torch.tensor([[1, 3]])
    x = torch.randn(1, 4, 2, requires_grad=True)
    ltd.run_kept(lambda y, meta: 3 * y, x, meta, kept).sum().backward()
    assert x.grad[0, :, 0].tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_no_position_sees_a_later_one_through_all_layers(packed, pos):
    model = small(pos)
    tokens, _, positions, doc_ids = batch(packed, B=1)
    run_block = ltd.token_dropping(11, 4, choose_from(11), run_plain)
    plain = model.logits(tokens, positions, doc_ids, run_block=run_block)
    for later in range(1, 24):
        changed = tokens.clone()
        changed[:, later:] = (changed[:, later:] + 1) % 40
        out = model.logits(changed, positions, doc_ids, run_block=run_block)
        assert torch.equal(out[:, :later], plain[:, :later]), later


def test_negative_control_unsorted_draw_breaks_causality():
    """Why the draw is sorted: the triangle would let early positions see later ones."""
    model = small()
    tokens = batch(False, B=1)[0]

    def backwards(layer, x, meta):
        return choose_from(11)(layer, x, meta).flip(1)

    run_block = ltd.token_dropping(11, 4, backwards, run_plain)
    changed = tokens.clone()
    changed[:, 23] = (changed[:, 23] + 1) % 40
    plain, out = (model.logits(t, run_block=run_block)[:, :23] for t in (tokens, changed))
    assert not torch.equal(plain, out)


def test_packed_documents_stay_apart_when_tokens_are_dropped():
    model = small()
    tokens, _, positions, doc_ids = batch(True)
    run_block = ltd.token_dropping(11, 4, choose_from(11), run_plain)
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
            meta.mask = self.mask[:, :, : kept.shape[1], : kept.shape[1]]
            return meta

    def sliced(layer, block, x, meta):
        meta.__class__ = Sliced
        return ltd.token_dropping(11, 4, choose_from(11), run_plain)(layer, block, x, meta)

    changed = torch.where(doc_ids == 1, (tokens + 1) % 40, tokens)
    plain, out = (model.logits(t, positions, doc_ids, run_block=sliced) for t in (tokens, changed))
    assert not torch.equal(plain[doc_ids != 1], out[doc_ids != 1])


def test_schedule_worked_examples():
    assert ltd.kept_tokens(0.0, 64, 0.7, 256) == 64
    assert ltd.kept_tokens(0.35, 64, 0.7, 256) == 160
    assert ltd.kept_tokens(0.7, 64, 0.7, 256) == 256
    assert ltd.kept_tokens(0.0, 10, 0.7, 197) == 10
    assert ltd.kept_tokens(1.0, 10, 1.0, 197) == 197


@given(
    st.integers(1, 300), st.integers(0, 300), st.floats(0.01, 1), st.floats(0, 2), st.floats(0, 2)
)
def test_schedule_stays_in_range_and_never_falls(start, more, share, early, late):
    early, late = sorted((early, late))
    first, second = (ltd.kept_tokens(t, start, share, start + more) for t in (early, late))
    assert start <= first <= second <= start + more


def test_tokens_by_layer_worked_example():
    settings = config.build(config.parse(["--ltd", "--ltd-start", "128"]))
    context = StepContext(seed=1, step=1, progress=0.0, rows=8)
    dropped = ltd.tokens_by_layer(settings, context, [256] * 6)
    assert dropped == [256, 128, 128, 128, 128, 256]
    short = ltd.tokens_by_layer(settings, context, [64] * 6)
    assert short == [64] * 6, "rows of at most K tokens run whole"
    assert ltd.tokens_by_layer(settings, context, [256, 0, 256, 256, 256, 256])[1] == 0
    late = context._replace(progress=0.7)
    assert ltd.tokens_by_layer(settings, late, [256] * 6) == [256] * 6


def test_a_rank_drops_what_one_process_drops():
    """Ranks and micro-batches draw the same for a row: run_block gets the number of its first."""
    flags = "--ltd --ltd-start 9 --seq-len 24 --batch-tokens 72 --layers 4"
    settings = config.build(config.parse(flags.split()))
    context = StepContext(seed=7, step=3, progress=0.0, rows=3)
    model, inputs = small(), batch(True)
    whole = model.hidden_states(
        inputs[0], *inputs[2:], ltd.run_block(settings, context, 0, run_plain)
    )
    for row in range(3):
        tokens, _, positions, doc_ids = (field[row : row + 1] for field in inputs)
        run_block = ltd.run_block(settings, context, row, run_plain)
        assert torch.allclose(
            model.hidden_states(tokens, positions, doc_ids, run_block), whole[row : row + 1]
        )
    other = ltd.run_block(settings, context._replace(step=4), 0, run_plain)
    assert not torch.allclose(model.hidden_states(inputs[0], *inputs[2:], other), whole)


def test_command_prints_the_schedule(capsys):
    ltd.main(["--start", "64", "--share", "0.7", "--seq-len", "256", "--layers", "6"])
    rows = capsys.readouterr().out.split("\n")
    assert rows[1].split() == ["0%", "64", "768", "50.0%"]
    assert rows[11].split() == ["100%", "256", "1536", "100.0%"]
    for mistake in ("--start 300", "--share 0", "--share nan", "--layers 2", "--seq-len 0"):
        with pytest.raises(ValueError, match=mistake):
            ltd.main(mistake.split())
