"""FFD's keep test, made by every attending program for itself.

Sub-blocks are tested by the scan's maxima; those that hold sink or local tokens also by these tokens' refined
scores, which the pseudo-maximum is taken from. The latter come in pieces of NEAR_TILE tokens, first SINK_TILES
that may hold sink tokens, then those that may hold local ones; a sub-block has SUB / NEAR_TILE of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.launch import padded


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
def load_near_units(
    near_max_ptr, length, quantised, G,
    SUB: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr, N_LOCAL: tl.constexpr,
    NEAR_UNITS: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Best near scores of the quantised sub-blocks that may hold sink or local tokens.

    Returns fp32 [NEAR_UNITS, GP], and the sub-blocks int32 [NEAR_UNITS], each once; -1 where there is none.
    """
    TILES: tl.constexpr = SUB // NEAR_TILE  # of a sub-block
    SINK_UNITS: tl.constexpr = (SINK_TILES + TILES - 1) // TILES
    o_n = tl.arange(0, NEAR_UNITS)
    o_g = tl.arange(0, GP)
    first_local = tl.maximum(length - N_LOCAL, 0) // NEAR_TILE
    unit = tl.where(o_n < SINK_UNITS, o_n, first_local // TILES + o_n - SINK_UNITS)
    # In a short context local tokens lie in sink sub-blocks, which are there already.
    valid = (unit * SUB < quantised) & ((o_n < SINK_UNITS) | (unit >= SINK_UNITS))
    b_near = tl.full([NEAR_UNITS, GP], float("-inf"), tl.float32)
    for tile in tl.static_range(TILES):
        sink = unit * TILES + tile
        local = sink - first_local
        p_sink = near_max_ptr + sink[:, None] * G + o_g[None, :]
        m_sink = (valid & (sink < SINK_TILES))[:, None] & (o_g < G)[None, :]
        p_local = near_max_ptr + (SINK_TILES + local)[:, None] * G + o_g[None, :]
        m_local = (valid & (local >= 0) & (local < PIECES - SINK_TILES))[:, None] & (o_g < G)[None, :]
        b_near = tl.maximum(b_near, tl.load(p_sink, mask=m_sink, other=float("-inf")))
        b_near = tl.maximum(b_near, tl.load(p_local, mask=m_local, other=float("-inf")))
    return b_near, tl.where(valid, unit, -1)


@triton.jit
def pseudo_maximum(near_max_ptr, G, PIECES: tl.constexpr, PP: tl.constexpr, GP: tl.constexpr):
    """Largest of the near pieces' scores, fp32 [GP]."""
    o_n = tl.arange(0, PP)
    o_g = tl.arange(0, GP)
    mask = (o_n < PIECES)[:, None] & (o_g < G)[None, :]
    return tl.max(tl.load(near_max_ptr + o_n[:, None] * G + o_g[None, :], mask=mask, other=float("-inf")), 0)


@triton.jit
def collect_kept(
    unit_max_ptr, threshold, b_near, near_unit, num_units, list_ptr, kept_ptr, split, num_splits, G,
    FINE: tl.constexpr, PARTS: tl.constexpr, GP: tl.constexpr, CHUNK: tl.constexpr, NEAR_TEST: tl.constexpr,
    RETURN_KEPT: tl.constexpr,
):  # fmt: skip
    """Test every sub-block against ``threshold`` [GP] and list this split's share of the kept ones, in tiles.

    b_near [NEAR_UNITS, GP] and near_unit [NEAR_UNITS] are from `load_near_units`. A sub-block is kept if it passes
    for any head. Its PARTS tiles are dealt out to the splits in turn, so that their work is even to a tile. Returns
    how many are kept in all, and for how many each head passes, int32 [GP].
    """
    o_g = tl.arange(0, GP)
    o_u = tl.arange(0, CHUNK)
    # Loaded a turn ahead.
    b_next = load_unit_maxima(unit_max_ptr, o_u, o_u < num_units, G, FINE, GP)
    num_kept = tl.zeros([], tl.int32)
    num_passes = tl.zeros([GP], tl.int32)
    if NEAR_TEST:
        b_scan = load_unit_maxima(unit_max_ptr, near_unit, near_unit >= 0, G, FINE, GP)
        valid = (near_unit >= 0)[:, None] & (o_g < G)[None, :]
        by_scan = ((b_scan >= threshold[None, :]) & valid).to(tl.int32)
        gained = tl.where(((b_near >= threshold[None, :]) & valid) & (by_scan == 0), 1, 0)
        near_kept = tl.where(tl.max(by_scan, 1) == 0, tl.max(gained, 1), 0)
        deal_out(near_unit, near_kept, num_kept, list_ptr, split, num_splits, PARTS)
        num_kept += tl.sum(near_kept, 0)
        num_passes += tl.sum(gained, 0)
    passes = tl.zeros([CHUNK, GP], tl.int32)
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
    if NEAR_TEST and RETURN_KEPT:
        tl.debug_barrier()  # behind this program's zeros; every program ends with these ones
        tl.store(kept_ptr + near_unit[:, None] * G + o_g[None, :], gained.to(tl.uint8), mask=gained > 0)
    tl.debug_barrier()  # the list is read back by other threads of this program
    return num_kept, num_passes + tl.sum(passes, 0)


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
    scores, unit, unit_max_ptr, threshold, b_near, near_unit, G,
    FINE: tl.constexpr, GM: tl.constexpr, NEAR_TEST: tl.constexpr,
):  # fmt: skip
    """Scores [GM, TILE] of a kept sub-block, -inf for the heads that it does not pass for.

    threshold [GM]; b_near [NEAR_UNITS, GM] and near_unit [NEAR_UNITS] are from `load_near_units`.
    """
    o_g = tl.arange(0, GM)
    b_max = tl.load(unit_max_ptr + unit * (FINE * G) + o_g, mask=o_g < G, other=float("-inf"))
    for fine in tl.static_range(1, FINE):
        b_fine = tl.load(unit_max_ptr + (unit * FINE + fine) * G + o_g, mask=o_g < G, other=float("-inf"))
        b_max = tl.maximum(b_max, b_fine)
    if NEAR_TEST:
        own = tl.where((near_unit == unit)[:, None], b_near, float("-inf"))
        b_max = tl.maximum(b_max, tl.max(own, 0))
    return tl.where((b_max >= threshold)[:, None], scores, float("-inf"))


def near_unit_slots(sub_block: int, near_tile: int, sink_tiles: int, local_tiles: int) -> int:
    """NEAR_UNITS: sub-blocks that the sink tiles and any run of local tiles may touch, a power of two."""
    tiles = sub_block // near_tile
    return padded(triton.cdiv(sink_tiles, tiles) + triton.cdiv(local_tiles - 1, tiles) + 1, 1)
