"""Scores of KIVI's quantised keys: ``sum(q * minimum) + sum((q * step) * code)``, tokens as rows.

A column of the product is a query head at one of TURNS groups of tokens: column ``turn * HEADS + head`` carries the
steps of the tile's group ``turn``, and its scores of other groups are no scores. The tensor core has eight columns
anyway, and what four heads leave empty saves half of the operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffd.kernels.kivi_codes import code_unit, codes_of_field, extended, field_gain, operand_product

# Queries are divided by 16: times the step of a channel of outliers they reach up to a million in fp16. What the
# smallest lose is far below what fp16 rounds of the others.
QUERY_GAIN = tl.constexpr(2.0**-4)


@triton.jit
def score_unit(SUBNORMAL: tl.constexpr):
    """Turns `code_scores` into scores."""
    unit: tl.constexpr = 1.0 / (code_unit(SUBNORMAL) * QUERY_GAIN)
    return unit


@triton.jit
def load_query_fields(
    q_ptr, G, D: tl.constexpr, WORDS: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    BITS: tl.constexpr, OPERAND: tl.constexpr, SUBNORMAL: tl.constexpr,
):  # fmt: skip
    """A kv head's queries, unscaled, as columns by fields: OPERAND [WP, COLUMNS] each.

    They are multiplied by QUERY_GAIN and divided by the field's own gain. A thread holds two neighbouring words, as
    of the steps in `load_key_steps`: four, as Triton would have it, need registers that the loop lacks.
    """
    head = (tl.arange(0, COLUMNS) % HEADS)[None, :]
    o_w = tl.max_contiguous(tl.arange(0, WP)[:, None], [2, 1])
    mask = (head < G) & (o_w < WORDS)
    fields = ()
    for field in tl.static_range(16 // BITS):
        b_q = tl.load(q_ptr + head * D + field * WORDS + o_w, mask=mask, other=0.0).to(tl.float32)
        fields = extended(fields, (b_q * (QUERY_GAIN / field_gain(field, BITS, SUBNORMAL))).to(OPERAND))
    return fields


@triton.jit
def load_key_steps(
    step_ptr, groups, D: tl.constexpr, WORDS: tl.constexpr, WP: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr, BITS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Steps of the next ``groups`` groups, by fields and columns as `load_query_fields` lays out its own."""
    turn = (tl.arange(0, COLUMNS) // HEADS)[None, :]
    o_w = tl.max_contiguous(tl.arange(0, WP)[:, None], [2, 1])
    mask = (turn < groups) & (o_w < WORDS)
    fields = ()
    for field in tl.static_range(16 // BITS):
        fields = extended(fields, tl.load(step_ptr + turn * D + field * WORDS + o_w, mask=mask, other=0.0).to(OPERAND))
    return fields


@triton.jit
def load_key_words(words_ptr, count, WORDS: tl.constexpr, WP: tl.constexpr, TILE: tl.constexpr):
    """Codes of the next TILE tokens, of which ``count`` exist, int16 [TILE, WP]."""
    o_t = tl.arange(0, TILE)[:, None]
    o_w = tl.arange(0, WP)[None, :]
    return tl.load(words_ptr + o_t * WORDS + o_w, mask=(o_t < count) & (o_w < WORDS), other=0)


@triton.jit
def code_scores(
    words, queries, steps, BITS: tl.constexpr, OPERAND: tl.constexpr, PTX: tl.constexpr, SUBNORMAL: tl.constexpr
):
    """``sum((q * step) * code)``, fp32 [TILE, COLUMNS] to be multiplied by `score_unit`."""
    acc = tl.zeros([words.shape[0], queries[0].shape[1]], tl.float32)
    for field in tl.static_range(16 // BITS):
        operand = operand_product(queries[field], steps[field], PTX)
        codes = codes_of_field(words, field, BITS, OPERAND, PTX, SUBNORMAL)
        acc = tl.dot(codes, operand, acc, input_precision="ieee")
    return acc


@triton.jit
def minimum_scores(
    q_ptr, minimum_ptr, groups, G, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """``sum(q * minimum)`` of the next ROWS groups, of which ``groups`` exist, exactly: fp32 [ROWS, COLUMNS]."""
    o_r = tl.arange(0, ROWS)[:, None]
    o_d = tl.arange(0, DP)
    head = (tl.arange(0, COLUMNS) % HEADS)[None, :]
    m_d = o_d < D
    minimum = tl.load(minimum_ptr + o_r * D + o_d[None, :], mask=(o_r < groups) & m_d[None, :], other=0.0)
    b_q = tl.load(q_ptr + head * D + o_d[:, None], mask=(head < G) & m_d[:, None], other=0.0)
    return tl.dot(minimum.to(OPERAND), b_q.to(tl.float32).to(OPERAND), input_precision="ieee")


@triton.jit
def minimum_of_tile(minima, first, HEADS: tl.constexpr):
    """Each column's own group from `minimum_scores`, where the tile's first group is row ``first``: fp32 [COLUMNS]."""
    o_r = tl.arange(0, minima.shape[0])[:, None]
    turn = (tl.arange(0, minima.shape[1]) // HEADS)[None, :]
    return tl.sum(tl.where(o_r == first + turn, minima, 0.0), 0)
