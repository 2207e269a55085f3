"""Compare two runs over the same prompts: per task and over all tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis import stats
from analysis.load import Run
from analysis.pairing import Pairs, pair

MARGIN = 1.0
"""Points below dense that still count as no loss."""
ALL = "all tasks"
"""Name of the row over all tasks."""


@dataclass(frozen=True)
class Row:
    """One task, scores in points."""

    task: str
    n: int
    documents: int
    first: float
    second: float
    difference: float
    interval: tuple[float, float] | None
    interval_reason: str | None
    p: stats.Result
    p_holm: float | None
    within_margin: stats.Result
    """p-value of a loss of the margin or more."""
    detectable: stats.Result
    """Minimum detectable effect in points."""


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other; differences are second minus first."""

    first: Run
    second: Run
    margin: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def compare(first: Run, second: Run, *, margin: float = MARGIN) -> Comparison:
    """Compare two runs.

    Raises
    ------
    PairingError
        If they did not run the same prompts.
    ValueError
        If the margin is not positive.
    """
    pairs, notes = pair(first, second)
    bare = [_task_row(p, margin) for p in pairs]
    adjusted = stats.holm({row.task: row.p.value for row in bare})
    rows = [Row(**{**vars(row), "p_holm": adjusted[row.task]}) for row in bare]
    if len(rows) > 1:
        rows.append(_all_tasks(pairs, rows, margin))
    statuses = [f"{r.run_id} is {r.status}: {r.reason}" for r in (first, second) if r.status != "complete"]
    return Comparison(first, second, margin, tuple(rows), (*notes, *statuses))


def verdict(row: Row, margin: float, baseline: str) -> str:
    """The finding in words: ``within 1 point of dense, p = 0.003``."""
    p = row.within_margin
    points = f"{margin:g} point" + ("" if margin == 1 else "s") + f" of {baseline}"
    if p.value is None:
        return f"within {points}: undefined"
    return f"{'within' if p.value < 0.05 else 'not shown within'} {points}, p = {p_text(p.value)}"


def p_text(p: float | None) -> str:
    """A p-value as it is printed."""
    if p is None:
        return "undefined"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _task_row(pairs: Pairs, margin: float) -> Row:
    points = [100 * d for d in pairs.differences]
    interval = stats.bootstrap_interval([(points, pairs.documents)])
    return Row(
        pairs.task,
        len(points),
        len(set(pairs.documents)),
        100 * _mean(pairs.first),
        100 * _mean(pairs.second),
        _mean(points),
        None if isinstance(interval, stats.Result) else interval,
        interval.method if isinstance(interval, stats.Result) else None,
        stats.difference_test(pairs.first, pairs.second, pairs.documents),
        None,
        stats.non_inferiority([(points, pairs.documents)], margin),
        stats.minimum_detectable_effect([(points, pairs.documents)]),
    )


def _all_tasks(pairs: Sequence[Pairs], rows: Sequence[Row], margin: float) -> Row:
    """Unweighted mean over tasks, its interval drawn within tasks, and no single test."""
    points = [([100 * d for d in p.differences], p.documents) for p in pairs]
    interval = stats.bootstrap_interval(points)
    return Row(
        ALL,
        sum(r.n for r in rows),
        sum(r.documents for r in rows),
        _mean([r.first for r in rows]),
        _mean([r.second for r in rows]),
        _mean([r.difference for r in rows]),
        None if isinstance(interval, stats.Result) else interval,
        interval.method if isinstance(interval, stats.Result) else None,
        stats.Result.undefined("tested task by task"),
        None,
        stats.non_inferiority(points, margin),
        stats.minimum_detectable_effect(points),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
