"""What any evaluation does: the model in its mode, and rows dealt to ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from support.runtime import Runtime


def own_rows(
    count: int, at_once: int, runtime: Runtime, between: Callable[[int], None]
) -> Iterator[range]:
    """The numbers of this rank's rows, so many at once; calls `between` as often on every rank."""
    for first in range(0, count, runtime.world_size * at_once):
        own = first + runtime.rank * at_once
        if own < count:  # in the last turn there may be rows for some ranks only
            yield range(own, min(own + at_once, count))
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
