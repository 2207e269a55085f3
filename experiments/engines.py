"""What runners build engines from: model, method, and how a prompt is divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.models import ModelSpec
    from ffd.methods import Method

GPU_PREFILL_CHUNK = 32768
"""Prompt tokens per forward on a GPU, where a whole long prompt's activations would not fit."""


def model_spec(model: Mapping[str, Any]) -> ModelSpec:
    """Which model is meant, from its resolved configuration; null stands for the default."""
    from eval.models import ModelSpec

    return ModelSpec(**{key: value for key, value in model.items() if value is not None})


def make_method(method: Mapping[str, Any]) -> Method:
    """Build a method from its resolved configuration (``name`` and knobs)."""
    from ffd.methods import create

    knobs = dict(method)
    return create(knobs.pop("name"), knobs)


def prefill_chunk(asked: int | None, device: str) -> int | None:
    """Prompt tokens per forward on ``device`` (cpu, cuda or cuda:<index>); None for whole prompts."""
    return GPU_PREFILL_CHUNK if asked is None and device.startswith("cuda") else asked
