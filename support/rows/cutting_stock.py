"""Packing as a cutting-stock problem: how many packs of each pattern, solved with SciPy.

A pattern is the lengths of the documents in one pack, longest first. Everything works on
histograms, counts[l] documents of length l, so the time does not depend on their number. Documents
that rounding leaves over are not packed here; packing.py does that with its greedy packer.

    relax     column generation: fractional packs of each pattern, and a lower bound
    regress   the packing paper's least squares over all patterns that fill a pack
    fill      put documents into whole packs of patterns

Papers: Gilmore & Gomory, Operations Research 9 (1961), column generation; Farley, Operations
Research 38 (1990), the bound; Krell et al., arXiv 2107.02027, least squares.
"""

from collections.abc import Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csc_array

Pattern = tuple[int, ...]

NEED_SCIPY = ("nnlshp", "optimal")  # packers
UNIT = 1 << 40  # a pack costs this much: prices are whole numbers, which makes the bound exact
WORTH_IT = UNIT + 1024  # what a pattern must exceed: 1024 is more than the solver's rounding error
FEW = 30_000  # up to this many patterns go to the solver at once, without column generation
MOST = 100_000  # patterns in a least-squares problem: 400 MB of matrix at length 512
ROUNDS = 500  # of column generation at most; the bound holds after each of them


class Filled(NamedTuple):
    """Packs that hold the same lengths."""

    packs: int
    pattern: Pattern


def require_scipy(packer: str, flag: str = "--packer") -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise ValueError(f"{flag} {packer} needs SciPy: pip install -e '.[pack]'") from None


def patterns_that_fill(space: int, most: int, longest: int) -> Iterator[Pattern]:
    """All ways to write `space` as a sum of at most `most` lengths, none above `longest`.

    Example: list(patterns_that_fill(4, 2, 4)) == [(4,), (3, 1), (2, 2)]
    """
    if space <= longest:
        yield (space,)
    if most > 1:
        for length in range(min(space - 1, longest), -(-space // most) - 1, -1):
            for rest in patterns_that_fill(space - length, most - 1, length):
                yield (length, *rest)


def number_that_fill(space: int, most: int) -> int:
    """Count the patterns of `patterns_that_fill`; stops counting somewhere above MOST.

    There are as many sums of at most k lengths as sums of lengths up to k.
    """
    ways = [1] + [0] * space
    for part in range(1, min(most, space) + 1):
        for total in range(part, space + 1):
            ways[total] += ways[total - part]
        if ways[space] > MOST:
            break
    return ways[space]


def matrix(patterns: list[Pattern], lengths: np.ndarray) -> "csc_array":
    """(lengths, patterns) how often each length occurs in each pattern."""
    from scipy.sparse import coo_array

    places = np.searchsorted(lengths, np.fromiter(chain.from_iterable(patterns), np.int64))
    columns = np.repeat(np.arange(len(patterns)), [len(pattern) for pattern in patterns])
    shape = (len(lengths), len(patterns))
    return coo_array((np.ones(len(places)), (places, columns)), shape).tocsc()


# ---- column generation


def least_packs(counts: np.ndarray, max_per_pack: int) -> int:
    """A lower bound on the number of packs, computed from the histogram alone.

    For any length t: a document longer than max_len - t shares its pack with none of t or more, and
    no two documents longer than half a pack share one. Documents from t to half a pack can only use
    the space that the latter leave; the rest needs packs of its own. The best t counts.

    Paper:   Martello & Toth, Discrete Applied Mathematics 28 (1990), bound L2
    Example: three documents of 5 in packs of 8 need three, though 15 tokens are less than two packs
    """
    max_len, lengths = len(counts) - 1, np.arange(len(counts))
    number, tokens = np.cumsum(counts), np.cumsum(counts * lengths)
    t, half = np.arange(max_len // 2 + 1), max_len // 2
    long = number[-1] - number[max_len - t]
    middle = number[max_len - t] - number[half]
    free = middle * max_len - (tokens[max_len - t] - tokens[half])
    short = tokens[half] - np.where(t > 0, tokens[t - 1], 0)
    more = np.maximum(-((free - short) // max_len), 0)
    return max(int((long + middle + more).max()), -(-int(number[-1]) // max_per_pack))


class Relaxed(NamedTuple):
    patterns: list[Pattern]
    packs: np.ndarray  # (patterns,) float64
    lower_bound: int  # no packing has fewer packs


def relax(counts: np.ndarray, max_per_pack: int, patterns: list[Pattern]) -> Relaxed:
    """Minimise the number of packs, allowing fractions of them, by column generation.

    The linear program over some patterns puts a price on every length. A pattern whose documents
    cost more than a pack would lower the total. A knapsack finds such patterns and adds them; when
    there is none left, the solution is optimal over all patterns. In every round, the price of all
    documents divided by the price of the dearest pack is a lower bound.

    A place may hold a shorter document than it was made for. So no length is cheaper than a shorter
    one, and column generation needs half as many rounds.

    Args: counts   (max_len + 1,) documents of each length
          patterns to begin with, covering every length; if few fill a pack, all of those are added
    Cost: some tens of rounds, each a linear program with one row per length and a knapsack of
          max_len^2 max_per_pack steps
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack

    max_len, lengths = len(counts) - 1, np.flatnonzero(counts)
    counts = counts[lengths]
    if number_that_fill(max_len, max_per_pack) <= FEW:
        present = set(lengths.tolist())
        more = patterns_that_fill(max_len, max_per_pack, max_len)
        patterns = patterns + [pattern for pattern in more if present.issuperset(pattern)]
    patterns, bound = list(dict.fromkeys(patterns)), 0
    place_of = eye_array(len(lengths), format="csc")
    shorter = place_of[:, :-1] - place_of[:, 1:]  # a place for a length, in exchange for a longer
    total = counts.sum()  # solve for shares of it, because the solver's tolerances are absolute
    for _ in range(ROUNDS):
        held = matrix(patterns, lengths)
        cost = np.concatenate((np.ones(len(patterns)), np.zeros(len(lengths) - 1)))
        solved = linprog(cost, -hstack((held, shorter)), -counts / total, method="highs-ipm")
        if solved.status != 0:
            raise ValueError(f"--packer optimal: SciPy's linear program failed: {solved.message}")
        packs = solved.x[: len(patterns)] * total
        prices = np.maximum(-solved.ineqlin.marginals, 0)  # of one more document of each length
        units = (prices * UNIT).astype(np.int64)
        dearest, dear = price(units, lengths, max_len, max_per_pack)
        worth = sum(int(n) * int(p) for n, p in zip(counts, units, strict=True))
        bound = max(bound, -(-worth // dearest))
        if not dear or bound >= packs.sum():
            break
        if len(patterns) > 6 * len(lengths):
            reduced_costs = 1 - held.T @ prices  # a pattern's cost less that of its documents
            order = np.argsort(np.where(packs > 0, -1, reduced_costs), kind="stable")
            cheapest = order[: 3 * len(lengths)]
            patterns = [patterns[i] for i in cheapest]
            packs = packs[cheapest]
        patterns = list(dict.fromkeys(patterns + dear))
    return Relaxed(patterns[: len(packs)], packs, bound)


def price(
    prices: np.ndarray, lengths: np.ndarray, max_len: int, max_per_pack: int
) -> tuple[int, list[Pattern]]:
    """Find the price of the dearest pack, and for each length the dearest pattern that starts so.

    Returns: int64 price; the patterns that cost more than a pack
    """
    endless = max_per_pack >= max_len // lengths[0]  # the limit never binds
    fitting = np.searchsorted(lengths, np.arange(max_len + 1), "right").tolist()
    best = np.zeros(max_len + 1, np.int64)  # the highest price of what fits each space
    picks: list[list[int]] = []  # a length of the best choice for each space, by documents in it
    for _ in range(1 if endless else max_per_pack - 1):
        fewer = best
        best = fewer if endless else np.zeros_like(fewer)
        pick = [0] * (max_len + 1)
        for space in range(int(lengths[0]), max_len + 1):
            fit = slice(fitting[space])
            values = fewer[space - lengths[fit]] + prices[fit]
            i = int(values.argmax())
            best[space], pick[space] = values[i], int(lengths[i])
        picks.append(pick)
    values = prices + best[max_len - lengths]
    patterns = []
    for first in lengths[values > WORTH_IT].tolist():
        pattern, space = [first], max_len - first
        for pick in repeat(picks[0]) if endless else reversed(picks):
            if pick[space] == 0:
                break
            pattern.append(pick[space])
            space -= pick[space]
        patterns.append(tuple(sorted(pattern, reverse=True)))
    return int(values.max()), patterns


# ---- least squares


def regress(counts: np.ndarray, max_per_pack: int) -> tuple[list[Pattern], np.ndarray]:
    """Fit packs of every pattern that fills a pack to the histogram, by least squares.

    Paper:   arXiv 2107.02027, section 3.1 (NNLSHP); lengths up to 8 weigh 0.09, as in Graphcore's
             packedBERT/nnlshp.py: a short document that is missing leaves little padding
    Returns: patterns; (patterns,) int64 packs, which have too many places for some lengths and too
             few for others
    Raises:  ValueError for too many patterns
    """
    from scipy.optimize import nnls

    max_len = len(counts) - 1
    if number_that_fill(max_len, max_per_pack) > MOST:
        raise ValueError(
            f"--packer nnlshp weighs every way to fill a pack of {max_len}, more than {MOST:,} with"
            f" --max-per-pack {max_per_pack}: choose fewer, or --packer optimal"
        )
    patterns = list(patterns_that_fill(max_len, max_per_pack, max_len))
    lengths = np.arange(1, max_len + 1)
    weights = np.where(lengths <= 8, 0.09, 1.0)
    held = matrix(patterns, lengths).toarray()
    packs, _ = nnls(weights[:, None] * held, weights * counts[1:])
    return patterns, np.rint(packs).astype(np.int64)


# ---- documents in whole packs


def fill(
    patterns: list[Pattern], packs: np.ndarray, counts: np.ndarray, shorter: bool = True
) -> tuple[list[Filled], np.ndarray]:
    """Put documents into packs of patterns, the longest places first.

    Args:    packs   (patterns,) whole numbers
             shorter let a place hold a document shorter than it was made for, the longest left
    Returns: the packs without empty ones; (max_len + 1,) the documents left over
    Example: two packs of (5, 3) and documents 5, 4, 3, 2: [(1, (5, 3)), (1, (4, 2))], none left
    """
    left = counts.tolist()
    used = [j for j, n in enumerate(packs) if n > 0]
    filled = {j: [Filled(int(packs[j]), ())] for j in used}  # packs of each pattern, so far
    longest = len(counts) - 1
    places = sorted((-length, j) for j in used for length in patterns[j])
    for negative, j in places:
        longest = min(longest, -negative) if shorter else -negative
        before = filled[j]
        filled[j] = []
        for empty, pattern in before:
            while empty:
                while shorter and longest and not left[longest]:
                    longest -= 1
                taken = min(empty, left[longest]) if longest else 0
                if not taken:
                    filled[j].append(Filled(empty, pattern))
                    break
                filled[j].append(Filled(taken, (*pattern, longest)))
                left[longest] -= taken
                empty -= taken
    return [group for j in used for group in filled[j] if group.pattern], np.array(left)
