"""How fast data is analysed, chosen and packed.

    analysis   analyze.py on the embedded corpus repeated to --tokens, with 1 and 2 workers in
               turns, each a fresh process; its memory is the sum of the highest resident sets of it
               and its workers
    sampling   opening a finished index of --samples samples, drawing 10,000 batches from half and
               all of it and from where two metrics meet, and the memory that they leave behind;
               rows of the stream first, then as many documents, whose table is made once
    packing    the windows that a trainer packs, from lengths to shuffled packs: of one rank in rows
               of 256, and of 8 ranks in rows of 2,048; lengths are lognormal, cut off at a row

The index has an order that is a multiplication modulo the number of samples: a true permutation of
which no list is ever in memory. The tokens of its stores are a hole in a file, since drawing reads
none. All lies in a temporary folder (analysis 2 GB, sampling 40 GB by default, where TMPDIR says)
and in the page cache when the clock starts, unless a figure says cold. Not measured: a slower disk,
torchrun over several machines, a user's own metric.

    python bench/rates.py analysis --record                           # some minutes
    python bench/rates.py sampling --samples 1e6                      # does it work?
"""

import argparse
import gc
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from measure import Taken, command_line, in_turns, measured, min_median_max, recorder, watched

import plan
from analyze import fingerprint, opened
from curriculum import Curriculum, CurriculumConfig, Stage, parse_metrics
from data import Samples
from packing import pack_lengths
from prepare import embedded_store
from support.clock import Cursor
from support.runtime import ROOT, exit_cleanly, resident
from support.store import Store

# ---- made-up stores

SEQ_LEN, METRICS = 2048, ("rarity", "length")
CHUNK = 1 << 24  # numbers written at once


def write_meta(folder: Path, tokens: int, documents: int) -> None:
    """The embedded corpus's meta.json with these counts; its sha256 sums are not those of files."""
    counts = {"tokens": tokens, "documents": documents}
    counts |= {f"train_{name}": count for name, count in counts.items()}
    meta = Store.open(embedded_store("pd4k")).meta | counts
    (folder / "meta.json").write_text(json.dumps(meta))


def write_repeated(folder: Path, tokens: int) -> int:
    """The training documents of the embedded corpus, again and again; how many tokens that is."""
    store = Store.open(embedded_store("pd4k"))
    part = store.tokens[: store.meta["train_tokens"]]
    starts = store.offsets[: store.meta["train_documents"]]
    times = math.ceil(tokens / len(part))
    folder.mkdir()
    with open(folder / "tokens.bin", "wb") as text, open(folder / "documents.idx", "wb") as index:
        for i in range(times):
            text.write(part)
            index.write(starts + i * len(part))
        index.write(np.array([times * len(part)]))
    write_meta(folder, times * len(part), times * len(starts))
    return times * len(part)


def write_hollow(folder: Path, offsets: Iterable[np.ndarray]) -> None:
    """A store with these offsets, whose tokens are all 0 and take no room on the disk."""
    folder.mkdir()
    written = 0
    with open(folder / "documents.idx", "wb") as file:
        for part in offsets:
            file.write(part)
            written += len(part)
            tokens = int(part[-1])
    with open(folder / "tokens.bin", "wb") as file:
        file.truncate(2 * tokens)
    write_meta(folder, tokens, written - 1)


# ---- analysis


def analyze(store: Path, out: Path, workers: int) -> Taken:
    command = [sys.executable, str(ROOT / "analyze.py"), str(store), "--out", str(out)]
    command += ["--metric", ",".join(METRICS), "--samples", "pieces", "--seq-len", str(SEQ_LEN)]
    command += ["--workers", str(workers)]
    run = watched(command)
    shutil.rmtree(out)
    return run


def measure_analysis(args: argparse.Namespace, folder: Path) -> dict:
    tokens = write_repeated(folder / "store", int(args.tokens))
    write_repeated(folder / "few", 1)
    variants = {
        name: partial(analyze, folder / store, folder / "out", workers)
        for name, store, workers in (("few", "few", 1), ("1", "store", 1), ("2", "store", 2))
    }
    runs = in_turns(variants, args.turns)
    start, one, two = (np.array([run.seconds for run in runs[name]]) for name in variants)
    work_of_one, work_of_two = (np.maximum(s - np.median(start), 1e-3) for s in (one, two))
    figures = {
        "tokens": tokens,
        "samples": len(open_samples(folder / "store", "pieces")),
        "start_s": min_median_max(start),
        "tokens_per_s": min_median_max(tokens / one),
        "tokens_per_s_2_workers": min_median_max(tokens / two),
        "ratio_2_to_1": min_median_max(work_of_one / work_of_two),  # without the start
        "ratio_2_to_1_with_start": min_median_max(one / two),
        "peak_resident_gb": min_median_max([run.peak_bytes / 1e9 for run in runs["1"]]),
        "peak_resident_gb_2_workers": min_median_max([run.peak_bytes / 1e9 for run in runs["2"]]),
    }
    return {"analysis": figures}


# ---- sampling

BATCH = 1024  # samples of a global batch
BATCHES = 10_000
SHARES = (0.618034, 0.414214)  # of all samples, from one rank to the next: far by either metric
BUDGET = 1000  # tokens of the run whose curriculum is asked; the number does not matter
SEED = 1337


def write_index(folder: Path, share: float, n: int, print_of_samples: str) -> None:
    """An index with the order i -> (a i + c) mod n, and values that ascend along it.

    Values of float32 tie up to 64 samples in a billion; these are not ordered by id.
    """
    a, c = max(int(share * n), 1), n // 3
    while math.gcd(a, n) > 1:
        a += 1
    back = pow(a, -1, n)  # the rank of sample s is back (s - c) mod n
    folder.mkdir(parents=True)
    files = {"order": (a, c, np.uint32), "values": (back, -c * back, np.float32)}
    for name, (factor, shift, dtype) in files.items():
        steps = np.arange(min(CHUNK, n), dtype=np.uint64) * np.uint64(factor) % np.uint64(n)
        with open(folder / f"{name}.bin", "wb") as file:
            for first in range(0, n, CHUNK):
                numbers = steps[: n - first] + np.uint64((first * factor + shift) % n)
                numbers -= (numbers >= n) * np.uint64(n)
                file.write(numbers.astype(dtype))
            os.fsync(file.fileno())
    about = {"fingerprint": print_of_samples, "samples": n, "values": "float32", "order": "uint32"}
    (folder / "index.json").write_text(json.dumps(about))


def offsets_of_documents(n: int) -> Iterator[np.ndarray]:
    """Documents of random lengths, each of which is one sample."""
    random, last = np.random.default_rng(0), 0
    yield np.zeros(1, np.int64)
    for first in range(0, n, CHUNK):
        lengths = random.integers(2, SEQ_LEN, min(CHUNK, n - first), np.int64)
        yield last + np.cumsum(lengths)
        last += int(lengths.sum())


def open_samples(folder: Path, kind: str) -> Samples:
    return Samples(Store.open(folder), kind, SEQ_LEN)


def open_curriculum(samples: Samples, folder: Path, names: tuple[str, ...], percent: int) -> Stage:
    """What a run does before its first step: open indexes, check the pacings, size the pool.

    Returns: the stage in which the easiest `percent` by each metric may be drawn
    """
    indexes = opened(folder, samples, names)
    pace = f"discrete:{percent}@1:100"
    config = CurriculumConfig(metric=",".join(names), pace=",".join([pace] * len(names)))
    return Curriculum(parse_metrics(config, SEQ_LEN), BUDGET, SEQ_LEN, indexes).at(0)


def milliseconds(action: Callable[[], object], times: int) -> np.ndarray:
    """Of each call, in memory that does not grow."""
    return np.fromiter((1e3 * measured(action).seconds for _ in range(times)), float, times)


def measure_draws(samples: Samples, pool, where: str, batches: int) -> dict:
    """Draw batch after batch; the time of each, and what memory they left behind."""
    cursor = Cursor()

    def draw_next() -> None:
        nonlocal cursor
        _, cursor = plan.draw(samples, pool, cursor, count=BATCH, seed=SEED)

    draw_next()
    before = resident("RssAnon")  # without pages of files, which are the page cache's
    taken = milliseconds(draw_next, batches)
    grown = round((resident("RssAnon") - before) / 1e6, 1)
    return {f"batch_ms_{where}": min_median_max(taken), f"own_mb_grown_{where}": grown}


def measure_sampling(args: argparse.Namespace, folder: Path) -> dict:
    """Goals: 50 ms to open, 1 ms for a batch where one metric chooses, no memory that grows."""
    n = int(args.samples)
    if not 100 <= n < 2**32:
        raise ValueError(f"--samples {n:,}: choose 100 to 2^32 - 1, since ids are uint32")
    index = folder / "index"
    write_hollow(folder / "stream", [np.array([0, n * SEQ_LEN])])
    rows = open_samples(folder / "stream", "rows")
    for name, share in zip(METRICS, SHARES, strict=True):
        write_index(index / name, share, n, fingerprint(rows, name))
    one = partial(open_curriculum, rows, index, METRICS[:1])
    two = partial(open_curriculum, rows, index, METRICS)
    figures = {
        "samples": n,
        "batch": BATCH,
        "open_ms": min_median_max(milliseconds(partial(one, 50), 20)),
        "open_two_metrics_ms": min_median_max(milliseconds(partial(two, 50), 5)),
    }
    for percent in (50, 100):  # at 100 percent a run draws without the index
        figures |= measure_draws(rows, one(percent).pool, f"at_{percent}", BATCHES)
    for percent in (50, 10):
        pool = two(percent).pool
        figures |= measure_draws(rows, pool, f"of_two_at_{percent}", BATCHES // 10)

    write_hollow(folder / "documents", offsets_of_documents(n))
    opening = partial(open_samples, folder / "documents", "pieces")
    figures["table_made_s"] = round(measured(opening).seconds, 1)  # once a store and sample length
    figures["open_documents_ms"] = min_median_max(milliseconds(opening, 20))
    figures |= measure_draws(opening(), one(50).pool, "documents_at_50", BATCHES)

    gc.collect()  # what is mapped stays in the page cache
    for path in index.glob("*/*.bin"):
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    figures["open_cold_ms"] = min_median_max(milliseconds(partial(one, 50), 1))
    return {"sampling": figures}


# ---- packing

WINDOWS = {"nano": (16 * 8, 256, 60), "8 ranks": (16 * 8 * 512, 2048, 300)}  # rows, T, median


def lognormal(count: int, median: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1, count).astype(np.int64) + 1
    return np.minimum(drawn, longest)


def pack_shuffled(lengths: np.ndarray, max_len: int) -> int:
    """As the plan does for a window; how many rows that are."""
    packs = pack_lengths(lengths, max_len)
    rows = len(packs.offsets) - 1
    packs.take(np.random.default_rng(0).permutation(rows))
    return rows


def measure_packing(args: argparse.Namespace, folder: Path) -> dict:
    found = []
    for name, (rows, max_len, median) in WINDOWS.items():
        mean = lognormal(100_000, median, max_len).mean()
        lengths = lognormal(int(rows * max_len / mean), median, max_len)
        action = partial(pack_shuffled, lengths, max_len)
        about = {"window": name, "max_len": max_len, "documents": len(lengths), "rows": action()}
        found.append(about | {"ms": min_median_max(milliseconds(action, args.turns))})
    return {"case": "windows", "found": found}


MEASURES = {  # and the file of its records
    "analysis": (measure_analysis, "curriculum"),
    "sampling": (measure_sampling, "curriculum"),
    "packing": (measure_packing, "packers"),
}


def main() -> None:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--tokens", type=float, default=1e9, help="to analyse (1e9)")
    parser.add_argument("--samples", type=float, default=1e9, help="of the index (1e9)")
    args = parser.parse_args()
    measure, file = MEASURES[args.what]
    keep = recorder(file, args, turns=args.turns)
    with tempfile.TemporaryDirectory() as folder:
        keep(measure(args, Path(folder)))


if __name__ == "__main__":
    exit_cleanly(main)
