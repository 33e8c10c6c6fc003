"""Packers: how many packs, in what time, beside the published ones on the same lengths.

    histogram   each packer at several depths on a histogram of real lengths, given as a file:
                {"max_len": M, "counts": [documents of length 1, of length 2, ...]}
    assign      as many documents as the histogram has, in random order, into the packs of lpfhp
    long        16 million lengths, e to the power of a normal distribution around ln 700 with
                deviation 1, cut off at 4,096
    windows     what a trainer packs at a time: rows of 256 and of 2,048; seconds from lengths to
                shuffled packs
    local       a store's documents packed 1,000 at a time or all together (--store FOLDER)
    trl         1 million lengths into rows of 2,048, beside TRL's best fit decreasing (--trl FILE,
                its data_utils.py; needs pyarrow), which is kept from moving any text
    graphcore   the histogram beside the paper's own code (--graphcore FOLDER with lpfhp.py and
                spfhp.py)

Two packers that are compared take turns in one process. The import of SciPy is not counted.

    python bench/packers.py HISTOGRAM.json
    python bench/packers.py HISTOGRAM.json --trl data_utils.py --graphcore FOLDER --record
"""

import argparse
import contextlib
import importlib.util
import io
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from record import Figures, append, min_median_max, surroundings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from packing import next_fit, pack, pack_lengths, read_histogram
from support.base.runtime import exit_cleanly
from support.rows import cutting_stock
from support.rows.packs import Packing, assign, histogram
from support.rows.samples import cut
from support.text.store import Store

DEPTHS = {
    "spfhp": (None, 3, 8, 12),
    "lpfhp": (None, 2, 3, 4, 8, 12),
    "ffd": (None, 2, 3, 4, 8, 12),
    "optimal": (None, 2, 3, 4, 8),
    "nnlshp": (2, 3),
}
SLOW = ("optimal", "nnlshp")  # these have --slow-turns
WINDOWS = {"nano": (16 * 8, 256, 60), "8 ranks": (16 * 8 * 512, 2048, 300)}  # rows, T, median


def seconds_of(action: Callable[[], Any], turns: int) -> list[float]:
    took = []
    for _ in range(turns):
        start = time.perf_counter()
        action()
        took.append(time.perf_counter() - start)
    return took


def figures_of(packing: Packing) -> dict:
    return {
        "packs": packing.packs,
        "lower_bound": packing.lower_bound,
        "efficiency": round(packing.efficiency, 6),
        "factor": round(packing.factor, 5),
        "attention": round(packing.attention, 4),
    }


def lognormal(count: int, median: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1, count).astype(np.int64) + 1
    return np.minimum(drawn, longest)


def measure_histogram(
    counts: np.ndarray, depths: dict[str, tuple[int | None, ...]], turns: int, slow_turns: int
) -> list[dict]:
    cases = []
    for packer in depths:
        for depth in depths[packer]:
            packing = pack(counts, packer, depth)  # warms up
            times = slow_turns if packer in SLOW else turns
            took = seconds_of(lambda p=packer, d=depth: pack(counts, p, d), times)
            seconds = min_median_max(took)
            case = {"packer": packer, "max_per_pack": depth, **figures_of(packing)}
            cases.append(case | {"seconds": seconds})
            print(
                f"  {packer:8} {depth or 'all':>4} {packing.packs:12,} of at least"
                f" {packing.lower_bound:12,} {packing.efficiency:9.3%} {seconds} s",
                flush=True,
            )
    return cases


def measure_assign(counts: np.ndarray, turns: int) -> dict:
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    packing = pack(counts)
    figures = Figures(documents=len(lengths), packs=packing.packs)
    took = seconds_of(lambda: assign(packing, lengths), turns)
    figures.add("assign_s", took, "below 3")
    return figures


def measure_windows(turns: int) -> list[dict]:
    cases = []
    for name, (rows, max_len, median) in WINDOWS.items():
        mean = lognormal(100_000, median, max_len).mean()
        lengths = lognormal(int(rows * max_len / mean), median, max_len)
        shuffle = np.random.default_rng(0)

        def shuffled(lengths=lengths, max_len=max_len, shuffle=shuffle) -> None:
            packs = pack_lengths(lengths, max_len)
            packs.take(shuffle.permutation(len(packs.offsets) - 1))

        figures = Figures(window=name, max_len=max_len, documents=len(lengths))
        figures.add("rows", len(pack_lengths(lengths, max_len).offsets) - 1)
        figures.add("ms", [1000 * s for s in seconds_of(shuffled, turns)])
        cases.append(figures)
    return cases


def measure_local(path: str) -> list[dict]:
    """What packing a part at a time costs: the share of tokens among all positions."""
    store, cases = Store.open(path), []
    documents = np.diff(store.offsets[: store.train_documents + 1])
    documents = np.random.default_rng(0).permutation(documents)
    for max_len in (256, 512, 1024, 2048):
        start, stop = cut(np.stack((0 * documents, documents), axis=1), max_len).T
        lengths = stop - start
        figures = Figures(max_len=max_len, documents=len(documents), pieces=len(lengths))
        full = np.bincount(lengths, minlength=max_len + 1)
        figures.add("one_document_a_row", round(lengths.mean() / max_len, 4))
        figures.add("next_fit", round(next_fit(lengths, max_len).efficiency, 4))
        for part in (100, 1000):
            parts = np.split(lengths, range(part, len(lengths), part))
            packs = sum(pack(histogram(some, max_len)).packs for some in parts)
            figures.add(f"lpfhp_{part}_at_a_time", round(lengths.sum() / packs / max_len, 4))
        packing = pack(full, "lpfhp")
        figures.add("lpfhp", round(packing.efficiency, 4))
        figures.add("attention", round(packing.attention, 4))
        cases.append(figures)
    return cases


def measure_trl(file: str, turns: int, documents: int = 1_000_000, max_len: int = 2048) -> dict:
    import pyarrow as pa

    theirs_module = load_trl(file)
    lengths = lognormal(documents, 400, max_len)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    table = pa.table({"ids": pa.ListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))})

    def their_packs() -> int:
        try:
            theirs_module._pack_bfd(table, max_len, "split")
        except Packed as packed:
            return packed.args[0]
        raise ValueError(f"--trl {file}: _pack_bfd no longer ends in pc.take")

    figures = Figures(documents=documents, max_len=max_len, pyarrow=pa.__version__)
    ours, theirs = [], []
    for _ in range(turns):
        ours += seconds_of(lambda: pack_lengths(lengths, max_len, "bfd"), 1)
        theirs += seconds_of(their_packs, 1)
    figures.add("packs", len(pack_lengths(lengths, max_len, "bfd").offsets) - 1)
    figures.add("trl_packs", their_packs())
    figures.add("s", ours)
    figures.add("trl_s", theirs)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    figures.add("times_faster", ratios, "5 or more")
    return figures


def load_trl(file: str) -> types.ModuleType:
    """TRL's data_utils.py alone, of whose libraries packing needs pyarrow; it moves no text."""
    for name in ("datasets", "transformers"):
        stand_in = types.ModuleType(name)
        stand_in.__getattr__ = lambda _: object  # any name, for type hints
        sys.modules.setdefault(name, stand_in)
    module = load(file)

    def take(*_: Any) -> None:
        raise Packed(len(sys._getframe(1).f_locals["bins"]))

    steps = {"take": take, "filter": lambda column, _: column}  # no document is empty
    module.pc = types.SimpleNamespace(**{**vars(module.pc), **steps})
    return module


class Packed(Exception):
    """TRL's packer is done, with so many packs, and about to move the text."""


def load(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_graphcore(folder: str, counts: np.ndarray, turns: int) -> list[dict]:
    cases, max_len = [], len(counts) - 1
    for packer in ("lpfhp", "spfhp"):
        theirs = getattr(load(f"{folder}/{packer}.py"), f"pack_using_{packer}")
        for depth in (None, 3):

            def run(theirs=theirs, depth=depth) -> int:
                with contextlib.redirect_stdout(io.StringIO()):
                    return int(theirs(counts[1:], max_len, depth or max_len)[1].sum())

            figures = Figures(packer=packer, max_per_pack=depth, max_len=max_len)
            ours, other = [], []
            for _ in range(turns):
                ours += seconds_of(lambda p=packer, d=depth: pack(counts, p, d), 1)
                other += seconds_of(run, 1)
            figures.add("packs", pack(counts, packer, depth).packs)
            figures.add("graphcore_packs", run())
            figures.add("s", ours)
            figures.add("graphcore_s", other)
            cases.append(figures)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("histogram", help="file of a histogram")
    parser.add_argument("--store", help="folder made by prepare.py, for packing a part at a time")
    parser.add_argument("--trl", help="TRL's data_utils.py")
    parser.add_argument("--graphcore", help="folder with lpfhp.py and spfhp.py")
    parser.add_argument("--cases", nargs="*", help="(default: all that have what they need)")
    parser.add_argument("--packers", nargs="*", choices=DEPTHS, help="(default: all)")
    parser.add_argument("--turns", type=int, default=11, help="(11)")
    parser.add_argument("--slow-turns", type=int, default=3, help="of optimal and nnlshp (3)")
    parser.add_argument("--record", action="store_true", help="append to results/packers.jsonl")
    args = parser.parse_args()
    cutting_stock.require_scipy("optimal")
    import scipy

    about = surroundings() | {"bench": "packers", "scipy": scipy.__version__}
    counts = read_histogram(Path(args.histogram), None)
    long = histogram(lognormal(16_000_000, 700, 4096), 4096)
    turns, slow = args.turns, args.slow_turns
    depths = {packer: DEPTHS[packer] for packer in args.packers or DEPTHS}
    unlimited = {"lpfhp": (None,), "spfhp": (None,)}
    cases: dict[str, Callable[[], Any]] = {
        "histogram": lambda: measure_histogram(counts, depths, turns, slow),
        "assign": lambda: measure_assign(counts, 5),
        "long": lambda: measure_histogram(long, unlimited, turns, slow),
        "windows": lambda: measure_windows(turns),
    }
    if args.store:
        cases["local"] = lambda: measure_local(args.store)
    if args.trl:
        cases["trl"] = lambda: measure_trl(args.trl, 3)
    if args.graphcore:
        cases["graphcore"] = lambda: measure_graphcore(args.graphcore, counts, turns)
        cases["graphcore long"] = lambda: measure_graphcore(args.graphcore, long, 3)
    for name, measure in cases.items():
        if args.cases and name not in args.cases:
            continue
        print(f"\n{name}")
        found = measure()
        if args.record:  # a record a case, so that one which is cut off leaves the others'
            append("packers", about | {"case": name, "found": found})


if __name__ == "__main__":
    exit_cleanly(main)
