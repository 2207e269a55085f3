"""Spearman's rank correlation over the last axis: average ranks for ties, masked tokens, many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 0 of the last axis, ties sharing the mean of theirs.

    Parameters
    ----------
    x
        Floating [..., N]. NaN entries rank after all others, each by itself.

    Returns
    -------
    Tensor
        float64 [..., N].
    """
    n = x.shape[-1]
    ordered, order = torch.sort(x, dim=-1)
    position = torch.arange(n, device=x.device).expand_as(order)
    # NaN differs from NaN, so masked entries never form a run.
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = torch.where(starts, position, 0).cummax(dim=-1).values
    ends = torch.ones_like(starts)
    ends[..., :-1] = starts[..., 1:]
    last = torch.where(ends, position, n).flip(-1).cummin(dim=-1).values.flip(-1)
    mean = (first + last).double() / 2
    return torch.empty_like(mean).scatter_(-1, order, mean)


def spearman(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Rank correlation of the masked-in tokens.

    Parameters
    ----------
    x, y
        Floating [..., N]; infinities rank as themselves.
    mask
        bool, broadcastable to [..., N]: tokens that take part; entries that are NaN in ``x`` or ``y`` never do.

    Returns
    -------
    Tensor
        float64 [...]; NaN where fewer than two tokens take part or one side is constant.
    """
    mask = mask & ~x.isnan() & ~y.isnan()
    n = mask.sum(dim=-1, keepdim=True).double()

    def centred_ranks(values: Tensor) -> Tensor:
        # Ranks of n tokens, tied or not, have the mean (n - 1) / 2.
        ranks = average_ranks(values.masked_fill(~mask, torch.nan))
        return (ranks - (n - 1) / 2).masked_fill(~mask, 0.0)

    a, b = centred_ranks(x), centred_ranks(y)
    # 0 / 0 for constant rows is the NaN promised; ranks are multiples of a half, so a constant row is exactly 0.
    return (a * b).sum(dim=-1) / ((a * a).sum(dim=-1) * (b * b).sum(dim=-1)).sqrt()


def is_constant(x: Tensor, mask: Tensor) -> Tensor:
    """Whether all masked-in entries that are not NaN are equal: [..., N] -> bool [...], True for an empty row."""
    mask = mask & ~x.isnan()
    low = x.masked_fill(~mask, torch.inf).amin(dim=-1)
    high = x.masked_fill(~mask, -torch.inf).amax(dim=-1)
    return (low == high) | ~mask.any(dim=-1)
