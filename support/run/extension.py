"""A run that goes on with other settings: --resume --tokens N past its budget, --lr and others.

--lr, --grad-clip and --skip-bad-steps may change at any resume, to get past a step that is not
finite; changed.json lists the values that they have had. A larger budget takes more.

From there on the learning rate follows the schedule of the new budget. The techniques' schedules
keep the budget that the run was started with (schedule_tokens), so that none of them goes back.
Cosine and linear go on from the checkpoint that --resume names. With wsd (warmup-stable-decay,
arXiv 2404.06395) a run keeps the last step before its decay as trunk.pt, or trunk-00001234.sharded,
and goes on from there if it has begun to decay: one trunk serves the decays of many budgets.

config.json never changes; extended.json beside it holds the present budget. It is written when all
else is in place, so a kill at any moment leaves the old run or the extended one:
  1. log.jsonl is copied to log-<old budget>.jsonl
  2. the trunk, if the run goes on from it, becomes the file of its step again
  3. checkpoints of later steps, and a best one among them, are renamed to abandoned-*
  4. extended.json is written
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from support.base.atomic import atomic_write, sync
from support.base.clock import Clock, lr_clock
from support.base.settings import Flat, flattened
from support.base.typed_json import At, read_json
from support.run import checkpoint
from support.run.checkpoint import outlined
from support.step.optim import decay_start, learning_rate

if TYPE_CHECKING:
    from config import Config

RECORD = "extended.json"
CHANGED = "changed.json"
CHANGEABLE = (
    "optim.lr",
    "optim.grad_clip",
    "optim.skip_bad_steps",
)  # settings that may change when a run goes on
REMEDY = "put it back, or start a new run with another --out"


class Extension(NamedTuple):
    """The last extension of a run, as extended.json has it."""

    tokens: int  # the present budget
    before: int  # the budget until then
    step: int  # after which it changed


def recorded(folder: Path) -> Extension | None:
    """The last extension, if there was one; ValueError for a damaged record."""
    try:
        record = read_json(folder / RECORD, dict.fromkeys(Extension._fields, At()), REMEDY)
    except FileNotFoundError:
        return None
    return Extension(**{name: record[name] for name in Extension._fields})


def values_until_now(folder: Path, saved: Flat) -> dict[str, list[float]]:
    """The values that each changeable setting has had, the present one last."""
    changed = {}
    with suppress(FileNotFoundError):
        changed = read_json(folder / CHANGED, {key: [float] for key in CHANGEABLE}, REMEDY)
    return {name: changed.get(name) or [saved[name]] for name in CHANGEABLE}


def with_changes(folder: Path, saved: Flat, given: Flat) -> Flat:
    """The settings that a run goes on with: those it was started with, and what changed since.

    Args:   saved settings in config.json
            given on the command line: of these --tokens and the changeable ones may differ
    Raises: ValueError for a budget that is smaller than the run's
    """
    extended, tokens = recorded(folder), given.get("optim.tokens")
    now = extended.tokens if extended else saved["optim.tokens"]
    if tokens is not None and tokens < now:
        raise ValueError(
            f"--tokens {tokens} is less than the {now} tokens of the run in {folder}: a run that"
            " goes on can be given more, not less"
        )
    present = {name: values[-1] for name, values in values_until_now(folder, saved).items()}
    present |= {name: given[name] for name in CHANGEABLE if name in given}
    budgets = {"optim.tokens": tokens or now, "optim.schedule_tokens": saved["optim.tokens"]}
    return saved | present | budgets


def record_changes(folder: Path, saved: Flat, settings: "Config") -> dict[str, list[float]]:
    """Write the present values of changeable settings into the folder if they are others.

    Returns: before and after, by the name of the setting
    """
    values, now = values_until_now(folder, saved), flattened(settings)
    changes = {n: [had[-1], now[n]] for n, had in values.items() if had[-1] != now[n]}
    if changes:
        later = {name: [*had, now[name]] for name, had in values.items()}
        with atomic_write(folder / CHANGED) as file:
            file.write(json.dumps(later).encode() + b"\n")
        sync(folder)
    return changes


def starting_point(path: Path, settings: "Config", before: int) -> Path:
    """The checkpoint that a run goes on from with its new budget: this one, or the trunk.

    Args:   path     the checkpoint that --resume names
            settings with the new budget; `before` is the old one
    Raises: ValueError if that checkpoint is in the decay, and there is no trunk or --resume asked
            for a particular checkpoint
    """
    old, clock = with_tokens(settings, before), Clock.of(outlined(path)["clock"])
    if old.optim.schedule != "wsd" or lr_clock(settings, clock) <= decay_start(old.optim):
        return path
    trunks, which = trunks_in(path.parent), settings.run.resume
    if not trunks or which != "last":
        remedy = "leave that word out, to go on from its trunk" if trunks else "start a new run"
        raise ValueError(
            f"--resume {which}: at step {clock.step} the learning rate of the run in {path.parent}"
            f" decays already, and more tokens need a checkpoint before that: {remedy}"
        )
    return trunks[-1]


def with_tokens(settings: "Config", tokens: int) -> "Config":
    return replace(settings, optim=replace(settings.optim, tokens=tokens))


def begin(
    folder: Path, path: Path | None, extension: Extension, say: Callable[[str], None]
) -> Path | None:
    """Extend a run on the disk, in the order given above.

    Args:    path the checkpoint that it goes on from; None if it was stopped before its first one
    Returns: that checkpoint, under the name of its step
    """
    log = folder / "log.jsonl"
    if log.exists():
        with log.open("rb") as source, atomic_write(folder / f"log-{extension.before}.jsonl") as to:
            shutil.copyfileobj(source, to)
    if path:
        step_file = checkpoint.step_path(folder, extension.step, path.suffix)
        if not step_file.exists():
            checkpoint.link(path, step_file)
        path = step_file
        set_later_aside(folder, extension.step, say)
        for best in checkpoint.bests_in(folder):
            if outlined(best)["step"] > extension.step:
                set_aside(best, say)
    sync(folder)  # all of these names before the record, even if the power fails
    with atomic_write(folder / RECORD) as file:
        file.write(json.dumps(extension._asdict()).encode() + b"\n")
    sync(folder)
    return path


def set_later_aside(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps: `last` must not mean one that this run never made."""
    for file in checkpoint.steps_in(folder):
        if file.stem > f"step-{step:08d}":
            set_aside(file, say)


def set_aside(file: Path, say: Callable[[str], None]) -> None:
    target = file.with_name(f"abandoned-{file.name}")
    checkpoint.put(file, target)
    say(f"{file} is of a later step: renamed to {target.name}")


def change(settings: "Config", extension: Extension, clock: Clock) -> dict[str, Any]:
    """What the extension changes at this point of the run: fields of the log."""
    return {
        "step": clock.step,
        "consumed_tokens": clock.consumed_tokens,
        "tokens_before": extension.before,
        "tokens": extension.tokens,
        "lr_before": learning_rate(with_tokens(settings, extension.before), clock, clock),
        "lr": learning_rate(settings, clock, clock),
    }


def in_words(changed: dict[str, float], schedule: str) -> str:
    """Example: learning rate stretched from 4,096 to 8,192 tokens at step 16, lr 0 -> 0.0101"""
    what = "decay of the learning rate moved" if schedule == "wsd" else "learning rate stretched"
    return (
        f"{what} from {changed['tokens_before']:,} to {changed['tokens']:,} tokens at step"
        f" {changed['step']:,}, lr {changed['lr_before']:.3g} -> {changed['lr']:.3g}"
    )


# ---- the trunk


def keep_trunk(path: Path) -> None:
    """Give a checkpoint a name as trunk, which --keep does not delete, in place of an older one."""
    trunk = path.with_name("trunk.pt" if path.is_file() else path.name.replace("step", "trunk"))
    checkpoint.link(path, trunk)
    checkpoint.remove(*[other for other in trunks_in(path.parent) if other != trunk])


def trunks_in(folder: Path) -> list[Path]:
    """The trunk; while a newer one takes its place there are two, the newer one last."""
    paths = [*folder.glob("trunk.pt"), *folder.glob("trunk-*" + checkpoint.SUFFIX)]
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)
