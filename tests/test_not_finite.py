"""Logits without a finite largest one: the answer ends there, and whoever asked for it is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from eval.fidelity.forced import ForcedScores, compare_forced
from ffd import FFD, Dense, Engine
from ffd.continuation import GreedyTokens
from ffd.methods import Executor, LayerGeometry, Method, RowState, Selection, create
from ffd.methods.topk import TopK
from tests.greedy_states import ALL_STOPS, BROKEN, CHOSEN, broken_logits
from tests.tiny import random_prompt, tiny_model

PROMPTS = [random_prompt(40, 0), random_prompt(20, 1)]
NEW = 12
BREAKS_AT = 45
"""Tokens of the first row at decode step 4, whose logits are those of token 5."""


@dataclass(frozen=True)
class Breaking(Method):
    """All tokens, with scores that are not numbers where a row has ``at`` tokens."""

    name: ClassVar[str] = "breaking"
    at: int = BREAKS_AT
    """Tokens of the row."""

    def new_layer(self, geometry: LayerGeometry, rows: RowState, executor: Executor) -> Any:
        layer = TopK(token_budget=1000).new_layer(geometry, rows, executor)
        select = layer.select

        def broken(q: Tensor, scale: float) -> Selection:
            selection = select(q, scale)
            here = (layer.lengths == self.at)[:, None, None]
            return replace(selection, scores=selection.scores.masked_fill(here, torch.nan))

        layer.select = broken  # type: ignore[method-assign]
        return layer


def engine(method: Method, model: Any = None, rows: int = 2, **options: Any) -> Engine:
    model = tiny_model("llama") if model is None else model
    return Engine(model, method, capacity=100, batch_size=rows, executor="reference", **options)


def headless_model() -> Any:
    """A model one of whose tokens never has a logit."""
    model = tiny_model("llama")
    model.lm_head.weight.data[9] = torch.nan
    return model


@pytest.mark.parametrize("value", BROKEN)
def test_a_row_ends_where_nothing_is_predicted(value: float) -> None:
    logits, finite = broken_logits(value, 300, "cpu")
    logits[7, ALL_STOPS[3]] = 0.0  # else a row that stops at a token
    for stops in ([], ALL_STOPS[:1], ALL_STOPS):
        answer = GreedyTokens(3, stops)
        answer.begin([1] * len(finite), torch.device("cpu"), fused=False)
        answer.follow(logits)
        assert answer.active.tolist() == [int(x) for x in finite]
        assert answer.tokens == [[CHOSEN if x else 0] for x in finite]


def test_an_answer_has_no_tokens_before_the_first() -> None:
    """Once this was an IndexError."""
    answer = GreedyTokens(3)
    answer.begin([1, 2], torch.device("cpu"), fused=False)
    assert answer.tokens == [[], []]


def test_the_engine_ends_the_row_and_says_so() -> None:
    whole = engine(create("dense")).generate(PROMPTS, NEW)
    assert whole.finite == [True, True]
    broken = engine(Breaking()).generate(PROMPTS, NEW)
    assert broken.finite == [False, True]
    assert broken.tokens == [[*whole.tokens[0][:5], 0], whole.tokens[1]]
    assert broken.decode_steps == 5 + NEW - 1
    assert broken.ledger.complete


def test_an_engine_goes_on_with_the_next_prompts() -> None:
    own = engine(Breaking(), rows=1)
    assert [own.generate([prompt], NEW).finite for prompt in (*PROMPTS, PROMPTS[0][:30])] == [[False], [True], [True]]


def test_a_prompt_that_predicts_nothing_is_not_decoded() -> None:
    broken = engine(Dense(), headless_model()).generate(PROMPTS, NEW)
    assert (broken.tokens, broken.finite, broken.decode_steps) == ([[0], [0]], [False, False], 0)


def test_fidelity_counts_a_prompt_that_predicts_nothing() -> None:
    """No decode step follows it that could show a divergence which is no number."""
    model = headless_model()
    for method in (Dense(), FFD(block_size=64)):
        own, beside = engine(method, model), engine(Dense(), model)
        scores = compare_forced(beside, own, PROMPTS, GreedyTokens(NEW))
        assert (scores.count, scores.broken_prefills) == ([], 2)
        found = scores.merge(ForcedScores()).summary()
        assert not found["finite"]
        assert found["null_reasons"]["kl_mean"] == "a prediction was not finite"
        assert ForcedScores.from_dict(scores.to_dict()) == scores


def test_fidelity_sees_where_dense_attention_predicts_nothing() -> None:
    """Its answer ends there, and the prediction that is none is the last one compared."""
    model = tiny_model("llama")
    prompts = [[1 + i % 7 for i in range(40)]]
    answer = engine(Dense(), model, 1).generate(prompts, NEW).tokens[0]
    at, token = next((i, t) for i, t in enumerate(answer[:-2]) if t > 7)
    model.model.embed_tokens.weight.data[token] = torch.nan
    follows = GreedyTokens(NEW)
    scores = compare_forced(engine(Dense(), model, 1), engine(FFD(block_size=64), model, 1), prompts, follows)
    assert follows.tokens == [[*answer[: at + 1], 0]]
    assert sum(scores.count) == at + 1
    assert not scores.summary()["finite"]
