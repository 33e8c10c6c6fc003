"""Memory of a CPU: what a step frees, the next one gets again. A GPU's is torch's own to keep.

glibc hands much of what is freed back to the kernel: large arrays at once, and the end of its heap
when that grows long. The next step asks for as much again, and gets every page zeroed, after a
fault of its own: 6,800 faults a step of nano, an eighth of its time (docs/step.md).
"""

import ctypes
import platform

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
