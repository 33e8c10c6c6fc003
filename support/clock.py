"""The clock of a run: how much a step adds to it, and the schedules and random numbers it drives.

A step consumes its real tokens, scaled by the share of layers that they ran through. The budget and
every schedule count consumed tokens, and so does the learning rate by default (--lr-clock):

    step    rows of 256; 4 of 6 layers keep 128          consumed    clock after the step
    1       16 full rows: 4,096 real tokens              2,720       2,720
    2       16 rows of 250 tokens: 4,000                 2,688       5,408

Random choices are functions of a key. So there is no random state to save, and every process gets
the same numbers without communication:

    seed_of     a key such as (seed, "mask", step) -> 63 bits
    generator   a torch generator seeded with those bits
    bits        a random number for each position of each row, on any device
    shuffled    draw number -> sample id; the order is computed, not stored
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.runtime import on_device

MULTIPLE = 8  # lengths are multiples of 8: fewer shapes, and matrix units work in eights


class Cursor(NamedTuple):
    """Where in the text the next rows come from; plan.py's header walks through three steps."""

    first_draw: int = 0  # number of the draw at which the next row, or its window, begins
    pool_first_draw: int = 0  # the first draw from the current pool of samples
    drawn_at_tokens: int = 0  # consumed tokens when that window, or the last step, was drawn
    row: int = 0  # with --pack: how many rows of the window have been used


class Clock(NamedTuple):
    """The progress of a run. Every schedule is a function of this, the settings and the seed."""

    step: int = 0
    consumed_tokens: int = 0  # what --tokens limits, see effective_tokens
    real_tokens: int = 0  # tokens read, including a BERT's [CLS] and [SEP] but not padding
    layer_tokens: int = 0  # sum over layers of the positions that each processed, padding included
    positions: int = 0  # of all rows, including padding
    flops: int = 0  # needed on all ranks together, see flops_of_step in support/sizes.py
    cursor: Cursor = Cursor()

    def as_dict(self) -> dict:
        """Return plain dicts for a checkpoint; `Clock.of` reads them back."""
        return {**self._asdict(), "cursor": self.cursor._asdict()}

    @classmethod
    def of(cls, saved: dict) -> "Clock":
        return cls(**{**saved, "cursor": Cursor(**saved["cursor"])})


class StepContext(NamedTuple):
    """What a technique that acts on blocks may know about a step."""

    seed: int
    step: int  # counted from 1
    progress: float  # consumed tokens when the step begins, as a share of the budget
    seq_len: int  # tokens of a full row, --seq-len
    layers: int  # of the whole model

    def bits(self, technique: str, layers: Sequence[int | str], rows: Tensor, T: int) -> Tensor:
        """Draw random numbers for one technique in this step, one per layer, row and position.

        Args:    rows (B,) int64, the numbers of the rows among all ranks' rows, on the device that
                      is to hold the result
        Returns: (len(layers), B, T) int64 from 0 to 2^63 - 1
        """
        seeds = [seed_of(self.seed, technique, self.step, layer) for layer in layers]
        return bits(on_device(torch.tensor(seeds), rows.device), rows, T)


def effective_tokens(
    filled: np.ndarray, seen: np.ndarray, tokens_by_layer: list[int], seq_len: int
) -> int:
    """Return what a step consumes: its real tokens, scaled by the share of layers they ran through.

    Padding is dropped first, so a layer that keeps K keeps min(n, K) tokens of a row with n.

    Paper:    arXiv 2212.03597: a = floor((T (L - l) + r l) / L) for l layers that drop tokens
    Args:     filled          (B,) tokens of each row, without padding
              seen            (B,) how many of these are context that was already a target in an
                              earlier row, and is not counted again
              tokens_by_layer (L,) tokens of a full row that each layer sees
              seq_len         T, tokens of a whole row
    Returns:  the sum over rows of (n - seen) sum_l min(n, K_l) / (L n), rounded down; of B whole
              rows B a
    Deviates: DeepSpeed rounds down every row, which takes up to a fifth of a short one; here only
              whole rows are rounded down, so that runs end where the published ones do
    Example:  two rows of 256 in layers that see [256, 128, 128, 128, 128, 256] tokens consume
              2 * floor(1024 / 6) == 340; no layer drops anything of a row of 100 tokens, which
              consumes 100
    """
    processed = np.minimum(filled[:, None], np.array(tokens_by_layer)).sum(1)  # (B,) by all layers
    counted = (filled - seen) * processed // np.maximum(filled, 1)  # layer-tokens
    counted -= np.where(filled == seq_len, counted % len(tokens_by_layer), 0)
    return int(counted.sum()) // len(tokens_by_layer)


def due(every: int, before: Clock, after: Clock) -> bool:
    """Whether a step passed a multiple of `every` tokens; never if that is 0."""
    return every > 0 and before.consumed_tokens // every != after.consumed_tokens // every


def lr_clock(which: str, layers: int, clock: Clock) -> float:
    """Return the token count that the learning rate follows.

    Args: which --lr-clock: consumed-tokens, or layer-tokens divided by the number of layers, which
                includes padding
    """
    return clock.layer_tokens / layers if which == "layer-tokens" else clock.consumed_tokens


def pace(t: float, over: float, start: int, end: int, degree: float = 1, multiple: int = 1) -> int:
    """Grow from `start` to `end` along a root as t goes to `over`, in any unit.

    For lengths, difficulties and kept tokens.

    Paper:    arXiv 2212.03597; floor((t / T)^(1 / p) (end - start) + start)
    Args:     degree   p: 1 is linear, 2 the square root; above 1 it grows fast at first
              multiple values before `end` are rounded down to a multiple of this
    Returns:  a value in start..end, exactly `end` from t = over on
    Deviates: DeepSpeed 0.19.8 reaches `end` late if it is not a multiple. Its first value is the
              first multiple at or above `start` in data_pipeline/curriculum_scheduler.py, and can
              be below `start` in data_routing/scheduler.py
    Example:  pace(1, 300, 64, 1024, degree=2, multiple=8) == 112, from 119.4;
              pace(27, 49, 1, 50) == 27, from 27.999999999999996: the order of operations is fixed
    """
    if t >= over:
        return end
    value = math.floor((t / over) ** (1 / degree) * (end - start) + start)
    return min(max(value - value % multiple, start), end)


def seed_of(*key: object) -> int:
    """Hash a key to a seed of 63 bits: (seed, purpose, step, layer) -> the same number anywhere."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def generator(device: torch.device, *key: object) -> torch.Generator:
    """Make a random generator that depends only on `key`: nothing to save or restore."""
    return torch.Generator(device).manual_seed(seed_of(*key))


def bits(seeds: Tensor, rows: Tensor, T: int) -> Tensor:
    """Compute 63 random bits for each seed, row and position.

    This is a hash, not a stream: no number depends on which others are computed. So each rank
    computes only the numbers for its rows, and gets what a single process would.

    Args:    seeds (n,) int64 from seed_of
             rows  (B,) int64, the numbers of the rows among all ranks' rows
    Returns: (n, B, T) int64 from 0 to 2^63 - 1, the same on every device
    """
    positions = torch.arange(1, T + 1, device=rows.device)
    by_row = _mixed(seeds[:, None] + (rows + 1) * -7046029254386353131)  # (n, B), by 2^64 / golden
    return _mixed(by_row[:, :, None] + positions * -7046029254386353131) & 2**63 - 1  # (n, B, T)


def _mixed(x: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Hash 64-bit integers to 64 well-mixed bits (the finaliser of splitmix64).

    Shifting an int64 to the right copies its sign bit, so the masks clear the bits shifted in.
    """
    x = (x ^ (x >> 30 & 2**34 - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & 2**37 - 1)) * -7723592293110705685
    return x ^ (x >> 31 & 2**33 - 1)


def shuffled(draws: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Map draws to sample ids: pass after pass over 0..n-1, each in a different order.

    Each pass is a keyed permutation of [0, n): a Feistel network over an even number of bits,
    applied again until the result is below n (Black & Rogaway 2002). So no shuffled list is held in
    memory, and any rank can compute draw 10^12 without replaying the draws before it.

    Args:    draws (m,) int64, counted from the start of training
    Returns: (m,) int64 sample ids; draws k n .. (k + 1) n - 1 hold every id once
    """
    passes, ids = np.divmod(draws, n)
    half = max(1, -(-(n - 1).bit_length() // 2))  # bits
    low = (1 << half) - 1
    salts = [(seed * 8 + turn) * 0xD1342543DE82EF95 % 2**64 for turn in range(6)]
    salts = np.array(salts, np.uint64).view(np.int64)
    keys = passes * -7046029254386353131 + salts[:, None]  # (6, m)
    outside = np.arange(len(ids))
    while len(outside):
        x, key = ids[outside], keys[:, outside]
        left, right = x >> half, x & low
        for turn in range(6):
            left, right = right, left ^ (_mixed(right + key[turn]) & low)
        ids[outside] = x = left << half | right
        outside = outside[x >= n]
    return ids
