"""What several test files need: a small real store, and runs that take a second."""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from random import SystemRandom

# One thread, also in the processes that tests start: another number sums in another order, and
# small tensors are faster without company. Set before torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

# Triton's kernels run on CPU tensors, slowly, where they are defined under its interpreter. Set
# before anything imports Triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import evaluate
import train
from analyze import training_samples
from kernels.triton_here import tl, triton
from prepare import prepare
from support.clock import Clock
from support.runtime import exit_cleanly
from support.store import get_encoding


def hear_signals() -> None:
    """What started the tests may ignore some, as nohup does, or a shell that put them behind."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


hear_signals()
train.SAMPLE_TOKENS = 3  # the whole one takes half of the time of a tiny run

ROOT = Path(__file__).parents[1]
TINY = ROOT / "corpus" / "pd-tiny.jsonl.gz"

SMALL = (
    "--tokenizer bytes --layers 4 --heads 2 --width 32 --seq-len 32 --batch-tokens 256"
    " --tokens 4096 --eval-every 2048 --eval-tokens 500 --final-eval-tokens 1000"
    " --checkpoint-every 1024 --device cpu"
)
ALL_ON = "--curriculum seqlen,rarity --curriculum-start 8,1 --ltd --ltd-start 16 --pack"


def pytest_configure(config):
    """A SIGTERM ends the tests as Ctrl-C does, so that bench/gpu.sh gets those that were made."""
    if config.option.xmlpath and not hasattr(config, "workerinput"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A run with --fsdp makes one of itself, and `exit_cleanly` ends a process that has one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def store_dir(tmp_path_factory):
    """The small corpus as bytes: 481 documents, of which 27 are held out."""
    out = tmp_path_factory.mktemp("store") / "tiny"
    prepare([TINY], out, get_encoding("bytes"), "bytes")
    return out


@pytest.fixture
def new_process():
    """A process opens a store once; here one path may hold several."""
    training_samples.cache_clear()


@pytest.fixture
def run(store_dir, tmp_path, monkeypatch):
    """Train in this process; returns the log's lines. run("--ltd", out="a")"""
    monkeypatch.chdir(tmp_path)

    def start(flags: str = "", out: str = "run") -> list[dict]:
        argv = f"{SMALL} --data {store_dir} --out {out} {flags}".split()
        status = train.main(argv)
        assert status == 0
        return read_log(tmp_path / out)

    return start


@pytest.fixture(scope="module")
def short_ends():
    """Runs end without a sample and a report, which take longer than their steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.sample, "write", lambda *_, **more: "")
        patch.setattr(train.report, "write", lambda folder, *_, **more: folder)
        yield


@pytest.fixture(scope="session")
def finished(store_dir, tmp_path_factory):
    """The folder of a run, made once."""

    @cache
    def folder(flags: str) -> Path:
        out = tmp_path_factory.mktemp("finished") / "run"
        assert train.main(f"{SMALL} --data {store_dir} --out {out} {flags}".split()) == 0
        return out

    return folder


@pytest.fixture(scope="session")
def log_of(finished):
    """The log of a run that other runs are compared with: log_of("--ltd")"""
    return lambda flags="": read_log(finished(flags))


FEW = "--tokens 512 --batch-tokens 256 --device cpu --checkpoint-every 256"
FEW += " --eval-every 256 --eval-tokens 99 --final-eval-tokens 99"


@pytest.fixture(scope="session")
def run_of(finished):
    """The folder of a run of two steps: run_of("--model bert")"""
    return lambda flags="": finished(f"{FEW} {flags}")


# Processes that tests start by `get_context("forkserver")` have these loaded as they begin, which
# takes each process of "spawn" or of torchrun seconds.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch._dynamo", "triton"]
)


def start_ranks(ranks: int, *runs: list[str], work: Callable = train.main) -> None:
    """Start ranks as torchrun does, which train with these flags, then with the next ones.

    Args: work what a rank does with the flags of a run; a function that another process can import
    """
    arguments = (ranks, a_port(), Path.cwd(), work, runs)
    start_processes(rank_of, arguments, nprocs=ranks, start_method="forkserver")


def a_port() -> str:
    """Below 32,768, where Linux begins with the ports that it gives to other tests' connections."""
    port = SystemRandom().randrange(20_000, 32_000)
    with socket.create_server(("127.0.0.1", port)):
        return str(port)


def rank_of(rank: int, ranks: int, port: str, cwd: Path, work: Callable, runs: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(cwd)
    exit_cleanly(lambda: max(work(flags) or 0 for flags in runs))


def evaluate_into_file(flags: list[str]) -> None:
    """evaluate.py as a rank's work; what it prints, which pytest would not see, is in a file."""
    with open(f"said-{os.environ.get('RANK', 0)}.json", "a") as out, redirect_stdout(out):
        evaluate.main(flags)


def read_log(folder: Path, event: str | None = None) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def losses_of(folder: str | Path) -> list[float]:
    """Of each step of a run."""
    return [line["loss"] for line in read_log(Path(folder), "train")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def walk(plan: Callable, steps: int) -> list:
    """The first so many steps of a run."""
    taken, clock = [], Clock()
    for _ in range(steps):
        taken.append(plan(clock))
        clock = taken[-1].after
    return taken


@contextmanager
def in_step(number: int, do: Callable[[], object], rank: int = 0) -> Iterator[None]:
    """Have one rank do something as this step begins."""
    real = train.Trainer.train_step

    def struck(self, step):
        if (step.after.step, self.runtime.rank) == (number, rank):
            do()
        return real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", struck)
        yield


CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")  # Python's audit events


def killed_at(number: int, action: Callable) -> int:
    """Act in a process that is killed before that change of the file system; its exit status."""

    def act() -> None:
        made = itertools.count(1)

        def hear(event: str, about: tuple) -> None:
            writes = event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR)
            if (writes or event in CHANGES) and next(made) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hear)
        action()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=act)  # need not import torch again
    process.start()
    process.join()
    return process.exitcode


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def resume_refused(folder: Path, said: str, flags: str = "") -> None:
    """--resume ends with this one line, and leaves the run as it is."""
    before = contents(folder)
    with pytest.raises(ValueError, match=said) as refusal:
        train.main(["--resume", "--out", str(folder), *flags.split()])
    assert "\n" not in str(refusal.value) and contents(folder) == before


def refusal_of(main: Callable, argv: list[str], monkeypatch, capsys) -> str:
    """What a command says that ends as every refusal does: one line, and exit status 2."""
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(main)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def refusal(action: Callable, *arguments, **options) -> str:
    """What an action says that is refused: one line."""
    with pytest.raises((ValueError, OSError)) as refused:
        action(*arguments, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write_lines(path: Path, lines: list) -> Path:
    """A file of JSON lines; text stays as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))
    return path


def widened(model: torch.nn.Module) -> torch.nn.Module:
    """With weights so wide that a wrong mask or position shows, in every entry."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        is_norm_scale = "ln" in name and name.endswith("weight")
        torch.nn.init.normal_(weight, mean=1.0 if is_norm_scale else 0.0, std=0.2)
    return model


def metrics(lines: list[dict]) -> list[dict]:
    """What a run computed: each train and eval line without times, cost and the stage it names."""
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
    """Why kernels, and those with loops, cannot run: compiled on a GPU or interpreted on a CPU.

    Triton 3.6's interpreter makes an integer of an array of one element, the end of a loop that a
    kernel is told, which NumPy refuses from 2.4 on.
    """
    if triton is None:
        return "Triton is not installed"
    if device != "cpu":
        return ""
    if isinstance(count_up, triton.JITFunction):
        return "kernels are compiled for the GPU of this machine: see the cuda tests"
    if not loops:
        return ""
    try:
        count_up[1,](torch.zeros(3), 3)
    except Exception as error:
        if "only 0-dimensional arrays can be converted to Python scalars" not in str(error):
            raise
        return f"Triton {triton.__version__}'s interpreter runs no loop with NumPy {np.__version__}"
    return ""


def needs_triton(device: str = "cpu", loops: bool = True) -> None:
    if why := why_no_triton(device, loops):
        pytest.skip(why)


@pytest.fixture
def empty_is_full_of_nan(monkeypatch):
    """What a kernel forgets to write is NaN, not by chance what the definition has there."""
    plain = torch.empty

    def empty(*shape, **options):
        out = plain(*shape, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", empty)
