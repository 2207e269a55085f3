"""RULER's fitting of a prompt to a token budget, and what every generator is made of.

A size (words, lines or documents of haystack) is searched once with fresh random draws; each sample
is then drawn at that size, and drawn again a step smaller for as long as it overflows. All draws
come from one stream, so the failed ones decide what the later ones look like.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from eval.ruler.tokens import TokenCounter

MAX_DRAWS_AT_SMALLEST = 128
"""Draws at the smallest size before a sample counts as impossible (the official code never gives up)."""

SAFE_STEPS = 4
"""A task of whose size steps this many fit has room to shrink whenever a draw overflows."""


@dataclass(frozen=True)
class Setting:
    """What a generator is given beside its task.

    Attributes
    ----------
    template : str
        Chat template with the task's template inside, followed by the answer prefix.
    length : int
        Tokens of prompt and generation together.
    template_tokens : int
        Tokens to set aside for a chat template that is applied afterwards; 0 otherwise.
    seed : int
        Seed of the stream and of the fixed shuffles.
    count : TokenCounter
        Counts tokens of the evaluated model.
    """

    template: str
    length: int
    template_tokens: int
    seed: int
    count: TokenCounter

    @property
    def budget(self) -> int:
        """Tokens left for prompt and generation."""
        return self.length - self.template_tokens


@dataclass(frozen=True)
class Draft:
    """One drawn prompt, answer prefix included, with the expected answers."""

    text: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class FittedDraft:
    """A draft within the budget."""

    text: str
    outputs: tuple[str, ...]
    length: int
    """Tokens of the prompt plus the tokens to generate."""


class DoesNotFit(Exception):  # noqa: N818 - a finding about a length, not a fault
    """A sample that the official procedure can never bring under its budget."""

    def __init__(self, index: int, why: str) -> None:
        self.index = index
        super().__init__(f"sample {index} {why}")


class FailedDraw(Exception):  # noqa: N818 - handled like a draw that overflows
    """Random numbers that do not make a prompt."""


class ImpossibleSize(FailedDraw):
    """A size at which nothing can be drawn, whatever the random numbers."""


class Generator(ABC):
    """Draws the samples of one task."""

    @abstractmethod
    def samples(self, count: int) -> Iterator[FittedDraft]:
        """The first `count` samples; raises `DoesNotFit`. A generator is used once: it holds its stream."""

    @abstractmethod
    def surely_fits(self) -> bool:
        """Whether a small probe leaves no doubt that samples fit; uses up draws of the stream."""


class SizedGenerator(Generator):
    """A generator whose prompts are sized by RULER's binary search.

    Parameters
    ----------
    setting : Setting
    max_new_tokens : int
        Tokens to generate, part of the budget.
    step : int
        Smallest size of the search, and by how much an overflowing sample shrinks.
    """

    def __init__(self, setting: Setting, max_new_tokens: int, step: int) -> None:
        self.setting = setting
        self.max_new_tokens = max_new_tokens
        self.step = step

    @abstractmethod
    def draw(self, size: int, index: int) -> Draft:
        """Draw sample `index` at a size; raises `FailedDraw`."""

    def trial(self, size: int) -> int:
        """Tokens the search sees at a size: those of one fresh draw."""
        return self.setting.count(self.draw(size, 0).text)

    def first_estimate(self) -> float:
        """Tokens per unit of size, from one trial."""
        return self.trial(self.step) / self.step

    def upper_bound(self, tokens_per_unit: float) -> int:
        """Largest size that the search considers."""
        return int(self.setting.budget / tokens_per_unit * 3)

    @property
    def reserve(self) -> int:
        """Tokens that the search sets aside beside those of a trial."""
        return self.max_new_tokens

    def search(self) -> int:
        """Largest size whose one trial fits, `step` if none does."""
        low = best = self.step
        high = max(self.upper_bound(self.first_estimate()), 2 * self.step)
        while low <= high:
            middle = (low + high) // 2
            if self._trial_fits(middle):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def samples(self, count: int) -> Iterator[FittedDraft]:
        """Search the size once, then draw every sample at it or below."""
        try:
            size = self.search()
        except FailedDraw as reason:
            raise DoesNotFit(0, f"cannot be sized: {reason}") from None
        for index in range(count):
            yield self._fit(size, index)

    def surely_fits(self) -> bool:
        """Whether a prompt several steps above the smallest one fits."""
        return self._trial_fits(SAFE_STEPS * self.step)

    def _trial_fits(self, size: int) -> bool:
        try:
            return self.trial(size) + self.reserve <= self.setting.budget
        except FailedDraw:
            return False

    def _fit(self, size: int, index: int) -> FittedDraft:
        shortest, previous = math.inf, ""
        draws_left = MAX_DRAWS_AT_SMALLEST
        while draws_left:
            # As officially: a size above the step shrinks by a whole step, so it can end below it.
            smallest = size <= self.step
            try:
                draft = self.draw(size, index)
            except FailedDraw as reason:
                if smallest and isinstance(reason, ImpossibleSize):
                    raise DoesNotFit(index, f"overflows and cannot shrink further: {reason}") from None
            else:
                length = self.setting.count(draft.text) + self.max_new_tokens
                if length <= self.setting.budget:
                    return FittedDraft(draft.text, draft.outputs, length)
                shortest = min(length, shortest)
                if draft.text == previous:
                    break  # nothing random is left at this size
                previous = draft.text
            if smallest:
                draws_left -= 1
            else:
                size -= self.step
        raise DoesNotFit(index, f"needs {shortest} tokens at its smallest, prompt and generation together")
