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
