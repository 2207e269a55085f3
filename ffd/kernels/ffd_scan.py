"""FFD's scan: append the token, score every 2-bit thumbnail, keep sub-block maxima, find the pseudo-maximum.

Programs are single warps, so that nothing in the loop waits for another warp and a block's query
operand, ``q * half_step``, is built once where it is used. Tokens are the long side of the tensor-core
product (16 rows) and query heads the short one (8 columns): with G = 4 half of the product is used,
not a quarter. The first programs find the pseudo-maximum, one for each tile that may hold sink or
local tokens; scoring those few a second time keeps branches out of the scan loop. The next store the
step's token. Nobody waits for them: its block is scanned from the next step on, its key comes from its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E, follow_previous_launch, prefetch_to_l2, quantised_tokens
from ffd.kernels.ffd_append import append_programs, append_token, contiguous_channels, load_new_key, stored_residual
from ffd.kernels.ffd_near import (
    block_operand,
    code_products,
    load_codes,
    load_half_steps,
    load_query_planes,
    near_scores,
    tail_scores,
)
from ffd.kernels.ffd_scratch import FFDScratch, near_tile, near_tiles, scan_workers
from ffd.kernels.launch import SCAN_REGISTERS, SCAN_STAGES, SCAN_TILE, compute_dtype, hardware, padded
from ffd.kernels.unpack import CONVERTED_UNIT, NO_RESIDUAL, RESIDUAL_KINDS, SUBNORMAL_UNIT
from ffd.quantization import LEVEL_STEP

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


@triton.jit
def share_of_worker(
    lengths_ptr, worker, num_workers, num_rows,
    HKV: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a worker scans, PARTS pieces a block: row_head, and ``first, first + stride, ..`` below ``complete``.

    Every kv head gets workers in proportion to its row's blocks, so that a short row leaves its warps to a
    long one, and they take its pieces in turn: runs of their own, a power of two apart, would all meet in a
    few memory channels. A worker left over gets ``complete == 0``.
    """
    o_r = tl.arange(0, ROWS)
    b_length = tl.load(lengths_ptr + o_r, mask=o_r < num_rows, other=0)
    b_complete = tl.maximum(b_length - 1, 0) // BLOCK * PARTS
    # Rounding up costs each head at most one worker, hence the heads taken off.
    spare = tl.maximum(num_workers - num_rows * HKV, 1)
    most_each = tl.maximum(tl.cdiv(tl.sum(b_complete, 0) * HKV, spare), 1)
    b_workers = (b_complete + most_each - 1) // most_each
    row_end = tl.cumsum(b_workers, 0) * HKV
    row = tl.sum((row_end <= worker).to(tl.int32), 0)
    stride = tl.sum(tl.where(o_r == row, b_workers, 0), 0)
    complete = tl.sum(tl.where(o_r == row, b_complete, 0), 0)
    within = worker - tl.sum(tl.where(o_r < row, b_workers, 0), 0) * HKV
    each = tl.maximum(stride, 1)
    row = tl.minimum(row, num_rows - 1)
    row_head = (row * HKV + within // each % HKV).to(tl.int64)
    return row_head, tl.where(stride > 0, within % each, 0), each, complete


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _ffd_scan_kernel(
    q_ptr, k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
    codes_ptr, half_step_ptr, residual_ptr, values_ptr, tail_ptr, centre_ptr, lengths_ptr,
    unit_max_ptr, zero_point_ptr, near_max_ptr, scale_log2, num_rows, num_blocks,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, NEAR_TILE: tl.constexpr,
    ROWS: tl.constexpr, N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    REFINE: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
    PARTS: tl.constexpr, APPENDERS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, RESIDUAL: tl.constexpr,
    CENTRE: tl.constexpr, OLD_LENGTHS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv * (PIECES + APPENDERS) + workers,).

    Writes unit_max [B, Hkv, units, G], zero_point [B, Hkv, blocks, G] and near_max [B, Hkv, PIECES, G]; a piece
    is a tile that may hold sink tokens or one that may hold local tokens, quantised or of the tail. APPENDERS is 0
    where no token is to be appended. With OLD_LENGTHS the previous launch did not write the lengths, nor the
    thumbnails of complete blocks: what a worker will need first is fetched while that launch still runs.
    """
    program = tl.program_id(0)
    num_near = num_rows * HKV * PIECES
    num_append = num_rows * HKV * APPENDERS
    worker = program - num_near - num_append
    num_workers = tl.num_programs(0) - num_near - num_append
    o_g = tl.arange(0, GP)
    if program < num_near:
        if not OLD_LENGTHS:
            follow_previous_launch(PDL)
        row_head = (program // PIECES).to(tl.int64)
        piece = program % PIECES
        length = tl.load(lengths_ptr + row_head // HKV)
        quantised = quantised_tokens(length, BLOCK)
        first_local = tl.maximum(length - N_LOCAL, 0) // NEAR_TILE
        start = tl.where(piece < SINK_TILES, piece, first_local + piece - SINK_TILES) * NEAR_TILE
        slot = row_head * num_blocks * BLOCK + start
        p_tail = tail_ptr + (row_head * BLOCK + start - quantised) * D
        if OLD_LENGTHS:
            if start < quantised:
                prefetch_to_l2(codes_ptr + slot * (D // 4), NEAR_TILE * (D // 4))
                if REFINE != NO_RESIDUAL:
                    prefetch_to_l2(residual_ptr + slot * D, NEAR_TILE * D)
            elif start < length:
                prefetch_to_l2(p_tail, NEAR_TILE * D)
            follow_previous_launch(PDL)
        p_q = q_ptr + row_head * G * D
        scores = tl.full([NEAR_TILE, GP], float("-inf"), tl.float32)
        if start < quantised:
            p_half_step = half_step_ptr + (row_head * num_blocks + start // BLOCK) * D
            scores = near_scores(
                p_q, codes_ptr + slot * (D // 4), p_half_step, residual_ptr + slot * D, scale_log2, G,
                D, GP, DP, DQP, NEAR_TILE, REFINE, COMPUTE, PTX, SUBNORMAL,
            )  # fmt: skip
        elif start < length:
            o_d = tl.arange(0, DP)
            new_key = load_new_key(
                k_ptr, centre_ptr, row_head // HKV, row_head % HKV, row_head, k_stride_row, k_stride_head,
                o_d, (o_d < D) & (APPENDERS > 0), D, CENTRE,
            )  # fmt: skip
            scores = tail_scores(
                p_q, p_tail, new_key, length - start, scale_log2, G, D, GP, DP, NEAR_TILE, COMPUTE, APPENDERS > 0
            )
        token = start + tl.arange(0, NEAR_TILE)
        near = ((token < N_SINK) | (token >= length - N_LOCAL)) & (token < length)
        top = tl.max(tl.where(near[:, None], scores, float("-inf")), 0)
        tl.store(near_max_ptr + program.to(tl.int64) * G + o_g, top, mask=o_g < G)
    elif worker < 0:
        follow_previous_launch(PDL)
        if APPENDERS > 0:
            row_head = ((program - num_near) // APPENDERS).to(tl.int64)
            append_token(
                (program - num_near) % APPENDERS, row_head, tl.load(lengths_ptr + row_head // HKV),
                k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
                codes_ptr, half_step_ptr, residual_ptr, values_ptr, tail_ptr, centre_ptr, num_blocks,
                HKV, D, BLOCK, WIDTH, STEP, RESIDUAL, CENTRE, APPENDERS,
            )  # fmt: skip
    else:
        if not OLD_LENGTHS:
            follow_previous_launch(PDL)
        row_head, first, stride, complete = share_of_worker(
            lengths_ptr, worker, num_workers, num_rows, HKV, BLOCK, PARTS, ROWS
        )
        first_slot = row_head * num_blocks + tl.minimum(first, complete) // PARTS
        if OLD_LENGTHS:
            first_token = first_slot * BLOCK + first % PARTS * (BLOCK // PARTS)
            prefetch_to_l2(codes_ptr + first_token * (D // 4), BLOCK // PARTS * (D // 4))
            h0, h1, h2, h3 = load_half_steps(half_step_ptr + first_slot * D, D, GP, DQP)
            follow_previous_launch(PDL)
        else:
            h0, h1, h2, h3 = load_half_steps(half_step_ptr + first_slot * D, D, GP, DQP)
        if first < complete:
            q0, q1, q2, q3 = load_query_planes(q_ptr + row_head * G * D, scale_log2, G, D, GP, DQP)
            # Half steps are too small for the asynchronous copies of Triton's pipeline: prefetched by hand.
            for piece in tl.range(first, complete, stride, num_stages=STAGES):
                slot = row_head * num_blocks + piece // PARTS
                a0, a1, a2, a3, zero_point = block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX)
                following = row_head * num_blocks + tl.minimum(piece + stride, complete - 1) // PARTS
                h0, h1, h2, h3 = load_half_steps(half_step_ptr + following * D, D, GP, DQP)
                tl.store(zero_point_ptr + slot * G + o_g, zero_point, mask=o_g < G)
                token = slot * BLOCK + piece % PARTS * (BLOCK // PARTS)
                for part in tl.static_range(BLOCK // PARTS // TILE):
                    b_packed = load_codes(codes_ptr + (token + part * TILE) * (D // 4), D, DQP, TILE)
                    products = code_products(b_packed, a0, a1, a2, a3, PTX, SUBNORMAL)
                    if part * TILE % SUB == 0:
                        tops = products
                    else:
                        tops = tl.maximum(tops, products)
                    if (part + 1) * TILE % SUB == 0:
                        # [TILE, GP] -> [UNITS, GP]. Unit and zero point are the block's: they follow the maximum.
                        scores = tl.max(tl.reshape(tops, [UNITS, TILE // UNITS, GP]), 1)
                        scores = scores * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT) - zero_point[None, :]
                        o_u = (token + part * TILE) // SUB + tl.arange(0, UNITS)
                        tl.store(unit_max_ptr + o_u[:, None] * G + o_g[None, :], scores, mask=(o_g < G)[None, :])


def ffd_scan(
    layer: FFDLayer, q: Tensor, scale: float, scratch: FFDScratch, token: tuple[Tensor, Tensor] | None = None
) -> None:
    """Launch the scan: q [B, Hq, d] contiguous; fills ``scratch.unit_max`` and ``scratch.near_max``.

    ``token`` are keys and values [B, Hkv, 1, d] to be stored in slot ``lengths - 1``, unless that was done before.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    row_heads, num_blocks, d = g.batch_size * g.num_kv_heads, layer.half_step.shape[2], g.head_dim
    pieces = scratch.near_max.shape[1]
    appenders, width = append_programs(row_heads, d, m.block_size)
    appenders = 0 if token is None else appenders
    # Without a token to append its pointers are never followed.
    keys, values = (q[:, :, None], q[:, :, None]) if token is None else map(contiguous_channels, token)
    tile = min(SCAN_TILE, m.block_size)
    num_others = row_heads * (pieces + appenders)
    # One wave with the other programs in it: a second would double the time.
    workers = max(scan_workers(q.device) - num_others, scan_workers(q.device) // 2)
    workers = min(workers, row_heads * num_blocks * scratch.parts) + row_heads
    refine = m.residual if m.pseudo_max == "refined" else "none"
    registers = {"maxnreg": SCAN_REGISTERS} if gpu.ptx else {}
    _ffd_scan_kernel[(num_others + workers,)](
        q, keys, values, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        layer.codes, layer.half_step, stored_residual(layer), layer.values, layer.tail,
        layer.half_step if layer.centre is None else layer.centre, layer.lengths,
        scratch.unit_max, scratch.zero_point, scratch.near_max, scale * LOG2_E.value, g.batch_size, num_blocks,
        HKV=g.num_kv_heads, G=g.group_size, D=d, GP=padded(g.group_size, 8), DP=padded(d, 16), DQP=padded(d // 4, 16),
        BLOCK=m.block_size, SUB=scratch.unit, TILE=tile, UNITS=max(1, tile // scratch.unit), NEAR_TILE=near_tile(m),
        ROWS=padded(g.batch_size, 1), N_SINK=m.n_sink, N_LOCAL=m.n_local, SINK_TILES=near_tiles(layer)[0],
        PIECES=pieces, REFINE=RESIDUAL_KINDS[refine], PARTS=scratch.parts, STAGES=SCAN_STAGES,
        COMPUTE=compute_dtype(g.dtype), APPENDERS=appenders, WIDTH=width, STEP=LEVEL_STEP[m.levels],
        RESIDUAL=RESIDUAL_KINDS[m.residual], CENTRE=layer.centre is not None,
        OLD_LENGTHS=gpu.dependent_launch and g.layer > 0, PTX=gpu.ptx, SUBNORMAL=gpu.subnormals,
        PDL=gpu.dependent_launch, num_warps=1, **registers, **gpu.launch_options,
    )  # fmt: skip
