"""A run's folder (config.json, log.jsonl, checkpoints), its progress, and how it resumes.

    runs/gpt-nano-1/config.json             the settings it was started with
                    log.jsonl               one JSON object per line: run, train, eval, ...
                    step-00000293.pt        checkpoints: the newest two and the best
                    report.html             a page about the run, written at the end

A run is killed after step 320; its newest checkpoint is of step 293. `train.py --resume`:

    config.parse_or_resume  takes the settings from config.json; --resume auto starts a run if there
                            is none. Flags that only say where and how fast to run may differ
                            (`free` in their group); --tokens may grow
    Run.restore             locks the folder, refuses another text, reads step-00000293.pt (--resume
                            best: the best one; never an older one instead of a damaged one)
    train.assemble          makes model and optimizers from it. There is no random state to restore:
                            every draw is a function of (seed, purpose, step, ...)
    Run.open_folder         writes for the first time: cuts the log to its length at step 293. After
                            --resume best, later checkpoints are renamed abandoned-*
    train.train             evaluates if a signal had left that to be done, and repeats steps 294 to
                            320: the plan is a function of settings, text and clock

Losses are those of an uninterrupted run, bit for bit. Other numbers of ranks or micro-batches,
--compile, --fsdp and --offload may change their last bits. Only rank 0 uses the folder; each
machine has a copy of config.json.
"""

import itertools
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor
from tqdm import tqdm

from support import checkpoint
from support.clock import Clock, due, lr_clock
from support.numbers import duration, short
from support.optim import decay_start
from support.process import ROOT, peak_memory
from support.runtime import Runtime, check_agreement, made_by
from support.settings import Flat, Settings, flattened, settings_of
from support.store import atomic_write, folder_lock, json_object
from support.tokenizer import copy_ranks, tokenizer_in

LINE_SECONDS = 60  # between progress lines when there is no terminal for a progress bar


class ModelSize(NamedTuple):
    """The part of a model's size that the settings leave open."""

    vocab_size: int  # rows of the embedding
    positions: int | None = None  # number of learned positions, if published weights decide it


# ---- what a run was started with


class Started(NamedTuple):
    """What a run was started with, as read from its config.json."""

    folder: Path
    id: str  # its checkpoints carry it too, even if they are moved to another folder
    config: Flat
    size: ModelSize
    sha256: dict[str, str]  # of the store's files


def started_with(folder: Path) -> Started:
    """Read what a run was started with; ValueError if the folder holds no run."""
    file = folder / "config.json"
    try:
        about = json.loads(file.read_text())
        size, config = ModelSize(**about["model_size"]), about["config"]
        if not isinstance(config["optim.tokens"], int):
            raise ValueError("optim.tokens must be a whole number")
        config["data.tokenizer"] = tokenizer_in(folder, config["data.tokenizer"])
        return Started(folder, about["run"], config, size, about["store"])
    except (FileNotFoundError, NotADirectoryError):
        if checkpoint.steps_in(folder):
            raise ValueError(f"--resume: config.json of {folder} is gone: put it back") from None
        raise ValueError(f"--resume: {folder} holds no run; name one with --out") from None
    except KeyError as error:
        raise ValueError(f"{file} is not that of a run: it has no {error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}: put a copy back") from None


def newest_run() -> Path:
    """Find the folder in runs/ whose run was started, or extended with more --tokens, last."""
    logs = Path("runs").glob("[!.]*/log.jsonl")  # an export has a config.json too, but no log
    configs = (log.with_name("config.json") for log in logs)
    starts = sorted(filter(Path.exists, configs), key=lambda path: path.stat().st_mtime)
    if not starts:
        raise ValueError("--resume: runs/ holds no run; name one with --out")
    return starts[-1].parent


# ---- the run


class Run:
    """A run: its progress, its folder, log and checkpoints. It writes nothing before `open_folder`.

    Args: size    of the model
          store   the store's description: train_tokens, sha256, tokenizer_fingerprint
          started what the run to resume was started with; None makes a new run
    """

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        size: ModelSize,
        store: dict,
        started: Started | None,
    ):
        self.settings, self.runtime, self.size = settings, runtime, size
        self.store, self.started = store, started
        self.id = started.id if started else runtime.on_rank0(lambda: secrets.token_hex(8))
        self.folder = started.folder if started else None  # None until `open_folder` makes it
        self.opened = ExitStack()  # the folder's lock and log, until the run ends
        self.log = Log()
        self.log_size = 0  # bytes of the log that remain when it is opened
        self.clock = Clock()
        self.best, self.best_step = math.inf, 0  # lowest held-out bits per byte, and its step
        self.evaluation_due = False  # whether an evaluation at this clock is still to be made
        self.resumed_from: Path | None = None
        self.saved_path: Path | None = None  # the last checkpoint
        self.printed_at, self.printed_tokens = time.monotonic(), 0  # at the last progress line

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.close()

    # ---- start or resume

    def restore(self) -> dict | None:
        """Read the checkpoint that --resume names; continue at its clock.

        Returns: the checkpoint; None if none was ever written, so that the run starts over
        """
        runtime = self.runtime
        runtime.check_same({"the run in --out": self.id})
        path = runtime.on_rank0(self.find_checkpoint)
        if path is None:
            runtime.say(f"{self.folder} was stopped before its first checkpoint: starting over")
            return None
        state = checkpoint.load(path, runtime, sharded=self.settings.run.fsdp)
        self.check_settings(path, state)
        self.clock, self.log_size = Clock.of(state["clock"]), state["log_size"]
        self.best, self.best_step = state["best"], state["best_step"]
        self.evaluation_due = state["evaluation_due"]
        self.resumed_from = self.saved_path = path
        self.check_budget(state["config"]["optim.tokens"])
        now = made_by(runtime) | {"commit": commit()}
        for name, before in (state["made_by"] | {"commit": state["commit"]}).items():
            if now.get(name, before) != before:
                effect = "losses may differ from those of an uninterrupted run"
                runtime.say(f"{name} was {before} and is now {now[name]}: {effect}")
        return state

    def find_checkpoint(self) -> Path | None:
        """On rank 0, lock the folder and choose a checkpoint; None if none was ever written."""
        if not self.settings.run.dry_run:  # no other process may write until this run ends
            self.opened.enter_context(folder_lock(self.folder, wait=False))
        # A folder that somebody else made may hold a link to any of the user's files.
        if (log := self.folder / "log.jsonl").is_symlink() or log.is_dir():
            raise ValueError(f"{log} is a link or a folder: replace it with the file")
        events = [line["event"] for line in read_log(self.folder)]
        if self.started.sha256 != self.store["sha256"]:
            other = "another store, or with other weights in a mixture"
            raise ValueError(f"--data: {self.folder} was started with {other}")
        if checkpoint.steps_in(self.folder):
            return checkpoint.find(self.folder, self.settings.run.resume)
        if "checkpoint" in events:
            raise ValueError(f"--resume: the checkpoints of {self.folder} are gone: put one back")
        return None

    def check_settings(self, path: Path, state: dict) -> None:
        """Refuse a config.json that somebody changed: the checkpoint has the settings too."""
        may_differ = {n for n, s in settings_of(type(self.settings)).items() if s.free}
        # Paths may differ between machines, and `check_budget` compares --tokens.
        may_differ |= {"data.tokenizer", "model.init", "optim.tokens"}
        saved = state["config"] | state["model_size"]
        for name, now in (flattened(self.settings) | self.size._asdict()).items():
            before = saved.get(name, now)  # an old checkpoint may lack newer settings
            if now != before and name not in may_differ:
                changed = f"{self.folder}/config.json: {name} is {now!r}"
                raise ValueError(f"{changed}, but {before!r} in {path.name}: write that back")

    def check_budget(self, before: int) -> None:
        """Refuse other --tokens than before, unless wsd does not decay yet or --min-lr is 1."""
        optim, layers = self.settings.optim, self.settings.model.layers
        consumed = lr_clock(optim.lr_clock, layers, self.clock)
        decays = optim.schedule != "wsd" or consumed > decay_start(replace(optim, tokens=before))
        if optim.tokens != before and decays and optim.min_lr < 1:
            asked = f"--tokens {optim.tokens} at step {self.clock.step}"
            when = "before the decay of --schedule wsd begins, or with --min-lr 1"
            raise ValueError(f"{asked}: a run can be extended {when}; it had {before}")

    def has_ended(self) -> bool:
        """Whether the budget is consumed and everything after the last step is done too."""
        ended = (line["event"] == "finished" for line in read_log(self.folder))
        return self.budget_is_consumed and any(ended)

    def open_folder(self, **about: object) -> None:
        """Make the folder, or continue in the existing one; log `about` in the "run" line."""
        runtime = self.runtime
        if self.started is None:
            self.folder = runtime.on_rank0(self.make_folder)
        else:
            runtime.on_rank0(self.set_aside_later_checkpoints)
        if self.started is None or self.settings.optim.tokens > self.started.config["optim.tokens"]:
            runtime.on_each_machine(self.write_config)
        runtime.on_rank0(lambda: self.warn_of_small_disk(**about["bytes"]))
        runtime.on_rank0(self.open_log)
        self.log.write("run", **self.about(), resumed_at=self.clock.step, **about)
        if self.resumed_from:
            self.log_checkpoint()  # its line was cut: it was written after the size was saved

    def make_folder(self) -> Path:
        run, model = self.settings.run, self.settings.model
        folder = new_folder(run.out, f"runs/{model.model}-{model.size}")
        self.opened.enter_context(folder_lock(folder, wait=False))
        copy_ranks(self.settings.data.tokenizer, folder)
        return folder

    def warn_of_small_disk(self, weights: int, optimizer: int, **other: int) -> None:
        """Warn if the disk cannot hold all checkpoints; the arguments are this rank's bytes.

        Besides the newest --keep, it has to hold the best one and the one that is being written.
        """
        shards = self.runtime.world_size if self.settings.run.fsdp else 1
        needed = (self.settings.run.keep + 2) * (weights + optimizer) * shards
        needed -= sum(p.stat().st_size for p in checkpoint.steps_in(self.folder) if p.exists())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            room = f"{needed / 1e6:,.1f} MB of disk for checkpoints, but {free / 1e6:,.1f} are free"
            self.runtime.say(f"warning: {self.folder} needs {room}")

    def set_aside_later_checkpoints(self) -> None:
        """Rename those later than the one to continue from: `last` must not find them any more."""
        for path in checkpoint.steps_in(self.folder):
            if self.resumed_from and path.stem > self.resumed_from.stem:
                target = path.rename(path.with_name(f"abandoned-{path.name}"))
                self.runtime.say(f"{path} is from a later step: renamed to {target.name}")

    def write_config(self) -> None:
        """Write config.json on this machine; ValueError if another run has this folder here."""
        file, config = self.folder / "config.json", flattened(self.settings)
        if self.started:
            # Other settings that are given now hold for this start only. `schedule_tokens` stays,
            # because techniques follow the first budget.
            config = self.started.config | {"optim.tokens": config["optim.tokens"]}
        if file.exists() and started_with(self.folder).id != self.id:
            raise ValueError(f"--out {self.folder} holds another run on {platform.node()}")
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.about() | {"config": config}
        with atomic_write(file) as out:
            out.write(json.dumps(about, indent=2).encode())

    def open_log(self) -> None:
        file = self.opened.enter_context((self.folder / "log.jsonl").open("ab+"))
        if file.tell() < self.log_size:
            self.runtime.say(f"warning: {file.name} has lost lines: its report counts less")
        size = file.truncate(min(self.log_size, file.tell()))
        file.seek(max(size - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")  # the log was edited: end the line that is cut now
        board = None
        if self.settings.run.wandb:
            board = open_wandb(self.folder, self.id, flattened(self.settings))
        self.log = Log(file, board)

    # ---- progress

    @property
    def budget_is_consumed(self) -> bool:
        """Whether no step is left; the last evaluation may still be missing."""
        return self.clock.consumed_tokens >= self.settings.optim.tokens

    def advance(self, after: Clock) -> None:
        """Move the clock past a step, and note whether an evaluation is due after it."""
        before, self.clock = self.clock, after
        is_due = due(self.settings.run.eval_every, before, after)
        self.evaluation_due = is_due or self.budget_is_consumed

    def record_evaluation(self, bits_per_byte: float) -> bool:
        """Record the result of the evaluation that was due; return whether it is the best."""
        self.evaluation_due = False
        is_best = bits_per_byte < self.best  # NaN is never the best
        if is_best:
            self.best, self.best_step = bits_per_byte, self.clock.step
        return is_best

    def about(self) -> dict:
        """Return settings, size and provenance, for the log's "run" line and for checkpoints."""
        return {
            "run": self.id,
            "config": flattened(self.settings),
            "model_size": self.size._asdict(),
            "store": self.store["sha256"],
            "made_by": made_by(self.runtime),
            **provenance(),
        }

    def progress_bar(self) -> tqdm:
        """Make rank 0's progress bar; without a terminal `log_step` prints a line per minute."""
        self.printed_at, self.printed_tokens = time.monotonic(), self.clock.consumed_tokens
        return tqdm(
            total=self.settings.optim.tokens,
            initial=self.clock.consumed_tokens,
            unit="tok",
            unit_scale=True,
            disable=None if self.runtime.is_rank0 else True,
            smoothing=0.05,
            dynamic_ncols=True,
        )

    def log_step(
        self, before: Clock, columns: dict[str, object], bar: tqdm, *, ms: float, waited_ms: float
    ) -> None:
        """Log the step from the clock `before` to now, and advance the bar.

        Args: columns more columns of the log line; report.py draws some of them
              ms      of the whole step, including `waited_ms` that it waited for its batch
        """
        now = self.clock
        counts = now._asdict()
        del counts["cursor"]  # where the next rows come from: only checkpoints need it
        epochs = now.real_tokens / self.store["train_tokens"]
        rate = round((now.real_tokens - before.real_tokens) / ms * 1e3, 1)
        counts |= {"tokens_per_s": rate, "epochs": round(epochs, 4), **columns}
        self.log.write("train", **counts, ms=round(ms, 2), data_ms=round(waited_ms, 2))
        shown = f"loss {columns['loss']:.3f}" + (f", epochs {epochs:.1f}" if epochs > 1 else "")
        bar.set_postfix_str(shown, refresh=False)
        # The last step may overshoot the budget, and a bar beyond its total shows no time left.
        bar.update(min(now.consumed_tokens, bar.total) - before.consumed_tokens)
        seconds = time.monotonic() - self.printed_at
        if bar.disable and seconds > LINE_SECONDS:
            rate = (now.consumed_tokens - self.printed_tokens) / seconds
            left = duration(max(bar.total - now.consumed_tokens, 0) / rate)
            done = f"{short(now.consumed_tokens)} of {short(bar.total)} tokens"
            self.runtime.say(f"step {now.step:,}: {done}, {shown}, about {left} left")
            self.printed_at, self.printed_tokens = time.monotonic(), now.consumed_tokens

    def log_evaluation(self, result: dict[str, object], last: bool, ms: float) -> None:
        """Log the result of an evaluation."""
        at = {"step": self.clock.step, "consumed_tokens": self.clock.consumed_tokens}
        peak = peak_memory(self.runtime.device)
        self.log.write("eval", **at, **result, last=last, ms=round(ms, 1), peak_memory=peak)

    # ---- checkpoints

    def save(self, state: dict, named: dict[str, Tensor]) -> None:
        """Save a checkpoint: what `assemble` and `restore` need, and what made it.

        Args:   state of model and optimizers, from `Trainer.state`
                named the parameters, which must be the same on all ranks
        Raises: ValueError if ranks differ, or if the checkpoint could not be written
        """
        check_agreement(self.runtime, named)
        state = {
            **state,
            "step": self.clock.step,
            "clock": self.clock.as_dict(),
            "best": self.best,
            "best_step": self.best_step,
            "evaluation_due": self.evaluation_due,
            "log_size": self.log.size(),
            "tokenizer_fingerprint": self.store["tokenizer_fingerprint"],
            **self.about(),
        }
        path = checkpoint.step_path(self.folder, self.clock.step)
        checkpoint.save(path, state, self.runtime, keep=self.settings.run.keep)
        self.saved_path = path
        self.log_checkpoint()

    def log_checkpoint(self) -> None:
        self.log.write("checkpoint", step=self.clock.step, file=self.saved_path.name)


# ---- its folder


def new_folder(out: str | None, stem: str) -> Path:
    """Make the folder `out`, or without one the first of stem-1, stem-2, ... that is free."""
    if out is None:
        for number in itertools.count(1):
            folder = Path(f"{stem}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    check_out(out)  # again, because another run may have taken it
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_out(out: str | None) -> None:
    """Refuse a folder for a new run that holds files or cannot be made; None stands for runs/.

    Only rank 0 is asked: the others keep nothing there but a copy of config.json.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    folder = Path(out or "runs")
    # Hidden names do not count: a run killed while it started may have left one.
    is_used = folder.is_dir() and out and any(folder.glob("[!.]*"))
    if is_used or (os.path.lexists(folder) and not folder.is_dir()):
        raise ValueError(f"--out {folder} is not an empty folder: name a new one, or add --resume")
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ValueError(f"--out: {above} is read-only or no folder: name one elsewhere")


def provenance() -> dict[str, str]:
    """Return what produced a result, besides `made_by`: command, commit, Python, machine."""
    return {
        "argv": " ".join(sys.argv),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def commit() -> str:
    """Ask git for the commit of this code, once: a later commit is not the code that is running."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # git is not installed
        described = ""
    return described or "none"


# ---- log.jsonl


class Log:
    """log.jsonl: one JSON object per line. --wandb gets its numbers too.

    Args: file  opened to append; None writes nothing, as on all ranks but rank 0
          board a run of Weights & Biases, or None
    """

    def __init__(self, file: BinaryIO | None = None, board: Any = None):
        self.file, self.board = file, board

    def write(self, event: str, **values: object) -> None:
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({"event": event, **values}).encode() + b"\n")
            self.file.flush()
        except OSError as error:  # of a full disk, without a name
            raise OSError(error.errno, error.strerror, self.file.name) from None
        if self.board and "consumed_tokens" in values:
            numbers = {f"{event}/{n}": v for n, v in values.items() if isinstance(v, (int, float))}
            self.board.log(numbers | {"consumed_tokens": values["consumed_tokens"]})

    def size(self) -> int:
        """Sync the log to disk and return its length in bytes."""
        if self.file is None:
            return 0
        os.fsync(self.file.fileno())
        return self.file.tell()


def open_wandb(folder: Path, run_id: str, settings: Flat) -> Any:
    import wandb

    board = wandb.init(id=run_id, name=folder.name, dir=folder, config=settings, resume="allow")
    board.define_metric("*", step_metric="consumed_tokens")
    return board


def read_log(folder: Path) -> Iterator[dict]:
    """Yield the lines of a run's log; a damaged line, left by a kill, has the event "torn"."""
    file, config = folder / "log.jsonl", folder / "config.json"
    if not file.exists():
        return
    about = json_object(config.read_bytes()) if config.exists() else None
    with file.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            line = json_object(text)
            if about and line and line.get("run", about.get("run")) != about.get("run"):
                raise ValueError(f"{file} belongs to another run than {config}: put its own back")
            yield line if line and "event" in line else {"event": "torn"}
