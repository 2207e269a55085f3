"""Twilight: prune a generous selection to the smallest set with estimated softmax mass p.

Rule (arXiv:2502.02770, github.com/tsinghua-ideal/Twilight), per query head:

1. Select a conservative set: Quest's pages with a budget of 8192 tokens, or everything.
2. Estimate its scores with a 4-bit copy of the keys, asymmetric over each token's channels.
3. Keep the smallest subset whose estimated softmax mass reaches ``p``, and attend to it exactly.

The official search for the weight threshold starts at the weight of token 0 and so keeps too much
wherever that is not the largest: ``search_start=first_token``. Ours starts at the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.ledger import Counts
from ffd.methods import Executor, LayerGeometry, Method, RowState, SearchKnob, Selection, require
from ffd.methods.dense import DenseLayer, write_token
from ffd.minmax import BOUND_DTYPE, dequantize_minmax, pack_planes, quantize_minmax, unpack_planes
from ffd.pages import PageBounds, choose_pages, page_budget, scored_tokens
from ffd.selection import SELECT_PER, at_least, top_p_threshold

ESTIMATE_BITS = 4


@dataclass(frozen=True)
class Twilight(Method):
    """Select, estimate, prune."""

    name: ClassVar[str] = "twilight"
    search_knob: ClassVar[SearchKnob] = SearchKnob("p", 0.01, 1.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"base": "all", "p": 1.0, "skip_layers": 0}
    small_knobs: ClassVar[dict[str, Any]] = {"token_budget": 96, "p": 0.8, "skip_layers": 0}

    p: float = 0.85
    """Estimated softmax mass to keep, in (0, 1]; 1 keeps the whole base selection."""
    base: str = "quest"
    """Base selector: quest or all."""
    token_budget: int = 8192
    """Tokens the base selector keeps."""
    page_size: int = 16
    """Tokens per page of the base selector: 16 (official), 32, 64 or 128."""
    search_start: str = "max"
    """``max``, or ``first_token`` (official): the threshold never exceeds token 0's weight."""
    select_per: str = "head"
    """``head`` (official) or ``group``: every head attends to the union of its group's sets."""
    skip_layers: int = 2
    """Leading layers that stay dense: 2 (official) or 0."""

    def __post_init__(self) -> None:
        require(isinstance(self.p, (int, float)) and 0.0 < self.p <= 1.0, "p", self.p, "a number in (0, 1]")
        require(self.base in ("quest", "all"), "base", self.base, "quest or all")
        require(self.page_size in (16, 32, 64, 128), "page_size", self.page_size, "16, 32, 64 or 128 (a power of two)")
        require(
            isinstance(self.token_budget, int) and self.token_budget >= self.page_size,
            "token_budget",
            self.token_budget,
            f"an integer >= page_size={self.page_size}",
        )
        require(self.search_start in ("max", "first_token"), "search_start", self.search_start, "max or first_token")
        require(self.select_per in SELECT_PER, "select_per", self.select_per, "head or group")
        require(
            isinstance(self.skip_layers, int) and self.skip_layers >= 0,
            "skip_layers",
            self.skip_layers,
            "an integer >= 0",
        )

    @property
    def budget(self) -> int:
        """Pages of the base selection; they compete by the rule of Quest's accuracy path."""
        return page_budget(self.token_budget, self.page_size, "eval")

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> TwilightLayer:
        """Allocate 16-bit keys and values, page bounds and the 4-bit copy of the keys."""
        require(geometry.head_dim % 8 == 0, "head_dim", geometry.head_dim, "a multiple of 8")
        return TwilightLayer(self, geometry, rows, executor)


class TwilightLayer(DenseLayer):
    """Dense storage, page bounds, and 4-bit keys: ``codes`` uint8 [B, Hkv, C, d/2], ``minimum`` and ``code_step``
    float16 [B, Hkv, C, 1].
    """

    values_exact = True

    def __init__(self, method: Twilight, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method
        self.bounds = PageBounds(geometry, method.page_size) if method.base == "quest" else None
        lead = self.keys.shape[:3]
        device = geometry.device
        self.codes = torch.zeros(*lead, geometry.head_dim * ESTIMATE_BITS // 8, dtype=torch.uint8, device=device)
        self.minimum = torch.zeros(*lead, 1, dtype=BOUND_DTYPE, device=device)
        self.code_step = torch.zeros(*lead, 1, dtype=BOUND_DTYPE, device=device)

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        """Copy the prompts in, bound their pages and quantise their keys."""
        super().prefill(keys, values)
        if self.bounds is not None:
            self.bounds.prefill(keys, self.lengths)
        quantized = quantize_minmax(keys, ESTIMATE_BITS, dim=-1)
        n = keys.shape[2]
        self.codes[:, :, :n] = pack_planes(quantized.codes, ESTIMATE_BITS)
        self.minimum[:, :, :n] = quantized.minimum
        self.code_step[:, :, :n] = quantized.step

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write one token per row in all three forms."""
        super().append(keys, values)
        if self.bounds is not None:
            self.bounds.append(keys, self.lengths, self.executor)
        if self.executor == "fused":
            from ffd.kernels.selector_append import four_bit_append

            four_bit_append(keys, self.codes, self.minimum, self.code_step, self.lengths)
            return
        quantized = quantize_minmax(keys, ESTIMATE_BITS, dim=-1)
        write_token(self.codes, pack_planes(quantized.codes, ESTIMATE_BITS), self.lengths)
        write_token(self.minimum, quantized.minimum, self.lengths)
        write_token(self.code_step, quantized.step, self.lengths)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Apply the rule of the module's docstring."""
        m, g, n = self.method, self.geometry, self.rows.longest
        seen = reference.visible(self.lengths, n)[:, None]
        base, scanned = self._base(q, scale, n)
        codes = unpack_planes(self.codes[:, :, :n], ESTIMATE_BITS)
        estimated_keys = dequantize_minmax(codes, self.minimum[:, :, :n], self.code_step[:, :, :n])
        estimate = reference.key_scores(q, estimated_keys, scale).masked_fill(~base, -torch.inf)
        threshold = top_p_threshold(estimate, m.p)
        if m.search_start == "first_token":
            threshold = torch.minimum(threshold, estimate[..., 0])
        selected = at_least(estimate, threshold)
        attended = reference.attend_union(selected, g.num_kv_heads) if m.select_per == "group" else selected
        return Selection(
            lengths=self.lengths,
            selected=selected,
            attended=attended,
            estimate=estimate.masked_fill(~(base & seen), torch.nan),
            scores=reference.key_scores(q, self.keys[:, :, :n], scale),
            scanned=scanned,
            estimated=reference.union_over_group(base, g.num_kv_heads).sum(dim=-1),
        )

    def _base(self, q: Tensor, scale: float, n: int) -> tuple[Tensor, Tensor]:
        """Tokens of the base selection, bool [B, Hq, n], and tokens whose bounds were read, int [B]."""
        m = self.method
        seen = reference.visible(self.lengths, n)[:, None]
        if self.bounds is None:
            return seen.expand(-1, q.shape[1], -1), torch.zeros_like(self.lengths)
        bounds = self.bounds.scores(q, scale, -(-n // m.page_size))
        pages = choose_pages(bounds, self.lengths, m.budget, m.page_size, "eval")
        scanned = scored_tokens(self.lengths, m.budget, m.page_size, "eval")
        return reference.expand_units(pages, m.page_size, n) & seen, scanned

    def bytes_read(self, counts: Counts) -> dict[str, Tensor]:
        """Bounds of ranked pages, 4-bit keys of the base selection, keys and values of what was kept."""
        d = self.geometry.head_dim
        row = d * self.keys.element_size()
        return {
            "page_bounds": counts.scanned * (2 * row / self.method.page_size),
            "estimates": counts.estimated * (d * ESTIMATE_BITS / 8 + 2 * BOUND_DTYPE.itemsize),
            "keys": counts.union * row,
            "values": counts.union * row,
        }

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.twilight import twilight_decode

        return twilight_decode(self, q, scale)
