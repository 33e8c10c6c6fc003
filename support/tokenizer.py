"""Tokenizers: five of them, and how a byte-pair vocabulary is learned.

    pd4k               the default: 4,096 ranks learned from the embedded corpus
    bytes              no merges
    gpt2               from tiktoken
    FILE.tiktoken      any file of ranks, such as prepare.py --learn-ranks writes
    tokenizer.model    Llama 3's: such a file with a different split pattern

All have the same five special tokens. Text that spells one is encoded as plain text: prepare.py and
bert.py insert end-of-text, [CLS] and the others by their ids.

Paper: Sennrich et al. 2016, arXiv 1508.07909, algorithm 1 (merge the most frequent pair); Radford
et al. 2019 (GPT-2), section 2.2 (merge bytes, only inside the pieces that a pattern splits off)
"""

import base64
import hashlib
import heapq
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex  # tiktoken's own dependency: `re` has no \p{L}
import tiktoken
from tqdm import tqdm

from support import process

PD4K = process.ROOT / "corpus" / "pd4k.tiktoken"
SUFFIXES = (".tiktoken", ".model")
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

    A .tiktoken file is used with GPT-2's split pattern, a .model file with Llama 3's; its absolute
    path, valid in any folder, names the encoding. The special tokens follow the ranks: end-of-text
    first (50256 for gpt2, as published; second for Llama 3: 128001), then [PAD], [CLS], [SEP],
    [MASK].
    """
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except OSError:
            raise ValueError("tokenizer gpt2: neither in TIKTOKEN_CACHE_DIR nor online") from None
    elif name == "pd4k":
        ranks = read_ranks(PD4K)
    elif name.endswith(SUFFIXES):
        name = str(Path(name).absolute())  # a link's own name has the suffix
        ranks = read_ranks(Path(name))
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


# ---- ranks


def copy_ranks(name: str, folder: Path) -> None:
    """Copy the ranks of a tokenizer that is a file: who has the folder can use it anywhere."""
    if (file := Path(name)).is_absolute():
        shutil.copyfile(file, folder / f"tokenizer{file.suffix}")


def tokenizer_in(folder: Path, name: str) -> str:
    """Return the tokenizer that `copy_ranks` has put into a folder; without one, `name`."""
    copies = (folder.absolute() / f"tokenizer{suffix}" for suffix in SUFFIXES)
    return next((str(copy) for copy in copies if os.path.lexists(copy)), name)


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
