"""Sort a store by how hard its samples are: measure shards, sort each, merge them into an index.

    samples ── shards ──> totals       what a metric sums over all samples, a file a shard
                     └──> sorted runs  values and ids, a file a shard and metric
                             └─ merge ──> index/<metric>: values.bin, order.bin, index.json

A pass does one task for every shard, in processes of this machine or on torchrun's ranks, and keeps
what it returns in files that appear whole or not at all. An analysis that was interrupted or killed
does the shards whose files are missing or cut short, and no others. Metrics are in difficulty.py;
runs, how they are merged and what an index can be asked in support/rows/ranking.py.

    analyze.py's two passes over three shards
    total-...00-...07.npy   total-...07-...14.npy   total-...14-...20.npy
    run-...00-...07.npy     run-...07-...14.npy     run-...14-...20.npy

Paper: Li et al., arXiv 2212.03597.

    python analyze.py --metric rarity,length            # of the embedded corpus
    torchrun --nproc-per-node 2 analyze.py STORE --metric rarity --samples rows
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import difficulty
import prepare
from difficulty import METRICS
from support.base import numbers, runtime
from support.base.atomic import atomic_folder, atomic_write, folder_lock
from support.base.runtime import Runtime
from support.rows import ranking
from support.rows.ranking import LENGTHS, Rankings, sorted_run
from support.rows.samples import KINDS, SPECIAL_TOKENS, Samples, samples_of
from support.text.tokenizer import get_encoding

SHARD = 1 << 18  # samples of a shard, unless that would make more than MOST_SHARDS
MOST_SHARDS = 512  # all their runs are open while they are merged
SMALL = 100_000_000  # tokens of a store that training analyzes by itself, in some ten seconds

# ---- map: what is summed over a shard, and its samples sorted


def sum_shard(open_samples: Callable, names: list[str], shard: range) -> dict[str, np.ndarray]:
    """The first pass over a shard: what each of these metrics sums over all samples."""
    samples = open_samples()
    vocab_size = samples.identity()["vocab_size"]
    summed = {name: METRICS[name].summed for name in names}
    functions = set(summed.values())  # metrics share what they sum
    sums: dict[Callable, np.ndarray] = {}
    for tokens, lengths in difficulty.blocks(samples, shard.start, shard.stop):
        for function in functions:
            part = function(tokens, lengths, vocab_size)
            sums[function] = sums[function] + part if function in sums else part
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
    for tokens, lengths in difficulty.blocks(samples, shard.start, shard.stop):
        for name in names:
            found = METRICS[name].value(tokens, lengths, known.get(name))
            if found.shape != lengths.shape or not np.isfinite(found).all():
                raise ValueError(f"--metric {name} has to give each sample a finite number")
            values[name].append(found)
    runs = {}
    for name in names:
        of_shard = np.concatenate(values[name]).astype(METRICS[name].dtype)
        runs[name] = sorted_run(of_shard, shard.start, id_dtype)
    return runs


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


# ---- reduce: the index


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
    prints = {name: difficulty.fingerprint(samples, name) for name in names}
    size = max(SHARD, -(-len(samples) // MOST_SHARDS))
    shards = [range(a, min(a + size, len(samples))) for a in range(0, len(samples), size)]
    unfinished = {name: folder / f".{name}.{prints[name][:16]}" for name in names}
    sums = Pass("total", shards, unfinished)
    runs = Pass("run", shards, unfinished)

    ranks.on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
    with folder_lock(folder) if ranks.is_rank0 else nullcontext():
        lacking = ranks.on_rank0(lambda: difficulty.lacking_in(folder, samples, names))
        to_sum = [name for name in lacking if METRICS[name].summed]
        sums.run(partial(sum_shard, open_samples, to_sum), to_sum, workers, ranks)
        totals = ranks.on_rank0(lambda: {name: total_of(name, sums) for name in to_sum})
        runs.run(partial(sort_shard, open_samples, lacking, totals), lacking, workers, ranks)

        def finish() -> None:
            processes = workers if ranks.world_size == 1 else 1
            list(in_processes(partial(write_index, folder, runs, prints), lacking, processes))
            for name in names:  # also what a killed analysis left
                for left in folder.glob(f".{name}.*"):
                    shutil.rmtree(left)

        ranks.on_rank0(finish)


def total_of(name: str, sums: Pass) -> np.ndarray:
    return sum(map(np.load, sums.files(name)))


def write_index(folder: Path, runs: Pass, prints: dict[str, str], name: str) -> None:
    """Merge the runs of a metric into its index, a folder that appears whole."""
    with atomic_folder(folder / name) as index:
        about = {"fingerprint": prints[name], "metric": name}
        about |= ranking.write(index, runs.files(name))
        (index / "index.json").write_text(json.dumps(about, indent=1))


# ---- what training calls


def ready(samples: Samples, names: Sequence[str], folder: str | None, ranks: Runtime) -> Rankings:
    """Open the index of each of these ranked metrics; make those that a small store lacks.

    Args: folder where the indexes lie; by default in the store
    """
    names = [name for name in names if name not in LENGTHS]
    if not names:
        return Rankings({})
    store = str(samples.store.path)
    indexes = difficulty.index_folder(folder, samples)

    def make() -> None:
        lacking = difficulty.lacking_in(indexes, samples, names)
        by = ",".join(lacking)
        if lacking and samples.store.meta["train_tokens"] > SMALL:
            out = f" --out {folder}" if folder else ""
            raise ValueError(
                f"{indexes} has no index by {by}: make it with python analyze.py {store} --metric"
                f" {by} --samples {samples.kind} --seq-len {samples.seq_len}{out}"
            )
        if lacking:
            print(f"analyzing {store} by {by}, once: index in {indexes}", flush=True)
            open_samples = partial(samples_of, store, samples.kind, samples.seq_len)
            analyze(open_samples, lacking, indexes, replace(ranks, rank=0, world_size=1))

    ranks.on_each_machine(make)  # each may have a store of its own
    return difficulty.opened(indexes, samples, names)


# ---- command

KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT, of one with --nsp"


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="analyze.py", description=__doc__.split("\n")[0])
    parser.add_argument("store", nargs="?", help="made by prepare.py (default: embedded corpus)")
    known = ", ".join(difficulty.METRICS)
    parser.add_argument("--metric", required=True, help=known)
    parser.add_argument("--samples", default="pieces", choices=KINDS, help=KINDS_HELP)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--workers", type=numbers.count, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", help="folder for the indexes (default: in the store's)")
    parser.add_argument("--examples", action="store_true", help="print an easy and a hard sample")
    args = parser.parse_args(argv)
    names = args.metric.split(",")
    check_arguments(args, names)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are told to end
    ranks = runtime.start("cpu", "fp32")
    if args.store is None:  # each machine has its own
        ranks.on_each_machine(lambda: prepare.embedded_store("pd4k"))
    store = args.store or str(prepare.embedded_store("pd4k"))
    open_samples = partial(samples_of, store, args.samples, args.seq_len)
    samples = open_samples()
    folder = difficulty.index_folder(args.out, samples)
    analyze(open_samples, names, folder, ranks, args.workers)
    if ranks.is_rank0:
        indexes = difficulty.opened(folder, samples, names)
        most = samples.max_piece_len
        print(f"{len(samples):,} samples of at most {most} tokens; index: {folder}")
        show_percentiles(indexes)
        if args.examples:
            show_examples(indexes, samples)


def check_arguments(args: argparse.Namespace, names: list[str]) -> None:
    least = SPECIAL_TOKENS.get(args.samples, 0) + 1
    if not least <= args.seq_len < 2**31:
        raise ValueError(f"--seq-len {args.seq_len}: a row has from {least} to 2^31 tokens")
    difficulty.check_metrics(names, args.seq_len, args.samples, flag="--metric")


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
