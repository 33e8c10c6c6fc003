"""One task for many items: in this process, in several on this machine, or on torchrun's ranks.

Results arrive in order and one at a time, so that whoever takes them needs memory for one. Workers
die with the process that started them.
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


class Outcome(NamedTuple):
    """What a task returned for an item; or the mistake on another rank, to be raised by all."""

    item: Any
    result: Any = None
    error: Exception | None = None


def spread(task: Callable, items: list, workers: int, runtime: Runtime) -> Iterator[Outcome]:
    """Do the task for every item: on the ranks if torchrun started several, else in `workers`.

    Only rank 0 gets outcomes. A mistake on a rank comes as one, so that no other rank waits for it;
    elsewhere it is raised.
    """
    if runtime.world_size > 1:
        return on_ranks(task, items, runtime)
    return in_processes(task, items, workers)


def on_ranks(task: Callable, items: list, runtime: Runtime) -> Iterator[Outcome]:
    """In rounds of one item a rank: rank r does items r, r + world_size, ... and sends each."""
    for first in range(0, len(items), runtime.world_size):
        mine = items[first + runtime.rank : first + runtime.rank + 1]  # none in the last round
        for outcomes in runtime.collect([_attempt(task, item) for item in mine]):
            yield from outcomes


def _attempt(task: Callable, item: Any) -> Outcome:
    try:
        return Outcome(item, task(item))
    except (ValueError, OSError) as error:
        return Outcome(item, error=error)


def in_processes(task: Callable, items: list, workers: int) -> Iterator[Outcome]:
    """In `workers` processes, or in this one where that is all it takes."""
    if workers == 1 or len(items) <= 1:
        for item in items:
            yield Outcome(item, task(item))
        return
    with ProcessPoolExecutor(min(workers, len(items)), initializer=_live_with_parent) as pool:
        try:
            for item, result in zip(items, pool.map(task, items), strict=True):
                yield Outcome(item, result)
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed, perhaps for want of memory: what is done is kept, go on with"
                " fewer --workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _live_with_parent() -> None:
    """In a worker: an interrupt is the parent's to handle, and when that one dies, so does this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler would raise in a task

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# ---- shard files
#
# A pass over the shards of a data set that can be interrupted: what is done lies in files.
#
# Each shard and name (of a metric, say) has one file, which appears whole or not at all. A pass
# that was killed does the shards whose files are missing or cut short, and no others.


class Shard(NamedTuple):
    """Items first..last - 1 of the data set."""

    first: int
    last: int


class ShardFiles(NamedTuple):
    """The files of one pass."""

    shards: list[Shard]
    folders: dict[str, Path]  # of each name
    kind: str  # what the pass makes: the files begin with it

    def file(self, name: str, shard: Shard) -> Path:
        return self.folders[name] / f"{self.kind}-{shard.first:012}-{shard.last:012}.npy"

    def files(self, name: str) -> list[Path]:
        return [self.file(name, shard) for shard in self.shards]

    def missing(self, names: Sequence[str]) -> list[Shard]:
        missing = []
        for shard in self.shards:
            if not all(is_whole(self.file(name, shard)) for name in names):
                missing.append(shard)
        return missing

    def fill(self, task: Callable, names: Sequence[str], workers: int, runtime: Runtime) -> None:
        """Do the task for every shard that is missing, and write what it returns: {name: array}.

        Raises: ValueError on every rank for a mistake on any, after the other shards are done
        """
        missing = runtime.on_rank0(lambda: self.missing(names))
        mistakes = []
        hidden = not runtime.is_rank0 or None  # None: where there is no terminal
        with tqdm(total=len(self.shards), desc=self.kind, unit="shard", disable=hidden) as bar:
            bar.update(len(self.shards) - len(missing))
            for shard, arrays, mistake in spread(task, missing, workers, runtime):
                bar.update()
                if mistake is not None:
                    mistakes.append(mistake)
                    continue
                for name, array in arrays.items():
                    file = self.file(name, shard)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(file) as out:
                        np.save(out, array)
        runtime.on_rank0(lambda: raise_first(mistakes))


def is_whole(file: Path) -> bool:
    """Whether it is an array with everything that its header announces."""
    try:
        np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return True


def raise_first(mistakes: list[Exception]) -> None:
    if mistakes:
        raise mistakes[0]
