"""Documents to a token store on disk, which training maps into memory.

`prepare` reads documents, encodes them on all cores and writes a folder: tokens.bin (each document
as its tokens and end-of-text, the held-out documents last), documents.idx (where each document
begins, and the end) and meta.json (what was counted, by which tokenizer, sha256 of both files).
Does not shuffle, filter, deduplicate or change text.

    python data.py prepare corpus/pd-mix.jsonl.gz --out runs/pd-mix
"""

import fcntl
import gzip
import hashlib
import json
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken
from tqdm import tqdm

import tokenizer

FORMAT = 1  # of the folder that prepare writes; a store of another format is refused
BATCH_CHARACTERS = 1 << 18  # of text, for one task of one thread


def is_held_out(document_id: str, holdout: int) -> bool:
    """Decide by the id alone, so that a document keeps its side when the corpus grows."""
    return holdout > 0 and zlib.crc32(document_id.encode()) % holdout == 0


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    """Stream (id, text) from files and folders of JSON lines or plain text.

    .jsonl, .jsonl.gz and .jsonl.zst hold one object a line with "text", and "id" if it has one
    (else file name:line). Any other file is one document, its name the id. A folder stands for its
    files at any depth, in sorted order and named from the folder on, hidden files left out.

    Raises:   ValueError naming the file, and the line where there is one
    """
    files = []
    for path in map(Path, paths):
        base, found = path.parent, [path]
        if path.is_dir():
            base, found = path, sorted(path.rglob("[!.]*"))
        found = [file for file in found if file.exists() and not file.is_dir()]
        if not found:
            raise ValueError(f"{path}: no such file, or a folder without documents")
        files += [(file, file.relative_to(base).as_posix()) for file in found]
    for file, name in files:
        yield from _read_file(file, name)


def _read_file(path: Path, name: str) -> Iterator[tuple[str, str]]:
    if not name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        try:
            yield name, path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not text in UTF-8 ({error})") from None
        return
    row = 0
    try:
        for row, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            document = json.loads(line.decode())
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise ValueError('needs an object with a string under "text"')
            given_id = document.get("id")
            document_id = f"{name}:{row}" if given_id is None else str(given_id)
            (document_id + document["text"]).encode()  # raises for half of a surrogate pair
            yield document_id, document["text"]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{row}: is not JSON ({error.msg}, column {error.colno})") from None
    except Exception as error:  # each decompressor has its own kinds
        raise ValueError(f"{path}:{row}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """Decode frame by frame: the package's own reader takes a file cut short for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs `pip install zstandard`") from None
    decoder, rest = None, b""
    with path.open("rb") as file:
        while block := file.read(1 << 16):
            while block:
                decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
                *lines, rest = (rest + decoder.decompress(block)).split(b"\n")
                yield from lines
                block = decoder.unused_data
                decoder = None if decoder.eof else decoder
    if decoder:
        raise EOFError("the file ends inside a frame of zstd")
    yield rest


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


@dataclass(frozen=True)
class Store:
    """A store as prepare wrote it, mapped: document i is tokens[offsets[i]:offsets[i + 1]].

    tokens    (tokens,) uint16 or uint32; the training documents are its first train_tokens
    offsets   (documents + 1,) int64
    """

    path: Path
    meta: dict
    tokens: np.memmap
    offsets: np.memmap
    train_documents: int
    train_tokens: int

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Map a store, after comparing the sizes of its files with what meta.json counts.

        Raises:   ValueError for a folder that is no store, or a damaged one
        """
        path, arrays = Path(path), []
        try:
            meta = json.loads((path / "meta.json").read_text())
            found = meta["format"]
            counts = {"tokens.bin": meta["tokens"], "documents.idx": meta["documents"] + 1}
            dtypes = {"tokens.bin": np.dtype(meta["dtype"]), "documents.idx": np.dtype("int64")}
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: no token store: make one with data.py prepare") from None
        if found != FORMAT:
            raise ValueError(f"{path}: has store format {found}, not {FORMAT}: prepare it anew")
        for name, dtype in dtypes.items():
            size = counts[name] * dtype.itemsize
            file = path / name
            if not file.exists() or file.stat().st_size != size:
                raise ValueError(f"{file}: needs {size:,} bytes: prepare the store anew")
            arrays.append(np.memmap(file, dtype, mode="r"))
        return cls(path, meta, *arrays, meta["train_documents"], meta["train_tokens"])

    def check_tokenizer(self, encoding: tiktoken.Encoding) -> None:
        """Refuse a tokenizer other than the one the store was made with."""
        stored, given = self.meta["tokenizer_fingerprint"], tokenizer.fingerprint(encoding)
        if given != stored:
            raise ValueError(
                f"{self.path}: made with tokenizer {self.meta['tokenizer']} ({stored[:12]}), not "
                f"{encoding.name} ({given[:12]}): choose that one, or prepare the store anew"
            )

    def verify(self) -> None:
        """Compare both files with the sha256 that meta.json records, which reads all of them."""
        for name, recorded in self.meta["sha256"].items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != recorded:
                    raise ValueError(f"{self.path / name}: sha256 differs: prepare the store anew")


IN_MEMORY = 1 << 20  # samples of which every process keeps a table of its own
CUT = 1 << 18  # documents cut at once


def check_tokens(store: Store, highest: int) -> None:
    """Refuse a store that holds a token outside its vocabulary."""
    if highest >= store.meta["vocab_size"]:
        raise ValueError(
            f"{store.path}: token {highest} is outside its vocabulary of"
            f" {store.meta['vocab_size']}: the store is damaged, prepare it again"
        )


class Samples:
    """Sample id -> span of the token stream. A sample is a piece of a document of at most T tokens.

    Each document is cut at multiples of T from its own start, so its tokens are targets exactly
    once a pass. With `stream` the whole split counts as one document: equal rows, cut across
    document boundaries, which is how GPTs are commonly trained without packing.

    Rows are found by arithmetic, pieces in a table of 16 bytes a sample. That of a large store is a
    file in it, made on first use and mapped: a billion samples open as fast as a thousand.

    Args: seq_len tokens a sample holds at most, special tokens not counted
          split   train | val: documents that are held out are the last of the store
          stream  cut the stream, not the documents
          bare    leave the end-of-text out (BERT frames a piece in [CLS] and [SEP] instead)
    """

    def __init__(self, store: Store, seq_len: int, split: str = "train", stream=False, bare=False):
        n = store.train_documents
        offsets = store.offsets[: n + 1] if split == "train" else store.offsets[n:]
        self.store, self.seq_len, self.made = store, seq_len, (split, stream, bare)
        self.start, self.stop = int(offsets[0]), int(offsets[-1])
        self.table = None if stream else self._table(offsets)

    @classmethod
    def of(cls, store: Store, kind: str, row_len: int) -> "Samples":
        """Training samples by how they are laid out: rows of the stream, pieces, or a BERT's."""
        bert = kind == "bert"
        samples = cls(store, row_len - 2 * bert, stream=kind == "rows", bare=bert)
        samples.kind, samples.row_len = kind, row_len
        return samples

    def _table(self, offsets: np.ndarray) -> np.ndarray:
        """(N, 2) int64 spans of all samples, of documents between consecutive `offsets`."""
        split, _, bare = self.made
        cuts = range(0, max(len(offsets) - 1, 1), CUT)
        parts = (pieces(offsets[a : a + CUT + 1], self.seq_len, int(bare)) for a in cuts)
        most = len(offsets) + (self.stop - self.start) // self.seq_len
        if most <= IN_MEMORY or not os.access(self.store.path, os.W_OK):
            return np.concatenate(list(parts))
        kind = f"{'bare-' * bare}{split}-{self.seq_len}"
        file = self.store.path / f"{kind}-{self.store.meta['sha256']['documents.idx'][:16]}.spans"
        with alone_in(self.store.path):
            if not file.exists():
                with whole(file) as out:
                    for part in tqdm(parts, file.name, len(cuts), disable=None, leave=False):
                        out.write(part)
        return np.asarray(np.memmap(file, np.int64, "r")).reshape(-1, 2)

    def __len__(self) -> int:
        rows = -(-(self.stop - self.start) // self.seq_len)
        return rows if self.table is None else len(self.table)

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """(n,) sample ids -> (n, 2) first and one-past-last token of each in the store."""
        if self.table is not None:
            return self.table[ids]
        start = self.start + ids * self.seq_len
        return np.stack((start, np.minimum(start + self.seq_len, self.stop)), axis=1)

    def text(self, start: int, stop: int) -> np.ndarray:
        """Tokens of the store, read, not mapped: a mapping's pages stay, and cost more to make."""
        file, tokens = self.store.path / "tokens.bin", self.store.tokens
        return np.fromfile(file, tokens.dtype, stop - start, offset=start * tokens.itemsize)

    def identity(self) -> dict:
        """What an index of these samples rests on: store, tokenizer, split and sample length."""
        meta = self.store.meta
        kept = ("sha256", "tokenizer_fingerprint", "train_documents", "vocab_size")
        return {"made": self.made, "seq_len": self.seq_len, **{key: meta[key] for key in kept}}


def pieces(offsets: np.ndarray, seq_len: int, bare: int) -> np.ndarray:
    """(n, 2) spans of documents cut at multiples of seq_len, without the last `bare` tokens.

    Example:  pieces([0, 5, 6], 2, 0) is (0, 2), (2, 4), (4, 5), (5, 6)
    """
    start, stop = offsets[:-1], offsets[1:] - bare  # (N,)
    counts = -(-(stop - start) // seq_len)
    before = np.cumsum(counts) - counts
    first = np.repeat(start - seq_len * before, counts) + seq_len * np.arange(counts.sum())  # (n,)
    return np.stack((first, np.minimum(first + seq_len, np.repeat(stop, counts))), axis=1)


@contextmanager
def whole(file: Path) -> Iterator[BinaryIO]:
    """Write a file that has its name only when all of it is on the disk.

    Raises:   ValueError naming the file, where the disk takes no more
    """
    unfinished = file.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(file)
    except OSError as error:
        raise ValueError(f"{file}: not written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into this folder; it may have made what is wanted."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes into {folder}", file=sys.stderr)
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)  # a process forked meanwhile still has it open
        os.close(directory)


KINDS = ("pieces", "rows", "bert")
KINDS_HELP = "samples of a GPT with --pack, of one without, of a BERT"


@lru_cache(maxsize=1)
def open_samples(path: str, kind: str, row_len: int) -> Samples:
    """The training samples of a store, opened once a process: what a worker is sent is the name."""
    return Samples.of(Store.open(path), kind, row_len)


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
    import runtime

    parser = runtime.Parser(description="documents to a token store")
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("prepare", help="encode documents into a store")
    verb.add_argument("inputs", nargs="+", help="text, .jsonl, .jsonl.gz, .jsonl.zst, folders")
    verb.add_argument("--out", required=True, help="the folder to make")
    verb.add_argument("--tokenizer", default="pd4k", help="pd4k, bytes, gpt2 or a .tiktoken file")
    verb.add_argument("--holdout", type=int, default=20, help="hold out one in this many; 0: none")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, so that prepare tidies up
    encoding = tokenizer.get_encoding(args.tokenizer)
    prepare(args.inputs, args.out, encoding, args.tokenizer, args.holdout)
    _print_summary(Store.open(args.out))


if __name__ == "__main__":
    import runtime

    runtime.exit_cleanly(main)
