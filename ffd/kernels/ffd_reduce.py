"""Combine the partials of an FFD step: a head's are those of the workers that its tiles fell to, and its tail's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LN_2, follow_previous_launch
from ffd.kernels.ffd_attend import tiles_before
from ffd.kernels.launch import hardware, padded, reduced_channels
from ffd.kernels.split_reduce import split_reduce

if TYPE_CHECKING:
    from ffd.kernels.ffd_scratch import FFDScratch


@triton.jit
def _ffd_reduce_kernel(
    tiles_ptr, max_ptr, sum_ptr, acc_ptr, out_ptr, lse_ptr,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, WORKERS: tl.constexpr,
    ROW_HEADS: tl.constexpr, RP: tl.constexpr, RETURN_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hq, parts of WIDTH channels). max, sum [parts, G]; acc [parts, G, D]; out [B, Hq, D]; lse [B, Hq]."""
    head = tl.program_id(0).to(tl.int64)
    row_head = head // G
    o_d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    o_r = tl.arange(0, RP)
    follow_previous_launch(PDL)
    tail = (WORKERS + ROW_HEADS + row_head) * G + head % G
    top = tl.load(max_ptr + tail)
    total = tl.load(sum_ptr + tail)
    b_tail = tl.load(acc_ptr + tail * D + o_d, mask=o_d < D, other=0.0)
    ends = tl.cumsum(tl.load(tiles_ptr + o_r, mask=o_r < ROW_HEADS, other=0), 0)
    share = tl.maximum(tl.cdiv(tl.max(ends, 0), WORKERS), 1)
    begin, end = tiles_before(ends, row_head, RP)
    first = begin // share
    count = tl.where(end > begin, (end - 1) // share - first + 1, 0)
    out = tl.where(top > float("-inf"), b_tail, 0.0)
    for start in range(0, count, CHUNK):
        o_c = start + tl.arange(0, CHUNK)
        part = (first + row_head + o_c) * G + head % G
        b_max = tl.load(max_ptr + part, mask=o_c < count, other=float("-inf"))
        b_sum = tl.load(sum_ptr + part, mask=o_c < count, other=0.0)
        # A part whose heads all fell short never wrote its accumulator: whatever is there is dropped after the load.
        b_acc = tl.load(acc_ptr + part[:, None] * D + o_d[None, :], mask=(o_c < count)[:, None] & (o_d < D)[None, :])
        new_top = tl.maximum(top, tl.max(b_max, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(b_max - finite_top)
        shrink = tl.exp2(top - finite_top)
        total = total * shrink + tl.sum(tl.where(b_max > float("-inf"), weight * b_sum, 0.0), 0)
        met = (b_max > float("-inf"))[:, None]
        out = out * shrink + tl.sum(tl.where(met, b_acc * weight[:, None], 0.0), 0)
        top = new_top
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + head * D + o_d, out.to(out_ptr.dtype.element_ty), mask=o_d < D)
    if RETURN_LSE:
        tl.store(lse_ptr + head, (top + tl.log2(total)) * LN_2)  # every part writes the same


def ffd_reduce(scratch: FFDScratch, out: Tensor, logsumexp: Tensor | None = None) -> None:
    """Write out [B, Hq, d] and, if given, logsumexp float32 [B, Hq] (natural units) from a step's partials."""
    if not scratch.shared:
        split_reduce(scratch.partials, out, logsumexp)
        return
    gpu = hardware(out.device)
    row_heads, group, d = scratch.tiles.shape[0], scratch.partials.acc.shape[2], out.shape[2]
    heads = row_heads * group
    width = reduced_channels(heads, d, gpu.multiprocessors)
    partials = scratch.partials
    _ffd_reduce_kernel[(heads, triton.cdiv(d, width))](
        scratch.tiles, partials.row_max, partials.row_sum, partials.acc, out, out if logsumexp is None else logsumexp,
        G=group, D=d, WIDTH=width, CHUNK=min(64, max(1, 8192 // width)), WORKERS=scratch.workers, ROW_HEADS=row_heads,
        RP=padded(row_heads, 1), RETURN_LSE=logsumexp is not None, PDL=gpu.dependent_launch, num_warps=4,
        **gpu.launch_options,
    )  # fmt: skip
