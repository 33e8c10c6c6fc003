"""JSON that somebody else may have written: read within limits, and compared with a shape.

A shape says what a value has to be:

    int, float, str, int | None     of this type; a float may be a whole number, an int no bool
    At(1, 2**31)                    a whole number within these bounds, the last one included
    {"step": int, "best": float}    an object with these keys at least
    Each(int)                       an object with any keys, whose values all have a shape
    [int]                           a list whose values all have a shape

A shape does not say what the values mean, nor whether they agree with each other.
"""

import json
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args

MOST_BYTES = 64 << 20  # of a file; a run's config.json has some 3,000
MOST_VOCABULARY = 1 << 24  # tokens; the largest published ones have some 2^18
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class At(NamedTuple):
    """A whole number from `least` to `most`."""

    least: int = 0
    most: int = 2**62


class Each(NamedTuple):
    """An object whose values are all of one shape."""

    shape: object


def read_json(path: Path, shape: object, remedy: str) -> Any:
    """The content of a file.

    Args:   remedy what the user can do about a file that is not as it should be
    Raises: FileNotFoundError; ValueError, in one line, for anything but JSON of this shape
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, {MOST_BYTES:,} are allowed: {remedy}")
    try:
        value = parsed(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from None
    if wrong := mismatch(value, shape):
        raise ValueError(f"{path} is damaged ({wrong}): {remedy}")
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
             "clock.step is 'x', not a whole number"
    """
    if isinstance(shape, dict | Each):
        if not isinstance(value, dict):
            return is_not(value, name, "an object")
        shapes = dict.fromkeys(value, shape.shape) if isinstance(shape, Each) else shape
        for key, inner in shapes.items():
            if key not in value:
                return f"{dotted(name, key)} is missing"
            if wrong := mismatch(value[key], inner, dotted(name, key)):
                return wrong
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list | tuple):
            return is_not(value, name, "a list")
        wrongs = (mismatch(item, shape[0], dotted(name, n)) for n, item in enumerate(value))
        return next(filter(None, wrongs), "")
    if isinstance(shape, At):
        if is_of(value, int) and shape.least <= value <= shape.most:
            return ""
        return is_not(value, name, f"a whole number from {shape.least:,} to {shape.most:,}")
    kinds = get_args(shape) if isinstance(shape, UnionType) else (shape,)
    if any(is_of(value, kind) for kind in kinds):
        return ""
    return is_not(value, name, " or ".join(WORDS.get(k, k.__name__) for k in kinds))


def is_of(value: object, kind: type) -> bool:
    """Whether a value is of a type; a bool is not a number here."""
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)


def is_not(value: object, name: str, wanted: str) -> str:
    return f"{name or 'the content'} is {shortened(value)}, not {wanted}"


def shortened(value: object) -> str:
    """A stranger's value in one line of at most 40 characters, its escapes shown."""
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def dotted(name: str, key: object) -> str:
    """Example: clock.step, optim.lr"""
    key = key if isinstance(key, str) and key.isprintable() and len(key) < 80 else shortened(key)
    return f"{name}.{key}" if name else str(key)
