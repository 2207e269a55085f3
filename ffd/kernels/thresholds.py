"""From rows of scores to the threshold that keeps the wanted ones, without sorting.

Short rows, such as a row of pages, are the work of one program each: top-k is a radix selection
(histograms of 8 bits, four passes), exact down to ties; top-p a bisection over the scores that can
matter. Long rows, whose loops would be all latency, are searched by many (`ffd.kernels.digit_search`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import LOG2_E, follow_previous_launch
from ffd.kernels.digit_search import from_ordered_bits, ordered_bits, search_top_k, search_top_p
from ffd.kernels.launch import hardware, padded

_TILE = 2048
_LONG = 8192
"""Scores per row beyond which many programs search it."""
LOWEST = torch.finfo(torch.float32).min
"""Threshold that keeps every candidate and nothing at -inf."""


@dataclass(frozen=True)
class Threshold:
    """What a row keeps: scores above `value` less `margin`, and those equal to it at indices below `tie_end`."""

    value: Tensor
    """float32 [B, R], log2 units, or [B, R, n], of which the largest counts; -inf keeps the whole row, unwritten
    scores included."""
    tie_end: Tensor | None = None
    """int32 [B, R]; None keeps all ties."""
    margin: float = 0.0
    """Log2 units; infinity keeps everything."""
    margins: Tensor | None = None
    """float32 [Hq], natural units, in place of `margin`: read on the device, so that a captured graph serves others."""


@triton.jit
def _radix_kernel(
    scores_ptr, count_ptr, k_ptr, value_ptr, tie_end_ptr, stride,
    ROWS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * R,). scores [B * R, stride]; count, k [B]; value, tie_end [B * R]."""
    follow_previous_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(tl.load(count_ptr + row // ROWS), UNIT)
    k = tl.load(k_ptr + row // ROWS)
    o_t = tl.arange(0, TILE)
    o_bin = tl.arange(0, 256)
    value = tl.full([], float("-inf"), tl.float32)
    tie_end = tl.full([], 0x7FFFFFFF, tl.int32)
    if (k == 0) & (count > 0):
        value = tl.full([], float("inf"), tl.float32)
        tie_end = tl.full([], 0, tl.int32)
    elif count > k:
        wanted = k
        prefix = tl.full([], 0, tl.int32)
        for digit in tl.static_range(4):
            shift = 24 - 8 * digit
            histogram = tl.zeros([256], tl.int32)
            for start in range(0, count, TILE):
                m_t = start + o_t < count
                key = ordered_bits(tl.load(scores_ptr + row * stride + start + o_t, mask=m_t, other=0.0))
                if digit == 0:
                    found = (key >> shift) + 128  # the sign is part of the first digit
                else:
                    found = (key >> shift) & 255
                    m_t = m_t & ((key >> (shift + 8)) == prefix)
                histogram += tl.histogram(found, 256, mask=m_t).to(tl.int32)
            at_least = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
            chosen = tl.max(tl.where(at_least >= wanted, o_bin, 0), 0)
            wanted -= tl.sum(tl.where(o_bin > chosen, histogram, 0), 0)
            if digit == 0:
                prefix = chosen - 128
            else:
                prefix = (prefix << 8) | chosen
        value = from_ordered_bits(prefix)
        tie_end = tl.full([], 0, tl.int32)
        met = tl.full([], 0, tl.int32)
        start = tl.full([], 0, tl.int32)
        while (met < wanted) & (start < count):
            x = tl.load(scores_ptr + row * stride + start + o_t, mask=start + o_t < count, other=float("nan"))
            equal = (x == value).to(tl.int32)
            place = met + tl.cumsum(equal, 0)
            tie_end = tl.maximum(tie_end, tl.max(tl.where((equal > 0) & (place <= wanted), start + o_t + 1, 0), 0))
            met += tl.sum(equal, 0)
            start += TILE
    tl.store(value_ptr + row, value)
    tl.store(tie_end_ptr + row, tie_end)


def radix_top_k(scores: Tensor, count: Tensor, k: Tensor, unit: int = 1) -> Threshold:
    """Threshold that keeps the k largest scores of each row, ties by the smaller index.

    Parameters
    ----------
    scores
        float32 [B, R, U], contiguous.
    count
        int32 [B]: entries of a row that count.
    k
        int32 [B]; rows with no more entries are kept whole.
    unit
        ``count`` is in these: a row has ``ceil(count / unit)`` entries.
    """
    b, rows, stride = scores.shape
    if stride > _LONG:
        return Threshold(*search_top_k(scores, count, k, unit))
    value = torch.empty(b, rows, dtype=torch.float32, device=scores.device)
    tie_end = torch.empty(b, rows, dtype=torch.int32, device=scores.device)
    gpu = hardware(scores.device)
    _radix_kernel[(b * rows,)](
        scores, count, k, value, tie_end, stride, ROWS=rows, TILE=min(_TILE, padded(stride, 256)), UNIT=unit,
        PDL=gpu.dependent_launch, num_warps=8, **gpu.launch_options,
    )  # fmt: skip
    return Threshold(value, tie_end)


@triton.jit
def _top_p_kernel(
    scores_ptr, count_ptr, maxima_ptr, candidates_ptr, value_ptr, p, stride, num_maxima,
    ROWS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, MAXIMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * R,). scores, candidates [B * R, stride]; maxima [B * R, num_maxima]; value [B * R]."""
    follow_previous_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(tl.load(count_ptr + row // ROWS), UNIT)
    o_t = tl.arange(0, TILE)
    o_m = tl.arange(0, MAXIMA)
    p_row = scores_ptr + row * stride
    p_kept = candidates_ptr + row * stride
    top = tl.max(tl.load(maxima_ptr + row * num_maxima + o_m, mask=o_m < num_maxima, other=float("-inf")), 0)
    # All scores below this weigh less than (1 - p) of the largest alone: they never reach the set.
    floor = top - tl.log2(count.to(tl.float32) / (1.0 - p)) - 0.01
    total = tl.zeros([TILE], tl.float32)
    num_kept = tl.full([], 0, tl.int32)
    for start in range(0, count, TILE):
        x = tl.load(p_row + start + o_t, mask=start + o_t < count, other=float("-inf"))
        total += tl.exp2(x - top)
        near = (x >= floor).to(tl.int32)
        tl.store(p_kept + num_kept + tl.cumsum(near, 0) - 1, x, mask=near > 0)
        num_kept += tl.sum(near, 0)
    target = p * tl.sum(total, 0)
    tl.debug_barrier()  # the candidates are read back by other threads of this program

    # Invariant: the mass at or above `low` reaches the target, the mass at or above `high` does not.
    low = ordered_bits(floor)
    high = ordered_bits(top) + 1
    between = num_kept
    while (between > 1) & (high - 1 > low):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum and their difference may overflow
        mass = tl.zeros([TILE], tl.float32)
        below = tl.zeros([TILE], tl.int32)
        above = tl.zeros([TILE], tl.int32)
        for start in range(0, num_kept, TILE):
            x = tl.load(p_kept + start + o_t, mask=start + o_t < num_kept, other=float("-inf"))
            key = ordered_bits(x)
            mass += tl.where(key >= middle, tl.exp2(x - top), 0.0)
            below += ((key >= low) & (key < middle)).to(tl.int32)
            above += ((key >= middle) & (key < high)).to(tl.int32)
        reached = tl.sum(mass, 0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        between = tl.where(reached, tl.sum(above, 0), tl.sum(below, 0))
    tl.store(value_ptr + row, from_ordered_bits(low))


def bisect_top_p(scores: Tensor, count: Tensor, maxima: Tensor, p: float, unit: int = 1) -> Threshold:
    """Threshold that keeps the smallest set of each row whose softmax mass reaches ``p``.

    Parameters
    ----------
    scores
        float32 [B, R, U], contiguous, log2 units; -inf for what is no candidate.
    count
        int32 [B]: entries of a row that count.
    maxima
        float32 [B, R, n] whose maximum is the row's.
    p
        Mass in (0, 1]; 1 keeps every candidate.
    unit
        ``count`` is in these: a row has ``ceil(count / unit)`` entries.
    """
    b, rows, stride = scores.shape
    if p >= 1.0:
        return Threshold(torch.full((b, rows), LOWEST, dtype=torch.float32, device=scores.device))
    if stride > _LONG:
        return Threshold(search_top_p(scores, count, maxima, p, unit))
    value = torch.empty(b, rows, dtype=torch.float32, device=scores.device)
    gpu = hardware(scores.device)
    _top_p_kernel[(b * rows,)](
        scores, count, maxima, torch.empty_like(scores), value, p, stride, maxima.shape[2],
        ROWS=rows, TILE=min(_TILE, padded(stride, 64)), UNIT=unit, MAXIMA=padded(maxima.shape[2], 1),
        PDL=gpu.dependent_launch, num_warps=8, **gpu.launch_options,
    )  # fmt: skip
    return Threshold(value)


def below_maximum(maxima: Tensor, delta: float) -> Threshold:
    """Threshold ``delta`` (natural units) below the maximum of each row of maxima [B, R, n]: no launch of its own."""
    return Threshold(maxima, margin=delta * LOG2_E.value)


def below_first(tokens: Tensor, delta: float) -> Threshold:
    """Threshold ``delta`` (natural units) below the score of token 0 of each row [B, R, N]."""
    return Threshold(tokens[..., 0].contiguous(), margin=delta * LOG2_E.value)
