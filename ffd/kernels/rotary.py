"""Rotary embedding of one token's queries and keys in one launch, rounded where transformers' function rounds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded


@triton.jit
def _rotated(b_x, b_partner, b_cos, b_sin, dtype: tl.constexpr):
    turned = (b_partner * b_sin).to(dtype).to(tl.float32)
    return (b_x * b_cos).to(dtype).to(tl.float32) + turned


@triton.jit
def _rotate_head(x_ptr, out_ptr, cos_ptr, sin_ptr, D: tl.constexpr, DP: tl.constexpr):
    """One head [D] of one row."""
    o_h = tl.arange(0, DP)
    half: tl.constexpr = D // 2
    m_h = o_h < half
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    low = tl.load(x_ptr + o_h, mask=m_h).to(tl.float32)
    high = tl.load(x_ptr + half + o_h, mask=m_h).to(tl.float32)
    cos_low = tl.load(cos_ptr + o_h, mask=m_h).to(tl.float32)
    cos_high = tl.load(cos_ptr + half + o_h, mask=m_h).to(tl.float32)
    sin_low = tl.load(sin_ptr + o_h, mask=m_h).to(tl.float32)
    sin_high = tl.load(sin_ptr + half + o_h, mask=m_h).to(tl.float32)
    tl.store(out_ptr + o_h, _rotated(low, -high, cos_low, sin_low, dtype).to(dtype), mask=m_h)
    tl.store(out_ptr + half + o_h, _rotated(high, low, cos_high, sin_high, dtype).to(dtype), mask=m_h)


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_row, q_head, k_row, k_head, angle_row,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (Hq + Hkv, B). q, k [B, heads, D]; cos, sin [B or 1, D]."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    p_cos = cos_ptr + row * angle_row
    p_sin = sin_ptr + row * angle_row
    follow_previous_launch(PDL)
    if head < HQ:
        _rotate_head(q_ptr + row * q_row + head * q_head, q_out_ptr + (row * HQ + head) * D, p_cos, p_sin, D, DP)
    else:
        o_k = head - HQ
        _rotate_head(k_ptr + row * k_row + o_k * k_head, k_out_ptr + (row * HKV + o_k) * D, p_cos, p_sin, D, DP)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of each head's channels.

    Multiplications and additions are not contracted: that would leave out the rounding between them.

    Parameters
    ----------
    q, k
        [B, Hq, 1, d] and [B, Hkv, 1, d], any strides but the last.
    cos, sin
        [B or 1, 1, d] in their dtype.

    Returns
    -------
    tuple[Tensor, Tensor]
        q and k rotated, contiguous.
    """
    b, hq, _, d = q.shape
    hkv = k.shape[1]
    gpu = hardware(q.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _rotary_kernel[(hq + hkv, b)](
        q, k, cos, sin, q_out, k_out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), 0 if cos.shape[0] == 1 else d,
        HQ=hq, HKV=hkv, D=d, DP=padded(d // 2, 1),
        PDL=gpu.dependent_launch, num_warps=1, enable_fp_fusion=False, **gpu.launch_options,
    )  # fmt: skip
    return q_out, k_out
