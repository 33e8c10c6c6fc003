"""Sort a store's samples by difficulty: measure and sort shards, and merge them into an index.

    samples ── shards ──> totals       sums over all samples that a metric needs, a file per shard
                     └──> sorted runs  values and ids, a file per shard and metric
                             └─ merge ──> index/<metric>: values.bin, order.bin, index.json

A pass runs one task for every shard, in processes on this machine or on torchrun's ranks, and saves
the results in files that appear whole or not at all. If an analysis was interrupted or killed, the
next one does only the shards whose files are missing or truncated. For a store of 20 samples in
three shards, the two passes leave these files, before they are merged:

    total-...00-...07.npy   total-...07-...14.npy   total-...14-...20.npy
    run-...00-...07.npy     run-...07-...14.npy     run-...14-...20.npy

An index holds the values of the samples, their ids sorted by value, and a fingerprint of everything
that these depend on. In reading order: metrics; the passes; sorted runs and their merge; the index;
what training calls; the command. curriculum.py decides how difficult a sample may be.

Paper: Li et al., arXiv 2212.03597.

    python analyze.py --metric rarity,length --examples        # of the embedded corpus
    torchrun --nproc-per-node 2 analyze.py STORE --metric rarity --samples rows
"""

import hashlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from itertools import chain
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import prepare
from curriculum import LENGTHS, Ranking, Rankings
from data import ADDED_TOKENS, KINDS, Samples
from support import process, runtime
from support.runtime import Runtime
from support.settings import count
from support.store import Store, atomic_folder, atomic_write, folder_lock, get_encoding, sha256_of

BLOCK = 1 << 18  # tokens measured together: they fit the cache of a core
SHARD = 1 << 18  # samples in a shard, unless that would make more than MOST_SHARDS
MOST_SHARDS = 512  # while they are merged, the files of all shards are open
CHUNK = 1 << 22  # records merged together
SMALL = 100_000_000  # tokens; training analyzes stores up to this size itself, in about 10 seconds

# ---- metrics: (tokens (n,) of N samples one after another, lengths (N,), the sums over all samples
# that the metric needs) -> (N,) numbers, lowest for the easiest sample
#
# A fingerprint contains the source of the four functions: editing one, even its docstring, makes
# existing indexes stale.


def length(tokens: np.ndarray, lengths: np.ndarray, _: None) -> np.ndarray:
    return lengths


def rarity(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """Vocabulary rarity: the summed surprisal of a sample's tokens (arXiv 2212.03597).

    Args:     nats (V,) the surprisal of each token
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


def token_counts(tokens: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=vocab_size)


def surprisal(counts: np.ndarray) -> np.ndarray:
    """Return -log of each token's frequency (V,), in nats; a token never seen counts once."""
    counts = np.maximum(counts, 1)
    return -np.log(counts / counts.sum())


class Metric(NamedTuple):
    """How to measure samples, and what must be summed over all of them first.

    Example: to add a metric, add a line to METRICS (docs/extending.md)
    """

    value: Callable  # (tokens, lengths, known) -> (N,)
    dtype: str = "float32"  # of the values in the index
    summed: Callable | None = None  # (tokens, lengths, vocab_size) -> summed over all samples
    known: Callable | None = None  # (sum) -> the third argument of `value`


METRICS = {
    "length": Metric(length, "uint32"),
    "rarity": Metric(rarity, "float32", token_counts, surprisal),
    "rarity-mean": Metric(rarity_mean, "float32", token_counts, surprisal),
    "length-rarity": Metric(length_rarity, "float64", token_counts, surprisal),
}


def check_metrics(
    names: Sequence[str], seq_len: int, samples_kind: str, flag: str = "--curriculum"
) -> None:
    """Refuse metrics that do not exist, do not fit together, or do not suit these samples.

    Args: samples_kind rows | pieces | bert | pairs
          flag         the flag that names the metrics, for messages
    """
    lengths = LENGTHS if flag == "--curriculum" else ()  # metrics that need no analysis
    known = (*lengths, *METRICS)
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name} is unknown: choose from {', '.join(known)}")
        if name in ("length", "length-rarity") and samples_kind == "rows":
            raise ValueError(
                f"{flag} {name}: all rows have {seq_len} tokens: use pieces of documents (--pack),"
                " or choose rarity"
            )
        if name == "seqlen-reshape" and samples_kind != "rows":
            instead = "seqlen and --pack" if samples_kind in ADDED_TOKENS else "seqlen"
            raise ValueError(f"{flag} {name} is for full rows of the stream: use {instead}")
    if len(set(names)) < len(names) or set(LENGTHS) <= set(names):
        raise ValueError(f"{flag} {','.join(names)}: name one length metric, and each only once")


@lru_cache(maxsize=1)
def training_samples(path: str, kind: str, seq_len: int) -> Samples:
    """Open the training samples of a store, once per process: workers only receive arguments."""
    return Samples(Store.open(path), kind, seq_len)


def blocks(samples: Samples, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens (n,) and lengths (N,) of samples first..last - 1, some 2^18 tokens at a time."""
    ends = samples.spans(np.array([first, last - 1]))
    mean = (ends[1, 1] - ends[0, 0]) / (last - first)
    step = max(int(BLOCK / mean), 1)
    for start_id in range(first, last, step):
        start, stop = samples.spans(np.arange(start_id, min(start_id + step, last))).T
        tokens, lengths = samples.store.tokens[start[0] : stop[-1]], stop - start
        # a BERT's samples leave out end-of-text: drop the tokens between samples
        if lengths.sum() < len(tokens):
            edge = np.zeros(len(tokens) + 1, np.int8)
            edge[start - start[0]] += 1
            edge[stop - start[0]] -= 1
            tokens = tokens[np.cumsum(edge[:-1]).astype(bool)]
        samples.store.check_tokens(tokens.max())
        yield tokens.astype(np.int64), lengths  # indexing would cast, more slowly


# ---- map: sum over a shard, then measure and sort its samples


def sum_shard(open_samples: Callable, names: list[str], shard: range) -> dict[str, np.ndarray]:
    """First pass: compute a shard's part of the sums that these metrics need."""
    samples = open_samples()
    vocab_size = samples.store.meta["vocab_size"]
    summed = {name: METRICS[name].summed for name in names}
    sums = dict.fromkeys(summed.values(), 0)  # metrics with the same function share its sum
    for tokens, lengths in blocks(samples, shard.start, shard.stop):
        for function in sums:
            sums[function] = sums[function] + function(tokens, lengths, vocab_size)
    return {name: sums[function] for name, function in summed.items()}


def sort_shard(
    open_samples: Callable, names: list[str], totals: dict[str, np.ndarray], shard: range
) -> dict[str, np.ndarray]:
    """Second pass: measure a shard's samples by each metric and sort them, as runs to merge.

    Args: totals {metric: its sum over all samples}, for the metrics that need one
    """
    samples = open_samples()
    id_dtype = np.dtype("uint32" if len(samples) < 2**32 else "int64")
    known = {name: METRICS[name].known(total) for name, total in totals.items()}
    values: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for tokens, lengths in blocks(samples, shard.start, shard.stop):
        for name in names:
            measured = METRICS[name].value(tokens, lengths, known.get(name))
            if measured.shape != lengths.shape or not np.isfinite(measured).all():
                raise ValueError(f"--metric {name} has to give each sample a finite number")
            values[name].append(measured)
    of_shard = {n: np.concatenate(parts).astype(METRICS[n].dtype) for n, parts in values.items()}
    return {name: sorted_run(v, shard.start, id_dtype) for name, v in of_shard.items()}


# ---- a pass over the shards


class Pass(NamedTuple):
    """The files of one pass."""

    kind: str  # total | run: the first word in the names of its files
    shards: list[range]  # ranges of sample ids
    folders: dict[str, Path]  # for each metric

    def file(self, name: str, shard: range) -> Path:
        return self.folders[name] / f"{self.kind}-{shard.start:012}-{shard.stop:012}.npy"

    def files(self, name: str) -> list[Path]:
        return [self.file(name, shard) for shard in self.shards]

    def run(self, task: Callable, names: Sequence[str], workers: int, ranks: Runtime) -> None:
        """Run the task for every missing shard and write its result, {name: array}.

        Results arrive in order and one at a time, so rank 0, which writes them, needs memory for
        only one.

        Raises: ValueError, on every rank, for an error on any; other ranks finish their shards
        """

        def is_missing(shard: range) -> bool:
            return not all(is_whole(self.file(name, shard)) for name in names)

        missing = ranks.on_rank0(lambda: list(filter(is_missing, self.shards)))
        if not missing:
            return
        if ranks.world_size > 1:
            results = on_ranks(task, missing, ranks)
        else:
            results = in_processes(task, missing, workers)
        n = len(self.shards)
        hidden = not ranks.is_rank0 or None  # None: hide it without a terminal
        with tqdm(total=n, initial=n - len(missing), desc=self.kind, disable=hidden) as bar:
            for shard, arrays in results:
                for name, array in arrays.items():
                    file = self.file(name, shard)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        np.save(out, array)
                bar.update()


def is_whole(file: Path) -> bool:
    """Tell whether the file is an array that is complete according to its header."""
    with suppress(OSError, ValueError, EOFError):
        return np.load(file, mmap_mode="r") is not None
    return False


def on_ranks(task: Callable, items: list, ranks: Runtime) -> Iterator[tuple]:
    """Yield (item, result) on rank 0, and nothing on other ranks.

    Each round gives one item to each rank: rank r does items r, r + world_size, ... An error is
    kept until the last round, so that no rank waits for one that has failed, and is then raised on
    all of them.
    """
    errors: list[str] = []
    for first in range(0, len(items), ranks.world_size):
        outcomes = []
        for item in items[first + ranks.rank : first + ranks.rank + 1]:  # none at the end, perhaps
            try:
                outcomes.append((item, task(item)))
            except (ValueError, OSError) as error:
                errors.append(process.one_line(error))
        yield from chain.from_iterable(ranks.collect(outcomes))
    for error in chain.from_iterable(ranks.gather(errors)):
        raise ValueError(error)


def in_processes(task: Callable, items: list, workers: int) -> Iterator[tuple]:
    """Yield (item, result) from `workers` processes, or from this one if one is enough.

    If this process dies, so do the workers.
    """
    if workers == 1 or len(items) <= 1:
        yield from zip(items, map(task, items), strict=True)
        return
    with ProcessPoolExecutor(min(workers, len(items)), initializer=_live_with_parent) as pool:
        try:
            yield from zip(items, pool.map(task, items), strict=True)
        except BrokenProcessPool:
            raise ValueError("a worker was killed: try again with fewer --workers") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _live_with_parent() -> None:
    """Leave interrupts to the parent process, and exit when it does; runs in each worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would raise inside a task

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# ---- sorted runs
#
# A run holds all samples of one shard; all its ids are lower than those in the next run.


def sorted_run(values: np.ndarray, first_id: int, id_dtype: np.dtype) -> np.ndarray:
    """Make records (value, id) of samples first_id, first_id + 1, ..., sorted by value, then id."""
    order = np.argsort(values, kind="stable")
    run = np.empty(len(values), [("value", values.dtype), ("id", id_dtype)])
    run["value"], run["id"] = values[order], order + first_id
    return run


def merged(files: list[Path], chunk: int = CHUNK) -> Iterator[np.ndarray]:
    """Yield the ids of all runs by value, ties by id, at most `chunk` of them at a time.

    All runs are cut at the same records, so each stretch between two cuts can be sorted by itself,
    and only one stretch is in memory, however long the runs are. To find the cuts, take every
    `step`-th record of each of the n runs, sort these, and cut at every n-th. A stretch has at most
    2 n step records: n of the sampled records with the `step` - 1 that follow each in its run, and
    in each of the n runs up to `step` - 1 before the first sampled one.

    Example: runs of values [1, 3, 3] and [2, 3, 4], cut at the last 3 of the first run, give 1, 3
             and 2, then 3 and 3, 4
    """
    step = max(chunk // (2 * len(files)), 1)
    some = np.sort(np.concatenate([np.load(file, mmap_mode="r")[::step] for file in files]))
    before = [0] * len(files)
    for cut in (*some[len(files) :: len(files)], None):
        # map the files again for each chunk, to release the pages of the last one
        runs = [np.load(file, mmap_mode="r") for file in files]
        after = [len(run) if cut is None else np.searchsorted(run, cut) for run in runs]
        parts = [run[a:b] for run, a, b in zip(runs, before, after, strict=True)]
        records = np.concatenate(parts)
        yield records["id"][np.argsort(records["value"], kind="stable")]
        before = after


# ---- the index


def fingerprint(samples: Samples, name: str) -> str:
    """Hash everything that an index depends on: store, tokenizer, samples and metric."""
    of_store = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
    made_of = {field: samples.store.meta[field] for field in of_store}
    made_of["made"] = (samples.split, samples.kind == "rows", samples.without_eot)
    made_of |= {"format": 1, "metric": name, "seq_len": samples.max_piece_len}
    made_of["source"] = inspect.getsource(METRICS[name].value)
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def index_folder(given: str | None, samples: Samples) -> Path:
    """Return the folder of the indexes for these samples, by default inside the store."""
    kind = f"{samples.kind}-{samples.seq_len}"
    return Path(given or samples.store.path / "curriculum") / kind


def lacking_in(folder: Path, samples: Samples, names: Sequence[str]) -> list[str]:
    """Return the metrics that have no index in this folder.

    Raises: ValueError for existing indexes that `opened` refuses; every byte is checked
    """
    lacking = [name for name in names if not (folder / name).exists()]
    opened(folder, samples, [name for name in names if name not in lacking], whole=True)
    return lacking


def sums_of(index: Path) -> dict[str, str]:
    return {file: sha256_of(index / file) for file in ("values.bin", "order.bin")}


def opened(folder: Path, samples: Samples, names: Sequence[str], whole: bool = False) -> Rankings:
    """Open the index of each metric.

    Args:   whole compare every byte with the sha256 in index.json: at the start of a run, once per
                  machine; it reads 8 bytes per sample, 12 for a metric in float64
    Raises: ValueError for an index of other samples or another metric, and for a damaged one;
            without `whole`, only sizes and the two ends are checked for damage
    """
    rankings = Rankings()
    for name in names:
        index = folder / name
        try:
            about = json.loads((index / "index.json").read_text())
            stored = about["fingerprint"][:64]
            values = np.asarray(np.memmap(index / "values.bin", about["values"], "r"))
            order = np.asarray(np.memmap(index / "order.bin", about["order"], "r"))
            if not len(values) == len(order) == about["samples"]:
                raise ValueError("its files have wrong sizes")
            if not values[order[0]] <= values[order[-1]]:
                raise ValueError("order.bin is not sorted by values.bin")
            if whole and about.get("sha256") != sums_of(index):
                raise ValueError("its files do not have the sha256 in index.json")
        except (OSError, LookupError, TypeError, ValueError) as error:
            problem = f"damaged or old ({error}): remove it and analyze again"
            raise ValueError(f"{index}: {problem}") from None
        if stored != (wanted := fingerprint(samples, name)):
            raise ValueError(
                f"{index}: an index with fingerprint {stored[:16]}, but store, tokenizer, sample"
                f" length and metric are {wanted[:16]}: remove it, or name another folder"
            )
        rankings[name] = Ranking(values, order)
    return rankings


def write_index(folder: Path, runs: Pass, prints: dict[str, str], name: str) -> None:
    """Merge the runs of a metric into its index, a folder that appears whole or not at all."""
    files = runs.files(name)
    with atomic_folder(folder / name) as index:
        with (index / "values.bin").open("wb") as out:
            for file in files:
                run = np.load(file)
                values = np.empty_like(run["value"])
                values[run["id"] - run["id"].min()] = run["value"]
                out.write(values)
        samples = 0
        with (index / "order.bin").open("wb") as out:
            for ids in merged(files):
                out.write(ids)
                samples += len(ids)
        about = {"fingerprint": prints[name], "metric": name, "samples": samples}
        about |= {"values": str(values.dtype), "order": str(ids.dtype)}
        about["sha256"] = sums_of(index)
        (index / "index.json").write_text(json.dumps(about, indent=1))


def analyze(
    open_samples: Callable, names: Sequence[str], folder: Path, ranks: Runtime, workers: int = 1
) -> None:
    """Measure and sort all samples by each metric, and write folder/<metric>, whole or not at all.

    The first pass over the tokens computes the sums that metrics need (token counts), the second
    measures and sorts. Then the sorted runs are merged.

    Args:   open_samples () -> samples, called in every worker
            ranks        torchrun's, if any; only rank 0 writes, so the others need no disk
    Raises: ValueError for an index of other samples in `folder`
    Cost:   8 to 16 bytes per sample of temporary files; rates are in results/curriculum.jsonl
    """
    samples = open_samples()
    prints = {name: fingerprint(samples, name) for name in names}
    size = max(SHARD, -(-len(samples) // MOST_SHARDS))
    shards = [range(a, min(a + size, len(samples))) for a in range(0, len(samples), size)]
    unfinished = {name: folder / f".{name}.{prints[name][:16]}" for name in names}
    sums = Pass("total", shards, unfinished)
    runs = Pass("run", shards, unfinished)

    ranks.on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
    with folder_lock(folder) if ranks.is_rank0 else nullcontext():
        lacking = ranks.on_rank0(lambda: lacking_in(folder, samples, names))
        to_sum = [name for name in lacking if METRICS[name].summed]
        sums.run(partial(sum_shard, open_samples, to_sum), to_sum, workers, ranks)
        totals = ranks.on_rank0(
            lambda: {name: sum(map(np.load, sums.files(name))) for name in to_sum}
        )
        runs.run(partial(sort_shard, open_samples, lacking, totals), lacking, workers, ranks)

        def finish() -> None:
            processes = workers if ranks.world_size == 1 else 1
            list(in_processes(partial(write_index, folder, runs, prints), lacking, processes))
            for name in names:  # and what killed analyses have left
                for left in folder.glob(f".{name}.*"):
                    shutil.rmtree(left)

        ranks.on_rank0(finish)


# ---- what training calls


def ready(samples: Samples, names: Sequence[str], folder: str | None, ranks: Runtime) -> Rankings:
    """Open the index of each ranked metric; if the store is small, make missing ones first.

    Args: folder of the indexes; None: inside the store
    """
    names = [name for name in names if name not in LENGTHS]
    if not names:
        return Rankings({})
    store = str(samples.store.path)
    indexes = index_folder(folder, samples)

    def make() -> None:
        lacking = lacking_in(indexes, samples, names)
        by = ",".join(lacking)
        if lacking and samples.store.meta["train_tokens"] > SMALL:
            out = f" --out {folder}" if folder else ""
            raise ValueError(
                f"{indexes} has no index by {by}: make it with python analyze.py {store} --metric"
                f" {by} --samples {samples.kind} --seq-len {samples.seq_len}{out}"
            )
        if lacking:
            print(f"analyzing {store} by {by}, once: index in {indexes}", flush=True)
            open_samples = partial(training_samples, store, samples.kind, samples.seq_len)
            analyze(open_samples, lacking, indexes, replace(ranks, rank=0, world_size=1))

    ranks.on_each_machine(make)  # machines may have separate copies of the store
    rankings = opened(indexes, samples, names)
    for name in names:
        about = json.loads((indexes / name / "index.json").read_text())
        ranks.check_same({f"the index by {name}": about["sha256"]})
    return rankings


# ---- command

KINDS_HELP = "for a GPT with --pack, a GPT without, a BERT, or a BERT with --nsp"


def main(argv: list[str] | None = None) -> None:
    parser = process.Parser(prog="analyze.py", description=__doc__.split("\n")[0])
    parser.add_argument("store", nargs="?", help="made by prepare.py (default: embedded corpus)")
    known = ", ".join(METRICS)
    parser.add_argument("--metric", required=True, help=known)
    parser.add_argument("--samples", default="pieces", choices=KINDS, help=KINDS_HELP)
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens in a row")
    parser.add_argument("--workers", type=count, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", help="folder for the indexes (default: inside the store)")
    parser.add_argument("--examples", action="store_true", help="print an easy and a hard sample")
    args = parser.parse_args(argv)
    names = args.metric.split(",")
    least = ADDED_TOKENS.get(args.samples, 0) + 1
    if not least <= args.seq_len < 2**31:
        raise ValueError(f"--seq-len {args.seq_len}: choose {least} to 2^31 - 1 tokens")
    check_metrics(names, args.seq_len, args.samples, flag="--metric")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended, too
    # other ranks wait while rank 0 merges: minutes per metric for trillions of tokens
    ranks = runtime.start("cpu", "fp32", timedelta(hours=12))
    if args.store is None:  # each machine prepares a copy
        ranks.on_each_machine(lambda: prepare.embedded_store("pd4k"))
    store = args.store or str(prepare.embedded_store("pd4k"))
    open_samples = partial(training_samples, store, args.samples, args.seq_len)
    samples = open_samples()
    folder = index_folder(args.out, samples)
    analyze(open_samples, names, folder, ranks, args.workers)
    if ranks.is_rank0:
        indexes = opened(folder, samples, names)
        most = samples.max_piece_len
        print(f"{len(samples):,} samples of at most {most} tokens; index: {folder}")
        show_percentiles(indexes)
        if args.examples:
            show_examples(indexes, samples)


# ---- what a ranking looks like

PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)


def show_percentiles(indexes: Rankings) -> None:
    print("percentile    " + "".join(f"{percent:>12}" for percent in PERCENTS))
    for name, index in indexes.items():
        counts = [max(index.at_percent(percent), 1) for percent in PERCENTS]
        print(f"{name:14}" + "".join(f"{index.highest(n):12.6g}" for n in counts))


def show_examples(indexes: Rankings, samples: Samples) -> None:
    """Print the median sample of the easiest and of the hardest percent, by each metric."""
    encoding = get_encoding(samples.store.meta["tokenizer"])
    for name, index in indexes.items():
        for percent, share in (("easiest", 0.005), ("hardest", 0.995)):
            sample = int(index.order[int(share * len(index))])
            ((first, last),) = samples.spans(np.array([sample]))
            text = " ".join(encoding.decode(samples.store.tokens[first:last].tolist()).split())
            print(f"\n{percent} percent by {name}, {index.values[sample]:g}:\n{text[:400]}")


if __name__ == "__main__":
    process.exit_cleanly(main)
