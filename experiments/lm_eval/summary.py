"""From lm-eval's results and our counters to ``summary.json`` of ``task=lm_eval``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval.lm_harness.results import HarnessScore, group_scores, harness_score
from eval.records import Plan
from experiments import summary as common
from experiments.fidelity_log import FidelityLog
from experiments.lm_eval.prepare import PreparedEvaluation
from experiments.lm_eval.rows import Row

DECODE, DENSE = "decode by the method", "dense prefill"
_NO_PLAN = Plan(tasks=(), samples_per_task={})


def notes(prepared: PreparedEvaluation) -> list[str]:
    """What the table's header says of every task: how it ran, and whether the method had a part in it."""
    method = prepared.config.method["name"]
    lines = []
    for task in prepared.tasks.names:
        generation = len(prepared.tasks.generation_requests(task))
        others = len(prepared.tasks.requests[task]) - generation
        if generation:
            lines.append(f"{task}: {generation} generation requests decoded by {method}")
        if others:
            lines.append(f"{task}: {others} loglikelihood requests by {DENSE}; not a score of {method}")
    return lines


def path_of(prepared: PreparedEvaluation, task: str) -> str:
    """How a task's requests run."""
    generation = len(prepared.tasks.generation_requests(task))
    if generation == len(prepared.tasks.requests[task]):
        return DECODE
    return f"{DECODE} and {DENSE}" if generation else DENSE


def summary(
    prepared: PreparedEvaluation,
    rows: Sequence[Row],
    results: Mapping[str, Any] | None,
    folder: Path,
) -> dict[str, Any]:
    """Every block of ``summary.json`` but id, status and machine, and the problem that makes the run invalid, if any.

    Parameters
    ----------
    prepared
        The evaluation.
    rows
        Finished generation requests.
    results
        Of lm-eval; None before its end.
    folder
        The run's.
    """
    config = prepared.config
    sparsity, sparsity_reasons = common.sparsity(rows, *common.attention_heads(prepared.model.config))
    timing, timing_reasons = _timing(rows)
    validity, problem, validity_reasons = _validity(prepared, rows)
    accuracy, accuracy_reasons = _accuracy(prepared, rows, results)
    fidelity, _ = FidelityLog(folder / "fidelity", 1).summary()
    not_probed = "task=lm_eval decodes through model.generate, which is not probed"
    return {
        "method": dict(config.method),
        "reads_everything": prepared.method.reads_everything,
        "model": {"name": prepared.model.label, "revision": prepared.model.revision},
        "task": {"name": "lm_eval", **asdict(prepared.task)},
        "accuracy": accuracy,
        "sparsity": sparsity,
        "counted": common.COUNTED,
        "fidelity": fidelity,
        "validity": validity,
        "timing": timing,
        "skipped": [],
        "notes": [*notes(prepared), *_metric_notes(accuracy)],
        "null_reasons": {
            **accuracy_reasons,
            **sparsity_reasons,
            **{f"fidelity.{key}": not_probed for key, value in fidelity.items() if value is None},
            **validity_reasons,
            **timing_reasons,
        },
        "problem": problem,
    }


def _accuracy(
    prepared: PreparedEvaluation, rows: Sequence[Row], results: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    reasons = {"accuracy.average": "lm-eval defines no average over unlike tasks; its groups carry their own"}
    accuracy: dict[str, Any] = {}
    for task in prepared.tasks.names:
        found = None if results is None else harness_score(results, task)
        accuracy[task] = _task_row(prepared, task, [r for r in rows if r["task"] == task], found)
        for key, value in accuracy[task].items():
            if value is None:
                reasons[f"accuracy.{task}.{key}"] = _why_null(key, found)
    accuracy |= {} if results is None else group_scores(results)
    return {**accuracy, "average": None, "average_partial": results is None}, reasons


def _why_null(key: str, found: HarnessScore | None) -> str:
    """Why an entry of a task's row is null."""
    if key in ("new_tokens", "truncated"):
        return "no generation request finished"
    if found is None:
        return "lm-eval scores when all requests are answered"
    if key == "ci95":
        return f"{found.metric} is not a mean over documents, or of one alone"
    return "lm-eval reports none for this task"


def _task_row(
    prepared: PreparedEvaluation, task: str, rows: Sequence[Row], found: HarnessScore | None
) -> dict[str, Any]:
    generates = bool(prepared.tasks.generation_requests(task))
    # Of generation requests, the lengths that were run; of the others, those of prompt and continuation.
    lengths = [r["prompt_tokens"] for r in rows]
    if not generates:
        lengths = [r.prompt_tokens for r in prepared.requests if r.task == task]
    return {
        "score": None if found is None else found.score,
        "n": 0 if found is None else found.n,
        "ci95": None if found is None or found.ci95 is None else list(found.ci95),
        "length_tokens": common.length_range(lengths),
        "new_tokens": statistics.mean(r["new_tokens"] for r in rows) if rows else None,
        "truncated": sum(bool(r["truncated"]) for r in rows) if generates else None,
        "path": path_of(prepared, task),
        "metric": None if found is None else found.metric,
        "filter": None if found is None else found.filter,
        "higher_is_better": None if found is None else found.higher_is_better,
        "metrics": None if found is None else dict(found.metrics),
    }


def _metric_notes(accuracy: Mapping[str, Any]) -> list[str]:
    return [
        f"{task}: {row['metric']} ({row['filter']}) = {row['score']:.4f} in lm-eval's own unit"
        for task, row in accuracy.items()
        if isinstance(row, Mapping) and row["score"] is not None
    ]


def _validity(prepared: PreparedEvaluation, rows: Sequence[Row]) -> tuple[dict[str, Any], str | None, dict[str, str]]:
    dense = {layer["layer"] for row in rows for layer in row["ledger"]["layers"] if not layer["sparse"]}
    sliding = max((row["ledger"]["sliding_layers"] for row in rows), default=0)
    static = {
        "executor": prepared.executor,
        "graph": False,
        "eager_reason": "task=lm_eval decodes through model.generate",
        "dense_layers": len(dense) + sliding if rows else None,
        "sliding_layers": sliding if rows else None,
    }
    values, problem = common.validity(rows, _NO_PLAN, static)
    values["official_data"] = None
    prefill_only = [t for t in prepared.tasks.names if not prepared.tasks.generation_requests(t)]
    values["dense_prefill_tasks"] = prefill_only
    values["note"] = (
        f"{', '.join(prefill_only)}: {DENSE}, no decode step; the method had no part in the score"
        if prefill_only
        else None
    )
    reasons = {"validity.official_data": "lm-eval's tasks name their own data, which are not checked here"}
    if not rows:
        reasons |= dict.fromkeys(("validity.dense_layers", "validity.sliding_layers"), "no decode step was run")
    if not prefill_only:
        reasons["validity.note"] = "every task decodes"
    return values, problem, reasons


def _timing(rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, str]]:
    seconds = sum(r["timing"]["decode_s"] for r in rows)
    tokens = sum(r["new_tokens"] - 1 for r in rows)
    values = {
        "prefill_s": None,
        "ttft_s": statistics.mean(r["timing"]["ttft_s"] for r in rows) if rows else None,
        "decode_tok_s": tokens / seconds if tokens else None,
        "decode_s": seconds,
        "probe_s": 0.0,
        "total_s": sum(r["seconds"] for r in rows),
    }
    reasons = {"timing.prefill_s": "model.generate does not tell prefill from the first token; see ttft_s"}
    if not rows:
        reasons["timing.ttft_s"] = "no generation request finished"
    if not tokens:
        reasons["timing.decode_tok_s"] = "no decode step was run"
    return values, reasons
