"""What a run would cost in steps, tokens and FLOPs if some layers see fewer tokens.

Assumed are full rows, time proportional to FLOPs (bench/frontier.py measures it), and Muon: for
nano as on a CPU, in fp32, for the larger sizes as on a GPU, in bf16. Nothing is run.

Used by `ltd.py plan` and, for its flags, by `offload.py plan`.

    python ltd.py plan --size 1.3B --tokens 300B --start 128 --share 0.7
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from model import TransformerConfig
from support.base.numbers import count
from support.base.technique import refuse
from support.step.optim import flops_of_muon
from support.step.sizes import (
    SIZES,
    config_of,
    flops_of_row,
    refusals_of_rows,
    with_defaults,
)

# Of train.py; behind the dot stands the flag that asks for it.
SETTINGS = (
    "model.size",
    "model.block",
    "model.pos",
    "data.seq_len",
    "optim.tokens",
    "optim.batch_tokens",
)

# (steps before, progress 0..1) -> the tokens of a row that each layer sees
TokensAt = Callable[[int, float], Sequence[int]]


class Cost(NamedTuple):
    """Of all steps until the budget is consumed, in full rows."""

    steps: int
    tokens: int  # read
    layer_tokens: int
    flops: int  # of matrix products in forward and backward
    optimizer_flops: int  # Muon's, which dropping does not change

    @property
    def all_flops(self) -> int:
        return self.flops + self.optimizer_flops


def cost_of_run(
    config: TransformerConfig,
    budget: int,
    batch_tokens: int,
    device: str,
    tokens_at: TokensAt,
) -> Cost:
    """The steps that a budget of consumed tokens allows (support/base/clock.py), added up.

    Args: device    of the optimizer, cpu or cuda
          tokens_at never falls, so steps that see the same numbers are counted together
    """
    rows = batch_tokens // config.seq_len

    steps, consumed, layer_tokens, flops = 0, 0, 0, 0

    def differs(n: int) -> bool:
        """Whether the layers see other numbers n steps after this one."""
        return tokens_at(steps + n, (consumed + n * of_step) / budget) != now

    while consumed < budget:
        now = tokens_at(steps, consumed / budget)
        of_step = rows * (sum(now) // config.layers)
        left = -(-(budget - consumed) // of_step)
        alike = 1 + bisect_left(range(1, left), True, key=differs)  # steps like this one
        steps += alike
        consumed += alike * of_step
        layer_tokens += alike * rows * sum(now)
        flops += alike * rows * flops_of_row(config, now, config.seq_len)
    optimizer = config.layers * flops_of_muon(config, device)
    return Cost(
        steps=steps,
        tokens=steps * rows * config.seq_len,
        layer_tokens=layer_tokens,
        flops=flops,
        optimizer_flops=steps * optimizer,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The model and the run whose cost is asked for."""
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--block", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--seq-len", type=count, help="tokens of a row (default: by --size)")
    parser.add_argument(
        "--pos",
        choices=("learned", "rope"),
        help="positions (default: by --size, and rope for longer rows)",
    )
    parser.add_argument("--tokens", type=count, help="budget (default: by --size)")
    parser.add_argument("--batch-tokens", type=count, help="of a step (default: by --size)")


def fill_in(args: argparse.Namespace) -> None:
    """Set what was left to --size.

    Raises: ValueError for rows and batches that train.py refuses
    """
    if args.pos is None and (args.seq_len or 0) > SIZES[args.size].seq_len:
        args.pos = "rope"  # --size says how many positions can be learned
    settings = with_defaults({name: getattr(args, name.split(".")[1]) for name in SETTINGS})
    for name in SETTINGS:
        setattr(args, name.split(".")[1], settings[name])
    learned = args.pos == "learned"
    refuse(refusals_of_rows(args.size, args.seq_len, args.batch_tokens, learned))


def show_plan(args: argparse.Namespace, schedule: str, tokens_at: TokensAt) -> None:
    """Print what the run costs with `tokens_at`, and with every token in every layer.

    Args: schedule what `tokens_at` does, in words
    """
    config = config_of(args.size, args.seq_len, args.pos, args.block)
    cost = partial(
        cost_of_run,
        config,
        budget=args.tokens,
        batch_tokens=args.batch_tokens,
        device="cpu" if args.size == "nano" else "cuda",
    )
    plain = cost(tokens_at=lambda steps, progress: [args.seq_len] * config.layers)
    dropping = cost(tokens_at=tokens_at)
    print(
        f"{args.size}, {args.block} block, {args.pos} positions, rows of {args.seq_len},"
        f" {args.tokens:,} consumed tokens\n{schedule}\n"
    )
    print(f"{'':15} {'plain':>12} {'dropping':>12} {'ratio':>8}")
    for name, full, less in zip(Cost._fields, plain, dropping, strict=True):
        form = ",d" if name == "steps" else ".4g"
        print(f"{name.replace('_', '-'):15} {full:12{form}} {less:12{form}} {less / full:8.3f}")
    same_tokens = dropping.all_flops / plain.all_flops
    same_text = same_tokens * plain.tokens / dropping.tokens
    print(
        f"\nextra optimizer steps at equal consumed tokens: {dropping.steps - plain.steps:,}\n"
        f"time saved, if it follows FLOPs: {1 - same_text:.1%} for the same text,"
        f" {1 - same_tokens:.1%} for the same consumed tokens"
    )
