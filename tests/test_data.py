"""How a batch comes about: samples, their spans, rows laid out, BERT's masks."""

import errno
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import Piece, Samples, SpecialIds, collate, cut, mask_tokens
from kernels.cross_entropy import IGNORE
from support import atomic
from support.token_store import Store
from support.tokenizer import get_encoding

SPECIAL_IDS = SpecialIds.of(get_encoding("bytes"))
END = 256


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


def spans_of(samples, ids):
    return [tuple(span) for span in samples.spans(np.array(ids))]


def rows_of(*rows):
    """[[(0, 2), (5, 6)]] as rows of pieces."""
    return [[Piece(start=start, stop=stop) for start, stop in row] for row in rows]


# Documents of 5, 1 and 3 tokens (end-of-text counted), the last one held out.
TOY = Store(
    path=Path("toy"),
    meta={"end_of_text": END, "vocab_size": 261},
    tokens=np.array([1, 2, 3, 4, END, END, 7, 8, END], dtype=np.uint16),
    offsets=np.array([0, 5, 6, 9]),
    train_documents=2,
    train_tokens=6,
)


def test_samples_worked_example():
    assert spans_of(Samples(TOY, "pieces", 2), [0, 1, 2, 3]) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert spans_of(Samples(TOY, "rows", 4), [0, 1]) == [(0, 4), (4, 6)]
    assert spans_of(Samples(TOY, "pieces", 2, split="val"), [0, 1]) == [(6, 8), (8, 9)]
    bert = Samples(TOY, "bert", 5)  # the second document is empty without its end-of-text
    assert bert.max_piece_len == 3 and len(bert) == 2
    assert spans_of(bert, [0, 1]) == [(0, 3), (3, 4)]


@pytest.fixture
def large(store_dir, tmp_path, monkeypatch):
    """A store of its own that counts as a large one, whose documents are cut 7 at a time."""
    monkeypatch.setattr(data, "IN_MEMORY", 0)
    monkeypatch.setattr(data, "DOCUMENTS_AT_ONCE", 7)
    analyses = shutil.ignore_patterns("curriculum")  # of other tests' runs on the shared store
    return Store.open(shutil.copytree(store_dir, tmp_path / "large", ignore=analyses))


@pytest.mark.parametrize("kind", ["pieces", "bert"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_samples_of_a_large_store_are_those_of_a_small_one(store, large, split, kind, monkeypatch):
    n, expected = store.train_documents, []
    edges = store.offsets.tolist()
    bert = kind == "bert"
    for start, stop in pairwise(edges[: n + 1] if split == "train" else edges[n:]):
        stop -= bert
        expected += [(a, min(a + 30, stop)) for a in range(start, stop, 30)]
    for where, most in ((large, 0), (large, 0), (store, 1 << 20)):  # a file made, found, and none
        monkeypatch.setattr(data, "IN_MEMORY", most)
        samples = Samples(where, kind, 30 + 2 * bert, split)
        assert spans_of(samples, range(len(samples))) == expected
    (file,) = large.path.glob("*.spans")
    assert file.stat().st_size == 16 * len(expected)


def test_the_table_of_a_large_store_is_made_once_and_mapped(large):
    file = large.path / f"train-30-{large.meta['sha256']['documents.idx'][:16]}.spans"
    file.with_name(f".{file.name}.tmp").write_bytes(b"of a process that was killed")
    Samples(large, "pieces", 30)
    made = file.stat().st_mtime_ns
    table = Samples(large, "pieces", 30).table
    assert file.stat().st_mtime_ns == made and not list(large.path.glob(".*.tmp"))
    while not isinstance(table, np.memmap):
        table = table.base
    assert table.filename == file
    assert len(list(large.path.iterdir())) == 4, "three files of the store, and this one"
    for kind, seq_len, split in (
        ("bert", 32, "train"),
        ("pieces", 31, "train"),
        ("pieces", 30, "val"),
    ):
        Samples(large, kind, seq_len, split)
    assert len(list(large.path.glob("*.spans"))) == 4, "each kind of samples has its own"


def test_a_large_store_that_nobody_may_write_into_is_cut_in_memory(large, monkeypatch):
    monkeypatch.setattr(data.os, "access", lambda path, mode: False)
    assert len(Samples(large, "pieces", 30)) > 400
    assert not list(large.path.glob("*.spans"))


def test_a_table_that_does_not_fit_on_the_disk_leaves_nothing(large, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    said = rf"{large.path}/train-30-\w+\.spans: not written: No space left on device$"
    with pytest.raises(ValueError, match=said):
        Samples(large, "pieces", 30)
    assert len(list(large.path.iterdir())) == 3


def test_collate_worked_example():
    batch = collate(TOY, rows_of([(0, 2), (5, 6)], [(2, 5)]), 4)
    assert batch.tokens.tolist() == [[END, 1, END, END], [2, 3, 4, END]]
    assert batch.targets.tolist() == [[1, 2, END, IGNORE], [3, 4, END, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    assert batch.doc_ids.tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]


def test_what_was_a_target_before_is_context_only():
    batch = collate(TOY, [[Piece(start=1, stop=5, seen=3)]], 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 4]]
    assert batch.targets.tolist() == [[IGNORE, IGNORE, IGNORE, END]]


def test_collated_whole_rows_need_no_metadata():
    batch = collate(TOY, rows_of([(0, 4)]), 4)
    assert batch.positions is None and batch.doc_ids is None


def test_collate_for_a_bert_puts_each_piece_between_cls_and_sep():
    batch = collate(TOY, rows_of([(0, 2), (6, 7)]), 8, SPECIAL_IDS)
    cls, sep = SPECIAL_IDS.cls, SPECIAL_IDS.sep
    assert batch.tokens.tolist() == [[cls, 1, 2, sep, cls, 7, sep, END]]
    ignore = IGNORE
    assert batch.targets.tolist() == [[ignore, 1, 2, ignore, ignore, 7, ignore, ignore]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_collate_refuses_a_token_outside_the_vocabulary():
    damaged = replace(TOY, tokens=np.array([1, 2, 999, 4, END, END, 7, 8, END], dtype=np.uint16))
    with pytest.raises(ValueError, match=r"token 999 .*vocabulary of 261"):
        collate(damaged, rows_of([(0, 4)]), 4)


def test_cut():
    assert cut(np.array([[0, 5], [7, 8]]), 2) == rows_of([(0, 2), (2, 4), (4, 5)], [(7, 8)])


def test_masking_of_bert():
    T = 100_000
    tokens = torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(0))
    batch = collate(TOY, rows_of([(0, 2)]), 4, SPECIAL_IDS)._replace(
        tokens=tokens, targets=tokens.clone()
    )
    batch.targets[0, :1000] = IGNORE  # a special_ids: never masked
    choice = torch.from_numpy(np.random.default_rng(0).random((1, T)))
    masked = mask_tokens(batch, choice, SPECIAL_IDS)
    chosen = masked.targets != IGNORE
    assert not chosen[0, :1000].any()
    assert torch.equal(masked.tokens[~chosen], tokens[~chosen])
    share = chosen[0, 1000:].float().mean().item()
    assert abs(share - 0.15) < 5 * (0.15 * 0.85 / 99_000) ** 0.5
    hidden = (masked.tokens[chosen] == SPECIAL_IDS.mask).float().mean().item()
    same = (masked.tokens[chosen] == tokens[chosen]).float().mean().item()
    assert abs(hidden - 0.8) < 0.02 and abs(same - 0.1 - 0.1 / 256) < 0.015
    other = masked.tokens[chosen & (masked.tokens != SPECIAL_IDS.mask) & (masked.tokens != tokens)]
    assert other.max() < 256 and len(other.unique()) > 200
