"""Statistics against known answers, and degenerate cases that must stay undefined."""

from __future__ import annotations

import math

import numpy as np
import pytest

from analysis import stats


def singles(n):
    return [str(i) for i in range(n)]


def test_mcnemar_is_the_exact_binomial_of_the_discordant_pairs():
    # 1 loss and 9 gains of 10 discordant pairs: 2 * (1 + 10) / 2**10.
    first = [1] + [0] * 9 + [1] * 30
    second = [0] + [1] * 9 + [1] * 30
    result = stats.difference_test(first, second, singles(40))
    assert result.value == pytest.approx(22 / 1024)
    assert result.method == "exact McNemar"


def test_graded_scores_are_tested_by_flipping_signs():
    # Three documents, all better: of the 8 sign patterns 2 are as extreme on two sides.
    result = stats.difference_test([0.1, 0.2, 0.3], [0.4, 0.4, 0.4], singles(3))
    assert result.method == "sign-flip permutation"
    assert result.value == pytest.approx(2 / 8)


def test_samples_of_one_document_count_once():
    first, second = [0.0] * 12, [1.0] * 12
    assert stats.difference_test(first, second, singles(12)).value == pytest.approx(2 / 2**12)
    documents = ["a"] * 6 + ["b"] * 3 + ["c"] * 3
    clustered = stats.difference_test(first, second, documents)
    assert clustered.value == pytest.approx(2 / 8)


def test_bootstrap_covers_as_the_normal_interval_does_for_many_samples():
    generator = np.random.default_rng(1)
    differences = generator.normal(2.0, 10.0, 400)
    low, high = stats.bootstrap_interval([(differences, singles(400))])
    half = 1.96 * differences.std(ddof=1) / 20
    assert low == pytest.approx(differences.mean() - half, abs=0.1)
    assert high == pytest.approx(differences.mean() + half, abs=0.1)


def test_bootstrap_widens_with_clusters_and_repeats_itself():
    generator = np.random.default_rng(2)
    per_document = generator.normal(0, 10, 20)
    differences = np.repeat(per_document, 10)
    alone = stats.bootstrap_interval([(differences, singles(200))])
    clustered = stats.bootstrap_interval([(differences, [str(i // 10) for i in range(200)])])
    # Ten equal samples a document: the honest interval is sqrt(10) wider.
    assert (clustered[1] - clustered[0]) / (alone[1] - alone[0]) == pytest.approx(math.sqrt(10), rel=0.1)
    assert clustered == stats.bootstrap_interval([(differences, [str(i // 10) for i in range(200)])])


def test_cluster_robust_error_equals_the_classic_one_for_single_samples():
    differences = np.array([3.0, -1.0, 4.0, 1.0, -5.0])
    assert stats.standard_error(differences, singles(5)) == pytest.approx(differences.std(ddof=1) / math.sqrt(5))


def test_non_inferiority_is_the_one_sided_t_test():
    from scipy.stats import ttest_1samp

    differences = [0.5, -1.0, 0.2, 0.1, -0.3, 0.4, -0.2, 0.6]
    expected = ttest_1samp(differences, -1.0, alternative="greater").pvalue
    result = stats.non_inferiority([(differences, singles(8))], margin=1.0)
    assert result.value == pytest.approx(expected)


def test_non_inferiority_without_a_differing_pair_is_the_chance_to_see_none():
    result = stats.non_inferiority([([0.0] * 298, singles(298))], margin=1.0)
    assert result.value == pytest.approx(0.99**298)
    assert result.value == pytest.approx(0.05, abs=1e-3)  # the rule of three


@pytest.mark.parametrize("margin", [0, -1, 100, math.nan])
def test_a_margin_that_means_nothing_is_refused(margin):
    with pytest.raises(ValueError, match="expected a number between 0 and 100"):
        stats.non_inferiority([([1.0, 2.0], singles(2))], margin)


def test_the_minimum_detectable_effect_is_detected_with_the_power_it_promises():
    from scipy.stats import ttest_1samp

    generator = np.random.default_rng(3)
    pilot = generator.normal(0, 10, 60)
    effect = stats.minimum_detectable_effect([(pilot, singles(60))]).value
    trials = generator.normal(effect, pilot.std(ddof=1), (2000, 60))
    power = (ttest_1samp(trials, 0, axis=1).pvalue < 0.05).mean()
    assert power == pytest.approx(0.8, abs=0.03)


def test_holm_known_answer_and_monotone():
    adjusted = stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": None})
    assert adjusted == {"d": pytest.approx(0.02), "a": pytest.approx(0.03), "c": 0.06, "b": 0.06, "e": None}


@pytest.mark.parametrize(
    ("differences", "clusters", "reason"),
    [
        ([0.0, 0.0, 0.0], ["a", "b", "c"], "all differences are equal"),
        ([5.0, 5.0, 5.0], ["a", "b", "c"], "all differences are equal"),
        ([5.0], ["a"], "fewer than two documents"),
        ([5.0, -3.0], ["a", "a"], "fewer than two documents"),
    ],
)
def test_degenerate_cases_are_undefined_and_say_why(differences, clusters, reason):
    interval = stats.bootstrap_interval([(differences, clusters)])
    assert interval.value is None
    assert reason in interval.method
    effect = stats.minimum_detectable_effect([(differences, clusters)])
    assert effect.value is None
    assert reason in effect.method
    if any(differences):
        assert stats.non_inferiority([(differences, clusters)], 1.0).value is None


def test_no_differing_pair_has_no_p_value():
    result = stats.difference_test([1, 0, 1], [1, 0, 1], singles(3))
    assert result.value is None
    assert result.method == "no pair differs"
