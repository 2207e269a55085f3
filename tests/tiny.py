"""Tiny random models of each supported family, initialised widely enough that attention decides the output."""

from __future__ import annotations

from typing import Any

import torch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY = 64


def tiny_model(
    family: str, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, layers: int = 2, **extra: Any
) -> Any:
    """A random model of a family; the same arguments give the same weights."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    config_class = getattr(transformers, names[family] + "Config")
    model_class = getattr(transformers, names[family] + "ForCausalLM")
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if family in ("qwen3", "llama", "mistral"):
        options["head_dim"] = head_dim
    if family == "mistral":
        options["sliding_window"] = None
    torch.manual_seed(0)
    model = model_class(config_class(**{**options, **extra})).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            # Wide enough that queries and keys spread the scores over several nats.
            torch.nn.init.normal_(parameter, std=2.5 / parameter.shape[1] ** 0.5)
    return model


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
