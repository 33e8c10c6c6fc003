"""What every bench says of its machine, how it sums up its numbers, and where its records go.

A record is one JSON line in results/: what was measured, and what it was measured with. Records are
added, never edited. Those of a GPU are kept apart, in results/gpu-NAME.jsonl. bench/gpu.sh has them
written elsewhere (OUT), and says which commit this is (COMMIT) where there is no git.

    python bench/record.py                              # this machine, as a record describes it
"""

import datetime
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from support.base.runtime import ROOT
from support.run.folder import provenance

RESULTS = Path(os.environ.get("OUT") or ROOT / "results")


def surroundings(device: str = "cpu") -> dict:
    """When, on what and with what a bench ran. `hardware` is the device's name, a CPU's with cores.

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
    listed = (
        re.findall(r"^model name\s*: (.*)", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    )
    name = listed[0] if listed else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def append(name: str, record: dict) -> None:
    """Add a record to results/NAME.jsonl, or to results/gpu-NAME.jsonl if a GPU was measured."""
    on_gpu = record.get("device") == "cuda"
    path = RESULTS / f"{'gpu-' if on_gpu else ''}{name}.jsonl"
    with path.open("a") as file:  # closed at once: what comes next may be killed
        file.write(json.dumps(record) + "\n")
    print(f"recorded in {path}", file=sys.stderr, flush=True)


def min_median_max(values: Sequence[float], digits: int = 4) -> list[float]:
    """The spread of a few numbers, rounded to so many significant digits."""
    return [significant(f(values), digits) for f in (min, statistics.median, max)]


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """First quartile, median, third quartile, rounded to so many significant digits."""
    return [significant(q, digits) for q in statistics.quantiles(values, n=4, method="inclusive")]


def significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


class Figures(dict):
    """The figures of one record, each printed as it comes in."""

    def add(self, name: str, value: object, target: str = "") -> None:
        """Keep a value, of several the spread; `target` is what it is hoped to be."""
        if isinstance(value, (list, np.ndarray)):
            value = min_median_max(value)
        self[name] = value
        print(f"  {name:32} {value}" + (f"   target {target}" if target else ""), flush=True)


if __name__ == "__main__":
    print(json.dumps(surroundings("cuda" if torch.cuda.is_available() else "cpu"), indent=1))
