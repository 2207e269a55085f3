"""The paper's numbers, each with where it was read (``analysis/published.csv``)."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT_DELTA = 7.0
"""Margin that the paper's figures without one are shown beside; `Published.text` says so."""

_METHODS = ("dense", "ffd", "quest", "kivi", "twilight", "topk", "topdelta")


@dataclass(frozen=True)
class Published:
    """One line of the file."""

    artifact: str
    model: str
    hardware: str
    setting: str
    method: str
    metric: str
    value: str
    unit: str
    source: str

    @property
    def text(self) -> str:
        """Value and unit, and that the margin is not stated where it is not."""
        unstated = " (margin not stated)" if self.method == "ffd" and self.metric in ("score", "throughput") else ""
        return f"{self.value}{' ' + self.unit if self.unit else ''}{unstated}"

    def as_method(self) -> dict[str, Any] | None:
        """Method and knobs, or None for a name that is none of ours."""
        name, *knobs = self.method.split()
        if name not in _METHODS:
            return None
        wanted: dict[str, Any] = {knob: float(value) for knob, value in (k.split("=") for k in knobs)}
        if name == "ffd":
            wanted.setdefault("delta", DEFAULT_DELTA)
        return {"name": name, **wanted}

    def is_of(self, method: Mapping[str, Any]) -> bool:
        """Whether the number is of this method with these knobs."""
        wanted = self.as_method()
        return wanted is not None and all(method.get(knob) == value for knob, value in wanted.items())


@cache
def published() -> tuple[Published, ...]:
    """All lines."""
    with Path(__file__).with_name("published.csv").open(newline="") as file:
        return tuple(Published(**row) for row in csv.DictReader(file))


def of_artifact(*artifacts: str, model: str = "") -> list[Published]:
    """Lines of one table or figure; ``model`` is the beginning of a model's name."""
    return [p for p in published() if p.artifact in artifacts and p.model.startswith(model)]


def quotations(lines: Sequence[Published]) -> tuple[str, ...]:
    """Lines that have no cell of their own, as notes under a table; each source once."""
    notes = []
    for source in dict.fromkeys(line.source for line in lines):
        own = [line for line in lines if line.source == source]
        quoted = "; ".join(", ".join(part for part in (p.hardware, p.setting, p.method, p.text) if part) for p in own)
        notes.append(f"published ({source}): {quoted}")
    return tuple(notes)
