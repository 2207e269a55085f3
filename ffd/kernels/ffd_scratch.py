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
    SHARED_UNITS,
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


def near_tiles(layer: FFDLayer) -> tuple[int, int]:
    """Tiles that may hold sink tokens and tiles that may hold local ones (a window may straddle one more).

    Windows end at the layer's capacity: what is larger holds every token.
    """
    m, tokens = layer.method, layer.codes.shape[2]
    tile = near_tile(m)
    return triton.cdiv(min(m.n_sink, tokens), tile), triton.cdiv(min(m.n_local, tokens), tile) + 1


def scan_workers(device: torch.device) -> int:
    """Scan programs that run at once; a head may need one more for its odd blocks."""
    return SCAN_WARPS * hardware(device).multiprocessors


def shares_tiles(method: FFD, row_heads: int, tokens: int) -> bool:
    """Whether a layer's kept tiles are listed by a launch of its own; ``tokens`` that one of its rows can hold."""
    return method.select_per == "head" or row_heads * (tokens // method.test_size) > SHARED_UNITS


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
    """Tokens of a tile of a list."""
    buffers: int
    """Tiles in flight per attending program."""
    shared: bool
    """Whether `ffd_keep` lists each head's tiles once, for all programs to share out; else each lists its own."""
    workers: int
    """Attending programs beside a tail's one: for all kv heads together if shared, else for each."""
    kept_list: Tensor
    """int32 [R, tiles] if shared, else [R, workers, tiles each]: tiles of kept sub-blocks."""
    tiles: Tensor
    """int32 [R]: how many are listed, if shared."""
    kept: Tensor | None
    """uint8 [R, sub-blocks, G]: for which heads each passes, where every head attends to its own."""
    partials: Partials
    """If shared [1, workers + 2 R, G]: worker w's part of head r at ``w + r``, the tail of r at ``workers + R + r``.
    Else [R, 1 + workers, G]: the tail's part first."""

    @classmethod
    def allocate(cls, layer: FFDLayer, shared: bool | None = None) -> FFDScratch:
        """For a layer's capacity; which schedule serves it best is decided here, unless it is given."""
        g, m = layer.geometry, layer.method
        row_heads = g.batch_size * g.num_kv_heads
        tokens = layer.codes.shape[2]
        # Where warps are plenty, two share a block: its scan is a matter of latency then.
        halves = m.block_size // 2 >= SCAN_TILE and 2 * row_heads * tokens // m.block_size <= scan_workers(g.device)
        unit = min(m.test_size, m.block_size // 2) if halves else m.test_size
        units = tokens // m.test_size
        tile, buffers = attend_tile(layer)
        if shared is None:
            shared = shares_tiles(m, row_heads, tokens)
        # One wave of programs. Of many that a head has its tail is one; of few, the slot that its short program soon
        # leaves is better used again.
        slots = ATTEND_PROGRAMS * hardware(g.device).multiprocessors
        each = slots // row_heads
        each = max(1, min(each - 1 if each > 8 else each, units))
        workers = (slots - row_heads if each > 8 else slots) if shared else each

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=g.device)

        num_tiles = tokens // tile
        lists = (num_tiles,) if shared else (workers, triton.cdiv(num_tiles, workers))
        parts = (1, workers + 2 * row_heads) if shared else (row_heads, 1 + workers)
        return cls(
            unit_max=empty(row_heads, tokens // unit, g.group_size, dtype=torch.float32),
            unit=unit,
            parts=2 if halves else 1,
            zero_point=empty(row_heads, layer.half_step.shape[2], g.group_size, dtype=torch.float32),
            near_max=empty(row_heads, sum(near_tiles(layer)), g.group_size, dtype=torch.float32),
            tile=tile,
            buffers=buffers,
            shared=shared,
            workers=workers,
            kept_list=empty(row_heads, *lists, dtype=torch.int32),
            tiles=empty(row_heads, dtype=torch.int32),
            kept=empty(row_heads, units, g.group_size, dtype=torch.uint8) if m.select_per == "head" else None,
            partials=Partials.allocate(*parts, g.group_size, g.head_dim, g.device),
        )
