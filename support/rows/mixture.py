"""Several stores read as one, each with a share of the tokens: --data wiki=0.7,code=0.3

The stores of a mixture lie side by side, in one space of token numbers and one of sample ids:

    wiki  0 .......... 999        token 0 of code is token 1000 of the mixture
    code  1000 ... 1499

The shares are of tokens, but samples are what is drawn, and their mean length differs from store to
store. So the draws are shared out in proportion to weight / mean length, by a rule that gives each
store its share of every stretch of a run and needs only the number of the draw (`apportioned`):

    shares 1/2, 1/4, 1/4 of a, b, c     draw   0  1  2  3  4  5  6  7
                                        store  c  a  b  a  c  a  b  a

Lengths are those of whole samples: where --curriculum seqlen cuts off a BERT's unpacked samples,
stores of longer ones lose more. Does not evaluate a mixture: see `Evaluation` in evaluate.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.base.rng import seed_of, shuffled
from support.rows.samples import Samples
from support.text.store import Store

EXAMPLE = "as in --data wiki=0.7,code=0.3"
ONE = 1 << 32  # a share of 1: shares are whole numbers of 2^-32
COUNTS = (
    "documents",
    "tokens",
    "bytes",
    "train_documents",
    "train_tokens",
    "train_bytes",
)  # of a store

# ---- the flag


class Entry(NamedTuple):
    """One store of a mixture, as the flag names it."""

    path: str
    weight: Fraction


def entries_of(given: str | Path) -> list[Entry]:
    """Read PATH=WEIGHT,PATH=WEIGHT; [] for the path of one store.

    A path that contains '=' means one store if that folder exists; in a mixture the last '=' of an
    entry counts. A folder with ',' in its name can be read alone, but not in a mixture.

    Raises:   ValueError for an entry without path or weight, and for weights that are not shares
    Example:  "wiki=7,code=3" is (wiki, 7/10) and (code, 3/10)
    """
    given = str(given)
    if "=" not in given or Path(given).is_dir():
        return []
    entries = []
    for entry in given.split(","):
        path, _, weight = entry.rpartition("=")
        if not (path and weight):
            raise ValueError(f"--data {given}: {entry!r} is not PATH=WEIGHT, {EXAMPLE}")
        entries.append(Entry(path, weight_of(weight, given)))
    total = sum(entry.weight for entry in entries)
    if not total:
        raise ValueError(f"--data {given}: all weights are 0: give at least one store a share")
    return [Entry(path, weight / total) for path, weight in entries]


def weight_of(text: str, given: str) -> Fraction:
    """A number from 0 on, as exact as it is written, so that 0.7 is 7/10 on every machine."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"--data {given}: the weight {text} is not a number of 0 or more")
    return Fraction(text) if number else Fraction(0)


# ---- stores side by side


def open_store(given: str | Path) -> "AnyStore":
    """A store, or a mixture of several.

    Raises: ValueError as Store.open and entries_of do, and for stores that cannot be mixed
    """
    entries = entries_of(given)
    if not entries and "," in str(given) and not Path(given).exists():
        raise ValueError(f"--data {given}: several stores need weights, {EXAMPLE}")
    return Mixture.open(str(given), entries) if entries else Store.open(given)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Stores of one tokenizer, and the share of the tokens that each of them has.

    Whatever reads tokens can use it as a Store. Documents and samples are those of its parts.
    """

    path: str  # as the flag names it, for messages
    meta: dict  # counts are sums; sha256 identifies the stores, their order and their weights
    parts: tuple[Store, ...]
    weights: tuple[Fraction, ...]  # their sum is 1
    names: tuple[str, ...]
    tokens: "MixedTokens"

    check_tokenizer = Store.check_tokenizer
    check_tokens = Store.check_tokens

    @property
    def bytes_per_token(self) -> float:
        """As they are mixed."""
        shares = zip(self.weights, self.parts, strict=True)
        return sum(float(weight) * part.bytes_per_token for weight, part in shares)

    @classmethod
    def open(cls, given: str, entries: Sequence[Entry]) -> "Mixture":
        parts = tuple(Store.open(entry.path) for entry in entries)
        first, seen = parts[0].meta, []
        for part in parts:
            meta = part.meta
            if meta["tokenizer_fingerprint"] != first["tokenizer_fingerprint"]:
                others = f"{parts[0].path} with {first['tokenizer']}: prepare one of them again"
                made_with = f"{part.path} was made with tokenizer {meta['tokenizer']}"
                raise ValueError(f"--data {given}: {made_with} and {others}")
            if meta["sha256"] in seen:
                same = f"{part.path} has the same text as another store"
                raise ValueError(f"--data {given}: {same}: give one of them both weights")
            seen.append(meta["sha256"])
        # --resume compares this: stores may move, but text, order and weights have to be the same
        sha256 = [[float(entry.weight), text] for entry, text in zip(entries, seen, strict=True)]
        names = tuple(part.path.name for part in parts)
        counts = {name: sum(part.meta.get(name, 0) for part in parts) for name in COUNTS}
        return cls(
            path=given,
            meta={**first, **counts, "sha256": {"mixture": sha256}},
            parts=parts,
            weights=tuple(entry.weight for entry in entries),
            # folders' names; their paths where two folders have the same name
            names=names if len({*names}) == len(names) else tuple(str(p.path) for p in parts),
            tokens=MixedTokens([part.tokens for part in parts]),
        )


AnyStore = Store | Mixture


class MixedTokens:
    """Arrays of tokens side by side, without a copy.

    Every array ends with the end-of-text of its last document, so the token before any document is
    an end-of-text here too.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0, *(len(array) for array in arrays)])  # (parts + 1,)

    def take(self, places: np.ndarray, mode: str) -> np.ndarray:
        """As ndarray.take of the arrays joined; `mode` is always "clip"."""
        places = np.clip(places, 0, self.starts[-1] - 1)
        tokens = np.empty(len(places), self.arrays[0].dtype)
        for number, chosen in by_part(self.starts, places):
            array, start = self.arrays[number], self.starts[number]
            tokens[chosen] = array.take(places[chosen] - start, mode=mode)
        return tokens


def by_part(starts: np.ndarray, places: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Of each part that begins at starts[i]: i, and which of the places lie in it."""
    part = np.searchsorted(starts, places, side="right") - 1
    for number in range(len(starts) - 1):
        yield number, np.flatnonzero(part == number)


# ---- samples of all stores


def samples_in(store: AnyStore, kind: str, seq_len: int) -> "Samples | MixedSamples":
    """The training samples of a store, or of a mixture."""
    if isinstance(store, Mixture):
        return MixedSamples(store, kind, seq_len)
    return Samples(store, kind, seq_len)


class MixedSamples:
    """The training samples of a mixture, with what a plan needs of `Samples`.

    Sample ids go on from store to store, as the numbers of tokens do.

    Raises: ValueError for a store without a training sample
    """

    def __init__(self, store: Mixture, kind: str, seq_len: int):
        self.store, self.kind, self.seq_len = store, kind, seq_len
        self.parts = [samples_in(part, kind, seq_len) for part in store.parts]
        self.special_tokens = self.parts[0].special_tokens
        self.first_ids = np.cumsum([0, *map(len, self.parts)])  # (stores + 1,)
        self.mean_lengths = [mean_length(part) for part in self.parts]
        lengths = zip(store.weights, self.mean_lengths, strict=True)
        self.shares = nested_shares([weight / length for weight, length in lengths])

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """(m,) numbers of draws -> (m,) sample ids; each store has an order of its own.

        The first store's order is that of a run on it alone.
        """
        ids = np.empty(len(draws), np.int64)
        dealt = apportioned(draws, self.shares)
        for number, part in enumerate(self.parts):
            chosen = dealt.store == number
            key = seed_of(seed, "store", number) if number else seed
            ids[chosen] = self.first_ids[number] + shuffled(dealt.draw[chosen], len(part), key)
        return ids

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the mixture."""
        spans = np.empty((len(ids), 2), np.int64)
        for number, chosen in by_part(self.first_ids, ids):
            of_part = self.parts[number].spans(ids[chosen] - self.first_ids[number])
            spans[chosen] = of_part + self.store.tokens.starts[number]
        return spans

    def passes(self, tokens: int) -> str:
        """Each store's share of a run of this many tokens, and how often the run reads it.

        Example: wiki 70.0%, 0.32 passes; code 30.0%, 4.10 passes
        """
        shown = []
        for number, part in enumerate(self.parts):
            name, weight = self.store.names[number], self.store.weights[number]
            passes = weight * tokens / (len(part) * self.mean_lengths[number])
            shown.append(f"{name} {float(weight):.1%}, {float(passes):.2f} passes")
        return "; ".join(shown)


def mean_length(samples: Samples) -> Fraction:
    """Mean tokens of a sample, as the clock counts them: with a BERT's special tokens."""
    return Fraction(samples.tokens, len(samples)) + samples.special_tokens


# ---- which store a draw is from


def nested_shares(often: Sequence[Fraction]) -> list[int]:
    """The share of each store in the draws that the stores before it leave, in parts of 2^32.

    Args:    often how often each store is drawn, in proportion to the others
    Example: [2, 1, 1] is [1/2, 1/2, 1] of 2^32
    """
    shares = []
    for number, drawn in enumerate(often):
        left = sum(often[number:])
        share = round(ONE * drawn / left) if left else 0
        if drawn:  # rounding leaves something to every store that has a weight
            share = min(max(share, 1), ONE - any(often[number + 1 :]))
        shares.append(share)
    return shares


class Dealt(NamedTuple):
    """Which store each draw is from, (m,) each."""

    store: np.ndarray
    draw: np.ndarray  # its number among the draws of that store


def apportioned(draws: np.ndarray, shares: Sequence[int]) -> Dealt:
    """Deal draws out to stores, so that each has its share of the first n draws for every n.

    The first store gets floor(n p) of the first n draws. The draws that it leaves are numbered anew
    and dealt out among the others in the same way. So every store's count differs from its share by
    less than the number of stores, and the number of a draw is all that is needed to place it.

    Args:    draws  (m,) from 0 on, below 2^63
             shares of `nested_shares`
    Example: shares [1/2, 1/2, 1] of 2^32: draws 0 to 3 are the first of store 2, the first of store
             0, the first of store 1 and the second of store 0
    """
    store, draw = np.zeros((2, len(draws)), np.int64)
    left, n = np.arange(len(draws)), np.asarray(draws).astype(np.uint64)
    for number, share in enumerate(shares):
        before = share_of(n, share)
        chosen = share_of(n + np.uint64(1), share) > before
        store[left[chosen]] = number
        draw[left[chosen]] = before[chosen]
        left, n = left[~chosen], (n - before)[~chosen]
    return Dealt(store, draw)


def share_of(n: np.ndarray, share: int) -> np.ndarray:
    """floor(n share / 2^32), exactly: the product itself may have more than 64 bits."""
    high, low = n >> np.uint64(32), n & np.uint64(ONE - 1)
    return high * np.uint64(share) + (low * np.uint64(share) >> np.uint64(32))
