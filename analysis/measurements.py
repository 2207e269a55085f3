"""Timings: rows of the kernel and throughput runners in a run, or in a record measured on a bare GPU machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.load import LoadError, Outputs
from analysis.shapes import row_problem

COMMITTED = Path(__file__).parent / "measurements"
"""Records that travel with the code (docs/measurements.md); shown where ``outputs/`` has none."""


@dataclass(frozen=True)
class Timing:
    """One measured row."""

    origin: str
    """Run id, or name of the record."""
    device: str
    model: str
    """What was timed, weights included."""
    row: Mapping[str, Any]
    record: str | None = None
    """Of a committed record, GPU and revision; None for what was measured into this outputs folder."""

    @property
    def subject(self) -> str:
        """Beginning of a table's heading: who measured, and on what."""
        return f"your runs: {self.device}" if self.record is None else f"committed {self.origin}: {self.record}"

    @property
    def mark(self) -> str:
        """End of a row's name: nothing for one's own."""
        return "" if self.record is None else f" (committed: {self.record})"


def kernel_timings(outputs: Outputs) -> list[Timing]:
    """Rows of one decode step of one layer (``time_us``)."""
    return _timings(outputs, "time_us")


def step_timings(outputs: Outputs) -> list[Timing]:
    """Rows of whole decode steps of a model (``tokens_per_second``)."""
    return _timings(outputs, "tokens_per_second")


def break_even(outputs: Outputs) -> list[Timing]:
    """Where a method becomes faster than dense under the same engine (``says``), as the throughput runner found it."""
    return _timings(outputs, "says", "break_even")


def timing_labels(timings: Sequence[Timing]) -> list[str]:
    """Protocol, method, and the kept share of methods that were timed at several."""
    targets: dict[str, set[Any]] = {}
    for timing in timings:
        targets.setdefault(timing.row["method"], set()).add(timing.row.get("kept_target"))
    labels = []
    for timing in timings:
        row = timing.row
        parts = [row.get("protocol"), row["method"]]
        if row.get("kept_target") is not None and targets[row["method"]] - {None, 1.0}:
            parts.append(f"kept {100 * row['kept_target']:g} %")
        labels.append(" ".join(str(part) for part in parts if part))
    return labels


def _timings(outputs: Outputs, field: str, block: str = "rows") -> list[Timing]:
    found = []
    for run in outputs.runs.values():
        device = str((run.summary.get("environment") or {}).get("device", "-"))
        rows = run.rows if block == "rows" else run.summary.get(block) or ()
        found += [Timing(run.run_id, device, run.model, row) for row in rows if field in row]
    if any(timing.device != "cpu" for timing in found):
        return found
    # A CPU's times do not stand in for a GPU's record.
    recorded = _records(outputs.root / "measurements", field, block) or _records(COMMITTED, field, block)
    return [*found, *recorded]


def _records(folder: Path, field: str, block: str) -> list[Timing]:
    """Rows of the records in a folder; raises `LoadError` for a damaged one, in whose place another would be shown."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            raise LoadError(f"{path}: not readable as JSON") from None
        rows = record.get(block) if isinstance(record, dict) else None
        if not isinstance(rows, list):
            continue  # records of other kinds lie here too
        gpu, model = str(record.get("gpu", "-")), str(record.get("model", ""))
        revision = f", revision {str(record['revision'])[:7]}" if record.get("revision") else ""
        made = gpu + revision if folder == COMMITTED else None
        for number, row in enumerate(rows):
            problem = row_problem(row)
            if problem is not None:
                raise LoadError(f"{path}: row {number} of {block} {problem}")
            if field in row:
                found.append(Timing(path.name, gpu, model, row, made))
    return found
