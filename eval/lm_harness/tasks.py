"""Load lm-eval tasks and build their requests before any weight is loaded."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eval.lm_harness.config import LmEvalConfig
from eval.records import TaskError

GENERATION = "generate_until"


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their requests built."""

    loaded: Any
    """What lm-eval's ``TaskManager.load`` returned, the configuration's overrides applied."""
    requests: Mapping[str, tuple[Any, ...]]
    """Requests (lm-eval's ``Instance``) by task, in document order."""
    fingerprint: str
    """Hex sha256 of everything that decides prompts, targets and scores."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tasks without their groups, in the order they run."""
        return tuple(self.requests)

    def generation_requests(self, task: str) -> tuple[Any, ...]:
        """Requests of a task that decode."""
        return tuple(r for r in self.requests[task] if r.request_type == GENERATION)

    def documents(self, task: str) -> int:
        """Documents of a task that are asked about."""
        return len({r.doc_id for r in self.requests[task]})


def load_tasks(config: LmEvalConfig, chat_template: Callable[..., str], tokenizer_name: str) -> LoadedTasks:
    """Load tasks with their data and build every request.

    Parameters
    ----------
    config
        What was asked for.
    chat_template
        Renders a conversation, as lm-eval's models do; called only with ``apply_chat_template``.
    tokenizer_name
        Label of the tokenizer.

    Raises
    ------
    TaskError
        For an unknown task, one that cannot be loaded (a data set that is not there), or one without documents.
    """
    seed_everything(config)
    loaded = _load(config)
    for name, task in loaded["tasks"].items():
        _override(task, name, config)
    requests = {}
    for name, task in loaded["tasks"].items():
        try:
            task.build_all_requests(
                limit=sample_size(task, config.limit),
                system_instruction=config.system_instruction,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.multiturn,
                chat_template=chat_template if config.apply_chat_template else None,
                tokenizer_name=tokenizer_name if config.apply_chat_template else "",
            )
        except ValueError as error:
            raise TaskError(f"task.tasks={name}: {_one_line(error)}") from None
        requests[name] = tuple(r for instance in task.instances for r in [instance] * (instance.repeats or 1))
    return LoadedTasks(loaded, requests, _fingerprint(loaded["tasks"], requests))


def seed_everything(config: LmEvalConfig) -> None:
    """Seed the global generators as lm-eval does: tasks draw their data and few-shot examples from them."""
    import numpy as np
    import torch

    python, numpy, torch_seed, _ = config.seeds
    random.seed(python)
    np.random.seed(numpy)  # noqa: NPY002 - the global state is what tasks read
    torch.manual_seed(torch_seed)


def reset_fewshot(loaded: LoadedTasks, config: LmEvalConfig) -> None:
    """Rewind the few-shot samplers, so that lm-eval builds the very requests that were fingerprinted."""
    seed_everything(config)
    for task in loaded.loaded["tasks"].values():
        task.set_fewshot_seed(seed=config.seeds[3])


def sample_size(task: Any, limit: int | float | None) -> int | None:
    """Documents of a task under a limit, by lm-eval's rule."""
    from lm_eval.evaluator_utils import get_sample_size

    size: int | None = get_sample_size(task, limit)
    return size


def _load(config: LmEvalConfig) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=config.include_path, metadata=dict(config.metadata))
    names: list[str] = []
    for name in config.tasks:
        found = [name] if name.endswith(".yaml") else manager.match_tasks([name])
        if not found:
            folder = f" or in {config.include_path}" if config.include_path else ""
            raise TaskError(f"task.tasks={name}: expected a task of lm-eval{folder}; `lm-eval ls tasks` lists them")
        names.extend(n for n in found if n not in names)
    try:
        return manager.load(names)
    except Exception as error:  # lm-eval, datasets, the hub client and a task's own code each raise their own
        raise TaskError(
            f"task.tasks={','.join(names)}: cannot be loaded ({_one_line(error)}); a task's data are where its YAML "
            "says, most on the hub: check the network and the login there, or the files that the YAML names"
        ) from None


def _override(task: Any, name: str, config: LmEvalConfig) -> None:
    """Apply the configuration to a task, by the rules of lm-eval's ``simple_evaluate``."""
    own = task.get_config("num_fewshot")
    if own is None:
        task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
    elif config.num_fewshot is not None and own != 0:  # a task that says 0 means it
        task.set_config(key="num_fewshot", value=config.num_fewshot)
    if config.gen_kwargs and task.get_config("output_type") == GENERATION:
        task.set_config(key="generation_kwargs", value=dict(config.gen_kwargs), update=True)
    task.set_fewshot_seed(seed=config.seeds[3])
    if getattr(task, "UNSAFE_CODE", False) and not config.confirm_run_unsafe_code:
        raise TaskError(
            f"task.tasks={name}: runs code that the model writes; task.confirm_run_unsafe_code=true allows it"
        )


def _fingerprint(tasks: Mapping[str, Any], requests: Mapping[str, tuple[Any, ...]]) -> str:
    """Digest of prompts, options, documents and scoring configuration; the lm-eval version covers its own code."""
    from lm_eval.utils import handle_non_serializable

    digest = hashlib.sha256()
    for name, task in tasks.items():
        parts: list[Any] = [name, task.VERSION, task.dump_config()]
        parts += [[r.request_type, r.doc_id, r.idx, r.arguments, r.doc] for r in requests[name]]
        for part in parts:
            digest.update(json.dumps(part, default=handle_non_serializable, sort_keys=True).encode())
    return digest.hexdigest()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
