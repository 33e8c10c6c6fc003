"""The page about one run. Its numbers come from run_numbers.py, its charts from run_charts.py."""

import math

import numpy as np

from support.base.numbers import duration, short
from support.report.charts import Chart, Mark, Series, medians, moving_mean, series
from support.report.log import (
    UNITS,
    RunLog,
    dropped_shares,
    last_of,
    median,
    provenance,
    step_times,
    tokens_per_s,
    total_dropped,
    waiting_share,
)
from support.report.page import Fact, Page, Section, Table

# ---- run charts
#
# The charts of one run, all against consumed tokens.


PARTS, LEAST = 50, 5  # a smoothed curve is the mean over a fiftieth of all steps, or over five
FEW = 25  # steps, which are not smoothed
MANY_TIMES = 8.0  # a longest step of so many medians is drawn on a logarithmic axis
X_UNIT = "consumed tokens"


def loss_charts(log: RunLog, marks: tuple[Mark, ...]) -> list[Chart]:
    x, loss = log.column("consumed_tokens"), log.column("loss")
    if not log.steps_done:
        return []
    drawn = smoothed(x, loss)
    training = Chart("Training loss", "nats per target", X_UNIT, drawn, marks, clip_first=True)
    if training.highest() < np.nanmax(loss):
        highest = np.nanmax(loss)
        training = training._replace(note=f"The first steps, from {highest:.3g}, are above it.")
    evals = [line for line in log.on_the_way if line["step"]]
    charts = [training]
    if evals:
        at = np.array([line["consumed_tokens"] for line in evals], dtype=float)
        bpb = np.array([line["val_bpb"] for line in evals], dtype=float)
        last = log.final
        held_out = [series("on the way", at, bpb, "dots")]
        more = last and last.get("targets") != evals[-1].get("targets")
        if last and last is not evals[-1]:
            end = (np.array([float(last["consumed_tokens"])]), np.array([last["val_bpb"]]))
            held_out.append(
                series("at the end" + ", on more text" * bool(more), *end, "dots", color=1)
            )
        charts.append(Chart("Held-out loss", "bits per byte", X_UNIT, held_out, marks))
    if log.has("grad_norm"):
        norms = smoothed(x, log.column("grad_norm"))
        charts.append(Chart("Gradient norm", "", X_UNIT, norms, marks, clip_first=True))
    return charts


def smoothed(x: np.ndarray, y: np.ndarray) -> list[Series]:
    """Each step faintly, and the mean of the steps around it."""
    window = window_of(len(x))
    if window == 1:
        return [series("each step", x, y)]
    mean = series(f"mean of {window} steps", x, moving_mean(y, window))
    return [series("each step", x, y, "faint"), mean]


def window_of(steps: int) -> int:
    return 1 if steps < FEW else max(steps // PARTS, LEAST) | 1  # odd, so that it has a middle


def schedules(log: RunLog, marks: tuple[Mark, ...]) -> Section:
    """What follows a schedule; what stays the same is said in words."""
    x = log.column("consumed_tokens")
    named = {"lr": ("Learning rate", ""), "max_piece_len": ("Longest piece", "tokens")}
    for name in sorted(name for name in log.steps if name.startswith("difficulty_")):
        if np.array_equal(log.column(name), log.column("max_piece_len"), equal_nan=True):
            continue  # --curriculum seqlen, which is the length itself
        named[name] = (f"Difficulty: {name.removeprefix('difficulty_')}", "at most")
    named["pool"] = ("Samples that may be drawn", "")
    named["kept_tokens"] = ("Kept tokens", "of a row")
    values = {name: log.column(name) for name in named}
    named |= {"padding": ("Padding", "% of positions"), "dropped": ("Dropped", "% of layer-tokens")}
    values["padding"] = 100 * log.column("padding_share")
    values["dropped"] = 100 * dropped_shares(log)
    charts, constant = [], []
    for name, (title, unit) in named.items():
        finite = values[name][np.isfinite(values[name])]
        if not len(finite):
            continue
        if finite.min() == finite.max():
            constant.append(f"{title.lower()} {short(float(finite[0]), digits=4)} {unit}".strip())
            continue
        plain = [series("each step", x, values[name])]  # a mean would slope where these jump
        drawn = smoothed(x, values[name]) if name == "padding" else plain
        charts.append(Chart(title, unit, X_UNIT, drawn, marks, from_zero=True))
    notes = [f"The same in all steps: {'; '.join(constant)}."] if constant else []
    return Section("Schedules and savings", charts=charts, notes=notes)


def time_section(log: RunLog, marks: tuple[Mark, ...]) -> Section:
    x, ms = log.column("consumed_tokens"), log.column("ms")
    if not log.has("ms"):
        return Section("Time")
    low, middle, high, longest = step_times(ms)
    drawn = with_medians(x, ms)
    if np.nansum(log.column("data_ms")) > 0:
        drawn.append(series("waiting for data", x, log.column("data_ms"), color=1))
    log_y = longest > MANY_TIMES * middle
    least = middle / 100 if log_y else 0.0  # of what a logarithmic axis shows
    drawn = [one._replace(y=np.maximum(one.y, least)) for one in drawn]
    note = f"What is below {least:.2g} ms is drawn there." if log_y and len(drawn) > 1 else ""
    step_time = Chart("Step time", "ms", X_UNIT, drawn, marks, from_zero=not log_y, log_y=log_y)
    charts = [step_time._replace(note=note)]
    rate = with_medians(x, tokens_per_s(log))
    charts.append(Chart("Raw tokens per second", "", X_UNIT, rate, marks, from_zero=True))
    if log.has("mfu"):
        drawn = with_medians(x, 100 * log.column("mfu"))
        charts.append(Chart("MFU", "% of the peak", X_UNIT, drawn, marks, from_zero=True))
    columns = ["median step", "fastest tenth below", "slowest tenth above", "longest"]
    columns.append("of all time, waiting for data")
    waiting = waiting_share(log)
    waits = f"{waiting:.1%}" if math.isfinite(waiting) else ""
    row = [f"{value:,.1f} ms" for value in (middle, low, high, longest)]
    return Section("Time", charts, [Table(columns, [[*row, waits]])])


def with_medians(x: np.ndarray, y: np.ndarray) -> list[Series]:
    """Each step faintly, and the medians of some steps together: times have outliers."""
    window, finite = window_of(len(x)), np.isfinite(y)
    x, y = x[finite], y[finite]
    if window == 1 or not len(x):
        return [series("each step", x, y)]
    at, middle = medians(y, window)
    return [
        series("each step", x, y, "faint"),
        series(f"median of {window} steps", x[at], middle),
    ]


def by_source(log: RunLog, marks: tuple[Mark, ...]) -> Section:
    """Held-out bits per byte of each source that evaluations tell apart."""
    told = [line for line in log.evals if line.get("by_source")]
    if not told:
        return Section("Held-out loss by source")
    last, on_the_way = told[-1], [line for line in told if not line.get("last")]
    names = sorted(last["by_source"], key=lambda name: last["by_source"][name])
    x = np.array([line["consumed_tokens"] for line in on_the_way], dtype=float)
    drawn = []
    for color, name in enumerate(names):
        y = [line["by_source"].get(name, math.nan) for line in on_the_way]
        drawn.append(series(name, x, np.array(y, dtype=float), "dots", color))
    charts = [Chart("By source", "bits per byte", X_UNIT, drawn, marks)] if len(x) else []
    rows = [[name, f"{last['by_source'][name]:.4f}"] for name in names]
    return Section("Held-out loss by source", charts, [Table(["source", "bits per byte"], rows)])


SHOWN_EVALS = 24


def page(log: RunLog, recipe: str) -> Page:
    """A page about one run.

    Args: recipe the command line that makes this run again
    """
    marks, happened = on_the_way(log)
    sections = [
        Section("Loss", loss_charts(log, marks), [happened] if happened.rows else []),
        schedules(log, marks),
        time_section(log, marks),
        by_source(log, marks),
        Section("Evaluations", tables=[evaluations(log)] if log.evals else []),
        Section("A sample", blocks=[log.sample] if log.sample else []),
        Section("Recipe", blocks=[recipe]),
        Section("Made with", tables=[made_with(log)]),
    ]
    told = [s for s in sections if s.charts or s.tables or s.blocks]
    return Page(log.name, lead(log), facts(log), told)


def made_with(log: RunLog) -> Table:
    rows = []
    for name, value in provenance(log).items():
        told = f"{value:,}" if isinstance(value, int) else str(value)
        told = short(value, unit="FLOP") if isinstance(value, float) else told
        rows.append([name.replace("_", " "), f"`{told}`" if name == "argv" else told])
    return Table(["", ""], rows)


def lead(log: RunLog) -> str:
    s = log.settings
    model = f"{s.get('model.model', 'run')} {s.get('model.size', '')}".strip()
    budget = s.get("optim.tokens") or math.nan
    if not log.steps_done:
        state = "no step is in its log yet"
    elif log.final:
        state = f"finished after {log.steps_done:,} steps"
    else:
        done = last_of(log, "consumed_tokens") / budget
        state = f"not finished: {log.steps_done:,} steps"
        state += f", {min(done, 1):.0%} of its budget" if math.isfinite(done) else ""
    torn = f"; {lines(log.unread)} of the log torn or incomplete, left out" if log.unread else ""
    return f"{model}, {state}{torn} · {log.folder}"


def lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def facts(log: RunLog) -> list[Fact]:
    spent, s = log.spent(), log.settings
    best = log.final or (log.evals[-1] if log.evals else None)
    found = []
    if best:
        on = f"bits per byte, {'at the end' if log.final else 'so far'}"
        text = f", on {best['targets']:,} held-out tokens" if "targets" in best else ""
        found.append(Fact("Held-out loss", f"{best['val_bpb']:.4f}", on + text))
    if not log.steps_done:
        return found
    budget = s.get("optim.tokens")
    asked = f"of {short(budget)} asked for" if budget else ""
    found.append(Fact("Consumed tokens", short(spent["consumed_tokens"]), asked))
    epochs = last_of(log, "epochs")
    passes = f"{epochs:.3g} passes over the store" if math.isfinite(epochs) else "read, no padding"
    found.append(Fact("Raw tokens", short(spent["real_tokens"]), passes))
    dropped = total_dropped(log)
    if dropped > 0:
        computed = short(last_of(log, "layer_tokens"))
        detail = f"of layer-tokens; {computed} computed"
        found.append(Fact("Dropped", f"{dropped:.1%}", detail))
    time = duration(spent["seconds"])
    found.append(Fact("Time of all steps", time, "without evaluations and checkpoints"))
    rate = median(tokens_per_s(log))
    found.append(Fact("Tokens per second", short(rate), "raw tokens, median of all steps"))
    mfu = median(log.column("mfu"))
    detail = f"MFU {mfu:.1%}" if math.isfinite(mfu) else ""
    flops = short(spent["flops"], unit="FLOP")
    found.append(Fact("FLOPs", flops or "not in the log", detail))
    return found


def on_the_way(log: RunLog) -> tuple[tuple[Mark, ...], Table]:
    """Where the run went on after a stop, and where --pseudo changed its model."""
    layers = log.settings.get("model.layers")
    happened = []
    for line in log.starts[1:]:
        step = line.get("resumed_at", 0)
        happened.append((step, f"resumed, with commit {line.get('commit', 'unknown')}"))
    for line in log.stages:
        owners = line.get("owners", [])
        used = " ".join("." if owner < 0 else str(owner) for owner in owners)
        own = len({owner for owner in owners if owner >= 0})
        what = f"--pseudo: {own} of {layers} layers have weights of their own\nof layer: {used}"
        happened.append((line["step"], what))
    happened.sort(key=lambda event: event[0])
    rows, marks = [], []
    for number, (step, what) in enumerate(happened, 1):
        at = log.spent(step)["consumed_tokens"] if step else 0.0
        marks.append(Mark(0.0 if math.isnan(at) else at, str(number)))
        rows.append([str(number), f"{step:,}", short(at), what])
    return tuple(marks), Table(["mark", "after step", X_UNIT, "what"], rows)


def evaluations(log: RunLog) -> Table:
    """Each evaluation; of very many some, the last among them."""
    every = -(-len(log.evals) // SHOWN_EVALS)
    rows = []
    for line in log.evals[::-1][::every][::-1]:
        spent = log.spent(line["step"])
        cells = [f"{line['step']:,}", *map(short, list(spent.values())[:2])]
        cells += [short(spent["flops"], unit="FLOP"), duration(spent["seconds"])]
        targets = f"{line['targets']:,}" if "targets" in line else ""
        rows.append([*cells, targets, f"{line['val_bpb']:.4f}"])
    columns = ["step", *UNITS.values(), "held-out tokens", "bits per byte"]
    told = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return Table([columns[i] for i in told], [[row[i] for i in told] for row in rows])
