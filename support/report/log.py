"""A run's log.jsonl read back: how it was started, a column for each number of its steps, and more.

Read in one pass, line by line. A line that a kill tore off, or that says too little, is left out
and counted; a field that an older trainer did not log is NaN.

    python -m support.run_log runs/gpt-nano-1              # what its log holds
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

# What a comparison may hold fixed, by its name here
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
NEEDED = {"run": {"config"}, "train": {"step", "consumed_tokens", "loss"}}
NEEDED |= {"eval": {"step", "consumed_tokens", "val_bpb"}, "sample": {"text"}, "stage": {"step"}}
BLOCK = 1 << 19  # characters that are decoded together


@dataclass(frozen=True)
class RunLog:
    """What a log says of its run."""

    folder: Path
    starts: list[dict]  # the "run" lines: one for each time that it was started or went on
    steps: dict[str, np.ndarray]  # of the "train" lines: name -> (n,) float64
    evals: list[dict]
    stages: list[dict]  # of --pseudo
    sample: str | None
    unread: int  # lines that were left out

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        """{"group.field": value}, as the run last went on; {} where the log does not say."""
        return self.starts[-1]["config"] if self.starts else {}

    @property
    def steps_done(self) -> int:
        return len(self.column("step"))

    def column(self, name: str) -> np.ndarray:
        """(n,) that number of each step."""
        if name == "seconds":
            return self.seconds
        missing = np.full(len(self.steps.get("step", ())), math.nan)
        return self.steps.get(name, missing)

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())

    @cached_property
    def seconds(self) -> np.ndarray:
        """(n,) of all steps so far; evaluations and checkpoints took more."""
        return np.nancumsum(self.column("ms")) / 1e3

    def per_step(self, name: str) -> np.ndarray:
        """(n,) what each step added to a number that the log sums up."""
        return np.diff(self.column(name), prepend=0.0)

    def spent(self, step: int | None = None) -> dict[str, float]:
        """What was spent until a step, or in all, by the names of UNITS; NaN if not in the log."""
        steps = self.column("step")
        last = len(steps) if step is None else int(np.searchsorted(steps, step, side="right"))
        if last == 0:
            return dict.fromkeys(UNITS, math.nan)
        return {name: float(self.column(name)[last - 1]) for name in UNITS}

    @property
    def final(self) -> dict | None:
        """The last evaluation, of as much held-out text as --final-eval-tokens says."""
        return next((line for line in reversed(self.evals) if line.get("last")), None)

    @property
    def on_the_way(self) -> list[dict]:
        """Evaluations of the same text; only where there are none, the last of all."""
        return [line for line in self.evals if not line.get("last")] or self.evals


def read_run(folder: Path) -> RunLog:
    """Read the log in the folder of a run.

    Raises: ValueError for a folder without one
    Cost:   5 µs a step on one core, most of it in the JSON decoder
    """
    if not (folder / "log.jsonl").is_file():
        raise ValueError(f"{folder} holds no log.jsonl: name the folder of a run")
    found: dict[str, list[dict]] = {event: [] for event in NEEDED}
    parts: list[tuple[list[str], np.ndarray]] = []  # names, (steps, names)
    unread = 0
    for block in blocks_of(folder / "log.jsonl"):
        for (event, *names), same in groupby(block, kind_of):
            lines = list(same)
            if event not in NEEDED:
                unread += len(lines) if event is None else 0
            elif not NEEDED[event] <= set(names):
                unread += len(lines)
            elif event == "train":
                values = numbers(lines)
                told = np.isfinite(values[:, names.index("step")])
                parts.append((names, values[told]))
                unread += len(lines) - int(told.sum())
            else:
                told = [line for line in lines if None not in map(line.get, NEEDED[event])]
                found[event] += told
                unread += len(lines) - len(told)
    if unread and not parts and not found["run"]:
        raise ValueError(f"{folder}/log.jsonl: no line of it can be read: it is no log of train.py")
    return RunLog(
        folder=folder,
        starts=found["run"],
        steps=columns_of(parts),
        evals=found["eval"],
        stages=found["stage"],
        sample=found["sample"][-1]["text"] if found["sample"] else None,
        unread=unread,
    )


def blocks_of(file: Path) -> Iterator[list]:
    """What the lines of a JSON file hold, many at a time; None for one that is torn."""
    decode = json.JSONDecoder().decode
    look = {"unit": "B", "unit_scale": True, "disable": None, "delay": 1, "leave": False}
    with (
        file.open(encoding="utf-8", errors="replace") as opened,
        tqdm(total=file.stat().st_size, desc=str(file), **look) as bar,
    ):
        while lines := opened.readlines(BLOCK):
            bar.update(sum(map(len, lines)))
            try:
                block = decode(f"[{','.join(lines)}]")
                if len(block) == len(lines):  # two torn lines may be one good value together
                    yield block
                    continue
            except (ValueError, RecursionError):
                pass
            yield [decoded(line, decode) for line in lines if line.strip()]


def decoded(line: str, decode: Callable[[str], Any]) -> Any:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return None


def kind_of(line: Any) -> tuple[str | None, ...]:
    """The event of a line, which is taken out of it, and the names of what else it holds."""
    event = line.pop("event", None) if isinstance(line, dict) else None
    return (event, *line) if isinstance(event, str) else (None,)


def numbers(lines: list[dict]) -> np.ndarray:
    """(lines, names) float64, where all have the same names; NaN for what is no number."""
    shape = (len(lines), len(lines[0]))
    values = chain.from_iterable(map(dict.values, lines))
    try:
        return np.fromiter(values, np.float64, shape[0] * shape[1]).reshape(shape)
    except (TypeError, ValueError):
        values = chain.from_iterable(map(dict.values, lines))
        kept = [value if isinstance(value, int | float) else math.nan for value in values]
        return np.array(kept, dtype=np.float64).reshape(shape)


def columns_of(parts: list[tuple[list[str], np.ndarray]]) -> dict[str, np.ndarray]:
    """name -> (n,) of all parts; NaN where one does not have it."""
    return {
        name: np.concatenate(
            [
                values[:, names.index(name)] if name in names else np.full(len(values), math.nan)
                for names, values in parts
            ]
        )
        for name in dict.fromkeys(name for names, _ in parts for name in names)
    }


def main() -> None:
    log = read_run(Path(sys.argv[1]))
    print(f"{log.steps_done} steps, {len(log.evals)} evaluations, {log.unread} lines left out")
    for name in sorted(log.steps):
        column = log.steps[name]
        if log.has(name):
            print(f"{name:24} {np.nanmin(column):16.6g} to {np.nanmax(column):.6g}")


if __name__ == "__main__":
    main()


# ---- run numbers
#
# The numbers of one run, made of its log: totals, shares, times of steps.


def summary(log: RunLog, recipe: str) -> dict[str, Any]:
    """Every number of the page, for --json; None for what the log does not say."""
    settings, times = log.settings, log.column("ms")
    evals = [{**log.spent(line["step"]), **line} for line in log.evals]
    return {
        "folder": str(log.folder),
        "recipe": recipe,
        "finished": log.final is not None,
        "steps": log.steps_done,
        "spent": log.spent(),
        "layer_tokens": last_of(log, "layer_tokens"),
        "dropped_share": total_dropped(log),
        "final": log.final,
        "evaluations": evals,
        "step_ms": dict(zip(("p10", "median", "p90", "longest"), step_times(times), strict=True)),
        "waiting_share": waiting_share(log),
        "tokens_per_s": median(tokens_per_s(log)),
        "mfu": median(log.column("mfu")),
        "stages": log.stages,
        "resumed_at_steps": [line.get("resumed_at", 0) for line in log.starts[1:]],
        "lines_left_out": log.unread,
        "sample": log.sample,
        "settings": settings,
        "provenance": provenance(log),
    }


def last_of(log: RunLog, name: str) -> float:
    return float(log.column(name)[-1]) if log.steps_done else math.nan


def median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def step_times(ms: np.ndarray) -> list[float]:
    """The tenth of steps below, the median, the tenth above, the longest; in ms."""
    finite = ms[np.isfinite(ms)]
    return np.quantile(finite, (0.1, 0.5, 0.9, 1)).tolist() if len(finite) else [math.nan] * 4


def waiting_share(log: RunLog) -> float:
    """Of the time of all steps, what they waited for their data."""
    total = log.seconds[-1] * 1e3 if log.steps_done else 0.0
    return float(np.nansum(log.column("data_ms"))) / total if total else math.nan


def tokens_per_s(log: RunLog) -> np.ndarray:
    if log.has("tokens_per_s"):
        return log.column("tokens_per_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        return log.per_step("real_tokens") / log.column("ms") * 1e3


def positions(log: RunLog) -> np.ndarray:
    """(n,) of each step: its tokens and its padding."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return log.per_step("real_tokens") / (1 - log.column("padding_share"))


def dropped_shares(log: RunLog) -> np.ndarray:
    """(n,) of all positions in all layers, what a step did not compute; see
    support/base/clock.py."""
    layers = log.settings.get("model.layers") or math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = 1 - log.per_step("layer_tokens") / (layers * positions(log))
    return shares.clip(min=0).round(4)  # repeated context counts as computed, not as tokens


def total_dropped(log: RunLog) -> float:
    layers = log.settings.get("model.layers") or math.nan
    full = layers * np.nansum(positions(log))
    return max(1 - last_of(log, "layer_tokens") / full, 0.0) if full else math.nan


def provenance(log: RunLog) -> dict[str, Any]:
    """Commit, versions, hardware: what the last start says that is no setting."""
    start = log.starts[-1] if log.starts else {}
    left_out = ("config", "bytes", "model_size", "resumed_at")
    return {name: value for name, value in start.items() if name not in left_out}
