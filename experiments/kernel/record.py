"""What rows say together: slopes over the length, the guard against regret, the gate's results."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.kernel.rows import Item, Refusal, Row

CHECKED = (
    "every timed layer, outputs and workspaces filled with NaN before: output against the fp32 reference over the "
    "same kept set, ledger against its recount, baselines against the dense reference"
)


def record(
    rows: Sequence[Row], refused: Sequence[Refusal], bandwidth: float, machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The record as it is committed.

    Parameters
    ----------
    rows, refused
        What was measured, and what could not be.
    bandwidth
        Measured read bandwidth in bytes per us.
    machine
        ``gpu, versions, revision``.
    """
    return {
        **machine,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "read_bandwidth_bytes_per_us": round(bandwidth),
        "slopes_us_per_1000_tokens": slopes(rows),
        "regret_guard": regret_guard(rows),
        "gate": gate(rows, refused),
        "refused": [item.as_dict() for item in refused],
        "rows": [row.as_dict() for row in rows],
    }


def slopes(rows: Iterable[Row]) -> dict[str, float]:
    """Least-squares slope of time against T in us per 1000 tokens, for every method timed at three lengths or more.

    Of a length that several processes timed the first is taken.
    """
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.whole and row.timing != "eager" and row.l2 == "cold" and row.source == "planted":
            lines.setdefault(_line(row), {}).setdefault(row.T, row.time_us)
    return {name: round(slope(line), 4) for name, line in lines.items() if len(line) >= 3}


def slope(times: Mapping[int, float]) -> float:
    """Least-squares slope in us per 1000 tokens of times in us by tokens."""
    mean_x, mean_y = sum(times) / len(times), sum(times.values()) / len(times)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in times.items())
    return 1000 * rise / sum((x - mean_x) ** 2 for x in times)


def _line(row: Row) -> str:
    parts = [row.method] if row.is_dense else [row.method, f"kept {row.kept_target:g}"]
    if row.B != 1:
        parts.append(f"B={row.B}")
    if (row.Hq, row.Hkv, row.d, row.dtype) != (32, 8, 128, "bfloat16"):
        parts.append(f"Hq={row.Hq} Hkv={row.Hkv} d={row.d} {row.dtype}")
    return " ".join(parts)


def regret_guard(rows: Iterable[Row]) -> dict[str, Any]:
    """FFD where nothing can be left out: the ledger keeps 1, the step is sparse still, and what it costs."""
    full = [row for row in rows if row.method == "ffd" and row.kept_target == 1.0 and row.whole]
    return {
        "holds": all(row.kept == 1.0 and row.sparse_steps == 1.0 for row in full),
        "time_over_best_dense": [
            {"B": row.B, "T": row.T, "kept": row.kept, "ratio": round(row.time_us / row.best_dense_us, 3)}
            for row in full
            if row.best_dense_us and (row.timing, row.l2) == ("graph", "cold")
        ],
    }


def gate(rows: Sequence[Row], refused: Iterable[Refusal]) -> dict[str, Any]:
    """Results of the checks before timing, those of every process."""
    return {
        "checked": CHECKED,
        "rows": len(rows),
        "max_rel_error": max((row.rel_error for row in rows), default=None),
        "ledger_equal": sum(row.ledger_error == 0.0 for row in rows),
        "max_ledger_error": max((row.ledger_error for row in rows), default=None),
        "wrong": [item.as_dict() for item in refused if item.wrong],
    }


def problem(made: Mapping[str, Any]) -> str | None:
    """Why a `record` must not be believed, in one line; None where it may."""
    wrong = made["gate"]["wrong"]
    if wrong:
        return f"{len(wrong)} timings refused by the gate, first {wrong[0]['refused']}: {wrong[0]['reason']}"
    holds = made["regret_guard"]["holds"]
    return None if holds else "FFD with everything kept: the ledger does not say keep = 1"


def line(item: Item) -> str:
    """A row in one line."""
    if isinstance(item, Refusal):
        return f"{item.label}: not timed ({item.reason})"
    beside = "" if item.sdpa_flash_us is None else f", {item.sdpa_flash_us / item.time_us:.2f}x SDPA-flash"
    return f"{item.label}: {item.time_us:.1f} us, kept {item.kept:.3f}, efficiency {item.efficiency:.2f}{beside}"
