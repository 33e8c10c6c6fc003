"""The page about one run: its charts against consumed tokens, and its tables."""

import math

import numpy as np

from support.base.numbers import duration, short
from support.report.charts import Chart, Mark, Series, medians, series
from support.report.log import UNITS, RunLog
from support.report.page import Fact, Page, Section, Table

X_UNIT = "consumed tokens"
PARTS = 50  # points of a smoothed curve at most,
LEAST = 5  # each the median of at least five steps
FEW = 25  # fewer steps are not smoothed
MANY_TIMES = 8.0  # the axis is logarithmic if the longest step took more times the median
SHOWN_EVALS = 24  # rows of the table at most


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
    return f"{settings['model.model']} {settings['model.size']}, {state}{damaged} · {log.folder}"


def facts(log: RunLog) -> list[Fact]:
    spent = log.spent()
    mfu = f"MFU {log.median('mfu'):.1%}" if log.has("mfu") else ""
    budget = f"of {short(log.settings['optim.tokens'])} asked for"
    passes = f"{log.last('epochs'):.3g} passes over the store"
    computed = f"of layer-tokens; {short(log.last('layer_tokens'))} computed"
    aside = "without evaluations and checkpoints"
    rate = short(log.median("tokens_per_s"))
    shown = [
        Fact("Consumed tokens", short(spent["consumed_tokens"]), budget),
        Fact("Raw tokens", short(spent["real_tokens"]), passes),
        *([Fact("Dropped", f"{log.dropped():.1%}", computed)] if log.dropped() > 0 else []),
        Fact("Time of all steps", duration(spent["seconds"]), aside),
        Fact("Tokens per second", rate, "raw tokens, median of all steps"),
        Fact("FLOPs", short(spent["flops"], unit="FLOP"), mfu),
    ]
    if log.evals:
        last = log.final or log.evals[-1]
        when = "at the end" if log.final else "so far"
        detail = f"bits per byte, {when}, on {last['targets']:,} held-out tokens"
        shown.insert(0, Fact("Held-out loss", f"{last['val_bpb']:.4f}", detail))
    return shown if log.steps_done else []


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
    if not log.steps_done:
        return []
    x = log.column("consumed_tokens")
    loss = log.column("loss")
    drawn = smoothed(x, loss)
    training = Chart("Training loss", "nats per target", X_UNIT, drawn, clip_first=True)
    if training.highest() < np.nanmax(loss):
        above = f"The first steps, from {np.nanmax(loss):.3g}, are above the chart."
        training = training._replace(note=above)
    held_out = []
    evals = [line for line in log.on_the_way if line["step"]]
    if evals:
        held_out.append(evaluated("on the way", evals))
    if log.final and log.final not in evals:
        at_the_end = f"at the end, on {log.final['targets']:,} tokens"
        held_out.append(evaluated(at_the_end, [log.final])._replace(color=1))
    shown = [training]
    if held_out:
        shown.append(Chart("Held-out loss", "bits per byte", X_UNIT, held_out))
    norms = smoothed(x, log.column("grad_norm"))
    return [*shown, Chart("Gradient norm", "", X_UNIT, norms, clip_first=True)]


def evaluated(label: str, lines: list[dict]) -> Series:
    x = np.array([line["consumed_tokens"] for line in lines], dtype=float)
    return series(label, x, np.array([line["val_bpb"] for line in lines]), "dots")


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
        if not len(finite):
            continue
        if finite.min() == finite.max():
            constant.append(f"{title.lower()} {short(float(finite[0]), digits=4)} {unit}".strip())
            continue
        # only padding is smoothed: a median would slope where a schedule jumps
        drawn = smoothed(x, values) if title == "Padding" else [series("each step", x, values)]
        shown.append(Chart(title, unit, X_UNIT, drawn, from_zero=True))
    notes = [f"The same in all steps: {'; '.join(constant)}."] if constant else []
    return Section("Schedules and savings", charts=shown, notes=notes)


def time_section(log: RunLog) -> Section:
    if not log.steps_done:
        return Section("Time")
    x = log.column("consumed_tokens")
    times = log.step_times()
    drawn = smoothed(x, log.column("ms"))
    if np.nansum(log.column("data_ms")) > 0:
        drawn.append(series("waiting for data", x, log.column("data_ms"), color=1))
    log_y = times["longest"] > MANY_TIMES * times["median"]
    shown = [
        Chart("Step time", "ms", X_UNIT, drawn, from_zero=not log_y, log_y=log_y),
        rate_chart("Raw tokens per second", "", x, log.column("tokens_per_s")),
    ]
    if log.has("mfu"):
        shown.append(rate_chart("MFU", "% of the peak", x, 100 * log.column("mfu")))
    columns = ["fastest tenth below", "median step", "slowest tenth above", "longest"]
    row = [*(f"{ms:,.1f} ms" for ms in times.values()), f"{log.waiting_share():.1%}"]
    return Section("Time", shown, [Table([*columns, "of all time, waiting for data"], [row])])


def rate_chart(title: str, unit: str, x: np.ndarray, y: np.ndarray) -> Chart:
    return Chart(title, unit, X_UNIT, smoothed(x, y), from_zero=True)


def by_source(log: RunLog) -> Section:
    """Held-out bits per byte of each source that evaluations tell apart."""
    heading = "Held-out loss by source"
    lines = [line for line in log.evals if line.get("by_source")]
    if not lines:
        return Section(heading)
    last = lines[-1]["by_source"]
    on_the_way = [line for line in lines if not line["last"]]
    names = sorted(last, key=lambda name: last[name])
    x = np.array([line["consumed_tokens"] for line in on_the_way], dtype=float)
    drawn = []
    for color, name in enumerate(names):
        y = [line["by_source"].get(name, math.nan) for line in on_the_way]
        drawn.append(series(name, x, np.array(y, dtype=float), "dots", color))
    shown = [Chart("By source", "bits per byte", X_UNIT, drawn)] if on_the_way else []
    rows = [[name, f"{last[name]:.4f}"] for name in names]
    return Section(heading, shown, [Table(["source", "bits per byte"], rows)])


# ---- tables


def stops_and_stages(log: RunLog) -> tuple[tuple[Mark, ...], Table]:
    """Where the run went on after a stop, and where --pseudo changed its model."""
    events = [
        (start["resumed_at"], f"resumed, with commit {start['commit']}") for start in log.starts[1:]
    ]
    for line in log.stages:
        owners = line["owners"]
        used = " ".join("." if owner < 0 else str(owner) for owner in owners)
        number = len({owner for owner in owners if owner >= 0})
        have = f"--pseudo: {number} of {log.settings['model.layers']} layers have their own weights"
        events.append((line["step"], f"{have}\nof layer: {used}"))
    rows = []
    marks = []
    for number, (step, event) in enumerate(sorted(events), 1):
        at = log.spent(step)["consumed_tokens"]
        marks.append(Mark(at, str(number)))
        rows.append([str(number), f"{step:,}", short(at), event])
    return tuple(marks), Table(["mark", "after step", X_UNIT, "event"], rows)


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
