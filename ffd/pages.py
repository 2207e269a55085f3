"""Per-page bounds of the keys, kept up to date by append, and the choice of pages by them (Quest).

Quest (arXiv:2406.10774) stores the largest and the smallest key of each page and channel. With them
``sum_c max(q_c max_c, q_c min_c)`` bounds every score of the page from above; since ``min <= max``
it equals ``relu(q) . max - relu(-q) . min``, two matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffd import reference
from ffd.methods import Executor, LayerGeometry
from ffd.selection import last_unit, top_k

LAST_PAGE = ("kernel", "eval")
"""What happens to the page of the current token: see `choose_pages`."""

MIN_PAGES = 3
"""Official floor of the page budget in the evaluation code."""


class PageBounds:
    """Largest and smallest key of each page and channel, [B, Hkv, pages, d] in the keys' dtype."""

    def __init__(self, geometry: LayerGeometry, page_size: int) -> None:
        g = geometry
        shape = (g.batch_size, g.num_kv_heads, -(-g.capacity // page_size), g.head_dim)
        self.page_size = page_size
        self.largest = torch.zeros(shape, dtype=g.dtype, device=g.device)
        self.smallest = torch.zeros(shape, dtype=g.dtype, device=g.device)

    def prefill(self, keys: Tensor, lengths: Tensor) -> None:
        """Bound whole prompts: keys [B, Hkv, T, d], slots at or beyond ``lengths`` do not count."""
        seen = reference.visible(lengths, keys.shape[2])[:, None, :, None]
        padding = (0, 0, 0, -keys.shape[2] % self.page_size)
        for buffer, sign in ((self.largest, 1), (self.smallest, -1)):
            masked = torch.nn.functional.pad((keys * sign).masked_fill(~seen, -torch.inf), padding, value=-torch.inf)
            bound = masked.unflatten(2, (-1, self.page_size)).amax(dim=3) * sign
            buffer[:, :, : bound.shape[2]] = bound

    def append(self, keys: Tensor, lengths: Tensor, executor: Executor) -> None:
        """Widen the last page of each row by one token, [B, Hkv, 1, d], with positions read on the device."""
        if executor == "fused":
            from ffd.kernels.selector_append import bounds_append

            bounds_append(keys, self.largest, self.smallest, lengths, self.page_size)
            return
        row = torch.arange(keys.shape[0], device=keys.device)
        position = (lengths - 1).long()
        page = position // self.page_size
        opens = (position % self.page_size == 0)[:, None, None]
        token = keys[:, :, 0].to(self.largest.dtype)
        for buffer, widen in ((self.largest, torch.maximum), (self.smallest, torch.minimum)):
            buffer[row, :, page] = torch.where(opens, token, widen(buffer[row, :, page], token))

    def scores(self, q: Tensor, scale: float, num_pages: int) -> Tensor:
        """Upper bounds of the pages' scores, float32 [B, Hq, num_pages], natural units."""
        positive = reference.key_scores(q.clamp(min=0), self.largest[:, :, :num_pages], scale)
        return positive + reference.key_scores(q.clamp(max=0), self.smallest[:, :, :num_pages], scale)


def page_budget(token_budget: int, page_size: int, last_page: str) -> int:
    """Pages a budget of tokens buys, the current token's page included."""
    pages = token_budget // page_size
    return max(MIN_PAGES, pages) if last_page == "eval" else pages


def scored_tokens(lengths: Tensor, budget: int, page_size: int, last_page: str) -> Tensor:
    """Tokens whose page bounds are read: none where all pages fit the budget; int [B] -> int [B]."""
    pages = (lengths + page_size - 1) // page_size
    scored = (lengths - 1) // page_size * page_size if last_page == "kernel" else lengths
    return torch.where(pages > budget, scored, torch.zeros_like(scored))


def choose_pages(bounds: Tensor, lengths: Tensor, budget: int, page_size: int, last_page: str) -> Tensor:
    """Apply Quest's rule.

    Parameters
    ----------
    bounds
        float32 [B, R, P] upper bounds; entries of pages beyond a row's length may hold anything.
    lengths
        int [B].
    budget
        Pages to keep, see `page_budget`.
    page_size
        Tokens per page.
    last_page
        ``kernel``: the current token's page is always kept, never ranked, and takes one of the
        budget (the official CUDA path); ``eval``: it competes (the official accuracy path).

    Returns
    -------
    Tensor
        bool [B, R, P].
    """
    num_pages = bounds.shape[-1]
    pages = (lengths + page_size - 1) // page_size
    exists = reference.visible(pages, num_pages)[:, None]
    last = last_unit(lengths, page_size, num_pages)
    candidates = exists & ~last if last_page == "kernel" else exists
    ranked = bounds.masked_fill(~candidates, -torch.inf)
    kept = top_k(ranked, torch.full_like(lengths, budget - 1 if last_page == "kernel" else budget))
    if last_page == "kernel":
        kept = kept | last
    return torch.where((pages <= budget)[:, None, None], exists, kept)
