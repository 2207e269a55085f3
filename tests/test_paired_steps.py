"""Two engines stepped by one forward of their model leave what they leave one after the other, up to rounding."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.fidelity import FidelityProbe, summary
from eval.fidelity.forced import compare_forced
from ffd import FFD, Dense, Engine, Method
from ffd.cache import DecodeHandle, UnsupportedModelError
from ffd.continuation import GivenTokens, GreedyTokens
from ffd.forced_step import forced_steps
from ffd.fusion import Fusion
from ffd.methods import create, method_class, method_names
from ffd.paired_cache import PairedCache
from ffd.pairing import why_not_paired
from ffd.report import read_ledger
from ffd.teacher import forced_logits, forced_logits_of_both
from tests.followed import NEW_TOKENS, PROMPTS, assert_same, followed, stops_of
from tests.played_steps import play_captured_steps, step_separately
from tests.tiny import random_prompt, tiny_model

ROUNDING = 1e-3  # products of another number of rows round otherwise, and an int8 code may then be the next one
METHOD = FFD(delta=1.0, block_size=64, sub_block=16)
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 0,
}


def engines(model: Any, rows: int = 1, method: Method = METHOD, **extra: Any) -> tuple[Engine, Engine]:
    """An observer that follows dense attention, and the method's own engine."""
    probed = {"probe": FidelityProbe(), "probe_every": 3, **extra}
    beside, own = (
        Engine(model, method, capacity=200, batch_size=rows, executor="reference", **options)
        for options in (probed, {})
    )
    beside.cache.follow_dense = True
    return beside, own


def given(rows: int = 1) -> GivenTokens:
    return GivenTokens([random_prompt(9 - 2 * row, 3 + row) for row in range(rows)])


def logits_of(first: Engine, second: Engine, rows: int = 1) -> Tensor:
    """[engines, tokens, B, vocab]."""
    both = list(forced_logits_of_both(first, second, PROMPTS[rows], given(rows)))
    return torch.stack([torch.stack(logits) for logits in zip(*both, strict=True)])


@pytest.mark.parametrize(
    ("rows", "stop_at", "least", "every", "captured"),
    [(1, None, 0, 4, True), (1, 9, 0, 5, False), (3, 7, 6, 1, False), (3, 2, 0, 16, True)],
)
@pytest.mark.parametrize("name", method_names())
def test_a_pair_leaves_what_separate_steps_leave(
    name: str, rows: int, stop_at: int | None, least: int, every: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, method = tiny_model("llama"), PROMPTS[rows], create(name, method_class(name).small_knobs)
    stops = stops_of(model, prompts, stop_at)
    outcomes = []
    for separately in (False, True):
        if separately:
            step_separately(monkeypatch)
        answer = GreedyTokens(NEW_TOKENS, stops, least)
        outcomes.append(followed(model, method, prompts, every, answer, monkeypatch if captured else None))
    assert_same(*outcomes, rounding=ROUNDING)


@pytest.mark.parametrize("name", method_names())
def test_a_pair_keeps_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = tiny_model("llama"), create(name, method_class(name).small_knobs)
    kept: list[list[Tensor]] = [[], []]
    for separately, sets in enumerate(kept):
        if separately:
            step_separately(monkeypatch)
        # Both engines are probed: what an own engine keeps follows from its own outputs.
        first, second = engines(model, 3, method, probe=keeping(sets), probe_every=2)
        second.probe, second.probe_every = keeping(sets), 1
        logits_of(first, second, rows=3)
    paired, apart = (sorted(sets, key=lambda s: (s.shape, s.flatten().tolist())) for sets in kept)
    assert len(paired) == 2 * (4 + 8)
    assert all(torch.equal(a, b) for a, b in zip(paired, apart, strict=True))


def keeping(sets: list[Tensor]) -> Callable[..., None]:
    """A probe that notes the tokens attended to."""
    return lambda handle, q, scale, out: sets.append(handle.storage.select(q, scale).attended)


def test_dense_beside_dense_predicts_the_same() -> None:
    beside, own = engines(tiny_model("llama"), 3, Dense())
    # A library's product may round a row otherwise where its threads split the rows; a law allows 1e-6.
    assert compare_forced(beside, own, PROMPTS[3], given(3)).kl_max < 1e-8


@pytest.mark.parametrize("captured", [False, True])
def test_a_probe_sees_the_layers_of_its_own_engine(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[DecodeHandle, Tensor]] = []
    first, second = engines(tiny_model("llama"), 3, probe=lambda handle, q, scale, out: seen.append((handle, q)))
    if captured:
        play_captured_steps(monkeypatch, first, second)
    (steps,) = forced_steps([first, second])
    assert steps.engines == (first, second)
    logits_of(first, second, rows=3)
    assert [handle.layer_idx for handle, _ in seen] == [0, 1] * 3  # steps 0, 3 and 6
    assert all(handle.cache is first.cache and q.shape[0] == 3 for handle, q in seen)


@pytest.mark.parametrize("captured", [False, True])
def test_both_caches_serve_the_next_prompt_after_a_probes_failure(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, failing = tiny_model("llama"), [False]

    def probe(handle: DecodeHandle, q: Tensor, scale: float, out: Tensor) -> None:
        if failing[0] and handle.layer_idx == 1 and int(handle.cache.rows.lengths[0]) > 142:
            raise RuntimeError("a probe that fails")

    first, second = engines(model, 3, probe=probe)
    if captured:
        play_captured_steps(monkeypatch, first, second)
    expected = logits_of(first, second, rows=3)
    counted = [read_ledger(engine.cache, 18).totals() for engine in (first, second)]
    failing[0] = True
    with pytest.raises(RuntimeError, match="a probe that fails"):
        logits_of(first, second, rows=3)
    failing[0] = False
    assert first.cache.probe is None
    assert second.cache.probe is None
    assert torch.equal(logits_of(first, second, rows=3), expected)
    assert [read_ledger(engine.cache, 18).totals() for engine in (first, second)] == counted


def test_a_pair_leaves_each_engines_own_captured_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engines(tiny_model("llama"))
    play_captured_steps(monkeypatch, first, second)

    def alone(engine: Engine) -> Tensor:
        return torch.stack(list(forced_logits(engine, PROMPTS[1], given())))

    before = [alone(engine) for engine in (first, second)]
    paired = logits_of(first, second)
    torch.testing.assert_close(paired, torch.stack(before), rtol=ROUNDING, atol=ROUNDING)
    assert all(torch.equal(alone(engine), own) for engine, own in zip((first, second), before, strict=True))
    assert torch.equal(logits_of(first, second), paired)


def test_captured_steps_end_with_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once:
        def __init__(self, step: Callable[[], None]) -> None:
            step()

    monkeypatch.setattr("ffd.forced_step.CapturedStep", Once)
    first, second = engines(tiny_model("llama"))
    first.eager_reason = second.eager_reason = None
    with torch.inference_mode():
        assert forced_steps([first, second])[0]._captured is forced_steps([first, second])[0]._captured
        forced_steps([first])
    held = [weakref.ref(engine) for engine in (first, second)]
    del first, second
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def captured_alone(first: Engine, second: Engine) -> None:
    second.eager_reason = None


def fused_alone(first: Engine, second: Engine) -> None:
    second._fusion = Fusion(fused=["mlp"])


def fused_in_fewer_rows(first: Engine, second: Engine) -> None:
    first._fusion = second._fusion = Fusion(fused=["mlp"])
    first.fused = second.fused = ("mlp",)
    first.unfused = second.unfused = {}


@pytest.mark.parametrize(
    ("family", "config", "change", "reason"),
    [
        ("qwen2", SLIDING, None, "1 sliding-window layers use a cache that is not ours"),
        ("llama", {}, captured_alone, "steps of one engine alone are captured: device cpu has no CUDA graphs"),
        ("llama", {}, fused_alone, "the engines do not fuse the same modules"),
        ("llama", {}, fused_in_fewer_rows, "2 rows do not fuse what 1 fuse: dtype torch.float32"),
    ],
)
def test_what_cannot_be_paired_is_stepped_separately_for_a_reason(
    family: str, config: dict[str, Any], change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines(tiny_model(family, **config))
    expected = torch.stack(
        [torch.stack(list(forced_logits(engine, PROMPTS[1], given()))) for engine in (first, second)]
    )
    if change is captured_alone:
        play_captured_steps(monkeypatch, second)
    elif change is not None:
        change(first, second)
    assert reason in str(why_not_paired(first, second))
    assert torch.equal(logits_of(first, second), expected)


def test_batches_of_other_sizes_are_no_pair() -> None:
    model = tiny_model("llama")
    assert why_not_paired(engines(model)[0], engines(model, 3)[1]) == "batches of 1 and 3 rows"
    assert why_not_paired(*engines(model)) is None


def test_paired_caches_take_decode_steps_of_both_and_nothing_else() -> None:
    model = tiny_model("llama")
    first, second = engines(model)
    pair = PairedCache(first.cache, second.cache)
    ids = torch.tensor([[1], [1]])
    first.cache.begin([1])
    with pytest.raises(RuntimeError, match="2 rows on paired caches: expected 2, both prefilled before"):
        model(ids, past_key_values=pair)
    for engine in (first, second):
        engine.generate(PROMPTS[1], 2)
    with pytest.raises(RuntimeError, match="1 rows on paired caches: expected 2"):
        model(ids[:1], past_key_values=pair)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match="model type llama: its attention uses keys and values by itself"):
        model(ids, past_key_values=pair)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", ["dense", "ffd", "quest", "kivi"])
def test_on_a_gpu_a_pair_leaves_what_separate_steps_leave(
    name: str, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", head_dim=64).to("cuda")
    method, prompts = create(name, method_class(name).small_knobs), [random_prompt(300, 1)]
    outcomes = []
    for separately in (False, True):
        if separately:
            step_separately(monkeypatch)
        probe = FidelityProbe(unit=64)
        beside = Engine(model, method, capacity=500, graph=graph, probe=probe, probe_every=5)
        beside.cache.follow_dense = True
        own = Engine(model, method, capacity=500, graph=graph)
        compare_forced(beside, own, [random_prompt(200, 3)], GivenTokens([random_prompt(9, 4)]))  # to be forgotten
        probe.start()
        answer = GreedyTokens(64)
        scores = compare_forced(beside, own, prompts, answer)
        for cache in (beside.cache, own.cache):
            assert cache.rows.longest == int(cache.rows.lengths.max())
        ledgers = [read_ledger(engine.cache, 63) for engine in (beside, own)]
        assert all(ledger.complete for ledger in ledgers)
        outcomes.append((answer.tokens, scores, summary(probe.take()), [ledger.totals() for ledger in ledgers]))
    (tokens, scores, seen, read), (own_tokens, expected, observed, counted) = outcomes
    assert tokens == own_tokens
    assert scores.count == expected.count
    assert read == counted
    for key in ("kl", "nll", "dense_nll"):
        assert getattr(scores, key) == pytest.approx(getattr(expected, key), rel=1e-3, abs=1e-3), key
    assert seen.pop("null_reasons") == observed.pop("null_reasons")
    assert seen == pytest.approx(observed, rel=1e-3, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["dense", "ffd"])
def test_fused_modules_give_a_row_the_same_beside_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", head_dim=64).to("cuda", torch.bfloat16)
    method = create(name, method_class(name).small_knobs)
    outcomes = []
    for separately in (False, True):
        beside = Engine(model, method, capacity=500, fuse=True, probe=FidelityProbe(), probe_every=5)
        beside.cache.follow_dense = True
        own = Engine(model, method, capacity=500, fuse=True)
        assert why_not_paired(beside, own) is None
        if separately:
            step_separately(monkeypatch)
        both = list(forced_logits_of_both(beside, own, [random_prompt(300, 1)], GivenTokens([random_prompt(64, 2)])))
        outcomes.append((both, [read_ledger(engine.cache, 63).totals() for engine in (beside, own)]))
    (paired, read), (apart, counted) = outcomes
    assert read == counted
    for got, expected in zip(paired, apart, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
