"""Encodings agree with the definition of BPE, and learning with a count over every pair.

Does not judge whether pd4k is a good vocabulary: corpus/SOURCE.md has its bytes per token.

    python -m pytest tests/test_tokenizer.py
"""

import base64
import gzip
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

from support.text import tokenizer
from support.text.holdout import is_held_out
from support.text.reading import read_documents

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"
SPECIAL = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")

needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ, reason="TIKTOKEN_CACHE_DIR names no folder"
)

# Letters, numbers, marks, blanks and controls of several alphabets, and what GPT-2's pattern
# treats apart; of each kind those that every version of Unicode in use agrees on.
AWKWARD = " \t\n\r\0\x1f\x85\xa0\u2028\u3000'sdmtlver[]<|>_.,!-"
AWKWARD += "09²½ⅫaZéßµжЖ中文字ひ한e\u0301🙂👩\u200d🚀🇫🇷\ufeff"
texts = st.text(st.sampled_from(AWKWARD) | st.characters(codec="ascii"), max_size=60)


def tiny_texts() -> list[str]:
    return [one.text for one in read_documents([TINY])]


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


def test_the_worked_example():
    learnt = list(tokenizer.learn_ranks(["aaabdaaabac"], 259))
    assert learnt[256:] == [b"aa", b"ab", b"aaab"]


def test_the_worked_example_encodes_as_by_hand(tmp_path):
    path = tmp_path / "example.tiktoken"
    tokenizer.write_ranks(path, tokenizer.learn_ranks(["aaabdaaabac"], 259))
    encoding = tokenizer.get_encoding(str(path))
    assert encoding.encode_ordinary("aaabdaaabac") == [258, ord("d"), 258, ord("a"), ord("c")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1, max_size=6), st.data())
def test_learning_equals_counting_every_pair_anew(texts, draw):
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    n_ranks = draw.draw(st.integers(256, 264))
    try:
        learnt = list(tokenizer.learn_ranks(texts, n_ranks))
    except ValueError as error:  # pairs ran out: as many as it says are there to be learnt
        n_ranks = int(re.search(r"only (\d+)", str(error))[1])
        learnt = list(tokenizer.learn_ranks(texts, n_ranks))
    assert learnt == learn_by_definition(pieces, n_ranks)


def test_learning_equals_counting_every_pair_anew_on_real_text():
    texts = tiny_texts()[:40]
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    assert list(tokenizer.learn_ranks(texts, 300)) == learn_by_definition(pieces, 300)


def test_learning_does_not_depend_on_the_order_of_documents():
    texts = tiny_texts()[::3]
    shuffled = random.Random(0).sample(texts, len(texts))
    assert shuffled != texts
    learnt = [list(tokenizer.learn_ranks(order, 400)) for order in (texts, shuffled)]
    assert learnt[0] == learnt[1]


def test_a_pair_that_spells_a_token_takes_its_id():
    # Runs of a: aa, aaaa, then aaaa+a and aa+aaa both spell five: no token may come twice.
    texts = ["a" * n for n in range(1, 40)]
    learnt = list(tokenizer.learn_ranks(texts, 266))
    assert len(set(learnt)) == 266


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


def write_corpus(path: Path, documents: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in documents.items()))
    return path


def learn(corpus: Path, out: Path, *flags: str) -> bytes:
    tokenizer.main(["learn", str(corpus), "--ranks", "320", "--out", str(out), *flags])
    return out.read_bytes()


OTHER_PROCESS = """
import sys
from support.text import tokenizer
tokenizer.main(["learn", sys.argv[1], "--ranks", "320", "--out", sys.argv[2]])
print(tokenizer.fingerprint(tokenizer.get_encoding("pd4k")))
"""


def test_another_process_learns_the_same_ranks_and_has_the_same_fingerprint(tmp_path):
    here, there = tmp_path / "here.tiktoken", tmp_path / "there.tiktoken"
    other = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(TINY), str(there)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},  # of strings, hence the order of sets
        capture_output=True,
        text=True,
        check=True,
    )
    assert learn(TINY, here) == there.read_bytes()
    assert tokenizer.fingerprint(PD4K) == other.stdout.split()[-1]


def test_held_out_documents_do_not_influence_the_ranks(tmp_path):
    documents = {one.id: one.text for one in list(read_documents([TINY]))[:100]}
    held_out = [one.id for one in read_documents([TINY]) if is_held_out(one, 20)]
    held_out = [i for i in held_out if i in documents]
    training = [i for i in documents if i not in held_out]
    assert len(held_out) > 1
    before = learn(write_corpus(tmp_path / "a.jsonl", documents), tmp_path / "a.tiktoken")
    changed = documents | dict.fromkeys(held_out, "qzqzqzqz " * 5000)
    after = learn(write_corpus(tmp_path / "b.jsonl", changed), tmp_path / "b.tiktoken")
    assert after == before
    changed = documents | {training[0]: "qzqzqzqz " * 5000}
    after = learn(write_corpus(tmp_path / "c.jsonl", changed), tmp_path / "c.tiktoken")
    assert after != before
    all_of_them = learn(tmp_path / "b.jsonl", tmp_path / "d.tiktoken", "--holdout", "0")
    assert base64.b64encode(b"qz") in all_of_them and base64.b64encode(b"qz") not in before


def test_a_failed_write_leaves_the_old_file_of_ranks(tmp_path, monkeypatch):
    out = tmp_path / "a.tiktoken"
    out.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"a\.tiktoken: not written: No space left"):
        tokenizer.write_ranks(out, {bytes([byte]): byte for byte in range(256)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.tiktoken"]
    assert out.read_bytes() == b"old"


def test_learn_refuses_a_name_it_could_not_load(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.tiktoken"):
        learn(TINY, tmp_path / "ranks.txt")


def test_learn_refuses_a_folder_that_is_not_there_before_it_learns(tmp_path):
    with pytest.raises(ValueError, match=r"--out .*ranks\.tiktoken: there is no folder .*none"):
        learn(tmp_path / "not read yet", tmp_path / "none" / "ranks.tiktoken")


@pytest.mark.slow
def test_the_embedded_ranks_are_learnt_from_the_embedded_corpus(tmp_path):
    out = tmp_path / "pd4k.tiktoken"
    started = time.monotonic()
    tokenizer.main(
        ["learn", str(ROOT / "corpus" / "pd-mix.jsonl.gz"), "--ranks", "4096", "--out", str(out)]
    )
    assert time.monotonic() - started < 120
    assert out.read_bytes() == tokenizer.PD4K.read_bytes()


# --- encoding


@pytest.mark.parametrize("encoding", [PD4K, BYTES], ids=["pd4k", "bytes"])
def test_every_document_of_the_corpus_comes_back(encoding):
    for text in tiny_texts():
        assert encoding.decode(encoding.encode_ordinary(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([PD4K, BYTES]), texts | st.text(max_size=40))
def test_any_text_comes_back(encoding, text):
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids, errors="strict") == text
    assert tokenizer.byte_lengths(encoding)[ids].sum() == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(texts)
def test_encoding_equals_the_definition(text):
    assert PD4K.encode_ordinary(text) == encode_by_definition(text, PD4K)


def test_encoding_equals_the_definition_on_real_text():
    for text in tiny_texts()[::40]:
        assert PD4K.encode_ordinary(text) == encode_by_definition(text, PD4K)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_pieces_are_those_of_gpt2s_pattern(text):
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    pieces = regex.findall(tokenizer.SPLIT, text)
    assert pieces == regex.findall(published, text)
    assert "".join(pieces) == text


def test_bytes_is_the_identity():
    assert BYTES.encode_ordinary("né🙂") == list("né🙂".encode())


@pytest.mark.parametrize("encoding", [PD4K, BYTES], ids=["pd4k", "bytes"])
def test_special_tokens_follow_the_ranks_and_are_never_found_in_text(encoding):
    n_ranks = {"pd4k": 4096, "bytes": 256}[encoding.name]
    assert [encoding.encode_single_token(token) for token in SPECIAL] == list(
        range(n_ranks, n_ranks + 5)
    )
    assert encoding.eot_token == n_ranks
    assert tokenizer.vocab_size(encoding, "gpt") == n_ranks + 1
    assert tokenizer.vocab_size(encoding, "bert") == n_ranks + 5
    assert max(encoding.encode_ordinary("".join(SPECIAL))) < n_ranks


def test_a_run_of_blanks_does_not_overflow_the_stack():
    text = " " * 2_000_000 + "x"
    assert PD4K.decode(PD4K.encode_ordinary(text)) == text


def test_byte_lengths():
    lengths = tokenizer.byte_lengths(PD4K)
    assert lengths.dtype == np.int64 and lengths.shape == (PD4K.n_vocab,)
    assert (lengths[4096:] == 0).all() and (lengths[:4096] > 0).all()
    assert lengths[PD4K.encode_single_token(" the")] == 4


def test_fingerprint_is_of_the_content(tmp_path):
    copy = tmp_path / "copy.tiktoken"
    copy.write_bytes(tokenizer.PD4K.read_bytes())
    assert tokenizer.fingerprint(tokenizer.get_encoding(str(copy))) == tokenizer.fingerprint(PD4K)
    lines = tokenizer.PD4K.read_bytes().splitlines()
    (last, rank), (before, _) = lines[-1].split(), lines[-2].split()
    swapped = [*lines[:-2], b"%s %d" % (last, int(rank) - 1), b"%s %s" % (before, rank)]
    copy.write_bytes(b"\n".join(swapped))
    assert tokenizer.fingerprint(tokenizer.get_encoding(str(copy))) != tokenizer.fingerprint(PD4K)


# --- loading


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt3': choose pd4k, bytes, gpt2 or a \.tiktoken file"):
        tokenizer.get_encoding("gpt3")


BYTE_LINES = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "row"),
    [
        ([*BYTE_LINES, b"YWI= 256", b"YWM="], 258),  # no rank
        ([*BYTE_LINES, b"YWI= two"], 257),  # rank is no number
        ([*BYTE_LINES, b"Y!I= 256"], 257),  # not base64
        ([*BYTE_LINES, b"YWI= 257"], 257),  # a rank left out
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


def test_a_good_file_of_ranks_is_read(tmp_path):
    path = tmp_path / "good.tiktoken"
    path.write_bytes(b"\n".join([*BYTE_LINES, b"YWI= 256"]))
    assert tokenizer.get_encoding(str(path)).encode_ordinary("abc") == [256, ord("c")]


def test_a_missing_file_of_ranks_is_named(tmp_path):
    with pytest.raises(OSError, match=r"none\.tiktoken"):
        tokenizer.get_encoding(str(tmp_path / "none.tiktoken"))


@needs_gpt2
def test_gpt2_is_tiktokens_with_four_more_special_tokens():
    import tiktoken

    ours, theirs = tokenizer.get_encoding("gpt2"), tiktoken.get_encoding("gpt2")
    for text in [*tiny_texts()[::20], "Hello world! \n\n  ½ 中文 🙂'll"]:
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert [ours.encode_single_token(token) for token in SPECIAL] == list(range(50256, 50261))
    assert tokenizer.vocab_size(ours, "gpt") == 50257
    assert tokenizer.vocab_size(ours, "bert") == 50261


@needs_gpt2
def test_gpt2_counts_the_corpus_as_its_readme_does():
    ids = tokenizer.get_encoding("gpt2").encode_ordinary_batch(tiny_texts(), num_threads=2)
    assert sum(map(len, ids)) == 166_049


def test_gpt2_out_of_reach_is_one_line_at_once(tmp_path):
    """No cache and a proxy that refuses: the same as a cut network, on any machine."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    started = time.monotonic()
    done = load_gpt2(environment, "")
    assert "ValueError: tokenizer gpt2" in done.splitlines()[-1]
    assert "set TIKTOKEN_CACHE_DIR" in done.splitlines()[-1]
    assert time.monotonic() - started < 20


def test_gpt2_where_packets_vanish_gives_up_and_lets_the_program_end(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
        environment["TIKTOKEN_CACHE_DIR"] = str(tmp_path)
        environment["HTTPS_PROXY"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = load_gpt2(environment, "1")
    assert "TimeoutError" in done and "set TIKTOKEN_CACHE_DIR" in done.splitlines()[-1]


def load_gpt2(environment: dict[str, str], seconds: str) -> str:
    command = [
        sys.executable,
        "-c",
        f"from support.text import tokenizer; tokenizer._gpt2_ranks({seconds})",
    ]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    ).stderr


# --- the tokenizer of a store


def test_a_store_opens_its_tokenizer(tmp_path):
    path = tmp_path / "a.tiktoken"
    path.write_bytes(tokenizer.PD4K.read_bytes())
    made_with = tokenizer.get_encoding(str(path))
    meta = {"tokenizer": str(path), "tokenizer_fingerprint": tokenizer.fingerprint(made_with)}
    opened = tokenizer.store_encoding("a store", meta)
    assert tokenizer.fingerprint(opened) == meta["tokenizer_fingerprint"]
    opened = tokenizer.store_encoding("a store", meta | {"tokenizer": "pd4k"})
    assert opened.name == "pd4k", "the same ranks under another name"
    path.write_bytes(b"\n".join(BYTE_LINES))
    with pytest.raises(ValueError, match=r"a store: .*a\.tiktoken has changed since .*--tokenizer"):
        tokenizer.store_encoding("a store", meta)
    path.unlink()
    said = rf"a store: its tokenizer is gone \({path}: No such file or directory\): .*--tokenizer"
    with pytest.raises(ValueError, match=said):
        tokenizer.store_encoding("a store", meta)


# --- the command line


def test_show_prints_tokens_with_their_ids(capsys):
    tokenizer.main(["show", "the the", "--tokenizer", "pd4k"])
    lines = capsys.readouterr().out.splitlines()
    ids = PD4K.encode_ordinary("the the")
    assert lines[: len(ids)] == [f"{i:>8}  {PD4K.decode_single_token_bytes(i)!r}" for i in ids]
    assert lines[-1] == f"{len(ids)} tokens, 7 bytes"


def test_learn_reports_the_held_out_documents(tmp_path, capsys):
    learn(TINY, tmp_path / "a.tiktoken")
    held_out = [one.text for one in read_documents([TINY]) if is_held_out(one, 20)]
    encoding = tokenizer.get_encoding(str(tmp_path / "a.tiktoken"))
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in held_out)
    report = capsys.readouterr().out
    assert "320 ranks; 27 held-out documents" in report
    assert f"{n_tokens:,} tokens" in report


def test_the_embedded_corpus_is_what_the_tests_think_it_is():
    with gzip.open(TINY) as lines:
        assert sum(1 for _ in lines) == 481


@pytest.mark.parametrize("flags", [[], ["--split-on", "blank-line"]])
def test_learn_holds_out_what_prepare_does(tmp_path, flags):
    """The end of a single text, in which qz stands alone, is no part of the ranks."""
    text = "".join(f"line {number}\n" for number in range(2000)) + "qzqzqz\n" * 50
    (tmp_path / "input.txt").write_text(text)
    ranks = learn(tmp_path / "input.txt", tmp_path / "a.tiktoken", "--ranks", "270", *flags)
    assert base64.b64encode(b"qz") not in ranks
    flags = ["--ranks", "270", "--holdout", "0"]
    ranks = learn(tmp_path / "input.txt", tmp_path / "a.tiktoken", *flags)
    assert base64.b64encode(b"qz") in ranks


def test_learn_refuses_what_prepare_refuses(tmp_path):
    with pytest.raises(ValueError, match="--holdout -1: needs 0"):
        learn(TINY, tmp_path / "a.tiktoken", "--holdout", "-1")
    with pytest.raises(ValueError, match="--split-on '': needs blank-line"):
        learn(TINY, tmp_path / "a.tiktoken", "--split-on", "")
