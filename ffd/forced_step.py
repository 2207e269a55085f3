"""Decode steps of engines that are fed the same token: two in one forward of their model where they can be paired."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ffd.cache import DecodeHandle, Probe
from ffd.continuation import Continuation
from ffd.engine import Engine
from ffd.graph import CapturedStep
from ffd.paired_cache import PairedCache
from ffd.pairing import fusion_of, why_not_paired


def forced_steps(engines: Sequence[Engine]) -> list[ForcedSteps]:
    """One after the other, or two at once; captures what is not captured yet, so that no prompt may be under way.

    Parameters
    ----------
    engines
        One, or two different ones on one model.
    """
    if len(engines) == 2 and why_not_paired(*engines) is None:
        return [ForcedSteps(engines)]
    return [ForcedSteps([engine]) for engine in engines]


class ForcedSteps:
    """Decode steps of one engine, or of two whose rows stand one below the other."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = tuple(engines)
        lead, *others = engines
        self._pair = PairedCache(lead.cache, *(other.cache for other in others)) if others else None
        self._fusion = fusion_of(lead, *others) if others else lead._fusion
        self._captured: _Captured | None = None
        if lead.eager_reason is None:
            kept = _captured.setdefault(lead, WeakKeyDictionary())
            if engines[-1] not in kept:
                kept[engines[-1]] = _Captured(self)
            self._captured = kept[engines[-1]]

    def run(self, index: int, continuation: Continuation, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Decode step ``index``, fed with what has followed.

        Parameters
        ----------
        index
            Step after the prompt, from 0.
        continuation
            Its token, position and active rows are every engine's.
        padding
            bool [B, T] of the prompts, or None: see `ffd.prompts.left_padded`.

        Returns
        -------
        tuple[Tensor, ...]
            Logits [B, vocab] of each engine.
        """
        for engine in self.engines:
            engine.cache.rows.active.copy_(continuation.active)
        probes = [engine.probe if index % engine.probe_every == 0 else None for engine in self.engines]
        if self._captured is not None:
            logits = self._captured.run(continuation.token, continuation.position, probes)
        else:
            logits = self._eager(index, continuation, padding, probes)
        return logits.chunk(len(self.engines))

    def forward(self, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens of all rows at their positions, [rows, 1] both; logits [rows, vocab]."""
        with self._fusion.active():
            return self.engines[0]._forward(token, position, mask, self._pair)

    def _eager(
        self, index: int, continuation: Continuation, padding: Tensor | None, probes: Sequence[Probe | None]
    ) -> Tensor:
        mask = None
        # Only stock sliding-window layers look at a mask while decoding: ours know their rows' lengths.
        if padding is not None and self.engines[0].cache.sliding_layers:
            mask = F.pad(padding, (0, index + 1), value=True)
        token, position = (x.repeat(len(self.engines), 1) for x in (continuation.token, continuation.position))
        try:
            for engine, probe in zip(self.engines, probes, strict=True):
                engine.cache.probe = probe
            return self.forward(token, position, mask)
        finally:
            for engine in self.engines:
                engine.cache.probe = None


class _Captured:
    """A captured decode step that is fed its token; it holds no engine, whose end would otherwise never come."""

    def __init__(self, steps: ForcedSteps) -> None:
        engines, rows = steps.engines, steps.engines[0].rows
        self._caches = [engine.cache for engine in engines]
        self._token = torch.zeros(len(engines) * rows, 1, dtype=torch.long, device=engines[0].device)
        self._position = torch.ones_like(self._token)
        self._attended: list[list[tuple[DecodeHandle, Tensor, float, Tensor]]] = [[] for _ in engines]
        """What a probe of each layer sees. Holding a graph's tensors keeps their memory from serving another layer."""

        def step() -> None:
            for seen in self._attended:
                seen.clear()
            self._logits = steps.forward(self._token, self._position, None)

        for engine, seen in zip(engines, self._attended, strict=True):
            engine._begin([1] * rows, (), 0)  # a disposable prompt, as for the engine's own capture
            engine._prefill([[0]] * rows, [1] * rows)
            if engine.probe is not None:
                engine.cache.probe = _noting(seen)
        try:
            self._graph = CapturedStep(step)
        finally:
            for cache in self._caches:
                cache.probe = None

    def run(self, token: Tensor, position: Tensor, probes: Sequence[Probe | None]) -> Tensor:
        """Feed every engine tokens [B, 1] at their positions [B, 1]; logits [engines * B, vocab]."""
        for fed, static in ((token, self._token), (position, self._position)):
            static.unflatten(0, (len(self._caches), -1)).copy_(fed)
        self._graph.replay()
        for cache in self._caches:
            cache.note_replayed_step()
        for probe, attended in zip(probes, self._attended, strict=True):
            if probe is not None:
                for seen in attended:
                    probe(*seen)
        return self._logits.clone()


def _noting(seen: list[tuple[DecodeHandle, Tensor, float, Tensor]]) -> Probe:
    return lambda *layer: seen.append(layer)


_captured: WeakKeyDictionary[Engine, WeakKeyDictionary[Engine, _Captured]] = WeakKeyDictionary()
"""By the first and the last engine that are stepped together."""
