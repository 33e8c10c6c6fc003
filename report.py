"""One run, or several side by side, as a page that says more than their logs do.

    python report.py runs/gpt-nano-1                         # writes report.html into the run
    python report.py runs/a runs/b runs/c --out compared.html
    python report.py runs/a runs/b --loss 2.0                # and what each pays to reach this loss

From a step to a chart: a number arises in plan.py (a field of `Step`) or in train.py's
`Trainer.update` (a field of `Done`). support/run/progress.py `log_step` writes both to a line of
log.jsonl; `read_run` in support/report/run_page.py makes each field of a line a column, and `page`
there turns the columns it names into charts (comparison.py for several runs); page.py `html` has
charts.py `svg` draw them. A field that run_page.py does not name gets no chart, except
difficulties.

Runs that differ only in their seed are one recipe. A page is one HTML file, without scripts or
fonts from elsewhere. Only logs are read: no model, data or checkpoint.
"""

from pathlib import Path

import config
from support.report import comparison, run_page
from support.report.page import Page, Table, html
from support.report.run_page import RunLog, read_run
from support.runtime import Parser, exit_cleanly
from support.settings import Flat, Value, flattened, real_number, settings_of, shown_default
from support.store import atomic_write


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="report.py", description="Show a run, or compare several.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="file to write (default: report.html)")
    parser.add_argument("--loss", type=real_number, help="bits per byte whose cost is compared")
    args = parser.parse_args(argv)
    if len({folder.resolve() for folder in args.runs}) < len(args.runs):
        raise ValueError("a run is named twice: name each run once")
    if args.loss is not None and len(args.runs) == 1:
        raise ValueError("--loss compares what several runs cost: name two runs or more")
    logs = list(map(read_run, args.runs))
    if len(logs) == 1:
        page, out = page_of(logs[0]), args.out or args.runs[0] / "report.html"
    else:
        recipes = comparison.recipes_of(logs)
        loss = comparison.target_of(recipes[0]) if args.loss is None else args.loss
        changed = settings_table({recipe.name: recipe.settings for recipe in recipes})
        page = comparison.page(recipes, loss, asked=args.loss is not None, changed=changed)
        out = args.out or Path("report.html")
    save(page, out)
    print(f"report: {out}")
    return 0


def write(folder: Path) -> Path:
    """Write report.html into the folder of a run.

    Raises: ValueError if there is no log, or the file cannot be written
    Cost:   0.03 s for a log of 1,000 steps, 3 s for one of 200,000, on one core
    """
    file = folder / "report.html"
    save(page_of(read_run(folder)), file)
    return file


def save(page: Page, file: Path) -> None:
    with atomic_write(file) as out:
        out.write(html(page).encode())


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
