"""What a machine does in a second: this one measured, or any as its vendor says; and --on, the
machine that a dry run plans for.
"""

import math
import re
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from support.base.numbers import bytes_of, number_of
from support.base.runtime import DTYPES, Runtime, Value

if TYPE_CHECKING:
    from config import Config


class Rates(NamedTuple):
    """What a machine does in a second."""

    link: float  # bytes from the host to the device
    flops: float  # of matrix products on the device
    adamw: float  # parameters that the host's AdamW updates


class Peak(NamedTuple):
    """The most floating-point operations a second."""

    flops: float | None  # of all ranks; None if unknown
    why: str


class Machine(NamedTuple):
    """What its vendor says of a device."""

    pattern: str  # of torch's name of it
    half: float  # TFLOP/s of dense matrix products in 16 bits, with sums in fp32
    single: float  # in 32 bits, which is TF32 from Ampere on (support/base/runtime.py asks for it)
    memory: float  # GB
    link: float  # GB/s from the host to the device, one way


# By the name that --on takes; in torch's names the first match counts. From NVIDIA's data sheets,
# with figures "with sparsity" and of both ways of a link halved; for GeForce cards from the
# architectures' white papers. Links are PCIe, but GH200's is NVLink-C2C.
DATA_SHEETS = {
    "B200": Machine("B200", 2250, 1125, 180, 64),
    "H200-NVL": Machine("H200 NVL", 835.5, 417.5, 141, 64),
    "H100-NVL": Machine("H100 NVL", 835.5, 417.5, 94, 64),
    "GH200": Machine("GH200", 989.4, 494.7, 96, 450),
    "H200": Machine("H200", 989.4, 494.7, 141, 64),
    "H100": Machine("H100.*(HBM3|SXM)", 989.4, 494.7, 80, 64),
    "H100-PCIe": Machine("H100 PCIe", 756, 378, 80, 64),
    "A100-40GB": Machine("A100.*40GB", 312, 156, 40, 32),
    "A100-80GB": Machine("A100", 312, 156, 80, 32),
    "A10": Machine("A10( |$)", 125, 62.5, 24, 32),
    "L40S": Machine("L40S", 362, 183, 48, 32),
    "L4": Machine("L4( |$)", 121, 60, 24, 32),
    "RTX4090": Machine("RTX 4090$", 165.2, 82.6, 24, 32),
    "RTX3090": Machine("RTX 3090$", 71, 35.6, 24, 32),
    "V100S": Machine("V100S", 130, 16.4, 32, 16),
    "V100-16GB": Machine("V100-SXM.*16GB", 125, 15.7, 16, 16),
    "V100-32GB": Machine("V100-SXM", 125, 15.7, 32, 16),
    "V100-PCIe": Machine("V100-PCIE", 112, 14, 16, 16),
    "T4": Machine("T4$", 65, 8.1, 16, 16),
}


# Shares of the peak that matrix products reach in a run, assumed where nothing is timed. On GPUs
# nanoGPT's README has 0.29 (124M, 8 A100), torchtitan's benchmarks 0.33 and compiled 0.39 (8B, 8
# H100), counted as in arXiv 2204.02311, whose own runs have 0.46. CPU: 124M on one core, measured.
MFU = {"cuda": 0.35, "cpu": 0.75}


OLDER = ("V100", "T4")  # their matrix units have neither bf16 nor TF32


def peak(runtime: Runtime) -> Peak:
    """The peak of all ranks together, assuming equal devices."""
    device, dtype = runtime.device, runtime.dtype
    if isinstance(runtime, Elsewhere):
        return Peak(runtime.rate * runtime.world_size, "dense matrix products, as --on says")
    words = next(name for name, known in DTYPES.items() if known == dtype)
    if device.type == "cpu":
        rate = sum(runtime.gather(measured_peak(dtype)))
        return Peak(rate, f"a product of {words} matrices, measured at the start")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    rate = data_sheet(name, dtype)
    if rate is None:
        return Peak(None, f"unknown: {name} has no data sheet here for {words}")
    return Peak(rate * runtime.world_size, f"dense matrix products in the data sheet of {name}")


def data_sheet(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU of this name; None if it is not in the table, or lacks the dtype."""
    for known, machine in DATA_SHEETS.items():
        if re.search(machine.pattern, name):
            return rate_of(known, dtype)
    return None


def rate_of(known: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a device of the table; None if it lacks the dtype."""
    if dtype == torch.bfloat16 and known.startswith(OLDER):
        return None
    machine = DATA_SHEETS[known]
    return (machine.half if dtype.itemsize == 2 else machine.single) * 1e12


@cache
def measured_peak(dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices on the CPU: the best of many tries in three sizes.

    Small products end before another process takes the core, large ones keep many cores busy.

    Cost: 0.4 s, once in a process; longer where a product of 512 rows takes longer than 0.1 s
    """
    rates = []
    for n in (512, 1024, 2048):
        square = torch.ones(n, n, dtype=dtype)
        end = time.perf_counter() + 0.13
        while (began := time.perf_counter()) < end:
            square @ square
            rates.append(2 * n**3 / (time.perf_counter() - began))
        if 8 * 2 * n**3 / max(rates) > 0.5:  # the next size would take too long
            break
    return max(rates)


def measured(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of three tries each.

    Cost: 64 MiB on the host and on the device, three matrices there; a second on a slow machine
    """
    is_cuda = device.type == "cuda"
    n = 8192 if is_cuda else 512
    here, there = torch.ones(2**24, pin_memory=is_cuda), torch.empty(2**24, device=device)
    square = torch.ones(n, n, dtype=dtype, device=device)
    weights = torch.ones(2**22, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    adamw = torch.optim.AdamW([weights], fused=True)

    def seconds(action: Callable[[], object]) -> float:
        def once() -> None:
            action()
            if is_cuda:
                torch.cuda.synchronize(device)

        return min(timeit.repeat(once, number=1, repeat=3))

    return Rates(
        link=here.nbytes / seconds(lambda: there.copy_(here, non_blocking=True)),
        flops=2 * n**3 / seconds(lambda: square @ square),
        adamw=weights.numel() / seconds(adamw.step),
    )


# ---- machines that are planned for


@dataclass(frozen=True)
class Elsewhere(Runtime):
    """A rank of a machine that is not here. All its ranks are alike, so nothing is sent."""

    rate: float = 0.0  # FLOP/s of a device, at its peak
    link: float = 0.0  # bytes/s from the host to a device

    def gather(self, value: Value) -> list[Value]:
        return [value] * self.world_size

    def on_any_rank(self, flag: bool) -> bool:
        return flag

    def on_rank0(self, action: Callable[[], Value]) -> Value:
        return action()


def planned_for(settings: "Config", runtime: Runtime) -> Runtime:
    """The machine that --on names, with as many ranks as it has devices; without --on this one.

    Raises:  ValueError for a machine that is not in the table, or that lacks --dtype
    Example: 8xH100, A10, 8xflops=989e12,memory=80GB,link=64GB
    """
    if settings.run.on is None:
        return runtime
    number, name = re.fullmatch(r"(?:(\d+)x)?(.*)", settings.run.on).groups()
    devices = int(number or 1)
    known = {known.lower(): known for known in DATA_SHEETS}.get(name.lower(), "")
    is_old = known.startswith(OLDER)
    words = settings.run.dtype
    if words == "auto":
        words = "fp16" if is_old else "bf16"
    dtype = DTYPES[words]
    if known:
        rate, sheet = rate_of(known, dtype), DATA_SHEETS[known]
        memory, link = int(sheet.memory * 1e9), sheet.link * 1e9
    else:
        rate, memory, link = described(settings.run.on, name)
    if devices == 0 or rate is None:
        why = "has no device" if rate else f"has no matrix units for {words}: add --dtype fp16"
        raise ValueError(f"--on {settings.run.on} {why}")
    rates = f"{rate / 1e12:,.1f} TFLOP/s in {words}, link {link / 1e9:g} GB/s"
    return Elsewhere(
        rank=0,
        world_size=devices,
        device=torch.device("cuda"),
        dtype=dtype,
        why=f"planned for {devices} x {known or 'a device'} ({memory / 1e9:g} GB, {rates})",
        device_free=memory,
        has_triton=not is_old,
        rate=rate,
        link=link,
    )


def described(on: str, device: str) -> tuple[float, int, float]:
    """FLOP/s, bytes, bytes/s of a device as flops=989e12,memory=80GB,link=64GB says them."""
    given = dict(part.partition("=")[::2] for part in device.split(","))
    if set(given) != {"flops", "memory", "link"}:
        known = f"known are {', '.join(DATA_SHEETS)}, with a number before as in 8xH100; "
        raise ValueError(
            f"--on {on}: {'' if '=' in device else known}describe a device by all three of"
            " flops, memory and link, as in 8xflops=989e12,memory=80GB,link=64GB"
        )
    flops = number_of(given["flops"])
    if not 0 < flops < math.inf:
        raise ValueError(f"--on {on}: flops={given['flops']} is not FLOP/s such as 989e12")
    return flops, bytes_of("--on memory", given["memory"]), bytes_of("--on link", given["link"])
