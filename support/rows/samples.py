"""Samples: pieces of a store's text that fit one row, by number.

The third stop of the walk in data.py's head. Does not decide which samples are drawn or how they
share rows: that is plan.py, the next stop.
"""

import os
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from tqdm import tqdm

from support.base.atomic import atomic_write
from support.base.rng import shuffled
from support.text.store import Store

MULTIPLE = 8  # lengths move in steps of 8: few shapes, and matrix units work in eights
KINDS = ("pieces", "rows", "bert", "pairs")
SPLITS = {"train": "training", "val": "held-out"}  # what their tokens are called
SPECIAL_TOKENS = {"bert": 2, "pairs": 3}  # [CLS] and [SEP]s that collate puts around a piece
IN_MEMORY = 1 << 20  # samples; beyond these, their spans are a file that all processes share
SPANS_CHECKED = 1 << 16  # of a table that is opened, evenly spread
DOCUMENTS_AT_ONCE = 1 << 18  # cut into samples


class Samples:
    """Sample id -> span of the token store. A sample is a piece of text that fits one row.

    A document is cut at multiples of `max_piece_len` from its own start, so that each of its tokens
    is a target exactly once a pass. For the kind `rows` the whole split counts as one document:
    rows of equal length, cut across documents, which is how GPTs are commonly trained without
    packing.

    The spans of rows follow from arithmetic; those of pieces are a table of 16 bytes a sample. The
    table of a large store is a file in it, made on first use, of which only what is asked for is
    read: a billion samples open as fast as a million. In a folder that cannot be written each
    process holds its own table.

    Args: kind    pieces | rows | bert | pairs: a BERT's pieces leave out end-of-text and make room
                  for its special tokens
          seq_len tokens of a row
          split   train | val: the held-out documents are the last ones of the store
    Raises: ValueError for a split without any, for a table that is damaged
    """

    def __init__(self, store: Store, kind: str, seq_len: int, split: str = "train"):
        self.store, self.kind, self.seq_len, self.split = store, kind, seq_len, split
        self.without_eot = kind in SPECIAL_TOKENS
        self.special_tokens = SPECIAL_TOKENS.get(kind, 0)
        self.max_piece_len = seq_len - self.special_tokens
        n, N = store.meta["train_documents"], len(store.offsets) - 1
        self.documents = {"train": range(n), "val": range(n, N)}[split]
        ends = store.offsets[np.array([self.documents.start, self.documents.stop])]
        self.start, self.stop = ends.tolist()
        self.table = None if kind == "rows" else self._table()
        if len(self) == 0:
            raise ValueError(
                f"{store.path} has no {SPLITS[split]} document: prepare it with another --holdout,"
                " or name another store"
            )

    def _table(self) -> np.ndarray:
        """(N, 2) int64: the spans of all samples."""
        parts = (self._spans_of(offsets) for offsets in self._parts())
        at_most = len(self.documents) + (self.stop - self.start) // self.max_piece_len
        if at_most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate(list(parts))
        name = f"{'bare-' * self.without_eot}{self.split}"
        text = self.store.meta["sha256"]["documents.idx"][:16]
        file = self.store.path / f"{name}-{self.max_piece_len}-{text}.spans"
        count = -(-len(self.documents) // DOCUMENTS_AT_ONCE)
        if not file.exists():
            with atomic_write(file) as out:
                for part in tqdm(parts, file.name, count, disable=None, leave=False):
                    out.write(part)
        table = np.asarray(np.memmap(file, np.int64, "r")).reshape(-1, 2)
        some = table[:: max(len(table) // SPANS_CHECKED, 1)]
        ascends = (np.diff(some) > 0).all() and (np.diff(some, axis=0) > 0).all()
        last = self._spans_of(self.store.offsets[self.documents.stop - 1 : self.documents.stop + 1])
        if not (ascends and np.array_equal(table[-1:], last[-1:])):
            raise ValueError(f"{file} is damaged: delete it, and it is made again")
        return table

    def _parts(self) -> Iterator[np.ndarray]:
        """The offsets of the documents, DOCUMENTS_AT_ONCE at a time; once if there is none."""
        begin, end = self.documents.start, self.documents.stop
        for first in range(begin, max(end, begin + 1), DOCUMENTS_AT_ONCE):
            yield self.store.offsets[first : min(first + DOCUMENTS_AT_ONCE, end) + 1]

    def _spans_of(self, offsets: np.ndarray) -> np.ndarray:
        """(n, 2) spans of documents cut at multiples of max_piece_len from their own starts.

        Example:  offsets [0, 5, 6] at 2 tokens a piece: (0, 2), (2, 4), (4, 5), (5, 6)
        """
        spans = np.stack((offsets[:-1], offsets[1:] - self.without_eot), axis=1)
        return cut(spans, self.max_piece_len)

    @property
    def tokens(self) -> int:
        """In all samples; a BERT's special tokens are not among them."""
        return self.stop - self.start - self.without_eot * len(self.documents)

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
        """(n, 2) spans of about this many tokens in all, a fixed random choice.

        Args: tokens None for all samples, in the order in which they would be chosen
        """
        # a sample has at least one token, so `tokens` of them are always enough
        count = len(self) if tokens is None else min(tokens, len(self))
        spans = self.spans(shuffled(np.arange(count), len(self), seed=0))
        if tokens is None:
            return spans
        return spans[: np.searchsorted(np.cumsum(spans[:, 1] - spans[:, 0]), tokens) + 1]

    def identity(self) -> dict:
        """What an index of these samples depends on: store, tokenizer, and how samples are cut."""
        names = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
        made_of = {name: self.store.meta[name] for name in names}
        made_of["made"] = (self.split, self.kind == "rows", self.without_eot)
        made_of["seq_len"] = self.max_piece_len
        return made_of


def cut(spans: np.ndarray, max_piece_len: int) -> np.ndarray:
    """Cut each span (N, 2) into pieces (n, 2) of at most this many tokens.

    Example: [[0, 5]] at 2 tokens a piece: [[0, 2], [2, 4], [4, 5]]
    """
    start, stop = spans[:, 0], spans[:, 1]
    counts = -(-(stop - start) // max_piece_len)
    first = np.repeat(start, counts) + max_piece_len * numbered(counts)
    return np.stack((first, np.minimum(first + max_piece_len, np.repeat(stop, counts))), axis=1)


def numbered(counts: np.ndarray) -> np.ndarray:
    """Number the parts of each thing, given how many it has: [2, 0, 3] -> [0, 1, 0, 1, 2]"""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@lru_cache(maxsize=1)
def samples_of(path: str, kind: str, seq_len: int) -> Samples:
    """The training samples of a store, opened once a process: a worker only gets their names."""
    return Samples(Store.open(path), kind, seq_len)
