"""Held-out loss in bits per byte, which compares runs with different tokenizers.

Whatever the training run does, an evaluation is of whole documents at full length, in a fixed order
and with nothing dropped: the pieces of the held-out documents are packed once and isolated from
each other, and every token is a target. A document longer than a row is cut into pieces, each of
which begins without context, as in training; with --stride every target but those of a document's
first piece sees nearly a whole row before it. The results of the pieces are put together again by
document, in the order of the store.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --stride 64     # long documents with a sliding context
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl                # a line a document
    python evaluate.py runs/gpt-nano-1 --by-document out.jsonl --data STORE --split all
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from data import Rows, collate
from packing import pack_lengths
from prepare import embedded_store
from sample import load_run
from support.batch import Batch
from support.flags import whole_number
from support.masking import SpecialIds, mask_tokens
from support.rng import bits, seed_of, shuffled
from support.runtime import Parser, Runtime, exit_cleanly, start
from support.samples import SPLITS, Samples, with_context
from support.scores import Documents, HeldOut, check_file
from support.token_store import Store
from support.tokenizer import byte_lengths, get_encoding


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
    ):
        samples = Samples(store, "bert" if special_ids else "pieces", seq_len, split)
        if len(samples) == 0:
            which = "holds out no" if split == "val" else "has no training"
            raise ValueError(
                f"{store.path} {which} document, so there is nothing to evaluate on: prepare"
                " it again with --holdout 20, name another store with --data, or have evaluate.py"
                " take all of its documents with --split all"
            )
        if stride is not None and (special_ids or not 1 <= stride <= seq_len):
            raise ValueError(
                f"--stride {stride}: choose 1 to {seq_len}, the tokens of a row; a BERT has none"
            )
        # A piece has at least one token, so `tokens` of them are always enough.
        drawn = len(samples) if tokens is None else min(tokens, len(samples))
        spans = samples.spans(shuffled(np.arange(drawn), len(samples), seed=0))
        sizes = spans[:, 1] - spans[:, 0]
        if tokens is not None:
            spans = spans[: np.searchsorted(np.cumsum(sizes), tokens) + 1]
            sizes = sizes[: len(spans)]
        pieces, seen = spans, np.zeros(len(spans), np.int64)
        if stride:
            pieces, seen = with_context(spans, store.offsets, seq_len, stride)
        special_tokens = seq_len - samples.max_piece_len  # a BERT's [CLS] and [SEP]
        packs = pack_lengths(pieces[:, 1] - pieces[:, 0] + special_tokens, seq_len)
        self.rows = Rows.of(pieces[packs.items], packs.offsets, seen[packs.items])
        self.is_whole, self.name = len(spans) == len(samples), SPLITS[split]
        part = f"{sizes.sum():,} of {samples.stop - samples.start:,}"
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
        return self.documents(model, runtime, rows, between).total()

    def documents(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[int], None] = lambda done: None,
    ) -> Documents:
        """Evaluate the model on all rows, `rows` at a time on each rank, and sum by document.

        The model is in evaluation mode meanwhile, and afterwards in the mode it was in.

        Args:    between called after every batch with how many of self.rows are done, equally often
                         on every rank; what it raises ends the evaluation
        Returns: on every rank, all documents of the split, also those without a target; of a part
                 (`tokens`) those of which a piece was chosen
        Raises:  ValueError if nothing is predicted, as when few tokens of a BERT are all unmasked
        """
        of_piece = np.zeros((len(self.rows.start), 3))
        at_once = runtime.world_size * rows
        was_training = model.training
        model.eval()
        try:
            for first in range(0, len(self.rows), at_once):
                own = first + runtime.rank * rows
                if own < len(self.rows):  # in the last turn there may be rows for some ranks only
                    pieces = slice(*self.rows.offsets[[own, min(own + rows, len(self.rows))]])
                    of_piece[pieces] = self.sums(model, runtime, own, rows)
                between(min(first + at_once, len(self.rows)))
        finally:
            model.train(was_training)
        of_piece = runtime.reduce(torch.from_numpy(of_piece).to(runtime.device)).cpu().numpy()

        document = np.searchsorted(self.store.offsets, self.rows.start, side="right") - 1  # (n,)
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
        return Documents(numbers, nats, targets.astype(np.int64), size.astype(np.int64))

    def sums(self, model: nn.Module, runtime: Runtime, first: int, count: int) -> np.ndarray:
        """(n, 3) nats, targets and bytes of each piece in the rows from number `first` on."""
        batch = self.batch(first, count)
        with runtime.autocast():
            losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
        offsets = self.rows.offsets[first : first + len(losses) + 1] - self.rows.offsets[first]
        counted = batch.targets >= 0
        of_row = torch.from_numpy(offsets[:-1, None])  # (B, 1)
        piece = (of_row + batch.with_documents().doc_ids)[counted].numpy()
        size = self.lengths[batch.targets[counted].numpy()]
        columns = (losses[counted].double().numpy(), None, size)
        return np.stack([np.bincount(piece, column, offsets[-1]) for column in columns], axis=1)

    def batch(self, first: int, count: int) -> Batch:
        """Rows from number `first` on; of a BERT with the masks that these rows always have."""
        numbers = np.arange(first, min(first + count, len(self.rows)))
        batch = collate(self.store, self.rows.take(numbers), self.seq_len, self.special_ids)
        if self.special_ids is None:
            return batch
        seeds = torch.tensor([seed_of("mask", what) for what in ("which", "what")])
        drawn = bits(seeds, torch.from_numpy(numbers), self.seq_len)
        return mask_tokens(batch, drawn, self.special_ids)


def progress(evaluation: Evaluation, runtime: Runtime) -> Callable[[int], None]:
    """A bar, as the `between` of an evaluation."""
    hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
    bar = tqdm(total=len(evaluation.rows), unit="row", disable=hidden, leave=False)

    def show(done: int) -> None:
        bar.update(done - bar.n)
        if done == bar.total:
            bar.close()

    return show


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, previous, best, or a file")
    parser.add_argument("--data", help="another token store (default: the run's own)")
    parser.add_argument("--tokens", type=whole_number, help="of its text (default: all)")
    stride = "targets of a piece that continues a document (default: no context before it)"
    parser.add_argument("--stride", type=int, help=stride)
    parser.add_argument("--split", choices=SPLITS, default="val", help="(default: val, held out)")
    by_document = "also write the result of each document, a JSON object a line"
    parser.add_argument("--by-document", type=Path, metavar="FILE", help=by_document)
    parser.add_argument("--rows", type=int, default=16, help="rows evaluated at once")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args(argv)
    for name in ("tokens", "rows"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: choose 1 or more")
    here = start(args.device, "auto")
    if args.by_document:
        here.on_rank0(lambda: check_file(args.by_document))
    settings, model, state = load_run(args.run, args.checkpoint)
    encoding = get_encoding(settings.data.tokenizer)
    store = Store.open(args.data or settings.data.data or embedded_store(settings.data.tokenizer))
    store.check_tokenizer(encoding)
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    chosen = (special_ids, args.tokens, args.stride, args.split)
    evaluation = Evaluation(store, settings.data.seq_len, byte_lengths(encoding), *chosen)
    between = progress(evaluation, here)
    documents = evaluation.documents(model.to(here.device), here, args.rows, between)
    result = documents.total()
    where = f"{args.run}, step {state['step']}"
    bpb = f"{result.val_bpb:.4f} bits per byte"
    here.say(f"{where}: {evaluation.name} {bpb}, on {evaluation.text}")
    size = f"{result.targets:,} tokens, {result.bytes:,} bytes"
    here.say(f"{result.val_loss:.4f} nats per token, of {size}")
    if args.by_document:
        here.on_rank0(lambda: documents.write(args.by_document))
        part = "" if evaluation.is_whole else ", those with a piece among these tokens"
        count = f"{len(documents.numbers):,} of {len(evaluation.split_documents):,}"
        here.say(f"{args.by_document}: {count} documents{part}")


if __name__ == "__main__":
    exit_cleanly(main)
