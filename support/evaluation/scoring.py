"""What an evaluation found: of all its text, and of each document. No model is run here."""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from kernels.cross_entropy import IGNORE, chunks, exact_dtype
from model import Transformer, predicted_by_bert
from support.base.atomic import atomic_write
from support.base.runtime import Runtime, on_device
from support.base.sharded import is_sharded
from support.rows.batch import Batch
from support.rows.bert import SpecialIds
from support.rows.mixture import AnyStore, Mixture
from support.text.store import Store

# ---- subject
#
# What evaluate.py evaluates: a model with its tokenizer, and how it was asked to.


class Subject(NamedTuple):
    args: Namespace
    here: Runtime
    settings: Any  # of the run
    model: Transformer
    encoding: tiktoken.Encoding
    special_ids: SpecialIds | None  # a BERT's
    where: str  # the run and its step

    def say(self, line: str) -> None:
        """Print a line on rank 0, unless one JSON object is all that is asked for."""
        if not self.args.json:
            self.here.say(line)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Say in one line that Ctrl-C has ended the work, which has changed nothing."""
        try:
            yield
        except KeyboardInterrupt:
            if self.here.is_rank0:
                line = f"interrupted: nothing is written, and {self.args.run} is as it was"
                tqdm.write(line, file=sys.stderr)
            raise


SOURCES_SHOWN = 6  # on one line of the screen; the log has all


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target too, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs told rightly, of a BERT with --nsp
    nsp_pairs: int | None = None
    by_source: dict[str, float] | None = None  # bits per byte of each that has any bytes

    def logged(self) -> dict[str, float]:
        """The fields that there are."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        pairs = (
            ""
            if self.nsp_accuracy is None
            else f", {self.nsp_accuracy:.1%} of {self.nsp_pairs:,} pairs right"
        )
        by_source = ", ".join(f"{name} {bpb:.3f}" for name, bpb in (self.by_source or {}).items())
        shown = 1 < len(self.by_source or {}) <= SOURCES_SHOWN
        return f"{self.val_bpb:.4f} bits per byte{f' ({by_source})' * shown}{pairs}"


class Documents(NamedTuple):
    """The result by document, in the store's order. Each array is (n,)."""

    numbers: np.ndarray  # in the store, from 0
    nats: np.ndarray  # summed over the targets
    targets: np.ndarray
    bytes: np.ndarray  # of the targets
    sources: np.ndarray | None = None  # index into source_names
    source_names: Sequence[str] = ()

    def of_sources(self, store: Store) -> "Documents":
        """With the sources of these documents, if the store has them."""
        if store.sources is None:
            return self
        return self._replace(sources=store.sources[self.numbers], source_names=store.source_names)

    def total(self) -> HeldOut:
        nats, targets, size = (c.sum().item() for c in (self.nats, self.targets, self.bytes))
        bpb = bits_per_byte(nats, max(size, 1))
        return HeldOut(nats / targets, bpb, targets, size, by_source=self.by_source())

    def by_source(self) -> dict[str, float] | None:
        """Bits per byte of each source that has a byte; None where documents name no source."""
        if self.sources is None:
            return None
        count = len(self.source_names)
        nats, size = (np.bincount(self.sources, c, count) for c in (self.nats, self.bytes))
        each = zip(self.source_names, nats.tolist(), size.tolist(), strict=True)
        return {name: bits_per_byte(n, s) for name, n, s in each if s}

    def write(self, file: Path) -> None:
        """One JSON object a document and line; bits per byte are null where it has no byte."""
        with atomic_write(file) as out:
            columns = (self.numbers, self.nats, self.targets, self.bytes)
            for number, nats, targets, size in zip(*map(np.ndarray.tolist, columns), strict=True):
                bpb = bits_per_byte(nats, size) if size else None
                line = {"document": number, "tokens": targets, "bytes": size, "nats": nats}
                # NaN, which JSON does not have, is an error and leaves no file.
                out.write(json.dumps(line | {"bpb": bpb}, allow_nan=False).encode() + b"\n")


def bits_per_byte(nats: float, size: int) -> float:
    return nats / math.log(2) / size


def weighted(found: dict[str, HeldOut], weights: Sequence[float]) -> HeldOut:
    """The results on several texts as one: their mean by weight, and each under its name.

    A text of which no byte was a target has no bits per byte, and no weight.

    Example: 2 bits per byte with weight 0.75 and 1 with 0.25 are 1.75, however large the texts are
    """
    measured = {name: one for name, one in found.items() if one.bytes}
    by_name = dict(zip(found, map(float, weights), strict=True))
    total = sum(by_name[name] for name in measured)
    if not total:
        raise ValueError("no byte of a text with a weight is a target: evaluate on more tokens")
    mean = {
        field: sum(by_name[name] * getattr(one, field) for name, one in measured.items()) / total
        for field in ("val_loss", "val_bpb")
    }
    return HeldOut(
        **mean,
        targets=sum(one.targets for one in found.values()),
        bytes=sum(one.bytes for one in found.values()),
        by_source={name: one.val_bpb for name, one in measured.items()},
    )


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before the work that it is for.

    Raises: ValueError naming --by-document
    """
    if file.is_dir():
        raise ValueError(f"--by-document {file} is a folder: name a file in it")
    if file.exists() and not file.is_file():
        raise ValueError(f"--by-document {file} is no file that can be replaced: name another")
    if not os.access(file.parent, os.W_OK):
        found = "cannot be written to" if file.parent.is_dir() else "does not exist"
        raise ValueError(f"--by-document {file}: the folder {file.parent} {found}")


# ---- evaluating
#
# What any evaluation does: the model in its mode, rows dealt to ranks, and sums by piece.


def own_rows(
    model: nn.Module, count: int, at_once: int, runtime: Runtime, between: Callable[[int], None]
) -> Iterator[range]:
    """The numbers of this rank's rows, so many at once; calls `between` as often on every rank.

    The model is one that is run once on each of them. In the last turn there may be rows for some
    ranks only. If the model is sharded the others run it on a token, because its weights are
    gathered from all ranks.
    """
    for first in range(0, count, runtime.world_size * at_once):
        own = first + runtime.rank * at_once
        if own < count:
            yield range(own, min(own + at_once, count))
        elif is_sharded(model):
            token = torch.zeros(1, 1, dtype=torch.int64, device=runtime.device)
            with torch.no_grad(), runtime.autocast():
                model.hidden_states(token)
        between(min(first + runtime.world_size * at_once, count))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode meanwhile, and afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if is_sharded(model):
            model.reshard()  # what stands outside the blocks is kept gathered for a backward pass


def piece_of_targets(batch: Batch, offsets: np.ndarray) -> np.ndarray:
    """(n,) the piece that each target of the batch belongs to, in reading order.

    Args: offsets (B + 1,) which pieces each row has, from left to right
    """
    of_row = torch.from_numpy(offsets[:-1, None])  # (B, 1)
    return (of_row + batch.with_documents().doc_ids)[batch.targets != IGNORE].numpy()


def sums_of_pieces(
    model: nn.Module, batch: Batch, offsets: np.ndarray, lengths: np.ndarray, runtime: Runtime
) -> np.ndarray:
    """(n, 3) nats, targets and bytes of each piece of the batch.

    Args: offsets (B + 1,) of the pieces of each row, from 0
          lengths (V,) bytes that each token stands for
    """
    with runtime.autocast():
        losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
    counted = batch.targets != IGNORE
    piece = piece_of_targets(batch, offsets)
    columns = (losses[counted].double().numpy(), None, lengths[batch.targets[counted].numpy()])
    return np.stack([np.bincount(piece, column, offsets[-1]) for column in columns], axis=1)


@torch.no_grad()
def scores_of_targets(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a GPT gives each target: its nats (n,), and whether no token is likelier (n,) bool.

    Only the logits of targets are made, and only some of them at a time.
    """
    x = model.hidden_states(batch.tokens, batch.positions, batch.doc_ids)  # (B, T, C)
    at = batch.targets != IGNORE
    (features, bias), targets = model.features(x[at]), batch.targets[at]
    nats = torch.zeros(len(targets), dtype=exact_dtype(x.dtype), device=x.device)
    likeliest = torch.zeros_like(targets, dtype=torch.bool)
    for rows in chunks(len(targets), len(model.wte.weight), x.device.type):
        logits = F.linear(features[rows], model.wte.weight, bias).to(nats.dtype)  # (chunk, V)
        nats[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
        likeliest[rows] = logits.argmax(1) == targets[rows]
    return nats, likeliest


@torch.no_grad()
def right_answers(
    model: nn.Module,
    count: int,
    read: Callable[[range], Batch],
    at_once: int,
    runtime: Runtime,
    between: Callable[[int], None],
) -> tuple[float, float]:
    """Of how many pairs a BERT tells rightly whether the parts belong together, and of how many.

    Args: count, read  how many rows there are, and the rows of some numbers
    """
    right = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for own in own_rows(model, count, at_once, runtime, between):
            batch = read(own).with_documents()
            at = predicted_by_bert(batch.targets, batch.positions, nsp=True).answers
            tokens, _, positions, doc_ids = batch.to(runtime.device)
            with runtime.autocast():
                x = model.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
                found = model.follows(x, on_device(at, runtime.device)).argmax(1).cpu()
            right += torch.tensor([(found == batch.targets.flatten()[at]).sum(), len(at)])
    right, pairs = runtime.reduce(right).tolist()
    return right, pairs


# ---- mixed evaluation
#
# An evaluation of a mixture: one of each store, put together with the mixture's weights.
#
# What it finds for a store is what an evaluation on that store alone finds.


def on_each_store(
    evaluation: Callable, store: AnyStore, tokens: int | None, *how: Any, **more: Any
) -> Any:
    """An evaluation on a store: evaluation(store, *how, tokens, **more); of a mixture all of them.

    Args: tokens in all, or None for all there are
    """
    if not isinstance(store, Mixture):
        return evaluation(store, *how, tokens, **more)
    counts = tokens_of_each(store, tokens)
    each = zip(store.parts, counts, strict=True)
    parts = [evaluation(part, *how, count, **more) for part, count in each]
    return MixedEvaluation(store, parts)


def tokens_of_each(mixture: Mixture, tokens: int | None) -> list[int | None]:
    """How many tokens of each store to evaluate on: one half evenly, one half by weight.

    So that stores which weigh much are measured well, and those which weigh little are measured.

    Example: 1,000 tokens of stores that weigh 0.8 and 0.2 are 650 and 350
    """
    if tokens is None:
        return [None] * len(mixture.parts)
    evenly = 1 / len(mixture.parts)
    return [max(1, int(tokens * (float(w) + evenly) / 2)) for w in mixture.weights]


class MixedEvaluation:
    """Evaluations of the stores of a mixture, one after the other."""

    def __init__(self, mixture: Mixture, parts: list[Any]):
        self.mixture, self.parts = mixture, parts
        self.rows_in_all = sum(part.rows_in_all for part in parts)
        self.rows, self.sums = parts[0].rows, parts[0].sums  # of one, to see how long rows take
        self.name = parts[0].name
        named = zip(mixture.names, parts, strict=True)
        self.text = ", ".join(f"{part.text} of {name}" for name, part in named)

    def run(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[int], None] = lambda done: None,
    ) -> HeldOut:
        """Evaluate the model on every store; `between` is called with the rows of all so far."""
        found, done = {}, 0
        for name, part in zip(self.mixture.names, self.parts, strict=True):
            found[name] = part.run(model, runtime, rows, lambda now, done=done: between(done + now))
            done += part.rows_in_all
        return weighted(found, self.mixture.weights)


# ---- text results
#
# What an evaluation of text prints: the result in all, by source and by length of its documents.
#
# No model is run here.


class Group(NamedTuple):
    """The documents that have a property in common."""

    name: str
    documents: int
    tokens: int  # that are targets
    bytes: int
    bpb: float | None  # bits per byte; None where the documents have no byte


def by_source(documents: Documents, store: Store) -> list[Group]:
    """In the order in which the store names its sources; check_groups comes before."""
    return grouped(documents, documents.sources, documents.source_names.__getitem__)


def by_length(documents: Documents, store: Store) -> list[Group]:
    """By the tokens of the whole document, end-of-text included, between powers of two."""
    length = np.diff(store.offsets)[documents.numbers]
    exponent = np.frexp(length)[1] - 1  # 2^exponent <= length
    return grouped(documents, exponent, lambda e: f"{2**e:,} to {2 ** (e + 1) - 1:,}")


GROUPS = {"source": by_source, "length": by_length}


def check_groups(args: Namespace, store: AnyStore) -> None:
    """Refuse what cannot be told of this store, before the work of an evaluation.

    Raises: ValueError naming --by or --by-document
    """
    flag = "--by" if args.by else "--by-document"
    if isinstance(store, Mixture) and (args.by or args.by_document):
        raise ValueError(
            f"{flag} is of the documents of one store, and {store.path} is several: name one of"
            " them with --data"
        )
    if "source" in (args.by or []) and store.sources is None:
        raise ValueError(
            f"--by source: {store.path} names no source of its documents: prepare it again from"
            " JSON lines that do, or choose --by length"
        )


def grouped(documents: Documents, key: np.ndarray, name: Callable[[int], str]) -> list[Group]:
    """Sum by key (n,), a small number from 0; keys of no document are left out."""
    columns = (None, documents.nats, documents.targets, documents.bytes)
    count, nats, targets, size = (np.bincount(key, column) for column in columns)
    return [
        Group(name(k), *map(int, (count[k], targets[k], size[k])), mean_bits(nats[k], size[k]))
        for k in np.flatnonzero(count).tolist()
    ]


def mean_bits(nats: float, size: float) -> float | None:
    return bits_per_byte(float(nats), int(size)) if size else None


def table(groups: list[Group], what: str) -> str:
    """The groups as lines of text.

    Example: source      documents    tokens     bytes  bits per byte
             wordnet            27     1,204     4,310         1.6134
    """
    width = max(len(what), *(len(group.name) for group in groups))
    lines = [f"{what:{width}}  documents       tokens        bytes  bits per byte"]
    for name, documents, tokens, size, bpb in groups:
        bits = "-" if bpb is None else f"{bpb:.4f}"
        lines.append(f"{name:{width}}  {documents:9,} {tokens:12,} {size:12,} {bits:>14}")
    return "\n".join(lines)


def tell(
    subject: Subject, evaluation: Any, result: HeldOut, documents: Documents | None = None
) -> dict[str, Any]:
    """Print the results of an evaluate.Evaluation, and return them as JSON has them.

    Args: documents None for those of several stores
    """
    args = subject.args
    subject.say(f"{subject.where}: {evaluation.name} {result}, on {evaluation.text}")
    masked = "masked " if subject.special_ids else ""
    size = f"{result.targets:,} {masked}tokens, {result.bytes:,} bytes"
    subject.say(f"{result.val_loss:.4f} nats per token, of {size}")
    found = {"split": args.split, **result.logged()}
    for name in args.by or []:
        groups = GROUPS[name](documents, evaluation.store)
        subject.say(table(groups, name))
        found[f"groups_by_{name}"] = [group._asdict() for group in groups]
    if args.by_document:
        part = "" if evaluation.is_whole else ", those with a piece among these tokens"
        written = f"{len(documents.numbers):,} of {len(evaluation.split_documents):,}"
        subject.say(f"{args.by_document}: {written} documents{part}")
    return found
