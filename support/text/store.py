"""A token store, the folder that training reads: how it is written, and how it is opened.

tokens.bin      each document as its tokens and end-of-text; held-out documents come last
documents.idx   int64, where each document begins, and where the last one ends
sources.idx     uint16, the source of each document; only if some document names one
meta.json       counts, the tokenizer's name and fingerprint, names of sources, sha256 of the files

prepare.py decides what is encoded and in which order, and writes meta.json.
"""

import hashlib
import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from support.text import tokenizer

FORMAT = 1  # of the folder; a store of another format is refused
SOURCE_DTYPE = np.dtype("uint16")
WRITTEN = ("tokens.bin", "documents.idx", "sources.idx")
HELD_OUT = "held_out.tmp"  # lists of encoded parts, one per append
NO_SOURCE = "unnamed"  # for documents without a source in a store where others have one


class Encoded(NamedTuple):
    """A document, or a part of one."""

    ids: np.ndarray  # its tokens, then end-of-text if it `ends`; nothing for an empty document
    held_out: bool
    source: str | None
    ends: bool


class StoreWriter:
    """Writes tokens.bin, documents.idx and sources.idx into a folder, then says what they hold."""

    def __init__(self, folder: Path, encoding: tiktoken.Encoding):
        self.folder = folder
        self.dtype = np.dtype("uint16" if encoding.n_vocab <= 65_535 else "uint32")
        self.byte_lengths = tokenizer.byte_lengths(encoding)
        self.counts = {"documents": 0, "tokens": 0, "bytes": 0}
        self.skipped = 0  # documents without text
        self.sources: dict[str, int] = {}  # numbered in order of appearance
        self.files = {name: (folder / name).open("w+b") for name in (*WRITTEN, HELD_OUT)}
        self.sha256 = {name: hashlib.sha256() for name in WRITTEN}
        self.appended = 0
        self._write("documents.idx", np.zeros(1, np.int64))

    def append(self, parts: list[Encoded]) -> None:
        """Add parts, those of one document in their order; held-out ones are written at the end."""
        self.skipped += sum(not len(part.ids) for part in parts)
        parts = [part for part in parts if len(part.ids)]
        self._write_parts([part for part in parts if not part.held_out])
        pickle.dump([part for part in parts if part.held_out], self.files[HELD_OUT])
        self.appended += 1

    def finish(self) -> dict:
        """Write what is held out; return what meta.json says about the files."""
        meta = {f"train_{key}": count for key, count in self.counts.items()}
        self.files[HELD_OUT].seek(0)
        for _ in range(self.appended):
            self._write_parts(pickle.load(self.files[HELD_OUT]))
        for file in self.files.values():
            file.close()
        (self.folder / HELD_OUT).unlink()
        if set(self.sources) <= {NO_SOURCE}:
            (self.folder / "sources.idx").unlink()
            del self.sha256["sources.idx"]
        else:
            meta["sources"] = list(self.sources)
        meta |= self.counts | {"skipped": self.skipped, "dtype": self.dtype.name}
        return meta | {"sha256": {name: sha.hexdigest() for name, sha in self.sha256.items()}}

    def _write_parts(self, parts: list[Encoded]) -> None:
        ids = np.concatenate([np.empty(0, self.dtype), *(part.ids for part in parts)])
        ends = self.counts["tokens"] + np.cumsum([len(part.ids) for part in parts], dtype=np.int64)
        sources = [self._number(part.source or NO_SOURCE) for part in parts if part.ends]
        self._write("tokens.bin", ids)
        self._write("documents.idx", ends[[part.ends for part in parts]])
        self._write("sources.idx", np.array(sources, SOURCE_DTYPE))
        self.counts["documents"] += len(sources)
        self.counts["tokens"] += len(ids)
        self.counts["bytes"] += int(self.byte_lengths[ids].sum())

    def _number(self, source: str) -> int:
        number = self.sources.setdefault(source, len(self.sources))
        if number > np.iinfo(SOURCE_DTYPE).max:
            raise ValueError(f"--source-field: over {number:,} sources: name another, or ''")
        return number

    def _write(self, name: str, array: np.ndarray) -> None:
        self.files[name].write(array)
        self.sha256[name].update(array)


@dataclass(frozen=True)
class Store:
    """A store, mapped into memory. Document i is tokens[offsets[i]:offsets[i + 1]].

    tokens    (tokens,) uint16 or uint32; the first train_tokens are for training
    offsets   (documents + 1,) int64
    sources   (documents,) uint16 index into source_names; None if no document names a source
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
        """Map a store, after comparing the sizes of its files with the counts in meta.json.

        Raises: ValueError for a folder that is not a store, or a damaged one
        """
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text())
            store_format = meta["format"]
            names = meta.get("sources", [])
            files = {
                "tokens.bin": (meta["tokens"], np.dtype(meta["dtype"])),
                "documents.idx": (meta["documents"] + 1, np.dtype("int64")),
            }
            if names:
                files["sources.idx"] = (meta["documents"], SOURCE_DTYPE)
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: no token store: make one with prepare.py") from None
        if store_format != FORMAT:
            raise ValueError(f"{path}: store format {store_format}, not {FORMAT}: prepare it again")
        arrays = {}
        for name, (count, dtype) in files.items():
            file = path / name
            size = count * dtype.itemsize
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
        stored = self.meta["tokenizer_fingerprint"]
        given = tokenizer.fingerprint(encoding)
        if given != stored:
            raise ValueError(
                f"{self.path}: made with tokenizer {self.meta['tokenizer']} ({stored[:12]}), not "
                f"{encoding.name} ({given[:12]}): choose that one, or prepare the store again"
            )

    def check_tokens(self, highest: int) -> None:
        """Refuse a store that holds a token outside its vocabulary."""
        if highest >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.path}: token {highest} is not in its vocabulary: prepare again"
            )
