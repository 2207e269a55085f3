"""What one FFD step hands from launch to launch, and how its work is cut to a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ffd.kernels.launch import (
    ATTEND_BUFFERS,
    ATTEND_PROGRAMS,
    ATTEND_TILE,
    SCAN_TILE,
    SCAN_WARPS,
    Partials,
    fit_tile,
    hardware,
    padded,
)

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer
    from ffd.methods.ffd import FFD


def near_tile(method: FFD) -> int:
    """Tokens of a near piece: what one warp takes at once, within a sub-block."""
    return min(32, method.test_size)


def near_tiles(method: FFD) -> tuple[int, int]:
    """Tiles that may hold sink tokens and tiles that may hold local ones (a window may straddle one more)."""
    tile = near_tile(method)
    return triton.cdiv(method.n_sink, tile), triton.cdiv(method.n_local, tile) + 1


def scan_workers(device: torch.device) -> int:
    """Scan programs that run at once; a head may need one more for its odd blocks."""
    return SCAN_WARPS * hardware(device).multiprocessors


def attend_tile(layer: FFDLayer) -> tuple[int, int]:
    """Tokens of a kept tile, and tiles in flight per attending program."""
    g, m = layer.geometry, layer.method
    padded_d, quarter = padded(g.head_dim, 16), padded(g.head_dim // 4, 16)
    bytes_per_token = quarter + padded_d * layer.values.element_size()
    if layer.residual is not None:
        bytes_per_token += padded_d * layer.residual.element_size()
    shared = hardware(g.device).shared_memory // ATTEND_PROGRAMS
    return fit_tile(min(ATTEND_TILE, m.test_size), bytes_per_token, shared, ATTEND_BUFFERS)


@dataclass(frozen=True)
class FFDScratch:
    """Memory of a layer between the launches of a step; R = B * Hkv."""

    unit_max: Tensor
    """float32 [R, units, G]: largest thumbnail score of each unit, log2 units; stale beyond the length."""
    unit: int
    """Tokens of a unit: a sub-block, or the half of one."""
    parts: int
    """Pieces of a block that different scan programs take."""
    zero_point: Tensor
    """float32 [R, blocks, G]: ``3 * sum(q * half_step)``, log2 units, to be subtracted from code products."""
    near_max: Tensor
    """float32 [R, pieces, G]: parts of the pseudo-maximum, log2 units; -inf where a piece holds no near token."""
    tile: int
    """Tokens of a tile of the list."""
    buffers: int
    """Tiles in flight per attending program."""
    kept_list: Tensor
    """int32 [R, tiles of the capacity]: tiles of kept sub-blocks."""
    tiles: Tensor
    """int32 [R]: how many are listed."""
    kept: Tensor | None
    """uint8 [R, sub-blocks, G]: for which heads each passes, where every head attends to its own."""
    workers: int
    """Attending programs that share out the tiles of all kv heads; each head's tail has one more program."""
    partials: Partials
    """[1, workers + 2 R, G]: worker w's part of head r at ``w + r``, the tail of r at ``workers + R + r``."""

    @classmethod
    def allocate(cls, layer: FFDLayer) -> FFDScratch:
        """For a layer's capacity."""
        g, m = layer.geometry, layer.method
        row_heads = g.batch_size * g.num_kv_heads
        tokens = layer.codes.shape[2]
        # Where warps are plenty, two share a block: its scan is a matter of latency then.
        halves = m.block_size // 2 >= SCAN_TILE and 2 * row_heads * tokens // m.block_size <= scan_workers(g.device)
        unit = min(m.test_size, m.block_size // 2) if halves else m.test_size
        tile, buffers = attend_tile(layer)
        # One wave, tails included; where these alone fill it, they leave soon.
        slots = ATTEND_PROGRAMS * hardware(g.device).multiprocessors
        workers = max(slots - row_heads, slots // 2)
        units = tokens // m.test_size

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(row_heads, *shape, dtype=dtype, device=g.device)

        return cls(
            unit_max=empty(tokens // unit, g.group_size, dtype=torch.float32),
            unit=unit,
            parts=2 if halves else 1,
            zero_point=empty(layer.half_step.shape[2], g.group_size, dtype=torch.float32),
            near_max=empty(sum(near_tiles(m)), g.group_size, dtype=torch.float32),
            tile=tile,
            buffers=buffers,
            kept_list=empty(tokens // tile, dtype=torch.int32),
            tiles=empty(dtype=torch.int32),
            kept=empty(units, g.group_size, dtype=torch.uint8) if m.select_per == "head" else None,
            workers=workers,
            partials=Partials.allocate(1, workers + 2 * row_heads, g.group_size, g.head_dim, g.device),
        )
