"""Whether a model that generates has predicted every token: sampling and argmax do not mind logits that are NaN."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor


class FiniteLogits:
    """Looks at the next token's logits of every forward of a model, as it gives them, inside a ``with`` block."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._finite: Tensor | None = None

    def __enter__(self) -> FiniteLogits:
        self._hook = self._model.register_forward_hook(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _look(self, model: Any, arguments: Any, output: Any) -> None:
        finite = output.logits[:, -1].amax(dim=-1).isfinite().all()  # NaN is the largest
        self._finite = finite if self._finite is None else self._finite & finite  # left on the device

    @property
    def all_finite(self) -> bool:
        """Whether the largest logit was a finite number each time."""
        return self._finite is None or bool(self._finite)
