"""Selection rules over the scores of units (tokens, sub-blocks, pages or blocks), in plain torch.

A row of scores is one query head's, or one kv head's where a group shares one list. Scores are in
natural units; a unit that is no candidate has score ``-inf`` and is never kept. The budget rule
breaks ties by the smaller index; the mass rule keeps all units that tie with the last one kept, so
that neither depends on the order of a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffd import reference

GRANULARITIES = {"token": 1, "page": 16, "sub_block": 32, "block": 128}
"""Tokens per unit, by the name of the granularity."""

SELECT_PER = ("head", "group")


def top_k(scores: Tensor, k: Tensor) -> Tensor:
    """Keep the largest scores.

    Parameters
    ----------
    scores
        float32 [B, R, U].
    k
        int [B], units to keep; a row with fewer candidates keeps them all.

    Returns
    -------
    Tensor
        bool [B, R, U]; among equal scores the smaller index is kept.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))
    return (rank < k[:, None, None]) & (scores > -torch.inf)


def top_p_threshold(scores: Tensor, p: float) -> Tensor:
    """Score of the last unit in the smallest set whose softmax mass reaches ``p``.

    Parameters
    ----------
    scores
        float32 [B, R, U].
    p
        Mass in (0, 1]; 1 keeps every candidate, whatever the rounding of the sum.

    Returns
    -------
    Tensor
        float32 [B, R]; the set is all units with a score at or above it.
    """
    if p >= 1.0:
        return torch.full_like(scores[..., 0], -torch.inf)
    ordered = scores.sort(dim=-1, descending=True).values
    mass = torch.softmax(ordered, dim=-1).double().cumsum(dim=-1)
    crossing = (mass < p).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return ordered.gather(-1, crossing).squeeze(-1)


def at_least(scores: Tensor, threshold: Tensor) -> Tensor:
    """Keep candidates with scores [B, R, U] at or above their row's threshold [B, R]: bool [B, R, U]."""
    return (scores >= threshold[..., None]) & (scores > -torch.inf)


def unit_logsumexp(scores: Tensor, candidates: Tensor, unit: int) -> Tensor:
    """Log of the softmax mass of each unit, up to the row's constant.

    Parameters
    ----------
    scores
        float32 [B, Hq, N].
    candidates
        bool, broadcastable to [B, Hq, N]; others weigh nothing.
    unit
        Tokens per unit; N need not be a multiple.

    Returns
    -------
    Tensor
        float32 [B, Hq, ceil(N / unit)]; -inf where a unit holds no candidate.
    """
    masked = scores.masked_fill(~candidates, -torch.inf)
    masked = torch.nn.functional.pad(masked, (0, -masked.shape[-1] % unit), value=-torch.inf)
    return torch.logsumexp(masked.unflatten(-1, (-1, unit)), dim=-1)


def pool_group(scores: Tensor, num_kv_heads: int) -> Tensor:
    """Largest score over the query heads of each kv head: [B, Hq, U] -> [B, Hkv, U]."""
    return reference.group_heads(scores, num_kv_heads).amax(dim=2)


def last_unit(lengths: Tensor, unit: int, num_units: int) -> Tensor:
    """Mask of the unit that holds the current token: int [B] -> bool [B, 1, num_units]."""
    position = torch.arange(num_units, device=lengths.device)
    return (position == ((lengths - 1) // unit)[:, None])[:, None]
