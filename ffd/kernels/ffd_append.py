"""FFD append: write one token per row and, in the step that fills a block, quantise that block on the device.

The same codes, half steps and residuals as `ffd.quantization.quantize_blocks`, bit for bit. Programs own
a few channels of each quarter of head_dim: they write their slice of the token and quantise their slice of
the block, so that no program waits for another and the new key is taken from registers. Single warps, so
that they can ride in the scan's launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import APPEND_PROGRAMS, hardware, padded
from ffd.kernels.unpack import E4M3, EXACT, INT8, RESIDUAL_KINDS, RESIDUAL_STEP
from ffd.quantization import LEVEL_STEP

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


@triton.jit
def round_half_even(x):
    """Nearest integer for |x| < 2**22: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(x):
    """fp32 -> e4m3 bit pattern (uint8), to nearest even, saturating at 448; the same on every GPU."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = round_half_even(magnitude * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (code | tl.where(x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def quantize_plane(
    keys, o_t, o_d, m_d, half_step_ptr, residual_ptr, D: tl.constexpr, STEP: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Codes int32 [BLOCK, W] of one slice of channels ``o_d`` [W]; stores their half steps and residuals.

    keys fp32 [BLOCK, W]; half_step_ptr [D], residual_ptr [BLOCK, D] of this block.
    """
    half_step = (tl.max(tl.abs(keys), 0) * STEP).to(tl.float16)
    tl.store(half_step_ptr + o_d, half_step, mask=m_d)
    h = half_step.to(tl.float32)[None, :]
    codes = (keys > -2.0 * h).to(tl.int32) + (keys >= 0.0).to(tl.int32) + (keys > 2.0 * h).to(tl.int32)
    remainder = keys - (2 * codes - 3).to(tl.float32) * h
    p_residual = residual_ptr + o_t[:, None] * D + o_d[None, :]
    if RESIDUAL == INT8:
        steps = tl.div_rn(remainder, tl.broadcast_to(tl.where(h > 0, h, 1.0) * RESIDUAL_STEP, remainder.shape))
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        tl.store(p_residual, round_half_even(steps).to(tl.int8), mask=m_d[None, :])
    elif RESIDUAL == E4M3:
        tl.store(p_residual, encode_e4m3(remainder), mask=m_d[None, :])
    elif RESIDUAL == EXACT:
        tl.store(p_residual, keys.to(residual_ptr.dtype.element_ty), mask=m_d[None, :])
    return codes


@triton.jit
def load_new_key(
    k_ptr, centre_ptr, row, head, row_head, k_stride_row, k_stride_head, o_d, m_d, D: tl.constexpr, CENTRE: tl.constexpr
):  # fmt: skip
    """Channels ``o_d`` of the token being appended as the tail stores them, in the model's dtype."""
    b_k = tl.load(k_ptr + row * k_stride_row + head * k_stride_head + o_d, mask=m_d, other=0.0)
    if CENTRE:
        centre = tl.load(centre_ptr + row_head * D + o_d, mask=m_d, other=0.0)
        b_k = (b_k.to(tl.float32) - centre).to(b_k.dtype)
    return b_k


@triton.jit
def append_token(
    part, row_head, length,
    k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
    codes_ptr, half_step_ptr, residual_ptr, values_ptr, tail_ptr, centre_ptr, num_blocks,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    RESIDUAL: tl.constexpr, CENTRE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th slice of a kv head, WIDTH channels of each quarter. The token goes to slot ``length - 1``.

    Nothing written here but the token's value is read by the launch it runs in: the new key is taken from its
    source, and a block is scanned from the next step on.
    """
    row = row_head // HKV
    head = row_head % HKV
    position = length - 1
    block = position // BLOCK
    slot = position % BLOCK
    fills = slot == BLOCK - 1
    p_tail = tail_ptr + row_head * BLOCK * D
    p_values = values_ptr + (row_head * num_blocks * BLOCK + position) * D
    p_v = v_ptr + row * v_stride_row + head * v_stride_head
    store = row_head * num_blocks + block
    o_t = tl.arange(0, BLOCK)
    channels = tl.where(length > 0, D // 4, 0)  # an empty row has no slot to write
    for first in range(part * WIDTH, D // 4, PROGRAMS * WIDTH):
        o_c = first + tl.arange(0, WIDTH)
        m_c = o_c < channels
        packed = tl.zeros([BLOCK, WIDTH], tl.int32)
        for plane in tl.static_range(4):
            o_d = plane * (D // 4) + o_c
            tl.store(p_values + o_d, tl.load(p_v + o_d, mask=m_c), mask=m_c)
            b_k = load_new_key(k_ptr, centre_ptr, row, head, row_head, k_stride_row, k_stride_head, o_d, m_c, D, CENTRE)
            tl.store(p_tail + slot * D + o_d, b_k, mask=m_c)
            if fills:
                # [BLOCK, WIDTH]: the stored tail, its last row from registers
                earlier = (o_t < BLOCK - 1)[:, None] & m_c[None, :]
                b_tail = tl.load(p_tail + o_t[:, None] * D + o_d[None, :], mask=earlier, other=0.0).to(tl.float32)
                keys = tl.where((o_t == BLOCK - 1)[:, None], b_k.to(tl.float32)[None, :], b_tail)
                codes = quantize_plane(
                    keys, o_t, o_d, m_c, half_step_ptr + store * D, residual_ptr + store * BLOCK * D, D, STEP, RESIDUAL
                )
                packed |= codes << (2 * plane)
        if fills:
            p_codes = codes_ptr + store * BLOCK * (D // 4)
            tl.store(p_codes + o_t[:, None] * (D // 4) + o_c[None, :], packed.to(tl.uint8), mask=m_c[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _ffd_append_kernel(
    k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
    codes_ptr, half_step_ptr, residual_ptr, values_ptr, tail_ptr, centre_ptr, lengths_ptr, num_blocks,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    RESIDUAL: tl.constexpr, CENTRE: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv, PROGRAMS)."""
    follow_previous_launch(PDL)
    row_head = tl.program_id(0).to(tl.int64)
    append_token(
        tl.program_id(1), row_head, tl.load(lengths_ptr + row_head // HKV),
        k_ptr, v_ptr, k_stride_row, k_stride_head, v_stride_row, v_stride_head,
        codes_ptr, half_step_ptr, residual_ptr, values_ptr, tail_ptr, centre_ptr, num_blocks,
        HKV, D, BLOCK, WIDTH, STEP, RESIDUAL, CENTRE, PROGRAMS,
    )  # fmt: skip


def append_programs(row_heads: int, head_dim: int, block_size: int) -> tuple[int, int]:
    """Programs per kv head, and the channels of each quarter that one takes at once.

    A single warp quantises 512 keys at once in registers. Of many heads each gets few programs: they are
    busy in one step of ``block_size`` and would otherwise keep the scan's from starting.
    """
    width = min(max(1, 512 // block_size), padded(head_dim // 4, 1))
    return max(1, min(APPEND_PROGRAMS // row_heads, triton.cdiv(head_dim // 4, width))), width


def contiguous_channels(x: Tensor) -> Tensor:
    """Any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ffd_append(layer: FFDLayer, keys: Tensor, values: Tensor) -> None:
    """Store one token per row in slot ``lengths - 1`` in a launch of its own; no synchronisation with the host.

    `ffd_scan` does the same within its launch where it is given the token.

    Parameters
    ----------
    layer
        Storage, written in place; its lengths already count the token.
    keys, values
        [B, Hkv, 1, d] in the layer's dtype, any strides.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(keys.device)
    keys, values = contiguous_channels(keys), contiguous_channels(values)
    row_heads = g.batch_size * g.num_kv_heads
    programs, width = append_programs(row_heads, g.head_dim, m.block_size)
    _ffd_append_kernel[(row_heads, programs)](
        keys, values, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        layer.codes, layer.half_step, stored_residual(layer), layer.values, layer.tail,
        layer.half_step if layer.centre is None else layer.centre, layer.lengths, layer.half_step.shape[2],
        HKV=g.num_kv_heads, D=g.head_dim, BLOCK=m.block_size, WIDTH=width, STEP=LEVEL_STEP[m.levels],
        RESIDUAL=RESIDUAL_KINDS[m.residual], CENTRE=layer.centre is not None, PROGRAMS=programs,
        PDL=gpu.dependent_launch,
        num_warps=1, **gpu.launch_options,
    )  # fmt: skip


def stored_residual(layer: FFDLayer) -> Tensor:
    """The residual as kernels take it: e4m3 as bytes, and any tensor where there is none to read."""
    if layer.residual is None:
        return layer.codes
    return layer.residual.view(torch.uint8) if layer.method.residual == "e4m3" else layer.residual
