"""The keep test of the attend kernel: units above their row's threshold, packed into a list with one bit per head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_kept(
    units_ptr, stride, value_ptr, tie_end_ptr, list_ptr, bits_ptr, counts_ptr, first, last, num_units, length, G,
    GP: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr,
    SHARED: tl.constexpr, TIES: tl.constexpr, FORCE_LAST: tl.constexpr,
):  # fmt: skip
    """Test units ``first .. last``; list the kept ones with the heads that keep them; returns their number.

    Adds to ``counts[0]`` the tokens kept by any head and to ``counts[1 + g]`` those of head g.
    """
    o_g = tl.arange(0, GP)
    m_g = o_g < G
    o_row = o_g * (0 if SHARED else 1)  # heads that share a list read the same row
    value = tl.load(value_ptr + o_row, mask=m_g, other=float("inf"))
    num_kept = tl.full([], 0, tl.int32)
    union = tl.full([], 0, tl.int32)
    selected = tl.zeros([GP], tl.int32)
    for start in range(first, last, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        m_u = m_g[:, None] & (unit < last)[None, :]
        # [GP, CHUNK]
        score = tl.load(units_ptr + o_row[:, None] * stride + unit[None, :], mask=m_u, other=float("-inf"))
        if TIES:
            tie_end = tl.load(tie_end_ptr + o_row, mask=m_g, other=0)
            keep = (score > value[:, None]) | ((score == value[:, None]) & (unit[None, :] < tie_end[:, None]))
        else:
            keep = score >= value[:, None]
        keep = keep | (value == float("-inf"))[:, None]
        if FORCE_LAST:
            keep = keep | (unit == num_units - 1)[None, :]
        keep = (keep & m_u).to(tl.int32)
        tokens = tl.minimum(length - unit * UNIT, UNIT)
        any_head = tl.max(keep, 0)
        rank = num_kept + tl.cumsum(any_head, 0) - 1
        tl.store(list_ptr + first + rank, unit, mask=any_head > 0)
        tl.store(bits_ptr + first + rank, tl.sum(keep << o_g[:, None], 0), mask=any_head > 0)
        num_kept += tl.sum(any_head, 0)
        union += tl.sum(any_head * tokens, 0)
        selected += tl.sum(keep * tokens[None, :], 1)
    tl.atomic_add(counts_ptr, union, sem="relaxed")
    tl.atomic_add(counts_ptr + 1 + o_g, selected, mask=m_g, sem="relaxed")
    tl.debug_barrier()  # the list is read back by other threads of this program
    return num_kept
