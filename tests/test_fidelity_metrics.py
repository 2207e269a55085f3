"""Every metric against a loop over tokens in float64, on cases with ties, constant, infinite and missing estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from eval.fidelity.catalogue import METRICS, SET_SIZES
from eval.fidelity.exact import ExactStep
from eval.fidelity.metrics import Observation, observe, output_errors
from eval.fidelity.ranks import spearman, spearman_in_order, twice_average_ranks
from ffd.methods import Selection
from ffd.reference import key_scores, masked_attention, union_over_group, visible

B, HKV, G, N, D, UNIT = 3, 2, 3, 90, 16, 16
LENGTHS = (90, 67, 5)
MARGIN = 3.0


@dataclass
class Case:
    exact: ExactStep
    values: torch.Tensor
    selection: Selection
    stored: torch.Tensor
    out: torch.Tensor


def make_case(seed: int = 0, *, shift: bool = False) -> Case:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    q = torch.randn(B, HKV * G, D, generator=g)
    keys = torch.randn(B, HKV, N, D, generator=g)
    # Repeated keys: ties among the exact scores, at the top too.
    keys[:, :, 20:40] = keys[:, :, :20]
    values = torch.randn(B, HKV, N, D, generator=g)
    scores = key_scores(q, keys, 1.0)
    seen = visible(lengths, N)[:, None].expand_as(scores)
    estimate = ((scores + torch.randn(scores.shape, generator=g)) * 2).round() / 2
    estimate[0, 0] = 1.25  # constant row
    estimate[0, 1] = -torch.inf
    estimate[0, 2, ::3] = torch.nan
    estimate[0, 3, :16] = torch.nan  # a page without any
    estimate[0, 4, ::2] = -torch.inf
    estimate[1, 0] = torch.nan
    estimate = estimate.masked_fill(~seen, torch.nan)
    selected = (torch.rand(scores.shape, generator=g) < 0.4) & seen
    selected[:, :, 0] = True
    attended = union_over_group(selected, HKV).repeat_interleave(G, dim=1)
    attended[1] = selected[1]  # a method without a union rule
    used = scores + 0.1 * torch.randn(scores.shape, generator=g)
    offset = torch.randn(B, HKV * G, generator=g) * 10 if shift else None
    pseudo = scores.masked_fill(~seen, -torch.inf).amax(dim=-1) - torch.rand(B, HKV * G, generator=g)
    pseudo[2, 0] += 5  # too high
    if offset is not None:
        used, estimate, pseudo = used - offset[..., None], estimate - offset[..., None], pseudo - offset
    return Case(
        ExactStep(scores, lengths),
        values,
        Selection(
            lengths=lengths,
            selected=selected,
            attended=attended,
            estimate=estimate,
            scores=used.masked_fill(~attended, torch.nan),
            scanned=lengths,
            pseudo_max=pseudo,
            margin=torch.full((HKV * G,), MARGIN),
            score_shift=offset,
        ),
        (values * 1.01),
        torch.randn(B, HKV * G, D, generator=g).half(),
    )


def observe_all(case: Case) -> dict[str, Observation]:
    return observe(case.exact, case.selection, HKV, UNIT) | output_errors(
        case.exact, case.values, case.selection, case.stored, case.out
    )


def ranks(x: list[float]) -> list[float]:
    return [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def rho(x: list[float], y: list[float]) -> float | None:
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(a) and not math.isnan(b)]
    if len(pairs) < 2:
        return None
    r, s = (np.array(ranks(list(side))) for side in zip(*pairs, strict=True))
    r, s = r - r.mean(), s - s.mean()
    norm = math.sqrt((r @ r) * (s @ s))
    return None if norm == 0 else float(r @ s) / norm


def paged_max(x: list[float]) -> list[float]:
    pages = []
    for start in range(0, len(x), UNIT):
        present = [a for a in x[start : start + UNIT] if not math.isnan(a)]
        pages.append(max(present) if present else math.nan)
    return pages


def attention(scores: list[float], keep: list[int], values: np.ndarray) -> np.ndarray:
    weights = np.array([math.exp(scores[j]) for j in keep])
    return (weights[:, None] * values[keep]).sum(axis=0) / weights.sum()


def brute_force(case: Case, b: int, h: int) -> dict[str, float | None]:
    """All metrics of one row and head by their definitions."""
    n, kv, sel = LENGTHS[b], h // G, case.selection
    shift = 0.0 if sel.score_shift is None else float(sel.score_shift[b, h])
    s = case.exact.scores[b, h, :n].double().tolist()
    u = sel.estimate[b, h, :n].double().tolist()
    t = [x + shift for x in sel.scores[b, h, :n].double().tolist()]
    kept = [j for j in range(n) if sel.attended[b, h, j]]
    own = [j for j in range(n) if sel.selected[b, h, j]]
    loaded = {j for j in range(n) for member in range(kv * G, kv * G + G) if sel.attended[b, member, j]}
    total = sum(math.exp(x) for x in s)
    order = sorted(range(n), key=lambda j: (-s[j], j))
    near = {j for j in range(n) if s[j] >= max(s) - 5}
    heavy: list[int] = []
    while sum(math.exp(s[j]) for j in heavy) / total < 0.9:
        heavy.append(order[len(heavy)])
    in_margin = {j for j in range(n) if s[j] >= max(s) - MARGIN}
    mass = sum(math.exp(s[j]) for j in kept)
    used = sum(math.exp(t[j]) for j in kept)
    out = case.out.double().numpy()[b, h]
    dense = attention(s, order, case.values[b, kv, :n].double().numpy())
    same = attention(t, kept, case.stored[b, kv, :n].double().numpy())
    top = order[: math.ceil(0.05 * n)]
    gap = max(s) - (float(sel.pseudo_max[b, h]) + shift)  # type: ignore[index]
    keep, hit = len(own) / n, len(near & set(kept)) / len(near)
    present = [x for x in u if not math.isnan(x)]
    return {
        "keep_head": keep,
        "keep_io": len(loaded) / n,
        "mass_recall": mass / total,
        "mass_recall_selected": sum(math.exp(s[j]) for j in own) / total,
        **{f"set_recall_{m}": len(set(order[:m]) & set(kept)) / m if n >= m else None for m in SET_SIZES},
        "set_recall_own_size": len(set(order[: len(kept)]) & set(kept)) / len(kept),
        "salient_hit_delta": hit,
        "salient_hit_delta_selected": len(near & set(own)) / len(near),
        "salient_hit_mass": len(set(heavy) & set(kept)) / len(heavy),
        "output_cos": float(out @ dense / np.linalg.norm(out) / np.linalg.norm(dense)),
        "output_rel_error": float(np.linalg.norm(out - dense) / np.linalg.norm(dense)),
        "executor_rel_error": float(np.linalg.norm(out - same) / np.linalg.norm(same)),
        "lse_error": abs(math.log(total) - math.log(used)),
        "lse_omitted": math.log(total) - math.log(mass),
        "lse_quantisation": abs(math.log(used) - math.log(mass)),
        "lse_quantisation_signed": math.log(used) - math.log(mass),
        "spearman": rho(u, s),
        "spearman_page": rho(paged_max(u), paged_max(s)),
        "spearman_top": rho([u[j] for j in top], [s[j] for j in top]),
        "estimate_missing": 1 - len(present) / n,
        "estimate_constant": float(len(set(present)) == 1) if present else None,
        "pseudo_max_gap": gap,
        "false_negatives": 1 - len(in_margin & set(kept)) / len(in_margin),
        "proxy_error_cases": float(gap > 0.5),
        "keep_head_proxy_error": keep if gap > 0.5 else None,
        "salient_hit_proxy_error": hit if gap > 0.5 else None,
        "keep_head_regular": keep if gap <= 0.5 else None,
        "salient_hit_regular": hit if gap <= 0.5 else None,
    }


@pytest.mark.parametrize(("shift", "exact_values"), [(False, False), (True, False), (False, True)])
def test_every_metric_equals_its_definition(shift: bool, exact_values: bool) -> None:
    case = make_case(shift=shift)
    if exact_values:
        case.stored = case.values
    observed = observe_all(case)
    assert set(observed) == {metric.name for metric in METRICS}
    undefined: set[str] = set()
    for b in range(B):
        for h in range(HKV * G):
            for name, expected in brute_force(case, b, h).items():
                entry = observed[name]
                got = float(entry.value[b, h])
                has_value = math.isfinite(got) and (entry.defined is None or bool(entry.defined[b, h]))
                assert has_value == (expected is not None), (name, b, h, got, expected)
                if expected is None:
                    undefined.add(name)
                else:
                    assert got == pytest.approx(expected, abs=2e-5), (name, b, h)
    # The case is only worth its name if it reaches the exclusions.
    assert {"spearman", "spearman_page", "set_recall_1024", "keep_head_regular", "estimate_constant"} <= undefined


def test_keeping_everything_exactly_loses_nothing() -> None:
    case = make_case()
    everything = case.exact.visible.expand_as(case.exact.scores)
    selection = replace(
        case.selection,
        selected=everything,
        attended=everything,
        scores=case.exact.scores,
        estimate=case.exact.scores.masked_fill(~everything, torch.nan),
        pseudo_max=case.exact.maximum,
    )
    out = masked_attention(case.exact.scores, everything, case.values)[0]
    observed = observe_all(Case(case.exact, case.values, selection, case.values, out))
    ones = ("keep_head", "keep_io", "mass_recall", "salient_hit_delta", "salient_hit_mass", "spearman", "output_cos")
    zeros = ("lse_error", "lse_omitted", "lse_quantisation", "output_rel_error", "executor_rel_error")
    for names, expected in ((ones, 1.0), (zeros, 0.0), (("pseudo_max_gap", "false_negatives"), 0.0)):
        for name in names:
            assert observed[name].value.double() == pytest.approx(torch.full((B, HKV * G), expected), abs=1e-6), name


def test_heads_of_zero_values_are_met_exactly() -> None:
    """0 / 0 made the run of a pruned model invalid: an output that was not a number."""
    case = make_case()
    zero, out = torch.zeros_like(case.values), torch.zeros_like(case.out)
    observed = output_errors(case.exact, zero, case.selection, zero, out)
    assert (observed["output_rel_error"].value == 0).all()
    assert (observed["executor_rel_error"].value == 0).all()
    wrong = output_errors(case.exact, zero, case.selection, zero, out + torch.nan)
    assert wrong["output_rel_error"].value.isnan().all()


def test_no_token_is_missed_by_keeping_all_whatever_the_margin() -> None:
    """An infinite margin reaches all tokens of a row and none beyond its length."""
    case = make_case()
    everything = case.exact.visible.expand_as(case.exact.scores)
    selection = replace(case.selection, attended=everything, margin=torch.full((HKV * G,), torch.inf))
    assert (observe(case.exact, selection, HKV, UNIT)["false_negatives"].value == 0).all()


def test_attending_to_nothing_is_undefined_rather_than_a_number() -> None:
    case = make_case()
    nothing = torch.zeros_like(case.selection.attended)
    observed = observe(case.exact, replace(case.selection, selected=nothing, attended=nothing), HKV, UNIT)
    for name in ("lse_error", "lse_omitted", "lse_quantisation"):
        assert not observed[name].value.isfinite().any()
    assert not observed["set_recall_own_size"].defined.any()  # type: ignore[union-attr]
    assert (observed["mass_recall"].value == 0).all()


def test_a_method_without_estimate_pseudo_maximum_or_margin_has_no_such_metric() -> None:
    case = make_case()
    bare = replace(
        case.selection,
        estimate=torch.full_like(case.selection.estimate, torch.nan),
        pseudo_max=None,
        margin=None,
    )
    observed = observe(case.exact, bare, HKV, UNIT)
    assert not {"pseudo_max_gap", "false_negatives", "proxy_error_cases"} & set(observed)
    assert observed["spearman"].value.isnan().all()
    assert (observed["estimate_missing"].value == 1).all()


def test_spearman_agrees_with_scipy_on_ties() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 6, (20, 50), generator=g).float()
    y = x + torch.randint(0, 6, (20, 50), generator=g)
    got = spearman(x, y, torch.ones(50, dtype=torch.bool))
    assert got.tolist() == pytest.approx([scipy_stats.spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)])
    assert twice_average_ranks(x).tolist() == [(2 * (scipy_stats.rankdata(row) - 1)).tolist() for row in x]


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
def test_a_side_in_order_is_not_sorted_again_and_correlates_the_same(missing: float) -> None:
    g = torch.Generator().manual_seed(2)
    exact, estimate = (torch.randint(-5, 5, (12, 3, 70), generator=g).float() for _ in range(2))
    exact[0], estimate[1] = 1.0, -2.0  # constant
    exact[2, :, ::3], estimate[3, :, ::2] = -torch.inf, torch.inf
    estimate[torch.rand(estimate.shape, generator=g) < missing] = torch.nan
    mask = torch.arange(70) < torch.randint(0, 71, (12, 1, 1), generator=g)
    scores, order = exact.masked_fill(~mask, -torch.inf).sort(dim=-1, descending=True, stable=True)
    got = spearman_in_order(estimate.gather(-1, order), scores, mask)
    expected = spearman(estimate, exact, mask)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert bool(expected.isfinite().any()) == (missing < 1)


def test_set_recall_takes_ties_by_position() -> None:
    """Top-m of equal scores is the first m tokens, whatever a sort of the platform would give."""
    scores = torch.zeros(1, 1, 80)
    kept = torch.zeros(1, 1, 80, dtype=torch.bool)
    kept[..., :64] = True
    lengths = torch.tensor([80])
    selection = Selection(lengths, kept, kept, scores, scores, lengths)
    observed = observe(ExactStep(scores, lengths), selection, 1, 16)
    assert float(observed["set_recall_64"].value) == 1.0
    assert float(observed["salient_hit_delta"].value) == pytest.approx(64 / 80)
    assert math.isnan(float(observed["spearman"].value))
