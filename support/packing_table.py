"""What packing would give: the command of packing.py, for lengths, a histogram or a token store.

Reads them, and shows numbers and rows. The packers are handed in.

    python packing.py STORE --max-len 512 --plot rows.png
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support import cutting_stock, figures
from support.packs import LONGEST_ROW, Packing, checked, histogram
from support.samples import LONG, LONG_HELP, Samples
from support.token_store import Store

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
    parser.add_argument("--plot", help="file for a picture of some rows")


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
        figures.figure_for(args.plot)
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
        figures.plotted(args.plot, lambda axes: draw(axes, packing), xlabel="tokens of a row")


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


def draw(axes: Any, packing: Packing) -> None:
    """Some rows as bars, a colour for each document."""
    for row, lengths in enumerate(some_rows(packing)):
        starts = np.cumsum([0, *lengths[:-1]])
        colours = [f"C{i % 10}" for i in range(len(lengths))]
        axes.barh([-row] * len(lengths), lengths, left=starts, color=colours, edgecolor="white")
    axes.set_xlim(0, packing.max_len)
    axes.set_yticks([])
