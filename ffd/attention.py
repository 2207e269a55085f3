"""The attention and mask functions registered with transformers.

The name under which they are registered must not contain "flash", "sdpa" or "flex_attention":
transformers recognises those implementations by substring.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ffd.handle import Handle
from ffd.support import UnsupportedModelError

IMPLEMENTATION = "ffd_sparse_decode"
"""Value of ``attn_implementation`` that selects this module."""

# Features that change scores or outputs and that the kernels do not implement; models pass None to switch them off.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def sparse_decode_attention(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' models.

    Parameters
    ----------
    module
        The attention module (read for its group size and, without ``scaling``, its head dimension).
    query
        [B, Hq, T, d], post-RoPE.
    key, value
        [B, Hkv, N, d] during prefill and for sliding-window layers, which SDPA attends densely; a
        `ffd.handle.Handle` while decoding.
    attention_mask
        4D mask of the prefill; not used while decoding, where rows carry their own lengths.

    Returns
    -------
    out : Tensor
        [B, T, Hq, d].
    weights : None

    Raises
    ------
    UnsupportedModelError
        Where the model uses soft-capping, attention sinks, a position bias or dropout.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{name}: attention with {name} is not supported by sparse decoding")
    if not isinstance(key, Handle):
        if attention_mask is None and 1 < query.shape[2] < key.shape[2]:
            return _attend_chunk(query, key, value, scaling), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if kwargs.get("sliding_window") is not None:
        raise UnsupportedModelError(f"sliding_window={kwargs['sliding_window']}: this layer's cache is not sliding")
    if dropout:
        raise UnsupportedModelError(f"attention dropout={dropout}: sparse decoding is for inference; call model.eval()")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError("output_attentions=True: a fused decode has no attention weights to return")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return key.attend(query[:, :, 0], scale)[:, None], None


def _attend_chunk(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend a later prompt chunk to everything before it and causally to itself, without a mask tensor.

    SDPA's ``is_causal`` aligns the diagonal with the first key; the last key is meant. The bias object
    says so and still reaches the flash kernel, where a mask of chunk x context booleans would not.
    """
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(query.shape[2], key.shape[2]),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def sparse_decode_mask(
    batch_size: int, *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Mask function: SDPA's mask, except where the lengths alone say what is visible.

    That is a bare decode step, and an unpadded prompt chunk of a full-attention layer (`_attend_chunk`).
    A missing registration would make transformers return no mask at all, and left padding and
    causality would vanish without a word.
    """
    if attention_mask is None and kwargs.get("local_size") is None and (q_length == 1 or q_length < kv_length):
        return None
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
    )


def register() -> str:
    """Register both functions with transformers (idempotent); returns the implementation's name."""
    AttentionInterface.register(IMPLEMENTATION, sparse_decode_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sparse_decode_mask)
    return IMPLEMENTATION
