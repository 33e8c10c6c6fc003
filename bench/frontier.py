"""Measure what a technique gains, for a given model and against the best plain model of any shape.

If you need these twelve layers, you ask how much sooner they reach a loss. If you need only the
loss, you ask whether another plain model reaches it sooner: a technique that beats one plain model
may only show that this model was chosen badly. So plain models of many shapes are trained with many
budgets, and a run with techniques is compared with two frontiers: that of its own model, and that
of all models. The tables count how many runs each side was tuned with. They compare at equal
seconds, and show raw tokens too.

runs    train what bench/frontier.ini lists and has no record yet: two runs at once with one thread
        each, because losses do not depend on how busy the machine is
costs   time the steps. A step's time follows from its shape: the model, the rows and their length,
        whether documents are isolated, the tokens that each layer sees, the blocks that run. Each
        shape takes turns with a reference step, a plain one of six layers. The seconds of a run are
        the sum over its steps, so records of other days and machines can be compared. Evaluation
        and checkpoints are not timed, nor is reading, which is hidden behind the step. On a GPU,
        whose clock is steady, the run's own seconds count
report  print the table of a section, or only the runs that --match finds, at equal seconds or, with
        --fixed, at equal raw tokens. Between two runs, a frontier is a straight line over the
        logarithm of the cost
quick   measure one ratio from scratch, in minutes on two cores: train two plain runs of a section
        and one with techniques, with a new seed, and time their steps

    python bench/frontier.py runs --sections nano --record         # continues where it was stopped
    OMP_NUM_THREADS=2 python bench/frontier.py costs --record      # needs a quiet machine
    python bench/frontier.py report --sections nano --match ltd --least-seeds 3

docs/tables.py and docs/pictures.py show the records in docs/.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from configparser import ConfigParser
from dataclasses import asdict, fields
from functools import partial
from itertools import cycle, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measure import (
    RESULTS,
    ROOT,
    command_line,
    cpu_name,
    in_turns,
    pick,
    quartiles,
    ratios,
    recorder,
    records,
    turn_of,
)
from step import model_of, trainer_of

import config
import pseudo
from data import open_data
from model import TransformerConfig
from plan import Plan, Step
from report import Curve
from support import process, runtime
from support.clock import Clock
from support.run import Log, read_log
from support.weights import model_size
from train import enter_stage

EMBEDDED = "pd"  # the text of sections whose runs need no --data
UNIT = 391  # reference steps in a unit of cost, 0.8 M tokens
UNIT_SECONDS = 69  # what a unit takes on two quiet cores
STEPS_TIMED = 8  # steps timed of each shape, because packed ones differ in their documents
BUDGETS = (1, 2, 4, 8, 16)  # in units
SIDES = ("plain", "techniques")
FIXED = ("seconds", "raw tokens")
TECHNIQUES = ("--ltd", "--pack", "--curriculum", "--pseudo")


# ---- runs


class Arm(NamedTuple):
    section: str  # of bench/frontier.ini
    text: str
    shared: str  # flags that all runs of the section have
    flags: str
    seed: int

    def argv(self, stores: dict[str, Path]) -> list[str]:
        """Return the arguments of train.py."""
        if self.text not in {EMBEDDED, *stores}:
            missing = f"--stores lacks the text of section {self.section}"
            raise ValueError(f"{missing}: add {self.text}=FOLDER")
        data = ["--data", str(stores[self.text])] if self.text in stores else []
        return [*data, *self.shared.split(), *self.flags.split(), "--seed", str(self.seed)]

    @property
    def is_plain(self) -> bool:
        """Whether no technique is on beyond the section's. Padded rows of one piece are plain."""
        on = {*TECHNIQUES} & {*self.flags.split()}
        return not on or (on == {"--pack"} and "--pack-max-per-row 1" in self.flags)


def arms_in(sections: list[str]) -> list[Arm]:
    """Return the runs of bench/frontier.ini: first all with their first seed, then the second."""
    parser = ConfigParser(delimiters=(" seeds ",), interpolation=None)
    parser.optionxform = str  # keep the case of flags
    parser.read(Path(__file__).with_name("frontier.ini"))
    headings = {heading.split()[0]: heading for heading in parser.sections()}
    arms = []
    for name in pick(sections, headings):
        text, *shared = headings[name].split()[1:]
        for flags, seeds in parser[headings[name]].items():
            every = partial(Arm, name, text, " ".join(shared), flags)
            arms += [(turn, every(int(seed))) for turn, seed in enumerate(seeds.split())]
    return [arm for _, arm in sorted(arms, key=itemgetter(0))]


def arm_of(record: dict) -> Arm:
    return Arm(*(record[name] for name in Arm._fields))


def known(name: str, device: str) -> list[dict]:
    """Return all records, those in results/ and those where new ones go."""
    file = f"{'gpu-' * (device == 'cuda')}{name}"
    folders = [path for path in {RESULTS, ROOT / "results"} if (path / f"{file}.jsonl").exists()]
    return [record for path in sorted(folders) for record in records(file, path)]


def known_costs(device: str, machine: str = "") -> list[dict]:
    """Return a cost for each shape, the first that was recorded on a machine of this name."""
    costs = [r for r in known("frontier-cost", device) if machine in r["hardware"]]
    return [*{cost["shape"]: cost for cost in reversed(costs)}.values()]


def plan_run(
    arm: Arm, stores: dict[str, Path]
) -> tuple[config.Config, TransformerConfig, Iterator[tuple[str, Step]]]:
    """Plan a run without training: return settings, model, and the steps, each with its shape."""
    here = runtime.start("cpu", "fp32")
    settings = config.build(config.parse(arm.argv(stores)))
    data = open_data(settings.data, here)
    model = config.transformer_config(settings, *model_size(settings, data.encoding))
    plan = Plan(settings, data.store, config.task_of(settings, data.encoding), here, model)

    def steps() -> Iterator[tuple[str, Step]]:
        clock = Clock()
        while clock.consumed_tokens < settings.optim.tokens:
            step = plan(clock)
            yield shape_of(settings, model, step), step
            clock = step.after

    return settings, model, steps()


def shape_of(settings: config.Config, model: TransformerConfig, step: Step) -> str:
    """Describe in one line all that a step's time depends on."""
    usual = {f.name: f.default for f in fields(model)}
    rows, seq_len = step.batch.tokens.shape
    seen, blocks = step.tokens_by_layer, settings.model.layers
    if settings.pseudo.on:
        owners = pseudo.owners_at(settings.pseudo, blocks, step.context.progress)
        blocks = len({*owners} - {pseudo.ABSENT})
    shape = f"{rows} rows of {seq_len}"
    if settings.pack.on and settings.pack.mask:
        # rounded, for few shapes in a curriculum
        longest = 1 << (step.window.limits.max_piece_len - 1).bit_length()
        shape += f" in pieces up to {longest}, {settings.pack.max_per_row or 'many'} a row"
    unusual = [f"{name} {value}" for name, value in asdict(model).items() if value != usual[name]]
    optimizer = f"{settings.optim.optimizer} on {blocks} blocks"
    layers = " ".join(f"{len([*same])}x{tokens}" for tokens, same in groupby(seen))
    return ", ".join([f"kind {model.kind}", *unusual, optimizer, shape, f"seen {layers}"])


def run(arm: Arm, stores: dict[str, Path], device: str) -> dict:
    """Train in a separate process, with one thread on a CPU; returns what the log says.

    Raises: ValueError with the last line that it printed, if it fails
    """
    argv = [*arm.argv(stores), "--device", device, "--checkpoint-every", "0", "--eval-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "train.py"), *argv, "--out", str(out)]
        threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        if "the loss" in done.stderr or "the gradient" in done.stderr:  # not finite
            return {
                **arm._asdict(),
                "val_bpb": None,
                "stopped": done.stderr.strip().splitlines()[-1],
            }
        if done.returncode:
            raise ValueError(f"{shlex.join(argv)}: {done.stderr.strip().splitlines()[-1]}")
        lines, text = [*read_log(out)], json.loads((out / "config.json").read_text())["store"]
    steps = [line for line in lines if line["event"] == "train"]
    (final,) = (line for line in lines if line["event"] == "eval" and line["last"])
    *_, planned_steps = plan_run(arm, stores)
    losses = [line["loss"] for line in steps]
    over = [x / min(losses[:n]) for n, x in enumerate(losses) if n]  # over the lowest before
    return {
        "worst_ratio": round(max(over), 3),
        "last_ratio": round(over[-1], 3),
        "steps_above_1.2": sum(ratio > 1.2 for ratio in over),
        **arm._asdict(),
        "text_sha256": text["tokens.bin"][:16],
        "val_bpb": round(final["val_bpb"], 4),
        "steps": len(steps),
        **{f"{kind}_tokens": steps[-1][f"{kind}_tokens"] for kind in ("consumed", "real", "layer")},
        "train_seconds": round(sum(line["ms"] for line in steps) / 1e3, 1),
        "shapes": Counter(shape for shape, _ in planned_steps) if device == "cpu" else {},
    }


def make_runs(args: argparse.Namespace) -> None:
    done = {arm_of(record) for record in known("arms", args.device)}
    arms = [arm for arm in arms_in(args.sections) if arm not in done][: args.most]
    for arm in arms:  # report a wrong flag before the first run starts
        config.build(config.parse(arm.argv(args.stores)))
    keep = recorder("arms", args)
    with ThreadPoolExecutor(1 if args.device == "cuda" else 2) as pool:
        running = [pool.submit(run, arm, args.stores, args.device) for arm in arms]
        for number, future in enumerate(as_completed(running), 1):
            keep(future.result())
            print(f"{number} of {len(arms)}", flush=True)


# ---- costs


def measure_costs(args: argparse.Namespace) -> None:
    """Time every shape that occurs in a recorded run and has no recorded cost, on --machine."""
    done = {record["shape"] for record in known_costs(args.device, args.machine)}
    keep = recorder("frontier-cost", args, turns=args.turns)
    made = known("frontier", args.device)
    some = [r for r in made if not args.sections or r["section"] in args.sections]
    some = [r for r in some if arm_of(r).is_plain or re.search(args.match or "", r["flags"])]
    for cost in costs_of(some, done, args):
        keep(cost)


def costs_of(made: list[dict], done: set[str], args: argparse.Namespace) -> Iterator[dict]:
    """Time each shape of these runs' steps that is not done, in turns with the reference step."""
    reference = Arm("", EMBEDDED, "", "--layers 6 --seq-len 256 --tied --batch-tokens 2048", 1)
    ((_, plain_step),) = timed_steps(reference, None, args.stores)
    for record in made:
        new = {*record["shapes"]} - done
        done = done | new
        for shape, step in timed_steps(arm_of(record), new, args.stores) if new else ():
            pair = {"of": partial(turn_of, step), "to": partial(turn_of, plain_step)}
            taken = in_turns(pair, args.turns)
            of, to = ([turn.seconds for turn in taken[name]] for name in pair)
            ms = quartiles([1e3 * seconds for seconds in of])
            yield {"shape": shape, "ms": ms, "to_reference": quartiles(ratios(of, to))}


def timed_steps(
    arm: Arm, shapes: set[str] | None, stores: dict[str, Path]
) -> Iterator[tuple[str, Callable]]:
    """Yield for each of these shapes, or for all, a function that cycles through its steps."""
    # At this rate the model never memorises the batches. If it did, gradients would be denormal
    # numbers, which are slow.
    settings, model, steps = plan_run(arm._replace(flags=f"{arm.flags} --lr 1e-9"), stores)
    trainer = trainer_of(settings, model_of(settings, model.vocab_size), "cpu")
    all_of: dict[str, list[Step]] = {}
    for shape, step in steps:
        all_of.setdefault(shape, []).append(step)
    for shape, alike in all_of.items():
        if settings.pseudo.on:
            enter_stage(trainer, alike[0], Log())
        if shapes is None or shape in shapes:
            batches = cycle(alike[:: -(-len(alike) // STEPS_TIMED)])
            yield shape, lambda make=trainer.train_step, batches=batches: make(next(batches))


# ---- the frontier


class Point(NamedTuple):
    """A run, with the losses of all its seeds."""

    flags: str
    plain: bool
    cost: float  # what is held fixed: seconds, or raw tokens
    losses: list[float]
    seconds: float
    raw_tokens: int
    machines: frozenset[str] = frozenset()  # on which its steps were timed

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)


def points_of(
    made: list[dict], costs: list[dict], fixed: str = "seconds", unit_seconds: float = UNIT_SECONDS
) -> list[Point]:
    """Return the runs whose shapes were all timed, sorted by cost: seconds or raw tokens."""
    units = {cost["shape"]: cost["to_reference"][1] / UNIT for cost in costs}
    timed_on = {cost["shape"]: cost["hardware"].replace("(R)", "") for cost in costs}
    points = []
    of_flags = itemgetter("flags")
    for flags, alike in groupby(sorted(made, key=of_flags), of_flags):
        seeds = [*alike]
        shapes = seeds[0]["shapes"]  # empty on a GPU
        if shapes.keys() <= units.keys():
            took = unit_seconds * sum(count * units[shape] for shape, count in shapes.items())
            seconds = took or statistics.median(record["train_seconds"] for record in seeds)
            losses = [record["val_bpb"] for record in seeds]
            plain, real = arm_of(seeds[0]).is_plain, seeds[0]["real_tokens"]
            cost = seconds if fixed == "seconds" else real
            machines = frozenset(timed_on[name].partition(", 2 cores")[0] for name in shapes)
            points.append(Point(flags, plain, cost, losses, seconds, real, machines))
    return sorted(points, key=attrgetter("cost", "loss"))


def points_in(section: str, device: str, fixed: str = "seconds", machine: str = "") -> list[Point]:
    """Return the runs of a section, with the costs of their steps on a machine of this name."""
    made = [record for record in known("frontier", device) if record["section"] == section]
    costs, unit_seconds = known_costs(device, machine), UNIT_SECONDS
    if machine:
        reference_ms = statistics.median(c["ms"][1] / c["to_reference"][1] for c in costs)
        unit_seconds = UNIT * reference_ms / 1e3
    return points_of(made, costs, fixed, unit_seconds)


def envelope(points: list[Point]) -> list[Point]:
    """Return the falling part of the lower convex hull, over the logarithm of the cost.

    Example: of (1 s, 2.0), (2 s, 1.9), (4 s, 1.6) and (8 s, 1.7), the first and the third
    """
    hull: list[Point] = []
    for point in points:
        if not hull or point.loss < hull[-1].loss:
            while len(hull) > 1 and slope(hull[-2], point) <= slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
    return hull


def slope(a: Point, b: Point) -> float:
    return (b.loss - a.loss) / np.log(b.cost / a.cost)


def cost_of(loss: float, hull: list[Point]) -> float:
    """Return the cost at which a frontier reaches a loss; nan outside the measured range."""
    backwards = sorted((point.loss, np.log(point.cost)) for point in hull)
    return float(np.exp(between(loss, backwards)))


def loss_at(cost: float, hull: list[Point]) -> float:
    """Return the loss that a frontier reaches at a cost; nan outside the measured range."""
    return between(np.log(cost), [(np.log(point.cost), point.loss) for point in hull])


def between(x: float, points: list[tuple[float, float]]) -> float:
    if not points:
        return np.nan
    return float(np.interp(x, *zip(*points, strict=True), left=np.nan, right=np.nan))


# ---- tables


def table(args: argparse.Namespace) -> str:
    """Return a section's table: both frontiers or, with --match, the runs that it finds."""
    points = points_in(args.sections[0], args.device, args.fixed, args.machine)
    shared = arms_in(args.sections)[0].shared
    about = [f"All runs also have `{shared}`."] * bool(shared)
    if machines := sorted(frozenset().union(*(p.machines for p in points))):
        about.append(f"Timed on {' and '.join(machines)}.")
    if args.match is None:
        text = frontier_table(points, args.least_seeds, args.fixed)
        return f"{' '.join(about)}\n\n{text}"
    some = [p for p in points if len(p.losses) >= args.least_seeds]
    chosen = [p for p in some if re.search(args.match, p.flags)]
    runs = Counter(p.plain for p in points for _ in p.losses)
    about.append(f"Tuned with {runs[True]} plain runs and {runs[False]} with techniques.")
    return f"{' '.join(about)}\n\n{runs_table(chosen, points, args.fixed)}"


def frontier_table(points: list[Point], least_seeds: int, fixed: str = "seconds") -> str:
    """Compare what both frontiers need for the losses of the plain one after 1, 2, 4, 8, 16 units.

    If raw tokens are held fixed, take the losses of the runs on the plain frontier instead.
    """
    sides = [[p for p in points if p.plain == (side == "plain")] for side in SIDES]
    plain, other = (envelope([p for p in s if len(p.losses) >= least_seeds]) for s in sides)
    rows = []
    budgets = [UNIT_SECONDS * units for units in BUDGETS]
    for cost in budgets if fixed == "seconds" else [p.cost for p in plain]:
        loss = loss_at(cost, plain)
        if np.isnan(loss):
            continue
        other_cost = cost_of(loss, other)
        near = [f"{sum(abs(np.log2(p.cost / cost)) < 0.5 for p in s)}" for s in sides]
        costs = [written(fixed, each) for each in (cost, other_cost)]
        rows.append([f"{loss:.3f}", *costs, shown(other_cost / cost), *near])
    took = [f"{side}, {fixed}" for side in SIDES]
    return markdown_table(["bits per byte", *took, "share", "plain runs", "technique runs"], rows)


def runs_table(
    points: list[Point],
    beside: list[Point],
    fixed: str = "seconds",
    unsaid: Collection[str] = (),
) -> str:
    """Compare runs with two plain frontiers: of the same model, and of all models in `beside`.

    Args: unsaid flags that the table leaves out
    """
    plain = [p for p in beside if p.plain]
    best = envelope(plain)
    rows = [
        [
            f"`{' '.join(f for f in flags_in(p.flags) if f not in unsaid) or 'plain'}`",
            str(len(p.losses)),
            written("seconds", p.seconds),
            written("raw tokens", p.raw_tokens),
            spread(p.losses),
            share_of(p, envelope([q for q in plain if model_in(q) == model_in(p)])),
            share_of(p, best),
        ]
        for p in points
    ]
    names = ["flags", "seeds", *FIXED, "bits per byte"]
    against = [f"of the same model's {fixed}", "of the best plain model's"]
    return markdown_table([*names, *against], rows)


def flags_in(text: str) -> list[str]:
    """Split a command line into flags with their values: ["--layers 2", "--pack"]"""
    return re.findall(r"--\S+(?: (?!--)\S+)*", text)


def model_in(p: Point) -> set[str]:
    """Return the flags of a run that define its model. Example: {"--layers 8", "--width 64"}"""
    names = ("layers", "width", "heads", "block", "tied", "qk-norm", "seq-len")
    return {flag for flag in flags_in(p.flags) if flag.split()[0].removeprefix("--") in names}


def share_of(p: Point, plain: list[Point]) -> str:
    """Return a run's cost as a share of what the plain frontier needs for its loss.

    Example: 0.54; "under 0.49" if no plain run is as good
    """
    if plain and p.loss < plain[-1].loss:
        return f"under {p.cost / plain[-1].cost:.2f}"
    return shown(p.cost / cost_of(p.loss, plain))


def written(kind: str, cost: float) -> str:
    """Write a cost without its unit. Example: 118 for seconds, 2.70 M for raw tokens"""
    return shown(cost, 0) if np.isnan(cost) or kind == "seconds" else f"{cost / 1e6:.2f} M"


def shown(value: float, digits: int = 2) -> str:
    return "not measured" if np.isnan(value) else f"{value:.{digits}f}"


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [columns, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def spread(values: list[float]) -> str:
    """Return mean, minimum and maximum: [1.0, 1.2] -> "1.100 (1.000 to 1.200)" """
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def curves_of(section: str, device: str) -> list[Curve]:
    """Return curves of held-out loss over seconds: a dot for each run, a line for each frontier."""
    points = points_in(section, device)
    curves = []
    for color, side in enumerate(SIDES):
        of_side = [p for p in points if p.plain == (side == "plain")]
        hull = envelope(of_side)
        x, y = np.log10([p.cost for p in hull]), np.array([p.loss for p in hull])
        curves.append(Curve(side, x, y, color, "dots"))
        for p in of_side:
            x = np.full(2, np.log10(p.cost))
            curves.append(Curve(p.flags, x, np.array([min(p.losses), max(p.losses)]), color))
            curves.append(Curve(p.flags, x[:1], np.array([p.loss]), color, "dots"))
    return curves


# ---- the command


def report(args: argparse.Namespace) -> None:
    for section in args.sections or sorted({r["section"] for r in known("frontier", args.device)}):
        args.sections = [section]
        print(f"## {section}\n\n{table(args)}\n")


def quick(args: argparse.Namespace) -> None:
    arms = arms_in(args.sections or ["books"])
    some = [a for a in arms if a.is_plain][:2] + [a for a in arms if not a.is_plain][:1]
    new = [arm._replace(seed=arm.seed + 1000) for arm in some]
    before = {p.flags: p.seconds for p in points_in(some[0].section, args.device)}
    # evaluating, and timing the steps, take half as long again
    minutes = 1.5 * sum(before.get(arm.flags, 0) for arm in some) / 60
    how_long = f"about {minutes:.0f} minutes with AVX-512, two or three times as long without"
    print(f"training {len(new)} runs, two at once, on two cores: {how_long}", flush=True)
    made, costs = [], []
    with ThreadPoolExecutor(2) as pool:
        for record in pool.map(partial(run, stores=args.stores, device=args.device), new):
            made.append(record)
            print(f"{record['flags']}: {record['val_bpb']} bits per byte", flush=True)
    for cost in costs_of(made, set(), args):
        costs.append(cost | {"hardware": cpu_name()})
        print(f"timed a step: {cost['ms'][1]:.0f} ms", flush=True)
    points = points_of(made, costs)
    print(runs_table(points, points))


MEASURES = {
    "runs": make_runs,
    "costs": measure_costs,
    "report": report,
    "quick": quick,
}


def store_named(text: str) -> tuple[str, Path]:
    name, folder = text.split("=")
    return name, Path(folder)


def flags() -> argparse.ArgumentParser:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--sections", nargs="+", default=[], help="of bench/frontier.ini (all)")
    parser.add_argument("--stores", nargs="+", type=store_named, default=[], metavar="NAME=FOLDER")
    parser.add_argument("--most", type=int, help="how many runs to train now (all)")
    parser.add_argument("--match", metavar="REGEX", help="only runs whose flags match")
    parser.add_argument("--machine", default="", help="only costs of this hardware, such as AVX2")
    parser.add_argument("--fixed", choices=FIXED, default="seconds", help="held fixed (seconds)")
    parser.add_argument("--least-seeds", type=int, default=1, help="report: seeds of a run (1)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = flags().parse_args(argv)
    args.stores = dict(args.stores)
    try:
        MEASURES[args.what](args)
    except re.error as error:
        raise ValueError(f"--match {args.match}: {error}") from None


if __name__ == "__main__":
    process.exit_cleanly(main)
