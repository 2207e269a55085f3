"""Laws that measured fidelity must obey whatever the method; a run that breaks one is labelled, not hidden."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.fidelity.catalogue import PROXY_GAP
from ffd.methods import Method, create, method_class

TOLERANCE = 1e-6
"""Of sums of float64 ratios."""
NOISE = 0.01
"""Mass recall by which an approximation may exceed the oracles' frontier: oracles rank one row, a mean over rows and
heads at equal mean cost may divide the cost among them better."""


@dataclass(frozen=True)
class Law:
    """One law, and whether what was measured obeys it."""

    law: str
    holds: bool
    detail: str
    voids: bool = False
    """Whether a run that breaks it is invalid; the others label it."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def laws_of_a_run(
    method: Method,
    validity: Mapping[str, Any],
    metrics: Mapping[str, Mapping[str, Any]],
    forced: Mapping[str, Any],
    *,
    empty: str | None = None,
) -> list[Law]:
    """Laws of one method's run on the dense trajectory.

    Parameters
    ----------
    method
        The method.
    validity
        ``sparse_steps, dense_steps, expected_steps``.
    metrics
        `eval.fidelity.aggregate` of the run.
    forced
        Summary of the teacher-forced predictions.
    empty
        What says that a head attended to nothing, or None where all attended to something.
    """
    path = f"{validity['sparse_steps']} sparse + {validity['dense_steps']} dense of {validity['expected_steps']}"
    taken = validity["sparse_steps"] + validity["dense_steps"] == validity["expected_steps"]
    finite = forced["finite"]
    laws = [
        Law("every configured layer-step took its path", taken, path, voids=True),
        Law("every prediction is finite", finite, "finite" if finite else "a prediction was not finite", voids=True),
        Law("every head attends to a token of finite score", empty is None, empty or "each at every step", voids=True),
    ]

    def bound(law: str, metric: str, kind: str, holds: Any) -> None:
        value = metrics[metric][kind]
        if value is not None:
            laws.append(Law(law, bool(holds(value)), f"{kind} {metric} = {value:.6g}"))

    bound("recall is at most 1", "mass_recall", "max", lambda x: x <= 1 + TOLERANCE)
    own, loaded = metrics["keep_head"]["macro"], metrics["keep_io"]["macro"]
    if own is not None and loaded is not None:
        detail = f"keep_io {loaded:.6g}, keep_head {own:.6g}"
        laws.append(Law("a group loads at least what a head selects", loaded >= own - TOLERANCE, detail))
    if method.exact_scores and getattr(method, "granularity", "token") == "token":
        bound("an exact oracle keeps the tokens of largest score", "set_recall_own_size", "min", lambda x: x == 1)
    bound(
        "the pseudo-maximum is not above the row's maximum (the fail-safe argument)",
        "pseudo_max_gap",
        "min",
        lambda x: x >= -PROXY_GAP,
    )
    if method.reads_everything and method.dense_layers and forced["kl_max"] is not None:
        laws.append(Law("dense predicts as dense", forced["kl_max"] <= 1e-6, f"kl_max = {forced['kl_max']:.3g}"))
    return laws


def laws_of_a_sweep(rows: Sequence[Mapping[str, Any]]) -> list[Law]:
    """Laws between the points of a sweep over the same traces.

    Parameters
    ----------
    rows
        Of each point: ``label, rule, method, keep_head, keep_io, mass_recall, set_recall_own_size``, and ``broken``:
        why a figure that every sound method has is missing, or None.
    """
    measured = [row for row in rows if row["mass_recall"] is not None]
    return [_finite(rows), *_monotone(measured), *_oracles_are_exact(measured), *_below_the_oracles(measured)]


def problem(laws: Sequence[Law]) -> str | None:
    """Why laws that are broken make a run invalid, or None where none does."""
    return next((law.detail for law in laws if law.voids and not law.holds), None)


def _finite(rows: Sequence[Mapping[str, Any]]) -> Law:
    broken = [f"{row['label']}: {row['broken']}" for row in rows if row["broken"] is not None]
    others = f" (and {len(broken) - 1} more of {len(rows)} points)" if broken[1:] else ""
    detail = broken[0] + others if broken else f"{len(rows)} points"
    return Law("every point is finite", not broken, detail, voids=True)


def _monotone(rows: Sequence[Mapping[str, Any]]) -> list[Law]:
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for row in rows:
        knobs = dict(row["method"])
        knob = create(knobs.pop("name"), knobs).cost_knob
        if knob is not None and knob.name in row["method"]:
            groups[row["rule"], knob.name].append((row["method"][knob.name], row["mass_recall"], row["label"]))
    laws = []
    for (rule, knob_name), points in groups.items():
        points.sort()
        falls = [b for a, b in itertools.pairwise(points) if b[1] < a[1] - TOLERANCE]
        detail = "; ".join(f"falls to {recall:.6g} at {label}" for _, recall, label in falls)
        if len(points) > 1:
            name = f"recall of {rule} grows with {knob_name}"
            laws.append(Law(name, not falls, detail or f"{len(points)} points, to {points[-1][1]:.6g}"))
    return laws


def _oracles_are_exact(rows: Sequence[Mapping[str, Any]]) -> list[Law]:
    return [
        Law(
            f"{row['label']} keeps the tokens of largest score",
            row["set_recall_own_size"] == 1,
            f"set recall at its own size {row['set_recall_own_size']:.6g}",
        )
        for row in rows
        if _is_token_oracle(row["method"]) and row["set_recall_own_size"] is not None
    ]


def _below_the_oracles(rows: Sequence[Mapping[str, Any]]) -> list[Law]:
    """Dense >= oracle >= approximation: no point lies above the frontier of the exact oracles at its cost."""
    oracles = sorted((r["keep_head"], r["mass_recall"]) for r in rows if _is_token_oracle(r["method"]))
    laws = [
        Law("no recall exceeds dense's", all(r["mass_recall"] <= 1 + TOLERANCE for r in rows), f"{len(rows)} points")
    ]
    if not oracles:
        return laws
    above = []
    for row in rows:
        if method_class(row["method"]["name"]).exact_scores:
            continue
        # Attended, not selected: a union rule attends to what its group loads.
        limit = max((recall for keep, recall in oracles if keep <= row["keep_io"]), default=None)
        beyond = next((recall for keep, recall in oracles if keep > row["keep_io"]), 1.0)
        if limit is not None and row["mass_recall"] > max(limit, beyond) + NOISE:
            above.append(row["label"])
    detail = "above: " + ", ".join(above) if above else f"{len(oracles)} oracle points"
    laws.append(Law("no approximation exceeds the exact oracles at equal cost", not above, detail))
    return laws


def _is_token_oracle(method: Mapping[str, Any]) -> bool:
    token = method.get("granularity", "token") == "token" and method.get("select_per", "head") == "head"
    return method_class(method["name"]).exact_scores and token and not method.get("force_local", False)
