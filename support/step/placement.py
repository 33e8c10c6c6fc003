"""Which parts of a training state stay on the device and which go to the host, by a byte budget.

Pure arithmetic on sizes: `parts_of` reads them off a model, `place` decides, `describe` prints the
decision and its price. A decision is a `Placement`. It is carried out by `Offload.move`
in offload.py, whose head walks through an example. Counted are weights, their copies in half
precision, gradients, optimizer state, and copies on their way. Not counted are activations, and
what an optimizer needs during its step.

Optimizer state, 8 bytes a parameter with AdamW and 4 with Muon, leaves first, because a step
touches it once; then gradients, which are copied once a micro-batch; then weights, which are copied
twice a micro-batch, for the forward and the backward pass. Each kind leaves block by block from the
middle outwards, so that the first and last blocks give the copies time, and no more blocks leave
than necessary. Embeddings and heads follow after all blocks. Their weights never leave, nor do
norms and biases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

from torch import nn

from support.optim import state_bytes

MIB = 2**20


def shown(count: float) -> str:
    """Example: 1.50 GiB"""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


# ---- what there is, and how much of it is away


class Away(IntEnum):
    """What of a part is on the host; each kind includes those before it."""

    NOTHING = 0
    STATE = 1  # and the fp32 weights, of which the device then has a copy
    GRADIENTS = 2
    WEIGHTS = 3


KINDS = (Away.STATE, Away.GRADIENTS, Away.WEIGHTS)

# Bytes on the device for each parameter of a block's matrices, optimizer state not counted, when
# nothing, state, gradients or weights are away. Weight and gradient have 4 bytes each; in bf16,
# once gradients are away, 2. Autocast keeps a copy of 2 bytes of each fp32 weight until backward.
BLOCK_BYTES = {"fp32": (8, 8, 4, 0), "bf16": (10, 10, 2, 0)}
# Outside of blocks: the embeddings' copy belongs to the loss, and is gone when both
# `embedding_gradients` are there; but a gradient on its way to a sum on the host takes as much.
OUTSIDE_BYTES = {"fp32": (8, 8, 4), "bf16": (8, 8, 6)}


class Part(NamedTuple):
    """Tensors that leave together: those of a block, or all outside the blocks."""

    name: str
    layers: tuple[int, ...]  # that run the block; () outside
    numel: int  # parameters of its matrices, which may leave
    state_bytes: int  # of the matrices' optimizer
    small: int  # parameters of norms and biases, which stay
    away: Away = Away.NOTHING  # what of its matrices is on the host
    head: int = 0  # parameters of a head that is not tied to the embedding


def part_of(name: str) -> str:
    """Example: h.3.mlp.c_fc.weight belongs to h.3, wte.weight to "outside" """
    return ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"


def grouped(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """A model's parameters by part and name; a block that layers share appears once."""
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(part_of(name), {})[name] = parameter
    return parts


def parts_of(model: nn.Module, muon: bool) -> tuple[Part, ...]:
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
            head=matrices["lm_head.weight"].numel() if "lm_head.weight" in matrices else 0,
        )
        parts.append(part)
    return tuple(parts)


class Traffic(NamedTuple):
    """What a placement adds to a step."""

    to_host: int  # bytes
    to_device: int  # bytes
    flops: int  # of the forward passes that fetched blocks repeat
    on_host: int  # parameters that the host's optimizer updates


@dataclass(frozen=True)
class Placement:
    """All parts, each with what of it is away."""

    parts: tuple[Part, ...]
    dtype: str  # of the arithmetic: fp32 | bf16
    budget: int

    @property
    def streamed(self) -> list[int]:
        """Layers whose weights come to the device for each pass."""
        return [n for part in self.parts if part.away == Away.WEIGHTS for n in part.layers]

    @property
    def device_bytes(self) -> int:
        return sum(map(self.on_device, self.parts)) + self.small_bytes + self.in_passing

    @property
    def host_bytes(self) -> int:
        return sum(map(self.on_host, self.parts)) + 2 * self.slot_bytes

    # device and host

    def itemsize(self, part: Part) -> int:
        """Bytes of one of the device's weights, and of its gradient."""
        narrow = self.dtype == "bf16" and part.layers and part.away >= Away.GRADIENTS
        return 2 if narrow else 4

    def bytes_each(self, part: Part, away: Away) -> int:
        return (BLOCK_BYTES if part.layers else OUTSIDE_BYTES)[self.dtype][away]

    def on_device(self, part: Part) -> int:
        """Bytes of a part's matrices that stay on the device."""
        each = self.bytes_each(part, part.away)
        if part.away >= Away.GRADIENTS and len(part.layers) > 1:
            each += self.itemsize(part)  # layers that share a block add up gradients here
        return part.numel * each + (0 if part.away else part.state_bytes)

    def on_host(self, part: Part) -> int:
        """fp32 weights and gradients, optimizer state, and a bf16 copy of weights to send."""
        if not part.away:
            return 0
        narrow = 2 if self.itemsize(part) == 2 else 0
        return part.numel * (8 + narrow) + part.state_bytes

    @property
    def small_bytes(self) -> int:
        """Norms and biases, and AdamW's state of them."""
        return sum(part.small * (self.bytes_each(part, Away.NOTHING) + 8) for part in self.parts)

    # copies

    def matrix_bytes(self, part: Part) -> int:
        """One copy of a part's matrices, or of their gradients, as it travels."""
        return part.numel * self.itemsize(part)

    @property
    def slot_bytes(self) -> int:
        """Host memory where the gradients of any part can land."""
        return max((self.matrix_bytes(part) for part in self.parts if part.away), default=0)

    @property
    def in_passing(self) -> int:
        """Gradients that leave and weights that arrive, of two blocks at a time each."""
        blocks = [part for part in self.parts if part.layers]
        gradients = [self.matrix_bytes(part) for part in blocks if part.away >= Away.GRADIENTS]
        weight = BLOCK_BYTES[self.dtype][Away.GRADIENTS]  # and its cast
        weights = [part.numel * weight for part in blocks if part.away == Away.WEIGHTS]
        two_blocks = 2 * max(gradients, default=0) + 2 * max(weights, default=0)
        return two_blocks + self.embedding_gradients

    @property
    def embedding_gradients(self) -> int:
        """What comes on top of the sum over earlier micro-batches, which is counted elsewhere.

        The tied embedding has a gradient as the head, which waits for the end of the backward pass,
        and one as the input, which is added there. A head of its own is done with at once; only
        where gradients leave may the embedding's come before the head's is gone.
        """
        outside = [part for part in self.parts if not part.layers]
        tied = sum(2 * part.numel for part in outside if not part.head)
        own = sum(p.numel if p.away >= Away.GRADIENTS else p.head for p in outside if p.head)
        return 4 * (tied + own)

    # what it costs

    def traffic(self, micro_batch_tokens: int, micro_batches: int) -> Traffic:
        """Gradients go to the host once a step, or once a micro-batch if they are away; weights
        come back once a step, or as often as `fetches` says.

        Not counted: a GPU orthogonalises Muon's updates of the host's matrices (`Muon.step` in
        support/optim.py). Once a step 4 bytes of each parameter go there in fp32, and 2 come
        back in bf16.

        Example: a block of 100 parameters in fp32, 2 micro-batches of 10 tokens. STATE: 400 bytes
                 each way. GRADIENTS: 800 to the host, 400 back. WEIGHTS: the same, and 4,000 FLOPs;
                 with three such blocks 3,600 back
        """
        to_host = to_device = flops = on_host = 0
        for part in self.parts:
            if not part.away:
                continue
            size = self.matrix_bytes(part)
            to_host += size * (micro_batches if part.away >= Away.GRADIENTS else 1)
            on_host += part.numel
            if part.away == Away.WEIGHTS:
                to_device += size * self.fetches(part, micro_batches)
                flops += 2 * part.numel * micro_batch_tokens * len(part.layers) * micro_batches
            else:
                to_device += size
        return Traffic(to_host, to_device, flops, on_host)

    def fetches(self, part: Part, micro_batches: int) -> int:
        """How often a step copies a part's weights, which are away, to the device.

        Twice a micro-batch for each layer; but the last layer's weights stay there from the
        forward to the backward pass, and the first layer's until the next micro-batch.
        """
        layers = self.streamed
        is_last, is_first = max(layers) in part.layers, min(layers) in part.layers
        return (2 * len(part.layers) - is_last - is_first) * micro_batches + is_first


# ---- the decision


def order_of_leaving(
    parts: tuple[Part, ...], kinds: Sequence[Away] = KINDS
) -> list[tuple[int, Away]]:
    """The order of leaving, as (number of the part, what of it is away then).

    Example: the outside (part 0) and three blocks: parts 2 1 3 with STATE, with GRADIENTS, with
             WEIGHTS, then 0 with STATE, with GRADIENTS
    """
    blocks = [i for i, part in enumerate(parts) if part.layers]
    outside = [i for i, part in enumerate(parts) if not part.layers]
    middle = (len(blocks) - 1) / 2
    outwards = [blocks[i] for i in sorted(range(len(blocks)), key=lambda i: (abs(i - middle), i))]
    order = [(i, kind) for kind in kinds for i in outwards]
    return order + [(i, kind) for kind in kinds if kind < Away.WEIGHTS for i in outside]


def place(
    parts: tuple[Part, ...],
    budget: int,
    dtype: str,
    *,
    kinds: Sequence[Away] = KINDS,
    host_bytes: int | None = None,
    ranks_here: int = 1,
) -> Placement:
    """Send to the host what the device has no room for, and no more.

    Args:    budget     bytes on the device
             kinds      how much may leave
             host_bytes free on this machine; None if unknown
             ranks_here of the run on this machine: each needs host memory of its own
    Raises:  ValueError for a budget that is too small, naming the smallest that works, and for a
             host that is too small
    Cost:    for L blocks, L^2 sums
    """
    options, placed = [Placement(parts, dtype, budget)], list(parts)
    for number, kind in order_of_leaving(parts, kinds):
        placed[number] = parts[number]._replace(away=kind)
        options.append(Placement(tuple(placed), dtype, budget))
    placement = next((option for option in options if option.device_bytes <= budget), None)
    if placement is None:
        least = min(option.device_bytes for option in options)
        only = "" if Away.WEIGHTS in kinds else "with several ranks only optimizer state leaves; "
        raise ValueError(
            f"--offload-budget {shown(budget)} is too small: {only}the smallest that works is"
            f" {math.ceil(least / MIB)}MiB, for what stays and two blocks as they pass through"
        )
    needed = placement.host_bytes * ranks_here
    if host_bytes is not None and needed > host_bytes:
        raise ValueError(
            f"--offload-budget {shown(budget)} needs {shown(needed)} of host memory and"
            f" {shown(host_bytes)} are free: choose a larger budget or fewer ranks on this machine;"
            " if its memory grows on demand, give the limit with --offload-host-memory"
        )
    return placement


# ---- in words

WHY = {
    Away.NOTHING: "the budget has room for it",
    Away.STATE: "state leaves first: touched once a step",
    Away.GRADIENTS: "gradients next: copied once a micro-batch",
    Away.WEIGHTS: "weights last: copied twice a micro-batch",
}
HEAD = ("", "parameters", "weights", "gradients", "state", "on device", "on host", "why")


def places(away: Away) -> list[str]:
    """Where weights, gradients and optimizer state live."""
    return ["host" if away >= kind else "device" for kind in reversed(KINDS)]


def table(placement: Placement) -> str:
    """One line for neighbours with the same on the host; then norms, copies and the total."""
    rows = [HEAD]
    alike = groupby(placement.parts, key=lambda part: (part.away, bool(part.layers)))
    for (away, is_block), group in alike:
        parts = list(group)
        numel = sum(part.numel for part in parts)
        on_device = shown(sum(map(placement.on_device, parts)))
        on_host = shown(sum(map(placement.on_host, parts)))
        why = WHY[away] if is_block or not away else "embeddings, heads: after all blocks"
        rows.append((span_of(parts), f"{numel:,}", *places(away), on_device, on_host, why))
    small = sum(part.small for part in placement.parts)
    if small:
        sizes = shown(placement.small_bytes), shown(0)
        why = "small, and used all the time"
        rows.append(("norms, biases", f"{small:,}", *places(Away.NOTHING), *sizes, why))
    passing, slots = shown(placement.in_passing), shown(2 * placement.slot_bytes)
    rows.append(
        (
            "copies on the way",
            "",
            "",
            "",
            "",
            passing,
            slots,
            "of two blocks at a time, gradients of embeddings and head",
        )
    )
    total = small + sum(part.numel for part in placement.parts)
    sums = shown(placement.device_bytes), shown(placement.host_bytes)
    rows.append(("in all", f"{total:,}", "", "", "", *sums, f"budget: {shown(placement.budget)}"))
    form = "{:<17} {:>13} {:>7} {:>9} {:>6} {:>11} {:>11}  {}"
    return "\n".join(form.format(*cells).rstrip() for cells in rows)


def span_of(parts: list[Part]) -> str:
    """Example: h.3; h.0 to h.5; 3 of h.0 to h.5 if the other layers are not there yet"""
    first, last = parts[0], parts[-1]
    if first is last:
        return first.name
    span = f"{first.name} to {last.name}"
    is_whole = len(parts) == last.layers[0] - first.layers[0] + 1
    return span if is_whole else f"{len(parts)} of {span}"


def describe(placement: Placement, micro_batch_tokens: int, micro_batches: int) -> str:
    """The table, and what a step of so many micro-batches pays."""
    traffic = placement.traffic(micro_batch_tokens, micro_batches)
    repeats = f", and repeats {traffic.flops:.3g} FLOPs" if traffic.flops else ""
    return (
        f"{table(placement)}\n\n"
        f"a step of {micro_batches:,} micro-batches copies {shown(traffic.to_host)} to the host and"
        f" {shown(traffic.to_device)} to the device,\n  and updates {traffic.on_host:,} parameters"
        f" on the host{repeats}"
    )
