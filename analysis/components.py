"""Points of the component grid by their labels; and what a rule of selection costs at matched keep, for the card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEPT = 0.273
"""The paper's matched share."""
RULES = ("topdelta", "topk", "topp")
_COMPONENT = "component "
_SCANS = tuple((f"{bits} bit", path) for bits in (2, 4, 8, 16) for path in ("fused", "decoupled"))


def is_component(method: str) -> bool:
    """Whether a row's method is a point of the grid."""
    return method.startswith(_COMPONENT)


def grid_point(method: str) -> tuple[str, str, str]:
    """Scan ("2 bit"), rule and path of a point's label, as `ffd.methods.component.Component.label` writes it."""
    bits, unit, rule, path = method.removeprefix(_COMPONENT).split()
    return f"{bits} {unit}", rule, path


def selection_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Times of the three rules for every scan and path, and for the exact rules per token and head."""
    times = {
        (row["method"], row["T"]): row["time_us"]
        for row in record["rows"]
        if row["kept_target"] == KEPT and (row["timing"], row["l2"]) == ("graph", "cold")
    }
    grid = {(*grid_point(method), length): time for (method, length), time in times.items() if is_component(method)}
    lengths = sorted({length for *_, length in grid})
    yield f"One decode step in us, {record['gpu']}, revision {str(record['revision'])[:7]}, {record['date']}:"
    yield ""
    yield "| tokens | scan, path | top-delta | top-k | top-p | top-delta : top-k : top-p |"
    yield "|---|---|---:|---:|---:|---|"
    yield "| 16K | the paper's | | | | 1 : 2 : 25 |"
    for length in lengths:
        for scan, path in _SCANS:
            yield from _line(length, f"{scan}, {path}", [grid.get((scan, rule, path, length)) for rule in RULES])
        yield from _line(length, "exact, per token and head", [times.get((rule, length)) for rule in RULES])


def _line(length: int, name: str, times: list[float | None]) -> Iterator[str]:
    """One line of the table, or none where nothing was timed: at some lengths the paper's points alone are."""
    if not any(times):
        return
    cells = " | ".join("-" if time is None else f"{time:.1f}" for time in times)
    ratio = "-"
    if times[0]:
        ratio = " : ".join("-" if time is None else f"{time / times[0]:.1f}".removesuffix(".0") for time in times)
    yield f"| {-(-length // 1024)}K | {name} | {cells} | {ratio} |"
