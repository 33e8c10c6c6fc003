"""How an evaluation comes to its numbers: text in rows, sums by document, and what they amount to.

    Laid             pieces of text in rows that are read when they are needed
    sums_by_item     the one loop over batches: each rank takes its rows, every rank gets all sums
    Documents        nats, targets and bytes by document; Group and HeldOut add them up
    on_each_store    the same evaluation of every store of a mixture

Which text lies in which row is decided in evaluate.py. Questions and labelled examples come from
tasks.py and finetune.py beside this file, and go through the same loop.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor, nn

from kernels.cross_entropy import IGNORE
from model import predicted_by_bert
from support.base.atomic import atomic_write
from support.base.runtime import Runtime, on_device
from support.base.sharded import is_sharded
from support.rows.batch import Batch
from support.rows.mixture import AnyStore, Mixture
from support.text.store import Store

if TYPE_CHECKING:
    from evaluate import Evaluation

Poll = Callable[[int], None]  # called after each batch with how many rows are done


# ---- the loop over batches


class Laid(NamedTuple):
    """Pieces of text in rows."""

    offsets: np.ndarray  # (R + 1,) the pieces of each row, from left to right
    item: np.ndarray  # (n,) what each piece is a part of, such as a document, from 0
    read: Callable[[range], Batch] | None = None  # the rows with these numbers

    @property
    def rows(self) -> range:
        return range(len(self.offsets) - 1)


@torch.no_grad()
def sums_by_item(
    measure: Callable[[range], np.ndarray],
    laid: Laid,
    model: nn.Module,
    runtime: Runtime,
    *,
    shape: tuple[int, int],
    at_once: int,
    poll: Poll = lambda done: None,
) -> np.ndarray:
    """(items, columns) float64: the sums of a measure, the same on every rank.

    Args: measure numbers of rows -> (n, columns) of each piece in them, by one pass of the model
          shape   how many items and columns there are
          at_once rows on each rank
          poll    called equally often on every rank; what it raises ends the evaluation
    """
    items, columns = shape
    of_piece = np.zeros((len(laid.item), columns))
    with evaluating(model):
        for own in own_rows(model, len(laid.rows), at_once, runtime, poll):
            of_piece[slice(*laid.offsets[[own.start, own.stop]])] = measure(own)
    # by piece, so that any number of ranks adds up the same numbers in the same order
    of_piece = runtime.reduce(torch.from_numpy(of_piece)).numpy()
    return added_up(laid.item, items, *of_piece.T)


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
            token = torch.zeros(1, 1, dtype=torch.int64, device=runtime.device)
            with torch.no_grad(), runtime.autocast():
                model.hidden_states(token)
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


# ---- measures


def piece_of(batch: Batch, offsets: np.ndarray) -> Tensor:
    """(B, T) the piece that each token belongs to; meaningless on padding."""
    return torch.from_numpy(offsets[:-1, None]) + batch.with_documents().doc_ids


def added_up(key: Tensor | np.ndarray, keys: int, *columns: np.ndarray | None) -> np.ndarray:
    """(keys, columns) the sum of each column by key; None counts."""
    return np.stack([np.bincount(key, column, keys) for column in columns], axis=1)


def sums_of_pieces(
    model: nn.Module, batch: Batch, offsets: np.ndarray, lengths: np.ndarray, runtime: Runtime
) -> np.ndarray:
    """(n, 3) nats, targets and bytes of each piece.

    Args: lengths (V,) bytes that each token stands for
    """
    with runtime.autocast():
        losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
    counted = batch.targets != IGNORE
    nats = losses[counted].double().numpy()
    size = lengths[batch.targets[counted].numpy()]
    return added_up(piece_of(batch, offsets)[counted], offsets[-1], nats, None, size)


def right_answers(
    model: nn.Module, batch: Batch, offsets: np.ndarray, runtime: Runtime
) -> np.ndarray:
    """(n, 2) of each pair whether a BERT is right about it, and whether it was asked: 0 or 1."""
    batch = batch.with_documents()
    at = predicted_by_bert(batch.targets, batch.positions, nsp=True).answers
    tokens, _, positions, doc_ids = batch.to(runtime.device)
    with runtime.autocast():
        x = model.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
        answers = model.follows(x, on_device(at, runtime.device)).argmax(1).cpu()
    right = (answers == batch.targets.flatten()[at]).numpy()
    return added_up(piece_of(batch, offsets).flatten()[at], offsets[-1], right, None)


# ---- what the sums amount to

GROUPS = ("source", "length")
SOURCES_SHOWN = 6  # on one line of the screen; the log has all


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target too, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs that a BERT with --nsp is right about
    nsp_pairs: int | None = None
    by_source: dict[str, float] | None = None  # bits per byte of each source with any bytes

    def logged(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        text, sources = f"{self.val_bpb:.4f} bits per byte", self.by_source or {}
        if 1 < len(sources) <= SOURCES_SHOWN:
            text += f" ({', '.join(f'{name} {bpb:.3f}' for name, bpb in sources.items())})"
        if self.nsp_accuracy is not None:
            text += f", {self.nsp_accuracy:.1%} of {self.nsp_pairs:,} pairs right"
        return text


class Group(NamedTuple):
    """Documents that have a property in common."""

    name: str
    documents: int
    tokens: int  # that are targets
    bytes: int
    bpb: float | None  # bits per byte; None without a byte


class Documents(NamedTuple):
    """The result by document, in the store's order. Each array is (n,)."""

    store: Store
    numbers: np.ndarray  # in the store, from 0
    nats: np.ndarray  # summed over the targets
    targets: np.ndarray
    bytes: np.ndarray  # of the targets
    nsp_accuracy: float | None = None  # as in HeldOut
    nsp_pairs: int | None = None

    def total(self) -> HeldOut:
        nats, targets, size = (x.sum().item() for x in (self.nats, self.targets, self.bytes))
        by_source = None
        if self.store.sources is not None:
            by_source = {group.name: group.bpb for group in self.groups("source") if group.bytes}
        bpb = bits_per_byte(nats, max(size, 1))
        return HeldOut(
            nats / targets, bpb, targets, size, self.nsp_accuracy, self.nsp_pairs, by_source
        )

    def groups(self, by: str) -> list[Group]:
        """Add up by `source`, in the order of the store's names, or by `length`.

        Lengths are those of whole documents in tokens, end-of-text included, between powers of two.
        """
        if by == "source":
            key, name = self.store.sources[self.numbers], self.store.source_names.__getitem__
        else:
            length = self.store.offsets[self.numbers + 1] - self.store.offsets[self.numbers]
            key = np.frexp(length)[1] - 1  # 2^key <= length

            def name(key: int) -> str:
                return f"{2**key:,} to {2 ** (key + 1) - 1:,}"

        sums = added_up(key, key.max() + 1, None, self.nats, self.targets, self.bytes).tolist()
        return [
            Group(name(key), int(count), int(targets), int(size), bits_per_byte(nats, size))
            for key, (count, nats, targets, size) in enumerate(sums)
            if count
        ]

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


def table(groups: list[Group], by: str) -> str:
    """The groups as lines of text.

    Example: source      documents    tokens     bytes  bits per byte
             wordnet            27     1,204     4,310         1.6134
    """
    width = max(len(by), *(len(group.name) for group in groups))
    lines = [f"{by:{width}}  documents       tokens        bytes  bits per byte"]
    for name, documents, tokens, size, bpb in groups:
        bits = "-" if bpb is None else f"{bpb:.4f}"
        lines.append(f"{name:{width}}  {documents:9,} {tokens:12,} {size:12,} {bits:>14}")
    return "\n".join(lines)


# ---- mixtures


def on_each_store(
    evaluation: "type[Evaluation]",
    store: AnyStore,
    tokens: int | None,
    *args: object,
    **options: object,
) -> "Evaluation | MixedEvaluation":
    """An evaluation of a store, or of every store of a mixture.

    Args: tokens in all, or None for all text; the rest goes to the evaluation
    """
    if not isinstance(store, Mixture):
        return evaluation(store, *args, tokens=tokens, **options)
    parts = [
        evaluation(part, *args, tokens=count, **options)
        for part, count in zip(store.parts, tokens_of_each(store, tokens), strict=True)
    ]
    return MixedEvaluation(store, parts)


def tokens_of_each(mixture: Mixture, tokens: int | None) -> list[int | None]:
    """How many tokens of each store to evaluate on: half of them evenly, half by weight.

    So stores with a large weight are measured well, and those with a small one are measured.

    Example: 1,000 tokens of stores that weigh 0.8 and 0.2 are 650 and 350
    """
    if tokens is None:
        return [None] * len(mixture.parts)
    evenly = 1 / len(mixture.parts)
    return [max(1, int(tokens * (float(w) + evenly) / 2)) for w in mixture.weights]


class MixedEvaluation:
    """An evaluation of each store of a mixture, run one after the other."""

    def __init__(self, mixture: Mixture, parts: "list[Evaluation]"):
        self.mixture, self.parts = mixture, parts
        self.rows_in_all = sum(part.rows_in_all for part in parts)
        self.rows, self.sums = parts[0].rows, parts[0].sums  # one store's, to time a row
        self.name = parts[0].name
        named = zip(mixture.names, parts, strict=True)
        self.text = ", ".join(f"{part.text} of {name}" for name, part in named)

    def run(
        self, model: nn.Module, runtime: Runtime, rows: int, poll: Poll = lambda done: None
    ) -> HeldOut:
        results, done = {}, 0
        for name, part in zip(self.mixture.names, self.parts, strict=True):
            results[name] = part.run(model, runtime, rows, lambda n, done=done: poll(done + n))
            done += part.rows_in_all
        return weighted(results, self.mixture.weights)


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
        by_source={name: results[name].val_bpb for name in weight_of},
    )


def store_in_memory(name: str, texts: Sequence[list[int]], encoding: tiktoken.Encoding) -> Store:
    """Texts of token ids, each with end-of-text at its end, as the documents of a store."""
    tokens = np.fromiter((token for text in texts for token in text), np.uint32)
    offsets = np.cumsum([0, *map(len, texts)])
    meta = {"end_of_text": encoding.eot_token, "vocab_size": encoding.n_vocab}
    return Store(Path(name), meta, tokens, offsets, train_documents=0, train_tokens=0)
