"""One process: how it ends, parses its command line, hears signals, and uses memory.

    python train.py --oops      error: unrecognized arguments: --oops (see --help)

`exit_cleanly(main)` prints a user's mistake as one line on stderr and exits with status 2. `Parser`
suggests the word that was meant, as in `did you mean --ltd-start?`. `StopSignal` remembers a signal
until the step is over.
"""

import argparse
import ctypes
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

# Every command imports this file before any other of ours that Windows cannot import.
if sys.platform == "win32":
    sys.exit("error: Windows lacks the file locks and signals that this code needs: use WSL")

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]  # the repository
MISTAKES = (ValueError, OSError, MemoryError)  # the user's: one line, exit status 2

# ---- how a command ends


def exit_cleanly(main: Callable[[], int | None]) -> None:
    """Run a command; report a user's mistake as one line on stderr, with exit status 2.

    Rank 0 prints the line. An error that only another rank met appears in torchrun's summary, to
    which `record` passes it. torchrun's parent process prints that summary, with a traceback of its
    launcher, whenever a rank fails.
    """
    try:
        accept_any_text()
        status = record(main)() or 0
        sys.stdout.flush()
        if dist.is_initialized():
            dist.barrier()  # otherwise a rank that still communicates with this one would fail
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader stopped, for example `| head`
        status = 128 + signal.SIGPIPE
    except MISTAKES as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print_line(f"error: {one_line(error)}", sys.stderr)
        else:
            # torchrun kills rank 0 soon after this one exits: let it start, and print first.
            time.sleep(10 if "TORCHELASTIC_RUN_ID" in os.environ else 0.5)
        status = 2
    print_line("", sys.stdout, end="")  # what is still in the buffer
    if dist.is_initialized() or status == 130:
        # An ordinary exit waits for an interrupted pool's threads, perhaps for ever, and gloo's
        # threads may abort the process in it.
        os._exit(status)
    sys.exit(status)


def accept_any_text() -> None:
    """Let stdout and stderr escape characters that they cannot encode, and replace closed ones."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell's `>&-`
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")


def print_line(line: str, stream: TextIO, end: str = "\n") -> None:
    """Print a line above the progress bar. If nobody can read it, the command goes on in silence.

    What is printed must not decide whether a run is saved.
    """
    try:
        tqdm.write(line, stream, end)
        stream.flush()
    except OSError:  # the reader stopped, the terminal was closed, or the file's disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:  # without a name: of print
        return printable(f"{error.filename or 'standard output'}: {error.strerror}")
    return printable(" ".join(str(error).split()))


def printable(text: str, kept: str = "") -> str:
    """Escape control characters, because text from a stranger's file could control the terminal.

    Args: kept characters to leave as they are, such as line ends
    """
    safe = (char if char in kept or char.isprintable() else ascii(char)[1:-1] for char in text)
    return "".join(safe)


# ---- its command line


class Parser(argparse.ArgumentParser):
    """A parser that raises one-line errors for `exit_cleanly` and does not print the usage.

    Args: other_names {what another program calls a flag: our flag}, for hints
    """

    def __init__(self, other_names: dict[str, str] | None = None, **options: object):
        super().__init__(allow_abbrev=False, **options)
        self.other_names = other_names or {}

    def error(self, message: str) -> None:
        hint = "see --help"
        pattern = r"(?:argument (\S+): [a-z ]+:? '|unrecognized arguments: )([^' ]+)"
        if wrong := re.match(pattern, message):
            hint = self.hint(wrong[1], wrong[2].partition("=")[0])
        raise ValueError(f"{message} ({hint})")

    def hint(self, flag: str | None, word: str) -> str:
        """Say what a wrong word probably means; a flag if it was read as its value."""
        flags, known = self._option_string_actions, {}
        if (flag is None or "/" in flag) and not word.startswith("-"):  # --pack/--no-pack
            return "a value is one word, such as 50K; a switch such as --pack takes none"
        if ours := self.other_names.get(word.replace("_", "-")):
            return f"did you mean {ours}?"
        # If several flags have the same choice, the one before the word comes last and stays.
        for name, action in sorted(flags.items(), key=lambda item: item[0] == flag):
            known[name] = name
            known |= {str(value): f"{name} {value}" for value in action.choices or ()}
        if meant := get_close_matches(word, known, 1, cutoff=0.75):
            return f"did you mean {known[meant[0]]}?"
        return f"did you mean --resume --out {word}?" if flag == "--resume" else "see --help"


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
# the next step gets it back zeroed, one page fault at a time: an eighth of a small step.

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
