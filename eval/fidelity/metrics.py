"""The metrics of one decode step of one layer, as functions of tensors.

Everything compares what a method did with exact attention of the same query over the same stored
16-bit keys and values, its scores computed in fp32 and summed in float64. Definitions are in
``docs/metrics.md``. Sets that are defined by the exact scores (top-m, within delta of the maximum,
smallest of a mass) are prefixes of the tokens in descending order of exact score, ties by position;
one stable sort serves them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.fidelity.catalogue import PROXY_GAP, SALIENT_DELTA, SALIENT_MASS, SET_SIZES, TOP_FRACTION
from eval.fidelity.exact import ExactStep
from eval.fidelity.ranks import is_constant, spearman
from ffd.methods.base import Selection
from ffd.reference import masked_attention, unit_max, visible


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
    if selection.margin is not None:
        size = exact.within(selection.margin)
        hits = exact_prefix_hits(exact, selection.attended)
        observed["false_negatives"] = complement(prefix_share(hits, size))
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


def exact_prefix_hits(exact: ExactStep, kept: Tensor) -> Tensor:
    """Entry ``i``: how many of the ``i + 1`` tokens of largest exact score are kept; int64 [B, Hq, N]."""
    return kept.gather(-1, exact.descending[1]).cumsum(dim=-1)


def prefix_share(hits: Tensor, size: Tensor) -> Observation:
    """Kept share of the ``size`` [B, Hq] tokens of largest exact score; undefined where size is 0 or beyond N."""
    within = (size - 1).clamp(0, hits.shape[-1] - 1)
    share = hits.gather(-1, within[..., None])[..., 0] / size.double()
    return Observation(share, weight=size.double(), defined=(size > 0) & (size <= hits.shape[-1]))


def complement(share: Observation) -> Observation:
    """One minus a share, of the same tokens."""
    return Observation(1 - share.value, share.weight, share.defined)


def recalls(exact: ExactStep, selection: Selection) -> dict[str, Observation]:
    """Mass recall, set recall at fixed sizes and at the attended set's own, and salient hit rates."""
    hits = exact_prefix_hits(exact, selection.attended)
    own = exact_prefix_hits(exact, selection.selected)
    salient = exact.within(SALIENT_DELTA)
    observed = {
        "mass_recall": Observation((exact.probabilities * selection.attended).sum(dim=-1)),
        "mass_recall_selected": Observation((exact.probabilities * selection.selected).sum(dim=-1)),
        "set_recall_own_size": prefix_share(hits, selection.attended.sum(dim=-1)),
        "salient_hit_delta": prefix_share(hits, salient),
        "salient_hit_delta_selected": prefix_share(own, salient),
        "salient_hit_mass": prefix_share(hits, exact.holding(SALIENT_MASS)),
    }
    enough = exact.lengths[:, None].expand_as(salient)
    for m in SET_SIZES:
        share = prefix_share(hits, torch.full_like(salient, m))
        observed[f"set_recall_{m}"] = Observation(share.value, share.weight, enough >= m)
    return observed


def lse_errors(exact: ExactStep, selection: Selection) -> dict[str, Observation]:
    """Error of the log normaliser in nats, and its parts.

    ``method - exact = quantisation - omitted``: the omitted part is what the tokens left out weigh,
    the quantisation part what approximate scores of the attended ones add. Scores of centred keys
    are compared after adding the constant that centring took from the whole row.
    """
    kept = ~selection.attended
    true = torch.logsumexp(exact.masked.double().masked_fill(kept, -torch.inf), dim=-1)
    used = torch.logsumexp(natural(selection.scores.double(), selection).masked_fill(kept, -torch.inf), dim=-1)
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
        [B, Hkv, N, d], values as the method stores them.
    out
        [B, Hq, d], what the executor that ran gave.
    """
    everything = exact.visible.expand_as(exact.scores)
    got = out.double()
    dense = masked_attention(exact.scores, everything, values)[0].double()
    same = masked_attention(selection.scores, selection.attended, stored_values)[0].double()
    norm = dense.norm(dim=-1)
    return {
        "output_cos": Observation((got * dense).sum(dim=-1) / (norm * got.norm(dim=-1))),
        "output_rel_error": Observation((got - dense).norm(dim=-1) / norm),
        "executor_rel_error": Observation((got - same).norm(dim=-1) / same.norm(dim=-1)),
    }


def rank_correlations(exact: ExactStep, estimate: Tensor, unit: int) -> dict[str, Observation]:
    """Spearman correlation of the selector's estimate with the exact score: tokens, pages, top tokens.

    Tokens (pages) without an estimate, NaN, take no part; how many there are is observed beside it.
    """
    seen = exact.visible.expand_as(estimate)
    estimated = seen & ~estimate.isnan()
    pages = spearman(unit_max(estimate, estimated, unit), unit_max(exact.scores, seen, unit), paged(estimated, unit))
    size = (exact.lengths * TOP_FRACTION).ceil().long()
    widest = math.ceil(estimate.shape[-1] * TOP_FRACTION)
    scores, order = (x[..., :widest] for x in exact.descending)
    top = spearman(estimate.gather(-1, order), scores, visible(size, widest)[:, None])
    share = estimated.sum(dim=-1) / exact.lengths[:, None].double()
    return {
        "spearman": Observation(spearman(estimate, exact.scores, seen)),
        "spearman_page": Observation(pages),
        "spearman_top": Observation(top),
        "estimate_missing": Observation(1 - share),
        "estimate_constant": Observation(is_constant(estimate, seen).double(), defined=estimated.any(dim=-1)),
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
