"""Fidelity: what a method kept, what it lost, and where, against dense attention of the same decode step."""

from eval.fidelity.accumulate import FidelityState
from eval.fidelity.aggregate import (
    aggregate,
    broken_metric,
    broken_output,
    histogram,
    pair_means,
    summary,
    table,
    write_table,
)
from eval.fidelity.catalogue import METRICS
from eval.fidelity.probe import FidelityProbe

__all__ = [
    "METRICS",
    "FidelityProbe",
    "FidelityState",
    "aggregate",
    "broken_metric",
    "broken_output",
    "histogram",
    "pair_means",
    "summary",
    "table",
    "write_table",
]
