"""Which rows make up which task."""

from __future__ import annotations

from itertools import islice

from eval.longbench.config import LongBenchConfig
from eval.longbench.datasets import BUCKETS, Dataset, bucket_of
from eval.longbench.rows import Row, RowSource


def file_name(dataset: Dataset, extended: bool) -> str:
    """Name of a dataset's file in the official data, without its ending."""
    return f"{dataset.name}_e" if extended else dataset.name


def bucket_tasks(dataset: Dataset) -> dict[str, str]:
    """LongBench-E task by length bucket, e.g. ``{"0-4k": "qasper_e_0-4k", ...}``."""
    return {bucket: f"{file_name(dataset, extended=True)}_{bucket}" for bucket in BUCKETS}


def tasks_of(dataset: Dataset, extended: bool) -> tuple[str, ...]:
    """Tasks of a dataset: itself, or its length buckets in LongBench-E."""
    return tuple(bucket_tasks(dataset).values()) if extended else (dataset.name,)


def select_rows(config: LongBenchConfig, source: RowSource, dataset: Dataset) -> dict[str, list[Row]]:
    """The first ``config.samples`` rows of each task of a dataset, by task and in file order.

    Raises
    ------
    TaskError
        The dataset's file cannot be read, or a row departs from the official schema.
    """
    rows = source.read(file_name(dataset, config.extended))
    if not config.extended:
        return {dataset.name: list(islice(rows, config.samples))}
    tasks = bucket_tasks(dataset)
    selected: dict[str, list[Row]] = {task: [] for task in tasks.values()}
    for row in rows:
        chosen = selected[tasks[bucket_of(row.length)]]
        if config.samples is None or len(chosen) < config.samples:
            chosen.append(row)
    return selected
