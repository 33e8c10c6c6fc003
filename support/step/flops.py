"""Floating-point operations of a step: those it executes, and those that the model needs.

Matrix products are counted, on all ranks, with an addition and a multiplication as two operations.

    executed  `flops` in the log: forward, backward and Muon. Padding counts, and so does all that
              runs twice: attention's scores in the backward pass, blocks under
              --checkpoint-activations, blocks whose weights --offload fetches
    model     what MFU divides by the peak (arXiv 2204.02311, appendix B): three times the forward
              pass of real tokens, in the layers that see them, each attending to its own document.
              Nothing counts twice and the optimizer does not count, so a run that recomputes does
              not look faster for it

Causal attention counts half in both, as in `ltd.py plan`: kernels skip the other half, except a
CPU's in rows of up to 512 tokens. All other products are counted by torch's FlopCounterMode, from
the modules of the model (support/step/sizes.py: `counted`), and a backward pass as two forward.

Documents that share a row cost the sum of their squared lengths. A layer that drops tokens keeps
each document's share of them. Not counted: which tokens a step draws, and what a CPU adds to fit
documents of unequal length into one call.
"""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bert import masked_tokens
from data import SPECIAL_TOKENS
from kernels.packed_attention import chosen_impl
from model import TransformerConfig
from support.runtime import Runtime
from support.step.optim import flops_of_muon
from support.step.sizes import counted

if TYPE_CHECKING:
    from config import Config
    from plan import Step

# Products of attention. Forward: scores, and the values they weigh. Backward: scores again, the
# weights' gradient, and those of queries, keys and values; Triton's second kernel repeats the first
# two.
FORWARD, BACKWARD, BACKWARD_TILES = 2, 5, 7


class Work(NamedTuple):
    """How a run carries out its steps."""

    config: TransformerConfig
    world_size: int
    seq_len: int  # tokens of a full row
    rows_at_once: int  # full rows of a micro-batch
    impl: str  # of attention in rows of several documents
    recomputed: frozenset[int]  # layers that run again in the backward pass
    optimizer: int  # FLOPs of its step


class Flops(NamedTuple):
    executed: int
    model: int


class Laid(NamedTuple):
    """How many tokens each piece of a step's rows has, on all ranks."""

    lengths: np.ndarray  # (N,)
    offsets: np.ndarray  # (R + 1,) where the pieces of each row begin

    def filled(self) -> np.ndarray:
        """(R,) tokens of each row, without its padding."""
        return np.diff(np.concatenate(([0], np.cumsum(self.lengths)))[self.offsets])

    def squares(self, kept: np.ndarray) -> int:
        """The sum of squared lengths when each row keeps `kept` (R,) tokens, evenly of its pieces.

        Example: a row of pieces of 4 and 2 has 20; if it keeps 3 of its 6 tokens, 4 + 1 == 5
        """
        share = kept / np.maximum(self.filled(), 1)
        lengths = self.lengths * np.repeat(share, np.diff(self.offsets))
        return round((lengths**2).sum())


def attention_of(settings: "Config", runtime: Runtime, config: TransformerConfig) -> str:
    """The implementation of attention in rows of several documents."""
    return chosen_impl(
        runtime.device.type,
        runtime.dtype,
        head_width=config.head_width,
        dropout=config.dropout,
        compiled=settings.run.compile == "on",
    )


def work_of(
    settings: "Config",
    runtime: Runtime,
    config: TransformerConfig,
    rows_at_once: int,
    blocks: int,
    streamed: Collection[int] = (),
) -> Work:
    """Everything besides its rows that decides the FLOPs of a step.

    Args: blocks   that have weights of their own
          streamed layers whose weights are fetched (--offload)
    """
    device, rerun = runtime.device.type, settings.run.checkpoint_activations
    of_block = flops_of_muon(config, device)
    return Work(
        config=config,
        world_size=runtime.world_size,
        seq_len=settings.data.seq_len,
        rows_at_once=rows_at_once,
        impl=attention_of(settings, runtime, config),
        recomputed=frozenset(range(config.layers) if rerun else streamed),
        optimizer=blocks * of_block if settings.optim.optimizer == "muon" else 0,
    )


def flops_of_step(settings: "Config", work: Work, step: "Step") -> Flops:
    """What a step costs on all ranks."""
    config, laid, of_token = work.config, step.laid, counted(work.config, half=False)
    C, T = config.width, step.seq_len
    half = 2 if config.causal else 1
    filled = laid.filled()
    rows = -(-len(filled) // work.world_size) * work.world_size  # blank ones run too
    head, model_head = rows * T * of_token.head, int(filled.sum()) * of_token.head
    if config.kind == "bert":  # its head sees only the masked tokens
        special = SPECIAL_TOKENS["pairs" if config.nsp else "bert"]
        predicted = int(masked_tokens(laid.lengths - special).sum())
        head = model_head = predicted * of_token.head
        head += len(laid.lengths) * of_token.answer
    executed, model = 3 * head + work.optimizer, 3 * model_head
    products = FORWARD + (BACKWARD_TILES if work.impl == "triton" else BACKWARD)
    is_masked = work.impl == "dense" and not (len(laid.lengths) == rows and all(filled == T))
    layers = step.tokens_by_layer
    repeated = Counter(layers[layer] for layer in work.recomputed)
    for K, count in Counter(layers).items():  # K is 0 in layers that are not there yet
        kept = np.minimum(filled, K)
        squares = laid.squares(kept)
        scores = rows * K * K if is_masked else squares // half
        executed += count * (3 * of_token.block * rows * K + 2 * products * C * scores)
        executed += repeated[K] * (of_token.again * rows * K + 2 * FORWARD * C * scores)
        model += count * (3 * of_token.block * int(kept.sum()) + 12 * C * squares // half)
    return Flops(executed, model)
