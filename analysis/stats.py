"""Paired statistics on score differences; every degenerate case is undefined with its reason, never 0.

Differences are second minus first, in score points (0 to 100). Samples of one document are one
cluster: clusters, not samples, are drawn again, flipped and counted as degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
"""Bootstrap resamples."""

Task = tuple[Sequence[float], Sequence[str]]
"""Differences of one task and the cluster of each."""


@dataclass(frozen=True)
class Result:
    """A number with what it rests on, or None with the reason."""

    value: float | None
    method: str
    """Name of the test or estimator; where the value is None, why."""

    @classmethod
    def undefined(cls, reason: str) -> Result:
        """No value can be had."""
        return cls(None, reason)


def cluster_sums(
    differences: Sequence[float], clusters: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum of differences and number of samples of each cluster, in order of first appearance."""
    order = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index = np.array([order[name] for name in clusters], dtype=np.int64)
    sums = np.bincount(index, weights=np.asarray(differences, dtype=np.float64), minlength=len(order))
    return sums, np.bincount(index, minlength=len(order)).astype(np.float64)


def bootstrap_interval(
    tasks: Sequence[Task], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float] | Result:
    """Percentile interval of the mean difference, averaged over tasks; clusters are drawn within each task.

    Parameters
    ----------
    tasks
        Per task the differences and the cluster of each.

    Returns
    -------
    tuple of float, or Result
        The interval in the differences' unit; undefined where nothing can vary.

    Notes
    -----
    Efron and Tibshirani (1993), chapter 13; clusters as in Miller (2024), arXiv:2411.00640.
    """
    generator = np.random.default_rng(seed)
    total = np.zeros(DRAWS)
    varies = False
    for differences, clusters in tasks:
        sums, counts = cluster_sums(differences, clusters)
        if len(sums) < 2:
            return Result.undefined("a task has fewer than two documents")
        varies = varies or len(set(np.round(np.asarray(differences), 12))) > 1
        drawn = generator.integers(len(sums), size=(DRAWS, len(sums)))
        total += sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    if not varies:
        return Result.undefined("all differences are equal")
    tail = 50 * (1 - confidence)
    low, high = np.percentile(total / len(tasks), [tail, 100 - tail])
    return float(low), float(high)


def difference_test(first: Sequence[float], second: Sequence[float], clusters: Sequence[str]) -> Result:
    """Two-sided test that two runs score the same on one task.

    Exact McNemar where every score is 0 or 1 and every document has one sample (McNemar, 1947; the
    sign test on discordant pairs); otherwise the sign-flip permutation test on documents' sums,
    exact where there are few enough.
    """
    from scipy.stats import binomtest, permutation_test

    differences = [b - a for a, b in zip(first, second, strict=True)]
    if not any(differences):
        return Result.undefined("no pair differs")
    binary = set(first) | set(second) <= {0.0, 1.0}
    if binary and len(set(clusters)) == len(clusters):
        better = sum(d > 0 for d in differences)
        discordant = sum(d != 0 for d in differences)
        return Result(float(binomtest(better, discordant).pvalue), "exact McNemar")
    sums, _ = cluster_sums(differences, clusters)
    moved = sums[sums != 0]
    if len(moved) < 2:
        return Result.undefined("fewer than two documents differ")
    tested = permutation_test(
        (moved,),
        np.sum,
        permutation_type="samples",
        n_resamples=DRAWS - 1,
        vectorized=False,
        rng=np.random.default_rng(0),
    )
    return Result(float(tested.pvalue), "sign-flip permutation")


def non_inferiority(tasks: Sequence[Task], margin: float) -> Result:
    """One-sided p-value of "the second run is worse by ``margin`` or more"; small: it is within the margin.

    Student's t on documents (cluster-robust standard error). Where no pair of a single task differs
    there is no spread to estimate, but the chance of that is known: a mean loss of ``margin`` needs at
    least that share of documents to lose, so n documents show none with at most (1 - margin / 100) ** n.

    Parameters
    ----------
    tasks
        Per task the differences in points and the cluster of each; the mean over tasks is tested.
    margin
        Points, positive.

    Raises
    ------
    ValueError
        If the margin is not in (0, 100).
    """
    from scipy.stats import t

    if not 0 < margin < 100:
        raise ValueError(f"margin={margin:g}: expected a number between 0 and 100")
    if len(tasks) == 1 and not any(tasks[0][0]):
        return Result((1 - margin / 100) ** len(set(tasks[0][1])), "exact: no pair differs")
    spread = mean_and_error(tasks)
    if isinstance(spread, Result):
        return spread
    mean, error, freedom = spread
    return Result(float(t.sf((mean + margin) / error, freedom)), "one-sided t on documents")


def mean_and_error(tasks: Sequence[Task]) -> tuple[float, float, float] | Result:
    """Mean difference over tasks, its standard error and degrees of freedom (Welch and Satterthwaite)."""
    means, variances, freedoms = [], [], []
    for differences, clusters in tasks:
        n = len(set(clusters))
        if n < 2:
            return Result.undefined(
                "fewer than two documents" if len(tasks) == 1 else "a task has fewer than two documents"
            )
        means.append(float(np.mean(differences)))
        variances.append(standard_error(differences, clusters) ** 2)
        freedoms.append(n - 1)
    total = math.fsum(variances)
    # Rounding of equal differences must not pass for a spread.
    if total <= 1e-18 * max(1.0, max(abs(m) for m in means)) ** 2:
        return Result.undefined("all differences are equal")
    freedom = total**2 / math.fsum(v * v / f for v, f in zip(variances, freedoms, strict=True))
    return math.fsum(means) / len(tasks), math.sqrt(total) / len(tasks), freedom


def standard_error(differences: Sequence[float], clusters: Sequence[str]) -> float:
    """Cluster-robust standard error of the mean difference, with the factor n / (n - 1) for few clusters."""
    sums, counts = cluster_sums(differences, clusters)
    n = len(sums)
    residuals = sums - counts * float(np.mean(differences))
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / len(differences)


def minimum_detectable_effect(tasks: Sequence[Task], *, alpha: float = 0.05, power: float = 0.8) -> Result:
    """Smallest true mean difference that this many documents would show with ``power`` at two-sided ``alpha``."""
    from scipy.stats import t

    spread = mean_and_error(tasks)
    if isinstance(spread, Result):
        return spread
    _, error, freedom = spread
    factor = float(t.ppf(1 - alpha / 2, freedom) + t.ppf(power, freedom))
    return Result(factor * error, f"power {power:g}, alpha {alpha:g}")


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down adjustment over the tests that have a p-value (Holm, 1979); None stays None."""
    defined = sorted((p, name) for name, p in p_values.items() if p is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for rank, (p, name) in enumerate(defined):
        largest = max(largest, min(1.0, (len(defined) - rank) * p))
        adjusted[name] = largest
    return adjusted
