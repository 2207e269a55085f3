"""The prompts runner: exact prompts in the official format, without loading weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from experiments.config import RunConfig
from experiments.errors import UsageError
from experiments.files import write_atomically
from experiments.prepare import prepare
from experiments.progress import console


def run_prompts(config: RunConfig) -> int:
    """Write ``<task>.jsonl`` per task under ``out``; returns the exit code."""
    prepared = prepare(config)
    folder = config.out or Path("outputs") / "prompts" / prepared.task["name"]
    official_row = importlib.import_module(f"eval.{prepared.task['name']}").official_row
    for note in prepared.notes:
        console.print(note)
    for skipped in prepared.plan.skipped:
        console.print(f"skipped {skipped.task}: {skipped.reason}")
    if config.dry_run:
        console.print(f"dry run: {len(prepared.samples)} prompts would go to {folder}")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for task in prepared.plan.tasks:
            lines = [json.dumps(official_row(s), ensure_ascii=False) for s in prepared.samples if s.task == task]
            write_atomically(folder / f"{task}.jsonl", ("\n".join(lines) + "\n").encode())
            print(f"{folder / f'{task}.jsonl'}: {len(lines)} prompts")
    except OSError as error:
        raise UsageError(f"out={folder}: cannot be written ({error.strerror})") from None
    return 0
