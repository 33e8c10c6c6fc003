"""Held-out loss in bits per byte, which compares runs with different tokenizers.

However a run was trained, it is evaluated on whole documents at full length, in a fixed order and
with nothing dropped. Held-out documents are cut into pieces, packed into rows once and isolated
from each other, and every token is a target (for a BERT, every masked one). A piece that continues
a document begins without context, as in training. Results are added up by document, in the order of
the store.

    main ── score_text ── Evaluation.documents ─┐
         └─ ask ──────── tasks.answers_of ──────┴─ sums_by_item     support/evaluation/scoring.py

`Evaluation` says which text lies in which row, `sums_by_item` reads the rows and adds up what the
model makes of them. train.py evaluates by `Evaluation.run` on the way.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl                # a line a document

A GPT also answers the questions of a file, without further training (support/evaluation/tasks.py):

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import nn
from tqdm import tqdm

from bert import SpecialIds, sentence_pairs
from config import Config
from data import SPECIAL_TOKENS, Data, Mixture, Rows, Samples, batch_of, collate, cut, open_data
from kernels.cross_entropy import IGNORE
from model import Batch, Transformer, predicted_by_bert
from packing import pack_lengths
from sample import load_run
from support.clock import seed_of
from support.evaluation import scoring, tasks
from support.evaluation.scoring import Documents, HeldOut, Laid, Poll
from support.runtime import Parser, Runtime, exit_cleanly, on_device, start
from support.settings import count
from support.store import Store, get_encoding


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    runtime = start(args.device, "auto")
    # what is wrong with a file is said before the run is opened
    if args.by_document:
        runtime.on_rank0(lambda: check_folder_of(args.by_document))
    questions = [tasks.read_task(file) for file in args.task or []]
    settings, model, state = load_run(args.run, args.checkpoint)
    encoding = get_encoding(settings.data.tokenizer)
    subject = Subject(
        args,
        runtime,
        settings,
        model.to(runtime.device),
        encoding,
        special_ids=SpecialIds.of(encoding) if settings.model.model == "bert" else None,
        step=state["step"],
    )
    try:
        result = ask(subject, questions) if questions else score_text(subject)
    except KeyboardInterrupt:
        if runtime.is_rank0:
            line = f"interrupted: nothing is written, and {args.run} is as it was"
            tqdm.write(line, file=sys.stderr)
        raise
    line = {"run": args.run, "step": subject.step, **result}
    if args.json:
        runtime.say(json.dumps(line, allow_nan=False))


def check_folder_of(file: Path) -> None:
    if not file.parent.is_dir():
        raise ValueError(f"--by-document {file}: there is no folder {file.parent}")


class Subject(NamedTuple):
    """The run that is evaluated, and the command line."""

    args: argparse.Namespace
    runtime: Runtime
    settings: Config
    model: Transformer
    encoding: tiktoken.Encoding
    special_ids: SpecialIds | None  # a BERT's
    step: int

    def say(self, line: str) -> None:
        """Print a line on rank 0, unless one JSON object is all that is asked for."""
        if not self.args.json:
            self.runtime.say(line)

    def report(self, line: str) -> None:
        self.say(f"{self.args.run}, step {self.step}: {line}")


# ---- bits per byte of held-out text


def score_text(subject: Subject) -> dict[str, Any]:
    """Print the result on a store's text, and return it as JSON has it."""
    args, s, runtime = subject.args, subject.settings, subject.runtime
    store = replace(s.data, data=args.data or s.data.data)
    data = open_data(store, s.model.model == "bert", runtime)
    if args.by_document and isinstance(data.store, Mixture):
        several = f"{data.store.path} is several: name one with --data"
        raise ValueError(f"--by-document is for one store, {several}")
    evaluation = Evaluation(data, s.data.seq_len, nsp=s.model.nsp, tokens=args.tokens)
    bar = evaluation_bar(evaluation.rows_in_all, runtime)
    of_each = evaluation.documents(subject.model, runtime, args.rows, bar)
    result = evaluation.total(of_each)
    if not math.isfinite(result.val_loss):
        raise ValueError(f"{args.run}: the model's loss on this text is not finite")
    subject.report(f"held-out {result}, on {evaluation.text}")
    masked = "masked " if subject.special_ids else ""
    size = f"{result.targets:,} {masked}tokens, {result.bytes:,} bytes"
    subject.say(f"{result.val_loss:.4f} nats per token, of {size}")
    if args.by_document:
        (documents,), (part,) = of_each, evaluation.parts
        runtime.on_rank0(lambda: documents.write(args.by_document))
        which = "" if part.is_whole else ", those with a piece among these tokens"
        written = f"{len(documents.numbers):,} of {len(part.documents):,}"
        subject.say(f"{args.by_document}: {written} documents{which}")
    return result.logged()


class Part(NamedTuple):
    """The text of one store, packed into rows once and in a fixed order."""

    store: Store
    documents: range  # those that are held out
    pieces: Laid  # an item is one of them
    pairs: Laid | None  # the same text as pairs
    is_whole: bool
    text: str  # says how much it is


@dataclass(eq=False)
class Evaluation:
    """The held-out text of a store, or of each store of a mixture.

    Raises: ValueError if no document is held out
    """

    data: Data  # a BERT's masks are the same each time
    seq_len: int  # tokens of a row
    nsp: bool = False  # also ask a BERT about pairs: does the second part follow the first?
    tokens: int | None = None  # about how many: pieces drawn at random, always the same; None: all

    def __post_init__(self):
        store = self.data.store
        if isinstance(store, Mixture):
            tokens_each = zip(store.parts, tokens_of_each(store, self.tokens), strict=True)
            self.parts = [self.part(part, tokens) for part, tokens in tokens_each]
            named = zip(self.parts, store.names, strict=True)
            self.text = ", ".join(f"{part.text} of {name}" for part, name in named)
        else:
            self.parts = [self.part(store, self.tokens)]
            self.text = self.parts[0].text
        laid = [laid for part in self.parts for laid in (part.pieces, part.pairs) if laid]
        self.rows_in_all = sum(len(rows.rows) for rows in laid)

    def part(self, store: Store, tokens: int | None) -> Part:
        seq_len = self.seq_len
        kind = "bert" if self.data.special_ids else "pieces"
        samples = Samples(store, kind, seq_len, "val")
        offsets = store.offsets[samples.documents.start : samples.documents.stop + 1]

        def laid(rows: Rows, special_tokens: int) -> Laid:
            rows = packed(rows, seq_len, special_tokens)
            return lay(rows, offsets, partial(self.batch, store))

        spans, pairs = samples.some(tokens), None
        if self.nsp:
            special_tokens = SPECIAL_TOKENS["pairs"]
            halves, second = sentence_pairs(cut(spans, seq_len - special_tokens), "evaluation")
            pairs = laid(Rows.of(halves, pairs=second), special_tokens)
        is_whole = len(spans) == len(samples)
        share = "all" if is_whole else f"{np.diff(spans).sum():,} of {samples.tokens:,}"
        return Part(
            store,
            samples.documents,
            pieces=laid(Rows.of(spans), samples.special_tokens),
            pairs=pairs,
            is_whole=is_whole,
            text=f"{share} held-out tokens",
        )

    def run(
        self, model: nn.Module, runtime: Runtime, at_once: int, poll: Poll = lambda done: None
    ) -> HeldOut:
        """The result on all rows; arguments as for `documents`."""
        return self.total(self.documents(model, runtime, at_once, poll))

    def total(self, of_each: list[Documents]) -> HeldOut:
        """The result of all stores as one: by weight, however large their texts are."""
        totals = [documents.total() for documents in of_each]
        if not isinstance(self.data.store, Mixture):
            return totals[0]
        by_name = dict(zip(self.data.store.names, totals, strict=True))
        return scoring.weighted(by_name, self.data.store.weights)

    def documents(
        self, model: nn.Module, runtime: Runtime, at_once: int, poll: Poll = lambda done: None
    ) -> list[Documents]:
        """Evaluate the model on all rows and add up by document, store after store.

        Args:    at_once rows on each rank
                 poll    called after every batch with how many of rows_in_all are done, equally
                         often on every rank; what it raises ends the evaluation
        Returns: on every rank, all held-out documents, also those without a target; of a part
                 of the text (`tokens`), those with a chosen piece
        Raises:  ValueError if nothing is predicted, as when a BERT has few tokens and none masked
        """
        of_each, done = [], 0

        def by_document(measure: Callable, laid: Laid, columns: int) -> np.ndarray:
            nonlocal done
            sums = scoring.sums_by_item(
                partial(measure, model, runtime),
                laid,
                model,
                runtime,
                columns=columns,
                at_once=at_once,
                poll=lambda n: poll(done + n),
            )
            done += len(laid.rows)
            return sums

        for part in self.parts:
            sums = by_document(self.nats, part.pieces, 3)
            if not sums[:, 1].any():
                raise ValueError(f"{part.store.path}: {part.text}, but no target: evaluate on more")
            right = pairs = 0
            if part.pairs:
                right, pairs = by_document(right_answers, part.pairs, 2).sum(axis=0)
            chosen = np.arange(len(sums)) if part.is_whole else np.unique(part.pieces.item)
            nats, targets, size = sums[chosen].T
            documents = Documents(
                numbers=chosen + part.documents.start,
                nats=nats,
                targets=targets.astype(np.int64),
                bytes=size.astype(np.int64),
                nsp_accuracy=right / pairs if pairs else None,
                nsp_pairs=int(pairs) or None,
            )
            of_each.append(documents)
        return of_each

    def nats(self, model: nn.Module, runtime: Runtime, batch: Batch) -> tuple:
        """Nats and bytes of each target."""
        losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
        asked = batch.targets != IGNORE
        size = self.data.byte_lengths[batch.targets[asked].numpy()]
        return asked.flatten(), losses[asked].double(), None, size

    def batch(self, store: Store, rows: Rows) -> Batch:
        """These rows; for a BERT with the masks that their tokens always have, and the answers."""
        return batch_of(
            store,
            rows,
            seq_len=self.seq_len,
            special_ids=self.data.special_ids,
            seeds=torch.tensor([seed_of("mask", use) for use in ("which", "what")]),
        )


def right_answers(model: nn.Module, runtime: Runtime, batch: Batch) -> tuple:
    """Of each pair whether a BERT is right about it: 0 or 1."""
    batch = batch.with_documents()
    at = predicted_by_bert(batch.targets, batch.positions, nsp=True).answers
    tokens, _, positions, doc_ids = batch.to(runtime.device)
    x = model.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
    answers = model.follows(x, on_device(at, runtime.device)).argmax(1).cpu()
    return at, answers == batch.targets.flatten()[at], None


def packed(alone: Rows, seq_len: int, special_tokens: int) -> Rows:
    """Rows of one piece each, packed."""
    packs = pack_lengths(alone.stop - alone.start + special_tokens, seq_len)
    return alone.packed(packs.items, packs.offsets)


def lay(rows: Rows, offsets: np.ndarray, batch: Callable[[Rows], Batch]) -> Laid:
    """Rows whose items are the documents that begin and end at these offsets of a store."""

    def read(own: range) -> Batch:
        return batch(rows.take(np.array(own)))

    document = np.searchsorted(offsets, rows.start, side="right") - 1
    return Laid(rows.offsets, document, len(offsets) - 1, read)


def tokens_of_each(mixture: Mixture, tokens: int | None) -> list[int | None]:
    """How many tokens of each store to evaluate on: half of them evenly, half by weight.

    So stores with a large weight are measured well, and those with a small one are measured.

    Example: 1,000 tokens of stores that weigh 0.8 and 0.2 are 650 and 350
    """
    if tokens is None:
        return [None] * len(mixture.parts)
    evenly = 1 / len(mixture.parts)
    return [max(1, int(tokens * (float(w) + evenly) / 2)) for w in mixture.weights]


def evaluation_bar(rows: int, runtime: Runtime) -> Callable[[int], None]:
    """A bar of its own over the rows of an evaluation; call the result with the rows done."""
    hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
    bar = tqdm(total=rows, unit="row", disable=hidden, leave=False)

    def show(done: int) -> None:
        bar.update(done - bar.n)
        if done == bar.total:
            bar.close()

    return show


# ---- questions


def ask(subject: Subject, questions: list[tasks.Task]) -> dict[str, list[dict]]:
    """Print the result of each task, and return them as JSON has them."""
    args, runtime, seq_len = subject.args, subject.runtime, subject.settings.data.seq_len
    if subject.special_ids:
        raise ValueError(f"--task: {args.run} holds a BERT, which cannot answer: name a GPT")
    prepared = [
        tasks.items_of(task, subject.encoding, seq_len, runtime.is_rank0) for task in questions
    ]
    results = []
    for task, items in zip(questions, prepared, strict=True):
        laid = lay_texts(items.texts, seq_len)
        bar = evaluation_bar(len(laid.rows), runtime)
        began = time.perf_counter()
        answers = tasks.answers_of(laid, subject.model, runtime, args.rows, bar)
        rate = len(items.texts.spans) / (time.perf_counter() - began)
        result = tasks.result_of(task, items, answers)
        subject.report(f"{tasks.in_words(result)}, {rate:,.0f} items/s")
        if notes := tasks.notes_on(result):
            subject.say(f"{task.name}: {notes}")
        results.append({**result, "items_per_s": round(rate, 1)})
    return {"tasks": results}


def lay_texts(texts: tasks.Texts, seq_len: int, pack: bool = True) -> Laid:
    """Texts side by side in rows; without `pack` one a row."""
    rows = Rows.of(texts.spans, seen=texts.seen)
    if pack:
        rows = packed(rows, seq_len, special_tokens=0)
    batch = partial(collate, texts.store, seq_len=seq_len)
    return lay(rows, texts.store.offsets, batch)


# ---- the command line

OF_TEXT = ("data", "tokens", "by_document")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises: ValueError naming a flag that has no effect beside the others
    """
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a path")
    parser.add_argument("--rows", type=count, default=16, help="rows evaluated at once (16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")

    text = parser.add_argument_group("bits per byte of text, the default")
    text.add_argument("--data", help="another token store (default: the run's own)")
    text.add_argument("--tokens", type=count, help="about how many tokens (default: all)")
    by_document = "also write the result of each document, a JSON object a line"
    text.add_argument("--by-document", type=Path, metavar="FILE", help=by_document)

    task = parser.add_argument_group("questions, for a GPT without further training")
    files = "JSON lines: see support/evaluation/tasks.py"
    task.add_argument("--task", nargs="+", metavar="FILE", help=files)

    args = parser.parse_args(argv)

    given = (name for name in OF_TEXT if getattr(args, name) is not None)
    if args.task and (flag := next(given, None)):
        flag = f"--{flag.replace('_', '-')}"
        raise ValueError(f"{flag} is for held-out text: leave out either it or --task")
    return args


if __name__ == "__main__":
    exit_cleanly(main)
