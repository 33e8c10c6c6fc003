"""--fsdp: every rank holds some rows of each weight, of its gradient and of its optimizer state.

torch's FSDP2 (`fully_shard`) makes each parameter a DTensor. A block's whole weights are gathered
just before it runs and freed afterwards. Its gradients are averaged over ranks as with DDP, but
each rank keeps only its rows. Blocks are gathered one at a time; everything outside them, such as
the embeddings, forms one more group.

    shard(model, runtime)             # after compiling, before the optimizers
    sync_gradients(model, is_last)    # before the forward pass of each micro-batch

Every rank must run the same number of forward passes, in evaluation and sampling too; otherwise the
ranks wait for each other. Forward passes need `runtime.autocast()`, because a block gathered in
bf16 receives fp32 inputs.

Papers: Rajbhandari et al., arXiv 1910.02054 (ZeRO, stage 3); Zhao et al., arXiv 2304.11277 (FSDP)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.runtime import Runtime, group_of


def shard(model: nn.Module, runtime: Runtime) -> None:
    """Shard a Transformer's parameters across ranks; FSDP replaces the parameter objects.

    Raises: ValueError on a device that FSDP2 does not support
    """
    # Imported here because it takes half a second, which other runs should not wait for.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = runtime.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--fsdp needs --device cpu or cuda, not {kind}: leave out --fsdp")
    if not dist.is_initialized():  # not started by torchrun: make a group of one process
        dist.init_process_group(
            **group_of(runtime.device), store=dist.HashStore(), rank=0, world_size=1
        )
    mesh = init_device_mesh(kind, (runtime.world_size,))
    for block in dict.fromkeys(model.h):
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh, mp_policy=precision(runtime))
    fully_shard(model, mesh=mesh)


def precision(runtime: Runtime):  # -> MixedPrecisionPolicy
    """Choose the dtype in which a block is gathered; gradients are summed in fp32.

    On a GPU it is the runtime's dtype: bf16 halves the bytes, and autocast rounds the matrices to
    it anyway. Norms are computed in fp32 as with DDP, but from rounded weights. On a CPU it is
    fp32, because autocast would give a norm fp32 inputs and bf16 weights, which torch refuses.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if runtime.device.type == "cpu" or runtime.dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(runtime.dtype, torch.float32, cast_forward_inputs=False)


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # a method that FSDP2 adds


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; restore its previous mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if is_sharded(model):
            model.reshard()  # FSDP keeps weights outside the blocks gathered for a backward pass


def is_shard(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def rows_here(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a parameter, all of them unless it is sharded, without a copy."""
    return tensor.to_local() if is_shard(tensor) else tensor


def as_dtensor(rows: Tensor, like: Tensor) -> Tensor:
    """Make a DTensor from this rank's rows, sharded as `like` is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def norm_over_ranks(norm: Tensor) -> Tensor:
    """Return the norm of all ranks' rows together, given the norm of this rank's rows."""
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Choose whether the next backward pass averages gradients over ranks or only accumulates.

    Until they are averaged, every rank holds whole gradients of every parameter.

    Args: model   sharded, or in DistributedDataParallel; for any other this does nothing
          is_last whether it is the step's last micro-batch, whose backward pass averages
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = is_last


def of_rank0(model: nn.Module, value: Tensor) -> Tensor:
    """Return rank 0's value if the model is sharded, so that all ranks continue alike.

    If values differed by a rounding error, one rank might end a text while the others continue and
    wait for it.
    """
    if is_sharded(model):
        dist.broadcast(value, 0)
    return value
