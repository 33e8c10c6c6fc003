"""--fsdp: every rank holds a part of each weight, of its gradient and of its optimizer state.

torch's FSDP2 (`fully_shard`): a parameter is a DTensor of which a rank holds some rows. A block's
whole weights are gathered just before it runs and freed behind it, and its gradients are averaged
over ranks as DDP does, each rank keeping its own rows. What is gathered together is a block; the
embeddings, which are the head as well, and all else outside the blocks are one group more.

    join(runtime)                     # one process is a group of its own
    shard(model, runtime)             # after compiling, before the optimizers
    sync_gradients(model, is_last)    # before the forward pass of each micro-batch

Every rank must run every forward pass, also those of an evaluation or a sample, and as many: one
that leaves a pass out keeps the others waiting. The passes run under `runtime.autocast()`, because
a block that was gathered in bf16 meets fp32 inputs.

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

# Called from outside as `forward` is, and in need of what stands outside the blocks.
FORWARD_METHODS = ("hidden_states", "losses", "logits", "follows")


def join(runtime: Runtime) -> None:
    """Make a process group of this process alone, where torchrun has not started several."""
    if not dist.is_initialized():
        how = group_of(runtime.device)
        dist.init_process_group(**how, store=dist.HashStore(), rank=0, world_size=1)


def shard(model: nn.Module, runtime: Runtime, offloaded: Collection[int] = ()) -> None:
    """Spread a Transformer's parameters over the ranks; they are other objects afterwards.

    Args:   offloaded layers whose rows, gradients and optimizer state are in host memory; a block
                      that several layers share is there if all of them are named
    Raises: ValueError on a device that FSDP2 does not know
    """
    # Here, because it takes half a second that no other run should wait.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    kind = runtime.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--fsdp needs --device cpu or cuda, not {kind}: leave out --fsdp")
    mesh = init_device_mesh(kind, (runtime.world_size,))
    in_host = CPUOffloadPolicy(pin_memory=kind == "cuda")
    layers_of: dict[nn.Module, list[int]] = {}
    for layer, block in enumerate(model.h):
        layers_of.setdefault(block, []).append(layer)
    for block, layers in layers_of.items():
        if next(block.parameters(), None) is not None:
            where = in_host if set(layers) <= set(offloaded) else OffloadPolicy()
            fully_shard(block, mesh=mesh, mp_policy=precision(runtime), offload_policy=where)
    fully_shard(model, mesh=mesh)
    model.offloaded = frozenset(offloaded)
    gather_around(model, FORWARD_METHODS)


def precision(runtime: Runtime):  # -> MixedPrecisionPolicy
    """What a block is gathered in; its gradients are summed in fp32, over micro-batches and ranks.

    On a GPU the runtime's dtype: half the bytes, and autocast rounds the matrices to it anyway.
    Norms are computed in fp32 as under DDP, but from rounded weights. On a CPU fp32: there autocast
    would leave a norm with fp32 inputs and bf16 weights, which torch refuses.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    rounds = runtime.device.type == "cuda" and runtime.dtype != torch.float32
    if not rounds:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(runtime.dtype, torch.float32, cast_forward_inputs=False)


def gather_around(model: nn.Module, methods: Collection[str]) -> None:
    """Have FSDP gather the model's own group around these methods as it does around `forward`.

    They call each other, and `forward` calls some of them. Only the outermost call may gather and
    free: an inner one would free in the backward pass what the outer one still needs.
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
    return hasattr(model, "set_requires_gradient_sync")  # FSDP2 gives it this method


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def rows_here(tensor: Tensor) -> Tensor:
    """The rows of a parameter that this rank holds, not a copy: all, unless it is sharded."""
    return tensor.to_local() if is_shard(tensor) else tensor


def shard_of(whole: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """This rank's rows of a whole tensor, a DTensor as `like` is; nothing is communicated."""
    mesh = like.device_mesh
    chunks = (*whole.chunk(mesh.size()), *[whole[:0]] * mesh.size())  # the last ranks may have none
    return of_rows(chunks[mesh.get_local_rank()].to(device, copy=True), like)


def space_for(outlined: Tensor, like: Tensor | None, device: torch.device) -> Tensor:
    """Memory for a tensor on the meta device: for all of it, on the host; or, with `like`, for this
    rank's rows, a DTensor as `like` is on `device`.
    """
    if like is None:
        return torch.empty_like(outlined, device="cpu")
    return of_rows(torch.empty_like(like.to_local(), dtype=outlined.dtype, device=device), like)


def of_rows(rows: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    size = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, **size)


def assign(model: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Make these a model's weights, without a copy of those that are where they belong.

    FSDP wants the rows of a block that is offloaded on the host, and all others on `device`.
    Weights of a model that is not sharded may be anywhere.
    """
    if is_sharded(model):
        away = tuple(f"h.{layer}." for layer in model.offloaded)
        weights = {
            name: rows.to("cpu" if name.startswith(away) else device)
            for name, rows in weights.items()
        }
    model.load_state_dict(weights, assign=True)


def norm_over_ranks(norm: Tensor) -> Tensor:
    """The norm of all ranks' rows together, of the norm of each rank's."""
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Average gradients over ranks in the next backward pass, or only add them up on each rank.

    Until they are averaged a rank holds whole gradients of every parameter. Where shards are
    offloaded there is no room for that, and every micro-batch's are averaged.

    Args: model sharded, or in DistributedDataParallel; one of a single process needs nothing
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last or bool(model.offloaded))
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = is_last


def of_rank0(model: nn.Module, value: Tensor) -> Tensor:
    """Rank 0's value, where the model is sharded: what follows from it is then alike on all ranks.

    If it differed by a rounding, one rank would end a text where the others go on, and they would
    wait for it.
    """
    if is_sharded(model):
        dist.broadcast(value, 0)
    return value


# ---- agreement
#
# Whether all ranks hold the same numbers, and which of them have seen one that is not finite.
#
# Data-parallel ranks never compare their weights: once these differ, by a gradient that was not
# summed over ranks, they drift apart and nothing says so.


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
