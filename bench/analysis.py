"""Rates of the curriculum at scale: the offline analysis, and the sampler on a finished index.

analysis  `curriculum.py analyze` over a made-up store, with 1 and 2 workers in turns. Each run is a
          fresh process, and its start and imports count but where it says so; its memory is the
          resident pages of it and of its workers, summed, so that what they share counts more than
          once. Then what these rates come to for 300 G and 15 T tokens on many cores.
sampling  an index of a billion samples: opening it, drawing batches of ids from half and all of it
          and from where two metrics meet, and the memory that ten thousand batches leave behind;
          rows of the stream first, then as many documents, whose table of spans is made once.

The store has token ids of falling frequency and documents of log-normal length; an index orders its
samples by a multiplication modulo their number, so it is a true permutation and no list of it is
ever in memory. Both lie in a temporary folder (40 GB by default, where TMPDIR says) and in the page
cache when the clock starts, except where it says cold. Does not measure the reading of a disk
slower than that, torchrun over several machines, or a user's own metric.

    python bench/curriculum.py                                                # some minutes
    python bench/curriculum.py --tokens 2e6 --documents 8000 --pool 1e6 --rounds 1  # does it work?
    python bench/curriculum.py --only analysis --record      # and a line of results/
"""

import argparse
import datetime
import gc
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # what is measured

from analyze import MOST_SHARDS, SHARD
from curriculum import Curriculum, CurriculumConfig, Pool, settled
from data import Samples
from difficulty import DifficultyIndex
from plan import Plan
from support.rng import shuffled
from support.token_store import FORMAT

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN, METRICS, VOCAB_SIZE = 2048, ("rarity", "length"), 50_257
BATCH = 1024  # samples of a global batch
CHUNK = 1 << 24  # numbers written at once
MADE_UP = "made up"  # where a store or an index names what it was made with
SHARES = (0.618034, 0.414214)  # of all samples, from one rank to the next: far by either metric
PLANNED, CORES = (300e9, 15e12), (1, 2, 16, 64, 1024)


class Figures(dict):
    """What was measured, for the record; printed as it comes in."""

    def add(self, name: str, value: object, target: str = "") -> None:
        if isinstance(value, (list, np.ndarray)):
            value = [float(f"{f(value):.4g}") for f in (min, statistics.median, max)]
        self[name] = value
        print(f"  {name:32} {value}" + (f"   target {target}" if target else ""), flush=True)


# ---- analysis


def write_store(folder: Path, tokens: int, documents: int) -> None:
    """A store as data.py prepare lays it out; its sha256 are left empty, nobody verifies it."""
    random = np.random.default_rng(0)
    weights = np.cumsum(random.lognormal(size=documents))
    stops = (weights / weights[-1] * (tokens - 2 * documents)).astype(np.int64)
    stops += 2 * np.arange(1, documents + 1)  # no document without a token and its end
    folder.mkdir()
    np.concatenate(([0], stops)).tofile(folder / "documents.idx")
    # Of rank r some 1 / r, by the inverse of the distribution; 2^16 steps of it.
    ids = np.exp((np.arange(2**16) + 0.5) / 2**16 * math.log(VOCAB_SIZE - 1)).astype(np.uint16) - 1
    with open(folder / "tokens.bin", "wb") as file:
        for first in range(0, tokens, CHUNK):
            last = min(first + CHUNK, tokens)
            chunk = ids[random.integers(0, 2**16, last - first, np.uint16)]
            ends = stops[slice(*np.searchsorted(stops, (first + 1, last + 1)))]
            chunk[ends - 1 - first] = VOCAB_SIZE - 1
            file.write(chunk)
        os.fsync(file.fileno())
    meta = {"format": FORMAT, "tokenizer": MADE_UP, "tokenizer_fingerprint": MADE_UP}
    meta |= {"dtype": "uint16", "vocab_size": VOCAB_SIZE, "end_of_text": VOCAB_SIZE - 1}
    meta |= {"tokens": tokens, "train_tokens": tokens, "documents": documents}
    meta |= {"train_documents": documents, "sha256": {"tokens.bin": "", "documents.idx": ""}}
    (folder / "meta.json").write_text(json.dumps(meta))


def resident_bytes(pid: int) -> int:
    """Of a process and all that it started."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = " ".join((thread / "children").read_text() for thread in threads)
    except OSError:  # it has ended meanwhile
        return 0
    own = 1024 * int(found[1]) if found else 0
    return own + sum(map(resident_bytes, map(int, children.split())))


def analyzed(store: Path, out: Path, workers: int) -> dict[str, float]:
    """Analyze in a fresh process: seconds in all and of the merge, peak memory, samples."""
    command = [sys.executable, str(ROOT / "curriculum.py"), "analyze", str(store)]
    command += ["--metric", ",".join(METRICS), "--samples", "pieces", "--seq-len", str(SEQ_LEN)]
    command += ["--workers", str(workers), "--out", str(out)]
    folder, peak, merging = out / f"pieces-{SEQ_LEN}", 0, []
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            if any(folder.glob(".*/index-*")):  # an index that is unfinished
                merging.append(time.perf_counter())
            time.sleep(0.03 if workers == 1 else 0.2)  # on two cores this would be a third load
        wall = time.perf_counter() - started
        if process.returncode:
            log.seek(0)
            raise ValueError(f"{' '.join(command)}: {log.read()[-1000:]}")
    samples = json.loads((folder / METRICS[0] / "index.json").read_text())["samples"]
    shutil.rmtree(out)
    merge = merging[-1] - merging[0] if merging else 0.0  # to a poll or two
    return {"wall": wall, "merge": merge, "peak": peak, "samples": samples}


def analysis(folder: Path, tokens: int, documents: int, rounds: int) -> Figures:
    print(f"\nanalysis by {', '.join(METRICS)}: {tokens:,} tokens, {documents:,} documents")
    write_store(folder / "few", 10_000, 40)
    write_store(folder / "store", tokens, documents)
    starts, runs = [], {1: [], 2: []}
    for turn in range(rounds):
        starts.append(analyzed(folder / "few", folder / "out", 1)["wall"])
        for workers in (1, 2) if turn % 2 else (2, 1):  # so that noise troubles both alike
            runs[workers].append(analyzed(folder / "store", folder / "out", workers))
    shutil.rmtree(folder / "store")
    for run in runs[1] + runs[2]:
        run["own"] = max(run["wall"] - statistics.median(starts), 1e-3)
        run["map"] = max(run["own"] - run["merge"], 1e-3)

    def ratio(part: str) -> list[float]:
        return [one[part] / two[part] for one, two in zip(*runs.values(), strict=True)]

    merged = [(len(METRICS) * run["samples"], run["merge"]) for run in runs[1]]
    figures = Figures()
    figures.add("tokens_per_s", [tokens / run["wall"] for run in runs[1]], ">= 30e6")
    figures.add("tokens_per_s_2_workers", [tokens / run["wall"] for run in runs[2]])
    figures.add("ratio_2_to_1", ratio("own"), ">= 1.7")  # without the start
    figures.add("ratio_2_to_1_with_start", ratio("wall"))
    figures.add("peak_resident_gb", [run["peak"] / 1e9 for run in runs[1]], "<= 1.5")
    figures.add("peak_resident_gb_2_workers", [run["peak"] / 1e9 for run in runs[2]], "<= 1.5")
    figures.add("start_s", starts)  # the wall time of 40 documents
    figures.add("merge_s", [run["merge"] for run in runs[1]])
    figures.add("map_tokens_per_s", [tokens / run["map"] for run in runs[1]])
    figures.add("map_ratio_2_to_1", ratio("map"))
    figures.add("merge_samples_per_s", [samples / max(s, 1e-3) for samples, s in merged])
    return figures


def planned(rates: Figures) -> dict:
    """Hours and bytes at sizes that nobody measured here; what is assumed is printed first."""
    names = ("map_tokens_per_s", "map_ratio_2_to_1", "merge_samples_per_s")
    map_rate, ratio, merge_rate = (rates[name][1] for name in names)
    print(
        f"\nplan, on paper: rows of {SEQ_LEN:,} tokens, one metric whose values have 4 bytes."
        f"\n  Assumed: {map_rate / 1e6:.0f} M tokens/s on a core, both passes together, as measured"
        f" for {' and '.join(METRICS)} of documents;\n  {ratio:.2f} times that on 2 cores and from"
        " there on in proportion, to as many cores as there are shards;\n  then the merge, by one"
        f" thread, {merge_rate / 1e6:.1f} M samples/s; disks that keep up with all of it."
    )
    plans = {}
    for tokens in PLANNED:
        samples = -(-int(tokens) // SEQ_LEN)
        shards = -(-samples // max(SHARD, -(-samples // MOST_SHARDS)))
        id_bytes = 4 if samples < 2**32 else 8  # as difficulty.measured has it
        found = {"merge_hours": samples / merge_rate / 3600}
        for cores in CORES:
            at_once = shards / -(-shards // cores)  # the last round of shards leaves cores idle
            speedup = max(at_once * ratio / 2, 1)
            map_hours = tokens / (map_rate * speedup) / 3600
            found[f"hours_on_{cores}"] = map_hours + found["merge_hours"]
        found |= {"values_gb": samples * 4 / 1e9, "order_gb": samples * id_bytes / 1e9}
        found["temporary_gb"] = found["values_gb"] + found["order_gb"]
        plans[f"{tokens:g}"] = {name: float(f"{value:.3g}") for name, value in found.items()}
        print(f"  {tokens:g} tokens: {samples:,} samples, ids of {id_bytes} bytes")
        print("   " + ", ".join(f"{k} {v:g}" for k, v in plans[f"{tokens:g}"].items()))
    return plans


# ---- sampling


def write_index(folder: Path, n: int, share: float) -> DifficultyIndex:
    """Order i -> (a i + c) mod n and values that ascend along it, in a few passes over chunks.

    A float32 makes ties of up to 64 samples in a billion; these are not ordered by id.
    """
    a, c = max(int(share * n), 1), n // 3
    while math.gcd(a, n) > 1:
        a += 1
    back = pow(a, -1, n)  # of sample s the rank is back (s - c)
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
    about = {"fingerprint": MADE_UP, "samples": n, "values": "float32", "order": "uint32"}
    (folder / "index.json").write_text(json.dumps(about))
    return DifficultyIndex.open(folder, MADE_UP)


def planner(samples: Samples) -> Plan:
    """A Plan that can only draw: it has no store, no model and no index."""
    plan = object.__new__(Plan)
    plan.settings, plan.samples = SimpleNamespace(run=SimpleNamespace(seed=1337)), samples
    return plan


def write_documents(folder: Path, n: int) -> SimpleNamespace:
    """As much of a store as its samples need: n documents, each of which is one sample."""
    random, last = np.random.default_rng(0), 0
    folder.mkdir()
    with open(folder / "documents.idx", "wb") as file:
        file.write(np.zeros(1, np.int64))
        for first in range(0, n, CHUNK):
            lengths = random.integers(2, SEQ_LEN, min(CHUNK, n - first), np.int64)
            file.write(last + np.cumsum(lengths))
            last += int(lengths.sum())
    offsets = np.memmap(folder / "documents.idx", np.int64, "r")
    meta = {"sha256": {"documents.idx": MADE_UP}}
    return SimpleNamespace(path=folder, meta=meta, offsets=offsets, train_documents=n)


def opened(folders: list[Path]) -> int:
    """What a run does before its first step: open, check the pacings, find and size the pool."""
    indexes = {path.name: DifficultyIndex.open(path, MADE_UP) for path in folders}
    config = settled(CurriculumConfig(",".join(indexes)), SEQ_LEN)
    return Curriculum(config, 1e9, SEQ_LEN, indexes).at(0).pool.size


def milliseconds(function: Callable[[int], object], times: int) -> np.ndarray:
    """Of each call with 0, 1, ...; the array is touched first, so that memory does not grow."""
    found = np.ones(times)
    for i in range(times):
        started = time.perf_counter()
        function(i)
        found[i] = 1e3 * (time.perf_counter() - started)
    return found


def memory_mb() -> dict[str, float]:
    """Of this process: what is its own, and mapped pages of files, which are the page cache's."""
    kb = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text()))
    resident, own = int(kb["Rss"]), int(kb["Anonymous"])
    return {"anonymous": own / 1e3, "mapped": (resident - own) / 1e3}


def sampling(folder: Path, n: int, batches: int) -> Figures:
    print(f"\nsampling: batches of {BATCH:,} of {n:,} samples")
    folders = [folder / name for name in METRICS]
    indexes = [write_index(*each) for each in zip(folders, (n, n), SHARES, strict=True)]
    stream = SimpleNamespace(train_documents=1, offsets=np.array([0, n * SEQ_LEN]))
    plan, figures = planner(Samples(stream, SEQ_LEN, stream=True)), Figures()
    figures.add("open_ms", milliseconds(lambda _: opened(folders[:1]), 20), "<= 50")
    figures.add("open_two_metrics_ms", milliseconds(lambda _: opened(folders), 5))
    gc.collect()  # a Curriculum is a cycle, and holds its mappings until then
    for percent in (50, 100):
        pool = Pool(((indexes[0].at_percent(percent), indexes[0]),))
        draw_from(pool, plan, f"at_{percent}", batches, figures)
    for percent in (50, 10):
        pool = Pool(tuple((index.at_percent(percent), index) for index in indexes))
        draw_from(pool, plan, f"of_two_at_{percent}", batches // 10, figures)
    store = write_documents(folder / "documents", n)
    (made,) = milliseconds(lambda _: Samples(store, SEQ_LEN), 1)
    figures.add("table_made_s", round(made / 1e3, 1))  # once a store and sample length
    figures.add("open_documents_ms", milliseconds(lambda _: Samples(store, SEQ_LEN), 20), "<= 50")
    pool = Pool(((indexes[0].at_percent(50), indexes[0]),))
    documents = planner(Samples(store, SEQ_LEN))
    assert len(documents.samples) == n
    draw_from(pool, documents, "documents_at_50", batches, figures)
    del documents
    shutil.rmtree(folder / "documents")
    del indexes, pool  # what is mapped stays in the page cache
    for path in folder.glob("*/*.bin"):
        with open(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    figures.add("open_cold_ms", milliseconds(lambda _: opened(folders[:1]), 1))
    pool = Pool(((n, DifficultyIndex.open(folders[0], MADE_UP)),))
    figures.add("batch_cold_ms", milliseconds(lambda i: plan.draw(i * BATCH, BATCH, 0, pool), 20))
    return figures


def draw_from(pool: Pool, plan: Plan, where: str, batches: int, figures: Figures) -> None:
    """Draw batch after batch; then the parts of a draw alone, and what memory it left behind."""
    first, ranks = 0, [np.arange(i * BATCH, (i + 1) * BATCH) for i in range(100)]

    def draw(_: int) -> None:
        nonlocal first
        first = plan.draw(first, BATCH, 0, pool)[1]

    draw(0)
    before = memory_mb()
    took = milliseconds(draw, batches)
    after = memory_mb()
    figures.add(f"batch_ms_{where}", took, "<= 1" if len(pool.filters) == 1 else "")
    figures.add(f"samples_per_s_{where}", BATCH * 1e3 / took)
    figures.add(f"acceptance_{where}", round(BATCH * (batches + 1) / first, 4))
    n, spans = pool.reach, plan.samples.spans
    ids = [shuffled(some, n, 1) for some in ranks]
    figures.add(f"shuffled_ms_{where}", milliseconds(lambda i: shuffled(ranks[i], n, 1), 100))
    figures.add(f"ids_ms_{where}", milliseconds(lambda i: pool.ids(ids[i]), 100))
    figures.add(f"spans_ms_{where}", milliseconds(lambda i: spans(ids[i]), 100))
    for key, target in (("anonymous", "0, about"), ("mapped", "")):
        figures.add(f"{key}_mb_before_{where}", round(before[key], 1))
        figures.add(f"{key}_mb_grown_{where}", round(after[key] - before[key], 1), target)


# ---- command


def surroundings() -> dict:
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    machine = f"{platform.system()} {platform.machine()}"
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = {"date": datetime.date.today().isoformat(), "bench": "curriculum", "commit": commit}
    found["hardware"] = f"{os.cpu_count()} cores of {cpu[1] if cpu else '?'}, {machine}"
    return found | {"python": platform.python_version(), "numpy": np.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", choices=("analysis", "sampling"), help="(default: both)")
    parser.add_argument("--tokens", type=float, default=1e9, help="of the store (1e9)")
    parser.add_argument("--documents", type=float, default=4e6, help="of the store (4e6)")
    parser.add_argument("--pool", type=float, default=1e9, help="samples of an index (1e9)")
    parser.add_argument("--rounds", type=int, default=3, help="of the analysis (3)")
    parser.add_argument("--batches", type=int, default=10_000, help="to draw (10000)")
    parser.add_argument("--record", action="store_true", help="append to results/curriculum.jsonl")
    args = parser.parse_args()
    tokens, documents, pool = int(args.tokens), int(args.documents), int(args.pool)
    if not 2 <= 2 * documents <= tokens:
        raise ValueError(f"--documents {documents:,}: from 1 to half of --tokens {tokens:,}")
    if not 100 <= pool < 2**32:
        raise ValueError(f"--pool {pool:,}: from 100 to 2^32 - 1, its ids are uint32")
    record = surroundings() | {"arguments": vars(args)}
    print(record["hardware"])
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "sampling":
            record["analysis"] = analysis(Path(folder), tokens, documents, args.rounds)
            record["plan"] = planned(record["analysis"])
        if args.only != "analysis":
            record["sampling"] = sampling(Path(folder), pool, args.batches)
    if args.record:
        with (ROOT / "results" / "curriculum.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
