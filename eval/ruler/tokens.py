"""Token counts as RULER takes them: without the special tokens a tokenizer adds on its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any


class TokenCounter:
    """Counts ``len(tokenizer.tokenize(text))`` without building the tokens.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Tokenizer of the evaluated model. A fast one is copied, so that truncation or padding that
        was switched on elsewhere cannot change a count.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = _fast_copy(tokenizer)

    def __call__(self, text: str) -> int:
        """Tokens of one text."""
        return self.many([text])[0]

    def many(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text; a fast tokenizer takes several at once on all cores."""
        if self._fast is None:
            return [len(self._tokenizer.tokenize(text)) for text in texts]
        return [len(encoding) for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def digest(self) -> str:
        """Hex sha256 of what determines the counts."""
        if self._fast is not None:
            content = self._fast.to_str() + str(self._fast.encode_special_tokens)
        else:
            vocabulary = sorted(self._tokenizer.get_vocab().items())
            content = f"{type(self._tokenizer).__qualname__}{vocabulary}{self._tokenizer.init_kwargs}"
        return hashlib.sha256(content.encode()).hexdigest()


def _fast_copy(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy
