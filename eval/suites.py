"""From a task configuration to its suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from eval.records import Suite, TaskError

SUITES = ("ruler", "longbench")


def make_suite(
    task: Mapping[str, Any], tokenizer: Any, *, model_name: str, model_family: str, context_length: int, seed: int
) -> Suite:
    """Build the suite a task configuration names.

    Parameters
    ----------
    task
        ``name`` and the keys of the suite's own configuration; None stands for the suite's default.
    tokenizer
        Tokenizer of the evaluated model.
    model_name, model_family, context_length
        What templates and truncation rules depend on.
    seed
        Seed of generated prompts.

    Raises
    ------
    TaskError
        For an unknown suite, an unknown key or a value the suite does not accept.
    """
    given = _given(task)
    if task["name"] == "ruler":
        from eval.ruler import RulerConfig, RulerSuite

        return RulerSuite(_build(RulerConfig, {**given, "seed": seed}), tokenizer, model_family, context_length)
    if task["name"] == "longbench":
        from eval.longbench import LongBenchConfig, LongBenchSuite

        config = _build(LongBenchConfig, given)
        return LongBenchSuite(config, tokenizer, model_name, model_family, context_length)
    raise TaskError(f"task={task['name']}: expected one of {', '.join(SUITES)}")


def data_sources(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Sources of `eval.data` that a suite reads beside the task's own ``data_dir``; nothing is fetched.

    Parameters
    ----------
    task
        As `make_suite` takes it, complete.

    Raises
    ------
    TaskError
        For a key or a value that the suite does not accept.
    """
    given = _given(task)
    if task["name"] == "ruler":
        from eval.ruler import TASKS, RulerConfig
        from eval.ruler.sources import Sources

        config = _build(RulerConfig, given)
        own = Sources(None if config.data_dir is None else Path(config.data_dir))
        needed = dict.fromkeys(source for name in config.selected for source in TASKS[name].sources)
        return tuple(source for source in needed if not own.is_given(source))
    if task["name"] == "longbench":
        from eval.longbench import LongBenchConfig

        return ("longbench/data",) if _build(LongBenchConfig, given).data_dir is None else ()
    return ()


def scoring_module(task_name: str) -> str:
    """Module whose code decides prompts and scores of a suite."""
    return f"eval.{task_name}"


def _given(task: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that are set, lists as tuples."""
    given = {key: value for key, value in task.items() if key != "name" and value is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}


def _build(config_class: Any, given: dict[str, Any]) -> Any:
    known = {field.name for field in fields(config_class)}
    for key, value in given.items():
        if key not in known:
            raise TaskError(f"task.{key}={value}: expected one of {', '.join(sorted(known))}")
    if isinstance(given.get("tasks"), str):
        given["tasks"] = (given["tasks"],)
    return config_class(**given)
