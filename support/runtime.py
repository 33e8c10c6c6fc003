"""The ranks of a run, and the device and dtype that they compute in: from one CPU to many GPUs.

    runtime = start("auto", "auto")      # choose a device and join the other ranks, if any
    runtime.on_rank0(folder.mkdir)       # the others wait; an error reaches all of them
    loss = runtime.reduce(loss)          # the sum over ranks

Elsewhere only copies, kernels and the micro-batch size depend on the device. Sharding (--fsdp) is
in fsdp.py. Without it, torch does not notice if a gradient is not summed over ranks and their
weights drift apart; `check_agreement` does.

In reading order: how a process starts, what ranks do together, whether they agree.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.triton_here import why_not
from support.process import MISTAKES, host_free, keep_freed_memory, one_line, print_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# How long ranks wait for one that does not answer. A killed rank is noticed immediately. The
# longest healthy wait is for rank 0 to write a checkpoint: 16 GB (1.3B with AdamW) at 100 MB/s take
# 160 s.
TIMEOUT = timedelta(minutes=5)
# How long ranks wait until all have started, on one machine, where they start together. On several
# it is TIMEOUT.
MEETING = timedelta(minutes=1)
Value = TypeVar("Value")


# ---- how a process starts


def start(device: str, dtype: str, timeout: timedelta | None = None) -> "Runtime":
    """Choose device and dtype, and join the other ranks, if torchrun started any.

    Args:   timeout how long ranks wait for each other (default: TIMEOUT)
    Raises: ValueError naming --device if this machine has no such device
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device)
    kind = chosen.type
    if kind == "cuda":
        torch.cuda.set_device(chosen)
        torch.set_float32_matmul_precision("high")  # TF32 for fp32 matrix products
    if kind == "cpu":
        keep_freed_memory()
    if dtype == "auto":
        # GPUs older than Ampere only emulate bf16.
        has_bf16 = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bf16" if has_bf16 else "fp32"
    if world_size > 1 and not dist.is_initialized():
        join_ranks(rank, world_size, chosen, timeout or TIMEOUT)
    asked = "auto" if device == "auto" else "as asked"
    if kind == "mps":
        asked += ", untried: nobody has trained on one yet"
    ranks = f"{world_size} processes" if world_size > 1 else "one process"
    why = f"{kind} ({asked}), {dtype}, {ranks}, {torch.get_num_threads()} threads"
    if kind == "cuda":
        missing = why_not(kind)
        why += f"; no Triton kernels: {missing}" if missing else "; Triton kernels"
    return Runtime(rank, world_size, chosen, DTYPES[dtype], why, device_free(chosen), host_free())


def choose_device(name: str) -> torch.device:
    """Return this rank's device; auto takes a CUDA GPU if there is one, else the CPU."""
    is_here = {"cuda": torch.cuda.is_available(), "cpu": True, "mps": torch.mps.is_available()}
    found = [kind for kind in is_here if is_here[kind]]
    kind = found[0] if name == "auto" else name
    if kind not in found:
        raise ValueError(f"--device {name}: torch finds only {', '.join(found)} here")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) if kind == "cuda" else None)


def join_ranks(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    meeting = MEETING if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost") else TIMEOUT
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=meeting))
        dist.init_process_group(
            # torchrun keeps this store when it restarts ranks, with the addresses of the dead ones,
            # so every attempt gets a prefix.
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            **group_of(device),
        )
    except dist.DistError as error:
        line = f"error: rank {rank} waits for all {world_size} ranks no longer"
        sys.exit(f"{line}: {one_line(error)}")


def group_of(device: torch.device) -> dict[str, str | torch.device]:
    """Return the arguments of init_process_group: with GPUs, gloo serves tensors on the host.

    NCCL connects at once if it is told this rank's GPU, and a barrier need not guess the device.
    """
    if device.type == "cuda":
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


def device_free(device: torch.device) -> int | None:
    """Return the bytes of memory available on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free() if device.type == "cpu" else None


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a host tensor to a device; do not wait until a GPU has received it."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # A GPU reads page-locked memory by itself. Any other memory the driver copies first, and only
    # after the GPU has finished all its queued work.
    return tensor.pin_memory().to(device, non_blocking=True)


def made_by(runtime: "Runtime") -> dict[str, str]:
    """Return what the last bits of a result depend on, besides settings and data."""
    dtype = str(runtime.dtype).removeprefix("torch.")
    about = {"torch": str(torch.__version__), "device": runtime.device.type, "dtype": dtype}
    if runtime.device.type == "cuda":
        return about | {"device": torch.cuda.get_device_name(runtime.device)}
    return about | {"threads": str(torch.get_num_threads())}


# ---- what ranks do together


@dataclass(frozen=True)
class Runtime:
    """This process, its rank among the processes of a run, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    why: str  # tells the user which device and dtype were chosen, and why
    # Bytes available at the start, before the run loaded anything; None if unknown.
    device_free: int | None = None
    host_free: int | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if mixed else None, enabled=mixed)

    def reduce(self, values: Tensor) -> Tensor:
        """Sum over ranks. One rank keeps its values in place: not every device has float64."""
        if self.world_size == 1:
            return values
        sums = values.to(self.device, copy=True)
        dist.all_reduce(sums)
        return sums.to(values.device)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; all get the same answer without waiting for a GPU."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags)
        return flags.item() > 0

    def gather(self, value: Value) -> list[Value]:
        """Give every rank the `value` of every rank, in rank order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_rank0(self, action: Callable[[], Value]) -> Value:
        """Run `action` on rank 0 only. Every rank gets its result; errors as in `on_all_ranks`."""
        results = [self.on_all_ranks(action if self.is_rank0 else lambda: None)]
        if self.world_size > 1:
            dist.broadcast_object_list(results)
        return results[0]

    def on_all_ranks(self, action: Callable[[], Value]) -> Value:
        """Run `action` on every rank; if it fails on any, no rank goes on.

        A user's mistake on any rank is raised on all, as a ValueError. Any other error is raised
        where it happened, with its traceback, and as a ValueError on the others.
        """
        mistake = None
        try:
            result = action()
        except MISTAKES as error:
            mistake = one_line(error)
        except Exception as error:
            self.gather(f"rank {self.rank} failed: {type(error).__name__}: {one_line(error)}")
            raise
        for line in self.gather(mistake):
            if line is not None:
                raise ValueError(line)
        return result

    def on_each_machine(self, action: Callable[[], None]) -> None:
        """Run `action` on one rank of each machine; if it fails on any, every rank raises."""
        is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self.on_all_ranks(action if is_first_here else lambda: None)

    def check_same(self, values: dict[str, object]) -> None:
        """Refuse to start if ranks have different values; the ValueError names one and its rank."""
        every = self.gather(values)
        for name, value in every[0].items():
            for rank, others in enumerate(every):
                if others.get(name) != value:
                    differ = f"rank 0 has {value}, rank {rank} has {others.get(name)}"
                    raise ValueError(f"ranks differ in {name}: {differ}")

    def say(self, line: str) -> None:
        if self.is_rank0:
            print_line(line, sys.stdout)


@contextmanager
def reporting_lost_ranks(step: Callable[[], int]) -> Iterator[None]:
    """When torch reports that another rank is gone, print the current step and end this process."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        line = f"rank {dist.get_rank()} lost another rank after step {step()}: it has ended or has"
        line += f" not answered for {TIMEOUT.seconds} s: find out why, then --resume"
        # Every remaining rank prints it, because rank 0 may be the one that is gone.
        print_line(f"error: {line}", sys.stderr)
        os._exit(1)  # as in `exit_cleanly`


# ---- whether ranks agree

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def check_agreement(runtime: Runtime, named: dict[str, Tensor]) -> None:
    """Refuse to continue if ranks hold different bits of a tensor that is not sharded."""
    whole = {name: tensor for name, tensor in named.items() if not hasattr(tensor, "to_local")}
    if runtime.world_size > 1 and whole:
        # Some tensors may be on the host: stacked on the device, all are read at once.
        sums = torch.stack([sum_of_bits(tensor).to(runtime.device) for tensor in whole.values()])
        names = (f"the bits of {name}" for name in whole)
        runtime.check_same(dict(zip(names, sums.tolist(), strict=True)))


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum a tensor's elements, with their bits read as integers."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


def refuse_step(runtime: Runtime, step: int, quantity: str, value: float) -> NoReturn:
    """Stop every rank before an update; name the step and the ranks with a bad value."""
    values = runtime.gather(value)
    ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
    where = f"at step {step} on rank {', '.join(ranks)}"
    advice = "the weights were not updated; start a new run with a lower --lr"
    raise ValueError(f"the {quantity} is not finite {where}: {advice}")
