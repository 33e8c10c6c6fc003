"""The clock: what a step costs, and what a run says it saved."""

import numpy as np

from plan import savings
from support.clock import Clock, due, effective_tokens


def dropping(layers, keep, seq_len):
    """Tokens that each layer sees, where all but the first and last keep some."""
    return [seq_len, *[min(keep, seq_len)] * (layers - 2), seq_len]


def consumed(rows, layers, context=0):
    return effective_tokens(np.array(rows), np.full(len(rows), context), layers)


def test_effective_tokens_worked_examples():
    assert sum(dropping(6, 128, 256)) == 1024
    assert consumed([256, 256], dropping(6, 128, 256)) == 340
    assert consumed([256, 256], [256] * 6) == 512
    # full rows: rows times a, arXiv 2212.03597's own counting; GPT-3 1.3B at its first step
    a = (2048 * (24 - 22) + 128 * 22) // 24
    assert consumed([2048] * 512, dropping(24, 128, 2048)) == 512 * a


def test_padding_is_dropped_first_so_short_rows_count_for_more():
    """A row of n real tokens keeps min(n, K): with 100 of 256 and K = 128 it runs whole."""
    layers = dropping(6, 128, 256)
    assert consumed([100], layers) == 100
    assert consumed([200], layers) == (2 * 200 + 4 * 128) // 6
    assert consumed([100, 0, 256], layers) == 100 + 170
    per_row = [(2 * n + 4 * min(n, 128)) // 6 for n in range(257)]
    assert consumed(list(range(257)), layers) == sum(per_row)


def test_context_is_not_consumed_twice():
    assert consumed([256], [256] * 6, context=56) == 200
    assert consumed([256], dropping(6, 128, 256), context=128) == 1024 * 128 // (6 * 256)


def test_due_when_a_multiple_is_passed_and_never_for_zero():
    before, after = Clock(consumed_tokens=99), Clock(consumed_tokens=105)
    assert due(100, before, after) and not due(200, before, after) and not due(0, before, after)


def test_savings_name_what_was_on():
    plain = Clock(real_tokens=1000, layer_tokens=6000, positions=1000, pieces=10)
    assert savings(plain, 6, 100) == "saved: nothing (neither token dropping nor packing is on)"
    dropped = savings(plain._replace(layer_tokens=3000), 6, 100)
    assert dropped == "saved: 50.0% of layer-tokens (0.00 M, plain 0.01 M)"
    packed = savings(plain._replace(real_tokens=900, pieces=20), 6, 100)
    assert packed == "saved: padding: 10.0% of all positions, 55.0% with one piece a row"
