"""What every command needs: ranks, device, dtype, memory, and a clean exit.

This file knows no technique and no data. It handles what differs between one CPU and many GPUs;
elsewhere only copies, kernels and the micro-batch size depend on the device.

--fsdp: every rank holds some rows of each weight, of its gradient and of its optimizer state.

torch's FSDP2 (`fully_shard`) makes each parameter a DTensor. A block's whole weights are gathered
just before it runs and freed afterwards. Its gradients are averaged over ranks as with DDP, but
each rank keeps only its rows. Blocks are gathered one at a time; everything outside them, such as
the embeddings, forms one more group.

    shard(model, runtime)             # after compiling, before the optimizers
    sync_gradients(model, is_last)    # before the forward pass of each micro-batch

Every rank must run the same number of forward passes, in evaluation and sampling too; otherwise the
ranks wait for each other. Forward passes need `runtime.autocast()`, because a block gathered in
bf16 receives fp32 inputs.

Without --fsdp, ranks never compare their weights: if a gradient is not summed over ranks, the
weights drift apart silently. `check_agreement` notices.

Papers: Rajbhandari et al., arXiv 1910.02054 (ZeRO, stage 3); Zhao et al., arXiv 2304.11277 (FSDP)
"""

import argparse
import ctypes
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

from kernels.triton_here import why_not

ROOT = Path(__file__).resolve().parents[1]  # the repository
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MISTAKES = (ValueError, OSError)  # the user's mistakes: reported in one line, exit status 2
# How long ranks wait for one that does not answer. A killed rank is noticed immediately. The
# longest healthy wait is for rank 0 to write a checkpoint: 20 GB (1.3B with AdamW) at 100 MB/s take
# 200 s.
TIMEOUT = timedelta(minutes=5)
Value = TypeVar("Value")

# ---- ranks and device


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

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
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

    def collect(self, value: Value) -> Iterator[Value]:
        """On rank 0, yield every rank's `value`, holding one at a time; elsewhere yield nothing."""
        if not self.is_rank0:
            dist.send_object_list([value], dst=0)
            return
        yield value
        for rank in range(1, self.world_size):
            received: list = [None]
            dist.recv_object_list(received, src=rank)
            yield received[0]

    def on_rank0(self, action: Callable[[], Value]) -> Value:
        """Run `action` on rank 0 only. Every rank gets its result, or its error as a ValueError."""
        outcome = [outcome_of(action) if self.is_rank0 else None]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], ValueError):
            raise outcome[0]
        return outcome[0]

    def together(self, action: Callable[[], Value]) -> Value:
        """Run `action` on every rank; if it fails on any, every rank raises that ValueError."""
        mine = outcome_of(action)
        for outcome in self.gather(mine if isinstance(mine, ValueError) else None):
            if outcome:
                raise outcome
        return mine

    def on_each_machine(self, action: Callable[[], None]) -> None:
        """Run `action` on one rank of each machine; errors reach every rank, as in `together`."""
        is_first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self.together(action if is_first_here else lambda: None)

    def check_same(self, values: dict[str, object]) -> None:
        """Refuse to start if ranks have different values; the ValueError names one and its rank.

        Cost: one message from every rank to every other, before the first step
        """
        every = self.gather(values)
        for name, value in every[0].items():
            for rank, others in enumerate(every):
                if others.get(name) != value:
                    raise ValueError(
                        f"ranks differ in {name}: rank 0 has {value}, rank {rank} has"
                        f" {others.get(name)}: start all with the same command, code and files"
                    )

    def say(self, line: str) -> None:
        if self.is_rank0:
            tqdm.write(line)  # above the progress bar, if there is one
            sys.stdout.flush()


def outcome_of(action: Callable[[], Value]) -> Value | ValueError:
    """Run an action; return its result, or the user's mistake as an error to send to all ranks."""
    try:
        return action()
    except MISTAKES as error:
        return ValueError(one_line(error))


def start(device: str, dtype: str, timeout: timedelta | None = None) -> Runtime:
    """Join the other ranks, if torchrun started any, and choose device and dtype.

    Args:   timeout how long ranks wait for each other (default: TIMEOUT)
    Raises: ValueError naming --device if this machine has no such device
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.mps.is_available(), "cpu": True}
    found = [name for name, is_here in is_there.items() if is_here]
    kind = found[0] if device == "auto" else device
    if kind not in found:
        raise ValueError(f"--device {device}: torch finds only {', '.join(found)} here: try auto")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(chosen)
        torch.set_float32_matmul_precision("high")  # TF32 for fp32 matrix products
    if kind == "cpu":
        keep_freed_memory()
    if dtype == "auto" and kind == "cuda":
        # GPUs older than Ampere only emulate bf16.
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    dtype = "fp32" if dtype == "auto" else dtype
    if world_size > 1 and not dist.is_initialized():
        # torchrun keeps this store when it restarts ranks, with the addresses of the dead ones, so
        # every attempt gets a prefix.
        store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            store=dist.PrefixStore(f"attempt {attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout or TIMEOUT,
            **group_of(chosen),
        )
    asked = "auto" if device == "auto" else "as asked"
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
    """Return what the last bits of a result depend on, besides settings and data."""
    device = runtime.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads = {} if device.type == "cuda" else {"threads": str(torch.get_num_threads())}
    dtype = str(runtime.dtype).removeprefix("torch.")
    return {"torch": str(torch.__version__), "device": kind, "dtype": dtype, **threads}


def group_of(device: torch.device) -> dict[str, str | torch.device]:
    """Return the arguments of init_process_group for ranks on such devices.

    With GPUs, gloo still reduces tensors in host memory. Because NCCL is told this rank's GPU, it
    connects right away, and a barrier does not have to guess the device.
    """
    if device.type == "cuda":
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo"}


# ---- how a command starts and ends


class Parser(argparse.ArgumentParser):
    """A parser that raises one-line errors for `exit_cleanly` and does not print the usage."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        known = [w for a in self._actions for w in (*a.option_strings, *(a.choices or ()))]
        wrong = re.search(r"arguments: (--[\w-]+)|invalid choice: '([^']*)'", message)
        meant = wrong and get_close_matches(wrong[1] or wrong[2], map(str, known), n=1, cutoff=0.75)
        raise ValueError(f"{message} ({f'did you mean {meant[0]}?' if meant else 'see --help'})")


def launcher() -> str:
    """Return the command that starts such a process: python, or torchrun with as many processes.

    Example: torchrun --nproc-per-node 8
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return "python"
    nodes, each = (int(os.environ[f"{of}_WORLD_SIZE"]) for of in ("GROUP", "LOCAL"))
    return f"torchrun{f' --nnodes {nodes}' if nodes > 1 else ''} --nproc-per-node {each}"


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(" ".join(str(error).split()))


def printable(text: str, kept: str = "") -> str:
    """Escape control characters, because text from a stranger's file could control the terminal.

    Args: kept characters to leave as they are, such as line ends
    """
    safe = (char if char in kept or char.isprintable() else ascii(char)[1:-1] for char in text)
    return "".join(safe)


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run a command; report a user's mistake as one line on stderr, with exit status 2.

    Rank 0 prints the line. An error that only another rank met appears in torchrun's summary, to
    which `record` passes it. torchrun's parent process prints that summary, with a traceback of its
    launcher, whenever a rank fails.
    """
    try:
        status = record(main)() or 0
        if dist.is_initialized():
            dist.barrier()  # otherwise a rank that still communicates with this one would fail
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader stopped, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except MISTAKES as error:
        if int(os.environ.get("RANK", 0)) == 0:
            # With tqdm's write the line does not run into a progress bar.
            tqdm.write(f"error: {one_line(error)}", file=sys.stderr)
        else:
            time.sleep(0.5)  # torchrun kills rank 0 soon after this one exits: let it print first
        status = 2
    sys.stdout.flush()
    if dist.is_initialized():
        os._exit(status)  # during an ordinary exit, gloo's threads may abort the process
    sys.exit(status)


@contextmanager
def naming_step(step: Callable[[], int]) -> Iterator[None]:
    """When torch reports that another rank is gone, print the current step and end this process.

    Every remaining rank prints it, because rank 0 may be the one that is gone.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        line = f"rank {dist.get_rank()} lost another rank after step {step()}: it has ended or has"
        line += f" not answered for {TIMEOUT.seconds} s: find out why, then --resume"
        tqdm.write(f"error: {line}", file=sys.stderr)
        os._exit(1)  # as in `exit_cleanly`


# Sent by schedulers, by Ctrl-C, by a terminal that closes, and by Slurm before the time limit.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Remember a signal until the step is over; under nohup, SIGHUP stays ignored."""

    def __enter__(self) -> "StopSignal":
        self.number = 0
        heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.note) for number in heard}
        return self

    def note(self, number: int, _frame: object) -> None:
        self.number = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ---- memory
# torch keeps the GPU memory that it frees. On a CPU, glibc returns much of it to the kernel, and
# the next step gets it back zeroed, one page fault at a time, which takes an eighth of a small step
# (docs/step.md).

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20  # bytes, glibc's maximum
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make glibc keep the memory that this process frees; do nothing without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, LARGEST_KEPT)


def host_free(meminfo: str = "/proc/meminfo") -> int | None:
    """Return the bytes of host memory available without swapping; None if unknown."""
    return _bytes_in(meminfo, "MemAvailable")


def resident(key: str = "VmRSS") -> int:
    """Return the bytes that this process holds now, or with VmHWM at its peak; 0 if unknown."""
    return _bytes_in("/proc/self/status", key) or 0


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes, of the GPU or of the host; 0 if unknown."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def _bytes_in(file: str, key: str) -> int | None:
    with suppress(FileNotFoundError):
        if line := re.search(rf"{key}:\s*(\d+) kB", Path(file).read_text()):
            return int(line[1]) * 1024
    return None


def device_free(device: torch.device) -> int | None:
    """Return the bytes of memory available on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return host_free() if device.type == "cpu" else None


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a host tensor to a device; do not wait until a GPU has received it.

    A GPU reads page-locked memory by itself. Any other memory the driver copies first, and only
    after the GPU has finished all its queued work.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# Like `forward`, these are called from outside and need the weights outside the blocks.
FORWARD_METHODS = ("hidden_states", "losses", "logits", "follows")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


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
    gather_around(model, FORWARD_METHODS)


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


def gather_around(model: nn.Module, methods: Collection[str]) -> None:
    """Make FSDP gather the weights outside the blocks for these methods, as it does for `forward`.

    The methods call each other, and `forward` calls some of them. Only the outermost call may
    gather and free: an inner one would free weights that the outer one needs in the backward pass.
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


def assign(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Make these tensors the model's weights, without a copy."""
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in expected.keys() | weights.keys():
        if name not in weights or weights[name].shape != expected.get(name):
            raise ValueError(f"the checkpoint's weight {name} does not fit the model")
    model.load_state_dict(weights, assign=True)


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


def check_agreement(runtime: Runtime, named: dict[str, Tensor]) -> None:
    """Raise ValueError on every rank unless all hold the same bits; name up to three tensors.

    Sharded tensors are skipped, because no two ranks hold the same rows.

    Cost: one pass over the tensors, and one reduction of two numbers per tensor
    """
    named = {name: tensor for name, tensor in named.items() if rows_here(tensor) is tensor}
    if runtime.world_size == 1 or not named:
        return
    # Some tensors may be on the host, but ranks may be able to reduce only on their devices.
    sums = torch.stack([sum_of_bits(t).to(runtime.device) for t in named.values()])  # (n,)
    most = torch.stack([sums, -sums])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    agree = (most[0] == -most[1]).tolist()
    if differ := [name for name, same in zip(named, agree, strict=True) if not same]:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ValueError(f"weights differ between ranks: {', '.join(differ[:3])}{more}")


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum a tensor's elements, with their bits read as integers."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


def refuse_step(runtime: Runtime, step: int, quantity: str, value: float) -> NoReturn:
    """Stop every rank before an update; name the step and the ranks with a bad value."""
    values = runtime.gather(value)
    ranks = [str(rank) for rank, seen in enumerate(values) if not math.isfinite(seen)]
    raise ValueError(
        f"the {quantity} is not finite at step {step} on rank {', '.join(ranks)}: the weights were"
        " not updated; start a new run with a lower --lr, perhaps from this one's weights (--init)"
    )
