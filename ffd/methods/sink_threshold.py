"""Sink threshold: keep the tokens (or units) whose score is within a margin of the first token's.

The closest prior rule to FFD's pseudo-maximum: an element-wise threshold relative to token 0 that
stands undocumented in Twilight's code (github.com/tsinghua-ideal/Twilight). It needs no statistics
of the row at all, and is right only where token 0 is an attention sink. Scores are exact here.
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
class SinkThreshold(ExactScoreMethod):
    """Keep what is within delta of the first token's score."""

    name: ClassVar[str] = "sink_threshold"
    search_knob: ClassVar[SearchKnob] = SearchKnob("delta", 0.0, 32.0)
    keep_all_knobs: ClassVar[dict[str, Any]] = {"delta": torch.inf}
    small_knobs: ClassVar[dict[str, Any]] = {"delta": 1.0}

    delta: float = 7.0
    """Margin below the first token's score, natural units; infinity keeps everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.delta, (int, float)) and self.delta >= 0, "delta", self.delta, "a number >= 0")

    @property
    def margin(self) -> float:
        """The rule's own."""
        return float(self.delta)

    def pseudo_max(self, units: Tensor, scores: Tensor) -> Tensor:
        """Token 0's score, which the rule takes for the row's maximum."""
        return scores[..., 0]

    def keep_units(self, units: Tensor, scores: Tensor, lengths: Tensor) -> Tensor:
        """Keep units whose best token is within the margin of token 0."""
        return at_least(units, self.pseudo_max(units, scores) - self.delta)

    def find_threshold(self, exact: Scores, lengths: Tensor) -> Threshold:
        """Token 0's score less delta, on the device."""
        from ffd.kernels.thresholds import below_first

        return below_first(exact.tokens, self.delta)
