"""Dense append: write one key and one value per row at the position the device holds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded


@triton.jit
def _kv_append_kernel(
    k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head, keys_ptr, values_ptr, lengths_ptr,
    stride_row, stride_head, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,)."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // HKV
    head = row_head % HKV
    length = tl.load(lengths_ptr + row)
    o_d = tl.arange(0, DP)
    m_d = o_d < tl.where(length > 0, D, 0)  # an empty row has no slot to write
    o_slot = row * stride_row + head * stride_head + (length - 1).to(tl.int64) * D + o_d
    b_k = tl.load(k_ptr + row * k_stride_row + head * k_stride_head + o_d, mask=m_d)
    b_v = tl.load(v_ptr + row * v_stride_row + head * v_stride_head + o_d, mask=m_d)
    tl.store(keys_ptr + o_slot, b_k, mask=m_d)
    tl.store(values_ptr + o_slot, b_v, mask=m_d)


def kv_append(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor) -> None:
    """Store one token per row in slot ``lengths - 1``.

    Parameters
    ----------
    keys, values
        [B, Hkv, 1, d] with contiguous channels.
    key_cache, value_cache
        [B, Hkv, capacity, d], equal strides, written in place.
    lengths
        int32 [B] on the device, the token already counted.
    """
    b, hkv, _, d = keys.shape
    gpu = hardware(keys.device)
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    _kv_append_kernel[(b * hkv,)](
        keys, values, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        key_cache, value_cache, lengths, key_cache.stride(0), key_cache.stride(1),
        HKV=hkv, D=d, DP=padded(d, 1), PDL=gpu.dependent_launch, num_warps=1, **gpu.launch_options,
    )  # fmt: skip
