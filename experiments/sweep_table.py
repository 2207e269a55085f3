"""The comparison that a sweep ends with: one line per job, failures with their reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.files import read_json
from experiments.job import Outcome
from experiments.jobs import Job
from experiments.table import number

_FIGURES = (
    ("kept", ("sparsity", "keep_io"), 3),
    ("bytes", ("sparsity", "bytes_ratio"), 3),
    ("mass recall", ("fidelity", "mass_recall"), 4),
    ("tok/s", ("timing", "decode_tok_s"), 1),
)


def print_sweep(
    name: str, jobs: Sequence[Job], outcomes: Sequence[Outcome], root: Path, console: Console | None = None
) -> None:
    """Print all jobs of a sweep."""
    out = console or Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
    shared = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    table = Table(title=f"{name}: {len(jobs)} jobs", title_justify="left")
    table.add_column("job")
    for column in ("score", "n", *(label for label, _, _ in _FIGURES)):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("run", no_wrap=True)
    failures = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        summary = read_json(root / "runs" / outcome.run_id / "summary.json") if outcome.run_id else None
        own = " ".join(o for o in job.overrides if o not in shared) or "(as above)"
        table.add_row(own, *_figures(summary), outcome.status, outcome.run_id or "-")
        if outcome.reason:
            failures.append(f"{outcome.status}: {own}: {outcome.reason}")
    if shared:
        out.print("all jobs: " + " ".join(o for o in jobs[0].overrides if o in shared))
    out.print(table)
    for line in dict.fromkeys(failures):
        out.print(line)


def _figures(summary: Mapping[str, Any] | None) -> list[str]:
    if summary is None:
        return ["-"] * (2 + len(_FIGURES))
    accuracy = summary.get("accuracy") or {}
    average = accuracy.get("average", accuracy.get("macro"))
    n = sum(row["n"] for row in accuracy.values() if isinstance(row, Mapping) and "n" in row)
    cells = [number(average, 2) + ("*" if accuracy.get("average_partial") else ""), str(n)]
    return cells + [number((summary.get(block) or {}).get(key), digits) for _, (block, key), digits in _FIGURES]
