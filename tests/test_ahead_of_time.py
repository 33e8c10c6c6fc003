"""The Triton kernels, compiled for GPUs without having one, with the arguments we launch them with.

A fake driver that names an architecture replaces CUDA's, and every launch stops once the kernel is
compiled. The tests read from the compiled code whether it spills registers, how much shared memory
a block takes, whether products run on the matrix units, how wide memory accesses are, and how many
kernels a run with growing rows compiles. Nothing is timed.

    python -m pytest -n 0 -m slow tests/test_ahead_of_time.py
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import attention_tiles, cross_entropy, token_drop
from kernels.triton_here import triton

ROOT = Path(__file__).parents[1]
# KiB of shared memory available to a block: CUDA C++ Programming Guide, compute capabilities
SHARED_KIB = {80: 163, 89: 99, 90: 227}
MATRIX_UNITS = {80: "HMMA", 89: "HMMA", 90: "HGMMA"}
ATTENTION = ("forward_kernel", "dq_kernel", "dkv_kernel")


def tools() -> Path | None:
    """Return the folder of ptxas, cuobjdump and nvdisasm, which come with Triton."""
    folder = Path(triton.__file__ if triton else "").parent / "backends" / "nvidia" / "bin"
    complete = all((folder / name).is_file() for name in ("ptxas", "cuobjdump", "nvdisasm"))
    return folder if complete else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(tools() is None, reason="needs Triton with ptxas, cuobjdump and nvdisasm"),
]


def inspect(compiled, constants: dict) -> dict:
    """Return what the tests check of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def read(tool: str, option: str) -> str:
            return subprocess.check_output([tools() / tool, option, file.name], text=True)

        stack = int(re.search(r"STACK:(\d+)", read("cuobjdump", "--dump-resource-usage"))[1])
        operations = Counter(re.findall(r"\b(LDL|STL|HMMA|HGMMA)\b", read("nvdisasm", "-c")))

    def words(pattern: str) -> str:
        return " ".join(sorted(set(re.findall(pattern, compiled.asm["ptx"]))))

    return {
        "kernel": compiled.metadata.name,
        "D": constants.get("D"),  # head width, of attention kernels
        "key": compiled.hash,  # equal for launches that run the same code
        # loads and stores of spilled registers, and bytes of stack
        "spilled": stack + operations["LDL"] + operations["STL"],
        "shared": compiled.metadata.shared,  # bytes of shared memory per block
        # instructions that multiply matrices
        "matrix_units": " ".join(name for name in ("HMMA", "HGMMA") if operations[name]),
        "accesses": words(r"(?:ld|st)\.global[.\w]*"),  # loads and stores, in PTX
        "special": words(r"\b(cp\.async|atom|red)\."),  # asynchronous copies, atomic operations
    }


def print_kernels(arch: int, work: Callable[[], None]) -> None:
    """Print what the launches of `work` compile to. Runs in a separate process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **constants):
        kernels.append(inspect(run(self, *args, grid=grid, warmup=True, **constants), constants))

    answers = {  # what Triton asks the CUDA driver before a launch
        "get_current_target": lambda: GPUTarget("cuda", arch, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
    }
    driver.set_active(SimpleNamespace(launcher_cls=None, **answers))
    JITFunction.run = compile_only
    work()
    print(json.dumps(kernels))


def compile_kernels(arch: int, work: str, spilled: int = 0) -> list[SimpleNamespace]:
    """Return the kernels that `work`, a call of a function below, launches. Assert that a block's
    memory suffices, and that no kernel spills more than this.
    """
    script = f"from tests import test_ahead_of_time as t; t.print_kernels({arch}, lambda: t.{work})"
    env = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", script]
    child = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    kernels = [SimpleNamespace(**kernel) for kernel in json.loads(child.stdout)]
    for kernel in kernels:
        assert kernel.spilled <= spilled and kernel.shared <= SHARED_KIB[arch] << 10, kernel
    return kernels


def attention(dtype, causal, widths=attention_tiles.HEAD_WIDTHS, lengths=(256,)):
    """Launch packed attention, forward and backward, for these head widths and row lengths."""
    for D in widths:
        for T in lengths:
            q, k, v = torch.zeros(2, T, 3, 4, D, dtype=getattr(torch, dtype)).unbind(2)
            bounds = torch.zeros(2, T, dtype=torch.int32)
            out, lse = attention_tiles.forward(q, k, v, bounds, bounds, causal)
            attention_tiles.backward(out, (q, k, v, out, lse, bounds, bounds), causal)


def copies(dtype: str, widths: tuple[int, ...], kept: tuple[tuple[int, int], ...]) -> None:
    """Launch both kernels of token dropping, keeping K of T tokens."""
    for C in widths:
        for K, T in kept:
            x, y = (torch.zeros(2, n, C, dtype=getattr(torch, dtype)) for n in (T, K))
            positions = torch.zeros(2, K, dtype=torch.int64)
            token_drop.gather_kept(x, positions, "triton")
            token_drop.scatter_kept(x, positions, y, "triton")


def losses(dtype: str, vocabularies: tuple[int, ...]) -> None:
    """Launch the kernel of the loss, with and without a bias, shares and gradients."""
    for V in vocabularies:
        x, matrix = (torch.zeros(n, 8, dtype=getattr(torch, dtype)) for n in (4, V))
        targets = torch.zeros(4, dtype=torch.int64)
        for bias in (None, torch.zeros(V)):
            for shares in (None, torch.ones(4)):
                for wants_gradient in (True, False):
                    cross_entropy.losses_by_triton(x, matrix, bias, targets, shares, wants_gradient)


def compilations(kernels: list) -> Counter:
    """Return how often each kernel was compiled."""
    return Counter(name for name, _ in {(kernel.kernel, kernel.key) for kernel in kernels})


@pytest.mark.parametrize(("dtype", "causal"), [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("arch", SHARED_KIB)
def test_attention_spills_little_fits_and_multiplies_on_the_matrix_units(arch, dtype, causal):
    kernels = compile_kernels(arch, f"attention({dtype!r}, {causal})", spilled=48)
    everyone = {(name, D) for name in ATTENTION for D in attention_tiles.HEAD_WIDTHS}
    assert {(kernel.kernel, kernel.D) for kernel in kernels} == everyone
    # With D 128 its two sums fill the registers. On an H200, 28 spills cost nothing, and 200 double
    # the time.
    assert {(k.kernel, k.D) for k in kernels if k.spilled} <= {("dkv_kernel", 128)}
    assert {kernel.matrix_units for kernel in kernels} == {MATRIX_UNITS[arch]}
    assert {kernel.special for kernel in kernels} == {"cp.async"}, "no atomic additions"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", SHARED_KIB)
def test_copies_spill_nothing_and_access_memory_in_wide_words(arch, dtype):
    kernels = compile_kernels(arch, f"copies({dtype!r}, (100, 768, 1600), ((64, 256),))")
    assert len(kernels) == 6
    assert max(kernel.shared for kernel in kernels) <= 4 << 10
    wide = "ld.global.b64 ld.global.v4.b32 st.global.v4.b32"  # positions are int64
    assert [kernel.accesses == wide for kernel in kernels[2:]] == 4 * [True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", SHARED_KIB)
def test_losses_spill_nothing_and_compile_once_for_all_vocabularies(arch, dtype):
    kernels = compile_kernels(arch, f"losses({dtype!r}, (4160, 50_257))")
    assert len(kernels) == 16
    assert compilations(kernels) == {"losses_kernel": 8}
    # single numbers: a row's target, the logit of the target, and the loss
    single = {"ld.global.b64", "ld.global.b16", "st.global.b32"}
    wide = {"ld.global.v4.b32", "st.global.v4.b32"}
    assert set(kernels[0].accesses.split()) == single | wide


# Unless told otherwise, Triton compiles again for 1, for multiples of 16, and for other lengths.
LENGTHS = (1024, 1000, 512, 24, 17, 16, 1)
KEPT = ((1, 1), *((K, T) for T in (1024, 1000) for K in (928, 501, 352, 64, 1)))


def test_growing_rows_compile_each_kernel_once():
    kernels = compile_kernels(90, f"attention('bfloat16', True, (64,), {LENGTHS})")
    assert len(kernels) == 3 * len(LENGTHS)
    assert compilations(kernels) == dict.fromkeys(ATTENTION, 1)
    kernels = compile_kernels(90, f"copies('float32', (768,), {KEPT})")
    assert len(kernels) == 2 * len(KEPT)
    assert compilations(kernels) == {"gather_kernel": 1, "scatter_kernel": 1}
