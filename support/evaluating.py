"""What any evaluation does: the model in its mode, rows dealt to ranks, and sums by piece."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.cross_entropy import IGNORE, chunks, exact_dtype
from model import predicted_by_bert
from support.batch import Batch
from support.memory import on_device
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


def piece_of_targets(batch: Batch, offsets: np.ndarray) -> np.ndarray:
    """(n,) the piece that each target of the batch belongs to, in reading order.

    Args: offsets (B + 1,) which pieces each row has, from left to right
    """
    of_row = torch.from_numpy(offsets[:-1, None])  # (B, 1)
    return (of_row + batch.with_documents().doc_ids)[batch.targets != IGNORE].numpy()


def sums_of_pieces(
    model: nn.Module, batch: Batch, offsets: np.ndarray, lengths: np.ndarray, runtime: Runtime
) -> np.ndarray:
    """(n, 3) nats, targets and bytes of each piece of the batch.

    Args: offsets (B + 1,) of the pieces of each row, from 0
          lengths (V,) bytes that each token stands for
    """
    with runtime.autocast():
        losses = model.losses(batch.to(runtime.device)).cpu()  # (B, T)
    counted = batch.targets != IGNORE
    piece = piece_of_targets(batch, offsets)
    columns = (losses[counted].double().numpy(), None, lengths[batch.targets[counted].numpy()])
    return np.stack([np.bincount(piece, column, offsets[-1]) for column in columns], axis=1)


@torch.no_grad()
def scores_of_targets(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a GPT gives each target: its nats (n,), and whether no token is likelier (n,) bool.

    Only the logits of targets are made, and only some of them at a time.
    """
    x = model.hidden_states(batch.tokens, batch.positions, batch.doc_ids)  # (B, T, C)
    at = batch.targets != IGNORE
    (features, bias), targets = model.features(x[at]), batch.targets[at]
    nats = torch.zeros(len(targets), dtype=exact_dtype(x.dtype), device=x.device)
    likeliest = torch.zeros_like(targets, dtype=torch.bool)
    for rows in chunks(len(targets), len(model.wte.weight), x.device.type):
        logits = F.linear(features[rows], model.wte.weight, bias).to(nats.dtype)  # (chunk, V)
        nats[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
        likeliest[rows] = logits.argmax(1) == targets[rows]
    return nats, likeliest


@torch.no_grad()
def right_answers(
    model: nn.Module,
    count: int,
    read: Callable[[range], Batch],
    at_once: int,
    runtime: Runtime,
    between: Callable[[int], None],
) -> tuple[float, float]:
    """Of how many pairs a BERT tells rightly whether the parts belong together, and of how many.

    Args: count, read  how many rows there are, and the rows of some numbers
    """
    right = torch.zeros(2, dtype=torch.float64)
    with evaluating(model):
        for own in own_rows(model, count, at_once, runtime, between):
            batch = read(own).with_documents()
            at = predicted_by_bert(batch.targets, batch.positions, nsp=True).answers
            tokens, _, positions, doc_ids = batch.to(runtime.device)
            with runtime.autocast():
                x = model.hidden_states(tokens, positions, doc_ids).flatten(0, 1)  # (B T, C)
                found = model.follows(x, on_device(at, runtime.device)).argmax(1).cpu()
            right += torch.tensor([(found == batch.targets.flatten()[at]).sum(), len(at)])
    right, pairs = runtime.reduce(right).tolist()
    return right, pairs
