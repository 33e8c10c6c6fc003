"""Encodings agree with the definition of BPE, and learning with a count over every pair.

Does not judge whether pd4k is a good vocabulary: corpus/SOURCE.md has its bytes per token.
"""

import base64
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from support.base.runtime import ROOT
from support.text import tokenizer
from support.text.holdout import is_held_out
from support.text.reading import input_files, read_documents

TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"
SPECIAL = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")
DOCUMENTS = list(read_documents(input_files([TINY])))
TEXTS = [document.text for document in DOCUMENTS]

needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="TIKTOKEN_CACHE_DIR names no folder"
)

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


def ranks_of(encoding) -> dict[bytes, int]:
    n_ranks = encoding.eot_token
    return {encoding.decode_single_token_bytes(rank): rank for rank in range(n_ranks)}


def encode_by_definition(text: str, encoding) -> list[int]:
    ranks = ranks_of(encoding)
    pieces = regex.findall(tokenizer.SPLIT, text)
    return [rank for piece in pieces for rank in merge_by_rank(piece.encode(), ranks)]


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1, max_size=6), st.data())
def test_learning_equals_counting_every_pair_anew(texts, draw):
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    n_ranks = draw.draw(st.integers(256, 264))
    try:
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    except ValueError as error:  # pairs ran out: as many as it says are there to be learned
        n_ranks = int(re.search(r"only (\d+)", str(error))[1])
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    assert learned == learn_by_definition(pieces, n_ranks)


def test_learning_equals_counting_every_pair_anew_on_real_text_in_any_order():
    texts = TEXTS[:40]
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    learned = list(tokenizer.learn_ranks(texts, 300))
    assert learned == learn_by_definition(pieces, 300)
    shuffled = random.Random(0).sample(texts, len(texts))
    assert shuffled != texts and list(tokenizer.learn_ranks(shuffled, 300)) == learned


def test_a_pair_that_spells_a_token_takes_its_id():
    # Runs of a: aa, aaaa, then aaaa+a and aa+aaa both spell five: no token may come twice.
    learned = list(tokenizer.learn_ranks(["a" * n for n in range(1, 40)], 266))
    assert len(set(learned)) == 266


@pytest.mark.parametrize(
    ("texts", "n_ranks", "message"),
    [
        (["abc"], 255, "--ranks 255: needs at least 256"),
        (["abab"], 300, "--ranks 300: the training documents give only 257"),
        ([], 300, "give only 256"),
    ],
)
def test_learning_refuses(texts, n_ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenizer.learn_ranks(texts, n_ranks)


def learn(corpus: Path, out: Path, *flags: str) -> bytes:
    tokenizer.main(["learn", str(corpus), "--ranks", "320", "--out", str(out), *flags])
    return out.read_bytes()


OTHER_PROCESS = """
import os, sys
from support.text import tokenizer
corpus, out, silent = sys.argv[1:]
tokenizer.main(["learn", corpus, "--ranks", "320", "--out", out])
print(tokenizer.fingerprint(tokenizer.get_encoding("pd4k")))
for proxy in ("http://127.0.0.1:9", silent):
    os.environ["HTTPS_PROXY"] = proxy
    try:
        tokenizer._gpt2_ranks(1 if proxy == silent else 20)
    except ValueError as error:
        print(error)
"""


def test_another_process_learns_the_same_and_ends_even_if_gpt2_is_out_of_reach(tmp_path, capsys):
    """Out of reach: a proxy that refuses, as a cut network does; one that never answers."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {"TIKTOKEN_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "7"}  # order of sets
    here, there = tmp_path / "here.tiktoken", tmp_path / "there.tiktoken"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(TINY), str(there), proxy],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert learn(TINY, here) == there.read_bytes()
    report, prints, refused, silent = done.stdout.splitlines()
    assert prints == tokenizer.fingerprint(PD4K)
    for said in (refused, silent):
        assert said.startswith("tokenizer gpt2: ") and "set TIKTOKEN_CACHE_DIR" in said
    assert "TimeoutError" in silent and "TimeoutError" not in refused
    encoding = tokenizer.get_encoding(str(here))
    held_out = [document.text for document in DOCUMENTS if is_held_out(document, 20)]
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in held_out)
    assert "320 ranks; 27 held-out documents" in report and f"{n_tokens:,} tokens" in report


def test_held_out_documents_do_not_influence_the_ranks(tmp_path):
    documents = {document.id: document.text for document in DOCUMENTS[:60]}
    held_out = [document.id for document in DOCUMENTS[:60] if is_held_out(document, 20)]
    training = next(name for name in documents if name not in held_out)
    assert len(held_out) > 1

    def learned(name, texts, *flags):
        lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in texts.items()]
        (tmp_path / name).write_text("".join(lines))
        return learn(tmp_path / name, tmp_path / f"{name}.tiktoken", *flags)

    before, strange = learned("a.jsonl", documents), "qzqzqzqz " * 5000
    changed = documents | dict.fromkeys(held_out, strange)
    assert learned("b.jsonl", changed) == before
    assert learned("c.jsonl", documents | {training: strange}) != before
    of_all = learned("b.jsonl", changed, "--holdout", "0")
    assert base64.b64encode(b"qz") in of_all and base64.b64encode(b"qz") not in before


@pytest.mark.parametrize("flags", [[], ["--split-on", "blank-line"]])
def test_learn_holds_out_the_end_of_a_single_text_as_prepare_does(tmp_path, flags):
    text = "".join(f"line {number}\n" for number in range(2000)) + "qzqzqz\n" * 50
    (tmp_path / "input.txt").write_text(text)
    flags = ["--ranks", "270", *flags]
    ranks = learn(tmp_path / "input.txt", tmp_path / "a.tiktoken", *flags)
    assert base64.b64encode(b"qz") not in ranks
    ranks = learn(tmp_path / "input.txt", tmp_path / "a.tiktoken", *flags, "--holdout", "0")
    assert base64.b64encode(b"qz") in ranks


def test_learn_refuses_before_it_reads(tmp_path):
    (tmp_path / "old.tiktoken").write_bytes(b"old")
    for out, flags, message in (
        ("ranks.txt", [], r"ends in \.tiktoken"),
        ("none/ranks.tiktoken", [], r"--out .*ranks\.tiktoken: there is no folder .*none"),
        ("old.tiktoken", ["--holdout", "-1"], "--holdout: -1 is not a whole number"),
        ("old.tiktoken", ["--split-on", ""], "--split-on '': needs blank-line"),
    ):
        with pytest.raises(ValueError, match=message):
            learn(tmp_path / "not read yet", tmp_path / out, *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["old.tiktoken"]
    assert (tmp_path / "old.tiktoken").read_bytes() == b"old"


@pytest.mark.slow
def test_the_embedded_ranks_are_learned_from_the_embedded_corpus(tmp_path):
    started = time.monotonic()
    corpus = ROOT / "corpus" / "pd-mix.jsonl.gz"
    ranks = learn(corpus, tmp_path / "pd4k.tiktoken", "--ranks", "4096")
    assert time.monotonic() - started < 120
    assert ranks == tokenizer.PD4K.read_bytes()


# --- encoding


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([PD4K, BYTES]), texts | st.text(max_size=40) | st.sampled_from(TEXTS))
def test_any_text_comes_back_with_its_bytes_counted(encoding, text):
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids, errors="strict") == text
    assert tokenizer.byte_lengths(encoding)[ids].sum() == len(text.encode())


@settings(max_examples=100, deadline=None)
@given(texts)
def test_encoding_equals_the_definition(text):
    assert PD4K.encode_ordinary(text) == encode_by_definition(text, PD4K)
    assert BYTES.encode_ordinary(text) == list(text.encode())


def test_encoding_equals_the_definition_on_real_text():
    for text in TEXTS[::80]:
        assert PD4K.encode_ordinary(text) == encode_by_definition(text, PD4K)


@settings(max_examples=150, deadline=None)
@given(texts)
def test_pieces_are_those_of_gpt2s_pattern(text):
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pieces = regex.findall(tokenizer.SPLIT, text)
    assert pieces == regex.findall(published, text)
    assert "".join(pieces) == text


@pytest.mark.parametrize("encoding", [PD4K, BYTES], ids=["pd4k", "bytes"])
def test_special_tokens_follow_the_ranks_and_are_never_found_in_text(encoding):
    n_ranks = {"pd4k": 4096, "bytes": 256}[encoding.name]
    special = [encoding.encode_single_token(token) for token in SPECIAL]
    assert special == list(range(n_ranks, n_ranks + 5))
    assert encoding.eot_token == n_ranks
    assert tokenizer.vocab_size(encoding, "gpt") == n_ranks + 1
    assert tokenizer.vocab_size(encoding, "bert") == n_ranks + 5
    assert max(encoding.encode_ordinary("".join(SPECIAL))) < n_ranks
    lengths = tokenizer.byte_lengths(encoding)
    assert lengths.dtype == np.int64 and lengths.shape == (encoding.n_vocab,)
    assert (lengths[n_ranks:] == 0).all() and (lengths[:n_ranks] > 0).all()


def test_a_run_of_blanks_does_not_overflow_the_stack():
    text = " " * 2_000_000 + "x"
    assert PD4K.decode(PD4K.encode_ordinary(text)) == text


def test_a_fingerprint_is_of_the_content(tmp_path):
    copy = tmp_path / "copy.tiktoken"
    copy.write_bytes(tokenizer.PD4K.read_bytes())
    assert tokenizer.fingerprint(tokenizer.get_encoding(str(copy))) == tokenizer.fingerprint(PD4K)
    lines = tokenizer.PD4K.read_bytes().splitlines()
    (last, rank), (before, _) = lines[-1].split(), lines[-2].split()
    swapped = [*lines[:-2], b"%s %d" % (last, int(rank) - 1), b"%s %s" % (before, rank)]
    copy.write_bytes(b"\n".join(swapped))
    assert tokenizer.fingerprint(tokenizer.get_encoding(str(copy))) != tokenizer.fingerprint(PD4K)


# --- loading


BYTE_LINES = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ([*BYTE_LINES, b"YWI= 256", b"YWM="], 258),  # no rank
        ([*BYTE_LINES, b"YWI= two"], 257),  # rank is no number
        ([*BYTE_LINES, b"Y!I= 256"], 257),  # not base64
        ([*BYTE_LINES, b"YQ== 256"], 257),  # a token twice
        ([*BYTE_LINES[:-1], b"YWI= 255"], 256),  # a byte without rank
        ([], 0),
    ],
)
def test_a_bad_file_of_ranks_is_refused_with_its_line(tmp_path, lines, row):
    path = tmp_path / "bad.tiktoken"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:{row}: ") as caught:
        tokenizer.get_encoding(str(path))
    assert "\n" not in str(caught.value)


@needs_gpt2
def test_gpt2_is_tiktokens_with_four_more_special_tokens():
    import tiktoken

    ours, theirs = tokenizer.get_encoding("gpt2"), tiktoken.get_encoding("gpt2")
    for text in [*TEXTS[::20], "Hello world! \n\n  ½ 中文 🙂'll"]:
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert [ours.encode_single_token(token) for token in SPECIAL] == list(range(50256, 50261))
    assert tokenizer.vocab_size(ours, "gpt") == 50257
    assert tokenizer.vocab_size(ours, "bert") == 50261
    ids = ours.encode_ordinary_batch(TEXTS, num_threads=2)
    assert sum(map(len, ids)) == 166_049, "as the README counts the corpus"


def test_a_store_opens_its_tokenizer(tmp_path):
    path = tmp_path / "a.tiktoken"
    path.write_bytes(tokenizer.PD4K.read_bytes())
    made_with = tokenizer.get_encoding(str(path))
    meta = {"tokenizer": str(path), "tokenizer_fingerprint": tokenizer.fingerprint(made_with)}
    opened = tokenizer.store_encoding("a store", meta)
    assert tokenizer.fingerprint(opened) == meta["tokenizer_fingerprint"]
    opened = tokenizer.store_encoding("a store", meta | {"tokenizer": "pd4k"})
    assert opened.name == "pd4k", "the same ranks under another name"
    path.write_bytes(b"\n".join([*BYTE_LINES, b"YWI= 256"]))
    with pytest.raises(ValueError, match=r"a store: .*a\.tiktoken has changed since .*--tokenizer"):
        tokenizer.store_encoding("a store", meta)
    path.unlink()
    said = rf"a store: its tokenizer is gone \({path}: No such file or directory\): .*--tokenizer"
    with pytest.raises(ValueError, match=said):
        tokenizer.store_encoding("a store", meta)


def test_show_prints_tokens_with_their_ids(capsys):
    tokenizer.main(["show", "the the", "--tokenizer", "pd4k"])
    lines = capsys.readouterr().out.splitlines()
    ids = PD4K.encode_ordinary("the the")
    assert lines[: len(ids)] == [f"{i:>8}  {PD4K.decode_single_token_bytes(i)!r}" for i in ids]
    assert lines[-1] == f"{len(ids)} tokens, 7 bytes"
