"""Random numbers as functions of a key: no state to save, and the same in every process.

seed_of     a key such as (seed, "mask", step) -> 63 bits
generator   a torch generator seeded with them
bits        a number for each position of each row, on any device
shuffled    draw number -> sample id, in an order that is never held in memory
"""

import hashlib

import numpy as np
import torch
from torch import Tensor


def seed_of(*key: object) -> int:
    """A seed for one purpose: (seed, purpose, step, layer) -> 63 bits, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def generator(device: torch.device, *key: object) -> torch.Generator:
    """A random generator that is a function of `key`: nothing to save, nothing to restore."""
    return torch.Generator(device).manual_seed(seed_of(*key))


def bits(seeds: Tensor, rows: Tensor, T: int) -> Tensor:
    """63 random bits for each seed, row and position.

    A hash, not a stream: no number depends on how many others are computed, so a rank computes only
    its own rows and gets what one process with all rows would get.

    Args:    seeds (n,) int64 from seed_of
             rows  (B,) int64, numbers of rows among those of all ranks
    Returns: (n, B, T) int64 from 0 to 2^63 - 1, the same on every device
    """
    positions = torch.arange(1, T + 1, device=rows.device)
    by_row = _mixed(seeds[:, None] + (rows + 1) * -7046029254386353131)  # (n, B), by 2^64 / golden
    return _mixed(by_row[:, :, None] + positions * -7046029254386353131) & 2**63 - 1  # (n, B, T)


def _mixed(x: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Hash 64-bit integers to 64 well-mixed bits (the finaliser of splitmix64).

    A shift of int64 copies the sign: the bits shifted in are masked off.
    """
    x = (x ^ (x >> 30 & 2**34 - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & 2**37 - 1)) * -7723592293110705685
    return x ^ (x >> 31 & 2**33 - 1)


def shuffled(draws: np.ndarray, n: int, seed: int) -> np.ndarray:
    """The sample ids of the given draws: pass after pass over 0..n-1, each in its own order.

    A keyed permutation of [0, n): a Feistel network over an even number of bits, applied until the
    result is below n (Black & Rogaway 2002). So no list of samples is in memory, and any rank can
    say what draw 10^12 is without replaying the draws before it.

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
