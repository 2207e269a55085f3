"""Small runs for the tests of sweeps and shards, and what of them must not depend on how they were made."""

from __future__ import annotations

import json
from pathlib import Path

import run
from tests.ruler_tokenizer import build
from tests.tiny import tiny_model

ROOT = Path(run.__file__).parent


def save_tiny_model(folder: Path) -> Path:
    """A two-layer random model with a tokenizer."""
    tiny_model("llama").save_pretrained(folder)
    build().save_pretrained(folder)
    return folder


def small_run(model_folder: Path, samples: int = 3) -> list[str]:
    """Arguments of a run that takes a second or two beside its start."""
    return [
        f"model.path={model_folder}",
        "task.length=512",
        "task.tasks=[niah_single_1,niah_multikey_2]",
        f"task.samples={samples}",
        "tracker=none",
    ]


def results(out: Path) -> dict[str, tuple]:
    """Per run id: rows without timings, and the summary's blocks that must repeat."""
    found = {}
    for folder in sorted((out / "runs").iterdir()):
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "timing")} for row in rows]
        summary = json.loads((folder / "summary.json").read_text())
        blocks = {k: summary[k] for k in ("status", "accuracy", "sparsity", "validity", "skipped")}
        # Sums of float64 differ in their last bits with the order of additions.
        fidelity = {k: v if v is None else float(f"{v:.9g}") for k, v in summary["fidelity"].items()}
        found[folder.name] = (rows, blocks, fidelity)
    return found
