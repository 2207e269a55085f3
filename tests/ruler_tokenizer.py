"""Tokenizers for RULER's tests: one built here from pieces of words, and that of the embedded model."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eval import data

BOS = "<|begin_of_text|>"
SPECIAL = ("<unk>", BOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PIECES = r" ?\p{L}{1,6}|\p{N}{1,3}|[^\s\p{L}\p{N}]|\s"


def build() -> PreTrainedTokenizerFast:
    """Tokenizer with about as many tokens per word as real ones; it adds BOS, as Llama 3's does.

    All pieces share the id of ``<unk>``: RULER only counts tokens.
    """
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(SPECIAL)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token=BOS, eos_token="<|eot_id|>")


@cache
def load_smollm2() -> Any:
    """SmolLM2's tokenizer from the project's embedded model; raises `eval.data.SourceUnavailable`."""
    file = data.resolve("model/smollm2_135m")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
