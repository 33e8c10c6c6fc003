"""Devices, and how a command of one or several processes ends."""

import importlib
import json
import platform
import resource
import sys
import sysconfig
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch
from conftest import start_ranks
from torch._subclasses import FakeTensorMode

from kernels import triton_here
from kernels.packed_attention import chosen_impl
from kernels.token_drop import checked_impl
from kernels.triton_here import why_not
from support import runtime
from support.runtime import ROOT, exit_cleanly, start

# --- devices


def test_start_says_what_it_chose_and_refuses_what_is_not_there():
    chosen = start("cpu", "auto")
    assert chosen.dtype == torch.float32 and chosen.is_rank0
    assert "cpu (as asked), fp32" in chosen.why
    assert not chosen.autocast()._enabled
    assert start("cpu", "bf16").autocast()._enabled
    for device, dtype, said in (("nope", "auto", "--device nope: torch finds cpu here: try auto"),):
        with pytest.raises(ValueError, match=said):
            start(device, dtype)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU as far as one is asked, with Triton and gcc; called with a compute capability."""

    def of(major: int, minor: int) -> None:
        answers = {
            "is_available": True,
            "current_device": 0,
            "set_device": None,
            "get_device_capability": (major, minor),
            "get_device_properties": SimpleNamespace(major=major, minor=minor),
            "_check_bf16_tensor_supported": True,  # by emulation
            "mem_get_info": (1 << 30, 1 << 30),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        triton_here.looked_up.cache_clear()

    (tmp_path / "gcc").touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_here, "triton", object())
    monkeypatch.setattr(triton_here, "python_header", lambda: Path(__file__))
    yield of
    triton_here.looked_up.cache_clear()


def assert_both_take(impl: str) -> None:
    """What either operation chooses for CUDA tensors."""
    assert chosen_impl("cuda", torch.bfloat16, 64) == ("triton" if impl == "triton" else "dense")
    with FakeTensorMode():
        x = torch.empty(2, 5, 4, device="cuda")
    kept = torch.zeros(2, 3, dtype=torch.int64)
    assert x.is_cuda and checked_impl("auto", x, kept) == impl


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((7, 0), torch.float32, "fp32, one process, 1 threads; no Triton kernels: compute"),
        ((7, 5), torch.float32, "no Triton kernels: compute capability 7.5 is below 8.0"),
        ((8, 0), torch.bfloat16, "bf16, one process, 1 threads; Triton kernels"),
        ((12, 0), torch.bfloat16, "; Triton kernels"),
    ],
)
def test_a_gpu_gets_the_dtype_and_the_kernels_that_it_has_units_for(
    gpu, capability, dtype, said, monkeypatch, tmp_path
):
    gpu(*capability)
    if capability == (8, 0):  # any compiler that Triton takes will do
        (tmp_path / "gcc").rename(tmp_path / "clang")
    if capability == (12, 0):
        (tmp_path / "gcc").rename(tmp_path / "icx")
        monkeypatch.setenv("CC", str(tmp_path / "icx"))
    assert torch.cuda.is_bf16_supported(), "counting emulation"
    chosen = start("cuda", "auto")
    assert chosen.dtype == dtype and said in chosen.why
    assert_both_take("torch" if capability < (8, 0) else "triton")
    assert start("cuda", "bf16").dtype == torch.bfloat16, "as asked"


WITHOUT = {  # what is said, and what is missing
    "Triton needs a C compiler, and there is no gcc or clang": lambda patch, programs: (
        programs / "gcc"
    ).unlink(),
    # which Triton takes, and no other
    "Triton needs a C compiler, and there is no nvc": lambda patch, _: patch.setenv("CC", "nvc"),
    "Triton needs Python's headers, and there is no /nowhere/Python.h": lambda patch, _: (
        patch.setattr(triton_here, "python_header", lambda: Path("/nowhere/Python.h"))
    ),
    "Triton is not installed": lambda patch, _: patch.setattr(triton_here, "triton", None),
}


@pytest.mark.parametrize(("said", "take_away"), WITHOUT.items(), ids=range(4))
def test_what_triton_misses_is_said_once_and_pytorch_takes_over(
    gpu, said, take_away, monkeypatch, tmp_path
):
    take_away(monkeypatch, tmp_path)
    gpu(9, 0)
    assert start("cuda", "auto").why.endswith(f"; no Triton kernels: {said}")
    assert_both_take("torch")


def test_torch_compile_takes_the_choice_as_a_constant():
    def add(x):
        return x + 1 if why_not("cpu") else x

    torch.compiler.reset()
    assert torch.compile(add, backend="eager", fullgraph=True)(torch.zeros(())).item() == 1


def test_debians_python_has_its_headers_where_others_have_them(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    header = triton_here.python_header()
    assert header.name == "Python.h" and str(header.parent) == sysconfig.get_path("include")


# --- how one process ends

ENDS = {  # what main does -> status, and what is said
    "a mistake": (ValueError("--flag 3:\n too much"), 2, "error: --flag 3: too much\n"),
    "a file": (FileNotFoundError(2, "No such file", "/x/y"), 2, "error: /x/y: No such file\n"),
    "an interrupt": (KeyboardInterrupt(), 130, ""),
    "a status": (143, 143, ""),
    "nothing": (None, 0, ""),
}


def ending_with(does: object) -> int:
    with pytest.raises(SystemExit) as end:
        exit_cleanly(lambda: do(does))
    return end.value.code


def do(does: object) -> object:
    if isinstance(does, BaseException):
        raise does
    return does


@pytest.mark.parametrize(("does", "status", "said"), ENDS.values(), ids=ENDS)
def test_how_a_command_ends(does, status, said, capsys):
    assert (ending_with(does), capsys.readouterr().err) == (status, said)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_cleanly(lambda: 1 / 0)


def test_rank_0_says_a_mistake_and_torchrun_quotes_it(monkeypatch, capsys, tmp_path):
    for rank, said in ((0, "error: --flag 3\n"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        assert ending_with(ValueError("--flag 3")) == 2
        assert capsys.readouterr().err == said
        quoted = json.loads((tmp_path / f"{rank}.json").read_text())["message"]
        assert "--flag 3" in quoted["message"]


TOP_LEVEL = ("analyze", "evaluate", "packing", "prepare", "report", "sample", "train")
SUPPORT = ("support.weights",)


@pytest.mark.parametrize("name", [*TOP_LEVEL, *SUPPORT])
def test_a_flag_that_a_command_does_not_know_is_one_line(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--bogus"])
    with pytest.raises(ValueError, match=r"^[^\n]*\(see --help\)$"):
        importlib.import_module(name).main()


def test_a_reader_that_has_read_enough_ends_a_command_without_a_word():
    code = "from support.runtime import exit_cleanly\nexit_cleanly(lambda: print('x' * 10**6))"
    command = Popen([sys.executable, "-c", code], stdout=PIPE, stderr=PIPE, cwd=ROOT)
    command.stdout.close()
    assert command.stderr.read() == b"" and command.wait() == 141


def check_faults(flags: list[str]) -> None:
    """Page faults of two steps after the first, before and after freed memory is kept."""

    def faults() -> int:
        [torch.ones(4_000_000) for _ in range(4)]  # 64 MB, freed together
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = [faults() for _ in range(3)]
    runtime.keep_freed_memory()
    after = [faults() for _ in range(3)]
    assert before[2] - before[0] > 7_000, "else there is nothing to mend here"
    assert after[2] - after[0] < (before[2] - before[0]) / 2


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_steps_get_the_pages_of_the_steps_before():
    start_ranks(1, [], work=check_faults)
