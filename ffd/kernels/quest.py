"""Quest's decode, three launches: bound every page, find the budget's threshold by radix, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.attend import attend_kept
from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded
from ffd.kernels.scores import score_rows
from ffd.kernels.thresholds import Threshold, radix_top_k
from ffd.kernels.units import Scores
from ffd.pages import PageBounds

if TYPE_CHECKING:
    from ffd.methods.quest import QuestLayer


@triton.jit
def _scanned_kernel(
    lengths_ptr, scanned_ptr, pages_ptr, num_rows, budget,
    ROWS: tl.constexpr, PAGE: tl.constexpr, LAST_APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: `ffd.pages.scored_tokens` and its pages; a dozen launches in torch."""
    follow_previous_launch(PDL)
    o_r = tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + o_r, mask=o_r < num_rows, other=0)
    scored = (length - 1) // PAGE * PAGE if LAST_APART else length
    scored = tl.where(tl.cdiv(length, PAGE) > budget, scored, 0)
    tl.store(scanned_ptr + o_r, scored, mask=o_r < num_rows)
    tl.store(pages_ptr + o_r, tl.cdiv(scored, PAGE), mask=o_r < num_rows)


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
    scanned, pages = torch.empty_like(lengths), torch.empty_like(lengths)
    gpu = hardware(q.device)
    _scanned_kernel[(1,)](
        lengths, scanned, pages, lengths.shape[0], budget,
        ROWS=padded(lengths.shape[0], 1), PAGE=size, LAST_APART=last_page == "kernel",
        PDL=gpu.dependent_launch, num_warps=1, **gpu.launch_options,
    )  # fmt: skip
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
        forced=m.page_size if m.last_page == "kernel" else 0,
    )
