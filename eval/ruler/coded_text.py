"""Frequent words extraction: the top coded words of a text with zeta-distributed frequencies."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from random import Random

from eval.ruler.fitting import DoesNotFit, FittedDraft, Generator, Setting
from eval.ruler.tasks import FREQUENT_WORDS_PROMPT, FrequentWordsTask

_TOP = 3
"""Words asked for; the most frequent word of all is noise."""


class FrequentWordsGenerator(Generator):
    """Draws frequent words extraction. The text grows once in fixed steps; each sample shrinks to fit."""

    def __init__(self, setting: Setting, task: FrequentWordsTask) -> None:
        self._setting = setting
        self._task = task
        self._random = Random(setting.seed)
        self._budget = setting.budget - FREQUENT_WORDS_PROMPT.max_new_tokens
        self._step = self._budget // 32
        self._distinct = self._budget // 50

    def surely_fits(self) -> bool:
        """Whether three words can be asked for and the text has room beside its question."""
        return self._distinct > _TOP and self._setting.count(self._ask([])) < self._budget // 2

    def samples(self, count: int) -> Iterator[FittedDraft]:
        """Size the text with one vocabulary, then draw a vocabulary per sample."""
        if self._distinct <= _TOP:
            raise DoesNotFit(0, f"has room for {max(self._distinct, 0)} distinct words, more than {_TOP} are needed")
        size = self._grow()
        for index in range(count):
            yield self._fit(size, index)

    def _grow(self) -> int:
        vocabulary = self._vocabulary()
        size = self._budget // self._task.word_length
        while self._setting.count(self._text(vocabulary, size)) < self._budget:
            size += self._step
        return size - self._step

    def _fit(self, size: int, index: int) -> FittedDraft:
        vocabulary = self._vocabulary()
        while size > 0:
            text = self._text(vocabulary, size)
            tokens = self._setting.count(text)
            if tokens <= self._budget:
                return FittedDraft(text, tuple(vocabulary[1 : 1 + _TOP]), tokens + FREQUENT_WORDS_PROMPT.max_new_tokens)
            size -= self._step
        raise DoesNotFit(index, "leaves no room for its text")

    def _vocabulary(self) -> list[str]:
        words: set[str] = set()
        while len(words) < self._distinct:
            words.add("".join(self._random.choices(string.ascii_lowercase, k=self._task.word_length)))
        vocabulary = sorted(words)
        Random(self._setting.seed).shuffle(vocabulary)
        vocabulary[0] = "..."
        return vocabulary

    def _text(self, vocabulary: Sequence[str], size: int) -> str:
        # numpy's and scipy's own operations: the counts are truncated, so the last bit matters.
        import numpy as np
        from scipy.special import zeta

        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (size * (ranks**-self._task.alpha) / zeta(self._task.alpha)).astype(int)
        words = [word for word, count in zip(vocabulary, counts.tolist(), strict=True) for _ in range(count)]
        Random(self._setting.seed).shuffle(words)
        return self._ask(words)

    def _ask(self, words: Sequence[str]) -> str:
        return self._setting.template.format(context=" ".join(words))
