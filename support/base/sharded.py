"""--fsdp: every rank holds some rows of each weight, its gradient and its optimizer state.

torch's FSDP2 (`fully_shard`) makes each parameter a DTensor. A block's whole weights are gathered
just before it runs and freed after it, and its gradients are averaged over ranks as by DDP, but
each rank keeps only its rows. Blocks are gathered one at a time; the embeddings, which are also the
head, and everything else outside the blocks form one more group.

    join(runtime)                     # a single process forms a group alone
    shard(model, runtime)             # after compiling, before the optimizers
    sync_gradients(model, is_last)    # before the forward pass of each micro-batch

Every rank must run the same number of forward passes, in evaluation and sampling too, or the others
wait for it. Passes run under `runtime.autocast()`, because a block gathered in bf16 gets fp32
inputs.

Without --fsdp ranks never compare their weights: if a gradient is not summed over ranks, they drift
apart silently. `check_agreement` notices.

Papers: Rajbhandari et al., arXiv 1910.02054 (ZeRO, stage 3); Zhao et al., arXiv 2304.11277 (FSDP)
"""

import math
from collections.abc import Callable, Collection
from functools import wraps
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.base.runtime import Runtime, group_of

# Called from outside like `forward`; they too need the weights outside the blocks.
FORWARD_METHODS = ("hidden_states", "losses", "logits", "follows")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def join(runtime: Runtime) -> None:
    """Make a process group of this process alone, unless torchrun has started several."""
    if not dist.is_initialized():
        dist.init_process_group(
            **group_of(runtime.device), store=dist.HashStore(), rank=0, world_size=1
        )


def shard(model: nn.Module, runtime: Runtime) -> None:
    """Spread a Transformer's parameters over the ranks; they are new objects afterwards.

    Raises: ValueError on a device that FSDP2 does not support
    """
    # Imported here because it takes half a second, which other runs should not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = runtime.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--fsdp needs --device cpu or cuda, not {kind}: leave out --fsdp")
    mesh = init_device_mesh(kind, (runtime.world_size,))
    for block in dict.fromkeys(model.h):
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh, mp_policy=precision(runtime))
    fully_shard(model, mesh=mesh)
    gather_around(model, FORWARD_METHODS)


def precision(runtime: Runtime):  # -> MixedPrecisionPolicy
    """The dtype in which a block is gathered; gradients are summed in fp32.

    On a GPU the runtime's dtype: half the bytes, and autocast rounds the matrices to it anyway.
    Norms are computed in fp32 as under DDP, but from rounded weights. On a CPU fp32: there autocast
    would give a norm fp32 inputs and bf16 weights, which torch refuses.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if runtime.device.type == "cpu" or runtime.dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(runtime.dtype, torch.float32, cast_forward_inputs=False)


def gather_around(model: nn.Module, methods: Collection[str]) -> None:
    """Have FSDP gather the group outside the blocks around these methods, as around `forward`.

    They call each other, and `forward` calls some of them. Only the outermost call may gather and
    free: an inner one would free weights that the outer one still needs in the backward pass.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    is_within = False

    def outermost(plain: Callable, gathering: Callable) -> Callable:
        @wraps(plain)
        def call(*args, **more):
            nonlocal is_within
            if is_within:
                return plain(*args, **more)
            is_within = True
            try:
                return gathering(*args, **more)
            finally:
                is_within = False

        return call

    for name in methods:
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, outermost(plain, getattr(model, name)))
    model.forward = outermost(model.forward, model.forward)


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # a method that FSDP2 adds


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def rows_here(tensor: Tensor) -> Tensor:
    """The rows of a parameter that this rank holds (all unless it is sharded), not a copy."""
    return tensor.to_local() if is_shard(tensor) else tensor


def of_rows(rows: Tensor, like: Tensor) -> Tensor:
    """A DTensor of this rank's rows, sharded as `like` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def assign(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Make these tensors a model's weights; those already in place are not copied."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in expected.keys() | weights.keys():
        if name not in weights or weights[name].shape != expected.get(name):
            raise ValueError(f"the checkpoint's weight {name} does not fit the model")
    model.load_state_dict(weights, assign=True)


def norm_over_ranks(norm: Tensor) -> Tensor:
    """The norm of all ranks' rows together, given the norm of this rank's rows."""
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Average gradients over ranks in the next backward pass, or only add them up on each rank.

    Until they are averaged a rank holds whole gradients of every parameter.

    Args: model sharded, or in DistributedDataParallel; in a single process this does nothing
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = is_last


def of_rank0(model: nn.Module, value: Tensor) -> Tensor:
    """Rank 0's value if the model is sharded, so that all ranks go on alike.

    If it differed by a rounding, one rank might end a text where the others go on and wait for it.
    """
    if is_sharded(model):
        dist.broadcast(value, 0)
    return value


def check_agreement(runtime: Runtime, named: dict[str, Tensor]) -> None:
    """Raise ValueError on every rank unless all hold the same bits; name some of the tensors.

    Sharded tensors are left out: no two ranks hold the same rows.

    Cost: one pass over the tensors, and one reduction of two numbers per tensor
    """
    named = {name: tensor for name, tensor in named.items() if rows_here(tensor) is tensor}
    if runtime.world_size == 1 or not named:
        return
    # some may be on the host, but perhaps ranks can reduce only on their devices
    sums = torch.stack([sum_of_bits(t).to(runtime.device) for t in named.values()])  # (n,)
    most = torch.stack([sums, -sums])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    agree = (most[0] == -most[1]).tolist()
    if differ := [name for name, same in zip(named, agree, strict=True) if not same]:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ValueError(f"weights differ between ranks: {', '.join(differ[:3])}{more}")


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The elements as integers, added up."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


def refuse_step(runtime: Runtime, step: int, quantity: str, value: float) -> NoReturn:
    """Stop every rank before an update; name the step and the ranks with a bad value."""
    values = runtime.gather(value)
    ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
    raise ValueError(
        f"the {quantity} is not finite at step {step} on rank {', '.join(ranks)}: the weights were"
        " not updated; begin anew with a lower --lr, perhaps from these weights (--init)"
    )
