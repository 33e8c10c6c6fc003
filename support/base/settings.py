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
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from operator import contains, ge, gt, le, lt
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from support.base.numbers import real_number, whole_number
from support.base.runtime import Parser
from support.base.technique import is_on, techniques_of

if TYPE_CHECKING:
    from config import Config


class Limit(NamedTuple):
    words: str
    holds: Callable[[Any, Any], bool]  # of the limit and a value


LIMITS = {
    "choices": Limit("one of", contains),
    "least": Limit("at least", le),
    "above": Limit("above", lt),
    "most": Limit("at most", ge),
    "below": Limit("below", gt),
}
Value = str | int | float | bool | None  # of a setting
Flat = dict[str, Value]  # {"group.field": value}


def flag(default: Value, help: str, choices: tuple | None = None, **more: object) -> Any:
    """A field of a group; `more` is any other of the metadata above."""
    return field(default=default, metadata={"help": help, "choices": choices, **more})


def free(default: Value, help: str, choices: tuple | None = None, **more: object) -> Any:
    """A flag that may differ when a run goes on."""
    return flag(default, help, choices, free=True, **more)


class Setting(NamedTuple):
    """A field of a group."""

    flag: str  # --seq-len; a technique's --ltd-start, and --ltd for its switch
    kind: type  # of its value, which may also be None: left open
    field: Field

    def says(self, name: str) -> Any:
        """One of the metadata above; None without it."""
        return self.field.metadata.get(name)


@cache
def settings_of(config_class: "type[Config]") -> dict[str, Setting]:
    """Every setting by its name, group.field, in the order of the fields."""
    found = {}
    for part in fields(config_class):
        prefix = f"{part.name}_" if part.name in techniques_of(config_class) else ""
        for number, item in enumerate(fields(part.default_factory)):
            words = prefix + item.name if number or not prefix else part.name
            written = "--" + words.replace("_", "-")
            hint = get_type_hints(part.default_factory)[item.name]
            kind = (get_args(hint) or (hint,))[0]
            found[f"{part.name}.{item.name}"] = Setting(written, kind, item)
    return found


def shown_settings(config_class: "type[Config]") -> dict[str, Setting]:
    """Those that are flags."""
    return {n: s for n, s in settings_of(config_class).items() if not s.says("hidden")}


def unflattened(config_class: "type[Config]", flat: Flat) -> "Config":
    """{"group.field": value} -> a configuration; what is not given keeps its default.

    Raises: ValueError for a setting of a technique that is off
    """
    groups: dict[str, Flat] = {part.name: {} for part in fields(config_class)}
    for name, value in flat.items():
        group, _, setting_name = name.partition(".")
        groups[group][setting_name] = value
    parts = {part.name: part.default_factory(**groups[part.name]) for part in fields(config_class)}
    config = config_class(**parts)
    off = {name for name in techniques_of(config) if not is_on(config, name)}
    for name, value in flat.items():
        group = name.partition(".")[0]
        setting = settings_of(config_class)[name]
        if group in off and value != setting.field.default:
            given = as_given(setting.flag, value)
            raise ValueError(f"{given} has no effect without --{group}: add it")
    return config


def check_settings(config_class: "type[Config]", flat: Flat, file: str = "") -> None:
    """Refuse what no flag can set, from the command line or a file.

    Raises: ValueError naming the flag, or the file and its entry
    """
    where = file and f"{file}: "
    for name, value in flat.items():
        setting = settings_of(config_class).get(name)
        if setting is None:
            raise ValueError(f"{where}{name} is of another version of train.py")
        limits = {key: setting.says(key) for key in LIMITS if setting.says(key) is not None}
        if value is not None and not all(LIMITS[key].holds(limits[key], value) for key in limits):
            allowed = ", ".join(f"{LIMITS[key].words} {limit}" for key, limit in limits.items())
            given = f"{where}{name if file else setting.flag} is {value}"
            raise ValueError(f"{given}, allowed is {allowed}: {setting.says('help')}")


def as_given(flag: str, value: Value) -> str:
    """A setting as one would write it: --seed 5, --ltd, --no-ltd; no --ltd-steps if it is open."""
    if value is None:
        return f"no {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


def as_flags(settings: Flat) -> str:
    """Example: {"model.layers": 3, "model.tied": False} -> --layers 3 --no-tied"""
    flags = {"--" + name.partition(".")[2].replace("_", "-"): v for name, v in settings.items()}
    return " ".join(as_given(flag, value) for flag, value in flags.items())


def flattened(config: "Config") -> Flat:
    """A configuration as {"group.field": value}."""
    return {f"{g}.{name}": v for g, part in asdict(config).items() for name, v in part.items()}


def free_settings(config_class: "type[Config]") -> set[str]:
    """Those that may differ when a run goes on."""
    return {name for name, s in settings_of(config_class).items() if s.says("free")}


def resumed(config_class: "type[Config]", saved: Flat, given: Flat) -> Flat:
    """The settings of a run that goes on: those it was started with, and the free ones given.

    Raises: ValueError for another value of a setting that is not free
    """
    for name, value in given.items():
        if name not in free_settings(config_class) and saved.get(name) != value:
            flag = settings_of(config_class)[name].flag
            raise ValueError(
                f"{as_given(flag, value)} differs from {as_given(flag, saved.get(name))}, with"
                " which the run was started: leave it out, or start a new run with another --out"
            )
    return saved | given


# ---- flags
#
# A configuration -> its command line, and the README's table of it.


def parser_of(config_class: "type[Config]", prog: str, description: str) -> argparse.ArgumentParser:
    """The command line: a group of flags for each part, a flag for each setting.

    What is not given is absent from what it parses, {"group.field": value}; defaults are the
    dataclasses' business.
    """
    parser = Parser(prog=prog, description=description)
    groups = {part.name: parser.add_argument_group(part.name) for part in fields(config_class)}
    for name, setting in shown_settings(config_class).items():
        kind = setting.kind
        about = setting.says("help").replace("%", "%%")
        if default := shown_default(setting.field.default):
            about += f" (default: {default})"
        options = {"dest": name, "default": argparse.SUPPRESS, "help": about}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = setting.says("choices")
            options["type"] = {int: whole_number, float: real_number}.get(kind, kind)
            options["choices"] = choices
            options["metavar"] = "|".join(choices) if choices else kind.__name__.upper()
        if const := setting.says("without_value"):
            options |= {"nargs": "?", "const": const}
        groups[name.partition(".")[0]].add_argument(setting.flag, **options)
    return parser


def table_of(config_class: "type[Config]") -> str:
    """Every flag as a row of a markdown table, in the order of --help."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for setting in shown_settings(config_class).values():
        choices = setting.says("choices")
        about = f"{setting.says('help')}: {', '.join(choices)}" if choices else setting.says("help")
        rows.append(f"| `{setting.flag}` | {shown_default(setting.field.default)} | {about} |")
    return "\n".join(rows)


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
    out: str | None = free(None, "folder of the run: log, checkpoints, config (default: a new one)")
    resume: str | None = free(
        None,
        "continue from a checkpoint of --out; auto begins the run if there is none",
        ("last", "best", "auto"),
        without_value="last",
    )
    seed: int = flag(1337, "decides the initial weights, the order of data and every draw")
    device: str = free("auto", "where to compute", ("auto", "cpu", "cuda", "mps"))
    dtype: str = flag("auto", "arithmetic of the model", ("auto", "fp32", "bf16"))
    compile: str = free(
        "auto",
        "compile blocks, as their shapes come; auto: on a GPU",
        ("auto", "on", "off"),
        without_value="on",
    )
    checkpoint_activations: bool = free(
        False, "keep only the input of a block and recompute the rest in the backward pass"
    )
    fsdp: bool = free(False, "each rank holds a part of every weight, gradient and optimizer state")
    eval_every: int | None = free(
        None, "tokens between evaluations, 0 for never (default: a fifth of --tokens)"
    )
    eval_tokens: int = free(32_768, "held-out tokens of each evaluation but the last", least=1)
    final_eval_tokens: int = free(1_000_000, "most held-out tokens of the last evaluation", least=1)
    checkpoint_every: int | None = free(
        None, "tokens between checkpoints, 0 for the last only (default: a tenth)"
    )
    keep: int = free(2, "newest checkpoints to keep, in addition to the best", least=1)
    wandb: bool = free(False, "write the log for Weights & Biases too, WANDB_MODE=offline included")
    dry_run: bool = free(False, "print how long and large the run would be, and stop")
