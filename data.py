"""How text becomes a Batch: store -> samples -> rows -> Batch. No technique, no training loop.

Here is a worked example, which tests/test_data.py checks: three documents, one token per letter, in
rows of 8 tokens, with --pack. A dot is end-of-text. (Without --pack a GPT reads 0..8, 8..16 and
16..18, cut across documents.)

    1  documents    "parsimony" "is" "less"                    prepare.prepare
    2  store        p a r s i m o n y . i s . l e s s .        support/store.py, Store
                    0               8   10    13      17       18 tokens, documents at 0, 10, 13
    3  samples      id      0         1        2        3      Samples
                    span    0..8      8..10    10..13   13..18
                    text    parsimon  y.       is.      less.

Then plan.py takes over, at each step: `Plan.__call__` decides which samples are drawn (4) and which
of them share a row (5), and passes these rows back to this file:

    4  draw         samples 3, 0, 2, 1                         plan.draw
    5  Rows         parsimon    less. is.    y.                packing.pack_lengths
    6  Batch        tokens    .parsimo  .less.is  ny......     batch_of, which calls collate
                    targets   parsimon  less.is.  y.______     _ is IGNORE
                    positions 01234567  01234012  01000000     from 0 in every piece
                    doc_ids   00000000  00000111  00------     - is -1, padding

The input of a GPT is the token before each target: end-of-text where a document begins, and the n
of "parsimony" where its second piece begins. So every token of the store is a target once per pass.
A BERT reads each piece between [CLS] and [SEP], and predicts the tokens that bert.py hides.

In reading order: samples; several stores read as one (--data wiki=0.7,code=0.3); what a run opens;
rows; their Batch, and what counts in its loss. The head of plan.py continues the example with two
ranks and several steps.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from bert import Pairs, SpecialIds, mask_tokens, masked_tokens
from kernels.cross_entropy import IGNORE
from model import Batch
from prepare import embedded_store
from support.clock import MULTIPLE, bits, seed_of, shuffled
from support.runtime import Runtime
from support.settings import DataConfig
from support.store import Store, atomic_write, byte_lengths, get_encoding

# ---- samples

KINDS = ("pieces", "rows", "bert", "pairs")
SPLITS = {"train": "training", "val": "held-out"}  # their names in messages
ADDED_TOKENS = {"bert": 2, "pairs": 3}  # [CLS] and [SEP]s that collate puts around a piece
IN_MEMORY = 1 << 20  # samples; above this, spans are in a file that all processes share
DOCUMENTS_AT_ONCE = 1 << 18  # documents cut into samples at a time


class Samples:
    """Sample id -> span of the token store. A sample is a piece of text that fits one row.

    Each document is cut at multiples of `max_piece_len` from its start, so that each of its tokens
    is a target exactly once per pass. For the kind `rows` the whole split is treated as one
    document: rows of equal length, cut across documents, as GPTs are commonly trained without
    packing.

    The spans of rows are computed; the spans of pieces are a table of 16 bytes per sample. For a
    large store the table is a file in its folder, written on first use and mapped into memory, so a
    billion samples open as fast as a million. If the folder is read-only, each process holds a
    table of its own.

    Args:   kind    pieces | rows | bert | pairs: a BERT's pieces leave out end-of-text, and leave
                    room for its special tokens
            seq_len tokens in a row
            split   train | val: the held-out documents are the last ones of the store
    Raises: ValueError for a split without documents
    """

    def __init__(self, store: Store, kind: str, seq_len: int, split: str = "train"):
        self.store, self.kind, self.seq_len, self.split = store, kind, seq_len, split
        self.without_eot = kind in ADDED_TOKENS
        self.special_tokens = ADDED_TOKENS.get(kind, 0)
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
        """Compute or open the spans of all samples, (N, 2) int64."""
        at_most = len(self.documents) + (self.stop - self.start) // self.max_piece_len
        if at_most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate([np.empty((0, 2), np.int64), *self._parts()])
        name = f"{'bare-' * self.without_eot}{self.split}"
        text = self.store.meta["sha256"]["documents.idx"][:16]
        file = self.store.path / f"{name}-{self.max_piece_len}-{text}.spans"
        count = -(-len(self.documents) // DOCUMENTS_AT_ONCE)
        if not file.exists():
            with atomic_write(file) as out:
                for part in tqdm(self._parts(), file.name, count, disable=None, leave=False):
                    out.write(part)
        return np.asarray(np.memmap(file, np.int64, "r")).reshape(-1, 2)

    def _parts(self) -> Iterator[np.ndarray]:
        """Yield the spans (n, 2) of the samples of DOCUMENTS_AT_ONCE documents at a time.

        Example: documents 0..5 and 5..6, at 2 tokens a piece: (0, 2), (2, 4), (4, 5), (5, 6)
        """
        begin, end = self.documents.start, self.documents.stop
        for first in range(begin, end, DOCUMENTS_AT_ONCE):
            offsets = self.store.offsets[first : min(first + DOCUMENTS_AT_ONCE, end) + 1]
            documents = np.stack((offsets[:-1], offsets[1:] - self.without_eot), axis=1)
            yield cut(documents, self.max_piece_len)

    @property
    def tokens(self) -> int:
        """How many tokens all samples have, without a BERT's special tokens."""
        return self.stop - self.start - self.without_eot * len(self.documents)

    def __len__(self) -> int:
        rows = -(-(self.stop - self.start) // self.max_piece_len)
        return rows if self.table is None else len(self.table)

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """Return the spans (n, 2) of samples (n,): first and one-past-last token in the store."""
        if self.table is not None:
            return self.table[ids]
        start = self.start + ids * self.max_piece_len
        return np.stack((start, np.minimum(start + self.max_piece_len, self.stop)), axis=1)

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """Turn numbers of draws (m,) into sample ids (m,), shuffled anew in every pass."""
        return shuffled(draws, len(self), seed)

    def some(self, tokens: int) -> np.ndarray:
        """Return spans (n, 2) of a fixed random choice of samples, about `tokens` tokens in all."""
        # a sample has at least one token, so this many samples are always enough
        some = shuffled(np.arange(min(tokens, len(self))), len(self), seed=0)
        spans = self.spans(some)
        return spans[: np.searchsorted(np.cumsum(spans[:, 1] - spans[:, 0]), tokens) + 1]


def cut(spans: np.ndarray, max_piece_len: int) -> np.ndarray:
    """Cut each span (N, 2) into pieces (n, 2) of at most this many tokens.

    Example: [[0, 5]] at 2 tokens a piece: [[0, 2], [2, 4], [4, 5]]
    """
    start, stop = spans[:, 0], spans[:, 1]
    counts = -(-(stop - start) // max_piece_len)
    first = np.repeat(start, counts) + max_piece_len * numbered(counts)
    return np.stack((first, np.minimum(first + max_piece_len, np.repeat(stop, counts))), axis=1)


def numbered(counts: np.ndarray) -> np.ndarray:
    """Count from 0 within each group, given the groups' sizes: [2, 0, 3] -> [0, 1, 0, 1, 2]"""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


# ---- several stores read as one
#
# The stores follow one another in a single numbering of tokens, and in one of samples:
#
#     wiki  0 .......... 999        token 0 of code is token 1000 of the mixture
#     code  1000 ... 1499
#
# A share counts tokens, but a draw takes a whole sample, and mean lengths differ from store to
# store. So draws are dealt out in proportion to weight / mean length. The rule (`apportioned`)
# gives each store its share of every stretch of a run, and depends only on the number of the draw:
#
#     shares 1/2, 1/4, 1/4 of a, b, c     draw   0  1  2  3  4  5  6  7
#                                         store  c  a  b  a  c  a  b  a

EXAMPLE = "as in --data wiki=0.7,code=0.3"
ONE = 1 << 32  # a share of 1: shares are integers, in units of 2^-32
# the counts in a store's meta, which a mixture sums
COUNTS = ("documents", "tokens", "bytes", "train_documents", "train_tokens", "train_bytes")


def entries_of(given: str | Path) -> list[tuple[str, Fraction]]:
    """Parse PATH=WEIGHT,PATH=WEIGHT into pairs (path, share); [] for the path of a single store.

    If a folder with this whole name exists, even with '=' in it, it is a single store. In a
    mixture, the last '=' of an entry separates path and weight. A folder with ',' in its name can
    be read alone, but not in a mixture.

    Raises:  ValueError for an entry without path or weight, a negative weight, or only zeros
    Example: "wiki=7,code=3" is (wiki, 7/10) and (code, 3/10), exactly and on every machine
    """
    given = str(given)
    if "=" not in given or Path(given).is_dir():
        return []
    weights: list[tuple[str, Fraction]] = []
    for entry in given.split(","):
        path, _, text = entry.rpartition("=")
        try:
            weight = Fraction(text)
        except (ValueError, ZeroDivisionError):
            weight = -1
        if not path or weight < 0:
            raise ValueError(f"--data {given}: {entry!r} is not PATH=WEIGHT, {EXAMPLE}")
        weights.append((path, weight))
    total = sum(weight for _, weight in weights)
    if not total:
        raise ValueError(f"--data {given}: all weights are 0: give at least one a weight above 0")
    return [(path, weight / total) for path, weight in weights]


def open_store(given: str | Path) -> "AnyStore":
    """Open a store, or a mixture of several.

    Raises: ValueError for what Store.open and entries_of refuse, and for different tokenizers
    """
    entries = entries_of(given)
    return Mixture.open(str(given), entries) if entries else Store.open(given)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Several stores with the same tokenizer, and each one's share of the tokens that are read.

    Code that reads tokens can use it like a Store; documents and samples belong to its parts.
    """

    path: str  # the value of --data, for messages
    meta: dict  # counts are sums; sha256 identifies the stores, their order and their weights
    parts: tuple[Store, ...]
    weights: tuple[Fraction, ...]  # their sum is 1
    names: tuple[str, ...]
    tokens: "MixedTokens"

    check_tokenizer = Store.check_tokenizer
    check_tokens = Store.check_tokens

    @property
    def bytes_per_token(self) -> float:
        """The mean over the stores, weighted by their shares."""
        shares = zip(self.weights, self.parts, strict=True)
        return sum(float(weight) * part.bytes_per_token for weight, part in shares)

    @classmethod
    def open(cls, given: str, entries: Sequence[tuple[str, Fraction]]) -> "Mixture":
        parts = tuple(Store.open(path) for path, _ in entries)
        first = parts[0].meta
        shares = tuple(share for _, share in entries)
        for part in parts:
            if part.meta["tokenizer_fingerprint"] != first["tokenizer_fingerprint"]:
                others = f"{parts[0].path} with {first['tokenizer']}: prepare one of them again"
                made_with = f"{part.path} was made with tokenizer {part.meta['tokenizer']}"
                raise ValueError(f"--data {given}: {made_with} and {others}")
        # --resume compares this: stores may move, but text, order and weights must stay the same
        sha256 = [[float(s), part.meta["sha256"]] for s, part in zip(shares, parts, strict=True)]
        names = tuple(part.path.name for part in parts)
        counts = {name: sum(part.meta[name] for part in parts) for name in COUNTS}
        return cls(
            path=given,
            meta={**first, **counts, "sha256": {"mixture": sha256}},
            parts=parts,
            weights=shares,
            # names of the folders, or their paths if two have the same name
            names=names if len({*names}) == len(names) else tuple(str(p.path) for p in parts),
            tokens=MixedTokens([part.tokens for part in parts]),
        )


AnyStore = Store | Mixture


class MixedTokens:
    """Several arrays of tokens that are indexed as if joined, without a copy.

    Every array ends with the end-of-text of its last document, so here too the token before any
    document is an end-of-text.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0, *(len(array) for array in arrays)])  # (parts + 1,)

    def take(self, places: np.ndarray, mode: str) -> np.ndarray:
        """Do what ndarray.take does on the joined arrays; `mode` is always "clip"."""
        places = np.clip(places, 0, self.starts[-1] - 1)
        tokens = np.empty(len(places), self.arrays[0].dtype)
        for number, chosen in by_part(self.starts, places):
            array, start = self.arrays[number], self.starts[number]
            tokens[chosen] = array.take(places[chosen] - start, mode=mode)
        return tokens


def by_part(starts: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield, for each part i, which begins at starts[i], i and the indices of the places in it."""
    part = np.searchsorted(starts, places, side="right") - 1
    for number in range(len(starts) - 1):
        yield number, np.flatnonzero(part == number)


def samples_in(store: AnyStore, kind: str, seq_len: int) -> "Samples | MixedSamples":
    """Open the training samples of a store, or of a mixture."""
    return (MixedSamples if isinstance(store, Mixture) else Samples)(store, kind, seq_len)


class MixedSamples:
    """The training samples of a mixture, with the methods of `Samples` that plan.py calls.

    Sample ids continue from one store to the next, and so do the numbers of tokens.

    Raises: ValueError for a store without a training sample
    """

    def __init__(self, store: Mixture, kind: str, seq_len: int):
        self.store = store
        self.parts = [Samples(part, kind, seq_len) for part in store.parts]
        self.special_tokens = self.parts[0].special_tokens
        self.first_ids = np.cumsum([0, *map(len, self.parts)])  # (stores + 1,)
        self.mean_lengths = [mean_length(part) for part in self.parts]
        lengths = zip(store.weights, self.mean_lengths, strict=True)
        self.shares = nested_shares([weight / length for weight, length in lengths])

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """Turn numbers of draws (m,) into sample ids (m,); each store is shuffled separately.

        The first store is read in the same order as in a run on it alone.
        """
        ids = np.empty(len(draws), np.int64)
        dealt = apportioned(draws, self.shares)
        for number, part in enumerate(self.parts):
            chosen = dealt.store == number
            key = seed_of(seed, "store", number) if number else seed
            ids[chosen] = self.first_ids[number] + shuffled(dealt.draw[chosen], len(part), key)
        return ids

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """Return the spans (n, 2) of samples (n,): first and one-past-last token in the mixture."""
        spans = np.empty((len(ids), 2), np.int64)
        for number, chosen in by_part(self.first_ids, ids):
            of_part = self.parts[number].spans(ids[chosen] - self.first_ids[number])
            spans[chosen] = of_part + self.store.tokens.starts[number]
        return spans

    def passes(self, tokens: int) -> str:
        """Say what share each store has, and how often a run of this many tokens reads it.

        Example: wiki 70.0%, 0.32 passes; code 30.0%, 4.10 passes
        """
        shown = []
        for number, part in enumerate(self.parts):
            name, weight = self.store.names[number], self.store.weights[number]
            passes = weight * tokens / (len(part) * self.mean_lengths[number])
            shown.append(f"{name} {float(weight):.1%}, {float(passes):.2f} passes")
        return "; ".join(shown)


def mean_length(samples: Samples) -> Fraction:
    """Return the mean tokens of a sample, including a BERT's special ones, as the clock does."""
    return Fraction(samples.tokens, len(samples)) + samples.special_tokens


def nested_shares(often: Sequence[Fraction]) -> list[int]:
    """Compute each store's share of the draws that earlier stores leave, in units of 2^-32.

    Args:    often how often each store is drawn, relative to the others
    Example: [2, 1, 1] -> [1/2, 1/2, 1], times 2^32
    """
    shares = []
    for number, drawn in enumerate(often):
        left = sum(often[number:])
        share = round(ONE * drawn / left) if left else 0
        if drawn:  # no store with a weight is rounded down to nothing
            share = min(max(share, 1), ONE - any(often[number + 1 :]))
        shares.append(share)
    return shares


class Dealt(NamedTuple):
    """Which store each draw goes to, as two arrays (m,)."""

    store: np.ndarray
    draw: np.ndarray  # number of the draw within its store


def apportioned(draws: np.ndarray, shares: Sequence[int]) -> Dealt:
    """Deal draws out to stores, so that each store has its share of the first n draws, for every n.

    The first store gets floor(n p) of the first n draws. The remaining draws are renumbered and
    dealt out to the other stores in the same way. So a store's count differs from its exact share
    by less than the number of stores, and the store of a draw follows from its number alone.

    Args:    draws  (m,) int, 0 to 2^63 - 1
             shares from `nested_shares`
    Example: with shares [1/2, 1/2, 1], times 2^32, draws 0 to 3 are the first of store 2, the first
             of store 0, the first of store 1 and the second of store 0
    """
    store, draw = np.zeros((2, len(draws)), np.int64)
    left, n = np.arange(len(draws)), draws.astype(object)  # n * share may need more than 64 bits
    for number, share in enumerate(shares):
        before = n * share // ONE
        chosen = (n + 1) * share // ONE > before
        store[left[chosen]] = number
        draw[left[chosen]] = before[chosen]
        left, n = left[~chosen], (n - before)[~chosen]
    return Dealt(store, draw)


# ---- what a run opens


class Data(NamedTuple):
    """The store that a run reads, and the meaning of its token ids."""

    encoding: tiktoken.Encoding
    store: AnyStore
    special_ids: SpecialIds | None  # for a BERT
    byte_lengths: np.ndarray  # (V,) bytes of text in each token


def open_data(config: DataConfig, is_bert: bool, runtime: Runtime) -> Data:
    """Open the store that --data names, or the embedded corpus, and its tokenizer."""
    name = config.tokenizer or "pd4k"
    if config.data is None:  # each machine prepares a copy
        runtime.on_each_machine(lambda: embedded_store(name))
    store = open_store(config.data or str(embedded_store(name)))
    encoding = get_encoding(config.tokenizer or store.meta["tokenizer"])
    store.check_tokenizer(encoding)
    special_ids = SpecialIds.of(encoding) if is_bert else None
    return Data(encoding, store, special_ids, byte_lengths(encoding))


# ---- rows


@dataclass(frozen=True, eq=False)
class Rows:
    """Which pieces of the store are in which row, from left to right.

    Piece i is the tokens start[i]:stop[i] of the store, and row r holds the pieces
    offsets[r]:offsets[r + 1]; a row without pieces is all padding. With `pairs`, only the first
    part of a piece is read from there; `pairs` says where the second part is.

    Example: in the head of this file start is [0, 13, 10, 8], stop is [8, 18, 13, 10], and offsets
             are [0, 1, 3, 4]
    """

    start: np.ndarray  # (n,) int64
    stop: np.ndarray  # (n,)
    offsets: np.ndarray  # (R + 1,)
    seen: np.ndarray  # (n,) leading tokens of a piece that are context: targets of an earlier row
    pairs: Pairs | None = None  # --nsp

    @classmethod
    def of(
        cls,
        spans: np.ndarray,
        offsets: np.ndarray | None = None,
        seen: np.ndarray | int = 0,
        pairs: Pairs | None = None,
    ) -> "Rows":
        """Make rows of pieces (n, 2), in the given order; without `offsets`, one piece per row."""
        offsets = np.arange(len(spans) + 1) if offsets is None else offsets
        return cls(spans[:, 0], spans[:, 1], offsets, np.broadcast_to(seen, len(spans)), pairs)

    @classmethod
    def join(cls, parts: "list[Rows]") -> "Rows":
        """Concatenate the rows of all parts."""
        pieces = np.concatenate([np.diff(part.offsets) for part in parts])
        pairs = [part.pairs for part in parts if part.pairs is not None]
        return cls(
            start=np.concatenate([part.start for part in parts]),
            stop=np.concatenate([part.stop for part in parts]),
            offsets=np.concatenate(([0], np.cumsum(pieces))),
            seen=np.concatenate([part.seen for part in parts]),
            pairs=Pairs(*map(np.concatenate, zip(*pairs, strict=True))) if pairs else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, numbers: np.ndarray) -> "Rows":
        """Select rows by their numbers, in this order."""
        sizes = np.diff(self.offsets)[numbers]
        pieces = np.repeat(self.offsets[numbers], sizes) + numbered(sizes)
        return replace(self.pieces(pieces), offsets=np.concatenate(([0], np.cumsum(sizes))))

    def pieces(self, numbers: np.ndarray) -> "Rows":
        """Select pieces by their numbers, each in a row of its own."""
        return Rows(
            self.start[numbers],
            self.stop[numbers],
            np.arange(len(numbers) + 1),
            self.seen[numbers],
            self.pairs and self.pairs.take(numbers),
        )

    def of_rank(self, rank: int, world_size: int) -> tuple[np.ndarray, "Rows"]:
        """Return this rank's rows and their numbers; blank rows make all shares equal.

        Rows are dealt out to the ranks forwards, then backwards, and so on. If the heaviest come
        first, every rank gets nearly equal work, and does so in each micro-batch.

        Example: of 6 rows, rank 0 of 2 gets 0, 3, 4, and rank 1 gets 1, 2, 5
        """
        share = -(-len(self) // world_size)
        rounds = np.arange(share * world_size).reshape(share, world_size)
        rounds[1::2] = rounds[1::2, ::-1]
        filled = np.pad(self.offsets, (0, rounds.size - len(self)), mode="edge")
        numbers = rounds[:, rank]
        return numbers, replace(self, offsets=filled).take(numbers)

    def packed(self, items: np.ndarray, offsets: np.ndarray) -> "Rows":
        """Combine rows of one piece each: the new row r gets items[offsets[r]:offsets[r + 1]]."""
        return replace(self.pieces(items), offsets=offsets)

    def sums(self, of_piece: np.ndarray) -> np.ndarray:
        """Sum a value of each piece (n,) over the pieces of each row: (R,)."""
        return np.diff(np.concatenate(([0], np.cumsum(of_piece)))[self.offsets])


def reshaped_len(seq_len: int, limit: int) -> int:
    """Choose the length, at most `limit`, into which `reshape` cuts rows of `seq_len` tokens.

    Rows are as short as their number allows, in multiples of 8. So while the limit grows smoothly,
    the length grows in steps: rows of 1,024 are cut into rows of 512 at every limit from 512 to
    1,016.
    """
    rows_each = -(-seq_len // limit)
    return min(-(-seq_len // rows_each // MULTIPLE) * MULTIPLE, limit)


def reshape(spans: np.ndarray, seq_len: int, length: int) -> Rows:
    """Cut full rows of `seq_len` tokens into shorter ones without losing any text.

    Every sample gets the same number of rows of `length` tokens. Its last part starts early, inside
    the part before, to be as long as the others. The last sample of the stream may be short; its
    last rows may then be blank.

    Paper:    arXiv 2212.03597 (seqres)
    Args:     spans  (N, 2) first and one-past-last token of samples, at most seq_len tokens each
              length from `reshaped_len`
    Deviates: DeepSpeed (Megatron-DeepSpeed's pretrain_gpt.py, data_post_process) uses rows of
              exactly the limit and drops most of the tails. Keeping the tails of such rows would
              double the work at a limit just below seq_len
    Example:  reshape([[0, 10]], 10, 4) has rows of 4 with the parts 0..4, 4..8 and 6..10; the first
              2 tokens of the last part are only context, because the part before predicts them
    """
    start, stop = spans[:, :1], spans[:, 1:]  # (N, 1)
    begins = start + np.arange(0, seq_len, length)  # (N, rows of a sample)
    ends = np.minimum(begins + length, stop)
    reaching_back = np.maximum(np.minimum(begins, ends - length), start)
    has_text = begins < stop
    return Rows.of(
        np.stack((reaching_back[has_text], ends[has_text]), axis=1),
        offsets=np.concatenate(([0], np.cumsum(has_text))),
        seen=(begins - reaching_back)[has_text],
    )


# ---- rows -> Batch


def batch_of(
    store: AnyStore, rows: Rows, seq_len: int, special_ids: SpecialIds | None, seeds: Tensor
) -> Batch:
    """Read these rows as the model's input; for a BERT, mask tokens and set the answers of pairs.

    Args:    seeds (2,) int64: for the choice of masked tokens, and for what replaces each
    Returns: Batch of (B, seq_len)
    """
    batch = collate(store, rows, seq_len, special_ids)
    if special_ids is None:
        return batch
    drawn = bits(seeds, places(rows, batch).flatten(), 1).view(2, *batch.tokens.shape)
    batch = mask_tokens(batch, drawn, special_ids)
    if rows.pairs is None:
        return batch
    _, _, positions, doc_ids = batch.with_documents()
    targets = batch.targets.clone()
    answers = rows.pairs.answers(rows.start, rows.stop)
    targets[(positions == 0) & (doc_ids >= 0)] = torch.from_numpy(answers)  # at each [CLS]
    return batch._replace(targets=targets)


def collate(
    store: AnyStore, rows: Rows, seq_len: int, special_ids: SpecialIds | None = None
) -> Batch:
    """Read the pieces of each row from the store, one after the other.

    Returns: Batch of (B, seq_len); for a BERT all text is a target, until `mask_tokens` chooses
    Raises:  ValueError for a store with a token outside its vocabulary
    Cost:    a few passes over B T numbers, however many pieces there are
    """
    B, T = len(rows), seq_len
    special_tokens = ADDED_TOKENS["pairs" if rows.pairs else "bert"] if special_ids else 0
    length = rows.stop - rows.start + special_tokens  # (n,)
    # Treat the rest of each row as one more piece, so that the pieces leave no gaps.
    ends = rows.offsets[1:]
    lengths = np.insert(length, ends, T - rows.sums(length))  # (n + B,)
    begins = np.cumsum(lengths) - lengths
    heads = begins[np.insert(np.ones(len(length), bool), ends, False)]  # (n,) without the rests

    def of_tokens(of_piece: np.ndarray, of_rest: int = 0) -> np.ndarray:
        """Repeat a value of each piece (n,) for each of its tokens: (B T,)."""
        return np.repeat(np.insert(of_piece, ends, of_rest), lengths)

    positions = np.arange(B * T) - np.repeat(begins, lengths)
    doc_ids = of_tokens(numbered(np.diff(rows.offsets)), of_rest=-1)
    place = positions + of_tokens(rows.start - (special_tokens > 0))  # in the store
    if rows.pairs:
        first = of_tokens(rows.pairs.first)
        second = of_tokens(rows.pairs.second - rows.start) - first - 1  # distance to jump ahead
        place += np.where(positions > first + 1, second, 0)  # after the [SEP] in the middle
    text = store.tokens.take(place, mode="clip").astype(np.int64)  # (B T,)
    if special_ids:
        tokens, targets = bert_inputs(text, rows, heads, heads + length - 1, special_ids)
    else:
        tokens, targets = gpt_inputs(text, rows, heads, store)
    padding = doc_ids < 0
    is_full = not padding.any()
    if not is_full:
        tokens[padding], positions[padding] = store.meta["end_of_text"], 0
        targets[padding] = IGNORE
    if rows.seen.any():
        targets[positions < of_tokens(rows.seen)] = IGNORE
    store.check_tokens(max(tokens.max(), targets.max()))
    fields = [torch.from_numpy(f.reshape(B, T)) for f in (tokens, targets, positions, doc_ids)]
    if len(rows.start) == B and is_full:
        fields[2:] = None, None
    return Batch(*fields)


def gpt_inputs(
    text: np.ndarray, rows: Rows, heads: np.ndarray, store: AnyStore
) -> tuple[np.ndarray, np.ndarray]:
    """Make every token of a piece a target, and the token before it its input.

    For the first token of a piece, that is the token before it in the store: end-of-text where a
    document begins.

    Args:    text  (B T,) the tokens of the pieces
             heads (n,) where in `text` each piece begins
    Returns: tokens and targets, (B T,)
    """
    tokens = np.empty_like(text)
    tokens[1:] = text[:-1]
    before = store.tokens.take(rows.start - 1, mode="clip")
    tokens[heads] = np.where(rows.start > 0, before, store.meta["end_of_text"])
    return tokens, text


def bert_inputs(
    text: np.ndarray, rows: Rows, heads: np.ndarray, lasts: np.ndarray, special_ids: SpecialIds
) -> tuple[np.ndarray, np.ndarray]:
    """Put [CLS] before and [SEP] after each piece, and one more [SEP] between the parts of a pair.

    Args:    text         (B T,) the tokens of the pieces; arbitrary where special tokens go
             heads, lasts (n,) first and last token of each piece, special tokens included
    Returns: tokens and targets, (B T,); special tokens are not targets
    """
    tokens, targets = text, text.copy()
    seps = lasts
    if rows.pairs:
        seps = np.concatenate((lasts, heads + rows.pairs.first + 1))
    tokens[heads], tokens[seps] = special_ids.cls, special_ids.sep
    targets[heads] = targets[seps] = IGNORE
    return tokens, targets


def places(rows: Rows, batch: Batch) -> Tensor:
    """Number each token by its place in the store, (B, T) int64: the key of its random numbers.

    So a token gets the same random numbers wherever its piece is packed. Special tokens count as
    text, the second part of a pair counts as if it followed the first, and padding has arbitrary
    numbers.
    """
    _, _, positions, doc_ids = batch.with_documents()
    piece = torch.from_numpy(rows.offsets[:-1])[:, None] + doc_ids  # (B, T)
    start = torch.from_numpy(np.append(rows.start, 0))
    return start[piece.clamp(0, len(rows.start))] + positions


# ---- what counts in the loss


def counts(rows: Rows, masked: bool, per_document: bool) -> tuple[int, float | None]:
    """Compute what the sum of losses of these rows is divided by, and the weight of an answer.

    Only lengths are needed, so a rank knows the count for all ranks without reading their rows. All
    answers together weigh as much as all targets: the loss is the mean loss of a target plus the
    mean loss of an answer.

    Args:    masked       True for a BERT, which predicts some tokens; False for a GPT
             per_document count documents in place of targets
    Returns: the number of targets, or of documents; the weight of an answer, None without pairs
    """
    length = rows.stop - rows.start
    targets = masked_tokens(length) if masked else length - rows.seen
    total = len(targets) if per_document else int(targets.sum())
    if rows.pairs is None:
        return total, None
    answers = rows.pairs.answers(rows.start, rows.stop) != IGNORE
    return total, total / max(int(answers.sum()), 1)


def shares_of(batch: Batch, per_document: bool, of_answer: float | None) -> Tensor | None:
    """Compute the weight of each target in the loss, (B, T) float32; None if all weigh 1.

    Paper: Krell et al., arXiv 2107.02027, section 3.2.3: without weights, long documents dominate
    Args:  per_document every document weighs 1, divided equally among its targets
           of_answer    the weight of the answer at each [CLS]; None: there are no answers
    """
    if of_answer is None and not per_document:
        return None
    _, targets, positions, doc_ids = batch.with_documents()
    counts = (targets != IGNORE).float()
    if of_answer is not None:
        answers = (positions == 0) & (targets != IGNORE)
        counts[answers] = 0
    if per_document:
        documents = doc_ids.clamp(min=0)  # (B, T)
        sums = torch.zeros_like(counts).scatter_add(1, documents, counts)
        counts /= sums.gather(1, documents).clamp(min=1)
    if of_answer is not None:
        counts[answers] = of_answer
    return counts
