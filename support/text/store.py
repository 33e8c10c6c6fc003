"""A token store, the folder that training reads: how it is written, and how it is opened.

tokens.bin      each document as its tokens and end-of-text; held-out documents come last
documents.idx   int64, where each document begins, and where the last one ends
meta.json       counts, the tokenizer's name and fingerprint, sha256 of the files

prepare.py decides what is encoded and in which order, and writes meta.json.
"""

import hashlib
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from support.text import tokenizer

FORMAT = 1  # of the folder; a store of another format is refused
WRITTEN = ("tokens.bin", "documents.idx")
HELD_OUT = "held_out.tmp"  # lists of encoded parts, one per append


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("uint16" if vocab_size <= 65_535 else "uint32")


class Encoded(NamedTuple):
    """A document, or a part of one."""

    ids: np.ndarray  # its tokens, then end-of-text if it `ends`; nothing for an empty document
    held_out: bool
    ends: bool


class StoreWriter:
    """Writes tokens.bin and documents.idx into a folder, then says what they hold."""

    def __init__(self, folder: Path, encoding: tiktoken.Encoding):
        self.folder = folder
        self.dtype = token_dtype(encoding.n_vocab)
        self.byte_lengths = tokenizer.byte_lengths(encoding)
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self.skipped = 0  # documents without text
        self.files = {name: (folder / name).open("w+b") for name in (*WRITTEN, HELD_OUT)}
        self.sha256 = {name: hashlib.sha256() for name in WRITTEN}
        self._write("documents.idx", np.zeros(1, np.int64))

    def append(self, parts: list[Encoded]) -> None:
        """Add parts, those of one document in their order; held-out ones are written at the end."""
        self.skipped += sum(not len(part.ids) for part in parts)
        parts = [part for part in parts if len(part.ids)]
        self._write_parts([part for part in parts if not part.held_out])
        pickle.dump([part for part in parts if part.held_out], self.files[HELD_OUT])

    def finish(self) -> dict:
        """Write what is held out; return what meta.json says about the files."""
        meta = {f"train_{key}": count for key, count in self.counts.items()}
        held_out = self.files[HELD_OUT]
        held_out.seek(0)
        while held_out.peek(1):
            self._write_parts(pickle.load(held_out))
        for file in self.files.values():
            file.close()
        (self.folder / HELD_OUT).unlink()
        meta |= self.counts | {"skipped": self.skipped, "dtype": self.dtype.name}
        return meta | {"sha256": {name: sha.hexdigest() for name, sha in self.sha256.items()}}

    def _write_parts(self, parts: list[Encoded]) -> None:
        ids = np.concatenate([np.empty(0, self.dtype), *(part.ids for part in parts)])
        ends = self.counts["tokens"] + np.cumsum([len(part.ids) for part in parts], dtype=np.int64)
        self._write("tokens.bin", ids)
        ends = ends[[part.ends for part in parts]]
        self._write("documents.idx", ends)
        self.counts["documents"] += len(ends)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += int(self.byte_lengths[ids].sum())

    def _write(self, name: str, array: np.ndarray) -> None:
        self.files[name].write(array)
        self.sha256[name].update(array)


@dataclass(frozen=True)
class Store:
    """A store that is open to be read. Document i is tokens[offsets[i]:offsets[i + 1]].

    meta      the contents of meta.json; the first meta["train_tokens"] are for training
    tokens    (tokens,) uint16 or uint32
    offsets   (documents + 1,) int64
    """

    path: Path
    meta: dict
    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Map the files of a store, if they are as long as meta.json says.

        Raises: ValueError for a folder that is not a store, or one whose files do not agree
        """
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: no token store: make one with prepare.py") from None
        if meta["format"] != FORMAT:
            raise ValueError(f"{path}: is of format {meta['format']}: prepare the store again")

        def array(name: str, count: int, dtype: np.dtype) -> np.ndarray:
            file = path / name
            size = count * dtype.itemsize
            if not file.exists() or file.stat().st_size != size:
                raise ValueError(f"{file}: needs {size:,} bytes: prepare the store again")
            return np.asarray(np.memmap(file, dtype, "r"))

        store = cls(
            path=path,
            meta=meta,
            tokens=array("tokens.bin", meta["tokens"], token_dtype(meta["vocab_size"])),
            offsets=array("documents.idx", meta["documents"] + 1, np.dtype("int64")),
        )
        ends = np.array([0, meta["train_documents"], meta["documents"]])
        if store.offsets[ends].tolist() != [0, meta["train_tokens"], meta["tokens"]]:
            raise ValueError(f"{path}: its files and meta.json do not agree: prepare it again")
        return store

    @property
    def bytes_per_token(self) -> float:
        """Of the text for training; end-of-text is a token of no bytes."""
        return self.meta["train_bytes"] / self.meta["train_tokens"]

    def check_tokenizer(self, encoding: tiktoken.Encoding) -> None:
        """Refuse a tokenizer other than the one the store was made with."""
        meta, given = self.meta, tokenizer.fingerprint(encoding)
        stored = meta["tokenizer_fingerprint"]
        if (given, encoding.n_vocab) != (stored, meta["vocab_size"]):
            raise ValueError(
                f"{self.path}: made with tokenizer {meta['tokenizer']} ({stored[:12]}, of"
                f" {meta['vocab_size']:,} tokens), not {encoding.name} ({given[:12]}, of"
                f" {encoding.n_vocab:,}): choose that one, or prepare the store again"
            )

    def check_tokens(self, highest: int) -> None:
        """Refuse a store that holds a token outside its vocabulary."""
        if highest >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.path}: token {highest} is not in its vocabulary: prepare again"
            )
