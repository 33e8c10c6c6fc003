"""A batch of random tokens for models with a vocabulary of 40 and rows of at most 24, and settings
of a block that differs from the default one in everything.
"""

import torch
from torch import Tensor

from bert import Bert, BertBatch, BertConfig
from kernels.cross_entropy import IGNORE
from kernels.rotary import Rotary, Scaling
from model import Batch, BlockRunner, Transformer, TransformerConfig

LLAMA = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "kv_heads": 1}
LLAMA |= {"qk_norm": True, "rotary": Rotary(500.0, Scaling(4.0, 1.0, 2.0, 16.0)), "tied": False}


def small_model(kind: str = "gpt", blocks: int = 4, seed: int = 0, **more) -> Transformer:
    """Return a model with its initial weights."""
    torch.manual_seed(seed)
    config = BertConfig if kind == "bert" else TransformerConfig
    return config(blocks, 2, 16, 32, 24, 40, **more).build()


def plain_rows(tokens: Tensor) -> Batch:
    """Return a batch whose rows (B, T) are one piece each."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    doc_ids = torch.zeros_like(tokens)
    return Batch(tokens, tokens.roll(-1, 1), positions, doc_ids, is_plain=True)


def batch(packed: bool = True, seed: int = 1, B: int = 3, T: int = 24) -> Batch:
    """Return full rows of one piece, or packed: documents of 7, 5 and 9 tokens, and padding."""
    tokens = torch.randint(0, 40, (B, T), generator=torch.Generator().manual_seed(seed))
    if not packed:
        return plain_rows(tokens)
    doc_ids = torch.tensor([0] * 7 + [1] * 5 + [2] * 9 + [-1] * 3).repeat(B, 1)
    positions = torch.tensor([*range(7), *range(5), *range(9), 0, 0, 0]).repeat(B, 1)
    targets = torch.where(doc_ids < 0, IGNORE, tokens.roll(-1, 1))
    return Batch(tokens, targets, positions, doc_ids)


def for_model(model: Transformer, batch: Batch) -> Batch:
    """Make the batch that this model learns from. In a BERT's, every target is a masked token, but
    with --nsp that of a first token is an answer.
    """
    if isinstance(batch, BertBatch) or not isinstance(model, Bert):
        return batch
    is_target = (batch.targets != IGNORE).flatten()
    is_answer = is_target & ((batch.positions == 0) & model.config.nsp).flatten()
    return BertBatch(
        **vars(batch),
        masked=(is_target & ~is_answer).nonzero().squeeze(1),
        answers=is_answer.nonzero().squeeze(1) if model.config.nsp else None,
    )


def loss_of(model: Transformer, batch: Batch, run_block: BlockRunner | None = None) -> Tensor:
    batch = for_model(model, batch)
    return model.loss(model(*batch.inputs, run_block=run_block), batch)
