"""Faults on purpose: no progress is lost, no damage goes unreported, every failure ends in seconds.

docs/reliability.md lists the promises. Ranks on one machine share a folder; to simulate two
machines, each rank gets a separate one.

    pytest -m faults
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from multiprocessing import Process
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from conftest import SMALL, at_step, losses_of, read_log, refusal, start_ranks

import analyze
import prepare
import train
from data import Samples
from support import checkpoint
from support import runtime as runtimes
from support.checkpoint import ALONE
from support.process import ROOT
from support.runtime import start
from support.store import Store

pytestmark = pytest.mark.faults
TIMES = 20  # how often each fault is injected
BEGIN = f"{SMALL} --data store --out run"
SECONDS = 180  # allowed for a run on a busy machine; a quiet one takes 20


@pytest.fixture
def place(store_dir, tmp_path, monkeypatch):
    """The working folder, which contains a store."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store_dir, "store")
    return tmp_path


def check_end(folder: Path) -> None:
    """Assert that there is one last evaluation, one sample, one end, and the report."""
    lines = read_log(folder)
    ends = Counter("last" if line.get("last") else line["event"] for line in lines)
    assert ends["last"] == ends["sample"] == ends["finished"] == 1
    assert (folder / "report.html").exists()


# ---- kills


def train_and_kill(argv: list[str]) -> int:
    """Train on a rank. One rank is killed some time after the start or the end of training."""
    rank, moment, seconds, *argv = argv
    if os.environ["RANK"] == rank:
        name = {"start": "StopSignal", "finish": "finish"}[moment]
        real = getattr(train, name)

        def begin(*args):
            timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            return real(*args)

        setattr(train, name, begin)
    return train.main(argv)


def exit_statuses(processes: list[Process], seconds: float) -> list[int | None]:
    """Return the exit status of each; None if it did not end in time and was killed."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


@pytest.mark.parametrize(("moment", "times"), [("start", TIMES), ("finish", TIMES // 4)])
@pytest.mark.parametrize("ranks, more, seconds", [(1, "", 0.3), (2, "", 0.3), (2, "--fsdp", 2)])
def test_randomly_killed_runs_end_the_same(ranks, more, seconds, moment, times, place):
    """The command has --resume auto. It is repeated until it ends without being killed.

    The result is compared with an undisturbed run on as many ranks.
    """
    start_ranks(ranks, f"{BEGIN} --out whole {more}".split())
    losses = losses_of("whole")
    draw, kills, runs = random.Random(4), 0, 0
    while kills < times:
        line, runs, ended = f"{BEGIN} --out run-{runs} --resume auto {more}", runs + 1, False
        most = kills + 4  # without a limit, a run on a busy machine would never end
        while not ended:
            soon = draw.uniform(0, seconds if moment == "start" else 0.3)
            after = soon if kills < most else 3600
            strike = f"{draw.randrange(ranks)} {moment} {after} {line}".split()
            processes = start_ranks(ranks, strike, work=train_and_kill, join=False)
            statuses = exit_statuses(processes, 60)
            assert None not in statuses
            ended = not any(statuses)
            kills += -signal.SIGKILL in statuses
        folder = Path(f"run-{runs - 1}")
        assert losses_of(folder) == (losses if ranks == 1 else pytest.approx(losses, abs=1e-5))
        check_end(folder)


def test_torchrun_restarts_a_killed_rank_and_training_continues(place):
    """This is the command of docs/reliability.md for unattended runs."""
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


# ---- ranks that differ, and machines without a shared folder


DIFFER = ["--dtype bf16", "--lr 0.5", "--seed 5", "--tokens 2048", "--layers 2", "--width 64"]
DIFFER += ["--batch-tokens 512", "--eval-every 512", "--eval-tokens 100", "--fsdp", "--offload"]
DIFFER += ["--checkpoint-every 512", "--seq-len 64", "--optimizer adamw", "--pack", "--ltd"]
DIFFER += ["--dropout 0.1", "--schedule wsd", "--micro-batch-size 1", "--model bert"]


def say_all(argv: list[str]) -> None:
    """Train with each command, on a machine of the rank's own; write the messages to a file.

    Rank 1 also gets the flags after " | " in a command.
    """
    said, places, rank = [], Path.cwd(), os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(places / f"machine-{rank}")
    for line in " ".join(argv).split(" ; "):
        line, _, more = line.partition(" | ")
        said.append(refusal(train.main, f"{line} {more if rank == '1' else ''}".split()))
    (places / f"said-{rank}.json").write_text(json.dumps(said))


def messages_of_two_machines(place: Path, lines: list[str]) -> list[list[str]]:
    """Return the message of each rank to each command."""
    start_ranks(2, " ; ".join(lines).split(), work=say_all)
    return [json.loads((place / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture
def machines(place):
    return [shutil.copytree("store", place / f"machine-{n}" / "store").parent for n in range(2)]


def test_ranks_with_different_flags_are_refused_before_the_first_step(place, machines):
    for said_by_rank in messages_of_two_machines(place, [f"{BEGIN} | {more}" for more in DIFFER]):
        for more, said in zip(DIFFER, said_by_rank, strict=True):
            flag = more.split()[0].lstrip("-")[:5]
            assert "ranks differ in" in said and flag in said, (more, said)
    assert not any((machine / "run").exists() for machine in machines)


def stop_and_resume(argv: list[str]) -> int:
    """Train on a machine of the rank's own, until a signal after step 6; then resume."""
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(Path.cwd() / f"machine-{os.environ['RANK']}")
    with at_step(6, partial(os.kill, os.getpid(), signal.SIGTERM)):
        assert train.main(argv) == 128 + signal.SIGTERM
    return train.main(argv)


@pytest.mark.parametrize("more", ["", "--fsdp"])
def test_machines_without_a_shared_folder_resume(place, machines, more):
    """Only rank 0 has checkpoints; the other machine has a copy of config.json."""
    start_ranks(2, f"{BEGIN} --out whole {more}".split())
    start_ranks(2, f"{BEGIN} --resume auto {more}".split(), work=stop_and_resume)
    assert losses_of(machines[0] / "run") == pytest.approx(losses_of("whole"), abs=1e-5)
    assert len(read_log(machines[0] / "run", "run")) == 2
    assert os.listdir(machines[1] / "run") == ["config.json"]


def test_machines_with_different_text_or_another_run_in_the_folder_are_refused(place, machines):
    train.main(f"{BEGIN} --out {machines[1]}/run".split())
    for new, resumed in messages_of_two_machines(place, [BEGIN, "--resume --out run"]):
        assert "run holds another run" in new and "ranks differ in the run in --out" in resumed
    for machine in machines:
        shutil.rmtree(machine / "run")
    shutil.rmtree(machines[1] / "store")
    Path("words.txt").write_text("other words " * 9000)
    prepare.main(f"words.txt --out {machines[1]}/store --tokenizer bytes".split())
    for (said,) in messages_of_two_machines(place, [BEGIN]):
        assert "the text of --data" in said


def test_machines_with_different_indexes_or_initial_weights_are_refused(place, machines):
    """The files have the same names, and none is damaged."""
    for machine, seed in zip(machines, "12", strict=True):
        train.main(f"{BEGIN} --out {machine}/other --tokens 256 --seed {seed}".split())
    samples = Samples(Store.open(machines[1] / "store"), "rows", 32)
    analyze.rankings_of(samples, ["rarity"], ALONE)
    index = analyze.index_folder(samples) / "rarity"
    order = np.fromfile(index / "order.bin", np.uint32)
    order[1:21] = order[20:0:-1].copy()
    order.tofile(index / "order.bin")
    about = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(about | {"sha256": analyze.sums_of(index)}))
    flags = ["--curriculum rarity", "--init other", "--init other --fsdp"]
    lines = [f"{BEGIN} {more}" for more in flags]
    for of_index, *of_init in messages_of_two_machines(place, lines):
        assert "ranks differ in the index by rarity" in of_index
        assert all("ranks differ in the weights of --init" in said for said in of_init)


# ---- a rank is lost, and no torchrun stops the others


def train_and_lose_a_rank(argv: list[str]) -> int:
    """Train on a rank. One rank gets a signal in the third step."""
    victim, number, *argv = argv
    os.dup2(os.open(f"said-{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    runtimes.TIMEOUT = timedelta(seconds=5)
    with at_step(3, partial(os.kill, os.getpid(), int(number)), int(victim)):
        return train.main(argv)


@pytest.mark.parametrize("more", ["", "--fsdp"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_reports_that_it_lost_another_and_after_which_step(victim, number, more, place):
    argv = f"{victim} {int(number)} {BEGIN} {more}".split()
    processes = start_ranks(2, argv, work=train_and_lose_a_rank, join=False)
    assert exit_statuses([processes[1 - victim]], 60) == [1]
    processes[victim].kill()
    *_, said = Path(f"said-{1 - victim}").read_text().splitlines()
    assert f"error: rank {1 - victim} lost another rank after step 2: it has ended" in said


# ---- signals


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def check_signals(_: list[str]) -> None:
    """The step is saved, the status names the signal, and losses equal an undisturbed run's."""
    runtime, draw = start("cpu", "auto"), random.Random(6)
    assert train.main(BEGIN.replace("run", "whole").split()) == 0
    for number in range(TIMES):
        chosen, last = SIGNALS[number % len(SIGNALS)], draw.randrange(1, 16)
        rank, out = draw.randrange(runtime.world_size), f"signal-{number}"
        line = f"{SMALL} --data store --out {out} --resume auto".split()
        with at_step(last, partial(os.kill, os.getpid(), chosen), rank):
            status = train.main(line)
        assert status == 128 + (chosen if runtime.rank == rank else signal.SIGTERM)
        runtime.gather(None)  # until rank 0 has saved
        assert runtime.on_rank0(partial(checkpoint.find, out, "last")).stem == f"step-{last:08d}"
        assert train.main(line) == 0
        runtime.gather(None)
        assert runtime.on_rank0(partial(losses_of, out)) == losses_of("whole")


def test_ctrl_c_in_a_thread_pool_prints_no_traceback_and_leaves_a_whole_store_or_none(place):
    Path("words.txt").write_text("some words\n\n" * 20_000)
    code = "import prepare, support.process as p; print('ready', flush=True)"
    code = f"import sys; sys.path.insert(0, '{ROOT}'); {code}; p.exit_cleanly(prepare.main)"
    for number in range(6):
        line = f"words.txt --tokenizer bytes --split-on blank-line --out new-{number}".split()
        process = subprocess.Popen([sys.executable, "-c", code, *line], stdout=PIPE, stderr=PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep((number + 1) / 20)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=SECONDS)[1]
        # After its end, while Python exits, the signal has its usual effect.
        assert process.returncode in (130, 0, -signal.SIGINT)
        if Path(f"new-{number}").exists():
            Store.open(f"new-{number}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_saves_the_step_and_the_resumed_run_is_the_same(ranks, place):
    start_ranks(ranks, [], work=check_signals)
