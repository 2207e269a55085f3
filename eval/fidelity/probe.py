"""The callable that an engine calls at probed decode steps."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.fidelity.accumulate import FidelityState
from eval.fidelity.metrics import ExactStep, Observation, observe, output_errors
from ffd.cache import DecodeHandle
from ffd.methods import MethodLayer


class FidelityProbe:
    """Compares probed decode steps with exact attention of the same query over the same keys.

    Give it to ``ffd.Engine(probe=...)``, and take a state per sample:

    >>> probe.start()  # doctest: +SKIP
    >>> engine.generate(...)  # doctest: +SKIP
    >>> state = state.merge(probe.take())  # doctest: +SKIP

    Layers that are dense by configuration are not observed, and neither are rows that have finished.

    Parameters
    ----------
    unit
        Tokens per page of the page-level Spearman correlation: the method's own block or page size.
    """

    def __init__(self, unit: int = 16) -> None:
        if unit < 1:
            raise ValueError(f"unit={unit}: expected a number of tokens >= 1")
        self.unit = unit
        self._state = FidelityState(unit)

    def start(self) -> None:
        """Forget what was observed."""
        self._state = FidelityState(self.unit)

    def take(self) -> FidelityState:
        """What was observed since `start`, on the host, and start anew."""
        state = self._state.to("cpu")
        self.start()
        return state

    @torch.inference_mode()
    def __call__(self, handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        """Observe one layer after its decode step; see `ffd.cache.Probe`.

        Raises
        ------
        ValueError
            If the cache keeps no exact keys and values beside the method's storage.
        """
        if handle.shadow is None:
            raise ValueError("shadow=False: fidelity needs a cache that keeps exact keys and values (shadow=True)")
        layers = tuple(h.layer_idx for h in handle.cache.method_layers)
        if handle.layer_idx not in layers:
            self._state.dense_calls += 1
            return
        if not self._state.layers:
            dense_calls = self._state.dense_calls
            self._state = FidelityState(self.unit, layers, q.shape[1], dense_calls, q.device)
        active = handle.cache.rows.active.bool()
        observed = observe_layer(handle.storage, handle.shadow, q, scale, out, self.unit)
        self._state.add(layers.index(handle.layer_idx), observed, active)


def observe_layer(
    storage: MethodLayer, dense: MethodLayer, q: Tensor, scale: float, out: Tensor | None, unit: int
) -> dict[str, Observation]:
    """All metrics of a storage's last decode step.

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
    unit
        Tokens per page of the page-level Spearman correlation.
    """
    reference, selection = dense.select(q, scale), storage.select(q, scale)
    exact = ExactStep(reference.scores, reference.lengths)
    observed = observe(exact, selection, storage.geometry.num_kv_heads, unit)
    if out is not None:
        n = exact.scores.shape[-1]
        observed |= output_errors(exact, dense.stored_values(n), selection, storage.stored_values(n), out)
    return observed
