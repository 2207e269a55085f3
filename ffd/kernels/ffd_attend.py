"""FFD's selection and attention: test the scan's maxima, attend to what is kept and to the tail.

Every program finds its own share of the kept tiles: the maxima are few, and reading them all costs less
than another launch or an atomic counter. Tiles are dealt out in turn, so that work is even whatever was
kept. Kept scores are the thumbnail's, with the same operand as the scan's, plus the residual's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    LOG2_E,
    count_selective_step,
    follow_previous_launch,
    online_softmax_by_column,
    prefetch_to_l2,
    store_partial,
)
from ffd.kernels.ffd_append import stored_residual
from ffd.kernels.ffd_keep import collect_kept, drop_heads, load_near_pieces
from ffd.kernels.ffd_scan import ScanScratch, near_tile, near_tiles
from ffd.kernels.launch import (
    ATTEND_BUFFERS,
    ATTEND_PROGRAMS,
    ATTEND_TILE,
    ATTEND_WARPS,
    compute_dtype,
    fit_tile,
    hardware,
    padded,
    unit_chunk,
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


@triton.jit(do_not_specialize=["num_blocks", "list_size"])
def _ffd_attend_kernel(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, v_ptr, tail_ptr, lengths_ptr, delta_ptr,
    unit_max_ptr, zero_point_ptr, near_max_ptr, list_ptr, kept_ptr,
    max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, num_blocks, list_size,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr,
    DP: tl.constexpr, DQP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr, BUFFERS: tl.constexpr, UNIT_CHUNK: tl.constexpr, FINE: tl.constexpr,
    NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr, N_LOCAL: tl.constexpr, PP: tl.constexpr,
    NEAR_TEST: tl.constexpr, SPLITS: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
    PER_HEAD: tl.constexpr, RETURN_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS + 1, B * Hkv); the first program attends to the tail, program 1 + s to split s."""
    split = tl.program_id(0) - 1
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    complete = tl.maximum(length - 1, 0) // BLOCK
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    p_q = q_ptr + row_head * G * D
    # [GM, DP]
    b_q = tl.load(p_q + o_g[:, None] * D + o_d[None, :], mask=(o_g < G)[:, None] & m_d[None, :], other=0.0).to(COMPUTE)
    p_v = v_ptr + row_head * num_blocks * BLOCK * D
    p_max = max_ptr + row_head * (SPLITS + 1) * G
    p_sum = sum_ptr + row_head * (SPLITS + 1) * G
    p_acc = acc_ptr + row_head * (SPLITS + 1) * G * D
    row_max = tl.full([GM], float("-inf"), tl.float32)
    acc = tl.zeros([GM, DP], tl.float32)

    if split >= 0:
        o_p = tl.arange(0, GP)
        delta = tl.load(delta_ptr + (row_head % HKV) * G + o_p, mask=o_p < G, other=0.0)
        # 4**(1 - plane), see SUBNORMAL_UNIT
        q0 = query_rows(p_q, 0, scale_log2 * 4.0, G, D, GM, DQP)
        q1 = query_rows(p_q, 1, scale_log2, G, D, GM, DQP)
        q2 = query_rows(p_q, 2, scale_log2 * 0.25, G, D, GM, DQP)
        q3 = query_rows(p_q, 3, scale_log2 * 0.0625, G, D, GM, DQP)
        follow_previous_launch(PDL)  # the scan; queries, lengths and margins are older than it
        p_near = near_max_ptr + row_head * PIECES * G
        b_near, near_unit = load_near_pieces(
            p_near, length, complete * BLOCK, G, SUB, NEAR_TILE, SINK_TILES, PIECES, N_LOCAL, PP, GP
        )
        if PER_HEAD:
            b_near_rows, near_unit_rows = load_near_pieces(
                p_near, length, complete * BLOCK, G, SUB, NEAR_TILE, SINK_TILES, PIECES, N_LOCAL, PP, GM
            )
        units = num_blocks.to(tl.int64) * (BLOCK // SUB)
        parts: tl.constexpr = SUB // TILE
        p_list = list_ptr + (row_head * SPLITS + split) * list_size
        p_units = unit_max_ptr + row_head * units * FINE * G
        num_kept, num_passes = collect_kept(
            p_units, b_near, near_unit, delta * LOG2_E, complete * (BLOCK // SUB), p_list,
            kept_ptr + row_head * units * G, split, SPLITS, G, FINE, parts, PP, GP, UNIT_CHUNK, NEAR_TEST, RETURN_KEPT,
        )  # fmt: skip
        if split == SPLITS - 1:  # the split with the fewest tiles counts
            count_selective_step(
                ledger_ptr, active_ptr, row, row_head, length, complete * BLOCK, num_kept * SUB,
                num_passes * SUB, length - complete * BLOCK, G, GP,
            )  # fmt: skip
        num_tiles = (num_kept * parts - split + SPLITS - 1) // SPLITS
        sums = tl.zeros([GM, TILE], tl.float32)
        # The tile's address is itself loaded: Triton spends two stages on each buffer of such a chain.
        for i in tl.range(0, num_tiles, num_stages=2 * BUFFERS + 1):
            token = tl.load(p_list + i).to(tl.int64) * TILE
            slot = row_head * num_blocks * BLOCK + token
            block = row_head * num_blocks + token // BLOCK
            scores = tl.zeros([GM, TILE], tl.float32)
            if RESIDUAL != EXACT:
                scores += quantised_scores(
                    q0, q1, q2, q3, codes_ptr + slot * (D // 4), half_step_ptr + block * D, residual_ptr + slot * D,
                    zero_point_ptr + block * G, G, D, GM, DQP, TILE, RESIDUAL, PTX, SUBNORMAL,
                )  # fmt: skip
            if RESIDUAL >= E4M3:
                scores += whole_scores(b_q, residual_ptr + slot * D, scale_log2, D, DP, TILE, RESIDUAL, COMPUTE)
            if PER_HEAD:
                scores = drop_heads(
                    scores, token // SUB, p_units, b_near_rows, near_unit_rows, delta_ptr + (row_head % HKV) * G, G,
                    FINE, GM, NEAR_TEST,
                )  # fmt: skip
            # [TILE, DP]
            p_tile = p_v + token * D + tl.arange(0, TILE)[:, None] * D + o_d[None, :]
            b_v = tl.load(p_tile, mask=m_d[None, :], other=0.0)
            row_max, sums, acc = online_softmax_by_column(row_max, sums, acc, scores, b_v.to(COMPUTE))
        store_partial(p_max, p_sum, p_acc, split + 1, row_max, tl.sum(sums, 1), acc, G, D, GM, DP)
    else:
        quantised = complete * BLOCK
        p_k = tail_ptr + row_head * BLOCK * D
        if PDL:
            prefetch_to_l2(p_k, BLOCK * D)
            prefetch_to_l2(p_v + quantised.to(tl.int64) * D, BLOCK * D)
        follow_previous_launch(PDL)
        tail_sums = tl.zeros([GM, TAIL_TILE], tl.float32)
        for start in range(quantised, length, TAIL_TILE):
            token = start + tl.arange(0, TAIL_TILE)
            m_t = token < length
            p_tail = p_k + (token - quantised)[None, :] * D + o_d[:, None]
            b_k = tl.load(p_tail, mask=m_t[None, :] & m_d[:, None], other=0.0)
            scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
            scores = tl.where(m_t[None, :], scores, float("-inf"))
            p_tile = p_v + token.to(tl.int64)[:, None] * D + o_d[None, :]
            b_v = tl.load(p_tile, mask=m_t[:, None] & m_d[None, :], other=0.0)
            row_max, tail_sums, acc = online_softmax_by_column(row_max, tail_sums, acc, scores, b_v.to(COMPUTE))
        store_partial(p_max, p_sum, p_acc, 0, row_max, tl.sum(tail_sums, 1), acc, G, D, GM, DP)


def ffd_attend(layer: FFDLayer, q: Tensor, scale: float, scratch: ScanScratch, kept: Tensor | None = None) -> None:
    """Launch selection and attention on what `ffd_scan` left; fills ``scratch.partials`` and counts the step."""
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    group, d, num_splits = g.group_size, g.head_dim, scratch.partials.row_max.shape[1] - 1
    padded_d, quarter = padded(d, 16), padded(d // 4, 16)
    bytes_per_token = quarter + padded_d * layer.values.element_size()
    if layer.residual is not None:
        bytes_per_token += padded_d * layer.residual.element_size()
    tile, buffers = fit_tile(
        min(ATTEND_TILE, m.test_size), bytes_per_token, gpu.shared_memory // ATTEND_PROGRAMS, ATTEND_BUFFERS
    )
    tail_bytes = 2 * padded_d * layer.values.element_size()
    tail_tile, _ = fit_tile(min(ATTEND_TILE, m.block_size), tail_bytes, gpu.shared_memory // ATTEND_PROGRAMS, 1)
    # If not asked for it is never touched; any pointer stands in for it.
    kept_or_any = scratch.unit_max if kept is None else kept
    units = layer.codes.shape[2] // m.test_size
    pieces = scratch.near_max.shape[1]
    partials = scratch.partials
    _ffd_attend_kernel[(num_splits + 1, g.batch_size * g.num_kv_heads)](
        q, layer.codes, layer.half_step, stored_residual(layer), layer.values, layer.tail, layer.lengths,
        layer.delta_nats,
        scratch.unit_max, scratch.zero_point, scratch.near_max, scratch.kept_list, kept_or_any,
        partials.row_max, partials.row_sum, partials.acc,
        layer.ledger.counters, layer.ledger.active, scale * LOG2_E.value, layer.half_step.shape[2],
        scratch.kept_list.shape[2],
        HKV=g.num_kv_heads, G=group, D=d, GM=padded(group, 16), GP=padded(group, 1), DP=padded_d, DQP=quarter,
        BLOCK=m.block_size, SUB=m.test_size, TILE=tile, TAIL_TILE=tail_tile,
        BUFFERS=buffers, UNIT_CHUNK=unit_chunk(units, group), FINE=m.test_size // scratch.unit,
        NEAR_TILE=near_tile(m), SINK_TILES=near_tiles(m)[0], PIECES=pieces, N_LOCAL=m.n_local, PP=padded(pieces, 1),
        NEAR_TEST=m.pseudo_max == "refined", SPLITS=num_splits,
        RESIDUAL=RESIDUAL_KINDS[m.residual], COMPUTE=compute_dtype(g.dtype),
        PTX=gpu.ptx, SUBNORMAL=gpu.subnormals, PER_HEAD=m.select_per == "head",
        RETURN_KEPT=kept is not None,
        PDL=gpu.dependent_launch, num_warps=ATTEND_WARPS, **gpu.launch_options,
    )  # fmt: skip
