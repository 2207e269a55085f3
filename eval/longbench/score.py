"""Score a folder of official-format prediction files: ``python -m eval.longbench.score FOLDER [--e]``.

Reads ``<dataset>.jsonl`` files with ``pred, answers, all_classes, length`` per line, writes
``result.json`` as the official ``eval.py`` does, and ``averages.json`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.longbench import jsonl
from eval.longbench.averages import averages, bucket_averages, bucket_score, dataset_score
from eval.longbench.datasets import BUCKETS, DATASETS, EXTENDED, bucket_of
from eval.longbench.metrics import classification
from eval.records import TaskError

_DESCRIPTION = "Score official-format LongBench predictions; writes result.json and averages.json into the folder."


@dataclass(frozen=True)
class Predictions:
    """The lines of one prediction file."""

    dataset: str
    texts: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]
    lengths: tuple[int, ...]
    """Empty where they are not needed."""
    all_classes: tuple[str, ...] | None
    """Classes of the file's last line: the official script scores every line with them."""

    def scores(self) -> list[float]:
        """Score of each line in [0, 1]."""
        dataset = DATASETS[self.dataset]
        return [
            dataset.score(text, answers, self.all_classes)
            for text, answers in zip(self.texts, self.answers, strict=True)
        ]

    def score(self) -> float:
        """The dataset's score, 0-100."""
        return dataset_score(self.scores())

    def score_by_bucket(self) -> dict[str, float]:
        """The dataset's score in each LongBench-E bucket, 0-100; NaN where a bucket is empty."""
        scores: dict[str, list[float]] = {bucket: [] for bucket in BUCKETS}
        for score, length in zip(self.scores(), self.lengths, strict=True):
            scores[bucket_of(length)].append(score)
        return {bucket: bucket_score(values) for bucket, values in scores.items()}


def score_folder(folder: Path, extended: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score every prediction file of a folder.

    Parameters
    ----------
    folder
        Folder with at least one ``<dataset>.jsonl``.
    extended
        Whether to score by LongBench-E's length buckets.

    Returns
    -------
    tuple of two dicts
        Contents of ``result.json`` (score by dataset, or by dataset and bucket; in the order of the
        folder's listing, as official) and of ``averages.json``.

    Raises
    ------
    TaskError
        The folder holds no prediction file, or one that cannot be read or scored.
    """
    known = EXTENDED if extended else tuple(DATASETS)
    result: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for path in _prediction_files(folder):
        predictions = read_predictions(path, known, extended)
        if predictions.dataset in result:
            raise TaskError(f"{path}: a second file of {predictions.dataset}; accepted: one file per dataset")
        try:
            result[predictions.dataset] = predictions.score_by_bucket() if extended else predictions.score()
        except TaskError as error:
            raise TaskError(f"{path}: {error}") from None
        counts[predictions.dataset] = len(predictions.texts)
    samples = {name: counts[name] for name in known if name in counts}
    missing = [name for name in known if name not in result]
    means = bucket_averages(result) if extended else averages(result)
    return result, {"partial": bool(missing), "missing": missing, "samples": samples, "averages": means}


def read_predictions(path: Path, known: tuple[str, ...], extended: bool) -> Predictions:
    """Read and check one prediction file, named ``<dataset>.jsonl`` with a dataset in `known`.

    Raises
    ------
    TaskError
        The name is no dataset's, the file cannot be read or has no line, or a line lacks a field.
    """
    dataset = path.name.split(".")[0]
    if dataset not in known:
        raise TaskError(f"{path}: {dataset!r} is no dataset to score; accepted names: {', '.join(known)}")
    schema = {"pred": jsonl.TEXT, "answers": jsonl.TEXTS, "all_classes": jsonl.TEXTS_OR_NULL}
    if DATASETS[dataset].metric is classification:
        schema["all_classes"] = jsonl.CLASSES
    if extended:
        schema["length"] = jsonl.INTEGER
    with jsonl.reading(path), path.open(encoding="utf-8") as file:
        lines = list(jsonl.read_objects(file, path, schema))
    if not lines:
        raise TaskError(f"{path}: no prediction; accepted: at least one line")
    return Predictions(
        dataset,
        texts=tuple(line["pred"] for line in lines),
        answers=tuple(tuple(line["answers"]) for line in lines),
        lengths=tuple(line["length"] for line in lines) if extended else (),
        all_classes=lines[-1]["all_classes"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.longbench.score", description=_DESCRIPTION)
    parser.add_argument("folder", type=Path, help="folder of <dataset>.jsonl prediction files")
    parser.add_argument("--e", action="store_true", dest="extended", help="score LongBench-E, by length bucket")
    options = parser.parse_args(arguments)
    try:
        result, means = score_folder(options.folder, options.extended)
        _write(options.folder / "result.json", result)
        _write(options.folder / "averages.json", means)
    except TaskError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"scores": result, **means}, ensure_ascii=False, indent=4))
    return 0


def _prediction_files(folder: Path) -> list[Path]:
    with jsonl.reading(folder):
        names = os.listdir(folder)  # noqa: PTH208 - its order is the order of the official result.json
    paths = [folder / name for name in names if name.endswith("jsonl")]
    if not paths:
        raise TaskError(f"{folder}: no prediction file; accepted: <dataset>.jsonl, one per dataset")
    return paths


def _write(path: Path, content: dict[str, Any]) -> None:
    # The official script's layout, byte for byte: four spaces, no newline at the end.
    text = json.dumps(content, ensure_ascii=False, indent=4)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path}: cannot be written ({error.strerror})") from None


if __name__ == "__main__":
    raise SystemExit(main())
