"""A store is opened as it was written, and refused where it is damaged or of another tokenizer.

python -m pytest tests/test_token_store.py
"""

import json
import os
from pathlib import Path

import pytest

from prepare import prepare
from support.text import tokenizer
from support.text.store import Store

TINY = Path(__file__).resolve().parents[1] / "corpus" / "pd-tiny.jsonl.gz"
PD4K = tokenizer.get_encoding()
BYTES = tokenizer.get_encoding("bytes")
FILES = ["tokens.bin", "documents.idx", "sources.idx"]


@pytest.fixture
def store(tmp_path) -> Store:
    lines = [{"text": f"text {n}", "source": f"s{n % 2}"} for n in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare([TINY, tmp_path / "in.jsonl"], tmp_path / "store", PD4K, "pd4k")
    return Store.open(tmp_path / "store")


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no token store: make one with prepare\.py"):
        Store.open(tmp_path)


@pytest.mark.parametrize("meta", ["{", "[]", "{}", '{"format": 1}', '{"format": 1, "tokens": "x"}'])
def test_a_damaged_meta_file_is_refused(tmp_path, meta):
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(ValueError, match="no token store"):
        Store.open(tmp_path)


def test_another_format_is_refused(store):
    meta = store.path / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="has store format 2, not 1"):
        Store.open(store.path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_refused(store, name):
    path = store.path / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{name}: needs [\d,]+ bytes"):
        Store.open(store.path)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}: needs [\d,]+ bytes"):
        Store.open(store.path)


@pytest.mark.parametrize("name", FILES)
def test_verify_finds_one_changed_bit(store, name):
    store.verify()
    path = store.path / name
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=f"{name}: sha256 differs"):
        Store.open(store.path).verify()


def test_a_store_refuses_another_tokenizer(store):
    store.check_tokenizer(tokenizer.get_encoding("pd4k"))
    with pytest.raises(ValueError, match="made with tokenizer pd4k") as caught:
        store.check_tokenizer(BYTES)
    for encoding in (PD4K, BYTES):
        assert tokenizer.fingerprint(encoding)[:12] in str(caught.value)
