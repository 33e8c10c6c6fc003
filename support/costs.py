"""What a run costs in steps, tokens and FLOPs when some layers see fewer tokens, without making it.

Rows are taken to be full, and time to follow FLOPs; bench/cost.py measures it.

    python ltd.py plan --size 350M --seq-len 2048 --start 128 --share 0.7 --tokens 300B
"""

import argparse
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from model import SIZES, TransformerConfig, flops_of_row
from support.flags import whole_number
from support.recipes import RECIPES

V_GPT2, V_PD4K = 50_304, 4_160  # of GPT-2's tokenizer and of the embedded corpus's, in tiles of 64


class Cost(NamedTuple):
    """Of all steps until the budget is consumed, in full rows."""

    steps: int
    tokens: int  # read
    layer_tokens: int
    flops: int  # of matrix products in forward and backward


def cost_of_run(
    config: TransformerConfig,
    seq_len: int,
    budget: int,
    batch_tokens: int,
    tokens_at: Callable[[int, float], tuple[int, ...]],
) -> Cost:
    """The steps that a budget of consumed tokens allows (support/clock.py), added up.

    Args: tokens_at (steps before, progress 0..1) -> how many tokens of a row each layer sees
    """
    rows = batch_tokens // seq_len

    @cache
    def of_row(tokens_by_layer: tuple[int, ...]) -> tuple[int, int]:
        return sum(tokens_by_layer), flops_of_row(config, tokens_by_layer, seq_len)

    steps, consumed, layer_tokens, flops = 0, 0, 0, 0
    while consumed < budget:
        layer_tokens_of_row, flops_of_it = of_row(tokens_at(steps, consumed / budget))
        consumed += rows * (layer_tokens_of_row // config.layers)
        layer_tokens += rows * layer_tokens_of_row
        flops += rows * flops_of_it
        steps += 1
    return Cost(steps, steps * rows * seq_len, layer_tokens, flops)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The model and the run whose cost is asked for."""
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--seq-len", type=whole_number, help="tokens of a row (default: by --size)")
    parser.add_argument("--tokens", type=whole_number, help="budget (default: by --size)")
    parser.add_argument("--batch-tokens", type=whole_number, help="of a step (default: by --size)")


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what --size decides.

    Raises: ValueError for a batch that is not whole rows
    """
    tokens, batch_tokens, _ = RECIPES[args.size]
    args.seq_len = args.seq_len or SIZES[args.size].seq_len
    args.tokens = args.tokens or tokens
    args.batch_tokens = args.batch_tokens or batch_tokens
    if args.batch_tokens % args.seq_len:
        raise ValueError(
            f"--batch-tokens {args.batch_tokens} is not a multiple of --seq-len {args.seq_len}"
        )
    return args


def show_plan(args: argparse.Namespace, tokens_at: Callable[[int, float], tuple[int, ...]]) -> None:
    """Print what the run costs with `tokens_at`, and with every token in every layer."""
    layers, heads, width, _ = SIZES[args.size]
    kind = "bert" if args.size.startswith("bert") else "gpt"
    V = V_PD4K if args.size == "nano" else V_GPT2
    config = TransformerConfig(kind, layers, heads, width, 4 * width, args.seq_len, V)
    run = (config, args.seq_len, args.tokens, args.batch_tokens)
    plain = cost_of_run(*run, lambda *_: (args.seq_len,) * layers)
    dropping = cost_of_run(*run, tokens_at)
    print(f"{args.size}, rows of {args.seq_len}, {args.tokens:,} consumed tokens\n")
    print(f"{'':14} {'plain':>12} {'dropping':>12} {'ratio':>8}")
    for name, full, less in zip(Cost._fields, plain, dropping, strict=True):
        form = ",d" if name == "steps" else ".4g"
        print(f"{name.replace('_', '-'):14} {full:12{form}} {less:12{form}} {less / full:8.3f}")
    same_tokens = dropping.flops / plain.flops
    same_text = same_tokens * plain.tokens / dropping.tokens
    print(
        f"\nextra optimizer steps at equal consumed tokens: {dropping.steps - plain.steps:,}\n"
        f"time saved, if it follows FLOPs: {1 - same_text:.1%} for the same text,"
        f" {1 - same_tokens:.1%} for the same consumed tokens"
    )
