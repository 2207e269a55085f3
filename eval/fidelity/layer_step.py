"""What one decode step of one layer leaves to compare, and the comparison of several such layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.fidelity.exact import ExactStep
from eval.fidelity.metrics import Observation, observe, output_errors
from ffd.methods import MethodLayer
from ffd.methods.base import Selection


@dataclass(frozen=True)
class LayerStep:
    """A method's selection beside dense attention of the same query; valid until the storages' next step."""

    scores: Tensor
    """float32 [B, Hq, N], exact, natural units."""
    selection: Selection
    num_kv_heads: int
    outputs: tuple[Tensor, Tensor, Tensor] | None
    """Exact values [B, Hkv, N, d], values as the method stores them, and its output [B, Hq, d]; None where values
    are not known."""


def look(storage: MethodLayer, dense: MethodLayer, q: Tensor, scale: float, out: Tensor | None) -> LayerStep:
    """Take from the storages what `compare` needs of their last decode step.

    Parameters
    ----------
    storage, dense
        The method's layer, and a dense one that holds the same tokens.
    q
        [B, Hq, d].
    scale
        Softmax scale.
    out
        [B, Hq, d], output of `storage`; None where values are not known, which leaves its metrics out.
    """
    reference, selection = dense.select(q, scale), storage.select(q, scale)
    n = reference.scores.shape[-1]
    outputs = None if out is None else (dense.stored_values(n), storage.stored_values(n), out)
    return LayerStep(reference.scores, selection, storage.geometry.num_kv_heads, outputs)


def compare(steps: Sequence[LayerStep], unit: int) -> dict[str, Observation]:
    """All metrics of one decode step.

    Parameters
    ----------
    steps
        Layers of one model, method and step.
    unit
        Tokens per page of the page-level Spearman correlation.

    Returns
    -------
    dict
        Observations by metric name: [layers * B, Hq], the rows of one layer after those of the layer before.
    """
    selection = _joined([step.selection for step in steps])
    exact = ExactStep(_cat([step.scores for step in steps]), selection.lengths)
    observed = observe(exact, selection, steps[0].num_kv_heads, unit)
    outputs = [step.outputs for step in steps if step.outputs is not None]
    if outputs:
        values, stored, out = (_cat(parts) for parts in zip(*outputs, strict=True))
        observed |= output_errors(exact, values, selection, stored, out)
    return observed


def _joined(selections: Sequence[Selection]) -> Selection:
    """Rows of all selections one after the other; what metrics do not look at is left out."""
    if len(selections) == 1:
        return selections[0]
    rows = selections[0].selected.shape[:2]

    def optional(name: str) -> Tensor | None:
        parts = [getattr(selection, name) for selection in selections]
        return None if parts[0] is None else _cat([part.expand(rows) for part in parts])

    names = ("lengths", "selected", "attended", "estimate", "scores", "scanned")
    joined = {name: _cat([getattr(selection, name) for selection in selections]) for name in names}
    return Selection(
        **joined, pseudo_max=optional("pseudo_max"), margin=optional("margin"), score_shift=optional("score_shift")
    )


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
