"""Tables as data: every cell knows its number, its uncertainty, what is wrong with it and the runs it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MARKS: Mapping[str, str] = {
    "missing": "asked for, and no run has it",
    "failed": "the run ended by an error",
    "partial": "the run, or the average, does not cover all that was asked for",
    "invalid": "the run broke a rule that makes its numbers comparable",
    "non-official": "data or template differ from the benchmark's official protocol",
}
"""What can be wrong with a cell."""


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    value: float | None = None
    """None where there is none; ``reason`` then says why."""
    digits: int = 2
    interval: tuple[float, float] | None = None
    """95 % interval in the value's unit."""
    n: int | None = None
    """Samples behind it."""
    marks: tuple[str, ...] = ()
    """Names in `MARKS`."""
    reason: str | None = None
    run_ids: tuple[str, ...] = ()
    published: str | None = None
    """The paper's number for this cell."""
    source: str | None = None
    """Where the paper's number was read."""

    @property
    def number(self) -> str:
        """The value as printed."""
        if self.value is not None:
            return f"{self.value:.{self.digits}f}"
        return "-" if self.marks or not self.reason else "undefined"

    @property
    def bounds(self) -> str:
        """The interval as printed, or nothing."""
        return (
            "" if self.interval is None else f"[{self.interval[0]:.{self.digits}f}, {self.interval[1]:.{self.digits}f}]"
        )


@dataclass(frozen=True)
class Table:
    """One table of the paper, or one that belongs beside it."""

    name: str
    """File name without suffix."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    heading: tuple[str, ...] = ()
    """Lines above: model, device, random weights."""
    notes: tuple[str, ...] = ()
    """Lines below."""

    @property
    def cells(self) -> list[Cell]:
        """All cells."""
        return [cell for _, cells in self.rows for cell in cells]

    @property
    def explained(self) -> list[str]:
        """The marks in use, each with its meaning, and the reasons of what is missing or wrong."""
        used = {mark for cell in self.cells for mark in cell.marks}
        lines = [f"{mark}: {text}" for mark, text in MARKS.items() if mark in used]
        reasons = dict.fromkeys(c.reason for c in self.cells if c.reason and c.marks)
        return lines + [str(reason) for reason in reasons]
