"""Granular CPU offload: move as much of a training state to the host as a byte budget demands.

From the flag to the bytes, stop by stop. Functions without a file are in this one. In the example
six layers of width 128 train in fp32 with Muon, in two micro-batches of 1,024 tokens a step. Each
of the blocks h.0 to h.5 has 196,608 weights in matrices. These are 768 KiB, and so are their
gradients and their optimizer state. A device that holds everything needs 25.84 MiB.

1. The flag. `--offload --offload-budget 25.5MiB` becomes an `OffloadConfig`. config.py registers
   `placement_for` and `edit`; train.py calls the first in `main`, to estimate the memory, and the
   second in `assemble`, with the model still on the host.
2. Parts and sizes. `parts_of` (support/step/placement.py) divides the model into its blocks and all
   outside them. Matrices may leave; norms and biases stay.
3. The order of leaving. `place` (same file) sends away the optimizer state of one block after the
   other, from the middle outwards, then their gradients, then their weights (`order_of_leaving`),
   until the rest fits. It returns a `Placement`:
       25.5 MiB    the state of h.2 leaves; 25.09 MiB stay
       18 MiB      all blocks' state and gradients, and the weights of h.1, h.2, h.3; 17.59 MiB stay
4. What is created: `Offload.move`. For each matrix with anything away the host gets an fp32 master,
   which the optimizer updates, and an fp32 gradient, both page-locked (`Link.memory`). With the
   optimizer's state these are 2.25 MiB for h.2, at either budget. Gradients land in two slots of
   768 KiB. On the device h.2 is a copy of its masters at 25.5 MiB; at 18 MiB its parameters have
   no storage.
5. A step: `Trainer.gradients` and `Trainer.update` in train.py call these methods.
   forward     `Offload.run_block` begins to copy a block's weights (`Link.copy`) when the block
               fetched before it begins to run; the device waits for them, the host does not. At
               18 MiB: h.1, h.2, h.3
   backward    the same in the other direction. Only weights that run twice in a row stay
   gradients   each calls `Offload.gradient_ready` (a hook, without DDP) as it is complete, which
               sends it to the host; `Landing` adds up those of several micro-batches there, and
               the host waits for a part's when their slot is needed again. At 25.5 MiB the
               device adds up h.2's gradients, and they leave once a step; at 18 MiB every
               micro-batch sends those of all blocks
   update      `Optimizers.clip_gradients` (support/optim.py), then `Offload.around_step`:
               first what is on the device is updated, then the masters, part by part
   weights     `Offload.send` copies a part's new weights to the device while the host updates the
               next part; at 18 MiB h.1 is fetched at the end of the step, h.2 and h.3 as the next
               forward pass comes to them
   In bytes (`Placement.traffic`): at 25.5 MiB 768 KiB each way. At 18 MiB 9 MiB to the host, for
   2 x 6 blocks' gradients, and 9 MiB to the device: h.0, h.4, h.5 once, h.1 three times, h.2 four
   times, h.3 twice. Not counted: Muon on a GPU orthogonalises there, for which 4 bytes a parameter
   go to the device in a step and 2 come back; the host waits for these.
6. A checkpoint has the masters, under the model's names (`Offload.weights`), and so it is that of a
   run without offload: names, and in fp32 every bit.

In bf16 the device's copy of the weights is bf16 once gradients are away: autocast would round fp32
ones to the same numbers, and keep both.

With several ranks only optimizer state leaves, because DDP keeps the gradients. --fsdp is refused.
Activations are not offloaded: use --checkpoint-activations.

Papers:   Ren et al., arXiv 2101.06840 (ZeRO-Offload): all optimizer state and the step on the host;
          Lin et al., arXiv 2110.03888: granular CPU offloading, only part of it
Deviates: the order of leaving is ours; 2110.03888 came without code

    python train.py --layers 6 --width 128 --dtype fp32 --offload --offload-budget 25.5MiB
"""

import os
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from support.settings import bytes_of, flag
from support.step.placement import KINDS, Away, Part, Placement, grouped, parts_of, place, shown

if TYPE_CHECKING:
    from model import BlockRunner, TokenMeta, Transformer
    from support.runtime import Runtime

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
Name = TypeVar("Name", bound=Hashable)


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


def check(config: OffloadConfig, *, fsdp: bool) -> None:
    """Refuse what is no amount of bytes, and --fsdp."""
    budget_bytes(config.budget, free=0)
    host_bytes(config.host_memory, free=0)
    if fsdp:
        raise ValueError(
            "--fsdp spreads weights, gradients and state over the ranks: leave out --offload"
        )


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


def host_bytes(text: str, free: int | None) -> int | None:
    """What a run may take of this machine's memory; None if unknown."""
    return free if text == "auto" else bytes_of("--offload-host-memory", text)


def placement_for(
    config: OffloadConfig, muon: bool, model: nn.Module, runtime: "Runtime"
) -> Placement:
    """Decide what of a model leaves the device, by what was free when the run began.

    Args:   muon  whether Muon updates the blocks' matrices
            model may be on the meta device
    Raises: ValueError for a budget or a host that is too small
    """
    return place(
        parts_of(model, muon),
        budget_bytes(config.budget, runtime.device_free),
        DTYPES[runtime.dtype],
        kinds=KINDS if runtime.world_size == 1 else (Away.STATE,),
        host_bytes=host_bytes(config.host_memory, runtime.host_free),
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )


# ---- the placement carried out


class HostMatrix(NamedTuple):
    """A matrix that is at least partly on the host."""

    name: str
    part: Part
    parameter: nn.Parameter  # the model's, in the device's dtype
    master: nn.Parameter  # fp32: the optimizer's
    sent: Tensor  # what is copied to the device: the master or, in bf16, a copy of it
    gradient: Tensor  # fp32: the sum over micro-batches


class Fetched(NamedTuple):
    """A layer's weights on the device."""

    weights: list[Tensor]
    event: torch.cuda.Event | None  # when they are there


class Offload:
    """A placement, carried out on one model (`move`); the head of this file walks through a step.

    Args: early gradients leave during the backward pass. Under DDP they cannot: only at its end
                are they summed over ranks
    """

    def __init__(self, placement: Placement, early: bool = True):
        self.placement, self.early = placement, early
        self.hosted: dict[Part, list[HostMatrix]] = {}
        self.streamed: dict[int, list[HostMatrix]] = {}  # by layer, if its weights are away
        self.fetched: dict[int, Fetched] = {}  # by layer
        self.is_last = True  # micro-batch of a step

    @torch.no_grad()
    def move(self, model: "Transformer", device: torch.device) -> bool:
        """Put every tensor of a model where it belongs; the whole never comes to the device."""
        self.model, self.device, self.link = model, torch.device(device), Link(device)
        groups = grouped(model)
        leaving = [
            (part, name, parameter)
            for part in self.placement.parts
            for name, parameter in groups[part.name].items()
            if part.away and parameter.ndim > 1
        ]
        slot = torch.Size([self.placement.slot_bytes]), torch.uint8
        wanted = {("slot", 0): slot, ("slot", 1): slot}
        for part, name, parameter in leaving:
            wanted[name, "master"] = wanted[name, "gradient"] = parameter.shape, torch.float32
            if self.dtype_of(part) != torch.float32:
                wanted[name, "sent"] = parameter.shape, self.dtype_of(part)
        memory = self.link.memory(wanted)
        for part, name, parameter in leaving:
            dtype, shape = self.dtype_of(part), parameter.shape
            master = nn.Parameter(memory[name, "master"].copy_(parameter))
            matrix = HostMatrix(
                name=name,
                part=part,
                parameter=parameter,
                master=master,
                sent=memory.get((name, "sent"), master.data),
                gradient=memory[name, "gradient"],
            )
            self.hosted.setdefault(part, []).append(matrix)
            # without storage it is one NaN: run by mistake, it makes a loss that stops the run
            stored = shape if part.away < Away.WEIGHTS else [1] * len(shape)
            placeholder = torch.full(stored, torch.nan, dtype=dtype, device=device)
            parameter.data = placeholder.expand(shape)
            if self.early:
                leave = partial(self.gradient_ready, matrix)
                parameter.register_post_accumulate_grad_hook(leave)
            if part.away == Away.WEIGHTS:
                for layer in part.layers:
                    self.streamed[layer] = self.hosted[part]
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.to(device)
        sums = {matrix.name: matrix.gradient for matrix in self.matrices()}
        self.landing = Landing(self.link, (memory["slot", 0], memory["slot", 1]), sums)
        self.send(self.matrices())
        model.run_block = self.run_block(model.run_block)  # of evaluations
        return True

    def dtype_of(self, part: Part) -> torch.dtype:
        return torch.bfloat16 if self.placement.itemsize(part) == 2 else torch.float32

    def matrices(self) -> list[HostMatrix]:
        return [matrix for matrices in self.hosted.values() for matrix in matrices]

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return named | {matrix.name: matrix.master for matrix in self.matrices()}

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The fp32 masters; a block that layers share has a key for each of them."""
        masters = {id(matrix.parameter): matrix.master for matrix in self.matrices()}
        tensors = self.model.state_dict(keep_vars=True)
        return {key: masters.get(id(tensor), tensor).detach() for key, tensor in tensors.items()}

    # ---- weights are fetched

    def run_block(self, inner: "BlockRunner", recomputes: bool = False) -> "BlockRunner":
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
            event = self.link.copy(self.link.up, zip(weights, sent, strict=True))
            self.fetched[layer] = Fetched(weights, event)
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
            self.landing.settle_all()
            self.give(self.matrices())

    def gradient_ready(self, matrix: HostMatrix, parameter: nn.Parameter) -> None:
        """Let a gradient leave, unless it is still to grow on the device."""
        if self.is_last or matrix.part.away >= Away.GRADIENTS:
            gradient, parameter.grad = parameter.grad, None
            self.landing.begin(matrix.name, matrix.part.name, gradient)

    def give(self, matrices: list[HostMatrix]) -> None:
        """Hand the gradients of this step, if there are any, to the optimizer."""
        for matrix in matrices:
            has_arrived = matrix.name in self.landing.arrived
            matrix.master.grad = matrix.gradient if has_arrived else None

    # ---- the update, and weights go back

    def update(self, update: Callable[[], None]) -> None:
        """Update what stays on the device, then part by part what is on the host.

        A part's new weights travel to the device while the host updates the next part. Gradients
        were clipped in place, so what is taken from the optimizers here is given back clipped.

        Args: update updates every tensor that has a gradient, and frees the gradient
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
        copied = [matrix for matrix in matrices if matrix.part.away < Away.WEIGHTS]
        pairs = [(matrix.parameter.data, matrix.sent) for matrix in copied]
        self.link.wait(self.link.copy(self.link.up, pairs))
        self.fetched.clear()  # after that wait: copies into their memory have ended


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


class Copy(NamedTuple):
    gradient: Tensor  # on the device, kept until the copy is done
    landed: Tensor  # in a slot


class Slot:
    """Host memory where the gradients of one part land, with room for those of any part."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.copies: dict[str, Copy] = {}  # by the name of the gradient
        self.last: torch.cuda.Event | None = None  # of the copies, which end as they begin


class Landing:
    """Gradients on their way to the host, which adds up those of several micro-batches.

    There are two slots. While the gradients of one part are copied into one slot, those in the
    other are added to their sums. So the device has to keep the gradients of two parts at most.

    Example: parts b and a, two gradients each, arrive as b1 b2 a1 a2 in a backward pass. b1, b2
             land in one slot. a1 settles the other slot, which is empty, and lands there with a2.
             b1 of the next micro-batch settles the first slot: it waits for b1, b2 and adds them up

    Args: slots memory of the host
          sums  where gradients are added up, by name
    """

    def __init__(self, link: Link, slots: tuple[Tensor, Tensor], sums: dict[str, Tensor]):
        self.link, self.sums = link, sums
        self.current, self.other = map(Slot, slots)
        self.part = ""  # whose gradients land in the current slot
        self.arrived: set[str] = set()  # names of the sums that have begun

    def begin(self, name: str, part: str, gradient: Tensor) -> None:
        """Begin to copy a gradient of a part; the caller must let go of it."""
        if part != self.part or name in self.current.copies:
            self.current, self.other = self.other, self.current
            self.part = part
            self.settle(self.current)
        slot = self.current
        taken = sum(copy.landed.nbytes for copy in slot.copies.values())
        landed = shaped(slot.memory[taken:], gradient.shape, gradient.dtype)
        slot.copies[name] = Copy(gradient, landed)
        slot.last = self.link.copy(self.link.down, [(landed, gradient)])

    def settle(self, slot: Slot) -> None:
        """Wait until the gradients of a slot are there, and add them to their sums."""
        if slot.copies and slot.last:
            slot.last.synchronize()
        for name, copy in slot.copies.items():
            if name in self.arrived:
                self.sums[name].add_(copy.landed)
            else:
                self.sums[name].copy_(copy.landed)
            self.arrived.add(name)
        slot.copies.clear()

    def settle_all(self) -> None:
        for slot in (self.other, self.current):
            self.settle(slot)


class Lent(torch.autograd.Function):
    """A fetched weight, whose gradient goes to the parameter that it stands for."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
