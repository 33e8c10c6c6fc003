"""One run, or several side by side, as a page that says more than their logs do.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
    python report.py runs/a runs/b runs/c --out compared.html
    python report.py runs/a runs/b --loss 2.0 --markdown     # costs to reach a loss, as tables

Runs that differ in their seed alone are one recipe. A page is one file, without scripts or fonts
from elsewhere; --out with another ending makes markdown, or a figure of the charts by matplotlib.
The log is all that is read: no model, no data, no checkpoint.
"""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import config
from support.base.atomic import atomic_write
from support.base.runtime import Parser, exit_cleanly
from support.base.settings import as_given, flag_of, flattened, real_number
from support.report import comparison, figures, run_page
from support.report.comparison import Recipe, grouped, target_of
from support.report.log import RunLog, read_run, summary
from support.report.page import Page, html, markdown

FIGURES = (".png", ".svg", ".pdf")
# settings that make no other recipe; --data and --compile are free as well, but losses and seconds
# that differ by these are no spread over seeds
ASIDE = {"run.seed", "run.out", "run.resume", "run.keep", "run.tensorboard"}
ASIDE |= {"run.eval_every", "run.checkpoint_every"}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="file.html, .md, .png, .svg or .pdf to write")
    parser.add_argument("--loss", type=real_number, help="bits per byte whose cost is compared")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    args = parser.parse_args(argv)
    check(args.runs, args.out, args.loss)
    logs = [read_run(folder) for folder in args.runs]
    for log in logs:
        if log.unread:
            print(f"{log.folder}: {log.unread} lines of its log are damaged", file=sys.stderr)
    if len(logs) == 1:
        recipe = recipe_line(logs[0])
        page, numbers = run_page.page(logs[0], recipe), summary(logs[0], recipe)
    else:
        recipes = recipes_of(logs)
        loss = target_of(recipes[0]) if args.loss is None else args.loss
        page = comparison.page(recipes, loss, args.loss is not None, flag)
        numbers = comparison.comparison_summary(recipes, loss)
    if args.json:
        print(json.dumps(without_nan(numbers)))
    if args.markdown:
        print(markdown(page), end="")
    if args.out or not (args.json or args.markdown):
        file = args.out or (args.runs[0] if len(logs) == 1 else Path()) / "report.html"
        save(page, file)
        print(f"report: {file}", file=sys.stderr if args.json or args.markdown else sys.stdout)
    return 0


def write(folder: Path) -> Path:
    """Write report.html into the folder of a run.

    Raises: ValueError if there is no log, or the file cannot be written
    Cost:   0.03 s for a log of 1,000 steps, 1.1 s for one of 200,000, on one core
    """
    log = read_run(folder)
    save(run_page.page(log, recipe_line(log)), folder / "report.html")
    return folder / "report.html"


def check(runs: Sequence[Path], out: Path | None, loss: float | None) -> None:
    """Refuse what would fail later, before logs are read."""
    for folder in runs:
        if [other.resolve() for other in runs].count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is named twice: name each run once")
    if loss is not None and len(runs) == 1:
        raise ValueError("--loss compares what several runs cost: name two runs or more")
    if out is None:
        return
    if out.suffix not in (".html", ".md", *FIGURES):
        raise ValueError(f"--out {out}: give a file ending in .html, .md, {', '.join(FIGURES)}")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist: make it first")
    if out.suffix in FIGURES:
        figures.figure_for(str(out), "--out")


def save(page: Page, file: Path) -> None:
    if file.suffix in FIGURES:
        figures.save_charts(str(file), [c for s in page.sections for c in s.charts if c.series])
        return
    with atomic_write(file) as out:
        out.write((markdown if file.suffix == ".md" else html)(page).encode())


def recipes_of(logs: Sequence[RunLog]) -> list[Recipe]:
    """Runs grouped, each recipe labelled with the flags that not all of them have.

    Raises: ValueError for a log that does not tell its settings
    """
    for log in logs:
        if not log.settings:
            raise ValueError(f"{log.folder}: its log has lost its first line, which tells settings")
    defaults = flattened(config.Config())
    extended = any(extensions(log.settings) for log in logs)
    aside = ASIDE if extended else ASIDE | {"optim.schedule_tokens"}
    recipes = grouped(logs, [{**defaults, **log.settings} for log in logs], aside)
    given = [recipe_flags(recipe.settings) for recipe in recipes]
    shared = set.intersection(*(set(flags) for flags in given))
    own = [" ".join(flag for flag in flags if flag not in shared) for flags in given]
    plain = "no other flags" if shared else "the defaults"
    labels = [f"`{flags}`" if flags else plain for flags in own]
    return [r._replace(label=label) for r, label in zip(recipes, labels, strict=True)]


def flag(name: str) -> str:
    """Of a setting "group.field"; the name itself where this version does not have it."""
    return flag_of(config.Config, *name.split(".")) if name in flattened(config.Config()) else name


def recipe_line(log: RunLog) -> str:
    """The command that makes this run again, in a new folder."""
    if not log.settings:
        return "not in the log"
    begun = as_begun(log.settings)
    line = " \\\n    ".join(["python train.py", *flags_of(begun)])
    made, wanted = built(fewest(begun)), of_a_recipe(begun)
    lost = [f"{name} {value}" for name, value in wanted.items() if made.get(name) != value]
    line += f"\n# not in this version of train.py: {', '.join(lost)}" if lost else ""
    for longer in extensions(log.settings):
        line += f"\npython train.py --resume {longer} --out {shlex.quote(str(log.folder))}"
    return line


def recipe_flags(settings: dict[str, Any]) -> list[str]:
    """The fewest flags that say these settings; those that a run was extended with come last.

    Example: {"optim.tokens": 60000, "optim.warmup_tokens": 1200, ...} -> ["--tokens 60K"]
    """
    return flags_of(as_begun(settings)) + [f"then {flags}" for flags in extensions(settings)]


def flags_of(begun: dict[str, Any]) -> list[str]:
    return [as_words(flag(name), value) for name, value in fewest(begun).items()]


def as_begun(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings before --resume --tokens gave the run a larger budget."""
    first = settings.get("optim.schedule_tokens") or settings.get("optim.tokens")
    return {**settings, "optim.tokens": first, "optim.schedule_tokens": first}


def extensions(settings: dict[str, Any]) -> list[str]:
    """What --resume was given to get from the first budget to the last one."""
    first, last = (as_begun(settings)["optim.tokens"], settings.get("optim.tokens"))
    return [as_words("--tokens", last)] if first != last else []


def fewest(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings from which all others follow, as far as this version has them."""
    defaults, wanted = flattened(config.Config()), of_a_recipe(settings)
    given = {
        name: value
        for name, value in wanted.items()
        if name in defaults and value is not None and value != defaults[name]
    }
    all_of_them = built(given)
    for name in list(given) if all_of_them else ():
        fewer = {other: value for other, value in given.items() if other != name}
        if built(fewer) == all_of_them:
            given = fewer
    return given


def of_a_recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the run's folder, and without a tokenizer that --data decides."""
    aside = {"run.out", "run.resume", "optim.schedule_tokens"}
    if settings.get("data.data") or settings.get("data.tokenizer") == "pd4k":
        aside.add("data.tokenizer")  # without --data it is pd4k
    return {name: value for name, value in settings.items() if name not in aside}


def built(given: dict[str, Any]) -> dict[str, Any]:
    """All settings that follow from these; {} if this version refuses them."""
    try:
        return flattened(config.build(given))
    except (ValueError, OSError):
        return {}


def as_words(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return as_given(flag, value)
    if isinstance(value, int) and value >= 10_000 and value % 1000 == 0:
        value = f"{value // 10**6}M" if value % 10**6 == 0 else f"{value // 1000}K"
    return as_given(flag, shlex.quote(str(value)))


def without_nan(value: Any) -> Any:
    """The same with null for what is not a finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    exit_cleanly(main)
