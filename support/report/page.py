"""Tables, charts and text as one HTML page that needs nothing else.

The look is in page.css and chart.css, the read-out under the pointer in page.js, the frame in
page.html. Text may hold `code` between backticks; all else is escaped.
"""

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from support.report import charts
from support.report.charts import Chart

FOLDER = Path(__file__).parent


class Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # the second line of a cell is set smaller
    colors: Sequence[int] = ()  # of the series that each row is about
    fold: str = ""  # what stands for the table until it is opened


class Section(NamedTuple):
    heading: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    blocks: Sequence[str] = ()  # text as it is: a sample, a command


class Page(NamedTuple):
    title: str
    lead: str
    facts: Sequence[Sequence[str]]  # label, value, detail: numbers worth seeing first
    parts: Sequence[Section]

    @property
    def sections(self) -> list[Section]:
        """Those that have something to show, without what has not."""
        parts = [s._replace(charts=charts.with_points(s.charts)) for s in self.parts]
        return [s for s in parts if s.charts or s.blocks or any(t.rows for t in s.tables)]


def table(columns: dict[str, Callable[[Any], str]], items: Sequence[Any], **more: Any) -> Table:
    """A row for each item; each column says how its cell is made of the item."""
    rows = [[cell(item) for cell in columns.values()] for item in items]
    return Table(list(columns), rows, **more)


def columns_of(heads: dict[str, str], cell: Callable[[Any, str], str]) -> dict[str, Callable]:
    """A column for each name, whose cells are made of an item and the name.

    Args: heads what stands above each
    """
    return {head: lambda item, name=name: cell(item, name) for name, head in heads.items()}


# ---- HTML


def html(page: Page) -> str:
    facts = "".join(
        f"<div><dt>{text(label)}</dt><dd>{text(value)}<small>{text(detail)}</small></dd></div>"
        for label, value, detail in page.facts
    )
    parts = [f'<header><h1>{text(page.title)}</h1><p class="lead">{text(page.lead)}</p></header>']
    parts += [f'<dl class="facts">{facts}</dl>'] if facts else []
    parts += [section_html(section) for section in page.sections]
    style, script, frame = (
        (FOLDER / name).read_text(encoding="utf-8").strip()
        for name in ("page.css", "page.js", "page.html")
    )
    return Template(frame).substitute(
        title=escape(page.title),
        style=f"{charts.STYLE}\n{style}",
        script=script,
        body="\n".join(parts),
    )


def text(words: str) -> str:
    """Escaped, with `code` set as code."""
    return re.sub(r"`([^`]+)`", lambda match: code(match[1]), escape(words))


def code(words: str) -> str:
    """As code that breaks only before a flag."""
    return f"<code>{' '.join(f'<span>{flag}</span>' for flag in re.split(' (?=--)', words))}</code>"


def section_html(section: Section) -> str:
    parts = [f"<section><h2>{text(section.heading)}</h2>"]
    parts += [f"<pre>{escape(block)}</pre>" for block in section.blocks]
    parts += [table_html(table) for table in section.tables if table.rows]
    if section.charts:
        drawn = "\n".join(
            f'<figure>{charts.svg(chart)}<div class="readout"></div></figure>'
            for chart in section.charts
        )
        parts.append(f'<div class="charts">\n{drawn}\n</div>')
    parts += [f'<p class="note">{text(note)}</p>' for note in section.notes]
    return "\n".join([*parts, "</section>"])


def table_html(table: Table) -> str:
    columns = zip(*table.rows, strict=True)
    marks = [' class="number"' if is_numbers(cells) else "" for cells in columns]
    head = "".join(
        f"<th{mark}>{text(name)}</th>" for name, mark in zip(table.columns, marks, strict=True)
    )
    rows = []
    for number, row in enumerate(table.rows):
        cells = [cell_html(cell) for cell in row]
        if table.colors:
            key = charts.key_of(table.colors[number])
            mark = f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{key}</svg>'
            cells[0] = mark + cells[0]
        rows.append("".join(f"<td{m}>{c}</td>" for c, m in zip(cells, marks, strict=True)))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    shown = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    shown = f'<div class="wide" tabindex="0">{shown}</div>'
    return (
        f"<details><summary>{text(table.fold)}</summary>{shown}</details>" if table.fold else shown
    )


def cell_html(cell: str) -> str:
    first, _, rest = cell.partition("\n")
    return text(first) + (f"<small>{text(rest)}</small>" if rest else "")


def is_numbers(cells: Sequence[str]) -> bool:
    """Whether a column is set flush right."""
    filled = [cell for cell in cells if cell and not cell.startswith("not ")]
    number = re.compile(r"[-+≤]?\s?\d[\d.,e+-]*( |$|\n|%)")
    return bool(filled) and all(number.match(cell) for cell in filled)
