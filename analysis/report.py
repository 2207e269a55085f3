"""One self-contained page: every table and figure, nothing fetched from a network."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from analysis.cells import Cell, Table
from analysis.drawing import Figure, svg
from analysis.figures import build_figures
from analysis.files import write_text
from analysis.listing import NUMBERS, TEXTS, cells
from analysis.load import Outputs
from analysis.tables import build_tables

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --bad: #b3402a; --paper: #2a6f97; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a70; --paper: #7cc0e8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
nav { columns: 15rem; font-size: .9rem; } nav a { display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
th:first-child, td:first-child { min-width: 8rem; max-width: 45vw; }
td small { display: block; opacity: .75; white-space: nowrap; }
.mark { color: var(--bad); } .paper { color: var(--paper); }
td small.paper { white-space: normal; min-width: 7rem; }
.heading { margin: 0 0 .5rem; opacity: .85; } .random { color: var(--bad); font-weight: 600; }
ul { font-size: .85rem; padding-left: 1.1rem; } code { overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; background: #fff; }
"""


def write_report(outputs: Outputs, size: str | None = None) -> Path:
    """Write ``analysis/report.html`` under the outputs folder; returns its path."""
    tables, figures = build_tables(outputs, size), build_figures(outputs, size)
    return write_text(outputs.root / "analysis" / "report.html", page(outputs, tables, figures))


def page(outputs: Outputs, tables: list[Table], figures: list[Figure]) -> str:
    """The whole page."""
    counts = {
        s: sum(run.status == s for run in outputs.runs.values()) for s in ("complete", "partial", "failed", "invalid")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none"
    links = ['<a href="#runs">Every run</a>']
    links += [f'<a href="#{item.name}">{escape(item.title)}</a>' for item in tables]
    links += [f'<a href="#figure-{item.name}">Figure: {escape(item.title)}</a>' for item in figures]
    skipped = "".join(f"<li>{escape(line)}</li>" for line in outputs.skipped)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ffd: results</title><style>{_STYLE}</style></head><body>"
        f"<h1>ffd: results beside the paper's</h1><p>{len(outputs.runs)} runs: {told}. Each cell: our number, "
        'its 95 % interval and n, what is wrong with it <span class="mark">in red</span>, and '
        '<span class="paper">the paper\'s number</span>. Hover a number for its runs.</p>'
        + (f"<ul>{skipped}</ul>" if skipped else "")
        + f"<nav>{''.join(links)}</nav>"
        + _runs(outputs)
        + "".join(_table(table) for table in tables)
        + "".join(_figure(figure) for figure in figures)
        + "</body></html>\n"
    )


def _runs(outputs: Outputs) -> str:
    """Every run, those that no table of the paper's asks for too."""
    head = "".join(f"<th>{name}</th>" for name in (*TEXTS, *NUMBERS, "reason"))
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(run))}</tr>" for run in outputs.runs.values()
    )
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return f'<section id="runs"><h2>Every run</h2><div class="scroll">{body}</div></section>'


def _table(table: Table) -> str:
    heading = "".join(
        f'<p class="heading{" random" if line.startswith("RANDOM") else ""}">{escape(line)}</p>'
        for line in table.heading
    )
    body = ""
    if table.rows:
        head = "".join(f"<th>{escape(column)}</th>" for column in ("", *table.columns))
        rows = "".join(f"<tr><td>{escape(name)}</td>{''.join(map(_cell, cells))}</tr>" for name, cells in table.rows)
        body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    notes = "".join(f"<li>{escape(line)}</li>" for line in (*table.explained, *table.notes))
    ids = dict.fromkeys(run_id for cell in table.cells for run_id in cell.run_ids)
    runs = ", ".join(f"<code>{escape(run_id)}</code>" for run_id in ids)
    plural = "" if len(ids) == 1 else "s"
    return (
        f'<section id="{table.name}"><h2>{escape(table.title)}</h2>{heading}{body}'
        + (f"<ul>{notes}</ul>" if notes else "")
        + (f"<details><summary>{len(ids)} run{plural}</summary>{runs}</details>" if ids else "")
        + "</section>"
    )


def _cell(cell: Cell) -> str:
    title = "; ".join(part for part in (", ".join(cell.run_ids), cell.reason or "", cell.source or "") if part)
    small = " ".join(part for part in (cell.bounds, f"n={cell.n}" if cell.n is not None else "") if part)
    lines = [cell.number]
    if small:
        lines.append(f"<small>{escape(small)}</small>")
    lines += [f'<small class="mark">{escape(mark)}</small>' for mark in cell.marks]
    if cell.published:
        lines.append(f'<small class="paper">paper {escape(cell.published)}</small>')
    return f'<td title="{escape(title)}">{"".join(lines)}</td>'


def _figure(figure: Figure) -> str:
    drawn = svg(figure)
    # Inside the page: no XML prologue, and ids that do not meet those of the other figures.
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{figure.name}-", drawn)
    return f'<figure id="figure-{figure.name}"><h2>{escape(figure.title)}</h2>{drawn}</figure>'
