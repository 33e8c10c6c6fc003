"""A configuration (support/settings.py) -> its command line, and the README's table of it."""

import argparse
import math
import types
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from support.runtime import Parser
from support.settings import flag_of


def whole_number(text: str) -> int:
    """A count: 2000000, 2e6, 2M, 1.5B."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if unit != 1 else text) * unit
    except ValueError:
        number = -1.0
    if not 0 <= number < 2**63 or number != int(number):
        raise argparse.ArgumentTypeError(
            f"{text} is not a whole number, 0 or more, such as 4096, 2e6, 1.5B"
        )
    return int(number)


def real_number(text: str) -> float:
    """A finite number: nan would pass every comparison below, and inf is nobody's intention."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a number such as 0.1 or 3e-4")
    return number


def parser_of(config_class: type, prog: str, description: str) -> argparse.ArgumentParser:
    """The command line: a group of flags for each part, a flag for each setting.

    What is not given is absent from what it parses, {"group.field": value}; defaults are the
    dataclasses' business.
    """
    parser = Parser(prog=prog, description=description)
    for part in fields(config_class):
        settings = get_type_hints(config_class)[part.name]
        group = parser.add_argument_group(part.name)
        for item in fields(settings):
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
        for item in fields(get_type_hints(config_class)[part.name]):
            name = flag_of(config_class, part.name, item.name)
            choices = item.metadata.get("choices")
            allowed = f": {', '.join(choices)}" if choices else ""
            rows.append(
                f"| `{name}` | {shown_default(item.default)} | {item.metadata['help']}{allowed} |"
            )
    return "\n".join(rows)


def shown_default(default: Any) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):  # not by a table of {True: "on"}: 1.0 == True
        return "on" if default else "off"
    return str(default)
