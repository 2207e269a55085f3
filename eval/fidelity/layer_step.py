"""What one decode step of one layer leaves to compare, and the comparison of several such layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eval.fidelity.exact import ExactStep
from eval.fidelity.metrics import Observation, observe, output_errors
from eval.fidelity.stacked import StackedLayers, signature
from ffd.methods import MethodLayer


@dataclass(frozen=True)
class LayerStep:
    """A decode step of a method beside dense attention; to be compared before the storages' next step."""

    storage: MethodLayer
    dense: MethodLayer
    """A dense layer that holds the same tokens."""
    q: Tensor
    """[B, Hq, d]."""
    scale: float
    """Softmax scale."""
    out: Tensor | None
    """[B, Hq, d], output of `storage`; None where values are not known, which leaves its metrics out."""

    @cached_property
    def kind(self) -> Any:
        """Steps of equal kind can be compared together."""
        parts = (signature(self.storage), signature(self.dense))
        return parts, self.q.shape, self.scale, self.out is None

    @property
    def working_bytes(self) -> int:
        """About what a comparison needs in memory for this layer, as measured with FFD at 32K."""
        g = self.storage.geometry
        scores = 96 * g.num_query_heads  # a dozen float64 for each
        keys_and_values = 14 * g.num_kv_heads * g.head_dim  # stacked copies, and two in float32
        return g.batch_size * g.capacity * (scores + keys_and_values)


def compare(steps: Sequence[LayerStep], unit: int) -> dict[str, Observation]:
    """All metrics of one decode step.

    Parameters
    ----------
    steps
        Layers of one model, method and step, all of one kind.
    unit
        Tokens per page of the page-level Spearman correlation.

    Returns
    -------
    dict
        Observations by metric name: [layers * B, Hq], the rows of one layer after those of the layer before.

    Raises
    ------
    RuntimeError
        If the method's selection cannot be made in several layers at once, see `StackedLayers`.
    """
    stored, dense = (StackedLayers(storages) for storages in zip(*((s.storage, s.dense) for s in steps), strict=True))
    q, scale = torch.stack([step.q for step in steps]), steps[0].scale
    selection, scores = stored.select(q, scale), dense.select(q, scale).scores
    exact = ExactStep(scores, selection.lengths)
    observed = observe(exact, selection, steps[0].storage.geometry.num_kv_heads, unit)
    outputs = [step.out for step in steps if step.out is not None]
    if outputs:
        values = dense.stored_values(scores.shape[-1])
        as_stored = values if steps[0].storage.values_exact else stored.stored_values(scores.shape[-1])
        observed |= output_errors(exact, values, selection, as_stored, torch.cat(outputs))
    return observed
