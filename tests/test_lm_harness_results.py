"""One score per task out of lm-eval's results, with an interval only where it means something."""

from __future__ import annotations

import math

import pytest

from eval.lm_harness.results import group_scores, harness_score
from eval.statistics import mean_interval, wilson_interval


def results(metric, values, score, **more):
    """What lm-eval returns for one task under two filters."""
    samples = [
        {"doc_id": i, "filter": name, "target": f"t{i}", metric: value if name == "strict" else 0.0}
        for name in ("strict", "loose")
        for i, value in enumerate(values)
    ]
    numbers = {f"{metric},strict": score, f"{metric}_stderr,strict": 0.1, f"{metric},loose": 0.0, **more}
    return {
        "results": {"t": {"name": "t", "alias": "t", "sample_len": len(values), **numbers}},
        "samples": {"t": samples},
        "higher_is_better": {"t": {metric: True}},
    }


def test_the_first_metric_under_the_first_filter_is_the_score():
    found = harness_score(results("exact_match", [1.0, 0.0, 1.0, 1.0], 0.75), "t")
    assert (found.metric, found.filter, found.score, found.n) == ("exact_match", "strict", 0.75, 4)
    assert found.ci95 == wilson_interval(3, 4)
    assert dict(found.by_document) == {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert found.references[2] == "t2"
    assert found.metrics["exact_match_stderr,strict"] == 0.1


def test_graded_scores_get_students_interval():
    assert harness_score(results("f1", [0.2, 0.6, 0.7], 0.5), "t").ci95 == mean_interval([0.2, 0.6, 0.7])


@pytest.mark.parametrize("values", [[0.2, 0.6], [(3.0, 2), (4.0, 5)]])
def test_a_metric_that_is_no_mean_has_no_interval(values):
    assert harness_score(results("perplexity", values, 12.5), "t").ci95 is None


def test_no_finite_number_is_no_score():
    broken = results("perplexity", [math.inf], math.inf)
    broken["results"]["t"] = {"name": "t", "perplexity,strict": math.inf, "perplexity_stderr,strict": "N/A"}
    found = harness_score(broken, "t")
    assert (found.score, found.metric, found.ci95) == (None, None, None)


def test_groups_carry_their_own_averages():
    groups = {"g": {"name": "g", "acc,none": 0.25, "acc_stderr,none": 0.1}, "empty": {"name": "empty"}}
    assert group_scores({"groups": groups}) == {"g": 0.25}
    assert group_scores({}) == {}
