"""The lm-eval model: sparse where it decodes, the stock model where it does not, nothing carried over."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

import ffd
from eval.lm_harness.answers import measured
from eval.lm_harness.arguments import HarnessError
from eval.lm_harness.model import SparseDecodeLM
from eval.models import ModelSpec, load_model
from ffd.cache import UnsupportedModelError
from ffd.methods import create
from tests.lm_harness_data import BOS, LAYERS, write_model

PROMPTS = [" ".join(f"{word}{i}" for word in ("alpha", "beta", "gamma") * (10 + 4 * i)) for i in range(3)]
GENERATION = {"until": ["q"], "max_gen_toks": 10, "do_sample": False}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny-llama"))
    return load_model(ModelSpec(name="tiny", path=str(folder)))


def fresh(loaded):
    """The same weights in a model of their own: lm-eval may change what it is given."""
    return copy.deepcopy(loaded)


def stock(loaded):
    mine = fresh(loaded)
    return HFLM(pretrained=mine.model, tokenizer=mine.tokenizer, batch_size=1)


def sparse(loaded, method="topk", **knobs):
    knobs = knobs or {"token_budget": 8} if method == "topk" else knobs
    return SparseDecodeLM(fresh(loaded), create(method, knobs))


def generations(prompts=PROMPTS, **options):
    return [
        Instance("generate_until", {}, (text, {**GENERATION, **options}), 0, ("tiny", i, 1))
        for i, text in enumerate(prompts)
    ]


def scorings(prompts=PROMPTS):
    return [
        Instance("loglikelihood", {}, (text, word), 0, ("tiny", i, 1))
        for i, text in enumerate(prompts)
        for word in (" yes", " no")
    ]


def test_dense_answers_as_the_stock_class_does(loaded):
    lm = SparseDecodeLM(fresh(loaded), ffd.Dense())
    texts = lm.generate_until(generations(), disable_tqdm=True)
    assert texts == stock(loaded).generate_until(generations(), disable_tqdm=True)
    assert all(texts)
    found = measured(lm.answers)
    assert (found["dense_steps"], found["keep_io"]) == (found["expected_steps"], 1)
    assert found["expected_steps"] > 0


def test_an_answer_says_whether_logits_were_finite(loaded):
    texts = sparse(loaded).generate_until(generations(), disable_tqdm=True)
    assert ["c" in text for text in texts] == [True, False, True]
    lm = sparse(loaded)
    lm.model.get_input_embeddings().weight.data[lm.tokenizer.convert_tokens_to_ids("c")] = torch.nan
    broken = lm.generate_until(generations(), disable_tqdm=True)
    assert [answer.finite for answer in lm.answers] == [False, True, False]
    assert broken[1] == texts[1]
    lm.loglikelihood(scorings(["a", "c"]), disable_tqdm=True)
    found = lm.get_model_info()["sparse_decode"]
    assert (found["generate_until"]["not_finite"], found["loglikelihood"]["not_finite"]) == (2, 2)
    assert not lm.model._forward_hooks


def test_generation_goes_through_the_sparse_decode(loaded):
    lm = sparse(loaded)
    texts = lm.generate_until(generations(), disable_tqdm=True)
    assert texts != stock(loaded).generate_until(generations(), disable_tqdm=True)
    for answer in lm.answers:
        assert answer.ledger["sparse_steps"] == answer.ledger["expected_steps"] == (answer.new_tokens - 1) * LAYERS
        assert answer.bos_count == 1
        assert not answer.truncated
    assert 0 < measured(lm.answers)["keep_io"] < 0.3


def test_scoring_is_the_stock_models_whatever_the_method(loaded):
    lm = sparse(loaded)
    assert lm.loglikelihood(scorings(), disable_tqdm=True) == stock(loaded).loglikelihood(scorings(), disable_tqdm=True)
    assert lm.answers == []
    assert lm.dense_requests == len(scorings())
    info = lm.get_model_info()["sparse_decode"]
    assert info["generate_until"]["sparse_steps"] == 0
    assert "dense prefill" in info["loglikelihood"]["path"]


def test_a_request_leaves_nothing_to_the_next(loaded):
    lm = sparse(loaded)
    forwards = lm.generate_until(generations(), disable_tqdm=True)
    lm.loglikelihood(scorings(), disable_tqdm=True)
    backwards = lm.generate_until(generations(PROMPTS[::-1]), disable_tqdm=True)
    alone = [sparse(loaded).generate_until(generations([p]), disable_tqdm=True)[0] for p in PROMPTS]
    assert forwards == backwards[::-1] == alone
    assert "generate" not in vars(lm.model)
    assert lm.model.config._attn_implementation == "sdpa"


def test_the_model_is_given_back_after_an_error(loaded):
    lm = sparse(loaded)
    with pytest.raises(UnsupportedModelError, match="num_beams=2"):
        lm.generate_until(generations(num_beams=2), disable_tqdm=True)
    assert "generate" not in vars(lm.model)
    assert lm.model.config._attn_implementation == "sdpa"


def test_sampling_works_and_repeats_with_the_seed(loaded):
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(
            sparse(loaded).generate_until(generations(do_sample=True, temperature=1.0, top_k=0), disable_tqdm=True)
        )
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_cut_prompt_is_remembered(loaded):
    lm = SparseDecodeLM(fresh(loaded), ffd.Dense(), max_length=200)
    lm.generate_until(generations(), disable_tqdm=True)
    assert [a.truncated for a in lm.answers] == [len(p) + 1 > 190 for p in PROMPTS] != [False] * 3
    assert max(a.prompt_tokens for a in lm.answers) == 190
    assert [a.bos_count for a in lm.answers if a.truncated] == [0] * sum(a.truncated for a in lm.answers)


def test_a_budget_beyond_the_context_is_refused(loaded):
    lm = SparseDecodeLM(fresh(loaded), ffd.Dense(), max_length=200)
    with pytest.raises(HarnessError, match="max_gen_toks=200"):
        lm.generate_until(generations(max_gen_toks=200), disable_tqdm=True)


def test_the_tasks_budget_outranks_the_checkpoints(loaded):
    mine = fresh(loaded)
    mine.model.generation_config.max_new_tokens = 2
    lm = SparseDecodeLM(mine, ffd.Dense())
    lm.generate_until(generations(until=["никогда"]), disable_tqdm=True)
    assert max(a.new_tokens for a in lm.answers) == GENERATION["max_gen_toks"]


def test_a_chat_prompt_has_one_bos(loaded):
    lm = sparse(loaded)
    prompt = lm.apply_chat_template([{"role": "user", "content": "alpha beta"}])
    assert prompt.startswith("<s>")
    lm.generate_until(generations([prompt]), disable_tqdm=True)
    assert lm.answers[0].bos_count == 1
    assert lm.tokenizer.bos_token_id == BOS


def test_a_journal_is_asked_first_and_told_after(loaded):
    kept = []
    journal = SimpleNamespace(recall=lambda task, index: "known" if index == 1 else None, record=kept.append)
    lm = SparseDecodeLM(fresh(loaded), create("topk", {"token_budget": 8}), journal=journal)
    texts = lm.generate_until(generations(), disable_tqdm=True)
    assert texts[1] == "known"
    assert [(a.task, a.index, a.document, a.text) for a in kept] == [("tiny", i, i, texts[i]) for i in (0, 2)]


def test_lm_evals_response_cache_is_refused(loaded, tmp_path):
    from lm_eval.api.model import CachingLM

    with pytest.raises(HarnessError, match="use_cache"):
        CachingLM(sparse(loaded), str(tmp_path / "responses.db"))


@pytest.mark.parametrize(("key", "value"), [("batch_size", 4), ("batch_size", "auto"), ("executor", "cuda")])
def test_what_it_cannot_do_is_refused(loaded, key, value):
    with pytest.raises(ValueError, match=f"{key}={value}"):
        SparseDecodeLM(fresh(loaded), ffd.Dense(), **{key: value})
