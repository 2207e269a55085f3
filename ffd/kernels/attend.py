"""Exact attention over the units that a threshold keeps: the last kernel of every selecting method but FFD.

Each program owns every n-th chunk of units: it tests them, packs the kept ones into a list with one bit per
query head, then gathers their keys and values in full tiles. `split_reduce` combines the programs' partials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    ESTIMATED,
    FIRST_HEAD,
    LOG2_E,
    count_step,
    follow_previous_launch,
    online_softmax,
    store_partial,
)
from ffd.kernels.kept_list import list_kept
from ffd.kernels.launch import Partials, compute_dtype, fit_tile, hardware, padded, scratch_of
from ffd.kernels.split_reduce import split_reduce
from ffd.kernels.thresholds import Threshold

if TYPE_CHECKING:
    from ffd.methods.dense import DenseLayer


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, tokens_ptr, units_ptr, value_ptr, tie_end_ptr, margins_ptr, lengths_ptr, scanned_ptr,
    estimated_ptr, list_ptr, bits_ptr, max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, margin, capacity, stride_row, stride_head, list_size, num_parts,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    FORCED: tl.constexpr, SHARED: tl.constexpr, TIES: tl.constexpr, MARGINS: tl.constexpr, UNION: tl.constexpr,
    REUSE: tl.constexpr, HAS_ESTIMATE: tl.constexpr, SCANS_UNFORCED: tl.constexpr, STAGES: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, B * Hkv). k, v [B, Hkv, capacity, D]; tokens [B, Hq, capacity]; value [B, R, num_parts]."""
    follow_previous_launch(PDL)
    split = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    if split == 0:
        if SCANS_UNFORCED:
            scanned = (length - 1) // FORCED * FORCED
        else:
            scanned = tl.load(scanned_ptr + row)
        p_counters, active = count_step(ledger_ptr, active_ptr, row, row_head, length, scanned, G)
        if HAS_ESTIMATE:
            estimated = tl.load(estimated_ptr + row_head)
            tl.store(p_counters + ESTIMATED, tl.load(p_counters + ESTIMATED) + estimated * active)

    num_units = tl.cdiv(length, UNIT)
    forced = num_units
    if FORCED > 0:
        forced = (length - 1) // FORCED * FORCED // UNIT
    rows_per_head: tl.constexpr = 1 if SHARED else G
    o_p = tl.arange(0, GP)
    o_n = tl.arange(0, PARTS)
    o_row = row_head * rows_per_head + o_p * (0 if SHARED else 1)
    p_value = value_ptr + o_row[:, None] * num_parts + o_n[None, :]
    value = tl.load(p_value, mask=(o_p < G)[:, None] & (o_n < num_parts)[None, :], other=float("-inf"))
    value = tl.max(value, 1) - margin
    if MARGINS:
        value -= tl.load(margins_ptr + (row_head % HKV) * G + o_p, mask=o_p < G, other=0.0) * LOG2_E
    p_list = list_ptr + (row_head * SPLITS + split) * list_size
    p_bits = bits_ptr + (row_head * SPLITS + split) * list_size
    num_kept = list_kept(
        units_ptr + row * stride_row + (row_head % HKV) * rows_per_head * stride_head, stride_head,
        value, tie_end_ptr + row_head * rows_per_head, p_list, p_bits,
        ledger_ptr + row_head * (FIRST_HEAD + G), tl.load(active_ptr + row).to(tl.int64),
        split, num_units, forced, length, G, GP, UNIT, CHUNK, SPLITS, SHARED, TIES,
    )  # fmt: skip

    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    o_t = tl.arange(0, TILE)
    m_d = o_d < D
    b_q = tl.load(
        q_ptr + (row_head * G + o_g)[:, None] * D + o_d[None, :], mask=(o_g < G)[:, None] & m_d[None, :], other=0.0
    ).to(COMPUTE)
    row_max = tl.full([GM], float("-inf"), tl.float32)
    row_sum = tl.zeros([GM], tl.float32)
    acc = tl.zeros([GM, DP], tl.float32)
    base = row_head * capacity * D
    for start in tl.range(0, num_kept * UNIT, TILE, num_stages=STAGES):
        slot = start + o_t
        m_slot = slot < num_kept * UNIT
        unit = tl.load(p_list + slot // UNIT, mask=m_slot, other=0)
        token = unit * UNIT + slot % UNIT
        m_t = m_slot & (token < length)
        if REUSE:
            p_scores = tokens_ptr + (row_head * G + o_g)[:, None] * capacity + token[None, :]
            scores = tl.load(p_scores, mask=(o_g < G)[:, None] & m_t[None, :], other=float("-inf"))
        else:
            # [DP, T], rows of kept tokens gathered
            p_k = k_ptr + base + token[None, :].to(tl.int64) * D + o_d[:, None]
            b_k = tl.load(p_k, mask=m_t[None, :] & m_d[:, None], other=0.0)
            scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
        attends = m_t[None, :]
        if not UNION:
            bits = tl.load(p_bits + slot // UNIT, mask=m_slot, other=0)
            attends = attends & (((bits[None, :] >> o_g[:, None]) & 1) > 0)
        scores = tl.where(attends, scores, float("-inf"))
        p_v = v_ptr + base + token[:, None].to(tl.int64) * D + o_d[None, :]
        b_v = tl.load(p_v, mask=m_t[:, None] & m_d[None, :], other=0.0)
        row_max, row_sum, acc = online_softmax(row_max, row_sum, acc, scores, b_v.to(COMPUTE))

    p_max = max_ptr + row_head * SPLITS * G
    p_sum = sum_ptr + row_head * SPLITS * G
    p_acc = acc_ptr + row_head * SPLITS * G * D
    store_partial(p_max, p_sum, p_acc, split, row_max, row_sum, acc, G, D, GM, DP)


def attend_kept(
    layer: DenseLayer,
    q: Tensor,
    scale: float,
    units: Tensor,
    threshold: Threshold,
    scanned: Tensor | None,
    *,
    unit: int = 1,
    union: bool = False,
    forced: int = 0,
    tokens: Tensor | None = None,
    estimated: Tensor | None = None,
) -> Tensor:
    """Attend to the tokens of kept units; adds one step to the layer's ledger.

    Parameters
    ----------
    layer
        16-bit keys and values, lengths on the device.
    q
        [B, Hq, d], contiguous.
    scale
        Softmax scale.
    units
        float32 [B, R, U], unit stride along U; R is the number of query heads, or of kv heads where a
        group shares one list.
    threshold
        What each row keeps.
    scanned
        int [B]: tokens whose selection metadata were read, for the ledger; None for all before the forced ones.
    unit
        Tokens per unit, a power of two.
    union
        Every head attends to what any head of its group keeps.
    forced
        Keep all tokens of the current token's run of this many, whatever their scores: a multiple of
        ``unit``, or 0 for none.
    tokens
        float32 [B, Hq, capacity], log2 units: exact scores already computed, so that keys are not read again.
    estimated
        int32 [B, Hkv]: tokens scored by a second estimate, for the ledger.

    Returns
    -------
    Tensor
        [B, Hq, d] in the dtype of ``q``.

    Raises
    ------
    ValueError
        For groups of more than 31 query heads: a kept unit carries one bit per head.
    """
    b, num_query_heads, d = q.shape
    hkv, capacity = layer.keys.shape[1:3]
    group = num_query_heads // hkv
    if group > 31:
        raise ValueError(f"num_query_heads / num_kv_heads={group}: expected at most 31")
    gpu = hardware(q.device)
    tile, stages = fit_tile(64, 2 * padded(d, 16) * q.element_size(), gpu.shared_memory // 2, 3)
    num_units = triton.cdiv(capacity, unit)
    splits = max(1, min(triton.cdiv(4 * gpu.multiprocessors, b * hkv), triton.cdiv(capacity, tile)))
    chunk = min(1024, padded(triton.cdiv(num_units, 2 * splits), 1))
    list_size = triton.cdiv(triton.cdiv(num_units, chunk), splits) * chunk
    partials = scratch_of(layer.ledger, lambda: Partials.allocate(b * hkv, splits, group, d, q.device))
    kept = torch.empty(2, b * hkv, splits, list_size, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q)
    shared = units.shape[1] == hkv and group > 1
    parts = threshold.value.shape[2] if threshold.value.ndim == 3 else 1
    _attend_kernel[(splits, b * hkv)](
        q, layer.keys, layer.values, units if tokens is None else tokens, units,
        threshold.value, threshold.value if threshold.tie_end is None else threshold.tie_end,
        threshold.value if threshold.margins is None else threshold.margins,
        layer.lengths, layer.lengths if scanned is None else scanned,
        layer.lengths if estimated is None else estimated,
        kept[0], kept[1], partials.row_max, partials.row_sum, partials.acc,
        layer.ledger.counters, layer.ledger.active,
        scale * LOG2_E.value, threshold.margin, capacity, units.stride(0), units.stride(1), list_size, parts,
        HKV=hkv, G=group, D=d, GM=padded(group, 16), GP=padded(group, 1), DP=padded(d, 16),
        UNIT=unit, TILE=tile, CHUNK=chunk, SPLITS=splits, PARTS=padded(parts, 1), FORCED=forced,
        SHARED=shared, TIES=threshold.tie_end is not None, MARGINS=threshold.margins is not None, UNION=union,
        REUSE=tokens is not None, HAS_ESTIMATE=estimated is not None, SCANS_UNFORCED=scanned is None,
        STAGES=stages, COMPUTE=compute_dtype(q.dtype), PDL=gpu.dependent_launch, num_warps=4, **gpu.launch_options,
    )  # fmt: skip
    split_reduce(partials, out)
    return out


def attend_mask(layer: DenseLayer, q: Tensor, scale: float, kept: Tensor) -> Tensor:
    """Attend to a mask of tokens, the same for every head: what a rule in plain torch needs to be fused.

    Parameters
    ----------
    layer
        16-bit keys and values, lengths on the device.
    q
        [B, Hq, d].
    scale
        Softmax scale.
    kept
        bool [B, capacity]; False at and beyond a row's length.
    """
    b, hkv = layer.keys.shape[:2]
    units = kept.float()[:, None].expand(-1, hkv, -1)
    value = torch.full((b, hkv), 0.5, dtype=torch.float32, device=q.device)
    scanned = torch.zeros_like(layer.lengths)
    return attend_kept(layer, q.contiguous(), scale, units, Threshold(value), scanned)
