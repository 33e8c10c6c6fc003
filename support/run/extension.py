"""A run that goes on with other settings: --resume --tokens N past its budget, --lr and others.

config.json never changes; changed.json beside it lists what did. --lr and --grad-clip
may change at any resume, to get past a step that is not finite. A larger budget
takes more: from there on the learning rate follows the schedule of the new budget. The techniques'
schedules keep the budget that the run was started with (schedule_tokens), so that none of them goes
back. Cosine and linear go on from the checkpoint that --resume names. With wsd (warmup, stable,
decay, arXiv 2404.06395) a run keeps the last step before its decay as trunk.pt, or in the folder
trunk-00001234.sharded, and goes on from there if it has begun to decay: one trunk serves the decays
of many budgets.

changed.json is written when all else is in place, so a kill at any moment leaves the old run or the
extended one:
  1. log.jsonl is copied to log-<old budget>.jsonl
  2. the trunk, if the run goes on from it, becomes the file of its step again
  3. checkpoints of later steps, and a best one among them, are renamed to abandoned-*
  4. changed.json is written
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.base.atomic import atomic_write, sync
from support.base.clock import Clock, lr_clock
from support.base.settings import Flat, flattened
from support.base.typed_json import At, read_json
from support.run import checkpoint
from support.run.checkpoint import outlined
from support.run.folder import CHANGEABLE, REMEDY
from support.step.optim import decay_start, learning_rate

if TYPE_CHECKING:
    from config import Config

RECORD = "changed.json"
BUDGET = "optim.tokens"


def changes_in(folder: Path) -> dict[str, list[dict]]:
    """The changes of each changeable setting, the last one last; ValueError for a damaged record.

    Example: {"optim.lr": [{"step": 8, "before": 0.02, "now": 0.01}], "optim.tokens": [], ...}
    """
    shape = {
        name: [{"step": At(), "before": value, "now": value}] for name, value in CHANGEABLE.items()
    }
    try:
        return read_json(folder / RECORD, shape, REMEDY)
    except FileNotFoundError:
        return {name: [] for name in CHANGEABLE}


def values_until_now(folder: Path, saved: Flat) -> dict[str, list[float]]:
    """The values that each changeable setting has had, the present one last."""
    changes = changes_in(folder)
    return {n: [saved[n], *(change["now"] for change in changes[n])] for n in CHANGEABLE}


def with_changes(folder: Path, saved: Flat, given: Flat) -> Flat:
    """The settings that a run goes on with: those it was started with, and what changed since.

    Args:   saved settings in config.json
            given on the command line: of these the changeable ones may differ
    Raises: ValueError for a budget that is smaller than the run's
    """
    present = {name: values[-1] for name, values in values_until_now(folder, saved).items()}
    now = present | {name: given[name] for name in CHANGEABLE if name in given}
    if now[BUDGET] < present[BUDGET]:
        raise ValueError(
            f"--tokens {now[BUDGET]} is less than the {present[BUDGET]} tokens of the run in"
            f" {folder}: a run that goes on can be given more, not less"
        )
    return saved | now | {"optim.schedule_tokens": saved[BUDGET]}


def starting_point(path: Path, settings: "Config", before: int) -> Path:
    """The checkpoint that a run goes on from with its new budget: this one, or the trunk.

    Args:   path     the checkpoint that --resume names
            settings with the new budget; `before` is the old one
    Raises: ValueError if that checkpoint is in the decay, and there is no trunk or --resume asked
            for a particular checkpoint
    """
    old, clock = with_setting(settings, BUDGET, before), Clock.of(outlined(path)["clock"])
    if old.optim.schedule != "wsd" or lr_clock(settings, clock) <= decay_start(old.optim):
        return path
    trunks, which = checkpoint.named_in(path.parent, "trunk"), settings.run.resume
    if not trunks or which != "last":
        remedy = "leave that word out, to go on from its trunk" if trunks else "start a new run"
        raise ValueError(
            f"--resume {which}: at step {clock.step} the learning rate of the run in {path.parent}"
            f" decays already, and more tokens need a checkpoint before that: {remedy}"
        )
    return trunks[-1]


def with_setting(settings: "Config", name: str, value: float) -> "Config":
    """The same settings but for one of the optimizer's."""
    changed = {name.removeprefix("optim."): value}
    return replace(settings, optim=replace(settings.optim, **changed))


def begin(
    folder: Path,
    path: Path | None,
    saved: Flat,
    settings: "Config",
    step: int,
    say: Callable[[str], None],
) -> Path | None:
    """Write down what changes after this step; extend the run, if the budget does, as above.

    Args:    path  the checkpoint that it goes on from; None if it was stopped before its first one
             saved settings in config.json
    Returns: that checkpoint; of an extended run under the name of its step
    """
    changes, now = changes_in(folder), flattened(settings)
    before = {name: had[-1] for name, had in values_until_now(folder, saved).items()}
    log = folder / "log.jsonl"
    if now[BUDGET] > before[BUDGET]:
        if log.exists():
            copy = folder / f"log-{before[BUDGET]}.jsonl"
            with log.open("rb") as source, atomic_write(copy) as to:
                shutil.copyfileobj(source, to)
        if path:
            step_file = checkpoint.step_path(folder, step, path.suffix)
            if not step_file.exists():
                checkpoint.link(path, step_file)
            path = step_file
            set_later_aside(folder, step, say)
            for best in checkpoint.named_in(folder, "best"):
                if outlined(best)["step"] > step:
                    set_aside(best, say)
        sync(folder)  # all of these names before the record, even if the power fails
    changed = [name for name in CHANGEABLE if now[name] != before[name]]
    for name in changed:
        changes[name].append({"step": step, "before": before[name], "now": now[name]})
    if changed:
        with atomic_write(folder / RECORD) as file:
            file.write(json.dumps(changes).encode() + b"\n")
        sync(folder)
    return path


def since(folder: Path, settings: "Config", clock: Clock) -> Iterator[dict[str, Any]]:
    """The changes at this clock, which are to be logged, with the learning rate there."""
    changes = changes_in(folder)
    for name in CHANGEABLE:
        for change in changes[name]:
            if change["step"] >= clock.step:  # a log that was cut here does not have it
                old = with_setting(settings, name, change["before"])
                rates = [learning_rate(config, clock, clock) for config in (old, settings)]
                yield {"setting": name, **change, "lr_before": rates[0], "lr": rates[1]}


def set_later_aside(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps: `last` must not mean one that this run never made."""
    for file in checkpoint.steps_in(folder):
        if file.stem > f"step-{step:08d}":
            set_aside(file, say)


def set_aside(file: Path, say: Callable[[str], None]) -> None:
    target = file.with_name(f"abandoned-{file.name}")
    checkpoint.put(file, target)
    say(f"{file} is of a later step: renamed to {target.name}")


# ---- the trunk


def keep_trunk(path: Path) -> None:
    """Give a checkpoint a name as trunk, which --keep does not delete, in place of an older one."""
    trunk = checkpoint.second_name(path, "trunk")
    checkpoint.link(path, trunk)
    trunks = checkpoint.named_in(path.parent, "trunk")
    checkpoint.remove(*[other for other in trunks if other != trunk])
