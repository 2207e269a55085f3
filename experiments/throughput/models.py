"""Models with random weights: a step's time does not depend on what they are."""

from __future__ import annotations

from typing import Any

GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama31_8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "toy": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
"""Llama configurations by name."""
SMALL = ("toy",)
"""Those that try the runner itself, without a GPU too."""


def random_model(geometry: str, device: str, dtype: str) -> Any:
    """A model of this geometry with random weights, made on its device.

    Parameters
    ----------
    geometry
        Key of `GEOMETRIES`.
    device
        cuda or cpu.
    dtype
        float32, bfloat16 or float16.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**GEOMETRIES[geometry]), dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)
