"""Teacher forcing: engines fed with the tokens of a continuation, not each with its own choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ffd.cache import DecodeHandle, Probe
from ffd.continuation import Continuation
from ffd.engine import STEPS_PER_STOP_CHECK, Engine
from ffd.graph import CapturedStep
from ffd.methods.dense import DenseLayer
from ffd.prompts import require_room


@torch.inference_mode()
def forced_logits(engine: Engine, prompts: Sequence[Sequence[int]], continuation: Continuation) -> Iterator[Tensor]:
    """Next-token logits along a continuation, given or chosen by these very logits.

    Steps run in a captured graph where the engine's own would; a probe sees the layers of its steps after them.
    Rows that have ended are inactive: neither ledger nor probe counts them. Where the device chooses, it may run a few
    captured steps after all rows have ended before the host sees that; no step is probed after the end.

    Parameters
    ----------
    engine
        Its method decodes every step but the first.
    prompts
        Token ids of each row, without padding; as many rows as the engine's batch size.
    continuation
        Begun anew; has its tokens when the iteration is over.

    Yields
    ------
    Tensor
        [B, vocab] for token 0 of the continuation, from prefill, then for token 1, 2, ... of the longest row, from
        decode steps; the continuation has taken the token already.

    Raises
    ------
    ValueError
        If the rows do not match, or the tokens exceed the capacity.
    """
    for (logits,) in _along((engine,), prompts, continuation):
        yield logits


@torch.inference_mode()
def forced_logits_of_both(
    first: Engine, second: Engine, prompts: Sequence[Sequence[int]], continuation: Continuation
) -> Iterator[tuple[Tensor, Tensor]]:
    """`forced_logits` of two engines on one model, step by step; the prompt is prefilled once.

    Prefill is the same under every method, so the second engine stores the first one's exact keys and values,
    where the first keeps them (a probed or a dense engine) for all layers (no sliding windows).

    Parameters
    ----------
    first, second
        Engines on the same model, of the same batch size.
    prompts, continuation
        As for `forced_logits`; a continuation that is chosen is chosen by the first engine's logits.

    Yields
    ------
    tuple[Tensor, Tensor]
        Logits [B, vocab] of the first and of the second engine.

    Raises
    ------
    ValueError
        As `forced_logits`, or if the engines run two models.
    """
    if first.model is not second.model:
        raise ValueError("engines on two models: expected the same model, whose prompt they share")
    for logits in _along((first, second), prompts, continuation):
        yield logits[0], logits[1]


def _along(
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], continuation: Continuation
) -> Iterator[list[Tensor]]:
    """Logits of every engine along a continuation that follows those of the first."""
    lead = engines[0]
    lengths = [len(prompt) for prompt in prompts]
    for engine in engines:
        require_room(lengths, continuation.longest, rows=engine.rows, capacity=engine.cache.capacity)
    first, *others = (_Forced(engine, prompts, lengths) for engine in engines)
    continuation.begin(lengths, lead.device, fused=bool(lead.fused))
    logits = [first.prefill()]
    logits += [other.prefill_like(first, logits[0]) for other in others]
    eager = any(engine.eager_reason is not None for engine in engines)
    step = 0
    while True:
        continuation.follow(logits[0])
        yield logits
        probed = any(engine.probe is not None and step % engine.probe_every == 0 for engine in engines)
        # Captured steps after the end count nowhere. Observers and what eager steps count on the host would see them.
        if continuation.over(look=eager or probed or step % STEPS_PER_STOP_CHECK == 0):
            return
        logits = [forced.step(step, continuation) for forced in (first, *others)]
        step += 1


class _Forced:
    """One engine on its way along a continuation."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], lengths: list[int]) -> None:
        self._engine, self._prompts, self._lengths = engine, prompts, lengths
        self._captured = _captured_step(engine)
        self._mask: Tensor | None = None

    def prefill(self) -> Tensor:
        """Forward the prompts; logits [B, vocab]."""
        self._engine._begin(self._lengths, (), 0)
        logits, padding = self._engine._prefill(self._prompts, self._lengths)
        # Only stock sliding-window layers look at a mask while decoding: ours know their rows' lengths.
        self._mask = padding if self._engine.cache.sliding_layers else None
        return logits

    def prefill_like(self, other: _Forced, logits: Tensor) -> Tensor:
        """The same from the exact keys and values of another engine that did it last; logits are the other's."""
        cache, width = self._engine.cache, max(self._lengths)
        exact = [dense for handle in other._engine.cache.handles if (dense := _exact(handle)) is not None]
        if len(exact) < len(cache.layers):
            return self.prefill()
        self._engine._begin(self._lengths, (), 0)
        for handle, dense in zip(cache.handles, exact, strict=True):
            for store in (handle.storage, handle.shadow):
                if store is not None:
                    store.prefill(dense.keys[:, :, :width], dense.values[:, :, :width])
        cache.seen_tokens = width
        return logits

    def step(self, index: int, continuation: Continuation) -> Tensor:
        """Decode step ``index``, fed with what has followed; logits [B, vocab]."""
        engine, cache = self._engine, self._engine.cache
        cache.rows.active.copy_(continuation.active)
        probe = engine.probe if index % engine.probe_every == 0 else None
        if self._captured is not None:
            return self._captured.run(continuation.token, continuation.position, probe)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(self._mask.shape[0], 1)], dim=1)
        cache.probe = probe
        try:
            with engine._fusion.active():
                return engine._forward(continuation.token, continuation.position, self._mask)
        finally:
            cache.probe = None


def _exact(handle: DecodeHandle) -> DenseLayer | None:
    """Where a layer's exact keys and values are, if they are kept."""
    return handle.storage if isinstance(handle.storage, DenseLayer) else handle.shadow


class _ForcedStep:
    """A captured decode step of an engine that is fed its token."""

    def __init__(self, engine: Engine) -> None:
        rows = engine.cache.rows.active.shape[0]
        self._cache = engine.cache
        self._token = torch.zeros(rows, 1, dtype=torch.long, device=engine.device)
        self._position = torch.ones_like(self._token)
        self._attended: list[tuple[DecodeHandle, Tensor, float, Tensor]] = []
        """What a probe of each layer sees. Holding a graph's tensors keeps their memory from serving another layer."""
        engine._begin([1] * rows, (), 0)  # a disposable prompt, as for the engine's own capture
        engine._prefill([[0]] * rows, [1] * rows)

        def step() -> None:
            self._attended.clear()
            with engine._fusion.active():
                self._logits = engine._forward(self._token, self._position, None)

        if engine.probe is not None:
            self._cache.probe = lambda *seen: self._attended.append(seen)
        try:
            self._graph = CapturedStep(step)
        finally:
            self._cache.probe = None

    def run(self, token: Tensor, position: Tensor, probe: Probe | None) -> Tensor:
        """Feed tokens [B, 1] at their positions [B, 1]; logits [B, vocab]."""
        self._token.copy_(token)
        self._position.copy_(position)
        self._graph.replay()
        self._cache.note_replayed_step()
        if probe is not None:
            for seen in self._attended:
                probe(*seen)
        return self._logits.clone()


_forced_steps: WeakKeyDictionary[Engine, _ForcedStep] = WeakKeyDictionary()


def _captured_step(engine: Engine) -> _ForcedStep | None:
    """The engine's forced step, captured when it is first needed; None where the engine's steps are eager."""
    if engine.eager_reason is not None:
        return None
    if engine not in _forced_steps:
        _forced_steps[engine] = _ForcedStep(engine)
    return _forced_steps[engine]
