"""Models of many architectures: each decodes sparsely in every full-attention layer, or is refused in one line."""

from __future__ import annotations

import pytest
import torch
import transformers

import ffd
from eval.models import ModelError, ModelSpec, describe, load_model
from ffd.methods import create
from ffd.support import ACCEPTED, UnsupportedModelError
from tests.run_in_process import invoke

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
PROMPT = list(range(1, 41))


def tiny(model_type: str, **changes: object) -> transformers.PreTrainedModel:
    """A random model of two layers."""
    options = {key: value for key, value in (SMALL | changes).items() if value is not ...}
    config = transformers.CONFIG_MAPPING[model_type](**options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "changes", "sliding"),
    [
        ("gpt2", {"head_dim": ..., "num_key_value_heads": ...}, 0),
        ("gpt_neox", {"head_dim": ..., "num_key_value_heads": ...}, 0),
        ("opt", {"head_dim": ..., "num_key_value_heads": ..., "word_embed_proj_dim": 64, "ffn_dim": 64}, 0),
        ("phi3", {}, 0),
        ("gemma", {}, 0),
        ("olmo2", {}, 0),
        ("granite", {}, 0),
        ("starcoder2", {}, 0),
        ("mixtral", EXPERTS | {"sliding_window": None}, 0),
        ("qwen3_moe", EXPERTS, 0),
        ("cohere2", MIXED, 1),
        ("gemma3_text", MIXED, 1),
    ],
)
def test_models_built_alike_decode_sparsely_and_dense_is_their_own(model_type, changes, sliding):
    model = tiny(model_type, **changes)
    ids = torch.tensor([PROMPT])
    own = model.generate(ids, max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()
    engine = ffd.Engine(model, create("topk", {"token_budget": 8}), capacity=64)
    ledger = engine.generate([PROMPT], 6).ledger
    assert (ledger.sparse_steps, ledger.dense_steps) == (5 * (2 - sliding), 5 * sliding)
    assert ffd.Engine(model, create("dense", {}), capacity=64).generate([PROMPT], 6).tokens == [own]


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("falcon", {"head_dim": ..., "num_key_value_heads": ...}, "layer 0 has 1 kv heads of size 16"),
        ("diffllama", {}, r"its attention uses keys and values by itself \(chunk\)"),
        ("doge", {}, r"its attention uses keys and values by itself \(transpose\)"),
        (
            "laguna",
            {"num_experts": 2, "num_experts_per_tok": 1, "num_attention_heads_per_layer": [4, 8]},
            "query heads",
        ),
        ("mistral", {"sliding_window": 8}, "all layers are sliding-window attention"),
        ("deepseek_v3", {"kv_lora_rank": 16}, "kv_lora_rank: multi-head latent attention"),
    ],
)
def test_what_shows_only_when_it_runs_is_refused_in_one_line(model_type, changes, reason):
    model = tiny(model_type, **changes)
    with pytest.raises(UnsupportedModelError, match=f"^model type {model_type}: .*{reason}.*; {ACCEPTED}$"):
        ffd.Engine(model, create("topk", {"token_budget": 8}), capacity=64).generate([PROMPT], 6)


REFUSED = {
    "mamba": "layer type linear_attention",
    "rwkv": "its configuration has no num_attention_heads",
    "jamba": "layer type linear_attention",
    "falcon_h1": "layer type hybrid",
    "qwen3_next": "layer type linear_attention",
    "llama4": "layer type chunked_attention",
    "t5": "an encoder-decoder model",
    "bart": "an encoder-decoder model",
    "whisper": "an encoder-decoder model",
    "bert": "is_decoder=False, an encoder",
    "deepseek_v3": "kv_lora_rank: multi-head latent attention",
    "mllama": "cross_attention_layers",
    "llava": "not a causal language model",
    "gemma3n": "num_kv_shared_layers",
    "gemma4_text": "heads that differ from layer to layer",
}


@pytest.mark.parametrize(("model_type", "reason"), REFUSED.items(), ids=list(REFUSED))
def test_a_configuration_alone_is_enough_to_refuse(model_type, reason, tmp_path):
    transformers.CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError) as raised:
        describe(ModelSpec(path=str(tmp_path)))
    message = str(raised.value)
    assert message.startswith(f"model.path={tmp_path}: model type ")
    assert reason in message
    assert message.endswith(ACCEPTED)
    assert "\n" not in message


def test_attention_that_cannot_be_replaced_is_refused_before_weights_are_read(tmp_path):
    from tests.ruler_tokenizer import build

    transformers.CONFIG_MAPPING["gpt_oss"]().save_pretrained(tmp_path)
    build().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match="model type gpt_oss: its attention is more than a softmax"):
        load_model(ModelSpec(path=str(tmp_path), device="cpu"))


def test_a_refused_model_leaves_one_line_and_no_run(tmp_path, monkeypatch, capsys):
    from tests.ruler_tokenizer import build

    folder = tmp_path / "falcon"
    tiny(
        "falcon", vocab_size=1024, max_position_embeddings=2048, head_dim=..., num_key_value_heads=...
    ).save_pretrained(folder)
    build().save_pretrained(folder)
    arguments = [f"model.path={folder}", "task.length=1024", "task.tasks=[vt]", "task.samples=1", "tracker=none"]
    assert invoke([*arguments, f"out={tmp_path}/out"], monkeypatch) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert line.startswith("error: model type falcon: layer 0 has 1 kv heads")
    assert list((tmp_path / "out" / "runs").iterdir()) == []
