"""Dense decode: split-K attention of one token over the whole cache, query heads of a kv head packed.

Splits are sized on the device from each row's length, so that a captured graph serves all lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    LOG2_E,
    count_selective_step,
    follow_previous_launch,
    online_softmax_by_column,
    store_partial,
)
from ffd.kernels.launch import Partials, compute_dtype, fit_tile, hardware, padded, scratch_of
from ffd.kernels.split_reduce import split_reduce
from ffd.ledger import Ledger


@triton.jit
def _dense_decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, stride_row, stride_head,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, COMPUTE: tl.constexpr, GP: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, B * Hkv). q [B, Hq, D]; k, v [B, Hkv, C, D]; lengths [B]; partials as in `Partials`."""
    follow_previous_launch(PDL)
    split = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    m_d = o_d < D
    head_base = row * stride_row + (row_head % HKV) * stride_head

    # [GM, DP]
    p_q = q_ptr + (row_head * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_g < G)[:, None] & m_d[None, :], other=0.0).to(COMPUTE)

    row_max = tl.full([GM], float("-inf"), tl.float32)
    sums = tl.zeros([GM, TILE], tl.float32)
    acc = tl.zeros([GM, DP], tl.float32)
    # Splits take tiles in turn: runs of their own, a power of two apart, would all meet in a few memory channels.
    for start in tl.range(split * TILE, length, SPLITS * TILE, num_stages=STAGES):
        base = head_base + start * D  # within one head: 32 bits hold 16M tokens of 128 channels
        m_t = start + o_t < length
        # keys [DP, T], values [T, DP]; slots beyond the length may hold NaN and are never loaded
        b_k = tl.load(k_ptr + base + o_t[None, :] * D + o_d[:, None], mask=m_t[None, :] & m_d[:, None], other=0.0)
        scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
        scores = tl.where(m_t[None, :], scores, float("-inf"))
        b_v = tl.load(v_ptr + base + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
        row_max, sums, acc = online_softmax_by_column(row_max, sums, acc, scores, b_v.to(COMPUTE))

    p_max = max_ptr + row_head * SPLITS * G
    p_sum = sum_ptr + row_head * SPLITS * G
    p_acc = acc_ptr + row_head * SPLITS * G * D
    store_partial(p_max, p_sum, p_acc, split, row_max, tl.sum(sums, 1), acc, G, D, GM, DP)
    if split == 0:
        # every head selects all of the context, which nothing scanned
        count_selective_step(
            ledger_ptr, active_ptr, row, row_head, length, 0, length, tl.full([GP], 0, tl.int32) + length, 0, G, GP
        )


def dense_decode(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, ledger: Ledger) -> Tensor:
    """Attend to all tokens of each row.

    Parameters
    ----------
    q
        [B, Hq, d], fp16, bf16 or fp32.
    keys, values
        [B, Hkv, capacity, d], contiguous in the last two dimensions.
    lengths
        int32 [B] on the device, read by the kernel.
    scale
        Softmax scale.
    ledger
        Counters of the layer; one step is added per active row.

    Returns
    -------
    Tensor
        [B, Hq, d] in the dtype of ``q``.
    """
    q = q.contiguous()
    b, num_query_heads, d = q.shape
    hkv = keys.shape[1]
    group = num_query_heads // hkv
    gpu = hardware(q.device)
    tile, buffers = fit_tile(64, 2 * padded(d, 16) * keys.element_size(), gpu.shared_memory // 2, 3)
    most = triton.cdiv(keys.shape[2], tile)
    splits = max(1, min(2 * gpu.multiprocessors // (b * hkv), most))  # one wave
    partials = scratch_of(ledger, lambda: Partials.allocate(b * hkv, splits, group, d, q.device))
    out = torch.empty_like(q)
    _dense_decode_kernel[(splits, b * hkv)](
        q, keys, values, lengths, partials.row_max, partials.row_sum, partials.acc,
        ledger.counters, ledger.active, scale * LOG2_E.value, keys.stride(0), keys.stride(1),
        HKV=hkv, G=group, D=d, GM=padded(group, 16), DP=padded(d, 16), TILE=tile,
        STAGES=buffers + 1, COMPUTE=compute_dtype(q.dtype), GP=padded(group, 1), SPLITS=splits,
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    split_reduce(partials, out)
    return out
