"""The log, devices, and how a command ends."""

import importlib
import json
import subprocess
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels import triton_here
from kernels.packed_attention import chosen_impl
from kernels.token_drop import checked_impl
from kernels.triton_here import why_not
from support.base import runtime
from support.run import folder
from support.run.folder import Log


def test_provenance_names_the_commit_from_wherever_it_is_asked(tmp_path, monkeypatch):
    command = ["git", "describe", "--always", "--dirty"]
    git = subprocess.run(command, cwd=runtime.ROOT, capture_output=True, text=True)
    monkeypatch.chdir(tmp_path)
    folder.commit.cache_clear()
    assert folder.provenance()["commit"] == (git.stdout.strip() or "none")
    assert (runtime.ROOT / "train.py").is_file()


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"--device nope is unknown: choose auto, cpu, cuda, mps"):
        runtime.start("nope", "auto")


def test_provenance_without_git_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    folder.commit.cache_clear()
    assert folder.provenance()["commit"] == "none"
    folder.commit.cache_clear()


def test_log_forgets_what_a_killed_run_wrote_behind_its_checkpoint(tmp_path):
    log = Log(tmp_path, True, False)
    log.write("train", step=1)
    size = log.size()
    log.write("train", step=2)
    log.file.write(b'{"event": "tra')  # torn by the kill
    log.file.close()
    log = Log(tmp_path, True, False, size)
    log.write("train", step=2, again=True)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert log.size() == (tmp_path / "log.jsonl").stat().st_size


def test_log_shorter_than_the_checkpoint_remembers_is_not_filled_up(tmp_path):
    """After a power cut the log may have lost lines that the fsynced checkpoint counts."""
    log = Log(tmp_path, True, False, 1000)
    log.write("train", step=1)
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 1


def test_other_ranks_write_no_log(tmp_path):
    Log(tmp_path, False, False).write("train", step=1)
    assert not list(tmp_path.iterdir())


def test_start_says_what_it_chose():
    found = runtime.start("cpu", "auto")
    assert found.dtype == torch.float32 and found.is_rank0 and "cpu (as asked), fp32" in found.why
    assert not found.autocast()._enabled
    assert runtime.start("cpu", "bf16").autocast()._enabled


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

    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_here, "triton", object())
    monkeypatch.setattr(triton_here, "python_header", lambda: runtime.Path(__file__))
    yield of
    triton_here.looked_up.cache_clear()


def assert_both_take(impl: str) -> None:
    """What either operation chooses for CUDA tensors."""
    in_triton = impl == "triton"
    assert chosen_impl("cuda", torch.bfloat16, 64) == ("triton" if in_triton else "dense")
    with FakeTensorMode():
        x = torch.empty(2, 5, 4, device="cuda")
    kept = torch.zeros(2, 3, dtype=torch.int64)
    assert x.is_cuda and checked_impl("auto", x, kept) == impl


@pytest.mark.parametrize(
    ("capability", "dtype", "said"),
    [
        ((7, 0), torch.float16, "fp16, one process, 1 threads; no Triton kernels: compute"),
        ((7, 5), torch.float16, "no Triton kernels: compute capability 7.5 is below 8.0"),
        ((8, 0), torch.bfloat16, "bf16, one process, 1 threads; Triton kernels"),
        ((8, 9), torch.bfloat16, "; Triton kernels"),
        ((9, 0), torch.bfloat16, "; Triton kernels"),
        ((12, 0), torch.bfloat16, "; Triton kernels"),
    ],
)
def test_a_gpu_gets_the_dtype_and_the_kernels_that_it_has_units_for(gpu, capability, dtype, said):
    gpu(*capability)
    assert torch.cuda.is_bf16_supported(), "counting emulation"
    found = runtime.start("cuda", "auto")
    assert found.dtype == dtype and said in found.why
    assert_both_take("torch" if capability < (8, 0) else "triton")
    assert runtime.start("cuda", "bf16").dtype == torch.bfloat16, "as asked"


WITHOUT = {  # what is missing -> what is said
    "a compiler": "Triton needs a C compiler, and there is no gcc or clang",
    "the compiler of CC": "Triton needs a C compiler, and there is no nvc",
    "headers": "Triton needs Python's headers, and there is no /nowhere/Python.h",
    "Triton": "Triton is not installed",
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_what_triton_misses_is_said_once_and_pytorch_takes_over(
    gpu, missing, monkeypatch, tmp_path
):
    if missing == "a compiler":
        (tmp_path / "gcc").unlink()
    elif missing == "the compiler of CC":
        monkeypatch.setenv("CC", "nvc")  # which Triton takes, and no other
    elif missing == "headers":
        header = runtime.Path("/nowhere/Python.h")
        monkeypatch.setattr(triton_here, "python_header", lambda: header)
    else:
        monkeypatch.setattr(triton_here, "triton", None)
    gpu(9, 0)
    assert runtime.start("cuda", "auto").why.endswith(f"; no Triton kernels: {WITHOUT[missing]}")
    assert_both_take("torch")


def test_any_compiler_that_triton_takes_will_do(gpu, monkeypatch, tmp_path):
    (tmp_path / "gcc").rename(tmp_path / "clang")
    gpu(8, 0)
    assert why_not("cuda") is None
    (tmp_path / "clang").rename(tmp_path / "icx")
    monkeypatch.setenv("CC", str(tmp_path / "icx"))
    gpu(8, 0)
    assert why_not("cuda") is None


def test_torch_compile_takes_the_choice_as_a_constant():
    def add(x):
        return x + 1 if why_not("cpu") else x

    torch.compiler.reset()
    assert torch.compile(add, backend="eager", fullgraph=True)(torch.zeros(())).item() == 1


def test_debians_python_has_its_headers_where_others_have_them(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    header = triton_here.python_header()
    assert header.name == "Python.h" and str(header.parent) == sysconfig.get_path("include")


ENDS = {  # what main does -> status, and what is said
    "a mistake": (ValueError("--flag 3:\n too much"), 2, "error: --flag 3: too much\n"),
    "a file": (FileNotFoundError(2, "No such file", "/x/y"), 2, "error: /x/y: No such file\n"),
    "an interrupt": (KeyboardInterrupt(), 130, ""),
    "a status": (143, 143, ""),
    "nothing": (None, 0, ""),
}


@pytest.mark.parametrize(("does", "status", "said"), list(ENDS.values()), ids=list(ENDS))
def test_how_a_command_ends(does, status, said, capsys):
    def main():
        if isinstance(does, BaseException):
            raise does
        return does

    with pytest.raises(SystemExit) as end:
        runtime.exit_cleanly(main)
    assert (end.value.code, capsys.readouterr().err) == (status, said)


def test_flags_that_no_rank_understands_are_said_by_rank_0(monkeypatch, capsys, tmp_path):
    for rank, said in ((0, "error: --flag 3\n"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        with pytest.raises(SystemExit):
            runtime.exit_cleanly(lambda: raise_(ValueError("--flag 3")))
        assert capsys.readouterr().err == said
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["message"]["extraInfo"]["py_callstack"] == "error: --flag 3"


def test_a_file_that_torchrun_has_lost_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    with pytest.raises(SystemExit):
        runtime.exit_cleanly(lambda: raise_(ValueError("--flag 3")))


def raise_(error: Exception) -> None:
    raise error


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        runtime.exit_cleanly(lambda: 1 / 0)


TOP_LEVEL = ("analyze", "curriculum", "evaluate", "ltd", "packing", "prepare", "sample", "train")
SUPPORT = ("support.run.checkpoint", "support.weights.published", "support.text.tokenizer")


@pytest.mark.parametrize("name", [*TOP_LEVEL, *SUPPORT])
def test_a_flag_that_a_command_does_not_know_is_one_line(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--bogus"])
    with pytest.raises(ValueError, match=r"^[^\n]*\(see --help\)$"):
        importlib.import_module(name).main()
