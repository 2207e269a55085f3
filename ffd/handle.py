"""What a cache hands to the attention function in place of keys and values while decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from ffd.support import UnsupportedModelError, refused_model


class Handle(ABC):
    """Stands for keys and values; only `ffd.attention` understands it.

    A model that computes with keys and values on its own is refused in one line; it would otherwise fail in as many
    words as there are models.
    """

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The model's type, for refusals."""

    @abstractmethod
    def attend(self, q: Tensor, scale: float) -> Tensor:
        """Decode one step: q [B, Hq, d] -> [B, Hq, d]."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: a torch function was handed what only our attention function understands."""
        handle = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls))
        raise handle._taken_apart(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        """Refuse what a tensor has and a handle has not."""
        if name.startswith("__") or name not in dir(Tensor):
            raise AttributeError(name)
        raise self._taken_apart(name)

    def __getitem__(self, index: Any) -> Any:
        """Refuse: a handle has no elements."""
        raise self._taken_apart("indexing")

    def _taken_apart(self, how: str) -> UnsupportedModelError:
        return refused_model(self.model_type, f"its attention uses keys and values by itself ({how})")
