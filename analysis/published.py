"""The paper's numbers, each with where it was read (``analysis/published.csv``)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DEFAULT_DELTA = 7.0
"""Margin that the paper's figures without one are shown beside; `Published.note` says so."""


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

    def is_of(self, method: Mapping[str, Any]) -> bool:
        """Whether the number is of this method with these knobs."""
        name, *knobs = self.method.split()
        if name != method["name"]:
            return False
        wanted = dict(knob.split("=") for knob in knobs)
        if name == "ffd" and "delta" not in wanted:
            wanted["delta"] = str(DEFAULT_DELTA)
        return all(method.get(knob) is not None and float(method[knob]) == float(v) for knob, v in wanted.items())


@cache
def published() -> tuple[Published, ...]:
    """All lines."""
    with Path(__file__).with_name("published.csv").open(newline="") as file:
        return tuple(Published(**row) for row in csv.DictReader(file))


def of_artifact(*artifacts: str, model: str = "") -> list[Published]:
    """Lines of one table or figure; ``model`` is the beginning of a model's name."""
    return [p for p in published() if p.artifact in artifacts and p.model.startswith(model)]
