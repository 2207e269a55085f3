"""Which size of a recipe is shown: the largest with results; what became of a larger one is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from analysis.load import Job, Outputs, Sweep

SIZES = ("smoke", "small", "paper")
"""Of recipes, the smallest first."""
NOT_RUN = ("skipped", "planned")
"""Jobs of which no result was expected."""


@dataclass(frozen=True)
class Choice:
    """The sweep of a recipe that is shown."""

    sweep: Sweep | None
    larger: tuple[str, ...] = ()
    """One line for every larger size that was recorded and is not shown."""


def choose(outputs: Outputs, name: str, size: str | None = None) -> Choice:
    """The recipe's sweep of ``size``, or without one the largest that has results.

    A size whose jobs were all skipped, planned or failed has none. What was cut short is shown only where no
    size has a run that came to its end.
    """
    found = {s.size: s for s in outputs.sweeps if s.experiment == name}
    if size is not None:
        return Choice(found.get(size))
    recorded = [found[candidate] for candidate in reversed(SIZES) if candidate in found]
    if not recorded:
        return Choice(None)
    shown = max(recorded, key=lambda sweep: max((_worth(outputs, job) for job in sweep.jobs), default=0))
    return Choice(shown, tuple(_told(outputs, sweep) for sweep in recorded[: recorded.index(shown)]))


def _worth(outputs: Outputs, job: Job) -> int:
    """How much a job has to show: a finished run, one with some figures, a failure to explain, nothing."""
    run = outputs.runs.get(job.run_id or "")
    if run is not None:
        return 3 if run.finished else 1 if run.status == "failed" else 2
    return 0 if job.status in NOT_RUN else 1


def _told(outputs: Outputs, sweep: Sweep) -> str:
    runs = [outputs.runs.get(job.run_id or "") for job in sweep.jobs]
    statuses = Counter(job.status if run is None else run.status for job, run in zip(sweep.jobs, runs, strict=True))
    line = f"larger size={sweep.size} not shown: "
    if set(statuses) <= {"skipped"}:
        return line + ": ".join(dict.fromkeys(("skipped", *(job.reason for job in sweep.jobs if job.reason))))
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    return line + counts + ("" if set(statuses) <= set(NOT_RUN) else f" (--size {sweep.size} shows it)")
