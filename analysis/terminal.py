"""Comparisons and lists of runs on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from analysis.comparison import Comparison, Row, p_text, verdict
from analysis.labels import distinct_labels
from analysis.listing import NUMBERS, REMARKS, TEXTS, rows
from analysis.load import Run


def wide_console() -> Console:
    """A console that fits a terminal, and cuts nothing when written to a file or a pipe."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison, differences as second minus first."""
    out = console or wide_console()
    first, second = comparison.first, comparison.second
    labels = distinct_labels([first.method, second.method], whole=True)
    for letter, run, label in zip("AB", (first, second), labels, strict=True):
        out.print(f"{letter}  {run.run_id}  {label}  {run.model}")
    table = Table(title="scores in points; differences are B - A", title_justify="left")
    table.add_column("task")
    for name in ("n", "documents", "A", "B", "B - A", "95 % interval", "p", "p (Holm)", "detectable"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        table.add_row(*_cells(row))
    out.print(table)
    for row in comparison.rows:
        out.print(f"{row.task}: B {verdict(row, comparison.margin, 'A')} ({row.within_margin.method})")
        for line in _reasons(row):
            out.print(line)
    for note in comparison.notes:
        out.print(f"note: {note}")


def print_runs(runs: Sequence[Run], console: Console | None = None) -> None:
    """Print one line per run."""
    out = console or wide_console()
    table = Table(title=f"{len(runs)} runs", title_justify="left")
    for name in TEXTS:
        table.add_column(name, no_wrap=True)
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    for name in REMARKS:
        table.add_column(name)
    for row in rows(runs):
        table.add_row(*row)
    out.print(table)


def _cells(row: Row) -> list[str]:
    interval = "undefined" if row.interval is None else f"{row.interval[0]:+.1f} to {row.interval[1]:+.1f}"
    return [
        row.task,
        str(row.n),
        str(row.documents),
        f"{row.first:.2f}",
        f"{row.second:.2f}",
        f"{row.difference:+.2f}",
        interval,
        p_text(row.p.value),
        p_text(row.p_holm),
        "undefined" if row.detectable.value is None else f"{row.detectable.value:.1f}",
    ]


def _reasons(row: Row) -> list[str]:
    undefined = [
        ("interval", row.interval_reason),
        ("p", row.p.method if row.p.value is None else None),
        ("detectable", row.detectable.method if row.detectable.value is None else None),
    ]
    found = [f"{what} {why}" for what, why in undefined if why]
    return [f"{row.task}: undefined {'; '.join(found)}"] if found else []
