"""Teacher forcing: an engine fed with given tokens instead of its own choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ffd.engine import Engine
from ffd.graph import CapturedStep


@torch.inference_mode()
def forced_logits(
    engine: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    """Next-token logits along given continuations.

    Two engines on one model may be advanced in turn, since each has a cache of its own. Steps that the
    engine's probe does not see run in a captured graph where the engine's own steps would. Rows with a
    shorter continuation are inactive after its end: neither ledger nor probe counts them.

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
    cache, device = engine.cache, engine.device
    lengths, ends = [len(p) for p in prompts], [len(c) for c in continuations]
    if len(ends) != len(lengths) or min(ends) < 1:
        raise ValueError(f"continuations of {ends} tokens: expected at least one token for each of {len(lengths)} rows")
    longest = max(ends)
    if max(lengths) + longest - 1 > cache.capacity:
        raise ValueError(
            f"prompt of {max(lengths)} and continuation of {longest} tokens exceed capacity={cache.capacity}"
        )
    tokens = torch.zeros(len(ends), longest, dtype=torch.long)
    for row, continuation in enumerate(continuations):
        tokens[row, : len(continuation)] = torch.tensor(list(continuation), dtype=torch.long)
    tokens = tokens.to(device)
    remaining = torch.tensor(ends, device=device)
    position = torch.tensor(lengths, device=device)[:, None]
    captured = _captured_step(engine)
    engine._begin(lengths, (), 0)
    logits, padding = engine._prefill(prompts, lengths)
    yield logits
    mask = padding if cache.sliding_layers else None
    for step in range(longest - 1):
        cache.rows.active.copy_(remaining > step + 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        probed = engine.probe is not None and step % engine.probe_every == 0
        if captured is not None and not probed:
            yield captured.run(tokens[:, step : step + 1], position + step)
            continue
        cache.probe = engine.probe if probed else None
        try:
            with engine._fusion.active():
                logits = engine._forward(tokens[:, step : step + 1], position + step, mask)
        finally:
            cache.probe = None
        yield logits


class _ForcedStep:
    """A captured decode step of an engine that is fed its token."""

    def __init__(self, engine: Engine) -> None:
        rows = engine.cache.rows.active.shape[0]
        self._cache = engine.cache
        self._token = torch.zeros(rows, 1, dtype=torch.long, device=engine.device)
        self._position = torch.ones_like(self._token)
        engine._begin([1] * rows, (), 0)  # a disposable prompt, as for the engine's own capture
        engine._prefill([[0]] * rows, [1] * rows)

        def step() -> None:
            with engine._fusion.active():
                self._logits = engine._forward(self._token, self._position, None)

        self._graph = CapturedStep(step)

    def run(self, token: Tensor, position: Tensor) -> Tensor:
        """Feed tokens [B, 1] at their positions [B, 1]; logits [B, vocab]."""
        self._token.copy_(token)
        self._position.copy_(position)
        self._graph.replay()
        self._cache.note_replayed_step()
        return self._logits.clone()


_forced_steps: WeakKeyDictionary[Engine, _ForcedStep] = WeakKeyDictionary()


def _captured_step(engine: Engine) -> _ForcedStep | None:
    """The engine's forced step, captured when it is first needed; None where the engine's steps are eager."""
    if engine.eager_reason is not None:
        return None
    if engine not in _forced_steps:
        _forced_steps[engine] = _ForcedStep(engine)
    return _forced_steps[engine]
