"""Plain model.generate after ffd.attach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ffd
from experiments.summary import sparsity
from ffd.cache import UnsupportedModelError
from tests.tiny import FAMILIES, random_prompt, tiny_model

EXACT = ffd.FFD(delta=float("inf"), residual="exact", block_size=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_decodes_sparsely_and_detach_gives_the_model_back(family):
    model = tiny_model(family)
    ids = torch.tensor([random_prompt(100)])
    expected = model.generate(ids, max_new_tokens=60, do_sample=False)
    with ffd.attach(model, EXACT) as attached:
        assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False), expected)
        report = attached.report()
        assert report.complete
        assert report.sparse_steps == 59 * 2
    assert model.config._attn_implementation == "sdpa"
    assert "_prepare_cache_for_generation" not in vars(model)
    assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False), expected)


def test_left_padding_changes_nothing():
    model = tiny_model("qwen2")
    prompts = [random_prompt(100, seed=1), random_prompt(61, seed=2)]
    method = ffd.FFD(delta=0.7, block_size=64)
    alone = []
    with ffd.attach(model, method):
        for prompt in prompts:
            out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
            alone.append(out[0, len(prompt) :].tolist())
        ids = torch.tensor([prompts[0], [0] * 39 + prompts[1]])
        mask = torch.ones_like(ids)
        mask[1, :39] = 0
        out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert out[:, 100:].tolist() == alone


@pytest.mark.parametrize("chunk", [33, 99])
def test_chunked_prefill_under_generate(chunk):
    # 99 leaves a last chunk of one token, which must not be taken for a decode step.
    model = tiny_model("llama")
    ids = torch.tensor([random_prompt(100)])
    expected = model.generate(ids, max_new_tokens=30, do_sample=False)
    with ffd.attach(model, EXACT) as attached:
        out = model.generate(ids, max_new_tokens=30, do_sample=False, prefill_chunk_size=chunk)
        assert attached.report().sparse_steps == 29 * 2
    assert torch.equal(out, expected)


def test_num_return_sequences_and_sampling():
    model = tiny_model("llama")
    ids = torch.tensor([random_prompt(70)])
    torch.manual_seed(1)
    expected = model.generate(ids, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    with ffd.attach(model, EXACT):
        torch.manual_seed(1)
        out = model.generate(ids, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(arguments, name):
    model = tiny_model("llama")
    with ffd.attach(model, EXACT), pytest.raises(UnsupportedModelError, match=name):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, **arguments)


def test_a_mask_that_transformers_infers_from_padding_counts_too():
    # Once every row of a padded batch without a mask was taken at full width, and tokens differed silently.
    model = tiny_model("llama")
    ids = torch.tensor([random_prompt(100, seed=1), [0] * 39 + random_prompt(61, seed=2)])
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=63)
    with ffd.attach(model, EXACT):
        out = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=63)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("zeros", [slice(80, 100), slice(20, 40)], ids=["right", "hole"])
def test_padding_that_is_not_on_the_left_is_refused(zeros):
    model = tiny_model("llama")
    ids = torch.tensor([random_prompt(100), random_prompt(100, seed=2)])
    mask = torch.ones_like(ids)
    mask[1, zeros] = 0
    with ffd.attach(model, EXACT), pytest.raises(UnsupportedModelError, match="attention_mask: prompts must be padded"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4)


def test_the_default_budget_is_transformers_own():
    model = tiny_model("llama")
    ids = torch.tensor([random_prompt(150)])
    expected = model.generate(ids, do_sample=False)
    with ffd.attach(model, EXACT):
        assert torch.equal(model.generate(ids, do_sample=False), expected)


def test_attaching_twice_is_refused_and_detaching_twice_does_nothing():
    model = tiny_model("llama")
    attached = ffd.attach(model, EXACT)
    with pytest.raises(UnsupportedModelError, match="attached already"):
        ffd.attach(model, EXACT)
    attached.detach()
    attached.detach()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("arguments", "error"), [(("ffd",), TypeError), ((EXACT, "quick"), ValueError)])
def test_what_is_not_a_method_or_executor_is_refused_at_once(arguments, error):
    with pytest.raises(error):
        ffd.attach(tiny_model("llama"), *arguments)


def test_a_printed_report_is_a_summary_that_agrees_with_a_runs_own_figures():
    # It once printed every counter of every layer and head, 10 kB of them.
    model = tiny_model("llama")
    with ffd.attach(model, ffd.FFD(delta=0.3, block_size=64)) as attached:
        model.generate(torch.tensor([random_prompt(300)]), max_new_tokens=20, do_sample=False)
        report = attached.report()
    figures, _ = sparsity([{"ledger": report.totals()}], num_query_heads=4, num_kv_heads=2)
    assert 0 < report.sparsity < 1
    for name in ("keep_head", "keep_io", "sparsity", "bytes_ratio"):
        assert getattr(report, name) == pytest.approx(figures[name])
        assert f"{figures[name]:.4f}" in str(report)
    assert str(report) == repr(report)
    assert len(str(report).splitlines()) == 2
    assert "38 sparse + 0 dense of 38 decode layer-steps" in str(report)
    assert "INCOMPLETE" not in str(report)
    assert "INCOMPLETE" in str(replace(report, expected_steps=39))
    for layer in report.layers:
        assert str(layer).startswith(f"layer {layer.layer}: kept {layer.keep_io:.4f} of tokens")


def test_a_report_of_no_decode_step_has_dashes_for_figures():
    model = tiny_model("llama")
    with ffd.attach(model, EXACT) as attached:
        model.generate(torch.tensor([random_prompt(30)]), max_new_tokens=1, do_sample=False)
        report = attached.report()
    assert (report.sparsity, report.keep_head, report.bytes_ratio) == (None, None, None)
    assert str(report).startswith("sparsity - · kept - of tokens")


def test_windows_of_sliding_layers_count_as_read_whole():
    model = tiny_model(
        "qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    )
    with ffd.attach(model, ffd.FFD(delta=0.3, block_size=64)) as attached:
        model.generate(torch.tensor([random_prompt(300)]), max_new_tokens=20, do_sample=False)
        report = attached.report()
    figures, _ = sparsity([{"ledger": report.totals()}], num_query_heads=4, num_kv_heads=2)
    assert report.sliding_context == 19 * 32
    assert (report.keep_io, report.keep_head) == pytest.approx((figures["keep_io"], figures["keep_head"]))


def test_windows_of_sliding_layers_count_neither_padding_nor_rows_that_have_ended():
    """Once all rows counted with the padded width until the last one ended: 448 tokens here."""
    model = tiny_model(
        "qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    )
    engine = ffd.Engine(model, EXACT, capacity=200, batch_size=2)
    prompts = [random_prompt(100), random_prompt(10, seed=1)]
    stop = engine.generate(prompts, 20).tokens[1][3]
    generation = engine.generate(prompts, 20, [stop])
    steps = [len(row) - 1 for row in generation.tokens]
    assert steps[1] < steps[0]
    expected = sum(min(len(p) + i + 1, 32) for p, n in zip(prompts, steps, strict=True) for i in range(n))
    assert generation.ledger.sliding_context == expected
    assert generation.ledger.layers[0].context == sum(
        len(p) + i + 1 for p, n in zip(prompts, steps, strict=True) for i in range(n)
    )


def test_a_second_prompt_meets_nothing_of_the_first_in_sliding_layers():
    """Under transformers 5.17 a window of zeroed keys stayed, and took part in the next prompt's attention."""
    model = tiny_model(
        "qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    )
    used, fresh = (ffd.Engine(model, EXACT, capacity=200) for _ in range(2))
    used.generate([random_prompt(100)], 5)
    tokens = [engine.generate([random_prompt(20, seed=1)], 5).tokens for engine in (used, fresh)]
    assert tokens[0] == tokens[1]
    kept = [[layer.keys for layer in engine.cache.layers if layer.is_sliding] for engine in (used, fresh)]
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


def test_a_prefill_that_raises_leaves_a_report_of_no_step():
    """Once it expected minus as many layer-steps as the prompt has tokens, and called itself incomplete."""
    model = tiny_model("llama")

    def broken(*_):
        raise RuntimeError("broken layer")

    with ffd.attach(model, EXACT) as attached:
        hook = model.model.layers[1].register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken layer"):
            model.generate(torch.tensor([random_prompt(30)]), max_new_tokens=5, do_sample=False)
        hook.remove()
        report = attached.report()
    assert (report.expected_steps, report.complete, report.sparsity) == (0, True, None)


def test_report_before_generate_is_an_error():
    model = tiny_model("llama")
    with ffd.attach(model, EXACT) as attached, pytest.raises(RuntimeError, match="generate has not been called"):
        attached.report()


def test_what_is_no_model_is_refused_by_its_type():
    with pytest.raises(TypeError, match=r"model=NoneType: expected a transformers model"):
        ffd.attach(None, ffd.Dense())


def test_what_the_package_has_can_be_listed():
    """Once a prompt completed `ffd.` to nothing: names are imported on first use."""
    assert {"attach", "Engine", "FFD", "Method", "__version__"} <= set(dir(ffd))
