"""From a row to the text the model reads: budget, middle cut, chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.longbench import models
from eval.longbench.config import LongBenchConfig
from eval.longbench.datasets import Dataset
from eval.longbench.models import ChatTemplate, OfficialModel
from eval.longbench.rows import Row
from eval.longbench.truncation import truncate_middle
from eval.records import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompting:
    """Prompt rules of one run."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    max_input: int
    """Tokens of a raw prompt, chat template not counted."""
    budget_rule: str
    """Where `max_input` comes from, in words."""

    def build(self, dataset: Dataset, row: Row) -> tuple[str, bool]:
        """Prompt text of a row, and whether its middle was cut."""
        prompt = dataset.template.format(context=row.context, input=row.input)
        prompt, truncated = truncate_middle(self.tokenizer, prompt, self.max_input)
        return (self.template.render(prompt) if dataset.chat else prompt), truncated

    def adds_special_tokens(self, dataset: Dataset) -> bool:
        """Whether the tokenizer adds its own BOS to the prompts of a dataset."""
        return self.template.add_special_tokens or not dataset.chat

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a finished prompt."""
        ids = self.tokenizer(prompt, truncation=False, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return list(ids)

    @property
    def departures(self) -> tuple[str, ...]:
        """What is not as the official code has it."""
        if self.template.official:
            return ()
        if self.template.name == "none":
            return ("no chat template, where the official code applies one to this model",)
        return ("chat template: the tokenizer's own, an extension of the official protocol",)

    @property
    def notes(self) -> tuple[str, ...]:
        """The prompt rules that a table's header carries beside the departures."""
        budget = f"input budget {self.max_input} tokens ({self.budget_rule}), cut in the middle before the template"
        if not self.template.official:
            return (budget,)  # the departure says which template
        if self.template.name == "none":
            return budget, "no chat template, as the official code has it for models that it does not list"
        return budget, f"official chat template of {self.template.name}"


def choose_prompting(
    config: LongBenchConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_name: str,
    model_family: str,
    context_length: int,
) -> Prompting:
    """Template and input budget of a request.

    Raises
    ------
    TaskError
        The template cannot be had, or the budget leaves no room for template and answer.
    """
    official = models.find_official(model_name, model_family)
    template = _choose_template(config, tokenizer, official)
    if config.max_input is not None:
        max_input, rule = config.max_input, "task.max_input"
    elif config.fixed_max_input is not None:
        max_input, rule = config.fixed_max_input, f"task.profile={config.profile}"
    elif official is not None:
        max_input, rule = official.max_input, f"official table, {official.name}"
    else:
        max_input, rule = models.derived_max_input(context_length), f"derived from a context of {context_length}"
    prompting = Prompting(tokenizer, template, max_input, rule)
    _check_room(config, prompting, context_length)
    return prompting


def _choose_template(
    config: LongBenchConfig, tokenizer: PreTrainedTokenizerBase, official: OfficialModel | None
) -> ChatTemplate:
    if config.template == "none" or config.profile == "ffd_paper":
        return models.no_template(official)
    if config.template == "auto" and official is not None:
        return models.official_template(official, tokenizer)
    if config.template == "auto" and not tokenizer.chat_template:
        return models.no_template(official)
    return models.tokenizer_template(tokenizer, official)


def _check_room(config: LongBenchConfig, prompting: Prompting, context_length: int) -> None:
    chat = any(dataset.chat for dataset in config.datasets)
    turn = prompting.template.render("") if chat else ""
    overhead = len(prompting.encode(turn, prompting.template.add_special_tokens)) if turn else 0
    answer = max(config.max_new_tokens(dataset) for dataset in config.datasets)
    room = context_length - overhead - answer
    if prompting.max_input > room:
        raise TaskError(
            f"input budget {prompting.max_input} ({prompting.budget_rule}) + {overhead} of template + {answer} new "
            f"tokens exceed the context of {context_length}; accepted: task.max_input up to {room}"
        )
