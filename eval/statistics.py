"""Scores of a task with their uncertainty, and averages over tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from eval.records import TaskScore


def task_score(scores: Sequence[float]) -> TaskScore:
    """Score of one task in percent, rounded to two decimals, with a 95 % interval.

    Parameters
    ----------
    scores : sequence of float
        One score in [0, 1] per finished sample.

    Returns
    -------
    TaskScore
        `score` and `ci95` are None for no sample. The interval is Wilson's where every score is 0
        or 1, otherwise Student's for the mean, cut to [0, 100] and None for a single sample.

    Raises
    ------
    ValueError
        A score outside [0, 1] or not a number.
    """
    for score in scores:
        if not 0 <= score <= 1:
            raise ValueError(f"score {score} is not in [0, 1]")
    n = len(scores)
    if n == 0:
        return TaskScore(None, 0, None)
    binary = all(score in (0, 1) for score in scores)
    interval = wilson_interval(round(sum(scores)), n) if binary else mean_interval(scores)
    # The benchmarks' own order of operations: sum, divide, scale, round.
    return TaskScore(round(sum(scores) / n * 100, 2), n, _in_percent(interval))


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float] | None:
    """Wilson's score interval of a proportion (Wilson, 1927); None for no trial.

    Returns
    -------
    tuple of float
        Lower and upper bound in [0, 1].
    """
    if n == 0:
        return None
    from scipy.special import ndtri  # a fraction of scipy.stats' time to import

    z = float(ndtri(0.5 + confidence / 2))
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends the bound is exact: rounding must not move it past the proportion itself.
    low = 0.0 if successes == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + spread) / scale)
    return low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t-interval of a mean, in the values' unit; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    from scipy.special import stdtrit

    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * deviation / math.sqrt(n)
    return mean - half, mean + half


def plain_mean(scores: Iterable[float | None]) -> float | None:
    """Unweighted mean of the task scores there are, rounded to two decimals; None if there are none."""
    present = [score for score in scores if score is not None]
    return round(sum(present) / len(present), 2) if present else None


def _in_percent(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    if interval is None:
        return None
    low, high = interval
    return max(0.0, 100 * low), min(100.0, 100 * high)
