"""Broken on purpose: nothing is lost, nothing wrong without a word, every end within seconds.

docs/reliability.md says what is promised. Two ranks run with `start_ranks`; as two machines each
has a folder of its own.

    pytest -m faults
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, a_port, in_step, losses_of, rank_of, read_log, start_ranks

import analyze
import prepare
import train
from data import Samples
from support import checkpoint
from support import runtime as runtimes
from support.checkpoint import ALONE
from support.runtime import ROOT, Runtime, start
from support.store import Store

pytestmark = pytest.mark.faults
TIMES = 20  # that each fault is injected
BEGIN = f"{SMALL} --data store --out run"
SECONDS = 180  # for a run on a busy machine; 20 on a quiet one


@pytest.fixture
def place(store_dir, tmp_path, monkeypatch):
    """The working folder, with a store."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store_dir, "store")
    return tmp_path


def check_end(folder: Path) -> None:
    """One last evaluation, one sample, one end, and the report."""
    lines = read_log(folder)
    last = sum(line.get("last", False) for line in lines)
    counts = [[line["event"] for line in lines].count(event) for event in ("sample", "finished")]
    assert [last, *counts] == [1, 1, 1] and (folder / "report.html").exists()


# ---- kills


def struck_soon(argv: list[str]) -> int:
    """A rank's work: train; some time after a moment it is killed, if this is the rank."""
    rank, moment, seconds, *argv = argv
    if os.environ["RANK"] == rank:
        owner, name = (train, "StopSignal") if moment == "start" else (train, "finish")
        real = getattr(owner, name)

        def begin(*args):
            timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            return real(*args)

        setattr(owner, name, begin)
    return train.main(argv)


def started(
    ranks: int, argv: list[str], work: Callable = struck_soon
) -> list[multiprocessing.Process]:
    """The processes of a command on so many ranks."""
    context, given = multiprocessing.get_context("forkserver"), (ranks, a_port(), Path.cwd())
    processes = [
        context.Process(target=rank_of, args=(rank, *given, work, [argv])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def end_of(processes: list[multiprocessing.Process], seconds: float) -> list[int | None]:
    """The exit status of each; None for one that has not ended in time, and is killed."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


RANKS = [(1, "", 0.3), (2, "", 0.3), (2, "--fsdp", 2)]


@pytest.mark.parametrize(("moment", "times"), [("start", TIMES), ("finish", TIMES // 4)])
@pytest.mark.parametrize(("ranks", "more", "seconds"), RANKS)
def test_killed_at_random_resume_auto_ends_the_same(ranks, more, seconds, moment, times, place):
    """The one command, again and again, until it ends by itself, or is let go after so many.

    Compared with a run of as many ranks that nobody killed.
    """
    start_ranks(ranks, f"{BEGIN} --out whole {more}".split())
    losses = losses_of("whole")
    draw, kills, runs = random.Random(4), 0, 0
    while kills < times:
        line, runs, ended = f"{BEGIN} --out run-{runs} --resume auto {more}", runs + 1, False
        most = kills + 4  # or on a busy machine it would never come to its end
        while not ended:
            soon = draw.uniform(0, seconds if moment == "start" else 0.3)
            after = soon if kills < most else 3600
            strike = f"{draw.randrange(ranks)} {moment} {after} {line}"
            statuses = end_of(started(ranks, strike.split()), 60)
            assert None not in statuses
            ended = not any(statuses)
            kills += -signal.SIGKILL in statuses
        folder = Path(f"run-{runs - 1}")
        assert losses_of(folder) == (losses if ranks == 1 else pytest.approx(losses, abs=1e-5))
        check_end(folder)


def test_torchrun_starts_a_killed_rank_again_and_it_goes_on(place):
    """The command that docs/reliability.md has for runs that nobody watches."""
    line = f"{SMALL} --data store --tokens 40K --checkpoint-every 2048 --eval-every 20K"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3"
    command = f"{torchrun} {ROOT}/train.py {line} --out run --resume auto".split()
    with open("said", "w") as said:
        agent = subprocess.Popen([sys.executable, *command], stdout=said, stderr=said)
    try:
        until = time.monotonic() + SECONDS
        while not list(Path().glob("run/step-*.pt")):
            assert time.monotonic() < until and agent.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert agent.wait(SECONDS) == 0
    finally:
        agent.kill()
    assert train.main(f"{line} --out whole".split()) == 0
    assert losses_of("run") == pytest.approx(losses_of("whole"), rel=1e-4)
    assert len(read_log(Path("run"), "run")) == 2
    check_end(Path("run"))


# ---- ranks that differ, and machines that share no folder


DIFFER = ["--dtype bf16", "--lr 0.5", "--seed 5", "--tokens 2048", "--layers 2", "--width 64"]
DIFFER += ["--batch-tokens 512", "--eval-every 512", "--eval-tokens 100", "--fsdp", "--offload"]
DIFFER += ["--checkpoint-every 512", "--seq-len 64", "--optimizer adamw", "--pack", "--ltd"]
DIFFER += ["--dropout 0.1", "--schedule wsd", "--micro-batch-size 1", "--model bert"]


def say_all(argv: list[str]) -> None:
    """A rank's work, on a machine of its own: train with each command; write down what was said.

    What follows " | " in a command is for rank 1 alone.
    """
    said, places, rank = [], Path.cwd(), os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(places / f"machine-{rank}")
    for line in " ".join(argv).split(" ; "):
        line, _, more = line.partition(" | ")
        try:
            train.main(f"{line} {more if rank == '1' else ''}".split())
            said.append("")
        except ValueError as error:
            assert "\n" not in str(error)
            said.append(str(error))
    (places / f"said-{rank}.json").write_text(json.dumps(said))


def said_on_two_machines(place: Path, lines: list[str]) -> list[list[str]]:
    """What each rank says to each command."""
    start_ranks(2, " ; ".join(lines).split(), work=say_all)
    return [json.loads((place / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def machines(place):
    return [shutil.copytree("store", place / f"machine-{n}" / "store").parent for n in range(2)]


def test_ranks_with_other_flags_are_refused_before_the_first_step(place, machines):
    by_rank = said_on_two_machines(place, [f"{BEGIN} | {more}" for more in DIFFER])
    for said_by_rank in by_rank:
        for more, said in zip(DIFFER, said_by_rank, strict=True):
            flag = more.split()[0].lstrip("-")[:5]
            assert "ranks differ in" in said and flag in said, (more, said)
    assert not any((machine / "run").exists() for machine in machines)


def test_machines_with_another_text_or_without_a_shared_folder_are_refused(place, machines):
    by_rank = said_on_two_machines(place, [f"{BEGIN} --fsdp"])
    assert all("rank 1 does not see rank 0's run" in said for (said,) in by_rank)
    assert not any((machine / "run").exists() for machine in machines)
    shutil.rmtree(machines[1] / "store")
    Path("words.txt").write_text("other words " * 9000)
    prepare.main(f"words.txt --out {machines[1]}/store --tokenizer bytes".split())
    by_rank = said_on_two_machines(place, [BEGIN])
    assert all("the text of --data" in said for (said,) in by_rank)


def test_machines_with_another_index_or_another_file_of_init_are_refused(place, machines):
    """Of the same names, and each of them whole."""
    for machine, seed in zip(machines, "12", strict=True):
        train.main(f"{BEGIN} --out {machine}/other --tokens 256 --seed {seed}".split())
    samples = Samples(Store.open(machines[1] / "store"), "rows", 32)
    analyze.ready(samples, ["rarity"], None, ALONE)
    index = analyze.index_folder(None, samples) / "rarity"
    np.fromfile(index / "order.bin", np.uint32)[[0, *range(20, 0, -1)]].tofile(index / "some")
    whole = (index / "order.bin").read_bytes()
    (index / "order.bin").write_bytes((index / "some").read_bytes() + whole[84:])
    about = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(about | {"sha256": analyze.sums_of(index)}))
    flags = ["--curriculum rarity", "--init other", "--init other --fsdp"]
    by_rank = said_on_two_machines(place, [f"{BEGIN} {more}" for more in flags])
    for of_index, *of_init in by_rank:
        assert "ranks differ in the index by rarity" in of_index
        assert all("ranks differ in the weights of --init" in said for said in of_init)


# ---- a rank is lost, and no torchrun ends the others


def lost(argv: list[str]) -> int:
    """A rank's work: train; one of them is struck in its third step."""
    victim, number, *argv = argv
    os.dup2(os.open(f"said-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    runtimes.TIMEOUT = timedelta(seconds=5)
    with in_step(3, partial(os.kill, os.getpid(), int(number)), int(victim)):
        return train.main(argv)


@pytest.mark.parametrize("more", ["", "--fsdp"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_left_alone_says_so_with_the_step(victim, number, more, place):
    processes = started(2, f"{victim} {int(number)} {BEGIN} {more}".split(), work=lost)
    assert end_of([processes[1 - victim]], 60) == [1]
    processes[victim].kill()
    *_, said = Path(f"said-{1 - victim}").read_text().splitlines()
    assert f"error: rank {1 - victim} lost another rank after step 2: it has ended" in said


# ---- the same on one process and on two ranks


def by_rank0(runtime: Runtime, action: Callable, *arguments: object) -> object:
    """Rank 0 does this, when all have done what comes before; the others wait for it."""
    runtime.gather(None)
    return runtime.on_rank0(partial(action, *arguments))


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def signals(_: list[str]) -> None:
    """The step is saved, the status says which signal, the losses are those of a whole run."""
    runtime, draw = start("cpu", "auto"), random.Random(6)
    assert train.main(BEGIN.replace("run", "whole").split()) == 0
    for number in range(TIMES):
        chosen, last = SIGNALS[number % len(SIGNALS)], draw.randrange(1, 16)
        rank, out = draw.randrange(runtime.world_size), f"signal-{number}"
        line = f"{SMALL} --data store --out {out} --resume auto".split()
        with in_step(last, partial(os.kill, os.getpid(), chosen), rank):
            status = train.main(line)
        assert status == 128 + (chosen if runtime.rank == rank else signal.SIGTERM)
        saved = by_rank0(runtime, checkpoint.steps_in, Path(out))
        assert saved[-1].stem == f"step-{last:08d}"
        assert train.main(line) == 0
        assert by_rank0(runtime, losses_of, out) == losses_of("whole")


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_on_one_process_and_on_two_ranks(ranks, place):
    start_ranks(ranks, [], work=signals)
