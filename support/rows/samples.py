"""Samples: pieces of a store's text that fit one row, by number.

Which of them are drawn, and how they share rows, is not decided here: see data.py and plan.py.
"""

import argparse
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from support.base.atomic import atomic_write, folder_lock
from support.base.rng import shuffled
from support.text.store import Store

KINDS = ("pieces", "rows", "bert", "pairs")
SPLITS = {"train": "training", "val": "held-out", "all": "stored"}  # as text calls their tokens
KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT, of one with --nsp"
LONG = ("split", "truncate")
LONG_HELP = "split documents longer than a row, or leave out what is beyond the first"
SPECIAL_TOKENS = {"bert": 2, "pairs": 3}  # that collate puts around a piece: [CLS] and [SEP]s
IN_MEMORY = 1 << 20  # samples; beyond these, their spans are a file that all processes share
DOCUMENTS_AT_ONCE = 1 << 18  # cut into samples


class Beyond(NamedTuple):
    """What does not fit the first row of its document."""

    documents: int  # longer than a row
    tokens: int


class Samples:
    """Sample id -> span of the token store. A sample is a piece of text that fits one row.

    A document is cut at multiples of `max_piece_len` from its own start, so that each of its tokens
    is a target exactly once a pass; truncated, it ends with its first piece. Of the kind `rows` the
    whole split counts as one document: rows of equal length, cut across documents, which is how
    GPTs are commonly trained without packing.

    The spans of rows follow from arithmetic; those of pieces are a table of 16 bytes a sample. The
    table of a large store is a file in it, made on first use and mapped into memory, so that a
    billion samples open as fast as a thousand; where nobody may write, each process holds it.

    Args: kind    pieces | rows | bert | pairs: a BERT's pieces leave out end-of-text and make room
                  for its special tokens
          seq_len tokens of a row
          split   train | val | all: the documents that are held out are the last ones of the store
          long    split | truncate: documents longer than a row; rows have none
    """

    def __init__(
        self, store: Store, kind: str, seq_len: int, split: str = "train", long: str = "split"
    ):
        self.store, self.kind, self.seq_len, self.split = store, kind, seq_len, split
        self.long, self.without_eot = long, kind in SPECIAL_TOKENS
        self.special_tokens = SPECIAL_TOKENS.get(kind, 0)
        self.max_piece_len = seq_len - self.special_tokens
        n, N = store.train_documents, len(store.offsets) - 1
        self.documents = {"train": range(n), "val": range(n, N), "all": range(N)}[split]
        self.offsets = store.offsets[self.documents.start : self.documents.stop + 1]
        self.start, self.stop = int(self.offsets[0]), int(self.offsets[-1])
        self.table = None if kind == "rows" else self._table()

    def _table(self) -> np.ndarray:
        """(N, 2) int64: the spans of all samples."""
        parts = (
            spans_of_documents(offsets, self.max_piece_len, self.without_eot, self.long)
            for offsets in self._parts()
        )
        at_most = len(self.offsets) + (self.stop - self.start) // self.max_piece_len
        if at_most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate(list(parts))
        name = f"{'bare-' * self.without_eot}{'first-' * (self.long == 'truncate')}{self.split}"
        text = self.store.meta["sha256"]["documents.idx"][:16]
        file = self.store.path / f"{name}-{self.max_piece_len}-{text}.spans"
        count = -(-len(self.offsets) // DOCUMENTS_AT_ONCE)
        with folder_lock(self.store.path):
            if not file.exists():
                with atomic_write(file) as out:
                    for part in tqdm(parts, file.name, count, disable=None, leave=False):
                        out.write(part)
        return np.asarray(np.memmap(file, np.int64, "r")).reshape(-1, 2)

    def _parts(self) -> Iterator[np.ndarray]:
        """The offsets of so many documents at a time as fit into memory; of no document once."""
        for first in range(0, max(len(self.offsets) - 1, 1), DOCUMENTS_AT_ONCE):
            yield self.offsets[first : first + DOCUMENTS_AT_ONCE + 1]

    def beyond_a_row(self) -> Beyond:
        """How many documents are longer than a row, and how many of their tokens `truncate` drops.

        Cost: reads where every document begins
        """
        documents = tokens = 0
        for offsets in self._parts():
            beyond = np.diff(offsets) - self.without_eot - self.max_piece_len
            documents += int((beyond > 0).sum())
            tokens += int(beyond[beyond > 0].sum())
        return Beyond(documents, tokens)

    def __len__(self) -> int:
        rows = -(-(self.stop - self.start) // self.max_piece_len)
        return rows if self.table is None else len(self.table)

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the store."""
        if self.table is not None:
            return self.table[ids]
        start = self.start + ids * self.max_piece_len
        return np.stack((start, np.minimum(start + self.max_piece_len, self.stop)), axis=1)

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """(m,) numbers of draws -> (m,) sample ids, pass after pass (support/base/rng.py)."""
        return shuffled(draws, len(self), seed)

    def some(self, tokens: int | None = None) -> np.ndarray:
        """(n, 2) spans of about so many tokens in all, chosen at random but always the same ones.

        Args: tokens None for all samples, in the order in which they would be chosen
        """
        # a sample has at least one token, so `tokens` of them are always enough
        count = len(self) if tokens is None else min(tokens, len(self))
        spans = self.spans(shuffled(np.arange(count), len(self), seed=0))
        if tokens is None:
            return spans
        return spans[: np.searchsorted(np.cumsum(spans[:, 1] - spans[:, 0]), tokens) + 1]

    def read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the store by reading its file.

        The mapped array would do, but its pages stay in this process's memory once they were
        touched, and an analysis touches them all.
        """
        file, tokens = self.store.path / "tokens.bin", self.store.tokens
        return np.fromfile(file, tokens.dtype, stop - start, offset=start * tokens.itemsize)

    def identity(self) -> dict:
        """What an index of these samples rests on: store, tokenizer, and how samples are cut."""
        meta = self.store.meta
        names = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
        made = (self.split, self.kind == "rows", self.without_eot)
        truncated = {"long": self.long} if self.long == "truncate" else {}
        made_of = {"made": made, "seq_len": self.max_piece_len, **truncated}
        return made_of | {name: meta[name] for name in names}


def spans_of_documents(
    offsets: np.ndarray, max_piece_len: int, without_eot: bool, long: str = "split"
) -> np.ndarray:
    """(n, 2) spans of documents cut at multiples of max_piece_len from their own starts.

    Example:  offsets [0, 5, 6] at 2 tokens a piece: (0, 2), (2, 4), (4, 5), (5, 6);
              truncated: (0, 2), (5, 6)
    """
    spans = np.stack((offsets[:-1], offsets[1:] - without_eot), axis=1)
    if long == "truncate":
        spans[:, 1] = np.minimum(spans[:, 1], spans[:, 0] + max_piece_len)
    return cut(spans, max_piece_len)


def cut(spans: np.ndarray, max_piece_len: int) -> np.ndarray:
    """Cut each span (N, 2) into pieces (n, 2) of at most so many tokens.

    Example: [[0, 5]] at 2 tokens a piece: [[0, 2], [2, 4], [4, 5]]
    """
    start, stop = spans[:, 0], spans[:, 1]
    counts = -(-(stop - start) // max_piece_len)
    before = np.cumsum(counts) - counts
    # the k-th piece of all, less the pieces before its span, says how far into it it starts
    first = np.repeat(start - max_piece_len * before, counts)
    first = first + max_piece_len * np.arange(counts.sum())  # (n,)
    return np.stack((first, np.minimum(first + max_piece_len, np.repeat(stop, counts))), axis=1)


def with_context(
    spans: np.ndarray, offsets: np.ndarray, seq_len: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans into smaller ones, each preceded by as much of its document as a row has room for.

    A span that begins its document stays whole. Any other is cut at multiples of `stride`, and each
    part reaches back to be seq_len tokens long, or to where the document begins.

    Args:    spans   (N, 2) of at most seq_len tokens
             offsets where documents begin, ascending
    Returns: pieces (n, 2), and (n,) how many tokens at the start of each are context alone
    Example: [[6, 10]] of a document that begins at 0, rows of 6 moved by 3: 3..9 which has seen 3
             tokens, and 4..10 which has seen 5
    """
    start, stop = spans[:, 0], spans[:, 1]
    begins = offsets[np.searchsorted(offsets, start, side="right") - 1]  # of the documents
    step = np.where(start == begins, seq_len, stride)
    counts = -(-(stop - start) // step)
    start, stop, begins, step = (np.repeat(x, counts) for x in (start, stop, begins, step))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = start + number * step
    ends = np.minimum(first + step, stop)
    begins = np.maximum(ends - seq_len, begins)
    return np.stack((begins, ends), axis=1), first - begins


@lru_cache(maxsize=1)
def samples_of(path: str, kind: str, seq_len: int, long: str = "split") -> Samples:
    """The training samples of a store, opened once a process: a worker is sent their names only."""
    return Samples(Store.open(path), kind, seq_len, long=long)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """How a command is told which samples it is about."""
    parser.add_argument("--samples", default="pieces", choices=KINDS, help=KINDS_HELP)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--long", default="split", choices=LONG, help=LONG_HELP)
