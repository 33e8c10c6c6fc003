"""An open run: its settings, its folder and log, its checkpoints, and how it goes on from one.

On --resume, in this order (train.main calls each, then train.go). Rank 0 reads the folder for all:
  1. config.parse_or_resume: the folder (--out, or folder.newest_run), its config.json
     (folder.started_with) and changed.json (extension.with_changes).
     settings.resumed takes the settings from there; flags given besides may change only those that
     are `free` (where and how fast), for this start alone, raise --tokens, or change --lr and the
     others of folder.CHANGEABLE from here on
  2. Runtime.check_same: ranks have the same settings, code, torch and threads
  3. data.open_data and Plan: the store and its tokenizer, and the indexes of a curriculum
  4. Run.restore: locks the folder; `checkpoint_to_resume` compares the digests in the store's
     meta.json with those in config.json and finds the checkpoint, `read` verifies its sha256,
     `check` compares what it says with the folder
  5. Run.is_complete: if the log says "finished", nothing is left to do
  6. train.assemble: model and optimizers from the checkpoint. No random state: every draw has a key
  7. Run.open_log: a larger --tokens is written to the disk (`extend`), the log is cut where it was
     at the checkpoint, and checkpoints of later steps are set aside
  8. train.train: an evaluation that was interrupted is made first; then the plan goes on from the
     clock, which decides every step

What is read            compared with                        refused if
config.json             the flags given                      a setting that is not free differs
the store's meta.json   "store" in config.json               the text, or a mixture's weights differ
step-*.pt, best.pt      the sha256 at its end; CHECKPOINT;   damaged; of other types, another run,
                        config.json; its line in the log     other settings, another clock
log.jsonl               "log_size" in the checkpoint         it names checkpoints and none is there;
                                                             a shorter one is said, and goes on

What a checkpoint holds: "model" and "optimizers", and "pseudo" if that is on, for `assemble`;
"clock", "best", "log_size", "evaluation_due" for `restore`; the rest says what made it.

A run that was stopped before its first checkpoint starts over, and reads --init again.
"""

import math
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model import TransformerConfig
from support.base.atomic import folder_lock
from support.base.clock import Clock, Cursor, due
from support.base.runtime import Runtime, made_by
from support.base.settings import flattened, free_settings
from support.base.sharded import check_agreement, shard
from support.base.technique import is_on, refuse, techniques_of
from support.base.typed_json import At, Each, mismatch
from support.rows.mixture import AnyStore
from support.run import checkpoint, extension
from support.run.folder import (
    BOARDS,
    MODEL_SIZE,
    Board,
    Log,
    ModelSize,
    Started,
    create_run_folder,
    open_board,
    opener,
    provenance,
    read_log,
    started_with,
)
from support.step import machine
from support.step.flops import Flops, flops_of_step
from support.step.optim import enters_decay
from support.step.sizes import empty_model, parameter_count

if TYPE_CHECKING:
    from config import Config
    from plan import Step
    from train import Trainer


COUNT = At(0, 10**30)
CLOCK = dict.fromkeys(Clock().as_dict(), COUNT)
TRAINED = {  # what the weights of a checkpoint need to be used
    "config": {"model.layers": At(1), "model.size": str, "model.pos": str},
    "model_size": MODEL_SIZE,
    "model": Each(torch.Tensor),
    "step": At(),
    "tokenizer_fingerprint": str,
}
CHECKPOINT = TRAINED | {
    "run": str,
    "optimizers": {
        "state": Each(Each(torch.Tensor)),
    },
    "clock": CLOCK | {"position": dict.fromkeys(Cursor._fields, COUNT)},
    "best": float,
    "log_size": At(),
    "evaluation_due": bool,
    "made_by": Each(str),
}


def check_types(path: Path, state: dict, shape: dict = TRAINED) -> None:
    """Refuse a checkpoint whose entries are not those of `Run.save`; it may be a stranger's."""
    if wrong := mismatch(state, shape):
        raise ValueError(f"{path}: {wrong}: {checkpoint.others(path)}")


class Run:
    """A run that is open: its folder, its log, its checkpoints, and where it stands.

    Args: started of a run that goes on; None makes a new one
          size    of the model
    """

    trainer: "Trainer"  # the present model and optimizers, see `use`
    peak: machine.Peak  # of the ranks' devices, for MFU

    def __init__(
        self,
        settings: "Config",
        runtime: Runtime,
        started: Started | None,
        size: ModelSize,
        store: AnyStore,
    ):
        self.settings, self.runtime, self.started = settings, runtime, started
        self.size, self.store = size, store
        self.folder = started.folder if started else None
        self.id = started.id if started else ""
        self.clock, self.best = Clock(), math.inf
        self.evaluation_due = False  # an evaluation at this clock, not made yet
        self.has_noted = False
        self.boards: list[Board] = []
        self.resumed_from: Path | None = None
        self.saved_path: Path | None = None  # the last checkpoint, perhaps under way
        self.saved_clock: Clock | None = None
        self.saver = checkpoint.Saver(runtime, sharded=settings.run.fsdp)
        self.log: Log | None = None
        self.log_size: int | None = None  # bytes to keep of a log that goes on
        # the budget until now, if --tokens extends it
        extends = started is not None and settings.optim.tokens > started.tokens
        self.tokens_before = started.tokens if extends else None
        self.ending = ExitStack()  # what is held until the end

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.saver.close()
        if self.log:
            self.log.close()
        self.ending.close()

    def hold_folder(self) -> None:
        """Keep every other process from writing into the folder until this run ends."""
        lock = folder_lock(self.folder, "wait for its end, or stop it")
        self.runtime.on_rank0(lambda: self.ending.enter_context(lock))

    # ---- start, or go on: in the order given above

    def restore(self, shape: TransformerConfig) -> dict | None:
        """Go on from the checkpoint that --resume names: clock, best loss and log are as then.

        Args:    shape of the model
        Returns: that checkpoint; None if none was ever written, so that the run starts over
        Raises:  ValueError if checkpoints are gone or of another run, or if the store is another
        """
        tokens, folder, runtime = self.settings.optim.tokens, self.folder, self.runtime
        if not self.settings.run.dry_run:
            self.hold_folder()
        path = runtime.on_rank0(self.checkpoint_to_resume)  # one choice for all ranks
        if path is None:
            self.log_size = 0
            runtime.say(f"{folder} was stopped before its first checkpoint: starting over")
            return None
        state = self.read(path, shape)
        runtime.on_rank0(lambda: self.check(path, state))
        self.clock = Clock.of(state["clock"])
        if self.tokens_before and self.is_finished:
            raise ValueError(
                f"--tokens {tokens}: the run in {folder} has consumed"
                f" {self.clock.consumed_tokens} already: give more"
            )
        self.best, self.log_size = state["best"], state["log_size"]
        self.evaluation_due = state["evaluation_due"]
        self.resumed_from = self.saved_path = path
        self.saved_clock = self.clock
        now = made_by(runtime)
        for name, before in state["made_by"].items():
            if now.get(name, before) != before:
                line = f"{name} was {before} and is {now[name]}: losses will be close, not bitwise"
                runtime.say(f"{line} those of a run that was never stopped")
        return state

    def check(self, path: Path, state: dict) -> None:
        """Refuse a checkpoint that is not of this run, or does not agree with itself or the log."""
        check_types(path, state, CHECKPOINT)
        step, clock, config = state["step"], state["clock"], state["config"]
        lines = [line for line in read_log(self.folder) if line["event"] == "checkpoint"]
        logged = {line.get("step"): line.get("clock") for line in lines}
        refusals = []
        for name, entry in techniques_of(self.settings).items():
            was = name in state
            differs = entry.keeps_state and was != is_on(self.settings, name)
            refusals.append((differs, f"is of a run {'with' if was else 'without'} --{name}"))
        refusals += [
            (state["run"] != self.id, f"is of another run than {self.folder}"),
            (clock["step"] != step, f"has the clock of step {clock['step']}, and is of {step}"),
            (logged.get(step, clock) != clock, f"has another clock than step {step} in the log"),
            (step and not state["optimizers"]["state"], "has lost the optimizers' state"),
        ]
        may_differ = free_settings(type(self.settings)) | {"optim.tokens"}
        had = extension.values_until_now(self.folder, self.started.config)
        for name, value in flattened(self.settings).items():
            is_other = config.get(name) not in had.get(name, [value])
            said = f"was saved with {name} {config.get(name)}, which {self.folder} never had"
            refusals.append((is_other and name not in may_differ, said))
        other = "put the run's own back, or name another with --resume previous or best"
        refuse([(condition, f"{path} {what}: {other}") for condition, what in refusals])

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
        if which == "best" or checkpoint.steps_in(folder):
            path = checkpoint.find(folder, which)
            if self.tokens_before:
                path = extension.starting_point(path, self.settings, self.tokens_before)
            return path
        if bests := checkpoint.named_in(folder, "best"):
            raise ValueError(
                f"--resume: {folder} has lost its steps, and {bests[-1].name} is there: go on from"
                " it with --resume best"
            )
        if any(line["event"] == "checkpoint" for line in read_log(folder)):
            raise ValueError(
                f"--resume: {folder} has lost its checkpoints: put one back, or start a new run"
                " with another --out"
            )
        return None

    def read(self, path: Path, shape: TransformerConfig) -> dict:
        """A checkpoint of a model of this shape; with --fsdp each rank reads its own rows of it."""
        if not self.settings.run.fsdp:
            return checkpoint.load_on_rank0(path, self.runtime)
        like = empty_model(shape)
        shard(like, self.runtime)
        return checkpoint.load(path, like.state_dict(), self.runtime, self.runtime.device)

    def is_complete(self) -> bool:
        """Whether the budget is consumed, and all that comes after the last step is done."""
        ended = (line["event"] == "finished" for line in read_log(self.folder))
        return self.is_finished and any(ended)

    def make_folder(self) -> None:
        """Make the folder, unless the run goes on in its own."""
        for name in self.board_names():  # refused before anything is made
            self.runtime.on_rank0(lambda name=name: opener(name) and None)
        if self.folder is None:
            s = self.settings
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
        if self.settings.run.fsdp:
            self.check_shared()
        try:
            self.runtime.on_rank0(self.open_boards)
        except ValueError:
            self.discard_new_folder()
            raise

    def check_shared(self) -> None:
        """Refuse a folder that some rank cannot see: with --fsdp each writes into it."""
        try:
            seen = started_with(self.folder).id == self.id
        except ValueError:
            seen = False
        absent = [str(rank) for rank, sees in enumerate(self.runtime.gather(seen)) if not sees]
        if absent:
            self.discard_new_folder()
            raise ValueError(
                f"--fsdp: rank {', '.join(absent)} does not see {self.folder} of rank 0, and every"
                " rank saves its own part: put --out on a disk that all machines share"
            )

    def discard_new_folder(self) -> None:
        if self.started is None and self.runtime.is_rank0:
            shutil.rmtree(self.folder)

    def board_names(self) -> list[str]:
        return [name for name in BOARDS if getattr(self.settings.run, name)]

    def open_boards(self) -> None:
        for name in self.board_names():
            self.boards.append(open_board(name, self.folder, self.id, flattened(self.settings)))

    def open_log(self) -> None:
        """Begin the log, or go on with it; with a larger budget on the disk first."""
        runtime, step = self.runtime, self.clock.step
        if self.started:
            begin = partial(
                extension.begin,
                self.folder,
                self.resumed_from,
                self.started.config,
                self.settings,
                step,
                runtime.say,
            )
            self.saved_path = runtime.on_rank0(begin)
        self.log = Log(self.folder, runtime.is_rank0, self.boards, self.log_size)
        if self.log.lost:
            lost = f"{self.folder}/log.jsonl has lost {self.log.lost:,} bytes that were there"
            runtime.say(f"{lost} when {self.resumed_from.name} was saved; the run itself is whole")
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
            lost_bytes=self.log.lost,
        )
        if self.resumed_from:
            runtime.on_rank0(lambda: extension.set_later_aside(self.folder, step, runtime.say))
            # the saved size of the log does not include its line
            self.log_checkpoint()
        changes = partial(extension.since, self.folder, self.settings, self.clock)
        for change in runtime.on_rank0(lambda: list(changes())):
            rates = f"the learning rate from {change['lr_before']:.3g} to {change['lr']:.3g}"
            values = f"{change['setting']} changes from {change['before']} to {change['now']}"
            runtime.say(f"{values} after step {change['step']}, {rates}")
            self.log.write("changed", **change)

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
        is_best = bits_per_byte < self.best
        self.best = min(self.best, bits_per_byte)  # in this order NaN is never the best
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

    def keep_trunk(self, before: Clock, after: Clock) -> None:
        """Keep a checkpoint of now if the step that comes is the first in the decay of wsd."""
        if enters_decay(self.settings, before, after):
            self.save()
            self.finish_saving()
            self.runtime.on_rank0(lambda: extension.keep_trunk(self.saved_path))

    def save(self, is_best: bool = False) -> None:
        """Save a checkpoint, unless this step has one already; see checkpoint.Saver.

        Raises: ValueError if ranks differ, or if the checkpoint before could not be written
        """
        self.finish_saving()
        if self.saved_clock == self.clock and not is_best:
            return
        check_agreement(self.runtime, self.trainer.optimizers.named)
        self.log.sync()
        state = {
            **self.trainer.state(),
            "step": self.clock.step,
            "clock": self.clock.as_dict(),
            "best": self.best,
            "evaluation_due": self.evaluation_due,
            "log_size": self.log.size(),
            "tokenizer_fingerprint": self.store.meta["tokenizer_fingerprint"],
            **self.about(),
        }
        suffix = checkpoint.SUFFIX if self.settings.run.fsdp else ".pt"
        path = checkpoint.step_path(self.folder, self.clock.step, suffix)
        self.saver.begin(path, state, keep=self.settings.run.keep, best=is_best)
        self.saved_path, self.saved_clock = path, self.clock

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk; ValueError on every rank if it is not."""
        if self.saver.finish():
            self.log_checkpoint()

    def log_checkpoint(self) -> None:
        clock = self.saved_clock.as_dict()
        self.log.write("checkpoint", step=clock["step"], file=self.saved_path.name, clock=clock)
