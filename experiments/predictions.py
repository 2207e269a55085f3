"""Prediction files in a benchmark's official format, for its own scorer and ours."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.records import Sample
from experiments.files import write_atomically
from experiments.store import Rows


def write_predictions(folder: Path, suite: Any, samples: Iterable[Sample], rows: Rows) -> None:
    """Write ``<dataset>.jsonl`` per dataset, in the order of its rows; nothing where the suite has no such format.

    Parameters
    ----------
    folder
        Created if needed.
    suite
        Has ``prediction_row(sample, prediction)`` where its benchmark defines prediction files (LongBench).
    samples
        All samples of the run.
    rows
        Finished samples.
    """
    line_of = getattr(suite, "prediction_row", None)
    if line_of is None:
        return
    lines: dict[str, list[str]] = defaultdict(list)
    for sample in samples:
        row = rows.get((sample.task, sample.index))
        if row is not None:
            line = line_of(sample, row["prediction"])
            lines[str(sample.extra["dataset"])].append(json.dumps(line, ensure_ascii=False))
    if lines:
        folder.mkdir(parents=True, exist_ok=True)
    for dataset, own in lines.items():
        write_atomically(folder / f"{dataset}.jsonl", "".join(f"{line}\n" for line in own).encode())
