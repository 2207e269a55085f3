"""RMSNorm of a few rows in one launch, rounded where transformers' modules round."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows,). x, out [rows, SIZE]; weight [SIZE]."""
    o_c = tl.arange(0, PADDED)
    m_c = o_c < SIZE
    b_w = tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    follow_previous_launch(PDL)
    row = tl.program_id(0).to(tl.int64) * SIZE
    b_x = tl.load(x_ptr + row + o_c, mask=m_c, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / SIZE + epsilon)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    normal = (b_x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row + o_c, (b_w * normal).to(dtype), mask=m_c)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``weight * x / sqrt(mean(x ** 2) + epsilon)`` over the last dimension.

    Parameters
    ----------
    x
        [..., C], any strides.
    weight
        [C] in the dtype of ``x``.
    epsilon
        Added to the mean square.

    Returns
    -------
    Tensor
        [..., C], contiguous.
    """
    gpu = hardware(x.device)
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    flat = flat if flat.stride(-1) == 1 and flat.stride(0) == size else flat.contiguous()
    out = flat.new_empty(flat.shape)
    _rms_norm_kernel[(flat.shape[0],)](
        flat, weight, out, epsilon, SIZE=size, PADDED=padded(size, 1), PDL=gpu.dependent_launch,
        num_warps=min(16, max(1, padded(size, 1) // 256)), **gpu.launch_options,
    )  # fmt: skip
    return out.view(x.shape)
