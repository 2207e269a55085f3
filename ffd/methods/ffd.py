"""FFD: scan a 2-bit copy of the keys, keep the blocks within delta of a pseudo-maximum, attend to those.

Rule ("Faster Than Flash", arXiv:2609.00097, section 3), per kv head with G query heads:

1. Keys of complete blocks are stored as 2-bit thumbnails with one half step per block and channel,
   plus a residual; the block of the current token, the tail, is used in the model's dtype, also in
   the step that completes it.
2. Every query head scores all thumbnails; its pseudo-maximum is the largest score among the first
   ``n_sink`` and the last ``n_local`` tokens: refined by the residual, the tail's exact.
3. A sub-block passes for a head if its largest score is at least ``pseudo_max - delta``; of sink and
   local tokens the refined score counts too, so that the pseudo-maximum's own block passes. It is loaded if
   it passes for any head of the group, and then all of them attend to it (``select_per=head``: only those
   for which it passes). The tail, and so the current token, is always kept (a head's
   thumbnails may all miss the threshold).
4. Kept scores are the scan's plus the residual's: nothing is scored twice.

Published settings are the defaults. What the official code does otherwise is behind switches
(``residual=e4m3``, ``delta_unit=log2``, ``pseudo_max=scan``) or documented in ``docs/methods/ffd.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ffd.ffd_layer import FFDLayer
from ffd.methods import Executor, LayerGeometry, Method, RowState, SearchKnob, require
from ffd.quantization import LEVELS, RESIDUALS, Levels, Residual
from ffd.scan import LOG2_E
from ffd.selection import SELECT_PER


def as_margins(value: Any) -> tuple[tuple[float, ...], ...]:
    """Check margins per layer and head, and make them hashable; raises `KnobError`."""
    accepted = "one row of numbers >= 0 per layer, one number per query head"
    require(isinstance(value, (list, tuple)) and len(value) > 0, "deltas", value, accepted)
    for row in value:
        require(isinstance(row, (list, tuple)) and len(row) > 0, "deltas", row, accepted)
        for delta in row:
            number = isinstance(delta, (int, float)) and not isinstance(delta, bool)
            require(number and delta >= 0, "deltas", delta, accepted)
    return tuple(tuple(float(delta) for delta in row) for row in value)


@dataclass(frozen=True)
class FFD(Method):
    """Top-delta over 2-bit thumbnails."""

    name: ClassVar[str] = "ffd"
    search_knob: ClassVar[SearchKnob] = SearchKnob("delta", 0.0, 32.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"delta": math.inf, "residual": "exact"}
    small_knobs: ClassVar[dict[str, Any]] = {"block_size": 64, "sub_block": 16, "delta": 0.25, "n_sink": 4}

    delta: float = 7.0
    """Margin below the pseudo-maximum, in `delta_unit`; infinity keeps everything."""
    deltas: tuple[tuple[float, ...], ...] | None = None
    """Calibrated margins in place of `delta`: one row per model layer, one number per query head."""
    delta_unit: str = "nat"
    """``nat`` (the paper's text) or ``log2`` (what the official code computes: delta * ln 2 nats)."""
    block_size: int = 128
    """Tokens that share one half step per channel: 64, 128 or 256."""
    sub_block: int | None = None
    """Tokens tested and loaded together; None means `block_size`, as published."""
    residual: Residual = "int8"
    """Refinement of kept keys: int8, e4m3 (official), none, or exact (tests)."""
    levels: Levels = "edge"
    """Placement of the four levels: edge (published) or cell."""
    centre: bool = False
    """Subtract the prompt's mean key per (kv head, channel), which softmax does not see."""
    pseudo_max: str = "refined"
    """Scores of sink and local tokens, in the pseudo-maximum and in the test: refined (the pseudo-maximum is then
    never above the row's maximum but for rounding, which the paper's fail-safe argument needs), or scan (official:
    an attention sink's small key is all quantisation noise, the pseudo-maximum comes out many nats too high and
    blocks that matter are dropped)."""
    select_per: str = "group"
    """``group`` (published): every head attends to what any head of its group keeps; ``head``: to its own."""
    n_sink: int = 128
    """First tokens in the pseudo-maximum."""
    n_local: int = 128
    """Last tokens in the pseudo-maximum, the tail included."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.delta, (int, float)) and not isinstance(self.delta, bool) and self.delta >= 0,
            "delta",
            self.delta,
            "a number >= 0",
        )
        if self.deltas is not None:
            object.__setattr__(self, "deltas", as_margins(self.deltas))
        require(self.delta_unit in ("nat", "log2"), "delta_unit", self.delta_unit, "nat or log2")
        require(
            isinstance(self.block_size, int) and self.block_size in (64, 128, 256),
            "block_size",
            self.block_size,
            "64, 128 or 256 (a power of two)",
        )
        require(
            self.sub_block is None
            or (
                isinstance(self.sub_block, int)
                and self.sub_block in (16, 32, 64, 128, 256)
                and self.sub_block <= self.block_size
            ),
            "sub_block",
            self.sub_block,
            f"16, 32, 64, 128 or 256 (a power of two), at most block_size={self.block_size}",
        )
        require(self.residual in RESIDUALS, "residual", self.residual, "one of " + ", ".join(RESIDUALS))
        require(self.levels in LEVELS, "levels", self.levels, "one of " + ", ".join(LEVELS))
        require(isinstance(self.centre, bool), "centre", self.centre, "true or false")
        require(self.pseudo_max in ("refined", "scan"), "pseudo_max", self.pseudo_max, "refined or scan")
        require(self.select_per in SELECT_PER, "select_per", self.select_per, "head or group")
        require(type(self.n_sink) is int and 0 <= self.n_sink < 2**31, "n_sink", self.n_sink, "an integer >= 0")
        require(type(self.n_local) is int and 1 <= self.n_local < 2**31, "n_local", self.n_local, "an integer >= 1")

    @property
    def nats(self) -> float:
        """Natural-log units per unit of a margin."""
        return 1.0 / LOG2_E if self.delta_unit == "log2" else 1.0

    @property
    def delta_nats(self) -> float:
        """Margin in natural-log units."""
        return self.delta * self.nats

    def margins(self, layer: int, num_query_heads: int) -> tuple[float, ...]:
        """Margin of each query head of a layer, in natural-log units.

        Raises
        ------
        KnobError
            If `deltas` has no row for the layer, or not one number per head.
        """
        if self.deltas is None:
            return (self.delta_nats,) * num_query_heads
        require(
            layer < len(self.deltas), "deltas", f"{len(self.deltas)} rows", f"one for each layer, layer {layer} too"
        )
        row = self.deltas[layer]
        require(
            len(row) == num_query_heads,
            "deltas",
            f"{len(row)} numbers for layer {layer}",
            f"one for each of {num_query_heads} query heads",
        )
        return tuple(delta * self.nats for delta in row)

    @property
    def test_size(self) -> int:
        """Tokens per keep test."""
        return self.sub_block or self.block_size

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> FFDLayer:
        """Allocate thumbnails, residual, values and tail."""
        require(geometry.head_dim % 8 == 0, "head_dim", geometry.head_dim, "a multiple of 8")
        return FFDLayer(self, geometry, rows, executor)
