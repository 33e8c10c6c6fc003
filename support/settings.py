"""Settings as frozen dataclasses, one field per flag; and numbers as people write and read them.

    @dataclass(frozen=True)
    class LtdConfig:
        on: bool = flag(False, "drop random tokens ...")             --ltd, --no-ltd
        start: int | None = flag(None, "tokens per row ...", least=1)  --ltd-start 64

A group with a field or property `on` belongs to a technique: its first setting is the switch, named
like the technique (--ltd), and the name is the prefix of all other flags (--ltd-start). Between the
command line and the dataclasses, settings are flat, {"ltd.start": 64}, and hold only what was
given. Besides its help, a field may have:

    choices                      the allowed values
    least, above, most, below    the limits of a number
    free                         --resume may change it: it says where or how fast, not what
    without_value                the value that the flag alone stands for
    hidden                       no flag: the value follows from other settings and is saved
                                 with them

Every run has the groups RunConfig and DataConfig, which are here, ModelConfig in sizes.py and
OptimConfig in optim.py. Each technique's group is in its file, and config.py combines them all.
"""

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from support.process import Parser

Value = str | int | float | bool | None  # of a setting
Flat = dict[str, Value]  # {"group.field": value}
Groups = TypeVar("Groups")  # a dataclass of groups: Config


def flag(default: Value, help: str, choices: tuple[str, ...] | None = None, **more: object) -> Any:
    """Make a field of a group; `more` may be any of the keys listed at the top of this file."""
    return field(default=default, metadata={"help": help, "choices": choices, **more})


def free(default: Value, help: str, choices: tuple[str, ...] | None = None, **more: object) -> Any:
    """Make a flag that may differ when a run is resumed."""
    return flag(default, help, choices, free=True, **more)


class Setting(NamedTuple):
    flag: str  # --seq-len, --ltd, --ltd-start
    kind: type  # of its value, which may also be None: not decided yet
    default: Value
    about: Mapping[str, Any]  # help, choices, limits, ...


@cache
def settings_of(config_class: type) -> dict[str, Setting]:
    """List every setting by its name, group.field, in the order of the fields."""
    settings = {}
    for part in fields(config_class):
        group = part.default_factory
        hints = get_type_hints(group)
        for number, item in enumerate(fields(group)):
            words = item.name
            if hasattr(group, "on"):
                words = f"{part.name}_{item.name}" if number else part.name
            written = "--" + words.replace("_", "-")
            kind = (get_args(hints[item.name]) or (hints[item.name],))[0]
            setting = Setting(written, kind, item.default, item.metadata)
            settings[f"{part.name}.{item.name}"] = setting
    return settings


# ---- the command line


def parse(config_class: type, argv: list[str], prog: str, description: str) -> Flat:
    """Parse and check a command line; return only the settings it gives.

    Raises: ValueError for an unknown flag or a value that is not allowed
    """
    parser = Parser(prog=prog, description=description)
    groups = {part.name: parser.add_argument_group(part.name) for part in fields(config_class)}
    for name, (written, kind, default, about) in settings_of(config_class).items():
        if about.get("hidden"):
            continue
        shown = shown_default(default)
        text = f"{about['help']} (default: {shown})" if shown else about["help"]
        options = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = about["choices"]
            options["type"] = {int: whole_number, float: real_number}.get(kind, kind)
            options["choices"] = choices
            options["metavar"] = "|".join(choices) if choices else kind.__name__.upper()
        if "without_value" in about:
            options |= {"nargs": "?", "const": about["without_value"]}
        groups[name.partition(".")[0]].add_argument(written, **options)
    given = vars(parser.parse_args(argv))
    check_limits(config_class, given)
    return given


def check_limits(config_class: type, flat: Flat, file: str = "") -> None:
    """Refuse a setting that does not exist or is outside its limits.

    Raises: ValueError naming the flag, or the file that the settings come from and its entry
    """
    where = file and f"{file}: "
    for name, value in flat.items():
        if name not in settings_of(config_class):
            raise ValueError(f"{where}{name} is not a setting of this version of train.py")
        written, _, _, about = settings_of(config_class)[name]
        if value is None:
            continue
        allowed, holds = [], True
        if choices := about["choices"]:
            allowed.append(" or ".join(choices))
            holds = value in choices
        for limit, words, compare in (
            ("least", "at least", float.__ge__),
            ("above", "above", float.__gt__),
            ("most", "at most", float.__le__),
            ("below", "below", float.__lt__),
        ):
            if limit in about:
                allowed.append(f"{words} {about[limit]}")
                holds = holds and compare(float(value), float(about[limit]))
        if not holds:
            must = f"{where}{name if file else written} must be {' and '.join(allowed)}"
            raise ValueError(f"{must}, got {value}: {about['help']}")


def table_of(config_class: type) -> str:
    """Format every flag as a row of a markdown table, in the order of --help."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for written, _, default, about in settings_of(config_class).values():
        if not about.get("hidden"):
            text, _, words = about["help"].partition(" (default: ")
            usual = words[:-1] or shown_default(default)
            choices = f" ({', '.join(about['choices'])})" if about["choices"] else ""
            rows.append(f"| `{written}` | {usual} | {text}{choices} |")
    return "\n".join(rows)


def shown_default(default: Value) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default is None else str(default)


# ---- flat settings and dataclasses


def unflattened(config_class: type[Groups], flat: Flat) -> Groups:
    """{"group.field": value} -> a configuration; settings that are not given keep their defaults.

    Raises: ValueError for a setting of a technique that is off
    """
    groups: dict[str, Flat] = {part.name: {} for part in fields(config_class)}
    for name, value in flat.items():
        group, _, setting = name.partition(".")
        groups[group][setting] = value
    parts = {part.name: part.default_factory(**groups[part.name]) for part in fields(config_class)}
    for name, value in flat.items():
        group, setting = name.partition(".")[0], settings_of(config_class)[name]
        if not getattr(parts[group], "on", True) and value != setting.default:
            given = as_given(setting.flag, value)
            raise ValueError(f"{given} has no effect without --{group}: add it")
    return config_class(**parts)


def flattened(config: object) -> Flat:
    """A configuration -> {"group.field": value}."""
    return {f"{g}.{name}": v for g, part in asdict(config).items() for name, v in part.items()}


def as_given(written: str, value: Value) -> str:
    """Write a setting as on a command line: --seed 5, --ltd, --no-ltd; for None "no --kv-heads"."""
    if value is None:
        return f"no {written}"
    if isinstance(value, bool):
        return written if value else f"--no-{written.removeprefix('--')}"
    return f"{written} {value}"


def as_flags(settings: Flat) -> str:
    """Example: {"model.layers": 3, "model.tied": False} -> --layers 3 --no-tied"""
    flags = {"--" + name.partition(".")[2].replace("_", "-"): v for name, v in settings.items()}
    return " ".join(as_given(written, value) for written, value in flags.items())


# ---- numbers as people write them


def number_of(text: str) -> float:
    """Read 2000000, 2e6, 2M or 1.5B; nan if the text is not a number."""
    power = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}.get(text[-1:].upper(), "")
    try:
        # Not a product: 2.05e6 is a whole number, 2.05 * 1e6 is not.
        return float(text[:-1] + power if power else text)
    except ValueError:
        return math.nan


def whole_number(text: str, least: int = 0) -> int:
    """Read a whole number for argparse: 2000000, 2e6, 2M, 1.5B."""
    number = number_of(text)
    if not (least <= number < 2**63 and number == int(number)):
        example = f"a whole number of at least {least}, such as 4096, 2e6 or 1.5B"
        raise argparse.ArgumentTypeError(f"{text} is not {example}")
    return int(number)


def count(text: str) -> int:
    """Read a whole number above 0 for argparse."""
    return whole_number(text, least=1)


def real_number(text: str) -> float:
    """Read a finite number for argparse: not every setting has limits that refuse nan and inf."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a number such as 0.1 or 3e-4")
    return number


BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(written: str, text: str) -> int:
    """Read a flag's amount of memory, such as 6GiB or 800MB; ValueError names the flag."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", text)
    if match is None or match[2] not in BYTES or float(match[1]) == 0:
        raise ValueError(f"{written} {text}: write an amount such as 6GiB, 800MB or auto")
    return int(float(match[1]) * BYTES[match[2]])


# ---- numbers as messages show them

PREFIXES = ("", "K", "M", "B", "T", "P", "E")


def short(value: float, unit: str = "") -> str:
    """Format a number to three digits; 10^9 is B, as for tokens, or G before a unit.

    Example:  61440 -> "61.4 K", 1.23e12 -> "1.23 T", 950 -> "950"; 2.5e9, "FLOP" -> "2.50 GFLOP"
    """
    if not math.isfinite(value):
        return ""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value /= 1000
        power += 1
    text = f"{value:#.3g}".rstrip(".") if power and value < 999.5 else f"{value:.0f}"
    prefix = "G" if unit and PREFIXES[power] == "B" else PREFIXES[power]
    return f"{text} {prefix}{unit}".strip()


def several(number: int, what: str) -> str:
    """Example: 1, "seed" -> "1 seed"; 2500, "step" -> "2,500 steps" """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Example: 8.24 -> "8.2 s", 754 -> "0:12:34", 9e4 -> "1 day, 1:00:00" """
    if not math.isfinite(seconds):
        return ""
    return f"{seconds:.1f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


# ---- groups


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept, where it computes, and how often it evaluates and saves."""

    out: str | None = free(None, "folder for log, checkpoints, settings (default: a new one)")
    resume: str | None = free(
        None,
        "continue the run in --out, or the newest; auto: start one if --out has none",
        ("last", "best", "auto"),
        without_value="last",
    )
    seed: int = flag(1337, "seed of initial weights, data order and every random choice")
    device: str = free("auto", "device to compute on", ("auto", "cpu", "cuda", "mps"))
    dtype: str = flag("auto", "precision; auto: bf16 on Ampere or newer", ("auto", "fp32", "bf16"))
    compile: str = free(
        "auto", "compile the blocks; auto: on a GPU", ("auto", "on", "off"), without_value="on"
    )
    checkpoint_activations: bool = free(False, "recompute blocks in backward to save memory")
    fsdp: bool = free(False, "shard weights, gradients and optimizer state across ranks")
    eval_every: int | None = free(None, "in tokens; 0: only at the end (default: --tokens / 5)")
    eval_tokens: int = free(32_768, "held-out tokens per evaluation but the final one", least=1)
    final_eval_tokens: int = free(1_000_000, "maximum held-out tokens at the end", least=1)
    checkpoint_every: int | None = free(
        None, "tokens between checkpoints; 0: only at the end (default: --tokens / 10)"
    )
    keep: int = free(2, "how many of the newest checkpoints to keep, besides the best", least=1)
    wandb: bool = free(False, "log to Weights & Biases too (WANDB_MODE=offline works)")
    dry_run: bool = free(False, "print what the run would take, then exit")


@dataclass(frozen=True)
class DataConfig:
    """What a run reads."""

    data: str | None = free(
        None, "store from prepare.py, or a mixture: a=0.7,b=0.3 (default: the embedded corpus)"
    )
    tokenizer: str | None = flag(
        None, "pd4k, bytes, gpt2, FILE.tiktoken or tokenizer.model (default: the store's, or pd4k)"
    )
    seq_len: int | None = flag(None, "tokens per row (default: by --size)", least=8, below=2**31)
