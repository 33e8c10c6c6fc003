"""Tokenizers, the token store that training reads, and files that are written whole or not at all.

A store is a folder. This one holds the documents "ab" and "c", encoded as bytes (end-of-text is
256); the second one is held out:

    tokens.bin      97 98 256 | 99 256      uint16, or uint32 if the vocabulary exceeds 65,535
    documents.idx   0 3 5                   int64, where each document begins and the last one ends
    meta.json       {"train_documents": 1, "train_tokens": 3, "train_bytes": 2, "documents": 2, ...}
                    counts, the tokenizer's name and fingerprint, sha256 of the files

Held-out documents come last. Training reads only the tokens before them, so it never sees one.

There are five tokenizers, all with the same five special tokens: `pd4k` (the default: 4,096 ranks
learned from the embedded corpus), `bytes` (no merges), `gpt2` (from tiktoken), any .tiktoken file
of ranks, or Llama 3's tokenizer.model, which is such a file with a different split pattern. Text
that spells a special token is encoded as plain text: prepare.py and data.py insert end-of-text,
[CLS] and the others by their ids.

prepare.py reads text, and makes a store or ranks from it with what stands here. In reading order:
tokenizers, the store, atomic files, ranks and how they are learned.

Paper: Sennrich et al. 2016, arXiv 1508.07909, algorithm 1 (merge the most frequent pair); Radford
et al. 2019 (GPT-2), section 2.2 (merge bytes, only inside the pieces that a pattern splits off)
"""

import base64
import fcntl
import hashlib
import heapq
import json
import os
import secrets
import shutil
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import regex  # tiktoken's own dependency: `re` has no \p{L}
import tiktoken
from tqdm import tqdm

from support import process

# ---- tokenizers

PD4K = process.ROOT / "corpus" / "pd4k.tiktoken"
NAMES = "pd4k, bytes, gpt2, a .tiktoken file or Llama 3's tokenizer.model"
SPECIAL_TOKENS = ("<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]")

# GPT-2's pattern as tiktoken writes it, with one bound added: tiktoken's regex engine overflows its
# stack on about a million blanks in a row, so a piece has at most 100,000. It is copied here,
# because the fingerprint depends on it and tiktoken might rewrite its pattern.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s{1,100000}(?!\S)|\s"

# Llama 3's pattern, with the same bound, and its 256 special tokens, of which pretraining text uses
# only the first two. We use four that Meta reserves for BERT's special tokens.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s{1,100000}(?!\S)|\s"
)
LLAMA3_SPECIAL = ("<|begin_of_text|>", *SPECIAL_TOKENS, *(f"[RESERVED{i}]" for i in range(250)))


def get_encoding(name: str = "pd4k") -> tiktoken.Encoding:
    """Load a tokenizer by name or from a file of ranks.

    A .tiktoken file is used with GPT-2's split pattern, a .model file with Llama 3's. The special
    tokens follow the ranks: end-of-text first (50256 for gpt2, as published; second for Llama 3:
    128001), then [PAD], [CLS], [SEP], [MASK].
    """
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except OSError:
            raise ValueError("tokenizer gpt2: neither in TIKTOKEN_CACHE_DIR nor online") from None
    elif name == "pd4k" or name.endswith((".tiktoken", ".model")):
        ranks = read_ranks(PD4K if name == "pd4k" else Path(name))
    else:
        raise ValueError(f"tokenizer {name!r}: choose {NAMES}")
    is_llama3 = name.endswith(".model")
    tokens = LLAMA3_SPECIAL if is_llama3 else SPECIAL_TOKENS
    return tiktoken.Encoding(
        name,
        pat_str=LLAMA3_SPLIT if is_llama3 else SPLIT,
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + i for i, token in enumerate(tokens)},
    )


# tiktoken has no public access to an encoding's pattern and ranks, so these functions read the
# attributes that it pickles.
def vocab_size(encoding: tiktoken.Encoding, model: str) -> int:
    """Count the ids that a model needs. A GPT does not need our special tokens for BERT."""
    only_bert = len(SPECIAL_TOKENS) - 1 if encoding._pat_str == SPLIT else 0
    return encoding.n_vocab - (only_bert if model == "gpt" else 0)


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Hash what an encoding consists of: the sha256 of its pattern, ranks and special tokens."""
    ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
    content = [encoding._pat_str, ranks, sorted(encoding._special_tokens.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def byte_lengths(encoding: tiktoken.Encoding) -> np.ndarray:
    """Count the bytes of text that each id stands for, 0 for a special token: (n_vocab,) int64.

    Example: with any tokenizer, byte_lengths[ids of 'the whale'].sum() is 9
    """
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


# ---- the store

FORMAT = 1  # of the folder; stores in another format are refused


class StoreWriter:
    """Writes a store's files into a folder: documents as they arrive, but held-out ones last."""

    def __init__(self, folder: Path, encoding: tiktoken.Encoding):
        self.folder = folder
        self.encoding = encoding
        self.dtype = np.dtype("uint16" if encoding.n_vocab <= 65_535 else "uint32")
        self.byte_lengths = byte_lengths(encoding)
        # The first entry of each list is for training documents, the second for held-out ones.
        self.files = [(folder / name).open("w+b") for name in ("tokens.bin", "held_out.tmp")]
        self.ends = [array("q"), array("q")]  # where documents end, in tokens
        self.tokens = [0, 0]
        self.bytes = [0, 0]

    def append(self, ids: np.ndarray, held_out: bool, ends: Iterable[int]) -> None:
        """Append tokens to the training documents or to the held-out ones.

        Args:    ends where documents end in `ids`, each after its end-of-text; tokens after the
                      last end begin a document that the next call continues
        Example: 97 98 256 99 with ends [3], then 256 with ends [1]: the documents "ab" and "c"
        """
        self.files[held_out].write(ids.astype(self.dtype))
        self.ends[held_out].extend(self.tokens[held_out] + end for end in ends)
        self.tokens[held_out] += len(ids)
        self.bytes[held_out] += int(self.byte_lengths[ids].sum())

    def finish(self, tokenizer: str, inputs: Sequence[str | Path], **origin: object) -> dict:
        """Append the held-out tokens to the others, and write documents.idx and meta.json.

        Args:    tokenizer the name that get_encoding loads it by
                 inputs    the files that the text came from, for the error if they have none
                 origin    more entries for meta.json
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
        meta = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "sha256": {
                name: sha256_of(self.folder / name) for name in ("tokens.bin", "documents.idx")
            },
            **origin,
            "train_documents": len(trained),
            "documents": len(trained) + len(tested),
            "train_tokens": self.tokens[0],
            "tokens": sum(self.tokens),
            "train_bytes": self.bytes[0],
            "bytes": sum(self.bytes),
            "tokenizer": tokenizer,
            "tokenizer_fingerprint": fingerprint(self.encoding),
            "vocab_size": self.encoding.n_vocab,
            "end_of_text": self.encoding.eot_token,
        }
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        return meta


@dataclass(frozen=True)
class Store:
    """A store opened for reading. Document i is tokens[offsets[i]:offsets[i + 1]].

    meta      the contents of meta.json; the first meta["train_tokens"] tokens are for training
    tokens    (tokens,) uint16 or uint32
    offsets   (documents + 1,) int64
    """

    path: Path
    meta: dict
    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Memory-map the files of a store, after checking that their lengths match meta.json."""
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: not a token store: make one with prepare.py") from None
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
        ends = np.array([0, meta["train_documents"], meta["documents"]])
        if offsets[ends].tolist() != [0, meta["train_tokens"], meta["tokens"]]:
            raise ValueError(f"{path}: documents.idx does not match meta.json: prepare it again")
        return cls(path, meta, tokens, offsets)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per training token; end-of-text counts as a token without bytes."""
        return self.meta["train_bytes"] / self.meta["train_tokens"]

    def check_tokenizer(self, encoding: tiktoken.Encoding) -> None:
        """Refuse a tokenizer whose content differs from the store's, even if its name does not."""
        if fingerprint(encoding) != self.meta["tokenizer_fingerprint"]:
            made_with = f"made with tokenizer {self.meta['tokenizer']}"
            raise ValueError(f"{self.path}: {made_with}, not with the present {encoding.name}")

    def check_tokens(self, highest: int) -> None:
        """Refuse a store that holds a token outside its vocabulary."""
        if highest >= self.meta["vocab_size"]:
            raise ValueError(f"{self.path}: token {highest} is not in the vocabulary")


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---- whole or not at all
#
# Output is written under a hidden name that ends in .tmp, synced to disk, and only then renamed. So
# no file under a final name is ever incomplete. Hidden names remain only after a kill or a power
# failure.


def hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def atomic_write(file: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets its name when the block ends without an error.

    Example: with atomic_write(folder / "table.bin") as out: out.write(array)
    """
    unfinished = hidden(file)
    try:
        with unfinished.open("xb") as out:  # "x" does not follow a link of this name
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(file)
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


# ---- ranks


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a .tiktoken file: each line has a token in base64 and its rank, counting from 0."""
    ranks: dict[bytes, int] = {}
    for row, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
        except ValueError:
            token = rank = b""
        if rank != b"%d" % len(ranks) or token in ranks:
            raise ValueError(f"{path}:{row}: is not a new token in base64 with rank {len(ranks)}")
        ranks[token] = len(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}:{len(ranks)}: ends without a rank for byte {missing[0]}")
    return ranks


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a .tiktoken file, whole or not at all."""
    with atomic_write(path) as out:
        for token, rank in ranks.items():
            out.write(b"%s %d\n" % (base64.b64encode(token), rank))


def learn_ranks(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Learn a byte-pair vocabulary: repeatedly turn the most frequent pair into a token.

    Pairs are counted inside the pieces of the split pattern, so no token crosses a border between
    pieces. Among equally frequent pairs, the one with the lowest ids is merged first, so the ranks
    do not depend on the order of the documents.

    Paper:    arXiv 1508.07909, algorithm 1
    Returns:  {token: rank} in the order of the ranks; the 256 bytes come first
    Raises:   ValueError if n_ranks is below 256, or if it is not reached before no pair occurs
              twice
    Cost:     a merge visits only the distinct pieces that contain its pair, and an outdated count
              is corrected when it reaches the top of the heap
    Deviates: a pair whose bytes are already a token (aa+aaa after aaaa+a) gets that token's id
    Example:  ['aaabdaaabac'] and 259 ranks give aa (4 times), then ab (2 times, like aa+a, but its
              ids are lower), then aa+ab
    """
    if n_ranks < 256:
        raise ValueError(f"--learn-ranks {n_ranks}: needs at least 256, one for each byte")
    split = regex.compile(SPLIT)
    copies: Counter[str] = Counter()
    for text in texts:
        copies.update(split.findall(text))
    # A word is a piece with one character per token, chr(rank). Strings then compare like their
    # ranks, and str.replace merges like an encoder: from left to right, without overlap.
    words = {piece: piece.encode().decode("latin-1") for piece in copies}
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokens = list(ranks)
    counts: Counter[str] = Counter()
    holders = defaultdict(set)  # pair -> pieces that contain it, or used to

    def count_pairs(pieces: Iterable[str], sign: int) -> None:
        for piece in pieces:
            for a, b in pairwise(words[piece]):
                counts[a + b] += sign * copies[piece]
                holders[a + b].add(piece)

    count_pairs(words, 1)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    bar = tqdm(total=n_ranks, initial=256, unit=" ranks", disable=None, leave=False)
    while len(ranks) < n_ranks:
        minus_count, pair = heapq.heappop(heap) if heap else (0, "")
        if minus_count != -counts[pair]:  # outdated: the count has fallen (new highs are pushed)
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        if minus_count > -2:
            raise ValueError(f"--learn-ranks {n_ranks}: training documents yield only {len(ranks)}")
        token = tokens[ord(pair[0])] + tokens[ord(pair[1])]
        if token not in ranks:
            ranks[token] = len(ranks)
            tokens.append(token)
            bar.update()
        merged = chr(ranks[token])
        pieces = holders.pop(pair)
        count_pairs(pieces, -1)
        for piece in pieces:
            words[piece] = words[piece].replace(pair, merged)
        count_pairs(pieces, 1)
        risen = {a + b for i in pieces for a, b in pairwise(words[i]) if merged in (a, b)}
        for changed in risen:
            heapq.heappush(heap, (-counts[changed], changed))
    bar.close()
    return ranks
