"""What a technique buys: for a given model, and against the best plain model of any shape.

Who needs these twelve layers asks in how much of their plain seconds they reach a loss. Who needs
only the loss asks whether another plain model reaches it sooner: a technique that beats one plain
model may only have found a badly chosen one. So plain models of many shapes are trained at many
budgets, and a run with techniques is compared with both frontiers, that of its own model and that
of all. The tables count how many runs each side was tuned with. Held fixed are seconds; raw tokens
stand beside them.

runs    bench/frontier.ini lists them. What has no record is run, one thread each and two at once:
        losses do not depend on how busy the machine is
costs   seconds follow from steps, and a step's from its shape: the model, the rows and their
        length, documents to isolate or none, tokens that each layer sees, blocks that are there.
        Each shape is timed in turns with one reference step, a plain one of six layers, and a run
        is the sum over its steps, so records of other days and machines compare. Not timed:
        evaluation, checkpoints, and reading, which is hidden behind the step. A GPU's clock is
        steady: there a run's own seconds count
report  the table of a section, or of its runs that --match finds, at equal seconds or, with
        --fixed, at equal raw tokens. Between its runs a frontier is straight in their logarithm
docs    the tables of README.md and docs/, made anew where a comment holds the flags of their
        report; docs/pictures.py draws
quick   one ratio from nothing, in minutes on two cores: two plain runs of a section and one of
        the others with a new seed, and what their steps cost

    python bench/frontier.py runs --sections nano --record         # goes on where it was stopped
    OMP_NUM_THREADS=2 python bench/frontier.py costs --record      # on a machine that is quiet
    python bench/frontier.py report --sections nano --match ltd --least-seeds 3
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
from collections.abc import Callable, Iterator
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
from support import runtime
from support.clock import Clock
from support.run import Log, read_log
from support.weights import model_size
from train import next_trainer

EMBEDDED = "pd"  # the text of a section whose runs need no --data
UNIT = 391  # reference steps, of 0.8 M tokens
UNIT_SECONDS = 69  # that they take on two quiet cores
STEPS_TIMED = 8  # of a shape: packed ones differ by their documents
BUDGETS = (1, 2, 4, 8, 16)  # units
SIDES = ("plain", "techniques")
FIXED = ("seconds", "raw tokens")
TECHNIQUES = ("--ltd", "--pack", "--curriculum", "--pseudo")


# ---- what is run


class Arm(NamedTuple):
    section: str  # of bench/frontier.ini
    text: str
    shared: str  # flags that all runs of the section have
    flags: str
    seed: int

    def argv(self, stores: dict[str, Path]) -> list[str]:
        """What train.py is called with."""
        if self.text not in {EMBEDDED, *stores}:
            missing = f"--stores: the text of {self.section} is not there"
            raise ValueError(f"{missing}, add {self.text}=FOLDER")
        data = ["--data", str(stores[self.text])] if self.text in stores else []
        return [*data, *self.shared.split(), *self.flags.split(), "--seed", str(self.seed)]

    @property
    def is_plain(self) -> bool:
        """But for what all runs of the section do. Padded rows, one piece in each, are plain."""
        on = {*TECHNIQUES} & {*self.flags.split()}
        return not on or (on == {"--pack"} and "--pack-max-per-row 1" in self.flags)


def listed(sections: list[str]) -> list[Arm]:
    """The runs of bench/frontier.ini, all with their first seed before any with its second."""
    parser = ConfigParser(delimiters=(" seeds ",), interpolation=None)
    parser.optionxform = str  # flags as they are written
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
    """The records that there are, here and where new ones go."""
    file = f"{'gpu-' * (device == 'cuda')}{name}"
    folders = [path for path in {RESULTS, ROOT / "results"} if (path / f"{file}.jsonl").exists()]
    return [record for path in sorted(folders) for record in records(file, path)]


def planned(
    arm: Arm, stores: dict[str, Path]
) -> tuple[config.Config, TransformerConfig, Iterator[tuple[str, Step]]]:
    """A run that is not made: its model, and its steps, each with what its time follows from."""
    here = runtime.start("cpu", "fp32")
    settings = config.build(config.parse(arm.argv(stores)))
    data = open_data(settings.data, settings.model.model == "bert", here)
    model = config.transformer_config(settings, *model_size(settings, data.encoding))
    plan = Plan(settings, data.store, data.special_ids, here, model)

    def steps() -> Iterator[tuple[str, Step]]:
        clock = Clock()
        while clock.consumed_tokens < settings.optim.tokens:
            step = plan(clock)
            yield shape_of(settings, model, step), step
            clock = step.after

    return settings, model, steps()


def shape_of(settings: config.Config, model: TransformerConfig, step: Step) -> str:
    """In one line."""
    usual = {f.name: f.default for f in fields(TransformerConfig)}
    rows, seq_len = step.batch.tokens.shape
    seen, blocks = step.tokens_by_layer, settings.model.layers
    if settings.pseudo.on:
        owners = pseudo.owners_at(settings.pseudo, blocks, step.context.progress)
        blocks = len({*owners} - {pseudo.ABSENT})
    longest = 1 << (step.max_piece_len - 1).bit_length()  # few shapes, though a curriculum has many
    pieces = f" in pieces up to {longest}, {settings.pack.max_per_row or 'many'} a row"
    return ", ".join(
        [
            *(f"{name} {value}" for name, value in asdict(model).items() if value != usual[name]),
            f"{settings.optim.optimizer} on {blocks} blocks",
            f"{rows} rows of {seq_len}" + pieces * settings.pack.on,
            "seen " + " ".join(f"{len([*same])}x{tokens}" for tokens, same in groupby(seen)),
        ]
    )


def run(arm: Arm, stores: dict[str, Path], device: str) -> dict:
    """Train in a process of its own, with one thread on a CPU; what its log says.

    Raises: ValueError with the last line that it printed, if it fails
    """
    argv = [*arm.argv(stores), "--device", device, "--checkpoint-every", "0", "--eval-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "train.py"), *argv, "--out", str(out)]
        threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        if done.returncode:
            raise ValueError(f"{shlex.join(argv)}: {done.stderr.strip().splitlines()[-1]}")
        lines, text = [*read_log(out)], json.loads((out / "config.json").read_text())["store"]
    steps = [line for line in lines if line["event"] == "train"]
    (final,) = (line for line in lines if line["event"] == "eval" and line["last"])
    *_, planned_steps = planned(arm, stores)
    return {
        **arm._asdict(),
        "text_sha256": text["tokens.bin"][:16],
        "val_bpb": round(final["val_bpb"], 4),
        "steps": len(steps),
        **{f"{kind}_tokens": steps[-1][f"{kind}_tokens"] for kind in ("consumed", "real", "layer")},
        "train_seconds": round(sum(line["ms"] for line in steps) / 1e3, 1),
        "shapes": Counter(shape for shape, _ in planned_steps) if device == "cpu" else {},
    }


def make_runs(args: argparse.Namespace) -> None:
    done = {arm_of(record) for record in known("frontier", args.device)}
    arms = [arm for arm in listed(args.sections) if arm not in done][: args.most]
    for arm in arms:  # a wrong flag is said before the first run
        config.build(config.parse(arm.argv(args.stores)))
    keep = recorder("frontier", args)
    with ThreadPoolExecutor(1 if args.device == "cuda" else 2) as pool:
        running = [pool.submit(run, arm, args.stores, args.device) for arm in arms]
        for number, future in enumerate(as_completed(running), 1):
            keep(future.result())
            print(f"{number} of {len(arms)}", flush=True)


# ---- what its steps cost


def measure_costs(args: argparse.Namespace) -> None:
    """Of every shape that a recorded run has and no record of a cost."""
    done = {record["shape"] for record in known("frontier-cost", args.device)}
    keep = recorder("frontier-cost", args, turns=args.turns)
    made = known("frontier", args.device)
    some = [r for r in made if not args.sections or r["section"] in args.sections]
    for cost in costs_of(some, done, args):
        keep(cost)


def costs_of(made: list[dict], done: set[str], args: argparse.Namespace) -> Iterator[dict]:
    """Of the steps of these runs, each shape that is not done in turns with the reference."""
    reference = Arm("", EMBEDDED, "", "--layers 6 --tied --batch-tokens 2048", 1)
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
    """A function for each of these shapes, or for all, that makes some of its steps in turn."""
    # at this rate it never learns the batches by heart, after which gradients are slow denormals
    settings, model, steps = planned(arm._replace(flags=f"{arm.flags} --lr 1e-9"), stores)
    trainer = trainer_of(settings, model_of(settings, model.vocab_size), "cpu")
    all_of: dict[str, list[Step]] = {}
    for shape, step in steps:
        all_of.setdefault(shape, []).append(step)
    for shape, alike in all_of.items():
        if settings.pseudo.on:
            trainer = next_trainer(trainer, alike[0], Log(ROOT, active=False))
        if shapes is None or shape in shapes:
            batches = cycle(alike[:: -(-len(alike) // STEPS_TIMED)])
            yield shape, lambda make=trainer.train_step, batches=batches: make(next(batches))


# ---- the frontier


class Point(NamedTuple):
    """All seeds of a run."""

    flags: str
    plain: bool
    cost: float  # what is held fixed: seconds, or raw tokens
    losses: list[float]
    seconds: float
    raw_tokens: int

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)


def points_of(made: list[dict], costs: list[dict], fixed: str = "seconds") -> list[Point]:
    """The runs whose every shape was timed, by what is held fixed."""
    units = {cost["shape"]: cost["to_reference"][1] / UNIT for cost in costs}
    points = []
    of_flags = itemgetter("flags")
    for flags, alike in groupby(sorted(made, key=of_flags), of_flags):
        seeds = [*alike]
        shapes = seeds[0]["shapes"]  # empty on a GPU
        if shapes.keys() <= units.keys():
            seconds = UNIT_SECONDS * sum(count * units[shape] for shape, count in shapes.items())
            own = statistics.median(record["train_seconds"] for record in seeds)
            losses = [record["val_bpb"] for record in seeds]
            plain, real = arm_of(seeds[0]).is_plain, seeds[0]["real_tokens"]
            cost = seconds or own if fixed == "seconds" else real
            points.append(Point(flags, plain, cost, losses, seconds or own, real))
    return sorted(points, key=attrgetter("cost", "loss"))


def points_in(section: str, device: str, fixed: str = "seconds") -> list[Point]:
    made = [record for record in known("frontier", device) if record["section"] == section]
    return points_of(made, known("frontier-cost", device), fixed)


def envelope(points: list[Point]) -> list[Point]:
    """The lower convex hull in the logarithm of the cost, as far as it falls.

    Example: of (1 s, 2.0), (2 s, 1.9), (4 s, 1.6), (8 s, 1.7) the first and the third
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
    """With what a frontier reaches a loss; nan where it was not measured."""
    backwards = sorted((point.loss, np.log(point.cost)) for point in hull)
    return float(np.exp(between(loss, backwards)))


def loss_at(cost: float, hull: list[Point]) -> float:
    """What a frontier reaches with this; nan where it was not measured."""
    return between(np.log(cost), [(np.log(point.cost), point.loss) for point in hull])


def between(x: float, points: list[tuple[float, float]]) -> float:
    if not points:
        return np.nan
    return float(np.interp(x, *zip(*points, strict=True), left=np.nan, right=np.nan))


# ---- what is shown


def table(args: argparse.Namespace) -> str:
    """Of a section: what the losses of both frontiers cost or, with --match, these runs."""
    points = points_in(args.sections[0], args.device, args.fixed)
    shared = listed(args.sections)[0].shared
    said = f"Every run has `{shared}` too.\n\n" * bool(shared)
    if args.match is None:
        return said + frontier_table(points, args.least_seeds, args.fixed)
    some = [p for p in points if len(p.losses) >= args.least_seeds]
    chosen = [p for p in some if re.search(args.match, p.flags)]
    sides = [
        sum(len(p.losses) for p in points if p.plain == is_plain) for is_plain in (True, False)
    ]
    trials = "{} plain runs were made in these rows, and {} with techniques.\n\n".format(*sides)
    return said + trials + runs_table(chosen, points, args.fixed)


def frontier_table(points: list[Point], least_seeds: int, fixed: str = "seconds") -> str:
    """What the losses cost that the plain frontier has after 1, 2, 4, 8 and 16 units.

    If raw tokens are held fixed: after those of each run on the frontier.
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


def runs_table(points: list[Point], beside: list[Point], fixed: str = "seconds") -> str:
    """Runs against the plain frontiers of those beside them: of the same model, and of any."""
    plain = [p for p in beside if p.plain]
    best = envelope(plain)
    rows = [
        [
            f"`{p.flags}`",
            written("seconds", p.seconds),
            written("raw tokens", p.raw_tokens),
            spread(p.losses),
            shown(p.loss - loss_at(p.cost, best), 3, "+"),
            share_of(p, envelope([q for q in plain if model_in(q) == model_in(p)])),
            share_of(p, best),
        ]
        for p in points
    ]
    names = ["flags", *FIXED, "bits per byte", f"to the best model, equal {fixed}"]
    against = [f"of the same model's {fixed}, equal loss", "of the best model's"]
    return markdown_table([*names, *against], rows)


def model_in(p: Point) -> set[str]:
    """The flags of a run that decide its model. Example: {"--layers 8", "--width 64"}"""
    return {*re.findall(r"--(?:layers|width|heads|block|tied|qk-norm|seq-len)(?: \w+)?", p.flags)}


def share_of(p: Point, plain: list[Point]) -> str:
    """Of what the plain frontier takes. Example: 0.54; under 0.49 if no plain run is as good"""
    if plain and p.loss < plain[-1].loss:
        return f"under {p.cost / plain[-1].cost:.2f}"
    return shown(p.cost / cost_of(p.loss, plain))


def written(kind: str, cost: float) -> str:
    """Example: 118 seconds, 2.70 M raw tokens"""
    return shown(cost, 0) if np.isnan(cost) or kind == "seconds" else f"{cost / 1e6:.2f} M"


def shown(value: float, digits: int = 2, sign: str = "") -> str:
    return "not measured" if np.isnan(value) else f"{value:{sign}.{digits}f}"


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [columns, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]])


def spread(values: list[float]) -> str:
    """The mean with the least and the most: [1.0, 1.2] -> "1.100 (1.000 to 1.200)" """
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def curves_of(section: str, device: str) -> list[Curve]:
    """Held-out loss against seconds: a dot for each run, and both frontiers as lines."""
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


MARKED = re.compile(r"(<!-- frontier ([^\n]*) -->\n).*?(<!-- /frontier -->)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its tables made anew."""

    def table_of(mark: re.Match) -> str:
        args = flags().parse_args(["report", *shlex.split(mark[2])])
        return f"{mark[1]}{table(args)}\n{mark[3]}"

    return MARKED.sub(table_of, page)


# ---- the command


def report(args: argparse.Namespace) -> None:
    for section in args.sections or sorted({r["section"] for r in known("frontier", args.device)}):
        args.sections = [section]
        print(f"## {section}\n\n{table(args)}\n")


def fill(args: argparse.Namespace) -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        path.write_text(filled(path.read_text()))


def quick(args: argparse.Namespace) -> None:
    arms = listed(args.sections or ["books"])
    some = [a for a in arms if a.is_plain][:2] + [a for a in arms if not a.is_plain][:1]
    new = [arm._replace(seed=arm.seed + 1000) for arm in some]
    with ThreadPoolExecutor(2) as pool:
        made = [*pool.map(partial(run, stores=args.stores, device=args.device), new)]
    points = points_of(made, [*costs_of(made, set(), args)])
    print(runs_table(points, points))


MEASURES = {
    "runs": make_runs,
    "costs": measure_costs,
    "report": report,
    "docs": fill,
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
    parser.add_argument("--most", type=int, help="runs to make now (all)")
    parser.add_argument("--match", metavar="REGEX", help="report: the runs with such flags")
    parser.add_argument("--fixed", choices=FIXED, default="seconds", help="report (seconds)")
    parser.add_argument("--least-seeds", type=int, default=1, help="report: of a run (1)")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = flags().parse_args(argv)
    args.stores = dict(args.stores)
    try:
        MEASURES[args.what](args)
    except re.error as error:
        raise ValueError(f"--match {args.match}: {error}") from None


if __name__ == "__main__":
    runtime.exit_cleanly(main)
