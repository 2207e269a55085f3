"""FFD's scan: score every 2-bit thumbnail, keep each sub-block's maximum, and find the pseudo-maximum.

Programs are single warps, so that nothing in the loop waits for another warp and a block's query
operand, ``q * half_step``, is built once where it is used. Tokens are the long side of the tensor-core
product (16 rows) and query heads the short one (8 columns): with G = 4 half of the product is used,
not a quarter. The first ``B * Hkv`` programs compute the pseudo-maximum from the sink, local and tail
tokens; they score those few blocks a second time, which keeps branches out of the scan loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import CONVERTED_UNIT, LOG2_E, SUBNORMAL_UNIT, code_plane, widen_codes
from ffd.kernels.launch import Partials, compute_dtype, hardware, padded

if TYPE_CHECKING:
    from ffd.methods.ffd import FFDLayer


@triton.jit
def load_query_planes(q_ptr, scale_log2, G, D: tl.constexpr, GP: tl.constexpr, DQP: tl.constexpr):
    """Quarters of the scaled query as columns, four fp32 [DQP, GP], plane p times 4**(1 - p)."""
    o_g = tl.arange(0, GP)
    o_c = tl.arange(0, DQP)
    p_q = q_ptr + o_g[None, :] * D + o_c[:, None]
    m_q = (o_g < G)[None, :] & (o_c < D // 4)[:, None]
    q0 = tl.load(p_q, mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q1 = tl.load(p_q + D // 4, mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q2 = tl.load(p_q + 2 * (D // 4), mask=m_q, other=0.0).to(tl.float32) * scale_log2
    q3 = tl.load(p_q + 3 * (D // 4), mask=m_q, other=0.0).to(tl.float32) * scale_log2
    return q0 * 4.0, q1, q2 * 0.25, q3 * 0.0625


@triton.jit
def block_operand(q0, q1, q2, q3, half_step_ptr, D: tl.constexpr, DQP: tl.constexpr):
    """Query times one block's half steps, four fp16 [DQP, GP], and the zero point ``3 * sum(q * h)`` [GP]."""
    o_c = tl.arange(0, DQP)
    m_c = o_c < D // 4
    h0 = tl.load(half_step_ptr + o_c, mask=m_c, other=0.0)
    h1 = tl.load(half_step_ptr + D // 4 + o_c, mask=m_c, other=0.0)
    h2 = tl.load(half_step_ptr + 2 * (D // 4) + o_c, mask=m_c, other=0.0)
    h3 = tl.load(half_step_ptr + 3 * (D // 4) + o_c, mask=m_c, other=0.0)
    a0 = (q0 * h0.to(tl.float32)[:, None]).to(tl.float16)
    a1 = (q1 * h1.to(tl.float32)[:, None]).to(tl.float16)
    a2 = (q2 * h2.to(tl.float32)[:, None]).to(tl.float16)
    a3 = (q3 * h3.to(tl.float32)[:, None]).to(tl.float16)
    whole = a0.to(tl.float32) * 0.25 + a1.to(tl.float32) + a2.to(tl.float32) * 4.0 + a3.to(tl.float32) * 16.0
    return a0, a1, a2, a3, 3.0 * tl.sum(whole, 0)


@triton.jit
def code_products(
    codes_ptr, a0, a1, a2, a3,
    D: tl.constexpr, DQP: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """``sum(2u * q * h)`` of TILE consecutive tokens, fp32 [TILE, GP]: scores short of the zero point."""
    o_t = tl.arange(0, TILE)
    o_c = tl.arange(0, DQP)
    # [TILE, DQP] bytes of four codes
    b_packed = tl.load(codes_ptr + o_t[:, None] * (D // 4) + o_c[None, :], mask=(o_c < D // 4)[None, :], other=0)
    wide = widen_codes(b_packed, PTX)
    acc = tl.dot(code_plane(wide, 0, PTX, SUBNORMAL), a0)
    acc = tl.dot(code_plane(wide, 1, PTX, SUBNORMAL), a1, acc)
    acc = tl.dot(code_plane(wide, 2, PTX, SUBNORMAL), a2, acc)
    acc = tl.dot(code_plane(wide, 3, PTX, SUBNORMAL), a3, acc)
    return acc * (SUBNORMAL_UNIT if SUBNORMAL else CONVERTED_UNIT)


@triton.jit
def near_maximum(
    q0, q1, q2, q3, codes_ptr, half_step_ptr, first_block, last_block, length,
    D: tl.constexpr, GP: tl.constexpr, DQP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Largest thumbnail score [GP] among the sink and local tokens of some blocks."""
    top = tl.full([GP], float("-inf"), tl.float32)
    for block in range(first_block, last_block):
        a0, a1, a2, a3, zero = block_operand(q0, q1, q2, q3, half_step_ptr + block * D, D, DQP)
        for part in tl.static_range(BLOCK // TILE):
            token = block * BLOCK + part * TILE + tl.arange(0, TILE)
            p_codes = codes_ptr + (block * BLOCK + part * TILE) * (D // 4)
            scores = code_products(p_codes, a0, a1, a2, a3, D, DQP, TILE, PTX, SUBNORMAL) - zero[None, :]
            near = (token < N_SINK) | (token >= length - N_LOCAL)
            top = tl.maximum(top, tl.max(tl.where(near[:, None], scores, float("-inf")), 0))
    return top


@triton.jit
def tail_maximum(
    q_ptr, tail_ptr, quantised, length, scale_log2, G, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Largest exact score [GP] among the sink and local tokens of the tail."""
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    # [DP, GP]
    b_q = tl.load(q_ptr + o_g[None, :] * D + o_d[:, None], mask=(o_g < G)[None, :] & m_d[:, None], other=0.0)
    top = tl.full([GP], float("-inf"), tl.float32)
    for start in range(quantised, length, TILE):
        token = start + tl.arange(0, TILE)
        p_k = tail_ptr + (token - quantised)[:, None] * D + o_d[None, :]
        b_k = tl.load(p_k, mask=(token < length)[:, None] & m_d[None, :], other=0.0)
        scores = tl.dot(b_k.to(COMPUTE), b_q.to(COMPUTE), input_precision="ieee") * scale_log2
        near = ((token < N_SINK) | (token >= length - N_LOCAL)) & (token < length)
        top = tl.maximum(top, tl.max(tl.where(near[:, None], scores, float("-inf")), 0))
    return top


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _ffd_scan_kernel(
    q_ptr, codes_ptr, half_step_ptr, tail_ptr, lengths_ptr, unit_max_ptr, near_max_ptr,
    scale_log2, num_rows, num_blocks,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, TAIL_TILE: tl.constexpr, ROWS: tl.constexpr,
    N_SINK: tl.constexpr, N_LOCAL: tl.constexpr, STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv + workers,). Writes unit_max [B, Hkv, units, G] and near_max [B, Hkv, G], log2 units."""
    program = tl.program_id(0)
    num_near = num_rows * HKV
    o_g = tl.arange(0, GP)
    if program < num_near:
        row_head = program.to(tl.int64)
        length = tl.load(lengths_ptr + row_head // HKV)
        complete = length // BLOCK
        p_q = q_ptr + row_head * G * D
        p_codes = codes_ptr + row_head * num_blocks * BLOCK * (D // 4)
        p_half_step = half_step_ptr + row_head * num_blocks * D
        p_tail = tail_ptr + row_head * BLOCK * D
        top = tail_maximum(
            p_q, p_tail, complete * BLOCK, length, scale_log2, G, D, GP, DP, TAIL_TILE, N_SINK, N_LOCAL, COMPUTE
        )
        q0, q1, q2, q3 = load_query_planes(p_q, scale_log2, G, D, GP, DQP)
        sink_end = tl.minimum((N_SINK + BLOCK - 1) // BLOCK, complete)
        local_start = tl.maximum(tl.maximum(length - N_LOCAL, 0) // BLOCK, sink_end)
        for window in range(2):
            first = tl.where(window == 0, 0, local_start)
            last = tl.where(window == 0, sink_end, complete)
            near = near_maximum(
                q0, q1, q2, q3, p_codes, p_half_step, first, last, length,
                D, GP, DQP, BLOCK, TILE, N_SINK, N_LOCAL, PTX, SUBNORMAL,
            )  # fmt: skip
            top = tl.maximum(top, near)
        tl.store(near_max_ptr + row_head * G + o_g, top, mask=o_g < G)
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
            for block in tl.range(first, last, num_stages=STAGES):
                slot = row_head * num_blocks + block
                a0, a1, a2, a3, zero = block_operand(q0, q1, q2, q3, half_step_ptr + slot * D, D, DQP)
                for part in tl.static_range(BLOCK // TILE):
                    p_codes = codes_ptr + (slot * BLOCK + part * TILE) * (D // 4)
                    products = code_products(p_codes, a0, a1, a2, a3, D, DQP, TILE, PTX, SUBNORMAL)
                    # [TILE, GP] -> [TILE / SUB, GP]; the zero point is common to the block, so it follows the maximum
                    unit_max = tl.max(tl.reshape(products, [TILE // SUB, SUB, GP]), 1) - zero[None, :]
                    o_u = slot * (BLOCK // SUB) + part * (TILE // SUB) + tl.arange(0, TILE // SUB)
                    tl.store(unit_max_ptr + o_u[:, None] * G + o_g[None, :], unit_max, mask=(o_g < G)[None, :])
            at += last - first


@dataclass(frozen=True)
class ScanScratch:
    """What one FFD step hands from launch to launch."""

    unit_max: Tensor
    """float32 [B * Hkv, units, G]: largest thumbnail score of each sub-block, log2 units; stale beyond the length."""
    near_max: Tensor
    """float32 [B * Hkv, G]: the pseudo-maximum, log2 units."""
    kept_list: Tensor
    """int32 [B * Hkv, splits, list_size]: sub-blocks of each split."""
    counts: Tensor
    """int32 [B * Hkv, 1 + G]: tokens kept by the group, and those that pass for each head; tail not counted."""
    partials: Partials

    @classmethod
    def allocate(cls, layer: FFDLayer) -> ScanScratch:
        """For a layer's capacity; about two attending programs per multiprocessor."""
        g, m = layer.geometry, layer.method
        row_heads = g.batch_size * g.num_kv_heads
        units = layer.codes.shape[2] // m.test_size
        splits = max(1, min(triton.cdiv(2 * hardware(g.device).multiprocessors, row_heads), units))

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(row_heads, *shape, dtype=dtype, device=g.device)

        return cls(
            unit_max=empty(units, g.group_size, dtype=torch.float32),
            near_max=empty(g.group_size, dtype=torch.float32),
            kept_list=empty(splits, triton.cdiv(units, splits), dtype=torch.int32),
            counts=empty(1 + g.group_size, dtype=torch.int32),
            partials=Partials.allocate(row_heads, splits + 1, g.group_size, g.head_dim, g.device),
        )


def ffd_scan(layer: FFDLayer, q: Tensor, scale: float, scratch: ScanScratch) -> None:
    """Launch the scan: q [B, Hq, d] contiguous; fills ``scratch.unit_max`` and ``scratch.near_max``."""
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    row_heads, num_blocks, d = g.batch_size * g.num_kv_heads, layer.half_step.shape[2], g.head_dim
    # Twelve warps of 18 KB fit a multiprocessor: one wave, whose warps each take a run of blocks.
    workers = max(1, min(12 * gpu.multiprocessors - row_heads, row_heads * num_blocks))
    _ffd_scan_kernel[(row_heads + workers,)](
        q, layer.codes, layer.half_step, layer.tail, layer.lengths, scratch.unit_max, scratch.near_max,
        scale * LOG2_E.value, g.batch_size, num_blocks,
        HKV=g.num_kv_heads, G=g.group_size, D=d, GP=padded(g.group_size, 8), DP=padded(d, 16), DQP=padded(d // 4, 16),
        BLOCK=m.block_size, SUB=m.test_size, TILE=max(m.test_size, min(128, m.block_size)), TAIL_TILE=32,
        ROWS=padded(g.batch_size, 1), N_SINK=m.n_sink, N_LOCAL=m.n_local, STAGES=3,
        COMPUTE=compute_dtype(g.dtype), PTX=gpu.ptx, SUBNORMAL=gpu.subnormals, num_warps=1,
    )  # fmt: skip
