"""Rates of analyze.py over a made-up store, with 1 and 2 workers in turns.

Each analysis is a fresh process; its start and imports count, except where a figure says otherwise.
Its memory is the resident pages of it and of its workers, summed, so that what they share counts
more than once. Then what these rates come to for 300 G and 15 T tokens on many cores.

The store has token ids of falling frequency and documents of log-normal length. It lies in a
temporary folder (2 GB by default, where TMPDIR says) and in the page cache when the clock starts.
Does not measure a slower disk, torchrun over several machines, or a user's own metric.

    python bench/analysis.py                                          # some minutes
    python bench/analysis.py --tokens 2e6 --documents 8000 --rounds 1  # does it work?
    python bench/analysis.py --record                                 # and a line of results/
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from record import ROOT, Figures, append, significant, surroundings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from analyze import MOST_SHARDS, SHARD
from support.base.runtime import exit_cleanly
from support.text.store import FORMAT

SEQ_LEN, METRICS, VOCAB_SIZE = 2048, ("rarity", "length"), 50_257
CHUNK = 1 << 24  # numbers written at once
MADE_UP = "made-up"  # where a store names what it was made with
PLANNED, CORES = (300e9, 15e12), (1, 2, 16, 64, 1024)


def write_store(folder: Path, tokens: int, documents: int) -> None:
    """A store as prepare.py lays it out, but for its sha256, which nothing verifies here."""
    random = np.random.default_rng(0)
    weights = np.cumsum(random.lognormal(size=documents))
    stops = (weights / weights[-1] * (tokens - 2 * documents)).astype(np.int64)
    stops += 2 * np.arange(1, documents + 1)  # no document without a token and its end
    folder.mkdir()
    np.concatenate(([0], stops)).tofile(folder / "documents.idx")
    # The id of rank r has a frequency of some 1 / r: its inverse distribution, in 2^16 steps.
    ids = np.exp((np.arange(2**16) + 0.5) / 2**16 * math.log(VOCAB_SIZE - 1)).astype(np.uint16) - 1
    with open(folder / "tokens.bin", "wb") as file:
        for first in range(0, tokens, CHUNK):
            last = min(first + CHUNK, tokens)
            chunk = ids[random.integers(0, 2**16, last - first, np.uint16)]
            ends = stops[slice(*np.searchsorted(stops, (first + 1, last + 1)))]
            chunk[ends - 1 - first] = VOCAB_SIZE - 1
            file.write(chunk)
        os.fsync(file.fileno())
    write_meta(folder, tokens, documents)


def write_meta(folder: Path, tokens: int, documents: int) -> None:
    """The meta.json of a store all of whose documents are for training."""
    meta = {
        "format": FORMAT,
        "tokenizer": MADE_UP,
        "tokenizer_fingerprint": MADE_UP,
        "dtype": "uint16",
        "vocab_size": VOCAB_SIZE,
        "end_of_text": VOCAB_SIZE - 1,
        "tokens": tokens,
        "train_tokens": tokens,
        "documents": documents,
        "train_documents": documents,
        "sha256": {"tokens.bin": MADE_UP, "documents.idx": MADE_UP},
    }
    (folder / "meta.json").write_text(json.dumps(meta))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and of all that it started."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = " ".join((thread / "children").read_text() for thread in threads)
    except OSError:  # it has ended meanwhile
        return 0
    own = re.search(r"VmRSS:\s+(\d+) kB", status)
    total = 1024 * int(own[1]) if own else 0
    for child in children.split():
        total += resident_bytes(int(child))
    return total


class Run(NamedTuple):
    """One analysis."""

    seconds: float
    merge_seconds: float  # of it, to the length of a poll or two
    peak_bytes: int
    samples: int


def is_merging(out: Path) -> bool:
    """Whether the files of some index were begun and not all indexes are whole."""
    begun = any(out.rglob("*values.bin*"))
    return begun and len(list(out.glob("*/*/index.json"))) < len(METRICS)


def analyze(store: Path, out: Path, workers: int) -> Run:
    """Run analyze.py in a fresh process and watch it."""
    command = [sys.executable, str(ROOT / "analyze.py"), str(store)]
    command += ["--metric", ",".join(METRICS), "--samples", "pieces", "--seq-len", str(SEQ_LEN)]
    command += ["--workers", str(workers), "--out", str(out)]
    peak, merging = 0, []
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            if is_merging(out):
                merging.append(time.perf_counter())
            time.sleep(0.03 if workers == 1 else 0.2)  # on two cores this would be a third load
        seconds = time.perf_counter() - started
        if process.returncode:
            log.seek(0)
            raise ValueError(f"{' '.join(command)}: {log.read()[-1000:]}")
    index = out / f"pieces-{SEQ_LEN}" / METRICS[0] / "index.json"
    samples = json.loads(index.read_text())["samples"]
    shutil.rmtree(out)
    merge_seconds = merging[-1] - merging[0] if merging else 0.0
    return Run(seconds, merge_seconds, peak, samples)


def ratios(one_worker: list[float], two_workers: list[float]) -> list[float]:
    return [one / two for one, two in zip(one_worker, two_workers, strict=True)]


def measure(folder: Path, tokens: int, documents: int, rounds: int) -> Figures:
    print(f"\nanalysis by {', '.join(METRICS)}: {tokens:,} tokens, {documents:,} documents")
    write_store(folder / "few", 10_000, 40)
    write_store(folder / "store", tokens, documents)
    starts: list[float] = []
    one: list[Run] = []
    two: list[Run] = []
    for turn in range(rounds):
        starts.append(analyze(folder / "few", folder / "out", 1).seconds)
        for workers in (1, 2) if turn % 2 else (2, 1):  # so that noise slows both alike
            run = analyze(folder / "store", folder / "out", workers)
            (one if workers == 1 else two).append(run)
    shutil.rmtree(folder / "store")

    def without_start(run: Run) -> float:
        return max(run.seconds - statistics.median(starts), 1e-3)

    def mapping(run: Run) -> float:
        return max(without_start(run) - run.merge_seconds, 1e-3)

    def merge_rate(run: Run) -> float:
        return len(METRICS) * run.samples / max(run.merge_seconds, 1e-3)

    both = ([without_start(run) for run in runs] for runs in (one, two))
    mapped = ([mapping(run) for run in runs] for runs in (one, two))
    walls = ([run.seconds for run in runs] for runs in (one, two))
    figures = Figures()
    figures.add("tokens_per_s", [tokens / run.seconds for run in one], ">= 30e6")
    figures.add("tokens_per_s_2_workers", [tokens / run.seconds for run in two])
    figures.add("ratio_2_to_1", ratios(*both), ">= 1.7")  # without the start
    figures.add("ratio_2_to_1_with_start", ratios(*walls))
    figures.add("peak_resident_gb", [run.peak_bytes / 1e9 for run in one], "<= 1.5")
    figures.add("peak_resident_gb_2_workers", [run.peak_bytes / 1e9 for run in two], "<= 1.5")
    figures.add("start_s", starts)  # of the analysis of 40 documents
    figures.add("merge_s", [run.merge_seconds for run in one])
    figures.add("map_tokens_per_s", [tokens / mapping(run) for run in one])
    figures.add("map_ratio_2_to_1", ratios(*mapped))
    figures.add("merge_samples_per_s", [merge_rate(run) for run in one])
    return figures


def planned(rates: Figures) -> dict:
    """Hours and bytes at sizes that were not measured; what is assumed is printed first."""
    names = ("map_tokens_per_s", "map_ratio_2_to_1", "merge_samples_per_s")
    map_rate, ratio, merge_rate = (rates[name][1] for name in names)
    print(
        f"\nplan, on paper: rows of {SEQ_LEN:,} tokens, one metric whose values have 4 bytes."
        f"\n  Assumed: {map_rate / 1e6:.0f} M tokens/s on a core, both passes together, as measured"
        f" for {' and '.join(METRICS)} of documents;\n  {ratio:.2f} times that on 2 cores and from"
        " there on in proportion, up to as many cores as there are shards;\n  then the merge, by"
        f" one thread, {merge_rate / 1e6:.1f} M samples/s; disks that keep up with all of it."
    )
    plans = {}
    for tokens in PLANNED:
        samples = -(-int(tokens) // SEQ_LEN)
        shards = -(-samples // max(SHARD, -(-samples // MOST_SHARDS)))
        id_bytes = 4 if samples < 2**32 else 8  # as analyze.py chooses them
        plan = {"merge_hours": samples / merge_rate / 3600}
        for cores in CORES:
            at_once = shards / -(-shards // cores)  # the last round of shards leaves cores idle
            speedup = max(at_once * ratio / 2, 1)
            map_hours = tokens / (map_rate * speedup) / 3600
            plan[f"hours_on_{cores}"] = map_hours + plan["merge_hours"]
        plan["values_gb"] = samples * 4 / 1e9
        plan["order_gb"] = samples * id_bytes / 1e9
        plan["temporary_gb"] = plan["values_gb"] + plan["order_gb"]
        plans[f"{tokens:g}"] = {name: significant(value, 3) for name, value in plan.items()}
        print(f"  {tokens:g} tokens: {samples:,} samples, ids of {id_bytes} bytes")
        print("   " + ", ".join(f"{k} {v:g}" for k, v in plans[f"{tokens:g}"].items()))
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=float, default=1e9, help="of the store (1e9)")
    parser.add_argument("--documents", type=float, default=4e6, help="of the store (4e6)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of one and two workers (3)")
    parser.add_argument("--record", action="store_true", help="append to results/curriculum.jsonl")
    args = parser.parse_args()
    tokens, documents = int(args.tokens), int(args.documents)
    if not 2 <= 2 * documents <= tokens:
        raise ValueError(f"--documents {documents:,}: choose 1 to half of --tokens {tokens:,}")
    record = surroundings() | {"bench": "analysis", "arguments": vars(args)}
    print(record["hardware"])
    with tempfile.TemporaryDirectory() as folder:
        record["analysis"] = measure(Path(folder), tokens, documents, args.rounds)
    record["plan"] = planned(record["analysis"])
    if args.record:
        append("curriculum", record)


if __name__ == "__main__":
    exit_cleanly(main)
