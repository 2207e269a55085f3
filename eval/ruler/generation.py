"""From a task to its rows: the generator of each kind, and the key of what determines its output."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.ruler.chains import ChainGenerator
from eval.ruler.coded_text import FrequentWordsGenerator
from eval.ruler.fitting import Generator, Setting
from eval.ruler.needles import NeedleGenerator
from eval.ruler.questions import QuestionGenerator
from eval.ruler.sources import Sources
from eval.ruler.tasks import ChainTask, CommonWordsTask, FrequentWordsTask, NeedleTask, Task
from eval.ruler.templates import PLACEHOLDER, Template
from eval.ruler.tokens import TokenCounter
from eval.ruler.word_lists import CommonWordsGenerator

_LIBRARIES = ("numpy", "scipy", "nltk", "wonderwords", "tokenizers")


def make_setting(task: Task, template: Template, length: int, seed: int, count: TokenCounter) -> Setting:
    """Setting of a task's generator under a template.

    The user's turn of an official template holds the task; the answer prefix follows it. For the
    model's own template the plain text is generated with as many tokens fewer as the template has,
    its placeholder included: the benchmark's mode for templates applied afterwards.
    """
    text = template.inside.replace(PLACEHOLDER, task.prompt.template) + task.prompt.answer_prefix
    template_tokens = 0 if template.official else count(template.text)
    return Setting(text, length, template_tokens, seed, count)


def make_generator(task: Task, setting: Setting, sources: Sources) -> Generator:
    """A fresh generator, at the start of its random stream."""
    kind = task.kind
    if isinstance(kind, NeedleTask):
        return NeedleGenerator(setting, kind, sources.essays if kind.haystack == "essay" else None)
    if isinstance(kind, ChainTask):
        return ChainGenerator(setting, kind)
    if isinstance(kind, CommonWordsTask):
        return CommonWordsGenerator(setting, kind, sources.long_list)
    if isinstance(kind, FrequentWordsTask):
        return FrequentWordsGenerator(setting, kind)
    return QuestionGenerator(setting, sources.questions(kind))


def content_key(name: str, task: Task, setting: Setting, sources: Sources) -> dict[str, Any]:
    """Everything that determines a task's rows, but their number."""
    return {
        "task": name,
        "template": setting.template,
        "length": setting.length,
        "template_tokens": setting.template_tokens,
        "seed": setting.seed,
        "tokenizer": setting.count.digest,
        "data": sources.fingerprint(task.sources, long_list=isinstance(task.kind, CommonWordsTask)),
        "libraries": {library: version(library) for library in _LIBRARIES},
        "python": platform.python_version_tuple()[:2],
        "generators": _source_digest(),
    }


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
