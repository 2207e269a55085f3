"""The keep test of the attend kernel: units above their row's threshold, packed into a list with one bit per head."""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.common import FIRST_HEAD, UNION


@triton.jit
def list_kept(
    units_ptr, stride, value, tie_end_ptr, list_ptr, bits_ptr, counters_ptr, active, split, num_units, forced, length,
    G, GP: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    SHARED: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    """Test every SPLITS-th chunk of units; list the kept ones with the heads that keep them; returns their number.

    ``value`` [GP] are the rows' thresholds; units from ``forced`` on are kept by all. Chunks are dealt out in turn
    because what is kept lies close together. Adds tokens kept by any head, and by each, to the ledger row.
    """
    o_g = tl.arange(0, GP)
    m_g = o_g < G
    o_row = o_g * (0 if SHARED else 1)  # heads that share a list read the same row
    num_kept = tl.full([], 0, tl.int32)
    union = tl.full([], 0, tl.int32)
    selected = tl.zeros([GP], tl.int32)
    for start in range(split * CHUNK, num_units, SPLITS * CHUNK):
        unit = start + tl.arange(0, CHUNK)
        m_u = m_g[:, None] & (unit < num_units)[None, :]
        # [GP, CHUNK]
        score = tl.load(units_ptr + o_row[:, None] * stride + unit[None, :], mask=m_u, other=float("-inf"))
        if TIES:
            tie_end = tl.load(tie_end_ptr + o_row, mask=m_g, other=0)
            keep = (score > value[:, None]) | ((score == value[:, None]) & (unit[None, :] < tie_end[:, None]))
        else:
            keep = score >= value[:, None]
        keep = keep | (value == float("-inf"))[:, None] | (unit >= forced)[None, :]
        keep = (keep & m_u).to(tl.int32)
        tokens = tl.minimum(length - unit * UNIT, UNIT)
        any_head = tl.max(keep, 0)
        rank = num_kept + tl.cumsum(any_head, 0) - 1
        tl.store(list_ptr + rank, unit, mask=any_head > 0)
        tl.store(bits_ptr + rank, tl.sum(keep << o_g[:, None], 0), mask=any_head > 0)
        num_kept += tl.sum(any_head, 0)
        union += tl.sum(any_head * tokens, 0)
        selected += tl.sum(keep * tokens[None, :], 1)
    tl.atomic_add(counters_ptr + UNION, union * active, sem="relaxed")
    tl.atomic_add(counters_ptr + FIRST_HEAD + o_g, selected * active, mask=m_g, sem="relaxed")
    tl.debug_barrier()  # the list is read back by other threads of this program
    return num_kept
