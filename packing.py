"""Sequence packing: documents side by side in rows of equal length, with little padding.

Decides which document goes into which row. It does not isolate the documents of a row from each
other: attention does that, from `doc_ids` and `positions` (model.TokenMeta). plan.py calls
`pack_lengths` for a window of samples; support/rows/packs.py orders the rows so that equal shares
are equal work, and `Rows.of_rank` in data.py gives each rank its share.

Documents of equal length are interchangeable, so a packer needs only a histogram, and takes as long
for a billion documents as for a million. It returns a Packing: which lengths share a pack (a
strategy), and how many packs follow each strategy. `assign` then gives every document its place.

    lpfhp    longest pack first: best fit, longest documents first
    spfhp    shortest pack first: worst fit, longest documents first
    nnlshp   the paper's least squares over all strategies that fill a pack; needs SciPy

Paper: Krell et al., arXiv 2107.02027. docs/packing.md has an example by hand and the numbers.

    python packing.py 100 90 60 50 40 30 --max-len 128          # which length goes into which row
    python packing.py STORE --max-len 512                       # what packing would gain
    python packing.py HISTOGRAM.json --packer spfhp --max-per-pack 3
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from support.base.settings import flag
from support.rows.packs import Packing, Packs, assign, histogram, least_packs

if TYPE_CHECKING:
    from config import Config

PACKERS = ("lpfhp", "spfhp", "nnlshp")
DEFAULT = "lpfhp"  # docs/packing.md: it needs the fewest packs without SciPy
PATTERNS = 10_000  # that nnlshp may weigh in every window of a run: some seconds
MOST = 100_000  # that it may weigh at all: 400 MB of matrix at length 512

Pattern = tuple[int, ...]  # the lengths of the documents in one pack


@dataclass(frozen=True)
class PackConfig:
    on: bool = flag(False, "lay pieces of documents side by side in full rows, isolated by a mask")
    max_per_row: int | None = flag(None, "most pieces in a row (default: as many as fit)", least=1)
    batch: str | None = flag(
        None,
        "what packing holds constant in a step: its rows, or its documents, in fewer rows"
        " (default: rows; documents for bert)",
        ("rows", "documents"),
    )
    packer: str = flag(
        DEFAULT,
        "which packer fills the rows; nnlshp needs SciPy and can take minutes for every 16 steps",
        PACKERS,
    )


def with_defaults(config: "Config") -> PackConfig:
    """Packing changes neither the learning rate nor the contents of a step unless asked to.

    A BERT's unpacked rows hold one document each, so a step keeps its documents, in fewer rows. A
    GPT's unpacked rows are full of text cut from the stream, so as many rows hold as many tokens.
    """
    if config.pack.batch is not None:
        return config.pack
    return replace(config.pack, batch="documents" if config.model.model == "bert" else "rows")


def refusals(config: "Config") -> list[tuple[bool, str]]:
    """Packers that this machine or this run cannot use."""
    packer, T = config.pack.packer, config.data.seq_len
    most = min(config.pack.max_per_row or T, T)
    if packer == "nnlshp":
        require_scipy("--pack-packer")
    return [
        (
            packer == "nnlshp" and number_that_fill(T, most) > PATTERNS,
            f"--pack-packer nnlshp weighs every way to fill a row of {T} with {most} pieces at"
            f" most, and more than {PATTERNS:,} take too long: lower --pack-max-per-row, or choose"
            " another packer",
        )
    ]


# ---- greedy packers


class Filled(NamedTuple):
    """Packs that hold the same lengths."""

    packs: int
    pattern: Pattern


def greedy(counts: np.ndarray, max_per_pack: int, tightest: bool) -> list[Filled]:
    """Longest documents first, each into the pack with the least space that fits, or the most.

    All documents of a length move at once. The least space is best fit, with as many packs as
    document by document (LPFHP). The most space is SPFHP; like Graphcore's code, it opens one new
    pack per document that does not fit, even where a pack could hold two.

    Cost: each step uses up a length or a group; bit s of a whole number says that a pack has s
          tokens left, so the next space to fill is found at once
    """
    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)[::-1].tolist()
    closed: list[Filled] = []
    open_with: list[list[Filled]] = [[] for _ in range(max_len + 1)]  # by space
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
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ValueError(f"{flag} nnlshp needs SciPy: pip install -e '.[pack]'") from None


def patterns_that_fill(space: int, most: int, longest: int) -> Iterator[Pattern]:
    """All ways to write `space` as a sum of at most `most` lengths, none above `longest`.

    Example: list(patterns_that_fill(4, 2, 4)) == [(4,), (3, 1), (2, 2)]
    """
    if space <= longest:
        yield (space,)
    if most > 1:
        for length in range(min(space - 1, longest), -(-space // most) - 1, -1):
            for rest in patterns_that_fill(space - length, most - 1, length):
                yield (length, *rest)


def number_that_fill(space: int, most: int) -> int:
    """Count the patterns of `patterns_that_fill`; stops counting somewhere above MOST.

    There are as many sums of at most k lengths as sums of lengths up to k.
    """
    ways = [1] + [0] * space
    for part in range(1, min(most, space) + 1):
        for total in range(part, space + 1):
            ways[total] += ways[total - part]
        if ways[space] > MOST:
            break
    return ways[space]


def least_squares(counts: np.ndarray, max_per_pack: int) -> list[Filled]:
    """NNLSHP: least squares over the patterns that fill a pack, rounded.

    Places stay empty where the rounded packs have too many for a length. Where they have too few,
    the remaining documents are packed alone, as in Graphcore's packedBERT/nnlshp.py.
    """
    patterns, packs = regress(counts, max_per_pack)
    filled, left = fill(patterns, packs, counts)
    return filled + [Filled(int(left[length]), (int(length),)) for length in np.flatnonzero(left)]


def regress(counts: np.ndarray, max_per_pack: int) -> tuple[list[Pattern], np.ndarray]:
    """Fit packs of every pattern that fills a pack to the histogram, by least squares.

    Paper:   arXiv 2107.02027, section 3.1 (NNLSHP); lengths up to 8 weigh 0.09, as in Graphcore's
             packedBERT/nnlshp.py: a short document that is missing leaves little padding
    Returns: patterns; (patterns,) int64 packs, which have too many places for some lengths and too
             few for others
    Raises:  ValueError for too many patterns
    """
    from scipy.optimize import nnls

    max_len = len(counts) - 1
    if number_that_fill(max_len, max_per_pack) > MOST:
        raise ValueError(
            f"--packer nnlshp weighs every way to fill a pack of {max_len}, more than {MOST:,} with"
            f" --max-per-pack {max_per_pack}: choose fewer, or another packer"
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
    """Put documents into packs of patterns, the longest places first.

    Args:    packs (patterns,) whole numbers
    Returns: the packs without empty ones; (max_len + 1,) the documents left over
    Example: two packs of (5, 3) and documents 5, 4, 3, 2: [(1, (5, 3))], and 4 and 2 are left
    """
    left = counts.tolist()
    used = [j for j, n in enumerate(packs) if n > 0]
    filled = {j: [Filled(int(packs[j]), ())] for j in used}  # packs of each pattern, so far
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


# ---- the verbs


def pack(counts: np.ndarray, packer: str = DEFAULT, max_per_pack: int | None = None) -> Packing:
    """Pack a histogram: which lengths share a pack, and in how many packs.

    Args:    counts       (max_len + 1,) documents of each length; the first, of length 0, is 0
             packer       one of PACKERS
             max_per_pack most documents in a pack; None: as many as fit
    Raises:  ValueError for counts that are not a histogram, for an unknown packer, and where SciPy
             is missing
    Cost:    lpfhp takes 3 ms for lengths up to 512 and 66 ms up to 4,096, whatever the number of
             documents (results/packers.jsonl)
    Example: two documents of 5, one of 3 in packs of 8: pack([0, 0, 0, 1, 0, 2, 0, 0, 0]) has the
             strategies (5, 3) and (5,), one pack of each
    """
    counts = np.asarray(counts)
    max_len = len(counts) - 1
    if counts.dtype.kind not in "iu" or counts.min() < 0 or counts[0] or not counts.any():
        raise ValueError("a histogram has 1 or more documents in all, and none of length 0")
    if packer not in PACKERS:
        raise ValueError(f"--packer {packer} is unknown: choose one of {', '.join(PACKERS)}")
    if max_per_pack is not None and max_per_pack < 1:
        raise ValueError(f"--max-per-pack {max_per_pack}: a pack holds 1 document or more")
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
        lower_bound=least_packs(counts, most),
    )


def pack_lengths(
    lengths: Sequence[int] | np.ndarray,
    max_len: int,
    packer: str = DEFAULT,
    max_per_pack: int | None = None,
) -> Packs:
    """Pack documents: the numbers of those that share a pack.

    Documents of equal length are taken in the order given; packs come longest document first,
    until `take` reorders them.

    Example: pack_lengths([3, 6, 5, 2], 8) has items [1, 3, 2, 0] and offsets [0, 2, 4]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    return assign(pack(histogram(lengths, max_len), packer, max_per_pack), lengths)


# ---- the command: what packing would give, for lengths, a histogram or a token store

ROWS = 12  # that are printed, the most frequent first


def main(argv: list[str] | None = None) -> None:
    from support.base import runtime
    from support.rows.samples import Samples
    from support.text.store import Store

    parser = runtime.Parser(prog="packing.py", description=__doc__.split("\n")[0])
    sources = "lengths in tokens, a folder made by prepare.py, or a histogram (.json)"
    parser.add_argument("source", nargs="+", help=sources)
    parser.add_argument("--packer", choices=PACKERS, default=DEFAULT)
    parser.add_argument("--max-len", type=int, default=256, help="tokens of a row (256)")
    parser.add_argument("--max-per-pack", type=int, help="most documents in a row (default: any)")
    args = parser.parse_args(argv)
    if args.max_len < 1:
        raise ValueError(f"--max-len {args.max_len}: a row has 1 token or more")

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
    """Print what a packing saves, and the rows that it has most of."""
    print(f"{'rows':>10} {'at least':>10} {'full':>10} {'a row':>10} {'attention':>10}")
    print(
        f"{packing.packs:10,} {packing.lower_bound:10,} {packing.efficiency:10.3%}"
        f" {packing.factor:10.3f} {packing.attention:10.1%}"
    )
    strategies = np.split(packing.lengths, packing.offsets[1:-1])
    for s in np.argsort(-packing.counts, kind="stable")[:ROWS]:
        terms = " + ".join(map(str, strategies[s]))
        print(f"{packing.counts[s]:10,} of {terms} = {strategies[s].sum()} of {packing.max_len}")


if __name__ == "__main__":
    from support.base import runtime

    runtime.exit_cleanly(main)
