"""KIVI's decode: split-K attention over low-bit keys and values, dequantised in registers, and its reduction.

A kv head's codes are read once for its whole group of query heads. The newest ``residual_length + 1``
tokens, whose values are in full precision, belong to one more program per kv head, so that the loop over
quantised tokens has no cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import ESTIMATED, LOG2_E, count_selective_step, follow_previous_launch, online_softmax
from ffd.kernels.launch import Partials, compute_dtype, hardware, padded, scratch_of
from ffd.kernels.split_reduce import split_reduce

if TYPE_CHECKING:
    from ffd.methods.kivi import KiviLayer

# Channels of a tile are in the order of the packed planes: entry c of [DP] is channel
# c // RBP * row_bytes + c % RBP, where RBP is a plane's padded bytes. Without padding that is c itself.


@triton.jit
def restored_keys(
    codes_ptr, minimum_ptr, step_ptr, start, count, o_d, m_d,
    D: tl.constexpr, BITS: tl.constexpr, RBP: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Dequantise keys ``start ..`` below ``count``, fp32 [DP, TILE]; ``start`` is a multiple of GROUP."""
    planes: tl.constexpr = 8 // BITS
    row_bytes: tl.constexpr = D // planes
    o_b = tl.arange(0, RBP)
    o_t = start + tl.arange(0, TILE)
    o_group = start // GROUP + tl.arange(0, TILE // GROUP)
    # [RBP, TILE] bytes, then one code per plane: [planes, RBP, TILE]
    m_b = (o_b < row_bytes)[:, None] & (o_t < count)[None, :]
    packed = tl.load(codes_ptr + o_t[None, :] * row_bytes + o_b[:, None], mask=m_b, other=0).to(tl.int32)
    shift = tl.arange(0, planes) * BITS
    codes = ((packed[None, :, :] >> shift[:, None, None]) & (2**BITS - 1)).to(tl.float32)
    # [DP, groups], the same for GROUP tokens
    o_bounds = o_group[None, :] * D + o_d[:, None]
    m_bounds = (o_group * GROUP < count)[None, :] & m_d[:, None]
    minimum = tl.load(minimum_ptr + o_bounds, mask=m_bounds, other=0.0).to(tl.float32)
    step = tl.load(step_ptr + o_bounds, mask=m_bounds, other=0.0).to(tl.float32)
    grouped = tl.reshape(codes, [planes * RBP, TILE // GROUP, GROUP])
    return tl.reshape(minimum[:, :, None] + grouped * step[:, :, None], [planes * RBP, TILE])


@triton.jit
def restored_values(
    codes_ptr, minimum_ptr, step_ptr, start, count, o_d, m_d,
    D: tl.constexpr, BITS: tl.constexpr, RBP: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Dequantise values ``start ..`` below ``count``, fp32 [TILE, DP]."""
    planes: tl.constexpr = 8 // BITS
    row_bytes: tl.constexpr = D // planes
    groups: tl.constexpr = D // GROUP
    o_b = tl.arange(0, RBP)
    o_t = start + tl.arange(0, TILE)
    m_t = o_t < count
    # [TILE, RBP] bytes, then one code per plane: [TILE, planes, RBP]
    m_b = m_t[:, None] & (o_b < row_bytes)[None, :]
    packed = tl.load(codes_ptr + o_t[:, None] * row_bytes + o_b[None, :], mask=m_b, other=0).to(tl.int32)
    shift = tl.arange(0, planes) * BITS
    codes = ((packed[:, None, :] >> shift[None, :, None]) & (2**BITS - 1)).to(tl.float32)
    if planes * RBP == D:
        # [TILE, groups], the same for GROUP channels
        o_bounds = o_t[:, None] * groups + tl.arange(0, groups)[None, :]
        minimum = tl.load(minimum_ptr + o_bounds, mask=m_t[:, None], other=0.0).to(tl.float32)
        step = tl.load(step_ptr + o_bounds, mask=m_t[:, None], other=0.0).to(tl.float32)
        grouped = tl.reshape(codes, [TILE, groups, GROUP])
        return tl.reshape(minimum[:, :, None] + grouped * step[:, :, None], [TILE, D])
    else:
        o_bounds = o_t[:, None] * groups + (o_d // GROUP)[None, :]
        m_bounds = m_t[:, None] & m_d[None, :]
        minimum = tl.load(minimum_ptr + o_bounds, mask=m_bounds, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + o_bounds, mask=m_bounds, other=0.0).to(tl.float32)
        return minimum + tl.reshape(codes, [TILE, planes * RBP]) * step


@triton.jit
def store_partial(max_ptr, sum_ptr, acc_ptr, split, row_max, row_sum, acc, o_d, m_d, G, D, GM: tl.constexpr):
    """Write one split's partial, the accumulator's channels put back in their order."""
    o_g = tl.arange(0, GM)
    tl.store(max_ptr + split * G + o_g, row_max, mask=o_g < G)
    tl.store(sum_ptr + split * G + o_g, row_sum, mask=o_g < G)
    met = (row_max > float("-inf")) & (o_g < G)
    tl.store(acc_ptr + (split * G + o_g)[:, None] * D + o_d[None, :], acc, mask=met[:, None] & m_d[None, :])


@triton.jit
def _kivi_decode_kernel(
    q_ptr, lengths_ptr, key_codes_ptr, key_minimum_ptr, key_step_ptr, key_buffer_ptr,
    value_codes_ptr, value_minimum_ptr, value_step_ptr, value_window_ptr,
    max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, key_tokens, key_slots, value_tokens, value_slots,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr,
    RBP: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1 + splits, B * Hkv): program 0 takes the tokens with full-precision values."""
    follow_previous_launch(PDL)
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    quantized_keys = (length - 1) // RESIDUAL * RESIDUAL
    quantized_values = tl.maximum(length - 1 - RESIDUAL, 0)
    planes: tl.constexpr = 8 // BITS
    tile_d: tl.constexpr = planes * RBP
    o_g = tl.arange(0, GM)
    o_c = tl.arange(0, tile_d)
    o_d = o_c // RBP * (D // planes) + o_c % RBP
    m_d = o_c % RBP < D // planes
    o_t = tl.arange(0, TILE)
    m_q = (o_g < G)[:, None] & m_d[None, :]
    b_q = tl.load(q_ptr + (row_head * G + o_g)[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(COMPUTE)
    p_key_codes = key_codes_ptr + row_head * key_tokens * (D // planes)
    p_key_minimum = key_minimum_ptr + row_head * (key_tokens // GROUP) * D
    p_key_step = key_step_ptr + row_head * (key_tokens // GROUP) * D
    p_value_codes = value_codes_ptr + row_head * value_tokens * (D // planes)
    p_value_minimum = value_minimum_ptr + row_head * value_tokens * (D // GROUP)
    p_value_step = value_step_ptr + row_head * value_tokens * (D // GROUP)

    row_max = tl.full([GM], float("-inf"), tl.float32)
    row_sum = tl.zeros([GM], tl.float32)
    acc = tl.zeros([GM, tile_d], tl.float32)
    if split == 0:
        # From the tile's beginning, so that groups of keys are whole.
        for start in tl.range(quantized_values // TILE * TILE, length, TILE, num_stages=1):
            token = start + o_t
            m_t = (token >= quantized_values) & (token < length)
            in_buffer = token >= quantized_keys
            b_k = restored_keys(
                p_key_codes, p_key_minimum, p_key_step, start, quantized_keys, o_d, m_d, D, BITS, RBP, GROUP, TILE
            )
            p_k = key_buffer_ptr + (row_head * key_slots + token % RESIDUAL)[None, :] * D + o_d[:, None]
            exact = tl.load(p_k, mask=(m_t & in_buffer)[None, :] & m_d[:, None], other=0.0).to(tl.float32)
            b_k = tl.where(in_buffer[None, :], exact, b_k)
            scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
            scores = tl.where(m_t[None, :], scores, float("-inf"))
            p_v = value_window_ptr + (row_head * value_slots + token % (RESIDUAL + 1))[:, None] * D + o_d[None, :]
            b_v = tl.load(p_v, mask=m_t[:, None] & m_d[None, :], other=0.0)
            row_max, row_sum, acc = online_softmax(row_max, row_sum, acc, scores, b_v.to(COMPUTE))
    else:
        per_split = tl.cdiv(tl.cdiv(quantized_values, TILE), num_splits - 1) * TILE
        first = (split - 1) * per_split
        last = tl.minimum(first + per_split, quantized_values)
        for start in tl.range(first, last, TILE, num_stages=STAGES):
            b_k = restored_keys(
                p_key_codes, p_key_minimum, p_key_step, start, quantized_keys, o_d, m_d, D, BITS, RBP, GROUP, TILE
            )
            scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
            scores = tl.where((start + o_t < last)[None, :], scores, float("-inf"))
            b_v = restored_values(
                p_value_codes, p_value_minimum, p_value_step, start, last, o_d, m_d, D, BITS, RBP, GROUP, TILE
            )
            row_max, row_sum, acc = online_softmax(row_max, row_sum, acc, scores, b_v.to(COMPUTE))

    p_max = max_ptr + row_head * num_splits * G
    p_sum = sum_ptr + row_head * num_splits * G
    p_acc = acc_ptr + row_head * num_splits * G * D
    store_partial(p_max, p_sum, p_acc, split, row_max, row_sum, acc, o_d, m_d, G, D, GM)
    if split == 0:
        everything = tl.full([GP], 0, tl.int32) + length
        p_counters, active = count_selective_step(
            ledger_ptr, active_ptr, row, row_head, length, quantized_keys, length, everything, 0, G, GP
        )
        tl.store(p_counters + ESTIMATED, tl.load(p_counters + ESTIMATED) + quantized_values * active)


def kivi_decode(layer: KiviLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to everything: q [B, Hq, d] -> [B, Hq, d] in its dtype; adds one step to the ledger."""
    q = q.contiguous()
    g, m = layer.geometry, layer.method
    b, hkv, group, d = g.batch_size, g.num_kv_heads, g.group_size, g.head_dim
    tile = max(64, m.group_size)
    planes = 8 // m.bits
    most = triton.cdiv(layer.value_codes.shape[2], tile)
    gpu = hardware(q.device)
    splits = 1 + max(1, min(triton.cdiv(4 * gpu.multiprocessors, b * hkv), most))
    partials = scratch_of(layer.ledger, lambda: Partials.allocate(b * hkv, splits, group, d, q.device))
    out = torch.empty_like(q)
    _kivi_decode_kernel[(splits, b * hkv)](
        q, layer.lengths, layer.key_codes, layer.key_minimum, layer.key_step, layer.key_buffer,
        layer.value_codes, layer.value_minimum, layer.value_step, layer.value_window,
        partials.row_max, partials.row_sum, partials.acc, layer.ledger.counters, layer.ledger.active,
        scale * LOG2_E.value,
        layer.key_codes.shape[2], layer.key_buffer.shape[2], layer.value_codes.shape[2], layer.value_window.shape[2],
        HKV=hkv, G=group, D=d, GM=padded(group, 16), GP=padded(group, 1),
        RBP=padded(d // planes, 16 // planes), TILE=tile, BITS=m.bits, GROUP=m.group_size, RESIDUAL=m.residual_length,
        STAGES=2, COMPUTE=compute_dtype(q.dtype), PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    split_reduce(partials, out)
    return out
