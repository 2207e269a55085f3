"""Decode by a rule over exact scores, four launches: score every key, find the threshold, attend, combine the splits.

Scores stay in memory, so that attending reads values alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ffd.kernels.attend import attend_kept
from ffd.kernels.scores import score_rows

if TYPE_CHECKING:
    from ffd.oracle import ExactScoreLayer


def exact_score_decode(layer: ExactScoreLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to what the layer's rule keeps: q [B, Hq, d] -> [B, Hq, d]; adds one step to the ledger."""
    q = q.contiguous()
    m = layer.method
    scores = score_rows(
        q, layer.keys, layer.lengths, scale, unit=m.unit, pool=m.shares_list, mass=m.weighs_mass, store_tokens=True
    )
    return attend_kept(
        layer,
        q,
        scale,
        scores.units,
        m.find_threshold(scores, layer.lengths),
        layer.lengths,
        unit=m.unit,
        union=m.select_per == "group",
        forced=m.unit if m.force_local else 0,
        tokens=scores.tokens,
    )
