"""Tables, charts and text -> one HTML page that needs nothing else, or their tables in markdown.

The look is in page.css, the read-out under the pointer in page.js, the frame in page.html. Text
may hold `code` between backticks; all else is escaped.
"""

import re
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

from support.report.charts import Chart, style_of, svg

# ---- text tables
#
# Tables in markdown, and numbers as a table shows them. bench/tables.py and report.py use both.


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; an empty cell stays empty."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def spread(values: Sequence[float], sign: str = "", digits: int = 3) -> str:
    """The mean, with the least and the most: over seeds, say. '' for no values.

    Example: [1.0, 1.2] -> "1.100 (1.000 to 1.200)"
    """
    if not values:
        return ""
    form = f"{sign}.{digits}f"
    mean = f"{statistics.mean(values):{form}}"
    return f"{mean} ({min(values):{form}} to {max(values):{form}})"


FOLDER = Path(__file__).parent


class Fact(NamedTuple):
    """One number worth seeing first."""

    label: str
    value: str
    detail: str = ""


class Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # what follows a newline in a cell is said smaller
    colors: Sequence[int] = ()  # of the series that each row is about


class Section(NamedTuple):
    heading: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    blocks: Sequence[str] = ()  # text as it is: a sample, a command
    legend: Sequence[tuple[str, int]] = ()  # label and colour of what all charts show


class Page(NamedTuple):
    title: str
    lead: str
    facts: Sequence[Fact]
    sections: Sequence[Section]


def html(page: Page) -> str:
    facts = "".join(
        f"<div><dt>{text(fact.label)}</dt><dd>{text(fact.value)}"
        f"<small>{text(fact.detail)}</small></dd></div>"
        for fact in page.facts
    )
    parts = [f'<header><h1>{text(page.title)}</h1><p class="lead">{text(page.lead)}</p></header>']
    parts += [f'<dl class="facts">{facts}</dl>'] if facts else []
    parts += [section_html(section) for section in page.sections]
    style, script = (
        (FOLDER / name).read_text(encoding="utf-8").strip() for name in ("page.css", "page.js")
    )
    frame = Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    body = "\n".join(parts)
    return frame.substitute(title=escape(page.title), style=style, script=script, body=body)


def text(words: str) -> str:
    """Escaped, with `code` set as code."""
    return re.sub(r"`([^`]+)`", lambda found: code(found[1]), escape(words))


def code(words: str) -> str:
    """As code, which breaks between a flag and the next alone."""
    return f"<code>{' '.join(f'<span>{flag}</span>' for flag in re.split(' (?=--)', words))}</code>"


def section_html(section: Section) -> str:
    parts = [f"<section><h2>{text(section.heading)}</h2>"]
    parts += [table_html(table) for table in section.tables]
    if section.legend:
        parts.append(legend_html(section.legend, "legend of-all"))
    if section.charts:
        shown = "\n".join(chart_html(chart, bool(section.legend)) for chart in section.charts)
        columns = "" if len(section.charts) in (1, 2, 4) else " three"
        parts.append(f'<div class="charts{columns}">\n{shown}\n</div>')
    parts += [f"<pre>{escape(block)}</pre>" for block in section.blocks]
    parts += [f'<p class="note">{text(note)}</p>' for note in section.notes]
    return "\n".join([*parts, "</section>"])


def chart_html(chart: Chart, has_legend: bool) -> str:
    title = f'<b>{text(chart.title)}</b> <span class="unit">{text(chart.unit)}</span>'
    legend = "" if has_legend or len(chart.series) < 2 else legend_html(labels_of(chart))
    note = f'<p class="note">{text(chart.note)}</p>' if chart.note else ""
    if not chart.series:
        drawn = '<div class="absent">not in the log</div>'
    else:
        under = f'<span class="readout"></span><span class="x-unit">{text(chart.x_unit)}</span>'
        drawn = f'{svg(chart)}<div class="under">{under}</div>'
    return (
        f'<figure data-x-unit="{escape(chart.x_unit)}"><figcaption>{title}{legend}{note}'
        f"</figcaption>{drawn}</figure>"
    )


def labels_of(chart: Chart) -> list[tuple[str, int, str]]:
    return [(one.label, one.color, one.kind) for one in chart.series]


def legend_html(labels: Sequence[tuple], name: str = "legend") -> str:
    items = "".join(
        f"<li>{key_html(*look)}<span>{text(label)}</span></li>" for label, *look in labels
    )
    return f'<ul class="{name}">{items}</ul>'


def key_html(color: int, kind: str = "line") -> str:
    """A piece of the line, as the chart draws it."""
    outline = "0,0 22,0 22,10 0,10" if kind == "band" else "0,5 22,5"
    dot = f'<circle class="{style_of(color)}" cx="11" cy="5" r="3"/>' if kind == "dots" else ""
    line = f'<polyline class="{kind} {style_of(color)}" points="{outline}"/>'
    return f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{line}{dot}</svg>'


def table_html(table: Table) -> str:
    numbers = [is_numbers([row[i] for row in table.rows]) for i in range(len(table.columns))]
    marks = [' class="number"' if number else "" for number in numbers]
    head = "".join(
        f"<th{mark}>{text(name)}</th>" for name, mark in zip(table.columns, marks, strict=True)
    )
    rows = []
    for number, row in enumerate(table.rows):
        cells = [cell_html(cell) for cell in row]
        if table.colors:
            cells[0] = key_html(table.colors[number]) + cells[0]
        rows.append("".join(f"<td{m}>{c}</td>" for c, m in zip(cells, marks, strict=True)))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    shown = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{shown}</div>'


def cell_html(cell: str) -> str:
    first, _, rest = cell.partition("\n")
    return text(first) + (f"<small>{text(rest)}</small>" if rest else "")


def is_numbers(cells: Sequence[str]) -> bool:
    """Whether a column is set flush right."""
    told = [cell for cell in cells if cell and not cell.startswith("not ")]
    return bool(told) and all(re.match(r"[-+≤]?\s?\d[\d.,e+-]*( |$|\n|%)", c) for c in told)


def markdown(page: Page) -> str:
    """The page's numbers and tables; its charts are left out."""
    parts = [f"# {page.title}", page.lead]
    if page.facts:
        columns = ["", "", ""]
        parts.append(markdown_table(columns, [list(map(cell_markdown, f)) for f in page.facts]))
    for section in page.sections:
        told = [
            markdown_table(table.columns, [[cell_markdown(c) for c in row] for row in table.rows])
            for table in section.tables
        ]
        told += [f"````text\n{block}\n````" for block in section.blocks]
        told += section.notes
        if told:
            parts += [f"## {section.heading}", *told]
    return "\n\n".join(parts) + "\n"


def cell_markdown(cell: str) -> str:
    return cell.replace("\n", " · ").replace("|", "\\|")
