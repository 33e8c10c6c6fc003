"""Held-out loss in bits per byte, which compares runs with different tokenizers.

Whatever the training run does, an evaluation is of whole documents at full length, in a fixed order
and with nothing dropped: the pieces of the held-out documents are packed once and isolated from
each other, and every token is a target (of a BERT, every masked one). A document longer than a row
is cut into pieces, each of which begins without context, as in training; with --stride every target
but those of a document's first piece sees nearly a whole row before it. The results of the pieces
are put together again by document, in the order of the store.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --stride 64     # long documents with a sliding context
    python evaluate.py runs/gpt-nano-1 --by source,length
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl                # a line a document
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl --data STORE --split all

Two other evaluations take files. Of questions that a GPT answers as it is
(support/evaluation/tasks.py, support/evaluation/tasks.py), and of labelled texts, on which a copy
of the model is trained further (support/evaluation/finetune.py, support/evaluation/finetune.py):

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
    python evaluate.py runs/bert-nano-1 --finetune reviews.jsonl --lr 1e-3
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data import Rows, collate, places
from packing import pack_lengths
from prepare import embedded_store
from sample import load_run
from support.base.numbers import amount, count
from support.base.rng import bits, seed_of
from support.base.runtime import Parser, Runtime, exit_cleanly, start
from support.evaluation import finetune, tasks
from support.evaluation.finetune import DEFAULTS
from support.evaluation.scoring import (
    GROUPS,
    Documents,
    HeldOut,
    Subject,
    check_file,
    check_groups,
    evaluating,
    on_each_store,
    own_rows,
    right_answers,
    sums_of_pieces,
    tell,
)
from support.rows.batch import Batch, with_answers
from support.rows.bert import SpecialIds, mask_tokens, sentence_pairs
from support.rows.mixture import Mixture, open_store
from support.rows.samples import SPECIAL_TOKENS, SPLITS, Samples, cut, with_context
from support.run.progress import evaluation_bar
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding


class Evaluation:
    """The held-out pieces of a store, packed into rows once and in a fixed order.

    Args:   seq_len     tokens of a row
            lengths     (V,) bytes that each token stands for
            special_ids None for a GPT; those of a BERT, whose masks are the same each time
            tokens      evaluate on about so many tokens, of pieces chosen at random but always the
                        same; None for all
            stride      targets of a piece that continues a document, after as many tokens of
                        context as fit; None for pieces without context
            split       val | train | all: other documents than those held out
            nsp         also have a BERT tell of pairs whether the second part follows the first
    Raises: ValueError if the split has no document, or if the stride is no part of a row
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
            what = f"no {SPLITS[split]} document, so there is nothing to evaluate on"
            raise ValueError(
                f"{store.path} has {what}: prepare it again with --holdout 20, or name another"
                " store with --data; evaluate.py --split all takes whatever there is"
            )
        if stride is not None and special_ids:
            raise ValueError("--stride is for a GPT: a BERT sees its whole piece, leave it out")
        if stride is not None and not 1 <= stride <= seq_len:
            raise ValueError(f"--stride {stride}: choose 1 to {seq_len}, the tokens of a row")
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
        tokens = samples.stop - samples.start - samples.without_eot * len(samples.documents)
        part = f"{(spans[:, 1] - spans[:, 0]).sum():,} of {tokens:,}"
        self.text = f"{'all' if self.is_whole else part} {self.name} tokens"
        self.store, self.seq_len, self.split_documents = store, seq_len, samples.documents
        self.lengths, self.special_ids = lengths, special_ids

    def run(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[int], None] = lambda done: None,
    ) -> HeldOut:
        """Evaluate the model on all rows; see `documents`, which does the work."""
        held_out = self.documents(model, runtime, rows, between).total()
        return held_out._replace(**self.answers(model, runtime, rows, between))

    def documents(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[int], None] = lambda done: None,
    ) -> Documents:
        """Evaluate the model on all rows, `rows` at a time on each rank, and sum by document.

        Args:    between called after every batch with how many of self.rows are done, equally often
                         on every rank; what it raises ends the evaluation
        Returns: on every rank, all documents of the split, also those without a target; of a part
                 (`tokens`) those of which a piece was chosen
        Raises:  ValueError if nothing is predicted, as when few tokens of a BERT are all unmasked
        """
        of_piece = np.zeros((len(self.rows.start), 3))
        with evaluating(model):
            for own in own_rows(model, len(self.rows), rows, runtime, between):
                pieces = slice(*self.rows.offsets[[own.start, own.stop]])
                of_piece[pieces] = self.sums(model, runtime, own)
        of_piece = runtime.reduce(torch.from_numpy(of_piece)).numpy()

        document = documents_of(self.rows, self.store)  # (n,)
        first, stop = self.split_documents.start, self.split_documents.stop
        numbers = np.arange(first, stop) if self.is_whole else np.unique(document)
        nats, targets, size = (
            np.bincount(document - first, column, stop - first)[numbers - first]
            for column in of_piece.T
        )
        if not targets.any():
            raise ValueError(
                f"{self.store.path}: no {self.name} token is a target: evaluate on more"
            )
        found = Documents(numbers, nats, targets.astype(np.int64), size.astype(np.int64))
        return found.of_sources(self.store)

    def sums(self, model: nn.Module, runtime: Runtime, own: range) -> np.ndarray:
        """(n, 3) nats, targets and bytes of each piece in the rows of these numbers."""
        offsets = self.rows.offsets[own.start : own.stop + 1] - self.rows.offsets[own.start]
        batch = self.batch(self.rows.take(np.array(own)))
        return sums_of_pieces(model, batch, offsets, self.lengths, runtime)

    def answers(
        self, model: nn.Module, runtime: Runtime, rows: int, between: Callable[[int], None]
    ) -> dict[str, float]:
        """HeldOut's fields about pairs: how many the model tells rightly whether they belong.

        Goes on where `documents` ends: `between` is called with the rows of both.
        """
        if self.pairs is None:
            return {}
        batches = (len(self.pairs), lambda own: self.batch(self.pairs.take(np.array(own))))
        rest = (rows, runtime, lambda done: between(len(self.rows) + done))
        right, pairs = right_answers(model, *batches, *rest)
        return {"nsp_accuracy": right / pairs, "nsp_pairs": int(pairs)} if pairs else {}

    def batch(self, rows: Rows) -> Batch:
        """These rows; of a BERT with the masks that their tokens always have, and its answers."""
        batch = collate(self.store, rows, self.seq_len, self.special_ids)
        if self.special_ids:
            seeds = torch.tensor([seed_of("mask", what) for what in ("which", "what")])
            drawn = bits(seeds, places(rows, batch).flatten(), 1).view(2, *batch.tokens.shape)
            batch = mask_tokens(batch, drawn, self.special_ids)
        if rows.pairs:
            batch = with_answers(batch, rows.pairs.answers(rows.start, rows.stop))
        return batch


def packed(alone: Rows, seq_len: int, special_tokens: int) -> Rows:
    """Pieces of a row each, packed."""
    return alone.packed(pack_lengths(alone.stop - alone.start + special_tokens, seq_len))


def documents_of(rows: Rows, store: Store) -> np.ndarray:
    """(n,) the document of the store that each piece is of."""
    return np.searchsorted(store.offsets, rows.start, side="right") - 1


def lay(items: tasks.Items, seq_len: int, pack: bool = True) -> tasks.Laid:
    """Items side by side in rows; without `pack` one a row."""
    rows = Rows.of(items.spans, seen=items.seen)
    rows = packed(rows, seq_len, 0) if pack else rows

    def read(own: range) -> Batch:
        return collate(items.store, rows.take(np.array(own)), seq_len)

    return tasks.Laid(rows.offsets, documents_of(rows, items.store), read)


def packed_examples(
    given: finetune.Encoded, numbers: np.ndarray, seq_len: int, special_ids: SpecialIds | None
) -> finetune.Packed:
    """The examples of these numbers, packed."""
    pairs = given.pairs and given.pairs.take(numbers)
    rows = packed(Rows.of(given.spans[numbers], pairs=pairs), seq_len, given.special_tokens)
    batch = collate(given.store, rows, seq_len, special_ids)
    return finetune.Packed(batch, documents_of(rows, given.store))


def of_text(subject: Subject) -> dict[str, Any]:
    """Bits per byte of a store's text: prints them, and returns them as JSON has them."""
    args, here, settings, model, encoding, special_ids, _ = subject
    store = open_store(args.data or settings.data.data or embedded_store(settings.data.tokenizer))
    store.check_tokenizer(encoding)
    check_groups(args, store)
    how = (settings.data.seq_len, byte_lengths(encoding), special_ids)
    what = {"stride": args.stride, "split": args.split, "nsp": settings.model.nsp}
    evaluation = on_each_store(Evaluation, store, args.tokens, *how, **what)
    rest = (model, here, args.rows, evaluation_bar(evaluation.rows_in_all, here))
    if isinstance(store, Mixture):
        return tell(subject, evaluation, evaluation.run(*rest))
    documents = evaluation.documents(*rest)
    result = documents.total()._replace(**evaluation.answers(*rest))
    if args.by_document:
        here.on_rank0(lambda: documents.write(args.by_document))
    return tell(subject, evaluation, result, documents)


def main(argv: list[str] | None = None) -> None:
    args = parse(__doc__.split("\n")[0], argv)
    here = start(args.device, "auto")
    if args.by_document:
        here.on_rank0(lambda: check_file(args.by_document))
    asked = [tasks.read_task(file) for file in args.task or []]
    labelled = finetune.read_examples(args.finetune, args.dev) if args.finetune else None
    settings, model, state = load_run(args.run, args.checkpoint)
    encoding = get_encoding(settings.data.tokenizer)
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    where = f"{args.run}, step {state['step']}"
    model = model.to(here.device)
    subject = Subject(args, here, settings, model, encoding, special_ids, where)
    with subject.interruptible():
        if asked:
            found = tasks.ask(subject, asked, lay)
        elif labelled:
            found = finetune.compare(subject, labelled, packed_examples)
        else:
            found = of_text(subject)
    if args.json:
        here.say(json.dumps({"run": args.run, "step": state["step"], **found}))


# ---- evaluation flags
#
# The command line of evaluate.py, and which of its flags go together.


# What is evaluated if the flag that leads a group is given, and the flags that mean something then.
OF_TEXT = ("data", "tokens", "stride", "split", "by_document", "by")
OF_FINETUNE = ("dev", "seeds", "epochs", "lr", "batch")


def parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises: ValueError naming a flag that has no effect beside the others
    """
    parser = Parser(prog="evaluate.py", description=description)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, previous, best, or a file")
    parser.add_argument("--rows", type=count, default=16, help="rows evaluated at once (16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")

    text = parser.add_argument_group("bits per byte of text, which is the default")
    text.add_argument("--data", help="another token store (default: the run's own)")
    text.add_argument("--tokens", type=count, help="about so many of its text (default: all)")
    stride = "of a GPT: so many targets a row where a document goes on (default: no context)"
    text.add_argument("--stride", type=int, help=stride)
    split = "which documents (default: val, held out)"
    text.add_argument("--split", choices=SPLITS, help=split)
    by_document = "also write the result of each document, a JSON object a line"
    text.add_argument("--by-document", type=Path, metavar="FILE", help=by_document)
    by = f"also the result by {' or '.join(GROUPS)} of documents, or by both: source,length"
    text.add_argument("--by", type=groups, metavar="GROUPS", help=by)

    task = parser.add_argument_group(
        "questions, which a GPT is asked without being trained on them"
    )
    task.add_argument(
        "--task", nargs="+", metavar="FILE", help="JSON lines: see support/evaluation/tasks.py"
    )

    tuned = parser.add_argument_group("fine-tuning as a classifier; the run stays as it is")
    tuned.add_argument(
        "--finetune", metavar="FILE", help="JSON lines: see support/evaluation/finetune.py"
    )
    tuned.add_argument(
        "--dev", metavar="FILE", help="others to test on (default: a fifth of these)"
    )
    for name, (kind, what) in {
        "seeds": (count, "times to do it"),
        "epochs": (count, "passes over the examples"),
        "lr": (amount, "peak learning rate; a small model wants more"),
        "batch": (count, "examples of a step"),
    }.items():
        tuned.add_argument(f"--{name}", type=kind, help=f"{what} ({DEFAULTS[name]})")

    args = parser.parse_args(argv)
    check(args)
    args.split = args.split or "val"
    return args


def groups(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(GROUPS):
        message = f"{text} is unknown: choose {', '.join(GROUPS)}, or both with a comma between"
        raise argparse.ArgumentTypeError(message)
    return names


def check(args: argparse.Namespace) -> None:
    def given(names: tuple[str, ...]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]

    if args.task and args.finetune:
        raise ValueError("--task and --finetune: one at a time, leave one of them out")
    leader = "--task" if args.task else "--finetune" if args.finetune else None
    if leader and given(OF_TEXT):
        raise ValueError(
            f"{given(OF_TEXT)[0]} is of held-out text, and {leader} of a file: leave"
            " one of them out"
        )
    if not args.finetune and given(OF_FINETUNE):
        raise ValueError(f"{given(OF_FINETUNE)[0]} has no effect without --finetune: add it")


if __name__ == "__main__":
    exit_cleanly(main)
