"""Dataset scores from sample scores, and averages from dataset scores.

The official script computes dataset scores only; its publication averages them as category means
and a macro mean over the six categories. Much other work takes a flat mean, or the English and code
sets only, so each convention has its name here. Code sets count in both languages, as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from eval.longbench.datasets import BUCKETS, CATEGORIES, DATASETS


def dataset_score(scores: Sequence[float]) -> float:
    """Mean of at least one sample score as a percentage with two decimals, added up in order."""
    total = 0.0
    for score in scores:  # the official script's order of additions; `sum` compensates since Python 3.12
        total += score
    return round(100 * total / len(scores), 2)


def bucket_score(scores: Sequence[float]) -> float:
    """As `dataset_score` for one LongBench-E bucket, with numpy's mean and rounding as official; NaN if empty."""
    import numpy as np

    return float(round(100 * np.mean(scores), 2)) if scores else float("nan")


def averages(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Averages of dataset scores, each over the datasets given, with two decimals.

    Parameters
    ----------
    scores
        Score (0-100) by dataset name.

    Returns
    -------
    dict
        The six category means; ``macro``, the mean of the category means; ``flat``, the mean of the
        datasets; and both of ``en`` (English and code) and ``zh`` (Chinese and code). None where no
        dataset is given.
    """
    result = _by_category(scores) | _macro_and_flat(scores, "")
    for language in ("en", "zh"):
        chosen = _of_language(scores, language)
        result |= _macro_and_flat({name: scores[name] for name in chosen}, f"_{language}")
    return {name: None if value is None else round(value, 2) for name, value in result.items()}


def members(names: Sequence[str]) -> dict[str, list[str]]:
    """Which of some datasets each average of `averages` is over."""
    result = {category: [name for name in names if DATASETS[name].category == category] for category in CATEGORIES}
    chosen = {"": list(names)} | {f"_{language}": _of_language(names, language) for language in ("en", "zh")}
    for suffix, own in chosen.items():
        result |= {f"macro{suffix}": own, f"flat{suffix}": own}
    return result


def bucket_averages(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """LongBench-E: category means, macro and flat mean by bucket, over the datasets with rows in it.

    Parameters
    ----------
    scores
        Score (0-100, NaN for an empty bucket) by dataset name and bucket.
    """
    result = {}
    for bucket in BUCKETS:
        filled = {name: score[bucket] for name, score in scores.items() if not math.isnan(score[bucket])}
        # LongBench-E has no Chinese sets: the language variants would repeat the whole.
        result[bucket] = {k: v for k, v in averages(filled).items() if not k.endswith(("_en", "_zh"))}
    return result


def _by_category(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {
        category: _mean(score for name, score in scores.items() if DATASETS[name].category == category)
        for category in CATEGORIES
    }


def _of_language(names: Iterable[str], language: str) -> list[str]:
    """Datasets of a language and of code; none where there is code alone."""
    chosen = [name for name in names if DATASETS[name].language in (language, "code")]
    return chosen if any(DATASETS[name].language == language for name in chosen) else []


def _macro_and_flat(scores: Mapping[str, float], suffix: str) -> dict[str, float | None]:
    means = _by_category(scores).values()
    return {
        f"macro{suffix}": _mean(mean for mean in means if mean is not None),
        f"flat{suffix}": _mean(scores.values()),
    }


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
