"""Granular CPU offload: move as much of the training state to the host as a byte budget demands.

The technique acts where the code says `settings.offload.on`, and where train.py uses the `Offload`
object that is created there:

    train.py    go             `in_words` prints what will be where, or `place` refuses the budget
                assemble       `Offload.move`, before the optimizers are made on the masters
                block_runner   `wrap_block`, for each micro-batch
                backward       `around_backward`
                train_step     `Offload.step` turns clipped gradients into new weights
                state          `weights`, for checkpoints

Here is the way from the flag to the bytes. Functions are in this file unless another is named. The
example is the command at the end: six layers of width 128 train in fp32 with Muon, in steps of two
micro-batches of 2,048 tokens. Each of the blocks h.0 to h.5 has matrices with 196,608 weights.
These take 768 KiB, their gradients take as much, and so does their optimizer state. To hold
everything, the device would need 25.84 MiB.

1. The flag. `--offload --offload-budget 25.5MiB` becomes an `OffloadConfig`. train.py calls
   `placement_for` to turn it into a placement: in `go`, before the model takes memory, and in
   `assemble`.
2. Parts and sizes. `parts_of` divides the model into its blocks and one part for everything outside
   the blocks. Matrices may be offloaded; norms and biases stay.
3. The order. Optimizer state goes first (8 bytes a parameter with AdamW, 4 with Muon), because it
   is used once a step. Gradients follow, which are copied once a micro-batch, and then weights,
   which are copied twice. Within each kind the middle blocks go first, because the blocks that
   remain at both ends give the copies time. Embeddings and heads follow after all blocks, and their
   weights never go. `place` continues in this order until the rest fits:
       25.5 MiB    offloads the state of h.2; 25.09 MiB stay
       18 MiB      offloads all blocks' state and gradients, and the weights of h.1, h.2 and h.3;
                   17.59 MiB stay
4. Allocation: `Offload.move`. For each matrix that is at least partly offloaded, the host gets an
   fp32 master, which the optimizer updates, and an fp32 gradient. Both are page-locked
   (`Link.memory`). With the optimizer state, h.2 takes 2.25 MiB of the host at either budget.
   Gradients arrive in two slots of 768 KiB. At 25.5 MiB the device has a copy of h.2's masters; at
   18 MiB the parameters of h.2 have no storage there.
5. A step. `Trainer.backward` and `Trainer.train_step` in train.py call these methods:
   forward     `wrap_block` fetches a block's weights: it starts the copy (`Link.copy`) when the
               previous fetched block begins to run. The device waits for the copy, the host does
               not. At 18 MiB it fetches h.1, h.2 and h.3
   backward    the same in reverse order. A block keeps its weights only if it is the next to run
   gradients   as soon as a gradient is complete, a hook calls `gradient_ready`, which starts the
               copy to the host (under DDP, `around_backward` calls it at the end). `Landing` sums
               the gradients of several micro-batches there; the host waits for the gradients of a
               part only when their slot is needed again. At 25.5 MiB the device sums h.2's
               gradients and sends them once a step; at 18 MiB every micro-batch sends the gradients
               of all blocks
   update      `Optimizers.clip_gradients` (support/optim.py), then `Offload.step`: first what is on
               the device, then the masters, part by part
   weights     `send` copies a part's new weights to the device while the host updates the next
               part. At 18 MiB, h.1 is fetched at the end of the step, h.2 and h.3 when the next
               forward pass approaches them
   Bytes copied: at 25.5 MiB, 768 KiB each way. At 18 MiB, 9 MiB go to the host (the gradients of 6
   blocks in 2 micro-batches) and 9 MiB to the device (h.0, h.4 and h.5 once, h.1 three times, h.2
   four times, h.3 twice). Not counted: if there is a GPU, Muon orthogonalises on it, which copies 4
   bytes a parameter to the device and 2 back in each step, while the host waits.
6. A checkpoint holds the masters under the model's names (`Offload.weights`). So it has the same
   names, and in fp32 the same bits, as the checkpoint of a run without offload.

In bf16, once gradients are offloaded, the device's copy of the weights is bf16 too: autocast would
round fp32 weights to the same numbers, and keep both.

With several ranks only optimizer state is offloaded, because DDP keeps the gradients. --fsdp is
refused. Activations are not offloaded: use --checkpoint-activations.

Papers:   Ren et al., arXiv 2101.06840 (ZeRO-Offload): all optimizer state and the update on the
          host; Lin et al., arXiv 2110.03888: granular CPU offloading, only as much as needed
Deviates: the order is ours, because 2110.03888 came without code

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
Fetched = tuple[list[Tensor], torch.cuda.Event | None]  # weights, and when their copy is complete


@dataclass(frozen=True)
class OffloadConfig:
    on: bool = flag(False, "move what exceeds --offload-budget to CPU memory", free=True)
    budget: str = flag(
        "auto", "memory for weights, gradients, state: 6GiB; auto: half of what is free", free=True
    )


def budget_bytes(text: str, free: int | None = None) -> int:
    """Parse 6GiB, 800MB or auto.

    Args:    free the device's free bytes; auto takes half and leaves the rest to activations
    Raises:  ValueError for any other text
    Example: budget_bytes("1.5KiB") == 1536, budget_bytes("auto", 3000) == 1500
    """
    if text != "auto":
        return bytes_of("--offload-budget", text)
    if free is None:
        raise ValueError("--offload-budget auto: free memory is unknown here, give bytes: 6GiB")
    return free // 2


# ---- parts and their bytes


class Offloaded(IntEnum):
    """How much of a part is on the host; each level includes the ones before it."""

    NOTHING = 0
    STATE = 1  # and the fp32 masters, of which the device then has a copy
    GRADIENTS = 2
    WEIGHTS = 3


class Part(NamedTuple):
    """Tensors that are offloaded together: a block's, or everything outside the blocks."""

    name: str  # h.3, or outside
    layers: tuple[int, ...]  # layers that run the block; () outside
    numel: int  # parameters in its matrices, which may be offloaded
    state_bytes: int  # optimizer state of the matrices
    small: int  # parameters of norms and biases, which stay
    embedding: int = 0  # parameters of the token embedding
    tied: bool = False  # whether the embedding is the head too
    offloaded: Offloaded = Offloaded.NOTHING  # how much of its matrices is on the host

    def itemsize(self, dtype: str) -> int:
        """Return the bytes of one weight on the device, which its gradient takes too."""
        is_half = dtype == "bf16" and self.layers and self.offloaded >= Offloaded.GRADIENTS
        return 2 if is_half else 4

    def on_device(self, dtype: str) -> int:
        """Return the bytes that stay on the device: matrices, norms, biases, and AdamW's state.

        Autocast keeps a 2-byte copy of each fp32 weight of a block until the backward pass. The
        loss makes the copy of the embeddings, and has freed it by then.
        """
        weight, cast = self.itemsize(dtype), 2 if dtype == "bf16" and self.layers else 0
        # weight, gradient and cast of each parameter, by how much is offloaded
        each = (4 + 4 + cast, 4 + 4 + cast, weight, 0)[self.offloaded]
        if self.offloaded >= Offloaded.GRADIENTS and len(self.layers) > 1:
            each += weight  # the gradients of layers that share a block are summed on the device
        state = 0 if self.offloaded else self.state_bytes
        return self.numel * each + state + self.small * (4 + 4 + cast + 8)

    def on_host(self, dtype: str) -> int:
        """Return the bytes of masters, gradients, state, and the bf16 weights to be sent."""
        copy = 2 if self.itemsize(dtype) == 2 else 0
        return self.numel * (8 + copy) + self.state_bytes if self.offloaded else 0


class Placement(NamedTuple):
    """Every part with how much of it is offloaded, and the dtype and budget that decided it."""

    parts: tuple[Part, ...]
    dtype: str  # of the arithmetic: fp32 | bf16
    budget: int  # bytes on the device


def device_bytes(placement: Placement) -> int:
    """Return the bytes a placement needs on the device: what stays, plus what passes through.

    At any time the gradients of two blocks and the weights of two blocks are in transit. A tied
    embedding has two gradients besides the sum of earlier micro-batches: the head's, which waits
    for the end of the backward pass, and the input's. With a separate head, the head's gradient
    is finished earlier. Activations, and what an optimizer needs during its step, are not counted.
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
    """Return the bytes of a slot, which has room for the gradients of any part."""
    dtype = placement.dtype
    return max((p.numel * p.itemsize(dtype) for p in placement.parts if p.offloaded), default=0)


def host_bytes(placement: Placement) -> int:
    parts = sum(part.on_host(placement.dtype) for part in placement.parts)
    return parts + 2 * slot_bytes(placement)


def parameters_by_part(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return a model's parameters by part and name; a block shared by layers appears once.

    Example: h.3.mlp.c_fc.weight belongs to h.3, wte.weight to "outside"
    """
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"
        parts.setdefault(part, {})[name] = parameter
    return parts


def parts_of(model: "Transformer", muon: bool) -> tuple[Part, ...]:
    """Divide a model into parts and return their sizes.

    Args: model may be on the meta device
          muon  whether Muon updates the blocks' matrices
    """
    parts = []
    for name, parameters in parameters_by_part(model).items():
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
    """Return the order of offloading, as (part number, how much of it is offloaded from then on).

    Example: for the outside (part 0) and three blocks: parts 2 1 3 with STATE, the same with
             GRADIENTS, the same with WEIGHTS, then part 0 with STATE and with GRADIENTS
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
    """Offload parts in the order of `order_of_leaving` until the rest fits the budget.

    There is no way back: if offloading the outside part makes room, a block that was offloaded
    before it still stays on the host.

    Args:    budget bytes on the device
             most   the most that may be offloaded
    Raises:  ValueError for a budget that is too small, naming the smallest that works
    Cost:    L^2 sums for L blocks
    """
    options, placed = [Placement(parts, dtype, budget)], list(parts)
    for number, kind in order_of_leaving(parts):
        if kind <= most:
            placed[number] = parts[number]._replace(offloaded=kind)
            options.append(Placement(tuple(placed), dtype, budget))
    for placement in options:
        if device_bytes(placement) <= budget:
            return placement
    few = "" if most == Offloaded.WEIGHTS else "several ranks offload only optimizer state; "
    raise ValueError(
        f"--offload-budget {shown(budget)} is too small: {few}the smallest that works is"
        f" {math.ceil(min(map(device_bytes, options)) / MIB)}MiB, for what stays on the device and"
        " two blocks in transit"
    )


def placement_for(
    config: OffloadConfig, model: "Transformer", runtime: Runtime, *, muon: bool, fsdp: bool
) -> Placement:
    """Decide how much of a model to offload, given the memory that was free when the run began.

    Args:   model may be on the meta device
            muon  whether Muon updates the blocks' matrices
    Raises: ValueError for a budget that cannot be parsed or is too small, and for --fsdp
    """
    if fsdp:
        raise ValueError("--fsdp already shards weights, gradients and state: leave out --offload")
    budget = budget_bytes(config.budget, runtime.device_free)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == runtime.dtype)
    most = Offloaded.WEIGHTS if runtime.world_size == 1 else Offloaded.STATE
    return place(parts_of(model, muon), budget, dtype, most)


def shown(count: float) -> str:
    """Write a number of bytes. Example: 1.50 GiB"""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def in_words(placement: Placement, host_free: int | None = None) -> str:
    """Describe a placement. Warn, but do not refuse, if the host seems to lack free memory.

    Args:    host_free free bytes of this machine, which all its ranks share
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
        said.append(f"WARNING: the host has only {shown(host_free)} of free memory")
    return f"--offload: {'; '.join(said)}"


# ---- carrying out a placement


class HostMatrix(NamedTuple):
    """A matrix that is at least partly on the host."""

    name: str
    part: Part
    parameter: nn.Parameter  # in the model, with the dtype of the device's copy
    master: nn.Parameter  # fp32, updated by the optimizer
    source: Tensor  # what is copied to the device: the master or, in bf16, a copy of it
    gradient: Tensor  # fp32, the sum over micro-batches


class Offload:
    """Carries out a placement on one model (`move`); this file's docstring walks through a step.

    Args: early whether gradients are sent during the backward pass. Under DDP they cannot be,
                because they are summed over ranks only at its end
    """

    def __init__(self, placement: Placement, early: bool = True):
        self.placement, self.early = placement, early
        self.hosted: dict[Part, list[HostMatrix]] = {}
        self.streamed: dict[int, list[HostMatrix]] = {}  # layers whose weights are offloaded
        self.fetched: dict[int, Fetched] = {}  # layers whose weights are on the device now
        self.running: dict[int, dict[str, Tensor]] = {}  # weights, by name, of the running layer
        self.is_last = True  # whether this is the last micro-batch of a step

    @torch.no_grad()
    def move(self, model: "Transformer", device: torch.device) -> None:
        """Put every tensor where it belongs, without ever having the whole model on the device."""
        self.model, self.device, self.link = model, torch.device(device), Link(device)
        groups = parameters_by_part(model)
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
            # A parameter without storage is one NaN: used by mistake, it makes the loss NaN, and
            # the run stops.
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
        model.run_block = self.wrap_block(model.run_block)  # for evaluations

    def matrices(self) -> list[HostMatrix]:
        return [matrix for matrices in self.hosted.values() for matrix in matrices]

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what the optimizers update: masters in place of offloaded matrices."""
        return named | {matrix.name: matrix.master for matrix in self.matrices()}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict with fp32 masters; layers that share a block all appear."""
        masters = {id(matrix.parameter): matrix.master for matrix in self.matrices()}
        tensors = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in tensors.items()}

    # ---- fetching weights

    def wrap_block(self, inner: "BlockRunner") -> "BlockRunner":
        """Return a block runner that gives offloaded blocks their weights while they run.

        Such a block is recomputed in the backward pass, because autograd would otherwise keep all
        fetched weights until then.

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
        """Return the streamed layer that runs next: direction is 1 in the forward pass, else -1.

        Example: with layers 0, 1 and 3, the forward pass runs 0 1 3 and the backward pass 3 1 0.
                 Forward, 0 is followed by 1, 1 by 3, and 3 by itself; backward, 3 is followed by
                 1, 1 by 0, and 0 by itself. A layer followed by itself keeps its weights
        """
        layers = sorted(self.streamed)
        number = layers.index(layer) + direction
        return layers[min(max(number, 0), len(layers) - 1)]

    @contextmanager
    def fetching(self, layer: int, then: int) -> Iterator[None]:
        """Hold a block's weights on the device while it runs, and start to fetch those of `then`.

        Only these two layers keep their weights. Others that were fetched but never ran may still
        be in transit, but their copies began earlier, so this wait covers them too.
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
        """Start to copy a layer's weights to the device, unless that has been done already."""
        if layer not in self.fetched:
            # Allocated on the compute stream, because that is where the memory is reused.
            sources = [matrix.source for matrix in self.streamed[layer]]
            targets = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in sources]
            event = self.link.copy(self.link.up, zip(targets, sources, strict=True))
            self.fetched[layer] = targets, event
        return self.fetched[layer]

    # ---- receiving gradients

    @contextmanager
    def around_backward(self, last: bool) -> Iterator[None]:
        """Wrap a backward pass; after the last of a step, all offloaded gradients are summed."""
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
        """Start to send a gradient, unless the device still sums it over micro-batches."""
        if self.is_last or matrix.part.offloaded >= Offloaded.GRADIENTS:
            gradient, parameter.grad = parameter.grad, None
            self.landing.begin(matrix.name, matrix.part.name, gradient)

    # ---- updating, and sending weights back

    def step(self, optimizers: Optimizers, lr: float) -> None:
        """Update the parameters on the device, then those on the host, part by part.

        A part's new weights are copied to the device while the host updates the next part.
        """
        hosted = {matrix.name for matrix in self.matrices()}
        optimizers.step(lr, only=optimizers.named.keys() - hosted)
        for matrices in self.hosted.values():
            optimizers.step(lr, only=[matrix.name for matrix in matrices])
            self.send(matrices)
        if self.streamed:  # fetch the first of them for the next forward pass
            _, event = self.fetch(min(self.streamed))
            self.link.wait(event)

    @torch.no_grad()
    def send(self, matrices: list[HostMatrix]) -> None:
        """Copy new weights to the device or, if they are streamed, to where they are fetched."""
        for matrix in matrices:
            if matrix.source.dtype != torch.float32:
                matrix.source.copy_(matrix.master)
        local = [matrix for matrix in matrices if matrix.part.offloaded < Offloaded.WEIGHTS]
        pairs = [(matrix.parameter.data, matrix.source) for matrix in local]
        self.link.wait(self.link.copy(self.link.up, pairs))
        self.fetched.clear()  # only after that wait, so that no copy still writes to their memory


class LocalWeight(torch.autograd.Function):
    """Use a fetched weight in place of a parameter, and pass the gradient on to the parameter."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Landing:
    """Receives gradients on the host and sums them over micro-batches.

    There are two slots. While the gradients of one part are copied into one slot, the gradients in
    the other are added to their sums. So the device never holds the gradients of more than two
    parts.

    Example: parts b and a have two gradients each, and a backward pass sends b1 b2 a1 a2. b1 and b2
             go to one slot. a1 settles the other slot, which is empty, and goes there with a2. b1
             of the next micro-batch settles the first slot: it waits for b1 and b2 and adds them up

    Args: slots host memory, each with room for the gradients of any part
          sums  where gradients are summed, by name
    """

    def __init__(self, link: "Link", slots: tuple[Tensor, Tensor], sums: dict[str, Tensor]):
        self.link, self.slots, self.sums = link, slots, sums
        # For each slot, by name: the gradient on the device, which must outlive its copy, and the
        # copy.
        self.copies: tuple[dict[str, tuple[Tensor, Tensor]], ...] = ({}, {})
        self.last: list[torch.cuda.Event | None] = [None, None]  # last copy: they end in order
        self.slot, self.part = 0, ""  # the slot in use, and the part whose gradients it receives
        self.landed: set[str] = set()  # names of the gradients whose sums have begun

    def begin(self, name: str, part: str, gradient: Tensor) -> None:
        """Start to copy a gradient of a part; the caller must drop its reference."""
        if part != self.part or name in self.copies[self.slot]:
            self.slot, self.part = 1 - self.slot, part
            self.settle(self.slot)
        copies = self.copies[self.slot]
        used = sum(copy.nbytes for _, copy in copies.values())
        copy = shaped(self.slots[self.slot][used:], gradient.shape, gradient.dtype)
        copies[name] = gradient, copy
        self.last[self.slot] = self.link.copy(self.link.down, [(copy, gradient)])

    def settle(self, slot: int) -> None:
        """Wait until the gradients of a slot have arrived, and add them to their sums."""
        if self.copies[slot] and self.last[slot]:
            self.last[slot].synchronize()
        for name, (_, copy) in self.copies[slot].items():
            if name in self.landed:
                self.sums[name].add_(copy)
            else:
                self.sums[name].copy_(copy)
            self.landed.add(name)
        self.copies[slot].clear()


# ---- copies between the device and page-locked host memory


class Link:
    """Copies between the host and one device: `up` is to the device, `down` is to the host.

    A GPU copies on two streams, one per direction, while it computes. Callers keep the tensors
    alive until their copy is done. On other devices the same calls copy synchronously.
    """

    PIECE = 2**30  # most bytes that are page-locked together

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if is_cuda else None
        self.down = torch.cuda.Stream(device) if is_cuda else None

    def memory(self, wanted: dict[Name, tuple[torch.Size, torch.dtype]]) -> dict[Name, Tensor]:
        """Allocate host tensors by name, side by side in large pieces, each 64-byte aligned.

        The pieces are page-locked in place, because torch would round pinned memory up to powers of
        two. No tensor spans two pieces, because CUDA would refuse to copy it.
        """
        starts: dict[Name, tuple[int, int]] = {}  # the piece, and the first byte in it
        sizes: list[int] = []  # bytes of each piece
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
        """Page-lock the pieces; if CUDA refuses one, print that its copies make the host wait."""
        driver, unlocked, why = torch.cuda.cudart(), 0, ""
        for piece in filter(Tensor.numel, self.pieces):
            error = driver.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)
            if int(error) == 0:
                weakref.finalize(self, driver.cudaHostUnregister, piece.data_ptr())
            else:
                unlocked += piece.nbytes
                why = driver.cudaGetErrorString(error)
        if unlocked:
            # CUDA reports the error once more to the next caller. Let that be this harmless call.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            print(
                f"--offload: {shown(unlocked)} of host memory cannot be page-locked ({why}): the"
                " host has to wait for copies of them",
                file=sys.stderr,
            )

    def copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        """Start to copy (to, from) pairs, after all work that was queued on the device before.

        Args: stream `up` or `down`
        """
        if stream:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event() if stream else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the device wait for a copy before it computes further; the host does not wait."""
        if event:
            torch.cuda.current_stream(self.device).wait_event(event)


def shaped(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the leading bytes of `memory` as a tensor of this shape and dtype."""
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
