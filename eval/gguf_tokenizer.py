"""A GGUF file's tokenizer, by the rules of the format's reference implementation.

transformers applies them (llama.cpp, src/llama-vocab.cpp) only in part and differently from version to
version: how text is split before merging, whether a start token is added, and which tokens end a generation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PreTokenizer:
    """What the name in ``tokenizer.ggml.pre`` stands for."""

    pattern: str | None
    """Regular expression whose matches are merged separately; None: single digits, then GPT-2's."""
    adds_bos: bool = False
    """Whether a start token is added when the file does not say."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole is never split (Llama 3)."""
    ends: tuple[str, ...] = ()
    """Tokens that end a generation in the published generation configurations of such models."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = PreTokenizer(
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    adds_bos=True,
    ignores_merges=True,
    ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
)
PRE_TOKENIZERS = {
    "smollm": PreTokenizer(None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", ends=("<|im_end|>", "<|endoftext|>")),
}
"""Byte-level BPE pre-tokenizers of the model families the project supports."""


def _rule(metadata: dict[str, Any]) -> PreTokenizer | None:
    return PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))


def rebuild_tokenizer(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """A generic fast tokenizer with the file's vocabulary and the reference implementation's rules."""
    from tokenizers import Regex, processors
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    rule = _rule(metadata)
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    if rule is not None:
        if rule.pattern is None:
            steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        else:
            split = Split(Regex(rule.pattern), behavior="isolated")
            steps = [split, ByteLevel(add_prefix_space=False, use_regex=False)]
        backend.pre_tokenizer = Sequence(steps)
        backend.model.ignore_merges = rule.ignores_merges
    elif not sentencepiece:
        name = metadata.get("tokenizer.ggml.pre")
        print(f"ffd: GGUF pre-tokenizer {name!r} is not known here; taken as transformers reads it", file=sys.stderr)
    # By the file's ids: what transformers makes of them differs between its versions.
    special = {
        f"{role}_token": backend.id_to_token(metadata[f"tokenizer.ggml.{key}_token_id"])
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    bos = special.get("bos_token")
    default = sentencepiece or (rule is not None and rule.adds_bos)
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    else:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    rebuilt = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    rebuilt.chat_template = tokenizer.chat_template
    return rebuilt


def generation_config(tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """Which tokens begin and end a generation, by the file and by the rule of its family."""
    from transformers import GenerationConfig

    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    rule = _rule(metadata)
    vocabulary = tokenizer.get_vocab()
    ends |= {vocabulary.get(token) for token in (rule.ends if rule is not None else ())}
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(end for end in ends if end is not None),
        pad_token_id=tokenizer.pad_token_id,
    )
