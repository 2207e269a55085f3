"""Chat templates: RULER's fixed strings, the one of a model's family, and the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from eval.records import TaskError

PLACEHOLDER = "{task_template}"

OFFICIAL: Mapping[str, str] = MappingProxyType(
    {
        "base": "{task_template}",
        "meta-chat": "[INST] {task_template} [/INST]",
        "vicuna-chat": (
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: {task_template} ASSISTANT:"
        ),
        "lwm-chat": "You are a helpful assistant. USER: {task_template} ASSISTANT: ",
        "command-r-chat": (
            "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{task_template}<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        ),
        "chatglm-chat": "[gMASK]sop<|user|> \n {task_template}<|assistant|> \n ",
        "RWKV": (
            "User: hi\n\nAssistant: Hi. I am your assistant and I will provide expert full response in full details. "
            "Please feel free to ask any question and I will always answer it\n\nUser: {task_template}\n\nAssistant:"
        ),
        "Phi3": "<|user|>\n{task_template}<|end|>\n<|assistant|>\n",
        "meta-llama3": (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{task_template}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        "jamba": "<|startoftext|><|bom|><|system|> <|eom|><|bom|><|user|> {task_template}<|eom|><|bom|><|assistant|>",
        "nemotron5-instruct": "<SPECIAL_10>System\n\n<SPECIAL_11>User\n{task_template}\n<SPECIAL_11>Assistant\n",
    }
)
"""The template strings of RULER's ``template.py`` by name."""

ACCEPTED = ("auto", *OFFICIAL, "chat")

# RULER names templates after model families; its own configurations run Mistral with `base`.
_OF_FAMILY = {
    "llama2": "meta-chat",
    "llama3": "meta-llama3",
    "vicuna": "vicuna-chat",
    "lwm": "lwm-chat",
    "cohere": "command-r-chat",
    "command-r": "command-r-chat",
    "chatglm": "chatglm-chat",
    "rwkv": "RWKV",
    "phi3": "Phi3",
    "jamba": "jamba",
    "nemotron5": "nemotron5-instruct",
}


@dataclass(frozen=True)
class Template:
    """A chat template as the generators and the suite need it."""

    name: str
    text: str
    """Template with one ``{task_template}`` where the user's turn goes."""
    official: bool
    adds_special_tokens: bool
    """Whether the tokenizer adds its own BOS: not where the text already begins with it."""

    @property
    def inside(self) -> str:
        """Template that the generator itself applies (``base`` where the suite applies `text` afterwards)."""
        return self.text if self.official else PLACEHOLDER

    def wrap(self, user_turn: str) -> str:
        """Generated text as the model reads it, without the answer prefix."""
        return user_turn if self.official else self.text.replace(PLACEHOLDER, user_turn, 1)


def resolve_template(name: str, model_family: str, tokenizer: Any) -> Template:
    """Template of the key ``task.template``.

    Parameters
    ----------
    name : str
        One of `ACCEPTED`. ``auto`` is the official string of the family where there is one, else
        ``base``; ``chat`` is the model's own template, an extension of the protocol.
    model_family : str
        Family in any case, e.g. ``llama3``, ``qwen2``. Plain ``llama`` (the model type that
        Llama 2, 3 and others share) counts as ``llama3`` where the tokenizer has its header token.
    tokenizer : transformers.PreTrainedTokenizerBase
        Tokenizer of the evaluated model.

    Raises
    ------
    TaskError
        Unknown name, or ``chat`` for a tokenizer without a chat template.
    """
    if name not in ACCEPTED:
        raise TaskError(f"task.template={name!r}: unknown template; accepted: {', '.join(ACCEPTED)}")
    if name == "chat":
        text = _own_template(tokenizer)
    else:
        name = _of_family(model_family, tokenizer) if name == "auto" else name
        text = OFFICIAL[name]
    bos = tokenizer.bos_token
    return Template(name, text, name != "chat", not (bos and text.startswith(bos)))


def _of_family(family: str, tokenizer: Any) -> str:
    family = family.lower()
    if family == "llama" and "<|start_header_id|>" in tokenizer.get_vocab():
        family = "llama3"
    return _OF_FAMILY.get(family, "base")


def _own_template(tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise TaskError("task.template='chat': the model's tokenizer has no chat template; accepted: auto, base, ...")
    # Thinking would use up budgets of 30 to 128 tokens; templates without the switch ignore it.
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": PLACEHOLDER}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    if text.count(PLACEHOLDER) != 1:
        raise TaskError("task.template='chat': the model's chat template does not hold the user's text once")
    return text
