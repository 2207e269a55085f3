"""Teacher forcing: an engine fed with given tokens instead of its own choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ffd.engine import Engine


@torch.inference_mode()
def forced_logits(
    engine: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    """Next-token logits along given continuations.

    Two engines on one model may be advanced in turn, since each has a cache of its own. Steps run
    eagerly; the engine's probe is called as in `Engine.generate`. Rows with a shorter continuation
    are inactive after its end: neither ledger nor probe counts them.

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
    engine._begin(lengths, (), 0)
    logits, padding = engine._prefill(prompts, lengths)
    yield logits
    mask = padding if cache.sliding_layers else None
    for step in range(longest - 1):
        cache.rows.active.copy_(remaining > step + 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        cache.probe = engine.probe if step % engine.probe_every == 0 else None
        try:
            logits = engine._forward(tokens[:, step : step + 1], position + step, mask)
        finally:
            cache.probe = None
        yield logits
