"""Streaming: attend to the first tokens (attention sinks) and a sliding window.

StreamingLLM (arXiv:2309.17453) as a read pattern: keys keep their own positions, where the original
re-numbers them inside the window, and nothing is evicted, so that memory is dense. It doubles as the
example of a method in one file: storage is inherited, the rule is a mask, and `attend_mask` fuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.methods import Executor, LayerGeometry, Method, RowState, SearchKnob, Selection, require
from ffd.methods.dense import DenseLayer


@dataclass(frozen=True)
class Streaming(Method):
    """Sinks and a window."""

    name: ClassVar[str] = "streaming"
    search_knob: ClassVar[SearchKnob] = SearchKnob("window", 1, math.inf)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"window": 1 << 30}
    small_knobs: ClassVar[dict[str, Any]] = {"n_sink": 2, "window": 21}

    n_sink: int = 4
    """First tokens, always attended."""
    window: int = 1020
    """Last tokens, the current one included."""

    def __post_init__(self) -> None:
        require(isinstance(self.n_sink, int) and self.n_sink >= 0, "n_sink", self.n_sink, "an integer >= 0")
        require(isinstance(self.window, int) and self.window >= 1, "window", self.window, "an integer >= 1")

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> StreamingLayer:
        """Allocate 16-bit keys and values."""
        return StreamingLayer(self, geometry, rows, executor)


class StreamingLayer(DenseLayer):
    """Dense storage, read at the sinks and in the window alone."""

    def __init__(self, method: Streaming, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.method = method

    def kept(self, num_tokens: int) -> Tensor:
        """Tokens the rule keeps, bool [B, num_tokens]."""
        position = torch.arange(num_tokens, device=self.lengths.device)
        n = self.lengths[:, None]
        return ((position < self.method.n_sink) | (position >= n - self.method.window)) & (position < n)

    def select(self, q: Tensor, scale: float) -> Selection:
        """Sinks and window, for every head alike."""
        n = self.rows.longest
        scores = reference.key_scores(q, self.keys[:, :, :n], scale)
        kept = self.kept(n)[:, None].expand_as(scores)
        return Selection(
            lengths=self.lengths,
            selected=kept,
            attended=kept,
            estimate=torch.full_like(scores, torch.nan),
            scores=scores,
            scanned=torch.zeros_like(self.lengths),
        )

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.attend import attend_mask

        return attend_mask(self, q, scale, self.kept(self.geometry.capacity))
