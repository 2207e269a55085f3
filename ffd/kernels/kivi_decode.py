"""KIVI's decode: split-K attention over low-bit keys and values, and its reduction.

Programs are single warps: nothing in the loop waits for another warp, and every operand is built once where it is
used. A kv head's codes are read once for its whole group of query heads, tokens and channels are the long sides of
the tensor-core products. The newest tokens, whose values are in full precision, belong to programs of their own, so
that the loop over quantised tokens has no cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ffd.kernels.common import ESTIMATED, LOG2_E, count_selective_step, follow_previous_launch
from ffd.kernels.kivi_exact import attend_exact
from ffd.kernels.kivi_quantized import attend_quantized
from ffd.kernels.launch import KIVI_PROGRAMS, Partials, compute_dtype, hardware, padded, scratch_of
from ffd.kernels.split_reduce import split_reduce

if TYPE_CHECKING:
    from ffd.methods.kivi import KiviLayer

_EXACT_TILE = 16
"""Tokens of a tile in full precision, at most a group."""
_MOST_EXACT = 16
"""Programs of a kv head for such tiles, at most."""


@triton.jit
def _kivi_decode_kernel(
    q_ptr, lengths_ptr, key_words_ptr, key_minimum_ptr, key_step_ptr, key_buffer_ptr,
    value_words_ptr, value_minimum_ptr, value_step_ptr, value_window_ptr,
    max_ptr, sum_ptr, acc_ptr, ledger_ptr, active_ptr,
    scale_log2, key_tokens, key_slots, value_tokens, value_slots,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, WP: tl.constexpr,
    HEADS: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr, EXACT_COLUMNS: tl.constexpr,
    EXACT_TILE: tl.constexpr, WORKERS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, COMPUTE: tl.constexpr, OPERAND: tl.constexpr, PTX: tl.constexpr,
    SUBNORMAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (EXACT + WORKERS, B * Hkv): EXACT programs share the tokens whose values are in full precision."""
    follow_previous_launch(PDL)
    part = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // HKV
    length = tl.load(lengths_ptr + row)
    quantized_keys = (length - 1) // RESIDUAL * RESIDUAL
    quantized_values = tl.maximum(length - 1 - RESIDUAL, 0)
    words: tl.constexpr = D * BITS // 16
    groups: tl.constexpr = D // GROUP
    p_q = q_ptr + row_head * G * D
    p_key_words = key_words_ptr + row_head * key_tokens * words
    p_key_minimum = key_minimum_ptr + row_head * (key_tokens // GROUP) * D
    p_key_step = key_step_ptr + row_head * (key_tokens // GROUP) * D
    slot = row_head * (EXACT + WORKERS) + part
    if part < EXACT:
        attend_exact(
            p_q, p_key_words, p_key_minimum, p_key_step, key_buffer_ptr + row_head * key_slots * D,
            value_window_ptr + row_head * value_slots * D, max_ptr, sum_ptr, acc_ptr, slot,
            part, EXACT, quantized_keys, quantized_values, length, scale_log2, G,
            D, DP, WP, EXACT_COLUMNS, EXACT_TILE, BITS, GROUP, RESIDUAL, COMPUTE, OPERAND, PTX, SUBNORMAL,
        )  # fmt: skip
        if part == 0:
            everything = tl.full([GP], 0, tl.int32) + length
            p_counters, active = count_selective_step(
                ledger_ptr, active_ptr, row, row_head, length, quantized_keys, length, everything, 0, G, GP
            )
            tl.store(p_counters + ESTIMATED, tl.load(p_counters + ESTIMATED) + quantized_values * active)
    else:
        attend_quantized(
            p_q, p_key_words, p_key_minimum, p_key_step, value_words_ptr + row_head * value_tokens * words,
            value_minimum_ptr + row_head * value_tokens * groups, value_step_ptr + row_head * value_tokens * groups,
            max_ptr, sum_ptr, acc_ptr, slot, part - EXACT, quantized_values, value_tokens, scale_log2, G,
            D, DP, WP, HEADS, TURNS, ROWS, BITS, GROUP, WORKERS, STAGES, OPERAND, PTX, SUBNORMAL,
        )  # fmt: skip


def kivi_decode(layer: KiviLayer, q: Tensor, scale: float) -> Tensor:
    """Attend to everything: q [B, Hq, d] -> [B, Hq, d] in its dtype; adds one step to the ledger."""
    q = q.contiguous()
    g, m = layer.geometry, layer.method
    b, hkv, group, d = g.batch_size, g.num_kv_heads, g.group_size, g.head_dim
    gpu = hardware(q.device)
    # Of a tensor core's eight columns turns fill what the heads leave; larger tiles need more registers.
    turns = max(1, min(8 // padded(group, 1), 64 // m.group_size))
    heads = padded(group, max(1, 8 // turns))
    value_tokens = layer.value_codes.shape[2]
    # One wave, and no more workers than finish as early.
    warps, registers = KIVI_PROGRAMS[m.bits]
    programs = warps * gpu.multiprocessors // (b * hkv)
    exact_tiles = triton.cdiv(min(m.residual_length, g.capacity), _EXACT_TILE) + 1
    exact = max(1, min(exact_tiles, _MOST_EXACT, programs // 2))
    tiles = triton.cdiv(value_tokens, turns * m.group_size)
    workers = triton.cdiv(tiles, triton.cdiv(tiles, max(1, programs - exact)))
    partials = scratch_of(layer.ledger, lambda: Partials.allocate(b * hkv, exact + workers, group, d, q.device))
    out = torch.empty_like(q)
    limit = {"maxnreg": registers} if gpu.ptx and q.dtype != torch.float32 else {}
    _kivi_decode_kernel[(exact + workers, b * hkv)](
        q, layer.lengths, layer.key_codes, layer.key_minimum, layer.key_step, layer.key_buffer,
        layer.value_codes, layer.value_minimum, layer.value_step, layer.value_window,
        partials.row_max, partials.row_sum, partials.acc, layer.ledger.counters, layer.ledger.active,
        scale * LOG2_E.value,
        layer.key_codes.shape[2], layer.key_buffer.shape[2], value_tokens, layer.value_window.shape[2],
        HKV=hkv, G=group, D=d, GP=padded(group, 1), DP=padded(d, 16), WP=padded(d * m.bits // 16, 16),
        HEADS=heads, TURNS=turns, ROWS=2 * padded(d // m.group_size, 8), EXACT=exact, EXACT_COLUMNS=padded(group, 8),
        EXACT_TILE=_EXACT_TILE, WORKERS=workers, BITS=m.bits, GROUP=m.group_size, RESIDUAL=m.residual_length, STAGES=2,
        COMPUTE=compute_dtype(q.dtype), OPERAND=tl.float32 if q.dtype == torch.float32 else tl.float16,
        PTX=gpu.ptx, SUBNORMAL=gpu.subnormals, PDL=gpu.dependent_launch, num_warps=1, **limit, **gpu.launch_options,
    )  # fmt: skip
    split_reduce(partials, out)
    return out
