"""The code of docs/library.md runs, packs without leaks, and drops the tokens train.py drops."""

import sys
import types

import pytest
import torch
from conftest import build, widen
from small_batches import loss_of, plain_rows
from test_technique import blocks
from torch import Tensor, nn

import config
import ltd
from model import Batch, TokenMeta, Transformer, TransformerConfig
from support.clock import StepContext

CODE = dict(blocks("python", "library"))


@pytest.fixture
def code_of(monkeypatch):
    """Run one of the page's blocks and return its names."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def names(file: str) -> types.ModuleType:
        module = types.ModuleType(file)
        exec(CODE[file], module.__dict__)
        monkeypatch.setitem(sys.modules, file.removesuffix(".py"), module)
        return module

    return names


def test_rows_packed_by_the_page_have_the_losses_of_their_documents(code_of):
    """Its leak check reports no leak with our mask, and all of them without."""
    packed_rows = code_of("packed_rows.py").packed_rows
    leaks = code_of("leak_check.py").leaks
    model = widen(Transformer(TransformerConfig(4, 4, 128, 512, 256, 50))).eval()
    tokens, _, positions, doc_ids = packed_rows([[3, 1, 4], [1, 5], [9, 2]], 16)

    def leaked(mask: Tensor | None) -> list[tuple[int, int]]:
        return leaks(lambda x: model.logits(model(x, positions, mask)), tokens, doc_ids)

    assert leaked(doc_ids) == [] and leaked(None) == [(0, 1), (0, 2), (1, 2)]
    pieces = [[*range(9, 29)], [*range(7)], [*range(30, 34)]]
    packed = Batch(*packed_rows([pieces[0] + pieces[1], pieces[2]], 20))
    assert packed.tokens.shape == (2, 20)
    alone = sum(loss_of(model, Batch(*packed_rows([piece], len(piece)))) for piece in pieces)
    torch.testing.assert_close(loss_of(model, packed), alone)


class InputOnly(nn.Module):
    """A block that is called as nanoGPT calls it, with only its input."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x, TokenMeta(torch.arange(x.shape[1])[None], None, causal=True))


def test_the_pages_token_dropping_computes_what_ours_does(code_of):
    flags = "--ltd --ltd-start 8 --ltd-pace linear --ltd-multiple 4 --layers 5 --pos learned"
    shape = "--heads 2 --width 16 --seq-len 32 --batch-tokens 128 --seed 7"
    settings = build(f"{flags} {shape} --ltd-steps 8")
    ours = widen(Transformer(config.transformer_config(settings, vocab_size=64))).train()
    tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    theirs = nn.ModuleList(map(InputOnly, ours.h))
    names = list(theirs.state_dict())
    dropping = code_of("token_dropping.py").TokenDropping(theirs, seed=7)
    for step, first_row in ((1, 0), (4, 4), (9, 0)):
        context = StepContext(7, step, 0.0, seq_len=32, layers=5)
        rows = torch.arange(first_row, first_row + 4)
        run = ltd.wrap_block(ours.run_block, settings.ltd, context, rows, plain_rows(tokens))
        expected = ours(tokens, run_block=run)
        keep = ltd.kept_tokens(step - 1, over=8, start=8, seq_len=32, multiple=4)
        dropping.begin(step, keep, first_row)
        x = ours.wte(tokens) + ours.wpe(torch.arange(32))
        for block in theirs:
            x = block(x)
        assert torch.equal(ours.ln_f(x), expected), (step, keep)
    assert list(theirs.state_dict()) == names
    theirs.eval()
    dropping.begin(1, 8)
    assert torch.equal(theirs[1](x), ours.h[1](x, TokenMeta(torch.arange(32)[None], None, True)))
