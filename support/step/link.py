"""Copies between a device and page-locked memory of the host, beside what the device computes.

A GPU copies on two streams, one for each direction, and what it computes goes on meanwhile. Memory
that is copied is held until the copy is done, so that nothing depends on when a stream gets to it.
Elsewhere the same calls copy at once.
"""

import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from support.step.placement import shown

PIECE = 2**30  # bytes that are page-locked together
Wanted = tuple[torch.Size, torch.dtype]


class Link:
    """Both directions between the host and one device; `up` is to the device."""

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if is_cuda else None
        self.down = torch.cuda.Stream(device) if is_cuda else None

    def memory(self, wanted: list[Wanted]) -> list[Tensor]:
        """Tensors of the host side by side in pieces of memory, each at a multiple of 64 bytes.

        Pieces are page-locked where they are: memory that torch pins comes in powers of two. A
        tensor lies in one piece, for CUDA refuses a copy that begins in one and ends in another.
        """
        pieces: list[list[int]] = []  # bytes of the tensors in each
        for shape, dtype in wanted:
            size = -(-shape.numel() * dtype.itemsize // 64) * 64
            if not pieces or sum(pieces[-1]) + size > PIECE:
                pieces.append([])
            pieces[-1].append(size)
        self.pieces = [torch.empty(sum(sizes), dtype=torch.uint8) for sizes in pieces]
        if self.up:
            self.lock()
        split = (piece.split(sizes) for piece, sizes in zip(self.pieces, pieces, strict=True))
        memory = zip(chain.from_iterable(split), wanted, strict=True)
        return [shaped(part, shape, dtype) for part, (shape, dtype) in memory]

    def lock(self) -> None:
        """Page-lock the pieces; of those that the machine refuses the host waits for each copy."""
        driver, unlocked, why = torch.cuda.cudart(), 0, ""
        for piece in filter(Tensor.numel, self.pieces):
            error = driver.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)
            if int(error) == 0:
                weakref.finalize(self, driver.cudaHostUnregister, piece.data_ptr())
                continue
            unlocked += piece.nbytes
            why = driver.cudaGetErrorString(error)
        if unlocked:
            # CUDA keeps the error for whoever asks next: a kernel, which would fail with it
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            locked = sum(piece.nbytes for piece in self.pieces) - unlocked
            print(
                f"--offload: {shown(locked)} of host memory are page-locked, {shown(unlocked)} are"
                f" not ({why}): the host waits for each copy of these",
                file=sys.stderr,
            )

    def copy_up(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Begin to copy (to, from) pairs, once all that the device was given to do is done."""
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
        """Let the device compute what comes now after a copy; the host does not wait."""
        if event:
            torch.cuda.current_stream(self.device).wait_event(event)


def shaped(memory: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The beginning of some bytes as a tensor."""
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Landing:
    """Gradients on their way to the host, where those of several micro-batches are added up.

    They land in two slots, in turns: while those of one group of tensors are copied into one, those
    in the other are added up. So the device holds two groups' gradients at most.

    Args: slots two pieces of host memory, each with room for any group's gradients
          sums  where gradients are added up, by name
    """

    def __init__(self, link: Link, slots: tuple[Tensor, Tensor], sums: dict[str, Tensor]):
        self.link, self.slots, self.sums = link, slots, sums
        # of each slot, by name: a gradient on the device, and where in the slot it is copied to
        self.landing: tuple[dict, dict] = ({}, {})
        self.events: list[torch.cuda.Event | None] = [None, None]  # of each slot's last copy
        self.turn, self.group = 0, ""
        self.arrived: set[str] = set()  # names of the sums that have begun

    def begin(self, name: str, group: str, gradient: Tensor) -> None:
        """Begin to copy a gradient; the caller must let go of it."""
        if group != self.group or name in self.landing[self.turn]:
            self.turn, self.group = 1 - self.turn, group
            self.settle(self.turn)
        turn, slot = self.turn, self.landing[self.turn]
        taken = sum(landed.nbytes for _, landed in slot.values())
        landed = shaped(self.slots[turn][taken:], gradient.shape, gradient.dtype)
        slot[name] = gradient, landed
        self.events[turn] = self.link.copy_down([(landed, gradient)])

    def settle(self, turn: int) -> None:
        """Wait until the gradients in one slot are there, and add them to their sums."""
        slot, event = self.landing[turn], self.events[turn]
        if slot and event:
            event.synchronize()  # copies end in the order in which they began
        for name, (_, landed) in slot.items():
            total = self.sums[name]
            if name in self.arrived:
                total.add_(landed)
            else:
                total.copy_(landed)
            self.arrived.add(name)
        slot.clear()

    def settle_all(self) -> None:
        self.settle(1 - self.turn)
        self.settle(self.turn)


class Lent(torch.autograd.Function):
    """A fetched weight, whose gradient goes to the parameter that it stands for."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, fetched: Tensor) -> Tensor:
        return fetched.view_as(fetched)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
