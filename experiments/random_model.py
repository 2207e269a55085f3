"""Tiny models with random weights, for recipes whose real models do not fit a small machine.

Their scores mean nothing; their names begin with ``random-``, and tables head them "random weights".
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2")


def random_model(family: str, root: Path) -> Path:
    """Folder ``random-<family>`` under ``root`` with a two-layer model and the embedded model's tokenizer.

    Made once; the same family always gets the same weights.

    Raises
    ------
    ValueError
        For a family that is not accepted.
    eval.data.DataError
        If the embedded model's tokenizer cannot be had.
    """
    if family not in FAMILIES:
        raise ValueError(f"random={family}: expected one of {', '.join(FAMILIES)}")
    folder = root / f"random-{family}"
    if not (folder / "config.json").exists():
        partial = root / f".{folder.name}.{os.getpid()}"
        try:
            _write(family, partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(family: str, folder: Path) -> None:
    import torch

    from eval.data.hub import quiet
    from eval.models import ModelSpec, load_tokenizer

    tokenizer = load_tokenizer(ModelSpec())
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = _model(family, len(tokenizer), tokenizer.eos_token_id)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            # Wide enough that attention scores spread over several nats, as a trained model's do.
            torch.nn.init.normal_(parameter, std=2.5 / parameter.shape[1] ** 0.5)
    with quiet():
        model.save_pretrained(folder)


def _model(family: str, vocabulary: int, end: int) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "eos_token_id": end,
    }
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, bos_token_id=None))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
