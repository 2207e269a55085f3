"""A transformers `Cache` whose layers are method storages.

With ``ffd/attention.py`` one of the two files that know transformers. The trick that makes model
forks unnecessary: models hand on whatever ``Cache.update`` returns, unchanged, to the registered
attention function. During prefill that is the 16-bit keys and values, and attention is exact; while
decoding it is a small :class:`DecodeHandle`, which only our attention function understands, so that
any other attention implementation fails loudly instead of attending to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from ffd.executor import resolve_executor
from ffd.methods import Executor, LayerGeometry, Method, MethodLayer, RowState
from ffd.methods.dense import Dense, DenseLayer

Probe = Callable[["DecodeHandle", Tensor, float, Tensor], None]
"""Called after a decode step of one layer with its handle, query [B, Hq, d], scale and output [B, Hq, d]."""


class UnsupportedModelError(ValueError):
    """The model or the call uses a feature that sparse decoding does not implement; the message names it."""


@dataclass(frozen=True, eq=False)
class DecodeHandle:
    """Stands for keys and values on their way to the attention function while decoding."""

    layer_idx: int
    storage: MethodLayer
    shadow: DenseLayer | None
    """Exact 16-bit keys and values of the same tokens, kept only where fidelity is probed."""
    cache: SparseCache

    def attend(self, q: Tensor, scale: float) -> Tensor:
        """Decode one step: q [B, Hq, d] -> [B, Hq, d]."""
        out = self.storage.decode(q, scale)
        if self.cache.probe is not None:
            self.cache.probe(self, q, scale, out)
        if self.cache.follow_dense and self.shadow is not None:
            return self.shadow.decode(q, scale)
        return out


class MethodCacheLayer(CacheLayerMixin):
    """One full-attention layer: stages prompt chunks in 16 bits, then decodes from the method's storage."""

    is_sliding = False

    def __init__(self, handle: DecodeHandle) -> None:
        super().__init__()
        self.handle = handle
        self.is_initialized = True
        self._staged: tuple[Tensor, Tensor] | None = None

    @property
    def _stores(self) -> list[MethodLayer]:
        return [s for s in (self.handle.storage, self.handle.shadow) if s is not None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store new keys and values [B, Hkv, T, d]; see the module's docstring for what comes back."""
        cache = self.handle.cache
        if cache.decoding:
            for store in self._stores:
                store.append(key_states, value_states)
            return self.handle, self.handle
        seen = cache.seen_tokens
        total, new = cache.prompt_tokens, key_states.shape[2]
        if new == total:
            self._seal(key_states, value_states)
            return key_states, value_states
        if self._staged is None:
            shape = (*key_states.shape[:2], total, key_states.shape[3])
            self._staged = (key_states.new_empty(shape), value_states.new_empty(shape))
        keys, values = self._staged
        keys[:, :, seen : seen + new] = key_states
        values[:, :, seen : seen + new] = value_states
        if seen + new == total:
            self._seal(keys, values)
            self._staged = None
        return keys[:, :, : seen + new], values[:, :, : seen + new]

    def _seal(self, keys: Tensor, values: Tensor) -> None:
        lengths = self.handle.cache.prompt_lengths
        keys, values = (left_align(x, lengths) for x in (keys, values))
        for store in self._stores:
            store.prefill(keys, values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing to do: storage is allocated with the cache."""

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.handle.cache.seen_tokens + new, 0

    def get_seq_length(self, *args: Any) -> int:
        """Tokens seen, left padding included, as the host counts them."""
        return self.handle.cache.seen_tokens

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.handle.storage.geometry.capacity

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget staged chunks; the storage is overwritten by the next prefill."""
        self._staged = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: beam search needs rows to change places."""
        raise UnsupportedModelError("num_beams: beam search is not supported with sparse decoding; use num_beams=1")

    def crop(self, *args: Any) -> None:
        """Refuse: quantised blocks cannot be taken back."""
        raise UnsupportedModelError("crop: tokens cannot be removed from a sparse cache (assisted decoding does that)")


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
        If the model has layers of a kind that is neither full nor sliding-window attention.
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
        text = config.get_text_config(decoder=True)
        device = torch.device(device)
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
        self.sliding_context = 0
        """Tokens that sliding-window layers attended to while decoding, summed over rows, layers and steps."""
        geometry = LayerGeometry(
            batch_size=batch_size,
            num_query_heads=text.num_attention_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )
        layers: list[CacheLayerMixin] = []
        handles: list[DecodeHandle] = []
        for layer_idx, kind in enumerate(attention_kinds(text)):
            if kind == "sliding_attention":
                layers.append(DynamicSlidingWindowLayer(sliding_window=text.sliding_window))
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
        self._window = getattr(text, "sliding_window", None) or 0
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
        for layer in self.layers:
            layer.reset()
        for handle in self.handles:
            handle.storage.ledger.reset()
        self.prompt_lengths = tuple(prompt_lengths)
        self.prompt_tokens = width
        self.seen_tokens = 0
        self.sliding_context = 0
        self.rows.lengths.copy_(torch.tensor(self.prompt_lengths, dtype=torch.int32))
        self.rows.active.fill_(1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store one layer's new keys and values [B, Hkv, T, d]; see `MethodCacheLayer.update`."""
        new = key_states.shape[2]
        if self.prompt_tokens == 0:
            raise RuntimeError("SparseCache.begin(prompt_lengths) must announce the prompt before the first forward")
        if self.decoding and new != 1:
            raise UnsupportedModelError(f"query length {new} on a cache that has begun to decode: expected 1")
        if not self.decoding and self.seen_tokens + new > self.prompt_tokens:
            raise ValueError(f"prompt of {self.seen_tokens + new} tokens: begin() announced {self.prompt_tokens}")
        if self.decoding and layer_idx == 0:  # whatever its kind: kernels of later layers count on lengths being old
            if self.seen_tokens - self.prompt_tokens + max(self.prompt_lengths) >= self.capacity:
                raise ValueError(f"capacity={self.capacity}: the cache is full")
            self.rows.lengths.add_(1)
        if self.decoding and self.layers[layer_idx].is_sliding:
            self.sliding_context += len(self.prompt_lengths) * min(self.seen_tokens + 1, self._window)
        returned = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last_layer:
            self.seen_tokens += new
        return returned

    def note_replayed_step(self) -> None:
        """Count a decode step that a captured graph ran: replay executes no Python, so the host's count is ours."""
        self.seen_tokens += 1


def attention_kinds(text_config: Any) -> list[str]:
    """Kind of each layer: ``full_attention`` or ``sliding_attention``; other kinds raise `UnsupportedModelError`."""
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("num_kv_shared_layers: layers that share keys and values are not supported")
    kinds = getattr(text_config, "layer_types", None)
    if kinds is None:
        window = getattr(text_config, "sliding_window", None)
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = [kind] * text_config.num_hidden_layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer type {kind}: expected full_attention or sliding_attention")
    return list(kinds)


def left_align(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Drop each row's left padding.

    Parameters
    ----------
    x
        [B, Hkv, T, d], right-aligned rows.
    lengths
        Real tokens of each row.

    Returns
    -------
    Tensor
        [B, Hkv, T, d] with row ``b`` in slots ``0 .. lengths[b]``; ``x`` itself where nothing is padded.
    """
    width = x.shape[2]
    if all(length == width for length in lengths):
        return x
    aligned = torch.zeros_like(x)
    for row, length in enumerate(lengths):
        aligned[row, :, :length] = x[row, :, width - length :]
    return aligned
