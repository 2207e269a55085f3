"""What a LongBench run may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.longbench.datasets import DATASETS, EXTENDED, Dataset
from eval.records import TaskError

PROFILES = ("official", "ffd_paper")
TEMPLATES = ("auto", "none", "chat")

_PAPER_MAX_INPUT = 31500
_PAPER_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class LongBenchConfig:
    """A LongBench request, checked when it is made.

    Raises
    ------
    TaskError
        A value is not accepted; names the field, the value and what is.
    """

    tasks: Sequence[str] | None = None
    """Dataset names (without ``_e``); None for all."""
    samples: int | None = None
    """First rows of each task to run; None for all."""
    extended: bool = False
    """LongBench-E: 13 sets of other samples, each split into three tasks by length."""
    profile: str = "official"
    """``official``, or ``ffd_paper``: 31,500 input tokens, 64 new tokens, no chat template."""
    data_dir: str | Path | None = None
    """Folder of official JSONL files or a data.zip; None for the pinned download."""
    template: str = "auto"
    """``auto`` (the official one, else the tokenizer's own), ``none``, or ``chat`` (the tokenizer's own)."""
    max_input: int | None = None
    """Prompt tokens before the template; None for the profile's or the model's budget."""

    def __post_init__(self) -> None:
        for field, accepted in (("profile", PROFILES), ("template", TEMPLATES)):
            if getattr(self, field) not in accepted:
                raise TaskError(f"task.{field}={getattr(self, field)!r}; accepted: {', '.join(accepted)}")
        for field, least in (("samples", 1), ("max_input", 2)):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise TaskError(f"task.{field}={value!r}; accepted: an integer from {least}, or null")
        if self.profile == "ffd_paper" and self.template == "chat":
            raise TaskError("task.template='chat' contradicts task.profile=ffd_paper; accepted: auto, none")
        self._check_tasks()

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets asked for, in the official order."""
        return tuple(DATASETS[name] for name in self._known if self.tasks is None or name in self.tasks)

    @property
    def fixed_max_input(self) -> int | None:
        """Input budget where the request sets one, else None."""
        if self.max_input is None and self.profile == "ffd_paper":
            return _PAPER_MAX_INPUT
        return self.max_input

    def max_new_tokens(self, dataset: Dataset) -> int:
        """Tokens that may be generated on a dataset."""
        return _PAPER_MAX_NEW_TOKENS if self.profile == "ffd_paper" else dataset.max_new_tokens

    @property
    def _known(self) -> tuple[str, ...]:
        return EXTENDED if self.extended else tuple(DATASETS)

    def _check_tasks(self) -> None:
        if self.tasks is None:
            return
        if isinstance(self.tasks, str) or not self.tasks:
            raise TaskError(f"task.tasks={self.tasks!r}; accepted: a list of dataset names, or null for all")
        for name in self.tasks:
            if name not in self._known:
                which = "LongBench-E" if self.extended else "LongBench"
                raise TaskError(f"task.tasks: {name!r} is not in {which}; accepted: {', '.join(self._known)}")
