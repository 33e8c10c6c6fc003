"""An open run: its settings, its folder and log, its checkpoints, and how it goes on from one.

On --resume, in this order:
  1. config.parse_or_resume: the folder (--out, or folder.newest_run) and its config.json. Settings
     are taken from there; flags given besides may change only those that are `free` (where and how
     fast), for this start alone, and raise --tokens
  2. Runtime.check_same: ranks have the same settings, code, torch and threads
  3. data.open_data and Plan: the store and its tokenizer, and the indexes of a curriculum
  4. Run.restore: locks the folder, compares the store's digests with those in config.json, finds
     the checkpoint and reads it, every CRC32 of it first
  5. Run.is_complete: if the log says "finished", nothing is left to do
  6. train.assemble: model and optimizers from the checkpoint. No random state: every draw has a key
  7. Run.open_log: a larger --tokens is written into config.json, the log is cut where it was at the
     checkpoint, and checkpoints of later steps are renamed to abandoned-*
  8. train.train: an evaluation that was due is made first; then the plan goes on from the clock,
     which decides every step

What a checkpoint holds: "model" and "optimizers", and "pseudo" if that is on, for `assemble`;
"clock", "best", "best_step", "log_size", "evaluation_due" for `restore`; the rest says what made
it. A run that was stopped before its first checkpoint starts over, and reads --init again.
"""

import math
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from data import AnyStore
from model import TransformerConfig
from support.base.atomic import folder_lock
from support.clock import Clock, due, lr_clock
from support.run import checkpoint
from support.run.folder import (
    Log,
    ModelSize,
    Started,
    create_run_folder,
    extend_budget,
    open_wandb,
    provenance,
    read_log,
    started_with,
)
from support.runtime import Runtime, check_agreement, made_by, shard
from support.settings import DataConfig, RunConfig, flattened
from support.step import machine
from support.step.flops import Flops, flops_of_step
from support.step.optim import OptimConfig, decay_start
from support.step.sizes import ModelConfig, empty_model, parameter_count

if TYPE_CHECKING:
    from plan import Step
    from train import Trainer


@dataclass(frozen=True)
class Settings:
    """The groups of settings that every run has; config.py adds those of techniques."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


class Run:
    """A run that is open: its folder, its log, its checkpoints, and where it stands.

    Args: started of a run that goes on; None makes a new one
          size    of the model
    """

    trainer: "Trainer"  # the present model and optimizers, see `use`
    peak: machine.Peak  # of the ranks' devices, for MFU

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        started: Started | None,
        size: ModelSize,
        store: AnyStore,
    ):
        self.settings, self.runtime, self.started = settings, runtime, started
        self.size, self.store = size, store
        self.folder = started.folder if started else None
        self.id = started.id if started else ""
        self.clock = Clock()
        self.best, self.best_step = math.inf, 0  # held-out loss, and the step that had it
        self.evaluation_due = False  # an evaluation at this clock, not made yet
        self.has_noted = False
        self.resumed_from: Path | None = None
        self.saved_path: Path | None = None  # the last checkpoint
        self.saved_clock: Clock | None = None
        self.log: Log | None = None
        self.log_size: int | None = None  # bytes to keep of a log that goes on
        self.ending = ExitStack()  # what is held until the end

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        if self.log:
            self.log.close()
        self.ending.close()

    def hold_folder(self) -> None:
        """Keep every other process from writing into the folder until this run ends."""
        lock = folder_lock(self.folder, wait=False)
        self.runtime.on_rank0(lambda: self.ending.enter_context(lock))

    # ---- start, or go on: in the order given above

    def restore(self, shape: TransformerConfig) -> dict | None:
        """Go on from the checkpoint that --resume names: clock, best loss and log are as then.

        Args:    shape of the model
        Returns: that checkpoint; None if none was ever written, so that the run starts over
        Raises:  ValueError if checkpoints are gone or of another run, or if the store is another
        """
        folder, runtime = self.folder, self.runtime
        if not self.settings.run.dry_run:
            self.hold_folder()
        path = runtime.on_rank0(self.checkpoint_to_resume)  # one choice for all ranks
        if path is None:
            self.log_size = 0
            runtime.say(f"{folder} was stopped before its first checkpoint: starting over")
            return None
        shards = {}
        if self.settings.run.fsdp:
            like = empty_model(shape)
            shard(like, runtime)
            shards = like.state_dict()
        state = checkpoint.load(path, runtime, shards)
        if state["run"] != self.id:
            raise ValueError(f"{path} is of another run than {folder}: put the run's own back")
        self.clock = Clock.of(state["clock"])
        self.check_budget()
        self.best, self.best_step = state["best"], state["best_step"]
        self.log_size, self.evaluation_due = state["log_size"], state["evaluation_due"]
        self.resumed_from = self.saved_path = path
        self.saved_clock = self.clock
        now = made_by(runtime)
        for name, before in state["made_by"].items():
            if now.get(name, before) != before:
                line = f"{name} was {before} and is {now[name]}: losses will be close, not bitwise"
                runtime.say(f"{line} those of a run that was never stopped")
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
        optim = self.settings.optim
        before = replace(optim, tokens=self.started.config["optim.tokens"])
        if self.is_finished:
            why = f"{self.clock.consumed_tokens} are consumed already: give more"
        elif optim.min_lr == 1:  # a constant rate
            return
        elif optim.schedule != "wsd":
            why = f"--schedule {optim.schedule} has spread its decay over {before.tokens}"
        elif lr_clock(optim.lr_clock, self.settings.model.layers, self.clock) > decay_start(before):
            why = f"at step {self.clock.step} the learning rate decays already"
        else:
            return
        raise ValueError(
            f"--tokens {optim.tokens}: {why}; a run can be extended under --schedule wsd before its"
            " decay, or with --min-lr 1"
        )

    def checkpoint_to_resume(self) -> Path | None:
        """The checkpoint that --resume means; None if the run was stopped before its first one.

        Raises: ValueError if checkpoints are gone, or if the run began with another store
        """
        folder, which = self.folder, self.settings.run.resume
        if self.started.store != self.store.meta["sha256"]:
            raise ValueError(
                f"--data: the run in {folder} began with another store, or with other weights of"
                " its stores: name that, wherever it is now, or start a new run with another --out"
            )
        if checkpoint.steps_in(folder):
            return checkpoint.find(folder, which)
        if any(line["event"] == "checkpoint" for line in read_log(folder)):
            raise ValueError(
                f"--resume: {folder} has lost its checkpoints: put one back, or start a new run"
                " with another --out"
            )
        return None

    def is_complete(self) -> bool:
        """Whether the budget is consumed, and all that comes after the last step is done."""
        ended = (line["event"] == "finished" for line in read_log(self.folder))
        return self.is_finished and any(ended)

    def make_folder(self) -> None:
        """Make the folder, unless the run goes on in its own."""
        s = self.settings
        if self.folder is None:
            make = partial(
                create_run_folder,
                s.run.out,
                stem=f"runs/{s.model.model}-{s.model.size}",
                settings=flattened(s),
                size=self.size,
                sha256=self.store.meta["sha256"],
            )
            folder, self.id = self.runtime.on_rank0(make)
            self.folder = Path(folder)
            self.hold_folder()
        if s.run.fsdp:
            self.check_shared()

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

    def open_log(self) -> None:
        """Begin the log, or go on with it; with a larger budget on the disk first."""
        runtime, step = self.runtime, self.clock.step
        if runtime.is_rank0 and self.is_extended:
            extend_budget(self.folder, self.settings.optim.tokens)
        board = None
        if self.settings.run.wandb and runtime.is_rank0:
            board = open_wandb(self.folder, self.id, flattened(self.settings))
        self.log = Log(self.folder, runtime.is_rank0, self.log_size, board)
        self.peak = machine.peak(runtime)
        self.log.write(
            "run",
            **self.about(),
            resumed_at=step,
            bytes=self.trainer.optimizers.memory(),
            ranks=runtime.world_size,
            parameters=parameter_count(self.trainer.model.config),
            train_tokens=self.store.meta["train_tokens"],
            bytes_per_token=self.store.bytes_per_token,
            peak_flops=self.peak.flops,
            peak_why=self.peak.why,
        )
        if self.resumed_from:
            if runtime.is_rank0:
                self.set_later_aside()
            # the saved size of the log does not include its line
            self.log_checkpoint()

    def set_later_aside(self) -> None:
        """Rename checkpoints of later steps: `last` must not mean one that this run never made."""
        for path in checkpoint.steps_in(self.folder):
            if path.stem > self.resumed_from.stem:
                target = path.rename(path.with_name(f"abandoned-{path.name}"))
                self.runtime.say(f"{path} is of a later step: renamed to {target.name}")

    # ---- where it stands

    def use(self, trainer: "Trainer") -> None:
        """From now on this is the model that is trained, saved and evaluated."""
        self.trainer = trainer

    def advance(self, step: "Step") -> Flops:
        """Move the clock past a step, after which an evaluation may be due; what the step cost."""
        flops = flops_of_step(self.settings, self.trainer.work, step)
        self.clock = step.after._replace(flops=self.clock.flops + flops.executed)
        every = self.settings.run.eval_every
        self.evaluation_due = due(every, step.before, step.after, self.is_finished)
        return flops

    def evaluated(self, bits_per_byte: float) -> bool:
        """Note the result of the evaluation that was due; whether it is the best so far."""
        self.evaluation_due = False
        is_best = bits_per_byte < self.best  # NaN is never the best
        if is_best:
            self.best, self.best_step = bits_per_byte, self.clock.step
        return is_best

    def first_note(self, note: str) -> str:
        """The plan's note on a step, the first time that it has one; later nothing."""
        shown = "" if self.has_noted else note
        self.has_noted = self.has_noted or bool(note)
        return shown

    @property
    def is_finished(self) -> bool:
        """Whether the budget is consumed; the last evaluation may still be to do."""
        return self.clock.consumed_tokens >= self.settings.optim.tokens

    def about(self) -> dict:
        """Settings, size and provenance: the first line of the log, and part of a checkpoint."""
        return {
            "run": self.id,
            "config": flattened(self.settings),
            "model_size": self.size._asdict(),
            "made_by": made_by(self.runtime),
            **provenance(),
        }

    # ---- checkpoints

    def save(self, is_best: bool = False) -> None:
        """Save a checkpoint, unless this step has one already.

        Raises: ValueError if ranks differ, or if it could not be written
        """
        if self.saved_clock == self.clock and not is_best:
            return
        check_agreement(self.runtime, self.trainer.optimizers.named)
        state = {
            **self.trainer.state(),
            "step": self.clock.step,
            "clock": self.clock.as_dict(),
            "best": self.best,
            "best_step": self.best_step,
            "evaluation_due": self.evaluation_due,
            "log_size": self.log.size(),
            "tokenizer_fingerprint": self.store.meta["tokenizer_fingerprint"],
            **self.about(),
        }
        run = self.settings.run
        path = checkpoint.step_path(self.folder, self.clock.step, sharded=run.fsdp)
        checkpoint.save(path, state, self.runtime, sharded=run.fsdp, keep=run.keep)
        self.saved_path, self.saved_clock = path, self.clock
        self.log_checkpoint()

    def log_checkpoint(self) -> None:
        clock = self.saved_clock.as_dict()
        self.log.write("checkpoint", step=clock["step"], file=self.saved_path.name, clock=clock)
