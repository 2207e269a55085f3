"""Common words extraction: the most repeated words of a numbered list."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from eval.data import SourceUnavailable
from eval.ruler.fitting import Draft, ImpossibleSize, Setting, SizedGenerator
from eval.ruler.tasks import COMMON_WORDS_PROMPT, CommonWordsTask
from eval.ruler.words import common_words

_ESTIMATE_SIZE = 4096
"""Words of the trial from which the tokens per word are estimated."""


class CommonWordsGenerator(SizedGenerator):
    """Draws common words extraction, after a one-shot example that uses the whole template.

    Parameters
    ----------
    setting : Setting
    task : CommonWordsTask
    long_list : sequence of str or None
        Words to draw from where the usual list is too short (RULER's ``english_words.json``).
    """

    def __init__(self, setting: Setting, task: CommonWordsTask, long_list: Sequence[str] | None) -> None:
        super().__init__(setting, COMMON_WORDS_PROMPT.max_new_tokens, step=10)
        self._common = task.common
        short = setting.length < 4096
        # words, repeats of the common ones, repeats of the others
        self._example = (20, 3, 1) if short else (40, 10, 3)
        self._repeats = (6, 1) if short else (task.common_repeats, task.other_repeats)
        self._words = common_words(setting.seed)
        self._long_list = long_list
        self._random = Random(setting.seed)

    def first_estimate(self) -> float:
        """Tokens per word, from a long list."""
        return self.trial(_ESTIMATE_SIZE) / _ESTIMATE_SIZE

    def upper_bound(self, tokens_per_unit: float) -> int:
        """Twice the words that the estimate allows."""
        return int(self.setting.budget // tokens_per_unit) * 2

    def surely_fits(self) -> bool:
        """As for every sized task, and whether the words suffice: raises `SourceUnavailable` if not."""
        if self._long_list is None and self.upper_bound(self.first_estimate()) > len(self._words):
            self.search()
        return super().surely_fits()

    def draw(self, size: int, index: int) -> Draft:
        """Draw the example and then a list of `size` distinct words."""
        example, example_answer = self._list(*self._example)
        context, answer = self._list(size, *self._repeats)
        shot = f"{self._ask(example)} {_numbered(example_answer)}"
        return Draft(f"{shot}\n{self._ask(context)}", tuple(answer))

    def _ask(self, context: str) -> str:
        return self.setting.template.format(context=context)

    def _list(self, size: int, common_repeats: int, other_repeats: int) -> tuple[str, list[str]]:
        words = self._sample(size)
        common, others = words[: self._common], words[self._common :]
        entries = common * common_repeats + others * other_repeats
        Random(self.setting.seed).shuffle(entries)
        return _numbered(entries), common

    def _sample(self, size: int) -> list[str]:
        words: Sequence[str] = self._words
        if size > len(words):
            if self._long_list is None:
                raise SourceUnavailable(
                    "english_words.json",
                    f"length {self.setting.length} asks for {size} distinct words, the usual list holds {len(words)}; "
                    "set task.data_dir= to a folder that holds RULER's english_words.json",
                )
            words = self._long_list
            if size > len(words):
                raise ImpossibleSize(f"{size} distinct words are needed, english_words.json holds {len(words)}")
        return self._random.sample(words, size)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
