"""A token store: a folder that prepare.py wrote, mapped into memory.

tokens.bin      each document as its tokens and end-of-text, the held-out documents last
documents.idx   where each document begins, and the end of the last, int64
sources.idx     number of each document's source, uint16; only where some document names one
meta.json       counts, the tokenizer's name and fingerprint, names of sources, sha256 of the others
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from support.text import tokenizer

SOURCE_DTYPE = np.dtype("uint16")
FORMAT = 1  # of the folder that prepare writes; a store of another format is refused


@dataclass(frozen=True)
class Store:
    """A store, mapped. Document i is tokens[offsets[i]:offsets[i + 1]].

    tokens    (tokens,) uint16 or uint32; the training documents are the first train_tokens of them
    offsets   (documents + 1,) int64
    sources   (documents,) uint16 index into source_names; None where no document names a source
    """

    path: Path
    meta: dict
    tokens: np.memmap
    offsets: np.memmap
    train_documents: int
    train_tokens: int
    sources: np.ndarray | None = None
    source_names: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Map a store, after comparing the sizes of its files with what meta.json counts.

        Raises:   ValueError for a folder that is no store, or a damaged one
        """
        path, arrays = Path(path), {}
        try:
            meta = json.loads((path / "meta.json").read_text())
            store_format = meta["format"]
            counts = {"tokens.bin": meta["tokens"], "documents.idx": meta["documents"] + 1}
            dtypes = {"tokens.bin": np.dtype(meta["dtype"]), "documents.idx": np.dtype("int64")}
            names = meta.get("sources", [])
            if names:
                counts["sources.idx"], dtypes["sources.idx"] = meta["documents"], SOURCE_DTYPE
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: no token store: make one with prepare.py") from None
        if store_format != FORMAT:
            raise ValueError(
                f"{path}: has store format {store_format}, not {FORMAT}: prepare it again"
            )
        for name, dtype in dtypes.items():
            size = counts[name] * dtype.itemsize
            file = path / name
            if not file.exists() or file.stat().st_size != size:
                raise ValueError(f"{file}: needs {size:,} bytes: prepare the store again")
            arrays[name] = np.memmap(file, dtype, mode="r")
        return cls(
            path=path,
            meta=meta,
            tokens=arrays["tokens.bin"],
            offsets=arrays["documents.idx"],
            train_documents=meta["train_documents"],
            train_tokens=meta["train_tokens"],
            sources=arrays.get("sources.idx"),
            source_names=names,
        )

    def check_tokenizer(self, encoding: tiktoken.Encoding) -> None:
        """Refuse a tokenizer other than the one the store was made with."""
        stored, given = self.meta["tokenizer_fingerprint"], tokenizer.fingerprint(encoding)
        if given != stored:
            raise ValueError(
                f"{self.path}: made with tokenizer {self.meta['tokenizer']} ({stored[:12]}), not "
                f"{encoding.name} ({given[:12]}): choose that one, or prepare the store again"
            )

    def verify(self) -> None:
        """Compare every file with the sha256 that meta.json records, which reads all of them."""
        for name, recorded in self.meta["sha256"].items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != recorded:
                    raise ValueError(f"{self.path / name}: sha256 differs: prepare the store again")

    def check_tokens(self, highest: int) -> None:
        """Refuse a store that turns out to hold a token outside its vocabulary."""
        if highest >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.path}: token {highest} is outside its vocabulary of"
                f" {self.meta['vocab_size']}: the store is damaged, prepare it again"
            )


# ---- store writer
#
# Writes the files of a token store, a batch of documents at a time; support/text/store.py reads.
#
# Counts and hashes what it writes. What is encoded, and in which order, is decided in prepare.py.


NO_SOURCE = "unnamed"  # the source of documents without one, in a store where others have one


class Encoded(NamedTuple):
    """A document, or a piece of one."""

    ids: np.ndarray  # its tokens, and end-of-text where the document ends
    source: str | None
    ends: bool  # whether the document ends with it


class StoreWriter:
    """tokens.bin, documents.idx and sources.idx while they are written into a folder."""

    def __init__(self, folder: Path, encoding: tiktoken.Encoding):
        self.folder = folder
        self.dtype = np.dtype("uint16" if encoding.n_vocab <= 65_535 else "uint32")
        self.byte_lengths = tokenizer.byte_lengths(encoding)
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self.sources: dict[str, int] = {}  # numbered as they come
        names = ("tokens.bin", "documents.idx", "sources.idx")
        self.files = {name: (folder / name).open("wb") for name in names}
        self.sha256 = {name: hashlib.sha256() for name in names}
        self._write("documents.idx", np.zeros(1, np.int64))

    def append(self, pieces: list[Encoded]) -> None:
        """Write pieces that follow those before: a document's come one after the other."""
        ids = np.concatenate([np.empty(0, self.dtype), *(piece.ids for piece in pieces)])
        lengths = np.array([len(piece.ids) for piece in pieces], np.int64)
        ends = np.array([piece.ends for piece in pieces], bool)
        self._write("tokens.bin", ids)
        self._write("documents.idx", self.counts["tokens"] + np.cumsum(lengths)[ends])
        numbers = [self._number(piece.source or NO_SOURCE) for piece in pieces if piece.ends]
        self._write("sources.idx", np.array(numbers, SOURCE_DTYPE))
        self.counts["documents"] += len(numbers)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += int(self.byte_lengths[ids].sum())

    def _number(self, source: str) -> int:
        number = self.sources.setdefault(source, len(self.sources))
        if number > np.iinfo(SOURCE_DTYPE).max:
            raise ValueError(
                f"--source-field: more than {number:,} different sources, which is no grouping of"
                " documents: name another field, or '' for none"
            )
        return number

    def close(self) -> dict[str, Any]:
        """What meta.json says of the files; no file of sources is left where there are none."""
        for file in self.files.values():
            file.close()
        sources = {"sources": list(self.sources)}
        if set(self.sources) <= {NO_SOURCE}:
            (self.folder / "sources.idx").unlink()
            del self.sha256["sources.idx"]
            sources = {}
        return sources | {"sha256": {name: sha.hexdigest() for name, sha in self.sha256.items()}}

    def _write(self, name: str, array: np.ndarray) -> None:
        self.files[name].write(array)
        self.sha256[name].update(array)
