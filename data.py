"""How a batch comes about: store -> samples -> rows -> Batch. No technique, no training loop."""

import os
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from kernels.cross_entropy import IGNORE
from support.atomic import atomic_write, folder_lock
from support.token_store import Store, check_tokens

IN_MEMORY = 1 << 20  # samples of which every process keeps a table of its own
CUT = 1 << 18  # documents cut at once


class Samples:
    """Sample id -> span of the token stream. A sample is a piece of a document of at most T tokens.

    Each document is cut at multiples of T from its own start, so its tokens are targets exactly
    once a pass. With `stream` the whole split counts as one document: equal rows, cut across
    document boundaries, which is how GPTs are commonly trained without packing.

    Rows are found by arithmetic, pieces in a table of 16 bytes a sample. That of a large store is a
    file in it, made on first use and mapped: a billion samples open as fast as a thousand.

    Args: seq_len tokens a sample holds at most, special tokens not counted
          split   train | val: documents that are held out are the last of the store
          stream  cut the stream, not the documents
          without_eot    leave the end-of-text out (BERT frames a piece in [CLS] and [SEP] instead)
    """

    def __init__(
        self, store: Store, seq_len: int, split: str = "train", stream=False, without_eot=False
    ):
        n = store.train_documents
        offsets = store.offsets[: n + 1] if split == "train" else store.offsets[n:]
        self.store, self.max_piece_len, self.made = store, seq_len, (split, stream, without_eot)
        self.start, self.stop = int(offsets[0]), int(offsets[-1])
        self.table = None if stream else self._table(offsets)

    @classmethod
    def of(cls, store: Store, kind: str, row_len: int) -> "Samples":
        """Training samples by how they are laid out: rows of the stream, pieces, or a BERT's."""
        bert = kind == "bert"
        samples = cls(store, row_len - 2 * bert, stream=kind == "rows", without_eot=bert)
        samples.kind, samples.seq_len = kind, row_len
        return samples

    def _table(self, offsets: np.ndarray) -> np.ndarray:
        """(N, 2) int64 spans of all samples, of documents between consecutive `offsets`."""
        split, _, without_eot = self.made
        cuts = range(0, max(len(offsets) - 1, 1), CUT)
        parts = (
            pieces(offsets[a : a + CUT + 1], self.max_piece_len, int(without_eot)) for a in cuts
        )
        most = len(offsets) + (self.stop - self.start) // self.max_piece_len
        if most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate(list(parts))
        kind = f"{'without_eot-' * without_eot}{split}-{self.max_piece_len}"
        file = self.store.path / f"{kind}-{self.store.meta['sha256']['documents.idx'][:16]}.spans"
        with folder_lock(self.store.path):
            if not file.exists():
                with atomic_write(file) as out:
                    for part in tqdm(parts, file.name, len(cuts), disable=None, leave=False):
                        out.write(part)
        return np.asarray(np.memmap(file, np.int64, "r")).reshape(-1, 2)

    def __len__(self) -> int:
        rows = -(-(self.stop - self.start) // self.max_piece_len)
        return rows if self.table is None else len(self.table)

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the store."""
        if self.table is not None:
            return self.table[ids]
        start = self.start + ids * self.max_piece_len
        return np.stack((start, np.minimum(start + self.max_piece_len, self.stop)), axis=1)

    def read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the store, read, not mapped: a mapping's pages stay, and cost more to make."""
        file, tokens = self.store.path / "tokens.bin", self.store.tokens
        return np.fromfile(file, tokens.dtype, stop - start, offset=start * tokens.itemsize)

    def identity(self) -> dict:
        """What an index of these samples rests on: store, tokenizer, split and sample length."""
        meta = self.store.meta
        kept = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
        return {
            "made": self.made,
            "seq_len": self.max_piece_len,
            **{key: meta[key] for key in kept},
        }


def pieces(offsets: np.ndarray, seq_len: int, without_eot: int) -> np.ndarray:
    """(n, 2) spans of documents cut at multiples of seq_len, without the last `without_eot` tokens.

    Example:  pieces([0, 5, 6], 2, 0) is (0, 2), (2, 4), (4, 5), (5, 6)
    """
    start, stop = offsets[:-1], offsets[1:] - without_eot  # (N,)
    counts = -(-(stop - start) // seq_len)
    before = np.cumsum(counts) - counts
    first = np.repeat(start - seq_len * before, counts) + seq_len * np.arange(counts.sum())  # (n,)
    return np.stack((first, np.minimum(first + seq_len, np.repeat(stop, counts))), axis=1)


KINDS = ("pieces", "rows", "bert")
KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT"


@lru_cache(maxsize=1)
def open_samples(path: str, kind: str, row_len: int) -> Samples:
    """The training samples of a store, opened once a process: what a worker is sent is the name."""
    return Samples.of(Store.open(path), kind, row_len)


class Batch(NamedTuple):
    """Rows for the model; the only thing all techniques see. Each (B, T) int64.

    `positions` and `doc_ids` are None when every row is one whole piece: nothing to say about it.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor | None  # restart at 0 with every piece
    doc_ids: Tensor | None  # count the pieces of a row from 0; -1 on padding

    def rows(self, part: slice) -> "Batch":
        return Batch(*(None if field is None else field[part] for field in self))

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            *(None if field is None else field.to(device, non_blocking=True) for field in self)
        )


class SpecialIds(NamedTuple):
    """BERT's special ids; `words` is how many ids stand for text."""

    cls: int
    sep: int
    mask: int
    words: int

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "SpecialIds":
        names = ("[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
        return cls(*(encoding.encode_single_token(name) for name in names))


def cut(spans: np.ndarray, limit: int) -> list[list[tuple[int, int]]]:
    """Cut each span into pieces of at most `limit` tokens: [[(0, 5)]] at 2 is (0,2) (2,4) (4,5)."""
    return [
        [(a, min(a + limit, stop)) for a in range(start, stop, limit)]
        for start, stop in spans.tolist()
    ]


def collate(
    store: Store,
    rows: list[list[tuple[int, ...]]],
    seq_len: int,
    special_ids: SpecialIds | None = None,
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (`special_ids` None): a piece's inputs are the token before it and its own but the last;
    before the first piece of a document stands end-of-text, which precedes it in the store.
    BERT: the piece between the two; the targets are its tokens, and IGNORE on the other
    two. Which of them are masked is decided by `mask_tokens`.

    Args:    rows (B lists of pieces: first and one-past-last token in the store, and, where it is
             not 0, how many at its start are context only, because they were targets before)
    Returns: Batch of (B, seq_len)
    """
    B, T = len(rows), seq_len
    end_of_text = store.meta["end_of_text"]
    tokens = np.full((B, T), end_of_text, dtype=np.int64)
    targets = np.full((B, T), IGNORE, dtype=np.int64)
    positions = np.zeros((B, T), dtype=np.int64)
    doc_ids = np.full((B, T), -1, dtype=np.int64)
    for r, row in enumerate(rows):
        place = 0
        for number, piece in enumerate(row):
            start, stop, seen = (*piece, 0)[:3]
            text = store.tokens[start:stop]
            length = stop - start + (2 if special_ids else 0)
            here = slice(place, place + length)
            if special_ids:
                tokens[r, here] = [special_ids.cls, *text, special_ids.sep]
                targets[r, place + 1 : place + length - 1] = text
            else:
                tokens[r, place] = store.tokens[start - 1] if start else end_of_text
                tokens[r, place + 1 : place + length] = text[:-1]
                targets[r, here] = text
                targets[r, place : place + seen] = IGNORE
            positions[r, here] = np.arange(length)
            doc_ids[r, here] = number
            place += length
    check_tokens(store, max(tokens.max(), targets.max()))
    if (doc_ids == 0).all():
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    return Batch(*(torch.from_numpy(field) for field in (tokens, targets, positions, doc_ids)))


def mask_tokens(batch: Batch, choice: Tensor, special_ids: SpecialIds) -> Batch:
    """Hide 15 % of the tokens from BERT: 80 % of these as [MASK], 10 % as another, 10 % as is.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1
    Args:    choice (B, T) float64 uniform in [0, 1): one number decides all three
    Returns: the batch with masked tokens, and targets that are IGNORE where nothing is masked
    """
    u = choice / 0.15  # below 1: masked
    masked = (batch.targets != IGNORE) & (u < 1)
    other = ((u - 0.8) * 10 * special_ids.words).long().clamp(0, special_ids.words - 1)
    tokens = torch.where(masked & (u < 0.8), special_ids.mask, batch.tokens)
    tokens = torch.where(masked & (u >= 0.8) & (u < 0.9), other, tokens)
    return batch._replace(tokens=tokens, targets=torch.where(masked, batch.targets, IGNORE))
