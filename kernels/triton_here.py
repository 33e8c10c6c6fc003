"""Import Triton if it is installed, and decide whether this machine uses its kernels.

Every kernel file imports `triton` and `tl` from here. Both are None if Triton is not installed.

python -c "from kernels.triton_here import why_not; print(why_not('cuda'))"
"""

import os
import shutil
import sysconfig
from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # there is no build for this platform
    triton = tl = None

OLDEST = (8, 0)  # compute capability of Ampere


def why_not(device: str) -> str | None:
    """Return the reason why a device does not use Triton's kernels, or None if it does.

    Below compute capability 8.0, Triton multiplies matrices without the matrix units. Before the
    first kernel runs, Triton builds a launcher in C, for which it needs $CC, gcc or clang, and
    Python's headers (triton/runtime/build.py, the same from 3.6 to 3.9).

    Args: device cpu | cuda | another device type of torch; of several GPUs, the current one decides
    """
    return cached_why_not(device)  # separate, because torch.compile traces into cached functions


# This is what torch.compiler.assume_constant_result does, but that imports the compiler (1.3 s).
why_not._dynamo_marked_constant = True


@cache
def cached_why_not(device: str) -> str | None:
    if device != "cuda" or not torch.cuda.is_available():
        return "no CUDA device"
    if triton is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST:
        ours, oldest = (".".join(map(str, version)) for version in (capability, OLDEST))
        return f"compute capability {ours} is below {oldest}"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler, and {' or '.join(compilers)} was not found"
    if not python_header().is_file():
        return f"Triton needs Python's headers, and {python_header()} was not found"
    return None


def check_impl(impl: str, impls: Collection[str], device: str) -> None:
    """Refuse an implementation that is not one of `impls`, or triton where it cannot run."""
    if impl not in impls:
        raise ValueError(f"impl {impl!r} is unknown: choose one of {', '.join(impls)}")
    if impl == "triton" and triton is None:
        raise ValueError("impl 'triton': Triton is not installed here, choose another")
    if impl == "triton" and device != "cuda" and isinstance(nothing, triton.JITFunction):
        raise ValueError("impl 'triton' needs CUDA tensors, or TRITON_INTERPRET=1 at the start")


def adjacent(x: Tensor) -> Tensor:
    """Return x with its last dimension adjacent in memory, a copy only if it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()


if triton is not None:

    @triton.jit
    def nothing():
        """Shows whether the kernels of this process are interpreted or compiled."""


def python_header() -> Path:
    """Return the path at which Triton looks for Python.h."""
    # posix_local is Debian's
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h")
