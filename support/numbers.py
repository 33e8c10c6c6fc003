"""Numbers as people write them on a command line, and as messages show them.

    read    whole_number("2M") == 2_000_000, bytes_of("--offload-budget", "6GiB") == 6442450944
    show    short(61440) == "61.4 K", several(2500, "step") == "2,500 steps"

A number that cannot be read is refused by argparse, or by a ValueError that names the flag.
"""

import argparse
import math
import re
from datetime import timedelta

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
    number = int(text) if text.isdecimal() else number_of(text)  # a float is not exact
    if not (least <= number < 2**63 and number == int(number)):
        example = f"a whole number from {least} to 2^63, such as 4096, 2e6 or 1.5B"
        raise argparse.ArgumentTypeError(f"{text!r} is not {example}")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.1 or 3e-4")
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
