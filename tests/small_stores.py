"""Stores written token by token, so that documents may hold anything, and their indexes.

Stores on disk have a vocabulary of ten: text is made of tokens 0 to 3, token 9 is end-of-text,
token 7 occurs only in held-out documents, and the others never occur.
"""

import json
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from conftest import contents

import analyze
from curriculum import Ranking
from data import Samples
from support.checkpoint import ALONE as ONE
from support.store import FORMAT, Store

VOCABULARY, END = 10, 9
BYTES_END = 256


def in_memory(*documents, held_out=0):
    """Return a store of these documents of bytes; the last `held_out` are held out."""
    ended = [[*document, BYTES_END] for document in documents]
    offsets = np.array([0, *accumulate(map(len, ended))])
    documents = len(ended) - held_out
    trained = {"train_documents": documents, "train_tokens": int(offsets[documents])}
    return Store(
        path=Path("in memory"),
        meta={"end_of_text": BYTES_END, "vocab_size": 261, **trained},
        tokens=np.array([*chain(*ended)], np.uint16),
        offsets=offsets,
    )


TOY = in_memory([1, 2, 3, 4], [], [7, 8], held_out=1)


def write_store(path, documents, tokenizer="by hand", held_out=1):
    """Write a store of lists of token ids. They may be empty, which prepare.py would not allow."""
    path.mkdir(parents=True)
    ended = [[*ids, END] for ids in (*documents, *[[7, 7]] * held_out)]
    tokens = np.array(list(chain(*ended)), np.uint16)
    offsets = np.array([0, *accumulate(map(len, ended))], np.int64)
    (path / "tokens.bin").write_bytes(tokens.tobytes())
    (path / "documents.idx").write_bytes(offsets.tobytes())
    meta = {"format": FORMAT, "tokens": len(tokens), "documents": len(ended)}
    meta |= {"train_documents": len(documents), "train_tokens": int(offsets[len(documents)])}
    meta |= {"dtype": "uint16", "vocab_size": VOCABULARY, "end_of_text": END}
    meta |= {"tokenizer": tokenizer, "tokenizer_fingerprint": tokenizer, "skipped": 3}
    meta |= {"bytes": len(tokens), "train_bytes": meta["train_tokens"]}
    files = {"tokens.bin": tokens, "documents.idx": offsets}
    meta["sha256"] = {name: sha256(array).hexdigest() for name, array in files.items()}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def many_documents(count=40):
    """Return short documents of few different tokens, so that many tie; some are empty."""
    random = np.random.default_rng(0)
    drawn = [random.integers(0, 4, random.integers(0, 13)).tolist() for _ in range(count)]
    return [[], [], *drawn, [1], [], []]


def samples_of(store, kind="pieces", seq_len=8):
    return Samples(Store.open(store), kind, seq_len)


def analyzed(folder, samples, names=("rarity",)):
    """Analyze, and return the files of the indexes: {name: bytes}."""
    analyze.analyze(samples, list(names), folder, ONE)
    return contents(folder)


def load(folder, samples, name):
    """Return the whole index of a metric, in memory."""
    index = analyze.open_rankings(folder, samples, [name])[name]
    return Ranking(index.values[:], index.order[:])
