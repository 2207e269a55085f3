"""The records that pass between suites, runners and the store.

A suite turns a task configuration into samples and scores predictions; it knows nothing of
methods, engines or files of results. A runner knows suites only through :class:`Suite`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class TaskError(ValueError):
    """A task cannot be run as asked; the message names the field, the value and what is accepted."""


def excerpt(value: Any) -> str:
    """JSON text of a value that a file holds, short enough for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Sample:
    """One prompt with what is needed to run and score it."""

    task: str
    """Task name as it appears in tables, e.g. ``niah_single_1``."""
    index: int
    """Position of the sample in its task, from 0."""
    prompt: str
    """Exact text handed to the tokenizer: template, truncation and answer prefix included."""
    references: tuple[str, ...]
    """Accepted answers, in the benchmark's order."""
    max_new_tokens: int
    """Tokens the model may generate."""
    add_special_tokens: bool
    """Whether the tokenizer adds its own BOS (False where the template text carries it)."""
    truncated: bool = False
    """Whether the benchmark's rule cut the prompt."""
    stop_strings: tuple[str, ...] = ()
    """Strings whose token ends generation beside the model's own end tokens (samsum's newline)."""
    min_new_tokens: int = 0
    """End tokens are ignored before this many tokens were generated."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Benchmark fields that travel with the sample (answer_prefix, all_classes, length, _id)."""

    @property
    def fingerprint(self) -> str:
        """Hex sha256 of the prompt text: equal fingerprints mean the same prompt was run."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()


@dataclass(frozen=True)
class Skipped:
    """A task that is not run, and why."""

    task: str
    reason: str
    source_missing: bool = False
    """True where data are absent (the run is then partial); False where the length excludes the task."""


def reasons(skipped: Sequence[Skipped]) -> str:
    """Why tasks are not run, on one line that says each reason once."""
    by_reason: dict[str, list[str]] = {}
    for skip in skipped:
        by_reason.setdefault(skip.reason, []).append(skip.task)
    return "; ".join(f"{_named(tasks)}: {reason}" for reason, tasks in by_reason.items())


def _named(tasks: Sequence[str]) -> str:
    return ", ".join(tasks) if len(tasks) <= 3 else f"{tasks[0]} and {len(tasks) - 1} others"


@dataclass(frozen=True)
class Plan:
    """What a suite will run, decided before any prompt is generated or weight loaded."""

    tasks: tuple[str, ...]
    samples_per_task: Mapping[str, int]
    skipped: tuple[Skipped, ...] = ()
    covers_benchmark: bool = True
    """False where tasks of the benchmark are left out, by choice or necessity: averages are then partial."""
    official: bool = True
    """False where data or template differ from the official protocol."""
    notes: tuple[str, ...] = ()
    """Lines the table's header carries (substituted haystack, extension template, ...)."""


@dataclass(frozen=True)
class TaskScore:
    """Score of one task over its finished samples, in the benchmark's own unit (0-100)."""

    score: float | None
    """None when no sample finished."""
    n: int
    ci95: tuple[float, float] | None
    """95 % interval in the same unit: Wilson where every sample scores 0 or 1, else bootstrap-free t."""


class Suite(Protocol):
    """A benchmark: RULER, LongBench, or one that a user adds."""

    name: str

    def plan(self) -> Plan:
        """Decide tasks and skips without generating prompts; raise `TaskError` for impossible requests."""

    def samples(self, task: str) -> Sequence[Sample]:
        """All samples of one task, in index order; generated or read from the cache."""

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of the sample's prompt under the suite's BOS rule."""

    def score(self, sample: Sample, prediction: str) -> float:
        """Score of one prediction in [0, 1] by the official rule, post-processing included."""

    def summarize(self, scores: Mapping[str, Sequence[float]]) -> tuple[dict[str, TaskScore], dict[str, float | None]]:
        """Per-task scores and named averages from the per-sample scores."""

    def average_tasks(self, tasks: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """Which of some tasks each named average of `summarize` is over."""
