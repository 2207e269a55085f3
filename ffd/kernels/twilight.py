"""Twilight's decode, up to five launches: bound pages, find the budget, estimate, bisect, attend.

The estimate reads 4-bit keys of selected pages alone, once per kv head, and leaves ``-inf`` elsewhere,
so that the bisection and the attention see one row of scores per query head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.attend import attend_kept
from ffd.kernels.common import LOG2_E, follow_previous_launch
from ffd.kernels.launch import compute_dtype, hardware, padded
from ffd.kernels.quest import rank_pages
from ffd.kernels.thresholds import LOWEST, Threshold, bisect_top_p

if TYPE_CHECKING:
    from ffd.methods.twilight import TwilightLayer


@triton.jit
def _estimate_kernel(
    q_ptr, codes_ptr, minimum_ptr, step_ptr, lengths_ptr, pages_ptr, value_ptr, tie_end_ptr,
    estimates_ptr, maxima_ptr, counts_ptr, scale_log2, capacity, num_pages,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DHP: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, ALL: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs, B * Hkv). codes [B, Hkv, capacity, D / 2]; estimates [B, Hq, capacity], log2 units;
    maxima [B, Hq, programs]; counts [B, Hkv], zeroed by the caller: tokens estimated.
    """
    follow_previous_launch(PDL)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + row_head // HKV)
    o_g = tl.arange(0, GM)
    o_c = tl.arange(0, DHP)
    o_t = tl.arange(0, TILE)
    m_g = o_g < G
    m_c = o_c < D // 2
    heads = row_head * G + o_g
    # halves of the query, [GM, DHP]: a byte holds channels c (low bits) and c + D/2 (high bits)
    p_q = q_ptr + heads[:, None] * D + o_c[None, :]
    q_low = tl.load(p_q, mask=m_g[:, None] & m_c[None, :], other=0.0)
    q_high = tl.load(p_q + D // 2, mask=m_g[:, None] & m_c[None, :], other=0.0)
    q_sum = tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
    q_low, q_high = q_low.to(COMPUTE), q_high.to(COMPUTE)
    if not ALL:
        value = tl.load(value_ptr + heads, mask=m_g, other=float("inf"))
        tie_end = tl.load(tie_end_ptr + heads, mask=m_g, other=0)

    per_program = tl.cdiv(tl.cdiv(length, TILE), num_programs) * TILE
    first = program * per_program
    last = tl.minimum(first + per_program, length)
    top = tl.full([GM], float("-inf"), tl.float32)
    estimated = tl.full([], 0, tl.int32)
    for start in range(first, last, TILE):
        token = start + o_t
        m_t = token < last
        keep = m_g[:, None] & m_t[None, :]
        if not ALL:
            page = token // PAGE
            score = tl.load(pages_ptr + heads[:, None] * num_pages + page[None, :], mask=keep, other=float("-inf"))
            chosen = (score > value[:, None]) | ((score == value[:, None]) & (page[None, :] < tie_end[:, None]))
            keep = keep & (chosen | (value == float("-inf"))[:, None])
        any_head = tl.max(keep.to(tl.int32), 0) > 0
        scores = tl.full([GM, TILE], float("-inf"), tl.float32)
        if tl.sum(any_head.to(tl.int32), 0) > 0:
            slot = row_head * capacity + token
            # [DHP, T] bytes of two codes; tokens that no head keeps are not read
            b_codes = tl.load(
                codes_ptr + slot[None, :] * (D // 2) + o_c[:, None], mask=any_head[None, :] & m_c[:, None], other=0
            )
            products = tl.dot(q_low, (b_codes & 15).to(tl.float32).to(COMPUTE), input_precision="ieee")
            products = tl.dot(q_high, (b_codes >> 4).to(tl.float32).to(COMPUTE), products, input_precision="ieee")
            minimum = tl.load(minimum_ptr + slot, mask=any_head, other=0.0).to(tl.float32)
            step = tl.load(step_ptr + slot, mask=any_head, other=0.0).to(tl.float32)
            exact = (products * step[None, :] + q_sum[:, None] * minimum[None, :]) * scale_log2
            scores = tl.where(keep, exact, float("-inf"))
        tl.store(estimates_ptr + heads[:, None] * capacity + token[None, :], scores, mask=m_g[:, None] & m_t[None, :])
        top = tl.maximum(top, tl.max(scores, 1))
        estimated += tl.sum(any_head.to(tl.int32), 0)
    tl.store(maxima_ptr + heads * num_programs + program, top, mask=m_g)
    tl.atomic_add(counts_ptr + row_head, estimated, sem="relaxed")


def twilight_decode(layer: TwilightLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to the pruned selection: q [B, Hq, d] -> [B, Hq, d]; adds one step to the ledger."""
    q = q.contiguous()
    m = layer.method
    b, num_query_heads, d = q.shape
    hkv, capacity = layer.keys.shape[1:3]
    device = q.device
    if layer.bounds is None:
        pages = torch.empty(b, num_query_heads, 0, dtype=torch.float32, device=device)
        base = Threshold(pages, layer.lengths)  # never read
        scanned = torch.zeros_like(layer.lengths)
    else:
        ranked, base, scanned = rank_pages(
            layer.bounds, q, layer.lengths, scale, budget=m.budget, last_page="eval", pool=False
        )
        pages = ranked.units
    tile = 128
    gpu = hardware(device)
    programs = triton.cdiv(4 * gpu.multiprocessors, b * hkv)
    programs = max(1, min(programs, triton.cdiv(capacity, tile)))
    estimates = torch.empty(b, num_query_heads, capacity, dtype=torch.float32, device=device)
    maxima = torch.empty(b, num_query_heads, programs, dtype=torch.float32, device=device)
    counts = torch.zeros(b, hkv, dtype=torch.int32, device=device)
    group = num_query_heads // hkv
    _estimate_kernel[(programs, b * hkv)](
        q, layer.codes, layer.minimum, layer.code_step, layer.lengths, pages, base.value, base.tie_end,
        estimates, maxima, counts, scale * LOG2_E.value, capacity, pages.shape[2],
        HKV=hkv, G=group, D=d, GM=padded(group, 16), DHP=padded(d // 2, 16), TILE=tile,
        PAGE=m.page_size, ALL=layer.bounds is None, COMPUTE=compute_dtype(q.dtype),
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    threshold = bisect_top_p(estimates, layer.lengths, maxima, m.p)
    if m.search_start == "first_token":
        threshold = Threshold(torch.minimum(threshold.value, estimates[..., 0].clamp(min=LOWEST)))
    return attend_kept(layer, q, scale, estimates, threshold, scanned, union=m.select_per == "group", estimated=counts)
