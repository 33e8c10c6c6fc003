"""Held-out loss in bits per byte, which compares runs with different tokenizers.

Whatever the training run does, an evaluation is of whole documents at full length, in a fixed order
and with nothing dropped: the pieces of the held-out documents are packed once and isolated from
each other, and every token is a target.

    python evaluate.py runs/gpt-nano-1                 # the newest checkpoint of a run
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data import Piece, Samples, SpecialIds, collate, mask_tokens
from packing import best_fit
from prepare import embedded_store
from sample import load_run
from support.rng import shuffled
from support.runtime import Parser, Runtime, exit_cleanly, start
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
    Raises: ValueError if the store holds out no document
    """

    def __init__(
        self,
        store: Store,
        seq_len: int,
        lengths: np.ndarray,
        special_ids: SpecialIds | None = None,
        tokens: int | None = None,
    ):
        samples = Samples(store, "bert" if special_ids else "pieces", seq_len, split="val")
        if len(samples) == 0:
            raise ValueError(f"{store.path} holds out no document: prepare it with --holdout 20")
        # A piece has at least one token, so `tokens` of them are always enough.
        drawn = len(samples) if tokens is None else min(tokens, len(samples))
        spans = samples.spans(shuffled(np.arange(drawn), len(samples), seed=0))
        sizes = spans[:, 1] - spans[:, 0]
        if tokens is not None:
            spans = spans[: np.searchsorted(np.cumsum(sizes), tokens) + 1]
            sizes = sizes[: len(spans)]
        pieces = [Piece(start=start, stop=stop) for start, stop in spans.tolist()]
        special_tokens = seq_len - samples.max_piece_len  # a BERT's [CLS] and [SEP]
        packed = best_fit((sizes + special_tokens).tolist(), seq_len)
        self.rows = [[pieces[item] for item in row] for row in packed]
        part = f"{sizes.sum():,} of {samples.stop - samples.start:,}"
        self.text = f"{'all' if len(spans) == len(samples) else part} held-out tokens"
        self.store, self.seq_len = store, seq_len
        self.lengths, self.special_ids = lengths, special_ids

    @torch.no_grad()
    def run(
        self,
        model: nn.Module,
        runtime: Runtime,
        rows: int,
        between: Callable[[str, int, int], None] = lambda what, done, of: None,
    ) -> HeldOut:
        """Evaluate the model on all rows, `rows` at a time, shared out over the ranks.

        The model is in evaluation mode meanwhile and left in the mode it was in.

        Args:   between called after every batch, as often on each rank, with how many rows of how
                        many are done; it may raise to end the evaluation
        """
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        together = runtime.world_size * rows
        try:
            for first in range(0, len(self.rows), together):
                sums += self.batch(model, runtime, first + runtime.rank * rows, rows)
                between("evaluation: row", min(first + together, len(self.rows)), len(self.rows))
        finally:
            model.train(was_training)
        nats, targets, size = runtime.reduce(sums.to(runtime.device)).tolist()
        return HeldOut(nats / targets, nats / math.log(2) / max(size, 1), int(targets), int(size))

    def batch(self, model: nn.Module, runtime: Runtime, first: int, rows: int) -> Tensor:
        """(3,) nats, targets and bytes of text of `rows` rows from `first` on, as many as exist."""
        mine = self.rows[first : first + rows]
        if not mine:
            return torch.zeros(3, dtype=torch.float64)
        batch = collate(self.store, mine, self.seq_len, self.special_ids)
        if self.special_ids:
            numbers = range(first, first + len(mine))
            uniform = [np.random.default_rng(row).random(self.seq_len) for row in numbers]
            batch = mask_tokens(batch, torch.from_numpy(np.stack(uniform)), self.special_ids)
        counted = batch.targets[batch.targets >= 0]
        size = int(self.lengths[counted.numpy()].sum())
        with runtime.autocast():
            nats = model(batch.to(runtime.device)).item()
        return torch.tensor([nats, len(counted), size], dtype=torch.float64)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="evaluate.py", description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--checkpoint", default="last", help="last, previous, best, or a file")
    parser.add_argument("--data", help="another token store (default: the run's own)")
    parser.add_argument("--rows", type=int, default=16, help="rows evaluated at once")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args(argv)
    if args.rows < 1:
        raise ValueError(f"--rows {args.rows} must be at least 1")
    here = start(args.device, "auto")
    settings, model, state = load_run(args.run, args.checkpoint)
    encoding = get_encoding(settings.data.tokenizer)
    store = Store.open(args.data or settings.data.data or embedded_store(settings.data.tokenizer))
    store.check_tokenizer(encoding)
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    evaluation = Evaluation(store, settings.data.seq_len, byte_lengths(encoding), special_ids)
    result = evaluation.run(model.to(here.device), here, args.rows)
    here.say(f"{args.run}, step {state['step']}: held-out {result.val_bpb:.4f} bits per byte")
    size = f"{result.targets:,} tokens, {result.bytes:,} bytes"
    here.say(f"{result.val_loss:.4f} nats per token, of {size}")


if __name__ == "__main__":
    exit_cleanly(main)
