"""The folder of a run: its config.json, its log, and what made both.

A folder that holds a run is never given to another one.
"""

import itertools
import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.base.atomic import atomic_write
from support.runtime import ROOT
from support.settings import Flat


class ModelSize(NamedTuple):
    """What the settings do not say about a model's size."""

    vocab_size: int  # rows of the embedding
    positions: int | None = None  # that published weights reach to


class Started(NamedTuple):
    """What a run was started with, as its config.json has it."""

    folder: Path
    id: str  # also in its checkpoints, whatever folder they are in
    config: Flat
    size: ModelSize
    store: dict[str, Any]  # sha256 of its files


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
    write_config(folder, {**run, "store": sha256, **provenance()})
    return str(folder), run["id"]


def write_config(folder: Path, about: dict) -> None:
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(about, indent=2).encode())


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
    """What a run was started with; ValueError for a folder without a run."""
    about = config_in(folder)
    size = ModelSize(**about["model_size"])
    return Started(folder, about["id"], about["config"], size, about["store"])


def config_in(folder: Path) -> dict:
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        message = f"--resume: {folder} holds no run; name the folder of one with --out"
        raise ValueError(message) from None
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is damaged: {error}") from None


def extend_budget(folder: Path, tokens: int) -> None:
    """Write a larger budget down; the techniques' schedules keep that of the start."""
    about = config_in(folder)
    about["config"]["optim.tokens"] = tokens
    write_config(folder, about)


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


class Log:
    """log.jsonl, one JSON object a line, written by rank 0.

    Args: size  bytes to keep of a log that goes on: what a killed run logged after its last
                checkpoint is computed and written again
          board wandb's run, which gets the numbers too
    """

    def __init__(self, folder: Path, active: bool, size: int | None = None, board: Any = None):
        self.file, self.board = None, board
        if not active:
            return
        self.file = open(folder / "log.jsonl", "a+b")  # noqa: SIM115, open as long as the run
        if size is not None:
            end = self.file.seek(0, os.SEEK_END)
            self.file.truncate(min(size, end))
            if end < size:  # lost by the disk, perhaps in the middle of a line
                self.file.write(b"\n")

    def write(self, event: str, **values: object) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"event": event, **values}).encode() + b"\n")
        self.file.flush()
        if self.board and "consumed_tokens" in values:
            numbers = {f"{event}/{n}": v for n, v in values.items() if isinstance(v, (int, float))}
            self.board.log({**numbers, "consumed_tokens": values["consumed_tokens"]})

    def size(self) -> int:
        """Bytes until now, which are on the disk after this."""
        if self.file is None:
            return 0
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def open_wandb(folder: Path, run: str, settings: Flat) -> Any:
    """Begin or go on with a run of Weights & Biases; run is its id."""
    import wandb

    about = {"project": os.environ.get("WANDB_PROJECT", "parsimony"), "config": settings}
    board = wandb.init(id=run, resume="allow", dir=str(folder), name=folder.name, **about)
    board.define_metric("*", step_metric="consumed_tokens")
    return board


def read_log(folder: Path) -> Iterator[dict]:
    """The lines of a run's log; one that is damaged, as by a kill, has the event "torn"."""
    file = folder / "log.jsonl"
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) and "event" in line else {"event": "torn"}
