"""Margins of a calibration as a method's configuration, and what they measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eval.fidelity import FidelityState, aggregate, pair_means
from eval.fidelity.aggregate import distribution
from eval.fidelity.curves import Curves
from eval.fidelity.replay import replay_with_ledger
from eval.fidelity.traces import Trace
from experiments.engines import make_method
from experiments.replay import bytes_ratio
from ffd.methods import Method


def calibrated_method(
    method: Mapping[str, Any], layers: Sequence[int], deltas: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The method's configuration with margins for every model layer, in nats; layers not measured keep ``delta``."""
    base = make_method(method)
    own = dict(zip(layers, deltas, strict=True))
    rest = [float(getattr(base, "delta_nats", 0.0))] * len(deltas[0])
    rows = [list(own.get(layer, rest)) for layer in range(max(layers) + 1)]
    return {**dict(method), "delta_unit": "nat", "deltas": rows}


def reached(
    method: Method, traces: Sequence[Trace], target: str, per: str, value: float, executor: str
) -> dict[str, Any] | None:
    """What a method measures on traces; None without any.

    ``pairs`` is the target's distribution over layer-head pairs (over layers and prompts for bytes), and
    ``pairs_meeting`` the share that meets it; recall is that of the own selection where margins are per head.
    """
    if not traces:
        return None
    state, reports = FidelityState(16), []
    for trace in traces:
        observed, layers = replay_with_ledger(trace, method, executor=executor)
        state = state.merge(observed)
        reports.extend(layers)
    metrics = aggregate(state)
    numbers = {
        "mass_recall": metrics["mass_recall"]["macro"],
        "lse_error": metrics["lse_error"]["macro"],
        "bytes_ratio": bytes_ratio(reports),
    }
    pairs = {
        "mass_recall": pair_means(state, "mass_recall_selected" if per == "head" else "mass_recall"),
        "lse_error": pair_means(state, "lse_error"),
        "bytes_ratio": torch.tensor([sum(r.bytes_read.values()) / r.dense_bytes for r in reports], dtype=torch.float64),
    }[target]
    meeting = pairs >= value if target == "mass_recall" else pairs <= value
    return {
        "reached": numbers[target],
        "pairs_meeting": float(meeting.double().mean()),
        "pairs": distribution(pairs),
        **numbers,
        "keep_head": metrics["keep_head"]["macro"],
        "keep_io": metrics["keep_io"]["macro"],
        "prompts": len(traces),
    }


def at_margin(curves: Curves, margin: float) -> dict[str, float]:
    """Row of the curve table for a margin that was tried."""
    return next(row for row in curve_table(curves) if row["margin_nats"] == margin)


def curve_table(curves: Curves) -> list[dict[str, float]]:
    """Means over all pairs at each margin."""
    return [
        {
            "margin_nats": margin,
            "mass_recall": float(curves.recall[d].mean()),
            "mass_recall_own": float(curves.recall_own[d].mean()),
            "lse_error": float(curves.lse[d].mean()),
            "bytes_ratio": float(curves.bytes_read[d].sum() / curves.dense_bytes.sum()),
        }
        for d, margin in enumerate(curves.margins)
    ]
