"""Whether all ranks hold the same numbers, and which of them have seen one that is not finite.

Data-parallel ranks never compare their weights: once these differ, by a gradient that was not
summed over ranks, they drift apart and nothing says so.
"""

import math
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from support.runtime import Runtime
from support.sharded import rows_here

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_agreement(runtime: Runtime, named: dict[str, Tensor]) -> None:
    """Raise ValueError on every rank unless all hold the same bits; name some of the tensors.

    Tensors that are sharded over ranks, of which nobody holds another's rows, are left out.

    Cost: one pass over the tensors, and two sums of a number for each, whatever the ranks are
    """
    named = {name: tensor for name, tensor in named.items() if rows_here(tensor) is tensor}
    if runtime.world_size == 1 or not named:
        return
    # some may be on the host, and ranks may be able to sum on their devices alone
    sums = [sum_of_bits(tensor).to(runtime.device) for tensor in named.values()]
    sums = torch.stack(sums)  # (n,)
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    differ = [
        name for name, equal in zip(named, (least == most).tolist(), strict=True) if not equal
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ValueError(f"weights differ between ranks: {', '.join(differ[:3])}{more}")


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The elements as integers, added up."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


def refuse_step(runtime: Runtime, step: int, what: str, value: float) -> NoReturn:
    """Stop every rank before the weights move; name the step and the ranks that saw it."""
    values = runtime.gather(value)
    ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
    raise ValueError(
        f"the {what} is not finite at step {step} on rank {', '.join(ranks)}: the weights were not"
        " updated; start a new run with a lower --lr"
    )
