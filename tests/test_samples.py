"""Samples: their spans, of small stores and of large ones."""

import errno
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_stores import TOY

from support.base import atomic
from support.rows import samples as samples_module
from support.rows.samples import Samples, cut, spans_of_documents, with_context
from support.text.store import Store


@pytest.fixture(scope="module")
def store(store_dir):
    return Store.open(store_dir)


def spans_of(samples, ids):
    return [tuple(span) for span in samples.spans(np.array(ids))]


def test_samples_worked_example():
    assert spans_of(Samples(TOY, "pieces", 2), [0, 1, 2, 3]) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert spans_of(Samples(TOY, "rows", 4), [0, 1]) == [(0, 4), (4, 6)]
    assert spans_of(Samples(TOY, "pieces", 2, split="val"), [0, 1]) == [(6, 8), (8, 9)]
    bert = Samples(TOY, "bert", 5)  # the second document is empty without its end-of-text
    assert bert.max_piece_len == 3 and len(bert) == 2
    assert spans_of(bert, [0, 1]) == [(0, 3), (3, 4)]


def test_truncated_samples_worked_example():
    """Of documents of 5 and 1 tokens the first row's 2 and 1; a BERT's have no end-of-text."""
    truncated = Samples(TOY, "pieces", 2, long="truncate")
    assert spans_of(truncated, range(len(truncated))) == [(0, 2), (5, 6)]
    assert truncated.beyond_a_row() == (1, 3)
    bert = Samples(TOY, "bert", 5, long="truncate")
    assert spans_of(bert, range(len(bert))) == [(0, 3)] and bert.beyond_a_row() == (1, 1)
    assert Samples(TOY, "pieces", 5, long="truncate").beyond_a_row() == (0, 0)
    held_out = Samples(TOY, "pieces", 2, split="val", long="truncate")
    assert spans_of(held_out, [0]) == [(6, 8)] and held_out.beyond_a_row() == (1, 1)


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 16), st.booleans())
def test_truncated_each_document_keeps_its_first_row(sizes, seq_len, without_eot):
    """None is longer than a row, and with what is beyond it they are the documents again."""
    offsets = np.cumsum([0, *sizes])
    kept = spans_of_documents(offsets, seq_len, without_eot, "truncate")
    whole = spans_of_documents(offsets, seq_len, without_eot)
    begins = {start for start, size in zip(offsets.tolist(), sizes, strict=False)
              if size > without_eot}  # fmt: skip
    assert {tuple(span) for span in kept.tolist()} <= {tuple(span) for span in whole.tolist()}
    assert kept[:, 0].tolist() == sorted(begins), "one piece of every document that has text"
    lost = np.diff(whole).sum() - np.diff(kept).sum()
    assert lost == sum(max(size - without_eot - seq_len, 0) for size in sizes)


@pytest.fixture
def large(store_dir, tmp_path, monkeypatch):
    """A store of its own that counts as a large one, whose documents are cut 7 at a time."""
    monkeypatch.setattr(samples_module, "IN_MEMORY", 0)
    monkeypatch.setattr(samples_module, "DOCUMENTS_AT_ONCE", 7)
    analyses = shutil.ignore_patterns("curriculum")  # of other tests' runs on the shared store
    return Store.open(shutil.copytree(store_dir, tmp_path / "large", ignore=analyses))


@pytest.mark.parametrize("kind", ["pieces", "bert"])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("long", ["split", "truncate"])
def test_samples_of_a_large_store_are_those_of_a_small_one(
    store, large, split, kind, long, monkeypatch
):
    n, expected, beyond = store.train_documents, [], []
    edges = store.offsets.tolist()
    bert = kind == "bert"
    for start, stop in pairwise(edges[: n + 1] if split == "train" else edges[n:]):
        stop -= bert
        beyond.append(max(stop - start - 30, 0))
        stop = min(stop, start + 30) if long == "truncate" else stop
        expected += [(a, min(a + 30, stop)) for a in range(start, stop, 30)]
    for where, most in ((large, 0), (large, 0), (store, 1 << 20)):  # a file made, found, and none
        monkeypatch.setattr(samples_module, "IN_MEMORY", most)
        samples = Samples(where, kind, 30 + 2 * bert, split, long)
        assert spans_of(samples, range(len(samples))) == expected
        assert samples.beyond_a_row() == (sum(n > 0 for n in beyond), sum(beyond))
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
    for kind, seq_len, split, long in (
        ("bert", 32, "train", "split"),
        ("pieces", 31, "train", "split"),
        ("pieces", 30, "val", "split"),
        ("pieces", 30, "train", "truncate"),
        ("bert", 32, "train", "truncate"),
    ):
        Samples(large, kind, seq_len, split, long)
    assert len(list(large.path.glob("*.spans"))) == 6, "each kind of samples has its own"
    name = f"first-train-30-{large.meta['sha256']['documents.idx'][:16]}.spans"
    assert (large.path / name).stat().st_size == 16 * large.train_documents


def test_a_large_store_that_nobody_may_write_into_is_cut_in_memory(large, monkeypatch):
    monkeypatch.setattr(samples_module.os, "access", lambda path, mode: False)
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


def test_cut():
    assert cut(np.array([[0, 5], [7, 8]]), 2).tolist() == [[0, 2], [2, 4], [4, 5], [7, 8]]


def test_context_before_a_piece_worked_example():
    pieces, seen = with_context(np.array([[0, 6], [6, 10]]), np.array([0, 10]), 6, 3)
    assert pieces.tolist() == [[0, 6], [3, 9], [4, 10]] and seen.tolist() == [0, 3, 5]


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 16), st.integers(1, 16))
def test_every_token_is_a_target_once_and_sees_what_a_row_holds(sizes, seq_len, stride):
    stride = min(stride, seq_len)
    offsets = np.cumsum([0, *sizes])
    spans = cut(np.stack((offsets[:-1], offsets[1:]), axis=1), seq_len)
    targets = []
    pieces, seen = with_context(spans, offsets, seq_len, stride)
    for (start, stop), context in zip(pieces.tolist(), seen.tolist(), strict=True):
        begins = max(offset for offset in offsets.tolist() if offset <= start)
        assert stop <= min(offset for offset in offsets.tolist() if offset > start), "one document"
        assert stop - start <= seq_len
        assert start == begins or stop - start == seq_len, "as much context as fits"
        targets += range(start + context, stop)
    assert targets == list(range(offsets[-1]))
