"""Lines of the files that the official code and `eval.longbench.score` read and write."""

from __future__ import annotations

from typing import Any

from eval.records import Sample


def official_row(sample: Sample) -> dict[str, Any]:
    """A line of a prompts file: the exact prompt beside the answer fields of the official prediction files."""
    return {"prompt": sample.prompt, **_answer_fields(sample), "_id": sample.extra["_id"]}


def prediction_row(sample: Sample, prediction: str) -> dict[str, Any]:
    """A line of an official prediction file; `prediction` is cleaned already (`LongBenchSuite.prediction_row`)."""
    return {"pred": prediction, **_answer_fields(sample)}


def _answer_fields(sample: Sample) -> dict[str, Any]:
    classes = sample.extra["all_classes"]
    return {
        "answers": list(sample.references),
        "all_classes": None if classes is None else list(classes),
        "length": sample.extra["length"],
    }
