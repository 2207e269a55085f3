"""The model whose steps are timed: random weights of a geometry, or the configured model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.checks import choice
from experiments.config import RunConfig
from experiments.engines import model_spec
from experiments.errors import UsageError
from experiments.throughput.models import SMALL


@dataclass(frozen=True)
class Subject:
    """The model to time, before weights are made or loaded."""

    name: str
    revision: str
    dtype: str
    spec: Any
    """`eval.models.ModelSpec`; None for random weights of a geometry."""
    geometry: str | None

    def load(self, device: str) -> Any:
        """The model on its device."""
        if self.geometry is not None:
            from experiments.throughput.models import random_model

            return random_model(self.geometry, device, self.dtype)
        from eval.models import ModelError, load_model

        try:
            return load_model(self.spec).model
        except ModelError as error:
            raise UsageError(str(error)) from None


def subject(config: RunConfig, gpu: bool) -> Subject:
    """The model that ``bench.geometry`` or ``model`` names; raises `UsageError`."""
    from eval.models import DTYPES, ModelError, describe

    geometry = config.bench.geometry
    dtype = config.model.get("dtype")
    choice("model.dtype", "auto" if dtype is None else dtype, DTYPES)
    plain = dtype if dtype not in (None, "auto") else "bfloat16" if gpu else "float32"
    if geometry is not None:
        if config.model.get("path") is not None:
            raise UsageError(f"bench.geometry={geometry}: expected null where model.path is given")
        if geometry not in SMALL and not gpu:
            raise UsageError(f"bench.geometry={geometry}: needs a GPU; expected null or {', '.join(SMALL)} without one")
        return Subject(f"random-{geometry}", f"geometry-{geometry}", plain, None, geometry)
    try:
        spec = model_spec(config.model)
        known = describe(spec)
    except ModelError as error:
        raise UsageError(str(error)) from None
    return Subject(known.label, known.revision, plain, spec, None)
