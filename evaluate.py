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

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl            # one line per document
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from config import Task, task_of
from data import ADDED_TOKENS, Data, Rows, Samples, as_pieces, cut, open_data
from kernels.cross_entropy import IGNORE
from mixture import stores_of
from model import Batch
from packing import pack_lengths
from sample import load_run
from support.fsdp import evaluating
from support.numbers import count
from support.process import Parser, exit_cleanly, printable
from support.runtime import Runtime, start
from support.store import Store, atomic_write


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs that a BERT with --nsp gets right
    nsp_pairs: int | None = None
    by_store: dict[str, float] | None = None  # bits per byte of each store of a mixture

    def columns(self) -> dict[str, float | dict[str, float]]:
        """Return the fields that are not None, for the log."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.val_bpb:.4f} bits per byte"
        if self.by_store:
            stores = [f"{printable(name)} {bpb:.3f}" for name, bpb in self.by_store.items()]
            text += f" ({', '.join(stores)})"
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


# ---- held-out text


class HeldOutText(NamedTuple):
    """The held-out text of one store, in pieces that are packed into rows."""

    name: str
    store: Store
    weight: float  # in the average over stores
    documents: range  # the held-out ones
    rows: Rows
    document_of: np.ndarray  # (pieces,) counted from the first held-out document
    pairs: Rows | None  # --nsp: the same text as pairs
    is_whole: bool  # False for a part of the text
    description: str  # how much of it is used


class Evaluation:
    """The held-out text of a store, or of each store of a mixture, packed into rows once.

    Args:   task   a BERT's masks are the same each time
            tokens about how many; None: all
    Raises: ValueError if no document is held out
    """

    def __init__(self, data: Data, task: Task, seq_len: int, tokens: int | None = None):
        self.task, self.seq_len, self.byte_lengths = task, seq_len, data.byte_lengths
        parts = stores_of(data.store)
        self.parts: list[HeldOutText] = []
        for name, store, weight in parts:
            # half evenly and half by weight: so a store with a small weight still counts
            of_store = tokens and max(1, int(tokens * (weight + 1 / len(parts)) / 2))
            self.parts.append(self.held_out_text(name, store, weight, of_store))
        several = len(parts) > 1
        names = (f"{p.description} of {p.name}" if several else p.description for p in self.parts)
        self.description = ", ".join(names)

    def held_out_text(
        self, name: str, store: Store, weight: float, tokens: int | None
    ) -> HeldOutText:
        samples = Samples(store, self.task.evaluated, self.seq_len, "val")

        def pack(pieces: np.ndarray, special_tokens: int) -> Rows:
            lengths = pieces["stop"] - pieces["start"] + special_tokens
            packs = pack_lengths(lengths, self.seq_len)
            return Rows(pieces[packs.items], packs.offsets)

        spans = samples.as_hard_as_all(tokens or samples.tokens, self.byte_lengths)
        rows, pairs = pack(as_pieces(spans), samples.special_tokens), None
        if self.task.nsp:
            special_tokens = ADDED_TOKENS["pairs"]
            halves = cut(spans, self.seq_len - special_tokens)
            pairs = pack(self.task.pieces(halves, "evaluation"), special_tokens)
        is_whole = len(spans) == len(samples)
        share = "all" if is_whole else f"{np.diff(spans).sum():,} of {samples.tokens:,}"
        document_of = np.searchsorted(samples.offsets, rows.pieces["start"], "right") - 1
        found = rows, document_of, pairs, is_whole, f"{share} held-out tokens"
        return HeldOutText(name, store, weight, samples.documents, *found)

    def run(self, model: nn.Module, runtime: Runtime, micro_batch: int) -> HeldOut:
        """Evaluate the model on all rows; the arguments are those of `score_documents`."""
        return self.total(self.score_documents(model, runtime, micro_batch))

    def score_documents(
        self, model: nn.Module, runtime: Runtime, micro_batch: int
    ) -> list[DocumentScores]:
        """Evaluate the model on all rows and sum by document, store after store.

        Args:    micro_batch rows that each rank runs at a time
        Returns: on every rank, scores of all held-out documents, including those without targets;
                 with `tokens`, of the documents with a chosen piece
        Raises:  ValueError if there is no target, for example if none of a few tokens is masked
        """
        scorer = Scorer(self.task, self.seq_len, model, runtime, micro_batch)
        of_each = []
        for part in self.parts:
            of_piece = scorer.sums(self.score_targets, 3, part.store, part.rows)
            numbers = part.document_of
            nats, targets, size = sum_by_key(numbers, len(part.documents), of_piece)
            if not targets.any():
                raise ValueError(f"{part.store.path}: no target in {part.description}")
            right = pairs = 0
            if part.pairs is not None:
                of_pair = scorer.sums(pair_scores, 2, part.store, part.pairs)
                right, pairs = of_pair.sum(axis=1)
            chosen = np.arange(len(part.documents)) if part.is_whole else np.unique(numbers)
            counts = (column[chosen].astype(np.int64) for column in (targets, size))
            of_pairs = (right / pairs, int(pairs)) if pairs else ()
            numbers = chosen + part.documents.start
            of_each.append(DocumentScores(numbers, nats[chosen], *counts, *of_pairs))
        return of_each

    def score_targets(self, model: nn.Module, runtime: Runtime, batch: Batch) -> tuple[Tensor, ...]:
        """Measure each target: its nats, 1 to count it, and its bytes."""
        moved = batch.to(runtime.device)
        losses = model.losses(model(*moved.inputs), moved).cpu()  # (B, T)
        is_target = batch.targets != IGNORE
        nats, targets = losses[is_target].double(), batch.targets[is_target].numpy()
        return is_target.flatten(), nats, torch.ones_like(nats), self.byte_lengths[targets]

    def total(self, of_each: list[DocumentScores]) -> HeldOut:
        """Combine the results of all stores by weight, except texts without a byte as target.

        Example: 2 bits per byte with weight 0.75 and 1 with 0.25 are 1.75
        """
        results = [documents.total() for documents in of_each]
        if len(results) == 1:
            return results[0]
        of_parts = zip(self.parts, results, strict=True)
        counted = [(part, result) for part, result in of_parts if result.bytes and part.weight]
        total = sum(part.weight for part, _ in counted)
        if not total:
            raise ValueError("no byte of a text with a weight is a target: evaluate more tokens")
        return HeldOut(
            val_loss=sum(part.weight * result.val_loss for part, result in counted) / total,
            val_bpb=sum(part.weight * result.val_bpb for part, result in counted) / total,
            targets=sum(result.targets for result in results),
            bytes=sum(result.bytes for result in results),
            by_store={part.name: result.val_bpb for part, result in counted},
        )


# ---- the loop over rows

# (model, runtime, batch on the host) -> which of the B T tokens are measured, as a mask or indices,
# and columns of numbers about these
Measure = Callable[[nn.Module, Runtime, Batch], tuple[Tensor, ...]]


def pair_scores(model: nn.Module, runtime: Runtime, batch: Batch) -> tuple[Tensor, ...]:
    """Measure each pair: 1 if a BERT is right about it, else 0; and 1 to count it."""
    moved = batch.to(runtime.device)
    right = model.right_answers(model(*moved.inputs), moved).cpu()
    return batch.answers, right, torch.ones(len(right))


@dataclass(frozen=True)
class Scorer:
    """Runs a model over packed rows, shared among the ranks."""

    task: Task  # makes a Batch of rows; a BERT's masks are the same every time
    seq_len: int
    model: nn.Module
    runtime: Runtime
    micro_batch: int  # rows that each rank runs at a time

    @torch.no_grad()
    def sums(self, measure: Measure, columns: int, store: Store, rows: Rows) -> np.ndarray:
        """Sum the columns of a measure over the tokens of each piece: (columns, pieces) float64.

        Every rank gets the same sums. Any number of ranks adds the same numbers in the same order.
        """
        runtime, sums = self.runtime, np.zeros((columns, len(rows.pieces)))
        turns = -(-len(rows) // (self.micro_batch * runtime.world_size))
        hidden = None if runtime.is_rank0 else True  # None: show the bar on a terminal
        mine = shares_of_rank(len(rows), self.micro_batch, runtime)
        with evaluating(self.model):
            for numbers in tqdm(mine, total=turns, unit="batch", disable=hidden, leave=False):
                # With --fsdp every rank takes part: one that has no row left repeats the first.
                some = rows.select(numbers if len(numbers) else np.array([0]))
                batch = self.task.batch(store, some, self.seq_len, rows, "mask")
                with runtime.autocast():
                    at, *values = measure(self.model, runtime, batch)
                if len(numbers):
                    piece = torch.from_numpy(some.offsets[:-1, None]) + batch.doc_ids  # (B, T)
                    first, n = rows.offsets[numbers[0]], len(some.pieces)
                    sums[:, first : first + n] = sum_by_key(piece.flatten()[at], n, values)
        return runtime.reduce(torch.from_numpy(sums)).numpy()


def sum_by_key(key: np.ndarray | Tensor, keys: int, columns: Sequence) -> np.ndarray:
    """Sum each column by key: (columns, keys)."""
    return np.stack([np.bincount(key, column, keys) for column in columns])


def shares_of_rank(rows: int, micro_batch: int, runtime: Runtime) -> Iterator[np.ndarray]:
    """Yield the numbers of this rank's rows, `micro_batch` at a time; in the last round maybe none.

    Example: 10 rows, two ranks, 3 at a time: rank 0 has 0 1 2, then 6 7 8; rank 1 3 4 5, then 9
    """
    for turn in range(0, rows, runtime.world_size * micro_batch):
        first = turn + runtime.rank * micro_batch
        yield np.arange(first, min(first + micro_batch, rows))


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    flag = parser.add_argument
    flag("run", help="folder of the run, or a checkpoint")
    flag("--checkpoint", default="last", help="last, best, or a path")
    flag("--rows", type=count, default=16, help="rows per forward pass (16)")
    flag("--device", default="auto", help="auto, cpu, cuda or mps")
    flag("--data", help="another token store (default: the one the run trained on)")
    flag("--tokens", type=count, help="about how many tokens (default: all)")
    flag("--by-document", type=Path, metavar="FILE", help="write the result of each, as JSON lines")
    args = parser.parse_args(argv)
    file = args.by_document
    if file and (file.exists() or not file.parent.is_dir()):  # before the run is loaded
        raise ValueError(f"--by-document {file}: name a new file, in a folder that exists")
    settings, model, state = load_run(args.run, args.checkpoint)
    runtime = start(args.device, settings.run.dtype)
    model.to(runtime.device)
    name = settings.data.data if args.data is None else args.data
    data = open_data(replace(settings.data, data=name), runtime)
    if args.data is None and state.get("store") not in (None, data.store.meta["sha256"]):
        advice = "name it with --data to evaluate on what it holds now"
        raise ValueError(f"{data.store.path} has changed since {args.run} was trained: {advice}")
    task = task_of(settings, data.encoding)
    evaluation = Evaluation(data, task, settings.data.seq_len, tokens=args.tokens)
    if file and len(evaluation.parts) > 1:
        raise ValueError(f"--by-document: {data.store.path} names several: choose one with --data")
    of_each = evaluation.score_documents(model, runtime, args.rows)
    result = evaluation.total(of_each)
    if not math.isfinite(result.val_loss):
        raise ValueError(f"{args.run}: the model's loss on this text is not finite")
    name = args.run if args.checkpoint in ("last", "best") else args.checkpoint
    lines = [f"{name}, step {state['step']}: held-out {result}, on {evaluation.description}"]
    loss = f"{result.val_loss:.4f} nats per target, a perplexity of {np.exp(result.val_loss):,.2f}"
    lines.append(f"{loss}, over {result.targets:,} targets, {result.bytes:,} bytes")
    if file:
        scores, part = of_each[0], evaluation.parts[0]
        runtime.on_rank0(lambda: scores.save(file))
        which = "" if part.is_whole else ", those with a piece among these tokens"
        lines.append(f"{file}: {len(scores.numbers):,} of {len(part.documents):,} documents{which}")
    if runtime.is_rank0:
        print(*lines, sep="\n")  # an error if nobody can read them, unlike what `say` prints


if __name__ == "__main__":
    exit_cleanly(main)
