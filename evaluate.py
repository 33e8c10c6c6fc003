"""Held-out loss in bits per byte, which compares runs with different tokenizers.

Whatever the training run does, an evaluation is of whole documents at full length, in a fixed order
and with nothing dropped: the pieces of the held-out documents are packed once and isolated from
each other, and every token is a target. A document longer than a row is cut into pieces, each of
which begins without context, as in training; with --stride every target but those of a document's
first piece sees nearly a whole row before it.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
    python evaluate.py runs/gpt-nano-1 --tokens 100K   # on a part of the held-out text
    python evaluate.py runs/gpt-nano-1 --stride 64     # long documents with a sliding context
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
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
from support.samples import Samples, with_context
from support.token_store import Store
from support.tokenizer import byte_lengths, get_encoding


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target too, but has no bytes
    targets: int
    bytes: int


class Evaluation:
    """The held-out pieces of a store, packed into rows once and in a fixed order.

    Args:   seq_len     tokens of a row
            lengths     (V,) bytes that each token stands for
            special_ids None for a GPT; those of a BERT, whose masks are the same each time
            tokens      evaluate on about so many tokens, of pieces chosen at random but always the
                        same; None for all
            stride      targets of a piece that continues a document, after as many tokens of
                        context as fit; None for pieces without context
    Raises: ValueError if the store holds out no document, or if the stride is no part of a row
    """

    def __init__(
        self,
        store: Store,
        seq_len: int,
        lengths: np.ndarray,
        special_ids: SpecialIds | None = None,
        tokens: int | None = None,
        stride: int | None = None,
    ):
        samples = Samples(store, "bert" if special_ids else "pieces", seq_len, split="val")
        if len(samples) == 0:
            raise ValueError(
                f"{store.path} holds out no document, so there is nothing to evaluate on: prepare"
                " it again with --holdout 20, or name another store with --data"
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
        part = f"{sizes.sum():,} of {samples.stop - samples.start:,}"
        self.text = f"{'all' if len(spans) == len(samples) else part} held-out tokens"
        self.store, self.seq_len = store, seq_len
        self.lengths, self.special_ids = lengths, special_ids

    def run(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[int], None] = lambda done: None,
    ) -> HeldOut:
        """Evaluate the model on all rows, `rows` at a time on each rank.

        The model is in evaluation mode meanwhile, and afterwards in the mode it was in.

        Args:    between called after every batch with how many of self.rows are done, equally often
                         on every rank; what it raises ends the evaluation
        Raises:  ValueError if nothing is predicted, as when few tokens of a BERT are all unmasked
        """
        was_training = model.training
        model.eval()
        try:
            sums = self.sums(model, runtime, rows, between)
        finally:
            model.train(was_training)
        nats, targets, size = runtime.reduce(sums.to(runtime.device)).tolist()
        if targets == 0:
            raise ValueError(f"{self.store.path}: no held-out token is a target: evaluate on more")
        return HeldOut(nats / targets, nats / math.log(2) / max(size, 1), int(targets), int(size))

    @torch.no_grad()
    def sums(
        self, model: nn.Module, runtime: Runtime, rows: int, between: Callable[[int], None]
    ) -> Tensor:
        """(3,) float64: nats, targets and bytes of this rank's rows."""
        nats, targets, size = 0.0, 0, 0
        at_once = runtime.world_size * rows
        for first in range(0, len(self.rows), at_once):
            own = first + runtime.rank * rows
            if own < len(self.rows):  # in the last turn there may be rows for some ranks only
                batch = self.batch(own, rows)
                counted = batch.targets[batch.targets >= 0]
                targets += len(counted)
                size += int(self.lengths[counted.numpy()].sum())
                with runtime.autocast():
                    nats += model(batch.to(runtime.device)).item()
            between(min(first + at_once, len(self.rows)))
        return torch.tensor([nats, targets, size], dtype=torch.float64)

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
    parser.add_argument("--tokens", type=whole_number, help="of held-out text (default: all)")
    stride = "targets of a piece that continues a document (default: no context before it)"
    parser.add_argument("--stride", type=int, help=stride)
    parser.add_argument("--rows", type=int, default=16, help="rows evaluated at once")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args(argv)
    for name in ("tokens", "rows"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name} {number}: choose 1 or more")
    here = start(args.device, "auto")
    settings, model, state = load_run(args.run, args.checkpoint)
    encoding = get_encoding(settings.data.tokenizer)
    store = Store.open(args.data or settings.data.data or embedded_store(settings.data.tokenizer))
    store.check_tokenizer(encoding)
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    lengths = byte_lengths(encoding)
    evaluation = Evaluation(
        store, settings.data.seq_len, lengths, special_ids, args.tokens, args.stride
    )
    result = evaluation.run(model.to(here.device), here, args.rows, progress(evaluation, here))
    where = f"{args.run}, step {state['step']}"
    here.say(f"{where}: held-out {result.val_bpb:.4f} bits per byte, on {evaluation.text}")
    size = f"{result.targets:,} tokens, {result.bytes:,} bytes"
    here.say(f"{result.val_loss:.4f} nats per token, of {size}")


if __name__ == "__main__":
    exit_cleanly(main)
