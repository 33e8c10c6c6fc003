"""One run: its log.jsonl read back, and the page with its charts and tables.

A line of the log comes from support/run/progress.py `log_step`. `read_run` makes each of its fields
a column; `loss_section`, `schedules` and `time_section` say which columns become charts. page.py
makes HTML of the page, and charts.py draws.

Lines that are damaged, or lack a field that every report needs, are left out and counted.
"""

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.report.charts import Chart, Series, in_time, medians, series
from support.report.page import Page, Section, Table, columns_of, table
from support.run import read_log
from support.settings import duration, several, short

# What a run spends, and a comparison may hold fixed
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
EVENTS = ("run", "train", "eval", "stage", "sample")  # that are shown
WHEN = ("on the way", "at the end")  # an evaluation is made
MEASURED = ("Padding", "Raw tokens per second", "MFU")  # the other columns are scheduled
PARTS = 50  # points of a smoothed curve at most,
LEAST = 5  # each the median of at least five steps
FEW = 25  # fewer steps are not smoothed
MANY_TIMES = 8.0  # the axis is logarithmic if the longest step took more times the median
SHOWN_EVALS = 24  # rows of the table at most
LITTLE = 1.0  # per cent: what stays below is not drawn


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
    axis: str = "consumed_tokens"  # the column that its charts have on the horizontal axis

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

    @property
    def state(self) -> str:
        return "finished" if self.final else "not finished"

    def column(self, name: str) -> np.ndarray:
        """(n,) a number of each step; NaN where the step did not log it."""
        return self.steps.get(name, np.full(len(self.steps.get("step", ())), math.nan))

    def last(self, name: str) -> float:
        return float(self.column(name)[-1]) if self.steps_done else math.nan

    def median(self, name: str) -> float:
        values = self.column(name)
        return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan

    def at(self, steps: Sequence[float] | float, name: str) -> np.ndarray:
        """What a column that counts from 0 had reached after these steps."""
        done = np.searchsorted(self.column("step"), steps, side="right")
        return np.append(0.0, self.column(name))[done]

    def spent(self, step: float = math.inf) -> dict[str, float]:
        """What the run spent until a step, or in all, by the names of UNITS."""
        return {name: float(self.at(step, name)) for name in UNITS}

    def text_of(self, line: dict) -> str:
        """What an evaluation read.

        Example: on 32,768 tokens of the embedded corpus's held-out text
        """
        masked = "masked " if self.settings["model.model"] == "bert" else ""
        store = self.settings.get("data.data") or "the embedded corpus"
        return f"on {line['targets']:,} {masked}tokens of {store}'s held-out text"

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


def read_run(folder: Path) -> RunLog:
    """Read the log in the folder of a run.

    Raises: ValueError for a folder without one
    Cost:   13 µs a step on one core
    """
    if not (folder / "log.jsonl").is_file():
        raise ValueError(f"{folder} holds no log.jsonl: name the folder of a run")
    lines: dict[str, list[dict]] = {event: [] for event in EVENTS}
    columns: dict[str, array] = {}
    steps = unread = 0
    for line in read_log(folder):
        event = line.pop("event")
        if event == "torn":
            unread += 1
        elif event == "train":
            for name in line.keys() - columns.keys():
                columns[name] = array("d", [math.nan]) * steps
            for name, column in columns.items():
                value = line.get(name)
                column.append(value if isinstance(value, int | float) else math.nan)
            steps += 1
        elif event in EVENTS:
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


def number_of(line: dict, name: str) -> float:
    """A number in a line; 0 if it is not there, or no number."""
    return line[name] if isinstance(line.get(name), int | float) else 0.0


# ---- the page


def page(log: RunLog, changed: Table, settings: Table) -> Page:
    """A page about one run.

    Args: changed its settings that differ from the defaults
    """
    marks, events = stops_and_stages(log)
    commands = dict.fromkeys(start["argv"] for start in log.starts)
    parts = [
        loss_section(log, events),
        schedules(log),
        time_section(log),
        Section("Evaluations", tables=[evaluations(log)]),
        Section("A sample", blocks=[log.sample] if log.sample else []),
        Section("Recipe", blocks=["\n".join(commands)], tables=[changed, settings]),
    ]
    axis = {"marks": marks, "x_unit": UNITS[log.axis]}
    parts = [s._replace(charts=[in_time(c._replace(**axis)) for c in s.charts]) for s in parts]
    return Page(log.name, lead(log), facts(log), parts)


def lead(log: RunLog) -> str:
    settings = log.settings
    starts = f" and {len(log.starts)} starts" if len(log.starts) > 1 else ""
    state = f"{log.state} after {several(log.steps_done, 'step')}{starts}"
    if not log.steps_done:
        state = "no step is in its log yet"
    elif not log.final:
        done = log.last("consumed_tokens") / settings["optim.tokens"]
        state = f"{state}, {min(done, 1):.0%} of its budget"
    damaged = f"; damaged lines of the log, left out: {log.unread}" if log.unread else ""
    if log.missing_steps:
        damaged += f"; steps that are missing in the log: {log.missing_steps:,}"
    return f"{settings['model.model']} {settings['model.size']}, {state}{damaged} · {log.folder}"


def facts(log: RunLog) -> list[list[str]]:
    """Numbers worth seeing first; one that is unknown, or nothing special, is left out."""
    if not log.steps_done:
        return []
    spent = {unit: amount(value, unit) for unit, value in log.spent().items()}
    budget = f"of {short(log.settings['optim.tokens'])} asked for"
    passes = f"{log.last('epochs'):.3g} passes over the store"
    dropped = f"{log.dropped():.1%}" if log.dropped() > 0 else ""
    computed = f"of layer-tokens; {short(log.last('layer_tokens'))} computed"
    without = "without evaluations and checkpoints"
    mfu = f"MFU {log.median('mfu'):.1%}" if log.median("mfu") > 0 else ""
    shown = [
        ["Consumed tokens", spent["consumed_tokens"], budget],
        ["Raw tokens", spent["real_tokens"], passes],
        ["Dropped", dropped, computed],
        ["Time of all steps", spent["seconds"], without],
        ["Tokens per second", short(log.median("tokens_per_s")), "raw tokens, median of all steps"],
        ["FLOPs", spent["flops"], mfu],
    ]
    for last, line in {line["last"]: line for line in log.evals}.items():  # the last of each
        name = f"Held-out loss {WHEN[last]}"
        shown.insert(0, [name, f"{line['val_bpb']:.3f}", f"bits per byte, {log.text_of(line)}"])
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


def loss_section(log: RunLog, events: Table) -> Section:
    x = log.column(log.axis)
    held_out = []
    for last, when in enumerate(WHEN):
        lines = [line for line in log.evals if line["last"] == last and line["step"]]
        if lines:
            label = f"held out, {when}, {log.text_of(lines[-1])}"
            held_out.append(evaluated(log, label, lines, color=last + 1))
    scale, why = in_bits(log)
    loss = scale * log.column("loss")
    unit = "bits per byte" if scale != 1 else "nats per target"
    drawn = smoothed(x, loss) + (held_out if scale != 1 else [])
    training = Chart("Training loss", unit, "", drawn, clip_first=True)
    most = np.nanmax(loss, initial=-math.inf)
    if training.highest() < most:
        training = training._replace(note=f"The first steps, from {most:.3g}, are above the chart.")
    shown = [
        training,
        Chart("Held-out loss", "bits per byte", "", held_out),
        by_store(log),
        Chart("Gradient norm", "", "", smoothed(x, log.column("grad_norm")), clip_first=True),
    ]
    return Section("Loss", shown, [events], [f"Training loss is {why}."])


def in_bits(log: RunLog) -> tuple[float, str]:
    """What a nat per target is in bits per byte, or 1 where that is unknown; and that in words."""
    size = number_of(log.starts[-1], "bytes_per_token")
    if log.settings["model.model"] == "bert":
        return 1.0, "in nats per target, because only masked tokens are targets"
    if size <= 0:
        return 1.0, "in nats per target, because its log has no bytes per token"
    why = f"that of each step's own text, at the {size:.2f} bytes a token of the store"
    return 1 / (math.log(2) * size), why


def by_store(log: RunLog) -> Chart:
    lines = [line for line in log.evals if line.get("by_store")]
    drawn = []
    for color, (name, end) in enumerate(lines[-1]["by_store"].items() if lines else ()):
        of_it = [{**line, "val_bpb": line["by_store"].get(name)} for line in lines]
        drawn.append(evaluated(log, f"{name}, at last {end:.3f}", of_it, color))
    return Chart("Held-out loss by store", "bits per byte", "", drawn)


def evaluated(log: RunLog, label: str, lines: list[dict], color: int) -> Series:
    x = log.at([line["step"] for line in lines], log.axis)
    y = np.array([line["val_bpb"] for line in lines], dtype=float)
    return series(label, x, y, "dots", color)


def curves(log: RunLog, heading: str, rows: Sequence[tuple[str, str, np.ndarray]]) -> Section:
    """A chart for each (title, unit, values); one that would show nothing becomes a sentence."""
    x = log.column(log.axis)
    shown = []
    left_out = []
    for title, unit, values in rows:
        most = np.nanmax(values, initial=-math.inf)
        if most == np.nanmin(values, initial=math.inf):
            left_out.append(f"{title} {short(float(most), digits=4)} {unit}".strip())
        elif unit.startswith("%") and 0 <= most < LITTLE:
            left_out.append(f"{title} at most {most:.2g} {unit}")
        elif title in MEASURED:
            shown.append(Chart(title, unit, "", smoothed(x, values), from_zero=True))
        else:  # a median would slope where a schedule jumps
            drawn = [series("each step", x, values)]
            shown.append(Chart(title, unit, "", drawn, from_zero=True))
    notes = [f"In all steps: {'; '.join(left_out)}."] if left_out else []
    return Section(heading, shown, notes=notes)


def schedules(log: RunLog) -> Section:
    longest = log.column("max_piece_len")
    rows = [("Learning rate", "", log.column("lr")), ("Longest piece", "tokens", longest)]
    for name in sorted(name for name in log.steps if name.startswith("difficulty_")):
        values = log.column(name)
        if not np.array_equal(values, longest, equal_nan=True):  # that of seqlen is
            rows.append((f"Difficulty: {name.removeprefix('difficulty_')}", "at most", values))
    rows += [
        ("Samples that may be drawn", "", log.column("pool")),
        ("Kept tokens", "of a row", log.column("kept_tokens")),
        ("Padding", "% of positions", 100 * log.column("padding_share")),
        ("Dropped", "% of layer-tokens", 100 * log.dropped_shares()),
    ]
    return curves(log, "Schedules and savings", rows)


def time_section(log: RunLog) -> Section:
    x = log.column(log.axis)
    times = log.step_times()
    drawn = smoothed(x, log.column("ms"))
    if 100 * log.waiting_share() >= LITTLE:
        drawn.append(series("waiting for data", x, log.column("data_ms"), color=1))
    log_y = times["longest"] > MANY_TIMES * times["median"]
    step_time = Chart("Step time", "ms", "", drawn, from_zero=not log_y, log_y=log_y)
    rates = [
        ("Raw tokens per second", "", log.column("tokens_per_s")),
        ("MFU", "% of the peak", 100 * log.column("mfu")),
    ]
    part = curves(log, "Time", rates)
    columns = ["fastest tenth below", "median step", "slowest tenth above", "longest"]
    row = [*(f"{ms:,.1f} ms" for ms in times.values()), f"{log.waiting_share():.1%}"]
    shown = Table([*columns, "of all time, waiting for data"], [row] if log.steps_done else [])
    return part._replace(charts=[step_time, *part.charts], tables=[shown])


# ---- tables


def stops_and_stages(log: RunLog) -> tuple[list[float], Table]:
    """Where the run went on after a stop, and where --pseudo changed its model.

    Returns: where on the horizontal axis, and what happened
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
    rows = [
        [str(number), f"{step:,}", short(log.spent(step)["consumed_tokens"]), event]
        for number, (step, event) in enumerate(events, 1)
    ]
    marks = [float(log.at(step, log.axis)) for step, _ in events]
    return marks, Table(["mark", "after step", "consumed tokens", "event"], rows)


def evaluations(log: RunLog) -> Table:
    """Each evaluation, or every few of them, the last one included."""
    columns = {
        "step": lambda line: f"{line['step']:,}",
        **columns_of(UNITS, lambda line, unit: amount(log.spent(line["step"])[unit], unit)),
        "held out": log.text_of,
        "bits per byte": lambda line: f"{line['val_bpb']:.3f}",
    }
    every = -(-len(log.evals) // SHOWN_EVALS) or 1
    return table(columns, log.evals[::-1][::every][::-1])


def amount(value: float, unit: str) -> str:
    """What was spent of one of UNITS, in words."""
    if unit == "seconds":
        return duration(value)
    return short(value, unit="FLOP" if unit == "flops" else "")
