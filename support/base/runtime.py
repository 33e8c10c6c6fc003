"""What every command needs: ranks, device, dtype, memory, and how a command ends.

No training logic. One CPU and many GPUs differ here and nowhere else.
"""

import argparse
import ctypes
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from kernels.triton_here import why_not

ROOT = Path(__file__).resolve().parents[2]  # of the repository
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MISTAKES = (ValueError, OSError)  # of the user: one line and exit status 2
TIMEOUT = timedelta(minutes=10)  # that ranks wait for one that does not answer
Value = TypeVar("Value")

# ---- ranks and device


@dataclass(frozen=True)
class Runtime:
    """This process among all processes of a run, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    why: str  # how device and dtype were chosen, for the user
    # bytes available at the start, before anything of the run was loaded; None if unknown
    device_free: int | None = None
    host_free: int | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if mixed else None, enabled=mixed)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. On one rank values stay where they are: not every device has float64."""
        if self.world_size == 1:
            return values
        sums = values.to(self.device, copy=True)
        dist.all_reduce(sums)
        return sums.to(values.device)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; the same answer everywhere, without a GPU's help."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags)
        return flags.item() > 0

    def gather(self, value: Value) -> list[Value]:
        """The `value` of every rank, in rank order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def collect(self, value: Value) -> Iterator[Value]:
        """Yield every rank's `value` on rank 0, holding one at a time; nothing on other ranks."""
        if not self.is_rank0:
            dist.send_object_list([value], dst=0)
            return
        yield value
        for rank in range(1, self.world_size):
            received: list = [None]
            dist.recv_object_list(received, src=rank)
            yield received[0]

    def on_rank0(self, action: Callable[[], Value]) -> Value:
        """Run `action` on rank 0 only. Every rank gets its result, or its error as ValueError."""
        outcome = [outcome_of(action) if self.is_rank0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], ValueError):
            raise outcome[0]
        return outcome[0]

    def together(self, action: Callable[[], Value]) -> Value:
        """Run `action` on every rank; if it fails on one, every rank raises that ValueError."""
        mine = outcome_of(action)
        for outcome in self.gather(mine if isinstance(mine, ValueError) else None):
            if outcome:
                raise outcome
        return mine

    def on_each_machine(self, action: Callable[[], None]) -> None:
        """Run `action` on one rank of each machine, as `together` does."""
        is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self.together(action if is_first_here else lambda: None)

    def check_same(self, values: dict[str, object]) -> None:
        """Refuse ranks that would not compute the same; ValueError names what differs, and where.

        Cost: one message from each rank to each, before the first step
        """
        every = self.gather(values)
        for name, value in every[0].items():
            for rank, others in enumerate(every):
                if others.get(name) != value:
                    raise ValueError(
                        f"ranks differ in {name}: rank 0 has {value}, rank {rank} has"
                        f" {others.get(name)}: start all with the same command, code and text"
                    )

    def say(self, line: str) -> None:
        if self.is_rank0:
            print(line, flush=True)


def outcome_of(action: Callable[[], Value]) -> Value | ValueError:
    """What an action returns, or the user's mistake that it meets: something to send to ranks."""
    try:
        return action()
    except MISTAKES as error:
        return ValueError(one_line(error))


def start(device: str, dtype: str) -> Runtime:
    """Join the other ranks, if torchrun started any, and choose device and dtype.

    Raises: ValueError naming --device or --dtype if the machine does not have it
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.mps.is_available(), "cpu": True}
    found = [name for name, is_here in is_there.items() if is_here]
    kind = found[0] if device == "auto" else device
    if kind not in found:
        raise ValueError(f"--device {device}: torch finds {', '.join(found)} here: try auto")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
        torch.set_float32_matmul_precision("high")  # TF32 for products not in half precision
    if kind == "cpu":
        keep_freed_memory()
    if dtype == "auto" and kind == "cuda":
        # older GPUs only emulate bf16
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    dtype = "fp32" if dtype == "auto" else dtype
    if world_size > 1 and not dist.is_initialized():
        # torchrun keeps this store when it starts ranks again: it has addresses of those before
        store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            **group_of(chosen),
        )
    asked = "as found" if device == "auto" else "as asked"
    ranks = f"{world_size} processes" if world_size > 1 else "one process"
    why = f"{kind} ({asked}), {dtype}, {ranks}, {torch.get_num_threads()} threads"
    if kind == "cuda":
        missing = why_not(kind)
        why += f"; no Triton kernels: {missing}" if missing else "; Triton kernels"
    return Runtime(
        rank=rank,
        world_size=world_size,
        device=chosen,
        dtype=DTYPES[dtype],
        why=why,
        device_free=device_free(chosen),
        host_free=host_free(),
    )


def made_by(runtime: Runtime) -> dict[str, str]:
    """What the last bits of a result depend on, besides settings and data."""
    device = runtime.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = {} if device.type == "cuda" else {"threads": str(torch.get_num_threads())}
    dtype = str(runtime.dtype).removeprefix("torch.")
    return {"torch": str(torch.__version__), "device": kind, "dtype": dtype, **threads}


def group_of(device: torch.device) -> dict[str, str | torch.device]:
    """The arguments of init_process_group for ranks on such devices.

    With GPUs gloo is there too, for tensors in host memory. Given this
    rank's GPU, NCCL connects at once and a barrier does not have to guess.
    """
    if device.type == "cuda":
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


# ---- how a command begins and ends


class Parser(argparse.ArgumentParser):
    """A command line whose errors are one line for `exit_cleanly`, without argparse's usage."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (see --help)")


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(" ".join(str(error).split()))


def printable(text: str, kept: str = "") -> str:
    """Text that may come from a stranger's file, with what would steer a terminal escaped.

    Characters of `kept` stay as they are, line ends for example.
    """
    safe = (char if char in kept or char.isprintable() else ascii(char)[1:-1] for char in text)
    return "".join(safe)


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run a command: a user's mistake is one line on stderr and exit status 2, no traceback.

    Rank 0 says it. What only another rank met stands in torchrun's summary, by `record`.
    """
    try:
        status = record(main)() or 0
        if dist.is_initialized():
            dist.barrier()  # else a rank that still communicates with this one would fail
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # as of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except MISTAKES as error:
        if int(os.environ.get("RANK", 0)) == 0:
            # tqdm's write, so that the line does not run into a progress bar
            tqdm.write(f"error: {one_line(error)}", file=sys.stderr)
        else:
            time.sleep(0.5)  # torchrun ends rank 0 soon after this one, and it shall speak before
        status = 2
    sys.stdout.flush()
    if dist.is_initialized():
        os._exit(status)  # during an ordinary exit gloo's threads may abort the process
    sys.exit(status)


# ---- memory
# A GPU's freed memory stays with torch. On a CPU glibc returns much of it to the kernel, and the
# next step gets it back zeroed, one page fault at a time: an eighth of a small step (docs/step.md).

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20  # bytes; glibc allows no more
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, up to its peak; does nothing without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, LARGEST_KEPT)


def host_free(meminfo: str = "/proc/meminfo") -> int | None:
    """Bytes of host memory that are available without swapping; None if unknown."""
    return _bytes_in(meminfo, "MemAvailable")


def resident(key: str = "VmRSS") -> int:
    """Bytes of memory that this process has now, or with VmHWM had at its peak; 0 if unknown."""
    return _bytes_in("/proc/self/status", key) or 0


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has taken at its peak, on a GPU there; 0 if unknown."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def _bytes_in(file: str, key: str) -> int | None:
    with suppress(FileNotFoundError):
        if line := re.search(rf"{key}:\s*(\d+) kB", Path(file).read_text()):
            return int(line[1]) * 1024
    return None


def device_free(device: torch.device) -> int | None:
    """Bytes of memory available on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free() if device.type == "cpu" else None


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a host tensor to a device without waiting for a GPU to receive it.

    A GPU reads page-locked memory by itself. Other memory is first copied by the driver, after
    everything that the GPU still has to do.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
