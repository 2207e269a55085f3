"""Scores with tokens as rows and query heads as columns: the scan's operands, and the near tokens' finer scores.

What the pseudo-maximum is taken over is scored here: quantised tokens with their residuals (unless the
official rule is asked for), tokens of the tail exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.unpack import (
    CONVERTED_UNIT,
    E4M3,
    EXACT,
    INT8,
    NO_RESIDUAL,
    RESIDUAL_STEP,
    SUBNORMAL_UNIT,
    code_plane,
    e4m3_to_half,
    half_product,
    int8_to_half,
    widen_codes,
)


@triton.jit
def load_query_planes(q_ptr, scale_log2, G, D: tl.constexpr, GP: tl.constexpr, DQP: tl.constexpr):
    """Quarters of the scaled query as columns, four fp16 [DQP, GP], plane p times 4**(1 - p)."""
    o_g = tl.arange(0, GP)
    o_c = tl.arange(0, DQP)
    p_q = q_ptr + o_g[None, :] * D + o_c[:, None]
    m_q = (o_g < G)[None, :] & (o_c < D // 4)[:, None]
    q0 = tl.load(p_q, mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q1 = tl.load(p_q + D // 4, mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q2 = tl.load(p_q + 2 * (D // 4), mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q3 = tl.load(p_q + 3 * (D // 4), mask=m_q, other=0.0).to(tl.float32) * scale_log2
    return (q0 * 4.0).to(tl.float16), q1.to(tl.float16), (q2 * 0.25).to(tl.float16), (q3 * 0.0625).to(tl.float16)


@triton.jit
def load_half_steps(half_step_ptr, D: tl.constexpr, GP: tl.constexpr, DQP: tl.constexpr):
    """One block's half steps for every column, four fp16 [DQP, GP], loaded as `load_query_planes` lays planes out."""
    o_c = tl.arange(0, DQP)[:, None] + tl.zeros([1, GP], tl.int32)
    p_h = half_step_ptr + o_c
    m_c = o_c < D // 4
    h0 = tl.load(p_h, mask=m_c, other=0.0)
    h1 = tl.load(p_h + D // 4, mask=m_c, other=0.0)
    h2 = tl.load(p_h + 2 * (D // 4), mask=m_c, other=0.0)
    h3 = tl.load(p_h + 3 * (D // 4), mask=m_c, other=0.0)
    return h0, h1, h2, h3


@triton.jit
def block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX: tl.constexpr):
    """Query times one block's half steps, four fp16 [DQP, GP], and the zero point ``3 * sum(q * h)`` [GP].

    The sum over channels is left to the tensor cores too: a row of constants that undo the planes' gains.
    """
    a0 = half_product(q0, h0, PTX)
    a1 = half_product(q1, h1, PTX)
    a2 = half_product(q2, h2, PTX)
    a3 = half_product(q3, h3, PTX)
    threes = tl.dot(tl.full([16, q0.shape[0]], 0.75, tl.float16), a0)
    threes = tl.dot(tl.full([16, q0.shape[0]], 3.0, tl.float16), a1, threes)
    threes = tl.dot(tl.full([16, q0.shape[0]], 12.0, tl.float16), a2, threes)
    threes = tl.dot(tl.full([16, q0.shape[0]], 48.0, tl.float16), a3, threes)
    return a0, a1, a2, a3, tl.max(threes, 0)  # all sixteen rows are the same


@triton.jit
def load_codes(codes_ptr, D: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr):
    """TILE consecutive tokens' bytes of four codes, [TILE, DQP]."""
    o_c = tl.arange(0, DQP)
    p_codes = codes_ptr + tl.arange(0, TILE)[:, None] * (D // 4) + o_c[None, :]
    return tl.load(p_codes, mask=(o_c < D // 4)[None, :], other=0)


@triton.jit
def code_products(b_packed, a0, a1, a2, a3, PTX: tl.constexpr, SUBNORMAL: tl.constexpr):
    """``sum(u * q * h)`` of the tokens of `load_codes`, fp32 [TILE, GP], in units of `code_unit`."""
    wide = widen_codes(b_packed, PTX)
    acc = tl.dot(code_plane(wide, 0, PTX, SUBNORMAL), a0)
    acc = tl.dot(code_plane(wide, 1, PTX, SUBNORMAL), a1, acc)
    acc = tl.dot(code_plane(wide, 2, PTX, SUBNORMAL), a2, acc)
    return tl.dot(code_plane(wide, 3, PTX, SUBNORMAL), a3, acc)


@triton.jit
def load_residual(
    residual_ptr, D: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr, RESIDUAL: tl.constexpr
):
    """What is stored beside the codes of TILE tokens: int8 in quarters [TILE, DQP], else whole [TILE, DP]."""
    o_t = tl.arange(0, TILE)[:, None]
    if RESIDUAL == INT8:
        o_c = tl.arange(0, DQP)[None, :]
        p_r = residual_ptr + o_t * D + o_c
        r0 = tl.load(p_r, mask=o_c < D // 4, other=0)
        r1 = tl.load(p_r + D // 4, mask=o_c < D // 4, other=0)
        r2 = tl.load(p_r + 2 * (D // 4), mask=o_c < D // 4, other=0)
        r3 = tl.load(p_r + 3 * (D // 4), mask=o_c < D // 4, other=0)
        return r0, r1, r2, r3
    else:
        o_d = tl.arange(0, DP)[None, :]
        return (tl.load(residual_ptr + o_t * D + o_d, mask=o_d < D, other=0),)


@triton.jit
def refined_scores(
    q_ptr, residual, a0, a1, a2, a3, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """What the residuals of `load_residual` add to their tokens' scores, or exact keys' scores, fp32 [TILE, GP]."""
    if RESIDUAL == INT8:
        fine = tl.dot(int8_to_half(residual[0], 0, PTX), a0)
        fine = tl.dot(int8_to_half(residual[1], 1, PTX), a1, fine)
        fine = tl.dot(int8_to_half(residual[2], 2, PTX), a2, fine)
        fine = tl.dot(int8_to_half(residual[3], 3, PTX), a3, fine)
        return fine * RESIDUAL_STEP
    else:
        o_g = tl.arange(0, GP)
        o_d = tl.arange(0, DP)
        p_q = q_ptr + o_g[None, :] * D + o_d[:, None]
        b_q = tl.load(p_q, mask=(o_g < G)[None, :] & (o_d < D)[:, None], other=0.0).to(COMPUTE)
        if RESIDUAL == E4M3:
            return tl.dot(e4m3_to_half(residual[0]).to(COMPUTE), b_q, input_precision="ieee") * (scale_log2 * 256.0)
        else:
            return tl.dot(residual[0].to(COMPUTE), b_q, input_precision="ieee") * scale_log2


@triton.jit
def near_scores(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Scores [TILE, GP] of quantised tokens as the pseudo-maximum takes them: refined, unless RESIDUAL says none."""
    # All loads first: an operand's change of layout between them would cost a memory latency.
    q0, q1, q2, q3 = load_query_planes(q_ptr, scale_log2, G, D, GP, DQP)
    h0, h1, h2, h3 = load_half_steps(half_step_ptr, D, GP, DQP)
    if RESIDUAL != EXACT:
        b_packed = load_codes(codes_ptr, D, DQP, TILE)
    if RESIDUAL != NO_RESIDUAL:
        residual = load_residual(residual_ptr, D, DP, DQP, TILE, RESIDUAL)
    a0, a1, a2, a3, zero_point = block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX)
    scores = tl.zeros([TILE, GP], tl.float32)
    if RESIDUAL != EXACT:
        products = code_products(b_packed, a0, a1, a2, a3, PTX, SUBNORMAL)
        scores += products * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT) - zero_point[None, :]
    if RESIDUAL != NO_RESIDUAL:
        scores += refined_scores(q_ptr, residual, a0, a1, a2, a3, scale_log2, G, D, GP, DP, RESIDUAL, COMPUTE, PTX)
    return scores


@triton.jit
def tail_scores(
    q_ptr, tail_ptr, new_key, num_tokens, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
    APPEND: tl.constexpr,
):  # fmt: skip
    """Exact scores [TILE, GP] of up to TILE of the tail's ``num_tokens`` tokens from ``tail_ptr`` on.

    With APPEND the last of them is ``new_key`` [DP], which this launch only now stores.
    """
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    m_d = o_d < D
    # queries [DP, GP], keys [TILE, DP]
    b_q = tl.load(q_ptr + o_g[None, :] * D + o_d[:, None], mask=(o_g < G)[None, :] & m_d[:, None], other=0.0)
    p_k = tail_ptr + o_t[:, None] * D + o_d[None, :]
    stored = num_tokens - 1 if APPEND else num_tokens
    b_k = tl.load(p_k, mask=(o_t < stored)[:, None] & m_d[None, :], other=0.0)
    if APPEND:
        b_k = tl.where((o_t == stored)[:, None], new_key[None, :], b_k)
    return tl.dot(b_k.to(COMPUTE), b_q.to(COMPUTE), input_precision="ieee") * scale_log2
