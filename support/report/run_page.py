"""One run: its log.jsonl read back, and the page with its charts and tables.

A line of the log comes from support/run/progress.py `log_step`. `read_run` makes each of its fields
a column; `loss_section`, `schedules` and `time_section` say which columns become charts. page.py
makes HTML of the page, and charts.py draws.

Lines that are damaged, or lack a field that every report needs, are left out and counted.
"""

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.base.numbers import duration, several, short
from support.base.typed_json import At, Each, mismatch
from support.report.charts import Chart, Series, in_time, medians, series
from support.report.page import Page, Section, Table, table
from support.run.folder import RESULTS, read_lines, read_log

# What a run spends, and a comparison may hold fixed
UNITS = {
    "consumed_tokens": "consumed tokens",
    "real_tokens": "raw tokens",
    "flops": "FLOPs",
    "seconds": "seconds",
}
# What --x takes, and the column of it
AXES = dict(zip(("tokens", "raw-tokens", "flops", "seconds"), UNITS, strict=True), steps="step")
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
RESULT = {"step": int, "said": [str], "argv": str}  # of evaluate.py
GROUPS = [{"name": str, "documents": int, "tokens": int, "bpb": float | None}]
PARTS = 50  # points of a smoothed curve at most,
LEAST = 5  # each the median of at least five steps
FEW = 25  # fewer steps are not smoothed
MANY_TIMES = 8.0  # the axis is logarithmic if the longest step took more times the median
SHOWN_EVALS = 24  # rows of the table at most
LITTLE = 1.0  # per cent: what is below in all steps is not drawn
# A machine is not steady if peaks measured on it differ by more, if a tenth of the steps takes more
# times the median step of as many FLOPs, or if runs of a model take more times the seconds per FLOP
PEAKS = 1.2
SLOW = 1.5
ALIKE = math.log(1.1)  # steps of as many FLOPs, within some 10 %


# ---- the log


class RunLog(NamedTuple):
    """The log of one run, and the sums and shares that follow from it."""

    folder: Path
    starts: list[dict]  # the "run" lines: one for each time the run was started or resumed
    steps: dict[str, np.ndarray]  # of the "train" lines: name -> (n,) float64; and "seconds" so far
    evals: list[dict]
    stages: list[dict]  # of --pseudo
    sample: str | None
    results: list[dict]  # of evaluate.py
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

    def column(self, name: str) -> np.ndarray:
        """(n,) a number of each step; NaN where the step did not log it."""
        return self.steps.get(name, np.full(len(self.steps.get("step", ())), math.nan))

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self.column(name)).any())

    def last(self, name: str) -> float:
        return float(self.column(name)[-1]) if self.steps_done else math.nan

    def median(self, name: str) -> float:
        return float(np.nanmedian(self.column(name))) if self.has(name) else math.nan

    def at(self, steps: Sequence[float] | float, name: str) -> np.ndarray:
        """What a column that counts from 0 had reached after these steps."""
        done = np.searchsorted(self.column("step"), steps, side="right")
        return np.append(0.0, self.column(name))[done]

    def spent(self, step: float = math.inf) -> dict[str, float]:
        """What the run spent until a step, or in all, by the names of UNITS."""
        return {name: float(self.at(step, name)) for name in UNITS}

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

    @property
    def state(self) -> str:
        """In a word or two; it was stopped if its last heartbeat says so."""
        try:
            where = json.loads((self.folder / "heartbeat.json").read_text())["where"]
        except (OSError, ValueError, TypeError, LookupError):
            where = ""
        return "finished" if self.final else "stopped" if where == "stopped" else "not finished"

    def text_of(self, line: dict) -> str:
        """What an evaluation read.

        Example: on 32,768 tokens of the embedded corpus's held-out text
        """
        masked = "masked " if self.settings["model.model"] == "bert" else ""
        store = self.settings.get("data.data") or "the embedded corpus"
        return f"on {line['targets']:,} {masked}tokens of {store}'s held-out text"

    def bits(self) -> float:
        """Bits per byte in a nat per target; NaN if the log does not say it, and of a BERT."""
        size = self.starts[-1].get("bytes_per_token")
        known = isinstance(size, float) and size > 0 and self.settings["model.model"] == "gpt"
        return 1 / (math.log(2) * size) if known else math.nan

    def slowness(self) -> float:
        """How many times the median step of as many FLOPs a tenth of the steps takes, or more."""
        ms = self.column("ms")
        flops = np.diff(self.column("flops"), prepend=0.0).clip(min=1)
        sizes = (np.log(flops) / ALIKE).round()
        times = [ms[sizes == size] / np.median(ms[sizes == size]) for size in np.unique(sizes)]
        return float(np.quantile(np.concatenate(times), 0.9)) if len(ms) >= FEW else 1.0

    def made_with(self) -> dict[str, Any]:
        """Size, device, commit, versions: what the last start says besides its settings."""
        left_out = ("config", "bytes", "model_size", "resumed_at", "made_by")
        start = self.starts[-1]
        made_by = start.get("made_by")
        about = {"parameters": start.get("parameters"), "device": None, "peak_memory": None}
        about |= {name: value for name, value in start.items() if name not in left_out}
        about |= made_by if isinstance(made_by, dict) else {}
        taken = [line["peak_memory"] for line in self.evals if line.get("peak_memory")]
        about["peak_memory"] = f"{max(taken) / 1e6:,.0f} MB" if taken else None
        return {name: value for name, value in about.items() if value is not None}


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
    results = [line for line in read_lines(folder / RESULTS) if not mismatch(line, RESULT)]
    return RunLog(
        folder=folder,
        starts=lines["run"],
        steps=numbers,
        evals=lines["eval"],
        stages=lines["stage"],
        sample=lines["sample"][-1]["text"] if lines["sample"] else None,
        results=results,
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
        "results": log.results,
        "not_steady": unsteady([log]),
        "settings": log.settings,
        "provenance": log.made_with(),
    }


# ---- steadiness


def unsteady(logs: Sequence[RunLog]) -> list[str]:
    """What says that a machine was not equally fast all the time, in whole sentences.

    Example: peaks of 100 and 130 GFLOP/s at two starts on one machine
    """
    sentences = []
    peaks: dict[str, list[float]] = {}
    costs: dict[str, dict[float, str]] = {}
    for log in logs:
        for start in log.starts:
            device = f"{start.get('machine')} {start.get('made_by')}"
            if start.get("peak_flops"):
                peaks.setdefault(device, []).append(start["peak_flops"] / start.get("ranks", 1))
        if log.slowness() > SLOW:
            sentences.append(
                f"Not steady: a tenth of the steps of {log.name} took {log.slowness():.1f} times as"
                f" long as the median step of as many FLOPs, or longer; {SLOW} is allowed."
            )
        spent = log.spent()
        model = [value for name, value in log.settings.items() if name.startswith("model.")]
        if spent["flops"]:
            of_model = costs.setdefault(f"{device} {model}", {})
            of_model[spent["seconds"] / spent["flops"]] = log.name
    for measured in peaks.values():
        if max(measured) > PEAKS * min(measured):
            ends = " to ".join(short(peak, "FLOP/s") for peak in (min(measured), max(measured)))
            sentences.append(
                f"Not steady: peaks measured at starts differ by more than {PEAKS - 1:.0%}, from"
                f" {ends}: seconds and MFU say less here."
            )
    for cost in costs.values():
        if (ratio := max(cost) / min(cost)) > SLOW:
            sentences.append(
                f"Not steady: {cost[max(cost)]} took {ratio:.1f} times the seconds per FLOP of"
                f" {cost[min(cost)]} with the same model and device, and {SLOW} is allowed; or its"
                " techniques cost time that FLOPs do not count."
            )
    return sentences


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
        by_source(log),
        evaluations(log),
        Section("Results of evaluate.py", tables=results(log)),
        Section("A sample", blocks=[log.sample] if log.sample else []),
        Section("Recipe", blocks=["\n".join(commands)], tables=[changed]),
        Section("Made with", tables=[made_with(log), settings]),
    ]
    finish = {"marks": marks, "x_unit": UNITS.get(log.axis, "steps")}
    parts = [s._replace(charts=[in_time(c._replace(**finish)) for c in s.charts]) for s in parts]
    return Page(log.name, lead(log), facts(log), parts)


def lead(log: RunLog) -> str:
    settings = log.settings
    steps = several(log.steps_done, "step")
    if not log.steps_done:
        state = "no step is in its log yet"
    elif log.final:
        state = f"finished after {steps}"
    else:
        done = log.last("consumed_tokens") / settings["optim.tokens"]
        state = f"{log.state}: {steps}, {min(done, 1):.0%} of its budget"
    damaged = f"; damaged lines of the log, left out: {log.unread}" if log.unread else ""
    if log.missing_steps:
        damaged += f"; steps that are missing in the log: {log.missing_steps:,}"
    return f"{settings['model.model']} {settings['model.size']}, {state}{damaged} · {log.folder}"


def facts(log: RunLog) -> list[list[str]]:
    """Numbers worth seeing first; one that is unknown, or nothing special, is left out."""
    if not log.steps_done:
        return []
    spent = log.spent()
    on_the_way = next((line for line in reversed(log.evals) if not line["last"]), None)
    held_out = [
        [f"Held-out loss {when}", f"{line['val_bpb']:.3f}", f"bits per byte, {log.text_of(line)}"]
        for when, line in (("at the end", log.final), ("on the way", on_the_way))
        if line
    ]
    dropped = f"{log.dropped():.1%}" if log.dropped() > 0 else ""
    skipped = f"{log.last('skipped'):,.0f}" if log.last("skipped") > 0 else ""
    steady = "; not steady, see below" if unsteady([log]) else ""
    shown = [
        [
            "Consumed tokens",
            short(spent["consumed_tokens"]),
            f"of {short(log.settings['optim.tokens'])} asked for",
        ],
        [
            "Raw tokens",
            short(spent["real_tokens"]),
            f"{log.last('epochs'):.3g} passes over the store",
        ],
        ["Dropped", dropped, f"of layer-tokens; {short(log.last('layer_tokens'))} computed"],
        ["Steps that moved no weight", skipped, "loss or gradient not finite or far too large"],
        [
            "Starts",
            str(len(log.starts)) if len(log.starts) > 1 else "",
            "the first, and those that went on",
        ],
        [
            "Time of all steps",
            duration(spent["seconds"]),
            f"without evaluations and checkpoints{steady}",
        ],
        ["Tokens per second", short(log.median("tokens_per_s")), "raw tokens, median of all steps"],
        [
            "FLOPs",
            short(spent["flops"], unit="FLOP"),
            f"MFU {log.median('mfu'):.1%}" if log.has("mfu") else "",
        ],
    ]
    return held_out + [fact for fact in shown if fact[1]]


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
    evals = [line for line in log.on_the_way if line["step"]]
    held_out = [
        evaluated(log, f"held out, on the way, {log.text_of(line)}", evals, 1) for line in evals[:1]
    ]
    if log.final and log.final not in evals:
        held_out.append(
            evaluated(log, f"held out, at the end, {log.text_of(log.final)}", [log.final], 2)
        )
    bits = log.bits()
    if math.isfinite(bits):
        unit = "bits per byte"
        drawn = [*smoothed(x, bits * log.column("loss")), *held_out]
        notes = [
            f"Training loss is that of each step's own text, at {1 / bits / math.log(2):.2f} bytes"
            " a token as in the whole store."
        ]
    else:
        unit = "nats per target"
        drawn = smoothed(x, log.column("loss"))
        why = "its log does not say how many bytes a token has"
        if log.settings["model.model"] == "bert":
            why = "only masked tokens are targets"
        notes = [f"Training loss is in nats, held-out loss in bits per byte: {why}."]
    training = Chart("Training loss", unit, "", drawn, clip_first=True)
    most = max((float(one.y.max()) for one in drawn if len(one.y)), default=0.0)
    if training.highest() < most:
        training = training._replace(note=f"The first steps, from {most:.3g}, are above the chart.")
    shown = [
        training,
        Chart("Held-out loss", "bits per byte", "", held_out),
        Chart("Gradient norm", "", "", smoothed(x, log.column("grad_norm")), clip_first=True),
    ]
    return Section("Loss", shown, [events], notes if log.steps_done else [])


def evaluated(log: RunLog, label: str, lines: list[dict], color: int = 0) -> Series:
    x = log.at([line["step"] for line in lines], log.axis)
    return series(
        label, x, np.array([line["val_bpb"] for line in lines], dtype=float), "dots", color
    )


def curves(log: RunLog, rows: list[tuple[str, str, np.ndarray]], smooth: Sequence[str]) -> Section:
    """A chart for each of (title, unit, values); those that say little in a sentence."""
    x = log.column(log.axis)
    shown = []
    constant = []
    little = []
    for title, unit, values in rows:
        finite = values[np.isfinite(values)]
        if len(finite) and finite.min() == finite.max():
            constant.append(f"{title} {short(float(finite[0]), digits=4)} {unit}".strip())
        elif len(finite) and unit.startswith("%") and finite.max() < LITTLE:
            little.append(f"{title} {finite.max():.2g} {unit}")
        else:
            drawn = smoothed(x, values) if title in smooth else [series("each step", x, values)]
            shown.append(Chart(title, unit, "", drawn, from_zero=True))
    sentences = {"The same in all steps": constant, "Next to nothing, at most": little}
    notes = [f"{what}: {'; '.join(parts)}." for what, parts in sentences.items() if parts]
    return Section("", shown, notes=notes)


def schedules(log: RunLog) -> Section:
    difficulties = [
        (f"Difficulty: {name.removeprefix('difficulty_')}", "at most", log.column(name))
        for name in sorted(log.steps)
        if name.startswith("difficulty_")
        # that of seqlen is the longest piece
        and not np.array_equal(log.column(name), log.column("max_piece_len"), equal_nan=True)
    ]
    rows = [
        ("Learning rate", "", log.column("lr")),
        ("Longest piece", "tokens", log.column("max_piece_len")),
        *difficulties,
        ("Samples that may be drawn", "", log.column("pool")),
        ("Kept tokens", "of a row", log.column("kept_tokens")),
        ("Padding", "% of positions", 100 * log.column("padding_share")),
        ("Dropped", "% of layer-tokens", 100 * log.dropped_shares()),
    ]
    # a median would slope where a schedule jumps
    return curves(log, rows, smooth=["Padding"])._replace(heading="Schedules and savings")


def time_section(log: RunLog) -> Section:
    x = log.column(log.axis)
    times = log.step_times()
    drawn = smoothed(x, log.column("ms"))
    if 100 * log.waiting_share() >= LITTLE:
        drawn.append(series("waiting for data", x, log.column("data_ms"), color=1))
    log_y = times["longest"] > MANY_TIMES * times["median"]
    step_time = Chart("Step time", "ms", "", drawn, from_zero=not log_y, log_y=log_y)
    rows = [
        ("Raw tokens per second", "", log.column("tokens_per_s")),
        ("MFU", "% of the peak", 100 * log.column("mfu")),
    ]
    rates = curves(log, rows, smooth=["Raw tokens per second", "MFU"])
    columns = ["fastest tenth below", "median step", "slowest tenth above", "longest"]
    row = [*(f"{ms:,.1f} ms" for ms in times.values()), f"{log.waiting_share():.1%}"]
    shown = Table([*columns, "of all time, waiting for data"], [row] if log.steps_done else [])
    return Section("Time", [step_time, *rates.charts], [shown], [*unsteady([log]), *rates.notes])


def by_source(log: RunLog) -> Section:
    """Held-out bits per byte of each source that evaluations tell apart."""
    lines = [line for line in log.evals if not mismatch(line.get("by_source"), Each(float))]
    if not lines:
        return Section("")
    last = lines[-1]
    on_the_way = [line for line in lines if not line["last"]]
    names = sorted(last["by_source"], key=last["by_source"].get)
    drawn = []
    for color, name in enumerate(names):
        of_it = [line | {"val_bpb": line["by_source"].get(name)} for line in on_the_way]
        drawn.append(evaluated(log, name, of_it, color))
    rows = [[name, f"{last['by_source'][name]:.3f}"] for name in names]
    return Section(
        f"Held-out loss by source, {log.text_of(last)}",
        [Chart("By source", "bits per byte", "", drawn)],
        [Table(["source", "bits per byte"], rows)],
    )


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
    marks = [float(log.at(step, log.axis)) for step, _ in events]
    rows = [
        [str(number), f"{step:,}", short(log.spent(step)["consumed_tokens"]), event]
        for number, (step, event) in enumerate(events, 1)
    ]
    return marks, Table(["mark", "after step", "consumed tokens", "event"], rows)


def evaluations(log: RunLog) -> Section:
    """Each evaluation, or every few of them, the last one included."""
    every = -(-len(log.evals) // SHOWN_EVALS) or 1
    spent = {
        words: lambda line, unit=unit: amount(log.spent(line["step"])[unit], unit)
        for unit, words in UNITS.items()
    }
    columns = {
        "step": lambda line: f"{line['step']:,}",
        **spent,
        "read": log.text_of,
        "bits per byte": lambda line: f"{line['val_bpb']:.3f}",
    }
    return Section("Evaluations", tables=[table(columns, log.evals[::-1][::every][::-1])])


def amount(value: float, unit: str) -> str:
    """What was spent of one of UNITS, in words."""
    if unit == "seconds":
        return duration(value)
    return short(value, unit="FLOP" if unit == "flops" else "")


def results(log: RunLog) -> list[Table]:
    """What evaluate.py found, and the last groups of documents that it was asked for."""
    columns = {
        "result": lambda line: "; ".join(line["said"]),
        "after step": lambda line: f"{line['step']:,}",
        "command": lambda line: f"`{line['argv']}`",
    }
    tables = [table(columns, log.results)]
    for by in ("source", "length"):
        found = [line.get(f"groups_by_{by}") for line in log.results]
        groups = [group for group in found if not mismatch(group, GROUPS)]
        columns = {
            by: lambda group: group["name"],
            "documents": lambda group: f"{group['documents']:,}",
            "tokens": lambda group: f"{group['tokens']:,}",
            "bits per byte": lambda g: "" if g["bpb"] is None else f"{g['bpb']:.3f}",
        }
        tables.append(table(columns, groups[-1] if groups else []))
    return tables


def made_with(log: RunLog) -> Table:
    rows = []
    for name, value in log.made_with().items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        shown = f"{value:.4g}" if isinstance(value, float) else shown
        shown = short(value, unit="FLOP/s") if name == "peak_flops" else shown
        rows.append([name.replace("_", " "), f"`{shown}`" if name == "argv" else shown])
    return Table(["", ""], rows)
