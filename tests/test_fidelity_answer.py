"""An answer that the observer chooses itself is what dense attention generates, and so is all that is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.fidelity import FidelityProbe
from eval.fidelity.forced import compare_forced
from ffd import FFD, Dense, Engine, Method
from ffd.continuation import GivenTokens, GreedyTokens
from ffd.methods import create
from ffd.report import read_ledger
from ffd.teacher import forced_logits
from tests.followed import NEW_TOKENS, PROMPTS, assert_same, followed, stops_of
from tests.played_steps import play_captured_steps
from tests.tiny import random_prompt, tiny_model

METHOD = FFD(delta=1.0, block_size=64, sub_block=16)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("method", [METHOD, create("quest", {"token_budget": 64, "skip_layers": 1}), Dense()])
@pytest.mark.parametrize(
    ("rows", "stop_at", "least", "every"),
    [(1, None, 0, 4), (1, 0, 0, 16), (1, 1, 6, 1), (1, 3, 0, 16), (1, 9, 0, 5), (3, None, 0, 3), (3, 2, 0, 16),
     (3, 7, 6, 5)],
)  # fmt: skip
def test_an_answer_chosen_on_the_way_is_the_generated_one(
    rows: int,
    stop_at: int | None,
    least: int,
    every: int,
    method: Method,
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch = monkeypatch if captured else None
    model, prompts = tiny_model("llama"), PROMPTS[rows]
    stops = stops_of(model, prompts, stop_at)
    dense = Engine(model, Dense(), capacity=200, batch_size=rows, executor="reference")
    answer = dense.generate(prompts, NEW_TOKENS, stops, min_new_tokens=least).tokens
    if stops:
        assert len(answer[0]) < NEW_TOKENS
        assert len(answer[0]) > least
    expected = followed(model, method, prompts, every, GivenTokens(answer), patch)
    got = followed(model, method, prompts, every, GreedyTokens(NEW_TOKENS, stops, least), patch)
    assert_same(got, expected)
    assert got.tokens == answer
    assert sum(got.scores.count) == sum(len(row) - 1 for row in answer)


def test_a_stop_is_seen_at_every_eager_step_and_before_every_probed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps run on to the host's next look; nothing counts them."""
    model, prompts = tiny_model("llama"), PROMPTS[1]
    stops = stops_of(model, prompts, 3)
    steps = {}
    for name, captured, every in (("eager", False, 5), ("captured", True, 50), ("probed", True, 5)):
        engine = Engine(model, METHOD, capacity=200, executor="reference", probe=FidelityProbe(), probe_every=every)
        engine.cache.follow_dense = True
        if captured:
            play_captured_steps(monkeypatch, engine)
        steps[name] = len(list(forced_logits(engine, prompts, GreedyTokens(NEW_TOKENS, stops)))) - 1
        assert engine.cache.handles[0].storage.ledger.counts().steps[:, 0].tolist() == [3]
    assert steps == {"eager": 3, "captured": 8, "probed": 5}


def test_one_continuation_serves_prompt_after_prompt() -> None:
    engine = Engine(tiny_model("llama"), Dense(), capacity=200, executor="reference")
    answer = GreedyTokens(5)
    for prompt in PROMPTS[3]:
        list(forced_logits(engine, [prompt], answer))
        assert answer.tokens == engine.generate([prompt], 5).tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "max_new_tokens=0"), ((99,), "capacity=200"), ((2, list(range(33))), "33 stop tokens: at most 32")],
)
def test_answers_that_cannot_be_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    engine = Engine(tiny_model("llama"), Dense(), capacity=200, executor="reference")
    with pytest.raises(ValueError, match=message):
        next(forced_logits(engine, PROMPTS[1], GreedyTokens(*arguments)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graph", [True, False])
def test_on_a_gpu_the_answer_is_the_generated_one(graph: bool) -> None:
    model = tiny_model("llama", head_dim=64).to("cuda")
    prompts = [random_prompt(300, 1)]
    stop = Engine(model, Dense(), capacity=500, graph=graph).generate(prompts, 64).tokens[0][21]
    probe = FidelityProbe(unit=64)
    method = FFD(delta=1.0, block_size=64, sub_block=32)
    beside = Engine(model, method, capacity=500, graph=graph, probe=probe, probe_every=5)
    beside.cache.follow_dense = True
    own, dense = (Engine(model, x, capacity=500, graph=graph) for x in (method, Dense()))
    for stops, least in (([], 0), ([stop], 0), ([stop], 30)):
        answer = dense.generate(prompts, 64, stops, min_new_tokens=least).tokens
        outcomes = []
        for continuation in (GreedyTokens(64, stops, least), GivenTokens(answer)):
            scores = compare_forced(beside, own, prompts, continuation)
            assert continuation.tokens == answer
            outcomes.append((scores, probe.take(), read_ledger(beside.cache, len(answer[0]) - 1)))
        (chosen, seen, read), (given, expected, counted) = outcomes
        assert read == counted
        assert read.complete
        assert chosen.count == given.count
        assert seen.count.equal(expected.count)
        for name in ("kl", "nll", "dense_nll"):
            assert getattr(chosen, name) == pytest.approx(getattr(given, name), rel=1e-3, abs=1e-3), name
        torch.testing.assert_close(seen.value_sum, expected.value_sum, rtol=1e-3, atol=1e-3)
