"""Sequence packing: documents side by side in rows of equal length, with little padding.

Decides which document goes into which row. It does not isolate the documents of a row from each
other: that is the work of `doc_ids` and `positions`, which attention honours (model.TokenMeta).

Documents of one length are interchangeable, so a packer sees a histogram alone and takes as long
for a billion documents as for a million. What it returns, a Packing, says which lengths lie in a
pack together (a strategy) and how many packs there are of each; `assign` then names the documents.

    spfhp, lpfhp   shortest or longest pack first: worst and best fit, longest documents first
    bfd, ffd       best and first fit decreasing; bfd is lpfhp, which packs as it would by document
    nnlshp         the paper's least squares over all strategies that fill a pack; needs SciPy
    optimal        ours: cutting stock by column generation, with its lower bound; needs SciPy
    next-fit       documents in the order they come, a new pack where one does not fit

Paper: Krell et al., arXiv 2107.02027. docs/packing.md has an example by hand and the numbers.

    python packing.py 100 90 60 50 40 30 --max-len 128          # which length goes into which row
    python packing.py HISTOGRAM.json --packer lpfhp --max-per-pack 3
    python packing.py STORE --max-len 512                       # what each packer would gain
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.report import charts, figures
from support.rows import cutting_stock
from support.rows.packs import LONGEST_ROW, Packing, Packs, assign, checked, histogram
from support.rows.samples import LONG, LONG_HELP, Samples
from support.text.store import Store

PACKERS = ("spfhp", "lpfhp", "nnlshp", "optimal", "bfd", "ffd", "next-fit")
DEFAULT = "lpfhp"  # docs/packing.md: of those without SciPy it needs the fewest packs


@dataclass(frozen=True)
class PackConfig:
    on: bool = field(
        default=False,
        metadata={"help": "lay pieces of documents side by side in full rows, isolated by a mask"},
    )
    max_per_row: int | None = field(
        default=None,
        metadata={"help": "pieces in a row at most (default: as many as fit)", "least": 1},
    )
    batch: str | None = field(
        default=None,
        metadata={
            "help": "what a step keeps of the unpacked one (default: rows, for bert documents)",
            "choices": ("rows", "documents"),
        },
    )


def with_defaults(settings: Any) -> PackConfig:
    """Packing changes neither the learning rate nor what is in a step unless asked.

    A BERT's unpacked rows hold a document each, so a step keeps its documents, in fewer rows. A
    GPT's are full of text, cut from the stream, so as many rows hold as many tokens.
    """
    if settings.pack.batch is not None:
        return settings.pack
    return replace(settings.pack, batch="documents" if settings.model.model == "bert" else "rows")


# ---- greedy packers


class Group(NamedTuple):
    """Open packs that hold the same lengths."""

    packs: int
    space: int  # tokens left in each
    slots: int  # documents that each may still take
    held: Any  # (length, times, what was held before) or None

    def holding(self, packs: int, length: int, times: int) -> "Group":
        """So many of them, with the length added so many times."""
        held = (length, times, self.held)
        return Group(packs, self.space - times * length, self.slots - times, held)

    def add(self, length: int, times: int, left: int) -> list["Group"]:
        """Put up to `left` documents in, `times` into a pack; the packs may part in three.

        Example: 5 documents, twice into each of 4 packs: 2 packs with two, 1 with one, 1 as it was
        """
        full = min(self.packs, left // times)
        rest = left % times if full < self.packs else 0
        parts = []
        if full:
            parts.append(self.holding(full, length, times))
        if rest:
            parts.append(self.holding(1, length, rest))
        untouched = self.packs - full - (rest > 0)
        if untouched:
            parts.append(Group(untouched, *self[1:]))
        return parts


def by_space(
    counts: np.ndarray, max_per_pack: int, tightest: bool, groups: Iterable[Group] = ()
) -> list[Group]:
    """Longest documents first, each into the pack with the least space that fits, or with the most.

    All documents of a length move at once. The least space is best fit, document by document
    (LPFHP). The most space is SPFHP; like Graphcore's it opens a pack for each document of a length
    that fits nowhere, though two of them may fit into one.

    Args: groups packs that are already open
    Cost: each step uses up a length or a group; the spaces of open packs are the bits of a whole
          number, which finds the next one at once
    """
    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)[::-1].tolist()
    shortest = lengths[-1] if lengths else max_len + 1
    closed: list[Group] = []
    open_with: list[list[Group]] = [[] for _ in range(max_len + 1)]  # so many tokens left
    spaces = 0  # bit s is set where open_with[s] has a group

    def keep(group: Group) -> None:
        nonlocal spaces
        if group.slots and group.space >= shortest:
            open_with[group.space].append(group)
            spaces |= 1 << group.space
        else:
            closed.append(group)

    for group in groups:
        keep(group)
    for length in lengths:
        left = int(counts[length])
        while left:
            fitting = spaces >> length
            if fitting:
                above = (fitting & -fitting if tightest else fitting).bit_length() - 1
                group = open_with[length + above].pop()
                if not open_with[length + above]:
                    spaces ^= 1 << (length + above)
                times = min(group.space // length, group.slots) if tightest else 1
            else:
                times = min(max_len // length, max_per_pack) if tightest else 1
                group = Group(-(-left // times), max_len, max_per_pack, None)
            for part in group.add(length, times, left):
                keep(part)
            left -= min(left, group.packs * times)
    return closed + [group for groups in open_with for group in groups]


def first_fit(counts: np.ndarray, max_per_pack: int) -> list[Group]:
    """Longest documents first, each into the pack that was opened first of those that fit.

    Cost: looks at every open group for each length
    """
    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)[::-1].tolist()
    opened: list[Group] = []
    closed: list[Group] = []
    for length in lengths:
        left, parts = int(counts[length]), []
        for group in opened:
            times = min(group.space // length, group.slots)
            if left and times:
                parts += group.add(length, times, left)
                left -= min(left, group.packs * times)
            else:
                parts.append(group)
        if left:
            times = min(max_len // length, max_per_pack)
            new = Group(-(-left // times), max_len, max_per_pack, None)
            parts += new.add(length, times, left)
        open_still = [group.slots > 0 and group.space >= lengths[-1] for group in parts]
        opened = list(compress(parts, open_still))
        closed += [group for group, is_open in zip(parts, open_still, strict=True) if not is_open]
    return closed + opened


def pattern_of(group: Group) -> cutting_stock.Pattern:
    """The lengths in each pack of a group, longest first."""
    lengths, held = [], group.held
    while held:
        length, times, held = held
        lengths += [length] * times
    return tuple(sorted(lengths, reverse=True))


def group_of(pattern: cutting_stock.Pattern, packs: int, max_len: int, most: int) -> Group:
    held = None
    for length in pattern:
        held = (length, 1, held)
    return Group(packs, max_len - sum(pattern), most - len(pattern), held)


def packing_of(groups: Iterable[Group], max_len: int, lower_bound: int) -> Packing:
    """Groups as strategies, in descending order."""
    packs: Counter[cutting_stock.Pattern] = Counter()
    for group in groups:
        packs[pattern_of(group)] += group.packs
    strategies = sorted(packs, reverse=True)
    return Packing(
        lengths=np.fromiter(chain.from_iterable(strategies), np.int64),
        offsets=np.cumsum([0, *map(len, strategies)]),
        counts=np.array([packs[strategy] for strategy in strategies]),
        max_len=max_len,
        lower_bound=lower_bound,
    )


def number_of_packs(groups: list[Group]) -> int:
    return sum(group.packs for group in groups)


# ---- packers that need SciPy


def optimal(counts: np.ndarray, max_per_pack: int) -> tuple[list[Group], int]:
    """The best of several ways to round the linear relaxation, and its lower bound.

    A way is to add a share to the fractional packs of every pattern and to drop the fraction. The
    documents that find no place then go where packs have space left, by best fit.
    """
    max_len = len(counts) - 1
    best = by_space(counts, max_per_pack, tightest=True)
    start = [pattern_of(group) for group in best]
    patterns, packs, bound = cutting_stock.relax(counts, max_per_pack, start)
    for share in (0.5, 0.45, 0.4, 0.3, 0):
        if number_of_packs(best) <= bound:
            break
        filled, left = cutting_stock.fill(patterns, np.floor(packs + share).astype(int), counts)
        opened = [group_of(pattern, n, max_len, max_per_pack) for n, pattern in filled]
        groups = by_space(left, max_per_pack, True, opened)
        best = min(best, groups, key=number_of_packs)
    return best, bound


def least_squares(counts: np.ndarray, max_per_pack: int) -> list[Group]:
    """NNLSHP: least squares over the patterns that fill a pack, rounded.

    Where the rounded packs hold too many of a length, places stay empty; documents that they have
    too few places for are packed alone, as in Graphcore's packedBERT/nnlshp.py.
    """
    max_len = len(counts) - 1
    patterns, packs = cutting_stock.regress(counts, max_per_pack)
    filled, left = cutting_stock.fill(patterns, packs, counts, shorter=False)
    alone = [(int(left[length]), (int(length),)) for length in np.flatnonzero(left)]
    return [group_of(pattern, n, max_len, max_per_pack) for n, pattern in filled + alone]


# ---- the verbs


def pack(counts: np.ndarray, packer: str = DEFAULT, max_per_pack: int | None = None) -> Packing:
    """Pack a histogram: which lengths share a pack, and how often.

    Args:    counts       (max_len + 1,) documents of each length; the first, of length 0, is 0
             packer       one of PACKERS, but for next-fit, which needs the documents' order
             max_per_pack documents in a pack at most; None: as many as fit
    Raises:  ValueError for what is not such a histogram or no packer, for more than 2^53 tokens,
             up to which every count is exact, and where SciPy is missing
    Cost:    lpfhp takes 3 ms for lengths up to 512, 66 ms up to 4,096, however many documents
             there are (results/packers.jsonl)
    Example: two documents of 5, one of 3 in packs of 8: pack([0, 0, 0, 1, 0, 2, 0, 0, 0]) has the
             strategies (5, 3) and (5,), one pack of each
    """
    counts = checked(counts)
    max_len = len(counts) - 1
    most = at_most(max_per_pack, max_len)
    bound = cutting_stock.least_packs(counts, most)
    if packer in cutting_stock.NEED_SCIPY:
        cutting_stock.require_scipy(packer)
    if packer == "optimal":
        groups, better_bound = optimal(counts, most)
        bound = max(bound, better_bound)
    elif packer == "nnlshp":
        groups = least_squares(counts, most)
    elif packer == "ffd":
        groups = first_fit(counts, most)
    elif packer in ("spfhp", "lpfhp", "bfd"):
        groups = by_space(counts, most, tightest=packer != "spfhp")
    elif packer == "next-fit":
        raise ValueError("--packer next-fit needs the documents in order, not a histogram")
    else:
        raise ValueError(f"--packer {packer} is unknown: choose one of {', '.join(PACKERS)}")
    return packing_of(groups, max_len, bound)


def at_most(max_per_pack: int | None, max_len: int) -> int:
    """Documents in a pack at most; no more than tokens."""
    if max_per_pack is not None and max_per_pack < 1:
        raise ValueError(f"--max-per-pack {max_per_pack}: a pack holds 1 document or more")
    return min(max_per_pack or max_len, max_len)


def next_fit(lengths: np.ndarray, max_len: int, max_per_pack: int | None = None) -> Packing:
    """Pack documents in the order they come, each strategy one pack.

    Example: 5, 2, 2 in packs of 8 are (5, 2) and (2,)
    """
    most = at_most(max_per_pack, max_len)
    bound = cutting_stock.least_packs(checked(histogram(lengths, max_len)), most)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    # (N,) where the pack ends that begins with each document
    after = np.searchsorted(ends, ends[:-1] + max_len, "right") - 1
    after = np.minimum(after, np.arange(len(lengths)) + most).tolist()
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(after[offsets[-1]])
    counts = np.ones(len(offsets) - 1, np.int64)
    return Packing(np.asarray(lengths), np.array(offsets), counts, max_len, bound)


def pack_lengths(
    lengths: Sequence[int] | np.ndarray,
    max_len: int,
    packer: str = DEFAULT,
    max_per_pack: int | None = None,
) -> Packs:
    """Pack documents: which of them, by their numbers, lie in a pack together.

    Equal documents are taken in the order they are given; packs come longest document first, which
    `take` changes.

    Example: pack_lengths([3, 6, 5, 2], 8) has items [1, 3, 2, 0] and offsets [0, 2, 4]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        return Packs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if packer == "next-fit":
        return Packs(np.arange(len(lengths)), next_fit(lengths, max_len, max_per_pack).offsets)
    return assign(pack(histogram(lengths, max_len), packer, max_per_pack), lengths)


def main(argv: list[str] | None = None) -> None:
    import packing
    from support.base import runtime

    parser = runtime.Parser(prog="packing.py", description=__doc__.split("\n")[0])
    packing.add_flags(parser, PACKERS, DEFAULT)
    args = parser.parse_args(argv)
    documents = packing.read(args)

    def make(packer: str, max_per_pack: int | None) -> Packing:
        if packer == "next-fit" and documents.lengths is not None:
            return next_fit(documents.lengths, len(documents.counts) - 1, max_per_pack)
        return pack(documents.counts, packer, max_per_pack)

    packing.show(args, documents, make, PACKERS, DEFAULT)


# ---- packing table
#
# What packing would give: the command of packing.py, for lengths, a histogram or a token store.
#
# Reads them, and shows numbers and rows. The packers are handed in.
#
#     python packing.py STORE --max-len 512 --plot rows.svg


MAX_LEN = 256  # tokens of a row, as many as train.py has by default
DEPTHS = (None, 2, 3, 4)  # documents in a row at most, of the table; None: as many as fit
PATTERNS = 10_000  # that nnlshp weighs for a table, which takes seconds
ROWS, WIDTH = 12, 64  # rows that are drawn, and characters of each


class Documents(NamedTuple):
    """What there is to pack."""

    kind: str  # lengths | histogram | store
    counts: np.ndarray  # (max_len + 1,)
    lengths: np.ndarray | None  # (N,) in order; a histogram has none


def add_flags(parser: argparse.ArgumentParser, packers: tuple[str, ...], default: str) -> None:
    sources = "lengths in tokens, a histogram (.json), or a folder made by prepare.py"
    parser.add_argument("source", nargs="+", help=sources)
    shown = f"(default: {default}; of a folder: all)"
    parser.add_argument("--packer", choices=packers, help=shown)
    row = f"tokens of a row (default: the histogram's, or {MAX_LEN})"
    parser.add_argument("--max-len", type=int, help=row)
    depth = "documents in a row at most (default: as many as fit; of a folder: a table)"
    parser.add_argument("--max-per-pack", type=int, help=depth)
    parser.add_argument("--long", choices=LONG, default="split", help=f"{LONG_HELP}; of a folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object a packer")
    parser.add_argument("--plot", help="SVG file for a picture of some rows")


# ---- reading


def read(args: argparse.Namespace) -> Documents:
    """The documents that the command names.

    Raises: ValueError for what is no histogram and no store, and for a document longer than a row
    """
    if args.max_per_pack is not None and args.max_per_pack < 1:
        raise ValueError(f"--max-per-pack {args.max_per_pack}: choose 1 or more")
    if args.max_len is not None:
        check_row(args.max_len, "--max-len")
    path, max_len = Path(args.source[0]), args.max_len or MAX_LEN
    if all(text.lstrip("-").isdecimal() for text in args.source):
        lengths = np.array([int(text) for text in args.source], object)
        counts = histogram(lengths, max_len)  # which refuses what is more than an int64
        return Documents("lengths", counts, lengths.astype(np.int64))
    if len(args.source) > 1:
        raise ValueError(f"{' '.join(args.source)}: give one folder, one file, or only lengths")
    if not path.is_dir():
        return Documents("histogram", read_histogram(path, args.max_len), None)
    store = Store.open(path)
    samples = Samples(store, "pieces", max_len, long=args.long)  # as the trainer cuts documents
    start, stop = samples.spans(np.arange(len(samples))).T
    longer, tokens = samples.beyond_a_row()
    left_out = f", {tokens:,} tokens are left out" if args.long == "truncate" else ""
    print(
        f"{store.train_documents:,} documents for training, {store.meta['skipped']:,} empty ones"
        f" were skipped; {longer:,} longer than a row: --long {args.long} makes"
        f" {len(samples):,} in all{left_out}",
        file=sys.stderr,
    )
    return Documents("store", checked(histogram(stop - start, max_len)), stop - start)


def check_row(max_len: int, source: str) -> None:
    if not 1 <= max_len <= LONGEST_ROW:
        raise ValueError(f"{source} {max_len}: choose 1 to {LONGEST_ROW:,} tokens")


def read_histogram(path: Path, max_len: int | None) -> np.ndarray:
    """(max_len + 1,) documents of each length, from {"max_len": M, "counts": [of 1, of 2, ...]}."""
    try:
        found = json.loads(path.read_text("utf-8"))
        row, counts = max_len or found["max_len"], found["counts"]
        if not all(type(number) is int for number in (row, *counts)):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        wanted = '{"max_len": M, "counts": [documents of length 1, of length 2, ...]}'
        raise ValueError(f"{path} is no histogram: it has to be {wanted}") from None
    check_row(row, f"{path}: max_len")
    longest = max((length for length, n in enumerate(counts, 1) if n), default=0)
    if longest > row:
        raise ValueError(
            f"{path}: a document of {longest} tokens does not fit a row of {row}: split or truncate"
            " it before you count, or choose another --max-len"
        )
    return checked([0, *counts[:row]] + [0] * (row - len(counts)), source=f"{path}: the histogram")


# ---- showing


def show(
    args: argparse.Namespace,
    documents: Documents,
    make: Callable[[str, int | None], Packing],
    packers: tuple[str, ...],
    default: str,
) -> None:
    """One packer's numbers, or for a store all packers' at several depths; rows on request.

    Args: make (packer, documents in a row at most) -> Packing
    """
    if args.plot:
        figures.check_file(args.plot)
    max_len, depths = len(documents.counts) - 1, (args.max_per_pack,)
    chosen = (args.packer or default,)
    if documents.kind == "store":
        depths = depths if args.max_per_pack else DEPTHS
        chosen = (args.packer,) if args.packer else packers
    as_table = len(depths) * len(chosen) > 1
    if as_table and not args.json:
        columns = ("rows", "at least", "full", "a row", "attention", "seconds")
        print(f"{'packer':9} {'most':>4} " + " ".join(f"{column:>10}" for column in columns))
    for depth in depths:
        for packer in chosen:
            reason = left_out(packer, min(depth or max_len, max_len), max_len) if as_table else ""
            if reason:
                print(f"{packer}: {reason}", file=sys.stderr)
                continue
            if packer in cutting_stock.NEED_SCIPY:
                cutting_stock.require_scipy(packer)  # its import is not the packer's time
            start = time.perf_counter()
            packing = make(packer, depth)
            seconds = time.perf_counter() - start
            if args.json:
                print(json.dumps(summary(packer, packing, seconds)))
            elif as_table:
                print(table_row(packer, depth, packing, seconds), flush=True)
            else:
                print("\n".join(rows_as_text(packing)))
                print(sentence(packer, packing, seconds))
    if args.plot:
        packing = make(args.packer or default, args.max_per_pack)
        rows = charts.bars(some_rows(packing), "Rows", "tokens of a row")
        figures.save(args.plot, rows)


def left_out(packer: str, most: int, max_len: int) -> str:
    """Why a table goes without a packer, or nothing."""
    if packer in cutting_stock.NEED_SCIPY:
        try:
            cutting_stock.require_scipy(packer)
        except ValueError as error:
            return str(error)
    if packer == "nnlshp" and cutting_stock.number_that_fill(max_len, most) > PATTERNS:
        return f"more than {PATTERNS:,} ways to fill a row with {most}: ask for it by --packer"
    return ""


def summary(packer: str, packing: Packing, seconds: float) -> dict[str, Any]:
    return {
        "packer": packer,
        "packs": packing.packs,
        "efficiency": packing.efficiency,
        "factor": packing.factor,
        "lower_bound": packing.lower_bound,
        "seconds": round(seconds, 6),
    }


def table_row(packer: str, depth: int | None, packing: Packing, seconds: float) -> str:
    return (
        f"{packer:9} {depth or 'all':>4} {packing.packs:10,} {packing.lower_bound:10,}"
        f" {packing.efficiency:10.3%} {packing.factor:10.3f} {packing.attention:10.1%}"
        f" {seconds:10.4f}"
    )


def sentence(packer: str, packing: Packing, seconds: float) -> str:
    alone = packing.efficiency / packing.factor
    return (
        f"{packer}: {packing.packs:,} rows, no packer needs fewer than {packing.lower_bound:,};"
        f" padding: {1 - packing.efficiency:.1%}, {1 - alone:.1%} with one document a row;"
        f" {seconds:.4f} s"
    )


def some_rows(packing: Packing) -> list[list[int]]:
    """The lengths in every pack; where packs are many, in some of those with several documents."""
    offsets, counts = packing.offsets, packing.counts
    several = np.diff(offsets) > 1
    if packing.packs > ROWS and several.any():
        counts = np.where(several, counts, 0)
    chosen = np.unique(np.linspace(0, counts.sum() - 1, ROWS).astype(int))
    strategies = np.searchsorted(np.cumsum(counts), chosen, "right")
    return [packing.lengths[offsets[s] : offsets[s + 1]].tolist() for s in strategies]


def rows_as_text(packing: Packing) -> Iterator[str]:
    """Some rows, a letter for each document: |aaaaaabb..| 6 + 2 = 8 of 10."""
    for lengths in some_rows(packing):
        ends = np.rint(np.cumsum(lengths) * WIDTH / packing.max_len).astype(int)
        letters = "".join(chr(97 + i % 26) * n for i, n in enumerate(np.diff(ends, prepend=0)))
        terms = " + ".join(map(str, lengths[:8])) + " + ..." * (len(lengths) > 8)
        yield f"|{letters:.<{WIDTH}}| {terms} = {sum(lengths)} of {packing.max_len}"


if __name__ == "__main__":
    from support.base import runtime

    runtime.exit_cleanly(main)
