"""Scores of kept tiles with query heads as rows: the scan's, with the same operand, plus the residual's.

A tile's weights are multiplied with its values next, so that heads are the short side already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.unpack import (
    CONVERTED_UNIT,
    E4M3,
    EXACT,
    INT8,
    RESIDUAL_STEP,
    SUBNORMAL_UNIT,
    code_plane,
    e4m3_to_half,
    half_product,
    int8_to_half,
    widen_codes,
)


@triton.jit
def query_rows(q_ptr, plane: tl.constexpr, gain, G, D: tl.constexpr, GM: tl.constexpr, DQP: tl.constexpr):
    """One quarter of the query's channels times ``gain``, heads as rows, fp16 [GM, DQP]."""
    o_g = tl.arange(0, GM)
    o_c = tl.arange(0, DQP)
    p_q = q_ptr + o_g[:, None] * D + plane * (D // 4) + o_c[None, :]
    b_q = tl.load(p_q, mask=(o_g < G)[:, None] & (o_c < D // 4)[None, :], other=0.0)
    return (b_q.to(tl.float32) * gain).to(tl.float16)


@triton.jit
def row_operand(q_plane, half_step_ptr, plane: tl.constexpr, D: tl.constexpr, DQP: tl.constexpr, PTX: tl.constexpr):
    """``q * half_step`` of one quarter of the channels, fp16 [GM, DQP]."""
    o_c = tl.arange(0, DQP)
    half_step = tl.load(half_step_ptr + plane * (D // 4) + o_c, mask=o_c < D // 4, other=0.0)
    return half_product(q_plane, tl.broadcast_to(half_step[None, :], q_plane.shape), PTX)


@triton.jit
def residual_plane(residual_ptr, plane: tl.constexpr, D: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr):
    """Stored residual of one quarter of the channels, [DQP, TILE]."""
    o_c = tl.arange(0, DQP)
    p_r = residual_ptr + plane * (D // 4) + tl.arange(0, TILE)[None, :] * D + o_c[:, None]
    return tl.load(p_r, mask=(o_c < D // 4)[:, None], other=0)


@triton.jit
def quantised_scores(
    q0, q1, q2, q3, codes_ptr, half_step_ptr, residual_ptr, zero_point_ptr, G,
    D: tl.constexpr, GM: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr,
    PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """The scan's scores of a kept tile, heads as rows, plus its int8 residual's: fp32 [GM, TILE]."""
    o_g = tl.arange(0, GM)
    o_c = tl.arange(0, DQP)
    o_t = tl.arange(0, TILE)
    b_packed = tl.load(codes_ptr + o_t[None, :] * (D // 4) + o_c[:, None], mask=(o_c < D // 4)[:, None], other=0)
    wide = widen_codes(b_packed, PTX)
    a0 = row_operand(q0, half_step_ptr, 0, D, DQP, PTX)
    a1 = row_operand(q1, half_step_ptr, 1, D, DQP, PTX)
    a2 = row_operand(q2, half_step_ptr, 2, D, DQP, PTX)
    a3 = row_operand(q3, half_step_ptr, 3, D, DQP, PTX)
    acc = tl.dot(a0, code_plane(wide, 0, PTX, SUBNORMAL))
    acc = tl.dot(a1, code_plane(wide, 1, PTX, SUBNORMAL), acc)
    acc = tl.dot(a2, code_plane(wide, 2, PTX, SUBNORMAL), acc)
    acc = tl.dot(a3, code_plane(wide, 3, PTX, SUBNORMAL), acc)
    zero_point = tl.load(zero_point_ptr + o_g, mask=o_g < G, other=0.0)
    scores = acc * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT) - zero_point[:, None]
    if RESIDUAL == INT8:
        fine = tl.dot(a0, int8_to_half(residual_plane(residual_ptr, 0, D, DQP, TILE), 0, PTX))
        fine = tl.dot(a1, int8_to_half(residual_plane(residual_ptr, 1, D, DQP, TILE), 1, PTX), fine)
        fine = tl.dot(a2, int8_to_half(residual_plane(residual_ptr, 2, D, DQP, TILE), 2, PTX), fine)
        fine = tl.dot(a3, int8_to_half(residual_plane(residual_ptr, 3, D, DQP, TILE), 3, PTX), fine)
        scores += fine * RESIDUAL_STEP
    return scores


@triton.jit
def whole_scores(
    b_q, stored_ptr, scale_log2,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Query times unscaled e4m3 residuals or exact keys, fp32 [GM, TILE]."""
    o_d = tl.arange(0, DP)
    b_k = tl.load(stored_ptr + tl.arange(0, TILE)[None, :] * D + o_d[:, None], mask=(o_d < D)[:, None], other=0)
    if RESIDUAL == E4M3:
        return tl.dot(b_q, e4m3_to_half(b_k).to(COMPUTE), input_precision="ieee") * (scale_log2 * 256.0)
    else:
        return tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2


@triton.jit
def load_queries(
    q_ptr, scale_log2, G, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, COMPUTE: tl.constexpr
):
    """A kv head's queries [GM, DP], and their quarters in log2 units, fp16 [GM, DQP] four times."""
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(q_ptr + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(COMPUTE)
    # 4**(1 - plane), see SUBNORMAL_UNIT
    q0 = query_rows(q_ptr, 0, scale_log2 * 4.0, G, D, GM, DQP)
    q1 = query_rows(q_ptr, 1, scale_log2, G, D, GM, DQP)
    q2 = query_rows(q_ptr, 2, scale_log2 * 0.25, G, D, GM, DQP)
    q3 = query_rows(q_ptr, 3, scale_log2 * 0.0625, G, D, GM, DQP)
    return b_q, q0, q1, q2, q3


@triton.jit
def kept_scores(
    queries, codes_ptr, half_step_ptr, residual_ptr, zero_point_ptr, scale_log2, G,
    D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Scores of a kept tile as attention takes them, fp32 [GM, TILE]; ``queries`` from `load_queries`."""
    b_q, q0, q1, q2, q3 = queries
    scores = tl.zeros([GM, TILE], tl.float32)
    if RESIDUAL != EXACT:
        scores += quantised_scores(
            q0, q1, q2, q3, codes_ptr, half_step_ptr, residual_ptr, zero_point_ptr, G, D, GM, DQP, TILE, RESIDUAL,
            PTX, SUBNORMAL,
        )  # fmt: skip
    if RESIDUAL >= E4M3:
        scores += whole_scores(b_q, residual_ptr, scale_log2, D, DP, TILE, RESIDUAL, COMPUTE)
    return scores
