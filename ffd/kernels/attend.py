"""Exact attention over the units that a threshold keeps: the last kernel of every selecting method but FFD.

One launch. Each program owns a contiguous run of units: it tests them, packs the kept ones into a list
with one bit per query head, then gathers their keys and values in full tiles. The last program of a kv
head combines the partials and writes the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd import ledger as _ledger
from ffd.kernels.common import LOG2_E, arrives_last, count_step, online_softmax, reduce_splits, store_partial
from ffd.kernels.kept_list import list_kept
from ffd.kernels.launch import Partials, compute_dtype, fit_tile, hardware, padded, scratch_of, split_chunk
from ffd.kernels.thresholds import Threshold

if TYPE_CHECKING:
    from ffd.methods.dense import DenseLayer

ESTIMATED = tl.constexpr(_ledger.ESTIMATED)
FIRST_HEAD = tl.constexpr(_ledger.FIRST_HEAD)


@triton.jit
def count_estimated(counters_ptr, active_ptr, row, row_head, estimated, columns):
    """Add tokens scored by a second estimate to the ledger row of a kv head."""
    p_counter = counters_ptr + row_head * columns + ESTIMATED
    active = tl.load(active_ptr + row)
    tl.store(p_counter, tl.load(p_counter) + (estimated * active).to(tl.int64))


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, tokens_ptr, units_ptr, value_ptr, tie_end_ptr, lengths_ptr, scanned_ptr, estimated_ptr,
    list_ptr, bits_ptr, counts_ptr, max_ptr, sum_ptr, acc_ptr, arrivals_ptr, out_ptr, ledger_ptr, active_ptr,
    scale_log2, capacity, stride_row, stride_head, list_size,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SPLIT_CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    SHARED: tl.constexpr, TIES: tl.constexpr, FORCE_LAST: tl.constexpr, UNION: tl.constexpr, REUSE: tl.constexpr,
    HAS_ESTIMATE: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B * Hkv). k, v [B, Hkv, capacity, D]; tokens [B, Hq, capacity]; out [B, Hq, D]."""
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    num_units = tl.cdiv(length, UNIT)
    per_split = tl.cdiv(num_units, num_splits)
    first = tl.minimum(split * per_split, num_units)
    last = tl.minimum(first + per_split, num_units)
    rows_per_head: tl.constexpr = 1 if SHARED else G
    p_list = list_ptr + row_head * list_size
    p_bits = bits_ptr + row_head * list_size
    p_counts = counts_ptr + row_head * (1 + G)
    num_kept = list_kept(
        units_ptr + row * stride_row + (row_head % HKV) * rows_per_head * stride_head, stride_head,
        value_ptr + row_head * rows_per_head, tie_end_ptr + row_head * rows_per_head, p_list, p_bits, p_counts,
        first, last, num_units, length, G, GP, UNIT, CHUNK, SHARED, TIES, FORCE_LAST,
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
        unit = tl.load(p_list + first + slot // UNIT, mask=m_slot, other=0)
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
            bits = tl.load(p_bits + first + slot // UNIT, mask=m_slot, other=0)
            attends = attends & (((bits[None, :] >> o_g[:, None]) & 1) > 0)
        scores = tl.where(attends, scores, float("-inf"))
        p_v = v_ptr + base + token[:, None].to(tl.int64) * D + o_d[None, :]
        b_v = tl.load(p_v, mask=m_t[:, None] & m_d[None, :], other=0.0)
        row_max, row_sum, acc = online_softmax(row_max, row_sum, acc, scores, b_v.to(COMPUTE))

    p_max = max_ptr + row_head * num_splits * G
    p_sum = sum_ptr + row_head * num_splits * G
    p_acc = acc_ptr + row_head * num_splits * G * D
    store_partial(p_max, p_sum, p_acc, split, row_max, row_sum, acc, G, D, GM, DP)
    if arrives_last(arrivals_ptr + row_head, num_splits):
        p_out = out_ptr + row_head * G * D
        reduce_splits(p_max, p_sum, p_acc, p_out, p_out, G, D, num_splits, GP, DP, SPLIT_CHUNK, False)
        union = tl.load(p_counts, cache_modifier=".cg")
        scanned = tl.load(scanned_ptr + row)
        count_step(ledger_ptr, active_ptr, row, row_head, length, scanned, union, p_counts + 1, 0, G, COLUMNS)
        if HAS_ESTIMATE:
            estimated = tl.load(estimated_ptr + row_head)
            count_estimated(ledger_ptr, active_ptr, row, row_head, estimated, FIRST_HEAD + G)
        tl.debug_barrier()  # counts were read by other threads than those that rewind them
        o_c = tl.arange(0, COLUMNS)
        tl.store(p_counts + o_c, 0, mask=o_c < 1 + G)


@dataclass(frozen=True)
class _Scratch:
    partials: Partials
    counts: Tensor
    """int32 [B * Hkv, 1 + G]: tokens kept by the group and by each head, zero between steps."""


def attend_kept(
    layer: DenseLayer,
    q: Tensor,
    scale: float,
    units: Tensor,
    threshold: Threshold,
    scanned: Tensor,
    *,
    unit: int = 1,
    union: bool = False,
    force_last: bool = False,
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
        int [B]: tokens whose selection metadata were read, for the ledger.
    unit
        Tokens per unit, a power of two.
    union
        Every head attends to what any head of its group keeps.
    force_last
        Keep the current token's unit, whatever its score.
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
    scratch = scratch_of(
        layer.ledger,
        lambda: _Scratch(
            Partials.allocate(b * hkv, splits, group, d, q.device),
            torch.zeros(b * hkv, 1 + group, dtype=torch.int32, device=q.device),
        ),
    )
    partials = scratch.partials
    kept = torch.empty(2, b * hkv, num_units, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q)
    shared = units.shape[1] == hkv and group > 1
    _attend_kernel[(splits, b * hkv)](
        q, layer.keys, layer.values, units if tokens is None else tokens, units,
        threshold.value, threshold.value if threshold.tie_end is None else threshold.tie_end,
        layer.lengths, scanned, scanned if estimated is None else estimated,
        kept[0], kept[1], scratch.counts, partials.row_max, partials.row_sum, partials.acc, partials.counters,
        out, layer.ledger.counters, layer.ledger.active,
        scale * LOG2_E.value, capacity, units.stride(0), units.stride(1), num_units,
        HKV=hkv, G=group, D=d, GM=padded(group, 16), GP=padded(group, 1), DP=padded(d, 16),
        UNIT=unit, TILE=tile, CHUNK=min(1024, padded(triton.cdiv(num_units, splits), 32)),
        SPLIT_CHUNK=split_chunk(group, d), COLUMNS=padded(_ledger.FIRST_HEAD + group, 1),
        SHARED=shared, TIES=threshold.tie_end is not None, FORCE_LAST=force_last, UNION=union,
        REUSE=tokens is not None, HAS_ESTIMATE=estimated is not None, STAGES=stages,
        COMPUTE=compute_dtype(q.dtype), num_warps=4,
    )  # fmt: skip
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
    units = torch.where(kept, 1.0, 0.0)[:, None].expand(-1, hkv, -1)
    value = torch.full((b, hkv), 0.5, dtype=torch.float32, device=q.device)
    scanned = torch.zeros_like(layer.lengths)
    return attend_kept(layer, q.contiguous(), scale, units, Threshold(value), scanned)
