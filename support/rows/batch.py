"""Batch: rows as the model takes them; and how much each of their targets counts in the loss.

Made by data.batch_of, where the head of data.py shows one; taken by Trainer.step in train.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from support.base.runtime import on_device


class Batch(NamedTuple):
    """The rows of a step or a micro-batch. Each field is (B, T) int64.

    `positions` and `doc_ids` are None where every row is one piece that fills it.
    """

    tokens: Tensor
    targets: Tensor  # IGNORE where nothing is predicted
    positions: Tensor | None  # from 0 in every piece
    doc_ids: Tensor | None  # one id a piece, from 0 in every row; padding is -1

    def rows(self, part: slice) -> "Batch":
        return Batch(*(None if field is None else field[part] for field in self))

    def with_documents(self) -> "Batch":
        """The same batch with positions and doc_ids, even where every row is one piece."""
        if self.doc_ids is not None:
            return self
        rows, T = self.tokens.shape
        positions = torch.arange(T, device=self.tokens.device).repeat(rows, 1)  # (B, T)
        return self._replace(positions=positions, doc_ids=torch.zeros_like(positions))

    def to(self, device: torch.device) -> "Batch":
        """On a device, by one copy of all fields (support/base/runtime.py)."""
        if self.tokens.device.type == device.type:
            return self
        fields = on_device(torch.stack([f for f in self if f is not None]), device)  # (n, B, T)
        return Batch(*fields, *[None] * (len(self) - len(fields)))


def shares_of(batch: Batch, per_document: bool, of_answer: float | None) -> Tensor | None:
    """How much each target counts in the loss; None if each counts 1.

    Paper:   Krell et al., arXiv 2107.02027, section 3.2.3: without shares long documents weigh more
    Args:    per_document every document counts 1, shared equally by its targets
             of_answer    what the answer at a [CLS] counts in addition; None: there are no answers
    Returns: (B, T) float32
    """
    if of_answer is None and not per_document:
        return None
    _, targets, positions, doc_ids = batch.with_documents()
    counts = (targets != IGNORE).float()
    if of_answer is not None:
        answers = (positions == 0) & (targets != IGNORE)
        counts[answers] = 0
    if per_document:
        documents = doc_ids.clamp(min=0)  # (B, T)
        sums = torch.zeros_like(counts).scatter_add(1, documents, counts)
        counts /= sums.gather(1, documents).clamp(min=1)
    if of_answer is not None:
        counts[answers] = of_answer
    return counts
