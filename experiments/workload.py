"""Prompts to study a method on: a task's, or pieces of a plain text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eval.answer import stop_tokens
from eval.models import LoadedModel, ModelDescription, ModelSpec, describe, load_model
from eval.records import Sample
from experiments.config import RunConfig
from experiments.engines import model_spec
from experiments.errors import UsageError
from experiments.identity import digest
from experiments.prepare import prepare, prompts_fingerprint
from experiments.refusals import refusals
from experiments.settings import executor_here


@dataclass(frozen=True)
class Item:
    """One prompt."""

    task: str
    index: int
    prompt: tuple[int, ...]
    """Token ids."""
    max_new_tokens: int
    fingerprint: str
    """Hex sha256 of the prompt."""
    continuation: tuple[int, ...] | None = None
    """Tokens that follow in the text; None where dense attention decides what follows."""
    sample: Sample | None = None
    """Where the prompt is a task's."""

    def stop_tokens(self, loaded: LoadedModel) -> list[int]:
        """Ids that end dense attention's answer."""
        return [] if self.sample is None else stop_tokens(loaded, self.sample)


@dataclass(frozen=True)
class Workload:
    """A model and prompts for it, before weights are loaded."""

    spec: ModelSpec
    model: ModelDescription
    task: dict[str, Any]
    items: tuple[Item, ...]
    notes: tuple[str, ...]
    executor: str
    fingerprint: str
    """Of all prompts and limits."""

    @property
    def capacity(self) -> int:
        """Tokens a row must hold."""
        return max(len(item.prompt) + item.max_new_tokens for item in self.items)

    def load(self) -> LoadedModel:
        """Load the weights; raises `UsageError`."""
        with refusals():
            return load_model(self.spec, self.model)


def for_calibration(config: RunConfig) -> RunConfig:
    """The configuration whose prompts a setting is found on: generated ones are others than a run measures with it.

    Rows of a dataset are the same whatever the seed.
    """
    return replace(config, seed=config.seed + 1)


def load_workload(config: RunConfig) -> Workload:
    """Prompts of ``fidelity.text_file``, else of the task; raises `UsageError`."""
    return _of_text(config) if config.fidelity.text_file is not None else _of_task(config)


def _of_task(config: RunConfig) -> Workload:
    prepared = prepare(config)
    items = tuple(
        Item(
            s.task,
            s.index,
            tuple(prepared.suite.encode(s)),
            max(2, min(s.max_new_tokens, config.fidelity.new_tokens)),
            s.fingerprint,
            sample=s,
        )
        for s in prepared.samples
    )
    fingerprint = digest([*prompts_fingerprint(prepared.samples), config.fidelity.new_tokens])
    return Workload(prepared.spec, prepared.model, prepared.task, items, prepared.notes, prepared.executor, fingerprint)


def _of_text(config: RunConfig) -> Workload:
    options = config.fidelity
    assert options.text_file is not None
    try:
        text = options.text_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"fidelity.text_file={options.text_file}: cannot be read as text ({error})") from None
    with refusals():
        spec = model_spec(config.model)
        executor = executor_here(config)
        model = describe(spec)
    if options.prompt_tokens + options.new_tokens > model.context_length:
        raise UsageError(
            f"fidelity.prompt_tokens={options.prompt_tokens}: expected at most {model.context_length} tokens, "
            f"the model's context, with fidelity.new_tokens={options.new_tokens}"
        )
    # Quietly: a text may be longer than the model's context, its pieces are not.
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    lead = [] if model.bos_token_id is None else [model.bos_token_id]
    items = tuple(_pieces(ids, lead, options.prompt_tokens, options.new_tokens, options.prompts))
    if not items:
        raise UsageError(
            f"fidelity.text_file={options.text_file}: {len(ids)} tokens, expected at least "
            f"{options.prompt_tokens + options.new_tokens - len(lead)} for one piece of "
            "fidelity.prompt_tokens + fidelity.new_tokens"
        )
    task = {
        "name": "text",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "prompts": len(items),
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
    }
    return Workload(spec, model, task, items, (), executor, digest(task))


def _pieces(ids: Sequence[int], lead: list[int], prompt: int, new: int, most: int) -> list[Item]:
    """Consecutive pieces of a text, each a prompt and its continuation."""
    own = prompt - len(lead)
    pieces = []
    for index in range(min(most, len(ids) // (own + new))):
        start = index * (own + new)
        tokens = (*lead, *ids[start : start + own])
        follows = tuple(ids[start + own : start + own + new])
        pieces.append(Item("text", index, tokens, new, digest(list(tokens)), continuation=follows))
    return pieces
