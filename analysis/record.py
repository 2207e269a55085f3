"""A record of runs that travels with the code: what their summaries say, and on what machine they were made."""

from __future__ import annotations

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.comparison import compare
from analysis.files import write_text
from analysis.load import LoadError, Run
from analysis.pairing import PairingError
from analysis.unfinished import read_shares

_MACHINE = ("device", "versions", "python", "cuda", "git")
"""Of a run's environment: what all runs of a record share."""
_SETTINGS = ("runner", "seed", "fidelity", "engine")
"""Of a run's identity, beside the method, model and task that its summary names."""


def write_record(path: Path, runs: Sequence[Run], *, revision: str | None, date: str, note: str | None = None) -> Path:
    """Write a record of finished runs of one machine; what differs by prompt or head stays in the runs' folders.

    Parameters
    ----------
    path
        ``analysis/measurements/<name>.json``.
    runs
        What to record, in this order. A run of method dense among them is what the others' scores are
        compared with, prompt by prompt.
    revision
        Commit the runs were made from, where they do not know it themselves (a copy without its history).
    date
        Day of the runs, ISO 8601.
    note
        What a reader of the figures must know.

    Raises
    ------
    LoadError
        If there are no runs, one is named twice, or they come from different machines or revisions.
    ValueError
        If the date is none.
    """
    if not runs:
        raise LoadError(f"{path.stem}: no run to record")
    twice = [run_id for run_id, times in Counter(run.run_id for run in runs).items() if times > 1]
    if twice:
        raise LoadError(f"{path.stem}: {twice[0]} is named {Counter(r.run_id for r in runs)[twice[0]]} times")
    _require_day(date)
    machines = {run.run_id: _machine(run) for run in runs}
    machine = machines[runs[0].run_id]
    for run_id, other in machines.items():
        if other != machine:
            raise LoadError(f"{path.stem}: {run_id} was made on another machine, version or revision; a record has one")
    record = {
        "gpu": machine["device"],
        "versions": machine["versions"],
        "python": machine["python"],
        "cuda": machine["cuda"],
        "revision": machine["git"]["commit"] or revision,
        "date": date,
        "note": note,
        "rows": [{**_row(run), **_against_dense(run, runs)} for run in runs],
    }
    return write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _require_day(date: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"date={date}: expected a day such as 2026-11-29") from None


def _machine(run: Run) -> dict[str, Any]:
    try:
        stated = json.loads((run.folder / "environment.json").read_text())
        machine = {key: stated[key] for key in _MACHINE}
        machine["git"]["commit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{run.run_id}: environment.json cannot be read ({type(error).__name__})") from None
    return machine


def _row(run: Run) -> dict[str, Any]:
    settings = {key: run.config[key] for key in _SETTINGS if key in run.config}
    row = settings | {key: value for key, value in run.summary.items() if key != "environment"}
    task = row.get("task")
    if isinstance(task, Mapping) and task.get("data_dir"):
        # Where the data lay is the machine's own; which data it was, is the run's.
        row["task"] = {**task, "data_dir": Path(task["data_dir"]).name}
    kept = _kept_by_task(run)
    return row | ({"keep_io_by_task": kept} if kept else {})


def _kept_by_task(run: Run) -> dict[str, float]:
    """``sparsity.keep_io`` of each task alone: prompts of another kind may keep several times as much."""
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (task, _), sample in run.samples.items():
        samples[task].append(sample)
    kept = {task: read_shares(own)[0] for task, own in samples.items()}
    return {task: share for task, share in kept.items() if share is not None}


def _against_dense(run: Run, runs: Sequence[Run]) -> Mapping[str, Any]:
    if run.method["name"] == "dense" or not run.summary.get("accuracy"):
        return {}
    for dense in runs:
        if dense.method["name"] != "dense":
            continue
        try:
            rows = compare(dense, run).rows
        except PairingError:
            continue  # other prompts
        return {
            "less_dense": {
                row.task: {"n": row.n, "points": row.difference, "ci95": row.interval, "p": row.p.value} for row in rows
            }
        }
    return {}
