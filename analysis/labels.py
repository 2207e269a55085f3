"""How a method is called in a table: its name and the knobs that tell it from its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

_MAIN_KNOBS = ("delta", "p", "token_budget", "bits", "window")
"""Shown whenever a method has them."""
_LONGEST = 24
"""Characters of a knob's value; a longer one, margins per layer and head, is told by a digest."""


def label(method: Mapping[str, Any], extra: Sequence[str] = ()) -> str:
    """Name, main knob, and the knobs named in ``extra``."""
    parts = [_short_name(method)]
    for knob in (*_MAIN_KNOBS, *extra):
        value = method.get(knob)
        if value is None or (knob == "token_budget" and method.get("keep_fraction") is not None):
            continue
        unit = " log2" if knob == "delta" and method.get("delta_unit") == "log2" else ""
        parts.append(f"{knob}={_plain(value)}{unit}")
    return " ".join(dict.fromkeys(parts))


def distinct_labels(methods: Sequence[Mapping[str, Any]], *, whole: bool = False) -> list[str]:
    """Labels of several methods, with every knob by which two of one name differ.

    Parameters
    ----------
    methods
        ``name`` and knobs of each.
    whole
        Whether they are of stored runs, where a knob that one lacks was left at its default. A job that left no run
        tells only the knobs of its command line, and differs by none that it does not name.
    """
    labels = []
    for method in methods:
        peers = [m for m in methods if _short_name(m) == _short_name(method)]
        knobs = dict.fromkeys(knob for peer in peers for knob in peer if knob not in ("name", "delta_unit"))
        differing = [k for k in knobs if len({repr(p.get(k)) for p in peers if whole or k in p}) > 1]
        told = label(method, [k for k in differing if k not in _MAIN_KNOBS])
        one_name = len({peer["name"] for peer in peers}) == 1
        labels.append(told if one_name else told.replace(_short_name(method), method["name"], 1))
    return labels


def _short_name(method: Mapping[str, Any]) -> str:
    """Without the module of a method from outside."""
    return str(method["name"]).rpartition(":")[2]


def _plain(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= _LONGEST else f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"
