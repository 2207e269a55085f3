"""Quest: rank pages of keys by an upper bound of their scores and attend to the best ones.

Rule (arXiv:2406.10774, github.com/mit-han-lab/Quest): pages of 16 tokens carry their largest and
smallest key per channel; each query head keeps the ``token_budget // page_size`` pages with the
largest upper bound and attends to them exactly. The first two layers and the prefill are dense.
The official CUDA and accuracy paths treat the current token's page differently: ``last_page``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, RowState, SearchKnob, Selection, require
from ffd.methods.dense import DenseLayer
from ffd.pages import LAST_PAGE, PageBounds, choose_pages, page_budget, scored_tokens
from ffd.selection import SELECT_PER, pool_group


@dataclass(frozen=True)
class Quest(Method):
    """A budget of pages, chosen by their bounds."""

    name: ClassVar[str] = "quest"
    search_knob: ClassVar[SearchKnob] = SearchKnob("token_budget", 128, math.inf)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"token_budget": 1 << 30, "skip_layers": 0}
    small_knobs: ClassVar[dict[str, Any]] = {"token_budget": 64, "skip_layers": 0}

    token_budget: int = 1024
    """Tokens attended per query head (or group), in whole pages; official values are 512 to 4096."""
    page_size: int = 16
    """Tokens per page: 16 (official), 32, 64 or 128."""
    select_per: str = "head"
    """``head`` (official) or ``group``: one list per kv head, by the largest bound over its query heads."""
    last_page: str = "kernel"
    """``kernel``: the current page is always kept; ``eval``: it competes and at least 3 pages are kept."""
    skip_layers: int = 2
    """Leading layers that stay dense: 2 (official) or 0."""

    def __post_init__(self) -> None:
        require(self.page_size in (16, 32, 64, 128), "page_size", self.page_size, "16, 32, 64 or 128 (a power of two)")
        require(
            isinstance(self.token_budget, int) and self.token_budget >= self.page_size,
            "token_budget",
            self.token_budget,
            f"an integer >= page_size={self.page_size}",
        )
        require(self.select_per in SELECT_PER, "select_per", self.select_per, "head or group")
        require(self.last_page in LAST_PAGE, "last_page", self.last_page, "kernel or eval")
        require(
            isinstance(self.skip_layers, int) and self.skip_layers >= 0,
            "skip_layers",
            self.skip_layers,
            "an integer >= 0",
        )

    @property
    def budget(self) -> int:
        """Pages kept per step, the current one included."""
        return page_budget(self.token_budget, self.page_size, self.last_page)

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> QuestLayer:
        """Allocate 16-bit keys and values and the page bounds."""
        return QuestLayer(self, geometry, rows, executor)


class QuestLayer(DenseLayer):
    """Dense storage and the bounds of its pages."""

    values_exact = True

    def __init__(self, method: Quest, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method
        self.bounds = PageBounds(geometry, method.page_size)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Copy the prompts in and bound their pages."""
        super().prefill(keys, values)
        self.bounds.prefill(keys, self.lengths)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row and widen its page."""
        super().append(keys, values)
        self.bounds.append(keys, self.lengths, self.executor)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Apply the rule of the module's docstring."""
        m, g, n = self.method, self.geometry, self.rows.longest
        bounds = self.bounds.scores(q, scale, -(-n // m.page_size))
        ranked = pool_group(bounds, g.num_kv_heads) if m.select_per == "group" else bounds
        kept = choose_pages(ranked, self.lengths, m.budget, m.page_size, m.last_page)
        if m.select_per == "group":
            kept = reference.share_with_group(kept, g.num_query_heads)
        seen = reference.visible(self.lengths, n)[:, None]
        selected = reference.expand_units(kept, m.page_size, n) & seen
        scanned = scored_tokens(self.lengths, m.budget, m.page_size, m.last_page)
        unscored = ~reference.visible(scanned, n)[:, None]
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=selected,
            estimate=bounds.repeat_interleave(m.page_size, dim=-1)[..., :n].masked_fill(unscored, torch.nan),
            scores=reference.key_scores(q, self.keys[:, :, :n], scale),
            scanned=scanned,
        )

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Both bounds of every ranked page, and keys and values of the kept ones."""
        row = self.geometry.head_dim * self.keys.element_size()
        return {
            "page_bounds": counts.scanned * (2 * row / self.method.page_size),
            "keys": counts.union * row,
            "values": counts.union * row,
        }

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.quest import quest_decode

        return quest_decode(self, q, scale)
