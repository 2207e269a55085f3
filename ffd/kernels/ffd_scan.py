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

from ffd.kernels.common import LOG2_E, follow_previous_launch
from ffd.kernels.ffd_near import (
    block_operand,
    code_products,
    load_half_steps,
    load_query_planes,
    near_scores,
    tail_scores,
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
from ffd.kernels.unpack import CONVERTED_UNIT, RESIDUAL_KINDS, SUBNORMAL_UNIT

if TYPE_CHECKING:
    from ffd.methods.ffd import FFD, FFDLayer


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
    b_complete = tl.load(lengths_ptr + o_r, mask=o_r < num_rows, other=0) // BLOCK * PARTS
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
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, tail_ptr, lengths_ptr, unit_max_ptr, zero_point_ptr, near_max_ptr,
    scale_log2, num_rows, num_blocks,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, NEAR_TILE: tl.constexpr,
    ROWS: tl.constexpr, N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv * PIECES + workers,).

    Writes unit_max [B, Hkv, units, G], zero_point [B, Hkv, blocks, G] and near_max [B, Hkv, PIECES, G]; a piece
    is a tile that may hold sink tokens or one that may hold local tokens, quantised or of the tail.
    """
    follow_previous_launch(PDL)
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
        row_head, first, stride, complete = share_of_worker(
            lengths_ptr, program - num_near, tl.num_programs(0) - num_near, num_rows, HKV, BLOCK, PARTS, ROWS
        )
        if first < complete:
            q0, q1, q2, q3 = load_query_planes(q_ptr + row_head * G * D, scale_log2, G, D, GP, DQP)
            # Half steps are too small for the asynchronous copies of Triton's pipeline: prefetched by hand.
            first_slot = row_head * num_blocks + first // PARTS
            h0, h1, h2, h3 = load_half_steps(half_step_ptr + first_slot * D, D, DQP)
            for piece in tl.range(first, complete, stride, num_stages=STAGES):
                slot = row_head * num_blocks + piece // PARTS
                a0, a1, a2, a3, zero_point = block_operand(q0, q1, q2, q3, h0, h1, h2, h3, PTX)
                following = row_head * num_blocks + tl.minimum(piece + stride, complete - 1) // PARTS
                h0, h1, h2, h3 = load_half_steps(half_step_ptr + following * D, D, DQP)
                tl.store(zero_point_ptr + slot * G + o_g, zero_point, mask=o_g < G)
                token = slot * BLOCK + piece % PARTS * (BLOCK // PARTS)
                for part in tl.static_range(BLOCK // PARTS // TILE):
                    p_codes = codes_ptr + (token + part * TILE) * (D // 4)
                    products = code_products(p_codes, a0, a1, a2, a3, D, DQP, TILE, PTX, SUBNORMAL)
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


NEAR_TILE = 32
"""Tokens of a near piece: what one warp takes at once, and a divisor of every block size."""


def near_tiles(method: FFD) -> tuple[int, int]:
    """Tiles that may hold sink tokens and tiles that may hold local ones (a window may straddle one more)."""
    return triton.cdiv(method.n_sink, NEAR_TILE), triton.cdiv(method.n_local, NEAR_TILE) + 1


def scan_workers(device: torch.device) -> int:
    """Scan programs that run at once; a head may need one more for its odd blocks."""
    return SCAN_WARPS * hardware(device).multiprocessors


@dataclass(frozen=True)
class ScanScratch:
    """What one FFD step hands from launch to launch."""

    unit_max: Tensor
    """float32 [B * Hkv, units, G]: largest thumbnail score of each unit, log2 units; stale beyond the length."""
    unit: int
    """Tokens of a unit: a sub-block, or the half of one."""
    parts: int
    """Pieces of a block that different scan programs take."""
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
        tokens = layer.codes.shape[2]
        # Where warps are plenty, two share a block: its scan is a matter of latency then.
        halves = m.block_size // 2 >= SCAN_TILE and 2 * row_heads * tokens // m.block_size <= scan_workers(g.device)
        unit = min(m.test_size, m.block_size // 2) if halves else m.test_size
        units = tokens // m.test_size
        # One wave. Of many programs a head's tail is one; of few, the slot that its short program soon leaves is
        # better used again by a split.
        slots = ATTEND_PROGRAMS * hardware(g.device).multiprocessors // row_heads
        splits = max(1, min(slots - 1 if slots > 8 else slots, units))

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(row_heads, *shape, dtype=dtype, device=g.device)

        return cls(
            unit_max=empty(tokens // unit, g.group_size, dtype=torch.float32),
            unit=unit,
            parts=2 if halves else 1,
            zero_point=empty(layer.half_step.shape[2], g.group_size, dtype=torch.float32),
            near_max=empty(sum(near_tiles(m)), g.group_size, dtype=torch.float32),
            kept_list=empty(splits, triton.cdiv(tokens // 16, splits), dtype=torch.int32),
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
    workers = max(scan_workers(q.device) - num_near, scan_workers(q.device) // 2)
    workers = min(workers, row_heads * num_blocks * scratch.parts) + row_heads
    refine = m.residual if m.pseudo_max == "refined" else "none"
    registers = {"maxnreg": SCAN_REGISTERS} if gpu.ptx else {}
    _ffd_scan_kernel[(num_near + workers,)](
        q, layer.codes, layer.half_step, stored_residual(layer), layer.tail, layer.lengths,
        scratch.unit_max, scratch.zero_point, scratch.near_max, scale * LOG2_E.value, g.batch_size, num_blocks,
        HKV=g.num_kv_heads, G=g.group_size, D=d, GP=padded(g.group_size, 8), DP=padded(d, 16), DQP=padded(d // 4, 16),
        BLOCK=m.block_size, SUB=scratch.unit, TILE=tile, UNITS=max(1, tile // scratch.unit), NEAR_TILE=NEAR_TILE,
        ROWS=padded(g.batch_size, 1), N_SINK=m.n_sink, N_LOCAL=m.n_local, SINK_TILES=near_tiles(m)[0], PIECES=pieces,
        RESIDUAL=RESIDUAL_KINDS[refine], PARTS=scratch.parts, STAGES=SCAN_STAGES, COMPUTE=compute_dtype(g.dtype),
        PTX=gpu.ptx, SUBNORMAL=gpu.subnormals, PDL=gpu.dependent_launch,
        num_warps=1, **registers, **gpu.launch_options,
    )  # fmt: skip
