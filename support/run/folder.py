"""The folder of a run: its config.json, which never changes, its log, and what made both.

What changes when the run goes on stands in changed.json (support/run/extension.py). A folder that
holds a run is never given to another one.
"""

import importlib
import itertools
import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.base.atomic import atomic_write, sync
from support.base.runtime import ROOT
from support.base.settings import Flat
from support.base.typed_json import MOST_VOCABULARY, At, Each, parsed, read_json


class ModelSize(NamedTuple):
    """What the settings do not say about a model's size."""

    vocab_size: int  # rows of the embedding
    positions: int | None = None  # that published weights reach to


# settings that may change when a run goes on, see support/run/extension.py
CHANGEABLE = {
    "optim.tokens": At(1),
    "optim.lr": float,
    "optim.grad_clip": float,
}
REMEDY = "put it back, or start a new run with another --out"
MODEL_SIZE = {"vocab_size": At(1, MOST_VOCABULARY), "positions": int | None}


class Started(NamedTuple):
    """What a run was started with, as its config.json has it."""

    folder: Path
    id: str  # also in its checkpoints, whatever folder they are in
    config: Flat
    size: ModelSize
    store: dict[str, Any]  # sha256 of its files
    tokens: int  # its budget until now


# ---- config.json


def create_run_folder(
    out: str | None, stem: str, settings: Flat, size: ModelSize, sha256: dict[str, str]
) -> tuple[str, str]:
    """Make the folder `out`, or else the first of stem-1, stem-2, ... that is free.

    Args:    sha256 of the store's files
    Returns: the folder, and the id of the run
    Raises:  ValueError if `out` holds a run already
    """
    folder = named_folder(Path(out)) if out else first_free(stem)
    run = {"id": secrets.token_hex(8), "config": settings, "model_size": size._asdict()}
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps({**run, "store": sha256, **provenance()}, indent=2).encode())
    sync(folder)
    return str(folder), run["id"]


def named_folder(folder: Path) -> Path:
    if (folder / "config.json").exists() or (folder / "log.jsonl").exists():
        raise ValueError(f"--out {folder} holds a run already: name another, or add --resume")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"--out {folder} exists and is not an empty folder: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def first_free(stem: str) -> Path:
    """Make the first of stem-1, stem-2, ... that no other run has made or is making."""
    for number in itertools.count(1):
        folder = Path(f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def newest_run() -> Path:
    """The folder in runs/ whose run was started last."""
    starts = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not starts:
        raise ValueError("--resume: there is no run in runs/; name the folder of one with --out")
    return starts[-1].parent


def started_with(folder: Path) -> Started:
    """What a run was started with, from its config.json.

    Raises: ValueError for a folder without a run, and for a damaged file
    """
    shape = {"id": str, "config": CHANGEABLE, "model_size": MODEL_SIZE, "store": Each(object)}
    try:
        about = read_json(folder / "config.json", shape, REMEDY)
    except FileNotFoundError:
        message = f"--resume: {folder} holds no run; name the folder of one with --out"
        raise ValueError(message) from None
    size = ModelSize(about["model_size"]["vocab_size"], about["model_size"]["positions"])
    config = about["config"]
    return Started(folder, about["id"], config, size, about["store"], tokens=config["optim.tokens"])


def provenance() -> dict[str, str]:
    """What made a result: command, commit, versions, machine."""
    return {
        "argv": " ".join(sys.argv),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def commit() -> str:
    """The commit of this code; asked for once, because a later one is not what runs here."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # git is not installed
        described = ""
    return described or "none"


# ---- log.jsonl


class Board(NamedTuple):
    """Where the numbers of the log go besides: TensorBoard, or Weights & Biases."""

    write: Callable[[dict[str, float], int], None]  # by name, after so many consumed tokens
    close: Callable[[], None]


BOARDS = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}


def opener(name: str) -> Callable:
    """What opens a board of this name; ValueError without its package."""
    module, function = BOARDS[name]
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:  # a folder ./wandb can be imported, too
        raise ValueError(f"--{name} needs its package: pip install -e '.[{name}]'") from error


def open_board(name: str, folder: Path, run: str, settings: Flat) -> Board:
    """Open a board for a run, or go on with it.

    Args:   run its id
    Raises: ValueError with what wandb says, as without an account
    """
    begin = opener(name)
    if name == "tensorboard":
        writer = begin(str(folder / "tensorboard"))

        def write(numbers: dict[str, float], tokens: int) -> None:
            for label, value in numbers.items():
                writer.add_scalar(label, value, tokens)

        return Board(write, writer.close)
    project = os.environ.get("WANDB_PROJECT", "parsimony")
    about = {"project": project, "name": folder.name, "config": settings}
    try:
        there = begin(id=run, resume="allow", dir=str(folder), **about)
    except Exception as error:
        offline = "WANDB_MODE=offline needs no account"
        raise ValueError(f"--wandb: {error or type(error).__name__} ({offline})") from error
    there.define_metric("*", step_metric="consumed_tokens")
    return Board(lambda numbers, t: there.log({**numbers, "consumed_tokens": t}), there.finish)


BEAT_S = 10.0  # seconds between two heartbeats
LONGEST_LINE = 1 << 20  # bytes


class Log:
    """log.jsonl, one JSON object a line, written by rank 0, and its numbers for boards."""

    def __init__(
        self, folder: Path, active: bool, boards: Sequence[Board] = (), size: int | None = None
    ):
        """Append to the log; with `size`, cut it to that many bytes first.

        What a killed run logged after its last checkpoint is computed and written again. If the log
        is shorter than `size`, its `lost` bytes are gone.
        """
        self.folder, self.file, self.boards = folder, None, boards
        self.lost, self.beaten = 0, 0.0
        if not active:
            return
        self.file = open(folder / "log.jsonl", "a+b")  # noqa: SIM115, open as long as the run
        if size is not None:
            there = self.file.seek(0, os.SEEK_END)
            whole = min(size, there)
            self.file.seek(max(whole - LONGEST_LINE, 0))
            torn = self.file.read(min(LONGEST_LINE, whole)).rpartition(b"\n")[2]
            self.file.truncate(whole - len(torn))  # so that the next line is not glued to it
            self.lost = size - whole + len(torn)

    def write(self, event: str, **values: object) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"event": event, **values}).encode() + b"\n")
        self.file.flush()
        if event == "finished":
            self.beat(values["step"], event, every=0)
        if self.boards and "consumed_tokens" in values:
            numbers = {f"{event}/{n}": v for n, v in values.items() if isinstance(v, (int, float))}
            for board in self.boards:
                board.write(numbers, values["consumed_tokens"])

    def beat(self, step: int, where: str, every: float = BEAT_S) -> None:
        """Tell whoever watches the folder where the run is, every so many seconds."""
        if self.file is None or time.time() - self.beaten < every:
            return
        self.beaten = time.time()
        now = {"time": round(self.beaten, 1), "step": step, "where": where}
        now |= {"rank": 0, "pid": os.getpid()}
        unfinished = self.folder / ".heartbeat.json.tmp"
        unfinished.write_text(json.dumps(now) + "\n")
        unfinished.replace(self.folder / "heartbeat.json")

    def sync(self) -> None:
        """Force what was written to the disk: a checkpoint says how long the log was before it."""
        if self.file is not None:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        for output in (self.file, *self.boards):
            if output is not None:
                output.close()

    def size(self) -> int:
        return 0 if self.file is None else self.file.tell()


def last_beat(folder: Path) -> str:
    """Where a run was when it last said so, as "stopped" or "finished"; "" if unknown."""
    try:
        return read_json(folder / "heartbeat.json", {"where": str}, "")["where"]
    except (OSError, ValueError):
        return ""


def read_log(folder: Path) -> Iterator[dict]:
    """The lines of a run's log; one that is damaged, as by a kill, has the event "torn"."""
    file = folder / "log.jsonl"
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = parsed(text)
            except ValueError:
                line = None
            is_event = isinstance(line, dict) and isinstance(line.get("event"), str)
            yield line if is_event else {"event": "torn"}
