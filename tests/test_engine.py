"""The engine against transformers' own generate, on tiny random models of each family."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import ffd
from ffd.cache import SparseCache, UnsupportedModelError
from ffd.methods import RowState, create
from ffd.methods.dense import Dense
from ffd.methods.ffd import FFD, FFDLayer
from tests.tiny import FAMILIES, random_prompt, tiny_model

PROMPT, NEW = 150, 80
EXACT = FFD(delta=float("inf"), residual="exact", block_size=64)


def stock_tokens(model, prompt, new_tokens):
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_equals_dense_token_for_token(family):
    model = tiny_model(family)
    prompt = random_prompt(PROMPT)
    expected = stock_tokens(model, prompt, NEW)
    for method in (EXACT, create("dense")):
        generation = ffd.Engine(model, method, capacity=PROMPT + NEW).generate([prompt], NEW)
        assert generation.tokens[0] == expected
        assert generation.ledger.complete


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_a_single_block_changes_the_tokens(family, monkeypatch):
    # Proves that the test above can fail: the models attend widely enough to notice one missing block.
    model = tiny_model(family)
    prompt = random_prompt(PROMPT)
    expected = stock_tokens(model, prompt, NEW)
    honest = FFDLayer.select

    def without_second_block(self, q, scale):
        selection = honest(self, q, scale)
        attended = selection.attended.clone()
        attended[..., 64:128] = False
        return dataclasses.replace(selection, attended=attended)

    monkeypatch.setattr(FFDLayer, "select", without_second_block)
    generation = ffd.Engine(model, EXACT, capacity=PROMPT + NEW).generate([prompt], NEW)
    assert generation.tokens[0] != expected


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_logit_error_is_bounded_and_differing_tokens_are_ties(family):
    # One decode step on the same state: the int8 cache may move each logit by at most the bound,
    # and where it changes the greedy token, dense had the two within twice that bound.
    model = tiny_model(family)
    bound = 0.35
    differing = 0
    for seed in range(6):
        prompt = random_prompt(PROMPT + seed, seed)
        exact = last_logits(model, EXACT, prompt)
        stored = last_logits(model, FFD(delta=float("inf"), block_size=64), prompt)
        error = (stored - exact).abs().max().item()
        assert 0 < error < bound
        if stored.argmax() != exact.argmax():
            differing += 1
            assert exact.max() - exact[stored.argmax()] <= 2 * error
    assert differing <= 2


def last_logits(model, method, prompt):
    """Logits of the first decode step after the prompt."""
    engine = ffd.Engine(model, method, capacity=len(prompt) + 2)
    captured = []
    choose = engine._choose

    def spy(logits):
        captured.append(logits.clone())
        choose(logits)

    engine._choose = spy
    engine.generate([prompt], 2)
    return captured[1][0]


@pytest.mark.parametrize("method", [FFD(delta=0.7, block_size=64), FFD(delta=0.7, block_size=64, centre=True), EXACT])
def test_rows_of_a_ragged_batch_behave_as_if_alone(method):
    model = tiny_model("llama")
    prompts = [random_prompt(n, seed=n) for n in (150, 63, 128)]
    together = ffd.Engine(model, method, capacity=260, batch_size=3).generate(prompts, 100)
    for row, prompt in enumerate(prompts):
        alone = ffd.Engine(model, method, capacity=260).generate([prompt], 100)
        assert together.tokens[row] == alone.tokens[0]
    assert together.ledger.complete


def test_finished_rows_do_not_count_in_the_ledger():
    model = tiny_model("llama")
    prompts = [random_prompt(70, seed=1), random_prompt(90, seed=2)]
    free = ffd.Engine(model, create("dense"), capacity=200, batch_size=2).generate(prompts, 40)
    stop = free.tokens[0][5]
    stopped = ffd.Engine(model, create("dense"), capacity=200, batch_size=2).generate(prompts, 40, [stop])
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free.tokens]
    assert stopped.tokens == expected
    assert stopped.ledger.complete
    assert stopped.ledger.dense_steps == sum(len(r) - 1 for r in expected) * 2


@pytest.mark.parametrize("chunk", [1, 50, 64, 149])
def test_chunked_prefill_gives_the_same_cache_and_tokens(chunk):
    model = tiny_model("qwen3")
    prompts = [random_prompt(150, seed=3), random_prompt(101, seed=4)]
    method = FFD(delta=0.7, block_size=64)
    whole = ffd.Engine(model, method, capacity=200, batch_size=2)
    chunked = ffd.Engine(model, method, capacity=200, batch_size=2, prefill_chunk=chunk)
    assert whole.generate(prompts, 1).tokens == chunked.generate(prompts, 1).tokens
    for one, other in zip(whole.cache.handles, chunked.cache.handles, strict=True):
        # Attention over chunks adds in another order, so later layers' keys agree to rounding, not bitwise.
        torch.testing.assert_close(one.storage.half_step, other.storage.half_step, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(one.storage.values, other.storage.values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.storage.tail, other.storage.tail, rtol=1e-4, atol=1e-5)
    assert whole.generate(prompts, 30).tokens == chunked.generate(prompts, 30).tokens


def test_an_engine_serves_prompt_after_prompt_without_memory_of_the_last():
    model = tiny_model("llama")
    engine = ffd.Engine(model, FFD(delta=0.7, block_size=64), capacity=300)
    first = engine.generate([random_prompt(200, seed=5)], 60)
    engine.generate([random_prompt(64, seed=6)], 60)
    again = engine.generate([random_prompt(200, seed=5)], 60)
    assert first.tokens == again.tokens
    assert first.ledger.totals() == again.ledger.totals()


def test_min_new_tokens_bars_the_stop_token():
    model = tiny_model("llama")
    engine = ffd.Engine(model, create("dense"), capacity=100)
    prompt = random_prompt(40)
    first = engine.generate([prompt], 1).tokens[0][0]
    assert engine.generate([prompt], 8, [first]).tokens[0] == [first]
    barred = engine.generate([prompt], 8, [first], min_new_tokens=3).tokens[0]
    assert first not in barred[:3]


def test_a_stop_token_that_the_model_does_not_have_is_never_chosen():
    """A tokenizer may have more tokens than its model. Once the torch path raised, the fused one did not."""
    engine = ffd.Engine(tiny_model("llama"), create("dense"), capacity=100)
    expected = engine.generate([random_prompt(40)], 8).tokens
    for least in (0, 3):
        assert engine.generate([random_prompt(40)], 8, [64, 10**6], min_new_tokens=least).tokens == expected


def test_ledger_equals_a_recount_of_the_reference_selection(monkeypatch):
    model = tiny_model("llama")
    kept = []
    honest = FFDLayer.select

    def recording(self, q, scale):
        selection = honest(self, q, scale)
        kept.append((selection.attended.clone(), selection.selected.clone(), selection.lengths.clone()))
        return selection

    monkeypatch.setattr(FFDLayer, "select", recording)
    generation = ffd.Engine(model, FFD(delta=0.5, block_size=64), capacity=400).generate([random_prompt(300)], 20)
    layers = generation.ledger.layers
    # Query heads 0 and 2 lead the two groups; the group shares what is attended.
    assert sum(sum(layer.union) for layer in layers) == sum(int(a[0, ::2].sum()) for a, _, _ in kept)
    assert sum(sum(layer.selected) for layer in layers) == sum(int(s.sum()) for _, s, _ in kept)
    assert sum(layer.context for layer in layers) == sum(int(n.sum()) for _, _, n in kept)
    assert sum(sum(layer.union) for layer in layers) < sum(layer.context * 2 for layer in layers)


def test_sliding_window_layers_stay_dense_and_are_counted():
    model = tiny_model("mistral", sliding_window=32)
    prompts = [random_prompt(60), random_prompt(41, seed=9)]
    expected = [stock_tokens(model, p, 30) for p in prompts]
    with pytest.raises(UnsupportedModelError, match="model type mistral: all layers are sliding-window attention"):
        ffd.Engine(model, FFD(delta=1), capacity=100)
    engine = ffd.Engine(model, Dense(), capacity=100, batch_size=2)
    generation = engine.generate(prompts, 30)
    assert generation.tokens == expected
    assert generation.ledger.complete
    assert generation.ledger.sparse_steps == 0
    assert generation.ledger.dense_steps == 2 * 29 * 2
    assert generation.ledger.sliding_context == 2 * 2 * 29 * 32


@pytest.mark.parametrize("call", ["graph", "capacity", "empty", "executor"])
def test_impossible_requests_say_what_is_wrong(call):
    model = tiny_model("llama")
    if call == "graph":
        with pytest.raises(UnsupportedModelError, match="graph=True: device cpu"):
            ffd.Engine(model, create("dense"), capacity=10, graph=True)
    elif call == "capacity":
        with pytest.raises(ValueError, match="capacity=10"):
            ffd.Engine(model, create("dense"), capacity=10).generate([[1] * 8], 4)
    elif call == "empty":
        with pytest.raises(ValueError, match="prompt lengths"):
            ffd.Engine(model, create("dense"), capacity=10).generate([[]], 4)
    else:
        with pytest.raises(ValueError, match="executor=quick: expected auto, fused or reference"):
            ffd.Engine(model, create("dense"), capacity=10, executor="quick")


def test_a_long_query_on_a_decoding_cache_is_refused():
    model = tiny_model("llama")
    engine = ffd.Engine(model, EXACT, capacity=100)
    engine.generate([random_prompt(20)], 4)
    ids = torch.tensor([[1, 2]])
    with pytest.raises(UnsupportedModelError, match="query length 2"):
        model(ids, past_key_values=engine.cache)


def test_a_cache_that_was_not_announced_a_prompt_is_refused():
    model = tiny_model("llama")
    cache = SparseCache(model.config, EXACT, batch_size=1, capacity=64, dtype=torch.float32, device="cpu")
    with pytest.raises(RuntimeError, match="begin"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)


def test_another_attention_implementation_fails_loudly_on_a_handle():
    model = tiny_model("llama")
    engine = ffd.Engine(model, EXACT, capacity=100)
    engine.generate([random_prompt(20)], 4)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match="model type llama: its attention uses keys and values by itself"):
        model(torch.tensor([[1]]), past_key_values=engine.cache)


def test_layers_that_share_keys_and_values_are_refused():
    model = tiny_model("llama")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers"):
        ffd.Engine(model, EXACT, capacity=100)


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"probe_every": 0}, {"prefill_chunk": -1}, {"graph": "foo"}])
def test_engine_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ffd.Engine(tiny_model("llama"), EXACT, **{"capacity": 100, **wrong})


def test_unsupported_attention_features_are_named():
    from ffd.attention import sparse_decode_attention

    q = torch.zeros(1, 2, 1, 8)
    for feature in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(UnsupportedModelError, match=feature):
            sparse_decode_attention(None, q, q, q, None, **{feature: 1.0})


def test_rows_start_active_and_empty():
    rows = RowState.allocate(2, "cpu")
    assert rows.lengths.tolist() == [0, 0]
    assert rows.active.tolist() == [1, 1]


def test_a_model_without_weights_is_refused_in_one_line():
    model = tiny_model("llama").to("meta")
    with pytest.raises(UnsupportedModelError, match=r"^model on the meta device"):
        ffd.Engine(model, create("dense"), capacity=40)
