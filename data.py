"""How a batch comes about: store -> samples -> rows -> Batch. No technique, no training loop.

    token store   one long array of token ids, document after document      support/token_store.py
    Samples       sample id -> span: the first and one-past-last token of a piece of text
    draw          number of the draw -> sample id, pass after pass over a shuffled pool
    collate       rows, each a list of pieces -> Batch
    mask_tokens   Batch -> Batch, with what a BERT has to guess

Which samples are drawn and how pieces share a row is decided in plan.py:

    Plan.__call__ ── plain_rows ──── draw ── a piece a row ───────────────┬── Plan.batch ── collate
                 └── packed_rows ─── draw ── cut ── packing.best_fit ─────┘   of this rank's rows

A GPT reads a piece of the store like this:

    store     ... the  end  Call  me  Ishmael  .  end  Some ...
    piece                  [Call  me  Ishmael  .  end]
    tokens            end   Call  me  Ishmael  .              the token before each target
    targets                 Call  me  Ishmael  .  end         every token of the piece, once
"""

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
from support.ranking import SCAN, Pool
from support.rng import seed_of, shuffled
from support.token_store import Store

KINDS = ("pieces", "rows", "bert")
KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT"
IN_MEMORY = 1 << 20  # samples; beyond these, their spans are a file that all processes share
DOCUMENTS_AT_ONCE = 1 << 18  # cut into samples


class Samples:
    """Sample id -> span of the token store. A sample is a piece of text that fits one row.

    A document is cut at multiples of `max_piece_len` from its own start, so that each of its tokens
    is a target exactly once a pass. Of the kind `rows` the whole split counts as one document: rows
    of equal length, cut across documents, which is how GPTs are commonly trained without packing.

    The spans of rows follow from arithmetic; those of pieces are a table of 16 bytes a sample. The
    table of a large store is a file in it, made on first use and mapped into memory, so that a
    billion samples open as fast as a thousand; where nobody may write, each process holds it.

    Args: kind    pieces | rows | bert: a BERT's pieces leave out end-of-text and make room for the
                  [CLS] and [SEP] that collate puts around them
          seq_len tokens of a row
          split   train | val: the documents that are held out are the last ones of the store
    """

    def __init__(self, store: Store, kind: str, seq_len: int, split: str = "train"):
        self.store, self.kind, self.seq_len, self.split = store, kind, seq_len, split
        self.max_piece_len = seq_len - 2 if kind == "bert" else seq_len
        n = store.train_documents
        offsets = store.offsets[: n + 1] if split == "train" else store.offsets[n:]
        self.start, self.stop = int(offsets[0]), int(offsets[-1])
        self.table = None if kind == "rows" else self._table(offsets)

    def _table(self, offsets: np.ndarray) -> np.ndarray:
        """(N, 2) int64: the spans of all samples of the documents that `offsets` separate."""
        without_eot = self.kind == "bert"
        firsts = range(0, max(len(offsets) - 1, 1), DOCUMENTS_AT_ONCE)
        parts = (
            spans_of_documents(
                offsets[first : first + DOCUMENTS_AT_ONCE + 1], self.max_piece_len, without_eot
            )
            for first in firsts
        )
        at_most = len(offsets) + (self.stop - self.start) // self.max_piece_len
        if at_most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate(list(parts))
        name = f"{'bare-' * without_eot}{self.split}-{self.max_piece_len}"
        file = self.store.path / f"{name}-{self.store.meta['sha256']['documents.idx'][:16]}.spans"
        with folder_lock(self.store.path):
            if not file.exists():
                with atomic_write(file) as out:
                    for part in tqdm(parts, file.name, len(firsts), disable=None, leave=False):
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
        """Tokens of the store by reading its file.

        The mapped array would do, but its pages stay in this process's memory once they were
        touched, and an analysis touches them all.
        """
        file, tokens = self.store.path / "tokens.bin", self.store.tokens
        return np.fromfile(file, tokens.dtype, stop - start, offset=start * tokens.itemsize)

    def identity(self) -> dict:
        """What an index of these samples rests on: store, tokenizer, split and sample length."""
        meta = self.store.meta
        names = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
        made = (self.split, self.kind == "rows", self.kind == "bert")
        return {"made": made, "seq_len": self.max_piece_len, **{name: meta[name] for name in names}}


def spans_of_documents(offsets: np.ndarray, max_piece_len: int, without_eot: bool) -> np.ndarray:
    """(n, 2) spans of documents cut at multiples of max_piece_len from their own starts.

    Example:  offsets [0, 5, 6] at 2 tokens a piece: (0, 2), (2, 4), (4, 5), (5, 6)
    """
    start, stop = offsets[:-1], offsets[1:] - without_eot  # (N,)
    counts = -(-(stop - start) // max_piece_len)
    before = np.cumsum(counts) - counts
    # the k-th piece of all, less the pieces before its document, says how far into it it starts
    first = np.repeat(start - max_piece_len * before, counts)
    first = first + max_piece_len * np.arange(counts.sum())  # (n,)
    return np.stack((first, np.minimum(first + max_piece_len, np.repeat(stop, counts))), axis=1)


@lru_cache(maxsize=1)
def open_samples(path: str, kind: str, seq_len: int) -> Samples:
    """The training samples of a store, opened once a process: a worker is sent their names only."""
    return Samples(Store.open(path), kind, seq_len)


class Drawn(NamedTuple):
    spans: np.ndarray  # (n, 2)
    next_sample: int  # the number of the draw that comes after these


def draw(
    samples: Samples, pool: Pool | None, *, first: int, count: int, stage_start: int, seed: int
) -> Drawn:
    """`count` samples of the pool, from draw number `first` on.

    A stage shuffles the ranks of its pool pass after pass, so no sample comes again before all of
    them came. Where several filters meet, a draw that one of them refuses is passed over.

    Args:    pool        a curriculum's pool of samples, sorted by difficulty; None: every sample
             stage_start the number of the draw at which the pool became what it is
             seed        of the run
    """
    key = seed_of(seed, "stage", stage_start) if stage_start else seed
    ranks_in_all = pool.reach if pool else len(samples)
    draws_per_sample = pool.reach / max(pool.size, 1) if pool else 1  # 1 with a single filter
    ids = np.empty(0, np.int64)
    while len(ids) < count:
        wanted = count - len(ids)
        asked = wanted
        if draws_per_sample > 1:
            asked = min(int(1.1 * draws_per_sample * wanted) + 64, SCAN)
        numbers = np.arange(first - stage_start, first - stage_start + asked)
        ranks = shuffled(numbers, ranks_in_all, key)
        candidates = pool.ids(ranks) if pool else ranks
        accepted = np.flatnonzero(candidates >= 0)[:wanted]
        ids = np.concatenate((ids, candidates[accepted]))
        first += asked if len(accepted) < wanted else int(accepted[-1]) + 1
    return Drawn(spans=samples.spans(ids), next_sample=first)


class Piece(NamedTuple):
    """Tokens start..stop of the store; the first `seen` are context, targets in an earlier row."""

    start: int
    stop: int
    seen: int = 0


def cut(spans: np.ndarray, max_piece_len: int) -> list[list[Piece]]:
    """Cut each span into pieces of at most so many tokens: (0, 5) at 2 is 0..2, 2..4, 4..5."""
    return [
        [
            Piece(start=first, stop=min(first + max_piece_len, stop))
            for first in range(start, stop, max_piece_len)
        ]
        for start, stop in spans.tolist()
    ]


class Batch(NamedTuple):
    """Rows as the model takes them, of a step or a micro-batch. Each field is (B, T) int64.

    `positions` and `doc_ids` are None where every row is one piece that fills it.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor | None  # from 0 in every piece
    doc_ids: Tensor | None  # one id a piece, from 0 in every row; padding is -1

    @classmethod
    def blank(cls, rows: int, seq_len: int) -> "Batch":
        """Full rows of token 0, to run a model on before there is text."""
        zeros = torch.zeros(rows, seq_len, dtype=torch.int64)
        return cls(zeros, zeros, None, None)

    def rows(self, part: slice) -> "Batch":
        return Batch(*(None if field is None else field[part] for field in self))

    def with_documents(self) -> "Batch":
        """The same with positions and doc_ids, also where every row is one piece that fills it."""
        if self.doc_ids is not None:
            return self
        positions = torch.arange(self.tokens.shape[1]).repeat(len(self.tokens), 1)  # (B, T)
        return self._replace(positions=positions, doc_ids=torch.zeros_like(positions))

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            *(None if field is None else field.to(device, non_blocking=True) for field in self)
        )


class SpecialIds(NamedTuple):
    """The ids that a BERT needs besides those of text, which are 0..text_ids - 1."""

    cls: int
    sep: int
    mask: int
    text_ids: int

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "SpecialIds":
        names = ("[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")
        return cls(*(encoding.encode_single_token(name) for name in names))


def collate(
    store: Store, rows: list[list[Piece]], seq_len: int, special_ids: SpecialIds | None = None
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (special_ids None): every token of a piece is a target. Its inputs are the token before the
        piece, which is end-of-text where a document begins, and all its tokens but the last.
    BERT: a piece stands between [CLS] and [SEP]; its tokens are inputs and targets. Which of them
        count is decided by `mask_tokens`.

    Args:    rows of pieces; a row without any is all padding
    Returns: Batch of (B, seq_len)
    Raises:  ValueError for a store with a token outside its vocabulary
    """
    B, T = len(rows), seq_len
    end_of_text = store.meta["end_of_text"]
    tokens = np.full((B, T), end_of_text, dtype=np.int64)
    targets = np.full((B, T), IGNORE, dtype=np.int64)
    positions = np.zeros((B, T), dtype=np.int64)
    doc_ids = np.full((B, T), -1, dtype=np.int64)
    for r, row in enumerate(rows):
        first = 0
        for number, piece in enumerate(row):
            text = store.tokens[piece.start : piece.stop]
            length = len(text) + (2 if special_ids else 0)
            filled = slice(first, first + length)
            if special_ids:
                tokens[r, filled] = [special_ids.cls, *text, special_ids.sep]
                targets[r, first + 1 : first + length - 1] = text
            else:
                tokens[r, first] = store.tokens[piece.start - 1] if piece.start else end_of_text
                tokens[r, first + 1 : first + length] = text[:-1]
                targets[r, filled] = text
                targets[r, first : first + piece.seen] = IGNORE
            positions[r, filled] = np.arange(length)
            doc_ids[r, filled] = number
            first += length
    store.check_tokens(max(tokens.max(), targets.max()))
    if (doc_ids == 0).all():
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None, None)
    return Batch(*(torch.from_numpy(field) for field in (tokens, targets, positions, doc_ids)))


def mask_tokens(batch: Batch, uniform: Tensor, special_ids: SpecialIds) -> Batch:
    """Choose 15 % of the tokens for a BERT to predict: 80 % [MASK], 10 % another, 10 % as they are.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1
    Args:    uniform (B, T) float64 in [0, 1): this one number decides all three for its token
    Returns: the batch with masked tokens, and targets that are IGNORE where nothing is masked
    """
    u = uniform / 0.15  # below 1: masked
    masked = (batch.targets != IGNORE) & (u < 1)
    text_ids = special_ids.text_ids
    another = ((u - 0.8) * 10 * text_ids).long().clamp(0, text_ids - 1)
    tokens = torch.where(masked & (u < 0.8), special_ids.mask, batch.tokens)
    tokens = torch.where(masked & (u >= 0.8) & (u < 0.9), another, tokens)
    return batch._replace(tokens=tokens, targets=torch.where(masked, batch.targets, IGNORE))
