"""A pass over the shards of a data set, on several processes or ranks, that can be interrupted.

A pass does one task for every shard and keeps what it returns in files: one for each shard and name
(of a metric, say), which appears whole or not at all. A pass that was killed does the shards whose
files are missing or cut short, and no others. Results arrive in order and one at a time, so that
rank 0, which writes them, needs memory for one.

    analyze.py's two passes over three shards
    total-...00-...07.npy   total-...07-...14.npy   total-...14-...20.npy
    run-...00-...07.npy     run-...07-...14.npy     run-...14-...20.npy

Does not know what the tasks compute.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from support.base.atomic import atomic_write
from support.base.runtime import Runtime


class Shard(NamedTuple):
    """Items first..last - 1 of the data set."""

    first: int
    last: int


class ShardFiles(NamedTuple):
    """The files of one pass."""

    shards: list[Shard]
    folders: dict[str, Path]  # of each name
    kind: str  # what the pass makes: the names of its files begin with it

    def file(self, name: str, shard: Shard) -> Path:
        return self.folders[name] / f"{self.kind}-{shard.first:012}-{shard.last:012}.npy"

    def files(self, name: str) -> list[Path]:
        return [self.file(name, shard) for shard in self.shards]

    def missing(self, names: Sequence[str]) -> list[Shard]:
        def is_done(shard: Shard) -> bool:
            return all(is_whole(self.file(name, shard)) for name in names)

        return [shard for shard in self.shards if not is_done(shard)]

    def fill(self, task: Callable, names: Sequence[str], workers: int, runtime: Runtime) -> None:
        """Do the task for every missing shard and write what it returns: {name: array}.

        On torchrun's ranks if there are several, else in `workers` processes.

        Raises: ValueError on every rank for an error on any, after the other ranks' shards are done
        """
        missing = runtime.on_rank0(lambda: self.missing(names))
        if runtime.world_size > 1:
            results = on_ranks(task, missing, runtime)
        else:
            results = in_processes(task, missing, workers)
        done = len(self.shards) - len(missing)
        hidden = not runtime.is_rank0 or None  # None: where there is no terminal
        bar = tqdm(total=len(self.shards), initial=done, desc=self.kind, disable=hidden)
        with bar:
            for shard, arrays in results:
                for name, array in arrays.items():
                    file = self.file(name, shard)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        np.save(out, array)
                bar.update()


def is_whole(file: Path) -> bool:
    """Whether it is an array with everything that its header announces."""
    try:
        np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return True


# ---- one task for many items


def on_ranks(task: Callable, items: list, runtime: Runtime) -> Iterator[tuple[Any, Any]]:
    """Yield (item, result) on rank 0, and nothing on other ranks.

    In rounds of one item a rank: rank r does items r, r + world_size, ... An error is kept until
    the last round, so that no rank waits for another, and is then raised on all of them.
    """
    errors: list[Exception] = []

    def outcome(item: Any) -> tuple[Any, Any, Exception | None]:
        try:
            return item, task(item), None
        except (ValueError, OSError) as error:
            return item, None, error

    def raise_first() -> None:
        if errors:
            raise errors[0]

    for first in range(0, len(items), runtime.world_size):
        of_rank = items[first + runtime.rank : first + runtime.rank + 1]  # may be none at the end
        for outcomes in runtime.collect([outcome(item) for item in of_rank]):
            for item, result, error in outcomes:
                if error is None:
                    yield item, result
                else:
                    errors.append(error)
    runtime.on_rank0(raise_first)


def in_processes(task: Callable, items: list, workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield (item, result), from `workers` processes, or from this one if a single one is enough.

    Workers die with the process that started them.
    """
    if workers == 1 or len(items) <= 1:
        for item in items:
            yield item, task(item)
        return
    with ProcessPoolExecutor(min(workers, len(items)), initializer=_live_with_parent) as pool:
        try:
            yield from zip(items, pool.map(task, items), strict=True)
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for lack of memory: what is done is kept, start again"
                " with fewer --workers"
            ) from None
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
