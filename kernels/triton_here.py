"""Triton, if it is installed, and whether operations run as its kernels on this machine.

Every kernel file takes `triton` and `tl` from here. Both are None where Triton has no build.

python -c "from kernels.triton_here import why_not; print(why_not('cuda'))"
"""

import os
import shutil
import sysconfig
from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # it has no build for this platform
    triton = tl = None

OLDEST = (8, 0)  # compute capability, Ampere's


def why_not(device: str) -> str | None:
    """Say why operations on a device do not use Triton's kernels; None if they do.

    Below compute capability 8.0 Triton multiplies matrices without the matrix units. Before the
    first kernel runs, Triton builds a launcher in C, for which it needs $CC, gcc or clang, and
    Python's headers (triton/runtime/build.py, the same from 3.6 to 3.9).

    Args: device cpu | cuda | another device type of torch; of several GPUs the current one counts
    """
    return looked_up(device)  # torch.compile would trace into a cached function


# What torch.compiler.assume_constant_result does, which imports the compiler first: 1.3 seconds.
why_not._dynamo_marked_constant = True


@cache
def looked_up(device: str) -> str | None:
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
        return f"Triton needs a C compiler, and there is no {' or '.join(compilers)}"
    if not python_header().is_file():
        return f"Triton needs Python's headers, and there is no {python_header()}"
    return None


def check_impl(impl: str, impls: Collection[str], device: str) -> None:
    """Refuse an implementation that is none of `impls`, and Triton's where it cannot run."""
    if impl not in impls:
        raise ValueError(f"impl {impl!r} is unknown: choose one of {', '.join(impls)}")
    if impl != "triton":
        return
    if triton is None:
        raise ValueError("impl 'triton': Triton is not installed here, choose another")
    if device != "cuda" and isinstance(nothing, triton.JITFunction):
        raise ValueError(
            "impl 'triton' wants CUDA tensors, or TRITON_INTERPRET=1 set before Python starts"
        )


if triton is not None:

    @triton.jit
    def nothing():
        """Interpreted or compiled, as every kernel of this process."""


def python_header() -> Path:
    """Python.h, where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h")
