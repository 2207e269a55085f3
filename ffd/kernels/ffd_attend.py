"""FFD's attention to the kept tiles and to the tail, on either of two schedules (`FFDScratch.shared`).

Little work: programs belong to a kv head, each finds its share of the head's kept tiles for itself, which costs less
than another launch. Much work: `ffd_keep` lists the tiles of every head, and all programs share them out evenly,
whatever each head kept; a program may take the end of one head's and the beginning of the next's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import (
    LOG2_E,
    count_selective_step,
    follow_previous_launch,
    online_softmax_by_column,
    prefetch_to_l2,
    quantised_tokens,
    store_partial,
)
from ffd.kernels.ffd_append import stored_residual
from ffd.kernels.ffd_keep import collect_kept, keep_options
from ffd.kernels.ffd_kept_scores import kept_scores, load_queries
from ffd.kernels.ffd_scratch import FFDScratch
from ffd.kernels.launch import ATTEND_PROGRAMS, ATTEND_TILE, ATTEND_WARPS, compute_dtype, fit_tile, hardware, padded
from ffd.kernels.unpack import RESIDUAL_KINDS

if TYPE_CHECKING:
    from ffd.ffd_layer import FFDLayer


@triton.jit
def attend_tiles(
    queries, list_ptr, first, stride, count, row_head,
    codes_ptr, half_step_ptr, residual_ptr, v_ptr, zero_point_ptr, kept_ptr, scale_log2, num_blocks,
    G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, DQP: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, BUFFERS: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Softmax over ``count`` listed tiles of a head, every ``stride``-th from ``first`` on.

    Returns largest scores [GM] in log2 units, sums of weights [GM] and weighted values [GM, DP].
    """
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    row_max = tl.full([GM], float("-inf"), tl.float32)
    sums = tl.zeros([GM, TILE], tl.float32)
    acc = tl.zeros([GM, DP], tl.float32)
    # The tile's address is itself loaded: Triton spends two stages on each buffer of such a chain.
    for i in tl.range(0, count, num_stages=2 * BUFFERS + 1):
        token = tl.load(list_ptr + first + i * stride).to(tl.int64) * TILE
        slot = row_head * num_blocks * BLOCK + token
        block = row_head * num_blocks + token // BLOCK
        scores = kept_scores(
            queries, codes_ptr + slot * (D // 4), half_step_ptr + block * D, residual_ptr + slot * D,
            zero_point_ptr + block * G, scale_log2, G, D, GM, DP, DQP, TILE, RESIDUAL, COMPUTE, PTX, SUBNORMAL,
        )  # fmt: skip
        if PER_HEAD:
            passes = tl.load(kept_ptr + slot // SUB * G + o_g, mask=o_g < G, other=0) > 0
            scores = tl.where(passes[:, None], scores, float("-inf"))
        # [TILE, DP]
        p_tile = v_ptr + slot * D + tl.arange(0, TILE)[:, None] * D + o_d[None, :]
        b_v = tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
        row_max, sums, acc = online_softmax_by_column(row_max, sums, acc, scores, b_v.to(COMPUTE))
    return row_max, tl.sum(sums, 1), acc


@triton.jit
def attend_tail(
    q_ptr, tail_ptr, v_ptr, length, quantised, scale_log2,
    G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`attend_tiles` of a head's tokens from ``quantised`` on; v_ptr points to the first of them."""
    o_g = tl.arange(0, GM)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    p_q = q_ptr + o_g[:, None] * D + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_g < G)[:, None] & m_d[None, :], other=0.0).to(COMPUTE)
    if PDL:
        prefetch_to_l2(tail_ptr, BLOCK * D)
        prefetch_to_l2(v_ptr, BLOCK * D)
    follow_previous_launch(PDL)
    row_max = tl.full([GM], float("-inf"), tl.float32)
    sums = tl.zeros([GM, TILE], tl.float32)
    acc = tl.zeros([GM, DP], tl.float32)
    for start in range(0, length - quantised, TILE):
        token = start + tl.arange(0, TILE)
        m_t = token < length - quantised
        b_k = tl.load(tail_ptr + token[None, :] * D + o_d[:, None], mask=m_t[None, :] & m_d[:, None], other=0.0)
        scores = tl.dot(b_q, b_k.to(COMPUTE), input_precision="ieee") * scale_log2
        scores = tl.where(m_t[None, :], scores, float("-inf"))
        b_v = tl.load(v_ptr + token[:, None] * D + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
        row_max, sums, acc = online_softmax_by_column(row_max, sums, acc, scores, b_v.to(COMPUTE))
    return row_max, tl.sum(sums, 1), acc


@triton.jit
def tiles_before(ends, row_head, RP: tl.constexpr):
    """End of the tiles of all heads before ``row_head``, and of its own; ``ends`` int32 [RP] cumulative."""
    o_r = tl.arange(0, RP)
    begin = tl.sum(tl.where(o_r == row_head - 1, ends, 0), 0)
    return begin, tl.sum(tl.where(o_r == row_head, ends, 0), 0)


@triton.jit
def turns_of_worker(worker, share, start, begin, end):
    """First of a worker's tiles within a head's ``begin:end``, and the stride to the next.

    Workers that have the head to themselves take its tiles in turn, as runs far apart would meet in few memory
    channels; the one that came from the head before and the one that goes on to the next take the ends.
    """
    first_whole = tl.cdiv(begin, share)
    whole = end // share - first_whole
    among = worker - first_whole
    in_turn = (among >= 0) & (among < whole)
    first = tl.where(in_turn, first_whole * share - begin + among, start - begin)
    return first, tl.where(in_turn, whole, 1)


@triton.jit(do_not_specialize=["num_blocks", "list_size"])
def _ffd_attend_kernel(
    q_ptr, codes_ptr, half_step_ptr, residual_ptr, v_ptr, tail_ptr, lengths_ptr, delta_ptr,
    unit_max_ptr, zero_point_ptr, near_max_ptr, list_ptr, tiles_ptr, kept_ptr,
    max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, num_blocks, list_size,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GM: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr,
    DQP: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr, TAIL_TILE: tl.constexpr,
    BUFFERS: tl.constexpr, WORKERS: tl.constexpr, SHARED: tl.constexpr, ROW_HEADS: tl.constexpr, RP: tl.constexpr,
    CHUNK: tl.constexpr, FINE: tl.constexpr, NEAR_TILE: tl.constexpr, SINK_TILES: tl.constexpr, PIECES: tl.constexpr,
    N_LOCAL: tl.constexpr, NEAR_UNITS: tl.constexpr, NEAR_TEST: tl.constexpr,
    RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
    PER_HEAD: tl.constexpr, RETURN_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ROW_HEADS + WORKERS,) if SHARED, else (ROW_HEADS * (1 + WORKERS),); a program of each head has its tail.

    SHARED: worker w takes the w-th of equal shares of the tiles of all heads, one head after the other. Its part of
    head r is partial ``w + r``, which no other worker or head has; the tail of r is ``WORKERS + ROW_HEADS + r``.
    Otherwise worker w of head r takes every WORKERS-th kept tile; it is partial ``w + 1`` of the head, the tail 0.
    """
    if SHARED:
        worker = tl.program_id(0) - ROW_HEADS
        row_head = tl.program_id(0).to(tl.int64)
        part = WORKERS + ROW_HEADS + row_head
    else:
        worker = tl.program_id(0) % (WORKERS + 1) - 1
        row_head = (tl.program_id(0) // (WORKERS + 1)).to(tl.int64)
        part = tl.program_id(0).to(tl.int64)
    if worker < 0:
        length = tl.load(lengths_ptr + row_head // HKV)
        quantised = quantised_tokens(length, BLOCK)
        row_max, row_sum, acc = attend_tail(
            q_ptr + row_head * G * D, tail_ptr + row_head * BLOCK * D,
            v_ptr + (row_head * num_blocks * BLOCK + quantised) * D, length, quantised, scale_log2,
            G, D, GM, DP, BLOCK, TAIL_TILE, COMPUTE, PDL,
        )  # fmt: skip
        store_partial(max_ptr, sum_ptr, acc_ptr, part, row_max, row_sum, acc, G, D, GM, DP)
    elif SHARED:
        follow_previous_launch(PDL)
        o_r = tl.arange(0, RP)
        ends = tl.cumsum(tl.load(tiles_ptr + o_r, mask=o_r < ROW_HEADS, other=0), 0)
        total = tl.max(ends, 0)
        share = tl.maximum(tl.cdiv(total, WORKERS), 1)
        start = worker * share
        stop = tl.minimum(start + share, total)
        while start < stop:
            row_head = tl.sum((ends <= start).to(tl.int32), 0).to(tl.int64)
            begin, end = tiles_before(ends, row_head, RP)
            until = tl.minimum(stop, end)
            queries = load_queries(q_ptr + row_head * G * D, scale_log2, G, D, GM, DP, DQP, COMPUTE)
            first, stride = turns_of_worker(worker, share, start, begin, end)
            row_max, row_sum, acc = attend_tiles(
                queries, list_ptr + row_head * list_size, first, stride, until - start, row_head,
                codes_ptr, half_step_ptr, residual_ptr, v_ptr, zero_point_ptr, kept_ptr, scale_log2, num_blocks,
                G, D, GM, DP, DQP, BLOCK, SUB, TILE, BUFFERS, RESIDUAL, COMPUTE, PTX, SUBNORMAL, PER_HEAD,
            )  # fmt: skip
            store_partial(max_ptr, sum_ptr, acc_ptr, worker + row_head, row_max, row_sum, acc, G, D, GM, DP)
            start = until
    else:
        length = tl.load(lengths_ptr + row_head // HKV)
        o_g = tl.arange(0, GP)
        delta = tl.load(delta_ptr + (row_head % HKV) * G + o_g, mask=o_g < G, other=0.0)
        queries = load_queries(q_ptr + row_head * G * D, scale_log2, G, D, GM, DP, DQP, COMPUTE)
        follow_previous_launch(PDL)  # the scan; queries, lengths and margins are older than it
        p_list = list_ptr + (row_head * WORKERS + worker) * list_size
        num_kept, passes = collect_kept(
            unit_max_ptr, near_max_ptr, delta, row_head, length, num_blocks, p_list, kept_ptr, worker, WORKERS,
            G, GP, BLOCK, SUB, TILE, CHUNK, FINE, NEAR_TILE, SINK_TILES, PIECES, N_LOCAL, NEAR_UNITS, NEAR_TEST,
            RETURN_KEPT,
        )  # fmt: skip
        quantised = quantised_tokens(length, BLOCK)
        if worker == WORKERS - 1:  # the one with the fewest tiles counts
            count_selective_step(
                ledger_ptr, active_ptr, row_head // HKV, row_head, length, quantised, num_kept * SUB,
                tl.sum(passes, 0) * SUB, length - quantised, G, GP,
            )  # fmt: skip
        row_max, row_sum, acc = attend_tiles(
            queries, p_list, 0, 1, (num_kept * (SUB // TILE) - worker + WORKERS - 1) // WORKERS, row_head,
            codes_ptr, half_step_ptr, residual_ptr, v_ptr, zero_point_ptr, kept_ptr, scale_log2, num_blocks,
            G, D, GM, DP, DQP, BLOCK, SUB, TILE, BUFFERS, RESIDUAL, COMPUTE, PTX, SUBNORMAL, PER_HEAD,
        )  # fmt: skip
        store_partial(max_ptr, sum_ptr, acc_ptr, part, row_max, row_sum, acc, G, D, GM, DP)


def ffd_attend(layer: FFDLayer, q: Tensor, scale: float, scratch: FFDScratch, kept: Tensor | None) -> None:
    """Launch attention to what the scan's maxima keep and to the tails; fills ``scratch.partials``.

    ``kept`` uint8 [B, Hkv, sub-blocks, G] as `ffd_keep` wrote it, or to be written where it did not run. Then the
    step is counted here too.
    """
    g, m = layer.geometry, layer.method
    gpu = hardware(q.device)
    group, d, row_heads = g.group_size, g.head_dim, g.batch_size * g.num_kv_heads
    padded_d = padded(d, 16)
    tail_bytes = 2 * padded_d * layer.values.element_size()
    tail_tile, _ = fit_tile(min(ATTEND_TILE, m.block_size), tail_bytes, gpu.shared_memory // ATTEND_PROGRAMS, 1)
    partials = scratch.partials
    grid = row_heads + scratch.workers if scratch.shared else row_heads * (1 + scratch.workers)
    _ffd_attend_kernel[(grid,)](
        q, layer.codes, layer.half_step, stored_residual(layer), layer.values, layer.tail, layer.lengths,
        layer.delta_nats, scratch.unit_max, scratch.zero_point, scratch.near_max, scratch.kept_list, scratch.tiles,
        scratch.tiles if kept is None else kept, partials.row_max, partials.row_sum, partials.acc,
        layer.ledger.counters, layer.ledger.active, scale * LOG2_E.value, layer.half_step.shape[2],
        scratch.kept_list.shape[-1],
        HKV=g.num_kv_heads, G=group, D=d, GM=padded(group, 16), GP=padded(group, 1), DP=padded_d,
        DQP=padded(d // 4, 16), BLOCK=m.block_size, SUB=m.test_size, TILE=scratch.tile, TAIL_TILE=tail_tile,
        BUFFERS=scratch.buffers, WORKERS=scratch.workers, SHARED=scratch.shared, ROW_HEADS=row_heads,
        RP=padded(row_heads, 1), **keep_options(layer, scratch),
        RESIDUAL=RESIDUAL_KINDS[m.residual], COMPUTE=compute_dtype(g.dtype), PTX=gpu.ptx, SUBNORMAL=gpu.subnormals,
        PER_HEAD=m.select_per == "head", RETURN_KEPT=kept is not None, PDL=gpu.dependent_launch,
        num_warps=ATTEND_WARPS, **gpu.launch_options,
    )  # fmt: skip
