"""ANALYZE"""

import json
import os
import secrets
import shutil
import signal
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial, reduce
from itertools import pairwise
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import data
import prepare
from curriculum import CurriculumConfig, check, figure_for, label, plotted, settled
from data import Samples
from difficulty import METRICS, DifficultyIndex, fingerprint, index_folder, metric
from support import runtime
from support.atomic import atomic_write, folder_lock
from support.runtime import Runtime
from support.tokenizer import get_encoding

BLOCK = 1 << 18  # tokens measured at once: what a core's cache holds


SHARD = 1 << 18  # samples, unless that made more than MOST_SHARDS


MOST_SHARDS = 512  # as many runs are open while they are merged


MERGE = 1 << 22  # samples sorted at once in the merge


PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)


def blocks(samples: Samples, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens (n,) and lengths (N,) of samples first..last, some 2^18 tokens at a time."""
    edges = samples.spans(np.array([first, last - 1]))
    mean = (edges[1, 1] - edges[0, 0]) / (last - first)
    step = max(int(BLOCK / mean), 1)
    for a in range(first, last, step):
        start, stop = samples.spans(np.arange(a, min(a + step, last))).T
        tokens, lengths = samples.read_tokens(start[0], stop[-1]), stop - start
        if lengths.sum() < len(tokens):  # between a BERT's samples lie the ends of documents
            edge = np.zeros(len(tokens) + 1, np.int8)
            edge[start - start[0]] += 1
            edge[stop - start[0]] -= 1
            tokens = tokens[np.cumsum(edge[:-1]).astype(bool)]
        samples.store.check_tokens(tokens.max())
        yield tokens.astype(np.int64), lengths  # what indexing by them would cast to, more slowly


def accumulated(open_samples: Callable, names: list[str], shard: tuple[int, int]) -> dict:
    """Map, first pass: what each metric sums up over a shard."""
    samples = open_samples()
    functions = {name: metric(name).total for name in names}
    needed = {function: name for name, function in functions.items()}  # some metrics share one
    sums: dict = {}
    vocab_size = samples.identity()["vocab_size"]
    for tokens, lengths in blocks(samples, *shard):
        for function, name in needed.items():
            found = function(tokens, lengths, vocab_size)
            sums[function] = added(name, sums[function], found) if function in sums else found
    return {name: sums[function] for name, function in functions.items()}


def added(name: str, total: np.ndarray, more: np.ndarray) -> np.ndarray:
    if total.shape != more.shape:
        raise ValueError(
            f"{name}.accumulate: returned shape {total.shape}, then {more.shape}: what is summed"
            " over all samples has one shape"
        )
    return total + more


def measured(open_samples: Callable, totals: dict, shard: tuple[int, int]) -> dict:
    """Map, second pass: a shard's samples by each metric, as records (value, id), easiest first."""
    samples = open_samples()
    functions = {name: metric(name).value(total) for name, total in totals.items()}
    values: dict[str, list] = {name: [] for name in totals}
    for tokens, lengths in blocks(samples, *shard):
        for name, function in functions.items():
            values[name].append(function(tokens, lengths))
    ids = np.dtype("uint32" if len(samples) < 2**32 else "int64")
    runs = {}
    for name in totals:
        found = np.concatenate(values[name]).astype(metric(name).dtype)
        order = np.argsort(found, kind="stable")
        runs[name] = np.empty(len(found), [("value", found.dtype), ("id", ids)])
        runs[name]["value"], runs[name]["id"] = found[order], order + shard[0]
    return runs


def merged(files: list[Path], chunk: int = MERGE) -> Iterator[np.ndarray]:
    """The ids of sorted runs, easiest first and ties by id, `chunk` of them at a time."""
    n = sum(len(np.load(file, mmap_mode="r")) for file in files)
    before = [0] * len(files)
    for rank in range(chunk, n + chunk, chunk):
        runs = [np.load(file, mmap_mode="r") for file in files]  # anew: their pages go with them
        after = split(runs, rank)
        parts = zip(runs, before, after, strict=True)
        part = np.concatenate([run[a:b] for run, a, b in parts])
        yield part["id"][np.argsort(part["value"], kind="stable")]
        before = after


def split(runs: list[np.ndarray], rank: int) -> list[int]:
    """Cut sorted runs so that their first parts together are the `rank` easiest; ties by run.

    Cost:    a binary search in every run for each of about log2(n) pivots
    Example: runs of values [1, 3, 3], [2, 3, 4] at rank 4 are cut at [3, 1]: 1, 3, 3 and 2
    """
    low, high = [0] * len(runs), [len(run) for run in runs]
    if rank >= sum(high):
        return high
    while True:
        widest = max(range(len(runs)), key=lambda i: high[i] - low[i])
        pivot = runs[widest]["value"][(low[widest] + high[widest]) // 2]
        left = [bisect_left(run["value"], pivot) for run in runs]
        right = [bisect_right(run["value"], pivot) for run in runs]
        if sum(left) > rank:
            high = left
        elif sum(right) < rank:
            low = right
        else:  # the cut goes through the ties of the pivot
            for i in range(len(runs)):
                take = min(right[i] - left[i], rank - sum(left))
                left[i] += take
            return left


def spread(task: Callable, shards: list, workers: int, ranks: Runtime) -> Iterator:
    """(shard, result) of every shard: from torchrun's ranks if there are some, else processes.

    Only rank 0 gets any. A rank's mistake comes as a result, so that no other rank waits for it.
    """
    if ranks.world_size > 1:
        for first in range(ranks.rank, len(shards) + ranks.rank, ranks.world_size):
            for results in ranks.collect([_attempt(task, s) for s in shards[first : first + 1]]):
                yield from results
    elif workers > 1 and len(shards) > 1:
        with ProcessPoolExecutor(min(workers, len(shards)), initializer=_live_with_parent) as pool:
            try:
                yield from zip(shards, pool.map(task, shards), strict=True)
            except BrokenProcessPool:
                raise ValueError(
                    "a worker was killed, for want of memory perhaps: what is done is kept, go on"
                    " with fewer --workers"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)
    else:
        yield from ((shard, task(shard)) for shard in shards)


def _live_with_parent() -> None:
    """In a worker: an interrupt is the parent's to handle, and when that one dies, so does this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would raise in a task

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _attempt(task: Callable, shard: tuple[int, int]) -> tuple:
    try:
        return shard, task(shard)
    except (ValueError, OSError) as error:
        return shard, error


class Shards(NamedTuple):
    """Files of one pass, one a shard and metric, so that a shard that is done is not done again."""

    shards: list[tuple[int, int]]
    folders: dict[str, Path]  # of each metric
    kind: str

    def files(self, name: str) -> list[Path]:
        return [self.folders[name] / f"{self.kind}-{a:012}-{b:012}.npy" for a, b in self.shards]

    def left(self, names: list[str]) -> list[tuple[int, int]]:
        done = zip(*(map(_complete, self.files(name)) for name in names), strict=True)
        return [shard for shard, found in zip(self.shards, done, strict=True) if not all(found)]

    def fill(self, task: Callable, names: list[str], workers: int, ranks: Runtime) -> None:
        """Run the task on every shard that is left, and write what it returns, file by file."""
        left = ranks.on_rank0(lambda: self.left(names))
        problem = None
        hidden = not ranks.is_rank0 or None  # None: where there is no terminal
        with tqdm(total=len(self.shards), desc=self.kind, unit="shard", disable=hidden) as bar:
            bar.update(len(self.shards) - len(left))
            for shard, found in spread(task, left, workers, ranks):
                bar.update()
                if isinstance(found, Exception):
                    problem = problem or found
                    continue
                for name, array in found.items():
                    file = self.files(name)[self.shards.index(shard)]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        np.save(out, array)
        ranks.on_rank0(partial(_raise, problem))


def _complete(file: Path) -> bool:
    """Whether it is an array with all that its header announces."""
    try:
        np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return True


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def analyze(
    open_samples: Callable, names: list[str], folder: Path, ranks: Runtime, workers: int = 1
) -> None:
    """Measure every sample by each metric, sort, and write folder/<metric>, whole or not at all.

    A first pass over the tokens sums up what metrics need to know of all samples (token counts), a
    second one measures. Each shard that is done is a file until the index is whole.

    Args:    open_samples () -> samples, called in every worker
             ranks        of torchrun, if any; rank 0 writes, no other needs its disk
    Raises:  ValueError for a user's function that fails, for other samples' index in `folder`
    Cost:    8 to 16 bytes a sample of temporary files; rates in results/curriculum.jsonl
    """
    samples, folder = open_samples(), Path(folder)
    if len(samples) == 0:
        raise ValueError(f"{samples.store.path} holds no training document: prepare more text")
    ranks.on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
    with folder_lock(folder) if ranks.is_rank0 else nullcontext():
        prints = {name: fingerprint(samples, name) for name in names}
        names = ranks.on_rank0(
            lambda: [n for n in names if not DifficultyIndex.exists(folder / label(n), prints[n])]
        )
        size = max(SHARD, -(-len(samples) // MOST_SHARDS))
        shards = list(pairwise([*range(0, len(samples), size), len(samples)]))
        work = {name: folder / f".{label(name)}-{prints[name][:16]}" for name in names}

        summed = [name for name in names if metric(name).total]
        sums = Shards(shards, work, "total")
        if summed:
            sums.fill(partial(accumulated, open_samples, summed), summed, workers, ranks)
        totals = dict.fromkeys(names) | ranks.on_rank0(
            lambda: {n: reduce(partial(added, n), map(np.load, sums.files(n))) for n in summed}
        )
        runs = Shards(shards, work, "run")
        if names:
            runs.fill(partial(measured, open_samples, totals), names, workers, ranks)
        merge = partial(_write_index, folder, runs, prints)

        def finish() -> None:  # on rank 0, where the runs are
            list(
                spread(merge, names, workers, ranks) if ranks.world_size == 1 else map(merge, names)
            )
            for name in prints:  # also what a kill just before this left of one that is whole
                hexadecimal = "[0-9a-f]" * 16  # not *, which would take rarity-mean's for rarity's
                for unfinished in folder.glob(f".{label(name)}-{hexadecimal}"):
                    shutil.rmtree(unfinished)

        ranks.on_rank0(finish)


def _write_index(folder: Path, shards: Shards, prints: dict[str, str], name: str) -> None:
    """Values in the order of samples, ids in that of difficulty; the folder appears whole."""
    runs, samples = shards.files(name), shards.shards[-1][1]
    about = {"fingerprint": prints[name], "metric": name, "samples": samples}
    # Beside the runs, so that what a kill leaves of it goes with them.
    unfinished = runs[0].with_name(f"index-{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        with atomic_write(unfinished / "values.bin") as file:
            for run in map(np.load, runs):
                values = np.empty_like(run["value"])
                values[run["id"] - run["id"].min()] = run["value"]
                file.write(values)
        with atomic_write(unfinished / "order.bin") as file:
            for ids in merged(runs):
                file.write(ids)
        about |= {"values": str(values.dtype), "order": str(ids.dtype)}
        with atomic_write(unfinished / "index.json") as file:
            file.write(json.dumps(about, indent=1).encode())
        unfinished.rename(folder / label(name))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="analyze.py", description=__doc__.split("\n")[0])
    parser.add_argument("store", nargs="?", help="of prepare.py (default: embedded corpus)")
    parser.add_argument("--metric", required=True, help=f"{', '.join(METRICS)} or path.py:name")
    parser.add_argument("--samples", default="pieces", choices=data.KINDS, help=data.KINDS_HELP)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--out", help="folder for the indexes (default: in the store's)")
    parser.add_argument("--plot", help="file for a histogram")
    parser.add_argument("--examples", action="store_true", help="print an easy and a hard sample")
    args = parser.parse_args(argv)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are told to end
    names = args.metric.split(",")
    least = 3 if args.samples == "bert" else 1  # its special_ids takes two
    if not least <= args.seq_len < 2**31:
        raise ValueError(f"--seq-len {args.seq_len}: a row has from {least} to 2^31 tokens")
    if args.workers < 1:
        raise ValueError(f"--workers {args.workers} must be at least 1")
    if args.plot:
        figure_for(args.plot)
    try:
        check(settled(CurriculumConfig(args.metric), args.seq_len), args.seq_len, args.samples)
    except ValueError as error:
        raise ValueError(str(error).replace("--curriculum", "--metric")) from None
    for name in names:
        if metric(name) is None:
            raise ValueError(f"--metric {name} needs no analysis: it takes samples as they come")
    ranks = runtime.start("cpu", "fp32")
    store = args.store or ranks.on_rank0(lambda: str(prepare.embedded_store("pd4k")))
    open_samples = partial(data.open_samples, store, args.samples, args.seq_len)
    samples = open_samples()
    folder = index_folder(args.out, store, args.samples, args.seq_len)
    analyze(open_samples, names, folder, ranks, args.workers)
    if ranks.is_rank0:
        found = {n: DifficultyIndex.open(folder / label(n), fingerprint(samples, n)) for n in names}
        print(f"{len(samples):,} samples of at most {samples.seq_len} tokens; index: {folder}")
        show(found)
        if args.examples:
            examples(found, samples)
        if args.plot:
            histograms(found, args.plot)


def show(indexes: dict[str, DifficultyIndex]) -> None:
    print("percentile    " + "".join(f"{percent:>12}" for percent in PERCENTS))
    for name, index in indexes.items():
        values = (index.highest(max(index.at_percent(percent), 1)) for percent in PERCENTS)
        print(f"{label(name):14}" + "".join(f"{value:12.6g}" for value in values))


def examples(indexes: dict[str, DifficultyIndex], samples: Samples) -> None:
    """The median sample of the easiest and of the hardest percent, by each metric."""
    encoding = get_encoding(samples.store.meta["tokenizer"])
    for name, index in indexes.items():
        for which, share in (("easiest", 0.005), ("hardest", 0.995)):
            sample = index.order[int(share * len(index))]
            ((first, last),) = samples.spans(np.array([sample]))
            text = " ".join(encoding.decode(samples.read_tokens(first, last).tolist()).split())
            print(f"\n{which} percent by {label(name)}, {index.values[sample]:g}:\n{text[:400]}")


def histograms(indexes: dict[str, DifficultyIndex], file: str) -> None:
    """A figure of every metric's values, from at most 2^18 samples of it."""
    for name, index in indexes.items():
        values = index.values[:: -(-len(index) // SHARD)]
        path = Path(file)
        one = path if len(indexes) == 1 else path.with_stem(f"{path.stem}-{label(name)}")
        plotted(
            str(one),
            lambda axes, values=values: axes.hist(values, 60),
            xlabel=name,
            ylabel="samples",
        )


SMALL = 100_000_000  # tokens of a store that training analyzes by itself, in some ten seconds


def ready(
    samples: Samples, metrics: str, given: str | None, ranks: Runtime
) -> dict[str, DifficultyIndex]:
    """Open the index of each ranked metric; make those that a small store lacks."""
    names = [name for name in metrics if metric(name)]
    if not names:
        return {}
    prints = {name: fingerprint(samples, name) for name in names}
    path, kind, row_len = str(samples.store.path), samples.kind, samples.seq_len
    folder = index_folder(given, path, kind, row_len)
    lacking = ranks.on_rank0(
        lambda: [
            name for name in names if not DifficultyIndex.exists(folder / label(name), prints[name])
        ]
    )
    if lacking:
        if samples.store.train_tokens > SMALL:
            raise ValueError(
                f"{folder} has no index by {', '.join(lacking)}: make it with python analyze.py"
                f" {path} --metric {','.join(lacking)} --samples {kind} --seq-len {row_len}"
                f"{f' --out {given}' if given else ''}"
            )
        ranks.say(f"analyzing {path} by {', '.join(lacking)}, once: index in {folder}")
        analyze(partial(data.open_samples, path, kind, row_len), lacking, folder, ranks)
    return {name: DifficultyIndex.open(folder / label(name), prints[name]) for name in names}


if __name__ == "__main__":
    runtime.exit_cleanly(main)
