"""What every runner needs before weights are loaded: model description, suite, plan and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from eval.models import ModelDescription, ModelSpec, describe
from eval.records import Plan, Sample, Skipped, Suite, reasons
from eval.suites import make_suite
from experiments.config import RunConfig
from experiments.defaults import fill_task
from experiments.engines import model_spec
from experiments.errors import UsageError
from experiments.refusals import refusals
from experiments.settings import executor_here


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to be estimated and started."""

    config: RunConfig
    spec: ModelSpec
    model: ModelDescription
    task: dict[str, Any]
    """Task configuration with the machine's defaults filled in."""
    suite: Suite
    plan: Plan
    samples: tuple[Sample, ...]
    """In task and index order."""
    notes: tuple[str, ...]
    """Lines for the table's header."""
    executor: str
    """fused or reference."""

    def prompt_tokens(self, sample: Sample) -> int:
        """Tokens of a sample's prompt, from the suite where it knows them."""
        known = sample.extra.get("prompt_tokens")
        return int(known) if known is not None else len(self.suite.encode(sample))


def prepare(config: RunConfig) -> Prepared:
    """Resolve model and task and generate the prompts.

    Raises
    ------
    UsageError
        For a model, a task or data that cannot be had as asked, or if no task is left to run.
    """
    with refusals():
        spec = model_spec(config.model)
        executor = executor_here(config)
        model = describe(spec)
        task, notes = fill_task(
            config.task, runner=config.runner, context_length=model.context_length, has_gpu=torch.cuda.is_available()
        )
        suite = make_suite(
            task,
            model.tokenizer,
            model_name=model.name,
            model_family=model.family,
            context_length=model.context_length,
            seed=config.seed,
        )
        plan = suite.plan()
        samples, missing = _samples(suite, plan)
    if missing:
        lost = {m.task for m in missing}
        plan = replace(
            plan,
            tasks=tuple(t for t in plan.tasks if t not in lost),
            skipped=(*plan.skipped, *missing),
            covers_benchmark=False,
        )
    if not plan.tasks:
        raise UsageError(f"task={task['name']}: {_why_none(plan.skipped)}")
    return Prepared(config, spec, model, task, suite, plan, samples, (*notes, *plan.notes), executor)


def _why_none(skipped: Sequence[Skipped]) -> str:
    said = {skip.reason for skip in skipped}
    if len(said) == 1 and all(skip.source_missing for skip in skipped):
        return said.pop()  # what all of them lack needs no list of them
    return f"no task can be run ({reasons(skipped)})"


def _samples(suite: Suite, plan: Plan) -> tuple[tuple[Sample, ...], list[Skipped]]:
    from eval.data import SourceUnavailable

    samples: list[Sample] = []
    missing: list[Skipped] = []
    for task in plan.tasks:
        try:
            samples.extend(suite.samples(task))
        except SourceUnavailable as error:
            missing.append(Skipped(task, str(error), source_missing=True))
    return tuple(samples), missing


def prompts_fingerprint(samples: Sequence[Sample]) -> list[str]:
    """Fingerprints of all prompts with their limits, in order: what two runs must share to be compared."""
    return [f"{s.task}/{s.index}/{s.max_new_tokens}/{s.fingerprint}" for s in samples]
