"""Sequence packing: put several documents into each row, so that rows have little padding.

This file decides which document goes into which row; in training, documents are pieces of at most a
row. Attention keeps the documents of a row apart by `doc_ids` (model.TokenMeta).

Documents of equal length are interchangeable, so a packer reads only how many there are of each
length. It chooses patterns: a pattern is the lengths of the documents in one row (the paper calls
it a strategy). Six documents, longest first, each in the fullest row of 10 tokens with room:

    documents    0: 7 tokens   1: 6   2: 5   3: 5   4: 4   5: 3
    pack         one row of each pattern (7, 3), (6, 4), (5, 5)
    assign       rows of documents (0, 5), (1, 4), (2, 3)

In reading order: configuration, `pack_lengths` and its three steps, least squares, the command.
Packing acts where the code says `settings.pack.on`:

    config.py   build, check      `resolved` fills in defaults and refuses what cannot work
                samples_kind      samples are pieces of documents, not rows of the stream
    announce.py announce          says how attention keeps documents apart
    plan.py     Plan.__init__     the pace of a length curriculum; whether steps share windows
                Plan.rows_of_step sorts packed rows, so that ranks get equal work
                Plan.window_at    calls `packed`, and so `pack_lengths`

Paper: Krell et al., arXiv 2107.02027. Packers are compared in docs/measured.md.

    python packing.py 7 6 5 5 4 3 --max-len 10         # which lengths share a row
    python packing.py STORE --max-len 512              # what packing would gain
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from support.numbers import count
from support.process import Parser, exit_cleanly
from support.settings import flag

# lpfhp   longest pack first: best fit, the longest documents first
# spfhp   shortest pack first: worst fit, the longest documents first
# nnlshp  the paper's least squares over all patterns that fill a row; needs SciPy
PACKERS = ("lpfhp", "spfhp", "nnlshp")
BATCHES = ("rows", "documents")  # of these a packed step has as many as an unpacked one
DEFAULT = "lpfhp"  # needs the fewest rows without SciPy (docs/measured.md)
MOST_IN_RUN = 10_000  # patterns that nnlshp may weigh in each window of a run, in some seconds
MOST_AT_ALL = 100_000  # patterns that it may weigh: a matrix of 400 MB at length 512


@dataclass(frozen=True)
class PackConfig:
    on: bool = flag("--pack", False, "fill rows with pieces of documents, kept apart by a mask")
    max_per_row: int | None = flag("--pack-max-per-row", None, "pieces (default: any)", least=1)
    batch: str | None = flag(
        "--pack-batch", None, "what a step keeps constant (default: rows; BERT documents)", BATCHES
    )
    mask: bool = flag("--pack-mask", True, "documents of a row do not see each other")
    packer: str = flag("--pack-packer", DEFAULT, "algorithm; nnlshp needs SciPy", PACKERS)


def resolved(config: PackConfig, seq_len: int, is_bert: bool) -> PackConfig:
    """Return the settings with defaults filled in.

    By default a packed step trains on as much text as an unpacked one, so the learning rate can
    stay. A BERT's unpacked rows hold one document each, so its packed step has the same documents
    in fewer rows. A GPT's unpacked rows are full, so its packed step has as many rows.

    Raises: ValueError for a packer that this machine or this run cannot use
    """
    most = min(config.max_per_row or seq_len, seq_len)
    if config.packer == "nnlshp":
        require_scipy()
        if number_that_fill(seq_len, most) > MOST_IN_RUN:
            raise ValueError(f"--pack-max-per-row {most}: nnlshp has over {MOST_IN_RUN:,} patterns")
    return replace(config, batch=config.batch or ("documents" if is_bert else "rows"))


# ---- from lengths to rows

Pattern = tuple[int, ...]  # the lengths of the documents in one row, longest first


class Packing(NamedTuple):
    """Row r holds documents items[offsets[r]:offsets[r + 1]], from left to right."""

    items: np.ndarray  # (N,) int64, document numbers
    offsets: np.ndarray  # (rows + 1,) int64


def pack_lengths(
    lengths: ArrayLike, max_len: int, packer: str = DEFAULT, max_per_row: int | None = None
) -> Packing:
    """Pack documents of these lengths into rows of `max_len` tokens.

    Rows are sorted by their patterns, longest document first. Documents of equal length are placed
    in the order given.

    Args:    max_per_row most documents in a row; None: as many as fit
    Raises:  ValueError for a document that does not fit a row, an unknown packer, or missing SciPy
    Example: pack_lengths([3, 6, 5, 2], 8) has items [1, 3, 2, 0] and offsets [0, 2, 4]
    """
    lengths = np.asarray(lengths, np.int64)
    counts = histogram(lengths, max_len)
    return assign(pack(counts, packer, max_per_row), lengths, counts)


def histogram(lengths: np.ndarray, max_len: int) -> np.ndarray:
    """Count documents by length, (max_len + 1,): histogram([3, 1, 3], 4) == [0, 1, 0, 2, 0]."""
    for extreme in (lengths.min(initial=1), lengths.max(initial=1)):
        if not 1 <= extreme <= max_len:
            raise ValueError(f"a document of {extreme} tokens does not fit a row (1 to {max_len})")
    return np.bincount(lengths, minlength=max_len + 1)


def pack(
    counts: np.ndarray, packer: str = DEFAULT, max_per_row: int | None = None
) -> dict[Pattern, int]:
    """Choose how many rows of each pattern to use, given a histogram of the lengths.

    Returns: rows of each pattern, in descending order of the patterns
    Example: two documents of 5 tokens and one of 3, in rows of 8: {(5, 3): 1, (5,): 1}
    """
    max_len = len(counts) - 1
    if max_per_row is not None and max_per_row < 1:
        raise ValueError(f"max_per_row {max_per_row} must be at least 1")
    most = min(max_per_row or max_len, max_len)
    if packer == "nnlshp":
        rows = least_squares(counts, most)
    elif packer in PACKERS:
        rows = greedy(counts, most, tightest=packer == "lpfhp")
    else:
        raise ValueError(f"packer {packer} is unknown: choose one of {', '.join(PACKERS)}")
    return dict(sorted(rows.items(), reverse=True))


def greedy(counts: np.ndarray, max_per_row: int, tightest: bool) -> Counter[Pattern]:
    """Place documents, longest first, each into the tightest or the loosest row that has room.

    All documents of one length are placed together. `tightest` is best fit (LPFHP), and needs as
    many rows as placing documents one by one. Otherwise it is worst fit (SPFHP); like Graphcore's
    code, that opens one new row per document that does not fit, even where a row could hold two.

    Cost: each iteration finishes a length or a group of equal rows
    """
    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)[::-1].tolist()
    finished: Counter[Pattern] = Counter()
    open_with: list[list[tuple[int, Pattern]]] = [[] for _ in counts]  # rows, by tokens left
    spaces = 0  # bit s is set if open_with[s] is not empty, so one bit scan finds the next row

    def keep(rows: int, pattern: Pattern) -> None:
        nonlocal spaces
        space = max_len - sum(pattern)
        if len(pattern) < max_per_row and space >= lengths[-1]:
            open_with[space].append((rows, pattern))
            spaces |= 1 << space
        else:
            finished[pattern] += rows

    for length in lengths:
        left = int(counts[length])
        while left:
            fitting = spaces >> length
            if fitting:
                bit = fitting & -fitting if tightest else fitting  # the lowest or the highest
                space = length + bit.bit_length() - 1
                rows, pattern = open_with[space].pop()
                if not open_with[space]:
                    spaces ^= 1 << space
            else:
                space, rows, pattern = max_len, left, ()
            slots = max_per_row - len(pattern)
            times = min(space // length, slots, left) if tightest else 1  # in each row
            changed = min(rows, left // times)
            keep(changed, pattern + (length,) * times)
            if fitting and rows > changed:
                keep(rows - changed, pattern)
            left -= changed * times
    for groups in open_with:
        for rows, pattern in groups:
            finished[pattern] += rows
    return finished


def assign(rows_of: dict[Pattern, int], lengths: np.ndarray, counts: np.ndarray) -> Packing:
    """Give every document a place.

    Args: rows_of rows of each pattern, which have as many places for each length as documents
          lengths (N,) of the documents
          counts  their histogram
    """
    narrow = np.min_scalar_type(len(counts) - 1)  # 16 bits or fewer are sorted in linear time
    by_length = np.argsort(lengths.astype(narrow), kind="stable")
    next_at = (np.cumsum(counts) - counts).tolist()  # in by_length, for each length
    items, start = np.empty(len(lengths), np.int64), 0
    for pattern, rows in rows_of.items():
        stop = start + rows * len(pattern)
        table = items[start:stop].reshape(rows, len(pattern))  # a view
        for place, length in enumerate(pattern):
            first = next_at[length]
            table[:, place] = by_length[first : first + rows]
            next_at[length] += rows
        start = stop
    assert next_at == np.cumsum(counts).tolist(), "the packer has to place each document once"
    sizes = np.array([len(pattern) for pattern in rows_of], np.int64)
    ends = np.cumsum(np.repeat(sizes, list(rows_of.values())))
    return Packing(items, np.concatenate(([0], ends)))


# ---- least squares


def require_scipy() -> None:
    if find_spec("scipy") is None:
        raise ValueError("the packer nnlshp needs SciPy: pip install -e '.[pack]'")


def least_squares(counts: np.ndarray, max_per_row: int) -> Counter[Pattern]:
    """NNLSHP: fit the histogram by a number of rows of each full pattern, and round.

    Paper: arXiv 2107.02027, section 3.1
    """
    require_scipy()
    from scipy.optimize import nnls

    max_len = len(counts) - 1
    if number_that_fill(max_len, max_per_row) > MOST_AT_ALL:
        raise ValueError(f"max_per_row {max_per_row}: nnlshp has over {MOST_AT_ALL:,} patterns")
    patterns = list(patterns_that_fill(max_len, max_per_row, max_len))
    places = np.array([np.bincount(pattern, minlength=max_len + 1)[1:] for pattern in patterns]).T
    # As in Graphcore's packedBERT/nnlshp.py: an empty place for a short document is little padding.
    weights = np.where(np.arange(1, max_len + 1) <= 8, 0.09, 1.0)
    rows, _ = nnls(weights[:, None] * places, weights * counts[1:])
    rounded = zip(patterns, np.rint(rows).astype(int).tolist(), strict=True)
    return fill({pattern: n for pattern, n in rounded if n}, counts)


def number_that_fill(space: int, most: int) -> int:
    """Count what `patterns_that_fill` yields if any length is allowed; may stop above MOST_AT_ALL.

    A number has as many partitions into at most k parts as into parts of at most k.
    """
    ways = [1] + [0] * space
    for part in range(1, min(most, space) + 1):
        for total in range(part, space + 1):
            ways[total] += ways[total - part]
        if ways[space] > MOST_AT_ALL:
            break
    return ways[space]


def patterns_that_fill(space: int, most: int, longest: int) -> Iterator[Pattern]:
    """Yield all ways to write `space` as a sum of at most `most` lengths, none above `longest`.

    Example: list(patterns_that_fill(4, 2, 4)) == [(4,), (3, 1), (2, 2)]
    """
    if space <= longest:
        yield (space,)
    if most > 1:
        for length in range(min(space - 1, longest), -(-space // most) - 1, -1):
            for rest in patterns_that_fill(space - length, most - 1, length):
                yield (length, *rest)


def fill(rows_of: dict[Pattern, int], counts: np.ndarray) -> Counter[Pattern]:
    """Fill rows of these patterns with documents, the longest places first.

    Places for which there are no documents stay empty. A document without a place gets a row of its
    own, as in Graphcore's code.

    Example: two rows of (5, 3) and documents 5, 4, 3, 2: one row each of (5, 3), (4,) and (2,)
    """
    left = counts.tolist()
    places = defaultdict(list)  # the patterns that have a place for a length
    for pattern in rows_of:
        for length in pattern:
            places[length].append(pattern)
    filled = {pattern: Counter({(): rows}) for pattern, rows in rows_of.items()}
    for length in sorted(places, reverse=True):
        for pattern in places[length]:
            before, filled[pattern] = filled[pattern], Counter()
            for documents, rows in before.items():
                taken = min(rows, left[length])
                left[length] -= taken
                if taken:
                    filled[pattern][(*documents, length)] += taken
                if rows > taken:
                    filled[pattern][documents] += rows - taken
    result = Counter({(length,): n for length, n in enumerate(left) if n})
    for groups in filled.values():
        result.update(groups)
    del result[()]  # rows that stayed empty
    return result


# ---- the command: show what packing saves, for given lengths or a store

SHOWN = 12  # patterns, the most frequent first


def main(argv: list[str] | None = None) -> None:
    from data import Samples
    from support.store import Store

    parser = Parser(prog="packing.py", description=__doc__.split("\n")[0])
    sources = "lengths in tokens, or a folder made by prepare.py"
    parser.add_argument("source", nargs="+", help=sources)
    parser.add_argument("--packer", choices=PACKERS, default=DEFAULT)
    parser.add_argument("--max-len", type=count, default=256, help="tokens in a row (256)")
    parser.add_argument("--max-per-row", type=count, help="most documents in a row (default: any)")
    args = parser.parse_args(argv)
    if args.max_len > 1 << 24:  # lengths are counted in an array
        raise ValueError(f"--max-len {args.max_len} is too long: choose at most 2^24 tokens")
    if all(text.isdecimal() for text in args.source):
        lengths = np.array([int(text) for text in args.source])
    elif len(args.source) > 1 or not Path(args.source[0]).exists():
        raise ValueError(f"{' '.join(args.source)}: name {sources}")
    else:
        samples = Samples(Store.open(args.source[0]), "pieces", args.max_len)
        lengths = np.diff(samples.spans(np.arange(len(samples))))[:, 0]
    show(pack(histogram(lengths, args.max_len), args.packer, args.max_per_row), args.max_len)


def show(rows_of: dict[Pattern, int], max_len: int) -> None:
    """Print rows, the share that is not padding, documents per row, and attention within documents
    as a share of attention over whole rows; then the most frequent patterns.
    """
    rows = sum(rows_of.values())
    documents = sum(n * len(pattern) for pattern, n in rows_of.items())
    tokens = sum(n * sum(pattern) for pattern, n in rows_of.items())
    squares = sum(n * length**2 for pattern, n in rows_of.items() for length in pattern)
    print(f"{'rows':>10} {'full':>10} {'a row':>10} {'attention':>10}")
    full, attention = tokens / (rows * max_len), squares / (rows * max_len**2)
    print(f"{rows:10,} {full:10.3%} {documents / rows:10.3f} {attention:10.1%}")
    for pattern, n in sorted(rows_of.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"{n:10,} of {' + '.join(map(str, pattern))} = {sum(pattern)} of {max_len}")


if __name__ == "__main__":
    exit_cleanly(main)
