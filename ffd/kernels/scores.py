"""Scores of every row of a key-like cache, reduced to units: the scan of Quest, the oracles and `component`.

One kernel serves all: Quest's rows are pages, scored by their two bounds; an oracle's rows are tokens, scored
exactly and reduced to the best score (or the mass) of each unit; `component` may score low-bit thumbnails in
their place. Scores are in log2 units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E, follow_previous_launch
from ffd.kernels.launch import compute_dtype, fit_tile, hardware, padded
from ffd.kernels.thumbnails import thumbnail_scores
from ffd.kernels.units import Scores, programs_per_head, reduce_units, store_maxima

if TYPE_CHECKING:
    from ffd.thumbnails import Thumbnails


@triton.jit
def _score_kernel(
    q_ptr, keys_ptr, smallest_ptr, codes_ptr, half_step_ptr, num_rows_ptr, tokens_ptr, units_ptr, maxima_ptr,
    scale_log2, capacity, num_blocks, num_units,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, RBP: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, BOUNDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
    NEAR: tl.constexpr, N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, POOL: tl.constexpr, MASS: tl.constexpr,
    STORE_TOKENS: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs, B * Hkv). keys [B, Hkv, capacity, D]; tokens [B, Hq, capacity]; units [B, R, num_units];
    maxima [B, R, programs]; R is Hkv where POOL, else Hq. With BITS below 16, rows of complete blocks but the
    newest row's are scored by their thumbnails.
    """
    follow_previous_launch(PDL)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    count = tl.load(num_rows_ptr + row_head // HKV)
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    m_g = o_g < G
    m_d = o_d < D
    # [GM, DP]
    b_q = tl.load(q_ptr + (row_head * G + o_g)[:, None] * D + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_q = b_q.to(COMPUTE)
    zero = tl.zeros([GM, DP], COMPUTE)
    positive = tl.where(b_q > zero, b_q, zero)
    negative = tl.where(b_q < zero, b_q, zero)
    quantised = (count - 1) // BLOCK * BLOCK

    top = tl.full([GM], float("-inf"), tl.float32)
    # Programs take tiles in turn: runs of their own, a power of two apart, would all meet in a few memory channels.
    for start in tl.range(program * TILE, count, num_programs * TILE, num_stages=STAGES):
        token = start + o_t
        m_t = token < count
        o_k = (row_head * capacity + start) * D + o_t[None, :] * D + o_d[:, None]
        m_k = m_t[None, :] & m_d[:, None]
        if BITS < 16:
            # A tile lies in one block.
            slot = row_head * num_blocks * BLOCK + start
            scores = thumbnail_scores(
                q_ptr + row_head * G * D, codes_ptr + slot * (D * BITS // 8),
                half_step_ptr + (row_head * num_blocks + start // BLOCK) * D, scale_log2, start < quantised, G,
                D, GM, RBP, TILE, BITS,
            )  # fmt: skip
            exact = scores
            if (start >= quantised) | (NEAR & ((start < N_SINK) | (start + TILE > count - N_LOCAL))):
                b_k = tl.load(keys_ptr + o_k, mask=m_k, other=0.0).to(COMPUTE)
                exact = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
            scores = tl.where(start < quantised, scores, exact)
        else:
            # [DP, T]
            b_k = tl.load(keys_ptr + o_k, mask=m_k, other=0.0).to(COMPUTE)
            if BOUNDS:
                b_s = tl.load(smallest_ptr + o_k, mask=m_k, other=0.0).to(COMPUTE)
                scores = tl.dot(positive, b_k, input_precision="ieee")
                scores = tl.dot(negative, b_s, scores, input_precision="ieee") * scale_log2
            else:
                scores = tl.dot(b_q, b_k, input_precision="ieee") * scale_log2
            exact = scores
        seen = m_t[None, :] & m_g[:, None]
        if NEAR:
            # A near token is tested by its exact score too: it may be where the threshold comes from.
            near = ((token < N_SINK) | (token >= count - N_LOCAL))[None, :]
            exact = tl.where(seen & near, exact, float("-inf"))
            scores = tl.maximum(scores, exact)
        scores = tl.where(seen, scores, float("-inf"))
        if STORE_TOKENS:
            tl.store(tokens_ptr + (row_head * G + o_g)[:, None] * capacity + token[None, :], scores, mask=seen)
        largest = reduce_units(
            scores, units_ptr, row_head, start, count, num_units, G, GM, TILE, UNIT, POOL, MASS,
            UNIT > 1 or not STORE_TOKENS,
        )  # fmt: skip
        if NEAR:
            largest = tl.max(exact, 1)
        top = tl.maximum(top, largest)
    store_maxima(maxima_ptr, top, row_head, program, num_programs, G, GM, POOL)


def score_rows(
    q: Tensor,
    keys: Tensor,
    num_rows: Tensor,
    scale: float,
    *,
    smallest: Tensor | None = None,
    thumbnails: Thumbnails | None = None,
    near: tuple[int, int] | None = None,
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
    thumbnails
        Score complete blocks by these; the tail's keys are scored exactly.
    near
        First and last tokens over whose exact scores `Scores.maxima` is taken, instead of over all units; they
        score the larger of thumbnail and key.
    unit
        Rows per unit, a power of two, at most a block of thumbnails.
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
    most = 128 if thumbnails is None else min(128, thumbnails.block_size)
    tile, stages = fit_tile(most, row_bytes, gpu.shared_memory // 2, 3)
    if unit > tile:
        tile, stages = unit, 1
    num_units = triton.cdiv(capacity, unit)
    rows = hkv if pool else num_query_heads
    programs = programs_per_head(b * hkv, capacity, tile, gpu.multiprocessors)

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    tokens = empty(b, num_query_heads, capacity) if store_tokens else empty(0)
    shares_tokens = store_tokens and unit == 1 and not pool
    units = tokens if shares_tokens else empty(b, rows, num_units)
    maxima = empty(b, rows, programs)
    bits = 16 if thumbnails is None else thumbnails.bits
    codes, half_step = (keys, keys) if thumbnails is None else (thumbnails.codes, thumbnails.half_step)
    _score_kernel[(programs, b * hkv)](
        q, keys, keys if smallest is None else smallest, codes, half_step, num_rows, tokens, units, maxima,
        scale * LOG2_E.value, capacity, half_step.shape[2], num_units,
        HKV=hkv, G=group, D=d, GM=padded(group, 16), DP=padded(d, 16), RBP=padded(d * bits // 8, 16), TILE=tile,
        UNIT=unit, BOUNDS=smallest is not None, BITS=bits, BLOCK=1 if thumbnails is None else thumbnails.block_size,
        NEAR=near is not None, N_SINK=near[0] if near else 0, N_LOCAL=near[1] if near else 0,
        POOL=pool, MASS=mass, STORE_TOKENS=store_tokens, STAGES=stages,
        COMPUTE=compute_dtype(q.dtype), PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    return Scores(tokens, units, maxima)
