"""A transformers `Cache` whose layers are method storages.

With ``ffd/cache_layer.py``, ``ffd/paired_cache.py`` and ``ffd/attention.py`` all that knows transformers' caches and
attention functions. The trick that makes model forks unnecessary: models hand on whatever ``Cache.update`` returns,
unchanged, to the registered attention function. During prefill that is the 16-bit keys and values, and attention is
exact; while decoding it is a small :class:`DecodeHandle`, which only our attention function understands, so that any
other attention implementation fails loudly instead of attending to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from ffd.cache_layer import DecodeHandle, MethodCacheLayer, Probe
from ffd.executor import resolve_executor
from ffd.methods import Executor, LayerGeometry, Method, RowState
from ffd.methods.dense import Dense
from ffd.support import UnsupportedModelError, refused_model, require_supported

__all__ = ["DecodeHandle", "Probe", "SparseCache", "UnsupportedModelError", "cache_keyword"]


class SparseCache(Cache):
    """Cache of one batch of rows for a model and a method.

    Parameters
    ----------
    config
        The model's configuration (its text part is used).
    method
        Decode method of the full-attention layers; its first ``dense_layers`` of them use dense.
    batch_size, capacity
        Rows, and tokens per row (prompt and generated).
    dtype, device
        Of the model's keys and values.
    executor
        ``auto`` (fused on a GPU, else reference), ``fused`` or ``reference``.
    shadow
        Keep exact keys and values beside the method's storage, for fidelity probes.

    Raises
    ------
    UnsupportedModelError
        If the model is not one that `ffd.support.require_supported` accepts, or the method has no layer to decode.
    """

    def __init__(
        self,
        config: Any,
        method: Method,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        executor: str = "auto",
        shadow: bool = False,
    ) -> None:
        attention = require_supported(config)
        device = torch.device(device)
        if "full_attention" not in attention.kinds and method.dense_layers < len(attention.kinds):
            raise refused_model(
                config.model_type, f"all layers are sliding-window attention, none is left to {method.name}"
            )
        self.model_type = str(config.model_type)
        self.method = method
        self.capacity = capacity
        self.executor: Executor = resolve_executor(executor, device)
        self.rows = RowState.allocate(batch_size, device)
        self.probe: Probe | None = None
        self.follow_dense = False
        """Hand on the shadow's output while the method only runs beside it: every method then meets the same
        queries and keys, those of dense attention. Needs ``shadow``; set before the first prompt."""
        self.prompt_tokens = 0
        self.prompt_lengths: tuple[int, ...] = ()
        self.seen_tokens = 0
        self._sliding_context = torch.zeros((), dtype=torch.int64, device=device)
        geometry = LayerGeometry(
            batch_size=batch_size,
            num_query_heads=attention.num_query_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )
        layers: list[CacheLayerMixin] = []
        handles: list[DecodeHandle] = []
        for layer_idx, kind in enumerate(attention.kinds):
            if kind == "sliding_attention":
                layers.append(DynamicSlidingWindowLayer(sliding_window=attention.window))
                continue
            chosen = Dense() if layer_idx < method.dense_layers else method
            own = replace(geometry, layer=layer_idx)
            handle = DecodeHandle(
                layer_idx=layer_idx,
                storage=chosen.new_layer(own, self.rows, self.executor),
                shadow=Dense().new_layer(own, self.rows, self.executor) if shadow else None,
                cache=self,
            )
            handles.append(handle)
            layers.append(MethodCacheLayer(handle))
        self.handles = tuple(handles)
        self._last_layer = len(layers) - 1
        self._window = attention.window
        super().__init__(layers=layers)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is complete, so that updates are decode steps."""
        return 0 < self.prompt_tokens <= self.seen_tokens

    @property
    def sliding_layers(self) -> int:
        """Sliding-window layers, which stay dense."""
        return len(self.layers) - len(self.handles)

    @property
    def sliding_context(self) -> int:
        """Tokens that sliding-window layers attended to while decoding, summed over active rows, layers and steps;
        synchronises with the device.
        """
        return int(self._sliding_context)

    @property
    def method_layers(self) -> tuple[DecodeHandle, ...]:
        """The layers that decode by the method; the rest are dense by configuration."""
        return tuple(h for h in self.handles if h.layer_idx >= self.method.dense_layers)

    def begin(self, prompt_lengths: Sequence[int], prompt_tokens: int | None = None) -> None:
        """Forget everything and announce the next prompts.

        Parameters
        ----------
        prompt_lengths
            Tokens of each row's prompt, left padding not counted.
        prompt_tokens
            Width of the padded prompt batch; the longest row if not given.

        Raises
        ------
        ValueError
            If a prompt is empty or the batch does not fit the capacity or the rows.
        """
        width = max(prompt_lengths) if prompt_tokens is None else prompt_tokens
        rows = self.rows.lengths.shape[0]
        if len(prompt_lengths) != rows:
            raise ValueError(f"batch size {len(prompt_lengths)}: this cache holds {rows} rows")
        if min(prompt_lengths) < 1 or max(prompt_lengths) > width:
            raise ValueError(f"prompt lengths {list(prompt_lengths)}: expected 1 to {width} tokens a row")
        if max(prompt_lengths) > self.capacity:
            raise ValueError(f"prompt of {max(prompt_lengths)} tokens exceeds the cache's capacity of {self.capacity}")
        for layer_idx, layer in enumerate(self.layers):
            if layer.is_sliding:
                # Made anew: transformers 5.17's reset leaves a window of zeroed keys for the next prompt to attend to.
                self.layers[layer_idx] = DynamicSlidingWindowLayer(sliding_window=self._window)
            else:
                layer.reset()
        for handle in self.handles:
            handle.storage.ledger.reset()
        self.prompt_lengths = tuple(prompt_lengths)
        self.prompt_tokens = width
        self.seen_tokens = 0
        self._sliding_context.zero_()
        self.rows.begin(self.prompt_lengths)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store one layer's new keys and values [B, Hkv, T, d]; see `MethodCacheLayer.update`."""
        new = key_states.shape[2]
        if self.prompt_tokens == 0:
            raise RuntimeError("SparseCache.begin(prompt_lengths) must announce the prompt before the first forward")
        if self.decoding and new != 1:
            raise UnsupportedModelError(
                f"query length {new} on a cache that has begun to decode: expected 1, and each layer of a model once a "
                f"step (model type {self.model_type})"
            )
        if not self.decoding and self.seen_tokens + new > self.prompt_tokens:
            raise ValueError(f"prompt of {self.seen_tokens + new} tokens: begin() announced {self.prompt_tokens}")
        if self.decoding and layer_idx == 0:  # whatever its kind: kernels of later layers count on lengths being old
            if self.rows.longest >= self.capacity:
                raise ValueError(f"capacity={self.capacity}: the cache is full")
            self.rows.add_token()
            if self.sliding_layers:
                windows = self.rows.lengths.clamp(max=self._window) * self.rows.active
                self._sliding_context.add_(self.sliding_layers * windows.sum())
        returned = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last_layer:
            self.seen_tokens += new
        return returned

    def note_replayed_step(self) -> None:
        """Count a decode step that a captured graph ran: replay executes no Python, so the host's counts are ours."""
        self.seen_tokens += 1
        self.rows.note_token()


def cache_keyword(model: Any) -> str:
    """Name of the forward argument that takes the cache: ``cache`` in new transformers, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
