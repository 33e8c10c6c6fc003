"""Packs, the documents that share a row: what packers take and return, and the order of rows.

In reading order: histograms of lengths, which packers take; the fewest packs that one needs; a
Packing, which packers return; Packs, where each document has its place; and an order of rows that
gives every rank about as much work.
The packers are in packing.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SWAPS = 16  # that `parted` makes at most, for each share beyond the first
MOST_SWAPS = 256  # that it makes at most in all
CANDIDATES = 32  # rows of a share that it considers swapping


def histogram(lengths: Sequence[int] | np.ndarray, max_len: int) -> np.ndarray:
    """Count the documents of each length, (max_len + 1,).

    Raises:  ValueError for a document that does not fit a row
    Example: histogram([3, 1, 3], 4) == [0, 1, 0, 2, 0]
    """
    lengths = np.asarray(lengths)
    for extreme in (lengths.min(initial=1), lengths.max(initial=1)):
        if not 1 <= extreme <= max_len:
            raise ValueError(f"a document of {extreme} tokens does not fit a row of 1 to {max_len}")
    return np.bincount(lengths.astype(np.int64, copy=False), minlength=max_len + 1)


def least_packs(counts: np.ndarray, max_per_pack: int) -> int:
    """A lower bound on the number of packs, computed from the histogram alone.

    For any length t: a document longer than max_len - t shares its pack with none of t or more, and
    no two documents longer than half a pack share one. Documents from t to half a pack can only use
    the space that the latter leave; the rest needs packs of its own. The best t counts.

    Paper:   Martello & Toth, Discrete Applied Mathematics 28 (1990), bound L2
    Example: three documents of 5 in packs of 8 need three, though 15 tokens are less than two packs
    """
    max_len, lengths = len(counts) - 1, np.arange(len(counts))
    number, tokens = np.cumsum(counts), np.cumsum(counts * lengths)
    t, half = np.arange(max_len // 2 + 1), max_len // 2
    long = number[-1] - number[max_len - t]
    middle = number[max_len - t] - number[half]
    free = middle * max_len - (tokens[max_len - t] - tokens[half])
    short = tokens[half] - np.where(t > 0, tokens[t - 1], 0)
    more = np.maximum(-((free - short) // max_len), 0)
    return max(int((long + middle + more).max()), -(-int(number[-1]) // max_per_pack))


class Packing(NamedTuple):
    """Strategies, the lengths that share a pack, and how many packs follow each.

    Strategy s holds lengths[offsets[s]:offsets[s + 1]], longest first.
    """

    lengths: np.ndarray  # (places,) int64
    offsets: np.ndarray  # (S + 1,) int64
    counts: np.ndarray  # (S,) int64
    max_len: int
    lower_bound: int  # no packing has fewer packs

    @property
    def packs(self) -> int:
        return int(self.counts.sum())

    def total(self, of_each_length: np.ndarray) -> float:
        """Sum over all documents a value that depends on their length, (max_len + 1,)."""
        sums = np.add.reduceat(of_each_length[self.lengths], self.offsets[:-1])
        return float(sums @ self.counts)

    @property
    def factor(self) -> float:
        """Documents per pack: how many times fewer rows than with one document per row."""
        return self.total(np.ones(self.max_len + 1)) / self.packs

    @property
    def efficiency(self) -> float:
        """The share of positions that are not padding."""
        return self.total(np.arange(self.max_len + 1)) / (self.packs * self.max_len)

    @property
    def attention(self) -> float:
        """The cost of attention within documents, as a share of attention over whole rows."""
        return self.total(np.arange(self.max_len + 1.0) ** 2) / (self.packs * self.max_len**2)


class Packs(NamedTuple):
    """Pack p holds documents items[offsets[p]:offsets[p + 1]], from left to right."""

    items: np.ndarray  # (N,) int64, document numbers
    offsets: np.ndarray  # (packs + 1,) int64

    def take(self, order: np.ndarray) -> "Packs":
        """Select packs, in this order; a permutation shuffles them."""
        sizes = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        moved = np.repeat(self.offsets[order] - offsets[:-1], sizes)
        return Packs(self.items[moved + np.arange(offsets[-1])], offsets)


def assign(packing: Packing, lengths: np.ndarray) -> Packs:
    """Give every document a place: the first of its length takes the first place of that length.

    Args:    lengths (N,) of the documents whose histogram was packed
    Returns: packs in the order of the strategies; `take` reorders them
    Raises:  ValueError if the lengths have another histogram
    Cost:    sorts the documents by length and copies once per place of each strategy
    """
    given = histogram(lengths, packing.max_len)
    sizes, counts = np.diff(packing.offsets), packing.counts
    packed = np.bincount(packing.lengths, np.repeat(counts, sizes), len(given))
    if (packed != given).any():
        raise ValueError("the documents to assign do not have the histogram that was packed")
    narrow = np.min_scalar_type(packing.max_len)  # 16 bits, which NumPy sorts in linear time
    sorted_items = np.argsort(np.asarray(lengths).astype(narrow), kind="stable")
    first = np.cumsum(sizes * counts) - sizes * counts  # (S,) where a strategy's documents begin
    place = np.repeat(first - packing.offsets[:-1], sizes) + np.arange(len(packing.lengths))
    by_length = np.argsort(packing.lengths, kind="stable")
    columns = (place, np.repeat(counts, sizes), np.repeat(sizes, sizes))
    items, taken = np.empty(len(sorted_items), np.int64), 0
    for start, packs, size in zip(*(column[by_length].tolist() for column in columns), strict=True):
        items[start : start + packs * size : size] = sorted_items[taken : taken + packs]
        taken += packs
    return Packs(items, np.concatenate(([0], np.cumsum(np.repeat(sizes, counts)))))


def balanced(work: np.ndarray, multiple: int = 1) -> np.ndarray:
    """Order rows so that consecutive shares of equal size have nearly equal work.

    The rows are divided into p shares, where p is the largest prime factor of their number, and
    each share is divided likewise, down to single rows. So one order serves any number of ranks
    that divides the rows, and the micro-batches within a rank's share come out even too. It depends
    neither on the number of ranks nor on what the work is.

    Args:    work     (R,) of each row, such as the sum of its documents' squared lengths
             multiple divide the rows as if empty ones filled them up to a multiple of this. Meant
                      for step sizes that the ranks need not divide: without it a prime number of
                      rows is divided into single rows at once, that is, sorted by work
    Returns: (R,) row numbers; 0..R-1 if all rows have the same work
    Cost:    O(R log R); 4,096 rows in 6 ms
    Example: work [4, 3, 2, 1] in two shares: rows 0 and 3, rows 1 and 2
    """
    R = len(work)
    if R == 0 or work.min() == work.max():
        return np.arange(R)
    work = np.pad(work, (0, -R % multiple))
    shares = np.arange(len(work))[None]  # (G, n)
    for p in prime_factors(len(work)):
        shares = parted(work, shares, p)
    return shares[shares < R]


def parted(work: np.ndarray, groups: np.ndarray, p: int) -> np.ndarray:
    """Divide each group (G, n) of row numbers into p shares of similar work: (G p, n / p).

    Rows are dealt like cards, heaviest first, from left to right and back; then the heaviest and
    the lightest share swap the two rows that bring them closest, for as long as that helps.
    """
    G, n = groups.shape
    order = np.argsort(-work[groups], axis=1, kind="stable")
    dealt = np.take_along_axis(groups, order, axis=1).reshape(G, n // p, p)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    shares = dealt.swapaxes(1, 2).copy()  # (G, p, n / p)
    group, stride = np.arange(G), -(-n // p // CANDIDATES)
    for _ in range(min(SWAPS * (p - 1), MOST_SWAPS)):
        loads = work[shares].sum(2)  # (G, p)
        heavy, light = loads.argmax(1), loads.argmin(1)
        apart = loads[group, heavy] - loads[group, light]  # (G,)
        from_heavy = work[shares[group, heavy, ::stride]]  # (G, k)
        from_light = work[shares[group, light, ::stride]]
        swapped = 2 * (from_heavy[:, :, None] - from_light[:, None, :])  # (G, k, k)
        left = np.abs(apart[:, None, None] - swapped).reshape(G, -1)
        i, j = np.divmod(left.argmin(1), from_heavy.shape[1])
        helps = left.min(1) < apart
        if not helps.any():
            break
        a = group[helps], heavy[helps], i[helps] * stride
        b = group[helps], light[helps], j[helps] * stride
        shares[a], shares[b] = shares[b], shares[a]
    return shares.reshape(G * p, n // p)


def prime_factors(n: int) -> list[int]:
    """The prime factors of n, largest first: 24 is [3, 2, 2, 2]."""
    factors: list[int] = []
    p = 2
    while n > 1:
        while n % p == 0:
            factors.insert(0, p)
            n //= p
        p += 1
    return factors
