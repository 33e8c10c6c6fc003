"""Granular CPU offload: as much of a training state on the host as a byte budget asks for.

A placement (support/step/placement.py) says for each block how much of it is away. `Offloaded`
carries that out on a finished model:

    state      The host holds fp32 weights, which the optimizer moves, and the gradients that it
               needs. The device has a copy of the weights, which follows after each step.
    gradients  The device frees each gradient as soon as it is there, in every micro-batch; the host
               adds them up in fp32. In bf16 the device's copy of the weights is bf16: autocast
               would make the same numbers of fp32 ones, and keep both.
    weights    The device has a parameter without storage. A block's weights are fetched before it
               runs, while the block before it does, and once more for the backward pass.

Optimizers take the host's weights where state is away and the model's elsewhere. Names and
checkpoints are those of a run without offload and so, in fp32, is every bit.

With several ranks only optimizer state leaves, for DDP keeps the gradients. With --fsdp whole
blocks leave, a rank's rows of them, and FSDP2 carries the placement out (support/base/sharded.py).

Does not offload activations: --checkpoint-activations forgets them.

Papers:   Ren et al., arXiv 2101.06840 (ZeRO-Offload): optimizer state and its step on the host,
          all of it; granular CPU offloading, only part of it: Lin et al., arXiv 2110.03888
Deviates: the order of leaving is ours (support/step/placement.py): 2110.03888 came without code

    python offload.py plan --size 1.3B --budget 8GiB --dtype bf16 --link 25e9 --flops 140e12
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.base.numbers import bytes_of
from support.base.technique import Edit
from support.step.link import Landing, Lent, Link
from support.step.placement import (
    KINDS,
    Away,
    Part,
    Placement,
    budget_bytes,
    grouped,
    parts_of,
    place,
    place_shards,
)

if TYPE_CHECKING:
    from config import Config
    from model import RunBlock, Transformer
    from support.base.runtime import Runtime

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def flag(default: Any, help: str, **more: Any) -> Any:
    """As in support/base/settings.py, which a technique does not import: so it can be read
    alone."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class OffloadConfig:
    on: bool = flag(False, "keep on the host what --offload-budget has no room for", free=True)
    budget: str = flag(
        "auto",
        "device memory for weights, gradients, optimizer state: 6GiB, 800MB; auto: half of what is"
        " free",
        free=True,
    )
    host_memory: str = flag(
        "auto",
        "host memory that all ranks of a machine may take: 100GiB; auto: what is free",
        free=True,
    )


def refusals(settings: Any) -> list[tuple[bool, str]]:
    budget_bytes(settings.offload.budget, free=0)  # raises for what it cannot be
    host_bytes(settings, free=0)
    return []


def host_bytes(settings: Any, free: int | None) -> int | None:
    """What a run may take of this machine's memory, of which so much is free."""
    text = settings.offload.host_memory
    return free if text == "auto" else bytes_of("--offload-host-memory", text)


# ---- the plan


def planned(settings: Any, model: nn.Module, runtime: Any) -> Placement:
    """The placement that a run's settings ask for, on what was free when it began."""
    budget, muon = settings.offload.budget, settings.optim.optimizer == "muon"
    return plan(
        model,
        budget,
        muon,
        dtype=runtime.dtype,
        device_free=runtime.device_free,
        host_free=host_bytes(settings, runtime.host_free),
        world_size=runtime.world_size,
        sharded=settings.run.fsdp,
    )


def plan(
    model: nn.Module,
    budget: str,
    muon: bool,
    dtype: torch.dtype,
    device_free: int | None,
    host_free: int | None,
    world_size: int = 1,
    sharded: bool = False,
) -> Placement:
    """What of a model leaves the device, before any of it is there.

    Args:   dtype       of the arithmetic
            device_free bytes that the device can give, for a budget of auto; None if unknown
            host_free   bytes that this machine can give to all its ranks; None if unknown
            sharded     whether the ranks share each parameter (--fsdp)
    Raises: ValueError for a budget or a host that is too small
    """
    what = parts_of(model, muon), budget_bytes(budget, device_free), DTYPES[dtype]
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if sharded:
        return place_shards(*what, host_free, ranks_here, world_size)
    return place(*what, KINDS if world_size == 1 else (Away.STATE,), host_free, ranks_here)


# ---- what carries it out


class Hosted(NamedTuple):
    """A matrix of which something is away."""

    name: str
    part: Part
    away: Away
    parameter: nn.Parameter  # the model's, in the dtype that the device has it in
    master: nn.Parameter  # fp32: the optimizer's
    sent: Tensor  # what is copied to the device: the master or, in bf16, a copy of it
    gradient: Tensor  # fp32: the sum over micro-batches


class Fetched(NamedTuple):
    """A layer's weights on the device."""

    weights: list[Tensor]
    event: torch.cuda.Event | None  # when they are there


class Offloaded:
    """A model of which the device has what a placement leaves there.

    A step: `with held.collecting(last): loss.backward()` for each micro-batch, whose blocks run
    through `held.run_block`; clip the gradients of `held.parameters()`; `held.step(update)`.

    Args: model on the host; it comes to the device here, and never whole
          early gradients leave while the backward pass runs. Under DDP they cannot: they are not
                the sum over ranks before its end
    """

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, early: bool = True
    ):
        self.model, self.device, self.placement = model, torch.device(device), placement
        self.link = Link(self.device)
        self.hosted: dict[Part, list[Hosted]] = {}
        self.is_last = True  # micro-batch of a step
        self.fetched: dict[int, Fetched] = {}  # by layer
        self.move(placement)
        self.streamed = {
            layer: ones
            for part, ones in self.hosted.items()
            for layer in part.layers
            if ones[0].away == Away.WEIGHTS
        }
        for one in self.all_hosted() if early else ():
            one.parameter.register_post_accumulate_grad_hook(partial(self.ready, one))

    @torch.no_grad()
    def move(self, placement: Placement) -> None:
        """Give every tensor its place."""
        wanted: list = [(torch.Size([placement.slot_bytes]), torch.uint8)] * 2
        planned = []
        groups = grouped(self.model)
        for part, away in zip(placement.parts, placement.away, strict=True):
            dtype = torch.bfloat16 if placement.itemsize(part, away) == 2 else torch.float32
            for name, p in groups[part.name].items() if away else ():
                if p.ndim > 1:
                    planned.append((name, part, away, p, dtype))
                    wanted += [(p.shape, torch.float32)] * 2
                    if dtype != torch.float32:
                        wanted.append((p.shape, dtype))
        memory = iter(self.link.memory(wanted))
        slots = next(memory), next(memory)
        for name, part, away, p, dtype in planned:
            master, gradient = nn.Parameter(next(memory)), next(memory)
            sent = master.data if dtype == torch.float32 else next(memory)
            master.copy_(p)
            # without storage it is one NaN: run by mistake, it makes a loss that stops the run
            size = p.shape if away < Away.WEIGHTS else [1] * p.ndim
            p.data = torch.full(size, torch.nan, dtype=dtype, device=self.device).expand(p.shape)
            self.hosted.setdefault(part, []).append(
                Hosted(name, part, away, p, master, sent, gradient)
            )
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.to(self.device)
        self.landing = Landing(self.link, slots, {h.name: h.gradient for h in self.all_hosted()})
        self.send(self.all_hosted())

    def all_hosted(self) -> list[Hosted]:
        return [one for ones in self.hosted.values() for one in ones]

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizers move, by the model's names."""
        masters = {one.name: one.master for one in self.all_hosted()}
        return {name: masters.get(name, p) for name, p in self.model.named_parameters()}

    # ---- gradients come home

    @contextmanager
    def collecting(self, last: bool) -> Iterator[None]:
        """Around a backward pass; after a step's last one all gradients are home."""
        self.is_last = last
        yield
        for one in self.all_hosted():
            if one.parameter.grad is not None:
                self.ready(one, one.parameter)
        if last:
            self.landing.settle_all()
            self.give(self.all_hosted())

    def ready(self, one: Hosted, parameter: nn.Parameter) -> None:
        """Let a gradient leave, unless it has yet to grow on the device."""
        if self.is_last or one.away >= Away.GRADIENTS:
            gradient, parameter.grad = parameter.grad, None
            self.landing.begin(one.name, one.part.name, gradient)

    def give(self, ones: list[Hosted]) -> None:
        """Let the optimizer see the gradients of these, where a step had any."""
        for one in ones:
            one.master.grad = one.gradient if one.name in self.landing.arrived else None

    # ---- weights go back

    def step(self, update: Callable[[], None]) -> None:
        """Part by part: `update`, which moves what has a gradient and frees it, then copy weights.

        A part's weights are on their way while the host moves the next part's.
        """
        for one in self.all_hosted():
            one.master.grad = None
        for ones in [*self.hosted.values()] or [[]]:
            self.give(ones)
            update()
            self.send(ones)
        self.landing.arrived.clear()
        if self.streamed:  # the next forward pass begins with it
            _, event = self.fetch(min(self.streamed))
            self.link.wait(event)

    @torch.no_grad()
    def send(self, ones: list[Hosted]) -> None:
        """Copy weights to where the next forward pass takes them from."""
        for one in ones:
            if one.sent.dtype != torch.float32:
                one.sent.copy_(one.master)
        copied = [one for one in ones if one.away < Away.WEIGHTS]
        self.link.wait(self.link.copy_up((one.parameter.data, one.sent) for one in copied))
        self.fetched.clear()  # after that wait: their memory is free once copies to it have ended

    # ---- weights that are fetched

    def run_block(self, inner: Callable, recomputes: bool = False) -> Callable:
        """A `run_block`: blocks whose weights are away run with fetched ones.

        Args: inner      the run_block that runs a block on the tokens it is given
              recomputes whether `inner` runs a block once more in the backward pass; if not, this
                         one does, or else all fetched weights would wait for it in memory
        """
        if not self.streamed:
            return inner
        # A pass begins with the block that the one before it ended with, whose weights stay.
        layers = sorted(self.streamed)
        ahead = dict(zip(layers, [*layers[1:], layers[-1]], strict=True))
        behind = dict(zip(layers, [layers[0], *layers[:-1]], strict=True))

        def run_layer(layer: int, block: Callable, x: Tensor, meta: Any) -> Tensor:
            if layer not in self.streamed:
                return inner(layer, block, x, meta)
            following = ahead[layer]

            def run(x: Tensor, meta: Any) -> Tensor:
                nonlocal following
                weights = self.lent(layer, following)
                following = behind[layer]  # called once more, it is in the backward pass
                return functional_call(block, weights, (x, meta))

            if recomputes or not torch.is_grad_enabled():
                return inner(layer, run, x, meta)
            return inner(layer, partial(checkpoint, run, use_reentrant=False), x, meta)

        return run_layer

    def lent(self, layer: int, following: int) -> dict[str, Tensor]:
        """A block's weights on the device, by their names in it; the following layer's set out.

        These alone stay. Others that never ran may still be on their way, but their copies began
        earlier, so this wait is for them as well, and their memory is free then.
        """
        weights, event = self.fetch(layer)
        self.link.wait(event)
        self.fetched = {number: its for number, its in self.fetched.items() if number == following}
        self.fetch(following)
        return {
            one.name.removeprefix(f"{one.part.name}."): Lent.apply(one.parameter, weight)
            for one, weight in zip(self.streamed[layer], weights, strict=True)
        }

    def fetch(self, layer: int) -> Fetched:
        """Begin to copy a layer's weights to the device, unless they are on their way."""
        if layer not in self.fetched:
            # memory of the stream that computes, so that this is who may use it again
            sent = [one.sent for one in self.streamed[layer]]
            weights = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in sent]
            event = self.link.copy_up(zip(weights, sent, strict=True))
            self.fetched[layer] = Fetched(weights, event)
        return self.fetched[layer]

    # ---- a checkpoint

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with the fp32 weights that the optimizer moves."""
        masters = {id(one.parameter): one.master for one in self.all_hosted()}
        own = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in own.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over all weights, by the model's names; ValueError for other names."""
        own = self.state_dict()
        if own.keys() != state.keys():
            differ = ", ".join(sorted(own.keys() ^ state.keys())[:3])
            raise ValueError(f"the weights are of another model: it differs in {differ}")
        for key, tensor in own.items():
            tensor.copy_(state[key])
        self.send(self.all_hosted())


# ---- at work in a run


class Offload(Edit):
    """A placement, carried out by `Offloaded`, or by FSDP2 (support/base/sharded.py)."""

    def __init__(self, placement: Placement, sharded: bool, early: bool):
        self.placement, self.early = placement, early
        self.layers_away = placement.layers_away if sharded else ()
        self.sharded = sharded
        self.offloaded: Offloaded | None = None

    def move(self, model: "Transformer", device: torch.device) -> bool:
        if not self.sharded:
            self.offloaded = Offloaded(model, self.placement, device, self.early)
            self.streamed = self.offloaded.streamed
            model.run_block = self.offloaded.run_block(model.run_block)
        return True

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return self.offloaded.parameters() if self.offloaded else named

    def run_block(self, inner: "RunBlock", recomputes: bool) -> "RunBlock":
        return self.offloaded.run_block(inner, recomputes) if self.offloaded else inner

    def around_backward(self, last: bool) -> AbstractContextManager:
        return self.offloaded.collecting(last) if self.offloaded else nullcontext()

    def around_step(self, update: Callable[[], None]) -> None:
        if self.offloaded:
            self.offloaded.step(update)
        else:
            update()

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.offloaded.state_dict() if self.offloaded else weights


def edit(
    settings: "Config", model: "Transformer", runtime: "Runtime", state: dict | None
) -> Offload:
    """What of this model leaves the device; its gradients leave early unless ranks share them."""
    placement = planned(settings, model, runtime)
    return Offload(placement, sharded=settings.run.fsdp, early=runtime.world_size == 1)


# ---- the command


def main(argv: list[str] | None = None) -> None:
    from support.base import runtime
    from support.step import costs, machine, placement

    parser = runtime.Parser(prog="offload.py", description=__doc__.split("\n")[0])
    command = parser.add_subparsers(required=True).add_parser("plan", help="what would leave")
    costs.add_flags(command)
    command.add_argument("--dtype", choices=DTYPES.values(), default="bf16")
    placement.add_flags(command)
    args = parser.parse_args(argv)
    costs.fill_in(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = runtime.DTYPES[args.dtype]
    model, muon = costs.model_of(args), args.optimizer == "muon"
    away = plan(model, args.budget, muon, dtype, runtime.device_free(device), None)
    placement.show(args, away, machine.measured(device, dtype))


if __name__ == "__main__":
    from support.base import runtime

    runtime.exit_cleanly(main)
