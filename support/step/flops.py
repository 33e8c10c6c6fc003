"""Floating-point operations of a step: those that are executed, and those that its model needs.

Counted are matrix products, on all ranks, an addition and a multiplication as two operations.

    executed  `flops` in the log: forward, backward and Muon's. With padding, with the scores that a
              dense mask hides, and with all that is computed twice: attention's scores in the
              backward pass, blocks under --checkpoint-activations, blocks whose weights --offload
              fetches
    model     what MFU divides by the peak (arXiv 2204.02311, appendix B): three times the forward
              pass of real tokens, in the layers that see them, each attending to its own document.
              Nothing twice, no optimizer: a run that recomputes does not look faster for it

Causal attention counts half in both, as in `ltd.py plan`: the definition asks for no more, and
kernels leave the rest out, but for a CPU's in rows of up to 512 tokens. torch's FlopCounterMode
counts the whole square; tests/test_flops.py halves that before it compares.

A dropping layer keeps as many tokens as it does, but which ones, and so how long the rest of each
document is, is drawn here anew or taken in the mean: nobody has to draw what a step will draw.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.packed_attention import chosen_impl, groups_of
from model import TransformerConfig
from support.base.clock import tokens_by_layer
from support.base.runtime import Runtime
from support.rows.bert import masked_tokens
from support.rows.samples import SPECIAL_TOKENS
from support.step.muon import flops_of_orthogonalising
from support.step.sizes import weights_of_block

# Products of attention. Forward: scores, and what they weigh. Backward: scores again, the weights'
# gradient, and those of queries, keys and values; the first two once more in a second kernel, if
# tiles are Triton's.
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


@dataclass(frozen=True, eq=False)
class Laid:
    """How many tokens each piece of a step's rows has, on all ranks."""

    lengths: np.ndarray  # (n,)
    offsets: np.ndarray  # (R + 1,) where the pieces of each row begin

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Laid)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.offsets, other.offsets)
        )

    def filled(self) -> np.ndarray:
        """(R,) tokens of each row, without its padding."""
        return np.diff(np.concatenate(([0], np.cumsum(self.lengths)))[self.offsets])

    def doc_ids(self, T: int) -> np.ndarray:
        """(R, T) the number of each token's piece, -1 on padding."""
        ends = self.offsets[1:]
        numbers = np.insert(np.arange(len(self.lengths)), ends, -1)
        repeats = np.insert(self.lengths, ends, T - self.filled())
        return np.repeat(numbers, repeats).reshape(-1, T)

    def mean_squares(self, kept: np.ndarray) -> np.ndarray:
        """(R,) the sum of pieces' squared lengths once `kept` (R,) tokens of each row are drawn.

        Its mean over draws: of k = K l / n tokens that a piece of l keeps, when K of the row's n
        are drawn without putting them back, the variance is k (1 - l / n) (n - K) / (n - 1).

        Example: a row of pieces of 3 and 1 that keeps all has 10; that keeps 2, the means are 1.5
                 and 0.5, both variances 0.25, and the sum 3
        """
        row = np.repeat(np.arange(len(kept)), np.diff(self.offsets))
        n, K = self.filled()[row], kept[row]
        mean = K * self.lengths / n
        variance = mean * (1 - self.lengths / n) * (n - K) / np.maximum(n - 1, 1)
        return np.bincount(row, mean**2 + variance, len(kept))


def work_of(
    settings: Any,
    runtime: Runtime,
    config: TransformerConfig,
    rows_at_once: int,
    blocks: int,
    streamed: Any = (),
) -> Work:
    """What the FLOPs of a run's steps follow from, besides their rows.

    Args: blocks   that have weights of their own
          streamed layers whose weights are fetched (--offload)
    """
    device, run = runtime.device.type, settings.run
    impl = chosen_impl(
        device, runtime.dtype, config.head_width, config.dropout, run.compile == "on"
    )
    of_block = flops_of_orthogonalising(config.width, config.mlp_width, device)
    return Work(
        config=config,
        world_size=runtime.world_size,
        seq_len=settings.data.seq_len,
        rows_at_once=rows_at_once,
        impl=impl,
        recomputed=frozenset(range(config.layers) if run.checkpoint_activations else streamed),
        optimizer=blocks * of_block if settings.optim.optimizer == "muon" else 0,
    )


def flops_of_step(settings: Any, work: Work, step: Any) -> Flops:
    """What a step costs on all ranks.

    Args: step a plan.Step
    Cost: some sums over its pieces; on a CPU, where documents share rows, also what finding the
          groups of attention takes once more
    """
    config, laid = work.config, step.laid
    C, V, T = config.width, config.vocab_size, step.batch.tokens.shape[1]
    filled, half = laid.filled(), 2 if config.causal else 1
    share = -(-len(filled) // work.world_size)  # rows of a rank
    rows = share * work.world_size  # blank ones, which make the shares even, run too
    head, model_head = rows * T * V * C, int(filled.sum()) * V * C
    if config.kind == "bert":  # whose head sees the masked tokens alone
        special = SPECIAL_TOKENS["pairs" if config.nsp else "bert"]
        predicted = int(masked_tokens(laid.lengths - special).sum())
        head = model_head = predicted * (V + C) * C
        head += len(laid.lengths) * C * (C + 2) if config.nsp else 0
    executed, model = 6 * head + work.optimizer, 6 * model_head
    weights = weights_of_block(config)
    # of a block that runs again, what it returns is of no use: a GPT's last product is left out
    again = weights - C * config.mlp_width if config.kind == "gpt" else weights
    layers = tokens_by_layer(settings, step.context, T)
    repeated = Counter(layers[layer] for layer in work.recomputed)
    products = FORWARD + (BACKWARD_TILES if work.impl == "triton" else BACKWARD)
    for K, count in Counter(layers).items():
        if K == 0:
            continue  # layers that are not there yet
        kept = np.minimum(filled, K)
        scores = sum(scores_of_rank(work, step, rank, share, K) for rank in range(work.world_size))
        executed += count * (6 * weights * rows * K + 2 * products * C * scores)
        executed += repeated[K] * (2 * again * rows * K + 2 * FORWARD * C * scores)
        model += count * 6 * weights * int(kept.sum())
        model += count * round(12 * C * laid.mean_squares(kept).sum() / half)
    return Flops(executed, model)


def scores_of_rank(work: Work, step: Any, rank: int, share: int, K: int) -> int:
    """Scores of one head that a rank computes where a layer keeps K tokens; half if causal.

    Args: share rows of a rank
    """
    first, stop = (min(n * share, len(step.laid.offsets) - 1) for n in (rank, rank + 1))
    offsets = step.laid.offsets[first : stop + 1]
    mine = Laid(step.laid.lengths[offsets[0] : offsets[-1]], offsets - offsets[0])
    T, half = step.batch.tokens.shape[1], 2 if work.config.causal else 1
    if len(mine.lengths) == share and (mine.lengths == T).all():  # each row is one document
        return share * K * K // half
    if work.impl == "triton":
        return round(mine.mean_squares(np.minimum(mine.filled(), K)).sum() / half)
    if work.impl == "dense":
        return share * K * K
    doc_ids = np.pad(mine.doc_ids(T), ((0, share - (stop - first)), (0, 0)), constant_values=-1)
    if K < T:
        random = np.random.default_rng((step.context.seed, step.context.step, rank)).random
        order = np.where(doc_ids < 0, 1.0, random(doc_ids.shape)).argpartition(K - 1)[:, :K]
        doc_ids = np.take_along_axis(doc_ids, np.sort(order), axis=1)
    at_once = work.rows_at_once * (work.seq_len // T)
    parts = torch.from_numpy(doc_ids).split(at_once)
    return sum(scores_of_groups(part, work.impl, half) for part in parts)


def scores_of_groups(doc_ids: torch.Tensor, impl: str, half: int) -> int:
    """What a CPU computes for a micro-batch: groups of documents, or a mask over all."""
    groups = groups_of(doc_ids, impl)
    if groups is None:
        return doc_ids.numel() * doc_ids.shape[1]
    _, calls = groups
    return int(calls[1 : 1 + int(calls[0, 0])].prod(1).sum()) // half
