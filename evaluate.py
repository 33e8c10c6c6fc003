"""Held-out loss in bits per byte, which compares runs with different tokenizers.

However a run was trained, it is evaluated on whole documents at full length, in a fixed order and
with nothing dropped. Held-out documents are cut into pieces, packed into rows once and isolated
from each other, and every token is a target (for a BERT, every masked one). A piece that continues
a document begins without context, as in training; with --stride its targets see nearly a whole row
before them. Results are added up by document, in the order of the store.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --stride 64     # long documents with a sliding context
    python evaluate.py runs/gpt-nano-1 --by source,length
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl                # a line a document
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl --data STORE --split all

Two other evaluations read files: questions that a GPT answers without further training
(support/evaluation/tasks.py), and labelled texts on which a copy of the model is trained
(support/evaluation/finetune.py):

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
    python evaluate.py runs/bert-nano-1 --finetune reviews.jsonl --lr 1e-3
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import nn
from tqdm import tqdm

from config import Config
from data import Rows, batch_of, collate
from model import Transformer
from packing import pack_lengths
from prepare import embedded_store
from sample import load_run
from support.base.numbers import amount, count
from support.base.rng import seed_of
from support.base.runtime import Parser, Runtime, exit_cleanly, start
from support.evaluation import finetune, scoring, tasks
from support.evaluation.scoring import Documents, HeldOut, Laid, Poll
from support.rows.batch import Batch
from support.rows.bert import SpecialIds, sentence_pairs
from support.rows.mixture import AnyStore, Mixture, open_store
from support.rows.samples import SPECIAL_TOKENS, SPLITS, Samples, cut, with_context
from support.run.progress import evaluation_bar
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    runtime = start(args.device, "auto")
    # what is wrong with a file is said before the run is opened
    if args.by_document:
        runtime.on_rank0(lambda: check_file(args.by_document))
    questions = [tasks.read_task(file) for file in args.task or []]
    examples = finetune.read_examples(args.finetune, args.dev) if args.finetune else None
    subject = Subject.load(args, runtime)
    try:
        if questions:
            result = ask(subject, questions)
        elif examples:
            result = fine_tune(subject, examples)
        else:
            result = score_text(subject)
    except KeyboardInterrupt:
        if runtime.is_rank0:
            line = f"interrupted: nothing is written, and {args.run} is as it was"
            tqdm.write(line, file=sys.stderr)
        raise
    if args.json:
        runtime.say(json.dumps({"run": args.run, "step": subject.step, **result}))


class Subject(NamedTuple):
    """The run that is evaluated, and the command line."""

    args: argparse.Namespace
    runtime: Runtime
    settings: Config
    model: Transformer
    encoding: tiktoken.Encoding
    special_ids: SpecialIds | None  # a BERT's
    step: int

    @classmethod
    def load(cls, args: argparse.Namespace, runtime: Runtime) -> "Subject":
        settings, model, state = load_run(args.run, args.checkpoint)
        encoding = get_encoding(settings.data.tokenizer)
        special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
        model = model.to(runtime.device)
        return cls(args, runtime, settings, model, encoding, special_ids, state["step"])

    def say(self, line: str) -> None:
        """Print a line on rank 0, unless one JSON object is all that is asked for."""
        if not self.args.json:
            self.runtime.say(line)

    def report(self, line: str) -> None:
        self.say(f"{self.args.run}, step {self.step}: {line}")


# ---- bits per byte of held-out text


def score_text(subject: Subject) -> dict[str, Any]:
    """Print the result on a store's text, and return it as JSON has it."""
    args, settings = subject.args, subject.settings
    store = open_store(args.data or settings.data.data or embedded_store(settings.data.tokenizer))
    store.check_tokenizer(subject.encoding)
    check_groups(args, store)
    evaluation = scoring.on_each_store(
        Evaluation,
        store,
        args.tokens,
        seq_len=settings.data.seq_len,
        lengths=byte_lengths(subject.encoding),
        special_ids=subject.special_ids,
        stride=args.stride,
        split=args.split,
        nsp=settings.model.nsp,
    )
    bar = evaluation_bar(evaluation.rows_in_all, subject.runtime)
    documents = None
    if isinstance(store, Mixture):
        result = evaluation.run(subject.model, subject.runtime, args.rows, bar)
    else:
        documents = evaluation.documents(subject.model, subject.runtime, args.rows, bar)
        result = documents.total()
    subject.report(f"{evaluation.name} {result}, on {evaluation.text}")
    masked = "masked " if subject.special_ids else ""
    size = f"{result.targets:,} {masked}tokens, {result.bytes:,} bytes"
    subject.say(f"{result.val_loss:.4f} nats per token, of {size}")
    logged = {"split": args.split, **result.logged()}
    for by in args.by or []:
        groups = documents.groups(by)
        subject.say(scoring.table(groups, by))
        logged[f"groups_by_{by}"] = [group._asdict() for group in groups]
    if args.by_document:
        subject.runtime.on_rank0(lambda: documents.write(args.by_document))
        part = "" if evaluation.is_whole else ", those with a piece among these tokens"
        written = f"{len(documents.numbers):,} of {len(evaluation.split_documents):,}"
        subject.say(f"{args.by_document}: {written} documents{part}")
    return logged


class Evaluation:
    """The held-out pieces of a store, packed into rows once and in a fixed order.

    Args:   seq_len     tokens of a row
            lengths     (V,) bytes that each token stands for
            special_ids a BERT's, whose masks are the same each time; None for a GPT
            tokens      evaluate on about this many tokens: pieces chosen at random, but always the
                        same ones; None for all
            stride      targets of a piece that continues a document, which has as many tokens of
                        context as fit; None for pieces without context
            split       val | train | all, to evaluate on other documents than those held out
            nsp         also ask a BERT about pairs: does the second part follow the first?
    Raises: ValueError if the split has no document, or for a stride longer than a row
    """

    def __init__(
        self,
        store: Store,
        seq_len: int,
        lengths: np.ndarray,
        special_ids: SpecialIds | None = None,
        tokens: int | None = None,
        stride: int | None = None,
        split: str = "val",
        nsp: bool = False,
    ):
        samples = Samples(store, "bert" if special_ids else "pieces", seq_len, split)
        if len(samples) == 0:
            raise ValueError(
                f"{store.path} has no {SPLITS[split]} document, so there is nothing to evaluate"
                " on: prepare it again with --holdout 20, name another store with --data, or take"
                " all documents with evaluate.py --split all"
            )
        if stride is not None and special_ids:
            raise ValueError("--stride is for a GPT: a BERT sees its whole piece, leave it out")
        if stride is not None and not 1 <= stride <= seq_len:
            raise ValueError(f"--stride {stride}: choose 1 to {seq_len}, the tokens of a row")
        self.store, self.seq_len, self.split_documents = store, seq_len, samples.documents
        self.lengths, self.special_ids = lengths, special_ids
        spans = pieces = samples.some(tokens)
        seen = 0
        if stride:
            pieces, seen = with_context(spans, store.offsets, seq_len, stride)
        self.rows = packed(Rows.of(pieces, seen=seen), seq_len, samples.special_tokens)
        self.pairs: Rows | None = None
        if nsp:
            halves = cut(spans, seq_len - SPECIAL_TOKENS["pairs"])
            halves, pairs = sentence_pairs(halves, "evaluation")
            self.pairs = packed(Rows.of(halves, pairs=pairs), seq_len, SPECIAL_TOKENS["pairs"])
        self.rows_in_all = len(self.rows) + (len(self.pairs) if self.pairs else 0)
        self.is_whole, self.name = len(spans) == len(samples), SPLITS[split]
        part = f"{(spans[:, 1] - spans[:, 0]).sum():,} of {samples.tokens:,}"
        self.text = f"{'all' if self.is_whole else part} {self.name} tokens"

    def run(
        self, model: nn.Module, runtime: Runtime, at_once: int, poll: Poll = lambda done: None
    ) -> HeldOut:
        """The result on all rows; arguments as for `documents`."""
        return self.documents(model, runtime, at_once, poll).total()

    def documents(
        self, model: nn.Module, runtime: Runtime, at_once: int, poll: Poll = lambda done: None
    ) -> Documents:
        """Evaluate the model on all rows and add up by document.

        Args:    at_once rows on each rank
                 poll    called after every batch with how many of rows_in_all are done, equally
                         often on every rank; what it raises ends the evaluation
        Returns: on every rank, all documents of the split, also those without a target; of a part
                 (`tokens`), those with a chosen piece
        Raises:  ValueError if nothing is predicted, as when a BERT has few tokens and none masked
        """

        def by_document(measure: Callable, rows: Rows, columns: int, poll: Poll) -> np.ndarray:
            return scoring.sums_by_item(
                partial(measure, model, runtime),
                Laid(rows.offsets, documents_of(rows, self.store) - self.split_documents.start),
                model,
                runtime,
                shape=(len(self.split_documents), columns),
                at_once=at_once,
                poll=poll,
            )

        sums = by_document(self.sums, self.rows, 3, poll)
        if not sums[:, 1].any():
            raise ValueError(
                f"{self.store.path}: no {self.name} token is a target: evaluate on more"
            )
        right = pairs = 0
        if self.pairs:
            answers = by_document(self.answers, self.pairs, 2, lambda n: poll(len(self.rows) + n))
            right, pairs = answers.sum(axis=0)
        numbers = np.array(self.split_documents)
        if not self.is_whole:
            numbers = np.unique(documents_of(self.rows, self.store))
        nats, targets, size = sums[numbers - self.split_documents.start].T
        return Documents(
            self.store,
            numbers,
            nats=nats,
            targets=targets.astype(np.int64),
            bytes=size.astype(np.int64),
            nsp_accuracy=right / pairs if pairs else None,
            nsp_pairs=int(pairs) or None,
        )

    def sums(self, model: nn.Module, runtime: Runtime, own: range) -> np.ndarray:
        """(n, 3) nats, targets and bytes of each piece in some rows."""
        rows = self.rows.take(np.array(own))
        return scoring.sums_of_pieces(model, self.batch(rows), rows.offsets, self.lengths, runtime)

    def answers(self, model: nn.Module, runtime: Runtime, own: range) -> np.ndarray:
        """(n, 2) how many answers to each pair in some rows are right, and how many there are."""
        rows = self.pairs.take(np.array(own))
        return scoring.right_answers(model, self.batch(rows), rows.offsets, runtime)

    def batch(self, rows: Rows) -> Batch:
        """These rows; for a BERT with the masks that their tokens always have, and the answers."""
        return batch_of(
            self.store,
            rows,
            seq_len=self.seq_len,
            special_ids=self.special_ids,
            seeds=torch.tensor([seed_of("mask", use) for use in ("which", "what")]),
        )


def packed(alone: Rows, seq_len: int, special_tokens: int) -> Rows:
    """Rows of one piece each, packed."""
    return alone.packed(pack_lengths(alone.stop - alone.start + special_tokens, seq_len))


def documents_of(rows: Rows, store: Store) -> np.ndarray:
    """(n,) the document of the store that each piece is from."""
    return np.searchsorted(store.offsets, rows.start, side="right") - 1


# ---- questions


def ask(subject: Subject, questions: list[tasks.Task]) -> dict[str, list[dict]]:
    """Print the result of each task, and return them as JSON has them."""
    args, runtime, seq_len = subject.args, subject.runtime, subject.settings.data.seq_len
    if subject.special_ids:
        raise ValueError(
            f"--task: {args.run} holds a BERT, which does not say how likely a text is: name a GPT,"
            " or fine-tune with --finetune"
        )
    prepared = [
        tasks.items_of(task, subject.encoding, seq_len, runtime.is_rank0) for task in questions
    ]
    results = []
    for task, items in zip(questions, prepared, strict=True):
        laid = lay(items, seq_len)
        bar = evaluation_bar(len(laid.rows), runtime)
        began = time.perf_counter()
        answers = tasks.answers_of(laid, subject.model, runtime, args.rows, bar)
        rate = len(items.spans) / (time.perf_counter() - began)
        result = tasks.result_of(task, items, answers)
        subject.report(f"{tasks.in_words(result)}, {rate:,.0f} items/s")
        if notes := tasks.notes_on(result):
            subject.say(f"{task.name}: {notes}")
        results.append({**result, "items_per_s": round(rate, 1)})
    return {"tasks": results}


def lay(items: tasks.Items, seq_len: int, pack: bool = True) -> Laid:
    """Items side by side in rows; without `pack` one a row."""
    rows = Rows.of(items.spans, seen=items.seen)
    return laid_in(packed(rows, seq_len, 0) if pack else rows, items.store, seq_len, None)


def laid_in(rows: Rows, store: Store, seq_len: int, special_ids: SpecialIds | None) -> Laid:
    def read(own: range) -> Batch:
        return collate(store, rows.take(np.array(own)), seq_len, special_ids)

    return Laid(rows.offsets, documents_of(rows, store), read)


# ---- fine-tuning


def fine_tune(subject: Subject, given: finetune.Examples) -> dict[str, Any]:
    """Train with several seeds; print how often each is right, and return it as JSON has it."""
    args, seq_len, special_ids = subject.args, subject.settings.data.seq_len, subject.special_ids
    train, dev = (
        finetune.encoded(part, given.labels, subject.encoding, seq_len, is_bert=bool(special_ids))
        for part in (given.train, given.dev)
    )

    def lay_examples(part: finetune.Encoded, numbers: np.ndarray) -> Laid:
        pairs = part.pairs and part.pairs.take(numbers)
        rows = packed(Rows.of(part.spans[numbers], pairs=pairs), seq_len, part.special_tokens)
        return laid_in(rows, part.store, seq_len, special_ids)

    flags = {name: getattr(args, name) for name in finetune.Recipe._fields}
    recipe = finetune.Recipe(**{name: value for name, value in flags.items() if value is not None})
    tuning = finetune.Tuning(
        subject.model, train, len(given.labels), recipe, lay_examples, subject.runtime
    )
    shares = tuning.accuracies(dev, args.rows)
    mean, least, most = sum(shares) / len(shares), min(shares), max(shares)
    subject.report(
        f"{args.finetune}: dev accuracy {mean:.1%} ({least:.1%} to {most:.1%}, {len(shares)}"
        f" seeds); majority-class baseline {given.majority:.1%}"
    )
    dev_is = "held out by a hash of the text" if given.held_out else f"of {args.dev}"
    subject.say(
        f"{len(given.train):,} examples to train on, {len(given.dev):,} {dev_is},"
        f" {len(given.labels)} labels; {recipe.epochs} epochs in steps of {recipe.batch} at"
        f" {recipe.lr:g}"
    )
    if cut := train.cut + dev.cut:
        subject.say(f"{cut:,} examples are longer than a row and lose their end")
    accuracy = {"mean": mean, "least": least, "most": most, "of_seed": shares}
    counts = {"train": len(given.train), "dev": len(given.dev), "labels": given.labels, "cut": cut}
    result = {"file": args.finetune, "accuracy": accuracy, "majority": given.majority}
    return {"finetune": {**result, **counts, **recipe._asdict()}}


# ---- the command line

OF_TEXT = ("data", "tokens", "stride", "split", "by_document", "by")
OF_FINETUNE = ("dev", *finetune.Recipe._fields)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises: ValueError naming a flag that has no effect beside the others
    """
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, previous, best, or a file")
    parser.add_argument("--rows", type=count, default=16, help="rows evaluated at once (16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")

    text = parser.add_argument_group("bits per byte of text, the default")
    text.add_argument("--data", help="another token store (default: the run's own)")
    text.add_argument("--tokens", type=count, help="about how many tokens (default: all)")
    stride = "for a GPT: targets a row in the middle of a document (default: no context)"
    text.add_argument("--stride", type=int, help=stride)
    text.add_argument("--split", choices=SPLITS, help="which documents (default: val, held out)")
    by_document = "also write the result of each document, a JSON object a line"
    text.add_argument("--by-document", type=Path, metavar="FILE", help=by_document)
    by = f"also the result by {' or '.join(scoring.GROUPS)} of documents, or by both: source,length"
    text.add_argument("--by", type=groups, metavar="GROUPS", help=by)

    task = parser.add_argument_group("questions, for a GPT without further training")
    files = "JSON lines: see support/evaluation/tasks.py"
    task.add_argument("--task", nargs="+", metavar="FILE", help=files)

    tuned = parser.add_argument_group("fine-tuning as a classifier; the run stays as it is")
    labelled = "JSON lines: see support/evaluation/finetune.py"
    tuned.add_argument("--finetune", metavar="FILE", help=labelled)
    tuned.add_argument("--dev", metavar="FILE", help="examples to test on (default: a fifth)")
    for name, (kind, meaning) in {
        "seeds": (count, "how often to train"),
        "epochs": (count, "passes over the examples"),
        "lr": (amount, "peak learning rate; a small model wants more"),
        "batch": (count, "examples of a step"),
    }.items():
        default = finetune.Recipe._field_defaults[name]
        tuned.add_argument(f"--{name}", type=kind, help=f"{meaning} ({default})")

    args = parser.parse_args(argv)

    def given(names: tuple[str, ...]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]

    if args.task and args.finetune:
        raise ValueError("--task and --finetune: one at a time, leave one of them out")
    leader = "--task" if args.task else "--finetune" if args.finetune else None
    if leader and given(OF_TEXT):
        raise ValueError(
            f"{given(OF_TEXT)[0]} is for held-out text, and {leader} for a file: leave one out"
        )
    if not args.finetune and given(OF_FINETUNE):
        raise ValueError(f"{given(OF_FINETUNE)[0]} has no effect without --finetune: add it")
    args.split = args.split or "val"
    return args


def groups(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(scoring.GROUPS):
        message = (
            f"{text} is unknown: choose {', '.join(scoring.GROUPS)}, or both with a comma between"
        )
        raise argparse.ArgumentTypeError(message)
    return names


def check_groups(args: argparse.Namespace, store: AnyStore) -> None:
    """Refuse what this store cannot tell, before the work of an evaluation."""
    flag = "--by" if args.by else "--by-document"
    if isinstance(store, Mixture) and (args.by or args.by_document):
        raise ValueError(
            f"{flag} is for the documents of one store, and {store.path} is several: name one of"
            " them with --data"
        )
    if "source" in (args.by or []) and store.sources is None:
        raise ValueError(
            f"--by source: the documents of {store.path} name no source: prepare it again from"
            " JSON lines that do, or choose --by length"
        )


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before the work of an evaluation."""
    if file.exists() and not file.is_file():
        raise ValueError(f"--by-document {file} exists and is not a file: name another")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"--by-document {file}: there is no folder {file.parent} to write in")


if __name__ == "__main__":
    exit_cleanly(main)
