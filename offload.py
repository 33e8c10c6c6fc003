"""Granular CPU offload: keep in host memory what exceeds a budget of device memory.

The model is placed part by part: a part is a block, or everything outside the blocks. Each part's
matrices are on one of these levels; norms and biases stay on the device.

    resident           everything is on the device
    hosted             optimizer state and fp32 masters are on the host, which updates the masters
                       and sends the new weights
    hosted gradients   gradients too: the host sums them over micro-batches
    streamed           weights as well: the device fetches a block's while the one before it runs

Optimizer state goes first, because it is used once a step; then gradients, which are copied once a
micro-batch; then weights, copied twice. Middle blocks go before those at the ends, which give the
copies time, and what is outside the blocks goes last. The command below needs 27.1 MB and has 19:

                       on the device               on the host
    outside            weights, gradients, state   -                           resident
    h.0, h.4, h.5      weights                     masters, gradients, state   hosted gradients
    h.1, h.2, h.3      weights, two at a time      masters, gradients, state   streamed

Losses do not change. In reading order, with the function of train.py that calls it: `preview`
(run_training); `placement_for` and `Offload` (assemble), and its methods `wrap_block`
(block_runner), `around_backward` (backward), `step` (train_step) and `weights` (state).

Papers: Ren et al., arXiv 2101.06840 (ZeRO-Offload); Lin et al., arXiv 2110.03888 (granular: only
        as much as needed; it came without code, so the order is ours)

    python train.py --layers 6 --tied --dtype fp32 --micro-batch-size 8 --offload \\
        --offload-budget 19MB
"""

import math
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.numbers import bytes_of, short
from support.optim import Optimizers, state_bytes
from support.runtime import Runtime
from support.settings import free

if TYPE_CHECKING:
    from model import Block, BlockRunner, TokenMeta, Transformer


@dataclass(frozen=True)
class OffloadConfig:
    on: bool = free("--offload", False, "move what exceeds --offload-budget to CPU memory")
    budget: str = free(
        "--offload-budget", "auto", "weights, gradients, state: 6GiB; auto: half of free memory"
    )


# ---- a placement, and the bytes that it takes


class Level(IntEnum):
    """How much of a part is on the host; each level includes the ones before it."""

    RESIDENT = 0
    HOSTED = 1
    HOSTED_GRADIENTS = 2
    STREAMED = 3


GRADIENT, MOMENTS = 4, 8  # bytes for each parameter: fp32, and two of AdamW's
ON_HOST = ("nothing", "state", "state and gradients", "state, gradients and weights")  # by level


class Part(NamedTuple):
    """Tensors that are placed together: a block's, or everything outside the blocks."""

    name: str  # h.3, or outside
    layers: tuple[int, ...]  # layers that run the block; () outside
    numel: int  # parameters in its matrices
    state_bytes: int  # optimizer state of the matrices
    small: int  # parameters of norms and biases
    embedding: int = 0  # parameters of the token embedding
    tied: bool = False  # whether the embedding is the head too
    dtype: torch.dtype = torch.float32  # of the arithmetic: float32 | bfloat16
    level: Level = Level.RESIDENT

    def device_dtype(self) -> torch.dtype:
        """Return the dtype of the weights on the device, and of their gradients."""
        # Autocast would round fp32 weights to the same bf16 numbers, and keep both.
        is_rounded = self.layers and self.level >= Level.HOSTED_GRADIENTS
        return self.dtype if is_rounded else torch.float32

    def copied_bytes(self) -> int:
        """Return the bytes that a copy of all weights, or of all gradients, moves."""
        return self.numel * self.device_dtype().itemsize

    def bytes_per_weight(self) -> int:
        """Return the host's bytes for a master, its gradient, and the bf16 copy to be sent."""
        return 8 if self.device_dtype() == torch.float32 else 10

    def device_bytes(self) -> int:
        """Return the bytes that stay on the device, and the gradients that wait there."""
        weight = self.device_dtype().itemsize
        # Autocast keeps a copy of a block's fp32 weights until the backward pass. The loss makes
        # that of the embeddings, and has freed it by then.
        cast = 2 if self.dtype == torch.bfloat16 and self.layers else 0
        per_weight = 0 if self.level == Level.STREAMED else weight
        if self.level < Level.HOSTED_GRADIENTS:
            per_weight += GRADIENT + cast
        elif len(self.layers) > 1:  # the device sums the gradients of layers that share a block
            per_weight += weight
        state = self.state_bytes if self.level == Level.RESIDENT else 0
        small = self.small * (4 + GRADIENT + MOMENTS + cast)
        return self.numel * per_weight + state + small + self.waiting_gradients()

    def waiting_gradients(self) -> int:
        """Return the bytes of the gradients that wait to be summed, of the embedding and the head.

        A backward pass makes the head's first and the embedding's last. The head's waits until then
        if both are one matrix (tied), or if the host sums it and it has not arrived yet.
        """
        head_waits = self.tied or self.level >= Level.HOSTED_GRADIENTS
        return GRADIENT * self.embedding * (2 if head_waits else 1)


class Placement(NamedTuple):
    """Every part with its level, and the budget that decided it."""

    parts: tuple[Part, ...]  # first what is outside the blocks
    budget: int  # bytes on the device

    def device_bytes(self) -> int:
        """Return the bytes on the device, without activations; two blocks each are in transit."""
        blocks = [p for p in self.parts if p.layers and p.level >= Level.HOSTED_GRADIENTS]
        gradients = max((p.copied_bytes() for p in blocks), default=0)
        weights = max((p.copied_bytes() for p in blocks if p.level == Level.STREAMED), default=0)
        return 2 * gradients + 2 * weights + sum(part.device_bytes() for part in self.parts)

    def slot_bytes(self) -> int:
        """Return the bytes of a `Slot`, which has room for the gradients of any part."""
        return max((part.copied_bytes() for part in self.parts if part.level), default=0)

    def host_bytes(self) -> int:
        hosted = [part for part in self.parts if part.level]
        tensors = sum(part.numel * part.bytes_per_weight() + part.state_bytes for part in hosted)
        return tensors + 2 * self.slot_bytes()


# ---- the decision


def preview(
    config: OffloadConfig, models: "Iterable[Transformer]", runtime: Runtime, muon: bool
) -> None:
    """Print what will be where; refuse a budget that is too small for any of the models."""
    placements = [placement_for(config, model, runtime, muon) for model in models]
    runtime.check_same({"the placement of --offload": str(placements)})
    runtime.say(in_words(placements[0], runtime.host_free))


def placement_for(
    config: OffloadConfig, model: "Transformer", runtime: Runtime, muon: bool
) -> Placement:
    """Decide how much of a model to offload, given the memory that was free when the run began.

    With several ranks only optimizer state can be offloaded, because DDP keeps the gradients. All
    get the placement of the one with the least memory, because Muon's collectives follow it.
    """
    known = [rank for rank in runtime.gather(runtime.device_free) if rank is not None]
    budget = budget_bytes(config.budget, min(known, default=None))
    most = Level.STREAMED if runtime.world_size == 1 else Level.HOSTED
    return place(parts_of(model, muon, runtime.dtype), budget, most)


def budget_bytes(text: str, free_bytes: int | None = None) -> int:
    """Parse 6GiB, 800MB or auto, which is half of the free bytes: activations get the rest."""
    if text != "auto":
        return bytes_of("--offload-budget", text)
    if free_bytes is None:
        raise ValueError("--offload-budget auto: free memory is unknown here, give bytes: 6GiB")
    return free_bytes // 2


def parts_of(model: "Transformer", muon: bool, dtype: torch.dtype) -> tuple[Part, ...]:
    """Divide a model into parts, all of them resident."""
    parts = []
    for name, parameters in parameters_by_part(model).items():
        block = model.h[int(name[2:])] if name != "outside" else None
        matrices = {n: p for n, p in parameters.items() if p.ndim > 1}
        part = Part(
            name=name,
            layers=tuple(layer for layer, other in enumerate(model.h) if other is block),
            numel=sum(p.numel() for p in matrices.values()),
            state_bytes=state_bytes(matrices, muon)["optimizer"],
            small=sum(p.numel() for p in parameters.values() if p.ndim < 2),
            embedding=0 if block else model.wte.weight.numel(),
            tied=not block and model.config.tied,
            dtype=dtype,
        )
        parts.append(part)
    return tuple(parts)


def parameters_by_part(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return parameters by part and name, "outside" first; layers may share a block."""
    parts: dict[str, dict[str, nn.Parameter]] = {"outside": {}}
    for name, parameter in model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"
        parts.setdefault(part, {})[name] = parameter
    return parts


def place(parts: tuple[Part, ...], budget: int, most: Level = Level.STREAMED) -> Placement:
    """Raise the levels of parts, to `most` at most, in `offload_order` until the rest fits."""
    options, placed = [Placement(parts, budget)], list(parts)
    for index, level in offload_order(len(parts)):
        if level <= most:
            placed[index] = parts[index]._replace(level=level)
            options.append(Placement(tuple(placed), budget))
    for placement in options:
        if placement.device_bytes() <= budget:
            return placement
    least = math.ceil(min(placement.device_bytes() for placement in options) / 1e6)
    raise ValueError(f"--offload-budget {short(budget, 'B')} is too small: give at least {least}MB")


def offload_order(parts: int) -> list[tuple[int, Level]]:
    """Return the order of offloading, as (index of a part, its level from then on).

    Example: for the outside (0) and three blocks: 2 1 3 HOSTED, 2 1 3 HOSTED_GRADIENTS, 2 1 3
             STREAMED, 0 HOSTED, 0 HOSTED_GRADIENTS
    """
    blocks = sorted(range(1, parts), key=lambda index: abs(index - parts / 2))
    levels = (Level.HOSTED, Level.HOSTED_GRADIENTS, Level.STREAMED)
    order = [(index, level) for level in levels for index in blocks]
    return [*order, (0, Level.HOSTED), (0, Level.HOSTED_GRADIENTS)]


def in_words(placement: Placement, host_free: int | None = None) -> str:
    """Describe a placement; warn if all ranks together need more than `host_free` bytes.

    Example: --offload: outside to h.1: nothing on the host; h.2: state on the host; h.3 to h.5:
             nothing on the host; 26.3 MB of 26.7 MB on the device, 3.93 MB on the host
    """
    clauses = []
    for level, parts in groupby(placement.parts, key=lambda part: part.level):
        names = [part.name for part in parts]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        clauses.append(f"{span}: {ON_HOST[level]} on the host")
    host, budget = placement.host_bytes(), short(placement.budget, "B")
    on_device = f"{short(placement.device_bytes(), 'B')} of {budget} on the device"
    clauses.append(f"{on_device}, {short(host, 'B')} on the host")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if host_free is not None and host * ranks > host_free:
        clauses.append(f"WARNING: the host has only {short(host_free, 'B')} of free memory")
    return f"--offload: {'; '.join(clauses)}"


# ---- carrying out a placement


class HostMatrix:
    """A matrix that is hosted or streamed.

    Args: parameter in the model, with its initial values; left without any
          memory    host bytes, `Part.bytes_per_weight` for each weight
    """

    def __init__(
        self, name: str, part: Part, parameter: nn.Parameter, memory: Tensor, device: torch.device
    ):
        self.name, self.part, self.parameter = name, part, parameter
        self.name_in_block = name.removeprefix(f"{part.name}.")
        shape, size, dtype = parameter.shape, 4 * parameter.numel(), part.device_dtype()
        # fp32, updated by the optimizer
        self.master = nn.Parameter(shaped(memory, shape, torch.float32).copy_(parameter))
        self.gradient = shaped(memory[size:], shape, torch.float32)  # the sum over micro-batches
        # what is sent to the device: the master or, in bf16, a copy of it
        self.weight = self.master.data
        if dtype != torch.float32:
            self.weight = shaped(memory[2 * size :], shape, dtype)
        # A streamed parameter has no memory on the device, it is one NaN: used by mistake, it makes
        # the loss NaN, and the run stops.
        stored = [1] * len(shape) if part.level == Level.STREAMED else shape
        parameter.data = torch.full(stored, torch.nan, dtype=dtype, device=device).expand(shape)


class Fetched(NamedTuple):
    weights: list[Tensor]  # of a block, on the device
    event: torch.cuda.Event | None  # when their copy is complete


class Offload:
    """A model under a placement. The model is changed in place, and never whole on the device.

    Args: early whether gradients are sent during the backward pass. Under DDP they cannot be,
                because they are summed over ranks only at its end
    """

    @torch.no_grad()
    def __init__(
        self, placement: Placement, model: "Transformer", device: torch.device, early: bool = True
    ):
        self.placement, self.model, self.device = placement, model, device
        self.link = Link(device)
        named = parameters_by_part(model)
        hosted = [
            (name, part, parameter)
            for part in placement.parts
            for name, parameter in named[part.name].items()
            if part.level and parameter.ndim > 1
        ]
        sizes = [parameter.numel() * part.bytes_per_weight() for _, part, parameter in hosted]
        slot = placement.slot_bytes()
        one, other, *memories = self.link.memory([slot, slot, *sizes])
        self.slot, self.other_slot = Slot(one), Slot(other)
        self.by_part: dict[Part, list[HostMatrix]] = {}
        for (name, part, parameter), memory in zip(hosted, memories, strict=True):
            matrix = HostMatrix(name, part, parameter, memory, device)
            self.by_part.setdefault(part, []).append(matrix)
            if early:
                parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, matrix))
        self.matrices = [matrix for matrices in self.by_part.values() for matrix in matrices]
        streamed = [part for part in self.by_part if part.level == Level.STREAMED]
        self.streamed = {layer: self.by_part[part] for part in streamed for layer in part.layers}
        self.fetched: dict[int, Fetched] = {}  # by layer
        self.direction = 1  # in which layers run: -1 in a backward pass
        self.is_last = True  # whether this is the last micro-batch of a step
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(device)
        self.send(self.matrices)
        model.run_block = self.wrap_block(model.run_block)  # for evaluations

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return what the optimizers update: masters in place of hosted matrices."""
        return named | {matrix.name: matrix.master for matrix in self.matrices}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict with fp32 masters; layers that share a block all appear."""
        masters = {id(matrix.parameter): matrix.master for matrix in self.matrices}
        tensors = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in tensors.items()}

    # ---- fetching weights

    def wrap_block(self, inner: "BlockRunner") -> "BlockRunner":
        """Return a block runner that gives streamed blocks their weights; `inner` runs the others.

        A streamed block is recomputed in the backward pass, because autograd would otherwise keep
        all fetched weights until then.
        """

        def run_streamed(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
            return functional_call(block, self.weights_of(layer), (x, meta))

        def run_block(layer: int, block: "Block", x: Tensor, meta: "TokenMeta") -> Tensor:
            if layer not in self.streamed:
                return inner(layer, block, x, meta)
            return checkpoint(run_streamed, layer, block, x, meta, use_reentrant=False)

        return run_block if self.streamed else inner

    def weights_of(self, layer: int) -> dict[str, Tensor]:
        """Return a streamed block's weights, and start to fetch those of the one that runs next."""
        weights, event = self.fetch(layer)
        self.link.wait(event)
        # Only two layers keep their weights. Others that were fetched but never ran may still be in
        # transit, but their copies began earlier, so that wait covers them too.
        following = self.following(layer)
        self.fetched = {n: fetched for n, fetched in self.fetched.items() if n == following}
        self.fetch(following)
        pairs = zip(self.streamed[layer], weights, strict=True)
        return {m.name_in_block: FetchedWeight.apply(m.parameter, weight) for m, weight in pairs}

    def following(self, layer: int) -> int:
        """Return the streamed layer that runs next.

        Example: of 0, 1 and 3, forward 1 after 0, backward 0 after 1; where the direction changes,
                 forward 3 after 3, backward 0 after 0
        """
        layers = sorted(self.streamed)
        index = layers.index(layer) + self.direction
        return layers[min(max(index, 0), len(layers) - 1)]

    def fetch(self, layer: int) -> Fetched:
        """Start to copy a layer's weights to the device, unless that has been done already."""
        if layer not in self.fetched:
            # Allocated on the compute stream, because that is where the memory is reused.
            sources = [matrix.weight for matrix in self.streamed[layer]]
            targets = [torch.empty(w.shape, dtype=w.dtype, device=self.device) for w in sources]
            event = self.link.copy(self.link.up, zip(targets, sources, strict=True))
            self.fetched[layer] = Fetched(targets, event)
        return self.fetched[layer]

    # ---- receiving gradients

    @contextmanager
    def around_backward(self, is_last: bool) -> Iterator[None]:
        """Wrap a backward pass; after the last of a step, the masters have their gradients."""
        self.is_last, self.direction = is_last, -1
        yield
        self.direction = 1
        for matrix in self.matrices:
            if matrix.parameter.grad is not None:
                self.gradient_ready(matrix, matrix.parameter)
        if is_last:
            self.other_slot.add_up()
            self.slot.add_up()

    def gradient_ready(self, matrix: HostMatrix, parameter: nn.Parameter) -> None:
        """Start to send a gradient, unless the device still sums it over micro-batches."""
        if not self.is_last and matrix.part.level < Level.HOSTED_GRADIENTS:
            return
        gradient, parameter.grad = parameter.grad, None
        # While one slot receives the gradients of a part, those in the other wait to be added up.
        # So the device never holds gradients of more than two parts.
        if not self.slot.has_room_for(matrix):
            self.slot, self.other_slot = self.other_slot, self.slot
            self.slot.add_up()
        self.slot.receive(matrix, gradient, self.link)

    # ---- updating, and sending weights back

    def step(self, optimizers: Optimizers, lr: float) -> None:
        """Update the parameters on the device, then those on the host, part by part.

        A part's new weights travel to the device while the host updates the next part. Muon copies
        its directions to the device, orthogonalises them there, and copies them back.
        """
        hosted = {matrix.name for matrix in self.matrices}
        optimizers.step(lr, only=optimizers.named.keys() - hosted)
        for matrices in self.by_part.values():
            optimizers.step(lr, only=[matrix.name for matrix in matrices])
            self.send(matrices)
        if self.streamed:  # fetch the first of them for the next forward pass
            self.link.wait(self.fetch(min(self.streamed)).event)

    @torch.no_grad()
    def send(self, matrices: list[HostMatrix]) -> None:
        """Copy new weights to the device or, if they are streamed, to where they are fetched."""
        for matrix in matrices:
            if matrix.weight.dtype != torch.float32:
                matrix.weight.copy_(matrix.master)
        pairs = [(m.parameter.data, m.weight) for m in matrices if m.part.level < Level.STREAMED]
        self.link.wait(self.link.copy(self.link.up, pairs))
        self.fetched.clear()  # only after that wait, so that no copy still writes to their memory


class FetchedWeight(torch.autograd.Function):
    """Use a fetched weight in place of a parameter, and pass the gradient on to the parameter."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Arrival(NamedTuple):
    gradient: Tensor  # on the device; it must outlive its copy
    copy: Tensor  # in the slot
    event: torch.cuda.Event | None  # when the copy is complete


class Slot:
    """Host memory for the gradients of one part, until they are added to their sums."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.arrivals: dict[HostMatrix, Arrival] = {}

    def has_room_for(self, matrix: HostMatrix) -> bool:
        """Whether the slot is empty or receives this part's gradients of this micro-batch."""
        parts = {other.part for other in self.arrivals}
        return parts <= {matrix.part} and matrix not in self.arrivals

    def receive(self, matrix: HostMatrix, gradient: Tensor, link: "Link") -> None:
        used = sum(arrival.copy.nbytes for arrival in self.arrivals.values())
        copy = shaped(self.memory[used:], gradient.shape, gradient.dtype)
        event = link.copy(link.down, [(copy, gradient)])
        self.arrivals[matrix] = Arrival(gradient, copy, event)

    def add_up(self) -> None:
        """Wait until the gradients have arrived, and add them to their sums."""
        events = [arrival.event for arrival in self.arrivals.values() if arrival.event]
        if events:
            events[-1].synchronize()  # copies end in order
        for matrix, arrival in self.arrivals.items():
            if matrix.master.grad is None:
                matrix.master.grad = matrix.gradient.copy_(arrival.copy)
            else:
                matrix.gradient.add_(arrival.copy)
        self.arrivals.clear()


# ---- copies between the device and page-locked host memory


class Link:
    """Copies between the host and one device: `up` is to the device, `down` is to the host.

    A GPU copies on two streams while it computes; callers keep the tensors alive until the copy is
    done. Other devices copy synchronously.
    """

    PIECE = 2**30  # most bytes that are page-locked together

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if is_cuda else None
        self.down = torch.cuda.Stream(device) if is_cuda else None
        self.pieces: list[Tensor] = []

    def memory(self, sizes: list[int]) -> list[Tensor]:
        """Allocate bytes of page-locked memory, side by side in large pieces, 64-byte aligned.

        Pieces are locked in place, because torch would round pinned memory up to powers of two. No
        tensor spans two pieces, because CUDA would refuse to copy it.
        """
        rooms: list[list[int]] = [[]]  # bytes for each tensor, by piece
        for size in sizes:
            aligned = -(-size // 64) * 64
            if sum(rooms[-1]) + aligned > self.PIECE:
                rooms.append([])
            rooms[-1].append(aligned)
        self.pieces = [torch.empty(sum(of_piece), dtype=torch.uint8) for of_piece in rooms]
        if self.up:
            self.lock()
        pairs = zip(self.pieces, rooms, strict=True)
        tensors = [room for piece, of_piece in pairs for room in piece.split(of_piece)]
        return [tensor[:size] for tensor, size in zip(tensors, sizes, strict=True)]

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
            message = f"{short(unlocked, 'B')} of host memory cannot be page-locked ({why})"
            print(f"--offload: {message}: the host waits for its copies", file=sys.stderr)

    def copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        """Start to copy (to, from) pairs, after all work that was queued on the device before."""
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
