"""Load a model or its tokenizer from a specification; importing this module loads no heavy library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eval.data.hub import quiet
from eval.model_facts import automatic_bos, context_length, eos_token_ids, family, require_sdpa, require_usable
from eval.model_files import NAMED_MODELS, ModelError, ModelFiles, locate

__all__ = [
    "NAMED_MODELS",
    "LoadedModel",
    "ModelDescription",
    "ModelError",
    "ModelSpec",
    "describe",
    "load_model",
    "load_tokenizer",
]

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSpec:
    """Which model, from where, in which precision and on which device.

    Raises
    ------
    ModelError
        For a dtype or device that is not accepted.
    """

    name: str = "smollm2_135m"
    """Key of `NAMED_MODELS`; a free label where `path` is given."""
    path: str | None = None
    """Local Hugging Face folder or GGUF file of any supported family."""
    revision: str | None = None
    """Hub branch, tag or commit."""
    dtype: str = "auto"
    """auto (float32 on the CPU, bfloat16 on CUDA), float32, bfloat16 or float16."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:<index>."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ModelError(f"model.dtype={self.dtype}: accepted are {', '.join(DTYPES)}")
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
            raise ModelError(f"model.device={self.device}: accepted are auto, cpu, cuda, cuda:<index>")


@dataclass(frozen=True)
class ModelDescription:
    """What is known of a model without its weights."""

    name: str
    """The specification's name."""
    label: str
    """What tables call it: the name, or the last part of the path it was loaded from."""
    family: str
    """The configuration's model type (llama, qwen2, qwen3, mistral, ...), but llama3 for Llama-3's chat tokens."""
    revision: str
    """Content identity of the weights: ``hub-<commit>``, ``gguf-<sha256>-v<n>`` or ``folder-<hash>``."""
    context_length: int
    """Longest sequence in tokens that the position encoding is made for."""
    eos_token_ids: tuple[int, ...]
    """Every token that ends a generation: the generation configuration's and the tokenizer's, ascending."""
    bos_token_id: int | None
    """Token that the tokenizer puts before a text by itself; None where it adds none."""
    config: Any
    """The transformers configuration."""
    tokenizer: Any
    """The transformers tokenizer."""


@dataclass(frozen=True)
class LoadedModel(ModelDescription):
    """A model ready for inference."""

    model: Any
    """`torch.nn.Module` in evaluation mode, no gradients, ``sdpa`` attention, on its device."""
    dtype: str
    """float32, bfloat16 or float16."""
    device: str
    """cpu, cuda or cuda:<index>."""


def load_tokenizer(spec: ModelSpec) -> Any:
    """The tokenizer alone; weights are not read.

    Raises
    ------
    ModelError
        See `eval.model_files.locate`; also for a folder without a readable tokenizer.
    """
    return _tokenizer(_locate(spec))


def describe(spec: ModelSpec) -> ModelDescription:
    """Everything but the weights: what prompts, plans and dry runs need.

    Raises
    ------
    ModelError
        See `eval.model_files.locate`; also for an unreadable configuration or tokenizer.
    """
    return _describe(spec, _locate(spec))


def load_model(spec: ModelSpec, known: ModelDescription | None = None) -> LoadedModel:
    """Load weights and tokenizer.

    Parameters
    ----------
    spec
        The model.
    known
        What `describe` said of it, where that has been asked already: the tokenizer is not read again.

    Raises
    ------
    ModelError
        See `eval.model_files.locate`; also for damaged or incomplete weights, an architecture that
        transformers does not know, a CUDA device that is not there, or too little memory.
    """
    import torch

    device, dtype = _device(spec), spec.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    files = _locate(spec)
    description = known or _describe(spec, files)
    require_sdpa(files, description.config)
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                files.location,
                revision=files.hub_revision or "main",
                dtype=getattr(torch, dtype),
                attn_implementation="sdpa",
                output_loading_info=True,
            )
        incomplete = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        if incomplete:
            raise ModelError(
                f"{files.label}: the weights in {files.location} lack {len(incomplete)} tensors "
                f"of the configuration, the first {incomplete[0]}"
            )
        model = model.to(device).eval().requires_grad_(False)
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors, the hub client and CUDA each raise their own
        raise _unreadable(files, "weights", error) from None
    shared = {field.name: getattr(description, field.name) for field in fields(description)}
    return LoadedModel(**shared | {"config": model.config}, model=model, dtype=dtype, device=device)


def _locate(spec: ModelSpec) -> ModelFiles:
    return locate(spec.name, spec.path, spec.revision)


def _describe(spec: ModelSpec, files: ModelFiles) -> ModelDescription:
    from transformers import AutoConfig

    try:
        with quiet():
            config = AutoConfig.from_pretrained(files.location, revision=files.hub_revision or "main")
    except Exception as error:  # bad JSON, unknown architecture, the hub client's errors
        raise _unreadable(files, "configuration", error) from None
    require_usable(files, config)
    tokenizer = _tokenizer(files)
    return ModelDescription(
        name=spec.name,
        label=spec.name if spec.path is None else Path(spec.path).name,
        family=family(config, tokenizer),
        revision=files.identity or f"hub-{config._commit_hash}",
        context_length=context_length(files, config),
        eos_token_ids=eos_token_ids(files, config, tokenizer),
        bos_token_id=automatic_bos(tokenizer),
        config=config,
        tokenizer=tokenizer,
    )


def _tokenizer(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(files.location, revision=files.hub_revision or "main")
    except Exception as error:  # missing or damaged files, in as many ways as there are tokenizers
        raise _unreadable(files, "tokenizer", error) from None


def _device(spec: ModelSpec) -> str:
    import torch

    if spec.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if spec.device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(spec.device.partition(":")[2] or 0) >= count:
            raise ModelError(f"model.device={spec.device}: this machine has {count} CUDA devices; use auto or cpu")
    return spec.device


def _unreadable(files: ModelFiles, part: str, error: Exception) -> ModelError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = lines[0] if lines else type(error).__name__
    return ModelError(f"{files.label}: cannot load the {part} of {files.location} ({detail})")
