"""What an evaluation by lm-eval needs before weights are loaded: model description, tasks and requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from eval.lm_harness.config import LmEvalConfig, make_config
from eval.lm_harness.tasks import LoadedTasks, load_tasks
from eval.models import ModelDescription, ModelSpec, describe
from experiments.checks import refusal
from experiments.config import RunConfig
from experiments.engines import make_method, model_spec
from experiments.errors import UsageError
from experiments.lifecycle import code_and_machine
from experiments.refusals import refusals


@dataclass(frozen=True)
class Request:
    """One request as the estimate sees it."""

    task: str
    prompt_tokens: int
    max_new_tokens: int
    """0 for loglikelihood requests."""


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation that is ready to be estimated and started."""

    config: RunConfig
    spec: ModelSpec
    model: ModelDescription
    task: LmEvalConfig
    tasks: LoadedTasks
    executor: str

    @property
    def method(self) -> Any:
        """The decode method."""
        return make_method(self.config.method)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the results."""
        return {
            **self.config.resolved(),
            "task": {"name": "lm_eval", **asdict(self.task)},
            "model_revision": self.model.revision,
            "prompts": self.tasks.fingerprint,
            "executor": self.executor,
            **code_and_machine(
                [
                    "ffd.attachment",
                    type(self.method).__module__,
                    "eval.lm_harness.model",
                    "eval.lm_harness.tasks",
                    "eval.lm_harness.results",
                ],
                packages=("lm-eval",),
            ),
        }

    @cached_property
    def requests(self) -> tuple[Request, ...]:
        """Every request with its length in tokens; a context shared by several continuations is counted once each."""
        found = []
        for task, instances in self.tasks.requests.items():
            encoded = self.model.tokenizer(["".join(map(str, r.args[: _TEXTS[r.request_type]])) for r in instances])
            for instance, ids in zip(instances, encoded["input_ids"], strict=True):
                found.append(Request(task, len(ids), _new_tokens(instance)))
        return tuple(found)

    def prompt_tokens(self, request: Request) -> int:
        """What `experiments.estimate.estimate` asks of a prepared run."""
        return request.prompt_tokens


_TEXTS = {"generate_until": 1, "loglikelihood": 2, "loglikelihood_rolling": 1}
"""Leading arguments of a request that are text for the model."""
_DEFAULT_NEW_TOKENS = 256  # lm-eval's


def _new_tokens(instance: Any) -> int:
    if instance.request_type != "generate_until":
        return 0
    return int(instance.args[1].get("max_gen_toks", _DEFAULT_NEW_TOKENS))


def prepare(config: RunConfig) -> PreparedEvaluation:
    """Resolve the model and load the tasks with their data; no weight is read.

    Raises
    ------
    UsageError
        For whatever cannot be had as asked.
    """
    from experiments.settings import executor_here

    _refuse_inapplicable(config)
    with refusals():
        task = make_config(config.task)
        try:
            from eval.lm_harness.model import chat_renderer
        except ModuleNotFoundError as error:
            raise UsageError(f"task=lm_eval: {error.name} is not installed; pip install -e '.[lm-eval]'") from None
        spec = model_spec(config.model)
        executor = executor_here(config)
        model = describe(spec)
        tasks = load_tasks(task, chat_renderer(model.tokenizer), model.name)
    return PreparedEvaluation(config, spec, model, task, tasks, executor)


def _refuse_inapplicable(config: RunConfig) -> None:
    """Refuse what would be ignored: lm-eval decides the order of requests, ``model.generate`` runs them."""
    for key, value, accepted in (
        ("runner", config.runner, "accuracy"),
        ("engine.graph", config.graph, "auto"),
        ("engine.fuse", config.fuse, "auto"),
        ("engine.prefill_chunk", config.prefill_chunk, None),
        ("shard", config.shard, None),
        (f"match.{config.match.target}", config.match.value if config.match.target else None, None),
    ):
        if value != accepted and not (key in ("engine.graph", "engine.fuse") and value is False):
            wanted = "null" if accepted is None else "auto or false" if accepted == "auto" else accepted
            raise refusal(key, value, f"{wanted} with task=lm_eval")
