"""One task for many items: in this process, in several on this machine, or on torchrun's ranks.

Results arrive in order and one at a time, so that whoever takes them needs memory for one. Workers
die with the process that started them.
"""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from threading import Thread
from typing import Any, NamedTuple

from support.runtime import Runtime


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
