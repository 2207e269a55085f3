"""How a method is called in a table: its name and the knobs that tell it from its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAIN_KNOBS = ("delta", "p", "token_budget", "bits", "window")
"""Shown whenever a method has them."""


def label(method: Mapping[str, Any], extra: Sequence[str] = ()) -> str:
    """Name, main knob, and the knobs named in ``extra``."""
    parts = [str(method["name"]).rpartition(":")[2]]
    for knob in (*_MAIN_KNOBS, *extra):
        value = method.get(knob)
        if value is None or (knob == "token_budget" and method.get("keep_fraction") is not None):
            continue
        unit = " log2" if knob == "delta" and method.get("delta_unit") == "log2" else ""
        parts.append(f"{knob}={_plain(value)}{unit}")
    return " ".join(dict.fromkeys(parts))


def distinct_labels(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels of several methods, with every knob by which two of one name differ."""
    labels = []
    for method in methods:
        peers = [m for m in methods if m["name"] == method["name"]]
        knobs = dict.fromkeys(knob for peer in peers for knob in peer if knob not in ("name", "delta_unit"))
        # A job that left no run tells only the knobs of its command line.
        differing = [k for k in knobs if len({repr(p[k]) for p in peers if k in p}) > 1]
        labels.append(label(method, [k for k in differing if k not in _MAIN_KNOBS]))
    return labels


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
