"""Shared by several test files: a small real store, and training runs that take a second."""

import itertools
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import Process, get_context, set_forkserver_preload
from pathlib import Path
from random import SystemRandom

# One thread, also in the processes that tests start: with more threads sums are added in another
# order, and small tensors are slower. Set before torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.multiprocessing import start_processes

# Triton kernels that are defined under its interpreter run on CPU tensors, slowly. Set before
# anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import config
import train
from kernels.triton_here import tl, triton
from prepare import prepare
from support.clock import Clock
from support.process import ROOT, exit_cleanly
from support.tokenizer import get_encoding

# Handle signals again, which a parent such as nohup or a shell with `&` may ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# On a busy machine an example may take any time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
train.SAMPLE_TOKENS = 3  # a sample of the default length takes half the time of a tiny run

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"
BYTES = get_encoding("bytes")

SMALL = "--tokenizer bytes --layers 4 --heads 2 --width 32 --seq-len 32 --batch-tokens 256"
SMALL += " --tokens 4096 --eval-every 2048 --eval-tokens 500 --final-eval-tokens 1000"
SMALL += " --checkpoint-every 1024 --device cpu"
ALL_ON = "--curriculum seqlen,rarity --curriculum-start 8,1 --ltd --ltd-start 16 --pack"


def pytest_configure(config):
    """Let a SIGTERM end the tests as Ctrl-C does, so that bench/gpu.sh gets the results so far."""
    if config.option.xmlpath and not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(autouse=True)
def destroy_process_group():
    """A run with --fsdp creates a process group, and `exit_cleanly` ends a process that has one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory):
    """The store of the small corpus, tokenized as bytes: 481 documents, 27 of them held out."""
    out = tmp_path_factory.mktemp("store") / "tiny"
    prepare([TINY], out, BYTES)
    return out


@pytest.fixture
def run(store_dir, tmp_path, monkeypatch):
    """Train in this process and return the lines of the log: run("--ltd", out="a")"""
    monkeypatch.chdir(tmp_path)

    def start(flags: str = "", out: str = "run") -> list[dict]:
        assert train.main(f"{SMALL} --data {store_dir} --out {out} {flags}".split()) == 0
        return read_log(tmp_path / out)

    return start


@pytest.fixture(scope="module")
def no_sample_or_report():
    """Make runs end without a sample and a report, which take longer than the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.sample, "continue_text", lambda *_, **more: "")
        patch.setattr(train.report, "write_page", lambda folder, *_, **more: folder)
        yield


@pytest.fixture(scope="session")
def finished(store_dir, tmp_path_factory):
    """The folder of a finished run; each set of flags runs once."""

    @cache
    def folder(flags: str) -> Path:
        out = tmp_path_factory.mktemp("finished") / "run"
        assert train.main(f"{SMALL} --data {store_dir} --out {out} {flags}".split()) == 0
        return out

    return folder


@pytest.fixture(scope="session")
def log_of(finished):
    """The log of a run that others are compared with: log_of("--ltd")"""
    return lambda flags="": read_log(finished(flags))


FEW = "--tokens 512 --batch-tokens 256 --device cpu --checkpoint-every 256"
FEW += " --eval-every 256 --eval-tokens 99 --final-eval-tokens 99"


@pytest.fixture(scope="session")
def run_of(finished):
    """The folder of a finished run of two steps: run_of("--model bert")"""
    return lambda flags="": finished(f"{FEW} {flags}")


# Processes from `get_context("forkserver")` start with these modules loaded; importing them takes
# seconds in each process that "spawn" or torchrun starts.
set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch._dynamo", "triton"])


def start_ranks(
    ranks: int, *runs: list[str], work: Callable = train.main, join: bool = True
) -> list[Process]:
    """Start ranks as torchrun does; each runs `work` with the first list of flags, then the next.

    Args: work a function of the flags of one run, which another process can import
          join wait for the ranks, and raise the error of one that fails
    """
    arguments = (ranks, free_port(), Path.cwd(), work, runs)
    started = start_processes(run_rank, arguments, ranks, join=False, start_method="forkserver")
    while join and not started.join():
        pass  # until the last one has ended
    return started.processes


def free_port() -> str:
    """Return a port below 32,768: from there on Linux gives ports to other tests' connections.

    Each process draws from ports of its own: nobody listens on them before the ranks do.
    """
    while True:
        port = SystemRandom().randrange(20_000 + os.getpid() % 64, 32_000, 64)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def run_rank(rank: int, ranks: int, port: str, cwd: Path, work: Callable, runs: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(cwd)
    exit_cleanly(lambda: max(work(flags) or 0 for flags in runs))


def build(line: str) -> config.Config:
    """Return the settings of a command line."""
    return config.build(config.parse(line.split()))


def read_log(folder: Path, event: str | None = None) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def losses_of(folder: str | Path) -> list[float]:
    """Return the loss of each step of a run."""
    return [line["loss"] for line in read_log(Path(folder), "train")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same(a: object, b: object) -> bool:
    """Whether two checkpoints have the same entries and, bit for bit, the same tensors."""
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def first_steps(plan: Callable, count: int) -> list:
    """Plan the first `count` steps of a run."""
    steps, clock = [], Clock()
    for _ in range(count):
        steps.append(plan(clock))
        clock = steps[-1].after
    return steps


@contextmanager
def at_step(number: int, do: Callable[[], object], rank: int = 0) -> Iterator[None]:
    """Call `do` on one rank just before this step."""
    real = train.Trainer.train_step

    def train_step(self, step):
        if (step.after.step, self.runtime.rank) == (number, rank):
            do()
        return real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", train_step)
        yield


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")  # Python's audit events


def kill_at(number: int, action: Callable) -> int:
    """Run `action` in a process that is killed before its change of the file system with this
    number, counted from 1; return the exit status. With 0 it is not killed.
    """

    def act() -> None:
        made = itertools.count(1)

        def hear(event: str, about: tuple) -> None:
            writes = event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR)
            if (writes or event in CHANGES) and next(made) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hear)
        action()
        os._exit(0)

    process = get_context("fork").Process(target=act)  # has torch imported already
    process.start()
    process.join()
    return process.exitcode


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def resume_fails(folder: Path, says: str, flags: str = "") -> None:
    """Assert that --resume fails with one line that matches `says`, and changes no file."""
    before = contents(folder)
    argv = ["--resume", "--out", str(folder), *flags.split()]
    assert re.search(says, refusal(train.main, argv)) and contents(folder) == before


def command_error(main: Callable, argv: list[str], monkeypatch, capsys) -> str:
    """Return what a refused command prints; assert that it is one line and the exit status is 2."""
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(main)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def refusal(action: Callable, *arguments, **options) -> str:
    """Return the message of the refusal that this call raises; assert that it is one line."""
    with pytest.raises((ValueError, OSError)) as refused:
        action(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write_lines(path: Path, lines: list) -> Path:
    """Write a file of JSON lines; strings are written unchanged."""
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))
    return path


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Redraw the weights, so wide that a wrong mask or position changes every output."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        is_norm_scale = ("ln" in name or "_norm" in name) and name.endswith("weight")
        torch.nn.init.normal_(weight, mean=1.0 if is_norm_scale else 0.0, std=0.2)
    return model


def metrics(lines: list[dict]) -> list[dict]:
    """Return what a run computed: the log's lines without times, costs and difficulty."""
    left_out = ("ms", "data_ms", "tokens_per_s", "mfu", "flops", "pool", "difficulty", "peak")
    return [
        {name: value for name, value in line.items() if not name.startswith(left_out)}
        for line in lines
        if line["event"] not in ("run", "checkpoint")
    ]


if triton is not None:

    @triton.jit
    def count_up(out, n):
        for i in range(0, n):
            tl.store(out + i, i)


@cache
def why_no_triton(device: str, loops: bool) -> str:
    """Return why kernels cannot run, compiled on a GPU or interpreted on a CPU; "" if they can.

    Kernels with loops need more: Triton 3.6's interpreter converts the end of a loop, an array of
    one element, to an integer, which NumPy refuses from 2.4 on.
    """
    if triton is None:
        return "Triton is not installed"
    if device != "cpu":
        return ""
    if isinstance(count_up, triton.JITFunction):
        return "this machine has a GPU, and kernels are compiled for it: see the cuda tests"
    if not loops:
        return ""
    try:
        count_up[1,](torch.zeros(3), 3)
    except Exception as error:
        if "only 0-dimensional arrays can be converted to Python scalars" in str(error):
            return f"Triton's interpreter cannot loop with NumPy {np.__version__}"
        raise
    return ""


def needs_triton(device: str = "cpu", loops: bool = True) -> None:
    if why := why_no_triton(device, loops):
        pytest.skip(why)


@pytest.fixture
def empty_is_full_of_nan(monkeypatch):
    """Fill new memory with NaN, so that what a kernel forgets to write is not right by chance."""
    plain = torch.empty

    def empty(*shape, **options):
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", empty)
