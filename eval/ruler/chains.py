"""Variable tracking: which variables end up with a value, through a chain of assignments."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from eval.ruler.fitting import Draft, FailedDraw, ImpossibleSize, Setting, SizedGenerator
from eval.ruler.needles import NOISE
from eval.ruler.tasks import CHAIN_PROMPT, ChainTask

if TYPE_CHECKING:
    from numpy.random import RandomState

_EXAMPLE_VALUE = "12345"
_EXAMPLE_LENGTH = 500
"""Tokens of the one-shot example, whatever the length of the task."""


def _names(random: Random, letters: int, count: int) -> list[str]:
    """Draw until `count` names differ: more than `count` of them if two were equal."""
    names = [_name(random, letters) for _ in range(count)]
    while len(set(names)) < count:
        names.append(_name(random, letters))
    return names


def _name(random: Random, letters: int) -> str:
    return "".join(random.choices(string.ascii_uppercase, k=letters))


def _refuse_equal(names: Sequence[str], count: int) -> None:
    # The official code makes a second chain of the surplus names, fails on it and draws again.
    if len(names) > count:
        raise FailedDraw("two variables have the same name")


def _context(random: Random, size: int, names: Sequence[str], value: str) -> str:
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {source} " for source, name in pairwise(names)]
    lines = [NOISE] * size
    if size < len(chain):
        raise ImpossibleSize(f"{size} lines cannot take {len(chain)} assignments")
    for shift, position in enumerate(sorted(random.sample(range(size), len(chain)))):
        lines.insert(position + shift, chain[shift])
    return "\n".join(lines)


class ExampleGenerator(SizedGenerator):
    """Draws the one-shot example: three-letter names, a placeholder value, no chat template."""

    def __init__(self, setting: Setting, task: ChainTask, random: Random) -> None:
        example = Setting(
            CHAIN_PROMPT.template + CHAIN_PROMPT.answer_prefix,
            _EXAMPLE_LENGTH,
            setting.template_tokens,
            setting.seed,
            setting.count,
        )
        super().__init__(example, max_new_tokens=0, step=5)
        self._variables = task.hops + 1
        self._random = random

    def draw(self, size: int, index: int) -> Draft:
        """Draw the example with `size` lines of noise."""
        names = _names(self._random, 3, self._variables)
        _refuse_equal(names, self._variables)
        context = _context(self._random, size, names, _EXAMPLE_VALUE)
        text = self.setting.template.format(context=context, query=_EXAMPLE_VALUE, num_v=self._variables)
        return Draft(text, tuple(names))


class ChainGenerator(SizedGenerator):
    """Draws variable tracking: one chain in noise, after a one-shot example in the same turn."""

    def __init__(self, setting: Setting, task: ChainTask) -> None:
        super().__init__(setting, CHAIN_PROMPT.max_new_tokens, step=10 if setting.length >= 4096 else 5)
        from numpy.random import RandomState  # a local state of the stream that `numpy.random.seed` starts

        self._task = task
        self._variables = task.hops + 1
        self._random = Random(setting.seed)
        self._values: RandomState = RandomState(setting.seed)

    @cached_property
    def _example(self) -> str:
        drawn = next(ExampleGenerator(self.setting, self._task, self._random).samples(1))
        return f"{drawn.text} {' '.join(drawn.outputs)}\n"

    @cached_property
    def _example_tokens(self) -> int:
        return self.setting.count(self._example)

    @property
    def reserve(self) -> int:
        """Tokens to generate and those of the example, which trials leave out."""
        return self.max_new_tokens + self._example_tokens

    def search(self) -> int:
        """Largest size that fits beside the example, whose draws come first in the stream."""
        _ = self._example
        return super().search()

    def trial(self, size: int) -> int:
        """Tokens of a draw without the example."""
        return self.setting.count(self._question(size).text)

    def draw(self, size: int, index: int) -> Draft:
        """Draw a question and put the example, with fresh names and value, before it."""
        question = self._question(size)
        start = question.text.index(CHAIN_PROMPT.template[:20])
        text = f"{question.text[:start]}{self._fresh_example()}\n{question.text[start:]}"
        return Draft(text, question.outputs)

    def _question(self, size: int) -> Draft:
        names = _names(self._random, 5, self._variables)
        value = self._value()
        if len(names) > self._variables:
            self._value()
        _refuse_equal(names, self._variables)
        context = _context(self._random, size, names, value)
        text = self.setting.template.format(context=context, query=value, num_v=self._variables)
        return Draft(text, tuple(names))

    def _fresh_example(self) -> str:
        example = self._example
        for name in example.split()[-self._variables :]:
            example = example.replace(name, _name(self._random, len(name)))
        return example.replace(_EXAMPLE_VALUE, self._value())

    def _value(self) -> str:
        return str(self._values.randint(10000, 99999))
