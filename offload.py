"""Granular CPU offload: move as much of a training state to the host as a byte budget demands.

It acts where `settings.offload.on` stands, and where train.py asks for the `Offload` made there:

    train.py    go             `in_words`: what will be where, or why that cannot be
                assemble       `Offload.move`, before the optimizers get the masters
                block_runner   `wrap_block`, for each micro-batch
                backward       `around_backward`
                train_step     `Offload.step`: clipped gradients become new weights
                state          `weights`, for checkpoints

From the flag to the bytes, stop by stop; all functions are in this file unless one is named. In the
example, the command at the foot, six layers of width 128 train in fp32 with Muon, in two
micro-batches of 2,048 tokens a step. Each of the blocks h.0 to h.5 has 196,608 weights in matrices.
These are 768 KiB, and so are their gradients and their optimizer state. A device that holds
everything needs 25.84 MiB.

1. The flag. `--offload --offload-budget 25.5MiB` becomes an `OffloadConfig`. train.py asks
   `placement_for` what that means: in `go`, before the model takes memory, and in `assemble`.
2. Parts and sizes. `parts_of` divides the model into its blocks and all outside them. Matrices may
   leave; norms and biases stay.
3. The order of leaving. Optimizer state, 8 bytes a parameter with AdamW and 4 with Muon, leaves
   first, because a step touches it once; then gradients, which are copied once a micro-batch; then
   weights, which are copied twice. Each leaves block by block from the middle outwards, so that the
   first and last blocks give the copies time; embeddings and heads follow after all blocks, and
   their weights never leave. `place` goes on until the rest fits:
       25.5 MiB    the state of h.2 leaves; 25.09 MiB stay
       18 MiB      all blocks' state and gradients, and the weights of h.1, h.2, h.3; 17.59 MiB stay
4. What is created: `Offload.move`. For each matrix of which anything is offloaded the host gets an
   fp32 master, which the optimizer updates, and an fp32 gradient, both page-locked (`Link.memory`).
   With the optimizer's state these are 2.25 MiB for h.2, at either budget. Gradients land in two
   slots of 768 KiB. On the device h.2 is a copy of its masters at 25.5 MiB; at 18 MiB its
   parameters have no storage.
5. A step: `Trainer.backward` and `Trainer.train_step` in train.py call these methods.
   forward     `wrap_block` begins to copy a block's weights (`Link.copy`) when the block fetched
               before it begins to run; the device waits for them, the host does not. At 18 MiB:
               h.1, h.2, h.3
   backward    the same in the other direction. Only weights that run twice in a row stay
   gradients   each calls `gradient_ready` (a hook, without DDP) as it is complete, which sends it
               to the host; `Landing` adds up those of several micro-batches there, and the host
               waits for a part's when their slot is needed again. At 25.5 MiB the device adds up
               h.2's gradients, and they leave once a step; at 18 MiB every micro-batch sends those
               of all blocks
   update      `Optimizers.clip_gradients` (support/optim.py), then `Offload.step`: first what is on
               the device, then the masters, part by part
   weights     `send` copies a part's new weights to the device while the host updates the next
               part; at 18 MiB h.1 is fetched at the end of the step, h.2 and h.3 as the next
               forward pass comes to them
   In bytes: at 25.5 MiB 768 KiB each way. At 18 MiB 9 MiB to the host, for 2 x 6 blocks'
   gradients, and 9 MiB to the device: h.0, h.4, h.5 once, h.1 three times, h.2 four times, h.3
   twice. Not counted: Muon on a GPU orthogonalises there, for which 4 bytes a parameter go to the
   device in a step and 2 come back; the host waits for these.
6. A checkpoint has the masters, under the model's names (`Offload.weights`), and so it is that of a
   run without offload: names, and in fp32 every bit.

In bf16 the device's copy of the weights is bf16 once gradients are offloaded: autocast would round
fp32 ones to the same numbers, and keep both.

With several ranks only optimizer state leaves, because DDP keeps the gradients. --fsdp is refused.
Activations are not offloaded: use --checkpoint-activations.

Papers:   Ren et al., arXiv 2101.06840 (ZeRO-Offload): all optimizer state and the step on the host;
          Lin et al., arXiv 2110.03888: granular CPU offloading, only part of it
Deviates: the order of leaving is ours; 2110.03888 came without code

    python train.py --layers 6 --tied --dtype fp32 --micro-batch-size 8 --offload \\
        --offload-budget 25.5MiB
"""

import math
import os
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.optim import Optimizers, state_bytes
from support.runtime import DTYPES, Runtime
from support.settings import bytes_of, flag

if TYPE_CHECKING:
    from model import Block, BlockRunner, TokenMeta, Transformer

MIB = 2**20
Name = TypeVar("Name", bound=Hashable)
Fetched = tuple[list[Tensor], torch.cuda.Event | None]  # weights, complete after the event


@dataclass(frozen=True)
class OffloadConfig:
    on: bool = flag(False, "move what exceeds --offload-budget to CPU memory", free=True)
    budget: str = flag(
        "auto", "memory for weights, gradients, state: 6GiB; auto: half of what is free", free=True
    )


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


# ---- what there is, and its bytes


class Offloaded(IntEnum):
    """What of a part is on the host; each includes those before it."""

    NOTHING = 0
    STATE = 1  # and the fp32 weights, of which the device then has a copy
    GRADIENTS = 2
    WEIGHTS = 3


class Part(NamedTuple):
    """Tensors that leave together: those of a block, or all outside the blocks."""

    name: str  # h.3, or outside
    layers: tuple[int, ...]  # that run the block; () outside
    numel: int  # parameters of its matrices, which may leave
    state_bytes: int  # of the matrices' optimizer
    small: int  # parameters of norms and biases, which stay
    embedding: int = 0  # parameters of the tokens' embedding
    tied: bool = False  # whether it is the head too
    offloaded: Offloaded = Offloaded.NOTHING  # what of its matrices is on the host

    def itemsize(self, dtype: str) -> int:
        """Bytes of one of the device's weights, and of its gradient."""
        is_half = dtype == "bf16" and self.layers and self.offloaded >= Offloaded.GRADIENTS
        return 2 if is_half else 4

    def on_device(self, dtype: str) -> int:
        """Bytes that stay on the device: matrices, and norms and biases with AdamW's state.

        Autocast keeps a copy of 2 bytes of each fp32 weight of a block until the backward pass;
        that of the embeddings belongs to the loss, and is gone by then.
        """
        weight, cast = self.itemsize(dtype), 2 if dtype == "bf16" and self.layers else 0
        # weight, gradient and cast of each parameter, by what is offloaded
        each = (4 + 4 + cast, 4 + 4 + cast, weight, 0)[self.offloaded]
        if self.offloaded >= Offloaded.GRADIENTS and len(self.layers) > 1:
            each += weight  # layers that share a block add up gradients here
        state = 0 if self.offloaded else self.state_bytes
        return self.numel * each + state + self.small * (4 + 4 + cast + 8)

    def on_host(self, dtype: str) -> int:
        """fp32 weights and gradients, optimizer state, and a bf16 copy of weights to send."""
        copy = 2 if self.itemsize(dtype) == 2 else 0
        return self.numel * (8 + copy) + self.state_bytes if self.offloaded else 0


class Placement(NamedTuple):
    """Every part with what of it is offloaded, and what that was decided by."""

    parts: tuple[Part, ...]
    dtype: str  # of the arithmetic: fp32 | bf16
    budget: int  # bytes on the device


def device_bytes(placement: Placement) -> int:
    """What stays, and what comes and goes in a step.

    Two blocks' gradients and two blocks' weights are on their way at a time. The tied embedding
    has a gradient as the head, which waits for the end of the backward pass, and one as the input,
    both beside the sum of earlier micro-batches; a head of its own is done with before.
    Not counted are activations, and what an optimizer needs during its step.
    """
    parts, dtype = placement.parts, placement.dtype
    blocks = [part for part in parts if part.layers and part.offloaded >= Offloaded.GRADIENTS]
    copies = [part.numel * part.itemsize(dtype) for part in blocks]
    fetched = [n for n, p in zip(copies, blocks, strict=True) if p.offloaded == Offloaded.WEIGHTS]
    passing = 2 * max(copies, default=0) + 2 * max(fetched, default=0)
    for part in parts:
        both = part.tied or part.offloaded >= Offloaded.GRADIENTS
        passing += 4 * part.embedding * (2 if both else 1)
    return sum(part.on_device(dtype) for part in parts) + passing


def slot_bytes(placement: Placement) -> int:
    """Host memory where the gradients of any part can land."""
    dtype = placement.dtype
    return max((p.numel * p.itemsize(dtype) for p in placement.parts if p.offloaded), default=0)


def host_bytes(placement: Placement) -> int:
    parts = sum(part.on_host(placement.dtype) for part in placement.parts)
    return parts + 2 * slot_bytes(placement)


def grouped(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """A model's parameters by part and name; a block that layers share appears once.

    Example: h.3.mlp.c_fc.weight belongs to h.3, wte.weight to "outside"
    """
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"
        parts.setdefault(part, {})[name] = parameter
    return parts


def parts_of(model: "Transformer", muon: bool) -> tuple[Part, ...]:
    """The sizes of a model, which may be on the meta device.

    Args: muon whether Muon updates the blocks' matrices
    """
    parts = []
    for name, parameters in grouped(model).items():
        block = model.h[int(name[2:])] if name != "outside" else None
        matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
        numel = sum(p.numel() for p in matrices.values())
        part = Part(
            name=name,
            layers=tuple(layer for layer, other in enumerate(model.h) if other is block),
            numel=numel,
            state_bytes=state_bytes(matrices, muon)["optimizer"],
            small=sum(p.numel() for p in parameters.values()) - numel,
            embedding=0 if block else model.wte.weight.numel(),
            tied=not block and model.config.tied,
        )
        parts.append(part)
    return tuple(parts)


# ---- the decision


def order_of_leaving(parts: tuple[Part, ...]) -> list[tuple[int, Offloaded]]:
    """The order of leaving, as (number of the part, what of it is offloaded then).

    Example: the outside (part 0) and three blocks: parts 2 1 3 with STATE, with GRADIENTS, with
             WEIGHTS, then 0 with STATE, with GRADIENTS
    """
    blocks = [i for i, part in enumerate(parts) if part.layers]
    outside = [i for i, part in enumerate(parts) if not part.layers]
    middle = (len(blocks) - 1) / 2
    outwards = [blocks[i] for i in sorted(range(len(blocks)), key=lambda i: (abs(i - middle), i))]
    _, *kinds = Offloaded
    order = [(i, kind) for kind in kinds for i in outwards]
    return order + [(i, kind) for kind in kinds[:-1] for i in outside]


def place(
    parts: tuple[Part, ...], budget: int, dtype: str, most: Offloaded = Offloaded.WEIGHTS
) -> Placement:
    """Send to the host, in the order of leaving, until the device has room for the rest.

    Nothing comes back: a block that left before the outside did stays on the host, even if there is
    room for it then.

    Args:    budget bytes on the device
             most   what may leave
    Raises:  ValueError for a budget that is too small, naming the smallest that works
    Cost:    for L blocks, L^2 sums
    """
    options, placed = [Placement(parts, dtype, budget)], list(parts)
    for number, kind in order_of_leaving(parts):
        if kind <= most:
            placed[number] = parts[number]._replace(offloaded=kind)
            options.append(Placement(tuple(placed), dtype, budget))
    for placement in options:
        if device_bytes(placement) <= budget:
            return placement
    few = "" if most == Offloaded.WEIGHTS else "with several ranks only optimizer state leaves; "
    raise ValueError(
        f"--offload-budget {shown(budget)} is too small: {few}the smallest that works is"
        f" {math.ceil(min(map(device_bytes, options)) / MIB)}MiB, for what stays and two blocks as"
        " they pass through"
    )


def placement_for(
    config: OffloadConfig, model: "Transformer", runtime: Runtime, *, muon: bool, fsdp: bool
) -> Placement:
    """Decide what of a model leaves the device, by what was free when the run began.

    Args:   model may be on the meta device
            muon  whether Muon updates the blocks' matrices
    Raises: ValueError for a budget that is no amount of bytes or too small, and for --fsdp
    """
    if fsdp:
        raise ValueError("--fsdp spreads weights, gradients and state: leave out --offload")
    budget = budget_bytes(config.budget, runtime.device_free)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == runtime.dtype)
    most = Offloaded.WEIGHTS if runtime.world_size == 1 else Offloaded.STATE
    return place(parts_of(model, muon), budget, dtype, most)


def shown(count: float) -> str:
    """Example: 1.50 GiB"""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def in_words(placement: Placement, host_free: int | None = None) -> str:
    """What is where; a host with too little memory free is only warned of, as it may grow on use.

    Args:    host_free bytes of this machine, which all its ranks share
    Example: --offload: outside to h.1: nothing on the host; h.2: state on the host; h.3 to h.5:
             nothing on the host; 25.09 MiB of 25.50 MiB on the device, 3.75 MiB on the host
    """
    said = []
    what = ("nothing", "state", "state and gradients", "state, gradients and weights")
    for offloaded, alike in groupby(placement.parts, key=lambda part: part.offloaded):
        first, *others = [part.name for part in alike]
        span = f"{first} to {others[-1]}" if others else first
        said.append(f"{span}: {what[offloaded]} on the host")
    device = f"{shown(device_bytes(placement))} of {shown(placement.budget)} on the device"
    ranks, host = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), host_bytes(placement)
    said.append(f"{device}, {shown(host)} on the host")
    if host_free is not None and host * ranks > host_free:
        said.append(f"WARNING: of its memory only {shown(host_free)} are free")
    return f"--offload: {'; '.join(said)}"


# ---- the placement carried out


class HostMatrix(NamedTuple):
    """A matrix that is at least partly on the host."""

    name: str
    part: Part
    parameter: nn.Parameter  # the model's, in the device's dtype
    master: nn.Parameter  # fp32: the optimizer's
    source: Tensor  # what is copied to the device: the master or, in bf16, a copy of it
    gradient: Tensor  # fp32: the sum over micro-batches


class Offload:
    """A placement, carried out on one model (`move`); the head of this file walks through a step.

    Args: early gradients leave during the backward pass. Under DDP they cannot: only at its end
                are they summed over ranks
    """

    def __init__(self, placement: Placement, early: bool = True):
        self.placement, self.early = placement, early
        self.hosted: dict[Part, list[HostMatrix]] = {}
        self.streamed: dict[int, list[HostMatrix]] = {}  # by layer, if its weights are offloaded
        self.fetched: dict[int, Fetched] = {}  # by layer, those on the device
        self.running: dict[int, dict[str, Tensor]] = {}  # weights of the layer that runs, by name
        self.is_last = True  # micro-batch of a step

    @torch.no_grad()
    def move(self, model: "Transformer", device: torch.device) -> None:
        """Put every tensor of a model where it belongs; the whole never comes to the device."""
        self.model, self.device, self.link = model, torch.device(device), Link(device)
        groups = grouped(model)
        leaving = [
            (part, name, parameter)
            for part in self.placement.parts
            for name, parameter in groups[part.name].items()
            if part.offloaded and parameter.ndim > 1
        ]
        slot = torch.Size([slot_bytes(self.placement)]), torch.uint8
        wanted = {("slot", 0): slot, ("slot", 1): slot}
        for part, name, parameter in leaving:
            wanted[name, "master"] = wanted[name, "gradient"] = parameter.shape, torch.float32
            if part.itemsize(self.placement.dtype) == 2:
                wanted[name, "source"] = parameter.shape, torch.bfloat16
        memory = self.link.memory(wanted)
        for part, name, parameter in leaving:
            master = nn.Parameter(memory[name, "master"].copy_(parameter))
            matrix = HostMatrix(
                name=name,
                part=part,
                parameter=parameter,
                master=master,
                source=memory.get((name, "source"), master.data),
                gradient=memory[name, "gradient"],
            )
            self.hosted.setdefault(part, []).append(matrix)
            # without storage it is one NaN: run by mistake, it makes a loss that stops the run
            is_streamed, shape = part.offloaded == Offloaded.WEIGHTS, parameter.shape
            stored = [1] * len(shape) if is_streamed else shape
            placeholder = torch.full(stored, torch.nan, dtype=matrix.source.dtype, device=device)
            parameter.data = placeholder.expand(shape)
            if self.early:
                leave = partial(self.gradient_ready, matrix)
                parameter.register_post_accumulate_grad_hook(leave)
            if is_streamed:
                self.streamed |= dict.fromkeys(part.layers, self.hosted[part])
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(device)
        sums = {matrix.name: matrix.gradient for matrix in self.matrices()}
        self.landing = Landing(self.link, (memory["slot", 0], memory["slot", 1]), sums)
        self.send(self.matrices())
        model.run_block = self.wrap_block(model.run_block)  # of evaluations

    def matrices(self) -> list[HostMatrix]:
        return [matrix for matrices in self.hosted.values() for matrix in matrices]

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """What the optimizers update: masters in place of what is offloaded."""
        return named | {matrix.name: matrix.master for matrix in self.matrices()}

    def weights(self) -> dict[str, Tensor]:
        """The model's, with fp32 masters; a block that layers share has a key for each of them."""
        masters = {id(matrix.parameter): matrix.master for matrix in self.matrices()}
        tensors = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in tensors.items()}

    # ---- weights are fetched

    def wrap_block(self, inner: "BlockRunner") -> "BlockRunner":
        """Give blocks their weights for as long as they run.

        A block whose weights are fetched runs again in the backward pass, since otherwise all
        fetched weights would stay until then.

        Args: inner runs the other blocks
        """

        def run_block(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
            if layer not in self.streamed:
                return inner(layer, block, x, meta)

            def run(x: Tensor, meta: "TokenMeta") -> Tensor:
                return functional_call(block, self.running[layer], (x, meta))

            forward = self.fetching(layer, then=self.following(layer, 1))
            if not torch.is_grad_enabled():
                with forward:
                    return run(x, meta)
            recompute = self.fetching(layer, then=self.following(layer, -1))
            passes = forward, recompute
            return checkpoint(run, x, meta, use_reentrant=False, context_fn=lambda: passes)

        return run_block if self.streamed else inner

    def following(self, layer: int, direction: int) -> int:
        """The fetched layer that runs next: forward in direction 1, backward in -1.

        Example: of layers 0, 1 and 3 the forward pass runs 0 1 3, the backward pass 3 1 0, and so
                 on. 0 is followed by 1, 1 by 3, and 3 by itself; then 3 by 1, 1 by 0, and 0 by
                 itself. Weights that run twice in a row stay
        """
        layers = sorted(self.streamed)
        number = layers.index(layer) + direction
        return layers[min(max(number, 0), len(layers) - 1)]

    @contextmanager
    def fetching(self, layer: int, then: int) -> Iterator[None]:
        """A block's weights on the device while it runs; those of the layer `then` set out.

        Only these two layers keep their weights. Others that were fetched and never ran may still
        be on their way, but their copies began earlier: this wait covers them too.
        """
        weights, event = self.fetch(layer)
        self.link.wait(event)
        self.fetched = {n: fetched for n, fetched in self.fetched.items() if n == then}
        self.fetch(then)
        local = self.running[layer] = {}
        for matrix, weight in zip(self.streamed[layer], weights, strict=True):
            name = matrix.name.removeprefix(f"{matrix.part.name}.")
            local[name] = LocalWeight.apply(matrix.parameter, weight)
        del weights, weight, local
        try:
            yield
        finally:
            del self.running[layer]

    def fetch(self, layer: int) -> Fetched:
        """Begin to copy a layer's weights to the device, unless they are on their way."""
        if layer not in self.fetched:
            # memory of the computing stream, which is the one that may use it again
            sources = [matrix.source for matrix in self.streamed[layer]]
            targets = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in sources]
            event = self.link.copy(self.link.up, zip(targets, sources, strict=True))
            self.fetched[layer] = targets, event
        return self.fetched[layer]

    # ---- gradients land

    @contextmanager
    def around_backward(self, last: bool) -> Iterator[None]:
        """After the last backward pass of a step all gradients are on the host."""
        self.is_last = last
        yield
        for matrix in self.matrices():
            if matrix.parameter.grad is not None:
                self.gradient_ready(matrix, matrix.parameter)
        if last:
            for slot in (1 - self.landing.slot, self.landing.slot):
                self.landing.settle(slot)
            for matrix in self.matrices():
                has_landed = matrix.name in self.landing.landed
                matrix.master.grad = matrix.gradient if has_landed else None
            self.landing.landed.clear()

    def gradient_ready(self, matrix: HostMatrix, parameter: nn.Parameter) -> None:
        """Let a gradient leave, unless it is still to grow on the device."""
        if self.is_last or matrix.part.offloaded >= Offloaded.GRADIENTS:
            gradient, parameter.grad = parameter.grad, None
            self.landing.begin(matrix.name, matrix.part.name, gradient)

    # ---- the update, and weights go back

    def step(self, optimizers: Optimizers, lr: float) -> None:
        """Update what is on the device, then part by part what is on the host.

        A part's new weights travel to the device while the host updates the next part.
        """
        masters = {matrix.master for matrix in self.matrices()}
        optimizers.step(lr, only=set(optimizers.parameters) - masters)
        for matrices in self.hosted.values():
            optimizers.step(lr, only={matrix.master for matrix in matrices})
            self.send(matrices)
        if self.streamed:  # the next forward pass begins with it
            _, event = self.fetch(min(self.streamed))
            self.link.wait(event)

    @torch.no_grad()
    def send(self, matrices: list[HostMatrix]) -> None:
        """Copy weights to where the next forward pass takes them from."""
        for matrix in matrices:
            if matrix.source.dtype != torch.float32:
                matrix.source.copy_(matrix.master)
        local = [matrix for matrix in matrices if matrix.part.offloaded < Offloaded.WEIGHTS]
        pairs = [(matrix.parameter.data, matrix.source) for matrix in local]
        self.link.wait(self.link.copy(self.link.up, pairs))
        self.fetched.clear()  # after that wait: copies into their memory have ended


class LocalWeight(torch.autograd.Function):
    """A fetched weight, whose gradient goes to the parameter that it stands for."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Landing:
    """Gradients on their way to the host, which adds up those of several micro-batches.

    There are two slots. While the gradients of one part are copied into one slot, those in the
    other are added to their sums. So the device has to keep the gradients of two parts at most.

    Example: parts b and a, two gradients each, arrive as b1 b2 a1 a2 in a backward pass. b1, b2
             land in one slot. a1 settles the other slot, which is empty, and lands there with a2.
             b1 of the next micro-batch settles the first slot: it waits for b1, b2 and adds them up

    Args: slots memory of the host, each with room for the gradients of any part
          sums  where gradients are added up, by name
    """

    def __init__(self, link: "Link", slots: tuple[Tensor, Tensor], sums: dict[str, Tensor]):
        self.link, self.slots, self.sums = link, slots, sums
        # of each slot, by name: the gradient on the device, which its copy needs, and the copy
        self.copies: tuple[dict[str, tuple[Tensor, Tensor]], ...] = ({}, {})
        self.last: list[torch.cuda.Event | None] = [None, None]  # copies end as they begin
        self.slot, self.part = 0, ""  # where gradients land now, and whose
        self.landed: set[str] = set()  # names of the sums that have begun

    def begin(self, name: str, part: str, gradient: Tensor) -> None:
        """Begin to copy a gradient of a part; the caller must let go of it."""
        if part != self.part or name in self.copies[self.slot]:
            self.slot, self.part = 1 - self.slot, part
            self.settle(self.slot)
        copies = self.copies[self.slot]
        used = sum(copy.nbytes for _, copy in copies.values())
        copy = shaped(self.slots[self.slot][used:], gradient.shape, gradient.dtype)
        copies[name] = gradient, copy
        self.last[self.slot] = self.link.copy(self.link.down, [(copy, gradient)])

    def settle(self, slot: int) -> None:
        """Wait until the gradients of a slot have landed, and add them to their sums."""
        if self.copies[slot] and self.last[slot]:
            self.last[slot].synchronize()
        for name, (_, copy) in self.copies[slot].items():
            if name in self.landed:
                self.sums[name].add_(copy)
            else:
                self.sums[name].copy_(copy)
            self.landed.add(name)
        self.copies[slot].clear()


# ---- copies between the device and page-locked memory of the host


class Link:
    """Both directions between the host and one device; `up` is to the device.

    A GPU copies on two streams, one for each direction, while it computes. Memory that is copied
    stays allocated until the copy is done, however late a stream is. On other devices the same
    calls copy at once.
    """

    PIECE = 2**30  # bytes that are page-locked together

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if is_cuda else None
        self.down = torch.cuda.Stream(device) if is_cuda else None

    def memory(self, wanted: dict[Name, tuple[torch.Size, torch.dtype]]) -> dict[Name, Tensor]:
        """Host tensors by name, side by side in pieces of memory, each at a multiple of 64 bytes.

        The pieces are page-locked in place, because memory that torch pins comes in powers of two.
        A tensor lies in one piece: CUDA refuses a copy that spans two.
        """
        starts: dict[Name, tuple[int, int]] = {}  # the piece, and the first byte in it
        sizes: list[int] = []  # of the pieces
        for name, (shape, dtype) in wanted.items():
            size = -(-shape.numel() * dtype.itemsize // 64) * 64
            if not sizes or sizes[-1] + size > self.PIECE:
                sizes.append(0)
            starts[name] = len(sizes) - 1, sizes[-1]
            sizes[-1] += size
        self.pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if self.up:
            self.lock()
        return {
            name: shaped(self.pieces[piece][first:], *wanted[name])
            for name, (piece, first) in starts.items()
        }

    def lock(self) -> None:
        """Page-lock the pieces; the host waits for every copy of those that CUDA refuses."""
        driver, unlocked, why = torch.cuda.cudart(), 0, ""
        for piece in filter(Tensor.numel, self.pieces):
            error = driver.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)
            if int(error) == 0:
                weakref.finalize(self, driver.cudaHostUnregister, piece.data_ptr())
            else:
                unlocked += piece.nbytes
                why = driver.cudaGetErrorString(error)
        if unlocked:
            # CUDA reports the error again to the next caller, which would be a kernel
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            print(
                f"--offload: {shown(unlocked)} of host memory cannot be page-locked ({why}): the"
                " host waits for each copy of these",
                file=sys.stderr,
            )

    def copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        """Begin to copy (to, from) pairs, after all work that the device was given before.

        Args: stream `up` or `down`
        """
        if stream:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event() if stream else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Have what the device computes next wait for a copy; the host does not wait."""
        if event:
            torch.cuda.current_stream(self.device).wait_event(event)


def shaped(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The leading bytes of `memory` as a tensor."""
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
