"""One run, or several side by side, as a page that says more than their logs do.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
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
read: no model, data or checkpoint.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import config
from support.base.atomic import atomic_write
from support.base.runtime import Parser, exit_cleanly, printable
from support.base.settings import Flat, Value, flattened, real_number, settings_of, shown_default
from support.report import comparison, figures, run_page
from support.report.charts import picture
from support.report.page import Page, Table, html, markdown
from support.report.run_page import RunLog, read_run, summary


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="file.html, .md or .svg to write")
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
        page = page_of(logs[0])
        numbers = summary(logs[0])
    else:
        recipes = comparison.recipes_of(logs)
        loss = comparison.target_of(recipes[0]) if args.loss is None else args.loss
        changed = differing({recipe.label: recipe.settings for recipe in recipes})
        page = comparison.page(recipes, loss, asked=args.loss is not None, changed=changed)
        numbers = comparison.comparison_summary(recipes, loss)
    if args.json:
        # null for infinity and NaN, which JSON does not have
        print(json.dumps(json.loads(json.dumps(numbers), parse_constant=lambda _: None)))
    if args.markdown:
        print("\n".join(map(printable, markdown(page).splitlines())))
    if args.out or not (args.json or args.markdown):
        file = args.out or (args.runs[0] if len(logs) == 1 else Path()) / "report.html"
        save(page, file)
        print(f"report: {file}", file=sys.stderr if args.json or args.markdown else sys.stdout)
    return 0


def write(folder: Path) -> Path:
    """Write report.html into the folder of a run.

    Raises: ValueError if there is no log, or the file cannot be written
    Cost:   0.03 s for a log of 1,000 steps, 3 s for one of 200,000, on one core
    """
    file = folder / "report.html"
    save(page_of(read_run(folder)), file)
    return file


def check(runs: Sequence[Path], out: Path | None, loss: float | None) -> None:
    """Refuse bad arguments before any log is read."""
    for folder in runs:
        if [other.resolve() for other in runs].count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is named twice: name each run once")
    if loss is not None and len(runs) == 1:
        raise ValueError("--loss compares what several runs cost: name two runs or more")
    if out and out.suffix not in (".html", ".md"):
        figures.check_file(out, "--out")


def save(page: Page, file: Path) -> None:
    if file.suffix == ".svg":
        written = picture([chart for section in page.sections for chart in section.charts])
    else:
        written = markdown(page) if file.suffix == ".md" else html(page)
    with atomic_write(file) as out:
        out.write(written.encode())


def page_of(log: RunLog) -> Page:
    defaults = flattened(config.build({}))
    return run_page.page(log, differing({"this run": log.settings, "default": defaults}))


def differing(columns: dict[str, Flat]) -> Table:
    """The settings that are not the same in all columns, by their flags."""
    rows = []
    for name in dict.fromkeys(name for settings in columns.values() for name in settings):
        values = [settings.get(name) for settings in columns.values()]
        if any(value != values[0] for value in values):
            setting = settings_of(config.Config).get(name)
            flag = f"`{setting.flag if setting else name}`"
            if name == "optim.schedule_tokens":  # no flag: --resume --tokens does not change it
                flag = "`--tokens` at the start"
            rows.append([flag, *map(shown, values)])
    return Table(["", *columns], rows)


def shown(value: Value) -> str:
    return f"{value:,}" if type(value) is int else shown_default(value) or "–"


if __name__ == "__main__":
    exit_cleanly(main)
