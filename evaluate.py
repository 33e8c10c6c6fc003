"""Evaluate a run: held-out loss in bits per byte, which is comparable across tokenizers.

However a run was trained, it is evaluated on whole documents at full length, in a fixed order and
with nothing dropped. Held-out documents are cut into pieces, packed into rows once and isolated
from each other, and every token is a target (for a BERT, every masked one). A piece that continues
a document starts without context, as in training. Losses are summed by document, in the order of
the store.

Three held-out documents of 9, 21 and 5 tokens, end-of-text included, in rows of 16:

    pieces    9 | 16, 5 | 5           cut every 16 tokens
    rows      16   9 5 .   5 ...      packed; attention stays within a piece
    ranks     rows 0 and 1 | row 2    two ranks with --rows 2; every rank gets the sums of all
    result    (9 + 16 + 5 + 5) losses in nats, summed by document, then
              bits per byte = nats / ln 2 / bytes; end-of-text is a target, but has no bytes

Several stores (--data a=0.7,b=0.3) are evaluated one by one, and their results averaged by weight.
During training, train.py calls `Evaluation.run`. This file does not train, and writes nothing into
the folder of a run.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl            # one line per document

A GPT can also answer the questions in a file, without further training (tasks.py). Questions are
packed into rows and their results summed in the same way:

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import tasks
from bert import sentence_pairs
from config import Config
from data import ADDED_TOKENS, Data, Mixture, Rows, Samples, batch_of, collate, cut, open_data
from kernels.cross_entropy import IGNORE
from model import Batch, Transformer, predicted_by_bert
from packing import pack_lengths
from sample import load_run
from support.clock import seed_of
from support.fsdp import evaluating, is_sharded
from support.process import Parser, exit_cleanly, printable
from support.runtime import Runtime, on_device, start
from support.settings import count
from support.store import Store, atomic_write, get_encoding

# ---- text in rows, and the one loop over them


class PackedText(NamedTuple):
    """Pieces of text packed into rows; each piece belongs to an item, such as a document."""

    rows: Rows
    item: np.ndarray  # (pieces,) number of the item that each piece belongs to
    items: int  # how many items there are, including those without pieces
    batch: Callable[[Rows], Batch]  # reads the text of some rows


def pack_text(
    rows: Rows,
    offsets: np.ndarray,
    seq_len: int,
    batch: Callable[[Rows], Batch],
    special_tokens: int = 0,
) -> PackedText:
    """Pack rows of one piece each; the items are the documents at these offsets of a store."""
    packs = pack_lengths(rows.stop - rows.start + special_tokens, seq_len)
    rows = rows.packed(packs.items, packs.offsets)
    document = np.searchsorted(offsets, rows.start, side="right") - 1
    return PackedText(rows, document, len(offsets) - 1, batch)


# Runs the model once, on a batch that is on the CPU. Returns which of its B T tokens were asked
# about, as a mask or indices, and columns (n,) of numbers about these.
Measure = Callable[[nn.Module, Runtime, Batch], tuple[Tensor, ...]]


@torch.no_grad()
def sums_by_item(
    measure: Measure,
    packed: PackedText,
    model: nn.Module,
    runtime: Runtime,
    *,
    columns: int,
    micro_batch: int,
    show: bool = False,
) -> np.ndarray:
    """Sum the columns of a measure over the tokens of each item: (items, columns) float64.

    The sums are the same on every rank.

    Args: micro_batch rows that each rank runs at a time
          show        show a progress bar on rank 0
    """
    of_piece = np.zeros((len(packed.item), columns))
    turns = -(-len(packed.rows) // (micro_batch * runtime.world_size))
    hidden = None if show and runtime.is_rank0 else True  # None: show it on a terminal
    own = own_rows(model, len(packed.rows), micro_batch, runtime)
    with evaluating(model):
        for numbers in tqdm(own, total=turns, unit="batch", disable=hidden, leave=False):
            rows = packed.rows.take(numbers)
            batch = packed.batch(rows)
            with runtime.autocast():
                asked, *values = measure(model, runtime, batch)
            doc_ids = batch.with_documents().doc_ids  # (B, T)
            piece = (torch.from_numpy(rows.offsets[:-1, None]) + doc_ids).flatten()[asked]
            first, n = packed.rows.offsets[numbers[0]], len(rows.start)
            of_piece[first : first + n] = sum_by_key(piece, n, values)
    # Sum by piece first: so any number of ranks adds the same numbers in the same order.
    of_piece = runtime.reduce(torch.from_numpy(of_piece)).numpy()
    return sum_by_key(packed.item, packed.items, of_piece.T)


def sum_by_key(key: np.ndarray | Tensor, keys: int, columns: Sequence) -> np.ndarray:
    """Sum each column by key: (keys, columns)."""
    return np.stack([np.bincount(key, column, keys) for column in columns], axis=1)


def own_rows(
    model: nn.Module, count: int, micro_batch: int, runtime: Runtime
) -> Iterator[np.ndarray]:
    """Yield the numbers of this rank's rows, `micro_batch` at a time.

    In the last round some ranks may have no rows. If the model is sharded, they run it on one
    token, because its weights are gathered from all ranks.

    Example: 10 rows, two ranks, 3 at a time: rank 0 has 0 1 2, then 6 7 8; rank 1 3 4 5, then 9
    """
    for first in range(0, count, runtime.world_size * micro_batch):
        own = first + runtime.rank * micro_batch
        if own < count:
            yield np.arange(own, min(own + micro_batch, count))
        elif is_sharded(model):
            with torch.no_grad(), runtime.autocast():
                model.hidden_states(torch.zeros(1, 1, dtype=torch.int64, device=runtime.device))


# ---- results


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs that a BERT with --nsp gets right
    nsp_pairs: int | None = None
    by_store: dict[str, float] | None = None  # bits per byte of each store of a mixture

    def logged(self) -> dict[str, float | dict[str, float]]:
        """Return the fields that are not None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.val_bpb:.4f} bits per byte"
        if self.by_store:
            shown = [f"{printable(name)} {bpb:.3f}" for name, bpb in self.by_store.items()]
            text += f" ({', '.join(shown)})"
        if self.nsp_accuracy is not None:
            text += f", {self.nsp_accuracy:.1%} of {self.nsp_pairs:,} pairs right"
        return text


class DocumentScores(NamedTuple):
    """The result for each document, in the order of the store. Each array is (n,)."""

    numbers: np.ndarray  # of the documents in the store, from 0
    nats: np.ndarray  # summed over the targets
    targets: np.ndarray
    bytes: np.ndarray  # of the targets
    nsp_accuracy: float | None = None  # as in HeldOut
    nsp_pairs: int | None = None

    def total(self) -> HeldOut:
        nats, targets, size = (x.sum().item() for x in (self.nats, self.targets, self.bytes))
        bpb = bits_per_byte(nats, max(size, 1))
        return HeldOut(nats / targets, bpb, targets, size, self.nsp_accuracy, self.nsp_pairs)

    def save(self, file: Path) -> None:
        """Write one JSON object per line and document; "bpb" is null if it has no bytes."""
        columns = (self.numbers, self.nats, self.targets, self.bytes)
        with atomic_write(file) as out:
            for number, nats, targets, size in zip(*(x.tolist() for x in columns), strict=True):
                line = {"document": number, "tokens": targets, "bytes": size, "nats": nats}
                line["bpb"] = bits_per_byte(nats, size)
                # JSON has no NaN: it raises an error here, and no file is left
                out.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def bits_per_byte(nats: float, size: float) -> float | None:
    return nats / math.log(2) / size if size else None


def weighted(results: dict[str, HeldOut], weights: Sequence[float]) -> HeldOut:
    """Combine the results on several texts: their weighted mean, and bits per byte by name.

    A text in which no byte was a target has no bits per byte, and is left out.

    Example: 2 bits per byte with weight 0.75 and 1 with 0.25 are 1.75, however long the texts are
    """
    named = zip(results.items(), weights, strict=True)
    weight_of = {name: float(weight) for (name, result), weight in named if result.bytes}
    total = sum(weight_of.values())
    if not total:
        raise ValueError("no byte of a text with a weight is a target: evaluate more tokens")

    def mean(field: str) -> float:
        return sum(w * getattr(results[name], field) for name, w in weight_of.items()) / total

    return HeldOut(
        mean("val_loss"),
        mean("val_bpb"),
        targets=sum(result.targets for result in results.values()),
        bytes=sum(result.bytes for result in results.values()),
        by_store={name: results[name].val_bpb for name in weight_of},
    )


# ---- held-out text


class HeldOutText(NamedTuple):
    """The held-out text of one store."""

    store: Store
    documents: range  # held-out ones
    pieces: PackedText
    pairs: PackedText | None  # the same text as pairs
    is_whole: bool  # False for a random part of the text
    text: str  # describes how much of it is used


@dataclass(eq=False)
class Evaluation:
    """The held-out text of a store, or of each store of a mixture, packed into rows once.

    Raises: ValueError if no document is held out
    """

    data: Data  # a BERT's masks are the same each time
    seq_len: int  # tokens in a row
    nsp: bool = False  # also ask a BERT whether the second part of a pair follows the first
    tokens: int | None = None  # about how many: a fixed random choice of pieces; None: all

    def __post_init__(self):
        store = self.data.store
        if isinstance(store, Mixture):
            self.parts = [*map(self.part, store.parts, tokens_of_each(store, self.tokens))]
            named = zip(self.parts, store.names, strict=True)
            self.text = ", ".join(f"{part.text} of {name}" for part, name in named)
        else:
            self.parts = [self.part(store, self.tokens)]
            self.text = self.parts[0].text

    def part(self, store: Store, tokens: int | None) -> HeldOutText:
        kind = "bert" if self.data.special_ids else "pieces"
        samples = Samples(store, kind, self.seq_len, "val")
        offsets = store.offsets[samples.documents.start : samples.documents.stop + 1]
        pack = partial(
            pack_text, offsets=offsets, seq_len=self.seq_len, batch=partial(self.batch, store)
        )
        spans, pairs = samples.some(tokens or samples.tokens), None
        if self.nsp:
            special_tokens = ADDED_TOKENS["pairs"]
            halves, second = sentence_pairs(cut(spans, self.seq_len - special_tokens), "evaluation")
            pairs = pack(Rows.of(halves, pairs=second), special_tokens=special_tokens)
        is_whole = len(spans) == len(samples)
        share = "all" if is_whole else f"{np.diff(spans).sum():,} of {samples.tokens:,}"
        return HeldOutText(
            store,
            samples.documents,
            pieces=pack(Rows.of(spans), special_tokens=samples.special_tokens),
            pairs=pairs,
            is_whole=is_whole,
            text=f"{share} held-out tokens",
        )

    def batch(self, store: Store, rows: Rows) -> Batch:
        """Read these rows; for a BERT, hide the same tokens every time, and set the answers."""
        return batch_of(
            store,
            rows,
            seq_len=self.seq_len,
            special_ids=self.data.special_ids,
            seeds=torch.tensor([seed_of("mask", use) for use in ("which", "what")]),
        )

    def run(self, model: nn.Module, runtime: Runtime, micro_batch: int) -> HeldOut:
        """Evaluate the model on all rows; the arguments are those of `documents`."""
        return self.total(self.documents(model, runtime, micro_batch))

    def total(self, of_each: list[DocumentScores]) -> HeldOut:
        """Combine the results of all stores by weight, however long their texts are."""
        totals = [documents.total() for documents in of_each]
        if not isinstance(self.data.store, Mixture):
            return totals[0]
        by_name = dict(zip(self.data.store.names, totals, strict=True))
        return weighted(by_name, self.data.store.weights)

    def documents(
        self, model: nn.Module, runtime: Runtime, micro_batch: int, show: bool = False
    ) -> list[DocumentScores]:
        """Evaluate the model on all rows and sum by document, store after store.

        Args:    micro_batch rows that each rank runs at a time
                 show        show a progress bar on rank 0
        Returns: on every rank, scores of all held-out documents, including those without targets;
                 with `tokens`, of the documents with a chosen piece
        Raises:  ValueError if there is no target, for example if none of a few tokens is masked
        """
        of_each = []
        for part in self.parts:
            sums = partial(
                sums_by_item, model=model, runtime=runtime, micro_batch=micro_batch, show=show
            )
            of_documents = sums(self.nats, part.pieces, columns=3)
            if not of_documents[:, 1].any():
                raise ValueError(f"{part.store.path}: {part.text}, but no target: evaluate more")
            right = pairs = 0
            if part.pairs:
                right, pairs = sums(right_answers, part.pairs, columns=2).sum(axis=0)
            chosen = np.arange(len(of_documents)) if part.is_whole else np.unique(part.pieces.item)
            nats, targets, size = of_documents[chosen].T
            documents = DocumentScores(
                numbers=chosen + part.documents.start,
                nats=nats,
                targets=targets.astype(np.int64),
                bytes=size.astype(np.int64),
                nsp_accuracy=right / pairs if pairs else None,
                nsp_pairs=int(pairs) or None,
            )
            of_each.append(documents)
        return of_each

    def nats(self, model: nn.Module, runtime: Runtime, batch: Batch) -> tuple[Tensor, ...]:
        """Measure each target: its nats, 1 to count it, and its bytes."""
        losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
        asked = batch.targets != IGNORE
        nats, targets = losses[asked].double(), batch.targets[asked]
        return asked.flatten(), nats, torch.ones_like(nats), self.data.byte_lengths[targets.numpy()]


def right_answers(model: nn.Module, runtime: Runtime, batch: Batch) -> tuple[Tensor, ...]:
    """Measure each pair: 1 if a BERT is right about it, else 0; and 1 to count it."""
    batch = batch.with_documents()
    at = predicted_by_bert(batch.targets, batch.positions, nsp=True).answers
    tokens, _, positions, doc_ids = batch.to(runtime.device)
    x = model.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
    answers = model.follows(x, on_device(at, runtime.device)).argmax(1).cpu()
    return at, answers == batch.targets.flatten()[at], torch.ones(len(at))


def tokens_of_each(mixture: Mixture, tokens: int | None) -> list[int | None]:
    """Divide the tokens to evaluate among the stores: half evenly, half by weight.

    So a store with a large weight is measured precisely, and one with a small weight still counts.

    Example: 1,000 tokens of stores with weights 0.8 and 0.2 are 650 and 350
    """
    if tokens is None:
        return [None] * len(mixture.parts)
    evenly = 1 / len(mixture.parts)
    return [max(1, int(tokens * (float(w) + evenly) / 2)) for w in mixture.weights]


# ---- the command


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    runtime = start(args.device, "auto")
    # check the files before loading the run
    file = args.by_document
    if file and not file.parent.is_dir():
        raise ValueError(f"--by-document {file}: there is no folder {file.parent}: create it")
    questions = [tasks.read_task(file) for file in args.task or []]
    settings, model, state = load_run(args.run, args.checkpoint)
    model.to(runtime.device)
    name = f"{args.run}, step {state['step']}"
    said = {"run": args.run, "step": state["step"]}
    if questions:
        said["tasks"] = []
        for result in task_results(questions, settings, model, runtime, args.rows):
            said["tasks"].append(result)
            if not args.json:
                runtime.say(f"{name}: {tasks.result_in_words(result)}")
    else:
        result, text = score_text(args, settings, model, runtime)
        said |= result.logged()
        if not args.json:
            runtime.say(f"{name}: {text}")
    if args.json:
        runtime.say(json.dumps(said, allow_nan=False))


def score_text(
    args: argparse.Namespace, settings: Config, model: Transformer, runtime: Runtime
) -> tuple[HeldOut, str]:
    """Evaluate held-out text; returns the result, and a description of it for the user."""
    store = replace(settings.data, data=args.data or settings.data.data)
    data = open_data(store, settings.model.model == "bert", runtime)
    if args.by_document and isinstance(data.store, Mixture):
        several = f"{data.store.path} names several: choose one with --data"
        raise ValueError(f"--by-document is for one store, but {several}")
    evaluation = Evaluation(data, settings.data.seq_len, nsp=settings.model.nsp, tokens=args.tokens)
    of_each = evaluation.documents(model, runtime, args.rows, show=True)
    result = evaluation.total(of_each)
    if not math.isfinite(result.val_loss):
        raise ValueError(f"{args.run}: the model's loss on this text is not finite")
    masked = "masked " if data.special_ids else ""
    size = f"{result.targets:,} {masked}tokens, {result.bytes:,} bytes"
    text = f"held-out {result}, on {evaluation.text}"
    text += f"\n{result.val_loss:.4f} nats per token, over {size}"
    if args.by_document:
        (documents,), (part,) = of_each, evaluation.parts
        runtime.on_rank0(lambda: documents.save(args.by_document))
        written = f"{len(documents.numbers):,} of {len(part.documents):,} documents"
        text += f"\n{args.by_document}: {written}"
        text += "" if part.is_whole else ", those with a piece among these tokens"
    return result, text


def task_results(
    questions: list[tasks.Task],
    settings: Config,
    model: Transformer,
    runtime: Runtime,
    micro_batch: int,
) -> Iterator[dict[str, str | float]]:
    """Ask a GPT the questions of each task; yields each task's result, and its items per second."""
    if settings.model.model == "bert":
        raise ValueError("--task needs a GPT, but this run trained a BERT: name a run of a GPT")
    encoding, seq_len = get_encoding(settings.data.tokenizer), settings.data.seq_len
    # encode all tasks first, so that a mistake in the last file shows now, not in an hour
    items_of_task = [tasks.items_of(task, encoding, seq_len) for task in questions]
    for task, items in zip(questions, items_of_task, strict=True):
        packed, began = pack_items(items, seq_len), time.perf_counter()
        sums = sums_by_item(
            tasks.answers, packed, model, runtime, columns=2, micro_batch=micro_batch, show=True
        )
        rate = len(items.spans) / (time.perf_counter() - began)
        yield {**tasks.result_of(task, items, sums), "items_per_s": round(rate, 1)}


def pack_items(items: tasks.Items, seq_len: int) -> PackedText:
    rows = Rows.of(items.spans, seen=items.seen)
    return pack_text(
        rows, items.store.offsets, seq_len, partial(collate, items.store, seq_len=seq_len)
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises: ValueError, naming the flag, for one that has no effect with --task
    """
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path")
    parser.add_argument("--rows", type=count, default=16, help="rows per forward pass (16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")

    text = parser.add_argument_group("bits per byte of text, the default")
    text.add_argument("--data", help="another token store (default: the one the run trained on)")
    text.add_argument("--tokens", type=count, help="about how many tokens (default: all)")
    by_document = "also write the result of each document, one JSON object per line"
    text.add_argument("--by-document", type=Path, metavar="FILE", help=by_document)

    task = parser.add_argument_group("questions, for a GPT without further training")
    task.add_argument("--task", nargs="+", metavar="FILE", help="JSON lines: see tasks.py")

    args = parser.parse_args(argv)
    of_text = {"--data": args.data, "--tokens": args.tokens, "--by-document": args.by_document}
    given = [flag for flag, value in of_text.items() if value]
    if args.task and given:
        raise ValueError(f"{given[0]} has no effect with --task: leave out one of the two")
    return args


if __name__ == "__main__":
    exit_cleanly(main)
