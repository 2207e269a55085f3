"""Every stored run in one row: what it was, how it ended, its main figures."""

from __future__ import annotations

from analysis.labels import label
from analysis.load import Run

TEXTS = ("run", "status", "method", "model", "task")
NUMBERS = ("score", "n", "keep_io", "bytes")


def cells(run: Run) -> tuple[str, ...]:
    """A run's `TEXTS`, `NUMBERS` and, last, why it is not complete."""
    length = (run.summary.get("task") or {}).get("length")
    return (
        run.run_id,
        run.status,
        label(run.method),
        run.model,
        run.task + (f" {length}" if length else ""),
        _number(average(run), 2),
        str(len(run.samples)),
        _number(run.figure("sparsity.keep_io"), 3),
        _number(run.figure("sparsity.bytes_ratio"), 3),
        run.reason or "",
    )


def average(run: Run) -> float | None:
    """The suite's own average: RULER's plain mean, LongBench's macro mean."""
    own = run.figure("accuracy.average")
    return own if own is not None else run.figure("accuracy.macro")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
