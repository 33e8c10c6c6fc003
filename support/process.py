"""One process: how it ends, parses its command line, hears signals, uses memory, writes numbers.

    python train.py --oops      error: unrecognized arguments: --oops (see --help)

`exit_cleanly(main)` prints a user's mistake as one line on stderr and exits with status 2. `Parser`
suggests the word that was meant, as in `did you mean --ltd-start?`. `StopSignal` remembers a signal
until the step is over.
"""

import argparse
import ctypes
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]  # the repository
MISTAKES = (ValueError, OSError)  # the user's mistakes: reported in one line, exit status 2

# ---- how a command ends


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run a command; report a user's mistake as one line on stderr, with exit status 2.

    Rank 0 prints the line. An error that only another rank met appears in torchrun's summary, to
    which `record` passes it. torchrun's parent process prints that summary, with a traceback of its
    launcher, whenever a rank fails.
    """
    try:
        status = record(main)() or 0
        if dist.is_initialized():
            dist.barrier()  # otherwise a rank that still communicates with this one would fail
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader stopped, for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except MISTAKES as error:
        if int(os.environ.get("RANK", 0)) == 0:
            # With tqdm's write the line does not run into a progress bar.
            tqdm.write(f"error: {one_line(error)}", file=sys.stderr)
        else:
            time.sleep(0.5)  # torchrun kills rank 0 soon after this one exits: let it print first
        status = 2
    sys.stdout.flush()
    if dist.is_initialized():
        os._exit(status)  # during an ordinary exit, gloo's threads may abort the process
    sys.exit(status)


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(" ".join(str(error).split()))


def printable(text: str, kept: str = "") -> str:
    """Escape control characters, because text from a stranger's file could control the terminal.

    Args: kept characters to leave as they are, such as line ends
    """
    safe = (char if char in kept or char.isprintable() else ascii(char)[1:-1] for char in text)
    return "".join(safe)


# ---- its command line


class Parser(argparse.ArgumentParser):
    """A parser that raises one-line errors for `exit_cleanly` and does not print the usage."""

    def __init__(self, **options: object):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        hint = "see --help"
        if wrong := re.search(r"arguments: (--[\w-]+)|invalid choice: '([^']*)'", message):
            known = [w for a in self._actions for w in (*a.option_strings, *(a.choices or ()))]
            if meant := get_close_matches(wrong[1] or wrong[2], map(str, known), 1, cutoff=0.75):
                hint = f"did you mean {meant[0]}?"
        raise ValueError(f"{message} ({hint})")


# ---- signals

# Sent by schedulers, by Ctrl-C, by a terminal that closes, and by Slurm before the time limit.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Remember a signal until the step is over; under nohup, SIGHUP stays ignored."""

    def __init__(self):
        self.number = 0  # of the last signal; 0: none
        self.handlers = {n: signal.getsignal(n) for n in STOPPING}

    def __enter__(self) -> "StopSignal":
        for number, handler in self.handlers.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self.remember)
        return self

    def remember(self, number: int, _frame: object) -> None:
        self.number = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


# ---- memory
# torch keeps the GPU memory that it frees. On a CPU, glibc returns much of it to the kernel, and
# the next step gets it back zeroed, one page fault at a time, which takes an eighth of a small step
# (docs/step.md).

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20  # bytes, glibc's maximum
NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Make glibc keep the memory that this process frees; do nothing without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, LARGEST_KEPT)


def host_free() -> int | None:
    """Return the bytes of host memory available without swapping; None if unknown."""
    return bytes_in("/proc/meminfo", "MemAvailable")


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes, of the GPU or of the host; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return bytes_in("/proc/self/status", "VmHWM") or 0


def bytes_in(file: str, key: str) -> int | None:
    with suppress(FileNotFoundError):
        if line := re.search(rf"{key}:\s*(\d+) kB", Path(file).read_text()):
            return int(line[1]) * 1024
    return None


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
