"""From lm-eval's ``model_args`` to a model, a method and lm-eval's own options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eval.models import NAMED_MODELS, ModelSpec
from ffd.methods import KnobError, Method, create, method_class

HARNESS_OPTIONS = (
    "add_bos_token", "chat_template_args", "enable_thinking", "logits_cache", "max_length", "prefix_token_id",
    "softmax_dtype", "think_end_token",
)  # fmt: skip
"""Arguments of lm-eval's Hugging Face class that mean the same here; the rest of its arguments choose another way to
load or split a model, which sparse decoding does not have."""

_OWN = ("pretrained", "method", "executor", "revision", "dtype", "device")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


class HarnessError(ValueError):
    """A request to the lm-eval bridge that cannot be run; one line with the field, the value and what is accepted."""


@dataclass(frozen=True)
class ModelArguments:
    """``model_args``, understood."""

    spec: ModelSpec
    method: Method
    executor: str
    options: Mapping[str, Any]
    """Those of `HARNESS_OPTIONS` that were given."""


def parse(arguments: Mapping[str, Any]) -> ModelArguments:
    """Understand ``model_args``; nothing is loaded, but a hub model's files are fetched.

    Parameters
    ----------
    arguments
        ``pretrained`` (a folder, a GGUF file, a hub name or one of our model names), ``method`` (default ffd),
        ``executor``, ``revision``, ``dtype``, ``device``, the method's knobs, and `HARNESS_OPTIONS`. lm-eval's own
        ``delta`` (delta weights) is not among them: here it is the method's margin.

    Raises
    ------
    HarnessError
        For an unknown argument or method, or a knob the method does not have or accept.
    eval.models.ModelError
        For a dtype or device that is not accepted.
    """
    method = make_method(arguments)
    pretrained = arguments.get("pretrained")
    if not isinstance(pretrained, str) or not pretrained:
        raise HarnessError(f"pretrained={pretrained}: expected {_accepted_models()}")
    name, path = _find(pretrained, arguments.get("revision"))
    spec = ModelSpec(
        name=name,
        path=path,
        revision=arguments.get("revision"),
        dtype=str(arguments.get("dtype", "auto")),
        device=str(arguments.get("device", "auto")),
    )
    options = {key: arguments[key] for key in HARNESS_OPTIONS if key in arguments}
    return ModelArguments(spec, method, str(arguments.get("executor", "auto")), options)


def make_method(arguments: Mapping[str, Any]) -> Method:
    """The method that ``model_args`` describe; every argument must belong to someone.

    Raises
    ------
    HarnessError
        See `parse`.
    """
    name = str(arguments.get("method", "ffd"))
    try:
        knobs = {field.name for field in fields(method_class(name))}
        # --trust_remote_code is meant for data sets; lm-eval repeats it to every model.
        known = knobs | {*_OWN, *HARNESS_OPTIONS, "trust_remote_code"}
        for key, value in arguments.items():
            if key not in known:
                own = ", ".join(sorted(knobs)) or "none"
                raise HarnessError(
                    f"model_args {key}={value}: expected a knob of method {name} ({own}) "
                    f"or one of {', '.join((*_OWN, *HARNESS_OPTIONS))}"
                )
        return create(name, {key: arguments[key] for key in knobs if key in arguments})
    except KnobError as error:
        raise HarnessError(str(error)) from None
    except TypeError:
        given = ", ".join(f"{key}={arguments[key]}" for key in sorted(knobs) if key in arguments)
        raise HarnessError(f"method={name}: a knob has a value of the wrong type ({given})") from None


def _find(pretrained: str, revision: str | None) -> tuple[str, str | None]:
    """Name and path for `ModelSpec`."""
    if pretrained in NAMED_MODELS:
        return pretrained, None
    path = Path(pretrained).expanduser()
    if path.exists():
        return path.resolve().name, str(path)
    if pretrained.count("/") == 1 and not pretrained.startswith((".", "/", "~")):
        return pretrained, _from_hub(pretrained, revision)
    raise HarnessError(f"pretrained={pretrained}: expected {_accepted_models()}")


def _from_hub(repo: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    from eval.data import hub

    try:
        hub.require(repo, "config.json", revision=revision)
        return str(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except hub.HubRefusal as refusal:
        raise HarnessError(f"pretrained={repo}: {refusal}; or give {_accepted_models()}") from None


def _accepted_models() -> str:
    return f"a model folder, a GGUF file, a hub name (owner/name), or one of {', '.join(NAMED_MODELS)}"
