"""What every command stands on: ranks, device, dtype, and how a command ends.

No training logic. What differs between one CPU and many GPUs is here and nowhere else.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from kernels.triton_here import why_not

ROOT = Path(__file__).resolve().parents[2]  # of the repository
RANK_IS_GONE = ("gloo/transport", "ncclRemoteError")  # what gloo and NCCL say of one they lost
LINGER = 0.5  # seconds, so that torchrun, which looks ten times as often, finds that one first
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """This process among all processes of a run, and what it computes on."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    why: str  # how device and dtype were chosen, for the user
    # bytes that could be had at the start, when nothing of a run was there; None if nobody knows
    device_free: int | None = None
    host_free: int | None = None

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        mixed = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if mixed else None, enabled=mixed)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. One rank's values stay where they are: not every device has float64."""
        if self.world_size == 1:
            return values
        sums = values.to(self.device, copy=True)
        dist.all_reduce(sums)
        return sums.to(values.device)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it holds on some rank; the answer is the same on every rank.

        Ranks say it from host to host: no GPU is waited for.
        """
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags)
        return flags.item() > 0

    def gather(self, value: Any) -> list:
        """`value` of every rank, in rank order, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def collect(self, value: Any) -> Iterator[Any]:
        """Yield every rank's `value` on rank 0, holding one at a time; nothing on other ranks."""
        if not self.is_rank0:
            dist.send_object_list([value], dst=0)
            return
        yield value
        for rank in range(1, self.world_size):
            received: list = [None]
            dist.recv_object_list(received, src=rank)
            yield received[0]

    def on_rank0(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0 alone. Every rank gets its result, or its error as ValueError."""
        outcome: list = [None, None]
        if self.is_rank0:
            try:
                outcome[0] = action()
            except (ValueError, OSError) as error:
                outcome[1] = one_line(error)
        if self.world_size > 1:
            dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise ValueError(outcome[1])
        return outcome[0]

    def say(self, line: str) -> None:
        if self.is_rank0:
            print(line, flush=True)


def start(device: str, dtype: str) -> Runtime:
    """Join the other ranks, if torchrun started any, and choose device and dtype.

    Raises: ValueError naming --device or --dtype where the machine does not have it
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if device not in ("auto", *has):
        raise ValueError(f"--device {device} is unknown: choose auto, {', '.join(has)}")
    kind = device if device != "auto" else next(d for d in ("cuda", "mps", "cpu") if has[d])
    if not has[kind]:
        raise ValueError(f"--device {device}: torch {torch.__version__} finds none here: try auto")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    own = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(own)
        torch.set_float32_matmul_precision("high")  # TF32 for what is not in half precision
    if kind == "cpu":
        keep_freed_memory()
    if dtype == "auto" and kind == "cuda":
        # a V100 or a T4 has bf16 only by emulation
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    dtype = "fp32" if dtype == "auto" else dtype
    if dtype == "fp16" and kind != "cuda":
        raise ValueError(f"--dtype fp16 needs --device cuda, not {kind}: choose bf16 or fp32")
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(**group_of(own))
    chosen = "as found" if device == "auto" else "as asked"
    ranks = f"{world_size} processes" if world_size > 1 else "one process"
    why = f"{kind} ({chosen}), {dtype}, {ranks}, {torch.get_num_threads()} threads"
    if kind == "cuda":
        missing = why_not(kind)
        why += f"; no Triton kernels: {missing}" if missing else "; Triton kernels"
    return Runtime(rank, world_size, own, DTYPES[dtype], why, device_free(own), host_free())


def group_of(device: torch.device) -> dict[str, Any]:
    """How ranks on such devices talk: what init_process_group is to be told of it.

    With a GPU also by gloo, for what is in host memory, as offloaded shards are. Told which GPU is
    this rank's, NCCL connects at once, and a barrier does not have to guess.
    """
    if device.type == "cuda":
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


class Parser(argparse.ArgumentParser):
    """A command line whose errors are one line for `exit_cleanly`, without argparse's usage."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        raise ValueError(f"{message} (see --help)")


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run a command: a user's mistake is one line on stderr and exit status 2, no traceback.

    Of several ranks the first to meet an error says it, with its number unless that is 0. Others
    that meet the same error, or only miss a rank that has left, end without a word.
    """
    rank, together = int(os.environ.get("RANK", 0)), False
    try:
        status = main() or 0
        together = True
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        if not is_said(error, rank):
            raise
        status = 2 if is_mistake(error) else 1
    if status > 128:
        tell_torchrun(f"stopped by signal {status - 128}")
    if dist.is_initialized():
        if together:  # a rank that still talks to one that has left fails
            dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)  # gloo's threads may abort the process when C++ is torn down around them
    sys.exit(status)


def is_mistake(error: Exception) -> bool:
    return isinstance(error, (ValueError, OSError))


def is_said(error: Exception, rank: int) -> bool:
    """Say an error in one line, unless another rank has; False if it needs its traceback."""
    what, ranks_talk = one_line(error), dist.is_initialized()
    misses_another = any(words in what for words in RANK_IS_GONE)
    if misses_another:
        what = f"another process of the run is gone: {what}"
    elif not is_mistake(error):
        what = f"{type(error).__name__}: {what}"
    mine = f"rank {rank}: {what}" if rank else what
    # before ranks talk nothing but the flags was looked at, which every rank has alike
    first = first_error(rank, mine) if ranks_talk else what
    if first != mine or not misses_another:  # of a rank that was killed torchrun knows more
        tell_torchrun(f"error: {first}")
    if not (is_mistake(error) or misses_another):
        return ranks_talk and first != mine and first.endswith(what)
    if first == mine:
        # tqdm's write, so that the line does not run into a progress bar
        tqdm.write(f"error: {mine}", file=sys.stderr)
    if misses_another:
        time.sleep(LINGER)
    return True


def first_error(rank: int, mine: str) -> str:
    """The error that ends the run, which may be another rank's; rank 0's, if it has one as well."""
    store = dist.distributed_c10d._get_default_store()
    patience = time.monotonic() + (1 if rank else 0)  # seconds for rank 0 to meet it as well
    try:
        while time.monotonic() < patience and not store.check(["error"]):
            time.sleep(0.02)
        return store.compare_set("error", "", mine).decode()
    except dist.DistError:  # it went with the process that had it
        return mine


def tell_torchrun(line: str) -> None:
    """Have torchrun's summary quote a line; it comes after everything that ranks print.

    torchrun names a file for each rank (torch/distributed/elastic/multiprocessing/errors).
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))


# ---- memory
#
# Memory: what a machine has free, and how a CPU gets again what the step before freed.
#
# A GPU's freed memory is torch's own to keep. On a CPU glibc hands much of what is freed back to
# the kernel: large arrays at once, and the end of its heap when that grows long. The next step asks
# for as much again, and gets every page zeroed, after a fault of its own: 6,800 faults a step of
# nano, an eighth of its time (docs/step.md).


# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20  # bytes; glibc allows no more
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Tell glibc to keep what this process frees, up to its peak; elsewhere nothing happens."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, LARGEST_KEPT)


def host_free(meminfo: str = "/proc/meminfo") -> int | None:
    """Bytes that the host can give without swapping; None where it does not say."""
    file = Path(meminfo)
    found = re.search(r"MemAvailable: *(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) * 1024 if found else None


def device_free(device: torch.device) -> int | None:
    """Bytes that the device can give; None where it does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free() if device.type == "cpu" else None


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; the host does not wait for a GPU to have it.

    A GPU reads page-locked memory by itself. From other memory the driver copies first, behind
    whatever the GPU has still to do.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def resident(key: str = "VmRSS", status: str = "/proc/self/status") -> int:
    """Bytes of memory that this process has now; its peak with VmHWM; 0 where nobody says."""
    file = Path(status)
    found = re.search(rf"{key}:\s*(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) * 1024 if found else 0
