"""What ``task=lm_eval`` was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eval.records import TaskError


@dataclass(frozen=True)
class LmEvalConfig:
    """Keys of ``task=lm_eval``, named as lm-eval names them.

    Raises
    ------
    TaskError
        For a value that is not accepted.
    """

    tasks: tuple[str, ...] = ()
    """Task, group or tag names, glob patterns, or task files."""
    include_path: str | None = None
    """Folder with task files of one's own."""
    limit: int | float | None = None
    """Documents per task; below 1, a share of them."""
    num_fewshot: int | None = None
    """Examples in the prompt; None for each task's own number."""
    apply_chat_template: bool = False
    """Render prompts through the model's chat template."""
    fewshot_as_multiturn: bool | None = None
    """Few-shot examples as turns of a conversation; None for lm-eval's default, with a chat template only."""
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Generation options that replace the tasks' own, such as ``max_gen_toks``."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What tasks with generated data ask for, such as ``max_seq_lengths``."""
    max_length: int | None = None
    """Tokens of prompt and answer; None for the model's context."""
    seed: int | None = None
    """Of Python, numpy, torch and the few-shot sampler; None for lm-eval's defaults."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that execute what the model wrote."""

    def __post_init__(self) -> None:
        _require(bool(self.tasks), "tasks", list(self.tasks), "a list of lm-eval task or group names")
        if self.include_path is not None:
            _require(Path(self.include_path).is_dir(), "include_path", self.include_path, "an existing folder")
        number = isinstance(self.limit, int | float) and not isinstance(self.limit, bool) and self.limit > 0
        whole = number and (self.limit < 1 or self.limit == int(self.limit))  # type: ignore[operator,arg-type]
        _require(self.limit is None or whole, "limit", self.limit, "a whole number > 0, or a share between 0 and 1")
        for name, minimum in (("num_fewshot", 0), ("max_length", 1), ("seed", 0)):
            value = getattr(self, name)
            accepted = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
            _require(value is None or accepted, name, value, f"an integer >= {minimum}")
        for name in ("apply_chat_template", "confirm_run_unsafe_code"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        multiturn = self.fewshot_as_multiturn
        _require(multiturn in (None, True, False), "fewshot_as_multiturn", multiturn, "true, false or null")
        _require(
            not multiturn or self.apply_chat_template, "fewshot_as_multiturn", multiturn, "apply_chat_template=true too"
        )
        for name in ("gen_kwargs", "metadata"):
            _require(isinstance(getattr(self, name), Mapping), name, getattr(self, name), "a mapping, {key: value}")

    @property
    def multiturn(self) -> bool:
        """Whether few-shot examples are turns of a conversation."""
        return self.apply_chat_template if self.fewshot_as_multiturn is None else self.fewshot_as_multiturn

    @property
    def seeds(self) -> tuple[int, int, int, int]:
        """Of Python, numpy, torch and the few-shot sampler; lm-eval's own where none was given."""
        return (0, 1234, 1234, 1234) if self.seed is None else (self.seed,) * 4


def make_config(task: Mapping[str, Any]) -> LmEvalConfig:
    """Build the configuration from the composed ``task``; None stands for a key's default.

    Raises
    ------
    TaskError
        For an unknown key or a value that is not accepted.
    """
    known = {f.name for f in fields(LmEvalConfig)}
    given: dict[str, Any] = {key: value for key, value in task.items() if key != "name" and value is not None}
    for key, value in given.items():
        if key not in known:
            raise TaskError(f"task.{key}={value}: expected one of {', '.join(sorted(known))}")
    if "tasks" in given:
        tasks = given["tasks"]
        given["tasks"] = tuple(map(str, tasks)) if isinstance(tasks, list | tuple) else tuple(str(tasks).split(","))
    return LmEvalConfig(**given)


def _require(condition: bool, key: str, value: object, accepted: str) -> None:
    if not condition:
        raise TaskError(f"task.{key}={value}: expected {accepted}")
