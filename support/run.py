"""The folder of a run: config.json, log.jsonl, checkpoints; where the run stands, how it goes on.

    runs/gpt-nano-1/config.json             what it was started with; no other run gets the folder
                    log.jsonl               a JSON object a line: run, train, eval, checkpoint, ...
                    step-00000300.pt        checkpoints: the newest two, and the best
                    report.html             a page about it, at the end

A run of 489 steps is killed after step 320. `train.py --resume` then goes on, in this order:

  1. config.parse_or_resume: the folder is --out, or that of runs/ whose run was begun or extended
     last. Settings are those of its config.json; `resumed`, the next function there, refuses other
     values, but for flags that say where and how fast (`free=True` in their group): --out --data
     --curriculum-index, --device --compile --fsdp --offload* --checkpoint-activations
     --micro-batch-size, --*eval-* --checkpoint-every --keep --wandb --dry-run. They hold for this
     start. A larger --tokens stays in config.json; techniques' schedules keep the first budget
  2. train.main: refuses ranks that differ in settings, commit, torch or threads; opens the store
  3. Run.restore: locks the folder, a lock that ends with its process; compares the store's sha256
     with config.json; takes the newest checkpoint, step-00000300.pt (--resume best: the best), and
     reads it, every CRC32 first. A damaged one, or one of another run, is refused by name, and no
     older one is taken for it. The clock stands at step 300. Another commit, torch, device, dtype
     or number of CPU threads is reported. Other ranks, micro-batches, --compile, --fsdp or
     --offload may change last bits too, and ranks and micro-batches the masks of --dropout
  4. train.assemble: model and optimizers from the checkpoint. There is no random state: every draw
     is a function of (seed, purpose, step, ...), see support/clock.py, whose `Cursor`, a part of
     the clock, says where in the text the next rows begin
  5. Run.open: the log is cut to its length at step 300, and a new "run" line follows; what was
     logged up to step 320 is computed and written again. With --resume best, later checkpoints
     become abandoned-*
  6. train.train: first an evaluation that is still due, for a run that a signal stops saves its
     checkpoint and leaves the evaluation to the next start. Then the plan, a pure function of
     settings, store and clock, goes on with step 301

What a checkpoint holds: "model" and "optimizers", and "pseudo" if that is on, for `assemble`;
"clock", "best", "best_step", "log_size", "evaluation_due" and the run's id in "run" for `restore`;
"made_by", which `restore` compares, and the rest say what made it. It is written under a hidden
name and renamed when it is on the disk. A run that is finished says so after 3 and ends. One that
was stopped before its first checkpoint starts over, and reads --init again.
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
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from support import checkpoint
from support.clock import Clock, due, lr_clock
from support.optim import OptimConfig, decay_start
from support.runtime import ROOT, Runtime, check_agreement, made_by, peak_memory
from support.settings import DataConfig, Flat, RunConfig, flattened, short
from support.sizes import ModelConfig
from support.store import atomic_write, folder_lock

LINE_SECONDS = 60  # between lines about a run that has no terminal


@dataclass(frozen=True)
class Settings:
    """The groups of settings that every run has; config.py adds those of techniques."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


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
    sha256: dict[str, str]  # of the store's files


# ---- config.json


def started_with(folder: Path) -> Started:
    """What a run was started with; ValueError for a folder without a run."""
    try:
        about = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        message = f"--resume: {folder} holds no run; name the folder of one with --out"
        raise ValueError(message) from None
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is damaged: {error}") from None
    size = ModelSize(**about["model_size"])
    return Started(folder, about["id"], about["config"], size, about["store"])


def write_config(folder: Path, about: dict) -> None:
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(about, indent=2).encode())


def newest_run() -> Path:
    """The folder in runs/ whose run was begun, or given more --tokens, last."""
    starts = sorted(Path("runs").glob("[!.]*/config.json"), key=lambda path: path.stat().st_mtime)
    if not starts:
        raise ValueError("--resume: there is no run in runs/; name the folder of one with --out")
    return starts[-1].parent


def new_folder(out: str | None, stem: str) -> Path:
    """Make the folder `out`, or else the first of stem-1, stem-2, ... that is free."""
    if out is None:
        for number in itertools.count(1):
            folder = Path(f"{stem}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    folder = Path(out)
    if (folder / "config.json").exists() or (folder / "log.jsonl").exists():
        raise ValueError(f"--out {folder} holds a run already: name another, or add --resume")
    # a run that was killed as it began leaves a hidden name
    if folder.exists() and (not folder.is_dir() or any(folder.glob("[!.]*"))):
        raise ValueError(f"--out {folder} exists and is not an empty folder: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
    """log.jsonl, one JSON object a line, written by rank 0; with --wandb its numbers go there too.

    Args: size bytes to keep of a log that goes on
    """

    def __init__(self, folder: Path, active: bool, size: int | None = None):
        self.board = None
        self.file = (folder / "log.jsonl").open("a+b") if active else None
        if self.file and size is not None:
            self.file.truncate(min(size, self.file.tell()))

    def open_wandb(self, folder: Path, run_id: str, settings: Flat) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "parsimony")
        about = {"project": project, "config": settings, "dir": str(folder), "name": folder.name}
        self.board = wandb.init(id=run_id, resume="allow", **about)
        self.board.define_metric("*", step_metric="consumed_tokens")

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


# ---- the run


class Run:
    """An open run: its folder, its log, its checkpoints, and where it stands.

    Args: size    of the model
          store   what the store says of itself: train_tokens, sha256, tokenizer_fingerprint
          started of a run that goes on; None makes a new one
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
        self.folder = started.folder if started else None
        self.id = started.id if started else secrets.token_hex(8)
        self.clock = Clock()
        self.best, self.best_step = math.inf, 0  # held-out loss, and the step that had it
        self.evaluation_due = False  # an evaluation at this clock, not made yet
        self.resumed_from: Path | None = None
        self.saved_path: Path | None = None  # the last checkpoint
        self.said_at = time.monotonic()
        self.log: Log | None = None
        self.log_size: int | None = None  # bytes to keep of a log that goes on
        self.lock = ExitStack()  # on the folder, once there is one

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        if self.log and self.log.file:
            self.log.file.close()
        self.lock.close()

    # ---- start, or go on

    def restore(self, shards: dict[str, Tensor]) -> dict | None:
        """Go on from the checkpoint that --resume names: clock, best loss and log are as then.

        Args:    shards of a sharded model, see checkpoint.load
        Returns: that checkpoint; None if none was ever written, so that the run starts over
        Raises:  ValueError if checkpoints are gone or of another run, or if the store is another
        """
        folder, runtime = self.folder, self.runtime

        def chosen() -> Path | None:
            if not self.settings.run.dry_run:  # until this run ends no other process may write
                self.lock.enter_context(folder_lock(folder, wait=False))
            if self.started.sha256 != self.store["sha256"]:
                raise ValueError(
                    f"--data: the run in {folder} began with another store, or with other weights"
                    " of its stores: name that, wherever it is now, or start a new run with another"
                    " --out"
                )
            if checkpoint.steps_in(folder):
                return checkpoint.find(folder, self.settings.run.resume)
            if any(line["event"] == "checkpoint" for line in read_log(folder)):
                raise ValueError(
                    f"--resume: {folder} has lost its checkpoints: put one back, or start a new"
                    " run with another --out"
                )
            return None

        path = runtime.on_rank0(chosen)
        if path is None:
            self.log_size = 0
            runtime.say(f"{folder} was stopped before its first checkpoint: starting over")
            return None
        state = checkpoint.load(path, runtime, shards)
        if state["run"] != self.id:
            raise ValueError(f"{path} is of another run than {folder}: put the run's own back")
        self.clock = Clock.of(state["clock"])
        self.check_budget()
        self.best, self.best_step = state["best"], state["best_step"]
        self.log_size, self.evaluation_due = state["log_size"], state["evaluation_due"]
        self.resumed_from = self.saved_path = path
        now = made_by(runtime) | {"commit": commit()}
        for name, before in (state["made_by"] | {"commit": state["commit"]}).items():
            if now.get(name, before) != before:
                effect = "losses may differ from those of a run that was never stopped"
                runtime.say(f"{name} was {before} and is {now[name]}: {effect}")
        return state

    @property
    def is_extended(self) -> bool:
        """Whether --tokens gives a run that goes on more than it was started with."""
        started = self.started
        return started is not None and self.settings.optim.tokens > started.config["optim.tokens"]

    def check_budget(self) -> None:
        """Refuse a larger --tokens unless the learning rate until now is the same with it."""
        if not self.is_extended:
            return
        optim, layers = self.settings.optim, self.settings.model.layers
        before = replace(optim, tokens=self.started.config["optim.tokens"])
        if self.is_finished:
            why = f"{self.clock.consumed_tokens} are consumed already: give more"
        elif optim.min_lr == 1:  # a constant rate
            return
        elif optim.schedule != "wsd":
            why = f"--schedule {optim.schedule} has spread its decay over {before.tokens}"
        elif lr_clock(optim.lr_clock, layers, self.clock) > decay_start(before):
            why = f"at step {self.clock.step} the learning rate decays already"
        else:
            return
        raise ValueError(
            f"--tokens {optim.tokens}: {why}; a run can be extended under --schedule wsd before its"
            " decay, or with --min-lr 1"
        )

    def is_complete(self) -> bool:
        """Whether the budget is consumed, and all that comes after the last step is done."""
        ended = (line["event"] == "finished" for line in read_log(self.folder))
        return self.is_finished and any(ended)

    def open(self, **about: object) -> None:
        """Make the folder and its log, or go on with them.

        Args: about what the log's first line says besides settings and provenance
        """
        self.runtime.on_rank0(self.prepare_folder)
        self.folder, self.id = self.runtime.on_rank0(lambda: (self.folder, self.id))
        if self.settings.run.fsdp:
            self.check_shared()
        is_rank0, flat = self.runtime.is_rank0, flattened(self.settings)
        self.log = Log(self.folder, is_rank0, self.log_size)
        if self.settings.run.wandb and is_rank0:
            self.log.open_wandb(self.folder, self.id, flat)
        self.log.write("run", **self.about(), resumed_at=self.clock.step, **about)
        if self.resumed_from:
            self.log_checkpoint()  # the saved size of the log does not include its line

    def prepare_folder(self) -> None:
        """On rank 0: a new folder with its config.json, or one in which this run goes on."""
        s = self.settings
        if self.folder is None:
            self.folder = new_folder(s.run.out, f"runs/{s.model.model}-{s.model.size}")
            self.lock.enter_context(folder_lock(self.folder, wait=False))
            about = {"id": self.id, "config": flattened(s), "model_size": self.size._asdict()}
            write_config(self.folder, {**about, "store": self.store["sha256"], **provenance()})
            return
        if (log := self.folder / "log.jsonl").is_symlink():  # somebody sent the folder, perhaps
            raise ValueError(f"{log} is a link, which is not written through: put the file there")
        if self.is_extended:  # the techniques' schedules keep the budget of the start
            about = json.loads((self.folder / "config.json").read_text())
            about["config"]["optim.tokens"] = s.optim.tokens
            write_config(self.folder, about)
        for path in checkpoint.steps_in(self.folder) if self.resumed_from else ():
            if path.stem > self.resumed_from.stem:  # `last` must not mean one this run never made
                target = path.rename(path.with_name(f"abandoned-{path.name}"))
                self.runtime.say(f"{path} is of a later step: renamed to {target.name}")

    def check_shared(self) -> None:
        """Refuse a folder that some rank cannot see: with --fsdp each writes into it."""
        try:
            seen = started_with(self.folder).id == self.id
        except ValueError:
            seen = False
        absent = [str(rank) for rank, sees in enumerate(self.runtime.gather(seen)) if not sees]
        if absent:
            if self.started is None and self.runtime.is_rank0:
                shutil.rmtree(self.folder)
            raise ValueError(
                f"--fsdp: rank {', '.join(absent)} does not see {self.folder} of rank 0, and every"
                " rank saves its own part: put --out on a disk that all machines share"
            )

    # ---- where it stands

    @property
    def is_finished(self) -> bool:
        """Whether the budget is consumed; the last evaluation may still be to do."""
        return self.clock.consumed_tokens >= self.settings.optim.tokens

    def advance(self, after: Clock) -> None:
        """Move the clock past a step, after which an evaluation may be due."""
        before, self.clock = self.clock, after
        self.evaluation_due = due(self.settings.run.eval_every, before, after, self.is_finished)

    def evaluated(self, bits_per_byte: float) -> bool:
        """Note the result of the evaluation that was due; whether it is the best so far."""
        self.evaluation_due = False
        is_best = bits_per_byte < self.best  # NaN is never the best
        if is_best:
            self.best, self.best_step = bits_per_byte, self.clock.step
        return is_best

    def about(self) -> dict:
        """Settings, size and provenance: the first line of the log, and part of a checkpoint."""
        return {
            "run": self.id,
            "config": flattened(self.settings),
            "model_size": self.size._asdict(),
            "made_by": made_by(self.runtime),
            **provenance(),
        }

    def progress_bar(self) -> tqdm:
        """A bar over the budget, on rank 0; without a terminal `log_step` says a line a minute."""
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
        """Log the step from the clock `before` to now, and move the bar past it.

        Args: columns what else the line says; report.py draws those that it names
              ms      of the step, with the `waited_ms` until its batch was there
        """
        now = self.clock
        epochs = now.real_tokens / self.store["train_tokens"]
        self.log.write(
            "train",
            step=now.step,
            consumed_tokens=now.consumed_tokens,
            real_tokens=now.real_tokens,
            layer_tokens=now.layer_tokens,
            flops=now.flops,
            tokens_per_s=round((now.real_tokens - before.real_tokens) / ms * 1e3, 1),
            epochs=round(epochs, 4),
            **columns,
            ms=round(ms, 2),
            data_ms=round(waited_ms, 2),
        )
        shown = f"loss {columns['loss']:.3f}" + (f", epochs {epochs:.1f}" if epochs > 1 else "")
        bar.set_postfix_str(shown, refresh=False)
        # the last step goes a little past the budget, and a bar beyond its end shows no time left
        bar.update(min(now.consumed_tokens, bar.total) - before.consumed_tokens)
        if bar.disable and time.monotonic() > self.said_at + LINE_SECONDS:
            self.said_at = time.monotonic()
            done = f"{short(now.consumed_tokens)} of {short(bar.total)} tokens"
            self.runtime.say(f"step {now.step:,}: {done}, {shown}")

    def log_evaluation(self, result: dict[str, object], last: bool, ms: float) -> None:
        """Log the result of an evaluation."""
        self.log.write(
            "eval",
            step=self.clock.step,
            consumed_tokens=self.clock.consumed_tokens,
            **result,
            last=last,
            ms=round(ms, 1),
            peak_memory=peak_memory(self.runtime.device),
        )

    # ---- checkpoints

    def save(self, state: dict, named: dict[str, Tensor]) -> None:
        """Save a checkpoint.

        Args:   state of the model and the optimizers
                named the parameters, which ranks must have alike
        Raises: ValueError if ranks differ, or if it could not be written
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
        run = self.settings.run
        path = checkpoint.step_path(self.folder, self.clock.step, sharded=run.fsdp)
        checkpoint.save(path, state, self.runtime, sharded=run.fsdp, keep=run.keep)
        self.saved_path = path
        self.log_checkpoint()

    def log_checkpoint(self) -> None:
        clock = self.clock.as_dict()
        self.log.write("checkpoint", step=clock["step"], file=self.saved_path.name, clock=clock)
