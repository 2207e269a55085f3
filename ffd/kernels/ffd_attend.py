"""FFD's attention to the kept tiles and to the tail.

The tiles of all kv heads are shared out evenly, whatever each head kept: a program may take the end of one
head's and the beginning of the next's. Kept scores are the thumbnail's, with the same operand as the scan's,
plus the residual's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    LOG2_E,
    follow_previous_launch,
    online_softmax_by_column,
    prefetch_to_l2,
    store_partial,
)
from ffd.kernels.ffd_append import stored_residual
from ffd.kernels.ffd_scratch import FFDScratch
from ffd.kernels.launch import (
    ATTEND_PROGRAMS,
    ATTEND_TILE,
    ATTEND_WARPS,
    compute_dtype,
    fit_tile,
    hardware,
    padded,
)
from ffd.kernels.unpack import (
    CONVERTED_UNIT,
    E4M3,
    EXACT,
    INT8,
    RESIDUAL_KINDS,
    RESIDUAL_STEP,
    SUBNORMAL_UNIT,
    code_plane,
    e4m3_to_half,
    half_product,
    int8_to_half,
    widen_codes,
)

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


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
def tiles_before(ends, row_head, RP: tl.constexpr):
    """End of the tiles of all heads before ``row_head``, and of its own; ``ends`` int32 [RP] cumulative."""
    o_r = tl.arange(0, RP)
    begin = tl.sum(tl.where(o_r == row_head - 1, ends, 0), 0)
    return begin, tl.sum(tl.where(o_r == row_head, ends, 0), 0)


@triton.jit(do_not_specialize=["num_blocks", "list_size"])
def _ffd_attend_kernel(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, v_ptr, tail_ptr, lengths_ptr,
    zero_point_ptr, list_ptr, tiles_ptr, kept_ptr, max_ptr, sum_ptr, acc_ptr,
    scale_log2, num_blocks, list_size,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, TAIL_TILE: tl.constexpr, BUFFERS: tl.constexpr,
    WORKERS: tl.constexpr, ROW_HEADS: tl.constexpr, RP: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
    PER_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ROW_HEADS + WORKERS,): a program for each head's tail, then those that share out all heads' tiles.

    Worker w takes the w-th of equal runs of the tiles of all heads, one head after the other: its part of head r
    is partial ``w + r``, which no other worker or head has.
    """
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    worker = tl.program_id(0) - ROW_HEADS
    if worker >= 0:
        follow_previous_launch(PDL)
        o_r = tl.arange(0, RP)
        ends = tl.cumsum(tl.load(tiles_ptr + o_r, mask=o_r < ROW_HEADS, other=0), 0)
        total = tl.max(ends, 0)
        share = tl.maximum(tl.cdiv(total, WORKERS), 1)
        start = worker * share
        stop = tl.minimum(start + share, total)
        while start < stop:
            row_head = tl.sum((ends <= start).to(tl.int32), 0).to(tl.int64)
            begin, end = tiles_before(ends, row_head, RP)
            until = tl.minimum(stop, end)
            p_q = q_ptr + row_head * G * D
            m_q = (o_g < G)[:, None] & m_d[None, :]
            b_q = tl.load(p_q + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(COMPUTE)  # [GM, DP]
            # 4**(1 - plane), see SUBNORMAL_UNIT
            q0 = query_rows(p_q, 0, scale_log2 * 4.0, G, D, GM, DQP)
            q1 = query_rows(p_q, 1, scale_log2, G, D, GM, DQP)
            q2 = query_rows(p_q, 2, scale_log2 * 0.25, G, D, GM, DQP)
            q3 = query_rows(p_q, 3, scale_log2 * 0.0625, G, D, GM, DQP)
            p_list = list_ptr + row_head * list_size
            p_v = v_ptr + row_head * num_blocks * BLOCK * D
            row_max = tl.full([GM], float("-inf"), tl.float32)
            sums = tl.zeros([GM, TILE], tl.float32)
            acc = tl.zeros([GM, DP], tl.float32)
            # The tile's address is itself loaded: Triton spends two stages on each buffer of such a chain.
            for i in tl.range(start - begin, until - begin, num_stages=2 * BUFFERS + 1):
                token = tl.load(p_list + i).to(tl.int64) * TILE
                slot = row_head * num_blocks * BLOCK + token
                block = row_head * num_blocks + token // BLOCK
                scores = tl.zeros([GM, TILE], tl.float32)
                if RESIDUAL != EXACT:
                    scores += quantised_scores(
                        q0, q1, q2, q3, codes_ptr + slot * (D // 4), half_step_ptr + block * D,
                        residual_ptr + slot * D, zero_point_ptr + block * G, G, D, GM, DQP, TILE, RESIDUAL, PTX,
                        SUBNORMAL,
                    )  # fmt: skip
                if RESIDUAL >= E4M3:
                    scores += whole_scores(b_q, residual_ptr + slot * D, scale_log2, D, DP, TILE, RESIDUAL, COMPUTE)
                if PER_HEAD:
                    p_kept = kept_ptr + slot // SUB * G + o_g
                    passes = tl.load(p_kept, mask=o_g < G, other=0) > 0
                    scores = tl.where(passes[:, None], scores, float("-inf"))
                # [TILE, DP]
                p_tile = p_v + token * D + tl.arange(0, TILE)[:, None] * D + o_d[None, :]
                b_v = tl.load(p_tile, mask=m_d[None, :], other=0.0)
                row_max, sums, acc = online_softmax_by_column(row_max, sums, acc, scores, b_v.to(COMPUTE))
            slot_of_part = worker + row_head
            store_partial(max_ptr, sum_ptr, acc_ptr, slot_of_part, row_max, tl.sum(sums, 1), acc, G, D, GM, DP)
            start = until
    else:
        row_head = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths_ptr + row_head // HKV)
        quantised = tl.maximum(length - 1, 0) // BLOCK * BLOCK
        p_k = tail_ptr + row_head * BLOCK * D
        p_v = v_ptr + row_head * num_blocks * BLOCK * D
        if PDL:
            prefetch_to_l2(p_k, BLOCK * D)
            prefetch_to_l2(p_v + quantised.to(tl.int64) * D, BLOCK * D)
        follow_previous_launch(PDL)
        p_q = q_ptr + row_head * G * D + o_g[:, None] * D + o_d[None, :]
        b_q = tl.load(p_q, mask=(o_g < G)[:, None] & m_d[None, :], other=0.0).to(COMPUTE)
        row_max = tl.full([GM], float("-inf"), tl.float32)
        acc = tl.zeros([GM, DP], tl.float32)
        tail_sums = tl.zeros([GM, TAIL_TILE], tl.float32)
        for tile_start in range(quantised, length, TAIL_TILE):
            token = tile_start + tl.arange(0, TAIL_TILE)
            m_t = token < length
            p_tail = p_k + (token - quantised)[None, :] * D + o_d[:, None]
            b_k = tl.load(p_tail, mask=m_t[None, :] & m_d[:, None], other=0.0)
            scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
            scores = tl.where(m_t[None, :], scores, float("-inf"))
            p_tile = p_v + token.to(tl.int64)[:, None] * D + o_d[None, :]
            b_v = tl.load(p_tile, mask=m_t[:, None] & m_d[None, :], other=0.0)
            row_max, tail_sums, acc = online_softmax_by_column(row_max, tail_sums, acc, scores, b_v.to(COMPUTE))
        tail_part = WORKERS + ROW_HEADS + row_head
        store_partial(max_ptr, sum_ptr, acc_ptr, tail_part, row_max, tl.sum(tail_sums, 1), acc, G, D, GM, DP)


def ffd_attend(layer: FFDLayer, q: Tensor, scale: float, scratch: FFDScratch, kept: Tensor | None) -> None:
    """Launch attention on what `ffd_keep` listed, and on the tails; fills ``scratch.partials``.

    ``kept`` as `ffd_keep` wrote it, for ``select_per=head``.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    group, d, row_heads = g.group_size, g.head_dim, g.batch_size * g.num_kv_heads
    padded_d = padded(d, 16)
    tail_bytes = 2 * padded_d * layer.values.element_size()
    tail_tile, _ = fit_tile(min(ATTEND_TILE, m.block_size), tail_bytes, gpu.shared_memory // ATTEND_PROGRAMS, 1)
    partials = scratch.partials
    _ffd_attend_kernel[(row_heads + scratch.workers,)](
        q, layer.codes, layer.half_step, stored_residual(layer), layer.values, layer.tail, layer.lengths,
        scratch.zero_point, scratch.kept_list, scratch.tiles, scratch.tiles if kept is None else kept,
        partials.row_max, partials.row_sum, partials.acc, scale * LOG2_E.value, layer.half_step.shape[2],
        scratch.kept_list.shape[1],
        HKV=g.num_kv_heads, G=group, D=d, GM=padded(group, 16), DP=padded_d, DQP=padded(d // 4, 16),
        BLOCK=m.block_size, SUB=m.test_size, TILE=scratch.tile, TAIL_TILE=tail_tile, BUFFERS=scratch.buffers,
        WORKERS=scratch.workers, ROW_HEADS=row_heads, RP=padded(row_heads, 1),
        RESIDUAL=RESIDUAL_KINDS[m.residual], COMPUTE=compute_dtype(g.dtype), PTX=gpu.ptx, SUBNORMAL=gpu.subnormals,
        PER_HEAD=m.select_per == "head", PDL=gpu.dependent_launch, num_warps=ATTEND_WARPS, **gpu.launch_options,
    )  # fmt: skip
