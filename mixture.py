"""Several stores read as one: --data wiki=0.7,code=0.3.

A `Mixture` offers what a Store does, and `MixedSamples` what `Samples` in data.py does. The stores
follow one another in a single numbering of tokens, and in one of samples:

    wiki  0 .......... 999        token 0 of code is token 1000 of the mixture
    code  1000 ... 1499

A share counts tokens, but a draw takes a whole sample, and mean lengths differ from store to store.
So draws are dealt out in proportion to weight / mean length. The rule (`apportioned`) gives each
store its share of every stretch of a run, and depends only on the number of the draw:

    shares 1/2, 1/4, 1/4 of a, b, c     draw   0  1  2  3  4  5  6  7
                                        store  c  a  b  a  c  a  b  a

Evaluation reads the stores one by one, and averages their results by weight (evaluate.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.clock import seed_of, shuffled
from support.store import COUNTS, Store

EXAMPLE = "as in --data wiki=0.7,code=0.3"
ONE = 1 << 32  # a share of 1: shares are integers, in units of 2^-32


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
        path, _, text = entry.strip().rpartition("=")
        try:
            weight = Fraction(text)
        except (ValueError, ZeroDivisionError):
            weight = -1
        is_new = Path(path).resolve() not in [Path(other).resolve() for other, _ in weights]
        if not (path and weight >= 0 and is_new):
            raise ValueError(f"--data {given}: {entry!r} is not another PATH=WEIGHT, {EXAMPLE}")
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
    has_prompts: bool  # whether some tokens of any store are no targets

    def targets_in(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Count the targets in spans (n,), each inside one store."""
        counts = stop - start
        for number, chosen in by_part(self.tokens.starts, start) if self.has_prompts else ():
            ends = (x[chosen] - self.tokens.starts[number] for x in (start, stop))
            counts[chosen] = self.parts[number].targets_in(*ends)
        return counts

    check_tokenizer = Store.check_tokenizer
    check_tokens = Store.check_tokens

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
            has_prompts=any(part.has_prompts for part in parts),
        )


AnyStore = Store | Mixture


def stores_of(store: AnyStore) -> list[tuple[str, Store, float]]:
    """Return the name, store and weight of each part; a single store is its only part."""
    if isinstance(store, Store):
        return [(store.path.name, store, 1.0)]
    return list(zip(store.names, store.parts, map(float, store.weights), strict=True))


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


class MixedSamples:
    """The training samples of a mixture, with the methods of `Samples` that plan.py calls.

    Sample ids continue from one store to the next, and so do the numbers of tokens.
    """

    def __init__(self, store: Mixture, parts: Sequence):
        self.store, self.parts = store, parts
        self.special_tokens = self.parts[0].special_tokens
        self.first_ids = np.cumsum([0, *map(len, self.parts)])  # (stores + 1,)
        # with a BERT's special tokens, as on the clock
        self.mean_lengths = [Fraction(p.tokens, len(p)) + p.special_tokens for p in self.parts]
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
        """Say how often a run reads each store: wiki 70.0%, 0.32 passes; code 30.0%, 4.1 passes."""
        shown = []
        for number, part in enumerate(self.parts):
            name, weight = self.store.names[number], self.store.weights[number]
            passes = weight * tokens / (len(part) * self.mean_lengths[number])
            shown.append(f"{name} {float(weight):.1%}, {float(passes):.2f} passes")
        return "; ".join(shown)


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
