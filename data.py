"""How a batch comes about: store -> samples -> rows -> Batch. No technique, no training loop.

    token store   one long array of token ids, document after document      support/token_store.py
    Samples       sample id -> span, the first and one-past-last token      support/samples.py
    draw          number of the draw -> sample id, pass after pass over a shuffled pool
    Rows          which pieces lie in which row
    collate       Rows -> Batch
    mask_tokens   Batch -> Batch, with what a BERT has to guess

Which samples are drawn and how pieces share a row is decided in plan.py:

    Plan.__call__ ── plain_rows ──── draw ── a piece a row ───────────────┬── Plan.batch ── collate
                 └── packed_rows ─── draw ── cut ── packing.pack_lengths ─┘   of this rank's rows

A GPT reads a piece of the store like this:

    store     ... the  end  Call  me  Ishmael  .  end  Some ...
    piece                  [Call  me  Ishmael  .  end]
    tokens            end   Call  me  Ishmael  .              the token before each target
    targets                 Call  me  Ishmael  .  end         every token of the piece, once
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from support.packs import Packs
from support.ranking import SCAN, Pool
from support.rng import seed_of, shuffled
from support.samples import Samples
from support.token_store import Store


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


@dataclass(frozen=True, eq=False)
class Rows:
    """Which pieces of the store lie in which row, from left to right.

    Piece i is the tokens start[i] to stop[i] of the store, and row r has the pieces
    offsets[r] to offsets[r + 1]; a row without any is all padding.
    """

    start: np.ndarray  # (n,) int64
    stop: np.ndarray  # (n,)
    offsets: np.ndarray  # (R + 1,)
    seen: np.ndarray  # (n,) how many tokens of a piece are context, targets in an earlier row

    @classmethod
    def of(cls, spans: np.ndarray, offsets: np.ndarray | None = None, seen: Any = 0) -> "Rows":
        """Rows of the pieces `spans` (n, 2), in their order; one piece a row without `offsets`."""
        offsets = np.arange(len(spans) + 1) if offsets is None else offsets
        return cls(spans[:, 0], spans[:, 1], offsets, np.broadcast_to(seen, len(spans)))

    @classmethod
    def join(cls, parts: "list[Rows]") -> "Rows":
        """The rows of all parts, one part after the other."""
        before = np.cumsum([0, *(len(part.start) for part in parts)])
        offsets = [part.offsets[:-1] + n for part, n in zip(parts, before, strict=False)]
        columns = zip(*((part.start, part.stop, part.seen) for part in parts), strict=True)
        start, stop, seen = map(np.concatenate, columns)
        return cls(start, stop, np.concatenate((*offsets, before[-1:])), seen)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def with_blanks(self, rows: int) -> "Rows":
        """So many rows in all: the last ones have no piece."""
        offsets = np.pad(self.offsets, (0, rows - len(self)), mode="edge")
        return Rows(self.start, self.stop, offsets, self.seen)

    def take(self, numbers: np.ndarray) -> "Rows":
        """The rows of these numbers, in this order."""
        pieces, offsets = Packs(np.arange(len(self.start)), self.offsets).take(numbers)
        return Rows(self.start[pieces], self.stop[pieces], offsets, self.seen[pieces])

    def sums(self, of_piece: np.ndarray) -> np.ndarray:
        """(R,) the sum over the pieces of each row."""
        return np.diff(np.concatenate(([0], np.cumsum(of_piece)))[self.offsets])


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


def collate(store: Store, rows: Rows, seq_len: int, special_ids: SpecialIds | None = None) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (special_ids None): every token of a piece is a target. Its inputs are the token before the
        piece, which is end-of-text where a document begins, and all its tokens but the last.
    BERT: a piece stands between [CLS] and [SEP]; its tokens are inputs and targets. Which of them
        count is decided by `mask_tokens`.

    Returns: Batch of (B, seq_len)
    Raises:  ValueError for a store with a token outside its vocabulary
    Cost:    a few passes over B T numbers, however many pieces there are
    """
    B, T = len(rows), seq_len
    end_of_text = store.meta["end_of_text"]
    length = rows.stop - rows.start + (2 if special_ids else 0)  # (n,)
    space = T - rows.sums(length)  # (B,)

    # What is left of a row counts as one more piece, so that pieces lie without a gap: (n + B,).
    ends = rows.offsets[1:]
    number = np.arange(len(length)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    number = np.insert(number, ends, -1)
    start = np.insert(rows.start - (special_ids is not None), ends, 0)
    seen = np.insert(rows.seen, ends, 0)
    length = np.insert(length, ends, space)
    at = np.cumsum(length) - length

    index = np.arange(B * T)
    positions = index - np.repeat(at, length)  # (B T,)
    doc_ids = np.repeat(number, length)
    text = store.tokens.take(index + np.repeat(start - at, length), mode="clip").astype(np.int64)
    heads = at[number >= 0]
    if special_ids:
        tokens, targets = text, text.copy()
        tails = (at + length)[number >= 0] - 1
        tokens[heads], tokens[tails] = special_ids.cls, special_ids.sep
        targets[heads] = targets[tails] = IGNORE
    else:
        tokens, targets = np.empty_like(text), text
        tokens[1:] = text[:-1]
        before = store.tokens.take(rows.start - 1, mode="clip")
        tokens[heads] = np.where(rows.start > 0, before, end_of_text)
    if space.any():
        padding = doc_ids < 0
        tokens[padding], targets[padding], positions[padding] = end_of_text, IGNORE, 0
    if seen.any():
        targets[positions < np.repeat(seen, length)] = IGNORE
    store.check_tokens(max(tokens.max(), targets.max()))
    fields = [torch.from_numpy(f.reshape(B, T)) for f in (tokens, targets, positions, doc_ids)]
    if len(rows.start) == B and not space.any():
        fields[2:] = None, None
    return Batch(*fields)


MASKED = 0.15  # of a document's tokens


def masked_tokens(tokens: np.ndarray) -> np.ndarray:
    """How many tokens of documents of so many tokens a BERT has to predict: at least one of each.

    A function of lengths alone, so that a rank knows all ranks' count without their rows.
    """
    return np.maximum(np.floor(MASKED * tokens + 0.5).astype(np.int64), 1)


def mask_tokens(batch: Batch, bits: Tensor, special_ids: SpecialIds) -> Batch:
    """Choose 15 % of each document for a BERT to predict: 80 % [MASK], 10 % another, 10 % as is.

    By document, as without packing: each has `masked_tokens` of its own, wherever it lies.

    Paper:   Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.1
    Args:    bits (2, B, T) int64 random bits: which tokens are chosen, and what becomes of each
    Returns: the batch with masked tokens, and targets that are IGNORE where nothing is masked
    """
    B, T = batch.targets.shape
    doc_ids = batch.with_documents().doc_ids
    document = (torch.arange(B)[:, None] * T + doc_ids).flatten()  # no two rows share a number
    at = (batch.targets != IGNORE).flatten().nonzero().flatten()  # (n,)
    order = bits[0].flatten()[at].argsort()
    order = order[document[at][order].argsort(stable=True)]  # by document, at random in each
    _, counts = document[at].unique_consecutive(return_counts=True)
    number = torch.arange(len(at)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.from_numpy(masked_tokens(counts.numpy()))
    masked = at[order[number < chosen.repeat_interleave(counts)]]  # (m,)

    tokens = batch.tokens.flatten().clone()
    targets = torch.full_like(tokens, IGNORE)
    targets[masked] = tokens[masked]
    share = bits[1].flatten()[masked].double() / 2**63
    another = bits[1].flatten()[masked] % special_ids.text_ids
    replaced = torch.where(share < 0.9, another, tokens[masked])
    tokens[masked] = torch.where(share < 0.8, special_ids.mask, replaced)
    return batch._replace(tokens=tokens.view(B, T), targets=targets.view(B, T))


def shares_of_documents(batch: Batch) -> Tensor:
    """What each target counts where every document counts as one: a share of its targets.

    Paper:   Krell et al., arXiv 2107.02027, section 3.2.3: without it a document weighs the more,
             the longer it is
    Returns: (B, T) float32; they sum to 1 over each document that has a target
    """
    documents = batch.with_documents().doc_ids.clamp(min=0)  # (B, T)
    is_target = (batch.targets != IGNORE).float()
    counts = torch.zeros_like(is_target).scatter_add(1, documents, is_target)
    return is_target / counts.gather(1, documents).clamp(min=1)
