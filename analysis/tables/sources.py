"""The columns of a table: the jobs of a recipe, each with the run that came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.cells import Cell
from analysis.labels import distinct_labels
from analysis.load import Outputs, Run, Sweep
from analysis.sizes import NOT_RUN, choose

NOT_ASKED = "not asked for"
"""Status of a column that only the paper has."""


@dataclass(frozen=True)
class Source:
    """One column."""

    label: str
    method: Mapping[str, Any]
    run: Run | None
    status: str
    """Of the run, else of the job: failed, interrupted, missing; or `NOT_ASKED`."""
    reason: str | None

    def marks(self, *, partial_average: bool = False) -> tuple[str, ...]:
        """What is wrong with every cell of the column."""
        if self.status == NOT_ASKED:
            return ()
        marks = [self.status] if self.status in ("failed", "partial", "invalid") else []
        if self.run is None:
            marks = ["failed" if self.status == "failed" else "missing"]
        elif (self.run.summary.get("validity") or {}).get("official_data") is False:
            marks.append("non-official")
        if partial_average and "partial" not in marks and self.run is not None:
            marks.append("partial")
        return tuple(marks)

    def cell(self, value: float | None, digits: int = 2, why: str | None = None, **fields: Any) -> Cell:
        """A cell of this column; without a value, its reason is the run's or ``why``."""
        if self.status == NOT_ASKED:
            return Cell(None, digits, **fields)
        reason = fields.pop("reason", None)
        if self.run is None or value is None or self.status != "complete":
            reason = reason or (f"{self.label}: {self.status}: {self.reason}" if self.reason else why)
        ids = () if self.run is None else (self.run.run_id,)
        marks = fields.pop("marks", self.marks())
        if value is None and not marks:
            marks, reason = ("missing",), reason or f"{self.label}: no such figure in the run"
        return Cell(value, digits, marks=marks, reason=reason, run_ids=ids, **fields)


@dataclass(frozen=True)
class Recipe:
    """What a recipe left."""

    name: str
    size: str | None
    sources: tuple[Source, ...]
    problem: str | None
    """Why there is no run."""
    larger: tuple[str, ...] = ()
    """What became of larger sizes than the one shown."""

    def of_task(self, task: str) -> list[Source]:
        """Sources of one suite; those without a run belong to every suite."""
        return [s for s in self.sources if s.run is None or s.run.task == task]

    @property
    def heading(self) -> tuple[str, ...]:
        """Models, devices and sizes behind the numbers; random weights first."""
        runs = [s.run for s in self.sources if s.run is not None]
        if not runs:
            return (f"not run: {self.problem}" if self.problem else "not run", *self.larger)
        random = any(run.random_weights for run in runs)
        lines = ["RANDOM WEIGHTS: scores and selections mean nothing here"] if random else []
        models = ", ".join(dict.fromkeys(r.model for r in runs))
        devices = ", ".join(dict.fromkeys(str((r.summary.get("environment") or {}).get("device", "-")) for r in runs))
        lengths = dict.fromkeys((r.summary.get("task") or {}).get("length") for r in runs)
        length = ", ".join(f"{x}" for x in lengths if x is not None)
        parts = (models, devices, f"{length} tokens" if length else "", f"size={self.size}")
        lines.append("your runs: " + ", ".join(part for part in parts if part))
        return (*lines, *self.larger)


def recipe(outputs: Outputs, name: str, size: str | None) -> Recipe:
    """What the sweeps of a recipe left, one source per job."""
    choice = choose(outputs, name, size)
    sweep = choice.sweep
    if sweep is None:
        return Recipe(name, size, (), f"python run.py experiment={name}" + (f" size={size}" if size else ""))
    found: list[tuple[Mapping[str, Any], Run | None, str, str | None]] = []
    for job in sweep.jobs:
        run = outputs.runs.get(job.run_id or "")
        if run is None and job.status in NOT_RUN:
            continue
        if run is not None:
            # The run as it is now: it may have been resumed since.
            found.append((run.method, run, run.status, run.reason))
        else:
            status = job.status if job.status in ("failed", "interrupted") else "missing"
            found.append((_method_of(job.overrides), None, status, job.reason))
    labels = distinct_labels([method for method, *_ in found])
    sources = tuple(Source(label, *rest) for label, rest in zip(labels, found, strict=True))
    return Recipe(name, sweep.size, sources, _problem(sweep), choice.larger)


def _problem(sweep: Sweep) -> str:
    """Why no run came of a sweep; a plan is no reason, only what would have been run."""
    statuses = {job.status for job in sweep.jobs}
    if "skipped" in statuses:
        return next((job.reason for job in sweep.jobs if job.status == "skipped" and job.reason), "skipped")
    if statuses <= {"planned"}:
        return f"only planned; python run.py experiment={sweep.experiment} size={sweep.size}"
    return "no job left a run"


def _method_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Method of a job that left no run, as far as its command line tells."""
    method: dict[str, Any] = {"name": "ffd"}
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "method":
            method["name"] = value
        elif key in ("delta", "delta_unit") or key.startswith("method."):
            method[key.removeprefix("method.")] = float(value) if _is_number(value) else value
    return method


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
