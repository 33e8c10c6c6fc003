"""--fsdp: every rank holds some rows of each weight, of its gradient and of its optimizer state.

Of a weight with 65 rows, rank 0 of two holds 33 and rank 1 holds 32, as a DTensor. torch's FSDP2
(`fully_shard`) gathers a block's weights just before it runs and frees them afterwards. Gradients
are averaged over ranks as with DDP, but each rank keeps only its rows. Everything outside the
blocks is gathered as one more group.

    train.py       assemble  `shard` the model: after compiling, before the optimizers
                   backward  `sync_gradients`: only the last micro-batch averages
    optim.py       step      updates `local_rows` in place. Muon gathers whole matrices, of which
                             each rank orthogonalises a share, and applies this rank's rows
    run.py         save      adds clock, settings and versions to the state of the trainer
    checkpoint.py  save      `gather_to_rank0`: rank 0 writes the same file as without --fsdp
                   load      rank 0 reads the file; `scatter_from_rank0` shares its rows out

Every rank must run the same number of forward passes, in evaluation and sampling too; otherwise the
ranks wait for each other. Forward passes need `runtime.autocast()`, because a block gathered in
bf16 receives fp32 inputs.

Papers: Rajbhandari et al., arXiv 1910.02054 (ZeRO, stage 3); Zhao et al., arXiv 2304.11277 (FSDP)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.runtime import Runtime, group_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def shard(model: nn.Module, runtime: Runtime) -> None:
    """Shard a Transformer's parameters across ranks; FSDP replaces the parameter objects.

    Raises: ValueError on a device that FSDP2 does not support
    """
    # Imported here because it takes half a second, which other runs should not wait for.
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(runtime)
    for block in dict.fromkeys(model.h):  # blocks that share weights (--pseudo) are one
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh, mp_policy=precision(runtime))
    # The loss is computed after `forward`, from the head's weights: they stay gathered until then.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def mesh_of(runtime: Runtime) -> "dist.DeviceMesh":
    """Return all ranks as one dimension; a process without torchrun becomes a group of one."""
    kind = runtime.device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--fsdp needs --device cpu or cuda, not {kind}")
    if not dist.is_initialized():
        group = group_of(runtime.device)
        dist.init_process_group(**group, store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh(kind, (runtime.world_size,))


def precision(runtime: Runtime) -> "MixedPrecisionPolicy":
    """Choose the dtype in which a block is gathered; gradients are summed in fp32.

    On a GPU it is the runtime's: bf16 halves the bytes, and autocast rounds matrices to it anyway.
    Norms run in fp32 as with DDP, but from rounded weights. On a CPU it is fp32: autocast would
    give a norm fp32 inputs and bf16 weights, which torch refuses.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if runtime.device.type == "cpu" or runtime.dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(runtime.dtype, torch.float32, cast_forward_inputs=False)


def sync_gradients(model: nn.Module, is_last: bool) -> None:
    """Average gradients over ranks in the backward pass of the last micro-batch only.

    Until then every rank holds whole gradients of every parameter.

    Args: model sharded, or in DistributedDataParallel; for any other this does nothing
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "require_backward_grad_sync"):
        model.require_backward_grad_sync = is_last


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # a method that FSDP2 adds


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode while the block runs."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if is_sharded(model):
            model.reshard()  # FSDP keeps weights outside the blocks gathered for a backward pass


def of_rank0(model: nn.Module, value: Tensor) -> Tensor:
    """Return rank 0's value if the model is sharded, so that all ranks make the same passes."""
    if is_sharded(model):
        dist.broadcast(value, 0)
    return value


# ---- tensors, of which each rank holds some rows


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local_rows(tensor: Tensor) -> Tensor:
    """Return the rows that this rank holds, all of them unless it is a DTensor, without a copy."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def as_dtensor(rows: Tensor, like: Tensor) -> Tensor:
    """Make a DTensor from this rank's rows, sharded as `like` is."""
    from torch.distributed.tensor import DTensor

    whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(rows, like.device_mesh, like.placements, **whole)


def norm_over_ranks(norm: Tensor) -> Tensor:
    """Return the norm of all ranks' rows together, given the norm of this rank's rows."""
    squares = norm.square()
    dist.all_reduce(squares)
    return squares.sqrt()


def gather_to_rank0(tensor: Tensor, runtime: Runtime) -> Tensor:
    """Return a DTensor's rows of all ranks, in host memory, on rank 0; else the tensor as it is.

    Cost: every rank's device holds the whole tensor for a moment
    """
    if not is_dtensor(tensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if runtime.is_rank0 else tensor


def scatter_from_rank0(tensor: Tensor, runtime: Runtime) -> Tensor:
    """Give each rank its rows of rank 0's tensor, as a DTensor on the rank's device.

    Args: tensor elsewhere only its shape and dtype matter
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, mesh_of(runtime), [Shard(0)])
