"""Samples: their spans, of small stores and of large ones."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
from small_stores import TOY

import data as samples_module
from data import Samples, cut
from support.store import Store


def spans_of(samples):
    return [tuple(span) for span in samples.spans(np.arange(len(samples)))]


def test_samples_worked_example():
    """Documents of 5 and 1 tokens, end-of-text counted, which a BERT's samples leave out."""
    assert spans_of(Samples(TOY, "pieces", 2)) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert spans_of(Samples(TOY, "rows", 4)) == [(0, 4), (4, 6)]
    assert spans_of(Samples(TOY, "pieces", 2, split="val")) == [(6, 8), (8, 9)]
    bert = Samples(TOY, "bert", 5)
    assert bert.max_piece_len == 3 and spans_of(bert) == [(0, 3), (3, 4)]

    assert cut(np.array([[0, 5], [7, 8]]), 2).tolist() == [[0, 2], [2, 4], [4, 5], [7, 8]]


@pytest.fixture
def large(store_dir, tmp_path, monkeypatch):
    """A store of its own that counts as a large one, whose documents are cut 7 at a time."""
    monkeypatch.setattr(samples_module, "IN_MEMORY", 0)
    monkeypatch.setattr(samples_module, "DOCUMENTS_AT_ONCE", 7)
    analyses = shutil.ignore_patterns("curriculum")  # of other tests' runs on the shared store
    return Store.open(shutil.copytree(store_dir, tmp_path / "large", ignore=analyses))


def test_samples_of_a_large_store_are_those_of_a_small_one(store_dir, large, monkeypatch):
    """Each kind of samples has a table of its own, which is made once and read."""
    store = Store.open(store_dir)
    edges, made = store.offsets[store.meta["train_documents"] :].tolist(), set()
    for kind in ("pieces", "bert"):
        bert, expected = kind == "bert", []
        for start, stop in pairwise(edges):
            stop -= bert
            expected += [(a, min(a + 30, stop)) for a in range(start, stop, 30)]
        for where, most in ((large, 0), (large, 0), (store, 1 << 20)):  # made, read, in memory
            monkeypatch.setattr(samples_module, "IN_MEMORY", most)
            samples = Samples(where, kind, 30 + 2 * bert, "val")
            assert spans_of(samples) == expected
        (file,) = set(large.path.glob("*.spans")) - made
        assert file.stat().st_size == 16 * len(expected)
        made.add(file)
    assert len(list(large.path.iterdir())) == 3 + 2, "three files of the store"


def test_the_table_of_a_large_store_is_made_once_and_read(large):
    file = large.path / f"train-30-{large.meta['sha256']['documents.idx'][:16]}.spans"
    Samples(large, "pieces", 30)
    made = file.stat().st_mtime_ns
    table = Samples(large, "pieces", 30).table
    assert file.stat().st_mtime_ns == made
    assert isinstance(table.base.base, np.memmap) or isinstance(table.base, np.memmap)
