"""Lines of ``samples.jsonl`` and ``loglikelihood.jsonl``, and the journal that writes them as answers finish."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eval.lm_harness.answers import Answer
from eval.lm_harness.results import harness_score
from eval.lm_harness.tasks import LoadedTasks
from experiments.store import Rows, RunStore
from experiments.tracker import Tracker

Row = dict[str, Any]
"""One line of ``samples.jsonl``."""


class StoreJournal:
    """Answers in ``samples.jsonl``: without scores while the evaluation runs, as lm-eval scores only at its end."""

    def __init__(self, store: RunStore, rows: Rows, tracker: Tracker) -> None:
        self.store = store
        self.rows = rows
        self.tracker = tracker

    def recall(self, task: str, index: int) -> str | None:
        """Text of an answer that an earlier process finished, or None."""
        row = self.rows.get((task, index))
        return None if row is None else str(row["prediction"])

    def record(self, answer: Answer) -> None:
        """Append the answer and wait until it is on the disk."""
        row = sample_row(answer)
        self.store.append_sample(row)
        self.rows[answer.task, answer.index] = row
        self.tracker.log({"seconds": answer.seconds, "new_tokens": answer.new_tokens})


def in_order(rows: Rows, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Rows in task and index order."""
    position = {task: i for i, task in enumerate(tasks)}
    return [rows[key] for key in sorted(rows, key=lambda key: (position[key[0]], key[1]))]


def sample_row(answer: Answer) -> Row:
    """A finished answer as a line of ``samples.jsonl``, not scored yet."""
    return {
        "task": answer.task,
        "index": answer.index,
        "document": answer.document,
        "prompt_fingerprint": answer.prompt_fingerprint,
        "bos_count": answer.bos_count,
        "truncated": answer.truncated,
        "prediction": answer.text,
        "references": None,
        "score": None,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "finite": answer.finite,
        "seconds": answer.seconds,
        "timing": {"ttft_s": answer.ttft_seconds, "decode_s": answer.decode_seconds},
        "ledger": answer.ledger,
    }


def score_rows(rows: Rows, results: Mapping[str, Any]) -> None:
    """Fill in the scores and references that lm-eval gave at the end."""
    scores = {task: harness_score(results, task) for task in {task for task, _ in rows}}
    for row in rows.values():
        found = scores[row["task"]]
        row["score"] = found.by_document[row["document"]]
        row["references"] = _as_list(found.references[row["document"]])


def loglikelihood_rows(results: Mapping[str, Any], tasks: LoadedTasks) -> list[Row]:
    """One line per document of the tasks that only score continuations."""
    rows = []
    for task in tasks.names:
        if tasks.generation_requests(task):
            continue
        found = harness_score(results, task)
        for sample in results["samples"][task]:
            if sample["filter"] == found.filter:
                rows.append(
                    {
                        "task": task,
                        "index": sample["doc_id"],
                        "prompt_fingerprint": sample["prompt_hash"],
                        "loglikelihoods": sample["filtered_resps"],
                        "references": _as_list(sample["target"]),
                        "score": found.by_document[sample["doc_id"]],
                    }
                )
    return rows


def without_samples(results: Mapping[str, Any]) -> dict[str, Any]:
    """Lm-eval's own results, JSON-ready."""
    from lm_eval.utils import handle_non_serializable

    kept = {key: value for key, value in results.items() if key != "samples"}
    plain: dict[str, Any] = json.loads(_finite(json.dumps(kept, default=handle_non_serializable)))
    return plain


def json_lines(rows: Iterable[Row]) -> str:
    """Rows as JSON lines."""
    from lm_eval.utils import handle_non_serializable

    return "".join(json.dumps(row, ensure_ascii=False, default=handle_non_serializable) + "\n" for row in rows)


def _as_list(target: Any) -> list[Any]:
    return list(target) if isinstance(target, list | tuple) else [target]


def _finite(text: str) -> str:
    """JSON text with null for what JSON has no number for."""
    return json.dumps(json.loads(text, parse_constant=lambda _: None))
