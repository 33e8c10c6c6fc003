"""A model without memory: its names and shapes, for weights that are still to come."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import Transformer, TransformerConfig


class NothingDrawn(TorchFunctionMode):
    """Leaves normal random values out. On the meta device there are none to draw, and to find that
    out torch imports its compiler, which takes a second.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(config: TransformerConfig) -> Transformer:
    with torch.device("meta"), NothingDrawn():
        return Transformer(config)
