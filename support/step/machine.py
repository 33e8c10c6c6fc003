"""The most FLOP/s of a run's devices, measured on a CPU and else as the vendor says: for MFU."""

import re
import time
from functools import cache
from typing import NamedTuple

import torch

from support.runtime import DTYPES, Runtime


class Peak(NamedTuple):
    """The most floating-point operations a second."""

    flops: float | None  # of all ranks; None if unknown
    why: str


class Machine(NamedTuple):
    """What its vendor says of a device."""

    pattern: str  # of torch's name of it
    half: float  # TFLOP/s of dense matrix products in 16 bits, with sums in fp32
    single: float  # in 32 bits, which is TF32 (support/runtime.py asks for it)


# The first that matches torch's name of a device. From NVIDIA's data sheets, with figures "with
# sparsity" halved; for GeForce cards from the architectures' white papers.
DATA_SHEETS = (
    Machine("B200", 2250, 1125),
    Machine("H200 NVL", 835.5, 417.5),
    Machine("H100 NVL", 835.5, 417.5),
    Machine("GH200", 989.4, 494.7),
    Machine("H200", 989.4, 494.7),
    Machine("H100.*(HBM3|SXM)", 989.4, 494.7),
    Machine("H100 PCIe", 756, 378),
    Machine("A100", 312, 156),
    Machine("A10( |$)", 125, 62.5),
    Machine("L40S", 362, 183),
    Machine("L4( |$)", 121, 60),
    Machine("RTX 4090$", 165.2, 82.6),
    Machine("RTX 3090$", 71, 35.6),
)


def peak(runtime: Runtime) -> Peak:
    """The peak of all ranks together, assuming equal devices."""
    device, dtype = runtime.device, runtime.dtype
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
    """FLOP/s of a GPU of this name; None if it is not in the table."""
    for machine in DATA_SHEETS:
        if re.search(machine.pattern, name):
            return 1e12 * (machine.half if dtype.itemsize == 2 else machine.single)
    return None


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
