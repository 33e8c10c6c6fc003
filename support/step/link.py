"""Copies between a device and page-locked memory of the host, beside what the device computes.

A GPU copies on two streams, one for each direction, while it computes. Memory that is copied stays
allocated until the copy is done, so nothing depends on when a stream gets to it. Other devices copy
at once, by the same calls. Which tensors are copied, and when, is decided in offload.py.
"""

import sys
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from support.step.placement import shown

PIECE = 2**30  # bytes that are page-locked together
Name = TypeVar("Name", bound=Hashable)


class Link:
    """Both directions between the host and one device; `up` is to the device."""

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
        places: dict[Name, tuple[int, int]] = {}  # the piece, and the first byte in it
        sizes: list[int] = []  # of the pieces
        for name, (shape, dtype) in wanted.items():
            size = -(-shape.numel() * dtype.itemsize // 64) * 64
            if not sizes or sizes[-1] + size > PIECE:
                sizes.append(0)
            places[name] = len(sizes) - 1, sizes[-1]
            sizes[-1] += size
        self.pieces = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if self.up:
            self.lock()
        return {
            name: shaped(self.pieces[piece][first:], *wanted[name])
            for name, (piece, first) in places.items()
        }

    def lock(self) -> None:
        """Page-lock the pieces; the host waits for every copy of those that CUDA refuses."""
        driver, unlocked, why = torch.cuda.cudart(), 0, ""
        for piece in filter(Tensor.numel, self.pieces):
            error = driver.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)
            if int(error) == 0:
                weakref.finalize(self, driver.cudaHostUnregister, piece.data_ptr())
                continue
            unlocked += piece.nbytes
            why = driver.cudaGetErrorString(error)
        if unlocked:
            # CUDA reports the error again to the next caller, which would be a kernel
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            locked = sum(piece.nbytes for piece in self.pieces) - unlocked
            print(
                f"--offload: {shown(locked)} of host memory are page-locked, {shown(unlocked)} are"
                f" not ({why}): the host waits for each copy of these",
                file=sys.stderr,
            )

    def copy_up(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy (to, from) pairs, after all that the device was told to do."""
        return self._copy(self.up, pairs)

    def copy_down(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        return self._copy(self.down, pairs)

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        if stream:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event() if stream else None

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the device compute whatever comes next after a copy; the host does not wait."""
        if event:
            torch.cuda.current_stream(self.device).wait_event(event)


def shaped(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The first of these bytes as a tensor."""
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Copy(NamedTuple):
    gradient: Tensor  # on the device, kept until the copy is done
    landed: Tensor  # in a slot


class Slot:
    """Host memory where the gradients of one part land, with room for those of any part."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.copies: dict[str, Copy] = {}  # by the name of the gradient
        self.last: torch.cuda.Event | None = (
            None  # of the copies, which end in the order they begin
        )


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
        slot.last = self.link.copy_down([(landed, gradient)])

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
        self.settle(self.other)
        self.settle(self.current)


class Lent(torch.autograd.Function):
    """A fetched weight, whose gradient goes to the parameter that it stands for."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
