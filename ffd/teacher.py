"""Teacher forcing: engines fed with given tokens instead of their own choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ffd.cache import DecodeHandle, Probe
from ffd.engine import Engine
from ffd.graph import CapturedStep
from ffd.methods.dense import DenseLayer


@torch.inference_mode()
def forced_logits(
    engine: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    """Next-token logits along given continuations.

    Steps run in a captured graph where the engine's own would; a probe sees the layers of its steps after them.
    Rows with a shorter continuation are inactive after its end: neither ledger nor probe counts them.

    Parameters
    ----------
    engine
        Its method decodes every step but the first.
    prompts
        Token ids of each row, without padding; as many rows as the engine's batch size.
    continuations
        Tokens that follow each prompt, at least one per row.

    Yields
    ------
    Tensor
        [B, vocab] for token 0 of the continuations, from prefill, then for token 1, 2, ... of the
        longest, from decode steps.

    Raises
    ------
    ValueError
        If a continuation is empty, the rows do not match, or the tokens exceed the capacity.
    """
    forced = _Forced(engine, prompts, continuations)
    yield forced.prefill()
    yield from forced.steps()


@torch.inference_mode()
def forced_logits_of_both(
    first: Engine, second: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`forced_logits` of two engines on one model, step by step; the prompt is prefilled once.

    Prefill is the same under every method, so the second engine stores the first one's exact keys and values,
    where the first keeps them (a probed or a dense engine) for all layers (no sliding windows).

    Parameters
    ----------
    first, second
        Engines on the same model, of the same batch size.
    prompts, continuations
        As for `forced_logits`.

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
    one, other = (_Forced(engine, prompts, continuations) for engine in (first, second))
    logits = one.prefill()
    yield logits, other.prefill_like(one, logits)
    yield from zip(one.steps(), other.steps(), strict=True)


class _Forced:
    """One engine on its way along given continuations."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
    ) -> None:
        self._engine, self._prompts = engine, prompts
        self._lengths, ends = [len(p) for p in prompts], [len(c) for c in continuations]
        if len(ends) != len(prompts) or min(ends) < 1:
            raise ValueError(
                f"continuations of {ends} tokens: expected at least one token for each of {len(prompts)} rows"
            )
        self._longest, capacity = max(ends), engine.cache.capacity
        if max(self._lengths) + self._longest - 1 > capacity:
            raise ValueError(
                f"prompt of {max(self._lengths)} and continuation of {self._longest} tokens exceed capacity={capacity}"
            )
        tokens = torch.zeros(len(ends), self._longest, dtype=torch.long)
        for row, continuation in enumerate(continuations):
            tokens[row, : len(continuation)] = torch.tensor(list(continuation), dtype=torch.long)
        self._tokens = tokens.to(engine.device)
        # Of a decode step: those after whose prediction a row still goes on.
        self._active = (torch.tensor(ends) > torch.arange(1, self._longest)[:, None]).int().to(engine.device)
        self._position = torch.tensor(self._lengths, device=engine.device)[:, None]
        self._captured = _captured_step(engine)
        self._padding: Tensor | None = None

    def prefill(self) -> Tensor:
        """Forward the prompts; logits [B, vocab]."""
        self._engine._begin(self._lengths, (), 0)
        logits, self._padding = self._engine._prefill(self._prompts, self._lengths)
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

    def steps(self) -> Iterator[Tensor]:
        """Decode; logits [B, vocab] of each step."""
        engine, cache = self._engine, self._engine.cache
        mask = self._padding if cache.sliding_layers else None
        for step in range(self._longest - 1):
            cache.rows.active.copy_(self._active[step])
            token, position = self._tokens[:, step : step + 1], self._position + step
            probe = engine.probe if step % engine.probe_every == 0 else None
            if self._captured is not None:
                yield self._captured.run(token, position, probe)
                continue
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            cache.probe = probe
            try:
                with engine._fusion.active():
                    logits = engine._forward(token, position, mask)
            finally:
                cache.probe = None
            yield logits


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
