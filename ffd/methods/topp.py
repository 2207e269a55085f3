"""Exact top-p: the smallest set of tokens (or units) whose true softmax mass reaches p.

An oracle: it bounds Twilight, which applies the same rule to estimated scores. A unit weighs the sum
of its tokens' probabilities. Units that tie with the last one kept are kept as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ffd.methods import SearchKnob, require
from ffd.oracle import ExactScoreMethod
from ffd.selection import at_least, top_p_threshold

if TYPE_CHECKING:
    from ffd.kernels.thresholds import Threshold
    from ffd.kernels.units import Scores


@dataclass(frozen=True)
class TopP(ExactScoreMethod):
    """Keep the smallest set with mass p."""

    name: ClassVar[str] = "topp"
    search_knob: ClassVar[SearchKnob] = SearchKnob("p", 0.01, 1.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"p": 1.0}
    small_knobs: ClassVar[dict[str, Any]] = {"p": 0.8}
    weighs_mass: ClassVar[bool] = True

    p: float = 0.9
    """Softmax mass to keep, in (0, 1]; 1 keeps everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.p, (int, float)) and 0.0 < self.p <= 1.0, "p", self.p, "a number in (0, 1]")

    def keep_units(self, units: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        """Keep units at or above the crossing one."""
        return at_least(units, top_p_threshold(units, self.p))

    def find_threshold(self, exact: Scores, lengths: Tensor) -> Threshold:
        """Bisection on the device."""
        from ffd.kernels.thresholds import bisect_top_p

        return bisect_top_p(exact.units, lengths, exact.maxima, self.p, self.unit)
