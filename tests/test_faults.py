"""Broken on purpose: nothing is lost, nothing wrong without a word, every end within seconds.

docs/reliability.md lists these classes of faults and what is promised for each. Two ranks run with
`start_ranks`; as two machines each has a folder of its own.

    pytest -m faults
"""

import gzip
import io
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, a_port, rank_of, read_log, start_ranks, stop_in_step, write_lines

import evaluate
import prepare
import report
import sample
import train
from model import Transformer, TransformerConfig
from support.base.atomic import folder_lock
from support.base.runtime import Runtime, one_line, resident, start
from support.run import checkpoint
from support.run.folder import BOARDS, Log
from support.run.run import Run
from support.text import tokenizer
from support.weights import published

pytestmark = pytest.mark.faults
TIMES = 20  # that each class is injected
AT_ONCE = 4
BEGIN = f"{SMALL} --data store --out run"
RESUME = "--resume --out run"


@pytest.fixture(scope="module")
def stopped(store_dir, tmp_path_factory):
    """A run that a signal ended in its 9th step of 16, another one like it, and their store."""
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        shutil.copytree(store_dir, "store")
        stop_in_step(9, patch)
        for more in ("", "--seed 2 --out other"):
            assert train.main(f"{BEGIN} {more}".split()) > 128
    return place


@pytest.fixture
def place(stopped, tmp_path, monkeypatch):
    """A copy of them, which is the working folder."""
    folder = shutil.copytree(stopped, tmp_path / "place")
    monkeypatch.chdir(folder)
    return folder


def said_by(main: Callable[[list[str]], object], line: str) -> str:
    """The message of a refusal, which is one line; "" if the command ran to its end."""
    try:
        main(line.split())
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error) or "?"
    return ""


def say_all(argv: list[str]) -> None:
    """A rank's work: in each folder FOLDER=COMMAND names, train; write down what was said.

    What follows " | " in a command is for rank 1 alone.
    """
    said, places, rank = [], Path.cwd(), os.environ["RANK"]
    for entry in " ".join(argv).split(" ; "):
        folder, _, line = entry.partition("=")
        line, _, more = line.partition(" | ")
        os.chdir(places / folder.replace("RANK", rank))
        said.append(said_by(train.main, f"{line} {more if rank == '1' else ''}"))
    (places / f"said-{rank}.json").write_text(json.dumps(said))


def by_ranks(
    ranks: int, lines: dict[str, str], places: Path, patch: pytest.MonkeyPatch
) -> list[list[str]]:
    """What each of these ranks says to each command, {folder: command}."""
    patch.chdir(places)
    entries = " ; ".join(f"{folder}={line}" for folder, line in lines.items())
    start_ranks(ranks, entries.split(), work=say_all)
    return said_at(places, ranks)


def said_at(places: Path, ranks: int = 2) -> list[list[str]]:
    """What each rank has written down."""
    return [json.loads((places / f"said-{rank}.json").read_text()) for rank in range(ranks)]


# ---- files that are edited, damaged, or of another run


def edit(file: str, *keys: str, value: object = None, gone: bool = False) -> Callable[[], None]:
    """Set or remove one entry of a JSON file."""

    def change() -> None:
        content = json.loads(Path(file).read_text())
        put(*keys, value=value, gone=gone)(content)
        Path(file).write_text(json.dumps(content))

    return change


def put(*keys: str, value: object = None, gone: bool = False) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        if gone:
            del content[keys[-1]]
        else:
            content[keys[-1]] = value

    return change


def text(file: str, content: str) -> Callable[[], object]:
    return lambda: Path(file).write_text(content)


def resigned(change: Callable[[dict], object], folder: Path = Path("run")) -> Callable[[], None]:
    """The newest checkpoint with other contents, and a digest that is right."""

    def damage() -> None:
        path = checkpoint.steps_in(folder)[-1]
        state = checkpoint.load(path)
        change(state)
        checkpoint.write_file(path, state)

    return damage


def of_another_run() -> None:
    for file in Path("run").glob("*.pt"):
        file.unlink()
    for file in Path("other").glob("*.pt"):
        shutil.copy(file, "run")


config = "run/config.json"
DEEP = "[" * 100_000
changed = json.dumps(
    {name: [] for name in ("optim.lr", "optim.grad_clip")}
    | {"optim.tokens": [{"step": 1, "before": 4096, "now": 9000}]}
)
EDITED = {
    "another learning rate": edit(config, "config", "optim.lr", value=0.5),
    "another clipping": edit(config, "config", "optim.grad_clip", value=0.5),
    "another seed": edit(config, "config", "run.seed", value=7),
    "another budget": edit(config, "config", "optim.tokens", value=9000),
    "other heads": edit(config, "config", "model.heads", value=4),
    "another batch": edit(config, "config", "optim.batch_tokens", value=512),
    "a text as lr": edit(config, "config", "optim.lr", value="x"),
    "a list as seq_len": edit(config, "config", "data.seq_len", value=[1]),
    "no such size": edit(config, "config", "model.size", value="huge"),
    "null as layers": edit(config, "config", "model.layers", value=None),
    "10^9 layers": edit(config, "config", "model.layers", value=10**9),
    "an unknown setting": edit(config, "config", "model.colour", value=1),
    "no lr": edit(config, "config", "optim.lr", gone=True),
    "no settings": edit(config, "config", gone=True),
    "settings that are a list": edit(config, "config", value=[]),
    "no id": edit(config, "id", gone=True),
    "another id": edit(config, "id", value="5"),
    "no model size": edit(config, "model_size", gone=True),
    "model size of text": edit(config, "model_size", "vocab_size", value="x"),
    "model size of 10^9": edit(config, "model_size", "vocab_size", value=10**9),
    "store as text": edit(config, "store", value="x"),
    "a list": text(config, "[]"),
    "empty": text(config, ""),
    "nested deep": text(config, DEEP),
    "changes as a list": text("run/changed.json", "[]"),
    "changes nested deep": text("run/changed.json", DEEP),
    "a budget of text": text("run/changed.json", changed.replace("9000", '"x"')),
    "a budget of a half": text("run/changed.json", changed.replace("9000", "9000.5")),
}
RESIGNED = {
    "of another run": of_another_run,
    "no optimizer state": resigned(put("optimizers", "state", value={})),
    "no optimizers": resigned(put("optimizers", gone=True)),
    "clock moved": resigned(put("clock", "consumed_tokens", value=5)),
    "clock below 0": resigned(put("clock", "consumed_tokens", value=-5)),
    "clock of text": resigned(put("clock", "step", value="x")),
    "clock without a field": resigned(put("clock", "real_tokens", gone=True)),
    "position beyond": resigned(put("clock", "position", "first_draw", value=10**6)),
    "another step": resigned(put("step", value=3)),
    "another seed inside": resigned(put("config", "run.seed", value=3)),
    "another lr inside": resigned(put("config", "optim.lr", value=3.0)),
    "no best": resigned(put("best", gone=True)),
    "best of text": resigned(put("best", value="x")),
    "log size below 0": resigned(put("log_size", value=-3)),
    "no model": resigned(put("model", gone=True)),
    "model that is a list": resigned(put("model", value=[])),
    "a weight that is NaN": resigned(lambda s: s["model"]["ln_f.bias"].fill_(torch.nan)),
    "a weight of another shape": resigned(put("model", "ln_f.bias", value=torch.zeros(3))),
    "a weight missing": resigned(put("model", "ln_f.bias", gone=True)),
    "a moment of another shape": resigned(
        lambda s: next(iter(s["optimizers"]["state"].values())).update(exp_avg=torch.zeros(1))
    ),
}
meta = "store/meta.json"


def offsets(place: int, value: int) -> Callable[[], None]:
    def damage() -> None:
        values = np.fromfile("store/documents.idx", np.int64)
        values[place] += value
        values.tofile("store/documents.idx")

    return damage


def cut(file: str, share: float) -> Callable[[], None]:
    return lambda: os.truncate(file, int(os.path.getsize(file) * share))


STORE = {
    "offsets past the end": offsets(-1, 100),
    "offsets do not begin at 0": offsets(0, 1),
    "half of the tokens": cut("store/tokens.bin", 0.5),
    "half of the offsets": cut("store/documents.idx", 0.5),
    "fewer train documents": edit(meta, "train_documents", value=7),
    "fewer train tokens": edit(meta, "train_tokens", value=5),
    "another vocabulary": edit(meta, "vocab_size", value=300),
    "another format": edit(meta, "format", value=99),
}
FAULTS = {
    "the folder's files": (EDITED, RESUME, "run"),
    "the checkpoint": (RESIGNED, RESUME, "run"),
    "the store": (STORE, f"{BEGIN} --tokens 512 --out new", "store"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_damaged_files_are_refused_in_one_line_that_names_them(
    kind, stopped, tmp_path, monkeypatch
):
    """By one process and by two ranks; and the run is as it was."""
    damages, line, named = FAULTS[kind]
    lines = {}
    for number, damage in enumerate(damages.values()):
        monkeypatch.chdir(shutil.copytree(stopped, tmp_path / str(number)))
        damage()
        lines[str(number)] = line
    log = (stopped / "run" / "log.jsonl").read_bytes()
    alone, both = (by_ranks(ranks, lines, tmp_path, monkeypatch) for ranks in (1, 2))
    for name, *said in zip(damages, *alone, *both, strict=True):
        assert all(named in line for line in said), (name, said)
    for folder in lines:
        assert (tmp_path / folder / "run" / "log.jsonl").read_bytes() == log


def test_commands_that_read_a_run_refuse_an_odd_checkpoint_in_one_line(
    stopped, tmp_path, monkeypatch
):
    odd = {
        **{f"{key} of text": put(key, value="x") for key in ("config", "model_size", "model")},
        "no step": put("step", gone=True),
        "no fingerprint": put("tokenizer_fingerprint", gone=True),
        "layers of text": put("config", "model.layers", value="x"),
        "an MLP of text": put("config", "model.mlp_width", value="x"),
        "a vocabulary of 10^9": put("model_size", "vocab_size", value=10**9),
    }
    for number, change in enumerate(odd.values()):
        monkeypatch.chdir(shutil.copytree(stopped, tmp_path / str(number)))
        resigned(change)()
        for main, line in (
            (evaluate.main, "run --tokens 100 --device cpu"),
            (sample.main, "run --tokens 3 --device cpu"),
            (train.main, f"{BEGIN} --out new --init run --tokens 512"),
        ):
            assert said_by(main, line), (list(odd)[number], line)


def test_control_an_undamaged_run_is_not_refused(place, monkeypatch):
    assert by_ranks(2, {"place": RESUME}, place.parent, monkeypatch) == [[""], [""]]


LINES = ["5", "[]", '"x"', "{}", '{"event": 5}', DEEP, "\x00", '{"event":"train","step":"x"}']
LINES += ['{"event":"eval","step":1,"consumed_tokens":"x","val_bpb":[],"targets":1,"last":0}']
LINES += ['{"event":"run","config":3,"argv":"x"}', '{"event":"stage"}', '{"event":"checkpoint"}']


def test_strange_lines_of_a_log_are_left_out_of_the_report(place):
    with open("run/log.jsonl", "a") as log:
        log.write("\n".join([*LINES, ""]))
    assert "damaged lines of the log, left out: 11" in report.write(Path("run")).read_text()
    assert train.main(RESUME.split()) == 0


def test_what_the_last_bits_depend_on_is_said_when_it_changes(place, capsys):
    resigned(put("made_by", "threads", value="64"))()
    assert train.main(RESUME.split()) == 0
    assert "threads was 64 and is 1: losses will be close, not bitwise" in capsys.readouterr().out


# ---- ranks that differ, and machines that share no folder

DIFFER = ["--dtype bf16", "--lr 0.5", "--seed 5", "--tokens 2048", "--layers 2", "--width 64"]
DIFFER += ["--batch-tokens 512", "--eval-every 512", "--eval-tokens 100", "--fsdp", "--offload"]
DIFFER += ["--checkpoint-every 512", "--seq-len 64", "--optimizer adamw", "--pack", "--ltd"]
DIFFER += ["--dropout 0.1", "--schedule wsd", "--micro-batch-size 1", "--model bert"]


def test_ranks_with_other_flags_are_refused_before_the_first_step(stopped, tmp_path, monkeypatch):
    assert len(DIFFER) >= TIMES
    machines = two_machines(stopped, tmp_path, monkeypatch)
    lines = " ; ".join(f"machine-RANK={BEGIN} --out new | {more}" for more in DIFFER)
    start_ranks(2, lines.split(), work=on_machines)
    for by_rank in said_at(tmp_path):
        for more, said in zip(DIFFER, by_rank, strict=True):
            flag = more.split()[0].lstrip("-")[:5]
            assert "ranks differ in" in said and flag in said, (more, said)
    assert not any((machine / "new").exists() for machine in machines)


def two_machines(stopped: Path, places: Path, patch: pytest.MonkeyPatch) -> list[Path]:
    patch.chdir(places)
    return [shutil.copytree(stopped, places / f"machine-{rank}") for rank in range(2)]


def on_machines(argv: list[str]) -> None:
    """As `say_all`, but this rank is the first of its machine."""
    os.environ["LOCAL_RANK"] = "0"
    say_all(argv)


@pytest.mark.parametrize("fault", ["another text", "no shared folder", "the run on one machine"])
def test_two_machines(fault, stopped, tmp_path, monkeypatch):
    """Two folders as two machines, TIMES in a row."""
    machines = two_machines(stopped, tmp_path, monkeypatch)
    line, lines = f"{BEGIN} --out new", []
    if fault == "another text":
        shutil.rmtree(machines[1] / "store")
        Path("words.txt").write_text("other words " * 9000)
        prepare.main(f"words.txt --out {machines[1]}/store --tokenizer bytes".split())
    elif fault == "no shared folder":
        line += " --fsdp"
    else:
        shutil.rmtree(machines[1] / "run")
        shutil.copytree(machines[0] / "run", machines[0] / "again")
    for number in range(TIMES):
        if fault == "the run on one machine":
            shutil.copytree(machines[0] / "again", machines[0] / f"run-{number}")
            line = f"--resume --out run-{number}"
        lines.append(f"machine-RANK={line}")
    start_ranks(2, " ; ".join(lines).split(), work=on_machines)
    first, second = said_at(tmp_path)
    if fault == "the run on one machine":  # it goes on: rank 0 reads for both
        assert first == second == [""] * TIMES
        losses = uninterrupted(stopped, monkeypatch)
        assert losses_of(machines[0] / "run-0") == pytest.approx(losses, rel=1e-4)
        return
    named = {"another text": "the text of --data", "no shared folder": "rank 1 does not see new"}
    assert all(named[fault] in said for said in first + second), (first, second)


def uninterrupted(stopped: Path, patch: pytest.MonkeyPatch) -> list[float]:
    """The losses of the run that nobody stopped."""
    patch.chdir(stopped)
    if not Path("uninterrupted").exists():
        assert train.main(f"{BEGIN} --out uninterrupted".split()) == 0
    return losses_of("uninterrupted")


# ---- kills, and ranks that do not answer


def struck_soon(argv: list[str]) -> int:
    """A rank's work: train; some time after a moment something strikes, if this is the rank."""
    rank, moment, seconds, what, *argv = argv
    sys.stderr = open("said", "a", buffering=1)  # noqa: SIM115, what the last words are written to
    if what == "cut":
        strike = cut("store/tokens.bin", float(seconds))
    else:
        strike = partial(os.kill, os.getpid(), getattr(signal, what))
    if os.environ["RANK"] == rank:
        owner, name = (train.Poll, "begin") if moment == "start" else (train, "finish")
        real = getattr(owner, name)

        def begin(*args):
            timer = threading.Timer(float(seconds), strike)
            timer.daemon = True
            timer.start()
            return real(*args)

        setattr(owner, name, begin)
    return train.main(argv)


def started(ranks: int, argv: list[str]) -> list[multiprocessing.Process]:
    """The processes of a command on so many ranks."""
    context, given = multiprocessing.get_context("forkserver"), (ranks, a_port(), Path.cwd())
    processes = [
        context.Process(target=rank_of, args=(rank, *given, struck_soon, [argv]))
        for rank in range(ranks)
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


@pytest.mark.parametrize(("moment", "times"), [("start", TIMES), ("finish", TIMES // 2)])
@pytest.mark.parametrize(
    ("ranks", "more", "seconds"), [(1, "", 0.3), (2, "", 0.3), (2, "--fsdp", 2)]
)
def test_killed_at_random_moments_resume_auto_ends_with_the_same_losses(
    ranks, more, seconds, moment, times, stopped, tmp_path, monkeypatch
):
    """The one command, again and again, until it ends by itself, or is let go after so many."""
    losses = uninterrupted(stopped, monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped / "store", "store")
    draw, kills, runs = random.Random(4), 0, 0
    while kills < times:
        line, runs, ended = f"{BEGIN} --out run-{runs} --resume auto {more}", runs + 1, False
        most = kills + 4  # or on a busy machine it would never come to its end
        while not ended:
            soon = draw.uniform(0, seconds if moment == "start" else 0.3)
            after = soon if kills < most else 3600
            strike = f"{draw.randrange(ranks)} {moment} {after} SIGKILL {line}"
            statuses = end_of(started(ranks, strike.split()), 60)
            assert None not in statuses
            ended = not any(statuses)
            kills += -signal.SIGKILL in statuses
        folder = Path(f"run-{runs - 1}")
        assert losses_of(folder) == (losses if ranks == 1 else pytest.approx(losses, rel=1e-4))
        check_end(folder)


@pytest.mark.parametrize(("ranks", "what"), [(2, "SIGSTOP"), (1, "cut"), (2, "cut")])
def test_a_rank_that_stops_or_a_store_that_is_cut_ends_all_ranks(
    ranks, what, stopped, tmp_path, monkeypatch
):
    """With the reason, and in time."""
    draw = random.Random(5)
    for number in range(0, TIMES, AT_ONCE):  # they mostly wait
        runs = []
        for more in range(AT_ONCE):
            place = shutil.copytree(stopped, tmp_path / str(number + more))
            monkeypatch.chdir(place)
            rank = draw.randrange(ranks)
            strike = f"{rank} start {draw.uniform(0, 0.2)} {what} {BEGIN} --out new"
            line = f"{strike} --tokens 400K --rank-timeout {2 if what == 'SIGSTOP' else 60}"
            runs.append((place, rank, started(ranks, line.split())))
        for place, rank, processes in runs:
            waits = [processes[1 - rank]] if what == "SIGSTOP" else processes
            statuses = end_of(waits, 60)
            processes[rank].kill()
            said = (place / "said").read_text()
            if what == "SIGSTOP":
                assert statuses == [1]
                assert f"no answer from rank {rank}, stopped or stuck" in said
            else:
                assert 2 in statuses and not {0, None} & {*statuses}
                assert "has become shorter" in said


def test_torchrun_on_two_machines_goes_on_after_a_kill(tmp_path):
    """Two agents, each in a clone of its own with its own corpus; docs/reliability.md has them."""
    aside = shutil.ignore_patterns(".*", "results", "docs", "tests", "bench", "runs", "shared")
    machines = [shutil.copytree(ROOT, tmp_path / f"machine-{n}", ignore=aside) for n in range(2)]
    try:
        end = f"localhost:{a_port()}"
    except OSError as error:
        pytest.skip(f"torchrun cannot bind a port: {error}")
    line = f"train.py {SMALL} --tokens 40K --checkpoint-every 2048 --eval-every 20K"
    alone = run_in(machines[0], f"{line} --out alone")
    assert alone.wait(SECONDS) == 0
    torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3"
    torchrun += f" --rdzv-backend c10d --rdzv-endpoint {end}"
    lingers = machines[1] / "support/base/runtime.py"  # its torchrun only sees a node that waits
    lingers.write_text(lingers.read_text().replace("LINGER = 0.5", "LINGER = 20"))
    agents = [run_in(at, f"{torchrun} {line} --out runs/a --resume auto") for at in machines]
    try:
        out, until = machines[0] / "runs/a", time.monotonic() + SECONDS
        while not list(out.glob("step-*.pt")):
            assert time.monotonic() < until and agents[0].poll() is None
            time.sleep(0.1)
        pid = agents[0].pid
        (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert losses_of(out) == pytest.approx(losses_of(machines[0] / "alone"), rel=1e-4)
    assert len(read_log(out, "run")) == 2 and not (machines[1] / "runs").exists()
    check_end(out)


SECONDS = 180  # for an agent; 20 on a quiet machine


def run_in(folder: Path, line: str) -> subprocess.Popen:
    with (folder / "said").open("w") as said:
        command = [sys.executable, *line.split()]
        return subprocess.Popen(command, cwd=folder, stdout=said, stderr=subprocess.STDOUT)


# ---- the same on one process and on two ranks


@contextmanager
def in_step(number: int, do: Callable[[], object], rank: int = 0) -> Iterator[None]:
    """Have one rank do something as this step begins."""
    real = train.Trainer.step

    def struck(self, step):
        if (step.after.step, self.runtime.rank) == (number, rank):
            do()
        return real(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "step", struck)
        yield


def by_rank0(runtime: Runtime, action: Callable, *arguments: object) -> object:
    """Rank 0 does this, when all have done what comes before; the others wait for it."""
    runtime.gather(None)
    return runtime.on_rank0(partial(action, *arguments))


def printed(main: Callable, line: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert not main(line.split())
    return out.getvalue()


def losses_of(folder: str | Path) -> list[float]:
    return [line["loss"] for line in read_log(Path(folder), "train")]


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def signals(runtime: Runtime) -> None:
    """The step is saved, the status says which signal, the losses are those of a whole run."""
    draw = random.Random(6)
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


def logs_that_lost_their_end(runtime: Runtime) -> None:
    """It is said with the bytes, the torn line goes, and the report counts the missing steps."""
    whole, draw = Path("run/log.jsonl").read_bytes(), random.Random(1)
    known = checkpoint.load(checkpoint.find("run", "last"))["log_size"]
    for number in range(TIMES):
        out, kept = Path(f"run-{number}"), draw.choice([0, draw.randrange(known)])
        by_rank0(runtime, shutil.copytree, "run", out)
        by_rank0(runtime, os.truncate, out / "log.jsonl", kept)
        said = printed(train.main, f"--resume --out {out}")
        if not runtime.is_rank0:
            continue
        lost = known - whole.rfind(b"\n", 0, kept) - 1
        assert f"log.jsonl has lost {lost:,} bytes" in said
        steps = [line["step"] for line in read_log(out, "train")]  # every line is whole
        assert steps[-7:] == list(range(10, 17))
        missing = f"missing in the log: {16 - len(steps)}"
        assert len(steps) == 16 or missing in report.write(out).read_text()


def write_damaged(file: Path, whole: bytes, number: int) -> None:
    draw, samples, content = random.Random(number), len(whole) // 16, bytearray(whole)
    if number % 2:
        del content[draw.randrange(samples) * 16 :]
    else:
        first = draw.randrange(samples - 64) * 16
        content[first : first + 64 * 16] = bytes(64 * 16)
    file.write_bytes(content)


def damaged_spans(runtime: Runtime) -> None:
    """A table of samples that was cut, or zeroed in part; without it, it is made again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.rows.samples.IN_MEMORY", 0)
        line = f"{SMALL} --data store --pack --tokens 512"
        assert said_by(train.main, f"{line} --out first") == ""
        (table,) = Path("store").glob("train-*.spans")
        whole = runtime.on_rank0(table.read_bytes)
        for number in range(TIMES):
            by_rank0(runtime, write_damaged, table, whole, number)
            assert f"{table.name} is damaged" in said_by(train.main, f"{line} --out more")
        by_rank0(runtime, table.unlink)
        assert said_by(train.main, f"{line} --out more") == ""


def two_processes_in_a_folder(runtime: Runtime) -> None:
    """The second is refused."""
    for _ in range(TIMES):
        with folder_lock(Path("run")) if runtime.is_rank0 else nullcontext():
            assert "is held by another process" in said_by(train.main, RESUME)
    assert said_by(train.main, RESUME) == ""


# what every rank comes through after the last step
ENDING = [(train, "evaluate"), (Run, "finish_saving"), (train.progress, "conclude")]
ENDING += [(Runtime, "say"), (Log, "write")]


def killed_at_the_end(runtime: Runtime) -> None:
    """Between the last step and the report, before and after each part: it is made up for."""
    real_finish, stop = train.finish, pytest.raises(KeyboardInterrupt)
    for number in range(TIMES):
        owner, name = ENDING[number % len(ENDING)]
        real, before, out = getattr(owner, name), number % 2, Path(f"run-{number}")
        by_rank0(runtime, shutil.copytree, "run", out)
        with pytest.MonkeyPatch.context() as patch, stop:

            def killed(*args, real=real, before=before, name=name, **more):
                is_here = name != "write" or "finished" in args  # the last line of the log
                if not (is_here and before):
                    done = real(*args, **more)
                if is_here:
                    raise KeyboardInterrupt
                return done

            def finish(*args, patch=patch, owner=owner, name=name, killed=killed):
                patch.setattr(owner, name, killed)
                real_finish(*args)

            patch.setattr(train, "finish", finish)
            train.main(f"--resume --out {out}".split())
        assert train.main(f"--resume --out {out}".split()) == 0
        if runtime.is_rank0:
            check_end(out)


def check_end(folder: Path) -> None:
    """One last evaluation, one sample, one end, and the report."""
    lines = read_log(folder)
    last = sum(line.get("last", False) for line in lines)
    counts = [[line["event"] for line in lines].count(event) for event in ("sample", "finished")]
    assert [last, *counts] == [1, 1, 1] and (folder / "report.html").exists()


NOT_FINITE = [("loss", math.nan), ("gradient", math.nan), ("gradient", math.inf)]


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for inner in value.values() for tensor in tensors_of(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


@contextmanager
def struck(bad: dict[int, tuple[str, float]], ranks: Collection[int]) -> Iterator[None]:
    """Make the loss or the summed gradients of these ranks bad in some steps.

    On every rank such a step leaves all weights and moments as they are, and every other one moves
    them.
    """
    gradients, step_of = train.Trainer.gradients, train.Trainer.step

    def spoiled(self, step):
        total = gradients(self, step)
        what, factor = bad.get(step.after.step, ("", 1.0))
        if self.runtime.rank not in ranks:
            return total
        for weight in self.model.parameters() if what == "gradient" else ():
            weight.grad.mul_(factor)
        return total * factor if what == "loss" else total

    def watched(self, step):
        before = tensors_of(checkpoint.copied(self.state()))
        try:
            return step_of(self, step)
        finally:
            after = tensors_of(self.state())
            same = len(before) == len(after) and all(map(torch.equal, before, after))
            assert same == (step.after.step in bad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "gradients", spoiled)
        patch.setattr(train.Trainer, "step", watched)
        yield


def bad_steps_refused(runtime: Runtime) -> None:
    """The run stops before the weights move, and goes on at another rate."""
    draw = random.Random(8)
    for number in range(TIMES):
        step, out = draw.randrange(2, 9), f"stops-{number}"
        bad = {step: NOT_FINITE[number % 3]}
        with struck(bad, range(runtime.world_size)):
            said = said_by(train.main, f"{SMALL} --data store --tokens 2048 --out {out}")
        assert f"is not finite at step {step} on rank 0" in said
        assert train.main(f"--resume --out {out} --lr 0.001".split()) == 0


def set_in_run(folder: Path, setting: str, value: object) -> None:
    """A setting in all that says what it is: config.json, log and checkpoint."""
    edit(str(folder / "config.json"), "config", setting, value=value)()
    first, rest = (folder / "log.jsonl").read_text().split("\n", 1)
    line = json.loads(first)
    line["config"][setting] = value
    (folder / "log.jsonl").write_text(f"{json.dumps(line)}\n{rest}")
    resigned(put("config", setting, value=value), folder)()


SOON = 10  # seconds, on a busy machine
LITTLE = 400 << 20  # bytes; a line may have 64 MiB, as bytes, as text, and while it grows


@contextmanager
def cheaply(what: str) -> Iterator[None]:
    """This takes seconds, and this process never has much more memory than before."""
    began, before = time.monotonic(), resident()
    yield
    seconds, grown = time.monotonic() - began, resident("VmHWM") - before
    assert seconds < SOON and grown < LITTLE, f"{what}: {seconds:.1f} s, {grown >> 20} MiB"


def sparse(file: str) -> None:
    """A file that has a terabyte, and takes no room."""
    with open(file, "ab") as opened:
        opened.truncate(1 << 40)


def expanded(state: dict) -> None:
    state["model"]["ln_f.bias"] = torch.zeros(1).expand(1 << 34)  # 64 GB, of 4 bytes


NEW = f"{BEGIN} --out new"
FLAGS = ["--layers 1000000000", "--width 2147483648", "--heads 100000", "--batch-tokens 1000M"]
FLAGS += ["--seq-len 4294967296", "--tokens 1e30", "--seed 1e30", "--keep 1e30"]
READ = {  # by what
    "run/config.json": (train.main, RESUME),
    "run/changed.json": (train.main, RESUME),
    "task.jsonl": (evaluate.main, "run --task task.jsonl --device cpu"),
}


class Huge(NamedTuple):
    make: Callable[[], object]
    main: Callable
    line: str
    named: str  # in the refusal


def huge() -> dict[str, Huge]:
    """Sizes beyond all reason."""
    sizes = {f: Huge(lambda: None, train.main, f"{NEW} {f}", f.split()[0]) for f in FLAGS}
    for file, (main, line) in READ.items():
        sizes[f"{file} nested deep"] = Huge(text(file, DEEP), main, line, Path(file).name)
        sizes[f"{file} of a terabyte"] = Huge(partial(sparse, file), main, line, Path(file).name)
    layers = edit("run/config.json", "config", "model.layers", value=10**9)
    sizes["10^9 layers in a run"] = Huge(layers, train.main, RESUME, "config.json")
    named = "claims more numbers than the file has"
    sizes["64 GB in a checkpoint"] = Huge(resigned(expanded), train.main, RESUME, named)
    return sizes


def sizes_beyond_all_reason(runtime: Runtime) -> None:
    """Refused at once, naming flag or file; memory stays as it is."""
    start, sizes = Path.cwd(), huge()
    assert len(sizes) >= TIMES
    for number, (name, size) in enumerate(sizes.items()):
        place = start.parent / f"huge-{number}"
        by_rank0(runtime, shutil.copytree, start, place)
        os.chdir(place)
        by_rank0(runtime, lambda size=size: size.make() and None)
        with cheaply(name):
            said = said_by(size.main, size.line)
        assert size.named in said and not Path("new").exists(), (name, said)


EVERYWHERE = [signals, logs_that_lost_their_end, two_processes_in_a_folder]
EVERYWHERE += [killed_at_the_end, bad_steps_refused]
EVERYWHERE += [sizes_beyond_all_reason, damaged_spans]
WORKS = {work.__name__: work for work in EVERYWHERE}
RUNS = [(work.__name__, ranks) for work in EVERYWHERE for ranks in (1, 2)]


def by_name(argv: list[str]) -> None:
    WORKS[argv[0]](start("cpu", "auto"))


@pytest.mark.parametrize(("work", "ranks"), RUNS)
def test_on_one_process_and_on_two_ranks(work, ranks, place):
    start_ranks(ranks, [work], work=by_name)


# ---- what else strangers write


def test_json_lines_are_read_as_such_whatever_their_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(30))
    counts = []
    for name in ("a.jsonl", "a.JSONL", "a.json", "a.ndjson"):
        Path(name).write_text(content)
        prepare.main(f"{name} --out {name}-store --tokenizer bytes --holdout 0".split())
        counts.append(json.loads(Path(f"{name}-store/meta.json").read_text())["documents"])
    assert counts == [30] * 4


def test_repeated_ids_are_counted(place, capsys):
    lines = [{"id": n % 25, "text": f"document {n}"} for n in range(30)]
    Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare.main(["a.jsonl", "--out", "s", "--tokenizer", "bytes"])
    assert "5   documents with the id of an earlier one" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_blamed_on_their_file(place):
    """NaN in published weights; weights so large that a model's results are NaN."""
    model = Transformer(TransformerConfig("gpt", 4, 2, 32, 128, 1024, 320))
    weights = {  # published matrices are (in, out)
        name: weight.detach().mT.contiguous()
        if ".c_" in name and weight.ndim > 1
        else weight.detach()
        for name, weight in model.state_dict().items()
    }
    write_lines(Path("task.jsonl"), [{"context": "a", "continuations": ["b", "c"], "label": 0}])
    works = ("--tokens 100", "--json --tokens 100", "--task task.jsonl", "--by-document by.jsonl")
    good = Path("run/step-00000009.pt").read_bytes()
    for number in range(TIMES):
        draw = random.Random(number)
        name = draw.choice(sorted(weights))
        broken = {**weights, name: weights[name].clone()}
        place = draw.randrange(weights[name].numel())
        broken[name].view(-1)[place] = draw.choice((math.nan, math.inf, -math.inf))
        torch.save(broken, "bad.pt")
        said = said_by(train.main, f"{SMALL} --data store --init bad.pt --out new")
        assert "bad.pt" in said and "not finite" in said and name in said
        Path("run/step-00000009.pt").write_bytes(good)
        channel = draw.randrange(len(weights["ln_f.weight"]) // 2)
        resigned(lambda state, at=channel: state["model"]["ln_f.weight"][at:].fill_(3e38))()
        line = f"run --device cpu {works[number % len(works)]}"
        assert "not finite" in said_by(evaluate.main, line), (line, channel)
        assert not Path("by.jsonl").exists() and not Path("new").exists()


@pytest.mark.parametrize("name, module", BOARDS.items())
def test_a_board_without_its_package_claims_no_folder(place, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module[0], None)  # as an import that fails
    assert f"--{name} needs its package" in said_by(train.main, f"{NEW} --{name}")
    assert not Path("new").exists()


# colour in two encodings, a window's title, over what stands there, from right to left
STEERING = ("\x1b[31m", "\x9b31m", "\x1b]0;title\x07", "\b\b", "\u202e")


@pytest.mark.parametrize("steering", STEERING)
def test_what_strangers_write_cannot_steer_a_terminal(steering, place, capsys, monkeypatch):
    """Names of files, texts in settings, logs and stores, and of a model, are printed escaped."""
    red = f"{steering}red"
    shutil.copytree("run", red)
    set_in_run(Path(red), "model.size", red)
    shutil.copytree("store", f"{red}-store")
    edit(f"{red}-store/meta.json", "tokenizer", value=red)()
    Path(f"{red}.jsonl").write_text("5")
    for main, line in (
        (evaluate.main, f"{red} --tokens 100"),
        (sample.main, red),
        (train.main, f"--resume --out {red}"),
        (train.main, f"--data {red}-store --out new --device cpu"),
        (prepare.main, f"{red}.jsonl --out s --tokenizer bytes"),
        (evaluate.main, f"run --task {red}.jsonl"),
    ):
        with pytest.raises((ValueError, OSError)) as refused:
            main(line.split())
        assert one_line(refused.value).isprintable()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sample.main(["run", "--prompt", red, "--tokens", "1", "--device", "cpu"])
    assert steering not in "".join(capsys.readouterr())


# ---- leftovers, and folders that cannot be written

WRITERS = {
    "learn": (tokenizer.main, "words.txt --ranks 260 --out new.tiktoken"),
    "export": (published.main, "export RUN --out new.safetensors"),
    "export for torch": (published.main, "export RUN --out new.pt"),
    "report": (report.main, "RUN --out new.html"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_killed_command_leaves_goes_when_run_again(writer, run_of, tmp_path, monkeypatch):
    (main, line), run = WRITERS[writer], run_of("--pos learned --tied")
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("all the words there are " * 99)
    argv = line.replace("RUN", str(run)).split()

    def die_before_the_name() -> None:
        os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
        main(argv)

    for _ in range(TIMES // len(WRITERS)):
        process = multiprocessing.get_context("fork").Process(target=die_before_the_name)
        process.start()
        assert end_of([process], 60) == [-signal.SIGKILL]
        assert len(list(Path().glob(".*.tmp"))) == 1
    main(argv)
    assert {path.stem for path in Path().iterdir()} == {"words", "new"}


def on_clones(argv: list[str]) -> None:
    """As `on_machines`; each folder is the clone of a machine, with its user's cache folder."""
    prepare.runtime.ROOT, os.environ["XDG_CACHE_HOME"] = Path(), "home"
    on_machines(argv)


CLONES = {"": "", ".cache": "", ".cache home": "not written"}  # files in the way: what is said


def test_each_machine_prepares_the_embedded_corpus_where_it_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    with gzip.open("corpus/pd-mix.jsonl.gz", "wt") as file:
        file.writelines(f'{{"text": "{n} {"some words " * 99}"}}\n' for n in range(9))
    faults = random.Random(4).choices([*CLONES], k=TIMES)
    for number, in_the_way in enumerate(faults):
        for rank in range(2):
            shutil.copytree("corpus", f"{number}-{rank}/corpus")
        for name in in_the_way.split():
            Path(f"{number}-1", name).touch()
    flags = f"{SMALL} --curriculum rarity --tokens 256 --out new"  # an index of its own
    lines = (f"{number}-RANK={flags}" for number in range(TIMES))
    start_ranks(2, " ; ".join(lines).split(), work=on_clones)
    for said in said_at(tmp_path):
        for fault, line in zip(faults, said, strict=True):
            assert CLONES[fault] in line and bool(CLONES[fault]) == bool(line), (fault, line)
    assert len(list(tmp_path.glob("*/home/parsimony/pd-mix-*"))) == faults.count(".cache")
