"""RULER's scoring of predictions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.ruler.tasks import Metric

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def postprocess(prediction: str) -> str:
    """Strip, turn control characters into newlines, and strip again, as RULER's evaluation does."""
    return _CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()


def score_prediction(metric: Metric, prediction: str, references: Sequence[str]) -> float:
    """Score in [0, 1] of one prediction: references are looked for as substrings, ignoring case.

    Parameters
    ----------
    metric : {"all", "part"}
        ``all``: share of the references found (``string_match_all``); ``part``: 1 if any is found
        (``string_match_part``).
    prediction : str
        Generated text as decoded; post-processed here.
    references : sequence of str
        At least one.
    """
    text = postprocess(prediction).lower()
    found = [1.0 if reference.lower() in text else 0.0 for reference in references]
    return max(found) if metric == "part" else sum(found) / len(found)
