"""A run's log.jsonl read back: how it was started, a column for each number of its steps, and sums.

support/run/folder.py writes the log and reads its lines. Lines that are damaged, or lack a
field that every report needs, are left out and counted.
"""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.run.folder import read_log

# What a run spends, and a comparison may hold fixed
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
NEEDED = {
    "run": {"config", "argv"},
    "train": {"step", "loss", "ms", "consumed_tokens", "real_tokens", "layer_tokens", "flops"},
    "eval": {"step", "consumed_tokens", "val_bpb", "targets", "last"},
    "stage": {"step", "owners"},
    "sample": {"text"},
}


@dataclass(frozen=True)
class RunLog:
    """The log of one run, and the sums and shares that follow from it."""

    folder: Path
    starts: list[dict]  # the "run" lines: one for each time the run was started or resumed
    steps: dict[str, np.ndarray]  # of the "train" lines: name -> (n,) float64; and "seconds" so far
    evals: list[dict]
    stages: list[dict]  # of --pseudo
    sample: str | None
    unread: int  # damaged lines

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        """{"group.field": value}, as of the last start."""
        return self.starts[-1]["config"]

    @property
    def steps_done(self) -> int:
        return len(self.column("step"))

    @property
    def final(self) -> dict | None:
        """The last evaluation, on as much held-out text as --final-eval-tokens says."""
        return next((line for line in reversed(self.evals) if line["last"]), None)

    @property
    def on_the_way(self) -> list[dict]:
        """The evaluations before it, all on the same text; without any, the last one."""
        return [line for line in self.evals if not line["last"]] or self.evals

    def column(self, name: str) -> np.ndarray:
        """(n,) a number of each step; NaN where the step did not log it."""
        missing = np.full(len(self.steps.get("step", ())), math.nan)
        return self.steps.get(name, missing)

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())

    def last(self, name: str) -> float:
        return float(self.column(name)[-1]) if self.steps_done else math.nan

    def median(self, name: str) -> float:
        values = self.column(name)
        return float(np.nanmedian(values)) if self.has(name) else math.nan

    def spent(self, step: float = math.inf) -> dict[str, float]:
        """What the run spent until a step, or in all, by the names of UNITS."""
        done = int(np.searchsorted(self.column("step"), step, side="right"))
        if done == 0:
            return dict.fromkeys(UNITS, 0.0)
        return {name: float(self.column(name)[done - 1]) for name in UNITS}

    def step_times(self) -> dict[str, float]:
        """In ms: the bounds of the fastest and the slowest tenth, the median, the longest."""
        quantiles = {"p10": 0.1, "median": 0.5, "p90": 0.9, "longest": 1.0}
        ms = self.column("ms")
        return {
            name: float(np.quantile(ms, q)) if len(ms) else math.nan
            for name, q in quantiles.items()
        }

    def waiting_share(self) -> float:
        """The share of the steps' time in which they waited for data."""
        seconds = self.spent()["seconds"]
        return float(np.nansum(self.column("data_ms"))) / 1e3 / seconds if seconds else math.nan

    def full_layer_tokens(self) -> np.ndarray:
        """(n,) the layer-tokens of each step if every layer computed every position."""
        real = np.diff(self.column("real_tokens"), prepend=0.0)
        return self.settings["model.layers"] * real / (1 - self.column("padding_share"))

    def dropped_shares(self) -> np.ndarray:
        """(n,) the share of its positions in all layers that a step did not compute."""
        computed = np.diff(self.column("layer_tokens"), prepend=0.0)
        shares = 1 - computed / self.full_layer_tokens()
        return shares.clip(min=0).round(4)  # repeated context counts as computed, not as tokens

    def dropped(self) -> float:
        """The same of the whole run."""
        if not self.steps_done:
            return math.nan
        return max(1 - self.last("layer_tokens") / float(np.nansum(self.full_layer_tokens())), 0.0)

    def provenance(self) -> dict[str, Any]:
        """Commit, versions, hardware: the fields of the last start besides its settings."""
        left_out = ("config", "bytes", "model_size", "resumed_at")
        return {name: value for name, value in self.starts[-1].items() if name not in left_out}


def read_run(folder: Path) -> RunLog:
    """Read the log in the folder of a run.

    Raises: ValueError for a folder without one
    Cost:   13 µs a step on one core
    """
    if not (folder / "log.jsonl").is_file():
        raise ValueError(f"{folder} holds no log.jsonl: name the folder of a run")
    lines: dict[str, list[dict]] = {event: [] for event in NEEDED}
    columns: dict[str, array] = {}
    steps = unread = 0
    for line in read_log(folder):
        event = line.pop("event")
        if event == "torn" or not NEEDED.get(event, set()) <= line.keys():
            unread += 1
        elif event == "train":
            for name in line.keys() - columns.keys():
                columns[name] = array("d", [math.nan]) * steps
            for name, column in columns.items():
                value = line.get(name)
                column.append(value if isinstance(value, int | float) else math.nan)
            steps += 1
        elif event in NEEDED:
            lines[event].append(line)
    if not lines["run"]:
        raise ValueError(f"{folder}/log.jsonl does not say how its run was started: no report")
    numbers = {name: np.frombuffer(column) for name, column in columns.items()}
    if steps:
        numbers["seconds"] = np.nancumsum(numbers["ms"]) / 1e3
    return RunLog(
        folder=folder,
        starts=lines["run"],
        steps=numbers,
        evals=lines["eval"],
        stages=lines["stage"],
        sample=lines["sample"][-1]["text"] if lines["sample"] else None,
        unread=unread,
    )


def summary(log: RunLog) -> dict[str, Any]:
    """Every number of a run's page, for --json."""
    return {
        "folder": str(log.folder),
        "commands": [start["argv"] for start in log.starts],
        "finished": log.final is not None,
        "steps": log.steps_done,
        "spent": log.spent(),
        "layer_tokens": log.last("layer_tokens"),
        "dropped_share": log.dropped(),
        "final": log.final,
        "evaluations": [{**log.spent(line["step"]), **line} for line in log.evals],
        "step_ms": log.step_times(),
        "waiting_share": log.waiting_share(),
        "tokens_per_s": log.median("tokens_per_s"),
        "mfu": log.median("mfu"),
        "stages": log.stages,
        "resumed_at_steps": [start["resumed_at"] for start in log.starts[1:]],
        "lines_left_out": log.unread,
        "sample": log.sample,
        "settings": log.settings,
        "provenance": log.provenance(),
    }
