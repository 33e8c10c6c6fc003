"""Token dropping: draws, blocks on kept tokens, the schedule, the accounting."""

import pytest
import torch
from conftest import build
from hypothesis import given
from hypothesis import strategies as st
from small_batches import batch, loss_of, small_model

import ltd
from model import run_plain
from support.clock import StepContext, effective_tokens

CONTEXT = StepContext(seed=7, step=3, progress=0.0, seq_len=24, layers=4)


# Draws


def test_a_draw_equals_a_worked_example():
    assert ltd.draw_kept(2, torch.tensor([[1, 9, 5, 7]])).tolist() == [[1, 3]]
    padding = torch.tensor([[False, True, False, True]])
    assert ltd.draw_kept(2, torch.tensor([[1, 9, 5, 7]]), padding).tolist() == [[0, 2]]
    assert ltd.draw_kept(3, torch.tensor([[1, 9, 5, 7]]), padding).tolist() == [[0, 2, 3]]


@given(st.integers(1, 24), st.integers(0, 99), st.sets(st.integers(0, 23)))
def test_draws_are_sorted_and_unique_and_keep_real_tokens_first(keep, seed, padded):
    padding = torch.tensor([[t in padded for t in range(24)]])
    bits = torch.randint(2**63 - 1, (64, 24), generator=torch.Generator().manual_seed(seed))
    kept = ltd.draw_kept(keep, bits, padding)
    assert kept.shape == (64, keep)
    assert (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < 24
    real = (~padding).expand(64, -1).gather(1, kept).sum(1)
    assert (real == min(keep, 24 - len(padded))).all()
    if 1 < keep < 23 and not padded:
        assert len({tuple(row) for row in kept.tolist()}) > 30, "rows draw the same subset"


N = 4000  # rows, over which a share of 1/4 has a standard deviation of 0.0068


def draw_kept(flags="", step=1) -> torch.Tensor:
    """Return which tokens a run with --ltd-start 6 keeps, as (layers, rows, 24) bool."""
    flags = f"--ltd --ltd-start 6 --seq-len 24 --batch-tokens 24 --layers 6 {flags}"
    context = StepContext(seed=7, step=step, progress=0.0, seq_len=24, layers=6)
    rows, inputs = torch.arange(N), batch(False, B=N)
    kept = torch.stack([*ltd.draw_for_layers(build(flags).ltd, context, rows, inputs, 6).values()])
    return torch.zeros(len(kept), N, 24, dtype=torch.bool).scatter(2, kept, True)


def test_draws_are_uniform_and_independent_between_layers_rows_and_steps():
    """Two independent draws of 6 out of 24 share 6 * 6 / 24 = 1.5 tokens on average."""
    first, second = (draw_kept(step=step).float() for step in (1, 2))
    assert (first.mean(1) - 0.25).abs().max() < 5 * 0.0068
    pairs = {"layers": (first[0], first[-1]), "steps": (first[0], second[0])}
    for name, (a, b) in {**pairs, "rows": (first[0, 1:], first[0, :-1])}.items():
        both = (a * b).sum(1)
        assert abs(both.mean() - 1.5) < 5 * both.std() / N**0.5, name
        assert (both == 0).sum() > 0.1 * N, f"{name}: 13.8 % should share none (hypergeometric)"
    bypass = draw_kept("--ltd-mode bypass")
    assert (bypass == first[0].bool()).all(), "one draw for all layers, that of the first"


# Layers


@pytest.mark.parametrize("packed, kind, pos", [(0, "gpt", "rope"), (1, "bert", "learned")])
def test_keeping_all_tokens_equals_the_plain_model_bitwise(packed, kind, pos):
    model, inputs = small_model(kind, pos=pos), batch(packed)
    whole, result = torch.arange(24).expand(3, -1), []
    for run_block in (run_plain, ltd.drop_tokens({1: whole, 2: whole}, run_plain)):
        loss = loss_of(model, inputs, run_block)
        result.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert all(map(torch.equal, *result)), "the loss, and every gradient"


BY_FLAGS = [("--ltd-mode bypass", [24, 10, 10, 24]), ("--ltd-layers 2-3,0,3", [10, 24, 10, 10])]


@pytest.mark.parametrize("flags, tokens", BY_FLAGS)
def test_the_flags_choose_the_layers_that_drop_tokens(flags, tokens):
    flags = f"--ltd --ltd-start 10 --seq-len 24 --batch-tokens 72 --layers 4 {flags}"
    settings = build(flags).ltd
    seen, inputs = {}, batch(False)

    def spy(layer, block, x, meta):
        seen[layer] = x.shape[1]
        return block(x, meta)

    run_block = ltd.wrap_block(spy, settings, CONTEXT, torch.arange(3), inputs)
    small_model(pos="rope")(*inputs.inputs, run_block=run_block)
    assert [seen[layer] for layer in range(4)] == tokens
    assert ltd.tokens_by_layer(settings, CONTEXT, 4 * [24]) == tokens, "the clock counts this"
    short = ltd.tokens_by_layer(settings, CONTEXT, 4 * [9])
    assert short == 4 * [9], "rows of at most K tokens drop none"


# The schedule and the accounting


def test_schedules_equal_worked_examples():
    assert ltd.kept_tokens(0.35, 0.7, 64, 256) == 160
    by_16 = [ltd.kept_tokens(t, 4, 100, 197, multiple=16) for t in range(6)]
    assert by_16 == [100, 116, 148, 164, 197, 197]
    assert ltd.kept_tokens(0.25, 1, 64, 256, "root") == 160
    assert [ltd.kept_tokens(t, 0.7, 64, 256, "constant") for t in (0, 0.69, 0.7)] == [64, 64, 256]


@given(
    start=st.integers(1, 300),
    more=st.integers(0, 300),
    over=st.floats(0.01, 1),
    times=st.tuples(st.floats(0, 2), st.floats(0, 2)).map(sorted),
    kind=st.sampled_from(ltd.PACES),
    multiple=st.integers(1, 40),
)
def test_schedules_stay_in_range_and_never_fall(start, more, over, times, kind, multiple):
    end = start + more
    moments = (*times, over)
    first, second, last = (ltd.kept_tokens(t, over, start, end, kind, multiple) for t in moments)
    assert start <= first <= second <= last == end
    assert (first - start) % multiple == 0 or first == end


PUBLISHED = [(12, 2, 1344, 2_148_032), (24, 1, 1373, 2_147_024), (24, 2, 1374, 2_149_072)]


@pytest.mark.parametrize("layers, at_once, micro_batches, tokens", PUBLISHED)
def test_published_runs_consume_their_logged_tokens(layers, at_once, micro_batches, tokens):
    """GPT-2 on PTB, DeepSpeed's data-efficiency tutorial: steps of two micro-batches, each of 2
    rows of 1,024 tokens.

    DeepSpeed checks the budget after every micro-batch (at_once = 1), train.py after whole steps.
    """
    flags = "--ltd --ltd-start 128 --ltd-pace linear --ltd-multiple 8 --ltd-steps 400 --size 350M"
    settings = build(f"{flags} --layers {layers} --batch-tokens 4096 --tokens 2146304")
    consumed, done = 0, 0
    while consumed < settings.optim.tokens:
        context = StepContext(1, done // 2 + 1, progress=0.0, seq_len=1024, layers=layers)
        rows = torch.full((2 * at_once,), 1024).numpy()
        tokens_seen = ltd.tokens_by_layer(settings.ltd, context, [1024] * layers)
        consumed += effective_tokens(rows, 0 * rows, tokens_seen, 1024)
        done += at_once
    assert (done, consumed) == (micro_batches, tokens)


def test_the_papers_long_run_makes_the_published_number_of_steps():
    """GPT-3 1.3B, arXiv 2212.03597: 300 B tokens, 512 rows a step, 128 to 2,048 in 200 K steps."""
    kept = (ltd.kept_tokens(t, 200_000, 128, 2048, multiple=16) for t in range(200_000))
    consumed = sum(512 * ((2 * 2048 + 22 * n) // 24) for n in kept)
    assert 200_000 + -(-(300 * 10**9 - consumed) // (512 * 2048)) == 372_789
