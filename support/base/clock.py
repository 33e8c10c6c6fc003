"""The clock of a run, what a step costs on it, and values that grow with it.

A step consumes its real tokens, scaled by the share of layers that they ran through. The budget,
the learning rate and every schedule read consumed tokens.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.base.rng import bits, seed_of
from support.base.runtime import on_device
from support.base.technique import techniques_on

if TYPE_CHECKING:
    from config import Config


class Cursor(NamedTuple):
    """Where in the text the next rows come from; plan.py's header walks through three steps."""

    first_draw: int = 0  # of the next row; with --pack, of the window that the next row is in
    stage_first_draw: int = 0  # the draw at which the pool of samples became what it is
    drawn_at_tokens: int = 0  # consumed tokens when that window, or the last step, was drawn
    row: int = 0  # with --pack: rows of the window that steps have taken


class Clock(NamedTuple):
    """Where a run stands. Every schedule is a function of this, the settings and the seed."""

    step: int = 0
    consumed_tokens: int = 0  # the budget's unit, see effective_tokens
    real_tokens: int = 0  # tokens read, including a BERT's [CLS] and [SEP] but not padding
    layer_tokens: int = 0  # positions times the layers they went through, including padding
    positions: int = 0  # of all rows, including padding
    pieces: int = 0  # of documents, placed in rows
    flops: int = 0  # executed on all ranks, see support/step/flops.py; the plan leaves it alone
    cursor: Cursor = Cursor()

    def later(self, each: "Clock", count: int) -> "Clock":
        """This clock after `count` steps that add as much as `each` has; the cursor stays."""
        sums = (a + count * b for a, b in zip(self[:-1], each[:-1], strict=True))
        return Clock(*sums, self.cursor)

    def as_dict(self) -> dict:
        """For a checkpoint, which calls the cursor a position; `Clock.of` reads it."""
        fields = self._asdict()
        del fields["cursor"]
        return {**fields, "position": self.cursor._asdict()}

    @classmethod
    def of(cls, saved: dict) -> "Clock":
        fields = dict(saved)
        return cls(cursor=Cursor(**fields.pop("position")), **fields)


class StepContext(NamedTuple):
    """What a technique that acts on blocks may know about a step."""

    seed: int
    step: int  # counted from 1
    progress: float  # of the run when the step begins: consumed tokens as a share of the budget

    def bits(self, technique: str, layers: Sequence[int | str], rows: Tensor, T: int) -> Tensor:
        """Random numbers for one technique in this step, one per layer, row and position.

        Args:    rows (B,) int64, numbers of rows among those of all ranks; their device is used
        Returns: (len(layers), B, T) int64 from 0 to 2^63 - 1
        """
        seeds = [seed_of(self.seed, technique, self.step, layer) for layer in layers]
        return bits(on_device(torch.tensor(seeds), rows.device), rows, T)

    def uniform(self, technique: str, *key: int | str) -> float:
        """One random number in [0, 1), for a choice that all rows share."""
        return seed_of(self.seed, technique, self.step, *key) / 2**63


def tokens_by_layer(settings: "Config", context: StepContext, seq_len: int) -> list[int]:
    """How many tokens of a full row each layer sees in this step, given the techniques in use."""
    tokens = [seq_len] * settings.model.layers
    for technique in techniques_on(settings):
        if technique.tokens_by_layer:
            tokens = technique.tokens_by_layer(settings, context, tokens)
    return tokens


def blocks_at(settings: "Config", context: StepContext) -> int:
    """How many blocks have their own weights in this step."""
    for technique in techniques_on(settings):
        if technique.blocks:
            return technique.blocks(settings, context)
    return settings.model.layers


def effective_tokens(rows: np.ndarray, repeated: np.ndarray, tokens_by_layer: list[int]) -> int:
    """What a step adds to the clock: its real tokens, scaled by the share of layers they ran.

    Padding is dropped first, so a row of n tokens keeps min(n, K) of them in a layer that keeps K.

    Paper:   arXiv 2212.03597, section 3.3: a = floor((T (L - l) + r l) / L) for l dropped layers
    Args:    rows            (B,) tokens of each row, without padding
             repeated        (B,) how many of them are context: targets of an earlier row
             tokens_by_layer (L,) tokens of a full row that each layer sees
    Returns: sum over rows of floor((n - repeated) sum_l min(n, K_l) / (L n)), which is B a when
             rows are full
    Example: two rows of 256 in layers that see [256, 128, 128, 128, 128, 256] tokens consume
             2 * floor(1024 / 6) == 340; there a row of 100 tokens runs whole and consumes 100
    """
    layer_tokens = np.minimum(rows[:, None], np.array(tokens_by_layer)).sum(1)  # (B,)
    return int(
        ((rows - repeated) * layer_tokens // (len(tokens_by_layer) * np.maximum(rows, 1))).sum()
    )


def due(every: int, before: Clock, after: Clock, last: bool = False) -> bool:
    """Whether a step passed a multiple of `every` tokens or is the last; never if every is 0."""
    if every == 0:
        return False
    return last or before.consumed_tokens // every != after.consumed_tokens // every


def lr_clock(settings: "Config", clock: Clock) -> float:
    """What --lr-clock selects for the learning rate to read, in tokens of the budget.

    Layer-tokens are divided by the layers; unlike consumed tokens they count padding.
    """
    if settings.optim.lr_clock == "layer-tokens":
        return clock.layer_tokens / settings.model.layers
    return clock.consumed_tokens


def pace(t: float, over: float, start: int, end: int, degree: float = 1, multiple: int = 1) -> int:
    """Grow from `start` to `end` along a root as t goes to `over`, in any unit.

    For lengths, difficulties and kept tokens.

    Paper:    arXiv 2212.03597; floor((t / T)^(1 / p) (end - start) + start)
    Args:     degree   p: 1 is linear, 2 the square root; above 1 it grows fast at first
              multiple values before `end` are rounded down to a multiple of this
    Returns:  a value in start..end, exactly `end` from t = over on
    Deviates: DeepSpeed (data_pipeline/curriculum_scheduler.py and data_routing/scheduler.py) can
              round to a value below `start` and reach `end` late
    Example:  pace(1, 300, 64, 1024, degree=2, multiple=8) == 112, from 119.4;
              pace(27, 49, 1, 50) == 27, from 27.999999999999996: the order of operations is fixed
    """
    if t >= over:
        return end
    value = math.floor((t / over) ** (1 / degree) * (end - start) + start)
    return min(max(value - value % multiple, start), end)
