"""Thumbnails of any width on the device: quantise a block once it is complete, score a tile of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded

if TYPE_CHECKING:
    from ffd.thumbnails import Thumbnails


@triton.jit
def thumbnail_scores(
    q_ptr, codes_ptr, half_step_ptr, scale_log2, seen, G,
    D: tl.constexpr, GM: tl.constexpr, RBP: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Scores of TILE consecutive thumbnails of one block, fp32 [GM, TILE], log2 units; zero unless ``seen``."""
    planes: tl.constexpr = 8 // BITS
    row_bytes: tl.constexpr = D // planes
    o_g = tl.arange(0, GM)
    o_b = tl.arange(0, RBP)
    o_t = tl.arange(0, TILE)
    m_b = o_b < tl.where(seen, row_bytes, 0)
    # [RBP, TILE] bytes
    packed = tl.load(codes_ptr + o_t[None, :] * row_bytes + o_b[:, None], mask=m_b[:, None], other=0).to(tl.int16)
    scores = tl.zeros([GM, TILE], tl.float32)
    for plane in tl.static_range(planes):
        o_d = plane * row_bytes + o_b
        b_q = tl.load(q_ptr + o_g[:, None] * D + o_d[None, :], mask=(o_g < G)[:, None] & m_b[None, :], other=0.0)
        half_step = tl.load(half_step_ptr + o_d, mask=m_b, other=0.0)
        operand = (b_q.to(tl.float32) * scale_log2).to(tl.float16) * half_step[None, :]
        # Odd integers of at most eight bits are exact in fp16.
        levels = (((packed >> (BITS * plane)) & (2**BITS - 1)) * 2 - (2**BITS - 1)).to(tl.float16)
        scores = tl.dot(operand, levels, scores)
    return scores


@triton.jit
def _thumbnail_append_kernel(
    keys_ptr, codes_ptr, half_step_ptr, lengths_ptr, capacity, num_blocks,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, ceil(row bytes / WIDTH)). keys [B, Hkv, capacity, D]; a program owns WIDTH bytes of each row."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    complete = tl.load(lengths_ptr + row_head // HKV) - 1
    if (complete > 0) & (complete % BLOCK == 0):
        row_bytes: tl.constexpr = D * BITS // 8
        o_b = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        o_t = tl.arange(0, BLOCK)
        m_b = o_b < row_bytes
        block = row_head * num_blocks + complete // BLOCK - 1
        p_keys = keys_ptr + (row_head * capacity + complete - BLOCK) * D
        packed = tl.zeros([BLOCK, WIDTH], tl.int32)
        for plane in tl.static_range(8 // BITS):
            o_d = plane * row_bytes + o_b
            # [BLOCK, WIDTH]
            b_k = tl.load(p_keys + o_t[:, None] * D + o_d[None, :], mask=m_b[None, :], other=0.0).to(tl.float32)
            half_step = (tl.max(tl.abs(b_k), 0) * STEP).to(tl.float16)
            tl.store(half_step_ptr + block * D + o_d, half_step, mask=m_b)
            h = half_step.to(tl.float32)
            steps = tl.div_rn(b_k, tl.broadcast_to((2.0 * tl.where(h > 0, h, 1.0))[None, :], b_k.shape))
            codes = tl.ceil(steps).to(tl.int32) + (steps == 0.0).to(tl.int32) + (2 ** (BITS - 1) - 1)
            packed |= tl.minimum(tl.maximum(codes, 0), 2**BITS - 1) << (BITS * plane)
        p_codes = codes_ptr + block * BLOCK * row_bytes + o_t[:, None] * row_bytes + o_b[None, :]
        tl.store(p_codes, packed.to(tl.uint8), mask=m_b[None, :])


def thumbnail_append(thumbnails: Thumbnails, keys: Tensor, lengths: Tensor) -> None:
    """Quantise the block before each row's newest token, where that token opens one; nothing elsewhere.

    Parameters
    ----------
    thumbnails
        Written in place.
    keys
        [B, Hkv, capacity, d], contiguous: the cache, the newest token stored.
    lengths
        int32 [B] on the device, the newest token counted.
    """
    b, hkv, capacity, d = keys.shape
    gpu = hardware(keys.device)
    bits = thumbnails.bits
    width = min(16, padded(d * bits // 8, 1))
    _thumbnail_append_kernel[(b * hkv, triton.cdiv(d * bits // 8, width))](
        keys, thumbnails.codes, thumbnails.half_step, lengths, capacity, thumbnails.half_step.shape[2],
        HKV=hkv, D=d, BLOCK=thumbnails.block_size, WIDTH=width, BITS=bits, STEP=1.0 / (2**bits - 1),
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
