"""One run: its log.jsonl read back, and the page with its charts and tables.

A line of the log comes from support/run/progress.py `log_step`. `read_run` makes each of its fields
a column; `loss_charts`, `schedules` and `time_section` say which columns become charts, all against
consumed tokens. page.py makes HTML of the page, and charts.py draws.

Lines that are damaged, or lack a field that every report needs, are left out and counted.
"""

import math
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.base.numbers import duration, short
from support.base.typed_json import At, Each, mismatch
from support.report.charts import Chart, Series, medians, series
from support.report.page import Page, Section, Table
from support.run.folder import read_log

# What a run spends, and a comparison may hold fixed
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
SPENT = ("step", "ms", "consumed_tokens", "real_tokens", "layer_tokens", "flops")
EVALUATED = ("step", "consumed_tokens", "targets")
NEEDED = {
    "run": {
        "config": dict.fromkeys(("model.layers", "optim.tokens"), At(1))
        | dict.fromkeys(("model.model", "model.size"), str),
        "argv": str,
        "commit": str,
        "resumed_at": int,
    },
    "train": dict.fromkeys(SPENT, float) | {"loss": float | None},
    "eval": dict.fromkeys(EVALUATED, float) | {"val_bpb": float, "last": bool},
    "stage": {"step": int, "owners": [int]},
    "sample": {"text": str},
}
X_UNIT = "consumed tokens"
PARTS = 50  # points of a smoothed curve at most,
LEAST = 5  # each the median of at least five steps
FEW = 25  # fewer steps are not smoothed
MANY_TIMES = 8.0  # the axis is logarithmic if the longest step took more times the median
SHOWN_EVALS = 24  # rows of the table at most


# ---- the log


class RunLog(NamedTuple):
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
    def missing_steps(self) -> int:
        """Steps that were made, and whose lines are gone."""
        return int(self.column("step").max()) - self.steps_done if self.steps_done else 0

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
        return self.steps.get(name, np.full(len(self.steps.get("step", ())), math.nan))

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())

    def last(self, name: str) -> float:
        return float(self.column(name)[-1]) if self.steps_done else math.nan

    def median(self, name: str) -> float:
        return float(np.nanmedian(self.column(name))) if self.has(name) else math.nan

    def spent(self, step: float = math.inf) -> dict[str, float]:
        """What the run spent until a step, or in all, by the names of UNITS."""
        done = int(np.searchsorted(self.column("step"), step, side="right"))
        if done == 0:
            return dict.fromkeys(UNITS, 0.0)
        return {name: float(self.column(name)[done - 1]) for name in UNITS}

    def step_times(self) -> dict[str, float]:
        """In ms: the bounds of the fastest and the slowest tenth, the median, the longest."""
        ms = self.column("ms") if self.steps_done else [math.nan]
        quantiles = {"p10": 0.1, "median": 0.5, "p90": 0.9, "longest": 1.0}
        return {name: float(np.quantile(ms, q)) for name, q in quantiles.items()}

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
        if event == "torn" or mismatch(line, NEEDED.get(event, {})):
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


# ---- the page


def page(log: RunLog, changed: Table) -> Page:
    """A page about one run.

    Args: changed its settings that differ from the defaults
    """
    marks, events = stops_and_stages(log)
    commands = dict.fromkeys(start["argv"] for start in log.starts)
    parts = [
        Section("Loss", loss_charts(log), [events]),
        schedules(log),
        time_section(log),
        by_source(log),
        Section("Evaluations", tables=[evaluations(log)]),
        Section("A sample", blocks=[log.sample] if log.sample else []),
        Section("Recipe", blocks=["\n".join(commands)], tables=[changed]),
        Section("Made with", tables=[made_with(log)]),
    ]
    parts = [s._replace(charts=[chart._replace(marks=marks) for chart in s.charts]) for s in parts]
    return Page(log.name, lead(log), facts(log), parts)


def lead(log: RunLog) -> str:
    settings = log.settings
    steps = f"{log.steps_done:,} steps"
    if not log.steps_done:
        state = "no step is in its log yet"
    elif log.final:
        state = f"finished after {steps}"
    else:
        done = log.last("consumed_tokens") / settings["optim.tokens"]
        state = f"not finished: {steps}, {min(done, 1):.0%} of its budget"
    damaged = f"; damaged lines of the log, left out: {log.unread}" if log.unread else ""
    if log.missing_steps:
        damaged += f"; steps that are missing in the log: {log.missing_steps:,}"
    return f"{settings['model.model']} {settings['model.size']}, {state}{damaged} · {log.folder}"


def facts(log: RunLog) -> list[list[str]]:
    """Numbers worth seeing first; one that is unknown, or nothing special, is left out."""
    if not log.steps_done:
        return []
    spent = log.spent()
    shown = []
    if log.evals:
        last = log.final or log.evals[-1]
        when = "at the end" if log.final else "so far"
        detail = f"bits per byte, {when}, on {last['targets']:,} held-out tokens"
        shown.append(["Held-out loss", f"{last['val_bpb']:.4f}", detail])
    budget = f"of {short(log.settings['optim.tokens'])} asked for"
    passes = f"{log.last('epochs'):.3g} passes over the store"
    dropped = f"{log.dropped():.1%}" if log.dropped() > 0 else ""
    computed = f"of layer-tokens; {short(log.last('layer_tokens'))} computed"
    skipped = f"{log.last('skipped'):,.0f}" if log.last("skipped") > 0 else ""
    starts = str(len(log.starts)) if len(log.starts) > 1 else ""
    mfu = f"MFU {log.median('mfu'):.1%}" if log.has("mfu") else ""
    shown += [
        ["Consumed tokens", short(spent["consumed_tokens"]), budget],
        ["Raw tokens", short(spent["real_tokens"]), passes],
        ["Dropped", dropped, computed],
        ["Steps that moved no weight", skipped, "loss or gradient not finite or far too large"],
        ["Starts", starts, "the first, and those that went on"],
        ["Time of all steps", duration(spent["seconds"]), "without evaluations and checkpoints"],
        ["Tokens per second", short(log.median("tokens_per_s")), "raw tokens, median of all steps"],
        ["FLOPs", short(spent["flops"], unit="FLOP"), mfu],
    ]
    return [fact for fact in shown if fact[1]]


# ---- charts


def smoothed(x: np.ndarray, y: np.ndarray) -> list[Series]:
    """Each step faintly, and the median of every few steps."""
    numbers = np.isfinite(y)
    x = x[numbers]
    y = y[numbers]
    if len(x) < FEW:
        return [series("each step", x, y)]
    window = max(len(x) // PARTS, LEAST) | 1  # odd, so that it has a middle
    middles = medians(x, y, window)
    return [series("each step", x, y, "faint"), series(f"median of {window} steps", *middles)]


def loss_charts(log: RunLog) -> list[Chart]:
    x = log.column("consumed_tokens")
    loss = log.column("loss")
    training = Chart("Training loss", "nats per target", X_UNIT, smoothed(x, loss), clip_first=True)
    most = np.nanmax(loss, initial=-math.inf)
    if training.highest() < most:
        training = training._replace(note=f"The first steps, from {most:.3g}, are above the chart.")
    evals = [line for line in log.on_the_way if line["step"]]
    held_out = [evaluated("on the way", evals)]
    if log.final and log.final not in evals:
        at_the_end = f"at the end, on {log.final['targets']:,} tokens"
        held_out.append(evaluated(at_the_end, [log.final], color=1))
    norms = smoothed(x, log.column("grad_norm"))
    return [
        training,
        Chart("Held-out loss", "bits per byte", X_UNIT, held_out),
        Chart("Gradient norm", "", X_UNIT, norms, clip_first=True),
    ]


def evaluated(label: str, lines: list[dict], color: int = 0) -> Series:
    x = np.array([line["consumed_tokens"] for line in lines], dtype=float)
    y = np.array([line["val_bpb"] for line in lines], dtype=float)
    return series(label, x, y, "dots", color)


def schedules(log: RunLog) -> Section:
    """A chart for each value that changes over the run; constant values in a sentence."""
    curves = [
        ("Learning rate", "", log.column("lr")),
        ("Longest piece", "tokens", log.column("max_piece_len")),
    ]
    for name in sorted(name for name in log.steps if name.startswith("difficulty_")):
        values = log.column(name)
        if not np.array_equal(values, log.column("max_piece_len"), equal_nan=True):  # no seqlen
            curves.append((f"Difficulty: {name.removeprefix('difficulty_')}", "at most", values))
    curves += [
        ("Samples that may be drawn", "", log.column("pool")),
        ("Kept tokens", "of a row", log.column("kept_tokens")),
        ("Padding", "% of positions", 100 * log.column("padding_share")),
        ("Dropped", "% of layer-tokens", 100 * log.dropped_shares()),
    ]
    x = log.column("consumed_tokens")
    shown = []
    constant = []
    for title, unit, values in curves:
        finite = values[np.isfinite(values)]
        if len(finite) and finite.min() == finite.max():
            constant.append(f"{title.lower()} {short(float(finite[0]), digits=4)} {unit}".strip())
            continue
        # only padding is smoothed: a median would slope where a schedule jumps
        drawn = smoothed(x, values) if title == "Padding" else [series("each step", x, values)]
        shown.append(Chart(title, unit, X_UNIT, drawn, from_zero=True))
    notes = [f"The same in all steps: {'; '.join(constant)}."] if constant else []
    return Section("Schedules and savings", charts=shown, notes=notes)


def time_section(log: RunLog) -> Section:
    x = log.column("consumed_tokens")
    times = log.step_times()
    drawn = smoothed(x, log.column("ms"))
    if np.nansum(log.column("data_ms")) > 0:
        drawn.append(series("waiting for data", x, log.column("data_ms"), color=1))
    log_y = times["longest"] > MANY_TIMES * times["median"]
    shown = [Chart("Step time", "ms", X_UNIT, drawn, from_zero=not log_y, log_y=log_y)]
    for title, unit, y in (
        ("Raw tokens per second", "", log.column("tokens_per_s")),
        ("MFU", "% of the peak", 100 * log.column("mfu")),
    ):
        shown.append(Chart(title, unit, X_UNIT, smoothed(x, y), from_zero=True))
    columns = ["fastest tenth below", "median step", "slowest tenth above", "longest"]
    row = [*(f"{ms:,.1f} ms" for ms in times.values()), f"{log.waiting_share():.1%}"]
    rows = [row] if log.steps_done else []
    return Section("Time", shown, [Table([*columns, "of all time, waiting for data"], rows)])


def by_source(log: RunLog) -> Section:
    """Held-out bits per byte of each source that evaluations tell apart."""
    lines = [line for line in log.evals if not mismatch(line.get("by_source"), Each(float))]
    last = lines[-1]["by_source"] if lines else {}
    on_the_way = [line for line in lines if not line["last"]]
    drawn = []
    rows = []
    for color, name in enumerate(sorted(last, key=last.get)):
        of_it = [line | {"val_bpb": line["by_source"].get(name)} for line in on_the_way]
        drawn.append(evaluated(name, of_it, color))
        rows.append([name, f"{last[name]:.4f}"])
    shown = [Chart("By source", "bits per byte", X_UNIT, drawn)]
    return Section("Held-out loss by source", shown, [Table(["source", "bits per byte"], rows)])


# ---- tables


def stops_and_stages(log: RunLog) -> tuple[list[float], Table]:
    """Where the run went on after a stop, and where --pseudo changed its model.

    Returns: consumed tokens there, and what happened
    """
    events = [
        (start["resumed_at"], f"resumed, with commit {start['commit']}") for start in log.starts[1:]
    ]
    for line in log.stages:
        owners = line["owners"]
        used = " ".join("." if owner < 0 else str(owner) for owner in owners)
        number = len({owner for owner in owners if owner >= 0})
        have = f"--pseudo: {number} of {log.settings['model.layers']} layers have their own weights"
        events.append((line["step"], f"{have}\nof layer: {used}"))
    events.sort()
    marks = [log.spent(step)["consumed_tokens"] for step, _ in events]
    rows = [
        [str(number), f"{step:,}", short(mark), event]
        for number, (mark, (step, event)) in enumerate(zip(marks, events, strict=True), 1)
    ]
    return marks, Table(["mark", "after step", X_UNIT, "event"], rows)


def evaluations(log: RunLog) -> Table:
    """Each evaluation, or every few of them, the last one included."""
    every = -(-len(log.evals) // SHOWN_EVALS) or 1
    rows = []
    for line in log.evals[::-1][::every][::-1]:
        spent = [amount(value, unit) for unit, value in log.spent(line["step"]).items()]
        rows.append([f"{line['step']:,}", *spent, f"{line['targets']:,}", f"{line['val_bpb']:.4f}"])
    return Table(["step", *UNITS.values(), "held-out tokens", "bits per byte"], rows)


def amount(value: float, unit: str) -> str:
    """What was spent of one of UNITS, in words."""
    if unit == "seconds":
        return duration(value)
    return short(value, unit="FLOP" if unit == "flops" else "")


def made_with(log: RunLog) -> Table:
    rows = []
    for name, value in log.provenance().items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        shown = short(value, unit="FLOP") if isinstance(value, float) else shown
        rows.append([name.replace("_", " "), f"`{shown}`" if name == "argv" else shown])
    return Table(["", ""], rows)
