"""Encodings agree with the definition of BPE, and learning with a count over every pair.

Does not judge whether pd4k is a good vocabulary: corpus/SOURCE.md has its bytes per token.
"""

import hashlib
import os
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from conftest import LLAMA3, TINY, refusal, write_lines
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.runtime import ROOT
from support.text import tokenizer
from support.text.corpus import Corpus, Document, is_held_out

SPECIAL = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")
PD4K_RANKS = {PD4K.decode_single_token_bytes(rank): rank for rank in range(PD4K.eot_token)}
DOCUMENTS = list(Corpus([TINY]).documents())
TEXTS = [document.text for document in DOCUMENTS]

# Letters, numbers, marks, blanks and controls of several alphabets, and what GPT-2's pattern
# treats apart; of each kind those that every version of Unicode in use agrees on.
AWKWARD = " \t\n\r\0\x1f\x85\xa0\u2028\u3000'sdmtlver[]<|>_.,!-"
AWKWARD += "09²½ⅫaZéßµжЖ中文字ひ한e\u0301🙂👩\u200d🚀🇫🇷\ufeff"
texts = st.text(st.sampled_from(AWKWARD) | st.characters(codec="ascii"), max_size=60)


def merge_by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """BPE as defined: while any two neighbours form a token, join the two of the lowest rank."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        joined = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        if not joined or min(joined)[0] == len(ranks):
            return [ranks[part] for part in parts]
        i = min(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def learn_by_definition(pieces: list[str], n_ranks: int) -> list[bytes]:
    """Algorithm 1 of arXiv 1508.07909: count all pairs anew for each merge."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [list(piece.encode()) for piece in pieces]
    while len(tokens) < n_ranks:
        counts = Counter(pair for word in words for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in tokens:
            tokens.append(token)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == pair:
                    word[i : i + 2] = [tokens.index(token)]
                i += 1
    return tokens


# --- learning


def test_the_worked_example_learned_and_encoded(tmp_path):
    path = tmp_path / "example.tiktoken"
    learned = tokenizer.learn_ranks(["aaabdaaabac"], 259)
    assert list(learned)[256:] == [b"aa", b"ab", b"aaab"]
    tokenizer.write_ranks(path, learned)
    encoding = tokenizer.get_encoding(str(path))
    assert encoding.encode_ordinary("aaabdaaabac") == [258, ord("d"), 258, ord("a"), ord("c")]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1), st.integers(256, 264))
@example(["a" * n for n in range(1, 40)], 266)  # aaaa+a and aa+aaa spell one token
@example(TEXTS[:20], 290)
def test_learning_equals_counting_every_pair_anew_in_any_order(texts, n_ranks):
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    try:
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    except ValueError as error:  # pairs ran out: as many as it says are there to be learned
        n_ranks = int(re.search(r"only (\d+)", str(error))[1])
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    assert learned == learn_by_definition(pieces, n_ranks)
    assert list(tokenizer.learn_ranks(texts[::-1], n_ranks)) == learned


def learn(corpus: Path, out: Path, *flags: str) -> bytes:
    tokenizer.main([str(corpus), "--ranks", "320", "--out", str(out), *flags])
    return out.read_bytes()


def test_what_learn_writes_and_prints_is_always_the_same(tmp_path, capsys):
    """Though Python's hash seed, and with it the order of sets, differs from run to run."""
    out = tmp_path / "a.tiktoken"
    sha256 = hashlib.sha256(learn(TINY, out)).hexdigest()
    assert sha256 == "4dae60ded8d1ef0d04544fda514a8b555c40e60e137a9b294aa95bda9c8cad40"
    assert "320 ranks; 27 held-out documents" in capsys.readouterr().out


def test_held_out_documents_do_not_influence_the_ranks(tmp_path):
    documents = {str(number): f"text {number}" for number in range(60)}
    held_out = [i for i, text in documents.items() if is_held_out(Document(i, text), 20)]
    training = next(name for name in documents if name not in held_out)
    assert len(held_out) > 1

    def learned(changed, *flags):
        texts = documents | dict.fromkeys(changed, "qzqzqzqz " * 50)
        lines = [{"id": i, "text": text} for i, text in texts.items()]
        path = write_lines(tmp_path / "a.jsonl", lines)
        return learn(path, tmp_path / "a.tiktoken", "--ranks", "260", *flags)

    ranks = learned([])
    assert learned(held_out) == ranks != learned([training])
    assert learned(held_out, "--holdout", "0") != ranks


@pytest.mark.slow
def test_the_embedded_ranks_are_learned_from_the_embedded_corpus(tmp_path):
    started = time.monotonic()
    corpus = ROOT / "corpus" / "pd-mix.jsonl.gz"
    ranks = learn(corpus, tmp_path / "pd4k.tiktoken", "--ranks", "4096")
    assert time.monotonic() - started < 120
    assert ranks == tokenizer.PD4K.read_bytes()


# --- encoding


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([PD4K, BYTES, LLAMA3]), texts | st.text(max_size=40))
@example(PD4K, " " * 1_000_000 + "x")  # which overflows the stack with GPT-2's own pattern
@example(LLAMA3, "\n" * 1_000_000 + " " * 1_000_000 + "x")
def test_any_text_comes_back_with_its_bytes_counted(encoding, text):
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids, errors="strict") == text
    assert tokenizer.byte_lengths(encoding)[ids].sum() == len(text.encode())


@settings(max_examples=150, deadline=None)
@given(texts)
@example(TEXTS[0])
@example("it's DON'T ...\n\n\r\n  12345 \n x=1;\n")
def test_encoding_equals_the_definition_over_the_pieces_of_the_published_patterns(text):
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    llama3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for encoding, published, bounded, ranks in (
        (PD4K, gpt2, tokenizer.SPLIT, PD4K_RANKS),
        (LLAMA3, llama3, tokenizer.LLAMA3_SPLIT, {**PD4K_RANKS, b".\n": 4096}),
    ):
        pieces = regex.findall(published, text)
        assert pieces == regex.findall(bounded, text) and "".join(pieces) == text
        ids = [rank for piece in pieces for rank in merge_by_rank(piece.encode(), ranks)]
        assert encoding.encode_ordinary(text) == ids
    assert BYTES.encode_ordinary(text) == list(text.encode())


def test_llama_3_has_256_special_tokens_of_which_the_second_ends_a_text():
    """With 128,000 ranks that is 128001 of 128,256, as published."""
    assert LLAMA3.eot_token == 4097 + 1 and LLAMA3.n_vocab == 4097 + 256
    assert {tokenizer.vocab_size(LLAMA3, model) for model in ("gpt", "bert")} == {4097 + 256}


@pytest.mark.parametrize("encoding", [PD4K, BYTES], ids=["pd4k", "bytes"])
def test_special_tokens_follow_the_ranks_and_are_never_found_in_text(encoding):
    n_ranks = {"pd4k": 4096, "bytes": 256}[encoding.name]
    special = [encoding.encode_single_token(token) for token in SPECIAL]
    assert special == list(range(n_ranks, n_ranks + 5))
    assert encoding.eot_token == n_ranks
    assert tokenizer.vocab_size(encoding, "gpt") == n_ranks + 1
    assert tokenizer.vocab_size(encoding, "bert") == n_ranks + 5
    assert max(encoding.encode_ordinary("".join(SPECIAL))) < n_ranks
    assert np.array_equal(tokenizer.byte_lengths(encoding) > 0, np.arange(n_ranks + 5) < n_ranks)


# --- loading


def test_a_bad_file_of_ranks_is_refused_with_its_line(tmp_path):
    path, lines = tmp_path / "bad.tiktoken", tokenizer.PD4K.read_bytes().splitlines()
    for more in b"YWM=", b"YWI= two", b"YQ== 4096":  # no rank, no number, a token twice
        path.write_bytes(b"\n".join([*lines, more]))
        assert refusal(tokenizer.get_encoding, str(path)).startswith(f"{path}:4097: ")


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="gpt2's files are not here")
def test_gpt2_is_tiktokens_with_four_more_special_tokens():
    ours, theirs = tokenizer.get_encoding("gpt2"), tiktoken.get_encoding("gpt2")
    for text in [*TEXTS[::20], "Hello world! \n\n  ½ 中文 🙂'll"]:
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert [ours.encode_single_token(token) for token in SPECIAL] == list(range(50256, 50261))
    ids = ours.encode_ordinary_batch(TEXTS, num_threads=2)
    assert sum(map(len, ids)) == 166_049, "as the README counts the corpus"


def test_a_store_opens_the_tokenizer_it_was_made_with_known_by_its_content(tmp_path):
    path = tmp_path / "a.tiktoken"
    path.write_bytes(tokenizer.PD4K.read_bytes())
    meta = {"tokenizer": str(path), "tokenizer_fingerprint": tokenizer.fingerprint(PD4K)}
    assert tokenizer.store_encoding("a store", meta).name == str(path), "the same ranks"
    lines = tokenizer.PD4K.read_bytes().splitlines()
    (last, rank), (before, _) = lines[-1].split(), lines[-2].split()
    swapped = [*lines[:-2], b"%s %d" % (last, int(rank) - 1), b"%s %s" % (before, rank)]
    path.write_bytes(b"\n".join(swapped))
    for damage in (lambda: None, path.unlink):
        damage()
        with pytest.raises(ValueError, match=rf"a store: .*{path}.*--tokenizer"):
            tokenizer.store_encoding("a store", meta)
