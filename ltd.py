"""Random layerwise token dropping (random-LTD): middle layers see a random subset of the tokens.

In each step every layer but the first and the last draws, for every row, its own K of T positions.
The kept tokens go through the layer; the dropped ones pass around it unchanged. K grows during
training until nothing is dropped. Evaluation never drops.

Does not touch the model, which calls each of its blocks through a `run_block`: this is one. Kept
tokens keep their original positions and doc_ids (`meta.take`), so rotary angles, causality and
packed documents stay right.

In reading order: configuration, the schedule, the draw, the layer, the settings. It acts where
`settings.ltd.on` stands:

    config.py   build             `resolved`: defaults, and what is refused
    plan.py     tokens_by_layer   what a step costs on the clock
    train.py    block_runner      `wrap_block`, for each micro-batch

docs/ltd.md has the picture and the numbers.

Papers: Yao et al., arXiv 2211.11586; accounting: Li et al., arXiv 2212.03597.

    python train.py --ltd
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.token_drop import merge, split
from support.clock import StepContext, pace
from support.settings import flag

if TYPE_CHECKING:
    from model import Batch, Block, BlockRunner, TokenMeta

MODES, PACES = ("random", "bypass"), ("linear", "root", "constant")


@dataclass(frozen=True)
class LtdConfig:
    on: bool = flag(False, "drop random tokens in every layer but first and last")
    mode: str = flag("random", "draw in each layer, or once for all as TokenBypass", choices=MODES)
    start: int | None = flag(None, "tokens kept at first (default: a sixteenth of a row)", least=1)
    pace: str = flag("constant", "how kept tokens grow; constant: only at the end", choices=PACES)
    share: float | None = flag(None, "share of a run that drops (default: 0.9)", above=0, most=1)
    steps: int | None = flag(None, "optimizer steps that drop, instead of a share", least=1)
    multiple: int | None = flag(
        None, "kept tokens grow by this (default: 16 or more, for at most 8 sizes)", least=1
    )
    layers: str | None = flag(None, "dropping layers, from 0: 1-10,12 (default: all but the ends)")


# ---- the schedule


def kept_tokens(
    t: float, over: float, start: int, seq_len: int, kind: str = "linear", multiple: int = 1
) -> int:
    """How many tokens of a full row a dropping layer keeps, never fewer than before.

    Paper:   arXiv 2211.11586, section 3.2 (MSLG); root and constant are its alternatives
    Args:    t, over  steps or tokens, counted from 0; from t = over on all `seq_len` are kept
             kind     linear | root | constant, which stays at `start`
             multiple values on the way are `start` plus multiples of this
    Returns: tokens, start..seq_len
    Example: kept_tokens(0.35, 0.7, 64, 256) == 160, half-way; in multiples of 64 it is 128
    """
    if kind == "constant":
        return seq_len if t >= over else start
    kept = pace(t, over, start, seq_len, degree=2 if kind == "root" else 1)
    # pace's own `multiple` counts from 0; this one counts from `start`, which may be any number
    return kept if kept == seq_len else kept - (kept - start) % multiple


def kept_now(ltd: LtdConfig, context: StepContext) -> int:
    """`kept_tokens` at one step of a run."""
    T = context.seq_len
    t, over = (context.step - 1, ltd.steps) if ltd.steps else (context.progress, ltd.share)
    return kept_tokens(t, over, ltd.start, T, ltd.pace, multiple_of(ltd, T))


TILE = 16  # tokens that fill a matrix unit
MOST_SHAPES = 8  # numbers of kept tokens in a run, by default


def multiple_of(config: LtdConfig, seq_len: int) -> int:
    """--ltd-multiple, or the least multiple of 16 that makes 8 numbers of kept tokens at most."""
    tiles = math.ceil((seq_len - config.start) / ((MOST_SHAPES - 1) * TILE))
    return config.multiple or max(tiles, 1) * TILE


def dropping_layers(text: str | None, layers: int) -> tuple[int, ...]:
    """The layers that --ltd-layers names, ascending; without it all but the first and the last.

    Example: dropping_layers("1-3,5", 8) == (1, 2, 3, 5)
    Raises:  ValueError for what is no list of the model's layers, and if no layer is left that sees
             every token
    """
    if text is None:
        return tuple(range(1, layers - 1))
    named: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < layers:
            raise ValueError(f"--ltd-layers {text}: name layers 0 to {layers - 1} (form: 1-10,12)")
        named.update(range(first, last + 1))
    if len(named) == layers:
        raise ValueError(f"--ltd-layers {text} names all layers: leave one that sees every token")
    return tuple(sorted(named))


# ---- the draw


def draw(keep: int, bits: Tensor, padding: Tensor | None = None) -> Tensor:
    """Choose which `keep` of its T positions go through a layer, for every row by itself.

    Args:    keep    tokens, 1 <= keep <= T
             bits    (..., B, T) int64 from 0, uniform: the `keep` highest of a row are kept
             padding (B, T) bool or None; padding is dropped before any real token
    Returns: (..., B, K) int64, ascending, so that a causal mask among kept tokens is still a
             triangle
    Raises:  ValueError if keep is outside 1..T
    Deviates: in DeepSpeed (data_routing/basic_layer.py) padding competes with real tokens for the
             K positions
    Example: draw(2, tensor([[1, 9, 5, 7]])) == [[1, 3]]
    """
    T = bits.shape[-1]
    if not 1 <= keep <= T:
        raise ValueError(f"cannot keep {keep} of {T} tokens: --ltd-start allows 1 to {T}")
    if padding is not None:
        bits = torch.where(padding, ~bits, bits)  # below 0
    return bits.topk(keep, sorted=False).indices.sort().values  # (..., B, K)


def draws(
    ltd: LtdConfig, context: StepContext, rows: Tensor, batch: "Batch", keep: int
) -> dict[int, Tensor]:
    """The draws of all dropping layers at once: layer -> (B, K) int64.

    Functions of (seed, step, layer, row among the rows of all ranks, position): who runs a row, and
    with which others, does not change what it drops.
    """
    T = batch.tokens.shape[1]
    layers = dropping_layers(ltd.layers, context.layers)
    padding = None if batch.doc_ids is None else batch.doc_ids < 0
    drawn = layers if ltd.mode == "random" else layers[:1]
    kept = draw(keep, context.bits("ltd", drawn, rows, T), padding)  # (layers or 1, B, K)
    return dict(zip(layers, kept.expand(len(layers), -1, -1), strict=True))


# ---- the layer


def run_kept(block: Callable, x: Tensor, meta: "TokenMeta", kept: Tensor) -> Tensor:
    """Run one block on the kept tokens; the others leave it as they came, bit for bit.

    Replacing rows, not adding to them, gives each token the right gradient: a dropped one the
    gradient from above unchanged, a kept one that through the block (which has its own residual).

    Args:    x    (B, T, C) hidden states
             meta per-token metadata of the kept tokens
             kept (B, K) int64, ascending
    Returns: (B, T, C)
    """
    states, rest = split(x, kept)  # (B, K, C) and (B, T, C)
    return merge(rest, kept, block(states, meta))


def drop_tokens(kept_in: dict[int, Tensor], inner: "BlockRunner") -> "BlockRunner":
    """The layers of `kept_in` see the tokens it names, the others see every token.

    Args: inner runs a block on the tokens it is given
    """
    meta_of: dict[int, TokenMeta] = {}  # of the kept tokens of each layer

    def run_block(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
        run = partial(inner, layer, block)
        if layer not in kept_in:
            return run(x, meta)
        if not meta_of:
            metas = meta.take_each(list(kept_in.values()))
            meta_of.update(zip(kept_in, metas, strict=True))
        return run_kept(run, x, meta_of[layer], kept_in[layer])

    return run_block


def wrap_block(
    inner: "BlockRunner", ltd: LtdConfig, context: StepContext, rows: Tensor, batch: "Batch"
) -> "BlockRunner":
    """Have blocks drop tokens in one micro-batch; where all tokens are kept, `inner` itself.

    Args:    context of the step: progress, and its random numbers
             rows    (B,) int64, the micro-batch's rows by their numbers among those of all ranks
    """
    keep = kept_now(ltd, context)
    if keep >= batch.tokens.shape[1]:
        return inner
    return drop_tokens(draws(ltd, context, rows, batch, keep), inner)


def tokens_by_layer(ltd: LtdConfig, context: StepContext, tokens: list[int]) -> list[int]:
    """How many tokens of a row each layer sees, given how many it would see without this technique.

    Example: rows of 256 in 6 layers that keep 128: [256, 128, 128, 128, 128, 256]
    """
    keep, dropping = kept_now(ltd, context), dropping_layers(ltd.layers, context.layers)
    return [min(keep, n) if layer in dropping else n for layer, n in enumerate(tokens)]


# ---- the settings


def resolved(ltd: LtdConfig, seq_len: int, layers: int) -> LtdConfig:
    """The settings with defaults filled in.

    Raises: ValueError naming the flag of a setting that cannot work
    """
    dropping_layers(ltd.layers, layers)
    start = max(seq_len // 16, 1) if ltd.start is None else ltd.start
    multiple = ltd.multiple or 1
    if start > seq_len:
        raise ValueError(f"--ltd-start {start} is above the {seq_len} tokens of a row: lower it")
    if start % multiple and start != seq_len:
        above = min(start + -start % multiple, seq_len)
        raise ValueError(
            f"--ltd-start {start} is not a multiple of --ltd-multiple {multiple}: try {above}"
        )
    if ltd.steps and ltd.share:
        raise ValueError("--ltd-steps and --ltd-share both end the dropping: give one of them")
    if layers < 3:
        raise ValueError(
            f"--layers {layers}: --ltd needs a layer between the first and the last: choose 3 or"
            " more, or leave out --ltd"
        )
    share = ltd.share if ltd.share or ltd.steps else 0.9
    return replace(ltd, start=start, share=share)
