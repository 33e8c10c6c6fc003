"""Numbers as people write them on a command line, and as messages and reports show them.

Functions that argparse calls raise its error, with an example of what is allowed.
"""

import argparse
import math
import re

PREFIXES = ("", "K", "M", "B", "T", "P", "E")
BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


# ---- reading


def number_of(text: str) -> float:
    """The value of 2000000, 2e6, 2M or 1.5B; nan if the text is not a number."""
    power = {"K": "e3", "M": "e6", "B": "e9", "T": "e12"}.get(text[-1:].upper(), "")
    try:
        return float(text[:-1] + power if power else text)  # 2.05e6 is whole, 2.05 * 1e6 is not
    except ValueError:
        return math.nan


def _require(allows: bool, text: str, allowed: str) -> None:
    if not allows:
        raise argparse.ArgumentTypeError(f"{text} is not {allowed}")


def whole_number(text: str, least: int = 0) -> int:
    """A whole number: 2000000, 2e6, 2M, 1.5B."""
    number = number_of(text)
    is_whole = least <= number < 2**63 and number == int(number)
    _require(is_whole, text, f"a whole number, {least} or more, such as 4096, 2e6, 1.5B")
    return int(number)


def count(text: str) -> int:
    """A whole number above 0."""
    return whole_number(text, least=1)


def real_number(text: str) -> float:
    """A finite number without a unit: nan would pass every limit, and nobody means inf."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    _require(math.isfinite(number), text, "a number such as 0.1 or 3e-4")
    return number


def bytes_of(flag: str, text: str) -> int:
    """The number of bytes in a flag's value, 6GiB or 800MB; ValueError names the flag."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", text)
    if match is None or match[2] not in BYTES or float(match[1]) == 0:
        raise ValueError(f"{flag} {text}: write an amount such as 6GiB, 800MB or auto")
    return int(float(match[1]) * BYTES[match[2]])


# ---- writing


def short(value: float, unit: str = "", digits: int = 3) -> str:
    """A number to three digits. 10^9 is B for tokens, and G with a unit.

    Example:  61440 -> "61.4 K", 1.23e12 -> "1.23 T", 950 -> "950"; 2.5e9, "FLOP" -> "2.50 GFLOP"
    """
    if not math.isfinite(value):
        return ""
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value /= 1000
        power += 1
    whole = len(str(int(abs(value))))
    text = f"{value:.{max(digits - whole, 0) if power else 0}f}"
    prefix = "G" if unit and PREFIXES[power] == "B" else PREFIXES[power]
    return f"{text} {prefix}{unit}".strip()


def several(number: int, what: str) -> str:
    """Example: 1, "seed" -> "1 seed"; 2500, "step" -> "2,500 steps" """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Example: 8.24 -> "8.2 s", 754 -> "12 min 34 s", 7500 -> "2 h 5 min", 9e4 -> "1 d 1 h" """
    if not math.isfinite(seconds):
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24:,} d {hours % 24} h"
