"""From a state's sums to plain numbers: means, distributions over layer-head pairs, percentiles over steps, tables.

Three means of one metric are told apart. The *pair mean* of a (layer, head) averages its steps;
*macro* averages the pair means; *micro* is token-weighted: where a metric is a ratio of token
counts it pools numerators and denominators over all steps and pairs, so that ``keep_io``'s micro
mean is what a ledger over the same steps gives. Elsewhere every step weighs the same.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.fidelity.accumulate import EDGES, NAMES, WITH_HISTOGRAM, FidelityState
from eval.fidelity.catalogue import INDEX, METRICS, Metric

_HEADLINE = {
    "mass_recall": "mass_recall",
    "salient_hit_rate": "salient_hit_delta",
    "salient_hit_rate_mass": "salient_hit_mass",
    "spearman": "spearman",
    "spearman_page": "spearman_page",
    "spearman_top": "spearman_top",
    "output_cos": "output_cos",
    "output_rel_error": "output_rel_error",
    "executor_rel_error": "executor_rel_error",
    "lse_error_mean": "lse_error",
    "lse_omitted_mean": "lse_omitted",
    "lse_quantisation_mean": "lse_quantisation",
    "pseudo_max_gap_mean": "pseudo_max_gap",
    "false_negatives": "false_negatives",
    "proxy_error_cases": "proxy_error_cases",
    "keep_head_proxy_error": "keep_head_proxy_error",
    "keep_head_regular": "keep_head_regular",
    "salient_hit_proxy_error": "salient_hit_proxy_error",
    "salient_hit_regular": "salient_hit_regular",
    "set_recall_own_size": "set_recall_own_size",
    "set_recall_64": "set_recall_64",
    "set_recall_256": "set_recall_256",
    "set_recall_1024": "set_recall_1024",
}
_MAXIMA = {
    "lse_error_max": "lse_error",
    "lse_omitted_max": "lse_omitted",
    "lse_quantisation_max": "lse_quantisation",
    "pseudo_max_gap_max": "pseudo_max_gap",
}
_P99 = {
    "lse_error_p99": "lse_error",
    "lse_omitted_p99": "lse_omitted",
    "lse_quantisation_p99": "lse_quantisation",
}


def pair_means(state: FidelityState, metric: str) -> Tensor:
    """Mean over steps of each layer-head pair: float64 [L, Hq], NaN where it was never defined."""
    row = INDEX[metric]
    return state.value_sum[row] / state.count[row]


def why_null(state: FidelityState, metric: str) -> str | None:
    """Why a metric has no aggregate, or None where it has one."""
    spec, row = METRICS[INDEX[metric]], INDEX[metric]
    if not state.layers:
        return "all layers are dense by configuration" if state.dense_calls else "no decode step was probed"
    if not int(state.steps.sum()):
        return "no decode step was probed"
    if not int(state.count[row].sum()):
        return spec.undefined
    excluded = int(state.excluded[row].sum())
    if spec.strict and excluded:
        return f"{spec.undefined} in {excluded} of {excluded + int(state.count[row].sum())} observations"
    return None


def broken_output(state: FidelityState) -> str | None:
    """What was wrong with the method's outputs, or None where nothing was.

    NaN, for one, or the output of a head that attended to nothing: it is a number, its log normaliser is not.
    """
    return broken_metric(state, ["output_rel_error", "lse_error"])


def broken_metric(state: FidelityState, metrics: Sequence[str]) -> str | None:
    """Why the first of ``metrics`` with an observation that has no value has none, or None where all have one."""
    lacking = (metric for metric in metrics if int(state.excluded[INDEX[metric]].sum()))
    return next((why_null(state, metric) for metric in lacking), None)


def distribution(pairs: Tensor) -> dict[str, float | None]:
    """Minimum, percentiles, maximum and (population) standard deviation over the pairs that have a value."""
    values = pairs[~pairs.isnan()].flatten()
    if not values.numel():
        return dict.fromkeys(("min", "p5", "p50", "p95", "max", "std"))
    p5, p50, p95 = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95], dtype=values.dtype)).tolist()
    return {
        "min": float(values.min()),
        "p5": p5,
        "p50": p50,
        "p95": p95,
        "max": float(values.max()),
        "std": float(values.std(correction=0)),
    }


def percentile(state: FidelityState, metric: str, share: float) -> float | None:
    """Value that at least ``share`` of the observations of all pairs do not exceed.

    The upper edge of its histogram bin, or the largest observation where that is smaller: at most
    one bin (15.5 %, or a quarter of a nat for signed metrics) above the exact value.

    Raises
    ------
    KeyError
        If the metric keeps no histogram.
    """
    row, kind = _histogram_of(metric)
    cumulative = state.histogram[row].sum(dim=(0, 1)).cumsum(dim=0)
    total = int(cumulative[-1])
    if not total:
        return None
    position = int((cumulative < share * total).sum())
    edges = EDGES[kind]
    largest = float(state.maximum[INDEX[metric]].max())
    return min(float(edges[position]), largest) if position < len(edges) else largest


def histogram(state: FidelityState, metric: str) -> dict[str, list[float]]:
    """Inner edges and counts (one more than edges; first and last bin are open), summed over pairs."""
    row, kind = _histogram_of(metric)
    return {"edges": EDGES[kind].tolist(), "counts": state.histogram[row].sum(dim=(0, 1)).tolist()}


def aggregate(state: FidelityState) -> dict[str, dict[str, Any]]:
    """Every metric's micro and macro mean, extremes, distribution over pairs, and observations with and without value.

    Returns
    -------
    dict
        JSON-ready, by metric name; where a metric has no aggregate the numbers are None and
        ``null_reason`` says why.
    """
    return {metric.name: _aggregate_one(state, metric) for metric in METRICS}


def summary(state: FidelityState) -> dict[str, Any]:
    """The headline numbers.

    Returns
    -------
    dict
        Plain numbers or None: means are macro, ``*_max`` and ``*_p99`` over all steps and pairs, in
        nats. ``null_reasons`` maps each key that is None to its reason; ``probed_steps`` counts
        decode steps per active row, ``probed_layers`` the layers observed.
    """
    numbers: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def put(key: str, metric: str, value: float | None) -> None:
        reason = why_null(state, metric)
        numbers[key] = None if reason else value
        if reason:
            reasons[key] = reason

    for key, metric in _HEADLINE.items():
        put(key, metric, _mean(pair_means(state, metric)))
    for key, metric in _MAXIMA.items():
        put(key, metric, _largest(state, metric))
    for key, metric in _P99.items():
        put(key, metric, percentile(state, metric, 0.99))
    numbers["probed_steps"] = int(state.steps.max()) if state.layers else 0
    numbers["probed_layers"] = len(state.layers)
    numbers["null_reasons"] = reasons
    return numbers


def table(state: FidelityState) -> list[dict[str, Any]]:
    """One row per layer and query head: means over steps (None where undefined), largest LSE errors, steps."""
    means = {metric: pair_means(state, metric).tolist() for metric in NAMES}
    largest = {metric.name: state.maximum[INDEX[metric.name]].tolist() for metric in WITH_HISTOGRAM}
    rows = []
    for position, layer in enumerate(state.layers):
        for head in range(state.num_heads):
            row: dict[str, Any] = {"layer": layer, "head": head, "steps": int(state.steps[position])}
            row |= {name: _plain(values[position][head]) for name, values in means.items()}
            row |= {f"{name}_max": _plain(values[position][head]) for name, values in largest.items()}
            rows.append(row)
    return rows


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV, None as an empty field; the old file stays whole until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["layer", "head", "steps"])
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _aggregate_one(state: FidelityState, metric: Metric) -> dict[str, Any]:
    row, reason = INDEX[metric.name], why_null(state, metric.name)
    numbers: dict[str, Any] = {
        "unit": metric.unit,
        "observations": int(state.count[row].sum()),
        "excluded": int(state.excluded[row].sum()),
        "null_reason": reason,
    }
    pairs = pair_means(state, metric.name)
    if reason:
        pairs = torch.full_like(pairs, torch.nan)
    weight = float(state.weight[row].sum())
    numbers["micro"] = None if reason or not weight else float(state.weighted_sum[row].sum()) / weight
    numbers["macro"] = _mean(pairs)
    numbers["min"] = None if reason else _plain(float(state.minimum[row].min()))
    numbers["max"] = None if reason else _largest(state, metric.name)
    if metric.histogram is not None:
        numbers["p99"] = None if reason else percentile(state, metric.name, 0.99)
    numbers["pairs"] = distribution(pairs)
    return numbers


def _histogram_of(metric: str) -> tuple[int, str]:
    for row, spec in enumerate(WITH_HISTOGRAM):
        if spec.name == metric and spec.histogram is not None:
            return row, spec.histogram
    raise KeyError(f"{metric}: expected one of " + ", ".join(spec.name for spec in WITH_HISTOGRAM))


def _mean(pairs: Tensor) -> float | None:
    return _plain(float(pairs.nanmean()))


def _largest(state: FidelityState, metric: str) -> float | None:
    values = state.maximum[INDEX[metric]]
    return _plain(float(values.max())) if values.numel() else None


def _plain(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
