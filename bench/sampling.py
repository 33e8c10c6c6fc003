"""Rates of the sampler on a finished index of a billion samples.

Opening the index, drawing batches of samples from half and all of it and from where two metrics
meet, and the memory that ten thousand batches leave behind: rows of the stream first, then as many
documents, whose table of spans is made once.

The order of an index is a multiplication modulo the number of samples, so it is a true permutation
and no list of it is ever in memory. The tokens of the stores are a hole in a file, since drawing
reads none. All lies in a temporary folder (40 GB by default, where TMPDIR says) and in the page
cache when the clock starts, except where a figure says cold.

    python bench/sampling.py                       # some minutes
    python bench/sampling.py --samples 1e6         # does it work?
    python bench/sampling.py --record              # and a line of results/
"""

import argparse
import gc
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from analysis import CHUNK, METRICS, SEQ_LEN, write_meta
from record import Figures, append, surroundings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import plan
from curriculum import Curriculum, CurriculumConfig, Stage, parse_metrics
from difficulty import fingerprint, opened
from support.base.rng import shuffled
from support.base.runtime import exit_cleanly
from support.rows.samples import Samples
from support.text.store import Store

BATCH = 1024  # samples of a global batch
SHARES = (0.618034, 0.414214)  # of all samples, from one rank to the next: far by either metric
BUDGET = 1000  # tokens of the run whose curriculum is asked; the number does not matter
SEED = 1337


def write_index(folder: Path, share: float, n: int, fingerprint: str) -> None:
    """An index with the order i -> (a i + c) mod n, and values that ascend along it.

    Values of float32 tie up to 64 samples in a billion; these are not ordered by id.
    """
    a, c = max(int(share * n), 1), n // 3
    while math.gcd(a, n) > 1:
        a += 1
    back = pow(a, -1, n)  # the rank of sample s is back (s - c) mod n
    folder.mkdir()
    files = {"order": (a, c, np.uint32), "values": (back, -c * back, np.float32)}
    for name, (factor, shift, dtype) in files.items():
        steps = np.arange(min(CHUNK, n), dtype=np.uint64) * np.uint64(factor) % np.uint64(n)
        with open(folder / f"{name}.bin", "wb") as file:
            for first in range(0, n, CHUNK):
                numbers = steps[: n - first] + np.uint64((first * factor + shift) % n)
                numbers -= (numbers >= n) * np.uint64(n)
                file.write(numbers.astype(dtype))
            os.fsync(file.fileno())
    about = {"fingerprint": fingerprint, "samples": n, "values": "float32", "order": "uint32"}
    (folder / "index.json").write_text(json.dumps(about))


def write_stream(folder: Path, n: int) -> None:
    """A store of one document, which is cut into n rows."""
    write_hollow_store(folder, [np.array([0, n * SEQ_LEN])])


def write_documents(folder: Path, n: int) -> None:
    """A store of n documents, each of which is one sample."""
    random = np.random.default_rng(0)

    def offsets() -> Iterator[np.ndarray]:
        last = 0
        yield np.zeros(1, np.int64)
        for first in range(0, n, CHUNK):
            lengths = random.integers(2, SEQ_LEN, min(CHUNK, n - first), np.int64)
            yield last + np.cumsum(lengths)
            last += int(lengths.sum())

    write_hollow_store(folder, offsets())


def write_hollow_store(folder: Path, offsets: Iterable[np.ndarray]) -> None:
    """A store with these offsets, all of whose tokens are 0 and take no room on the disk."""
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


def open_samples(folder: Path, kind: str) -> Samples:
    return Samples(Store.open(folder), kind, SEQ_LEN)


def open_curriculum(
    samples: Samples, folder: Path, names: tuple[str, ...], *, percent: int
) -> Stage:
    """What a run does before its first step: open indexes, check the pacings, size the pool.

    Returns: the stage in which the easiest `percent` by each metric may be drawn
    """
    indexes = opened(folder, {name: fingerprint(samples, name) for name in names})
    pace = f"discrete:{percent}@1:100"
    config = CurriculumConfig(metric=",".join(names), pace=",".join([pace] * len(names)))
    metrics = parse_metrics(config, SEQ_LEN)
    stage = Curriculum(metrics, BUDGET, SEQ_LEN, indexes).at(0)
    assert stage.pool is None or 0 < stage.pool.size < len(samples)
    return stage


def milliseconds(function: Callable[[int], object], times: int) -> np.ndarray:
    """Of each call with 0, 1, ...; the array is touched first, so that memory does not grow."""
    took = np.ones(times)
    for i in range(times):
        started = time.perf_counter()
        function(i)
        took[i] = 1e3 * (time.perf_counter() - started)
    return took


class Memory(NamedTuple):
    """Of this process, in MB: its own, and mapped pages of files, which are the page cache's."""

    anonymous: float
    mapped: float

    @classmethod
    def now(cls) -> "Memory":
        text = Path("/proc/self/smaps_rollup").read_text()
        kb = dict(re.findall(r"(\w+):\s+(\d+) kB", text))
        resident, own = int(kb["Rss"]), int(kb["Anonymous"])
        return cls(anonymous=own / 1e3, mapped=(resident - own) / 1e3)


def measure_draws(samples: Samples, pool, where: str, batches: int, figures: Figures) -> None:
    """Draw batch after batch; then the parts of a draw alone, and what memory it left behind."""
    first = 0

    def draw_next(_: int) -> None:
        nonlocal first
        drawn = plan.draw(samples, pool, first=first, count=BATCH, stage_start=0, seed=SEED)
        first = drawn.next_sample

    draw_next(0)
    before = Memory.now()
    took = milliseconds(draw_next, batches)
    after = Memory.now()
    figures.add(f"batch_ms_{where}", took, "" if where.startswith("of_two") else "<= 1")
    figures.add(f"samples_per_s_{where}", BATCH * 1e3 / took)
    figures.add(f"acceptance_{where}", round(BATCH * (batches + 1) / first, 4))
    ranks = [np.arange(i * BATCH, (i + 1) * BATCH) for i in range(100)]
    n = pool.reach if pool else len(samples)
    ids = [shuffled(some, n, SEED) for some in ranks]
    figures.add(f"shuffled_ms_{where}", milliseconds(lambda i: shuffled(ranks[i], n, SEED), 100))
    if pool:
        figures.add(f"ids_ms_{where}", milliseconds(lambda i: pool.ids(ids[i]), 100))
    figures.add(f"spans_ms_{where}", milliseconds(lambda i: samples.spans(ids[i]), 100))
    for name, start, end in zip(Memory._fields, before, after, strict=True):
        figures.add(f"{name}_mb_before_{where}", round(start, 1))
        target = "0, about" if name == "anonymous" else ""
        figures.add(f"{name}_mb_grown_{where}", round(end - start, 1), target)


def forget_pages(folder: Path) -> None:
    """Drop the files of the indexes from the page cache."""
    for path in folder.glob("*/*.bin"):
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, n: int, batches: int) -> Figures:
    print(f"\nsampling: batches of {BATCH:,} of {n:,} samples")
    figures, one, two = Figures(), METRICS[:1], METRICS
    write_stream(folder / "stream", n)
    rows, index = open_samples(folder / "stream", "rows"), folder / "rows-index"
    index.mkdir()
    for name, share in zip(METRICS, SHARES, strict=True):
        write_index(index / name, share, n, fingerprint(rows, name))

    def opening(names: tuple[str, ...]) -> Callable[[int], object]:
        return lambda _: open_curriculum(rows, index, names, percent=50)

    figures.add("open_ms", milliseconds(opening(one), 20), "<= 50")
    figures.add("open_two_metrics_ms", milliseconds(opening(two), 5))
    for percent in (50, 99, 100):  # at 100 percent a run draws without the index
        stage = open_curriculum(rows, index, one, percent=percent)
        measure_draws(rows, stage.pool, f"at_{percent}", batches, figures)
    for percent in (50, 10):
        stage = open_curriculum(rows, index, two, percent=percent)
        measure_draws(rows, stage.pool, f"of_two_at_{percent}", batches // 10, figures)

    write_documents(folder / "documents", n)
    (made,) = milliseconds(lambda _: open_samples(folder / "documents", "pieces"), 1)
    figures.add("table_made_s", round(made / 1e3, 1))  # once a store and sample length
    again = milliseconds(lambda _: open_samples(folder / "documents", "pieces"), 20)
    figures.add("open_documents_ms", again, "<= 50")
    documents = open_samples(folder / "documents", "pieces")
    assert len(documents) == n
    stage = open_curriculum(rows, index, one, percent=50)
    measure_draws(documents, stage.pool, "documents_at_50", batches, figures)

    del stage  # what is mapped stays in the page cache
    gc.collect()
    forget_pages(index)
    figures.add("open_cold_ms", milliseconds(opening(one), 1))
    pool = open_curriculum(rows, index, one, percent=99).pool

    def draw_cold(i: int) -> None:
        plan.draw(rows, pool, first=i * BATCH, count=BATCH, stage_start=0, seed=SEED)

    figures.add("batch_cold_ms", milliseconds(draw_cold, 20))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--samples", type=float, default=1e9, help="of an index (1e9)")
    parser.add_argument("--batches", type=int, default=10_000, help="to draw (10000)")
    parser.add_argument("--record", action="store_true", help="append to results/curriculum.jsonl")
    args = parser.parse_args()
    n = int(args.samples)
    if not 100 <= n < 2**32:
        raise ValueError(f"--samples {n:,}: choose 100 to 2^32 - 1, since ids are uint32")
    if args.batches < 10:
        raise ValueError(f"--batches {args.batches}: choose 10 or more")
    record = surroundings() | {"bench": "sampling", "arguments": vars(args)}
    print(record["hardware"])
    with tempfile.TemporaryDirectory() as folder:
        record["sampling"] = measure(Path(folder), n, args.batches)
    if args.record:
        append("curriculum", record)


if __name__ == "__main__":
    exit_cleanly(main)
