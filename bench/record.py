"""What all benches share: the machine they describe, their flags, their records and summaries.

A record is one JSON line in results/: what was measured, and on what. Records are added, never
edited. Those of a GPU are kept apart, in results/gpu-NAME.jsonl. bench/gpu.sh sends records to
another folder (OUT) and names the commit (COMMIT) where there is no git.

    python bench/record.py                              # this machine, as a record describes it
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for every bench: what is measured

from support.base.runtime import ROOT
from support.run.folder import provenance

RESULTS = Path(os.environ.get("OUT") or ROOT / "results")


def surroundings(device: str = "cpu") -> dict:
    """When, on what and with what a bench ran.

    Raises: ValueError for cuda where torch sees no GPU
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here, choose --device cpu")
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "commit": os.environ.get("COMMIT") or provenance()["commit"],
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.*)", text, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def command_line(docstring: str, *, turns: int | None = None) -> argparse.ArgumentParser:
    """The flags that all benches have.

    Args: turns  the default of --turns; None where a bench has no such flag
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    if turns:
        parser.add_argument("--turns", type=int, default=turns, help=f"of each variant ({turns})")
    parser.add_argument("--record", action="store_true", help="add to results/")
    return parser


def chosen_of(names: list[str], known: Collection[str]) -> list[str]:
    """The names that an argument of any number gave, or all.

    Raises: ValueError for one that is not known: argparse cannot have choices where none is named
    """
    for name in names:
        if name not in known:
            raise ValueError(f"{name} is unknown: choose from {', '.join(known)}")
    return names or list(known)


def recorder(name: str, args: argparse.Namespace, **about: object) -> Callable[[dict], None]:
    """A function that prints figures, and adds them to results/NAME.jsonl if --record is given.

    The commit is read now: the first record makes the working tree dirty.
    """
    machine = surroundings(args.device) | {"bench": name} | about
    print(f"{machine['hardware']}, {machine['threads']} threads")

    def keep(figures: dict) -> None:
        print(in_words(figures), flush=True)
        if args.record:
            path = RESULTS / f"{'gpu-' if machine['device'] == 'cuda' else ''}{name}.jsonl"
            with path.open("a") as file:  # closed at once, as the next variant may be killed
                file.write(json.dumps(machine | figures) + "\n")
            print(f"recorded in {path}", file=sys.stderr, flush=True)

    return keep


def in_words(figures: dict) -> str:
    """Figures side by side; those that belong together indented, on lines of their own.

    Example: {"size": "nano", "plain": {"ms": 2, "gb": 3}} -> "size nano\\n  plain: ms 2, gb 3"
    """
    side_by_side, below = [], []
    for name, value in figures.items():
        if isinstance(value, dict):
            below.append(f"{name}: {in_words(value)}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            below += [f"{name}: {in_words(part)}" for part in value]
        else:
            side_by_side.append(f"{name} {value}")
    below = [part.replace("\n", "\n  ") for part in below]
    return "\n  ".join([", ".join(side_by_side), *below])


def min_median_max(values: Sequence[float], digits: int = 4) -> list[float]:
    return [significant(f(values), digits) for f in (min, statistics.median, max)]


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """First quartile, median, third quartile; three times the value if there is only one."""
    values = values if len(values) > 1 else [*values, *values]
    return [significant(q, digits) for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [value / other for value, other in zip(values, others, strict=True)]


def significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


if __name__ == "__main__":
    print(json.dumps(surroundings("cuda" if torch.cuda.is_available() else "cpu"), indent=1))
