"""The plan of a run: tasks, counts, what is missing and what departs from the official protocol."""

from __future__ import annotations

from eval.longbench.config import LongBenchConfig
from eval.longbench.datasets import DATASETS, EXTENDED, Dataset
from eval.longbench.prompting import Prompting
from eval.longbench.rows import RowSource
from eval.longbench.selection import file_name, select_rows, tasks_of
from eval.records import Plan, Skipped, TaskError


def make_plan(config: LongBenchConfig, source: RowSource, prompting: Prompting) -> Plan:
    """Read and check every row that will be run, and count; no prompt is built.

    Raises
    ------
    TaskError
        A file cannot be read, holds no rows, or has a row that departs from the official schema.
    """
    counts: dict[str, int] = {}
    skipped: list[Skipped] = []
    departures = list(prompting.departures)
    if config.profile == "ffd_paper":
        budget = "31,500 input tokens" if config.max_input is None else f"task.max_input={config.max_input}"
        departures.append(f"profile ffd_paper: {budget}, 64 new tokens on every dataset, no chat template")
    for dataset in config.datasets:
        file = file_name(dataset, config.extended)
        if file not in source.members:
            skipped += _missing(config, dataset, f"no {file}.jsonl in {source.path}")
            continue
        found, expected = source.count(file), dataset.extended_rows if config.extended else dataset.rows
        if found == 0:
            raise TaskError(f"{source.file(file)}: holds no rows; accepted: one JSON object a line")
        if found != expected:
            departures.append(f"{file}: {found} rows in the source, {expected} in the official set")
        for task, rows in select_rows(config, source, dataset).items():
            if rows:
                counts[task] = len(rows)
            else:
                skipped.append(Skipped(task, "no row of this length"))
    notes = (*prompting.notes, *departures, *_partial(config, counts))
    partial = bool(_partial(config, counts))
    return Plan(
        tuple(counts), counts, tuple(skipped), covers_benchmark=not partial, official=not departures, notes=notes
    )


def empty_plan(config: LongBenchConfig, reason: str) -> Plan:
    """The plan where no data can be had at all."""
    skipped = [skip for dataset in config.datasets for skip in _missing(config, dataset, reason)]
    return Plan((), {}, tuple(skipped), covers_benchmark=False, official=False, notes=_partial(config, {}))


def _missing(config: LongBenchConfig, dataset: Dataset, reason: str) -> list[Skipped]:
    return [Skipped(task, reason, source_missing=True) for task in tasks_of(dataset, config.extended)]


def _partial(config: LongBenchConfig, counts: dict[str, int]) -> tuple[str, ...]:
    every = EXTENDED if config.extended else tuple(DATASETS)
    present = sum(any(task in counts for task in tasks_of(DATASETS[name], config.extended)) for name in every)
    return (f"averages are partial: {present} of {len(every)} datasets",) if present < len(every) else ()
