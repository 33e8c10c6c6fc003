"""The clock: how many tokens a step consumes. Random numbers are functions of a key, and so is the
order of samples.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import clock
from support.clock import Clock, due, effective_tokens, shuffled


def layer_tokens(layers, keep, seq_len):
    """Return the tokens that each layer sees if all but the first and last drop tokens."""
    return [seq_len, *[min(keep, seq_len)] * (layers - 2), seq_len]


def consumed(rows, layers, context=0):
    return effective_tokens(np.array(rows), np.full(len(rows), context), layers, max(layers))


def test_effective_tokens_equal_worked_examples():
    assert consumed([256, 256], layer_tokens(6, 128, 256)) == 340
    assert consumed([256, 256], [256] * 6) == 512
    # full rows: rows times a, as arXiv 2212.03597 counts; GPT-3 1.3B at its first step
    a = (2048 * (24 - 22) + 128 * 22) // 24
    assert consumed([2048] * 512, layer_tokens(24, 128, 2048)) == 512 * a


def test_padding_is_dropped_first_so_short_rows_keep_more_of_their_tokens():
    """A row of n real tokens keeps min(n, K): with n = 100 and K = 128 it drops none."""
    layers = layer_tokens(6, 128, 256)
    assert consumed([100], layers) == 100
    assert consumed([200], layers) == (2 * 200 + 4 * 128) // 6
    assert consumed([100, 0, 256], layers) == 100 + 170
    by_layers = [2 * n + 4 * min(n, 128) for n in range(256)]
    assert consumed(list(range(256)), layers) == sum(by_layers) // 6, "rounded down only once"
    assert consumed([8] * 3, [8, 0, 0]) == 3 * 2, "whole rows are rounded down one by one"
    assert effective_tokens(np.full(3, 8), np.zeros(3, int), [8, 0, 0], seq_len=16) == 8
    assert consumed([256], [256] * 6, context=56) == 200, "context was consumed before"
    assert consumed([256], layers, context=128) == 1024 * 128 // (6 * 256)


def test_an_event_is_due_when_a_multiple_is_passed_and_never_for_zero():
    before, after = Clock(consumed_tokens=99), Clock(consumed_tokens=105)
    assert due(100, before, after) and not due(200, before, after) and not due(0, before, after)


# ---- random numbers


def test_seeds_are_functions_of_their_key():
    assert clock.seed_of(1, "ltd", 2) == clock.seed_of(1, "ltd", 2)
    keys = [(seed, step, layer) for seed in range(3) for step in range(30) for layer in range(9)]
    assert len({clock.seed_of(*key) for key in keys}) == len(keys)
    assert clock.seed_of(11, 2) != clock.seed_of(1, 12), "the parts of a key are separated"
    generators = [clock.generator(torch.device("cpu"), 7, 1) for _ in range(2)]
    assert torch.equal(*(torch.rand(4, generator=generator) for generator in generators))


def test_bits_are_functions_of_seed_row_and_position():
    seeds = torch.tensor([3, 5, 2**62])
    whole = clock.bits(seeds, torch.arange(40, 60), 32)
    assert whole.shape == (3, 20, 32) and whole.min() >= 0
    part = clock.bits(seeds[1:2], torch.tensor([45, 59]), 7)
    assert torch.equal(part[0], whole[1, [5, 19], :7]), "independent of how many are drawn"
    assert whole.unique().numel() == whole.numel()


def test_bits_are_uniform_and_independent():
    n = 1 << 18
    result = clock.bits(torch.tensor([1]), torch.arange(n // 64), 64).flatten()
    uniform = result.double() / 2**63
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    for distance in (1, 64):  # the next position, the next row
        pair = torch.stack((uniform[distance:], uniform[:-distance]))
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / n**0.5
    for bit in range(63):
        assert abs((result >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / n**0.5, bit


def test_bits_and_order_never_change():
    """A changed hash would silently change every run. These values are of the first release."""
    assert shuffled(np.arange(8), 8, 1337).tolist() == [0, 2, 5, 6, 4, 3, 1, 7]
    assert shuffled(np.arange(4), 10**6, 1337).tolist() == [975445, 510179, 974175, 688990]
    drawn = clock.bits(torch.tensor([1337]), torch.tensor([2**40]), 2)
    assert drawn.tolist() == [[[5547376785766191999, 8064329455777930460]]]


@given(st.integers(1, 300), st.integers(0, 2**40))
def test_every_pass_holds_every_sample_once(n, seed):
    for number in (0, 1, 7):
        assert sorted(shuffled(np.arange(number * n, (number + 1) * n), n, seed)) == list(range(n))


def test_orders_differ_by_pass_and_seed_and_look_random():
    n = 4096
    first = shuffled(np.arange(n), n, 1)
    for unlike in (shuffled(np.arange(n, 2 * n), n, 1), shuffled(np.arange(n), n, 2), np.arange(n)):
        assert (first == unlike).sum() < 10, "two random permutations agree in about one place"
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 0.06  # 4 standard deviations


def test_any_part_of_the_order_is_known_without_computing_the_rest():
    assert shuffled(np.array([5 * 10**12 + 3]), 10**12, 0)[0] < 10**12
    whole = shuffled(np.arange(1000), 777, 3)
    assert (shuffled(np.arange(400, 500), 777, 3) == whole[400:500]).all()
