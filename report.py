"""One run, or several side by side, as a page that says more than their logs do.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
    python report.py runs/gpt-nano-1 --x seconds             # with seconds below its charts
    python report.py runs                                    # an index of all runs in a folder
    python report.py runs/a runs/b runs/c --out compared.html
    python report.py runs/a runs/b --loss 2.0 --markdown     # costs to reach a loss, as tables

From a step to a chart: a number arises in plan.py (a field of `Step`) or in train.py's
`Trainer.update` (a field of `Done`). support/run/progress.py `log_step` writes both to a line of
log.jsonl; `read_run` in support/report/run_page.py makes each field of a line a column, and `page`
there turns the columns it names into charts (comparison.py for several runs); page.py `html` has
charts.py `svg` draw them. A field that run_page.py does not name gets no chart, except
difficulties.

Runs that differ only in their seed are one recipe. A page is one file, without scripts or fonts
from elsewhere. --out with another ending makes markdown, or an SVG of the charts. Only logs are
read, and what evaluate.py left beside them: no model, data or checkpoint.
"""

import argparse
import json
import sys
from pathlib import Path

import config
from support.base.atomic import atomic_write
from support.base.runtime import Parser, exit_cleanly, printable
from support.base.settings import Flat, Value, flattened, real_number, settings_of, shown_default
from support.report import comparison, run_page
from support.report.charts import picture
from support.report.page import Page, Table, html, markdown
from support.report.run_page import AXES, RunLog, read_run, summary


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="file.html, .md or .svg to write")
    parser.add_argument("--loss", type=real_number, help="bits per byte whose cost is compared")
    parser.add_argument("--x", choices=AXES, help="horizontal axis of a run's charts (tokens)")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    args = parser.parse_args(argv)
    is_folder_of_runs = len(args.runs) == 1 and not (args.runs[0] / "log.jsonl").is_file()
    check(args, one_run=len(args.runs) == 1 and not is_folder_of_runs)
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    logs = comparison.runs_in(args.runs[0]) if is_folder_of_runs else list(map(read_run, args.runs))
    if is_folder_of_runs:
        page = comparison.index(args.runs[0], logs, out)
        numbers = {"runs": [summary(log) for log in logs]}
    elif len(logs) == 1:
        page = page_of(logs[0]._replace(axis=AXES[args.x or "tokens"]))
        numbers = summary(logs[0])
    else:
        recipes = comparison.recipes_of(logs)
        loss = comparison.target_of(recipes[0]) if args.loss is None else args.loss
        changed = settings_table({recipe.name: recipe.settings for recipe in recipes})
        page = comparison.page(recipes, loss, asked=args.loss is not None, changed=changed)
        numbers = comparison.comparison_summary(recipes, loss)
    if args.json:
        # null for infinity and NaN, which JSON does not have
        print(json.dumps(json.loads(json.dumps(numbers), parse_constant=lambda _: None)))
    if args.markdown:
        print("\n".join(map(printable, markdown(page).splitlines())))
    if args.out or not (args.json or args.markdown):
        save(page, out)
        print(f"report: {out}", file=sys.stderr if args.json or args.markdown else sys.stdout)
    return 0


def write(folder: Path) -> Path:
    """Write report.html into the folder of a run.

    Raises: ValueError if there is no log, or the file cannot be written
    Cost:   0.03 s for a log of 1,000 steps, 3 s for one of 200,000, on one core
    """
    file = folder / "report.html"
    save(page_of(read_run(folder)), file)
    return file


def check(args: argparse.Namespace, one_run: bool) -> None:
    """Refuse bad arguments before any log is read."""
    for folder in args.runs:
        if [other.resolve() for other in args.runs].count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is named twice: name each run once")
    if args.loss is not None and len(args.runs) == 1:
        raise ValueError("--loss compares what several runs cost: name two runs or more")
    if args.x and not one_run:
        raise ValueError("--x is for the page of one run: a comparison has a chart for each")
    if args.out and args.out.suffix not in (".html", ".md", ".svg"):
        raise ValueError(f"--out {args.out}: write .html, .md or .svg")


def save(page: Page, file: Path) -> None:
    if file.suffix == ".svg":
        written = picture([chart for section in page.sections for chart in section.charts])
    else:
        written = markdown(page) if file.suffix == ".md" else html(page)
    with atomic_write(file) as out:
        out.write(written.encode())


def page_of(log: RunLog) -> Page:
    defaults = flattened(config.build({}))
    changed = settings_table({"this run": log.settings, "default": defaults})
    return run_page.page(log, changed, settings_table({"": log.settings}, fold="All settings"))


def settings_table(columns: dict[str, Flat], fold: str = "") -> Table:
    """The settings that are not the same in all columns, by their flags; with `fold` all."""
    rows = []
    for name in dict.fromkeys(name for settings in columns.values() for name in settings):
        values = [settings.get(name) for settings in columns.values()]
        if fold or any(value != values[0] for value in values):
            setting = settings_of(config.Config).get(name)
            flag = f"`{setting.flag if setting else name}`"
            if name == "optim.schedule_tokens":  # no flag: --resume --tokens does not change it
                flag = "`--tokens` at the start"
            rows.append([flag, *map(shown, values)])
    return Table(["", *columns], rows, fold=fold)


def shown(value: Value) -> str:
    return f"{value:,}" if type(value) is int else shown_default(value) or "–"


if __name__ == "__main__":
    exit_cleanly(main)
