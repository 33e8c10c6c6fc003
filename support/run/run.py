"""An open run: its settings, its folder and log, its checkpoints, and how it goes on from one.

On --resume, in this order:
  1. config.parse_or_resume: the folder (--out, or the newest in runs/) and the settings in its
     config.json; what was given besides may differ from them only where a setting is `free`, and
     --tokens may be more (support/run/extension.py)
  2. Run.restore: the store must hold the same text; the checkpoint's sha256 is verified, then
     clock and best loss are those of the checkpoint
  3. train.assemble: a model of the size in config.json, weights and optimizers from the checkpoint;
     --init is not read again
  4. Run.open_log: the log is cut where it was then, and checkpoints of later steps are set aside
  5. train.train: an evaluation that was interrupted is made first; then the plan goes on from the
     clock, which decides every step, so nothing else has to be restored
A run that was stopped before its first checkpoint starts over; one whose last evaluation is in the
log has nothing left to do.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model import TransformerConfig
from support.base.clock import Clock
from support.base.runtime import Runtime
from support.base.settings import flattened, is_on
from support.base.sharded import check_agreement, shard
from support.rows.mixture import AnyStore
from support.run import checkpoint, extension, sharded_checkpoint
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

# ---- resuming
#
# Which checkpoint of its folder a resumed run goes on from, and that it is of this run.


def checkpoint_to_resume(
    folder: Path, settings: Any, tokens_before: int | None, store: AnyStore
) -> str | None:
    """The file that --resume means; None if the run was stopped before its first checkpoint.

    Args:   tokens_before the budget until now, where --tokens extends it
    Raises: ValueError if checkpoints are gone, or if the run began with another store
    """
    if started_with(folder)["store"] != store.meta["sha256"]:
        raise ValueError(
            f"--data: the run in {folder} began with another store, or other weights of several:"
            " name what it began with, wherever that is now, or start a new run with another --out"
        )
    which = settings.run.resume
    if which == "best" or checkpoint.steps_in(folder):
        found = checkpoint.find(folder, which)
        if tokens_before:
            found = extension.starting_point(found, settings, tokens_before)
        return str(found)
    if bests := checkpoint.bests_in(folder):
        raise ValueError(
            f"--resume: {folder} has lost its steps, and {bests[-1].name} is there: go on from it"
            " with --resume best"
        )
    if any(line["event"] == "checkpoint" for line in read_log(folder)):
        raise ValueError(
            f"--resume: {folder} has lost its checkpoints: put one back, or start a new run with"
            " another --out"
        )
    return None


def read(path: str, shape: TransformerConfig, settings: Any, runtime: Runtime) -> dict:
    """A checkpoint of a model of this shape; with --fsdp each rank reads its own rows of it."""
    if not settings.run.fsdp:
        return sharded_checkpoint.load(path)
    like = empty_model(shape)
    shard(like, runtime)
    # onto the host, where the device may have no room for all
    where = torch.device("cpu") if is_on(settings, "offload") else runtime.device
    return sharded_checkpoint.load_shards(path, like.state_dict(), runtime, where)


class Run:
    """A run that is open: its folder, its log, its checkpoints, and where it stands.

    Its `trainer`, with the model and the optimizers, is set by whoever assembles it (train.py).

    Args: folder of a run that goes on; None makes a new one
          size   of the model
    """

    def __init__(
        self,
        settings: Any,
        runtime: Runtime,
        folder: Path | None,
        size: ModelSize,
        store: AnyStore,
    ):
        self.settings, self.runtime, self.folder = settings, runtime, folder
        self.size, self.store = size, store
        self.trainer: Any = None
        self.clock, self.best = Clock(), math.inf
        self.evaluation_due = False  # an evaluation of this clock was asked for and is not done
        self.resumed_from: str | None = None
        self.noted = False  # whether the plan's note was shown
        self.saved_path, self.saved_step = "", -1
        self.peak: machine.Peak | None = None  # of the ranks' devices, for MFU
        self.log: Log | None = None
        self.log_size: int | None = None  # bytes to keep of a log that goes on
        self.tokens_before: int | None = None  # the budget until now, where --tokens extends it

    def create_folder(self) -> str:
        s = self.settings
        stem = f"runs/{s.model.model}-{s.model.size}"
        sha256 = self.store.meta["sha256"]
        return create_run_folder(s.run.out, stem, flattened(s), self.size, sha256)

    def restore(self, shape: TransformerConfig) -> dict | None:
        """Go on from the checkpoint that --resume names: clock, best loss and log are as then.

        Args:    shape of the model
        Returns: that checkpoint; None if none was ever written, so that the run starts over
        Raises:  ValueError if checkpoints are gone or of another run, or if the store is another
        """
        o, folder = self.settings.optim, self.folder
        budget = extension.with_budget(folder, started_with(folder)["config"], None)["optim.tokens"]
        self.tokens_before = budget if o.tokens > budget else None
        which = partial(checkpoint_to_resume, folder, self.settings, self.tokens_before)
        path = self.runtime.on_rank0(lambda: which(self.store))  # one choice for all ranks
        if path is None:
            self.log_size = 0
            self.runtime.say(
                f"{self.folder} was stopped before its first checkpoint: starting over"
            )
            return None
        state = read(path, shape, self.settings, self.runtime)
        try:
            self.clock = Clock(**state["clock"])
            state["optimizers"]["state"]
        except (TypeError, LookupError):
            message = f"{path} is of an older version of train.py: start a new run"
            raise ValueError(message) from None
        if ("pseudo" in state) != is_on(self.settings, "pseudo"):
            was = "with" if "pseudo" in state else "without"
            raise ValueError(
                f"{path} is of a run {was} --pseudo, and {self.folder} is not: put its own back, or"
                " name another with --resume previous or best"
            )
        if self.tokens_before and self.is_finished:
            raise ValueError(
                f"--tokens {o.tokens}: the run in {folder} has consumed"
                f" {self.clock.consumed_tokens} already: give more"
            )
        self.best, self.log_size, self.resumed_from = state["best"], state["log_size"], path
        self.evaluation_due = state["evaluation_due"]
        self.saved_path, self.saved_step = path, self.clock.step
        return state

    def advance(self, step: Any) -> Flops:
        """The clock goes on past a plan.Step; what the step cost."""
        flops = flops_of_step(self.settings, self.trainer.work, step)
        self.clock = step.after._replace(flops=self.clock.flops + flops.executed)
        return flops

    @property
    def is_finished(self) -> bool:
        """Whether the budget is consumed; the last evaluation may still be to do."""
        return self.clock.consumed_tokens >= self.settings.optim.tokens

    def is_complete(self) -> bool:
        """Whether the last evaluation is in the log as well."""
        return self.is_finished and any(
            line.get("last") for line in read_log(self.folder) if line["event"] == "eval"
        )

    @property
    def resume_command(self) -> str:
        return f"python train.py --resume --out {self.folder}"

    def about(self) -> dict:
        """Settings, size and provenance: the first line of the log, and part of a checkpoint."""
        size = self.size._asdict()
        return {"config": flattened(self.settings), "model_size": size, **provenance()}

    def make_folder(self) -> None:
        """Unless the run goes on in its own."""
        if self.folder is None:
            self.folder = Path(self.runtime.on_rank0(self.create_folder))

    def open_log(self) -> None:
        """Begin the log, or go on with it."""
        run, is_rank0 = self.settings.run, self.runtime.is_rank0
        if self.tokens_before:
            self.saved_path = self.runtime.on_rank0(self.extend)
        self.log = Log(self.folder, is_rank0, run.tensorboard, self.log_size)
        self.peak = machine.peak(self.runtime)
        self.log.write(
            "run",
            **self.about(),
            resumed_at=self.clock.step,
            bytes=self.trainer.optimizers.memory(),
            train_tokens=self.store.train_tokens,
            peak_flops=self.peak.flops,
            peak_why=self.peak.why,
        )
        if self.resumed_from:
            how = (self.folder, self.clock.step, self.runtime.say)
            self.runtime.on_rank0(lambda: extension.set_later_aside(*how))
            self.log_checkpoint()  # whose line the saved size of the log leaves out
        extended = extension.recorded(self.folder)
        if extended and self.clock.step <= extended.step:  # or else the log has it
            changed = extension.change(self.settings, extended, self.clock)
            self.runtime.say(extension.in_words(changed, self.settings.optim.schedule))
            self.log.write("extended", **changed)

    def extend(self) -> str:
        """Give the run its new budget on the disk; returns the checkpoint it goes on from."""
        path = Path(self.resumed_from) if self.resumed_from else None
        tokens, step = self.settings.optim.tokens, self.clock.step
        extended = extension.Extension(tokens, self.tokens_before, step)
        return extension.begin(self.folder, path, extended, self.runtime.say)

    def keep_trunk(self, before: Clock, after: Clock) -> None:
        """Keep a checkpoint of now if the step that comes is the first in the decay of wsd."""
        if enters_decay(self.settings, before, after):
            self.save()
            self.runtime.on_rank0(lambda: extension.keep_trunk(Path(self.saved_path)))

    def save(self, is_best: bool = False) -> None:
        """Write a checkpoint, on rank 0 or of all ranks' shards, unless this step has one already.

        Raises: ValueError if it cannot be written, if a weight is not finite, or if ranks differ
        """
        if self.saved_step == self.clock.step and not is_best:
            return
        check_agreement(self.runtime, self.trainer.optimizers.named)
        state = {
            **self.trainer.state(),
            "step": self.clock.step,
            "clock": self.clock._asdict(),
            "best": self.best,
            "evaluation_due": self.evaluation_due,
            "log_size": self.log.size(),
            "tokenizer_fingerprint": self.store.meta["tokenizer_fingerprint"],
            **self.about(),
        }
        how = {"step": self.clock.step, "keep": self.settings.run.keep, "best": is_best}
        if self.settings.run.fsdp:
            path = str(sharded_checkpoint.save(self.folder, state, self.runtime, **how))
        else:
            path = self.runtime.on_rank0(lambda: str(checkpoint.save(self.folder, state, **how)))
        self.saved_path, self.saved_step = path, self.clock.step
        self.log_checkpoint()

    def log_checkpoint(self) -> None:
        self.log.write("checkpoint", step=self.clock.step, file=Path(self.saved_path).name)
