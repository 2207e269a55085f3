"""From lm-eval's results to one score per task with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.statistics import mean_interval, wilson_interval

_NOT_METRICS = ("name", "alias", "sample_len", "samples")


@dataclass(frozen=True)
class HarnessScore:
    """A task's first metric under its first filter, in lm-eval's own unit."""

    metric: str | None
    """None, like `filter` and `score`, where lm-eval reports no finite number."""
    filter: str | None
    higher_is_better: bool | None
    score: float | None
    n: int
    ci95: tuple[float, float] | None
    """Wilson's interval where every document scores 0 or 1, Student's for other means; None where the metric is no
    mean over documents."""
    by_document: Mapping[int, float | None]
    """Score per ``doc_id``; None where the metric has none of its own."""
    references: Mapping[int, Any]
    """Target per ``doc_id``."""
    metrics: Mapping[str, float]
    """Every ``metric,filter`` and its standard error, as lm-eval reports them."""


def harness_score(results: Mapping[str, Any], task: str) -> HarnessScore:
    """Read one task out of what lm-eval's ``evaluate`` returned (with samples)."""
    numbers = numeric(results["results"][task])
    first = _first(numbers)
    metric, filter_name = first.split(",", 1) if first is not None else (None, None)
    score = None if first is None else numbers[first]
    samples = [s for s in results["samples"][task] if filter_name in (None, s["filter"])]
    by_document = {int(s["doc_id"]): _number(s.get(metric)) for s in samples}
    return HarnessScore(
        metric=metric,
        filter=filter_name,
        higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
        score=score,
        n=len(by_document),
        ci95=_interval(score, list(by_document.values())),
        by_document=by_document,
        references={int(s["doc_id"]): s["target"] for s in samples},
        metrics=numbers,
    )


def group_scores(results: Mapping[str, Any]) -> dict[str, float]:
    """First metric of every group that lm-eval aggregates."""
    scores = {}
    for group, values in results.get("groups", {}).items():
        numbers = numeric(values)
        first = _first(numbers)
        if first is not None:
            scores[group] = numbers[first]
    return scores


def numeric(values: Mapping[str, Any]) -> dict[str, float]:
    """The ``metric,filter`` entries of a result that are finite numbers."""
    found = {key: _number(value) for key, value in values.items() if key not in _NOT_METRICS and "," in key}
    return {key: value for key, value in found.items() if value is not None}


def _first(numbers: Mapping[str, float]) -> str | None:
    return next((key for key in numbers if "_stderr," not in key), None)


def _interval(score: float | None, values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    if score is None or not known or len(known) != len(values):
        return None
    if not math.isclose(score, math.fsum(known) / len(known), abs_tol=1e-9):
        return None
    if all(value in (0, 1) for value in known):
        return wilson_interval(round(sum(known)), len(known))
    return mean_interval(known)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
