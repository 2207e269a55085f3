"""Quest's decode, three launches: bound every page, find the budget's threshold by radix, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffd.kernels.attend import attend_kept
from ffd.kernels.scores import Scores, score_rows
from ffd.kernels.thresholds import Threshold, radix_top_k
from ffd.pages import PageBounds, scored_tokens

if TYPE_CHECKING:
    from ffd.methods.quest import QuestLayer


def rank_pages(
    bounds: PageBounds, q: Tensor, lengths: Tensor, scale: float, *, budget: int, last_page: str, pool: bool
) -> tuple[Scores, Threshold, Tensor]:
    """Score the pages and find what the budget keeps; nothing is scored where all pages fit.

    Parameters
    ----------
    bounds
        Largest and smallest keys of the pages.
    q
        [B, Hq, d], contiguous.
    lengths
        int32 [B].
    scale
        Softmax scale.
    budget
        Pages to keep, the current one included.
    last_page
        ``kernel`` or ``eval``, see `ffd.pages.choose_pages`.
    pool
        One list per kv head.

    Returns
    -------
    tuple[Scores, Threshold, Tensor]
        Page scores, the threshold, and the tokens whose bounds were read, int [B].
    """
    size = bounds.page_size
    scanned = scored_tokens(lengths, budget, size, last_page)
    pages = ((scanned + size - 1) // size).int()
    scores = score_rows(q, bounds.largest, pages, scale, smallest=bounds.smallest, pool=pool)
    ranked = budget - 1 if last_page == "kernel" else budget
    return scores, radix_top_k(scores.units, pages, torch.full_like(pages, ranked)), scanned


def quest_decode(layer: QuestLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to the best pages: q [B, Hq, d] -> [B, Hq, d]; adds one step to the ledger."""
    q = q.contiguous()
    m = layer.method
    scores, threshold, scanned = rank_pages(
        layer.bounds,
        q,
        layer.lengths,
        scale,
        budget=m.budget,
        last_page=m.last_page,
        pool=m.select_per == "group",
    )
    return attend_kept(
        layer,
        q,
        scale,
        scores.units,
        threshold,
        scanned,
        unit=m.page_size,
        union=m.select_per == "group",
        force_last=m.last_page == "kernel",
    )
