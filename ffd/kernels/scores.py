"""Scores of every row of a key-like cache, reduced to units: the scan of Quest and of the exact oracles.

One kernel serves both: Quest's rows are pages, scored by their two bounds; an oracle's rows are tokens,
scored exactly and reduced to the best score (or the mass) of each unit. Scores are in log2 units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E
from ffd.kernels.launch import compute_dtype, fit_tile, hardware, padded


@triton.jit
def _score_kernel(
    q_ptr, keys_ptr, smallest_ptr, num_rows_ptr, tokens_ptr, units_ptr, maxima_ptr, scale_log2, capacity, num_units,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, BOUNDS: tl.constexpr, POOL: tl.constexpr, MASS: tl.constexpr,
    STORE_TOKENS: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (programs, B * Hkv). keys [B, Hkv, capacity, D]; tokens [B, Hq, capacity]; units [B, R, num_units];
    maxima [B, R, programs]; R is Hkv where POOL, else Hq.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    count = tl.load(num_rows_ptr + row_head // HKV)
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    o_u = tl.arange(0, TILE // UNIT)
    m_g = o_g < G
    m_d = o_d < D
    # [GM, DP]
    b_q = tl.load(q_ptr + (row_head * G + o_g)[:, None] * D + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_q = b_q.to(COMPUTE)
    zero = tl.zeros([GM, DP], COMPUTE)
    positive = tl.where(b_q > zero, b_q, zero)
    negative = tl.where(b_q < zero, b_q, zero)

    per_program = tl.cdiv(tl.cdiv(count, TILE), num_programs) * TILE
    first = program * per_program
    last = tl.minimum(first + per_program, count)
    top = tl.full([GM], float("-inf"), tl.float32)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        m_t = start + o_t < last
        o_k = (row_head * capacity + start) * D + o_t[None, :] * D + o_d[:, None]
        m_k = m_t[None, :] & m_d[:, None]
        # [DP, T]
        b_k = tl.load(keys_ptr + o_k, mask=m_k, other=0.0).to(COMPUTE)
        if BOUNDS:
            b_s = tl.load(smallest_ptr + o_k, mask=m_k, other=0.0).to(COMPUTE)
            scores = tl.dot(positive, b_k, input_precision="ieee")
            scores = tl.dot(negative, b_s, scores, input_precision="ieee") * scale_log2
        else:
            scores = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
        scores = tl.where(m_t[None, :] & m_g[:, None], scores, float("-inf"))
        if STORE_TOKENS:
            p_tokens = tokens_ptr + (row_head * G + o_g)[:, None] * capacity + (start + o_t)[None, :]
            tl.store(p_tokens, scores, mask=m_t[None, :] & m_g[:, None])
        unit = start // UNIT + o_u
        m_u = unit < tl.cdiv(last, UNIT)
        if UNIT == 1:
            reduced = scores
        else:
            parts = tl.reshape(scores, [GM, TILE // UNIT, UNIT])
            reduced = tl.max(parts, 2)
            if MASS:
                anchor = tl.where(reduced == float("-inf"), 0.0, reduced)
                reduced = anchor + tl.log2(tl.sum(tl.exp2(parts - anchor[:, :, None]), 2))
        if POOL:
            pooled = tl.max(reduced, 0)
            tl.store(units_ptr + row_head * num_units + unit, pooled, mask=m_u)
        elif UNIT > 1 or not STORE_TOKENS:
            p_units = units_ptr + (row_head * G + o_g)[:, None] * num_units + unit[None, :]
            tl.store(p_units, reduced, mask=m_u[None, :] & m_g[:, None])
        top = tl.maximum(top, tl.max(reduced, 1))
    if POOL:
        tl.store(maxima_ptr + row_head * num_programs + program, tl.max(top, 0))
    else:
        tl.store(maxima_ptr + (row_head * G + o_g) * num_programs + program, top, mask=m_g)


@dataclass(frozen=True)
class Scores:
    """Scores in log2 units; entries at or beyond a row's count are unwritten."""

    tokens: Tensor
    """float32 [B, Hq, capacity], or an empty tensor where they were not asked for."""
    units: Tensor
    """float32 [B, R, capacity / unit]; R is the number of query heads, or of kv heads where pooled."""
    maxima: Tensor
    """float32 [B, R, programs]: the largest unit score that each program met."""
    num_units: Tensor
    """int32 [B]: units that were scored."""


def score_rows(
    q: Tensor,
    keys: Tensor,
    num_rows: Tensor,
    scale: float,
    *,
    smallest: Tensor | None = None,
    unit: int = 1,
    pool: bool = False,
    mass: bool = False,
    store_tokens: bool = False,
) -> Scores:
    """Score the first rows of a cache.

    Parameters
    ----------
    q
        [B, Hq, d], contiguous.
    keys
        [B, Hkv, capacity, d], contiguous: tokens, or the pages' largest keys.
    num_rows
        int32 [B] on the device: rows to score; none are read where it is 0.
    scale
        Softmax scale.
    smallest
        Shape of ``keys``: the pages' smallest keys; scores are then upper bounds.
    unit
        Rows per unit, a power of two.
    pool
        Largest unit score over the query heads of each kv head.
    mass
        A unit's score is the log of its softmax mass instead of its largest score.
    store_tokens
        Keep the rows' own scores as well.
    """
    b, num_query_heads, d = q.shape
    hkv, capacity = keys.shape[1:3]
    group = num_query_heads // hkv
    gpu = hardware(q.device)
    row_bytes = padded(d, 16) * keys.element_size() * (1 if smallest is None else 2)
    tile, stages = fit_tile(128, row_bytes, gpu.shared_memory // 2, 3)
    if unit > tile:
        tile, stages = unit, 1
    num_units = triton.cdiv(capacity, unit)
    rows = hkv if pool else num_query_heads
    programs = max(1, min(triton.cdiv(4 * gpu.multiprocessors, b * hkv), triton.cdiv(capacity, tile)))

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    tokens = empty(b, num_query_heads, capacity) if store_tokens else empty(0)
    shares_tokens = store_tokens and unit == 1 and not pool
    units = tokens if shares_tokens else empty(b, rows, num_units)
    maxima = empty(b, rows, programs)
    _score_kernel[(programs, b * hkv)](
        q, keys, keys if smallest is None else smallest, num_rows, tokens, units, maxima,
        scale * LOG2_E.value, capacity, num_units,
        HKV=hkv, G=group, D=d, GM=padded(group, 16), DP=padded(d, 16), TILE=tile, UNIT=unit,
        BOUNDS=smallest is not None, POOL=pool, MASS=mass, STORE_TOKENS=store_tokens, STAGES=stages,
        COMPUTE=compute_dtype(q.dtype), num_warps=4,
    )  # fmt: skip
    return Scores(tokens, units, maxima, ((num_rows + unit - 1) // unit).int())
