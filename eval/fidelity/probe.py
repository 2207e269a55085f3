"""The callable that an engine calls at probed decode steps."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from eval.fidelity.accumulate import FidelityState
from eval.fidelity.layer_step import LayerStep, compare
from eval.fidelity.metrics import Observation
from ffd.cache import DecodeHandle

BYTES_AT_ONCE = 4 << 30
"""Working memory of the layers that are compared together, of which there is at least one: a step costs launches
more than arithmetic."""


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
        self.start()

    def start(self) -> None:
        """Forget what was observed."""
        self._state = FidelityState(self.unit)
        self._waiting: list[LayerStep] = []
        """Layers of the current step that were not compared yet."""
        self._observed: list[dict[str, Observation]] = []
        """Layers before them that were compared but not added yet: a step costs one addition."""
        self._first, self._next = 0, -1
        """Rows of the state for the first of all these layers, and for the one after them; -1 where there are none."""
        self._active = torch.empty(0, dtype=torch.bool)
        """bool [B]: rows that decode in the current step."""

    @torch.inference_mode()
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
        position = layers.index(handle.layer_idx)
        if position != self._next:
            self._add()
            self._first, self._active = position, handle.cache.rows.active.bool()
        step = LayerStep(handle.storage, handle.shadow, q, scale, out)
        together = [*self._waiting, step]
        if step.kind != together[0].kind or sum(layer.working_bytes for layer in together) > BYTES_AT_ONCE:
            self._compare()
        self._waiting.append(step)
        self._next = position + 1
        if self._next == len(layers):
            self._add()

    def _add(self) -> None:
        """Bring the current step, as far as its layers were seen, into the state."""
        self._compare()
        if self._observed:
            self._state.add(self._first, self._observed, self._active)
        self._observed, self._next = [], -1

    def _compare(self) -> None:
        steps, self._waiting = self._waiting, []
        if not steps:
            return
        try:
            self._observed.append(compare(steps, self.unit))
        except RuntimeError as error:
            if len(steps) == 1:
                raise
            storage, reason = type(steps[0].storage).__name__, str(error).partition("\n")[0]
            warnings.warn(f"{storage}: layers are compared one by one, which takes longer ({reason})", stacklevel=2)
            self._observed.extend(compare([step], self.unit) for step in steps)
