"""A decode method from outside the package, in one file: every n-th token and the current one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ffd import reference
from ffd.methods import Executor, LayerGeometry, Method, RowState, Selection
from ffd.methods.dense import DenseLayer


@dataclass(frozen=True)
class Strided(Method):
    """Every ``stride``-th token, counted from the current one backwards."""

    name: ClassVar[str] = "strided"
    keep_all_knobs: ClassVar[dict[str, Any]] = {"stride": 1}

    stride: int = 3
    """Distance between kept tokens."""

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> StridedLayer:
        return StridedLayer(self, geometry, rows, executor)


class StridedLayer(DenseLayer):
    """Dense storage, read in strides."""

    def __init__(self, method: Strided, geometry: LayerGeometry, rows: RowState, executor: Executor) -> None:
        super().__init__(geometry, rows, executor)
        self.stride = method.stride

    def kept(self, num_tokens: int) -> Tensor:
        back = self.lengths[:, None] - 1 - torch.arange(num_tokens, device=self.lengths.device)
        return (back >= 0) & (back % self.stride == 0)

    def select(self, q: Tensor, scale: float) -> Selection:
        n = int(self.lengths.max())
        scores = reference.key_scores(q, self.keys[:, :, :n], scale)
        kept = self.kept(n)[:, None].expand_as(scores)
        estimate = torch.full_like(scores, torch.nan)
        return Selection(self.lengths, kept, kept, estimate, scores, scanned=torch.zeros_like(self.lengths))

    def _decode_fused(self, q: Tensor, scale: float) -> Tensor:
        from ffd.kernels.attend import attend_mask

        return attend_mask(self, q, scale, self.kept(self.geometry.capacity))
