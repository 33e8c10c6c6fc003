"""JSON that somebody else may have written: read within limits, and compared with a shape.

A shape says what a value has to be:

    int, float, str, int | None     of this type; a float may be a whole number, an int no bool
    At(1, 2**31)                    a whole number within these bounds, the last one included
    Limited(float, {"above": 0})    of this type and within these limits
    {"step": int, "best": float}    an object with these keys at least
    Each(int)                       an object with any keys, whose values all have a shape
    [int]                           a list whose values all have a shape

A shape does not say what the values mean, nor whether they agree with each other.
"""

import json
from collections.abc import Mapping
from operator import contains, ge, gt, le, lt
from pathlib import Path
from typing import Any, NamedTuple, get_args

MOST_BYTES = 64 << 20  # of a file; a run's config.json has some 3,000
MOST_VOCABULARY = 1 << 24  # tokens; the largest published ones have some 2^18
ALSO = {float: (float, int), list: (list, tuple)}  # what else is of a type here
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
WORDS |= {dict: "an object", list: "a list", type(None): "null"}


LIMITS = {  # in words, and whether (limit, value) is within it
    "choices": ("one of", contains),
    "least": ("at least", le),
    "above": ("above", lt),
    "most": ("at most", ge),
    "below": ("below", gt),
}


class Limited(NamedTuple):
    """A value of one type, within those of the limits above that are given."""

    kind: type
    limits: Mapping[str, Any]


def At(least: int = 0, most: int = 2**62) -> Limited:
    """A whole number from `least` to `most`."""
    return Limited(int, {"least": least, "most": most})


class Each(NamedTuple):
    """An object whose values are all of one shape."""

    shape: object


def read_json(path: Path, shape: object, remedy: str) -> Any:
    """The content of a file.

    Args:   remedy what the user can do about a file that is not as it should be
    Raises: FileNotFoundError; ValueError, in one line, for anything but JSON of this shape
    """
    size = path.stat().st_size
    try:
        if size > MOST_BYTES:
            raise ValueError(f"{size:,} bytes, {MOST_BYTES:,} are allowed")
        value = parsed(path.read_bytes())
        if wrong := mismatch(value, shape):
            raise ValueError(wrong)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
    return value


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError too for one that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def mismatch(value: object, shape: object, name: str = "") -> str:
    """Where a value first differs from a shape; "" if it does not.

    Example: mismatch({"clock": {"step": "x"}}, {"clock": {"step": int}}) is
             "clock.step is 'x', allowed is a whole number"
    """
    kind, given = shape if isinstance(shape, Limited) else Limited(shape, {})
    if isinstance(shape, dict | list | Each):
        kind = list if isinstance(shape, list) else dict
    kinds = get_args(kind) or (kind,)
    limits = {name: given[name] for name in LIMITS if given.get(name) is not None}
    fits = any(is_of(value, kind) for kind in kinds)
    if not fits or not all(LIMITS[name][1](limit, value) for name, limit in limits.items()):
        wanted = " or ".join(WORDS.get(kind, kind.__name__) for kind in kinds)
        wanted = ", ".join([wanted, *(f"{LIMITS[n][0]} {limit}" for n, limit in limits.items())])
        return f"{name or 'the content'} is {shortened(value)}, allowed is {wanted}"
    values = dict(enumerate(value)) if isinstance(shape, list) else value
    if isinstance(shape, Each | list):
        shape = dict.fromkeys(values, shape[0])
    if isinstance(shape, dict):
        for key, inner in shape.items():
            if key not in values:
                return f"{dotted(name, key)} is missing"
            if wrong := mismatch(values[key], inner, dotted(name, key)):
                return wrong
    return ""


def is_of(value: object, kind: type) -> bool:
    """Whether a value is of a type; a bool is not a number here."""
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, ALSO.get(kind, kind))


def shortened(value: object) -> str:
    """A stranger's value in one line of at most 40 characters, its escapes shown."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def dotted(name: str, key: object) -> str:
    """Example: clock.step, optim.lr"""
    key = key if isinstance(key, str) and key.isprintable() and len(key) < 80 else shortened(key)
    return f"{name}.{key}" if name else str(key)
