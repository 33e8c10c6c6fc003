"""Memory: what a machine has free, and how a CPU gets again what the step before freed.

A GPU's freed memory is torch's own to keep. On a CPU glibc hands much of what is freed back to the
kernel: large arrays at once, and the end of its heap when that grows long. The next step asks for
as much again, and gets every page zeroed, after a fault of its own: 6,800 faults a step of nano, an
eighth of its time (docs/step.md).
"""

import ctypes
import platform
import re
from pathlib import Path

import torch

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
