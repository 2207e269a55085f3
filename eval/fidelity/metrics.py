"""The metrics of one decode step of one layer, as functions of tensors.

Everything compares what a method did with exact attention of the same query over the same stored
16-bit keys and values, its scores computed in fp32 and summed in float64. Definitions are in
``docs/metrics.md``. Sets that are defined by the exact scores (top-m, within delta of the maximum,
smallest of a mass) are prefixes of the tokens in descending order of exact score, ties by position;
one stable sort serves them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.fidelity.catalogue import PROXY_GAP, SALIENT_DELTA, SALIENT_MASS, SET_SIZES, TOP_FRACTION
from eval.fidelity.exact import ExactStep
from eval.fidelity.ranks import spearman, spearman_in_order
from ffd.methods import Selection
from ffd.reference import group_heads, masked_attention, unit_max, visible


@dataclass(frozen=True)
class Observation:
    """Values of one metric, one per row and query head; values that are not finite count as undefined."""

    value: Tensor
    """Floating [B, Hq]."""
    weight: Tensor | None = None
    """Floating, broadcastable to [B, Hq]: weight in the token-weighted (micro) mean; None for 1."""
    defined: Tensor | None = None
    """bool [B, Hq]: where there is a value at all; None for everywhere."""


def observe(exact: ExactStep, selection: Selection, num_kv_heads: int, unit: int) -> dict[str, Observation]:
    """All metrics of one step of one layer that need no values; `output_errors` has the others.

    Parameters
    ----------
    exact
        Dense attention of the step.
    selection
        What the method attended to, and its scores.
    num_kv_heads
        Kv heads that the query heads share.
    unit
        Tokens per page of the page-level Spearman correlation.

    Returns
    -------
    dict
        Observations by metric name; a metric that the method has no part in (no estimate, no
        pseudo-maximum) is absent.
    """
    observed = (
        keep_ratios(selection, num_kv_heads)
        | recalls(exact, selection)
        | lse_errors(exact, selection)
        | rank_correlations(exact, selection.estimate, unit)
    )
    if selection.pseudo_max is not None:
        gap = exact.maximum - natural(selection.pseudo_max, selection)
        observed |= proxy_quality(gap, observed["keep_head"], observed["salient_hit_delta"])
    return observed


def natural(scores: Tensor, selection: Selection) -> Tensor:
    """Undo the selection's score shift: [B, Hq, ...] -> the same in terms of the keys as the model made them."""
    if selection.score_shift is None:
        return scores
    return scores + selection.score_shift.reshape(*selection.score_shift.shape, *(1,) * (scores.ndim - 2))


def keep_ratios(selection: Selection, num_kv_heads: int) -> dict[str, Observation]:
    """Tokens a head's own rule keeps, and tokens loaded for its kv head, over tokens visible."""
    n = selection.lengths[:, None].double()
    group = selection.selected.shape[1] // num_kv_heads
    loaded = selection.union(num_kv_heads).sum(dim=-1).repeat_interleave(group, dim=1)
    return {
        "keep_head": Observation(selection.selected.sum(dim=-1) / n, weight=n),
        "keep_io": Observation(loaded / n, weight=n),
    }


def prefix_shares(exact: ExactStep, kept: Tensor, sizes: Sequence[Tensor]) -> list[Observation]:
    """Kept shares of the tokens of largest exact score.

    Parameters
    ----------
    exact
        Dense attention of the step.
    kept
        bool [B, Hq, N].
    sizes
        How many tokens of largest score, each int [B, Hq]; a share is undefined where that is 0 or beyond N.
    """
    # Entry i: how many of the i + 1 tokens of largest exact score are kept.
    hits = kept.gather(-1, exact.descending[1]).cumsum(dim=-1, dtype=torch.int32)
    size = torch.stack(list(sizes), dim=-1)
    weight = size.double()
    share = hits.gather(-1, (size - 1).clamp(0, hits.shape[-1] - 1)) / weight
    defined = (size > 0) & (size <= hits.shape[-1])
    return [Observation(*parts) for parts in zip(*(x.unbind(-1) for x in (share, weight, defined)), strict=True)]


def recalls(exact: ExactStep, selection: Selection) -> dict[str, Observation]:
    """Mass recall, set recall at fixed sizes and at the attended set's own, salient hit rates, false negatives."""
    kept = torch.stack((selection.attended, selection.selected))
    mass = (exact.probabilities * kept).sum(dim=-1)
    near = exact.near(SALIENT_DELTA)
    salient = near.sum(dim=-1)
    hits, own_hits = (kept & near).sum(dim=-1)
    weight = salient.double()
    sizes = {
        "set_recall_own_size": selection.attended.sum(dim=-1),
        "salient_hit_mass": exact.holding(SALIENT_MASS),
        **{f"set_recall_{m}": ((exact.lengths >= m) * m)[:, None].expand_as(salient) for m in SET_SIZES},
    }
    if selection.margin is not None:
        sizes["false_negatives"] = exact.near(selection.margin).sum(dim=-1)
    observed = {
        "mass_recall": Observation(mass[0]),
        "mass_recall_selected": Observation(mass[1]),
        "salient_hit_delta": Observation(hits / weight, weight, salient > 0),
        "salient_hit_delta_selected": Observation(own_hits / weight, weight, salient > 0),
        **dict(zip(sizes, prefix_shares(exact, selection.attended, list(sizes.values())), strict=True)),
    }
    if selection.margin is not None:
        found = observed["false_negatives"]
        observed["false_negatives"] = Observation(1 - found.value, found.weight, found.defined)
    return observed


def lse_errors(exact: ExactStep, selection: Selection) -> dict[str, Observation]:
    """Error of the log normaliser in nats, and its parts.

    ``method - exact = quantisation - omitted``: the omitted part is what the tokens left out weigh,
    the quantisation part what approximate scores of the attended ones add. Scores of centred keys
    are compared after adding the constant that centring took from the whole row.
    """
    left_out = ~selection.attended
    true, used = (
        torch.logsumexp(scores.masked_fill(left_out, -torch.inf), dim=-1)
        for scores in (exact.precise, natural(selection.scores.double(), selection))
    )
    quantisation = used - true
    return {
        "lse_error": Observation((exact.logsumexp - used).abs()),
        # The difference of two float64 sums may be -1e-16 where nothing is left out.
        "lse_omitted": Observation((exact.logsumexp - true).clamp(min=0)),
        "lse_quantisation": Observation(quantisation.abs()),
        "lse_quantisation_signed": Observation(quantisation),
    }


def output_errors(
    exact: ExactStep, values: Tensor, selection: Selection, stored_values: Tensor, out: Tensor
) -> dict[str, Observation]:
    """Output against dense, and against the reference executor's for the same selection.

    Parameters
    ----------
    exact
        Dense attention of the step.
    values
        [B, Hkv, N, d], exact values.
    selection
        What the method attended to, and its scores.
    stored_values
        [B, Hkv, N, d], values as the method stores them; ``values`` itself where it stores those.
    out
        [B, Hq, d], what the executor that ran gave.
    """
    got, dense, same = out.double(), *_outputs(exact, values, selection, stored_values)
    size, own, same_size, error, same_error = torch.stack((dense, got, same, got - dense, got - same)).norm(dim=-1)
    # A head whose values are all zero, as pruning leaves it, is met exactly: no 0 / 0.
    relative, same_relative = (e.where(e == 0, e / n) for e, n in ((error, size), (same_error, same_size)))
    return {
        "output_cos": Observation((got * dense).sum(dim=-1) / (size * own)),
        "output_rel_error": Observation(relative),
        "executor_rel_error": Observation(same_relative),
    }


def _outputs(exact: ExactStep, values: Tensor, selection: Selection, stored_values: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of dense attention and of the method's reference: float64 [B, Hq, d] each."""
    heads = [(exact.scores, exact.visible.expand_as(exact.scores)), (selection.scores, selection.attended)]
    if stored_values is not values:
        both = (masked_attention(*h, v)[0] for h, v in zip(heads, (values, stored_values), strict=True))
    else:  # read once: every kv head serves its group twice
        groups = (
            torch.stack([group_heads(x, values.shape[1]) for x in pair], dim=2) for pair in zip(*heads, strict=True)
        )
        scores, attended = (x.flatten(1, 3) for x in groups)
        out = masked_attention(scores, attended, values)[0]
        both = (x.flatten(1, 2) for x in out.unflatten(1, (values.shape[1], 2, -1)).unbind(2))
    dense, same = (out.double() for out in both)
    return dense, same


def rank_correlations(exact: ExactStep, estimate: Tensor, unit: int) -> dict[str, Observation]:
    """Spearman correlation of the selector's estimate with the exact score: tokens, pages, top tokens.

    Tokens (pages) without an estimate, NaN, take no part; how many there are is observed beside it.
    """
    estimated = exact.visible & ~estimate.isnan()
    pages = spearman(unit_max(estimate, estimated, unit), unit_max(exact.scores, exact.visible, unit),
                     paged(estimated, unit))  # fmt: skip
    size = (exact.lengths * TOP_FRACTION).ceil().long()
    widest = math.ceil(estimate.shape[-1] * TOP_FRACTION)
    scores, order = exact.descending
    ordered = estimate.gather(-1, order)  # the tokens of a row come before the slots beyond its length
    tokens = spearman_in_order(ordered, scores, exact.visible)
    top = spearman_in_order(ordered[..., :widest], scores[..., :widest], visible(size, widest)[:, None])
    estimates = estimated.sum(dim=-1)
    low = estimate.where(estimated, torch.inf).amin(dim=-1)
    high = estimate.where(estimated, -torch.inf).amax(dim=-1)
    return {
        "spearman": Observation(tokens),
        "spearman_page": Observation(pages),
        "spearman_top": Observation(top),
        "estimate_missing": Observation(1 - estimates / exact.lengths[:, None].double()),
        "estimate_constant": Observation((low == high).double(), defined=estimates > 0),
    }


def paged(mask: Tensor, unit: int) -> Tensor:
    """Pages with at least one masked-in token: bool [B, H, N] -> bool [B, H, ceil(N / unit)]."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % unit))
    return padded.unflatten(-1, (-1, unit)).any(dim=-1)


def proxy_quality(gap: Tensor, keep_head: Observation, salient_hit: Observation) -> dict[str, Observation]:
    """Gap of the pseudo-maximum, and keep ratio and salient hits apart for proxy-error and regular cases.

    Parameters
    ----------
    gap
        Floating [B, Hq]: exact maximum less pseudo-maximum, nats; negative where the estimate is too high.
    keep_head, salient_hit
        Observations of the same step.
    """
    case = gap > PROXY_GAP
    observed = {"pseudo_max_gap": Observation(gap), "proxy_error_cases": Observation(case.double())}
    for group, members in (("proxy_error", case), ("regular", gap <= PROXY_GAP)):
        observed[f"keep_head_{group}"] = Observation(keep_head.value, keep_head.weight, members)
        observed[f"salient_hit_{group}"] = Observation(salient_hit.value, salient_hit.weight, members)
    return observed
