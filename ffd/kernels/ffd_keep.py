"""FFD's keep test, made by every attending program for itself.

Sub-blocks are tested by the scan's maxima; those that hold sink or local tokens also by these tokens' refined
scores, which the pseudo-maximum is taken from. The latter are a few pieces of NEAR_TILE tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.common import LOG2_E


@triton.jit
def load_unit_maxima(unit_max_ptr, unit, seen, G, FINE: tl.constexpr, GP: tl.constexpr):
    """Largest of the FINE maxima of each sub-block ``unit`` [N], fp32 [N, GP]; -inf where not ``seen`` [N]."""
    o_g = tl.arange(0, GP)
    mask = seen[:, None] & (o_g < G)[None, :]
    p_max = unit_max_ptr + unit[:, None] * (FINE * G) + o_g[None, :]
    b_max = tl.load(p_max, mask=mask, other=float("-inf"))
    for fine in tl.static_range(1, FINE):
        b_max = tl.maximum(b_max, tl.load(p_max + fine * G, mask=mask, other=float("-inf")))
    return b_max


@triton.jit
def load_near_pieces(
    near_max_ptr, length, quantised, G,
    SUB: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr, N_LOCAL: tl.constexpr,
    PP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The near pieces' best scores, fp32 [PP, GP], and their sub-blocks, int32 [PP], -1 for the tail's."""
    o_n = tl.arange(0, PP)
    o_g = tl.arange(0, GP)
    mask = (o_n < PIECES)[:, None] & (o_g < G)[None, :]
    b_near = tl.load(near_max_ptr + o_n[:, None] * G + o_g[None, :], mask=mask, other=float("-inf"))
    first_local = tl.maximum(length - N_LOCAL, 0) // NEAR_TILE
    start = tl.where(o_n < SINK_TILES, o_n, first_local + o_n - SINK_TILES) * NEAR_TILE
    return b_near, tl.where((o_n < PIECES) & (start < quantised), start // SUB, -1)


@triton.jit
def collect_kept(
    unit_max_ptr, b_near, near_unit, delta, num_units, list_ptr, kept_ptr, split, num_splits, G,
    FINE: tl.constexpr, PARTS: tl.constexpr, PP: tl.constexpr, GP: tl.constexpr, CHUNK: tl.constexpr,
    NEAR_TEST: tl.constexpr, RETURN_KEPT: tl.constexpr,
):  # fmt: skip
    """Test every sub-block against the pseudo-maximum and list this split's share of the kept ones, in tiles.

    b_near [PP, GP] and near_unit [PP] are the near pieces, delta [GP] the margins, log2 units. A sub-block is
    kept if it passes for any head. Its PARTS tiles are dealt out to the splits in turn, so that their work is
    even to a tile. Returns how many are kept in all, and for how many each head passes, int32 [GP].
    """
    o_g = tl.arange(0, GP)
    num_kept = tl.zeros([], tl.int32)
    passes = tl.zeros([CHUNK, GP], tl.int32)
    # Loaded a turn ahead, the first before the threshold is worked out: one memory latency less.
    o_u = tl.arange(0, CHUNK)
    b_next = load_unit_maxima(unit_max_ptr, o_u, o_u < num_units, G, FINE, GP)
    if NEAR_TEST:
        b_near_unit = load_unit_maxima(unit_max_ptr, near_unit, near_unit >= 0, G, FINE, GP)
    threshold = tl.max(b_near, 0) - delta
    for start in range(0, num_units, CHUNK):
        b_max = b_next
        unit = start + o_u
        b_next = load_unit_maxima(unit_max_ptr, unit + CHUNK, unit + CHUNK < num_units, G, FINE, GP)
        seen = (unit < num_units)[:, None] & (o_g < G)[None, :]
        passed = ((b_max >= threshold[None, :]) & seen).to(tl.int32)
        passes += passed
        kept = tl.max(passed, 1)
        deal_out(unit, kept, num_kept, list_ptr, split, num_splits, PARTS)
        num_kept += tl.sum(kept, 0)
        if RETURN_KEPT:  # every split writes the same
            tl.store(kept_ptr + unit[:, None] * G + o_g[None, :], passed.to(tl.uint8), mask=seen)
    num_passes = tl.sum(passes, 0)
    if NEAR_TEST:
        o_n = tl.arange(0, PP)
        valid = (near_unit >= 0)[:, None] & (o_g < G)[None, :]
        by_scan = ((b_near_unit >= threshold[None, :]) & valid).to(tl.int32)
        by_near = ((b_near >= threshold[None, :]) & valid).to(tl.int32)
        # [PP, PP, GP]: whether an earlier piece of the same sub-block brings the head
        earlier = (near_unit[:, None] == near_unit[None, :]) & (o_n[None, :] < o_n[:, None])
        brought = tl.max(tl.where(earlier[:, :, None], by_near[None, :, :], 0), 1)
        gained = tl.where((by_scan == 0) & (brought == 0), by_near, 0)
        kept = tl.where((tl.max(by_scan, 1) == 0) & (tl.max(brought, 1) == 0), tl.max(by_near, 1), 0)
        deal_out(near_unit, kept, num_kept, list_ptr, split, num_splits, PARTS)
        num_kept += tl.sum(kept, 0)
        num_passes += tl.sum(gained, 0)
        if RETURN_KEPT:
            tl.debug_barrier()  # behind this program's zeros; every program ends with these ones
            tl.store(kept_ptr + near_unit[:, None] * G + o_g[None, :], gained.to(tl.uint8), mask=gained > 0)
    tl.debug_barrier()  # the list is read back by other threads of this program
    return num_kept, num_passes


@triton.jit
def deal_out(unit, kept, num_kept, list_ptr, split, num_splits, PARTS: tl.constexpr):
    """List this split's turns among the tiles of the sub-blocks ``unit`` [N] with ``kept`` [N] > 0."""
    rank = num_kept + tl.cumsum(kept, 0) - 1
    for part in tl.static_range(PARTS):
        turn = rank * PARTS + part
        mine = (kept > 0) & (turn % num_splits == split)
        tl.store(list_ptr + turn // num_splits, unit * PARTS + part, mask=mine)


@triton.jit
def drop_heads(
    scores, unit, unit_max_ptr, b_near, near_unit, delta_ptr, G,
    FINE: tl.constexpr, GM: tl.constexpr, NEAR_TEST: tl.constexpr,
):  # fmt: skip
    """Scores [GM, TILE] of a kept sub-block, -inf for the heads that it does not pass for.

    b_near [PP, GM] and near_unit [PP] are the near pieces.
    """
    o_g = tl.arange(0, GM)
    m_g = o_g < G
    delta = tl.load(delta_ptr + o_g, mask=m_g, other=0.0)
    b_max = tl.load(unit_max_ptr + unit * (FINE * G) + o_g, mask=m_g, other=float("-inf"))
    for fine in tl.static_range(1, FINE):
        b_fine = tl.load(unit_max_ptr + (unit * FINE + fine) * G + o_g, mask=m_g, other=float("-inf"))
        b_max = tl.maximum(b_max, b_fine)
    if NEAR_TEST:
        own = tl.where((near_unit == unit)[:, None], b_near, float("-inf"))
        b_max = tl.maximum(b_max, tl.max(own, 0))
    passes = b_max >= tl.max(b_near, 0) - delta * LOG2_E
    return tl.where(passes[:, None], scores, float("-inf"))
