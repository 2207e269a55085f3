"""Rows of official RULER files, and a cache of the generated ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eval.records import Sample
from eval.ruler.fitting import FittedDraft
from eval.ruler.tasks import NeedleTask, Task
from eval.ruler.tokens import TokenCounter

Row = dict[str, Any]
"""One line of an official ``validation.jsonl``: a prompt in two parts, its answers and its lengths."""

logger = logging.getLogger(__name__)


def to_rows(task: Task, drafts: Sequence[FittedDraft], template_tokens: int, count: TokenCounter) -> list[Row]:
    """Official rows of fitted drafts, in order; `index` is the sample's number."""
    rows: list[Row] = []
    for index, draft in enumerate(drafts):
        # The benchmark finds the answer prefix by its first ten characters, from the end.
        border = draft.text.rfind(task.prompt.answer_prefix[:10])
        rows.append(
            {
                "index": index,
                "input": draft.text[:border],
                "outputs": list(draft.outputs),
                "length": draft.length,
                "length_w_model_temp": draft.length + template_tokens,
                "answer_prefix": draft.text[border:],
            }
        )
    if isinstance(task.kind, NeedleTask):
        before = [row["input"][: row["input"].find(row["outputs"][0])] for row in rows]
        for row, position in zip(rows, count.many(before), strict=True):
            row["token_position_answer"] = position
    return rows


def official_row(sample: Sample) -> Row:
    """Fields of a sample as an official file has them: ``input + answer_prefix`` is the prompt."""
    prefix = sample.extra["answer_prefix"]
    row: Row = {
        "index": sample.index,
        "input": sample.prompt[: len(sample.prompt) - len(prefix)],
        "outputs": list(sample.references),
        "length": sample.extra["length"],
        "length_w_model_temp": sample.extra["length_w_model_temp"],
        "answer_prefix": prefix,
    }
    if "token_position_answer" in sample.extra:
        row["token_position_answer"] = sample.extra["token_position_answer"]
    return row


class RowCache:
    """Generated rows on disk, under a key of everything that determines them.

    The number of samples is not part of it: fewer samples are the first ones of more.

    Parameters
    ----------
    folder : Path
        Created when something is stored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def holds(self, task: str, key: Mapping[str, Any], count: int) -> bool:
        """Whether there seem to be `count` rows; they are not parsed."""
        try:
            with self._path(task, key).open("rb") as file:
                return sum(1 for _ in islice(file, count)) == count
        except OSError:
            return False

    def load(self, task: str, key: Mapping[str, Any], count: int) -> list[Row] | None:
        """The first `count` rows, or None where they are absent, too few or damaged."""
        try:
            with self._path(task, key).open(encoding="utf-8") as file:
                rows = [json.loads(line) for line in islice(file, count)]
        except (OSError, ValueError):
            return None
        return rows if len(rows) == count else None

    def store(self, task: str, key: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Write rows so that a reader sees all of them or none; a failure is logged and costs only time."""
        path = self._path(task, key)
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=f".{task}-")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            Path(temporary).replace(path)
        except OSError as error:
            logger.warning("RULER prompts of %s are not cached in %s: %s", task, self._folder, error)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def _path(self, task: str, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{task}-{digest[:20]}.jsonl"
