"""The ledger of all layers, read once from the device and summed into the figures that a run reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ffd.cache import SparseCache
    from ffd.methods import MethodLayer


@dataclass(frozen=True)
class LayerReport:
    """Counts of one full-attention layer, summed over batch rows and steps."""

    layer: int
    sparse: bool
    """Whether the layer decodes by the method; False for layers that are dense by configuration."""
    steps: int
    """Decode steps the layer's kernel counted, summed over rows."""
    context: float
    """Tokens visible, summed over steps: the denominator of every ratio."""
    selected: list[float]
    """Per query head: tokens its own rule selected."""
    union: list[float]
    """Per kv head: tokens loaded for any query head of the group."""
    bytes_read: dict[str, float]
    """Bytes by stage, summed over kv heads."""
    dense_bytes: float
    """Bytes dense attention in the model's dtype would have read."""


@dataclass(frozen=True)
class LedgerReport:
    """Counts of all layers. The tail, sinks and local tokens count as selected; prefill does not count."""

    layers: tuple[LayerReport, ...]
    sliding_layers: int
    expected_steps: int
    """Layer-steps that must have happened: decode steps times all layers."""
    sliding_steps: int
    """Layer-steps of sliding-window layers, dense by configuration."""
    sliding_context: int
    """Tokens those layers attended to: their windows, read whole."""

    @property
    def sparse_steps(self) -> int:
        """Layer-steps on the method's own path."""
        return sum(layer.steps for layer in self.layers if layer.sparse)

    @property
    def dense_steps(self) -> int:
        """Layer-steps that are dense by configuration (skipped, sliding-window, or method dense)."""
        return sum(layer.steps for layer in self.layers if not layer.sparse) + self.sliding_steps

    @property
    def complete(self) -> bool:
        """Whether every layer-step took the path it was configured for."""
        return self.sparse_steps + self.dense_steps == self.expected_steps

    def totals(self) -> dict[str, Any]:
        """Sums that runs add up: JSON-ready, one row per layer with per-head lists."""
        return {
            "sparse_steps": self.sparse_steps,
            "dense_steps": self.dense_steps,
            "expected_steps": self.expected_steps,
            "sliding_layers": self.sliding_layers,
            "sliding_context": self.sliding_context,
            "layers": [vars(layer) for layer in self.layers],
        }


def read_ledger(cache: SparseCache, decode_steps: int) -> LedgerReport:
    """Read the counters of a cache's layers; synchronises with the device.

    Parameters
    ----------
    cache
        After decoding.
    decode_steps
        Decode steps that count, summed over rows: new tokens less one each.
    """
    sparse = {handle.layer_idx for handle in cache.method_layers}

    layers = [layer_report(h.layer_idx, h.layer_idx in sparse, h.storage) for h in cache.handles]
    return LedgerReport(
        layers=tuple(layers),
        sliding_layers=cache.sliding_layers,
        expected_steps=decode_steps * len(cache.layers),
        sliding_steps=decode_steps * cache.sliding_layers,
        sliding_context=cache.sliding_context,
    )


def layer_report(layer: int, sparse: bool, storage: MethodLayer) -> LayerReport:
    """Read the counters of one layer; synchronises with the device.

    Parameters
    ----------
    layer
        The model's layer.
    sparse
        Whether it decodes by the method.
    storage
        After decoding.
    """
    counts = storage.ledger.counts()

    def total(x: Tensor) -> float:
        return float(x.sum())

    return LayerReport(
        layer=layer,
        sparse=sparse,
        steps=int(counts.steps[:, 0].sum()),
        context=total(counts.context[:, 0]),
        selected=counts.selected.sum(dim=0).tolist(),
        union=counts.union.sum(dim=0).tolist(),
        bytes_read={stage: total(x) for stage, x in storage.bytes_read(counts).items()},
        dense_bytes=total(storage.dense_bytes(counts)),
    )
