"""Spearman's rank correlation over the last axis: average ranks for ties, masked tokens, many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def twice_average_ranks(x: Tensor, count: Tensor | None = None) -> Tensor:
    """Twice the ranks from 0 of the last axis, ties sharing the mean of theirs: integers, which sums leave exact.

    Parameters
    ----------
    x
        Floating [..., N], no NaN.
    count
        int, broadcastable to [..., N]: how many entries rank, the others being infinite; all of them if not given.

    Returns
    -------
    Tensor
        int32 [..., N]; anything at entries that do not rank.
    """
    x = x.contiguous()
    ordered = torch.sort(x, dim=-1).values
    # Entries that tie lie between the two ends of their run. A search is cheaper than marking runs by scans, which
    # on a GPU walk a row one after the other.
    first = torch.searchsorted(ordered, x, out_int32=True)
    last = torch.searchsorted(ordered, x, right=True, out_int32=True)
    if count is not None:
        last = last.minimum(count)
    return first + last - 1


def twice_ordered_ranks(ordered: Tensor, counted: Tensor) -> Tensor:
    """`twice_average_ranks` of entries that are sorted already, some of which do not rank: no sort, a search in order.

    Parameters
    ----------
    ordered
        Floating [..., N], ascending, no NaN.
    counted
        bool [..., N]: which entries rank.

    Returns
    -------
    Tensor
        int32 [..., N]; anything at entries that do not rank.
    """
    # Entry i: how many of the first i entries rank.
    before = torch.nn.functional.pad(counted.cumsum(dim=-1, dtype=torch.int32), (1, 0))
    first, last = (before.gather(-1, torch.searchsorted(ordered, ordered, right=right)) for right in (False, True))
    return first + last - 1


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
    n = _left(out)
    return _correlation(twice_average_ranks(both.masked_fill(out, torch.inf), n), out, n)


def spearman_in_order(x: Tensor, descending: Tensor, mask: Tensor) -> Tensor:
    """`spearman` where one side is sorted already, which saves half of the work.

    Parameters
    ----------
    x
        Floating [..., N], in the order of ``descending``; infinities rank as themselves.
    descending
        Floating [..., N], descending, no NaN.
    mask
        As for `spearman`; also in that order.

    Returns
    -------
    Tensor
        float64 [...], equal to that of `spearman`.
    """
    out = ~mask | x.isnan()
    n = _left(out)
    # Both sides turned round, so that the sorted one ascends: the correlation is the same.
    ranks = twice_average_ranks((-x).masked_fill(out, torch.inf), n), twice_ordered_ranks(-descending, ~out)
    return _correlation(torch.stack(ranks), out, n)


def _left(out: Tensor) -> Tensor:
    """How many tokens take part: int32 [..., 1]."""
    return out.shape[-1] - out.sum(dim=-1, keepdim=True, dtype=torch.int32)


def _correlation(twice_ranks: Tensor, out: Tensor, n: Tensor) -> Tensor:
    """Correlation of two sides' ranks, twice them int32 [2, ..., N], of which ``n`` are not ``out``."""
    # Ranks of n tokens, tied or not, have the mean (n - 1) / 2. Sums of integers are exact, whatever their order: to
    # 300,000 tokens.
    centred = (twice_ranks - (n - 1)).masked_fill(out, 0).double()
    # 0 / 0 for constant rows is the NaN promised: a constant row is exactly 0.
    return centred[0].mul(centred[1]).sum(dim=-1) / centred.square().sum(dim=-1).prod(dim=0).sqrt()
