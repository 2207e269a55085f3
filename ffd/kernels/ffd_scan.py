"""FFD's scan: score every 2-bit thumbnail, keep each sub-block's maximum, and find the pseudo-maximum.

Programs are single warps, so that nothing in the loop waits for another warp and a block's query
operand, ``q * half_step``, is built once where it is used. Tokens are the long side of the tensor-core
product (16 rows) and query heads the short one (8 columns): with G = 4 half of the product is used,
not a quarter. The first programs find the pseudo-maximum, one for each tile that may hold sink or
local tokens; scoring those few a second time keeps branches out of the scan loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    CONVERTED_UNIT,
    E4M3,
    EXACT,
    INT8,
    LOG2_E,
    NO_RESIDUAL,
    RESIDUAL_KINDS,
    RESIDUAL_STEP,
    SUBNORMAL_UNIT,
    code_plane,
    e4m3_to_half,
    half_product,
    int8_to_half,
    widen_codes,
)
from ffd.kernels.launch import (
    ATTEND_PROGRAMS,
    SCAN_REGISTERS,
    SCAN_STAGES,
    SCAN_TILE,
    SCAN_WARPS,
    Partials,
    compute_dtype,
    hardware,
    padded,
)

if TYPE_CHECKING:
    from ffd.methods.ffd import FFD, FFDLayer


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
def load_half_steps(half_step_ptr, D: tl.constexpr, DQP: tl.constexpr):
    """One block's half steps, four fp16 [DQP]."""
    o_c = tl.arange(0, DQP)
    m_c = o_c < D // 4
    h0 = tl.load(half_step_ptr + o_c, mask=m_c, other=0.0)
    h1 = tl.load(half_step_ptr + D // 4 + o_c, mask=m_c, other=0.0)
    h2 = tl.load(half_step_ptr + 2 * (D // 4) + o_c, mask=m_c, other=0.0)
    h3 = tl.load(half_step_ptr + 3 * (D // 4) + o_c, mask=m_c, other=0.0)
    return h0, h1, h2, h3


@triton.jit
def block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX: tl.constexpr):
    """Query times one block's half steps, four fp16 [DQP, GP], and the zero point ``3 * sum(q * h)`` [GP].

    The sum over channels is left to the tensor cores too: a row of constants that undo the planes' gains.
    """
    a0 = half_product(q0, tl.broadcast_to(h0[:, None], q0.shape), PTX)
    a1 = half_product(q1, tl.broadcast_to(h1[:, None], q1.shape), PTX)
    a2 = half_product(q2, tl.broadcast_to(h2[:, None], q2.shape), PTX)
    a3 = half_product(q3, tl.broadcast_to(h3[:, None], q3.shape), PTX)
    threes = tl.dot(tl.full([16, q0.shape[0]], 0.75, tl.float16), a0)
    threes = tl.dot(tl.full([16, q0.shape[0]], 3.0, tl.float16), a1, threes)
    threes = tl.dot(tl.full([16, q0.shape[0]], 12.0, tl.float16), a2, threes)
    threes = tl.dot(tl.full([16, q0.shape[0]], 48.0, tl.float16), a3, threes)
    return a0, a1, a2, a3, tl.max(threes, 0)  # all sixteen rows are the same


@triton.jit
def code_products(
    codes_ptr, a0, a1, a2, a3,
    D: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """``sum(u * q * h)`` of TILE consecutive tokens, fp32 [TILE, GP], in units of `code_unit`."""
    o_t = tl.arange(0, TILE)
    o_c = tl.arange(0, DQP)
    # [TILE, DQP] bytes of four codes
    b_packed = tl.load(codes_ptr + o_t[:, None] * (D // 4) + o_c[None, :], mask=(o_c < D // 4)[None, :], other=0)
    wide = widen_codes(b_packed, PTX)
    acc = tl.dot(code_plane(wide, 0, PTX, SUBNORMAL), a0)
    acc = tl.dot(code_plane(wide, 1, PTX, SUBNORMAL), a1, acc)
    acc = tl.dot(code_plane(wide, 2, PTX, SUBNORMAL), a2, acc)
    return tl.dot(code_plane(wide, 3, PTX, SUBNORMAL), a3, acc)


@triton.jit
def refined_scores(
    q_ptr, residual_ptr, a0, a1, a2, a3, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What the residuals of TILE tokens add to their scores, or the scores of exact keys, fp32 [TILE, GP]."""
    o_t = tl.arange(0, TILE)
    if RESIDUAL == INT8:
        o_c = tl.arange(0, DQP)
        m_c = (o_c < D // 4)[None, :]
        p_r = residual_ptr + o_t[:, None] * D + o_c[None, :]
        fine = tl.dot(int8_to_half(tl.load(p_r, mask=m_c, other=0), 0, PTX), a0)
        fine = tl.dot(int8_to_half(tl.load(p_r + D // 4, mask=m_c, other=0), 1, PTX), a1, fine)
        fine = tl.dot(int8_to_half(tl.load(p_r + 2 * (D // 4), mask=m_c, other=0), 2, PTX), a2, fine)
        fine = tl.dot(int8_to_half(tl.load(p_r + 3 * (D // 4), mask=m_c, other=0), 3, PTX), a3, fine)
        return fine * RESIDUAL_STEP
    else:
        o_g = tl.arange(0, GP)
        o_d = tl.arange(0, DP)
        m_d = o_d < D
        p_q = q_ptr + o_g[None, :] * D + o_d[:, None]
        b_q = tl.load(p_q, mask=(o_g < G)[None, :] & m_d[:, None], other=0.0).to(COMPUTE)
        b_k = tl.load(residual_ptr + o_t[:, None] * D + o_d[None, :], mask=m_d[None, :], other=0)
        if RESIDUAL == E4M3:
            return tl.dot(e4m3_to_half(b_k).to(COMPUTE), b_q, input_precision="ieee") * (scale_log2 * 256.0)
        else:
            return tl.dot(b_k.to(COMPUTE), b_q, input_precision="ieee") * scale_log2


@triton.jit
def near_scores(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Scores [TILE, GP] of quantised tokens as the pseudo-maximum takes them: refined, unless RESIDUAL says none."""
    q0, q1, q2, q3 = load_query_planes(q_ptr, scale_log2, G, D, GP, DQP)
    h0, h1, h2, h3 = load_half_steps(half_step_ptr, D, DQP)
    a0, a1, a2, a3, zero_point = block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX)
    scores = tl.zeros([TILE, GP], tl.float32)
    if RESIDUAL != EXACT:
        products = code_products(codes_ptr, a0, a1, a2, a3, D, DQP, TILE, PTX, SUBNORMAL)
        scores += products * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT) - zero_point[None, :]
    if RESIDUAL != NO_RESIDUAL:
        scores += refined_scores(
            q_ptr, residual_ptr, a0, a1, a2, a3, scale_log2, G, D, GP, DP, DQP, TILE, RESIDUAL, COMPUTE, PTX
        )
    return scores


@triton.jit
def tail_scores(
    q_ptr, tail_ptr, num_tokens, scale_log2, G,
    D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Exact scores [TILE, GP] of up to TILE tail tokens."""
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    m_d = o_d < D
    # queries [DP, GP], keys [TILE, DP]
    b_q = tl.load(q_ptr + o_g[None, :] * D + o_d[:, None], mask=(o_g < G)[None, :] & m_d[:, None], other=0.0)
    p_k = tail_ptr + o_t[:, None] * D + o_d[None, :]
    b_k = tl.load(p_k, mask=(o_t < num_tokens)[:, None] & m_d[None, :], other=0.0)
    return tl.dot(b_k.to(COMPUTE), b_q.to(COMPUTE), input_precision="ieee") * scale_log2


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _ffd_scan_kernel(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, tail_ptr, lengths_ptr, unit_max_ptr, zero_point_ptr, near_max_ptr,
    scale_log2, num_rows, num_blocks,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, NEAR_TILE: tl.constexpr,
    ROWS: tl.constexpr, N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv * PIECES + workers,).

    Writes unit_max [B, Hkv, units, G], zero_point [B, Hkv, blocks, G] and near_max [B, Hkv, PIECES, G]; a piece
    is a tile that may hold sink tokens or one that may hold local tokens, quantised or of the tail.
    """
    program = tl.program_id(0)
    num_near = num_rows * HKV * PIECES
    o_g = tl.arange(0, GP)
    if program < num_near:
        row_head = (program // PIECES).to(tl.int64)
        piece = program % PIECES
        length = tl.load(lengths_ptr + row_head // HKV)
        quantised = length // BLOCK * BLOCK
        first_local = tl.maximum(length - N_LOCAL, 0) // NEAR_TILE
        start = tl.where(piece < SINK_TILES, piece, first_local + piece - SINK_TILES) * NEAR_TILE
        p_q = q_ptr + row_head * G * D
        scores = tl.full([NEAR_TILE, GP], float("-inf"), tl.float32)
        if start < quantised:
            slot = row_head * num_blocks * BLOCK + start
            p_half_step = half_step_ptr + (row_head * num_blocks + start // BLOCK) * D
            scores = near_scores(
                p_q, codes_ptr + slot * (D // 4), p_half_step, residual_ptr + slot * D, scale_log2, G,
                D, GP, DP, DQP, NEAR_TILE, RESIDUAL, COMPUTE, PTX, SUBNORMAL,
            )  # fmt: skip
        elif start < length:
            p_tail = tail_ptr + (row_head * BLOCK + start - quantised) * D
            scores = tail_scores(p_q, p_tail, length - start, scale_log2, G, D, GP, DP, NEAR_TILE, COMPUTE)
        token = start + tl.arange(0, NEAR_TILE)
        near = ((token < N_SINK) | (token >= length - N_LOCAL)) & (token < length)
        top = tl.max(tl.where(near[:, None], scores, float("-inf")), 0)
        tl.store(near_max_ptr + program.to(tl.int64) * G + o_g, top, mask=o_g < G)
    else:
        # All rows' blocks in one line, cut into equal runs: a short row leaves its warps to a long one.
        o_r = tl.arange(0, ROWS)
        b_complete = tl.load(lengths_ptr + o_r, mask=o_r < num_rows, other=0) // BLOCK
        row_end = tl.cumsum(b_complete, 0) * HKV
        total = tl.sum(b_complete, 0) * HKV
        per_worker = tl.cdiv(total, tl.num_programs(0) - num_near)
        at = (program - num_near) * per_worker
        end = tl.minimum(at + per_worker, total)
        while at < end:
            row = tl.sum((row_end <= at).to(tl.int32), 0)
            complete = tl.load(lengths_ptr + row) // BLOCK
            within = at - tl.sum(tl.where(o_r < row, b_complete, 0), 0) * HKV
            row_head = (row * HKV + within // complete).to(tl.int64)
            first = within % complete
            last = tl.minimum(first + end - at, complete)
            q0, q1, q2, q3 = load_query_planes(q_ptr + row_head * G * D, scale_log2, G, D, GP, DQP)
            # Half steps are too small for the asynchronous copies of Triton's pipeline: prefetched by hand.
            h0, h1, h2, h3 = load_half_steps(half_step_ptr + (row_head * num_blocks + first) * D, D, DQP)
            for block in tl.range(first, last, num_stages=STAGES):
                slot = row_head * num_blocks + block
                a0, a1, a2, a3, zero_point = block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX)
                following = row_head * num_blocks + tl.minimum(block + 1, last - 1)
                h0, h1, h2, h3 = load_half_steps(half_step_ptr + following * D, D, DQP)
                tl.store(zero_point_ptr + slot * G + o_g, zero_point, mask=o_g < G)
                for part in tl.static_range(BLOCK // TILE):
                    p_codes = codes_ptr + (slot * BLOCK + part * TILE) * (D // 4)
                    products = code_products(p_codes, a0, a1, a2, a3, D, DQP, TILE, PTX, SUBNORMAL)
                    # [TILE, GP] -> [UNITS, GP]. Unit and zero point are the block's, so they follow the maximum.
                    b_max = tl.max(tl.reshape(products, [UNITS, TILE // UNITS, GP]), 1)
                    if part * TILE % SUB == 0:
                        unit_max = b_max
                    else:
                        unit_max = tl.maximum(unit_max, b_max)
                    if (part + 1) * TILE % SUB == 0:
                        scores = unit_max * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT) - zero_point[None, :]
                        o_u = slot * (BLOCK // SUB) + part * TILE // SUB + tl.arange(0, UNITS)
                        tl.store(unit_max_ptr + o_u[:, None] * G + o_g[None, :], scores, mask=(o_g < G)[None, :])
            at += last - first


NEAR_TILE = 32
"""Tokens of a near piece: what one warp takes at once, and a divisor of every block size."""


def near_tiles(method: FFD) -> tuple[int, int]:
    """Tiles that may hold sink tokens and tiles that may hold local ones (a window may straddle one more)."""
    return triton.cdiv(method.n_sink, NEAR_TILE), triton.cdiv(method.n_local, NEAR_TILE) + 1


@dataclass(frozen=True)
class ScanScratch:
    """What one FFD step hands from launch to launch."""

    unit_max: Tensor
    """float32 [B * Hkv, units, G]: largest thumbnail score of each sub-block, log2 units; stale beyond the length."""
    zero_point: Tensor
    """float32 [B * Hkv, blocks, G]: ``3 * sum(q * half_step)``, log2 units, to be subtracted from code products."""
    near_max: Tensor
    """float32 [B * Hkv, pieces, G]: parts of the pseudo-maximum, log2 units; -inf where a piece holds no near token."""
    kept_list: Tensor
    """int32 [B * Hkv, splits, list_size]: tiles of kept sub-blocks, dealt out to the splits."""
    partials: Partials

    @classmethod
    def allocate(cls, layer: FFDLayer) -> ScanScratch:
        """For a layer's capacity; `ATTEND_PROGRAMS` per multiprocessor."""
        g, m = layer.geometry, layer.method
        row_heads = g.batch_size * g.num_kv_heads
        units = layer.codes.shape[2] // m.test_size
        # One wave, the tail's program included: a kv head's last program waiting for a slot costs a whole turn.
        splits = max(1, min(ATTEND_PROGRAMS * hardware(g.device).multiprocessors // row_heads - 1, units))

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(row_heads, *shape, dtype=dtype, device=g.device)

        return cls(
            unit_max=empty(units, g.group_size, dtype=torch.float32),
            zero_point=empty(layer.half_step.shape[2], g.group_size, dtype=torch.float32),
            near_max=empty(sum(near_tiles(m)), g.group_size, dtype=torch.float32),
            kept_list=empty(splits, triton.cdiv(layer.codes.shape[2] // 16, splits), dtype=torch.int32),
            partials=Partials.allocate(row_heads, splits + 1, g.group_size, g.head_dim, g.device),
        )


def stored_residual(layer: FFDLayer) -> Tensor:
    """The residual as kernels take it: e4m3 as bytes, and any tensor where there is none to read."""
    if layer.residual is None:
        return layer.codes
    return layer.residual.view(torch.uint8) if layer.method.residual == "e4m3" else layer.residual


def ffd_scan(layer: FFDLayer, q: Tensor, scale: float, scratch: ScanScratch) -> None:
    """Launch the scan: q [B, Hq, d] contiguous; fills ``scratch.unit_max`` and ``scratch.near_max``."""
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    row_heads, num_blocks, d = g.batch_size * g.num_kv_heads, layer.half_step.shape[2], g.head_dim
    pieces = scratch.near_max.shape[1]
    num_near = row_heads * pieces
    tile = min(SCAN_TILE, m.block_size)
    # One wave with the near pieces in it: a second would double the time.
    workers = SCAN_WARPS * gpu.multiprocessors
    workers = max(1, min(max(workers - num_near, workers // 2), row_heads * num_blocks))
    refine = m.residual if m.pseudo_max == "refined" else "none"
    registers = {"maxnreg": SCAN_REGISTERS} if gpu.ptx else {}
    _ffd_scan_kernel[(num_near + workers,)](
        q, layer.codes, layer.half_step, stored_residual(layer), layer.tail, layer.lengths,
        scratch.unit_max, scratch.zero_point, scratch.near_max, scale * LOG2_E.value, g.batch_size, num_blocks,
        HKV=g.num_kv_heads, G=g.group_size, D=d, GP=padded(g.group_size, 8), DP=padded(d, 16), DQP=padded(d // 4, 16),
        BLOCK=m.block_size, SUB=m.test_size, TILE=tile, UNITS=max(1, tile // m.test_size), NEAR_TILE=NEAR_TILE,
        ROWS=padded(g.batch_size, 1), N_SINK=m.n_sink, N_LOCAL=m.n_local, SINK_TILES=near_tiles(m)[0], PIECES=pieces,
        RESIDUAL=RESIDUAL_KINDS[refine], STAGES=SCAN_STAGES, COMPUTE=compute_dtype(g.dtype),
        PTX=gpu.ptx, SUBNORMAL=gpu.subnormals, num_warps=1, **registers,
    )  # fmt: skip
