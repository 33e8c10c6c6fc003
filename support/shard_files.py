"""A pass over the shards of a data set that can be interrupted: what is done lies in files.

Each shard and name (of a metric, say) has one file, which appears whole or not at all. A pass that
was killed does the shards whose files are missing or cut short, and no others.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from support.atomic import atomic_write
from support.parallel import spread
from support.runtime import Runtime


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
