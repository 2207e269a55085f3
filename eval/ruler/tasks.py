"""The 13 RULER tasks: prompts, token budgets and difficulty settings (NVIDIA/RULER at c3f5e3b)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Metric = Literal["all", "part"]
"""``all``: share of references found; ``part``: whether any reference is found."""


@dataclass(frozen=True)
class Prompt:
    """Texts and generation budget that the tasks of one generator share.

    The strings are the benchmark's own, byte for byte. `answer_prefix` starts the model's turn.
    """

    template: str
    answer_prefix: str
    max_new_tokens: int


@dataclass(frozen=True)
class NeedleTask:
    """Needles in a haystack: retrieve values by key."""

    haystack: Literal["noise", "essay", "needle"]
    key_kind: Literal["words", "uuids"] = "words"
    value_kind: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


@dataclass(frozen=True)
class ChainTask:
    """Variable tracking: follow a chain of assignments."""

    hops: int = 4


@dataclass(frozen=True)
class CommonWordsTask:
    """Common words extraction: name the words repeated most."""

    common: int = 10
    common_repeats: int = 30
    other_repeats: int = 3


@dataclass(frozen=True)
class FrequentWordsTask:
    """Frequent words extraction: name the top coded words of a zeta distribution."""

    alpha: float = 2.0
    word_length: int = 6


@dataclass(frozen=True)
class QuestionTask:
    """Question answering over documents, most of which are distractors."""

    dataset: Literal["squad", "hotpotqa"]


TaskKind = NeedleTask | ChainTask | CommonWordsTask | FrequentWordsTask | QuestionTask

NEEDLE_PROMPT = Prompt(
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    128,
)
CHAIN_PROMPT = Prompt(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{num_v} variables are assigned the value {query}, they are: ",
    30,
)
COMMON_WORDS_PROMPT = Prompt(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FREQUENT_WORDS_PROMPT = Prompt(
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QUESTION_PROMPT = Prompt(
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\nQuestion: {query}",
    " Answer:",
    32,
)


@dataclass(frozen=True)
class Task:
    """One of the 13 tasks."""

    prompt: Prompt
    kind: TaskKind
    metric: Metric = "all"

    @property
    def sources(self) -> tuple[str, ...]:
        """Names in `eval.data` of the external data the task cannot do without."""
        if isinstance(self.kind, NeedleTask) and self.kind.haystack == "essay":
            return ("ruler/essays", "nltk/punkt_tab")
        if isinstance(self.kind, QuestionTask):
            return (f"ruler/{self.kind.dataset}",)
        return ()


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "niah_single_1": Task(NEEDLE_PROMPT, NeedleTask("noise")),
        "niah_single_2": Task(NEEDLE_PROMPT, NeedleTask("essay")),
        "niah_single_3": Task(NEEDLE_PROMPT, NeedleTask("essay", value_kind="uuids")),
        "niah_multikey_1": Task(NEEDLE_PROMPT, NeedleTask("essay", keys=4)),
        "niah_multikey_2": Task(NEEDLE_PROMPT, NeedleTask("needle")),
        "niah_multikey_3": Task(NEEDLE_PROMPT, NeedleTask("needle", key_kind="uuids", value_kind="uuids")),
        "niah_multivalue": Task(NEEDLE_PROMPT, NeedleTask("essay", values=4)),
        "niah_multiquery": Task(NEEDLE_PROMPT, NeedleTask("essay", keys=4, queries=4)),
        "vt": Task(CHAIN_PROMPT, ChainTask()),
        "cwe": Task(COMMON_WORDS_PROMPT, CommonWordsTask()),
        "fwe": Task(FREQUENT_WORDS_PROMPT, FrequentWordsTask()),
        "qa_1": Task(QUESTION_PROMPT, QuestionTask("squad"), "part"),
        "qa_2": Task(QUESTION_PROMPT, QuestionTask("hotpotqa"), "part"),
    }
)
"""Every task by name, in the order of the official tables."""
