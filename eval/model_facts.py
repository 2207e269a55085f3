"""What a model's configuration and tokenizer say of it, and whether it is one that can be evaluated."""

from __future__ import annotations

from typing import Any

from eval.data.hub import quiet
from eval.model_files import ModelError, ModelFiles
from ffd.support import ACCEPTED, UnsupportedModelError, require_supported


def require_usable(files: ModelFiles, config: Any) -> None:
    """Refuse a model that transformers cannot load as a causal one, or that `ffd` cannot decode; no weight is read.

    Raises
    ------
    ModelError
        One line that names the model type and what is accepted.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        require_supported(config)
    except UnsupportedModelError as error:
        raise ModelError(f"{files.label}: {error}") from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{files.label}: model type {config.model_type}: not a causal language model; {ACCEPTED}")


def require_sdpa(files: ModelFiles, config: Any) -> None:
    """Refuse a model whose attention cannot be replaced, before its weights are read; raises `ModelError`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa:
        raise ModelError(
            f"{files.label}: model type {config.model_type}: its attention is more than a softmax over scaled products "
            f"(transformers has no sdpa for it); {ACCEPTED}"
        )


def family(config: Any, tokenizer: Any) -> str:
    """Model type, or llama3 for what has Llama-3's chat tokens."""
    # Llama 2 and 3 share a model type; the chat format, which templates depend on, tells them apart.
    if config.model_type == "llama" and "<|start_header_id|>" in tokenizer.get_vocab():
        return "llama3"
    return str(config.model_type)


def context_length(files: ModelFiles, config: Any) -> int:
    """Longest sequence in tokens; raises `ModelError` where the configuration states none."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise ModelError(f"{files.label}: its configuration states no max_position_embeddings")
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # YaRN leaves max_position_embeddings at the length before stretching.
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        length = max(length, int(rope["original_max_position_embeddings"] * rope.get("factor", 1.0)))
    return int(length)


def eos_token_ids(files: ModelFiles, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a generation, ascending."""
    from transformers import GenerationConfig

    try:
        with quiet():
            generation = GenerationConfig.from_pretrained(files.location, revision=files.hub_revision or "main")
    except OSError:  # the file is optional; the configuration then carries the token
        generation = config
    ids = {tokenizer.eos_token_id}
    stated = getattr(generation, "eos_token_id", None)
    ids |= set(stated) if isinstance(stated, list | tuple) else {stated}
    return tuple(sorted(int(token) for token in ids if token is not None))


def automatic_bos(tokenizer: Any) -> int | None:
    """Token that the tokenizer puts before a text by itself."""
    with_special = tokenizer("a").input_ids
    without = tokenizer("a", add_special_tokens=False).input_ids
    if len(with_special) > len(without) and with_special[0] == tokenizer.bos_token_id:
        return int(with_special[0])
    return None
