"""One self-contained page: every table and figure, nothing fetched from a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from analysis.cells import Cell, Table
from analysis.drawing import Figure, svg
from analysis.figures import build_figures
from analysis.files import write_text
from analysis.listing import NUMBERS, REMARKS, TEXTS, rows
from analysis.load import Outputs
from analysis.tables import build_tables

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --bad: #b3402a; --paper: #2a6f97; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a70; --paper: #7cc0e8; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.3rem; margin: 3rem 0 .3rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; } nav b { display: block; margin-top: .5rem; }
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


_OWN, _COMMITTED, _NOT_RUN = "Your runs", "Committed records: the authors' measurements, not yours", "Not run here"
"""Parts of the page, in this order."""


def write_report(outputs: Outputs, size: str | None = None) -> Path:
    """Write ``analysis/report.html`` under the outputs folder; returns its path."""
    tables, figures = build_tables(outputs, size), build_figures(outputs, size)
    return write_text(outputs.root / "analysis" / "report.html", page(outputs, tables, figures))


def page(outputs: Outputs, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """The whole page: one's own runs first, then what only committed records have, then what nobody has run."""
    counts = {
        s: sum(run.status == s for run in outputs.runs.values()) for s in ("complete", "partial", "failed", "invalid")
    }
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "none"
    skipped = "".join(f"<li>{escape(line)}</li>" for line in outputs.skipped)
    parts = _parts(outputs, tables, figures)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ffd: results</title><style>{_STYLE}</style></head><body>"
        f"<h1>ffd: results beside the paper's</h1><p>{len(outputs.runs)} runs: {told}. Each cell: the number measured, "
        'its 95 % interval and n, what is wrong with it <span class="mark">in red</span>, and '
        '<span class="paper">the paper\'s number</span>; "-" was not asked for. Rows marked (committed: ...) are the '
        "authors' records, with their GPU and revision. Hover a number for its runs.</p>"
        + (f"<ul>{skipped}</ul>" if skipped else "")
        + f"<nav>{''.join(_links(title, items) for title, items in parts)}</nav>"
        + "".join(_part(outputs, title, items) for title, items in parts)
        + "</body></html>\n"
    )


def _parts(
    outputs: Outputs, tables: Sequence[Table], figures: Sequence[Figure]
) -> list[tuple[str, list[Table | Figure]]]:
    own = {*outputs.runs, *(path.name for path in (outputs.root / "measurements").glob("*.json"))}
    parts: dict[str, list[Table | Figure]] = {_OWN: [], _COMMITTED: [], _NOT_RUN: []}
    mixed: list[Table | Figure] = []
    for item in (*tables, *figures):
        origins = _origins(item)
        if not origins:
            parts[_NOT_RUN].append(item)
        elif origins <= own:
            parts[_OWN].append(item)
        elif origins & own:
            mixed.append(item)
        else:
            parts[_COMMITTED].append(item)
    parts[_OWN] += mixed
    return list(parts.items())


def _origins(item: Table | Figure) -> set[str]:
    """Runs and records behind a table or figure."""
    if isinstance(item, Table):
        return {run_id for cell in item.cells for run_id in cell.run_ids}
    # A histogram or grid is of one run, which its label names.
    return {name for series in item.series if not series.bound for name in series.names or (series.label,)}


def _links(title: str, items: Sequence[Table | Figure]) -> str:
    links = [f"<b>{escape(title)}</b>"] if items or title == _OWN else []
    if title == _OWN:
        links.append('<a href="#runs">Every run</a>')
    for item in items:
        anchor, kind = ("figure-", "Figure: ") if isinstance(item, Figure) else ("", "")
        links.append(f'<a href="#{anchor}{item.name}">{kind}{escape(item.title)}</a>')
    return "".join(links)


def _part(outputs: Outputs, title: str, items: Sequence[Table | Figure]) -> str:
    if not items and title != _OWN:
        return ""
    shown = "".join(_figure(item) if isinstance(item, Figure) else _table(item) for item in items)
    return f"<h2>{escape(title)}</h2>{_runs(outputs) if title == _OWN else ''}{shown}"


def _runs(outputs: Outputs) -> str:
    """Every run, those that no table of the paper's asks for too."""
    head = "".join(f"<th>{name}</th>" for name in (*TEXTS, *NUMBERS, *REMARKS))
    lines = ""
    for *told, problem in rows(list(outputs.runs.values())):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in told)
        lines += f'<tr>{cells}<td class="mark">{escape(problem)}</td></tr>'
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>" if lines else ""
    return f'<section id="runs"><h3>Every run</h3><div class="scroll">{body}</div></section>'


def _table(table: Table) -> str:
    heading = "".join(
        f'<p class="heading{" random" if line.startswith("RANDOM") else ""}">{escape(line)}</p>'
        for line in table.heading
    )
    body = ""
    if table.rows:
        head = "".join(f"<th>{escape(column)}</th>" for column in ("", *table.columns))
        lines = "".join(f"<tr><td>{escape(name)}</td>{''.join(map(_cell, cells))}</tr>" for name, cells in table.rows)
        body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
    notes = "".join(f"<li>{escape(line)}</li>" for line in (*table.explained, *table.notes))
    ids = dict.fromkeys(run_id for cell in table.cells for run_id in cell.run_ids)
    runs = ", ".join(f"<code>{escape(run_id)}</code>" for run_id in ids)
    plural = "" if len(ids) == 1 else "s"
    return (
        f'<section id="{table.name}"><h3>{escape(table.title)}</h3>{heading}{body}'
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
    return f'<figure id="figure-{figure.name}"><h3>{escape(figure.title)}</h3>{drawn}</figure>'
