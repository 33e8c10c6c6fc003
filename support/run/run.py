"""An open run: its settings, its folder and log, its checkpoints, and how it goes on from one.

On --resume, in this order (train.main calls each):
  1. config.parse_or_resume: the folder (--out, or folder.newest_run), its config.json
     (folder.started_with) and extended.json (extension.with_budget). settings.resumed takes the
     settings from there; flags given besides may change only those that are `free` (where and how
     fast), for this start alone, and raise --tokens
  2. data.open_data and Plan: the store and its tokenizer, and the indexes of a curriculum
  3. initial.model_size: the model's size is in config.json too
  4. Run.restore: `checkpoint_to_resume` compares the digests in the store's meta.json with those in
     config.json and finds the checkpoint, `read` verifies its sha256
  5. Run.is_complete: if the last evaluation is in the log, nothing is left to do
  6. train.assemble: model and optimizers from the checkpoint. No random state: every draw has a key
  7. Run.open_log: a larger --tokens is written to the disk (`extend`), the log is cut where it was
     at the checkpoint, and checkpoints of later steps are set aside
  8. train.train: an evaluation that was interrupted is made first; then the plan goes on from the
     clock, which decides every step

What is read            compared with                        refused if
config.json             the flags given                      a setting that is not free differs
the store's meta.json   "store" in config.json               the text, or a mixture's weights differ
step-*.pt, best.pt      the sha256 at its end                damaged; of a run with other techniques
log.jsonl               nothing: it is cut at "log_size"     it names checkpoints and none is there

What a checkpoint holds: "model" and "optimizers", and "pseudo" if that is on, for `assemble`;
"clock", "best", "log_size", "evaluation_due" for `restore`; the rest says what made it.

A run that was stopped before its first checkpoint starts over, and reads --init again.
"""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model import TransformerConfig
from support.base.clock import Clock, due
from support.base.runtime import Runtime
from support.base.settings import flattened
from support.base.sharded import check_agreement, shard
from support.base.technique import is_on, techniques_of
from support.rows.mixture import AnyStore
from support.run import checkpoint, extension
from support.run.folder import (
    Log,
    ModelSize,
    create_run_folder,
    provenance,
    read_log,
    started_with,
)
from support.step import machine
from support.step.flops import Flops, flops_of_step
from support.step.optim import enters_decay
from support.step.sizes import empty_model

if TYPE_CHECKING:
    from config import Config
    from plan import Step
    from train import Trainer


class Run:
    """A run that is open: its folder, its log, its checkpoints, and where it stands.

    Args: folder of a run that goes on; None makes a new one
          size   of the model
    """

    trainer: "Trainer"  # the present model and optimizers, see `use`
    log: Log
    peak: machine.Peak  # of the ranks' devices, for MFU

    def __init__(
        self,
        settings: "Config",
        runtime: Runtime,
        folder: Path | None,
        size: ModelSize,
        store: AnyStore,
    ):
        self.settings, self.runtime, self.folder = settings, runtime, folder
        self.size, self.store = size, store
        self.clock, self.best = Clock(), math.inf
        self.evaluation_due = False  # an evaluation at this clock, not made yet
        self.has_noted = False
        self.resumed_from: Path | None = None
        self.saved_path: Path | None = None
        self.saved_step = -1
        self.log_size: int | None = None  # bytes to keep of a log that goes on
        self.tokens_before: int | None = None  # the budget until now, if --tokens extends it

    # ---- start, or go on: in the order given above

    def restore(self, shape: TransformerConfig) -> dict | None:
        """Go on from the checkpoint that --resume names: clock, best loss and log are as then.

        Args:    shape of the model
        Returns: that checkpoint; None if none was ever written, so that the run starts over
        Raises:  ValueError if checkpoints are gone or of another run, or if the store is another
        """
        tokens, folder = self.settings.optim.tokens, self.folder
        budget = extension.with_budget(folder, started_with(folder)["config"], None)["optim.tokens"]
        self.tokens_before = budget if tokens > budget else None
        path = self.runtime.on_rank0(self.checkpoint_to_resume)  # one choice for all ranks
        if path is None:
            self.log_size = 0
            self.runtime.say(f"{folder} was stopped before its first checkpoint: starting over")
            return None
        state = self.read(path, shape)
        # what is restored fits the settings, or it is refused
        try:
            self.clock = Clock.of(state["clock"])
        except (TypeError, LookupError):
            message = f"{path} is of another version of train.py: start a new run"
            raise ValueError(message) from None
        for name, entry in techniques_of(self.settings).items():
            if entry.keeps_state and (name in state) != is_on(self.settings, name):
                was = "with" if name in state else "without"
                raise ValueError(
                    f"{path} is of a run {was} --{name}, and {folder} is not: put its own back, or"
                    " name another with --resume previous or best"
                )
        if self.tokens_before and self.is_finished:
            raise ValueError(
                f"--tokens {tokens}: the run in {folder} has consumed"
                f" {self.clock.consumed_tokens} already: give more"
            )
        self.best, self.log_size = state["best"], state["log_size"]
        self.evaluation_due = state["evaluation_due"]
        self.resumed_from = self.saved_path = path
        self.saved_step = self.clock.step
        return state

    def checkpoint_to_resume(self) -> Path | None:
        """The checkpoint that --resume means; None if the run was stopped before its first one.

        Raises: ValueError if checkpoints are gone, or if the run began with another store
        """
        folder, which = self.folder, self.settings.run.resume
        if started_with(folder)["store"] != self.store.meta["sha256"]:
            raise ValueError(
                f"--data: the run in {folder} began with another store, or with other weights of"
                " its stores: name that, wherever it is now, or start a new run with another --out"
            )
        if which == "best" or checkpoint.steps_in(folder):
            path = checkpoint.find(folder, which)
            if self.tokens_before:
                path = extension.starting_point(path, self.settings, self.tokens_before)
            return path
        if bests := checkpoint.bests_in(folder):
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
            return checkpoint.load(path)
        like = empty_model(shape)
        shard(like, self.runtime)
        # with --offload to the host: the device may not have room for everything
        is_away = is_on(self.settings, "offload")
        device = torch.device("cpu") if is_away else self.runtime.device
        return checkpoint.load(path, like.state_dict(), self.runtime, device)

    def is_complete(self) -> bool:
        """Whether the budget is consumed, and the last evaluation is in the log."""
        return self.is_finished and any(line.get("last") for line in read_log(self.folder))

    def make_folder(self) -> None:
        """Make the folder, unless the run goes on in its own."""
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
            self.folder = Path(self.runtime.on_rank0(make))

    def open_log(self) -> None:
        """Begin the log, or go on with it; with a larger budget on the disk first."""
        runtime, step, extended = self.runtime, self.clock.step, None
        if self.tokens_before:
            extended = extension.Extension(self.settings.optim.tokens, self.tokens_before, step)
            self.saved_path = runtime.on_rank0(
                lambda: extension.begin(self.folder, self.resumed_from, extended, runtime.say)
            )
        tensorboard = self.settings.run.tensorboard
        self.log = Log(self.folder, runtime.is_rank0, tensorboard, self.log_size)
        self.peak = machine.peak(runtime)
        self.log.write(
            "run",
            **self.about(),
            resumed_at=step,
            bytes=self.trainer.optimizers.memory(),
            train_tokens=self.store.train_tokens,
            peak_flops=self.peak.flops,
            peak_why=self.peak.why,
        )
        if self.resumed_from:
            runtime.on_rank0(lambda: extension.set_later_aside(self.folder, step, runtime.say))
            self.log_checkpoint()  # the saved size of the log does not include its line
        extended = extended or extension.recorded(self.folder)
        if extended and step <= extended.step:  # later checkpoints have it in their log
            changed = extension.change(self.settings, extended, self.clock)
            runtime.say(extension.in_words(changed, self.settings.optim.schedule))
            self.log.write("extended", **changed)

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
        self.best = min(bits_per_byte, self.best)
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
        size = self.size._asdict()
        return {"config": flattened(self.settings), "model_size": size, **provenance()}

    # ---- checkpoints

    def keep_trunk(self, before: Clock, after: Clock) -> None:
        """Keep a checkpoint of now if the step that comes is the first in the decay of wsd."""
        if enters_decay(self.settings, before, after):
            self.save()
            self.runtime.on_rank0(lambda: extension.keep_trunk(self.saved_path))

    def save(self, is_best: bool = False) -> None:
        """Write a checkpoint, on rank 0 or with --fsdp on all, unless this step has one already.

        Raises: ValueError if it cannot be written, if a weight is not finite, or if ranks differ
        """
        step, keep, folder = self.clock.step, self.settings.run.keep, self.folder
        if self.saved_step == step and not is_best:
            return
        check_agreement(self.runtime, self.trainer.optimizers.named)
        state = {
            **self.trainer.state(),
            "step": step,
            "clock": self.clock.as_dict(),
            "best": self.best,
            "evaluation_due": self.evaluation_due,
            "log_size": self.log.size(),
            "tokenizer_fingerprint": self.store.meta["tokenizer_fingerprint"],
            **self.about(),
        }
        save = partial(checkpoint.save, folder, state, step=step, keep=keep, best=is_best)
        path = save(self.runtime) if self.settings.run.fsdp else self.runtime.on_rank0(save)
        self.saved_path, self.saved_step = path, step
        self.log_checkpoint()

    def log_checkpoint(self) -> None:
        self.log.write("checkpoint", step=self.clock.step, file=self.saved_path.name)
