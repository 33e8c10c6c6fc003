"""Granular CPU offload: move as much of a training state to the host as a byte budget demands.

From the flag to the bytes moved:

    --offload    `planned` reads the settings and what is free, `plan` the sizes of the model
    what leaves  `place` (support/step/placement.py) returns a `Placement`: for each block, how much
                 of it is away
    who moves it `Offloaded`, below, on a finished model; under --fsdp FSDP2 does
    the copies   `Link` and `Landing` (support/step/link.py)

What `Offloaded` does with each kind:

    state      The host holds fp32 weights, which the optimizer moves, and the gradients that it
               needs. The device has a copy of the weights, renewed after each step.
    gradients  The device frees each gradient as soon as it is there, in every micro-batch; the host
               adds them up in fp32. In bf16 the device's copy of the weights is bf16: autocast
               would round fp32 ones to the same numbers, and keep both.
    weights    The device has a parameter without storage. A block's weights are fetched while the
               block before it runs, and once more for the backward pass.

The optimizer gets the host's weights where state is away, and the model's elsewhere. Names and
checkpoints are those of a run without offload, and so, in fp32, is every bit.

With several ranks only optimizer state leaves, because DDP keeps the gradients. With --fsdp whole
blocks leave, a rank's rows of them.

Activations are not offloaded: use --checkpoint-activations.

Papers:   Ren et al., arXiv 2101.06840 (ZeRO-Offload): all optimizer state and the step on the host;
          Lin et al., arXiv 2110.03888: granular CPU offloading, only part of it
Deviates: the order of leaving is ours; 2110.03888 came without code

    python offload.py plan --size 1.3B --budget 8GiB --dtype bf16 --link 25e9 --flops 140e12
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.base.numbers import bytes_of
from support.base.settings import flag
from support.base.technique import Edit
from support.step.link import Landing, Lent, Link
from support.step.placement import KINDS, Away, Part, Placement, grouped, parts_of, place

if TYPE_CHECKING:
    from config import Config
    from model import RunBlock, TokenMeta, Transformer
    from support.base.runtime import Runtime

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class OffloadConfig:
    on: bool = flag(False, "move what exceeds --offload-budget to CPU memory", free=True)
    budget: str = flag(
        "auto",
        "device memory for weights, gradients, optimizer state: 6GiB, 800MB; auto: half of what is"
        " free",
        free=True,
    )
    host_memory: str = flag(
        "auto",
        "host memory for all ranks of a machine: 100GiB; auto: what is free",
        free=True,
    )


def refusals(settings: "Config") -> list[tuple[bool, str]]:
    budget_bytes(settings.offload.budget, free=0)  # raises for anything but bytes or auto
    host_bytes(settings, free=0)
    return []


# ---- from the flags to a placement


def budget_bytes(text: str, free: int | None = None) -> int:
    """What 6GiB, 800MB or auto means.

    Args:    free bytes of the device; auto takes half and leaves the rest to activations
    Raises:  ValueError for anything else
    Example: budget_bytes("1.5KiB") == 1536, budget_bytes("auto", 3000) == 1500
    """
    if text != "auto":
        return bytes_of("--offload-budget", text)
    if free is None:
        raise ValueError("--offload-budget auto: the free memory is not known: give bytes")
    return free // 2


def host_bytes(settings: "Config", free: int | None) -> int | None:
    """What a run may take of this machine's memory; None if unknown."""
    text = settings.offload.host_memory
    return free if text == "auto" else bytes_of("--offload-host-memory", text)


def planned(settings: "Config", model: nn.Module, runtime: "Runtime") -> Placement:
    """The placement that a run's settings ask for, by what was free when it began."""
    return plan(
        model,
        settings.offload.budget,
        settings.optim.optimizer == "muon",
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
    """Decide what of a model leaves the device, before any of it is there.

    Args:   dtype       of the arithmetic
            device_free bytes that the device can give, for a budget of auto; None if unknown
            host_free   bytes that this machine can give to all its ranks; None if unknown
            sharded     whether the ranks share each parameter (--fsdp)
    Raises: ValueError for a budget or a host that is too small
    """
    return place(
        parts_of(model, muon),
        budget_bytes(budget, device_free),
        DTYPES[dtype],
        kinds=KINDS if world_size == 1 else (Away.STATE,),
        host_bytes=host_free,
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        shards=world_size if sharded else None,
    )


# ---- the placement carried out


class HostMatrix(NamedTuple):
    """A matrix that is at least partly on the host."""

    name: str
    part: Part
    away: Away
    parameter: nn.Parameter  # the model's, in the device's dtype
    master: nn.Parameter  # fp32: the optimizer's
    sent: Tensor  # what is copied to the device: the master or, in bf16, a copy of it
    gradient: Tensor  # fp32: the sum over micro-batches


class Fetched(NamedTuple):
    """A layer's weights on the device."""

    weights: list[Tensor]
    event: torch.cuda.Event | None  # when they are there


class Offloaded:
    """A model whose placement is carried out.

    A step: `with offloaded.collecting(last): loss.backward()` for each micro-batch, whose blocks
    run through `offloaded.run_block`; clip the gradients of `offloaded.parameters()`;
    `offloaded.step(update)`.

    Args: model on the host; what stays comes to the device here, the whole never does
          early gradients leave during the backward pass. Under DDP they cannot: only at its end
                are they summed over ranks
    """

    def __init__(
        self, model: nn.Module, placement: Placement, device: torch.device, early: bool = True
    ):
        self.model, self.placement = model, placement
        self.device = torch.device(device)
        self.link = Link(self.device)
        self.hosted: dict[Part, list[HostMatrix]] = {}
        self.is_last = True  # micro-batch of a step
        self.fetched: dict[int, Fetched] = {}  # by layer
        self.move()
        self.streamed = {  # by layer: the matrices of blocks whose weights are away
            layer: matrices
            for part, matrices in self.hosted.items()
            for layer in part.layers
            if matrices[0].away == Away.WEIGHTS
        }
        for matrix in self.matrices() if early else ():
            leave = partial(self.gradient_ready, matrix)
            matrix.parameter.register_post_accumulate_grad_hook(leave)

    @torch.no_grad()
    def move(self) -> None:
        """Give every tensor its place."""
        groups = grouped(self.model)
        leaving = [
            (part, away, name, parameter)
            for part, away in self.placement.pairs
            for name, parameter in groups[part.name].items()
            if away and parameter.ndim > 1
        ]
        slot = torch.Size([self.placement.slot_bytes]), torch.uint8
        wanted = {("slot", 0): slot, ("slot", 1): slot}
        for part, away, name, parameter in leaving:
            wanted[name, "master"] = wanted[name, "gradient"] = parameter.shape, torch.float32
            if self.dtype_of(part, away) != torch.float32:
                wanted[name, "sent"] = parameter.shape, self.dtype_of(part, away)
        memory = self.link.memory(wanted)
        for part, away, name, parameter in leaving:
            dtype, shape = self.dtype_of(part, away), parameter.shape
            master = nn.Parameter(memory[name, "master"].copy_(parameter))
            matrix = HostMatrix(
                name=name,
                part=part,
                away=away,
                parameter=parameter,
                master=master,
                sent=memory.get((name, "sent"), master.data),
                gradient=memory[name, "gradient"],
            )
            self.hosted.setdefault(part, []).append(matrix)
            # without storage it is one NaN: run by mistake, it makes a loss that stops the run
            stored = shape if away < Away.WEIGHTS else [1] * len(shape)
            placeholder = torch.full(stored, torch.nan, dtype=dtype, device=self.device)
            parameter.data = placeholder.expand(shape)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = tensor.data.to(self.device)
        sums = {matrix.name: matrix.gradient for matrix in self.matrices()}
        self.landing = Landing(self.link, (memory["slot", 0], memory["slot", 1]), sums)
        self.send(self.matrices())

    def dtype_of(self, part: Part, away: Away) -> torch.dtype:
        return torch.bfloat16 if self.placement.itemsize(part, away) == 2 else torch.float32

    def matrices(self) -> list[HostMatrix]:
        return [matrix for matrices in self.hosted.values() for matrix in matrices]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The tensors for the optimizers, by the model's names."""
        masters = {matrix.name: matrix.master for matrix in self.matrices()}
        return {name: masters.get(name, p) for name, p in self.model.named_parameters()}

    # ---- gradients come home

    @contextmanager
    def collecting(self, last: bool) -> Iterator[None]:
        """Around a backward pass; after the last one of a step all gradients are home."""
        self.is_last = last
        yield
        for matrix in self.matrices():
            if matrix.parameter.grad is not None:
                self.gradient_ready(matrix, matrix.parameter)
        if last:
            self.landing.settle_all()
            self.give(self.matrices())

    def gradient_ready(self, matrix: HostMatrix, parameter: nn.Parameter) -> None:
        """Let a gradient leave, unless it is still to grow on the device."""
        if self.is_last or matrix.away >= Away.GRADIENTS:
            gradient, parameter.grad = parameter.grad, None
            self.landing.begin(matrix.name, matrix.part.name, gradient)

    def give(self, matrices: list[HostMatrix]) -> None:
        """Hand the gradients of this step, if there are any, to the optimizer."""
        for matrix in matrices:
            has_arrived = matrix.name in self.landing.arrived
            matrix.master.grad = matrix.gradient if has_arrived else None

    # ---- weights go back

    def step(self, update: Callable[[], None]) -> None:
        """Move what stays on the device, then part by part what is on the host.

        A part's new weights travel to the device while the host moves the next part. Gradients
        were clipped in place, so what is taken from the optimizers here is given back clipped.

        Args: update moves every tensor that has a gradient, and frees the gradient
        """
        for matrix in self.matrices():
            matrix.master.grad = None
        update()
        for matrices in self.hosted.values():
            self.give(matrices)
            update()
            self.send(matrices)
        self.landing.arrived.clear()
        if self.streamed:  # the next forward pass begins with it
            _, event = self.fetch(min(self.streamed))
            self.link.wait(event)

    @torch.no_grad()
    def send(self, matrices: list[HostMatrix]) -> None:
        """Copy weights to where the next forward pass takes them from."""
        for matrix in matrices:
            if matrix.sent.dtype != torch.float32:
                matrix.sent.copy_(matrix.master)
        copied = [matrix for matrix in matrices if matrix.away < Away.WEIGHTS]
        self.link.wait(self.link.copy_up((m.parameter.data, m.sent) for m in copied))
        self.fetched.clear()  # after that wait: copies into their memory have ended

    # ---- weights are fetched

    def run_block(self, inner: Callable, recomputes: bool = False) -> Callable:
        """A `run_block` that gives blocks their weights for as long as they run.

        Args: inner      the run_block that runs a block on the tokens it is given
              recomputes whether `inner` runs a block again in the backward pass; if not, this one
                         does, since otherwise all fetched weights would stay until then
        """
        if not self.streamed:
            return inner

        def run_layer(layer: int, block: Callable, x: Tensor, meta: "TokenMeta") -> Tensor:
            if layer not in self.streamed:
                return inner(layer, block, x, meta)
            is_forward = True

            def run(x: Tensor, meta: "TokenMeta") -> Tensor:
                nonlocal is_forward
                weights = self.lent(layer, self.following(layer, is_forward))
                is_forward = False  # the second call is in the backward pass
                return functional_call(block, weights, (x, meta))

            if recomputes or not torch.is_grad_enabled():
                return inner(layer, run, x, meta)
            return inner(layer, partial(checkpoint, run, use_reentrant=False), x, meta)

        return run_layer

    def following(self, layer: int, is_forward: bool) -> int:
        """The fetched layer that runs next.

        Example: of layers 0, 1 and 3 the forward pass runs 0 1 3, the backward pass 3 1 0, and so
                 on. 0 is followed by 1, 1 by 3, and 3 by itself; then 3 by 1, 1 by 0, and 0 by
                 itself. Weights that run twice in a row stay
        """
        layers = sorted(self.streamed)
        number = layers.index(layer) + (1 if is_forward else -1)
        return layers[min(max(number, 0), len(layers) - 1)]

    def lent(self, layer: int, following: int) -> dict[str, Tensor]:
        """A block's weights on the device, by their names in it; the following layer's set out.

        Only these two layers keep their weights. Others that were fetched and never ran may still
        be on their way, but their copies began earlier: this wait covers them too.
        """
        weights, event = self.fetch(layer)
        self.link.wait(event)
        self.fetched = {n: fetched for n, fetched in self.fetched.items() if n == following}
        self.fetch(following)
        return {
            matrix.name.removeprefix(f"{matrix.part.name}."): Lent.apply(matrix.parameter, weight)
            for matrix, weight in zip(self.streamed[layer], weights, strict=True)
        }

    def fetch(self, layer: int) -> Fetched:
        """Begin to copy a layer's weights to the device, unless they are on their way."""
        if layer not in self.fetched:
            # memory of the computing stream, which is the one that may use it again
            sent = [matrix.sent for matrix in self.streamed[layer]]
            weights = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in sent]
            event = self.link.copy_up(zip(weights, sent, strict=True))
            self.fetched[layer] = Fetched(weights, event)
        return self.fetched[layer]

    # ---- a checkpoint

    def state_dict(self) -> dict[str, Tensor]:
        """The model's, with the fp32 weights that the optimizer moves."""
        masters = {id(matrix.parameter): matrix.master for matrix in self.matrices()}
        tensors = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over all weights, by the model's names; ValueError for other names."""
        weights = self.state_dict()
        if weights.keys() != state.keys():
            differ = ", ".join(sorted(weights.keys() ^ state.keys())[:3])
            raise ValueError(f"the weights are of another model: it differs in {differ}")
        for key, tensor in weights.items():
            tensor.copy_(state[key])
        self.send(self.matrices())


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
    from support.base.numbers import amount, count
    from support.step import costs, machine, placement

    parser = runtime.Parser(prog="offload.py", description=__doc__.split("\n")[0])
    command = parser.add_subparsers(required=True).add_parser("plan", help="what would leave")
    costs.add_flags(command)
    command.add_argument("--dtype", choices=runtime.DTYPES, default="bf16")
    command.add_argument("--budget", required=True, help="device memory: 6GiB, 800MB, auto")
    command.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    command.add_argument("--micro-batch-tokens", type=count, help="at once (default: a row)")
    command.add_argument("--link", type=amount, help="bytes/s to the device (default: measured)")
    command.add_argument("--flops", type=amount, help="FLOP/s on the device (default: measured)")
    args = parser.parse_args(argv)
    costs.fill_in(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = runtime.DTYPES[args.dtype]
    model = costs.model_of(args)
    free = runtime.device_free(device)
    planned = plan(model, args.budget, args.optimizer == "muon", dtype, free, host_free=None)
    rates = machine.measured(device, dtype)
    rates = rates._replace(link=args.link or rates.link, flops=args.flops or rates.flops)
    tokens = args.micro_batch_tokens or args.seq_len
    micro_batches = -(-args.batch_tokens // tokens)
    print(placement.describe(planned, tokens, micro_batches, rates))


if __name__ == "__main__":
    from support.base import runtime

    runtime.exit_cleanly(main)
