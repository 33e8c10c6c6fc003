"""Sequence packing: pieces of documents side by side in rows of equal length, with little padding.

Decides which piece goes into which row. It does not isolate the pieces from each other: that is the
work of `doc_ids` and `positions`, which attention honours (model.TokenMeta).

Paper: Krell et al., arXiv 2107.02027. Their longest-pack-first histogram packer needs as many rows
as best-fit decreasing, which is implemented here, item by item.

    python packing.py 100 90 60 50 40 30 --capacity 128         # which length goes into which row
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class PackConfig:
    on: bool = field(
        default=False,
        metadata={"help": "lay pieces of documents side by side in full rows, isolated by a mask"},
    )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into rows, longest first, each into the fullest row that still has room for it.

    Paper:   arXiv 2107.02027, section 3.1 (best-fit decreasing; of equal items the first first)
    Args:    lengths  N lengths in tokens, each 1 <= length <= capacity
             capacity tokens of a row
    Returns: rows, each a list of item numbers in the order in which they lie in it
    Raises:  ValueError if a length does not fit a row
    Cost:    O(N log N) comparisons; at most 11/9 of the fewest rows possible, plus one
    Example: best_fit([3, 6, 5, 2], 8) == [[1, 3], [2, 0]]: 6 + 2 and 5 + 3 fill two rows of 8
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row) of every row that is not full, sorted
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        length = lengths[item]
        if not 1 <= length <= capacity:
            raise ValueError(f"a piece of {length} tokens does not fit a row of 1 to {capacity}")
        fullest = bisect_left(spaces, (length, 0))
        if fullest == len(spaces):
            rows.append([item])
            space, row = capacity, len(rows) - 1
        else:
            space, row = spaces.pop(fullest)
            rows[row].append(item)
        if space > length:
            insort(spaces, (space - length, row))
    return rows


class Packs(NamedTuple):
    items: np.ndarray  # (N,) item numbers, pack after pack
    first: np.ndarray  # (P + 1,) pack p holds the items first[p] to first[p + 1]


def pack(lengths: np.ndarray, capacity: int) -> Packs:
    rows = sorted(best_fit(lengths.tolist(), capacity))
    items = np.array([item for row in rows for item in row], np.int64)
    return Packs(items, np.cumsum([0, *map(len, rows)]))


def balanced(work: np.ndarray) -> np.ndarray:
    """An order of rows in which equal shares, one after the other, have nearly equal work.

    The rows are parted into p shares, p the largest prime factor of their number, each of these
    likewise, down to single rows. So one order serves any number of ranks that divides the rows:
    which rows share a step, and what number each has, does not depend on it. The micro-batches
    within a rank's share come out even too.

    Args:    work (R,) of each row, such as the sum of its squared lengths of documents
    Returns: (R,) row numbers; 0..R-1 where all rows have the same work
    Cost:    O(R log R); 4,096 rows in some 20 ms
    Example: work [4, 3, 2, 1] in two shares: rows 0 and 3, rows 1 and 2
    """
    shares = np.arange(len(work))[None]  # (G, n)
    if len(work) == 0 or work.min() == work.max():
        return shares[0]
    for p in prime_factors(len(work)):
        shares = parted(work, shares, p)
    return shares[:, 0]


SWAPS = 16  # at most, of each two shares
LOOKED_AT = 32  # rows of a share that may be swapped


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
    for _ in range(SWAPS * (p - 1)):
        loads = work[shares].sum(2)  # (G, p)
        heavy, light = loads.argmax(1), loads.argmin(1)
        apart = loads[group, heavy] - loads[group, light]  # (G,)
        one = work[shares[group, heavy, ::stride]]  # (G, k)
        other = work[shares[group, light, ::stride]]
        left = np.abs(apart[:, None, None] - 2 * (one[:, :, None] - other[:, None, :])).reshape(
            G, -1
        )
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


def main(argv: list[str] | None = None) -> None:
    from support import runtime

    parser = runtime.Parser(prog="packing.py", description="Pack lengths into rows.")
    parser.add_argument("lengths", type=int, nargs="+", help="lengths in tokens")
    parser.add_argument("--capacity", type=int, default=128, help="tokens of a row")
    args = parser.parse_args(argv)
    if args.capacity < 1:
        raise ValueError(f"--capacity {args.capacity}: a row has 1 token or more")
    rows = best_fit(args.lengths, args.capacity)
    for row in rows:
        lengths = [args.lengths[item] for item in row]
        print(f"{' + '.join(map(str, lengths)):>30} = {sum(lengths)} of {args.capacity}")
    tokens = sum(args.lengths)
    packed, alone = len(rows) * args.capacity, len(args.lengths) * args.capacity
    print(f"padding: {1 - tokens / packed:.1%} in {len(rows)} rows, ", end="")
    print(f"{1 - tokens / alone:.1%} with one item a row")


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
