"""Spearman's rank correlation over the last axis: average ranks for ties, masked tokens, many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def average_ranks(x: Tensor, count: Tensor | None = None) -> Tensor:
    """Ranks from 0 of the last axis, ties sharing the mean of theirs.

    Parameters
    ----------
    x
        Floating [..., N], no NaN.
    count
        int, broadcastable to [..., N]: how many entries rank, the others being infinite; all of them if not given.

    Returns
    -------
    Tensor
        float64 [..., N]; anything at entries that do not rank.
    """
    x = x.contiguous()
    ordered = torch.sort(x, dim=-1).values
    # Entries that tie lie between the two ends of their run. A search is cheaper than marking runs by scans, which
    # on a GPU walk a row one after the other.
    first = torch.searchsorted(ordered, x, out_int32=True)
    last = torch.searchsorted(ordered, x, right=True, out_int32=True)
    if count is not None:
        last = last.minimum(count)
    return (first + last - 1).double() / 2


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
    both = torch.stack((x, y))
    out = ~mask | both.isnan().any(dim=0)
    n = out.shape[-1] - out.sum(dim=-1, keepdim=True, dtype=torch.int32)
    # Ranks of n tokens, tied or not, have the mean (n - 1) / 2.
    centred = (average_ranks(both.masked_fill(out, torch.inf), n) - (n - 1) / 2).masked_fill(out, 0.0)
    # 0 / 0 for constant rows is the NaN promised; ranks are multiples of a half, so a constant row is exactly 0.
    return centred.prod(dim=0).sum(dim=-1) / centred.square().sum(dim=-1).prod(dim=0).sqrt()
