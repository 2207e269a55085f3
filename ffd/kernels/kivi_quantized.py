"""Attention to KIVI's quantised tokens: softmax over the columns of heads and turns of `ffd.kernels.kivi_keys`."""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.common import prefetch_to_l2
from ffd.kernels.kivi_codes import extended
from ffd.kernels.kivi_keys import (
    code_scores,
    load_key_steps,
    load_key_words,
    load_query_fields,
    minimum_of_tile,
    minimum_scores,
    score_unit,
)
from ffd.kernels.kivi_values import (
    WEIGHT_BITS,
    add_codes,
    add_minima,
    load_value_minima,
    load_value_steps,
    load_value_words,
    restored_sum,
)
from ffd.minmax import BOUND_VECTOR

VECTOR = tl.constexpr(BOUND_VECTOR)


@triton.jit
def prefetch_tile(
    key_words_ptr, key_step_ptr, value_words_ptr, value_minimum_ptr, value_step_ptr, stride,
    D: tl.constexpr, WORDS: tl.constexpr, TURNS: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Ask for everything a tile reads but the minima of its keys."""
    prefetch_to_l2(key_words_ptr, TILE * WORDS)
    prefetch_to_l2(key_step_ptr, TURNS * D)
    prefetch_to_l2(value_words_ptr, TILE * WORDS)
    for group in tl.static_range(GROUPS):
        prefetch_to_l2(value_minimum_ptr + group * stride, TILE)
        prefetch_to_l2(value_step_ptr + group * stride, TILE)


@triton.jit
def attend_quantized(
    q_ptr, key_words_ptr, key_minimum_ptr, key_step_ptr, value_words_ptr, value_minimum_ptr, value_step_ptr,
    max_ptr, sum_ptr, acc_ptr, slot, worker, count, value_tokens, scale_log2, G,
    D: tl.constexpr, DP: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr, TURNS: tl.constexpr,
    ROWS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORKERS: tl.constexpr, STAGES: tl.constexpr,
    OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Softmax over a worker's share of ``count`` tokens, in tiles of TURNS groups of keys.

    Minima are scored 16 groups at a time. Writes the worker's partial, max [G], sum [G] and acc [G, D].
    """
    words: tl.constexpr = D * BITS // 16
    groups: tl.constexpr = D // GROUP
    columns: tl.constexpr = HEADS * TURNS
    tile: tl.constexpr = TURNS * GROUP
    o_t = tl.arange(0, tile)[:, None]
    own_turn = o_t // GROUP == (tl.arange(0, columns) // HEADS)[None, :]
    queries = load_query_fields(q_ptr, G, D, words, WP, HEADS, columns, BITS, OPERAND, SUBNORMAL)
    unit = scale_log2 * score_unit(SUBNORMAL)
    row_max = tl.full([columns], float("-inf"), tl.float32)
    of_minima = tl.zeros([ROWS, columns], tl.float32)
    sums = ()
    for _ in tl.static_range(16 // BITS):
        sums = extended(sums, tl.zeros([WP, columns], tl.float32))
    tiles = tl.cdiv(count, tile)
    share = tl.cdiv(tiles, WORKERS)
    last = tl.minimum((worker + 1) * share, tiles)
    for begin in tl.range(worker * share, last, 16 // TURNS, num_stages=1):
        if PTX and (begin + 1) * tile <= count:
            # The loop's first copies are asked for only once the product of the minima is on its way.
            prefetch_tile(
                key_words_ptr + begin * (tile * words), key_step_ptr + begin * (TURNS * D),
                value_words_ptr + begin * (tile * words), value_minimum_ptr + begin * tile,
                value_step_ptr + begin * tile, value_tokens, D, words, TURNS, tile, groups,
            )  # fmt: skip
        minima = minimum_scores(
            q_ptr, key_minimum_ptr + begin * (TURNS * D), tl.cdiv(count, GROUP) - begin * TURNS, G,
            D, DP, HEADS, columns, 16, OPERAND,
        )  # fmt: skip
        for t in tl.range(begin, tl.minimum(begin + 16 // TURNS, last), num_stages=STAGES):
            start = t * tile
            left = count - start
            key_words = load_key_words(key_words_ptr + start * words, left, words, WP, tile)
            value_words = load_value_words(value_words_ptr + start * words, left, words, WP, tile)
            key_steps = load_key_steps(
                key_step_ptr + t * (TURNS * D), tl.cdiv(left, GROUP), D, words, WP, HEADS, columns, BITS, OPERAND
            )
            # Up to a whole vector; no weight falls on what is too much, which is finite.
            vectors = tl.cdiv(left, VECTOR) * VECTOR
            value_steps = load_value_steps(value_step_ptr + start, vectors, value_tokens, groups, tile)
            value_minima = load_value_minima(value_minimum_ptr + start, vectors, value_tokens, groups, ROWS, tile)
            minimum = minimum_of_tile(minima, (t - begin) * TURNS, HEADS) * scale_log2
            scores = code_scores(key_words, queries, key_steps, BITS, OPERAND, PTX, SUBNORMAL)
            scores = tl.where(own_turn & (o_t < left), scores, float("-inf"))
            # A column's minimum and unit are the same for all its tokens: they follow the maximum.
            new_max = tl.maximum(row_max, tl.max(scores, 0) * unit + minimum)
            # Where nothing has been met, -inf minus itself would give NaN.
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            shrink = tl.exp2(row_max - finite_max)
            weights = tl.exp2(scores * unit + (minimum - finite_max + WEIGHT_BITS)[None, :]).to(OPERAND)
            sums = add_codes(
                sums, value_words, weights, value_steps, shrink, words, BITS, GROUP, OPERAND, PTX, SUBNORMAL
            )
            of_minima = add_minima(of_minima, value_minima, weights, shrink, OPERAND)
            row_max = new_max

    # Columns of one head are merged: [TURNS, HEADS].
    by_turn = tl.reshape(row_max, [TURNS, HEADS])
    top = tl.max(by_turn, 0)
    finite_top = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.reshape(tl.exp2(by_turn - finite_top[None, :]), [columns])
    of_minima = of_minima * shrink[None, :]
    row_sum = tl.sum(tl.where((tl.arange(0, ROWS) == ROWS // 2)[:, None], of_minima, 0.0), 0)
    o_h = tl.arange(0, HEADS)
    o_w = tl.arange(0, WP)[:, None]
    tl.store(max_ptr + slot * G + o_h, top - WEIGHT_BITS, mask=o_h < G)
    tl.store(sum_ptr + slot * G + o_h, tl.sum(tl.reshape(row_sum, [TURNS, HEADS]), 0), mask=o_h < G)
    met = ((top > float("-inf")) & (o_h < G))[None, :] & (o_w < words)
    for field in tl.static_range(16 // BITS):
        acc = restored_sum(sums[field] * shrink[None, :], of_minima, field, words, BITS, GROUP, SUBNORMAL)
        acc = tl.sum(tl.reshape(acc, [WP, TURNS, HEADS]), 1)
        tl.store(acc_ptr + (slot * G + o_h)[None, :] * D + field * words + o_w, acc, mask=met)
