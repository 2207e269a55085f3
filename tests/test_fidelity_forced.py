"""Teacher forcing: predictions along given tokens, compared with dense and with the stock model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.fidelity import FidelityProbe, FidelityState, summary
from eval.fidelity.forced import ForcedScores, compare_forced, compare_predictions
from ffd import FFD, Dense, Engine, Method
from ffd.continuation import GivenTokens
from ffd.methods import create, method_class, method_names
from ffd.report import read_ledger
from ffd.teacher import forced_logits, forced_logits_of_both
from tests.played_steps import play_captured_steps, step_separately
from tests.tiny import random_prompt, tiny_model
from tests.toy_method import Strided, StridedLayer

PROMPTS = [random_prompt(140, 1), random_prompt(101, 2)]
CONTINUATIONS = [random_prompt(9, 3), random_prompt(6, 4)]


def engine(method: Method, model: Any = None, **extra: Any) -> Engine:
    return Engine(model or tiny_model("llama"), method, capacity=200, batch_size=2, executor="reference", **extra)


def test_dense_predictions_are_the_stock_models() -> None:
    stock = tiny_model("llama")
    ours = list(forced_logits(engine(Dense()), PROMPTS, GivenTokens(CONTINUATIONS)))
    assert len(ours) == 9
    for row, (prompt, continuation) in enumerate(zip(PROMPTS, CONTINUATIONS, strict=True)):
        with torch.inference_mode():
            logits = stock(torch.tensor([prompt + continuation])).logits[0]
        for index in range(len(continuation)):
            torch.testing.assert_close(ours[index][row], logits[len(prompt) - 1 + index], rtol=1e-3, atol=1e-3)


def test_forcing_an_engines_own_tokens_predicts_them() -> None:
    method = FFD(delta=1.0, block_size=64, sub_block=16)
    tokens = engine(method).generate(PROMPTS, 8).tokens
    forced = [logits.argmax(dim=-1).tolist() for logits in forced_logits(engine(method), PROMPTS, GivenTokens(tokens))]
    assert [list(row) for row in zip(*forced, strict=True)] == tokens


def test_divergences_by_their_definition() -> None:
    g = torch.Generator().manual_seed(0)
    expected, got = (torch.randn(3, 11, generator=g) for _ in range(2))
    expected[0, 4] = got[0, 4] = -torch.inf
    targets = torch.tensor([1, 10, 3])
    values = compare_predictions(expected, got, targets).numpy()
    p, q = (np.exp(x.double().numpy()) for x in (expected, got))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    for row in range(3):
        kl = sum(p[row, j] * np.log(p[row, j] / q[row, j]) for j in range(11) if p[row, j] > 0)
        target = targets[row]
        want = (-np.log(q[row, target]), -np.log(p[row, target]), kl, float(p[row].argmax() == q[row].argmax()))
        assert values[:, row] == pytest.approx(want)


def test_dense_against_dense_is_zero_and_worse_methods_diverge_more() -> None:
    model = tiny_model("llama")
    dense = engine(Dense(), model)

    def scores(method: Method) -> ForcedScores:
        return compare_forced(dense, engine(method, model), PROMPTS, GivenTokens(CONTINUATIONS))

    same = scores(Dense()).summary()
    assert same["tokens"] == 8 + 5
    assert same["kl_max"] == 0.0
    assert same["top1_agreement"] == 1.0
    assert same["perplexity"] == same["perplexity_dense"]
    everything = scores(FFD(delta=float("inf"), residual="exact", block_size=64)).summary()
    assert everything["kl_max"] < 1e-6
    fine, coarse = (
        scores(FFD(delta=float("inf"), residual=residual, block_size=64)).summary() for residual in ("int8", "none")
    )
    assert everything["kl_mean"] < fine["kl_mean"] < coarse["kl_mean"]
    assert fine["perplexity_dense"] == same["perplexity_dense"]


def test_rows_count_to_their_own_end_and_positions_add_up() -> None:
    model = tiny_model("llama")
    method = engine(FFD(delta=0.0, block_size=64, sub_block=16, residual="none"), model)
    scores = compare_forced(engine(Dense(), model), method, PROMPTS, GivenTokens(CONTINUATIONS))
    assert scores.count == [2] * 5 + [1] * 3
    twice = scores.merge(compare_forced(engine(Dense(), model), method, PROMPTS[::-1], GivenTokens([[1], [2, 3]])))
    assert twice.count == [3, *scores.count[1:]]
    assert ForcedScores().merge(scores) == scores
    assert ForcedScores.from_dict(json.loads(json.dumps(scores.to_dict()))) == scores
    rows = scores.by_position(4)
    assert [(row["position"], row["tokens"]) for row in rows] == [(0, 8), (4, 5)]
    assert sum(row["kl"] * row["tokens"] for row in rows) == pytest.approx(sum(scores.kl))


@pytest.mark.parametrize("together", [1, 2, 5, 1000])
def test_predictions_compared_together_are_those_of_single_steps(together: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("eval.fidelity.forced._TOGETHER", together)
    model = tiny_model("llama")
    method = engine(FFD(delta=0.0, block_size=64, sub_block=16, residual="none"), model)
    scores = compare_forced(engine(Dense(), model), method, PROMPTS, GivenTokens(CONTINUATIONS))
    targets = torch.tensor([[*c, *[0] * (9 - len(c))] for c in CONTINUATIONS]).T
    both = list(forced_logits_of_both(engine(Dense(), model), method, PROMPTS, GivenTokens(CONTINUATIONS)))
    for step, (expected, got) in enumerate(both[1:]):
        active = [row for row in range(2) if len(CONTINUATIONS[row]) > step + 1]
        nll, dense_nll, kl, agreement = compare_predictions(expected, got, targets[step + 1])[:, active].sum(1).tolist()
        assert scores.nll[step] == pytest.approx(nll)
        assert scores.dense_nll[step] == pytest.approx(dense_nll)
        assert scores.kl[step] == pytest.approx(kl)
        assert scores.agreement[step] == agreement


def test_inactive_rows_are_neither_counted_nor_probed() -> None:
    probe = FidelityProbe()
    forced = engine(FFD(block_size=64), probe=probe, probe_every=1)
    list(forced_logits(forced, PROMPTS, GivenTokens(CONTINUATIONS)))
    assert forced.cache.handles[0].storage.ledger.counts().steps[:, 0].tolist() == [8, 5]
    assert summary(probe.take())["probed_steps"] == 13


def test_no_numbers_without_tokens() -> None:
    numbers = ForcedScores().summary()
    assert numbers["perplexity"] is None
    assert "no token" in numbers["null_reasons"]["perplexity"]
    assert numbers["finite"]
    broken = ForcedScores([1], [float("nan")], [1.0], [float("nan")], [0], float("nan")).summary()
    assert broken["kl_mean"] is None
    assert broken["null_reasons"]["kl_mean"] == "a prediction was not finite"
    assert broken["perplexity_dense"] == pytest.approx(np.e)
    assert not broken["finite"]


def test_scores_of_earlier_versions_are_read() -> None:
    stored = {k: v for k, v in ForcedScores([1], [1.0], [1.0], [0.5], [1], 0.5).to_dict().items() if "prefill" not in k}
    assert ForcedScores.from_dict(stored).summary()["finite"]


@pytest.mark.parametrize(
    ("continuations", "message"),
    [([[1], []], "at least one token"), ([[1]], "for each of 2 rows"), ([[1] * 99, [1]], "capacity=200")],
)
def test_continuations_that_do_not_fit_are_refused(continuations: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(forced_logits(engine(Dense()), PROMPTS, GivenTokens(continuations)))


@pytest.mark.parametrize("name", [name for name in method_names() if name != "dense"])
@pytest.mark.parametrize("paired", [False, True])
def test_a_prompt_is_prefilled_once_for_two_engines(name: str, paired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not paired:
        step_separately(monkeypatch)
    rounding = 1e-4 if paired else 0.0
    model = tiny_model("llama")
    method = create(name, method_class(name).small_knobs)
    alone = list(forced_logits(engine(method, model), PROMPTS, GivenTokens(CONTINUATIONS)))
    first, second = engine(method, model, probe=FidelityProbe(), probe_every=99), engine(method, model)
    first.cache.follow_dense = True
    # What an earlier prompt left in the caches must not show.
    earlier = [random_prompt(180, 8), random_prompt(190, 9)]
    list(forced_logits_of_both(first, second, earlier, GivenTokens([[1, 2, 3]] * 2)))
    monkeypatch.setattr(second, "_prefill", None)
    both = list(forced_logits_of_both(first, second, PROMPTS, GivenTokens(CONTINUATIONS)))
    own, observed = (torch.stack(logits) for logits in zip(*((b, a) for a, b in both), strict=True))
    torch.testing.assert_close(own, torch.stack(alone), rtol=rounding, atol=rounding)
    dense = torch.stack(list(forced_logits(engine(Dense(), model), PROMPTS, GivenTokens(CONTINUATIONS))))
    torch.testing.assert_close(observed, dense, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("missing", ["exact keys", "full attention"])
def test_both_engines_prefill_where_keys_are_not_kept_for_all_layers(missing: str) -> None:
    kinds = ["full_attention", "sliding_attention"]
    extra = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    model = tiny_model("qwen2", **extra if missing == "full attention" else {})
    first = FFD(block_size=64) if missing == "exact keys" else Dense()
    second = FFD(delta=1.0, block_size=64, sub_block=16)
    both = forced_logits_of_both(engine(first, model), engine(second, model), PROMPTS, GivenTokens(CONTINUATIONS))
    alone = forced_logits(engine(second, model), PROMPTS, GivenTokens(CONTINUATIONS))
    rounding = 1e-4 if missing == "exact keys" else 0.0  # sliding windows have a cache of their own: no pair
    for (_, got), expected in zip(both, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)


@dataclass(frozen=True)
class Halving(Strided):
    """Stores half of each value."""

    def new_layer(self, *args: Any) -> HalvingLayer:
        return HalvingLayer(self, *args)


class HalvingLayer(StridedLayer):
    """Dense storage of halves."""

    def prefill(self, keys: Tensor, values: Tensor) -> None:
        super().prefill(keys, values / 2)

    def append(self, keys: Tensor, values: Tensor) -> None:
        super().append(keys, values / 2)


@pytest.mark.parametrize("probed", [False, True])
def test_what_a_heir_of_dense_storage_keeps_is_not_taken_for_exact(probed: bool) -> None:
    """Once the second engine's prompt was quartered."""
    model, method = tiny_model("llama"), Halving(stride=1)
    extra: dict[str, Any] = {"probe": lambda *_: None} if probed else {}
    first, second = engine(method, model, **extra), engine(method, model)
    for mine, theirs in forced_logits_of_both(first, second, PROMPTS, GivenTokens(CONTINUATIONS)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_engines_on_two_models_share_no_prompt() -> None:
    with pytest.raises(ValueError, match="engines on two models"):
        next(forced_logits_of_both(engine(Dense()), engine(Dense()), PROMPTS, GivenTokens(CONTINUATIONS)))


def test_one_engine_is_no_pair() -> None:
    one = engine(Dense())
    with pytest.raises(ValueError, match="one engine twice"):
        next(forced_logits_of_both(one, one, PROMPTS, GivenTokens(CONTINUATIONS)))


def test_a_probe_sees_a_captured_steps_layers_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture is played by eager steps; that a graph holds what the probe is shown is for the GPU test."""

    def outcome(captured: bool) -> tuple[Tensor, FidelityState, dict[str, Any]]:
        probe = FidelityProbe(unit=64)
        forced = engine(FFD(delta=1.0, block_size=64, sub_block=32), probe=probe, probe_every=3)
        forced.cache.follow_dense = True
        if captured:
            play_captured_steps(monkeypatch, forced)
        logits = torch.stack(list(forced_logits(forced, PROMPTS, GivenTokens(CONTINUATIONS))))
        return logits, probe.take(), read_ledger(forced.cache, 13).totals()

    (eager, expected, counted), (captured, seen, read) = outcome(False), outcome(True)
    assert torch.equal(captured, eager)
    assert read == counted
    assert seen.steps.tolist() == [2 + 2 + 1] * 2  # steps 0, 3 and 6; the second row ends after five
    for name, value in seen._tensors().items():
        assert torch.equal(value, expected._tensors()[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("follow_dense", [False, True])
def test_captured_forced_steps_predict_and_observe_what_eager_ones_do(follow_dense: bool) -> None:
    model = tiny_model("llama", head_dim=64).to("cuda")
    prompts, continuation = [random_prompt(300, 1)], GivenTokens([random_prompt(140, 2)])
    outcomes = []
    for graph in (True, False):
        probe = FidelityProbe(unit=64)
        method = FFD(delta=1.0, block_size=64, sub_block=32)
        forced = Engine(model, method, capacity=500, graph=graph, probe=probe, probe_every=5)
        forced.cache.follow_dense = follow_dense
        list(
            forced_logits(forced, [random_prompt(200, 3)], GivenTokens([random_prompt(9, 4)]))
        )  # leaves state to be forgotten
        probe.start()
        logits = torch.stack(list(forced_logits(forced, prompts, continuation)))
        ledger = read_ledger(forced.cache, continuation.longest - 1)
        assert ledger.complete
        outcomes.append((logits, summary(probe.take()), ledger.totals()))
    (captured, seen, read), (eager, expected, counted) = outcomes
    torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)
    assert seen.pop("null_reasons") == expected.pop("null_reasons")
    assert seen == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert read == counted
