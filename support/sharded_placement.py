"""What of a model whose shards are spread over ranks lives on the host: --fsdp with --offload.

FSDP2 (its CPUOffloadPolicy) knows one kind of leaving, whole blocks: a rank's rows of a block's
weights, their gradients and the optimizer's state are on the host. The rows come to the device when
the block is to be made whole, for its forward and for its backward pass, and its gradients leave
once they are summed over ranks, with every micro-batch. Blocks leave from the middle outwards; what
is outside of them stays, as it does in support/placement.py.

What a rank holds besides its rows does not depend on where those are, and is counted as FSDP2 keeps
it: two blocks whole and the buffer through which the second comes, one block's gradients and the
fp32 copy of them that is summed; and of what is outside, weights and gradients and such a copy.
"""

from dataclasses import dataclass
from functools import partial

from support.placement import Away, Part, Placement, Rates, Traffic, Work, place


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
