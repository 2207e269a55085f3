"""Records of several processes as one: parts of the grid that ran side by side on GPUs of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UsageError
from experiments.files import read_json
from experiments.kernel.record import record
from experiments.kernel.rows import Refusal, Row

MACHINE = ("gpu", "versions", "revision")
"""What records must share to be one."""
_ROOF = "read_bandwidth_bytes_per_us"


def contents(stored: Any, where: str) -> tuple[list[Row], list[Refusal]]:
    """Rows and refusals of a record; raises `UsageError` for what is none, or of another version."""
    if not isinstance(stored, dict) or not all(isinstance(stored.get(key), list) for key in ("rows", "refused")):
        raise UsageError(f"{where}: expected a record with rows and refused")
    try:
        rows = [Row.from_dict(row) for row in stored["rows"]]
        return rows, [Refusal(item["refused"], item["reason"], item["wrong"]) for item in stored["refused"]]
    except (KeyError, TypeError):
        raise UsageError(f"{where}: its rows are of another version; expected a new file") from None


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The record that one process would have written, in the order of the paths.

    Every row keeps the baselines and the floor of its own process; of baselines that several processes timed, tables
    and slopes take the first.

    Raises
    ------
    UsageError
        If a file is no record, or of another GPU, version or revision than the first.
    """
    stored = {path: read_json(path) for path in paths}
    found = [contents(one, f"--merge={path}") for path, one in stored.items()]
    first, *_ = stored.values()
    for path, one in stored.items():
        for key in MACHINE:
            if one.get(key) != first.get(key):
                raise UsageError(f"--merge={path}: its {key} is {one.get(key)}; expected {first.get(key)}, the first's")
        if not {*MACHINE, _ROOF, "date"} <= one.keys():
            raise UsageError(f"--merge={path}: expected a record with {', '.join((*MACHINE, _ROOF, 'date'))}")
    rows = [row for own, _ in found for row in own]
    refused = {item.label: item for _, own in found for item in own}
    roofs = [one[_ROOF] for one in stored.values()]
    note = (
        f"{len(stored)} processes (read bandwidth {', '.join(map(str, roofs))} bytes per us). Each row's baselines and "
        "floor are of its own process."
    )
    made = record(rows, list(refused.values()), roofs[0], {**{key: first[key] for key in MACHINE}, "note": note})
    return {**made, "date": max(one["date"] for one in stored.values())}
