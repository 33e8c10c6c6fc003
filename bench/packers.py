"""Packers: how many packs, in what time, on the same lengths.

    histogram   each packer at several depths on a histogram of real lengths, given as a file:
                {"max_len": M, "counts": [documents of length 1, of length 2, ...]}
    assign      as many documents as the histogram has, in random order, into the packs of lpfhp
    long        16 million lengths, e to the power of a normal distribution around ln 700 with
                deviation 1, cut off at 4,096
    windows     the windows that a trainer packs: rows of 256 and of 2,048; milliseconds from
                lengths to shuffled packs
    local       a store's documents packed 100, 1,000 at a time or all together (--store FOLDER)

The import of SciPy is not counted. What TRL's and Graphcore's packers took beside ours, in turns
within one process, stands in results/packers.jsonl; their code is not part of this project.

    python bench/packers.py HISTOGRAM.json --record
    python bench/packers.py HISTOGRAM.json --store FOLDER --cases local
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from measure import command_line, min_median_max, recorder, seconds_in_turns

from packing import pack, pack_lengths, read_histogram
from support.base.runtime import exit_cleanly
from support.rows import cutting_stock
from support.rows.packs import assign, histogram
from support.rows.samples import cut
from support.text.store import Store

DEPTHS = {
    "spfhp": (None, 3, 8, 12),
    "lpfhp": (None, 2, 3, 4, 8, 12),
    "optimal": (None, 2, 3, 4, 8),
    "nnlshp": (2, 3),
}
SLOW = ("optimal", "nnlshp")  # these have --slow-turns
WINDOWS = {"nano": (16 * 8, 256, 60), "8 ranks": (16 * 8 * 512, 2048, 300)}  # rows, T, median


def lognormal(count: int, median: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1, count).astype(np.int64) + 1
    return np.minimum(drawn, longest)


def measure_histogram(
    counts: np.ndarray, depths: dict[str, tuple], turns: int, slow_turns: int
) -> Iterator[dict]:
    for packer, depth in [(name, depth) for name in depths for depth in depths[name]]:
        packing = pack(counts, packer, depth)
        call = partial(pack, counts, packer, depth)
        taken = seconds_in_turns({"ours": call}, slow_turns if packer in SLOW else turns)
        yield {
            "packer": packer,
            "max_per_pack": depth,
            "lower_bound": packing.lower_bound,
            "packs": packing.packs,
            "factor": round(packing.factor, 5),
            "efficiency": round(packing.efficiency, 6),
            "attention": round(packing.attention, 4),
            "seconds": min_median_max(taken["ours"]),
        }


def measure_assign(counts: np.ndarray, turns: int) -> Iterator[dict]:
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    packing = pack(counts)
    taken = seconds_in_turns({"ours": partial(assign, packing, lengths)}, turns)
    seconds = min_median_max(taken["ours"])
    yield {"documents": len(lengths), "packs": packing.packs, "assign_s": seconds}


def measure_windows(turns: int) -> Iterator[dict]:
    for name, (rows, max_len, median) in WINDOWS.items():
        mean = lognormal(100_000, median, max_len).mean()
        lengths = lognormal(int(rows * max_len / mean), median, max_len)
        random = np.random.default_rng(0)

        def shuffled(lengths=lengths, max_len=max_len, random=random) -> None:
            packs = pack_lengths(lengths, max_len)
            packs.take(random.permutation(len(packs.offsets) - 1))

        taken = seconds_in_turns({"ours": shuffled}, turns)
        yield {
            "window": name,
            "max_len": max_len,
            "documents": len(lengths),
            "rows": len(pack_lengths(lengths, max_len).offsets) - 1,
            "ms": min_median_max([1000 * seconds for seconds in taken["ours"]]),
        }


def measure_local(path: str) -> Iterator[dict]:
    """The cost of packing a part at a time: the share of tokens among all positions."""
    store = Store.open(path)
    documents = np.diff(store.offsets[: store.train_documents + 1])
    documents = np.random.default_rng(0).permutation(documents)
    for max_len in (256, 512, 1024, 2048):
        start, stop = cut(np.stack((0 * documents, documents), axis=1), max_len).T
        lengths = stop - start
        figures = {"max_len": max_len, "documents": len(documents), "pieces": len(lengths)}
        figures["one_document_a_row"] = round(lengths.mean() / max_len, 4)
        for part in (100, 1000):
            parts = np.split(lengths, range(part, len(lengths), part))
            packs = sum(pack(histogram(some, max_len)).packs for some in parts)
            figures[f"lpfhp_{part}_at_a_time"] = round(lengths.sum() / packs / max_len, 4)
        packing = pack(histogram(lengths, max_len), "lpfhp")
        figures["lpfhp"] = round(packing.efficiency, 4)
        figures["attention"] = round(packing.attention, 4)
        yield figures


def main() -> None:
    parser = command_line(__doc__, turns=11)
    parser.add_argument("histogram", help="file of a histogram")
    parser.add_argument("--store", help="folder made by prepare.py, for packing a part at a time")
    parser.add_argument("--cases", nargs="*", help="(default: all that have what they need)")
    parser.add_argument("--packers", nargs="*", choices=DEPTHS, default=list(DEPTHS))
    parser.add_argument("--slow-turns", type=int, default=3, help="of optimal and nnlshp (3)")
    args = parser.parse_args()
    cutting_stock.require_scipy("optimal")
    import scipy

    keep = recorder("packers", args, scipy=scipy.__version__)
    counts = read_histogram(Path(args.histogram), None)
    long = histogram(lognormal(16_000_000, 700, 4096), 4096)
    turns, slow = args.turns, args.slow_turns
    depths = {packer: DEPTHS[packer] for packer in args.packers}
    unlimited = {"lpfhp": (None,), "spfhp": (None,)}
    cases = {
        "histogram": measure_histogram(counts, depths, turns, slow),
        "assign": measure_assign(counts, 5),
        "long": measure_histogram(long, unlimited, turns, slow),
        "windows": measure_windows(turns),
    }
    if args.store:
        cases["local"] = measure_local(args.store)
    for name, measure in cases.items():
        if args.cases is None or name in args.cases:
            keep({"case": name, "found": list(measure)})  # a record a case, in case one is cut off


if __name__ == "__main__":
    exit_cleanly(main)
