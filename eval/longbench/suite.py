"""LongBench v1 and LongBench-E as a suite: plan, prompts, scores, averages.

Protocol of THUDM/LongBench at commit 2e00731 (``pred.py``, ``eval.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.data import DataError, SourceUnavailable, resolve
from eval.longbench.averages import averages, bucket_averages, bucket_score, dataset_score, members
from eval.longbench.config import LongBenchConfig
from eval.longbench.datasets import BUCKETS, Dataset
from eval.longbench.official_files import prediction_row
from eval.longbench.planning import empty_plan, make_plan
from eval.longbench.prompting import choose_prompting
from eval.longbench.rows import SOURCE, Row, RowSource, open_source
from eval.longbench.selection import bucket_tasks, select_rows, tasks_of
from eval.records import Plan, Sample, TaskError, TaskScore
from eval.statistics import task_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LongBenchSuite:
    """LongBench for the tokenizer of one model.

    A task is a dataset; in LongBench-E it is one length bucket of a dataset, ``qasper_e_0-4k``.

    Parameters
    ----------
    config
        What to run.
    tokenizer
        Tokenizer of the evaluated model: budgets are counted and chat turns built with it.
    model_name, model_family
        Names to look up in the official tables of input budgets and templates.
    context_length
        Tokens that the model can hold, prompt and answer together.

    Raises
    ------
    TaskError
        The template cannot be had, or the input budget leaves no room for template and answer.
    """

    name = "longbench"

    def __init__(
        self,
        config: LongBenchConfig,
        tokenizer: PreTrainedTokenizerBase,
        model_name: str,
        model_family: str,
        context_length: int,
    ) -> None:
        self.config = config
        self._prompting = choose_prompting(config, tokenizer, model_name, model_family, context_length)
        self._datasets = {task: dataset for dataset in config.datasets for task in tasks_of(dataset, config.extended)}

    def plan(self) -> Plan:
        """Read and check the data, and count; no prompt is built.

        Raises
        ------
        TaskError
            ``data_dir`` or a file in it cannot be read, or a row departs from the official schema.
        """
        try:
            return make_plan(self.config, self._source, self._prompting)
        except SourceUnavailable as error:
            return empty_plan(self.config, f"no data: {error.reason}; or set task.data_dir= to {SOURCE}")

    def samples(self, task: str) -> Sequence[Sample]:
        """Samples of one planned task in file order, with the exact prompts.

        Raises
        ------
        TaskError
            The task was not asked for, or its file is missing or cannot be read.
        """
        dataset = self._dataset(task)
        rows = select_rows(self.config, self._source, dataset)[task]
        return [self._sample(task, dataset, index, row) for index, row in enumerate(rows)]

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of the sample's prompt under the template's BOS rule."""
        return self._prompting.encode(sample.prompt, sample.add_special_tokens)

    def score(self, sample: Sample, prediction: str) -> float:
        """Official score of one prediction in [0, 1], the model's and the dataset's clean-up included."""
        cleaned = self._prompting.template.clean(prediction)
        return self._dataset(sample.task).score(cleaned, sample.references, sample.extra["all_classes"])

    def summarize(self, scores: Mapping[str, Sequence[float]]) -> tuple[dict[str, TaskScore], dict[str, float | None]]:
        """Scores by task, and the averages over the tasks that have one (`eval.longbench.averages`).

        LongBench-E's averages carry their bucket: ``macro_0-4k``.
        """
        score_of = bucket_score if self.config.extended else dataset_score
        results: dict[str, TaskScore] = {}
        for task, values in scores.items():
            self._dataset(task)
            result = task_score(values)
            # The official order of operations, which can differ in the last digit.
            results[task] = replace(result, score=score_of(values)) if values else result
        finished = {task: result.score for task, result in results.items() if result.score is not None}
        return results, self._bucket_averages(finished) if self.config.extended else averages(finished)

    def average_tasks(self, tasks: Sequence[str]) -> dict[str, list[str]]:
        """Which of the tasks each average of `summarize` is over."""
        if not self.config.extended:
            return members(tasks)
        result: dict[str, list[str]] = {}
        for bucket in BUCKETS:
            own = {dataset.name: bucket_tasks(dataset)[bucket] for dataset in self.config.datasets}
            own = {name: task for name, task in own.items() if task in tasks}
            result |= {f"{name}_{bucket}": [own[n] for n in names] for name, names in members(list(own)).items()}
        return result

    def prediction_row(self, sample: Sample, prediction: str) -> dict[str, Any]:
        """A line of an official prediction file, which `eval.longbench.score` and the official script read."""
        return prediction_row(sample, self._prompting.template.clean(prediction))

    @cached_property
    def _source(self) -> RowSource:
        if self.config.data_dir is not None:
            try:
                return open_source(Path(self.config.data_dir).expanduser())
            except TaskError as error:  # which begins with the path
                raise TaskError(f"task.data_dir={error}") from None
        try:
            return open_source(resolve("longbench/data"))
        except SourceUnavailable:
            raise
        except DataError as error:
            raise TaskError(str(error)) from None

    def _dataset(self, task: str) -> Dataset:
        if task not in self._datasets:
            raise TaskError(f"task {task!r} is not part of this run; accepted: {', '.join(self._datasets)}")
        return self._datasets[task]

    def _sample(self, task: str, dataset: Dataset, index: int, row: Row) -> Sample:
        prompt, truncated = self._prompting.build(dataset, row)
        return Sample(
            task=task,
            index=index,
            prompt=prompt,
            references=row.answers,
            max_new_tokens=self.config.max_new_tokens(dataset),
            add_special_tokens=self._prompting.adds_special_tokens(dataset),
            truncated=truncated,
            stop_strings=dataset.stop_strings,
            min_new_tokens=dataset.min_new_tokens,
            extra={
                "dataset": dataset.name,
                "all_classes": row.all_classes,
                "length": row.length,
                "_id": row.id,
                # Several questions may be about one document: their scores are not independent.
                "document": hashlib.sha256(row.context.encode()).hexdigest()[:16],
            },
        )

    def _bucket_averages(self, finished: Mapping[str, float]) -> dict[str, float | None]:
        by_dataset = {
            dataset.name: {bucket: finished.get(task, float("nan")) for bucket, task in bucket_tasks(dataset).items()}
            for dataset in self.config.datasets
        }
        by_bucket = bucket_averages(by_dataset)
        return {f"{name}_{bucket}": value for bucket in BUCKETS for name, value in by_bucket[bucket].items()}
