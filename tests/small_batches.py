"""A batch of random tokens for models with a vocabulary of 40 and rows of at most 24, and settings
of a block that differs from the default one in everything.
"""

import torch

from kernels.rotary import Rotary, Scaling
from model import Batch

LLAMA = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "kv_heads": 1}
LLAMA |= {"qk_norm": True, "rotary": Rotary(500.0, Scaling(4.0, 1.0, 2.0, 16.0)), "tied": False}


def batch(packed: bool = True, seed: int = 1, B: int = 3, T: int = 24) -> Batch:
    """Return full rows of one piece, or packed: documents of 7, 5 and 9 tokens, and padding."""
    tokens = torch.randint(0, 40, (B, T), generator=torch.Generator().manual_seed(seed))
    if not packed:
        return Batch(tokens, tokens.roll(-1, 1), None, None)
    doc_ids = torch.tensor([0] * 7 + [1] * 5 + [2] * 9 + [-1] * 3).repeat(B, 1)
    positions = torch.tensor([*range(7), *range(5), *range(9), 0, 0, 0]).repeat(B, 1)
    targets = torch.where(doc_ids < 0, -100, tokens.roll(-1, 1))
    return Batch(tokens, targets, positions, doc_ids)
