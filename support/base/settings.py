"""Settings as a dataclass of frozen dataclasses, one a group, and their command line.

A field is a setting and a flag. Its metadata say what it means and what it may be:

    help                         one line
    choices                      the values allowed
    least, above, most, below    the limits of a number
    free                         may differ when a run goes on: where and how fast, not what
    without_value                what the flag alone means
    hidden                       no flag: it follows from others, and is kept with them
"""

import argparse
import operator
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from support.base.numbers import real_number, whole_number
from support.base.runtime import Parser
from support.base.technique import is_on, techniques_of
from support.base.typed_json import dotted, is_not, mismatch

if TYPE_CHECKING:
    from config import Config

Value = str | int | float | bool | None  # of a setting
Flat = dict[str, Value]  # {"group.field": value}

LIMITS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def flag(default: Value, help: str, choices: tuple | None = None, **more: object) -> Any:
    """A field of a group; `more` is any other of the metadata above."""
    return field(default=default, metadata={"help": help, "choices": choices, **more})


def flag_of(config: "Config | type[Config]", group: str, name: str) -> str:
    """The flag of a setting: --seq-len; a technique's --ltd-start, and --ltd for its switch."""
    techniques = techniques_of(config)
    if group in techniques:
        switch = fields(techniques[group].settings)[0].name
        name = group if name == switch else f"{group}_{name}"
    return "--" + name.replace("_", "-")


def unflattened(config_class: type, flat: Flat) -> "Config":
    """{"group.field": value} -> a configuration; what is not given keeps its default.

    Raises: ValueError for a setting of a technique that is off
    """
    groups = {}
    for part in fields(config_class):
        mine = {key.split(".")[1]: flat[key] for key in flat if key.split(".")[0] == part.name}
        settings = get_type_hints(config_class)[part.name]
        groups[part.name] = settings(**mine)
    config = config_class(**groups)
    for name in techniques_of(config):
        for item in fields(getattr(config, name))[1:]:
            value = getattr(getattr(config, name), item.name)
            if value != item.default and not is_on(config, name):
                flag = flag_of(config, name, item.name)
                given = as_given(flag, value)
                raise ValueError(f"{given} has no effect without --{name}: add it")
    return config


def check_types(config_class: type, flat: Flat, file: str = "") -> None:
    """Refuse a setting that its flag could not have; the file that it is from may hold anything.

    Raises: ValueError naming the file and the setting
    """
    where = file and f"{file}: "
    known = {
        f"{part.name}.{item.name}": (get_type_hints(kind)[item.name], item.metadata)
        for part in fields(config_class)
        for kind in [get_type_hints(config_class)[part.name]]
        for item in fields(kind)
    }
    for name, value in flat.items():
        if name not in known:
            raise ValueError(f"{where}{dotted('', name)} is of another version of train.py")
        kind, metadata = known[name]
        choices = metadata["choices"]
        wrong = "" if value is None else mismatch(value, kind, name)
        if not wrong and value is not None and choices and value not in choices:
            wrong = is_not(value, name, f"one of {', '.join(choices)}")
        if not wrong and not is_within(value, metadata):
            wrong = is_not(value, name, allowed_by(metadata))
        if wrong:
            raise ValueError(where + wrong)


def as_given(flag: str, value: Value) -> str:
    """A setting as one would write it: --seed 5, --ltd, --no-ltd; no --ltd-steps if it is open."""
    if value is None:
        return f"no {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


def flattened(config: "Config") -> Flat:
    """A configuration as {"group.field": value}."""
    return {f"{g}.{name}": v for g, part in asdict(config).items() for name, v in part.items()}


def free_settings(config_class: type) -> set[str]:
    """Those that may differ when a run goes on."""
    return {
        f"{part.name}.{item.name}"
        for part in fields(config_class)
        for item in fields(get_type_hints(config_class)[part.name])
        if item.metadata.get("free")
    }


def resumed(config_class: type, saved: Flat, given: Flat) -> Flat:
    """The settings of a run that goes on: those it was started with, and the free ones given.

    Raises: ValueError for another value of a setting that is not free
    """
    free = free_settings(config_class)
    for name, value in given.items():
        if name not in free and saved.get(name) != value:
            flag = flag_of(config_class, *name.split("."))
            raise ValueError(
                f"{as_given(flag, value)} differs from {as_given(flag, saved.get(name))}, with"
                " which the run was started: leave it out, or start a new run with another --out"
            )
    return {**saved, **{name: value for name, value in given.items() if name in free}}


def out_of_limits(config: "Config") -> list[tuple[bool, str]]:
    """Every limit of every setting, as (condition of refusal, what to tell the user)."""
    pairs = []
    for part in fields(config):
        settings = getattr(config, part.name)
        for item in fields(settings):
            value = getattr(settings, item.name)
            name, allowed = flag_of(config, part.name, item.name), allowed_by(item.metadata)
            message = f"{name} {value} must be {allowed} ({item.metadata['help']})"
            pairs.append((not is_within(value, item.metadata), message))
    return pairs


def is_within(value: Value, metadata: Mapping[str, Any]) -> bool:
    """Whether a setting is within its limits; one that is open has none."""
    limits = [] if value is None else [name for name in LIMITS if name in metadata]
    return all(LIMITS[name][1](value, metadata[name]) for name in limits)


def allowed_by(metadata: Mapping[str, Any]) -> str:
    """Example: at least 0 and below 1"""
    return " and ".join(
        f"{word} {metadata[name]:,}" for name, (word, _) in LIMITS.items() if name in metadata
    )


# ---- functions that a setting names, as path.py:name


@lru_cache
def load_function(name: str) -> Callable:
    """The function that `path.py:name` names."""
    path, _, function = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        raise ValueError(f"{name}: there is no Python file {path}")
    value = call(name, runpy.run_path, path).get(function)
    if not callable(value):
        raise ValueError(f"{name}: {path} defines no function {function}")
    return value


def call(described: str, function: Callable, *args: object) -> Any:
    """Run a user's code; whatever it raises becomes one line that begins with `described`."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{described}: raised {type(error).__name__}: {error}") from None


def check_code(settings: Flat, folder: Path, trusted: bool) -> None:
    """Name the code that the settings of a run are about to run.

    Raises: ValueError for a file in the run's own folder, which may come from a stranger
    """
    texts = [value for value in settings.values() if isinstance(value, str)]
    for value in dict.fromkeys(part for text in texts for part in (text, *text.split(","))):
        path = Path(value.rpartition(":")[0])
        if not (path.name.endswith(".py") and path.is_file()):
            continue
        if path.resolve().is_relative_to(folder.resolve()) and not trusted:
            raise ValueError(
                f"--resume: the settings of {folder} run code that lies in it, {str(path)!a}:"
                " read that file, then add --trust-code"
            )
        print(f"the settings of {folder} run code of {str(path)!a}", file=sys.stderr)


# ---- flags
#
# A configuration -> its command line, and the README's table of it.


def parser_of(config_class: type, prog: str, description: str) -> argparse.ArgumentParser:
    """The command line: a group of flags for each part, a flag for each setting.

    What is not given is absent from what it parses, {"group.field": value}; defaults are the
    dataclasses' business.
    """
    parser = Parser(prog=prog, description=description)
    for part in fields(config_class):
        settings = get_type_hints(config_class)[part.name]
        group = parser.add_argument_group(part.name)
        for item in shown_fields(settings):
            default = shown_default(item.default)
            options = {
                "dest": f"{part.name}.{item.name}",
                "default": argparse.SUPPRESS,
                "help": item.metadata["help"].replace("%", "%%")
                + (f" (default: {default})" if default else ""),
            }
            kind = get_type_hints(settings)[item.name]
            kind = get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                choices = item.metadata.get("choices")
                options["type"] = {int: whole_number, float: real_number}.get(kind, kind)
                options["choices"] = choices
                options["metavar"] = "|".join(choices) if choices else kind.__name__.upper()
            if "without_value" in item.metadata:
                options |= {"nargs": "?", "const": item.metadata["without_value"]}
            group.add_argument(flag_of(config_class, part.name, item.name), **options)
    return parser


def table_of(config_class: type) -> str:
    """Every flag as a row of a markdown table, in the order of --help."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for part in fields(config_class):
        for item in shown_fields(get_type_hints(config_class)[part.name]):
            name = flag_of(config_class, part.name, item.name)
            choices = item.metadata.get("choices")
            allowed = f": {', '.join(choices)}" if choices else ""
            rows.append(
                f"| `{name}` | {shown_default(item.default)} | {item.metadata['help']}{allowed} |"
            )
    return "\n".join(rows)


def shown_fields(settings: type) -> list[Field]:
    """The settings of a group that are flags."""
    return [item for item in fields(settings) if not item.metadata.get("hidden")]


def shown_default(default: Value) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):  # not by a table of {True: "on"}: 1.0 == True
        return "on" if default else "off"
    return str(default)


# ---- run config
#
# The settings of a run that are no model's, data's or optimizer's: where and how it runs.


@dataclass(frozen=True)
class RunConfig:
    out: str | None = flag(
        None, "folder of the run: log, checkpoints, config (default: a new one)", free=True
    )
    resume: str | None = flag(
        None,
        "go on from a checkpoint of --out, or with auto begin the run if there is none",
        ("last", "previous", "best", "auto"),
        without_value="last",
        free=True,
    )
    seed: int = flag(1337, "decides the weights at the start, the order of data and every draw")
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda", "mps"), free=True)
    dtype: str = flag("auto", "arithmetic of the model", ("auto", "fp32", "bf16", "fp16"))
    compile: str = flag(
        "auto",
        "compile each block before the first step, for every shape that will come; auto: on a GPU,"
        " where these can be listed",
        ("auto", "on", "off"),
        without_value="on",
        free=True,
    )
    checkpoint_activations: bool = flag(
        False, "keep a block's input alone and recompute the rest in the backward pass", free=True
    )
    fsdp: bool = flag(
        False, "each rank holds a part of every weight, gradient and optimizer state", free=True
    )
    eval_every: int | None = flag(
        None, "tokens between evaluations, 0 for never (default: a fifth of --tokens)", free=True
    )
    eval_tokens: int = flag(
        32_768, "held-out tokens of an evaluation on the way", least=1, free=True
    )
    final_eval_tokens: int = flag(
        1_000_000, "held-out tokens of the last evaluation, at most", least=1, free=True
    )
    checkpoint_every: int | None = flag(
        None, "tokens between checkpoints, 0 for the last only (default: a tenth)", free=True
    )
    keep: int = flag(2, "newest checkpoints to keep; the best is kept besides", least=1, free=True)
    rank_timeout: int = flag(
        1800, "seconds that ranks wait for one that does not answer", least=1, free=True
    )
    trust_code: bool = flag(
        False, "--resume a run whose folder holds Python code that its settings name", free=True
    )
    tensorboard: bool = flag(False, "write the log for TensorBoard too", free=True)
    dry_run: bool = flag(
        False, "say what the run would take of steps, memory and time, and stop", free=True
    )
