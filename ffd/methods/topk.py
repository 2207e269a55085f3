"""Exact top-k: the tokens (or units) with the largest true scores, a fixed number of them.

An oracle: it reads every key, so it bounds what a budgeted selector such as Quest can reach.
Ties go to the smaller index. Rule and granularities: ``docs/methods/topk.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ffd.methods import SearchKnob, require
from ffd.oracle import ExactScoreMethod
from ffd.selection import top_k

if TYPE_CHECKING:
    from ffd.kernels.thresholds import Threshold
    from ffd.kernels.units import Scores


@dataclass(frozen=True)
class TopK(ExactScoreMethod):
    """Keep a budget of tokens, or a fraction of the context."""

    name: ClassVar[str] = "topk"
    search_knob: ClassVar[SearchKnob] = SearchKnob("token_budget", 1, math.inf)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"token_budget": 1 << 30}
    small_knobs: ClassVar[dict[str, Any]] = {"token_budget": 24}
    pools_group: ClassVar[bool] = True

    token_budget: int = 1024
    """Tokens kept per query head (or group); in whole units, at least one."""
    keep_fraction: float | None = None
    """Fraction of the context kept instead of a fixed budget, rounded up to whole units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.token_budget, int) and self.token_budget >= 1,
            "token_budget",
            self.token_budget,
            "an integer >= 1",
        )
        require(
            self.keep_fraction is None or 0.0 < self.keep_fraction <= 1.0,
            "keep_fraction",
            self.keep_fraction,
            "a number in (0, 1], or none",
        )

    def num_units(self, lengths: Tensor) -> Tensor:
        """Units to keep in rows of these lengths: int [B] -> int32 [B]."""
        if self.keep_fraction is None:
            return torch.full_like(lengths, max(1, self.token_budget // self.unit))
        units = (lengths + self.unit - 1) // self.unit
        return (units.double() * self.keep_fraction).ceil().int()

    def keep_units(self, units: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        """Keep the largest."""
        return top_k(units, self.num_units(lengths))

    def find_threshold(self, exact: Scores, lengths: Tensor) -> Threshold:
        """Radix selection on the device."""
        from ffd.kernels.thresholds import radix_top_k

        return radix_top_k(exact.units, lengths, self.num_units(lengths), self.unit)
