"""How hard each sample of a store is: the metrics, and the index that sorts a store by one of them.

An index is a folder with the samples' values, their ids by value, and a fingerprint of everything
that these depend on. analyze.py makes indexes; curriculum.py decides how hard a sample may be.

Paper: Li et al., arXiv 2212.03597.

    python analyze.py --metric rarity,length --examples     # of the embedded corpus
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.rows import ranking
from support.rows.ranking import LENGTHS, Rankings
from support.rows.samples import SPECIAL_TOKENS, Samples

BLOCK = 1 << 18  # tokens measured at once: what a core's cache holds

# ---- metrics: (tokens (n,) of N samples one after another, lengths (N,), what the metric summed
# over all samples) -> (N,) numbers, lowest for the easiest sample


def length(tokens: np.ndarray, lengths: np.ndarray, _: None) -> np.ndarray:
    return lengths


def rarity(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """Vocabulary rarity: the summed surprisal of a sample's tokens (arXiv 2212.03597).

    Args:     nats (V,) the surprisal of each token
    Deviates: DeepSpeed (Megatron-DeepSpeed's analyze_data.py) cuts the sum to a whole number, which
              makes ties
    Example:  counts 2, 1, 1 are nats ln 2, ln 4, ln 4: the samples [0, 0] and [1] tie at 2 ln 2
    """
    return np.add.reduceat(nats[tokens], np.cumsum(lengths) - lengths)


def rarity_mean(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """Nats per token: the sum mostly measures the length."""
    return rarity(tokens, lengths, nats) / lengths


def length_rarity(tokens: np.ndarray, lengths: np.ndarray, nats: np.ndarray) -> np.ndarray:
    """By length, then by rarity, in one number: length + rarity / 2^k, with rarity below 2^k.

    In a float64 two samples of up to 2^17 tokens differ if their rarities do by 2^-9 nats.
    """
    longest = 2.0**17
    scale = 2.0 ** math.ceil(math.log2(longest * nats.max() + 1))
    return lengths + rarity(tokens, lengths, nats) / scale


def token_counts(tokens: np.ndarray, lengths: np.ndarray, vocab_size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=vocab_size)


def surprisal(counts: np.ndarray) -> np.ndarray:
    """(V,) -log of each token's share of all, in nats; a token never seen counts as seen once."""
    counts = np.maximum(counts, 1)
    return -np.log(counts / counts.sum())


class Metric(NamedTuple):
    """How to measure samples, and what has to be summed over all of them before.

    Example: a metric of your own is a line in METRICS (docs/extending.md)
    """

    value: Callable  # (tokens, lengths, known) -> (N,)
    dtype: str = "float32"  # of the values in the index
    summed: Callable | None = None  # (tokens, lengths, vocab_size) -> what is summed over all
    known: Callable | None = None  # (sum) -> the third argument of `value`


METRICS = {
    "length": Metric(length, "uint32"),
    "rarity": Metric(rarity, "float32", token_counts, surprisal),
    "rarity-mean": Metric(rarity_mean, "float32", token_counts, surprisal),
    "length-rarity": Metric(length_rarity, "float64", token_counts, surprisal),
}


def check_metrics(
    names: Sequence[str], seq_len: int, samples_kind: str, flag: str = "--curriculum"
) -> None:
    """Refuse metrics that do not exist, that do not go together or with this kind of samples.

    Args: samples_kind rows | pieces | bert | pairs
          flag         how the user named them, for messages
    """
    lengths = LENGTHS if flag == "--curriculum" else ()  # which need no analysis
    known = (*lengths, *METRICS)
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} {name} is unknown: choose from {', '.join(known)}")
        if name in ("length", "length-rarity") and samples_kind == "rows":
            raise ValueError(
                f"{flag} {name}: rows all have {seq_len} tokens: take pieces of documents (--pack),"
                " or choose rarity"
            )
        if name == "seqlen-reshape" and samples_kind != "rows":
            instead = "seqlen and --pack" if samples_kind in SPECIAL_TOKENS else "seqlen"
            raise ValueError(f"{flag} {name} is for full rows of the stream: take {instead}")
    if len(set(names)) < len(names) or set(LENGTHS) <= set(names):
        raise ValueError(f"{flag} {','.join(names)}: takes one length, and each name once")


def blocks(samples: Samples, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens (n,) and lengths (N,) of samples first..last - 1, some 2^18 tokens at a time."""
    ends = samples.spans(np.array([first, last - 1]))
    mean = (ends[1, 1] - ends[0, 0]) / (last - first)
    step = max(int(BLOCK / mean), 1)
    for start_id in range(first, last, step):
        start, stop = samples.spans(np.arange(start_id, min(start_id + step, last))).T
        tokens, lengths = samples.store.tokens[start[0] : stop[-1]], stop - start
        # between samples may lie the ends of a BERT's documents
        if lengths.sum() < len(tokens):
            edge = np.zeros(len(tokens) + 1, np.int8)
            edge[start - start[0]] += 1
            edge[stop - start[0]] -= 1
            tokens = tokens[np.cumsum(edge[:-1]).astype(bool)]
        samples.store.check_tokens(tokens.max())
        yield tokens.astype(np.int64), lengths  # what indexing by them would cast to, more slowly


# ---- index


def fingerprint(samples: Samples, name: str) -> str:
    """What ties an index to store, tokenizer, samples and metric."""
    source = inspect.getsource(METRICS[name].value)
    made_of = {"format": 1, "metric": name, "source": source, **samples.identity()}
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def index_folder(given: str | None, samples: Samples) -> Path:
    """Where the indexes of one kind of samples lie: by default in the store they belong to."""
    kind = f"{samples.kind}-{samples.seq_len}"
    return Path(given or samples.store.path / "curriculum") / kind


def lacking_in(folder: Path, samples: Samples, names: Sequence[str]) -> list[str]:
    """The metrics without an index in this folder.

    Raises: as `opened`, for those that have one
    """
    lacking = [name for name in names if not (folder / name).exists()]
    opened(folder, samples, [name for name in names if name not in lacking])
    return lacking


def opened(folder: Path, samples: Samples, names: Sequence[str]) -> Rankings:
    """Open the index of each metric.

    Raises: ValueError for an index that is damaged, or of other samples or another metric
    """
    rankings = Rankings()
    for name in names:
        index = folder / name
        try:
            about = json.loads((index / "index.json").read_text())
            stored = about["fingerprint"][:64]
            rankings[name] = ranking.read(index, about)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{index}: damaged ({error}): remove it, analyze again") from None
        if stored != (wanted := fingerprint(samples, name)):
            raise ValueError(
                f"{index}: an index with fingerprint {stored[:16]}, but store, tokenizer, sample"
                f" length and metric are {wanted[:16]}: remove it, or name another folder"
            )
    return rankings
