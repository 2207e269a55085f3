"""Teacher forcing: engines fed with the tokens of a continuation, not each with its own choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ffd.cache import DecodeHandle
from ffd.continuation import Continuation
from ffd.engine import STEPS_PER_STOP_CHECK, Engine
from ffd.forced_step import forced_steps
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
    """`forced_logits` of two engines on one model, step by step; prompt and weights are read once for both.

    Prefill is the same under every method, so the second engine stores the first one's exact keys and values,
    where the first keeps them (a probed or a dense engine) for all layers (no sliding windows). Steps are fed the same
    token, so both are rows of one forward, unless `ffd.pairing.why_not_paired` names a reason: the same up to the
    rounding of products with more rows.

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
        As `forced_logits`, or if the engines run two models, or are one engine.
    """
    if first is second:
        raise ValueError("one engine twice: expected two, each with a cache of its own")
    if first.model is not second.model:
        raise ValueError("engines on two models: expected the same model, whose prompt they share")
    for logits in _along((first, second), prompts, continuation):
        yield logits[0], logits[1]


def _along(
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], continuation: Continuation
) -> Iterator[list[Tensor]]:
    """Logits of every engine along a continuation that follows those of the first."""
    lead, *others = engines
    lengths = [len(prompt) for prompt in prompts]
    for engine in engines:
        require_room(lengths, continuation.longest, rows=engine.rows, capacity=engine.cache.capacity)
    stepped = forced_steps(engines)
    continuation.begin(lengths, lead.device, fused=bool(lead.fused))
    first, padding = _prefilled(lead, prompts, lengths)
    logits = [first, *(_prefilled_like(other, lead, prompts, lengths, first) for other in others)]
    eager = any(engine.eager_reason is not None for engine in engines)
    step = 0
    while True:
        continuation.follow(logits[0])
        yield logits
        probed = any(engine.probe is not None and step % engine.probe_every == 0 for engine in engines)
        # Captured steps after the end count nowhere. Observers and what eager steps count on the host would see them.
        if continuation.over(look=eager or probed or step % STEPS_PER_STOP_CHECK == 0):
            return
        logits = [own for steps in stepped for own in steps.run(step, continuation, padding)]
        step += 1


def _prefilled(engine: Engine, prompts: Sequence[Sequence[int]], lengths: list[int]) -> tuple[Tensor, Tensor | None]:
    """Forward the prompts; logits [B, vocab] and the padding, if any."""
    engine._begin(lengths, (), 0)
    return engine._prefill(prompts, lengths)


def _prefilled_like(
    engine: Engine, other: Engine, prompts: Sequence[Sequence[int]], lengths: list[int], logits: Tensor
) -> Tensor:
    """The same from the exact keys and values of another engine that did it last; logits are the other's."""
    cache, width = engine.cache, max(lengths)
    exact = [dense for handle in other.cache.handles if (dense := _exact(handle)) is not None]
    if len(exact) < len(cache.layers):
        return _prefilled(engine, prompts, lengths)[0]
    engine._begin(lengths, (), 0)
    for handle, dense in zip(cache.handles, exact, strict=True):
        for store in (handle.storage, handle.shadow):
            if store is not None:
                store.prefill(dense.keys[:, :, :width], dense.values[:, :, :width])
    cache.seen_tokens = width
    return logits


def _exact(handle: DecodeHandle) -> DenseLayer | None:
    """Where a layer's exact keys and values are, if they are kept: a dense layer's heirs may store others."""
    return handle.storage if type(handle.storage) is DenseLayer else handle.shadow
