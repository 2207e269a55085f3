"""Device-side counters of what a layer's decode steps really read: the only source of a sparsity figure.

The kernel of a method, or its reference executor, adds to these counters; nothing derives them from
a configured budget. Counting happens on the device, inside captured graphs too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, CONTEXT, SCANNED, ESTIMATED, UNION, FIRST_HEAD = range(6)
"""Columns of the counter tensor; per-query-head counts start at ``FIRST_HEAD``."""


@dataclass(frozen=True)
class Counts:
    """Totals of one layer, float64 on the host; entries of finished batch rows are not in them."""

    steps: Tensor
    """[B, Hkv] decode steps taken on the method's path."""
    context: Tensor
    """[B, Hkv] tokens visible, summed over steps: what dense attention would have read."""
    scanned: Tensor
    """[B, Hkv] tokens whose selection metadata (thumbnail, page bounds) were read."""
    estimated: Tensor
    """[B, Hkv] tokens scored by a second, finer estimate (Twilight's 4-bit keys)."""
    union: Tensor
    """[B, Hkv] tokens whose keys and values were loaded for any query head of the group."""
    selected: Tensor
    """[B, Hq] tokens that the head's own rule selected."""


class Ledger:
    """Counters of one layer.

    Parameters
    ----------
    batch_size, num_kv_heads, num_query_heads
        Shape of the layer.
    device
        Where the counters live.
    active
        int32 [B], shared by all layers of a cache: rows with 0 have finished and do not count.
    """

    def __init__(
        self, batch_size: int, num_kv_heads: int, num_query_heads: int, device: torch.device, active: Tensor
    ) -> None:
        columns = FIRST_HEAD + num_query_heads // num_kv_heads
        self.counters = torch.zeros(batch_size, num_kv_heads, columns, dtype=torch.int64, device=device)
        self.active = active

    def record(
        self,
        lengths: Tensor,
        selected: Tensor,
        union: Tensor,
        scanned: Tensor,
        estimated: Tensor | None = None,
    ) -> None:
        """Add one step, from the reference executor.

        Parameters
        ----------
        lengths
            int [B], tokens visible.
        selected
            bool [B, Hq, N], each query head's own choice.
        union
            bool [B, Hkv, N], what was loaded.
        scanned, estimated
            int, broadcastable to [B, Hkv]: tokens whose metadata or second estimate were read.
        """
        b, hkv, _ = self.counters.shape
        step = torch.zeros_like(self.counters)
        step[..., STEPS] = 1
        step[..., CONTEXT] = lengths[:, None]
        step[..., SCANNED] = scanned
        step[..., ESTIMATED] = 0 if estimated is None else estimated
        step[..., UNION] = union.sum(dim=-1)
        step[..., FIRST_HEAD:] = selected.sum(dim=-1).view(b, hkv, -1)
        self.counters += step * self.active[:, None, None]

    def counts(self) -> Counts:
        """Read the totals; synchronises with the device."""
        c = self.counters.to("cpu", torch.float64)
        return Counts(
            steps=c[..., STEPS],
            context=c[..., CONTEXT],
            scanned=c[..., SCANNED],
            estimated=c[..., ESTIMATED],
            union=c[..., UNION],
            selected=c[..., FIRST_HEAD:].flatten(1),
        )

    def reset(self) -> None:
        """Set every counter to zero."""
        self.counters.zero_()
