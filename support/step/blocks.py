"""How a step runs the blocks of a model: plainly, or as the techniques that are on want it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kernels.triton_here import why_not
from model import RunBlock


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


MOST_SHAPES = 16  # by default; each takes some seconds


class Choice(NamedTuple):
    on: bool
    why: str


def choice(settings: Any, runtime: Any, shapes: Sequence[Any]) -> Choice:
    """Whether blocks are compiled.

    Args: shapes from config.shapes
    """
    asked, kind = settings.run.compile, runtime.device.type
    if asked != "auto":
        return Choice(asked == "on", "as asked")
    if kind != "cuda":
        return Choice(False, f"--compile compiles on {kind} too")
    if missing := why_not(kind):  # torch writes a GPU's code in Triton
        return Choice(False, missing)
    if not shapes:
        return Choice(False, "no list of shapes; --compile compiles them as they come")
    if len(shapes) > MOST_SHAPES:
        return Choice(False, f"{len(shapes)} shapes would come; --compile compiles them all")
    return Choice(True, "shapes that are known before the first step")
