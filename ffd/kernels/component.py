"""Decode of a component point: the same scan, selection and attention kernels, with or without scores in memory.

Decoupled, five launches or more: score every token into memory, reduce the scores to sub-blocks, select, gather
and attend, combine the splits. Fused, three and what the rule needs: the scan reduces on the way, and attention
compares with a margin itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ffd.kernels.attend import attend_kept
from ffd.kernels.scores import score_rows
from ffd.kernels.thresholds import Threshold, bisect_top_p, radix_top_k
from ffd.kernels.units import reduce_rows

if TYPE_CHECKING:
    from ffd.methods.component import ComponentLayer


def component_decode(layer: ComponentLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to what the layer's rule keeps: q [B, Hq, d] -> [B, Hq, d]; adds one step to the ledger."""
    q = q.contiguous()
    m, decoupled = layer.method, layer.method.path == "decoupled"
    pool, mass = m.select == "topk", m.select == "topp"
    near = (m.n_sink, m.n_local) if m.select == "topdelta" else None
    scan = score_rows(
        q, layer.keys, layer.lengths, scale, thumbnails=layer.thumbnails, near=near,
        **({"store_tokens": True} if decoupled else {"unit": m.unit, "pool": pool, "mass": mass}),
    )  # fmt: skip
    units = scan
    if decoupled:
        units = reduce_rows(scan.tokens, layer.lengths, layer.keys.shape[1], unit=m.unit, pool=pool, mass=mass)
    if m.select == "topk":
        threshold = radix_top_k(units.units, layer.lengths, layer.unit_budget, m.unit)
    elif m.select == "topp":
        threshold = bisect_top_p(units.units, layer.lengths, units.maxima, m.p, m.unit)
    else:
        # Decoupled, a launch of its own finds the pseudo-maximum.
        threshold = Threshold(scan.maxima.amax(dim=-1) if decoupled else scan.maxima, margins=layer.delta_nats)
    return attend_kept(
        layer,
        q,
        scale,
        units.units,
        threshold,
        None if layer.thumbnails else layer.lengths,
        unit=m.unit,
        union=True,
        forced=m.block_size,
    )
