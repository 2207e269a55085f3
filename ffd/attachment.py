"""Sparse decoding behind plain ``model.generate``."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from ffd.attention import register
from ffd.cache import SparseCache, UnsupportedModelError, cache_keyword
from ffd.executor import resolve_executor
from ffd.methods import Method
from ffd.report import LedgerReport, read_ledger

_HOOK = "_prepare_cache_for_generation"


class Attachment:
    """A model whose ``generate`` decodes by a method, until `detach` (or the end of a ``with`` block).

    ``generate`` itself is left alone. What is replaced is the one step in it that makes the cache, by
    when transformers has resolved lengths, masks and repeats.
    """

    def __init__(self, model: Any, method: Method, executor: str = "auto") -> None:
        if not isinstance(method, Method):
            raise TypeError(f"method={method!r}: expected a method such as FFD(delta=7)")
        if not hasattr(model, "config") or not hasattr(model, "generate"):
            raise TypeError(f"model={type(model).__name__}: expected a transformers model")
        if _HOOK in vars(model):
            raise UnsupportedModelError("this model has a sparse method attached already: detach it first")
        resolve_executor(executor, model.device)
        self.model = model
        self.method = method
        self.executor = executor
        self.cache: SparseCache | None = None
        self._previous = model.config._attn_implementation
        model.set_attn_implementation(register())
        setattr(model, _HOOK, self._prepare_cache)

    def _prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: int
    ) -> None:
        """Stand in for ``GenerationMixin._prepare_cache_for_generation``: put a fresh sparse cache into the call."""
        keyword = cache_keyword(self.model)
        _refuse_unsupported(generation_config, model_kwargs, generation_mode, keyword)
        # transformers drops a mask of ones and keeps the positions that it had derived from it.
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(model_kwargs["position_ids"]).bool() if mask is None else mask.bool()
        if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
            raise UnsupportedModelError("attention_mask: prompts must be padded on the left, without holes")
        self.cache = SparseCache(
            self.model.config,
            self.method,
            batch_size=mask.shape[0],
            capacity=max(sizes[-1] + 1, mask.shape[1] + 1),  # sizes: (batch_size, max_cache_length)
            dtype=self.model.dtype,
            device=self.model.device,
            executor=self.executor,
        )
        self.cache.begin(mask.sum(dim=1).tolist(), mask.shape[1])
        model_kwargs[keyword] = self.cache

    def report(self) -> LedgerReport:
        """What the last ``generate`` read, from the device counters; raises RuntimeError before the first.

        In a batch, rows that ended early count until the last one ends: ``generate`` goes on feeding them
        padding. `ffd.Engine` stops counting them.
        """
        if self.cache is None:
            raise RuntimeError("report: generate has not been called yet")
        # A generate that raised during prefill has decoded nothing.
        steps = max(0, self.cache.seen_tokens - self.cache.prompt_tokens) * len(self.cache.prompt_lengths)
        return read_ledger(self.cache, steps)

    def detach(self) -> None:
        """Give the model back as it was; a second time does nothing."""
        if _HOOK in vars(self.model):
            delattr(self.model, _HOOK)
            self.model.set_attn_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def _refuse_unsupported(config: Any, model_kwargs: dict[str, Any], mode: Any, keyword: str) -> None:
    """Raise `UnsupportedModelError` for what a sparse cache cannot serve, by name."""
    refused = {
        keyword: model_kwargs.get(keyword) is not None,
        "inputs_embeds": model_kwargs.get("inputs_embeds") is not None,
        "cache_implementation": config.cache_implementation is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "assistant_model": "assisted" in str(mode).lower(),
        f"num_beams={config.num_beams}": (config.num_beams or 1) > 1,
        "use_cache=False": config.use_cache is False,
    }
    for name, is_set in refused.items():
        if is_set:
            raise UnsupportedModelError(f"{name}: not supported while a sparse method is attached")


def attach(model: Any, method: Method, executor: str = "auto") -> Attachment:
    """Make ``model.generate`` decode by ``method``.

    Parameters
    ----------
    model
        A transformers causal LM in eval mode.
    method
        For example ``FFD(delta=7)``.
    executor
        ``auto`` (fused kernels on a GPU, else the fp32 reference), ``fused`` or ``reference``.

    Returns
    -------
    Attachment
        Holds the ledger of the last call and detaches the method; usable in a ``with`` statement.
    """
    return Attachment(model, method, executor)
