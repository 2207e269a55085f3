"""``outputs/sweeps/<name>.json``: what became of a sweep's jobs; neither plan nor refusal replaces results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.files import write_atomically
from experiments.job import Outcome
from experiments.jobs import Job
from experiments.recipes import Recipe


def is_plan(sweeps: Sequence[Sequence[str]]) -> bool:
    """Whether every one of these command lines only asks what would be run (``dry_run=true``)."""
    values = [[a.partition("=")[2] for a in line if a.lstrip("+").startswith("dry_run=")] for line in sweeps]
    return all(own and own[-1].lower() == "true" for own in values)


def folder_of(root: Path, name: str, *, plan: bool) -> Path:
    """Where the jobs of a sweep log; its record lies beside the folder, with the suffix ``.json``.

    A plan has a folder and a record of its own, ``<name>/plan``, so that the logs and the record of what
    was run stay.
    """
    folder = root / "sweeps" / name
    return folder / "plan" if plan else folder


def write_record(
    path: Path, name: str, recipe: Recipe | None, jobs: Sequence[Job], outcomes: Sequence[Outcome]
) -> None:
    """Write the record, in place of an earlier one."""
    record = {
        "name": name,
        "experiment": recipe.name if recipe else None,
        "size": recipe.size if recipe else None,
        "jobs": [
            {"overrides": list(job.overrides), "dropped": list(job.dropped), **vars(outcome)}
            for job, outcome in zip(jobs, outcomes, strict=True)
        ],
    }
    write_atomically(path, (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())


def names_runs(path: Path) -> bool:
    """Whether a record is there and names a run: a machine that cannot run the recipe must not replace it."""
    try:
        return any(job.get("run_id") for job in json.loads(path.read_text())["jobs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # nothing in it could be shown
