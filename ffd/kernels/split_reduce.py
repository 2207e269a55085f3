"""Combine split-K partials in a launch of its own, programs for each query head and part of its channels.

The last program of a kv head could do this in the attention launch, and did: it
took 10 us on an H200 where this takes 3. One program ran 1,500 instructions a single time for all heads
of the group, after a fence; here every head has its own, and the launch boundary is the fence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LN_2, follow_previous_launch
from ffd.kernels.launch import Partials, hardware, padded, reduced_channels


@triton.jit
def _split_reduce_kernel(
    max_ptr, sum_ptr, acc_ptr, out_ptr, lse_ptr,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, CHUNK: tl.constexpr,
    RETURN_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hq, parts of WIDTH channels).

    max, sum [B * Hkv, SPLITS, G]; acc [B * Hkv, SPLITS, G, D]; out [B, Hq, D]; lse [B, Hq].
    """
    follow_previous_launch(PDL)
    head = tl.program_id(0).to(tl.int64)
    first = head // G * SPLITS * G + head % G
    o_s = tl.arange(0, SP)
    o_d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    b_max = tl.load(max_ptr + first + o_s * G, mask=o_s < SPLITS, other=float("-inf"))
    b_sum = tl.load(sum_ptr + first + o_s * G, mask=o_s < SPLITS, other=0.0)
    top = tl.max(b_max, 0)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(b_max > float("-inf"), tl.exp2(b_max - finite_top) * b_sum, 0.0), 0)
    acc = tl.zeros([CHUNK, WIDTH], tl.float32)
    for start in range(0, SPLITS, CHUNK):
        o_c = start + tl.arange(0, CHUNK)
        b_some = tl.load(max_ptr + first + o_c * G, mask=o_c < SPLITS, other=float("-inf"))
        # A split that met nothing never wrote its accumulator: whatever is there, NaN included, is dropped after
        # the load, which thus need not wait for the maximum.
        p_acc = acc_ptr + (first + o_c * G)[:, None] * D + o_d[None, :]
        b_acc = tl.load(p_acc, mask=(o_c < SPLITS)[:, None] & (o_d < D)[None, :], other=0.0)
        met = (b_some > float("-inf"))[:, None]
        acc += tl.where(met, b_acc * tl.exp2(b_some - finite_top)[:, None], 0.0)
    out = tl.sum(acc, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * D + o_d, out.to(out_ptr.dtype.element_ty), mask=o_d < D)
    if RETURN_LSE:
        tl.store(lse_ptr + head, (top + tl.log2(total)) * LN_2)  # every part writes the same


def split_reduce(partials: Partials, out: Tensor, logsumexp: Tensor | None = None) -> None:
    """Write out [B, Hq, d] and, if given, logsumexp float32 [B, Hq] (natural units) from a step's partials."""
    gpu = hardware(out.device)
    _, splits, group, d = partials.acc.shape
    heads = out.shape[0] * out.shape[1]
    width = reduced_channels(heads, d, gpu.multiprocessors)
    chunk = min(padded(splits, 1), max(1, 8192 // width))
    _split_reduce_kernel[(heads, triton.cdiv(d, width))](
        partials.row_max, partials.row_sum, partials.acc, out, out if logsumexp is None else logsumexp,
        G=group, D=d, WIDTH=width, SPLITS=splits, SP=padded(splits, 1), CHUNK=chunk,
        RETURN_LSE=logsumexp is not None, PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
