"""From finished samples to ``summary.json``: nothing in it that was not counted, timed or scored."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval.records import Plan, Suite

Row = Mapping[str, Any]
"""One line of ``samples.jsonl``."""
COUNTED = (
    "every decode step of every layer; tail, sinks and local tokens as read; layers dense by configuration as keep 1; "
    "prefill not counted"
)
"""What the ratios of `sparsity` count; every summary with them says so."""


def accuracy(suite: Suite, plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """Per-task scores, intervals and prompt lengths, and the suite's averages."""
    by_task: dict[str, list[Row]] = {task: [] for task in plan.tasks}
    for row in rows:
        by_task[row["task"]].append(row)
    scores, averages = suite.summarize({task: [r["score"] for r in own] for task, own in by_task.items()})
    result: dict[str, Any] = {}
    for task, score in scores.items():
        own = by_task[task]
        result[task] = {
            "score": score.score,
            "n": score.n,
            "ci95": None if score.ci95 is None else list(score.ci95),
            "length_tokens": length_range([r["prompt_tokens"] for r in own]),
            "new_tokens": statistics.mean(r["new_tokens"] for r in own) if own else None,
            "truncated": sum(bool(r["truncated"]) for r in own),
        }
    result.update(averages)
    result["average_partial"] = not plan.covers_benchmark or any(not own for own in by_task.values())
    return result


def length_range(lengths: Sequence[int]) -> dict[str, float] | None:
    """Shortest, median and longest of prompt lengths in tokens; None without any."""
    if not lengths:
        return None
    return {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)}


def sparsity(rows: Sequence[Row], num_query_heads: int, num_kv_heads: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Keep ratios over every decode layer-step, dense layers included with keep = 1; token-weighted.

    Parameters
    ----------
    rows
        Finished samples with their ledgers.
    num_query_heads, num_kv_heads
        Of a layer; sliding-window layers have no ledger of their own and are read whole.

    Returns
    -------
    values : dict
        keep_head, keep_io, sparsity, bytes_ratio, and bytes read by stage.
    reasons : dict
        Why a value is None.
    """
    selected = union = context = read = dense = 0.0
    stages: dict[str, float] = defaultdict(float)
    for row in rows:
        for layer in row["ledger"]["layers"]:
            context += layer["context"]
            selected += sum(layer["selected"]) / num_query_heads
            union += sum(layer["union"]) / num_kv_heads
            read += sum(layer["bytes_read"].values())
            dense += layer["dense_bytes"]
            for stage, size in layer["bytes_read"].items():
                stages[stage] += size
        window = row["ledger"]["sliding_context"]
        context, selected, union = context + window, selected + window, union + window
    values: dict[str, Any] = {
        "keep_head": _ratio(selected, context),
        "keep_io": _ratio(union, context),
        "sparsity": None if not context else 1.0 - union / context,
        "bytes_ratio": _ratio(read, dense),
        "bytes_by_stage": dict(stages),
    }
    reason = "no decode step was run" if not context else "only sliding-window layers"
    return values, {f"sparsity.{key}": reason for key, value in values.items() if value is None}


def attention_heads(config: Any) -> tuple[int, int]:
    """Query and kv heads of a layer of a model with this transformers configuration."""
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    return heads, getattr(text, "num_key_value_heads", None) or heads


def timing(rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, str]]:
    """Means over samples, and the decode rate over all steps that were not probed."""
    seconds = sum(r["timing"]["decode_s"] for r in rows)
    tokens = sum(r["timing"]["timed_tokens"] for r in rows)
    values = {
        "prefill_s": _mean([r["timing"]["prefill_s"] for r in rows]),
        "ttft_s": _mean([r["timing"]["ttft_s"] for r in rows]),
        "decode_tok_s": _ratio(tokens, seconds),
        "decode_s": seconds,
        "probe_s": sum(r["timing"]["probe_s"] for r in rows),
        "total_s": sum(r["seconds"] for r in rows),
    }
    reasons = {}
    if values["decode_tok_s"] is None:
        reasons["timing.decode_tok_s"] = "no decode step ran without a probe"
    if not rows:
        reasons.update({"timing.prefill_s": "no sample finished", "timing.ttft_s": "no sample finished"})
    return values, reasons


def average_samples(suite: Suite, scores: Mapping[str, Any]) -> dict[str, int]:
    """Samples behind each of the suite's averages; ``scores`` is the block that `accuracy` made."""
    finished = {task: entry["n"] for task, entry in scores.items() if isinstance(entry, dict) and entry["n"]}
    return {name: sum(finished[task] for task in own) for name, own in suite.average_tasks(list(finished)).items()}


def validity(rows: Sequence[Row], plan: Plan, static: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Whether every decode layer-step took its configured path, after a proper prompt, to finite predictions.

    Returns
    -------
    values : dict
        The ``validity`` block.
    problem : str or None
        Why the run is invalid.
    """
    sparse = sum(r["ledger"]["sparse_steps"] for r in rows)
    dense = sum(r["ledger"]["dense_steps"] for r in rows)
    expected = sum(r["ledger"]["expected_steps"] for r in rows)
    values = {**static, "sparse_steps": sparse, "dense_steps": dense, "expected_steps": expected}
    values["official_data"] = plan.official
    problem = attended_to_nothing(rows)
    if sparse + dense != expected:
        problem = f"{sparse} sparse and {dense} configured-dense layer-steps do not add up to {expected}"
    doubled = sum(r["bos_count"] > 1 for r in rows)
    if doubled:
        problem = f"{doubled} prompts begin with more than one BOS"
    broken = sum(not r.get("finite", True) for r in rows)  # rows of earlier versions do not say
    if broken:
        problem = f"{broken} of {len(rows)} samples: a prediction was not finite"
    return values, problem


def attended_to_nothing(rows: Sequence[Row]) -> str | None:
    """Where a kv head loaded fewer tokens than it took decode steps, the current token among them, or None.

    Counters tell this of every step, probed or not, but not of a head whose group loaded a token for another.
    """
    for row in rows:
        for layer in row["ledger"]["layers"]:
            head, tokens = min(enumerate(layer["union"]), key=lambda entry: entry[1])
            if tokens < layer["steps"]:
                return (
                    f"a head attended to nothing: layer {layer['layer']}, kv head {head} loaded {tokens:g} tokens in "
                    f"{layer['steps']} decode steps ({row['task']} {row['index']})"
                )
    return None


def layer_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Keep ratios per layer, kv head and query head, over all samples."""
    totals: dict[int, dict[str, Any]] = {}
    for row in rows:
        for layer in row["ledger"]["layers"]:
            total = totals.setdefault(
                layer["layer"],
                {
                    "sparse": layer["sparse"],
                    "context": 0.0,
                    "selected": [0.0] * len(layer["selected"]),
                    "union": [0.0] * len(layer["union"]),
                },
            )
            total["context"] += layer["context"]
            for key in ("selected", "union"):
                total[key] = [a + b for a, b in zip(total[key], layer[key], strict=True)]
    table = []
    for index, total in sorted(totals.items()):
        group = len(total["selected"]) // len(total["union"])
        for head, tokens in enumerate(total["selected"]):
            table.append(
                {
                    "layer": index,
                    "head": head,
                    "kv_head": head // group,
                    "sparse": total["sparse"],
                    "keep_head": _ratio(tokens, total["context"]),
                    "keep_io": _ratio(total["union"][head // group], total["context"]),
                }
            )
    return table


def stage_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Bytes read per layer and stage against dense, over all samples."""
    totals: dict[int, dict[str, Any]] = {}
    stages: dict[str, None] = {}
    for row in rows:
        for layer in row["ledger"]["layers"]:
            own = totals.setdefault(
                layer["layer"], {"sparse": layer["sparse"], "steps": 0, "dense_bytes": 0.0, "read": defaultdict(float)}
            )
            own["steps"] += layer["steps"]
            own["dense_bytes"] += layer["dense_bytes"]
            for stage, size in layer["bytes_read"].items():
                stages[stage] = None
                own["read"][stage] += size
    return [
        {
            "layer": layer,
            "sparse": own["sparse"],
            "steps": own["steps"],
            "bytes_ratio": _ratio(sum(own["read"].values()), own["dense_bytes"]),
            "dense_bytes": own["dense_bytes"],
            **{stage: own["read"].get(stage, 0.0) for stage in stages},
        }
        for layer, own in sorted(totals.items())
    ]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None
