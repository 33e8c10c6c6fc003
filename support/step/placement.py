"""What of a training state stays on the device and what lives on the host, within a byte budget.

Pure arithmetic on sizes, which `parts_of` reads off a model. offload.py, which would be too long
with it, carries a placement out and prints one without a run. Counted are weights, their copies in
half precision, gradients, optimizer state and what comes and goes of these; activations are not,
nor what an optimizer takes during its step.

What stands on the device for each parameter of a matrix, in bytes, by how much of it is away:

                  fp32                       bf16, fp16 (autocast)
    nothing       4 + 4 + state              4 + 2 + 4 + state    weight, its cast, gradient, state
    state         4 + 4                      4 + 2 + 4
    gradients     4                          2 in bf16            (4 + 2 in fp16 and outside blocks)
    weights       0                          0

State is 8 with AdamW, 4 with Muon. It leaves first, since it is touched once a step; gradients
second, which are copied once a micro-batch; weights last, which are copied twice a micro-batch, for
the forward and the backward pass. Each kind leaves block by block from the middle outwards, so that
the first and last blocks give the copies time, and only as many as needed. Embeddings and heads
come after all blocks, and their weights never leave, nor do norms and biases. Outside of blocks a
cast is kept only where gradients are away, and two gradients more are there for a while.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import groupby
from typing import NamedTuple

from torch import nn

from support.base.numbers import amount, bytes_of, count

MIB = 2**20


def shown(count: float) -> str:
    """Example: 1.50 GiB"""
    for unit, size in (("GiB", 2**30), ("MiB", MIB), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def budget_bytes(text: str, free: int | None = None) -> int:
    """What 6GiB, 800MB or auto says.

    Args:    free bytes of the device, of which auto takes half: the rest is for activations
    Raises:  ValueError for what is no amount of memory
    Example: budget_bytes("1.5KiB") == 1536, budget_bytes("auto", 3000) == 1500
    """
    if text != "auto":
        return bytes_of("--offload-budget", text)
    if free is None:
        raise ValueError("--offload-budget auto: nobody knows what is free: give bytes")
    return free // 2


class Away(IntEnum):
    """What of a part is on the host; each kind includes those before it."""

    NOTHING = 0
    STATE = 1  # and the fp32 weights, of which the device then has a copy
    GRADIENTS = 2
    WEIGHTS = 3


WHERE = {  # weights, gradients and optimizer state live
    Away.NOTHING: ("device", "device", "device"),
    Away.STATE: ("device", "device", "host"),
    Away.GRADIENTS: ("device", "host", "host"),
    Away.WEIGHTS: ("host", "host", "host"),
}


KINDS = (Away.STATE, Away.GRADIENTS, Away.WEIGHTS)


class Part(NamedTuple):
    """Tensors that leave together: those of a block, or all outside the blocks."""

    name: str
    layers: tuple[int, ...]  # that run the block; () outside
    numel: int  # parameters of its matrices, which may leave
    state_bytes: int  # of the matrices' optimizer
    small: int  # parameters of norms and biases, which stay


class Work(NamedTuple):
    """What a rank does in a step."""

    micro_batch_tokens: int
    micro_batches: int


class Rates(NamedTuple):
    """What a machine does in a second."""

    link: float  # bytes from the host to the device
    flops: float  # of matrix products on the device
    adamw: float  # parameters that the host's AdamW moves


class Traffic(NamedTuple):
    """What a placement adds to a step."""

    to_host: int  # bytes
    to_device: int  # bytes
    flops: int  # of the forward passes that streamed blocks repeat
    on_host: int  # parameters that the host's optimizer moves


@dataclass(frozen=True)
class Placement:
    """For each part, how much of it is away."""

    parts: tuple[Part, ...]
    away: tuple[Away, ...]
    dtype: str  # of the arithmetic: fp32 | bf16 | fp16
    budget: int

    @property
    def layers_away(self) -> list[int]:
        """Layers of whose blocks something is on the host."""
        pairs = zip(self.parts, self.away, strict=True)
        return [layer for part, away in pairs if away for layer in part.layers]

    @property
    def device_bytes(self) -> int:
        return sum(map(self.on_device, self.parts, self.away)) + self.in_passing

    @property
    def host_bytes(self) -> int:
        return sum(map(self.on_host, self.parts, self.away)) + 2 * self.slot_bytes

    def itemsize(self, part: Part, away: Away) -> int:
        """Bytes of one of the device's weights, and of its gradient."""
        narrow = self.dtype == "bf16" and part.layers and away >= Away.GRADIENTS
        return 2 if narrow else 4

    def cast(self, part: Part, away: Away) -> int:
        """Bytes of the copy in half precision that autocast keeps of a weight until backward.

        The embeddings' is the loss's own, and gone when both of `embedding_gradients` are there;
        but where their sum is away, a gradient that is on its way there is beside it.
        """
        if self.dtype == "fp32" or self.itemsize(part, away) == 2:
            return 0
        return 2 if part.layers or away >= Away.GRADIENTS else 0

    def on_device(self, part: Part, away: Away) -> int:
        of_small = part.small * (16 + self.cast(part, Away.NOTHING))
        if away == Away.NOTHING:
            return of_small + part.numel * (8 + self.cast(part, away)) + part.state_bytes
        itemsize = self.itemsize(part, away)
        weight = 0 if away == Away.WEIGHTS else itemsize + self.cast(part, away)
        # of a block that several layers share, backward adds up the gradients on the device
        gradient = itemsize if away < Away.GRADIENTS or len(part.layers) > 1 else 0
        return of_small + part.numel * (weight + gradient)

    def on_host(self, part: Part, away: Away) -> int:
        """fp32 weights and gradients, optimizer state, and weights in bf16 to be copied."""
        if away == Away.NOTHING:
            return 0
        narrow = 2 if self.itemsize(part, away) == 2 else 0
        return part.numel * (8 + narrow) + part.state_bytes

    @property
    def slot_bytes(self) -> int:
        """Of the largest part's gradients as they come from the device."""
        return max(self._matrices(Away.STATE), default=0)

    @property
    def what_passes(self) -> str:
        return "of two blocks at a time, two gradients of the embeddings"

    @property
    def in_passing(self) -> int:
        """Of what comes and goes: gradients and streamed weights, of two blocks at a time each."""
        gradients = max(self._matrices(Away.GRADIENTS, of_blocks=True), default=0)
        weights = max(self._matrices(Away.WEIGHTS, with_cast=True), default=0)
        return 2 * gradients + 2 * weights + self.embedding_gradients

    @property
    def embedding_gradients(self) -> int:
        """The loss's gradient by the tied embedding, which waits for the end of the backward pass,
        and the input's, which is added to it there; besides the sum over earlier micro-batches.
        """
        return 2 * 4 * sum(part.numel for part in self.parts if not part.layers)

    def _matrices(
        self, least: Away, with_cast: bool = False, of_blocks: bool = False
    ) -> Iterator[int]:
        """Bytes of the matrices of each part of which at least so much is away."""
        for part, away in zip(self.parts, self.away, strict=True):
            if away >= least and (part.layers or not of_blocks):
                cast = self.cast(part, away) if with_cast else 0
                yield part.numel * (self.itemsize(part, away) + cast)

    # ---- what it costs

    def traffic(self, work: Work) -> Traffic:
        """Gradients home once a step, or once a micro-batch; weights back once a step, or as often
        as `fetches` says.

        Example: a block of 100 parameters in fp32, 2 micro-batches of 10 tokens. STATE: 400 bytes
                 each way. GRADIENTS: 800 home, 400 back. WEIGHTS: 800 home, 400 back, 4,000 FLOPs;
                 of three such blocks 3,600 back
        """
        to_host = to_device = flops = on_host = 0
        for part, away in zip(self.parts, self.away, strict=True):
            if away == Away.NOTHING:
                continue
            matrices = part.numel * self.itemsize(part, away)
            uses = len(part.layers) * work.micro_batches
            is_streamed = away == Away.WEIGHTS
            to_host += matrices * (work.micro_batches if away >= Away.GRADIENTS else 1)
            to_device += matrices * (self.fetches(part, work.micro_batches) if is_streamed else 1)
            flops += 2 * part.numel * work.micro_batch_tokens * uses if is_streamed else 0
            on_host += part.numel
        return Traffic(to_host, to_device, flops, on_host)

    def fetches(self, part: Part, micro_batches: int) -> int:
        """How often a step copies a part's weights to the device, which stay on the host.

        Twice a micro-batch for each layer, but the weights of the last one stay there from the
        forward to the backward pass, and those of the first one until the next micro-batch.
        """
        pairs = zip(self.parts, self.away, strict=True)
        layers = [n for other, away in pairs if away == Away.WEIGHTS for n in other.layers]
        last, first = max(layers) in part.layers, min(layers) in part.layers
        return (2 * len(part.layers) - last - first) * micro_batches + first

    def break_even_tokens(self, rates: Rates) -> float:
        """The micro-batch whose forward pass through a block takes as long as the block's copy.

        A weight is 2 bytes in bf16 and otherwise 4, and costs 2 FLOPs a token.

        Example: 140 TFLOP/s, 25 GB/s, bf16: 5,600 tokens
        """
        return (2 if self.dtype == "bf16" else 4) / 2 * rates.flops / rates.link


def part_of(name: str) -> str:
    """Example: h.3.mlp.c_fc.weight is of h.3, wte.weight of what is outside"""
    return ".".join(name.split(".")[:2]) if name.startswith("h.") else "outside"


def grouped(model: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """A model's parameters by part and name; a block that layers share is there once."""
    parts: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault(part_of(name), {})[name] = parameter
    return parts


def parts_of(model: nn.Module, muon: bool) -> tuple[Part, ...]:
    """The sizes of a model, which may be on the meta device.

    Args: muon whether the blocks' matrices are Muon's, with 4 bytes of state for AdamW's 8
    """
    parts = []
    for name, parameters in grouped(model).items():
        of_block = model.h[int(name[2:])] if name != "outside" else None
        layers = tuple(layer for layer, block in enumerate(model.h) if block is of_block)
        numel = sum(p.numel() for p in parameters.values() if p.ndim > 1)
        small = sum(p.numel() for p in parameters.values() if p.ndim < 2)
        parts.append(Part(name, layers, numel, numel * (4 if muon and layers else 8), small))
    return tuple(parts)


def moves(parts: tuple[Part, ...], kinds: Sequence[Away] = KINDS) -> list[tuple[int, Away]]:
    """The order of leaving, as (number of the part, what of it is away then).

    Example: three blocks and the rest: 1 0 2 with STATE, with GRADIENTS, with WEIGHTS, then 3 with
             STATE, with GRADIENTS
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
    kinds: Sequence[Away] = KINDS,
    host_bytes: int | None = None,
    ranks: int = 1,
    make: Callable[..., Placement] = Placement,
) -> Placement:
    """Send as much to the host as it takes for the device to have room for the rest.

    Args:    budget     bytes on the device
             kinds      how much may leave
             host_bytes free on this machine; None if nobody knows
             ranks      of the run on this machine: each needs its own
             make       of (parts, away, dtype, budget)
    Raises:  ValueError for a budget that is too small, naming the least that works, and for a host
             that is
    Cost:    for L blocks, L^2 sums
    """
    away = [Away.NOTHING] * len(parts)
    tried = [make(parts, tuple(away), dtype, budget)]
    for number, kind in moves(parts, kinds):
        away[number] = kind
        tried.append(replace(tried[0], away=tuple(away)))
    found = next((placement for placement in tried if placement.device_bytes <= budget), None)
    if found is None:
        least = min(tried, key=lambda placement: placement.device_bytes)
        largest = max((part for part in parts if part.layers), key=lambda part: part.numel)
        only = "with several ranks only optimizer state leaves; " * (Away.WEIGHTS not in kinds)
        raise ValueError(
            f"--offload-budget {shown(budget)} is too small: {only}what stays, and the largest"
            f" block ({largest.name}, {largest.numel + largest.small:,} parameters) as it passes"
            f" through, need {math.ceil(least.device_bytes / MIB)}MiB: the smallest that works"
        )
    needed = found.host_bytes * ranks
    if host_bytes is not None and needed > host_bytes:
        raise ValueError(
            f"--offload-budget {shown(budget)} needs {shown(needed)} of host memory, and"
            f" {shown(host_bytes)} are free: {shown(needed - host_bytes)} are missing: choose a"
            " larger budget, fewer ranks on this machine, or a machine with more memory; where"
            " memory grows with its use, say with --offload-host-memory how far"
        )
    return found


# ---- sharded placement
#
# What of a model whose shards are spread over ranks lives on the host: --fsdp with --offload.
#
# FSDP2 (its CPUOffloadPolicy) knows one kind of leaving, whole blocks: a rank's rows of a block's
# weights, their gradients and the optimizer's state are on the host. The rows come to the device
# when the block is to be made whole, for its forward and for its backward pass, and its gradients
# leave once they are summed over ranks, with every micro-batch. Blocks leave from the middle
# outwards; what is outside of them stays, as it does in support/step/placement.py.
#
# What a rank holds besides its rows does not depend on where those are, and is counted as FSDP2
# keeps it: two blocks whole and the buffer through which the second comes, one block's gradients
# and the fp32 copy of them that is summed; and of what is outside, weights and gradients and such a
# copy.


@dataclass(frozen=True)
class ShardedPlacement(Placement):
    """For each block, whether a rank's rows of it are on the host. Bytes are those of one rank.

    Args: ranks that share each parameter
    """

    ranks: int

    def itemsize(self, part: Part, away: Away) -> int:
        """Bytes of a weight that travels between the host and the device."""
        return 4

    def on_device(self, part: Part, away: Away) -> int:
        return 0 if away else self.of_rank(8 * part.numel + part.state_bytes)

    def on_host(self, part: Part, away: Away) -> int:
        return self.of_rank(8 * part.numel + part.state_bytes) if away else 0

    @property
    def slot_bytes(self) -> int:
        return 0

    @property
    def what_passes(self) -> str:
        return "what is whole: two blocks, and all outside"

    @property
    def in_passing(self) -> int:
        """What is whole for a while: the largest block, and all outside of blocks."""
        block = max((part.numel for part in self.parts if part.layers), default=0)
        outside = sum(part.numel for part in self.parts if not part.layers)
        weight, summed = (4 if self.dtype == "fp32" else 2), 4
        two_and_a_buffer, gradient = 3 * weight, weight + summed
        return block * (two_and_a_buffer + gradient) + outside * (4 + 4 + summed)

    @property
    def embedding_gradients(self) -> int:
        """None besides: at that time none of the others that are whole is there."""
        return 0

    def of_rank(self, count: int) -> int:
        return -(-count // self.ranks)

    def fetches(self, part: Part, micro_batches: int) -> int:
        """For the forward and for the backward pass; FSDP2 keeps no block between them."""
        return 2 * len(part.layers) * micro_batches

    def traffic(self, work: Work) -> Traffic:
        """A rank's rows, twice a use to the device; their gradients home with each micro-batch."""
        whole = super().traffic(work)
        of_rank = [self.of_rank(n) for n in (whole.to_host, whole.to_device, whole.on_host)]
        return Traffic(of_rank[0], of_rank[1], 0, of_rank[2])  # nothing is computed twice

    def break_even_tokens(self, rates: Rates) -> float:
        """A rank's micro-batch, against the copy of its rows; what it costs to gather is not known.

        Example: 140 TFLOP/s, 25 GB/s, 8 ranks: 1,400 tokens
        """
        return 4 / self.ranks / 2 * rates.flops / rates.link


def place_shards(
    parts: tuple[Part, ...],
    budget: int,
    dtype: str,
    host_bytes: int | None,
    ranks_here: int,
    ranks: int,
) -> ShardedPlacement:
    """As `place`, of blocks that leave whole: norms and biases go with their block's matrices.

    Args:   ranks_here of the run on this machine
            ranks      of the run
    Raises: ValueError as `place` does
    """
    blocks = tuple(
        Part(part.name, part.layers, part.numel + part.small, part.state_bytes + 8 * part.small, 0)
        for part in parts
    )
    make = partial(ShardedPlacement, ranks=ranks)
    return place(blocks, budget, dtype, (Away.WEIGHTS,), host_bytes, ranks_here, make)


# ---- placement table
#
# A placement (support/step/placement.py) in words: what lives where and why, and what it costs.


WHY = {
    Away.NOTHING: "the budget has room for it",
    Away.STATE: "state leaves first: touched once a step",
    Away.GRADIENTS: "gradients next: copied once a micro-batch",
    Away.WEIGHTS: "weights last: copied twice a micro-batch",
}
OUTSIDE = "embeddings, heads: after all blocks"
HEAD = ("", "parameters", "weights", "gradients", "state", "on device", "on host", "why")


def table(placement: Placement) -> str:
    """One line for neighbours that fare alike, then what stays, the copies and the sum."""
    rows = [HEAD]
    pairs = zip(placement.parts, placement.away, strict=True)
    for (away, is_block), found in groupby(pairs, lambda pair: (pair[1], bool(pair[0].layers))):
        parts = [part._replace(small=0) for part, _ in found]
        name = named(parts)
        on_device = sum(placement.on_device(part, away) for part in parts)
        on_host = sum(placement.on_host(part, away) for part in parts)
        why = WHY[away] if is_block or not away else OUTSIDE
        rows.append(row(name, sum(part.numel for part in parts), away, on_device, on_host, why))
    smalls = [part._replace(numel=0, state_bytes=0) for part in placement.parts]
    small = sum(part.small for part in smalls)
    on_device = sum(placement.on_device(part, Away.NOTHING) for part in smalls)
    why = "small, and used all the time"
    if small:
        rows.append(row("norms, biases", small, Away.NOTHING, on_device, 0, why))
    passing, slots = shown(placement.in_passing), shown(2 * placement.slot_bytes)
    rows.append(("copies on the way", "", "", "", "", passing, slots, placement.what_passes))
    total = small + sum(part.numel for part in placement.parts)
    held = shown(placement.device_bytes), shown(placement.host_bytes)
    rows.append(("in all", f"{total:,}", "", "", "", *held, f"budget: {shown(placement.budget)}"))
    form = "{:<17} {:>13} {:>7} {:>9} {:>6} {:>11} {:>11}  {}"
    return "\n".join(form.format(*cells).rstrip() for cells in rows)


def named(parts: list[Part]) -> str:
    """Example: h.3; h.0 to h.5; 3 of h.0 to h.5, where the other layers are not there yet"""
    first, last = parts[0], parts[-1]
    if first is last:
        return first.name
    span = f"{first.name} to {last.name}"
    layers = [part.layers[0] for part in parts]
    return span if len(parts) == layers[-1] - layers[0] + 1 else f"{len(parts)} of {span}"


def row(name: str, numel: int, away: Away, on_device: int, on_host: int, why: str) -> tuple:
    return (name, f"{numel:,}", *WHERE[away], shown(on_device), shown(on_host), why)


def price(placement: Placement, work: Work, rates: Rates) -> str:
    """What a step pays for it, in bytes and seconds, and whether fetched weights can hide."""
    cost = placement.traffic(work)
    home, back = (f"{shown(n)} ({n / rates.link:.3g} s)" for n in (cost.to_host, cost.to_device))
    moved = f"{cost.on_host:,} parameters ({cost.on_host / rates.adamw:.3g} s of AdamW)"
    said = (
        f"a step of {work.micro_batches:,} micro-batches copies {home} to the host and {back} to"
        f" the device,\n  and moves {moved} on the host"
    )
    if Away.WEIGHTS not in placement.away:
        return said
    again = f"{cost.flops:.3g} FLOPs ({cost.flops / rates.flops:.3g} s)"
    least, tokens = placement.break_even_tokens(rates), work.micro_batch_tokens
    hides = "is hidden behind" if tokens >= least else "takes longer than"
    return (
        f"{said}, and computes {again} once more\n"
        f"a micro-batch has {tokens:,} tokens, break-even is {least:,.0f}"
        f" ({rates.flops:.3g} FLOP/s, {rates.link:.3g} bytes/s):\n"
        f"  copying a block's weights {hides} computing with them"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The placement that is asked for, and what is known of a machine that is not this one."""
    parser.add_argument("--budget", required=True, help="device memory: 6GiB, 800MB, auto")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--micro-batch-tokens", type=count, help="at once (default: a row)")
    parser.add_argument("--link", type=amount, help="bytes/s to the device (default: measured)")
    parser.add_argument("--flops", type=amount, help="FLOP/s on the device (default: measured)")


def show(args: argparse.Namespace, placement: Placement, here: Rates) -> None:
    rates = here._replace(link=args.link or here.link, flops=args.flops or here.flops)
    tokens = args.micro_batch_tokens or args.seq_len
    print(f"{table(placement)}\n")
    print(price(placement, Work(tokens, -(-args.batch_tokens // tokens)), rates))
