"""What a grid prints of its stored summary: a table of rows, what was not timed, slopes and the gate's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from experiments.kernel import stored
from experiments.table import number, results, status_line


def print_grid(summary: Mapping[str, Any], where: str) -> None:
    """Print a stored summary; ``where`` names a row of it that is damaged."""
    out = Table(title=f"one decode step of one layer, {summary['gpu']}")
    out.add_column("step", no_wrap=True)
    for name in ("B", "T", "kept", "us", "floor us", "efficiency", "x SDPA-flash", "x best dense", "error"):
        out.add_column(name, justify="right")
    for row in (stored.row(one, where) for one in summary["rows"]):
        name = row.method if row.whole else f"{row.method}: {' '.join(row.step)}"
        conditions = " ".join(word for word in (row.timing, row.l2) if word not in ("graph", "cold"))
        gains = (other / row.time_us if other else None for other in (row.sdpa_flash_us, row.best_dense_us))
        figures = (row.kept, row.time_us, row.floor_us, row.efficiency, *gains)
        digits = (3, 1, 1, 2, 2, 2)
        cells = [number(value, places) for value, places in zip(figures, digits, strict=True)]
        out.add_row(f"{name} {conditions}".strip(), str(row.B), str(row.T), *cells, f"{row.rel_error:.1e}")
    results().print(out)
    for item in summary["refused"]:
        results().print(f"not timed: {item['refused']} ({item['reason']})")
    for name, value in summary["slopes_us_per_1000_tokens"].items():
        results().print(f"slope of {name}: {value:.4f} us per 1000 tokens")
    results().print(f"gate: {summary['gate']['checked']}; largest error {summary['gate']['max_rel_error']}")
    results().print(status_line(summary))
