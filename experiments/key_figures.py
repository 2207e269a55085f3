"""A run's key figures, from its stored summary: the cells of its line in a sweep's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.table import number

COLUMNS = ("score", "n", "rows", "at", "kept", "bytes", "mass recall", "tok/s", "us", "x dense")
"""In the order of the table: ``n`` samples, ``rows`` that were timed or replayed, the point the figures are ``at``."""
_OF_SAMPLES = (
    ("kept", "sparsity", "keep_io", 3),
    ("bytes", "sparsity", "bytes_ratio", 3),
    ("mass recall", "fidelity", "mass_recall", 4),
    ("tok/s", "timing", "decode_tok_s", 1),
)
_OF_METHOD = (("kept", "keep_io", 3), ("bytes", "bytes_ratio", 3), ("mass recall", "mass_recall", 4))


def key_figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Text of the `COLUMNS` that the run's runner has figures for; what it measured none of is left out."""
    runner = summary.get("runner")
    if runner == "throughput":
        return _of_throughput(summary)
    if runner == "kernel":
        return _of_kernel(summary)
    if "points" in summary:
        return _of_replay(summary)
    found = {}
    accuracy = summary.get("accuracy")
    if accuracy:
        average = accuracy.get("average", accuracy.get("macro"))
        found["score"] = number(average, 2) + ("*" if accuracy.get("average_partial") else "")
        found["n"] = str(sum(row["n"] for row in accuracy.values() if isinstance(row, Mapping) and "n" in row))
    for column, block, key, digits in _OF_SAMPLES:
        found[column] = number((summary.get(block) or {}).get(key), digits)
    for column, key, digits in _OF_METHOD if summary.get("calibrated") else ():
        found[column] = number(summary["calibrated"][key], digits)
    return {column: text for column, text in found.items() if text != "-"}


def _of_throughput(summary: Mapping[str, Any]) -> dict[str, str]:
    """Tokens per second of the method under the engine, at the point with the largest cache, beside dense there."""
    from experiments.throughput.cases import FAIR

    timed = [row for row in summary["rows"] if "ms_per_step" in row]
    fair = [row for row in timed if row["protocol"] == FAIR]
    row = _largest(fair, _label(summary))
    found = {"rows": _rows(len(timed), len(summary["rows"]))}
    if row is None:
        return found
    found |= {"at": _at(row), "kept": number(row["kept"], 3), "tok/s": number(row["tokens_per_second"], 1)}
    alike = ("B", "T", "fuse")
    dense = [r for r in fair if r["method"] == "dense" and all(r[key] == row[key] for key in alike)]
    if dense and row["method"] != "dense":
        found["x dense"] = number(dense[0]["ms_per_step"] / row["ms_per_step"], 2)
    return found


def _of_kernel(summary: Mapping[str, Any]) -> dict[str, str]:
    """Time of the method's whole step at the point with the largest cache, beside the best dense kernel there."""
    from experiments.kernel.rows import WHOLE

    timed, refused = summary["rows"], summary["refused"]
    row = _largest([r for r in timed if set(r["step"]) >= WHOLE], _label(summary))
    found = {"rows": _rows(len(timed), len(timed) + len(refused))}
    if row is None:
        return found
    found |= {"at": _at(row), "kept": number(row["kept"], 3), "us": number(row["time_us"], 1)}
    if row["best_dense_us"] is not None and row["method"] != "dense":
        found["x dense"] = number(row["best_dense_us"] / row["time_us"], 2)
    return found


def _of_replay(summary: Mapping[str, Any]) -> dict[str, str]:
    """How many points were replayed, and their figures: of one point its own, of several the least and the most."""
    points = summary["points"]
    found = {"rows": str(len(points))}
    if len(points) == 1:
        found["at"] = points[0]["label"]
    for column, key, digits in _OF_METHOD:
        values = [point[key] for point in points if point[key] is not None]
        if values:
            found[column] = " to ".join(dict.fromkeys(number(bound, digits) for bound in (min(values), max(values))))
    return found


def _largest(rows: Sequence[Mapping[str, Any]], method: str) -> Mapping[str, Any] | None:
    """The method's row with most tokens in the cache, the first of equals."""
    own = [row for row in rows if row["method"] == method]
    return max(own, key=lambda row: row["B"] * row["T"], default=None)


def _label(summary: Mapping[str, Any]) -> str:
    """What the rows call the run's method."""
    from experiments.engines import make_method

    return make_method(summary["method"]).label


def _rows(timed: int, asked: int) -> str:
    return str(timed) if timed == asked else f"{timed} of {asked}"


def _at(row: Mapping[str, Any]) -> str:
    return f"B={row['B']} T={row['T']}"
