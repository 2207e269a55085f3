"""FFD's keep test: which sub-blocks a kv head attends to, as a list of tiles.

Sub-blocks are tested by the scan's maxima; those that hold sink or local tokens also by these tokens' refined
scores, which the pseudo-maximum is taken from. The latter come in pieces of NEAR_TILE tokens, first SINK_TILES
that may hold sink tokens, then those that may hold local ones; a sub-block has SUB / NEAR_TILE of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E, count_selective_step, follow_previous_launch, quantised_tokens
from ffd.kernels.ffd_scratch import FFDScratch, near_tile, near_tiles
from ffd.kernels.launch import KEEP_WARPS, hardware, padded, unit_chunk

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


NEAR_IN_REGISTERS = tl.constexpr(8)
"""Near sub-blocks whose scores every thread keeps; of more they are loaded again where they are needed."""


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
def load_near_unit(
    near_max_ptr, index, length, G,
    NEAR_TILE: tl.constexpr, TILES: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    N_LOCAL: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Best score of the near tokens of one sub-block, fp32 [1, GP], and the sub-block.

    The first indices are those of sink tokens, the others those that the local window may touch, the tail's too;
    where both are one sub-block, each counts its own tokens. Every thread loads what it needs, so that nothing
    crosses threads.
    """
    SINK_UNITS: tl.constexpr = (SINK_TILES + TILES - 1) // TILES
    o_g = tl.arange(0, GP)[None, :]
    first_local = tl.maximum(length - N_LOCAL, 0) // NEAR_TILE
    sink = index < SINK_UNITS
    unit = tl.where(sink, index, first_local // TILES + index - SINK_UNITS)
    first = unit * TILES - tl.where(sink, 0, first_local)
    num_tiles = tl.where(sink, SINK_TILES, PIECES - SINK_TILES)
    p_near = near_max_ptr + (first + tl.where(sink, 0, SINK_TILES)) * G + o_g
    b_max = tl.full([1, GP], float("-inf"), tl.float32)
    for tile in tl.static_range(TILES):
        piece = first + tile + tl.zeros([1, GP], tl.int32)
        there = (piece >= 0) & (piece < num_tiles) & (o_g < G)
        b_max = tl.maximum(b_max, tl.load(p_near + tile * G, mask=there, other=float("-inf")))
    return b_max, unit


@triton.jit
def collect_kept(
    unit_max_ptr, near_max_ptr, delta, row_head, length, num_blocks, list_ptr, kept_ptr, turn, turns: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, FINE: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    N_LOCAL: tl.constexpr, NEAR_UNITS: tl.constexpr, NEAR_TEST: tl.constexpr,
    WRITE_KEPT: tl.constexpr,
):  # fmt: skip
    """Test a head's sub-blocks against the pseudo-maximum less ``delta`` [GP] nats; list the kept ones in tiles.

    A sub-block is kept if it passes for any query head. Its tiles are dealt out in ``turns``, of which this program
    lists one, so that work is even to a tile. Returns how many sub-blocks are kept in all, and for how many each
    head passes, int32 [CHUNK, GP], to be summed over the first axis by who needs it.
    """
    PARTS: tl.constexpr = SUB // TILE
    o_g = tl.arange(0, GP)
    o_u = tl.arange(0, CHUNK)
    quantised = quantised_tokens(length, BLOCK)
    num_units = quantised // SUB
    units = num_blocks.to(tl.int64) * (BLOCK // SUB)
    p_units = unit_max_ptr + row_head * units * FINE * G
    p_near = near_max_ptr + row_head * PIECES * G
    p_kept = kept_ptr + row_head * units * G
    TILES: tl.constexpr = SUB // NEAR_TILE
    # All loads that nothing else must precede come first: a reduction between them would cost a memory latency.
    b_next = load_unit_maxima(p_units, o_u, o_u < num_units, G, FINE, GP)
    near = ()
    pseudo_max = tl.full([1, GP], float("-inf"), tl.float32)
    if NEAR_UNITS <= NEAR_IN_REGISTERS:
        for index in tl.static_range(NEAR_UNITS):
            own = load_near_unit(p_near, index, length, G, NEAR_TILE, TILES, SINK_TILES, PIECES, N_LOCAL, GP)
            near = near + (own,)  # type: ignore[assignment]  # noqa: RUF005 (Triton: no starred)
            pseudo_max = tl.maximum(pseudo_max, own[0])
    else:
        for index in tl.range(NEAR_UNITS, num_stages=1):
            own = load_near_unit(p_near, index, length, G, NEAR_TILE, TILES, SINK_TILES, PIECES, N_LOCAL, GP)
            pseudo_max = tl.maximum(pseudo_max, own[0])
    threshold = pseudo_max - delta[None, :] * LOG2_E
    num_kept = tl.zeros([], tl.int32)
    passes = tl.zeros([CHUNK, GP], tl.int32)
    for start in range(0, num_units, CHUNK):
        b_max = b_next
        unit = start + o_u
        # A turn ahead.
        b_next = load_unit_maxima(p_units, unit + CHUNK, unit + CHUNK < num_units, G, FINE, GP)
        seen = (unit < num_units)[:, None] & (o_g < G)[None, :]
        passed = (b_max >= threshold) & seen
        if NEAR_TEST:
            if NEAR_UNITS <= NEAR_IN_REGISTERS:
                for index in tl.static_range(NEAR_UNITS):
                    passed = passed | ((unit == near[index][1])[:, None] & (near[index][0] >= threshold) & seen)
            else:
                for index in tl.range(NEAR_UNITS, num_stages=1):
                    own = load_near_unit(p_near, index, length, G, NEAR_TILE, TILES, SINK_TILES, PIECES, N_LOCAL, GP)
                    passed = passed | ((unit == own[1])[:, None] & (own[0] >= threshold) & seen)
        passed = passed.to(tl.int32)
        passes += passed
        kept = tl.max(passed, 1)
        deal_out(unit, kept, num_kept, list_ptr, turn, turns, PARTS)
        num_kept += tl.sum(kept, 0)
        if WRITE_KEPT:  # every program of the head writes the same
            tl.store(p_kept + unit[:, None] * G + o_g[None, :], passed.to(tl.uint8), mask=seen)
    tl.debug_barrier()  # the list is read back by other threads of this program
    return num_kept, passes


@triton.jit
def deal_out(unit, kept, num_kept, list_ptr, turn, turns: tl.constexpr, PARTS: tl.constexpr):
    """List this turn's tiles of the sub-blocks ``unit`` [N] with ``kept`` [N] > 0, behind ``num_kept`` others."""
    rank = num_kept + tl.cumsum(kept, 0) - 1
    for part in tl.static_range(PARTS):
        tile = rank * PARTS + part
        mine = (kept > 0) & (tile % turns == turn)
        tl.store(list_ptr + tile // turns, unit * PARTS + part, mask=mine)


@triton.jit(do_not_specialize=["num_blocks", "list_size"])
def _ffd_keep_kernel(
    lengths_ptr, delta_ptr, unit_max_ptr, near_max_ptr, list_ptr, tiles_ptr, kept_ptr, ledger_ptr, active_ptr,
    num_blocks, list_size,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, FINE: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    N_LOCAL: tl.constexpr, NEAR_UNITS: tl.constexpr, NEAR_TEST: tl.constexpr,
    WRITE_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * Hkv,)."""
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row_head // HKV)
    o_g = tl.arange(0, GP)
    delta = tl.load(delta_ptr + (row_head % HKV) * G + o_g, mask=o_g < G, other=0.0)
    follow_previous_launch(PDL)  # the scan; lengths and margins are older than it
    num_kept, passes = collect_kept(
        unit_max_ptr, near_max_ptr, delta, row_head, length, num_blocks, list_ptr + row_head * list_size, kept_ptr,
        0, 1, G, GP, BLOCK, SUB, TILE, CHUNK, FINE, NEAR_TILE, SINK_TILES, PIECES, N_LOCAL, NEAR_UNITS, NEAR_TEST,
        WRITE_KEPT,
    )  # fmt: skip
    tl.store(tiles_ptr + row_head, num_kept * (SUB // TILE))
    quantised = quantised_tokens(length, BLOCK)
    count_selective_step(
        ledger_ptr, active_ptr, row_head // HKV, row_head, length, quantised, num_kept * SUB,
        tl.sum(passes, 0) * SUB, length - quantised, G, GP,
    )  # fmt: skip


def ffd_keep(layer: FFDLayer, scratch: FFDScratch, kept: Tensor | None) -> None:
    """Launch the keep test on what `ffd_scan` left; fills ``scratch.kept_list`` and ``tiles``, and counts the step.

    Only for ``scratch.shared``. ``kept`` uint8 [B, Hkv, sub-blocks, G], if given, gets for which heads each complete
    sub-block passes.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(g.device)
    _ffd_keep_kernel[(g.batch_size * g.num_kv_heads,)](
        layer.lengths, layer.delta_nats, scratch.unit_max, scratch.near_max, scratch.kept_list, scratch.tiles,
        scratch.tiles if kept is None else kept, layer.ledger.counters, layer.ledger.active,
        layer.half_step.shape[2], scratch.kept_list.shape[-1],
        HKV=g.num_kv_heads, G=g.group_size, GP=padded(g.group_size, 1), BLOCK=m.block_size, SUB=m.test_size,
        TILE=scratch.tile, **keep_options(layer, scratch), WRITE_KEPT=kept is not None, PDL=gpu.dependent_launch,
        num_warps=KEEP_WARPS, **gpu.launch_options,
    )  # fmt: skip


def keep_options(layer: FFDLayer, scratch: FFDScratch) -> dict[str, int | bool]:
    """Compile-time arguments of `collect_kept`."""
    m = layer.method
    tile, (sink_tiles, local_tiles) = near_tile(m), near_tiles(layer)
    pieces = sink_tiles + local_tiles
    per_unit = m.test_size // tile
    # What the sink tiles and any run of local tiles may touch.
    near_units = triton.cdiv(sink_tiles, per_unit) + triton.cdiv(local_tiles - 1, per_unit) + 1
    return {
        "CHUNK": unit_chunk(layer.codes.shape[2] // m.test_size, layer.geometry.group_size),
        "FINE": m.test_size // scratch.unit,
        "NEAR_TILE": tile,
        "SINK_TILES": sink_tiles,
        "PIECES": pieces,
        "N_LOCAL": m.n_local,
        "NEAR_UNITS": near_units,
        "NEAR_TEST": m.pseudo_max == "refined",
    }
