"""How a step runs the blocks of a model: plainly, or as the techniques that are on want it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from model import RunBlock, run_plain, run_recomputed
from support.batch import Batch
from support.clock import StepContext
from support.settings import techniques_on


def run_block_of(
    settings: Any, held: Any, context: StepContext, first_row: int, batch: Batch
) -> RunBlock:
    """For the micro-batch that begins at this row of all ranks' rows.

    Each technique wraps those before it, in the order of `Config`.

    Args: held offload.Offloaded, where weights may have to be fetched first, or None
    """
    recomputes = settings.run.checkpoint_activations
    run_block = run_recomputed if recomputes else run_plain
    if held:
        run_block = held.run_block(run_block, recomputes)
    elif batch.tokens.is_cuda and not settings.run.fsdp:
        run_block = with_rounded_weights(run_block)
    for technique in techniques_on(settings):
        if technique.run_block:
            run_block = technique.run_block(settings, context, first_row, batch, run_block)
    return run_block


def with_rounded_weights(inner: RunBlock) -> RunBlock:
    """The same under autocast, with fewer launches: it rounds each weight of a linear layer, and
    its gradient back, by itself; here a block's are rounded together, to the same numbers.
    """

    def run_layer(layer: int, block: Any, x: Tensor, meta: Any) -> Tensor:
        device = x.device.type
        if not (isinstance(block, nn.Module) and torch.is_autocast_enabled(device)):
            return inner(layer, block, x, meta)
        weights = {name: p for name, p in block.named_parameters() if ".c_" in name}
        dtype = torch.get_autocast_dtype(device)
        rounded = dict(zip(weights, Rounded.apply(dtype, *weights.values()), strict=True))

        def run(x: Tensor, meta: Any) -> Tensor:
            return functional_call(block, rounded, (x, meta))

        return inner(layer, run, x, meta)

    return run_layer


class Rounded(torch.autograd.Function):
    """Tensors in another dtype, all by one operator, and their gradients back by another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return tuple(copied(tensors, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *copied(gradients, ctx.dtype)


def copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies
