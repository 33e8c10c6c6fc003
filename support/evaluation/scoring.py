"""How an evaluation comes to its numbers: pieces of text in rows, sums by item, and results.

    Laid             pieces of text in rows, which are read when they are needed
    sums_by_item     the one loop over batches: each rank takes its rows, every rank gets all sums
    Documents        nats, targets and bytes by document; HeldOut adds them up

Does not read a store, decide which text lies in which row or print: see `Evaluation` and `lay` in
evaluate.py. Questions (tasks.py) go through the same loop.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model import Batch
from support.runtime import Runtime, is_sharded, printable
from support.store import atomic_write

Poll = Callable[[int], None]  # called after each batch with how many rows are done
# Of a batch on the CPU: which of its B T tokens are asked, and columns (n,) of numbers about them;
# a column that is None counts them.
Measure = Callable[[Batch], tuple[Tensor | np.ndarray | None, ...]]


# ---- text in rows


class Laid(NamedTuple):
    """Pieces of text in rows."""

    offsets: np.ndarray  # (R + 1,) the pieces of each row, from left to right
    item: np.ndarray  # (n,) what each piece is a part of, such as a document, from 0
    items: int  # how many there are, also those without a piece
    read: Callable[[range], Batch]  # the rows with these numbers

    @property
    def rows(self) -> range:
        return range(len(self.offsets) - 1)


# ---- the loop over batches


@torch.no_grad()
def sums_by_item(
    measure: Measure,
    laid: Laid,
    model: nn.Module,
    runtime: Runtime,
    *,
    columns: int,
    at_once: int,
    poll: Poll = lambda done: None,
) -> np.ndarray:
    """(items, columns) float64: the sums of a measure, the same on every rank.

    Args: measure runs the model once, under autocast
          at_once rows on each rank
          poll    called equally often on every rank; what it raises ends the evaluation
    """
    of_piece = np.zeros((len(laid.item), columns))
    with evaluating(model):
        for own in own_rows(model, len(laid.rows), at_once, runtime, poll):
            batch, offsets = laid.read(own), laid.offsets[own.start : own.stop + 1]
            with runtime.autocast():
                asked, *values = measure(batch)
            doc_ids = batch.with_documents().doc_ids  # (B, T)
            piece = (torch.from_numpy(offsets[:-1, None] - offsets[0]) + doc_ids).flatten()[asked]
            sums = added_up(piece, offsets[-1] - offsets[0], *values)
            of_piece[offsets[0] : offsets[-1]] = sums
    # by piece, so that any number of ranks adds up the same numbers in the same order
    of_piece = runtime.reduce(torch.from_numpy(of_piece)).numpy()
    return added_up(laid.item, laid.items, *of_piece.T)


def added_up(
    key: Tensor | np.ndarray, keys: int, *columns: Tensor | np.ndarray | None
) -> np.ndarray:
    """(keys, columns) the sum of each column by key; None counts."""
    return np.stack([np.bincount(key, column, keys) for column in columns], axis=1)


def own_rows(
    model: nn.Module, count: int, at_once: int, runtime: Runtime, poll: Poll
) -> Iterator[range]:
    """The numbers of this rank's rows, `at_once` at a time.

    In the last turn some ranks may have no row. If the model is sharded they run it on one token,
    because its weights are gathered from all ranks.
    """
    for first in range(0, count, runtime.world_size * at_once):
        own = first + runtime.rank * at_once
        if own < count:
            yield range(own, min(own + at_once, count))
        elif is_sharded(model):
            with torch.no_grad(), runtime.autocast():
                model.hidden_states(torch.zeros(1, 1, dtype=torch.int64, device=runtime.device))
        poll(min(first + runtime.world_size * at_once, count))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, and afterwards back in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if is_sharded(model):
            model.reshard()  # what stands outside the blocks is kept gathered for a backward pass


# ---- what the sums amount to


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target too, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs that a BERT with --nsp is right about
    nsp_pairs: int | None = None
    by_store: dict[str, float] | None = None  # bits per byte of each store of a mixture

    def logged(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.val_bpb:.4f} bits per byte"
        if self.by_store:
            shown = [f"{printable(name)} {bpb:.3f}" for name, bpb in self.by_store.items()]
            text += f" ({', '.join(shown)})"
        if self.nsp_accuracy is not None:
            text += f", {self.nsp_accuracy:.1%} of {self.nsp_pairs:,} pairs right"
        return text


class Documents(NamedTuple):
    """The result by document, in the store's order. Each array is (n,)."""

    numbers: np.ndarray  # in the store, from 0
    nats: np.ndarray  # summed over the targets
    targets: np.ndarray
    bytes: np.ndarray  # of the targets
    nsp_accuracy: float | None = None  # as in HeldOut
    nsp_pairs: int | None = None

    def total(self) -> HeldOut:
        nats, targets, size = (x.sum().item() for x in (self.nats, self.targets, self.bytes))
        bpb = bits_per_byte(nats, max(size, 1))
        return HeldOut(nats / targets, bpb, targets, size, self.nsp_accuracy, self.nsp_pairs)

    def write(self, file: Path) -> None:
        """One line and JSON object a document; bits per byte are null where it has no byte."""
        columns = (self.numbers, self.nats, self.targets, self.bytes)
        with atomic_write(file) as out:
            for number, nats, targets, size in zip(*(x.tolist() for x in columns), strict=True):
                line = {"document": number, "tokens": targets, "bytes": size, "nats": nats}
                line["bpb"] = bits_per_byte(nats, size)
                # NaN, which JSON does not have, is an error and leaves no file
                out.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def bits_per_byte(nats: float, size: float) -> float | None:
    return nats / math.log(2) / size if size else None


def weighted(results: dict[str, HeldOut], weights: Sequence[float]) -> HeldOut:
    """The results on several texts as one: their mean by weight, and each one's by its name.

    A text in which no byte was a target has no bits per byte, and does not count.

    Example: 2 bits per byte with weight 0.75 and 1 with 0.25 are 1.75, however large the texts are
    """
    named = zip(results.items(), weights, strict=True)
    weight_of = {name: float(weight) for (name, result), weight in named if result.bytes}
    total = sum(weight_of.values())
    if not total:
        raise ValueError("no byte of a text with a weight is a target: evaluate on more tokens")

    def mean(field: str) -> float:
        return sum(w * getattr(results[name], field) for name, w in weight_of.items()) / total

    return HeldOut(
        mean("val_loss"),
        mean("val_bpb"),
        targets=sum(result.targets for result in results.values()),
        bytes=sum(result.bytes for result in results.values()),
        by_store={name: results[name].val_bpb for name in weight_of},
    )
