"""Several stores read as one, each with a share of the tokens: --data wiki=0.7,code=0.3

The parts of a mixture lie side by side in one space of token numbers:

    wiki  0 .......... 999        token 0 of code is token 1000 of the mixture
    code  1000 ... 1499

Which part a draw belongs to is decided in support/rows/mixture.py, what an evaluation of all parts
says in support/evaluation/scoring.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.base.rng import seed_of, shuffled
from support.rows.samples import SPLITS, Beyond, Samples
from support.text.store import Store

EXAMPLE = "as in --data wiki=0.7,code=0.3"
SUMMED = ("documents", "tokens", "bytes", "train_documents", "train_tokens", "train_bytes")


class Entry(NamedTuple):
    """One store of a mixture, as the flag names it."""

    path: str
    weight: Fraction


def entries_of(given: str | Path) -> list[Entry]:
    """Read PATH=WEIGHT,PATH=WEIGHT; none for the path of one store.

    A path with '=' in it is one store's if there is such a folder; in a mixture the last '=' of an
    entry counts. A folder with ',' in its name can be read alone, but not in a mixture.

    Raises:   ValueError for an entry without a path or a weight, and for weights that are no shares
    Example:  "wiki=7,code=3" is (wiki, 7/10) and (code, 3/10)
    """
    given = str(given)
    if "=" not in given or Path(given).is_dir():
        return []
    entries = []
    for entry in given.split(","):
        path, equals, weight = entry.rpartition("=")
        if not (equals and path and weight):
            raise ValueError(f"--data {given}: {entry!r} is no PATH=WEIGHT, {EXAMPLE}")
        entries.append(Entry(path, weight_of(weight, f"--data {given}")))
    total = sum(entry.weight for entry in entries)
    if not total:
        raise ValueError(f"--data {given}: all weights are 0: give one store at least a part")
    return [Entry(path, weight / total) for path, weight in entries]


def weight_of(text: str, flag: str) -> Fraction:
    """A number from 0 on, as exact as it is written, so that 0.7 is 7/10 on every machine."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{flag}: the weight {text} is not a number of 0 or more, {EXAMPLE}")
    return Fraction(text) if number else Fraction(0)


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
    """Stores of one tokenizer and the share of the tokens that each of them has.

    It has what reads tokens needs of a Store: path, meta, tokens, the checks. Documents and samples
    are those of its parts.
    """

    path: str  # as the flag names it, for messages
    meta: dict  # counts are sums; sha256 tells the stores, their order and their weights
    parts: tuple[Store, ...]
    weights: tuple[Fraction, ...]  # which sum to 1
    names: tuple[str, ...]
    tokens: "MixedTokens"

    check_tokenizer = Store.check_tokenizer
    check_tokens = Store.check_tokens

    @classmethod
    def open(cls, given: str, entries: Sequence[Entry]) -> "Mixture":
        parts = tuple(Store.open(entry.path) for entry in entries)
        weights = tuple(entry.weight for entry in entries)
        first, seen = parts[0].meta, []
        for part in parts:
            meta = part.meta
            if meta["tokenizer_fingerprint"] != first["tokenizer_fingerprint"]:
                raise ValueError(
                    f"--data {given}: {part.path} was made with tokenizer {meta['tokenizer']} and"
                    f" {parts[0].path} with {first['tokenizer']}: prepare one of them again"
                )
            if meta["sha256"] in seen:
                raise ValueError(
                    f"--data {given}: {part.path} has the text of another store in it: name each"
                    " store once, with the sum of its weights"
                )
            seen.append(meta["sha256"])
        # what a run that goes on compares: the stores may have moved, all else is as it was
        mixed = [[float(weight), sha256] for weight, sha256 in zip(weights, seen, strict=True)]
        counts = {name: sum(part.meta.get(name, 0) for part in parts) for name in SUMMED}
        tokens = MixedTokens([part.tokens for part in parts])
        meta = {**first, **counts, "sha256": {"mixture": mixed}}
        return cls(given, meta, parts, weights, names_of(parts), tokens)

    @property
    def train_tokens(self) -> int:
        return self.meta["train_tokens"]

    @property
    def train_documents(self) -> int:
        return self.meta["train_documents"]


def names_of(parts: Sequence[Store]) -> tuple[str, ...]:
    """The folders' own names; the paths as they were given where two folders share one."""
    names = tuple(part.path.name for part in parts)
    return names if len({*names}) == len(names) else tuple(str(part.path) for part in parts)


AnyStore = Store | Mixture


class MixedTokens:
    """Arrays of tokens side by side, without a copy.

    The token before the first one of an array is the last one of the array before, which is the
    end-of-text that ends its last document. So a document begins after end-of-text here too.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0, *(len(array) for array in arrays)])  # (parts + 1,)

    def take(self, places: np.ndarray, mode: str) -> np.ndarray:
        """The tokens at these places, as ndarray.take gives them; `mode` is its word, "clip"."""
        places = np.clip(places, 0, self.starts[-1] - 1)
        part = np.searchsorted(self.starts, places, side="right") - 1
        found = np.empty(len(places), self.arrays[0].dtype)
        for number, array in enumerate(self.arrays):
            mine = np.flatnonzero(part == number)
            found[mine] = array.take(places[mine] - self.starts[number], mode=mode)
        return found


def refusals_of_mixture(settings: Any, ranked: Sequence[str]) -> list[tuple[bool, str]]:
    """What a mixture cannot be combined with, as (condition, what to tell the user).

    Args:   ranked metrics of a curriculum that sort the samples of a store
    Raises: ValueError for a --data that is neither a store nor a mixture
    """
    if settings.data.data is None or not entries_of(settings.data.data):
        return []
    together = "prepare their texts together, as one store"
    return [
        (
            bool(ranked),
            f"--curriculum {','.join(ranked)} sorts the samples of one store, and --data names a"
            f" mixture: {together}, or use --curriculum seqlen",
        ),
        (
            settings.model.nsp,
            "--nsp exchanges texts among the documents of one store, and --data names a mixture:"
            f" {together}, or leave out --nsp",
        ),
    ]


# ---- mixed samples
#
# Which sample of which store a draw from a mixture is: a function of the draw's number alone.
#
# A mixture's shares are of tokens, but what is drawn is samples, whose lengths differ from store to
# store. So a store has as many draws as its weight divided by the mean length of its samples says.
# Lengths are those of whole samples: where --curriculum seqlen cuts off a BERT's unpacked ones, the
# longer ones lose more.
#
# Draws are dealt out one by one, so that any stretch of a run has each store's share:
#
#     shares 1/2, 1/4, 1/4 of a, b, c     draw   0  1  2  3  4  5  6  7
#                                         store  c  a  b  a  c  a  b  a


ONE = 1 << 32  # in which a share is counted


def samples_in(
    store: AnyStore, kind: str, seq_len: int, long: str = "split"
) -> "Samples | MixedSamples":
    """The training samples of a store, or of a mixture.

    Raises: ValueError for a store without any
    """
    if isinstance(store, Mixture):
        return MixedSamples(store, kind, seq_len, long)
    samples = Samples(store, kind, seq_len, long=long)
    if len(samples) == 0:
        raise ValueError(
            f"{store.path} holds no text to train on: prepare it with another --holdout"
        )
    return samples


class MixedSamples:
    """The training samples of a mixture; what a plan needs of `Samples`, whose arguments it takes.

    Sample ids go on from store to store, as the numbers of tokens do.

    Raises: ValueError for a store without a training sample
    """

    def __init__(self, store: Mixture, kind: str, seq_len: int, long: str = "split"):
        self.store, self.kind, self.seq_len, self.long = store, kind, seq_len, long
        self.parts = [Samples(part, kind, seq_len, long=long) for part in store.parts]
        for part in self.parts:
            if len(part) == 0:
                raise ValueError(
                    f"--data {store.path}: {part.store.path} holds no {SPLITS['train']} text:"
                    " prepare it with another --holdout, or leave it out"
                )
        self.special_tokens = self.parts[0].special_tokens
        self.first_ids = np.cumsum([0, *map(len, self.parts)])  # (stores + 1,)
        self.mean_lengths = [mean_length(part) for part in self.parts]
        of_token = zip(store.weights, self.mean_lengths, strict=True)
        self.shares = nested_shares([weight / length for weight, length in of_token])

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """(m,) numbers of draws -> (m,) sample ids, each store's in an order of its own.

        The first store's order is that of a run on it alone.
        """
        ids = np.empty(len(draws), np.int64)
        dealt = apportioned(draws, self.shares)
        for number, part in enumerate(self.parts):
            mine = dealt.store == number
            key = seed_of(seed, "store", number) if number else seed
            ids[mine] = self.first_ids[number] + shuffled(dealt.draw[mine], len(part), key)
        return ids

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the mixture."""
        found = np.empty((len(ids), 2), np.int64)
        store = np.searchsorted(self.first_ids, ids, side="right") - 1
        for number, part in enumerate(self.parts):
            mine = store == number
            spans = part.spans(ids[mine] - self.first_ids[number])
            found[mine] = spans + self.store.tokens.starts[number]
        return found

    def in_words(self, tokens: int) -> str:
        """What of so many tokens each store gives, and how often that is all of it.

        Example: wiki 70.0%, 0.32 passes; code 30.0%, 4.10 passes
        """
        said = []
        each = zip(self.store.names, self.store.weights, self.parts, self.mean_lengths, strict=True)
        for name, weight, part, length in each:
            passes = weight * tokens / (len(part) * length)
            said.append(f"{name} {float(weight):.1%}, {float(passes):.2f} passes")
        return "; ".join(said)

    def beyond_a_row(self) -> Beyond:
        """As of `Samples`, of all stores together."""
        found = [part.beyond_a_row() for part in self.parts]
        return Beyond(*map(sum, zip(*found, strict=True)))


def mean_length(samples: Samples) -> Fraction:
    """Tokens of a sample on average, as the clock counts them: a BERT's special tokens included."""
    tokens = samples.stop - samples.start - samples.without_eot * len(samples.documents)
    if samples.long == "truncate":
        tokens -= samples.beyond_a_row().tokens
    return Fraction(tokens, len(samples)) + samples.special_tokens


def nested_shares(draws: Sequence[Fraction]) -> list[int]:
    """What each store has of the draws that those before it leave, in parts of 2^32.

    Args:    draws how often a store is drawn in proportion to the others
    Example: [2, 1, 1] is [1/2, 1/2, 1] of 2^32
    """
    shares = []
    for number, often in enumerate(draws):
        left = sum(draws[number:])
        share = round(ONE * often / left) if left else 0
        if often:  # rounding leaves something to each that has a weight
            share = min(max(share, 1), ONE - any(draws[number + 1 :]))
        shares.append(share)
    return shares


class Dealt(NamedTuple):
    """Whose each of some draws is, (m,) each."""

    store: np.ndarray
    draw: np.ndarray  # its number among the draws of that store


def apportioned(draws: np.ndarray, shares: Sequence[int]) -> Dealt:
    """Deal draws out to stores, so that each has its share of the first n draws for every n.

    The first store has floor(n p) of the first n draws; those that it leaves are numbered anew and
    dealt out among the others likewise. So a store's count is never away from its share by as many
    draws as there are stores, and no history is needed to know whose a draw is.

    Args:    draws  (m,) from 0 on, below 2^63
             shares of `nested_shares`
    Example: shares [1/2, 1/2, 1] of 2^32: draws 0 to 3 are the first of store 2, the first of store
             0, the first of store 1 and the second of store 0
    """
    store, number = np.zeros((2, len(draws)), np.int64)
    left, n = np.arange(len(draws)), np.asarray(draws).astype(np.uint64)
    for current, share in enumerate(shares):
        before = share_of(n, share)
        is_mine = share_of(n + np.uint64(1), share) > before
        store[left[is_mine]], number[left[is_mine]] = current, before[is_mine]
        left, n = left[~is_mine], (n - before)[~is_mine]
    return Dealt(store, number)


def share_of(n: np.ndarray, share: int) -> np.ndarray:
    """floor(n share / 2^32), exactly: the product itself may have more than 64 bits."""
    high, low = n >> np.uint64(32), n & np.uint64(ONE - 1)
    return high * np.uint64(share) + (low * np.uint64(share) >> np.uint64(32))
