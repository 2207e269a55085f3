"""Thresholds of long rows by many programs: radix search for the k-th score, or for the score at mass p.

A pass fixes the next digit of the threshold: each program adds up, for its chunk of the row, how many
scores (or how much softmax mass) have each value of that digit behind the digits already fixed; the
last program of a row sums the chunks in order, so that the result never depends on timing. Top-k takes
four passes of eight bits, whose histograms are counts; top-p eight of four bits, whose sums are masses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import arrives_last, follow_previous_launch
from ffd.kernels.launch import hardware, padded

_CHUNK = 4096
_TILE = 1024


@triton.jit
def ordered_bits(x):
    """fp32 -> int32 in the same order; both zeros become one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered_bits(key):
    """Invert `ordered_bits`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _digit_pass_kernel(
    scores_ptr, count_ptr, k_ptr, maxima_ptr, sums_ptr, prefix_ptr, above_ptr, target_ptr, value_ptr, arrivals_ptr,
    p, shift, stride, num_maxima,
    ROWS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
    MAXIMA: tl.constexpr, FIRST: tl.constexpr, MASS: tl.constexpr, SUM_CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, B * R). scores [B * R, stride]; sums [B * R, chunks, 2**BITS]; the others [B * R] or [B]."""
    follow_previous_launch(PDL)
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.cdiv(tl.load(count_ptr + row // ROWS), UNIT)
    bins: tl.constexpr = 2**BITS
    o_t = tl.arange(0, TILE)
    o_bin = tl.arange(0, bins)
    p_sums = sums_ptr + row * num_chunks * bins
    prefix = tl.full([], 0, tl.int32)
    if not FIRST:
        prefix = tl.load(prefix_ptr + row)
    if chunk * CHUNK < count:
        sums = tl.zeros([bins], tl.float32)
        if MASS:
            o_m = tl.arange(0, MAXIMA)
            maxima = tl.load(maxima_ptr + row * num_maxima + o_m, mask=o_m < num_maxima, other=float("-inf"))
            top = tl.max(maxima, 0)
        for part in tl.static_range(CHUNK // TILE):
            index = chunk * CHUNK + part * TILE + o_t
            x = tl.load(scores_ptr + row * stride + index, mask=index < count, other=float("-inf"))
            key = ordered_bits(x)
            matches = index < count
            if FIRST:
                digit = (key >> shift) + bins // 2  # the sign is part of the first digit
            else:
                digit = (key >> shift) & (bins - 1)
                matches = matches & ((key >> (shift + BITS)) == prefix)
            if MASS:
                weight = tl.where(matches, tl.exp2(x - top), 0.0)
                sums += tl.sum(tl.where(digit[None, :] == o_bin[:, None], weight[None, :], 0.0), 1)
            else:
                sums += tl.histogram(digit, bins, mask=matches).to(tl.float32)
        tl.store(p_sums + chunk * bins + o_bin, sums)

    if arrives_last(arrivals_ptr + row, num_chunks):
        o_c = tl.arange(0, SUM_CHUNK)
        used = tl.cdiv(count, CHUNK)
        sums = tl.zeros([bins], tl.float32)
        for start in range(0, used, SUM_CHUNK):
            p_part = p_sums + (start + o_c)[:, None] * bins + o_bin[None, :]
            part_sums = tl.load(p_part, mask=(start + o_c < used)[:, None], other=0.0, cache_modifier=".cg")
            sums += tl.sum(part_sums, 0)
        if FIRST:
            above = tl.full([], 0.0, tl.float32)
            if MASS:
                target = p * tl.sum(sums, 0)
            else:
                target = tl.load(k_ptr + row // ROWS).to(tl.float32)
            tl.store(target_ptr + row, target)
        else:
            above = tl.load(above_ptr + row)
            target = tl.load(target_ptr + row)
        reached = above + tl.cumsum(sums, 0, reverse=True) >= target
        chosen = tl.max(tl.where(reached, o_bin, 0), 0)
        if FIRST:
            prefix = chosen - bins // 2
        else:
            prefix = (prefix << BITS) | chosen
        tl.store(prefix_ptr + row, prefix)
        tl.store(above_ptr + row, above + tl.sum(tl.where(o_bin > chosen, sums, 0.0), 0))
        tl.store(value_ptr + row, from_ordered_bits(prefix))


@triton.jit
def _tie_kernel(
    scores_ptr, count_ptr, k_ptr, above_ptr, value_ptr, tie_end_ptr, ties_ptr, arrivals_ptr, stride,
    ROWS: tl.constexpr, UNIT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, B * R). Finds where the last tie that fits the budget ends; ties [B * R, chunks]."""
    follow_previous_launch(PDL)
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.cdiv(tl.load(count_ptr + row // ROWS), UNIT)
    k = tl.load(k_ptr + row // ROWS)
    value = tl.load(value_ptr + row)
    o_t = tl.arange(0, TILE)
    p_row = scores_ptr + row * stride
    met = tl.full([], 0, tl.int32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, count), TILE):
        x = tl.load(p_row + start + o_t, mask=start + o_t < count, other=float("nan"))
        met += tl.sum((x == value).to(tl.int32), 0)
    tl.store(ties_ptr + row * num_chunks + chunk, met)
    if arrives_last(arrivals_ptr + row, num_chunks):
        o_c = tl.arange(0, CHUNKS)
        ties = tl.load(ties_ptr + row * num_chunks + o_c, mask=o_c < num_chunks, other=0, cache_modifier=".cg")
        wanted = k - tl.load(above_ptr + row).to(tl.int32)
        through = tl.cumsum(ties, 0)
        short = (through < wanted) & (o_c < num_chunks)
        first = tl.sum(short.to(tl.int32), 0) * CHUNK
        met = tl.max(tl.where(short, through, 0), 0)
        tie_end = tl.full([], 0, tl.int32)
        for start in range(first, tl.minimum(first + CHUNK, count), TILE):
            x = tl.load(p_row + start + o_t, mask=start + o_t < count, other=float("nan"))
            equal = (x == value).to(tl.int32)
            place = met + tl.cumsum(equal, 0)
            tie_end = tl.maximum(tie_end, tl.max(tl.where((equal > 0) & (place <= wanted), start + o_t + 1, 0), 0))
            met += tl.sum(equal, 0)
        if count <= k:
            tl.store(value_ptr + row, float("-inf"))
        elif k == 0:
            tl.store(value_ptr + row, float("inf"))
        tl.store(tie_end_ptr + row, tie_end)


def search_top_k(scores: Tensor, count: Tensor, k: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """Value and end of ties, float32 and int32 [B, R]: arguments as `ffd.kernels.thresholds.radix_top_k`."""
    value, above, arrivals = _search(scores, count, k, scores, 0.0, unit, mass=False)
    b, rows, stride = scores.shape
    chunks = triton.cdiv(stride, _CHUNK)
    tie_end = torch.empty(b, rows, dtype=torch.int32, device=scores.device)
    ties = torch.empty(b * rows, chunks, dtype=torch.int32, device=scores.device)
    gpu = hardware(scores.device)
    _tie_kernel[(chunks, b * rows)](
        scores, count, k, above, value, tie_end, ties, arrivals, stride,
        ROWS=rows, UNIT=unit, CHUNK=_CHUNK, TILE=_TILE, CHUNKS=padded(chunks, 1),
        PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    return value, tie_end


def search_top_p(scores: Tensor, count: Tensor, maxima: Tensor, p: float, unit: int) -> Tensor:
    """Value, float32 [B, R]: arguments as `ffd.kernels.thresholds.bisect_top_p`, with ``p`` below 1."""
    return _search(scores, count, count, maxima, p, unit, mass=True)[0]


def _search(
    scores: Tensor, count: Tensor, k: Tensor, maxima: Tensor, p: float, unit: int, *, mass: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the passes; returns value, what lies strictly above it, and rewound arrival counters."""
    b, rows, stride = scores.shape
    chunks = triton.cdiv(stride, _CHUNK)
    bits = 4 if mass else 8
    prefix = torch.empty(b * rows, dtype=torch.int32, device=scores.device)
    above, target = torch.empty(2, b * rows, dtype=torch.float32, device=scores.device)
    value = torch.empty(b, rows, dtype=torch.float32, device=scores.device)
    sums = torch.empty(b * rows, chunks, 2**bits, dtype=torch.float32, device=scores.device)
    arrivals = torch.zeros(b * rows, dtype=torch.int32, device=scores.device)
    num_maxima = maxima.shape[2] if mass else 1
    gpu = hardware(scores.device)
    for shift in range(32 - bits, -1, -bits):
        _digit_pass_kernel[(chunks, b * rows)](
            scores, count, k, maxima, sums, prefix, above, target, value, arrivals, p, shift, stride, num_maxima,
            ROWS=rows, UNIT=unit, CHUNK=_CHUNK, TILE=_TILE, BITS=bits, MAXIMA=padded(num_maxima, 1),
            FIRST=shift == 32 - bits, MASS=mass, SUM_CHUNK=16,
            PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
        )  # fmt: skip
    return value, above, arrivals
