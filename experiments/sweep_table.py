"""The comparison that a sweep ends with: one line per job, failures with their reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.files import read_json
from experiments.job import Outcome
from experiments.jobs import Job
from experiments.key_figures import COLUMNS, key_figures


def print_sweep(
    name: str, jobs: Sequence[Job], outcomes: Sequence[Outcome], root: Path, console: Console | None = None
) -> None:
    """Print all jobs of a sweep, with the key figures that at least one of them has."""
    out = console or Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    figures = [_figures(root, outcome) for outcome in outcomes]
    columns = [column for column in COLUMNS if any(column in own for own in figures)]
    table = Table(title=f"{name}: {len(jobs)} jobs", title_justify="left")
    table.add_column("job")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("run", no_wrap=True)
    failures = []
    for job, outcome, found in zip(jobs, outcomes, figures, strict=True):
        own = " ".join(o for o in job.overrides if o not in shared) or "(as above)"
        table.add_row(own, *(found.get(column, "-") for column in columns), outcome.status, outcome.run_id or "-")
        if outcome.reason:
            failures.append(f"{outcome.status}: {own}: {outcome.reason}")
    if shared:
        out.print("all jobs: " + " ".join(o for o in jobs[0].overrides if o in shared))
    out.print(table)
    if any(own.get("score", "").endswith("*") for own in figures):
        out.print("* average over some of the benchmark's tasks")
    if any("score" in own and own.get("kept") == own.get("bytes") == "1.000" for own in figures):
        out.print("kept 1.000 and bytes 1.000: dense, or a budget that holds the whole context; nothing was left out")
    for line in dict.fromkeys(failures):
        out.print(line)


def _figures(root: Path, outcome: Outcome) -> dict[str, str]:
    summary = read_json(root / "runs" / outcome.run_id / "summary.json") if outcome.run_id else None
    return key_figures(summary) if summary else {}
