"""Tables as Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from analysis.cells import Cell, Table
from analysis.files import write_text

_CSV_FIELDS = (
    "row", "column", "value", "ci_low", "ci_high", "n", "marks", "reason", "published", "source", "run_ids",
)  # fmt: skip
_TEX = str.maketrans(
    {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "$": r"\$", "<": r"$<$", ">": r"$>$", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "{": r"\{", "}": r"\}", "\\": r"\textbackslash{}"}
)  # fmt: skip


def write_tables(tables: Iterable[Table], folder: Path) -> list[Path]:
    """Write every table in the three formats, replacing earlier files; returns their paths."""
    written = []
    for table in tables:
        for suffix, text in ((".md", markdown(table)), (".tex", latex(table)), (".csv", comma_separated(table))):
            written.append(write_text(folder / f"{table.name}{suffix}", text))
    return written


def markdown(table: Table) -> str:
    """A heading, the table, what its marks mean, and the runs behind it."""
    lines = [f"# {table.title}", "", *(f"{line}  " for line in table.heading), ""]
    if table.rows:
        lines += ["| | " + " | ".join(_pipes(c) for c in table.columns) + " |", "|---|" + "---:|" * len(table.columns)]
        for name, cells in table.rows:
            lines.append(f"| {_pipes(name)} | " + " | ".join(_pipes(plain(cell)) for cell in cells) + " |")
        lines.append("")
    lines += [f"- {line}" for line in (*table.explained, *table.notes)]
    ids = dict.fromkeys(run_id for cell in table.cells for run_id in cell.run_ids)
    if ids:
        lines += ["", "Runs: " + ", ".join(f"`{run_id}`" for run_id in ids)]
    return "\n".join(lines).rstrip() + "\n"


def latex(table: Table) -> str:
    """A ``table`` environment; needs booktabs."""
    width = len(table.columns)
    lines = [
        f"% {table.title}; needs \\usepackage{{booktabs}}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex('. '.join((table.title, *table.heading)))}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{l{'r' * max(width, 1)}}}",
        r"\toprule",
        " & ".join(["", *map(_tex, table.columns)]) + r" \\",
        r"\midrule",
    ]
    lines += [" & ".join([_tex(name), *map(_tex_cell, cells)]) + r" \\" for name, cells in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_tex(line)}" for line in (*table.explained, *table.notes)]
    return "\n".join([*lines, r"\end{table}", ""])


def comma_separated(table: Table) -> str:
    """One line per cell with everything known of it."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_FIELDS)
    for name, cells in table.rows:
        for column, cell in zip(table.columns, cells, strict=True):
            low, high = cell.interval or ("", "")
            writer.writerow(
                [name, column, _or_empty(cell.value), low, high, _or_empty(cell.n), " ".join(cell.marks),
                 cell.reason or "", cell.published or "", cell.source or "", " ".join(cell.run_ids)]
            )  # fmt: skip
    return stream.getvalue()


def plain(cell: Cell) -> str:
    """A cell in one line of text: number, interval, n, marks, and the paper's number."""
    parts = [cell.number, cell.bounds, f"n={cell.n}" if cell.n is not None else ""]
    parts += [f"({mark})" for mark in cell.marks]
    parts.append(f"· paper {cell.published}" if cell.published else "")
    return " ".join(part for part in parts if part)


def _tex_cell(cell: Cell) -> str:
    small = " ".join(part for part in (cell.bounds, f"n={cell.n}" if cell.n is not None else "") if part)
    parts = [_tex(cell.number), rf"{{\scriptsize {_tex(small)}}}" if small else ""]
    parts += [rf"\textsuperscript{{{_tex(mark)}}}" for mark in cell.marks]
    parts.append(rf"{{\scriptsize paper {_tex(cell.published)}}}" if cell.published else "")
    return " ".join(part for part in parts if part)


def _tex(text: str) -> str:
    return text.translate(_TEX)


def _pipes(text: str) -> str:
    return text.replace("|", "\\|")


def _or_empty(value: float | None) -> str:
    return "" if value is None else repr(value)
