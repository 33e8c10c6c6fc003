"""Documents in packs: histograms of lengths, what a packer returns, which document goes where.

A pack is what lies in one row. No packer is here: packing.py has them.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import index, mul
from typing import NamedTuple

import numpy as np

MOST_TOKENS = 2**53  # of all documents: float64 counts up to here without gaps, int64 with room
LONGEST_ROW = 2**22  # tokens: as many prices of cutting_stock.UNIT each still add up in int64


def histogram(lengths: Sequence[int] | np.ndarray, max_len: int) -> np.ndarray:
    """(max_len + 1,) how many documents have each length.

    Raises:  ValueError for a length that no row has room for
    Example: histogram([3, 1, 3], 4) == [0, 1, 0, 2, 0]
    """
    lengths = np.asarray(lengths)
    for extreme in (lengths.min(initial=1), lengths.max(initial=1)):
        if not 1 <= extreme <= max_len:
            raise ValueError(f"a document of {extreme} tokens does not fit a row of 1 to {max_len}")
    return np.bincount(lengths.astype(np.int64, copy=False), minlength=max_len + 1)


def checked(counts: Sequence[int] | np.ndarray, source: str = "the histogram") -> np.ndarray:
    """The counts as int64; ValueError unless they are a histogram that can be packed.

    Looks at Python's integers, which have no largest. Up to MOST_TOKENS every number of documents,
    packs and tokens is exact; far beyond, int64 wraps around and nothing would say so.
    """
    try:
        given = list(map(index, np.asarray(counts, object).tolist()))
    except TypeError:
        wanted = "a list of whole numbers, one for each length"
        raise ValueError(f"{source} has to be {wanted}") from None
    fewest = min(given, default=0)
    if fewest < 0:
        raise ValueError(f"{source} has {fewest} documents of length {given.index(fewest)}")
    if any(given[:1]):
        raise ValueError(f"{source} has {given[0]} documents of length 0: leave them out")
    if not any(given):
        raise ValueError(f"{source} is empty: there is no document to pack")
    tokens = sum(map(mul, given, range(len(given))))
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"{source} has {tokens:,} tokens, and packers count exactly up to {MOST_TOKENS:,}"
            " (2^53): divide every count by the same number"
        )
    return np.array(given, np.int64)


class Packing(NamedTuple):
    """Strategies, each the lengths of the documents of a pack, and how many packs of each.

    Strategy s holds lengths[offsets[s]:offsets[s + 1]]; longest first, unless packed in order.
    """

    lengths: np.ndarray  # (places,) int64
    offsets: np.ndarray  # (S + 1,) int64
    counts: np.ndarray  # (S,) int64
    max_len: int
    lower_bound: int  # packs that no packer can do without

    @property
    def packs(self) -> int:
        return int(self.counts.sum())

    def total(self, of_each_length: np.ndarray) -> int:
        """Sum a value of each length (max_len + 1,) over all documents.

        In Python's integers: squares of lengths pass int64 long before documents or tokens do.
        """
        sums = np.add.reduceat(of_each_length[self.lengths], self.offsets[:-1])
        return sum(map(mul, sums.tolist(), self.counts.tolist()))

    @property
    def factor(self) -> float:
        """Documents a pack: how many times fewer rows there are than with one document a row."""
        return self.total(np.ones(self.max_len + 1, np.int64)) / self.packs

    @property
    def efficiency(self) -> float:
        """The share of all positions that is not padding."""
        return self.total(np.arange(self.max_len + 1)) / (self.packs * self.max_len)

    @property
    def attention(self) -> float:
        """What attention within documents costs, as a share of attention over whole rows."""
        return self.total(np.arange(self.max_len + 1) ** 2) / (self.packs * self.max_len**2)


class Packs(NamedTuple):
    """Pack p holds documents items[offsets[p]:offsets[p + 1]], in the order they lie in it."""

    items: np.ndarray  # (N,) int64, numbers of documents
    offsets: np.ndarray  # (packs + 1,) int64

    def take(self, order: np.ndarray) -> "Packs":
        """The packs that `order` names, in its order: a permutation shuffles them."""
        sizes = np.diff(self.offsets)[order]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        moved = np.repeat(self.offsets[order] - offsets[:-1], sizes)
        return Packs(self.items[moved + np.arange(offsets[-1])], offsets)

    def lists(self) -> list[list[int]]:
        items, offsets = self.items.tolist(), self.offsets.tolist()
        return [items[start:stop] for start, stop in pairwise(offsets)]


def assign(packing: Packing, lengths: np.ndarray) -> Packs:
    """Name the documents: the first of a length goes to the first pack that holds this length.

    Args:    lengths (N,) of the documents, with the histogram that was packed
    Returns: packs in the order of the strategies; `take` puts them in another
    Raises:  ValueError if the lengths have another histogram
    Cost:    sorts the documents by length, and a copy for each place of each strategy
    """
    given = histogram(lengths, packing.max_len)
    sizes, counts = np.diff(packing.offsets), packing.counts
    packed = np.bincount(packing.lengths, np.repeat(counts, sizes), len(given))
    if (packed != given).any():
        raise ValueError("the documents to assign are not those of the histogram that was packed")
    narrow = np.min_scalar_type(packing.max_len)  # 16 bits, which NumPy sorts in linear time
    sorted_items = np.argsort(np.asarray(lengths).astype(narrow), kind="stable")
    first = np.cumsum(sizes * counts) - sizes * counts  # (S,) place of a strategy's first document
    place = np.repeat(first - packing.offsets[:-1], sizes) + np.arange(len(packing.lengths))
    by_length = np.argsort(packing.lengths, kind="stable")
    columns = (place, np.repeat(counts, sizes), np.repeat(sizes, sizes))
    items, taken = np.empty(len(sorted_items), np.int64), 0
    for start, packs, size in zip(*(column[by_length].tolist() for column in columns), strict=True):
        items[start : start + packs * size : size] = sorted_items[taken : taken + packs]
        taken += packs
    return Packs(items, np.concatenate(([0], np.cumsum(np.repeat(sizes, counts)))))


# ---- balance
#
# Balance: one order of a step's rows in which every rank's share is about as much work.
#
# Does not know what the work of a row is, nor how many ranks there are.
#
#     python -m pytest tests/test_balance.py


SWAPS, MOST_SWAPS = 16, 256  # at most, for each share beyond the first and in all
LOOKED_AT = 32  # rows of a share that may be swapped


def balanced(work: np.ndarray, multiple: int = 1) -> np.ndarray:
    """An order of rows in which equal shares, one after the other, have nearly equal work.

    The rows are parted into p shares, p the largest prime factor of their number, each of these
    likewise, down to single rows. So one order serves any number of ranks that divides the rows:
    which rows share a step, and what number each has, does not depend on it. The micro-batches
    within a rank's share come out even too.

    Args:    work     (R,) of each row, such as the sum of its squared lengths of documents
             multiple part them as if rows without work made up a multiple of it. For a number of
                      rows that ranks need not divide: a prime one would part into single rows,
                      which is the most work first
    Returns: (R,) row numbers; 0..R-1 where all rows have the same work
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
    """Part each group (G, n) of row numbers into p shares of like work: (G p, n / p).

    Dealt out by work like cards, in turns from left and from right; then the heaviest share and the
    lightest swap the two rows that bring them closest, as long as that helps.
    """
    G, n = groups.shape
    order = np.argsort(-work[groups], axis=1, kind="stable")
    dealt = np.take_along_axis(groups, order, axis=1).reshape(G, n // p, p)
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    shares = dealt.swapaxes(1, 2).copy()  # (G, p, n / p)
    group, stride = np.arange(G), -(-n // p // LOOKED_AT)
    for _ in range(min(SWAPS * (p - 1), MOST_SWAPS)):
        loads = work[shares].sum(2)  # (G, p)
        heavy, light = loads.argmax(1), loads.argmin(1)
        apart = loads[group, heavy] - loads[group, light]  # (G,)
        one = work[shares[group, heavy, ::stride]]  # (G, k)
        other = work[shares[group, light, ::stride]]
        swapped = 2 * (one[:, :, None] - other[:, None, :])  # (G, k, k)
        left = np.abs(apart[:, None, None] - swapped).reshape(G, -1)
        i, j = np.divmod(left.argmin(1), one.shape[1])
        helps = left.min(1) < apart
        if not helps.any():
            break
        g, a, b = group[helps], (heavy[helps], i[helps] * stride), (light[helps], j[helps] * stride)
        shares[g, *a], shares[g, *b] = shares[g, *b], shares[g, *a]
    return shares.reshape(G * p, n // p)


def prime_factors(n: int) -> list[int]:
    """In descending order: 24 is [3, 2, 2, 2]."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.insert(0, p)
            n //= p
        p += 1
    return factors
