"""What stored files must look like to be read: a folder or row that does not is left out, and a line says why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

_BLOCKS = ("model", "task", "environment", "accuracy", "sparsity", "fidelity", "calibrate")
"""Of a summary; each may be absent."""
_NUMBERS = {
    "time_us": ("time_us", "B", "T"),
    "tokens_per_second": ("tokens_per_second", "ms_per_step", "over_floor", "B", "T", "kept"),
}
"""By the figure that tells a timing's kind, the figures that every row of it has."""
_NAMES = {"time_us": ("method",), "tokens_per_second": ("method", "protocol")}


def run_problem(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Why these are not the files of a run, or None."""
    method = summary.get("method")
    if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
        return "summary.json names no method"
    for key in _BLOCKS:
        if not isinstance(summary.get(key), Mapping | None):
            return f"{key} of summary.json is no mapping"
    if not isinstance(config.get("model"), Mapping | None):
        return "model of config.yaml is no mapping"
    for block in ("rows", "break_even", "points", "laws"):
        rows = summary.get(block)
        if rows is not None and not isinstance(rows, list):
            return f"{block} of summary.json is no list"
        for number, row in enumerate(rows or ()):
            problem = row_problem(row)
            if problem is not None:
                return f"row {number} of {block} in summary.json {problem}"
    return None


def row_problem(row: Any) -> str | None:
    """Why this is no row of measurements, or None; rows of a kind that is not timed may hold anything."""
    if not isinstance(row, Mapping):
        return "is no mapping"
    for kind, numbers in _NUMBERS.items():
        if kind not in row:
            continue
        for name in numbers:
            if not is_number(row.get(name)):
                return f"has {name}={row.get(name)}, expected a number"
        for name in _NAMES[kind]:
            if not isinstance(row.get(name), str):
                return f"has {name}={row.get(name)}, expected a name"
    step = row.get("step", ())
    if not isinstance(step, list | tuple) or not all(isinstance(stage, str) for stage in step):
        return f"has step={step}, expected a list of names"
    return None if "time_us" not in row or step else "has no step"


def is_sample(row: Any) -> bool:
    """Whether this is a finished sample: it has a task and an index."""
    return isinstance(row, Mapping) and isinstance(row.get("task"), str) and type(row.get("index")) is int


def is_number(value: Any) -> TypeGuard[float]:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
