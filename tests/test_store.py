"""Encodings equal the definition of BPE, and learned ranks those of counting every pair.

Also: which stores are refused, and that files and folders appear completely or not at all. Whether
pd4k is a good vocabulary is not tested; corpus/SOURCE.md lists its bytes per token.
"""

import errno
import os
import re
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import numpy as np
import pytest
import regex
import tiktoken
from conftest import BYTES, TINY, kill_at, names, refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_stores import END, write_store

from prepare import Corpus, write_ranks
from support import tokenizer
from support.store import Store, atomic_folder, atomic_write, folder_lock

SPECIAL = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PD4K = tokenizer.get_encoding()
PD4K_RANKS = {PD4K.decode_single_token_bytes(rank): rank for rank in range(PD4K.eot_token)}
with TemporaryDirectory() as folder:  # Llama 3's pattern and special tokens, with few ranks
    write_ranks(Path(folder) / "tokenizer.model", {**PD4K_RANKS, b".\n": 4096})
    LLAMA3 = tokenizer.get_encoding(f"{folder}/tokenizer.model")
TEXTS = [document.text for document in Corpus([TINY]).documents()]

# Letters, numbers, marks, blanks and control characters of several alphabets, and what GPT-2's
# pattern treats specially. All versions of Unicode in use classify these characters alike.
AWKWARD = " \t\n\r\0\x1f\x85\xa0\u2028\u3000'sdmtlver[]<|>_.,!-"
AWKWARD += "09²½ⅫaZéßµжЖ中文字ひ한e\u0301🙂👩\u200d🚀🇫🇷\ufeff"
texts = st.text(st.sampled_from(AWKWARD) | st.characters(codec="ascii"), max_size=60)


def merge_by_rank(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encode by the definition: while two neighbours form a token, join those of lowest rank."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        joined = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        if not joined or min(joined)[0] == len(ranks):
            return [ranks[part] for part in parts]
        i = min(joined)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def learn_by_definition(pieces: list[str], n_ranks: int) -> list[bytes]:
    """Learn by algorithm 1 of arXiv 1508.07909: count all pairs again for each merge."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [list(piece.encode()) for piece in pieces]
    while len(tokens) < n_ranks:
        counts = Counter(pair for word in words for pair in pairwise(word))
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in tokens:
            tokens.append(token)
        for word in words:
            for i in range(len(word)):
                if tuple(word[i : i + 2]) == pair:
                    word[i : i + 2] = [tokens.index(token)]
    return tokens


# --- learning


def test_learning_and_encoding_equal_the_worked_example(tmp_path):
    learned = tokenizer.learn_ranks(["aaabdaaabac"], 259)
    assert list(learned)[256:] == [b"aa", b"ab", b"aaab"]
    write_ranks(tmp_path / "a.tiktoken", learned)
    encoding = tokenizer.get_encoding(f"{tmp_path}/a.tiktoken")
    assert encoding.encode_ordinary("aaabdaaabac") == [258, ord("d"), 258, ord("a"), ord("c")]


@settings(max_examples=40)
@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1), st.integers(256, 264))
@example(["a" * n for n in range(1, 40)], 266)  # aaaa+a and aa+aaa spell one token
@example(TEXTS[:20], 290)
def test_learned_ranks_equal_the_definition_whatever_the_order_of_texts(texts, n_ranks):
    pieces = [piece for text in texts for piece in regex.findall(tokenizer.SPLIT, text)]
    try:
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    except ValueError as error:  # too few pairs: it says how many ranks can be learned
        n_ranks = int(re.search(r"only (\d+)", str(error))[1])
        learned = list(tokenizer.learn_ranks(texts, n_ranks))
    assert learned == learn_by_definition(pieces, n_ranks)
    assert list(tokenizer.learn_ranks(texts[::-1], n_ranks)) == learned


# --- encoding


@given(st.sampled_from([PD4K, BYTES, LLAMA3]), texts | st.text(max_size=40))
@example(PD4K, " " * 1_000_000 + "x")  # overflows the stack with GPT-2's original pattern
def test_any_text_decodes_to_itself_and_its_bytes_are_counted(encoding, text):
    ids = encoding.encode_ordinary(text)
    assert encoding.decode(ids, errors="strict") == text
    assert tokenizer.byte_lengths(encoding)[ids].sum() == len(text.encode())


@settings(max_examples=150)
@given(texts)
@example(TEXTS[0])
@example("it's DON'T ...\n\n\r\n  12345 \n x=1;\n")
def test_encoding_equals_the_definition_with_the_published_patterns(text):
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


def test_llama_3_has_256_special_tokens_and_the_second_is_end_of_text():
    """With 128,000 ranks, that is token 128001 of 128,256, as published."""
    assert LLAMA3.eot_token == 4097 + 1 and LLAMA3.n_vocab == 4097 + 256
    assert {tokenizer.vocab_size(LLAMA3, model) for model in ("gpt", "bert")} == {4097 + 256}


def test_special_tokens_follow_the_ranks_and_text_never_encodes_to_them():
    for encoding, n_ranks in (PD4K, 4096), (BYTES, 256):
        special = [encoding.encode_single_token(token) for token in SPECIAL]
        assert special == list(range(n_ranks, n_ranks + 5)) and encoding.eot_token == n_ranks
        vocabularies = [tokenizer.vocab_size(encoding, model) for model in ("gpt", "bert")]
        assert vocabularies == [n_ranks + 1, n_ranks + 5]
        assert max(encoding.encode_ordinary("".join(SPECIAL))) < n_ranks
        lengths = tokenizer.byte_lengths(encoding)
        assert lengths[:n_ranks].all() and lengths[n_ranks:].tolist() == [0] * 5


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="gpt2's files are missing")
def test_our_gpt2_is_tiktokens_with_four_more_special_tokens():
    ours, theirs = tokenizer.get_encoding("gpt2"), tiktoken.get_encoding("gpt2")
    for text in [*TEXTS[::20], "Hello world! \n\n  ½ 中文 🙂'll"]:
        assert ours.encode_ordinary(text) == theirs.encode_ordinary(text)
    assert [ours.encode_single_token(token) for token in SPECIAL] == list(range(50256, 50261))
    ids = ours.encode_ordinary_batch(TEXTS, num_threads=2)
    assert sum(map(len, ids)) == 166_049, "the README's count"


def test_a_bad_file_of_ranks_is_refused_with_the_line_number(tmp_path):
    path, lines = tmp_path / "bad.tiktoken", tokenizer.PD4K.read_bytes().splitlines()
    for more in b"YWM=", b"YWI= two", b"YQ== 4096":  # no rank, not a number, a token twice
        path.write_bytes(b"\n".join([*lines, more]))
        assert refusal(tokenizer.get_encoding, str(path)).startswith(f"{path}:4097: ")
    path.write_bytes(b"\n".join(lines[:99]))
    assert "ends without a rank for byte" in refusal(tokenizer.get_encoding, str(path))


# --- stores


def test_a_tokenizer_with_the_same_name_but_other_ranks_is_refused(tmp_path):
    path = tmp_path / "a.tiktoken"
    meta = {"tokenizer": str(path), "tokenizer_fingerprint": tokenizer.fingerprint(PD4K)}
    meta |= {"vocab_size": PD4K.n_vocab, "end_of_text": PD4K.eot_token}
    made = Store(Path("a store"), meta, np.empty(0), np.empty(0))
    made.check_tokenizer(PD4K)
    other = Store(Path("a store"), meta | {"end_of_text": 97}, np.empty(0), np.empty(0))
    assert "meta.json is damaged" in refusal(other.check_tokenizer, PD4K)
    *ranks, last, before = PD4K_RANKS
    write_ranks(path, {token: rank for rank, token in enumerate([*ranks, before, last])})
    message = refusal(made.check_tokenizer, tokenizer.get_encoding(str(path)))
    assert message == f"a store: made with tokenizer {path}, not with what {path} is now"


def test_a_damaged_store_is_refused(tmp_path):
    opened = Store.open(write_store(tmp_path / "store", [[1, 2], [3]]))
    assert opened.tokens.tolist() == [1, 2, END, 3, END, 7, 7, END]
    assert opened.offsets.tolist() == [0, 3, 5, 8]
    for name, old, new, said in (
        ("meta.json", b'"format": 1', b'"format": 2', "has format 2: prepare the store again"),
        ("meta.json", b'"train_tokens": ', b'"train_tokens": 1', "meta.json is damaged (tokens)"),
        ("meta.json", b'"train_tokens": 5', b'"train_tokens": 3', "documents.idx does not match"),
        ("tokens.bin", bytes([END]), b"", "tokens.bin: must have 16 bytes: prepare"),
        ("meta.json", b'"end_of_text"', b'"end"', "meta.json is damaged (end_of_text): prepare"),
        ("meta.json", b'"documents": 3', b'"documents": "3"', "is damaged (documents): prepare"),
        ("meta.json", b"uint16", b"float16", "meta.json is damaged (dtype): prepare"),
        ("meta.json", b'"documents.idx"', b'"other"', "documents.idx does not match meta.json"),
        ("meta.json", b"{", b"[" * 99999, "meta.json is damaged (maximum recursion"),
        ("meta.json", b"{", b"[", "meta.json is damaged (Expecting"),
        ("documents.idx", b"\3", b"\2", "documents.idx does not match meta.json: prepare"),
        ("documents.idx", b"\3", b"", "documents.idx: must have 32 bytes: prepare"),
    ):
        whole = (opened.path / name).read_bytes()
        (opened.path / name).write_bytes(whole.replace(old, new))
        assert said in refusal(Store.open, opened.path)
        (opened.path / name).write_bytes(whole)
    (opened.path / name).unlink()
    assert said in refusal(Store.open, opened.path)


# --- completely or not at all


def test_files_and_folders_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    calls, rename = [], Path.rename

    def record_rename(path, target):
        calls.append(f"rename to {target.name}")
        return rename(path, target)

    def record_sync(descriptor):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    with atomic_write(tmp_path / "a.bin") as out:
        pass
    assert calls == [Path(out.name).name, "rename to a.bin"]
    calls.clear()
    with atomic_folder(tmp_path / "new" / "f") as unfinished:
        (unfinished / "deeper").mkdir()
        (unfinished / "deeper" / "b").write_bytes(b"b")
    assert set(calls[:3]) == {"deeper", "b", unfinished.name}
    assert calls[3:] == ["rename to f", "new"]
    assert names(tmp_path / "new") == ["f"]


@pytest.mark.parametrize("call", ["block", "fsync", "rename"])
@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_a_failing_write_leaves_nothing(tmp_path, monkeypatch, call, write):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call != "block":
        monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    with pytest.raises(OSError, match="No space left"), write(tmp_path / "a") as out:
        out.write(b"half") if write is atomic_write else (out / "b").write_bytes(b"b")
        if call == "block":
            full()
    assert names(tmp_path) == []


def test_a_folder_that_somebody_else_made_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "f"):
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["f", "theirs"]


def test_a_lock_makes_others_wait_and_ends_with_its_process(tmp_path):
    def act() -> None:
        with folder_lock(tmp_path):
            (tmp_path / "a").touch()

    assert kill_at(1, act) == -signal.SIGKILL and names(tmp_path) == []
    other = Thread(target=act, daemon=True)
    with folder_lock(tmp_path, wait=False):
        other.start()
        other.join(0.3)
        assert names(tmp_path) == [], "it should wait"
    other.join(30)
    assert names(tmp_path) == ["a"]
