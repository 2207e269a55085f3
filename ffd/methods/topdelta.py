"""Exact top-delta: the tokens (or units) within delta of the true maximum score.

FFD's rule ("Faster Than Flash", arXiv:2609.00097) with exact scores and the true row maximum in
place of the 2-bit scan and the pseudo-maximum: ``{j : s_j >= max s - delta}``, or all tokens with a
probability of at least ``exp(-delta)`` times the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ffd.methods import SearchKnob, require
from ffd.oracle import ExactScoreMethod
from ffd.selection import at_least

if TYPE_CHECKING:
    from ffd.kernels.thresholds import Threshold
    from ffd.kernels.units import Scores


@dataclass(frozen=True)
class TopDelta(ExactScoreMethod):
    """Keep what is within delta of the maximum."""

    name: ClassVar[str] = "topdelta"
    search_knob: ClassVar[SearchKnob] = SearchKnob("delta", 0.0, 32.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"delta": torch.inf}
    small_knobs: ClassVar[dict[str, Any]] = {"delta": 2.0}

    delta: float = 7.0
    """Margin below the maximum, natural units; infinity keeps everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.delta, (int, float)) and self.delta >= 0, "delta", self.delta, "a number >= 0")

    @property
    def margin(self) -> float:
        """The rule's own."""
        return float(self.delta)

    def pseudo_max(self, units: Tensor, scores: Tensor) -> Tensor:
        """The row's true maximum."""
        return units.amax(dim=-1)

    def keep_units(self, units: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        """Keep units whose best token is within the margin."""
        return at_least(units, self.pseudo_max(units, scores) - self.delta)

    def find_threshold(self, exact: Scores, lengths: Tensor) -> Threshold:
        """Row maximum less delta, on the device."""
        from ffd.kernels.thresholds import below_maximum

        return below_maximum(exact.maxima, self.delta)
