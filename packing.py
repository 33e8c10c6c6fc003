"""Sequence packing: put several documents into each row, so that rows have little padding.

This file decides which document goes into which row. It does not isolate the documents of a row
from each other: attention does, using `doc_ids` and `positions` (model.TokenMeta). In reading
order: configuration, histograms and results, the packers, `pack` and `assign`, the command. The
technique acts where the code says `settings.pack.on`:

    config.py   build, check      `resolved` fills in defaults and refuses what cannot work
                samples_kind      samples are pieces of documents, not rows of the stream
    plan.py     Plan.__init__     a length curriculum uses another pace; rows may have padding
                Plan.__call__     calls packed_rows, and so `pack_lengths` in packed_window
                Plan.full_step    rows keep their full length

With --pack-batch documents, the documents of each step are packed by themselves (`window_steps` and
`windows` in plan.py), and a micro-batch has fewer rows (`main` in train.py). evaluate.py always
packs held-out documents with `pack_lengths`, whether or not the run was packed.

Documents of equal length are interchangeable, so a packer needs only a histogram, and a billion
documents take no longer than a million. A packer returns a Packing: which lengths share a pack (a
strategy), and how many packs follow each strategy. `assign` then gives every document its place.

    lpfhp    longest pack first: best fit, longest documents first
    spfhp    shortest pack first: worst fit, longest documents first
    nnlshp   the paper's least squares over all strategies that fill a pack; needs SciPy

Paper: Krell et al., arXiv 2107.02027. docs/packing.md works an example by hand and has the
measurements.

    python packing.py 100 90 60 50 40 30 --max-len 128          # which lengths share a row
    python packing.py STORE --max-len 512                       # what packing would gain
    python packing.py HISTOGRAM.json --packer spfhp --max-per-pack 3
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.settings import flag

PACKERS = ("lpfhp", "spfhp", "nnlshp")
DEFAULT = "lpfhp"  # needs the fewest packs without SciPy (docs/packing.md)
PATTERNS = 10_000  # most patterns nnlshp may weigh in each window of a run: takes some seconds
MOST = 100_000  # most patterns it may weigh at all: a matrix of 400 MB at length 512

Pattern = tuple[int, ...]  # the lengths of the documents in one pack


@dataclass(frozen=True)
class PackConfig:
    on: bool = flag(False, "fill rows with pieces of documents, kept apart by a mask")
    max_per_row: int | None = flag(None, "most pieces in a row (default: as many as fit)", least=1)
    batch: str | None = flag(
        None, "what stays constant per step (default: rows; BERT documents)", ("rows", "documents")
    )
    packer: str = flag(DEFAULT, "algorithm; nnlshp needs SciPy and can take minutes", PACKERS)


def resolved(config: PackConfig, seq_len: int, is_bert: bool) -> PackConfig:
    """Return the settings with defaults filled in.

    By default a packed step trains on as much text as an unpacked one, so the learning rate can
    stay. A BERT's unpacked rows hold one document each, so its packed step has the same documents
    in fewer rows. A GPT's unpacked rows are filled with text cut from the stream, so its packed
    step has the same number of rows.

    Raises: ValueError for a packer that this machine or this run cannot use
    """
    most = min(config.max_per_row or seq_len, seq_len)
    if config.packer == "nnlshp":
        require_scipy("--pack-packer")
        if number_that_fill(seq_len, most) > PATTERNS:
            raise ValueError(
                f"--pack-packer nnlshp weighs every way to fill a row of {seq_len} with at most"
                f" {most} pieces, and more than {PATTERNS:,} ways take too long: lower"
                " --pack-max-per-row, or choose another packer"
            )
    return replace(config, batch=config.batch or ("documents" if is_bert else "rows"))


# ---- histograms and results


def histogram(lengths: Sequence[int] | np.ndarray, max_len: int) -> np.ndarray:
    """Count the documents of each length; returns (max_len + 1,) counts.

    Raises:  ValueError for a document that does not fit a row
    Example: histogram([3, 1, 3], 4) == [0, 1, 0, 2, 0]
    """
    lengths = np.asarray(lengths)
    for extreme in (lengths.min(initial=1), lengths.max(initial=1)):
        if not 1 <= extreme <= max_len:
            raise ValueError(f"a document of {extreme} tokens does not fit a row (1 to {max_len})")
    return np.bincount(lengths.astype(np.int64, copy=False), minlength=max_len + 1)


class Packing(NamedTuple):
    """Which lengths share a pack (a strategy), and how many packs follow each strategy.

    Strategy s combines lengths[offsets[s]:offsets[s + 1]], longest first.
    """

    lengths: np.ndarray  # (places,) int64
    offsets: np.ndarray  # (S + 1,) int64
    counts: np.ndarray  # (S,) int64
    max_len: int

    @property
    def packs(self) -> int:
        return int(self.counts.sum())

    def total(self, of_each_length: np.ndarray) -> float:
        """Sum over all documents a value that depends on length; takes (max_len + 1,) values."""
        sums = np.add.reduceat(of_each_length[self.lengths], self.offsets[:-1])
        return float(sums @ self.counts)

    @property
    def factor(self) -> float:
        """Documents per pack: one document per row would need this many times the rows."""
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


# ---- greedy packers


class Filled(NamedTuple):
    """A number of packs that all hold the same lengths."""

    packs: int
    pattern: Pattern


def greedy(counts: np.ndarray, max_per_pack: int, tightest: bool) -> list[Filled]:
    """Place documents, longest first, each into the tightest or the loosest pack that has room.

    All documents of one length are placed together. `tightest` is best fit (LPFHP), and needs as
    many packs as placing documents one by one. Otherwise it is worst fit (SPFHP); like Graphcore's
    code, that opens one new pack per document that does not fit, even where a pack could hold two.

    Cost: each iteration finishes a length or a group of equal packs. Bit s of the integer `spaces`
          says that an open pack has s tokens left, so one bit scan finds the next pack
    """
    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)[::-1].tolist()
    closed: list[Filled] = []
    open_with: list[list[Filled]] = [[] for _ in range(max_len + 1)]  # by tokens left
    spaces = 0  # bit s is set if open_with[s] is not empty

    def keep(packs: int, pattern: Pattern) -> None:
        nonlocal spaces
        space = max_len - sum(pattern)
        if len(pattern) < max_per_pack and space >= lengths[-1]:
            open_with[space].append(Filled(packs, pattern))
            spaces |= 1 << space
        else:
            closed.append(Filled(packs, pattern))

    for length in lengths:
        left = int(counts[length])
        while left:
            fitting = spaces >> length
            if fitting:
                space = length + (fitting & -fitting if tightest else fitting).bit_length() - 1
                packs, pattern = open_with[space].pop()
                if not open_with[space]:
                    spaces ^= 1 << space
            else:
                space, packs, pattern = max_len, left, ()
            slots = max_per_pack - len(pattern)
            times = min(space // length, slots, left) if tightest else 1  # in each pack
            changed = min(packs, left // times)
            keep(changed, pattern + (length,) * times)
            if fitting and packs > changed:
                keep(packs - changed, pattern)
            left -= changed * times
    return closed + [group for groups in open_with for group in groups]


# ---- least squares


def require_scipy(flag: str) -> None:
    if find_spec("scipy") is None:
        raise ValueError(f"{flag} nnlshp needs SciPy: pip install -e '.[pack]'")


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


def number_that_fill(space: int, most: int) -> int:
    """Count what `patterns_that_fill` yields if any length is allowed; may stop above MOST.

    A number has as many partitions into at most k parts as into parts of at most k.
    """
    ways = [1] + [0] * space
    for part in range(1, min(most, space) + 1):
        for total in range(part, space + 1):
            ways[total] += ways[total - part]
        if ways[space] > MOST:
            break
    return ways[space]


def least_squares(counts: np.ndarray, max_per_pack: int) -> list[Filled]:
    """NNLSHP: choose by least squares how many packs of each full pattern to use, and round.

    If the rounded packs have too many places for a length, some stay empty. If they have too few,
    each remaining document gets a pack of its own, as in Graphcore's packedBERT/nnlshp.py.
    """
    patterns, packs = regress(counts, max_per_pack)
    filled, left = fill(patterns, packs, counts)
    return filled + [Filled(int(left[length]), (int(length),)) for length in np.flatnonzero(left)]


def regress(counts: np.ndarray, max_per_pack: int) -> tuple[list[Pattern], np.ndarray]:
    """Fit the histogram by a number of packs of each full pattern, with least squares.

    Paper:   arXiv 2107.02027, section 3.1 (NNLSHP); lengths up to 8 weigh 0.09, as in Graphcore's
             packedBERT/nnlshp.py, because an empty place for a short document is little padding
    Returns: patterns; (patterns,) int64 packs of each, which have too many places for some lengths
             and too few for others
    Raises:  ValueError if there are too many patterns
    """
    from scipy.optimize import nnls

    max_len = len(counts) - 1
    if number_that_fill(max_len, max_per_pack) > MOST:
        raise ValueError(
            f"--packer nnlshp weighs every way to fill a pack of {max_len}, which are more than"
            f" {MOST:,} with --max-per-pack {max_per_pack}: lower it, or choose another packer"
        )
    patterns = list(patterns_that_fill(max_len, max_per_pack, max_len))
    held = np.zeros((max_len, len(patterns)))  # how often each length occurs in each pattern
    for j, pattern in enumerate(patterns):
        for length in pattern:
            held[length - 1, j] += 1
    weights = np.where(np.arange(1, max_len + 1) <= 8, 0.09, 1.0)
    packs, _ = nnls(weights[:, None] * held, weights * counts[1:])
    return patterns, np.rint(packs).astype(np.int64)


def fill(
    patterns: list[Pattern], packs: np.ndarray, counts: np.ndarray
) -> tuple[list[Filled], np.ndarray]:
    """Fill packs of the given patterns with documents, the longest places first.

    Args:    packs (patterns,) integers: packs of each pattern
    Returns: the packs that got documents; (max_len + 1,) counts of the documents left over
    Example: two packs of (5, 3) and documents 5, 4, 3, 2: [(1, (5, 3))], and 4 and 2 are left
    """
    left = counts.tolist()
    used = [j for j, n in enumerate(packs) if n > 0]
    filled = {j: [Filled(int(packs[j]), ())] for j in used}  # pattern -> its packs so far
    places = sorted((-length, j) for j in used for length in patterns[j])
    for negative, j in places:
        length, before = -negative, filled[j]
        filled[j] = []
        for empty, pattern in before:
            taken = min(empty, left[length])
            left[length] -= taken
            if taken:
                filled[j].append(Filled(taken, (*pattern, length)))
            if empty > taken:
                filled[j].append(Filled(empty - taken, pattern))
    return [group for j in used for group in filled[j] if group.pattern], np.array(left)


# ---- pack and assign


def pack(counts: np.ndarray, packer: str = DEFAULT, max_per_pack: int | None = None) -> Packing:
    """Pack a histogram: decide which lengths share a pack, and how many such packs there are.

    Args:    counts       (max_len + 1,) documents of each length; counts[0] must be 0
             packer       one of PACKERS
             max_per_pack most documents in a pack; None: as many as fit
    Raises:  ValueError for counts that are not a histogram, an unknown packer, or missing SciPy
    Cost:    lpfhp takes 3 ms for lengths up to 512 and 66 ms up to 4,096, whatever the number of
             documents (results/packers.jsonl)
    Example: two documents of 5 and one of 3 in packs of 8: pack([0, 0, 0, 1, 0, 2, 0, 0, 0]) has
             the strategies (5, 3) and (5,), one pack of each
    """
    counts = np.asarray(counts)
    max_len = len(counts) - 1
    if counts.dtype.kind not in "iu" or counts.min() < 0 or counts[0] or not counts.any():
        raise ValueError("the histogram needs counts of 0 or more, not all 0, none at length 0")
    if packer not in PACKERS:
        raise ValueError(f"--packer {packer} is unknown: choose one of {', '.join(PACKERS)}")
    if max_per_pack is not None and max_per_pack < 1:
        raise ValueError(f"--max-per-pack {max_per_pack}: allow at least 1 document in a pack")
    most = min(max_per_pack or max_len, max_len)
    if packer == "nnlshp":
        require_scipy("--packer")
        filled = least_squares(counts, most)
    else:
        filled = greedy(counts, most, tightest=packer == "lpfhp")
    packs: Counter[Pattern] = Counter()
    for number, pattern in filled:
        packs[tuple(sorted(pattern, reverse=True))] += number
    strategies = sorted(packs, reverse=True)
    return Packing(
        lengths=np.fromiter(chain.from_iterable(strategies), np.int64),
        offsets=np.cumsum([0, *map(len, strategies)]),
        counts=np.array([packs[strategy] for strategy in strategies]),
        max_len=max_len,
    )


def assign(packing: Packing, lengths: np.ndarray) -> Packs:
    """Give every document a place; documents of equal length fill their places in order.

    Args:    lengths (N,) lengths of the documents whose histogram was packed
    Returns: packs in the order of the strategies
    Raises:  ValueError if the lengths have a different histogram
    Cost:    sorts the documents by length, then makes one copy per place of each strategy
    """
    given = histogram(lengths, packing.max_len)
    sizes, counts = np.diff(packing.offsets), packing.counts
    packed = np.bincount(packing.lengths, np.repeat(counts, sizes), len(given))
    if (packed != given).any():
        raise ValueError("these documents do not have the histogram that was packed")
    narrow = np.min_scalar_type(packing.max_len)  # 16 bits or fewer are sorted in linear time
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


def pack_lengths(
    lengths: Sequence[int] | np.ndarray,
    max_len: int,
    packer: str = DEFAULT,
    max_per_pack: int | None = None,
) -> Packs:
    """Pack documents; returns the numbers of the documents in each pack.

    Documents of equal length are placed in the order given. Packs are sorted by their longest
    document, longest first.

    Example: pack_lengths([3, 6, 5, 2], 8) has items [1, 3, 2, 0] and offsets [0, 2, 4]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    return assign(pack(histogram(lengths, max_len), packer, max_per_pack), lengths)


# ---- the command: show what packing saves, for given lengths, a histogram or a token store

ROWS = 12  # strategies printed, the most frequent first


def main(argv: list[str] | None = None) -> None:
    from data import Samples
    from support import process
    from support.store import Store

    parser = process.Parser(prog="packing.py", description=__doc__.split("\n")[0])
    sources = "lengths in tokens, a folder made by prepare.py, or a histogram (.json)"
    parser.add_argument("source", nargs="+", help=sources)
    parser.add_argument("--packer", choices=PACKERS, default=DEFAULT)
    parser.add_argument("--max-len", type=int, default=256, help="tokens in a row (256)")
    parser.add_argument("--max-per-pack", type=int, help="most documents in a row (default: any)")
    args = parser.parse_args(argv)
    if args.max_len < 1:
        raise ValueError(f"--max-len {args.max_len}: a row needs at least 1 token")

    path = Path(args.source[0])
    if all(text.lstrip("-").isdecimal() for text in args.source):
        counts = histogram([int(text) for text in args.source], args.max_len)
    elif path.is_dir():
        samples = Samples(Store.open(path), "pieces", args.max_len)
        start, stop = samples.spans(np.arange(len(samples))).T
        counts = histogram(stop - start, args.max_len)
    else:
        counts = np.array([0, *json.loads(path.read_text())])
    show(pack(counts, args.packer, args.max_per_pack))


def show(packing: Packing) -> None:
    """Print what a packing saves, and its most frequent strategies."""
    print(f"{'rows':>10} {'full':>10} {'a row':>10} {'attention':>10}")
    print(
        f"{packing.packs:10,} {packing.efficiency:10.3%} {packing.factor:10.3f}"
        f" {packing.attention:10.1%}"
    )
    strategies = np.split(packing.lengths, packing.offsets[1:-1])
    for s in np.argsort(-packing.counts, kind="stable")[:ROWS]:
        terms = " + ".join(map(str, strategies[s]))
        print(f"{packing.counts[s]:10,} of {terms} = {strategies[s].sum()} of {packing.max_len}")


if __name__ == "__main__":
    from support import process

    process.exit_cleanly(main)
