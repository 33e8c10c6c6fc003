"""What any evaluation does: the model in its mode, and rows dealt to ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from support.runtime import Runtime
from support.sharded import is_sharded


def own_rows(
    model: nn.Module, count: int, at_once: int, runtime: Runtime, between: Callable[[int], None]
) -> Iterator[range]:
    """The numbers of this rank's rows, so many at once; calls `between` as often on every rank.

    The model is one that is run once on each of them. In the last turn there may be rows for some
    ranks only. If the model is sharded the others run it on a token, because its weights are
    gathered from all ranks.
    """
    for first in range(0, count, runtime.world_size * at_once):
        own = first + runtime.rank * at_once
        if own < count:
            yield range(own, min(own + at_once, count))
        elif is_sharded(model):
            token = torch.zeros(1, 1, dtype=torch.int64, device=runtime.device)
            with torch.no_grad(), runtime.autocast():
                model.hidden_states(token)
        between(min(first + runtime.world_size * at_once, count))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in evaluation mode meanwhile, and afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if is_sharded(model):
            model.reshard()  # what stands outside the blocks is kept gathered for a backward pass
