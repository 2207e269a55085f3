"""KIVI's append: write one token per row, and quantise what leaves the residuals, by lengths on the device.

The key buffer is quantised as a whole when the next token would overwrite it, after the step that
filled it has used it; the value that shares the new token's slot of the window is quantised before it
is overwritten. Both are predicated on the length, so that one captured launch serves every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.kivi_codes import extended
from ffd.kernels.launch import hardware, padded

if TYPE_CHECKING:
    from ffd.methods.kivi import KiviLayer


@triton.jit
def bounds_of(low, high, LEVELS: tl.constexpr):
    """Minimum and step as stored, fp16."""
    minimum = low.to(tl.float16)
    step = ((high - minimum.to(tl.float32)) * (1.0 / LEVELS)).to(tl.float16)
    return minimum, step


@triton.jit
def codes_of(x, minimum, step, LEVELS: tl.constexpr):
    """Codes of values against bounds that broadcast to them, uint8."""
    wide = step.to(tl.float32)
    safe = tl.where(wide > 0.0, wide, 1.0)
    x, safe = tl.broadcast(x - minimum.to(tl.float32), safe)
    code = tl.floor(tl.math.div_rn(x, safe) + 0.5)
    return tl.minimum(tl.maximum(code, 0.0), LEVELS).to(tl.int32).to(tl.uint8)


@triton.jit
def bound_by_channel(bounds, field: tl.constexpr, o_w, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """Of a tuple of [1] by groups, the one of each channel of a field, [WP]."""
    first: tl.constexpr = field * WORDS // GROUP
    last: tl.constexpr = ((field + 1) * WORDS - 1) // GROUP
    chosen = tl.broadcast_to(bounds[first], o_w.shape)
    for group in tl.static_range(first + 1, last + 1):
        chosen = tl.where((field * WORDS + o_w) // GROUP >= group, bounds[group], chosen)
    return chosen


@triton.jit
def _kivi_append_kernel(
    k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head, lengths_ptr,
    key_codes_ptr, key_minimum_ptr, key_step_ptr, key_buffer_ptr,
    value_codes_ptr, value_minimum_ptr, value_step_ptr, value_window_ptr,
    key_tokens, key_slots, value_tokens, value_slots,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,). Buffers as in `ffd.methods.kivi.KiviLayer`; k, v one token [B, Hkv, 1, D]."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // HKV
    head = row_head % HKV
    length = tl.load(lengths_ptr + row)
    position = length - 1
    fields: tl.constexpr = 16 // BITS
    levels: tl.constexpr = 2**BITS - 1
    words: tl.constexpr = D // fields
    o_d = tl.arange(0, DP)
    o_w = tl.arange(0, WP)
    o_t = tl.arange(0, GROUP)
    m_d = o_d < D
    m_w = o_w < words
    p_buffer = key_buffer_ptr + row_head * key_slots * D
    p_window = value_window_ptr + row_head * value_slots * D

    if (position > 0) & (position % RESIDUAL == 0):
        first = position - RESIDUAL
        for start in range(0, RESIDUAL, GROUP):
            o_bounds = (row_head * key_tokens + first + start) // GROUP * D
            packed = tl.zeros([GROUP, WP], tl.int32)
            for field in tl.static_range(fields):
                channel = field * words + o_w
                # [GROUP, WP]
                p_x = p_buffer + (start + o_t)[:, None] * D + channel[None, :]
                x = tl.load(p_x, mask=m_w[None, :], other=0.0).to(tl.float32)
                minimum, step = bounds_of(tl.min(x, 0), tl.max(x, 0), levels)
                tl.store(key_minimum_ptr + o_bounds + channel, minimum, mask=m_w)
                tl.store(key_step_ptr + o_bounds + channel, step, mask=m_w)
                packed = packed | (codes_of(x, minimum[None, :], step[None, :], levels).to(tl.int32) << (BITS * field))
            o_codes = (row_head * key_tokens + first + start + o_t)[:, None] * words + o_w[None, :]
            tl.store(key_codes_ptr + o_codes, packed.to(tl.int16), mask=m_w[None, :])

    # All loads of the usual step stand before its first reduction: a load behind that would wait for it.
    slot = tl.maximum(position, 0) % (RESIDUAL + 1)
    leaving = position - RESIDUAL - 1
    p_leaving = p_window + slot * D
    b_k = tl.load(k_ptr + row * k_stride_row + head * k_stride_head + o_d, mask=m_d)
    b_v = tl.load(v_ptr + row * v_stride_row + head * v_stride_head + o_d, mask=m_d)
    by_group = ()
    for group in tl.static_range(GROUPS):
        by_group = extended(by_group, tl.load(p_leaving + group * GROUP + o_t[None, :]))
    by_field = ()
    for field in tl.static_range(fields):
        by_field = extended(by_field, tl.load(p_leaving + field * words + o_w, mask=m_w, other=0.0))
    if leaving >= 0:
        minima = ()
        steps = ()
        o_bounds = row_head * GROUPS * value_tokens + leaving + tl.arange(0, 1)
        for group in tl.static_range(GROUPS):
            x = by_group[group].to(tl.float32)
            minimum, step = bounds_of(tl.min(x, 1), tl.max(x, 1), levels)
            tl.store(value_minimum_ptr + o_bounds + group * value_tokens, minimum)
            tl.store(value_step_ptr + o_bounds + group * value_tokens, step)
            minima = extended(minima, minimum)
            steps = extended(steps, step)
        packed = tl.zeros([WP], tl.int32)
        for field in tl.static_range(fields):
            minimum = bound_by_channel(minima, field, o_w, words, GROUP)
            step = bound_by_channel(steps, field, o_w, words, GROUP)
            code = codes_of(by_field[field].to(tl.float32), minimum, step, levels)
            packed = packed | (code.to(tl.int32) << (BITS * field))
        tl.store(value_codes_ptr + (row_head * value_tokens + leaving) * words + o_w, packed.to(tl.int16), mask=m_w)

    tl.debug_barrier()  # the new token overwrites slots that were just read
    if length > 0:
        tl.store(p_buffer + (position % RESIDUAL) * D + o_d, b_k, mask=m_d)
        tl.store(p_window + slot * D + o_d, b_v, mask=m_d)


def kivi_append(layer: KiviLayer, keys: Tensor, values: Tensor) -> None:
    """Store one token per row, [B, Hkv, 1, d], in slot ``lengths - 1``; the lengths already count it."""
    b, hkv, _, d = keys.shape
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    values = values if values.stride(-1) == 1 else values.contiguous()
    m, gpu = layer.method, hardware(keys.device)
    _kivi_append_kernel[(b * hkv,)](
        keys, values, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), layer.lengths,
        layer.key_codes, layer.key_minimum, layer.key_step, layer.key_buffer,
        layer.value_codes, layer.value_minimum, layer.value_step, layer.value_window,
        layer.key_codes.shape[2], layer.key_buffer.shape[2], layer.value_codes.shape[2], layer.value_window.shape[2],
        HKV=hkv, D=d, DP=padded(d, 16), WP=padded(d * m.bits // 16, 1), BITS=m.bits,
        GROUP=m.group_size, GROUPS=d // m.group_size, RESIDUAL=m.residual_length,
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
