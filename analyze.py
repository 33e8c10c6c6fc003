"""Sort a store's samples by difficulty, so that a curriculum can draw the easy ones first.

A metric takes up to two passes over the tokens: one counts them, as rarity needs, and one measures
the samples. A pass writes a file for each shard, which appears whole or not at all; if an analysis
was interrupted or killed, the next one does only the shards whose files are missing. Then all
values are sorted in memory. Example: two shards of two samples, metric length:

    values-0-2.npy    9 4
    values-2-4.npy    7 4
    values.bin        9 4 7 4      by sample id
    order.bin         1 3 2 0      sample ids, lowest value first, ties by id

index.json holds a fingerprint of everything that these depend on. Under torchrun the ranks share
the shards, and all write to the same folder, on one machine or on a shared disk.

In reading order: metrics; the analysis: passes, sort and index; what training calls; the command.
curriculum.py decides how difficult a sample may be.

Paper: Li et al., arXiv 2212.03597

    python analyze.py --metric rarity,length --examples        # of the embedded corpus
    torchrun --nproc-per-node 2 analyze.py STORE --metric rarity --samples rows
"""

import hashlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import prepare
from curriculum import LENGTHS, Ranking
from data import ADDED_TOKENS, KINDS, Samples
from support import numbers, process
from support.runtime import Runtime, start
from support.store import Store, atomic_folder, atomic_write, folder_lock, sha256_of, user_cache
from support.tokenizer import get_encoding

BLOCK = 1 << 18  # tokens measured together: they fit the cache of a core
SHARD = 1 << 20  # samples; they take seconds
SMALL = 100_000_000  # tokens; training analyzes stores up to this size itself, in seconds

# ---- metrics: (tokens, lengths, nats) -> (N,) numbers, lowest for the easiest sample
#
#     tokens     (n,) of N samples, one after another
#     lengths    (N,)
#     nats       (V,) the surprisal of each token; None for a metric that does not need it
#
# A fingerprint contains the source of the metric, and of all functions of this file that it rests
# on: editing one, even its docstring, makes existing indexes stale.


def length(tokens: np.ndarray, lengths: np.ndarray, _: None) -> np.ndarray:
    return lengths


def rarity(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """Vocabulary rarity: the summed surprisal of a sample's tokens (arXiv 2212.03597).

    Deviates: DeepSpeed (Megatron-DeepSpeed's analyze_data.py) cuts the sum to a whole number, which
              makes ties
    Example:  counts 2, 1, 1 are nats ln 2, ln 4, ln 4: the samples [0, 0] and [1] tie at 2 ln 2
    """
    return np.add.reduceat(nats[tokens], np.cumsum(lengths) - lengths)


def rarity_mean(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """Nats per token: the sum mostly measures the length."""
    return rarity(tokens, lengths, nats) / lengths


def length_rarity(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """By length, then by rarity, in one number: length + rarity / 2^k, with rarity below 2^k.

    In a float64 two samples of up to 2^17 tokens differ if their rarities do by 2^-9 nats.
    """
    longest = 2.0**17
    scale = 2.0 ** math.ceil(math.log2(longest * nats.max() + 1))
    return lengths + rarity(tokens, lengths, nats) / scale


def surprisal(counts: np.ndarray) -> np.ndarray:
    """Return -log of each token's frequency (V,), in nats; a token never seen counts once."""
    counts = np.maximum(counts, 1)
    return -np.log(counts / counts.sum())


class Metric(NamedTuple):
    """How to measure samples; a line in METRICS adds one (docs/extending.md)."""

    value: Callable  # (tokens, lengths, nats) -> (N,)
    dtype: str = "float32"  # of the values in the index
    needs_nats: bool = False  # a pass over all tokens counts them first


METRICS = {
    "length": Metric(length, "uint32"),
    "rarity": Metric(rarity, needs_nats=True),
    "rarity-mean": Metric(rarity_mean, needs_nats=True),
    "length-rarity": Metric(length_rarity, "float64", needs_nats=True),
}


# ---- the analysis


def analyze(samples: Samples, names: Sequence[str], folder: Path, runtime: Runtime) -> None:
    """Measure and sort all samples by each metric, and write folder/<metric>, whole or not at all.

    Args:   runtime torchrun's ranks, if any; all of them write to `folder`
    Raises: ValueError, on every rank, for an index of other samples in `folder`, or an error on any
            rank after the others have done their shards
    """
    runtime.on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
    with folder_lock(folder) if runtime.is_rank0 else nullcontext():
        for name in runtime.on_rank0(lambda: missing_metrics(folder, samples, names)):
            unfinished = folder / f".{name}.{index_fingerprint(samples, name)[:16]}"
            files = measure(samples, name, unfinished, runtime)
            runtime.on_rank0(partial(write_index, folder, samples, name, files))
        if runtime.is_rank0:
            for name in names:  # also what killed analyses have left
                for unfinished in folder.glob(f".{name}.*"):
                    shutil.rmtree(unfinished)


def measure(samples: Samples, name: str, folder: Path, runtime: Runtime) -> list[Path]:
    """Measure all samples by a metric; return the files with the values of each shard."""
    nats = None
    if METRICS[name].needs_nats:
        counts = run_pass(folder / "counts", partial(count_shard, samples), len(samples), runtime)
        nats = surprisal(runtime.on_rank0(lambda: sum(map(np.load, counts))))
    work = partial(measure_shard, samples, name, nats)
    return run_pass(folder / "values", work, len(samples), runtime)


def run_pass(to: Path, work: Callable[[range], np.ndarray], n: int, runtime: Runtime) -> list[Path]:
    """Write work(shard) to a file for each shard that has none yet; return the files of all shards.

    Shard i belongs to rank i modulo the number of ranks.

    Args:   to how the paths of the files begin; folder/counts makes folder/counts-0-7.npy
            n  how many samples there are
    Raises: ValueError, on every rank, for an error on any, or if ranks share no folder
    """
    shards = [range(first, min(first + SHARD, n)) for first in range(0, n, SHARD)]
    files = [to.with_name(f"{to.name}-{shard.start}-{shard.stop}.npy") for shard in shards]

    def write_missing() -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        of_rank = list(zip(shards, files, strict=True))[runtime.rank :: runtime.world_size]
        # None hides the bar without a terminal
        for shard, file in tqdm(of_rank, to.name, disable=None if runtime.is_rank0 else True):
            if not file.exists():
                with atomic_write(file) as out:
                    np.save(out, work(shard))

    runtime.on_all_ranks(write_missing)
    if not runtime.on_rank0(lambda: all(file.exists() for file in files)):
        raise ValueError(f"{to.parent} on rank 0 lacks files of other ranks: share one folder")
    return files


def count_shard(samples: Samples, shard: range) -> np.ndarray:
    """Count how often each token of the vocabulary occurs in the samples of a shard, (V,)."""
    vocab_size = samples.store.meta["vocab_size"]
    return sum(np.bincount(tokens, minlength=vocab_size) for tokens, _ in blocks(samples, shard))


def measure_shard(samples: Samples, name: str, nats: np.ndarray | None, shard: range) -> np.ndarray:
    """Measure a shard's samples, (N,) in the metric's dtype."""
    values = []
    for tokens, lengths in blocks(samples, shard):
        values.append(METRICS[name].value(tokens, lengths, nats))
        if values[-1].shape != lengths.shape or not np.isfinite(values[-1]).all():
            raise ValueError(f"--metric {name} has to give each sample a finite number")
    return np.concatenate(values).astype(METRICS[name].dtype)


def blocks(samples: Samples, shard: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens (n,) and lengths (N,) of the samples of a shard, some BLOCK tokens at a time."""
    (begin, _), (_, end) = samples.spans(np.array([shard.start, shard.stop - 1]))
    at_once = max(BLOCK * len(shard) // int(end - begin), 1)  # samples
    for first in range(shard.start, shard.stop, at_once):
        start, stop = samples.spans(np.arange(first, min(first + at_once, shard.stop))).T
        lengths = stop - start
        tokens = samples.store.tokens[start[0] : stop[-1]]
        if len(tokens) > lengths.sum():  # a BERT's samples leave out end-of-text between them
            offsets = start - start[0] - np.cumsum(lengths) + lengths
            tokens = tokens[np.repeat(offsets, lengths) + np.arange(lengths.sum())]
        samples.store.check_tokens(tokens.max())
        yield tokens.astype(np.int64), lengths  # indexing would cast, more slowly


# ---- the index


def write_index(folder: Path, samples: Samples, name: str, files: Sequence[Path]) -> None:
    """Sort the values in these files, and write the index, which appears whole or not at all.

    Cost: 12 bytes of memory per sample, besides its value
    """
    values = np.concatenate([np.load(file) for file in files])
    order = np.argsort(values, kind="stable").astype("uint32" if len(values) < 2**32 else "int64")
    with atomic_folder(folder / name) as index:
        values.tofile(index / "values.bin")
        order.tofile(index / "order.bin")
        about = {"fingerprint": index_fingerprint(samples, name), "metric": name}
        about |= {"samples": len(values), "values": values.dtype.name, "order": order.dtype.name}
        about["sha256"] = sums_of(index)
        (index / "index.json").write_text(json.dumps(about, indent=1))


def sums_of(index: Path) -> dict[str, str]:
    return {file: sha256_of(index / file) for file in ("values.bin", "order.bin")}


def index_fingerprint(samples: Samples, name: str) -> str:
    """Hash everything that an index depends on: store, tokenizer, samples and metric."""
    of_store = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
    made_of = {field: samples.store.meta[field] for field in of_store}
    made_of["made"] = (samples.split, samples.kind == "rows", samples.without_eot)
    made_of |= {"format": 1, "metric": name, "seq_len": samples.max_piece_len}
    made_of["dtype"] = METRICS[name].dtype
    made_of["source"] = [code_of(f) for f in (METRICS[name].value, surprisal, count_shard)]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def code_of(function: Callable) -> str:
    """Return the source code of a function, and of those in its file that it calls."""
    function = inspect.unwrap(function)
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    inner = [f for f in called if inspect.isfunction(f) and f.__module__ == function.__module__]
    return "".join([inspect.getsource(function), *map(code_of, inner)])


def index_folder(samples: Samples) -> Path:
    """Return the folder of these samples' indexes: in the store, or a cache if it is read-only."""
    store, name = samples.store, f"{samples.kind}-{samples.seq_len}"
    folder = store.path / "curriculum" / name
    if folder.exists() or os.access(store.path, os.W_OK):
        return folder
    return user_cache() / store.meta["sha256"]["tokens.bin"] / name


def missing_metrics(folder: Path, samples: Samples, names: Sequence[str]) -> list[str]:
    """Return the metrics that have no index in this folder.

    Raises: ValueError for existing indexes that `open_rankings` refuses; every byte is checked
    """
    open_rankings(folder, samples, [name for name in names if (folder / name).exists()], whole=True)
    return [name for name in names if not (folder / name).exists()]


def open_rankings(
    folder: Path, samples: Samples, names: Sequence[str], whole: bool = False
) -> dict[str, Ranking]:
    """Open the index of each metric.

    Args:   whole compare every byte with the sha256 in index.json: at the start of a run, once per
                  machine
    Raises: ValueError for an index of other samples or another metric, and for a damaged one;
            without `whole`, only sizes are checked for damage
    """
    rankings = {}
    for name in names:
        index = folder / name
        try:
            about = json.loads((index / "index.json").read_text())
            stored = about["fingerprint"]
            values = np.asarray(np.memmap(index / "values.bin", about["values"], "r"))
            order = np.asarray(np.memmap(index / "order.bin", about["order"], "r"))
            if not len(values) == len(order) == about["samples"]:
                raise ValueError("its files have wrong sizes")
            if whole and about.get("sha256") != sums_of(index):
                raise ValueError("its files do not have the sha256 in index.json")
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{index} is damaged ({error}): remove it and analyze again") from None
        if stored != index_fingerprint(samples, name):
            raise ValueError(f"{index} is of another text, tokenizer, length or metric: remove it")
        rankings[name] = Ranking(values, order)
    return rankings


# ---- what training calls


def check_metrics(names: list[str], seq_len: int, kind: str, flag: str = "--curriculum") -> None:
    """Refuse metrics that do not exist, do not fit together, or do not suit these samples.

    Args: kind rows | pieces | bert | pairs
          flag the flag that names the metrics; only --curriculum may name lengths
    """
    known = (*LENGTHS, *METRICS) if flag == "--curriculum" else tuple(METRICS)
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name!r} is unknown: choose from {', '.join(known)}")
        if name in ("length", "length-rarity") and kind == "rows":
            raise ValueError(
                f"{flag} {name}: all rows have {seq_len} tokens: use pieces, as with --pack"
            )
        if name == "seqlen-reshape" and kind != "rows":
            raise ValueError(f"{flag} {name} is for full rows of the stream: use seqlen")
    if len(set(names)) < len(names) or set(LENGTHS) <= set(names):
        raise ValueError(f"{flag} {','.join(names)}: name one length metric, and each only once")


def rankings_of(samples: Samples, names: Sequence[str], runtime: Runtime) -> dict[str, Ranking]:
    """Open the index of each ranked metric; if the store is small, make missing ones first."""
    names = [name for name in names if name not in LENGTHS]
    if not names:
        return {}
    store, indexes = samples.store.path, index_folder(samples)

    def make_missing() -> None:
        missing = missing_metrics(indexes, samples, names)
        by = ",".join(missing)
        if missing and samples.store.meta["train_tokens"] > SMALL:
            command = f"python analyze.py {store} --metric {by} --samples {samples.kind}"
            command += f" --seq-len {samples.seq_len}"
            raise ValueError(f"{indexes} has no index by {by}: make it with {command}")
        if missing:
            print(f"analyzing {store} by {by}, once: index in {indexes}", flush=True)
            analyze(samples, missing, indexes, replace(runtime, rank=0, world_size=1))

    runtime.on_each_machine(make_missing)  # machines may have separate copies of the store
    runtime.check_same({f"the index by {n}": sha256_of(indexes / n / "index.json") for n in names})
    return open_rankings(indexes, samples, names)


# ---- the command

KINDS_HELP = "for a GPT with --pack, a GPT without, a BERT, or a BERT with --nsp"
PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)


def main(argv: list[str] | None = None) -> None:
    parser = process.Parser(prog="analyze.py", description=__doc__.split("\n")[0])
    parser.add_argument("store", nargs="?", help="made by prepare.py (default: embedded corpus)")
    parser.add_argument("--metric", required=True, help=", ".join(METRICS))
    parser.add_argument("--samples", default="pieces", choices=KINDS, help=KINDS_HELP)
    parser.add_argument("--seq-len", type=numbers.count, default=2048, help="tokens in a row")
    parser.add_argument("--examples", action="store_true", help="print an easy and a hard sample")
    args = parser.parse_args(argv)
    names = args.metric.split(",")
    least = ADDED_TOKENS.get(args.samples, 0) + 1
    if not least <= args.seq_len < 2**31:
        raise ValueError(f"--seq-len {args.seq_len}: choose {least} to 2^31 - 1 tokens")
    check_metrics(names, args.seq_len, args.samples, flag="--metric")

    runtime = start("cpu", "fp32", timedelta(hours=12))  # others wait while rank 0 sorts
    if args.store is None:  # each machine prepares a copy
        runtime.on_each_machine(lambda: prepare.embedded_store("pd4k"))
        args.store = prepare.embedded_store("pd4k")
    store = Store.open(args.store)
    samples = Samples(store, args.samples, args.seq_len)
    folder = index_folder(samples)
    analyze(samples, names, folder, runtime)
    if runtime.is_rank0:
        rankings = open_rankings(folder, samples, names)
        print(f"{len(samples):,} samples of up to {samples.max_piece_len} tokens; index: {folder}")
        show_percentiles(rankings)
        if args.examples:
            show_examples(rankings, samples)


def show_percentiles(rankings: dict[str, Ranking]) -> None:
    print("percentile    " + "".join(f"{percent:>12}" for percent in PERCENTS))
    for name, ranking in rankings.items():
        counts = [max(ranking.at_percent(percent), 1) for percent in PERCENTS]
        print(f"{name:14}" + "".join(f"{ranking.highest(n):12.6g}" for n in counts))


def show_examples(rankings: dict[str, Ranking], samples: Samples) -> None:
    """Print the median sample of the easiest and of the hardest percent, by each metric."""
    encoding = get_encoding(samples.store.meta["tokenizer"])
    for name, ranking in rankings.items():
        for percent, share in (("easiest", 0.005), ("hardest", 0.995)):
            sample = int(ranking.order[int(share * len(ranking))])
            ((first, last),) = samples.spans(np.array([sample]))
            text = " ".join(encoding.decode(samples.store.tokens[first:last].tolist()).split())
            print(f"\n{percent} percent by {name}, {ranking.values[sample]:g}:\n{text[:400]}")


if __name__ == "__main__":
    process.exit_cleanly(main)
