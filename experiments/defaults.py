"""Defaults that fit the machine, and the lines that say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST_DEFAULT = 32768
DEMO_LENGTH = 1024
DEMO_SAMPLES = 5
DEMO_TASKS = ("niah_single_1", "niah_multikey_2", "vt", "fwe")
"""RULER tasks whose official prompts fill 1024 tokens; the essay tasks stay far below."""


def fill_task(
    task: Mapping[str, Any], *, runner: str, context_length: int, has_gpu: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replace what the user left open.

    Parameters
    ----------
    task
        Task configuration as composed.
    runner
        Written prompts are never cut down, they are what they are for.
    context_length
        Of the model.
    has_gpu
        Whether a CUDA device is there.

    Returns
    -------
    task : dict
        Configuration to run.
    notes : tuple of str
        What was chosen and how to get the official protocol.
    """
    filled = dict(task)
    if task["name"] != "ruler":
        return filled, ()
    longest = min(context_length, LONGEST_DEFAULT)
    filled["length"] = task["length"] or longest
    if has_gpu or runner == "prompts":
        return filled, ()
    left_open = {key for key in ("length", "samples", "tasks") if task[key] is None}
    if left_open >= {"length", "tasks"}:
        filled.update(length=DEMO_LENGTH, tasks=list(DEMO_TASKS), samples=task["samples"] or DEMO_SAMPLES)
        return filled, (
            f"no GPU: RULER is cut down to {len(DEMO_TASKS)} tasks, length {DEMO_LENGTH}, "
            f"{filled['samples']} samples a task",
            f"official protocol: python run.py task=ruler task.length={longest} task.samples=500",
        )
    named = [task["tasks"]] if isinstance(task["tasks"], str) else task["tasks"]
    official = {"length": longest, "samples": 500}
    cut: dict[str, int] = {}
    if "length" in left_open and set(named) <= set(DEMO_TASKS):
        cut["length"] = DEMO_LENGTH
    if "samples" in left_open:
        cut["samples"] = DEMO_SAMPLES
    if not cut:
        return filled, ()
    units = {"length": "tokens of length", "samples": "samples a task"}
    said = " and ".join(f"{value} {units[key]}" for key, value in cut.items())
    instead = " ".join(f"task.{key}={official[key]}" for key in cut)
    return {**filled, **cut}, (f"no GPU: cut down to {said}; {instead} gives what a GPU would have run",)
