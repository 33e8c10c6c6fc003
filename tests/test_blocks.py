"""How a step runs blocks: weights that are rounded together are those that autocast rounds."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from model import Transformer, TransformerConfig, run_plain, run_recomputed
from support.step.blocks import with_rounded_weights

TOKENS = torch.arange(2 * 32).view(2, 32) % 50
BATCH = (TOKENS, TOKENS.roll(-1, 1), None, None)


def loss_and_gradients(model: Transformer, run_block) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(BATCH, run_block=run_block)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize(("kind", "inner"), [("gpt", run_plain), ("bert", run_recomputed)])
def test_the_numbers_are_those_of_autocast(kind, inner):
    model = Transformer(TransformerConfig(kind, 3, 2, 32, 64, 32, 50))
    expected = loss_and_gradients(model, inner)
    rounded = loss_and_gradients(model, with_rounded_weights(inner))
    assert all(map(torch.equal, rounded, expected))
    with torch.no_grad():  # and nothing is rounded without autocast
        assert model(BATCH, run_block=with_rounded_weights(inner)) == model(BATCH)


def test_compiled_blocks_take_them_without_compiling_again():
    torch.compiler.reset()
    model = Transformer(TransformerConfig("gpt", 3, 2, 32, 64, 32, 50))
    graphs = CompileCounter()
    for block in model.h:
        block.compile(backend=graphs, fullgraph=True, dynamic=False)
    run_block = with_rounded_weights(run_plain)
    first, again = (loss_and_gradients(model, run_block) for _ in range(2))
    assert graphs.frame_count == 1 and all(map(torch.equal, first, again))
    torch.compiler.reset()
