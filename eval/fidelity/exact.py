"""Exact attention of one decode step of one layer, what a method's step is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ffd.reference import visible


@dataclass(frozen=True)
class ExactStep:
    """Dense attention of one step: the yardstick."""

    scores: Tensor
    """float32 [B, Hq, N], natural units."""
    lengths: Tensor
    """int [B]."""

    @cached_property
    def visible(self) -> Tensor:
        """Tokens each row holds: bool [B, 1, N]."""
        return visible(self.lengths, self.scores.shape[-1])[:, None]

    @cached_property
    def masked(self) -> Tensor:
        """float32 [B, Hq, N]: scores, -inf beyond the row's length."""
        return self.scores.masked_fill(~self.visible, -torch.inf)

    @cached_property
    def precise(self) -> Tensor:
        """float64 of `masked`."""
        return self.masked.double()

    @cached_property
    def descending(self) -> tuple[Tensor, Tensor]:
        """Scores in descending order and their positions, ties in order of position; each [B, Hq, N]."""
        return torch.sort(self.masked, dim=-1, descending=True, stable=True)

    @property
    def maximum(self) -> Tensor:
        """float32 [B, Hq]."""
        return self.descending[0][..., 0]

    @cached_property
    def logsumexp(self) -> Tensor:
        """float64 [B, Hq]."""
        return torch.logsumexp(self.precise, dim=-1)

    @cached_property
    def probabilities(self) -> Tensor:
        """float64 [B, Hq, N]."""
        return torch.exp(self.precise - self.logsumexp[..., None])

    def near(self, delta: float | Tensor) -> Tensor:
        """Visible tokens within ``delta`` nats of the maximum: bool [B, Hq, N]."""
        return (self.masked >= (self.maximum - delta)[..., None]) & self.visible

    def holding(self, mass: float) -> Tensor:
        """Size of the smallest set with this share of the mass: int64 [B, Hq]."""
        cumulative = self.probabilities.gather(-1, self.descending[1]).cumsum(dim=-1)
        return ((cumulative < mass).sum(dim=-1) + 1).minimum(self.lengths[:, None])
