"""The ledger of all layers, read once from the device and summed into the figures that a run reports."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
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

    @property
    def keep_head(self) -> float | None:
        """Share of the visible tokens that a query head's rule selected, mean over heads; None without a step."""
        return _ratio(fmean(self.selected), self.context)

    @property
    def keep_io(self) -> float | None:
        """Share of the visible tokens that were loaded, mean over kv heads; None without a step."""
        return _ratio(fmean(self.union), self.context)

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes read over those of dense attention; None without a step."""
        return _ratio(sum(self.bytes_read.values()), self.dense_bytes)

    def __str__(self) -> str:
        path = "sparse" if self.sparse else "dense by configuration"
        return f"layer {self.layer}: {_kept(self)} · {self.steps} steps {path}"


@dataclass(frozen=True, repr=False)
class LedgerReport:
    """Counts of all layers. The tail, sinks and local tokens count as selected; prefill does not count.

    Printed it is a summary; ``layers`` has the counts and ``totals()`` all of them, ready for JSON.
    """

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

    @property
    def keep_head(self) -> float | None:
        """Share of the visible tokens that a query head's rule selected, all layers; None without a step."""
        selected = sum(fmean(layer.selected) for layer in self.layers)
        return _ratio(selected + self.sliding_context, self._context)

    @property
    def keep_io(self) -> float | None:
        """Share of the visible tokens that were loaded, all layers; None without a step."""
        union = sum(fmean(layer.union) for layer in self.layers)
        return _ratio(union + self.sliding_context, self._context)

    @property
    def sparsity(self) -> float | None:
        """Share of the visible tokens that were not loaded: 1 - `keep_io`."""
        return None if self.keep_io is None else 1.0 - self.keep_io

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes read over those of dense attention, full-attention layers only."""
        read = sum(sum(layer.bytes_read.values()) for layer in self.layers)
        return _ratio(read, sum(layer.dense_bytes for layer in self.layers))

    @property
    def _context(self) -> float:
        return sum(layer.context for layer in self.layers) + self.sliding_context

    def __str__(self) -> str:
        done = f"{self.sparse_steps} sparse + {self.dense_steps} dense of {self.expected_steps} decode layer-steps"
        path = done if self.complete else f"{done}, INCOMPLETE: some did not take the path they were configured for"
        return f"sparsity {_figure(self.sparsity)} · {_kept(self)}\npath: {path}"

    __repr__ = __str__

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


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _kept(found: LayerReport | LedgerReport) -> str:
    return (
        f"kept {_figure(found.keep_io)} of tokens loaded per kv head, {_figure(found.keep_head)} selected per query "
        f"head · bytes {_figure(found.bytes_ratio)} of dense"
    )


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
