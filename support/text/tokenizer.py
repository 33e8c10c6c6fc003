"""Text to token ids and back: tiktoken encodings, and how their ranks are learned.

Five tokenizers, all with the same five special tokens: `pd4k` (4,096 ranks learned from the
embedded corpus, the default), `bytes` (no merges), `gpt2` (tiktoken's), any .tiktoken file of
ranks, or Llama 3's tokenizer.model, which is such a file for a pattern of its own. Text that spells
a special token is encoded as plain text: prepare.py and data.py insert end-of-text, [CLS] and the
others by their ids.

Paper: Sennrich et al. 2016, arXiv 1508.07909, algorithm 1 (merge the most frequent pair); Radford
et al. 2019 (GPT-2), section 2.2 (merge bytes, only inside the pieces that a pattern splits off)

    python -m support.text.tokenizer corpus/pd-mix.jsonl.gz --ranks 4096 --out pd4k.tiktoken
"""

import base64
import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex  # tiktoken's own dependency: `re` has no \p{L}
import tiktoken
from tqdm import tqdm

from support import runtime
from support.base.atomic import atomic_write
from support.settings import count
from support.text.corpus import Corpus, add_flags

PD4K = runtime.ROOT / "corpus" / "pd4k.tiktoken"
NAMES = "pd4k, bytes, gpt2, a .tiktoken file or Llama 3's tokenizer.model"
NOT_HERE = "tiktoken has it neither in its TIKTOKEN_CACHE_DIR nor from the network"
SPECIAL_TOKENS = ("<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]")

# GPT-2's pattern as tiktoken writes it, with one bound added: tiktoken's regex engine overflows its
# stack on about a million blanks in a row, so a piece has at most 100,000. The pattern is part of
# the fingerprint, so it is copied here: tiktoken may rewrite its own.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s{1,100000}(?!\S)|\s"

# Llama 3's, with the same bound, and its special tokens: 256, of which a pretraining text has the
# first two. Four of those that Meta reserves are BERT's here.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}++|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s{1,100000}(?!\S)|\s"
)
LLAMA3_SPECIAL = ("<|begin_of_text|>", *SPECIAL_TOKENS, *(f"[RESERVED{i}]" for i in range(250)))


def get_encoding(name: str = "pd4k") -> tiktoken.Encoding:
    """Load a tokenizer by its name, or from a file of ranks: .tiktoken for GPT-2's pattern, .model
    for Llama 3's.

    The special tokens come after the ranks: end-of-text first (50256 for gpt2, as published; with
    Llama 3 the second, 128001), then [PAD], [CLS], [SEP], [MASK].

    Raises: ValueError for an unknown name, a bad file (with its line), or if gpt2 is out of reach
    """
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        try:
            ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
        except OSError as error:
            raise ValueError(f"tokenizer gpt2: {NOT_HERE} ({type(error).__name__})") from error
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


def store_encoding(store: str | Path, meta: dict) -> tiktoken.Encoding:
    """Load the tokenizer that a token store was made with.

    Args:   meta the contents of its meta.json
    Raises: ValueError if its .tiktoken file is gone, or holds other ranks now
    """
    name = meta["tokenizer"]
    try:
        encoding = get_encoding(name)
    except (ValueError, OSError) as error:
        reason = runtime.one_line(error)
        raise ValueError(f"{store}: {reason}: name its tokenizer with --tokenizer") from None
    if fingerprint(encoding) != meta["tokenizer_fingerprint"]:
        raise ValueError(
            f"{store}: {name} has changed: name the old ranks with --tokenizer, or prepare it again"
        )
    return encoding


# tiktoken has no public access to an encoding's pattern and ranks: these functions read the
# attributes that it pickles.
def vocab_size(encoding: tiktoken.Encoding, model: str) -> int:
    """Count the ids a model needs: all, but for a GPT none after end-of-text, if these are ours."""
    only_bert = len(SPECIAL_TOKENS) - 1 if encoding._pat_str == SPLIT else 0
    return encoding.n_vocab - (only_bert if model == "gpt" else 0)


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Identify an encoding by its content: the sha256 of pattern, ranks and special tokens."""
    ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
    content = [encoding._pat_str, ranks, sorted(encoding._special_tokens.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def byte_lengths(encoding: tiktoken.Encoding) -> np.ndarray:
    """Count the bytes of text that each id stands for, 0 for a special token.

    The size of a text is the sum over its ids: bits per byte need no decoding.

    Returns: (n_vocab,) int64
    Example: with any tokenizer, byte_lengths[ids of 'the whale'].sum() is 9
    """
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a .tiktoken file. A line is a token in base64 and its rank; ranks count up from 0."""
    ranks: dict[bytes, int] = {}
    for row, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
        except ValueError:
            token = rank = b""
        if rank != b"%d" % len(ranks) or token in ranks:
            hint = (
                "; Llama 2's, of SentencePiece, is not supported" if path.suffix == ".model" else ""
            )
            raise ValueError(
                f"{path}:{row}: needs a new token in base64 and rank {len(ranks)}{hint}"
            )
        ranks[token] = len(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}:{len(ranks)}: ends without a rank for byte {missing[0]}")
    return ranks


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a .tiktoken file, whole or not at all."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    with atomic_write(path) as out:
        out.write(b"".join(lines))


def learn_ranks(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Learn a byte-pair vocabulary: repeatedly make a token of the most frequent pair.

    Pairs are counted inside the pieces of the split pattern, so no token crosses their borders.
    Among equally frequent pairs the one with the lowest ids is merged first, so the ranks do not
    depend on the order of the documents.

    Paper:    arXiv 1508.07909, algorithm 1
    Returns:  {token: rank} in the order of the ranks; the 256 bytes come first
    Raises:   ValueError for n_ranks below 256, or when no pair occurs twice
    Cost:     a merge visits only the distinct pieces that contain its pair, and an outdated count
              is corrected when it comes up in the heap. pd-mix, 4,096 ranks: under 10 s on one core
    Deviates: a pair whose bytes are already a token (aa+aaa after aaaa+a) takes that token's id
    Example:  ['aaabdaaabac'] and 259 ranks give aa (4 times), then ab (2 times, like aa+a, but its
              ids are lower), then aa+ab
    """
    if n_ranks < 256:
        raise ValueError(f"--ranks {n_ranks}: needs at least 256, one for each byte")
    split = regex.compile(SPLIT)
    copies: Counter[str] = Counter()
    for text in texts:
        copies.update(split.findall(text))
    # A word is a piece with one character per token, chr(rank). Strings compare as their ranks do,
    # and str.replace merges as an encoder does: from left to right, without overlap.
    words = {piece: piece.encode().decode("latin-1") for piece in copies}
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokens = list(ranks)
    counts: Counter[str] = Counter()
    holders = defaultdict(set)  # pair -> pieces that contain it, or once did

    def count_pairs(pieces: Iterable[str], sign: int) -> None:
        for piece in pieces:
            for a, b in pairwise(words[piece]):
                counts[a + b] += sign * copies[piece]
                holders[a + b].add(piece)

    count_pairs(words, 1)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while len(ranks) < n_ranks:
        minus_count, pair = heapq.heappop(heap) if heap else (0, "")
        if minus_count != -counts[pair]:  # outdated: the count fell since (a risen one was pushed)
            heapq.heappush(heap, (-counts[pair], pair))
            continue
        if minus_count > -2:
            raise ValueError(f"--ranks {n_ranks}: the training documents give only {len(ranks)}")
        token = tokens[ord(pair[0])] + tokens[ord(pair[1])]
        if token not in ranks:
            ranks[token] = len(ranks)
            tokens.append(token)
        merged = chr(ranks[token])
        pieces = holders.pop(pair)
        count_pairs(pieces, -1)
        for piece in pieces:
            words[piece] = words[piece].replace(pair, merged)
        count_pairs(pieces, 1)
        risen = {a + b for i in pieces for a, b in pairwise(words[i]) if merged in (a, b)}
        for changed in risen:
            heapq.heappush(heap, (-counts[changed], changed))
    return ranks


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(
        prog="python -m support.text.tokenizer", description="Learn ranks from documents."
    )
    add_flags(parser)
    parser.add_argument("--ranks", type=count, default=4096, help="the 256 bytes included (4096)")
    parser.add_argument("--out", type=Path, required=True, help="the .tiktoken file to write")
    args = parser.parse_args(argv)
    if args.out.suffix != ".tiktoken":
        raise ValueError(f"--out {args.out}: name a file that ends in .tiktoken")
    if not args.out.absolute().parent.is_dir():  # before the ranks are learned, not after
        raise ValueError(f"--out {args.out}: there is no folder {args.out.parent}")

    corpus = Corpus(args.inputs, args.holdout, args.split_on, text_column=args.text_column)

    def texts(held_out: bool) -> Iterable[str]:
        parts = tqdm(corpus.parts(), "documents", disable=None, leave=False)
        return (part.text for part in parts if part.held_out == held_out)

    write_ranks(args.out, learn_ranks(texts(held_out=False), args.ranks))
    encoding = get_encoding(str(args.out))
    held_out = list(texts(held_out=True))
    n_bytes = sum(len(text.encode()) for text in held_out)
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in held_out)
    print(
        f"{args.out}: {encoding.eot_token:,} ranks; {len(held_out):,} held-out documents:"
        f" {n_bytes:,} bytes, {n_tokens:,} tokens, {n_bytes / max(1, n_tokens):.3f} bytes per token"
    )


if __name__ == "__main__":
    runtime.exit_cleanly(main)
