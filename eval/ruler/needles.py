"""Needle-in-a-haystack tasks: values to retrieve by key."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from uuid import UUID

from eval.ruler.essays import Essays
from eval.ruler.fitting import Draft, ImpossibleSize, Setting, SizedGenerator
from eval.ruler.tasks import NEEDLE_PROMPT, NeedleTask
from eval.ruler.words import needle_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Line of the repeated haystack, shared with variable tracking."""

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Depths in percent at which needles are put into the essays."""


class NeedleGenerator(SizedGenerator):
    """Draws needle tasks.

    Parameters
    ----------
    setting : Setting
    task : NeedleTask
    essays : Essays or None
        Haystack of the tasks with ``haystack="essay"``.
    """

    def __init__(self, setting: Setting, task: NeedleTask, essays: Essays | None) -> None:
        step = 500 if task.haystack == "essay" else 25 if setting.length >= 4096 else 5
        super().__init__(setting, NEEDLE_PROMPT.max_new_tokens, step)
        self._task = task
        self._essays = essays
        self._random = Random(setting.seed)
        one_answer = task.queries * task.values == 1
        self._template = _singular(setting.template) if one_answer else setting.template
        self._asked_kind = task.value_kind[:-1] if one_answer else task.value_kind

    def draw(self, size: int, index: int) -> Draft:
        """Draw keys and values, hide them in `size` words or lines, and ask for some."""
        task = self._task
        keys: list[str] = []
        values: list[list[str]] = []
        for _ in range(task.keys):
            keys.append(self._random_item(task.key_kind))
            values.append([self._random_item(task.value_kind) for _ in range(task.values)])
        needles = [self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        Random(self.setting.seed).shuffle(needles)

        context = self._in_essay(size, needles) if task.haystack == "essay" else self._in_lines(size, needles)
        asked = self._random.sample(range(task.keys), task.queries)
        text = self._template.format(
            type_needle_v=self._asked_kind, context=context, query=_enumerate([keys[i] for i in asked])
        )
        return Draft(text, tuple(value for i in asked for value in values[i]))

    def _in_essay(self, size: int, needles: Sequence[str]) -> str:
        assert self._essays is not None
        sentences = self._essays.sentences(size)
        depths = self._random.sample(_DEPTHS, len(needles))
        cuts = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        pieces = [" ".join(sentences[cuts[0] : cuts[1]])]
        for number, needle in enumerate(needles, start=1):
            pieces += [needle, " ".join(sentences[cuts[number] : cuts[number + 1]])]
        return " ".join(pieces)

    def _in_lines(self, size: int, needles: Sequence[str]) -> str:
        if self._task.haystack == "noise":
            lines = [NOISE] * size
        else:
            kinds = self._task.key_kind, self._task.value_kind
            lines = [self._needle(*map(self._random_item, kinds)) for _ in range(size)]
        if size < len(needles):
            raise ImpossibleSize(f"{size} lines cannot take {len(needles)} needles")
        # From the back, so that earlier positions stay valid.
        for position, needle in zip(
            sorted(self._random.sample(range(size), len(needles)), reverse=True), needles, strict=True
        ):
            lines.insert(position, needle)
        return "\n".join(lines)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self._task.value_kind, key=key, value=value)

    def _random_item(self, kind: str) -> str:
        if kind == "words":
            return self._random.choice(needle_words())
        if kind == "numbers":
            return str(self._random.randint(10**6, 10**7 - 1))
        return str(UUID(int=self._random.getrandbits(128), version=4))


def _singular(template: str) -> str:
    # The benchmark edits the whole text, chat template included, and in this order.
    for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, singular)
    return template


def _enumerate(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"
