"""How a batch comes about: store -> samples -> rows -> Batch. No technique, no training loop.

    token store   one long array of token ids, document after document      support/text/store.py
    Samples       sample id -> span, the first and one-past-last token      support/rows/samples.py
    draw          number of the draw -> sample id, pass after pass over a shuffled pool
    Rows          which pieces lie in which row
    collate       Rows -> Batch                                             support/rows/batch.py
    mask_tokens   Batch -> Batch, with what a BERT has to guess             support/rows/bert.py

train.main opens the store (`open_data`). plan.py decides the rest for every step: the curriculum's
`Stage` says how long a piece may be and which pool is drawn from, and one of three ways makes rows:

    Plan.__call__ ── truncated_rows ── draw ── a piece a row ──────────────────┬── Plan.batch
                 ├── reshaped_rows ─── draw ── reshape ────────────────────────┤   collate, for
                 └── packed_rows ───── draw ── cut ── pack_lengths ── balanced ┘   this rank's rows

A GPT reads a piece of the store like this:

    store     ... the  end  Call  me  Ishmael  .  end  Some ...
    piece                  [Call  me  Ishmael  .  end]
    tokens            end   Call  me  Ishmael  .              the token before each target
    targets                 Call  me  Ishmael  .  end         every token of the piece, once
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from prepare import embedded_store
from support.base.rng import seed_of, shuffled
from support.base.runtime import Runtime
from support.base.settings import flag
from support.rows.batch import Batch
from support.rows.bert import Pairs, SpecialIds, masked_tokens
from support.rows.mixture import AnyStore, MixedSamples, open_store
from support.rows.packs import Packs
from support.rows.ranking import SCAN, Pool
from support.rows.samples import LONG, LONG_HELP, SPECIAL_TOKENS, Samples
from support.text.tokenizer import byte_lengths, get_encoding, store_encoding

if TYPE_CHECKING:
    from config import Config


@dataclass(frozen=True)
class DataConfig:
    data: str | None = flag(
        None,
        "token store made by prepare.py, or several: a=0.7,b=0.3 (default: embedded corpus)",
        free=True,
    )
    tokenizer: str | None = flag(
        None, "pd4k, bytes, gpt2 or a .tiktoken file of ranks (default: the store's, else pd4k)"
    )
    seq_len: int | None = flag(None, "tokens of a row (default: by --size)", least=8, below=2**31)
    long: str = flag("split", LONG_HELP, LONG)


class Data(NamedTuple):
    """What a run reads, and what its token ids mean."""

    encoding: tiktoken.Encoding
    store: AnyStore
    special_ids: SpecialIds | None  # a BERT's
    byte_lengths: np.ndarray  # (V,) of the text that each token stands for


def open_data(settings: "Config", runtime: Runtime) -> tuple["Config", Data]:
    """The store and its tokenizer, and the settings with the tokenizer's name in them."""
    d = settings.data
    name = d.tokenizer or "pd4k"
    path = d.data or runtime.on_rank0(lambda: str(embedded_store(name)))
    store = open_store(path)
    encoding = get_encoding(d.tokenizer) if d.tokenizer else store_encoding(path, store.meta)
    store.check_tokenizer(encoding)
    settings = replace(settings, data=replace(d, tokenizer=encoding.name))
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    return settings, Data(encoding, store, special_ids, byte_lengths(encoding))


class Drawn(NamedTuple):
    spans: np.ndarray  # (n, 2)
    next_sample: int  # the number of the draw that comes after these


def draw(
    samples: Samples | MixedSamples,
    pool: Pool | None,
    *,
    first: int,
    count: int,
    stage_start: int,
    seed: int,
) -> Drawn:
    """`count` samples of the pool, from draw number `first` on.

    A stage shuffles the ranks of its pool pass after pass, so no sample comes again before all of
    them came. Where several filters meet, a draw that one of them refuses is passed over.

    Args:    pool        a curriculum's pool of samples, sorted by difficulty; None: every sample
             stage_start the number of the draw at which the pool became what it is
             seed        of the run
    """
    key = seed_of(seed, "stage", stage_start) if stage_start else seed
    ids = np.empty(0, np.int64)
    while len(ids) < count:
        wanted = count - len(ids)
        asked = draws_for(wanted, pool)
        numbers = np.arange(first - stage_start, first - stage_start + asked)
        if pool:
            candidates = pool.ids(shuffled(numbers, pool.reach, key))
        else:
            candidates = samples.shuffled(numbers, key)
        accepted = np.flatnonzero(candidates >= 0)[:wanted]
        ids = np.concatenate((ids, candidates[accepted]))
        enough = len(accepted) == wanted
        first += int(accepted[-1]) + 1 if enough else asked
    return Drawn(spans=samples.spans(ids), next_sample=first)


def draws_for(samples: int, pool: Pool | None) -> int:
    """How many draws to look at for so many samples: some more than a pool refuses on average.

    Example: 10 samples of a pool that holds a quarter of what it reaches: 1.1 * 4 * 10 + 64 = 108
    """
    draws_per_sample = pool.reach / max(pool.size, 1) if pool else 1  # 1 with a single filter
    if draws_per_sample == 1:
        return samples
    return min(int(1.1 * draws_per_sample * samples) + 64, SCAN)


@dataclass(frozen=True, eq=False)
class Rows:
    """Which pieces of the store lie in which row, from left to right.

    Piece i is the tokens start[i] to stop[i] of the store, and row r has the pieces
    offsets[r] to offsets[r + 1]; a row without any is all padding. With `pairs` only the first part
    of a piece is read there, and the second part where `pairs` says.
    """

    start: np.ndarray  # (n,) int64
    stop: np.ndarray  # (n,)
    offsets: np.ndarray  # (R + 1,)
    seen: np.ndarray  # (n,) how many tokens of a piece are context, targets in an earlier row
    pairs: Pairs | None = None  # --nsp

    @classmethod
    def of(
        cls,
        spans: np.ndarray,
        offsets: np.ndarray | None = None,
        seen: np.ndarray | int = 0,
        pairs: Pairs | None = None,
    ) -> "Rows":
        """Rows of the pieces `spans` (n, 2), in their order; one piece a row without `offsets`."""
        offsets = np.arange(len(spans) + 1) if offsets is None else offsets
        return cls(spans[:, 0], spans[:, 1], offsets, np.broadcast_to(seen, len(spans)), pairs)

    @classmethod
    def join(cls, parts: "list[Rows]") -> "Rows":
        """The rows of all parts, one part after the other."""
        before = np.cumsum([0, *(len(part.start) for part in parts)])
        offsets = [part.offsets[:-1] + n for part, n in zip(parts, before, strict=False)]
        columns = zip(*((part.start, part.stop, part.seen) for part in parts), strict=True)
        start, stop, seen = map(np.concatenate, columns)
        pairs = [part.pairs for part in parts if part.pairs is not None]
        joined = Pairs(*map(np.concatenate, zip(*pairs, strict=True))) if pairs else None
        return cls(start, stop, np.concatenate((*offsets, before[-1:])), seen, joined)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def with_blanks(self, rows: int) -> "Rows":
        """So many rows in all: the last ones have no piece."""
        offsets = np.pad(self.offsets, (0, rows - len(self)), mode="edge")
        return Rows(self.start, self.stop, offsets, self.seen, self.pairs)

    def take(self, numbers: np.ndarray) -> "Rows":
        """The rows of these numbers, in this order."""
        pieces, offsets = Packs(np.arange(len(self.start)), self.offsets).take(numbers)
        pairs = self.pairs and self.pairs.take(pieces)
        return Rows(self.start[pieces], self.stop[pieces], offsets, self.seen[pieces], pairs)

    def packed(self, packs: Packs) -> "Rows":
        """Rows of one piece each, laid together as a packer says."""
        return replace(self.take(packs.items), offsets=packs.offsets)

    def sums(self, of_piece: np.ndarray) -> np.ndarray:
        """(R,) the sum over the pieces of each row."""
        return np.diff(np.concatenate(([0], np.cumsum(of_piece)))[self.offsets])


def collate(
    store: AnyStore, rows: Rows, seq_len: int, special_ids: SpecialIds | None = None
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (special_ids None): every token of a piece is a target. Its inputs are the token before the
        piece, which is end-of-text where a document begins, and all its tokens but the last.
    BERT: a piece stands between [CLS] and [SEP], with one more [SEP] between the parts of a pair;
        its tokens are inputs and targets. Which of them count is decided by `mask_tokens`.

    Returns: Batch of (B, seq_len)
    Raises:  ValueError for a store with a token outside its vocabulary
    Cost:    a few passes over B T numbers, however many pieces there are
    """
    B, T = len(rows), seq_len
    end_of_text = store.meta["end_of_text"]
    special_tokens = SPECIAL_TOKENS["pairs" if rows.pairs else "bert"] if special_ids else 0
    at = laid(rows, T, special_tokens)
    text = store.tokens.take(at.place, mode="clip").astype(np.int64)  # (B T,)
    if special_ids:
        tokens, targets = between_special_tokens(text, rows, at, special_ids)
    else:
        tokens, targets = np.empty_like(text), text
        tokens[1:] = text[:-1]
        before = store.tokens.take(rows.start - 1, mode="clip")
        tokens[at.heads] = np.where(rows.start > 0, before, end_of_text)
    positions, padding = at.positions, at.doc_ids < 0
    is_full = not padding.any()
    if not is_full:
        tokens[padding], targets[padding], positions[padding] = end_of_text, IGNORE, 0
    if rows.seen.any():
        targets[positions < np.repeat(np.insert(rows.seen, rows.offsets[1:], 0), at.lengths)] = (
            IGNORE
        )
    store.check_tokens(max(tokens.max(), targets.max()))
    fields = [torch.from_numpy(f.reshape(B, T)) for f in (tokens, targets, positions, at.doc_ids)]
    if len(rows.start) == B and is_full:
        fields[2:] = None, None
    return Batch(*fields)


class Layout(NamedTuple):
    """Which token of the store stands where in some rows; (B T,) each, unless said otherwise."""

    place: np.ndarray  # in the store; anything on padding
    positions: np.ndarray  # from 0 in every piece
    doc_ids: np.ndarray  # the number of the piece in its row, -1 on padding
    lengths: np.ndarray  # (n + B,) of the pieces, after those of each row what is left of it
    heads: np.ndarray  # (n,) where the pieces begin
    stops: np.ndarray  # (n,) where they end


def laid(rows: Rows, T: int, special_tokens: int) -> Layout:
    """Lay the pieces of each row side by side.

    What is left of a row counts as one more piece, so that pieces lie without a gap. A BERT's piece
    has [CLS] in front, so it begins one place before its text.

    Example: a row of 6 with the pieces 20 to 23 and 7 to 9: place 20 21 22 7 8 -, positions
             0 1 2 0 1 -, doc_ids 0 0 0 1 1 -1, lengths 3 2 1, heads 0 3, stops 3 5
    """
    length = rows.stop - rows.start + special_tokens  # (n,)
    ends = rows.offsets[1:]
    number = np.arange(len(length)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    number = np.insert(number, ends, -1)  # (n + B,)
    start = np.insert(rows.start - (special_tokens > 0), ends, 0)
    lengths = np.insert(length, ends, T - rows.sums(length))
    begins = np.cumsum(lengths) - lengths
    index = np.arange(len(rows) * T)
    positions = index - np.repeat(begins, lengths)  # (B T,)
    place = index + np.repeat(start - begins, lengths)
    if rows.pairs:
        first, second = (np.insert(x, ends, 0) for x in rows.pairs)
        is_second = positions > np.repeat(first + 1, lengths)  # after the [SEP] in the middle
        place += np.where(is_second, np.repeat(second - start - first - 2, lengths), 0)
    return Layout(
        place=place,
        positions=positions,
        doc_ids=np.repeat(number, lengths),
        lengths=lengths,
        heads=begins[number >= 0],
        stops=(begins + lengths)[number >= 0],
    )


def between_special_tokens(
    text: np.ndarray, rows: Rows, at: Layout, special_ids: SpecialIds
) -> tuple[np.ndarray, np.ndarray]:
    """A BERT's tokens and targets (B T,): [CLS] piece [SEP], or [CLS] first [SEP] second [SEP]."""
    tokens, targets = text, text.copy()
    seps = at.stops - 1
    if rows.pairs:
        seps = np.concatenate((seps, at.heads + rows.pairs.first + 1))
    tokens[at.heads], tokens[seps] = special_ids.cls, special_ids.sep
    targets[at.heads] = targets[seps] = IGNORE
    return tokens, targets


def places(rows: Rows, batch: Batch) -> Tensor:
    """(B, T) int64: where in the store each token of these rows lies, to draw random numbers by.

    So a token has the same numbers wherever its piece is packed. Special tokens count as text, the
    second part of a pair as if it followed the first, and padding has any number.
    """
    _, _, positions, doc_ids = batch.with_documents()
    piece = torch.from_numpy(rows.offsets[:-1])[:, None] + doc_ids  # (B, T)
    start = torch.from_numpy(np.append(rows.start, 0))
    return start[piece.clamp(0, len(rows.start))] + positions


class Counts(NamedTuple):
    targets: int  # or documents
    of_answer: float | None  # what the answer of a pair counts beside them


def counts(rows: Rows, masked: bool, per_document: bool) -> Counts:
    """What the sum of losses of these rows is divided by, and how answers weigh in it.

    From lengths alone, so that a rank knows the count of all ranks' rows without reading them. All
    answers together count as much as all targets: the loss is the mean over these and over those.

    Args: masked       whether a BERT predicts some tokens, or a GPT all of them
          per_document whether documents are counted in place of targets
    """
    length = rows.stop - rows.start
    targets = masked_tokens(length) if masked else length - rows.seen
    total = len(targets) if per_document else int(targets.sum())
    if rows.pairs is None:
        return Counts(total, None)
    answers = rows.pairs.answers(rows.start, rows.stop) != IGNORE
    return Counts(total, total / max(int(answers.sum()), 1))
