"""Sparse-attention decoding for long contexts: methods, fused Triton kernels, and a seam to transformers.

>>> import ffd
>>> with ffd.attach(model, ffd.FFD(delta=7)):  # doctest: +SKIP
...     model.generate(**inputs, max_new_tokens=100)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ffd.attachment import Attachment, attach
    from ffd.engine import Engine
    from ffd.generation import Generation
    from ffd.methods import Method
    from ffd.methods.dense import Dense
    from ffd.methods.ffd import FFD

_HOMES = {
    "attach": "ffd.attachment",
    "Attachment": "ffd.attachment",
    "Engine": "ffd.engine",
    "Generation": "ffd.generation",
    "Method": "ffd.methods",
    "Dense": "ffd.methods.dense",
    "FFD": "ffd.methods.ffd",
}

__all__ = ["FFD", "Attachment", "Dense", "Engine", "Generation", "Method", "attach"]


def __dir__() -> list[str]:
    """What can be had, imported yet or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import on first use: ``import ffd`` must not cost the seconds that torch and transformers take."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
