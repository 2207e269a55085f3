"""Read what runs and sweeps left; anything that is not a whole run is skipped, and a line says so."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.shapes import is_sample, run_problem

STATUSES = ("complete", "partial", "failed", "invalid")
_NO_DATA = "no data for "
"""Begins the reason of a run that came to its end without some tasks (`experiments.accuracy`)."""
RANDOM_PREFIX = "random-"
"""Names of models without trained weights begin with it (`experiments.random_model`)."""


@dataclass(frozen=True)
class Run:
    """One folder of ``outputs/runs``."""

    folder: Path
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    """The run's identity: resolved configuration, revision, prompts, versions, code."""

    @property
    def run_id(self) -> str:
        """Identity of the run."""
        return self.folder.name

    @property
    def status(self) -> str:
        """complete, partial, failed or invalid."""
        return str(self.summary["status"])

    @property
    def reason(self) -> str | None:
        """Why the run is not complete."""
        return self.summary.get("reason")

    @property
    def finished(self) -> bool:
        """Whether it has run all that it could: complete, or lacking only tasks whose data is not there."""
        return self.status == "complete" or (self.status == "partial" and (self.reason or "").startswith(_NO_DATA))

    @property
    def runner(self) -> str:
        """Runner that wrote it."""
        return str(self.config.get("runner", "accuracy"))

    @property
    def method(self) -> Mapping[str, Any]:
        """``name`` and knobs."""
        return self.summary["method"]

    @property
    def model(self) -> str:
        """Name of the model; a model loaded from a folder goes by the folder's name."""
        path = (self.config.get("model") or {}).get("path")
        return Path(path).name if path else str((self.summary.get("model") or {}).get("name", "-"))

    @property
    def random_weights(self) -> bool:
        """Whether scores mean nothing because the weights were never trained."""
        return self.model.startswith(RANDOM_PREFIX)

    @property
    def task(self) -> str:
        """Name of the suite, ``-`` where the runner has none."""
        return str((self.summary.get("task") or {}).get("name", "-"))

    def figure(self, path: str) -> float | None:
        """Number of the summary under a dotted name such as ``sparsity.keep_io``; None where there is none."""
        value: Any = self.summary
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @cached_property
    def samples(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Finished samples by task and index, those of unmerged shards included; damaged lines are left out."""
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for path in (self.folder / "samples.jsonl", *sorted(self.folder.glob("shards/*/samples.jsonl"))):
            for row in filter(is_sample, read_rows(path)):
                rows.setdefault((row["task"], row["index"]), row)
        return rows

    @cached_property
    def layers(self) -> list[dict[str, Any]]:
        """Keep ratios per layer and query head."""
        try:
            stored = json.loads((self.folder / "layers.json").read_text())
        except (OSError, ValueError):
            return []
        return [row for row in stored if isinstance(row, dict)] if isinstance(stored, list) else []

    @cached_property
    def fidelity(self) -> list[dict[str, float | None]]:
        """Fidelity metrics per layer and query head, empty fields as None."""
        try:
            with (self.folder / "fidelity.csv").open(newline="") as file:
                return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
        except (OSError, ValueError):
            return []

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Measurements of the kernel and throughput runners."""
        return list(self.summary.get("rows") or ())


@dataclass(frozen=True)
class Job:
    """One job of a sweep, as the sweep recorded it."""

    overrides: tuple[str, ...]
    run_id: str | None
    status: str
    """Of the run; ``failed`` or ``skipped`` where no run came of it."""
    reason: str | None


@dataclass(frozen=True)
class Sweep:
    """One file of ``outputs/sweeps``."""

    name: str
    experiment: str | None
    size: str | None
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Outputs:
    """All that an outputs folder holds."""

    root: Path
    runs: Mapping[str, Run]
    sweeps: tuple[Sweep, ...]
    skipped: tuple[str, ...]
    """One line for every folder or file that could not be read."""


class LoadError(ValueError):
    """An outputs folder or a run that is not there; the message says what was looked for."""


def load(root: Path) -> Outputs:
    """Read an outputs folder.

    Raises
    ------
    LoadError
        If there is no such folder.
    """
    if not root.is_dir():
        raise LoadError(f"out={root}: no such folder; python run.py writes one")
    skipped: list[str] = []
    runs: dict[str, Run] = {}
    for folder in sorted(p for p in (root / "runs").glob("*") if not p.name.startswith(".")):
        run = _run(folder)
        if isinstance(run, Run):
            runs[run.run_id] = run
        else:
            skipped.append(f"skipped {folder.relative_to(root)}: {run}")
    sweeps = []
    for path in sorted((root / "sweeps").glob("*.json")):
        try:
            sweeps.append(_sweep(json.loads(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError) as error:
            skipped.append(f"skipped {path.relative_to(root)}: not a record of a sweep ({type(error).__name__})")
    return Outputs(root, runs, tuple(sweeps), tuple(skipped))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; as in the run store, a damaged line does not take those after it along."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and line.endswith(b"\n"):
            yield row


def _run(folder: Path) -> Run | str:
    """The run, or why the folder is not one."""
    import yaml

    try:
        summary = json.loads((folder / "summary.json").read_text())
    except OSError:
        return "no summary.json"
    except ValueError:
        return "summary.json is not JSON"
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return "no readable config.yaml"
    if not isinstance(summary, dict) or not isinstance(config, dict):
        return "not the files of a run"
    if summary.get("run_id") != folder.name:
        return f"summary.json is of run {summary.get('run_id')}"
    if summary.get("status") not in STATUSES:
        return f"status {summary.get('status')}, expected one of {', '.join(STATUSES)}"
    return run_problem(summary, config) or Run(folder, summary, config)


def _sweep(record: Mapping[str, Any]) -> Sweep:
    jobs = tuple(
        Job(_words(job["overrides"]), _word(job.get("run_id")), str(job["status"]), _word(job.get("reason")))
        for job in record["jobs"]
    )
    return Sweep(str(record["name"]), _word(record.get("experiment")), _word(record.get("size")), jobs)


def _word(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError
    return value


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError
    return tuple(values)
