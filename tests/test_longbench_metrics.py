"""LongBench metrics against scores that the official code gave (numbers recorded, texts our own)."""

import json
from pathlib import Path

import pytest

from eval.longbench import libraries, metrics
from eval.longbench.averages import averages, bucket_averages, bucket_score, dataset_score
from eval.longbench.datasets import BUCKETS, CATEGORIES, DATASETS, EXTENDED, bucket_of
from eval.records import TaskError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "longbench_scores.json").read_text(encoding="utf-8"))


def scores_of(name: str) -> list[float]:
    rows = GOLDEN[name]["rows"]
    return [DATASETS[name].score(row["prediction"], row["answers"], row.get("all_classes")) for row in rows]


def test_every_dataset_has_recorded_scores():
    assert set(GOLDEN) == set(DATASETS)
    assert all(any(0 < row["score"] < 1 for row in case["rows"]) for case in GOLDEN.values())


@pytest.mark.parametrize("name", DATASETS)
def test_rows_score_as_the_official_code(name):
    for row, score in zip(GOLDEN[name]["rows"], scores_of(name), strict=True):
        assert score == row["score"], row


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_and_bucket_scores_equal_the_official_ones(name):
    scores = scores_of(name)
    assert dataset_score(scores) == GOLDEN[name]["score"]
    by_bucket = {bucket: [] for bucket in BUCKETS}
    for score, length in zip(scores, GOLDEN[name]["lengths"], strict=True):
        by_bucket[bucket_of(length)].append(score)
    assert {bucket: bucket_score(values) for bucket, values in by_bucket.items()} == GOLDEN[name]["by_bucket"]


def test_classification_skips_the_neighbour_of_a_removed_class():
    # "x" is removed from the list being walked, so "xy" is never looked at: 1/4, not 1/3.
    assert metrics.classification("xyz q r", "xyz", ["x", "xy", "xyz", "q", "r"]) == 0.25


def test_retrieval_refuses_an_answer_without_a_paragraph():
    with pytest.raises(TaskError, match="'chapter 3' names no paragraph"):
        metrics.retrieval("3", "chapter 3")


def distinct_words(n: int) -> str:
    return " ".join(f"w{i}" for i in range(n))


def nested(levels: int, function):
    return function() if levels == 0 else nested(levels - 1, function)


@pytest.mark.parametrize(("metric", "longest"), [(metrics.rouge, 990), (metrics.rouge_zh, 989)])
@pytest.mark.parametrize("levels", [0, 300])
def test_rouge_gives_up_where_the_official_script_does(metric, longest, levels):
    """The package recurses once per word back to the match; the official limits are 990 and 989 words."""
    assert nested(levels, lambda: metric("w0", distinct_words(longest))) > 0
    assert nested(levels, lambda: metric("w0", distinct_words(longest + 1))) == 0


def test_code_similarity_ignores_an_installed_levenshtein(monkeypatch):
    from fuzzywuzzy import fuzz

    class Other:
        def __init__(self, *args: object) -> None:
            raise AssertionError("not the standard library's matcher")

    monkeypatch.setattr(fuzz, "SequenceMatcher", Other)
    libraries._fuzz.cache_clear()
    assert metrics.code_similarity("value = 3", "value = 4") == 0.89


def test_segmentation_is_silent_and_ignores_the_shared_dictionary(capfd):
    import jieba

    libraries._segmenter.cache_clear()
    expected = libraries.chinese_words("我来到北京清华大学")
    assert expected == ["我", "来到", "北京", "清华大学"]
    assert capfd.readouterr() == ("", "")
    jieba.add_word("来到北京")
    try:
        assert libraries.chinese_words("我来到北京清华大学") == expected
    finally:
        jieba.del_word("来到北京")


def test_averages_follow_the_published_conventions():
    """Category scores of GPT-3.5-Turbo-16k in the LongBench README; code counts in both languages."""
    english = dict(zip(CATEGORIES, (39.8, 38.7, 26.5, 67.1, 37.8, 54.1), strict=True))
    scores = {name: english[d.category] for name, d in DATASETS.items() if d.language != "zh"}
    means = averages(scores)
    assert means["macro"] == means["macro_en"] == 44.0
    assert means["flat"] == round(sum(scores.values()) / 16, 2)
    assert means["macro_zh"] is None
    assert means["flat_zh"] is None


def test_averages_of_all_sets_differ_by_convention():
    scores = {name: 100.0 if d.language == "zh" else 0.0 for name, d in DATASETS.items()}
    means = averages(scores)
    assert means["flat"] == round(500 / 21, 2)
    assert means["macro"] == round((25 + 25 + 25 + 25 + 100 / 3 + 0) / 6, 2)
    assert means["macro_en"] == 0.0
    assert means["macro_zh"] == round(500 / 6, 2)
    assert means["flat_zh"] == round(500 / 7, 2)


def test_bucket_averages_leave_empty_buckets_out():
    scores = {name: {"0-4k": 10.0, "4-8k": 20.0, "8k+": float("nan")} for name in EXTENDED}
    scores["trec"] = {"0-4k": 10.0, "4-8k": 20.0, "8k+": 50.0}
    means = bucket_averages(scores)
    assert means["0-4k"]["macro"] == 10.0
    assert means["8k+"]["macro"] == means["8k+"]["flat"] == 50.0
    assert means["8k+"]["code"] is None
