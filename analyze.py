"""Sort a store by how hard its samples are: measure shards, sort each, merge them into an index.

    samples ── shards ──> totals       what a metric sums over all samples, a file a shard
                     └──> sorted runs  values and ids, a file a shard and metric
                             └─ merge ──> index/<metric>: values.bin, order.bin, index.json

A pass does one task for every shard, in processes of this machine or on torchrun's ranks, and keeps
what it returns in files that appear whole or not at all. An analysis that was interrupted or killed
does the shards whose files are missing or cut short, and no others. The two passes over three
shards of a store with 20 samples leave, before they are merged,

    total-...00-...07.npy   total-...07-...14.npy   total-...14-...20.npy
    run-...00-...07.npy     run-...07-...14.npy     run-...14-...20.npy

An index has the samples' values, their ids by value, and a fingerprint of everything that these
depend on. In reading order: metrics; the passes; sorted runs and their merge; the index; what
training calls; the command. curriculum.py decides how hard a sample may be.

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
from support import runtime
from support.runtime import Runtime
from support.settings import count
from support.store import Store, atomic_folder, atomic_write, folder_lock, get_encoding, sha256_of

BLOCK = 1 << 18  # tokens measured together: what a core's cache holds
SHARD = 1 << 18  # samples of a shard, unless that would make more than MOST_SHARDS
MOST_SHARDS = 512  # all their runs are open while they are merged
CHUNK = 1 << 22  # records merged together
SMALL = 100_000_000  # tokens of a store that training analyzes by itself, in some ten seconds

# ---- metrics: (tokens (n,) of N samples one after another, lengths (N,), what the metric summed
# over all samples) -> (N,) numbers, lowest for the easiest sample


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
    """(V,) -log of each token's share of all, in nats; a token never seen counts as seen once."""
    counts = np.maximum(counts, 1)
    return -np.log(counts / counts.sum())


class Metric(NamedTuple):
    """How to measure samples, and what has to be summed over all of them before.

    Example: a metric of your own is a line in METRICS (docs/extending.md)
    """

    value: Callable  # (tokens, lengths, known) -> (N,)
    dtype: str = "float32"  # of the values in the index
    summed: Callable | None = None  # (tokens, lengths, vocab_size) -> what is summed over all
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
    """Refuse metrics that do not exist, that do not go together or with this kind of samples.

    Args: samples_kind rows | pieces | bert | pairs
          flag         how the user named them, for messages
    """
    lengths = LENGTHS if flag == "--curriculum" else ()  # which need no analysis
    known = (*lengths, *METRICS)
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name} is unknown: choose from {', '.join(known)}")
        if name in ("length", "length-rarity") and samples_kind == "rows":
            raise ValueError(
                f"{flag} {name}: rows all have {seq_len} tokens: take pieces of documents (--pack),"
                " or choose rarity"
            )
        if name == "seqlen-reshape" and samples_kind != "rows":
            instead = "seqlen and --pack" if samples_kind in ADDED_TOKENS else "seqlen"
            raise ValueError(f"{flag} {name} is for full rows of the stream: take {instead}")
    if len(set(names)) < len(names) or set(LENGTHS) <= set(names):
        raise ValueError(f"{flag} {','.join(names)}: takes one length, and each name once")


@lru_cache(maxsize=1)
def training_samples(path: str, kind: str, seq_len: int) -> Samples:
    """The training samples of a store, opened once a process: a worker only gets their names."""
    return Samples(Store.open(path), kind, seq_len)


def blocks(samples: Samples, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens (n,) and lengths (N,) of samples first..last - 1, some 2^18 tokens at a time."""
    ends = samples.spans(np.array([first, last - 1]))
    mean = (ends[1, 1] - ends[0, 0]) / (last - first)
    step = max(int(BLOCK / mean), 1)
    for start_id in range(first, last, step):
        start, stop = samples.spans(np.arange(start_id, min(start_id + step, last))).T
        tokens, lengths = samples.store.tokens[start[0] : stop[-1]], stop - start
        # between samples may lie the ends of a BERT's documents
        if lengths.sum() < len(tokens):
            edge = np.zeros(len(tokens) + 1, np.int8)
            edge[start - start[0]] += 1
            edge[stop - start[0]] -= 1
            tokens = tokens[np.cumsum(edge[:-1]).astype(bool)]
        samples.store.check_tokens(tokens.max())
        yield tokens.astype(np.int64), lengths  # what indexing by them would cast to, more slowly


# ---- map: what is summed over a shard, and its samples sorted


def sum_shard(open_samples: Callable, names: list[str], shard: range) -> dict[str, np.ndarray]:
    """The first pass over a shard: what each of these metrics sums over all samples."""
    samples = open_samples()
    vocab_size = samples.store.meta["vocab_size"]
    summed = {name: METRICS[name].summed for name in names}
    sums = dict.fromkeys(summed.values(), 0)  # metrics share what they sum
    for tokens, lengths in blocks(samples, shard.start, shard.stop):
        for function in sums:
            sums[function] = sums[function] + function(tokens, lengths, vocab_size)
    return {name: sums[function] for name, function in summed.items()}


def sort_shard(
    open_samples: Callable, names: list[str], totals: dict[str, np.ndarray], shard: range
) -> dict[str, np.ndarray]:
    """The second pass: a shard's samples measured and sorted by each metric, as runs to merge.

    Args: totals {metric: what it summed over all samples}, of those that need it
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

    kind: str  # what the pass makes: the names of its files begin with it
    shards: list[range]  # of ids of samples
    folders: dict[str, Path]  # of each metric

    def file(self, name: str, shard: range) -> Path:
        return self.folders[name] / f"{self.kind}-{shard.start:012}-{shard.stop:012}.npy"

    def files(self, name: str) -> list[Path]:
        return [self.file(name, shard) for shard in self.shards]

    def run(self, task: Callable, names: Sequence[str], workers: int, ranks: Runtime) -> None:
        """Do the task for every missing shard and write what it returns: {name: array}.

        Results arrive in order and one at a time, so rank 0, which writes them, needs memory for
        one.

        Raises: ValueError on every rank for an error on any, after the other ranks' shards are done
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
        hidden = not ranks.is_rank0 or None  # None: where there is no terminal
        with tqdm(total=n, initial=n - len(missing), desc=self.kind, disable=hidden) as bar:
            for shard, arrays in results:
                for name, array in arrays.items():
                    file = self.file(name, shard)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        np.save(out, array)
                bar.update()


def is_whole(file: Path) -> bool:
    """Whether it is an array with everything that its header announces."""
    with suppress(OSError, ValueError, EOFError):
        return np.load(file, mmap_mode="r") is not None
    return False


def on_ranks(task: Callable, items: list, ranks: Runtime) -> Iterator[tuple]:
    """Yield (item, result) on rank 0, and nothing on other ranks.

    In rounds of one item a rank: rank r does items r, r + world_size, ... An error is kept until
    the last round, so that no rank waits for another, and is then raised on all of them.
    """
    errors: list[str] = []
    for first in range(0, len(items), ranks.world_size):
        outcomes = []
        for item in items[first + ranks.rank : first + ranks.rank + 1]:  # none at the end, perhaps
            try:
                outcomes.append((item, task(item)))
            except (ValueError, OSError) as error:
                errors.append(runtime.one_line(error))
        yield from chain.from_iterable(ranks.collect(outcomes))
    for error in chain.from_iterable(ranks.gather(errors)):
        raise ValueError(error)


def in_processes(task: Callable, items: list, workers: int) -> Iterator[tuple]:
    """Yield (item, result), from `workers` processes, or from this one if a single one is enough.

    Workers die with the process that started them.
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
    """In a worker: leave interrupts to the parent, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would raise in a task

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# ---- sorted runs
#
# A run has all samples of one shard; the ids of a run come before those of the next.


def sorted_run(values: np.ndarray, first_id: int, id_dtype: np.dtype) -> np.ndarray:
    """Records (value, id) of samples first_id, first_id + 1, ..., sorted by value, then by id."""
    order = np.argsort(values, kind="stable")
    run = np.empty(len(values), [("value", values.dtype), ("id", id_dtype)])
    run["value"], run["id"] = values[order], order + first_id
    return run


def merged(files: list[Path], chunk: int = CHUNK) -> Iterator[np.ndarray]:
    """The ids of all runs by value, ties by id, at most `chunk` of them at a time.

    All runs are cut at the same records, and what lies between two cuts belongs together: only that
    is in memory, however long the runs are. Every `step`-th record of each of the n runs is sorted
    with those of the others, and each n-th of these is a cut. So between two cuts lie at most 2 n
    step records: step for each of n, and in each run up to step that are not among them.

    Example: runs of values [1, 3, 3] and [2, 3, 4], cut at the last 3 of the first one, are 1, 3
             and 2, then 3 and 3, 4
    """
    step = max(chunk // (2 * len(files)), 1)
    some = np.sort(np.concatenate([np.load(file, mmap_mode="r")[::step] for file in files]))
    before = [0] * len(files)
    for cut in (*some[len(files) :: len(files)], None):
        # mapped again for each chunk, which gives the pages of the last one back
        runs = [np.load(file, mmap_mode="r") for file in files]
        after = [len(run) if cut is None else np.searchsorted(run, cut) for run in runs]
        parts = [run[a:b] for run, a, b in zip(runs, before, after, strict=True)]
        records = np.concatenate(parts)
        yield records["id"][np.argsort(records["value"], kind="stable")]
        before = after


# ---- the index


def fingerprint(samples: Samples, name: str) -> str:
    """What ties an index to store, tokenizer, samples and metric."""
    of_store = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
    made_of = {field: samples.store.meta[field] for field in of_store}
    made_of["made"] = (samples.split, samples.kind == "rows", samples.without_eot)
    made_of |= {"format": 1, "metric": name, "seq_len": samples.max_piece_len}
    made_of["source"] = inspect.getsource(METRICS[name].value)
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def index_folder(given: str | None, samples: Samples) -> Path:
    """Where the indexes of one kind of samples lie: by default in the store they belong to."""
    kind = f"{samples.kind}-{samples.seq_len}"
    return Path(given or samples.store.path / "curriculum") / kind


def lacking_in(folder: Path, samples: Samples, names: Sequence[str]) -> list[str]:
    """The metrics without an index in this folder.

    Raises: as `opened`, for those that have one; every byte is compared
    """
    lacking = [name for name in names if not (folder / name).exists()]
    opened(folder, samples, [name for name in names if name not in lacking], whole=True)
    return lacking


def sums_of(index: Path) -> dict[str, str]:
    return {file: sha256_of(index / file) for file in ("values.bin", "order.bin")}


def opened(folder: Path, samples: Samples, names: Sequence[str], whole: bool = False) -> Rankings:
    """Open the index of each metric.

    Args:   whole compare every byte with the sha256 in index.json; a start does so once a machine,
                  and reads 8 bytes a sample, 12 with a metric in float64
    Raises: ValueError for an index of other samples or another metric, and for one that is damaged,
            as far as its sizes and both ends tell, or the whole
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
                raise ValueError("files of another size")
            if not values[order[0]] <= values[order[-1]]:
                raise ValueError("order.bin and values.bin disagree")
            if whole and about.get("sha256") != sums_of(index):
                raise ValueError("index.json has another sha256 of its files, or none")
        except (OSError, LookupError, TypeError, ValueError) as error:
            problem = f"damaged or old ({error}): remove it, analyze again"
            raise ValueError(f"{index}: {problem}") from None
        if stored != (wanted := fingerprint(samples, name)):
            raise ValueError(
                f"{index}: an index with fingerprint {stored[:16]}, but store, tokenizer, sample"
                f" length and metric are {wanted[:16]}: remove it, or name another folder"
            )
        rankings[name] = Ranking(values, order)
    return rankings


def write_index(folder: Path, runs: Pass, prints: dict[str, str], name: str) -> None:
    """Merge the runs of a metric into its index, a folder that appears whole."""
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
    """Measure every sample by each metric, sort, and write folder/<metric>, whole or not at all.

    A first pass over the tokens sums what metrics need to know of all samples (token counts), a
    second one measures and sorts. Then the sorted runs are merged.

    Args:    open_samples () -> samples, called in every worker
             ranks        of torchrun, if any; rank 0 writes, the others need no disk for it
    Raises:  ValueError for other samples' index in `folder`
    Cost:    8 to 16 bytes a sample of temporary files; rates in results/curriculum.jsonl
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
            for name in names:  # also what a killed analysis left
                for left in folder.glob(f".{name}.*"):
                    shutil.rmtree(left)

        ranks.on_rank0(finish)


# ---- what training calls


def ready(samples: Samples, names: Sequence[str], folder: str | None, ranks: Runtime) -> Rankings:
    """Open the index of each of these ranked metrics; make those that a small store lacks.

    Args: folder where the indexes lie; by default in the store
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

    ranks.on_each_machine(make)  # each may have a store of its own
    rankings = opened(indexes, samples, names)
    for name in names:
        about = json.loads((indexes / name / "index.json").read_text())
        ranks.check_same({f"the index by {name}": about["sha256"]})
    return rankings


# ---- command

KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT, of one with --nsp"


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="analyze.py", description=__doc__.split("\n")[0])
    parser.add_argument("store", nargs="?", help="made by prepare.py (default: embedded corpus)")
    known = ", ".join(METRICS)
    parser.add_argument("--metric", required=True, help=known)
    parser.add_argument("--samples", default="pieces", choices=KINDS, help=KINDS_HELP)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--workers", type=count, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", help="folder for the indexes (default: in the store's)")
    parser.add_argument("--examples", action="store_true", help="print an easy and a hard sample")
    args = parser.parse_args(argv)
    names = args.metric.split(",")
    least = ADDED_TOKENS.get(args.samples, 0) + 1
    if not least <= args.seq_len < 2**31:
        raise ValueError(f"--seq-len {args.seq_len}: a row has from {least} to 2^31 tokens")
    check_metrics(names, args.seq_len, args.samples, flag="--metric")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are told to end
    # the others wait for rank 0, which merges alone: minutes a metric for trillions of tokens
    ranks = runtime.start("cpu", "fp32", timedelta(hours=12))
    if args.store is None:  # each machine has its own
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
    """The median sample of the easiest and of the hardest percent by each metric."""
    encoding = get_encoding(samples.store.meta["tokenizer"])
    for name, index in indexes.items():
        for percent, share in (("easiest", 0.005), ("hardest", 0.995)):
            sample = int(index.order[int(share * len(index))])
            ((first, last),) = samples.spans(np.array([sample]))
            text = " ".join(encoding.decode(samples.store.tokens[first:last].tolist()).split())
            print(f"\n{percent} percent by {name}, {index.values[sample]:g}:\n{text[:400]}")


if __name__ == "__main__":
    runtime.exit_cleanly(main)
