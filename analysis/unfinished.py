"""Main figures of a run, all of the same samples: those of a run cut short are newer than its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.load import Run
from analysis.shapes import is_number

_RESULT = "calibration"
"""Task of a calibration's last row (`experiments.calibrate`)."""


@dataclass(frozen=True)
class Figures:
    """Score in points, samples behind it, and what they read as a share of dense attention's."""

    score: float | None
    n: int
    keep_io: float | None
    bytes_ratio: float | None


def main_figures(run: Run) -> Figures:
    """Figures of the summary where the run came to its end, else of the samples that are stored.

    A run that is killed leaves the summary of its last start, which is of fewer samples than it finished.
    """
    if run.finished or run.status == "invalid":
        samples = run.summary.get("average_samples")
        own = None if not isinstance(samples, Mapping) else samples.get("average", samples.get("macro"))
        n = own if isinstance(own, int) else _count(run)
        return Figures(average(run), n, run.figure("sparsity.keep_io"), run.figure("sparsity.bytes_ratio"))
    return Figures(_score(run), _count(run), *_read(run))


def average(run: Run) -> float | None:
    """The suite's own average by the summary: RULER's plain mean, LongBench's macro mean."""
    own = run.figure("accuracy.average")
    return own if own is not None else run.figure("accuracy.macro")


def read_shares(samples: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Tokens loaded and bytes read by these samples' ledgers over those of dense attention, as in ``sparsity``.

    Both None where a sample has no ledger, or nothing was decoded.
    """
    union = context = read = dense = 0.0
    for sample in samples:
        ledger = sample.get("ledger")
        if ledger is None:
            return None, None
        context += ledger["sliding_context"]
        union += ledger["sliding_context"]
        for layer in ledger["layers"]:
            union += sum(layer["union"]) / len(layer["union"])
            context += layer["context"]
            read += sum(layer["bytes_read"].values())
            dense += layer["dense_bytes"]
    return union / context if context else None, read / dense if dense else None


def _count(run: Run) -> int:
    """Finished samples or prompts; the margins that `runner=calibrate` keeps among them are none."""
    return sum(run.runner != "calibrate" or task != _RESULT for task, _ in run.samples)


def _read(run: Run) -> tuple[float | None, float | None]:
    try:
        return read_shares(run.samples.values())
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None, None  # a ledger of another form: one damaged run must not hide the list


def _score(run: Run) -> float | None:
    """The average of the stored scores by the suite's rule; None where it has none, or a sample has no score."""
    scores: dict[str, list[float]] = {}
    for (task, _), sample in run.samples.items():
        score = sample.get("score")
        if not is_number(score) or not 0 <= score <= 1:
            return None
        scores.setdefault(task, []).append(score)
    if run.task == "ruler":
        from eval.statistics import plain_mean, task_score

        return plain_mean(task_score(own).score for own in scores.values())
    if run.task == "longbench":
        from eval.longbench.averages import averages, dataset_score
        from eval.longbench.datasets import DATASETS

        # LongBench-E's tasks are of a length each, and have no average over all lengths.
        known = scores.keys() <= DATASETS.keys()
        return averages({task: dataset_score(own) for task, own in scores.items()})["macro"] if known else None
    return None
