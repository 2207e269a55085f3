"""One full-attention layer of a `SparseCache`, and what it hands to the attention function while decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ffd.handle import Handle
from ffd.methods import MethodLayer
from ffd.methods.dense import DenseLayer
from ffd.streams import at_once
from ffd.support import UnsupportedModelError, refused_model

if TYPE_CHECKING:
    from ffd.cache import SparseCache

Probe = Callable[["DecodeHandle", Tensor, float, Tensor], None]
"""Called after a decode step of one layer with its handle, query [B, Hq, d], scale and output [B, Hq, d]."""


@dataclass(frozen=True, eq=False)
class DecodeHandle(Handle):
    """One layer while decoding: its storage and the token of the step."""

    layer_idx: int
    storage: MethodLayer
    shadow: DenseLayer | None
    """Exact 16-bit keys and values of the same tokens, kept only where fidelity is probed."""
    cache: SparseCache
    token: tuple[Tensor, Tensor] | None = None
    """Keys and values [B, Hkv, 1, d] of this step: stored when the query is there too, so that a method can do
    both at once."""

    @property
    def model_type(self) -> str:
        """Of the cache's model."""
        return self.cache.model_type

    def attend(self, q: Tensor, scale: float) -> Tensor:
        """Decode one step: q [B, Hq, d] -> [B, Hq, d]."""
        expected = self.storage.geometry.num_query_heads
        if q.shape[1] != expected:
            why = f"layer {self.layer_idx} has {q.shape[1]} query heads, its configuration {expected}"
            raise refused_model(self.model_type, why)
        if self.token is None:
            raise RuntimeError("attend: this handle was not handed out by an update of the cache")
        token, storage, shadow = self.token, self.storage, self.shadow
        if shadow is not None and self.cache.follow_dense:
            out, handed_on = at_once(
                lambda: storage.step(*token, q, scale), lambda: shadow.step(*token, q, scale), q.device, "shadow"
            )
        else:
            out = handed_on = storage.step(*token, q, scale)
            if shadow is not None:
                shadow.append(*token)
        if self.cache.probe is not None:
            self.cache.probe(self, q, scale, out)
        return handed_on


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
        """Take new keys and values [B, Hkv, T, d]; see `ffd.cache` for what comes back."""
        cache = self.handle.cache
        geometry = self.handle.storage.geometry
        for x in (key_states, value_states):
            if (x.shape[1], x.shape[3]) != (geometry.num_kv_heads, geometry.head_dim):
                raise refused_model(
                    cache.model_type,
                    f"layer {self.handle.layer_idx} has {x.shape[1]} kv heads of size {x.shape[3]}, "
                    f"its configuration {geometry.num_kv_heads} of {geometry.head_dim}",
                )
        if cache.decoding:
            step = replace(self.handle, token=(key_states, value_states))
            return step, step
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
