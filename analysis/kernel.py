"""Kernel rows for tables and figures: which of them may be compared, and the figures of time and of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.components import is_component
from analysis.drawing import Figure, Series
from analysis.measurements import Timing, timing_labels

_WHOLE = {"attend", "reduce"}
_GEOMETRY = ("Hq", "Hkv", "d", "dtype")
_LENGTH_STEP = 4096
_LENGTHS = (4096, 16384, 65536, 262144)
_DRAWN = (None, 0.02, 0.18, 1.0)
"""Kept targets of FFD in figures: of five the ones apart enough to tell."""
MATCHED = 0.18
"""The kept target at which methods are compared."""
DENSE = {"dense": "dense (ours)", "sdpa_cudnn": "SDPA cuDNN", "sdpa_flash": "SDPA flash", "flashinfer": "flashinfer"}
"""Dense attention's rows, and what they are called."""


def whole_steps(timings: Sequence[Timing]) -> list[Timing]:
    """Whole steps, without the launches that were timed alone."""
    return [t for t in timings if set(t.row.get("step", ())) >= _WHOLE]


def comparable(timings: Sequence[Timing]) -> list[Timing]:
    """Whole steps of one geometry over planted keys, by graph replay, cold; a baseline of several runs comes once."""
    plain = [t for t in whole_steps(timings) if _usual(t.row)]
    shapes = Counter(tuple(t.row.get(key) for key in _GEOMETRY) for t in plain)
    if not shapes:
        return []
    (usual, _), *_ = shapes.most_common(1)
    found: dict[tuple[Any, ...], Timing] = {}
    for t in plain:
        row = t.row
        if tuple(row.get(key) for key in _GEOMETRY) == usual:
            found.setdefault((t.device, row["method"], row.get("kept_target"), row["B"], row["T"]), t)
    return list(found.values())


def _usual(row: Mapping[str, Any]) -> bool:
    return (row.get("timing", "graph"), row.get("l2", "cold"), row.get("source", "planted")) == (
        "graph",
        "cold",
        "planted",
    )


def latency(timings: Sequence[Timing]) -> Figure:
    """Time of one layer's step against the context, batch size 1."""
    return Figure(
        "kernel_latency",
        f"One decode step of one layer, {devices(timings)}",
        "tokens in the cache",
        "us",
        tuple(_lines(timings, "T")),
        log=True,
        x_ticks=tuple((float(T), f"{T // 1024}K") for T in _LENGTHS),
    )


def roofline(timings: Sequence[Timing], bytes_per_us: float | None) -> Figure:
    """Time of one layer's step against the bytes that it must read, under the roof of the read bandwidth."""
    lines = _lines(timings, "bytes")
    if bytes_per_us and lines:
        reach = [x for line in lines for x in line.x]
        ends = (min(reach), max(reach))
        roof = f"read bandwidth, {bytes_per_us / 1e6:.2f} TB/s"
        lines.append(Series(roof, ends, tuple(x / bytes_per_us for x in ends), bound=True))
    megabytes = tuple(
        Series(line.label, tuple(x / 1e6 for x in line.x), line.y, line.names, bound=line.bound) for line in lines
    )
    title = f"Time against bytes that must be read, {devices(timings)}"
    return Figure("kernel_roofline", title, "MB that must be read", "us", megabytes, log=True)


def methods(timings: Sequence[Timing]) -> Figure:
    """Time of one layer's step against the context, one line per method at the same kept share, and dense attention."""
    alike = [t for t in timings if t.row["method"] != "ffd" or t.row.get("kept_target") == MATCHED]
    title = f"One decode step of one layer, {100 * MATCHED:g} % kept, {devices(timings)}"
    return replace(latency(alike), name="kernel_methods", title=title)


def by_length(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[Any, Mapping[str, Any]]]:
    """Rows by the length that they stand for, then by method, with the kept target of what is not dense.

    Of two rows for one length the shorter is taken, see `nominal_length`.
    """
    found: dict[int, dict[Any, Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        key = (row["method"], row["kept_target"]) if row["method"] not in DENSE else row["method"]
        found.setdefault(nominal_length(row), {}).setdefault(key, row)
    return found


def _lines(timings: Sequence[Timing], x: str) -> list[Series]:
    # The component grid, at one kept share, has a table of its own.
    chosen = [t for t in comparable(timings) if t.row["B"] == 1 and not is_component(t.row["method"])]
    single = sorted(
        (t for t in chosen if t.row.get("kept_target") in _drawn(t.row["method"], chosen)),
        key=lambda t: (t.row["method"], t.row.get("kept_target") or 0.0),
    )
    points: dict[str, dict[int, tuple[float, float, str]]] = {}
    for name, t in sorted(zip(timing_labels(single), single, strict=True), key=lambda named: named[1].row["T"]):
        point = (float(t.row.get(x) or 0), float(t.row["time_us"]), t.origin)
        points.setdefault(name, {}).setdefault(nominal_length(t.row), point)
    return [
        Series(name, *(tuple(p[i] for p in sorted(points[name].values())) for i in range(3))) for name in sorted(points)
    ]


def nominal_length(row: Mapping[str, Any]) -> int:
    """The length that a row stands for: 16320 is a step at 16K.

    Of two rows for one length the shorter is to be shown: 127 of 128 steps complete no block.
    """
    return int(-(-row["T"] // _LENGTH_STEP) * _LENGTH_STEP)


def _drawn(method: str, timings: Sequence[Timing]) -> Collection[float | None]:
    """Kept targets of a method that a figure shows: three of FFD, the one to compare at of others, or everything."""
    if method == "ffd":
        return _DRAWN
    compared = any(t.row["method"] == method and t.row.get("kept_target") == MATCHED for t in timings)
    return (None, MATCHED if compared else 1.0)


def devices(timings: Sequence[Timing]) -> str:
    """Names of the devices behind the times; of a committed record its revision too."""
    return ", ".join(dict.fromkeys(f"{t.record}, committed" if t.record else t.device for t in timings))


def roof(timings: Sequence[Timing]) -> float | None:
    """Read bandwidth in bytes per us behind the rows' floors; None where there is none, or more than one."""
    found = {round(t.row["bytes"] / t.row["floor_us"], -4) for t in timings if t.row.get("floor_us")}
    return max(found) if found and max(found) < 1.01 * min(found) else None
