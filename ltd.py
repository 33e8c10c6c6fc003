"""Random layerwise token dropping (random-LTD): middle layers see a random subset of the tokens.

In each step, every layer except the first and the last draws K of the T positions anew for each
row. The kept tokens go through the layer; the dropped tokens bypass it unchanged. K may grow during
training; when it reaches T, nothing is dropped any more. Evaluation never drops tokens.

The model is not changed: it runs each block through a `run_block` function, and this file supplies
one. Kept tokens carry their original positions and doc_ids with them (`TokenMeta.of_kept`), so
rotary angles, causal masks and the isolation of packed documents stay correct.

In reading order: configuration, schedule, draw, layer, settings. The technique acts where the code
says `settings.ltd.on`:

    config.py   build             `resolved` fills in defaults and refuses what cannot work
    plan.py     tokens_by_layer   a step costs less on the clock
    train.py    block_runner      `wrap_block` is called for each micro-batch

docs/ltd.md has a drawing, docs/measured.md the measurements.

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
    on: bool = flag("--ltd", False, "drop random tokens in all layers except the first and last")
    mode: str = flag("--ltd-mode", "random", "bypass: one draw for all layers (TokenBypass)", MODES)
    start: int | None = flag(
        "--ltd-start", None, "tokens kept at the start (default: --seq-len / 16)", least=1
    )
    pace: str = flag("--ltd-pace", "constant", "how kept tokens grow; constant: not", PACES)
    share: float | None = flag(
        "--ltd-share", None, "share of a run with dropping (default: 0.9)", above=0, most=1
    )
    steps: int | None = flag("--ltd-steps", None, "steps with dropping, not a share", least=1)
    multiple: int | None = flag(
        "--ltd-multiple", None, "kept tokens grow in steps of this (default: 16 or more)", least=1
    )
    layers: str | None = flag(
        "--ltd-layers", None, "from 0: 1-10,12 (default: all but first and last)"
    )


# ---- the schedule


def kept_tokens(
    t: float, over: float, start: int, seq_len: int, kind: str = "linear", multiple: int = 1
) -> int:
    """Return how many tokens of a full row a dropping layer keeps. The number never decreases.

    Paper:   arXiv 2211.11586, section 3.2 (MSLG); root and constant are its alternatives
    Args:    t, over  elapsed and total time, in any unit; all `seq_len` are kept once t >= over
             kind     linear | root | constant, which keeps `start` until t = over
             multiple values between the ends are `start` plus a multiple of this
    Returns: tokens, start..seq_len
    Example: kept_tokens(0.35, 0.7, 64, 256) == 160, half-way; with multiple=64 it is 128
    """
    if kind == "constant":
        return seq_len if t >= over else start
    kept = pace(t, over, start, seq_len, degree=2 if kind == "root" else 1)
    # The `multiple` of `pace` counts from 0; this one counts from `start`, which is arbitrary.
    return kept if kept == seq_len else kept - (kept - start) % multiple


def kept_now(ltd: LtdConfig, context: StepContext) -> int:
    """Return `kept_tokens` for one step of a run."""
    T = context.seq_len
    t, over = (context.step - 1, ltd.steps) if ltd.steps else (context.progress, ltd.share)
    return kept_tokens(t, over, ltd.start, T, ltd.pace, multiple_of(ltd, T))


TILE = 16  # tokens per tile of a matrix unit
MOST_SHAPES = 8  # by default, K takes at most this many values in a run


def multiple_of(config: LtdConfig, seq_len: int) -> int:
    """Return --ltd-multiple, or the smallest multiple of 16 that gives K at most 8 values."""
    tiles = math.ceil((seq_len - config.start) / ((MOST_SHAPES - 1) * TILE))
    return config.multiple or max(tiles, 1) * TILE


def dropping_layers(text: str | None, layers: int) -> tuple[int, ...]:
    """Return the layers named by --ltd-layers, ascending; by default all but the first and last.

    Example: dropping_layers("1-3,5", 8) == (1, 2, 3, 5)
    Raises:  ValueError if the text is not a list of the model's layers, or if it names all layers
    """
    if text is None:
        return tuple(range(1, layers - 1))
    named: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < layers:
            raise ValueError(f"--ltd-layers {text}: use layers 0 to {layers - 1}, such as 1-10,12")
        named.update(range(first, last + 1))
    if len(named) == layers:
        raise ValueError(f"--ltd-layers {text} names all layers: leave one that sees every token")
    return tuple(sorted(named))


# ---- the draw


def draw_kept(keep: int, bits: Tensor, padding: Tensor | None = None) -> Tensor:
    """Choose for each row which `keep` of its T positions go through a layer.

    Args:    keep    tokens, 1 <= keep <= T
             bits    (..., B, T) int64, uniform and >= 0; a row keeps its `keep` largest
             padding (B, T) bool or None; padding is dropped before any real token
    Returns: (..., B, K) int64, ascending, so that the causal mask of the kept tokens is still a
             triangle
    Raises:  ValueError if keep is outside 1..T
    Deviates: in DeepSpeed (data_routing/basic_layer.py), padding competes with real tokens for
             the K positions
    Example: draw_kept(2, tensor([[1, 9, 5, 7]])) == [[1, 3]]
    """
    T = bits.shape[-1]
    if not 1 <= keep <= T:
        raise ValueError(f"cannot keep {keep} of {T} tokens: --ltd-start allows 1 to {T}")
    if padding is not None:
        bits = torch.where(padding, ~bits, bits)  # padding is negative, so below all real tokens
    return bits.topk(keep, sorted=False).indices.sort().values  # (..., B, K)


def draw_for_layers(
    ltd: LtdConfig, context: StepContext, rows: Tensor, batch: "Batch", keep: int
) -> dict[int, Tensor]:
    """Draw for all dropping layers at once; returns layer -> (B, K) int64.

    The result depends only on seed, step, layer, position and the row's number across all ranks. So
    a row drops the same tokens on whichever rank and in whichever micro-batch it runs.
    """
    T = batch.tokens.shape[1]
    layers = dropping_layers(ltd.layers, context.layers)
    padding = None if batch.is_plain else batch.doc_ids < 0
    drawn = layers if ltd.mode == "random" else layers[:1]
    kept = draw_kept(keep, context.bits("ltd", drawn, rows, T), padding)  # (layers or 1, B, K)
    return dict(zip(layers, kept.expand(len(layers), -1, -1), strict=True))


# ---- the layer


def run_kept(block: Callable, x: Tensor, meta: "TokenMeta", kept: Tensor) -> Tensor:
    """Run one block on the kept tokens; dropped tokens come out unchanged, bit for bit.

    The block's output replaces the kept states rather than being added to them. So a dropped token
    gets the gradient from above unchanged, and a kept token gets it through the block, which has
    its own residual connection.

    Args:    x    (B, T, C) hidden states
             meta per-token metadata of the kept tokens
             kept (B, K) int64, ascending
    Returns: (B, T, C)
    """
    states, rest = split(x, kept)  # (B, K, C) and (B, T, C)
    return merge(rest, kept, block(states, meta))


def drop_tokens(kept_in: dict[int, Tensor], inner: "BlockRunner") -> "BlockRunner":
    """Return a block runner that runs the layers in `kept_in` on the positions given there.

    Args: kept_in layer -> (B, K) positions; all other layers see every token
          inner   runs a block on the tokens it is given
    """

    def run_block(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
        run = partial(inner, layer, block)
        if layer not in kept_in:
            return run(x, meta)
        kept = kept_in[layer]
        return run_kept(run, x, meta.of_kept(kept), kept)

    return run_block


def wrap_block(
    inner: "BlockRunner", ltd: LtdConfig, context: StepContext, rows: Tensor, batch: "Batch"
) -> "BlockRunner":
    """Return a block runner that drops tokens in one micro-batch, or `inner` if all are kept.

    Args:    context progress and random numbers of this step
             rows    (B,) int64, the numbers of the micro-batch's rows across all ranks
    """
    keep = kept_now(ltd, context)
    if keep >= batch.tokens.shape[1]:
        return inner
    return drop_tokens(draw_for_layers(ltd, context, rows, batch, keep), inner)


def tokens_by_layer(ltd: LtdConfig, context: StepContext, tokens: list[int]) -> list[int]:
    """Return how many tokens of a row each layer sees, given the numbers without token dropping.

    Example: rows of 256 in 6 layers that keep 128: [256, 128, 128, 128, 128, 256]
    """
    keep, dropping = kept_now(ltd, context), dropping_layers(ltd.layers, context.layers)
    return [min(keep, n) if layer in dropping else n for layer, n in enumerate(tokens)]


# ---- the settings


def resolved(ltd: LtdConfig, seq_len: int, layers: int) -> LtdConfig:
    """Return the settings with defaults filled in.

    Raises: ValueError naming the flag whose value cannot work
    """
    dropping_layers(ltd.layers, layers)
    start = max(seq_len // 16, 1) if ltd.start is None else ltd.start
    multiple = ltd.multiple or 1
    if start > seq_len:
        raise ValueError(f"--ltd-start {start} exceeds the {seq_len} tokens of a row")
    if start % multiple and start != seq_len:
        raise ValueError(f"--ltd-multiple {multiple} does not divide --ltd-start {start}")
    if ltd.steps and ltd.share:
        raise ValueError("--ltd-steps and --ltd-share exclude each other")
    if ltd.layers is None and layers < 3:
        raise ValueError(f"--layers {layers}: --ltd needs a layer between the first and the last")
    share = ltd.share if ltd.share or ltd.steps else 0.9
    return replace(ltd, start=start, share=share)
