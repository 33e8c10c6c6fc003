"""How a step runs blocks, apart from the techniques: weights rounded together, compiled or not."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call

from kernels.triton_here import why_not
from model import RunBlock, TokenMeta
from support.base.runtime import Runtime

if TYPE_CHECKING:
    from config import Config


def with_rounded_weights(inner: RunBlock) -> RunBlock:
    """The same numbers under autocast, with fewer launches.

    Autocast rounds each weight of a linear layer by itself, and its gradient back. Here the weights
    of a block are rounded together.
    """

    def run_layer(layer: int, block: nn.Module | Callable, x: Tensor, meta: TokenMeta) -> Tensor:
        device = x.device.type
        if not (isinstance(block, nn.Module) and torch.is_autocast_enabled(device)):
            return inner(layer, block, x, meta)
        weights = {name: p for name, p in block.named_parameters() if ".c_" in name}
        dtype = torch.get_autocast_dtype(device)
        rounded = dict(zip(weights, Rounded.apply(dtype, *weights.values()), strict=True))

        def run(x: Tensor, meta: TokenMeta) -> Tensor:
            return functional_call(block, rounded, (x, meta))

        return inner(layer, run, x, meta)

    return run_layer


class Rounded(torch.autograd.Function):
    """Cast tensors by one operator, and their gradients back by another."""

    @staticmethod
    def forward(ctx: FunctionCtx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return tuple(copied(tensors, dtype))

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *copied(gradients, ctx.dtype)


def copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


MOST_SHAPES = 16  # compiled by default; each takes some seconds


class Choice(NamedTuple):
    on: bool
    why: str


def choice(settings: "Config", runtime: Runtime, shapes: Sequence["Config"]) -> Choice:
    """Decide whether blocks are compiled.

    Args: shapes from config.shapes
    """
    asked, kind = settings.run.compile, runtime.device.type
    if asked != "auto":
        return Choice(asked == "on", "as asked")
    if kind != "cuda":
        return Choice(False, f"--compile compiles on {kind} too")
    if missing := why_not(kind):  # torch generates a GPU's code in Triton
        return Choice(False, missing)
    if not shapes:
        return Choice(False, "shapes are not known ahead; --compile compiles them as they come")
    if len(shapes) > MOST_SHAPES:
        return Choice(False, f"there are {len(shapes)} shapes; --compile compiles them all")
    return Choice(True, "all shapes are known before the first step")
