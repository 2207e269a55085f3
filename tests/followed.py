"""A prompt followed by an observer and the method's own engine, and all that it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.fidelity import FidelityProbe, FidelityState
from eval.fidelity.forced import ForcedScores, compare_forced
from eval.fidelity.traces import Trace, TraceRecorder
from ffd import Dense, Engine, Method
from ffd.cache import DecodeHandle
from ffd.continuation import Continuation
from ffd.report import read_ledger
from tests.played_steps import play_captured_steps
from tests.tiny import random_prompt

PROMPTS = {1: [random_prompt(140, 1)], 3: [random_prompt(140, 1), random_prompt(101, 2), random_prompt(70, 5)]}
NEW_TOKENS = 22


@dataclass
class Outcome:
    """All that a prompt leaves."""

    tokens: list[list[int]]
    scores: ForcedScores
    state: FidelityState
    trace: Trace | None
    ledgers: list[dict[str, Any]]


def followed(
    model: Any,
    method: Method,
    prompts: list[list[int]],
    every: int,
    continuation: Continuation,
    patch: pytest.MonkeyPatch | None,
) -> Outcome:
    """One engine beside dense attention and probed, the other on its own; steps are captured where there is a patch."""
    probe, recorder = FidelityProbe(unit=16), TraceRecorder()

    def both(handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        probe(handle, q, scale, out)
        recorder(handle, q, scale, out)

    beside, own = (
        Engine(model, method, capacity=200, batch_size=len(prompts), executor="reference", **extra)
        for extra in ({"probe": both, "probe_every": every}, {})
    )
    beside.cache.follow_dense = True
    if patch is not None:
        play_captured_steps(patch, beside, own)
    scores = compare_forced(beside, own, prompts, continuation)
    for cache in (beside.cache, own.cache):
        assert cache.rows.longest == int(cache.rows.lengths.max())
    tokens = continuation.tokens
    steps = sum(len(row) - 1 for row in tokens)
    return Outcome(
        tokens,
        scores,
        probe.take(),
        recorder.take(decode_steps=steps) if steps else None,
        [read_ledger(engine.cache, steps).totals() for engine in (beside, own)],
    )


def assert_same(got: Outcome, expected: Outcome, rounding: float = 0.0) -> None:
    """All that was chosen and counted is equal; what was measured is too, or up to this rounding."""

    def assert_close(mine: Tensor, theirs: Tensor, name: str) -> None:
        torch.testing.assert_close(mine, theirs, rtol=rounding, atol=rounding, msg=lambda why: f"{name}: {why}")

    assert got.tokens == expected.tokens
    assert got.scores.count == expected.scores.count
    assert got.scores.agreement == expected.scores.agreement
    for name in ("nll", "dense_nll", "kl", "kl_max"):
        mine, theirs = (torch.tensor(getattr(x.scores, name), dtype=torch.float64) for x in (got, expected))
        assert_close(mine, theirs, name)
    assert got.ledgers == expected.ledgers
    assert got.state.layers == expected.state.layers
    assert got.state.dense_calls == expected.state.dense_calls
    for name, value in expected.state._tensors().items():
        mine = got.state._tensors()[name]
        if rounding and name == "histogram":  # an observation may fall into the next bin
            mine, value = mine.sum(dim=-1), value.sum(dim=-1)
        assert_close(mine, value, name)
    if expected.trace is None:
        assert got.trace is None
        return
    assert got.trace is not None
    for name in ("lengths", "active", "prompt_lengths"):
        assert torch.equal(getattr(got.trace, name), getattr(expected.trace, name)), name
    last = expected.trace.active.long().cumsum(dim=0).argmax(dim=0)  # a row's later tokens are nobody's
    ends = expected.trace.lengths.gather(0, last[None])[0].tolist()
    for layer in expected.trace.layers:
        for row, end in enumerate(ends):
            for kind in ("keys", "values"):
                mine, theirs = (getattr(x.trace, kind)[layer][row, :, :end] for x in (got, expected))
                assert_close(mine, theirs, kind)
        active = expected.trace.active
        assert_close(got.trace.queries[layer][active], expected.trace.queries[layer][active], "queries")


def stops_of(model: Any, prompts: list[list[int]], at: int | None) -> list[int]:
    """A stop token that dense attention first chooses for the first row at this step."""
    if at is None:
        return []
    free = Engine(model, Dense(), capacity=200, batch_size=len(prompts), executor="reference")
    answer = free.generate(prompts, NEW_TOKENS).tokens[0]
    return [answer[at]]
