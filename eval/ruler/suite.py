"""RULER as a suite: plan, samples, encoding and scores."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval import data
from eval.records import Plan, Sample, TaskError, TaskScore
from eval.ruler.config import RulerConfig
from eval.ruler.fitting import DoesNotFit, Setting
from eval.ruler.generation import content_key, make_generator, make_setting
from eval.ruler.planning import make_plan
from eval.ruler.rows import Row, RowCache, to_rows
from eval.ruler.scoring import score_prediction
from eval.ruler.sources import Sources
from eval.ruler.tasks import TASKS
from eval.ruler.templates import resolve_template
from eval.ruler.tokens import TokenCounter
from eval.statistics import plain_mean, task_score


class RulerSuite:
    """The RULER benchmark for one tokenizer and length.

    Parameters
    ----------
    config : RulerConfig
    tokenizer : transformers.PreTrainedTokenizerBase
        Tokenizer of the evaluated model: prompts are fitted with it.
    model_family : str
        Family for ``template=auto``, e.g. ``llama3``, ``qwen2``, ``mistral``, ``smollm2``.
    context_length : int
        Tokens the model can attend to.

    Raises
    ------
    TaskError
        The length exceeds the model's context, or the template cannot be had.
    """

    name = "ruler"

    def __init__(self, config: RulerConfig, tokenizer: Any, model_family: str, context_length: int) -> None:
        if config.length > context_length:
            raise TaskError(
                f"task.length={config.length}: exceeds the model's context of {context_length} tokens; "
                f"accepted: up to {context_length}"
            )
        self.config = config
        self.template = resolve_template(config.template, model_family, tokenizer)
        self.sources = Sources(Path(config.data_dir) if config.data_dir is not None else None)
        self.count = TokenCounter(tokenizer)
        self._tokenizer = tokenizer
        self._cache = RowCache(Path(config.cache_dir) if config.cache_dir else data.cache_root() / "ruler")

    def plan(self) -> Plan:
        """Decide tasks and skips; raises `TaskError` for impossible requests."""
        return self._plan

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self)

    def setting(self, task: str) -> Setting:
        """What the generator of a task is given."""
        config = self.config
        return make_setting(TASKS[task], self.template, config.length, config.seed, self.count)

    def rows(self, task: str) -> list[Row]:
        """Rows of a task in the official format, from the cache or generated.

        Raises
        ------
        DoesNotFit
            A sample that the official procedure cannot bring under the length.
        eval.data.SourceUnavailable
            Data that cannot be had.
        """
        key = self._key(task)
        rows = self._cache.load(task, key, self.config.samples)
        if rows is None:
            setting = self.setting(task)
            drafts = list(make_generator(TASKS[task], setting, self.sources).samples(self.config.samples))
            rows = to_rows(TASKS[task], drafts, setting.template_tokens, self.count)
            self._cache.store(task, key, rows)
        return rows

    def is_generated(self, task: str) -> bool:
        """Whether the cache has the rows of a task, which must then fit."""
        return self._cache.holds(task, self._key(task), self.config.samples)

    def _key(self, task: str) -> dict[str, Any]:
        return content_key(task, TASKS[task], self.setting(task), self.sources)

    def samples(self, task: str) -> Sequence[Sample]:
        """All samples of one task, in index order.

        Raises
        ------
        TaskError
            A sample cannot be made to fit the length.
        """
        try:
            rows = self.rows(task)
        except DoesNotFit as reason:
            raise TaskError(f"task.length={self.config.length}: too small for {task}: {reason}") from None
        max_new_tokens = TASKS[task].prompt.max_new_tokens
        prompts = [self.template.wrap(row["input"]) + row["answer_prefix"] for row in rows]
        if self.template.official:
            tokens = [row["length"] - max_new_tokens for row in rows]
        else:
            tokens = self.count.many(prompts)
        return [
            Sample(
                task=task,
                index=row["index"],
                prompt=prompt,
                references=tuple(row["outputs"]),
                max_new_tokens=max_new_tokens,
                add_special_tokens=self.template.adds_special_tokens,
                extra={
                    **{field: row[field] for field in row if field not in ("index", "input", "outputs")},
                    "prompt_tokens": count + self._special_tokens,
                },
            )
            for row, prompt, count in zip(rows, prompts, tokens, strict=True)
        ]

    @cached_property
    def _special_tokens(self) -> int:
        """Tokens that the tokenizer adds to a prompt on its own."""
        return len(self._ids("", self.template.adds_special_tokens))

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of a prompt, with one BOS where the model uses one: the template's or the tokenizer's."""
        return self._ids(sample.prompt, sample.add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def score(self, sample: Sample, prediction: str) -> float:
        """Official score of one prediction in [0, 1]."""
        return score_prediction(TASKS[sample.task].metric, prediction, sample.references)

    def summarize(self, scores: Mapping[str, Sequence[float]]) -> tuple[dict[str, TaskScore], dict[str, float | None]]:
        """Score per task, and ``average``: the plain mean over the tasks given (officially all 13)."""
        tasks = {task: task_score(own) for task, own in scores.items()}
        return tasks, {"average": plain_mean(task.score for task in tasks.values())}

    def average_tasks(self, tasks: Sequence[str]) -> dict[str, list[str]]:
        """Which of the tasks each average of `summarize` is over."""
        return {"average": list(tasks)}


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens of the prompts of one task, BOS included."""

    min: int
    median: float
    max: int


def length_statistics(samples: Sequence[Sample]) -> LengthStatistics:
    """Prompt lengths of one task: fitting leaves some tasks far below a small length."""
    lengths = [sample.extra["prompt_tokens"] for sample in samples]
    return LengthStatistics(min(lengths), statistics.median(lengths), max(lengths))
