"""Packers: how many packs, in what time, beside the published ones on the same lengths.

    histogram   each packer at several depths on a histogram of real lengths, given as a file:
                {"max_len": M, "counts": [documents of length 1, of length 2, ...]}
    assign      as many documents as the histogram has, in random order, into the packs of lpfhp
    long        16 million lengths, e to the power of a normal distribution around ln 700 with
                deviation 1, cut off at 4,096
    windows     the windows that a trainer packs: rows of 256 and of 2,048; milliseconds from
                lengths to shuffled packs
    local       a store's documents packed 100, 1,000 at a time or all together (--store FOLDER)
    trl         1 million lengths into rows of 2,048, beside TRL's best fit decreasing (--trl FILE,
                its data_utils.py; needs pyarrow), which is kept from moving any text
    graphcore   the histogram, and the long lengths, beside the paper's own code (--graphcore FOLDER
                with lpfhp.py and spfhp.py)

Two packers that are compared take turns in one process. The import of SciPy is not counted.

    python bench/packers.py HISTOGRAM.json --record
    python bench/packers.py HISTOGRAM.json --trl data_utils.py --graphcore FOLDER --record
"""

import contextlib
import importlib.util
import io
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from record import Figures, command_line, ratios, recorder
from turns import in_turns

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


def seconds_in_turns(turns: int, **actions: Callable[[], object]) -> dict[str, list[float]]:
    def seconds(action: Callable[[], object]) -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return in_turns({name: partial(seconds, action) for name, action in actions.items()}, turns)


def lognormal(count: int, median: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1, count).astype(np.int64) + 1
    return np.minimum(drawn, longest)


def measure_histogram(
    counts: np.ndarray, depths: dict[str, tuple], turns: int, slow_turns: int
) -> Iterator[Figures]:
    for packer, depth in [(name, depth) for name in depths for depth in depths[name]]:
        packing = pack(counts, packer, depth)
        figures = Figures(packer=packer, max_per_pack=depth, lower_bound=packing.lower_bound)
        figures.add(f"{packer}, {depth or 'all'}: packs", packing.packs)
        figures |= {"packs": packing.packs, "factor": round(packing.factor, 5)}
        figures |= {"efficiency": round(packing.efficiency, 6)}
        figures |= {"attention": round(packing.attention, 4)}
        times = slow_turns if packer in SLOW else turns
        taken = seconds_in_turns(times, ours=partial(pack, counts, packer, depth))
        figures.add("seconds", taken["ours"])
        yield figures


def measure_assign(counts: np.ndarray, turns: int) -> Iterator[Figures]:
    lengths = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    packing = pack(counts)
    figures = Figures(documents=len(lengths), packs=packing.packs)
    taken = seconds_in_turns(turns, ours=partial(assign, packing, lengths))
    figures.add("assign_s", taken["ours"], "below 3")
    yield figures


def measure_windows(turns: int) -> Iterator[Figures]:
    for name, (rows, max_len, median) in WINDOWS.items():
        mean = lognormal(100_000, median, max_len).mean()
        lengths = lognormal(int(rows * max_len / mean), median, max_len)
        random = np.random.default_rng(0)

        def shuffled(lengths=lengths, max_len=max_len, random=random) -> None:
            packs = pack_lengths(lengths, max_len)
            packs.take(random.permutation(len(packs.offsets) - 1))

        figures = Figures(window=name, max_len=max_len, documents=len(lengths))
        figures.add("rows", len(pack_lengths(lengths, max_len).offsets) - 1)
        taken = seconds_in_turns(turns, ours=shuffled)
        figures.add("ms", [1000 * seconds for seconds in taken["ours"]])
        yield figures


def measure_local(path: str) -> Iterator[Figures]:
    """The cost of packing a part at a time: the share of tokens among all positions."""
    store = Store.open(path)
    documents = np.diff(store.offsets[: store.train_documents + 1])
    documents = np.random.default_rng(0).permutation(documents)
    for max_len in (256, 512, 1024, 2048):
        start, stop = cut(np.stack((0 * documents, documents), axis=1), max_len).T
        lengths = stop - start
        figures = Figures(max_len=max_len, documents=len(documents), pieces=len(lengths))
        figures.add("one_document_a_row", round(lengths.mean() / max_len, 4))
        for part in (100, 1000):
            parts = np.split(lengths, range(part, len(lengths), part))
            packs = sum(pack(histogram(some, max_len)).packs for some in parts)
            figures.add(f"lpfhp_{part}_at_a_time", round(lengths.sum() / packs / max_len, 4))
        packing = pack(histogram(lengths, max_len), "lpfhp")
        figures.add("lpfhp", round(packing.efficiency, 4))
        figures.add("attention", round(packing.attention, 4))
        yield figures


# ---- other projects' packers


def load(file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Packed(Exception):
    """TRL's packer is done, with so many packs, and about to move the text."""


def load_trl(file: str) -> types.ModuleType:
    """TRL's data_utils.py alone: of its libraries packing needs pyarrow only; it moves no text."""
    for name in ("datasets", "transformers"):
        stand_in = types.ModuleType(name)
        stand_in.__getattr__ = lambda _: object  # any name, for type hints
        sys.modules.setdefault(name, stand_in)
    module = load(file)

    def take(*_: object) -> None:
        raise Packed(len(sys._getframe(1).f_locals["bins"]))

    steps = {"take": take, "filter": lambda column, _: column}  # no document is empty
    module.pc = types.SimpleNamespace(**{**vars(module.pc), **steps})
    return module


def measure_trl(file: str, turns: int) -> Iterator[Figures]:
    import pyarrow as pa

    documents, max_len, trl = 1_000_000, 2048, load_trl(file)
    lengths = lognormal(documents, 400, max_len)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    table = pa.table({"ids": pa.ListArray.from_arrays(offsets, pa.nulls(int(lengths.sum())))})

    def their_packs() -> int:
        try:
            trl._pack_bfd(table, max_len, "split")
        except Packed as packed:
            return packed.args[0]
        raise ValueError(f"--trl {file}: _pack_bfd no longer ends in pc.take")

    figures = Figures(documents=documents, max_len=max_len, pyarrow=pa.__version__)
    figures.add("packs", len(pack_lengths(lengths, max_len, "bfd").offsets) - 1)
    figures.add("trl_packs", their_packs())
    ours = partial(pack_lengths, lengths, max_len, "bfd")
    taken = seconds_in_turns(turns, ours=ours, theirs=their_packs)
    figures.add("s", taken["ours"])
    figures.add("trl_s", taken["theirs"])
    figures.add("times_faster", ratios(taken["theirs"], taken["ours"]), "5 or more")
    yield figures


def measure_graphcore(folder: str, counts: np.ndarray, turns: int) -> Iterator[Figures]:
    max_len = len(counts) - 1
    for packer in ("lpfhp", "spfhp"):
        theirs = getattr(load(f"{folder}/{packer}.py"), f"pack_using_{packer}")
        for depth in (None, 3):

            def their_packs(theirs=theirs, depth=depth) -> int:
                with contextlib.redirect_stdout(io.StringIO()):
                    return int(theirs(counts[1:], max_len, depth or max_len)[1].sum())

            figures = Figures(packer=packer, max_per_pack=depth, max_len=max_len)
            figures.add("packs", pack(counts, packer, depth).packs)
            figures.add("graphcore_packs", their_packs())
            ours = partial(pack, counts, packer, depth)
            taken = seconds_in_turns(turns, ours=ours, theirs=their_packs)
            figures.add("s", taken["ours"])
            figures.add("graphcore_s", taken["theirs"])
            yield figures


def main() -> None:
    parser = command_line(__doc__, turns=11)
    parser.add_argument("histogram", help="file of a histogram")
    parser.add_argument("--store", help="folder made by prepare.py, for packing a part at a time")
    parser.add_argument("--trl", help="TRL's data_utils.py")
    parser.add_argument("--graphcore", help="folder with lpfhp.py and spfhp.py")
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
    if args.trl:
        cases["trl"] = measure_trl(args.trl, 3)
    if args.graphcore:
        cases["graphcore"] = measure_graphcore(args.graphcore, counts, turns)
        cases["graphcore long"] = measure_graphcore(args.graphcore, long, 3)
    for name, measure in cases.items():
        if args.cases is None or name in args.cases:
            print(f"\n{name}")
            keep({"case": name, "found": list(measure)})  # a record a case, in case one is cut off


if __name__ == "__main__":
    exit_cleanly(main)
