"""Rows of scores reduced to units (sub-blocks, pages, blocks): inside a scan, or by a launch of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import follow_previous_launch
from ffd.kernels.launch import hardware, padded


@triton.jit
def reduce_units(
    scores, units_ptr, row_head, start, count, num_units, G,
    GM: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, POOL: tl.constexpr, MASS: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of scores [GM, TILE], -inf where absent, to its units, and store them; their row maxima [GM]."""
    o_g = tl.arange(0, GM)
    unit = start // UNIT + tl.arange(0, TILE // UNIT)
    m_u = unit < tl.cdiv(count, UNIT)
    if UNIT == 1:
        reduced = scores
    else:
        parts = tl.reshape(scores, [GM, TILE // UNIT, UNIT])
        reduced = tl.max(parts, 2)
        if MASS:
            anchor = tl.where(reduced == float("-inf"), 0.0, reduced)
            reduced = anchor + tl.log2(tl.sum(tl.exp2(parts - anchor[:, :, None]), 2))
    if POOL:
        tl.store(units_ptr + row_head * num_units + unit, tl.max(reduced, 0), mask=m_u)
    elif STORE:
        p_units = units_ptr + (row_head * G + o_g)[:, None] * num_units + unit[None, :]
        tl.store(p_units, reduced, mask=m_u[None, :] & (o_g < G)[:, None])
    return tl.max(reduced, 1)


@triton.jit
def store_maxima(maxima_ptr, top, row_head, program, num_programs, G, GM: tl.constexpr, POOL: tl.constexpr):
    """Write a program's row maxima [GM], or their largest, into maxima [B, R, programs]."""
    o_g = tl.arange(0, GM)
    if POOL:
        tl.store(maxima_ptr + row_head * num_programs + program, tl.max(top, 0))
    else:
        tl.store(maxima_ptr + (row_head * G + o_g) * num_programs + program, top, mask=o_g < G)


@triton.jit
def _unit_kernel(
    tokens_ptr, num_rows_ptr, units_ptr, maxima_ptr, capacity, num_units,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    POOL: tl.constexpr, MASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs, B * Hkv). The reduction of `_score_kernel` on scores in memory, tokens [B, Hq, capacity]."""
    follow_previous_launch(PDL)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    count = tl.load(num_rows_ptr + row_head // HKV)
    o_g = tl.arange(0, GP)
    top = tl.full([GP], float("-inf"), tl.float32)
    for start in range(program * TILE, count, num_programs * TILE):
        token = start + tl.arange(0, TILE)
        p_scores = tokens_ptr + (row_head * G + o_g)[:, None] * capacity + token[None, :]
        scores = tl.load(p_scores, mask=(o_g < G)[:, None] & (token < count)[None, :], other=float("-inf"))
        largest = reduce_units(
            scores, units_ptr, row_head, start, count, num_units, G, GP, TILE, UNIT, POOL, MASS, True
        )
        top = tl.maximum(top, largest)
    store_maxima(maxima_ptr, top, row_head, program, num_programs, G, GP, POOL)


@dataclass(frozen=True)
class Scores:
    """Scores in log2 units; entries at or beyond a row's count are unwritten."""

    tokens: Tensor
    """float32 [B, Hq, capacity], or an empty tensor where they were not asked for."""
    units: Tensor
    """float32 [B, R, capacity / unit]; R is the number of query heads, or of kv heads where pooled."""
    maxima: Tensor
    """float32 [B, R, programs]: the largest unit score that each program met; with ``near``, exact score near."""


def reduce_rows(
    tokens: Tensor, num_rows: Tensor, num_kv_heads: int, *, unit: int, pool: bool = False, mass: bool = False
) -> Scores:
    """Reduce scores in memory to units, by a launch of its own.

    Parameters
    ----------
    tokens
        float32 [B, Hq, capacity], log2 units.
    num_rows
        int32 [B] on the device: tokens that were scored.
    num_kv_heads
        Kv heads that the query heads share.
    unit, pool, mass
        As for `score_rows`.
    """
    b, num_query_heads, capacity = tokens.shape
    group = num_query_heads // num_kv_heads
    gpu = hardware(tokens.device)
    padded_group = padded(group, 1)
    tile = max(unit, min(1024, 8192 // padded_group))
    num_units = triton.cdiv(capacity, unit)
    rows = num_kv_heads if pool else num_query_heads
    programs = programs_per_head(b * num_kv_heads, capacity, tile, gpu.multiprocessors)
    units = torch.empty(b, rows, num_units, dtype=torch.float32, device=tokens.device)
    maxima = torch.empty(b, rows, programs, dtype=torch.float32, device=tokens.device)
    _unit_kernel[(programs, b * num_kv_heads)](
        tokens, num_rows, units, maxima, capacity, num_units,
        HKV=num_kv_heads, G=group, GP=padded_group, TILE=tile, UNIT=unit, POOL=pool, MASS=mass,
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    return Scores(tokens, units, maxima)


def programs_per_head(row_heads: int, capacity: int, tile: int, multiprocessors: int) -> int:
    """Programs per kv head: four for each multiprocessor, but none without a tile."""
    return max(1, min(triton.cdiv(4 * multiprocessors, row_heads), triton.cdiv(capacity, tile)))
