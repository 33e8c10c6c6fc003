"""A run that goes on past its budget: --resume --tokens N.

The learning rate follows the schedule of the new budget from there on. The techniques' schedules
keep the budget that the run was started with (schedule_tokens), so that none of them goes back.
Cosine and linear go on from the checkpoint that --resume names. With wsd (warmup-stable-decay,
arXiv 2404.06395) a run keeps the last step before its decay as trunk.pt, or trunk-00001234.sharded,
and goes on from that one if it has begun to decay: so one trunk serves the decays of many budgets.

config.json stays as it is; extended.json beside it has the budget of now. It is written when all
else is in place, so a kill at any moment leaves the old run or the extended one:
  1. log.jsonl is copied to log-<old budget>.jsonl
  2. the trunk, if it is what the run goes on from, becomes the file of its step again
  3. checkpoints of later steps, and a best one among them, are renamed to abandoned-*
  4. extended.json is written
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from support.base.atomic import atomic_write, sync
from support.base.clock import Clock, lr_clock
from support.run import checkpoint, sharded_checkpoint
from support.run.sharded_checkpoint import outlined
from support.step.optim import decay_start, learning_rate

RECORD = "extended.json"


class Extension(NamedTuple):
    """The last extension of a run, as extended.json has it."""

    tokens: int  # the budget of now
    before: int  # the budget until then
    step: int  # after which it changed


def recorded(folder: Path) -> Extension | None:
    """ValueError for a damaged record."""
    try:
        return Extension(**json.loads((folder / RECORD).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--resume: {folder / RECORD} is damaged ({error}): put it back, or start a new run"
            " with another --out"
        ) from None


def with_budget(folder: Path, saved: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    """The settings that a run goes on with: those it was started with, and the budget of now.

    Args:   saved  of config.json
            tokens given by --tokens, if it is
    Raises: ValueError for a budget that is smaller than the run's
    """
    extended = recorded(folder)
    now = extended.tokens if extended else saved["optim.tokens"]
    if tokens is not None and tokens < now:
        raise ValueError(
            f"--tokens {tokens} is less than the {now} tokens of the run in {folder}: a run that"
            " goes on can be given more, not less"
        )
    return {**saved, "optim.tokens": tokens or now, "optim.schedule_tokens": saved["optim.tokens"]}


def starting_point(found: Path, settings: Any, before: int) -> Path:
    """The checkpoint that a run goes on from with its new budget: the one found, or the trunk.

    Args:   found    what --resume names
            settings with the new budget; `before` is the old one
    Raises: ValueError where the one found decays, and there is no trunk or another one was asked
            for
    """
    o, clock = with_tokens(settings, before).optim, Clock.of(outlined(found)["clock"])
    if o.schedule != "wsd" or lr_clock(settings, clock) <= decay_start(o):
        return found
    trunks, which = trunks_in(found.parent), settings.run.resume
    if not trunks or which != "last":
        remedy = "leave that word out, to go on from its trunk" if trunks else "start a new run"
        raise ValueError(
            f"--resume {which}: at step {clock.step} the learning rate of the run in {found.parent}"
            f" decays already, and more tokens need a checkpoint before that: {remedy}"
        )
    return trunks[-1]


def with_tokens(settings: Any, tokens: int) -> Any:
    return replace(settings, optim=replace(settings.optim, tokens=tokens))


def begin(folder: Path, path: Path | None, extension: Extension, say: Callable[[str], None]) -> str:
    """Extend a run on the disk, as above.

    Args:    path the checkpoint that it goes on from; None if it was stopped before its first one
    Returns: that checkpoint, under the name of its step
    """
    log = folder / "log.jsonl"
    if log.exists():
        with log.open("rb") as source, atomic_write(folder / f"log-{extension.before}.jsonl") as to:
            shutil.copyfileobj(source, to)
    if path:
        step_file = checkpoint.step_path(folder, extension.step, 1, path.suffix)
        if not step_file.exists():
            link(path, step_file)
        path = step_file
        set_later_aside(folder, extension.step, say)
        for best in checkpoint.bests_in(folder):
            if outlined(best)["step"] > extension.step:
                set_aside(best, say)
    sync(folder)  # all of these names before the record, also where the power fails
    with atomic_write(folder / RECORD) as file:
        file.write(json.dumps(extension._asdict()).encode() + b"\n")
    sync(folder)
    return str(path or "")


def set_later_aside(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints of later steps: `last` must not mean one that this run never made."""
    for file in checkpoint.steps_in(folder):
        if file.name.partition(".")[0] > f"step-{step:08d}":
            set_aside(file, say)


def set_aside(file: Path, say: Callable[[str], None]) -> None:
    target = file.with_name(f"abandoned-{file.name}")
    if target.is_dir():  # which no system call replaces
        checkpoint.remove([target])
    file.rename(target)
    say(f"{file} is of a later step: renamed to {target.name}")


def change(settings: Any, extension: Extension, clock: Clock) -> dict[str, Any]:
    """What the extension changes where a run stands: fields of the log."""
    old = with_tokens(settings, extension.before)
    return {
        "step": clock.step,
        "consumed_tokens": clock.consumed_tokens,
        "tokens_before": extension.before,
        "tokens": extension.tokens,
        "lr_before": learning_rate(old, clock, clock),
        "lr": learning_rate(settings, clock, clock),
    }


def in_words(changed: dict[str, Any], schedule: str) -> str:
    """Example: learning rate stretched from 4,096 to 8,192 tokens at step 16, lr 0 -> 0.0101"""
    what = "decay of the learning rate moved" if schedule == "wsd" else "learning rate stretched"
    return (
        f"{what} from {changed['tokens_before']:,} to {changed['tokens']:,} tokens at step"
        f" {changed['step']:,}, lr {changed['lr_before']:.3g} -> {changed['lr']:.3g}"
    )


# ---- the trunk


def keep_trunk(path: Path) -> None:
    """Give a checkpoint a name as trunk, which --keep does not delete, in place of an older one."""
    name = "trunk.pt" if path.is_file() else f"trunk-{path.name.partition('-')[2]}"
    link(path, path.with_name(name))
    checkpoint.remove([other for other in trunks_in(path.parent) if other.name != name])


def trunks_in(folder: Path) -> list[Path]:
    """There is one; while a newer one takes its place two, the newer one last."""
    found = [*folder.glob("trunk.pt"), *folder.glob("trunk-*" + sharded_checkpoint.SUFFIX)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def link(source: Path, target: Path) -> None:
    """Give a checkpoint a second name, whole or not at all; its bytes are there once."""
    unfinished = target.with_name(f".tmp-{target.name}")
    checkpoint.remove([unfinished])
    if source.is_dir():
        unfinished.mkdir()
        for file in source.iterdir():
            checkpoint.link_or_copy(file, unfinished / file.name)
        sync(unfinished)
        sharded_checkpoint.put(unfinished, target)
    elif not (target.exists() and target.samefile(source)):  # then a rename would do nothing
        checkpoint.link_or_copy(source, unfinished)
        os.replace(unfinished, target)
    sync(target.parent)
