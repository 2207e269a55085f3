"""Every table of the paper, rebuilt from what was run."""

from __future__ import annotations

from analysis.cells import Table
from analysis.load import Outputs


def build_tables(outputs: Outputs, size: str | None = None) -> list[Table]:
    """All tables, in the paper's order; a table whose recipe was not run says how to run it.

    Parameters
    ----------
    outputs
        What was run.
    size
        smoke, small or paper; None takes the largest with results, recipe by recipe (`analysis.sizes`).
    """
    from analysis.tables.accuracy import accuracy_tables
    from analysis.tables.selection import selection_tables
    from analysis.tables.speed import speed_tables

    return [*speed_tables(outputs, size), *accuracy_tables(outputs, size), *selection_tables(outputs, size)]
