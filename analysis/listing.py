"""Every stored run in one row: what it was, how it ended, its main figures."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.found import found, wrong
from analysis.labels import distinct_labels
from analysis.load import Run
from analysis.unfinished import main_figures

TEXTS = ("run", "status", "runner", "method", "model", "task")
NUMBERS = ("score", "n", "keep_io", "bytes")
REMARKS = ("what it found", "what is wrong")


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Of each run its `TEXTS`, `NUMBERS` and `REMARKS`."""
    labels = distinct_labels([run.method for run in runs], whole=True)
    return [_row(run, label) for run, label in zip(runs, labels, strict=True)]


def _row(run: Run, label: str) -> tuple[str, ...]:
    figures = main_figures(run)
    length = (run.summary.get("task") or {}).get("length")
    return (
        run.run_id,
        run.status,
        run.runner,
        label,
        run.model,
        run.task + (f" {length}" if length else ""),
        _number(figures.score, 2),
        str(figures.n),
        _number(figures.keep_io, 3),
        _number(figures.bytes_ratio, 3),
        found(run),
        wrong(run),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
