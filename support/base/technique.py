"""What a technique is to the rest: one line in `Config`, and the hooks that the line fills.

A technique chooses data (plan.py calls it), runs blocks in its own way (train.py, at every
micro-batch), or edits the model (train.py, when it puts a trainer together). It fills the hooks it
needs and leaves the others out; nobody asks for a technique by name. So it can be deleted: its
module, its line in `Config`, its tests.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from config import Config
    from model import RunBlock, Transformer
    from support.base.clock import StepContext
    from support.base.runtime import Runtime
    from support.rows.batch import Batch
    from support.rows.ranking import Rankings, Stages
    from support.step.placement import Placement

Refusal = tuple[bool, str]  # whether it applies, and what the user is told


@dataclass(frozen=True)
class Technique:
    """A technique's settings and its hooks, each optional.

    with_defaults    fills in what the user left open
    refusals         values and combinations that cannot work
    metrics          names of the metrics that samples are chosen by
    stages           which samples may be drawn, and how long a piece of them may be; `rankings`
                     opens the index of each metric
    tokens_by_layer  of the given tokens of a row, how many each layer sees in a step
    run_block        wraps the run_block `inner` for the micro-batch that begins at a row
    skips_layers     a layer may not run at all in a step, and then has no gradients
    edit             an `Edit` of the model; `state` is what its `state_dict` was in a checkpoint
    blocks           how many blocks have weights of their own in a step
    placement        what it keeps in host memory
    """

    settings: type
    with_defaults: "Callable[[Config], Any] | None" = None
    refusals: "Callable[[Config], list[Refusal]] | None" = None
    metrics: "Callable[[Config], list[str]] | None" = None
    stages: "Callable[[Config, Callable[..., Rankings]], Stages] | None" = None
    tokens_by_layer: "Callable[[Config, StepContext, list[int]], list[int]] | None" = None
    run_block: "Callable[[Config, StepContext, int, Batch, RunBlock], RunBlock] | None" = None
    skips_layers: bool = False
    edit: "Callable[[Config, Transformer, Runtime, dict | None], Edit] | None" = None
    blocks: "Callable[[Config, StepContext], int] | None" = None
    placement: "Callable[[Config, nn.Module, Runtime], Placement] | None" = None


class Edit:
    """A technique at work on an assembled model, in the order of its life. Here it does nothing.

    train.assemble makes one for each technique that has an `edit`, before the weights are there and
    before anything holds on to the model's parameters.
    """

    streamed: Collection[int] = ()  # layers whose weights come to the device for each pass
    placement: "Placement | None" = None  # of what the model's state is on the host
    blocks: int | None = None  # that have weights of their own, where the model has more layers

    def move(self, model: "Transformer", device: torch.device) -> bool:
        """Put the weights where they belong; False leaves the whole model to the device."""
        return False

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers move, by the model's names."""
        return named

    def run_block(self, inner: "RunBlock", recomputes: bool) -> "RunBlock":
        """How a block gets its weights; `recomputes` if `inner` runs it again going backward."""
        return inner

    def around_backward(self, last: bool) -> AbstractContextManager:
        """Around the backward pass of a micro-batch, the last one of the step or not."""
        return nullcontext()

    def after_backward(self, named: dict[str, nn.Parameter]) -> None:
        """All gradients of a step are there."""

    def around_step(self, update: Callable[[], None]) -> None:
        """Move the weights: `update` moves those that have a gradient."""
        update()

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint has of the model, given the model's state_dict."""
        return weights

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of this edit, if the technique keeps state."""
        return {}

    def has_ended(self, context: "StepContext") -> bool:
        """Whether the model has to be put together anew before this step."""
        return False

    def handed_over(self, state: dict, context: "StepContext") -> dict:
        """The trainer's state, made that of the model put together for this step."""
        return state

    def logged(self) -> dict[str, Any]:
        """Fields of the log's line when the model was put together anew."""
        return {}

    def in_words(self) -> str:
        """The stage that the run is in, for the user; empty if there is nothing to say."""
        return ""

    def unfinished(self) -> str:
        """What was still to come when the run ended; empty if nothing was."""
        return ""


def refuse(refusals: list[Refusal]) -> None:
    """Raise ValueError with the first message that applies."""
    for refused, message in refusals:
        if refused:
            raise ValueError(message)


# ---- the registry


def technique(settings: type, **hooks: object) -> Any:
    """A field of the whole configuration that registers a technique."""
    return field(default_factory=settings, metadata={"technique": Technique(settings, **hooks)})


def techniques_of(config: "Config | type[Config]") -> dict[str, Technique]:
    """The registered techniques of a configuration or its class, by name."""
    return {
        part.name: part.metadata["technique"]
        for part in fields(config)
        if "technique" in part.metadata
    }


def is_on(config: "Config", name: str) -> bool:
    """Whether a technique's switch, its first setting, differs from its default.

    False for one that is not registered: techniques that speak of each other may be deleted.
    """
    settings = getattr(config, name, None)
    if settings is None:
        return False
    switch = fields(settings)[0]
    return getattr(settings, switch.name) != switch.default


def techniques_on(config: "Config") -> list[Technique]:
    return [entry for name, entry in techniques_of(config).items() if is_on(config, name)]
