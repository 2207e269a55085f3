"""Append to what selectors keep beside the keys: Quest's page bounds and Twilight's 4-bit copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.kivi_append import bounds_of, codes_of
from ffd.kernels.launch import hardware, padded


@triton.jit
def _bounds_append_kernel(
    k_ptr, k_stride_row, k_stride_head, largest_ptr, smallest_ptr, lengths_ptr, num_pages,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,). largest, smallest [B, Hkv, num_pages, D]."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row_head // HKV)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    if length > 0:
        position = length - 1
        k = tl.load(k_ptr + row_head // HKV * k_stride_row + row_head % HKV * k_stride_head + o_d, mask=m_d)
        o_page = (row_head * num_pages + position // PAGE) * D + o_d
        if position % PAGE == 0:
            tl.store(largest_ptr + o_page, k, mask=m_d)
            tl.store(smallest_ptr + o_page, k, mask=m_d)
        else:
            largest = tl.load(largest_ptr + o_page, mask=m_d)
            smallest = tl.load(smallest_ptr + o_page, mask=m_d)
            tl.store(largest_ptr + o_page, tl.where(k > largest, k, largest), mask=m_d)
            tl.store(smallest_ptr + o_page, tl.where(k < smallest, k, smallest), mask=m_d)


def bounds_append(keys: Tensor, largest: Tensor, smallest: Tensor, lengths: Tensor, page_size: int) -> None:
    """Widen the bounds of each row's last page by its new token.

    Parameters
    ----------
    keys
        [B, Hkv, 1, d].
    largest, smallest
        [B, Hkv, pages, d], written in place.
    lengths
        int32 [B] on the device, the token already counted.
    page_size
        Tokens per page.
    """
    b, hkv, _, d = keys.shape
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    gpu = hardware(keys.device)
    _bounds_append_kernel[(b * hkv,)](
        keys, keys.stride(0), keys.stride(1), largest, smallest, lengths, largest.shape[2],
        HKV=hkv, D=d, DP=padded(d, 1), PAGE=page_size, PDL=gpu.dependent_launch, num_warps=1, **gpu.launch_options,
    )  # fmt: skip


@triton.jit
def _four_bit_append_kernel(
    k_ptr, k_stride_row, k_stride_head, codes_ptr, minimum_ptr, step_ptr, lengths_ptr, capacity,
    HKV: tl.constexpr, D: tl.constexpr, DHP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,). codes [B, Hkv, capacity, D / 2]; minimum, step [B, Hkv, capacity]."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row_head // HKV)
    o_c = tl.arange(0, DHP)
    m_c = o_c < D // 2
    if length > 0:
        p_k = k_ptr + row_head // HKV * k_stride_row + row_head % HKV * k_stride_head + o_c
        low = tl.load(p_k, mask=m_c, other=0.0).to(tl.float32)
        high = tl.load(p_k + D // 2, mask=m_c, other=0.0).to(tl.float32)
        least = tl.min(tl.where(m_c, tl.minimum(low, high), float("inf")), 0)
        most = tl.max(tl.where(m_c, tl.maximum(low, high), float("-inf")), 0)
        minimum, step = bounds_of(tl.full([1], 0.0, tl.float32) + least, tl.full([1], 0.0, tl.float32) + most, 15)
        codes = codes_of(low, minimum, step, 15) | (codes_of(high, minimum, step, 15) << 4)
        slot = row_head * capacity + length - 1
        tl.store(codes_ptr + slot * (D // 2) + o_c, codes, mask=m_c)
        o_one = slot + tl.arange(0, 1)
        tl.store(minimum_ptr + o_one, minimum)
        tl.store(step_ptr + o_one, step)


def four_bit_append(keys: Tensor, codes: Tensor, minimum: Tensor, step: Tensor, lengths: Tensor) -> None:
    """Quantise each row's new token, asymmetric over its channels.

    Parameters
    ----------
    keys
        [B, Hkv, 1, d].
    codes, minimum, step
        uint8 [B, Hkv, capacity, d / 2] and float16 [B, Hkv, capacity, 1], written in place.
    lengths
        int32 [B] on the device, the token already counted.
    """
    b, hkv, _, d = keys.shape
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    gpu = hardware(keys.device)
    _four_bit_append_kernel[(b * hkv,)](
        keys, keys.stride(0), keys.stride(1), codes, minimum, step, lengths, codes.shape[2],
        HKV=hkv, D=d, DHP=padded(d // 2, 1), PDL=gpu.dependent_launch, num_warps=1, **gpu.launch_options,
    )  # fmt: skip
