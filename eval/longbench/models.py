"""Input budgets and chat templates of the models that the official code lists, and the rules for all others.

Facts from THUDM/LongBench at commit 2e00731: ``config/model2maxlen.json``, ``config/model2path.json``
and the chat and clean-up functions of ``pred.py``; the Vicuna text is FastChat's ``vicuna_v1.1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.records import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatTemplate:
    """How a prompt is put before a chat model."""

    name: str
    render: Callable[[str], str]
    """Prompt with its chat turn around it."""
    official: bool = True
    """Whether the official code applies this to the model."""
    add_special_tokens: bool = True
    """False where the text carries the model's BOS itself."""
    clean: Callable[[str], str] = lambda prediction: prediction
    """Clean-up of the model's predictions, on every dataset."""


@dataclass(frozen=True)
class OfficialModel:
    """A model of the official tables."""

    name: str
    hub_name: str
    max_input: int
    """Prompt tokens kept before the chat template is applied."""
    template: str
    """Text around ``{prompt}``; empty where the model's tokenizer builds it."""
    clean: Callable[[str], str] = lambda prediction: prediction


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "USER: {prompt} ASSISTANT:"
)
_XGEN = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n"
    " ### Human: {prompt}\n###"
)


def _clean_xgen(prediction: str) -> str:
    return prediction.strip().replace("Assistant:", "")


def _clean_internlm(prediction: str) -> str:
    return prediction.split("<eoa>")[0]


OFFICIAL_MODELS = (
    OfficialModel("llama2-7b-chat-4k", "meta-llama/Llama-2-7b-chat-hf", 3500, "[INST]{prompt}[/INST]"),
    OfficialModel("longchat-v1.5-7b-32k", "lmsys/longchat-7b-v1.5-32k", 31500, _VICUNA),
    OfficialModel("xgen-7b-8k", "Salesforce/xgen-7b-8k-inst", 7500, _XGEN, _clean_xgen),
    OfficialModel(
        "internlm-7b-8k",
        "internlm/internlm-chat-7b-8k",
        7500,
        "<|User|>:{prompt}<eoh>\n<|Bot|>:",
        _clean_internlm,
    ),
    OfficialModel("chatglm2-6b", "THUDM/chatglm2-6b", 31500, ""),
    OfficialModel("chatglm2-6b-32k", "THUDM/chatglm2-6b-32k", 31500, ""),
    OfficialModel("chatglm3-6b-32k", "THUDM/chatglm3-6b-32k", 31500, ""),
    OfficialModel("vicuna-v1.5-7b-16k", "lmsys/vicuna-7b-v1.5-16k", 15500, _VICUNA),
)


def find_official(model_name: str, model_family: str) -> OfficialModel | None:
    """Official row of a model, found by its official name, hub name or the hub name's last part."""
    given = {model_name.lower(), model_name.lower().rstrip("/").rsplit("/", 1)[-1], model_family.lower()}
    for model in OFFICIAL_MODELS:
        hub_name = model.hub_name.lower()
        if given & {model.name, hub_name, hub_name.rsplit("/", 1)[-1]}:
            return model
    return None


def derived_max_input(context_length: int) -> int:
    """Input budget of a model that the official table does not list, in tokens.

    The table's own pattern, a thousand tokens per full K of context less 500: 4K gives 3,500, 8K
    gives 7,500, 32K gives 31,500 and 128K gives 127,500. What lies between budget and context is
    the room for the chat template and the answer.

    Raises
    ------
    TaskError
        The context is shorter than 1K.
    """
    if context_length < 1024:
        raise TaskError(f"context_length={context_length} is too short for LongBench; accepted: at least 1024")
    return 1000 * (context_length // 1024) - 500


def no_template(official: OfficialModel | None) -> ChatTemplate:
    """Raw prompts for every dataset; official for models that the official code does not list."""
    return ChatTemplate("none", lambda prompt: prompt, official is None, clean=_clean(official))


def official_template(model: OfficialModel, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Template that the official code applies to one of its models.

    Raises
    ------
    TaskError
        The model's template is one that its own tokenizer builds and this one cannot.
    """
    if model.template:
        return ChatTemplate(model.name, lambda prompt: model.template.format(prompt=prompt), clean=model.clean)
    if model.name.startswith("chatglm3"):
        raise TaskError(
            f"task.template=auto: the official template of {model.name} is made of token ids, not text; "
            "accepted: none, chat"
        )
    if not hasattr(tokenizer, "build_prompt"):
        raise TaskError(
            f"task.template=auto: the official template of {model.name} is its own tokenizer's build_prompt, "
            "which this tokenizer lacks; accepted: none, chat"
        )
    return ChatTemplate(model.name, tokenizer.build_prompt)


def tokenizer_template(tokenizer: PreTrainedTokenizerBase, official: OfficialModel | None) -> ChatTemplate:
    """The tokenizer's own chat template around one user turn: an extension, labelled so.

    No system message is given (a template may add its default one), thinking is switched off because
    answers have 32-512 tokens, and the date is fixed because prompts must not change overnight.

    Raises
    ------
    TaskError
        The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise TaskError("task.template=chat: the model's tokenizer has no chat template; accepted: auto, none")

    def render(prompt: str) -> str:
        turn = [{"role": "user", "content": prompt}]
        return str(
            tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True, enable_thinking=False, date_string="26 Jul 2024"
            )
        )

    return ChatTemplate("tokenizer", render, official=False, add_special_tokens=False, clean=_clean(official))


def _clean(model: OfficialModel | None) -> Callable[[str], str]:
    return model.clean if model else lambda prediction: prediction
