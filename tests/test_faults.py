"""Broken on purpose: nothing is lost, nothing wrong without a word, every end within seconds.

docs/reliability.md lists these classes of faults and what is promised for each. Two ranks run with
`start_ranks`; as two machines each has a folder of its own.

    pytest -m faults
"""

import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, rank_of, read_log, start_ranks, stop_in_step

import evaluate
import prepare
import report
import sample
import train
from support.base.atomic import folder_lock
from support.base.runtime import one_line
from support.run import checkpoint
from support.text import tokenizer
from support.weights import published

pytestmark = pytest.mark.faults
NEWLINE = b"\n"
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
    """A rank's work: in each folder FOLDER=COMMAND names, train; write down what was said."""
    said, places = [], Path.cwd()
    for entry in " ".join(argv).split(" ; "):
        folder, _, line = entry.partition("=")
        os.chdir(places / folder.replace("RANK", os.environ["RANK"]))
        said.append(said_by(train.main, line))
    (places / f"said-{os.environ['RANK']}.json").write_text(json.dumps(said))


def said_at(places: Path) -> list[list[str]]:
    """What each rank has written down."""
    return [json.loads((places / f"said-{rank}.json").read_text()) for rank in range(2)]


def by_two_ranks(places: Path, lines: dict[str, str], patch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each of two ranks says to each command, {folder: command}, RANK in a folder's name."""
    patch.chdir(places)
    entries = " ; ".join(f"{folder}={line}" for folder, line in lines.items())
    start_ranks(2, entries.split(), work=say_all)
    return said_at(places)


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


def resigned(change: Callable[[dict], object]) -> Callable[[], None]:
    """The newest checkpoint with other contents, and a digest that is right."""

    def damage() -> None:
        path = checkpoint.steps_in(Path("run"))[-1]
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
    {name: [] for name in ("optim.lr", "optim.grad_clip", "optim.skip_bad_steps")}
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
    "skipped steps of text": resigned(put("optimizers", "guard", "skipped", value="x")),
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
    "offsets fall": offsets(5, -100_000),
    "offsets do not begin at 0": offsets(0, 1),
    "half of the tokens": cut("store/tokens.bin", 0.5),
    "half of the offsets": cut("store/documents.idx", 0.5),
    "negative documents": edit(meta, "train_documents", value=-1),
    "documents beyond": edit(meta, "train_documents", value=10**6),
    "fewer train documents": edit(meta, "train_documents", value=7),
    "train tokens of text": edit(meta, "train_tokens", value="x"),
    "fewer train tokens": edit(meta, "train_tokens", value=5),
    "another vocabulary": edit(meta, "vocab_size", value=300),
    "a huge vocabulary": edit(meta, "vocab_size", value=10**9),
    "end of text outside it": edit(meta, "end_of_text", value=5000),
    "another dtype": edit(meta, "dtype", value="uint32"),
    "no digests": edit(meta, "sha256", gone=True),
    "no fingerprint": edit(meta, "tokenizer_fingerprint", gone=True),
    "another format": edit(meta, "format", value=99),
    "sources of numbers": edit(meta, "sources", value=[1]),
    "nested deep": text(meta, DEEP),
    "a list": text(meta, "[]"),
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
    assert len(damages) >= TIMES
    lines = {}
    for number, damage in enumerate(damages.values()):
        monkeypatch.chdir(shutil.copytree(stopped, tmp_path / str(number)))
        damage()
        lines[str(number)] = line
    log = (stopped / "run" / "log.jsonl").read_bytes()
    alone = []
    for folder in lines:
        monkeypatch.chdir(tmp_path / folder)
        alone.append(said_by(train.main, line))
    ranks = by_two_ranks(tmp_path, lines, monkeypatch)
    for name, *said in zip(damages, alone, *ranks, strict=True):
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
    assert by_two_ranks(place.parent, {"place": RESUME}, monkeypatch) == [[""], [""]]


def test_a_log_that_lost_its_end_is_said_and_mended(stopped, tmp_path, monkeypatch, capsys):
    whole = (stopped / "run" / "log.jsonl").read_bytes()
    known = checkpoint.load(checkpoint.find(stopped / "run", "last"))["log_size"]
    draw = random.Random(1)
    for number in range(TIMES):
        monkeypatch.chdir(shutil.copytree(stopped, tmp_path / str(number)))
        kept = draw.choice([0, draw.randrange(known)])
        Path("run/log.jsonl").write_bytes(whole[:kept])
        assert train.main(RESUME.split()) == 0
        assert f"log.jsonl has lost {known - whole.rfind(NEWLINE, 0, kept) - 1:,} bytes" in (
            capsys.readouterr().out
        )
        lines = read_log(Path("run"))  # every line is whole
        steps = [line["step"] for line in lines if line["event"] == "train"]
        assert steps[-8:] == list(range(9, 17)) or steps[-7:] == list(range(10, 17))
        report.main(["run", "--markdown"])
        missing = 16 - len(steps)
        assert f"missing in the log: {missing}" in capsys.readouterr().out or not missing


LINES = ["5", "[]", '"x"', "{}", '{"event": 5}', DEEP, "\x00", '{"event":"train","step":"x"}']
LINES += ['{"event":"eval","step":1,"consumed_tokens":"x","val_bpb":[],"targets":1,"last":0}']
LINES += ['{"event":"run","config":3,"argv":"x"}', '{"event":"stage"}', '{"event":"checkpoint"}']


def test_strange_lines_of_a_log_are_left_out_of_the_report(place, capsys):
    with open("run/log.jsonl", "a") as log:
        log.write("\n".join([*LINES, ""]))
    report.main(["run", "--markdown"])
    assert "damaged lines of the log, left out: 11" in capsys.readouterr().out
    assert train.main(RESUME.split()) == 0


def test_what_the_last_bits_depend_on_is_said_when_it_changes(place, capsys):
    resigned(put("made_by", "threads", value="64"))()
    assert train.main(RESUME.split()) == 0
    said = capsys.readouterr().out
    assert "threads was 64 and is 1: losses will be close, not bitwise" in said


def test_a_store_that_changed_under_its_digests_is_what_verify_data_and_verify_find(place, capsys):
    size, draw = os.path.getsize("store/tokens.bin"), random.Random(2)
    prepare.main(["verify", "store"])
    assert "verified" in capsys.readouterr().out
    for _ in range(TIMES):
        with open("store/tokens.bin", "r+b") as file:
            at = draw.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        assert "tokens.bin is damaged" in said_by(train.main, f"{RESUME} --verify-data")
        assert "tokens.bin is damaged" in said_by(prepare.main, "verify store")
        with open("store/tokens.bin", "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))


def test_a_store_that_is_cut_while_it_is_read_is_a_sentence(place, monkeypatch):
    draw, real_step = random.Random(3), train.Trainer.step
    for number in range(TIMES):
        shutil.copytree("store", f"store-{number}")
        last, share = draw.randrange(1, 12), draw.random()

        def cutting(self, step, last=last, share=share, number=number):
            if step.after.step == last:
                cut(f"store-{number}/tokens.bin", share)()
            return real_step(self, step)

        monkeypatch.setattr(train.Trainer, "step", cutting)
        line = f"{SMALL} --data store-{number} --out new-{number}"
        assert "has become shorter" in said_by(train.main, line)


# ---- ranks that differ, and machines that share no folder

DIFFER = ["--dtype bf16", "--lr 0.5", "--seed 5", "--tokens 2048", "--layers 2", "--width 64"]
DIFFER += ["--batch-tokens 512", "--eval-every 512", "--eval-tokens 100", "--fsdp", "--offload"]
DIFFER += ["--checkpoint-every 512", "--seq-len 64", "--optimizer adamw", "--pack", "--ltd"]
DIFFER += ["--dropout 0.1", "--schedule wsd", "--micro-batch-size 1", "--model bert"]


def differ(argv: list[str]) -> None:
    """A rank's work: rank 1 has one more flag."""
    os.environ["LOCAL_RANK"] = "0"
    said, rank, places = [], int(os.environ["RANK"]), Path.cwd()
    os.chdir(places / f"machine-{rank}")
    for more in DIFFER:
        said.append(said_by(train.main, f"{BEGIN} --out new {more if rank else ''}"))
    (places / f"said-{rank}.json").write_text(json.dumps(said))


def test_ranks_with_other_flags_are_refused_before_the_first_step(stopped, tmp_path, monkeypatch):
    assert len(DIFFER) >= TIMES
    machines = two_machines(stopped, tmp_path, monkeypatch)
    start_ranks(2, [], work=differ)
    for by_rank in said_at(tmp_path):
        for more, said in zip(DIFFER, by_rank, strict=True):
            assert "ranks differ in" in said and more.split()[0].lstrip("-")[:5] in said, (
                more,
                said,
            )
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
        words = Path("words.txt")
        words.write_text("other words " * 9000)
        prepare.main(f"{words} --out {machines[1]}/text --tokenizer bytes".split())
        shutil.rmtree(machines[1] / "store")
        (machines[1] / "text").rename(machines[1] / "store")
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
        log = read_log(machines[0] / "run-0", "train")
        losses = uninterrupted(stopped, monkeypatch)
        assert [line["loss"] for line in log] == pytest.approx(losses, rel=1e-4)
        return
    named = {"another text": "the text of --data", "no shared folder": "rank 1 does not see new"}
    assert all(named[fault] in said for said in first + second), (first, second)


def uninterrupted(stopped: Path, patch: pytest.MonkeyPatch, more: str = "") -> list[float]:
    """The losses of the run that nobody stopped."""
    patch.chdir(stopped)
    out = f"whole{more.replace(' ', '')}"
    if not Path(out).exists():
        assert train.main(f"{BEGIN} --out {out} {more}".split()) == 0
    return [line["loss"] for line in read_log(Path(out), "train")]


# ---- kills, signals, and ranks that do not answer


def kill_soon(argv: list[str]) -> int:
    """A rank's work: train, and be killed if this rank is the one, some time after the start."""
    number, seconds, how, *argv = argv
    sys.stderr = open("said", "a", buffering=1)  # noqa: SIM115, what the last words are written to
    if os.environ.get("RANK", "0") == number:
        real = train.Poll.begin

        def begin(self, run, bar):
            real(self, run, bar)
            strike = threading.Timer(float(seconds), os.kill, (os.getpid(), int(how)))
            strike.daemon = True
            strike.start()

        train.Poll.begin = begin
    return train.main(argv)


def started(ranks: int, argv: list[str]) -> list[multiprocessing.Process]:
    """The processes of a command on so many ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    context, given = multiprocessing.get_context("forkserver"), (ranks, port, Path.cwd())
    processes = [
        context.Process(target=rank_of, args=(rank, *given, kill_soon, [argv]))
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


@pytest.mark.parametrize(
    ("ranks", "more", "seconds"), [(1, "", 0.3), (2, "", 0.3), (2, "--fsdp", 2)]
)
def test_killed_at_random_moments_resume_auto_ends_with_the_same_losses(
    ranks, more, seconds, stopped, tmp_path, monkeypatch
):
    """The one command, again and again, until it ends by itself."""
    losses = uninterrupted(stopped, monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped / "store", "store")
    draw, kills, runs = random.Random(4), 0, 0
    while kills < TIMES:
        line, runs, ended = f"{BEGIN} --out run-{runs} --resume auto {more}", runs + 1, False
        while not ended:
            number = str(draw.randrange(ranks))
            strike = [number, str(draw.uniform(0, seconds)), str(int(signal.SIGKILL))]
            statuses = end_of(started(ranks, [*strike, *line.split()]), 60)
            assert None not in statuses
            ended = not any(statuses)
            kills += -signal.SIGKILL in statuses
        lines = read_log(Path(f"run-{runs - 1}"))
        seen = [line["loss"] for line in lines if line["event"] == "train"]
        assert seen == (losses if ranks == 1 else pytest.approx(losses, rel=1e-4))
        assert lines[-1]["event"] == "finished"


def test_a_rank_that_is_stopped_is_named_and_the_others_end(stopped, tmp_path, monkeypatch):
    draw = random.Random(5)
    for number in range(0, TIMES, AT_ONCE):  # they mostly wait
        runs = []
        for _ in range(AT_ONCE):
            number += 1
            place = shutil.copytree(stopped, tmp_path / str(number))
            monkeypatch.chdir(place)
            rank = draw.randrange(2)
            strike = [str(rank), str(draw.uniform(0, 0.2)), str(int(signal.SIGSTOP))]
            line = f"{BEGIN} --out new --tokens 400K --rank-timeout 2"
            runs.append((place, rank, started(2, [*strike, *line.split()])))
        for place, rank, processes in runs:
            statuses = end_of([processes[1 - rank]], 60)
            processes[rank].kill()
            assert statuses == [1]
            assert f"no answer from rank {rank}, stopped or stuck" in (place / "said").read_text()


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def test_every_signal_saves_the_step_and_resume_goes_on(stopped, tmp_path, monkeypatch):
    losses, real_step, draw = (
        uninterrupted(stopped, monkeypatch),
        train.Trainer.step,
        random.Random(6),
    )
    monkeypatch.chdir(tmp_path)
    # nohup may have started the tests, and then a run rightly goes on at SIGHUP
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    for number in range(TIMES):
        chosen, last = SIGNALS[number % len(SIGNALS)], draw.randrange(1, 16)

        def struck(self, step, chosen=chosen, last=last):
            if step.after.step == last:
                os.kill(os.getpid(), chosen)
            return real_step(self, step)

        monkeypatch.setattr(train.Trainer, "step", struck)
        line = f"{SMALL} --data {stopped}/store --out run-{number} --resume auto"
        assert train.main(line.split()) == 128 + chosen
        assert checkpoint.steps_in(Path(f"run-{number}"))[-1].stem == f"step-{last:08d}"
        monkeypatch.setattr(train.Trainer, "step", real_step)
        assert train.main(line.split()) == 0
        assert [line["loss"] for line in read_log(Path(f"run-{number}"), "train")] == losses


# ---- steps that are not finite


def strike_gradients(patch: pytest.MonkeyPatch, steps: dict[int, float], rank: int) -> None:
    """Multiply this rank's gradients, which are those of all by then, in some steps."""
    real = train.Trainer.gradients

    def struck(self, step):
        total = real(self, step)
        if step.after.step in steps and self.runtime.rank == rank:
            for weight in self.model.parameters():
                weight.grad.mul_(steps[step.after.step])
        return total

    patch.setattr(train.Trainer, "gradients", struck)


def skip_on_two(argv: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        strike_gradients(patch, {4: torch.nan, 9: torch.inf}, rank=1)
        return train.main(argv)


def test_bad_steps_move_no_weight_on_any_rank(stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"{SMALL} --data {stopped}/store --skip-bad-steps 1"
    for number in range(TIMES // 4):
        start_ranks(2, f"{line} --out run-{number} --seed {number}".split(), work=skip_on_two)
        lines = read_log(Path(f"run-{number}"), "train")
        assert [line["skipped"] for line in lines] == [0] * 3 + [1] * 5 + [2] * 8
    state = checkpoint.load(checkpoint.find("run-0", "last"))
    assert state["optimizers"]["guard"]["skipped"] == 2


def test_a_skipped_step_is_as_if_the_weights_were_not_asked(stopped, tmp_path, monkeypatch):
    """Same weights and moments after as before; then a spike; then too many in a row."""
    monkeypatch.chdir(tmp_path)
    seen, real = {}, train.Trainer.step

    def watched(self, step):
        done = real(self, step)
        seen[step.after.step] = checkpoint.copied(self.state())
        return done

    monkeypatch.setattr(train.Trainer, "step", watched)
    line = f"{SMALL} --data {stopped}/store --tokens 8K"
    draw = random.Random(7)
    bad = {draw.randrange(2, 16): torch.nan, draw.randrange(18, 24): 1e6, 26: torch.inf}
    strike_gradients(monkeypatch, bad, rank=0)
    assert train.main(f"{line} --out run --skip-bad-steps 1".split()) == 0
    for step in bad:
        for part in ("model", "state"):
            before, after = (
                s["model"] if part == "model" else s["optimizers"]["state"]
                for s in (seen[step - 1], seen[step])
            )
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert not torch.equal(
            seen[step + 1]["model"]["wte.weight"], seen[step]["model"]["wte.weight"]
        )
    strike_gradients(monkeypatch, {5: torch.nan, 6: torch.nan}, rank=0)
    assert "step 6" in said_by(train.main, f"{line} --out other --skip-bad-steps 1")
    assert "--skip-bad-steps" in said_by(train.main, f"{line} --out third")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    resume = "--resume --out third --lr 0.001 --skip-bad-steps 2"
    assert train.main(resume.split()) == 0, "from before the step, by another learning rate"
    changed = read_log(Path("third"), "changed")
    assert {line["setting"]: line["now"] for line in changed} == {
        "optim.lr": 0.001,
        "optim.skip_bad_steps": 2,
    }


# ---- one folder, one process


def test_a_second_process_is_refused_while_the_first_has_the_folder(place):
    for _ in range(TIMES):
        with folder_lock(Path("run")):
            assert "is held by another process" in said_by(train.main, RESUME)
    assert said_by(train.main, RESUME) == ""


def test_what_comes_after_the_last_step_is_made_up_for(place, monkeypatch):
    """Killed between the last evaluation and the report, a run is not finished."""

    def killed(*_, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.report, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            train.main(RESUME.split())
    assert not Path("run/report.html").exists()
    assert train.main(RESUME.split()) == 0
    assert Path("run/report.html").exists()
    lines = read_log(Path("run"))
    assert [line["event"] for line in lines].count("finished") == 1
    assert sum(line.get("last", False) for line in lines) == 1


# ---- code and bombs of strangers


@pytest.fixture
def with_code(store_dir, tmp_path, monkeypatch):
    """A stopped run with a pacing of its own, whose file leaves a mark when it runs."""
    monkeypatch.chdir(tmp_path)
    code = "open('ran', 'a').close()\ndef pace(progress):\n    return 8 + 24 * (progress >= 0.5)\n"
    Path("pace.py").write_text(code)
    stop_in_step(9, monkeypatch)
    flags = f"{SMALL} --data {store_dir} --curriculum seqlen --curriculum-pace"
    assert train.main(f"{flags} pace.py:pace --out run".split()) > 128
    shutil.move("pace.py", "run/pace.py")
    for name in ("run/config.json", "run/log.jsonl"):
        Path(name).write_text(Path(name).read_text().replace("pace.py:pace", "run/pace.py:pace"))
    path = checkpoint.steps_in(Path("run"))[-1]
    state = checkpoint.load(path)
    state["config"]["curriculum.pace"] = "run/pace.py:pace"
    checkpoint.write_file(path, state)
    Path("ran").unlink()
    return tmp_path


def test_reading_a_run_runs_none_of_its_code_and_resuming_asks(with_code, new_process):
    evaluate.main(["run", "--tokens", "100", "--device", "cpu"])
    sample.main(["run", "--tokens", "3", "--device", "cpu"])
    report.main(["run", "--markdown"])
    for more in ("", "--dry-run"):
        assert "--trust-code" in said_by(train.main, f"{RESUME} {more}")
    assert not Path("ran").exists()
    log = json.loads(Path("run/config.json").read_text())
    log["config"]["run.trust_code"] = True  # a stranger cannot trust for us
    Path("run/config.json").write_text(json.dumps(log))
    assert "--trust-code" in said_by(train.main, RESUME)
    assert not Path("ran").exists()
    assert said_by(train.main, f"{RESUME} --trust-code") == ""
    assert Path("ran").exists()


INPUT = {
    "a line that never ends": ("a.jsonl.gz", "longer than"),
    "a dangling link": ("folder", "b.txt: is a link to a folder or to nothing"),
    "a link to a folder below": ("folder", "b.txt: is a link to a folder or to nothing"),
    "a pipe in a folder": ("folder", "a pipe or a device"),
    "a folder that may not be read": ("folder", "Permission denied"),
    "JSON nested deep": ("a.jsonl", "nested too deep"),
}


@pytest.mark.parametrize("fault", INPUT)
def test_input_that_would_be_skipped_or_fill_memory_is_refused(fault, tmp_path, monkeypatch):
    if "read" in fault and os.geteuid() == 0:
        pytest.skip("root may read every folder")
    monkeypatch.chdir(tmp_path)
    name, said = INPUT[fault]
    if name == "folder":
        Path("folder/below").mkdir(parents=True)
        Path("folder/a.txt").write_text("text " * 100)
    if "line" in fault:
        with gzip.open(name, "wb") as file:
            file.write(b'{"text": "')
            for _ in range(80):
                file.write(b" " * (1 << 20))
    elif "link" in fault:
        Path("folder/b.txt").symlink_to("nowhere" if "dangling" in fault else "below")
    elif "pipe" in fault:
        os.mkfifo("folder/b.txt")
    elif "folder" in fault:
        Path("folder/below").chmod(0)
    else:
        Path(name).write_text(DEEP)
    assert said in said_by(prepare.main, f"{name} --out s --tokenizer bytes")
    assert not [path for path in Path().iterdir() if path.name.startswith((".s", "s"))]


def test_json_lines_are_read_as_such_whatever_their_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = "".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(30))
    counts = []
    for name in ("a.jsonl", "a.JSONL", "a.json", "a.ndjson"):
        Path(name).write_text(content)
        prepare.main(f"{name} --out {name}-store --tokenizer bytes --holdout 0".split())
        counts.append(json.loads(Path(f"{name}-store/meta.json").read_text())["documents"])
    assert counts == [30] * 4


def test_repeated_ids_are_counted_and_names_cannot_steer_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [{"id": n % 25, "text": f"document {n}", "source": "\x1b[31mred"} for n in range(30)]
    Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare.main(["a.jsonl", "--out", "s", "--tokenizer", "bytes"])
    said = capsys.readouterr().out
    assert "5   documents with the id of an earlier one" in said
    assert "\x1b" not in said and r"\x1b[31mred" in said
    refused = said_by(prepare.main, "\x1b[31m --out t --tokenizer bytes")
    assert "\x1b" not in one_line(ValueError(refused))


def test_a_tensor_that_claims_more_than_its_file_has_is_refused(place):
    def claim(state: dict) -> None:
        state["model"]["ln_f.bias"] = torch.zeros(1).expand(1 << 34)  # 64 GB, of 4 bytes

    path = checkpoint.steps_in(Path("run"))[-1]
    state = checkpoint.load(path)
    claim(state)
    checkpoint.write_file(path, state)
    assert "claims more numbers than the file has" in said_by(train.main, RESUME)


def test_spans_that_were_cut_or_zeroed_are_refused(place, monkeypatch):
    monkeypatch.setattr("support.rows.samples.IN_MEMORY", 0)
    line = f"{SMALL} --data store --pack --tokens 512"
    assert said_by(train.main, f"{line} --out first") == ""
    (table,) = Path("store").glob("train-*.spans")
    whole = table.read_bytes()
    draw = random.Random(8)
    for number in range(TIMES):
        content = bytearray(whole)
        if number % 2:
            del content[draw.randrange(len(whole) // 16) * 16 :]
        else:
            first = draw.randrange(len(whole) // 16 - 64) * 16
            content[first : first + 64 * 16] = bytes(64 * 16)
        table.write_bytes(content)
        assert f"{table.name} is damaged" in said_by(train.main, f"{line} --out more")
    table.unlink()
    assert said_by(train.main, f"{line} --out more") == ""


BOUNDS = ["--layers 1000000000", "--width 2147483648", "--heads 100000", "--batch-tokens 1000M"]


@pytest.mark.parametrize("flags", BOUNDS)
def test_sizes_beyond_all_reason_are_refused_at_once(flags, place):
    began = time.monotonic()
    assert flags.split()[0] in said_by(train.main, f"{BEGIN} --out new {flags}")
    assert time.monotonic() - began < 5 and not Path("new").exists()


# ---- leftovers, and folders that cannot be written

WRITERS = {
    "learn": (tokenizer.main, "learn words.txt --ranks 260 --out new.tiktoken"),
    "export": (published.main, "export RUN --out new.safetensors"),
    "export for torch": (published.main, "export RUN --out new.pt"),
    "report": (report.main, "RUN --out new.html"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_killed_command_leaves_goes_when_run_again(writer, run_of, tmp_path, monkeypatch):
    (main, line), run = WRITERS[writer], run_of("--pos learned")
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
    lines = (f"{number}-RANK={SMALL} --tokens 256 --out new" for number in range(TIMES))
    start_ranks(2, " ; ".join(lines).split(), work=on_clones)
    for said in said_at(tmp_path):
        for fault, line in zip(faults, said, strict=True):
            assert CLONES[fault] in line and bool(CLONES[fault]) == bool(line), (fault, line)
    assert len(list(tmp_path.glob("*/home/parsimony/pd-mix-*"))) == faults.count(".cache")
