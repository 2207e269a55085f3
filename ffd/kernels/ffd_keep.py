"""FFD's keep test: a launch in which a program per kv head lists the tiles to attend to.

Sub-blocks are tested by the scan's maxima; those that hold sink or local tokens also by these tokens' refined
scores, which the pseudo-maximum is taken from. The latter come in pieces of NEAR_TILE tokens, first SINK_TILES
that may hold sink tokens, then those that may hold local ones; a sub-block has SUB / NEAR_TILE of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E, count_selective_step, follow_previous_launch
from ffd.kernels.ffd_scratch import FFDScratch, near_tile, near_tiles
from ffd.kernels.launch import hardware, padded, unit_chunk

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


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
    unit_max_ptr, threshold, b_near, near_unit, num_units, list_ptr, kept_ptr, G,
    FINE: tl.constexpr, PARTS: tl.constexpr, GP: tl.constexpr, CHUNK: tl.constexpr, NEAR_TEST: tl.constexpr,
    WRITE_KEPT: tl.constexpr,
):  # fmt: skip
    """Test every sub-block against ``threshold`` [GP] and list the kept ones, PARTS tiles each.

    b_near [NEAR_UNITS, GP] and near_unit [NEAR_UNITS] are from `load_near_units`. A sub-block is kept if it passes
    for any head. Returns how many are kept, and for how many each head passes, int32 [GP].
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
        list_tiles(near_unit, near_kept, num_kept, list_ptr, PARTS)
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
        list_tiles(unit, kept, num_kept, list_ptr, PARTS)
        num_kept += tl.sum(kept, 0)
        if WRITE_KEPT:
            tl.store(kept_ptr + unit[:, None] * G + o_g[None, :], passed.to(tl.uint8), mask=seen)
    if NEAR_TEST and WRITE_KEPT:
        tl.debug_barrier()  # behind the zeros
        tl.store(kept_ptr + near_unit[:, None] * G + o_g[None, :], gained.to(tl.uint8), mask=gained > 0)
    return num_kept, num_passes + tl.sum(passes, 0)


@triton.jit
def list_tiles(unit, kept, num_kept, list_ptr, PARTS: tl.constexpr):
    """Append the tiles of the sub-blocks ``unit`` [N] with ``kept`` [N] > 0 to a list of ``num_kept`` sub-blocks."""
    rank = num_kept + tl.cumsum(kept, 0) - 1
    for part in tl.static_range(PARTS):
        tl.store(list_ptr + rank * PARTS + part, unit * PARTS + part, mask=kept > 0)


@triton.jit(do_not_specialize=["num_blocks", "list_size"])
def _ffd_keep_kernel(
    lengths_ptr, delta_ptr, unit_max_ptr, near_max_ptr, list_ptr, count_ptr, kept_ptr, ledger_ptr, active_ptr,
    num_blocks, list_size,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, FINE: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    N_LOCAL: tl.constexpr, PP: tl.constexpr, NEAR_UNITS: tl.constexpr, NEAR_TEST: tl.constexpr,
    WRITE_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,)."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    complete = tl.maximum(length - 1, 0) // BLOCK
    o_g = tl.arange(0, GP)
    delta = tl.load(delta_ptr + (row_head % HKV) * G + o_g, mask=o_g < G, other=0.0)
    follow_previous_launch(PDL)  # the scan; lengths and margins are older than it
    p_near = near_max_ptr + row_head * PIECES * G
    threshold = pseudo_maximum(p_near, G, PIECES, PP, GP) - delta * LOG2_E
    b_near, near_unit = load_near_units(
        p_near, length, complete * BLOCK, G, SUB, NEAR_TILE, SINK_TILES, PIECES, N_LOCAL, NEAR_UNITS, GP
    )
    units = num_blocks.to(tl.int64) * (BLOCK // SUB)
    num_kept, num_passes = collect_kept(
        unit_max_ptr + row_head * units * FINE * G, threshold, b_near, near_unit, complete * (BLOCK // SUB),
        list_ptr + row_head * list_size, kept_ptr + row_head * units * G, G, FINE, SUB // TILE, GP, CHUNK, NEAR_TEST,
        WRITE_KEPT,
    )  # fmt: skip
    tl.store(count_ptr + row_head, num_kept * (SUB // TILE))
    count_selective_step(
        ledger_ptr, active_ptr, row, row_head, length, complete * BLOCK, num_kept * SUB, num_passes * SUB,
        length - complete * BLOCK, G, GP,
    )  # fmt: skip


def ffd_keep(layer: FFDLayer, scratch: FFDScratch, kept: Tensor | None) -> None:
    """Launch the keep test on what `ffd_scan` left; fills ``scratch.kept_list`` and ``tiles``, and counts the step.

    ``kept`` uint8 [B, Hkv, sub-blocks, G], if given, gets for which heads each complete sub-block passes.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(g.device)
    units, pieces = layer.codes.shape[2] // m.test_size, scratch.near_max.shape[1]
    group = g.group_size
    _ffd_keep_kernel[(g.batch_size * g.num_kv_heads,)](
        layer.lengths, layer.delta_nats, scratch.unit_max, scratch.near_max, scratch.kept_list, scratch.tiles,
        scratch.tiles if kept is None else kept, layer.ledger.counters, layer.ledger.active,
        layer.half_step.shape[2], scratch.kept_list.shape[1],
        HKV=g.num_kv_heads, G=group, GP=padded(group, 1), BLOCK=m.block_size, SUB=m.test_size, TILE=scratch.tile,
        CHUNK=unit_chunk(units, group), FINE=m.test_size // scratch.unit, NEAR_TILE=near_tile(m),
        SINK_TILES=near_tiles(m)[0], PIECES=pieces, N_LOCAL=m.n_local, PP=padded(pieces, 1),
        NEAR_UNITS=near_unit_slots(m.test_size, near_tile(m), *near_tiles(m)), NEAR_TEST=m.pseudo_max == "refined",
        WRITE_KEPT=kept is not None, PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip


def near_unit_slots(sub_block: int, near_tile: int, sink_tiles: int, local_tiles: int) -> int:
    """NEAR_UNITS: sub-blocks that the sink tiles and any run of local tiles may touch, a power of two."""
    tiles = sub_block // near_tile
    return padded(triton.cdiv(sink_tiles, tiles) + triton.cdiv(local_tiles - 1, tiles) + 1, 1)
