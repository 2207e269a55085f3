"""Attention to KIVI's newest tokens, whose values, and most of whose keys, are in full precision."""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.kivi_keys import (
    code_scores,
    load_key_steps,
    load_key_words,
    load_query_fields,
    minimum_scores,
    score_unit,
)


@triton.jit
def attend_exact(
    q_ptr, key_words_ptr, key_minimum_ptr, key_step_ptr, key_buffer_ptr, value_window_ptr,
    max_ptr, sum_ptr, acc_ptr, slot, first, stride, quantized_keys, quantized_values, length, scale_log2, G,
    D: tl.constexpr, DP: tl.constexpr, WP: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr,
    OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """Softmax over tokens ``quantized_values .. length``, every ``stride``-th tile from tile ``first`` on.

    A tile lies in one group of keys. Writes the program's partial, max [G], sum [G] and acc [G, D].
    """
    words: tl.constexpr = D * BITS // 16
    o_h = tl.arange(0, COLUMNS)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    b_q = tl.load(q_ptr + o_h[None, :] * D + o_d[:, None], mask=(o_h < G)[None, :] & m_d[:, None], other=0.0)
    row_max = tl.full([COLUMNS], float("-inf"), tl.float32)
    row_sum = tl.zeros([COLUMNS], tl.float32)
    acc = tl.zeros([DP, COLUMNS], tl.float32)
    for start in tl.range(quantized_values // TILE * TILE + first * TILE, length, stride * TILE, num_stages=1):
        token = start + tl.arange(0, TILE)
        m_t = (token >= quantized_values) & (token < length)
        p_v = value_window_ptr + (token % (RESIDUAL + 1))[None, :] * D + o_d[:, None]
        b_v = tl.load(p_v, mask=m_t[None, :] & m_d[:, None], other=0.0).to(COMPUTE)
        if start < quantized_keys:
            b_words = load_key_words(key_words_ptr + start * words, TILE, words, WP, TILE)
            group = start // GROUP
            steps = load_key_steps(key_step_ptr + group * D, 1, D, words, WP, COLUMNS, COLUMNS, BITS, OPERAND)
            queries = load_query_fields(q_ptr, G, D, words, WP, COLUMNS, COLUMNS, BITS, OPERAND, SUBNORMAL)
            minima = minimum_scores(q_ptr, key_minimum_ptr + group * D, 1, G, D, DP, COLUMNS, COLUMNS, 16, OPERAND)
            scores = code_scores(b_words, queries, steps, BITS, OPERAND, PTX, SUBNORMAL) * score_unit(SUBNORMAL)
            scores += tl.sum(minima, 0)[None, :]
        else:
            p_k = key_buffer_ptr + (token % RESIDUAL)[:, None] * D + o_d[None, :]
            b_k = tl.load(p_k, mask=m_t[:, None] & m_d[None, :], other=0.0)
            scores = tl.dot(b_k.to(COMPUTE), b_q.to(COMPUTE), input_precision="ieee")
        scores = tl.where(m_t[:, None], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        # Where nothing has been met, -inf minus itself would give NaN.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(row_max - finite_max)
        weights = tl.exp2(scores - finite_max[None, :])
        row_sum = row_sum * shrink + tl.sum(weights, 0)
        acc = tl.dot(b_v, weights.to(COMPUTE), acc * shrink[None, :], input_precision="ieee")
        row_max = new_max
    tl.store(max_ptr + slot * G + o_h, row_max, mask=o_h < G)
    tl.store(sum_ptr + slot * G + o_h, row_sum, mask=o_h < G)
    met = (row_max > float("-inf")) & (o_h < G)
    tl.store(acc_ptr + (slot * G + o_h)[None, :] * D + o_d[:, None], acc, mask=met[None, :] & m_d[:, None])
