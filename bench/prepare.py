"""How near `data.py prepare` comes to encoding alone: documents a second of both, in turns.

The yardstick is tiktoken's encode_ordinary_batch on the same texts, already in memory and on as
many threads; prepare also reads, parses, splits off the held-out documents, hashes and writes. A
ratio of 1 means that all this costs no time. Does not measure the learning of a vocabulary.

    python bench/prepare.py corpus/pd-mix.jsonl.gz
    python bench/prepare.py corpus/pd-mix.jsonl.gz --tokenizer gpt2 --record
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken

import prepare
from support.documents import read_documents

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # what is measured

from support import tokenizer

ROOT = Path(__file__).resolve().parent.parent


def time_both(path: Path, name: str, rounds: int) -> dict:
    """Time the yardstick and prepare in alternation, so that a busy machine slows both alike."""
    encoding = tokenizer.get_encoding(name)
    threads = os.cpu_count() or 1
    texts = [text for _, text in read_documents([path]) if text]
    seconds: dict[str, list[float]] = {"encode": [], "prepare": []}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        encoding.encode_ordinary_batch(texts, num_threads=threads)
        seconds["encode"].append(time.perf_counter() - started)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            prepare.prepare([path], Path(folder) / "store", encoding, name)
            seconds["prepare"].append(time.perf_counter() - started)
    rates = {key: [len(texts) / s for s in values[1:]] for key, values in seconds.items()}
    record = {"corpus": path.name, "documents": len(texts), "tokenizer": name, "threads": threads}
    record |= {"bytes": sum(len(text.encode()) for text in texts), "rounds": rounds}
    for key, values in rates.items():
        spread = [round(f(values), 1) for f in (min, statistics.median, max)]
        record[f"{key}_documents_per_s_min_median_max"] = spread
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return record | {"ratio_of_medians": round(medians["prepare"] / medians["encode"], 3)}


def surroundings() -> dict:
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((row.split(": ")[1] for row in lines if row.startswith("model name")), cpu)
    return {
        "date": datetime.date.today().isoformat(),
        "bench": "prepare",
        "hardware": f"{os.cpu_count()} cores of {cpu}, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "tiktoken": tiktoken.__version__,
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--tokenizer", default="pd4k")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up (7)")
    parser.add_argument("--record", action="store_true", help="append to results/prepare.jsonl")
    args = parser.parse_args()
    for path in args.corpora:
        record = surroundings() | time_both(path, args.tokenizer, args.rounds)
        print(json.dumps(record, indent=1))
        if args.record:
            with (ROOT / "results" / "prepare.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
