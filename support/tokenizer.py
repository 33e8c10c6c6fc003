"""Text to token ids and back: tiktoken encodings, and the learning of their ranks.

Four tokenizers, each with the same five special tokens: `pd4k` (4,096 ranks learnt from the
embedded corpus, the default), `bytes` (no merges), `gpt2` (tiktoken's own), or any file of ranks.
Does not change the text, and never finds a special token in it: whoever lays out samples puts
end-of-text, [CLS] and the rest where they belong, by id.

Paper: Sennrich et al. 2016, arXiv 1508.07909, algorithm 1 (learning by the most frequent pair);
Radford et al. 2019 (GPT-2), section 2.2 (on bytes, inside pieces that a pattern splits off).

    python -m support.tokenizer show "Call me Ishmael."
    python -m support.tokenizer learn corpus/pd-mix.jsonl.gz --ranks 4096 --out pd4k.tiktoken
"""

import argparse
import base64
import hashlib
import heapq
import json
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import regex  # tiktoken's own dependency: `re` has no \p{L}
import tiktoken
from tqdm import tqdm

from support import runtime
from support.documents import is_held_out, read_documents

PD4K = Path(__file__).resolve().parents[1] / "corpus" / "pd4k.tiktoken"
SPECIAL_TOKENS = ("<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]")

# GPT-2's pattern in tiktoken's form, with one bound added: tiktoken's regex engine overflows its
# stack on a run of about a million blanks, so a run is split off 100,000 at a time. Held here, not
# taken from tiktoken, so that fingerprints outlive the rewrites that tiktoken gives its copy.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s{1,100000}(?!\S)|\s"


def get_encoding(name: str = "pd4k") -> tiktoken.Encoding:
    """Load a tokenizer by its name, or from a .tiktoken file of ranks with GPT-2's pattern.

    The special tokens follow the ranks: end-of-text is n_ranks (50256 for gpt2, as ever), then
    [PAD], [CLS], [SEP], [MASK]. A GPT leaves the last four out of its vocabulary (vocab_size).

    Raises:   ValueError for an unknown name, a bad file (with its line), or gpt2 out of reach
    """
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        ranks = _gpt2_ranks()
    elif name == "pd4k" or name.endswith(".tiktoken"):
        ranks = read_ranks(PD4K if name == "pd4k" else Path(name))
    else:
        raise ValueError(f"tokenizer {name!r}: choose pd4k, bytes, gpt2 or a .tiktoken file")
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding(name, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)


def vocab_size(encoding: tiktoken.Encoding, model: str) -> int:
    """Count the ids a model needs: 'gpt' ends with end-of-text, 'bert' has all special tokens."""
    return {"gpt": encoding.eot_token + 1, "bert": encoding.n_vocab}[model]


# tiktoken gives no public access to an encoding's pattern and ranks: the two functions below read
# the attributes that it pickles.
def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Name an encoding by its content: sha256 over pattern, ranks and special tokens."""
    ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
    content = [encoding._pat_str, ranks, sorted(encoding._special_tokens.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def byte_lengths(encoding: tiktoken.Encoding) -> np.ndarray:
    """Count the bytes of text that each id stands for, 0 for a special token.

    A sum over ids is the size of their text, so bits per byte need no decoding.

    Returns:  (n_vocab,) int64
    Example:  with any tokenizer, byte_lengths[ids of 'the whale'].sum() is 9
    """
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a .tiktoken file: a line is a token in base64 and its rank, which counts up from 0."""
    ranks: dict[bytes, int] = {}
    for row, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            in_order = int(rank) == len(ranks) and token not in ranks
        except ValueError:
            raise ValueError(f"{path}:{row}: needs a base64 token, a blank, its rank") from None
        if not in_order:
            raise ValueError(f"{path}:{row}: needs a new token with rank {len(ranks)}")
        ranks[token] = len(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}:{len(ranks)}: ends without byte {missing[0]}: each needs a rank")
    return ranks


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a .tiktoken file, whole or not at all."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        partial.write_bytes(b"".join(lines))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _gpt2_ranks(seconds: float = 60) -> dict[bytes, int]:
    """Load GPT-2's ranks from tiktoken's cache, or by its download.

    The download has no time limit and hangs where packets vanish; a thread of the pool is a
    daemon, which can be left behind.
    """
    loading = ThreadPool(1).apply_async(tiktoken.get_encoding, ["gpt2"])
    try:
        return loading.get(seconds)._mergeable_ranks
    except Exception as error:
        raise ValueError(
            f"tokenizer gpt2: no copy at hand and no download ({type(error).__name__}): "
            "set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's two gpt2 files"
        ) from None


def learn_ranks(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Learn a byte-pair vocabulary: again and again, make a token of the most frequent pair.

    Pairs are counted inside the pieces of the split pattern; no token crosses their borders. Of
    pairs that are equally frequent the one with the lowest ids wins, so the outcome depends on the
    counts alone, not on the order of the documents.

    Paper:    arXiv 1508.07909, algorithm 1
    Returns:  {token: rank} in the order of the ranks; the 256 bytes come first
    Raises:   ValueError for fewer than 256, or for more than pairs that occur twice can give
    Cost:     a merge visits only the distinct pieces that hold its pair; the heap is put right
              lazily. pd-mix, 4,096 ranks: under 10 s on one core
    Deviates: a pair whose bytes are a token already (aa+aaa after aaaa+a) takes that token's id
    Example:  ['aaabdaaabac'] and 259 ranks give aa (4 times), then ab (2 times, as is aa+a, but
              its ids are lower), then aa+ab
    """
    if n_ranks < 256:
        raise ValueError(f"--ranks {n_ranks}: needs at least 256, one for each byte")
    split = regex.compile(SPLIT)
    copies: Counter[str] = Counter()
    for text in texts:
        copies.update(split.findall(text))
    # A word is a piece with one character a token, chr(rank). Strings compare as their ranks do,
    # and str.replace merges as an encoder does: from left to right, without overlap.
    words = {piece: piece.encode().decode("latin-1") for piece in copies}
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokens = list(ranks)
    counts: Counter[str] = Counter()
    holders = defaultdict(set)  # pair -> pieces that hold it, or held it once

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
        if minus_count != -counts[pair]:  # it has fallen since; where it rose, it was pushed anew
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
        for pair in risen:
            heapq.heappush(heap, (-counts[pair], pair))
    return ranks


def _learn(args: argparse.Namespace) -> None:
    if args.out.suffix != ".tiktoken":
        raise ValueError(f"--out {args.out}: name a file that ends in .tiktoken")

    def texts(held_out: bool) -> Iterable[str]:
        documents = tqdm(read_documents(args.inputs), "documents", disable=None, leave=False)
        return (text for i, text in documents if is_held_out(i, args.holdout) == held_out)

    write_ranks(args.out, learn_ranks(texts(held_out=False), args.ranks))
    encoding = get_encoding(str(args.out))
    held_out = list(texts(held_out=True))
    n_bytes = sum(len(text.encode()) for text in held_out)
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in held_out)
    print(
        f"{args.out}: {encoding.eot_token:,} ranks; {len(held_out):,} documents held out:", end=" "
    )
    print(
        f"{n_bytes:,} bytes, {n_tokens:,} tokens, {n_bytes / max(1, n_tokens):.3f} bytes per token"
    )


def _show(args: argparse.Namespace) -> None:
    encoding = get_encoding(args.tokenizer)
    ids = encoding.encode_ordinary(args.text)
    for i in ids:
        print(f"{i:>8}  {encoding.decode_single_token_bytes(i)!r}")
    print(f"{len(ids)} tokens, {len(args.text.encode())} bytes")


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(description="tiktoken encodings")
    verbs = parser.add_subparsers(required=True)
    show = verbs.add_parser("show", help="print the tokens of a text")
    show.add_argument("text")
    show.add_argument("--tokenizer", default="pd4k", help="pd4k, bytes, gpt2 or a .tiktoken file")
    show.set_defaults(run=_show)
    learn = verbs.add_parser("learn", help="learn ranks from documents")
    learn.add_argument("inputs", nargs="+", help="text, .jsonl, .jsonl.gz, .jsonl.zst, folders")
    learn.add_argument("--ranks", type=int, default=4096, help="the 256 bytes included (4096)")
    learn.add_argument("--out", type=Path, required=True, help="the .tiktoken file to write")
    learn.add_argument("--holdout", type=int, default=20, help="leave out one in this many (20)")
    learn.set_defaults(run=_learn)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
