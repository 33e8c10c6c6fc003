"""Documents to a token store on disk, which training maps into memory.

`prepare` reads documents, encodes them on all cores and writes a folder: tokens.bin (each document
as its tokens and end-of-text, the held-out documents last), documents.idx (where each document
begins, and the end) and meta.json (what was counted, by which tokenizer, sha256 of both files).
Does not shuffle, filter, deduplicate or change text.

    python prepare.py corpus/pd-mix.jsonl.gz --out runs/pd-mix
"""

import hashlib
import json
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

from support import runtime, tokenizer
from support.documents import is_held_out, read_documents
from support.token_store import FORMAT, Store

BATCH_CHARACTERS = 1 << 18  # of text, for one task of one thread


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    holdout: int = 20,
) -> dict:
    """Encode documents into a store, which appears whole at `out` or not at all.

    The held-out documents, one in `holdout` by the hash of their ids, come last: training reads a
    prefix of tokens.bin and cannot meet them.

    Args:     inputs  what read_documents reads
              name    what get_encoding calls the tokenizer; the store records it
              holdout 0 holds nothing out
    Returns:  the contents of meta.json
    Raises:   ValueError for bad input, for an `out` that exists, for a corpus without text
    Cost:     memory for a few batches of text, or the longest document; rate: results/prepare.jsonl
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"--out {out}: exists already: remove it or name another folder")
    if holdout < 0:
        raise ValueError(f"--holdout {holdout}: needs 0 (hold nothing out) or more")
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        unfinished.mkdir(parents=True)
        meta = {"format": FORMAT, "tokenizer": name, "holdout": holdout}
        meta |= _write_arrays(read_documents(inputs), unfinished, encoding, holdout)
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        for path in (*unfinished.iterdir(), unfinished):
            _fsync(path)
        unfinished.rename(out)
        _fsync(out.parent)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and not error.filename:  # of a write: name what was written
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise
    return meta


def _write_arrays(
    documents: Iterable[tuple[str, str]], folder: Path, encoding: tiktoken.Encoding, holdout: int
) -> dict:
    """Encode in threads while this one parses what comes next and writes what came before."""
    threads = os.cpu_count() or 1
    arrays = _Arrays(folder, encoding)
    encode = partial(_encode, encoding=encoding, dtype=arrays.dtype, holdout=holdout)
    documents = tqdm(documents, "documents", unit="", disable=None, leave=False)
    batches = documents_read = 0
    with ThreadPoolExecutor(threads) as pool, tempfile.TemporaryFile(dir=folder) as waiting:
        for train, held_out, n_read in _map_ahead(pool, encode, _batches(documents), 2 * threads):
            arrays.append(train)
            pickle.dump(held_out, waiting)
            batches += 1
            documents_read += n_read
        train_counts = {f"train_{key}": count for key, count in arrays.counts.items()}
        waiting.seek(0)
        for _ in range(batches):
            arrays.append(pickle.load(waiting))
    for file in arrays.files.values():
        file.close()
    if not arrays.counts["documents"]:
        raise ValueError("the corpus is empty: no document has any text")
    return {
        **arrays.counts,
        **train_counts,
        "skipped": documents_read - arrays.counts["documents"],
        "dtype": arrays.dtype.name,
        "vocab_size": encoding.n_vocab,
        "end_of_text": encoding.eot_token,
        "tokenizer_fingerprint": tokenizer.fingerprint(encoding),
        "sha256": {name: sha256.hexdigest() for name, sha256 in arrays.sha256.items()},
    }


class _Arrays:
    """tokens.bin and documents.idx while they grow, with what is counted and hashed on the way."""

    def __init__(self, folder: Path, encoding: tiktoken.Encoding):
        self.dtype = np.dtype("uint16" if encoding.n_vocab <= 65_535 else "uint32")
        self.byte_lengths = tokenizer.byte_lengths(encoding)
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self.files = {name: (folder / name).open("wb") for name in ("tokens.bin", "documents.idx")}
        self.sha256 = {name: hashlib.sha256() for name in self.files}
        self._write("documents.idx", np.zeros(1, np.int64))

    def append(self, documents: list[np.ndarray]) -> None:
        ids = np.concatenate([np.empty(0, self.dtype), *documents])
        lengths = np.array([len(document) for document in documents], np.int64)
        self._write("tokens.bin", ids)
        self._write("documents.idx", self.counts["tokens"] + np.cumsum(lengths))
        self.counts["documents"] += len(documents)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += int(self.byte_lengths[ids].sum())

    def _write(self, name: str, array: np.ndarray) -> None:
        self.files[name].write(array)
        self.sha256[name].update(array)


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Gather documents for one task each: a task for every short one would cost more than it."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document[1]) + 1  # an empty text counts too, or they could pile up
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _map_ahead(pool: ThreadPoolExecutor, function, items: Iterable, ahead: int) -> Iterator:
    """Map in order, like pool.map, but take at most `ahead` items before yielding a result."""
    tasks: deque = deque()
    for item in items:
        tasks.append(pool.submit(function, item))
        if len(tasks) > ahead:
            yield tasks.popleft().result()
    while tasks:
        yield tasks.popleft().result()


def _encode(
    batch: list[tuple[str, str]], encoding: tiktoken.Encoding, dtype: np.dtype, holdout: int
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Encode a batch: training documents, held-out ones, and how many there were with empty ones.

    A document is its ids and end-of-text.
    """
    end = np.array([encoding.eot_token], dtype)
    rows: tuple[list, list] = ([], [])
    for document_id, text in batch:
        if text:
            # Not encode_ordinary: it makes a list of ints while no other thread can run.
            ids = encoding.encode_to_numpy(text, disallowed_special=())
            ids = np.concatenate((ids, end), dtype=dtype, casting="unsafe")
            rows[is_held_out(document_id, holdout)].append(ids)
    return *rows, len(batch)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def embedded_store(name: str) -> Path:
    """The store of the embedded corpus in tokenizer `name`, prepared on first use, then kept."""
    encoding = tokenizer.get_encoding(name)
    here = Path(__file__).resolve().parent
    store = here / ".cache" / f"pd-mix-{tokenizer.fingerprint(encoding)[:12]}"
    if not (store / "meta.json").exists():
        try:
            prepare([here / "corpus" / "pd-mix.jsonl.gz"], store, encoding, name)
        except (ValueError, OSError):
            if not (store / "meta.json").exists():  # else another run was first, with the same
                raise
    return store


def _print_summary(store: Store) -> None:
    meta = store.meta
    n_bytes, n_text_tokens = meta["bytes"], meta["tokens"] - meta["documents"]
    held_out, held_out_tokens = (meta[n] - meta[f"train_{n}"] for n in ("documents", "tokens"))
    print(f"documents {meta['documents']:>14,}   {meta['skipped']:,} more skipped: no text")
    print(f"tokens    {meta['tokens']:>14,}   {n_bytes / n_text_tokens:.3f} bytes each, ends aside")
    print(f"held out  {held_out:>14,}   documents, {held_out_tokens:,} tokens")
    histogram = np.bincount(np.frexp(np.diff(store.offsets))[1])
    for bits in range(2, len(histogram)):
        bar = "#" * round(40 * histogram[bits] / histogram.max())
        print(f"below {2**bits:>10,} tokens {histogram[bits]:>11,} {bar}")


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="prepare.py", description="Documents to a token store.")
    parser.add_argument("inputs", nargs="+", help="text, .jsonl, .jsonl.gz, .jsonl.zst, folders")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument("--tokenizer", default="pd4k", help="pd4k, bytes, gpt2 or a .tiktoken file")
    parser.add_argument(
        "--holdout", type=int, default=20, help="hold out one in this many; 0: none"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, so that prepare tidies up
    encoding = tokenizer.get_encoding(args.tokenizer)
    prepare(args.inputs, args.out, encoding, args.tokenizer, args.holdout)
    _print_summary(Store.open(args.out))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
