"""Records of several processes as one: parts of the grid that ran side by side on GPUs of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.errors import UsageError
from experiments.kernel.record import record
from experiments.kernel.rows import Refusal
from experiments.kernel.stored import MACHINE, Stored, read_record

_SAID = (
    "Each row's baselines and floor are of its own process. What several processes timed, dense attention beside "
    "every part, has a row of each, which the gate counts; tables and slopes take the first."
)


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """The record that one process would have written, in the order of the paths.

    Every row keeps the baselines and the floor of its own process; of what several processes timed, tables and slopes
    take the first. What one of them found wrong is wrong, whatever the others say.

    Raises
    ------
    UsageError
        If a file is no record, of another GPU, version or revision than the first, of a revision that is not named,
        or has a measurement that another has too: the same process twice.
    """
    found = [(f"--merge={path}", read_record(path, f"--merge={path}")) for path in paths]
    (_, first), *_ = found
    for where, one in found:
        _require_same(first.machine, one.machine, where)
    _require_other_measurements(found)
    rows = [row for _, one in found for row in one.rows]
    roofs = [one.bandwidth for _, one in found]
    note = f"{len(found)} processes (read bandwidth {', '.join(f'{roof:.0f}' for roof in roofs)} bytes per us). {_SAID}"
    made = record(rows, _refused(found), roofs[0], {**first.machine, "note": note})
    return {**made, "date": max(one.date for _, one in found)}


def _require_same(first: Mapping[str, Any], own: Mapping[str, Any], where: str) -> None:
    for key in MACHINE:
        if own[key] != first[key]:
            raise UsageError(f"{where}: its {key} is {own[key]}; expected {first[key]}, the first's")
    if own["revision"] == "unknown":
        raise UsageError(f"{where}: its revision is unknown; expected one that was named by --revision")


def _require_other_measurements(found: Sequence[tuple[str, Stored]]) -> None:
    """Refuse a row that comes twice, time and errors included: the same file under whatever name, or a part of it."""
    seen: dict[str, str] = {}
    for where, one in found:
        if not one.rows and not one.refused:
            raise UsageError(f"{where}: is empty; expected a record with rows")
        for row in one.rows:
            content = json.dumps(row.as_dict(), sort_keys=True)
            if content in seen:
                raise UsageError(
                    f"{where}: {row.label} is the same measurement as in {seen[content]}; expected other processes'"
                )
            seen[content] = where


def _refused(found: Sequence[tuple[str, Stored]]) -> list[Refusal]:
    """Each label once: the first that is wrong, or else the first."""
    refused: dict[str, Refusal] = {}
    for _, one in found:
        for item in one.refused:
            if item.wrong and not refused.get(item.label, item).wrong:
                refused[item.label] = item
            refused.setdefault(item.label, item)
    return list(refused.values())
