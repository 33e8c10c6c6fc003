"""The token store that training reads, and files that are written whole or not at all.

A store is a folder. This one holds the documents "ab" and "c", encoded as bytes (end-of-text is
256); the second one is held out:

    tokens.bin      97 98 256 | 99 256      uint16, or uint32 if the vocabulary exceeds 65,535
    documents.idx   0 3 5                   int64, where each document begins and the last one ends
    meta.json       {"train_documents": 1, "train_tokens": 3, "train_bytes": 2, "documents": 2, ...}
                    counts, the tokenizer's name and fingerprint, sha256 of the files
    targets.idx     only if some tokens are no targets, such as those of a prompt: how many of the
                    tokens before each one are, int64. If "a" is a prompt: 0 0 1 2 3 4
    tokenizer.tiktoken  a copy of the tokenizer's ranks, if it is a file

Held-out documents come last. Training reads only the tokens before them, so it never sees one.
prepare.py reads text, and makes a store from it with `StoreWriter`.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tiktoken import Encoding

from support.tokenizer import byte_lengths, copy_ranks, fingerprint, tokenizer_in

FORMAT = 1  # of the folder; stores in another format are refused


class StoreWriter:
    """Writes a store's files into a folder: documents as they arrive, but held-out ones last."""

    def __init__(self, folder: Path, encoding: Encoding):
        self.folder = folder
        self.encoding = encoding
        self.dtype = np.dtype("uint16" if encoding.n_vocab <= 65_535 else "uint32")
        self.byte_lengths = byte_lengths(encoding)
        # The first entry of each list is for training documents, the second for held-out ones.
        self.files = [(folder / name).open("w+b") for name in ("tokens.bin", "held_out.tmp")]
        self.ends = [array("q"), array("q")]  # where documents end, in tokens
        self.tokens = [0, 0]
        self.bytes = [0, 0]
        self.prompts = [array("q"), array("q")]  # where tokens that are no targets begin and end

    def append(self, ids: np.ndarray, side: int, ends: Iterable, prompts: Iterable = ()) -> None:
        """Append tokens to the training documents or to the held-out ones.

        Args:    side    0 for training, 1 for held out
                 ends    where documents end in `ids`, each after its end-of-text; tokens after the
                         last end begin a document that the next call continues
                 prompts spans of `ids` that are no targets
        Example: 97 98 256 99 with ends [3], then 256 with ends [1]: the documents "ab" and "c"
        """
        first = self.tokens[side]
        self.files[side].write(ids.astype(self.dtype))
        self.ends[side].extend(first + end for end in ends)
        self.prompts[side].extend(first + edge for prompt in prompts for edge in prompt)
        self.tokens[side] += len(ids)
        self.bytes[side] += int(self.byte_lengths[ids].sum())

    def finish(self, inputs: Sequence[str | Path], **origin: object) -> dict:
        """Append the held-out tokens to the others, and write documents.idx and meta.json.

        Args:    inputs the files that the text came from, for the error if they have none
                 origin more entries for meta.json
        Returns: the contents of meta.json
        """
        tokens, held_out = self.files
        held_out.seek(0)
        shutil.copyfileobj(held_out, tokens, 1 << 20)
        tokens.close()
        held_out.close()
        (self.folder / "held_out.tmp").unlink()
        trained, tested = (np.array(ends, np.int64) for ends in self.ends)
        offsets = np.concatenate(([0], trained, self.tokens[0] + tested))
        offsets.tofile(self.folder / "documents.idx")
        if not sum(self.tokens):
            raise ValueError(f"{', '.join(map(str, inputs))}: no document has any text")
        stored = np.memmap(self.folder / "tokens.bin", self.dtype, "r")
        meta = {"format": FORMAT, "dtype": self.dtype.name, **origin}
        names = ["tokens.bin", "documents.idx"]
        if any(self.prompts):
            names.append("targets.idx")
            meta["targets"] = self.write_targets(self.folder / "targets.idx")
        meta["sha256"] = {name: sha256_of(self.folder / name) for name in names}
        meta |= {"train_documents": len(trained), "documents": len(trained) + len(tested)}
        meta |= {"train_tokens": self.tokens[0], "tokens": sum(self.tokens)}
        meta |= {"train_bytes": self.bytes[0], "bytes": sum(self.bytes)}
        meta["overlap"] = overlap(stored, self.tokens[0], self.encoding.eot_token)
        meta["tokenizer"] = self.encoding.name  # get_encoding loads it by this name
        meta["tokenizer_fingerprint"] = fingerprint(self.encoding)
        meta |= {"vocab_size": self.encoding.n_vocab, "end_of_text": self.encoding.eot_token}
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        copy_ranks(self.encoding.name, self.folder)
        return meta

    def write_targets(self, file: Path) -> int:
        """Write how many of the tokens before each one are targets; return how many there are."""
        training, held_out = (np.array(edges, np.int64) for edges in self.prompts)
        begin, end = np.concatenate((training, self.tokens[0] + held_out)).reshape(-1, 2).T  # (n,)
        N = sum(self.tokens)
        inside = np.cumsum(np.bincount(begin, minlength=N) - np.bincount(end, minlength=N + 1)[:N])
        before = np.concatenate(([0], np.cumsum(inside == 0)))  # (tokens + 1,)
        before.tofile(file)
        return int(before[-1])


# ---- held-out text that also stands in training

SAMPLED = 1 << 22  # about so many windows of a larger store are compared
BLOCK = 1 << 16  # tokens hashed at a time
FACTOR = 0x9E3779B97F4A7C15  # any large odd number


def overlap(tokens: np.ndarray, train_tokens: int, end: int, window: int = 32) -> float | None:
    """Return the share of held-out windows of tokens that also stand in training.

    Compares 64-bit hashes of windows without end-of-text. Of a large store only the lowest hashes
    are compared, which are those of the same windows on both sides.

    Args:    window a power of two
    Returns: None if one side has no window
    Cost:    2 s per 100M tokens, or 6 s if half of them are held out; 70 MB
    Example: of held-out 6 7 8, windows of two are 6 7 and 7 8; training on 5 6 7 has the first: 0.5
    """
    highest = (1 << 64) // (1 + len(tokens) // SAMPLED) - 1
    training = window_hashes(tokens[:train_tokens], end, window, highest)
    held_out = window_hashes(tokens[train_tokens:], end, window, highest)
    if not len(training) or not len(held_out):
        return None
    training.sort()
    nearest = np.searchsorted(training, held_out).clip(max=len(training) - 1)
    return float((training[nearest] == held_out).mean())


def window_hashes(tokens: np.ndarray, end: int, window: int, highest: int) -> np.ndarray:
    """Hash each window without end-of-text, from its two halves, and keep hashes up to `highest`.

    Example: 5 6 7 8 gets (6 FACTOR + 7) FACTOR**2 + 8 FACTOR + 9, modulo 2**64
    """
    kept = []
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK + window - 1]
        hashes = block.astype(np.uint64) + np.uint64(1)  # a row of zeros would get 0
        is_inside = block != end
        half = 1
        while half < window:
            factor = np.uint64(pow(FACTOR, half, 1 << 64))
            hashes = hashes[:-half] * factor + hashes[half:]
            is_inside = is_inside[:-half] & is_inside[half:]
            half *= 2
        kept.append(hashes[is_inside & (hashes <= np.uint64(highest))])
    return np.concatenate(kept) if kept else np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Store:
    """A store opened for reading. Document i is tokens[offsets[i]:offsets[i + 1]].

    meta      the contents of meta.json; the first meta["train_tokens"] tokens are for training
    tokens    (tokens,) uint16 or uint32
    offsets   (documents + 1,) int64
    targets_before (tokens + 1,) int64, how many of the tokens before each are targets; None: all
    """

    path: Path
    meta: dict
    tokens: np.ndarray
    offsets: np.ndarray
    targets_before: np.ndarray | None = None

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Memory-map the files of a store, after checking that their lengths match meta.json."""
        path = Path(path)
        meta = read_meta(path)
        if meta["format"] != FORMAT:
            raise ValueError(f"{path}: has format {meta['format']}: prepare the store again")

        def mapped(name: str, count: int, dtype: str) -> np.ndarray:
            file = path / name
            size = count * np.dtype(dtype).itemsize
            if not file.exists() or file.stat().st_size != size:
                raise ValueError(f"{file}: must have {size:,} bytes: prepare the store again")
            return np.asarray(np.memmap(file, dtype, "r"))

        tokens = mapped("tokens.bin", meta["tokens"], meta["dtype"])
        offsets = mapped("documents.idx", meta["documents"] + 1, "int64")
        has_prompts = "targets" in meta or (path / "targets.idx").exists()
        targets_before = mapped("targets.idx", meta["tokens"] + 1, "int64") if has_prompts else None
        ends = [0, meta["train_documents"], meta["documents"]]
        is_wrong = offsets[ends].tolist() != [0, meta["train_tokens"], meta["tokens"]]
        for name in ("documents.idx", "targets.idx")[: 1 + has_prompts]:
            if is_wrong or sha256_of(path / name) != meta["sha256"].get(name):
                raise ValueError(f"{path}: {name} does not match meta.json: prepare it again")
        return cls(path, meta, tokens, offsets, targets_before)

    @property
    def has_prompts(self) -> bool:
        """Whether some tokens are no targets."""
        return self.targets_before is not None

    def targets_in(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Count the targets in spans of tokens (n,)."""
        if self.targets_before is None:
            return stop - start
        return self.targets_before[stop] - self.targets_before[start]

    def check_tokenizer(self, encoding: Encoding) -> None:
        """Refuse a tokenizer whose content differs from the store's, even if its name does not."""
        if fingerprint(encoding) != self.meta["tokenizer_fingerprint"]:
            made_with = f"made with tokenizer {self.meta['tokenizer']}"
            raise ValueError(f"{self.path}: {made_with}, not with what {encoding.name} is now")
        known = self.meta["vocab_size"], self.meta["end_of_text"]
        if known != (encoding.n_vocab, encoding.eot_token):
            raise ValueError(f"{self.path}/meta.json is damaged (vocab_size): prepare it again")

    def check_tokens(self, highest: int) -> None:
        """Refuse a store that holds a token outside its vocabulary."""
        if highest >= self.meta["vocab_size"]:
            raise ValueError(f"{self.path}: token {highest} is not in the vocabulary")


META = {"format": int, "dtype": str, "sha256": dict, "tokenizer": str, "tokenizer_fingerprint": str}
COUNTS = ("documents", "tokens", "bytes", "train_documents", "train_tokens", "train_bytes")
META |= dict.fromkeys((*COUNTS, "vocab_size", "end_of_text"), int)


def read_meta(path: Path) -> dict:
    """Read meta.json; the tokenizer is the copy in the store, if there is one."""
    file = path / "meta.json"
    try:
        meta = json.loads(file.read_text())
        wrong = [name for name, kind in META.items() if not isinstance(meta.get(name), kind)]
        wrong = wrong or [n for n in COUNTS if not 0 <= meta.get(f"train_{n}", 0) <= meta[n]]
        wrong = wrong or [n for n in ("dtype",) if meta[n] not in ("uint16", "uint32")]
    except (FileNotFoundError, NotADirectoryError):
        advice = "make one with prepare.py, or name another"
        raise ValueError(f"{path}: not a token store: {advice}") from None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        wrong = [error]
    if wrong:
        raise ValueError(f"{file} is damaged ({wrong[0]}): prepare the store again")
    return meta | {"tokenizer": tokenizer_in(path, meta["tokenizer"])}


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Parse JSON; None if it is not an object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def user_cache() -> Path:
    """Return the folder for what is made on first use where the usual place is read-only."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "parsimony"


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---- whole or not at all
#
# Output is written under a hidden name that ends in .tmp, synced to disk, and only then renamed. So
# no file under a final name is ever incomplete. Hidden names remain only after a kill or a power
# failure.


def named(error: OSError, unfinished: Path, path: Path) -> OSError:
    """Return an error with the user's path instead of the hidden one, or of none (a full disk)."""
    if not str(error.filename or unfinished).startswith(str(unfinished)):
        return error
    return OSError(error.errno, error.strerror or str(error), str(path))


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets its name when the block ends without an error.

    Example: with atomic_write(folder / "table.bin") as out: out.write(array)
    """
    if file.exists() and not file.is_file():
        raise ValueError(f"{file}: is not a file: name another")
    unfinished = hidden(file)
    try:
        with unfinished.open("xb") as out:  # "x" does not follow a link of this name
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(file)
    except OSError as error:
        raise named(error, unfinished, file) from None
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder to fill; it is renamed to `folder` if the block ends without an error.

    Raises: OSError if another process has made `folder` meanwhile, which is left unchanged
    """
    unfinished = hidden(folder)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        unfinished.rename(folder)
        sync(folder.parent)  # the rename itself
    except OSError as error:
        raise named(error, unfinished, folder) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Lock this folder while the block runs; the lock also ends if the process is killed.

    Args: wait False: if another process holds the lock, raise a ValueError instead of waiting
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            in_use = f"{folder} is in use by another process"
            raise ValueError(f"{in_use}: wait until it ends, or stop it") from None
        yield
    finally:
        os.close(descriptor)
