"""Whether operations run as Triton's kernels on this machine: one answer for all, with its reason.

python -c "from kernels.triton_here import why_not; print(why_not('cuda'))"
"""

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

import torch

try:
    import triton
except ImportError:  # it has no build for this platform
    triton = None

OLDEST = (8, 0)  # compute capability, Ampere's


@torch.compiler.assume_constant_result
def why_not(device: str) -> str | None:
    """Say why operations on such a device are PyTorch's own; None if they are Triton's kernels.

    Below compute capability 8.0 Triton compiles products of matrices without the matrix units.
    As the first kernel runs, Triton builds a launcher in C: it takes $CC, or else gcc or clang, and
    Python's headers (triton/runtime/build.py, the same from 3.6 to 3.9).

    Args: device cpu | cuda | another type of torch's; of several GPUs the current one is asked
    """
    return looked_up(device)  # a compiler would look into a function with a cache


@cache
def looked_up(device: str) -> str | None:
    if device != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if triton is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        found, oldest = (".".join(map(str, version)) for version in (capability, OLDEST))
        return f"compute capability {found} is below {oldest}"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler, and there is no {' or '.join(compilers)}"
    if not python_header().is_file():
        return f"Triton needs Python's headers, and there is no {python_header()}"
    return None


def python_header() -> Path:
    """Python.h, where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h")
