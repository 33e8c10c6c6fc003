"""Copies between a device and page-locked memory of the host, beside what the device computes.

A GPU copies on two streams, one for each direction, and what it computes goes on meanwhile. Memory
that is copied is held until the copy is done, so that nothing depends on when a stream gets to it.
Elsewhere the same calls copy at once.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Wanted = tuple[torch.Size, torch.dtype]


class Link:
    """Both directions between the host and one device; `up` is to the device."""

    def __init__(self, device: torch.device):
        self.device = device
        is_cuda = device.type == "cuda"
        self.up = torch.cuda.Stream(device) if is_cuda else None
        self.down = torch.cuda.Stream(device) if is_cuda else None

    def memory(self, wanted: list[Wanted]) -> list[Tensor]:
        """Tensors of the host side by side in one piece of memory, each at a multiple of 64 bytes.

        The piece is page-locked where it is: memory that torch pins comes in powers of two.
        """
        sizes = [-(-shape.numel() * dtype.itemsize // 64) * 64 for shape, dtype in wanted]
        self.slab = torch.empty(sum(sizes), dtype=torch.uint8)
        if self.up and sum(sizes):
            driver, address = torch.cuda.cudart(), self.slab.data_ptr()
            if int(driver.cudaHostRegister(address, sum(sizes), 0)):
                raise ValueError(f"--offload: {sum(sizes):,} bytes of the host cannot be locked")
            weakref.finalize(self, driver.cudaHostUnregister, address)
        pieces = zip(self.slab.split(sizes), wanted, strict=True)
        return [shaped(piece, shape, dtype) for piece, (shape, dtype) in pieces]

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this memory; on a CPU its device does not tell."""
        return tensor.untyped_storage().data_ptr() == self.slab.untyped_storage().data_ptr()

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
        self.landing: tuple[list, list] = ([], [])
        self.turn, self.group, self.taken = 0, "", 0
        self.arrived: set[str] = set()  # names of the sums that have begun

    def begin(self, name: str, group: str, gradient: Tensor) -> None:
        """Begin to copy a gradient; the caller must let go of it."""
        if group != self.group or any(name == other for other, *_ in self.landing[self.turn]):
            self.turn, self.group, self.taken = 1 - self.turn, group, 0
            self.settle(self.turn)
        landed = shaped(self.slots[self.turn][self.taken :], gradient.shape, gradient.dtype)
        self.taken += gradient.nbytes
        event = self.link.copy_down([(landed, gradient)])
        self.landing[self.turn].append((name, gradient, landed, event))

    def settle(self, turn: int) -> None:
        """Wait until the gradients in one slot are there, and add them to their sums."""
        for name, _, landed, event in self.landing[turn]:
            if event:
                event.synchronize()
            total = self.sums[name]
            if name in self.arrived:
                total.add_(landed)
            else:
                total.copy_(landed)
            self.arrived.add(name)
        self.landing[turn].clear()

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
