"""How hard each sample of a store is: metrics, their offline analysis, and the index it writes.

Map-reduce: shards of samples are measured and sorted each by itself, in processes of one machine or
on torchrun's ranks; the sorted runs are then merged. What comes out is a folder a metric, whole or
absent: values by sample, sample ids by difficulty, and a fingerprint of all that they rest on.

Does not decide what is trained on when: that is curriculum.py, which runs this as its command.

Paper: Li et al., arXiv 2212.03597.

    python analyze.py --metric rarity,length            # of the embedded corpus
    torchrun --nproc-per-node 2 analyze.py STORE --metric rarity --samples rows
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curriculum import function_at, label, said
from data import Samples

# ---- metrics: tokens (n,) of N samples one after another and lengths (N,) -> (N,), easiest lowest


class Metric(NamedTuple):
    """`value(total)` makes the function above; `total` is summed over all samples before."""

    value: Callable[[np.ndarray | None], Callable]
    dtype: str = "float32"
    total: Callable | None = None


def token_counts(tokens: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=vocab_size)


def surprisal(counts: np.ndarray) -> np.ndarray:
    """(V,) -log of each token's share of all, in nats; one that was never seen counts as one."""
    counts = np.maximum(counts, 1)
    return -np.log(counts / counts.sum())


def length(_: None) -> Callable:
    return lambda tokens, lengths: lengths


def rarity(counts: np.ndarray) -> Callable:
    """Vocabulary rarity: the summed surprisal of a sample's tokens (arXiv 2212.03597).

    Deviates: upstream cuts it to a whole number, which makes ties
    Example:  of counts [2, 1, 1], tokens [0, 0, 1] of lengths [2, 1] have [2 ln 2, ln 4]: a tie
    """
    nats = surprisal(counts)
    return lambda tokens, lengths: np.add.reduceat(nats[tokens], np.cumsum(lengths) - lengths)


def rarity_mean(counts: np.ndarray) -> Callable:
    """Nats a token: the sum is mostly the length."""
    total = rarity(counts)
    return lambda tokens, lengths: total(tokens, lengths) / lengths


def length_rarity(counts: np.ndarray) -> Callable:
    """By length, then by rarity, in one number: length + rarity / 2^k, with 2^k out of its reach.

    A sample of up to 2^17 tokens is told apart to 2^-9 nats, or closer, by a float64.
    """
    longest = 2.0**17
    scale = 2.0 ** math.ceil(math.log2(longest * surprisal(counts).max() + 1))
    total = rarity(counts)
    return lambda tokens, lengths: lengths + total(tokens, lengths) / scale


METRICS = {
    "length": Metric(length, "uint32"),
    "rarity": Metric(rarity, total=token_counts),
    "rarity-mean": Metric(rarity_mean, total=token_counts),
    "length-rarity": Metric(length_rarity, "float64", token_counts),
}


def metric(name: str) -> Metric | None:
    """A ranked metric by name; None for a length. A user's function takes rows, (N, T) and (N,).

    It returns (N,) numbers. If it has an attribute `accumulate`, a function of the same arguments,
    then what that returns is summed over all samples first and handed over as third argument.
    """
    if ":" not in name:
        return METRICS.get(name)
    function = function_at(name)
    accumulate = getattr(function, "accumulate", None)

    def value(total: np.ndarray | None) -> Callable:
        more = ()
        if accumulate is not None:
            more = (np.asarray(total),)
            more[0].flags.writeable = False  # a function that changed it would change what follows
        return lambda tokens, lengths: _ask(name, function, tokens, lengths, *more, values=True)

    def total(tokens: np.ndarray, lengths: np.ndarray, _: int) -> np.ndarray:
        found = _ask(f"{name}.accumulate", accumulate, tokens, lengths)
        return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)

    return Metric(value, "float64", accumulate and total)


def _ask(name, function, tokens, lengths, *more, values=False) -> np.ndarray:
    """Call a user's function on rows padded with 0; ValueError that names it and the batch."""
    T = int(lengths.max())
    rows = np.zeros((len(lengths), T), tokens.dtype)
    rows[np.arange(T) < lengths[:, None]] = tokens
    batch = f"{name}, on a batch of shape {rows.shape}"
    try:
        found = np.asarray(function(rows, lengths.copy(), *more))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{batch}: {said(error)}") from None
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{batch}: returned {found.dtype}, not numbers")
    if not np.isfinite(found).all():
        raise ValueError(f"{batch}: returned a value that is not finite")
    if values and found.shape != lengths.shape:
        raise ValueError(f"{batch}: returned shape {found.shape}, not {lengths.shape}")
    return found


# ---- analysis: map over shards to sorted runs, then merge them; memory is that of one shard


def fingerprint(samples: Samples, name: str) -> str:
    """What ties an index to store, tokenizer, sample length and metric (a user's by its source)."""
    source = Path(name.rpartition(":")[0]).read_text() if ":" in name else ""
    made_of = {"format": 1, "metric": label(name), "source": source, **samples.identity()}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


# ---- index


@dataclass(frozen=True, eq=False)
class DifficultyIndex:
    """What analyze wrote, mapped: values (N,) by sample id, order (N,) ids, easiest first."""

    about: dict
    values: np.memmap
    order: np.memmap

    @staticmethod
    def exists(folder: Path, wanted: str) -> bool:
        """Whether there is one; ValueError if it is of other samples, or of a changed metric."""
        if not folder.exists():
            return False
        try:
            found = json.loads((folder / "index.json").read_text())["fingerprint"][:64]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            raise ValueError(f"{folder}: a damaged index: remove it and analyze anew") from None
        if found != wanted:
            raise ValueError(
                f"{folder}: an index with fingerprint {found[:16]}, but store, tokenizer, sample"
                f" length and metric are {wanted[:16]}: remove it, or name another folder"
            )
        return True

    @classmethod
    def open(cls, folder: Path, wanted: str) -> "DifficultyIndex":
        if not cls.exists(folder, wanted):
            raise ValueError(f"{folder}: no index: make it with analyze.py")
        about = json.loads((folder / "index.json").read_text())
        try:
            arrays = [np.memmap(folder / f"{n}.bin", about[n], "r") for n in ("values", "order")]
            found = cls(about, *arrays)
            found.spot_check()
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder}: a damaged index ({error}): remove it and analyze anew"
            ) from None
        return found

    def spot_check(self) -> None:
        """ValueError for files that are too short, or whose ends are no easiest and no hardest.

        Four pages, whatever the size: more would take a cold disk longer than a run should wait.
        """
        if not len(self.values) == len(self.order) == self.about["samples"]:
            raise ValueError("files of another size")
        first, last = ends = self.order[[0, -1]]
        if ends.max() >= len(self) or (first == last and len(self) > 1):
            raise ValueError("order.bin is no order of the samples")
        if not self.values[first] <= self.values[last]:
            raise ValueError("order.bin and values.bin disagree")

    def __len__(self) -> int:
        return len(self.order)

    def at_percent(self, percent: int) -> int:
        """How many samples the easiest percent are, by nearest rank: never 0, all at 100."""
        return -(-len(self) * percent // 100)

    def at_value(self, value: float) -> int:
        """How many samples have at most this value: ties are in or out together."""
        return bisect_right(self.order, value, key=lambda sample: self.values[sample])

    def highest(self, count: int) -> float:
        """The value of the hardest among the `count` easiest."""
        return self.values[self.order[count - 1]].item()

    def holds(self, ids: np.ndarray, count: int) -> np.ndarray:
        """(n,) bool: which samples are among the `count` easiest; ties are ordered by id."""
        last = self.order[count - 1]
        values, bound = self.values[ids], self.values[last]
        return (values < bound) | ((values == bound) & (ids <= last))


def index_folder(given: str | None, store: str | Path, kind: str, row_len: int) -> Path:
    """Where the indexes of one kind of samples lie: by default in the store they belong to."""
    return Path(given or Path(store) / "curriculum") / f"{kind}-{row_len}"
