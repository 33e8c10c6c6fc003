"""The clock: what a step costs, and what a run says it saved."""

import config
from support.clock import Clock, effective_tokens, savings


def dropping(layers, keep, seq_len):
    """Tokens that each layer sees, where all but the first and last keep some."""
    return [seq_len, *[min(keep, seq_len)] * (layers - 2), seq_len]


def test_effective_tokens_worked_examples():
    assert sum(dropping(6, 128, 256)) == 1024
    assert effective_tokens(512, dropping(6, 128, 256), 256) == 340
    assert effective_tokens(512, [256] * 6, 256) == 512
    # full rows: rows times a, arXiv 2212.03597's own counting; GPT-3 1.3B at its first step
    a = (2048 * (24 - 22) + 128 * 22) // 24
    assert effective_tokens(512 * 2048, dropping(24, 128, 2048), 2048) == 512 * a


def test_savings_name_what_was_on():
    clock = Clock(real_tokens=900, layer_tokens=3000, positions=1000, pieces=10)

    def said(flags):
        return savings(config.build(config.parse(flags.split())), clock)

    assert said("") == "saved: nothing, no technique is on that skips work"
    assert "50.0% of layer-tokens (0.0 M, plain 0.0 M)" in said("--ltd")
    assert "padding: 10.0% of all positions, 64.8% with one piece a row" in said("--pack")
    assert "layer-tokens" in said("--ltd --pack") and "padding" in said("--ltd --pack")
