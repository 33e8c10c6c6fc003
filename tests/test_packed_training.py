"""Training on packed rows is training on the same documents, one per row; with any packer."""

from functools import cache

import numpy as np
import pytest
import torch
from conftest import SMALL, refusal_of

import config
import packing
import train
from data import Rows, batch_of, counts
from model import Transformer
from packing import pack_lengths
from support.rows.batch import shares_of
from support.rows.bert import SpecialIds, sentence_pairs
from support.rows.cutting_stock import NEED_SCIPY
from support.rows.samples import SPECIAL_TOKENS, Samples
from support.text.store import Store
from support.text.tokenizer import get_encoding

SPECIAL_IDS = SpecialIds.of(get_encoding("bytes"))
STEPS, DOCUMENTS, T = 12, 12, 32


@cache
def losses(store_dir, packed, flags):
    """The loss of each step: AdamW on DOCUMENTS per step, the same ones packed or not."""
    store, nsp = Store.open(store_dir), "nsp" in flags
    settings = config.build(config.parse(f"{SMALL} {flags}".split()))
    special_ids = SPECIAL_IDS if "bert" in flags else None
    special_tokens = SPECIAL_TOKENS.get(config.samples_kind(settings), 0)
    torch.manual_seed(0)
    model = Transformer(config.transformer_config(settings, vocab_size=320))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = Samples(store, "bert" if special_ids else "pieces", T)
    spans = samples.spans(torch.randperm(len(samples))[: STEPS * DOCUMENTS].numpy())
    sizes = torch.randint(1, 20, (len(spans),)).numpy()
    spans = np.stack((spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + sizes)), axis=1)
    curve = []
    for step in range(STEPS):
        pieces, pairs = spans[step * DOCUMENTS : (step + 1) * DOCUMENTS], None
        if nsp:
            pieces, pairs = sentence_pairs(pieces, step)
        rows = Rows.of(pieces, pairs=pairs)
        if packed:
            lengths = pieces[:, 1] - pieces[:, 0] + special_tokens
            rows = rows.packed(pack_lengths(lengths, T))
            assert len(rows) < DOCUMENTS
        seeds = torch.tensor([2 * step, 2 * step + 1])
        batch = batch_of(store, rows, seq_len=T, special_ids=special_ids, seeds=seeds)
        counted = counts(rows, special_ids is not None, per_document="document" in flags)
        shares = shares_of(batch, "document" in flags, counted.of_answer)
        loss = model(batch, shares=shares) / counted.targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize(
    "flags",
    [
        "--pos rope",
        "--pos learned --loss-per document",
        "--model bert --pos learned",
        "--model bert --nsp --pos rope --loss-per document",
    ],
)
def test_steps_are_the_same_packed_or_not(store_dir, flags):
    packed, alone = (losses(store_dir, packed, flags) for packed in (True, False))
    assert packed == pytest.approx(alone, rel=1e-4)
    assert packed[-1] < 0.9 * packed[0], "it learns"


def test_negative_control_a_row_that_is_one_document_differs(store_dir, monkeypatch):
    """Positions start again, but attention is not told of the documents."""
    forward = Transformer.forward

    def contaminated(self, batch, **more):
        one_document = torch.where(batch.with_documents().doc_ids < 0, -1, 0)
        return forward(self, batch._replace(doc_ids=one_document), **more)

    alone = losses(store_dir, False, "--pos rope")
    monkeypatch.setattr(Transformer, "forward", contaminated)
    wrong = losses.__wrapped__(store_dir, True, "--pos rope")
    assert wrong != pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("packer", [None, *packing.PACKERS])
def test_a_run_packs_with_the_packer_it_is_told(run, short_ends, monkeypatch, packer):
    if packer in NEED_SCIPY:
        pytest.importorskip("scipy", reason="SciPy is not installed")
    used, pack = [], packing.pack

    def noted(counts, packer, max_per_pack):
        used.append((packer, max_per_pack))
        return pack(counts, packer, max_per_pack)

    monkeypatch.setattr(packing, "pack", noted)
    chosen = f"--pack-packer {packer}" if packer else ""
    run(f"--pack --pack-max-per-row 3 --tokens 256 --eval-every 0 --final-eval-tokens 32 {chosen}")
    windows = [packer for packer, most in used if most == 3]  # evaluation packs without a limit
    assert set(windows) == {packer or "lpfhp"}


def test_windows_of_more_tokens_than_are_counted_exactly_are_refused(
    store_dir, tmp_path, monkeypatch, capsys
):
    argv = f"train.py {SMALL} --data {store_dir} --out {tmp_path / 'run'} --pack".split()
    monkeypatch.setattr("support.rows.packs.MOST_TOKENS", 1000)  # a window has 16 steps of 256
    said = refusal_of(train.main, argv, monkeypatch, capsys)
    assert "tokens, and packers count exactly up to 1,000" in said
