"""Outputs folders written by hand: runs with known scores, sweeps with known jobs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml


def write_run(
    root: Path,
    run_id: str,
    method: dict[str, Any],
    scores: dict[str, list[float]],
    *,
    documents: list[str] | None = None,
    prompts: str = "",
    **changes: Any,
) -> Path:
    """A run folder with these scores (0 to 1) by task; ``changes`` replace blocks of the summary."""
    folder = root / "runs" / run_id
    folder.mkdir(parents=True)
    rows = []
    accuracy: dict[str, Any] = {}
    for task, values in scores.items():
        for index, score in enumerate(values):
            fingerprint = hashlib.sha256(f"{prompts}{task}{index}".encode()).hexdigest()
            extra = {"document": documents[index]} if documents else {}
            rows.append(
                {"task": task, "index": index, "prompt_fingerprint": fingerprint, "score": score, "extra": extra}
            )
        accuracy[task] = {"score": round(100 * sum(values) / len(values), 2), "n": len(values), "ci95": [0.0, 100.0]}
    accuracy["average"] = round(sum(a["score"] for a in accuracy.values()) / len(accuracy), 2)
    accuracy["average_partial"] = False
    summary = {
        "run_id": run_id,
        "status": "complete",
        "reason": None,
        "method": method,
        "model": {"name": "smollm2_135m", "revision": "x"},
        "task": {"name": "ruler", "length": 1024},
        "accuracy": accuracy,
        "average_samples": {"average": sum(len(values) for values in scores.values())},
        "sparsity": {"keep_io": 0.25, "sparsity": 0.75, "bytes_ratio": 0.3},
        "fidelity": {"mass_recall": 0.97, "lse_error_mean": 0.01, "spearman": None},
        "validity": {"official_data": True},
        "timing": {"decode_tok_s": 10.0},
        "null_reasons": {"fidelity.spearman": "the selector made no estimate"},
        "environment": {"device": "cpu"},
    } | changes
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(yaml.safe_dump({"runner": "accuracy", "model": {"path": None}}))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    layers = [
        {"layer": layer, "head": h, "kv_head": h // 2, "keep_head": 0.1 * (h + 1), "keep_io": 0.2 * (layer + 1)}
        for layer in range(2)
        for h in range(4)
    ]
    (folder / "layers.json").write_text(json.dumps(layers))
    (folder / "fidelity.csv").write_text("layer,head,spearman\n0,0,0.5\n0,1,0.7\n1,0,\n")
    return folder


def write_sweep(root: Path, experiment: str, jobs: list[dict[str, Any]], size: str = "smoke") -> None:
    """The record of a recipe's sweep."""
    (root / "sweeps").mkdir(parents=True, exist_ok=True)
    record = {"name": f"{experiment}-{size}", "experiment": experiment, "size": size, "jobs": jobs}
    (root / "sweeps" / f"{experiment}-{size}.json").write_text(json.dumps(record))


def job(run_id: str | None, status: str = "complete", reason: str | None = None, *overrides: str) -> dict[str, Any]:
    """One job of a sweep's record."""
    return {"overrides": list(overrides), "run_id": run_id, "status": status, "reason": reason}
