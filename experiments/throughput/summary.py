"""What rows say together: where a method becomes faster than dense under the same engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.throughput.cases import FAIR

Measured = Mapping[str, Any]


def break_even(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Contexts and batch sizes from which on each method is faster than fair dense.

    Parameters
    ----------
    rows
        Of one model on one device; rows without a time are left out.

    Returns
    -------
    list of dict
        ``method, kept_target, fuse``; ``along`` (T or B) and what is held ``fixed``; ``measured``, the values along
        the axis; ``at``: "always" or "never" within them, else the value, interpolated between two of them where the
        difference of the times, which is affine in both axes, changes its sign for the last time; ``says``, the
        same as a sentence.
    """
    fair = [row for row in rows if row["protocol"] == FAIR and "ms_per_step" in row]
    dense = {(row["B"], row["T"], row["fuse"]): row["ms_per_step"] for row in fair if row["method"] == "dense"}
    found = []
    for along, fixed in (("T", "B"), ("B", "T")):
        curves: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
        for row in fair:
            point = (row["B"], row["T"], row["fuse"])
            if row["method"] != "dense" and point in dense:
                key = (row["method"], row["kept_target"], row["fuse"], row[fixed])
                curves.setdefault(key, []).append((row[along], row["ms_per_step"] - dense[point]))
        for (method, kept, fuse, value), curve in curves.items():
            if len(curve) > 1:
                curve.sort()
                named = {"method": method, "kept_target": kept, "fuse": fuse, "along": along, "fixed": {fixed: value}}
                entry = {**named, "at": _crossing(curve), "measured": [x for x, _ in curve]}
                found.append({**entry, "says": _sentence(entry)})
    return found


def _crossing(curve: Sequence[tuple[int, float]]) -> float | str:
    """Where a difference of times that is given at ascending values becomes negative and stays so."""
    slower = [index for index, (_, difference) in enumerate(curve) if difference >= 0]
    if not slower:
        return "always"
    if slower[-1] == len(curve) - 1:
        return "never"
    (low, above), (high, below) = curve[slower[-1] : slower[-1] + 2]
    return low + (high - low) * above / (above - below)


def _sentence(found: Measured) -> str:
    kept = "" if found["kept_target"] is None else f" at {100 * found['kept_target']:g} % kept"
    ((fixed, value),) = found["fixed"].items()
    at = found["at"] if isinstance(found["at"], str) else f"from {found['along']} = {found['at']:.0f} on"
    fuse = "" if found["fuse"] == "auto" else f", fuse={found['fuse']}"
    return (
        f"{found['method']}{kept} is faster than fair dense {at} "
        f"({fixed}={value}{fuse}, measured {found['along']} {', '.join(map(str, found['measured']))})"
    )


def line(row: Measured) -> str:
    """One line for the terminal."""
    point = f"{row['protocol']} {row['method']} B={row['B']} T={row['T']}"
    if "problem" in row:
        return f"{point}: not measured: {row['problem']}"
    parts = [f"{row['ms_per_step']:.2f} ms", f"{row['tokens_per_second']:.1f} tok/s", f"{row['over_floor']:.2f}x floor"]
    if row["prefill_ms"] is not None:
        parts.append(f"prefill {row['prefill_ms']:.0f} ms, of it storing {row['store_ms']:.1f} ms")
    if row["graph_ablation"] is not None:
        parts.append(", ".join(f"{name} {value:.2f}" for name, value in row["graph_ablation"].items()))
    return f"{point} kept {row['kept']:.3f}: " + ", ".join(parts)
