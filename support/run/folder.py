"""The folder of a run: its config.json, which never changes, its log, and what made both.

What --resume --tokens changes stands in extended.json (support/run/extension.py). A folder that
holds a run is never given to another one.
"""

import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from support.base.runtime import ROOT


class ModelSize(NamedTuple):
    """What the settings do not say about a model's size."""

    vocab_size: int  # rows of the embedding
    positions: int | None = None  # that published weights reach to


# ---- config.json


def create_run_folder(
    out: str | None, stem: str, settings: dict, size: ModelSize, sha256: dict[str, str]
) -> str:
    """Make the folder `out`, or else the first of stem-1, stem-2, ... that is free.

    Args:   sha256 of the store's files
    Raises: ValueError if `out` holds a run already
    """
    folder = named_folder(Path(out)) if out else first_free(stem)
    about = {"config": settings, "model_size": size._asdict(), "store": sha256, **provenance()}
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    return str(folder)


def named_folder(folder: Path) -> Path:
    if (folder / "config.json").exists() or (folder / "log.jsonl").exists():
        raise ValueError(f"--out {folder} holds a run already: name another, or add --resume")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"--out {folder} exists and is not an empty folder: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def first_free(stem: str) -> Path:
    """Make the first of stem-1, stem-2, ... that no other run has made, not even just now."""
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


def started_with(folder: Path) -> dict:
    """What a run was started with, from its config.json.

    Returns: config {"group.field": value}, model_size (of ModelSize), store (sha256 of its files)
    Raises:  ValueError for a folder without a run, and for a damaged file
    """
    try:
        about = json.loads((folder / "config.json").read_text())
        return {name: about[name] for name in ("config", "model_size", "store")}
    except FileNotFoundError:
        message = f"--resume: {folder} holds no run; name the folder of one with --out"
        raise ValueError(message) from None
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"--resume: {folder}/config.json is damaged ({type(error).__name__}: {error}): put it"
            " back, or start a new run with another --out"
        ) from None


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
    """log.jsonl, one JSON object a line, written by rank 0; for TensorBoard too, if asked."""

    def __init__(self, folder: Path, active: bool, tensorboard: bool, size: int | None = None):
        """Append to the log; with `size`, cut it to that many bytes first.

        What a killed run logged after its last checkpoint is computed and written again.
        """
        self.file, self.board = None, None
        if not active:
            return
        self.file = open(folder / "log.jsonl", "ab")  # noqa: SIM115, open as long as the run
        if size is not None:
            self.file.truncate(min(size, self.file.tell()))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "--tensorboard needs its package: pip install -e '.[tensorboard]'"
                ) from error
            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: str, **values: object) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"event": event, **values}).encode() + b"\n")
        self.file.flush()
        if self.board is not None and "consumed_tokens" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{event}/{name}", value, values["consumed_tokens"])

    def close(self) -> None:
        for output in (self.file, self.board):
            if output is not None:
                output.close()

    def size(self) -> int:
        return 0 if self.file is None else self.file.tell()


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
