"""How near prepare.py comes to encoding alone: documents a second of both, in turns.

The yardstick is tiktoken's encode_ordinary_batch on the same texts, already in memory and on as
many threads; prepare.py also reads, parses, splits off the held-out documents, hashes and writes. A
ratio of 1 means that all this costs no time. Does not measure the learning of a vocabulary.

    python bench/prepare_rate.py corpus/pd-mix.jsonl.gz
    python bench/prepare_rate.py corpus/pd-mix.jsonl.gz --tokenizer gpt2 --record
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import tiktoken
from record import append, min_median_max, surroundings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from prepare import prepare
from support.text.reading import input_files, read_documents
from support.text.tokenizer import get_encoding


def time_both(path: Path, name: str, rounds: int) -> dict:
    """Time the yardstick and prepare.py in turns, so that a busy machine slows both alike."""
    encoding = get_encoding(name)
    threads = os.cpu_count() or 1
    texts = [one.text for one in read_documents(input_files([path])) if one.text]
    seconds: dict[str, list[float]] = {"encode": [], "prepare": []}
    for _ in range(rounds + 1):
        started = time.perf_counter()
        encoding.encode_ordinary_batch(texts, num_threads=threads)
        seconds["encode"].append(time.perf_counter() - started)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            prepare([path], Path(folder) / "store", encoding, name)
            seconds["prepare"].append(time.perf_counter() - started)
    rates = {key: [len(texts) / s for s in values[1:]] for key, values in seconds.items()}
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return {
        "bench": "prepare",
        "tiktoken": tiktoken.__version__,
        "corpus": path.name,
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "tokenizer": name,
        "encoding_threads": threads,
        "rounds": rounds,
        "encode_documents_per_s_min_median_max": min_median_max(rates["encode"], 5),
        "prepare_documents_per_s_min_median_max": min_median_max(rates["prepare"], 5),
        "ratio_of_medians": round(medians["prepare"] / medians["encode"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("corpora", nargs="+", type=Path)
    parser.add_argument("--tokenizer", default="pd4k")
    parser.add_argument("--rounds", type=int, default=7, help="after a first to warm up (7)")
    parser.add_argument("--record", action="store_true", help="append to results/prepare.jsonl")
    args = parser.parse_args()
    for path in args.corpora:
        record = surroundings() | time_both(path, args.tokenizer, args.rounds)
        print(json.dumps(record, indent=1))
        if args.record:
            append("prepare", record)


if __name__ == "__main__":
    main()
